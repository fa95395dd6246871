"""Copies that several threads share: all of it is done, by whoever is there, and nothing is held afterwards."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from penstock._core.copying import MOST_HANDS, PARTS_A_HAND, Hands


@pytest.fixture(params=[1, 2, 3, 64])
def hands(request: pytest.FixtureRequest) -> Iterator[Hands]:
    made = Hands(request.param)
    yield made
    made.close()


@pytest.mark.parametrize("count", [1, 2, 3, 7, 1000])
def test_every_row_is_done_once(hands: Hands, count: int) -> None:
    """A row that nobody or two did would be wrong data, or time for nothing."""
    for _ in range(20):
        done = np.zeros(count, np.int64)

        def do(first: int, behind: int, done: np.ndarray = done) -> None:
            done[first:behind] += 1

        hands.share(count, do)
        assert (done == 1).all()


def test_no_more_threads_than_cores_and_never_many() -> None:
    """The threads of a model want the cores, too."""
    for cores, expected in ((1, 0), (2, 1), (64, MOST_HANDS - 1)):
        hands = Hands(cores)
        hands.share(64, lambda *_: None)
        assert sum(thread.name == "penstock-copy" for thread in threading.enumerate()) == expected
        hands.close()
    hands = Hands(1, helpers=MOST_HANDS + 2)  # those who wait for a disk
    hands.share(64, lambda *_: None)
    assert sum(thread.name == "penstock-copy" for thread in threading.enumerate()) == MOST_HANDS + 2
    hands.close()


def test_another_thread_takes_a_part_while_this_one_is_at_it() -> None:
    """Otherwise all of this would be for nothing."""
    hands, met, doers = Hands(2), threading.Barrier(2, timeout=30), set()

    def do(first: int, _: int) -> None:
        if first < 2:  # the first two parts wait for each other
            met.wait()
        doers.add(threading.get_ident())

    hands.share(2 * PARTS_A_HAND, do)
    assert len(doers) == 2
    hands.close()


@pytest.mark.parametrize("where", range(4))
def test_what_goes_wrong_is_raised_here_after_all_parts_have_ended(hands: Hands, where: int) -> None:
    """One that goes on would write into memory that is used for something else by then."""
    running = set()

    def do(first: int, behind: int) -> None:
        running.add(first)
        try:
            if first <= where < behind:
                raise OSError(5, "gone")
        finally:
            running.discard(first)

    with pytest.raises(OSError, match="gone"):
        hands.share(4, do)
    assert not running
    hands.share(4, lambda *_: None)


def test_nothing_is_kept_alive_by_a_thread_that_waits(hands: Hands) -> None:
    """A batch is given back when its last view dies; one that is held until the next copy would be one slot less."""

    class Memory:
        pass

    for _ in range(20):
        memory = Memory()
        gone = threading.Event()
        weakref.finalize(memory, gone.set)

        def do(*_: int, memory: Memory = memory) -> None:
            pass

        hands.share(8, do)
        del memory, do
        assert gone.wait(10)


def test_whoever_closes_in_the_middle_does_not_make_it_hang() -> None:
    """A signal handler may close the feed while its consumer copies, and another thread may."""
    for _ in range(50):
        hands, done = Hands(3), np.zeros(12, np.int64)

        def do(first: int, behind: int, hands: Hands = hands, done: np.ndarray = done) -> None:
            if first == 0 and threading.current_thread() is threading.main_thread():
                hands.close()
            done[first:behind] += 1

        hands.share(12, do)
        hands.share(12, do)  # without any thread
        assert (done == 2).all()
        hands.close()


def test_without_a_thread_to_be_had_it_is_done_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[tuple[int, int]] = []
    Hands(4).share(3, lambda first, behind: done.append((first, behind)))
    assert sum(behind - first for first, behind in done) == 3


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_while_a_thread_starts_leaves_none_behind(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that nobody knows of would take the word that ends another, and closing would wait for ever."""
    start = threading.Thread.start
    left = [2]

    def interrupted(thread: threading.Thread) -> None:
        if when == "after":
            start(thread)
        if left[0]:
            left[0] -= 1
            raise KeyboardInterrupt
        if when == "before":
            start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    hands, done = Hands(4), np.zeros(12, np.int64)

    def do(first: int, behind: int) -> None:
        done[first:behind] += 1

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            hands.share(12, do)
    hands.share(12, do)
    assert (done == 1).all()
    hands.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "penstock-copy"]


def test_others_begin_before_anybody_waits() -> None:
    """While the consumer works on the batch before."""
    hands, done = Hands(2), threading.Event()
    hands.share(4, lambda *_: None)  # the threads are there
    begun = hands.begin(1, lambda *_: done.set())
    assert done.wait(30)
    hands.finish(begun)
    hands.close()


def test_who_waits_for_one_does_nothing_of_another() -> None:
    """Or a batch would come only when the one after it is there, too."""
    hands, doers = Hands(1), []
    first, second = hands.begin(4, lambda *_: doers.append(1)), hands.begin(4, lambda *_: doers.append(2))
    hands.finish(second)
    assert set(doers) == {2}
    hands.finish(first)
    assert set(doers) == {1, 2}
    hands.close()


def test_what_was_begun_and_is_left_alone_is_held_by_nobody_in_the_end() -> None:
    """An epoch was left while a batch of it was being copied."""

    class Memory:
        pass

    hands, memory = Hands(2), Memory()
    gone = threading.Event()
    weakref.finalize(memory, gone.set)
    hands.share(4, lambda *_: None)
    hands.begin(4, lambda *_, memory=memory: None)
    del memory
    assert gone.wait(30)
    hands.close()
