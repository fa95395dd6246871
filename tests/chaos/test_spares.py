"""A fresh interpreter takes a while: where there is room, one waits to take the place of a worker that dies."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock import Feed, WorkerLost
from tests.chaos.test_deaths import kill, pids_of

COUNT = 100_000
PATIENCE_S = 60.0


def load(item: int) -> Any:
    time.sleep(1e-3)
    return np.array([item, os.getpid()])


def feed_of(memory: str) -> Feed:
    return Feed(range(COUNT), load, batch_size=16, num_workers=2, memory=memory, start_method="spawn")


def spare_of(feed: Feed, batches: Iterator[Any], seen: list[int], *, other_than: int = 0) -> int:
    """The process that waits, once there is one: there are four, with the template. Batches are taken meanwhile."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        seen += next(batches)[:, 0].tolist()
        pids = pids_of(feed)
        if len(pids) == 4 and pids[3] != other_than:
            return pids[3]
    raise AssertionError("nobody waits")


def test_the_one_that_waits_takes_the_place_of_one_that_dies_and_another_waits() -> None:
    with feed_of("512 MiB") as feed:
        batches = iter(feed)
        seen: list[int] = next(batches)[:, 0].tolist()
        assert "is kept ready" in str(feed.plan)
        assert feed.plan.total_bytes <= feed.plan.memory
        spare = spare_of(feed, batches, seen)
        for _ in range(2):
            kill(pids_of(feed)[1])
            new: set[int] = set()
            while spare not in new:
                batch = next(batches)
                seen += batch[:, 0].tolist()
                new |= set(batch[:, 1].tolist())
            spare = spare_of(feed, batches, seen, other_than=spare)
        assert seen == list(range(len(seen)))
        assert feed.stats.restarts == 2
        assert feed.stats.peak_bytes <= feed.plan.memory


def test_one_that_dies_while_it_waits_is_replaced_and_not_for_ever() -> None:
    with feed_of("512 MiB") as feed:
        batches = iter(feed)
        seen: list[int] = next(batches)[:, 0].tolist()
        spare = 0
        for _ in range(3):
            spare = spare_of(feed, batches, seen, other_than=spare)
            kill(spare)
        for _ in range(100):
            seen += next(batches)[:, 0].tolist()
        assert pids_of(feed)[3:] in ([], [spare])
        assert seen == list(range(len(seen)))
        assert feed.stats.restarts == 0


def test_without_room_for_it_nobody_waits() -> None:
    with feed_of("160 MiB") as feed:
        next(iter(feed))
        assert "is kept ready" not in str(feed.plan)
        assert len(pids_of(feed)) == 3


def test_with_its_template_the_one_that_waits_goes_too() -> None:
    with feed_of("512 MiB") as feed:
        batches = iter(feed)
        seen: list[int] = next(batches)[:, 0].tolist()
        spare = spare_of(feed, batches, seen)
        kill(pids_of(feed)[0])
        spare_of(feed, batches, seen, other_than=spare)
        assert seen == list(range(len(seen)))


def test_a_template_that_is_ended_again_and_again_is_said_to_have_worked_before() -> None:
    def slow(item: int) -> Any:
        time.sleep(0.3)
        return np.zeros(4)

    with Feed(range(64), slow, batch_size=16, num_workers=2, memory="512 MiB") as feed:
        batches = iter(feed)
        error = None
        try:
            next(batches)
            until = time.monotonic() + PATIENCE_S
            while time.monotonic() < until:
                kill(pids_of(feed)[0])
                feed._launched.engine.crew.take()  # type: ignore[union-attr]
        except WorkerLost as lost:
            error = lost
        assert "times before anything was finished, the last time with signal SIGKILL" in str(error)
        assert "find out who ends it" in str(error)
