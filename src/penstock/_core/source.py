"""Sources: data that knows its own items and reads many of them at once.

A source lives in the parent; its reader is what travels to a worker (small: a file's name, never its content).
``arrays`` is here; the sources for file formats have files of their own.

What a source may have besides, looked up by name:

- ``blocks()``: rows that are cheap to read together, as a sequence of counts (shards, row groups);
- ``name(index)``: what a row is called in errors and in ``stats.skipped``, where its index says little;
- ``carried(indices)``: what goes to the reader for these rows in place of their indices, and is what they are called;
- ``measured``: True if reading has to be measured in a worker: it brings a library along;
- ``held_bytes``: what its reader keeps for the next task;
- ``fingerprint()``: which data this is, without reading it.

And a reader: ``single``, True if nothing is gained by reading several rows at once; ``close()``, when a feed is closed;
``bare()``, the same for rows that go into a batch as they are, without a load.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import mmap
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol, overload, runtime_checkable

import numpy as np
import numpy.typing as npt
import optree

from penstock._core import machine
from penstock._core.errors import SpecError, shown
from penstock._core.past_cache import LEAST_BYTES, MOST_BYTES, PastCache
from penstock._core.spec import NAMESPACE, Array, Leaf, Spec, as_array, flatten, store

__all__ = ["Arrays", "Reader", "Row", "Scatters", "Source", "Unread", "arrays", "past_cache", "read_exactly"]

Indices = npt.NDArray[np.int64]

AHEAD_BYTES: Final = 256 * 2**10  # less than that is read in one go anyway
WARM_BYTES_A_S: Final = 3e9  # no disk is that fast, and hardly a page cache that slow
MOST_PIECES: Final = 1024  # the kernel's limit for one read
SWAPPED_BYTES: Final = 128 * 2**10  # rows of another byte order that are put right at a time: a copy of them is made
ASKED_EVERY: Final = 8  # blocks, while they come from the disk: to see that they do no longer


class Reader(Protocol):
    """Reads samples by their indices, wherever it is; picklable if the source is not in memory.

    A source with ``carried`` gives its reader what that returned in place of indices.
    """

    def read_into(self, indices: Any, out: Sequence[Array], leaves: Sequence[Leaf]) -> None:
        """Write the samples into rows of the slot: ``out`` has one array per leaf, a row per index.

        Called only if all leaves are arrays.
        """

    def read(self, indices: Any) -> Sequence[Any]:
        """The samples themselves, for a load function that goes on from there."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """Where a sample of a source stands: what errors and ``stats.skipped`` call it by."""

    path: str
    """The file."""
    row: int
    """Which of its rows, from 0."""

    def __repr__(self) -> str:
        return f"row {self.row} of {self.path!r}"


class Unread:
    """A row that could not be read: what went wrong is told when its turn comes."""

    __slots__ = ("_again", "_error")

    def __init__(self, error: Exception, again: Callable[[], Any]) -> None:
        self._error: Exception | None = error
        self._again = again

    def item(self) -> Any:
        """Raises what went wrong; if it is asked once more, tries once more."""
        if (error := self._error) is not None:
            self._error = None
            raise error
        found = self._again()
        return found.item() if isinstance(found, Unread) else found


@runtime_checkable
class Scatters(Protocol):
    """A reader that can put samples which lie beside each other into rows that do not, without a copy in between."""

    def scatter(
        self, indices: Indices, columns: Sequence[Array], places: Indices, leaves: Sequence[Leaf], *, told: bool
    ) -> None:
        """Write the samples at sorted ``indices`` into these rows of the columns.

        ``told``: the system knows of them from ``tell``.
        """

    def tell(self, indices: Indices, *, epoch: int | None) -> None:
        """Have the system begin to read these sorted rows, and do not wait for it.

        ``epoch``: they are blocks, and wanted in this epoch or at the beginning of the next; None: they lie anywhere.
        """

    def absent(self, indices: Indices) -> bool:
        """Whether these rows have to be read from a disk, as far as that is known without asking for each."""


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


class _Ahead:
    """Tells the kernel what will be read, all of it before the first, so that a disk has much to do at once.

    Where everything is in the page cache that would be for nothing, and not free: the last reads show which it is.
    """

    def __init__(self) -> None:
        self._cold = True
        self._size = 0
        self._began_s = 0.0

    def begin(self, size: int) -> bool:
        """So many bytes are going to be read: whether it is worth while to tell."""
        self._size, self._began_s = size, time.perf_counter()
        return self._cold and size >= AHEAD_BYTES and hasattr(os, "posix_fadvise")

    def end(self) -> None:
        """They are here."""
        if self._size >= AHEAD_BYTES:
            self._cold = self._size < WARM_BYTES_A_S * (time.perf_counter() - self._began_s)


class _Disk:
    """Whether blocks have to be read from the disk, or are in the page cache already.

    To ask costs next to nothing where they are, and a small read of its own where they are not: so while they are not,
    it is asked seldom.
    """

    def __init__(self) -> None:
        self.blind = False
        """Whether a file system did not say: that blocks seem to be gone again means nothing."""
        self._cold = True
        self._asked = -1  # the first time it is asked

    def needed(self, fd: int, middle: int) -> bool:
        """Of a block, by the byte in its middle: its first and last page may have been read with its neighbours."""
        self._asked += 1
        if not self._cold or self._asked % ASKED_EVERY == 0:
            here = _is_here(fd, middle)
            self.blind = self.blind or here is None
            self._cold = not here
        return self._cold

    def needed_for(self, part: _InFile | _InShards, indices: Indices) -> bool:
        """Of rows that lie anywhere, by a few of them now and then: they are small, and to ask takes a while."""
        self._asked += 1
        if self._asked % ASKED_EVERY == 0:
            few = indices[len(indices) // 6 :: max(1, len(indices) // 3)]
            self._cold = not all(part.is_here(int(index)) for index in few)
        return self._cold


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
    header: int | None = None
    """The checksum of the header before ``offset``, of a .npy file: what is there now may be another array."""

    def open(self, *, exactly: bool = False) -> int:
        """A descriptor of the file; ValueError if it holds rows of another form by now.

        ``exactly``: the kernel is to read what is asked for and nothing behind it, which may be needed much later.
        """
        fd = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
        try:
            if exactly and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            if self.header is not None and zlib.crc32(os.read(fd, self.offset)) != self.header:
                try:
                    now, _ = _header(self.path)
                except SpecError as error:  # which would be about the source, and this is about some rows of it
                    raise ValueError(f"{error}; it was one when the source was made") from error
                if (now.offset, now.shape, now.dtype) != (self.offset, self.shape, self.dtype):
                    raise ValueError(
                        f"{shown(self.path)} has rows of {_form(now)} by now, but had rows of {_form(self)} when the "
                        "source was made: make it anew"
                    )
        except BaseException:
            os.close(fd)
            raise
        return fd

    def tell(self, indices: Indices, *, epoch: int | None = None) -> None:
        """Have the kernel begin to read these rows, which are sorted, and do not wait for it.

        ``epoch``: they are blocks; only what it does not have already, which takes a moment to see and saves more, and
        nothing that is to be read past the page cache.
        """
        cuts = [0, *(np.flatnonzero(np.diff(indices) != 1) + 1).tolist(), len(indices)]
        fd = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # to ask for one byte is no reason to read more
        try:
            for start, stop in itertools.pairwise(cuts):
                where = self.offset + int(indices[start]) * self.stride
                size = (stop - start) * self.stride
                if epoch is not None:
                    if self.dtype.isnative and past_cache.suits(size, large=self.larger_than_ram):
                        continue
                    cold = _disk.needed(fd, where + size // 2)
                    past_cache.saw(epoch, cold=cold and not _disk.blind)
                    if not cold:
                        continue
                os.posix_fadvise(fd, where, size, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(fd)

    def is_here(self, index: int) -> bool:
        """Whether a row is in the page cache, by the byte in its middle."""
        fd = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            return bool(_is_here(fd, self.offset + index * self.stride + self.stride // 2))
        finally:
            os.close(fd)

    def scatter(self, indices: Indices, out: Array, places: Indices) -> None:
        """Rows that lie beside each other to places that do not: the kernel puts each where it belongs."""
        row_bytes = _row_bytes(out)
        if row_bytes == 0:
            return
        if self.stride != row_bytes or not out.flags.c_contiguous or not hasattr(os, "preadv"):
            rows = np.empty((len(indices), *out.shape[1:]), out.dtype)
            self.rows(indices, rows)
            out[places] = rows
            return
        flat = out.reshape(-1).view(np.uint8)
        by_row = flat.reshape(len(out), row_bytes)
        fd = self.open(exactly=True)
        try:
            cuts = np.flatnonzero(np.diff(indices) != 1) + 1
            for run in np.split(np.arange(len(indices)), cuts):
                if self._is_past(fd, indices[run], row_bytes):
                    self._begin_all(indices[run], by_row, places[run])
                else:
                    self._through(fd, indices[run], flat, places[run])
        finally:
            os.close(fd)
        if not self.dtype.isnative:
            few = max(1, SWAPPED_BYTES // row_bytes)
            for at in range(0, len(places), few):
                some = places[at : at + few]
                rows = out[some] if few > 1 else out[some[0] : some[0] + 1]
                _to_native(rows, self.dtype)
                if few > 1:
                    out[some] = rows

    def _is_past(self, fd: int, indices: Indices, row_bytes: int) -> bool:
        """Whether these rows, which follow each other, are to be read past the page cache."""
        size = len(indices) * row_bytes
        if not self.dtype.isnative or not past_cache.wants(size, large=self.larger_than_ram):
            return False
        if _disk.needed(fd, self.offset + int(indices[0]) * self.stride + size // 2):
            return True
        past_cache.gone = False  # it stays by now
        return False

    def _begin_all(self, indices: Indices, by_row: Array, places: Indices) -> None:
        """Begin to read rows that follow each other past the page cache; ``past_cache.finish`` waits for it."""
        most = max(1, MOST_BYTES // self.stride)
        for at in range(0, len(indices), most):
            few, where = places[at : at + most], self.offset + int(indices[at]) * self.stride
            for start in range(0, self.stride, MOST_BYTES):  # one, unless a row is larger than a read
                end = min(start + MOST_BYTES, self.stride)
                self._begin(where + start, by_row[:, start:end], few)

    def _begin(self, where: int, by_row: Array, places: Indices) -> None:
        """One read, of rows or of a part of one."""

        def put(data: Array | None) -> None:
            if data is not None:
                by_row[places] = data.reshape(len(places), -1)
                return
            fd = self.open(exactly=True)
            try:
                views = [memoryview(by_row[place]) for place in places]
                for at in range(0, len(views), MOST_PIECES):
                    _read_pieces(fd, views[at : at + MOST_PIECES], where + at * by_row.shape[1], self.path)
            finally:
                os.close(fd)

        past_cache.begin(self.path, where, by_row.shape[1] * len(places), put)

    def _through(self, fd: int, indices: Indices, out: Array, places: Indices) -> None:
        """Rows that follow each other through the page cache to these places of the bytes of all rows."""
        view = memoryview(out)  # type: ignore[arg-type]  # as below
        row_bytes = self.stride
        for at in range(0, len(indices), MOST_PIECES):
            starts = (places[at : at + MOST_PIECES] * row_bytes).tolist()
            where = self.offset + int(indices[at]) * self.stride
            _read_pieces(fd, [view[start : start + row_bytes] for start in starts], where, self.path)
            if self.larger_than_ram:  # or it would push out what others need, for nothing
                os.posix_fadvise(fd, where, len(starts) * row_bytes, os.POSIX_FADV_DONTNEED)

    def rows(self, indices: Indices, out: Array) -> None:
        row_bytes = _row_bytes(out)
        if row_bytes == 0:
            return
        view = memoryview(out.reshape(-1).view(np.uint8))  # type: ignore[arg-type]  # numpy 2.4 does not say Buffer on 3.11
        fd = self.open()
        try:
            dense = self.stride == row_bytes
            cuts = np.flatnonzero(np.diff(indices) != 1) + 1 if dense else np.arange(1, len(indices))
            ends = [*cuts.tolist(), len(indices)]
            starts = [0, *ends[:-1]]
            wheres = (self.offset + indices[starts] * self.stride).tolist()
            pieces = list(zip(starts, ends, wheres, strict=True))
            for start, stop, where in pieces:
                read_exactly(fd, view[start * row_bytes : stop * row_bytes], where, self.path)
        finally:
            os.close(fd)
        if not self.dtype.isnative:
            _to_native(out, self.dtype)


class _InShards:
    """Rows of many .npy files that follow each other as one array; each file is open only while it is read.

    Not a dataclass, which would be a part of the tree and not a leaf of it.
    """

    __slots__ = ("dtype", "files", "shape", "starts")

    def __init__(self, files: tuple[_InFile, ...], starts: Indices) -> None:
        self.files = files
        self.starts = starts  # the first row of each file, and last the number of all rows
        self.shape = (int(starts[-1]), *files[0].shape)
        self.dtype = files[0].dtype

    @classmethod
    def open(cls, paths: Sequence[str | os.PathLike[str]]) -> _InShards:
        """The files as one array, by what their headers say; SpecError when one does not go with the first."""
        if not paths:
            raise SpecError("penstock.arrays() got an empty list of files: give at least one .npy file")
        found = [_header(os.path.abspath(path)) for path in paths]
        (first, _), *_ = found
        for file, _ in found:
            if (file.shape, file.dtype) != (first.shape, first.dtype):
                raise SpecError(
                    f"{shown(file.path)} has rows of {_form(file)}, but {shown(first.path)} has rows of "
                    f"{_form(first)}: files that are read as one array must have the same dtype and row shape"
                )
        starts = np.concatenate(([0], np.cumsum([length for _, length in found], dtype=np.int64)))
        large = int(starts[-1]) * first.stride > machine.available_bytes()
        files = tuple(dataclasses.replace(file, larger_than_ram=large) for file, _ in found)
        return cls(files, starts)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def where(self, index: int) -> Row:
        """The file that a row is in, and which of its rows it is."""
        file = int(self.starts.searchsorted(index, "right")) - 1
        return Row(self.files[file].path, index - int(self.starts[file]))

    def is_here(self, index: int) -> bool:
        number = int(self.starts.searchsorted(index, "right")) - 1
        return self.files[number].is_here(index - int(self.starts[number]))

    def tell(self, indices: Indices, *, epoch: int | None = None) -> None:
        numbers = self.starts.searchsorted(indices, "right") - 1
        cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(indices)]
        for start, stop in itertools.pairwise(cuts):
            number = int(numbers[start])
            self.files[number].tell(indices[start:stop] - self.starts[number], epoch=epoch)

    def rows(self, indices: Indices, out: Array) -> None:
        numbers = self.starts.searchsorted(indices, "right") - 1
        if numbers[0] == numbers[-1] and (numbers == numbers[0]).all():
            self._sorted_rows(int(numbers[0]), indices, out)
        elif (numbers[1:] >= numbers[:-1]).all():  # in order, over the edge of a file
            cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(indices)]
            for start, stop in itertools.pairwise(cuts):
                self._sorted_rows(int(numbers[start]), indices[start:stop], out[start:stop])
        else:
            order = np.argsort(indices, kind="stable")
            self.scatter(indices[order], out, order)

    def _sorted_rows(self, number: int, indices: Indices, out: Array) -> None:
        own = indices - self.starts[number]
        if len(own) > 2 and not (np.diff(own) > 0).all():  # neighbours that are apart in the batch are read together
            order = np.argsort(own, kind="stable")
            self.files[number].scatter(own[order], out, order)
        else:
            self.files[number].rows(own, out)

    def scatter(self, indices: Indices, out: Array, places: Indices) -> None:
        """Rows at sorted indices to any places: each file is opened once, neighbours are read together."""
        numbers = self.starts.searchsorted(indices, "right") - 1
        cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(indices)]
        for start, stop in itertools.pairwise(cuts):
            number = int(numbers[start])
            self.files[number].scatter(indices[start:stop] - self.starts[number], out, places[start:stop])


_ahead: Final = _Ahead()
_disk: Final = _Disk()
past_cache: Final = PastCache()
"""Of this process."""


def _is_here(fd: int, at: int) -> bool | None:
    """Whether the page with this byte is in the page cache; None if nobody can tell, as on an overlay or a tmpfs."""
    if not hasattr(os, "RWF_NOWAIT"):
        return None
    try:
        os.preadv(fd, [bytearray(1)], at, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _to_native(rows: Array, stored: np.dtype[Any]) -> None:
    """Put bytes in this machine's order that came from a file in that of its dtype; fields may differ in it."""
    base = stored.base
    if base.fields is not None:
        for name in base.names or ():
            _to_native(rows[name], base.fields[name][0])
    elif not base.isnative:
        rows.byteswap(inplace=True)


