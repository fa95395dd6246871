"""What becomes of an item that cannot be loaded: raise, skip, try again."""

from __future__ import annotations

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import Feed, LoadError, PenstockError, Retry, SpecError
from tests.live.crews import each_crew, feed_of

BAD = {3, 4, 17, 30, 31, 32, 39}


def fails(i: int) -> Any:
    if i in BAD:
        raise ValueError(f"no sample {i}")
    return np.full(3, i)


class Unpicklable(Exception):
    """Has something with it that cannot travel, and a constructor that cannot be called again."""

    def __init__(self, i: int, name: str) -> None:
        super().__init__(f"item {i} of {name}")
        self.open = (j for j in range(i))


def fails_oddly(i: int) -> Any:
    if i == 5:
        raise Unpicklable(i, "here")
    return np.full(3, i)


def first_values(feed: Feed, seen: list[int]) -> None:
    """Add what comes to ``seen``, as far as it comes."""
    for batch in feed:
        seen += batch[:, 0].tolist()


# --------------------------------------------------------------------------------------------------------------- raise


@each_crew
def test_raise_names_the_item_and_keeps_the_users_exception(crew: str) -> None:
    """Batches before it come first; the traceback that is printed shows the line of the load, wherever that ran."""
    seen: list[int] = []
    with feed_of(crew, range(40), fails, batch_size=2) as feed, pytest.raises(LoadError) as caught:
        first_values(feed, seen)
    assert seen == [0, 1]
    assert caught.value.item == 3
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.__cause__.args == ("no sample 3",)
    told = "".join(traceback.format_exception(caught.value))
    assert 'raise ValueError(f"no sample {i}")' in told
    assert "load failed for 3: ValueError: no sample 3" in told


@each_crew
def test_an_exception_that_cannot_travel_is_told_all_the_same(crew: str) -> None:
    """Its words and where it was raised, at least."""
    with feed_of(crew, range(40), fails_oddly) as feed, pytest.raises(LoadError, match="item 5 of here") as caught:
        first_values(feed, [])
    assert caught.value.item == 5
    told = "".join(traceback.format_exception(caught.value))
    assert 'raise Unpicklable(i, "here")' in told


def test_an_exception_that_carries_its_data_is_told_in_short() -> None:
    """A message of fifty megabytes has no room on its way, and is no fault of the texts of a batch."""

    def load(i: int) -> Any:
        if i == 9:
            raise ValueError("x" * 50_000_000)
        return np.full(4, i)

    with feed_of("process", range(24), load) as feed, pytest.raises(LoadError, match="load failed for 9: ") as caught:
        first_values(feed, [])
    assert caught.value.item == 9
    assert "ValueError: xxx" in str(caught.value)
    assert "(50,000,000 characters)" in str(caught.value)
    assert len("".join(traceback.format_exception(caught.value))) < 100_000
    with feed_of("process", range(24), load, on_error="skip") as feed:
        seen: list[int] = []
        first_values(feed, seen)
        assert seen == [i for i in range(24) if i != 9]
        assert [item for item, _ in feed.stats.skipped] == [9]


@each_crew
@pytest.mark.parametrize("collate_fn", [None, "list"])
def test_only_the_failed_item_of_a_one_time_stream_is_gone(crew: str, collate_fn: Any) -> None:
    """Nobody can ask for the others again: they come when the feed is iterated further."""
    seen: list[int] = []
    told: list[int] = []
    with feed_of(crew, iter(range(40)), fails, collate_fn=collate_fn) as feed:
        while len(told) <= len(BAD):
            try:
                for batch in feed:
                    seen += [int(sample[0]) for sample in batch]
                break
            except LoadError as error:
                told.append(error.item)
    assert seen == [i for i in range(40) if i not in BAD]
    assert told == sorted(BAD)


# ---------------------------------------------------------------------------------------------------------------- skip


