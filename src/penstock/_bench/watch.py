"""Memory and CPU time of a process and all that came from it, read from outside. Linux only; elsewhere ``None``.

Memory is PSS: a page that n processes map counts 1/n in each, so the sum over the tree counts shared memory once. A
segment that is on its way and mapped by nobody is not seen; that flatters loaders which send segments, not Penstock.
"""

from __future__ import annotations

import os
from typing import Final

__all__ = ["cpu_s", "pss_bytes", "tree"]

_TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third on: a name may hold blanks and brackets, what follows it may not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None  # it ended


def tree(root: int) -> list[int]:
    """The process ``root``, a session leader, with its descendants and whoever else is in its session."""
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except FileNotFoundError:
        return []
    parents: dict[int, int] = {}
    found = set()
    for pid in pids:
        if (fields := _stat(pid)) is None or fields[0] == "Z":
            continue
        parents[pid] = int(fields[1])
        if pid == root or int(fields[3]) == root:
            found.add(pid)
    grew = True
    while grew:  # whoever left the session is still somebody's child
        more = {pid for pid, parent in parents.items() if parent in found and pid not in found}
        found |= more
        grew = bool(more)
    return sorted(found)


def pss_bytes(root: int) -> int | None:
    """Proportional memory of the whole tree, now."""
    total = 0
    for pid in tree(root):
        try:
            with open(f"/proc/{pid}/smaps_rollup") as file:
                total += sum(int(line.split()[1]) for line in file if line.startswith("Pss:"))
        except OSError:
            continue  # it ended, or is ending
    return total * 1024 or None


def cpu_s(root: int) -> float | None:
    """CPU seconds of the whole tree so far, with those of members that ended and were waited for."""
    ticks = 0
    for pid in tree(root):
        if (fields := _stat(pid)) is not None:
            ticks += sum(int(field) for field in fields[11:15])
    return ticks * _TICK_S or None
