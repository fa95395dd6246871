"""How feeds begin and end: nothing is left behind, whoever ends them and however, and feeds do not disturb each other.

What ends a whole interpreter is run as a script of its own; the pids that it prints are looked for afterwards.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from penstock import Feed, FeedClosed, LeaseError, LoadError

KINDS: dict[str, dict[str, Any]] = {
    "inline": {"num_workers": 0},
    "thread": {"num_workers": 2, "executor": "thread"},
    "process": {"num_workers": 2, "executor": "process"},
}
METHODS = ("fork", "forkserver", "spawn")
MEMORY = "512 MiB"
PATIENCE_S = 30.0  # for what must happen soon; a machine that is busy with other things is not a failure


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    return KINDS[request.param]


def numbered() -> Callable[[int], Any]:
    """A load that is made here, so that it travels by value and workers need not import this file."""

    def load(item: int) -> Any:
        return np.full(8, item)

    return load


def counting(kind: dict[str, Any], items: Any = range(64), **more: Any) -> Feed:
    return Feed(items, numbered(), batch_size=4, memory=MEMORY, **kind, **more)


def firsts(batches: Any) -> list[int]:
    return [int(batch[0, 0]) for batch in batches]


def pids_of(feed: Feed) -> list[int]:
    assert feed._engine is not None
    return feed._engine.crew.pids()


def survivors(pids: list[int]) -> list[int]:
    """Those that still run after a while; a dead one that nobody waited for does not."""
    until = time.monotonic() + PATIENCE_S
    while True:
        left = []
        for pid in pids:
            try:
                if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    left.append(pid)
            except psutil.NoSuchProcess:
                continue
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.01)


# ---------------------------------------- leaving early


def belongings() -> tuple[int, int, int]:
    """Processes, threads, descriptors."""
    return (
        len(psutil.Process().children(recursive=True)),
        threading.active_count(),
        len(os.listdir("/proc/self/fd")),
    )


def test_leaving_an_infinite_stream_early_leaves_nothing_on_one_feed(kind: dict[str, Any]) -> None:
    """Thirty times ``break``: no process, thread or descriptor more than after the first."""
    crew = 1 + kind["num_workers"] if kind.get("executor") == "process" else 0  # a template makes them
    before = len(psutil.Process().children(recursive=True))
    with counting(kind, itertools.count()) as feed:
        seen: list[int] = []
        after = None
        for turn in range(30):
            for batch in feed:
                seen += batch[:, 0].tolist()
                if turn % 3 == 0 or len(seen) % 3 == 0:
                    break
            until = time.monotonic() + PATIENCE_S
            while after is None and belongings()[0] < before + crew and time.monotonic() < until:
                time.sleep(0.01)  # one worker may have made the first batch before the other was there
            after = after or belongings()
            assert after[0] == before + crew
            assert belongings() == after
        assert seen == list(range(len(seen)))  # and nothing of the stream is lost by it


def test_leaving_an_infinite_stream_early_leaves_nothing_with_a_feed_each(kind: dict[str, Any]) -> None:
    """Nobody closes a feed that they made in the head of a ``for``."""
    gc.collect()
    before = belongings()
    for _ in range(30 if kind["num_workers"] == 0 or kind["executor"] == "thread" else 8):
        for batch in counting(kind, itertools.count()):
            assert batch[0, 0] == 0
            break
        del batch
        assert belongings() == before


@pytest.mark.slow
def test_thirty_process_feeds_left_early_leave_nothing() -> None:
    """The same with as many as the promise says."""
    before = belongings()
    for _ in range(30):
        for _batch in counting(KINDS["process"], itertools.count()):
            break
    del _batch
    assert belongings() == before


def test_a_feed_left_between_two_epochs_is_collected(kind: dict[str, Any]) -> None:
    """The second epoch is being read when the first ends; what reads it must not keep the feed alive."""
    feed = counting(kind)
    for epoch in feed.epochs(3):
        assert firsts(epoch) == list(range(0, 64, 4))
        break
    watch = weakref.ref(feed)
    pids = pids_of(feed)
    del feed, epoch
    gc.collect()
    assert watch() is None
    assert not survivors(pids)


def test_epochs_can_be_left_and_taken_up_again(kind: dict[str, Any]) -> None:
    """What was read ahead for an epoch that nobody took is no hindrance to the next."""
    with counting(kind) as feed:
        for number, epoch in enumerate(feed.epochs(5)):
            assert firsts(itertools.islice(epoch, 3)) == [0, 4, 8]
            if number == 1:
                break
        assert firsts(feed) == list(range(0, 64, 4))


def test_a_feed_that_was_never_closed_ends_with_its_last_reference(kind: dict[str, Any]) -> None:
    """Most users never call close."""
    feed = counting(kind)
    assert len(firsts(feed)) == 16
    pids = pids_of(feed)
    watch = weakref.ref(feed)
    del feed
    assert watch() is None  # at once: no cycle waits for the collector
    assert not survivors(pids)


def test_a_feed_in_a_cycle_is_ended_by_the_collector(kind: dict[str, Any]) -> None:
    """Its finalizer runs in the middle of somebody's allocation, perhaps our own: it must not wait for a lock."""
    gc.collect()
    for _ in range(3):
        feed = counting(kind)
        batches = iter(feed)
        held = [next(batches), feed, batches]
        held.append(held)
        pids = pids_of(feed)
        del feed, batches, held
        gc.collect()
        assert not survivors(pids)


