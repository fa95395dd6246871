"""The one block of shared memory that holds every slot. Runs in the parent and, attached, in workers.

A memfd: it has no name, so nothing is left behind by a kill and no other user can open it; it is not bound by the
size of /dev/shm; and it costs one descriptor however many slots there are. It may grow at its end (sealed against
shrinking, so that no mapping of it can ever fault), and it is mapped in windows: what is mapped stays mapped
while anything refers to it. Threads and the parent itself work on the same class over private memory.

Large pages: the system gives shared memory in pages of 4 KiB unless its administrator says otherwise, and then a good
part of the time of a copy goes into finding them. It makes large pages of them when it is asked to
(MADV_COLLAPSE of Linux 6.1), where addresses and offsets are multiples of such a page apart. Only whole ones within
what was added at a time are made, so that an arena never takes more than it would with all of that in use.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import time
from typing import Any, Final, Protocol

import numpy as np

from penstock._core.layout import PAGE

__all__ = ["CONTROL_BYTES", "AnyArena", "Arena", "can_share", "large_page_bytes", "private"]

# The first pages hold a record per worker (64 bytes: what it is doing), before any slot: 256 workers.
CONTROL_BYTES: Final = 4 * PAGE
_POPULATE_READ: Final = 22  # MADV_POPULATE_READ of Linux 5.14, for which Python has no name
_COLLAPSE: Final = 25  # MADV_COLLAPSE of Linux 6.1, which has none either
# Usually it takes some 60 us, and 3 ms where memory was never used before. Where none is left in one piece the system
# moves others' pages about, and small ones are the better choice.
MOST_COLLAPSE_S: Final = 20e-3
# Each page waits until every core has a moment for it: 5 ms where all are busy, and 0.2 where they are not. Of those
# that do wait there are some at a time, so that nobody waits long for all of them.
LONG_WAIT_S: Final = 1e-3
MOST_WAIT_S: Final = 8e-3
_MOST_LARGE_PAGE: Final = 32 * 2**20  # that of some processors is half a gigabyte
_TRIES: Final = 64  # each fills a gap between other mappings, of which a process with large libraries has some


def can_share() -> bool:
    """Whether this system has memfd."""
    return hasattr(os, "memfd_create")


class AnyArena(Protocol):
    """Where slots lie: this file's arena, or the one of segments with names."""

    most_bytes: int
    returned_bytes: int

    def extend(self, size: int) -> int: ...
    def window(self, offset: int, size: int) -> tuple[Any, int]: ...
    def discard(self, offset: int, size: int) -> None: ...
    def enlarge_pages(self, offset: int, size: int) -> bool: ...
    @property
    def page_bytes(self) -> int: ...
    def resident_bytes(self) -> int: ...
    def close(self) -> None: ...


