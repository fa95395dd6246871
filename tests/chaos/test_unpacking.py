"""Items that do harm when they are unpacked in a worker, before any load: blamed one by one, not all of a task."""

from __future__ import annotations

import os
import sys
from multiprocessing import resource_tracker
from typing import Any

import pytest

from penstock import Feed, LoadError, WorkerLost
from tests.live.crews import drain

BAD = 6


@pytest.fixture(scope="module", autouse=True)
def pythons_own_process() -> None:
    """Python starts it once and keeps it: here, so that no test is charged for it."""
    resource_tracker.ensure_running()


class Item:
    """An identity that is made again in the worker, and there does what its number says."""

    def __init__(self, number: int, harm: str) -> None:
        self.number, self.harm = number, harm

    def __reduce__(self) -> tuple[Any, ...]:
        return make, (self.number, self.harm)

    def __repr__(self) -> str:
        return f"ITEM{self.number}"


def make(number: int, harm: str) -> Item:
    if number == BAD:
        if harm == "dies":
            os._exit(3)
        raise ValueError("cannot be made here")
    return Item(number, harm)


def feed_of(harm: str, **options: Any) -> Feed:
    items = [Item(number, harm) for number in range(20)]
    given: dict[str, Any] = {"num_workers": 2, "batch_size": 4, "memory": "256 MiB", **options}
    return Feed(items, lambda item: item.number, **given)


@pytest.mark.parametrize("portable", ["0", "1"])
@pytest.mark.parametrize("harm", ["dies", "raises"])
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(20, marks=pytest.mark.slow)])
def test_the_item_that_does_harm_is_skipped_and_no_other(
    portable: str, harm: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which of a task's items it is shows when each is unpacked by itself."""
    monkeypatch.setenv("PENSTOCK_PORTABLE", portable)
    seen: list[int] = []
    method: Any = {"start_method": "fork"} if portable == "1" else {}
    with feed_of(harm, batch_size=size, on_error="skip", **method) as feed:
        drain(feed, seen)
        assert seen == [number for number in range(20) if number != BAD]
        assert [repr(item) for item, _ in feed.stats.skipped] == [f"ITEM{BAD}"]


@pytest.mark.parametrize(("harm", "kind"), [("dies", WorkerLost), ("raises", LoadError)])
def test_the_item_that_does_harm_is_named(harm: str, kind: type[LoadError]) -> None:
    """And not the first of its batch."""
    with feed_of(harm) as feed, pytest.raises(kind, match=f"ITEM{BAD}") as caught:
        drain(feed, [])
    assert repr(caught.value.item) == f"ITEM{BAD}"


@pytest.mark.parametrize("action", ["raise", "skip"])
def test_a_load_that_exits_in_a_thread_fails_for_its_item(action: Any) -> None:
    """A thread is not to end, nor another item to be blamed."""

    def load(number: int) -> int:
        if number == BAD:
            sys.exit("bye")
        return number

    seen: list[int] = []
    options: dict[str, Any] = {"executor": "thread", "num_workers": 2, "batch_size": 4, "memory": "128 MiB"}
    with Feed(range(20), load, on_error=action, **options) as feed:
        if action == "raise":
            with pytest.raises(LoadError, match="bye") as caught:
                drain(feed, seen)
            assert caught.value.item == BAD
            return
        drain(feed, seen)
        assert seen == [number for number in range(20) if number != BAD]
        assert [item for item, _ in feed.stats.skipped] == [BAD]
