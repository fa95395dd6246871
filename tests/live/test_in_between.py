"""What comes in the middle of handing out a batch: a close, another state, a signal, a fork."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import Feed, LeaseError
from penstock._core.engine import Engine
from penstock._core.epoch import Epoch


@pytest.mark.filterwarnings("ignore:the consumer holds")
def test_a_batch_that_is_being_copied_while_the_feed_is_closed_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody has leased is given back when a feed is closed, but not from under a copy."""
    ones = penstock.arrays(np.ones((64, 100_000), np.float32))
    copied = Epoch._copied
    with Feed(ones, batch_size=4, memory="64 MiB", num_workers=0) as feed:

        def close_first(self: Epoch, array: Any) -> Any:
            closing = threading.Thread(target=feed.close)
            closing.start()
            closing.join()
            return copied(self, array)

        monkeypatch.setattr(Epoch, "_copied", close_first)
        batches = iter(feed)
        kept = [next(batches)]
        while not feed.stats.copied:
            kept.append(next(batches))
        with pytest.raises(penstock.FeedClosed):
            next(batches)
    assert all(batch.all() for batch in kept)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iteration_that_another_state_ends_is_told_so(workers: int) -> None:
    """It would else seem to be complete, and the feed to be in the next epoch."""
    with Feed(range(100), np.int64, batch_size=10, memory="256 MiB", num_workers=workers) as feed:
        older = iter(feed)
        for _ in range(3):
            next(older)
        state = feed.state_dict()
        next(older)
        feed.load_state_dict(state)
        with pytest.raises(LeaseError, match="or by load_state_dict"):
            next(older)
        assert feed.state_dict() == state
        assert [batch[0] for batch in feed] == list(range(30, 100, 10))


def test_a_feed_that_a_signal_handler_closes_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever moment the signal comes at: in the middle of the books, it is closed right after that."""
    feed = Feed(range(100), np.int64, batch_size=10, memory="256 MiB", num_workers=1)
    batches = iter(feed)
    next(batches)
    assert feed._launched is not None
    pids = feed._launched.engine.crew.pids()
    lease = Engine._lease

    def interrupted(self: Engine, chunk: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return lease(self, chunk)

    before = signal.signal(signal.SIGUSR1, lambda *_: feed.close())
    try:
        monkeypatch.setattr(Engine, "_lease", interrupted)
        assert next(batches).tolist() == list(range(10, 20))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert pids
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    with pytest.raises(penstock.FeedClosed):
        next(batches)


@pytest.mark.parametrize("options", [{}, {"on_error": "skip"}, {"samples_per_item": None}], ids=str)
def test_a_batch_that_nobody_got_was_not_handed_out(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the last moment: a state that is saved then goes on with that batch."""

    def load(item: int) -> Any:
        return iter([np.int64(item)]) if "samples_per_item" in options else np.int64(item)

    def interrupted(_: Engine) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with Feed(range(100), load, batch_size=10, memory="64 MiB", num_workers=0, **options) as feed:
        batches = iter(feed)
        next(batches)
        state = feed.state_dict()
        monkeypatch.setattr(Engine, "catch_up", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        assert feed.state_dict() == state


def test_items_of_a_stream_that_nobody_got_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A one-time stream cannot be asked for them a second time."""

    def interrupted(_: Engine) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with Feed(iter(range(40)), np.int64, batch_size=10, memory="64 MiB", num_workers=0) as feed:
        batches = iter(feed)
        found = next(batches).tolist()
        monkeypatch.setattr(Engine, "catch_up", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        for batch in feed:
            found += batch.tolist()
    assert found == list(range(40))


@pytest.mark.parametrize("options", [{}, {"on_error": "skip"}, {"samples_per_item": None}], ids=str)
def test_a_collate_fn_draws_the_same_after_a_resume(options: Any) -> None:
    """Its randomness belongs to the batch, not to where an iteration began."""

    def load(item: int) -> Any:
        return iter([item]) if "samples_per_item" in options else item

    def collate(samples: list[int]) -> Any:
        return np.array(samples), float(penstock.rng().random())

    def feed() -> Feed:
        return Feed(range(40), load, batch_size=4, memory="64 MiB", num_workers=0, collate_fn=collate, **options)

    with feed() as whole:
        batches = iter(whole)
        for _ in range(3):
            next(batches)
        state = whole.state_dict()
        wanted = [drawn for _, drawn in batches]
    with feed() as rest:
        rest.load_state_dict(state)
        assert [drawn for _, drawn in rest] == wanted


def test_a_process_that_was_forked_off_gets_no_batch_in_the_middle_of_a_slot() -> None:
    """Its parent goes on to write there."""
    with Feed(penstock.arrays(np.arange(4000)), batch_size=8, memory="64 MiB") as feed:
        batches = iter(feed)
        for _ in range(20):
            next(batches)
        if (child := os.fork()) == 0:
            try:
                next(batches)
            except LeaseError:
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert sum(1 for _ in batches) == 480


def test_what_was_skipped_is_told_in_the_same_words_however_often_it_is_saved() -> None:
    """A job that is resumed every hour would else save longer and longer ones."""

    def load(item: int) -> Any:
        if item == 3:
            raise ValueError("no such picture")
        return np.int64(item)

    states = []
    state: dict[str, Any] | None = None
    for _ in range(3):
        with Feed(range(40), load, batch_size=4, memory="64 MiB", num_workers=0, on_error="skip") as feed:
            if state is not None:
                feed.load_state_dict(state)
            next(iter(feed))
            state = feed.state_dict()
            states.append(state["skipped"])
    assert states == [[[3, "ValueError: no such picture"]]] * 3
