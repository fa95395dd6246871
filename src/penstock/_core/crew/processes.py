"""Worker processes on Linux: one arena, one channel of tasks that all workers read, one of replies. Runs in the parent.

A template process makes the workers and says when one dies (``template``). A task goes to whichever worker is
free, without the parent's help and without a lock; what a worker holds stands in its record in the arena. So a
death costs what the worker held and nothing else: those tasks are given out again once the process is gone.

What the record cannot tell: a worker that was killed in the microseconds between taking a task and noting it.
Then every idle worker is asked to answer; when all have, a task that nobody holds is known to be lost.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from typing import Any, Final

import cloudpickle

from penstock._core import machine, template
from penstock._core.arena import CONTROL_BYTES, Arena
from penstock._core.budget import format_bytes
from penstock._core.channel import SMALL, Channel, pair
from penstock._core.crew import probe_of
from penstock._core.crew.lives import (
    FRUITLESS_DEATHS,
    PROBE,
    Deaths,
    cannot_start,
    joined,
    manner,
    pickled,
    unpack_apart,
)
from penstock._core.crew.refusals import refused
from penstock._core.errors import PenstockError, WorkerLost
from penstock._core.limit import RETIRED
from penstock._core.overdue import LOOKED, RECORD, RECORD_BYTES
from penstock._core.pickles import introduce
from penstock._core.program import Probe, Program, Setup
from penstock._core.stacks import Stacks
from penstock._core.task import Busy, Failure, Grant, Mode, Reply, Status, Task
from penstock._core.wire import Notice, decode_notice, decode_reply, encode_task, ident_of
from penstock._core.worker import leave

__all__ = ["MOST_WORKERS", "ProcessCrew"]

MOST_WORKERS: Final = CONTROL_BYTES // RECORD_BYTES
CLOSE_S: Final = 5.0
STACK_S: Final = 0.2  # for a worker to write down where it is
MOST_SENT_BYTES: Final = 2 * 2**20  # of large messages that lie there for workers, in memory that is nobody's


class ProcessCrew:
    """A template, its workers, and the channels between them and this process."""

    def __init__(self, program: Program, *, start_method: str | None = None) -> None:
        self.restarts = 0
        self._retired = (0, 0)
        self.template_bytes = 0
        self._program = program
        self._method = start_method or "forkserver"
        self._owner = os.getpid()
        self._pickled = pickled(program) if self._method != "fork" else b""
        self.arena = Arena(shared=True)
        self._control, self._control_at = self.arena.window(0, CONTROL_BYTES)
        self._stacks = Stacks()
        self._tasks, self._queue = pair()
        self._replies, self._replies_out = pair()
        self._owns: dict[int, Channel] = {}
        self._pids: dict[int, int] = {}
        self._setup: bytes | None = None
        self._outstanding: dict[int, Task] = {}
        self._backlog: deque[Task] = deque()
        self._large: dict[int, int] = {}  # task -> bytes of its message, where that is large
        self._enough = False
        """Whether sending waits for replies, not for the socket."""
        self._in_rows = program.mode is Mode.ROWS  # other tasks may wait for one that was sent later
        self._waiting: dict[int, int] = {}  # worker -> task for which it waits for a grant
        self._parked: set[int] = set()  # tasks whose worker died while it waited: they have no room before the grant
        self._yielding: dict[int, int] = {}  # worker -> task that it was told to give up, and has not answered yet
        self._given_up: set[int] = set()  # tasks that have no place any more, and whose worker has not answered yet
        self._retiring: set[int] = set()
        self._afresh: dict[int, Task] = {}  # worker that had no room for it, or died of it -> task for its successor
        self._suspects: set[int] = set()
        self._pings: set[int] = set()
        self._round = 0
        self._deaths = Deaths(program)
        self._events: deque[Reply] = deque()
        self._poller, self._poller_out = select.poll(), select.poll()
        for poller in (self._poller, self._poller_out):
            poller.register(self._replies, select.POLLIN)
        self._poller_out.register(self._tasks, select.POLLOUT)
        self._process: subprocess.Popen[bytes] | None = None
        self._template_pid = 0
        self._template_fd = -1
        self._has_made = False
        self._wants_spares = 0
        self._spares: set[int] = set()  # pids of those that wait to be workers
        self._orders: Channel | None = None
        self._broken: PenstockError | None = None
        self._closed = False
        try:
            self._open_template()
            self._make(0)
        except BaseException:
            self.close()
            raise

    # ---- the interface

    def probe(self, task: Task) -> Probe | None:
        """Have worker 0 load a few items; what it loaded is used again when their turn comes."""
        self._outstanding[PROBE] = task
        self._deaths.forget_probe()
        self._send_probe()
        return probe_of(self)

    def start(self, setup: Setup) -> None:
        """Have as many workers as were planned, all told what a slot looks like and how far they may grow."""
        self._setup = cloudpickle.dumps(("setup", setup))
        with contextlib.suppress(ConnectionError):  # it died since the probe: the one in its place is told
            self._owns[0].send(self._setup)
        try:
            for number in range(1, setup.workers):
                self._make(number)
            self._wants_spares = setup.spares
            self._prepare()
        except OSError as error:
            raise self._break(error) from error

    def submit(self, task: Task) -> None:
        """Have a task done by whoever is free."""
        self._outstanding[task.id] = task
        self._backlog.append(task)
        try:
            self._flush()
        except OSError as error:
            raise self._break(error) from error

    def withdraw(self) -> list[int]:
        """Take back what nobody has begun: what was not sent yet, and what still lies in the channel."""
        taken = [task.id for task in self._backlog]
        self._backlog.clear()
        with contextlib.suppress(BlockingIOError):
            while data := self._queue.receive(wait=False):
                taken.append(ident_of(data))
        for task in taken:
            self._outstanding.pop(task, None)
        return taken

    def grant(self, request: Reply, grant: Grant) -> None:
        """Let the worker that waits go on, or another in its place if it died."""
        task = self._outstanding[request.task]
        if grant.offset is not None:
            task.slot, task.offset, task.capacity = grant.slot, grant.offset, grant.capacity
        if task.id not in self._parked:
            del self._waiting[request.worker]
            if grant.offset is None:
                self._given_up.add(task.id)
            with contextlib.suppress(OSError):  # it died: told by the template
                self._owns[request.worker].send(pickle.dumps(("grant", grant)))
            return
        self._parked.remove(task.id)
        if grant.offset is not None:
            self._backlog.appendleft(task)
            self._flush()
            self._make_way()
        else:
            del self._outstanding[task.id]
            self._events.append(Reply(task.id, request.worker, Status.DONE))

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until a worker or the template has something to say, or a task can be sent that could not be before."""
        if self._events or self._broken or self._closed:
            return
        if self._enough:  # replies since then may have made room for what was held back, and no other need follow
            self._flush()
        poller = self._poller_out if self._backlog and not self._enough else self._poller
        poller.poll(None if timeout_s is None else timeout_s * 1000)

    def take(self) -> list[Reply]:
        """The replies that are there now; deaths are dealt with on the way."""
        if self._broken:
            raise self._broken
        try:
            return self._take_all()
        except OSError as error:
            raise self._break(error) from error

    def _break(self, error: OSError) -> PenstockError:
        """The system refused something without which the books are wrong: it is over, and this is why."""
        if error.errno is None:  # it was not the system, but a signal handler of the user's, which may raise anything
            raise error
        told = refused(error)
        assert isinstance(told, PenstockError)
        self._broken = told
        return told

    def _take_all(self) -> list[Reply]:
        assert self._orders is not None
        self._flush()
        self._read_replies()
        # One poll tells all three apart without waiting; it costs about a microsecond.
        ready = {fd for fd, _ in self._poller.poll(0)}
        if self._orders.fileno() in ready:
            self._read_notices()
        elif self._template_fd in ready:
            self._template_died()
        self._make_way()
        replies = list(self._events)
        self._events.clear()
        return replies

    def pids(self) -> list[int]:
        """The template, its workers, and those that wait to be one."""
        return [self._template_pid, *self._pids.values(), *self._spares] if self._template_fd >= 0 else []

    @property
    def forked(self) -> bool:
        """Whether its processes share the memory of this one."""
        return self._method == "fork"

    @property
    def starts_slowly(self) -> bool:
        """Whether a new worker is a fresh interpreter, so that it is worth having some ready."""
        return self._method == "spawn"

    def busy(self) -> list[Busy]:
        """What each worker is at, by its record."""
        records = ((number, *self._record(number)) for number in self._pids)
        return [Busy(number, held - 1, ordinal) for number, held, ordinal, _ in records if held]

    def stack(self, worker: int) -> str:
        """Where a worker is; it answers also when it hangs in C code."""
        assert self._orders is not None
        with contextlib.suppress(OSError):  # the template died: told by its pidfd
            self._orders.send_with_fd(pickle.dumps(("stack", worker)))
            time.sleep(STACK_S)
        return self._stacks.read(worker)

    def close(self) -> None:
        """Stop template and workers; when this returns they are gone."""
        if self._closed:
            return
        self._closed = True
        if self._orders is not None:
            if os.getpid() == self._owner:
                with contextlib.suppress(OSError):
                    self._orders.send_with_fd(pickle.dumps(("close",)))
                for own in self._owns.values():
                    with contextlib.suppress(OSError):
                        own.send(pickle.dumps(("stop",)), wait=False)
                self._reap_template(CLOSE_S)
            self._forget_template()
        for channel in (*self._owns.values(), self._tasks, self._queue, self._replies, self._replies_out):
            channel.close()
        self._pids.clear()
        self._outstanding.clear()
        self._afresh.clear()
        self._backlog.clear()
        self._control = None  # a mapping keeps the whole arena
        self._stacks.close()
        self.arena.close()

    def _record(self, number: int) -> tuple[int, int, float]:
        record: tuple[int, int, float] = RECORD.unpack_from(self._control, self._control_at + number * RECORD_BYTES)
        return record

    @property
    def measure_s(self) -> float:
        """Seconds that workers took to look at their own memory."""
        if self._control is None:
            return 0.0
        at = self._control_at + LOOKED
        return float(sum(struct.unpack_from("d", self._control, at + n * RECORD_BYTES)[0] for n in self._owns))

    @property
    def retired_bytes(self) -> int:
        """What a worker that was replaced took more than its successor takes now, which is counted already."""
        size, number = self._retired
        if not size:
            return 0
        successor = self._pids.get(number)
        return max(1, size - (machine.own_bytes(successor) if successor is not None else 0))

    @retired_bytes.setter
    def retired_bytes(self, size: int) -> None:
        self._retired = (size, 0)

    # ---- template and workers

    def _open_template(self) -> None:
        orders, theirs = pair()
        birth: dict[str, Any] = {
            "parent": self._owner,
            "orders": theirs.fileno(),
            "tasks": self._queue.fileno(),
            "replies": self._replies_out.fileno(),
            "arena": self.arena.fd,
            "stacks": self._stacks.fd,
            "program": self._pickled,
            "fork": self._method != "spawn",
            "timeout": self._program.timeout_s,
        }
        keep = tuple(birth[key] for key in ("orders", "tasks", "replies", "arena", "stacks"))
        if self._method == "fork":
            introduce(self._program.load)
            # The mask is inherited: a Ctrl-C before the child ignores it would print a traceback of its own.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
            try:
                self._template_pid = os.fork()
                if self._template_pid == 0:
                    self._be_template(birth, orders, theirs, mask)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        else:
            self._process = template.start_interpreter("penstock._core.template", birth, keep)
            self._template_pid = self._process.pid
        theirs.close()
        self._template_fd = os.pidfd_open(self._template_pid)
        self._orders = orders
        for poller in (self._poller, self._poller_out):
            poller.register(orders, select.POLLIN)
            poller.register(self._template_fd, select.POLLIN)

    def _be_template(self, birth: dict[str, Any], ours: Channel, theirs: Channel, mask: set[Any]) -> None:
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            ours.close()
            template.serve(self._program, birth, theirs, self._queue, self._replies_out)
        finally:
            leave(0)

    def _forget_template(self) -> None:
        assert self._orders is not None
        for poller in (self._poller, self._poller_out):
            poller.unregister(self._orders)
            poller.unregister(self._template_fd)
        self._orders.close()
        os.close(self._template_fd)
        self._orders, self._template_fd = None, -1

    def _make(self, number: int) -> None:
        if old := self._owns.get(number):
            old.close()
        mine, theirs = pair()
        self._owns[number] = mine
        RECORD.pack_into(self._control, self._control_at + number * RECORD_BYTES, 0, 0, 0.0)
        if self._setup is not None:
            mine.send(self._setup)
        elif PROBE in self._outstanding:
            self._send_probe()
        if (task := self._afresh.pop(number, None)) is not None and task.id in self._outstanding:
            if task.id in self._given_up:
                self._hand_out(task)
            else:
                mine.send(pickle.dumps(("task", encode_task(task))))
        assert self._orders is not None
        with contextlib.suppress(OSError):  # the template died: told by its pidfd
            self._orders.send_with_fd(pickle.dumps(("make", number)), theirs.fileno())
        theirs.close()

    def _prepare(self) -> None:
        """Have the template make more than are needed now, where there is room for them."""
        if self._wants_spares and self._orders is not None:
            with contextlib.suppress(OSError):  # the template died: told by its pidfd
                self._orders.send_with_fd(pickle.dumps(("prepare", self._wants_spares)))

    def _send_probe(self) -> None:
        with contextlib.suppress(OSError):  # it died: told by the template, and the next worker gets it
            self._owns[0].send(pickle.dumps(("probe", encode_task(self._outstanding[PROBE]))))

    def _reap_template(self, timeout_s: float | None) -> int:
        """Wait until the template is gone, by force if it takes too long; its exit code."""
        poller = select.poll()
        poller.register(self._template_fd, select.POLLIN)
        if not poller.poll(None if timeout_s is None else timeout_s * 1000):
            # The kernel ends workers with it, but for one that was stopped before it could ask for that. As long as the
            # template does not wait for them, their numbers are nobody else's.
            for pid in (*self._pids.values(), *self._spares):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.kill(self._template_pid, signal.SIGKILL)
        if self._process is not None:
            return self._process.wait()
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self._template_pid, 0)[1])
        except ChildProcessError:  # someone else in this process waits for any child
            return 0

    # ---- what comes in

    def _flush(self) -> None:
        self._enough = False
        try:
            while self._backlog and not self._sent_enough():
                data = encode_task(self._backlog[0])
                self._tasks.send(data, wait=False)
                task = self._backlog.popleft()
                if len(data) > SMALL and self._in_rows:
                    self._large[task.id] = len(data)
        except BlockingIOError:
            return

    def _sent_enough(self) -> bool:
        """Whether there are large messages enough for everybody, and one more."""
        if self._large:
            unsent = {task.id for task in self._backlog}
            self._large = {
                ident: size for ident, size in self._large.items() if ident in self._outstanding and ident not in unsent
            }
            self._enough = len(self._large) > len(self._owns) and sum(self._large.values()) >= MOST_SENT_BYTES
        return self._enough

    def _read_replies(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := self._replies.receive(wait=False):
                self._take(decode_reply(data))

    def _take(self, reply: Reply) -> None:
        if reply.status is Status.PONG:
            if reply.task == self._round:  # an answer to an earlier question says nothing about what came since
                self._pings.discard(reply.worker)
                self._resolve_suspects()
            return
        if reply.status is Status.RETIRING:
            self._retired = max(self._retired, (reply.rows, reply.worker))
            self._pids.pop(reply.worker, None)  # it is not measured any more; the template will say when it is gone
            self._retiring.add(reply.worker)
            return
        if reply.status is Status.ABSENT:
            raise cannot_start(reply.body.error, reply.body.trace)
        task = self._outstanding.get(reply.task)
        if task is None:
            return
        if self._yielding.get(reply.worker) == reply.task:  # this is only to say that it has
            del self._yielding[reply.worker]
            return
        self._deaths.fruit(task)
        self._suspects.discard(reply.task)
        if reply.status is Status.MORE:
            self._waiting[reply.worker] = reply.task
            if reply.body is not None:
                task.note_handed(reply)
            self._events.append(reply)
            return
        over = None if unpack_apart(task, reply) else self._deaths.whole(task, reply)
        if over is not None and over.status is Status.MORE:
            self._parked.add(task.id)
            task.since_s = time.monotonic()
            self._events.append(over)
            return
        if over is not None:
            self._finished(task, over)
            return
        task.since_s = time.monotonic()
        if reply.status is Status.AGAIN:
            self._afresh[reply.worker] = task
        elif task.id == PROBE:
            self._send_probe()
        else:
            self._hand_out(task)
            self._flush()

    def _finished(self, task: Task, reply: Reply) -> None:
        del self._outstanding[task.id]
        self._given_up.discard(task.id)
        reply.failures += self._deaths.failures(task)
        self._events.append(reply)

    def _read_notices(self) -> None:
        while self._orders is not None:
            try:
                data = self._orders.receive(wait=False)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._template_died()
                return
            notice, (one, two, *more), body = decode_notice(data)
            if notice is Notice.HERE:
                self.template_bytes = one
            elif notice is Notice.MADE:
                self._pids[one] = two
                self._spares.discard(two)
                self._has_made = True
            elif notice is Notice.SPARE:
                self._spares.add(one)
            elif notice is Notice.ABSENT:
                raise cannot_start(*body)
            elif notice is Notice.REFUSED:
                raise OSError(one, os.strerror(one))
            elif notice is Notice.EXIT and one == template.SPARE:
                self._spares.discard(two)
            elif notice is Notice.EXIT:
                code, held, ordinal = more
                self._read_replies()  # what it said before it died counts
                self._died(one, code, (held, ordinal) if held >= 0 else None)

    def _died(self, number: int, code: int, late: tuple[int, int] | None) -> None:
        """A worker is gone for good: what it held is given to another, and so is its place.

        ``late`` is for what it was ended: task and item as in its record.
        """
        self._pids.pop(number, None)
        waiting = self._waiting.pop(number, None)
        yielded = self._yielding.pop(number, None)
        self._pings.discard(number)
        if code == RETIRED and number in self._retiring:  # a load may exit with that number too
            self._retiring.remove(number)
            self.restarts += 1
            self._make(number)
            self._resolve_suspects()
            return
        held, ordinal = self._holds(number)
        if waiting is not None:
            self._parked.add(waiting)
        elif held == 0:
            self._look_for_lost(number)
        elif held - 1 in self._outstanding and held - 1 != yielded:  # one that yielded has it no more
            task = self._outstanding[held - 1]
            failure = None
            if task.id in self._given_up:
                pass
            elif late is None:
                failure = self._deaths.of(task, ordinal, code, self._stacks.words(number))
            elif late == (held, ordinal):  # else it was done with that at the last moment, and is not to blame
                failure = self._deaths.late(task, ordinal, self._stacks.read(number))
            self._again(task, failure, number)
        self.restarts += 1
        self._make(number)
        self._resolve_suspects()
        if late is None and (hopeless := self._deaths.give_up(code, len(self._owns))):
            raise hopeless

    def _again(self, task: Task, failure: Failure | None, dead: int) -> None:
        self._suspects.discard(task.id)  # it is found: given out twice, it would be written when its slot is another's
        if failure is not None:
            self._finished(task, joined(task.part, Reply(task.id, 0, Status.FAILED, body=failure)))
        elif task.id != PROBE:  # worker 0 is told again when it is made
            # Its successor has it at once: others may have been harmed by other items, and it would wait behind theirs.
            self._afresh[dead] = task

    def _hand_out(self, task: Task) -> None:
        """A task that nobody has any more is to be done by another; one that was given up is done with."""
        if task.id in self._given_up:
            self._given_up.remove(task.id)
            del self._outstanding[task.id]
            self._events.append(Reply(task.id, 0, Status.DONE))
        else:
            self._backlog.appendleft(task)

    def _make_way(self) -> None:
        """When all workers wait for room that only an earlier task can give, have the one with the last task do that.

        It happens when the worker of the earlier one has died: what it held is taken up again behind others.
        """
        if len(self._waiting) < len(self._owns):
            return
        unbegun = self._outstanding.keys() - self._waiting.values() - self._parked
        number, last = max(self._waiting.items(), key=lambda pair: pair[1])
        if not unbegun or min(unbegun) > last:
            return
        again = {*self._drained(), *(task.id for task in self._backlog)}
        self._backlog = deque(self._outstanding[ident] for ident in sorted(again))
        self._flush()
        del self._waiting[number]
        self._parked.add(last)
        self._yielding[number] = last
        with contextlib.suppress(OSError):  # it died: told by the template
            self._owns[number].send(pickle.dumps(("grant", Grant(0, None, 0))))

    def _look_for_lost(self, dead: int) -> None:
        """A worker died with an empty record: perhaps it had just taken a task."""
        for data in self._drained():
            self._backlog.append(self._outstanding[data])
        held = self._held()
        waiting = {task.id for task in self._backlog}
        self._suspects = self._outstanding.keys() - held - waiting - {PROBE}
        if not self._suspects:
            return
        # All, also those of whose birth the template has not told yet: they may have taken a task already.
        self._pings = self._owns.keys() - {dead}
        self._round += 1
        for number in self._pings:
            with contextlib.suppress(OSError):
                self._owns[number].send(pickle.dumps(("ping", self._round)))
        self._resolve_suspects()

    def _drained(self) -> list[int]:
        backlog = list(self._backlog)
        self._backlog.clear()
        drained = []
        with contextlib.suppress(BlockingIOError):
            while data := self._queue.receive(wait=False):
                drained.append(ident_of(data))
        self._backlog.extend(backlog)
        return [task for task in drained if task in self._outstanding]

    def _held(self) -> set[int]:
        held = {*self._waiting.values(), *self._parked, *(task.id for task in self._afresh.values())}
        for number in self._owns:
            task, _ = self._holds(number)
            if task:
                held.add(task - 1)
        return held

    def _holds(self, number: int) -> tuple[int, int]:
        """The task in a worker's record, plus 1, and the place in it; 0 if it has answered and did not note it yet."""
        held, ordinal, begun_s = self._record(number)
        task = self._outstanding.get(held - 1)
        return (0, 0) if task is not None and begun_s < task.since_s else (held, ordinal)

    def _resolve_suspects(self) -> None:
        if self._suspects and not self._pings:
            for ident in self._suspects - self._held():
                if ident in self._outstanding:
                    self._hand_out(self._outstanding[ident])
            self._suspects = set()

    def _template_died(self) -> None:
        """Everything below the template is gone with it; begin again with a new one."""
        code = self._reap_template(None)
        self._read_replies()
        self._forget_template()
        _wait_until_gone([*self._pids.values(), *self._spares])
        self._read_replies()
        self._deaths.fruitless += 1
        # One that ends by itself before it made anybody would do so again; one that was killed may not be to blame.
        if (not self._has_made and code >= 0) or self._deaths.fruitless > FRUITLESS_DEATHS:
            told = f"the process that makes workers died with {manner(code)} before it could: see what it printed above"
            if code < 0:
                told = (
                    f"the process that makes workers was ended by {manner(code)} while it started, "
                    f"{self._deaths.fruitless} times: by somebody, or by the system when memory is short "
                    f"({format_bytes(machine.available_bytes())} are available now)"
                )
            if self._has_made:
                told = (
                    f"the process that makes workers died {self._deaths.fruitless} times before anything was finished, "
                    f"the last time with {manner(code)}: find out who ends it (the system, when memory is short), or "
                    'load without it: executor="thread" or num_workers=0'
                )
            self._broken = WorkerLost(told, exitcode=code)
            raise self._broken
        numbers = sorted(self._owns)
        self._pids.clear()
        self._parked.update(self._waiting.values())
        self._waiting.clear()
        self._yielding.clear()
        self._retiring.clear()
        self._afresh.clear()  # they are among those that are outstanding
        self._suspects.clear()
        self._pings.clear()
        self._drained()
        self._backlog.clear()
        for task in reversed(list(self._outstanding.values())):  # the first to the front
            if task.id != PROBE and task.id not in self._parked:
                self._hand_out(task)
        self.restarts += len(numbers)
        self._open_template()
        for number in numbers:
            self._make(number)
        self._spares.clear()
        self._prepare()


def _wait_until_gone(pids: list[int]) -> None:
    """The kernel kills the template's workers with it; wait until it has, for they might still write."""
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            poller.poll()
        finally:
            os.close(fd)


if sys.platform != "linux":  # pragma: no cover
    raise ImportError("this crew needs Linux; portable.py is for other systems")