def _rows(part: _InMemory | _InFile | _InShards, indices: Indices, out: Array) -> None:
    if isinstance(part, _InMemory):
        part.rows(indices, out)
        return
    if _ahead.begin(out.nbytes):
        part.tell(np.sort(indices))
    try:
        part.rows(indices, out)
        past_cache.finish()
    finally:
        past_cache.drop()
    _ahead.end()


def _header(path: str) -> tuple[_InFile, int]:
    """What the header of a .npy file says: where its rows are, and how many."""
    try:
        with open(path, "rb") as file:
            version = np.lib.format.read_magic(file)
            if version == (1, 0):
                shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
            elif version == (2, 0):
                shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
            else:
                raise ValueError(f"version {version} of the format is not read here: save it anew with np.save")
            offset = file.tell()
            file.seek(0)
            checksum = zlib.crc32(file.read(offset))
    except ValueError as error:
        raise SpecError(f"{shown(path)} is not a .npy file that can be read by rows: {error}") from error
    if dtype.hasobject or not shape or (fortran and len(shape) > 1):
        what = (
            "holds Python objects" if dtype.hasobject else "has no axis" if not shape else "is in Fortran order"
        )  # fmt: skip
        raise SpecError(
            f"{shown(path)} {what}, so its rows do not lie one after the other: save an array of numbers with one row "
            "per sample, np.save(path, np.ascontiguousarray(array))"
        )
    stride = math.prod(shape[1:]) * dtype.itemsize
    return _InFile(path, offset, stride, tuple(shape[1:]), dtype, header=checksum), int(shape[0])


