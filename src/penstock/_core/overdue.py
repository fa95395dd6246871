"""Whose time for an item is over: records in, verdicts out. Pure: no clock, no process.

Used by whoever watches workers: the template, and the thread of the portable crew. Somebody who is late is first
named, so that its stack can be asked for, and ended only if a moment later it is still at the same item: a record
that was read in the middle of being written, or an item that was finished at the last moment, ends nobody.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Mapping
from typing import Final

__all__ = ["LOOKED", "NOT_TIMED", "RECORD", "RECORD_BYTES", "Overdue", "Verdict"]

RECORD: Final = struct.Struct("<QIxxxxd")
"""A worker's record: task id plus one (0: idle), place of the item in the task, when it was begun (monotonic)."""
RECORD_BYTES: Final = 64
LOOKED: Final = 24
"""Where in it stands, behind the record: seconds that looking at its memory took, for this worker and those before."""
NOT_TIMED: Final = math.inf
"""In place of the moment of beginning: it waits for room, which is not the item's fault."""
# Long enough for a worker to write down its stack.
GRACE_S: Final = 0.05


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What is to be done now, and when to look again."""

    name: tuple[int, ...]
    """Workers that have just become late."""
    end: tuple[int, ...]
    """Workers to be ended."""
    again_s: float


class Overdue:
    """Remembers who was late when last looked at."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._named: dict[int, tuple[tuple[int, int, float], float]] = {}

    def look(self, now: float, records: Mapping[int, tuple[int, int, float]]) -> Verdict:
        """Judge the workers by their records."""
        name, end = [], []
        again_s = self._timeout_s
        for number, record in records.items():
            held, _, begun = record
            late_s = now - begun - self._timeout_s
            if held == 0 or late_s <= 0:
                self._named.pop(number, None)
                if held:
                    again_s = min(again_s, -late_s)
                continue
            before, since = self._named.get(number, (None, now))
            if before != record:
                self._named[number] = (record, now)
                name.append(number)
                again_s = min(again_s, GRACE_S)
            elif now - since >= GRACE_S:
                end.append(number)
            else:
                again_s = min(again_s, GRACE_S - (now - since))
        return Verdict(tuple(name), tuple(end), again_s)

    def late(self, number: int) -> tuple[int, int]:
        """What a worker that is to be ended was at: its task plus one, and the place of the item."""
        (held, ordinal, _), _ = self._named.pop(number)
        return held, ordinal
