"""The feed: what the user holds and iterates. Runs in the parent.

It says what is where and hands the work on: ``options`` checks what was asked, ``schedule`` cuts the items into units,
``launch`` measures, plans and starts, ``epoch`` hands out batches. ``plan``, ``order`` and ``ledger`` decide; crew and
engine obey.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from penstock._core import machine
from penstock._core.blocks import Blocks
from penstock._core.bookmark import VERSION, Bookmark, check_saved, write_skipped
from penstock._core.budget import Size, format_bytes, parse_size
from penstock._core.cache import Cache
from penstock._core.device import Device
from penstock._core.engine import Engine
from penstock._core.epoch import Epoch
from penstock._core.errors import BudgetWarning, FeedClosed
from penstock._core.fingerprint import fingerprint
from penstock._core.fit import Asked
from penstock._core.items import Stream
from penstock._core.launch import Launched, launch
from penstock._core.options import OnError, Options, check_count
from penstock._core.pack import pack
from penstock._core.patience import users_level
from penstock._core.plan import Footprint, Plan, Request, solve
from penstock._core.schedule import Schedule
from penstock._core.spec import AnyCast, Spec, row_bytes, split_cast
from penstock._core.stats import Stats
from penstock._core.task import Mode

__all__ = ["Feed", "plan"]

DEFAULT_SHARE: Final = 0.5


_live: weakref.WeakSet[Feed] = weakref.WeakSet()


def _available() -> int:
    """Memory that nobody uses and no other feed of this process was promised."""
    promised = sum(
        max(0, feed._options.memory - stats.arena_bytes - stats.worker_bytes - stats.cache_bytes)
        for feed, stats in ((feed, feed._stats) for feed in list(_live))
    )
    available = machine.available_bytes()
    # A feed that was promised more than there is does not leave the next one with nothing.
    return max(available // 10, available - promised, 1)


def _budget(memory: Size | None) -> int:
    available = _available()
    budget = parse_size(DEFAULT_SHARE if memory is None else memory, available=available)
    if budget > available:
        warnings.warn(
            f"memory={format_bytes(budget)} is more than the {format_bytes(available)} that are available now (what "
            "other programs use, container limits and the budgets of other feeds counted): the system may swap or "
            "kill. Give less, or a fraction such as 0.5",
            BudgetWarning,
            stacklevel=users_level(),
        )
    return budget


class Feed:
    """Batches from items, loaded ahead by workers inside a memory budget.

    ``items`` is a sequence of identities, any iterable of them (a stream), or a source such as ``penstock.arrays``;
    ``load`` makes a sample of one item. Iterate it for an epoch, and again for the next.

    A batch stays valid while any part of it is referenced. The same ``seed`` gives the same samples in the same order
    for any number of workers, any executor and any start method. One iteration at a time: a new one ends the one
    before it, whose next step raises ``LeaseError``.
    """

    def __init__(
        self,
        items: Any,
        load: Callable[..., Any] | None = None,
        *,
        batch_size: int | Literal["max"] = 32,
        memory: Size | None = None,
        num_workers: int | None = None,
        executor: Literal["process", "thread"] = "process",
        shuffle: bool | Blocks = False,
        seed: int = 0,
        drop_last: bool = False,
        cast: AnyCast = None,
        collate_fn: Literal["pad", "list"] | Callable[[list[Any]], Any] | None = None,
        samples_per_item: int | None = 1,
        on_error: OnError = "raise",
        timeout: float | None = None,
        shard: tuple[int, int] | Literal["auto"] | None = None,
        cache: str | os.PathLike[str] | Cache | None = None,
        to: str | Device = "numpy",
        device_memory: Size | None = None,
        model: Any = None,
        optimizer: Any = None,
        loss: Callable[..., Any] | None = None,
        train: bool = True,
        start_method: Literal["fork", "forkserver", "spawn"] | None = None,
    ) -> None:
        self._options = options = Options.checked(
            items,
            load,
            batch_size=batch_size,
            memory=_budget(memory),
            num_workers=num_workers,
            executor=executor,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            cast=cast,
            collate_fn=collate_fn,
            samples_per_item=samples_per_item,
            on_error=on_error,
            timeout=timeout,
            shard=shard,
            to=to,
            cache=cache,
            start_method=start_method,
            device_memory=device_memory,
            asked=Asked.checked(model, optimizer, loss, train=train),
        )
        self._schedule = Schedule(options)
        self._place = Bookmark(options.world)
        self._stats = Stats()
        self._launched: Launched | None = None
        self._closed = False
        self._next_epoch = 0
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._current: weakref.ref[Epoch] | None = None
        _live.add(self)

    # ---- what it is

    @property
    def plan(self) -> Plan:
        """The numbers that were solved, and why; the first use loads an item or two to learn what they cost."""
        return self._prepare().plan

    @property
    def stats(self) -> Stats:
        """What the feed did so far."""
        if self._launched is not None:
            self._launched.engine.look()
        return self._stats

    @property
    def epoch(self) -> int:
        """The epoch that is being iterated, or the next one if none is."""
        return self._place.epoch

    def __len__(self) -> int:
        """Batches an epoch; TypeError where nobody can know."""
        options = self._options
        if options.streams:
            raise TypeError("a stream of items has no length: count batches as they come")
        samples = self._schedule.count()
        if samples is None:
            raise TypeError("with samples_per_item=None the number of batches is known only afterwards")
        size = self.plan.batch_size if options.batch_size == "max" else options.batch_size
        return samples // size if options.drop_last else -(-samples // size)

    def __repr__(self) -> str:
        length = self._schedule.length
        count = "a stream" if length is None else f"{length} items"
        if self._schedule.lines is not None:
            count = f"{format_bytes(self._schedule.lines.total_bytes)} of text"
        options = self._options
        return f"<penstock.Feed of {count}, batch_size={options.batch_size}, memory={format_bytes(options.memory)}>"

    # ---- iterating

    def __iter__(self) -> Epoch:
        """One epoch; the next call gives the next one."""
        return self._begin(self._next_epoch, self._next_epoch)

    def epochs(self, count: int) -> Iterator[Epoch]:
        """``count`` epochs, one after the other; the next is being read while the last batches of one are used."""
        check_count("count", count, least=0)
        first = self._next_epoch
        epoch: Epoch | None = None
        try:
            for number in range(first, first + count):
                # One that was left early has dropped what it had read ahead: start anew.
                if epoch is not None and epoch.complete and self._launched is not None:
                    self._next_epoch = number + 1
                    epoch = self._epoch_of(self._launched, number, epoch.run)
                else:
                    self._next_epoch = number
                    epoch = self._begin(number, first + count - 1)
                yield epoch
        finally:
            # Left between two epochs: the second is being read already, and nobody will ask for it.
            if epoch is not None and epoch.complete and self._engine is not None:
                self._engine.stop(epoch.run)

    def progress(self, desc: str | None = None) -> Iterator[Any]:
        """One epoch with a live line: batches, samples/s, share of time waited, memory of budget, time left."""
        from penstock.progress import progress

        return progress(self, desc=desc)

    def pack(self, desc: str | None = None) -> int:
        """Fill the cache now, with a live line on terminals; how many items it keeps then.

        Goes on where an earlier one stopped, for whatever reason. Ends the iteration that is going on.
        """
        from penstock.progress import counted

        if self._options.cache is None:
            raise ValueError('pack fills a cache, and this feed has none: give cache="ram", or a folder')
        if self._options.cache == "device":
            raise ValueError(
                'pack fills a cache in memory or on disk; cache="device" keeps what batches bring there: run an epoch'
            )
        if self._closed:
            raise FeedClosed("the feed was closed: make a new one to go on")
        self._end_current()
        if self._schedule.is_empty():
            return 0
        return counted(pack(self._prepare(), self._schedule, self._place, self._stats), desc=desc)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch, from its start."""
        check_count("epoch", epoch, least=0)
        self._next_epoch = int(epoch)
        self._place.begin(self._next_epoch, 0, 0)
        self._place.resume = (0, 0)

    def close(self) -> None:
        """End the workers. Batches that are alive stay right; iterating again raises ``FeedClosed``."""
        self._closed = True
        _live.discard(self)
        if self._finalizer is not None:
            self._finalizer()

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Where the feed is, as a small JSON-able dict: what was handed out counts, what was read ahead does not.

        With ``shuffle=Blocks()`` the first use plans, as ``plan`` does: how much is mixed at a time is a part of it.
        """
        unplanned = self._options.blocks is not None and self._window is None and not self._closed
        if unplanned and not self._schedule.is_empty():
            self._prepare()
        here = self._place
        epoch, place, inside = here.epoch, here.place, here.inside
        if here.position and not self._options.streams and inside == 0 and self._ended(epoch, here.position):
            epoch, place = epoch + 1, 0
        skipped = self._stats.skipped
        skipped = skipped[: max(0, len(skipped) - here.left_out_ahead)]
        return {
            "version": VERSION,
            "epoch": epoch,
            "position": place,
            "inside": inside,
            "world": self._options.world,
            "rank": self._options.rank if self._apart and (place or inside) else None,
            "drawn": here.drawn + here.place,
            "window": self._window,
            "window_bytes": self._window_bytes,
            **self._identity(),
            "skipped": write_skipped(skipped),
        }

    def load_state_dict(self, state: dict[str, Any], *, strict: bool = True) -> None:
        """Continue where ``state_dict`` was taken, with exactly the next sample.

        Workers, batch size, executor, budget and the number of ranks may be others than then. With ``strict=False`` the
        items may look different too (paths that moved), as long as there are as many: the order is by place.
        """
        o = self._options
        saved = check_saved(state, self._identity(), rank=o.rank, world=o.world, each=o.each, strict=strict)
        self._end_current()
        if isinstance(items := self._options.items, Stream) and not items.restarts:
            given = self._place.drawn + self._place.place
            if saved.drawn < given:
                raise ValueError(
                    f"this stream of items has given {given}, and the state goes on after {saved.drawn}: a one-time "
                    "stream cannot go back, make the feed with a fresh one"
                )
            items.skip(saved.drawn - given)
            self._place.drawn = saved.drawn - saved.place
        if self._launched is not None:
            for mine, theirs, what in (
                (self._window, saved.window, "items"),
                (self._window_bytes, saved.window_bytes, "bytes"),
            ):
                if theirs is not None and mine != theirs:
                    if self._current is None and self._finalizer is not None:  # only planned: it is planned anew
                        self._finalizer()
                        self._launched = self._finalizer = None
                        break
                    raise ValueError(
                        f"this state was shuffled {theirs} {what} at a time, and this feed is at work with {mine}: "
                        "load the state into a feed that has not begun"
                    )
        whole = self._launched is not None and self._launched.engine.mode is not Mode.FLOW
        if saved.inside and whole and self._finalizer is not None:
            self._finalizer()  # its batches are of whole items, and this begins in the middle of one: it is made anew
            self._launched = self._finalizer = None
        self._schedule.window, self._schedule.window_bytes = saved.window, saved.window_bytes
        self._next_epoch = saved.epoch
        self._place.go_to(saved.epoch, saved.place, saved.inside)
        self._stats.skipped[:] = saved.skipped

    @property
    def _apart(self) -> bool:
        """Whether ranks that have handed out as many samples may have come to different places."""
        return self._options.world > 1 and (self._options.skips or self._options.each is None)

    @property
    def _window(self) -> int | None:
        """How many items are shuffled at a time, where that depends on the budget; None if nobody knows yet."""
        if not self._options.shuffle:
            return None
        if self._launched is None:
            blocks = self._options.blocks
            return self._schedule.window or (blocks.group if blocks is not None else None)
        if self._schedule.mixing is not None:
            return self._schedule.mixing.group
        return self._launched.cut.window[0] if self._options.streams else None

    @property
    def _window_bytes(self) -> int | None:
        """The same in bytes, where large items make it fewer of them."""
        if not (self._options.shuffle and self._options.streams):
            return None
        return self._schedule.window_bytes if self._launched is None else self._launched.cut.window[1]

    @functools.cached_property
    def _fingerprint(self) -> str | None:
        return fingerprint(self._options.items)

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self._options.seed,
            "shuffle": self._options.shuffle if self._options.blocks is None else self._options.blocks.cut,
            "length": self._schedule.extent,
            "items": self._fingerprint,
        }

    # ---- within

    @property
    def _engine(self) -> Engine | None:
        return self._launched.engine if self._launched is not None else None

    def _ended(self, epoch: int, position: int) -> bool:
        """Whether an epoch has given its last batch when it has come to a position."""
        left_out = 0
        if self._options.drop_last and self._options.each is not None and self._launched is not None:
            left_out = max(0, self._launched.plan.batch_size - 1) // self._options.each
        return self._schedule.ended(epoch, self._place.base, position, spare=left_out)

    def _begin(self, number: int, last: int) -> Epoch:
        if self._closed:
            raise FeedClosed("the feed was closed: make a new one to go on")
        self._end_current()
        place = self._place
        base, inside = place.resume
        place.begin(number, base, inside)
        empty = (self._launched is None or not self._options.streams) and self._schedule.is_empty()
        if empty or self._schedule.nothing_after(number, base):
            place.resume = (0, 0)
            self._next_epoch = number + 1
            place.begin(number + 1, 0, 0)
            return self._epoch_of(None, number, 0)
        self._next_epoch = number  # what the probe loads is what comes first
        launched = self._prepare()
        place.resume = (0, 0)
        self._next_epoch = number + 1
        starts = itertools.chain([(number, base, inside)], ((n, 0, 0) for n in range(number + 1, last + 1)))
        units = itertools.chain.from_iterable(self._schedule.units(launched.cut, *start) for start in starts)
        run = launched.engine.begin(units, ahead=0 if self._options.streams else 1)
        return self._epoch_of(launched, number, run)

    def _end_current(self) -> None:
        if self._current is not None and (older := self._current()) is not None:
            older.give_back()  # not closed: whoever goes on with it is told by LeaseError, not by an early end

    def _epoch_of(self, launched: Launched | None, number: int, run: int, place: Bookmark | None = None) -> Epoch:
        stats, place = self._stats, place or self._place
        epoch = Epoch(launched, self._schedule, place, stats=stats, number=number, run=run, keeps=self)
        self._current = weakref.ref(epoch)
        return epoch

    def _prepare(self) -> Launched:
        """Have everything at work, if it is not yet."""
        if self._launched is not None and not self._launched.engine.broken:
            return self._launched
        if self._closed:
            raise FeedClosed("the feed was closed: make a new one to go on")
        if self._finalizer is not None:  # Ctrl-C came in the middle of something: begin anew, or a reply may be missed
            self._finalizer()
            self._launched = None
        base, inside = self._place.resume
        launched = launch(self._options, self._schedule, self._stats, epoch=self._next_epoch, base=base, inside=inside)
        self._launched = launched
        self._finalizer = weakref.finalize(self, launched.close)
        return launched

    # ---- for the interfaces above it: batches by their numbers, and a limit of slots

    def _pick(self, batches: Iterable[tuple[int, int]]) -> int:
        """Begin on batches given as (epoch, number), in that order; the run whose epochs ``_picked`` gives.

        They are drawn as slots come free and read ahead like any others. Only if ``options.picks``.
        """
        if self._closed:
            raise FeedClosed("the feed was closed: make a new one to go on")
        self._end_current()
        launched = self._prepare()
        return launched.engine.begin(self._schedule.chosen(launched.cut, batches), ahead=1)

    def _picked(self, run: int, epoch: int) -> Epoch:
        """The batches of an epoch that come next in such a run; the feed's own place is not moved by them."""
        return self._epoch_of(self._launched, epoch, run, Bookmark(self._options.world))

    def _places(self, epoch: int, number: int) -> npt.NDArray[np.int64]:
        """Which items a batch is made of: their places among all items."""
        options = self._options
        size = (self.plan.batch_size if options.batch_size == "max" else options.batch_size) // (options.each or 1)
        return self._schedule.order(epoch).indices(number * size, (number + 1) * size)

    def _limit_slots(self, most: int) -> None:
        """Plan no more slots than these; before the first use."""
        self._options = dataclasses.replace(self._options, most_slots=most)


