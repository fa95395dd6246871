"""Workers that are threads of this process: for loads that release the GIL, and for free-threaded Python.

Queues are the only thing shared; each thread has a Filler of its own, and a reader if that keeps anything. A thread
cannot be killed: one that is stuck in a load when the crew is closed is left behind as a daemon and ends with its load.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import sys
import threading
import traceback

from penstock._core import context
from penstock._core.arena import Arena
from penstock._core.crew.refusals import refused
from penstock._core.fill import Filler, InsideGauge, Room, failure_of
from penstock._core.program import Probe, Program, Setup
from penstock._core.stacks import users_part
from penstock._core.task import Busy, Failure, Grant, Reply, Status, Task

__all__ = ["ThreadCrew"]

HEAVY_BYTES = 2**18  # of the texts of a task
LOOK_S = 1e-3
_JOIN_S = 0.5  # long enough for a thread between two items, too short to wait for a load that hangs


class ThreadCrew:
    """Threads that take tasks from one queue."""

    measure_s = 0.0
    restarts = 0
    retired_bytes = 0

    def __init__(self, program: Program) -> None:
        self.arena = Arena(shared=False)
        self._program = program
        self._first = Filler(program, self.arena, 0)
        self._fillers = [self._first]
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[Reply | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._grants: list[queue.SimpleQueue[Grant]] = []
        self._threads: list[threading.Thread] = []
        self._taken: list[Reply | None] = []
        self._at: dict[int, Busy] = {}

    def probe(self, task: Task) -> Probe | None:
        """Load a few items in this thread."""
        return self._first.probe(task, InsideGauge())

    def start(self, setup: Setup) -> None:
        """Start the threads."""
        for number in range(setup.workers):
            filler = self._first if number == 0 else Filler(_apart(self._program), self.arena, number)
            self._fillers[number:] = [filler]
            filler.configure(setup.spec, setup.rows, setup.cache, setup.text_bytes)
            self._grants.append(queue.SimpleQueue())
            info = context.WorkerInfo(number, setup.workers)
            thread = threading.Thread(
                target=_work,
                args=(filler, info, self._tasks, self._replies, self._grants[number], self._closed, self._at),
                name=f"penstock-{number}",
                daemon=True,
            )
            self._threads.append(thread)
            try:
                thread.start()
            except RuntimeError as error:
                raise refused(error) from error

    def submit(self, task: Task) -> None:
        """Have a task done by whoever is free."""
        self._tasks.put(task)

    def withdraw(self) -> list[int]:
        """Take back what nobody has begun."""
        taken = []
        with contextlib.suppress(queue.Empty):
            while True:
                task = self._tasks.get_nowait()
                if task is not None:
                    taken.append(task.id)
        return taken

    def grant(self, request: Reply, grant: Grant) -> None:
        """Let a thread go on."""
        self._grants[request.worker].put(grant)

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until there is a reply."""
        if self._taken or self._closed.is_set():
            return
        with contextlib.suppress(queue.Empty):
            # Within one call of C: a Ctrl-C between getting and keeping a reply would lose it.
            self._taken.extend(map(self._replies.get, (True,), (timeout_s,)))

    def take(self) -> list[Reply]:
        """The replies that are there now."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._taken.append(self._replies.get_nowait())
        replies, self._taken = self._taken, []
        return [reply for reply in replies if reply is not None]

    def pids(self) -> list[int]:
        """No process of its own."""
        return []

    def busy(self) -> list[Busy]:
        """What each thread is at."""
        return list(self._at.values())

    def stack(self, worker: int) -> str:
        """Where a thread is."""
        frame = sys._current_frames().get(self._threads[worker].ident or 0)
        return users_part([line.rstrip() for line in traceback.format_stack(frame)]) if frame is not None else ""

    def close(self) -> None:
        """Let every thread end."""
        self._closed.set()
        self.withdraw()
        for grants in self._grants:
            grants.put(Grant(0, None, 0))
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            # One that has no number was never started: Ctrl-C came first.
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(_JOIN_S)
        self._threads.clear()
        self._replies.put(None)  # for a consumer that waits in another thread
        for filler in self._fillers:
            filler.forget()
        self.arena.close()


def _apart(program: Program) -> Program:
    """The same for another thread: a reader that has files open, or keeps something, is not one for two."""
    apart = getattr(program.reader, "apart", None)
    return program if apart is None else dataclasses.replace(program, reader=apart())


def _work(
    filler: Filler,
    info: context.WorkerInfo,
    tasks: queue.SimpleQueue[Task | None],
    replies: queue.SimpleQueue[Reply | None],
    grants: queue.SimpleQueue[Grant],
    closed: threading.Event,
    at: dict[int, Busy],
) -> None:
    context.set_worker(info)
    task: Task | None = None

    def beat(ordinal: int) -> None:
        if closed.is_set():  # between two items of a task that nobody waits for any more
            raise Room
        if task is not None:
            at[info.id] = Busy(info.id, task.id, ordinal)

    filler.beat = beat

    def ask(reply: Reply) -> Grant:
        replies.put(reply)
        return grants.get()

    while (task := tasks.get()) is not None:
        left_out: list[Failure] = []
        while True:
            try:
                reply = filler.do(task, ask)
                reply.failures += tuple(left_out)
                break
            except BaseException as error:  # noqa: BLE001 - a load that calls sys.exit() must not end the thread
                ordinal = at[info.id].ordinal if info.id in at else 0
                failure = failure_of(error, ordinal, task.items[ordinal] if task.items else int(task.indices[ordinal]))
                if not filler.program.skips or ordinal in task.barred:
                    reply = Reply(task.id, info.id, Status.FAILED, body=failure)
                    break
                task.barred = (*task.barred, ordinal)
                left_out.append(failure)
        heavy = isinstance(reply.body, list) and sum(len(text) for _, _, text in reply.body) >= HEAVY_BYTES
        replies.put(reply)
        at.pop(info.id, None)
        # Texts wait outside of any slot, and nobody counts them before they are taken.
        while heavy and replies.qsize() > 1 and not closed.wait(LOOK_S):
            pass
        # The next task may be long in coming, and these would keep its items and arrays alive.
        task = None
        del reply