# ---------------------------------------- closing


def test_close_twice_is_harmless(kind: dict[str, Any]) -> None:
    """``with`` and an explicit close are often both there."""
    with counting(kind) as feed:
        next(iter(feed))
        feed.close()
        feed.close()


def test_a_feed_that_was_never_used_is_closed_at_no_cost(kind: dict[str, Any]) -> None:
    """Making a feed starts nothing."""
    before = belongings()
    feed = counting(kind)
    assert belongings() == before
    feed.close()


def test_a_closed_feed_says_so(kind: dict[str, Any]) -> None:
    """Not an empty epoch: that would look like the end of the data."""
    feed = counting(kind)
    batches = iter(feed)
    next(batches)
    feed.close()
    with pytest.raises(FeedClosed, match="closed"):
        next(batches)
    with pytest.raises(FeedClosed, match="closed"):
        iter(feed)
    fresh = counting(kind)
    fresh.close()
    with pytest.raises(FeedClosed, match="closed"):
        _ = fresh.plan


def test_an_exception_in_a_with_block_closes_the_feed(kind: dict[str, Any]) -> None:
    """And is the one that is seen."""
    pids: list[int] = []

    def use() -> None:
        with counting(kind) as feed:
            for _ in feed:
                pids.extend(pids_of(feed))
                raise KeyError("the user's own")

    with pytest.raises(KeyError, match="the user's own"):
        use()
    assert not survivors(pids)


def test_closing_from_another_thread_wakes_the_one_that_waits(kind: dict[str, Any]) -> None:
    """A thread that waits for a batch which will never come would hang for ever."""
    if kind["num_workers"] == 0:
        pytest.skip("without workers nobody waits: the load itself runs there")
    asked = threading.Event()
    forever_s = 600 if kind["executor"] == "process" else 1

    def load(item: int) -> Any:
        if item >= 1000:
            time.sleep(forever_s)
        return np.full(8, item)

    feed = Feed(range(2000), load, batch_size=4, memory=MEMORY, **kind)

    def consume() -> type[BaseException] | None:
        try:
            for _ in feed:
                asked.set()
        except BaseException as error:  # noqa: BLE001 - told to the test
            return type(error)
        return None

    with ThreadPoolExecutor(1) as pool, feed:
        result = pool.submit(consume)
        assert asked.wait(PATIENCE_S)
        time.sleep(0.1)  # so that it waits, most of the time; the result is the same if it does not yet
        feed.close()
        assert result.result() is FeedClosed


