"""The crew of one that works in the consumer's own process, when it is asked for a batch and not before.

Where nothing of the user's is called, only rows of arrays are gathered, it may have a thread beside it that does tasks
ahead, while the consumer is busy with something else. Whatever that has not begun when the consumer comes back for it,
the consumer does itself.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque

from penstock._core.arena import Arena
from penstock._core.copying import join
from penstock._core.fill import Filler, InsideGauge, Room, Steps, failure_of
from penstock._core.program import Probe, Program, Setup
from penstock._core.task import Busy, Grant, Reply, Status, Task

__all__ = ["InlineCrew"]


class InlineCrew:
    """Does a task each time it is waited for."""

    measure_s = 0.0
    restarts = 0
    retired_bytes = 0

    def __init__(self, program: Program, *, may_help: bool = False) -> None:
        """``may_help``: tasks may be done in a thread."""
        self.arena = Arena(shared=False)
        self._program = program
        self._filler = Filler(program, self.arena, 0)
        self._tasks: deque[Task] = deque()
        self._paused: tuple[Steps, Reply] | None = None
        self._granted: Grant | None = None
        self._broken_off: list[int] = []
        self._setup: Setup | None = None
        self._helper: _Helper | None = None
        self.may_help = may_help

    def probe(self, task: Task) -> Probe | None:
        """Load a few items here and now."""
        return self._filler.probe(task, InsideGauge())

    def start(self, setup: Setup) -> None:
        """Nothing to start."""
        self._setup = setup
        self._filler.configure(setup.spec, setup.rows, setup.cache, setup.text_bytes)

    def submit(self, task: Task) -> None:
        """Remember a task."""
        self._tasks.append(task)

    def submit_ahead(self, task: Task, *, start: bool) -> None:
        """Have a task done that nobody waits for yet; ``start``: a thread may be started now."""
        if self._helper is None and self.may_help and start:
            assert self._setup is not None
            filler = Filler(self._program, self.arena, 0)
            filler.configure(self._setup.spec, self._setup.rows, self._setup.cache, self._setup.text_bytes)
            self._helper = _Helper(filler)
            try:
                self._helper.start()
            except RuntimeError:  # there may be no more threads
                self._helper, self.may_help = None, False
        if self._helper is None:
            self._tasks.append(task)
        else:
            self._helper.submit(task)

    def withdraw(self) -> list[int]:
        """Forget what was not begun."""
        if self._helper is not None:
            self._tasks.extend(self._helper.withdraw())
        taken = [*self._broken_off, *(task.id for task in self._tasks)]
        self._broken_off.clear()
        self._tasks.clear()
        return taken

    def grant(self, request: Reply, grant: Grant) -> None:  # noqa: ARG002 - the interface
        """The task that was put aside may go on."""
        self._granted = grant

    def wait(self, timeout_s: float | None = None) -> None:
        """Block if there is something to wait for: nobody else works, but for the thread."""
        if self._helper is not None and not self._tasks and self._paused is None:
            self._helper.wait(timeout_s)

    def take(self) -> list[Reply]:
        """What the thread has done; or else do one task here, or go on with the one that was put aside."""
        if self._helper is not None and (replies := self._helper.take()):
            return replies
        current: int | None = None
        try:
            if self._paused is not None:
                if self._granted is None:
                    return []
                (steps, request), grant = self._paused, self._granted
                self._paused = self._granted = None
                current = request.task
                reply = steps.send(grant)
            elif (task := self._next()) is not None:
                current = task.id
                steps = self._filler.steps(task)
                reply = next(steps)
            else:
                return []
        except StopIteration as end:
            return [end.value]
        except BaseException:  # Ctrl-C in the middle of a load: it is never replied to
            if current is not None:
                self._broken_off.append(current)
            raise
        self._paused = (steps, reply)
        return [reply]

    def _next(self) -> Task | None:
        if self._tasks:
            return self._tasks.popleft()
        return self._helper.left() if self._helper is not None else None

    def pids(self) -> list[int]:
        """No process of its own."""
        return []

    def busy(self) -> list[Busy]:
        """Nobody works while the consumer waits."""
        return []

    def stack(self, worker: int) -> str:  # noqa: ARG002 - the interface
        """That of the consumer itself."""
        return ""

    def close(self) -> None:
        """Forget everything."""
        self._tasks.clear()
        if self._helper is not None:
            self._helper.close()
        if self._paused is not None:
            self._paused[0].close()
            self._paused = None
        self._filler.forget()
        self.arena.close()


class _Helper:
    """A thread that does tasks, one after the other. They never need more room than they have, and call nobody."""

    def __init__(self, filler: Filler) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[Reply | None] = queue.SimpleQueue()
        self._taken: list[Reply | None] = []
        self._open = 0
        """Tasks that were submitted and neither answered nor taken back."""
        self._thread = threading.Thread(
            target=_help, args=(filler, self._tasks, self._replies), name="penstock-ahead", daemon=True
        )

    def start(self) -> None:
        # Not while it is made: Ctrl-C in the middle of this must not make the thread nobody's.
        self._thread.start()

    def submit(self, task: Task) -> None:
        self._open += 1
        self._tasks.put(task)

    def left(self) -> Task | None:
        """One that it has not begun: it will not do it."""
        try:
            task = self._tasks.get_nowait()
        except queue.Empty:
            return None
        if task is None:  # closed by another thread meanwhile
            self._tasks.put(None)
        else:
            self._open -= 1
        return task

    def withdraw(self) -> list[Task]:
        taken = []
        while (task := self.left()) is not None:
            taken.append(task)
        return taken

    def wait(self, timeout_s: float | None) -> None:
        """Block until it has done something, unless it has nothing to do or something that it did not begin."""
        if not self._taken and self._open and self._tasks.empty():
            with contextlib.suppress(queue.Empty):
                # Within one call of C: a Ctrl-C between getting and keeping a reply would lose it.
                self._taken.extend(map(self._replies.get, (True,), (timeout_s,)))

    def take(self) -> list[Reply]:
        with contextlib.suppress(queue.Empty):
            while True:
                self._taken.append(self._replies.get_nowait())
        replies = [reply for reply in self._taken if reply is not None]
        self._taken.clear()
        self._open -= len(replies)
        return replies

    def close(self) -> None:
        self.withdraw()
        self._tasks.put(None)
        join(self._thread)
        self._replies.put(None)  # for a consumer that waits in another thread


def _help(filler: Filler, tasks: queue.SimpleQueue[Task | None], replies: queue.SimpleQueue[Reply | None]) -> None:
    def ask(_: Reply) -> Grant:
        raise Room

    while (task := tasks.get()) is not None:
        try:
            reply = filler.do(task, ask)
        except BaseException as error:  # noqa: BLE001 - raised where the consumer is
            reply = Reply(task.id, 0, Status.FAILED, body=failure_of(error, 0, int(task.indices[0])))
        task = None
        replies.put(reply)
        del reply