def _form(file: _InFile) -> str:
    order = "" if file.dtype.isnative else f", {'big' if sys.byteorder == 'little' else 'little'}-endian"
    return f"{file.dtype.name}[{', '.join(map(str, file.shape))}]{order}"


def read_exactly(fd: int, view: memoryview, offset: int, path: str, what: str = "the array") -> None:
    """Fill ``view`` with what stands at a place of a file; EOFError when it ends before that."""
    while view:
        if hasattr(os, "preadv"):
            count = os.preadv(fd, [view], offset)
        else:
            os.lseek(fd, offset, os.SEEK_SET)
            data = os.read(fd, len(view))
            count = len(data)
            view[:count] = data
        if count == 0:
            raise EOFError(f"{shown(path)} ends at byte {offset}, but {what} goes on: was the file cut short?")
        view = view[count:]
        offset += count


def _read_pieces(fd: int, pieces: list[memoryview], offset: int, path: str) -> None:
    """What stands at one place of a file, into several of memory."""
    count = os.preadv(fd, pieces, offset)
    for piece in pieces:
        if count < len(piece):  # a short read: the rest one by one
            read_exactly(fd, piece[max(0, count) :], offset + max(0, count), path)
        offset += len(piece)
        count -= len(piece)


def _called(indices: Indices) -> int | str:
    return int(indices[0]) if len(indices) == 1 else f"rows {indices.min()} to {indices.max()}"


