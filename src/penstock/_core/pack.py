"""Fills a cache ahead of time: loads what it does not have yet, in the order of the items. Runs in the parent.

The same engine as an epoch, but the slots are let go of as they come: nobody asks for batches. In order, because then
files are written from front to back.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from penstock._core.bookmark import Bookmark
from penstock._core.cache import CacheWarning
from penstock._core.engine import Unit, error_of
from penstock._core.launch import Launched
from penstock._core.patience import users_level
from penstock._core.schedule import Schedule
from penstock._core.stats import Stats

__all__ = ["pack"]


def pack(launched: Launched, schedule: Schedule, place: Bookmark, stats: Stats) -> Iterator[tuple[int, int]]:
    """Load what the cache lacks; after each step how many items it keeps, and how many it will."""
    engine, cache, cut = launched.engine, launched.engine.cache, launched.cut
    if cache is None:
        return
    missing = cache.wants()
    total = cache.count + len(missing)
    yield cache.count, total

    def units() -> Iterator[Unit]:
        for start in range(0, len(missing), cut.unit_items):
            indices = missing[start : start + cut.unit_items]
            yield Unit(0, start, indices, schedule.pick(indices, travels=cut.travels))

    run = engine.begin(units(), ahead=1)
    try:
        while (found := engine.next_chunk(run, 0)) is not None:
            unit, chunk = found
            for failure in chunk.failures:
                error = error_of(failure, unit)
                item = unit.items[failure.ordinal] if unit.items is not None else int(unit.indices[failure.ordinal])
                stats.skipped.append((item, error))
            engine.release(chunk)
            while engine.notices:
                notice = engine.notices.pop(0)
                if notice not in place.told:
                    place.told.add(notice)
                    warnings.warn(notice, CacheWarning, stacklevel=users_level())
            yield cache.count, total
    finally:
        engine.stop(run)
