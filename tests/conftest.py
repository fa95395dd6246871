"""What holds for every test: nothing is left behind, nothing hangs, hypothesis is repeatable in CI.

``nothing_left`` compares the process before and after each test: children (orphans too), Python threads, file
descriptors, shared mappings, names in /dev/shm, and ``penstock*`` in the temporary folder. The baseline is taken before
each test, so what a framework starts once and keeps is charged to one test at most; such a test says so with
``@pytest.mark.leaves("child", "fd", reason="...")``.

A test that failed is not checked: its traceback keeps its frames, and with them its feed, alive.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import settings

# Workers end and descriptors close a moment after the last reference dies; this bounds the moment.
GRACE_S: Final = 2.0

_PROC: Final = Path("/proc/self/fd").is_dir()
_SHM: Final = Path("/dev/shm")
_FAILED: Final = pytest.StashKey[bool]()
_TEMP: Final = pytest.StashKey[str]()

settings.register_profile("penstock", deadline=None)
settings.register_profile("penstock-ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("penstock-ci" if os.environ.get("CI") else "penstock")


# ---------------------------------------- a temporary folder of our own


def pytest_configure(config: pytest.Config) -> None:
    # Other runs on this machine make penstock* folders too; in a folder of our own, everything new is ours.
    # pytest's own tmp_path stays where it was, to be looked at after a failure.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    config.stash[_TEMP] = tempfile.mkdtemp(prefix="penstock-tests-")
    os.environ["TMPDIR"] = tempfile.tempdir = config.stash[_TEMP]
    if hasattr(config, "workerinput"):  # one of several at a time: orphans are known by their process group
        os.setpgid(0, 0)


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[_TEMP], ignore_errors=True)  # a read-only leftover is no reason to fail a green run


# A fresh interpreter for each worker takes its time, and to the parent its deaths are like any other's. These are for
# `make test-all`; order, samples, spares, budget and endings are seen with "spawn" in every run.
SPAWNS_SELDOM: Final = {"test_deaths.py", "test_lifecycle.py", "test_items.py"}
# Here a case starts processes or a framework, and many tests are crossed with all crews. Each value of each parameter
# is seen in every run, all of their combinations by `make test-all`.
CROSSED: Final = {"chaos", "frameworks", "live", "memory"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tables: dict[str, list[pytest.Item]] = {}
    for item in items:
        given = getattr(item, "callspec", None)
        if given is None:
            continue
        if item.path.name in SPAWNS_SELDOM and "spawn" in str(given.params):
            item.add_marker(pytest.mark.slow)
        elif item.path.parent.name in CROSSED and item.get_closest_marker("slow") is None:
            tables.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tables.values():
        for item in _repeating(cases):
            item.add_marker(pytest.mark.slow)


def _repeating(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Those cases of a test whose values all stand in others, too: as few others as do. A table is one parameter."""
    left = {number: _values(item) for number, item in enumerate(cases)}
    missing = frozenset[Values]().union(*left.values())
    while missing:
        best = max(left, key=lambda number: (len(left[number] & missing), -number))
        missing -= left.pop(best)
    return [cases[number] for number in left]


Values = tuple[tuple[str, int], ...]


def _values(item: pytest.Item) -> frozenset[Values]:
    """Which value each parameter has in a case; those that were given together have one together."""
    known = {name: id(value) for name, value in item.callspec.params.items()}  # type: ignore[attr-defined]
    found: set[Values] = set()
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if isinstance(mark.args[0], list | tuple) else mark.args[0].split(",")
        found.add(tuple((name.strip(), known.pop(name.strip())) for name in names))
    return frozenset([*found, *(((name, value),) for name, value in known.items())])


# ---------------------------------------- what there is, by kind

Things = dict[str, str]  # an identity that two snapshots agree on -> what to tell a person


