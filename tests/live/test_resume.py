"""Going on where it stopped: the exact next sample, whatever else has changed since."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock import Feed
from tests.live.crews import CREWS, each_crew, feed_of

LENGTH = 41


def load(item: int) -> Any:
    """Something that shows its randomness as well as its item."""
    return np.int64(item), penstock.rng().integers(1 << 40)


def taken(epoch: Any, batches: int | None = None) -> list[Any]:
    """The samples of so many batches, as pairs."""
    return [pair for x, r in itertools.islice(epoch, batches) for pair in zip(x.tolist(), r.tolist(), strict=True)]


def through_json(state: dict[str, Any]) -> Any:
    return json.loads(json.dumps(state))


def uninterrupted(epochs: int = 3, **options: Any) -> list[list[Any]]:
    with feed_of("inline", range(LENGTH), load, **options) as feed:
        return [taken(epoch) for epoch in feed.epochs(epochs)]


@settings(max_examples=40)
@given(
    shuffle=st.booleans(),
    stops=st.lists(
        st.tuples(
            st.integers(1, 3),  # world
            st.integers(1, 7),  # batch size
            st.integers(0, 6),  # batches until the next stop
            st.sampled_from(["inline", "inline", "inline", "thread"]),
        ),
        min_size=1,
        max_size=5,
    ),
)
def test_what_was_seen_in_pieces_is_the_uninterrupted_epoch(shuffle: bool, stops: list[tuple[Any, ...]]) -> None:
    """Stopped anywhere and gone on with other ranks, batches and crews: each sample once, in the order of the world."""
    options: dict[str, Any] = {"shuffle": shuffle, "seed": 7}
    (whole,) = uninterrupted(1, **options)
    state, seen, over = None, [], False
    for world, size, batches, crew in [*stops, (1, 5, LENGTH, "inline")]:
        feeds = [
            feed_of(crew, range(LENGTH), load, batch_size=size, shard=(rank, world), **options) for rank in range(world)
        ]
        parts = []
        for feed in feeds:
            if state is not None:
                feed.load_state_dict(state)
            epoch = iter(feed)
            parts.append(taken(epoch, batches))
            del epoch
        states = [through_json(feed.state_dict()) for feed in feeds]
        for feed in feeds:
            feed.close()
        state = states[0]
        assert all(one == state for one in states)
        seen += [pair for dealt in zip(*parts, strict=True) for pair in dealt]
        if over := state["epoch"] == 1:
            break
    assert over
    # The last places are filled from the start again, so that every rank has as many.
    assert seen[:LENGTH] == whole
    assert len(seen) - LENGTH < 3


@each_crew
@pytest.mark.parametrize("batches", [0, 1, 5, 10, 11])
def test_every_crew_goes_on_with_exactly_the_next_sample(crew: str, batches: int) -> None:
    """In the middle, at the edges; no epoch is skipped and none repeated."""
    whole = uninterrupted(3, shuffle=True)
    with feed_of("inline", range(LENGTH), load, shuffle=True) as feed:
        before = taken(iter(feed), batches)
        state = through_json(feed.state_dict())
    with feed_of(crew, range(LENGTH), load, shuffle=True, batch_size=3) as feed:
        feed.load_state_dict(state)
        after = [taken(epoch) for epoch in feed.epochs(2)]
    if batches == 11:  # all of the first epoch
        assert [before, *after] == whole
    else:
        assert [before + after[0], after[1]] == whole[:2]


def test_what_was_read_ahead_does_not_count() -> None:
    """With slots full of batches that nobody was given, the next sample is still the next."""
    (whole,) = uninterrupted(1)
    with feed_of("process", range(LENGTH), load) as feed:
        epoch = iter(feed)
        before = taken(epoch, 2)
        state = through_json(feed.state_dict())
        assert state["position"] == len(before)
        del epoch
    with feed_of("inline", range(LENGTH), load) as feed:
        feed.load_state_dict(state)
        assert before + taken(iter(feed)) == whole


def test_a_feed_goes_back_to_a_state_of_its_own() -> None:
    """Loading a state ends what is under way."""
    with feed_of("inline", range(LENGTH), load, shuffle=True) as feed:
        epoch = iter(feed)
        taken(epoch, 2)
        state = feed.state_dict()
        rest = taken(epoch, 3)
        feed.load_state_dict(state)
        assert taken(iter(feed), 3) == rest
        with pytest.raises(penstock.LeaseError):
            next(epoch)


def several(item: int) -> Iterator[Any]:
    for number in range(3):
        yield np.int64(3 * item + number), penstock.rng().integers(1 << 40)


@pytest.mark.parametrize("each", [3, None])
@pytest.mark.parametrize("batches", range(1, 8))
def test_in_the_middle_of_an_item(each: int | None, batches: int) -> None:
    """An item that gives several samples may be half used."""
    options: dict[str, Any] = {"samples_per_item": each, "batch_size": 4}
    with feed_of("inline", range(10), several, **options) as feed:
        whole = taken(iter(feed))
    with feed_of("inline", range(10), several, **options) as feed:
        before = taken(iter(feed), batches)
        state = through_json(feed.state_dict())
    with feed_of("thread", range(10), several, **{**options, "batch_size": 5}) as feed:
        feed.load_state_dict(state)
        assert before + taken(iter(feed)) == whole
    if state["inside"]:
        with (
            feed_of("inline", range(10), several, shard=(0, 2), **options) as feed,
            pytest.raises(ValueError, match="in the middle of an item"),
        ):
            feed.load_state_dict(state)


class Listed:
    """A stream that begins anew each time, and counts what was loaded."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("once", [False, True])
