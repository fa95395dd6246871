"""With num_workers=None a load goes to threads only if that is known to be right, and better."""

from __future__ import annotations

import io
import threading
import time
from typing import Any

import numpy as np
import pytest

from penstock import Feed, MiB

TIGHT = "48 MiB"  # room for one process or two, and for many threads
_file = io.BytesIO(np.arange(1000, dtype=np.int64).tobytes())


def waits(i: int) -> Any:
    time.sleep(0.003)
    return np.full(64, i)


def waits_long(i: int) -> Any:
    time.sleep(0.012)  # so that waking up, on a busy machine, is little of it
    return np.full(64, i)


def waits_and_reads_a_global_file(i: int) -> Any:
    _file.seek(8 * i)
    time.sleep(0.003)  # another thread would move the file here
    return np.frombuffer(_file.read(8), np.int64)


def waits_for_a_list(item: list[int]) -> Any:
    time.sleep(0.003)
    return np.full(64, item[0])


def works(i: int) -> Any:
    total = 0
    for k in range(20_000):
        total += k
    return np.full(64, i + 0 * total)


def test_a_load_that_waits_gets_threads_where_processes_do_not_fit() -> None:
    """Many more of them than cores, and the same samples in the same order."""
    with Feed(range(200), waits, batch_size=8, memory=TIGHT) as feed:
        assert feed.plan.executor == "thread"
        assert feed.plan.workers > 4
        assert "threads, not processes: two loads at once took" in feed.plan.notes[-1]
        assert [int(n) for batch in feed for n in batch[:, 0]] == list(range(200))
        assert any(thread.name.startswith("penstock-") for thread in threading.enumerate())
    assert feed.plan.total_bytes <= MiB(48)


def test_a_load_that_waits_gets_more_processes_than_cores_where_they_fit() -> None:
    """As many as help: 16, whatever the number of cores, for one that waits nearly always."""
    with Feed(range(100), waits_long, batch_size=8, memory="1 GiB") as feed:
        assert feed.plan.executor == "process"
        assert feed.plan.workers == 16
        assert "as many fit, and a process can be limited and replaced" in feed.plan.notes[-1]


@pytest.mark.parametrize(
    ("load", "items", "options", "said"),
    [
        (waits_and_reads_a_global_file, range(100), {}, "_file is a BytesIO"),
        (waits_for_a_list, [[i] for i in range(100)], {}, "items are not all plain"),
        (waits, range(100), {"start_method": "spawn"}, "start_method='spawn' asks for them"),
        (waits, range(100), {"timeout": 30}, "only a process can be stopped"),
        (waits, range(100), {"collate_fn": np.stack}, "collate_fn is a function"),
        (works, range(100), {}, "two loads at once took"),
    ],
    ids=["an open file", "items that can change", "start_method", "timeout", "collate_fn", "the GIL"],
)
def test_what_is_not_known_to_be_safe_stays_in_processes(
    load: Any, items: Any, options: dict[str, Any], said: str
) -> None:
    """However tight the budget: wrong samples are worse than slow ones."""
    with Feed(items, load, batch_size=8, memory="96 MiB", **options) as feed:
        assert feed.plan.executor == "process"
        assert feed.plan.workers >= 1
        assert any("processes, not threads" in note and said in note for note in feed.plan.notes), feed.plan.notes
        assert [int(n) for batch in feed for n in batch[:, 0]] == list(range(100))


def test_a_number_of_workers_keeps_the_executor() -> None:
    """Whoever says how many has said what: the default is processes."""
    with Feed(range(40), waits, batch_size=8, memory="96 MiB", num_workers=1) as feed:
        assert (feed.plan.executor, feed.plan.workers) == ("process", 1)
        assert "threads" not in "".join(feed.plan.notes)


def test_small_batches_of_a_fast_load_are_loaded_here_and_large_ones_by_workers() -> None:
    """What counts is the work in a slot: telling a worker costs the same for one sample as for a thousand."""

    def load(i: int) -> int:
        return i

    with Feed(range(4000), load, batch_size=1, memory="256 MiB") as feed:
        assert feed.plan.workers == 0
        assert "all of a slot take less than to have a worker do it" in feed.plan.notes[0]
    with Feed(range(40_000), load, batch_size=1024, memory="256 MiB") as feed:
        assert feed.plan.workers > 0
        assert [int(n) for batch in feed for n in batch] == list(range(40_000))
