"""Where the bytes lie: no two columns share one, large ones start on pages, and the size is what the plan counted."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock._core.layout import LINE, PAGE, Layout, aligned, array_at, offsets, slot_bytes
from penstock._core.spec import Spec, row_bytes

rows_of = st.integers(1, 300)
sizes = st.lists(st.integers(0, 9000), min_size=1, max_size=6)

dtypes = st.sampled_from(["bool", "uint8", "int16", "float16", "int32", "float32", "int64", "float64", "complex128"])
shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
leaves = st.one_of(
    st.builds(np.zeros, shapes, dtypes),
    st.text(max_size=80),
    st.binary(max_size=80),
    st.integers(-(2**31), 2**31),
    st.floats(),
    st.booleans(),
)
samples = st.one_of(
    leaves,
    st.lists(leaves, min_size=1, max_size=4).map(tuple),
    st.dictionaries(st.text(), leaves, min_size=1, max_size=4),
)


@given(st.integers(0, 2**40))
def test_what_follows_starts_well(size: int) -> None:
    """On a page after large things, on a cache line after small ones, and never more than that is lost."""
    end = aligned(size)
    assert end >= size
    assert end - size < (PAGE if size >= PAGE else LINE)
    assert end % (PAGE if size >= PAGE else LINE) == 0


@given(sizes, rows_of)
def test_regions_follow_each_other_without_overlap(row_sizes: list[int], rows: int) -> None:
    """Two leaves that shared a byte would corrupt each other in every batch."""
    starts = offsets(row_sizes, rows)
    assert len(starts) == len(row_sizes) + 1
    for (start, end), row in zip(pairwise(starts), row_sizes, strict=True):
        assert start + row * rows <= end
        assert start % LINE == 0
        if row * rows >= PAGE:
            assert start % PAGE == 0
    assert starts[-1] % PAGE == 0
    assert starts[-1] >= PAGE


@given(sizes, rows_of)
def test_a_slot_wastes_less_than_two_pages_a_leaf(row_sizes: list[int], rows: int) -> None:
    """The budget pays for what lies between."""
    assert slot_bytes(row_sizes, rows) - sum(row_sizes) * rows <= 2 * PAGE * (len(row_sizes) + 1)


@given(sizes, st.integers(1, 299))
def test_more_rows_never_take_less(row_sizes: list[int], rows: int) -> None:
    """The plan searches for the largest batch by halving: sizes must not jump back."""
    assert slot_bytes(row_sizes, rows) <= slot_bytes(row_sizes, rows + 1)


@given(samples, st.integers(1, 40))
def test_the_layout_takes_what_the_plan_counted(sample: Any, rows: int) -> None:
    """Plan and arena agree to the byte, or the budget does not hold."""
    spec = Spec.of(sample)
    layout = Layout.of(spec, rows)
    assert layout.nbytes == slot_bytes([row_bytes(leaf) for leaf in spec.leaves], rows)
    assert len(layout.columns) == sum(1 if leaf.kind == "array" else 2 for leaf in spec.leaves)


@given(samples, st.integers(1, 40), st.integers(0, 3))
def test_no_byte_belongs_to_two_columns(sample: Any, rows: int, slot: int) -> None:
    """Each column is filled with a number of its own; all are there afterwards, and nothing outside was touched."""
    layout = Layout.of(Spec.of(sample), rows)
    memory = bytearray(b"\xee" * (5 * layout.nbytes))
    columns = layout.arrays(memory, slot * layout.nbytes)
    for number, column in enumerate(columns, 1):
        column.view(np.uint8).reshape(-1)[:] = number
    for number, column in enumerate(columns, 1):
        assert (column.view(np.uint8) == number).all()
        assert column.shape[0] == rows
        assert column.flags.c_contiguous
        assert column.flags.writeable
    start = slot * layout.nbytes
    assert set(memory[:start]) <= {0xEE}
    assert set(memory[start + layout.nbytes :]) <= {0xEE}


def test_rows_of_a_large_leaf_start_on_a_page() -> None:
    """A kernel copy into memory that is off by 16 bytes runs at a third of the speed."""
    layout = Layout.of(Spec.of((1, np.zeros((512, 512), np.float32), "name", np.zeros((3, 1024), np.float32))), 4)
    assert [column.offset % PAGE for column in layout.columns if column.shape[1:] in ((512, 512), (3, 1024))] == [0, 0]


def test_a_column_has_a_row_per_sample() -> None:
    """The arrays of a batch are these columns."""
    layout = Layout.of(Spec.of({"x": np.zeros((2, 3), np.float32), "y": 1}), 5)
    assert [(c.shape, c.dtype.name) for c in layout.columns] == [((5, 2, 3), "float32"), ((5,), "int64")]


def test_a_text_has_a_length_and_a_cell() -> None:
    """Texts lie in cells of a fixed size; the true length stands beside."""
    layout = Layout.of(Spec.of("a name"), 8)
    lengths, cells = layout.columns
    assert (lengths.shape, lengths.dtype.name) == ((8,), "int32")
    assert (cells.shape, cells.dtype.name) == ((8, 64), "uint8")


def test_an_array_keeps_its_memory_alive() -> None:
    """Otherwise a batch would be a view of memory that is somebody else's by now."""
    memory = bytearray(PAGE)
    array = array_at(memory, 64, (4,), np.dtype(np.int32))
    with pytest.raises(BufferError):
        memory.clear()
    del array
    memory.clear()


def test_an_empty_leaf_takes_no_bytes() -> None:
    """Samples without elements are rare but right."""
    layout = Layout.of(Spec.of(np.zeros((0, 3), np.float32)), 4)
    assert layout.nbytes == PAGE
    assert layout.arrays(bytearray(PAGE))[0].shape == (4, 0, 3)
