"""Where the lines of text files begin: found block by block, kept in a few bytes a line, on disk if that is wanted.

Runs in the parent. Files are cut into segments of equal size, and a line belongs to the segment in which it begins, so
segments can be looked at in any order and side by side (in threads: NumPy looks for line ends without the GIL). What
is kept of one is where every n-th of its lines begins, 32 bits each. Whoever wants a line reads from the one before it
that is known: n grows when the index would take more memory than it may, and nothing but the reading gets slower.

Reading the lines themselves is done elsewhere.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock._core import machine
from penstock._core.errors import PenstockError, shown
from penstock._core.spec import Array
from penstock._core.text import Encoding, Form, blank, line_ends

__all__ = ["SCAN_BYTES", "Files", "LineIndex", "Spans", "form_of", "identity_of", "open_file", "read_at"]

Integers = npt.NDArray[np.int64]

# About what a core's cache holds: the line ends are looked for while the bytes are in it.
SEGMENT_BYTES: Final = 256 * 1024
MOST_SEGMENT_BYTES: Final = 4 * 2**20
# Above this many segments they are made larger: what is kept of each would add up.
MOST_SEGMENTS: Final = 2**16
SCAN_BYTES: Final = 2 * 2**20
"""What looking for line ends takes in this process: a segment, which of its bytes match, and where."""
# So many segments are looked at one by one, for the next batch; if a line is further off, all cores help.
SERIAL_SEGMENTS: Final = 8
# To read in order it is enough to know every n-th line: as many as make a page, and no more than a task could waste.
GRAIN_BYTES: Final = 4096
MOST_STRIDE: Final = 16
_VERSION: Final = 1


class Files(NamedTuple):
    """The files of a source, with the sizes that they had when it was made."""

    paths: list[str]
    sizes: Integers

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return int(self.sizes.sum())


def open_file(path: str, size: int) -> int:
    """A descriptor for a file that is as large as it was when the source was made; PenstockError if it is not."""
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
    now = os.fstat(fd).st_size
    if now != size:
        os.close(fd)
        raise PenstockError(
            f"{shown(path)} had {size} bytes when penstock.lines() was called and has {now} now: lines can be read "
            "only from files that nobody writes to; make a new source, or work on a copy"
        )
    return fd


def read_at(fd: int, start: int, stop: int, path: str) -> bytes:
    """All bytes of a file from ``start`` to ``stop``."""
    if not hasattr(os, "pread"):
        os.lseek(fd, start, os.SEEK_SET)
    data = os.pread(fd, stop - start, start) if hasattr(os, "pread") else os.read(fd, stop - start)
    if len(data) == stop - start:
        return data
    parts = [data]
    at = start + len(data)
    while at < stop:  # one read gives 2 GiB at most, and may be interrupted
        data = os.pread(fd, stop - at, at) if hasattr(os, "pread") else os.read(fd, stop - at)
        if not data:
            raise PenstockError(f"{shown(path)} ends at byte {at}, and {stop} were there before: was it cut short?")
        parts.append(data)
        at += len(data)
    return b"".join(parts)


def form_of(encoding: Encoding, fd: int, size: int, path: str) -> Form:
    """How this file is to be read."""
    return encoding.form(read_at(fd, 0, min(4, size), path) if encoding.marked else b"")


class Segment(NamedTuple):
    """What was found in one segment."""

    starts: npt.NDArray[np.uint32]
    """Where its lines begin, counted from its own start."""
    stop: int
    """Where the last of them ends, which may be far outside."""
    longest: int
    """Bytes of the longest."""
    longest_at: int


@dataclasses.dataclass(frozen=True, slots=True)
class Scanner:
    """Finds the lines that begin in a segment of a file."""

    encoding: Encoding
    keep_blank: bool

    def scan(self, path: str, size: int, start: int, stop: int) -> Segment:
        """The lines that begin from ``start`` to ``stop``."""
        fd = open_file(path, size)
        try:
            return self._scan(_Open(fd, path, size), start, stop)
        finally:
            os.close(fd)

    def _scan(self, file: _Open, start: int, stop: int) -> Segment:
        form = form_of(self.encoding, file.fd, file.size, file.path)
        # From one unit before, to see whether a line begins right here; to one behind, for an end of two units.
        low, high = max(form.start, start - form.unit), min(file.size, stop + form.unit)
        if low >= high:
            return _NOTHING
        data = file.read(low, high)
        ends = line_ends(data, form, final=high == file.size) + low
        starts = ends[(ends >= start) & (ends < min(stop, file.size))]
        if start <= form.start < stop:
            starts = np.concatenate((np.array([form.start], np.int64), starts))
        if not len(starts):
            return _NOTHING
        last = int(starts[-1])
        behind = ends[np.searchsorted(ends, last, "right") :]
        tail = int(behind[0]) if len(behind) else self._end_of(file, form, last, high)
        stops = np.append(starts[1:], tail)
        sizes = stops - starts
        longest = int(sizes.argmax())
        found = Segment(np.empty(0, np.uint32), tail, int(sizes[longest]), int(starts[longest]))
        if not self.keep_blank:
            inside = len(starts) if tail <= high else len(starts) - 1
            drop = np.zeros(len(starts), np.bool_)
            drop[:inside] = blank(data, starts[:inside] - low, stops[:inside] - low, form, self.encoding)
            if inside < len(starts):
                drop[-1] = self._blank_tail(file, form, last, tail)
            starts = starts[~drop]
        return found._replace(starts=(starts - start).astype(np.uint32))

    @staticmethod
    def _end_of(file: _Open, form: Form, line: int, at: int) -> int:
        """Where a line ends that goes on behind ``at``."""
        while at < file.size:
            # With the unit before: it may be the first half of an end.
            low, high = max(line, at - form.unit), min(file.size, at + SEGMENT_BYTES)
            ends = line_ends(file.read(low, high), form, final=high == file.size) + low
            ends = ends[ends > line]
            if len(ends):
                return int(ends[0])
            at = high
        return file.size

    @staticmethod
    def _blank_tail(file: _Open, form: Form, start: int, stop: int) -> bool:
        """Whether a line that reaches into other segments is blank, without having all of it in memory."""
        decoder = codecs.getincrementaldecoder(form.codec)("replace")
        for at in range(start, stop, SEGMENT_BYTES):
            end = min(stop, at + SEGMENT_BYTES)
            text = decoder.decode(file.read(at, end).tobytes(), final=end == stop)
            if text and not text.isspace():
                return False
        return True


class _Open(NamedTuple):
    fd: int
    path: str
    size: int

    def read(self, start: int, stop: int) -> Array:
        return np.frombuffer(read_at(self.fd, start, stop, self.path), np.uint8)


_NOTHING: Final = Segment(np.empty(0, np.uint32), 0, 0, 0)


class Spans(NamedTuple):
    """Stretches of files, each with some lines in it."""

    file: Integers
    start: Integers
    stop: Integers


class LineIndex:
    """Where every ``stride``-th line of some files begins, as far as they were looked at.

    ``stride`` is 1 for an index to read anywhere with, or None for one to read in order with: then the first lines
    decide. It grows when there are more lines than ``limit`` allows for.
    """

    def __init__(self, files: Files, encoding: Encoding, *, keep_blank: bool, stride: int | None) -> None:
        self.files = files
        self.stride = stride or 1
        self._coarse = stride is None
        self.longest = (0, 0, 0)
        """Bytes of the longest line so far, its file, and where in it."""
        self._scanner = Scanner(encoding, keep_blank)
        size = SEGMENT_BYTES
        while files.total_bytes // size > MOST_SEGMENTS and size < MOST_SEGMENT_BYTES:
            size *= 2
        self._segment_bytes = size
        counts = -(-files.sizes // size)
        self._file = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        first = np.cumsum(counts) - counts
        self._start = (np.arange(len(self._file)) - first[self._file]) * size
        self._stop = np.zeros(len(self._file), np.int64)
        self._lines = np.zeros(len(self._file) + 1, np.int64)  # lines before each segment
        self._entries = np.zeros(len(self._file) + 1, np.int64)  # entries before each segment
        self._offsets = np.empty(1024, np.uint32)
        self._most_entries: int | None = None
        self._done = 0
        self._lock = threading.Lock()

    # ---- how much is known

    @property
    def complete(self) -> bool:
        """Whether all files were looked at."""
        return self._done == len(self._file)

    @property
    def lines(self) -> int:
        """Lines found so far."""
        return int(self._lines[self._done])

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        tables = (self._file, self._start, self._stop, self._lines, self._entries)
        return 4 * int(self._entries[self._done]) + sum(table.nbytes for table in tables)

    def expected_bytes(self) -> int:
        """Bytes that it will take when all files were looked at, going by those that were."""
        seen = self._done / max(1, len(self._file))
        entries = int(self._entries[self._done])
        if 0 < seen < 1:
            entries = int(entries / seen * 1.25)
        if self._most_entries is not None:
            entries = min(entries, self._most_entries)
        return self.nbytes + 4 * max(0, entries - int(self._entries[self._done]))

    def limit(self, most_bytes: int) -> None:
        """Let it take no more than so many bytes, however many lines there are; at least some KiB."""
        with self._lock:
            most = max(1024, most_bytes // 4, len(self._file))  # a segment has one entry at least
            self._most_entries = most if self._most_entries is None else min(most, self._most_entries)
            self._thin()

    def reach(self, line: int) -> bool:
        """Look at files until this line is found; False if there are not so many."""
        with self._lock:
            tried = 0
            while line >= self.lines and not self.complete:
                if tried == SERIAL_SEGMENTS:
                    self._scan_together(line)
                    break
                self._add(self._scan(self._done))
                tried += 1
        return line < self.lines

    def finish(self) -> None:
        """Look at all files, on all cores."""
        with self._lock:
            self._scan_together(None)

    # ---- where lines are

    def spans(self, start: int, stop: int) -> tuple[Spans, Integers, int]:
        """Stretches that hold the lines from ``start`` to ``stop``, lines in each, and how many to leave out first."""
        with self._lock:
            return self._stretch(start, stop)

    def _stretch(self, start: int, stop: int) -> tuple[Spans, Integers, int]:
        lines, entries, stride = self._lines, self._entries, self.stride
        first, last = (int(np.searchsorted(lines[: self._done + 1], line, "right")) - 1 for line in (start, stop - 1))
        begin = int(entries[first] + (start - lines[first]) // stride)
        end = int(entries[last] + (stop - 1 - lines[last]) // stride) + 1
        numbers = np.arange(begin, end)
        segments = np.searchsorted(entries[: self._done + 1], numbers, "right") - 1
        before = (numbers - entries[segments]) * stride
        counts = np.minimum(stride, lines[segments + 1] - lines[segments] - before)
        return self._spans(numbers, segments), counts, int((start - lines[first]) % stride)

    def places(self, indices: Integers) -> tuple[Spans, Integers]:
        """For each of these lines a stretch that holds it, and how many lines stand before it there."""
        with self._lock:
            segments = np.searchsorted(self._lines[: self._done + 1], indices, "right") - 1
            inside = indices - self._lines[segments]
            return self._spans(self._entries[segments] + inside // self.stride, segments), inside % self.stride

    def _spans(self, numbers: Integers, segments: Integers) -> Spans:
        base = self._start[segments]
        more = numbers + 1 < self._entries[segments + 1]
        following = self._offsets[np.where(more, numbers + 1, numbers)]
        stops = np.where(more, base + following, self._stop[segments])
        starts = base + self._offsets[numbers].astype(np.int64)
        return Spans(self._file[segments].astype(np.int64), starts, stops)

    # ---- looking

    def _scan(self, segment: int) -> Segment:
        file, start = int(self._file[segment]), int(self._start[segment])
        return self._scanner.scan(
            self.files.paths[file], int(self.files.sizes[file]), start, start + self._segment_bytes
        )

    def _scan_together(self, line: int | None) -> None:
        cores = machine.look().cores
        left = len(self._file) - self._done
        if cores == 1 or left <= 2:
            while not self.complete and (line is None or line >= self.lines):
                self._add(self._scan(self._done))
            return
        waiting: deque[Future[Segment]] = deque()
        with ThreadPoolExecutor(min(cores, left), thread_name_prefix="penstock-lines") as pool:
            todo: Iterator[int] = iter(range(self._done, len(self._file)))
            try:
                for segment in itertools.islice(todo, 2 * cores):
                    waiting.append(pool.submit(self._scan, segment))
                while waiting and (line is None or line >= self.lines):
                    self._add(waiting.popleft().result())
                    for segment in itertools.islice(todo, 1):
                        waiting.append(pool.submit(self._scan, segment))
            finally:
                for future in waiting:
                    future.cancel()

    def _add(self, found: Segment) -> None:
        at, segment = int(self._entries[self._done]), self._done
        if self._coarse and len(found.starts):
            self._coarse = False
            line_bytes = (found.stop - int(self._start[segment]) - int(found.starts[0])) / len(found.starts)
            while self.stride < MOST_STRIDE and 2 * self.stride * line_bytes <= GRAIN_BYTES:
                self.stride *= 2
        kept = found.starts[:: self.stride]
        if at + len(kept) > len(self._offsets):
            # In place: large blocks grow without a copy, and what is not written to takes no memory.
            self._offsets.resize(max(2 * len(self._offsets), at + len(kept)), refcheck=False)
        self._offsets[at : at + len(kept)] = kept
        self._stop[segment] = found.stop
        self._lines[segment + 1] = self._lines[segment] + len(found.starts)
        self._entries[segment + 1] = at + len(kept)
        if found.longest > self.longest[0]:
            self.longest = (found.longest, int(self._file[segment]), found.longest_at)
        self._done = segment + 1
        self._thin()

    def _thin(self) -> None:
        """Keep every second entry, as often as there are too many."""
        while self._most_entries is not None and self._entries[self._done] > self._most_entries:
            done = self._done
            counts = np.diff(self._entries[: done + 1])
            if counts.max() <= 1:
                return
            numbers = np.arange(int(self._entries[done])) - np.repeat(self._entries[:done], counts)
            kept = self._offsets[: len(numbers)][numbers % 2 == 0]
            self._offsets = np.empty(max(1024, len(kept)), np.uint32)
            self._offsets[: len(kept)] = kept
            self._entries[1 : done + 1] = np.cumsum((counts + 1) // 2)
            self.stride *= 2

    # ---- on disk

    def save(self, folder: str, identity: dict[str, Any]) -> None:
        """Keep a complete index in a folder."""
        os.makedirs(folder, exist_ok=True)
        head = {**identity, "stride": self.stride, "segment": self._segment_bytes, "longest": self.longest}
        # Written beside and put in place whole: another process may be reading, or writing the same.
        fd, temporary = tempfile.mkstemp(dir=folder, suffix=".part")
        try:
            with os.fdopen(fd, "wb") as file:
                np.savez(
                    file,
                    head=np.frombuffer(json.dumps(head).encode(), np.uint8),
                    stop=self._stop,
                    lines=self._lines,
                    entries=self._entries,
                    offsets=self._offsets[: int(self._entries[-1])],
                )
            os.replace(temporary, kept_at(folder, identity))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def load(self, folder: str, identity: dict[str, Any]) -> bool:
        """Take a complete index of the same files from a folder; False if there is none that can be used."""
        try:
            with open(kept_at(folder, identity), "rb") as file, np.load(file) as kept:
                head = json.loads(kept["head"].tobytes())
                stop, lines, entries, offsets = (kept[name] for name in ("stop", "lines", "entries", "offsets"))
        except Exception:  # noqa: BLE001 - missing, cut short, or something else altogether: it is made anew
            return False
        same = {name: head.get(name) for name in identity} == json.loads(json.dumps(identity))
        if not same or head.get("segment") != self._segment_bytes or len(stop) != len(self._stop):
            return False
        most = None if self._coarse else self._most_entries
        if most is not None and head["stride"] > self.stride and lines[-1] // self.stride + len(stop) <= most:
            return False  # it was made for a smaller budget
        with self._lock:
            self._stop, self._lines, self._entries, self._offsets = stop, lines, entries, offsets
            self.stride = max(1, int(head["stride"]))
            self.longest = tuple(head["longest"])
            self._done = len(self._file)
            self._thin()
        return True


def identity_of(files: Files, encoding: Encoding, *, keep_blank: bool) -> dict[str, Any]:
    """What an index on disk is known by: the files as they are now, and what counts as a line."""
    name, state = hashlib.sha256(), hashlib.sha256()
    for path, size in zip(files.paths, files.sizes.tolist(), strict=True):
        name.update(os.fsencode(path) + b"\0")
        state.update(f"{size} {os.stat(path).st_mtime_ns}\n".encode())
    return {
        "version": _VERSION,
        "name": name.hexdigest(),
        "state": state.hexdigest(),
        "encoding": encoding.name,
        "keep_blank": keep_blank,
    }


def kept_at(folder: str, identity: dict[str, Any]) -> str:
    """Where the index of these files is kept: when they have changed, the new one takes the place of the old."""
    blanks = "-with-blank" if identity["keep_blank"] else ""
    return os.path.join(folder, f"{identity['name'][:32]}-{identity['encoding']}{blanks}.lines.npz")