def test_a_stream_is_passed_over_without_loading(shuffle: bool, once: bool) -> None:
    """The items before the place are pulled and let go; a shuffle window is what it was, whatever the budget is now."""

    def make() -> Any:
        return iter(range(LENGTH)) if once else Listed(LENGTH)

    options: dict[str, Any] = {"shuffle": shuffle, "num_workers": 0}
    with Feed(make(), load, batch_size=4, memory="64 MiB", **options) as feed:
        whole = taken(iter(feed))
    with Feed(make(), load, batch_size=4, memory="64 MiB", **options) as feed:
        before = taken(iter(feed), 5)
        state = through_json(feed.state_dict())
    loaded: list[int] = []

    def counted(item: int) -> Any:
        loaded.append(item)
        return load(item)

    with Feed(make(), counted, batch_size=6, memory="24 MiB", **options) as feed:
        feed.load_state_dict(state)
        after = taken(iter(feed))
    assert before + after == whole
    # One item may be looked at first, to learn what it costs.
    assert loaded[-len(after) :] == [item for item, _ in after]
    assert len(loaded) <= len(after) + 1


def test_a_one_time_stream_that_was_left_and_taken_up_again_knows_its_place() -> None:
    """Each iteration goes on after the last one, and so does a resumed one after all of them."""
    with Feed(iter(range(LENGTH)), load, batch_size=4, memory="64 MiB", num_workers=0) as feed:
        taken(iter(feed), 2)
        taken(iter(feed), 3)
        state = through_json(feed.state_dict())
        with pytest.raises(ValueError, match="cannot go back"):
            feed.load_state_dict({**state, "drawn": 8})
    with Feed(iter(range(LENGTH)), load, batch_size=4, memory="64 MiB", num_workers=0) as feed:
        feed.load_state_dict(state)
        assert [item for item, _ in taken(iter(feed))] == list(range(20, LENGTH))


def test_a_stream_dealt_to_ranks_goes_on_with_another_number_of_them() -> None:
    """The place of a stream is that of the world, too."""
    parts = []
    for rank in range(2):
        with Feed(Listed(24), load, batch_size=3, memory="64 MiB", num_workers=0, shard=(rank, 2)) as feed:
            parts.append(taken(iter(feed), 2))
            state = through_json(feed.state_dict())
    with Feed(Listed(24), load, batch_size=3, memory="64 MiB", num_workers=0) as feed:
        feed.load_state_dict(state)
        rest = taken(iter(feed))
    with Feed(Listed(24), load, batch_size=3, memory="64 MiB", num_workers=0) as feed:
        whole = taken(iter(feed))
    assert [pair for dealt in zip(*parts, strict=True) for pair in dealt] + rest == whole


def test_what_was_skipped_and_the_epoch_are_kept() -> None:
    """A resumed job still knows what it left out."""

    def fragile(item: int) -> Any:
        if item in (2, 30):
            raise ValueError("broken")
        return load(item)

    with feed_of("inline", range(LENGTH), fragile, on_error="skip") as feed:
        for epoch in feed.epochs(2):
            taken(epoch)
        before = taken(iter(feed), 3)
        state = through_json(feed.state_dict())
        assert state["epoch"] == 2
    with feed_of("process", range(LENGTH), fragile, on_error="skip") as feed:
        feed.load_state_dict(state)
        assert feed.epoch == 2
        assert [item for item, _ in feed.stats.skipped] == [2, 30, 2, 30, 2]
        assert "ValueError: broken" in str(feed.stats.skipped[0][1])
        after = taken(iter(feed))
        assert [item for item, _ in feed.stats.skipped] == [2, 30, 2, 30, 2, 30]
    assert [item for item, _ in before + after] == [item for item in range(LENGTH) if item not in (2, 30)]


