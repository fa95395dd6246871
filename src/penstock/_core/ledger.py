"""The slot state machine: who may write to a slot, who may read it, when it may be used again. Pure.

Rules, cited by the tests:

1. A slot is written to only while FILLING, and only by the tasks that were begun for it.
2. A batch is READY when the last of its tasks is done, and is handed out once, in the order of batch numbers.
3. A LEASED slot is never begun again before its lease ends.
4. A cancelled batch keeps its slot FILLING until every one of its tasks is accounted for: a worker may still
   be writing.
5. A lease is refused (the batch is to be copied) when it would leave workers fewer than one slot to fill; but
   two leases are always allowed, because a ``for`` loop holds the old batch while it asks for the new one.
6. One lease that is left over when an iteration ends does not count for rule 5: it is the batch that the loop variable
   still names. The slots that remain do the work; nothing is copied on its account.

Every change of state goes through ``_move``, which knows the table below and nothing else. ``validate()`` checks
all that must hold between calls. Not owned here: what is in a slot, who works, time. A worker that died is the
crew's matter: it gives the same task to another once the process is gone, and until then the slot stays FILLING.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Final

__all__ = ["Ledger", "State"]


class State(enum.Enum):
    """Where a slot is in its life."""

    FREE = "free"
    FILLING = "filling"
    READY = "ready"
    LEASED = "leased"
    RETIRED = "retired"


TABLE: Final[dict[tuple[State, str], State]] = {
    (State.FREE, "begin"): State.FILLING,
    (State.FILLING, "filled"): State.READY,
    (State.FILLING, "abandoned"): State.FREE,
    (State.READY, "lease"): State.LEASED,
    (State.READY, "copied"): State.FREE,
    (State.READY, "discarded"): State.FREE,
    (State.LEASED, "ended"): State.FREE,
    (State.FREE, "retire"): State.RETIRED,
    (State.RETIRED, "revive"): State.FREE,
}


class Ledger:
    """The state of every slot of an arena, and which batch and tasks it belongs to."""

    __slots__ = ("_batch", "_by_batch", "_by_task", "_doomed", "_free", "_lingering", "_open", "_states")

    def __init__(self, slots: int) -> None:
        self._states = [State.FREE] * slots
        self._batch: list[int | None] = [None] * slots
        self._open: list[set[int]] = [set() for _ in range(slots)]
        self._by_batch: dict[int, int] = {}
        self._by_task: dict[int, int] = {}
        self._doomed: set[int] = set()
        self._lingering: int | None = None
        # Last in, first out: the slot that was free the shortest time is the warmest in the caches.
        self._free = list(range(slots - 1, -1, -1))

    def __repr__(self) -> str:
        shown = ", ".join(
            state.value if batch is None else f"{state.value} {batch}"
            for state, batch in zip(self._states, self._batch, strict=True)
        )
        return f"<Ledger {shown}>"

    def __len__(self) -> int:
        return len(self._states)

    def count(self, state: State) -> int:
        """Slots in this state."""
        return self._states.count(state)

    def state(self, slot: int) -> State:
        """The state of a slot."""
        return self._states[slot]

    @property
    def leased(self) -> int:
        """Slots that consumers hold."""
        return self._states.count(State.LEASED)

    @property
    def has_free(self) -> bool:
        """Whether a batch can be begun now."""
        return bool(self._free)

    @property
    def free(self) -> int:
        """Slots that can be begun now."""
        return len(self._free)

    @property
    def free_slots(self) -> list[int]:
        """Which ones these are."""
        return list(self._free)

    @property
    def usable(self) -> int:
        """Slots that are not out of use."""
        return len(self._states) - self._states.count(State.RETIRED)

    @property
    def outstanding(self) -> int:
        """Tasks that were begun and are not accounted for."""
        return len(self._by_task)

    def slot_of(self, task: int) -> int | None:
        """The slot that a task writes to; None for a task that is over."""
        return self._by_task.get(task)

    def batch_of(self, slot: int) -> int | None:
        """The batch that a slot holds or is being filled with."""
        return self._batch[slot]

    def begin(self, batch: int, tasks: Iterable[int]) -> int:
        """Take a free slot for a batch that these tasks will fill."""
        if not self._free:
            raise AssertionError(f"no free slot to begin batch {batch}: {self!r}")
        slot = self._free.pop()
        self._move(slot, "begin")
        self._batch[slot] = batch
        self._by_batch[batch] = slot
        self._open[slot].update(tasks)
        for task in self._open[slot]:
            self._by_task[task] = slot
        return slot

    def done(self, task: int) -> State:
        """A task is accounted for (done, or never to be done); the slot's state after that."""
        slot = self._by_task.pop(task)
        self._open[slot].remove(task)
        if not self._open[slot] and self._states[slot] is State.FILLING:
            if slot in self._doomed:
                self._doomed.remove(slot)
                self._vacate(slot, "abandoned")
            else:
                self._move(slot, "filled")
        return self._states[slot]

    def ready(self, batch: int) -> int | None:
        """The slot of a batch that can be handed out, or None."""
        slot = self._by_batch.get(batch)
        return slot if slot is not None and self._states[slot] is State.READY else None

    def may_lease(self) -> bool:
        """Whether the next batch may be handed out in place, or must be copied (rule 5)."""
        kept = 0 if self._lingering is None else 1
        after = self.leased + 1 - kept
        return after <= 2 or after < self.usable - kept

    def linger(self) -> None:
        """An iteration has ended: what is leased now may stay so for long (rule 6)."""
        if self._lingering is None:
            self._lingering = next((slot for slot, state in enumerate(self._states) if state is State.LEASED), None)

    @property
    def lingers(self) -> int | None:
        """The slot that an iteration which is over has left leased."""
        return self._lingering

    def lease(self, batch: int) -> int:
        """Hand a ready batch to a consumer in place."""
        slot = self._by_batch.pop(batch)
        self._move(slot, "lease")
        return slot

    def copied(self, batch: int) -> int:
        """A ready batch was handed out as a copy: its slot is free."""
        slot = self._by_batch[batch]
        self._vacate(slot, "copied")
        return slot

    def ended(self, slot: int) -> None:
        """The last view of a leased batch is gone."""
        if slot == self._lingering:
            self._lingering = None
        self._vacate(slot, "ended")

    def cancel(self) -> None:
        """Forget every batch that was not handed out; slots that are being written to follow later (rule 4)."""
        for batch in list(self._by_batch):
            self.drop(batch)

    def drop(self, batch: int) -> None:
        """Forget a batch that was not handed out."""
        slot = self._by_batch[batch]
        if self._states[slot] is State.READY:
            self._vacate(slot, "discarded")
        else:
            self._doomed.add(slot)
            del self._by_batch[batch]

    def grow(self) -> int:
        """Add a slot, free at once: all others are held by consumers."""
        self._states.append(State.FREE)
        self._batch.append(None)
        self._open.append(set())
        self._free.append(len(self._states) - 1)
        return len(self._states) - 1

    def retire(self) -> int | None:
        """Take a free slot out of use: its memory is needed elsewhere; None if none is free."""
        if not self._free:
            return None
        slot = self._free.pop(0)
        self._move(slot, "retire")
        return slot

    @property
    def retired(self) -> list[int]:
        """Slots that are out of use."""
        return [slot for slot, state in enumerate(self._states) if state is State.RETIRED]

    def revive(self, slot: int) -> None:
        """A slot that was out of use has memory again."""
        self._move(slot, "revive")
        self._free.append(slot)

    def validate(self) -> None:
        """Raise AssertionError when anything that must always hold does not."""
        free = [slot for slot, state in enumerate(self._states) if state is State.FREE]
        assert sorted(self._free) == free, "the free list and the states disagree"
        for slot, state in enumerate(self._states):
            busy = state is State.FILLING
            assert bool(self._open[slot]) == busy, f"slot {slot} is {state.value} with {len(self._open[slot])} tasks"
            assert (self._batch[slot] is None) == (state in (State.FREE, State.RETIRED)), (
                f"slot {slot} is {state.value}"
            )
            assert slot not in self._doomed or busy, f"slot {slot} is doomed but {state.value}"
            assert slot != self._lingering or state is State.LEASED, f"slot {slot} lingers but is {state.value}"
        for task, slot in self._by_task.items():
            assert task in self._open[slot], f"task {task} is lost"
        for batch, slot in self._by_batch.items():
            assert self._batch[slot] == batch, f"batch {batch} is not where the index says"
            assert self._states[slot] is not State.LEASED, f"batch {batch} was handed out and is still listed"

    def _move(self, slot: int, event: str) -> None:
        state = self._states[slot]
        after = TABLE.get((state, event))
        if after is None:
            raise AssertionError(f"slot {slot} is {state.value}: {event!r} cannot happen to it ({self!r})")
        self._states[slot] = after

    def _vacate(self, slot: int, event: str) -> None:
        self._move(slot, event)
        batch = self._batch[slot]
        if batch is not None and self._by_batch.get(batch) == slot:
            del self._by_batch[batch]
        self._batch[slot] = None
        self._free.append(slot)
