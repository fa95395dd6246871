"""Surroundings that are hostile: few descriptors, no room, closed files, foreign signal handlers, hidden processes.

Each is a program of its own that meets it for real. It works, with every sample in order and a killed worker replaced,
or it ends in one error that says what to do. Never a hang, a bare OSError or a page of tracebacks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, Final

import pytest

if sys.platform != "linux":
    pytest.skip("these surroundings are Linux's", allow_module_level=True)

PATIENCE_S: Final = 90.0

# Every program begins with this. ``serve`` is the promise: all samples, in order, twice, though a worker is killed.
PREAMBLE: Final = """
import os, signal, sys
import numpy as np
import penstock
from penstock import Feed

def check(claim, *told):   # not an assert: some of this is run with -O
    if not claim:
        raise AssertionError(*told)

LINUX = [{"start_method": method} for method in ("fork", "forkserver", "spawn")]
PORTABLE = [{"start_method": method, "portable": True} for method in ("fork", "spawn")]
QUICK = [LINUX[0], LINUX[1], PORTABLE[1]]
IN_HERE = [{"executor": "thread"}, {"num_workers": 0}]

def serve(crew, count=64):
    settings = {"num_workers": 2, **crew}
    os.environ["PENSTOCK_PORTABLE"] = "1" if settings.pop("portable", False) else "0"
    with Feed(range(count), lambda i: np.full(8, i), batch_size=4, memory="512 MiB", **settings) as feed:
        for epoch in range(1000):
            batches = iter(feed)
            seen = [int(next(batches)[0, 0])]
            pids = feed._engine.crew.pids()
            if pids and epoch == 0:
                os.kill(pids[-1], signal.SIGKILL)
            seen += [int(batch[0, 0]) for batch in batches]
            check(seen == list(range(0, count, 4)), seen)
            # A death is noticed within milliseconds, and a small epoch is over sooner.
            if epoch and (feed.stats.restarts or not pids):
                break
        check(feed.stats.restarts == bool(pids), feed.stats)

def refuse(crew, *words):
    try:
        serve(crew)
    except penstock.PenstockError as error:
        check(all(word in str(error) for word in words), error)
    else:
        check(False, f"{crew} was not refused")
"""


class Ended:
    """A program that ran to its end."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr

    def fine(self, said: str = "fine") -> None:
        assert (self.code, self.out.strip().splitlines()[-1:]) == (0, [said]), f"{self.code}\n{self.out}\n{self.err}"
        assert "Traceback" not in self.err, self.err


def program(script: str) -> str:
    return f"{PREAMBLE}\n{textwrap.dedent(script)}\nprint('fine', flush=True)\n"


def run(script: str, *before: str, python: tuple[str, ...] = (), **more: Any) -> Ended:
    """Run a script, by way of the command ``before`` if there is one; a hang ends with the stacks of all threads."""
    guard = f"import faulthandler; faulthandler.dump_traceback_later({PATIENCE_S - 10}, exit=True)\n"
    command = [*before, sys.executable, "-X", "faulthandler", *python, "-c", guard + program(script)]
    return Ended(subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S, **more))


def root() -> bool:
    return os.geteuid() == 0


def in_own_mounts(*commands: str) -> list[str]:
    """Before a command: run it where these mounts are made, and nobody else sees them."""
    if not shutil.which("unshare"):
        pytest.skip("needs unshare, of util-linux")
    flags = ["-m"] if root() else ["-m", "-r"]
    prefix = ["unshare", *flags, "sh", "-ec", "\n".join([*commands, 'exec "$@"']), "sh"]
    tried = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no mounts of its own here: {tried.stderr.strip()}")
    return prefix


def as_somebody() -> list[str]:
    """Before a command: run it as a user for whom limits hold, who may still read the files that we run from."""
    if not root():
        return []
    if not shutil.which("setpriv"):
        pytest.skip("needs setpriv, of util-linux, or not to be root")
    prefix = [
        "setpriv", "--reuid", "54321", "--inh-caps", "+dac_override", "--ambient-caps", "+dac_override",
        "--bounding-set", "-all,+dac_override",
    ]  # fmt: skip
    tried = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"cannot become another user here: {tried.stderr.strip()}")
    return prefix


# ---------------------------------------- limits


