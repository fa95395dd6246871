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
from penstock._core.cache_disk import DiskFull, DiskStore, as_kept
from penstock._core.cache_heap import HEAP_INDEX_BYTES, HeapStore
from penstock._core.cache_key import Identity, identify
from penstock._core.errors import PenstockError, SpecError
from penstock._core.layout import Layout
from penstock._core.options import Options
from penstock._core.patience import users_level
from penstock._core.plan import CACHE_LEAVES, Plan
from penstock._core.program import Probe, Program
from penstock._core.schedule import Schedule
from penstock._core.spec import Spec
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
            note = "cache: not used, as all rows are in memory already"
            if options.cache != "ram":  # which is where they are
                _warn(note)
            return cls(None, note)
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

    def identity(self, options: Options, program: Program) -> Identity | None:
        """What the samples are made of, if they are kept where they outlive the process."""
        if self.kind != "disk":
            return None
        assert isinstance(options.cache, Cache)
        return identify(options.items, program.load, key=options.cache.key)

    def spec(self, options: Options, schedule: Schedule, identity: Identity | None, spec: Spec) -> Spec:
        """The form of samples as they are kept: a folder that is there gives texts as much room as it has for them."""
        if identity is None:
            return spec
        assert isinstance(options.cache, Cache)
        return as_kept(options.cache, spec, identity, items=schedule.length or 0, each=options.each or 1)

    def maker(
        self,
        options: Options,
        schedule: Schedule,
        identity: Identity | None,
        *,
        probe: Probe,
        plan: Plan,
        layout: Layout,
    ) -> Callable[[AnyArena], Store | None] | None:
        """What makes the store once there is an arena; OtherWidths if ``spec`` says something else by now."""
        items, each = schedule.length or 0, options.each or 1
        if identity is not None:
            assert isinstance(options.cache, Cache)
            try:
                disk = DiskStore(options.cache, layout.spec, identity, items=items, each=each)
            except DiskFull as error:
                _warn(f"{error}. All samples are loaded every time; make room and start again to have them kept")
                return None
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
