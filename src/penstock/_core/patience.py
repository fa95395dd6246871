"""How long is unusually long: when the consumer is told that it waits for one slow item. Runs in the parent."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Final

from penstock._core.task import Busy

__all__ = ["Patience", "SlowLoad", "users_level"]

SLOW_S: Final = 30.0  # a slow disk or a retried download takes less
# Loads that are slow by nature are known to be after the first ones.
USUAL_TIMES: Final = 20


class SlowLoad(UserWarning):
    """The next batch waits for an item whose load takes unusually long."""


class Patience:
    """Remembers who was at what, while nothing comes."""

    def __init__(self, slow_s: float | None = None) -> None:
        self.slow_s = SLOW_S if slow_s is None else slow_s
        self._since: dict[Busy, float] = {}
        self._said = False

    @property
    def look_s(self) -> float | None:
        """How long to wait for a reply before having a look; None once it was said."""
        return None if self._said else self.slow_s / 4

    def tried(self, now: float, busy: Iterable[Busy], *, usual_s: float) -> Busy | None:
        """Nothing came: who has been at one item for too long, if that was not said before."""
        self._since = {one: self._since.get(one, now) for one in busy}
        self.slow_s = max(self.slow_s, USUAL_TIMES * usual_s)
        for one, since in self._since.items():
            if now - since >= self.slow_s and not self._said:
                self._said = True
                return one
        return None


def users_level() -> int:
    """How many frames above the caller's the user's own line is: batches are asked for in several ways."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("penstock", "weakref"):
        level, frame = level + 1, frame.f_back
    return level