def _row_bytes(rows: Array) -> int:
    """Bytes of a row. Not those of ``rows[0]``, which for a text is one without the zeros at its end."""
    return math.prod(rows.shape[1:]) * rows.dtype.itemsize


def _consecutive(indices: Indices) -> bool:
    return bool((np.diff(indices) == 1).all())


@dataclasses.dataclass(frozen=True, slots=True)
class Samples(Sequence[Any]):
    """Rows of arrays, each made a sample when it is asked for. It travels as a few arrays, however many there are."""

    tree: optree.PyTreeSpec
    columns: list[Array]

    def __len__(self) -> int:
        return len(self.columns[0])

    @overload
    def __getitem__(self, key: int) -> Any: ...
    @overload
    def __getitem__(self, key: slice) -> Samples: ...
    def __getitem__(self, key: int | slice) -> Any:
        if isinstance(key, slice):
            return Samples(self.tree, [column[key] for column in self.columns])
        return optree.tree_unflatten(self.tree, [column[key] for column in self.columns])

    @property
    def nbytes(self) -> int:
        """What they take, all together."""
        return sum(column.nbytes for column in self.columns)

    def copied(self, ordinals: list[int]) -> Samples:
        """Some of them, in memory of their own."""
        return Samples(self.tree, [column[ordinals] for column in self.columns])

    def __iter__(self) -> Iterator[Any]:
        tree = self.tree
        return (optree.tree_unflatten(tree, leaves) for leaves in zip(*self.columns, strict=True))


