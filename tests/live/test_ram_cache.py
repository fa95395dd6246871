"""``cache="ram"``: what is kept is what load gave, whoever does the work, and it is not loaded again."""

from __future__ import annotations

import dataclasses
import gzip
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import optree
import pytest

import penstock
from penstock import CacheWarning, Feed, MiB
from penstock._core.arena import CONTROL_BYTES
from penstock._core.cache import RamShelf, RamStore
from penstock._core.engine import Engine, Unit
from tests.live.crews import CREWS, each_crew, feed_of
from tests.live.loads import Log

N = 50


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "loads")


@dataclasses.dataclass
class Pair:
    x: Any
    y: Any


def ragged(i: int) -> Any:
    return np.full(1 + i * 7 % 23, i, np.float32)


def several(i: int) -> Iterator[Any]:
    for part in range(i % 4):
        yield np.array([i, part])


def in_place(i: int, out: Any) -> None:
    out["x"][...] = i
    out["y"][...] = -i


def tree(i: int) -> Any:
    return {"a": np.full((3, 2), i, np.uint8), "b": (i, [float(i), None]), "c": Pair(np.arange(i, i + 4), f"item {i}")}


def long_text(i: int) -> Any:
    return i, "x" * (i * 10), bytes([i]) * (i % 5)


def collated(samples: list[Any]) -> Any:
    samples[0][...] = samples[0]  # what it is given is its own
    return np.concatenate(samples), len(samples)


def objects(samples: list[Any]) -> Any:
    return [len(sample) for sample in samples]


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "arrays": (lambda i: (np.full((8,), i, np.float32), i), {}),
    "large arrays": (lambda i: np.full((100, 100), i, np.float64), {}),
    "a tree": (tree, {}),
    "cast": (lambda i: {"x": np.full(3, i / 3), "y": i}, {"cast": {"x": "float16"}}),
    "bfloat16": (lambda i: np.full(3, float(i), np.float32), {"cast": "bfloat16"}),
    "texts of a fixed width": (lambda i: (np.array(f"abc{i}"[: i % 6], "U8"), np.bytes_(f"{i}".encode())), {}),
    "texts of a fixed width, shuffled": (lambda i: np.array(f"abc{i}"[: i % 6], "S8"), {"shuffle": True}),
    "nothing in it": (lambda i: (np.empty((0, 3)), i), {}),
    "several an item": (lambda i: [np.array([i, part]) for part in range(2)], {"samples_per_item": 2}),
    "several that do not divide a batch": (lambda i: [np.array([i, p]) for p in range(3)], {"samples_per_item": 3}),
    "any number an item": (several, {"samples_per_item": None}),
    "any number, padded": (lambda i: [ragged(i)] * (i % 3), {"samples_per_item": None, "collate_fn": "pad"}),
    "padded": (ragged, {"collate_fn": "pad"}),
    "padded and cast": (ragged, {"collate_fn": "pad", "cast": "float16"}),
    "padded, some skipped": (ragged, {"collate_fn": "pad", "on_error": "skip"}),
    "a list": (lambda i: {"x": ragged(i), "n": i, "s": np.float32(i), "t": f"item {i}"}, {"collate_fn": "list"}),
    "odd things in a list": (
        lambda i: {
            "record": np.array([(i, (i, 1))], [("a", "i4"), ("b", "f8", (2,))]),
            "nested": np.array([((i, 2.5),)], [("in", [("x", "i2"), ("y", "f4")])]),
            "day": np.datetime64("2020-01-01") + np.timedelta64(i, "D"),
            "numbers": (bool(i % 2), 2**62 + i, i / 3, complex(i, float("inf")), float("-inf")),
            "texts": ("\N{SNOWMAN}\udc80" * (i % 3), b"\0\xff" * (i % 3)),
            "half": np.array(i, "float32").astype(ml_dtypes.bfloat16),
        },
        {"collate_fn": "list"},
    ),
    "a function": (ragged, {"collate_fn": collated}),
    "shuffled in blocks": (lambda i: np.full(4, i), {"shuffle": penstock.Blocks(rows=5, group=20)}),
    "shuffled": (lambda i: np.full(4, i), {"shuffle": True, "seed": 3}),
    "one of three ranks": (lambda i: np.full(4, i), {"shard": (1, 3)}),
    "one of three ranks, padded": (ragged, {"shard": (1, 3), "collate_fn": "pad"}),
}


