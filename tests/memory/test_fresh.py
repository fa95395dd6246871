"""An item that finds no room in a worker is tried in a fresh one, before it is called too large."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from penstock import Feed, LoadError, MiB

_kept: list[Any] = []
BUDGET = "264 MiB"
# Longer than loads are tried for the plan, so that this is one: what several keep together would be what one needs.
LOAD_S = 0.022


def _keep(size: int) -> None:
    time.sleep(LOAD_S)
    _kept.append(np.ones(size // 8))


def leaks_30(i: int) -> Any:
    _keep(MiB(30))
    return np.full(16, i)


def leaks_and_gives_text(i: int) -> Any:
    _keep(MiB(30))
    return {"n": i, "text": f"text {i} " * (1 + i % 7 * 30)}


def leaks_5(i: int) -> Any:
    _keep(MiB(5))
    return np.full(1 + i % 3, i)


def gives_three(i: int) -> Iterator[Any]:
    for k in range(3):
        _keep(MiB(9))
        yield np.full(4, 10 * i + k)


def sometimes_greedy(i: int) -> Any:
    _keep(MiB(20))
    if i in (13, 27):
        np.ones(MiB(600) // 8)
    return np.full(16, i)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_load_that_keeps_most_of_its_room_at_once_loses_nothing(workers: int) -> None:
    """It leaks in one call what a worker may take in all: each item but the first of a worker fails there."""
    with Feed(range(40), leaks_30, batch_size=8, memory=BUDGET, num_workers=workers) as feed:
        assert [int(n) for batch in feed for n in batch[:, 0]] == list(range(40))
    assert feed.stats.restarts >= 5


def test_texts_of_items_before_the_one_without_room_arrive() -> None:
    """A task that two workers did one after the other is put together from both."""
    with Feed(range(40), leaks_and_gives_text, batch_size=8, memory=BUDGET, num_workers=2) as feed:
        seen = [(int(n), t) for batch in feed for n, t in zip(batch["n"], batch["text"], strict=True)]
    assert seen == [(i, f"text {i} " * (1 + i % 7 * 30)) for i in range(40)]


def test_collated_batches_and_flowing_samples_are_done_again_as_a_whole() -> None:
    """Their samples are in the memory of the worker that had no room, and go with it."""
    with Feed(range(60), leaks_5, batch_size=8, memory=BUDGET, num_workers=2, collate_fn="pad") as feed:
        assert [int(n) for batch in feed for n in batch.data[:, 0]] == list(range(60))
    with Feed(range(30), gives_three, samples_per_item=None, batch_size=8, memory=BUDGET, num_workers=2) as feed:
        assert [int(n) for batch in feed for n in batch[:, 0]] == [10 * i + k for i in range(30) for k in range(3)]
    assert feed.stats.restarts > 0


def test_what_is_too_large_for_a_fresh_worker_too_is_said_to_be() -> None:
    """The item is named, and that it was not the fault of others."""
    with (
        Feed(range(40), sometimes_greedy, batch_size=8, memory=BUDGET, num_workers=2) as feed,
        pytest.raises(
            LoadError, match=r"13.*600\. MiB.*and a fresh one had no room for it either: give more"
        ) as caught,
    ):
        for _ in feed:
            pass
    assert caught.value.item == 13


def test_only_what_is_too_large_for_a_fresh_worker_is_skipped() -> None:
    """Items that came after a leak are not left out for it."""
    with Feed(range(40), sometimes_greedy, batch_size=8, memory=BUDGET, num_workers=2, on_error="skip") as feed:
        assert [int(n) for batch in feed for n in batch[:, 0]] == [i for i in range(40) if i not in (13, 27)]
    assert [item for item, _ in feed.stats.skipped] == [13, 27]
