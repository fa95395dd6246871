"""The one block of shared memory that holds every slot. Runs in the parent and, attached, in workers.

A memfd: it has no name, so nothing is left behind by a kill and no other user can open it; it is not bound by the
size of /dev/shm; and it costs one descriptor however many slots there are. It may grow at its end (sealed against
shrinking, so that no mapping of it can ever fault), and it is mapped in windows: what is mapped stays mapped
while anything refers to it. Threads and the parent itself work on the same class over private memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any, Final, Protocol

import numpy as np

from penstock._core.layout import PAGE

__all__ = ["CONTROL_BYTES", "AnyArena", "Arena", "can_share"]

# The first pages hold a record per worker (64 bytes: what it is doing), before any slot: 256 workers.
CONTROL_BYTES: Final = 4 * PAGE
_POPULATE_READ: Final = 22  # MADV_POPULATE_READ of Linux 5.14, for which Python has no name


def can_share() -> bool:
    """Whether this system has memfd."""
    return hasattr(os, "memfd_create")


class AnyArena(Protocol):
    """Where slots lie: this file's arena, or the one of segments with names."""

    def extend(self, size: int) -> int: ...
    def window(self, offset: int, size: int) -> tuple[Any, int]: ...
    def discard(self, offset: int, size: int) -> None: ...
    def resident_bytes(self) -> int: ...
    def close(self) -> None: ...


class Arena:
    """Shared or private memory that grows at its end and is seen through windows."""

    def __init__(self, *, shared: bool, fd: int | None = None) -> None:
        self._windows: list[tuple[int, int, mmap.mmap]] = []  # start, end, mapping
        self._resident: list[int] = []  # of each window of private memory, when last looked at
        self._owner = fd is None
        self._foresees = True
        if shared and fd is None:
            import fcntl  # here, because Windows has none and needs the rest of this file

            fd = os.memfd_create("penstock", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.fd = fd
        self.size = 0
        if self._owner:
            self.extend(CONTROL_BYTES)

    def extend(self, size: int) -> int:
        """Add so many bytes (whole pages) at the end; where they start. Nothing is used before it is touched."""
        start = self.size
        self.size += -(-size // PAGE) * PAGE
        if self.fd is None:
            self._windows.append((start, self.size, mmap.mmap(-1, self.size - start)))
        else:
            os.ftruncate(self.fd, self.size)
        return start

    def window(self, offset: int, size: int) -> tuple[Any, int]:
        """A mapping that holds these bytes, and where in it they start; mapped now if it is not yet."""
        for start, end, mapping in self._windows:
            if start <= offset and offset + size <= end:
                return mapping, offset - start
        assert self.fd is not None
        start = max((end for _, end, _ in self._windows), default=0)
        end = os.fstat(self.fd).st_size
        if offset < start or offset + size > end:
            raise AssertionError(f"no window can hold bytes {offset} to {offset + size} of an arena of {end}")
        mapping = mmap.mmap(self.fd, end - start, offset=start)
        self._windows.append((start, end, mapping))
        return mapping, offset - start

    def discard(self, offset: int, size: int) -> None:
        """Give the memory of these bytes back to the system; they are not used again."""
        if self.fd is not None:
            _punch(self.fd, offset, size)
        elif hasattr(mmap, "MADV_REMOVE"):  # not DONTNEED, which keeps what is in a mapping that could be shared
            mapping, start = self.window(offset, size)
            mapping.madvise(mmap.MADV_REMOVE, start, size)
            self._resident.clear()

    def foresee(self, offset: int, size: int) -> None:
        """Have bytes that another process wrote and this one will read mapped now, and not page by page then."""
        if self.fd is None or not self._foresees:
            return
        mapping, start = self.window(offset, size)
        first = start // PAGE * PAGE
        try:
            mapping.madvise(_POPULATE_READ, first, start + size - first)
        except OSError:  # an older system
            self._foresees = False

    def resident_bytes(self) -> int:
        """Memory that the arena really takes: what was never touched is not there."""
        if self.fd is not None:
            return os.fstat(self.fd).st_blocks * 512
        self._resident += [0] * (len(self._windows) - len(self._resident))
        for number, (start, end, mapping) in enumerate(self._windows):
            if self._resident[number] < end - start:  # what is all there stays there, unless it is discarded
                self._resident[number] = _resident_bytes(mapping)
        return sum(self._resident)

    def close(self) -> None:
        """Forget the memory; it is given back when the last batch over it is gone."""
        self._windows.clear()
        if self.fd is not None and self._owner:
            os.close(self.fd)
            self.fd = None


def _resident_bytes(mapping: mmap.mmap) -> int:
    """How much of a mapping is in memory; all of it where the system cannot tell."""
    size = len(mapping)
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mincore"):
        return size
    pages = ctypes.create_string_buffer(-(-size // PAGE))
    at = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    if libc.mincore(ctypes.c_void_p(at), ctypes.c_size_t(size), pages) != 0:
        return size
    return min(size, int(np.count_nonzero(np.frombuffer(pages.raw, np.uint8) & 1)) * PAGE)


def _punch(fd: int, offset: int, size: int) -> None:
    """Make a hole in a file; Python has no call for it."""
    keep_size, punch_hole = 1, 2
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_int(fd), ctypes.c_int(keep_size | punch_hole), ctypes.c_int64(offset), ctypes.c_int64(size))
    if libc.fallocate(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
