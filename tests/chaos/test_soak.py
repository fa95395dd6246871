"""An hour of use in seconds: epochs, feeds and early stops by the hundred, and what the process has afterwards.

Counts, not times: processes, threads and descriptors are what they were, and memory does not grow with the number of
rounds. The long form is as the promise says; the short one, the same in a tenth, runs every time.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import psutil
import pytest

from penstock import Feed
from penstock._core import machine
from penstock._core.budget import MiB

# What malloc keeps, caches of Python's own, a dict that doubled: none of it grows with the rounds.
SLACK_BYTES: Final = MiB(3)
CREWS: Final[dict[str, dict[str, Any]]] = {
    "inline": {"num_workers": 0},
    "thread": {"num_workers": 2, "executor": "thread"},
    "process": {"num_workers": 2, "start_method": "fork"},
}
SHORT: Final = {"epochs": 100, "feeds": 12, "stops": 20}
LONG: Final = {"epochs": 1000, "feeds": 300, "stops": 200}


@dataclasses.dataclass(frozen=True)
class Held:
    """What this process has."""

    children: int
    threads: int
    descriptors: int
    mappings: int
    private_bytes: int

    @classmethod
    def now(cls, *others: int) -> Held:
        gc.collect()
        pids = (os.getpid(), *others)
        with open("/proc/self/maps") as maps:
            shared = sum("memfd:penstock" in line or "/dev/zero" in line for line in maps)
        return cls(
            len(psutil.Process().children(recursive=True)),
            threading.active_count(),
            len(os.listdir("/proc/self/fd")),
            shared,
            sum(machine.private_bytes(pid) for pid in pids),
        )

    def counts(self) -> tuple[int, ...]:
        return (self.children, self.threads, self.descriptors, self.mappings)


def flat(turn: Callable[[], object], rounds: int, look: Callable[[], Held] = Held.now) -> None:
    """Do it a tenth of the time to warm up, look, do it so often, look again."""
    for _ in range(max(5, rounds // 10)):
        turn()
    before = look()
    for _ in range(rounds):
        turn()
    after = look()
    assert after.counts() == before.counts()
    grown = after.private_bytes - before.private_bytes
    assert grown < SLACK_BYTES, f"{grown} bytes more after {rounds} rounds"


def small(crew: str, items: Any = range(64)) -> Feed:
    def load(item: int) -> Any:  # here, so that it travels by value
        return np.full(64, item)

    return Feed(items, load, batch_size=8, memory="256 MiB", **CREWS[crew])


def soak(crew: str, epochs: int, feeds: int, stops: int) -> None:
    with small(crew) as feed:

        def epoch() -> None:
            assert sum(int(batch[0, 0]) for batch in feed) == sum(range(0, 64, 8))

        def everyone() -> Held:
            assert feed._engine is not None
            return Held.now(*feed._engine.crew.pids())

        flat(epoch, epochs, everyone)

    def one_feed() -> None:
        with small(crew) as feed:
            assert int(next(iter(feed))[0, 0]) == 0

    flat(one_feed, feeds)

    with small(crew, itertools.count()) as endless:

        def stop_early() -> None:
            for number, _ in enumerate(endless):
                if number == 3:
                    break

        flat(stop_early, stops)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="reads /proc")
def test_a_short_soak_of_processes_leaves_everything_flat() -> None:
    """A small part of what is promised."""
    soak("process", **SHORT)


@pytest.mark.timeout(600)
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="reads /proc")
@pytest.mark.slow
@pytest.mark.parametrize("crew", CREWS)
def test_a_thousand_epochs_three_hundred_feeds_two_hundred_stops_leave_everything_flat(crew: str) -> None:
    """As promised."""
    soak(crew, **LONG)
