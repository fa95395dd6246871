"""Leases: a batch stays right for as long as anything refers to it, in whatever thread; copies are the exception."""

from __future__ import annotations

import gc
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import Feed, ResourceHeld

KINDS: dict[str, dict[str, Any]] = {
    "inline": {"num_workers": 0},
    "thread": {"num_workers": 2, "executor": "thread"},
    "process": {"num_workers": 2, "executor": "process"},
}
ROWS = 4
LARGE = (256, 512)  # half a megabyte a sample, 2 MiB a batch: too large for several batches to share a slot


def numbered(shape: tuple[int, ...] = (8,)) -> Callable[[int], np.ndarray[Any, Any]]:
    """A load whose samples hold their item in every element; made here, so that it travels by value."""

    def load(item: int) -> np.ndarray[Any, Any]:
        return np.full(shape, item, np.float32)

    return load


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    return KINDS[request.param]


def small(kind: dict[str, Any], batches: int = 100, **more: Any) -> Feed:
    return Feed(range(batches * ROWS), numbered(), batch_size=ROWS, memory="256 MiB", **kind, **more)


def large(kind: dict[str, Any], batches: int = 40, **more: Any) -> Feed:
    return Feed(range(batches * ROWS), numbered(LARGE), batch_size=ROWS, memory="256 MiB", **kind, **more)


def check(batch: Any, number: int) -> None:
    first = number * ROWS
    values = np.asarray(batch).reshape(ROWS, -1)
    assert (values == np.arange(first, first + ROWS, dtype=values.dtype)[:, None]).all(), (number, values[:, 0])


# -------------------------------------------------------------------------------------------------------------- keeping


@pytest.mark.parametrize("make", [small, large])
def test_a_list_of_all_batches_is_right_and_warns_once(kind: dict[str, Any], make: Callable[..., Feed]) -> None:
    """``list(feed)`` is the first thing many try; a slot that was used again would show another batch's numbers."""
    count = 100 if make is small else 40
    with make(kind, count) as feed:
        assert make is small or feed.plan.batches_per_slot == 1
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            batches = list(feed)
        assert len(batches) == count
        for number, batch in enumerate(batches):
            check(batch, number)
        held = [w for w in caught if w.category is ResourceHeld]
        assert len(held) == 1
        assert "copies" in str(held[0].message)
        assert held[0].filename == __file__  # points at the user's line, not into the library
        assert 0 < feed.stats.copied < count


def test_crops_of_crops_held_over_an_epoch_stay_right(kind: dict[str, Any]) -> None:
    """numpy lets a view of a view forget the one in between: the lease must not hang on that one."""
    with large(kind) as feed, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceHeld)
        crops = []
        for number, batch in enumerate(feed):
            check(batch, number)
            if number % 5 == 0:
                crops.append((number, batch[1:][:, 3:40][..., 100:200:7][1]))
        del batch
        for number, crop in crops:
            assert crop.size
            assert (crop == number * ROWS + 2).all()


def test_torch_slices_held_over_an_epoch_stay_right(kind: dict[str, Any]) -> None:
    """A tensor made from numpy memory keeps the memory, and so does a slice, a transpose, a reshape of one."""
    pytest.importorskip("torch")
    with large(kind, to="torch") as feed, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceHeld)
        kept = []
        for number, batch in enumerate(feed):
            check(batch, number)
            if number % 5 == 0:
                kept.append((number, batch[2:].transpose(1, 2)[0, 5:50].reshape(-1)[::3]))
        del batch
        for number, piece in kept:
            assert piece.numel()
            assert (piece == number * ROWS + 2).all()


def test_pieces_of_a_tree_hold_the_whole_batch(kind: dict[str, Any]) -> None:
    """The leaves of a batch lie in one slot: the last of them keeps it."""

    def load(item: int) -> dict[str, Any]:
        return {"x": np.full((64, 64), item, np.float32), "y": item, "name": f"item {item}"}

    with Feed(range(160), load, batch_size=ROWS, memory="256 MiB", **kind) as feed, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceHeld)
        labels = [batch["y"] for batch in feed]
        assert np.concatenate(labels).tolist() == list(range(160))


