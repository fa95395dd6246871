"""The worker process: takes tasks from the shared channel, does them, replies. Runs only in workers.

A worker holds no lock that anyone else waits for. What it is doing stands in its record in the arena's control
pages (which task, which item, since when), so that others know what was lost when it dies, and when it is late.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import random
import select
import signal
import socket
import sys
import time
import traceback
from typing import Any, Final, NamedTuple

import numpy as np

from penstock._core import context, machine
from penstock._core.arena import Arena
from penstock._core.channel import Channel
from penstock._core.errors import said
from penstock._core.fill import Filler, Mark, failure_of, texts_too_large
from penstock._core.limit import RETIRED, Birth, Limit
from penstock._core.order import mix
from penstock._core.overdue import LOOKED, NOT_TIMED, RECORD, RECORD_BYTES
from penstock._core.program import Program, Setup
from penstock._core.source import past_cache
from penstock._core.stacks import leave_words, write_when_asked
from penstock._core.task import Failure, Grant, Reply, Status, Task
from penstock._core.wire import decode_task, encode_reply, ident_of

__all__ = ["probed", "run", "settle"]

# A budget that is far too small is told by the plan, in numbers, and not by a load that finds no memory.
PROBE_LEAST_BYTES: Final = 256 * 2**20
# Where it is left to the plan whether there are workers, trying one must not break the budget: what finds no room
# beside a template and an idle worker is tried without them.
PROBE_OTHERS_BYTES: Final = 32 * 2**20
_PR_SET_PDEATHSIG: Final = 1


class Fds(NamedTuple):
    """Descriptors of what all workers share."""

    arena: int
    stacks: int


def run(program: Program, worker: int, parent: int, fds: Fds, tasks: Channel, replies: Channel, own: Channel) -> None:
    """Be worker number ``worker`` until told to stop; ``parent`` is the process that must be alive."""
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it stops the crew
    write_when_asked(fds.stacks, worker)
    settle(program.seed, worker)
    arena = Arena(shared=True, fd=fds.arena)
    filler = Filler(program, arena, worker)
    memory, at = arena.window(worker * RECORD_BYTES, RECORD_BYTES)
    limit: Limit | None = None
    birth = Birth.now()

    def record(task: int) -> None:
        RECORD.pack_into(memory, at, task, 0, time.monotonic())

    begun = memoryview(memory)[at + 16 : at + 24].cast("d")
    looked = memoryview(memory)[at + LOOKED : at + LOOKED + 8].cast("d")

    def in_time() -> float:
        spent_s: float = time.monotonic() - begun[0]
        if program.timeout_s is not None and spent_s > program.timeout_s:
            # Whatever it made is too late, and may be wrong: being asked for its stack interrupts calls of the system.
            while True:
                time.sleep(60)  # until it is ended
        return spent_s

    def ask(reply: Reply) -> Grant:
        spent_s = in_time()
        begun[0] = NOT_TIMED
        replies.send(encode_reply(reply))
        while True:
            word, *rest = pickle.loads(own.receive() or _STOP)
            if word == "grant":
                grant: Grant = rest[0]
                if grant.offset is None:  # the task is another's from now on, or nobody's
                    record(0)
                begun[0] = time.monotonic() - spent_s
                return grant
            if word == "ping":
                replies.send(encode_reply(Reply(rest[0], worker, Status.PONG)))
            elif word == "stop":
                raise SystemExit

    def finish(data: bytes) -> None:
        record(ident_of(data) + 1)
        try:
            place[0] = Failure.TOGETHER
            task = decode_task(data, lambda ordinal: place.__setitem__(0, ordinal))
            place[0] = 0
        except Exception as error:  # noqa: BLE001 - the user's classes decide what can go wrong here
            reply = Reply(ident_of(data), worker, Status.FAILED, body=failure_of(error, Failure.TOGETHER, None))
        else:
            reply = filler.do(task, ask)
            in_time()
            del task
        filler.fresh = False
        try:
            answer = encode_reply(reply)
        except MemoryError:
            answer = encode_reply(Reply(reply.task, worker, Status.FAILED, body=texts_too_large(0)))
        replies.send(answer)
        record(0)
        cramped = reply.status is Status.AGAIN
        worked_s = reply.seconds
        del reply, data
        if limit is None or not (cramped or limit.due(worked_s)):
            return
        began_s = time.thread_time()
        outgrown = cramped or limit.outgrown()
        looked[0] += time.thread_time() - began_s
        if outgrown:
            with contextlib.suppress(MemoryError):  # at its hard limit it cannot even say how large it is
                size = machine.own_bytes(os.getpid())
                replies.send(encode_reply(Reply(0, worker, Status.RETIRING, rows=size)))
            raise SystemExit(RETIRED)

    # One store into shared memory an item: the place of the item stands behind the task's number.
    place = memoryview(memory)[at + 8 : at + 12].cast("I")

    def timed_beat(ordinal: int) -> None:
        in_time()
        begun[0] = time.monotonic()  # first: a new place with an old moment would look late
        place[0] = ordinal

    filler.beat = Mark(place) if program.timeout_s is None else timed_beat
    poller = select.poll()
    poller.register(own, select.POLLIN)
    poller.register(tasks, select.POLLIN)
    while True:
        ready = dict(poller.poll())
        if own.fileno() in ready:
            message = own.receive()
            if not message:
                return
            word, *rest = pickle.loads(message)
            if word == "stop":
                return
            if word == "setup":
                setup: Setup = rest[0]
                context.set_worker(context.WorkerInfo(worker, setup.workers))
                filler.configure(setup.spec, setup.rows, setup.cache, setup.text_bytes)
                past_cache.allowed = setup.past_cache
                if setup.growth_bytes:
                    limit = Limit(setup.growth_bytes, setup.load_bytes, birth, setup.held_bytes)
                    filler.replaceable = True
            elif word == "probe":
                record(1)
                place[0] = Failure.TOGETHER
                try:
                    task = decode_task(rest[0], lambda ordinal: place.__setitem__(0, ordinal))
                except Exception as error:  # noqa: BLE001 - as in finish()
                    answer = Reply(0, worker, Status.FAILED, body=failure_of(error, Failure.TOGETHER, None))
                else:
                    place[0] = 0
                    answer = probed(filler, task)
                    del task
                in_time()
                replies.send(encode_reply(answer))
                record(0)
                del answer
            elif word == "task":  # one that another worker had no room for
                finish(rest[0])
            elif word == "ping":
                replies.send(encode_reply(Reply(rest[0], worker, Status.PONG)))
        elif tasks.fileno() in ready:
            try:
                data = tasks.receive(wait=False)
            except BlockingIOError:  # another worker was quicker
                continue
            if not data:
                return
            finish(data)
            del data


def probed(filler: Filler, task: Task) -> Reply:
    """The answer to a probe."""
    reply = Reply(task.id, filler.worker, Status.PROBED)
    program = filler.program
    least = PROBE_LEAST_BYTES if not program.decides else PROBE_OTHERS_BYTES
    machine.limit_data(max(program.memory - (PROBE_OTHERS_BYTES if program.decides else 0), least))
    try:
        reply.body = filler.probe(task, _Gauge())
    except Exception as error:  # noqa: BLE001 - whatever it is, the user gets to see it
        reply.status = Status.FAILED
        reply.body = failure_of(error, 0, task.items[0] if task.items else int(task.indices[0]))
    return reply


class _Gauge:
    """Measures this process as the kernel counts it."""

    apart = True

    _before = 0

    def idle_bytes(self) -> int:
        return machine.private_bytes(os.getpid())

    def start(self) -> None:
        gc.collect()
        machine.reset_peak(os.getpid())
        self._before = machine.peak_rss_bytes(os.getpid())

    def peak_bytes(self) -> int:
        return max(0, machine.peak_rss_bytes(os.getpid()) - self._before)

    def stop(self) -> None:
        """It goes on counting, and that costs nothing."""


def settle(seed: int, worker: int) -> None:
    """What every worker needs once: its own global random state, one thread for libraries that take all cores."""
    word = int(mix(seed, worker, os.getpid()))
    random.seed(word)
    # Whoever imports it later gets a state of his own; until then it is 2 MiB, and some milliseconds, for each worker.
    if "numpy.random" in sys.modules:
        np.random.seed(word & 0xFFFFFFFF)  # noqa: NPY002 - the global state is what user code before Generators uses
    if torch := sys.modules.get("torch"):
        torch.manual_seed(word >> 1)
        if "OMP_NUM_THREADS" not in os.environ or os.environ["OMP_NUM_THREADS"] == "1":
            torch.set_num_threads(1)
    if cv2 := sys.modules.get("cv2"):
        cv2.setNumThreads(0)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent thread dies, even while C code holds the GIL."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def outlive() -> None:
    """Take that back: the thread may end while the rest of its process goes on."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def leave(code: int) -> None:
    """End this process without running what belongs to the process it was forked from."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def last_words(fds: Fds, worker: int, error: BaseException) -> None:
    """Leave word why this process ends, where it is not our doing: ``sys.exit("why")``, KeyboardInterrupt and such."""
    if not isinstance(error, SystemExit) or isinstance(error.code, str):
        leave_words(fds.stacks, worker, said(error))


def exit_code(leaving: BaseException) -> int:
    """The code with which Python would end."""
    if not isinstance(leaving, SystemExit):
        return 1
    return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)


def born(birth: dict[str, Any]) -> None:
    """Entry of a worker that was started as a fresh interpreter (start_method="spawn")."""
    die_with(birth["parent"])  # before anything of the user's is imported, which may take long
    sys.argv = birth["argv"]
    tasks, replies, own = (Channel(socket.socket(fileno=birth[key])) for key in ("tasks", "replies", "own"))
    code, fds, number = 1, Fds(birth["arena"], birth["stacks"]), birth["worker"]
    try:
        try:
            program = pickle.loads(birth["program"])
        except BaseException as error:  # noqa: BLE001 - the user gets to see it, a module that calls sys.exit() too
            if number >= 0:
                replies.send(encode_reply(Reply(0, number, Status.ABSENT, body=failure_of(error, 0, None))))
            return
        if number < 0:  # not needed yet: who it is to be comes with the channel of its own
            call = own
            call.send_with_fd(b"here")
            told, fd = call.receive_with_fd()
            call.close()
            if fd is None:
                return
            number, own = int(told), Channel(socket.socket(fileno=fd))
        run(program, number, birth["parent"], fds, tasks, replies, own)
        code = 0
    except ConnectionError:
        pass  # the parent is gone: nobody is left to tell
    except Exception:  # noqa: BLE001 - this process ends here, and nobody else could print it
        traceback.print_exc()
    except BaseException as leaving:  # noqa: BLE001 - the parent tells it
        last_words(fds, number, leaving)
        code = exit_code(leaving)
    finally:
        leave(code)


_STOP: Final = pickle.dumps(("stop",))
