"""Large pages: nothing that is in memory changes, and no more of it is taken than was asked for."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import Feed
from penstock._core import arena as arenas
from penstock._core.arena import CONTROL_BYTES, AnyArena, Arena, large_page_bytes
from penstock._core.arena_named import NamedArena
from penstock._core.layout import PAGE

LARGE = large_page_bytes()

pytestmark = pytest.mark.skipif(
    LARGE == PAGE or not sys.platform.startswith("linux"), reason="this system has no large pages"
)


def _makes_them() -> bool:
    arena = Arena(shared=True)
    arena.enlarge_pages(arena.extend(LARGE), LARGE)
    made = arena.resident_bytes() >= LARGE
    arena.close()
    return made


makes_them = pytest.mark.skipif(
    LARGE == PAGE or not _makes_them(), reason="this system makes no large pages of shared memory"
)
each_kind = pytest.mark.parametrize("shared", [False, True])


def _address(arena: Arena, offset: int) -> int:
    mapping, start = arena.window(offset, 1)
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping, start))


def _enlarge(arena: Arena, offset: int, size: int, resident: int) -> None:
    """Until so much is there: a system that is short of memory in one piece refuses now and then."""
    for _ in range(10):
        arena.enlarge_pages(offset, size)
        if arena.resident_bytes() >= resident:
            return
        arena._large.clear()
        arena.page_bytes = LARGE
        time.sleep(0.05)
    pytest.skip("the system has no large pages to give at the moment")


def _words(arena: Arena, offset: int, size: int) -> Any:
    mapping, start = arena.window(offset, size)
    return np.frombuffer(mapping, np.int64, size // 8, start)


@each_kind
def test_addresses_and_offsets_are_large_pages_apart(shared: bool) -> None:
    """Or no large page could be mapped there; in other processes, too, which map the file themselves."""
    arena = Arena(shared=shared)
    for size in (5, PAGE, LARGE, LARGE + 3 * PAGE, 3 * LARGE - PAGE):
        offset = arena.extend(size)
        assert (_address(arena, offset) - offset) % (LARGE if size >= LARGE else PAGE) == 0
    if shared:
        other = Arena(shared=True, fd=arena.fd)
        assert (_address(other, offset) - offset) % LARGE == 0
    arena.close()


@each_kind
def test_gaps_between_other_mappings_do_not_matter(shared: bool) -> None:
    """The system puts a mapping where it fits, which may be anywhere in a process that has been at work for a while."""
    dice = random.Random(0)
    others = []
    for _ in range(200):
        others.append(mmap.mmap(-1, dice.randrange(1, 5 * LARGE // 4 // PAGE) * PAGE))
        if len(others) > 40:
            others.pop(dice.randrange(len(others))).close()
        arena = Arena(shared=shared)
        for size in (LARGE + dice.randrange(600) * PAGE, LARGE * dice.randrange(1, 9)):
            offset = arena.extend(size)
            assert (_address(arena, offset) - offset) % LARGE == 0
        arena.close()
    for other in others:
        other.close()


@makes_them
@each_kind
def test_only_whole_ones_within_what_was_added_are_made(shared: bool) -> None:
    """A large page that reaches beyond would be memory that nobody planned."""
    arena = Arena(shared=shared)
    size = 2 * LARGE + LARGE // 2 // PAGE * PAGE
    first, second = arena.extend(size), arena.extend(size)
    before = arena.resident_bytes()
    _enlarge(arena, first, size, before + 2 * LARGE)
    assert arena.resident_bytes() - before == 2 * LARGE
    _enlarge(arena, second + LARGE + PAGE, PAGE, before + 3 * LARGE)  # a part of one has all of it made
    assert arena.resident_bytes() - before == 3 * LARGE
    arena.enlarge_pages(second + 2 * LARGE, PAGE)  # the last one is not whole
    assert arena.resident_bytes() - before == 3 * LARGE
    arena.close()


@makes_them
@each_kind
def test_memory_that_was_given_back_is_gone(shared: bool) -> None:
    """Also a part of a large page."""
    arena = Arena(shared=shared)
    offset = arena.extend(2 * LARGE)
    _enlarge(arena, offset, 2 * LARGE, 2 * LARGE)
    before = arena.resident_bytes()
    arena.discard(offset, LARGE // 2)
    assert before - arena.resident_bytes() == LARGE // 2
    arena.close()


@pytest.mark.parametrize("kind", [lambda: Arena(shared=True), NamedArena], ids=["one file", "segments"])
def test_how_much_was_there_before_something_was_given_back(kind: Any) -> None:
    """Whoever looks now and then learns of the most in between, and of what processes no longer have mapped."""
    arena: AnyArena = kind()
    size = 2**20
    offsets = [arena.extend(size) for _ in range(3)]
    for offset in offsets:
        mapping, start = arena.window(offset, size)
        mapping[start : start + size] = bytes(size)
    full = arena.resident_bytes()
    assert full >= 3 * size
    assert (arena.most_bytes, arena.returned_bytes) == (0, 0)
    arena.discard(offsets[0], size)
    arena.discard(offsets[2], size)
    assert arena.most_bytes == full
    assert arena.returned_bytes == full - arena.resident_bytes() >= 2 * size - 4 * PAGE
    arena.close()


@makes_them
def test_memory_that_was_given_back_does_not_come_back_with_its_neighbours() -> None:
    """A slot that moved away leaves a hole between two that stay."""
    arena = Arena(shared=True)
    size = LARGE * 2 // 3 // PAGE * PAGE
    base = arena.extend(8 * size)
    for slot in range(8):
        _words(arena, base + slot * size, size)[:] = 1
    before = arena.resident_bytes()
    for slot in range(0, 8, 2):
        arena.discard(base + slot * size, size)
    for slot in range(1, 8, 2):
        arena.enlarge_pages(base + slot * size, size)
    assert before - arena.resident_bytes() == 4 * size
    assert all((_words(arena, base + slot * size, size) == 1).all() for slot in range(1, 8, 2))
    arena.close()


@makes_them
def test_what_another_process_writes_meanwhile_is_not_lost() -> None:
    """Workers write into the slot beside the one that is begun."""
    arena = Arena(shared=True)
    size = 24 * LARGE
    offset = arena.extend(size)
    arena.window(offset, size)
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        mine = Arena(shared=True, fd=arena.fd)
        words = _words(mine, offset, size)
        os.write(writing, b"x")
        for turn in range(1, 9):  # each word of every other page, again and again
            for page in range(0, size // PAGE, 2):
                words[page * 512 : (page + 1) * 512] += turn
        os._exit(0)
    os.read(reading, 1)
    for page in range(24):
        arena.enlarge_pages(offset + page * LARGE, LARGE)
        time.sleep(1e-3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    words = _words(arena, offset, size).reshape(-1, 2, 512)
    assert (words[:, 0] == sum(range(1, 9))).all()
    assert (words[:, 1] == 0).all()
    os.close(reading)
    os.close(writing)
    arena.close()


@pytest.mark.parametrize(
    ("code", "goes_on"), [(errno.EAGAIN, True), (errno.EINVAL, False), (errno.ENOMEM, False), (errno.EBUSY, False)]
)
def test_a_system_that_makes_none_is_asked_once(code: int, goes_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older one, or one without a piece of memory that is large enough; a page in use is somebody's for a moment."""
    asked = []

    class Refuses:
        def __getitem__(self, at: int) -> int:
            return 0

        def madvise(self, *args: int) -> None:
            asked.append(args)
            raise OSError(code, os.strerror(code))

    arena = Arena(shared=False)
    offset = arena.extend(4 * LARGE)
    monkeypatch.setattr(arena, "window", lambda *_: (Refuses(), 0))
    arena.enlarge_pages(offset, 4 * LARGE)
    arena.enlarge_pages(offset, 4 * LARGE)
    assert len(asked) == (4 if goes_on else 1)
    assert arena.page_bytes == (LARGE if goes_on else PAGE)


