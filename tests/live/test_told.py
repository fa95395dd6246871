"""Cold rows of files are told to the disk before anybody has room for them, and only those that are cold."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import Feed
from penstock._core import engine, source
from penstock._core.arena import _resident_bytes
from penstock._core.source import _ArrayReader, _disk

ROWS, ROW_BYTES, BATCH = 128, 192 * 2**10, 4

pytestmark = pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="asks the page cache")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    np.save(tmp_path / "x.npy", np.repeat(np.arange(ROWS, dtype=np.float32)[:, None], ROW_BYTES // 4, axis=1))
    return tmp_path / "x.npy"


@pytest.fixture(autouse=True)
def a_process_that_has_read_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests found in the page cache is remembered for some blocks."""
    monkeypatch.setattr(source._disk, "_cold", True)
    monkeypatch.setattr(source._disk, "_asked", 0)


def chill(path: Path) -> None:
    with path.open("r+b") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seen(batch: Any) -> list[int]:
    assert (batch == batch[:, :1]).all()
    return [int(number) for number in batch[:, 0]]


def a_load(row: Any) -> Any:
    return row[:1024]


@pytest.mark.parametrize("load", [None, a_load])
@pytest.mark.parametrize("crew", [{"num_workers": 2}, {"num_workers": 2, "executor": "thread"}, {"num_workers": 0}])
def test_the_disk_reads_rows_for_which_there_is_no_slot_yet(path: Path, crew: dict[str, Any], load: Any) -> None:
    """Between two tasks it would wait otherwise: rows one by one came at half of what it can give."""
    with (
        Feed(penstock.arrays(str(path)), load, batch_size=BATCH, memory="256 MiB", shuffle=True, **crew) as feed,
        path.open("r+b") as opened,
        mmap.mmap(opened.fileno(), 0) as mapping,
    ):
        feed.plan  # noqa: B018 - what is looked at for the plan is read
        chill(path)
        if _resident_bytes(mapping) > ROWS * ROW_BYTES // 2:
            pytest.skip("this file system keeps its files in memory")
        batches = iter(feed)
        got = [number for _ in range(3) for number in seen(next(batches))]
        # The consumer holds still: nothing more than the slots can be read, by anybody who waits for one.
        room = (3 + feed.plan.slots) * BATCH * ROW_BYTES
        until = time.monotonic() + 10
        while _resident_bytes(mapping) < 2 * room and time.monotonic() < until:
            time.sleep(0.01)
        assert _resident_bytes(mapping) >= 2 * room
        assert sorted(got + [number for batch in batches for number in seen(batch)]) == list(range(ROWS))


def test_of_rows_that_are_in_the_page_cache_nobody_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take a tenth of the time in which such rows are read."""
    told: list[int] = []
    monkeypatch.setattr(engine, "TOLD_BYTES", 2 * BATCH * ROW_BYTES)  # not of all of this small file at once
    with Feed(penstock.arrays(str(path)), batch_size=BATCH, memory="256 MiB", shuffle=True, num_workers=0) as feed:
        for _ in range(2):
            assert sorted(number for batch in feed for number in seen(batch)) == list(range(ROWS))
        assert _disk._cold is False
        monkeypatch.setattr(_ArrayReader, "tell", lambda self, indices, **_: told.append(len(indices)))
        assert sorted(number for batch in feed for number in seen(batch)) == list(range(ROWS))
    assert not told


def test_a_file_that_is_gone_is_told_of_by_the_rows_that_are_wanted_of_it(tmp_path: Path) -> None:
    """Not by the rows before them, whose task was to tell the disk of it."""
    for number in range(2):
        np.save(tmp_path / f"{number}.npy", np.full((64, 1024), number, np.float32))
    paths = [tmp_path / f"{number}.npy" for number in range(2)]
    with Feed(penstock.arrays(list(map(str, paths))), batch_size=8, memory="256 MiB", num_workers=2) as feed:
        feed.plan  # noqa: B018 - the file was there when the source was made
        paths[1].unlink()
        good: list[float] = []
        with pytest.raises(penstock.LoadError, match=r"1\.npy"):
            good.extend(float(batch[0, 0]) for batch in feed)
        assert good == [0.0] * 8
