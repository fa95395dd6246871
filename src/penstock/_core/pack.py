"""Fills a cache ahead of time: loads what it does not have yet, in the order of the items. Runs in the parent.

The same engine as an epoch, but the slots are let go of as they come: nobody asks for batches. In order, because then
files are written from front to back. What another job is seen to make at the moment is passed over, and waited for
at the end.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from penstock._core.bookmark import Bookmark
from penstock._core.cache import CacheWarning
from penstock._core.engine import Unit, error_of
from penstock._core.launch import Launched
from penstock._core.patience import users_level
from penstock._core.schedule import Schedule
from penstock._core.stats import Stats

__all__ = ["pack"]

LOOK_S: Final = 0.1
# What was free when it was looked at may be another job's when it is begun, and the lock of the folder may be taken for
# too long: then it was loaded and is not kept, though nothing is wrong with it. So often in a row, something else is.
TRIES: Final = 5


def pack(launched: Launched, schedule: Schedule, place: Bookmark, stats: Stats) -> Iterator[tuple[int, int]]:
    """Load what the cache lacks; after each step how many items it keeps, and how many it will."""
    cache, cut = launched.engine.cache, launched.cut
    if cache is None:
        return
    missing = cache.wants()
    total = cache.count + len(missing)
    tries = np.zeros(int(missing.max(initial=-1)) + 1, np.uint8)
    yield cache.count, total

    size = max(1, min(cut.unit_items, cut.batch_items))  # claimed when it is begun: a few at a time

    def units(left: npt.NDArray[np.int64]) -> Iterator[Unit]:
        for start in range(0, len(left), size):
            indices = cache.unclaimed(left[start : start + size])
            if len(indices):
                tries[indices] += 1
                yield Unit(0, start, indices, schedule.pick(indices, travels=cut.travels))

    most = 1 if cache.in_memory else TRIES  # nobody else is at what this process keeps in memory
    while len(left := missing[tries[missing] < most]):
        before = tries[left]
        for failed in _made(launched, units(left), place, stats):
            tries[failed] = most
            yield cache.count, total
        if (tries[left] == before).all():  # other jobs are at what is left: it will be there soon, or they die
            time.sleep(LOOK_S)
        missing = cache.wants()
    yield cache.count, total


def _made(launched: Launched, units: Iterator[Unit], place: Bookmark, stats: Stats) -> Iterator[npt.NDArray[np.int64]]:
    """Have these units loaded; after each the numbers of those of its items that failed."""
    engine = launched.engine
    run = engine.begin(units, ahead=1)
    try:
        while (found := engine.next_chunk(run, 0)) is not None:
            unit, chunk = found
            failed = [failure.ordinal for failure in chunk.failures]
            for failure in chunk.failures:
                stats.skipped.append((getattr(error_of(failure, unit), "item", None), failure.error))
            engine.release(chunk)
            while engine.notices:
                notice = engine.notices.pop(0)
                if notice not in place.told:
                    place.told.add(notice)
                    warnings.warn(notice, CacheWarning, stacklevel=users_level())
            yield unit.indices[failed]
    finally:
        engine.stop(run)