def test_closing_while_others_consume_never_hangs_nor_crashes(kind: dict[str, Any]) -> None:
    """Whatever moment close() comes in, consumers get FeedClosed or the end, and no other error."""
    for turn in range(8 if kind.get("executor") != "process" else 4):
        feed = counting(kind, itertools.count())
        started = threading.Barrier(3)

        def consume(batches: Any = None, feed: Feed = feed, started: threading.Barrier = started) -> str:
            batches = iter(feed) if batches is None else batches
            first = True
            try:
                for batch in batches:
                    assert batch[0, 0] % 4 == 0
                    if first:
                        started.wait()
                        first = False
            except FeedClosed:
                return "closed"
            return "end"

        batches = iter(feed)
        with ThreadPoolExecutor(2) as pool:
            results = [pool.submit(consume, batches) for _ in range(2)]
            started.wait()
            time.sleep(0.002 * turn)
            feed.close()
            assert {result.result() for result in results} <= {"closed", "end"}


def test_closing_in_a_signal_handler_never_hangs() -> None:
    """A handler runs in the middle of whatever the main thread does, with our lock held perhaps."""
    run_script(
        """
        import itertools, os, signal, threading, time
        for turn in range(6):
            feed = Feed(itertools.count(), lambda i: np.full(8, i), batch_size=4, memory="512 MiB", num_workers=1)
            it = iter(feed)
            next(it)
            signal.signal(signal.SIGUSR1, lambda *_: feed.close())
            threading.Timer(0.01 + 0.003 * turn, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            try:
                for batch in it:
                    pass
            except penstock.FeedClosed:
                pass
        print("fine")
        """
    ).expect("fine")


# ---------------------------------------- several feeds


def test_the_older_of_two_iterators_is_told(kind: dict[str, Any]) -> None:
    """Two iterators on one feed would each wait for the other's slots, or silently share the batches."""
    with counting(kind) as feed:
        older = iter(feed)
        next(older)
        newer = iter(feed)
        next(newer)
        with pytest.raises(LeaseError, match=r"newer one over the same feed.*second Feed"):
            next(older)
        assert firsts(newer) == list(range(4, 64, 4))  # the newer one is not disturbed
        assert list(older) == []


def test_zip_of_a_feed_with_itself_says_why_not(kind: dict[str, Any]) -> None:
    """The most natural way to make this mistake."""
    with counting(kind) as feed, pytest.raises(LeaseError, match="one iteration at a time"):
        list(zip(feed, feed, strict=True))


def test_a_newer_iterator_of_a_stream_goes_on_where_the_older_was(kind: dict[str, Any]) -> None:
    """What was handed out is not given again, what was only read ahead is."""
    with counting(kind, iter(range(64))) as feed:
        older = iter(feed)
        assert firsts([next(older), next(older)]) == [0, 4]
        assert firsts(feed) == list(range(8, 64, 4))
    pairs = (Feed(iter(range(40)), lambda i: [i, i, i], batch_size=4, samples_per_item=None, memory=MEMORY, **kind),)
    for feed in pairs:
        with feed:
            older = iter(feed)
            seen = next(older).tolist() + next(older).tolist()
            for batch in feed:
                seen += batch.tolist()
            assert seen == [i for i in range(40) for _ in range(3)]


def test_two_feeds_run_side_by_side() -> None:
    """Every pair of kinds: no slot, no thread-local, no descriptor is shared by mistake."""
    for left, right in itertools.product(KINDS.values(), repeat=2):
        with counting(left) as one, counting(right, range(100, 164)) as other:
            pairs = [(int(a[0, 0]), int(b[0, 0])) for a, b in zip(one, other, strict=True)]
        assert pairs == [(i, 100 + i) for i in range(0, 64, 4)]