def epochs(feed: Feed, count: int = 3) -> list[list[Any]]:
    """Leaves of every batch, copied."""
    seen = []
    for _ in range(count):
        batches = []
        for batch in feed:
            leaves = optree.tree_leaves(batch, namespace="penstock")
            batches.append([leaf.copy() if isinstance(leaf, np.ndarray) else leaf for leaf in leaves])
        seen.append(batches)
    return seen


def assert_same(one: list[list[Any]], other: list[list[Any]]) -> None:
    assert [len(epoch) for epoch in one] == [len(epoch) for epoch in other]
    for left, right in zip(chain.from_iterable(one), chain.from_iterable(other), strict=True):
        for a, b in zip(left, right, strict=True):
            np.testing.assert_array_equal(a, b, strict=isinstance(a, np.ndarray))


# Worker processes take longest to start: they are shown each way of keeping once.
IN_PROCESSES = ("a tree", "large arrays", "several an item", "any number, padded", "a function", "one of three ranks")


@pytest.mark.parametrize(
    ("crew", "name"),
    [(crew, name) for crew in CREWS for name in CASES if crew != "process" or name in IN_PROCESSES],
)
def test_what_comes_from_the_cache_is_what_load_gave_and_is_not_loaded_again(crew: str, name: str, log: Log) -> None:
    """Batches are the same as without a cache in every epoch, and later epochs load nothing."""
    load, options = CASES[name]
    with feed_of("inline", range(N), load, **options) as feed:
        expected = epochs(feed)
    with log.measured(feed_of(crew, range(N), log.of(load), cache="ram", **options)) as feed:
        first = epochs(feed, 1)
        assert set(log.take().values()) == {1}
        rest = epochs(feed, 2)
    assert_same(first + rest, expected)
    assert log.take() == {}
    assert feed.stats.cached > 0
    assert feed.stats.cache_bytes > 0