def test_every_kind_of_view_keeps_the_slot(kind: dict[str, Any]) -> None:
    """Whatever refers to the memory, refers to the lease."""
    with large(kind, 30) as feed:
        batches = iter(feed)
        makers: list[Callable[[Any], Any]] = [
            lambda b: b.T,
            lambda b: b.view(np.uint8),
            memoryview,
            lambda b: np.lib.stride_tricks.sliding_window_view(b, 2, axis=0),
            lambda b: b.reshape(-1),
            lambda b: np.asarray(memoryview(b)),
            lambda b: b.flat,
            lambda b: np.broadcast_to(b[0], (3, *LARGE)),
        ]
        for make in makers:
            engine = feed._engine
            assert engine is not None
            view = make(next(batches))
            gc.collect()
            assert engine.held == 1, make
            del view
            gc.collect()
            assert engine.held == 0, make
        batches.close()


# ----------------------------------------------------------------------------------------------------------- letting go


@pytest.mark.parametrize("make", [small, large])
def test_a_consumer_that_holds_one_batch_at_a_time_causes_no_copies(
    kind: dict[str, Any], make: Callable[..., Feed]
) -> None:
    """The ordinary loop costs nothing; a warning here would cry wolf."""
    with make(kind, 50) as feed:
        for _ in range(2):
            for number, batch in enumerate(feed):
                check(batch, number)
        assert feed.stats.copied == 0
        assert feed.stats.batches == 100


def test_two_slots_are_enough_for_an_ordinary_loop() -> None:
    """A ``for`` loop holds the old batch while it asks for the new one: that must neither copy nor hang."""
    batch_bytes = ROWS * 512 * 1024
    load = numbered((256, 512))
    # Threads, because a process takes more memory than the two slots do, and the plan would rather drop the process.
    least = 3 * batch_bytes
    for memory in itertools.count(least, batch_bytes // 4):
        try:
            feed = Feed(range(80), load, batch_size=ROWS, memory=memory, num_workers=1, executor="thread")
            plan = feed.plan
        except penstock.BudgetError:
            continue
        break
    with feed:
        assert plan.slots == 2
        for number, batch in enumerate(feed):
            check(batch, number)
        assert feed.stats.copied == 0
        assert feed.stats.batches == 20


def test_slots_come_back_when_the_last_view_dies(kind: dict[str, Any]) -> None:
    """A lease that never ended would turn every further batch into a copy."""
    with large(kind, 12) as feed:
        for _ in range(5):
            for batch in feed:
                view = batch[1:, 2:]
            del batch, view
        assert feed.stats.copied == 0
        assert feed._engine is not None
        assert feed._engine.held == 0
        feed._engine._ledger.validate()


def test_after_a_hoard_is_dropped_batches_are_in_place_again(kind: dict[str, Any]) -> None:
    """Copies are for as long as they are needed."""
    with large(kind, 30) as feed, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceHeld)
        hoard = list(feed)
        copied = feed.stats.copied
        assert copied
        hoard.clear()
        for number, batch in enumerate(feed):
            check(batch, number)
        assert feed.stats.copied == copied


# ------------------------------------------------------------------------------------------------------------ outliving


def test_batches_outlive_close(kind: dict[str, Any]) -> None:
    """Closing ends the workers, not the memory that is in use."""
    feed = large(kind)
    batches = iter(feed)
    first, second = next(batches), next(batches)[1]
    feed.close()
    feed.close()
    check(first, 0)
    assert (second == ROWS + 1).all()
    first += 1  # still writable, still ours
    assert (first[0] == 1).all()


def test_batches_outlive_the_feed(kind: dict[str, Any]) -> None:
    """``x = next(iter(Feed(...)))`` is a fair line to write."""
    batch = next(iter(large(kind)))
    gc.collect()
    check(batch, 0)
    other = next(iter(large(kind)))  # takes new memory, not the old one's
    check(other, 0)
    check(batch, 0)


def test_dropping_a_batch_after_close_is_harmless(kind: dict[str, Any]) -> None:
    """Its finalizer finds no engine, or a closed one."""
    feed = large(kind)
    kept = list(itertools.islice(feed, 2))
    feed.close()
    del kept[0]
    del feed
    gc.collect()
    check(kept[0], 1)
    kept.clear()
    gc.collect()


# -------------------------------------------------------------------------------------------------------------- threads


