"""Requests on a device: inputs of any size in memory that is allocated once and reused. Runs in the user's process.

For generation and serving, where no feed reads ahead: each request brings its own shapes. A ``Place`` never holds more
than its budget; a request gets blocks of a few sizes, gives them back at the end of its ``with`` block, and waits or is
refused when others have them. Safe in several threads.
"""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal

import numpy as np
import optree

from penstock._core import machine
from penstock._core.budget import Size, format_bytes, parse_size
from penstock._core.device import Device, HostDevice, copying_device
from penstock._core.errors import BudgetError, PlaceFull
from penstock._core.pool import Block, Pool, size_class
from penstock._core.spec import Array, as_array, flatten

__all__ = ["Place", "PlaceStats", "Request"]

# Memory may come back in a finalizer, which must not take a lock to tell: whoever waits looks this often.
LOOK_S: Final = 0.02


@dataclasses.dataclass(frozen=True, slots=True)
class PlaceStats:
    """What a place did so far, and what it holds."""

    requests: int
    """Requests that got their memory."""
    allocations: int
    """Blocks that were allocated on the device, ever."""
    reuses: int
    """Blocks that were lent again without allocating."""
    held_bytes: int
    """Memory on the device that the place holds now, lent or free; never above the budget."""
    used_bytes: int
    """What of that is lent now."""
    peak_bytes: int
    """The most it ever held."""
    waits: int
    """Requests that had to wait for others."""
    refused: int
    """Requests that did not get memory."""
    host_bytes: int
    """Host memory that ``fetch`` holds, in use or to be used again."""


class Place:
    """Reused memory on a device for requests of varying shapes: ``with place(inputs) as on_device: ...``.

    ``to`` names the device as for a ``Feed`` (``"torch:cuda:0"``, ``"jax"``, ``"tinygrad:CL"``, or a ``Device``), and
    ``memory`` is the most that is ever held there. When others use all of it a request waits, up to ``timeout``
    seconds; with ``when_full="raise"`` it is refused with ``PlaceFull``. One that can never fit is a ``BudgetError``.
    """

    def __init__(
        self,
        to: str | Device,
        memory: Size,
        *,
        when_full: Literal["wait", "raise"] = "wait",
        timeout: float | None = None,
    ) -> None:
        if when_full not in ("wait", "raise"):
            raise ValueError(f'when_full={when_full!r} is not known: give "wait" or "raise"')
        if timeout is not None and not timeout >= 0:
            raise ValueError(
                f"timeout={timeout!r} must be a number of seconds, or None to wait for as long as it takes"
            )
        self._device = device = copying_device(to)
        available = device.available_bytes()
        self._budget = parse_size(memory, available=machine.available_bytes() if available is None else available)
        self._when_full = when_full
        self._timeout = timeout
        self._pool = Pool(device, self._budget)
        self._host = Pool(HostDevice(), None)
        self._changed = threading.Condition(threading.Lock())
        self._copying = threading.Lock()  # one way to the device, one copy at a time
        self._holders: dict[int, int] = {}  # requests that are open: id -> thread
        self._lent: dict[Block, int] = {}  # blocks, some of requests that are over and whose arrays are kept -> thread
        self._waiting: set[int] = set()  # threads that wait for others
        self._queue: deque[object] = deque()  # requests that wait, in the order in which they came
        self._requests = self._waits = self._refused = 0

    def __repr__(self) -> str:
        used, held = format_bytes(self._pool.lent_bytes), format_bytes(self._pool.held_bytes)
        return f"<penstock.Place on {self._device.name}, {used} used, {held} held of {format_bytes(self._budget)}>"

    def __call__(self, inputs: Any) -> Request:
        """A request: enter it to have the arrays of a sample or batch on the device; it ends with its block.

        Arrays (NumPy's, and torch tensors on the CPU) are copied; numbers, texts and whatever is on a device already
        stay as they are. After the block the arrays it gave are empty or deleted, so compute inside it and
        ``fetch`` what you need.
        """
        return Request(self, inputs)

    def fetch(self, outputs: Any) -> Any:
        """The same tree with NumPy arrays: results copied back into host memory that is reused.

        An array stays right for as long as anything refers to it; its memory is used again afterwards.
        """
        values, tree = flatten(outputs)
        return optree.tree_unflatten(tree, [self._fetched(value) for value in values])

    def free(self) -> int:
        """Give all memory that no request uses back to the device and to the system; how many bytes that was."""
        self._device.settle()
        with self._changed:
            return self._pool.trim() + self._host.trim()

    @property
    def stats(self) -> PlaceStats:
        """What happened so far, and what is held now."""
        self._device.settle()
        with self._changed:
            self._pool.settle()
            self._host.settle()
            pool = self._pool
            return PlaceStats(
                self._requests,
                pool.allocations,
                pool.reuses,
                pool.held_bytes,
                pool.lent_bytes,
                pool.peak_bytes,
                self._waits,
                self._refused,
                self._host.held_bytes,
            )

    # ---- within

    def _fetched(self, value: Any) -> Any:
        form = self._device.form(value)
        if form is None:
            return value
        shape, dtype = form
        with self._changed:
            blocks = self._host.take([size_class(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)])
        assert blocks is not None, "there is no budget for the host"
        out: Array = self._host.device.hand_out(
            blocks[0].memory, None, shape, dtype, partial(self._host.give_back, blocks[0])
        )
        self._device.read(value, out)
        return out

    def _take(self, request: Request, sizes: Sequence[int]) -> list[Block]:
        """Blocks for these sizes; waits, or raises, as was chosen."""
        classes = [size_class(size) for size in sizes]
        if sum(classes) > self._budget:
            classes = [max(1, size) for size in sizes]
        if (need := sum(classes)) > self._budget:
            with self._changed:
                self._refused += 1
            raise BudgetError(
                f"the request takes {need} bytes ({format_bytes(need)}) on {self._device.name}, and the place may hold "
                f"{self._budget} ({format_bytes(self._budget)}): give memory={need} or more, or cut the request",
                least=need,
            )
        until = None if self._timeout is None else time.monotonic() + self._timeout
        me, waited = threading.get_ident(), False
        ticket = object()
        with self._changed:
            while True:
                mine = self._turn(ticket, me)
                if mine and (blocks := self._try(classes, again=waited)) is not None:
                    self._leave(ticket)
                    self._requests += 1
                    self._waits += waited
                    self._holders[id(request)] = me
                    self._lent.update(dict.fromkeys(blocks, me))
                    return blocks
                others = not mine or self._others(me)  # whoever is first will be served, or refused
                left = LOOK_S if until is None else min(LOOK_S, until - time.monotonic())
                if self._when_full == "raise" or left <= 0 or not (others or until is not None):
                    self._leave(ticket)
                    self._refused += 1
                    raise self._full(need)
                if not waited:
                    self._queue.append(ticket)
                waited = True
                self._waiting.add(me)
                try:
                    self._changed.wait(left)
                except BaseException:
                    self._leave(ticket)
                    raise
                finally:
                    self._waiting.remove(me)

    def _turn(self, ticket: object, me: int) -> bool:
        """Whether nobody waits who came before. Who holds something is not held up: others may wait for it."""
        return not self._queue or self._queue[0] is ticket or me in self._holders.values()

    def _leave(self, ticket: object) -> None:
        """It waits no more, served or not."""
        with suppress(ValueError):
            self._queue.remove(ticket)
        self._changed.notify_all()

    def _try(self, classes: list[int], *, again: bool) -> list[Block] | None:
        for settle in (_nothing, self._device.settle, gc.collect):
            settle()
            if (blocks := self._pool.take(classes)) is not None:
                return blocks
            if self._holders or (again and settle is self._device.settle):
                break  # not for garbage that may be there, while others are at work, nor again and again
        return None

    def _others(self, me: int) -> bool:
        """Whether another thread has a request, or a name for an array of one, and will let go of it when it goes on.

        Not one that waits itself: two that keep what the other needs would wait for ever.
        """
        going = {thread.ident for thread in threading.enumerate()} - self._waiting - {me}
        lent = [*self._holders.values(), *list(self._lent.values())]  # copied at once: blocks come back at any time
        return any(thread in going for thread in lent)

    def _full(self, need: int) -> PlaceFull:
        mine = sum(thread == threading.get_ident() for thread in self._holders.values())
        who = f"{len(self._holders)} open requests ({mine} of them in this thread)"
        if not self._holders:
            who = "arrays that were kept from requests that are over"
        return PlaceFull(
            f"{format_bytes(need)} are needed on {self._device.name}, but {format_bytes(self._pool.lent_bytes)} of "
            f"{format_bytes(self._budget)} are in use by {who}: end those first, try again later, or give more memory",
            least=self._pool.lent_bytes + need,
        )

    def _give_back(self, block: Block) -> None:
        self._lent.pop(block, None)
        self._pool.give_back(block)

    def _ended(self, request: Request) -> None:
        with self._changed:
            self._holders.pop(id(request), None)
            self._changed.notify_all()


