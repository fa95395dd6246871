"""One pass over the items: turns chunks of the engine into batches, and keeps count of what was handed out.

Runs in the parent. Most batches are handed out as they lie in their slot. What cannot be (items with any number of
samples, everything after an item that was skipped) is copied out and cut into batches here.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import warnings
from collections import deque
from typing import Any, Final

import numpy as np
import optree

from penstock._core import context
from penstock._core.batch import Assembler, nbytes_of, packed_batch, rows_batch
from penstock._core.bookmark import Bookmark
from penstock._core.cache import CacheWarning
from penstock._core.cache_device import Origin
from penstock._core.crew.lives import LOST_IN_A_ROW, all_lost
from penstock._core.delivery import Delivery
from penstock._core.engine import SKIPS_IN_A_ROW, Chunk, Engine, Unit, all_failed, error_of
from penstock._core.errors import LoadError, LoadTimeout, SpecError, WorkerLost, said
from penstock._core.fill import COLLATE_INDEX, recast
from penstock._core.launch import Launched
from penstock._core.layout import Layout
from penstock._core.patience import users_level
from penstock._core.program import Pad
from penstock._core.schedule import Schedule
from penstock._core.spec import NAMESPACE, flatten, rebuilt
from penstock._core.stats import Stats
from penstock._core.task import Mode

__all__ = ["Epoch", "ResourceHeld"]


_END: Final = object()  # in place of a batch: there is none


class ResourceHeld(UserWarning):
    """Batches are handed out as copies because the consumer keeps too many."""


class _PutBy:
    """What was copied out of slots and waits to be handed out: its rows, and whose they are."""

    __slots__ = ("assembler", "segments", "units")

    def __init__(self) -> None:
        self.assembler = Assembler()
        self.units: list[Unit] = []
        self.segments: deque[list[int]] = deque()  # position, samples of it seen before, rows


class Epoch:
    """One pass over the items of a feed; an iterator of batches."""

    # One is made between two epochs, while a consumer waits that may need no more than microseconds for a batch: hence
    # the slots, and nothing in them that most epochs do without.
    __slots__ = (
        "__weakref__", "_base", "_begun", "_each", "_ends", "_engine", "_given_bytes", "_inside", "_keeps", "_launched",
        "_over", "_place", "_plain", "_put_by", "_schedule", "_shared", "_stats", "_turn", "complete", "number", "run",
    )  # fmt: skip

    def __init__(
        self,
        launched: Launched | None,
        schedule: Schedule,
        place: Bookmark,
        *,
        stats: Stats,
        number: int,
        run: int,
        keeps: object,
    ) -> None:
        # ``for batch in Feed(...)``: nothing else holds the feed, and it ends its workers when nothing does.
        self._keeps = keeps
        self._launched = launched
        self._engine: Engine | None = launched.engine if launched is not None else None
        self._schedule = schedule
        self._place = place
        self._stats = stats
        self.run = run
        """Which run of the engine it belongs to: the next epoch may share it."""
        self.number = number
        """Which epoch this is."""
        self._base, self._inside = place.base, place.inside
        self._turn = threading.Lock()
        self._over = launched is None
        self.complete = False
        """Whether all of it was handed out."""
        self._put_by: _PutBy | None = None
        self._given_bytes = 0
        """What was put together for the batch that the consumer has."""
        self._shared: _Shared | None = None
        self._begun = self._ends = False
        """Whether it was asked for anything, and whether the last of its slots was handed out."""
        self._plain = False
        """Whether its batches are handed out as they lie in the slot."""
        self._each = 1 if launched is None else launched.options.each or 1

    def __iter__(self) -> Epoch:
        return self

    def __len__(self) -> int:
        self._schedule.count()
        samples = self._schedule.samples_from(self._base, self._inside)
        if samples is None:
            raise TypeError("how many batches this epoch has is known only afterwards")
        if self._launched is None:
            return 0
        size = self._launched.plan.batch_size
        return samples // size if self._launched.options.drop_last else -(-samples // size)

    def __next__(self) -> Any:
        # Two threads may share an epoch: each batch goes to one of them.
        place, before = self._place, None
        try:
            with self._turn:
                if self._over:
                    raise StopIteration
                before = place.epoch, place.position, place.inside
                batch = self._next()
                if self._engine is not None:
                    self._engine.catch_up()
                if batch is _END:
                    before = None
                    raise StopIteration
        except BaseException:
            if before is not None:
                # Ctrl-C may have come after the batch was counted as handed out, and nobody has it.
                if place.epoch == before[0]:
                    place.move(*before)
                self.close()
            raise
        return batch

    def __del__(self) -> None:
        # Not a way to close: an epoch that nobody holds any more must not go on reading ahead.
        # Ctrl-C may have come while it was made.
        if not getattr(self, "_over", True) and self._engine is not None and not self._engine.postpone(self.close):
            self.close()

    def close(self) -> None:
        """Stop here: what was read ahead is dropped, items of a one-time stream are kept for the next epoch."""
        if not self._over:  # one that is complete shares its run with the epoch that follows
            self._over = True
            self.give_back()

    def give_back(self) -> None:
        """Let go of everything that was not handed out."""
        if self._engine is not None:
            # A unit that goes on in another slot is in both: each of its items is to be given back once.
            put_by = [] if self._put_by is None else self._put_by.units
            begun = {id(unit): unit for unit in (*put_by, *self._engine.stop(self.run))}
            if self._schedule.take_back(list(begun.values()), self._place.position):
                self._place.resume = (0, self._place.inside)
            self._shared = self._put_by = None

    @property
    def done(self) -> bool:
        """Whether there is nothing more to come."""
        return self._over

    def _next(self) -> Any:
        launched = self._launched
        assert launched is not None
        engine, size = launched.engine, launched.plan.batch_size
        if (shared := self._shared) is not None:
            if engine.run == self.run:
                engine.check_process()
                return self._slice(size) if shared.rows - shared.at <= size or not self._plain else self._quick(size)
            self._shared = None
        elif not self._begun:
            self._begun = True
            if (first := engine.take_first(self.run, self.number)) is not None:
                self._shared, self._plain = first.made, True
                return self._slice(size)
        while (rows := 0 if self._put_by is None else len(self._put_by.assembler)) < size:
            # Where that slot was the last, there is nothing to ask for, unless something is to be told.
            found = None if self._ends and engine.is_over(self.run) else engine.next_chunk(self.run, self.number)
            if found is None:
                if rows and not launched.options.drop_last:
                    return self._assembled(rows)
                self._place.begin(self.number + 1, 0, 0)
                self._put_by = None
                self._over = self.complete = True  # what is read ahead belongs to the epoch that follows
                return _END
            unit, chunk = found
            self._ends = chunk.last
            if engine.notices:
                self._tell(engine.notices)
            self._note_failures(unit, chunk)
            if engine.mode is Mode.WHOLE:
                return self._collated(unit, chunk)
            # What is left over at the end is not a batch where only full ones are wanted.
            whole = not chunk.failures and not (launched.options.drop_last and chunk.rows % size)
            if engine.mode is Mode.ROWS and whole and not rows:
                return self._rows(unit, chunk)
            self._put(unit, chunk)
        return self._assembled(size)

    def _rows(self, unit: Unit, chunk: Chunk) -> Any:
        launched = self._launched
        assert launched is not None
        engine, layout = launched.engine, launched.layout
        texts = chunk.body or []
        lease = engine.lease(chunk)
        there = _rows_in_slot(chunk)
        if lease is not None:
            leaves = rows_batch(layout, *lease, there, texts, launched.options.door)
        else:
            leaves = rows_batch(layout, *engine.peek(chunk), there, texts, None)
        row_size = engine.plan.sample_bytes
        if layout.has_texts:
            texts_bytes = nbytes_of([leaf for leaf in leaves if isinstance(leaf, list)])
            engine.beside_bytes = self._given_bytes + texts_bytes
            self._given_bytes = texts_bytes
            row_size = nbytes_of(leaves) // chunk.rows if chunk.origin is None else row_size
        copy_of = chunk if lease is None else None
        self._shared = _Shared(leaves, row_size, chunk.rows, unit.start, copy_of, chunk.batch, chunk.origin)
        self._plain = copy_of is None and chunk.origin is None and launched.delivery is None
        if chunk.last and self._plain and not layout.has_texts:
            self._make_first()
        return self._slice(engine.plan.batch_size)

    def _make_first(self) -> None:
        """Make of the first slot of the next epoch, if it is there, what that will hand out."""
        launched = self._launched
        assert launched is not None
        if (first := launched.engine.ready_first(self.run, self.number)) is None:
            return
        unit, chunk = first
        assert chunk.leased is not None
        leaves = rows_batch(launched.layout, *chunk.leased, chunk.rows, [], launched.options.door)
        chunk.made = _Shared(leaves, launched.plan.sample_bytes, chunk.rows, unit.start, None, chunk.batch)

    def _slice(self, size: int) -> Any:
        """The next of the batches that lie in one slot; mostly there is one."""
        launched, shared = self._launched, self._shared
        assert shared is not None
        assert launched is not None
        at = shared.at
        rows = min(size, shared.rows - at)
        leaves, origin = shared.part(rows)
        shared.at = at + rows
        if launched.delivery is not None:
            leaves = self._sent(launched.delivery, (shared.key, at), leaves, None, origin)
            if shared.copy_of is not None:
                launched.delivery.settle(most=0)
        elif shared.copy_of is not None:
            leaves = [leaf if isinstance(leaf, list) else self._copied(leaf) for leaf in leaves]
            self._note_copy()
        elif shared.at == shared.rows > rows and (memory := launched.engine.spare(self.run, self.number)) is not None:
            # Or the consumer would hold all of the slot with its last batch while it waits for the next one.
            leaves = self._moved(leaves, memory)
        if shared.at == shared.rows:
            self._shared = None
            if shared.copy_of is not None:
                launched.engine.release(shared.copy_of)
        if launched.delivery is not None:
            self._prefetch(launched.delivery)
        batch = launched.layout.spec.build(leaves)
        self._count(rows, rows * shared.row_bytes)
        # Last, here and elsewhere: should Ctrl-C come before the consumer has the batch, it was not handed out.
        self._place.move(self.number, shared.start + shared.at // self._each, 0)
        return batch

    def _moved(self, leaves: list[Any], memory: Any) -> list[Any]:
        """The same batch in other memory, which is only there for samples without text."""
        launched = self._launched
        assert launched is not None
        layout = Layout.of(launched.layout.spec, launched.plan.batch_size)
        moved: list[Any] = []
        for leaf, column in zip(leaves, layout.arrays(memory), strict=True):
            row = column[: len(leaf)]
            there = row if launched.options.door is None else launched.options.door(row)
            there[...] = leaf
            moved.append(there)
        return moved

    def _quick(self, size: int) -> Any:
        """The same for one that is not the last of its slot, and handed out as it lies there: it costs little more."""
        launched, shared, stats = self._launched, self._shared, self._stats
        assert shared is not None
        assert launched is not None
        at = shared.at
        shared.at = end = at + size
        batch = launched.layout.spec.build([leaf[at:end] for leaf in shared.leaves])
        stats.samples += size
        stats.batches += 1
        stats.bytes += size * shared.row_bytes
        self._place.move(self.number, shared.start + end // self._each, 0)
        return batch

    def _collated(self, unit: Unit, chunk: Chunk) -> Any:
        launched = self._launched
        assert launched is not None
        if launched.delivery is not None:
            return self._delivered(launched.delivery, unit, chunk)
        engine, convert = launched.engine, launched.options.door
        size = sum(dtype.itemsize * math.prod(shape) for _, dtype, shape, _ in chunk.body.leaves)
        lease = engine.lease(chunk)
        if lease is not None:
            batch = packed_batch(chunk.body, launched.trees, *lease, convert, copy=False)
        else:
            batch = packed_batch(chunk.body, launched.trees, *engine.peek(chunk), convert, copy=True)
            engine.release(chunk)
            self._note_copy()
        self._count(chunk.rows, size)
        self._place.move(self.number, unit.start + len(unit.indices), 0)
        return batch

    def _delivered(self, delivery: Delivery, unit: Unit, chunk: Chunk) -> Any:
        """A collated batch as a copy on the device."""
        launched = self._launched
        assert launched is not None
        engine = launched.engine
        lease = engine.lease(chunk)
        batch, values = self._on_host(chunk, *(engine.peek(chunk) if lease is None else lease))
        leaves = self._sent(delivery, (chunk.batch, 0), values, batch)
        size = nbytes_of(values)
        if lease is None:
            delivery.settle(most=0)
            engine.release(chunk)
        self._count(chunk.rows, size)
        self._prefetch(delivery)
        batch = rebuilt(batch, leaves)
        self._place.move(self.number, unit.start + len(unit.indices), 0)
        return batch

    def _prefetch(self, delivery: Delivery) -> None:
        """Begin to copy the next batch, if it is there, while the one at hand is used."""
        launched, shared = self._launched, self._shared
        assert launched is not None
        engine, size = launched.engine, launched.plan.batch_size
        if shared is not None:
            leaves, origin = shared.part(min(size, shared.rows - shared.at))
            delivery.prefetch((shared.key, shared.at), leaves, None, origin)
        elif (ahead := engine.upcoming(self.run, self.number)) is not None:
            batch, values = self._on_host(ahead, *engine.peek(ahead))
            origin = ahead.origin
            if batch is None and ahead.rows > size:
                values, origin = _Shared(values, 0, ahead.rows, 0, None, 0, origin).part(size)
            delivery.prefetch((ahead.batch, 0), values, batch, origin)

    def _on_host(self, chunk: Chunk, memory: Any, start: int) -> tuple[Any, list[Any]]:
        """A chunk as it lies in its slot: the batch, where it is not a row of every leaf, and its leaves."""
        launched = self._launched
        assert launched is not None
        if launched.engine.mode is Mode.ROWS:
            return None, rows_batch(launched.layout, memory, start, _rows_in_slot(chunk), chunk.body or [], None)
        batch = packed_batch(chunk.body, launched.trees, memory, start, None, copy=False)
        return batch, flatten(batch)[0]

    def _count(self, rows: int, size: int) -> None:
        self._stats.samples += rows
        self._stats.batches += 1
        self._stats.bytes += size

    def _copied(self, array: Any) -> Any:
        assert self._launched is not None
        convert = self._launched.options.door
        return array.copy() if convert is None else convert(array.copy())

    def _note_copy(self) -> None:
        self._stats.copied += 1
        if self._stats.copied == 1:
            assert self._launched is not None
            warnings.warn(
                f"the consumer holds so many of the {self._launched.plan.slots} slots that workers would run dry: "
                "further batches are copies, which cost memory outside the budget. Let batches go when they are used, "
                "or copy what you keep",
                ResourceHeld,
                stacklevel=users_level(),
            )

    def _note_extra(self, delivery: Delivery) -> None:
        self._stats.copied += 1
        if self._stats.copied == 1:
            assert self._launched is not None
            plan = self._launched.plan
            warnings.warn(
                f"the consumer holds all {plan.device_buffers} buffers on {delivery.device.name}: further batches get "
                "memory of their own there, outside the budget. Let batches go when they are used, or copy what you "
                "keep",
                ResourceHeld,
                stacklevel=users_level(),
            )

    def _tell(self, notices: list[str]) -> None:
        while notices:
            notice = notices.pop(0)
            if notice not in self._place.told:
                self._place.told.add(notice)
                warnings.warn(notice, CacheWarning, stacklevel=users_level())

    # ---- what cannot be handed out as it lies

    def _put(self, unit: Unit, chunk: Chunk) -> None:
        """Copy the samples of a chunk out of its slot, to be cut into batches."""
        launched = self._launched
        assert launched is not None
        put_by = self._put_by = self._put_by or _PutBy()
        engine, each = launched.engine, launched.options.each or 1
        if chunk.rows and launched.options.collate is not None:
            samples = packed_batch(chunk.body, launched.trees, *engine.peek(chunk), None, copy=True)
            put_by.assembler.add([samples], None, len(samples), launched.plan.batch_size)
        elif chunk.rows:
            texts = chunk.body or []
            leaves = rows_batch(launched.layout, *engine.peek(chunk), _rows_in_slot(chunk), texts, None)
            if chunk.origin is not None:
                leaves = _spread(leaves, chunk.origin)
            lost = {f.ordinal for f in chunk.failures} if engine.mode is Mode.ROWS else set()
            good = [i for i in range(chunk.rows) if i // each not in lost] if lost else None
            put_by.assembler.add(leaves, good, chunk.rows, launched.plan.batch_size)
        engine.beside_bytes = put_by.assembler.nbytes + self._given_bytes
        engine.check_texts(put_by.assembler.text_bytes)
        engine.release(chunk)
        if not put_by.units or put_by.units[-1] is not unit:
            put_by.units.append(unit)
        if chunk.counts is not None:
            for ordinal, count in chunk.counts:
                seen = unit.seen if ordinal == unit.seen_ordinal else unit.skip if ordinal == 0 else 0
                put_by.segments.append([unit.start + ordinal, seen, count])
                unit.seen_ordinal, unit.seen = ordinal, seen + count
        else:
            lost = {f.ordinal for f in chunk.failures}
            put_by.segments.extend([unit.start + i, 0, each] for i in range(len(unit.indices)) if i not in lost)

    def _assembled(self, rows: int) -> Any:
        assert self._launched is not None
        put_by, each = self._put_by, self._launched.options.each
        assert put_by is not None
        # Not at the end: until a batch is in the consumer's hands, all that is in it can be given back.
        put_by.units = [u for u in put_by.units if u.start + len(u.indices) > self._place.position]
        segments = put_by.segments
        first, before, _ = segments[0]
        position = inside = 0
        left = rows
        while left:
            position, seen, count = segments[0]
            used = min(left, count)
            left -= used
            inside = seen + used
            if used == count:
                segments.popleft()
            else:
                segments[0] = [position, inside, count - used]
        if each is not None and inside == each:
            position, inside = position + 1, 0
        # By its place in the whole order: an epoch that goes on from somewhere has the same randomness.
        index = self._base + first * self._place.world
        batch = self._put_together(put_by.assembler.cut(), rows, COLLATE_INDEX + index + (before << 32))
        self._place.move(self.number, position, inside)
        return batch

    def _put_together(self, leaves: list[Any], rows: int, index: int) -> Any:
        """The samples that were put by as a batch."""
        launched = self._launched
        assert launched is not None
        options, convert = launched.options, launched.options.door
        if options.collate is not None:
            batch = self._collate(leaves[0], index)
            values = flatten(batch)[0]
            self._given_bytes = nbytes_of(values)
            self._count(rows, self._given_bytes)
            if launched.delivery is not None:
                return rebuilt(batch, self._sent(launched.delivery, None, values, batch))
            if convert is None:
                return batch
            return optree.tree_map(lambda x: convert(x) if isinstance(x, np.ndarray) else x, batch, namespace=NAMESPACE)
        self._given_bytes = nbytes_of(leaves)
        origin = None
        if launched.keeps:
            leaves, origin = _gathered(leaves)
        self._count(rows, rows * launched.layout.spec.sample_bytes if origin is not None else nbytes_of(leaves))
        if launched.delivery is not None:
            leaves = self._sent(launched.delivery, None, leaves, None, origin)
        elif convert is not None:
            leaves = [leaf if isinstance(leaf, list) else convert(leaf) for leaf in leaves]
        return launched.layout.spec.build(leaves)

    def _sent(
        self,
        delivery: Delivery,
        key: tuple[int, int] | None,
        values: list[Any],
        batch: Any,
        origin: Origin | None = None,
    ) -> list[Any]:
        """Leaves on the device; those with a key may be on their way already."""
        leaves, extra = delivery.deliver(key, values, batch, origin)
        self._stats.device_allocations = delivery.allocations
        if extra:
            self._note_extra(delivery)
        return leaves

    def _collate(self, samples: list[Any], index: int) -> Any:
        """Do here what a worker does where it has a batch's samples together."""
        assert self._launched is not None
        options = self._launched.options
        assert options.collate is not None
        context.enter(options.seed, self.number, index)
        try:
            batch: Any = options.collate(samples)
        except SpecError:
            raise
        except Exception as error:
            raise LoadError(f"collate_fn failed for a batch of {len(samples)} samples: {said(error)}") from error
        finally:
            context.leave()
        named = options.collate is list or isinstance(options.collate, Pad)
        return batch if options.cast is None or named else recast(batch, options.cast)

    def _note_failures(self, unit: Unit, chunk: Chunk) -> None:
        place, skipped = self._place, self._stats.skipped
        if not chunk.failures:
            if chunk.rows:
                place.skips_in_a_row = place.lost_in_a_row = 0
            return
        failures = sorted(chunk.failures, key=lambda f: f.ordinal)
        place.leave_out(unit.start + failure.ordinal for failure in failures)
        for failure in failures:
            failure.error.__traceback__ = None  # its frames would keep arrays of the load alive, one set an item
            error = error_of(failure, unit)
            skipped.append((getattr(error, "item", None), failure.error))
        # Items that follow each other, whatever batches they are in and whoever loads them.
        failed = [failure.ordinal for failure in failures if failure.ordinal >= 0]
        longest, place.skips_in_a_row = _longest_run(failed, len(unit.indices), place.skips_in_a_row)
        lost = [f.ordinal for f in failures if f.ordinal >= 0 and isinstance(f.error, WorkerLost | LoadTimeout)]
        most_lost, place.lost_in_a_row = _longest_run(lost, len(unit.indices), place.lost_in_a_row)
        item, last = skipped[-1]
        if longest >= SKIPS_IN_A_ROW:
            raise all_failed(longest, item, last) from last
        if most_lost >= LOST_IN_A_ROW:
            last = next(f.error for f in reversed(failures) if isinstance(f.error, WorkerLost | LoadTimeout))
            raise all_lost(most_lost, last)