def test_a_system_that_takes_long_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks for memory in one piece, and a consumer waits."""
    monkeypatch.setattr(arenas, "MOST_COLLAPSE_S", -1.0)
    arena = Arena(shared=True)
    arena.enlarge_pages(arena.extend(4 * LARGE), 4 * LARGE)
    assert arena.page_bytes == PAGE
    assert arena.resident_bytes() <= LARGE + PAGE
    arena.close()


def test_a_system_without_any_is_no_different(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "large_page_bytes", lambda: PAGE)
    arena = Arena(shared=True)
    first, second = arena.extend(3 * LARGE), arena.extend(PAGE)
    assert second == first + 3 * LARGE
    arena.enlarge_pages(first, 3 * LARGE)
    assert arena.resident_bytes() == 0
    arena.close()


def _picture(item: int) -> Any:
    return np.full((500, 700), item, np.float32)


@makes_them
@pytest.mark.parametrize("how", [{"num_workers": 0}, {"num_workers": 2, "executor": "thread"}, {"num_workers": 2}])
@pytest.mark.parametrize("cache", [None, "ram"])
def test_a_feed_has_its_slots_and_what_it_keeps_in_them(
    how: dict[str, Any], cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in them is right, and the budget holds."""
    asked: list[bool] = []
    ask = Arena._enlarge_page

    def told(arena: Arena, start: int) -> bool:
        asked.append(ask(arena, start))
        return asked[-1]

    monkeypatch.setattr(Arena, "_enlarge_page", told)
    with Feed(range(60), _picture, batch_size=4, memory="256 MiB", cache=cache, **how) as feed:
        for _ in range(3):
            for number, batch in enumerate(feed):
                assert (batch == 4 * number + np.arange(4)[:, None, None]).all()
        assert feed.stats.peak_bytes <= feed.plan.memory
        wanted = 2 * (4 * 500 * 700 * 4) // LARGE * LARGE  # of two slots at least
        if cache:
            wanted = 60 * 500 * 700 * 4 - 2 * LARGE
        assert len(asked) * LARGE >= wanted or not all(asked)
        refused = _large_bytes() < wanted
        assert feed.stats.arena_bytes <= feed.plan.arena_bytes + CONTROL_BYTES
    if refused:
        pytest.skip("the system had no large pages to give at the moment")


@makes_them
def test_a_slot_of_which_little_is_used_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of it would be memory for nothing."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(Arena, "enlarge_pages", lambda self, offset, size: asked.append((offset, size)))
    with Feed(range(8), _picture, batch_size=100, memory="1 GiB", num_workers=0) as feed:
        assert [len(batch) for batch in feed] == [8]
        assert not asked
    with Feed(range(80), _picture, batch_size=100, memory="1 GiB", num_workers=0) as feed:
        assert [len(batch) for batch in feed] == [80]
        assert asked


def _large_bytes() -> int:
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("ShmemPmdMapped"))
