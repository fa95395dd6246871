"""From slots to the device: a fixed number of buffers, filled one ahead of the consumer and used again. In the parent.

A batch that is ready is copied while the one before it is computed on (``prefetch``); ``deliver`` hands it out. A
buffer is a block for each leaf, and each block comes back when nothing uses that leaf any more. The host memory of a
copy is kept until the device has read it; the slot is free then. What the consumer holds beyond the buffers is
allocated for it alone, and told.
"""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from penstock._core.cache_device import DeviceStore, Origin
from penstock._core.device import Device, Gathers, Shelves
from penstock._core.errors import BudgetError, FeedClosed
from penstock._core.fill import castings
from penstock._core.layout import LINE, aligned
from penstock._core.plan import INDEX_BYTES
from penstock._core.pool import Block, Pool, size_class
from penstock._core.spec import Array, Cast, Leaf, Spec, row_bytes

__all__ = ["Delivery", "arriving", "device_dtypes", "device_row_bytes"]

Casts = Sequence[np.dtype[Any] | None]


def device_dtypes(spec: Spec, on_device: Cast) -> Casts:
    """For each leaf of a sample the dtype that it is cast to on the device, or None."""
    if on_device is None:
        return [None] * len(spec.leaves)
    return [None if leaf.stored == leaf.dtype else leaf.stored for leaf in arriving(spec, on_device).leaves]


def arriving(spec: Spec, on_device: Cast) -> Spec:
    """The form of a sample when it is on the device: ``dtype`` as it travelled, ``stored`` as it is there."""
    travelled = tuple(dataclasses.replace(leaf, dtype=leaf.stored) for leaf in spec.leaves)
    return Spec(spec.tree, travelled).cast(on_device)


def device_row_bytes(device: Device, spec: Spec, on_device: Cast) -> tuple[int, ...]:
    """Bytes of a sample in each block of a buffer: as it arrives, and as it is cast."""
    return tuple(size for _, sizes in _row_sizes(device, spec, on_device) for size in sizes)


