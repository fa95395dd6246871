"""A fresh interpreter takes a while: where there is room, some wait to take the places of workers that die."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Set
from typing import Any

import numpy as np
import pytest

from penstock import Feed, WorkerLost
from tests.chaos.test_deaths import kill, pids_of

COUNT = 100_000
PATIENCE_S = 60.0


def load(item: int) -> Any:
    time.sleep(1e-3)
    return np.array([item, os.getpid()])


def feed_of(memory: str) -> Feed:
    return Feed(range(COUNT), load, batch_size=16, num_workers=2, memory=memory, start_method="spawn")


def spares_of(feed: Feed, batches: Iterator[Any], seen: list[int], *, other_than: Set[int] = frozenset()) -> set[int]:
    """The processes that wait, once there are two that were not named. Batches are taken meanwhile."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        seen += next(batches)[:, 0].tolist()
        spares = set(pids_of(feed)[3:])  # after the template and two workers
        if len(spares) == 2 and not spares & other_than:
            return spares
    raise AssertionError("nobody waits")


def test_those_that_wait_take_the_places_of_those_that_die_and_others_wait() -> None:
    with feed_of("512 MiB") as feed:
        batches = iter(feed)
        seen: list[int] = next(batches)[:, 0].tolist()
        assert "2 more processes" in str(feed.plan)
        assert "kept ready" in str(feed.plan)
        assert feed.plan.total_bytes <= feed.plan.memory
        spares = spares_of(feed, batches, seen)
        for _ in range(2):
            for pid in pids_of(feed)[1:3]:
                kill(pid)
            new: set[int] = set()
            while not spares <= new:
                batch = next(batches)
                seen += batch[:, 0].tolist()
                new |= set(batch[:, 1].tolist())
            spares = spares_of(feed, batches, seen, other_than=spares)
        assert seen == list(range(len(seen)))
        assert feed.stats.restarts == 4
        assert feed.stats.peak_bytes <= feed.plan.memory


@pytest.mark.slow
def test_those_that_die_while_they_wait_are_replaced_and_not_for_ever() -> None:
    with feed_of("512 MiB") as feed:
        batches = iter(feed)
        seen: list[int] = next(batches)[:, 0].tolist()
        gone: set[int] = set()
        for _ in range(2):
            spares = spares_of(feed, batches, seen, other_than=gone)
            for pid in spares:
                kill(pid)
            gone |= spares
        for _ in range(100):
            seen += next(batches)[:, 0].tolist()
        assert pids_of(feed)[3:] == []
        assert seen == list(range(len(seen)))
        assert feed.stats.restarts == 0


def test_without_room_for_it_nobody_waits() -> None:
    with feed_of("160 MiB") as feed:
        next(iter(feed))
        assert "kept ready" not in str(feed.plan)
        assert len(pids_of(feed)) == 3


def test_with_some_room_one_waits() -> None:
    with feed_of("320 MiB") as feed:
        next(iter(feed))
        assert "one more process" in str(feed.plan)


def test_with_their_template_those_that_wait_go_too() -> None:
    with feed_of("512 MiB") as feed:
        batches = iter(feed)
        seen: list[int] = next(batches)[:, 0].tolist()
        spares = spares_of(feed, batches, seen)
        kill(pids_of(feed)[0])
        spares_of(feed, batches, seen, other_than=spares)
        assert seen == list(range(len(seen)))


@pytest.mark.slow
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
