"""How far a feed has been handed out, as it is counted and as it is saved. Runs in the parent; pure.

What is counted is what the consumer was given, never what was read ahead. Places are those of the whole world: a job
that goes on with another number of ranks, workers or samples a batch begins at the first item that nobody was given.
A saved state is data that may have been written by anyone: every field is checked before it is used.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Final

from penstock._core.errors import LoadError, said, shown

__all__ = ["VERSION", "Bookmark", "Saved", "check_saved", "read_skipped", "write_skipped"]

VERSION: Final = 2
# A state stays small: of items that were left out the last ones are kept, and how many there were.
SKIPPED_KEPT: Final = 1000
TEXT_KEPT: Final = 400
_MOST: Final = 2**62


@dataclasses.dataclass(slots=True)
class Bookmark:
    """Where a feed is: all that a resumed one must know."""

    world: int = 1
    epoch: int = 0
    base: int = 0
    """Places of this epoch's order that were handed out before this iteration began, to all ranks together."""
    position: int = 0
    """Items that this rank was handed in full since then."""
    inside: int = 0
    """Samples of the next item that were handed out too."""
    drawn: int = 0
    """Items that earlier iterations were given: a one-time stream goes on after them."""
    skips_in_a_row: int = 0
    lost_in_a_row: int = 0
    left_out: deque[int] = dataclasses.field(default_factory=deque)
    """Positions of the last items that were left out; those that were only read ahead are not passed yet."""
    told: set[str] = dataclasses.field(default_factory=set)
    """Warnings that were given."""
    resume: tuple[int, int] = (0, 0)
    """Base and inside at which the next iteration begins."""

    @property
    def place(self) -> int:
        """Places of this epoch's order that were handed out, to all ranks together."""
        return self.base + self.position * self.world

    def leave_out(self, positions: Iterable[int]) -> None:
        """These items, the last that were read, are left out."""
        while self.left_out and self.left_out[0] < self.position:
            self.left_out.popleft()
        self.left_out.extend(positions)

    @property
    def left_out_ahead(self) -> int:
        """How many were left out of what was read ahead, and will be again by whoever goes on from here."""
        return sum(position >= self.position for position in self.left_out)

    def move(self, epoch: int, position: int, inside: int) -> None:
        """This is what was handed out last."""
        self.epoch, self.position, self.inside = epoch, position, inside

    def begin(self, epoch: int, base: int, inside: int) -> None:
        """An iteration begins, at the place where a saved one ended or anew."""
        self.drawn += self.place - base
        self.left_out.clear()
        self.epoch, self.base, self.position, self.inside = epoch, base, 0, inside

    def go_to(self, epoch: int, base: int, inside: int) -> None:
        """The next iteration is to begin there, whatever was handed out before."""
        self.epoch, self.base, self.position, self.inside = epoch, base, 0, inside
        self.resume = (base, inside)
        self.left_out.clear()


@dataclasses.dataclass(frozen=True, slots=True)
class Saved:
    """A state that was checked."""

    epoch: int
    place: int
    inside: int
    drawn: int
    window: int | None
    window_bytes: int | None
    skipped: list[tuple[Any, BaseException]]


def check_saved(
    state: Any, identity: Mapping[str, Any], *, rank: int, world: int, each: int | None, strict: bool
) -> Saved:
    """What a state says; ValueError or TypeError when it is none, or that of another feed."""
    if not isinstance(state, dict):
        raise TypeError(f"a state is the dict that state_dict() gave, not a {type(state).__name__}")
    if state.get("version") != VERSION:
        raise ValueError(
            f"a state of version {shown(state.get('version'))} cannot be read here: version {VERSION} is known"
        )
    for name, mine in identity.items():
        theirs = state.get(name)
        if theirs == mine:
            continue
        if name == "items":
            if not strict:
                continue
            raise ValueError(
                "this state belongs to other items, or to the same in another order: give the ones of before; if only "
                "their names have changed, load_state_dict(state, strict=False) goes on with these"
            )
        raise ValueError(
            f"this state belongs to another feed: its {name} is {shown(theirs)}, here it is {mine!r}; make the feed "
            "with the same items, seed and shuffle as before"
        )
    place, inside = _count(state, "position"), _count(state, "inside")
    length = identity["length"]
    if length is not None and place > length + world:
        raise ValueError(f"this state is broken: its position is {place}, and there are {length} items")
    if each is not None and inside >= each:
        raise ValueError(f"this state is broken: it is {inside} samples inside an item, and one gives {each} here")
    theirs, owner = _count(state, "world"), state.get("rank")
    if theirs < 1:
        raise ValueError("this state is broken: its world is 0 ranks")
    if owner is not None and (_count(state, "rank"), theirs) != (rank, world):
        raise ValueError(
            f"this state is that of rank {owner} of {theirs}, and this is rank {rank} of {world}: where items may be "
            "left out, or give any number of samples, each rank has come to a place of its own; save a state on every "
            "rank and load each into its own, or save between two epochs, which is good for all"
        )
    if inside and theirs != world:
        raise ValueError(
            f"this state was taken in the middle of an item, by one of {state['world']} ranks, and here there are "
            f"{world}: go on with as many, or save at the end of an epoch"
        )
    window, window_bytes = (
        None if state.get(name) is None else _count(state, name) for name in ("window", "window_bytes")
    )
    return Saved(
        _count(state, "epoch"), place, inside, _count(state, "drawn"), window, window_bytes, read_skipped(state)
    )


def _count(state: Mapping[str, Any], name: str) -> int:
    value = state.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MOST:
        raise ValueError(f"this state is broken: its {name} is {shown(value)}, which is not a count")
    return value


def write_skipped(skipped: list[tuple[Any, BaseException]]) -> list[list[Any]]:
    """Items that were left out in the form in which they are saved: plain values as they are, others as text."""
    plain = (str, int, float, bool, type(None))
    # One that came out of a saved state is told by its words, as it was then.
    pairs = (
        (item if type(item) in plain else shown(item), str(error) if type(error) is LoadError else said(error))
        for item, error in skipped[-SKIPPED_KEPT:]
    )
    return [[_short(item) if isinstance(item, str) else item, _short(text)] for item, text in pairs]


def _short(text: str) -> str:
    return text if len(text) <= TEXT_KEPT else f"{text[: TEXT_KEPT - 3]}..."


def read_skipped(state: Mapping[str, Any]) -> list[tuple[Any, BaseException]]:
    """The items that a state says were left out."""
    skipped = state.get("skipped", [])
    if not isinstance(skipped, list) or len(skipped) > SKIPPED_KEPT:
        raise ValueError("this state is broken: skipped is not a short list")
    pairs: list[tuple[Any, BaseException]] = []
    for entry in skipped:
        if not isinstance(entry, list | tuple) or len(entry) != 2 or not isinstance(entry[1], str):
            raise ValueError("this state is broken: skipped does not hold pairs of an item and a text")
        pairs.append((entry[0], LoadError(entry[1], item=entry[0])))
    return pairs
