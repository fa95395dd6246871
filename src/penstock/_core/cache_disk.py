"""Shelved samples in a folder: one plain .npy file per leaf with a row per sample, which anyone can memory-map.

    index.json       what the samples are and what they were made of; written last, so a folder with one is whole
    image.npy ...    the rows, in the order of the items; sparse, until a row is written
    rows.npy         a number for each item: 0, or whose it is while it is being written, or that it is complete
    penstock.lock    held for microseconds while somebody claims items
    session-7        one for each feed that is at work on the folder, locked for as long as it is

A worker writes a row; its reply makes the parent note the row as complete, never before. A kill at any moment therefore
leaves rows that are complete and rows that are made again. Any number of jobs share a folder: items are claimed before
they are written, under a lock that the kernel takes from whoever dies, and a claim dies with its session.

Machines die too, and then what was noted may have reached the disk before what was written. So every row has a
checksum, and a session is removed only when all is safely on the disk (``close``). Whoever finds a dead session of an
earlier life of the machine checks all rows against their checksums.

``DiskStore`` runs in the parent, ``DiskShelf`` where load runs. Rows are read with pread: a memory map would read many
times as much from a cold disk and count as memory of the process. Nothing here is unpickled, and no size is believed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import itertools
import json
import os
import socket
import stat
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from penstock._core.budget import format_bytes
from penstock._core.cache import NEVER, RANDOM, Cache, Memory
from penstock._core.cache_key import Identity, fitted, form_of
from penstock._core.errors import CacheError, said, shown
from penstock._core.spec import Array, Spec
from penstock._core.task import LOAD, Shelved, keep_at

__all__ = ["DiskForm", "DiskFull", "DiskStore", "OtherWidths", "as_kept"]

VERSION: Final = 1
_INDEX: Final = "index.json"
_ROWS: Final = "rows.npy"
_LOCK: Final = "penstock.lock"
_SESSION: Final = "session-"
_MOST_INDEX_BYTES: Final = 2**20
_COMPLETE: Final = 1  # the upper half of a number in rows.npy; 0 is absent, others are sessions
_FIRST_SESSION: Final = 2
# Claiming takes microseconds, so a lock that is not to be had for so long belongs to somebody who was stopped.
LOCK_S: Final = 0.02
OPEN_LOCK_S: Final = 30.0  # while it is opened, others may be checking all of it
CHECKED_AT_ONCE_BYTES: Final = 8 * 2**20
# A disk that is full to the last byte serves nobody.
LEFT_FREE: Final = 20  # one part in so many
RECOUNT_S: Final = 1.0
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_FLAGS: Final = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


class DiskFull(CacheError):
    """There is no room even for a folder with nothing in it."""


class OtherWidths(CacheError):
    """The folder has these samples, but with other room for texts: ``as_kept`` says with how much."""


# ---------------------------------------- rows, where load runs


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """One file: rows of one leaf."""

    path: str
    start: int
    """Bytes of its header."""
    shape: tuple[int, ...]
    """Of one row, which is all samples of an item."""
    dtype: np.dtype[Any]
    most: int | None
    """For lengths of texts: the largest that can be true."""
    inode: tuple[int, int]
    """Which file it is: another may have taken its name since."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one item."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @contextlib.contextmanager
    def opened(self, flags: int) -> Iterator[int]:
        """A descriptor of the very file that was looked at in the beginning."""
        with _opened(self.path, flags) as fd:
            found = os.fstat(fd)
            if (found.st_dev, found.st_ino) != self.inode:
                raise CacheError(f"{self.path} is another file than it was: somebody made the cache anew")
            yield fd


@dataclasses.dataclass(frozen=True, slots=True)
class DiskForm:
    """Which files there are."""

    columns: tuple[Column, ...]

    def open(self, memory: Memory) -> DiskShelf:  # noqa: ARG002 - the interface
        """The shelf over them."""
        return DiskShelf(self.columns)


