"""Sources over files: exactly what the library that owns the format gives, whoever reads and in whatever order."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import os
import pickle
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import Feed, LoadError, Row, SpecError
from tests.live.crews import feed_of

LENGTH = 37


@dataclasses.dataclass(frozen=True)
class Case:
    """A source on files, what its rows are, and how a row of it is told from another."""

    source: Callable[[], Any]
    rows: list[Any]


def _npy(folder: Path) -> Case:
    x = np.arange(LENGTH * 6, dtype=np.float32).reshape(LENGTH, 2, 3)
    y = np.arange(LENGTH, dtype=">i4") * 7
    text = np.array([f"näme {i}" * (i % 3) for i in range(LENGTH)])
    raw = np.array([b"r" * (i % 4) for i in range(LENGTH)])
    given = (("x", x, [5, 5, 20]), ("y", y, [11, 30]), ("text", text, [7]), ("raw", raw, [30]))
    for name, array, cuts in given:
        for number, part in enumerate(np.split(array, cuts)):
            np.save(folder / f"{name}{number}.npy", part)
    columns = {name: sorted(folder.glob(f"{name}*.npy")) for name, *_ in given}
    rows = [{"x": x[i], "y": np.int32(y[i]), "text": text[i], "raw": raw[i]} for i in range(LENGTH)]
    return Case(lambda: penstock.arrays(columns), rows)


def _parquet(folder: Path, *, arrow: bool = False) -> Case:
    pa = pytest.importorskip("pyarrow", reason="Parquet and Arrow need pyarrow")
    pq = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    table = pa.table(
        {
            "number": pa.array(range(LENGTH), pa.int16()),
            "half": pa.array(np.arange(LENGTH, dtype=np.float16)),
            "flag": pa.array([i % 3 == 0 for i in range(LENGTH)]),
            "when": pa.array(np.datetime64("2024-01-01", "us") + np.arange(LENGTH)),
            "vector": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(LENGTH * 4, dtype=np.float64)), 4),
            "name": pa.array([f"näme {i}" * (1 + i % 3) for i in range(LENGTH)]),
            "kind": pa.array(["ab"[i % 2] for i in range(LENGTH)]).dictionary_encode(),
            "raw": pa.array([bytes([i]) * i for i in range(LENGTH)]),
            "inner": pa.StructArray.from_arrays([pa.array(range(LENGTH)), pa.array(["s"] * LENGTH)], ["a", "b"]),
        }
    )
    paths = []
    for number, (start, stop) in enumerate(((0, 10), (10, 36), (36, LENGTH))):
        path = folder / f"{number}.{'feather' if arrow else 'parquet'}"
        part = table.slice(start, stop - start)
        if arrow:
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, part.schema) as writer:
                writer.write_table(part, max_chunksize=4)
        else:
            pq.write_table(part, path, row_group_size=7, compression="snappy")
        paths.append(path)
    rows = table.to_pylist()
    for row in rows:
        row["when"] = np.datetime64(row["when"], "us")
    return Case(lambda: penstock.parquet(paths), rows)


def _hdf5(folder: Path) -> Case:
    h5py = pytest.importorskip("h5py", reason="HDF5 needs h5py")
    x = np.arange(LENGTH * 6, dtype=">f8").reshape(LENGTH, 2, 3)
    y = np.arange(LENGTH, dtype=np.uint8)
    paths = [folder / "0.h5", folder / "1.h5"]
    for path, part in zip(paths, (slice(0, 20), slice(20, LENGTH)), strict=True):
        with h5py.File(path, "w") as file:
            file.create_dataset("train/x", data=x[part], chunks=(4, 2, 2), compression="gzip")
            file.create_dataset("train/y", data=y[part])
    wanted = {"x": "train/x", "y": "train/y"}
    return Case(lambda: penstock.hdf5(paths, wanted), [{"x": x[i], "y": y[i]} for i in range(LENGTH)])


def _tar(folder: Path) -> Case:
    rows = []
    paths = []
    for number, keys in enumerate((range(20), range(20, LENGTH))):
        paths.append(folder / f"{number}.tar")
        with tarfile.open(paths[-1], "w", format=(tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)[number]) as file:
            for i in keys:
                key = f"some/folder/{'long' * 40 if i % 5 == 0 else ''}{i:04}"
                row: dict[str, Any] = {"__key__": key}
                for extension, data in (("bin", bytes([i]) * (i * 100)), ("seg.json", json.dumps(i).encode())):
                    info = tarfile.TarInfo(f"{key}.{extension}")
                    info.size = len(data)
                    file.addfile(info, io.BytesIO(data))
                    row[extension] = data
                rows.append(row)
    return Case(lambda: penstock.tar(paths), rows)


CASES: dict[str, Callable[[Path], Case]] = {
    "npy": _npy,
    "parquet": _parquet,
    "arrow": lambda folder: _parquet(folder, arrow=True),
    "hdf5": _hdf5,
    "tar": _tar,
}
each_case = pytest.mark.parametrize("make", CASES.values(), ids=CASES)


def unstacked(batch: Any) -> list[Any]:
    """The samples of a batch."""
    if isinstance(batch, dict):
        columns = {name: unstacked(part) for name, part in batch.items()}
        length = len(next(iter(columns.values())))
        return [{name: column[i] for name, column in columns.items()} for i in range(length)]
    return list(batch)


def assert_same(came: list[Any], expected: list[Any]) -> None:
    assert len(came) == len(expected)
    for one, other in zip(came, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            if isinstance(value, dict):
                assert_same([one[name]], [value])
            else:
                np.testing.assert_array_equal(one[name], value, name)


def drawn(epoch: Any, batches: int | None = None) -> list[Any]:
    return [_copied(row) for batch in itertools.islice(epoch, batches) for row in unstacked(batch)]


def _copied(row: Any) -> Any:
    if isinstance(row, dict):
        return {name: _copied(value) for name, value in row.items()}
    return row.copy() if isinstance(row, np.ndarray) else row


def whole(crew: str, source: Any, **options: Any) -> list[Any]:
    with feed_of(crew, source, **options) as feed:
        return drawn(feed)


def order_of(**options: Any) -> list[list[int]]:
    with Feed(range(LENGTH), lambda i: i, batch_size=4, num_workers=0, **options) as feed:
        return [[int(i) for batch in epoch for i in batch] for epoch in feed.epochs(2)]


@each_case
@pytest.mark.parametrize("crew", ["inline", "process"])
def test_rows_are_what_the_library_of_the_format_gives(make: Any, crew: str, tmp_path: Path) -> None:
    """In order, permuted and in the part of a rank: otherwise a source would be a way to train on something else."""
    case = make(tmp_path)
    source = case.source()
    assert len(source) == LENGTH
    for options in ({}, {"shuffle": True, "seed": 3}, {"shuffle": True, "shard": (1, 2)}):
        with feed_of(crew, source, **options) as feed:
            for epoch, order in zip(feed.epochs(2), order_of(**options), strict=True):
                assert_same(drawn(epoch), [case.rows[i] for i in order])


@each_case
def test_an_epoch_of_files_goes_on_where_it_stopped(make: Any, tmp_path: Path) -> None:
    """In another process, with a source that was made anew from the same files."""
    case = make(tmp_path)
    (order, _) = order_of(shuffle=True)
    with feed_of("inline", case.source(), shuffle=True) as feed:
        seen = drawn(feed, 3)
        state = json.loads(json.dumps(feed.state_dict()))
    with feed_of("process", case.source(), shuffle=True) as feed:
        feed.load_state_dict(state)
        seen += drawn(feed)
    assert_same(seen, [case.rows[i] for i in order])


@each_case
def test_blocks_of_files_hold_each_row_once(make: Any, tmp_path: Path) -> None:
    case = make(tmp_path)
    source = case.source()
    if hasattr(source, "blocks"):
        assert sum(source.blocks()) == LENGTH
    with feed_of("process", source, shuffle=penstock.Blocks(group=16)) as feed:
        came = drawn(feed)
    shown = [repr(row) for row in came]
    assert sorted(shown) == sorted({*shown})
    with feed_of("inline", source) as feed:
        assert sorted(shown) == sorted(map(repr, drawn(feed)))
    assert len(came) == LENGTH


@each_case
def test_a_load_gets_rows_of_files(make: Any, tmp_path: Path) -> None:
    case = make(tmp_path)

    def load(row: Any) -> Any:
        return {"pid": os.getpid(), "text": repr(sorted(row))}

    for crew in ("inline", "process"):
        with feed_of(crew, case.source(), load, shuffle=True) as feed:
            rows = drawn(feed)
        assert {row["text"] for row in rows} == {repr(sorted(case.rows[0]))}
        assert (os.getpid() in {int(row["pid"]) for row in rows}) == (crew == "inline")


@each_case
def test_the_reader_of_files_is_small_and_no_file_stays_open(make: Any, tmp_path: Path) -> None:
    case = make(tmp_path)
    source = case.source()
    assert len(pickle.dumps(source.reader())) < 4000
    feed = feed_of("inline", source)
    next(iter(feed))
    feed.close()
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _open(fd)]
    assert not [link for link in links if link.startswith(str(tmp_path))]


def _open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


# ---------------------------------------- what fails


def _skipped(source: Any, **options: Any) -> tuple[int, list[Any]]:
    with feed_of(options.pop("crew"), source, on_error="skip", **options) as feed:
        count = sum(len(unstacked(batch)) for batch in feed)
        return count, [item for item, _ in feed.stats.skipped]


@pytest.mark.parametrize("crew", ["inline", "process"])
@pytest.mark.parametrize("shuffle", [False, True, penstock.Blocks(rows=4)], ids=["order", "shuffle", "blocks"])
def test_rows_that_a_file_has_lost_are_skipped_by_name(crew: str, shuffle: Any, tmp_path: Path) -> None:
    """Many rows are read at once: those beside the bad ones must not be lost with them."""
    for number in range(3):
        np.save(tmp_path / f"{number}.npy", np.arange(10) + 10 * number)
    paths = [tmp_path / f"{number}.npy" for number in range(3)]
    os.truncate(paths[1], os.path.getsize(paths[1]) - 3 * 8)
    source = penstock.arrays(paths)
    count, items = _skipped(source, crew=crew, shuffle=shuffle, batch_size=4)
    assert count == 27
    assert sorted(items, key=lambda row: row.row) == [Row(str(paths[1]), row) for row in (7, 8, 9)]
    with pytest.raises(LoadError, match=r"row \d of '.*1\.npy'.*cut short") as caught:
        whole(crew, source, shuffle=shuffle)
    assert isinstance(caught.value.item, Row)


def test_a_row_that_kills_its_worker_is_found_among_many(tmp_path: Path) -> None:
    """A decoder that crashes takes a task of many rows with it; only the one row may be blamed."""
    source = Deadly(20, {7, 13})
    with feed_of("process", source, on_error="skip", batch_size=10) as feed:
        assert [int(i) for batch in feed for i in batch] == [i for i in range(20) if i not in source.deadly]
        assert [item for item, _ in feed.stats.skipped] == [7, 13]
    with pytest.raises(penstock.WorkerLost, match="while loading 7"):
        whole("process", source, batch_size=10)


class Deadly:
    """A source whose reader crashes at some rows, as a broken decoder would."""

    in_memory = False

    def __init__(self, length: int, deadly: set[int]) -> None:
        self.length, self.deadly = length, deadly

    def __len__(self) -> int:
        return self.length

    def spec(self) -> Any:
        return penstock.arrays(np.arange(2)).spec()

    def reader(self) -> Any:
        return DeadlyReader(self.deadly, os.getpid())


class DeadlyReader:
    def __init__(self, deadly: set[int], parent: int) -> None:
        self.deadly, self.parent = deadly, parent

    def read_into(self, indices: Any, out: Any, leaves: Any) -> None:
        if os.getpid() != self.parent and self.deadly & set(indices.tolist()):
            os._exit(3)
        out[0][:] = indices

    def read(self, indices: Any) -> Any:
        return list(indices)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ([np.zeros((2, 3)), np.zeros((2, 4))], r"1\.npy' has rows of float64\[4\], but .*0\.npy' has .*float64\[3\]"),
        ([np.zeros(2), np.zeros(2, np.float32)], r"1\.npy' has rows of float32\[\]"),
        ([np.zeros(2, "<i4"), np.zeros(2, ">i4")], r"rows of int32\[\].*, (big|little)-endian"),
        ([np.zeros((2, 3)), np.asfortranarray(np.ones((2, 3)))], r"1\.npy' is in Fortran order.*ascontiguousarray"),
        ([np.zeros(2), np.array(3.0)], r"1\.npy' has no axis"),
        ([np.zeros(2), np.array([None, 1])], r"1\.npy' holds Python objects"),
    ],
)  # fmt: skip
def test_files_that_do_not_go_together_are_refused_by_name(arrays: Any, message: str, tmp_path: Path) -> None:
    for number, array in enumerate(arrays):
        np.save(tmp_path / f"{number}.npy", array)
    with pytest.raises(SpecError, match=message):
        penstock.arrays(sorted(tmp_path.glob("*.npy")))


def test_a_file_that_was_replaced_by_one_of_another_form_fails_by_name(tmp_path: Path) -> None:
    """Its bytes would be read as if they were of the old form: numbers that nobody wrote."""
    path = tmp_path / "x.npy"
    np.save(path, np.arange(8, dtype=np.float32))
    source = penstock.arrays(path)
    np.save(path, np.arange(16, dtype=np.float32))  # rows that came behind change nothing
    with feed_of("inline", source) as feed:
        assert [int(x) for batch in feed for x in batch] == list(range(8))
    np.save(path, np.arange(8, dtype=np.int64))
    for shuffle in (False, True):
        with pytest.raises(LoadError, match=r"x\.npy' has rows of int64\[\] by now, but had rows of float32\[\]"):
            whole("inline", source, shuffle=shuffle)


@pytest.mark.parametrize("crew", ["inline", "thread", "process"])
def test_rows_of_a_file_beside_rows_in_memory_fail_by_name_too(crew: str, tmp_path: Path) -> None:
    """For a load in another process they are read here, and what went wrong was nobody's row."""
    np.save(tmp_path / "x.npy", np.arange(200, dtype=np.float32).reshape(100, 2))
    source = penstock.arrays(str(tmp_path / "x.npy"), np.arange(100))
    with feed_of(crew, source, lambda row: row, batch_size=10, on_error="skip") as feed:
        feed.plan  # noqa: B018 - the file is whole until then
        os.truncate(tmp_path / "x.npy", 128 + 8 * 90)
        assert [n for _, numbers in feed for n in numbers.tolist()] == list(range(90))
        assert [item for item, _ in feed.stats.skipped] == [Row(str(tmp_path / "x.npy"), i) for i in range(90, 100)]
    np.save(tmp_path / "x.npy", np.arange(200, dtype=np.float32).reshape(100, 2))
    with feed_of(crew, source, lambda row: row, batch_size=10) as feed:
        feed.plan  # noqa: B018 - as above
        (tmp_path / "x.npy").unlink()
        with pytest.raises(LoadError, match=r"row 0 of .*x\.npy"):
            list(feed)


