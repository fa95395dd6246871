"""What fits: from a budget, a footprint and a number of cores to batch size, slots and workers. Pure.

``solve`` looks at nothing but its two arguments: the same request and footprint give the same plan on every machine,
and a plan can be had without running anything. This file owns every number of a ``Plan`` and the reasons in its notes.
Measuring footprints, and keeping the running processes to the plan, is done elsewhere.

The order of preference, for a given batch size, is a ladder of (workers, slots): more workers before more slots, except
that more than two workers need three slots. ``solve`` takes the first rung that fits, so a larger budget can never
give a lower rung.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil
from textwrap import wrap
from typing import Any, Final, Literal

from penstock._core.budget import format_bytes
from penstock._core.errors import BudgetError
from penstock._core.fit import Need
from penstock._core.layout import LINE, aligned, slot_bytes

__all__ = [
    "LEAN_WORKER_BYTES",
    "PARENT_BYTES",
    "QUICK_GROUP_S",
    "QUICK_LOAD_S",
    "SLACK_BYTES",
    "SPAWNED_WORKER_BYTES",
    "TEMPLATE_BYTES",
    "THREAD_BYTES",
    "Executor",
    "Footprint",
    "Plan",
    "Request",
    "device_batch_bytes",
    "exact",
    "group_s",
    "has_room",
    "solve",
    "thread_slack",
]

Executor = Literal["process", "thread"]

# What the parent adds besides slots: batch objects, messages, the books of the ledger. An allowance, not yet a measured
# figure: generous, because the allocator gives back in steps.
PARENT_BYTES: Final = 4 * 2**20
# Private memory of a worker and of the template, assumed when nothing was measured: an interpreter with numpy, the
# worker's pages being mostly shared with the template it was forked from.
LEAN_WORKER_BYTES: Final = 12 * 2**20
SPAWNED_WORKER_BYTES: Final = 26 * 2**20  # a worker that is an interpreter of its own, and shares nothing
TEMPLATE_BYTES: Final = 24 * 2**20
# The touched part of a thread's stack, and its share of malloc's arenas.
THREAD_BYTES: Final = 256 * 2**10
# Of what the plan leaves, the cache does not take this part, for loads may turn out larger; and where samples vary in
# size, as they are sure to, not this one.
CACHE_LEAVES: Final = 8
CACHE_LEAVES_VARYING: Final = 2
CACHE_LEAVES_BYTES: Final = 3 * 2**19  # and for each process not less than it may differ from the others of its kind
INDEX_BYTES: Final = 8  # of a sample of a batch, to say where it is kept on the device
PAGE_TABLE_SHARE: Final = 512  # every process that uses a page has eight bytes in its page tables for its 4096

# A load that is faster than this is worth a worker only if a slot holds many: what goes to and fro for a slot costs as
# much as this much work, of which writing samples is a part.
CHEAP_S: Final = 15e-6
CHEAP_SLOT_S: Final = 160e-6
WRITE_S: Final = 1e-6
# Items that carry data cost both sides time: so much each, and so many bytes a second. Half of it is the consumer's.
LARGE_ITEM_BYTES: Final = 2**10
SEND_S: Final = 2e-6
SEND_BYTES_A_S: Final = 0.75e9
WORTH_SENDING: Final = 1.25  # so much faster it must be, for all that it takes
# Loads that wait (disk, network) gain from more workers than cores; beyond this the storage is the limit.
WAITING_WORKERS: Final = 16

FEWEST_SLOTS: Final = 2  # one that the consumer reads, one that is filled meanwhile
# The interpreter takes memory in pieces of a mebibyte, and malloc keeps some of what was freed.
SLACK_BYTES: Final = 4 * 2**20
MOST_SLACK_BYTES: Final = 8 * 2**20  # for loads that differ, on top
PIECED_BATCHES: Final = 3  # what the consumer has, what it gets, and what was begun of the next
KEPT_BY_MALLOC_BYTES: Final = (
    32 * 2**20
)  # glibc maps larger blocks by themselves, and gives them back when they are freed
STEADY_SLOTS: Final = 3  # the consumer lets go of a batch only after it took the next one
WANTED_SLOTS: Final = 4  # and one in reserve for items that take longer than others
MOST_SLOTS: Final = 8
LARGE_BATCH_BYTES: Final = 8 * 2**20  # it is filled for so long that a ready one beside it gains nothing that shows
CHEAP_SLOTS_BYTES: Final = 4 * 2**20  # slots up to this much in all are not worth saving
# Loads that wait for something wait longer now and then. Batches come in order, so that one such item holds up all that
# come after it: so many items for each worker keep the others busy meanwhile, where that takes little memory.
WAITING_ITEMS: Final = 16
MOST_WAITING_SLOTS: Final = 64
WAITING_SHARE: Final = 32  # of the budget
# Small batches share a slot, so that a task, a message and a lease serve several of them: up to this many, and as long
# as filling such a slot takes no longer than a consumer would notice.
MOST_GROUP: Final = 16
GROUPED_BYTES: Final = 8 * 2**20  # of all slots together: a slot stays about as large as a core's cache
# Without workers nothing is read ahead, and the books of a slot are all that a batch of rows in memory costs besides.
MOST_GROUP_ALONE: Final = 48
GROUPED_ALONE_BYTES: Final = 512 * 2**10  # of a batch: larger ones take longer than the books
SMALL_BYTES: Final = 32 * 2**10  # of a batch: of smaller ones there can be more slots
GROUPED_ALONE_SHARE: Final = 16  # of the budget, between once and twice as many bytes as with workers
GROUP_S: Final = 4e-3
# Loads that take microseconds are much alike, and a task costs both sides, all in all, as much as dozens of them; not
# without workers, where the consumer would wait for all of it.
QUICK_LOAD_S: Final = 20e-6
QUICK_GROUP_S: Final = 12e-3
# A load may be slow now and then, and what shares its slot waits for it: where that is decided beforehand, for samples
# that are kept, no load is taken to be faster than this. Elsewhere the engine puts together what proves to be quick.
GROUPED_LOAD_S: Final = 400e-6
LARGE_ROWS: Final = 1024  # of a batch that is as large as it can be, before it is known how large that is
KEPT_GROUP_S: Final = 20e-3  # where all samples are kept, so that it takes so long in the first epoch only
BATCH_OBJECT_BYTES: Final = 512  # its arrays and their tree, without what is in them
DEVICE_BUFFERS: Final = 2  # one that is computed on, one that is copied into
# A loop lets go of a batch only after it got the next one: with a third the one after that is copied meanwhile.
MOST_DEVICE_BUFFERS: Final = 3
KEPT_FOR_BUFFER: Final = 8  # so many times a buffer's bytes have to be left for kept samples before there is a third
MOST_ROWS: Final = 2**31 - 1  # so that a row's number fits 32 bits anywhere, and a search for the largest batch ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What loading costs, as measured on a few samples."""

    leaf_row_bytes: tuple[int, ...]
    """Bytes of one sample's row of each leaf, as it lies in the slot."""
    load_bytes: int
    """Peak private memory of loading one sample above idle, the sample itself included."""
    process_bytes: int = LEAN_WORKER_BYTES
    """Private memory of an idle worker process."""
    template_bytes: int = TEMPLATE_BYTES
    """Private memory of the template process; 0 if there is none."""
    load_s: float = 1e-3
    """Wall seconds a sample."""
    cpu_s: float = 1e-3
    """Processor seconds a sample."""
    item_bytes: int = 64
    """What one identity costs in a message."""
    releases_gil: bool | None = None
    """Whether loads run side by side in threads; None if that is not known."""
    batched: bool = False
    """Whether a load makes many samples at once, so that little is done for each of them in Python."""
    measured: bool = True
    """False if the seconds are an assumption."""

    def __post_init__(self) -> None:
        sizes = (*self.leaf_row_bytes, self.load_bytes, self.process_bytes, self.template_bytes, self.item_bytes)
        if min(sizes) < 0 or min(self.load_s, self.cpu_s) < 0:
            raise ValueError(f"a footprint cannot be negative: {self!r}")

    @classmethod
    def assumed(cls, leaf_row_bytes: tuple[int, ...]) -> Footprint:
        """A footprint for samples that nobody loaded yet: a lean worker that holds a sample twice while it loads."""
        return cls(leaf_row_bytes=leaf_row_bytes, load_bytes=2 * sum(leaf_row_bytes), measured=False)

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample in a slot."""
        return sum(self.leaf_row_bytes)

    @property
    def cheap(self) -> bool:
        """Whether a load alone costs less than telling a worker to do it."""
        return max(self.load_s, self.cpu_s) < CHEAP_S

    @property
    def waits(self) -> bool:
        """Whether a load spends most of its time waiting for something else than the processor."""
        return self.cpu_s < self.load_s / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked for, and the cores there are."""

    memory: int
    """Bytes for all that the feed adds."""
    batch_size: int | Literal["max"] = 32
    """Samples a batch, or as many as the budgets allow."""
    num_workers: int | None = None
    """How many workers; None: the plan decides."""
    isolated: str = ""
    """Why there must be a worker, however cheap a load is; "" if there need not."""
    group: int | None = None
    """Batches that a slot must hold, because its blocks are mixed: one slot is drawn from while another is read."""
    regroup: int = 0
    """Items of one of these, where the user may ask for fewer; 0 where the group is what it is."""
    executor: Executor = "process"
    cores: int = 1
    whole: bool = False
    """A batch is collated in one worker, which holds its samples and the result besides the slot."""
    staged: bool = False
    """Items give varying numbers of samples, which wait in staging slots for their place in a batch."""
    pieced: bool = False
    """Batches may have to be put together in this process."""
    device_memory: int | None = None
    """Bytes for batches on the device."""
    device_leaf_row_bytes: tuple[int, ...] | None = None
    """Bytes of one sample in each block of a buffer there; None: batches are not copied by the feed."""
    length: int | None = None
    """Samples in all, if that is known."""
    cache: bool = False
    """Keep loaded samples in what the budget leaves."""
    worth: int | None = None
    """Samples in all that are worth keeping, if not as many as ``length``."""
    index_bytes: int = 0
    """What the cache has to remember of all items together: of as many as there is room for with ``cache``."""
    device_keeps: int = 0
    """Samples an item, where items are kept in what ``device_memory`` leaves; 0 where none are."""
    groups: bool = False
    """Small batches may share a slot."""
    most_slots: int | None = None
    """A limit for the slots, where the interface above has one; two are the fewest there can be."""
    need: Need | None = None
    """What the model leaves room for on the device, if there is a model."""

    def __post_init__(self) -> None:
        if self.memory <= 0:
            raise ValueError(f"memory={self.memory} leaves no memory at all: give at least a few MiB")
        if self.batch_size != "max" and not 1 <= self.batch_size <= MOST_ROWS:
            raise ValueError(
                f'batch_size={self.batch_size} is not from 1 to {MOST_ROWS} samples: give such a number, or "max"'
            )
        if self.num_workers is not None and self.num_workers < 0:
            raise ValueError(f"num_workers={self.num_workers} is negative: give 0 or more, or None")
        if self.executor not in ("process", "thread"):
            raise ValueError(f'executor={self.executor!r} is not known: give "process" or "thread"')
        if self.cores < 1:
            raise ValueError(f"cores={self.cores}: there is always at least one")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The numbers that were solved, and why. ``print`` it for a table."""

    memory: int
    """The budget: bytes for everything below together."""
    sample_bytes: int
    """Bytes of one sample in a slot."""
    batch_size: int
    """Samples in a batch."""
    batch_bytes: int
    """Bytes of one batch, which is one slot: its samples, each array page-aligned."""
    slots: int
    """How many are held at once: filling, ready, and in the consumer's hands."""
    batches_per_slot: int
    """1, or more where batches are so small that they share a slot."""
    staging_slots: int
    """Slots in which samples wait whose items give varying numbers of them."""
    arena_bytes: int
    """Bytes of the one mapping with all slots, staging ones included."""
    workers: int
    """How many load side by side; 0: samples are loaded in this process."""
    worker_bytes: int
    """Private bytes that one worker may use: idle, plus one load, plus whole batches where it collates."""
    executor: Executor
    """What a worker is."""
    template_bytes: int
    """Bytes of the process that workers are forked from; 0 without worker processes."""
    parent_bytes: int
    """Bytes that the feed adds to this process itself; without workers the load too."""
    cache_bytes: int
    """Bytes of kept samples."""
    held_samples: int
    """How many samples memory holds at once, in slots and in the cache."""
    device_memory: int | None
    """The budget for batches on the device."""
    device_buffers: int = 0
    """How many batches lie on the device at once: used, ready, and arriving; 0 if they are not copied by the feed."""
    device_bytes: int = 0
    """Bytes of these buffers; never above ``device_memory``."""
    total_bytes: int
    """Arena, workers, template, parent and cache together; never above ``memory``."""
    notes: tuple[str, ...]
    """One line for each decision."""
    model_bytes: int = 0
    """Bytes that a step of the model takes on the device at its peak, parameters included; 0 without a model."""
    model_parts: tuple[tuple[str, int], ...] = ()
    """The same by what it is: parameters, gradients, optimizer state, activations, ..."""
    device_total_bytes: int = 0
    """Bytes on the device: the model's step, batches and kept samples; never above ``device_memory``."""
    device_samples: int = 0
    """Samples that are kept on the device (``cache="device"``)."""
    device_cache_bytes: int = 0
    """Bytes of these there, and of the room that a batch needs beside them."""

    @property
    def free_bytes(self) -> int:
        """What the plan leaves of the budget."""
        return self.memory - self.total_bytes

    def __str__(self) -> str:
        """A table of the parts, their number, and what share of the budget they take; then the notes."""
        cached = self.held_samples - self.slots * self.batches_per_slot * self.batch_size
        slot = self.arena_bytes // max(1, self.slots + self.staging_slots)
        many = "one batch" if self.batches_per_slot == 1 else f"{self.batches_per_slot} batches"
        parts = [
            (f"slots, {many} each", self.slots, slot, self.slots * slot),
            ("staging slots", self.staging_slots, slot, self.staging_slots * slot),
            (f"workers, one {self.executor} each", self.workers, self.worker_bytes, self.workers * self.worker_bytes),
            ("template process", int(self.template_bytes > 0), self.template_bytes, self.template_bytes),
            ("this process", 1, self.parent_bytes, self.parent_bytes),
            ("cached samples", cached, self.cache_bytes // max(1, cached), self.cache_bytes),
        ]
        rows = [("part", "number", "each", "bytes", "of budget")]
        rows += [
            (name, f"{number:,}", format_bytes(each), format_bytes(size), _share(size, self.memory))
            for name, number, each, size in parts
            if number
        ]
        sums = (("total", self.total_bytes), ("left free", self.free_bytes), ("budget", self.memory))
        rows += [(name, "", "", format_bytes(size), _share(size, self.memory)) for name, size in sums]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "   ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(cells))
            for cells in (list(zip(row, widths, strict=True)) for row in rows)
        ]
        rule = "-" * len(lines[0])
        device = [*_device_table(self), ""] if self.model_bytes else []
        if self.device_buffers and not self.model_bytes:
            of = "" if self.device_memory is None else f" of {format_bytes(self.device_memory)}"
            each = format_bytes(self.device_bytes // self.device_buffers)
            said = f"on the device: {self.device_buffers} buffers of {each}, {format_bytes(self.device_bytes)}"
            if self.device_cache_bytes:
                kept = _count(self.device_samples, "kept sample")
                said += f"; {kept}, {format_bytes(self.device_cache_bytes)}; {format_bytes(self.device_total_bytes)}"
            device = [said + of, ""]
        head = f"{_count(self.batch_size, 'sample')} of {format_bytes(self.sample_bytes)} a batch"
        return "\n".join(
            [
                f"{head}, {_count(self.held_samples, 'sample')} in memory at once",
                "",
                *(lines[0], rule, *lines[1:-3], rule, *lines[-3:]),
                "",
                *device,
                *(wrapped for note in self.notes for wrapped in wrap(note, 98, subsequent_indent="    ")),
            ]
        )


def thread_slack(load_bytes: int) -> int:
    """What malloc keeps for a thread of what its loads have freed."""
    return load_bytes if load_bytes <= KEPT_BY_MALLOC_BYTES else MOST_SLACK_BYTES


def solve(request: Request, footprint: Footprint) -> Plan:
    """The best plan inside the budget.

    Raises ``BudgetError`` if there is none; its ``least`` is the smallest ``memory`` for which there is one, everything
    else unchanged (or the smallest ``device_memory``, when it is the device that cannot hold one batch).
    """
    wanted, why = _wanted_workers(request, footprint)
    rows = _largest_batch(request, footprint, wanted) if request.batch_size == "max" else request.batch_size
    costs = _Costs.of(request, footprint, rows)
    if costs.crowds_device():
        raise _too_large_for_device(request.device_memory or 0, costs)
    kept = costs.kept_on_device()
    if kept < request.device_keeps:
        raise _keeps_nothing(costs)
    rung = next((rung for rung in _ladder(costs, wanted) if costs.total(*rung) <= request.memory), None)
    if rung is None:
        raise _does_not_fit(costs, wanted)
    workers, slots = rung
    if request.groups:
        costs = _grouped(costs, workers, slots)
    total = costs.total(workers, slots)
    cached, cache_bytes = _cache(request, footprint, workers, request.memory - total)
    return Plan(
        memory=request.memory,
        sample_bytes=footprint.sample_bytes,
        batch_size=rows,
        batch_bytes=costs.batch,
        slots=slots,
        staging_slots=slots if request.staged else 0,
        batches_per_slot=costs.group,
        arena_bytes=costs.arena(slots),
        workers=workers,
        worker_bytes=costs.worker() if workers else 0,
        executor=request.executor,
        template_bytes=costs.template(workers),
        parent_bytes=costs.parent(workers, slots),
        cache_bytes=cache_bytes,
        held_samples=slots * costs.group * rows + cached,
        device_memory=request.device_memory,
        device_buffers=costs.buffers(),
        device_bytes=costs.buffers() * costs.device(),
        total_bytes=total + cache_bytes,
        notes=(*_notes(costs, (wanted, why), rung, cached=cached), *_kept_note(request, kept)),
        model_bytes=0 if request.need is None else request.need.step.nbytes,
        model_parts=() if request.need is None else request.need.step.parts,
        device_total_bytes=_device_total(costs, kept),
        device_samples=kept,
        device_cache_bytes=costs.shelves(kept) if kept else 0,
    )


def device_batch_bytes(request: Request, footprint: Footprint, rows: int) -> int:
    """Bytes of a batch of so many samples on the device."""
    return _Costs.of(request, footprint, rows).device()


def _cache(request: Request, footprint: Footprint, workers: int, free: int) -> tuple[int, int]:
    """Samples that are kept, and the bytes for them."""
    if not request.cache or not footprint.sample_bytes:
        return 0, 0
    processes = 1 + (workers if request.executor == "process" else 0)
    each = footprint.sample_bytes + -(-footprint.sample_bytes * processes // PAGE_TABLE_SHARE)
    varies = request.whole or request.staged
    left = max(free // (CACHE_LEAVES_VARYING if varies else CACHE_LEAVES), processes * CACHE_LEAVES_BYTES)
    room = max(0, free - left)
    index = min(request.index_bytes, room // CACHE_LEAVES)
    cached = (room - index) // each
    worth = request.length if request.worth is None else request.worth
    if worth is None or cached < worth:
        return cached, cached * each + index
    # Where samples vary, those that were not measured may be larger.
    return worth, room if varies else worth * each + index


@dataclass(frozen=True, slots=True)
class _Costs:
    """Bytes of each part of a plan with batches of ``rows`` samples. The budget plays no role."""

    request: Request
    footprint: Footprint
    rows: int
    batch: int
    group: int = 1
    """Batches a slot."""

    @classmethod
    def of(cls, request: Request, footprint: Footprint, rows: int) -> _Costs:
        return cls(request, footprint, rows, slot_bytes(footprint.leaf_row_bytes, rows), request.group or 1)

    def arena(self, slots: int) -> int:
        slot = self.batch if self.group == 1 else slot_bytes(self.footprint.leaf_row_bytes, self.group * self.rows)
        return (2 * slots if self.request.staged else slots) * slot

    def device(self) -> int:
        """Bytes of a batch on the device."""
        if self.request.device_leaf_row_bytes is None:
            return self.batch
        return sum(aligned(row * self.rows) or LINE for row in self.request.device_leaf_row_bytes)

    def crowds_device(self) -> bool:
        """Whether too few batches fit there; where a model shares the device, that was looked at with it."""
        budget = self.request.device_memory
        return self.request.need is None and budget is not None and DEVICE_BUFFERS * self.device() > budget

    def buffers(self) -> int:
        """How many batches lie there: the one that is used, the one that comes next, and if it fits one in between."""
        budget = self.request.device_memory
        if self.request.device_leaf_row_bytes is None:
            return 0
        if self.request.need is not None:
            return self.request.need.buffers
        if budget is None or MOST_DEVICE_BUFFERS * self.device() > budget:
            return MOST_DEVICE_BUFFERS if budget is None else DEVICE_BUFFERS
        # A third one takes the place of kept samples: only where these are many more, or all there are.
        room, keeps = budget - MOST_DEVICE_BUFFERS * self.device(), self.request.device_keeps
        if keeps and KEPT_FOR_BUFFER * self.device() > room - self.shelves(keeps):
            worth = self.worth()
            return MOST_DEVICE_BUFFERS if worth is not None and self.shelves(worth) <= room else DEVICE_BUFFERS
        return MOST_DEVICE_BUFFERS

    def worth(self) -> int | None:
        """Samples that are worth keeping, if that is known."""
        return self.request.length if self.request.worth is None else self.request.worth

    def shelves(self, samples: int) -> int:
        """Bytes of kept samples on the device, of a batch that only comes by, and of the numbers of its samples."""
        rows = samples + self.rows
        return sum(aligned(row * rows) or LINE for row in self.footprint.leaf_row_bytes) + aligned(
            INDEX_BYTES * self.rows
        )

    def beside(self, buffers: int) -> int:
        """Bytes on the device beside kept samples."""
        need = self.request.need
        return buffers * self.device() if need is None else need.step.with_batches(self.device(), need.buffers)

    def kept_on_device(self) -> int:
        """Samples of whole items that are kept there, in what the rest leaves."""
        each, request = self.request.device_keeps, self.request
        if not each:
            return 0
        room = (request.device_memory or 0) - self.beside(self.buffers())
        worth = self.worth()
        most = MOST_ROWS - self.rows if worth is None else min(worth, MOST_ROWS - self.rows)
        return each * _last(lambda items: self.shelves(each * items) <= room, most // each)

    def load(self) -> int:
        """What whoever loads holds: one load, or where batches are collated whole, all samples and the result too."""
        return self.footprint.load_bytes + (2 * self.batch if self.request.whole else 0)

    def idle(self) -> int:
        return self.footprint.process_bytes if self.request.executor == "process" else THREAD_BYTES

    def worker(self) -> int:
        # The identities of a task: at most those of a slot.
        identities = self.group * self.rows * self.footprint.item_bytes
        return self.idle() + self.load() + self.slack() + identities

    def slack(self) -> int:
        """What a worker process may grow by: its hard limit must not be met by what the next load needs more."""
        if self.request.executor == "thread":
            return thread_slack(self.load())
        return SLACK_BYTES + min(self.load() // 4, MOST_SLACK_BYTES)

    def template(self, workers: int) -> int:
        return self.footprint.template_bytes if workers and self.request.executor == "process" else 0

    def parent(self, workers: int, slots: int) -> int:
        identities = slots * self.group * self.rows * self.footprint.item_bytes
        # Put together in memory of their own, which is not in whole pages as slots are.
        piece = min(self.batch, self.rows * self.footprint.sample_bytes + BATCH_OBJECT_BYTES)
        pieces = (PIECED_BATCHES + self.group - 1) * piece if self.request.pieced else 0
        return PARENT_BYTES + identities + pieces + self.index() + (0 if workers else self.load())

    def index(self) -> int:
        """What a cache that lies elsewhere has to remember of items in this process."""
        return 0 if self.request.cache else self.request.index_bytes

    def total(self, workers: int, slots: int) -> int:
        crew = workers * self.worker() + self.template(workers)
        return self.arena(slots) + crew + self.parent(workers, slots)

    def fillers(self) -> int:
        """How many workers can fill one slot together."""
        return 1 if self.request.whole else self.rows

    def wanted_slots(self, workers: int) -> int:
        """So many that no worker runs dry while the consumer holds two and one is ready."""
        free = min(WANTED_SLOTS if self.request.groups else MOST_SLOTS, CHEAP_SLOTS_BYTES // max(1, self.batch))
        if workers == 0:
            shared = self.request.groups and SMALL_BYTES <= self.batch <= GROUPED_ALONE_BYTES
            return self.limited(STEADY_SLOTS if shared else max(STEADY_SLOTS, free))
        return self.limited(max(WANTED_SLOTS, free, self.steady_slots() + self.filled_at_once(workers)))

    def filled_at_once(self, workers: int) -> int:
        """Slots that so many workers fill at the same time. Where samples take microseconds, a slot is one task; where
        they wait, an item may take long, and there is more to be done while it does."""
        alone = self.footprint.load_s < QUICK_LOAD_S and self.rows * self.footprint.load_s <= QUICK_GROUP_S
        busy = workers if alone else ceil(workers / self.fillers())
        if not self.footprint.waits or self.request.whole:
            return busy
        cheap = max(CHEAP_SLOTS_BYTES, self.request.memory // WAITING_SHARE) // max(1, self.batch)
        return max(busy, min(ceil(WAITING_ITEMS * workers / self.rows), cheap, MOST_WAITING_SLOTS))

    def steady_slots(self) -> int:
        """Slots besides those that are being filled: the consumer's, and one that is ready."""
        return STEADY_SLOTS - (self.rows == 1 and not self.request.whole and self.batch >= LARGE_BATCH_BYTES)

    def limited(self, slots: int) -> int:
        """No more slots than there may be."""
        most = self.request.most_slots
        return slots if most is None else min(slots, max(FEWEST_SLOTS, most))

    def fewest_slots(self, workers: int) -> int:
        """So many that every worker has something to do while the consumer holds one."""
        return self.limited(max(STEADY_SLOTS if workers > 2 else FEWEST_SLOTS, 1 + ceil(workers / self.fillers())))


def _wanted_workers(request: Request, footprint: Footprint) -> tuple[int, str]:
    """How many workers would be best if memory were free, and why."""
    load_s, cpu_s, cores = footprint.load_s, footprint.cpu_s, request.cores
    if request.num_workers is not None:
        return request.num_workers, "as asked"
    if footprint.cheap and _slot_s(request, footprint) < CHEAP_SLOT_S:
        if request.isolated:
            return 1, request.isolated
        return 0, f"a load takes {_seconds(load_s)}: all of a slot take less than to have a worker do it"
    if not request.isolated and _stays_here(request, footprint):
        sent = format_bytes(footprint.item_bytes)
        return 0, f"a load takes {_seconds(load_s)}: to send its item of {sent} to a worker costs as much"
    if request.executor == "thread" and footprint.releases_gil is False:
        return 1, "loads hold the GIL, so that more threads would not load faster"
    if footprint.waits:
        most = min(WAITING_WORKERS, ceil(cores * load_s / cpu_s)) if cpu_s else WAITING_WORKERS
        workers, why = max(cores, most), f"a load waits {1 - cpu_s / load_s:.0%} of its {_seconds(load_s)}"
    else:
        workers, why = cores, f"one for each core, a load being {_seconds(load_s)} of work"
        if not footprint.measured:
            why = "one for each core, as the load was not measured"
    if request.length is not None and max(1, request.length) < workers:
        return max(1, request.length), "one for each sample"
    return workers, why


def _stays_here(request: Request, footprint: Footprint) -> bool:
    """Whether items carry so much data that workers, who have to be sent it, would hardly be faster."""
    if request.executor == "thread" or footprint.waits or footprint.item_bytes < LARGE_ITEM_BYTES:
        return False
    send_s = SEND_S + footprint.item_bytes / SEND_BYTES_A_S
    shared_s = max(send_s / 2, (footprint.load_s + send_s) / request.cores)
    return footprint.load_s < WORTH_SENDING * shared_s


def _slot_s(request: Request, footprint: Footprint) -> float:
    """Work that a slot may hold, of which workers would take a part; as far as that does not depend on memory."""
    shares = footprint.batched and footprint.releases_gil
    if footprint.load_s == 0 or (request.executor == "thread" and not shares):
        return 0.0  # a source that lies in memory is read at once; threads would take the GIL from each other
    rows = LARGE_ROWS if request.batch_size == "max" else request.batch_size
    rows *= request.group or (MOST_GROUP if request.groups else 1)
    return (rows if request.length is None else min(rows, request.length)) * (footprint.load_s + WRITE_S)


def _ladder(costs: _Costs, wanted: int) -> Iterator[tuple[int, int]]:
    """Every (workers, slots) that may be planned, the best first: more workers, then more slots."""
    asked = costs.request.num_workers
    fewest_workers = 1 if costs.request.isolated else 0
    for workers in range(wanted, fewest_workers - 1, -1) if asked is None else (asked,):
        # Asked for by number, workers are given even when there are too few slots to keep them all busy.
        fewest = costs.fewest_slots(workers) if asked is None else FEWEST_SLOTS
        wanted_slots = costs.wanted_slots(workers)
        if costs.request.group is not None:
            fewest = wanted_slots = FEWEST_SLOTS
        for slots in range(wanted_slots, fewest - 1, -1):
            yield workers, slots


def _grouped(costs: _Costs, workers: int, slots: int) -> _Costs:
    """The same costs with as many batches in a slot as are cheap in memory and in time."""
    request = costs.request
    most, most_bytes = MOST_GROUP, GROUPED_BYTES
    if not workers and costs.batch <= GROUPED_ALONE_BYTES:
        most, most_bytes = MOST_GROUP_ALONE, max(most_bytes, min(2 * most_bytes, request.memory // GROUPED_ALONE_SHARE))
    if request.length is not None:
        most = min(most, request.length // (costs.rows * FEWEST_SLOTS))

    worth = request.length if request.worth is None else request.worth
    kept, _ = _cache(request, costs.footprint, workers, request.memory - costs.total(workers, slots))
    all_kept = worth is not None and kept >= worth
    patience_s = KEPT_GROUP_S if all_kept else group_s(costs.footprint.load_s, workers)

    load_s = costs.footprint.load_s
    if not workers and load_s < CHEAP_S:
        load_s = 0.0  # of so little, what was measured on a few samples is mostly the call
    elif request.cache and load_s and workers:
        load_s = max(load_s, GROUPED_LOAD_S)

    def fits(group: int) -> bool:
        if group > 1 and group * costs.rows * load_s > patience_s:
            return False
        larger = replace(costs, group=group)
        return larger.arena(slots) <= most_bytes and larger.total(workers, slots) <= request.memory

    return replace(costs, group=max(1, _last(fits, max(1, most))))


def group_s(load_s: float, workers: int) -> float:
    """How long it may take to fill what shares a slot."""
    return QUICK_GROUP_S if workers and load_s < QUICK_LOAD_S else GROUP_S


def _least(costs: _Costs, wanted: int) -> int:
    return min(costs.total(workers, slots) for workers, slots in _ladder(costs, wanted))


def _largest_batch(request: Request, footprint: Footprint, wanted: int) -> int:
    """The largest batch of which three slots fit beside the workers; 1 if none does.

    A larger budget never gives a smaller batch. So where the plan chooses the workers, they must not come in one leap
    that takes their memory from the batch. The first one (and the template) comes when the budget is 1.5 times its
    price; before that the batch stops growing at half the price. Further ones get a third of what comes on top.
    """
    steady = max(STEADY_SLOTS, wanted + 1) if request.whole else STEADY_SLOTS

    def fits(rows: int) -> bool:
        costs = _Costs.of(request, footprint, rows)
        if costs.crowds_device():
            return False
        everything = costs.total(wanted, steady)
        if request.num_workers is not None or wanted == 0:
            return everything <= request.memory
        with_one = costs.total(1, STEADY_SLOTS)
        price = costs.idle() + costs.template(1)
        for_first = min(price, max(0, request.memory - price // 2))
        for_others = min(everything - with_one, max(0, request.memory - price - price // 2) // 3)
        return with_one - price + for_first + for_others <= request.memory

    most = MOST_ROWS if request.length is None else min(request.length, MOST_ROWS)
    return max(1, _last(fits, most if request.need is None else min(most, request.need.step.rows)))


def _last(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to ``most`` that fits, where nothing fits above one that does not; 0 if none does."""
    return bisect_left(range(1, most + 1), True, key=lambda number: not fits(number))


def _notes(costs: _Costs, wish: tuple[int, str], rung: tuple[int, int], *, cached: int) -> Iterator[str]:
    request, rows, (wanted, why), (workers, slots) = costs.request, costs.rows, wish, rung
    maximal = request.batch_size == "max"
    if maximal:
        host = "bound by the host, " if request.need is not None and request.need.bound == "host" else ""
        yield f"batch size {rows:,}: {host}{_why_largest(costs, workers)}"
    if request.need is not None:
        yield from request.need.notes

    if workers == wanted:
        here = "" if workers else "; samples are loaded in this process"
        yield f"{_count(workers, 'worker')}: {why}{here}"
    elif workers:
        yield (
            f"{_count(workers, 'worker')}, not {wanted} ({why}): one more would leave room for fewer than "
            f"{costs.fewest_slots(workers + 1)} slots"
        )
    else:
        template = f" and its template {format_bytes(costs.template(1))}" if costs.template(1) else ""
        yield (
            f"0 workers, not {wanted} ({why}): one takes {format_bytes(costs.worker())}{template}, which does not "
            f"fit beside {costs.fewest_slots(1)} slots; samples are loaded in this process, between the "
            "consumer's steps"
        )

    wanted_slots = costs.wanted_slots(workers)
    if request.group is not None:
        yield f"{slots} slots of {_count(costs.group, 'batch', 'batches')}: one is drawn from while the next is read"
    elif slots < wanted_slots:
        reason = "the rest went into the batch size" if maximal else "one more does not fit"
        waits = "; the consumer waits when it holds two batches at once" if slots == FEWEST_SLOTS else ""
        yield f"{slots} slots, not {wanted_slots}: {reason}{waits}"
    elif slots == request.most_slots:
        yield f"{slots} slots: no more were allowed"
    elif workers == 0:
        yield f"{slots} slots: the consumer may hold two batches while the next one is loaded"
    elif slots == costs.steady_slots() + costs.filled_at_once(workers):
        ready = ", one ready" if costs.steady_slots() == STEADY_SLOTS else ""
        yield f"{slots} slots: two for the consumer{ready}, {slots - costs.steady_slots()} for the workers to fill"
    else:
        yield f"{slots} slots: at {format_bytes(costs.batch)} each, more of them cost next to nothing"

    if request.whole:
        yield "a batch is collated in one place: whoever loads holds its samples and the result besides the slot"
    if request.staged:
        yield "items give varying numbers of samples: as many slots again hold those that wait for their batch"
    if request.cache:
        worth = request.length if request.worth is None else request.worth
        of = "" if worth is None else f" of {worth:,}"
        yield f"cache: {_count(cached, 'sample')}{of}, in what the rest leaves"


def _why_largest(costs: _Costs, workers: int) -> str:
    request, rows = costs.request, costs.rows
    larger = _Costs.of(request, costs.footprint, rows + 1)
    if request.need is not None and rows == request.need.step.rows and request.need.bound != "host":
        where = "the device, where one sample more would not fit beside the model"
        return f"bound by {'a rank that has less room' if request.need.bound == 'ranks' else where}"
    if rows == request.length:
        return "all there is"
    if request.device_memory is not None and larger.crowds_device():
        return f"the largest of which {DEVICE_BUFFERS} fit in {format_bytes(request.device_memory)} on the device"
    if workers == 0 and larger.total(0, STEADY_SLOTS) <= request.memory:
        return "stays so until the budget has room for a worker, since a larger one would have to shrink again then"
    return "the largest that the budget allows"


def _device_total(costs: _Costs, kept: int) -> int:
    if costs.request.need is None and not kept:
        return 0
    return costs.beside(costs.buffers()) + (costs.shelves(kept) if kept else 0)


def _kept_note(request: Request, kept: int) -> Iterator[str]:
    if kept:
        worth = request.length if request.worth is None else request.worth
        of = "" if worth is None else f" of {worth:,}"
        yield f"cache on the device: {_count(kept, 'sample')}{of}, in what the rest leaves there"


def _device_table(plan: Plan) -> list[str]:
    """The parts of a model's step, and the batches beside it."""
    memory = plan.device_memory or plan.device_total_bytes
    batches = plan.device_total_bytes - plan.model_bytes - plan.device_cache_bytes
    rows = [("on the device", "bytes", "of budget")]
    parts = [*plan.model_parts, *([("batches", batches)] if batches else [])]
    if plan.device_cache_bytes:
        parts.append((_count(plan.device_samples, "kept sample"), plan.device_cache_bytes))
    sums = [("total", sum(size for _, size in parts)), ("left free", memory - plan.device_total_bytes)]
    rows += [(name, format_bytes(size), _share(size, memory)) for name, size in (*parts, *sums, ("budget", memory))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{a.ljust(widths[0])}   {b.rjust(widths[1])}   {c.rjust(widths[2])}" for a, b, c in rows]
    rule = "-" * len(lines[0])
    return [lines[0], rule, *lines[1:-3], rule, *lines[-3:]]


def _does_not_fit(costs: _Costs, wanted: int) -> BudgetError:
    request, rows = costs.request, costs.rows
    least, workers, slots = min((costs.total(w, s), w, s) for w, s in _ladder(costs, wanted))
    slot = costs.arena(1)
    parts = [f"{slots} slots of {_count(rows * costs.group, 'sample')} take {format_bytes(slot)} each"]
    if request.staged:
        parts.append("as many staging slots the same")
    if workers:
        parts.append(f"{_count(workers, 'worker')} {format_bytes(costs.worker())} each")
    if costs.template(workers):
        parts.append(f"the template process {format_bytes(costs.template(workers))}")
    parts.append(f"this process {format_bytes(costs.parent(workers, slots))}")
    if costs.index():
        parts.append(f"{format_bytes(costs.index())} of that to remember which items the cache has")

    def works(**changes: Any) -> bool:
        return has_room(replace(request, **changes), costs.footprint)

    advice = []
    # A group has so many items whatever the batch, and a smaller one has to be asked for.
    smaller = 0 if request.batch_size == "max" else _last(lambda size: works(batch_size=size), rows - 1)
    if smaller and request.group is None:
        advice.append(f"batch_size={smaller}")
    elif smaller and request.group == 1 and request.regroup:
        advice.append(f"batch_size={smaller} and shuffle=Blocks(group={max(1, smaller * request.regroup // rows)})")
    if request.regroup and (fewer_batches := _last(lambda group: works(group=group), (request.group or 1) - 1)):
        advice.append(f"shuffle=Blocks(group={fewer_batches * request.regroup})")
    if request.num_workers and (fewer := [n for n in range(request.num_workers) if works(num_workers=n)]):
        advice.append(f"num_workers={fewer[-1]}")
    if request.executor == "process" and workers and works(executor="thread"):
        advice.append('executor="thread"')
    also = f", or {' or '.join(advice)} with this budget" if advice else ""
    return BudgetError(
        f"memory={exact(request.memory)} is too small, {exact(least)} is the least that works: {', '.join(parts)}. "
        f'Give memory={least}{also}; smaller samples (cast="float16", smaller shapes) need less.',
        least=least,
    )


def has_room(request: Request, footprint: Footprint) -> bool:
    """Whether there is a plan, as far as ``memory`` goes."""
    rows = 1 if request.batch_size == "max" else request.batch_size
    wanted, _ = _wanted_workers(request, footprint)
    return _least(_Costs.of(request, footprint, rows), wanted) <= request.memory


def _too_large_for_device(device_memory: int, costs: _Costs) -> BudgetError:
    change = "smaller samples" if costs.rows == 1 else "a smaller batch_size, smaller samples"
    least = DEVICE_BUFFERS * costs.device()
    if keeps := costs.request.device_keeps:
        least += costs.shelves(keeps)
    return BudgetError(
        f"device_memory={exact(device_memory)} is too small: a batch of {_count(costs.rows, 'sample')} takes "
        f"{exact(costs.device())} there, and {DEVICE_BUFFERS} of them are needed, one to compute on and one to copy "
        f'into. Give device_memory={least}, {change} or cast="float16".',
        least=least,
    )


def _keeps_nothing(costs: _Costs) -> BudgetError:
    request = costs.request
    fewest = costs.beside(DEVICE_BUFFERS)
    least = fewest + costs.shelves(request.device_keeps)
    what = f"{DEVICE_BUFFERS} batches" if request.need is None else "a step of the model and its batches"
    return BudgetError(
        f'device_memory={exact(request.device_memory or 0)} has no room for cache="device": {what} take '
        f"{exact(fewest)} there, and keeping a single item {exact(least - fewest)}, with the room that a batch needs "
        f"beside it. Give device_memory={least} at least, a smaller batch_size, or leave cache out.",
        least=least,
    )


def exact(size: int) -> str:
    """A size to the byte, and for people."""
    return f"{size} ({format_bytes(size)})"


def _share(size: int, whole: int) -> str:
    percent = 100 * size / whole
    return "<0.1%" if 0 < percent < 0.05 else f"{percent:.1f}%"


def _count(number: int, noun: str, many: str = "") -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {many or noun + 's'}"


def _seconds(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return "less than 1 us"
