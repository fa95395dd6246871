"""Rows in memory are gathered by a thread while the consumer is busy, and by the consumer itself where it is not."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import Feed
from penstock._core import engine
from penstock._core.crew import inline
from penstock._core.fill import Filler

N = 40_000
X = np.arange(N * 16, dtype=np.int64).reshape(N, 16)


def helpers() -> int:
    return sum(thread.name == "penstock-ahead" for thread in threading.enumerate())


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the consumer does, it counts as busy."""
    monkeypatch.setattr(engine, "EAGER_SHARE", 0.0)
    monkeypatch.setattr(engine, "EAGER_S", 0.0)


def feed_of(**options: Any) -> Feed:
    return Feed(penstock.arrays(X), batch_size=100, memory="64 MiB", seed=3, shuffle=True, **options)


def rows_of(batches: Any) -> list[int]:
    seen: list[int] = []
    for batch in batches:
        assert (batch == batch[:, :1] + np.arange(16)).all()
        seen += (batch[:, 0] // 16).tolist()
    return seen


def test_a_consumer_that_is_busy_has_a_thread_and_one_that_is_not_has_none() -> None:
    """The thread takes the GIL and a core: only for what is won by it."""
    with feed_of() as feed:
        assert feed.plan.workers == 0
        for batch in feed:
            del batch
        assert helpers() == 0
        for _ in feed:
            time.sleep(1e-3)
        assert helpers() == 1
    assert helpers() == 0


@pytest.mark.parametrize("workers", [0, 1])
def test_who_says_how_many_workers_there_are_has_no_more(workers: int, eager: None) -> None:
    with feed_of(num_workers=workers) as feed:
        assert len(rows_of(feed)) == N
        assert helpers() == 0


def test_batches_are_the_same_in_every_epoch_whoever_gathers(eager: None) -> None:
    """Both take from the same tasks: none may be done twice, or by nobody."""
    with feed_of() as feed, feed_of(num_workers=0) as plain:
        for _ in range(4):
            assert rows_of(feed) == rows_of(plain)
        assert helpers() == 1
        with pytest.warns(penstock.ResourceHeld):
            kept = list(feed)  # copies, once all slots are held
        assert rows_of(kept) == rows_of(plain)


def test_epochs_that_are_left_and_resumed_go_on_with_the_next_sample(eager: None) -> None:
    """What the thread is at when the order changes is not what comes next."""
    with feed_of() as plain:
        whole = rows_of(plain) + rows_of(plain)
    for stop in (1, 2, 7, 63, 399, 400):
        with feed_of() as feed:
            batches = iter(feed)
            seen = [row for _ in range(stop) for row in rows_of([next(batches)])]
            state = feed.state_dict()
            with feed_of() as other:
                other.load_state_dict(state)
                rest = [*rows_of(other), *(rows_of(other) if stop < 400 else ())]
            assert seen + rest == whole
            feed.load_state_dict(state)
            rest = [*rows_of(feed), *(rows_of(feed) if stop < 400 else ())]
            assert seen + rest == whole


def test_a_feed_that_is_left_in_the_middle_ends_its_thread(eager: None) -> None:
    """Closed, or only forgotten."""
    feed = feed_of()
    next(iter(feed))
    next(iter(feed))
    assert helpers() == 1
    feed.close()
    assert helpers() == 0
    feed = feed_of()
    batches = iter(feed)
    next(batches), next(batches)
    del feed, batches  # what is left behind is looked at after the test


def test_what_goes_wrong_in_the_thread_is_raised_where_the_consumer_is(
    eager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that ended would have the consumer wait for ever."""

    def fails(filler: Any, task: Any, ask: Any) -> Any:
        raise MemoryError("no room for rows")

    monkeypatch.setattr(Filler, "do", fails)
    with feed_of() as feed, pytest.raises(penstock.LoadError, match="no room for rows"):
        rows_of(feed)


def test_without_a_thread_to_be_had_the_consumer_gathers(eager: None, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "penstock-ahead":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with feed_of() as feed:
        assert sorted(rows_of(feed)) == list(range(N))


def test_an_interrupt_while_the_thread_is_at_it_loses_nothing(eager: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook Ctrl-C is followed by running the cell again."""
    take, calls = inline.InlineCrew.take, [0]

    def interrupted(crew: Any) -> Any:
        calls[0] += 1
        if calls[0] in (3, 8, 9):
            raise KeyboardInterrupt
        return take(crew)

    with feed_of() as feed, feed_of(num_workers=0) as plain:
        monkeypatch.setattr(inline.InlineCrew, "take", interrupted)
        whole = None
        for _ in range(6):
            try:
                whole = rows_of(feed)
            except KeyboardInterrupt:
                continue
        assert whole is not None
        assert sorted(whole) == list(range(N))
        monkeypatch.setattr(inline.InlineCrew, "take", take)
        assert sorted(rows_of(plain)) == sorted(whole)


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_while_the_thread_starts_leaves_none_behind(
    when: str, eager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    left = [1]

    def interrupted(thread: threading.Thread) -> None:
        ours = thread.name == "penstock-ahead" and left[0] > 0
        if not ours or when == "after":
            start(thread)
        if ours:
            left[0] -= 1
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with feed_of() as feed:
        with pytest.raises(KeyboardInterrupt):
            rows_of(feed)
        for _ in range(2):
            assert sorted(rows_of(feed)) == list(range(N))
    assert helpers() == 0
