"""Memory of this process for batches that are given out as copies: a few blocks, used in turn. Runs in the parent.

Not malloc's: that keeps what was freed for each thread that ever asked, and gives it back when it likes. Not the
arena's either: shared memory comes in small pages, and these are large where the system has them, which makes copying
faster.
"""

from __future__ import annotations

import mmap
from collections import deque
from typing import Any

from penstock._core.batch import Lease, Leases
from penstock._core.layout import PAGE

__all__ = ["Own"]


class Own:
    """So many blocks of one size, each lent to one batch at a time, until the last view of that is gone."""

    def __init__(self, size: int, count: int) -> None:
        self._size = -(-size // PAGE) * PAGE
        self._most = count
        self._blocks: list[mmap.mmap] = []
        self._free: list[int] = []
        self._freed: deque[Lease] = deque()
        self._leases = Leases(self._freed, None)

    def take(self) -> Any:
        """Memory whose last reference gives it back; None while all of it is lent, or the system has none."""
        while self._freed:
            self._free.append(self._freed.popleft().slot)
        if not self._free:
            if len(self._blocks) >= self._most:
                return None
            try:
                self._blocks.append(_private(self._size))
            except OSError:
                return None
            self._free.append(len(self._blocks) - 1)
        number = self._free.pop()  # the one that was used last is the warmest
        return self._leases.take(number, self._blocks[number], 0, self._size)

    @property
    def nbytes(self) -> int:
        """What there is of it."""
        return len(self._blocks) * self._size

    def close(self) -> None:
        """Lend no more; what is lent is given back to the system when it is let go of."""
        self._most = 0
        self._blocks.clear()
        self._free.clear()
        self._freed.clear()


def _private(size: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size)
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            block.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without them
            pass
    return block