class Request:
    """One use of a ``Place``; a context manager that gives the inputs on the device."""

    def __init__(self, place: Place, inputs: Any) -> None:
        self._place = place
        self._inputs = inputs
        self._leaves: list[Any] = []

    def __enter__(self) -> Any:
        place, device = self._place, self._place._device
        values, tree = flatten(self._inputs)
        places = {i: array for i, value in enumerate(values) if (array := _array(value, device)) is not None}
        blocks = place._take(self, [array.nbytes for array in places.values()])
        given_back = len(blocks)
        try:
            with place._copying:
                ticket = device.copy([block.memory for block in blocks], list(places.values()))
                for (i, array), block in zip(places.items(), blocks, strict=True):
                    over = partial(place._give_back, block)
                    given_back -= 1
                    values[i] = device.hand_out(block.memory, ticket, array.shape, array.dtype, over)
                    self._leaves.append(values[i])
                device.copied(ticket, wait=True)  # from here on the caller may change the inputs
        except BaseException:
            for block in blocks[len(blocks) - given_back :]:
                place._give_back(block)
            self._end()
            raise
        return optree.tree_unflatten(tree, values)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        device = self._place._device
        while self._leaves:
            device.recall(self._leaves.pop())
        self._place._ended(self)


def _array(value: Any, device: Device) -> Array | None:
    """What is to be copied, as a contiguous array; None for what stays as it is."""
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
    elif device.form(value) is not None and getattr(getattr(value, "device", None), "type", None) != "cpu":
        return None  # there already
    elif isinstance(value, str | bytes | bool | int | float | complex):
        return None
    else:
        array = as_array(value)
    if not array.dtype.isnative:  # no framework knows of the other order, and some do not say so
        array = array.astype(array.dtype.newbyteorder("="))
    if not device.takes(array.dtype):
        return None
    return np.ascontiguousarray(array).reshape(array.shape)


def _nothing() -> None:
    """The first try needs no preparation."""
