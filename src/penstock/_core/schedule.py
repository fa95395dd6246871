"""Which items are loaded when: cuts an epoch of the order, or of a stream, into units. Runs in the parent.

Pure for sequences. A stream is pulled from here, and nowhere else, one unit at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from penstock._core.budget import format_bytes
from penstock._core.engine import Unit
from penstock._core.errors import BudgetError
from penstock._core.items import Picker, Stream, held_bytes, stream_error
from penstock._core.lines import Located
from penstock._core.options import Options
from penstock._core.order import Mixing, Order
from penstock._core.source import Reader, Unread

__all__ = ["Cut", "Schedule"]

# Positions whose items are looked up at once: 64 KiB of indices, a tenth of the cost of doing it batch by batch.
ORDER_BLOCK: Final = 8192
PULLED: Final = 16  # items of a stream between two looks at what they weigh


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """How an epoch is cut: decided with the plan."""

    unit_items: int
    """Items a unit."""
    batch_items: int
    """Items a batch; a remainder is left out if the user wants only full ones."""
    exact: bool
    """Whether batches are made of whole units: not so where items give any number of samples, or may be skipped."""
    window: tuple[int, int]
    """Items of a shuffle window, for streams, and the most bytes of them."""
    memory: int
    """The budget, for what is said when it does not do."""
    most_bytes: int
    """What the items of a unit may take in this process, of a stream."""
    travels: bool
    """Whether rows of a source in memory are sent to workers as items."""


class Schedule:
    """The items of a feed in the order of its epochs."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._items = options.items
        self.window: int | None = None
        """How many items are shuffled at a time, of a stream or in blocks, if a saved state says what it must be."""
        self.window_bytes: int | None = None
        """The same in bytes, of a stream."""
        self.mixing: Mixing | None = None
        """How blocks are mixed, once it is known."""
        o = options
        self.lines = (
            Located(o.lines, memory=o.memory, shuffle=o.shuffle, rank=o.rank, world=o.world, drop=o.drop_last)
            if o.lines is not None
            else None
        )
        """The lines of text that the items are, if they are."""

    @property
    def length(self) -> int | None:
        """Items in all; None for a stream, and for lines that were not counted yet."""
        if self.lines is not None:
            return self.lines.length
        if isinstance(self._items, Stream):
            return None
        return self._items.length if isinstance(self._items, Picker) else len(self._items)

    @property
    def held_bytes(self) -> int:
        """What this process holds of the items, apart from those that are in somebody's hands."""
        if isinstance(self._items, Stream):
            return self._items.held_bytes
        return 0 if self.lines is None else self.lines.held_bytes

    @property
    def extent(self) -> int | None:
        """What a saved state knows the items by: how many there are; of lines, which nobody has to count, the bytes."""
        return self.length if self.lines is None else self.lines.total_bytes

    def count(self) -> int | None:
        """The same as ``samples``, but lines are counted for it, which may take a while."""
        if self.lines is not None and self._options.each is not None:
            self.lines.count()
        return self.samples

    def ended(self, epoch: int, base: int, position: int, *, spare: int) -> bool:
        """Whether at most ``spare`` items come from a position on."""
        if self.lines is not None and self.length is None:
            return not self.lines.has(base + position + spare)
        return position >= len(self.order(epoch, base)) - spare

    @property
    def samples(self) -> int | None:
        """Samples an epoch of this rank has; None where nobody knows beforehand."""
        return self.samples_from(0, 0)

    def samples_from(self, base: int, inside: int) -> int | None:
        """The same for an epoch that goes on from a place, so many samples inside its item."""
        each = self._options.each
        return None if self.length is None or each is None else max(0, len(self.order(0, base)) * each - inside)

    def is_empty(self) -> bool:
        """Whether there is nothing at all; a stream is asked for its first item."""
        if isinstance(self._items, Stream):
            return not self._items.peek(0, 1)
        if self.lines is not None and self.length is None:
            try:
                return len(self.first(0, 0, start=0, size=1)[0]) == 0
            except BudgetError:
                return False  # a line that is too long: who plans says what would do
        return len(self.order(0)) == 0  # also where this rank's share of a few items is none

    def nothing_after(self, epoch: int, base: int) -> bool:
        """Whether an epoch that goes on from a place has no item for this rank, as far as that is known."""
        return self.length is not None and base > 0 and len(self.order(epoch, base)) == 0

    def order(self, epoch: int, base: int = 0) -> Order:
        """The order of an epoch from a place on; not for streams."""
        o = self._options
        return Order(self.length or 0, o.shuffle, o.seed, epoch, o.rank, o.world, o.drop_last, base, self.mixing)

    def first(self, epoch: int, base: int, *, start: int, size: int) -> tuple[Any, Sequence[Any] | None]:
        """Some items that an epoch begins with, and their indices, without using them up: for probes."""
        if isinstance(self._items, Stream):
            items = self._items.peek(start, start + size)
            indices = np.arange(start, start + len(items), dtype=np.int64)
            # Drawn from a window or dealt to ranks they come at other places: below 0 they are taken for none of them.
            return ~indices if self._options.shuffle or self._options.world > 1 else indices, items
        if self.lines is not None and self.lines.walks:
            with contextlib.closing(self.lines.walk(base + start * self._options.world, size)) as walk:
                return next(walk, (np.empty(0, np.int64), None))
        indices = self.order(epoch, base).indices(start, start + size)
        return indices, self.pick(indices, travels=self._travels) if len(indices) else None

    def anywhere(self, *, start: int, size: int) -> tuple[Any, Sequence[Any] | None]:
        """The same of all items, as they are given; none where they only come in order."""
        indices = np.arange(start, start if self.lines is not None else min(start + size, self.length or 0))
        return indices, self.pick(indices, travels=self._travels) if len(indices) else None

    @property
    def _travels(self) -> bool:
        o = self._options
        return o.source is not None and o.source.in_memory and o.load is not None and o.in_processes

    def pick(self, indices: Any, *, travels: bool) -> Sequence[Any] | None:
        """The identities at these indices; None for a source that reads by index where the work is done."""
        if isinstance(self._items, Picker):
            return self._items(indices)
        if self.lines is not None:
            return self.lines.pick(indices)
        source = self._options.source
        carried = getattr(source, "carried", None)
        if carried is not None:
            items: list[Any] = carried(indices)
            return items
        return _read(source.reader(), indices) if travels and source is not None else None

    @property
    def name(self) -> Callable[[int], Any] | None:
        """What a source calls its rows, if it has names for them."""
        return getattr(self._options.source, "name", None)

    def units(self, cut: Cut, epoch: int, base: int, inside: int) -> Iterator[Unit]:
        """The units of an epoch from a place on; of its first item so many samples were handed out before."""
        if isinstance(self._items, Stream):
            yield from self._stream_units(self._items, cut, epoch, base, inside)
            return
        if self.lines is not None and self.lines.walks:
            yield from self._line_units(self.lines, cut, epoch, base, inside)
            return
        order = self.order(epoch, base)
        end = len(order)
        if self._options.drop_last and cut.exact:
            end -= end % cut.batch_items
        # The order is computed for many positions at once: numpy's overhead is that of a batch, the work is not.
        size = cut.unit_items
        block = size * max(1, ORDER_BLOCK // size)
        ahead = np.empty(0, np.int64)
        # A shuffle of blocks that goes on in the middle of a group reads the rest of that group first.
        start = min(self._rest_of_group(base, cut), end)
        if start:
            indices = order.indices(0, start)
            yield Unit(epoch, 0, indices, self.pick(indices, travels=cut.travels), inside, self.name)
        prepared = False
        for at in range(start, end, size):
            offset = (at - start) % block
            if offset == 0:
                ahead = order.indices(at, min(at + block, end))
            if not prepared and 2 * at >= end:
                prepared = True
                order.prepare_next()
            indices = ahead[offset : offset + size]
            items = self.pick(indices, travels=cut.travels)
            yield Unit(epoch, at, indices, items, inside if at == 0 else 0, self.name)

    def _rest_of_group(self, base: int, cut: Cut) -> int:
        """Items until the next group begins; 0 where groups do not matter, or batches would be cut."""
        if self.mixing is None or not cut.exact:
            return 0
        items, over = divmod(-base % self.mixing.group, self._options.world)
        return 0 if over or items % cut.batch_items or items >= cut.unit_items else items

    def chosen(self, cut: Cut, batches: Iterable[tuple[int, int]]) -> Iterator[Unit]:
        """A unit for each of these batches, given as (epoch, number), in any order; not for streams."""
        order: Order | None = None
        for epoch, number in batches:
            if order is None or order.epoch != epoch:
                order = self.order(epoch)
            start = number * cut.batch_items
            indices = order.indices(start, min(start + cut.batch_items, len(order)))
            yield Unit(epoch, start, indices, self.pick(indices, travels=cut.travels))

    def _line_units(self, lines: Located, cut: Cut, epoch: int, base: int, inside: int) -> Iterator[Unit]:
        start = 0
        with contextlib.closing(lines.walk(base, cut.unit_items)) as walk:
            for indices, places in walk:
                count = len(indices)
                if self._options.drop_last and cut.exact:
                    count -= count % cut.batch_items
                if count:
                    yield Unit(epoch, start, indices[:count], places[:count], inside)
                start, inside = start + count, 0

    def _stream_units(self, stream: Stream, cut: Cut, epoch: int, base: int, inside: int) -> Iterator[Unit]:
        o = self._options
        items = stream.begin(cut.window if o.shuffle else None, o.seed, epoch, base)
        if o.world > 1:
            items = _Dealt(items, o.rank, o.world, pads=not o.drop_last)
        start = 0
        while True:
            pulled: list[Any] = []
            # What was pulled must not be lost if the stream raises, or Ctrl-C comes: one call of C leaves no moment
            # in which an item is in nobody's hands, and keeps what it has got so far.
            weight = 0
            try:
                while (size := min(PULLED, cut.unit_items - len(pulled))) > 0:
                    before = len(pulled)
                    pulled.extend(itertools.islice(items, size))
                    weight += sum(map(held_bytes, pulled[before:]))
                    if weight > cut.most_bytes:
                        raise _too_heavy(cut, len(pulled), weight)
                    if len(pulled) - before < size:
                        break
                if not pulled or (o.drop_last and cut.exact and len(pulled) < cut.unit_items):
                    return
                indices = base + o.rank + o.world * np.arange(start, start + len(pulled), dtype=np.int64)
                unit = Unit(epoch, start, indices, pulled, inside if start == 0 else 0, weight=weight)
            except BudgetError:
                stream.give_back(pulled)
                raise
            except BaseException as error:
                stream.give_back(pulled)
                if not isinstance(error, Exception):
                    raise
                raise stream_error(error, start + len(pulled)) from error
            yield unit
            start += len(pulled)

    def take_back(self, units: list[Unit], position: int) -> bool:
        """Items of a one-time stream that were pulled and not handed out come first next time; True if any."""
        if not isinstance(self._items, Stream) or self._items.restarts:
            return False
        left = [item for unit in units for place, item in enumerate(unit.items or (), unit.start) if place >= position]
        self._items.give_back(left)
        return bool(left)


def _too_heavy(cut: Cut, count: int, weight: int) -> BudgetError:
    least = cut.memory + 2 * (weight * cut.unit_items // count - cut.most_bytes)
    return BudgetError(
        f"{count} items of a stream take {format_bytes(weight)} before they are loaded, much more than the first ones, "
        f"and the budget of {format_bytes(cut.memory)} has {format_bytes(cut.most_bytes)} for the {cut.unit_items} of "
        f"a batch: give memory={least} or more, a smaller batch_size, or names as items, which load reads",
        least=least,
    )


class _Dealt(Iterator[Any]):
    """What one rank gets of a stream that all of them read: the same number as every other.

    Where the last round is short, it is left out, or those who would get nothing get what others have got.
    """

    def __init__(self, items: Iterator[Any], rank: int, world: int, *, pads: bool) -> None:
        self._items, self._rank, self._world, self._pads = items, rank, world, pads
        self._round: list[Any] = []

    def __next__(self) -> Any:
        # What was pulled before the stream raised, or Ctrl-C came, stays in the list.
        self._round.extend(itertools.islice(self._items, self._world - len(self._round)))
        dealt, self._round = self._round, []
        if not dealt or (len(dealt) < self._world and not self._pads):
            raise StopIteration
        return dealt[self._rank % len(dealt)]


def _read(reader: Reader, indices: Any) -> Sequence[Any]:
    """Rows that are sent to a load; if they cannot be read together, those that fail do so where they are wanted."""
    try:
        return reader.read(indices)
    except Exception:  # noqa: BLE001 - it comes again below, where it is known which row it belongs to
        return [_row(reader, indices[at : at + 1]) for at in range(len(indices))]


def _row(reader: Reader, index: Any) -> Any:
    try:
        return reader.read(index)[0]
    except Exception as error:  # noqa: BLE001 - told when its turn comes, by on_error
        return Unread(error, partial(_raised, error))


def _raised(error: Exception) -> Any:
    raise error
