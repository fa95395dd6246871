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
    name: str
    fd: int = -1
    """Where a process that is being made finds it, name or not; -1 for one that runs already, and on Windows."""

    def __reduce__(self) -> tuple[Any, ...]:
        if self.fd >= 0 and context.get_spawning_popen() is not None:
            return _inherited, (self.start, self.size, self.name, reduction.DupFd(self.fd))
        return Segment, (self.start, self.size, self.name)


def _inherited(start: int, size: int, name: str, fd: Any) -> Segment:
    return Segment(start, size, name, fd.detach())


class NamedArena:
    """Memory that grows by whole segments; what is mapped stays mapped while anything refers to it."""

    def __init__(self, attached: Sequence[Segment] | None = None) -> None:
        self.segments: list[Segment] = []
        self.size = 0
        self._mappings: list[mmap.mmap] = []
        self._named = 0
        """The first segment that still has its name."""
        if attached is None:
            self.extend(CONTROL_BYTES)
        else:
            for segment in attached:
                self.attach(segment)

    def extend(self, size: int) -> int:
        """Add so many bytes (whole pages) at the end; where they start."""
        size = -(-size // PAGE) * PAGE
        # macOS allows 31 characters.
        name, start = f"/penstock-{secrets.token_hex(8)}", self.size
        fd, mapping = _create(name, size)
        self._mappings.append(mapping)
        self.segments.append(Segment(start, size, name, fd))
        self.size += size
        return start

    def attach(self, segment: Segment) -> None:
        """Map a segment that another process made."""
        self._mappings.append(_open(segment))
        self.segments.append(segment)
        self.size += segment.size

    def window(self, offset: int, size: int) -> tuple[Any, int]:
        """The mapping that holds these bytes, and where in it they start."""
        for segment, mapping in zip(self.segments, self._mappings, strict=False):
            if segment.start <= offset and offset + size <= segment.start + segment.size:
                return mapping, offset - segment.start
        raise AssertionError(f"no segment holds bytes {offset} to {offset + size} of an arena of {self.size}")

    def discard(self, offset: int, size: int) -> None:
        """Give the memory of these bytes back to the system, where it can take it; they are not used again."""
        if hasattr(mmap, "MADV_REMOVE"):
            mapping, start = self.window(offset, size)
            mapping.madvise(mmap.MADV_REMOVE, start, size)

    def resident_bytes(self) -> int:
        """Memory that the arena really takes; all of it where the system does not say."""
        if sys.platform != "linux":
            return self.size
        return sum(os.fstat(segment.fd).st_blocks * 512 for segment in self.segments)

    def unname(self, count: int) -> None:
        """Nobody who is alive needs the names of the first ``count`` segments."""
        for segment in self.segments[self._named : count]:
            _unlink(segment.name)
        self._named = max(self._named, count)

    def close(self) -> None:
        """Forget the memory; it is given back when the last batch over it is gone."""
        self.unname(len(self.segments))
        segments, self.segments = self.segments, []
        self._mappings = []
        for segment in segments:
            if segment.fd >= 0:
                os.close(segment.fd)


if sys.platform == "win32":  # pragma: no cover

    def _create(name: str, size: int) -> tuple[int, mmap.mmap]:
        return -1, mmap.mmap(-1, size, tagname=name)

    def _open(segment: Segment) -> mmap.mmap:
        return mmap.mmap(-1, segment.size, tagname=segment.name)

    def _unlink(name: str) -> None:
        pass

else:
    import _posixshmem

    def _create(name: str, size: int) -> tuple[int, mmap.mmap]:
        fd = _posixshmem.shm_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode=0o600)
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