@pytest.mark.parametrize("size", [0, 100])
def test_a_file_that_was_cut_inside_its_header_fails_by_row(size: int, tmp_path: Path) -> None:
    """It was an error about the whole source, which nobody expects in the middle of an epoch."""
    np.save(tmp_path / "x.npy", np.zeros((40, 2)))
    with feed_of("process", penstock.arrays(str(tmp_path / "x.npy")), batch_size=8) as feed:
        feed.plan  # noqa: B018 - the file is whole until then
        os.truncate(tmp_path / "x.npy", size)
        with pytest.raises(LoadError, match=r"row 0 of .*it was one when the source was made"):
            list(feed)


def test_what_is_no_npy_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(b"something else entirely")
    with pytest.raises(SpecError, match=r"x\.npy' is not a \.npy file"):
        penstock.arrays(str(tmp_path / "x.npy"))
    with pytest.raises(FileNotFoundError, match="gone"):
        penstock.arrays([tmp_path / "gone.npy"])
    np.save(tmp_path / "y.npy", np.zeros(3))
    with pytest.raises(SpecError, match="numbers of rows"):
        penstock.arrays(tmp_path / "y.npy", [tmp_path / "y.npy", tmp_path / "y.npy"])


# ---------------------------------------- parquet


def test_a_null_fails_for_its_row_and_is_none_for_a_load(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    pq = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    lists = pa.array([[1, 2], [3, None], [4, 5], [6, 7]], pa.list_(pa.int32(), 2))
    pq.write_table(pa.table({"x": [1, 2, None, 4], "v": lists}), tmp_path / "a.parquet")
    source = penstock.parquet(tmp_path / "a.parquet")
    assert _skipped(source, crew="inline") == (2, [Row(str(tmp_path / "a.parquet"), row) for row in (1, 2)])
    with pytest.raises(LoadError, match=r"row 1 of .*a\.parquet.*column 'v' has a null in its list.*gets None"):
        whole("inline", source)
    numbers = penstock.parquet(tmp_path / "a.parquet", ["x"])
    with feed_of("process", numbers, lambda row: -1 if row["x"] is None else int(row["x"])) as feed:
        assert [batch.tolist() for batch in feed] == [[1, 2, -1, 4]]


@pytest.mark.parametrize("crew", ["inline", "process"])
def test_a_null_beside_text_is_told_like_any_other(crew: str, tmp_path: Path) -> None:
    """Rows with text go another way to a batch: there a None was another tree than the first sample's."""
    pa = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    pq = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    words = pa.array(["a", "b", "c", None]).dictionary_encode()
    pq.write_table(pa.table({"x": [1, None, 3, 4], "word": words}), tmp_path / "a.parquet")
    source = penstock.parquet(tmp_path / "a.parquet")
    assert _skipped(source, crew=crew) == (2, [Row(str(tmp_path / "a.parquet"), row) for row in (1, 3)])
    with pytest.raises(LoadError, match=r"row 1 of .*a\.parquet.*column 'x' is null: fill it in"):
        whole(crew, source)
    only = penstock.parquet(tmp_path / "a.parquet", ["word"])
    with pytest.raises(LoadError, match=r"row 3 of .*a\.parquet.*column 'word' is null: fill it in"):
        whole(crew, only)
    with feed_of(crew, only, lambda row: row["word"] or "none") as feed:
        assert [list(batch) for batch in feed] == [["a", "b", "c", "none"]]


def test_lists_of_varying_length_are_padded_or_refused(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    pq = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    pq.write_table(pa.table({"t": [[1], [2, 3], [], [4, 5, 6]]}), tmp_path / "a.parquet")
    source = penstock.parquet(tmp_path / "a.parquet")
    with feed_of("inline", source, collate_fn="pad") as feed:
        ((data, lengths),) = [batch["t"] for batch in feed]
        assert data.tolist() == [[1, 0, 0], [2, 3, 0], [0, 0, 0], [4, 5, 6]]
        assert lengths.tolist() == [1, 2, 0, 3]
    with pytest.raises(SpecError, match=r"'t' holds lists of varying length.*collate_fn"):
        whole("inline", source)


def test_a_row_group_larger_than_what_is_held_is_walked_in_pieces(tmp_path: Path) -> None:
    """The whole of it would be more than the worker's share: pieces must give the same rows, backwards too."""
    pa = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    pq = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    numbers = np.arange(200_000)
    pq.write_table(pa.table({"x": numbers, "y": -numbers}), tmp_path / "a.parquet", row_group_size=150_000)
    source = penstock.parquet(tmp_path / "a.parquet", held=4096)
    assert source.blocks() == [150_000, 50_000]
    with feed_of("process", source, batch_size=5000) as feed:
        x = np.concatenate([batch["x"] for batch in drawn_arrays(feed)])
    np.testing.assert_array_equal(x, numbers)
    some = np.array([199_999, 3, 149_999, 150_000, 3, 77_777])
    assert [int(row["y"]) for row in source.reader().read(some)] == (-some).tolist()
    some = np.array([3, 3, 5])  # as far from each other as three neighbours
    for held in (4096, "64 MiB"):
        reader = penstock.parquet(tmp_path / "a.parquet", held=held).reader()
        assert [int(row["x"]) for row in reader.read(some)] == some.tolist()


def drawn_arrays(feed: Any) -> list[Any]:
    return [{name: column.copy() for name, column in batch.items()} for batch in feed]


def test_a_row_group_is_decoded_once_for_rows_that_come_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pa = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    pq = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    pq.write_table(pa.table({"x": range(100)}), tmp_path / "a.parquet", row_group_size=25)
    reader = penstock.parquet(tmp_path / "a.parquet").reader()
    decoded: list[int] = []
    decode = reader._decoded

    def counted(group: Any) -> Any:
        decoded.append(group.number)
        return decode(group)

    monkeypatch.setattr(reader, "_decoded", counted)
    for index in (3, 1, 24, 30, 2, 49, 26):
        assert reader.read(np.array([index])) == [{"x": index}]
    assert decoded == [0, 1]


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        ({"x": [{"a": 1}]}, {"columns": ["y"]}, "has no column 'y': it has x"),
        ({"x": [[[1], [2]]]}, {}, r"column 'x' is list<.*no place in a batch"),
    ],
)
def test_columns_that_cannot_be_read_are_refused_with_what_to_do(
    table: Any, options: Any, message: str, tmp_path: Path
) -> None:
    pa = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    pq = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    with pytest.raises(SpecError, match=message):
        penstock.parquet(tmp_path / "a.parquet", **options)


