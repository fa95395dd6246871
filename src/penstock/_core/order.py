"""Which item stands where: shuffles, epochs, shards, and the randomness of one sample. Pure; runs everywhere.

Everything here is computed from ``mix``, a fixed 64-bit hash, by position: nothing is drawn in sequence, so any
part of an epoch can be had at once, on any rank, in any process, after any interruption. numpy's own shuffles
are not used because their streams may change between versions, and they need memory for every item.

It does not know what items are, where they are read, or how many workers there are.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt
from typing import Any, Final, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

__all__ = ["Mixing", "Order", "Permutation", "Window", "mix", "rng_for", "windowed"]

T = TypeVar("T")
Words = NDArray[np.uint64]

_MASK: Final = 2**64 - 1
# The increment and the two multipliers of splitmix64 (Steele, Lea, Flood 2014). They are part of the file format
# of every saved state: changing one changes every shuffle that anybody ever resumed.
_STEP: Final = 0x9E3779B97F4A7C15
_MUL_1: Final = 0xBF58476D1CE4E5B9
_MUL_2: Final = 0x94D049BB133111EB

# First words of a hash, one per use, so that the order, the window and the samples' randomness share no number.
_FOR_ORDER: Final = 1
_FOR_WINDOW: Final = 2
_FOR_SAMPLE: Final = 3
_FOR_BLOCKS: Final = 4
_FOR_GROUP: Final = 5

# Up to here a table of the whole permutation is 1 MiB at most (32 bits an item), is made in some 10 ms, and costs less
# in all than asking the network position by position.
_TABLE_MOST: Final = 2**18
_TABLE_LEAST: Final = 2**14  # smaller ones are made in less time than a thread takes to start
_PIECE: Final = 2**13
# With four rounds, differences between positions that share one half are far from uniform (144 sigma over 200 keys of
# 70,001 positions); with six, none of 20 statistics differs from those of numpy's permutations.
_ROUNDS: Final = 6

_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
_FACTOR_1, _FACTOR_2 = np.uint64(_MUL_1), np.uint64(_MUL_2)


def _mix_int(words: tuple[int, ...]) -> int:
    h = 0
    for word in words:
        h = ((h ^ (word & _MASK)) + _STEP) & _MASK
        h = ((h ^ (h >> 30)) * _MUL_1) & _MASK
        h = ((h ^ (h >> 27)) * _MUL_2) & _MASK
        h ^= h >> 31
    return h


@overload
def mix(*words: int) -> int: ...  # type: ignore[overload-overlap]  # ints alone are the narrower case, listed first
@overload
def mix(*words: int | NDArray[Any]) -> Words: ...
def mix(*words: int | NDArray[Any]) -> int | Words:
    """A 64-bit hash of integers, the same for ever on every machine: an int, or a uint64 array if a word is an array.

    Words are taken modulo 2**64; arrays are broadcast against each other. With all words but one held fixed, it is a
    bijection of that one: different seeds can never give the same hash for the same rest.
    """
    if not any(isinstance(word, np.ndarray) and word.ndim for word in words):
        return _mix_int(tuple(int(word) for word in words))
    h = np.zeros(1, np.uint64)
    for word in words:
        # Arrays of at least one axis: numpy wraps those silently, and warns about scalars.
        w = word.astype(np.uint64) if isinstance(word, np.ndarray) else np.array([int(word) & _MASK], np.uint64)
        h = _stir((h ^ w) + np.uint64(_STEP))
    return h


def _stir(h: Words) -> Words:
    """The finalizer of splitmix64, in place."""
    shifted = h >> _SHIFT_1
    h ^= shifted
    h *= _FACTOR_1
    np.right_shift(h, _SHIFT_2, out=shifted)
    h ^= shifted
    h *= _FACTOR_2
    np.right_shift(h, _SHIFT_3, out=shifted)
    h ^= shifted
    return h


@lru_cache(maxsize=2)  # this epoch's and the next one's
def _table(n: int, key: int) -> NDArray[np.uint32]:
    if (making := _making.pop((n, key), None)) is None:
        return _made_table(n, key)
    making.join()
    return making.table if making.table is not None else _made_table(n, key)


class _Making(threading.Thread):
    """Makes a table while the epoch before is being read: NumPy sorts without the GIL."""

    def __init__(self, n: int, key: int) -> None:
        super().__init__(name="penstock-order", daemon=True)
        self._of = n, key
        self.table: NDArray[np.uint32] | None = None

    def run(self) -> None:
        with suppress(MemoryError):  # then whoever needs it makes it, and tells
            self.table = _made_table(*self._of)


_making: dict[tuple[int, int], _Making] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_making.clear)  # threads are not forked


def _made_table(n: int, key: int) -> NDArray[np.uint32]:
    # Hash and place in one word, the hash above: plain sorting is twice as fast as argsort, and the words are distinct,
    # so that it has one answer whatever its algorithm.
    # Piece by piece: fresh memory costs more than the work that is done in it.
    low = np.uint64((1 << max(1, n - 1).bit_length()) - 1)
    words = np.empty(n, np.uint64)
    for start in range(0, n, _PIECE):
        places = np.arange(start, min(start + _PIECE, n), dtype=np.uint64)
        piece = mix(key, places)
        piece &= ~low
        np.bitwise_or(piece, places, out=words[start : start + _PIECE])
    words.sort()
    table = np.empty(n, np.uint32)
    for start in range(0, n, _PIECE):
        np.bitwise_and(words[start : start + _PIECE], low, out=table[start : start + _PIECE], casting="unsafe")
    return table


@lru_cache(maxsize=8)
def _network(n: int, key: int) -> tuple[int, int, Words]:
    a = isqrt(n - 1) + 1
    return a, -(-n // a), mix(key, np.arange(_ROUNDS))


@dataclass(frozen=True, slots=True)
class Permutation:
    """A pseudo-random permutation of ``range(n)`` that can be asked at any position.

    Up to 262,144 it is a sort by hash. Above, it takes no memory and no time to start, whatever ``n``: positions are
    written as pairs in Z_a x Z_b with a and b near the square root of n, and each half in turn is shifted by a hash of
    the other (a Feistel network over mixed moduli). a * b exceeds n by less than a, so fewer than one position in
    250 lands outside of ``range(n)`` and is sent through again until it does not.
    """

    n: int
    key: int

    def __post_init__(self) -> None:
        if not 0 <= self.n < 2**63:
            raise ValueError(f"cannot permute {self.n} positions: the number must be from 0 to 2**63 - 1")

    def __len__(self) -> int:
        return self.n

    def __call__(self, positions: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """What stands at each of ``positions``."""
        if positions.size == 0:
            return np.empty(positions.shape, np.int64)
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high >= self.n:
            raise IndexError(f"positions {low} to {high} are not all within the {self.n} that were permuted")
        if self.n <= _TABLE_MOST:
            return np.take(_table(self.n, self.key), positions).astype(np.int64)
        flat = self._cross(positions.ravel().astype(np.uint64))
        out = np.flatnonzero(flat >= np.uint64(self.n))
        while out.size:
            again = self._cross(flat[out])
            flat[out] = again
            out = out[again >= np.uint64(self.n)]
        return flat.astype(np.int64).reshape(positions.shape)

    def _cross(self, x: Words) -> Words:
        """One pass through the network: a bijection of ``range(a * b)``."""
        a, b, round_keys = _network(self.n, self.key)
        left, right = np.divmod(x, np.uint64(b))
        for round_key in round_keys:
            shift = _stir(right ^ round_key)
            # The upper half of the hash times a, over 2**32: uniform in range(a) without a division. a < 2**32.
            shift >>= np.uint64(32)
            shift *= np.uint64(a)
            shift >>= np.uint64(32)
            left += shift
            left -= (left >= np.uint64(a)) * np.uint64(a)
            left, right, a, b = right, left, b, a
        # An even number of rounds leaves left in Z_a and right in Z_b, as they began.
        return left * np.uint64(b) + right


@dataclass(frozen=True, eq=False)
class Mixing:
    """How blocks of neighbours are mixed: cheap to read where neighbours are, and nearly as good as a permutation.

    The blocks are put in a random order, anew for each epoch. That sequence is cut into groups of ``group`` items, and
    each group is permuted as a whole. So what stands where is known for any position at once, as it is for a
    permutation of everything: resuming and ranks are the same. Whoever reads a group reads its blocks one by one.
    """

    group: int
    """Items that are mixed at a time."""
    rows: int
    """Items a block, where all have the same."""
    starts: NDArray[np.int64] | None = None
    """Where each block begins, for blocks of different sizes."""

    def cuts(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where in a sorted list of items another block begins."""
        blocks = indices // self.rows if self.starts is None else np.searchsorted(self.starts, indices, side="right")
        return np.flatnonzero(np.diff(blocks)) + 1

    def indices(self, length: int, places: NDArray[np.int64], *, seed: int, epoch: int) -> NDArray[np.int64]:
        """Which item stands at each of these places of an epoch."""
        ends, begins = _block_sequence(length, self, mix(_FOR_BLOCKS, seed, epoch))
        found = np.empty(len(places), np.int64)
        groups = places // self.group
        for part in np.split(np.arange(len(places)), np.flatnonzero(np.diff(groups)) + 1):
            number = int(groups[part[0]])
            first = number * self.group
            size = min(self.group, length - first)
            within = Permutation(size, mix(_FOR_GROUP, seed, epoch, number))(places[part] - first) + first
            block = np.searchsorted(ends, within, side="right")
            found[part] = begins[block] + (within - np.where(block > 0, ends[block - 1], 0))
        return found


