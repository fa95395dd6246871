"""The shell that obeys the ledger: gives work to the crew, takes replies, hands out slots. Runs in the parent.

There is no thread here. All of it happens in the consumer's thread while it asks for a batch, and for a moment in
whatever thread drops the last view of one: the slot is given new work at once, if work was prepared. ``_lock`` is
held for such moments, never while waiting and never by a finalizer that would have to wait for it. A process that
is forked off meanwhile has a copy of all this, and must touch none of it: it may not even take the lock.

A unit is what gets a slot: a batch (ROWS, WHOLE), or a stretch of items that fills as many slots as it needs, one
after the other (FLOW). Units are handed out in the order in which they were begun.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math
import mmap
import os
import sys
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from penstock._core import machine
from penstock._core.arena import AnyArena
from penstock._core.batch import Lease, Leases, Texts
from penstock._core.budget import MiB, format_bytes
from penstock._core.cache import RamStore, Store
from penstock._core.cache_device import DeviceStore, Origin
from penstock._core.copying import Begun
from penstock._core.crew import Crew
from penstock._core.crew.inline import InlineCrew
from penstock._core.errors import (
    BudgetError,
    BudgetWarning,
    FeedClosed,
    LeaseError,
    LoadError,
    LoadTimeout,
    SpecError,
    WorkerLost,
    printable,
    said,
    shown,
)
from penstock._core.kept import Began, Kept
from penstock._core.ledger import Ledger, State
from penstock._core.line_reader import Scatter, Stretch
from penstock._core.order import Mixing
from penstock._core.own import Own
from penstock._core.patience import Patience, SlowLoad, users_level
from penstock._core.plan import PARENT_BYTES, QUICK_GROUP_S, QUICK_LOAD_S, Plan, group_s, thread_slack
from penstock._core.program import Probe
from penstock._core.regions import Regions
from penstock._core.section import Section
from penstock._core.source import Samples
from penstock._core.stats import Stats
from penstock._core.task import Failure, Grant, Mode, Reply, Shelved, Status, Task

__all__ = ["Chunk", "Engine", "Unit", "error_of"]

Part = slice | npt.NDArray[np.int64]
"""Which items of a unit a task has."""

# A task should take about this long: long against a message (some 20 us), short against a slow item beside it.
TASK_S: Final = 1e-3
TURN_S: Final = 1e-3
LOOK_S: Final = 0.05  # those who ask for numbers after every batch do not get new ones every time
# Where a batch has more tasks than it takes to share it evenly they are made larger, though not so that a slow item
# would hold up much.
TASKS_A_WORKER: Final = 4
# Every task wakes the consumer's thread, whose caches the loads have emptied: that takes some 200 us. Batches that are
# soon done have fewer of them, as those of the next batch keep everyone busy while the last is finished.
FEW_TASKS_A_WORKER: Final = 2
LONG_BATCH_S: Final = 80e-3
MOST_TASK_S: Final = 40e-3
MANY_TASK_S: Final = 2e-3  # of a load that makes many samples at once, and is not to be called for a few
# Loads that take some time, and all as long as each other, are shared evenly with one task for everybody; not where one
# now and then takes much longer.
LONG_LOAD_S: Final = 4e-4
ALIKE: Final = 0.1
BLOCK_TASK_BYTES: Final = 16 * 2**20
TOLD_BYTES: Final = 40 * 2**20  # enough for the disks that were tried, and a page cache has room for it
TOLD_ROWS: Final = 4096  # of rows that lie anywhere: for each a page at least is read
BLOCK_TASKS: Final = 3  # a worker, of a slot
SKIPS_IN_A_ROW: Final = 100  # so many items one after the other that are left out mean that all will be
TASK_ITEM_BYTES: Final = 2**19  # a task is made smaller where its items are large: they travel, and are held twice
COPY_TASK_BYTES: Final = 4 * 2**20  # the same for samples that only have to be copied
# Without workers, a slot is filled in a thread while the consumer is away if it is away for so much of the time that
# it takes to fill one, and if that is more than it takes to wake the thread.
EAGER_SHARE: Final = 0.5
EAGER_S: Final = 2e-4
# Copying a batch of this size takes about as long as telling a worker to, and being told that it was done.
NEAR_BYTES: Final = 256 * 2**10
OWN_BLOCKS: Final = 2  # of memory for copies: the consumer has one while the other is filled
COPY_S: Final = 1 / 4e9  # seconds a byte, until it is measured
LEAST_TEXT_BYTES: Final = 2**18  # of the texts of a task that do not fit into their cells
# Slots that grew stay so until this many batches would have fitted into what was planned.
SHRINK_AFTER: Final = 32
MEASURE_S: Final = 0.1  # how often memory is looked at, at most
# A look costs some 500 us a process and more for large ones: it may take so much of the consumer's time and no more.
# What rises and falls between two looks is not missed, the kernel keeps the most that there was.
MEASURE_SHARE: Final = 0.004


@dataclasses.dataclass(slots=True)
class Unit:
    """What one slot after the other is filled with: positions of an epoch and their items."""

    epoch: int
    start: int
    """Position of the first item in the epoch."""
    indices: npt.NDArray[np.int64]
    items: Sequence[Any] | None
    skip: int = 0
    """Samples of the first item that were handed out before (resume)."""
    name: Callable[[int], Any] | None = None
    """What an index is called, where it says little."""
    weight: int = 0
    """Bytes that the items take in this process, where it holds them only for us."""
    told: int = 0
    """Parts of it that the system was told of before it began (blocks); of other units, whether it was told at all."""
    chunks: deque[Chunk] = dataclasses.field(default_factory=deque)
    open: int = 0
    """Tasks that are not accounted for."""
    failure: Failure | None = None
    crowded: int = 0
    """What texts of one of its tasks took beside the slot, where that was too much; it is cut up and done again."""
    seen_ordinal: int = -1
    seen: int = 0
    """Samples of the item at ``seen_ordinal`` that came in earlier chunks (FLOW)."""


@dataclasses.dataclass(slots=True)
class Chunk:
    """A slot with something in it."""

    batch: int
    slot: int
    rows: int
    body: Any
    failures: tuple[Failure, ...]
    counts: list[tuple[int, int]] | None = None
    ready: bool = False
    text_bytes: int = 0
    """What its texts take, which are not in the slot."""
    origin: Origin | None = None
    """Which of its samples are kept on the device: they are not in the slot, where the others stand in a row."""
    memory: Any = None
    """Where it lies, if that is no slot but memory of its own."""
    kept: Shelved | None = None
    """What is still to be copied there."""
    begun: Begun | None = None
    """How far that is, if others began with it."""
    last: bool = False
    """Whether nothing of its epoch comes after it; known only if the next epoch has begun."""
    leased: tuple[Any, int] | None = None
    """Its memory, where that was leased before anybody asked for it."""
    made: Any = None
    """What was made of that."""


class Engine:
    """Slots, crew and ledger of one feed, for as long as the feed lives."""

    def __init__(
        self,
        crew: Crew,
        plan: Plan,
        *,
        mode: Mode,
        slot_bytes: int,
        spare_bytes: int,
        samples_per_item: int | None,
        probe: Probe,
        items_bytes: int = 0,
        began: Began = Began(),  # noqa: B008 - it cannot be changed
        held: Callable[[], int] = int,
        mixing: Mixing | None = None,
        cache: Callable[[AnyArena], Store | None] | None = None,
        scatters: bool = False,
        absent: Callable[[npt.NDArray[np.int64]], bool] | None = None,
        own_bytes: int = 0,
        many: bool = False,
    ) -> None:
        self.crew = crew
        self.plan = plan
        self.stats = Stats()
        self.mode = mode
        self._many = many
        self._each = samples_per_item or 1
        self._mixing = mixing if mode is Mode.ROWS else None
        self._scatters = scatters
        """Whether blocks are read straight to where their rows belong, so that a worker holds none of them."""
        self._absent = absent if cache is None and self._mixing is None and mode is Mode.ROWS else None
        """Says whether rows have to be read from a disk: then it is told of them before there is a slot for them."""
        slots = plan.slots + plan.staging_slots
        self._spare = spare_bytes
        self._regions = Regions(crew.arena, slots, slot_bytes, spare_bytes)
        self._enlarged: set[int] = set()  # where slots lie that are in large pages by now
        # After the slots: where shared memory is short, they come first.
        self.cache = None if cache is None else cache(crew.arena)
        self.notices: list[str] = []
        """What a cache has to say to the user, until somebody does."""
        # Samples that are kept are quick later, whatever loads take.
        kept = self.cache is not None and self.cache.in_memory
        self._grows = mode is Mode.ROWS and plan.batches_per_slot > 1 and self._mixing is None and not kept
        """Whether it is seen while it runs how many batches share a slot."""
        room = 0 < own_bytes <= plan.free_bytes // (2 * OWN_BLOCKS)
        self._copies_last = room and self._mixing is not None and plan.workers > 0 and plan.batches_per_slot > 1
        large = plan.batches_per_slot == 1 and plan.batch_bytes > NEAR_BYTES
        self._gathers = room and kept and mode is Mode.ROWS and large
        # While the consumer works on a batch, the next one is copied to the other block.
        kick = weakref.WeakMethod(self._refill) if self._gathers else None
        self._own = Own(own_bytes, OWN_BLOCKS if self._copies_last or self._gathers else 0, kick)
        self.own_bytes = OWN_BLOCKS * own_bytes if self._copies_last or self._gathers else 0
        """What batches may take that are given out as copies in memory of their own; it is nobody else's."""
        self._ledger = Ledger(slots)
        self._added = 0
        """Slots that were added because the consumer held all there were."""
        self._section = Section()
        self._lock = self._section.lock
        self._interrupt: BaseException | None = None
        self._peeked: set[int] = set()
        """Slots that somebody copies from who has no lease of them."""
        self._freed: deque[Lease] = deque()
        # With two slots, one is in the consumer's hands while it works: the other is all there is to read ahead into.
        self._leases = Leases(self._freed, weakref.WeakMethod(self._refill) if slots <= 2 else None)
        self._units: deque[Unit] = deque()
        self._last: Unit | None = None
        self._epoch = 0
        """The one that slots were asked for last."""
        self._by_task: dict[int, tuple[Unit, Chunk, int, Part]] = {}  # ..., items, their places in the unit
        self._requests: deque[Reply] = deque()
        self._source: Iterator[Unit] | None = None
        self._broken: Exception | None = None
        self._prepared: deque[Unit] = deque()
        self._drawn: list[Unit] = []
        """The one that is on its way from there to a slot: it must not be lost if Ctrl-C comes in between."""
        self._ahead = 0
        self._starved = False
        """Whether the unit that is handed out next waits for memory that others hold: nothing new is begun."""
        self._large_batch = 0
        """The last batch that was larger than a slot is planned to be."""
        # Without workers nothing is gained by loading ahead, and the caches are lost.
        self._most_units = slots if plan.workers else 1
        # Items of a stream, which nobody else holds: what the plan has for them, and most of what it has for nothing.
        self._held = held
        self._weighs = False
        """Whether items are held only here: a stream's."""
        self._most_held = items_bytes + (plan.free_bytes - self.own_bytes) * 3 // 4
        self._next_task = 1
        self._next_batch = 0
        self._row_s = self._row_spread_s = self._row_worst_s = probe.load_s
        self._together = 1 if plan.workers else plan.batches_per_slot
        """Batches that may share a slot now: more and more, as loads prove to be quick. Without workers there is never
        more than one slot of loads that only seemed to be."""
        self._copy_s = COPY_S  # a byte
        self._gave_at_s = time.perf_counter()
        self._gave_rows = 0
        self._away_s = 0.0
        self._eager = False
        """Whether the next slot is filled in a thread while the consumer is away, though there are no workers."""
        self._patience = Patience()
        # What loads in this process hold at once; a worker process is measured instead.
        self._inside_bytes = 0
        if not crew.pids():
            each = max(probe.load_bytes, probe.sample_bytes)
            self._inside_bytes = plan.workers * (each + thread_slack(each)) or each
        self._samples_bytes = 0
        """What the samples of a collated batch take, in the process that collates them."""
        # Imports and books. What else has come since then is somebody else's.
        self._launch_bytes = max(0, min(PARENT_BYTES, machine.anon_bytes(os.getpid()) - began.anon))
        self._kept = None if crew.pids() else Kept(threads=plan.workers, began=began)
        self._excess: str | None = None
        """What there is to say of memory that nothing can hold back; said once, outside of the lock."""
        self._excessive = False
        self.beside_bytes = 0
        """Batches that are put together in this process, in memory that is not the arena's."""
        self._texts_most = 0
        """The most that texts took since memory was looked at."""
        self._most_texts = (plan.free_bytes - self.own_bytes) * 3 // 4
        self._batch_texts = 0
        """What the texts of one batch were seen to take."""
        self._measure_at_s = self._looked_at_s = 0.0
        self._measured_s = 0.0
        self._closed = False
        self._owner = os.getpid()
        self.run = 0
        """Counts iterations: an older one finds out here that it was replaced."""
        self._stopped = -1
        """The last one that was ended from outside: whoever goes on with it is told."""

    @property
    def text_bytes(self) -> int:
        """What a task's texts may take beside its slot: they are there up to four times, on their way and as str."""
        return max(LEAST_TEXT_BYTES, self._most_texts // 4)

    def _room_for_texts(self, unit: Unit) -> int:
        """The same for a unit: where many batches share a slot, all slots may fill up with texts at once."""
        if len(unit.indices) * self._each <= self.plan.batch_size:
            return self.text_bytes
        return max(LEAST_TEXT_BYTES, self._most_texts // (4 * len(self._ledger)))

    # ---- one iteration

    def begin(self, units: Iterator[Unit], *, ahead: int) -> int:
        """Start on new units, dropping what an earlier iteration left; the number of this run.

        ``ahead`` is how many units may be drawn before there is a slot for them: 1, or 0 for streams.
        """
        self.check_process()
        with self._lock, self._section:
            self._cancel()
            self._source = units
            self._ahead = ahead * self._units_told()
            if self.cache is not None:
                self.cache.refresh()
            self.run += 1
            return self.run

    def stop(self, run: int) -> list[Unit]:
        """End a run; the units that were begun or drawn and not handed out, in order."""
        if run != self.run or os.getpid() != self._owner:
            return []
        with self._lock, self._section:
            if run != self.run:
                return []
            # The last one that was handed out too: Ctrl-C may have come before the consumer had it.
            left = [*self._begun(), *self._drawn, *self._prepared]
            self._drawn.clear()
            if self._section.broken:  # the books cannot be trusted; the feed makes a new engine
                self._source = None
            else:
                self._cancel()
            self._stopped = run
        self._section.catch_up()
        return left

    def next_chunk(self, run: int, epoch: int) -> tuple[Unit, Chunk] | None:
        """The next slot of an epoch, in order; None at its end. Blocks; raises what a load raised."""
        self.check_process()
        if self._interrupt is not None:
            interrupt, self._interrupt = self._interrupt, None
            raise interrupt
        try:
            return self._next_chunk(run, epoch)
        finally:
            self._section.catch_up()

    def is_over(self, run: int) -> bool:
        """Whether an epoch that has given its last slot is over; not if its consumer has to be told something."""
        self.check_process()
        if not self._goes_on(run) or self._interrupt is not None:
            return False
        self._last = None
        return True

    def _next_chunk(self, run: int, epoch: int) -> tuple[Unit, Chunk] | None:
        began = time.perf_counter()
        # How long the consumer was away, the last times more than those before.
        self._away_s += 0.3 * (began - self._gave_at_s - self._away_s)
        if isinstance(self.crew, InlineCrew) and self.crew.may_help:
            work_s = self._gave_rows // self._each * self._row_s
            self._eager = work_s >= EAGER_S and self._away_s >= EAGER_SHARE * work_s
        if not self._units or self._units[0] is not self._last:
            self._last = None  # whoever asks for more has got it, and its items may be large
        waited = False
        while True:
            with self._lock, self._section:
                self._check(run)
                self._settle()
                if epoch != self._epoch:
                    self._epoch = epoch
                    self._ledger.linger()
                if self._requests:
                    self._answer_requests()
                found = self._ready_head(epoch)
                # Without workers nothing is won by beginning the next one before it is asked for, but for the turn.
                waits = not self.plan.workers and not self._eager
                prepared = self._prepared[0] if self._prepared and waits else None
                wanting = found is None or prepared is None or prepared.epoch != epoch
                if wanting and not self._between(found, epoch):
                    self._fill(pull=True, asked=found is None)
                if found is None and self.cache is not None:
                    found = self._ready_head(epoch)  # what was begun just now may have been there already
                if found is not None:
                    if waited:
                        self.stats.wait_s += time.perf_counter() - began
                    self._measure()
                    self._turn(epoch)
                    found[1].last = bool(self._units) and self._units[0].epoch != epoch
                    self._gave_rows = found[1].rows
                    self._gave_at_s = time.perf_counter()
                    return found
                if (self._units[0].epoch != epoch) if self._units else self._exhausted():
                    if self._broken is not None and not self._units:
                        self._section.told = self._broken
                        raise self._broken
                    self._ledger.linger()
                    return None
                self._answer_requests()
                if self._ledger.outstanding == 0 and not self._ledger.has_free:
                    # Every slot is in the consumer's hands: one more, and copies from now on.
                    self._add_slot()
                    continue
            waited = True
            self._section.catch_up()
            if self._kept is not None:
                self._kept.begin()
            self.crew.wait(self._patience.look_s)
            with self._lock, self._section:
                self._check(run)
                replies = self.crew.take()
                if self._kept is not None:
                    loads = sum(self._by_task[reply.task][2] for reply in replies if reply.task in self._by_task)
                    self._kept.end(loads, sum(reply.seconds for reply in replies))
                for reply in replies:
                    self._take(reply)
                slow = self._slow() if not replies else None
                self.stats.restarts = self.crew.restarts
                if self.crew.retired_bytes:
                    self._measure(now=True)
            if self._excess is not None:
                self._warn_of_excess()
            if slow is not None:  # not within: whoever makes errors of warnings gets one here
                self._warn_of(*slow)

    def _between(self, found: tuple[Unit, Chunk] | None, epoch: int) -> bool:
        """Whether an epoch ends or begins here, without workers: then nothing is begun that can wait for a batch."""
        if self.plan.workers:
            return False
        return found[0].start == 0 if found is not None else bool(self._units) and self._units[0].epoch != epoch

    def _turn(self, epoch: int) -> None:
        """Without workers: load the first batch of the next epoch while the last slot of this one is handed out.

        Only what takes no longer than anybody would notice, for the consumer waits meanwhile.
        """
        unit = self._units[0] if self._units and not self.plan.workers and self.mode is Mode.ROWS else None
        if (
            self._eager
            or unit is None
            or unit.epoch == epoch
            or not unit.open
            or len(unit.indices) * self._row_s > TURN_S
        ):
            return
        for reply in self.crew.take():
            self._take(reply)

    def ready_first(self, run: int, epoch: int) -> tuple[Unit, Chunk] | None:
        """Without workers, while the last slot of an epoch is handed out: the first one of the next, leased already.

        What can be made of it now is not made between the two, where a consumer waits that may need no more than
        microseconds for a batch. If it is dropped, its slot comes free as any other.
        """
        with self._lock, self._section:
            unit = self._units[0] if self._units and not self.plan.workers else None
            if unit is None or not self._goes_on(run) or unit.epoch == epoch or unit.open or unit.failure is not None:
                return None
            chunk = unit.chunks[0]
            if chunk.failures or chunk.memory is not None or chunk.origin is not None:
                return None
            self._settle()
            self._ledger.linger()
            chunk.leased = self._lease(chunk)
            return (unit, chunk) if chunk.leased is not None else None

    def take_first(self, run: int, epoch: int) -> Chunk | None:
        """The same slot when its epoch begins, if something was made of it and there is more behind it."""
        self.check_process()
        with self._lock, self._section:
            unit = self._units[0] if self._units and self._prepared else None
            if unit is None or unit.epoch != epoch or not unit.chunks or unit.chunks[0].made is None:
                return None
            if not self._goes_on(run) or self._interrupt is not None or self._prepared[0].epoch != epoch:
                return None
            self._last = self._units.popleft()
            self._epoch = epoch
            chunk = unit.chunks.popleft()
            self._gave_rows, self._gave_at_s = chunk.rows, time.perf_counter()
            return chunk

    def lease(self, chunk: Chunk) -> tuple[Any, int] | None:
        """Memory of a chunk whose last reference frees the slot; None when it has to be copied."""
        if chunk.memory is not None:
            return self._gathered(chunk)
        with self._lock, self._section:
            self._check_open()
            return self._lease(chunk)

    def _lease(self, chunk: Chunk) -> tuple[Any, int] | None:
        if chunk.leased is not None:
            leased, chunk.leased, chunk.made = chunk.leased, None, None
            return leased
        if not self._ledger.may_lease():
            return None
        self._peeked.discard(chunk.slot)
        self._ledger.lease(chunk.batch)
        offset, capacity = self._regions[chunk.slot]
        mapping, start = self.crew.arena.window(offset, capacity)
        return self._leases.take(chunk.slot, mapping, start, capacity), 0

    @property
    def held(self) -> int:
        """Slots that consumers hold now."""
        with self._lock, self._section:
            self._settle()
            ahead = sum(chunk.leased is not None for unit in self._units for chunk in unit.chunks)
            return self._ledger.leased - ahead

    def peek(self, chunk: Chunk) -> tuple[Any, int]:
        """Memory of a chunk to copy from; ``release`` it afterwards."""
        if chunk.memory is not None:
            self._check_open()
            return self._gathered(chunk)
        with self._lock, self._section:
            self._check_open()
            self._peeked.add(chunk.slot)
            offset, capacity = self._regions[chunk.slot]
            return self.crew.arena.window(offset, capacity)

    def upcoming(self, run: int, epoch: int) -> Chunk | None:
        """The slot that is handed out next, if it is full already: to look at, it stays where it is. Never blocks."""
        with self._lock, self._section:
            if run != self.run or self._closed:
                return None
            if self.plan.workers:  # without any, taking a reply means doing the work
                for reply in self.crew.take():
                    self._take(reply)
            unit = self._units[0] if self._units else None
            if unit is None or unit.epoch != epoch or unit.failure is not None or not unit.chunks:
                return None
            chunk = unit.chunks[0]
            return chunk if (chunk.ready or unit.open == 0) and not chunk.failures and chunk.rows else None

    def spare(self, run: int, epoch: int) -> Any:
        """Memory for a copy of the last batch of a slot, if that is of use: None if not.

        It is where the consumer has to wait for the next slot, and nothing more can be begun until it lets go of this
        one: blocks of the slot after the next are then read meanwhile, and the disk never waits for the end of one
        and the beginning of another.
        """
        if not self._copies_last or self._ledger.has_free or self.upcoming(run, epoch) is not None:
            return None
        with self._lock, self._section:
            return self._own.take()

    def addresses(self) -> list[tuple[int, int]]:
        """Where the memory of the slots lies in this process: addresses and sizes, neighbours as one."""
        found: list[tuple[int, int]] = []
        for slot in range(len(self._ledger)):
            offset, size = self._regions[slot]
            mapping, start = self.crew.arena.window(offset, size)
            address = ctypes.addressof(ctypes.c_char.from_buffer(mapping, start))
            if found and sum(found[-1]) == address:
                found[-1] = (found[-1][0], found[-1][1] + size)
            else:
                found.append((address, size))
        return found

    def release(self, chunk: Chunk) -> None:
        """A chunk was copied: its slot is free."""
        if chunk.memory is not None:
            return
        with self._lock, self._section:
            if chunk.leased is not None:
                chunk.leased = chunk.made = None
                self._settle()
            else:
                self._peeked.discard(chunk.slot)
                self._ledger.copied(chunk.batch)
            self._fill(pull=False)
        self._section.catch_up()

    def close(self) -> None:
        """End the crew. Batches that are alive stay right."""
        if os.getpid() != self._owner:
            self._closed = True
            self.crew.close()
            return
        if self._section.postpone(self.close):
            return
        with self._lock, self._section:
            if self._closed:
                return
            self._closed = True
            self._source = None
            self._prepared.clear()
            self._units.clear()
            self.run += 1
            self._measure(now=True)
            if self.cache is not None and self.cache.in_memory:  # while the arena is there to be given back
                self.cache.close()
            unused = self._unused() if not self._section.broken else []
            self.crew.close()
            self._own.close()
            if self.cache is not None:
                self.cache.close()
            # A batch that is alive keeps the mapping, which is that of all slots: the others' memory goes now.
            for mapping, start, size in unused:
                mapping.madvise(mmap.MADV_REMOVE, start, size)
        if self._excess is not None:
            self._warn_of_excess()

    def _unused(self) -> list[tuple[Any, int, int]]:
        """The memory of the slots that nobody holds, if somebody holds one."""
        self._settle()
        ledger, regions = self._ledger, self._regions
        if not ledger.leased or not hasattr(mmap, "MADV_REMOVE"):
            return []
        kept = {slot for slot in range(len(ledger)) if ledger.state(slot) is State.LEASED} | self._peeked
        free = [slot for slot in range(len(ledger)) if slot not in kept and regions[slot][1]]
        found = [(*self.crew.arena.window(*regions[slot]), regions[slot][1]) for slot in free]
        return [place for place in found if isinstance(place[0], mmap.mmap)]

    def catch_up(self) -> None:
        """Do what was postponed, now that this thread is in the middle of nothing."""
        self._section.catch_up()

    def postpone(self, action: Callable[[], object]) -> bool:
        """Whether this thread is in the middle of something here: then the action is done right after that."""
        return self._section.postpone(action)

    @property
    def broken(self) -> bool:
        """Whether it was interrupted in the middle of something, and should be replaced."""
        return self._section.broken

    # ---- filling

    def _fill(self, *, pull: bool, asked: bool = False) -> None:
        """Begin units while there are free slots; ``pull`` may call user code (a stream's iterator).

        ``asked``: the consumer waits for the next one. What it copies itself is copied only then: it is still warm when
        it is used, and lies in the two slots that are used in turn, not in a third.
        """
        ledger = self._ledger
        if self._starved or (self.mode is Mode.WHOLE and self._requests):
            return  # what is free belongs to those who wait for room
        most = self._most_units + self._eager
        while ledger.has_free and len(self._units) < most and self._light() and (unit := self._draw(pull)) is not None:
            if self.mode is Mode.FLOW and self._units and ledger.free < 2:
                self._prepared.appendleft(unit)  # the last free slot belongs to the unit that is handed out next
                break
            here = self._copies_here(unit)
            memory = self._own.take() if here and self._gathers and not self._units else None
            if here and (self._units or not asked) and memory is None:
                self._prepared.appendleft(unit)
                break
            if memory is not None:
                self._gather(unit, memory, ahead=not asked)
            else:
                # Whoever waits for it does it himself.
                ahead = self._eager and not (asked and not self._units)
                self._begin(unit, here=here, pull=pull, ahead=ahead)
        while pull and len(self._prepared) < self._ahead and (unit := self._draw(pull, fresh=True)) is not None:
            self._prepared.append(unit)
        self._drawn.clear()

    def _begun(self) -> list[Unit]:
        """The units whose items are here, the one that was handed out last among them."""
        last = [] if self._last is None or any(self._last is unit for unit in self._units) else [self._last]
        return [*last, *self._units]

    def _light(self) -> bool:
        """Whether more may be begun, with the items of a stream and the texts that are here already."""
        if self._batch_texts and self._units:
            ahead = sum(max(chunk.text_bytes, self._batch_texts) for unit in self._units for chunk in unit.chunks)
            if ahead + 6 * self._batch_texts > self._most_texts:
                return False
        if not self._weighs:
            return True
        weights = [unit.weight for unit in self._begun()]
        return sum(weights) + max(weights, default=0) < self._most_held or not any(weights)

    def _draw(self, pull: bool, *, fresh: bool = False) -> Unit | None:
        self._drawn.clear()
        if self._prepared and not fresh:
            self._drawn.append(self._prepared[0])
            self._prepared.popleft()
            return self._first_part(self._drawn[0])
        if not pull or self._source is None:
            return None
        try:
            # In one call of C, so that it is never in nobody's hands.
            self._drawn.extend(itertools.islice(self._source, 1))
        except Exception as error:  # noqa: BLE001 - the user's iterator: what it gave before is handed out first
            self._broken = error
        unit = self._drawn[0] if self._drawn else None
        if unit is None:
            self._source = None
        return unit if unit is None or fresh else self._first_part(unit)

    def _first_part(self, unit: Unit) -> Unit:
        """As many batches of a unit as may share a slot now; the rest comes next."""
        if not self._grows:
            return unit
        batch = self.plan.batch_size // self._each
        size = self._together * batch
        # Whoever waits for the first batch of an epoch does not wait for a whole slot.
        if unit.start == 0 or self.plan.workers:
            size = min(size, max(batch, unit.start // batch * batch))
        if len(unit.indices) <= size:
            return unit
        rest = dataclasses.replace(
            unit,
            start=unit.start + size,
            indices=unit.indices[size:],
            items=None if unit.items is None else unit.items[size:],
            skip=0,
            chunks=deque(),
        )
        self._prepared.appendleft(rest)
        return dataclasses.replace(
            unit, indices=unit.indices[:size], items=None if unit.items is None else unit.items[:size], chunks=deque()
        )

    def _exhausted(self) -> bool:
        return self._source is None and not self._prepared

    def _copies_here(self, unit: Unit) -> bool:
        """Whether everything is kept in memory, and the consumer had better copy it itself than have it copied.

        That is so for small batches, which are copied in the time that messages take; and for a consumer that needs
        batches faster than they can be copied: workers would only take turns with it.
        """
        if self.cache is None or not self.cache.at_hand(unit.indices):
            return False
        if not self.plan.workers or self.plan.batch_bytes <= NEAR_BYTES:
            return True
        size = len(unit.indices) * self._each * self.plan.sample_bytes
        return self._away_s < size * self._copy_s

    def _gather(self, unit: Unit, memory: Any, *, ahead: bool) -> None:
        """Have what is kept copied to memory of its own, as soon as nobody waits for the lock: no slot is needed.

        ``ahead``: the consumer works on another batch, and others may begin with this one meanwhile.
        """
        assert isinstance(self.cache, RamStore)
        chunk = Chunk(self._next_batch, -1, len(unit.indices) * self._each, None, (), memory=memory)
        chunk.kept = kept = self.cache.look(unit.indices)
        if ahead and kept is not None:
            chunk.begun = self.cache.begin_copy(kept, memory, 0)
        self._next_batch += 1
        self.stats.cached += chunk.rows
        unit.chunks.append(chunk)
        self._units.append(unit)

    def _gathered(self, chunk: Chunk) -> tuple[Any, int]:
        """Memory of its own with all in it. Not in a section: nothing is lost if this is interrupted."""
        if chunk.kept is not None:
            try:
                if chunk.begun is None:
                    self._copy_here(chunk, chunk.kept, chunk.memory, 0)
                else:
                    assert isinstance(self.cache, RamStore)
                    self.cache.finish_copy(chunk.begun)
            finally:
                self._check_open()  # closed by another thread meanwhile, nothing is there to be copied
            chunk.kept = chunk.begun = None
            self._gave_at_s = time.perf_counter()  # the consumer was not away meanwhile
        return chunk.memory, 0

    def _copy_here(self, chunk: Chunk, kept: Shelved, memory: Any, start: int) -> None:
        assert self.cache is not None
        began = time.perf_counter()
        self.cache.copy(kept, memory, start)
        took_s = (time.perf_counter() - began) / max(1, chunk.rows * self.plan.sample_bytes)
        self._copy_s += 0.2 * (took_s - self._copy_s)

    def _begin(self, unit: Unit, *, here: bool, pull: bool, ahead: bool) -> None:
        self._weighs = unit.weight > 0
        count = loaded = len(unit.indices)
        kept: Shelved | None = None
        if self.cache is not None and (kept := self.cache.look(unit.indices)) is not None:
            loaded -= self.cache.held(kept)
            self.stats.cached += (count - loaded) * self._each
        indices, left = unit.indices, None
        apart = self.cache if isinstance(self.cache, DeviceStore) else None
        if apart is not None and kept is not None:
            left = np.flatnonzero(kept < 0)
            indices = indices[left]
        parts = [slice(0, count)] if here or not len(indices) else self._parts(indices, loaded, _weight(unit))
        if left is not None and isinstance(unit.items, Stretch):  # such items can only be had in a row
            parts = [run for part in parts for run in _runs(part, left)]
        idents = range(self._next_task, self._next_task + len(parts))
        self._next_task += len(parts)
        chunk = self._chunk(idents)
        unit.chunks.append(chunk)
        unit.open = len(parts)
        self._units.append(unit)
        offset, capacity = self._regions[chunk.slot]
        if here and kept is not None:
            chunk.rows, unit.open = count * self._each, 0
            self._copy_here(chunk, kept, *self.crew.arena.window(offset, capacity))
            self._ledger.done(idents[0])
            return
        if apart is not None and kept is not None:
            chunk.origin = apart.origin(unit.indices, kept)
            if not len(indices):
                chunk.rows, unit.open = count * self._each, 0
                self._ledger.done(idents[0])
                return
        if self.mode is Mode.ROWS:
            self._enlarge_pages_of_all(chunk.slot, count * self._each * self.plan.sample_bytes)
        told = None
        if self._mixing is not None and self._scatters and left is None:
            told = self._told(unit, parts, self._following(pull))
        elif self._absent is not None:
            told = self._told_rows(len(parts))
        for number, (ident, part) in enumerate(zip(idents, parts, strict=True)):
            start, places = (part.start, None) if isinstance(part, slice) else (0, part)
            part = part if left is None else _row(left[part])  # from here on: which items of the unit
            if isinstance(part, slice):
                items = None if unit.items is None else unit.items[part]
            else:
                items = _chosen(unit.items, part)
            indices = unit.indices[part]
            task = Task(ident, chunk.slot, offset, capacity, start * self._each, unit.epoch, indices, items, unit.skip)
            task.places = places
            task.ahead = None if told is None else told[number]
            task.text_bytes = self._room_for_texts(unit)
            loaded = len(indices)
            if kept is not None and self.cache is not None:
                task.kept = kept[part] if self.mode is Mode.ROWS else kept
                self.cache.begun(ident, indices, task.kept)
                loaded -= self.cache.held(task.kept)
            self._by_task[ident] = (unit, chunk, loaded, part)
            if ahead and isinstance(self.crew, InlineCrew):
                self.crew.submit_ahead(task, start=pull)
            else:
                self.crew.submit(task)

    def _parts(self, indices: npt.NDArray[np.int64], loaded: int, weight: int) -> Sequence[Part]:
        """Which of these items each task has: so many that follow each other, or those of a block."""
        if self._mixing is not None:
            by_block = np.argsort(indices)
            cuts = self._mixing.cuts(indices[by_block])
            each = self._blocks_a_task(len(cuts) + 1, len(indices))
            return np.split(by_block, cuts[each - 1 :: each])
        count = len(indices)
        size = count if self.mode is not Mode.ROWS else self._rows_a_task(count, loaded)
        if self.mode is Mode.ROWS and weight > TASK_ITEM_BYTES:
            size = min(size, count * TASK_ITEM_BYTES // weight + 1)
        return [slice(start, start + size) for start in range(0, count, size)]

    def _blocks_a_task(self, blocks: int, count: int) -> int:
        """Blocks that one worker reads at once; everybody has a few such tasks."""
        if not self._scatters:
            return 1
        block_bytes = max(1, count * self._each * self.plan.sample_bytes // blocks)
        return max(1, min(BLOCK_TASK_BYTES // block_bytes, blocks // (BLOCK_TASKS * max(1, self.plan.workers))))

    def _following(self, pull: bool) -> Unit | None:
        """The unit that will be begun after this one, drawn now if it may be."""
        if not self._prepared and pull and (unit := self._draw(pull, fresh=True)) is not None:
            self._prepared.append(unit)
            self._drawn.clear()
        return self._prepared[0] if self._prepared else None

    def _units_told(self) -> int:
        """How many units are drawn before there is a slot for them, so that the disk can be told of their rows."""
        if self._mixing is not None and self._scatters:
            return 2  # the one after the next, too, which may be begun where nothing can be drawn
        if self._absent is None:
            return 1
        # Two at least: of one, nothing is left when the slot that is free now has been given to it.
        return max(2, self._most_told() // (self.plan.batch_size * self.plan.batches_per_slot // self._each or 1))

    def _most_told(self) -> int:
        """Items that the disk is told of at a time."""
        return max(1, min(TOLD_ROWS, TOLD_BYTES // max(1, self.plan.sample_bytes * self._each)))

    def _told_rows(self, tasks: int) -> list[npt.NDArray[np.int64]] | None:
        """What each task is to tell the system of, where rows lie anywhere: all that was drawn since."""
        coming = [unit for unit in self._prepared if not unit.told]
        if not coming or self._absent is None or not self._absent(coming[0].indices):
            return None
        for unit in coming:
            unit.told = 1
        return np.array_split(np.concatenate([unit.indices for unit in coming])[: self._most_told()], tasks)

    def _told(self, unit: Unit, parts: Sequence[Part], following: Unit | None) -> list[npt.NDArray[np.int64]]:
        """What each task is to tell the system of, so that a disk always knows of so many bytes beyond what is read.

        At the end of a unit that is the beginning of the next, for which there is no slot yet: the disk would wait.
        """
        size = max(1, len(unit.indices) * self._each * self.plan.sample_bytes // len(parts))
        many = max(1, TOLD_BYTES // size)
        upcoming = [unit.indices[part] for part in parts]
        if following is not None:
            first = self._parts(following.indices, len(following.indices), _weight(following))[:many]
            upcoming += [following.indices[part] for part in first]
            following.told = max(0, len(upcoming) - len(parts))
        none = np.empty(0, np.int64)
        now = upcoming[unit.told : many + 1]
        later = upcoming[max(unit.told, many + 1) : many + len(parts)]
        told = [np.concatenate(now) if now else none, *later]
        return [*told, *[none] * (len(parts) - len(told))]

    def _chunk(self, tasks: Sequence[int]) -> Chunk:
        batch = self._next_batch
        self._next_batch += 1
        return Chunk(batch, self._ledger.begin(batch, tasks), 0, None, ())

    def _enlarge_pages(self, slot: int, size: int) -> bool:
        """Have so much of a slot in large pages, once, if most of it is used; False if a part of it has to wait."""
        offset, capacity = self._regions[slot]
        if offset in self._enlarged or 2 * size < capacity:
            return True
        if not self.crew.arena.enlarge_pages(offset, size):
            return False
        self._enlarged.add(offset)
        return True

    def _enlarge_pages_of_all(self, slot: int, size: int) -> None:
        """The same, for each slot before the first task is given out: while workers are busy it takes much longer."""
        for number in [slot] if self._enlarged else range(len(self._ledger)):
            if not self._enlarge_pages(number, size):
                break

    def _rows_a_task(self, count: int, loaded: int) -> int:
        """Items a task, so that it is worth its message and a slow one holds up little else; so many are loaded."""
        if self.plan.workers <= 1:
            return count
        task_s = QUICK_GROUP_S if self._row_s < QUICK_LOAD_S else TASK_S  # what shares a slot is one task
        size = count
        if self._row_s > 0 and loaded:
            each_s = self._row_s * loaded / count
            alike = self._row_spread_s < ALIKE * self._row_s and self._row_worst_s < self._row_s
            alike = alike and each_s >= LONG_LOAD_S
            parts = 1 if alike else TASKS_A_WORKER if each_s * count >= LONG_BATCH_S else FEW_TASKS_A_WORKER
            even = count // (parts * self.plan.workers)
            size = max(int(task_s / each_s) + 1, min(even, int(MOST_TASK_S / each_s)))
            if self._many:
                size = max(size, int(MANY_TASK_S / each_s))
        size = min(size, COPY_TASK_BYTES // max(1, self.plan.sample_bytes * self._each) + 1) if not loaded else size
        return -(-count // max(1, count // size))  # all alike: no rest that is a task of its own

    # ---- replies

    def _take(self, reply: Reply) -> None:
        if reply.status is Status.MORE:
            self._requests.append(reply)
            if reply.body is not None:
                unit, chunk, *_ = self._by_task[reply.task]
                self._finish(unit, chunk, reply, last=False)
            self._answer_requests()
            return
        unit, chunk, count, part = self._by_task.pop(reply.task)
        unit.open -= 1
        if self.cache is not None and (told := self.cache.taken(reply.task, reply.kept)) is not None:
            self.notices.append(told)
        # A worker knows the place of an item in its task only.
        if reply.failures:
            reply.failures = tuple(_moved(failure, part) for failure in reply.failures)
        if isinstance(reply.body, Failure):
            reply.body = _moved(reply.body, part)
        if reply.status is Status.FAILED and reply.body.ordinal == Failure.TEXTS:
            self._account(reply.task)
            self._crowd(unit, reply.body.error.args[0])
            return
        if reply.status is Status.FAILED:
            if unit.failure is None or reply.body.ordinal < unit.failure.ordinal:
                unit.failure = reply.body
            chunk.body = [*(chunk.body or ()), *reply.body.texts]
            self._account(reply.task)
            return
        # Recent tasks count more; the first ones, with cold caches, are soon forgotten.
        if count:
            off_s = abs(reply.seconds / count - self._row_s)
            self._row_spread_s = 0.8 * self._row_spread_s + 0.2 * off_s
            self._row_worst_s = max(off_s, 0.98 * self._row_worst_s)  # of the last hundred or so
            self._row_s = 0.8 * self._row_s + 0.2 * reply.seconds / count
            batch_s = max(self._row_s, reply.seconds / count) * self.plan.batch_size / self._each
            patience_s = group_s(self._row_s, self.plan.workers)
            self._together = max(1, min(2 * self._together, int(patience_s / batch_s) if batch_s > 0 else 1))
            if self._batch_texts:
                self._together = max(1, min(self._together, self.text_bytes // (2 * self._batch_texts)))
        self._finish(unit, chunk, reply, last=True)

    def _finish(self, unit: Unit, chunk: Chunk, reply: Reply, *, last: bool) -> None:
        if self.mode is Mode.ROWS:
            if reply.body and not unit.crowded:
                chunk.body = (chunk.body or []) + reply.body
                chunk.text_bytes += _text_bytes(reply.body)
                rows = len(unit.indices) * self._each
                share = chunk.text_bytes * self.plan.batch_size // rows
                self._batch_texts = max(self._batch_texts * 15 // 16, share)
                self._texts_most = max(self._texts_most, self._texts())
                if chunk.text_bytes > self._room_for_texts(
                    unit
                ):  # each task was within its limit, and all together are not
                    self._crowd(unit, chunk.text_bytes)
                    chunk.body, chunk.text_bytes = None, 0
            chunk.failures += reply.failures
            chunk.rows = len(unit.indices) * self._each
        elif self.mode is Mode.WHOLE:
            chunk.body, chunk.rows = reply.body, reply.rows
            size = 0 if reply.body is None else _end(reply.body)
            if size > self._regions.slot_bytes:
                self._large_batch = max(self._large_batch, chunk.batch)
            self._enlarge_pages(chunk.slot, size)
            if self._kept is not None:
                self._samples_bytes = max(self._samples_bytes, size)
        else:
            chunk.counts, chunk.body = reply.body if reply.body is not None else ([], None)
            if isinstance(chunk.body, list):
                chunk.text_bytes = _text_bytes(chunk.body)
            chunk.rows, chunk.failures = reply.rows, reply.failures
            self._enlarge_pages(chunk.slot, chunk.rows * self.plan.sample_bytes)
        self._account(reply.task)
        if not last:
            chunk.ready = True

    def _crowd(self, unit: Unit, size: int) -> None:
        """Texts took more than there is room for: what shares the slot is done batch by batch, if there is any."""
        unit.crowded = max(unit.crowded, size, 1)
        if len(unit.indices) * self._each <= self.plan.batch_size and unit.failure is None:
            unit.failure = Failure(0, self._texts_too_large(size), "")
        if unit is self._units[0]:
            self._put_back_later_units()  # and of its own tasks those that nobody has begun are not needed

    def _cut_up(self, unit: Unit) -> None:
        """Have a unit done again, each of its batches in a slot of its own."""
        self._put_back_later_units()
        self._units.clear()
        self._drop(unit)
        self._together = 1
        self._batch_texts = max(self._batch_texts, self.text_bytes // 2)
        size = self.plan.batch_size // self._each
        for start in reversed(range(0, len(unit.indices), size)):
            part = slice(start, start + size)
            items = None if unit.items is None else unit.items[part]
            skip = 0 if start else unit.skip
            weight = unit.weight * len(unit.indices[part]) // len(unit.indices)
            self._prepared.appendleft(
                Unit(unit.epoch, unit.start + start, unit.indices[part], items, skip, unit.name, weight)
            )

    def check_texts(self, size: int) -> None:
        """Raise if the texts of a batch that is put together take more than there is room for."""
        room = self._regions.slot_bytes + self._most_texts // 2  # they lay in a slot, as far as they fitted
        if size > room:
            raise self._texts_too_large(size)

    def _texts_too_large(self, size: int) -> BudgetError:
        least = self.plan.memory + max(0, 8 * size - self._most_texts) * 4 // 3 + MiB(2)
        found = f"took {format_bytes(size)} before it was over" if size else "found no room in the worker"
        return BudgetError(
            f"the texts of a batch, which are larger than the first ones, {found}, and the budget of "
            f"{format_bytes(self.plan.memory)} has {format_bytes(self.text_bytes)} for them: give memory={least} or "
            "more, or a smaller batch_size",
            least=least,
        )

    def _withdraw(self) -> None:
        for task in self.crew.withdraw():
            self._by_task.pop(task)[0].open -= 1
            self._account(task)
            if self.cache is not None:
                self.cache.withdrawn(task)

    def _account(self, task: int) -> None:
        if self._ledger.slot_of(task) is not None:
            self._ledger.done(task)

    def _answer_requests(self) -> None:
        """Give room to workers that wait for it: to the unit that is handed out next before all others."""
        if not self._requests:
            return
        places = {id(unit): place for place, unit in enumerate(self._units)}
        self._requests = deque(sorted(self._requests, key=lambda r: places.get(id(self._by_task[r.task][0]), -1)))
        for _ in range(len(self._requests)):
            reply = self._requests.popleft()
            unit, chunk, count, part = self._by_task[reply.task]
            if all(unit is not live for live in self._units):  # cancelled
                self._account(reply.task)
                self.crew.grant(reply, Grant(0, None, 0))
            elif reply.body is None:
                self._enlarge(reply, unit, chunk)
            elif self._ledger.free >= (1 if unit is self._units[0] else 2):
                fresh = self._chunk([reply.task])
                unit.chunks.append(fresh)
                self._by_task[reply.task] = (unit, fresh, count, part)
                offset, capacity = self._regions[fresh.slot]
                self.crew.grant(reply, Grant(fresh.slot, offset, capacity))
            else:
                self._requests.append(reply)

    def _enlarge(self, reply: Reply, unit: Unit, chunk: Chunk) -> None:
        """A batch is larger than its slot: the slot takes the place of a free one that is larger, or a new place.

        Only the unit that is handed out next may take from others, else two could wait for each other for ever.
        """
        regions, ledger = self._regions, self._ledger
        self._starved = self._starved and unit is not self._units[0]
        fits = self._has_room_before(unit, reply.rows) and self._find_room(chunk.slot, reply.rows)
        if not fits and unit is self._units[0]:
            self._put_back_later_units()
            fits = self._find_room(chunk.slot, reply.rows)
            while not fits and ledger.usable > 2 and (slot := ledger.retire()) is not None:
                regions.give_up(slot)
                fits = regions.enlarge(chunk.slot, reply.rows)
        if fits:
            self.crew.grant(reply, Grant(chunk.slot, *regions[chunk.slot]))
        elif unit is not self._units[0] or ledger.outstanding > 1 + len(self._requests):
            self._requests.append(reply)  # its turn comes, or slots that are still being filled come free
            self._starved = unit is self._units[0]
        else:
            unit.failure = Failure(0, self._too_large(reply.rows, regions.room + regions[chunk.slot][1]), "")
            self._account(reply.task)
            self.crew.grant(reply, Grant(0, None, 0))

    def _find_room(self, slot: int, size: int) -> bool:
        regions = self._regions
        # Memory that was written before takes the next batch at ten times the speed of fresh memory.
        larger = [(regions[free][1], free) for free in self._ledger.free_slots if regions[free][1] >= size]
        if larger:
            regions.exchange(slot, min(larger)[1])
            return True
        return regions.enlarge(slot, size)

    def _has_room_before(self, unit: Unit, size: int) -> bool:
        """Whether there is room for this unit and as much for each before it, which else would have to take it back."""
        regions = self._regions
        needed = 1
        for earlier in self._units:
            if earlier is unit:
                break
            needed += bool(earlier.open) and regions[earlier.chunks[-1].slot][1] < size
        large = sum(regions[free][1] >= size for free in self._ledger.free_slots)
        return large + regions.room // size >= needed

    def _put_back_later_units(self) -> None:
        """Give up what was read ahead, to be read again later: its memory is needed now."""
        while len(self._units) > 1:
            unit = self._units.pop()
            for chunk in unit.chunks:
                self._ledger.drop(chunk.batch)
            self._prepared.appendleft(
                dataclasses.replace(unit, chunks=deque(), open=0, failure=None, seen_ordinal=-1, seen=0)
            )
        self._withdraw()  # perhaps nobody is left to begin them: all workers may wait for room

    def _too_large(self, size: int, room: int) -> BudgetError:
        # What a worker takes before it loads anything differs from start to start, by less than this.
        least = self.plan.memory + 2 * (size - room) + MiB(2)
        return BudgetError(
            f"a collated batch takes {format_bytes(size)}, and the budget of {format_bytes(self.plan.memory)} has "
            f"{format_bytes(max(0, room))} for it: give memory={least} or more, or a smaller batch_size",
            least=least,
        )

    # ---- slots

    def _ready_head(self, epoch: int) -> tuple[Unit, Chunk] | None:
        while self._units and self._units[0].epoch == epoch:
            unit = self._units[0]
            if unit.crowded and unit.failure is None and unit.open == 0:
                self._cut_up(unit)
                return None
            if unit.chunks:
                chunk = unit.chunks[0]
                self._last = unit
                if unit.open == 0 and unit.failure is not None and (rows := self._good_rows(unit.failure)):
                    chunk.rows = rows
                    unit.chunks.popleft()
                    return unit, chunk
                if chunk.ready or (unit.open == 0 and not unit.failure):
                    unit.chunks.popleft()
                    if unit.open == 0 and not unit.chunks and unit.failure is None:
                        self._units.popleft()
                    return unit, chunk
            if unit.open:
                return None
            self._units.popleft()
            if unit.failure is not None:
                # It is told, and not to be tried again; what else is in its unit may be, if nobody else has it.
                self._last = (
                    _without(unit, unit.failure.ordinal) if unit.weight and self.mode is not Mode.FLOW else None
                )
                self._drop(unit)
                raise error_of(unit.failure, unit, self.plan, spare_bytes=self._spare + self.own_bytes)
        return None

    def _good_rows(self, failure: Failure) -> int:
        """Rows of full batches in a slot that come before the one with the item that failed."""
        if self.mode is not Mode.ROWS or failure.ordinal < 0 or self._mixing is not None:
            return 0
        return failure.ordinal * self._each // self.plan.batch_size * self.plan.batch_size

    def _drop(self, unit: Unit) -> None:
        for chunk in unit.chunks:
            if self._ledger.ready(chunk.batch) is not None:
                self._ledger.copied(chunk.batch)
        unit.chunks.clear()

    def _settle(self) -> None:
        ledger, regions = self._ledger, self._regions
        while self._freed:
            slot = self._freed.popleft().slot
            replaced = slot == ledger.lingers and self._added
            ledger.ended(slot)
            if replaced and (spare := ledger.retire()) is not None:
                self._added -= 1
                regions.remove(spare)
            if regions.enlarged(slot) and ledger.retired and self._next_batch - self._large_batch > SHRINK_AFTER:
                regions.restore(slot)
                while (other := ledger.retired) and regions.restore(other[0]):
                    ledger.revive(other[0])

    def _refill(self) -> None:
        """The last view of a batch is gone, in any thread, perhaps inside the garbage collector."""
        if self._closed or os.getpid() != self._owner:
            return
        # Whoever holds the lock settles before letting go, or does when it next takes it; it is tried again because
        # the holder may have looked just before this slot was noted.
        try:
            while (
                (self._freed or self._own.freed) and not self._section.inside() and self._lock.acquire(blocking=False)
            ):
                try:
                    with self._section:
                        self._settle()
                        self._own.settle()
                        self._fill(pull=False)
                finally:
                    self._lock.release()
        except Exception:
            raise
        except BaseException as error:  # noqa: BLE001 - lost if raised here, in a callback: the consumer's next step does
            self._interrupt = error
        self._section.catch_up()

    def _add_slot(self) -> None:
        self._added += 1
        self._ledger.grow()
        self._regions.add()

    def _cancel(self) -> None:
        """Drop everything that was not handed out; tasks that are being done are waited for by nobody."""
        self._source = self._broken = self._last = None
        self._starved = False
        self._prepared.clear()
        self._units.clear()
        self._settle()
        self._ledger.linger()
        self._ledger.cancel()
        self._peeked.clear()
        self._withdraw()
        self._answer_requests()

    def check_process(self) -> None:
        """Raise where this is a process that was forked off: what it has are copies of books, not slots."""
        if (pid := os.getpid()) != self._owner:
            raise LeaseError(
                f"this feed belongs to process {self._owner}, and this is process {pid}, forked from it: make a Feed "
                "in the process that iterates it"
            )

    def _goes_on(self, run: int) -> bool:
        """Whether an iteration is the one that is going on."""
        return run == self.run and run != self._stopped

    def _check_open(self) -> None:
        if self._closed:
            raise FeedClosed("the feed was closed: make a new one to go on")

    def _check(self, run: int) -> None:
        self._check_open()
        if not self._goes_on(run):
            raise LeaseError(
                "this iteration was ended by a newer one over the same feed, or by load_state_dict: one feed gives one "
                "iteration at a time, because they share its slots; make a second Feed to iterate twice at once"
            )

    def _slow(self) -> tuple[int, Any] | None:
        """Nothing came for a while: the worker that is at the same item for unusually long, if there is one."""
        slow = self._patience.tried(time.monotonic(), self.crew.busy(), usual_s=self._row_s)
        if slow is None or slow.task not in self._by_task:
            return None
        unit, _, _, part = self._by_task[slow.task]
        together = slow.ordinal in (Failure.COLLATING, Failure.TOGETHER)
        return slow.worker, _item(unit, Failure.BATCH if together else _place(slow.ordinal, part))

    def _warn_of(self, worker: int, item: Any) -> None:
        stack = self.crew.stack(worker)
        where = f"; it is at\n{stack}" if stack else ""
        warnings.warn(
            f"worker {worker} has been busy for more than {self._patience.slow_s:g} s with {shown(item)}, and the "
            f"next batch waits for it (timeout=... would end it){where}",
            SlowLoad,
            stacklevel=users_level(),
        )

    # ---- memory

    def look(self) -> None:
        """Bring the numbers of memory up to date, unless somebody else is at work or it was done a moment ago."""
        moment = time.monotonic()
        if self._closed or moment < self._looked_at_s + LOOK_S or os.getpid() != self._owner:
            return
        self._looked_at_s = moment
        if not self._section.inside() and self._lock.acquire(blocking=False):
            try:
                with self._section:
                    self._measure(now=True)
            finally:
                self._lock.release()

    def _measure(self, *, now: bool = False) -> None:
        moment = time.monotonic()
        if not now and moment < self._measure_at_s:
            return
        started_s = time.thread_time()  # the processor's: by the clock, a look would take long on a busy machine
        stats = self.stats
        stats.cache_bytes, counted = (0, 0) if self.cache is None else self.cache.resident_bytes()
        stats.arena_bytes = max(0, self.crew.arena.resident_bytes() - counted)
        begun = self._begun()
        texts, self._texts_most = max(self._texts_most, self._texts()), 0
        stats.other_bytes = self._held() + sum(map(_weight, begun)) + self.beside_bytes + texts
        stats.other_bytes += self._own.nbytes
        stats.other_bytes += self._launch_bytes
        stats.worker_bytes = self._inside_bytes
        if self._kept is not None:
            stats.worker_bytes = self._with_kept(self._kept.bytes)
            self._look_at_excess()
        own, risen = machine.crew_bytes(self.crew.pids(), forked=getattr(self.crew, "forked", False))
        stats.worker_bytes += own
        # What was in slots that are gone since is counted once, not with every worker that had it mapped.
        arena = self.crew.arena
        fallen = max(0, arena.most_bytes - counted - stats.arena_bytes)
        risen = [max(0, size - arena.returned_bytes) for size in risen]
        arena.most_bytes = arena.returned_bytes = 0
        # What each rose to in between is known, whether together is not: one surely did, of the others half is counted.
        most_risen = max(risen, default=0)
        used = stats.arena_bytes + stats.worker_bytes + stats.cache_bytes + stats.other_bytes
        together = used + fallen + most_risen + (sum(risen) - most_risen) // 2
        # A worker that was replaced is not there any more, and was as large as it says.
        stats.peak_bytes = max(stats.peak_bytes, together, used + self.crew.retired_bytes)
        self.crew.retired_bytes = 0
        took_s = time.thread_time() - started_s
        self._measured_s += took_s
        stats.measure_s = self._measured_s + self.crew.measure_s + (self._kept.spent_s if self._kept else 0.0)
        self._measure_at_s = moment + max(MEASURE_S, took_s / MEASURE_SHARE)

    def _texts(self) -> int:
        """What the texts take that wait beside their slots."""
        return sum(chunk.text_bytes for unit in self._units for chunk in unit.chunks)

    def _with_kept(self, kept: int) -> int:
        """What loads in this process take; those of threads are in the midst of something whenever they are seen."""
        workers = self.plan.workers
        kept = max(0, kept - self.stats.other_bytes)  # texts come about while loads run, and are counted as such
        inside = self._inside_bytes + max(1, workers) * self._samples_bytes
        if not workers:
            return inside + kept
        # Whether threads are at their most at once nobody knows: never more than the process has grown in all.
        assert self._kept is not None
        return min(max(inside, kept), self._kept.risen(self.stats.arena_bytes))

    def _look_at_excess(self) -> None:
        """Loads in this process keep more than the budget has room for: nothing stops them, so it is said."""
        stats, plan = self.stats, self.plan
        assert self._kept is not None
        used = stats.arena_bytes + stats.worker_bytes
        if self._excessive or used <= plan.memory // 2:
            return
        if not self._kept.suspected:
            self._kept.suspect()
            if not self._closed:  # the next look will tell
                return
        if used <= plan.memory:
            return
        kept = self._kept.confirmed()
        stats.worker_bytes = self._with_kept(kept)
        used = stats.arena_bytes + stats.worker_bytes
        if used <= plan.memory:
            return
        self._excessive = True
        where = f'in its threads (executor="{plan.executor}")' if plan.workers else "itself (num_workers=0)"
        self._excess = (
            f"loads (or other threads of this process, while they ran) have kept {format_bytes(kept)}, so that the "
            f"feed takes {format_bytes(used)} of a budget "
            f"of {format_bytes(plan.memory)}: this process loads {where}, where nothing can hold "
            'them to it. Worker processes can be limited and replaced: give executor="process" and num_workers=1 or '
            "more; or let load keep less"
        )

    def _warn_of_excess(self) -> None:
        said, self._excess = self._excess, None
        warnings.warn(str(said), BudgetWarning, stacklevel=users_level())


def all_failed(count: int, item: Any, last: BaseException) -> LoadError:
    """What the consumer gets when so many items that are to be left out failed one after the other."""
    return LoadError(
        f"the last {count} items all failed, so something is wrong with all of them; the last was {shown(item)}: "
        f"{said(last)}",
        item=item,
    )


def _without(unit: Unit, ordinal: int) -> Unit | None:
    """The unit as if one of its items had never been there."""
    if ordinal < 0 or unit.items is None:
        return None
    items = [*unit.items[:ordinal], *unit.items[ordinal + 1 :]]
    return Unit(unit.epoch, unit.start, unit.indices[: len(items)], items, weight=unit.weight)


def _text_bytes(texts: Texts) -> int:
    return sum(sys.getsizeof(text) for _, _, text in texts)


def _end(body: Any) -> int:
    """Bytes of a slot that a collated batch takes."""
    return max((offset + dtype.itemsize * math.prod(shape) for _, dtype, shape, offset in body.leaves), default=0)


def _chosen(items: Sequence[Any] | None, part: npt.NDArray[np.int64]) -> Sequence[Any] | None:
    if items is None or isinstance(items, Scatter):
        return None if items is None else items[part]
    return [items[i] for i in part.tolist()]


def _runs(part: Part, left: npt.NDArray[np.int64]) -> Iterator[Part]:
    """The same in pieces, each of places that follow each other in ``left``."""
    if not isinstance(part, slice):
        yield part
        return
    cuts = part.start + 1 + np.flatnonzero(np.diff(left[part]) != 1)
    for start, stop in pairwise((part.start, *cuts.tolist(), min(part.stop, len(left)))):
        yield slice(start, stop)


def _row(places: npt.NDArray[np.int64]) -> Part:
    """Places that follow each other as a slice, others as they are."""
    first, last = int(places[0]), int(places[-1])
    return slice(first, last + 1) if last - first == len(places) - 1 and (np.diff(places) == 1).all() else places


def _place(ordinal: int, part: Part) -> int:
    """The place in its unit of an item of a task."""
    return part.start + ordinal if isinstance(part, slice) else int(part[ordinal])


def _moved(failure: Failure, part: Part) -> Failure:
    """The same failure, with its place in the unit."""
    at = failure.ordinal
    return failure if at < 0 else dataclasses.replace(failure, ordinal=_place(at, part))


def _item(unit: Unit, ordinal: int) -> Any:
    """The item at a place of a unit, or all of them where it is nobody's alone."""
    if ordinal < 0:
        return list(unit.items) if unit.items is not None else unit.indices.tolist()
    if ordinal >= len(unit.indices):
        return None
    if unit.name is not None:
        return unit.name(int(unit.indices[ordinal]))
    return unit.items[ordinal] if unit.items is not None else int(unit.indices[ordinal])


def _weight(unit: Unit) -> int:
    """Bytes of its items in this process: of a stream, or rows that are sent to a load."""
    return unit.items.nbytes if isinstance(unit.items, Samples) else unit.weight


def error_of(failure: Failure, unit: Unit, plan: Plan | None = None, *, spare_bytes: int = 0) -> Exception:
    """The exception that the consumer sees for an item that failed; ``spare_bytes`` are free, but not for workers."""
    error = failure.error
    item = _item(unit, failure.ordinal)
    if isinstance(error, SpecError) and (error.item is None or unit.name is not None):
        error.item = item
    if failure.trace and isinstance(error, LoadTimeout):
        error.add_note(f"where it was:\n{printable(failure.trace.rstrip())}")
    if isinstance(error, WorkerLost) and unit.name is not None:
        error.add_note(f"index {error.item} is {shown(item)}")
        error.item = item
    if isinstance(error, SpecError | WorkerLost | LoadTimeout | BudgetError):
        return error
    what, advice = ("load", ' (to leave such items out: on_error="skip")')
    if failure.ordinal == Failure.BATCH:
        what, advice = "collate_fn", ""
    elif failure.ordinal == Failure.UNPACKING:
        what, advice = "unpacking", ""
    if isinstance(error, MemoryError) and plan is not None and plan.workers:
        share = plan.worker_bytes + (plan.free_bytes - spare_bytes) // plan.workers
        fresh = ", and a fresh one had no room for it either" if failure.fresh else ""
        advice = (
            f" (each of {plan.workers} workers may take {format_bytes(share)} of the budget of "
            f"{format_bytes(plan.memory)}{fresh}: give more memory or fewer workers, a smaller batch_size, or let load "
            "make smaller temporaries)"
        )
    told = str(error) if type(error) is LoadError else said(error)  # one that could not travel is told by its words
    loaded = LoadError(f"{what} failed for {shown(item)}: {told}{advice}", item=item)
    if failure.trace:
        error.add_note(f"where it was raised:\n{printable(failure.trace.rstrip())}")
    loaded.__cause__ = error
    return loaded