def plan(
    sample: Any,
    *,
    memory: Size | None = None,
    batch_size: int | Literal["max"] = 32,
    num_workers: int | None = None,
    executor: Literal["process", "thread"] = "process",
    cast: AnyCast = None,
    length: int | None = None,
    device_memory: Size | None = None,
    model: Any = None,
    optimizer: Any = None,
    loss: Callable[..., Any] | None = None,
    train: bool = True,
    device_batches: int = 2,
) -> Plan:
    """The plan for samples like this one, without running anything: a lean worker is assumed, not measured.

    With a ``model`` the batch also has to leave room for its step in ``device_memory``. A torch model, its class or a
    function that makes one is traced without allocating; any other function of a batch is run on a few samples.
    ``device_batches`` lie there too: 2 where one is copied while another is computed on, 1 where your loop makes one
    after the other.
    """
    spec = Spec.of(sample, cast=split_cast(cast)[0])
    footprint = Footprint.assumed(tuple(row_bytes(leaf) for leaf in spec.leaves))
    check_count("device_batches", device_batches, least=0)
    asked = Asked.checked(model, optimizer, loss, train=train, buffers=device_batches)
    available = machine.available_bytes()
    request = Request(
        memory=parse_size(DEFAULT_SHARE if memory is None else memory, available=available),
        batch_size=batch_size,
        num_workers=num_workers,
        executor=executor,
        cores=machine.look().cores,
        length=length,
    )
    if asked is not None:
        from penstock._model import with_model

        request = with_model(request, footprint, spec, asked, size=device_memory, ranks=False)
    elif device_memory is not None:
        size = parse_size(device_memory, available=available, name="device_memory")
        request = dataclasses.replace(request, device_memory=size)
    return solve(request, footprint)
