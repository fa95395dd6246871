"""Shuffling in blocks: the order by itself, without reading anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import Blocks
from penstock._core.order import Mixing, Order

lengths = st.integers(1, 400)


@st.composite
def mixings(draw: st.DrawFn, length: int) -> Mixing:
    """Blocks of one size, or of different ones."""
    group = draw(st.integers(1, 500))
    if draw(st.booleans()):
        return Mixing(group, draw(st.integers(1, 100)))
    cuts = draw(st.sets(st.integers(1, length - 1), max_size=20)) if length > 1 else set()
    return Mixing(group, 1, np.array([0, *sorted(cuts)], np.int64))


@given(st.data(), lengths, st.integers(0, 3), st.integers(0, 3))
def test_every_item_stands_at_exactly_one_place(data: st.DataObject, length: int, seed: int, epoch: int) -> None:
    """Whatever the blocks and groups are."""
    order = Order(length, True, seed, epoch, mixing=data.draw(mixings(length)))
    assert sorted(order.indices(0, length).tolist()) == list(range(length))


@given(st.data(), lengths, st.integers(1, 4))
def test_any_part_can_be_had_at_once(data: st.DataObject, length: int, world: int) -> None:
    """From any place, on any rank: the same as when all of it is asked for."""
    mixing = data.draw(mixings(length))
    whole = Order(length, True, mixing=mixing).indices(0, length).tolist()
    base = data.draw(st.integers(0, length))
    parts = [Order(length, True, rank=rank, world=world, mixing=mixing, base=base) for rank in range(world)]
    dealt = [part.indices(0, len(part)).tolist() for part in parts]
    together = [index for row in zip(*dealt, strict=True) for index in row]
    assert together[: length - base] == whole[base:]
    start = data.draw(st.integers(0, len(parts[0])))
    assert parts[0].indices(start, length).tolist() == dealt[0][start:]


def test_a_group_is_made_of_few_blocks_and_mixes_them() -> None:
    """What is read together is what is mixed: else blocks would be read more than once."""
    mixing = Mixing(group=1000, rows=50)
    indices = Order(10_000, True, mixing=mixing).indices(0, 10_000).reshape(10, 1000)
    for group in indices:
        assert len(np.unique(group // 50)) == 20
        assert len(np.unique(group[:100] // 50)) > 15, "a hundred samples are from nearly all of the group's blocks"
    first, second = (Order(10_000, True, epoch=epoch, mixing=mixing).indices(0, 10_000) for epoch in (0, 1))
    assert (first != second).mean() > 0.99


def test_cuts_tell_where_another_block_begins() -> None:
    """One task for each block."""
    indices = np.array([0, 1, 9, 10, 11, 25], np.int64)
    assert Mixing(100, 10).cuts(indices).tolist() == [3, 5]
    assert Mixing(100, 1, np.array([0, 9, 20], np.int64)).cuts(indices).tolist() == [2, 5]


@pytest.mark.parametrize(
    "wrong",
    [{"size": 0.5}, {"size": "x"}, {"size": "1 MiB", "rows": 3}, {"rows": 0}, {"rows": 1.5}, {"group": 0}],
)
def test_blocks_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    """At once, where they are written down."""
    with pytest.raises((ValueError, TypeError)):
        Blocks(**wrong)


def test_the_size_of_a_block_in_items() -> None:
    """Given in items, in bytes, or not at all; never none."""
    assert Blocks(rows=7).rows_of(1000) == 7
    assert Blocks(size="1 MiB").rows_of(1024) == 1024
    assert Blocks().rows_of(192 * 1024) == 21
    assert Blocks(size=10).rows_of(1000) == 1