@pytest.mark.leaves("child", "fd", reason="Python's resource tracker, started with the first portable crew, stays")
@pytest.mark.parametrize("method", ["spawn", "fork", "portable"])
@pytest.mark.parametrize("name", ["a tree", "padded"])
def test_every_start_method_finds_the_cache(method: str, name: str, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that know nothing of each other read what the others wrote."""
    load, options = CASES[name]
    with feed_of("inline", range(N), load, **options) as feed:
        expected = epochs(feed, 2)
    start: dict[str, Any] = {"start_method": method}
    if method == "portable":
        monkeypatch.setenv("PENSTOCK_PORTABLE", "1")
        start = {}
    with feed_of("process", range(N), log.of(load), cache="ram", **start, **options) as feed:
        first = epochs(feed, 1)
        log.take()
        assert_same(first + epochs(feed, 1), expected)
    assert log.take() == {}


@each_crew
def test_a_load_that_writes_in_place_is_kept_too(crew: str, log: Log) -> None:
    spec = {"x": ((2,), "float32"), "y": ((), "int64")}
    load = penstock.into(spec)(log.of(in_place))
    with feed_of(crew, range(N), load, cache="ram") as feed:
        seen = epochs(feed, 1)
        log.take()
        seen += epochs(feed, 1)
    assert_same(seen[:1], seen[1:])
    assert seen[0][0][1].tolist() == [0, -1, -2, -3]
    assert log.take() == {}


@pytest.mark.parametrize("shuffle", [True, penstock.Blocks(rows=7, group=20)], ids=["all", "blocks"])
@each_crew
def test_rows_of_a_file_are_kept(crew: str, shuffle: Any, tmp_path: Path) -> None:
    """With the file gone, later epochs still have them; so they came from memory."""
    np.save(tmp_path / "x.npy", np.arange(3 * N).reshape(N, 3))
    source = penstock.arrays(np.load(tmp_path / "x.npy", mmap_mode="r"))
    with feed_of(crew, source, shuffle=shuffle, cache="ram") as feed:
        first = epochs(feed, 1)[0]
        (tmp_path / "x.npy").unlink()
        second = epochs(feed, 1)[0]
    for seen in (first, second):
        assert sorted(np.concatenate([x for (x,) in seen])[:, 0].tolist()) == list(range(0, 3 * N, 3))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("collate", [None, "pad"])
def test_lines_of_text_are_kept(collate: Any, shuffle: bool, tmp_path: Path, log: Log) -> None:
    """In order or shuffled: what was made of a line is found by its number."""
    (tmp_path / "text").write_text("".join(f"{i} {'x' * (i % 7)}\n" for i in range(N)))

    def load(line: str) -> Any:
        number, _, text = line.partition(" ")
        return np.full(1 + len(text) if collate else 3, int(number))

    logged = log.of(load)
    options: dict[str, Any] = {"shuffle": shuffle, "collate_fn": collate}
    with feed_of("inline", penstock.lines(tmp_path / "text"), load, **options) as feed:
        expected = epochs(feed, 2)
    with log.measured(feed_of("process", penstock.lines(tmp_path / "text"), logged, cache="ram", **options)) as feed:
        first = epochs(feed, 1)
        log.take()
        assert_same(first + epochs(feed, 1), expected)
    assert log.take() == {}


def test_lines_of_compressed_files_are_not_kept_and_that_is_said(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "text.gz", "wt") as file:
        file.writelines(f"{i}\n" for i in range(N))
    with (
        feed_of("thread", penstock.lines(tmp_path / "text.gz"), int, cache="ram") as feed,
        pytest.warns(CacheWarning, match="lines of compressed files"),
    ):
        assert [int(x) for batch in feed for x in batch] == list(range(N))


def test_rows_in_memory_are_not_kept_twice() -> None:
    """They are what a cache would be; the plan says that there is none."""
    with Feed(penstock.arrays(np.arange(N)), batch_size=4, memory="64 MiB", cache="ram") as feed:
        assert feed.plan.cache_bytes == 0
        assert any("in memory already" in note for note in feed.plan.notes)


@each_crew
def test_texts_that_do_not_fit_into_their_cells_are_loaded_every_time(crew: str, log: Log) -> None:
    """They travel beside the slot; the others are kept."""
    with feed_of("inline", range(N), long_text) as feed:
        expected = epochs(feed, 2)
    with feed_of(crew, range(N), log.of(long_text), cache="ram") as feed:
        first = epochs(feed, 1)
        log.take()
        assert_same(first + epochs(feed, 1), expected)
    assert {int(item) for item in log.take()} == {i for i in range(N) if i * 10 > 64}


@pytest.mark.parametrize("crew", ["thread", "process"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_cache_for_half_of_the_data_halves_the_loads_of_every_later_epoch(crew: str, shuffle: bool, log: Log) -> None:
    """Which half is decided once: every epoch loads the same other half, each of it once."""
    count, size = 200, 256 * 1024

    def load(i: int) -> Any:
        return np.full(size, i % 256, np.uint8), i

    options: dict[str, Any] = {"batch_size": 8, "shuffle": shuffle, "cache": "ram"}
    with feed_of(crew, range(count), load, **options) as feed:
        whole = feed.plan
    # What is left beside everything else, so that half of the samples fit into seven eighths of it.
    memory = whole.total_bytes - whole.cache_bytes + (whole.cache_bytes // 2) * 8 // 7
    with feed_of(crew, range(count), log.of(load), memory=memory, **options) as feed:
        plan = feed.plan
        kept = plan.held_samples - plan.slots * plan.batches_per_slot * plan.batch_size
        assert 0.2 * count < kept < 0.8 * count  # what a process takes differs from start to start
        assert plan.total_bytes <= memory
        loads = []
        for _ in range(3):
            for x, y in feed:
                assert (x == (y % 256)[:, None]).all()
            loads.append(log.take())
    assert len(loads[0]) == count
    assert loads[1] == loads[2]
    assert set(loads[1].values()) == {1}
    assert len(loads[1]) == count - kept
    assert feed.stats.cache_bytes <= plan.cache_bytes


@each_crew
def test_a_random_load_is_never_frozen(crew: str) -> None:
    """Each epoch has its own randomness, as without a cache, and the user is told."""

    def load(i: int) -> Any:
        return penstock.rng().integers(1 << 40, size=4)

    with feed_of("inline", range(N), load) as feed:
        expected = epochs(feed, 2)
    with feed_of(crew, range(N), load, cache="ram") as feed:
        with pytest.warns(
            CacheWarning, match=r"load asks penstock\.rng\(\).*not kept.*Move the random part out of load"
        ):
            seen = epochs(feed, 2)
        assert feed.plan.cache_bytes == 0
        assert any("load is random" in note for note in feed.plan.notes)
    assert_same(seen, expected)


@pytest.mark.parametrize("collate", [None, "pad"])
@each_crew
def test_only_those_items_that_are_random_are_not_kept(crew: str, collate: Any, log: Log) -> None:
    """Found out item by item, beyond those that are looked at to make a plan."""

    def load(i: int) -> Any:
        return penstock.rng().integers(1 << 40, size=4) if i >= 40 else np.full(4, i)

    with feed_of("inline", range(N), load, collate_fn=collate) as feed:
        expected = epochs(feed, 2)
    with feed_of(crew, range(N), log.of(load), cache="ram", collate_fn=collate) as feed:
        with pytest.warns(CacheWarning, match="not kept in the cache"):
            first = epochs(feed, 1)
        log.take()
        assert_same(first + epochs(feed, 1), expected)
    assert {int(item) for item in log.take()} == set(range(40, N))


@each_crew
def test_items_that_are_skipped_are_tried_again_and_the_others_are_not(crew: str, log: Log) -> None:
    def load(i: int) -> Any:
        if i % 7 == 3:
            raise ValueError(i)
        return np.full(4, i)

    with feed_of(crew, range(N), log.of(load), cache="ram", on_error="skip") as feed:
        first = epochs(feed, 1)
        log.take()
        assert_same(first, epochs(feed, 1))
    assert {int(item) for item in log.take()} == {i for i in range(N) if i % 7 == 3}


@pytest.mark.parametrize("samples_per_item", [1, 2, 3])
def test_resuming_and_leaving_early_agree_with_the_cache(samples_per_item: int) -> None:
    """An epoch that was left in the middle has filled a part; the state goes on with exactly the next sample."""

    def load(i: int) -> Any:
        return [np.array([i, part]) for part in range(samples_per_item)] if samples_per_item > 1 else np.array([i, 0])

    options: dict[str, Any] = {"samples_per_item": samples_per_item, "shuffle": True, "cache": "ram", "batch_size": 4}
    with feed_of("process", range(N), load, **options) as feed:
        whole = np.concatenate([batch.copy() for batch in feed])
    with feed_of("process", range(N), load, **options) as feed:
        seen = []
        for batch in feed:
            seen.append(batch.copy())
            if len(seen) == 4:
                break
        state = feed.state_dict()
        for _ in range(2):
            feed.load_state_dict(state)
            assert np.array_equal(np.concatenate([*seen, *(batch.copy() for batch in feed)]), whole)


@each_crew
def test_batches_that_are_kept_stay_right(crew: str) -> None:
    """Copies and leases alike: what comes from the cache is never written to by a consumer."""
    with feed_of(crew, range(N), lambda i: np.full(8, i), cache="ram") as feed, warnings.catch_warnings():
        warnings.simplefilter("ignore", penstock.ResourceHeld)
        for _ in range(3):
            held = list(feed)
            assert [int(x) for batch in held for x in batch[:, 3]] == list(range(N))
            for batch in held:
                batch[...] = -1


def test_a_closed_feed_keeps_no_cache_for_a_batch_that_is_alive() -> None:
    """The batch keeps the arena mapped; the kept samples in it are given back all the same."""
    load = lambda i: np.full(MiB(1) // 4, i, np.float32)  # noqa: E731 - travels by value
    with Feed(range(200), load, batch_size=1, memory="1 GiB", num_workers=2, cache="ram") as feed:
        for batch in feed:
            last = batch
    del batch
    assert feed.stats.cache_bytes > MiB(190)
    assert last[0, 0] == 199
    shared = sum(
        int(line.split()[1]) for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if "Pss_Shmem" in line
    )
    assert shared * 1024 < MiB(64)


def test_samples_that_cannot_be_kept_are_loaded_every_time_and_said() -> None:
    """A collate_fn may be given anything; a cache cannot hold anything."""

    def load(i: int) -> Any:
        return {1, 2, i}

    with (
        feed_of("thread", range(N), load, cache="ram", collate_fn=objects) as feed,
        pytest.warns(CacheWarning, match=r"hold a builtins\.set are not kept"),
    ):
        first = epochs(feed, 2)
    assert_same(first[:1], first[1:])


def test_tensors_come_back_as_tensors() -> None:
    """What a collate_fn is given does not depend on where it comes from."""
    torch = pytest.importorskip("torch", reason="the tensors are torch's")

    def stack(samples: list[Any]) -> Any:
        return torch.stack(samples)

    with feed_of("thread", range(N), lambda i: torch.full((3,), i), cache="ram", collate_fn=stack) as feed:
        first = epochs(feed, 2)
        assert feed.stats.cached == N
    assert_same(first[:1], first[1:])


def test_a_stream_cannot_be_kept() -> None:
    with pytest.raises(TypeError, match=r"cache needs items that can be found again.*list\(stream\)"):
        Feed(iter(range(3)), lambda i: i, cache="ram")


@pytest.mark.parametrize("wrong", [True, 3, "", b"folder"])
def test_what_a_cache_can_be_is_said(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r'give "ram", "device", a folder, or penstock\.Cache'):
        Feed(range(3), lambda i: i, cache=wrong)


def test_a_budget_without_room_has_no_cache_and_works() -> None:
    """The least that works, with cache="ram" as without."""

    def feed_with(memory: int) -> Feed:
        return feed_of("thread", range(N), lambda i: np.full(MiB(1), i, np.uint8), memory=memory, cache="ram")

    with pytest.raises(penstock.BudgetError) as caught, feed_with(MiB(1)) as feed:
        next(iter(feed))
    with feed_with(caught.value.least) as feed:
        assert [int(x[0]) for _ in range(2) for batch in feed for x in batch] == 2 * list(range(N))


@pytest.mark.parametrize("shuffle", [False, True])
def test_large_batches_are_right_whoever_copies_them(shuffle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The consumer and the workers take turns, as they do when it is away longer now and then."""
    turns: Counter[bool] = Counter()

    def in_turns(engine: Engine, unit: Unit) -> bool:
        assert engine.cache is not None
        if not engine.cache.at_hand(unit.indices):
            return False
        here = unit.start % 15 < 10  # some by the consumer, then some by workers, with those before still on their way
        turns[here] += 1
        return here

    def load(i: int) -> Any:
        return np.full((1 << 20) + 5, i, np.uint8)  # rows that do not end with a page

    monkeypatch.setattr(Engine, "_copies_here", in_turns)
    with Feed(range(40), load, batch_size=5, shuffle=shuffle, num_workers=2, memory="256 MiB", cache="ram") as feed:
        for _ in range(4):
            seen: list[int] = []
            kept: list[Any] = []
            for batch in feed:
                batch[:, 1:] += batch[:, :1]  # what a consumer does to a batch is its own affair
                seen.extend(batch[:, 0].tolist())
                kept = [*kept[-1:], batch]
                assert all((2 * one[:, :1] == one[:, 1:]).all() for one in kept)
            assert sorted(seen) == list(range(40))
        assert feed.stats.cached == 3 * 40
    assert turns[True]
    assert turns[False]


@each_crew
def test_kept_batches_that_are_held_take_no_more_than_was_planned(crew: str) -> None:
    """Whoever keeps more of them than there is memory for is told, in every epoch."""

    with feed_of(crew, range(100), _megabyte, memory="256 MiB", cache="ram") as feed:
        for _ in feed:
            pass
        before = feed.stats.copied
        with pytest.warns(penstock.ResourceHeld) if not before else nullcontext():
            everything = list(feed)
        assert feed.stats.copied > before
        assert [int(batch[0, 0]) for batch in everything] == list(range(0, 100, 4))
        assert all((batch == batch[:, :1]).all() for batch in everything)
        assert feed.stats.cached == 100
        assert feed.stats.peak_bytes <= feed.plan.memory


@each_crew
@pytest.mark.parametrize("ahead", [False, True])
def test_an_interrupt_while_a_batch_is_copied_loses_nothing_that_is_kept(
    crew: str, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was being written that anybody else sees."""

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "_copies_here", lambda self, unit: self.cache.at_hand(unit.indices))
    with feed_of(crew, range(40), _megabyte, memory="256 MiB", cache="ram") as feed:
        for _ in feed:
            pass
        batches = iter(feed)
        if ahead:
            next(batches)  # let go of at once, so that others begin with the next one
        with monkeypatch.context() as patch:
            patch.setattr(RamStore, "finish_copy" if ahead else "copy", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(batches)
        cached = feed.stats.cached
        assert [int(batch[0, 0]) for batch in feed] == list(range(0, 40, 4))
        assert feed.stats.cached == cached + 40


@each_crew
def test_the_next_batch_is_copied_while_the_consumer_works_on_this_one(
    crew: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or one core waits for the consumer, and then the consumer for a copy."""
    monkeypatch.setattr(Engine, "_copies_here", lambda self, unit: self.cache.at_hand(unit.indices))
    gathered = threading.Event()
    gather = RamShelf.gather

    def told(*args: Any) -> None:
        gather(*args)
        if threading.current_thread() is not threading.main_thread():
            gathered.set()

    with feed_of(crew, range(40), _megabyte, memory="256 MiB", cache="ram") as feed:
        for _ in feed:
            pass
        batches = iter(feed)
        assert int(next(batches)[0, 0]) == 0
        monkeypatch.setattr(RamShelf, "gather", told)
        assert int(next(batches)[0, 0]) == 4
        assert gathered.wait(10)  # nobody asks for the third
        assert [int(batch[0, 0]) for batch in batches] == list(range(8, 40, 4))


@each_crew
@pytest.mark.parametrize("end", ["break", "close"])
def test_a_copy_that_nobody_waits_for_any_more_does_no_harm(
    crew: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on in memory that is nobody else's until it is done."""
    monkeypatch.setattr(Engine, "_copies_here", lambda self, unit: self.cache.at_hand(unit.indices))
    gather = RamShelf.gather

    def slow(*args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.02)
        gather(*args)

    monkeypatch.setattr(RamShelf, "gather", slow)
    with feed_of(crew, range(40), _megabyte, memory="256 MiB", cache="ram") as feed:
        for _ in feed:
            pass
        for _ in range(3):
            for number, batch in enumerate(feed):
                assert (batch == 4 * number + np.arange(4)[:, None]).all()
                if number == 2:
                    break
            held = batch.copy()
            if end == "close":
                feed.close()
                assert (batch == held).all()
                return
        assert [int(batch[0, 0]) for batch in feed] == list(range(0, 40, 4))


@each_crew
def test_slots_count_while_the_cache_is_being_filled(crew: str) -> None:
    """What is kept is counted once, and what is not kept, too."""
    with feed_of(crew, range(100), _megabyte, memory="512 MiB", cache="ram") as feed:
        for number, _ in enumerate(feed):
            if number == 5:
                break
        assert feed.stats.cache_bytes >= 4 * 4 * MiB(1)
        assert feed.stats.arena_bytes >= 4 * MiB(1)
        assert feed.stats.arena_bytes <= feed.plan.arena_bytes + CONTROL_BYTES


def _megabyte(i: int) -> Any:
    return np.full(2**18, i, np.float32)
