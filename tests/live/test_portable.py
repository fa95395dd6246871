"""The crew for systems without memfd, pidfd and seqpacket sockets, forced on here; see docs/platforms.md.

macOS and Windows cannot be run here. The last tests take away what those systems lack, in the parent and in every
worker, and see what is left of it working.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, Final

import numpy as np
import optree
import pytest

import penstock
from penstock import Feed, LoadError, PenstockError, WorkerLost
from penstock._core import machine
from penstock._core.crew.portable import PortableCrew
from penstock._core.crew.processes import ProcessCrew

METHODS: Final = [
    method for method in ("spawn", "forkserver", "fork") if method in multiprocessing.get_all_start_methods()
]
DEADLINE_S: Final = 30.0


@pytest.fixture(scope="module", autouse=True)
def pythons_own_processes(tmp_path_factory: pytest.TempPathFactory) -> None:
    # Python starts these once and keeps them until the end of the process. Here, so that no test is charged for them,
    # and with their files in a folder that is still there at the end.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("multiprocessing")))
        resource_tracker.ensure_running()
        forkserver.ensure_running()


@pytest.fixture(autouse=True)
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_PORTABLE", "1")


def feed_of(items: Any, load: Any = None, **options: Any) -> Feed:
    return Feed(items, load, **{"memory": "512 MiB", "batch_size": 4, "num_workers": 2, **options})


def crew_of(feed: Feed) -> Any:
    assert feed._engine is not None
    return feed._engine.crew


def copies(feed: Any) -> list[Any]:
    """The leaves of every batch, copied so that no slot is held."""
    leaves = [leaf for batch in feed for leaf in [optree.tree_structure(batch, namespace="penstock"), *flat(batch)]]
    return [leaf.copy() if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]


def flat(batch: Any) -> list[Any]:
    return [
        leaf.copy() if isinstance(leaf, np.ndarray) else leaf
        for leaf in optree.tree_leaves(batch, namespace="penstock")
    ]


def equal(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        np.array_equal(a, b) and a.dtype == b.dtype if isinstance(a, np.ndarray) else a == b
        for a, b in zip(one, other, strict=True)
    )


def eventually(claim: Callable[[], bool]) -> bool:
    until = time.monotonic() + DEADLINE_S
    while not claim():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def named(segments: Iterable[str]) -> list[str]:
    """Which of these segments can be found by their name."""
    return [name for name in segments if Path(f"/dev/shm{name}").exists()]


# ---------------------------------------- the same as everywhere


def tree(item: int) -> dict[str, Any]:
    return {"x": np.full((3, 5), item, np.float32), "text": "t" * (item % 40), "draw": penstock.rng().random()}


def growing(item: int) -> Any:
    return np.full(1 + 2000 * (item % 60), item, np.float64)


def several(item: int) -> Iterator[Any]:
    for number in range(item * 37 % 23):
        yield np.array([item, number, penstock.rng().integers(1000)])


SLOW: Final = pytest.mark.slow
MODES: Final[dict[str, dict[str, Any]]] = {
    "rows": {"load": tree, "shuffle": True, "cast": {"x": "float16"}},
    "whole": {"load": growing, "collate_fn": "pad"},
    "whole-list": {"load": tree, "collate_fn": "list", "drop_last": True},
    "flow": {"load": several, "samples_per_item": None},
}


@pytest.mark.parametrize("mode", [mode if mode == "flow" else pytest.param(mode, marks=SLOW) for mode in MODES])
def test_order_and_content_are_those_of_the_linux_crew(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with feed_of(range(150), **MODES[mode]) as feed:
        got = [copies(epoch) for epoch in feed.epochs(2)]
        assert isinstance(crew_of(feed), PortableCrew)
    monkeypatch.delenv("PENSTOCK_PORTABLE")
    with feed_of(range(150), **MODES[mode]) as feed:
        expected = [copies(epoch) for epoch in feed.epochs(2)]
        assert isinstance(crew_of(feed), ProcessCrew)
    assert all(map(equal, got, expected))


@pytest.mark.parametrize("method", METHODS)
def test_every_start_method_gives_the_same(method: str) -> None:
    with feed_of(range(50), tree, start_method=method) as feed, feed_of(range(50), tree, num_workers=0) as plain:
        assert equal(copies(feed), copies(plain))


def test_items_too_large_for_a_pipe_travel() -> None:
    items = [os.urandom(300_000) for _ in range(12)]
    with feed_of(items, lambda item: (len(item), np.frombuffer(item[-8:], np.uint8))) as feed:
        assert [row.tobytes() for _, tails in feed for row in tails] == [item[-8:] for item in items]


def test_replies_too_large_for_a_pipe_travel() -> None:
    # Texts that are longer than the first ones do not fit into the slot: they come with the reply.
    with feed_of(range(24), lambda item: "x" * (200_000 * (item > 4) + item)) as feed:
        assert [len(text) for texts in feed for text in texts] == [200_000 * (item > 4) + item for item in range(24)]


def test_each_worker_knows_which_one_it_is() -> None:
    def load(item: int) -> tuple[int, int]:
        time.sleep(0.01)
        return penstock.worker().id, penstock.worker().count

    seen: set[tuple[int, int]] = set()
    with feed_of(range(3000), load) as feed:
        for ids, counts in feed:  # the second worker is not there from the start
            seen.update(zip(ids.tolist(), counts.tolist(), strict=True))
            if len(seen) == 2:
                break
    assert seen == {(0, 2), (1, 2)}


def test_workers_go_on_while_the_consumer_is_busy(tmp_path: Path) -> None:
    def load(item: int) -> int:
        time.sleep(0.002)  # long enough for each item to be a task of its own
        (tmp_path / str(item)).touch()
        return item

    with feed_of(range(1000), load, batch_size=32) as feed:
        epoch = iter(feed)
        next(epoch)
        # A whole batch beyond what the workers had been given when they were last asked.
        assert eventually(lambda: len(list(tmp_path.iterdir())) >= 64)


# ---------------------------------------- ends


@pytest.mark.slow
def test_early_stops_leave_nothing_and_the_next_epoch_is_right() -> None:
    for _ in range(3):
        with feed_of(iter(int, 1), lambda item: np.full(1000, item)) as feed:
            for _, _ in zip(range(3), feed, strict=False):
                pass
    with feed_of(range(40), tree) as feed:
        for _ in feed:
            break
        feed.set_epoch(0)
        with feed_of(range(40), tree, num_workers=0) as plain:
            assert equal(copies(feed), copies(plain))


def test_batches_outlive_the_feed() -> None:
    with feed_of(range(12), lambda item: np.full((64, 64), item, np.int32)) as feed:
        held = [batch[1:3, 5:] for batch, _ in zip(feed, range(2), strict=False)]
    assert [crop[:, 0, 0].tolist() for crop in held] == [[1, 2], [5, 6]]
    assert all((crop == crop[:, :1, :1]).all() for crop in held)


def test_a_slot_comes_back_when_its_batch_is_dropped() -> None:
    with feed_of(range(400), tree) as feed:
        for _ in feed:
            pass
        assert feed.stats.copied == 0


def test_names_are_gone_while_the_feed_lives() -> None:
    with feed_of(range(400), growing, collate_fn="pad", batch_size=2) as feed:
        for _, _ in zip(range(60), feed, strict=False):
            pass
        segments = {segment.name for segment in crew_of(feed).arena.log}
        assert len(segments) > 2
        assert eventually(lambda: named(segments) == [])
        assert crew_of(feed).arena.resident_bytes() > 0


def test_close_ends_a_load_that_hangs() -> None:
    # Slow enough that a slot is not shared by many batches, of which none comes before all are there.
    with feed_of(range(100), lambda item: time.sleep(1000 if item > 20 else 0.005) or item, batch_size=2) as feed:  # type: ignore[func-returns-value]
        next(iter(feed))


def test_closing_wakes_a_thread_that_waits_for_a_batch() -> None:
    feed = feed_of(range(100), lambda item: time.sleep(1000 if item > 7 else 0.005) or item)  # type: ignore[func-returns-value]
    ended = []

    def consume() -> None:
        try:
            for _ in feed:
                pass
        except PenstockError as error:
            ended.append(error)

    thread = threading.Thread(target=consume)
    thread.start()
    assert eventually(lambda: feed.stats.batches == 2)
    feed.close()
    thread.join(DEADLINE_S)
    assert len(ended) == 1


# ---------------------------------------- deaths


def once(path: Path) -> bool:
    """Whether this is the first time, in whatever process."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@pytest.mark.parametrize("mode", [mode if mode == "rows" else pytest.param(mode, marks=SLOW) for mode in MODES])
