"""The feed: what the user holds and iterates. Runs in the parent.

Checks the arguments, learns what a sample is (a probe), has the plan solved, and turns chunks of the engine into
batches. Everything that works on its own is elsewhere: order, plan and ledger decide, crew and engine obey.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal

import numpy as np
import optree

from penstock._core import context, machine
from penstock._core.batch import Assembler, Trees, nbytes_of, packed_batch, rows_batch
from penstock._core.budget import Size, format_bytes, parse_size
from penstock._core.crew import Crew, process_crew
from penstock._core.crew.inline import InlineCrew
from penstock._core.crew.threads import ThreadCrew
from penstock._core.device import door
from penstock._core.engine import Chunk, Engine, Unit, error_of
from penstock._core.errors import BudgetError, FeedClosed, LoadError, PenstockError, SpecError, shown
from penstock._core.fill import COLLATE_INDEX, Failed, recast
from penstock._core.items import Picker, Stream, sort_out, stream_error
from penstock._core.layout import PAGE, Layout, slot_bytes
from penstock._core.order import Order
from penstock._core.plan import LEAN_WORKER_BYTES, TEMPLATE_BYTES, Footprint, Plan, Request, solve
from penstock._core.program import Into, Pad, Probe, Program, Retry, Setup
from penstock._core.source import Source
from penstock._core.spec import NAMESPACE, Cast, Spec, flatten, row_bytes, to_dtype
from penstock._core.stats import Stats
from penstock._core.task import Mode, Task
from penstock._core.wire import dump_items

__all__ = ["Epoch", "Feed"]

OnError = Literal["raise", "skip"] | Retry
DEFAULT_SHARE: Final = 0.5
PROBE_ITEMS: Final = 8
# Two measurements of the same worker differ by a few percent.
MEASURED_SLACK: Final = 1.1
# A batch that is collated may be larger than the first samples suggest; beyond this the slot grows.
PACKED_SLACK: Final = 1.25
# The items of a shuffle window stay in this process: an eighth of the budget, whatever the number of workers, so that
# the order does not depend on it.
WINDOW_SHARE: Final = 8
WINDOW_MOST: Final = 2**20
# Positions whose items are looked up at once: 64 KiB of indices, a tenth of the cost of doing it batch by batch.
ORDER_BLOCK: Final = 8192
# So many items in a row that are skipped mean that all will be.
SKIPS_IN_A_ROW: Final = 100


class ResourceHeld(UserWarning):
    """Batches are handed out as copies because the consumer keeps too many."""


class BudgetWarning(UserWarning):
    """The budget is larger than what the machine or the container has."""


_live: weakref.WeakSet[Feed] = weakref.WeakSet()


def _available() -> int:
    """Memory that nobody uses and no other feed of this process was promised."""
    promised = sum(max(0, feed._memory - feed._stats.arena_bytes - feed._stats.worker_bytes) for feed in list(_live))
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
            stacklevel=3,
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
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        cast: Cast = None,
        collate_fn: Literal["pad", "list"] | Callable[[list[Any]], Any] | None = None,
        samples_per_item: int | None = 1,
        on_error: OnError = "raise",
        timeout: float | None = None,
        shard: tuple[int, int] | None = None,
        cache: str | os.PathLike[str] | None = None,
        to: str = "numpy",
        device_memory: Size | None = None,
        start_method: Literal["fork", "forkserver", "spawn"] | None = None,
    ) -> None:
        self._kind = sort_out(items, load)
        self._source: Source | None = None if isinstance(self._kind, Picker | Stream) else self._kind
        self._engine: Engine | None = None
        self._plan: Plan | None = None
        _check_choice("executor", executor, ("process", "thread"))
        _check_choice("start_method", start_method, (None, "fork", "forkserver", "spawn"))
        _check_count("num_workers", num_workers, least=0, optional=True)
        _check_count("samples_per_item", samples_per_item, least=1, optional=True)
        if batch_size != "max":
            _check_count("batch_size", batch_size, least=1)
        if not (isinstance(on_error, Retry) or on_error in ("raise", "skip")):
            raise ValueError(f'on_error={on_error!r} is not known: give "raise", "skip" or penstock.Retry(n)')
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
            raise TypeError(f"seed={seed!r} must be an int")
        for name, value in (("timeout", timeout), ("cache", cache), ("device_memory", device_memory)):
            if value is not None:
                raise NotImplementedError(f"{name} is part of the contract but not built yet: leave it out for now")
        if isinstance(collate_fn, str):
            _check_choice("collate_fn", collate_fn, ("pad", "list"))
        elif collate_fn is not None and not callable(collate_fn):
            raise TypeError(f'collate_fn={collate_fn!r} must be None, "pad", "list" or a callable on a list of samples')
        self._batch_size = batch_size
        self._memory = _budget(memory)
        self._num_workers = num_workers
        self._executor = executor
        self._shuffle = bool(shuffle)
        self._seed = int(seed)
        self._drop_last = bool(drop_last)
        self._cast = cast
        self._collate = Pad() if collate_fn == "pad" else list if collate_fn == "list" else collate_fn
        self._each = samples_per_item
        self._on_error = on_error
        self._rank, self._world = _shard(shard)
        self._start_method = start_method
        self._load = load
        self._door = door(to)
        _check_into(load, cast, collate_fn, samples_per_item)
        if load is None and samples_per_item != 1:
            raise TypeError(
                f"samples_per_item={samples_per_item} needs a load that gives so many: a source has one sample per row"
            )
        for dtype in cast.values() if isinstance(cast, Mapping) else () if cast is None else (cast,):
            _check_dtype(dtype)
        self._to = to
        self._closed = False
        self._next_epoch = 0
        self._resume: tuple[int, int] = (0, 0)
        self._cursor: tuple[int, int, int] = (0, 0, 0)
        self._stats = Stats()
        self._skips_in_a_row = 0
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._current: weakref.ref[Epoch] | None = None
        _live.add(self)

    # ---- what it is

    @property
    def plan(self) -> Plan:
        """The numbers that were solved, and why; the first use loads an item or two to learn what they cost."""
        self._prepare()
        assert self._plan is not None
        return self._plan

    @property
    def stats(self) -> Stats:
        """What the feed did so far."""
        return self._stats

    @property
    def epoch(self) -> int:
        """The epoch that is being iterated, or the next one if none is."""
        return self._cursor[0]

    def __len__(self) -> int:
        """Batches an epoch; TypeError where nobody can know."""
        if isinstance(self._kind, Stream):
            raise TypeError("a stream of items has no length: count batches as they come")
        if self._each is None:
            raise TypeError("with samples_per_item=None the number of batches is known only afterwards")
        samples = len(self._order(0)) * self._each
        size = self.plan.batch_size if self._batch_size == "max" else self._batch_size
        return samples // size if self._drop_last else -(-samples // size)

    def __repr__(self) -> str:
        count = "a stream" if isinstance(self._kind, Stream) else f"{self._length()} items"
        return f"<penstock.Feed of {count}, batch_size={self._batch_size}, memory={format_bytes(self._memory)}>"

    # ---- iterating

    def __iter__(self) -> Epoch:
        """One epoch; the next call gives the next one."""
        return self._begin(self._next_epoch, self._next_epoch)

    def epochs(self, count: int) -> Iterator[Epoch]:
        """``count`` epochs, one after the other; the next is being read while the last batches of one are used."""
        first = self._next_epoch
        epoch: Epoch | None = None
        try:
            for number in range(first, first + count):
                # One that was left early has dropped what it had read ahead: start anew.
                if epoch is not None and epoch.complete and self._engine is not None:
                    epoch = Epoch(self, self._engine, number, epoch._run)
                    self._next_epoch = number + 1
                    self._current = weakref.ref(epoch)
                else:
                    self._next_epoch = number
                    epoch = self._begin(number, first + count - 1)
                yield epoch
        finally:
            # Left between two epochs: the second is being read already, and nobody will ask for it.
            if epoch is not None and epoch.complete and self._engine is not None:
                self._engine.stop(epoch._run)

    def progress(self, desc: str | None = None) -> Iterator[Any]:
        """One epoch with a live line: batches, samples/s, share of time waited, memory of budget, time left."""
        from penstock.progress import progress

        return progress(self, desc=desc)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch, from its start."""
        _check_count("epoch", epoch, least=0)
        self._next_epoch = int(epoch)
        self._resume = (0, 0)
        self._cursor = (self._next_epoch, 0, 0)

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
        """Where the feed is, as a small JSON-able dict: what was handed out counts, what was read ahead does not."""
        epoch, position, inside = self._cursor
        if position and not isinstance(self._kind, Stream) and inside == 0 and position >= self._end(epoch):
            epoch, position = epoch + 1, 0
        return {
            "version": 1,
            "epoch": epoch,
            "position": position * self._world,
            "inside": inside,
            **self._identity(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state_dict`` was taken, with exactly the next sample."""
        if state.get("version") != 1:
            raise ValueError(f"a state of version {state.get('version')!r} cannot be read here: version 1 is known")
        for name, mine in self._identity().items():
            if state.get(name) != mine:
                raise ValueError(
                    f"this state belongs to another feed: its {name} is {state.get(name)!r}, here it is {mine!r}; make "
                    "the feed with the same items, seed and shuffle as before"
                )
        position, rest = divmod(int(state["position"]), self._world)
        if rest:
            raise ValueError(f"position {state['position']} cannot be divided among {self._world} ranks")
        self._next_epoch = int(state["epoch"])
        self._resume = (position, int(state["inside"]))
        self._cursor = (self._next_epoch, *self._resume)

    def _identity(self) -> dict[str, Any]:
        length = None if isinstance(self._kind, Stream) else self._length()
        return {"seed": self._seed, "shuffle": self._shuffle, "length": length}

    # ---- within

    def _length(self) -> int:
        return self._kind.length if isinstance(self._kind, Picker) else len(self._kind)  # type: ignore[arg-type]

    def _order(self, epoch: int) -> Order:
        return Order(self._length(), self._shuffle, self._seed, epoch, self._rank, self._world, self._drop_last)

    def _end(self, epoch: int) -> int:
        """The position at which an epoch has given its last batch."""
        end = len(self._order(epoch))
        if self._drop_last and self._each is not None and self._engine is not None:
            end -= max(0, self._engine.plan.batch_size - 1) // self._each
        return max(0, end)

    def _begin(self, number: int, last: int) -> Epoch:
        if self._closed:
            raise FeedClosed("the feed was closed: make a new one to go on")
        if self._current is not None and (older := self._current()) is not None:
            older._give_back()  # not closed: whoever goes on with it is told by LeaseError, not by an early end
        position, inside = self._resume
        self._resume = (0, 0)
        self._next_epoch = number + 1
        self._cursor = (number, position, inside)
        if self._is_empty():
            return Epoch(self, None, number, 0)
        self._next_epoch = number  # what the probe loads is what comes first
        try:
            self._prepare()
        finally:
            self._next_epoch = number + 1
        assert self._engine is not None
        starts = itertools.chain([(number, position, inside)], ((n, 0, 0) for n in range(number + 1, last + 1)))
        units = itertools.chain.from_iterable(itertools.starmap(self._units, starts))
        run = self._engine.begin(units, ahead=0 if isinstance(self._kind, Stream) else 1)
        epoch = Epoch(self, self._engine, number, run)
        self._current = weakref.ref(epoch)
        return epoch

    def _take_back(self, units: list[Unit]) -> None:
        """Items of a one-time stream that were pulled and not handed out come first next time."""
        if isinstance(self._kind, Stream) and not self._kind.restarts:
            _, position, inside = self._cursor
            left = [
                item for unit in units for place, item in enumerate(unit.items or (), unit.start) if place >= position
            ]
            self._kind.give_back(left)
            if left:
                self._resume = (0, inside)

    def _count(self, rows: int, size: int) -> None:
        self._stats.samples += rows
        self._stats.batches += 1
        self._stats.bytes += size

    def _copying(self, array: Any) -> Any:
        copied = array.copy()
        return copied if self._door is None else self._door(copied)

    def _note_copy(self) -> None:
        self._stats.copied += 1
        if self._stats.copied == 1:
            held = self._plan.slots if self._plan is not None else 0
            warnings.warn(
                f"the consumer holds so many of the {held} slots that workers would run dry: further batches are "
                "copies, which cost memory outside the budget. Let batches go when they are used, or copy what you "
                "keep",
                ResourceHeld,
                stacklevel=_users_level(),
            )

    def _is_empty(self) -> bool:
        if isinstance(self._kind, Stream):
            return self._engine is None and not self._kind.peek(0, 1)
        return self._length() == 0

    def _units(self, epoch: int, position: int, inside: int) -> Iterator[Unit]:
        """The units of an epoch from a position on."""
        plan = self._plan
        assert plan is not None and self._program is not None
        size = self._unit_items()
        if isinstance(self._kind, Stream):
            yield from self._stream_units(self._kind, epoch, position, inside, size)
            return
        order = self._order(epoch)
        end = len(order)
        if self._drop_last and self._program.mode is not Mode.FLOW and not self._program.skips:
            end -= (end - position) % (plan.batch_size // (self._each or 1))
        # The order is computed for many positions at once: numpy's overhead is that of a batch, the work is not.
        block = size * max(1, ORDER_BLOCK // size)
        ahead = np.empty(0, np.int64)
        for start in range(position, end, size):
            at = (start - position) % block
            if at == 0:
                ahead = order.indices(start, min(start + block, end))
            indices = ahead[at : at + size]
            yield Unit(epoch, start, indices, self._pick(indices), inside if start == position else 0)

    def _stream_units(self, stream: Stream, epoch: int, position: int, inside: int, size: int) -> Iterator[Unit]:
        assert self._program is not None
        window = self._window if self._shuffle else None
        items = stream.begin(window, self._seed, epoch)
        if stream.restarts:
            for _ in range(position):
                next(items, None)
        if self._world > 1:
            items = _every(items, self._rank, self._world)
        start = position
        while True:
            pulled: list[Any] = []
            # Not islice: the items pulled so far must not be lost if the stream raises.
            try:
                for item in items:
                    pulled.append(item)
                    if len(pulled) == size:
                        break
            except Exception as error:
                stream.give_back(pulled)
                raise stream_error(error, start + len(pulled)) from error
            exact = self._drop_last and self._program.mode is not Mode.FLOW and not self._program.skips
            if not pulled or (exact and len(pulled) < size):
                return
            indices = np.arange(start, start + len(pulled), dtype=np.int64)
            yield Unit(epoch, start, indices, pulled, inside if start == position else 0)
            start += len(pulled)

    def _unit_items(self) -> int:
        """Items a unit: those of a batch; one where an item gives any number of samples."""
        assert self._plan is not None and self._program is not None
        if self._program.mode is Mode.FLOW:
            each = self._each or 1
            return max(1, self._plan.batch_size // each) if self._each is not None else 1
        return self._plan.batch_size * self._plan.batches_per_slot // (self._each or 1)

    def _pick(self, indices: Any) -> list[Any] | None:
        if isinstance(self._kind, Picker):
            return self._kind(indices)
        if self._source is not None and self._program is not None and self._program.reader is None:
            return self._source.reader().read(indices)
        return None

    # ---- getting ready

    def _prepare(self) -> None:
        """Learn what a sample is, plan, and have the crew ready; nothing is left behind if that fails."""
        if self._engine is not None and not self._engine.broken:
            return
        if self._closed:
            raise FeedClosed("the feed was closed: make a new one to go on")
        if self._finalizer is not None:  # Ctrl-C came in the middle of something: begin anew, or a reply may be missed
            self._finalizer()
            self._engine = None
        self._program = program = self._make_program()
        crew: Crew | None = None
        item_bytes = self._item_bytes()
        try:
            if program.load is None and self._collate is None:
                crew, probe = InlineCrew(program), self._probe_source()
            else:
                if isinstance(program.load, Into):
                    # A declared spec needs no sample: what cannot fit is refused before anything is started.
                    self._solve(Probe(program.load.spec, 0, 1e-3, 1e-3, 0, 0), program, None, 8)
                crew = self._make_crew(program, self._num_workers)
                probe = self._probe(crew)
            plan, slot_size = self._solve(probe, program, crew, item_bytes)
            if isinstance(crew, InlineCrew) != (plan.workers == 0):
                crew.close()
                crew = self._make_crew(program, plan.workers)
            # What the plan leaves is given to those who may turn out to need more: workers whose loads differ, and half
            # of it to slots whose batches do.
            spare = plan.free_bytes // 2 if program.collate is not None else 0
            engine = Engine(
                crew,
                plan,
                mode=program.mode,
                slot_bytes=slot_size,
                spare_bytes=spare,
                samples_per_item=self._each,
                probe=probe,
            )
            growth = plan.worker_bytes - probe.process_bytes + (plan.free_bytes - spare) // max(1, plan.workers)
            rows = plan.batch_size * plan.batches_per_slot
            crew.start(Setup(probe.spec, rows, plan.workers, max(0, growth), probe.load_bytes))
        except BaseException:
            if crew is not None:
                crew.close()
            raise
        self._plan = plan
        self._spec = probe.spec
        self._layout = Layout.of(probe.spec, plan.batch_size * plan.batches_per_slot)
        self._trees = Trees()
        engine.stats = self._stats
        self._engine = engine
        self._finalizer = weakref.finalize(self, engine.close)

    def _probe(self, crew: Crew) -> Probe:
        """Have items loaded until one gives a sample: the form of it, and what it cost."""
        batch = PROBE_ITEMS if self._batch_size == "max" else min(PROBE_ITEMS, self._batch_size)
        # Streams are not read ahead for this: what they gave cannot be put back into whatever makes them.
        start, size = 0, 1 if isinstance(self._kind, Stream) else batch
        while True:
            indices, items = self._from(start, size)
            if len(indices) == 0:
                raise PenstockError(
                    f"none of the {start} items gives a sample, so there is nothing to plan for: check what load yields"
                    if start
                    else "there are no items, so there is nothing to plan for: give at least one"
                )
            task = Task(0, 0, 0, 0, 0, self._next_epoch, indices, items)
            try:
                probe = crew.probe(task)
            except Failed as failed:
                raise error_of(failed.failure, Unit(0, 0, indices, items)) from failed.failure.error
            if probe is not None:
                return probe
            start, size = start + len(indices), 2 * size

    def _from(self, start: int, size: int) -> tuple[Any, list[Any] | None]:
        """Some items of the epoch that comes next, with their indices."""
        if isinstance(self._kind, Stream):
            items = self._kind.peek(start, start + size)
            indices = np.arange(start, start + len(items), dtype=np.int64)
            # Drawn from a window or dealt to ranks they come at other places: below 0 they are taken for none of them.
            return ~indices if self._shuffle or self._world > 1 else indices, items
        start += self._resume[0]
        indices = self._order(self._next_epoch).indices(start, start + size)
        return indices, self._pick(indices) if len(indices) else None

    def _item_bytes(self) -> int:
        _, items = self._from(0, 1)
        if not items:
            return 8
        if not self._in_processes():
            return 64  # nothing of it travels, so it need not even be possible to pickle it
        return len(dump_items(items[:1]))

    def _make_program(self) -> Program:
        source = self._source
        travels = source is not None and source.in_memory and self._load is not None and self._in_processes()
        skips = self._on_error == "skip" or (isinstance(self._on_error, Retry) and self._on_error.then == "skip")
        divides = (
            self._each is not None
            and self._batch_size != "max"
            and self._batch_size % self._each == 0
            and not self._resume[1]
        )
        if self._each == 1 or divides:
            mode = Mode.ROWS if self._collate is None else Mode.FLOW if skips else Mode.WHOLE
        else:
            mode = Mode.FLOW
        return Program(
            self._load,
            None if source is None or travels else source.reader(),
            mode,
            self._collate,
            self._each,
            self._cast,
            self._on_error,
            self._seed,
            self._memory,
        )

    def _in_processes(self) -> bool:
        return self._executor == "process" and self._num_workers != 0

    def _make_crew(self, program: Program, workers: int | None) -> Crew:
        if workers == 0:
            return InlineCrew(program)
        gathers_here = self._source is not None and self._source.in_memory and self._load is None
        if self._executor == "thread" or gathers_here:
            return ThreadCrew(program)
        return process_crew(program, self._start_method)

    def _probe_source(self) -> Probe:
        """A source knows the form of its samples; only reading from files has to be timed."""
        source = self._source
        assert source is not None
        spec = source.spec().cast(self._cast)
        seconds = 0.0
        if not source.in_memory and len(source):
            indices, _ = self._from(0, PROBE_ITEMS)
            out = [np.empty((len(indices), *leaf.shape), leaf.stored) for leaf in spec.leaves]
            began = time.perf_counter()
            source.reader().read_into(indices, out, spec.leaves)
            seconds = (time.perf_counter() - began) / len(indices)
        return Probe(spec, 0, seconds, seconds, 2 * spec.sample_bytes, 0)

    def _solve(self, probe: Probe, program: Program, crew: Crew | None, item_bytes: int) -> tuple[Plan, int]:
        rows = tuple(row_bytes(leaf) for leaf in probe.spec.leaves)
        if program.collate is not None:
            rows = (int(probe.packed_bytes * PACKED_SLACK),)
        length = None if isinstance(self._kind, Stream) or self._each is None else len(self._order(0)) * self._each
        source = self._source
        # Files of a source are timed in this process, but read by workers if there are to be any.
        later = program.load is None and source is not None and not source.in_memory and self._in_processes()
        later = later and isinstance(crew, InlineCrew)
        processes = crew is None or later or not isinstance(crew, InlineCrew | ThreadCrew)
        self._window = _window(self._memory, item_bytes)
        window_bytes = self._window * item_bytes if isinstance(self._kind, Stream) and self._shuffle else 0
        footprint = Footprint(
            leaf_row_bytes=rows,
            load_bytes=probe.load_bytes,
            process_bytes=probe.process_bytes or (LEAN_WORKER_BYTES if processes else 0),
            template_bytes=TEMPLATE_BYTES if later else getattr(crew, "template_bytes", 0) if crew is not None else 0,
            load_s=probe.load_s,
            cpu_s=probe.cpu_s,
            item_bytes=item_bytes,
        )
        request = Request(
            memory=max(1, self._memory - window_bytes),
            batch_size=self._batch_size,
            num_workers=self._num_workers,
            executor=self._executor if processes else "thread",
            cores=machine.look().cores,
            whole=program.mode is Mode.WHOLE,
            staged=program.mode is Mode.FLOW,
            # A stream may be slow or live: its batches are handed out one by one.
            groups=program.mode is Mode.ROWS and not isinstance(self._kind, Stream),
            length=length,
        )
        try:
            plan = solve(request, footprint)
        except BudgetError:
            raise self._does_not_fit(request, footprint, window=window_bytes > 0) from None
        if window_bytes:
            plan = dataclasses.replace(
                plan,
                memory=self._memory,
                parent_bytes=plan.parent_bytes + window_bytes,
                total_bytes=plan.total_bytes + window_bytes,
                notes=(*plan.notes, f"shuffle window of {self._window:,} items: {format_bytes(window_bytes)}"),
            )
        return plan, slot_bytes(rows, plan.batch_size * plan.batches_per_slot)

    def _does_not_fit(self, request: Request, footprint: Footprint, *, window: bool) -> BudgetError:
        """The error whose ``least`` works when it is given: what is measured anew then may come out a little larger."""
        wider = dataclasses.replace(
            footprint,
            load_bytes=int(footprint.load_bytes * MEASURED_SLACK),
            process_bytes=int(footprint.process_bytes * MEASURED_SLACK),
            template_bytes=int(footprint.template_bytes * MEASURED_SLACK),
        )
        try:
            solve(request, wider)
        except BudgetError as error:
            if not window:
                return error
            # The window is a share of the budget, so what is left for the rest grows with it.
            least = -(-error.least * WINDOW_SHARE // (WINDOW_SHARE - 1) // PAGE) * PAGE + PAGE
            return BudgetError(f"{error} (with the shuffle window: memory={least})", least=least)
        raise AssertionError("a larger footprint fits where a smaller one did not")


class Epoch:
    """One pass over the items of a feed; an iterator of batches."""

    def __init__(self, feed: Feed, engine: Engine | None, number: int, run: int) -> None:
        self._feed = feed
        self._engine = engine
        self._run = run
        self.number = number
        """Which epoch this is."""
        self._turn = threading.Lock()
        self._over = engine is None
        self.complete = False
        """Whether all of it was handed out."""
        self._assembler = Assembler()
        self._shared: _Shared | None = None
        self._put_by_units: list[Unit] = []
        self._segments: deque[list[int]] = deque()  # position, samples of it seen before, rows: of what was put by

    def __iter__(self) -> Epoch:
        return self

    def __len__(self) -> int:
        return len(self._feed)

    def __next__(self) -> Any:
        # Two threads may share an epoch: each batch goes to one of them.
        with self._turn:
            if self._over:
                raise StopIteration
            try:
                return self._next()
            except StopIteration:
                raise  # complete: what is read ahead belongs to the epoch that follows
            except BaseException:
                self.close()
                raise

    def __del__(self) -> None:
        # Not a way to close: an epoch that nobody holds any more must not go on reading ahead.
        if not self._over and self._engine is not None and not self._engine.postpone(self.close):
            self.close()

    def close(self) -> None:
        """Stop here: what was read ahead is dropped, items of a one-time stream are kept for the next epoch."""
        if not self._over:  # one that is complete shares its run with the epoch that follows
            self._over = True
            self._give_back()

    def _give_back(self) -> None:
        if self._engine is not None:
            # A unit that goes on in another slot is in both: each of its items is to be given back once.
            begun = {id(unit): unit for unit in (*self._put_by_units, *self._engine.stop(self._run))}
            self._feed._take_back(list(begun.values()))
            self._put_by_units.clear()
            self._shared = None
            self._assembler = Assembler()
            self._segments.clear()

    @property
    def done(self) -> bool:
        """Whether there is nothing more to come."""
        return self._over

    def _next(self) -> Any:
        feed, engine = self._feed, self._engine
        assert engine is not None
        size = engine.plan.batch_size
        if self._shared is not None:
            if engine.run == self._run:
                return self._slice(size)
            self._shared = None
        while len(self._assembler) < size:
            found = engine.next_chunk(self._run, self.number)
            if found is None:
                if len(self._assembler) and not feed._drop_last:
                    return self._assembled(len(self._assembler))
                feed._cursor = (self.number + 1, 0, 0)
                self._over = True
                self.complete = True
                raise StopIteration
            unit, chunk = found
            self._note_failures(unit, chunk)
            if engine.mode is Mode.WHOLE:
                return self._collated(unit, chunk)
            if engine.mode is Mode.ROWS and not chunk.failures and not len(self._assembler):
                return self._rows(unit, chunk)
            self._put_by(unit, chunk)
        return self._assembled(size)

    def _rows(self, unit: Unit, chunk: Chunk) -> Any:
        feed, engine = self._feed, self._engine
        assert engine is not None
        texts = chunk.body or []
        lease = engine.lease(chunk)
        if lease is not None:
            leaves = rows_batch(feed._layout, *lease, chunk.rows, texts, feed._door)
        else:
            leaves = rows_batch(feed._layout, *engine.peek(chunk), chunk.rows, texts, None)
        row_size = nbytes_of(leaves) // chunk.rows
        self._shared = _Shared(leaves, row_size, chunk.rows, unit.start, chunk if lease is None else None)
        return self._slice(engine.plan.batch_size)

    def _slice(self, size: int) -> Any:
        """The next of the batches that lie in one slot; mostly there is one."""
        feed, shared = self._feed, self._shared
        assert shared is not None and self._engine is not None
        at = shared.at
        rows = min(size, shared.rows - at)
        leaves = shared.leaves if rows == shared.rows else [leaf[at : at + rows] for leaf in shared.leaves]
        shared.at = at + rows
        if shared.copy_of is not None:
            leaves = [leaf if isinstance(leaf, list) else feed._copying(leaf) for leaf in leaves]
            feed._note_copy()
        if shared.at == shared.rows:
            self._shared = None
            if shared.copy_of is not None:
                self._engine.release(shared.copy_of)
        feed._cursor = (self.number, shared.start + shared.at // (feed._each or 1), 0)
        feed._count(rows, rows * shared.row_bytes)
        return feed._spec.build(leaves)

    def _collated(self, unit: Unit, chunk: Chunk) -> Any:
        feed, engine = self._feed, self._engine
        assert engine is not None
        size = sum(dtype.itemsize * math.prod(shape) for _, dtype, shape, _ in chunk.body.leaves)
        lease = engine.lease(chunk)
        if lease is not None:
            batch = packed_batch(chunk.body, feed._trees, *lease, feed._door, copy=False)
        else:
            batch = packed_batch(chunk.body, feed._trees, *engine.peek(chunk), feed._door, copy=True)
            engine.release(chunk)
            feed._note_copy()
        self._note(unit, chunk.rows, size)
        return batch

    def _note(self, unit: Unit, rows: int, size: int) -> None:
        feed = self._feed
        feed._cursor = (self.number, unit.start + len(unit.indices), 0)
        feed._count(rows, size)

    # ---- what cannot be handed out as it lies

    def _put_by(self, unit: Unit, chunk: Chunk) -> None:
        """Copy the samples of a chunk out of its slot, to be cut into batches."""
        feed, engine = self._feed, self._engine
        assert engine is not None
        if chunk.rows and feed._collate is not None:
            samples = packed_batch(chunk.body, feed._trees, *engine.peek(chunk), None, copy=True)
            self._assembler.add([samples], len(samples))
        elif chunk.rows:
            texts = chunk.body or []
            leaves = rows_batch(feed._layout, *engine.peek(chunk), chunk.rows, texts, None)
            each = feed._each or 1
            lost = {f.ordinal for f in chunk.failures} if engine.mode is Mode.ROWS else set()
            good = [i for i in range(chunk.rows) if i // each not in lost]
            self._assembler.add([_chosen(leaf, good, chunk.rows) for leaf in leaves], len(good))
        engine.release(chunk)
        if not self._put_by_units or self._put_by_units[-1] is not unit:
            self._put_by_units.append(unit)
        if chunk.counts is not None:
            for ordinal, count in chunk.counts:
                seen = unit.seen if ordinal == unit.seen_ordinal else unit.skip if ordinal == 0 else 0
                self._segments.append([unit.start + ordinal, seen, count])
                unit.seen_ordinal, unit.seen = ordinal, seen + count
        else:
            each = feed._each or 1
            lost = {f.ordinal for f in chunk.failures}
            self._segments.extend([unit.start + i, 0, each] for i in range(len(unit.indices)) if i not in lost)

    def _assembled(self, rows: int) -> Any:
        feed = self._feed
        leaves = self._assembler.cut(rows)
        first, before, _ = self._segments[0]
        left = rows
        while left:
            position, seen, count = self._segments[0]
            used = min(left, count)
            left -= used
            if used == count:
                self._segments.popleft()
            else:
                self._segments[0] = [position, seen + used, count - used]
            feed._cursor = (self.number, position, seen + used)
        if feed._each is not None and feed._cursor[2] == feed._each:
            feed._cursor = (self.number, feed._cursor[1] + 1, 0)
        self._put_by_units = [u for u in self._put_by_units if u.start + len(u.indices) > feed._cursor[1]]
        if feed._collate is not None:
            batch = self._collate(leaves[0], COLLATE_INDEX + first + (before << 32))
            feed._count(rows, nbytes_of(flatten(batch)[0]))
            convert = feed._door
            if convert is None:
                return batch
            return optree.tree_map(lambda x: convert(x) if isinstance(x, np.ndarray) else x, batch, namespace=NAMESPACE)
        feed._count(rows, nbytes_of(leaves))
        if feed._door is not None:
            leaves = [leaf if isinstance(leaf, list) else feed._door(leaf) for leaf in leaves]
        return feed._spec.build(leaves)

    def _collate(self, samples: list[Any], index: int) -> Any:
        """Do here what a worker does where it has a batch's samples together."""
        feed = self._feed
        assert feed._collate is not None
        context.enter(feed._seed, self.number, index)
        try:
            batch: Any = feed._collate(samples)
        except SpecError:
            raise
        except Exception as error:
            raise LoadError(
                f"collate_fn failed for a batch of {len(samples)} samples: {type(error).__name__}: {error}"
            ) from error
        finally:
            context.leave()
        named = feed._collate is list or isinstance(feed._collate, Pad)
        return batch if feed._cast is None or named else recast(batch, feed._cast)

    def _note_failures(self, unit: Unit, chunk: Chunk) -> None:
        feed = self._feed
        if not chunk.failures:
            if chunk.rows:
                feed._skips_in_a_row = 0
            return
        for failure in sorted(chunk.failures, key=lambda f: f.ordinal):
            error = error_of(failure, unit)
            feed._stats.skipped.append((getattr(error, "item", None), failure.error))
        alive = len(unit.indices) - len(chunk.failures)
        feed._skips_in_a_row = 0 if alive else feed._skips_in_a_row + len(chunk.failures)
        if feed._skips_in_a_row >= SKIPS_IN_A_ROW:
            item, last = feed._stats.skipped[-1]
            raise LoadError(
                f"the last {feed._skips_in_a_row} items all failed, so something is wrong with all of them; the last "
                f"was {shown(item)}: {type(last).__name__}: {last}",
                item=item,
            ) from last


@dataclasses.dataclass(slots=True)
class _Shared:
    """A slot that holds several batches, and how far they have been handed out."""

    leaves: list[Any]
    row_bytes: int
    rows: int
    start: int
    copy_of: Chunk | None
    """The chunk to copy from and release at the end, where it could not be leased."""
    at: int = 0


def _users_level() -> int:
    """How many frames above the caller's the user's own line is: batches are asked for in several ways."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "penstock":
        level, frame = level + 1, frame.f_back
    return level


def _chosen(leaf: Any, good: list[int], rows: int) -> Any:
    if isinstance(leaf, list):
        return [leaf[i] for i in good]
    return leaf.copy() if len(good) == rows else leaf[good]


def _every(items: Iterator[Any], rank: int, world: int) -> Iterator[Any]:
    for number, item in enumerate(items):
        if number % world == rank:
            yield item


def _window(memory: int, item_bytes: int) -> int:
    room = max(2, memory // WINDOW_SHARE // (item_bytes + 64))
    return int(min(WINDOW_MOST, 1 << (room.bit_length() - 1)))


def _shard(shard: Any) -> tuple[int, int]:
    if shard is None:
        return 0, 1
    if shard == "auto":
        world = int(os.environ.get("WORLD_SIZE", "1"))
        return int(os.environ.get("RANK", "0")), world
    rank, world = shard
    if not 0 <= rank < world:
        raise ValueError(f"shard={shard!r}: give (rank, world) with rank from 0 to world - 1")
    return int(rank), int(world)


def _check_choice(name: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r} is not known: give one of {', '.join(map(repr, known))}")


def _check_count(name: str, value: Any, *, least: int, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name}={value!r} must be an int{' or None' if optional else ''}")
    if value < least:
        raise ValueError(f"{name}={value} must be {least} or more")


def _check_dtype(dtype: Any) -> None:
    try:
        known = not to_dtype(dtype).hasobject
    except (TypeError, AttributeError):
        known = False
    if not known:
        raise TypeError(f"cast={dtype!r} is not a dtype that a batch can have: give 'float16' or 'bfloat16', say")


def _check_into(load: Any, cast: Any, collate: Any, each: int | None) -> None:
    if not isinstance(load, Into):
        return
    for name, wrong in (
        ("cast", cast is not None),
        ("collate_fn", collate is not None),
        ("samples_per_item", each != 1),
    ):
        if wrong:
            raise TypeError(f"{name} cannot be used with @penstock.into: that load writes the stored form itself")


def plan(
    sample: Any,
    *,
    memory: Size | None = None,
    batch_size: int | Literal["max"] = 32,
    num_workers: int | None = None,
    executor: Literal["process", "thread"] = "process",
    cast: Cast = None,
    length: int | None = None,
) -> Plan:
    """The plan for samples like this one, without running anything: a lean worker is assumed, not measured."""
    spec = Spec.of(sample, cast=cast)
    request = Request(
        memory=parse_size(DEFAULT_SHARE if memory is None else memory, available=machine.available_bytes()),
        batch_size=batch_size,
        num_workers=num_workers,
        executor=executor,
        cores=machine.look().cores,
        length=length,
    )
    return solve(request, Footprint.assumed(tuple(row_bytes(leaf) for leaf in spec.leaves)))
