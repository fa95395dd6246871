"""Where lines of text stand, and how they are read there: what travels to workers in place of items.

Places are made in the parent: a file, from which byte to which, how many lines in between; never the text, unless it
had to be unpacked on the way. ``LineReader`` makes lines of them where the work is done, a block at a time: no file is
open for longer than that takes.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from penstock._core.errors import PenstockError, shown
from penstock._core.line_index import Files, Spans, form_of, open_file, read_at
from penstock._core.source import Unread
from penstock._core.text import Encoding, Form, blank, line_ends, split_lines

__all__ = [
    "BLOCK_BYTES",
    "READ_BYTES",
    "Line",
    "LineReader",
    "Places",
    "Scatter",
    "Stretch",
    "Table",
    "Unpacked",
]

Integers = npt.NDArray[np.int64]

# What a worker reads and decodes at once: long against the cost of opening a file, short against its share of memory.
BLOCK_BYTES: Final = 256 * 1024
READ_BYTES: Final = 8 * BLOCK_BYTES
"""What a block takes in a worker: its bytes, the text (up to four times that), the lines."""
# Lines that lie this close together are read in one go: a page that has to be read anyway.
GAP_BYTES: Final = 4096
# How far a line's number is counted for an error: some 50 ms.
COUNTED_BYTES: Final = 64 * 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """Where a line stands: what errors and ``stats.skipped`` call it by."""

    path: str
    """The file."""
    number: int | None
    """Which line of the file, from 1; None where counting would take long."""
    offset: int | None
    """The byte of the file at which it begins; None in compressed files."""

    def __repr__(self) -> str:
        byte = "" if self.offset is None else f"byte {self.offset}"
        number = "" if self.number is None else f"line {self.number}"
        inner = f"{number} ({byte})" if number and byte else number or f"the line at {byte}"
        return f"{inner} of {self.path!r}"


# ---------------------------------------------------------------- what travels


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """The few files that some places are in."""

    paths: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, files: Files, spans: Spans) -> tuple[Table, Integers]:
        """The files of these spans, and for each span which of them it is in."""
        if (spans.file == spans.file[0]).all():
            only = int(spans.file[0])
            return cls((files.paths[only],), (int(files.sizes[only]),)), np.zeros_like(spans.file)
        used, numbers = np.unique(spans.file, return_inverse=True)
        chosen = used.tolist()
        table = cls(tuple(files.paths[n] for n in chosen), tuple(int(files.sizes[n]) for n in chosen))
        return table, numbers.reshape(-1)


@dataclasses.dataclass(frozen=True, slots=True)
class Stretch(Sequence[Any]):
    """Consecutive lines: neighbouring spans of files that hold some lines each."""

    reader: LineReader | None
    table: Table
    file: Integers
    start: Integers
    stop: Integers
    behind: Integers
    """Lines up to the end of each span, counted from anywhere."""
    before: int
    """Lines before the first span, counted from there."""
    first: int
    """The first line that is meant, counted from there."""
    length: int

    def __reduce__(self) -> tuple[Any, ...]:
        # One string of bytes: four arrays would take as long to pack as some lines to read.
        columns = b"".join(map(bytes, (self.file, self.start, self.stop, self.behind)))
        return _stretched, (self.table.paths, self.table.sizes, columns, self.before, self.first, self.length)

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, key: int) -> Line: ...
    @overload
    def __getitem__(self, key: slice) -> Stretch: ...
    def __getitem__(self, key: int | slice) -> Line | Stretch:
        if not isinstance(key, slice):
            one = self[key : key + 1]
            file, start, stop = int(one.file[0]), int(one.start[0]), int(one.stop[0])
            if self.reader is None:
                return Line(one.table.paths[file], None, start)
            return self.reader.line(one.table, file, start, stop, one.first - one.before)
        begin, end, _ = key.indices(self.length)
        if begin == 0 and end == self.length:
            return self
        first = self.first + begin
        low = int(self.behind.searchsorted(first, "right"))
        high = max(low, int(self.behind.searchsorted(first + max(0, end - begin), "left")) + 1)
        return Stretch(
            self.reader,
            self.table,
            self.file[low:high],
            self.start[low:high],
            self.stop[low:high],
            self.behind[low:high],
            int(self.behind[low - 1]) if low else self.before,
            first,
            max(0, end - begin),
        )

    def blocks(self, reader: LineReader) -> Iterator[list[Any]]:
        """The lines, as they are read block by block."""
        last = len(self.file)
        if self._neighbours() and self.stop[-1] - self.start[0] <= BLOCK_BYTES:
            yield reader.consecutive(self, 0, last)
            return
        begin = 0
        for end in range(1, last + 1):
            # A block ends where the next span is elsewhere, or would make it too large.
            follows = end < last and self.file[end] == self.file[begin] and self.start[end] == self.stop[end - 1]
            if follows and self.stop[end] - self.start[begin] <= BLOCK_BYTES:
                continue
            yield reader.consecutive(self, begin, end)
            begin = end

    def _neighbours(self) -> bool:
        return bool(self.file[0] == self.file[-1] and (self.start[1:] == self.stop[:-1]).all())


@dataclasses.dataclass(frozen=True, slots=True)
class Scatter(Sequence[Any]):
    """Lines from anywhere: for each a span that holds it, and how many lines stand before it there."""

    reader: LineReader | None
    table: Table
    file: Integers
    start: Integers
    stop: Integers
    before: Integers
    alone: bool
    """Whether a span holds nothing else, but for blank lines."""

    def __reduce__(self) -> tuple[Any, ...]:
        columns = b"".join(map(bytes, (self.file, self.start, self.stop, self.before)))
        return _scattered, (self.table.paths, self.table.sizes, columns, self.alone)

    def __len__(self) -> int:
        return len(self.file)

    @overload
    def __getitem__(self, key: int) -> Line: ...
    @overload
    def __getitem__(self, key: slice | Integers) -> Scatter: ...
    def __getitem__(self, key: int | slice | Integers) -> Line | Scatter:
        if not isinstance(key, slice | np.ndarray):
            file, start, stop, before = (int(c[key]) for c in (self.file, self.start, self.stop, self.before))
            if self.reader is None:
                return Line(self.table.paths[file], None, start)
            return self.reader.line(self.table, file, start, stop, before)
        return dataclasses.replace(
            self, file=self.file[key], start=self.start[key], stop=self.stop[key], before=self.before[key]
        )  # fmt: skip

    def blocks(self, reader: LineReader) -> Iterator[list[Any]]:
        """The lines, so many at once as make a block."""
        filled = np.cumsum(self.stop - self.start) // BLOCK_BYTES
        cuts = [0, *(np.flatnonzero(np.diff(filled)) + 1).tolist(), len(self)]
        for begin, end in itertools.pairwise(cuts):
            yield reader.scattered(self[begin:end])


class Unpacked(Sequence[Any]):
    """Lines of compressed files, with their text, still encoded."""

    __slots__ = ("_files", "_numbers", "_texts")

    def __init__(self, texts: list[bytes], files: list[str], numbers: list[int]) -> None:
        self._texts, self._files, self._numbers = texts, files, numbers

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (b"\n".join(self._texts),)

    def __len__(self) -> int:
        return len(self._texts)

    @overload
    def __getitem__(self, key: int) -> Line: ...
    @overload
    def __getitem__(self, key: slice) -> Unpacked: ...
    def __getitem__(self, key: int | slice) -> Line | Unpacked:
        if isinstance(key, slice):
            return Unpacked(self._texts[key], self._files[key], self._numbers[key])
        return Line(self._files[key], self._numbers[key], None) if self._files else Line("compressed text", None, None)

    def blocks(self, reader: LineReader) -> Iterator[list[Any]]:
        """All of them."""
        yield reader.unpacked(self._texts)


# What arrives has no reader: whoever reads has one. Exactly which lines these are is known where they come from.


def _stretched(
    paths: tuple[str, ...], sizes: tuple[int, ...], columns: bytes, before: int, first: int, length: int
) -> Stretch:
    file, start, stop, behind = np.frombuffer(columns, np.int64).reshape(4, -1)
    return Stretch(None, Table(paths, sizes), file, start, stop, behind, before, first, length)


def _scattered(paths: tuple[str, ...], sizes: tuple[int, ...], columns: bytes, alone: bool) -> Scatter:
    file, start, stop, before = np.frombuffer(columns, np.int64).reshape(4, -1)
    return Scatter(None, Table(paths, sizes), file, start, stop, before, alone)


def _unpacked(data: bytes) -> Unpacked:
    return Unpacked(data.split(b"\n"), [], [])


Places = Stretch | Scatter | Unpacked


# ---------------------------------------------------------------- who reads


class _Opened(NamedTuple):
    fd: int
    path: str
    form: Form


@dataclasses.dataclass(frozen=True, slots=True)
class LineReader:
    """Makes lines of places, wherever it is."""

    encoding: Encoding
    strip: bool
    keep_blank: bool

    def fetch(self, places: Places) -> Iterator[Any]:
        """The lines at these places, in order; an ``Unread`` for each that cannot be read. Never raises."""
        return itertools.chain.from_iterable(places.blocks(self))

    def consecutive(self, places: Stretch, begin: int, end: int) -> list[Any]:
        """Those lines that are meant of neighbouring spans in one file."""
        number = int(places.file[begin])
        path, size = places.table.paths[number], places.table.sizes[number]
        before = int(places.behind[begin - 1]) if begin else places.before
        behind = int(places.behind[end - 1])
        first, last = max(before, places.first), min(behind, places.first + places.length)
        try:
            form, data = self._read(path, size, int(places.start[begin]), int(places.stop[end - 1]))
            found = self._lines(data, form)
            if len(found) != behind - before:
                raise _changed(path, int(places.start[begin]), behind - before, len(found))
        except Exception as error:  # noqa: BLE001 - it is told for each line that was wanted
            meant = range(first - places.first, last - places.first)
            return [Unread(error, partial(self._only, places[at : at + 1])) for at in meant]
        return found[first - before : last - before]

    def scattered(self, places: Scatter) -> list[Any]:
        """Lines from anywhere, read in the order in which they lie in the files, neighbours together."""
        found: list[Any] = [None] * len(places)
        order = np.lexsort((places.start, places.file))
        for own in np.split(order, np.flatnonzero(np.diff(places.file[order])) + 1):
            number = int(places.file[own[0]])
            path, size = places.table.paths[number], places.table.sizes[number]
            try:
                fd = open_file(path, size)
            except Exception as error:  # noqa: BLE001 - it is told for each line that was wanted
                for at in own.tolist():
                    found[at] = self._unread(error, places, at)
                continue
            try:
                self._gather(found, places, own, _Opened(fd, path, form_of(self.encoding, fd, size, path)))
            finally:
                os.close(fd)
        return found

    def _gather(self, found: list[Any], places: Scatter, own: Integers, file: _Opened) -> None:
        """Lines of one file, in the order in which they lie there; neighbours are read together."""
        start, stop = places.start[own], places.stop[own]
        apart = start[1:] - np.maximum.accumulate(stop)[:-1] > GAP_BYTES
        large = stop - start > BLOCK_BYTES  # to cut it out of what is around it would take as much again
        apart |= large[1:] | large[:-1]
        edges = [0, *(np.flatnonzero(apart) + 1).tolist(), len(own)]
        starts, stops, befores, chosen = start.tolist(), stop.tolist(), places.before[own].tolist(), own.tolist()
        for begin, end in itertools.pairwise(edges):
            low = starts[begin]
            try:
                data = read_at(file.fd, low, max(stops[begin:end]), file.path)
            except Exception as error:  # noqa: BLE001 - same as above
                for at in chosen[begin:end]:
                    found[at] = self._unread(error, places, at)
                continue
            for i in range(begin, end):
                try:
                    text = data if end - begin == 1 else data[starts[i] - low : stops[i] - low]
                    found[chosen[i]] = self._single(text, file.form, befores[i], alone=places.alone, path=file.path)
                except Exception as error:  # noqa: BLE001 - it is told when the line's turn comes
                    found[chosen[i]] = self._unread(error, places, chosen[i])

    def unpacked(self, texts: list[bytes]) -> list[Any]:
        """Lines that are there already: to be decoded, each one a sample."""
        form = self.encoding.form(b"")
        return [self._decoded(text, form, self.strip) for text in texts]

    def line(self, table: Table, file: int, start: int, stop: int, before: int) -> Line:
        """Exactly where a line is, for an error: the file is read once more."""
        path, size = table.paths[file], table.sizes[file]
        with contextlib.suppress(OSError, PenstockError):
            form, data = self._read(path, size, start, stop)
            starts, _ = self._bounds(data, form)
            if before < len(starts):
                start += starts[before]
                return Line(path, self._number(path, size, start, form), start)
        return Line(path, None, start)

    def reading_bytes(self, path: str, size: int, start: int, stop: int) -> int:
        """What whoever reads a long line holds: its bytes, and three times its text, cut out, stripped and joined.

        A character takes as much as the widest of the line, so its text may take four times its bytes.
        """
        chars = width = 0
        with contextlib.suppress(OSError, PenstockError):  # told when the line is read in earnest
            fd = open_file(path, size)
            try:
                decoder = codecs.getincrementaldecoder(form_of(self.encoding, fd, size, path).codec)("replace")
                for at in range(start, stop, BLOCK_BYTES):
                    if text := decoder.decode(read_at(fd, at, min(stop, at + BLOCK_BYTES), path)):
                        chars, width = chars + len(text), max(width, _width(text))
            finally:
                os.close(fd)
        return stop - start + 3 * chars * width

    # ---- within

    def _read(self, path: str, size: int, start: int, stop: int) -> tuple[Form, bytes]:
        fd = open_file(path, size)
        try:
            return form_of(self.encoding, fd, size, path), read_at(fd, start, stop, path)
        finally:
            os.close(fd)

    def _lines(self, data: bytes, form: Form) -> list[Any]:
        try:
            text = data.decode(form.codec)
        except UnicodeDecodeError:
            pass
        else:
            return split_lines(text, strip=self.strip, keep_blank=self.keep_blank)
        starts, stops = self._bounds(data, form)
        return [self._decoded(data[a:b], form, self.strip) for a, b in zip(starts, stops, strict=True)]

    def _bounds(self, data: bytes, form: Form) -> tuple[list[int], list[int]]:
        """From where to where each line goes that is a sample."""
        array = np.frombuffer(data, np.uint8)
        stops = line_ends(array, form, final=True)
        if not len(stops) or stops[-1] != len(data):
            stops = np.append(stops, len(data))
        starts = np.concatenate((np.zeros(1, np.int64), stops[:-1]))
        if not self.keep_blank:
            kept = ~blank(array, starts, stops, form, self.encoding)
            starts, stops = starts[kept], stops[kept]
        return starts.tolist(), stops.tolist()

    def _single(self, data: bytes, form: Form, before: int, *, alone: bool, path: str) -> Any:
        """One line of a span; ``alone``: it is the only one, but for blank ones behind it."""
        if alone and (self.strip or self.keep_blank):
            text = data.decode(form.codec)
            return text.strip() if self.strip else text.rstrip("\r\n")
        found = self._lines(data, form)
        if before >= len(found):
            raise _changed(path, 0, before + 1, len(found))
        return found[before]

    def _decoded(self, data: bytes, form: Form, strip: bool) -> Any:
        try:
            text = data.decode(form.codec)
        except UnicodeDecodeError as error:
            return Unread(error, partial(self._decoded, data, form, strip))
        return text.strip() if strip else text.rstrip("\r\n")

    def _unread(self, error: Exception, places: Scatter, place: int) -> Unread:
        return Unread(error, partial(self._only, places[place : place + 1]))

    def _only(self, places: Places) -> Any:
        return next(self.fetch(places))

    def _number(self, path: str, size: int, offset: int, form: Form) -> int | None:
        if offset > COUNTED_BYTES:
            return None
        fd = open_file(path, size)
        try:
            count, at = 1, form.start
            while at < offset:
                # With the unit behind, for an end of two: so many as begin before the line.
                high = min(offset, at + BLOCK_BYTES)
                data = np.frombuffer(read_at(fd, at, min(size, high + form.unit), path), np.uint8)
                count += int((line_ends(data, form, final=high == size) <= high - at).sum())
                at = high
            return count
        finally:
            os.close(fd)


def _width(text: str) -> int:
    """Bytes of each character."""
    return 1 if text.isascii() else (sys.getsizeof(text + text) - sys.getsizeof(text)) // len(text)


def _changed(path: str, offset: int, expected: int, found: int) -> PenstockError:
    return PenstockError(
        f"{shown(path)} was written to since its lines were looked for: {expected} were there from byte {offset} on, "
        f"now {found} are; lines can be read only from files that nobody writes to"
    )