class Arena:
    """Shared or private memory that grows at its end and is seen through windows."""

    def __init__(self, *, shared: bool, fd: int | None = None) -> None:
        self._windows: list[tuple[int, int, mmap.mmap]] = []  # start, end, mapping
        self._resident: list[int] = []  # of each window of private memory, when last looked at
        self._owner = fd is None
        self._foresees = True
        self._pieces: list[tuple[int, int]] = []  # start and end of what was added at a time
        self._large: set[int] = set()  # where large pages were asked for
        self.page_bytes = large_page_bytes()
        """Of large pages; that of small ones where the system has no others, or did not make them."""
        if shared and fd is None:
            import fcntl  # here, because Windows has none and needs the rest of this file

            fd = os.memfd_create("penstock", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.fd = fd
        self.size = 0
        self.most_bytes = 0
        """Resident, whenever something was about to be discarded; whoever looks sets it, and the next, back to 0."""
        self.returned_bytes = 0
        """Of discarded memory that was shared: as long as it was there, it was mapped by others, too."""
        if self._owner:
            self.extend(CONTROL_BYTES)

    def extend(self, size: int) -> int:
        """Add so many bytes (whole pages) at the end; where they start. Nothing is used before it is touched."""
        # What is large begins where a large page does: what is left out before it is never touched.
        unit = self.page_bytes if size >= self.page_bytes else PAGE
        start = -(-self.size // unit) * unit
        self.size = start + -(-size // PAGE) * PAGE
        if self.fd is None:
            self._windows.append((start, self.size, _map(-1, self.size - start, start)))
        else:
            os.ftruncate(self.fd, self.size + _slack())
        self._pieces.append((start, self.size))
        return start

    def window(self, offset: int, size: int) -> tuple[Any, int]:
        """A mapping that holds these bytes, and where in it they start; mapped now if it is not yet."""
        for start, end, mapping in self._windows:
            if start <= offset and offset + size <= end:
                return mapping, offset - start
        assert self.fd is not None
        start = max((end for _, end, _ in self._windows), default=0)
        end = os.fstat(self.fd).st_size - _slack()
        if offset < start or offset + size > end:
            raise AssertionError(f"no window can hold bytes {offset} to {offset + size} of an arena of {end}")
        mapping = _map(self.fd, end - start, start)
        self._windows.append((start, end, mapping))
        return mapping, offset - start

    def discard(self, offset: int, size: int) -> None:
        """Give the memory of these bytes back to the system; they are not used again."""
        if (page := self.page_bytes) > PAGE:  # nor does a neighbour bring them back
            self._large.update(range(offset // page * page, offset + size, page))
        if self.fd is not None:
            before = self.resident_bytes()
            _punch(self.fd, offset, size)
            self.most_bytes = max(self.most_bytes, before)
            self.returned_bytes += max(0, before - self.resident_bytes())
        elif hasattr(mmap, "MADV_REMOVE"):  # not DONTNEED, which keeps what is in a mapping that could be shared
            mapping, start = self.window(offset, size)
            mapping.madvise(mmap.MADV_REMOVE, start, size)
            self._resident.clear()

    def enlarge_pages(self, offset: int, size: int) -> bool:
        """Have these bytes in large pages, now, where the system has some; whatever is in them stays, whoever writes.

        All of the large pages of which they are a part, so that what lies next to them may become resident, too. False
        if that takes long, and not all of it is done.
        """
        page = self.page_bytes
        if page == PAGE:
            return True
        waited_s = 0.0
        piece, end = next(((first, end) for first, end in self._pieces if first <= offset < end), (0, 0))
        first = max(offset // page * page, -(-piece // page) * page)
        for start in range(first, min(offset + size, end // page * page), page):
            if start in self._large:
                continue
            if waited_s > MOST_WAIT_S:
                return False
            self._large.add(start)
            began = time.perf_counter()
            if not self._enlarge_page(start):
                self.page_bytes = PAGE
                break
            took_s = time.perf_counter() - began
            waited_s += took_s if took_s > LONG_WAIT_S else 0.0
        return True

    def _enlarge_page(self, start: int) -> bool:
        """Whether it is worth while to ask for more of them."""
        mapping, at = self.window(start, self.page_bytes)
        began = time.thread_time()
        mapping[at]  # something has to be there; read, because others may be writing
        try:
            mapping.madvise(_COLLAPSE, at, self.page_bytes)
        except OSError as error:
            return error.errno == errno.EAGAIN  # somebody uses it in this moment: it stays as it is
        return time.thread_time() - began < MOST_COLLAPSE_S

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


@functools.cache
def large_page_bytes() -> int:
    """The size of the large pages of this system; that of small ones if it has none that are of use."""
    with contextlib.suppress(OSError, ValueError):
        with open("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size", "rb") as file:
            size = int(file.read())
        if PAGE < size <= _MOST_LARGE_PAGE and not size % PAGE:
            return size
    return PAGE


def private(size: int) -> mmap.mmap:
    """Memory of this process alone, in large pages where the system has them; OSError if it has none at all."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size)
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            block.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without them
            pass
    return block


def _map(fd: int, size: int, offset: int) -> mmap.mmap:
    """A mapping of a file, or of memory of its own, in which large pages can lie where they lie in the arena.

    Python cannot say where a mapping is to be. The system puts it at the end of a gap, so that one that is longer
    begins so much earlier; what lies behind ``size`` is used by nobody. The file has to be long enough (``_slack``).
    One that is not right stays until there is another, which then lies right below it, or in a larger gap.
    """
    page = large_page_bytes() if size >= large_page_bytes() else PAGE
    wrong: list[mmap.mmap] = []
    more = 0
    while True:
        try:
            mapping = mmap.mmap(fd, size + more, offset=offset) if fd >= 0 else mmap.mmap(-1, size + more)
        except OSError:  # a limit of addresses, perhaps: it does without large pages
            if not wrong:
                raise
            mapping = wrong.pop()
            break
        at = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        if not (at - offset) % page or len(wrong) == _TRIES - 1:
            break
        wrong.append(mapping)
        more = (at - size - offset) % page
    for other in wrong:
        other.close()
    return mapping


def _slack() -> int:
    """By how much the file of an arena is longer than the arena: nothing is ever there."""
    return large_page_bytes() if large_page_bytes() > PAGE else 0


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