def test_files_of_other_columns_and_broken_files_are_named(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    pq = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": ["one"]}), tmp_path / "b.parquet")
    with pytest.raises(SpecError, match=r"'x' is string in .*b\.parquet.*int64 in .*a\.parquet"):
        penstock.parquet([tmp_path / "a.parquet", tmp_path / "b.parquet"])
    (tmp_path / "c.parquet").write_bytes(b"not at all")
    with pytest.raises(SpecError, match=r"c\.parquet' cannot be read as a file of Parquet"):
        penstock.parquet(tmp_path / "c.parquet")
    with pytest.raises(TypeError, match=r"columns='x' must be a list"):
        penstock.parquet(tmp_path / "a.parquet", "x")
    with pytest.raises(SpecError, match=r"columns=\[...\] has 'x' more than once"):
        penstock.parquet(tmp_path / "a.parquet", ["x", "x"])
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], ["x", "x", "y"])
    pq.write_table(twice, tmp_path / "d.parquet")
    with pytest.raises(SpecError, match=r"d\.parquet' has 2 columns called 'x'"):
        penstock.parquet(tmp_path / "d.parquet")
    assert [int(row["y"]) for row in whole("inline", penstock.parquet(tmp_path / "d.parquet", ["y"]))] == [3]


def test_a_row_group_that_is_damaged_fails_for_its_rows_alone(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    pq = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": np.arange(40)}), path, row_group_size=10, use_dictionary=False, compression="gzip")
    meta = pq.read_metadata(path)
    start = meta.row_group(2).column(0).data_page_offset
    data = bytearray(path.read_bytes())
    data[start : start + meta.row_group(2).column(0).total_compressed_size] = b"\xff" * (
        meta.row_group(2).column(0).total_compressed_size
    )
    path.write_bytes(data)
    count, items = _skipped(penstock.parquet(path), crew="process", batch_size=8)
    assert (count, [row.row for row in items]) == (30, list(range(20, 30)))


def _overwrite(path: Path, group: int) -> None:
    """Damage the first column of a row group."""
    import pyarrow.parquet as pq

    chunk = pq.read_metadata(path).row_group(group).column(0)
    with path.open("r+b") as file:
        file.seek(chunk.dictionary_page_offset or chunk.data_page_offset)
        file.write(b"\xff" * 20)


@pytest.mark.parametrize("crew", ["inline", "process"])
@pytest.mark.parametrize("shuffle", [False, True], ids=["order", "shuffle"])
def test_a_damaged_first_row_group_with_text_fails_for_its_rows_alone(crew: str, shuffle: bool, tmp_path: Path) -> None:
    """How long texts are is learned from rows beforehand, where on_error has no say."""
    pa = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    pq = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"s": ["w"] * 50, "x": range(50)}), path, row_group_size=10)
    _overwrite(path, 0)
    count, items = _skipped(penstock.parquet(path), crew=crew, shuffle=shuffle, batch_size=8)
    assert (count, sorted(row.row for row in items)) == (40, list(range(10)))
    in_pieces = penstock.parquet(path, held=1)
    assert _skipped(in_pieces, crew=crew, shuffle=shuffle, batch_size=8)[0] == 40
    for source in (penstock.parquet(path), in_pieces):
        with pytest.raises(LoadError, match=r"row \d of .*a\.parquet.*row group 0 of .* cannot be read"):
            whole(crew, source, shuffle=shuffle)
    for group in range(1, 5):
        _overwrite(path, group)
    with pytest.raises(SpecError, match=r"no row group of .*a\.parquet' can be read"):
        whole(crew, penstock.parquet(path), on_error="skip")


