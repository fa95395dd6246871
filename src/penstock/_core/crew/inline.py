"""The crew of one that works in the consumer's own process, when it is asked for a batch and not before."""

from __future__ import annotations

from collections import deque

from penstock._core.arena import Arena
from penstock._core.fill import Filler, InsideGauge, Steps
from penstock._core.program import Probe, Program, Setup
from penstock._core.task import Busy, Grant, Reply, Task

__all__ = ["InlineCrew"]


class InlineCrew:
    """Does a task each time it is waited for."""

    measure_s = 0.0
    restarts = 0
    retired_bytes = 0

    def __init__(self, program: Program) -> None:
        self.arena = Arena(shared=False)
        self._filler = Filler(program, self.arena, 0)
        self._tasks: deque[Task] = deque()
        self._paused: tuple[Steps, Reply] | None = None
        self._granted: Grant | None = None
        self._broken_off: list[int] = []

    def probe(self, task: Task) -> Probe | None:
        """Load a few items here and now."""
        return self._filler.probe(task, InsideGauge())

    def start(self, setup: Setup) -> None:
        """Nothing to start."""
        self._filler.configure(setup.spec, setup.rows, setup.cache, setup.text_bytes)

    def submit(self, task: Task) -> None:
        """Remember a task."""
        self._tasks.append(task)

    def withdraw(self) -> list[int]:
        """Forget what was not begun."""
        taken = [*self._broken_off, *(task.id for task in self._tasks)]
        self._broken_off.clear()
        self._tasks.clear()
        return taken

    def grant(self, request: Reply, grant: Grant) -> None:  # noqa: ARG002 - the interface
        """The task that was put aside may go on."""
        self._granted = grant

    def wait(self, timeout_s: float | None = None) -> None:
        """Nobody else works: there is nothing to wait for."""

    def take(self) -> list[Reply]:
        """Do one task, or go on with the one that was put aside."""
        try:
            if self._paused is not None:
                if self._granted is None:
                    return []
                (steps, request), grant = self._paused, self._granted
                self._paused = self._granted = None
                current = request.task
                reply = steps.send(grant)
            elif self._tasks:
                task = self._tasks.popleft()
                current = task.id
                steps = self._filler.steps(task)
                reply = next(steps)
            else:
                return []
        except StopIteration as end:
            return [end.value]
        except BaseException:  # Ctrl-C in the middle of a load: it is never replied to
            self._broken_off.append(current)
            raise
        self._paused = (steps, reply)
        return [reply]

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
        if self._paused is not None:
            self._paused[0].close()
            self._paused = None
        self._filler.forget()
        self.arena.close()
