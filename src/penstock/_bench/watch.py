"""Memory and CPU time of a process and all that came from it, read from outside. Linux only; elsewhere ``None``.

And the names in /dev/shm that a process which was killed could not take back.

Memory is PSS: a page that n processes map counts 1/n in each, so the sum over the tree counts shared memory once. A
segment that is on its way and mapped by nobody is not seen; that flatters loaders which send segments, not Penstock.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from typing import Final

__all__ = ["Traces", "cpu_s", "pss_bytes", "segments", "tree"]

_TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01

_SHM: Final = "/dev/shm"
# As multiprocessing and torch name what they share. Others clean up for themselves, or are not ours to judge.
_SEGMENT: Final = re.compile(r"(psm_|torch_|sem\.|mp-)")
# torch puts the number of the process that made it into the name.
_NUMBERED: Final = re.compile(r"torch_(\d+)_")


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third on: a name may hold blanks and brackets, what follows it may not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None  # it ended


def _pids() -> list[int]:
    """All processes; none where there is no /proc."""
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except FileNotFoundError:
        return []


def tree(root: int) -> list[int]:
    """The process ``root``, a session leader, with its descendants and whoever else is in its session."""
    parents: dict[int, int] = {}
    found = set()
    for pid in _pids():
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


def segments() -> set[str]:
    """Names of shared memory and semaphores of this user that a contender may have made."""
    try:
        names = os.listdir(_SHM)
    except OSError:
        return set()  # this system has no such folder
    found = set()
    for name in filter(_SEGMENT.match, names):
        try:
            if os.lstat(f"{_SHM}/{name}").st_uid == os.getuid():
                found.add(name)
        except FileNotFoundError:
            continue
    return found


def _used_by(pids: Iterable[int]) -> set[str]:
    """Names in /dev/shm that one of these processes maps or has open."""
    paths = []
    for pid in pids:
        try:
            with open(f"/proc/{pid}/maps", errors="replace") as file:
                paths += [line.split(maxsplit=5)[-1].rstrip("\n") for line in file if f"{_SHM}/" in line]
            fds = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue  # it ended, or is another user's
        for fd in fds:
            try:
                paths.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
            except OSError:
                continue  # closed by now
    return {path.removeprefix(f"{_SHM}/") for path in paths if path.startswith(f"{_SHM}/")}


class Traces:
    """Shared memory of the processes of one trial. Only what is known to be theirs is removed.

    A name that is new and that nobody maps may be another job's, which made it, closed it and comes back for it. So
    ours are those that one of the processes was seen with, or that carry the number of one.
    """

    def __init__(self) -> None:
        self._before = segments()
        self._pids: set[int] = set()
        self._names: set[str] = set()

    def look(self, root: int) -> None:
        """See what the trial ``root`` and all that came from it have now."""
        pids = tree(root)
        self._pids.update(pids, [root])
        self._names |= _used_by(pids)

    def remove(self) -> set[str]:
        """Remove what was theirs and is used by nobody; gives the new names that cannot be told to be theirs."""
        new = segments() - self._before
        ours = {name for name in new if name in self._names or self._is_numbered(name)}
        if ours:
            for name in ours - _used_by(_pids()):
                with contextlib.suppress(OSError):  # somebody was faster
                    os.unlink(f"{_SHM}/{name}")
        return new - ours

    def _is_numbered(self, name: str) -> bool:
        found = _NUMBERED.match(name)
        return found is not None and int(found[1]) in self._pids
