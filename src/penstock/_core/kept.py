"""What loads keep in the consumer's own process, where nothing can limit or replace them. Runs in the parent.

Measured while the consumer waits for a batch, so that what it allocates itself is never counted: without workers that
is exactly when loads run; with threads it is part of the time, and the rest is taken to be like it. Counted is what is
in use on the heap, not what the allocator holds: memory that a load freed and the consumer took over is not a load's.
"""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable
from typing import Final, NamedTuple

from penstock._core import machine

__all__ = ["Began", "Kept"]

# A look takes a microsecond or two, and milliseconds where the heap is full of holes: then it is taken less often.
SHARE: Final = 0.004
SHARE_WITH_THREADS: Final = 0.008  # more looks are needed there
# With threads: loads are in the midst of something whenever they are looked at, so that one look sees much more or less
# than they keep. Believed is only a sum of so many that is mostly growth.
LEAST_LOOKS: Final = 16
MOSTLY: Final = 0.5
# Garbage of more than this share of what loads seem to keep makes it doubtful.
MUCH: Final = 0.1


class Began(NamedTuple):
    """What this process took when a feed began."""

    anon: int = 0
    rss: int = 0
    peak: int = 0

    @classmethod
    def now(cls) -> Began:
        """As it is at this moment."""
        pid = os.getpid()
        return cls(machine.anon_bytes(pid), machine.rss_bytes(pid), machine.peak_rss_bytes(pid))


class Kept:
    """Adds up by how much the process grows while loads run and the consumer does not."""

    def __init__(self, *, threads: int, began: Began) -> None:
        self._threads = threads
        self._heap = machine.heap_gauge()
        self._base = machine.anon_bytes(os.getpid())
        self._began = began
        self._most = 0
        self._before: int | None = None
        self._began_s = self._next_s = self._cost_s = 0.0
        self._garbage: _Garbage | None = None
        self._mark = (0, 0)
        self._collects = False
        self._grown = self._swung = self._looks = 0
        self._loads = self._seen = 0
        self._warm = False
        self._waited_s = self._busy_s = 0.0
        self.spent_s = 0.0
        """Time that went into looking."""

    def begin(self) -> None:
        """The consumer begins to wait."""
        if self._heap is None or time.perf_counter() < self._next_s:
            self._before = None
            return
        started = time.thread_time()  # the processor's time: with threads, half of the other is waiting for the GIL
        if self._collects:
            gc.collect()
        self._before = self._heap()
        self._began_s = time.perf_counter()
        self._cost_s = time.thread_time() - started

    def end(self, loads: int, worked_s: float) -> None:
        """It has waited; so many loads are done by now, which took ``worked_s``."""
        if not self._threads and not self._warm:
            self._warm = True  # samples that the probe left: nobody loads them again
            return
        self._loads += loads
        self._busy_s += worked_s
        if self._before is None or self._heap is None:
            return
        now, started = time.perf_counter(), time.thread_time()
        if self._collects:
            gc.collect()
        grown = self._heap() - self._before
        self._most = max(self._most, machine.anon_bytes(os.getpid()))
        self._grown += grown
        self._swung += abs(grown)
        self._looks += grown != 0
        self._seen += loads
        self._waited_s += now - self._began_s
        cost_s = self._cost_s + time.thread_time() - started
        self.spent_s += cost_s
        self._next_s = now + cost_s / (SHARE_WITH_THREADS if self._threads else SHARE)

    @property
    def bytes(self) -> int:
        """What loads keep, as far as that can be told; never more than the process has grown."""
        # Loads that were not looked at are taken to be like the others.
        unseen = self._loads / self._seen if self._seen else 1.0
        if self._threads:
            if self._looks < LEAST_LOOKS or self._grown < MOSTLY * self._swung:
                return 0
            unseen = max(1.0, self._busy_s / self._threads / self._waited_s)
        grown = self._grown * unseen
        return max(0, min(int(grown), machine.anon_bytes(os.getpid()) - self._base))

    def risen(self, arena_bytes: int) -> int:
        """By how much the process has grown at most since the feed began, whoever it was, but for the arena."""
        self._most = max(self._most, machine.anon_bytes(os.getpid()))
        risen = self._most - self._began.anon
        # The kernel keeps the most that there ever was: no look misses it, unless there was more before.
        peak = machine.peak_rss_bytes(os.getpid())
        return max(0, risen, peak - self._began.rss - arena_bytes if peak > self._began.peak else 0)

    @property
    def suspected(self) -> bool:
        """Whether ``suspect`` was called."""
        return self._garbage is not None

    def suspect(self) -> None:
        """It begins to matter: from here on, see how much garbage comes about, and how much there was."""
        if self._heap is not None:
            self._garbage = _Garbage(self._heap)
            gc.collect()
            self._mark = self._grown, self._garbage.bytes

    def confirmed(self) -> int:
        """What loads keep, after ``suspect``: garbage that waits for its collector is not kept.

        Where there is much of it, it comes about while loads run and goes at any other time, so that nothing can be
        said of what was added up: counting begins anew, with garbage collected before each look.
        """
        if self._garbage is None:
            return self.bytes
        gc.collect()
        grown, garbage = self._grown, self._garbage.bytes
        if grown > self._mark[0]:  # what the collector found first may be anybody's
            grown, garbage = grown - self._mark[0], garbage - self._mark[1]
        if not self._collects and garbage > MUCH * grown:
            self._collects = True
            self._grown = self._swung = self._looks = 0
            self._loads = self._seen = 0
        return self.bytes


class _Garbage:
    """Counts the bytes that the garbage collector frees, for as long as it is kept."""

    def __init__(self, heap: Callable[[], int]) -> None:
        self.bytes = 0
        self._heap = heap
        self._before = 0
        itself = weakref.ref(self, lambda _: gc.callbacks.remove(told))

        def told(phase: str, _: dict[str, int]) -> None:
            if (garbage := itself()) is not None:
                garbage._told(phase)

        gc.callbacks.append(told)

    def _told(self, phase: str) -> None:
        if phase == "start":
            self._before = self._heap()
        else:
            self.bytes += max(0, self._before - self._heap())
