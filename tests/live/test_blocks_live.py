"""Shuffling in blocks: what is read, in which pieces, and that all else is as it always is."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import Blocks, Feed, Retry
from tests.live.crews import CREWS

ROWS = 1000
BLOCKS = Blocks(rows=40, group=320)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file whose rows show where they come from."""
    np.save(tmp_path / "x.npy", np.arange(ROWS * 3, dtype=np.float32).reshape(ROWS, 3))
    return tmp_path / "x.npy"


def mapped(path: Path) -> Any:
    """The file as a memory map; not a fixture, or it would stay open until after the check of what is left open."""
    return np.load(path, mmap_mode="r")


def rows_of(feed: Feed) -> list[int]:
    """Which rows came, in order; each must be whole."""
    seen: list[int] = []
    for batch in feed:
        assert (batch == batch[:, :1] + np.arange(3)).all()
        seen += (batch[:, 0] / 3).astype(int).tolist()
    return seen


def expected(epoch: int = 0) -> list[int]:
    from penstock._core.order import Mixing, Order

    indices: list[int] = Order(ROWS, True, epoch=epoch, mixing=Mixing(320, 40)).indices(0, ROWS).tolist()
    return indices


@pytest.mark.parametrize("crew", CREWS)
@pytest.mark.parametrize("kind", ["file", "memory", "load", "load of a file", "cast"])
def test_blocks_give_the_same_order_to_every_crew(crew: str, kind: str, path: Path) -> None:
    """Read by whoever, from wherever: the order is computed, not found out."""
    data = np.array(mapped(path))
    source, load, options = {
        "file": (penstock.arrays(mapped(path)), None, {}),
        "memory": (penstock.arrays(data), None, {}),
        "load": (range(ROWS), lambda i: np.arange(3, dtype=np.float32) + 3 * i, {}),
        "load of a file": (penstock.arrays(mapped(path)), lambda row: row + np.float32(0), {}),
        "cast": (penstock.arrays(mapped(path)), None, {"cast": "float64"}),
    }[kind]
    given: dict[str, Any] = {"batch_size": 32, "memory": "256 MiB", "shuffle": BLOCKS, **CREWS[crew], **options}
    with Feed(source, load, **given) as feed:
        for epoch in range(2):
            assert rows_of(feed) == expected(epoch)
        assert feed.stats.copied == 0


def test_a_group_that_is_not_of_whole_batches_is_right_all_the_same(path: Path) -> None:
    """Slower, because some blocks are read twice, but the order is what it is."""
    blocks = Blocks(rows=40, group=320)
    for size in (7, 320, 333, 1000):
        with Feed(
            penstock.arrays(mapped(path)), batch_size=size, memory="256 MiB", shuffle=blocks, num_workers=1
        ) as feed:
            assert rows_of(feed) == expected()


@pytest.mark.parametrize("stop", [1, 10, 17, 31])
def test_it_goes_on_in_the_middle_of_a_group(stop: int, path: Path) -> None:
    """With other batches and another budget: how much is mixed is part of the state."""
    with Feed(penstock.arrays(mapped(path)), batch_size=32, memory="256 MiB", shuffle=BLOCKS, num_workers=2) as feed:
        epoch = iter(feed)
        before = [int(row / 3) for _ in range(stop) for row in next(epoch)[:, 0]]
        state = json.loads(json.dumps(feed.state_dict()))
        del epoch
    assert state["window"] == 320
    for size, blocks in ((32, Blocks(rows=40)), (20, Blocks(rows=40, group=1000))):
        with Feed(
            penstock.arrays(mapped(path)), batch_size=size, memory="128 MiB", shuffle=blocks, num_workers=0
        ) as feed:
            feed.load_state_dict(state)
            assert before + rows_of(feed) == expected()
    with (
        Feed(penstock.arrays(mapped(path)), batch_size=32, memory="256 MiB", shuffle=Blocks(rows=41)) as feed,
        pytest.raises(ValueError, match="blocks of 40 items"),
    ):
        feed.load_state_dict(state)


def test_ranks_share_the_order(path: Path) -> None:
    """Parts are disjoint and cover everything, and other numbers of ranks have the same order."""
    parts = []
    for rank in range(2):
        with Feed(
            penstock.arrays(mapped(path)),
            batch_size=16,
            memory="128 MiB",
            shuffle=BLOCKS,
            shard=(rank, 2),
            num_workers=0,
        ) as feed:
            parts.append(rows_of(feed))
    assert [row for pair in zip(*parts, strict=True) for row in pair] == expected()
    with pytest.raises(ValueError, match="2 ranks must mix the same"):
        Feed(penstock.arrays(mapped(path)), shuffle=Blocks(), shard=(0, 2))


