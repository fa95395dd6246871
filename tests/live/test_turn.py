"""Between two epochs without workers: the first slot of the next is leased before this one's last batch is used."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import Feed, FeedClosed, LeaseError

BATCH = 8


def rows(count: int) -> Feed:
    """A feed whose epochs turn that way: many small batches share a slot, and this process gathers them."""
    values = np.arange(count * 3, dtype=np.int32).reshape(count, 3)
    return Feed(penstock.arrays(values, np.arange(count)), batch_size=BATCH, memory="64 MiB", shuffle=True, seed=5)


def order(count: int, epochs: int) -> list[list[int]]:
    """What comes in which epoch, asked of feeds that are made anew for each."""
    found = []
    for number in range(epochs):
        with rows(count) as feed:
            feed.set_epoch(number)
            found.append([int(i) for _, numbers in feed for i in numbers])
    return found


def held(feed: Feed) -> int:
    engine: Any = feed._launched.engine  # type: ignore[union-attr]
    gc.collect()
    return int(engine.held)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("count", [1, BATCH, BATCH + 1, 2 * BATCH, 5 * BATCH + 3, 4000, 20_001])
@pytest.mark.filterwarnings("ignore:the consumer holds")
def test_epochs_that_follow_each_other_give_what_each_gives_alone(count: int, keeps: bool) -> None:
    """A first batch that was made ahead of its epoch would else be another one, or overwritten while it is held."""
    found: list[list[int]] = []
    kept: list[Any] = []
    with rows(count) as feed:
        for epoch in feed.epochs(4):
            found.append([])
            for values, numbers in epoch:
                assert (values[:, 0] == 3 * numbers).all()
                found[-1] += numbers.tolist()
                if keeps:
                    kept.append((values, numbers))
        assert feed.stats.samples == 4 * count
    assert found == order(count, 4)
    assert all((values[:, 2] == 3 * numbers + 2).all() for values, numbers in kept)


def test_the_first_batch_is_made_before_the_last_one_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests around it test nothing."""
    # Whatever a busy machine takes for the rows.
    monkeypatch.setattr("penstock._core.engine.TURN_S", float("inf"))
    monkeypatch.setattr("penstock._core.engine.EAGER_S", float("inf"))
    with rows(4000) as feed:
        epochs = feed.epochs(3)
        for _ in next(epochs):
            pass
        first = feed._launched.engine._units[0].chunks[0]  # type: ignore[union-attr]
        assert first.made is not None
        values, _ = next(iter(next(epochs)))
        assert np.shares_memory(values, first.made.leaves[0])


def test_what_was_made_ahead_is_given_back_when_nobody_wants_it() -> None:
    """A slot that stays leased for ever is memory that the budget paid for in vain."""
    with rows(4000) as feed:
        for epoch in feed.epochs(3):
            for _ in epoch:
                pass
            break
        del epoch, _
        assert held(feed) == 0
        assert [int(i) for _, numbers in feed for i in numbers] == order(4000, 2)[1]


def test_the_state_between_two_epochs_is_that_of_the_next_ones_beginning() -> None:
    """What was made ahead was not handed out."""
    with rows(4000) as feed:
        epochs = feed.epochs(3)
        for _ in next(epochs):
            pass
        state = feed.state_dict()
        assert (state["epoch"], state["position"]) == (1, 0)
    with rows(4000) as other:
        other.load_state_dict(state)
        assert [int(i) for _, numbers in other for i in numbers] == order(4000, 2)[1]


def test_a_feed_that_is_closed_at_the_last_batch_says_so() -> None:
    """The end of an epoch is known beforehand, and is none where something else is to be said."""
    feed = rows(4000)
    batches = next(feed.epochs(2))
    for _ in range(4000 // BATCH):
        next(batches)
    feed.close()
    with pytest.raises(FeedClosed):
        next(batches)


def test_an_epoch_that_was_replaced_at_its_last_batch_says_so() -> None:
    """It would else seem complete, and the newer one share its place."""
    with rows(4000) as feed:
        older = next(feed.epochs(2))
        for _ in range(4000 // BATCH):
            next(older)
        newer = iter(feed)
        next(newer)
        with pytest.raises(LeaseError, match="ended by a newer one"):
            next(older)