def test_feeds_can_be_nested(kind: dict[str, Any]) -> None:
    """A validation pass in the middle of an epoch."""
    with counting(kind) as train, counting(kind, range(1000, 1016)) as valid:
        for number, batch in enumerate(train):
            if number % 5 == 0:
                assert firsts(valid) == [1000, 1004, 1008, 1012]
            assert batch[0, 0] == 4 * number


@pytest.mark.parametrize("inner", ["thread", "process"])
def test_a_load_may_use_a_feed_of_its_own(inner: str) -> None:
    """Workers are ordinary processes: what a user can do, a load can."""
    settings = KINDS[inner]

    def load(item: int) -> Any:
        with Feed(range(item, item + 3), lambda i: np.full(2, i), batch_size=3, memory="256 MiB", **settings) as feed:
            return next(iter(feed)).sum()

    with Feed(range(4), load, batch_size=2, memory="1 GiB", num_workers=1) as feed:
        assert np.concatenate(list(feed)).tolist() == [2 * (3 * i + 3) for i in range(4)]


# ---------------------------------------- processes and threads


def use_a_feed(settings: dict[str, Any], answer: Any) -> None:
    with counting(settings) as feed:
        answer.put(firsts(feed))


@pytest.mark.leaves("child", "fd", reason="the resource tracker of multiprocessing stays once it was started")
@pytest.mark.parametrize("daemon", [False, True], ids=["child", "daemon"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_feed_works_inside_a_child_of_multiprocessing(method: str, daemon: bool, kind: dict[str, Any]) -> None:
    """Daemonic processes may have no children of multiprocessing's kind; ours are of another."""
    if method == "spawn" and kind["num_workers"] == 0:
        pytest.skip("the same as fork, and slower")
    context: Any = multiprocessing.get_context(method)
    answer = context.Queue()
    process = context.Process(target=use_a_feed, args=(kind, answer), daemon=daemon)
    process.start()
    assert answer.get(timeout=PATIENCE_S) == list(range(0, 64, 4))
    process.join()
    assert process.exitcode == 0
    process.close()
    answer.close()
    answer.join_thread()


def test_a_parent_with_many_threads_is_no_danger(kind: dict[str, Any]) -> None:
    """Threads that hold locks are never forked into a worker."""
    stop = threading.Event()
    lock = threading.Lock()

    def busy() -> None:
        while not stop.is_set():
            with lock:
                sum(range(100))
            time.sleep(0.0005)

    threads = [threading.Thread(target=busy) for _ in range(40)]
    for thread in threads:
        thread.start()
    try:
        with counting(kind) as feed:
            for _ in range(2):
                assert firsts(feed) == list(range(0, 64, 4))
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("method", METHODS)
def test_a_feed_outlives_the_thread_that_made_it(method: str) -> None:
    """The kernel's parent-death signal is about the thread that forked: it must not be this one."""
    made: list[tuple[Feed, Iterator[Any], int]] = []

    def make() -> None:
        feed = counting(KINDS["process"], range(400), start_method=method)
        batches = iter(feed)
        made.append((feed, batches, int(next(batches)[0, 0])))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    feed, batches, first = made.pop()
    with feed:
        assert [first, *firsts(batches)] == list(range(0, 400, 4))
        assert feed.stats.restarts == 0


def test_a_fork_of_the_parent_does_not_disturb_its_feed(kind: dict[str, Any]) -> None:
    """The child has copies of every socket and finalizer; using or dropping them must change nothing here."""
    with counting(kind, range(400)) as feed:
        batches = iter(feed)
        seen = firsts(itertools.islice(batches, 5))
        for _ in range(5):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    try:
                        list(batches)  # what lies in a slot that is handed out already may still come
                    except LeaseError as error:
                        code = 0 if "forked from it" in str(error) else 2
                    batches = feed = None  # type: ignore[assignment]
                    gc.collect()
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            seen += firsts(itertools.islice(batches, 5))
        seen += firsts(batches)
        assert seen == list(range(0, 400, 4))
        assert feed.stats.restarts == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_fork_that_ends_like_a_program_hangs_nowhere(kind: str) -> None:
    """It runs every exit handler it inherited, some of which are ours, with locks as they were at the fork."""
    run_script(
        f"""
        import os, sys, threading
        feed = Feed(range(400), lambda i: np.full(8, i), batch_size=4, memory="512 MiB", **{KINDS[kind]!r})
        it = iter(feed)
        seen = [int(next(it)[0, 0])]
        stop = threading.Event()
        for turn in range(6):
            pid = os.fork()
            if pid == 0:
                sys.exit(3)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
            seen.append(int(next(it)[0, 0]))
        seen += [int(b[0, 0]) for b in it]
        assert seen == list(range(0, 400, 4)), seen
        print("fine")
        """
    ).expect("fine")


def test_a_fork_inside_a_stream_hangs_nowhere() -> None:
    """The stream is pulled with our lock held: the child's copy of that lock is never released."""
    run_script(
        """
        import os, sys
        def items():
            for i in range(40):
                if i % 10 == 5:
                    pid = os.fork()
                    if pid == 0:
                        sys.exit(3)
                    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
                yield i
        feed = Feed(items(), lambda i: np.full(8, i), batch_size=4, memory="512 MiB", num_workers=1)
        assert [int(b[0, 0]) for b in feed] == list(range(0, 40, 4))
        print("fine")
        """
    ).expect("fine")


def test_a_parent_that_ignores_its_children_is_served() -> None:
    """Servers set SIGCHLD to be ignored; that is inherited, and then the kernel keeps no exit codes."""
    run_script(
        """
        import os, signal
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        def load(i):
            if i == 21 and not os.path.exists("killed"):
                open("killed", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            return np.full(8, i)
        with Feed(range(64), load, batch_size=4, memory="512 MiB", num_workers=2) as feed:
            assert [int(b[0, 0]) for b in feed] == list(range(0, 64, 4))
            assert feed.stats.restarts == 1, feed.stats
        print("fine")
        """
    ).expect("fine")


# ---------------------------------------- the end of a program


class Ended:
    """A script that ran to its end."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def expect(self, out: str, *, code: int = 0) -> Ended:
        assert (self.code, self.out.split()[-1:]) == (code, [out]), self.__dict__
        assert "Traceback" not in self.err, self.err
        return self


class Running:
    """A script that runs, and the processes of the feed in it."""

    def __init__(self, script: str) -> None:
        self.folder = Path(os.environ["TMPDIR"])
        preamble = "import numpy as np, penstock, sys\nfrom penstock import Feed\n"
        self.process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", preamble + textwrap.dedent(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=_fresh_folder(),
            start_new_session=True,
        )
        self.pids: list[int] = []

    def until_ready(self) -> Running:
        """Wait for the line in which the script tells the pids of its feed."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith("pids"):
            raise AssertionError((line, *self.process.communicate(timeout=PATIENCE_S)))
        self.pids = [int(pid) for pid in line.split()[1:]]
        return self

    def end(self) -> Ended:
        try:
            out, err = self.process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGABRT)  # faulthandler shows where it hangs
            out, err = self.process.communicate()
            raise AssertionError(f"the script hangs:\n{out}\n{err}") from None
        assert not survivors(self.pids), f"processes are left behind: {survivors(self.pids)}"
        return Ended(self.process.returncode, out, err)


_folders = itertools.count()


def _fresh_folder() -> Path:
    folder = Path(os.environ["TMPDIR"]) / f"script-{next(_folders)}"
    folder.mkdir()
    return folder


def run_script(script: str) -> Ended:
    return Running(script).end()


FEED = """
import os, signal, time
def load(i):
    time.sleep(0.001)
    return np.full(8, i)
feed = Feed(range(10**6), load, batch_size=4, memory="512 MiB", **{settings!r})
it = iter(feed)
batch = next(it)
print("pids", *feed._engine.crew.pids(), flush=True)
"""


def started(settings: dict[str, Any], then: str) -> Running:
    return Running(FEED.format(settings=settings) + textwrap.dedent(then)).until_ready()


ALL_KINDS = [
    *(pytest.param(settings, id=name) for name, settings in KINDS.items()),
    *(pytest.param({"num_workers": 2, "start_method": m}, id=m) for m in ("fork", "spawn")),
]
LOOP = "for batch in it: pass\n"


@pytest.mark.parametrize("settings", ALL_KINDS)
def test_a_program_that_ends_in_the_middle_of_an_epoch_ends(settings: dict[str, Any]) -> None:
    """Without close, with batches alive in globals, with workers at work."""
    ended = started(settings, "kept = next(it)").end()
    assert ended.code == 0
    assert ended.err == ""


@pytest.mark.parametrize("settings", ALL_KINDS)
def test_an_exception_in_the_loop_is_the_only_one_shown(settings: dict[str, Any]) -> None:
    """Workers have nothing to say about it."""
    ended = started(settings, "for batch in it:\n    raise KeyError('the user')").end()
    assert ended.code == 1
    assert ended.err.count("Traceback") == 1
    assert ended.err.rstrip().endswith("KeyError: 'the user'")


@pytest.mark.parametrize("settings", ALL_KINDS)
def test_sys_exit_in_the_loop_exits(settings: dict[str, Any]) -> None:
    """With its code, and nothing printed."""
    ended = started(settings, "for batch in it:\n    sys.exit(7)").end()
    assert (ended.code, ended.err) == (7, "")


@pytest.mark.parametrize("settings", ALL_KINDS)
def test_sigterm_ends_the_program_and_its_workers(settings: dict[str, Any]) -> None:
    """The default action runs no handler of ours at all."""
    running = started(settings, LOOP)
    running.process.send_signal(signal.SIGTERM)
    ended = running.end()
    assert (ended.code, ended.err) == (-signal.SIGTERM, "")


@pytest.mark.parametrize("settings", ALL_KINDS)
def test_ctrl_c_gives_one_clean_traceback(settings: dict[str, Any]) -> None:
    """A terminal sends SIGINT to the whole group: workers stay silent."""
    running = started(settings, LOOP)
    os.killpg(running.process.pid, signal.SIGINT)
    ended = running.end()
    assert ended.code == -signal.SIGINT
    assert ended.err.count("Traceback") == 1, ended.err
    assert ended.err.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(KINDS["process"], id="process"),
        *(pytest.param(*one.values, id=one.id, marks=pytest.mark.slow) for one in ALL_KINDS if one.id != "process"),
    ],
)
def test_ctrl_c_while_the_workers_start_gives_one_clean_traceback(settings: dict[str, Any]) -> None:
    """An interpreter that is just starting would print a traceback of its own imports."""
    for delay_ms in (0, 40, 120):
        running = Running(
            f"""
            import threading, os, signal, time
            print("pids", flush=True)
            feed = Feed(range(10**6), lambda i: np.full(8, i), batch_size=4, memory="512 MiB", **{settings!r})
            threading.Timer({delay_ms} / 1000, os.killpg, (os.getpgrp(), signal.SIGINT)).start()
            for batch in feed:
                time.sleep(0.0005)
            """
        ).until_ready()
        children = psutil.Process(running.process.pid).children(recursive=True)
        ended = running.end()
        assert ended.code == -signal.SIGINT
        assert ended.err.count("Traceback") == 1, ended.err
        assert ended.err.rstrip().endswith("KeyboardInterrupt"), ended.err
        assert not survivors([child.pid for child in children])


