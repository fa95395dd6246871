"""Kills while a cache is being filled: what is said to be there is right, and the rest is made again."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import CacheWarning, Feed

COUNT = 300
WIDTH = 96 * 1024

# Two workers write rows of about a hundred kilobytes; what is in a row can be told from its number alone.
SCRIPT = f"""
import sys, time, numpy as np, warnings
from penstock import Feed
def load(i):
    time.sleep(0.001)
    return np.arange(i, i + {WIDTH // 8}, dtype=np.int64), f"item {{i}}", i
feed = Feed(range({COUNT}), load, batch_size=5, memory="256 MiB", num_workers=2, shuffle=sys.argv[2] == "epoch",
            cache=sys.argv[1])
feed.plan
print("begin", flush=True)
if sys.argv[2] == "pack":
    feed.pack()
else:
    for x, name, i in feed:
        assert (x[:, 0] == i).all() and (x[:, -1] == i + {WIDTH // 8 - 1}).all() and name == [f"item {{n}}" for n in i]
feed.close()
print("end", flush=True)
"""


def check(folder: Path) -> int:
    """Every row that is said to be complete is whole and right; how many there are."""
    if not (folder / "index.json").exists():
        return 0
    complete = np.flatnonzero(np.load(folder / "rows.npy") >> 32 == 1)
    x = np.load(folder / "0.npy", mmap_mode="r")
    names, lengths, numbers = (np.load(folder / name) for name in ("1.npy", "1.length.npy", "2.npy"))
    for i in complete.tolist():
        assert (x[i] == np.arange(i, i + WIDTH // 8)).all(), f"row {i} is not what load gave"
        assert names[i, : lengths[i]].tobytes() == f"item {i}".encode()
        assert numbers[i] == i
    return len(complete)


def run_and_kill(folder: Path, way: str, chance: random.Random, *, worker_first: bool) -> bool:
    """Run the script and kill it at a random moment; whether it was killed before it was through."""
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), way], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        if chance.random() < 0.8:
            assert process.stdout.readline() == "begin\n"
            time.sleep(chance.uniform(0, 0.15))
        else:
            time.sleep(chance.uniform(0.1, 0.6))  # while the folder is made, or before
        if worker_first:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            for child in children[:1]:  # the template, whose workers go with it
                os.kill(int(child), signal.SIGKILL)
            time.sleep(chance.uniform(0, 0.05))
        process.kill()
        return "end" not in process.stdout.read()


def attack(tmp_path: Path, times: int, seed: int) -> None:
    chance = random.Random(seed)
    folder = tmp_path / "cache"
    killed = before = 0
    while killed < times:
        killed += run_and_kill(folder, chance.choice(["pack", "epoch"]), chance, worker_first=chance.random() < 0.3)
        now = check(folder)
        assert now >= before, "what was complete has to stay"
        before = now
        if now == COUNT:  # nothing left to be killed at: begin again
            for path in folder.iterdir():
                path.unlink()
            before = 0
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), "pack"], capture_output=True, text=True, check=False
    )
    assert done.stdout == "begin\nend\n", done.stderr
    assert check(folder) == COUNT
    assert not list(folder.glob("session-*"))


def test_a_cache_that_is_being_written_survives_kills(tmp_path: Path) -> None:
    """Whole or made again, never wrong."""
    attack(tmp_path, 3, seed=int.from_bytes(os.urandom(4)))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cache_that_is_being_written_survives_twenty_kills(tmp_path: Path) -> None:
    """The same, more often, and with another moment each time."""
    attack(tmp_path, 20, seed=int.from_bytes(os.urandom(4)))


def test_jobs_that_fill_a_folder_together_do_not_mind_the_death_of_one(tmp_path: Path) -> None:
    """Three at once, one of which is killed: what it was at is made by the others, in this run or the next."""
    folder = tmp_path / "cache"
    jobs = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, str(folder), way], stdout=subprocess.PIPE, text=True)
        for way in ("epoch", "pack", "pack")
    ]
    with jobs[0], jobs[1], jobs[2]:
        assert jobs[0].stdout is not None
        assert jobs[0].stdout.readline() == "begin\n"
        time.sleep(0.05)
        jobs[0].kill()
        for job in jobs[1:]:
            assert job.stdout is not None
            assert job.stdout.read() == "begin\nend\n"
    before = check(folder)
    assert before > COUNT // 2
    with (
        Feed(range(COUNT), _load, batch_size=5, memory="256 MiB", num_workers=2, cache=folder) as feed,
        pytest.warns(CacheWarning, match="code of load has changed"),
    ):
        assert feed.pack() == COUNT
    assert check(folder) == COUNT
    assert not list(folder.glob("session-*"))


def _load(i: int) -> Any:
    return np.arange(i, i + WIDTH // 8, dtype=np.int64), f"item {i}", i


@pytest.mark.parametrize("cache", ["ram", "folder"])
@pytest.mark.parametrize("collate", [None, "list"])
def test_workers_that_die_leave_nothing_half_kept(cache: str, collate: Any, tmp_path: Path) -> None:
    """Each is killed in the middle of its work, again and again; the second epoch has the very same samples."""
    if cache == "folder" and collate is not None:
        pytest.skip("a folder keeps rows only")

    def load(i: int) -> Any:
        path = tmp_path / f"died-{i}"
        if i % 20 == 7 and not path.exists():
            path.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return np.arange(i, i + 5000)

    kept = "ram" if cache == "ram" else tmp_path / "cache"
    with Feed(
        range(200), load, batch_size=4, memory="512 MiB", num_workers=2, shuffle=True, cache=kept, collate_fn=collate
    ) as feed:
        for _ in range(3):
            seen = []
            for batch in feed:
                for x in batch:
                    assert (np.diff(x) == 1).all()
                    seen.append(int(x[0]))
            assert sorted(seen) == list(range(200))
    assert feed.stats.restarts >= 10
    assert feed.stats.cached >= 300
