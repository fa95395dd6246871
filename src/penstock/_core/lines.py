"""Lines of text files as a source: ``penstock.lines``.

``Lines`` is the source: its files, and what is known of where their lines begin. ``Located`` is what one feed asks of
it: which lines come next, as places. Compressed files cannot be read from the middle, so they are unpacked here, in
order, and their lines travel with the places. Runs in the parent.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import importlib.util
import itertools
import os
import stat
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import IO, Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock._core.budget import format_bytes
from penstock._core.errors import BudgetError, PenstockError, shown
from penstock._core.line_index import SCAN_BYTES, Files, LineIndex, identity_of
from penstock._core.line_reader import (
    BLOCK_BYTES,
    READ_BYTES,
    Line,
    LineReader,
    Places,
    Scatter,
    Stretch,
    Table,
    Unpacked,
)
from penstock._core.text import Encoding
from penstock._core.zstd import ZstdFile, first_window_bytes

__all__ = ["Lines", "Located", "lines"]

Integers = npt.NDArray[np.int64]
Path = str | os.PathLike[str]
Walk = Generator[tuple[Integers, Places], None, None]

# Lines whose places are looked up at once, if they are known.
AHEAD: Final = 8192
# The index may take an eighth of the budget, and so may a line: it is there as bytes, as text, split and stripped.
SHARE: Final = 8
# A byte of another encoding may become so many of UTF-8.
MOST_WIDENED: Final = 3
# How often a line of a compressed file is there with whoever gets it: on its way, as bytes, as text, joined again.
TRAVELLING: Final = 6
# How far the end of a line is looked for that is too long: a second or two.
MOST_COUNTED_BYTES: Final = 2**30
# What zstd takes besides its window: two blocks, what it reads from the file, its tables.
ZSTD_BYTES: Final = 2**20


class Lines:
    """The lines of text files as a source; made by ``penstock.lines``."""

    def __init__(
        self, paths: list[str], encoding: Encoding, *, keep_blank: bool, strip: bool, index: str | None
    ) -> None:
        self.files = Files(paths, np.array([_size(path) for path in paths], np.int64))
        self.reader = LineReader(encoding, strip, keep_blank)
        self.packed = any(_packing(path) is not None for path in paths)
        """Whether some of the files are compressed, so that all can be read in order only."""
        self.counted: int | None = None
        """How many lines there are, once that is known."""
        self._folder = index
        self._walked: LineIndex | None = None
        self._indexed: LineIndex | None = None
        if self.packed and encoding.unit > 1:
            raise ValueError(f"compressed files are read in encodings with one-byte line ends, not in {encoding.name}")

    def __len__(self) -> int:
        """Lines in all: the first time the files are read for it, on all cores."""
        if self.counted is None:
            if self.packed:
                raise TypeError(
                    "how many lines compressed files have is known only after they were read once: go through one "
                    "epoch, or unpack them"
                )
            self.counted = self._complete(self.walked()).lines
        return self.counted

    def __repr__(self) -> str:
        files = "1 file" if len(self.files.paths) == 1 else f"{len(self.files.paths)} files"
        return f"<penstock.lines of {files}, {format_bytes(self.files.total_bytes)}>"

    def looks(self) -> list[Any]:
        """What a saved state knows it by: names and sizes of the files, and what counts as a line.

        Not the folder: a data set that was copied to another disk is the same.
        """
        names = map(os.path.basename, self.files.paths)
        return [self.reader.keep_blank, *zip(names, self.files.sizes.tolist(), strict=True)]

    def settings(self) -> tuple[Any, ...]:
        """How the bytes of a line become text."""
        return self.reader.encoding.name, self.reader.strip, self.reader.keep_blank

    def written(self) -> Sequence[str]:
        """The files, whose age tells one that was written anew."""
        return self.files.paths

    def walked(self) -> LineIndex:
        """The index to read in order with: made as far as it is needed."""
        if self._indexed is not None:
            return self._indexed
        if self._walked is None:
            self._walked = self._new(None)
            if self._folder is not None:
                self._walked.load(self._folder, self._identity())
        return self._walked

    def indexed(self, most_bytes: int) -> LineIndex:
        """The index to read anywhere with: complete, and as fine as its size allows."""
        if self._indexed is None:
            index = self._new(1)
            index.limit(most_bytes)
            if self._folder is None or not index.load(self._folder, self._identity()):
                self._complete(index)
            self._indexed, self._walked = index, None
        else:
            self._indexed.limit(most_bytes)
        self.counted = self._indexed.lines
        return self._indexed

    @functools.cached_property
    def window_bytes(self) -> int:
        """The largest window that unpacking one of the files takes, as far as their first frames say."""
        return max((first_window_bytes(path) for path in self.files.paths if _packing(path) == "zstd"), default=0)

    def _new(self, stride: int | None) -> LineIndex:
        return LineIndex(self.files, self.reader.encoding, keep_blank=self.reader.keep_blank, stride=stride)

    def _complete(self, index: LineIndex) -> LineIndex:
        if not index.complete:
            index.finish()
            if self._folder is not None:
                index.save(self._folder, self._identity())
        return index

    def _identity(self) -> dict[str, Any]:
        return identity_of(self.files, self.reader.encoding, keep_blank=self.reader.keep_blank)


class _Text(NamedTuple):
    number: int
    data: bytes
    path: str
    place: int


class Located:
    """The lines of a source as one feed wants them."""

    def __init__(self, source: Lines, *, memory: int, shuffle: bool, rank: int, world: int, drop: bool) -> None:
        self._source = source
        self._memory = memory
        self._rank, self._world, self._drop = rank, world, drop
        self.walks = source.packed or not (shuffle or world > 1)
        """Whether lines are read as they come. Else all of them have to be found before the first batch."""
        self.least_for: Callable[[int, int], int] | None = None
        """The least budget for a line of so many bytes, of which whoever reads it holds so many; who plans says it."""
        self._longest = (0, 0)  # bytes of the longest line that was found, and what reading it takes
        self._window_bytes = 0  # the largest one of the frames that were unpacked

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return self._source.files.total_bytes

    @property
    def text_bytes(self) -> int | None:
        """What all lines together take as UTF-8, at most; None where that is not known before they were unpacked."""
        if self._source.packed:
            return None
        return self.total_bytes * (1 if self._source.reader.encoding.name in ("utf-8", "ascii") else MOST_WIDENED)

    @property
    def length(self) -> int | None:
        """Lines of the source; None while they come in order and were not counted yet."""
        if not self.walks:
            return self._index.lines
        if self._source.counted is None and not self._source.packed and self._index.complete:
            self._source.counted = self._index.lines
        return self._source.counted

    def count(self) -> int:
        """Lines of the source, counted now if need be; TypeError where that would mean to unpack everything."""
        return self._index.lines if not self.walks else len(self._source)

    def has(self, line: int) -> bool:
        """Whether there are so many lines and one more; of compressed files that were not read yet it is believed."""
        if not self._source.packed:
            return self._index.reach(line)
        return self._source.counted is None or line < self._source.counted

    def pick(self, indices: Integers) -> Places:
        """The places of lines from anywhere."""
        if self._source.packed:
            raise TypeError("compressed text can be read in order only: unpack the files to read batches from anywhere")
        index = self._index
        spans, before = index.places(indices)
        self._check(index)
        table, file = Table.of(index.files, spans)
        return Scatter(self._source.reader, table, file, spans.start, spans.stop, before, index.stride == 1)

    def walk(self, base: int, size: int) -> Walk:
        """This rank's lines in order from line ``base`` on, so many at once, with their numbers among all lines."""
        if self._source.packed:
            yield from self._walk_packed(base, size)
            return
        index, position = self._index, base  # one rank: others do not walk
        while index.reach(position):
            index.reach(position + size - 1)
            self._check(index)
            # What is known already is looked up for many units at once: NumPy's overhead is that of one.
            stop = min(position + size * max(1, AHEAD // size), index.lines)
            if stop - position > size and not index.complete:
                stop -= (stop - position) % size
            places, numbers = self._stretch(index, position, stop), np.arange(position, stop, dtype=np.int64)
            for at in range(0, stop - position, size):
                yield numbers[at : at + size], places[at : at + size]
            position = stop
        self._check(index)

    def _stretch(self, index: LineIndex, start: int, stop: int) -> Stretch:
        spans, counts, skip = index.spans(start, stop)
        table, file = Table.of(index.files, spans)
        behind = np.cumsum(counts)
        return Stretch(
            self._source.reader, table, file, spans.start, spans.stop, behind, 0, skip, stop - start
        )  # fmt: skip

    # ---- what it costs

    @property
    def parent_bytes(self) -> int:
        """Memory of this process: the index or what unpacking takes, and what looking for lines does."""
        if not self._source.packed:
            return SCAN_BYTES + self._index.expected_bytes()
        window_bytes = self._source.window_bytes
        return SCAN_BYTES + (window_bytes + ZSTD_BYTES if window_bytes else 0)

    @property
    def held_bytes(self) -> int:
        """What the index takes now, or the window of what is unpacked."""
        return self._window_bytes if self._source.packed else self._index.nbytes

    @property
    def reading_bytes(self) -> int:
        """What whoever reads the longest line that was found so far holds of it, if it is longer than a block."""
        if self._source.packed:
            return 0
        index = self._index
        size, file, start = index.longest
        if size <= BLOCK_BYTES:
            return 0
        if self._longest[0] != size:  # it is read for this
            path, whole = index.files.paths[file], int(index.files.sizes[file])
            self._longest = size, self._source.reader.reading_bytes(path, whole, start, start + size)
        return self._longest[1]

    @property
    def item_bytes(self) -> int:
        """What one line adds to a message."""
        if not self._source.packed:
            return 8 if self.walks else 32
        texts = [len(text) for _, text, _, _ in itertools.islice(self._texts(), 64)]
        return 16 + (sum(texts) // len(texts) if texts else 0)

    @property
    def kept(self) -> str:
        """What ``parent_bytes`` is for, in a word."""
        if self._source.packed:
            return "memory to unpack with"
        longest = f", and {format_bytes(self.reading_bytes)} for whoever reads the longest line,"
        return f"line index{longest if self.reading_bytes else ''}"

    @property
    def grows(self) -> bool:
        """Whether it takes more of a larger budget."""
        return not self._source.packed

    def note(self) -> str:
        """What the plan says about it."""
        if self._source.packed:
            window_bytes = self._source.window_bytes
            zstd = f", of which zstd's window is {format_bytes(window_bytes)}" if window_bytes else ""
            return f"compressed text is unpacked in this process, in order: {format_bytes(self.parent_bytes)}{zstd}"
        index = self._index
        known = f"{index.lines:,} lines" if index.complete else "the lines that were found so far"
        each = "each" if index.stride == 1 else f"every {index.stride} of them"
        held, what = max((READ_BYTES, "a block of text"), (self.reading_bytes, "the longest line"))
        return (
            f"index of {known}, 4 bytes for {each}: {format_bytes(self.parent_bytes)} of this process with what "
            f"looking for them takes; whoever reads holds {what}: {format_bytes(held)}"
        )

    # ---- within

    @property
    def _index(self) -> LineIndex:
        most = self._memory // SHARE
        if not self.walks:
            return self._source.indexed(most)
        index = self._source.walked()
        index.limit(most)
        return index

    def _check(self, index: LineIndex) -> None:
        size, file, offset = index.longest
        if size > self._memory // SHARE:
            raise self._too_long(Line(index.files.paths[file], None, offset), size, self.reading_bytes)

    def _too_long(self, line: Line, size: int, reading_bytes: int) -> BudgetError:
        least = SHARE * size
        if self.least_for is not None:
            least = max(least, self.least_for(size, reading_bytes))
        return BudgetError(
            f"{line!r} has {format_bytes(size)}, and a budget of {format_bytes(self._memory)} has room for lines of "
            f"{format_bytes(self._memory // SHARE)}: give memory={least}, or cut the line",
            least=least,
        )

    def _walk_packed(self, base: int, size: int) -> Walk:
        rank, world = self._rank, self._world
        mine: list[_Text] = []
        first: list[_Text] = []
        total = 0
        with contextlib.closing(self._texts()) as texts:
            for text in texts:
                if total < world:
                    first.append(text)
                if total >= base and (total - base) % world == rank:
                    mine.append(text)
                    # One stays here, so that with the last ones it is known that they are; it may have to be left out.
                    if len(mine) > size:
                        yield self._cut(mine, size)
                total += 1
        self._source.counted = total
        # Ranks get equally many: the last round is filled from the start, or left out.
        rest = max(0, total - base) % world
        if rest and self._drop and rank < rest:
            mine.pop()
        elif rest and not self._drop and rank >= rest:
            mine.append(first[(total - rest + rank) % total])
        while mine:
            yield self._cut(mine, size)

    def _cut(self, texts: list[_Text], size: int) -> tuple[Integers, Places]:
        numbers, data, files, places = zip(*texts[:size], strict=True)
        del texts[:size]
        return np.array(numbers, np.int64), Unpacked(list(data), list(files), list(places))

    def _texts(self) -> Generator[_Text, None, None]:
        """The lines of all files, unpacked: which one, its bytes, its file, and which line of that it is."""
        source, number = self._source, 0
        encoding, keep_blank = source.reader.encoding, source.reader.keep_blank
        for path in source.files.paths:
            for place, text in enumerate(self._unpacked(path), 1):
                if keep_blank or not _is_blank(text, encoding):
                    yield _Text(number, text, path, place)
                    number += 1

    def _opened(self, path: str) -> IO[bytes] | ZstdFile:
        packing = _packing(path)
        if packing == "zstd":
            return ZstdFile(path, functools.partial(self._admit, path))
        if packing == "gzip":
            return gzip.open(path, "rb")  # type: ignore[return-value]  # it has all that is asked of a file here
        return open(path, "rb")

    def _admit(self, path: str, window_bytes: int) -> None:
        """Take the window of a frame into account; BudgetError for one that was not planned and is too large."""
        room = max(self._source.window_bytes, self._memory // SHARE)
        if window_bytes > room:
            least = SHARE * window_bytes
            raise BudgetError(
                f"{shown(path)} goes on with a frame that zstd unpacks with a window of {format_bytes(window_bytes)}, "
                f"and a budget of {format_bytes(self._memory)} has room for one of {format_bytes(room)}: give "
                f"memory={least}, or compress the file anew without --long",
                least=least,
            )
        self._window_bytes = max(self._window_bytes, window_bytes)

    def _unpacked(self, path: str) -> Iterator[bytes]:
        parts: list[bytes] = []
        held = done = 0
        try:
            with self._opened(path) as file:
                if self._source.reader.encoding.marked:
                    head = file.read(4)
                    parts, held = [head[self._source.reader.encoding.form(head).start :]], 1
                while chunk := file.read(BLOCK_BYTES):
                    parts.append(chunk)
                    held += len(chunk)
                    if b"\n" in chunk or b"\r" in chunk or parts[-2:][0].endswith(b"\r"):
                        data = b"".join(parts)
                        # A carriage return at the very end may be half of a line's end.
                        end = max(data.rfind(b"\n"), data.rfind(b"\r", 0, len(data) - 1)) + 1
                        parts, held = [data[end:]], len(data) - end
                        for text in data[:end].splitlines():
                            done += 1
                            yield text
                    if held > self._memory // SHARE:
                        size = held + _rest_of_line(file)
                        raise self._too_long(Line(path, done + 1, None), size, TRAVELLING * size)
                for text in b"".join(parts).splitlines():
                    done += 1
                    yield text
        except PenstockError:
            raise
        except Exception as error:  # each kind of compression has its own
            raise PenstockError(f"{shown(path)} could not be read on after line {done}: {error}") from error


def _is_blank(text: bytes, encoding: Encoding) -> bool:
    stripped = text.strip()
    if not stripped:
        return True
    begins, finishes = encoding.edges
    if not (begins[stripped[0]] and finishes[stripped[-1]]):
        return False
    return stripped.decode(encoding.form(b"").codec, "replace").isspace()


def _rest_of_line(file: IO[bytes] | ZstdFile) -> int:
    """Bytes up to the end of a line, as far as it is worth to count them."""
    size = 0
    while size < MOST_COUNTED_BYTES and (chunk := file.read(BLOCK_BYTES)):
        if ends := [end for end in (chunk.find(b"\n"), chunk.find(b"\r")) if end >= 0]:
            return size + min(ends)
        size += len(chunk)
    return size


def _size(path: str) -> int:
    """Bytes of a file; says at once what is wrong with a path."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        hint = ": penstock.lines takes paths, not patterns: give sorted(glob.glob(...))" if "*" in path else ""
        raise FileNotFoundError(f"there is no file {shown(path)}{hint}") from None
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(
            f"{shown(path)} is a directory: give its files, such as sorted(pathlib.Path({shown(path)}).glob('*.txt'))"
        )
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{shown(path)} is not a regular file, so it cannot be read from the middle: copy it to one")
    return found.st_size


def _packing(path: str) -> Literal["gzip", "zstd"] | None:
    """How a file is compressed."""
    name = path.lower()
    if name.endswith(".gz"):
        return "gzip"
    if name.endswith((".zst", ".zstd")):
        if importlib.util.find_spec("zstandard") is None:
            raise ImportError(f"{shown(path)} needs the package zstandard to be read: pip install 'penstock[zstd]'")
        return "zstd"
    return None


def lines(
    paths: Path | Iterable[Path],
    *,
    encoding: str = "utf-8",
    keep_blank: bool = False,
    strip: bool = True,
    index: Path | None = None,
) -> Lines:
    """A source over the lines of one text file or several, one after the other: ``Feed(lines(path), tokenize)``.

    A line is a sample, as ``str``: without its end (``\\n``, ``\\r\\n`` or ``\\r``), and with ``strip`` without white
    space at both ends. Blank lines are left out unless ``keep_blank``. ``Feed(lines(path))`` gives batches that are
    lists of ``str``.

    Files may be huge: they are cut into byte ranges, and workers read and decode their own, a block at a time. In order
    the first batch comes at once. To shuffle, or to share among ranks, all lines are found first, on all cores, and
    where they begin is kept in up to an eighth of the budget; with ``index``, a folder, also on disk for the next time.

    Files that end in ``.gz`` or ``.zst`` are unpacked in this process, in order only.
    """
    if hasattr(paths, "read"):  # its lines would be taken for paths
        raise TypeError(f"penstock.lines takes the path of a file, not an open one: {shown(paths)}")
    chosen: list[str] = []
    for path in [paths] if isinstance(paths, str | bytes | os.PathLike) else paths:
        name = os.fspath(path) if isinstance(path, os.PathLike) else path
        if not isinstance(name, str):
            raise TypeError(f"paths of text files are str or pathlib.Path, not {type(name).__name__}: {shown(name)}")
        chosen.append(os.path.abspath(name))
    if not chosen:
        raise ValueError("penstock.lines() got no files: did a pattern match nothing?")
    return Lines(chosen, Encoding(encoding), keep_blank=bool(keep_blank), strip=bool(strip), index=_folder(index))


def _folder(index: Path | None) -> str | None:
    if index is None:
        return None
    name = os.fspath(index) if isinstance(index, os.PathLike) else index
    if not isinstance(name, str):
        raise TypeError(
            f"index= must be a folder in which the index is kept, as str or pathlib.Path, not {type(index).__name__}: "
            f"{shown(index)}"
        )
    if os.path.exists(name) and not os.path.isdir(name):
        raise NotADirectoryError(f"index= must be a folder, and {shown(name)} is none: give another, which is made")
    return os.path.abspath(name)
