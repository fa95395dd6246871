"""Blocks that do not stay in the page cache are read past it: the same rows, and a way back where that cannot be."""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import Blocks, Feed, arrays
from penstock._core import past_cache as module
from penstock._core import source as sources
from penstock._core.arena import _resident_bytes
from penstock._core.past_cache import AT_ONCE, LEAST_BYTES, MOST_BYTES, THROUGH_EVERY, PastCache
from penstock._core.source import _header

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not hasattr(os, "O_DIRECT"), reason="reads past the cache are Linux's here"
)

ROW = 192 * 2**10  # bytes


@pytest.fixture
def past(monkeypatch: pytest.MonkeyPatch) -> Iterator[PastCache]:
    """One that reads everything so."""
    made = PastCache()
    made.allowed = made.gone = True
    monkeypatch.setattr(sources, "past_cache", made)
    monkeypatch.setattr(module, "THROUGH_EVERY", 10**9)
    monkeypatch.setattr(sources._disk, "needed", lambda *_: True)
    yield made
    if made._hands is not None:
        made._hands.close()


def _save(path: Path, rows: int, row_bytes: int = ROW, dtype: Any = np.float32) -> Any:
    numbers = np.random.default_rng(rows).integers(0, 250, rows * row_bytes // np.dtype(dtype).itemsize)
    array = numbers.astype(dtype).reshape(rows, -1)
    np.save(path, array)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return array


def _begun(past: PastCache, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sizes: list[int] = []
    begin = past.begin

    def counted(path: str, offset: int, size: int, then: Any) -> None:
        sizes.append(size)
        begin(path, offset, size, then)

    monkeypatch.setattr(past, "begin", counted)
    return sizes


@pytest.mark.parametrize("row_bytes", [ROW, 512, 4096, 1000 * 4, MOST_BYTES, MOST_BYTES + 4, 5 * 2**20 + 4])
def test_rows_come_to_their_places(
    row_bytes: int, tmp_path: Path, past: PastCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever they begin, also the last of a file, also more than one read takes."""
    rows = max(6, 3 * MOST_BYTES // row_bytes)
    array = _save(tmp_path / "x.npy", rows, row_bytes)
    reader: Any = arrays(str(tmp_path / "x.npy")).reader()
    leaves = arrays(str(tmp_path / "x.npy")).spec().leaves
    sizes = _begun(past, monkeypatch)
    for first, behind in ((0, rows), (1, rows // 2), (rows // 2, rows)):
        indices = np.arange(first, behind)
        places = np.random.default_rng(0).permutation(rows + 3)[: len(indices)]
        out = np.zeros((rows + 3, array.shape[1]), np.float32)
        reader.scatter(indices, [out], places, leaves, told=True)
        assert (out[places] == array[first:behind]).all()
        assert not np.delete(out, places, axis=0).any()
    assert max(sizes) <= MOST_BYTES
    assert len(sizes) >= 3
    assert past._buffers is not None
    assert len(past._buffers) == AT_ONCE


def test_several_blocks_of_several_files(tmp_path: Path, past: PastCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than are under way at a time."""
    files = [tmp_path / f"{number}.npy" for number in range(4)]
    array = np.concatenate([_save(file, 40 + number) for number, file in enumerate(files)])
    source = arrays(list(map(str, files)))
    reader: Any = source.reader()
    sizes = _begun(past, monkeypatch)
    indices = np.concatenate([np.arange(start, start + 21) for start in (3, 25, 55, 90, 140)])
    places = np.random.default_rng(1).permutation(len(indices))
    out = np.zeros((len(indices), array.shape[1]), np.float32)
    reader.scatter(indices, [out], places, source.spec().leaves, told=True)
    assert (out[places] == array[indices]).all()
    assert len(sizes) >= 5
    assert not past._under_way


@pytest.mark.parametrize("dtype", [">f4", "<f4"])
def test_the_other_byte_order_is_turned_as_ever(dtype: str, tmp_path: Path, past: PastCache) -> None:
    array = _save(tmp_path / "x.npy", 42, dtype=dtype)
    source = arrays(str(tmp_path / "x.npy"))
    out = np.zeros((42, array.shape[1]), np.float32)
    reader: Any = source.reader()
    reader.scatter(np.arange(42), [out], np.arange(42)[::-1], source.spec().leaves, told=True)
    assert (out[::-1] == array).all()


@pytest.mark.parametrize("row_bytes", [ROW, 5 * 2**20 + 4])
@pytest.mark.parametrize("how", ["no such flag", "no memory", "cut short", "refused"])
def test_where_it_cannot_be_they_are_read_as_usual(
    how: str, row_bytes: int, tmp_path: Path, past: PastCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File systems without it, and limits."""
    rows = 63 * ROW // row_bytes
    array = _save(tmp_path / "x.npy", rows, row_bytes)
    source = arrays(str(tmp_path / "x.npy"))

    def none(*_: Any) -> Any:
        raise OSError(22, "no")

    def direct(fd: int) -> bool:
        return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)

    preadv = os.preadv
    if how == "no memory":
        monkeypatch.setattr(module, "private", none)
    elif how == "refused":
        usual = os.open
        monkeypatch.setattr(os, "open", lambda path, flags: none() if flags & os.O_DIRECT else usual(path, flags))
    elif how == "cut short":
        monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, views, at) if not direct(fd) else 4096)
    else:
        past._works = False
    out = np.zeros((rows, array.shape[1]), np.float32)
    reader: Any = source.reader()
    for _ in range(2):
        out[...] = 0
        reader.scatter(np.arange(rows), [out], np.arange(rows)[::-1], source.spec().leaves, told=True)
        assert (out[::-1] == array).all()
    assert past._works == (how == "cut short")


def test_a_file_that_was_cut_is_an_error_and_nothing_stays_under_way(tmp_path: Path, past: PastCache) -> None:
    array = _save(tmp_path / "x.npy", 63)
    source = arrays(str(tmp_path / "x.npy"))
    os.truncate(tmp_path / "x.npy", 30 * ROW)
    out = np.zeros((63, array.shape[1]), np.float32)
    reader: Any = source.reader()
    with pytest.raises(EOFError, match="was the file cut short"):
        reader.scatter(np.arange(63), [out], np.arange(63), source.spec().leaves, told=True)
    assert not past._under_way
    reader.scatter(np.arange(21), [out], np.arange(21), source.spec().leaves, told=True)
    assert (out[:21] == array[:21]).all()


def test_when_blocks_are_taken_to_be_gone() -> None:
    """What is read for the first time is not, and what is there again is no longer."""
    past = PastCache()
    past.allowed = True
    found = []
    for epoch, cold in ((3, True), (3, True), (4, False), (4, True), (5, True)):
        past.saw(epoch, cold=cold)
        found.append(past.gone)
    assert found == [False, False, False, True, True]
    wanted = [past.wants(MOST_BYTES, large=False) for _ in range(2 * THROUGH_EVERY)]
    assert wanted.count(False) == 2  # some go through the cache, or nobody would see that they stay
    assert not past.wants(LEAST_BYTES - 1, large=False)
    past.saw(5, cold=False)
    assert not past.wants(MOST_BYTES, large=False)
    assert all(past.wants(MOST_BYTES, large=True) for _ in range(2 * THROUGH_EVERY))
    past.allowed = False
    assert not past.wants(MOST_BYTES, large=True)


def test_nothing_is_told_to_the_system_of_what_is_read_past_it(
    tmp_path: Path, past: PastCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be read twice."""
    _save(tmp_path / "x.npy", 63)
    file, _ = _header(str(tmp_path / "x.npy"))
    told: list[int] = []
    advise = os.posix_fadvise

    def counted(fd: int, offset: int, size: int, advice: int) -> None:
        told.extend([size] * (advice == os.POSIX_FADV_WILLNEED))
        advise(fd, offset, size, advice)

    monkeypatch.setattr(os, "posix_fadvise", counted)
    file.tell(np.arange(21), epoch=1)
    assert not told
    file.tell(np.arange(21))  # rows that lie anywhere
    past.gone = False
    file.tell(np.arange(21), epoch=0)
    assert told == [21 * ROW] * 2


def test_where_nobody_can_tell_what_is_in_memory_nothing_is_taken_to_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a tmpfs, or an overlay as the root of a container is, all of it would be read from the disk in every epoch."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        _save(Path(folder, "x.npy"), 63)
        file, _ = _header(str(Path(folder, "x.npy")))
        with open(file.path, "rb") as opened:
            if sources._is_here(opened.fileno(), 4096) is not None:
                pytest.skip("here the system can tell")
        past, disk = PastCache(), sources._Disk()
        past.allowed = True
        monkeypatch.setattr(sources, "past_cache", past)
        monkeypatch.setattr(sources, "_disk", disk)
        for epoch in (0, 1, 2):
            file.tell(np.arange(63), epoch=epoch)
        for _ in range(sources.ASKED_EVERY):
            file.tell(np.arange(63), epoch=3)
        assert disk.blind
        assert not past.gone


def test_the_system_is_told_of_rows_that_are_never_read_past_it(
    tmp_path: Path, past: PastCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those in the other byte order, and those that are cast."""
    array = _save(tmp_path / "x.npy", 63, dtype=">f4")
    told: list[int] = []
    advise = os.posix_fadvise

    def counted(fd: int, offset: int, size: int, advice: int) -> None:
        told.extend([size] * (advice == os.POSIX_FADV_WILLNEED))
        advise(fd, offset, size, advice)

    monkeypatch.setattr(os, "posix_fadvise", counted)
    _header(str(tmp_path / "x.npy"))[0].tell(np.arange(21), epoch=1)
    assert told == [21 * ROW]
    array = _save(tmp_path / "x.npy", 63)
    source = arrays(str(tmp_path / "x.npy"))
    leaves = source.spec().cast("float16").leaves
    out = np.zeros((63, array.shape[1]), np.float16)
    reader: Any = source.reader()
    past.allowed = past.gone = True
    reader.scatter(np.arange(63), [out], np.arange(63)[::-1], leaves, told=True)
    assert (out[::-1] == array.astype(np.float16)).all()
    told.clear()
    reader.tell(np.arange(21), epoch=1)
    assert told == [21 * ROW]


def test_an_error_of_one_file_is_no_reason_never_to_do_it_again(tmp_path: Path, past: PastCache) -> None:
    """A file that is gone says nothing about the file system."""
    array = _save(tmp_path / "x.npy", 63)
    source = arrays(str(tmp_path / "x.npy"))
    out = np.zeros((63, array.shape[1]), np.float32)
    reader: Any = source.reader()
    put: list[Any] = []
    past.begin(str(tmp_path / "gone.npy"), 0, LEAST_BYTES, put.append)
    past.finish()
    assert put == [None]
    assert past._works
    reader.scatter(np.arange(63), [out], np.arange(63), source.spec().leaves, told=True)
    assert (out == array).all()


@pytest.mark.parametrize(("memory", "past"), [("384 MiB", True), ("124 MiB", False)])
def test_a_feed_whose_files_do_not_stay_in_memory(memory: str, past: bool, tmp_path: Path) -> None:
    """Epoch after epoch, each sample once, within the budget; past the cache only where there is room for it."""
    files = [tmp_path / f"{number}.npy" for number in range(4)]
    expected = sorted(int(row.sum()) for file in files for row in _save(file, 105).astype(np.int64))
    sizes = sum(file.stat().st_size for file in files)
    if _resident(files) > sizes // 2:
        pytest.skip("this file system keeps its files in memory")
    source = arrays(list(map(str, files)))
    with Feed(source, batch_size=16, num_workers=2, memory=memory, shuffle=Blocks(group=128)) as feed:
        for _ in range(4):
            for file in files:
                with open(file, "rb") as opened:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            seen = [int(row.sum()) for batch in feed for row in batch.astype(np.int64)]
            assert sorted(seen) == expected
        assert feed.stats.peak_bytes <= feed.plan.memory
        assert feed.stats.restarts == 0
    assert (_resident(files) < sizes // 2) == past


def _resident(files: list[Path]) -> int:
    found = 0
    for file in files:
        with open(file, "r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapping:
            found += _resident_bytes(mapping)
    return found
