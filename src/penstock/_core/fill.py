"""Does one task: loads items and writes the samples into rows of a slot.

Runs where the work is done: a worker process, a thread, or the consumer's own process. It knows nothing of
queues, sockets or other workers; ``ask`` is how it gets more room. Errors of user code become Failures here,
with the traceback as text, because most frames cannot travel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import optree

from penstock._core import context, machine
from penstock._core.cache import NEVER, Form, items_first
from penstock._core.errors import CacheError, SpecError, said, shown
from penstock._core.layout import Layout, aligned
from penstock._core.npy import read_npy
from penstock._core.pace import MOST_S, WARM_S, side_by_side, warm_s
from penstock._core.plain import MOST_VIEWS, Plain, Step, Watched, plain_of
from penstock._core.program import (
    Batched,
    BatchedInto,
    Into,
    Pad,
    Padded,
    Probe,
    Program,
    Retry,
    Rows,
    as_texts,
    given,
    not_stacked,
    rows_of,
)
from penstock._core.source import Reader, Samples, Scatters, Unread
from penstock._core.spec import (
    NAMESPACE,
    Array,
    Cast,
    Leaf,
    Spec,
    as_array,
    differs,
    dump_tree,
    flatten,
    is_floating,
    is_node,
    store,
)
from penstock._core.task import LOAD, Failure, Grant, Mode, Reply, Status, Task, keep_at

__all__ = [
    "Afresh",
    "Failed",
    "Filler",
    "Gauge",
    "InsideGauge",
    "Mark",
    "Memory",
    "Packed",
    "Room",
    "Steps",
    "castings",
    "failure_of",
    "recast",
    "texts_too_large",
]

Ask = Callable[[Reply], Grant]
Steps = Generator[Reply, Grant, Reply]
More = Generator[Reply, Grant, None]

# A probe looks at several items so that one odd one does not decide, but not for long.
PROBE_ITEMS: Final = 8
TRIAL_BYTES: Final = 24 * 2**20  # a template, and the stacks of two threads
PROBE_S: Final = 0.02
COLLATED_PROBE_S: Final = 0.2  # samples that are collated differ in size: of a few more is more to be learned
UNSEEN_BYTES: Final = 4 * 2**20  # a load that takes less is no danger to any budget
MANY_BYTES: Final = (
    4 * 2**20
)  # of samples that are made at once: less, and threads wait for the GIL more than they work
MOST_MANY: Final = 1024
MOST_MISFITS: Final = 3  # a load of several that fails so often for several, and for none of them alone, is given one
KEPT_BYTES: Final = 64 * 1024  # samples up to this are kept from a probe: half a megabyte in all
_MOST_TRACE: Final = 2**15
COLLATE_INDEX: Final = 1 << 62  # keeps the randomness of a collate_fn apart from that of its items


class Memory(Protocol):
    """The slots, as the worker sees them."""

    def window(self, offset: int, size: int) -> tuple[Any, int]:
        """An object with the buffer protocol that holds these bytes, and where in it they start."""


class Gauge(Protocol):
    """Measures what loading costs; the parent's own process is measured less closely than a worker."""

    apart: bool
    """Whether this is a process of its own, where loads may be tried again for a better measurement."""

    def idle_bytes(self) -> int: ...
    def start(self) -> None: ...
    def peak_bytes(self) -> int: ...
    def stop(self) -> None: ...


class InsideGauge:
    """For loads in the consumer's own process, whose counters are not ours to reset.

    A load that makes the process larger than it ever was tells its peak by that. Where the process was much larger
    before, Python's own count of allocations is asked for the first load; what C libraries take for themselves is not
    in it.
    """

    apart = False

    def __init__(self) -> None:
        self._resident = self._most = 0
        self._traces = False

    def idle_bytes(self) -> int:
        """Nothing is added by being idle."""
        return 0

    def start(self) -> None:
        """Loads begin."""
        self._resident, self._most = machine.resident_bytes(), machine.peak_rss_bytes(os.getpid())
        if self._most - self._resident > UNSEEN_BYTES:
            import tracemalloc

            if not tracemalloc.is_tracing():
                tracemalloc.start()
                self._traces = True

    def peak_bytes(self) -> int:
        """The most that a load took, as far as that can be told; 0 if it cannot."""
        traced = 0
        if self._traces:
            import tracemalloc

            traced = tracemalloc.get_traced_memory()[1]
            self.stop()
        most = machine.peak_rss_bytes(os.getpid())
        return max(traced, most - self._resident if most > self._most else 0)

    def stop(self) -> None:
        """No load follows that has to be looked at."""
        if self._traces:
            import tracemalloc

            tracemalloc.stop()
            self._traces = False


class Room(Exception):
    """The parent took the slot back: give up this task."""


class Afresh(Exception):
    """The item at a place found no memory in this worker, which may be what others left: a fresh one is to try."""

    def __init__(self, ordinal: int) -> None:
        super().__init__(ordinal)
        self.ordinal = ordinal


class Packed:
    """How a collated batch lies in its slot: the pickled tree, and (kind, dtype, shape, offset) for each leaf."""

    __slots__ = ("leaves", "tree")

    def __init__(self, tree: bytes, leaves: list[tuple[str, Any, tuple[int, ...], int]]) -> None:
        self.tree = tree
        self.leaves = leaves


class _Many(NamedTuple):
    """A load of several that was tried: what does it again, for how many, and what it took for one."""

    once: Callable[[int], None]
    rows: int
    load_s: float
    cpu_s: float