@each_crew
@pytest.mark.parametrize("size", [1, 4, 7])
@pytest.mark.parametrize("drop_last", [False, True])
def test_skip_keeps_order_and_full_batches_whoever_loads(crew: str, size: int, drop_last: bool) -> None:
    """Only the last batch may be short, and what was left out is on record in its order, with its error."""
    good = [i for i in range(50) if i not in BAD]
    with feed_of(crew, range(50), fails, batch_size=size, on_error="skip", drop_last=drop_last) as feed:
        sizes, seen = [], []
        for batch in feed:
            sizes.append(len(batch))
            seen += batch[:, 0].tolist()
        end = len(good) - len(good) % size if drop_last else len(good)
        assert seen == good[:end]
        assert set(sizes[:-1]) <= {size}
        assert [item for item, _ in feed.stats.skipped] == sorted(BAD)
        assert all(isinstance(error, ValueError) for _, error in feed.stats.skipped)
        assert str(feed.stats.skipped[0][1]) == "no sample 3"


def grows_or_fails(i: int) -> str:
    if i % 5 == 4:
        raise ValueError(i)
    return f"{i}:" + "x" * (10 if i < 40 else 5000 + i % 7)


@each_crew
@pytest.mark.parametrize("size", [7, 8])
def test_texts_that_grow_are_right_where_items_are_left_out(crew: str, size: int) -> None:
    """A row that was left out has the length of what stood there before, which may be too long for its cell."""
    with feed_of(crew, range(600), grows_or_fails, batch_size=size, on_error="skip", memory="256 MiB") as feed:
        seen = [text for epoch in feed.epochs(2) for batch in epoch for text in batch]
    assert seen == 2 * [grows_or_fails(i) for i in range(600) if i % 5 != 4]


@each_crew
def test_skip_ends_with_the_users_error_when_everything_fails(crew: str) -> None:
    """From the first item on, or from the middle: after a hundred in a row, not after all of them."""

    def never(i: int) -> Any:
        raise OSError(f"gone: {i}")

    def soon(i: int) -> Any:
        if i >= 40:
            raise OSError(f"gone: {i}")
        return np.full(3, i)

    for load, first in ((never, 0), (soon, 40)):
        with (
            feed_of(crew, range(5000), load, on_error="skip") as feed,
            pytest.raises(LoadError, match=r"the last \d+ items all failed.*OSError: gone: \d+") as caught,
        ):
            first_values(feed, [])
        assert isinstance(caught.value.__cause__, OSError)
        assert first + 99 <= caught.value.item < first + 600


@each_crew
@pytest.mark.parametrize("size", [1, 16, 256])
@pytest.mark.parametrize("run", [99, 100])
def test_the_cap_counts_items_that_follow_each_other(crew: str, size: int, run: int) -> None:
    """Whatever batches they are in and whoever loads them: 99 are left out, 100 are an error."""

    def load(i: int) -> Any:
        if 150 <= i < 150 + run:
            raise OSError(f"gone: {i}")
        return np.full(3, i)

    with feed_of(crew, range(600), load, batch_size=size, on_error="skip") as feed:
        if run == 99:
            seen: list[int] = []
            first_values(feed, seen)
            assert seen == [i for i in range(600) if not 150 <= i < 249]
        else:
            with pytest.raises(LoadError, match=r"the last 100 items all failed"):
                first_values(feed, [])


@each_crew
def test_skip_says_why_when_there_are_few_items_and_all_fail(crew: str) -> None:
    """Fewer than a hundred: the end of the items is as good a reason."""
    with (
        feed_of(crew, [3, 4, 17], fails, on_error="skip") as feed,
        pytest.raises(LoadError, match=r"the last 3 items all failed.*the last was 17: ValueError: no sample 17"),
    ):
        first_values(feed, [])


@each_crew
def test_a_sample_of_another_form_is_never_skipped_silently_into_a_batch(crew: str) -> None:
    """It is an error like any other: raised by default, left out if asked for."""

    def load(i: int) -> Any:
        return np.zeros(4 if i == 9 else 3)

    with feed_of(crew, range(20), load) as feed, pytest.raises(SpecError, match="9"):
        first_values(feed, [])
    with feed_of(crew, range(20), load, on_error="skip") as feed:
        assert sum(len(batch) for batch in feed) == 19
        assert [item for item, _ in feed.stats.skipped] == [9]


# --------------------------------------------------------------------------------------------------------------- retry


