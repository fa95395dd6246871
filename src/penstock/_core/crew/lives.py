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
from penstock._core.errors import LoadError, LoadTimeout, PenstockError, WorkerLost, printable, said, shown
from penstock._core.fill import texts_too_large
from penstock._core.pickles import by_value
from penstock._core.program import Program
from penstock._core.task import Apart, Failure, Mode, Reply, Status, Task

__all__ = [
    "LOST_IN_A_ROW",
    "PROBE",
    "Deaths",
    "all_lost",
    "cannot_start",
    "joined",
    "manner",
    "pickled",
    "unpack_apart",
]

PROBE: Final = 0  # the id of the probe's task; those of the engine begin at 1
# An item is given two more chances: what killed its worker may have been the machine, not the item, even twice.
DEATHS_AN_ITEM: Final = 3
# Workers that die one after the other without ever finishing a task: something is wrong with all of them.
FRUITLESS_DEATHS: Final = 5
# So many items one after the other that cost their workers mean that all of them do. Each takes several processes.
LOST_IN_A_ROW: Final = 20


class Deaths:
    """Who died of what, and whether it is worth going on."""

    def __init__(self, program: Program) -> None:
        self._skips = program.skips
        self._mode = program.mode
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

    def fruit(self, task: Task) -> None:
        """A worker has finished a task, or handed over a part of it."""
        self.fruitless = 0
        self._forgive(task)

    def _forgive(self, task: Task) -> None:
        for counts in (self._counts, self._late):
            if counts:
                for key in [key for key in counts if key[0] == task.id]:
                    del counts[key]

    def of(self, task: Task, ordinal: int, code: int, words: str = "") -> Failure | None:
        """A worker died at this item of a task: the failure it is, or None if the task is to be done again.

        ``words`` is what it said when it left, if it did.
        Where items may be skipped, one that killed too often is barred from the task. But it may be another one that
        did something to the worker of which it died here. So one that killed again is done alone, and fails if that
        kills too. If not, those before it are suspect: they are done without the others, and where that kills, in
        halves.
        Samples that stand one behind the other (FLOW) are done in that order, first those before it. A batch that is
        collated where it is loaded (WHOLE) cannot be done in parts: there its items are only tried so. For a probe,
        one that does not kill is enough.
        """
        # Row by row, it will show which one it is; and whoever dies only when he is asked again need not be.
        if ordinal in (Failure.TOGETHER, Failure.PACING):
            task.barred = (*task.barred, ordinal)
            return None
        apart, alone = task.apart, task.alone
        if apart is not None and len(alone) > 1:
            half = len(alone) // 2
            apart.groups[:1] = [alone[:half], alone[half:]]
            self.fruitless = 0  # fewer to suspect
            return None
        if alone:
            ordinal = alone[0]  # wherever it was, it had nothing else to do
        elif self._in_rows(task) and ordinal not in (left := task.left()):
            if task.kept is not None:  # it may have died of what the cache has
                task.kept = None
                return None
            ordinal = left[0] if left else ordinal  # what it would have begun with
        self._counts[task.id, ordinal] += 1
        count = self._counts[task.id, ordinal]
        if not alone and count == DEATHS_AN_ITEM - 1 and not task.trial:
            self._take_apart(task, ordinal)
            return None
        if count < DEATHS_AN_ITEM:
            return None
        error = lost(task, ordinal, code, words, self._memory(code), skips=self._skips)
        return self._end(task, ordinal, error, "")

    def _in_rows(self, task: Task) -> bool:
        """Whether each item has its place, so that any may be done without the others."""
        return self._mode is Mode.ROWS and task.id != PROBE

    def _take_apart(self, task: Task, ordinal: int) -> None:
        """Have an item that killed again done without the others, and those before it without those behind it."""
        task.apart = apart = task.apart or Apart([])
        alone = (ordinal,) if ordinal != Failure.COLLATING else ()
        if task.id == PROBE:
            apart.groups = [alone] if alone else []
            return
        task.trial = self._mode is Mode.WHOLE
        if self._mode is not Mode.ROWS:  # nothing of it is there before it is done: what a cache has neither
            over = {*task.barred, *apart.done}
            before = tuple(place for place in range(min(ordinal, len(task.indices))) if place not in over)
        else:
            before = tuple(task.left(ordinal))
        groups = [before, alone] if self._mode is Mode.FLOW else [alone, before]
        apart.groups = [group for group in groups if group]

    def late(self, task: Task, ordinal: int, stack: str) -> Failure | None:
        """A worker was ended because this item took too long: the failure it is, or None if the task is done again."""
        self.fruitless = 0  # it was we who ended it
        if ordinal in (Failure.TOGETHER, Failure.PACING):
            task.barred = (*task.barred, ordinal)
            return None
        self._late[task.id, ordinal] += 1
        if self._late[task.id, ordinal] < self._tries:
            return None
        return self._end(task, ordinal, too_late(task, ordinal, self._timeout_s, skips=self._skips), stack)

    def _end(self, task: Task, ordinal: int, error: LoadError, trace: str) -> Failure | None:
        """An item has failed: the failure with which its task ends, or None if the rest of it is to be done."""
        self.fruitless = 0  # one item fewer to try
        failure = Failure(ordinal if ordinal != Failure.COLLATING else Failure.BATCH, error, trace)
        first = last = ordinal
        while first - 1 in task.barred:
            first -= 1
        while last + 1 in task.barred:
            last += 1
        if self._skips and last - first + 1 >= LOST_IN_A_ROW:
            failure = dataclasses.replace(failure, error=all_lost(last - first + 1, error))
            return self._when_earlier_are_done(task, failure)
        if not self._skips or ordinal in task.barred or failure.ordinal == Failure.BATCH:
            return self._when_earlier_are_done(task, failure)
        task.barred = (*task.barred, ordinal)
        self._barred[task.id, ordinal] = failure
        task.settle((ordinal,))
        self._forgive(task)
        if task.apart is not None:
            if task.apart.failure is not None:
                return self._when_earlier_are_done(task, task.apart.failure)
            task.apart.groups.clear()
        return None

    def _when_earlier_are_done(self, task: Task, failure: Failure) -> Failure | None:
        """A failure with which a task ends, if the items before that one are done; else they are to be, and no others.

        Batches before the one that has it are handed out: nobody knows the texts of those that a worker did who died.
        """
        before = task.left(failure.ordinal) if self._in_rows(task) and failure.ordinal > 0 else []
        if not before:
            return failure
        task.apart = task.apart or Apart([])
        task.apart.groups, task.apart.failure = [tuple(before)], failure
        self.fruitless = 0
        return None

    def whole(self, task: Task, reply: Reply) -> Reply | None:
        """What became of a task, with all that was done of it before; None if there is more of it to do.

        A reply that says MORE is one whose samples are to be handed over before the rest is done in another slot.
        """
        apart, alone = task.apart, task.alone
        if apart is not None and alone and not self._in_rows(task):
            return self._whole_in_order(task, reply, apart)
        over = joined(task.part, reply)
        failure = reply.body if isinstance(reply.body, Failure) else None
        if reply.status is Status.AGAIN:
            task.part = over
            if apart is None or not alone:
                task.first = reply.rows
                return None
            apart.done += tuple(place for place in alone if place < reply.rows)
            apart.groups[0] = tuple(place for place in alone if place >= reply.rows)
            return None
        if apart is None or not alone or (failure is not None and failure.ordinal < 0):
            return over
        if failure is not None:
            apart.done += tuple(place for place in alone if place < failure.ordinal)
            task.part = dataclasses.replace(over, body=list(over.body.texts) or None)
            failure = self._when_earlier_are_done(task, dataclasses.replace(failure, texts=()))
        else:
            apart.done += apart.groups.pop(0)
            task.part = over
            failure = apart.failure if not apart.groups else None
        size = sum(len(text) for _, _, text in task.part.body or ())
        if 0 < task.text_bytes < size:  # each part was within the limit
            failure = texts_too_large(size)
        if failure is None:
            return None
        return joined(task.part, Reply(task.id, reply.worker, Status.FAILED, body=failure))

    def _whole_in_order(self, task: Task, reply: Reply, apart: Apart) -> Reply | None:
        """The same where a task does not give its rows to its items beforehand, for some of its items."""
        if reply.status is Status.AGAIN:
            return None
        if task.id == PROBE or reply.status is not Status.DONE:
            return reply
        group = apart.groups.pop(0)
        if self._mode is Mode.WHOLE:  # it was only a trial
            return None
        apart.done += group
        task.settle(group)
        over = {*apart.done, *task.barred}
        if all(place in over for place in range(len(task.indices))):
            return reply
        if not reply.rows and not reply.failures:
            return None
        return dataclasses.replace(reply, status=Status.MORE, failures=(*reply.failures, *self.failures(task)))

    def failures(self, task: Task) -> tuple[Failure, ...]:
        """The items that were barred from a task, which is over now."""
        found = (self._barred.pop((task.id, o), None) for o in task.barred)
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