@dataclasses.dataclass(frozen=True, slots=True)
class _ArrayReader:
    tree: optree.PyTreeSpec
    parts: tuple[_InMemory | _InFile | _InShards, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype[Any], ...]

    def absent(self, indices: Indices) -> bool:
        if not hasattr(os, "posix_fadvise"):
            return False
        with contextlib.suppress(OSError):  # of a file that is gone: told when its rows are read
            return any(_disk.needed_for(part, indices) for part in self.parts if not isinstance(part, _InMemory))
        return False

    def read_into(self, indices: Indices, out: Sequence[Array], leaves: Sequence[Leaf]) -> None:
        for part, rows, leaf in zip(self.parts, out, leaves, strict=True):
            wide = rows if leaf.dtype == leaf.stored else np.empty((len(indices), *leaf.shape), leaf.dtype)
            _rows(part, indices, wide)
            if wide is not rows:
                store(rows, wide, leaf, _called(indices))

    def tell(self, indices: Indices, *, epoch: int | None) -> None:
        if not hasattr(os, "posix_fadvise"):
            return
        for part in self.parts:
            if not isinstance(part, _InMemory):
                part.tell(indices, epoch=epoch)

    def scatter(
        self, indices: Indices, columns: Sequence[Array], places: Indices, leaves: Sequence[Leaf], *, told: bool
    ) -> None:
        for part, column, leaf in zip(self.parts, columns, leaves, strict=True):
            if isinstance(part, _InFile | _InShards) and leaf.dtype == leaf.stored:
                if not told and _ahead.begin(len(indices) * _row_bytes(column)):
                    part.tell(indices)
                try:
                    part.scatter(indices, column, places)
                    past_cache.finish()
                finally:
                    past_cache.drop()
                if not told:
                    _ahead.end()
            else:
                rows = np.empty((len(indices), *leaf.shape), leaf.dtype)
                if not isinstance(part, _InMemory) and rows.nbytes >= LEAST_BYTES:
                    past_cache.allowed = False  # it comes through the cache, and the system is to be told of it
                _rows(part, indices, rows)
                if leaf.dtype == leaf.stored:
                    column[places] = rows
                else:
                    stored = np.empty((len(indices), *leaf.shape), leaf.stored)
                    store(stored, rows, leaf, _called(indices))
                    column[places] = stored

    def read(self, indices: Indices) -> Samples:
        columns: list[Array] = []
        for part, shape, dtype in zip(self.parts, self.shapes, self.dtypes, strict=True):
            column = np.empty((len(indices), *shape), dtype)
            _rows(part, indices, column)
            columns.append(column)
        return Samples(self.tree, columns)


