"""Kept samples on the device: which item lies in which row of the shelves there. Runs in the parent.

The bytes are ``delivery``'s business. A worker has nothing to copy here: it is asked only for what is not kept, and
says of each item whether it may be (a load that is random must be done again). An item that was given to the device is
there for good. Each batch then is what came from the host, put beside what is kept, and gathered from there in order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from penstock._core.cache import NEVER, RANDOM, Memory
from penstock._core.spec import Array
from penstock._core.task import LOAD, Shelved, keep_at

__all__ = ["STATE_BYTES", "DeviceForm", "DeviceStore", "Origin"]

STATE_BYTES: Final = 4
"""What the parent has to remember of an item."""
_ABSENT: Final = -1
_KNOWN: Final = -2  # it was loaded, and is the same every time
_NOT_WANTED: Final = -3


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Where the samples of a batch come from."""

    samples: npt.NDArray[np.int64]
    """The number of each: that of its item times the samples of an item, and on."""
    held: npt.NDArray[np.int64]
    """Its row on the device, or below 0: it comes from the host, where these stand one after the other."""

    def on_host(self) -> int:
        """Samples that come from the host."""
        return int(np.count_nonzero(self.held < 0))

    def part(self, start: int, stop: int) -> Origin:
        """The same of some of them."""
        return Origin(self.samples[start:stop], self.held[start:stop])


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceForm:
    """What a worker is told: nothing, as it has no part in it."""

    def open(self, memory: Memory) -> DeviceForm:  # noqa: ARG002 - there is nothing to open
        """The shelf is the form."""
        return self

    def read(self, places: Shelved, columns: Sequence[Array], at: Shelved) -> None:
        """Never asked for: what is kept is not given to workers."""

    def write(self, places: Shelved, columns: Sequence[Array], at: Shelved) -> Shelved:  # noqa: ARG002 - same
        """The parent keeps it. All that is said here is that it may."""
        return np.zeros(len(places), np.int64)

    def close(self) -> None:
        """Nothing is open."""


class DeviceStore:
    """Which items are kept on the device."""

    in_memory = False
    form = DeviceForm()

    def __init__(self, *, items: int, entries: int, each: int) -> None:
        """``entries`` of the items are kept, those that come first; each is so many samples."""
        self._rows = np.full(items, _ABSENT, np.int32)
        self.entries = entries
        self.each = each
        self._used = 0
        self._tasks: dict[int, npt.NDArray[np.int64]] = {}
        self.count = 0

    # ---- for the engine

    def look(self, indices: npt.NDArray[np.int64]) -> Shelved:
        """Rows of those that are there; of the others it is asked whether they may be kept."""
        rows = self._rows[indices].astype(np.int64)
        return np.where(rows >= 0, rows, np.where(rows == _NOT_WANTED, LOAD, keep_at(0)))

    def origin(self, indices: npt.NDArray[np.int64], found: Shelved) -> Origin:
        """The same for each sample of them."""
        each, steps = self.each, np.arange(self.each)
        held = np.where(found[:, None] < 0, LOAD, found[:, None] * each + steps)
        return Origin((indices[:, None] * each + steps).reshape(-1), held.reshape(-1))

    def at_hand(self, indices: npt.NDArray[np.int64]) -> bool:  # noqa: ARG002 - same
        """Never in memory."""
        return False

    def held(self, places: Shelved) -> int:
        """How many of them are there."""
        return int(np.count_nonzero(places >= 0))

    def begun(self, task: int, indices: npt.NDArray[np.int64], places: Shelved) -> None:  # noqa: ARG002 - same
        """Remember whose answer will come."""
        self._tasks[task] = indices

    def taken(self, task: int, kept: bytes | str | None) -> str | None:
        """What a worker found out about its items."""
        indices = self._tasks.pop(task, None)
        if indices is None or not isinstance(kept, bytes):
            return None
        numbers = np.frombuffer(kept, np.int64)
        rows = self._rows
        random = indices[numbers == NEVER]
        fresh = indices[rows[indices] < 0]
        rows[fresh] = np.where(rows[fresh] == _NOT_WANTED, _NOT_WANTED, _ABSENT)
        good = indices[numbers >= 0]
        rows[good[rows[good] == _ABSENT]] = _KNOWN
        rows[random] = _NOT_WANTED
        return RANDOM if len(random) else None

    def withdrawn(self, task: int) -> None:
        """No answer will come."""
        self._tasks.pop(task, None)

    def copy(self, places: Shelved, memory: Any, start: int) -> None:  # noqa: ARG002 - same
        """Never asked for, as nothing is at hand."""
        raise AssertionError("what is kept on the device is not copied to slots")

    def unclaimed(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Those of them that nobody else has or makes: nobody else does anything here."""
        return indices

    def wants(self) -> npt.NDArray[np.int64]:
        """Nothing is loaded for its sake alone."""
        return np.empty(0, np.int64)

    def refresh(self) -> None:
        """Nobody else writes there."""

    def resident_bytes(self) -> tuple[int, int]:
        """None of the host's."""
        return 0, 0

    def close(self) -> None:
        """The memory is freed by the delivery."""

    # ---- for the delivery

    @property
    def spare(self) -> int:
        """The first of the rows for samples that are not kept."""
        return self.entries * self.each

    def room_for(self, samples: npt.NDArray[np.int64]) -> int | None:
        """The row from which samples that come from the host are to be put, to be kept; None: they are not."""
        states = self._rows[self._items(samples)]
        # Some may have come twice before the first was there (epochs overlap). The rest of these is kept next time:
        # rows are given out one after the other, and what was there twice would take the room of another for ever.
        if self._used == self.entries or not (states == _KNOWN).any() or (states >= 0).any():
            return None
        return self._used * self.each

    def arrived(self, samples: npt.NDArray[np.int64]) -> None:
        """Those of which ``room_for`` was asked are there: as many as there is room for, and may be kept."""
        first = self._used
        items = self._items(samples)[: self.entries - first]
        known = self._rows[items] == _KNOWN
        # Taken before anything is said to be there: Ctrl-C may come in between.
        self._used = first + len(items)
        self._rows[items[known]] = first + np.flatnonzero(known)
        self.count += int(np.count_nonzero(known))

    def _items(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The items of whole items' samples."""
        return samples[:: self.each] // self.each
