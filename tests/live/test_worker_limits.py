"""What a worker may grow by: what its first load leaves behind for good is no reason to begin anew again and again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import Feed, MiB

KEPT: list[Any] = []


def imports_much(i: int) -> Any:
    """As a load does that imports a framework, or reads a dictionary, the first time that it is called."""
    if not KEPT:
        KEPT.append(np.ones(MiB(120), np.uint8))
    return np.full(4, i)


@pytest.mark.parametrize("method", [None, "spawn"])
def test_a_worker_that_keeps_what_its_first_load_took_is_not_replaced_for_it(method: Any) -> None:
    """Its successor would have to take as much: before, each worker did one task, and there were hundreds of them."""
    with Feed(range(400), imports_much, batch_size=20, memory="384 MiB", num_workers=2, start_method=method) as feed:
        assert [int(batch[0, 0]) for batch in feed] == list(range(0, 400, 20))
        assert feed.stats.restarts == 0
        assert feed.stats.peak_bytes <= feed.plan.memory


def leaks(i: int) -> Any:
    KEPT.append(np.ones(MiB(4), np.uint8))
    return imports_much(i)


def test_a_worker_that_keeps_more_and_more_is_replaced_all_the_same() -> None:
    with Feed(range(200), leaks, batch_size=20, memory="384 MiB", num_workers=2) as feed:
        assert [int(batch[0, 0]) for batch in feed] == list(range(0, 200, 20))
        assert feed.stats.restarts > 2
        assert feed.stats.peak_bytes <= feed.plan.memory


def test_arrow_finds_room_in_every_budget(tmp_path: Path) -> None:
    """Its own allocator reserves address space in large pieces: at 1 GiB one of them was all that a worker had."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    rows = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(1200, dtype=np.float32)), 4)
    pq.write_table(pa.table({"id": range(300), "v": rows}), tmp_path / "a.parquet", row_group_size=50)
    for memory in ("512 MiB", "900 MiB", "1 GiB", "1.5 GiB"):
        with Feed(penstock.parquet(tmp_path / "a.parquet"), batch_size=32, memory=memory, num_workers=2) as feed:
            assert sum(len(batch["id"]) for batch in feed) == 300
