"""From a filled slot to the batch in the user's hands, and the lease that says when the slot is free.

Runs in the parent.

A lease is a ctypes array over the slot: every numpy view, view of a view and torch tensor of the batch keeps it
alive, and its weak reference fires when the last one is gone. A finalizer on a batch array itself would be wrong:
numpy lets views point past it to whatever owns the memory.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import optree

from penstock._core.fill import Packed
from penstock._core.layout import Layout, array_at
from penstock._core.spec import Array, load_tree

__all__ = ["Assembler", "Lease", "Leases", "Texts", "Trees", "nbytes_of", "packed_batch", "rows_batch"]

Texts = list[tuple[int, int, bytes]]
Convert = Callable[[Array], Any]


class Lease(weakref.ref[Any]):
    """The weak reference that fires when the last view of a batch is gone."""

    __slots__ = ("slot",)
    slot: int


class Leases:
    """The leases of one arena: each puts itself into ``freed`` when it ends, in whatever thread dropped the batch.

    ``kick`` is called after that, for feeds with so few slots that one must be filled again at once. All others do
    without: a callback that is C alone can neither be interrupted by Ctrl-C, which would be lost there, nor cost time.
    """

    def __init__(self, freed: deque[Lease], kick: weakref.WeakMethod[Callable[[], None]] | None) -> None:
        # Neither keeps the engine: one that is dropped while batches are alive must be collected all the same.
        self._ended: Callable[[Lease], None] = freed.append if kick is None else partial(_over, freed, kick)
        self._held: dict[int, Lease] = {}

    def take(self, slot: int, mapping: Any, start: int, size: int) -> Any:
        """Memory of a slot whose last reference ends the lease."""
        memory = (ctypes.c_char * size).from_buffer(mapping, start)
        lease = Lease(memory, self._ended)
        lease.slot = slot
        self._held[slot] = lease  # a weak reference that nobody holds never fires
        return memory


def _over(freed: deque[Lease], kick: weakref.WeakMethod[Callable[[], None]], lease: Lease) -> None:
    freed.append(lease)
    if (kicked := kick()) is not None:
        kicked()


def rows_batch(layout: Layout, memory: Any, start: int, rows: int, texts: Texts, convert: Convert | None) -> list[Any]:
    """The leaves of a batch of rows: arrays over the slot, lists of str or bytes."""
    columns = layout.arrays(memory, start)
    leaves: list[Any] = []
    at = 0
    for leaf in layout.spec.leaves:
        if leaf.kind == "array":
            column = columns[at][:rows]
            leaves.append(column if convert is None else convert(column))
            at += 1
        else:
            long = {row: data for row, column_at, data in texts if column_at == at}
            lengths, cells = columns[at][:rows].tolist(), columns[at + 1]
            width = leaf.shape[0]
            # The row of an item that is left out has the length of whatever stood there before, and no text.
            data = [long.get(i, b"") if n > width else cells[i, :n].tobytes() for i, n in enumerate(lengths)]
            leaves.append([d.decode("utf-8", "surrogatepass") for d in data] if leaf.kind == "str" else data)
            at += 2
    return leaves


class Trees:
    """Trees that workers sent, by their bytes: the same few come again and again."""

    def __init__(self) -> None:
        self._known: dict[bytes, optree.PyTreeSpec] = {}

    def get(self, data: bytes) -> optree.PyTreeSpec:
        """The tree of these bytes."""
        if (tree := self._known.get(data)) is None:
            if len(self._known) > 256:
                self._known.clear()
            tree = self._known[data] = load_tree(data)
        return tree


def packed_batch(packed: Packed, trees: Trees, memory: Any, start: int, convert: Convert | None, *, copy: bool) -> Any:
    """The batch that a collate function made, as arrays over the slot (or copies of them)."""
    leaves: list[Any] = []
    for kind, dtype, shape, offset in packed.leaves:
        array = array_at(memory, start + offset, shape, dtype)
        if kind == "array":
            if copy:
                array = array.copy()
            leaves.append(array if convert is None else convert(array))
        elif kind == "generic":
            leaves.append(array.copy()[()] if convert is None else convert(array.copy()))
        elif kind == "scalar":
            leaves.append(array[()].item())
        elif kind == "lines":
            leaves.append(array.tobytes().decode("utf-8", "surrogatepass").split("\n"))
        else:
            data = array.tobytes()
            leaves.append(data.decode("utf-8", "surrogatepass") if kind == "str" else data)
    return optree.tree_unflatten(trees.get(packed.tree), leaves)


def nbytes_of(leaves: Sequence[Any]) -> int:
    """Bytes of the arrays and texts among these leaves."""
    total = 0
    for leaf in leaves:
        size = getattr(leaf, "nbytes", None)
        if size is not None:
            total += int(size)
        elif isinstance(leaf, list):
            total += sum(len(value) if isinstance(value, str | bytes) else _tree_bytes(value) for value in leaf)
    return total


def _tree_bytes(sample: Any) -> int:
    """What a sample takes that waits to be collated, as far as its arrays and texts go."""
    size = getattr(sample, "nbytes", None)
    if size is not None:
        return int(size)
    if isinstance(sample, dict):
        sample = list(sample.values())
    return nbytes_of([list(sample)]) if isinstance(sample, list | tuple) else 8


class Assembler:
    """Puts batches together from pieces of any size, by copying.

    For what cannot be given its place beforehand: items with any number of samples, and everything after an item that
    was skipped. A piece is a list of leaves, each an array of rows or a list of values; its rows go straight to where
    they are handed out.
    """

    def __init__(self) -> None:
        self._batches: deque[tuple[list[Any], int]] = deque()  # leaves, how many rows they have by now
        self._held = 0

    def __len__(self) -> int:
        return self._held

    @property
    def nbytes(self) -> int:
        """Memory of the batches that are here, full or not."""
        return sum(nbytes_of(leaves) for leaves, _ in self._batches)

    @property
    def text_bytes(self) -> int:
        """What of that is texts, which no slot has room for."""
        return sum(nbytes_of([leaf for leaf in leaves if isinstance(leaf, list)]) for leaves, _ in self._batches)

    def add(self, leaves: list[Any], chosen: Sequence[int] | None, rows: int, size: int) -> None:
        """Copy these rows, or the ``chosen`` ones of them, into batches of ``size`` rows."""
        at, rows = 0, rows if chosen is None else len(chosen)
        self._held += rows
        while at < rows:
            if not self._batches or self._batches[-1][1] == size:
                self._batches.append(([_room(leaf, size) for leaf in leaves], 0))
            batch, filled = self._batches[-1]
            taken = min(rows - at, size - filled)
            part = slice(at, at + taken) if chosen is None else chosen[at : at + taken]
            for there, leaf in zip(batch, leaves, strict=True):
                if isinstance(leaf, list):
                    there.extend(leaf[part] if isinstance(part, slice) else [leaf[i] for i in part])
                else:
                    there[filled : filled + taken] = leaf[part]
            self._batches[-1] = (batch, filled + taken)
            at += taken

    def cut(self) -> list[Any]:
        """The leaves of the next batch; of the last one so many rows as there are."""
        leaves, rows = self._batches.popleft()
        self._held -= rows
        return [leaf if len(leaf) == rows else leaf[:rows].copy() for leaf in leaves]


def _room(leaf: Any, rows: int) -> Any:
    return [] if isinstance(leaf, list) else np.empty((rows, *leaf.shape[1:]), leaf.dtype)