class Filler:
    """Runs a program for one worker."""

    def __init__(self, program: Program, memory: Memory, worker: int) -> None:
        self.program = program
        self.memory = memory
        self.worker = worker
        self.beat: Callable[[int], None] = Mark([0])  # nobody has to know
        self.replaceable = False
        """Whether a fresh worker takes over when this one has no room left."""
        self.fresh = True
        """Whether nothing was loaded here before, not even for a probe."""
        self._first = 0
        self._layout: Layout | None = None
        self._plain: Plain | None = None
        self._together = False
        """Whether several items are being loaded at once, or were and are now done one by one."""
        self._wrong: Failed | None = None
        """What is wrong with the samples of several, if it is with none of them alone."""
        self._misfits = 0
        """Tasks in a row of which only single items could be loaded, by a load of several."""
        self._columns: dict[int, list[Array]] = {}
        self._views: dict[int, list[Any]] = {}
        self._kept: dict[tuple[int, int], Any] = {}
        self._trees: dict[optree.PyTreeSpec, bytes] = {}
        self._shelf: Any = None
        self._passed: frozenset[int] = frozenset()
        """Places of items of this task that came from the cache."""
        self._records: Any = None
        """What the cache has of this task's items, where samples vary in size."""

    def configure(self, spec: Spec, rows: int, cache: Form | None = None, text_bytes: int = 0) -> None:
        """The form of a sample and the rows of a slot are decided, where samples are kept, and the room for texts."""
        self._layout = Layout.of(spec, rows)
        self._text_bytes = text_bytes
        self._shelf = None if cache is None else cache.open(self.memory)
        self._columns.clear()
        self._views.clear()
        self._plain = _plain(self.program, spec)

    def forget(self) -> None:
        """Let go of the slots and of what was kept: a feed that is closed may be held for its numbers."""
        self._columns.clear()
        self._views.clear()
        self._kept.clear()
        if self._shelf is not None:
            self._shelf.close()
            self._shelf = None
        if (close := getattr(self.program.reader, "close", None)) is not None:
            close()

    def probe(self, task: Task, gauge: Gauge) -> Probe | None:
        """Load a few items and say what a sample looks like and costs; what was loaded is used again.

        None when none of them gives a sample: all are empty, or failed and are to be skipped.
        """
        try:
            return self._probe(task, gauge)
        finally:
            gauge.stop()
            context.leave()

    def _probe(self, task: Task, gauge: Gauge) -> Probe | None:
        program = self.program
        self.fresh = False
        if program.load is None and program.collate is None:
            return self._probe_rows(task, gauge)
        idle = gauge.idle_bytes()
        gauge.start()
        began = time.perf_counter()
        costs: list[tuple[float, float]] = []
        loaded: list[tuple[int, Any]] = []
        spec = program.load.spec if isinstance(program.load, Into) else None
        packed = peak = 0
        random = False
        failures: list[Failure] = []
        for ordinal, item in self._each(task):
            wall, cpu, gave_way = time.perf_counter(), time.process_time(), _gave_way()
            samples: list[Any] = []
            self._attempt(partial(self._collect, samples, task, ordinal, item, 1), ordinal, item, failures)
            if not samples:
                continue
            sample = samples[0]
            loaded.append((ordinal, item))
            random = random or context.drew()
            wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
            # Off the processor without having asked for it: the machine is busy, which is not the load's doing.
            costs.append((wall_s, cpu_s) if _gave_way() > gave_way else (min(wall_s, cpu_s),) * 2)
            peak = max(peak, gauge.peak_bytes())  # before anything is kept: that is the probe's own
            if spec is None:
                spec = self._spec_of(sample, item)
            if program.collate is not None:
                packed = max(packed, _collated_bytes(program.collate, sample))
            fixed = program.samples_per_item == 1 and program.mode is Mode.ROWS and task.indices[ordinal] >= 0
            # Slow loads are not done twice, nor, as far as that costs no memory, any. How many workers there will be is
            # not known yet: a sample that asked is made again.
            fixed = fixed and not isinstance(program.load, Into) and not context.asked()
            if fixed and (wall_s > PROBE_S or spec.sample_bytes <= KEPT_BYTES):
                self._kept[task.epoch, int(task.indices[ordinal])] = _copied(sample)
            if time.perf_counter() - began > (PROBE_S if program.collate is None else COLLATED_PROBE_S):
                break
            del sample, samples  # or the next load would seem to take this one too
        if spec is None and failures:
            raise Failed(dataclasses.replace(failures[-1], left_out=True))
        if spec is None:
            return None
        # The median: the first load may import things, and any may be interrupted.
        load_s, cpu_s = sorted(costs)[len(costs) // 2] if costs else (0.0, 0.0)
        ratio = None
        many = self._several_once(task, loaded, spec, load_s)
        if many is not None:
            load_s, cpu_s = many.load_s, many.cpu_s
            peak = max(peak, gauge.peak_bytes())
        if loaded and gauge.apart and Failure.PACING not in task.barred:
            self.beat(Failure.PACING)
            two = TRIAL_BYTES + idle + 2 * peak <= program.memory  # at once, beside those who try them
            load_s, cpu_s, ratio = self._pace(task, loaded, load_s, cpu_s, many, two=two)
        load_bytes = self._load_bytes(peak, packed or spec.sample_bytes, exact=gauge.apart)
        return Probe(spec, packed, load_s, cpu_s, load_bytes, idle, ratio, random)

    def _several_once(self, task: Task, loaded: list[tuple[int, Any]], spec: Spec, load_s: float) -> _Many | None:
        """A load of several tried with as many as it will be given; None where it is given one at a time."""
        load = self.program.load
        if not isinstance(load, Batched | BatchedInto) or not loaded or self.program.mode is not Mode.ROWS:
            return None
        if any(leaf.kind != "array" for leaf in spec.leaves):
            return None
        # Not for longer than a probe may take, even if many take as long as one by one.
        rows = min(_piece_rows(spec), int(PROBE_S / max(load_s, 1e-6)))
        if rows < 2:
            return None
        try:
            items = given(itertools.islice(itertools.cycle(item for _, item in loaded), rows), stacks=load.stacks)
            out: tuple[Any, ...] = ()
            if isinstance(load, BatchedInto):
                out = (spec.build([np.empty((rows, *leaf.shape), leaf.stored) for leaf in spec.leaves]),)
            many, seed = load.many, self.program.seed

            def once(_: int) -> None:
                context.enter_many(seed, task.epoch)
                many(items, *out)

            for _ in range(2):  # the first time it may import things
                wall, cpu = time.perf_counter(), time.process_time()
                once(0)
                wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
                if wall_s > PROBE_S:
                    break
        except Exception:  # noqa: BLE001 - each of them was loaded alone; a batch will show what is wrong
            return None
        return _Many(once, rows, wall_s / rows, cpu_s / rows)

    def _pace(
        self,
        task: Task,
        loaded: list[tuple[int, Any]],
        load_s: float,
        cpu_s: float,
        many: _Many | None,
        *,
        two: bool,
    ) -> tuple[float, float, float | None]:
        """Times taken again where the first ones say little, and whether two loads run side by side."""

        load, plain = self.program.load, self.program.samples_per_item == 1

        def once(number: int) -> None:
            if many is not None:
                many.once(number)
                return
            if plain and load is not None and not isinstance(load, Into):
                context.enter(self.program.seed, task.epoch, int(task.indices[loaded[number][0]]))
                load(loaded[number][1])
                return
            for _ in itertools.islice(self._samples(task, *loaded[number]), 1):
                pass

        rows = 1 if many is None else many.rows
        try:
            if load_s < WARM_S and cpu_s > load_s / 2:
                load_s = cpu_s = min(load_s, warm_s(once, len(loaded)) / rows)
            tries = two and self.program.tries_threads and load_s * rows <= MOST_S
            waits = cpu_s < load_s / 2
            return load_s, cpu_s, side_by_side(once, len(loaded), load_s * rows, waits=waits) if tries else None
        except Exception:  # noqa: BLE001 - it loaded before; a batch will show what is wrong with it
            return load_s, cpu_s, None

    def _probe_rows(self, task: Task, gauge: Gauge) -> Probe | None:
        """The same for rows of a source: read twice, because the first time files are opened and libraries warm up."""
        idle = gauge.idle_bytes()
        gauge.start()
        samples: list[Any] = []
        failures: list[Failure] = []
        for _ in range(2):
            samples.clear()
            wall, cpu, gave_way = time.perf_counter(), time.process_time(), _gave_way()
            for ordinal, item in self._each(task):
                self._attempt(partial(self._collect, samples, task, ordinal, item, 1), ordinal, item, failures)
            wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
        if not samples and failures:
            raise Failed(dataclasses.replace(failures[-1], left_out=True))
        if not samples:
            return None
        spec = Spec.of(samples[0])
        if _gave_way() == gave_way:  # off the processor only because the machine is busy
            wall_s = cpu_s = min(wall_s, cpu_s)
        load_s, cpu_s = wall_s / len(samples), cpu_s / len(samples)
        load_bytes = self._load_bytes(gauge.peak_bytes(), spec.sample_bytes, exact=gauge.apart)
        return Probe(spec, 0, load_s, cpu_s, load_bytes, idle)

    def _spec_of(self, sample: Any, item: Any) -> Spec:
        program = self.program
        if program.collate is None:
            return Spec.of(sample, cast=program.cast, item=item)
        if program.mode is Mode.WHOLE and not self._collates_by_name():
            try:  # its samples never leave the worker and may be anything; what it makes of them may not
                return Spec.of(program.collate([sample]))
            except Exception:  # noqa: BLE001 - it may need more than one; what is wrong with it a batch will show
                pass
        return Spec.of(sample, item=item)

    def _collates_by_name(self) -> bool:
        """Whether a batch is made by "pad" or "list", so that its leaves still have the names of a sample's."""
        return self.program.collate is list or isinstance(self.program.collate, Pad)

    def _load_bytes(self, peak: int, sample_bytes: int, *, exact: bool) -> int:
        if not peak:
            return 2 * sample_bytes
        # One that writes in place had to be given a place for the probe; there is none when it works.
        if isinstance(self.program.load, Into):
            return max(0, peak - sample_bytes)
        return peak if exact else max(peak, 2 * sample_bytes)

    def do(self, task: Task, ask: Ask) -> Reply:
        """Do a task, blocking in ``ask`` whenever it needs more room."""
        steps = self.steps(task)
        try:
            wanted = next(steps)
            while True:
                wanted = steps.send(ask(wanted))
        except StopIteration as end:
            reply: Reply = end.value
            return reply

    def steps(self, task: Task) -> Steps:
        """Do a task; yields when it needs more room, returns what became of it, never raises for user code."""
        started = time.perf_counter()
        reply = Reply(task.id, self.worker, Status.DONE)
        failures: list[Failure] = []
        self._first = task.first
        try:
            if task.kept is not None and self.program.mode is not Mode.ROWS:
                self._records = self._shelf.records(task.kept, len(task.indices))
            if self.program.mode is Mode.ROWS and task.kept is not None:
                self._fill_some(task, reply, failures)
            elif self.program.mode is Mode.ROWS:
                self._fill_rows(task, reply, failures)
            elif self.program.mode is Mode.WHOLE:
                yield from self._fill_whole(task, reply)
            else:
                yield from self._flow(task, reply, failures)
        except Room:
            reply.rows = 0
        except Failed as failed:
            reply.status = Status.FAILED
            reply.body = failed.failure
        except Afresh as afresh:
            reply.status = Status.AGAIN
            if self.program.mode is Mode.ROWS:
                reply.rows = afresh.ordinal
            else:
                reply.body = None
                failures.clear()  # all of it is done again
        finally:
            context.leave()
        if self._records is not None:
            reply.kept, self._records = self._records.kept(), None
        reply.failures = tuple(failures)
        reply.seconds = time.perf_counter() - started
        return reply

    # ---- rows

    def _fill_some(self, task: Task, reply: Reply, failures: list[Failure]) -> None:
        """Copy what the cache has, load the rest, and give the cache what it wants of that."""
        kept = task.kept
        assert kept is not None
        each = self.program.samples_per_item or 1
        columns = [items_first(column, each) for column in self._slot(task.offset)]
        at = task.start // each + np.arange(len(kept)) if task.places is None else task.places
        held = np.flatnonzero(kept >= 0)
        unread: str | None = None
        if len(held):
            try:
                self._shelf.read(kept[held], columns, at[held])
            except (OSError, CacheError) as error:  # the folder was taken away, say: everything can be loaded again
                held, unread = held[:0], said(error)
            if len(held) == len(kept):
                return
        reply.kept = unread
        drew: set[int] = set()
        beat, last = self.beat, -1

        def watch(ordinal: int) -> None:
            # An item begins: what the one before it asked for is still known.
            nonlocal last
            if last >= 0 and context.drew():
                drew.add(last)
            last = ordinal if ordinal != Failure.TOGETHER else -1
            beat(ordinal)

        self._passed, self.beat = frozenset(held.tolist()), watch
        try:
            self._fill_rows(task, reply, failures)
        finally:
            self._passed, self.beat = frozenset(), beat
        if last >= 0 and context.drew():
            drew.add(last)
        if unread is not None:
            return
        # Of those that another worker loaded before it gave up nobody knows whether they were random.
        lost = {failure.ordinal for failure in failures} | set(task.barred) | set(range(task.first))
        # A text that does not fit into its cell travels beside the slot, and is not in the row.
        if reply.body:
            ordinals = {row: ordinal for ordinal, row in enumerate(at.tolist())}
            lost.update(ordinals[row // each] for row, *_ in reply.body)
        wanted = np.array([o for o in np.flatnonzero(kept < LOAD).tolist() if o not in lost | drew], np.int64)
        numbers = np.full(len(kept), LOAD)
        numbers[list(drew)] = NEVER
        try:
            if len(wanted):
                numbers[wanted] = self._shelf.write(keep_at(kept[wanted]), columns, at[wanted])
        except (OSError, CacheError) as error:  # the disk is full, say: the samples are right all the same
            reply.kept = said(error)
            return
        reply.kept = numbers.tobytes()

    def _fill_rows(self, task: Task, reply: Reply, failures: list[Failure]) -> None:
        program = self.program
        columns = self._slot(task.offset)
        assert self._layout is not None
        spec = self._layout.spec
        row = task.start
        if task.ahead is not None and len(task.ahead):
            self._tell(task.ahead, epoch=None if task.places is None else task.epoch)
        if program.load is None and all(leaf.kind == "array" for leaf in spec.leaves):
            self._read_rows(task, columns, failures)
            return
        each = program.samples_per_item or 1
        texts: list[tuple[int, int, bytes]] = []
        seen = beside = 0
        if self._kept and not any((task.epoch, index) in self._kept for index in task.indices.tolist()):
            self._kept.clear()  # another worker has made them meanwhile
        if self._loads_many(task):
            passed, failed = self._passed, len(failures)
            self._together = True
            try:
                made = self._fill_many(task, columns)
                if made is None:
                    return
                self._passed = passed | made
                self._fill_rows(task, reply, failures)
                if len(failures) == failed:  # all is well with each of them alone
                    self._misfits += 1
                    if self._wrong is not None:
                        raise self._wrong
            finally:
                self._passed, self._together, self._wrong = passed, False, None
            return
        if self._plain is not None and not (self._kept or task.barred or task.first or self._restores(task)):
            self._fill_plain(task, columns, failures)
            return
        for ordinal, item in self._each(task):
            index = int(task.indices[ordinal])
            first = row + ordinal * each if task.places is None else int(task.places[ordinal]) * each

            def write(item: Any = item, ordinal: int = ordinal, first: int = first, index: int = index) -> None:
                context.enter(program.seed, task.epoch, index)
                if type(item) is Unread:
                    item = item.item()
                if isinstance(program.load, Into):
                    out = spec.build([column[first, ...] for column in columns])
                    given: Any = program.load.function(item, out)
                    if given is not None and given is not out:
                        raise SpecError(
                            f"load returned a {type(given).__name__} for {shown(item)}, but one marked with "
                            "penstock.into must write into out: use out[...] = value and return nothing",
                            item=item,
                        )
                elif program.load is None:
                    self._write(columns, first, item, self._called(task, ordinal, item), texts)
                elif each == 1:
                    kept = self._kept.pop((task.epoch, index), None) if self._kept else None
                    sample = program.load(item) if kept is None else kept
                    self._write(columns, first, sample, self._called(task, ordinal, item), texts)
                else:
                    for offset, sample in enumerate(self._exactly(item, each)):
                        self._write(columns, first + offset, sample, item, texts)

            try:
                done = self._attempt(write, ordinal, item, failures)
            except Failed as failed:
                failed.failure = replace(failed.failure, texts=tuple(t for t in texts if t[0] < first))
                raise
            except Afresh:
                reply.body = [t for t in texts if not first <= t[0] < first + each] or None
                raise
            if not done:
                texts[:] = [t for t in texts if not first <= t[0] < first + each]
            elif len(texts) > seen:
                beside += sum(len(text) for _, _, text in texts[seen:])
                if 0 < (task.text_bytes or self._text_bytes) < beside:
                    raise Failed(texts_too_large(beside))
            seen = len(texts)
        reply.body = texts or None

    def _restores(self, task: Task) -> bool:
        """Whether items may have to be put right for another try, because a load may have worked on them in place."""
        if self.program.tries == 1 or self.program.load is None:
            return False
        if task.items is None or not len(task.items):
            return self.program.reader is not None
        return bool(_arrays_of(task.items[0]))

    def _loads_many(self, task: Task) -> bool:
        """Whether load is to be given several items at once."""
        if not isinstance(self.program.load, Batched | BatchedInto) or self._together:
            return False
        assert self._layout is not None
        plain = all(leaf.kind == "array" for leaf in self._layout.spec.leaves)
        return plain and self._misfits < MOST_MISFITS and not task.barred and not task.first

    def _fill_many(self, task: Task, columns: list[Array]) -> frozenset[int] | None:
        """Load several items at a time, as many as a processor's cache holds; the places of those that are done.

        None: all of them. Where one fails the rest is left to be done one by one, to see whose error it is.
        """
        load = self.program.load
        assert isinstance(load, Batched | BatchedInto)
        assert self._layout is not None
        self._kept.clear()
        # Numbers that follow each other stay a range: a list of them takes as long as some loads do.
        left: Sequence[int] = range(len(task.indices))
        if self._passed:
            left = [ordinal for ordinal in left if ordinal not in self._passed]
        items = None if self.program.reader is not None else self._items(task)
        size = _piece_rows(self._layout.spec)
        done = 0
        try:
            context.enter_many(self.program.seed, task.epoch)
            for at in range(0, len(left), size):
                part = left[at : at + size]
                self.beat(Failure.TOGETHER)
                self._write_many(load, self._several(task, part, items), columns, _rows_of(task, part), task, part[0])
                done = at + len(part)
            self._misfits = 0
        except context.OneByOne:
            self._misfits = MOST_MISFITS
        except Room:
            raise
        except Failed as failed:
            self._wrong = failed
        except Exception:  # noqa: BLE001 - it comes again, where it is known whose it is
            pass
        return None if done == len(left) else frozenset(left[:done])

    def _several(self, task: Task, part: Sequence[int], items: Any) -> Any:
        if items is None:
            assert self.program.reader is not None
            return self.program.reader.read(_where(task, part))
        if isinstance(items, Samples):
            # A load may work in place, and if it fails they are wanted again as they were.
            return items.copied(list(part))
        if len(part) == part[-1] - part[0] + 1:
            return items[part[0] : part[-1] + 1]
        return [items[ordinal] for ordinal in part]

    def _write_many(
        self,
        load: Batched | BatchedInto,
        items: Any,
        columns: list[Array],
        where: slice | npt.NDArray[np.int64],
        task: Task,
        first: int,
    ) -> None:
        """Have samples made of items, and write them to these rows."""
        assert self._layout is not None
        spec, follow = self._layout.spec, isinstance(where, slice)
        count = where.stop - where.start if isinstance(where, slice) else len(where)
        if isinstance(load, BatchedInto):
            out = [c[where] if follow else np.empty((count, *c.shape[1:]), c.dtype) for c in columns]
            if load.many(given(items, stacks=load.stacks), spec.build(out)) is not None:
                raise SpecError("it returned something")  # told one by one
            if not follow:
                for column, made in zip(columns, out, strict=True):
                    column[where] = made
            return
        made = load.many(given(items, stacks=load.stacks))
        try:
            item = self._called(task, first, items[0] if self.program.reader is None else None)
            for leaf, column, value in zip(spec.leaves, columns, spec.values(made, item), strict=True):
                array = value if type(value) is np.ndarray else as_array(value, path=leaf.path, item=item)
                if rows_of(array) != count:
                    raise not_stacked(array, count, item)
                if array.shape[1:] != leaf.shape or array.dtype != leaf.dtype:
                    array = as_array(array, path=leaf.path, item=item)  # perhaps it is only in the other byte order
                if array.shape[1:] != leaf.shape or array.dtype != leaf.dtype:
                    raise differs(leaf, array[0], item)
                if leaf.stored == leaf.dtype:
                    column[where] = array
                    continue
                stored = column[where] if follow else np.empty((count, *leaf.shape), leaf.stored)
                store(stored, array, leaf, item)
                if not follow:
                    column[where] = stored
        except SpecError as error:
            raise Failed(self._failure(error, first, item)) from error

    def _fill_plain(self, task: Task, columns: list[Array], failures: list[Failure]) -> None:
        """The same for samples of plain arrays and numbers, with what is done for each sample kept to a minimum.

        Samples are written one by one all the same: a load may return the same buffer every time.
        """
        program, plain = self.program, self._plain
        assert plain is not None
        assert program.load is not None
        moment = context.enter(program.seed, task.epoch, 0)
        indices = task.indices.tolist()
        rows: Sequence[int] = range(task.start, task.start + len(indices))
        if task.places is not None:
            rows = task.places.tolist()
        steps: Iterable[Step]
        if self._passed:
            steps = ((ordinal, indices[ordinal], rows[ordinal], item) for ordinal, item in self._left(task))
        else:
            steps = zip(range(len(indices)), indices, rows, self._items(task), strict=False)

        def failed(error: Exception, row: int, ordinal: int, item: Any) -> None:
            again = partial(self._load_and_write, task, columns, row, ordinal, item)
            self._attempt(again, ordinal, item, failures, first=error)

        def odd(sample: Any, row: int, ordinal: int, item: Any) -> None:
            # The thorough way says what is odd about it, or finds that it will do.
            called = self._called(task, ordinal, item)
            self._attempt(partial(self._write, columns, row, sample, called, []), ordinal, item, failures)

        load = program.load
        if load is np.load and len(columns) == 1:
            steps = _not_npy(steps, self.beat, columns[0])
        place = self.beat.cells if type(self.beat) is Mark else Watched(self.beat)
        plain.loop(steps, load, place, moment, failed, odd, self._viewed(task.offset, columns))

    def _viewed(self, offset: int, columns: list[Array]) -> list[Any]:
        """The columns of a slot with rows that are quick to write to, as far as that takes little memory."""
        views = self._views.get(offset)
        if views is None:
            assert self._plain is not None
            if sum(map(len, columns)) * (len(self._views) + 1) > MOST_VIEWS:
                return list(columns)
            views = self._views[offset] = self._plain.views(columns)
        return views

    def _load_and_write(self, task: Task, columns: list[Array], row: int, ordinal: int, item: Any) -> None:
        assert self.program.load is not None
        context.enter(self.program.seed, task.epoch, int(task.indices[ordinal]))
        if type(item) is Unread:
            item = item.item()
        self._write(columns, row, self.program.load(item), item, [])

    def _tell(self, indices: Array, *, epoch: int | None) -> None:
        """Have the system begin to read what tasks after this one want."""
        reader = self.program.reader
        if reader is not None and isinstance(reader, Scatters):
            with contextlib.suppress(OSError):  # of a file that is gone: told when its rows are read
                reader.tell(np.sort(indices), epoch=epoch)

    def _read_rows(self, task: Task, columns: list[Array], failures: list[Failure]) -> None:
        """Rows of a source, straight into the slot: all at once, and if that fails one by one, to see whose it is."""
        reader = self.program.reader
        assert reader is not None
        assert self._layout is not None
        leaves = self._layout.spec.leaves
        count = len(task.indices)
        together = not task.barred and not getattr(reader, "single", False)
        if together and task.places is None and not task.first and not self._passed:
            self.beat(Failure.TOGETHER)
            try:
                out = [column[task.start : task.start + count] for column in columns]
                reader.read_into(_where(task, range(count)), out, leaves)
                return
            except Room:
                raise
            except Exception:  # noqa: BLE001 - it comes again below, where it is known which row it belongs to
                together = False
        barred = frozenset(task.barred)
        left = [o for o in range(task.first, count) if o not in self._passed and o not in barred]
        rows = np.arange(task.start, task.start + count) if task.places is None else task.places
        if left and together:
            self.beat(Failure.TOGETHER)
            try:
                left.sort(key=task.indices.__getitem__)
                _scatter(reader, _where(task, left), columns, rows[left], leaves, told=task.ahead is not None)
                return
            except Room:
                raise
            except Exception:  # noqa: BLE001 - it comes again below, where it is known which row it belongs to
                left.sort()
        for ordinal in left:
            self.beat(ordinal)
            row = int(rows[ordinal])
            where, out = _where(task, [ordinal]), [column[row : row + 1] for column in columns]
            try:
                reader.read_into(where, out, leaves)
            except Exception as error:  # noqa: BLE001 - on_error says what becomes of it
                again = partial(reader.read_into, where, out, leaves)
                self._attempt(again, ordinal, None, failures, first=error)

    def _write(
        self, columns: list[Array], row: int, sample: Any, item: Any, texts: list[tuple[int, int, bytes]]
    ) -> None:
        assert self._layout is not None
        spec = self._layout.spec
        at = 0
        for leaf, value in zip(spec.leaves, spec.values(sample, item), strict=True):
            if leaf.kind == "array":
                if type(value) is not np.ndarray:
                    if isinstance(value, str | bytes):
                        raise differs(leaf, value, item)
                    if is_node(value):
                        raise spec.other_tree(sample, item)
                    value = as_array(value, path=leaf.path, item=item)
                if value.dtype != leaf.dtype:
                    value = as_array(value, path=leaf.path, item=item)  # perhaps it is only in the other byte order
                if value.shape != leaf.shape or value.dtype != leaf.dtype:
                    raise differs(leaf, value, item)
                if leaf.stored is leaf.dtype or leaf.stored == leaf.dtype:
                    columns[at][row] = value
                else:
                    store(columns[at][row, ...], value, leaf, item)
                at += 1
                continue
            if not isinstance(value, str if leaf.kind == "str" else bytes):
                if is_node(value):
                    raise spec.other_tree(sample, item)
                raise differs(
                    leaf, value if isinstance(value, str | bytes) else as_array(value, path=leaf.path, item=item), item
                )
            data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
            columns[at][row] = len(data)
            if len(data) <= leaf.shape[0]:
                columns[at + 1][row, : len(data)] = np.frombuffer(data, np.uint8)
            else:
                texts.append((row, at, data))
            at += 2

    # ---- whole batches

    def _fill_whole(self, task: Task, reply: Reply) -> More:
        program = self.program
        samples: list[Any] = []
        if task.trial:
            for ordinal, item in self._each(task):
                self._attempt(partial(self._collect, samples, task, ordinal, item), ordinal, item, None)
                samples.clear()
            return
        if program.load is None and program.collate is as_texts and not task.barred:
            samples.extend(self._items(task))  # lines as they are, thousands in a batch
        if not samples or Unread in map(type, samples):
            samples.clear()
            for ordinal, item in self._each(task):
                self._attempt(partial(self._collect, samples, task, ordinal, item), ordinal, item, None)
        self.beat(Failure.COLLATING)
        context.enter(program.seed, task.epoch, COLLATE_INDEX + int(task.indices[0]))
        assert program.collate is not None
        collate = program.collate.laid if isinstance(program.collate, Pad) else program.collate
        packing: list[_Packing] = []
        self._attempt(
            lambda: packing.append(self._unpacked(collate(samples))),
            Failure.BATCH,
            None,
            None,
        )
        reply.rows = len(samples)
        samples.clear()
        reply.body = yield from self._pack(packing.pop(), task)

    def _unpacked(self, batch: Any) -> _Packing:
        """Any tree of arrays, scalars and texts as arrays to be written."""
        program = self.program
        if program.collate is as_texts:  # no line has an end in it
            joined = np.frombuffer("\n".join(batch).encode("utf-8", "surrogatepass"), np.uint8)
            return _Packing(flatten("")[1], ["lines"], [joined], [joined.dtype])
        values, tree = flatten(batch)
        kinds = [_kind(value) for value in values]
        try:
            arrays = [_packable(value) for value in values]
        except SpecError:
            for value, path in zip(values, tree.paths(), strict=True):
                _packable(value, ".".join(map(str, path)))
            raise
        dtypes = [array.dtype for array in arrays]
        # A callable's batch that is put together elsewhere has names of its own, and is cast there.
        if program.cast is not None and (program.mode is Mode.WHOLE or self._collates_by_name()):
            listed = program.collate is list or program.mode is Mode.FLOW
            for place, leaf in castings(batch, arrays, program.cast, listed=listed):
                dtypes[place] = leaf.stored
                if not (is_floating(leaf.dtype) and is_floating(leaf.stored)):
                    exact = np.empty(leaf.shape, leaf.stored)
                    store(exact, _whole(arrays[place]), leaf, None)
                    arrays[place] = exact
        return _Packing(tree, kinds, arrays, dtypes)

    def _pack(self, packing: _Packing, task: Task) -> Generator[Reply, Grant, Packed]:
        """Write arrays one after the other into the slot, asking for a larger one if it must be."""
        size = sum(
            aligned(array.size * dtype.itemsize) for array, dtype in zip(packing.arrays, packing.dtypes, strict=True)
        )
        if size > task.capacity:
            grant = yield Reply(task.id, self.worker, Status.MORE, rows=size)
            if grant.offset is None:
                raise Room
            task.slot, task.offset, task.capacity = grant.slot, grant.offset, grant.capacity
        room = np.frombuffer(*_spread(self.memory.window(task.offset, task.capacity), task.capacity))
        leaves: list[tuple[str, Any, tuple[int, ...], int]] = []
        at = 0
        for kind, array, dtype in zip(packing.kinds, packing.arrays, packing.dtypes, strict=True):
            nbytes = array.size * dtype.itemsize
            if nbytes:
                where = room[at : at + nbytes].view(dtype).reshape(array.shape)
                if isinstance(array, Rows):
                    array.write(where)
                else:
                    np.copyto(where, array, casting="unsafe")
            leaves.append((kind, dtype, array.shape, at))
            at += aligned(nbytes)
        if packing.tree not in self._trees:
            if len(self._trees) > 64:  # trees that keep changing are not worth remembering
                self._trees.clear()
            self._trees[packing.tree] = dump_tree(packing.tree)
        return Packed(self._trees[packing.tree], leaves)

    def _admit(self, sample: Any, item: Any) -> None:
        """Check a sample that others are collated with, while it is known whose it is."""
        if isinstance(self.program.collate, Pad):
            assert self._layout is not None
            spec = self._layout.spec
            for leaf, value in zip(spec.leaves, spec.values(sample, item), strict=True):
                if is_node(value):
                    raise spec.other_tree(sample, item)
                if isinstance(value, str | bytes):
                    if not isinstance(value, str if leaf.kind == "str" else bytes) or leaf.kind == "array":
                        raise differs(leaf, value, item)
                    continue
                array = as_array(value, path=leaf.path, item=item)
                if leaf.kind != "array" or array.dtype != leaf.dtype or array.ndim != len(leaf.shape):
                    raise differs(leaf, array, item, padded=True)
        elif self.program.collate is list or self.program.mode is Mode.FLOW:
            for value in flatten(sample)[0]:
                if not isinstance(value, str | bytes):
                    as_array(value, item=item)

    # ---- any number of samples from an item

    def _flow(self, task: Task, reply: Reply, failures: list[Failure]) -> More:
        """Fill the slot with samples; hand it over when it is full and go on in another."""
        assert self._layout is not None
        rows = self._layout.rows
        listed = self.program.collate is not None
        held: list[Any] = []
        texts: list[tuple[int, int, bytes]] = []
        counts: list[tuple[int, int]] = []
        filled = beside = 0
        to_skip = task.skip
        for ordinal, item in self._each(task):
            try:
                for sample in self._persistent(task, ordinal, item):
                    if to_skip:
                        to_skip -= 1
                        continue
                    if filled == rows or 0 < self._text_bytes < beside:
                        body = (yield from self._pack(self._unpacked(held), task)) if listed else texts
                        moment = context.save()
                        grant = yield Reply(task.id, self.worker, Status.MORE, filled, body=(counts, body))
                        context.restore(moment)
                        if grant.offset is None:
                            raise Room
                        task.slot, task.offset, task.capacity = grant.slot, grant.offset, grant.capacity
                        held, texts, counts, filled, beside = [], [], [], 0, 0
                    if listed:
                        self._admit(sample, item)
                        held.append(_owned(sample))
                    else:
                        seen = len(texts)
                        self._write(self._slot(task.offset), filled, sample, item, texts)
                        beside += sum(len(text) for _, _, text in texts[seen:])
                    filled += 1
                    if counts and counts[-1][0] == ordinal:
                        counts[-1] = (ordinal, counts[-1][1] + 1)
                    else:
                        counts.append((ordinal, 1))
            except Room:
                raise
            except Exception as error:
                if self._cramped(error, ordinal):
                    raise Afresh(ordinal) from None
                failure = self._failure(error, ordinal, item)
                if not self.program.skips:
                    raise Failed(failure) from error
                failures.append(failure)
        body = (yield from self._pack(self._unpacked(held), task)) if listed and held else texts
        reply.rows, reply.body = filled, (counts, body)

    # ---- items and samples

    def _each(self, task: Task) -> Iterator[tuple[int, Any]]:
        """The items with their places, each noted in the worker's record before it is tried."""
        barred = frozenset(task.barred)
        for ordinal, item in enumerate(self._items(task)) if not self._passed else self._left(task):
            if ordinal >= task.first and ordinal not in barred:
                self.beat(ordinal)
                yield ordinal, item

    def _items(self, task: Task) -> Any:
        if self.program.reader is None:
            return task.items if self.program.fetch is None else self.program.fetch(task.items)
        return self._read(task, range(len(task.indices)))

    def _left(self, task: Task) -> Iterator[tuple[int, Any]]:
        """The items that did not come from the cache, with their places in the task."""
        if self.program.reader is None:
            return ((ordinal, item) for ordinal, item in enumerate(self._items(task)) if ordinal not in self._passed)
        left = [ordinal for ordinal in range(len(task.indices)) if ordinal not in self._passed]
        return zip(left, self._read(task, left), strict=True)

    def _read(self, task: Task, ordinals: Sequence[int]) -> Iterable[Any]:
        """Rows of a source for a load: all at once, and if that fails one by one."""
        reader = self.program.reader
        assert reader is not None
        if not task.barred and not task.first and not getattr(reader, "single", False):
            self.beat(Failure.TOGETHER)
            try:
                return reader.read(_where(task, ordinals))
            except Room:
                raise
            except Exception:  # noqa: BLE001 - it comes again below, where it is known which row it belongs to
                pass
        return self._one_by_one(task, reader, ordinals)

    def _one_by_one(self, task: Task, reader: Reader, ordinals: Sequence[int]) -> Iterator[Any]:
        """The rows, those that cannot be read as Unread: whoever uses one gets its error."""
        barred = frozenset(task.barred)
        for ordinal in ordinals:
            if ordinal in barred or ordinal < task.first:
                yield None  # nobody looks at it
                continue
            self.beat(ordinal)
            one = partial(_only, reader, _where(task, [ordinal]))
            try:
                row = one()
            except Room:
                raise
            except Exception as error:  # noqa: BLE001 - on_error says what becomes of it
                row = Unread(error, one)
            yield row

    def _called(self, task: Task, ordinal: int, item: Any) -> Any:
        """What an item is called: a row of a source by its index, or what was carried in its place."""
        if self.program.reader is None:
            return item
        return int(task.indices[ordinal]) if task.items is None else task.items[ordinal]

    def _samples(self, task: Task, ordinal: int, item: Any) -> Iterator[Any]:
        made = self._made(task, ordinal, item)
        return made if self._records is None else self._records.samples(ordinal, made)

    def _made(self, task: Task, ordinal: int, item: Any) -> Iterator[Any]:
        program = self.program
        context.enter(program.seed, task.epoch, int(task.indices[ordinal]))
        if type(item) is Unread:
            item = item.item()
        if isinstance(program.load, Into):  # only a probe comes here: what it writes is thrown away
            out = program.load.spec.build([np.empty(leaf.shape, leaf.stored) for leaf in program.load.spec.leaves])
            program.load.function(item, out)
            yield out
        elif program.samples_per_item == 1:
            yield program.load(item) if program.load is not None else item
        elif program.samples_per_item is None:
            yield from _iterate(program.load(item), item)  # type: ignore[misc]
        else:
            yield from self._exactly(item, program.samples_per_item)

    def _persistent(self, task: Task, ordinal: int, item: Any) -> Iterator[Any]:
        """The samples of an item; after an error, as often as on_error says, again from where it was."""
        given = 0
        for attempt in range(1, self.program.tries + 1):
            try:
                for sample in itertools.islice(self._samples(task, ordinal, item), given, None):
                    yield sample
                    given += 1
                return
            except Exception as error:
                if attempt == self.program.tries or isinstance(error, SpecError):
                    raise
                self._back_off(attempt, ordinal)

    def _collect(self, samples: list[Any], task: Task, ordinal: int, item: Any, most: int | None = None) -> None:
        """Add the samples of an item, all of them or none."""
        made: list[Any] = []
        for sample in itertools.islice(self._samples(task, ordinal, item), most):
            if self._layout is not None:
                self._admit(sample, item)
            # Copied, for it waits for the others of its batch: a load may return the same buffer every time.
            made.append(sample if most is not None or _references(sample) <= _ALONE else _owned(sample))
        samples.extend(made)

    def _exactly(self, item: Any, count: int) -> Iterator[Any]:
        given = 0
        for sample in itertools.islice(_iterate(self.program.load(item), item), count + 1):  # type: ignore[misc]
            given += 1
            if given <= count:
                yield sample
        if given != count:
            came = f"only {given}" if given < count else "more"
            raise SpecError(
                f"load gave {came} samples for {shown(item)}, but samples_per_item={count}: give exactly that many, or "
                "samples_per_item=None when the number varies",
                item=item,
            )

    def _cramped(self, error: Exception, ordinal: int) -> bool:
        """Whether an item may have found no memory only because others have left something here."""
        if not isinstance(error, MemoryError) or not self.replaceable:
            return False
        alone = self.fresh and (ordinal == self._first or self.program.mode is not Mode.ROWS)
        return not alone

    def _failure(self, error: Exception, ordinal: int, item: Any) -> Failure:
        failure = failure_of(error, ordinal, item)
        return replace(failure, fresh=True) if isinstance(error, MemoryError) and self.replaceable else failure

    def _back_off(self, attempt: int, ordinal: int) -> None:
        """Wait before another try, each time longer; it has its own time."""
        assert isinstance(self.program.on_error, Retry)
        time.sleep(self.program.on_error.wait_s * 2 ** (attempt - 1))
        self.beat(ordinal if ordinal != Failure.BATCH else Failure.COLLATING)

    def _slot(self, offset: int) -> list[Array]:
        columns = self._columns.get(offset)
        if columns is None:
            assert self._layout is not None
            columns = self._layout.arrays(*self.memory.window(offset, self._layout.nbytes))
            self._columns[offset] = columns
        return columns

    def _attempt(
        self,
        action: Callable[[], Any],
        ordinal: int,
        item: Any,
        failures: list[Failure] | None,
        *,
        first: Exception | None = None,
    ) -> bool:
        """Run user code as often as on_error says; False when the item is to be left out.

        ``first`` is what came of the first try, if that was made elsewhere.
        """
        tries = self.program.tries
        arrays = _arrays_of(item) if tries > 1 and first is None else []
        as_given = [array.copy() for array in arrays]
        for attempt in range(1, tries + 1):
            try:
                if first is not None:
                    raised, first = first, None
                    raise raised
                action()
                return True
            except Room:
                raise
            except Exception as error:
                if self._cramped(error, ordinal):
                    raise Afresh(ordinal) from None
                if attempt < tries and not isinstance(error, SpecError):
                    self._back_off(attempt, ordinal)
                    for array, given in zip(arrays, as_given, strict=True):
                        array[...] = given  # load may have worked in place
                    continue
                failure = self._failure(error, ordinal, item)
                if failures is None or not self.program.skips:
                    raise Failed(failure) from error
                failures.append(failure)
                return False
        raise AssertionError


def _scatter(
    reader: Reader, indices: Any, columns: list[Array], places: Any, leaves: Sequence[Leaf], *, told: bool
) -> None:
    """Read rows that lie beside each other into places that do not, without another copy if the reader can."""
    if isinstance(reader, Scatters):
        reader.scatter(indices, columns, places, leaves, told=told)
        return
    out = [np.empty((len(indices), *column.shape[1:]), column.dtype) for column in columns]
    reader.read_into(indices, out, leaves)
    for column, rows in zip(columns, out, strict=True):
        column[places] = rows


def _rows_of(task: Task, part: Sequence[int]) -> slice | npt.NDArray[np.int64]:
    """The rows of a slot that belong to items of a task; a slice where they follow each other."""
    if task.places is not None:
        rows = task.places[part[0] : part[-1] + 1] if isinstance(part, range) else task.places[part]
        follow = int(rows[-1]) - int(rows[0]) == len(rows) - 1 and bool((rows[1:] > rows[:-1]).all())
        return slice(int(rows[0]), int(rows[-1]) + 1) if follow else rows
    if len(part) == part[-1] - part[0] + 1:
        return slice(task.start + part[0], task.start + part[-1] + 1)
    return task.start + np.array(part)


def _piece_rows(spec: Spec) -> int:
    """Samples that a load of several makes at a time."""
    return max(1, min(MOST_MANY, MANY_BYTES // max(1, spec.sample_bytes)))


def _where(task: Task, ordinals: Sequence[int]) -> Any:
    """What a reader is told to read: indices, or what is carried in their place."""
    if task.items is None:
        return task.indices if len(ordinals) == len(task.indices) and ordinals[0] == 0 else task.indices[list(ordinals)]
    return [task.items[ordinal] for ordinal in ordinals]


def _arrays_of(item: Any) -> list[Array]:
    """The arrays of an item that a load may write to."""
    if isinstance(item, str | bytes | int | Unread):
        return []
    leaves = optree.tree_leaves(item, namespace=NAMESPACE)
    return [leaf for leaf in leaves if isinstance(leaf, np.ndarray) and leaf.flags.writeable]


def _only(reader: Reader, where: Any) -> Any:
    return reader.read(where)[0]


class Mark:
    """Notes the place of the item that is being loaded where others see it; in a loop, its ``cells`` are written to."""

    __slots__ = ("cells",)

    def __init__(self, cells: Any) -> None:
        self.cells = cells

    def __call__(self, ordinal: int) -> None:
        self.cells[0] = ordinal


def _gave_way() -> int:
    """How often this thread has waited for something of its own accord."""
    try:
        import resource
    except ImportError:  # no such count on this system
        return time.perf_counter_ns()
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_nvcsw


def _plain(program: Program, spec: Spec) -> Plain | None:
    if program.samples_per_item != 1 or program.load is None or isinstance(program.load, Into):
        return None
    return plain_of(spec)


def _not_npy(steps: Iterable[Step], beat: Callable[[int], None], column: Array) -> Iterator[Step]:
    """The steps that are left when arrays have been read straight from their files, with no memory in between."""
    for step in steps:
        ordinal, _, row, item = step
        beat(ordinal)
        try:
            done = type(item) is not Unread and read_npy(item, column[row, ...])
        except Exception:  # noqa: BLE001 - it comes again, where it is known what becomes of it
            done = False
        if not done:
            yield step


class _Packing(NamedTuple):
    tree: optree.PyTreeSpec
    kinds: list[str]
    arrays: list[Array | Rows]
    dtypes: list[np.dtype[Any]]


class Failed(Exception):
    """An item failed, and the task with it."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.error)
        self.failure = failure


def texts_too_large(size: int) -> Failure:
    """Texts took more than a task may take beside its slot: so many bytes, if that is known."""
    return Failure(Failure.TEXTS, MemoryError(size), "")


def failure_of(error: BaseException, ordinal: int, item: Any) -> Failure:
    """An error of user code in a form that can travel: frames of ours are left out of the trace."""
    if isinstance(error, Failed):
        return error.failure
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith("penstock._core"):
        frames = frames.tb_next
    try:
        trace = "".join(traceback.format_exception(type(error), error, frames))
    except MemoryError:
        trace = "".join(traceback.format_tb(frames))
    if len(trace) > _MOST_TRACE:  # the error's own words are in it, and some carry the data they are about
        trace = f"{trace[: _MOST_TRACE // 2]}\n... ({len(trace):,} characters)\n{trace[-_MOST_TRACE // 2 :]}"
    if isinstance(error, SpecError) and error.item is None:
        error.item = item
    return Failure(ordinal, error, trace)


def _iterate(made: Any, item: Any) -> Iterator[Any]:
    if isinstance(made, np.ndarray | str | bytes | dict) or not hasattr(made, "__iter__"):
        raise SpecError(
            f"load returned a {type(made).__name__} for {shown(item)}, but with samples_per_item it must return an "
            "iterator (or list) of samples: write yield in place of return",
            item=item,
        )
    return iter(made)


def _kind(value: Any) -> str:
    if isinstance(value, str):
        return "str"
    if isinstance(value, bytes):
        return "bytes"
    if isinstance(value, np.generic):
        return "generic"
    return "scalar" if isinstance(value, bool | int | float | complex) else "array"


def _packable(value: Any, path: str = "") -> Array | Rows:
    if isinstance(value, Rows):
        return value
    if isinstance(value, str):
        value = value.encode("utf-8", "surrogatepass")
    if isinstance(value, bytes):
        return np.frombuffer(value, np.uint8)
    return as_array(value, path=path)


def _whole(array: Array | Rows) -> Array:
    return array.made() if isinstance(array, Rows) else array


def _spread(window: tuple[Any, int], size: int) -> tuple[Any, Any, int, int]:
    memory, start = window
    return memory, np.uint8, size, start


def castings(batch: Any, arrays: Sequence[Array | Rows], cast: Cast, *, listed: bool) -> list[tuple[int, Leaf]]:
    """The leaves of a collated batch that are to be cast, with their places.

    A padded leaf has the name that it has in a sample, and so have the leaves of a batch that is a list of samples.
    """
    nodes, tree = optree.tree_flatten(batch, is_leaf=lambda node: isinstance(node, Padded), namespace=NAMESPACE)
    places: list[int] = []
    leaves: list[Leaf] = []
    place = 0
    for path, node in zip(tree.paths(), nodes, strict=True):
        if isinstance(node, Padded) or _kind(node) in ("array", "generic"):
            array = arrays[place]
            name = ".".join(map(str, path[1:] if listed else path))
            leaves.append(Leaf(name, "array", array.shape, array.dtype, array.dtype))
            places.append(place)
        place += 2 if isinstance(node, Padded) else 1  # the lengths stay what they are
    chosen = Spec(tree, tuple(leaves)).cast(cast).leaves
    return [(place, leaf) for place, leaf in zip(places, chosen, strict=True) if leaf.stored != leaf.dtype]


def recast(batch: Any, cast: Cast) -> Any:
    """A collated batch with its leaves cast, where no slot is written to on the way."""
    values, tree = flatten(batch)
    arrays = [_whole(_packable(value)) for value in values]
    for place, leaf in castings(batch, arrays, cast, listed=False):
        values[place] = np.empty(leaf.shape, leaf.stored)
        store(values[place], arrays[place], leaf, None)
    return optree.tree_unflatten(tree, values)


def _copied(sample: Any) -> Any:
    """A sample with arrays of its own: a load may use one buffer for all of its samples."""
    values, tree = flatten(sample)
    return optree.tree_unflatten(tree, [v if isinstance(v, str | bytes) else as_array(v).copy() for v in values])


def _references(sample: Any) -> int:
    """How often a sample that was just loaded is referred to, if it is an array with memory of its own."""
    if type(sample) is not np.ndarray or sample.base is not None or not sample.flags.owndata:
        return _MANY
    return sys.getrefcount(sample)


def _alone() -> int:
    """What that is for an array that nobody else has: it differs between versions of Python."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return 0  # counts are put off there, and say nothing
    for sample in itertools.islice(_one(), None):
        return _references(sample)
    raise AssertionError


def _one() -> Iterator[Array]:
    yield np.empty(1)


_MANY: Final = 1 << 30
_ALONE: Final = _alone()


def _owned(sample: Any) -> Any:
    """A sample whose arrays nobody else writes to; whatever is not an array stays what it is."""
    values, tree = flatten(sample)
    if not any(isinstance(value, np.ndarray) for value in values):
        return sample
    return optree.tree_unflatten(tree, [v.copy() if isinstance(v, np.ndarray) else v for v in values])


def _collated_bytes(collate: Callable[[list[Any]], Any], sample: Any) -> int:
    try:
        return _packed_bytes(flatten(collate([sample]))[0])
    except Exception:  # noqa: BLE001 - it may need more than one sample: an estimate will do, for slots grow
        return _packed_bytes(flatten(sample)[0])


def _packed_bytes(values: list[Any]) -> int:
    return sum(aligned(_packable(value).nbytes) for value in values)
