"""Reads past the page cache, of what does not stay there anyway. Runs in worker processes.

Blocks of a file that are read through the page cache cost the processor twice, for pages that are made and for the
copy, and the disk gets them in small pieces: page by page, as nobody knows that they belong together. Read past it
into a large page they come in one piece, while the processor does something else, and nothing of others is pushed out.

But what stays in the page cache comes from there in the next epoch, which is faster than any disk. So this is for files
that are larger than memory, and for those of which blocks are gone when they are wanted once more; of these, some are
read through the cache all the same, so that it can be seen when they begin to stay.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from penstock._core.arena import private
from penstock._core.copying import Begun, Hands
from penstock._core.layout import PAGE

__all__ = ["HELD_BYTES", "LEAST_BYTES", "MOST_BYTES", "PastCache"]

AT_ONCE: Final = 6  # reads of a worker: a disk has as many under way as it can, while one is put where it belongs
BUFFER_BYTES: Final = 2 * 2**20  # of a read: a large page, which the disk gets in one piece
MOST_BYTES: Final = BUFFER_BYTES - 2 * PAGE  # as it begins and ends with a page
LEAST_BYTES: Final = 2**20  # less is better read ahead by the system, many at a time
THROUGH_EVERY: Final = 32  # one block of so many goes through the page cache
_STACK_BYTES: Final = 512 * 2**10  # of a thread that reads
HELD_BYTES: Final = (AT_ONCE + 1) * BUFFER_BYTES + AT_ONCE * _STACK_BYTES  # one more, so that they can lie right
"""What a worker has to hold for them."""

Data = npt.NDArray[np.uint8]


class PastCache:
    """Whether, and how, a block is read past the page cache."""

    def __init__(self) -> None:
        self.allowed = False
        """Whether this process has the memory for it: a worker that was told so."""
        self.gone = False
        """Whether blocks that were read before were not there when they were wanted again."""
        self._works = hasattr(os, "O_DIRECT")
        self._hands: Hands | None = None
        self._buffers: list[memoryview] | None = None  # that nobody reads into
        self._under_way: deque[_Read] = deque()
        self._first: int | None = None
        self._count = 0

    def saw(self, epoch: int, *, cold: bool) -> None:
        """A block is wanted in this epoch, and has to be read from the disk or is in the page cache."""
        if self._first is None:
            self._first = epoch
        self.gone = cold and (self.gone or epoch > self._first)

    def suits(self, size: int, *, large: bool) -> bool:
        """Whether blocks of so many bytes are read so; ``large``: their files do not fit into memory."""
        return self.allowed and self._works and (large or self.gone) and size >= LEAST_BYTES

    def wants(self, size: int, *, large: bool) -> bool:
        """The same for one that is read now."""
        if not self.suits(size, large=large):
            return False
        self._count += 1
        return large or self._count % THROUGH_EVERY != 0

    def begin(self, path: str, offset: int, size: int, then: Callable[[Data | None], None]) -> None:
        """Begin to read what stands there; ``then`` is called with it, now or later, or with None if that cannot be.

        What it is called with is memory that is used again.
        """
        if len(self._under_way) == AT_ONCE:
            self._take(self._under_way.popleft())
        if self._hands is None:
            self._hands = Hands(1, helpers=AT_ONCE, stack_bytes=_STACK_BYTES)
            self._hands.start()
        if self._buffers is None:
            self._buffers = _buffers()
        if not self._buffers:  # there is no memory for them
            self._works = False
            then(None)
            return
        read = _Read(path, offset, size, self._buffers.pop(), then)
        read.begun = self._hands.begin(1, read)
        self._under_way.append(read)

    def finish(self) -> None:
        """Wait for all that was begun."""
        while self._under_way:
            self._take(self._under_way.popleft())

    def drop(self) -> None:
        """The same, when nobody wants them any more."""
        while self._under_way:
            read = self._under_way.popleft()
            read.then = lambda _: None
            self._take(read)

    def _take(self, read: _Read) -> None:
        assert self._hands is not None
        assert self._buffers is not None
        assert read.begun is not None
        self._hands.finish(read.begun)
        self._works = self._works and not read.refused
        try:
            read.then(read.data)
        finally:
            read.data = None
            self._buffers.append(read.buffer)


class _Read:
    """One of them."""

    def __init__(
        self, path: str, offset: int, size: int, buffer: memoryview, then: Callable[[Data | None], None]
    ) -> None:
        self._path, self._offset, self._size = path, offset, size
        self.buffer, self.then = buffer, then
        self.begun: Begun | None = None
        self.data: Data | None = None
        self.refused = False

    def __call__(self, *_: int) -> None:
        first, end = self._offset // PAGE * PAGE, -(-(self._offset + self._size) // PAGE) * PAGE
        at = self._offset - first
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            try:
                count = os.preadv(fd, [self.buffer[: end - first]], first)
            finally:
                os.close(fd)
        except OSError as error:  # whatever it is, is told when it is read as usual
            self.refused = error.errno in (errno.EINVAL, errno.EOPNOTSUPP)  # the file system cannot do it
            return
        if count >= at + self._size:
            whole: Any = np.frombuffer(self.buffer, np.uint8)
            self.data = whole[at : at + self._size]


def _buffers() -> list[memoryview]:
    """Each of them a large page where the system has some; none where it has no memory."""
    try:
        block = private((AT_ONCE + 1) * BUFFER_BYTES)
    except OSError:
        return []
    first = -ctypes.addressof(ctypes.c_char.from_buffer(block)) % BUFFER_BYTES
    whole = memoryview(block)[first : first + AT_ONCE * BUFFER_BYTES]
    return [whole[at : at + BUFFER_BYTES] for at in range(0, len(whole), BUFFER_BYTES)]
