"""Worker processes where memfd, pidfd or seqpacket sockets are missing: macOS, Windows, some builds of Python.

Only what ``multiprocessing`` has everywhere: processes, and one pipe to each of them. Nothing is shared between
workers but the arena, no queue and no lock, so a killed worker leaves nothing locked. The price is that somebody must
give out the tasks: a thread of the parent does, which alone touches processes and pipes, while the consumer only
leaves tasks and fetches replies. A worker is given two tasks at a time, so that it need not wait for its next one
and little waits behind a slow item.

``run`` and what is below it run in the workers; the rest in the parent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from multiprocessing import connection, resource_tracker, util
from typing import Any, Final

import cloudpickle

from penstock._core import context, machine
from penstock._core.arena import CONTROL_BYTES
from penstock._core.arena_named import NamedArena, Segment
from penstock._core.crew import lives, probe_of
from penstock._core.crew.refusals import refused
from penstock._core.errors import PenstockError
from penstock._core.fill import Filler, failure_of
from penstock._core.limit import RETIRED, Birth, Limit
from penstock._core.overdue import NOT_TIMED, RECORD, RECORD_BYTES, Overdue
from penstock._core.program import Probe, Program, Setup
from penstock._core.task import Busy, Failure, Grant, Reply, Status, Task
from penstock._core.template import ONE_THREAD
from penstock._core.wire import decode_reply, decode_task, encode_reply, encode_task, ident_of
from penstock._core.worker import die_with, probed, settle

__all__ = ["PortableCrew", "run"]

# Windows waits for 63 things at once: two a worker, and the consumer.
MOST_WORKERS: Final = 30 if sys.platform == "win32" else CONTROL_BYTES // RECORD_BYTES
TASKS_A_WORKER: Final = 2
# A task that waits in a pipe must fit into it, or the parent would wait for a worker that waits for the parent. The
# smallest pipe is that of macOS, 8 KiB.
SMALL: Final = 4096
LOOK_S: Final = 1.0  # a process that a dead worker had forked keeps its pipe open: only looking shows the death
DEATH_S: Final = 1.0  # from the closed pipe of a dying worker to its end
GRACE_S: Final = 0.2  # for workers to end by themselves when the crew is closed; a load in progress is killed
_TASK: Final = b"t"
_WORD: Final = b"w"
_starting: Final = threading.Lock()


@dataclasses.dataclass(slots=True)
class _Worker:
    """A worker as the parent knows it."""

    number: int
    process: Any
    pid: int
    pipe: connection.Connection
    told: int
    """How much of the arena's log it was told."""
    followed: int
    """How much of it it has followed, so that no name in it is needed for it."""
    up: bool = False
    given: deque[Task] = dataclasses.field(default_factory=deque)
    """Tasks in its hands, in the order in which it does them."""
    waiting: bool = False
    """Whether the first of them waits for a grant."""
    yielding: bool = False
    """Whether it was told to give up the first of them, and has not answered yet."""
    late: tuple[int, int] | None = None
    """For what it was ended: task and item as in its record."""
    afresh: Task | None = None
    """What the one before it died of: it is given that first."""


