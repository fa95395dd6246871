"""What travels between the feed and whoever works for it: tasks one way, replies the other.

Pure values. A task names some rows of a slot and the items to fill them with; a reply says what became of it.
How they are carried (a call, a queue, a socket) is the crew's business.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Final, overload

import numpy as np
import numpy.typing as npt

__all__ = ["LOAD", "Apart", "Busy", "Failure", "Grant", "Mode", "Reply", "Shelved", "Status", "Task", "keep_at"]

Shelved = npt.NDArray[np.int64]
"""For each item of a task where a cache has it: 0 or more, or ``LOAD``, or ``keep_at(place)``."""
LOAD: Final = -1
"""It has to be loaded, and is not kept."""


@overload
def keep_at(place: int) -> int: ...
@overload
def keep_at(place: Shelved) -> Shelved: ...
def keep_at(place: int | Shelved) -> int | Shelved:
    """It has to be loaded, and is to be kept at this place; and back from that to the place."""
    return LOAD - 1 - place


class Mode(enum.IntEnum):
    """How the rows of a batch come about."""

    ROWS = 1
    """Each item has its rows before it is loaded; several workers fill one slot together."""
    WHOLE = 2
    """One worker loads a batch, collates it and writes the result; sizes may differ from batch to batch."""
    FLOW = 3
    """An item gives any number of samples; a slot holds as many as fit, the parent cuts batches from them."""


class Status(enum.IntEnum):
    """What became of a task."""

    DONE = 1
    FAILED = 2
    """Not done: the payload says which item and why."""
    MORE = 3
    """The slot is full, or the batch too large for it: the worker waits for a Grant."""
    PROBED = 4
    """The answer to a probe: the form of a sample and what it costs."""
    PONG = 6
    """Nothing of what was sent before is still in the hands of this worker."""
    RETIRING = 7
    """The worker has grown too large and ends: ``rows`` is how large, in bytes."""
    AGAIN = 8
    """The item at place ``rows`` found no memory, and may in a fresh worker: this one ends."""
    ABSENT = 5
    """The worker could not start: the payload is the error."""


@dataclasses.dataclass(slots=True)
class Task:
    """Rows of a slot to fill, and with what."""

    id: int
    slot: int
    offset: int
    """Where the slot lies in the arena, in bytes."""
    capacity: int
    """Bytes of the slot."""
    start: int
    """The first row."""
    epoch: int
    indices: npt.NDArray[np.int64]
    """For each item where it stands among all items; what randomness depends on."""
    items: Sequence[Any] | None
    """The identities; None when a source reads by index."""
    skip: int = 0
    """Samples of a FLOW task that an earlier worker handed over before it died."""
    barred: tuple[int, ...] = ()
    """Places of items that must not be tried again: they killed their worker, or took too long."""
    places: npt.NDArray[np.int64] | None = None
    """For each item its place in the unit, where they do not follow each other from ``start`` on."""
    kept: Shelved | None = None
    """Where a cache has the samples or wants them; None if there is none, or if it has no part in this task."""
    first: int = 0
    """Items before this place are done: a worker that had no room for the next one wrote them (ROWS)."""
    ahead: npt.NDArray[np.int64] | None = None
    """What tasks after this one will read, to tell the system now; this one's own were told before, where it is not
    None."""
    text_bytes: int = 0
    """What its texts may take beside the slot; 0: as much as any task's."""
    handed: dict[int, int] = dataclasses.field(default_factory=dict)
    """Of ``skip``, how many belong to which item, as far as this task handed them over. Does not travel."""
    apart: Apart | None = None
    """How it is taken apart, if it is. Does not travel: what is not to be done now is barred then."""
    part: Reply | None = None
    """What became of the items that are done, where that is not all of it. Does not travel."""
    trial: bool = False
    """Its items are loaded to see whether that kills, and nothing is made of them (WHOLE)."""
    since_s: float = 0.0
    """When it was last taken back from a worker: the record of one that is older is about what came before. Does not
    travel."""

    def note_handed(self, reply: Reply) -> None:
        """A full slot was handed over: should the task be done again, its samples are not to be."""
        self.skip += reply.rows
        for ordinal, count in reply.body[0]:
            self.handed[ordinal] = self.handed.get(ordinal, 0) + count

    def settle(self, places: Iterable[int]) -> None:
        """These items are not done again: what was handed over of them is not to be skipped."""
        for place in places:
            begun = self.skip - sum(self.handed.values()) if place == 0 else 0  # before there was this task
            self.skip -= begun + self.handed.pop(place, 0)

    @property
    def alone(self) -> tuple[int, ...]:
        """Places of the items that are to be done now, and no others; none: all that are left are."""
        return self.apart.groups[0] if self.apart is not None and self.apart.groups else ()

    def left(self, end: int | None = None) -> list[int]:
        """Places of the items that somebody has still to load, up to one of them."""
        over = {*self.barred, *(() if self.apart is None else self.apart.done)}
        held = () if self.kept is None else set(np.flatnonzero(self.kept >= 0).tolist())
        places = range(self.first, len(self.indices) if end is None else end)
        return [place for place in places if place not in over and place not in held]


