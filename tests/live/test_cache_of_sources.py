"""Caches beside what else a feed can do: blocks that are mixed, sources that are read in another way than before."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import Blocks, CacheError, Feed
from tests.live.crews import CREWS


def load(i: int) -> Any:
    return np.full((128, 128), i, np.float32), i


@pytest.mark.parametrize("crew", CREWS)
@pytest.mark.parametrize("where", ["ram", "folder"])
def test_blocks_come_out_right_whatever_part_of_them_is_kept(crew: str, where: str, tmp_path: Path) -> None:
    """Rows that are kept side by side do not belong side by side in the slot."""
    cache = "ram" if where == "ram" else str(tmp_path / "kept")
    options: dict[str, Any] = {"batch_size": 10, "shuffle": Blocks(rows=10, group=50), **CREWS[crew]}
    with Feed(range(1000), load, memory="256 MiB", **options) as feed:
        wanted = [[i for _, y in epoch for i in y.tolist()] for epoch in feed.epochs(3)]
    memory = "112 MiB" if crew == "process" else "16 MiB"
    with Feed(range(1000), load, memory=memory, cache=cache, **options) as feed:
        for expected in wanted:
            seen: list[int] = []
            for x, y in feed:
                assert (x == y[:, None, None]).all()
                seen += y.tolist()
            assert seen == expected
        assert feed.stats.cached > 0
        if where == "ram":
            assert feed.plan.held_samples < 1000, "all of it fits, so this shows nothing"


def texts(source: Any, folder: Path) -> list[int]:
    with Feed(source, len, batch_size=2, memory="64 MiB", num_workers=0, cache=str(folder)) as feed:
        return [n for batch in feed for n in batch.tolist()]


def test_lines_that_are_read_in_another_way_are_not_taken_from_a_cache(tmp_path: Path) -> None:
    """Another encoding, or blanks that are kept: other samples from the same bytes."""
    path, kept = tmp_path / "a.txt", tmp_path / "kept"
    path.write_bytes("  \u00e9\nb\n".encode())
    assert texts(penstock.lines(path), kept) == [1, 1]
    for other in ({"strip": False}, {"encoding": "latin-1"}):
        with pytest.raises(CacheError):
            texts(penstock.lines(path, **other), kept)
    assert texts(penstock.lines(path), kept) == [1, 1]


def test_a_text_file_that_was_written_anew_is_not_taken_from_a_cache(tmp_path: Path) -> None:
    """Also when it has as many bytes as before."""
    path, kept = tmp_path / "a.txt", tmp_path / "kept"
    path.write_text("a\nb\nccc\n")
    assert texts(penstock.lines(path), kept) == [1, 1, 3]
    path.write_text("aaa\nb\nc\n")
    os.utime(path, (1, 1))
    with pytest.raises(CacheError):
        texts(penstock.lines(path), kept)


def test_pictures_that_are_fitted_in_another_way_are_not_taken_from_a_cache(tmp_path: Path) -> None:
    """The same files, other pixels."""
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    pytest.importorskip("cv2", reason="opencv is not installed")
    pytest.importorskip("simplejpeg", reason="simplejpeg is not installed")
    (tmp_path / "pictures").mkdir()
    image.new("RGB", (40, 10), (200, 200, 200)).save(tmp_path / "pictures" / "0.png")

    def pixels(fit: Any) -> Any:
        source = penstock.images(tmp_path / "pictures", size=(4, 4), fit=fit)
        with Feed(source, batch_size=1, memory="256 MiB", num_workers=0, cache=str(tmp_path / "kept")) as feed:
            return [batch.ravel()[:3].tolist() for batch in feed]

    assert pixels("stretch") == [[200, 200, 200]]
    with pytest.raises(CacheError):
        pixels("pad")
