"""What SECURITY.md promises: nothing for other users to read or write, and nothing of the data's that runs or steers.

Looked at from outside while feeds are at work: descriptors, sockets and names, as the kernel shows them.
"""

from __future__ import annotations

import ast
import contextlib
import os
import pickle
import stat
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import penstock
from penstock import Feed, LoadError, PenstockError, SpecError
from penstock._core import machine
from penstock._core.arena_named import NamedArena
from penstock._core.errors import said, shown
from penstock._core.stats import Stats
from penstock._core.wire import Notice, decode_notice, encode_notice

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
PACKAGE: Final = Path(penstock.__file__).parent
# Clears the screen, rings, goes back to the start of the line, begins a new one, turns the direction of writing.
HOSTILE: Final = "a\x1b[2Jb\x07c\rd\ne\u202ef\x9bg\udc80"


@pytest.fixture(scope="module", autouse=True)
def pythons_own_process() -> None:
    resource_tracker.ensure_running()  # kept by Python once the portable crew has used it


@contextlib.contextmanager
def open_to_all() -> Iterator[None]:
    """With a mask that takes no right away: only what is asked for protects a file."""
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


# ---------------------------------------- other users


def inodes_of_sockets(pids: list[int]) -> set[str]:
    found = set()
    for pid in pids:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed since the listing
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    found.add(target[8:-1])
    return found


@linux
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_nothing_of_a_feed_at_work_has_a_name(method: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No file, no shared memory, no socket that others could find, and none that listens."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PENSTOCK_PORTABLE", "0")
    shared = set(os.listdir("/dev/shm"))
    mine = inodes_of_sockets([os.getpid()])

    def load(item: int) -> Any:
        return np.full(100_000, item)

    with (
        open_to_all(),
        Feed(range(100), load, batch_size=4, memory="512 MiB", num_workers=2, start_method=method) as feed,
    ):
        next(iter(feed))
        assert feed._engine is not None
        sockets = inodes_of_sockets([os.getpid(), *feed._engine.crew.pids()]) - mine
        assert sockets
        seen = 0
        for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
            _, _, _, flags, _, _, inode, *name = line.split()
            if inode in sockets:
                seen += 1
                assert name == []
                assert int(flags, 16) & 0x10000 == 0, "a socket listens"
        assert seen == len(sockets), "one of another family, which could be reached from elsewhere"
        assert {name for name in set(os.listdir("/dev/shm")) - shared if "penstock" in name} == set()
        assert list(tmp_path.iterdir()) == []


@linux
def test_programs_that_the_user_starts_get_none_of_our_descriptors() -> None:
    """A child that outlives a feed would keep its memory; one of another user could read it."""
    with Feed(range(100), lambda i: np.full(8, i), batch_size=4, memory="512 MiB", num_workers=2) as feed:
        next(iter(feed))
        script = (
            "import os; print([os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd') if int(n) > 2])"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], close_fds=False, capture_output=True, check=False, text=True
        )
    assert "memfd:penstock" not in done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="segments have no mode there")
def test_a_segment_with_a_name_belongs_to_its_user_alone() -> None:
    """Where there is no memfd it has one for a few milliseconds, whatever the mask of the program is."""
    with open_to_all():
        arena = NamedArena()
    try:
        segment = arena.log[0]
        assert stat.S_IMODE(os.fstat(segment.fd).st_mode) == 0o600
        assert segment.name.startswith("/penstock-")
        assert len(segment.name) >= len("/penstock-") + 16  # nobody can have made it before us
    finally:
        arena.close()
    if Path("/dev/shm").is_dir():
        assert not Path(f"/dev/shm{segment.name}").exists()


def test_temporary_files_are_made_in_private_folders_only() -> None:
    """``mkdtemp`` gives a folder of mode 0700, ``TemporaryFile`` a nameless file of mode 0600: nothing else is used."""
    used = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tempfile":
                used.add(node.attr)
    # And mkstemp: a file of mode 0600, used for what is kept in a folder that the user named.
    assert used <= {"mkdtemp", "mkstemp", "TemporaryFile", "TemporaryDirectory", "gettempdir"}
    with open_to_all(), tempfile.TemporaryDirectory() as folder:
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700


@linux
def test_where_there_is_memfd_it_is_used() -> None:
    """The named arena is for systems without."""
    assert machine.look().features.memfd
    with Feed(range(100), lambda i: np.full(8, i), batch_size=4, memory="512 MiB", num_workers=1) as feed:
        next(iter(feed))
        assert feed._engine is not None
        arena: Any = feed._engine.crew.arena
        assert os.readlink(f"/proc/self/fd/{arena.fd}").startswith("/memfd:penstock")
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, 0)  # sealed: no mapping of it can ever fault


# ---------------------------------------- what is read as code


