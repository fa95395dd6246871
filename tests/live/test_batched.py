"""``penstock.batched``: many items at a time give the samples that one at a time would, whoever loads them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import Feed, LoadError, Retry, SpecError, WorkerLost
from penstock._core.sharing import obstacle_to_threads
from tests.live.crews import batches, drain, each_crew, feed_of

N = 50
X = np.random.default_rng(0).integers(0, 256, (N, 3, 4)).astype(np.uint8)
Y = np.arange(N)


def squares(items: list[int]) -> Any:
    """What is to be loaded, and how many were asked for at once."""
    numbers = np.array(items, np.float64)
    return {"square": numbers**2, "row": np.stack([np.full(3, item) for item in items])}


def square(item: int) -> Any:
    return {"square": np.float64(item) ** 2, "row": np.full(3, item)}


def halved(rows: tuple[Any, Any]) -> Any:
    return rows[0].astype(np.float32) / 2, rows[1]


def the_same(one: list[Any], other: list[Any]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        parts = [(a[key], b[key]) for key in a] if isinstance(a, dict) else zip(a, b, strict=True)
        for left, right in parts:
            assert left.dtype == right.dtype
            np.testing.assert_array_equal(left, right)


@each_crew
@pytest.mark.parametrize("options", [{}, {"shuffle": True, "batch_size": 7}, {"cast": {"square": "float16"}}])
def test_samples_are_those_of_a_load_of_one(crew: str, options: dict[str, Any]) -> None:
    if options.get("cast"):
        options = {**options, "batch_size": 8}
    items = list(range(N)) if not options.get("cast") else list(range(30))
    the_same(batches(crew, items, penstock.batched(squares), **options), batches(crew, items, square, **options))


@each_crew
@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_of_arrays_come_stacked(crew: str, shuffle: bool) -> None:
    """Not one by one: that is what it is for."""
    found = batches(crew, penstock.arrays(X, Y), penstock.batched(halved), shuffle=shuffle, batch_size=8)
    y = np.concatenate([batch[1] for batch in found])
    assert sorted(y.tolist()) == list(range(N))
    np.testing.assert_array_equal(np.concatenate([batch[0] for batch in found]), X[y].astype(np.float32) / 2)


@each_crew
def test_it_is_called_for_many_at_a_time(crew: str) -> None:
    def counted(items: list[int]) -> Any:
        return np.full(len(items), len(items))

    sizes = np.concatenate(batches(crew, range(4096), penstock.batched(counted), batch_size=1024))
    assert len(sizes) == 4096
    assert sizes[1024:].min() >= 32


@each_crew
def test_it_writes_in_place_too(crew: str) -> None:
    @penstock.batched
    @penstock.into((((3, 4), "float32"), ((), "int64")))
    def load(rows: Any, out: Any) -> None:
        np.divide(rows[0], 2, out=out[0])
        out[1][...] = rows[1]

    found = batches(crew, penstock.arrays(X, Y), load, shuffle=True, batch_size=8)
    y = np.concatenate([batch[1] for batch in found])
    np.testing.assert_array_equal(np.concatenate([batch[0] for batch in found]), X[y].astype(np.float32) / 2)


@each_crew
def test_samples_of_files_come_stacked(crew: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    found = batches(crew, penstock.arrays(str(tmp_path / "x.npy")), penstock.batched(lambda x: x[:, 0] + 1))
    np.testing.assert_array_equal(np.concatenate(found), X[:, 0] + 1)


@each_crew
def test_lines_come_as_a_list(crew: str, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("".join(f"line:{'x' * number}\n" for number in range(N)))
    lengths = penstock.batched(lambda lines: np.array([len(line) for line in lines]))
    found = batches(crew, penstock.lines(tmp_path / "t.txt"), lengths)
    assert np.concatenate(found).tolist() == [5 + number for number in range(N)]


@each_crew
def test_the_item_that_fails_is_named_and_no_other_is_lost(crew: str) -> None:
    def load(items: list[int]) -> Any:
        if 13 in items:
            raise KeyError("thirteen")
        return np.array(items)

    seen: list[int] = []
    with feed_of(crew, range(N), penstock.batched(load)) as feed:
        with pytest.raises(LoadError, match=r"13.*KeyError.*thirteen") as caught:
            drain(feed, seen)
        assert caught.value.item == 13
    assert seen == list(range(12))
    with feed_of(crew, range(N), penstock.batched(load), on_error="skip", batch_size=10) as feed:
        assert [i for batch in feed for i in batch.tolist()] == [i for i in range(N) if i != 13]
        assert [item for item, _ in feed.stats.skipped] == [13]


@each_crew
def test_what_fails_once_is_tried_again(crew: str, tmp_path: Path) -> None:
    def load(items: list[int]) -> Any:
        if 13 in items and not (tmp_path / "failed").exists():
            if len(items) == 1:
                (tmp_path / "failed").touch()
            raise OSError("not yet")
        return np.array(items)

    with feed_of(crew, range(N), penstock.batched(load), on_error=Retry(2, wait_s=0)) as feed:
        assert [i for batch in feed for i in batch.tolist()] == list(range(N))


@each_crew
def test_randomness_is_that_of_each_sample(crew: str) -> None:
    """However many are loaded at once, and by whomever."""

    def one(item: int) -> Any:
        return item + penstock.rng().random()

    def many(items: list[int]) -> Any:
        return np.array(items) + penstock.rng().random(len(items))

    np.testing.assert_array_equal(
        np.concatenate(batches(crew, range(N), penstock.batched(many), seed=5)),
        np.concatenate(batches("inline", range(N), one, seed=5)),
    )


@each_crew
@pytest.mark.parametrize(
    ("load", "message"),
    [
        (lambda items: np.array(items).sum(keepdims=True), "penstock.batched gave an array of shape .1,. for .* items"),
        (lambda items: np.zeros((3, len(items))), "an array of shape .3, 1. for 1 item.* one row per item"),
        (lambda items: 3.5, "gave a float for 1 item"),
        (lambda items: ["a text" for _ in items], "gave a str for 1 item"),
    ],
)
def test_what_has_not_one_row_per_item_is_refused(crew: str, load: Any, message: str) -> None:
    """The first of these is right for one item alone, and wrong for two."""
    with (
        feed_of(crew, range(N), penstock.batched(load), batch_size=25) as feed,
        pytest.raises(SpecError, match=message),
    ):
        list(feed)


@each_crew
def test_a_sample_that_cannot_be_stored_is_told_of_its_own_item(crew: str) -> None:
    """Not of the first of those that were loaded with it; and it alone is left out, as with a load of one."""
    items = [1, 2, 4, 7, 8, 9, 10, 300, 5, 6]
    with feed_of(crew, items, penstock.batched(np.array), cast="uint8") as feed:
        with pytest.raises(SpecError, match="the sample of 300 has") as caught:
            list(feed)
        assert caught.value.item == 300
    with feed_of(crew, items, penstock.batched(np.array), cast="uint8", on_error="skip") as feed:
        assert [i for batch in feed for i in batch.tolist()] == [i for i in items if i != 300]
        assert [item for item, _ in feed.stats.skipped] == [300]


def test_an_item_that_kills_its_worker_is_found() -> None:
    def load(items: list[int]) -> Any:
        if 13 in items:
            os._exit(3)
        return np.array(items)

    with feed_of("process", range(N), penstock.batched(load), on_error="skip", batch_size=10) as feed:
        assert [i for batch in feed for i in batch.tolist()] == [i for i in range(N) if i != 13]
        ((item, error),) = feed.stats.skipped
        assert (item, type(error)) == (13, WorkerLost)


@each_crew
@pytest.mark.parametrize("cache", ["ram", "folder"])
def test_what_is_kept_is_not_loaded_again(crew: str, cache: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()

    def load(items: list[int]) -> Any:
        with log.open("a") as file:
            file.write("".join(f"{item}\n" for item in items))
        return np.array(items)

    where: Any = "ram" if cache == "ram" else penstock.Cache(tmp_path / "kept", key="1")
    with feed_of(crew, range(N), penstock.batched(load), cache=where, shuffle=True) as feed:
        loaded = []
        for _ in range(3):
            assert sorted(i for batch in feed for i in batch.tolist()) == list(range(N))
            loaded.append(log.read_text())
    assert set(map(int, loaded[0].split())) == set(range(N))
    assert loaded[0] == loaded[1] == loaded[2]


@each_crew
def test_texts_and_samples_that_are_collated_come_one_by_one(crew: str) -> None:
    names = penstock.batched(lambda items: np.array([f"item {item}" for item in items]))
    found = batches(crew, range(N), names)
    assert [str(text) for batch in found for text in batch] == [f"item {i}" for i in range(N)]
    with feed_of(crew, range(N), penstock.batched(np.array), collate_fn="list") as feed:
        assert [int(i) for batch in feed for i in batch] == list(range(N))


def test_a_state_goes_on_with_the_next_sample() -> None:
    with feed_of("process", range(N), penstock.batched(squares), shuffle=True, batch_size=8) as feed:
        whole = [batch["square"].tolist() for batch in feed]
    with feed_of("process", range(N), penstock.batched(squares), shuffle=True, batch_size=8) as feed:
        it = iter(feed)
        seen = [next(it)["square"].tolist() for _ in range(3)]
        state = feed.state_dict()
    with feed_of("thread", range(N), penstock.batched(squares), shuffle=True, batch_size=8) as feed:
        feed.load_state_dict(state)
        assert seen + [batch["square"].tolist() for batch in feed] == whole


def test_methods_and_functions_are_marked_alike() -> None:
    class Table:
        factor = 3

        @penstock.batched
        def load(self, items: list[int]) -> Any:
            return self.factor * np.array(items)

        @penstock.batched
        @penstock.into(((), "int64"))
        def load_into(self, items: list[int], out: Any) -> None:
            out[...] = self.factor * np.array(items)

    for load in (Table().load, Table().load_into):
        assert np.concatenate(batches("process", range(N), load)).tolist() == list(range(0, 3 * N, 3))
    assert getattr(Table().load, "__name__", "") == "load"
    assert penstock.batched(squares)(4)["square"] == 16.0


def test_what_cannot_be_marked_is_refused() -> None:
    with pytest.raises(TypeError, match="once is enough"):
        penstock.batched(penstock.batched(squares))
    with pytest.raises(TypeError, match=r"batched\(3\) needs a function of a list of items"):
        penstock.batched(3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"samples_per_item=2 cannot be used with penstock\.batched"):
        Feed(range(N), penstock.batched(squares), samples_per_item=2)


@pytest.mark.parametrize("read_only", [False, True])
def test_an_array_that_nobody_can_write_to_is_no_obstacle_to_threads(read_only: bool) -> None:
    """Rows in memory are best worked on in threads; whether two run side by side is then measured."""
    mean = np.full(12, 0.5, np.float32)
    mean.flags.writeable = not read_only
    load = penstock.batched(lambda rows: np.sqrt(np.abs(rows - mean)))
    assert (obstacle_to_threads(load) is None) == read_only
    x = np.random.default_rng(0).random((2000, 12), dtype=np.float32)
    with Feed(penstock.arrays(x), load, batch_size=128, memory="256 MiB") as feed:
        np.testing.assert_array_equal(np.concatenate([batch.copy() for batch in feed]), np.sqrt(np.abs(x - mean)))
        assert read_only or feed.plan.executor == "process"


@pytest.mark.parametrize("crew", ["inline", "thread", "process"])
@pytest.mark.parametrize("draws", [False, True])
def test_a_load_that_works_in_place_is_given_rows_as_they_were(crew: str, draws: bool) -> None:
    """After an error, or where each sample has its own randomness, rows are done one by one, and were doubled twice."""

    def load(rows: Any) -> Any:
        x, y = rows
        x *= 2
        if draws:
            penstock.rng().random()
        if (y == 13).any():
            raise ValueError("bad row")
        return x, y

    source = penstock.arrays(np.ones((200, 4)), np.arange(200))
    with feed_of(crew, source, penstock.batched(load), batch_size=16, on_error="skip") as feed:
        seen = [(float(value), int(number)) for x, y in feed for value, number in zip(x[:, 0], y, strict=True)]
    assert seen == [(2.0, number) for number in range(200) if number != 13]
