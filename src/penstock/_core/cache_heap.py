"""Shelved samples of varying size, in memory: an item is a record in a heap, wherever there was room for it.

For what a row cannot hold: samples that are padded or collated by a function, items with any number of samples. What is
kept is what load gave, before it is collated. The parent gives every task some room; its worker writes record after
record there, and says in its reply where each begins and ends; what is left of the room is given to later tasks.

The places of a task are pairs of numbers, (where, bytes) for each item and last for the room. ``HeapStore`` runs in the
parent, the rest where load runs.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import optree

from penstock._core import context
from penstock._core.arena import AnyArena
from penstock._core.cache import NEVER, RANDOM, Memory, resident
from penstock._core.layout import LINE, PAGE
from penstock._core.spec import Array, dump_tree, flatten, load_tree, to_dtype
from penstock._core.task import LOAD, Shelved

__all__ = ["HEAP_INDEX_BYTES", "HeapForm", "HeapStore"]

HEAP_INDEX_BYTES: Final = 16
"""What the parent has to remember of an item: where it is and how large."""
_KEEP: Final = -2
_TOO_LARGE: Final = -3  # below this: the bytes that would have been needed, negative
_ABSENT, _COMING, _NOT_WANTED = -1, -2, -3
# A record has at least so much beside its arrays: the tree, their shapes.
HEADER_BYTES: Final = 512
# Records differ, and what is left of a room is given to others: it may be ample.
AMPLE: Final = 4
LEAST_ROOM_BYTES: Final = 64 * 2**10
MOST_TREES: Final = 64  # trees that keep changing are not worth remembering
_HEAD_BYTES: Final = 24  # three numbers: bytes of the tree, of what is said of its leaves, of these
_PLAIN: Final = (bool, int, float, complex, str, bytes)


class _Unkept(Exception):
    """A sample that cannot be kept, and why."""


@dataclasses.dataclass(frozen=True, slots=True)
class HeapForm:
    """Where in the arena the heap lies."""

    offset: int
    size: int

    def open(self, memory: Memory) -> HeapShelf:
        """The shelf over it."""
        mapping, start = memory.window(self.offset, self.size)
        return HeapShelf(np.frombuffer(mapping, np.uint8, self.size, start))


class HeapShelf:
    """Reads and writes records."""

    def __init__(self, heap: Array) -> None:
        self.heap = heap
        self._dumped: dict[optree.PyTreeSpec, bytes] = {}
        self._loaded: dict[bytes, optree.PyTreeSpec] = {}

    def dumped(self, tree: optree.PyTreeSpec) -> bytes:
        """A tree as bytes; the same few come again and again."""
        if tree not in self._dumped:
            if len(self._dumped) > MOST_TREES:
                self._dumped.clear()
            self._dumped[tree] = dump_tree(tree)
        return self._dumped[tree]

    def loaded(self, data: bytes) -> optree.PyTreeSpec:
        """The tree of these bytes."""
        if data not in self._loaded:
            if len(self._loaded) > MOST_TREES:
                self._loaded.clear()
            self._loaded[data] = load_tree(data)
        return self._loaded[data]

    def read(self, where: int, size: int) -> Iterator[Any]:
        """The samples of a record, as copies: a collate_fn may write to what it gets."""
        record = self.heap[where : where + size]
        at = 0
        while at < size:
            shape_of_tree, length, nbytes = record[at : at + _HEAD_BYTES].view(np.int64).tolist()
            head = record[at + _HEAD_BYTES : at + _HEAD_BYTES + shape_of_tree + length].tobytes()
            tree, parts = head[:shape_of_tree], json.loads(head[shape_of_tree:])
            begin = at + _lined(_HEAD_BYTES + len(head))
            body = record[begin : begin + nbytes].copy()
            leaves = []
            for kind, described, shape, offset in parts:
                dtype, count = _dtype(described), math.prod(shape)
                data = body[offset : offset + count * dtype.itemsize]
                leaves.append(_put_together(kind, data.view(dtype).reshape(shape) if count else np.empty(shape, dtype)))
            yield optree.tree_unflatten(self.loaded(tree), leaves)
            at = begin + nbytes

    def records(self, places: Shelved, count: int) -> Records:
        """What the cache has of the items of a task."""
        return Records(self, places.reshape(count + 1, 2))

    def close(self) -> None:
        """Let go of the memory."""
        self.heap = np.empty(0, np.uint8)


class Records:
    """The records of one task: those that are there, and those that are being written."""

    def __init__(self, shelf: HeapShelf, places: Shelved) -> None:
        self._shelf = shelf
        self._places = places[:-1]
        self._at, room = places[-1].tolist()
        self._end = self._at + room
        self._kept = np.full((len(places) - 1, 2), LOAD)
        self._why: str | None = None

    def samples(self, ordinal: int, made: Iterator[Any]) -> Iterator[Any]:
        """The samples of an item: from its record, or as they are made, and then they are written down if wanted."""
        where, size = self._places[ordinal].tolist()
        if where >= 0:
            yield from self._shelf.read(where, size)
            return
        if where != _KEEP or self._why is not None:
            yield from made
            return
        start = at = self._at
        for sample in made:
            if self._why is None:
                try:
                    at = self._append(sample, at)
                except _Unkept as reason:
                    self._why = str(reason)
            yield sample
        if context.drew():
            self._kept[ordinal] = NEVER, 0
        elif self._why is None and at <= self._end:
            self._kept[ordinal] = start, at - start
            self._at = at
        elif self._why is None:
            self._kept[ordinal] = _TOO_LARGE, at - start

    def kept(self) -> bytes | str:
        """What to tell the parent."""
        return self._why if self._why is not None else self._kept.tobytes()

    def _append(self, sample: Any, at: int) -> int:
        """Write one sample if it fits; where the next one would go."""
        values, tree = flatten(sample)
        parts: list[tuple[str, Any, tuple[int, ...], int]] = []  # kind, dtype, shape, place
        arrays: list[Array] = []
        size = 0
        for value in values:
            kind, array = _taken_apart(value)
            parts.append((kind, _described(array.dtype), array.shape, size))
            arrays.append(array)
            size += _lined(array.nbytes)
        shape_of_tree, told = self._shelf.dumped(tree), json.dumps(parts).encode()
        head = shape_of_tree + told
        begin = at + _lined(_HEAD_BYTES + len(head))
        if begin + size > self._end:
            return begin + size
        self._shelf.heap[at : at + _HEAD_BYTES].view(np.int64)[:] = len(shape_of_tree), len(told), size
        self._shelf.heap[at + _HEAD_BYTES : at + _HEAD_BYTES + len(head)] = np.frombuffer(head, np.uint8)
        for array, (_, _, _, offset) in zip(arrays, parts, strict=True):
            if array.nbytes:
                there = self._shelf.heap[begin + offset : begin + offset + array.nbytes]
                there.view(array.dtype).reshape(array.shape)[...] = array
        return begin + size


def _taken_apart(value: Any) -> tuple[str, Array]:
    """A leaf as bytes, and what it was."""
    kind = type(value)
    if kind is np.ndarray and not value.dtype.hasobject:
        return "array", value
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return "generic", np.asarray(value)
    if kind in _PLAIN:
        # As text: an int may be of any size, where only a collate_fn sees it.
        return kind.__name__, np.frombuffer(_said(value), np.uint8)
    if kind.__module__ == "torch" and kind.__name__ == "Tensor" and value.device.type == "cpu":
        try:
            return "torch", value.detach().numpy()
        except (TypeError, RuntimeError) as error:  # bfloat16, or a layout that NumPy does not have
            raise _Unkept(f"samples with tensors of {value.dtype} are not kept in the cache ({error})") from error
    raise _Unkept(
        f"samples that hold a {kind.__module__}.{kind.__qualname__} are not kept in the cache and are loaded every "
        "time: return arrays, numbers, strings or bytes from load, in tuples, lists or dicts, or leave cache= out"
    )


def _said(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else repr(value).encode()


_FROM_BYTES: Final[dict[str, Callable[[bytes], Any]]] = {
    "bytes": bytes,
    "str": lambda data: data.decode("utf-8", "surrogatepass"),
    "bool": lambda data: data == b"True",
    "int": int,
    "float": float,
    "complex": lambda data: complex(data.decode()),
}


def _described(dtype: np.dtype[Any]) -> Any:
    """A dtype in words that JSON knows."""
    return dtype.name if dtype.type.__module__.startswith("ml_dtypes") else np.lib.format.dtype_to_descr(dtype)


def _dtype(described: Any) -> np.dtype[Any]:
    return to_dtype(described if isinstance(described, str) else _fields(described))


def _fields(described: Any) -> Any:
    """The fields of a record: JSON has made lists of its tuples."""
    if isinstance(described, str):
        return described
    return [(tuple(n) if isinstance(n, list) else n, _fields(form), *map(tuple, rest)) for n, form, *rest in described]


def _put_together(kind: str, array: Array) -> Any:
    if kind == "generic":
        return array[()]
    if kind in _FROM_BYTES:
        return _FROM_BYTES[kind](array.tobytes())
    if kind == "torch":
        import torch

        return torch.from_numpy(array)
    return array


def _lined(size: int) -> int:
    return -(-size // LINE) * LINE


class HeapStore:
    """Which items are kept in memory, and where each record lies."""

    in_memory = True

    def __init__(self, arena: AnyArena, *, items: int, indexed: int, room: int, record_bytes: int) -> None:
        """``indexed`` of the items may be kept, those with the lowest indices, in ``room`` bytes."""
        self._arena = arena
        self._items = items
        size = max(PAGE, room // PAGE * PAGE)
        self.form = HeapForm(arena.extend(size), size)
        self._size = size
        self._where = np.full((indexed, 2), (_ABSENT, 0), np.int64)
        self._record = record_bytes + HEADER_BYTES
        self._used = self._written = 0
        self._rests: list[tuple[int, int]] = []
        self._tasks: dict[int, tuple[npt.NDArray[np.int64], Shelved]] = {}
        self.count = 0

    def look(self, indices: npt.NDArray[np.int64]) -> Shelved | None:
        """Records that are there, and some room for those that are not."""
        places = np.full((len(indices) + 1, 2), (LOAD, 0))
        known = np.flatnonzero(indices < len(self._where))
        places[known] = self._where[indices[known]]
        missing = [i for i in known.tolist() if places[i, 0] == _ABSENT]
        places[:, 0] = np.maximum(places[:, 0], LOAD)
        places[-1] = self._room(max(AMPLE * self._record * len(missing), LEAST_ROOM_BYTES) if missing else 0)
        if places[-1, 1]:
            for i in missing:
                if self._where[indices[i], 0] == _ABSENT:  # an item may come twice in a row
                    self._where[indices[i], 0] = _COMING
                    places[i, 0] = _KEEP
        return places.ravel() if (places[:-1, 0] != LOAD).any() else None

    def _room(self, wanted: int) -> tuple[int, int]:
        if not wanted:
            return 0, 0
        left = self._size - self._used
        if left >= wanted or left >= self._record:
            size = min(left, _lined(wanted))
            self._used += size
            return self._used - size, size
        # The largest rest that can take at least one record.
        self._rests.sort(key=lambda rest: rest[1])
        if self._rests and self._rests[-1][1] >= min(wanted, self._record):
            where, size = self._rests.pop()
            if size > wanted:
                self._give_back(where + _lined(wanted), size - _lined(wanted))
                size = _lined(wanted)
            return where, size
        return 0, 0

    def _give_back(self, where: int, size: int) -> None:
        if where + size == self._used:
            self._used = where
        elif size >= HEADER_BYTES:
            self._rests.append((where, size))

    def at_hand(self, indices: npt.NDArray[np.int64]) -> bool:  # noqa: ARG002 - the interface
        """Somebody has to do something for them."""
        return False

    def held(self, places: Shelved) -> int:
        """How many records are there."""
        return int(np.count_nonzero(places[:-2:2] >= 0))

    def begun(self, task: int, indices: npt.NDArray[np.int64], places: Shelved) -> None:
        """Remember whom the room was given to."""
        if places[-1]:
            self._tasks[task] = indices, places

    def taken(self, task: int, kept: bytes | str | None) -> str | None:
        """Records that were written completely are there from now on; the rest of the room is for others."""
        told = self._tasks.pop(task, None)
        if told is None:
            return None
        indices, places = told
        pairs = np.frombuffer(kept, np.int64).reshape(-1, 2) if isinstance(kept, bytes) else None
        end, stop = int(places[-2]), int(places[-2] + places[-1])
        random = False
        for ordinal in np.flatnonzero(places[:-2:2] == _KEEP).tolist():
            where, size = (LOAD, 0) if pairs is None else pairs[ordinal].tolist()
            index = int(indices[ordinal])
            if where >= 0:
                self._where[index] = where, size
                end = max(end, where + size)
                self.count += 1
                self._written += size
                # Most records of what comes should fit; what was the largest so far is not forgotten at once.
                self._record = max(size, self._record - self._record // 64)
                continue
            random = random or where == NEVER
            never = where == NEVER or isinstance(kept, str) or (where == _TOO_LARGE and size > self._size)
            self._where[index] = _NOT_WANTED if never else _ABSENT, 0
            if where == _TOO_LARGE and size <= self._size:
                self._record = max(self._record, size)
        self._give_back(end, stop - end)
        return kept if isinstance(kept, str) else RANDOM if random else None

    def withdrawn(self, task: int) -> None:
        """The room is for others."""
        self.taken(task, None)

    def copy(self, places: Shelved, memory: Any, start: int) -> None:  # noqa: ARG002 - the interface
        """Never asked for."""
        raise AssertionError

    def unclaimed(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Those of them that nobody else has or makes: nobody else does anything here."""
        return indices

    def wants(self) -> npt.NDArray[np.int64]:
        """Those that are missing, if there is any room."""
        room = self._size - self._used + sum(size for _, size in self._rests)
        return np.flatnonzero(self._where[:, 0] == _ABSENT)[: room // self._record]

    def refresh(self) -> None:
        """Nobody else writes here."""

    def resident_bytes(self) -> tuple[int, int]:
        """What was written to, where the system gives memory only then."""
        return resident(self._arena, min(self._size, self._written), self._size)

    def close(self) -> None:
        """Give the memory back: batches that are alive would keep all of it."""
        if self._size:
            self._arena.discard(self.form.offset, self._size)
            self._size = 0
