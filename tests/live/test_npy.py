"""``Feed(paths, np.load)``: files are read straight into the slot, and nobody can tell but by the clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import Feed, LoadError, SpecError
from penstock._core.npy import read_npy


def saved(folder: Path, arrays: list[Any]) -> list[str]:
    paths = [str(folder / f"{i}.npy") for i in range(len(arrays))]
    for path, array in zip(paths, arrays, strict=True):
        np.save(path, array)
    return paths


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 2}, {"num_workers": 2, "executor": "thread"}])
def test_files_come_as_np_load_gives_them(tmp_path: Path, options: dict[str, Any]) -> None:
    """C order, Fortran order, the other byte order and strided originals all mean the same array."""
    plain = [np.arange(12, dtype=np.int32).reshape(3, 4) + i for i in range(20)]
    odd = [
        a if i % 4 == 0 else np.asfortranarray(a) if i % 4 == 1 else a.astype(">i4") if i % 4 == 2 else a
        for i, a in enumerate(plain)
    ]
    paths = saved(tmp_path, odd)
    with Feed(paths, np.load, batch_size=6, memory="256 MiB", **options) as feed:
        got = np.concatenate([batch.copy() for batch in feed])
    assert np.array_equal(got, np.stack(plain))
    assert got.dtype == np.int32


def test_what_is_wrong_with_a_file_is_said_by_np_load(tmp_path: Path) -> None:
    """A missing file, one that was cut short, one of another shape: the error names it."""
    paths = saved(tmp_path, [np.zeros(1000) for _ in range(12)])
    (tmp_path / "9.npy").write_bytes((tmp_path / "9.npy").read_bytes()[:500])
    with (
        Feed(paths, np.load, batch_size=2, memory="256 MiB", num_workers=1) as feed,
        pytest.raises(LoadError) as caught,
    ):
        for _ in feed:
            pass
    assert caught.value.item == paths[9]
    np.save(paths[9], np.zeros(7))
    with (
        Feed(paths, np.load, batch_size=2, memory="256 MiB", num_workers=1) as feed,
        pytest.raises(SpecError, match=r"9\.npy"),
    ):
        for _ in feed:
            pass
    (tmp_path / "9.npy").unlink()
    with (
        Feed(paths, np.load, batch_size=2, memory="256 MiB", num_workers=1) as feed,
        pytest.raises(LoadError) as caught,
    ):
        for _ in feed:
            pass
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_only_what_fits_its_place_is_read_directly(tmp_path: Path) -> None:
    """The short way is taken for the plain case, and only for it."""
    (path,) = saved(tmp_path, [np.arange(4.0)])
    out = np.zeros(4)
    assert read_npy(path, out)
    assert out.tolist() == [0, 1, 2, 3]
    assert not read_npy(path, np.zeros(5))
    assert not read_npy(path, np.zeros(4, np.float32))
    assert not read_npy(path, np.zeros(8)[::2])
    assert not read_npy(str(tmp_path / "none.npy"), out)
    (tmp_path / "text.npy").write_text("no array at all")
    assert not read_npy(str(tmp_path / "text.npy"), out)