@pytest.mark.parametrize("stop", [1, 6, 18, 24])
@pytest.mark.parametrize("kinds", [("process", "inline"), ("inline", "process")])
def test_what_was_left_out_of_what_was_read_ahead_is_not_saved(kinds: tuple[str, str], stop: int) -> None:
    """Whoever goes on from there reads it again, and would count it twice."""

    def fragile(item: int) -> Any:
        if item % 7 == 0:
            raise ValueError("broken")
        return load(item)

    first, second = kinds
    with feed_of(first, range(300), fragile, on_error="skip", batch_size=10) as feed:
        taken(iter(feed), stop)
        state = through_json(feed.state_dict())
    assert all(item < state["position"] for item, _ in state["skipped"])
    with feed_of(second, range(300), fragile, on_error="skip", batch_size=10) as feed:
        feed.load_state_dict(state)
        taken(iter(feed))
        assert [item for item, _ in feed.stats.skipped] == list(range(0, 300, 7))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"items": [*range(1, LENGTH), 0]}, "belongs to other items"),
        ({"items": range(LENGTH + 1)}, "its length is 41, here it is 42"),
        ({"seed": 1}, "its seed is 0, here it is 1"),
        ({"shuffle": True}, "its shuffle is False, here it is True"),
    ],
)
def test_a_state_of_another_feed_is_refused(changes: dict[str, Any], words: str) -> None:
    """Going on somewhere else in silence would repeat samples and lose others."""
    with feed_of("inline", range(LENGTH), load) as feed:
        taken(iter(feed), 2)
        state = feed.state_dict()
    options = {"items": range(LENGTH), **changes}
    with feed_of("inline", options.pop("items"), load, **options) as feed:
        with pytest.raises(ValueError, match=words):
            feed.load_state_dict(state)
        assert len(taken(iter(feed))) >= LENGTH, "nothing of it was taken over"


def test_items_that_only_moved_are_taken_when_asked_for(tmp_path: Path) -> None:
    """Another folder on another machine, the same files."""
    with feed_of("inline", [f"/old/{i}" for i in range(LENGTH)], len) as feed:
        next(iter(feed))
        state = feed.state_dict()
    moved = [tmp_path / str(i) for i in range(LENGTH)]
    with feed_of("inline", moved, lambda path: np.int64(int(path.name))) as feed:
        with pytest.raises(ValueError, match="strict=False"):
            feed.load_state_dict(state)
        feed.load_state_dict(state, strict=False)
        assert next(iter(feed)).tolist() == [4, 5, 6, 7]


class Nameless:
    """Shows nothing but an address."""


def test_a_state_is_the_same_in_every_process() -> None:
    """Addresses and the order of sets must not find their way into it."""
    states = []
    for _ in range(2):
        with feed_of("inline", [Nameless() for _ in range(5)], lambda _: 1) as feed:
            states.append(feed.state_dict())
    assert states[0] == states[1]
    x = np.arange(12).reshape(6, 2)
    with Feed(penstock.arrays(x), memory="64 MiB") as one, Feed(penstock.arrays(x[::-1]), memory="64 MiB") as other:
        assert one.state_dict()["items"] != other.state_dict()["items"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": 1},
        {"version": "2"},
        {"position": -1},
        {"position": 1 << 70},
        {"position": LENGTH + 5},
        {"position": "0"},
        {"position": True},
        {"inside": 1.5},
        {"epoch": None},
        {"drawn": []},
        {"skipped": "x"},
        {"skipped": [[1]]},
        {"skipped": [[1, 2]]},
        {"skipped": [["a", "b"]] * 2000},
        {"window": -3},
        {"seed": "\x1b[31m"},
    ],
)
def test_a_broken_state_changes_nothing(wrong: dict[str, Any]) -> None:
    """A state file is data that anybody may have written."""
    with feed_of("inline", range(LENGTH), load) as feed:
        state = {**feed.state_dict(), **wrong}
        with pytest.raises(ValueError, match="state") as caught:
            feed.load_state_dict(state)
        assert str(caught.value).isprintable()
        assert len(taken(iter(feed))) == LENGTH
    with feed_of("inline", range(LENGTH), load) as feed, pytest.raises(TypeError):
        feed.load_state_dict([])  # type: ignore[arg-type]


