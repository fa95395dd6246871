"""What a user gave as items, seen as one of three kinds: a sequence, a stream, or a source. Runs in the parent.

Items are identities and stay here; only those of a task travel. A sequence is picked from by index vectors and
never copied. A stream is pulled from exactly as far as there is room to load, and what was pulled but not handed
out when an iteration stops early is given again to the next one.
"""

from __future__ import annotations

import gc
import itertools
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from penstock._core.errors import LoadError, said, shown
from penstock._core.lines import Lines
from penstock._core.order import Window, windowed
from penstock._core.source import Source

__all__ = ["Picker", "Stream", "held_bytes", "sort_out", "stream_error"]

_PLAIN: Final = {int, float, str, bytes, bool, type(None)}
_NOT_HELD: Final = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_FEW: Final = 8  # of many parts so many are looked at, and the others taken to be like them
_DEEP: Final = 6


def held_bytes(item: object) -> int:
    """About what an item takes in this process, with what it refers to: some microseconds, whatever its size."""
    if type(item) in _PLAIN:
        return sys.getsizeof(item)
    if isinstance(item, np.ndarray):
        return int(item.nbytes)
    return _held(item, _DEEP)


def _held(item: object, deep: int) -> int:
    if type(item) in _PLAIN or not deep:
        return sys.getsizeof(item, 64)
    size = getattr(item, "nbytes", None)  # arrays of whatever framework
    if isinstance(size, int):
        return size
    own = sys.getsizeof(item, 64)
    if isinstance(item, dict):
        parts: Any = itertools.chain.from_iterable(itertools.islice(item.items(), _FEW))
        return own + _held_together(list(parts), 2 * len(item), deep)
    if isinstance(item, list | tuple):
        return own + _held_together([item[i * len(item) // _FEW] for i in range(min(_FEW, len(item)))], len(item), deep)
    if isinstance(item, set | frozenset | deque):
        return own + _held_together(list(itertools.islice(item, _FEW)), len(item), deep)
    referents = [part for part in gc.get_referents(item) if not isinstance(part, _NOT_HELD)]
    return own + _held_together(referents[:_FEW], len(referents), deep)


def _held_together(parts: list[Any], count: int, deep: int) -> int:
    return sum(_held(part, deep - 1) for part in parts) * count // len(parts) if parts else 0


class Picker:
    """Picks items out of a sequence by index."""

    def __init__(self, items: Any) -> None:
        self._items = items.iloc if hasattr(items, "iloc") else items  # pandas looks up labels, not places
        self._array = isinstance(items, np.ndarray)
        self.raw = items
        self.length = len(items)

    def __call__(self, indices: npt.NDArray[np.int64]) -> list[Any]:
        """The items at these places."""
        if self._array:
            # One gather, and plain Python values where there are some: they are smaller in a message. Dates and records
            # would become something else.
            picked = self._items[indices]
            return picked.tolist() if picked.ndim == 1 and picked.dtype.kind in "biufcSU" else list(picked)
        items = self._items
        if type(items) is range and items and max(abs(items[0]), abs(items[-1])) < 2**62:
            return list((indices * items.step + items.start).tolist())
        return [items[i] for i in indices.tolist()]

    def kinds(self) -> set[type[Any]] | None:
        """The types of all items, and of what is in those that are tuples; None where items are made when asked for.

        About 30 ns an item.
        """
        items = self._items
        if isinstance(items, range):
            return {int}
        if self._array:
            return {items.dtype.type} if items.ndim == 1 and not items.dtype.hasobject else None
        if type(items) not in (list, tuple):
            return None
        found = set(map(type, items))
        if found == {tuple}:
            found = set(map(type, itertools.chain.from_iterable(items)))
        return found


class Stream:
    """Items that come one after the other."""

    length = None

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items
        # An iterator gives its items once: a further epoch goes on where the last one stopped. So does something that
        # hands out the same iterator every time.
        first = iter(items)
        self._once = first is items or first is iter(items)
        self._raw = first if self._once else None
        self._peeked: deque[Any] = deque()
        self._back: deque[Any] = deque()
        self._flow: Iterator[Any] | None = None
        self._to_skip = 0
        self._window: Window[Any] | None = None

    @property
    def held_bytes(self) -> int:
        """What waits in the shuffle window."""
        return 0 if self._window is None else self._window.held_bytes

    @property
    def restarts(self) -> bool:
        """Whether a new epoch begins at the start again."""
        return not self._once

    def begin(self, window: tuple[int, int] | None, seed: int, epoch: int, base: int) -> Iterator[Any]:
        """The items of an epoch from a place on, in order or drawn from a shuffle window of so many items and bytes.

        What comes before is pulled and let go. A one-time stream is where it is, but for what ``skip`` says.
        """
        if not self._once:
            items = iter(self._items)
            if window is not None:
                items = self._window = _drawn(self._items, window, seed, epoch)
            return itertools.islice(items, base, None) if base else items
        if self._flow is None:  # one window for the whole life of the stream, or what waits in it would be lost
            assert self._raw is not None
            raw: Iterator[Any] = _Pull(self._peeked, self._raw)
            self._flow = raw
            if window is not None:
                self._flow = self._window = _drawn(raw, window, seed, 0)
        items = _Pull(self._back, self._flow)
        while self._to_skip:
            self._to_skip -= 1
            next(items, None)
        return items

    def skip(self, count: int) -> None:
        """So many items of a one-time stream were handed out by an earlier run: the next epoch begins after them."""
        self._to_skip = count

    def give_back(self, items: Iterable[Any]) -> None:
        """Items that were pulled and not handed out: the next epoch of a one-time stream begins with them."""
        if self._once:
            self._back.extendleft(reversed(list(items)))

    def peek(self, start: int, stop: int) -> list[Any]:
        """The items from ``start`` to ``stop``, as far as there are any, without using them up."""
        try:
            if self._raw is None:
                return list(itertools.islice(self._items, start, stop))
            # What was put back comes first: what a probe loads of the first items is used again for them.
            wanted = stop - len(self._back) - len(self._peeked)
            self._peeked.extend(itertools.islice(self._raw, max(0, wanted)))
        except Exception as error:
            raise stream_error(error, start) from error
        return list(itertools.islice(itertools.chain(self._back, self._peeked), start, stop))


def _drawn(items: Iterable[Any], window: tuple[int, int], seed: int, epoch: int) -> Window[Any]:
    size, most_bytes = window
    return windowed(items, size, seed=seed, epoch=epoch, weigh=held_bytes, most_bytes=most_bytes)


class _Pull(Iterator[Any]):
    """What was put back first, then the rest; not a generator, which is over once an error has passed through it."""

    __slots__ = ("_first", "_then")

    def __init__(self, first: deque[Any], then: Iterator[Any]) -> None:
        self._first, self._then = first, then

    def __next__(self) -> Any:
        return self._first.popleft() if self._first else next(self._then)


def stream_error(error: Exception, count: int) -> LoadError:
    """What the consumer gets when the user's iterator raises."""
    return LoadError(f"the stream of items failed after {count} items: {said(error)}")


def sort_out(items: Any, load: Any) -> Picker | Stream | Source | Lines:
    """Which kind of items these are; TypeError when they cannot be any."""
    if isinstance(items, str | bytes):
        raise TypeError(
            f"items={shown(items)} is one {type(items).__name__}, and its characters are hardly meant: give a list of "
            f"items, such as [{shown(items)}]"
        )
    if isinstance(items, Mapping):
        raise TypeError("items is a dict: give list(d.items()), or list(d) and look the values up in load")
    is_source = isinstance(items, Source | Lines)
    if load is None and not is_source:
        hint = (
            ": for a data set with __getitem__ write Feed(range(len(data)), data.__getitem__)"
            if hasattr(items, "__getitem__")
            else ": write one, item -> sample"
        )
        raise TypeError(f"a {type(items).__name__} of items needs a load function{hint}; only sources go without")
    if load is not None and not callable(load):
        raise TypeError(f"load is a {type(load).__name__}, which cannot be called: give a function, item -> sample")
    if is_source:
        source: Source | Lines = items
        return source
    if hasattr(items, "__len__") and hasattr(items, "__getitem__"):
        return Picker(items)
    if hasattr(items, "__iter__"):
        return Stream(items)
    raise TypeError(
        f"items is a {type(items).__name__}, which cannot be iterated: give a sequence, an iterable or a source"
    )
