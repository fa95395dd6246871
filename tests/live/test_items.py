"""What items may be: any sequence, any stream; they stay with the consumer and cost the workers nothing."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import Feed, LoadError
from tests.live.crews import batches, drain, each_crew, feed_of


def _fail(item: int) -> int:
    raise ConnectionError("nobody there")


def _flat(feed: Any) -> list[Any]:
    return [value for batch in feed for value in (batch if isinstance(batch, list) else batch.tolist())]


# ---------------------------------------- sequences


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_two_million_paths_cost_the_workers_nothing(method: str) -> None:
    # In an interpreter of its own: a forked worker shares the parent's pages, and pytest's are many.
    script = textwrap.dedent(
        """
        import os, sys
        from pathlib import Path
        from penstock import Feed

        def private(pid):
            fields = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            return sum(int(line.split()[1]) for line in fields if line.startswith("Private")) // 1024

        def workers_of(count):
            paths = [f"/data/images/part-{i // 1000:04d}/image-{i:08d}.jpeg" for i in range(count)]
            options = {"batch_size": 64, "num_workers": 2, "memory": "1 GiB", "start_method": sys.argv[1]}
            with Feed(paths, len, shuffle=True, **options) as feed:
                for number, batch in enumerate(feed):
                    assert (batch == len(paths[0])).all()
                    if number == 100:
                        break
                children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
                workers = Path(f"/proc/{children[0]}/task/{children[0]}/children").read_text().split()
                assert len(workers) == 2
                return max(map(private, workers))

        print(workers_of(1000), workers_of(2_000_000))
        """
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, method], capture_output=True, text=True, timeout=100, check=False
    )
    assert ran.returncode == 0, ran.stderr
    few, many = map(int, ran.stdout.split())
    assert many <= few + 8, f"{many} MiB a worker with two million paths, {few} MiB with a thousand"


class Squares:
    """A sequence that is computed, as a data set's index often is."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.asked: list[Any] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.asked.append(index)
        if not 0 <= index < self.length:
            raise IndexError(index)
        return index * index


