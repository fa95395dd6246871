"""Memory of this process for batches that are given out as copies: a few blocks, used in turn. Runs in the parent.

Not malloc's: that keeps what was freed for each thread that ever asked, and gives it back when it likes. Not the
arena's either: shared memory comes in small pages, and these are large where the system has them, which makes copying
faster.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from penstock._core.arena import private
from penstock._core.batch import Lease, Leases
from penstock._core.layout import PAGE

__all__ = ["Own"]


class Own:
    """So many blocks of one size, each lent to one batch at a time, until the last view of that is gone."""

    def __init__(self, size: int, count: int, kick: weakref.WeakMethod[Callable[[], None]] | None = None) -> None:
        self._size = -(-size // PAGE) * PAGE
        self._most = count
        self._blocks: list[mmap.mmap] = []
        self._free: list[int] = []
        self.freed: deque[Lease] = deque()
        """Blocks that were given back, until somebody looks; ``kick`` is called then."""
        self._leases = Leases(self.freed, kick)

    def take(self) -> Any:
        """Memory whose last reference gives it back; None while all of it is lent, or the system has none."""
        self.settle()
        if not self._free:
            if len(self._blocks) >= self._most:
                return None
            try:
                self._blocks.append(private(self._size))
            except OSError:
                return None
            self._free.append(len(self._blocks) - 1)
        number = self._free.pop()  # the one that was used last is the warmest
        return self._leases.take(number, self._blocks[number], 0, self._size)

    def settle(self) -> None:
        """See what was given back."""
        while self.freed:
            self._free.append(self.freed.popleft().slot)

    @property
    def nbytes(self) -> int:
        """What there is of it."""
        return len(self._blocks) * self._size

    def close(self) -> None:
        """Lend no more; what is lent is given back to the system when it is let go of."""
        self._most = 0
        self._blocks.clear()
        self._free.clear()
        self.freed.clear()
