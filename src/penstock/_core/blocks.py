"""What a user may say about shuffling in blocks; how it is done is ``order``'s. Pure."""

from __future__ import annotations

import dataclasses
from typing import Final

from penstock._core.budget import Size, parse_size

__all__ = ["Blocks"]

# A read of this size takes a disk long against finding the place, and a group still holds dozens of them.
BLOCK_BYTES: Final = 4 * 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """For ``shuffle``: read blocks of neighbours in random order, and mix as many of them as the budget allows.

    For storage where neighbours are cheap: shards, memory maps, one big file, a spinning disk, a network. ``size`` is
    that of a block, in bytes or as "4 MiB"; ``rows`` says it in items instead. A source that has blocks of its own (row
    groups, shards) is read by those unless one of them is given. ``group`` is how many items are mixed at a time: if
    it is not given, as many as about a third of the budget holds, and then the order depends on the budget, but not on
    the workers: more of them than fit beside it are refused.
    """

    size: int | str | None = None
    rows: int | None = None
    group: int | None = None

    def __post_init__(self) -> None:
        if self.size is not None:
            if self.rows is not None:
                raise ValueError("Blocks takes size (bytes) or rows (items), not both")
            if isinstance(self.size, float):
                raise ValueError(f'Blocks(size={self.size!r}) is a share of nothing: give bytes, or a text as "4 MiB"')
            try:
                parse_size(self.size, available=1)
            except ValueError as error:
                raise ValueError(f'Blocks(size={self.size!r}) is no size: give bytes, or a text as "4 MiB"') from error
        for name in ("rows", "group"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"Blocks({name}={value!r}) must be 1 or more items")

    @property
    def cut(self) -> str:
        """How the items are cut into blocks, in words that tell one way from another."""
        if self.rows is not None:
            return f"blocks of {self.rows} items"
        return "blocks" if self.size is None else f"blocks of {parse_size(self.size, available=1)} bytes"

    def rows_of(self, sample_bytes: int) -> int:
        """Items of a block, for samples of this size."""
        if self.rows is not None:
            return self.rows
        size: Size = BLOCK_BYTES if self.size is None else self.size
        return max(1, parse_size(size, available=1) // max(1, sample_bytes))