def test_each_block_is_read_in_one_go(tmp_path: Path) -> None:
    """That is what it is for: counted by the items of each task, and never a file open in between."""
    tasks: list[list[int]] = []

    class Counting:
        in_memory = True

        def __len__(self) -> int:
            return ROWS

        def spec(self) -> Any:
            return penstock.arrays(np.zeros((1, 3), np.float32)).spec()

        def reader(self) -> Any:
            return self

        def read_into(self, indices: Any, out: Any, leaves: Any) -> None:
            tasks.append(indices.tolist())
            out[0][...] = 3 * indices[:, None] + np.arange(3)

        def read(self, indices: Any) -> Any:
            raise NotImplementedError

    with Feed(Counting(), batch_size=32, memory="256 MiB", shuffle=BLOCKS, num_workers=0) as feed:
        assert rows_of(feed) == expected()
    tasks = [task for task in tasks if len(task) > 16]
    assert [len(task) for task in tasks] == [40] * 25
    assert all(task == list(range(task[0], task[0] + 40)) for task in tasks)
    assert sorted(task[0] // 40 for task in tasks) == list(range(25))
    del tmp_path


def test_a_source_with_blocks_of_its_own_is_read_by_them(path: Path) -> None:
    """Row groups and shards have their sizes."""

    class Sharded(type(penstock.arrays(mapped(path)))):  # type: ignore[misc]
        def blocks(self) -> list[int]:
            return [100, 250, 50, 600]

    with Feed(Sharded(mapped(path)), batch_size=50, memory="256 MiB", shuffle=Blocks(group=350), num_workers=0) as feed:
        seen = np.array(rows_of(feed))
        assert sorted(seen.tolist()) == list(range(ROWS))
        mixed = [
            set(np.searchsorted([0, 100, 350, 400], part, side="right").tolist()) for part in np.split(seen, [350, 700])
        ]
    assert all(len(shards) <= 3 for shards in mixed)


def test_what_is_mixed_follows_from_the_budget_and_stays_inside_it(path: Path) -> None:
    """Two groups are in memory at once, and the plan says how many items that is."""
    x = np.zeros((20_000, 4096), np.uint8)
    groups = []
    for memory in ("96 MiB", "160 MiB", "320 MiB"):
        with Feed(penstock.arrays(x), batch_size=64, memory=memory, shuffle=Blocks()) as feed:
            assert feed.plan.total_bytes <= feed.plan.memory
            groups.append(feed.plan.batches_per_slot * 64)
            assert "items mixed at a time" in str(feed.plan)
    assert groups == sorted(groups)
    assert groups[0] < groups[-1]
    with (
        Feed(penstock.arrays(mapped(path)), memory="64 MiB", shuffle=Blocks(group=10**9), num_workers=0) as feed,
    ):
        assert len(rows_of(feed)) == ROWS, "a group larger than all there is is all there is"
    with (
        pytest.raises(penstock.BudgetError),
        Feed(penstock.arrays(x), memory="64 MiB", shuffle=Blocks(group=20_000), num_workers=0) as feed,
    ):
        feed.plan  # noqa: B018 - the first look solves it


LARGE_ROWS = 4000
LARGE = 4 * 2**12


def large_rows(folder: Path) -> Any:
    """Rows of which a tight budget holds a part, each with its number in front."""
    path = folder / "large.npy"
    if not path.exists():
        rows = np.lib.format.open_memmap(path, mode="w+", dtype=np.int32, shape=(LARGE_ROWS, LARGE // 4))
        rows[:, 0] = np.arange(LARGE_ROWS)
    return penstock.arrays(np.load(path, mmap_mode="r"))


def large_feed(kind: str, folder: Path, memory: int | str, **options: Any) -> Feed:
    """A feed of these that says nothing about groups."""
    given: dict[str, Any] = {"batch_size": 16, "memory": memory, "shuffle": Blocks(rows=20), **options}
    if kind == "file":
        return Feed(large_rows(folder), **given)
    # A function of this module would have workers import all that it does.
    return Feed([str(i) for i in range(LARGE_ROWS)], lambda name: np.full(2**12, int(name), np.int32), **given)


def firsts(feed: Feed, batches: int = 8) -> list[int]:
    """The rows of the first batches; all of a group have a part in them."""
    return [row for batch in itertools.islice(feed, batches) for row in batch[:, 0].tolist()]


@pytest.mark.parametrize(
    ("kind", "memory"),
    [
        ("file", 64),
        ("load", 64),
        *(pytest.param("file", memory, marks=pytest.mark.slow) for memory in (72, 80, 96, 160)),
        pytest.param("load", 160, marks=pytest.mark.slow),
    ],
)
def test_in_a_tight_budget_every_crew_has_the_same_order(kind: str, memory: int, tmp_path: Path) -> None:
    """What is mixed at a time follows from the budget alone: a crew that does not fit beside it is refused."""
    orders, refused = [], []
    crews: list[dict[str, Any]] = [{"num_workers": count} for count in (None, 0, 1, 2, 4)]
    crews += [{"num_workers": count, "executor": "thread"} for count in (None, 2, 4)]
    for crew in crews:
        try:
            with large_feed(kind, tmp_path, f"{memory} MiB", **crew) as feed:
                orders.append((feed.state_dict()["window"], firsts(feed)))
        except penstock.BudgetError:
            refused.append(crew)
    assert all(order == orders[0] for order in orders), [order[0] for order in orders]
    assert all(crew in ({"num_workers": 2}, {"num_workers": 4}) for crew in refused)
    assert LARGE_ROWS > orders[0][0] >= memory * 2**20 // 20 // LARGE


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_in_a_tight_budget_every_start_method_has_the_same_order(method: Any, tmp_path: Path) -> None:
    """They differ in what a process takes, but not in what is assumed of one."""
    with large_feed("load", tmp_path, "72 MiB", num_workers=0) as feed:
        order = firsts(feed)
    with large_feed("load", tmp_path, "72 MiB", num_workers=1, start_method=method) as feed:
        assert firsts(feed) == order


@pytest.mark.parametrize("kind", ["file", "load"])
def test_a_state_from_before_the_first_batch_has_the_order_of_its_feed(kind: str, tmp_path: Path) -> None:
    """Also one that was handed on unused, one of the edge of an epoch, and in a feed that has planned otherwise."""
    with large_feed(kind, tmp_path, "64 MiB", num_workers=1) as feed:
        before = json.loads(json.dumps(feed.state_dict()))
        epoch = [batch[:, 0].tolist() for batch in feed]
        between = json.loads(json.dumps(feed.state_dict()))
        order = [row for batch in epoch for row in batch]
        second = firsts(feed)
    assert before["window"] == between["window"] < LARGE_ROWS
    assert (between["epoch"], between["position"]) == (1, 0)
    with large_feed(kind, tmp_path, "160 MiB", num_workers=2) as feed:
        assert firsts(feed) != order[: 8 * 16], "another budget has another order"
    with large_feed(kind, tmp_path, "160 MiB", num_workers=0) as feed:
        feed.load_state_dict(before)
        again = feed.state_dict()
        assert again == before
    with large_feed(kind, tmp_path, "160 MiB", num_workers=0, executor="thread") as feed:
        assert feed.state_dict()["window"] != before["window"]
        feed.load_state_dict(again)
        assert firsts(feed) == order[: 8 * 16]
        with pytest.raises(ValueError, match="has not begun"):
            feed.load_state_dict({**before, "window": 16})
        feed.load_state_dict(between)
        assert firsts(feed) == second


def test_a_state_of_a_group_that_was_asked_for_needs_no_plan(tmp_path: Path) -> None:
    """Nor does that of a feed that is closed, or of nothing."""
    with large_feed("load", tmp_path, "64 MiB", shuffle=Blocks(group=320)) as feed:
        assert feed.state_dict()["window"] == 320
        assert feed.stats.arena_bytes == 0
    closed = large_feed("load", tmp_path, "64 MiB")
    closed.close()
    assert closed.state_dict()["window"] is None
    with Feed([], np.int64, memory="64 MiB", shuffle=Blocks()) as feed:
        assert feed.state_dict()["window"] is None


@pytest.mark.parametrize("kind", ["file", "load"])
def test_workers_that_do_not_fit_beside_a_group_are_told_what_works(kind: str, tmp_path: Path) -> None:
    """Each way out that the error names is one, though a larger budget mixes more."""

    some, many = (4, 8) if kind == "file" else (6, 11)  # measured ones are smaller than assumed ones

    def plan(memory: int | str = "68 MiB", **options: Any) -> Any:
        with large_feed(kind, tmp_path, memory, **{"num_workers": some, **options}) as feed:
            return feed.plan

    with pytest.raises(penstock.BudgetError, match="A larger budget mixes more") as caught:
        plan()
    text, least = str(caught.value), caught.value.least
    assert f"Give memory={least}" in text
    assert "batch_size" not in text
    assert plan(least).workers == some
    if kind == "file":  # of which nothing is measured
        with pytest.raises(penstock.BudgetError):
            plan(least * 19 // 20)
    fewer = re.search(r"num_workers=(\d+)", text)
    assert fewer is not None
    assert plan(num_workers=int(fewer[1])).workers == int(fewer[1]) > 0
    assert 'executor="thread"' in text
    assert plan(executor="thread").workers == some
    with pytest.raises(penstock.BudgetError) as caught:
        plan("184 MiB", num_workers=many)
    group = re.search(r"shuffle=Blocks\(group=(\d+)\)", str(caught.value))
    assert group is not None
    assert plan("184 MiB", num_workers=many, shuffle=Blocks(rows=20, group=int(group[1]))).workers == many


def test_an_item_that_fails_is_named_or_skipped(path: Path) -> None:
    """It stands anywhere in its group."""
    bad = expected()[100]

    def load(row: Any) -> Any:
        if row[0] == 3 * bad:
            raise ValueError("broken")
        return row

    options: dict[str, Any] = {"batch_size": 32, "memory": "256 MiB", "shuffle": BLOCKS, "num_workers": 2}
    with Feed(penstock.arrays(mapped(path)), load, **options) as feed:
        with pytest.raises(penstock.LoadError, match="broken") as caught:
            rows_of(feed)
        assert caught.value.item == bad
    with Feed(penstock.arrays(mapped(path)), load, on_error="skip", **options) as feed:
        assert rows_of(feed) == [row for row in expected() if row != bad]
        assert [item for item, _ in feed.stats.skipped] == [bad]


def test_a_killed_worker_loses_nothing_of_a_group(tmp_path: Path, path: Path) -> None:
    """Its block is read again, into the same places."""

    def load(row: Any) -> Any:
        if row[0] == 3 * 500 and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os._exit(1)
        return row

    with Feed(
        penstock.arrays(mapped(path)), load, batch_size=32, memory="256 MiB", shuffle=BLOCKS, num_workers=2
    ) as feed:
        assert rows_of(feed) == expected()
        assert feed.stats.restarts == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": "max"}, 'batch_size="max"'),
        ({"items": iter(range(9))}, "stream"),
        ({"shuffle": "yes"}, "Blocks"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(options: dict[str, Any], words: str) -> None:
    """Before anything is started."""
    given = {"items": range(9), "shuffle": Blocks(), **options}
    with pytest.raises((TypeError, ValueError), match=words):
        Feed(given.pop("items"), np.int64, **given)


def _of_any_length(item: int) -> tuple[str, int]:
    return "word " * (2 + item % 50 * 30), item


def _ragged(item: int) -> Any:
    return np.full(1 + item % 90 * 40, item)


def _numbers(batch: Any, load: Any) -> list[int]:
    return batch[1].tolist() if load is _of_any_length else [int(sample[0]) for sample in batch]


@pytest.mark.parametrize("load", [_of_any_length, _ragged])
def test_samples_of_any_size_are_cut_into_the_same_blocks_by_everybody(load: Any) -> None:
    """Each rank, and whoever goes on in the middle, looks at other items first: blocks must not follow from these."""

    def made(**options: Any) -> Feed:
        collate: Any = None if load is _of_any_length else "list"
        return Feed(
            range(6000), load, batch_size=50, num_workers=0, shuffle=Blocks(group=2000), collate_fn=collate, **options
        )

    with made() as feed:
        epochs = [[n for batch in epoch for n in _numbers(batch, load)] for epoch in feed.epochs(2)]
    with made() as feed:
        feed.set_epoch(1)
        assert [n for batch in feed for n in _numbers(batch, load)] == epochs[1]
    ranks = []
    for rank in range(4):
        with made(shard=(rank, 4)) as feed:
            ranks.append([n for batch in feed for n in _numbers(batch, load)])
    assert [n for dealt in zip(*ranks, strict=True) for n in dealt] == epochs[0]
    for count in (1, 17, 41, 100):
        with made() as feed:
            batches = iter(feed)
            seen = [n for _ in range(count) for n in _numbers(next(batches), load)]
            state = feed.state_dict()
        with made() as feed:
            feed.load_state_dict(state)
            assert seen + [n for batch in feed for n in _numbers(batch, load)] == epochs[0]


def test_blocks_of_bytes_are_refused_where_samples_differ_in_size() -> None:
    """How many items they have would depend on which were looked at."""
    with (
        Feed(range(100), _of_any_length, batch_size=5, num_workers=0, shuffle=Blocks(size="16 KiB")) as feed,
        pytest.raises(ValueError, match=r"samples differ in size here.*say Blocks\(rows=...\)"),
    ):
        next(iter(feed))


@pytest.mark.parametrize("to", ["numpy", "torch"])
def test_the_last_batch_of_a_group_keeps_no_slot_from_being_read_into(to: str) -> None:
    """With two slots the consumer would hold one while it waits for the other, and nothing could be read meanwhile."""
    if to == "torch":
        pytest.importorskip("torch", reason="torch is not installed")
    ran_on = threading.Event()

    def load(i: int) -> Any:
        time.sleep(0.001)  # slower than the consumer
        return np.full(64, i)

    blocks = Blocks(rows=20, group=100)
    with Feed(range(500), load, batch_size=20, num_workers=2, memory="256 MiB", shuffle=blocks, to=to) as feed:
        assert feed.plan.slots == 2
        seen: list[int] = []
        last = was = np.zeros(0)
        for number, batch in enumerate(feed, 1):
            seen += np.asarray(batch)[:, 0].tolist()
            assert (np.asarray(last) == was).all()
            if number % 5 == 0:
                last, was = batch, np.asarray(batch).copy()
                del batch
                assert feed._launched is not None
                if feed._launched.engine.held == 0:
                    ran_on.set()
        assert sorted(seen) == list(range(500))
        assert feed.stats.copied == 0  # the consumer did nothing that it should know of
    assert ran_on.is_set()


def test_last_batches_that_are_kept_take_no_more_than_was_planned() -> None:
    """Copies that nobody counts would be memory without a limit."""

    def load(i: int) -> Any:
        time.sleep(0.001)
        return np.full(2**16, i, np.float32)

    blocks = Blocks(rows=8, group=64)
    with Feed(range(640), load, batch_size=16, num_workers=1, memory="200 MiB", shuffle=blocks) as feed:
        with pytest.warns(penstock.ResourceHeld):
            kept = [(batch, int(batch[0, 0])) for number, batch in enumerate(feed, 1) if number % 4 == 0]
        assert feed.stats.copied
        assert all((batch[0] == first).all() for batch, first in kept)


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="asks the page cache")
def test_blocks_between_others_that_were_read_are_told_to_the_disk(tmp_path: Path) -> None:
    """Rows do not begin with pages, so a neighbour's last page is this one's first: that says nothing of the rest."""
    from penstock._core.arena import _resident_bytes
    from penstock._core.source import _disk, _header

    row_bytes, rows = 192 * 2**10, 63
    np.save(tmp_path / "x.npy", np.zeros((rows, row_bytes // 4), np.float32))
    file, _ = _header(str(tmp_path / "x.npy"))
    with open(file.path, "r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapping:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        out = np.empty((21, row_bytes // 4), np.float32)
        for first in (0, 42):
            file.scatter(np.arange(first, first + 21), out, np.arange(21))
        if _resident_bytes(mapping) > 42 * row_bytes + 4 * mmap.PAGESIZE:  # the page in the middle may be there, too
            pytest.skip("this file system keeps its files in memory, or reads more than it is asked for")
        _disk._cold = False  # as after blocks that were all there
        file.tell(np.arange(21, 42), epoch=0)
        until = time.monotonic() + 10
        while _resident_bytes(mapping) < rows * row_bytes and time.monotonic() < until:
            time.sleep(0.01)
        assert _resident_bytes(mapping) >= rows * row_bytes


@pytest.mark.parametrize("on_error", ["raise", "skip", Retry(2, then="skip")], ids=repr)
def test_items_that_may_be_left_out_do_not_keep_a_feed_from_fitting(on_error: Any, tmp_path: Path) -> None:
    """A group of which rows are missing is put together anew: what is mixed leaves room for that."""
    rows = np.arange(600, dtype=np.float32)[:, None] + np.zeros((1, 50_000), np.float32)
    np.save(tmp_path / "x.npy", rows)
    source = penstock.arrays([str(tmp_path / "x.npy")])
    lost = 0 if on_error == "raise" else 10
    os.truncate(tmp_path / "x.npy", (tmp_path / "x.npy").stat().st_size - lost * rows[0].nbytes)
    keywords: Any = {"batch_size": 32, "memory": "160 MiB", "num_workers": 2, "shuffle": Blocks(), "on_error": on_error}
    with Feed(source, **keywords) as feed:
        seen = sorted(int(row[0]) for batch in feed for row in batch)
        assert seen == list(range(600 - lost))
        assert feed.stats.peak_bytes <= feed.plan.memory
    assert len(feed.stats.skipped) == lost