def _processes() -> dict[int, tuple[int, int, str, str]]:
    """Every process of the machine: pid -> (parent, process group, start time, state)."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                stat = Path(f"/proc/{name}/stat").read_text()
            except OSError:
                continue  # ended since the listing
            # The command stands in parentheses and may hold any character; what follows the last one is regular.
            fields = stat[stat.rindex(")") + 2 :].split()
            found[int(name)] = (int(fields[1]), int(fields[2]), fields[19], fields[0])
    return found


def _family() -> dict[int, str]:
    """Descendants of this process, and orphans of them: pid -> start time.

    An orphan keeps our process group but is adopted by someone outside it, unlike what else a shell started beside us.
    """
    everyone = _processes()
    me, group = os.getpid(), os.getpgrp()

    def descends(pid: int) -> bool:
        for _ in everyone:  # bounded: the links were read one after another, and might form a ring
            pid = everyone[pid][0]
            if pid == me or pid not in everyone:
                break
        return pid == me

    def orphaned(pid: int) -> bool:
        parent, its_group, _, state = everyone[pid]
        # A dead orphan is no longer ours to wait for.
        return its_group == group and state != "Z" and (parent not in everyone or everyone[parent][1] != group)

    return {pid: start for pid, (_, _, start, _) in everyone.items() if pid != me and (descends(pid) or orphaned(pid))}


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "ended while it was looked at"
    return words[:200] or f"no command line, state {state}" + (" (dead, never waited for)" if state == "Z" else "")


def _children() -> Things:
    return {f"{pid} {start}": f"process {pid}: {_command(pid)}" for pid, start in _family().items()}


def _threads() -> Things:
    return {
        f"{id(thread)} {thread.name}": f"thread {thread.name!r} ({type(thread).__name__}, daemon={thread.daemon})"
        for thread in threading.enumerate()
        # A dummy stands for a native thread, of a framework's pool say, that once called into Python.
        if not isinstance(thread, threading._DummyThread)
    }


def _descriptors() -> Things:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the listing's own descriptor
        if "memfd:libffi" not in target:  # made once by ctypes, on systems where memory may not be executable
            found[f"{name} {target}"] = f"descriptor {name} -> {target}"
    return found


def _mappings() -> Things:
    """Shared memory that is mapped; it can outlive its descriptor."""
    found = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        path = fields[5] if len(fields) == 6 else ""
        if path.startswith(("/memfd:", "/dev/shm/", "/dev/zero")) and "memfd:libffi" not in path:
            found[f"{path} {fields[4]}"] = f"mapping {fields[0]} of {path}"
    return found


def _shared_memory() -> Things:
    return {path.name: f"{path}" for path in _SHM.iterdir()} if _SHM.is_dir() else {}


def _temporary() -> Things:
    return {path.name: f"{path}" for path in Path(tempfile.gettempdir()).glob("penstock*")}


NAMES: Final = {"child", "fd", "mapping", "thread", "shm", "temp"}
KINDS: Final[dict[str, Callable[[], Things]]] = {
    **({"child": _children, "fd": _descriptors, "mapping": _mappings} if _PROC else {}),
    "thread": _threads,
    "shm": _shared_memory,
    "temp": _temporary,
}


def _held_elsewhere(name: str) -> bool:
    """Whether a process that is not ours has this file of /dev/shm mapped: then it is not ours either."""
    ours = {os.getpid(), *_family()}
    for pid in _processes():
        if pid not in ours:
            try:
                if f"/dev/shm/{name}" in Path(f"/proc/{pid}/maps").read_text():
                    return True
            except OSError:
                continue
    return False


def _left(before: dict[str, Things]) -> list[str]:
    left = []
    for kind, was in before.items():
        now = KINDS[kind]()
        left += [
            f"{kind}: {now[key]}"
            for key in now.keys() - was.keys()
            if not (kind == "shm" and _PROC and _held_elsewhere(key))
        ]
    return sorted(left)


# ---------------------------------------- the check


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if not report.passed:
        item.stash[_FAILED] = True
    return report


@pytest.fixture(autouse=True, scope="module")
def quick_collections() -> None:
    """What is there before a file's tests is there for good: the collector, which tests call often, may pass it over.

    With all frameworks imported a collection takes a third of a second, and most tests would pay for it.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    allowed: set[str] = set()
    for mark in request.node.iter_markers("leaves"):
        if not mark.args or not set(mark.args) <= NAMES or not mark.kwargs.get("reason"):
            pytest.fail(f"leaves() needs kinds out of {sorted(NAMES)} and a reason=, not {mark.args} {mark.kwargs}")
        allowed.update(mark.args)
    before = {kind: take() for kind, take in KINDS.items() if kind not in allowed}
    yield
    if request.node.stash.get(_FAILED, False):
        return
    # Collecting takes long once frameworks are imported, and shows nothing that a clean result does not.
    left = _left(before)
    if left:
        gc.collect()
        until = time.monotonic() + GRACE_S
        while (left := _left(before)) and time.monotonic() < until:
            time.sleep(0.02)
    if left:
        gc.collect()  # a callback of the first one may have made new garbage
        left = _left(before)
    if left:
        pytest.fail("left behind after the test:\n  " + "\n  ".join(left), pytrace=False)
