"""Laws of the order: every item once, the same for everybody, and a shuffle that deserves the name.

All statistics use fixed keys: they give the same numbers in every run.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import isqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock._core.order import Order, Permutation, Window, _table, mix, rng_for, windowed

words = st.integers(-(2**63), 2**63 - 1)
LARGE = 10**12


# ------------------------------------------------------------------------------------------------------------------ mix


def test_the_hash_never_changes() -> None:
    """A saved state of years ago resumes at the same sample."""
    assert mix() == 0
    assert mix(0) == 0xE220A8397B1DCDAF  # the first output of splitmix64 with seed 0, as published
    assert mix(1, 2, 3) == 0xD0734750FDE362B3
    assert mix(-1) == mix(2**64 - 1)


@given(st.lists(words, min_size=1, max_size=4), st.lists(words, min_size=1, max_size=20))
def test_arrays_and_ints_hash_alike(first: list[int], last: list[int]) -> None:
    """The vectorised path and the plain one may be used in turn."""
    array = mix(*first, np.array(last))
    assert array.dtype == np.uint64
    assert array.tolist() == [mix(*first, word) for word in last]


def test_flipping_any_bit_of_any_word_flips_half_of_the_hash() -> None:
    """Seeds 1 and 2, or epochs 0 and 1, have nothing in common."""
    for place in range(2):
        for bit in range(64):
            args = [np.arange(2000), np.arange(2000)]
            before = mix(*args)
            args[place] = args[place] ^ (np.int64(1) << np.int64(bit))
            flipped = np.unpackbits((before ^ mix(*args)).view(np.uint8)).mean() * 64
            assert 31 < flipped < 33, (place, bit)


def test_the_hash_leaves_its_arguments_alone() -> None:
    """It works in place inside; a caller's array of indices must not change."""
    array = np.arange(5, dtype=np.uint64)
    mix(3, array)
    mix(array)
    assert array.tolist() == [0, 1, 2, 3, 4]


# ---------------------------------------------------------------------------------------------------------- permutation


@pytest.mark.parametrize("n", [1, 2, 3, 1000, 65_535, 65_536, 65_537, 70_001, 262_144, 1_000_003])
def test_a_permutation_gives_everything_once(n: int) -> None:
    """An item that came twice would push out another one, unnoticed."""
    assert np.array_equal(np.sort(Permutation(n, 7)(np.arange(n))), np.arange(n))


@given(st.integers(1, 300_000), words, st.data())
def test_a_permutation_can_be_asked_anywhere(n: int, key: int, data: st.DataObject) -> None:
    """A batch does not depend on what was asked before, in which order, or in which shape."""
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=30))
    perm = Permutation(n, key)
    together = perm(np.array(positions))
    assert together.dtype == np.int64
    assert together.tolist() == [int(perm(np.array([position]))[0]) for position in positions]
    assert perm(np.array([positions, positions])).tolist() == [together.tolist()] * 2
    assert len(set(together.tolist())) == len(set(positions))