def test_sixty_four_descriptors_are_enough() -> None:
    """What ``ulimit -n 64`` leaves: an arena is one descriptor, whatever its size."""
    run(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        for crew in (*LINUX, *PORTABLE, *IN_HERE):
            serve(crew)
        """
    ).fine()


def test_twenty_descriptors_are_enough_or_refused_clearly() -> None:
    """The Linux crew needs a dozen; where they do not reach it says so, and where to turn."""
    run(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
        for crew in (*LINUX[:2], *IN_HERE):
            serve(crew)
        words = "20 files open at once", "ulimit -n", "raise the limit", "num_workers", "executor='thread'"
        refuse(PORTABLE[1], *words)
        refuse({**LINUX[1], "num_workers": 24}, *words)
        resource.setrlimit(resource.RLIMIT_NOFILE, (10, 10))
        for crew in (*LINUX, *PORTABLE):
            refuse(crew, "10 files open at once")
        for crew in IN_HERE:
            serve(crew)
        """
    ).fine()


def test_descriptors_that_run_out_later_are_told_and_nothing_hangs() -> None:
    """The user's own files take all: a worker that dies then cannot be replaced, a large message not be received."""
    run(
        """
        import resource, time
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        def load(i):
            return "x" * (100_000 if i >= 256 else 3)   # larger than the cell of its row: it comes in a message
        for case in ("worker", "message"):
            for crew in LINUX[:2]:
                with Feed(range(4000), load, batch_size=4, memory="512 MiB", num_workers=1, **crew) as feed:
                    batches = iter(feed)
                    next(batches)
                    files = []
                    try:
                        while True:
                            files.append(os.open("/dev/null", os.O_RDONLY))
                    except OSError:
                        pass
                    if case == "worker":
                        os.kill(feed._engine.crew.pids()[-1], signal.SIGKILL)
                    try:
                        for batch in batches:
                            pass
                    except penstock.PenstockError as error:
                        assert "64 files open at once" in str(error), error
                        assert isinstance(error.__cause__, OSError)
                    else:
                        raise AssertionError("nobody noticed")
                    for fd in files:
                        os.close(fd)
        """
    ).fine()


def test_no_more_processes_is_one_clear_error() -> None:
    """``ulimit -u``, or a container's pids.max, is met by the parent, the template and the threads in turn."""
    run(
        """
        import resource
        words = "refuses another process or thread", "ulimit -u", "pids.max", "num_workers=0"
        for most in (1, 2):
            resource.setrlimit(resource.RLIMIT_NPROC, (most, 2))
            for crew in (*LINUX, *PORTABLE):
                refuse(crew, *words)
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        refuse(IN_HERE[0], *words)
        serve(IN_HERE[1])
        """,
        *as_somebody(),
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    ).fine()


# ---------------------------------------- file systems


def test_a_small_dev_shm_is_no_limit_where_there_is_memfd() -> None:
    """Containers give it 64 MiB, some 1: the arena does not live there. The portable crew's does, and says so."""
    run(
        """
        def batches(crew, memory):
            os.environ["PENSTOCK_PORTABLE"] = crew
            with Feed(range(32), lambda i: np.full(2**18, i), batch_size=4, memory=memory, num_workers=2) as feed:
                return [int(batch[0, 0]) for batch in feed]
        assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 2**20
        assert batches("0", "512 MiB") == list(range(0, 32, 4))
        try:
            batches("1", "512 MiB")
        except penstock.PenstockError as error:
            told = str(error)
            assert "of shared memory: make /dev/shm larger" in told and "--shm-size" in told, told
        else:
            raise AssertionError("more than there is was given")
        serve(PORTABLE[1], count=32)   # small batches fit
        assert os.listdir("/dev/shm") == []
        """,
        *in_own_mounts("mount -t tmpfs -o size=1m tmpfs /dev/shm"),
    ).fine()


def test_a_read_only_system_is_no_hindrance() -> None:
    """Nothing is written anywhere: no temporary file, no socket with a name."""
    run(
        """
        import errno, tempfile
        for folder in ("/", "/tmp", "/dev/shm", os.getcwd()):
            try:
                open(os.path.join(folder, "penstock-can-write"), "w")
            except OSError as error:
                assert error.errno == errno.EROFS, error
            else:
                raise AssertionError(f"{folder} can be written to")
        for crew in (*LINUX, *IN_HERE):
            serve(crew)
        refuse(PORTABLE[1], "shared memory cannot be made", "Read-only", "/dev/shm", "num_workers=0")
        """,
        *in_own_mounts(
            "mount -t tmpfs -o ro tmpfs /dev/shm",
            "for place in /tmp /var/tmp; do mount --bind $place $place; mount -o remount,ro,bind $place; done",
            "mount -o remount,ro,bind /",
        ),
        cwd="/",
        env={name: value for name, value in os.environ.items() if name != "TMPDIR"},
    ).fine()


