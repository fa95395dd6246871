"""``machine`` against this kernel: real processes, a real memory control group, real resource limits."""

from __future__ import annotations

import mmap
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock._core import machine
from penstock._core.budget import GiB, MiB

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

JOIN = "import sys, os; open(sys.argv[1] + '/cgroup.procs', 'w').write('0')\n"
LOOK = "from penstock._core import machine\nprint(machine.available_bytes(), machine.look().bound_by)\n"
# Writes the file itself: page cache is charged to whoever touches it first.
READ_TWICE_THEN_FILL = """
from penstock._core import machine
path = sys.argv[2]
with open(path, "wb") as file:
    for _ in range(150):
        file.write(bytes(1 << 20))
    file.flush()
    os.fsync(file.fileno())
for _ in range(2):
    with open(path, "rb") as file:
        while file.read(1 << 20):
            pass
limit = machine.look().limits[0]
room = limit.headroom_bytes - (16 << 20)
block = bytearray(room)
for at in range(0, room, 4096):
    block[at] = 1
print(limit.reclaimable_bytes, room)
"""
DIE_OF_OOM = """
from penstock._core import machine
before = machine.oom_kills()
child = os.fork()
if not child:
    open("/proc/self/oom_score_adj", "w").write("1000")
    bytearray(b"1" * (300 << 20))
    os._exit(0)
_, status = os.waitpid(child, 0)
print(os.WTERMSIG(status), machine.oom_kills() - before)
"""


def run(script: str, *args: str, **options: object) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", script, *args], capture_output=True, text=True, timeout=60, check=False, **options
    )  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    return str(done.stdout).strip().split(" ", 1)


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory control group of 200 MiB; the processes that a test puts there must be gone when it ends."""
    for top, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        path = Path(top) / f"penstock-test-{os.getpid()}"
        try:
            path.mkdir()
        except OSError:
            continue
        try:
            if (path / limit).exists():  # the folder may be no control group, or one without memory
                (path / limit).write_text(str(MiB(200)))
                yield path
                return
        finally:
            _remove(path)
    pytest.skip("no memory control group can be made here (not root, or read-only)")


def _remove(path: Path) -> None:
    deadline_s = time.monotonic() + 5
    while True:
        try:
            path.rmdir()
            return
        except OSError:  # busy until the last process has left altogether
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)


def test_inside_a_limited_group_no_more_than_the_limit_is_available(group: Path) -> None:
    size, bound_by = run(JOIN + LOOK, str(group))
    assert MiB(100) < int(size) < MiB(200)
    assert bound_by.startswith(str(group))
    assert machine.available_bytes() > MiB(200), "this process was not in the group"


def test_the_limit_of_a_group_holds_in_the_groups_below_it(group: Path) -> None:
    inner = group / "inner"
    inner.mkdir()
    if not (inner / "memory.stat").exists():
        inner.rmdir()
        pytest.skip("groups below this one cannot have memory counted")
    try:
        size, bound_by = run(JOIN + LOOK, str(inner))
    finally:
        _remove(inner)
    assert MiB(100) < int(size) < MiB(200)
    assert bound_by.startswith(f"{group}/memory.")


def test_what_is_called_available_can_be_had_when_the_page_cache_is_full(group: Path, tmp_path: Path) -> None:
    cached, room = run(JOIN + READ_TWICE_THEN_FILL, str(group), str(tmp_path / "data"))
    if int(cached) < MiB(100):
        pytest.skip("the temporary folder is not backed by a disk: its pages are not cache")
    assert int(room) > MiB(120)


def test_deaths_by_the_oom_killer_are_counted(group: Path) -> None:
    assert run(JOIN + DIE_OF_OOM, str(group)) == ["9", "1"]


@pytest.mark.parametrize(("name", "title"), [("RLIMIT_AS", "RLIMIT_AS"), ("RLIMIT_DATA", "RLIMIT_DATA")])
def test_a_resource_limit_bounds_what_is_available(name: str, title: str) -> None:
    script = f"import resource; resource.setrlimit(resource.{name}, ({GiB(3)}, {GiB(3)}))\n" + LOOK
    size, bound_by = run(script, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})
    assert GiB(1) < int(size) < GiB(3)
    assert bound_by == title


def test_this_machine_is_seen_as_the_interpreter_sees_it() -> None:
    seen = machine.look()
    assert 0 < seen.available_bytes <= seen.memory_bytes
    assert seen.memory_bytes == pytest.approx(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), rel=0.01)
    assert 1 <= seen.cores <= len(os.sched_getaffinity(0)) <= seen.cores_present
    soft, hard = (None if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_NOFILE))
    assert seen.nofile == machine.Rlimit(soft, hard)
    assert {"fork", "spawn"} <= set(seen.start_methods)


@pytest.fixture
def sleeper() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Start a process that runs a script and then waits until the test is over."""
    running: list[subprocess.Popen[str]] = []

    def start(script: str, *keep: int) -> subprocess.Popen[str]:
        wait = "\nimport sys; print('ready', flush=True); sys.stdin.read()"
        process = subprocess.Popen(
            [sys.executable, "-c", script + wait],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=keep,
        )
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in running:
        process.communicate()


