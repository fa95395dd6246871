"""The same seed gives the same samples in the same order, whoever loads them and however often."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import Feed
from tests.live.crews import each_crew, feed_of

WAYS: list[dict[str, Any]] = [
    {"num_workers": 0},
    *({"num_workers": n, "executor": "thread"} for n in (1, 2, 4)),
    *({"num_workers": n} for n in (1, 2, 4)),
    *({"num_workers": 2, "start_method": method} for method in ("fork", "forkserver", "spawn")),
]


def _draw(item: int) -> dict[str, Any]:
    random = penstock.rng()
    return {"item": item, "first": random.integers(1 << 40), "more": random.normal(size=3)}


def _epochs(count: int, **options: Any) -> list[list[tuple[int, int, float]]]:
    """What each epoch gave: item, the first number drawn for it, the sum of the others."""
    seen = []
    with Feed(range(50, 87), _draw, batch_size=8, memory="512 MiB", **options) as feed:
        for epoch in feed.epochs(count):
            rows: list[tuple[int, int, float]] = []
            for batch in epoch:
                rows += zip(batch["item"].tolist(), batch["first"].tolist(), batch["more"].sum(1).tolist(), strict=True)
            seen.append(rows)
    return seen


@pytest.fixture(scope="module")
def expected() -> list[list[tuple[int, int, float]]]:
    return _epochs(2, num_workers=0, shuffle=True, seed=7)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
def test_the_same_seed_gives_the_same_samples_in_the_same_order_for_every_crew(
    way: dict[str, Any], expected: list[list[tuple[int, int, float]]]
) -> None:
    assert _epochs(2, shuffle=True, seed=7, **way) == expected


def test_the_same_seed_gives_the_same_samples_in_another_run_of_python(
    expected: list[list[tuple[int, int, float]]],
) -> None:
    code = "from tests.live.test_order_live import _epochs; print(_epochs(2, num_workers=0, shuffle=True, seed=7))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.strip() == str(expected)


def test_every_epoch_has_all_items_in_an_order_and_with_numbers_of_its_own(
    expected: list[list[tuple[int, int, float]]],
) -> None:
    first, second = expected
    assert sorted(item for item, *_ in first) == sorted(item for item, *_ in second) == list(range(50, 87))
    assert [item for item, *_ in first] != [item for item, *_ in second]
    drawn = [number for epoch in expected for _, number, _ in epoch]
    assert len(set(drawn)) == len(drawn)


def test_another_seed_gives_another_order_and_other_numbers(expected: list[list[tuple[int, int, float]]]) -> None:
    (other,) = _epochs(1, num_workers=0, shuffle=True, seed=8)
    assert [item for item, *_ in other] != [item for item, *_ in expected[0]]
    assert not {number for _, number, _ in other} & {number for _, number, _ in expected[0]}


def test_the_numbers_of_an_item_do_not_depend_on_the_order_or_the_batch_size(
    expected: list[list[tuple[int, int, float]]],
) -> None:
    (straight,) = _epochs(1, num_workers=0, seed=7)
    assert [item for item, *_ in straight] == list(range(50, 87))
    assert {i: n for i, n, _ in straight} == {i: n for i, n, _ in expected[0]}


@each_crew
def test_set_epoch_gives_that_epoch_and_goes_on_from_there(crew: str) -> None:
    with feed_of(crew, range(23), lambda i: i, shuffle=True) as feed:
        epochs = [[int(i) for batch in feed for i in batch] for _ in range(4)]
        feed.set_epoch(2)
        assert feed.epoch == 2
        again = [[int(i) for batch in feed for i in batch] for _ in range(2)]
    assert again == epochs[2:]


@each_crew
def test_epochs_gives_what_iterating_again_and_again_gives(crew: str) -> None:
    with feed_of(crew, range(23), lambda i: i, shuffle=True) as feed:
        one_by_one = [[int(i) for batch in feed for i in batch] for _ in range(3)]
    with feed_of(crew, range(23), lambda i: i, shuffle=True) as feed:
        at_once = [[int(i) for batch in epoch for i in batch] for epoch in feed.epochs(3)]
        assert feed.epoch == 3
        assert list(feed.epochs(0)) == []
    assert at_once == one_by_one


@each_crew
def test_an_epoch_left_early_is_followed_by_a_whole_one(crew: str) -> None:
    with feed_of(crew, range(23), lambda i: i) as feed:
        for number, epoch in enumerate(feed.epochs(3)):
            seen = []
            for batch in epoch:
                seen += batch.tolist()
                if number == 1:
                    break
            assert seen == (list(range(4)) if number == 1 else list(range(23)))


@pytest.mark.parametrize(
    ("count", "drop_last", "sizes"), [(11, False, [4, 4, 3]), (11, True, [4, 4]), (3, True, []), (0, False, [])]
)
@each_crew
def test_len_tells_how_many_batches_come(crew: str, count: int, drop_last: bool, sizes: list[int]) -> None:
    with feed_of(crew, range(count), lambda i: i, drop_last=drop_last) as feed:
        assert len(feed) == len(sizes)
        assert [len(batch) for batch in feed] == sizes


def test_len_of_what_cannot_be_counted_is_a_type_error() -> None:
    with feed_of("inline", iter(range(5)), lambda i: i) as feed, pytest.raises(TypeError, match="stream"):
        len(feed)
    with (
        feed_of("inline", range(5), lambda i: [i], samples_per_item=None) as feed,
        pytest.raises(TypeError, match="None"),
    ):
        len(feed)


def test_rng_outside_of_load_says_where_it_belongs() -> None:
    with pytest.raises(penstock.PenstockError, match="inside load"):
        penstock.rng()


def test_rng_asked_twice_goes_on_and_libraries_can_spawn_from_it() -> None:
    def load(item: int) -> tuple[float, float, float]:
        return penstock.rng().random(), penstock.rng().random(), penstock.rng().spawn(1)[0].random()

    def epoch() -> list[tuple[Any, ...]]:
        with feed_of("inline", range(6), load, batch_size=3) as feed:
            return [tuple(map(tuple, batch)) for batch in feed]

    first = epoch()
    assert first == epoch()
    assert all(len({*one, *two, *three}) == 9 for one, two, three in first)


@each_crew
def test_a_collate_fn_has_numbers_of_its_own_that_repeat(crew: str) -> None:
    def mix(samples: list[Any]) -> Any:
        return np.stack(samples), penstock.rng().integers(1 << 40)

    def drawn(**options: Any) -> list[int]:
        with feed_of(crew, range(12), lambda i: i, collate_fn=mix, **options) as feed:
            return [int(number) for _, number in feed]

    assert drawn() == drawn()
    assert len(set(drawn())) == 3
    assert drawn(seed=1) != drawn()


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_worker_tells_which_worker_loads_and_how_many_there_are(kind: str) -> None:
    def load(item: int) -> tuple[int, int]:
        import time

        time.sleep(0.002)  # so that one worker cannot do it all
        return penstock.worker().id, penstock.worker().count

    with feed_of(kind, range(64), load, num_workers=3) as feed:
        pairs = {(int(i), int(n)) for ids, counts in feed for i, n in zip(ids, counts, strict=True)}
    assert pairs == {(0, 3), (1, 3), (2, 3)}


def test_the_consumers_own_process_is_worker_0_of_1() -> None:
    with feed_of("inline", range(4), lambda i: (penstock.worker().id, penstock.worker().count)) as feed:
        ((ids, counts),) = feed
    assert ids.tolist() == [0] * 4
    assert counts.tolist() == [1] * 4
    assert penstock.worker() == penstock.WorkerInfo(0, 1)


def test_num_workers_that_are_not_a_number_of_workers_are_refused() -> None:
    for wrong in (-1, 1.5, True, "2"):
        with pytest.raises((TypeError, ValueError), match="num_workers"):
            Feed(range(3), abs, num_workers=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="executor"):
        Feed(range(3), abs, executor="fiber")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="start_method"):
        Feed(range(3), abs, start_method="teleport")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="seed"):
        Feed(range(3), abs, seed="lucky")  # type: ignore[arg-type]