@given(st.integers(2**16 + 1, 2**63 - 1), words)
def test_huge_permutations_stay_inside_and_do_not_collide(n: int, key: int) -> None:
    """A trillion items are permuted without a table, and without leaving the range."""
    positions = np.unique(np.array([*range(100), *range(n // 2, n // 2 + 100), *range(n - 100, n)], np.int64))
    result = Permutation(n, key)(positions)
    assert result.min() >= 0
    assert result.max() < n
    assert np.unique(result).size == positions.size


def test_permutations_never_change() -> None:
    """An interrupted epoch goes on after an upgrade of numpy or Penstock where it stopped."""
    first = np.arange(5)
    assert Permutation(10, 1)(first).tolist() == [8, 6, 9, 0, 7]
    assert Permutation(100_000, 1)(first).tolist() == [9455, 27591, 92282, 49566, 10527]
    assert Permutation(300_000, 1)(first).tolist() == [133930, 73264, 85805, 38592, 16846]
    assert Permutation(LARGE, 1)(first).tolist() == [
        44428296633,
        159799064549,
        301979121016,
        427802877343,
        438202864918,
    ]


@pytest.mark.parametrize("positions", [[-1], [10], [0, 10]])
def test_positions_outside_are_refused(positions: list[int]) -> None:
    """Walking a cycle from outside of the range would give somebody else's item."""
    with pytest.raises(IndexError, match="not all within the 10"):
        Permutation(10, 0)(np.array(positions))


def test_no_position_is_fine_even_without_items() -> None:
    """The tail of an epoch and an empty folder need no special case."""
    assert Permutation(0, 0)(np.empty(0, np.int64)).tolist() == []
    with pytest.raises(ValueError, match="cannot permute -1"):
        Permutation(-1, 0)


# What a chi-square with 63 degrees of freedom exceeds once in a million, and falls below as often: 63 +- 5 sigma or so.
LOW, HIGH = 24.0, 128.0


def chi_square(values: NDArray[np.int64], n: int) -> float:
    counts = np.bincount(values * 64 // n, minlength=64)
    expected = np.diff(np.ceil(np.arange(65) * n / 64)) * values.size / n
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("n", [70_001, 1_000_003])
@pytest.mark.parametrize("key", range(3))
def test_large_shuffles_have_no_structure(n: int, key: int) -> None:
    """Neighbours, and positions that share a half of the network's pair, land independently of each other."""
    result = Permutation(n, key)(np.arange(n))
    a = isqrt(n - 1) + 1
    b = -(-n // a)
    for stride in (1, 2, a, b, 2 * b, a + 1, b - 1):
        assert LOW < chi_square((result[stride:] - result[:-stride]) % n, n) < HIGH, stride
    crossed = result[1 + b :] - result[b:-1] - result[1:-b] + result[: -1 - b]
    assert LOW < chi_square(crossed % n, n) < HIGH
    for part in np.array_split(result, 10):
        # Drawn without replacement, hence a little more even than independent draws.
        assert LOW - 6 < chi_square(part, n) < HIGH
    assert abs(np.corrcoef(np.arange(n), result)[0, 1]) < 5 / np.sqrt(n)


@pytest.mark.parametrize("n", [6_000, 70_001])
def test_any_position_lands_anywhere(n: int) -> None:
    """Over many epochs, the first batch is a fair sample of all items."""
    keys = 800 if n > 65_536 else 400
    landed = np.array([Permutation(n, mix(5, key))(np.array([0, 1, n // 2, n - 1])) for key in range(keys)])
    for column in landed.T:
        assert LOW - 6 < chi_square(column, n) < HIGH


@pytest.mark.parametrize("n", [60_000, 70_001])
def test_about_one_item_stays_in_place(n: int) -> None:
    """A shuffle has one fixed point on average, and a variance of one."""
    fixed = np.array([(Permutation(n, key)(np.arange(n)) == np.arange(n)).sum() for key in range(100)])
    assert 0.6 < fixed.mean() < 1.4
    assert 0.5 < fixed.var() < 1.7


def test_keys_that_differ_by_one_give_unrelated_permutations() -> None:
    """Epochs follow each other by one."""
    n = 70_001
    one, two = (Permutation(n, key)(np.arange(n)) for key in (1, 2))
    assert LOW < chi_square((one - two) % n, n) < HIGH
    assert (one == two).sum() < 10


# ---------------------------------------------------------------------------------------------------------------- order

orders = st.builds(
    Order,
    st.integers(0, 400),
    shuffle=st.booleans(),
    seed=words,
    epoch=st.integers(0, 1000),
    world=st.integers(1, 9),
    drop=st.booleans(),
)


def walk(order: Order) -> list[int]:
    return list(map(int, order.indices(0, len(order))))


def ranks(order: Order) -> Iterator[Order]:
    for rank in range(order.world):
        yield Order(order.length, order.shuffle, order.seed, order.epoch, rank, order.world, order.drop)


def whole(order: Order) -> list[int]:
    return walk(Order(order.length, order.shuffle, order.seed, order.epoch))


@given(orders)
def test_ranks_cover_everything_and_share_only_the_padding(order: Order) -> None:
    """The world as a whole sees each item once; padding repeats the start, dropping leaves out the end."""
    dealt = [index for places in zip(*map(walk, ranks(order)), strict=True) for index in places]
    sequence = whole(order)
    assert sorted(sequence) == list(range(order.length))
    if order.drop:
        assert dealt == sequence[: order.length // order.world * order.world]
    else:
        padding = -order.length % order.world
        assert dealt == (sequence + sequence * order.world)[: order.length + padding]


@given(orders, st.lists(st.integers(0, 450), max_size=8))
def test_any_chunking_gives_the_same_order(order: Order, cuts: list[int]) -> None:
    """Batch size, workers and interruptions do not move items."""
    edges = [0, *sorted(cuts), len(order)] if not cuts or max(cuts) <= len(order) else [0, *sorted(cuts)]
    pieces = [order.indices(start, stop) for start, stop in pairwise(edges)]
    assert np.concatenate(pieces).tolist() == walk(order)[: edges[-1]]
    assert all(piece.dtype == np.int64 for piece in pieces)


@given(orders, st.integers(1, 9), st.integers(1, 9))
def test_another_world_size_goes_on_with_the_same_epoch(order: Order, before: int, after: int) -> None:
    """What ``before`` ranks saw in k steps is a prefix of the epoch, so ``after`` ranks can go on behind it."""
    sequence = whole(order)
    for world in (before, after):
        steps = order.length // world // 2
        seen = [
            Order(order.length, order.shuffle, order.seed, order.epoch, rank, world).indices(0, steps).tolist()
            for rank in range(world)
        ]
        assert [index for step in zip(*seen, strict=True) for index in step] == sequence[: steps * world]


@pytest.mark.parametrize("n", [100, 20_000, 200_000, 300_000])
def test_an_order_that_was_prepared_is_the_same(n: int) -> None:
    """The table is made by a thread while the epoch before is read: nobody sees that, but for the time it takes."""
    alone = [Permutation(n, mix(1, 7, epoch))(np.arange(n)) for epoch in range(3)]
    _table.cache_clear()
    for epoch in range(3):
        order = Order(n, True, seed=7, epoch=epoch)
        order.prepare_next()
        order.prepare_next()
        assert np.array_equal(order.indices(0, n), alone[epoch])
    for seed in range(5):  # nobody comes for these
        Order(n, True, seed=seed, epoch=1).prepare_next()


def test_epochs_and_seeds_differ() -> None:
    """Every pass sees the items in a new order, and so does every run with another seed."""
    seen = {tuple(walk(Order(50, True, seed, epoch))) for seed in range(30) for epoch in range(30)}
    assert len(seen) == 900


def test_without_shuffle_items_come_as_listed() -> None:
    """Nothing moves unless asked to."""
    assert walk(Order(7)) == list(range(7))
    assert walk(Order(7, seed=3, epoch=9)) == list(range(7))
    assert walk(Order(5, rank=1, world=3)) == [1, 4]
    assert walk(Order(5, rank=2, world=3)) == [2, 0]
    assert walk(Order(5, rank=2, world=3, drop=True)) == [2]


@given(st.booleans(), st.booleans(), st.integers(1, 4))
def test_no_items_give_an_empty_order(shuffle: bool, drop: bool, world: int) -> None:
    """An empty folder is an empty epoch on every rank."""
    order = Order(0, shuffle, world=world, drop=drop)
    assert len(order) == 0
    assert order.indices(0, 10).tolist() == []


def test_more_ranks_than_items_still_walk_alike() -> None:
    """Each rank gets as many positions as the others, or the job would hang in its first collective operation."""
    assert [walk(Order(2, rank=rank, world=5)) for rank in range(5)] == [[0], [1], [0], [1], [0]]


def test_a_trillion_items_are_shuffled_at_once() -> None:
    """No list of the items' numbers is ever made."""
    order = Order(LARGE, True, world=7, rank=3)
    assert len(order) == -(-LARGE // 7)
    tail = order.indices(len(order) - 256, len(order))
    assert np.unique(tail).size == 256
    assert 0 <= tail.min() <= tail.max() < LARGE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": -1}, "length=-1 is not a number of items"),
        ({"length": 5, "rank": 2, "world": 2}, "rank 2 of 2 does not exist"),
        ({"length": 5, "rank": -1}, "rank -1 of 1 does not exist"),
        ({"length": 5, "world": 0}, "rank 0 of 0 does not exist"),
    ],
)
def test_an_impossible_order_is_refused(arguments: dict[str, Any], message: str) -> None:
    """A wrong shard fails where it was given, not as a wrong set of items."""
    with pytest.raises(ValueError, match=message):
        Order(**arguments)
    with pytest.raises(ValueError, match="before the first"):
        Order(5).indices(-1, 3)


# --------------------------------------------------------------------------------------------------------------- window


@given(st.lists(st.integers(), max_size=60), st.integers(1, 70), words, st.integers(0, 100))
def test_a_window_gives_every_item_of_the_stream_once(items: list[int], size: int, seed: int, epoch: int) -> None:
    """Nothing stays behind in the window, nothing comes twice, and it is the same every time."""
    out = list(windowed(items, size, seed=seed, epoch=epoch))
    assert sorted(out) == sorted(items)
    assert out == list(windowed(iter(items), size, seed=seed, epoch=epoch))


@given(st.integers(0, 60), st.integers(1, 70), words)
def test_a_window_pulls_no_further_than_it_must(length: int, size: int, seed: int) -> None:
    """A stream is read only as far ahead as the window is large, one item for each that was given."""
    pulled = 0

    def stream() -> Iterator[int]:
        nonlocal pulled
        for item in range(length):
            pulled += 1
            yield item

    given = 0
    for item in windowed(stream(), size, seed=seed, epoch=0):
        given += 1
        assert pulled <= size + given - 1
        assert item < pulled
    assert given == pulled == length


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 70), st.integers(0, 200), words)
def test_a_window_of_bytes_holds_no_more_than_it_may(items: list[int], size: int, most: int, seed: int) -> None:
    """Large items make it smaller, down to one; all come once, and the same way every time."""
    pulled = 0

    def stream() -> Iterator[int]:
        nonlocal pulled
        for item in items:
            pulled += item
            yield item

    def draw() -> Window[int]:
        return windowed(stream(), size, seed=seed, epoch=0, weigh=int, most_bytes=most)

    window = draw()
    out: list[int] = []
    for item in window:
        held = pulled - sum(out)  # with the one that was just drawn, which the caller has now
        assert held <= max(most - 1, 0) + 50
        assert window.held_bytes == held
        out.append(item)
    assert sorted(out) == sorted(items)
    assert out == list(draw())
    assert list(windowed(items, size, seed=seed, epoch=0, weigh=int, most_bytes=10**9)) == list(
        windowed(items, size, seed=seed, epoch=0)
    )


def test_a_window_works_on_endless_streams() -> None:
    """The stream's end is not needed to begin."""

    def endless() -> Iterator[int]:
        item = 0
        while True:
            yield item
            item += 1

    window = windowed(endless(), 10, seed=0, epoch=0)
    out = [next(window) for _ in range(1000)]
    assert len(set(out)) == 1000
    assert max(out) < 1009


def test_a_window_of_one_keeps_the_order_and_a_large_one_permutes_fully() -> None:
    """The size of the window is how far items move; epochs and seeds move them differently."""
    assert list(windowed(range(20), 1, seed=1, epoch=1)) == list(range(20))
    seen = {tuple(windowed(range(30), 30, seed=seed, epoch=epoch)) for seed in range(10) for epoch in range(10)}
    assert len(seen) == 100
    first = np.array([next(windowed(range(64), 64, seed=seed, epoch=0)) for seed in range(6400)])
    assert LOW < chi_square(first, 64) < HIGH


def test_a_window_of_none_is_refused_at_once() -> None:
    """The error comes where the window is made, not at the first item."""
    with pytest.raises(ValueError, match="window of 0 items"):
        windowed([1, 2], 0, seed=0, epoch=0)


def test_an_error_of_the_stream_passes_through_the_window() -> None:
    """A broken stream is not taken for its end."""

    def broken() -> Iterator[int]:
        yield 1
        yield 2
        raise OSError("gone")

    window = windowed(broken(), 1, seed=0, epoch=0)
    assert [next(window), next(window)] == [1, 2]
    with pytest.raises(OSError, match="gone"):
        next(window)


# ------------------------------------------------------------------------------------------------------------------ rng


def test_a_sample_has_its_own_randomness() -> None:
    """Same (seed, epoch, sample), same numbers; anything else, other numbers."""
    keys = [(seed, epoch, index) for seed in (0, 1, -5) for epoch in range(5) for index in range(20)]
    draws = {tuple(rng_for(*key).integers(0, 2**62, 4).tolist()) for key in keys}
    assert len(draws) == len(keys)
    assert all(rng_for(*key).random() == rng_for(*key).random() for key in keys)


def test_children_of_a_samples_generator_are_reproducible_too() -> None:
    """A load that spawns generators for its steps is as deterministic as one that does not."""
    one, two = (rng_for(1, 2, 3).spawn(2) for _ in range(2))
    assert [g.random() for g in one] == [g.random() for g in two]


def test_first_draws_over_the_samples_are_uniform() -> None:
    """Neighbouring samples are not augmented alike."""
    draws = np.array([rng_for(0, 0, index).random() for index in range(6400)])
    assert LOW < chi_square((draws * 10**9).astype(np.int64), 10**9) < HIGH
    assert abs(np.corrcoef(draws[1:], draws[:-1])[0, 1]) < 5 / np.sqrt(draws.size)