def test_a_state_stays_small() -> None:
    """A million items, thousands left out: it still fits into a line of a log."""

    def fragile(item: int) -> Any:
        if item % 2:
            raise ValueError("x" * 5_000)
        return np.int64(item)

    with feed_of("inline", range(6000), fragile, on_error="skip", batch_size=100) as feed:
        for _ in feed:
            pass
        assert len(feed.stats.skipped) == 3000
        assert len(json.dumps(feed.state_dict())) < 500_000


def test_the_length_of_an_epoch_that_goes_on_is_what_is_left() -> None:
    """A progress bar that counts to the whole would never arrive."""
    with feed_of("inline", range(LENGTH), load, batch_size=4) as feed:
        taken(iter(feed), 3)
        state = feed.state_dict()
    with feed_of("inline", range(LENGTH), load, batch_size=5) as feed:
        feed.load_state_dict(state)
        epoch = iter(feed)
        assert len(epoch) == len(list(epoch)) == 6
        assert len(feed) == 9


@pytest.mark.parametrize("crew", CREWS)
def test_ranks_have_disjoint_parts_that_cover_everything(crew: str) -> None:
    """And as many batches of the same sizes each, or collective operations would wait for ever."""
    world = 3
    parts, sizes = [], []
    for rank in range(world):
        with feed_of(crew, range(LENGTH), load, shard=(rank, world), shuffle=True) as feed:
            batches = [x.tolist() for x, _ in feed]
            parts.append([item for batch in batches for item in batch])
            sizes.append([len(batch) for batch in batches])
            assert len(feed) == len(batches)
    assert sizes[0] == sizes[1] == sizes[2]
    together = [item for dealt in zip(*parts, strict=True) for item in dealt]
    assert sorted(together[:LENGTH]) == list(range(LENGTH))
    assert together[LENGTH:] == together[: len(together) - LENGTH]


def test_the_rank_is_found_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchrun and others set; half of it, or nonsense, is an error and not rank 0 of 1."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with feed_of("inline", range(8), load, shard="auto") as feed:
        assert [item for item, _ in taken(iter(feed))] == [1, 3, 5, 7]
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ValueError, match="RANK='2'"):
        feed_of("inline", range(8), load, shard="auto")
    monkeypatch.delenv("RANK")
    with pytest.raises(ValueError, match="set RANK"):
        feed_of("inline", range(8), load, shard="auto")
    monkeypatch.delenv("WORLD_SIZE")
    with feed_of("inline", range(8), load, shard="auto") as feed:
        assert len(taken(iter(feed))) == 8