class PortableCrew:
    """Processes, a pipe to each, and the thread that talks to them."""

    measure_s = 0.0  # not known: what it takes is the same as on Linux, after each task

    def __init__(self, program: Program, *, start_method: str | None = None) -> None:
        self.restarts = 0
        self.retired_bytes = 0
        self._method = method = start_method or "spawn"
        if method not in multiprocessing.get_all_start_methods():
            raise PenstockError(f"start_method={method!r} does not exist on this system: leave it out")
        self._context: Any = multiprocessing.get_context(method)
        self._forks = method == "fork"
        self._program: Program | bytes = program if self._forks else lives.pickled(program)
        self._deaths = lives.Deaths(program)
        self._overdue = Overdue(program.timeout_s) if program.timeout_s is not None else None
        self._owner = os.getpid()
        self._workers: dict[int, _Worker] = {}
        self._setup: bytes | None = None
        # What the consumer leaves for the thread. Deques, because a lock could be held by the very thread in which the
        # garbage collector ends a lease, and so submits a task.
        self._tasks: deque[Task] = deque()
        self._wishes: deque[Any] = deque()
        self._parked: dict[int, Task] = {}  # their worker died while it waited: they have no room before the grant
        self._large = -1  # the id of a task that is too large to wait in a pipe
        self._replies: queue.SimpleQueue[Reply | None] = queue.SimpleQueue()
        self._taken: list[Reply | None] = []
        self._error: BaseException | None = None
        self._refused: Exception | None = None  # why a task could not be sent
        self._closing = False
        self.arena = NamedArena()
        self.arena.unname(len(self.arena.log))  # no worker is there yet that would need a name
        self._control: Any
        self._control, self._control_at = self.arena.window(0, CONTROL_BYTES)
        self._bell, self._button = multiprocessing.Pipe(duplex=False)
        self._thread = threading.Thread(target=self._serve, name="penstock-crew", daemon=True)
        # At exit multiprocessing waits for its children: before that, and in its own children, where atexit is not run.
        self._at_exit: Any = util.Finalize(None, self.close, exitpriority=10)
        self._wishes.append(1)
        try:
            self._thread.start()
        except RuntimeError as error:  # there may be no more threads
            self.close()
            raise refused(error) from error
        except BaseException:  # Ctrl-C, whose traceback would keep all this alive
            self.close()
            raise

    # ---- the interface

    def probe(self, task: Task) -> Probe | None:
        """Have worker 0 load a few items; what it loaded is used again when their turn comes."""
        self._deaths.forget_probe()
        self.submit(task)
        return probe_of(self)

    def start(self, setup: Setup) -> None:
        """Have as many workers as were planned (and the system allows), all told what a slot looks like."""
        setup = dataclasses.replace(setup, workers=min(setup.workers, MOST_WORKERS))
        self._setup = _word("setup", setup)
        self._wish(setup.workers)

    def submit(self, task: Task) -> None:
        """Have a task done by whoever is free."""
        self._tasks.append(task)
        self._ring()

    def withdraw(self) -> list[int]:
        """Take back what was not given to a worker."""
        taken = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._tasks.popleft().id)
        return taken

    def grant(self, request: Reply, grant: Grant) -> None:
        """Let the worker that waits go on, or another in its place if it died."""
        self._wish((request, grant))

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until there is a reply, or a second is over: on Windows Ctrl-C is seen only in between."""
        if self._taken or self._error is not None or self._closing:
            return
        with contextlib.suppress(queue.Empty):
            # Within one call of C: a Ctrl-C between getting and keeping a reply would lose it.
            self._taken.extend(map(self._replies.get, (True,), (LOOK_S if timeout_s is None else timeout_s,)))

    def take(self) -> list[Reply]:
        """The replies that are there now."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._taken.append(self._replies.get_nowait())
        if self._error is not None:
            raise self._error
        if self._refused is not None:
            refused, self._refused = self._refused, None
            raise refused
        taken, self._taken = self._taken, []
        return [reply for reply in taken if reply is not None]

    def pids(self) -> list[int]:
        """The workers."""
        return [worker.pid for worker in list(self._workers.values())]

    def busy(self) -> list[Busy]:
        """What each worker is at, by its record."""
        records = ((number, *self._record(number)) for number in list(self._workers))
        return [Busy(number, held - 1, ordinal) for number, held, ordinal, _ in records if held]

    def stack(self, worker: int) -> str:  # noqa: ARG002 - the interface
        """Not known here: no signal that every system has makes a process tell."""
        return ""

    def close(self) -> None:
        """Stop the workers; when this returns they are gone."""
        if os.getpid() != self._owner:  # forked off: none of it is ours
            return
        self._at_exit.cancel()
        self._closing = True
        self._replies.put(None)  # another thread may be waiting
        self._ring()
        if self._thread.ident is None:  # Ctrl-C came before it was started
            self._shut()
        elif self._thread is not threading.current_thread():  # or the garbage collector called, and it goes on alone
            self._thread.join()

    # ---- the thread

    def _wish(self, wish: Any) -> None:
        self._wishes.append(wish)
        self._ring()

    def _ring(self) -> None:
        # ValueError: on Windows another thread may be ringing at this moment, which is as good.
        with contextlib.suppress(OSError, ValueError):
            self._button.send_bytes(b"")

    def _serve(self) -> None:
        try:
            if self._method != "forkserver" and hasattr(signal, "pthread_sigmask"):
                # Inherited by what this thread starts: a Ctrl-C while a worker starts would print a traceback. After
                # Python has started its tracker, with which it would unblock the signal again. The fork server is not
                # ours alone.
                resource_tracker.ensure_running()
                signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
            while not self._closing:
                while self._wishes:
                    self._obey(self._wishes.popleft())
                for worker in self._workers.values():
                    if worker.up and worker.told == worker.followed:  # one message at a time: its pipe is small
                        self._tell(worker)
                self._give_out()
                self._look(connection.wait(self._ears(), min(LOOK_S, self._end_late())))
        except BaseException as error:  # noqa: BLE001 - raised where the consumer is
            self._error = refused(error)
            self._replies.put(None)
        finally:
            self._stop_workers()
            while not self._closing:  # after an error: batches that are ready stay so until the crew is closed
                self._bell.poll(None)
                self._hear_bell()
            self._shut()

    def _end_late(self) -> float:
        """End workers that take too long for an item; the seconds after which to look again."""
        if self._overdue is None:
            return LOOK_S
        records = {number: self._record(number) for number, worker in self._workers.items() if worker.late is None}
        verdict = self._overdue.look(time.monotonic(), records)
        for number in verdict.end:
            self._workers[number].late = self._overdue.late(number)
            self._workers[number].process.kill()
        return verdict.again_s

    def _record(self, number: int) -> tuple[int, int, float]:
        record: tuple[int, int, float] = RECORD.unpack_from(self._control, self._control_at + number * RECORD_BYTES)
        return record

    def _shut(self) -> None:
        self._bell.close()
        self._button.close()
        self._control = None
        self.arena.close()

    def _ears(self) -> list[Any]:
        workers = self._workers.values()
        return [self._bell, *(worker.pipe for worker in workers), *(worker.process.sentinel for worker in workers)]

    def _obey(self, wish: Any) -> None:
        if not isinstance(wish, int):
            self._grant(*wish)
            return
        for worker in self._workers.values():
            assert self._setup is not None
            self._send(worker, self._setup)
        for number in range(len(self._workers), wish):
            self._make(number)

    def _grant(self, request: Reply, grant: Grant) -> None:
        for worker in self._workers.values():
            if worker.waiting and worker.given[0].id == request.task:
                worker.waiting = False
                _move(worker.given[0], grant)
                self._send(worker, _word("grant", grant))
                return
        task = self._parked.pop(request.task)
        if grant.offset is not None:
            _move(task, grant)
            self._tasks.appendleft(task)
        else:
            self._replies.put(Reply(task.id, request.worker, Status.DONE))

    def _give_out(self) -> None:
        """Give tasks to those who have fewest, in the order in which they came."""
        self._make_way()
        ready = [worker for worker in self._workers.values() if worker.up and not worker.yielding]
        for worker in ready:
            if worker.afresh is not None:
                task, worker.afresh = worker.afresh, None
                worker.given.append(task)
                self._send(worker, _TASK + encode_task(task))
        while ready and self._tasks:
            worker = min(ready, key=lambda worker: len(worker.given))
            if len(worker.given) == TASKS_A_WORKER:
                return
            try:
                task = self._tasks.popleft()
            except IndexError:  # withdrawn this moment
                return
            # Behind another only a later task: an earlier one that waits for its death to be made good may be the one
            # without which the other gets no room.
            behind = len(worker.given) > 0
            if behind and (task.id == self._large or task.id < worker.given[-1].id):
                self._tasks.appendleft(task)
                return
            try:
                data = _TASK + encode_task(task)
            except Exception as error:  # noqa: BLE001 - an item that cannot be pickled; the user gets to see it
                self._refused = error
                self._replies.put(Reply(task.id, worker.number, Status.FAILED, body=failure_of(error, 0, None)))
                continue
            if behind and len(data) > SMALL:
                self._large = task.id
                self._tasks.appendleft(task)
                return
            worker.given.append(task)
            self._send(worker, data)

    def _make_way(self) -> None:
        """When all workers wait for room that only an earlier task can give, have the one with the last task do that.

        It happens when the worker of the earlier one has died while it waited for room itself.
        """
        workers = self._workers.values()
        if not self._tasks or not all(worker.waiting for worker in workers):
            return
        worker = max(workers, key=lambda worker: worker.given[0].id)
        task = worker.given[0]
        with contextlib.suppress(IndexError):  # withdrawn this moment
            if self._tasks[0].id < task.id:
                worker.waiting, worker.yielding = False, True
                self._parked[task.id] = task
                while len(worker.given) > 1:
                    self._tasks.insert(1, worker.given.pop())
                self._send(worker, _word("yield"))

    def _look(self, ready: list[Any]) -> None:
        if self._bell in ready:
            self._hear_bell()
        for worker in list(self._workers.values()):
            alive = self._hear(worker) if worker.pipe in ready else True
            if not alive or worker.process.sentinel in ready or (not ready and not worker.process.is_alive()):
                self._died(worker)

    def _hear_bell(self) -> None:
        while self._bell.poll():
            self._bell.recv_bytes()

    def _hear(self, worker: _Worker) -> bool:
        """Take what a worker has said; False when it will say no more."""
        while True:
            try:
                if not worker.pipe.poll():
                    return True
                data = worker.pipe.recv_bytes()
            except (EOFError, OSError):
                return False
            self._take(worker, decode_reply(data))

    def _take(self, worker: _Worker, reply: Reply) -> None:
        if reply.status is Status.ABSENT:
            raise lives.cannot_start(reply.body.error, reply.body.trace)
        if reply.status is Status.PONG:
            worker.up, worker.followed = True, reply.task
            self._unname()
            return
        if reply.status is Status.RETIRING:
            self.retired_bytes = max(self.retired_bytes, reply.rows)
            return
        task = worker.given[0]
        assert task.id == reply.task
        self._deaths.fruit(task)
        if reply.status is Status.MORE:
            worker.waiting = True
            if reply.body is not None:
                task.note_handed(reply)
        else:
            worker.given.popleft()
            if worker.yielding:  # this is only to say that it has
                worker.yielding = False
                return
            over = None if lives.unpack_apart(task, reply) else self._deaths.whole(task, reply)
            if over is None:
                self._tasks.appendleft(task)
                return
            reply = over
            if reply.status is Status.MORE:
                self._parked[task.id] = task
            reply.failures += self._deaths.failures(task)
        self._replies.put(reply)

    def _send(self, worker: _Worker, data: bytes) -> None:
        self._tell(worker)
        with contextlib.suppress(OSError):  # it died: told by its sentinel
            worker.pipe.send_bytes(data)

    def _tell(self, worker: _Worker) -> None:
        if fresh := self.arena.log[worker.told :]:
            worker.told += len(fresh)
            with contextlib.suppress(OSError):  # as above
                worker.pipe.send_bytes(_word("follow", fresh, worker.told))

    def _unname(self) -> None:
        self.arena.unname(min(worker.followed for worker in self._workers.values()))

    # ---- birth and death

    def _make(self, number: int) -> None:
        RECORD.pack_into(self._control, self._control_at + number * RECORD_BYTES, 0, 0, 0.0)
        told, segments = len(self.arena.log), self.arena.segments()
        mine, theirs = self._context.Pipe()
        # Others hold no end of a pipe that is not theirs, or it would not close with this process.
        shut = [mine, self._bell, self._button, *(worker.pipe for worker in self._workers.values())]
        birth = {
            "one_thread": (*ONE_THREAD, "VECLIB_MAXIMUM_THREADS"),  # the last is for macOS
            "parent": os.getpid(),
            "arguments": (self._program, number, theirs, segments, told, self._setup, shut if self._forks else ()),
        }
        process = self._context.Process(target=exec, args=(_BIRTH, birth), name=f"penstock-{number}")
        try:
            with _plain_parent(hide_main=not self._forks):
                process.start()
            # It is ours to end: at exit multiprocessing would wait for it, also in a process forked off this one.
            getattr(multiprocessing.process, "_children", set()).discard(process)
        except BaseException:
            mine.close()
            raise
        finally:
            theirs.close()
        followed = told if segments[0].fd >= 0 else 0
        self._workers[number] = _Worker(number, process, process.pid, mine, told, followed)
        self._unname()

    def _died(self, worker: _Worker) -> None:
        """A worker is gone for good: what it held is given to others, its place to a new one."""
        if not connection.wait([worker.process.sentinel], DEATH_S):
            worker.process.kill()  # it closed its pipe, which only user code can have done
        worker.process.join()
        self._hear(worker)  # what it said before it died counts
        code = worker.process.exitcode or 0
        worker.pipe.close()
        _forget(worker.process)
        held, ordinal, _ = self._record(worker.number)
        given = list(worker.given)
        if worker.waiting:
            task = given.pop(0)
            self._parked[task.id] = task
        elif worker.yielding:
            given.pop(0)
        afresh = worker.afresh
        for task in reversed(given):
            failure = None
            if task.id != held - 1:
                self._tasks.appendleft(task)
                continue
            if worker.late is None:
                failure = self._deaths.of(task, ordinal, code)
            elif worker.late == (held, ordinal):  # else it was done with that at the last moment, and is not to blame
                failure = self._deaths.late(task, ordinal, "")
            if failure is None:
                afresh = task
            else:
                reply = lives.joined(task.part, Reply(task.id, worker.number, Status.FAILED, body=failure))
                reply.failures += self._deaths.failures(task)
                self._replies.put(reply)
        del self._workers[worker.number]
        if code != RETIRED and worker.late is None and (hopeless := self._deaths.give_up(code, len(self._workers) + 1)):
            raise hopeless
        self.restarts += 1
        self._make(worker.number)
        self._workers[worker.number].afresh = afresh

    def _stop_workers(self) -> None:
        for worker in self._workers.values():
            with contextlib.suppress(OSError):
                worker.pipe.send_bytes(_word("stop"))
            worker.pipe.close()
        deadline = time.monotonic() + GRACE_S
        alive = {worker.process.sentinel for worker in self._workers.values()}
        while alive and (left_s := deadline - time.monotonic()) > 0:
            alive -= set(connection.wait(list(alive), left_s))
        for worker in self._workers.values():
            if worker.process.sentinel in alive:
                worker.process.kill()
            worker.process.join()
            _forget(worker.process)
        self._workers.clear()