SEQUENCES: dict[str, tuple[Any, list[Any]]] = {
    "list": (["a", "b", "c"], ["a", "b", "c"]),
    "tuple": ((1, 2, 3), [1, 2, 3]),
    "range": (range(9, 3, -2), [9, 7, 5]),
    "texts": (np.array(["x", "yy", "zzz"]), ["x", "yy", "zzz"]),
    "numbers": (np.arange(3, dtype=np.float32) / 2, [0, 0.5, 1]),
    "objects": (np.array([Path("a"), "b", 3], object), [Path("a"), "b", 3]),
    "rows": (np.arange(6).reshape(3, 2), [[0, 1], [2, 3], [4, 5]]),
    "dates": (
        np.array(["2024-01-01", "2024-01-02"], "M8[ns]"),
        [np.datetime64("2024-01-01", "ns"), np.datetime64("2024-01-02", "ns")],
    ),
    "computed": (Squares(4), [0, 1, 4, 9]),
    "paths": ([Path("/a"), Path("/b")], [Path("/a"), Path("/b")]),
    "nested": ([("a", {"k": 1}), ("b", None)], [("a", {"k": 1}), ("b", None)]),
    "text of a list": (list("abc"), ["a", "b", "c"]),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_load_gets_the_items_of_a_sequence_as_they_are(name: str) -> None:
    items, expected = SEQUENCES[name]
    got: list[Any] = []

    def load(item: Any) -> int:
        got.append(item)
        return len(got)

    with feed_of("inline", items, load) as feed:
        assert len(_flat(feed)) == len(expected)
    assert [item.tolist() if isinstance(item, np.ndarray) else item for item in got] == expected
    assert [type(item) for item in got if not isinstance(item, np.ndarray)] == [
        type(item) for item in expected if not isinstance(item, list)
    ] or name == "numbers"


def test_a_pandas_series_is_picked_by_place_not_by_label() -> None:
    pandas = pytest.importorskip("pandas")
    series = pandas.Series(["a", "b", "c"], index=[2, 0, 1])
    assert _flat(batches("inline", series, lambda item: item)) == ["a", "b", "c"]


def test_a_sequence_is_asked_only_for_what_is_loaded_with_plain_ints() -> None:
    items = Squares(10_000_000)
    with feed_of("process", items, lambda item: item, shuffle=True) as feed:
        first = next(iter(feed)).tolist()
    assert set(first) <= {index**2 for index in items.asked}
    assert len(items.asked) < 500
    assert {type(index) for index in items.asked} == {int}


def test_a_hundred_million_items_start_at_once_in_constant_memory() -> None:
    import tracemalloc

    tracemalloc.start()
    try:
        with feed_of("inline", range(100_000_000), lambda item: item, shuffle=True, batch_size=64) as feed:
            seen = set(itertools.islice((value for batch in feed for value in batch.tolist()), 6400))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(seen) == 6400
    assert peak < 4_000_000


@each_crew
def test_a_sequence_that_fails_does_so_after_the_batches_before_it(crew: str) -> None:
    class Broken(Squares):
        def __getitem__(self, index: int) -> int:
            if index == 9:
                raise LookupError("no nine")
            return index

    with feed_of(crew, Broken(20), lambda item: item) as feed:
        for _ in range(2):
            seen: list[int] = []
            with pytest.raises(LookupError, match="no nine"):
                drain(feed, seen)
            assert seen == list(range(8))


@each_crew
def test_items_may_be_large_and_many_in_a_batch(crew: str) -> None:
    items = [str(n) * 1000 for n in range(300)]
    with feed_of(crew, items, lambda item: (len(item), item[0]), batch_size=128) as feed:
        sizes = [int(size) for lengths, _ in feed for size in lengths]
    assert sizes == [len(item) for item in items]


def test_items_that_cannot_be_pickled_work_in_threads_and_are_explained_for_processes() -> None:
    locks = [threading.Lock() for _ in range(6)]
    for crew in ("inline", "thread"):
        assert sum(map(sum, batches(crew, locks, lambda lock: lock.locked()))) == 0
    with pytest.raises(
        TypeError, match=r"items like <unlocked.* cannot be sent to worker processes.*executor=\"thread\""
    ):
        batches("process", locks, lambda lock: lock.locked())
    with pytest.raises(TypeError, match="cannot be sent to worker processes"):
        batches("process", [*range(20), locks[0], 21], lambda item: 1)


WRONG: list[tuple[Any, Any, str]] = [
    ("paths.txt", len, r"items='paths.txt' is one str.*\['paths.txt'\]"),
    (b"abc", len, "is one bytes"),
    ({"a": 1}, len, "items is a dict"),
    (7, len, "items is a int, which cannot be iterated"),
    (None, len, "items is a NoneType, which cannot be iterated"),
    (Path("a"), len, "cannot be iterated"),
    ([1, 2], None, r"a list of items needs a load.*range\(len\(data\)\)"),
    (iter([1]), None, "needs a load function"),
    ([1, 2], "load", "load is a str, which cannot be called"),
]


@pytest.mark.parametrize(("items", "load", "message"), WRONG, ids=lambda value: type(value).__name__)
def test_items_and_loads_of_the_wrong_kind_are_told_what_to_give(items: Any, load: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Feed(items, load)


# ---------------------------------------- streams


class Counted:
    """An iterator that knows how far it was pulled."""

    def __init__(self, items: Any) -> None:
        self.items = iter(items)
        self.pulled = 0

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> Any:
        item = next(self.items)
        self.pulled += 1
        return item


@each_crew
def test_a_stream_is_pulled_only_as_far_as_slots_are_free(crew: str) -> None:
    stream = Counted(itertools.count())
    assert stream.pulled == 0
    with feed_of(crew, stream, lambda item: item) as feed:
        assert stream.pulled == 0
        batch = 4 * feed.plan.batches_per_slot
        assert stream.pulled <= 4
        for number, _ in enumerate(feed):
            handed_out = 4 * (number + 1)
            assert handed_out <= stream.pulled <= handed_out + batch * (feed.plan.slots + feed.plan.staging_slots)
            if number == 30:
                break


@each_crew
def test_breaking_out_of_a_one_time_stream_loses_nothing(crew: str) -> None:
    stream = Counted(range(100))
    seen = []
    with feed_of(crew, stream, lambda item: item) as feed:
        for rounds in range(1, 6):
            for number, batch in enumerate(feed, 1):
                seen += batch.tolist()
                if number == rounds:
                    break
        assert seen == list(range(60))
        seen += _flat(feed)
        assert seen == list(range(100))
        assert list(feed) == []


@each_crew
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_stream_that_can_be_iterated_again_is_in_every_epoch(crew: str, shuffle: bool) -> None:
    class Again:
        def __iter__(self) -> Iterator[int]:
            return iter(range(30))

    with feed_of(crew, Again(), lambda item: item, shuffle=shuffle) as feed:
        next(iter(feed))
        epochs = [_flat(epoch) for epoch in feed.epochs(3)]
    assert all(sorted(epoch) == list(range(30)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == (3 if shuffle else 1)


def test_every_kind_of_iterable_is_a_stream() -> None:
    class SameIterator:
        """Hands out one and the same iterator: what was pulled from it is gone."""

        def __init__(self) -> None:
            self.items = iter(range(10))

        def __iter__(self) -> Iterator[int]:
            return self.items

    streams = [
        (n for n in range(10)),
        map(abs, range(10)),
        dict.fromkeys(range(10)).keys(),
        SameIterator(),
        itertools.islice(itertools.count(), 10),
    ]
    for stream in streams:
        assert _flat(batches("inline", stream, lambda item: item)) == list(range(10))


def test_the_lines_of_an_open_file_are_a_stream(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("".join(f"line {n}\n" for n in range(10)))
    with open(tmp_path / "list.txt") as file:
        assert _flat(batches("process", file, str.strip)) == [f"line {n}" for n in range(10)]


@each_crew
def test_an_empty_stream_gives_no_batches(crew: str) -> None:
    assert batches(crew, iter([]), lambda item: item) == []
    assert batches(crew, [], lambda item: item) == []


def test_a_shuffled_stream_is_the_same_for_all_crews_and_another_in_every_epoch() -> None:
    class Again:
        def __iter__(self) -> Iterator[int]:
            return iter(range(200))

    found = []
    for options in (
        {"num_workers": 0},
        {"num_workers": 3, "executor": "thread"},
        {"num_workers": 1},
        {"num_workers": 3},
    ):
        with Feed(Again(), lambda item: item, shuffle=True, memory="512 MiB", batch_size=16, **options) as feed:
            found.append([_flat(epoch) for epoch in feed.epochs(2)])
    assert all(epochs == found[0] for epochs in found)
    assert sorted(found[0][0]) == list(range(200)) != found[0][0] != found[0][1]


def test_breaking_out_of_a_shuffled_one_time_stream_loses_nothing() -> None:
    for crew in ("inline", "process"):
        seen: list[int] = []
        with feed_of(crew, iter(range(100)), lambda item: item, shuffle=True) as feed:
            for _ in range(5):
                for batch in feed:
                    seen += batch.tolist()
                    break
            seen += _flat(feed)
        assert sorted(seen) == list(range(100)) != seen


@each_crew
def test_an_error_of_the_stream_comes_after_all_that_it_gave_in_full_batches(crew: str) -> None:
    def stream() -> Iterator[int]:
        yield from range(22)
        raise ConnectionError("the line went dead")

    with feed_of(crew, stream(), lambda item: item) as feed:
        seen: list[int] = []
        with pytest.raises(LoadError, match="failed after 22 items: ConnectionError: the line went dead") as caught:
            drain(feed, seen)
        assert isinstance(caught.value.__cause__, ConnectionError)
        assert seen == list(range(20))
        assert _flat(feed) == [20, 21]


def test_an_error_of_the_stream_at_its_start_says_so() -> None:
    def stream() -> Iterator[int]:
        yield from map(_fail, range(3))

    with pytest.raises(LoadError, match="failed after 0 items: ConnectionError: nobody there"):
        batches("process", stream(), lambda item: item)


def test_drop_last_drops_the_end_of_a_stream() -> None:
    assert _flat(batches("process", iter(range(10)), lambda item: item, drop_last=True)) == list(range(8))


def test_thirty_breaks_out_of_an_infinite_stream_leave_nothing() -> None:
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
    for number in range(30):
        crew = ("inline", "thread", "process")[number % 3]
        with feed_of(crew, itertools.count(number), lambda item: item) as feed:
            for batch in feed:
                assert batch.tolist() == [number, number + 1, number + 2, number + 3]
                break
            del batch
    if before:
        assert len(os.listdir("/proc/self/fd")) == len(before)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock")]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("once", [False, True])
def test_ranks_of_a_stream_get_the_same_number_of_batches(drop_last: bool, once: bool) -> None:
    """One that had a batch more would wait for the others for ever; what is short is filled up, or left out."""
    parts = []
    for rank in range(5):
        items: Any = iter(range(101)) if once else _Again(101)
        with Feed(
            items, lambda i: i, batch_size=7, shard=(rank, 5), drop_last=drop_last, num_workers=0, memory="64 MiB"
        ) as feed:
            parts.append([batch.tolist() for batch in feed])
    assert len({tuple(map(len, part)) for part in parts}) == 1
    seen = sorted(i for part in parts for batch in part for i in batch)
    if drop_last:
        assert len(seen) == len(set(seen)) == 70
    else:
        assert sorted(set(seen)) == list(range(101))
        assert len(seen) == 105


class _Again:
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(range(self.count))


@pytest.mark.parametrize("probed", [0, 64])
def test_a_batch_of_slow_loads_does_not_wait_for_the_next_ones(probed: int) -> None:
    """Batches that share a slot are handed out together; loads that only seemed quick must not be."""
    loaded: list[int] = []

    def load(item: int) -> np.ndarray[Any, Any]:
        loaded.append(item)
        if len(loaded) > probed:
            time.sleep(0.005)
        return np.full(4, item)

    with Feed(range(256), load, batch_size=4, memory="64 MiB", num_workers=0) as feed:
        for number, batch in enumerate(feed):
            assert (batch[:, 0] == np.arange(4 * number, 4 * number + 4)).all()
            if len(loaded) > 3 * probed:  # by now it is known how slow they are
                assert max(loaded) < 4 * number + 8, number