class Arrays:
    """A source over arrays that have one row per sample; made by ``penstock.arrays``."""

    def __init__(self, tree: Any) -> None:
        opened = optree.tree_map(_opened, tree, is_leaf=_names_files, namespace=NAMESPACE)
        values, self._tree = flatten(opened)
        for value in values:
            if isinstance(value, bytes) or getattr(getattr(value, "dtype", None), "hasobject", False):
                what = "bytes" if isinstance(value, bytes) else "an array of Python objects"
                raise SpecError(
                    f"penstock.arrays() got {what}: it takes arrays of numbers or texts, and .npy files by their path, "
                    "a str or a Path"
                )
        # A map in the other byte order is turned row by row; as_array would read all of it.
        self._arrays: list[Any] = [
            value if isinstance(value, _InShards) or _turns(value) else as_array(value) for value in values
        ]
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
        """Whether any of it lies in this process."""
        self._shards = next((part for part in self._parts if isinstance(part, _InShards)), None)

    def __len__(self) -> int:
        return len(self._arrays[0])

    def name(self, index: int) -> int | Row:
        """What a row is called: where it stands in the files, if these are files, else its index."""
        return index if self._shards is None else self._shards.where(index)

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
    """A source over arrays, memory maps or .npy files with one row per sample: ``arrays(x, y)``, ``arrays({"x": x})``.

    Samples have the tree of the arguments: one array gives arrays, several give tuples, a dict gives dicts. In the
    place of an array may stand the path of a .npy file, or a list of paths, which are read as one array: their headers
    are compared at once. Rows are gathered by index vectors straight into the slot. Files and memory maps are read in
    the workers too, with pread, and are open no longer than that takes; nothing of them is sent or mapped. Beside
    columns that lie in memory they are read here, and for a load in another process rows of all columns are sent.
    """
    return Arrays(columns[0] if len(columns) == 1 else columns)