def test_private_memory_is_counted_in_full(sleeper: Callable[..., subprocess.Popen[str]]) -> None:
    pid = sleeper("block = bytearray(b'1' * (64 << 20))").pid
    for measure in (machine.pss_bytes, machine.private_bytes, machine.anon_bytes, machine.peak_rss_bytes):
        assert measure(pid) > MiB(64), measure.__name__
    # The literal and its copy were both there for a moment.
    assert machine.pss_bytes(pid) < MiB(160)


def test_memory_shared_by_two_processes_is_counted_half_for_each(
    sleeper: Callable[..., subprocess.Popen[str]],
) -> None:
    fd = os.memfd_create("shared")
    os.ftruncate(fd, MiB(64))
    with mmap.mmap(fd, MiB(64)) as block:
        block.write(b"1" * MiB(64))
    script = f"import mmap; block = mmap.mmap({fd}, {MiB(64)}); sum(block[::4096])"
    first = sleeper(script, fd).pid
    alone = machine.pss_bytes(first)
    sleeper(script, fd)
    os.close(fd)
    assert alone > MiB(64)
    assert alone - machine.pss_bytes(first) == pytest.approx(MiB(32), abs=MiB(4))
    assert machine.private_bytes(first) < MiB(32)


def test_the_peak_can_be_begun_again(sleeper: Callable[..., subprocess.Popen[str]]) -> None:
    pid = sleeper("import mmap\nblock = mmap.mmap(-1, 64 << 20)\nblock.write(b'1' * (64 << 20))\nblock.close()").pid
    assert machine.peak_rss_bytes(pid) > MiB(64)
    assert machine.reset_peak(pid)
    assert machine.peak_rss_bytes(pid) < MiB(64)


def test_descendants_are_found_at_any_depth(sleeper: Callable[..., subprocess.Popen[str]]) -> None:
    script = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read()'])"
    pid = sleeper(script).pid
    mine = machine.tree(os.getpid())
    assert pid in mine
    (grandchild,) = machine.tree(pid)
    assert grandchild in mine
    assert set(machine._descendants_by_scan("/", pid)) == {grandchild}


def test_a_process_that_is_gone_has_no_memory_and_no_children() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pid = process.pid
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        zombie = [machine.pss_bytes(pid), machine.private_bytes(pid), machine.anon_bytes(pid), len(machine.tree(pid))]
    assert zombie == [0, 0, 0, 0]
    assert [machine.pss_bytes(pid), machine.private_bytes(pid), machine.anon_bytes(pid)] == [0, 0, 0]
    assert machine.peak_rss_bytes(pid) == 0
    assert machine.tree(pid) == []
    assert not machine.reset_peak(pid)
