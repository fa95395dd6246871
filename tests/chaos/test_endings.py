"""How a program ends, as a table: ending x crew x what its workers are in the middle of. Nothing is left afterwards.

No process, whatever its load is stuck in; no name in /dev/shm; no file in the temporary folder; and of all processes
only the one that has something to say has said it. ``tests/live/test_lifecycle.py`` holds the same for short loads.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import psutil
import pytest

PATIENCE_S: Final = 60.0

SCRIPT: Final = """
import ctypes, gc, os, signal, sys, time
import numpy as np
from penstock import Feed

def load(item):
    if item >= 64:
        if {doing!r} == "asleep":
            time.sleep(600)
        ctypes.PyDLL(None).sleep(600)   # C code that keeps the GIL
    return np.full(8, item)

feed = Feed(range(10**6), load, batch_size=4, memory="512 MiB", num_workers=2, start_method={method!r})
batches = iter(feed)
for _ in range(8):
    batch = next(batches)
time.sleep(0.2)   # so that both have come to where they stay
print(*feed._engine.crew.pids(), flush=True)
"""

# What the program does then, what is done to it, and how it ends: its exit code, and the last line that it says.
ENDINGS: Final[dict[str, tuple[str, int | None, int, str]]] = {
    "killed": ("for batch in batches: pass", signal.SIGKILL, -signal.SIGKILL, ""),
    "terminated": ("for batch in batches: pass", signal.SIGTERM, -signal.SIGTERM, ""),
    "interrupted": ("for batch in batches: pass", signal.SIGINT, -signal.SIGINT, "KeyboardInterrupt"),
    "sys.exit": ("sys.exit(7)", None, 7, ""),
    "an exception": ("raise KeyError('of the user')", None, 1, "KeyError: 'of the user'"),
    "the end of the script": ("kept = next(iter([batch]))", None, 0, ""),
    "collected": ("del feed, batches, batch; gc.collect(); print('gone', flush=True)", None, 0, ""),
}
TABLE: Final = [
    *((ending, "forkserver", "asleep") for ending in ENDINGS),
    *(
        pytest.param(ending, "portable spawn", "asleep", marks=() if ending == "killed" else pytest.mark.slow)
        for ending in ENDINGS
    ),
    *((ending, crew, "asleep") for ending in ("killed", "interrupted") for crew in ("fork", "spawn", "portable fork")),
    *((ending, crew, "stuck") for ending in ("killed", "interrupted") for crew in ("forkserver", "portable spawn")),
]


def running(pids: list[int]) -> list[int]:
    """Those that still run; dead ones that nobody waited for do not."""
    left = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                left.append(pid)
        except psutil.NoSuchProcess:
            continue
    return left


def session_of(leader: int) -> list[int]:
    """Every process of a session: Python's own helpers too, which nobody told us of."""
    found = []
    for pid in psutil.pids():
        try:
            if os.getsid(pid) == leader:
                found.append(pid)
        except (ProcessLookupError, PermissionError):
            continue
    return found


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()} if Path("/dev/shm").is_dir() else set()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a load that hangs outlives a parent that was killed")
@pytest.mark.parametrize(("ending", "crew", "doing"), TABLE)
def test_whatever_ends_the_program_nothing_is_left(ending: str, crew: str, doing: str, tmp_path: Path) -> None:
    """Each row of the table, with the workers in the middle of a load that would take ten minutes."""
    kind, _, method = crew.rpartition(" ")
    then, blow, code, said = ENDINGS[ending]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    before = shared_memory()
    process = subprocess.Popen(
        [sys.executable, "-c", f"{SCRIPT.format(method=method, doing=doing)}\n{then}"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, start_new_session=True,
        env={**os.environ, "PENSTOCK_PORTABLE": "1" if kind else "0", "TMPDIR": str(temporary)},
    )  # fmt: skip
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    if blow == signal.SIGINT:
        os.killpg(process.pid, blow)  # as a terminal does: everybody gets it
    elif blow is not None:
        process.send_signal(blow)
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"it hangs: {process.communicate()}") from None
    assert len(pids) >= 2, err
    assert process.returncode == code, err
    assert err.count("Traceback") == bool(said), err
    assert err.rstrip().endswith(said), err
    assert out == ("gone\n" if ending == "collected" else "")
    until = time.monotonic() + PATIENCE_S
    while (left := running([*pids, *session_of(process.pid)])) and time.monotonic() < until:
        time.sleep(0.01)
    assert left == []
    assert list(temporary.iterdir()) == []
    assert {name for name in shared_memory() - before if name.startswith("penstock")} == set()