@each_crew
@pytest.mark.parametrize("then", ["raise", "skip"])
def test_retry_tries_as_often_as_it_says(crew: str, then: Any, tmp_path: Path) -> None:
    """An item that comes the third time is there; one that never does is raised or left out, with its last error."""

    def load(i: int) -> Any:
        with (tmp_path / "tries").open("a") as file:
            file.write(f"{i}\n")
        tried = (tmp_path / "tries").read_text().split().count(str(i))
        if i == 21 or (i == 13 and tried < 3):
            raise TimeoutError(f"try {tried} of {i}")
        return np.full(3, i)

    retry = Retry(2, then=then, wait_s=0.001)
    with feed_of(crew, range(30), load, on_error=retry) as feed:
        seen: list[int] = []
        if then == "raise":
            with pytest.raises(LoadError) as caught:
                first_values(feed, seen)
            assert (caught.value.item, str(caught.value.__cause__)) == (21, "try 3 of 21")
            assert seen == list(range(20))
        else:
            first_values(feed, seen)
            assert seen == [i for i in range(30) if i != 21]
            assert [(item, str(error)) for item, error in feed.stats.skipped] == [(21, "try 3 of 21")]
    tries = Counter((tmp_path / "tries").read_text().split())
    assert (tries["13"], tries["21"]) == (3, 3)


@pytest.mark.parametrize(
    ("arguments", "keywords", "kind", "words"),
    [
        (("x",), {}, TypeError, "whole number"),
        ((True,), {}, TypeError, "whole number"),
        ((0,), {}, ValueError, "would never try again"),
        ((2,), {"then": "ignore"}, ValueError, '"raise" or "skip"'),
    ],
)
def test_a_retry_that_makes_no_sense_is_refused_at_once(arguments: Any, keywords: Any, kind: Any, words: str) -> None:
    """Where it is written, not where the first item fails."""
    with pytest.raises(kind, match=words):
        Retry(*arguments, **keywords)


def test_an_unknown_way_is_refused_at_once() -> None:
    """With the ways that there are."""
    with pytest.raises((TypeError, ValueError), match='"raise", "skip"'):
        Feed(range(3), fails, batch_size=2, on_error="ignore")  # type: ignore[arg-type]
    with pytest.raises(PenstockError), feed_of("inline", [], fails) as feed:
        feed.plan  # noqa: B018 - nothing to plan for


@pytest.mark.parametrize("size", [2, 3, 4, 6])
@pytest.mark.parametrize("each", [3, None])
@each_crew
def test_what_an_item_gave_before_it_failed_is_handed_out(crew: str, each: int | None, size: int) -> None:
    """Whatever the size of a batch, and whether or not the number of its samples is known."""

    def late(item: int) -> Any:
        for number in range(3):
            if item == 1 and number == 2:
                raise ValueError("late")
            yield np.int64(item * 10 + number)

    with feed_of(crew, range(4), late, batch_size=size, on_error="skip", samples_per_item=each) as feed:
        samples = [int(sample) for batch in feed for sample in batch]
        assert [item for item, _ in feed.stats.skipped] == [1]
    assert samples == [0, 1, 2, 10, 11, 20, 21, 22, 30, 31, 32]


@pytest.mark.parametrize(
    ("crew", "source"), [("inline", True), ("thread", True), ("process", True), ("process", False)]
)
def test_another_try_is_given_the_item_as_it_was(crew: str, source: bool, tmp_path: Path) -> None:
    """A load may work in place: what its first try had changed was changed once more by the second."""

    def load(item: Any) -> Any:
        x, y = item
        x *= 2
        tried = tmp_path / str(int(y))
        if not tried.exists():
            tried.touch()
            raise OSError("once")
        return x, y

    x, y = np.ones((40, 4)), np.arange(40)
    items: Any = penstock.arrays(x, y) if source else [(np.ones(4), number) for number in y.tolist()]
    with feed_of(crew, items, load, batch_size=8, on_error=Retry(2, wait_s=0.001)) as feed:
        assert all((batch == 2).all() for batch, _ in feed)
    assert len(list(tmp_path.iterdir())) == 40
