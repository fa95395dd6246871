"""Sources: data that knows its own items and reads many of them at once.

A source lives in the parent; its reader is what travels to a worker (small: a file's name, never its content).
``arrays`` is here; the sources for file formats have files of their own.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
from collections.abc import Sequence
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import optree

from penstock._core import machine
from penstock._core.errors import SpecError, shown
from penstock._core.spec import Array, Leaf, Spec, as_array, flatten, store

__all__ = ["Arrays", "Reader", "Scatters", "Source", "arrays"]

Indices = npt.NDArray[np.int64]

MOST_PIECES: Final = 1024  # the kernel's limit for one read


class Reader(Protocol):
    """Reads samples by their indices, wherever it is; picklable if the source is not in memory."""

    def read_into(self, indices: Indices, out: Sequence[Array], leaves: Sequence[Leaf]) -> None:
        """Write the samples into rows of the slot: ``out`` has one array per leaf, a row per index."""

    def read(self, indices: Indices) -> list[Any]:
        """The samples themselves, for a load function that goes on from there."""


@runtime_checkable
class Scatters(Protocol):
    """A reader that can put samples which lie beside each other into rows that do not, without a copy in between."""

    def scatter(self, indices: Indices, columns: Sequence[Array], places: Indices, leaves: Sequence[Leaf]) -> None:
        """Write the samples at sorted ``indices`` into these rows of the columns."""


@runtime_checkable
class Source(Protocol):
    """Something that knows its items and how to read many of them at once."""

    in_memory: bool
    """Whether the data lies in this process: then workers elsewhere would need copies of it."""

    def __len__(self) -> int: ...

    def spec(self) -> Spec:
        """The form of a sample."""

    def reader(self) -> Reader:
        """What reads, in this process or another."""


@dataclasses.dataclass(frozen=True, slots=True)
class _InMemory:
    """Rows of an array in this process."""

    array: Array

    def rows(self, indices: Indices, out: Array) -> None:
        first, last = int(indices[0]), int(indices[-1])
        if last - first == len(indices) - 1 and _consecutive(indices):
            out[...] = self.array[first : last + 1]
        elif not (self.array.flags.c_contiguous and self.array.flags.aligned):
            out[...] = self.array[indices]  # np.take would copy all of it, every time
        else:
            # "clip" because with "raise" numpy gathers into a buffer first; the order never gives a bad index.
            np.take(self.array, indices, axis=0, out=out, mode="clip")


@dataclasses.dataclass(frozen=True, slots=True)
class _InFile:
    """Rows of an array in a file, read with pread.

    A memory map would fault in whole readahead windows for every row and count them as this process's memory.
    The file is open only while rows are read from it.
    """

    path: str
    offset: int
    stride: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    larger_than_ram: bool = False
    """Whether it will have left the page cache before it is read again anyway."""

    def scatter(self, indices: Indices, out: Array, places: Indices) -> None:
        """Rows that lie beside each other to places that do not: the kernel puts each where it belongs."""
        row_bytes = out[0].nbytes
        if row_bytes == 0:
            return
        if self.stride != row_bytes or not out.flags.c_contiguous or not hasattr(os, "preadv"):
            rows = np.empty((len(indices), *out.shape[1:]), out.dtype)
            self.rows(indices, rows)
            out[places] = rows
            return
        view = memoryview(out.reshape(-1).view(np.uint8))  # type: ignore[arg-type]  # as below
        fd = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            cuts = np.flatnonzero(np.diff(indices) != 1) + 1
            for run in np.split(np.arange(len(indices)), cuts):
                for at in range(0, len(run), MOST_PIECES):
                    part = run[at : at + MOST_PIECES]
                    starts = (places[part] * row_bytes).tolist()
                    where = self.offset + int(indices[part[0]]) * self.stride
                    _read_pieces(fd, [view[start : start + row_bytes] for start in starts], where, self.path)
                    if self.larger_than_ram:  # or it would push out what others need, for nothing
                        os.posix_fadvise(fd, where, len(part) * row_bytes, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
        if not self.dtype.isnative:
            out[places] = out[places].byteswap()

    def rows(self, indices: Indices, out: Array) -> None:
        row_bytes = out[0].nbytes
        if row_bytes == 0:
            return
        view = memoryview(out.reshape(-1).view(np.uint8))  # type: ignore[arg-type]  # numpy 2.4 does not say Buffer on 3.11
        fd = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
        try:
            dense = self.stride == row_bytes
            cuts = np.flatnonzero(np.diff(indices) != 1) + 1 if dense else np.arange(1, len(indices))
            start = 0
            for stop in (*cuts.tolist(), len(indices)):
                where = self.offset + int(indices[start]) * self.stride
                _read_exactly(fd, view[start * row_bytes : stop * row_bytes], where, self.path)
                start = stop
        finally:
            os.close(fd)
        if not self.dtype.isnative:
            out.byteswap(inplace=True)


def _read_exactly(fd: int, view: memoryview, offset: int, path: str) -> None:
    while view:
        if hasattr(os, "preadv"):
            count = os.preadv(fd, [view], offset)
        else:
            os.lseek(fd, offset, os.SEEK_SET)
            data = os.read(fd, len(view))
            count = len(data)
            view[:count] = data
        if count == 0:
            raise EOFError(f"{shown(path)} ends at byte {offset}, but the array goes on: was the file cut short?")
        view = view[count:]
        offset += count


def _read_pieces(fd: int, pieces: list[memoryview], offset: int, path: str) -> None:
    """What stands at one place of a file, into several of memory."""
    count = os.preadv(fd, pieces, offset)
    for piece in pieces:
        if count < len(piece):  # a short read: the rest one by one
            _read_exactly(fd, piece[max(0, count) :], offset + max(0, count), path)
        offset += len(piece)
        count -= len(piece)


def _consecutive(indices: Indices) -> bool:
    return bool((np.diff(indices) == 1).all())


@dataclasses.dataclass(frozen=True, slots=True)
class _ArrayReader:
    tree: optree.PyTreeSpec
    parts: tuple[_InMemory | _InFile, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype[Any], ...]

    def read_into(self, indices: Indices, out: Sequence[Array], leaves: Sequence[Leaf]) -> None:
        for part, rows, leaf in zip(self.parts, out, leaves, strict=True):
            if leaf.dtype == leaf.stored:
                part.rows(indices, rows)
            else:
                wide = np.empty((len(indices), *leaf.shape), leaf.dtype)
                part.rows(indices, wide)
                store(rows, wide, leaf, f"rows {indices.min()} to {indices.max()}")

    def scatter(self, indices: Indices, columns: Sequence[Array], places: Indices, leaves: Sequence[Leaf]) -> None:
        for part, column, leaf in zip(self.parts, columns, leaves, strict=True):
            if isinstance(part, _InFile) and leaf.dtype == leaf.stored:
                part.scatter(indices, column, places)
            else:
                rows = np.empty((len(indices), *leaf.shape), leaf.dtype)
                part.rows(indices, rows)
                if leaf.dtype == leaf.stored:
                    column[places] = rows
                else:
                    stored = np.empty((len(indices), *leaf.shape), leaf.stored)
                    store(stored, rows, leaf, f"rows {indices.min()} to {indices.max()}")
                    column[places] = stored

    def read(self, indices: Indices) -> list[Any]:
        columns = []
        for part, shape, dtype in zip(self.parts, self.shapes, self.dtypes, strict=True):
            column = np.empty((len(indices), *shape), dtype)
            part.rows(indices, column)
            columns.append(column)
        return [optree.tree_unflatten(self.tree, [column[i] for column in columns]) for i in range(len(indices))]


class Arrays:
    """A source over arrays that have one row per sample; made by ``penstock.arrays``."""

    def __init__(self, tree: Any) -> None:
        values, self._tree = flatten(tree)
        # A map in the other byte order is turned row by row; as_array would read all of it.
        self._arrays = [value if _turns(value) else as_array(value) for value in values]
        paths = [".".join(map(str, path)) or "0" for path in self._tree.paths()]
        if not self._arrays:
            raise SpecError("penstock.arrays() needs at least one array")
        for path, array in zip(paths, self._arrays, strict=True):
            if array.ndim == 0:
                raise SpecError(f"array {path} has no axis: penstock.arrays takes arrays with one row per sample")
        lengths = {path: len(array) for path, array in zip(paths, self._arrays, strict=True)}
        if len(set(lengths.values())) > 1:
            raise SpecError(
                f"the arrays have different numbers of rows: {lengths}; row i of each must belong to sample i"
            )
        self._parts = tuple(_part(array) for array in self._arrays)
        self._dtypes = tuple(a.dtype if a.dtype.isnative else a.dtype.newbyteorder("=") for a in self._arrays)
        self.in_memory = any(isinstance(part, _InMemory) for part in self._parts)

    def __len__(self) -> int:
        return len(self._arrays[0])

    def __repr__(self) -> str:
        return f"<penstock.arrays of {len(self)} rows: {self.spec()}>"

    def spec(self) -> Spec:
        """The form of one row."""
        leaves = tuple(
            Leaf(".".join(map(str, path)), "array", array.shape[1:], dtype, dtype)
            for path, array, dtype in zip(self._tree.paths(), self._arrays, self._dtypes, strict=True)
        )
        return Spec(self._tree, leaves)

    def reader(self) -> Reader:
        """What gathers rows: in this process for arrays in memory, anywhere for memory-mapped files."""
        return _ArrayReader(
            self._tree,
            self._parts,
            tuple(a.shape[1:] for a in self._arrays),
            self._dtypes,
        )


def arrays(*columns: Any) -> Arrays:
    """A source over arrays or memory maps with one row per sample: ``arrays(x, y)``, ``arrays({"x": x, "y": y})``.

    Samples have the tree of the arguments: one array gives arrays, several give tuples, a dict gives dicts. Rows are
    gathered by index vectors straight into the slot. A memory map is read from its file, in the workers too;
    nothing of it is sent or mapped.
    """
    return Arrays(columns[0] if len(columns) == 1 else columns)


def _turns(value: Any) -> bool:
    if not isinstance(value, np.memmap) or value.ndim == 0 or value.dtype.isnative or value.dtype.fields is not None:
        return False
    return isinstance(_part(value), _InFile)


def _part(array: Array) -> _InMemory | _InFile:
    if array.dtype.hasobject:
        raise SpecError("an array of Python objects cannot be gathered into a batch: convert it to numbers first")
    mapped = array
    while isinstance(mapped, np.ndarray) and not isinstance(mapped, np.memmap):
        mapped = mapped.base  # type: ignore[assignment]
    if not isinstance(mapped, np.memmap) or mapped.filename is None or mapped.mode == "c" or array.size == 0:
        return _InMemory(array)
    if not array[0].flags.c_contiguous or array.strides[0] < array[0].nbytes:
        return _InMemory(array)
    if not os.path.exists(mapped.filename):  # deleted since: only the map still has it
        return _InMemory(array)
    base = np.frombuffer(mapped._mmap, np.uint8)  # type: ignore[attr-defined]
    map_start = mapped.offset - mapped.offset % mmap.ALLOCATIONGRANULARITY
    inside = array.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    path, large = os.path.abspath(mapped.filename), array.nbytes > machine.available_bytes()
    return _InFile(path, map_start + inside, array.strides[0], array.shape[1:], array.dtype, large)