def _row_sizes(device: Device, spec: Spec, on_device: Cast) -> list[tuple[int, tuple[int, ...]]]:
    found: list[tuple[int, tuple[int, ...]]] = []
    for place, (leaf, cast) in enumerate(zip(spec.leaves, device_dtypes(spec, on_device), strict=True)):
        if _goes(device, leaf):
            size = row_bytes(leaf)
            found.append((place, (size,) if cast is None else (size, size // leaf.stored.itemsize * cast.itemsize)))
    return found


def _goes(device: Device, leaf: Leaf) -> bool:
    return leaf.kind == "array" and device.takes(leaf.stored)


@dataclasses.dataclass(slots=True)
class _Sent:
    """A batch on its way."""

    key: tuple[int, int] | None
    values: list[Any]
    """What is copied from, kept until it was."""
    places: list[int]
    casts: Casts
    blocks: list[list[Block]]
    """For each place the block that it is copied to, and one that it is cast to."""
    ticket: Any
    extra: bool


class Delivery:
    """The buffers of one feed on its device."""

    def __init__(self, device: Device, *, buffers: int, budget: int | None, on_device: Cast, listed: bool) -> None:
        self.device = device
        self._buffers = buffers
        self._budget = budget
        self._on_device = on_device
        self._listed = listed
        self._pool = Pool(device, budget)
        self._fixed: dict[int, tuple[int, ...]] | None = None
        self._casts: Casts = ()
        self._largest = 0
        self._extra = 0
        self._search_at_s = 0.0
        self._ahead: _Sent | None = None
        self._unread: deque[_Sent] = deque()
        self._pinned: list[int] = []
        self._store: DeviceStore | None = None
        self._shelves: Shelves | None = None
        self._turn = threading.RLock()  # a feed may be closed in another thread
        self._closed = False

    @property
    def allocations(self) -> int:
        """Blocks that were ever allocated, those beyond the buffers too."""
        kept = 0 if self._shelves is None else len(self._shelves.blocks) + 1
        return self._pool.allocations + self._extra + kept

    def reserve(self, spec: Spec, rows: int) -> None:
        """Allocate all buffers now: every batch has the same leaves, and at most so many rows."""
        sizes = _row_sizes(self.device, spec, self._on_device)
        self._fixed = {place: tuple(aligned(size * rows) or LINE for size in row) for place, row in sizes}
        self._casts = device_dtypes(spec, self._on_device)
        one = [size for row in self._fixed.values() for size in row]
        self._pool = Pool(self.device, self._buffers * sum(one), exact=True)
        blocks = self._pool.take(one * self._buffers)
        for block in blocks or ():
            self._pool.give_back(block)

    def keep(self, store: DeviceStore, spec: Spec, rows: int) -> None:
        """Allocate the memory of samples that are kept, and of as many as a batch has that only come by."""
        total = store.spare + rows
        blocks: list[Any] = []
        try:
            for leaf in spec.leaves:
                blocks.append(self.device.allocate(aligned(row_bytes(leaf) * total) or LINE))
            blocks.append(self.device.allocate(aligned(INDEX_BYTES * rows)))
        except BaseException:
            for block in blocks:
                self.device.free(block)
            raise
        forms = tuple((leaf.shape, leaf.stored) for leaf in spec.leaves)
        self._store, self._shelves = store, Shelves(tuple(blocks[:-1]), forms, total, rows, blocks[-1])

    def pin(self, windows: Sequence[tuple[int, int]]) -> tuple[str, ...]:
        """Let the device read the arena (addresses and sizes) directly, if it can; notes for the plan."""
        notes = []
        for address, size in windows:
            if (note := self.device.pin(address, size)) is not None:
                self._pinned.append(address)
                notes.append(note)
        return tuple(dict.fromkeys(notes))

    def prefetch(self, key: tuple[int, int], values: list[Any], batch: Any, origin: Origin | None) -> None:
        """Begin to copy a batch that will be asked for next, if there is a buffer for it."""
        with self._turn:
            if self._ahead is None and not self._closed:
                self._ahead = self._send(key, values, batch, origin, must=False)

    def deliver(
        self, key: tuple[int, int] | None, values: list[Any], batch: Any, origin: Origin | None = None
    ) -> tuple[list[Any], bool]:
        """The leaves of a batch on the device, and whether memory had to be allocated for them beyond the buffers.

        Where samples are kept there, ``values`` have only those that come from the host.
        """
        with self._turn:
            return self._deliver(key, values, batch, origin)

    def _deliver(
        self, key: tuple[int, int] | None, values: list[Any], batch: Any, origin: Origin | None
    ) -> tuple[list[Any], bool]:
        if self._closed:
            raise FeedClosed("the feed was closed: make a new one to go on")
        sent, self._ahead = self._ahead, None
        if sent is not None and (key is None or sent.key != key):  # of an iteration that was ended
            self._drop(sent)
            sent = None
        if sent is None:
            sent = self._send(key, values, batch, origin, must=True)
            assert sent is not None
        goes = set(sent.places)
        leaves = [value if place in goes else _own(value) for place, value in enumerate(values)]
        try:
            while sent.places:
                place, blocks = sent.places.pop(), sent.blocks.pop()
                value = values[place]
                shape = value.shape if origin is None else (len(origin.held), *value.shape[1:])
                leaves[place] = self._handed_out(sent, shape, value.dtype, sent.casts[place], blocks)
        except BaseException:
            self._drop(sent)  # what was not handed out
            raise
        sent.values.extend(values)  # these hold the lease of the slot
        self._unread.append(sent)
        # One copy may be under way while the next is asked for; before that its slot must be free.
        self.settle(most=1)
        return leaves, sent.extra

    def settle(self, *, most: int) -> None:
        """Let go of host memory that the device has read, and wait until at most so many copies are under way."""
        unread = self._unread
        while unread and self.device.copied(unread[0].ticket, wait=len(unread) > most):
            unread.popleft()

    def close(self) -> None:
        """Wait for what is under way and free the buffers; what the consumer holds stays right, and is freed later."""
        with self._turn:
            self._closed = True
            sent, self._ahead = self._ahead, None
            if sent is not None:
                self._drop(sent)
            self.settle(most=0)
            for address in self._pinned:
                self.device.unpin(address)
            self._pinned.clear()
            self.device.settle()
            self._pool.close()
            if self._shelves is not None:
                for block in (*self._shelves.blocks, self._shelves.index):
                    self.device.free(block)
                self._shelves = None

    def _send(
        self, key: tuple[int, int] | None, values: list[Any], batch: Any, origin: Origin | None, *, must: bool
    ) -> _Sent | None:
        device = self.device
        places = [i for i, v in enumerate(values) if isinstance(v, np.ndarray | np.generic) and device.takes(v.dtype)]
        casts = self._casts if self._fixed is not None else self._casts_of(values, batch)
        sizes = [self._sizes_of(place, values[place], casts[place]) for place in places]
        taken = self._take([size for row in sizes for size in row], must=must)
        if taken is None:
            return None
        blocks, extra = taken
        each = iter(blocks)
        rows = [[next(each) for _ in row] for row in sizes]
        arrays = [np.ascontiguousarray(values[place]) for place in places]
        # ascontiguousarray makes one of a number, which has no axes.
        arrays = [a.reshape(values[p].shape) for p, a in zip(places, arrays, strict=True)]
        try:
            ticket = self._copied([row[0].memory for row in rows], arrays, origin)
        except BaseException:
            self._return(rows, extra)
            raise
        return _Sent(key, arrays, places, casts, rows, ticket, extra)

    def _copied(self, blocks: list[Any], arrays: list[Array], origin: Origin | None) -> Any:
        """Begin to copy a batch, from the host, from what is kept on the device, or from both."""
        store, shelves, device = self._store, self._shelves, self.device
        if origin is None or store is None or shelves is None:
            return device.copy(blocks, arrays)
        from_host = origin.held < 0
        coming = origin.samples[from_host]
        start = store.room_for(coming)
        if start is None and len(coming) == len(origin.held):
            return device.copy(blocks, arrays)
        assert isinstance(device, Gathers)
        rows = origin.held.copy()
        # What there is no room for follows in the spare rows, which begin where the others end.
        put = store.spare if start is None else start
        rows[from_host] = put + np.arange(len(coming))
        ticket = device.gather(shelves, arrays, put, rows=rows, blocks=blocks)
        if start is not None:
            store.arrived(coming)
        return ticket

    def _take(self, sizes: list[int], *, must: bool) -> tuple[list[Block], bool] | None:
        need = sum(sizes)
        for again in (False, True):
            if again:
                # Perhaps garbage holds some. It takes long to find out, so a hundredth of the time at most goes there.
                began = time.monotonic()
                if not must or began < self._search_at_s:
                    continue
                gc.collect()
                self._search_at_s = began + 100 * (time.monotonic() - began)
            if self._fixed is None:
                self._largest = max(self._largest, need)
                self._pool.settle()
                if self._pool.lent_bytes + need > max(2, self._buffers) * self._largest:
                    continue
            if (blocks := self._pool.take(sizes)) is not None:
                return blocks, False
        if not must:
            return None
        if self._fixed is None and self._budget is not None and need > self._budget:
            raise BudgetError(
                f"a batch takes {need} bytes on {self.device.name}, and device_memory is {self._budget}: give "
                f"device_memory={2 * need}, or a smaller batch_size",
                least=2 * need,
            )
        self._extra += len(sizes)
        return [Block(size, self.device.allocate(size)) for size in sizes], True

    def _sizes_of(self, place: int, value: Any, cast: np.dtype[Any] | None) -> tuple[int, ...]:
        if self._fixed is not None:
            return self._fixed[place]
        sizes = (value.nbytes,) if cast is None else (value.nbytes, value.size * cast.itemsize)
        return tuple(size_class(size) for size in sizes)

    def _casts_of(self, values: list[Any], batch: Any) -> Casts:
        casts: list[np.dtype[Any] | None] = [None] * len(values)
        if self._on_device is not None:
            arrays = [np.asarray(v) if isinstance(v, np.ndarray | np.generic) else np.empty(0) for v in values]
            for place, leaf in castings(batch, arrays, self._on_device, listed=self._listed):
                casts[place] = leaf.stored
        return casts

    def _handed_out(
        self,
        sent: _Sent,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        cast: np.dtype[Any] | None,
        blocks: list[Block],
    ) -> Any:
        device = self.device
        overs = [_nothing if sent.extra else partial(self._pool.give_back, block) for block in blocks]
        leaf = device.hand_out(blocks[0].memory, sent.ticket, shape, dtype, overs[0])
        return leaf if cast is None else device.cast(leaf, blocks[1].memory, cast, overs[1])

    def _drop(self, sent: _Sent) -> None:
        self.device.copied(sent.ticket, wait=True)
        self._return(sent.blocks, sent.extra)

    def _return(self, rows: list[list[Block]], extra: bool) -> None:
        if not extra:
            for block in (block for row in rows for block in row):
                self._pool.give_back(block)


def _nothing() -> None:
    """Memory that is not pooled goes with its last reference."""


def _own(value: Any) -> Any:
    """What stays on the host leaves the slot."""
    return value.copy() if isinstance(value, np.ndarray) else value
