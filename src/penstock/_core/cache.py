"""What a cache is: samples that were made once and are kept, and where each of them lies.

Two sides. A *store* is the parent's: it alone knows which items are kept, gives each that is to be kept a place, and
counts it as kept when the reply comes that says so. A *shelf* is the worker's: it copies between slots and places it is
told, and knows nothing else. So nothing is shared but the bytes, no lock is held by anybody who may be killed, and what
a worker had half written when it died was never said to be there.

What is kept stays: the first items that come, up to what there is room for. Every epoch finds the same ones again,
where throwing out the oldest would throw out each just before it is asked for.

Here are the store in memory for samples of one form, and what all stores have in common. ``cache_heap`` is for samples
of varying size, ``cache_disk`` for those that outlive the process.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from penstock._core import machine
from penstock._core.arena import AnyArena, Arena
from penstock._core.budget import parse_size
from penstock._core.copying import SHARED_BYTES, Begun, Hands
from penstock._core.layout import PAGE, Layout
from penstock._core.spec import Array, Spec
from penstock._core.task import LOAD, Shelved, keep_at

__all__ = [
    "NEVER",
    "Cache",
    "CacheWarning",
    "Form",
    "Memory",
    "RamForm",
    "RamStore",
    "Shelf",
    "Store",
    "items_first",
    "resident",
    "sort_out_cache",
]

NEVER: Final = -2
"""What a worker says of an item that must not be kept, this time or any other: it is random."""
INDEX_BYTES: Final = 4
"""What the parent has to remember of an item."""
_ABSENT: Final = -1
_COMING: Final = -2
_NOT_WANTED: Final = -3
# Rows up to this are gathered by one call of NumPy through a copy; larger ones are worth a call each.
SMALL_ROW_BYTES: Final = 16 * 2**10
PIECE_BYTES: Final = 256 * 2**10
FORESEEN_BYTES: Final = 64 * 2**10  # a call for each run of them is then a call for many pages


class CacheWarning(UserWarning):
    """A cache does less than was asked, or may not be what is expected; the samples are right in any case."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cache:
    """For ``cache``: a folder on disk, with more to say than its name.

    ``key`` stands for everything that Penstock cannot see and that makes samples what they are: the version of the
    data, the settings of load. What was made with another key is never served. ``limit`` is the most that the folder
    may take ("20 GiB"); what does not fit is loaded every time. ``stale`` says what becomes of a folder that holds
    something else: "error", or "rebuild" to delete that and begin anew.
    """

    folder: str | os.PathLike[str]
    key: str = ""
    limit: int | str | None = None
    stale: Literal["error", "rebuild"] = "error"

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str | os.PathLike) or not os.fspath(self.folder):
            raise TypeError(f"Cache({self.folder!r}): give the folder as a str or a path")
        if not isinstance(self.key, str):
            raise TypeError(f"Cache(key={self.key!r}): a key is a str, such as 'v2'")
        if self.stale not in ("error", "rebuild"):
            raise ValueError(f'Cache(stale={self.stale!r}): stale is "error" or "rebuild"')
        if self.limit is not None:
            object.__setattr__(self, "limit", parse_size(self.limit, available=None, name="the limit of a Cache"))

    @property
    def limit_bytes(self) -> int | None:
        """The limit as a number."""
        return self.limit if isinstance(self.limit, int) else None


def sort_out_cache(cache: Any) -> Literal["ram", "device"] | Cache | None:
    """What the user gave as ``cache``; TypeError or ValueError when it is nothing of the kind."""
    if cache is None or isinstance(cache, Cache):
        return cache
    if cache == "ram":
        return "ram"
    if cache == "device":
        return "device"
    if isinstance(cache, str | os.PathLike) and os.fspath(cache):
        return Cache(cache)
    raise TypeError(f'cache={cache!r} is not known: give "ram", "device", a folder, or penstock.Cache(folder, key=...)')


class Memory(Protocol):
    """Shared or private memory, as ``fill`` sees it."""

    def window(self, offset: int, size: int) -> tuple[Any, int]: ...


class Shelf(Protocol):
    """The worker's side: copies samples between slots and places.

    ``columns`` are those of a slot with one row per item; ``at`` are rows of them.
    """

    def read(self, places: Shelved, columns: Sequence[Array], at: Shelved) -> None:
        """Copy what lies at these places into these rows."""

    def write(self, places: Shelved, columns: Sequence[Array], at: Shelved) -> Shelved:
        """Copy these rows to these places; a number of 0 or more for each, to be remembered with it."""

    def close(self) -> None:
        """Let go of what is open."""