@pytest.mark.parametrize("surrounding", ["no TMPDIR", "a folder that was deleted"])
def test_without_a_folder_to_work_in_it_works_or_says_so(surrounding: str, tmp_path: Path) -> None:
    """A job's scratch folder is cleaned up under it; the Linux crew needs none."""
    script = """
    import tempfile
    if os.environ["TMPDIR"] == "/nonexistent":
        crews = QUICK
    else:
        folder = tempfile.mkdtemp()
        os.chdir(folder)
        os.rmdir(folder)
        crews = [*LINUX[:2], PORTABLE[0]]
        refuse(PORTABLE[1], "the folder that this process is in was deleted", "os.chdir()")
    for crew in crews:
        serve(crew)
    """
    run(script, env={**os.environ, "TMPDIR": "/nonexistent" if surrounding == "no TMPDIR" else str(tmp_path)}).fine()


# ---------------------------------------- what is hidden


def test_memory_that_may_not_be_looked_at_is_estimated() -> None:
    """Another user's processes, a hardened kernel: smaps of the workers cannot be opened."""
    run(
        """
        import ctypes
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE off, which forked workers inherit
        with Feed(range(400), lambda i: np.full(8, i), batch_size=4, memory="512 MiB", num_workers=2,
                  start_method="fork") as feed:
            batches = iter(feed)
            next(batches)
            try:
                open(f"/proc/{feed._engine.crew.pids()[-1]}/smaps_rollup")
            except PermissionError:
                pass
            else:
                raise AssertionError("it can be read")
            for batch in batches:
                pass
        assert 0 < feed.stats.peak_bytes <= feed.plan.memory, feed.stats
        for crew in QUICK:
            serve(crew)
        """,
        *as_somebody(),
    ).fine()


def test_processes_that_are_hidden_are_served() -> None:
    """/proc mounted with hidepid, and not at all."""
    for mount in ("mount -t proc -o hidepid=2 proc /proc", "mount -t tmpfs tmpfs /proc"):
        run(
            """
            for crew in QUICK:
                serve(crew)
            """,
            *in_own_mounts(mount),
            *(as_somebody() if "hidepid" in mount else ()),
        ).fine()


def test_without_memfd_the_portable_crew_takes_over() -> None:
    """A sandbox's filter refuses the call: that is found by trying, and not by the version of the kernel."""
    run(
        """
        def refused(*_):
            raise PermissionError(1, "Operation not permitted")
        os.memfd_create = refused
        crews = []
        with Feed(range(16), lambda i: np.full(8, i), batch_size=4, memory="512 MiB", num_workers=2) as feed:
            assert [int(batch[0, 0]) for batch in feed] == [0, 4, 8, 12]
            assert type(feed._engine.crew).__name__ == "PortableCrew"
        """
    ).fine()


# ---------------------------------------- standard files


CLOSED: Final = ["0 1 2", *(pytest.param(one, marks=pytest.mark.slow) for one in ("0", "1", "2"))]