@pytest.mark.parametrize("settings", ALL_KINDS)
def test_killing_the_parent_ends_its_workers(settings: dict[str, Any]) -> None:
    """SIGKILL leaves no time for anything: the kernel and the template see to it."""
    running = started(settings, LOOP)
    running.process.kill()
    assert running.end().code == -signal.SIGKILL


@pytest.mark.parametrize("method", METHODS)
def test_killing_the_parent_ends_workers_that_are_stuck(method: str) -> None:
    """In C code with the GIL held no thread of Python's can notice anything."""
    running = Running(
        f"""
        import ctypes, os
        def load(i):
            if i >= 1000:
                ctypes.PyDLL(None).sleep(600)  # a call that keeps the GIL
            return np.full(8, i)
        feed = Feed(range(4000), load, batch_size=4, memory="512 MiB", num_workers=2, start_method={method!r})
        it = iter(feed)
        next(it)
        print("pids", *feed._engine.crew.pids(), flush=True)
        for batch in it: pass
        """
    ).until_ready()
    time.sleep(0.1)
    running.process.kill()
    assert running.end().code == -signal.SIGKILL


@pytest.mark.parametrize(
    "method", ["forkserver", *(pytest.param(one, marks=pytest.mark.slow) for one in ("fork", "spawn"))]
)
def test_killing_the_parent_while_workers_start_leaves_none(method: str) -> None:
    """Between fork and the first instruction of ours there is a gap, for each process that is started."""
    for delay_s in (0.0, 0.02, 0.08, 0.2):
        running = Running(
            f"""
            print("pids", flush=True)
            feed = Feed(range(400), lambda i: np.full(8, i), batch_size=4, memory="512 MiB", num_workers=2,
                        start_method={method!r})
            for batch in feed: pass
            """
        ).until_ready()
        time.sleep(delay_s)
        group = running.process.pid
        running.process.kill()
        running.process.communicate()
        until = time.monotonic() + PATIENCE_S
        left = True
        while left and time.monotonic() < until:
            left = any(_group_of(process) == group for process in psutil.process_iter())
            time.sleep(0.01)
        assert not left


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_killing_the_parent_ends_those_that_are_still_importing(method: str) -> None:
    """An import may hang on a file system; whoever hangs in it can watch nobody."""
    running = Running(
        f"""
        import os, time
        class Load:
            def __call__(self, i): return np.full(8, i)
            def __reduce__(self): return restore, (os.getpid(),)
        def restore(home):
            if os.getpid() != home: time.sleep(600)
            return Load()
        feed = Feed(range(400), Load(), batch_size=4, memory="512 MiB", num_workers=2, start_method={method!r})
        print("pids", flush=True)
        next(iter(feed))
        """
    ).until_ready()
    time.sleep(0.6)
    running.pids = [child.pid for child in psutil.Process(running.process.pid).children(recursive=True)]
    assert running.pids
    running.process.kill()
    assert running.end().code == -signal.SIGKILL


