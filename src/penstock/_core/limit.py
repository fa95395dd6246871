"""Holds a worker process to its share of the budget. Runs in workers.

Two lines. The hard one is the kernel's: RLIMIT_DATA bounds private memory (not the arena, which is shared), so that a
load that asks for too much gets a MemoryError for that item in place of the out-of-memory killer for the job. The
soft one is looked at between tasks: a worker that has grown (leaks, caches, memory that malloc keeps) first gives back
what it can, and if that is not enough it ends and is replaced by a fresh one.
"""

from __future__ import annotations

import ctypes
import gc
import time
from typing import Final, NamedTuple

from penstock._core import machine

__all__ = ["RETIRED", "Birth", "Limit", "trim"]

RETIRED: Final = 75  # exit code of a worker that ends because it has grown; sysexits calls it EX_TEMPFAIL
TRIM_S: Final = 0.02  # giving back costs milliseconds, and the next load may want it again
KEPT_SLACK_BYTES: Final = 2**20  # loads differ a little
# A look takes 2 us. Tasks are about a millisecond of work, those of small batches less: then several are waited for.
LOOK_S: Final = 0.5e-3
CALM_S: Final = 2e-3  # the same for a worker that is far from its line
SOFT_SHARE: Final = 0.6  # of the growth that is allowed: what is above may be needed by the next load


_M_TRIM_THRESHOLD: Final = -1  # of glibc's malloc.h
_M_MMAP_THRESHOLD: Final = -3
_MMAP_THRESHOLD_BYTES: Final = 128 * 2**10  # what it is by default


class Birth(NamedTuple):
    """What a worker takes before it has loaded anything. The first one loads before it knows its limit: the probe."""

    anon_bytes: int
    data_bytes: int

    @classmethod
    def now(cls) -> Birth:
        """As it is at this moment."""
        return cls(machine.anon_gauge()(), machine.data_bytes())


class Limit:
    """The growth that one worker is allowed above what it was when it was born."""

    def __init__(self, growth_bytes: int, load_bytes: int, birth: Birth, held_bytes: int = 0) -> None:
        self._anon_bytes = machine.anon_gauge()
        # A load must find its room again after the soft line was just not crossed. What a reader keeps is no growth.
        free = max(0, growth_bytes - held_bytes)
        allowed = held_bytes + max(0, min(int(SOFT_SHARE * free), free - load_bytes))
        self._soft = birth.anon_bytes + allowed
        self._urgent = self._soft + (growth_bytes - allowed) // 2
        self._near = self._soft - allowed // 2
        self._hard = birth.anon_bytes + growth_bytes
        self._young = True
        self._trimmed_s = 0.0
        self._look_s = self._unseen_s = LOOK_S
        machine.limit_data(growth_bytes, above_bytes=birth.data_bytes or None)
        keep(min(allowed, load_bytes + KEPT_SLACK_BYTES))

    def due(self, worked_s: float) -> bool:
        """Whether it is time to look again, after a task that took so long."""
        self._unseen_s += worked_s
        if self._unseen_s < self._look_s:
            return False
        self._unseen_s = 0.0
        return True

    def outgrown(self) -> bool:
        """Whether this worker should be replaced: it is above its soft line and cannot get below it."""
        try:
            return self._outgrown()
        except MemoryError:  # at the hard line there is no room even to look
            return True

    def _outgrown(self) -> bool:
        size = self._anon_bytes()
        young, self._young = self._young, False
        self._look_s = LOOK_S if size > self._near else CALM_S
        if size <= self._soft:
            return False
        now = time.monotonic()
        if size <= self._urgent and now - self._trimmed_s < TRIM_S:
            return False
        self._trimmed_s = now
        gc.collect()
        trim()
        size = self._anon_bytes()
        if young and self._soft < size < self._hard:
            # What its first task left here, an import say, a successor would have to take too. From now on it counts.
            self._soft = size + (self._hard - size) // 2
            self._near, self._urgent = size, (self._soft + self._hard) // 2
        return size > self._soft


def keep(size_bytes: int) -> None:
    """Have malloc keep so much of what is freed: what the next load needs again, and the plan counts anyway.

    By default glibc returns freed arrays to the system, and the next load pays for fresh pages: some 0.6 ms a megabyte,
    often more than the work that is done in them.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_TRIM_THRESHOLD, min(size_bytes, 2**31 - 1))
        # Larger blocks are mapped one by one whatever is set here; 32 MiB is the most that glibc accepts.
        libc.mallopt(_M_MMAP_THRESHOLD, max(_MMAP_THRESHOLD_BYTES, min(size_bytes, 32 * 2**20)))


def trim() -> None:
    """Have malloc give back to the system what was freed; glibc keeps it otherwise."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