@pytest.mark.parametrize("closed", CLOSED)
def test_standard_files_that_are_closed_are_not_ours(closed: str, tmp_path: Path) -> None:
    """What is opened next gets the number 0, 1 or 2. Were that the arena, a print() would be written into it."""
    script = """
    def load(i):
        for fd in (1, 2):
            try:
                os.write(fd, b"what a load prints")
            except OSError:
                pass
        return np.full(8, i)
    for crew in CREWS:
        settings = dict(crew)
        os.environ["PENSTOCK_PORTABLE"] = "1" if settings.pop("portable", False) else "0"
        with Feed(range(32), load, batch_size=4, memory="512 MiB", num_workers=2, **settings) as feed:
            assert [int(batch[0, 0]) for batch in feed] == list(range(0, 32, 4))
            os.write(2, b"what the program prints")
            assert [int(batch[0, 0]) for batch in feed] == list(range(0, 32, 4))
    open("fine", "w").close()
    """
    script = script.replace("CREWS", "(*LINUX, *PORTABLE)" if closed == "0" else "QUICK")
    shut = " ".join(f"{fd}>&-" for fd in closed.split())
    wrapped = ["sh", "-c", f'exec "$@" {shut}', "sh"]
    done = subprocess.run(
        [*wrapped, sys.executable, "-c", program(script).replace("print('fine', flush=True)", "")],
        cwd=tmp_path, check=False, timeout=PATIENCE_S, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0
    assert (tmp_path / "fine").exists()


# ---------------------------------------- signals


REAPERS: Final = {
    "ignored": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    "a handler that reaps everything": """
def reap(*_):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
signal.signal(signal.SIGCHLD, reap)
""",
    "a thread that reaps everything": """
import threading, time
def reap():
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            time.sleep(0.0005)
threading.Thread(target=reap, daemon=True).start()
""",
}


@pytest.mark.parametrize("reaper", REAPERS)
def test_a_parent_that_takes_away_its_childrens_exit_codes_is_served(reaper: str) -> None:
    """Servers do: then nobody but the kernel's pidfd knows that a child has ended, and nobody knows how."""
    run(
        f"{REAPERS[reaper]}\nfor crew in (*QUICK, PORTABLE[0]):\n    serve(crew)\n",
    ).fine()


# ---------------------------------------- inside something else


def test_a_parent_with_two_hundred_threads_is_served() -> None:
    """Each holds a lock most of the time: a fork of them would be stuck for ever."""
    run(
        """
        import threading
        stop, lock = threading.Event(), threading.Lock()
        def busy():
            while not stop.wait(0.02):
                with lock:
                    sum(range(100))
        threads = [threading.Thread(target=busy) for _ in range(200)]
        for thread in threads: thread.start()
        for crew in (*QUICK, *IN_HERE):
            serve(crew)
        stop.set()
        for thread in threads: thread.join()
        """
    ).fine()


def test_a_daemon_is_served() -> None:
    """Twice forked, in a session of its own, in /, with nothing of the shell left open."""
    run(
        """
        reads, writes = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            os.chdir("/")
            os.umask(0)
            os.closerange(0, 3)
            try:
                for crew in (*QUICK, *IN_HERE):
                    serve(crew)
                os.write(writes, b"served")
            except BaseException as error:
                os.write(writes, repr(error).encode())
            os._exit(0)
        os.close(writes)
        os.wait()
        said = os.fdopen(reads).read()
        assert said == "served", said
        """
    ).fine()


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_child_of_multiprocessing_is_served(method: str, tmp_path: Path) -> None:
    """Daemonic ones may have no children of multiprocessing's kind; pools make such."""
    home = tmp_path / "served_within.py"
    within = "def within(crews):\n    for crew in crews:\n        serve(crew)\n    return 'served'\n"
    home.write_text(f"{PREAMBLE}\n{within}")
    run(
        f"""
        import multiprocessing
        from served_within import within
        context = multiprocessing.get_context({method!r})
        for daemon in (False, True):
            process = context.Process(target=within, args=(QUICK[1:],), daemon=daemon)
            process.start()
            process.join()
            assert process.exitcode == 0
        with context.Pool(1) as pool:
            assert pool.apply(within, ([LINUX[0], PORTABLE[0]],)) == "served"
        """,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
    ).fine()


# ---------------------------------------- ways to run Python


@pytest.mark.parametrize(
    "way", ["-I", "-W error", *(pytest.param(way, marks=pytest.mark.slow) for way in ("-", "-i", "-E -s -B -O"))]
)
def test_every_way_to_run_python_is_served(way: str, tmp_path: Path) -> None:
    """Without a file for __main__, isolated from the environment, typed line by line: load travels by value."""
    lines = program(
        """
        class Sample:
            def __init__(self, item):
                self.item = item

        def load(item):
            return np.full(8, Sample(item).item)

        for crew in QUICK:
            settings = dict(crew)
            os.environ["PENSTOCK_PORTABLE"] = "1" if settings.pop("portable", False) else "0"
            with Feed(range(32), load, batch_size=4, memory="512 MiB", num_workers=2, **settings) as feed:
                check([int(batch[0, 0]) for batch in feed] == list(range(0, 32, 4)))
        """
    )
    typed = textwrap.dedent(lines)
    found = f"import sys\nsys.path[:0] = {[path for path in sys.path if path]!r}\n"
    if way == "-i":
        (tmp_path / "typed.py").write_text(typed)
        command, given = ["-i"], f"{found}exec(open('typed.py').read())\nexit()\n"
    elif way == "-":
        command, given = ["-"], found + typed
    else:
        command, given = [*way.split(), "-c", found + typed], ""
    done = subprocess.run(
        [sys.executable, *command], input=given, cwd=tmp_path, capture_output=True, text=True, check=False,
        timeout=PATIENCE_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["fine"]), done
    assert "Traceback" not in done.stderr, done.stderr
    assert "Warning" not in done.stderr, done.stderr