def _forget(process: Any) -> None:
    # ValueError: the program ignores SIGCHLD, so that nobody is told how a process ended.
    with contextlib.suppress(ValueError):
        process.close()


def _word(word: str, *rest: Any) -> bytes:
    return _WORD + bytes(cloudpickle.dumps((word, *rest)))


def _move(task: Task, grant: Grant) -> None:
    if grant.offset is not None:
        task.slot, task.offset, task.capacity = grant.slot, grant.offset, grant.capacity


@contextlib.contextmanager
def _plain_parent(*, hide_main: bool) -> Iterator[None]:
    """Keep multiprocessing from two habits.

    From importing the main script in a worker: what load needs of it travels by value. And from refusing children to
    daemons: ours end with their pipe, whatever becomes of their parent.
    """
    main: dict[str, Any] = vars(sys.modules["__main__"])
    process: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    with _starting:
        kept: dict[str, Any] = {name: main.pop(name) for name in ("__file__", "__spec__") if hide_main and name in main}
        if hide_main:
            main["__spec__"] = None
        daemon = process.get("daemon")
        process["daemon"] = False
        try:
            yield
        finally:
            main.update(kept)
            process["daemon"] = daemon


# ---- in the worker

# NumPy looks at these once, when it is imported, and importing this file imports it.
_BIRTH: Final = """
import os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)  # before anything is imported: see run
for name in one_thread:
    os.environ.setdefault(name, "1")
from penstock._core.crew.portable import run
run(parent, *arguments)
"""


