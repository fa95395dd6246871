"""Where the bytes of a batch lie in a slot. Pure arithmetic, plus numpy views over memory that is given.

Each leaf has a region of its own, so that a batch is one contiguous array per leaf and rows can be written by
different workers. A region of a page or more starts on a page: a kernel copy into memory that is off by 16
bytes from its source runs at a third of the speed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from penstock._core.spec import Array, Spec, row_bytes

__all__ = ["LINE", "PAGE", "Column", "Layout", "aligned", "array_at", "offsets", "slot_bytes"]

PAGE: Final = 4096
LINE: Final = 64  # a cache line: no two workers write to the same one except at the edges of their rows


def aligned(size: int) -> int:
    """Size rounded up so that whatever follows starts well: on a page after large things, on a line after small."""
    unit = PAGE if size >= PAGE else LINE
    return -(-size // unit) * unit


def offsets(leaf_row_bytes: Sequence[int], rows: int) -> list[int]:
    """Where each leaf's region starts, and last where the slot ends (whole pages, at least one)."""
    starts = []
    end = 0
    for row in leaf_row_bytes:
        size = row * rows
        if size >= PAGE:
            end = -(-end // PAGE) * PAGE
        starts.append(end)
        end += aligned(size)
    starts.append(max(PAGE, -(-end // PAGE) * PAGE))
    return starts


def slot_bytes(leaf_row_bytes: Sequence[int], rows: int) -> int:
    """Bytes of a slot that holds ``rows`` samples with these bytes per leaf; whole pages."""
    return offsets(leaf_row_bytes, rows)[-1]


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """One contiguous array of a slot: a row per sample."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """The columns of a slot: one for an array leaf, two for a text leaf (lengths, cells)."""

    spec: Spec
    rows: int
    columns: tuple[Column, ...]
    nbytes: int

    @classmethod
    def of(cls, spec: Spec, rows: int) -> Layout:
        """The layout of ``rows`` samples of this spec."""
        columns = []
        starts = offsets([row_bytes(leaf) for leaf in spec.leaves], rows)
        for leaf, start in zip(spec.leaves, starts[:-1], strict=True):
            cells = start
            if leaf.kind != "array":
                columns.append(Column(start, (rows,), np.dtype(np.int32)))
                cells += 4 * rows
            columns.append(Column(cells, (rows, *leaf.shape), leaf.stored))
        return cls(spec, rows, tuple(columns), starts[-1])

    @property
    def has_texts(self) -> bool:
        """Whether some of it may lie elsewhere: texts that are larger than their cells."""
        return len(self.columns) > len(self.spec.leaves)

    def arrays(self, memory: Any, offset: int = 0) -> list[Array]:
        """The columns as arrays over ``memory``; they keep its exporter alive."""
        return [array_at(memory, offset + c.offset, c.shape, c.dtype) for c in self.columns]


def array_at(memory: Any, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An array over part of ``memory``."""
    count = math.prod(shape)
    if count == 0:
        return np.empty(shape, dtype)
    return np.frombuffer(memory, dtype, count, offset).reshape(shape)
