"""From options to a crew at work: has a few items loaded, the plan solved, slots and workers made.

Runs in the parent. Nothing is left behind if any of it fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock._core import machine
from penstock._core.batch import Trees
from penstock._core.blocks import Blocks
from penstock._core.budget import format_bytes
from penstock._core.cache import Store
from penstock._core.cache_device import DeviceStore
from penstock._core.cache_disk import OtherWidths
from penstock._core.choice import Threads, choose
from penstock._core.crew import Crew, portable_only, process_crew
from penstock._core.crew.inline import InlineCrew
from penstock._core.crew.threads import ThreadCrew
from penstock._core.delivery import Delivery, arriving, device_dtypes, device_row_bytes
from penstock._core.engine import SKIPS_IN_A_ROW, Engine, Unit, all_failed, error_of
from penstock._core.errors import BudgetError, LoadError, PenstockError
from penstock._core.fill import Failed
from penstock._core.items import Picker, held_bytes
from penstock._core.kept import Began
from penstock._core.layout import LINE, PAGE, Layout, slot_bytes
from penstock._core.limit import trim
from penstock._core.line_reader import READ_BYTES
from penstock._core.options import Options
from penstock._core.order import Mixing
from penstock._core.past_cache import HELD_BYTES
from penstock._core.plan import (
    LEAN_WORKER_BYTES,
    PARENT_BYTES,
    SLACK_BYTES,
    SPAWNED_WORKER_BYTES,
    TEMPLATE_BYTES,
    Executor,
    Footprint,
    Plan,
    Request,
    exact,
    has_room,
    solve,
)
from penstock._core.program import Batched, BatchedInto, Into, Pad, Probe, Program, Setup, as_texts
from penstock._core.schedule import Cut, Schedule
from penstock._core.sharing import obstacle_to_threads, unchanging_kind
from penstock._core.source import Reader, Scatters, Source
from penstock._core.spec import Cast, Spec, row_bytes
from penstock._core.stats import Stats
from penstock._core.store import Keeping
from penstock._core.task import Mode, Task
from penstock._core.wire import dump_items

__all__ = ["Launched", "launch"]

PROBE_ITEMS: Final = 8
# A source that reads many rows at once is asked for as many, as long as they are small: of eight, each seems dear.
PROBE_ROWS: Final = 64
PROBE_ROWS_BYTES: Final = 2**20
# Two measurements of the same worker differ, on a busy machine by a fifth.
MEASURED_SLACK: Final = 1.25
LOAD_SLACK_BYTES: Final = 2 * 2**20  # and a sample: malloc may put the second load behind what the first one left

# What the largest batch leaves of the budget, at least.
LEFT_BYTES: Final = 2**20
LEFT_SHARE: Final = 64
# Of what the plan leaves, processes that only wait take this part at most: workers may need the rest.
SPARE_LEAVES: Final = 3
MOST_SPARES: Final = 2  # a second one bridges the time in which another is on its way

# A batch that is collated may be larger than the first samples suggest; beyond this the slot grows.
PACKED_SLACK: Final = 1.25
MOST_PACKED_SLACK: Final = 1.75  # for a batch that takes all there is
# The items of a shuffle window stay in this process: an eighth of the budget, whatever the number of workers, so that
# the order does not depend on it.
WINDOW_SHARE: Final = 8
WINDOW_MOST: Final = 2**20
# What a template and one worker take at most that load with NumPy, whatever the start method. Of what they leave, three
# quarters are for two groups of blocks, and the rest for further workers.
CREW_BYTES: Final = 64 * 2**20
GROUP_EIGHTHS: Final = 3
LEAST_GROUP_SHARE: Final = 16  # of the budget, however little a crew leaves: less is hardly a shuffle
# How often the names of a group are reckoned: the plan has them once in each of two slots and once for each worker, so
# that this does for a dozen of them.
NAMED: Final = 8
VARYING_BYTES: Final = 4096  # what an item is taken for where samples differ in size: blocks have a thousand of them
# What a template and one worker take that have imported NumPy and little more.
LEAST_CREW_BYTES: Final = 48 * 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class Launched:
    """A feed at work: what stays the same for all of its epochs."""

    options: Options
    engine: Engine
    plan: Plan
    program: Program
    layout: Layout
    cut: Cut
    delivery: Delivery | None = None
    """What copies batches to a device; None where they are handed out as they lie in their slots."""
    trees: Trees = dataclasses.field(default_factory=Trees)
    owner: int = dataclasses.field(default_factory=os.getpid)

    @property
    def keeps(self) -> bool:
        """Whether samples are kept on the device."""
        return isinstance(self.engine.cache, DeviceStore)

    def close(self) -> None:
        """End everything; batches that are alive stay right."""
        if self.delivery is not None and os.getpid() == self.owner:  # a process forked off has no use of the device
            self.delivery.close()
        self.engine.close()


def launch(options: Options, schedule: Schedule, stats: Stats, *, epoch: int, base: int, inside: int) -> Launched:
    """Make everything ready for an epoch that goes on from a place; raises what the first items show to be wrong."""
    began = Began.now()
    obstacle = _obstacle(options)
    program = _program(options, inside, tries_threads=obstacle is None)
    crew: Crew | None = None
    delivery: Delivery | None = None
    engine: Engine | None = None
    planner = _Planner(options, schedule, program, obstacle)
    planner.item_bytes = _item_bytes(options, schedule, epoch, base)
    try:
        bare = options.source if program.load is None and options.collate is None else None
        if bare is not None and not getattr(bare, "measured", False):
            may_help = options.num_workers is None and getattr(bare, "in_memory", False)
            crew, probe = InlineCrew(program, may_help=may_help), _probe_source(options, schedule, epoch, base)
        else:
            if isinstance(program.load, Into):
                # A declared spec needs no sample: what cannot fit is refused before anything is started.
                planner.solve(Probe(program.load.spec, 0, 1e-3, 1e-3, 0, 0), None)
            crew = _make_crew(options, program, 0 if planner.alone else options.num_workers)
            try:
                probe = _probe(options, schedule, crew, epoch, base)
            except LoadError as error:
                if not (program.decides and crew.pids() and isinstance(error.__cause__, MemoryError)):
                    raise
                stats.peak_bytes = max(stats.peak_bytes, _peak_bytes(crew))
                crew.close()
                planner.alone = "a load finds no room in a worker process"
                crew = InlineCrew(program)
                probe = _probe(options, schedule, crew, epoch, base)
            if not crew.pids():
                trim()  # what malloc has kept of the probe's samples, threads will not use
            if bare is not None:  # it knows all of its rows, not only those that were looked at
                probe = dataclasses.replace(probe, spec=bare.spec().cast(options.cast))
        if schedule.lines is not None:  # the probe reads a few lines, a task a block of them or the longest there is
            load_bytes = max(probe.load_bytes + READ_BYTES, schedule.lines.reading_bytes)
            probe = _within_text(dataclasses.replace(probe, load_bytes=load_bytes), options, schedule)
            planner.probe = probe
        held = int(getattr(options.source, "held_bytes", 0))
        probe = dataclasses.replace(probe, load_bytes=probe.load_bytes + held)
        planner.keeping = keeping = Keeping.of(options, schedule, program, probe)
        identity = keeping.identity(options, program)
        if options.blocks is not None:
            planner.mix(probe, crew, options.blocks)
        agreed = False
        while not agreed:
            probe = dataclasses.replace(probe, spec=keeping.spec(options, schedule, identity, probe.spec))
            plan, slot_size = planner.solve(probe, crew)
            if isinstance(crew, InlineCrew) != (plan.workers == 0):
                stats.peak_bytes = max(stats.peak_bytes, _peak_bytes(crew))
                crew.close()
                crew = _make_crew(options, program, plan.workers, plan.executor)
            elif plan.workers and plan.executor == "thread" and not isinstance(crew, ThreadCrew):
                stats.peak_bytes = max(stats.peak_bytes, _peak_bytes(crew))
                crew.close()
                if options.source is not None and program.reader is None:  # rows need not be sent any more
                    planner.program = program = dataclasses.replace(program, reader=_reader(options, options.source))
                crew = ThreadCrew(program)
            spares = 0
            if getattr(crew, "starts_slowly", False):
                plan, spares = _with_spares(plan, planner.process_bytes(probe))
            # What the plan leaves is given to those who may turn out to need more: workers whose loads differ, and half
            # of it to slots whose batches do.
            spare = plan.free_bytes // 2 if program.collate is not None else 0
            rows = plan.batch_size * plan.batches_per_slot
            layout = Layout.of(probe.spec, rows)
            with contextlib.suppress(OtherWidths):  # another rank made the folder meanwhile, and saw another text first
                cache = keeping.maker(options, schedule, identity, probe=probe, plan=plan, layout=layout)
                agreed = True
        engine = Engine(
            crew,
            plan,
            mode=program.mode,
            slot_bytes=slot_size,
            spare_bytes=spare,
            samples_per_item=options.each,
            probe=probe,
            items_bytes=planner.held_bytes(plan),
            began=began,
            held=lambda: schedule.held_bytes,
            mixing=schedule.mixing,
            cache=cache,
            scatters=planner.scatters,
            absent=planner.absent,
            own_bytes=_own_bytes(options, probe, plan, schedule.mixing),
            many=isinstance(program.load, Batched | BatchedInto),
        )
        engine.stats = stats
        others = spare + engine.own_bytes
        idle = planner.process_bytes(probe) if plan.executor == "process" else probe.process_bytes
        growth = plan.worker_bytes - idle + (plan.free_bytes - others) // max(1, plan.workers)
        # A worker that collates holds the samples of a batch and the result.
        load_bytes = probe.load_bytes - held + (2 * plan.batch_bytes if program.mode is Mode.WHOLE else 0)
        kept = None if engine.cache is None else engine.cache.form
        # Blocks that do not stay in the page cache are read past it where a worker has room for that twice over.
        past = schedule.mixing is not None and planner.scatters and growth - load_bytes >= 2 * HELD_BYTES
        held += HELD_BYTES if past else 0
        crew.start(
            Setup(
                probe.spec, rows, plan.workers, max(0, growth), load_bytes, kept, held, engine.text_bytes, spares, past
            )
        )
        delivery = _delivery(options, program, plan, probe, engine.cache)
        if delivery is not None:
            plan = dataclasses.replace(plan, notes=(*plan.notes, *delivery.pin(engine.addresses())))
    except BaseException:
        if delivery is not None:
            delivery.close()
        if engine is not None:
            engine.close()
        elif crew is not None:
            crew.close()
        raise
    return Launched(options, engine, plan, program, layout, planner.cut(plan), delivery)


def _own_bytes(options: Options, probe: Probe, plan: Plan, mixing: Mixing | None) -> int:
    """What a batch takes that is handed out as a copy; 0 where none is."""
    texts = any(leaf.kind != "array" for leaf in probe.spec.leaves)
    if options.device is not None or (texts and mixing is not None):
        return 0
    return Layout.of(probe.spec, plan.batch_size).nbytes


def _within_text(probe: Probe, options: Options, schedule: Schedule) -> Probe:
    """The same for lines that are samples as they are: no batch takes more than all text there is.

    The first ones may be longer than most, and a batch may be larger than the files.
    """
    if options.batch_size == "max" or options.collate is not as_texts or schedule.lines is None:
        return probe
    if (text_bytes := schedule.lines.text_bytes) is None:
        return probe
    most = -(-text_bytes // options.batch_size) + LINE
    return dataclasses.replace(probe, packed_bytes=min(probe.packed_bytes, most))


def _with_spares(plan: Plan, process_bytes: int) -> tuple[Plan, int]:
    """The plan with more processes, that wait to take the place of a worker, if what is left is enough; how many."""
    each = int(process_bytes * MEASURED_SLACK)
    count = min(MOST_SPARES, plan.free_bytes // (SPARE_LEAVES * each))
    if not count:
        return plan, 0
    many = "one more process" if count == 1 else f"{count} more processes"
    note = f"{many} of {format_bytes(each)} kept ready: a fresh interpreter takes a while to start"
    return dataclasses.replace(
        plan,
        template_bytes=plan.template_bytes + count * each,
        total_bytes=plan.total_bytes + count * each,
        notes=(*plan.notes, note),
    ), count


def _delivery(options: Options, program: Program, plan: Plan, probe: Probe, cache: Store | None) -> Delivery | None:
    """The buffers on the device, allocated."""
    if options.device is None:
        return None
    delivery = Delivery(
        options.device,
        buffers=plan.device_buffers,
        budget=plan.device_memory,
        on_device=options.on_device,
        listed=program.collate is list,
    )
    if program.collate is None:
        delivery.reserve(probe.spec, plan.batch_size)
    if isinstance(cache, DeviceStore):
        try:
            delivery.keep(cache, probe.spec, plan.batch_size)
        except BaseException:
            delivery.close()
            raise
    return delivery


def _program(options: Options, inside: int, *, tries_threads: bool) -> Program:
    source, each = options.source, options.each
    travels = source is not None and source.in_memory and options.load is not None and options.in_processes
    # Rows can be given out beforehand if batches are made of whole items, and the first one is not half used up.
    divides = each is not None and options.batch_size != "max" and options.batch_size % each == 0 and not inside
    # What an item gave before it failed is handed out: where such items are left out, it may be any number of samples.
    divides = divides and not options.skips
    mode = Mode.FLOW
    if each == 1 or divides:
        mode = Mode.ROWS if options.collate is None else Mode.FLOW if options.skips else Mode.WHOLE
    load = options.load
    if isinstance(load, Batched | BatchedInto) and source is not None:
        load = load.over_source()
    return Program(
        load,
        None if source is None or travels else _reader(options, source),
        mode,
        options.collate,
        each,
        options.cast,
        options.on_error,
        options.seed,
        options.memory,
        options.timeout_s,
        options.lines.reader.fetch if options.lines is not None else None,
        _decides(options),
        tries_threads,
    )


def _reader(options: Options, source: Source) -> Reader:
    reader = source.reader()
    bare: Callable[[], Reader] | None = getattr(reader, "bare", None)
    taken_as_they_are = options.load is None and (options.collate is None or isinstance(options.collate, Pad))
    return bare() if bare is not None and taken_as_they_are else reader


def _decides(options: Options) -> bool:
    """Whether it is left to the plan how many workers there are."""
    return options.num_workers is None and options.in_processes and options.load is not None


def _too_small(options: Options) -> bool:
    """Whether even to try worker processes would take more than there is, where it is left to the plan."""
    free = options.num_workers is None and options.start_method is None and options.timeout_s is None
    return free and options.in_processes and options.blocks is None and options.memory < LEAST_CREW_BYTES


def _peak_bytes(crew: Crew) -> int:
    """What the processes of a crew took that was made only to try loads."""
    own, risen = machine.crew_bytes(crew.pids(), forked=getattr(crew, "forked", False))
    return own + sum(risen)


def _obstacle(options: Options) -> str | None:
    """Why workers have to be what was asked for, as far as that can be known beforehand; None if nothing says so."""
    if not _decides(options):
        return "the number of workers was given"
    if options.start_method is not None:
        return f"start_method={options.start_method!r} asks for them"
    if options.timeout_s is not None:
        return "only a process can be stopped by timeout"
    gathers = _gathers_in_threads(options)
    if options.source is not None and not gathers:
        return "load works on what a source reads"
    if options.blocks is not None:
        return "whole blocks are read"
    if not (options.collate is None or options.collate is list or isinstance(options.collate, Pad)):
        return "collate_fn is a function"
    if (obstacle := obstacle_to_threads(options.load)) is not None:
        return obstacle
    if gathers:
        return None
    kinds = options.items.kinds() if isinstance(options.items, Picker) else None
    if kinds is None or not all(map(unchanging_kind, kinds)):
        return "items are not all plain numbers, texts or paths, and threads would share them"
    return None


def _gathers_in_threads(options: Options) -> bool:
    """Whether threads may gather rows that lie in memory, and make samples of many at once: nothing is sent then."""
    batched = isinstance(options.load, Batched | BatchedInto)
    return batched and options.source is not None and options.source.in_memory


def _make_crew(options: Options, program: Program, workers: int | None, executor: Executor | None = None) -> Crew:
    if workers == 0:
        return InlineCrew(program)
    gathers_here = options.source is not None and options.source.in_memory and options.load is None
    if (executor or options.executor) == "thread" or gathers_here:
        return ThreadCrew(program)
    return process_crew(program, options.start_method)


def _probe(options: Options, schedule: Schedule, crew: Crew, epoch: int, base: int) -> Probe:
    """Have items loaded until one gives a sample: the form of it, and what it cost."""
    most = PROBE_ITEMS
    if options.load is None and options.collate is None and options.source is not None:
        few = getattr(options.source.reader(), "single", False)
        most = (
            most if few else max(most, min(PROBE_ROWS, PROBE_ROWS_BYTES // max(1, options.source.spec().sample_bytes)))
        )
    batch = most if options.batch_size == "max" else min(most, options.batch_size)
    # Streams are not read ahead for this: what they gave cannot be put back into whatever makes them.
    start, size = 0, 1 if options.streams else batch
    last: tuple[Any, BaseException] | None = None
    elsewhere = False
    while True:
        if not elsewhere:
            indices, items = schedule.first(epoch, base, start=start, size=size)
            # What is left of an epoch, or a rank's share, may be items that fail: any other shows the form as well.
            if len(indices) == 0 and start < SKIPS_IN_A_ROW and (base or options.world > 1):
                elsewhere, start, size = True, 0, batch
        if elsewhere:
            indices, items = schedule.anywhere(start=start, size=size)
        if last is not None and (start >= SKIPS_IN_A_ROW or len(indices) == 0):
            raise all_failed(start, *last) from last[1]
        if len(indices) == 0:
            raise PenstockError(
                f"none of the {start} items gives a sample, so there is nothing to plan for: check what load yields"
                if start
                else "there are no items, so there is nothing to plan for: give at least one"
            )
        try:
            probe = crew.probe(Task(0, 0, 0, 0, 0, epoch, indices, items))
        except Failed as failed:
            unit = Unit(0, 0, indices, items, name=schedule.name)
            error = error_of(failed.failure, unit)
            if not failed.failure.left_out:
                if error is failed.failure.error:
                    raise error from None
                raise error from failed.failure.error
            last, probe = (getattr(error, "item", None), failed.failure.error), None
        if probe is not None:
            return probe
        start, size = start + len(indices), 2 * size


def _probe_source(options: Options, schedule: Schedule, epoch: int, base: int) -> Probe:
    """A source knows the form of its samples; only reading from files has to be timed."""
    source = options.source
    assert source is not None
    spec = source.spec().cast(options.cast)
    seconds = 0.0
    if not source.in_memory and len(source):
        indices, _ = schedule.first(epoch, base, start=0, size=PROBE_ITEMS)
        out = [np.empty((len(indices), *leaf.shape), leaf.stored) for leaf in spec.leaves]
        began = time.perf_counter()
        try:
            source.reader().read_into(indices, out, spec.leaves)
        except Exception:  # noqa: BLE001 - told when it is read in earnest, with the row that it belongs to
            pass
        seconds = (time.perf_counter() - began) / max(1, len(indices))  # of a rank without any there are none
    return Probe(spec, 0, seconds, seconds, 2 * spec.sample_bytes, 0)


def _item_bytes(options: Options, schedule: Schedule, epoch: int, base: int) -> int:
    if schedule.lines is not None:
        return schedule.lines.item_bytes
    _, items = schedule.first(epoch, base, start=0, size=1)
    if not items:
        return 8
    if not options.in_processes:  # nothing of it travels, so it need not even be possible to pickle it
        return max(64, held_bytes(items[0]))
    return max(len(dump_items(items[:1])), held_bytes(items[0]) if options.streams else 0)


class _Planner:
    """Puts what was asked and what was measured into the plan's terms."""

    def __init__(self, options: Options, schedule: Schedule, program: Program, obstacle: str | None) -> None:
        self._obstacle = obstacle
        self._options = options
        self._schedule = schedule
        self.program = program
        self.item_bytes = 0
        """What one item adds to a message."""
        self.probe: Probe | None = None
        """What the first lines showed, of text."""
        if schedule.lines is not None:
            schedule.lines.least_for = self.least_for
        self.alone = ""
        """Why there can be no worker processes, where it is left to the plan."""
        if _too_small(options):
            self.alone = f"a budget below {format_bytes(LEAST_CREW_BYTES)} has no room for worker processes"
        self.keeping = Keeping(None)
        """How samples are kept, once it is known what they are."""

    @functools.cached_property
    def _window(self) -> tuple[int, int]:
        options, schedule = self._options, self._schedule
        return (
            schedule.window or _window(options.memory, self.item_bytes),
            schedule.window_bytes or options.memory // WINDOW_SHARE,
        )

    def _device_rows(self, probe: Probe, rows: tuple[int, ...]) -> tuple[int, ...] | None:
        device = self._options.device
        if device is None or self.program.collate is not None:
            return None if device is None else rows
        return device_row_bytes(device, probe.spec, self._options.on_device)

    def held_bytes(self, plan: Plan) -> int:
        """What the plan has for the items of all slots."""
        return plan.slots * plan.batches_per_slot * plan.batch_size // (self._options.each or 1) * self.item_bytes

    def cut(self, plan: Plan) -> Cut:
        """How epochs are cut under this plan."""
        each = self._options.each or 1
        mode = self.program.mode
        batch = plan.batch_size // each
        unit = batch * plan.batches_per_slot
        if mode is Mode.FLOW:
            unit = max(1, batch) if self._options.each is not None else 1
        travels = self._options.source is not None and self.program.reader is None
        exact = mode is not Mode.FLOW and not self.program.skips
        most = self.held_bytes(plan) + plan.free_bytes * 3 // 4
        return Cut(unit, batch, exact, self._window, plan.memory, most, travels)

    def mix(self, probe: Probe, crew: Crew | None, blocks: Blocks) -> None:
        """For a shuffle of blocks: how much is mixed follows from the budget, if nobody has said it."""
        options, schedule = self._options, self._schedule
        starts, rows = None, blocks.rows_of(self._reckoned(probe))
        if blocks.size is None and blocks.rows is None and (natural := getattr(options.source, "blocks", None)):
            starts = np.cumsum([0, *natural()], dtype=np.int64)[:-1]
            rows = int(np.diff(np.append(starts, schedule.length or 0)).max(initial=1))
        group = schedule.window or blocks.group
        if group is None and schedule.mixing is not None:
            group = schedule.mixing.group  # this feed began with it, and begins anew after an interruption
        if group is None:
            group = self._group(options.memory, probe, self._crew_bytes(probe, crew, rows))
        schedule.mixing = Mixing(group, rows, starts)

    def _reckoned(self, probe: Probe) -> int:
        """Bytes of an item by which blocks are cut and groups are sized.

        The order follows from it, so it must be the same in every feed over these items: on other ranks, and where an
        epoch goes on in the middle. Where samples differ in size, those that are looked at first say nothing.
        """
        options, lines, program = self._options, self._schedule.lines, self.program
        if lines is not None and options.load is None:
            return max(1, lines.total_bytes // max(1, self._schedule.length or 1))
        texts = any(leaf.kind != "array" for leaf in probe.spec.leaves)
        if not (texts or program.collate is list or isinstance(program.collate, Pad)):
            return max(1, probe.sample_bytes * (options.each or 1))
        if options.blocks is not None and options.blocks.size is not None:
            raise ValueError(
                f"samples differ in size here, so that blocks of {options.blocks.size!r} would be others in every feed "
                "over these items: say Blocks(rows=...), in items"
            )
        return VARYING_BYTES

    def _group(self, memory: int, probe: Probe, crew_bytes: int) -> int:
        """Items that are mixed at a time in a budget, where a template and one worker take so much.

        The order follows from it. So it must not be looked at how many workers there are to be, nor what they are:
        those that do not fit beside it are refused, or the plan has fewer. Only a template and one worker are reckoned
        with, the fewest that read blocks ahead: as assumed, or where they are larger in whole powers of two, for
        what is measured twice is never quite the same.
        """
        each, batch_size = self._options.each or 1, self._options.batch_size
        assert batch_size != "max"
        fewest = max(CREW_BYTES, 1 << max(0, crew_bytes - 1).bit_length())
        groups = 2
        eighths = GROUP_EIGHTHS
        if self.program.skips:  # one of which something is left out is put together anew, in memory of its own
            groups, eighths = 3, GROUP_EIGHTHS - 1
        room = min((memory - CREW_BYTES) * eighths // 8, (memory - PARENT_BYTES - fewest) // groups)
        room = max(room, memory // LEAST_GROUP_SHARE)
        batch = max(1, batch_size // each)
        item_bytes = self._reckoned(probe) + NAMED * self._name_bytes
        return max(batch, room // item_bytes // batch * batch)

    @functools.cached_property
    def _name_bytes(self) -> int:
        """What the first item costs besides its samples, the same for every executor."""
        schedule, source = self._schedule, self._options.source
        if schedule.lines is not None:
            return schedule.lines.item_bytes
        if source is not None and source.in_memory and self._options.load is not None:
            return source.spec().sample_bytes  # sent to processes
        items = schedule.pick(np.zeros(1, np.int64), travels=False) if schedule.length else None
        return max(64, held_bytes(items[0])) if items else 8

    def _crew_bytes(self, probe: Probe, crew: Crew | None, rows: int) -> int:
        """What a template and one worker take: as measured, or assumed if there are none."""
        idle = probe.process_bytes + getattr(crew, "template_bytes", 0)
        if not probe.process_bytes:
            idle = LEAN_WORKER_BYTES + TEMPLATE_BYTES
        return idle + probe.load_bytes + self._block_bytes(probe, rows) + SLACK_BYTES

    def process_bytes(self, probe: Probe) -> int:
        """What an idle worker process takes: as measured, or assumed if none was."""
        spawned = self._options.start_method == "spawn" or portable_only()
        return probe.process_bytes or (SPAWNED_WORKER_BYTES if spawned else LEAN_WORKER_BYTES)

    def solve(self, probe: Probe, crew: Crew | None) -> tuple[Plan, int]:
        """The plan, and the bytes of a slot; BudgetError if there is none."""
        options, program = self._options, self.program
        mixing = self._schedule.mixing if program.mode is Mode.ROWS else None
        rows = tuple(row_bytes(leaf) for leaf in probe.spec.leaves)
        if program.collate is not None:
            slack = PACKED_SLACK if options.batch_size != "max" else MOST_PACKED_SLACK
            rows = (int(probe.packed_bytes * slack),)
        source = options.source
        # Files of a source are timed in this process, but read by workers if there are to be any.
        later = program.load is None and source is not None and not source.in_memory and options.in_processes
        later = later and isinstance(crew, InlineCrew)
        processes = crew is None or later or not isinstance(crew, InlineCrew | ThreadCrew)
        # All that it may take, not what it takes at first: items may become larger.
        window_bytes = self._window[1] if options.streams and options.shuffle else 0
        lines = self._schedule.lines
        kept_bytes = window_bytes if lines is None else lines.parent_bytes
        footprint = Footprint(
            leaf_row_bytes=rows,
            load_bytes=probe.load_bytes + (0 if mixing is None else self._block_bytes(probe, mixing.rows)),
            process_bytes=self.process_bytes(probe) if processes else probe.process_bytes,
            template_bytes=TEMPLATE_BYTES if later else getattr(crew, "template_bytes", 0) if crew is not None else 0,
            load_s=probe.load_s,
            cpu_s=probe.cpu_s,
            item_bytes=self.item_bytes,
            batched=isinstance(program.load, Batched | BatchedInto),
        )
        request = Request(
            memory=max(1, options.memory - kept_bytes),
            batch_size=options.batch_size,
            num_workers=0 if self.alone else options.num_workers,
            isolated=self._isolated(mixing),
            group=None if mixing is None else self._batches_of(mixing.group),
            regroup=0 if mixing is None or self._schedule.window else self._batch_items,
            executor=options.executor if processes else "thread",
            cores=machine.look().cores,
            whole=program.mode is Mode.WHOLE,
            staged=program.mode is Mode.FLOW,
            pieced=program.mode is Mode.FLOW or program.skips,
            # A stream may be slow or live: its batches are handed out one by one.
            # So are those that are copied to a device: it should not have to cut them apart.
            groups=program.mode is Mode.ROWS and not options.streams and mixing is None and options.device is None,
            device_memory=options.device_budget,
            device_leaf_row_bytes=self._device_rows(probe, rows),
            length=self._schedule.samples,
            most_slots=options.most_slots,
            cache=self.keeping.takes_rest,
            worth=self.keeping.worth,
            index_bytes=self.keeping.index_bytes,
            device_keeps=(options.each or 1) if self.keeping.kind == "device" else 0,
        )
        if options.asked is not None and crew is not None:
            from penstock._model import with_model

            ranks = options.world > 1
            size = options.device_memory
            spec = arriving(probe.spec, options.on_device)
            request = with_model(request, footprint, spec, options.asked, size=size, ranks=ranks)

        def solved(request: Request) -> Plan:
            if program.decides and processes:
                return choose(request, footprint, Threads(self._obstacle, probe.side_by_side))
            return solve(request, footprint)

        try:
            plan = solved(request)
            if options.batch_size == "max" and plan.batch_size > 1:
                # The largest batch leaves nothing of the budget, and what is measured twice is never quite the same.
                left = request.memory - LEFT_BYTES - request.memory // LEFT_SHARE
                with contextlib.suppress(BudgetError, ValueError):
                    plan = solved(dataclasses.replace(request, memory=left))
        except BudgetError as error:
            kept = _Kept("shuffle window", 0, options.memory, grows=True) if kept_bytes else None
            if lines is not None:
                kept = _Kept(lines.kept, kept_bytes, options.memory, lines.grows)
            # Of a source that knows its samples nothing was measured, and nothing will turn out larger.
            wider = footprint if later and not getattr(source, "measured", False) else _wider(footprint)
            group = self._groups(probe, crew, kept_bytes)
            raise _does_not_fit(error, request, wider, kept=kept, group=group) from None
        notes = plan.notes
        if self.alone:
            notes = tuple(note.replace("as asked", self.alone) for note in notes)
        if plan.workers and options.in_processes and source is not None and source.in_memory and program.load is None:
            notes = (*notes, "threads, not processes: rows that lie in this process need not be sent")
        if (mixing := self._schedule.mixing) is not None:
            notes = (*notes, f"shuffled in blocks of {mixing.rows:,} items, {mixing.group:,} items mixed at a time")
        if program.collate is None:
            notes = (*notes, *_savings(probe.spec, options.on_device))
        if window_bytes:
            notes = (*notes, f"shuffle window of {self._window[0]:,} items, of {format_bytes(window_bytes)} at most")
        if lines is not None:
            notes = (*notes, lines.note())
        if self.keeping.note:
            notes = (*notes, self.keeping.note)
        plan = dataclasses.replace(
            plan,
            memory=options.memory,
            parent_bytes=plan.parent_bytes + kept_bytes,
            total_bytes=plan.total_bytes + kept_bytes,
            notes=notes,
        )
        return plan, slot_bytes(rows, plan.batch_size * plan.batches_per_slot)

    def least_for(self, line_bytes: int, reading_bytes: int) -> int:
        """The least budget that this can be planned in if a line is so long; 0 if that is not more than there is."""
        options = self._options
        probe = self.probe or Probe(Spec.of(""), 0, 1e-3, 1e-3, 0, 0)
        if options.collate is as_texts:
            # If it is not one of the first, by which all others are planned, a batch holds one such.
            rows = 1 if self.probe is None or options.batch_size == "max" else options.batch_size
            packed_bytes = min(line_bytes, probe.packed_bytes + -(-line_bytes // rows))
            probe = dataclasses.replace(probe, packed_bytes=packed_bytes)
        load_bytes = max(probe.load_bytes, reading_bytes)
        try:
            self.solve(_within_text(dataclasses.replace(probe, load_bytes=load_bytes), options, self._schedule), None)
        except BudgetError as error:
            # Nothing was started that could be measured.
            return error.least + (2 * TEMPLATE_BYTES if options.in_processes and options.num_workers != 0 else 0)
        return 0

    def _isolated(self, mixing: Mixing | None) -> str:
        if self._options.timeout_s is not None:
            return "a load that takes too long must be somewhere where it can be stopped"
        source = self._options.source
        if mixing is not None and self._options.in_processes and (source is None or not source.in_memory):
            return "somebody has to read the next blocks while batches are drawn from these"
        return ""

    @property
    def _batch_items(self) -> int:
        """Items of a batch, of all ranks together."""
        assert self._options.batch_size != "max"
        return max(1, self._options.batch_size // (self._options.each or 1)) * self._options.world

    def _groups(self, probe: Probe, crew: Crew | None, kept_bytes: int) -> Callable[[int], int] | None:
        """Which group goes with which budget, in batches and the largest that it may come to; None if it is said."""
        blocks, mixing = self._options.blocks, self._schedule.mixing
        if self.program.mode is not Mode.ROWS or blocks is None or blocks.group or self._schedule.window:
            return None
        rows = mixing.rows if mixing is not None else blocks.rows_of(self._reckoned(probe))
        crew_bytes = int(self._crew_bytes(probe, crew, rows) / MEASURED_SLACK)
        return lambda memory: self._batches_of(self._group(memory + kept_bytes, probe, crew_bytes))

    def _batches_of(self, group: int) -> int:
        """Batches a slot holds, so that it holds a group."""
        assert self._options.batch_size != "max"
        items = -(-group // self._options.world)
        length = self._schedule.length or 0
        items = min(items, -(-length // self._options.world))
        return max(1, -(-items * (self._options.each or 1) // self._options.batch_size))

    @property
    def scatters(self) -> bool:
        """Whether rows of a block are read straight to where they belong."""
        source = self._options.source
        return source is not None and self._options.load is None and isinstance(source.reader(), Scatters)

    @property
    def absent(self) -> Callable[[npt.NDArray[np.int64]], bool] | None:
        """Says whether rows have to be read from a disk, which had better know of them long before; None: from none."""
        source = self._options.source
        if source is None or source.in_memory or not isinstance(reader := source.reader(), Scatters):
            return None
        return reader.absent

    def _block_bytes(self, probe: Probe, rows: int) -> int:
        """What a worker holds of a block while it puts its rows where they belong."""
        return 0 if self._options.source is None or self.scatters else rows * probe.sample_bytes


def _savings(spec: Spec, on_device: Cast) -> Iterator[str]:
    """What casting saves, in words."""
    given = sum(row_bytes(dataclasses.replace(leaf, stored=leaf.dtype)) for leaf in spec.leaves)
    stored = spec.sample_bytes
    if stored != given:
        change = "less" if stored < given else "more"
        yield (
            f"cast: {format_bytes(stored)} a sample in slots, not {format_bytes(given)}: "
            f"{max(given, stored) / min(given, stored):.1f} times {change} to hold and to move"
        )
    casts = device_dtypes(spec, on_device)
    if any(cast is not None for cast in casts):
        there = sum(
            row_bytes(leaf if cast is None else dataclasses.replace(leaf, stored=cast))
            for leaf, cast in zip(spec.leaves, casts, strict=True)
        )
        yield (
            f"cast on the device: {format_bytes(stored)} a sample travel, not {format_bytes(there)}: "
            f"{there / stored:.1f} times less traffic"
        )


class _Kept(NamedTuple):
    """What this process holds besides what the plan knows of."""

    name: str
    fixed_bytes: int
    """What it takes apart from its share of the budget."""
    memory: int
    """The budget that it is a part of."""
    grows: bool
    """Whether it takes a share of a larger one."""


def _wider(footprint: Footprint) -> Footprint:
    """What may be measured the next time."""
    return dataclasses.replace(
        footprint,
        load_bytes=int(footprint.load_bytes * MEASURED_SLACK) + sum(footprint.leaf_row_bytes) + LOAD_SLACK_BYTES,
        process_bytes=int(footprint.process_bytes * MEASURED_SLACK),
        template_bytes=int(footprint.template_bytes * MEASURED_SLACK),
    )


def _does_not_fit(
    error: BudgetError,
    request: Request,
    wider: Footprint,
    *,
    kept: _Kept | None,
    group: Callable[[int], int] | None = None,
) -> BudgetError:
    """The error whose ``least`` works when it is given, for a footprint as large as it may come out then.

    ``group`` says how many batches are mixed in a budget, where that follows from it.
    """
    try:
        solve(request, wider)
    except BudgetError as larger:
        # Larger in general: of loads in threads, malloc keeps less where they are so large that it maps them apart.
        error = max(error, larger, key=lambda refused: refused.least)
    if group is not None and (mixed := _least_mixed(request, wider, group)) is not None:
        error = _with_least(error, mixed, " A larger budget mixes more at a time.")
    if kept is None:
        return error
    least = error.least + kept.fixed_bytes
    if kept.grows:  # what is left for the rest grows with the budget
        least = least * WINDOW_SHARE // (WINDOW_SHARE - 1)
    least = -(-least // PAGE) * PAGE + PAGE
    error = _with_least(error, least, f" The {kept.name} is a part of it.")
    return BudgetError(str(error).replace(exact(request.memory), exact(kept.memory)), least=least)


def _with_least(error: BudgetError, least: int, more: str) -> BudgetError:
    """The same error with another least."""
    text = str(error).replace(exact(error.least), exact(least)).replace(f"memory={error.least}", f"memory={least}")
    return BudgetError(text + more, least=least)


def _least_mixed(request: Request, footprint: Footprint, group: Callable[[int], int]) -> int | None:
    """The least budget that works where a larger one mixes more; None if it is not the budget that is too small.

    Found by halving, for groups take only a part of what a budget has more.
    """

    def works(pages: int) -> bool:
        memory = pages * PAGE
        return has_room(dataclasses.replace(request, memory=memory, group=group(memory)), footprint)

    low = -(-request.memory // PAGE)
    most = next((low << more for more in range(32) if works(low << more)), None)
    if most is None or has_room(request, footprint):
        return None
    return PAGE * (low + bisect_left(range(low, most), True, key=works))


def _window(memory: int, item_bytes: int) -> int:
    room = max(2, memory // WINDOW_SHARE // (item_bytes + 64))
    return int(min(WINDOW_MOST, 1 << (room.bit_length() - 1)))
