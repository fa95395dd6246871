"""Which cache a feed gets: none, memory, or a folder; decided when the plan is made. Runs in the parent.

What a cache is and does is told in ``cache``, ``cache_heap`` and ``cache_disk``.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Final, Literal

from penstock._core.arena import AnyArena
from penstock._core.budget import format_bytes
from penstock._core.cache import INDEX_BYTES, RANDOM, Cache, CacheWarning, RamStore, Store
from penstock._core.cache_device import STATE_BYTES, DeviceStore
from penstock._core.cache_disk import DiskStore
from penstock._core.cache_heap import HEAP_INDEX_BYTES, HeapStore
from penstock._core.cache_key import identify
from penstock._core.errors import CacheError, PenstockError, SpecError
from penstock._core.layout import Layout
from penstock._core.options import Options
from penstock._core.patience import users_level
from penstock._core.plan import CACHE_LEAVES, Plan
from penstock._core.program import Probe, Program
from penstock._core.schedule import Schedule
from penstock._core.task import Mode

__all__ = ["Keeping"]

_STATE_BYTES: Final = 2  # whether it is there, and whether it can be: what is remembered of an item on disk


@dataclasses.dataclass(frozen=True, slots=True)
class Keeping:
    """How a feed keeps samples, if it does."""

    kind: Literal["rows", "heap", "disk", "device"] | None
    note: str = ""
    index_bytes: int = 0
    worth: int | None = None
    """Samples that may come again; None if nobody knows how many these are."""

    @classmethod
    def of(cls, options: Options, schedule: Schedule, program: Program, probe: Probe) -> Keeping:
        """What was asked for, as far as it makes sense; a warning says where it does not."""
        if options.cache is None:
            return cls(None)
        if schedule.length is None:
            note = "cache: not used, as lines of compressed files have no place where they could be found again"
            try:
                schedule.count()
            except TypeError:
                _warn(note)
            if schedule.length is None:
                return cls(None, note)
        source = options.source
        if source is not None and source.in_memory and options.load is None and options.cache != "device":
            return cls(None, "cache: not used, as all rows are in memory already")
        if probe.random:
            _warn(RANDOM)
            return cls(None, "cache: not used, as load is random (penstock.rng)")
        # A rank sees the same items in every epoch, unless they are shuffled: then it sees all of them in the end.
        worth = schedule.samples if not options.shuffle or options.each is None else schedule.length * options.each
        if options.cache != "ram":
            if program.mode is Mode.ROWS and options.cache == "device":
                _check_leaves(options, probe)
                return cls("device", "", schedule.length * STATE_BYTES, worth)
            if program.mode is Mode.ROWS:
                return cls("disk", "", schedule.length * _STATE_BYTES)
            note = "cache: not used, as this feed goes on in the middle of an item; the next one will use it"
            _warn(note)
            return cls(None, note)
        width = INDEX_BYTES if program.mode is Mode.ROWS else HEAP_INDEX_BYTES
        return cls("rows" if program.mode is Mode.ROWS else "heap", "", schedule.length * width, worth)

    @property
    def takes_rest(self) -> bool:
        """Whether what the budget leaves is for kept samples."""
        return self.kind in ("rows", "heap")

    def planned(self, plan: Plan) -> Plan:
        """The plan with what the cache takes in this process, and a word about it."""
        if self.kind in ("disk", "device"):
            index = self.index_bytes
            if index > plan.free_bytes:
                items = index // (_STATE_BYTES if self.kind == "disk" else STATE_BYTES)
                raise CacheError(
                    f"a cache on {self.kind} has to remember {format_bytes(index)} for {items:,} items, and "
                    f"the budget of {format_bytes(plan.memory)} has {format_bytes(plan.free_bytes)} left: give more "
                    "memory, or items that hold several samples each"
                )
            plan = dataclasses.replace(
                plan, parent_bytes=plan.parent_bytes + index, total_bytes=plan.total_bytes + index
            )
        return dataclasses.replace(plan, notes=(*plan.notes, self.note)) if self.note else plan

    def maker(
        self, options: Options, schedule: Schedule, program: Program, *, probe: Probe, plan: Plan, layout: Layout
    ) -> Callable[[AnyArena], Store | None] | None:
        """What makes the store once there is an arena."""
        items, each = schedule.length or 0, options.each or 1
        if self.kind == "disk":
            assert isinstance(options.cache, Cache)
            identity = identify(options.items, program.load, key=options.cache.key)
            disk = DiskStore(options.cache, layout, identity, items=items, each=each)
            for warning in disk.warnings:
                _warn(warning)
            return lambda _: disk
        if self.kind == "device":
            device = DeviceStore(items=items, entries=plan.device_samples // each, each=each)
            return lambda _: device
        cached = plan.held_samples - plan.slots * plan.batches_per_slot * plan.batch_size
        width = INDEX_BYTES if self.kind == "rows" else HEAP_INDEX_BYTES
        fits = self.worth is not None and cached >= self.worth
        indexed = items if fits else min(items, plan.cache_bytes // CACHE_LEAVES // width)
        if self.kind is None or not indexed or cached < each:
            return None

        def made(arena: AnyArena) -> Store | None:
            try:
                if self.kind == "rows":
                    return RamStore(arena, layout, items=items, indexed=indexed, entries=cached // each, each=each)
                room = plan.cache_bytes - indexed * width
                return HeapStore(arena, items=items, indexed=indexed, room=room, record_bytes=probe.sample_bytes * each)
            except PenstockError as error:
                _warn(f"no sample is kept, as there is no room for {format_bytes(plan.cache_bytes)}: {error}")
                return None

        return made


def _check_leaves(options: Options, probe: Probe) -> None:
    """SpecError if a part of a sample cannot lie on the device."""
    device = options.device
    assert device is not None
    for leaf in probe.spec.leaves:
        if leaf.kind != "array" or not device.takes(leaf.stored):
            what = f"texts (a {leaf.kind})" if leaf.kind != "array" else f"{leaf.stored} numbers"
            raise SpecError(
                f'cache="device" keeps whole samples on {device.name}, and {leaf.path or "a sample"} is made of '
                f'{what}, which stay on the host: leave that out of the sample, make numbers of it, or use cache="ram"'
            )


def _warn(text: str) -> None:
    warnings.warn(text, CacheWarning, stacklevel=users_level())