@pytest.mark.parametrize("shard", [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_that_does_not_exist_is_refused(shard: Any) -> None:
    """Two ranks with the same number would both train on the same half."""
    with pytest.raises(ValueError, match="rank from 0 to world - 1"):
        feed_of("inline", range(8), load, shard=shard)
    for wrong in ("rank0", (1,), 3, ("a", "b"), (0.5, 2)):
        with pytest.raises((TypeError, ValueError), match="shard="):
            feed_of("inline", range(8), load, shard=wrong)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_an_epoch_of_which_only_failing_items_are_left_ends(batch_size: int) -> None:
    """Nothing else shows the form of a sample there, and the job must be able to go on all the same."""

    def fragile(item: int) -> Any:
        if item in (6, 7):
            raise ValueError("broken")
        return load(item)

    with feed_of("inline", range(8), fragile, on_error="skip", batch_size=batch_size) as feed:
        taken(iter(feed), 6 // batch_size)
        state = through_json(feed.state_dict())
        assert state["position"] == 6
    with feed_of("inline", range(8), fragile, on_error="skip", batch_size=batch_size) as feed:
        feed.load_state_dict(state)
        assert list(feed) == []
        assert feed.epoch == 1
        assert [item for item, _ in taken(iter(feed))] == list(range(6))


def test_a_rank_whose_items_all_fail_ends_too() -> None:
    """The others go on, and wait for it at the end of the epoch."""

    def fragile(item: int) -> Any:
        if item % 2:
            raise ValueError("broken")
        return load(item)

    with Feed(range(8), fragile, batch_size=2, num_workers=0, shard=(1, 2), on_error="skip") as feed:
        assert list(feed) == []
        assert len(feed.stats.skipped) == 4


@pytest.mark.parametrize("shuffle", [False, True, penstock.Blocks(rows=2, group=20), penstock.Blocks(rows=6, group=20)])
@pytest.mark.parametrize(("length", "given", "world", "batch_size"), [(8, 6, 4, 1), (28, 24, 2, 4), (28, 26, 3, 4)])
def test_the_end_of_an_epoch_that_has_nothing_for_a_rank_is_empty(
    shuffle: Any, length: int, given: int, world: int, batch_size: int
) -> None:
    """With drop_last fewer items than ranks are left out of the epoch, and the next one follows."""
    with Feed(range(length), load, batch_size=1, num_workers=0, shuffle=shuffle, drop_last=True) as feed:
        taken(iter(feed), given)
        state = through_json(feed.state_dict())
    for rank in range(world):
        options: Any = {"shuffle": shuffle, "drop_last": True, "shard": (rank, world)}
        with Feed(range(length), load, batch_size=batch_size, num_workers=0, **options) as feed:
            feed.load_state_dict(state)
            assert list(feed) == []
            assert feed.epoch == 1
            assert len(list(feed)) == length // world // batch_size


def test_an_epoch_without_items_is_counted() -> None:
    """Fewer items than ranks, all left out: every rank comes to the same epoch."""
    with Feed(range(2), load, batch_size=1, num_workers=0, shard=(0, 3), drop_last=True) as feed:
        assert list(feed) == []
        assert feed.state_dict()["epoch"] == feed.epoch == 1


@pytest.mark.parametrize("each", [1, None])
def test_a_state_of_one_rank_is_refused_by_others_where_their_places_differ(each: int | None) -> None:
    """Items that are left out are replaced by later ones, on each rank for itself: samples would be lost or doubled."""

    def fragile(item: int) -> Any:
        if item in (0, 2, 4):
            raise ValueError("broken")
        return load(item) if each == 1 else iter([load(item)])

    def made(rank: int, world: int = 2) -> Feed:
        options: Any = {"on_error": "skip", "samples_per_item": each}
        return Feed(range(12), fragile, batch_size=2, num_workers=0, shard=(rank, world), **options)

    seen: list[Any] = []
    states = []
    for rank in (0, 1):
        with made(rank) as feed:
            before = feed.state_dict()
            seen += taken(iter(feed), 1)
            states.append(through_json(feed.state_dict()))
    for rank, world in ((1, 2), (0, 3), (0, 1)):
        with made(rank, world) as feed, pytest.raises(ValueError, match=r"rank 0 of 2.*save a state on every rank"):
            feed.load_state_dict(states[0])
    for rank in (0, 1):
        with made(rank) as feed:
            feed.load_state_dict(states[rank])
            seen += taken(iter(feed))
    assert sorted(item for item, _ in seen) == [1, 3, 5, *range(6, 12)]
    with made(1, 3) as feed:
        feed.load_state_dict(before)  # from between two epochs


@pytest.mark.parametrize("wrong", [{"world": 0}, {"world": "x"}, {"world": -1}, {"inside": 1}, {"rank": "x"}])
def test_a_state_with_impossible_numbers_is_refused(wrong: dict[str, Any]) -> None:
    """It would be misread silently."""
    with Feed(range(20), load, batch_size=2, num_workers=0) as feed:
        state = feed.state_dict() | wrong
        with pytest.raises(ValueError, match="this state is broken"):
            feed.load_state_dict(state)


def test_a_batch_that_an_interrupt_kept_from_the_consumer_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever saves after Ctrl-C would lose it."""
    with Feed(range(20), load, batch_size=2, num_workers=0) as feed:
        batches = iter(feed)
        next(batches)
        launched = feed._launched
        assert launched is not None

        def interrupted(*_: object) -> Any:
            raise KeyboardInterrupt

        monkeypatch.setattr(type(launched.layout.spec), "build", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        assert feed.state_dict()["position"] == 2


@each_crew
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("collate_fn", [None, "list"])
def test_a_state_from_the_middle_of_an_item_goes_on_there_in_batches_of_whole_items(
    crew: str, begun: bool, collate_fn: str | None
) -> None:
    """A feed that is at work, with batches of whole items, would give the first samples of that item twice."""

    def load(i: int) -> Any:
        return iter([i * 10, i * 10 + 1])

    options: dict[str, Any] = {"samples_per_item": 2, "collate_fn": collate_fn}
    with feed_of(crew, range(8), load, batch_size=3, **options) as feed:
        epoch = iter(feed)
        assert list(map(int, next(epoch))) == [0, 1, 10]
        state = feed.state_dict()
        rest = [int(sample) for batch in epoch for sample in batch]
    assert rest[0] == 11
    with feed_of(crew, range(8), load, batch_size=4, **options) as feed:
        if begun:
            next(iter(feed))
        feed.load_state_dict(state)
        assert [int(sample) for batch in feed for sample in batch] == rest
        assert sum(len(batch) for batch in feed) == 16