# Each with what it reads: the user's own load, items, errors and classes, which come from a process of the same user.
PICKLES_READ: Final = {
    "_core/crew/portable.py": "the program, words of the parent",
    "_core/spec.py": "trees of samples, made of the user's classes",
    "_core/template.py": "the program, orders of the parent, its own errors to see whether they survive the way",
    "_core/wire.py": "items, errors, forms of samples; why there can be no worker",
    "_core/worker.py": "the program, words of the parent",
    "compat/tinyloader.py": "what a Loader of the user's returned, which may be any object, from its worker",
}


def test_pickles_are_read_where_this_list_says_and_nowhere_else() -> None:
    """State and caches are data. A new place where a pickle is read is a decision, not an accident."""
    readers = set()
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        text = path.read_text(encoding="utf-8")
        if name.startswith("_bench/"):
            continue
        if any(word in text for word in ("pickle.load", "pickle.Unpickler", "marshal.", "allow_pickle=True")):
            readers.add(name)
    assert readers == set(PICKLES_READ)


def test_what_the_template_says_is_numbers() -> None:
    """Only why there can be no worker at all is an exception, and so a pickle."""

    class Touch:
        def __reduce__(self) -> Any:
            return os.abort, ()

    for notice in Notice:
        if notice is not Notice.ABSENT:
            data = encode_notice(notice, 1, 2, -9, 2**60, -1) + pickle.dumps(Touch())
            assert decode_notice(data) == (notice, (1, 2, -9, 2**60, -1), None)


# ---------------------------------------- what reaches the terminal


def steers(text: str) -> list[str]:
    return [c for c in text if not c.isprintable() and c not in "\n\t"]


class Hostile:
    def __repr__(self) -> str:
        return HOSTILE


@pytest.mark.parametrize(
    "item", [HOSTILE, Hostile(), [HOSTILE] * 3, {HOSTILE: HOSTILE}, HOSTILE.encode("utf-8", "ignore")]
)
def test_names_of_items_do_not_steer_the_terminal(item: Any) -> None:
    """File names come from archives and buckets that others fill."""

    def load(item: Any) -> Any:
        raise ValueError(f"cannot read {item}")

    with Feed([item], load, num_workers=0, memory="64 MiB") as feed, pytest.raises(LoadError) as caught:
        next(iter(feed))
    assert steers(str(caught.value)) == []
    assert steers("".join(caught.value.__cause__.__notes__ if caught.value.__cause__ else ["?"])) == []
    assert "\n" not in shown(item)
    with Feed([item, 1], load, num_workers=0, memory="64 MiB", on_error="skip") as feed, pytest.raises(PenstockError):
        list(feed)


def test_what_was_skipped_does_not_steer_the_terminal_and_is_not_shown_in_full() -> None:
    """``feed.stats`` is what people type into a notebook."""
    stats = Stats(skipped=[(Hostile(), ValueError(HOSTILE)) for _ in range(10_000)])
    assert steers(repr(stats) + str(stats)) == []
    assert len(repr(stats)) < 1000
    assert "10,000 in all" in repr(stats)
    assert "10000 skipped" in str(stats)


def test_keys_of_samples_do_not_steer_the_terminal() -> None:
    """They come out of JSON files, say."""
    with (
        Feed([0], lambda i: {HOSTILE: object()}, num_workers=0, memory="64 MiB") as feed,
        pytest.raises(SpecError) as caught,
    ):
        next(iter(feed))
    assert steers(str(caught.value)) == []


def test_huge_names_and_messages_are_cut() -> None:
    """And not built first: an item of a gigabyte would cost several to be shown."""
    for huge in (
        "x" * 10**7,
        b"\xff" * 10**7,
        list(range(10**6)),
        {i: i for i in range(10**6)},
        {1} | set(range(10**6)),
    ):
        assert len(shown(huge)) <= 1000
    assert len(said(ValueError("x" * 10**7))) < 3000
    assert "10,000,000 characters" in said(ValueError("x" * 10**7))


def test_all_that_a_failed_item_shows_can_be_written_to_any_stream() -> None:
    """A lone surrogate, from the name of a file that is not UTF-8, would end the program that prints it."""

    def load(item: str) -> Any:
        raise OSError(f"cannot read {item}")

    with Feed(["\udcff.npy"], load, num_workers=0, memory="64 MiB") as feed, pytest.raises(LoadError) as caught:
        next(iter(feed))
    str(caught.value).encode("utf-8")


def test_a_traceback_of_ours_is_whole() -> None:
    """Making messages safe must not cost what is in them."""

    def load(item: int) -> Any:
        raise ValueError("first line\n\tsecond line, indented")

    with Feed([7], load, num_workers=0, memory="64 MiB") as feed, pytest.raises(LoadError) as caught:
        next(iter(feed))
    text = "".join(traceback.format_exception(caught.value))
    assert "first line\n\tsecond line, indented" in str(caught.value)
    assert "where it was raised" in text
