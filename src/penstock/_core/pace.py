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
_SPAN_S: Final = 4e-3  # a thread is begun in some 50 us, and the GIL changes hands every 5 ms at the latest

Once = Callable[[int], object]


def warm_s(once: Once, count: int) -> float:
    """Seconds of one load, when it has been done before; ``once(n)`` does the n-th of ``count``."""
    best, times = float("inf"), 1
    began = time.perf_counter()
    for _ in range(_ROUNDS + 1):
        start = time.perf_counter()
        for number in range(times):
            once(number % count)
        taken = time.perf_counter() - start
        best = min(best, taken / times)
        times = max(1, min(4096, int(_ROUND_S / max(best, 1e-7))))
        if time.perf_counter() - began > 4 * _ROUND_S * _ROUNDS:  # somebody else has the processor
            break
    return best


def side_by_side(once: Once, count: int, load_s: float) -> float | None:
    """How long two threads take that load at the same time, as a multiple of what one of them takes alone.

    1 is ideal, 2 means that they wait for each other. None if a load failed.
    """
    times = max(1, ceil(_SPAN_S / max(load_s, 1e-6)))
    rounds = _ROUNDS if load_s * times < 2 * _SPAN_S else 1
    alone = together = float("inf")
    for _ in range(rounds):
        one, two = _taken_s(once, count, times, 1), _taken_s(once, count, times, 2)
        if one is None or two is None:
            return None
        alone, together = min(alone, one), min(together, two)
    return together / alone


def _taken_s(once: Once, count: int, times: int, threads: int) -> float | None:
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
    gate.wait()
    began = time.perf_counter()
    for thread in crew:
        thread.join()
    return None if failed else time.perf_counter() - began