@dataclasses.dataclass(slots=True)
class Apart:
    """How far a task is that is done in parts, because workers died of it."""

    groups: list[tuple[int, ...]]
    """Places of items that are done by themselves, one group after the other; after them what is left, in order."""
    done: tuple[int, ...] = ()
    """Places of the items that were done so."""
    failure: Failure | None = None
    """What the task fails with when the items before that one are done, and their texts known."""


@dataclasses.dataclass(frozen=True, slots=True)
class Busy:
    """What a worker is at: the item at a place of a task."""

    worker: int
    task: int
    ordinal: int


@dataclasses.dataclass(frozen=True, slots=True)
class Grant:
    """Room to go on: where, and how many bytes; None as offset means: give up this task."""

    slot: int
    offset: int | None
    capacity: int


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """One item that could not be loaded: its place in the task, the error, and the worker's traceback as text."""

    BATCH: ClassVar[int] = -1
    """The place of an error that is nobody's alone: a collate_fn's."""
    UNPACKING: ClassVar[int] = -2
    """The same for items that could not be unpacked, not even one by one: there was no room for them."""
    TEXTS: ClassVar[int] = -3
    """The same for texts that are larger than what a task may take beside its slot."""
    COLLATING: ClassVar[int] = 2**32 - 1
    """The same in a worker's record, where places are unsigned."""
    TOGETHER: ClassVar[int] = 2**32 - 2
    """In a worker's record: many rows of a source are being read at once, and nobody knows which it is at."""
    PACING: ClassVar[int] = 2**32 - 3
    """In a worker's record: items of a probe that are loaded already are loaded again, to see how long that takes."""
    ordinal: int
    error: BaseException
    trace: str
    texts: tuple[tuple[int, int, bytes], ...] = ()
    """Texts of the rows before it that did not fit into their cells."""
    fresh: bool = False
    """It failed in a worker that had loaded nothing before."""
    left_out: bool = False
    """It is the last of all items of a probe, and on_error says to leave them out."""


@dataclasses.dataclass(slots=True)
class Reply:
    """What became of a task, and what it cost."""

    task: int
    worker: int
    status: Status
    rows: int = 0
    """Rows filled (FLOW), or bytes wanted (MORE of a WHOLE task)."""
    seconds: float = 0.0
    body: Any = None
    """DONE: None, or texts that did not fit / the shape of a collated batch. FAILED: a Failure. PROBED: a Probe."""
    failures: tuple[Failure, ...] = ()
    """Items that were left out because on_error says so."""
    kept: bytes | str | None = None
    """What a cache has now: a number for each item, as it stands in the task's ``kept``; or why nothing was kept."""