def test_views_held_by_another_thread_stay_right(kind: dict[str, Any]) -> None:
    """The last reference dies where it pleases; the slot comes back all the same."""
    wrong: list[BaseException] = []
    handed: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()

    def reader() -> None:
        try:
            held: list[tuple[int, Any]] = []
            while (pair := handed.get()) is not None:
                held.append(pair)
                for number, view in held:
                    assert (view == number * ROWS + 3).all()
                if len(held) > 2:
                    held.pop(0)
        except BaseException as error:  # noqa: BLE001 - told to the test
            wrong.append(error)

    thread = threading.Thread(target=reader)
    thread.start()
    with large(kind, 60) as feed, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceHeld)
        for number, batch in enumerate(feed):
            handed.put((number, batch[3, 10:20]))
            del batch
        handed.put(None)
        thread.join()
    assert not wrong


def test_batches_passed_to_other_threads_are_right_and_come_back(kind: dict[str, Any]) -> None:
    """Four threads drop batches at once while a fifth asks for more: no slot is lost, none is given twice."""
    wrong: list[BaseException] = []
    handed: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()

    def user() -> None:
        try:
            while (pair := handed.get()) is not None:
                check(pair[1], pair[0])
                del pair
        except BaseException as error:  # noqa: BLE001 - told to the test
            wrong.append(error)

    threads = [threading.Thread(target=user) for _ in range(4)]
    for thread in threads:
        thread.start()
    with small(kind, 200) as feed, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceHeld)
        for _ in range(2):
            for number, batch in enumerate(feed):
                handed.put((number, batch))
                del batch
        for _ in threads:
            handed.put(None)
        for thread in threads:
            thread.join()
        assert not wrong
        assert feed._engine is not None
        feed._engine._settle()
        feed._engine._ledger.validate()
        assert feed._engine.held == 0


def test_one_epoch_shared_by_threads_gives_each_batch_once(kind: dict[str, Any]) -> None:
    """A pool of consumers over one iterator is not two iterators."""
    seen: list[int] = []
    wrong: list[BaseException] = []

    def user(batches: Iterator[Any]) -> None:
        try:
            for batch in batches:
                values = batch[:, 0].tolist()
                assert values == list(range(int(values[0]), int(values[0]) + ROWS))
                seen.extend(map(int, values))
        except BaseException as error:  # noqa: BLE001 - told to the test
            wrong.append(error)

    with small(kind, 100) as feed, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceHeld)  # four consumers hold four batches
        batches = iter(feed)
        threads = [threading.Thread(target=user, args=(batches,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert sorted(seen) == list(range(400))


# -------------------------------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize("make", [small, large])
def test_writing_into_a_batch_changes_no_other(kind: dict[str, Any], make: Callable[..., Feed]) -> None:
    """Normalising in place is what people do; slots are used again, and must be filled anew in full."""
    with make(kind, 60) as feed:
        for _ in range(2):
            previous = None
            for number, batch in enumerate(feed):
                check(batch, number)
                if previous is not None:
                    assert (previous == -1).all()
                batch[...] = -1
                previous = batch


def test_writing_into_a_held_batch_changes_no_other(kind: dict[str, Any]) -> None:
    """Batches that share a slot share no byte."""
    with small(kind, 100) as feed, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceHeld)
        batches = list(feed)
        for batch in batches[::2]:
            batch[...] = np.nan
        for number in range(1, 100, 2):
            check(batches[number], number)


def test_a_collated_batch_is_leased_too(kind: dict[str, Any]) -> None:
    """What a collate function made lies in a slot like any other batch."""
    with (
        Feed(
            range(160),
            numbered(LARGE),
            batch_size=ROWS,
            memory="256 MiB",
            collate_fn=lambda samples: np.stack(samples) * 2,
            **kind,
        ) as feed,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", ResourceHeld)
        views = [(number, batch[1:, 5]) for number, batch in enumerate(feed)]
        for number, view in views:
            assert (view[0] == 2 * (number * ROWS + 1)).all()
        assert 0 < feed.stats.copied < 40


def test_samples_in_any_number_are_right_when_kept(kind: dict[str, Any]) -> None:
    """Batches that are cut in the parent are memory of their own."""

    def load(item: int) -> Iterator[Any]:
        for part in range(item % 4):
            yield np.full(16, item * 10 + part)

    with Feed(range(100), load, batch_size=7, memory="256 MiB", samples_per_item=None, **kind) as feed:
        batches = list(feed)
    expected = [item * 10 + part for item in range(100) for part in range(item % 4)]
    assert np.concatenate(batches)[:, 0].tolist() == expected
    assert feed.stats.copied == 0