def _group_of(process: psutil.Process) -> int | None:
    try:
        return os.getpgid(process.pid) if process.status() != psutil.STATUS_ZOMBIE else None
    except (ProcessLookupError, psutil.NoSuchProcess):
        return None


@pytest.mark.parametrize("name", KINDS)
def test_an_interrupted_feed_can_be_used_again(name: str) -> None:
    """In a notebook Ctrl-C is followed by running the cell again, however often, and at whatever moment it came."""
    run_script(
        f"""
        import os, random, signal, threading, time
        feed = Feed(range(4000), lambda i: np.full(8, i), batch_size=4, memory="512 MiB", **{KINDS[name]!r})
        interrupted = 0
        random.seed(1)

        def check(number, batch):  # Python 3.13.0 lets an interrupt past `except` where a loop ends with an assert
            assert batch[0, 0] == 4 * number and batch[3, 7] == 4 * number + 3

        signal.signal(signal.SIGALRM, signal.default_int_handler)
        for turn in range(15):
            try:
                batches = iter(feed)
                signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0005, 0.02))
                for number, batch in enumerate(batches):
                    check(number, batch)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
        for _ in range(2):
            assert [int(b[0, 0]) for b in feed] == list(range(0, 4000, 4))
        assert interrupted, interrupted
        feed.close()
        print("fine")
        """
    ).expect("fine")