def run(
    parent: int,
    program: Program | bytes,
    number: int,
    pipe: connection.Connection,
    segments: list[Any],
    told: int,
    setup: bytes | None,
    shut: tuple[connection.Connection, ...],
) -> None:
    """Be worker ``number`` until told to stop, or until the parent is gone and with it the other end of the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it stops the crew
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
    for other in shut:
        other.close()
    if sys.platform == "linux" and os.getppid() == parent:  # not where a fork server stands between them
        die_with(parent)
    with contextlib.suppress(EOFError, OSError):
        if isinstance(program, bytes):
            try:
                program = pickle.loads(program)
            except Exception as error:  # noqa: BLE001 - the user gets to see it
                pipe.send_bytes(encode_reply(Reply(0, number, Status.ABSENT, body=failure_of(error, 0, None))))
                return
        assert isinstance(program, Program)
        settle(program.seed, number)
        _Desk(program, number, pipe, NamedArena(list(map(Segment.inherited, segments))), setup).work(told)


class _Desk:
    """Where a worker sits: its pipe, its record, and the tasks that came while it waited for something else."""

    def __init__(
        self, program: Program, number: int, pipe: connection.Connection, arena: NamedArena, setup: bytes | None
    ) -> None:
        self._number = number
        self._pipe = pipe
        self._arena = arena
        self._filler = Filler(program, arena, number)
        self._filler.beat = self._beat
        self._memory, self._at = arena.window(number * RECORD_BYTES, RECORD_BYTES)
        self._limit: Limit | None = None
        self._birth = Birth.now()
        self._current = 0
        self._timeout_s = program.timeout_s
        self._tasks: deque[Task | bytes] = deque()
        if setup is not None:
            self._obey(setup)

    def work(self, told: int) -> None:
        """Do tasks; ends by SystemExit when told to, by EOFError or OSError when there is no parent."""
        self._reply(Reply(told, self._number, Status.PONG))
        while True:
            while not self._tasks:
                self._obey(self._pipe.recv_bytes())
            reply = self._do(self._tasks.popleft())
            self._in_time()
            self._reply(reply)
            self._current = 0
            self._note(0)
            if self._limit is not None and self._limit.outgrown():
                self._reply(Reply(0, self._number, Status.RETIRING, rows=machine.own_bytes(os.getpid())))
                raise SystemExit(RETIRED)

    def _do(self, given: Task | bytes) -> Reply:
        if isinstance(given, bytes):
            self._current = ident_of(given) + 1
            self._note(Failure.TOGETHER)
            try:
                task = decode_task(given, self._note)
            except Exception as error:  # noqa: BLE001 - the user's classes decide what can go wrong here
                failure = failure_of(error, Failure.TOGETHER, None)
                return Reply(ident_of(given), self._number, Status.FAILED, body=failure)
        else:
            task = given
        self._current = task.id + 1
        self._note(0)
        return probed(self._filler, task) if task.id == lives.PROBE else self._filler.do(task, self._ask)

    def _reply(self, reply: Reply) -> None:
        self._pipe.send_bytes(encode_reply(reply))

    def _in_time(self) -> float:
        """The seconds since the item was begun; if there are too many, whatever it made is too late."""
        spent_s: float = time.monotonic() - RECORD.unpack_from(self._memory, self._at)[2]
        if self._timeout_s is not None and spent_s > self._timeout_s and self._current:
            while True:
                self._pipe.recv_bytes()  # until it is ended, or the parent is
        return spent_s

    def _beat(self, ordinal: int) -> None:
        self._in_time()
        self._note(ordinal)

    def _note(self, ordinal: int) -> None:
        RECORD.pack_into(self._memory, self._at, self._current, ordinal, time.monotonic())

    def _ask(self, reply: Reply) -> Grant:
        spent_s = self._in_time()
        ordinal = RECORD.unpack_from(self._memory, self._at)[1]
        RECORD.pack_into(self._memory, self._at, self._current, ordinal, NOT_TIMED)
        self._reply(reply)
        while (grant := self._obey(self._pipe.recv_bytes())) is None:
            pass
        RECORD.pack_into(self._memory, self._at, self._current, ordinal, time.monotonic() - spent_s)
        return grant

    def _obey(self, message: bytes) -> Grant | None:
        if message[:1] == _TASK:
            self._tasks.append(message[1:])
            return None
        word, *rest = pickle.loads(message[1:])
        if word == "grant":
            grant: Grant = rest[0]
            return grant
        if word == "yield":
            self._tasks.clear()
            return Grant(0, None, 0)
        if word == "setup":
            setup: Setup = rest[0]
            context.set_worker(context.WorkerInfo(self._number, setup.workers))
            self._filler.configure(setup.spec, setup.rows, setup.cache, setup.text_bytes)
            if setup.growth_bytes and sys.platform == "linux":  # no other system has such limits
                self._limit = Limit(setup.growth_bytes, setup.load_bytes, self._birth, setup.held_bytes)
        elif word == "follow":
            log, told = rest
            self._arena.follow(log)
            self._reply(Reply(told, self._number, Status.PONG))
        elif word == "stop":
            raise SystemExit
        return None
