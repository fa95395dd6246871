"""How worker processes begin and end, for every crew that has some: what they are given, and what a death means.

Runs in the parent. It decides and does nothing: who is started, and how a death is noticed, is the crew's business.
"""

from __future__ import annotations

import signal
from collections import Counter
from typing import Final

from penstock._core import machine
from penstock._core.budget import format_bytes
from penstock._core.errors import PenstockError, WorkerLost, shown
from penstock._core.pickles import by_value
from penstock._core.program import Program
from penstock._core.task import Failure, Task

__all__ = ["PROBE", "Deaths", "cannot_start", "lost", "lost_failures", "manner", "pickled"]

PROBE: Final = 0  # the id of the probe's task; those of the engine begin at 1
# An item is given two more chances: what killed its worker may have been the machine, not the item, even twice.
DEATHS_AN_ITEM: Final = 3
# Workers that die one after the other without ever finishing a task: something is wrong with all of them.
FRUITLESS_DEATHS: Final = 5
# So many items one after the other that kill their worker mean that all of them do.
BARRED_IN_A_ROW: Final = 20


class Deaths:
    """Who died of what, and whether it is worth going on."""

    def __init__(self, program: Program) -> None:
        self._skips = program.skips and program.load is not None
        self._counts: Counter[tuple[int, int]] = Counter()
        self.fruitless = 0
        """Deaths in a row without anything being finished."""

    def forget_probe(self) -> None:
        """Another probe, with items of its own, has the same id."""
        self._counts.clear()

    def fruit(self, task: int) -> None:
        """A worker has finished a task, or handed over a part of it."""
        self.fruitless = 0
        if self._counts:
            for key in [key for key in self._counts if key[0] == task]:
                del self._counts[key]

    def of(self, task: Task, ordinal: int, code: int) -> Failure | None:
        """A worker died at this item of a task: the failure it is, or None if the task is to be done again.

        Where items may be skipped, one that killed twice is barred from the task.
        """
        self._counts[task.id, ordinal] += 1
        if self._counts[task.id, ordinal] < DEATHS_AN_ITEM:
            return None
        barred = (*task.barred, ordinal)
        row = barred[-BARRED_IN_A_ROW:]
        if self._skips and (len(row) < BARRED_IN_A_ROW or row[-1] - row[0] >= BARRED_IN_A_ROW):
            task.barred = barred
            self.fruitless = 0  # one item fewer to try
            return None
        return Failure(ordinal, lost(task, ordinal, code), "")

    def give_up(self, code: int, workers: int) -> WorkerLost | None:
        """Count a death; the error when there were too many without anything being finished."""
        self.fruitless += 1
        if self.fruitless <= FRUITLESS_DEATHS + 2 * workers:
            return None
        count, self.fruitless = self.fruitless, 0
        return WorkerLost(
            f"{count} workers died in a row without finishing anything, the last with {manner(code)}: "
            "run with num_workers=0 to see what happens in load",
            exitcode=code,
        )


def lost_failures(task: Task) -> tuple[Failure, ...]:
    """The items of a task that were barred from it."""
    return tuple(Failure(ordinal, lost(task, ordinal, None), "") for ordinal in task.barred)


def lost(task: Task, ordinal: int, code: int | None) -> WorkerLost:
    """The error for an item that its workers died of."""
    item = task.items[ordinal] if task.items is not None else int(task.indices[ordinal])
    how = manner(code) if code is not None else "a signal or exit"
    oom = ""
    if code is not None and manner(code) == "signal SIGKILL":
        kills = machine.oom_kills()
        oom = (
            f" (it looks like the out-of-memory killer: {kills} kills in this container)"
            if kills
            else " (perhaps the out-of-memory killer)"
        )
        oom += f"; {format_bytes(machine.available_bytes())} are available now"
    return WorkerLost(
        f"{DEATHS_AN_ITEM} workers died one after the other while loading {shown(item)}, with {how}{oom}: load it "
        'alone to see why, or leave such items out with on_error="skip"',
        item=item,
        exitcode=code,
    )


def manner(code: int) -> str:
    """An exit code in words."""
    if code < 0:
        try:
            return f"signal {signal.Signals(-code).name}"
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}"


def pickled(program: Program) -> bytes:
    """The program as it travels; what refuses to travel is said in words that help."""
    try:
        return by_value(program)
    except Exception as error:  # whatever user objects do while they are pickled
        raise PenstockError(
            f"load cannot be sent to worker processes ({type(error).__name__}: {error}): open files, locks and "
            "connections inside load instead of around it, or use executor='thread', num_workers=0 or "
            "start_method='fork'"
        ) from error


def cannot_start(error: BaseException, trace: str) -> PenstockError:
    """The error when the program could not be brought to life in a worker."""
    unborn = PenstockError(
        f"the workers cannot start: load could not be brought to life there ({type(error).__name__}: {error}). "
        "What load imports must be importable in a fresh interpreter; or use executor='thread' or start_method='fork'"
    )
    error.add_note(f"in the worker:\n{trace}")
    unborn.__cause__ = error
    return unborn