@dataclasses.dataclass(slots=True)
class _Shared:
    """A slot that holds several batches, and how far they have been handed out."""

    leaves: list[Any]
    row_bytes: int
    rows: int
    start: int
    copy_of: Chunk | None
    """The chunk to copy from and release at the end, where it could not be leased."""
    key: int
    """The number of the chunk."""
    origin: Origin | None = None
    """Which samples are kept on the device; ``leaves`` are without them."""
    at: int = 0

    def part(self, rows: int) -> tuple[list[Any], Origin | None]:
        """The leaves of the next so many rows, and where they come from."""
        at, origin = self.at, self.origin
        if rows == self.rows:
            return self.leaves, origin
        if origin is None:
            return [leaf[at : at + rows] for leaf in self.leaves], None
        part = origin.part(at, at + rows)
        start = origin.part(0, at).on_host()
        return [leaf[start : start + part.on_host()] for leaf in self.leaves], part


def _longest_run(places: list[int], count: int, before: int) -> tuple[int, int]:
    """The longest run of such places among so many, after ``before`` of that kind, and how long the last one is."""
    of_kind = np.zeros(count + 1, bool)
    of_kind[places] = True
    others = np.flatnonzero(~of_kind)  # the last one is none of them
    runs = np.diff(others, prepend=-1) - 1
    runs[0] += before
    return int(runs.max()), int(runs[-1])


def _rows_in_slot(chunk: Chunk) -> int:
    return chunk.rows if chunk.origin is None else chunk.origin.on_host()


def _spread(leaves: list[Any], origin: Origin) -> list[Any]:
    """Leaves with a row for every sample, also for those on the device, and two more that say which these are."""
    from_host = origin.held < 0
    spread = [np.empty((len(from_host), *leaf.shape[1:]), leaf.dtype) for leaf in leaves]
    for wide, leaf in zip(spread, leaves, strict=True):
        wide[from_host] = leaf
    return [*spread, origin.samples, origin.held]


def _gathered(leaves: list[Any]) -> tuple[list[Any], Origin]:
    """And back."""
    *values, samples, held = leaves
    return [value[held < 0] for value in values], Origin(samples, held)