@pytest.mark.parametrize("held", [1, "64 MiB"])
def test_a_row_group_that_finds_no_room_is_not_taken_for_a_damaged_one(
    held: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What finds no memory in a worker is tried in a fresh one, what is damaged is not."""
    pa = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    pq = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    from penstock._core import parquet as module

    pq.write_table(pa.table({"x": range(10)}), tmp_path / "a.parquet")
    reader = penstock.parquet(tmp_path / "a.parquet", held=held).reader()

    def full(*_: Any) -> Any:
        raise pa.lib.ArrowMemoryError("malloc of size 1 failed")

    with monkeypatch.context() as patched:
        patched.setattr(module, "_opened", full)
        with pytest.raises(MemoryError, match="malloc of size 1 failed"):
            reader.read(np.arange(3))
    assert [int(row["x"]) for row in reader.read(np.arange(3))] == [0, 1, 2]


@pytest.mark.parametrize("arrow", [False, True], ids=["parquet", "arrow"])
def test_to_learn_how_long_texts_are_takes_little_memory(
    arrow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row group may be as large as the budget, and what the parent decodes of it nobody has planned."""
    pa = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    pq = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.random.default_rng(0).random(2_000_000)), 1000)
    raw = [bytes(10_000)] * 1999 + [bytes(100_000)]
    table = pa.table({"v": vectors, "s": ["x"] * 500 + ["long" * 50] * 1500, "raw": raw})
    path = tmp_path / ("a.arrow" if arrow else "a.parquet")
    if arrow:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    else:
        pq.write_table(table, path, use_dictionary=False, write_batch_size=32)  # pages of 1 MiB, not of 1024 rows
    source = penstock.parquet(path, ["v", "s"])
    pool = pa.proxy_memory_pool(pa.system_memory_pool())
    monkeypatch.setattr(pa, "system_memory_pool", lambda: pool)
    assert [leaf.shape for leaf in source.spec().leaves] == [(512,), (1000,)]
    assert [leaf.shape for leaf in penstock.parquet(path, ["raw"]).spec().leaves] == [(32768,)]
    if not arrow:  # batches of Arrow files are looked at where they lie
        assert pool.max_memory() > 0
    assert pool.max_memory() < 4 * 2**20