class Form(Protocol):
    """What a worker is told of a cache."""

    def open(self, memory: Memory) -> Any:
        """The shelf of it."""


class Store(Protocol):
    """The parent's side: what is kept, and where."""

    in_memory: bool
    """Whether it lies in the arena."""

    @property
    def form(self) -> Form:
        """What workers are told."""

    def look(self, indices: npt.NDArray[np.int64]) -> Shelved | None:
        """Where each of these items lies or is to be put; None if none is there and none is to be kept."""

    def at_hand(self, indices: npt.NDArray[np.int64]) -> bool:
        """Whether all of them lie in memory, ready to be copied."""

    def held(self, places: Shelved) -> int:
        """How many of the items of a ``look`` need not be loaded."""

    def begun(self, task: int, indices: npt.NDArray[np.int64], places: Shelved) -> None:
        """A task was given out with these."""

    def taken(self, task: int, kept: bytes | str | None) -> str | None:
        """A task was replied to, with what was kept; something to tell the user, or None."""

    def withdrawn(self, task: int) -> None:
        """A task will never be done."""

    def copy(self, places: Shelved, memory: Any, start: int) -> None:
        """Copy items that are at hand into the slot that begins there."""

    def unclaimed(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Those of these items that nobody has or makes at the moment."""

    def wants(self) -> npt.NDArray[np.int64]:
        """The items that are not kept and could be."""

    def refresh(self) -> None:
        """An epoch begins: see what others have done."""

    @property
    def count(self) -> int:
        """Items that are kept."""

    def resident_bytes(self) -> tuple[int, int]:
        """Memory that it takes now; and how much of the arena's own count is that."""

    def close(self) -> None:
        """Let go of everything. Twice is harmless."""


def items_first(column: Array, each: int) -> Array:
    """A column with one row per item instead of one per sample."""
    return column if each == 1 else column.reshape(len(column) // each, each, *column.shape[1:])


@dataclasses.dataclass(frozen=True, slots=True)
class RamForm:
    """Where in the arena the kept samples lie: a slot of its own, as it were, with room for all of them."""

    spec: Spec
    entries: int
    each: int
    offset: int

    def layout(self) -> Layout:
        """How they lie there."""
        return Layout.of(self.spec, self.entries * self.each)

    def open(self, memory: Memory) -> RamShelf:
        """The shelf over it."""
        layout = self.layout()
        columns = layout.arrays(*memory.window(self.offset, layout.nbytes))
        return RamShelf([items_first(column, self.each) for column in columns])


class RamShelf:
    """Shelved samples in memory."""

    def __init__(self, columns: list[Array]) -> None:
        self._columns = columns

    def read(self, places: Shelved, columns: Sequence[Array], at: Shelved) -> None:
        """Gather rows: in one call where they follow each other in the slot."""
        if not len(places):
            return
        if _follow(at):
            first, last = int(at[0]), int(at[-1])
            self.gather(places, [column[first : last + 1] for column in columns])
            return
        for kept, column in zip(self._columns, columns, strict=True):
            if not kept.size:
                continue
            if (size := kept.nbytes // len(kept)) <= SMALL_ROW_BYTES:
                for part in _pieces(len(at), size):
                    column[at[part]] = np.take(kept, places[part], axis=0)
            else:
                for row, place in zip(at.tolist(), places.tolist(), strict=True):
                    column[row] = kept[place]

    def gather(self, places: Shelved, columns: Sequence[Array]) -> None:
        """Rows to the first rows of these columns, in order."""
        count = len(places)
        run = int(places[0]) if _follow(places) else -1
        for kept, column in zip(self._columns, columns, strict=True):
            if not kept.size:
                continue
            if run >= 0:
                column[:count] = kept[run : run + count]
            else:
                # "clip" because with "raise" NumPy gathers into a buffer first; places are never out of bounds.
                np.take(kept, places, axis=0, out=column[:count], mode="clip")

    def write(self, places: Shelved, columns: Sequence[Array], at: Shelved) -> Shelved:
        """Scatter rows to their places."""
        for kept, column in zip(self._columns, columns, strict=True):
            if not kept.size:
                continue
            if (size := kept.nbytes // len(kept)) <= SMALL_ROW_BYTES:
                for part in _pieces(len(at), size):
                    kept[places[part]] = column[at[part]]
            else:
                for row, place in zip(at.tolist(), places.tolist(), strict=True):
                    kept[place] = column[row]
        return np.zeros(len(places), np.int64)

    def close(self) -> None:
        """Let go of the memory."""
        self._columns = []


def _pieces(count: int, row_bytes: int) -> Iterator[slice]:
    """Rows in parts that a worker has the memory to hold a copy of."""
    size = max(1, PIECE_BYTES // row_bytes)
    return (slice(start, start + size) for start in range(0, count, size))


def _follow(places: Shelved) -> bool:
    # Not np.diff, which takes four times as long for the few places of a batch.
    return int(places[-1]) - int(places[0]) == len(places) - 1 and bool((places[1:] - places[:-1] == 1).all())


def resident(arena: AnyArena, touched: int, size: int) -> tuple[int, int]:
    """Memory of so much of an arena, of which a part was written to; and how much of it the arena counts itself."""
    return (touched, touched) if isinstance(arena, Arena) else (size, size)


class RamStore:
    """Which items are kept in memory, all of one form."""

    in_memory = True

    def __init__(self, arena: AnyArena, layout: Layout, *, items: int, indexed: int, entries: int, each: int) -> None:
        """``indexed`` of the items may be kept, those with the lowest indices, and ``entries`` of these at once."""
        self._arena = arena
        self._layout = layout
        self._each = each
        self._items = items
        self._entries = min(entries, indexed)
        spec = layout.spec
        size = Layout.of(spec, self._entries * each).nbytes
        self.form = RamForm(spec, self._entries, each, arena.extend(size))
        self._columns = self.form.layout().columns
        self._size = -(-size // PAGE) * PAGE
        self._rows = np.full(indexed, _ABSENT, np.int32)
        self._used = 0
        self._free: list[int] = []
        self._tasks: dict[int, tuple[npt.NDArray[np.int64], Shelved]] = {}
        self._shelf: RamShelf | None = None
        self._hands: Hands | None = None
        self.count = 0

    def look(self, indices: npt.NDArray[np.int64]) -> Shelved | None:
        """Shelved of those that are there, and new ones for others while there is room."""
        rows = self._rows
        if len(rows) == self._items:
            at = rows[indices].astype(np.int64)
            if self.count == self._items:
                return at
        else:
            at = np.where(indices < len(rows), rows[np.minimum(indices, len(rows) - 1)], _NOT_WANTED).astype(np.int64)
        missing = np.flatnonzero(at < 0)
        if not len(missing):
            return at
        room = len(self._free) + self._entries - self._used
        places = np.maximum(at, LOAD)
        before = self._used
        if room:
            for ordinal in missing.tolist():
                index = int(indices[ordinal])
                # Asked again, for an item may come twice in a row.
                if at[ordinal] != _ABSENT or rows[index] != _ABSENT:
                    continue
                if self._free:
                    row = self._free.pop()
                elif self._used < self._entries:
                    row = self._used
                    self._used += 1
                else:
                    break
                rows[index] = _COMING
                places[ordinal] = keep_at(row)
            self._enlarge_pages(before)
        return places if len(missing) < len(at) or (places < LOAD).any() else None

    def at_hand(self, indices: npt.NDArray[np.int64]) -> bool:
        """Whether they are all there."""
        if self.count == self._items:
            return True
        return int(indices.max()) < len(self._rows) and bool((self._rows[indices] >= 0).all())

    def held(self, places: Shelved) -> int:
        """How many of them are there."""
        return int(np.count_nonzero(places >= 0))

    def begun(self, task: int, indices: npt.NDArray[np.int64], places: Shelved) -> None:
        """Remember whom the new places were given to."""
        if (places < LOAD).any():
            self._tasks[task] = indices, places

    def taken(self, task: int, kept: bytes | str | None) -> str | None:
        """What was written completely is there from now on; the places of the rest are free again."""
        told = self._tasks.pop(task, None)
        if told is None:
            return None
        indices, places = told
        numbers = np.frombuffer(kept, np.int64).tolist() if isinstance(kept, bytes) else [LOAD] * len(places)
        random = False
        written: list[int] = []
        for index, place, number in zip(indices.tolist(), places.tolist(), numbers, strict=True):
            if place >= LOAD:
                continue
            row = keep_at(place)
            if number >= 0:
                self._rows[index] = row
                self.count += 1
                written.append(row)
            else:
                random = random or number == NEVER
                self._rows[index] = _NOT_WANTED if number == NEVER else _ABSENT
                self._free.append(row)
        self._foresee(written)
        return kept if isinstance(kept, str) else RANDOM if random else None

    def _enlarge_pages(self, before: int) -> None:
        """Have what is about to be written in large pages; so many items were there before."""
        if self._used > before:
            for start, size in self._ranges():
                # All of it: nobody comes back to it, and what is being loaded meanwhile does not wait.
                while not self._arena.enlarge_pages(start + before * size, (self._used - before) * size):
                    pass

    def _ranges(self) -> Iterator[tuple[int, int]]:
        """Where each column starts, and what an item takes in it."""
        for column in self._columns:
            if size := column.dtype.itemsize * math.prod(column.shape[1:]) * self._each:
                yield self.form.offset + column.offset, size

    def _foresee(self, rows: list[int]) -> None:
        """Have memory mapped in which a worker put large samples: the consumer may be the one that copies them."""
        if not isinstance(self._arena, Arena) or self._layout.spec.sample_bytes * self._each < FORESEEN_BYTES:
            return
        rows.sort()
        cuts = [0, *(at for at in range(1, len(rows)) if rows[at] != rows[at - 1] + 1), len(rows)]
        for at, size in self._ranges():
            for start, stop in itertools.pairwise(cuts):
                if stop > start:
                    self._arena.foresee(at + rows[start] * size, (stop - start) * size)

    def withdrawn(self, task: int) -> None:
        """The places are free again."""
        self.taken(task, None)

    def copy(self, places: Shelved, memory: Any, start: int) -> None:
        """Gather rows into a slot."""
        do = self._gathering(places, memory, start)
        if len(places) < 2 or len(places) * self._each * self._layout.spec.sample_bytes < SHARED_BYTES:
            do(0, len(places))
            return
        if self._hands is None:
            # Closed by another thread meanwhile, nobody would end the threads.
            self._hands = Hands(machine.look().cores if self._size else 1)
        self._hands.share(len(places), do)

    def begin_copy(self, places: Shelved, memory: Any, start: int) -> Begun | None:
        """Have others begin to gather them, if there are others: ``finish_copy`` sees to the rest."""
        return None if self._hands is None else self._hands.begin(len(places), self._gathering(places, memory, start))

    def finish_copy(self, begun: Begun) -> None:
        """Wait until all are there."""
        assert self._hands is not None
        self._hands.finish(begun)

    def _gathering(self, places: Shelved, memory: Any, start: int) -> Callable[[int, int], None]:
        if self._shelf is None:
            self._shelf = self.form.open(self._arena)
        shelf, columns = self._shelf, [items_first(c, self._each) for c in self._layout.arrays(memory, start)]
        return lambda first, behind: shelf.gather(places[first:behind], [c[first:behind] for c in columns])

    def unclaimed(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Those of them that nobody else has or makes: nobody else does anything here."""
        return indices

    def wants(self) -> npt.NDArray[np.int64]:
        """The first of those that are missing, as many as there is room for."""
        room = len(self._free) + self._entries - self._used
        return np.flatnonzero(self._rows == _ABSENT)[:room]

    def refresh(self) -> None:
        """Nobody else writes here."""

    def resident_bytes(self) -> tuple[int, int]:
        """What was written to, where the system gives memory only then."""
        page, end = self._arena.page_bytes, self.form.offset + self._size
        ends = [(at, min(end, -(-(at + self._used * size) // page) * page)) for at, size in self._ranges()]
        touched = min(self._size, sum(behind - at for at, behind in ends)) if self._used else 0
        return resident(self._arena, touched, self._size)

    def close(self) -> None:
        """Give the memory back: batches that are alive would keep all of it."""
        self._shelf = None
        size, self._size = self._size, 0
        if self._hands is not None:
            self._hands.close()
        if size:
            self._arena.discard(self.form.offset, size)


RANDOM: Final = (
    "load asks penstock.rng(), so its samples are meant to differ from epoch to epoch: they are not kept in the cache "
    "and are loaded every time. Move the random part out of load (into collate_fn, or the training loop) to have the "
    "rest of its work kept, or leave cache= out"
)
"""What is told of a load that is random."""
