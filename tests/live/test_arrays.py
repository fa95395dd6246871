"""``penstock.arrays``: rows of arrays in memory and of memory-mapped files, gathered straight into the slot."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import Blocks, Feed, LoadError, SpecError
from tests.live.crews import batches, each_crew, feed_of

X = np.arange(11 * 6, dtype=np.float32).reshape(11, 2, 3)
Y = np.arange(11) * 10


def _all(crew: str, source: Any, **options: Any) -> np.ndarray[Any, Any]:
    """All rows of a source of one array, in the order in which they came."""
    return np.concatenate(batches(crew, source, **options))


@each_crew
@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_come_as_tuples_or_dicts_like_the_arguments(crew: str, shuffle: bool) -> None:
    for source, parts in (
        (penstock.arrays(X, Y), lambda b: b),
        (penstock.arrays({"x": X, "y": Y}), lambda b: (b["x"], b["y"])),
        (penstock.arrays([X, Y]), lambda b: b),
    ):
        assert len(source) == 11
        found = [parts(batch) for batch in batches(crew, source, shuffle=shuffle)]
        x, y = (np.concatenate(part) for part in zip(*found, strict=True))
        order = y // 10
        assert sorted(order.tolist()) == list(range(11))
        assert (order.tolist() == list(range(11))) != shuffle
        np.testing.assert_array_equal(x, X[order])


def test_the_tree_and_dtypes_of_a_batch_are_those_of_the_arrays() -> None:
    source = penstock.arrays({"a": (X, {"b": Y.astype(np.int8)}), "flag": Y > 50, "when": Y.astype("M8[D]")})
    batch, *_ = batches("inline", source)
    assert batch["a"][0].dtype == np.float32
    assert batch["a"][1]["b"].dtype == np.int8
    assert batch["flag"].tolist() == [False] * 4
    assert batch["when"].dtype == np.dtype("M8[D]")
    single, *_ = batches("inline", penstock.arrays(Y))
    assert single.tolist() == [0, 10, 20, 30]
    assert "11 rows" in repr(source)


@pytest.mark.parametrize(
    ("name", "array"),
    {
        "every second": np.arange(40).reshape(20, 2)[::2],
        "backwards": np.arange(20).reshape(10, 2)[::-1],
        "columns": np.arange(100).reshape(10, 10)[:, 3:7],
        "transposed": np.arange(30).reshape(3, 10).T,
        "fortran": np.asfortranarray(np.arange(30).reshape(10, 3)),
        "broadcast": np.broadcast_to(np.arange(3), (10, 3)),
        "big endian": np.arange(30, dtype=">i4").reshape(10, 3),
        "records": np.array([(i, i / 2) for i in range(10)], dtype=[("a", "u1"), ("b", "f8")]),
        "a field of records": np.array([(i, i / 2) for i in range(10)], dtype=[("a", "u1"), ("b", "f8")])["b"],
        "texts": np.array([f"row {i}" for i in range(10)]),
        "no columns": np.empty((10, 0)),
        "one row": np.arange(3)[None],
        "no rows": np.empty((0, 3)),
    }.items(),
)
def test_arrays_of_every_make_are_gathered_right(name: str, array: Any) -> None:
    for shuffle in (False, True):
        with feed_of("inline", penstock.arrays(array, np.arange(len(array))), shuffle=shuffle, batch_size=3) as feed:
            for rows, order in feed:
                np.testing.assert_array_equal(rows, array[order], name)
                assert rows.dtype.isnative
                del rows, order


def test_a_large_array_that_is_not_contiguous_is_not_copied_for_every_batch() -> None:
    tracemalloc = pytest.importorskip("tracemalloc")
    wide = np.zeros((2000, 2000))[:, ::2]
    with feed_of("inline", penstock.arrays(wide), shuffle=True, batch_size=8) as feed:
        epoch = iter(feed)
        next(epoch)
        tracemalloc.start()
        try:
            next(epoch)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < wide.nbytes / 4


def test_tensors_are_arrays_too_and_batches_can_be_tensors() -> None:
    torch = pytest.importorskip("torch")
    x, y = torch.arange(20.0).reshape(10, 2), torch.arange(10).to(torch.bfloat16)
    with feed_of("inline", penstock.arrays(x, y), to="torch", shuffle=True) as feed:
        for rows, numbers in feed:
            assert torch.equal(rows, x[numbers.long()])
            assert numbers.dtype == torch.bfloat16
            del rows, numbers


def test_arrays_that_do_not_belong_together_are_refused_with_their_lengths() -> None:
    with pytest.raises(SpecError, match=r"different numbers of rows: \{'x': 11, 'y': 10\}"):
        penstock.arrays({"x": X, "y": Y[:10]})
    with pytest.raises(SpecError, match="at least one array"):
        penstock.arrays()
    with pytest.raises(SpecError, match="array 1 has no axis"):
        penstock.arrays(X, np.float32(3))
    with pytest.raises(SpecError, match=r"cannot lie in shared memory|Python objects"):
        penstock.arrays(np.array([None, "x"]))
    with pytest.raises(SpecError, match="masked"):
        penstock.arrays(np.ma.masked_array(Y, Y > 5))


def test_what_is_written_to_the_array_later_is_in_later_batches() -> None:
    data = np.zeros(8)
    with feed_of("inline", penstock.arrays(data), batch_size=8) as feed:
        data[:] = 1
        (first,) = feed
        data[:] = 2
        (second,) = feed
        assert (first.sum(), second.sum()) == (8, 16)
        del first, second


# ---------------------------------------- memory maps


def _maps(folder: Path) -> dict[str, Any]:
    """Memory maps of every make over files that hold known rows."""
    rows = np.arange(20 * 6, dtype=np.float32).reshape(20, 2, 3)
    np.save(folder / "rows.npy", rows)
    np.save(folder / "fortran.npy", np.asfortranarray(rows))
    np.save(folder / "swapped.npy", rows.astype(">f4"))
    with open(folder / "raw.bin", "wb") as file:
        file.write(b"head" * 1250)
        file.write(rows.tobytes())
    records = np.zeros(20, dtype=[("tag", "u1"), ("value", "f8", (2,))])
    records["value"] = np.arange(40).reshape(20, 2)
    records.tofile(folder / "records.bin")
    saved = np.load(folder / "rows.npy", mmap_mode="r")
    raw = np.memmap(folder / "raw.bin", np.float32, "r", offset=5000, shape=(20, 2, 3))
    mapped = np.memmap(str(folder / "records.bin"), records.dtype, "r+")
    return {
        "np.load": saved,
        "offset": raw,
        "slice": raw[3:17],
        "slice of a slice": raw[3:17][2:9],
        "every third": saved[1::3],
        "one column": saved[:, 1],
        "part of a row": saved[:, :, :2],
        "backwards": saved[::-1],
        "reshaped": saved.reshape(20, 6),
        "viewed": saved.view(np.uint8),
        "as a plain array": np.asarray(raw),
        "fortran": np.load(folder / "fortran.npy", mmap_mode="r"),
        "other byte order": np.load(folder / "swapped.npy", mmap_mode="r"),
        "copy on write": np.load(folder / "rows.npy", mmap_mode="c"),
        "records": mapped,
        "field": mapped["value"],
        "one dimension": saved.reshape(-1)[5:25],
        "no rows": saved[:0],
        "copied": saved[[3, 1, 2]],
    }


def test_memory_maps_of_every_make_are_read_right(tmp_path: Path) -> None:
    for name, array in _maps(tmp_path).items():
        for shuffle in (False, True):
            source = penstock.arrays(array, np.arange(len(array)))
            with feed_of("inline", source, shuffle=shuffle, batch_size=6) as feed:
                for rows, order in feed:
                    np.testing.assert_array_equal(rows, array[order], name)
                    del rows, order


def test_memory_maps_are_read_in_the_workers_from_the_file_and_nothing_is_sent(tmp_path: Path) -> None:
    import pickle

    wanted = _maps(tmp_path)
    for name in ("offset", "every third", "one column", "other byte order", "field"):
        source = penstock.arrays(wanted[name])
        assert not source.in_memory, name
        assert len(pickle.dumps(source.reader())) < 2000
        first = _all("process", source, shuffle=True, seed=3)
        np.testing.assert_array_equal(first, _all("inline", source, shuffle=True, seed=3), name)


def test_a_map_with_something_in_memory_beside_it_works_with_processes(tmp_path: Path) -> None:
    saved = _maps(tmp_path)["np.load"]
    for load, count in ((None, 5), (lambda row: (row[0], row[1] * 2), 5)):
        with feed_of("process", penstock.arrays(saved, np.arange(20)), load, shuffle=True) as feed:
            seen = 0
            for rows, order in feed:
                np.testing.assert_array_equal(rows, saved[order if load is None else order // 2])
                seen += 1
                del rows, order
            assert seen == count


def test_what_is_written_through_a_map_is_read(tmp_path: Path) -> None:
    data = np.lib.format.open_memmap(tmp_path / "new.npy", "w+", np.int64, (8,))
    data[:] = np.arange(8) * 3
    assert _all("process", penstock.arrays(data)).tolist() == (np.arange(8) * 3).tolist()


def test_a_map_whose_file_was_deleted_is_read_from_the_map(tmp_path: Path) -> None:
    np.save(tmp_path / "gone.npy", np.arange(8))
    mapped = np.load(tmp_path / "gone.npy", mmap_mode="r")
    os.unlink(tmp_path / "gone.npy")
    assert _all("process", penstock.arrays(mapped), shuffle=True).sum() == 28


def test_a_relative_path_works_in_workers_after_the_folder_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("here.npy", np.arange(8))
    source = penstock.arrays(np.load("here.npy", mmap_mode="r"))
    monkeypatch.chdir("/")
    assert _all("process", source).tolist() == list(range(8))


def test_a_file_that_was_cut_short_is_an_error_that_names_it(tmp_path: Path) -> None:
    np.save(tmp_path / "short.npy", np.arange(100_000))
    source = penstock.arrays(np.load(tmp_path / "short.npy", mmap_mode="r"))
    os.truncate(tmp_path / "short.npy", 4096)
    with pytest.raises((LoadError, EOFError), match=r"short\.npy.* ends at byte 4096.*cut short"):
        _all("inline", source, batch_size=1000)


# ---------------------------------------- with a load


@each_crew
def test_a_load_gets_the_rows_of_a_source(crew: str) -> None:
    def load(row: dict[str, Any]) -> Any:
        assert row["x"].shape == (2, 3)
        return {"sum": row["x"].sum(), "index": int(row["y"]) // 10, "draw": penstock.rng().integers(1 << 40)}

    drawn = set()
    with feed_of(crew, penstock.arrays({"x": X, "y": Y}), load, shuffle=True) as feed:
        for batch in feed:
            np.testing.assert_array_equal(batch["sum"], X.sum((1, 2))[batch["index"]])
            drawn |= set(batch["draw"].tolist())
    assert len(drawn) == 11


def test_a_load_over_a_map_runs_in_the_worker_and_may_change_its_row(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.arange(20).reshape(10, 2))

    def load(row: Any) -> Any:
        row += 1
        return row, os.getpid()

    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
    for _ in range(2):
        found = batches("process", penstock.arrays(mapped), load)
        np.testing.assert_array_equal(np.concatenate([rows for rows, _ in found]), mapped + 1)
        assert os.getpid() not in np.concatenate([pids for _, pids in found])


def test_an_error_in_a_load_over_a_source_names_the_row() -> None:
    def load(row: Any) -> Any:
        if row == 70:
            raise ValueError("seventy")
        return row

    for crew in ("inline", "process"):
        with pytest.raises(LoadError, match="seventy") as caught:
            batches(crew, penstock.arrays(Y), load)
        assert caught.value.item in (7, 70)


def test_large_rows_are_sent_to_a_load_one_by_one() -> None:
    """A worker has each twice for a moment: all rows of a batch at once were more than the least budget held."""

    def make(memory: Any) -> Feed:
        return Feed(penstock.arrays(rows), lambda row: row, memory=memory, batch_size=4, num_workers=2)

    rows = np.zeros((16, 2**21), np.float32)
    rows[:, 0] = np.arange(16)
    with pytest.raises(penstock.BudgetError) as told:
        print(make("40 MiB").plan)
    with make(told.value.least) as feed:
        assert [int(number) for batch in feed for number in batch[:, 0]] == list(range(16))


@pytest.mark.parametrize("wrong", [np.array([object()]), [b"x.npy"]])
def test_what_cannot_be_a_column_is_refused_at_once(wrong: Any) -> None:
    """The error spoke of a collate_fn, which nobody had given."""
    with pytest.raises(penstock.SpecError, match=r"arrays\(\) got .*numbers or texts, and \.npy files by their path"):
        penstock.arrays(wrong)


@pytest.mark.parametrize(
    "how", [{}, {"shuffle": True}, {"shuffle": Blocks(rows=2, group=6)}, {"num_workers": 2}], ids=str
)
def test_fields_of_a_file_may_differ_in_their_byte_order(how: dict[str, Any], tmp_path: Path) -> None:
    """Those that are in this machine's stay as they are."""
    form = [("a", ">i4"), ("b", "<i4"), ("c", ">f8", (3,)), ("d", [("e", "<u2"), ("f", ">u2")]), ("g", "S3")]
    array = np.zeros((12, 2), form)
    array["a"] = array["b"] = array["d"]["e"] = array["d"]["f"] = np.arange(24).reshape(12, 2) + 1
    array["c"] = np.arange(72).reshape(12, 2, 3)
    array["g"] = b"xyz"
    np.save(tmp_path / "x.npy", array)
    with Feed(
        penstock.arrays([str(tmp_path / "x.npy")]), **{"batch_size": 4, "memory": "200 MiB", "num_workers": 0, **how}
    ) as feed:
        rows = np.concatenate([np.array(batch) for batch in feed])
    rows = rows[np.argsort(rows["b"][:, 0])]
    assert (rows == array.astype(rows.dtype)).all()
    assert rows.dtype.isnative


def test_a_rank_without_rows_has_a_plan_too(tmp_path: Path) -> None:
    """It asked how long a row takes, of none."""
    np.save(tmp_path / "one.npy", np.arange(1))
    source = penstock.arrays(tmp_path / "one.npy")
    with Feed(source, batch_size=2, memory="200 MiB", shard=(0, 3), drop_last=True) as feed:
        assert feed.plan.batch_size == 2
        assert list(feed) == []
