"""How worker processes begin and end, for every crew that has some: what they are given, and what a death means.

Runs in the parent. It decides and does nothing: who is started, and how a death is noticed, is the crew's business.
"""

from __future__ import annotations

import dataclasses
import signal
from collections import Counter
from typing import Any, Final

from penstock._core import machine
from penstock._core.budget import format_bytes
from penstock._core.errors import LoadTimeout, PenstockError, WorkerLost, printable, said, shown
from penstock._core.pickles import by_value
from penstock._core.program import Program
from penstock._core.task import Failure, Reply, Status, Task

__all__ = ["PROBE", "Deaths", "cannot_start", "manner", "pickled", "unpack_apart"]

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
        self._skips = program.skips
        self._tries = program.tries
        self._timeout_s = program.timeout_s or 0.0
        self._counts: Counter[tuple[int, int]] = Counter()
        self._late: Counter[tuple[int, int]] = Counter()
        self._barred: dict[tuple[int, int], Failure] = {}
        self._oom_kills = machine.oom_kills()
        self.fruitless = 0
        """Deaths in a row without anything being finished."""

    def forget_probe(self) -> None:
        """Another probe, with items of its own, has the same id."""
        for counts in (self._counts, self._late, self._barred):
            counts.clear()

    def fruit(self, task: int) -> None:
        """A worker has finished a task, or handed over a part of it."""
        self.fruitless = 0
        for counts in (self._counts, self._late):
            if counts:
                for key in [key for key in counts if key[0] == task]:
                    del counts[key]

    def of(self, task: Task, ordinal: int, code: int, words: str = "") -> Failure | None:
        """A worker died at this item of a task: the failure it is, or None if the task is to be done again.

        ``words`` is what it said when it left, if it did.
        Where items may be skipped, one that killed too often is barred from the task.
        """
        if ordinal == Failure.TOGETHER:  # row by row, it will show which one it is
            task.barred = (*task.barred, ordinal)
            return None
        self._counts[task.id, ordinal] += 1
        if self._counts[task.id, ordinal] < DEATHS_AN_ITEM:
            return None
        return self._end(task, ordinal, lost(task, ordinal, code, words, self._memory(code)), "")

    def late(self, task: Task, ordinal: int, stack: str) -> Failure | None:
        """A worker was ended because this item took too long: the failure it is, or None if the task is done again."""
        self.fruitless = 0  # it was we who ended it
        if ordinal == Failure.TOGETHER:
            task.barred = (*task.barred, ordinal)
            return None
        self._late[task.id, ordinal] += 1
        if self._late[task.id, ordinal] < self._tries:
            return None
        return self._end(task, ordinal, too_late(task, ordinal, self._timeout_s), stack)

    def _end(self, task: Task, ordinal: int, error: Exception, trace: str) -> Failure | None:
        failure = Failure(ordinal if ordinal != Failure.COLLATING else Failure.BATCH, error, trace)
        barred = (*task.barred, ordinal)
        row = [place for place in barred if place != Failure.TOGETHER][-BARRED_IN_A_ROW:]
        many = len(row) == BARRED_IN_A_ROW and row[-1] - row[0] < BARRED_IN_A_ROW
        if not self._skips or many or failure.ordinal == Failure.BATCH:
            return failure
        task.barred = barred
        self._barred[task.id, ordinal] = failure
        # Samples of it that were handed over before are not to be skipped again: it will not give them.
        first = task.skip - sum(task.handed.values()) if ordinal == 0 else 0
        task.skip -= first + task.handed.pop(ordinal, 0)
        self.fruitless = 0  # one item fewer to try
        return None

    def failures(self, task: Task) -> tuple[Failure, ...]:
        """The items that were barred from a task, which is over now."""
        found = (self._barred.pop((task.id, o), None) for o in task.barred if o != Failure.TOGETHER)
        return tuple(failure for failure in found if failure is not None)  # those that were told before are not again

    def _memory(self, code: int) -> str:
        """Whether it looks as if there was no memory left."""
        if manner(code) != "signal SIGKILL":
            return ""
        before, now = self._oom_kills, machine.oom_kills()
        if before is None or now is None:
            oom = " (perhaps the out-of-memory killer"
        elif now > before:
            oom = f" (it looks like the out-of-memory killer, which took {now - before} here since the feed began"
        else:
            oom = " (not by the out-of-memory killer of this container"
        return f"{oom}; {format_bytes(machine.available_bytes())} are available now)"

    def give_up(self, code: int, workers: int) -> WorkerLost | None:
        """Count a death; the error when there were too many without anything being finished."""
        self.fruitless += 1
        if self.fruitless <= FRUITLESS_DEATHS + 2 * workers:
            return None
        count, self.fruitless = self.fruitless, 0
        return WorkerLost(
            f"{count} workers died in a row without finishing anything, the last with "
            f"{manner(code)}{self._memory(code)}: "
            "run with num_workers=0 to see what happens in load",
            exitcode=code,
        )


def too_late(task: Task, ordinal: int, timeout_s: float) -> LoadTimeout:
    """The error for an item that took longer than it may."""
    item, what = _at(task, ordinal)
    return LoadTimeout(
        f"{what} took longer than timeout={timeout_s:g} s, so its worker was stopped: give more time, or leave "
        'such items out with on_error="skip"',
        item=item,
    )


def _at(task: Task, ordinal: int) -> tuple[Any, str]:
    """The item at a place of a task, and what was done to it, in words."""
    if ordinal == Failure.COLLATING:
        items = list(task.items) if task.items is not None else task.indices.tolist()
        return items, f"collate_fn for the batch of {shown(items)}"
    item = task.items[ordinal] if task.items is not None else int(task.indices[ordinal])
    return item, f"loading {shown(item)}"


def lost(task: Task, ordinal: int, code: int, words: str, memory: str) -> WorkerLost:
    """The error for an item that its workers died of; ``memory`` tells what the system did about memory meanwhile."""
    item, what = _at(task, ordinal)
    how = f"{manner(code)} ({printable(words)})" if words else manner(code)
    return WorkerLost(
        f"{DEATHS_AN_ITEM} workers died one after the other while {what}, with {how}{memory}: do that alone "
        'to see why, or leave such items out with on_error="skip"',
        item=item,
        exitcode=code,
    )


def unpack_apart(task: Task, reply: Reply) -> bool:
    """Whether the items of a task could not be unpacked together: then it is done again with each by itself."""
    if reply.status is not Status.FAILED or not isinstance(reply.body, Failure):
        return False
    if reply.body.ordinal != Failure.TOGETHER:
        return False
    if Failure.TOGETHER not in task.barred:
        task.barred = (*task.barred, Failure.TOGETHER)
        return True
    reply.body = dataclasses.replace(reply.body, ordinal=Failure.UNPACKING)
    return False


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
            f"load cannot be sent to worker processes ({said(error)}): open files, locks and "
            "connections inside load instead of around it, or use executor='thread', num_workers=0 or "
            "start_method='fork'"
        ) from error


def cannot_start(error: BaseException, trace: str) -> PenstockError:
    """The error when the program could not be brought to life in a worker."""
    unborn = PenstockError(
        f"the workers cannot start: load could not be brought to life there ({said(error)}). "
        "What load imports must be importable in a fresh interpreter; or use executor='thread' or start_method='fork'"
    )
    error.add_note(f"in the worker:\n{printable(trace)}")
    unborn.__cause__ = error
    return unborn
