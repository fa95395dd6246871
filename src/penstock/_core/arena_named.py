"""Shared memory where there is no memfd: one segment each time the arena grows. Runs in the parent and in workers.

A segment has a name, because a worker that is running already can find it in no other way; workers that are made
later get its descriptor. On POSIX systems the name is taken away as soon as nobody needs it any more, so that a
kill leaves nothing behind but in the milliseconds before that. On Windows a segment vanishes with its last user.

Not ``multiprocessing.shared_memory``: it unmaps under arrays that are alive or complains that it cannot, and its
tracker warns of segments that are not lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import mmap
import os
import secrets
import sys
from collections.abc import Sequence
from multiprocessing import context, reduction
from typing import Any

from penstock._core.arena import CONTROL_BYTES
from penstock._core.budget import format_bytes
from penstock._core.errors import PenstockError
from penstock._core.layout import PAGE

__all__ = ["NamedArena", "Segment"]


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """One piece of the arena, as a worker is told of it."""

    start: int
    size: int
    """0: it is gone."""
    name: str
    fd: int = -1
    """Where a process that is being made finds it, name or not; -1 for one that runs already, and on Windows."""

    def __reduce__(self) -> tuple[Any, ...]:
        if context.get_spawning_popen() is None:
            return Segment, (self.start, self.size, self.name)
        # A plain tuple: the process that is being made must be able to read it before it imports anything of ours.
        return tuple, ((self.start, self.size, self.name, reduction.DupFd(self.fd) if self.fd >= 0 else None),)

    @classmethod
    def inherited(cls, told: Any) -> Segment:
        """What became of a segment on its way to a process that was being made."""
        if isinstance(told, Segment):  # forked
            return told
        start, size, name, fd = told
        return cls(start, size, name, -1 if fd is None else fd.detach())


class NamedArena:
    """Memory that grows by whole segments; what is mapped stays mapped while anything refers to it."""

    def __init__(self, attached: Sequence[Segment] | None = None) -> None:
        self.log: list[Segment] = []
        """What happened to it, in order, for workers that were there before."""
        self._there: dict[int, tuple[Segment, mmap.mmap]] = {}  # by where they start
        self._end = 0
        self._named = 0  # the first of the log that may still have its name
        self.most_bytes = 0
        """Resident, whenever something was about to be discarded; whoever looks sets it, and the next, back to 0."""
        self.returned_bytes = 0
        """Of discarded memory: as long as it was there, it was mapped by others, too."""
        if attached is None:
            self.extend(CONTROL_BYTES)
        else:
            self.follow(attached)

    def extend(self, size: int) -> int:
        """Add so many bytes (whole pages) at the end; where they start."""
        size = -(-size // PAGE) * PAGE
        name = f"/penstock-{secrets.token_hex(8)}"  # macOS allows 31 characters
        fd, mapping = _create(name, size)
        segment = Segment(self._end, size, name, fd)
        self._there[segment.start] = segment, mapping
        self._end += size
        self.log.append(segment)
        return segment.start

    def window(self, offset: int, size: int) -> tuple[Any, int]:
        """The mapping that holds these bytes, and where in it they start."""
        for segment, mapping in list(self._there.values()):
            if segment.start <= offset and offset + size <= segment.start + segment.size:
                return mapping, offset - segment.start
        raise AssertionError(f"no segment holds bytes {offset} to {offset + size} of an arena of {self._end}")

    def discard(self, offset: int, size: int) -> None:
        """Give the memory of these bytes back to the system; they are not used again.

        A part of a segment can only be given back on Linux; elsewhere it stays until the arena is closed.
        """
        before = self.resident_bytes()
        segment, mapping = self._there.get(offset, (None, None))
        if segment is not None and segment.size == size:
            del self._there[offset]
            self.log.append(dataclasses.replace(segment, size=0))
        elif hasattr(mmap, "MADV_REMOVE"):
            mapping, start = self.window(offset, size)
            mapping.madvise(mmap.MADV_REMOVE, start, size)
        self.most_bytes = max(self.most_bytes, before)
        self.returned_bytes += max(0, before - self.resident_bytes())

    def enlarge_pages(self, offset: int, size: int) -> bool:  # noqa: ARG002 - as the other arena has it
        """Nothing: where this arena is used, pages are what they are."""
        return True

    @property
    def page_bytes(self) -> int:
        """Of its pages."""
        return PAGE

    def segments(self) -> list[Segment]:
        """What there is now, for a worker that is being made."""
        return [segment for segment, _ in list(self._there.values())]

    def follow(self, log: Sequence[Segment]) -> None:
        """Do in this process what was done to the arena in the one that owns it."""
        for segment in log:
            if segment.size:
                self._there[segment.start] = segment, _open(segment)
            else:
                self._there.pop(segment.start, None)

    def unname(self, count: int) -> None:
        """All workers have followed the first ``count`` of the log: nobody needs a name or a segment that is gone.

        To be called by whoever makes workers, between two of them.
        """
        for segment in self.log[self._named : count]:
            if segment.size:
                _unlink(segment.name)
            else:
                _close(segment.fd)
        self._named = max(self._named, count)

    def resident_bytes(self) -> int:
        """Memory that the arena really takes; all of it where the system does not say."""
        says = sys.platform == "linux"
        return sum(os.fstat(part.fd).st_blocks * 512 if says else part.size for part in self.segments())

    def close(self) -> None:
        """Forget the memory; it is given back when the last batch over it is gone."""
        self.unname(len(self.log))
        for segment in self.segments():
            _close(segment.fd)
        self._there = {}


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


if sys.platform == "win32":  # pragma: no cover

    def _create(name: str, size: int) -> tuple[int, mmap.mmap]:
        return -1, mmap.mmap(-1, size, tagname=name)

    def _open(segment: Segment) -> mmap.mmap:
        return mmap.mmap(-1, segment.size, tagname=segment.name)

    def _unlink(name: str) -> None:
        pass

else:
    import _posixshmem  # type: ignore[import-not-found]  # no stubs; what SharedMemory itself stands on

    def _create(name: str, size: int) -> tuple[int, mmap.mmap]:
        try:
            fd = _posixshmem.shm_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode=0o600)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            raise PenstockError(
                f"shared memory cannot be made ({type(error).__name__}: {error}): have a /dev/shm that can be written "
                "to, or use executor='thread' or num_workers=0"
            ) from error
        try:
            os.ftruncate(fd, size)
            if hasattr(os, "posix_fallocate"):
                # Now, as an error: a full /dev/shm that is found out by writing to it is a SIGBUS.
                os.posix_fallocate(fd, 0, size)
            return fd, mmap.mmap(fd, size)
        except BaseException as error:
            os.close(fd)
            _unlink(name)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise PenstockError(
                    f"the system has no room for {format_bytes(size)} of shared memory: make /dev/shm larger (in a "
                    "container: --shm-size), give a smaller memory=, or use executor='thread'"
                ) from error
            raise

    def _open(segment: Segment) -> mmap.mmap:
        fd = segment.fd if segment.fd >= 0 else _posixshmem.shm_open(segment.name, os.O_RDWR, mode=0o600)
        try:
            return mmap.mmap(fd, segment.size)
        finally:
            os.close(fd)

    def _unlink(name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            _posixshmem.shm_unlink(name)