def test_a_killed_worker_loses_nothing(mode: str, tmp_path: Path) -> None:
    options = dict(MODES[mode])
    load = options.pop("load")

    def deadly(item: int) -> Any:
        if item in (20, 41) and once(tmp_path / str(item)):
            os.kill(os.getpid(), signal.SIGKILL)
        return load(item)

    with feed_of(range(60), deadly, **options) as feed, feed_of(range(60), load, num_workers=0, **options) as plain:
        assert equal(copies(feed), copies(plain))
        assert feed.stats.restarts == 2


@pytest.mark.parametrize("crew", ["portable", "linux"])
def test_workers_killed_while_they_wait_for_room_lose_nothing(crew: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # What a dead worker held comes back behind later tasks, which wait for room that only it can give: nobody may be
    # left waiting for the other.
    monkeypatch.setenv("PENSTOCK_PORTABLE", str(int(crew == "portable")))
    options: dict[str, Any] = {"samples_per_item": None, "batch_size": 3, "start_method": METHODS[-1]}
    with (
        feed_of(range(300), several, **options) as feed,
        feed_of(range(300), several, num_workers=0, **options) as plain,
    ):
        got = []
        for number, batch in enumerate(feed):
            got += [optree.tree_structure(batch, namespace="penstock"), *flat(batch)]
            if number % 150 == 20:
                time.sleep(0.05)  # by now the workers wait for room
                os.kill(crew_of(feed).pids()[-1 - number % 2], signal.SIGKILL)
        assert equal(got, copies(plain))
        assert feed.stats.restarts >= 3


def exits(item: int) -> int:
    if item == 13:
        os._exit(7)
    return item


def test_an_item_that_kills_twice_is_told() -> None:
    with feed_of(range(40), exits) as feed, pytest.raises(WorkerLost, match=r"loading 13, with exit code 7") as caught:
        list(feed)
    assert (caught.value.item, caught.value.exitcode) == (13, 7)


@pytest.mark.slow
def test_an_item_that_kills_twice_can_be_skipped() -> None:
    with feed_of(range(40), exits, on_error="skip") as feed:
        assert [int(i) for batch in feed for i in batch] == [i for i in range(40) if i != 13]
        assert [item for item, _ in feed.stats.skipped] == [13]


@pytest.mark.slow
def test_an_item_that_kills_the_probe_is_told() -> None:
    with feed_of([13, 14], exits) as feed, pytest.raises(WorkerLost, match="loading 13"):
        list(feed)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_death_is_seen_though_a_child_of_the_worker_keeps_its_pipe_open(tmp_path: Path) -> None:
    def load(item: int) -> int:
        if item == 9 and once(tmp_path / "once"):
            pid = os.fork()
            if pid == 0:
                time.sleep(1000)
            (tmp_path / "child").write_text(str(pid))
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    try:
        with feed_of(range(20), load) as feed:
            assert [int(i) for batch in feed for i in batch] == list(range(20))
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


# ---------------------------------------- what goes wrong


def test_what_load_raises_comes_with_its_item_and_cause() -> None:
    def load(item: int) -> float:
        return 1 / (item - 9)

    with feed_of(range(20), load) as feed, pytest.raises(LoadError, match="9") as caught:
        list(feed)
    assert caught.value.item == 9
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_items_that_cannot_be_pickled_are_told() -> None:
    items = [1, 2, 3, 4, 5, 6, threading.Lock(), 8]
    with feed_of(items, lambda item: 1, batch_size=2) as feed, pytest.raises((LoadError, TypeError), match="pickle"):
        list(feed)


def test_a_load_that_cannot_live_in_a_worker_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("def load(item): return item\n")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        import only_here  # type: ignore[import-not-found]
    try:
        with feed_of(range(4), only_here.load) as feed, pytest.raises(PenstockError, match="only_here"):
            list(feed)
    finally:
        del sys.modules["only_here"]


def test_shared_memory_that_is_full_is_an_error_not_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    with feed_of(range(4), tree) as feed:
        monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
        with pytest.raises(PenstockError, match="of shared memory: make /dev/shm larger"):
            list(feed)


def test_a_start_method_that_does_not_exist_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    with (
        feed_of(range(4), tree, start_method="fork") as feed,
        pytest.raises(PenstockError, match="'fork' does not exist"),
    ):
        list(feed)


def test_it_is_chosen_by_itself_where_something_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_PORTABLE")
    monkeypatch.setattr(machine, "_has_pidfd", lambda: False)
    with feed_of(range(4), tree) as feed:
        list(feed)
        assert isinstance(crew_of(feed), PortableCrew)


# ---------------------------------------- whole programs


def run(script: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder, capture_output=True, text=True, check=False, timeout=100, env={**os.environ, **environment},
    )  # fmt: skip


def test_the_main_script_is_not_imported_again_and_an_open_feed_is_no_trouble_at_exit(tmp_path: Path) -> None:
    script = """
import penstock
print("imported", flush=True)
class Item:
    def __init__(self, number): self.number = number
factor = 3
feed = penstock.Feed([Item(i) for i in range(8)], lambda item: item.number * factor, batch_size=4, num_workers=2)
for batch in feed:
    print(batch.tolist())
    break
"""
    done = run(script, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "imported\n[0, 3, 6, 9]\n", "")


def test_a_killed_parent_leaves_neither_workers_nor_memory(tmp_path: Path) -> None:
    script = """
import os, signal, penstock
feed = penstock.Feed(range(10**6), lambda item: item, batch_size=4, num_workers=2)
iterator = iter(feed)
for _ in range(20): next(iterator)
print(*feed._engine.crew.pids())
print(*(segment.name for segment in feed._engine.crew.arena.log), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = run(script, tmp_path)
    assert done.returncode == -signal.SIGKILL
    pids, segments = map(str.split, done.stdout.splitlines())
    assert len(pids) == len(segments) == 2
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert named(segments) == []


@pytest.mark.slow
def test_ctrl_c_ends_it_with_one_traceback(tmp_path: Path) -> None:
    script = """
import os, signal, threading, time, penstock
def load(item):
    time.sleep(0.01 if item < 8 else 1000)
    return item
with penstock.Feed(range(100), load, batch_size=4, num_workers=2) as feed:
    for number, _ in enumerate(feed):
        if number == 1:
            threading.Timer(0.2, os.killpg, (0, signal.SIGINT)).start()
"""
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    with subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT)
    assert errors.count("Traceback") == 1
    assert errors.rstrip().endswith("KeyboardInterrupt")


# Runs at the start of the interpreter, and so in every worker too.
ELSEWHERE: Final = """
import os, select, signal, socket, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in {missing}:
            raise ImportError(f"no module named {{name}} on this system")

sys.meta_path.insert(0, Missing())
for module, names in {{
    os: ("memfd_create", "pidfd_open", "posix_fallocate", "sched_getaffinity", *{missing_os}),
    socket: ("SOCK_SEQPACKET", "MSG_CMSG_CLOEXEC", "MSG_DONTWAIT"),
    select: ("poll", "epoll"),
    signal: ("pthread_sigmask",),
}}.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
if hasattr(os, "process_cpu_count"):  # Python 3.13: made of sched_getaffinity where there is one
    os.process_cpu_count = os.cpu_count
if {no_unix}:  # a pipe of multiprocessing is of another kind there
    pair, family = socket.socketpair, socket.AF_UNIX
    socket.socketpair = lambda *arguments: pair(*(arguments or (family,)))
    del socket.AF_UNIX
"""
SYSTEMS: Final = {
    "macos": ELSEWHERE.format(missing=(), missing_os=(), no_unix=False),
    "windows": ELSEWHERE.format(
        missing=("fcntl", "resource", "pwd", "grp", "termios"),
        missing_os=("preadv", "fork", "statvfs", "getpgid"),
        no_unix=True,
    ),
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_it_works_without_what_other_systems_lack(system: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SYSTEMS[system], encoding="utf-8")
    script = """
import sys
import numpy as np
import penstock
for name in ("fcntl", "resource"):
    assert name not in sys.modules, name
memory = np.memmap("rows.bin", np.int32, "w+", shape=(10, 2))
memory[:] = np.arange(20).reshape(10, 2)
memory.flush()
for options in ({"num_workers": 2}, {"num_workers": 2, "executor": "thread"}, {"num_workers": 0}):
    with penstock.Feed(range(10), lambda i: np.full(3, i), batch_size=4, memory="512 MiB", **options) as feed:
        kind = type(feed.plan and feed._engine.crew).__name__
        print(kind, [batch[:, 0].tolist() for batch in feed])
    with penstock.Feed(penstock.arrays(memory), lambda row: row + 1, batch_size=5, memory="512 MiB", **options) as feed:
        print([batch[:, 0].tolist() for batch in feed])
"""
    done = run(script, tmp_path, PYTHONPATH=str(tmp_path), PENSTOCK_PORTABLE="0")
    assert (done.returncode, done.stderr) == (0, "")
    rows = "[[1, 3, 5, 7, 9], [11, 13, 15, 17, 19]]"
    assert done.stdout.splitlines() == [
        line
        for crew in ("PortableCrew", "ThreadCrew", "InlineCrew")
        for line in (f"{crew} [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]", rows)
    ]