# ---------------------------------------- hdf5


def test_one_dataset_gives_arrays_and_a_list_gives_dicts(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py", reason="HDF5 needs h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["y"] = np.arange(6).reshape(3, 2), np.array([b"a", b"bc", b"d"], "S4")
        file["ragged"] = np.array(["a", "bb", "c"], h5py.string_dtype())
        file["short"] = np.arange(2)
    with feed_of("inline", penstock.hdf5(tmp_path / "a.h5", "x")) as feed:
        assert [batch.tolist() for batch in feed] == [[[0, 1], [2, 3], [4, 5]]]
    with feed_of("process", penstock.hdf5(tmp_path / "a.h5", ["x", "y"]), cast={"x": "uint8"}) as feed:
        (batch,) = [{name: leaf.copy() for name, leaf in batch.items()} for batch in feed]
        assert batch["x"].dtype == np.uint8
        assert batch["y"].tolist() == [b"a", b"bc", b"d"]
    for names, message in (
        ("z", "has no dataset 'z': it has ragged, short, x, y"),
        ("ragged", "holds values of varying length"),
        (["x", "short"], "different numbers of rows: {'short': 2, 'x': 3}"),
    ):
        with pytest.raises(SpecError, match=message):
            penstock.hdf5(tmp_path / "a.h5", names)
    (tmp_path / "b.h5").write_bytes(b"not at all")
    with pytest.raises(SpecError, match=r"b\.h5' cannot be opened as a file of HDF5"):
        penstock.hdf5(tmp_path / "b.h5", "x")


@pytest.mark.parametrize("kind", ["hdf5", "parquet"])
def test_threads_do_not_share_what_a_reader_has_open_or_keeps(kind: str, tmp_path: Path) -> None:
    """One closed the file that the other was reading, and rows were lost, or came from another file."""
    values = np.arange(2000)
    source: Any
    if kind == "hdf5":
        h5py = pytest.importorskip("h5py", reason="HDF5 needs h5py")
        for number, part in enumerate(np.split(values, 2)):
            with h5py.File(tmp_path / f"{number}.h5", "w") as file:
                file["i"] = part
        source = penstock.hdf5([tmp_path / "0.h5", tmp_path / "1.h5"], ["i"])
    else:
        pa = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
        pq = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
        pq.write_table(pa.table({"i": values}), tmp_path / "a.parquet", row_group_size=20)
        source = penstock.parquet(tmp_path / "a.parquet", held="1 KiB")
    options = {"num_workers": 3, "executor": "thread", "shuffle": True}
    for seed in range(3):
        with feed_of("thread", source, **options, seed=seed) as feed:
            assert sorted(int(i) for batch in feed for i in batch["i"]) == values.tolist()


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_hdf5_is_read_right_after_the_parent_has_read_it(start_method: Any, tmp_path: Path) -> None:
    """A handle that went through a fork would share its place in the file with others."""
    case = _hdf5(tmp_path)
    source = case.source()
    reader = source.reader()
    reader.read(np.arange(3))  # open here while workers are made
    try:
        with Feed(
            source, batch_size=4, shuffle=True, num_workers=2, start_method=start_method, memory="512 MiB"
        ) as feed:
            assert_same(drawn(feed), [case.rows[i] for i in order_of(shuffle=True)[0]])
    finally:
        reader.close()


# ---------------------------------------- tar


def _pack(path: Path, members: list[tuple[str, bytes]], **options: Any) -> Path:
    with tarfile.open(path, options.pop("mode", "w"), **options) as file:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return path


def test_a_sample_that_lacks_a_member_fails_by_its_key(tmp_path: Path) -> None:
    path = _pack(tmp_path / "a.tar", [("1.a", b"x"), ("1.b", b"y"), ("2.a", b"z"), ("README", b""), ("3.b", b"w")])
    source = penstock.tar(path)
    assert list(source.keys) == ["1", "2", "3"]
    count, items = _skipped(source, crew="process")
    assert (count, [(item.key, item.path) for item in items]) == (1, [("2", str(path)), ("3", str(path))])
    with pytest.raises(LoadError, match=r"sample '2' of '.*a\.tar'.*no member \.b, only \.a.*extensions"):
        whole("inline", source)
    only = penstock.tar(path, ["a"])
    with pytest.raises(LoadError, match=r"sample '3' of .*it has no member \.a: say which"):
        whole("inline", only)
    assert _skipped(only, crew="inline") == (2, [only.carried(np.array([2]))[0]])


def test_tar_files_that_cannot_be_read_by_place_say_so(tmp_path: Path) -> None:
    for mode, how in (("w:gz", "gzip"), ("w:bz2", "bzip2"), ("w:xz", "xz")):
        path = _pack(tmp_path / f"a.tar.{how}", [("1.a", b"x")], mode=mode)
        with pytest.raises(SpecError, match=f"is compressed with {how}.*unpack it"):
            penstock.tar(path)
    (tmp_path / "b.tar").write_bytes(b"hello" * 1000)
    with pytest.raises(SpecError, match=r"b\.tar' has no header of a tar file at byte 0"):
        penstock.tar(tmp_path / "b.tar")
    path = _pack(tmp_path / "c.tar", [("1.a", b"x" * 5000), ("2.a", b"y" * 5000)])
    os.truncate(path, 8000)
    with pytest.raises(SpecError, match=r"c\.tar' ends at byte 8000.*cut short"):
        penstock.tar(path)
    with pytest.raises(SpecError, match=r"no sample has a member \.zip: there are \.a"):
        penstock.tar(_pack(tmp_path / "d.tar", [("1.a", b"x")]), ["zip"])
    with pytest.raises(SpecError, match=r"two members \.a of sample '1'"):
        penstock.tar(_pack(tmp_path / "e.tar", [("1.a", b"x"), ("1.a", b"x")]))
    with pytest.raises(SpecError, match="holds no sample"):
        penstock.tar(_pack(tmp_path / "f.tar", [("README", b"x")]))


def test_an_index_is_kept_and_is_not_used_for_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock._core import tar as module

    path = _pack(tmp_path / "a.tar", [("1.a", b"x"), ("é.a", b"yy")])
    first = penstock.tar(path, index=tmp_path / "index")
    (kept,) = (tmp_path / "index").iterdir()
    walked: list[str] = []
    walk = module._walk

    def counted(path: str) -> Any:
        walked.append(path)
        return walk(path)

    monkeypatch.setattr(module, "_walk", counted)
    again = penstock.tar(path, index=tmp_path / "index")
    assert walked == []
    assert again.fingerprint() == first.fingerprint()
    assert list(again.keys) == ["1", "é"]
    kept.write_text("{")
    penstock.tar(path, index=tmp_path / "index")
    assert len(walked) == 1
    _pack(path, [("1.a", b"x"), ("2.a", b"yy"), ("3.a", b"zzz")])
    os.utime(path, ns=(1, 1))
    assert len(penstock.tar(path, index=tmp_path / "index")) == 3


def test_a_member_far_longer_than_the_others_comes_whole(tmp_path: Path) -> None:
    sizes = [10, 10, 200_000, *[10] * 30]
    path = _pack(tmp_path / "a.tar", [(f"{i:03}.a", bytes([i]) * size) for i, size in enumerate(sizes)])
    source = penstock.tar(path)
    assert source.spec().sample_bytes < 1000
    with feed_of("process", source) as feed:
        assert [len(row["a"]) for row in drawn(feed)] == sizes


# ---------------------------------------- what is missing


@pytest.mark.parametrize(
    ("call", "module", "extra"),
    [
        (penstock.parquet, "pyarrow", "parquet"),
        (lambda path: penstock.hdf5(path, "x"), "h5py", "hdf5"),
        (penstock.images, "cv2", "images"),
    ],
)
def test_a_library_that_is_missing_is_named_with_how_to_get_it(
    call: Any, module: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf'penstock\.{extra} needs .*pip install "penstock\[{extra}\]"'):
        call(tmp_path)
