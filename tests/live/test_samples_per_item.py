"""Items that give several samples, a fixed number or any, in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import LoadError, PenstockError, SpecError
from tests.live.crews import drain, each_crew, feed_of

COUNTS = [3, 0, 1, 0, 0, 7, 25, 2, 0, 4]


def _some(item: int) -> Iterator[dict[str, Any]]:
    for k in range(COUNTS[item]):
        yield {"x": np.array([item, k]), "name": f"{item}.{k}"}


EXPECTED = [[item, k] for item, count in enumerate(COUNTS) for k in range(count)]


def _rows(batches: Any) -> list[list[int]]:
    return [row.tolist() for batch in batches for row in batch["x"]]


# ---------------------------------------- a fixed number


@each_crew
@pytest.mark.parametrize(("each", "batch_size"), [(2, 8), (4, 4), (3, 8), (5, 3), (7, 1)])
def test_a_fixed_number_of_samples_comes_in_order_whether_or_not_it_divides_a_batch(
    crew: str, each: int, batch_size: int
) -> None:
    def load(item: int) -> Any:
        return ({"x": np.array([item, k]), "name": str(k)} for k in range(each))

    with feed_of(crew, range(10), load, samples_per_item=each, batch_size=batch_size) as feed:
        assert len(feed) == -(-10 * each // batch_size)
        sizes = []
        rows: list[tuple[list[int], str]] = []
        for batch in feed:
            sizes.append(len(batch["x"]))
            rows += zip(batch["x"].tolist(), batch["name"], strict=True)
    assert rows == [([item, k], str(k)) for item in range(10) for k in range(each)]
    assert sizes == [batch_size] * (10 * each // batch_size) + [10 * each % batch_size] * (10 * each % batch_size > 0)


@each_crew
def test_a_fixed_number_shuffles_items_and_keeps_their_samples_together(crew: str) -> None:
    def load(item: int) -> list[tuple[int, int]]:
        return [(item, k) for k in range(3)]

    with feed_of(crew, range(9), load, samples_per_item=3, batch_size=6, shuffle=True) as feed:
        items = [int(i) for batch in feed for i in batch[0]]
    assert items[::3] == items[1::3] == items[2::3] != list(range(9))
    assert sorted(items[::3]) == list(range(9))


@each_crew
@pytest.mark.parametrize("batch_size", [4, 3])
@pytest.mark.parametrize(("given", "came"), [(1, "only 1"), (3, "more"), (0, "only 0")])
def test_too_few_or_too_many_samples_are_an_error_that_names_the_item(
    crew: str, given: int, came: str, batch_size: int
) -> None:
    def load(item: str) -> Any:
        return iter([1.5] * (given if item == "wrong" else 2))

    items = ["a", "b", "c", "d", "e", "wrong", "f"]
    with (
        feed_of(crew, items, load, samples_per_item=2, batch_size=batch_size) as feed,
        pytest.raises(SpecError, match=f"load gave {came} samples for 'wrong', but samples_per_item=2.*None") as caught,
    ):
        for _ in feed:
            pass
    assert caught.value.item == "wrong"


def test_a_load_that_returns_one_sample_is_told_to_yield() -> None:
    for made, name in ((np.ones(3), "ndarray"), ({"x": 1}, "dict"), (3.0, "float"), ("text", "str")):
        with (
            feed_of("inline", range(4), lambda i, made=made: made, samples_per_item=2) as feed,
            pytest.raises(SpecError, match=f"returned a {name} for 0.*must return an iterator.*yield"),
        ):
            next(iter(feed))


# ---------------------------------------- any number


@each_crew
@pytest.mark.parametrize("batch_size", [1, 4, 9, 64])
def test_any_number_of_samples_comes_in_order_in_full_batches(crew: str, batch_size: int) -> None:
    with feed_of(crew, range(len(COUNTS)), _some, samples_per_item=None, batch_size=batch_size) as feed:
        for _ in range(2):
            sizes = []
            rows = []
            for batch in feed:
                sizes.append(len(batch["x"]))
                rows += batch["x"].tolist()
                assert batch["name"] == [f"{item}.{k}" for item, k in batch["x"].tolist()]
            assert rows == EXPECTED
            assert sizes == [batch_size] * (42 // batch_size) + [42 % batch_size] * (42 % batch_size > 0)


@each_crew
def test_drop_last_drops_what_does_not_fill_a_batch(crew: str) -> None:
    with feed_of(crew, range(len(COUNTS)), _some, samples_per_item=None, batch_size=10, drop_last=True) as feed:
        assert _rows(feed) == EXPECTED[:40]


def test_one_item_may_give_endlessly_many_samples_and_be_left_early() -> None:
    def load(item: int) -> Iterator[int]:
        k = 0
        while True:
            yield k
            k += 1

    for crew in ("inline", "thread", "process"):
        with feed_of(crew, range(3), load, samples_per_item=None) as feed:
            for _ in range(3):
                seen = []
                for batch in feed:
                    seen += batch.tolist()
                    if len(seen) >= 100:
                        break
                assert seen == list(range(100))


@each_crew
def test_the_randomness_of_an_item_goes_on_through_its_samples(crew: str) -> None:
    def load(item: int) -> Iterator[int]:
        for _ in range(item % 5):
            yield int(penstock.rng().integers(1 << 40))

    def drawn(crew: str) -> list[int]:
        with feed_of(crew, range(20), load, samples_per_item=None, batch_size=3, shuffle=True) as feed:
            return [int(number) for batch in feed for number in batch]

    assert drawn(crew) == drawn("inline")
    assert len(set(drawn(crew))) == 40


@each_crew
def test_a_one_time_stream_left_in_the_middle_of_an_item_goes_on_with_its_next_sample(crew: str) -> None:
    with feed_of(crew, iter(range(len(COUNTS))), _some, samples_per_item=None, batch_size=5) as feed:
        rows: list[list[int]] = []
        while len(rows) < len(EXPECTED):
            before = len(rows)
            for batch in feed:
                rows += batch["x"].tolist()
                break
            assert len(rows) > before
    assert rows == EXPECTED


@each_crew
def test_any_number_works_with_pad_list_and_a_callable(crew: str) -> None:
    def load(item: int) -> Iterator[Any]:
        for k in range(COUNTS[item]):
            yield np.full(k + 1, item)

    flat = [(item, k) for item, k in EXPECTED]
    options: dict[str, Any] = {"samples_per_item": None, "batch_size": 6}
    with feed_of(crew, range(len(COUNTS)), load, collate_fn="pad", **options) as feed:
        lengths = [int(n) for batch in feed for n in batch.lengths]
        assert lengths == [k + 1 for _, k in flat]
        assert feed.stats.samples == 42
    with feed_of(crew, range(len(COUNTS)), load, collate_fn="list", **options) as feed:
        assert [(int(s[0]), len(s) - 1) for batch in feed for s in batch] == flat
    with feed_of(
        crew, range(len(COUNTS)), load, collate_fn=lambda s: {"n": len(s), "sum": sum(map(np.sum, s))}, **options
    ) as feed:
        totals = list(feed)
    assert [int(t["n"]) for t in totals] == [6] * 7
    assert sum(int(t["sum"]) for t in totals) == sum(item * (k + 1) for item, k in flat)


@each_crew
def test_a_sample_of_another_form_in_the_middle_of_an_item_names_the_item(crew: str) -> None:
    def load(item: int) -> Iterator[Any]:
        yield np.ones(2)
        yield np.ones(3 if item == 5 else 2)

    with (
        feed_of(crew, range(9), load, samples_per_item=None, batch_size=3) as feed,
        pytest.raises(SpecError, match=r"the sample of 5 is float64\[3\], but the first sample was float64\[2\]"),
    ):
        for _ in feed:
            pass


@each_crew
def test_an_error_in_the_middle_of_an_item_names_the_item_after_the_batches_before_it(crew: str) -> None:
    def load(item: int) -> Iterator[int]:
        yield item
        if item == 5:
            raise OSError("unreadable")
        yield item

    with feed_of(crew, range(9), load, samples_per_item=None, batch_size=2) as feed:
        seen: list[int] = []
        with pytest.raises(LoadError, match="load failed for 5: OSError: unreadable") as caught:
            drain(feed, seen)
    assert caught.value.item == 5
    assert seen == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_items_of_which_none_gives_a_sample_are_told() -> None:
    with (
        feed_of("inline", range(5), lambda i: [], samples_per_item=None) as feed,
        pytest.raises(PenstockError, match="none of the 5 items gives a sample"),
    ):
        next(iter(feed))


def test_samples_per_item_that_is_no_number_is_refused() -> None:
    for wrong in (0, -1, 1.5, True):
        with pytest.raises((TypeError, ValueError), match="samples_per_item"):
            feed_of("inline", range(3), abs, samples_per_item=wrong)
    with pytest.raises(TypeError, match="samples_per_item=2 needs a load"):
        feed_of("inline", penstock.arrays(np.arange(3)), samples_per_item=2)
