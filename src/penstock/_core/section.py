"""What may interrupt the engine while it changes something, and how that does no harm. Runs in the parent.

Three things come in the middle of it, in the very thread that does it: a finalizer (a garbage collection begins at any
allocation), a signal handler, and what such a handler raises, KeyboardInterrupt or anything else. The first two must
not wait for a lock that their own thread holds: what they want is postponed. The third leaves things half done:
``broken`` remembers that.

Used as ``with lock, section:``. The lock is one of C's, because Python runs signal handlers between any two bytecodes:
in an ``__enter__`` of ours, between taking it and entering the block, they would leave it taken for ever.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from penstock._core.errors import PenstockError

__all__ = ["Section"]


class Section:
    """Marks who is in the middle of something, under ``lock``."""

    __slots__ = ("_holder", "_postponed", "broken", "lock", "told")

    def __init__(self) -> None:
        # Taken twice only where an interrupt came between taking it and the try that follows: then that does no harm.
        self.lock = threading.RLock()
        self._holder = 0
        self._postponed: deque[Callable[[], object]] = deque()
        self.broken = False
        """Whether something was left half done: a reply may be lost, a task only half given out."""
        self.told: BaseException | None = None
        """An exception that is not one of ours, and is raised there on purpose."""

    def __enter__(self) -> None:
        self._holder = threading.get_ident()

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        # Whatever else comes out of it came from outside, between two bytecodes: of a timer's handler, say.
        if error is not None and not isinstance(error, PenstockError) and error is not self.told:
            self.broken = True
        self._holder = 0

    def inside(self) -> bool:
        """Whether this thread is in the middle of it."""
        # Both: an interrupt may have kept __exit__ from running, but never the lock from being released.
        return self._holder == threading.get_ident() and self.lock._is_owned()  # type: ignore[attr-defined]

    def postpone(self, action: Callable[[], object]) -> bool:
        """Whether this thread is in the middle of it: then the action is left for ``catch_up``."""
        if not self.inside():
            return False
        self._postponed.append(action)
        return True

    def catch_up(self) -> None:
        """Do what was postponed; called outside."""
        while self._postponed:
            self._postponed.popleft()()