# ---------------------------------------- the main script


@pytest.mark.parametrize("method", METHODS)
def test_the_main_script_is_not_run_again_by_workers(method: str, tmp_path: Path) -> None:
    """No ``if __name__ == "__main__"`` is needed: what the script does at its top happens once."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os
            import numpy as np
            from penstock import Feed

            with open("runs", "a") as file:
                file.write(f"{{os.getpid()}}\\n")
            SCALE = 3

            class Sample:
                def __init__(self, item):
                    self.item = item

            def load(item):
                return np.full(4, Sample(item).item * SCALE)

            with Feed(range(16), load, batch_size=4, memory="512 MiB", num_workers=2, start_method={method!r}) as feed:
                print([int(b[0, 0]) for b in feed])
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[0, 12, 24, 36]\n"
    assert len((tmp_path / "runs").read_text().split()) == 1


def test_a_function_typed_on_the_command_line_works() -> None:
    """``python -c`` and notebooks have no file that a worker could import."""
    ended = run_script(
        """
        def load(i): return np.full(4, i)
        print(*[int(b[0, 0]) for b in Feed(range(16), load, batch_size=4, memory="512 MiB", num_workers=2)])
        """
    )
    assert (ended.code, ended.out, ended.err) == (0, "0 4 8 12\n", "")


def test_ctrl_c_while_a_stream_is_pulled_loses_nothing_of_it(kind: dict[str, Any]) -> None:
    """An iterator gives each item once: what was pulled when it came is there when the cell is run again."""

    class Items:
        number = 0
        interrupted = 0

        def __iter__(self) -> Items:
            return self

        def __next__(self) -> int:
            if self.number in (0, 21, 22, 43) and self.interrupted <= self.number:
                self.interrupted = self.number + 1
                signal.raise_signal(signal.SIGINT)
            if self.number == 64:
                raise StopIteration
            self.number += 1
            return self.number - 1

    with counting(kind, Items()) as feed:
        seen: list[int] = []
        interrupts = 0
        while len(seen) < 64:
            try:
                for batch in feed:
                    seen += batch[:, 0].tolist()
            except KeyboardInterrupt:
                interrupts += 1
        assert seen == list(range(64))
        assert interrupts == 4


def test_a_stream_that_fails_does_so_in_its_turn(kind: dict[str, Any]) -> None:
    """What came before the failure is delivered; the failure is not lost; the workers are fine."""

    def items() -> Iterator[int]:
        yield from range(50)
        raise OSError("the wire was cut")

    with counting(kind, items()) as feed:
        seen: list[int] = []
        with pytest.raises(LoadError, match="the wire was cut") as caught:
            seen.extend(first for batch in feed for first in batch[:, 0].tolist())
        assert seen == list(range(48))
        assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("kind", [TimeoutError, ValueError, MemoryError])
@pytest.mark.parametrize("place", [("send", "_flush"), ("submit", "_begin"), ("_take", "_next_chunk")])
def test_whatever_a_signal_handler_raises_leaves_the_feed_usable(kind: type[Exception], place: tuple[str, str]) -> None:
    """A timer strikes between any two bytecodes, and what it raises may look like an error of the system."""
    count = 0

    def strike(frame: Any, event: str, argument: object) -> None:
        nonlocal count
        if event == "return" and (frame.f_code.co_name, frame.f_back.f_code.co_name) == place:
            count += 1
            if count == 6:
                raise kind("my alarm")

    def load(item: int) -> Any:
        return np.full(10, item)

    with Feed(range(100), load, batch_size=8, memory="256 MiB", num_workers=2) as feed:
        _ = feed.plan
        batches = iter(feed)
        sys.setprofile(strike)
        try:
            with pytest.raises(kind, match="my alarm"):
                deque(batches, maxlen=0)
        finally:
            sys.setprofile(None)
        del batches
        for _ in range(2):
            assert [value for batch in feed for value in batch[:, 0].tolist()] == list(range(100))