def _names_files(value: Any) -> bool:
    """Whether a value is a file or a list of files; a tuple is several columns."""
    if isinstance(value, str | os.PathLike):
        return True
    return type(value) is list and bool(value) and all(isinstance(path, str | os.PathLike) for path in value)


def _opened(value: Any) -> Any:
    if not _names_files(value):
        return value
    return _InShards.open(value if isinstance(value, list) else [value])


def _turns(value: Any) -> bool:
    if not isinstance(value, np.memmap) or value.ndim == 0 or value.dtype.isnative or value.dtype.fields is not None:
        return False
    return isinstance(_part(value), _InFile)


def _part(array: Any) -> _InMemory | _InFile | _InShards:
    if isinstance(array, _InShards):
        return array
    mapped = array
    while isinstance(mapped, np.ndarray) and not isinstance(mapped, np.memmap):
        mapped = mapped.base
    if not isinstance(mapped, np.memmap) or mapped.filename is None or mapped.mode == "c" or array.size == 0:
        return _InMemory(array)
    if not array[:1].flags.c_contiguous or array.strides[0] < _row_bytes(array):
        return _InMemory(array)
    if not os.path.exists(mapped.filename):  # deleted since: only the map still has it
        return _InMemory(array)
    base = np.frombuffer(mapped._mmap, np.uint8)  # type: ignore[attr-defined]
    map_start = mapped.offset - mapped.offset % mmap.ALLOCATIONGRANULARITY
    inside = array.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    path, large = os.path.abspath(mapped.filename), array.nbytes > machine.available_bytes()
    return _InFile(path, map_start + inside, array.strides[0], array.shape[1:], array.dtype, large)
