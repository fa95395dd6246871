"""The template: a clean process with one thread that makes workers, and says at once when one dies.

Runs in a process of its own. It unpickles the program once; workers forked from it share those pages and are
there in milliseconds, and no thread of the user's is ever forked. It waits on its children, its orders and its
parent together, so that a death wakes it without polling. When the parent is gone, by whatever means, so is it,
and the kernel takes the workers with it.

Start methods differ only here: "forkserver" (the default) starts the template as a fresh interpreter and forks
workers from it; "fork" forks the template from the parent itself; "spawn" has it start a fresh interpreter for
each worker. That takes a while, so where the plan has room for them one or two more are started and wait until they
are needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gc
import mmap
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from typing import Any, Final

from penstock._core import machine
from penstock._core.arena import CONTROL_BYTES
from penstock._core.channel import Channel, pair
from penstock._core.overdue import RECORD, RECORD_BYTES, Overdue
from penstock._core.stacks import ASK
from penstock._core.wire import Notice, encode_notice

__all__ = ["SPARE", "born", "serve", "start_interpreter"]

GRACE_S: Final = 0.2  # for workers to end by themselves when the crew is closed; a load in progress is killed
SPARE: Final = -1  # the number of a worker that has none yet
SPARE_AFTER_S: Final = 0.5  # not while the first batches are waited for; many a feed is over by then
MOST_LOSSES: Final = 3
ONE_THREAD: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def start_interpreter(module: str, birth: dict[str, Any], keep: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """Start a fresh interpreter that calls ``module.born(birth)`` with these descriptors open.

    It gets this one's sys.path and flags; the user's main script is never imported again, because functions of
    ``__main__`` travel by value.
    """
    if not sys.executable:
        raise RuntimeError("sys.executable is not set, so no worker process can be started: use executor='thread'")
    fd = os.memfd_create("penstock-birth", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            pickle.dump(sys.path, file)
            pickle.dump({**birth, "argv": sys.argv}, file)
        code = (
            "import io, os, pickle, sys; fd = int(sys.argv[1])\n"
            "birth = io.BytesIO(os.pread(fd, os.fstat(fd).st_size, 0)); os.close(fd)\n"
            f"sys.path[:] = pickle.load(birth); import {module} as home; home.born(pickle.load(birth))"
        )
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
        environment = {name: "1" for name in ONE_THREAD if name not in os.environ}
        # Two malloc arenas a process: with one per thread and core, freed memory is scattered and never given back.
        environment["MALLOC_ARENA_MAX"] = os.environ.get("MALLOC_ARENA_MAX", "2")
        # Arrow's own allocator reserves a large piece at once, which may be all that a worker is allowed.
        environment["ARROW_DEFAULT_MEMORY_POOL"] = os.environ.get("ARROW_DEFAULT_MEMORY_POOL", "system")
        # The mask is inherited: a Ctrl-C while the interpreter starts would print a traceback of its own.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
        try:
            return subprocess.Popen(
                [sys.executable, *flags, "-c", code, str(fd)],
                pass_fds=(fd, *keep),
                stdin=subprocess.DEVNULL,
                env={**os.environ, **environment},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    finally:
        os.close(fd)


def born(birth: dict[str, Any]) -> None:
    """Entry of a template that was started as a fresh interpreter."""
    from penstock._core.worker import die_with, leave, outlive

    sys.argv = birth["argv"]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
    orders, tasks, replies = (Channel(socket.socket(fileno=birth[key])) for key in ("orders", "tasks", "replies"))
    program: Any = None
    if birth["fork"]:
        # Imports may take long or for ever, and nobody here can watch the parent meanwhile. Its thread waits for us.
        die_with(birth["parent"])
        try:
            program = pickle.loads(birth["program"])
        except BaseException as error:  # noqa: BLE001 - the parent gets to see it
            _absent(orders, error)
            leave(1)
        outlive()
    try:
        serve(program, birth, orders, tasks, replies)
    except OSError as error:
        _refused(orders, error)
        leave(1)
    leave(0)


def _absent(orders: Channel, error: BaseException) -> None:
    trace = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - an exception class that does not survive the way is described instead
        error = RuntimeError(f"{type(error).__qualname__}: {error}")
    with contextlib.suppress(ConnectionError):  # the parent did not wait
        orders.send(encode_notice(Notice.ABSENT, body=(error, trace)))


def _refused(orders: Channel, error: OSError) -> None:
    with contextlib.suppress(ConnectionError):  # the parent did not wait
        orders.send(encode_notice(Notice.REFUSED, error.errno or errno.EIO))


def serve(program: Any, birth: dict[str, Any], orders: Channel, tasks: Channel, replies: Channel) -> None:
    """Obey orders until there are none, then see to it that no worker is left."""
    from penstock._core import worker

    # Ignored by the user's process, it would be here too, and the kernel would not keep for us how workers ended.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        parent = os.pidfd_open(birth["parent"])
    except ProcessLookupError:
        return
    if os.getppid() != birth["parent"]:  # gone, and its number is another's
        return
    # What is here now is here for good: freezing it keeps the collector from touching, and so copying, these pages.
    gc.collect()
    gc.freeze()
    children: dict[int, tuple[int, int]] = {}  # pidfd -> worker, pid
    spares = _Spares(birth, tasks, replies)
    poller = select.poll()
    poller.register(orders, select.POLLIN)
    poller.register(parent, select.POLLIN)

    def tell(notice: Notice, *numbers: int) -> None:
        with contextlib.suppress(ConnectionError):  # the parent closed its end, or is gone: the poller says so too
            orders.send(encode_notice(notice, *numbers))

    tell(Notice.HERE, machine.private_bytes(os.getpid()))
    watch = _Watch(birth["timeout"], birth["arena"]) if birth["timeout"] is not None else None
    ended_for: dict[int, tuple[int, int]] = {}  # pid -> what it was late with

    def prepare() -> None:
        if (spare := spares.start()) is not None:
            poller.register(spare.pidfd, select.POLLIN)
            poller.register(spare.call, select.POLLIN)
            tell(Notice.SPARE, spare.pid)

    def reap(pidfd: int) -> None:
        number, pid = children.pop(pidfd)
        poller.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        tell(Notice.EXIT, number, pid, os.waitstatus_to_exitcode(status), *ended_for.pop(pid, (-1, -1)))

    running = True
    while running:
        if spares.begin_s is not None and time.monotonic() >= spares.begin_s:
            spares.begin_s = None
            prepare()
        waits_s = [] if watch is None else [watch.look(children, ended_for)]
        if spares.begin_s is not None:
            waits_s.append(max(0.0, spares.begin_s - time.monotonic()))
        for fd, _ in poller.poll(min(waits_s) * 1000 if waits_s else None):
            if fd in children:
                reap(fd)
            elif spares.coming is not None and fd == spares.coming.call.fileno():
                poller.unregister(fd)
                spares.arrived()
                prepare()
            elif fd in spares.waiting:
                children[fd] = (SPARE, spares.lost(fd))
                reap(fd)
                prepare()
            elif fd == parent:
                running = False
            elif fd == orders.fileno():
                try:
                    message, own = orders.receive_with_fd()
                except ConnectionError:
                    message, own = b"", None
                word, *rest = pickle.loads(message) if message else ("close",)
                if word == "close":
                    running = False
                elif word == "stack":
                    for number, pid in children.values():
                        if number == rest[0]:
                            os.kill(pid, ASK)
                elif word == "make":
                    number = rest[0]
                    shut = [orders.fileno(), parent, *children]
                    try:
                        if own is None:  # there was no room for it
                            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                        made = spares.take(number, own)
                        pid, pidfd = made or _make(worker, program, birth, number, tasks, replies, own, shut)
                    except OSError as error:
                        _refused(orders, error)
                    else:
                        children[pidfd] = (number, pid)
                        poller.register(pidfd, select.POLLIN)
                        tell(Notice.MADE, number, pid)
                        prepare()
                    if own is not None:
                        os.close(own)
                elif word == "prepare":
                    spares.wanted, spares.begin_s = rest[0], time.monotonic() + SPARE_AFTER_S
    # From here on only the children matter.
    for pidfd, spare in spares.waiting.items():
        children[pidfd] = (SPARE, spare.pid)
        os.kill(spare.pid, signal.SIGKILL)  # it has done nothing yet, and may be busy with its imports
    poller = select.poll()
    for pidfd in children:
        poller.register(pidfd, select.POLLIN)
    tasks.close()
    killed = False
    deadline = time.monotonic() + GRACE_S
    while children:
        left_s = deadline - time.monotonic()
        if left_s <= 0 and not killed:
            killed = True
            for _, pid in children.values():
                os.kill(pid, signal.SIGKILL)
        for fd, _ in poller.poll(None if killed else left_s * 1000):
            reap(fd)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Spare:
    """An interpreter that is nobody yet."""

    pid: int
    pidfd: int
    call: Channel
    """Where it says that it is here, and is told who it is."""


class _Spares:
    """Interpreters more than there are workers, which have imported everything and wait to be told who they are.

    Never are two of them on their way: each would take twice as long, and whoever dies meanwhile wait for both.
    """

    def __init__(self, birth: dict[str, Any], tasks: Channel, replies: Channel) -> None:
        self.begin_s: float | None = None
        """When to begin, if that was not yet."""
        self.wanted = 0
        self.waiting: dict[int, _Spare] = {}  # by pidfd, the oldest first
        self.coming: _Spare | None = None
        """The one that has not said yet that it is here; it may have been told already who it is."""
        self._birth = birth
        self._fds = (tasks.fileno(), replies.fileno())
        self._losses = 0

    def start(self) -> _Spare | None:
        """Have one more, if that is wanted and none is on its way. Nobody needs it as yet, so that it may fail."""
        if len(self.waiting) >= self.wanted or self.coming is not None or self.begin_s is not None:
            return None
        try:
            ours, theirs = pair()
            with contextlib.closing(theirs):
                pid, pidfd = _interpreter(self._birth, SPARE, *self._fds, theirs.fileno())
        except OSError:
            self.wanted = 0
            return None
        self.coming = self.waiting[pidfd] = _Spare(pid, pidfd, ours)
        return self.coming

    def arrived(self) -> None:
        """The one that was on its way has said that it is here, or never will."""
        spare, self.coming = self.coming, None
        assert spare is not None
        with contextlib.suppress(OSError):
            spare.call.receive_with_fd()  # left unread, it would take with it what was sent the other way
        if spare.pidfd not in self.waiting:
            spare.call.close()

    def take(self, number: int, own: int) -> tuple[int, int] | None:
        """Make one of them this worker: its pid and pidfd, or None if there is none."""
        for pidfd, spare in self.waiting.items():
            try:
                spare.call.send_with_fd(str(number).encode(), own)
            except OSError:  # it has died: told by its pidfd
                continue
            self._losses = 0
            self._forget(pidfd)
            return spare.pid, pidfd
        return None

    def lost(self, pidfd: int) -> int:
        """One has died: its pid. Those that die again and again while they wait are not worth more."""
        self._losses += 1
        if self._losses >= MOST_LOSSES:
            self.wanted = 0
        return self._forget(pidfd).pid

    def _forget(self, pidfd: int) -> _Spare:
        spare = self.waiting.pop(pidfd)
        if spare is not self.coming:
            spare.call.close()
        return spare


class _Watch:
    """Ends workers that take too long for an item, whatever the parent is doing meanwhile."""

    def __init__(self, timeout_s: float, arena: int) -> None:
        self._overdue = Overdue(timeout_s)
        self._records = mmap.mmap(arena, CONTROL_BYTES, prot=mmap.PROT_READ)

    def look(self, children: dict[int, tuple[int, int]], ended_for: dict[int, tuple[int, int]]) -> float:
        """End who is late; the seconds after which to look again."""
        pids = {number: pid for number, pid in children.values() if pid not in ended_for}
        records = {number: RECORD.unpack_from(self._records, number * RECORD_BYTES) for number in pids}
        verdict = self._overdue.look(time.monotonic(), records)
        for number in verdict.name:
            os.kill(pids[number], ASK)
        for number in verdict.end:
            ended_for[pids[number]] = self._overdue.late(number)
            os.kill(pids[number], signal.SIGKILL)
        return verdict.again_s


def _make(
    worker: Any,
    program: Any,
    birth: dict[str, Any],
    number: int,
    tasks: Channel,
    replies: Channel,
    own: int,
    shut: list[int],
) -> tuple[int, int]:
    """Make one worker; its pid, and a pidfd."""
    if not birth["fork"]:
        return _interpreter(birth, number, tasks.fileno(), replies.fileno(), own)
    me = os.getpid()
    pid = os.fork()
    if pid:
        return pid, _watched(pid)
    code, fds = 1, worker.Fds(birth["arena"], birth["stacks"])
    try:
        for fd in shut:
            os.close(fd)
        gc.enable()
        mine = Channel(socket.socket(fileno=own))  # held by a name until the end: with -W error a lost one is told
        worker.run(program, number, me, fds, tasks, replies, mine)
        code = 0
    except ConnectionError:
        pass  # the parent is gone: nobody is left to tell
    except Exception:  # noqa: BLE001 - this process ends here, and nobody else could print it
        traceback.print_exc()
    except BaseException as leaving:  # noqa: BLE001 - the parent tells it
        worker.last_words(fds, number, leaving)
        code = worker.exit_code(leaving)
    finally:
        worker.leave(code)
    raise AssertionError


def _interpreter(birth: dict[str, Any], number: int, tasks: int, replies: int, own: int) -> tuple[int, int]:
    """Make one that shares nothing with this process; its pid, and a pidfd."""
    arguments = {
        "program": birth["program"],
        "parent": os.getpid(),
        "worker": number,
        "arena": birth["arena"],
        "stacks": birth["stacks"],
        "tasks": tasks,
        "replies": replies,
        "own": own,
    }
    keep = (birth["arena"], birth["stacks"], tasks, replies, own)
    process = start_interpreter("penstock._core.worker", arguments, keep)
    process.returncode = 0  # reaped by pidfd here; this keeps Popen from waiting for it too
    return process.pid, _watched(process.pid)


def _watched(pid: int) -> int:
    """A pidfd of a child; one that cannot be watched is ended, or nobody would know when it is gone."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
