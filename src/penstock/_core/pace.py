"""How fast a load is once it is warm, and whether two of them run side by side in threads.

Runs in the process that does the probe, never in the user's: a load that turns out not to be safe in threads can do no
harm there. It only takes times; what follows from them is decided by ``choice``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from math import ceil
from typing import Final

__all__ = ["MOST_S", "WARM_S", "side_by_side", "warm_s"]

WARM_S: Final = 1e-3  # a first call takes up to hundreds of microseconds more: only fast loads need a second look
MOST_S: Final = 0.1  # two threads are not tried for loads that are slower, for the consumer is waiting
_ROUND_S: Final = 0.5e-3
_ROUNDS: Final = 3  # of which the best counts: anything may be interrupted
_MOST_ROUNDS: Final = 6
_GOOD: Final = 1.1
_SPAN_S: Final = 4e-3  # a thread is begun in some 50 us, and the GIL changes hands every 5 ms at the latest

Once = Callable[[int], object]


def warm_s(once: Once, count: int) -> float:
    """Seconds of work of one load, when it has been done before; ``once(n)`` does the n-th of ``count``."""
    best, times = float("inf"), 1
    began = time.perf_counter()
    for _ in range(_ROUNDS + 1):
        start = time.thread_time()  # not the clock's: somebody else may have the processor
        for number in range(times):
            once(number % count)
        taken = time.thread_time() - start
        best = min(best, taken / times)
        times = max(1, min(4096, int(_ROUND_S / max(best, 1e-7))))
        if time.perf_counter() - began > 4 * _ROUND_S * _ROUNDS:  # somebody else has the processor
            break
    return best


def side_by_side(once: Once, count: int, load_s: float, *, waits: bool) -> float | None:
    """How long two threads take that load at the same time, as a multiple of what one of them takes alone.

    1 is ideal, 2 means that they wait for each other. None if a load failed. A load that ``waits`` is compared with one
    that is alone. One that works is compared with the processor time that both took: two that hold the GIL take all of
    it, however busy the machine is, so that a slow moment cannot make them look better than they are.
    """
    times = max(1, ceil(_SPAN_S / max(load_s, 1e-6)))
    alone_s, together_s, ratio = load_s * times, float("inf"), float("inf")
    # The best of some rounds, and no more of them than it takes to see that it is good.
    for _ in range(_MOST_ROUNDS if load_s * times < 5 * _SPAN_S else 2):
        two = _taken_s(once, count, times, 2)
        one = _taken_s(once, count, times, 1) if waits else (alone_s, 0.0)
        if one is None or two is None:
            return None
        alone_s, together_s = min(alone_s, one[0]), min(together_s, two[0])
        ratio = min(ratio, together_s / alone_s if waits else 2 * two[0] / max(two[1], 1e-9))
        if ratio < _GOOD:
            break
    return ratio


def _taken_s(once: Once, count: int, times: int, threads: int) -> tuple[float, float] | None:
    """Seconds by the clock and of the processor, for so many threads with so many loads each."""
    gate = threading.Barrier(threads + 1)
    failed = []

    def work(first: int) -> None:
        gate.wait()
        try:
            for number in range(first, first + times):
                once(number % count)
        except Exception as error:  # noqa: BLE001 - the user's code: what is wrong with it shows when it is used
            failed.append(error)

    crew = [threading.Thread(target=work, args=(number * times,), daemon=True) for number in range(threads)]
    for thread in crew:
        thread.start()
    # Before the gate opens: afterwards a thread may have worked for a while before this one is on again.
    began, cpu = time.perf_counter(), time.process_time()
    gate.wait()
    for thread in crew:
        thread.join()
    return None if failed else (time.perf_counter() - began, time.process_time() - cpu)