def too_late(task: Task, ordinal: int, timeout_s: float, *, skips: bool) -> LoadTimeout:
    """The error for an item that took longer than it may."""
    item, what = _at(task, ordinal)
    advice = "" if skips else ': give more time, or leave such items out with on_error="skip"'
    return LoadTimeout(f"{what} took longer than timeout={timeout_s:g} s, so its worker was stopped{advice}", item=item)


def _at(task: Task, ordinal: int) -> tuple[Any, str]:
    """The item at a place of a task, and what was done to it, in words."""
    if ordinal == Failure.COLLATING:
        items = list(task.items) if task.items is not None else task.indices.tolist()
        return items, f"collate_fn for the batch of {shown(items)}"
    item = task.items[ordinal] if task.items is not None else int(task.indices[ordinal])
    return item, f"loading {shown(item)}"


def all_lost(count: int, last: LoadError) -> LoadError:
    """The error when so many items that are to be left out cost their workers one after the other."""
    error = type(last)(f"{count} items in a row did so, so that it is not the items: {last}", item=last.item)
    if isinstance(error, WorkerLost) and isinstance(last, WorkerLost):
        error.exitcode = last.exitcode
    return error


def lost(task: Task, ordinal: int, code: int, words: str, memory: str, *, skips: bool) -> WorkerLost:
    """The error for an item that its workers died of; ``memory`` tells what the system did about memory meanwhile."""
    item, what = _at(task, ordinal)
    how = f"{manner(code)} ({printable(words)})" if words else manner(code)
    advice = "do that alone to see why" + ("" if skips else ', or leave such items out with on_error="skip"')
    if task.trial and not task.alone:  # every item was tried
        advice = (
            "nobody died of it alone, nor of the items before it, so that one of those may harm its process; load that "
            "batch with num_workers=0 to see why"
        )
    return WorkerLost(
        f"{DEATHS_AN_ITEM} workers died one after the other while {what}, with {how}{memory}: {advice}",
        item=item,
        exitcode=code,
    )


def joined(earlier: Reply | None, later: Reply) -> Reply:
    """What became of a task that was done in two parts, where rows are given out beforehand."""
    if earlier is None:
        return later
    texts = earlier.body or []
    body = later.body
    if isinstance(body, Failure):
        body = dataclasses.replace(body, texts=(*texts, *body.texts))
    elif texts:
        body = [*texts, *(body or ())]
    return dataclasses.replace(later, body=body, failures=(*earlier.failures, *later.failures))


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