@lru_cache(maxsize=2)  # this epoch's and the next one's
def _block_sequence(length: int, mixing: Mixing, key: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each block ends in the order of the epoch, and at which item it begins."""
    count = -(-length // mixing.rows) if mixing.starts is None else len(mixing.starts)
    order = Permutation(count, key)(np.arange(count))
    if mixing.starts is None:
        begins = order * mixing.rows
        sizes = np.minimum(mixing.rows, length - begins)
    else:
        begins = mixing.starts[order]
        sizes = np.diff(mixing.starts, append=length)[order]
    return np.cumsum(sizes), begins


@dataclass(frozen=True, slots=True)
class Order:
    """Which item stands at each position of one epoch, as one rank walks it.

    There is one sequence for the whole world: the items as listed, or a permutation of them that depends on (seed,
    epoch). Ranks are dealt to in turn: position p of rank r is place ``p * world + r`` of that sequence. So the first k
    positions of all ranks together are the first ``k * world`` places, for any world: a job that goes on with
    another number of ranks sees what the first one had not seen: it deals from place ``base`` on.

    Every rank walks the same number of positions, or collective operations would wait for ever. When the items do not
    divide evenly, the last places are filled from the start of the same sequence again (at most ``world - 1`` items
    are seen twice when there are at least that many), or with ``drop`` the remainder is left out of this epoch.
    """

    length: int
    shuffle: bool = False
    seed: int = 0
    epoch: int = 0
    rank: int = 0
    world: int = 1
    drop: bool = False
    base: int = 0
    mixing: Mixing | None = None
    """For a shuffle of blocks, how they are cut and mixed."""

    def __post_init__(self) -> None:
        if not 0 <= self.base < 2**62:
            raise ValueError(f"base={self.base} is not a place to begin at")
        if not 0 <= self.length < 2**62:
            raise ValueError(f"length={self.length} is not a number of items: it must be from 0 to 2**62 - 1")
        if self.world < 1 or not 0 <= self.rank < self.world:
            raise ValueError(f"rank {self.rank} of {self.world} does not exist: ranks go from 0 to world - 1")

    def __len__(self) -> int:
        left = max(0, self.length - self.base)
        return left // self.world if self.drop else -(-left // self.world)

    def indices(self, start: int, stop: int) -> NDArray[np.int64]:
        """The item index at each position of this rank from ``start`` to ``stop``, cut off at the end as slices are."""
        if start < 0 or stop < 0:
            raise ValueError(f"positions {start} to {stop} start before the first one, 0")
        stop = min(stop, len(self))
        if start >= stop:
            return np.empty(0, np.int64)
        places = np.arange(start, stop, dtype=np.int64)
        if self.world > 1:
            places *= self.world
            places += self.base + self.rank
            places %= self.length
        elif self.base:
            places += self.base
        if not self.shuffle:
            return places
        if self.mixing is not None:
            return self.mixing.indices(self.length, places, seed=self.seed, epoch=self.epoch)
        return Permutation(self.length, mix(_FOR_ORDER, self.seed, self.epoch))(places)

    def prepare_next(self) -> None:
        """Begin to compute what the order of the next epoch needs beforehand, where that takes milliseconds."""
        n, key = self.length, mix(_FOR_ORDER, self.seed, self.epoch + 1)
        if not self.shuffle or self.mixing is not None or not _TABLE_LEAST <= n <= _TABLE_MOST or (n, key) in _making:
            return
        if len(_making) > 2:
            _making.clear()  # nobody came for them
        making = _Making(n, key)
        try:
            making.start()
        except RuntimeError:  # no more threads are to be had, or Python is about to end
            return
        _making[n, key] = making


def windowed(
    items: Iterable[T],
    size: int,
    *,
    seed: int,
    epoch: int,
    weigh: Callable[[T], int] | None = None,
    most_bytes: int = 0,
) -> Window[T]:
    """The items of a stream, each drawn at random from a window of ``size`` items.

    Lazy: the first item needs at most ``size`` pulled, every further one at most one more. A stream that fits in the
    window comes out fully permuted. With ``weigh``, the window holds fewer items where they are large: no further one
    is pulled while those in it weigh ``most_bytes`` or more.
    """
    if size < 1:
        raise ValueError(f"a shuffle window of {size} items cannot give any: size must be at least 1")
    return Window(iter(items), size, mix(_FOR_WINDOW, seed, epoch), weigh, most_bytes)


class Window(Iterator[T]):
    """Items of a stream that wait for their turn.

    Not a generator: one that the stream's error, or Ctrl-C, has passed through is over, and its window lost.
    """

    __slots__ = ("_gap", "_heavy", "_items", "_key", "_most", "_size", "_turn", "_weigh", "_weights", "_window")

    def __init__(self, items: Iterator[T], size: int, key: int, weigh: Callable[[T], int] | None, most: int) -> None:
        self._items, self._size, self._key = items, size, key
        self._weigh, self._most = weigh, most
        self._window: list[T] = []
        self._weights: list[int] = []
        self._heavy = 0
        self._gap = -1
        self._turn = 0

    @property
    def held_bytes(self) -> int:
        """What the items in it weigh."""
        return self._heavy

    def __next__(self) -> T:
        window = self._window
        if self._gap >= 0:
            # The next item is pulled only now, when one more is wanted; the one that was drawn is let go first.
            if self._weigh is not None:
                self._heavy -= self._weights[self._gap]
                self._weights[self._gap] = self._weights[-1]
                self._weights.pop()
            window[self._gap] = window[-1]
            window.pop()
            self._gap = -1
        self._fill()
        if not window:
            raise StopIteration
        self._gap = mix(self._key, self._turn) % len(window)
        self._turn += 1
        return window[self._gap]

    def _fill(self) -> None:
        """Pull until the window is full; what was pulled before it was interrupted stays in the list."""
        window, weigh = self._window, self._weigh
        if weigh is None:
            window.extend(itertools.islice(self._items, self._size - len(window)))
            return
        while True:
            while len(self._weights) < len(window):
                self._weights.append(weigh(window[len(self._weights)]))
                self._heavy += self._weights[-1]
            if len(window) >= self._size or (window and self._heavy >= self._most):
                return
            before = len(window)
            window.extend(itertools.islice(self._items, 1))
            if len(window) == before:
                return


def rng_for(seed: int, epoch: int, index: int) -> np.random.Generator:
    """The random generator of one sample, the same whoever loads it and whenever."""
    key = mix(_FOR_SAMPLE, seed, epoch, index)
    # Through a SeedSequence, not Philox(key=...): then the generator's spawn() draws on the system's entropy.
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key << 64 | mix(key))))