class DiskShelf:
    """Reads and writes rows of the files; they are open only meanwhile."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns = columns

    def read(self, places: Shelved, columns: Sequence[Array], at: Shelved) -> None:
        """Read rows straight into the slot; neighbours at once."""
        for column, rows in zip(self._columns, columns, strict=True):
            if not column.row_bytes:
                continue
            view, size = _bytes(rows), column.row_bytes
            with column.opened(os.O_RDONLY) as fd:
                for place, row, count in _runs(places, at):
                    _read(fd, view[row * size : (row + count) * size], column.start + place * size, column.path)
            if column.most is not None:
                lengths = rows[at]
                if len(lengths) and (int(lengths.min()) < 0 or int(lengths.max()) > column.most):
                    raise CacheError(
                        f"{column.path} holds lengths that cannot be ({lengths.min()} to {lengths.max()}, at most "
                        f"{column.most}): the file was damaged; delete the folder to have it made again"
                    )

    def write(self, places: Shelved, columns: Sequence[Array], at: Shelved) -> Shelved:
        """Write rows to the files; their checksums."""
        checks = [0] * len(places)
        for column, rows in zip(self._columns, columns, strict=True):
            if not column.row_bytes:
                continue
            view, size = _bytes(rows), column.row_bytes
            for i, row in enumerate(at.tolist()):
                checks[i] = zlib.crc32(view[row * size : (row + 1) * size], checks[i])
            with column.opened(os.O_WRONLY) as fd:
                for place, row, count in _runs(places, at):
                    _write(fd, view[row * size : (row + count) * size], column.start + place * size)
        return np.array(checks, np.int64)

    def checks(self, first: int, count: int) -> Iterator[int]:
        """The checksums of rows as they are on disk."""
        sums = [0] * count
        for column in self._columns:
            if not column.row_bytes:
                continue
            view = _bytes(np.empty(count * column.row_bytes, np.uint8))
            with column.opened(os.O_RDONLY) as fd:
                _read(fd, view, column.start + first * column.row_bytes, column.path)
            for i in range(count):
                sums[i] = zlib.crc32(view[i * column.row_bytes : (i + 1) * column.row_bytes], sums[i])
        yield from sums

    def close(self) -> None:
        """Nothing is open."""


def _runs(places: Shelved, at: Shelved) -> Iterator[tuple[int, int, int]]:
    """Stretches that are neighbours in the file and in the slot: place, row, how many."""
    cuts = np.flatnonzero((np.diff(places) != 1) | (np.diff(at) != 1)) + 1
    if len(cuts) == len(places) - 1:
        yield from zip(places.tolist(), at.tolist(), itertools.repeat(1), strict=False)
        return
    start = 0
    for stop in (*cuts.tolist(), len(places)):
        yield int(places[start]), int(at[start]), stop - start
        start = stop


def _bytes(rows: Array) -> memoryview:
    return memoryview(rows.reshape(-1).view(np.uint8))  # type: ignore[arg-type]  # numpy does not say Buffer on 3.11


@contextlib.contextmanager
def _opened(path: str, flags: int, mode: int = 0o666) -> Iterator[int]:
    fd = os.open(path, flags | _FLAGS, mode)
    try:
        yield fd
    finally:
        os.close(fd)


def _read(fd: int, view: memoryview, offset: int, path: str) -> None:
    while view:
        count = os.preadv(fd, [view], offset)
        if count == 0:
            raise CacheError(f"{path} is shorter than it was when it was opened: somebody changed the cache")
        view, offset = view[count:], offset + count


def _write(fd: int, view: memoryview, offset: int) -> None:
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


# ---------------------------------------- the folder, in the parent


class DiskStore:
    """Which items are kept in a folder, as far as this process knows, and what it has claimed."""

    in_memory = False

    def __init__(self, cache: Cache, spec: Spec, identity: Identity, *, items: int, each: int) -> None:
        """Open the folder, or make it; CacheError when it holds something else, DiskFull when it cannot be made."""
        try:
            import fcntl
        except ImportError as error:  # Windows
            raise CacheError(
                'a folder as cache needs file locks, which this system does not have: use cache="ram"'
            ) from error
        if not hasattr(os, "preadv"):
            raise CacheError('a folder as cache needs preadv, which this system does not have: use cache="ram"')
        self._flock = fcntl.flock
        self._locks = (fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_UN)
        self.folder = Path(os.path.abspath(cache.folder))
        self._cache = cache
        self._identity = identity
        self._items, self._each = items, each
        self._spec = spec
        self._wanted = _columns(spec, each)
        self._session = 0
        self._session_fd = self._lock_fd = self._rows_fd = -1
        self._orphans: list[Path] = []
        self._tasks: dict[int, tuple[npt.NDArray[np.int64], Shelved]] = {}
        self._code = identity.code
        self._files: set[str] = set()
        """What another cache has in this folder."""
        self.warnings: list[str] = []
        """What has to be said to the user."""
        self._stopped: str | None = None
        self._said = False
        self._made = False
        self._dirty = False
        self._recount_at_s = 0.0
        self.count = 0
        try:
            self._open()
        except OSError as error:
            self._let_go()
            if error.errno in _FULL:
                raise DiskFull(f"nothing is kept in {self.folder}, as there is no room: {said(error)}") from error
            if isinstance(error, PermissionError) or error.errno in (errno.EROFS, errno.ENOTDIR, errno.EEXIST):
                raise CacheError(f"{self.folder} cannot be used as a cache: {said(error)}") from error
            raise CacheError(f"the cache in {self.folder} cannot be opened: {said(error)}") from error
        except BaseException:
            self._let_go()
            raise

    # ---- the store's interface

    def look(self, indices: npt.NDArray[np.int64]) -> Shelved | None:
        """Rows that are complete, and those that were claimed just now."""
        there = self._complete[indices]
        if there.all():
            return indices
        places = np.where(there, indices, LOAD)
        if self._stopped is None:
            missing = np.flatnonzero(~there)
            try:
                self._claim(indices, missing, places)
            except OSError as error:
                self._stop(said(error))
        return places if (places != LOAD).any() else None

    def at_hand(self, indices: npt.NDArray[np.int64]) -> bool:  # noqa: ARG002 - the interface
        """Somebody has to do something for them."""
        return False

    def held(self, places: Shelved) -> int:
        """How many of them are there."""
        return int(np.count_nonzero(places >= 0))

    def begun(self, task: int, indices: npt.NDArray[np.int64], places: Shelved) -> None:
        """Remember what was claimed for whom."""
        if (places < LOAD).any():
            self._tasks[task] = indices, places

    def taken(self, task: int, kept: bytes | str | None) -> str | None:
        """Note rows that were written completely; give up the claim on others."""
        told = self._tasks.pop(task, None)
        if told is None:
            if isinstance(kept, str):  # it had nothing to write, so it could not read
                self._stop(kept)
                self._complete[:] = False
            return self._notice()
        indices, places = told
        wanted = np.flatnonzero(places < LOAD)
        numbers = np.frombuffer(kept, np.int64) if isinstance(kept, bytes) else np.full(len(places), LOAD)
        if isinstance(kept, str):
            self._stop(kept)
        numbers, rows = numbers[wanted], indices[wanted]
        good = numbers >= 0
        try:
            # Given up before anything else, and complete only when the row was written: in this order for a kill.
            self._note(rows[~good], np.zeros(np.count_nonzero(~good), np.uint64))
            self._note(rows[good], (np.uint64(_COMPLETE) << np.uint64(32)) | numbers[good].astype(np.uint64))
        except OSError as error:
            self._stop(said(error))
            return self._notice()
        self._complete[rows[good]] = True
        self.count += int(np.count_nonzero(good))
        self._claimed -= len(rows)
        self._dirty = self._dirty or bool(good.any())
        never = rows[numbers == NEVER]
        self._random[never] = True
        return self._notice() or (RANDOM if len(never) else None)

    def withdrawn(self, task: int) -> None:
        """Give up the claim."""
        self.taken(task, None)

    def copy(self, places: Shelved, memory: Any, start: int) -> None:  # noqa: ARG002 - the interface
        """Never asked for."""
        raise AssertionError

    def wants(self) -> npt.NDArray[np.int64]:
        """Those that are missing, as many as may be kept."""
        self.refresh()
        missing = np.flatnonzero(~(self._complete | self._random))
        return missing[: max(0, self._most - self.count)] if self._stopped is None else missing[:0]

    def unclaimed(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Those of these items that nobody has or makes at the moment; without a lock, as claiming asks again."""
        if self._stopped is not None:
            return indices[:0]
        try:
            owner = self._numbers(indices) >> np.uint64(32)
        except OSError as error:
            self._stop(said(error))
            return indices[:0]
        free: npt.NDArray[np.int64] = indices[owner == 0]
        return free

    def refresh(self) -> None:
        """See what other jobs have made since, and forget the claims of those that died."""
        if self._stopped is not None:
            return
        with contextlib.suppress(OSError):
            if self._lock(LOCK_S):
                try:
                    self._bury_the_dead()
                finally:
                    self._unlock()
            self._read_rows()

    def resident_bytes(self) -> tuple[int, int]:
        """None: the system's page cache is the system's."""
        return 0, 0

    def close(self) -> None:
        """Have everything on the disk, then end the session."""
        if self._session_fd < 0:
            self._let_go()
            return
        try:
            for indices, places in self._tasks.values():
                rows = indices[places < LOAD]
                self._note(rows, np.zeros(len(rows), np.uint64))
            self._tasks.clear()
            if self._dirty or self._orphans:
                self._sync()
            if self._lock(LOCK_S):
                try:
                    self._read_rows()
                    with contextlib.suppress(OSError):  # a full disk: what it said before is true enough
                        self._write_index()
                finally:
                    self._unlock()
            for orphan in (*self._orphans, self.folder / f"{_SESSION}{self._session}"):
                orphan.unlink(missing_ok=True)
        except (OSError, CacheError):
            pass  # the session stays: whoever opens the folder next looks after it
        finally:
            self._let_go()

    # ---- opening

    def _open(self) -> None:
        missing = list(itertools.takewhile(lambda path: not path.exists(), (self.folder, *self.folder.parents)))
        try:
            self._open_folder()
        except OSError as error:
            # What was made of a new folder is of no use; one that is there already serves what it has.
            if error.errno in _FULL and (self.folder / _INDEX).exists():
                self._let_go()
                self._open_to_read("there is no room")
                return
            for path in missing:
                with contextlib.suppress(OSError):  # somebody else is using it by now
                    path.rmdir()
            raise

    def _open_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        entries = {entry.name for entry in os.scandir(self.folder)}
        if entries and not entries & {_INDEX, _LOCK}:
            raise CacheError(
                f"{self.folder} is not empty and is no cache (it holds {shown(sorted(entries)[:3])}): give a folder of "
                "its own, which may be missing"
            )
        if _INDEX in entries and not self._may_write():
            self._open_to_read()
            return
        self._lock_folder()
        try:
            for entry in list(os.scandir(self.folder)):
                if entry.name.startswith(f".{_INDEX}."):  # left by a kill; whoever writes one holds the lock
                    os.unlink(entry.path)
            stale = self._stale()
            if stale and self._cache.stale == "error":
                raise CacheError(
                    f"{self.folder} holds other samples: {'; '.join(stale)}. Give another folder, or "
                    "penstock.Cache(folder, stale='rebuild') to have these deleted and made anew"
                )
            if stale:
                self._clear()
                self._code = self._identity.code
            if not (self.folder / _INDEX).exists():
                self._make()
            self.form = DiskForm(tuple(self._checked(column) for column in self._wanted))
            self._rows_fd = self._open_rows()
            self._complete = np.zeros(self._items, np.bool_)
            self._random = np.zeros(self._items, np.bool_)
            self._claimed = 0
            self._read_rows()
            self._begin_session()
            self._bury_the_dead(at_opening=True)
            self._most = self._room()
        except OSError as error:
            if error.errno in _FULL:
                self._undo()
            raise
        finally:
            self._unlock()

    def _lock_folder(self) -> None:
        path = self.folder / _LOCK
        while True:
            self._lock_fd = os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o666)
            if not self._lock(OPEN_LOCK_S):
                raise CacheError(
                    f"{self.folder} has been locked for more than {OPEN_LOCK_S:g} s by another job, which checks it "
                    "after a crash or is stopped: wait for it, or end it"
                )
            # Whoever had it may have found no room for the folder, and have deleted it.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._lock_fd), os.stat(path)):
                    return
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _undo(self) -> None:
        """Delete what was made for nothing, under the lock: the session, and all of a folder that is new."""
        made = [self.folder / f"{_SESSION}{self._session}"] if self._session_fd >= 0 else []
        if self._made or not (self.folder / _INDEX).exists():
            made += [self.folder / name for name in (_INDEX, _ROWS, *(column.name for column in self._wanted), _LOCK)]
        for path in made:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def _may_write(self) -> bool:
        try:
            os.close(os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | _FLAGS, 0o666))
        except OSError as error:
            if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
                return False
            raise
        return True

    def _open_to_read(self, why: str = "it may only be read") -> None:
        """A folder of somebody else's, or a disk that nobody can write to: what is complete there is used."""
        self.warnings.clear()
        if stale := self._stale():
            raise CacheError(f"{self.folder} holds other samples, and {why}: {'; '.join(stale)}. Give another folder")
        self.form = DiskForm(tuple(self._checked(column) for column in self._wanted))
        self._rows_fd = self._open_rows(os.O_RDONLY)
        self._complete = np.zeros(self._items, np.bool_)
        self._random = np.zeros(self._items, np.bool_)
        self._claimed, self._most = 0, self._items
        self._read_rows()
        # Whoever wrote it may have died with the machine before all of it was on the disk.
        if self._sessions():
            for wrong in self._wrong_rows():
                self._complete[wrong] = False
            self.count = int(np.count_nonzero(self._complete))
        self._stopped, self._said = why, True
        if self.count < self._items:
            self.warnings.append(
                f"nothing more is kept in {self.folder}, as {why}: it has {self.count:,} of {self._items:,} items, the "
                "others are loaded every time"
            )

    def _stale(self) -> list[str]:
        """How what is there differs from what is wanted; empty if it does not, or if nothing is there."""
        try:
            index = _read_index(self.folder)
        except FileNotFoundError:
            return []
        if not isinstance(index, dict) or index.get("format") != "penstock cache":
            return ["its index.json is not one of ours"]
        if index.get("version") != VERSION:
            return [f"its version is {shown(index.get('version'))}, here it is {VERSION}"]
        mine = self._index()
        files = index.get("files")
        self._files = {name for name in files if isinstance(name, str)} if isinstance(files, list) else set()
        differs = []
        for name, what in (("key", "the key"), ("length", "the number of items"), ("items", "the items")):
            if index.get(name) != mine[name]:
                values = "" if name == "items" else f" ({shown(index.get(name))}, here {shown(mine[name])})"
                differs.append(f"{what} differs{values}" if name != "items" else f"{what} differ, or how they are read")
        theirs = index.get("form")
        if theirs != mine["form"]:
            if not differs and fitted(self._spec, self._each, theirs) is not None:
                raise OtherWidths(f"{self.folder} holds texts with other room for each")
            leaves = theirs.get("leaves") if isinstance(theirs, dict) else None
            differs.append(f"the form of a sample differs ({shown(leaves)}, here {shown(mine['form']['leaves'])})")
        code = index.get("code")
        self._code = code if isinstance(code, str) else ""
        if not differs and code and self._identity.code and _other_code(code, self._identity.code):
            self.warnings.append(
                f"the code of load has changed since the samples in {self.folder} were made, and they are used as they "
                'are: if samples should differ now, give another key (penstock.Cache(folder, key="v2")) or folder'
            )
        return differs

    def _index(self) -> dict[str, Any]:
        return {
            "format": "penstock cache",
            "version": VERSION,
            "key": self._identity.key,
            "items": self._identity.items,
            "code": self._code,
            "length": self._items,
            "form": form_of(self._spec, self._each),
            "files": [column.name for column in self._wanted],
        }

    def _make(self) -> None:
        """New files, all of them sparse; the index last, which makes them count."""
        self._made = True
        for column in self._wanted:
            _create(self.folder / column.name, column.header(self._items), self._items * column.row_bytes)
        _create(self.folder / _ROWS, _header((self._items,), np.dtype("<u8")), 8 * self._items)
        self._write_index()

    def _write_index(self) -> None:
        text = json.dumps({**self._index(), "complete": self.count == self._items and self._items > 0}, indent=1)
        made = self.folder / f".{_INDEX}.{os.getpid()}"
        try:
            with _opened(str(made), os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
                _write(fd, memoryview(text.encode()), 0)
                os.fsync(fd)
            os.replace(made, self.folder / _INDEX)
        except OSError:
            made.unlink(missing_ok=True)
            raise
        with contextlib.suppress(OSError):  # not every file system can
            _sync_folder(self.folder)

    def _clear(self) -> None:
        """Delete what is stale, if nobody is at work on it."""
        for path in self._sessions():
            if (fd := self._try(path)) is None:
                raise CacheError(
                    f"{self.folder} holds other samples, and another job uses them now: end it first, or give another "
                    "folder"
                )
            os.close(fd)
        (self.folder / _INDEX).unlink()
        # What Penstock made and nothing else: somebody may have put a file of his own beside it.
        ours = {_ROWS, *(column.name for column in self._wanted), *self._files}
        for entry in list(os.scandir(self.folder)):
            if _session_of(entry.name) is not None or entry.name in ours:
                os.unlink(entry.path)

    def _checked(self, column: _Wanted) -> Column:
        """A file, if it is what it should be."""
        path = self.folder / column.name
        header = column.header(self._items)
        size = len(header) + self._items * column.row_bytes
        try:
            with _opened(str(path), os.O_RDONLY) as fd:
                found = os.fstat(fd)
                fine = stat.S_ISREG(found.st_mode) and found.st_size == size and os.pread(fd, len(header), 0) == header
        except OSError as error:
            raise CacheError(
                f"{path} cannot be read ({said(error)}): delete {self.folder} to have it made again"
            ) from error
        if not fine:
            raise CacheError(f"{path} is not the file it was made as: delete {self.folder} to have it made again")
        inode = (found.st_dev, found.st_ino)
        return Column(str(path), len(header), column.shape, column.dtype, column.most, inode)

    def _open_rows(self, flags: int = os.O_RDWR) -> int:
        path = self.folder / _ROWS
        header = _header((self._items,), np.dtype("<u8"))
        self._rows_at = len(header)
        try:
            fd = os.open(path, flags | _FLAGS)
        except FileNotFoundError as error:
            raise CacheError(
                f"{path} is gone, which says what is complete: delete {self.folder} to have it made again"
            ) from error
        found = os.fstat(fd)
        if found.st_size != len(header) + 8 * self._items or os.pread(fd, len(header), 0) != header:
            os.close(fd)
            raise CacheError(f"{path} is not the file it was made as: delete {self.folder} to have it made again")
        return fd

    # ---- sessions

    def _sessions(self) -> list[Path]:
        return [Path(entry.path) for entry in os.scandir(self.folder) if _session_of(entry.name) is not None]

    def _begin_session(self) -> None:
        number = max((_session_of(path.name) or 0 for path in self._sessions()), default=_FIRST_SESSION - 1) + 1
        path = self.folder / f"{_SESSION}{number}"
        self._session_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o666)
        self._session = number
        self._flock(self._session_fd, self._locks[0])
        about = {"boot": _boot(), "host": socket.gethostname(), "pid": os.getpid()}
        _write(self._session_fd, memoryview(json.dumps(about).encode()), 0)

    def _bury_the_dead(self, *, at_opening: bool = False) -> None:
        """Give up the claims of sessions whose process is gone; check what they left if the machine was gone too."""
        live = {self._session}
        crashed: list[Path] = []
        for path in self._sessions():
            number = _session_of(path.name)
            if number == self._session or path in self._orphans:
                continue
            fd = self._try(path)
            if fd is None:
                live.add(number or 0)
                continue
            try:
                about = json.loads(os.pread(fd, 4096, 0) or b"{}")
            except ValueError:
                about = {}
            os.close(fd)
            if at_opening and (not _boot() or not isinstance(about, dict) or about.get("boot") != _boot()):
                crashed.append(path)
            else:
                self._orphans.append(path)  # not on the disk for sure: this session sees to it, and removes it then
        for start, rows in self._parts():
            owner = rows >> np.uint64(32)
            dead = start + np.flatnonzero((owner >= _FIRST_SESSION) & ~np.isin(owner, list(live)))
            self._note(dead, np.zeros(len(dead), np.uint64))
        if crashed:
            for wrong in self._wrong_rows():
                self._note(wrong, np.zeros(len(wrong), np.uint64))
            for path in crashed:
                path.unlink(missing_ok=True)
        self._read_rows()

    def _wrong_rows(self) -> Iterator[npt.NDArray[np.int64]]:
        """Read everything that is said to be complete; those whose checksums do not agree with that."""
        shelf = DiskShelf(self.form.columns)
        size = max(1, CHECKED_AT_ONCE_BYTES // max(1, sum(c.row_bytes for c in self.form.columns)))
        for start, rows in self._parts(size):
            complete = rows >> np.uint64(32) == _COMPLETE
            if complete.any():
                sums = np.fromiter(shelf.checks(start, len(rows)), np.uint64, len(rows))
                yield start + np.flatnonzero(complete & (sums != rows & np.uint64(0xFFFFFFFF)))

    # ---- rows.npy

    def _parts(self, size: int = 2**17) -> Iterator[tuple[int, npt.NDArray[np.uint64]]]:
        """The numbers of all items, some at a time: there may be many millions."""
        for start in range(0, self._items, size):
            part = np.empty(min(size, self._items - start), "<u8")
            _read(self._rows_fd, _bytes(part), self._rows_at + 8 * start, _ROWS)
            yield start, part

    def _read_rows(self) -> None:
        for start, part in self._parts():
            self._complete[start : start + len(part)] = part >> np.uint64(32) == _COMPLETE
        self.count = int(np.count_nonzero(self._complete))

    def _numbers(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """What is noted of these items now; they are in order."""
        now = np.empty(len(rows), "<u8")
        for place, at, count in _runs(rows, np.arange(len(rows))):
            _read(self._rows_fd, _bytes(now[at : at + count]), self._rows_at + 8 * place, _ROWS)
        return now

    def _note(self, rows: npt.NDArray[np.int64], numbers: npt.NDArray[np.uint64]) -> None:
        numbers = numbers.astype("<u8")
        for place, at, count in _runs(rows, np.arange(len(rows))) if len(rows) else ():
            _write(self._rows_fd, _bytes(numbers[at : at + count]), self._rows_at + 8 * place)

    def _claim(self, indices: npt.NDArray[np.int64], missing: npt.NDArray[np.int64], places: Shelved) -> None:
        """Take items that nobody has or makes; what others have made meanwhile is found out on the way."""
        missing = missing[~self._random[indices[missing]]]
        room = self._most - self.count - self._claimed
        if room <= 0 and self._most < self._items:
            if time.monotonic() < self._recount_at_s:
                return
            self._recount_at_s = time.monotonic() + RECOUNT_S
            self._read_rows()
            room = self._most - self.count - self._claimed
        if not len(missing) or room <= 0 or not self._lock(LOCK_S):
            return
        try:
            missing = missing[np.argsort(indices[missing], kind="stable")]
            wanted, first = np.unique(indices[missing], return_index=True)  # an item may come twice in a row
            missing = missing[first]
            owner = self._numbers(wanted) >> np.uint64(32)
            made = owner == _COMPLETE
            self._complete[wanted[made]] = True
            self.count += int(np.count_nonzero(made))
            places[missing[made]] = wanted[made]
            free = np.flatnonzero(owner == 0)[:room]
            self._note(wanted[free], np.full(len(free), np.uint64(self._session) << np.uint64(32)))
            places[missing[free]] = keep_at(wanted[free])
            self._claimed += len(free)
        finally:
            self._unlock()

    # ---- the disk

    def _room(self) -> int:
        """How many items may be kept in all: by the limit, and by what the disk has."""
        size = sum(column.row_bytes for column in self._wanted)
        if not size:
            return self._items
        there = os.statvfs(self.folder)
        free = there.f_bavail * there.f_frsize
        most = self.count + (free - free // LEFT_FREE) // size
        if self._cache.limit_bytes is not None:
            most = min(most, self._cache.limit_bytes // size)
            if self._cache.limit_bytes < size:
                self.warnings.append(
                    f"nothing is kept in {self.folder}: one item takes {format_bytes(size)}, and limit is "
                    f"{format_bytes(self._cache.limit_bytes)}. Give a larger one"
                )
        elif most < self._items:
            self.warnings.append(
                f"the samples take {format_bytes(self._items * size)}, and the disk of {self.folder} has "
                f"{format_bytes(free)} left: {most:,} of {self._items:,} items are kept, the rest is loaded every time"
            )
        return int(most)

    def _stop(self, why: str) -> None:
        if self._stopped is None:
            self._stopped = why

    def _notice(self) -> str | None:
        if self._stopped is None or self._said:
            return None
        self._said = True
        return (
            f"nothing more is kept in {self.folder} ({self._stopped}): what is there is used, the rest is loaded every "
            "time. Make room and start again to go on"
        )

    def _sync(self) -> None:
        """Have rows on the disk, then what says that they are there."""
        for column in self.form.columns:
            with column.opened(os.O_RDONLY) as fd:
                os.fsync(fd)
        os.fsync(self._rows_fd)

    # ---- locks

    def _lock(self, timeout_s: float) -> bool:
        """Take the lock of the folder, which the kernel takes back from whoever dies."""
        until = time.monotonic() + timeout_s
        while True:
            try:
                self._flock(self._lock_fd, self._locks[0])
                return True
            except BlockingIOError:
                if time.monotonic() >= until:
                    return False
                time.sleep(0.0005)

    def _unlock(self) -> None:
        self._flock(self._lock_fd, self._locks[1])

    def _try(self, path: Path) -> int | None:
        """A descriptor of a session that is over; None if its process lives."""
        fd = os.open(path, os.O_RDWR | _FLAGS)
        try:
            self._flock(fd, self._locks[0])
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    def _let_go(self) -> None:
        for fd in (self._session_fd, self._rows_fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)
        self._session_fd = self._rows_fd = self._lock_fd = -1


# ---------------------------------------- what files there are


@dataclasses.dataclass(frozen=True, slots=True)
class _Wanted:
    """One file as it should be."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    each: int
    most: int | None = None

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def header(self, items: int) -> bytes:
        return _header((items * self.each, *self.shape[(self.each > 1) :]), self.dtype)


def _columns(spec: Spec, each: int) -> list[_Wanted]:
    """The files of samples of this form: one for an array, two for a text (its bytes, and how many there are)."""
    wanted: list[_Wanted] = []
    taken = {_ROWS.casefold()}

    def name(path: str) -> str:
        plain = "".join(c if c.isalnum() or c in "._-" else "_" for c in path).strip(".") or "sample"
        plain, number = plain[:100], 1
        found = f"{plain}.npy"
        while found.casefold() in taken:
            number += 1
            found = f"{plain}-{number}.npy"
        taken.add(found.casefold())
        return found

    before = (each,) if each > 1 else ()
    for leaf in spec.leaves:
        if leaf.kind == "array":
            wanted.append(_Wanted(name(leaf.path), (*before, *leaf.shape), leaf.stored, each))
        else:
            path = leaf.path or "sample"
            wanted.append(_Wanted(name(f"{path}.length"), before, np.dtype("<i4"), each, leaf.shape[0]))
            wanted.append(_Wanted(name(path), (*before, *leaf.shape), leaf.stored, each))
    return wanted


def _header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    """The beginning of a .npy file. What NumPy has no name for (bfloat16) is given as bytes of that size."""
    described = np.lib.format.dtype_to_descr(dtype)
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": described, "fortran_order": False, "shape": shape})
    return file.getvalue()


def _read_index(folder: Path) -> Any:
    """What the index of a folder says; None if it is not even JSON."""
    with _opened(str(folder / _INDEX), os.O_RDONLY) as fd:
        data = os.pread(fd, _MOST_INDEX_BYTES + 1, 0)
    try:
        return json.loads(data) if len(data) <= _MOST_INDEX_BYTES else None
    except ValueError:
        return None


def as_kept(cache: Cache, spec: Spec, identity: Identity, *, items: int, each: int) -> Spec:
    """The spec with the room for texts that the folder has, if it holds these samples; else the spec as it is."""
    try:
        index = _read_index(Path(os.path.abspath(cache.folder)))
    except OSError:  # there is none, or it is told when it is opened
        return spec
    if not isinstance(index, dict) or index.get("version") != VERSION:
        return spec
    if (index.get("key"), index.get("items"), index.get("length")) != (identity.key, identity.items, items):
        return spec
    return fitted(spec, each, index.get("form")) or spec


def _create(path: Path, header: bytes, size: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()  # left from a making that was killed
    with _opened(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
        _write(fd, memoryview(header), 0)
        os.ftruncate(fd, len(header) + size)


def _session_of(name: str) -> int | None:
    number = name.removeprefix(_SESSION)
    return int(number) if name.startswith(_SESSION) and number.isdecimal() else None


def _other_code(one: Any, other: str) -> bool:
    """Whether two hashes of code differ, as far as they can be compared: each Python has its own."""
    return isinstance(one, str) and one.partition(":")[0] == other.partition(":")[0] and one != other


def _boot() -> str:
    """Which life of the machine this is; empty where nobody says."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
