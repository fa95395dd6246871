"""Measures a script's memory from outside, as the kernel counts it, with and without a hard limit around it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from penstock._core import machine

CGROUPS: Final = Path("/sys/fs/cgroup/memory")
SAMPLE_S: Final = 0.004


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a case took and said."""

    base: int
    peak: int
    """Most that the tree of processes took above the base."""
    said: dict[str, Any]
    code: int
    kills: int


@contextlib.contextmanager
def limit(size: int) -> Iterator[Path | None]:
    """A memory cgroup (v1) with this limit."""
    group = CGROUPS / f"penstock-{os.getpid()}-{time.monotonic_ns()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(size))
        yield group
    finally:
        for _ in range(200):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.02)


def can_limit() -> bool:
    """Whether memory cgroups can be made here."""
    try:
        with limit(1 << 30):
            return True
    except OSError:
        return False


def tree_bytes(pid: int) -> int:
    """Memory of a process and all below it, pages that several of them map counted once."""
    below = machine.tree(pid)
    size = _together((pid, *below))
    if any(_command(p) == _command(pid) for p in below):
        # For an instant between vfork and exec a child is its parent, and would be counted as if it were another.
        time.sleep(SAMPLE_S)
        size = min(size, _together((pid, *machine.tree(pid))))
    return size


def _together(pids: tuple[int, ...]) -> int:
    """PSS, but of shared memory what its files hold: processes are looked at one after the other, and a slot that the
    second maps after the first was looked at would count once and a half. Large pages are mapped in an instant."""
    pss = sum(machine.pss_bytes(pid) for pid in pids)
    held = sum(_memory_files(pids).values())
    if not held:
        return pss
    own = sum(machine.own_bytes(pid) for pid in pids)
    return min(pss, own + held)


def _memory_files(pids: tuple[int, ...]) -> dict[tuple[int, int], int]:
    """The bytes of each file in memory that one of them has open, by what identifies it."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{pid}/fd/{name}").startswith("/memfd:"):
                        status = os.stat(f"/proc/{pid}/fd/{name}")
                        found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return found


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def start(name: str, folder: Path) -> subprocess.Popen[str]:
    cases = Path(__file__).with_name("cases.py")
    return subprocess.Popen(
        [sys.executable, str(cases), name, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def measure(name: str, folder: Path) -> Measured:
    """Run a case and watch its memory."""
    process = start(name, folder)
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "base\n"
        base = tree_bytes(process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        peak = 0
        while process.poll() is None:
            peak = max(peak, tree_bytes(process.pid))
            time.sleep(SAMPLE_S)
        text = process.stdout.read()
    return Measured(base, peak - base, json.loads(text) if text.strip() else {}, process.returncode, 0)


def confined(name: str, folder: Path, size_above_base: int) -> Measured:
    """Run a case inside a memory cgroup of its base and so much more."""
    with limit(1 << 40) as group:
        assert group is not None
        process = start(name, folder)
        assert process.stdin is not None
        assert process.stdout is not None
        with process:
            (group / "cgroup.procs").write_text(str(process.pid))
            assert process.stdout.readline() == "base\n"
            base = tree_bytes(process.pid)
            (group / "memory.limit_in_bytes").write_text(str(base + size_above_base))
            process.stdin.write("\n")
            process.stdin.flush()
            text = process.stdout.read()
        control = (group / "memory.oom_control").read_text().split()
        kills = int(control[control.index("oom_kill") + 1]) if "oom_kill" in control else 0
        peak = int((group / "memory.max_usage_in_bytes").read_text())
    return Measured(base, peak, json.loads(text) if text.strip() else {}, process.returncode, kills)
