"""The ledger against a model that is too simple to be wrong: one record per slot, looked through from end to end.

The model knows the rules by their numbers in the docstring of ``ledger``; after every step both say the same, and
``validate()`` finds nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock._core.ledger import TABLE, Ledger, State


@dataclasses.dataclass
class Slot:
    """What the model remembers of a slot."""

    state: State = State.FREE
    batch: int | None = None
    open: set[int] = dataclasses.field(default_factory=set)
    cancelled: bool = False
    lingers: bool = False


class LedgerModel(RuleBasedStateMachine):
    """What an engine does to a ledger, in any order that an engine could."""

    @initialize(slots=st.integers(1, 6))
    def make(self, slots: int) -> None:
        self.ledger = Ledger(slots)
        self.slots = [Slot() for _ in range(slots)]
        self.next_task = 1
        self.next_batch = 0
        self.handed_out: list[int] = []

    # ---- looking things up the slow way

    def those(self, state: State) -> list[int]:
        return [number for number, slot in enumerate(self.slots) if slot.state is state]

    def tasks(self) -> list[int]:
        return sorted(task for slot in self.slots for task in slot.open)

    def at(self, batch: int) -> int:
        return next(number for number, slot in enumerate(self.slots) if slot.batch == batch)

    def next_ready(self) -> int | None:
        """The batch that is to be handed out next (rule 2), if it is ready."""
        live = [s for s in self.slots if s.batch is not None and s.state in (State.FILLING, State.READY)]
        first = min((s for s in live if not s.cancelled), key=lambda s: s.batch or 0, default=None)
        return first.batch if first is not None and first.state is State.READY else None

    # ---- what happens

    @precondition(lambda self: self.those(State.FREE))
    @rule(tasks=st.integers(1, 4))
    def begin(self, tasks: int) -> None:
        idents = range(self.next_task, self.next_task + tasks)
        self.next_task += tasks
        number = self.ledger.begin(self.next_batch, idents)
        slot = self.slots[number]
        assert slot.state is State.FREE  # rules 1 and 3: nobody else writes to it, nobody reads it
        self.slots[number] = Slot(State.FILLING, self.next_batch, set(idents))
        self.next_batch += 1

    @precondition(lambda self: self.tasks())
    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(self.tasks()))
        number = next(n for n, slot in enumerate(self.slots) if task in slot.open)
        slot = self.slots[number]
        assert self.ledger.slot_of(task) == number  # rule 1
        slot.open.remove(task)
        if not slot.open:
            # Rule 2 for what is still wanted, rule 4 for what is not.
            self.slots[number] = Slot() if slot.cancelled else dataclasses.replace(slot, state=State.READY)
        assert self.ledger.done(task) is self.slots[number].state
        assert self.ledger.slot_of(task) is None

    @precondition(lambda self: self.next_ready() is not None)
    @rule()
    def hand_out(self) -> None:
        batch = self.next_ready()
        assert batch is not None
        number = self.at(batch)
        assert self.ledger.ready(batch) == number
        leased, usable = len(self.those(State.LEASED)), len(self.slots) - len(self.those(State.RETIRED))
        # Rule 5: two are always allowed, more only while one slot is left for workers; rule 6: but for one left over.
        kept = sum(slot.lingers for slot in self.slots)
        allowed = leased - kept < 2 or leased - kept + 1 < usable - kept
        assert self.ledger.may_lease() is allowed
        if allowed:
            assert self.ledger.lease(batch) == number
            self.slots[number].state = State.LEASED
        else:
            assert self.ledger.copied(batch) == number
            self.slots[number] = Slot()
        self.handed_out.append(batch)
        assert self.ledger.ready(batch) is None  # rule 2: once

    @precondition(lambda self: self.those(State.LEASED))
    @rule(data=st.data())
    def lease_ends(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.those(State.LEASED)))
        self.ledger.ended(number)
        self.slots[number] = Slot()

    @rule()
    def an_iteration_ends(self) -> None:
        self.ledger.linger()
        if self.those(State.LEASED) and not any(slot.lingers for slot in self.slots):
            self.slots[self.those(State.LEASED)[0]].lingers = True  # rule 6: one, and no other until it is given back
        lingering = [number for number, slot in enumerate(self.slots) if slot.lingers]
        assert self.ledger.lingers == (lingering[0] if lingering else None)

    @rule()
    def cancel(self) -> None:
        self.ledger.cancel()
        for number, slot in enumerate(self.slots):
            if slot.state is State.READY:
                self.slots[number] = Slot()
            elif slot.state is State.FILLING:
                slot.cancelled = True  # rule 4: a worker may still be writing

    @precondition(lambda self: len(self.slots) < 9)
    @rule()
    def grow(self) -> None:
        assert self.ledger.grow() == len(self.slots)
        self.slots.append(Slot())

    @rule()
    def retire(self) -> None:
        number = self.ledger.retire()
        assert (number is None) == (not self.those(State.FREE))
        if number is not None:
            assert self.slots[number].state is State.FREE
            self.slots[number].state = State.RETIRED

    @precondition(lambda self: self.those(State.RETIRED))
    @rule()
    def revive(self) -> None:
        number = self.ledger.retired[0]
        self.ledger.revive(number)
        self.slots[number].state = State.FREE

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        listed = [s for s in self.slots if s.state in (State.FILLING, State.READY) and not s.cancelled]
        if not listed:
            return
        slot = data.draw(st.sampled_from(listed))
        assert slot.batch is not None
        number = self.slots.index(slot)
        self.ledger.drop(slot.batch)
        if slot.state is State.READY:
            self.slots[number] = Slot()
        else:
            slot.cancelled = True  # rule 4 again, for one batch

    # ---- what cannot happen is refused, and changes nothing

    @rule(data=st.data())
    def a_slot_that_is_not_leased_is_not_given_back(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.slots) - 1))
        if self.slots[number].state is not State.LEASED:
            with pytest.raises(AssertionError, match="'ended' cannot happen"):
                self.ledger.ended(number)

    @precondition(lambda self: not self.those(State.FREE))
    @rule()
    def nothing_is_begun_without_a_free_slot(self) -> None:
        with pytest.raises(AssertionError, match="no free slot"):
            self.ledger.begin(self.next_batch, [self.next_task])

    @rule(batch=st.integers(0, 30))
    def a_batch_that_is_not_ready_is_not_handed_out(self, batch: int) -> None:
        ready = any(s.batch == batch and s.state is State.READY for s in self.slots)
        assert (self.ledger.ready(batch) is not None) is ready

    # ---- what always holds

    @invariant()
    def both_say_the_same(self) -> None:
        if not hasattr(self, "ledger"):
            return
        ledger = self.ledger
        ledger.validate()
        assert len(ledger) == len(self.slots)
        for number, slot in enumerate(self.slots):
            assert ledger.state(number) is slot.state
            assert ledger.batch_of(number) == slot.batch
        for state in State:
            assert ledger.count(state) == len(self.those(state))
        assert ledger.leased == len(self.those(State.LEASED))
        assert ledger.free == len(self.those(State.FREE))
        assert ledger.has_free is bool(self.those(State.FREE))
        assert ledger.usable == len(self.slots) - len(self.those(State.RETIRED))
        assert ledger.outstanding == len(self.tasks())
        assert self.handed_out == sorted(set(self.handed_out))  # rule 2


LedgerModel.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestLedger = LedgerModel.TestCase


def test_a_leased_slot_is_never_begun_again() -> None:
    """Rule 3: otherwise a batch in the consumer's hands would change under them."""
    ledger = Ledger(2)
    slot = ledger.begin(0, [1])
    ledger.done(1)
    ledger.lease(0)
    other = ledger.begin(1, [2])
    assert other != slot
    with pytest.raises(AssertionError, match="no free slot"):
        ledger.begin(2, [3])
    ledger.ended(slot)
    assert ledger.begin(2, [3]) == slot


def test_a_cancelled_slot_waits_for_its_workers() -> None:
    """Rule 4: otherwise the old worker would write into the new batch."""
    ledger = Ledger(1)
    ledger.begin(0, [1, 2])
    ledger.cancel()
    assert ledger.done(1) is State.FILLING
    assert not ledger.has_free
    assert ledger.done(2) is State.FREE
    assert ledger.has_free


def test_a_slot_that_was_just_used_is_used_next() -> None:
    """It is the one that is in the caches."""
    ledger = Ledger(4)
    first = ledger.begin(0, [1])
    ledger.begin(1, [2])
    ledger.done(1)
    ledger.lease(0)
    ledger.ended(first)
    assert ledger.begin(2, [3]) == first


HARMS: dict[str, Callable[[Ledger, int], object]] = {
    "a slot is free and filling": lambda ledger, slot: ledger._free.append(slot),
    "a filling slot has no tasks": lambda ledger, slot: ledger._open[slot].clear(),
    "a filling slot has no batch": lambda ledger, slot: ledger._batch.__setitem__(slot, None),
    "a free slot is doomed": lambda ledger, slot: ledger._doomed.add(1 - slot),
    "a batch is in the wrong place": lambda ledger, slot: ledger._by_batch.__setitem__(8, slot),
    "a task has no slot": lambda ledger, slot: ledger._by_task.__setitem__(9, slot),
}


@pytest.mark.parametrize("harm", HARMS)
def test_validate_finds_what_is_wrong(harm: str) -> None:
    """A check that cannot fail checks nothing."""
    ledger = Ledger(2)
    slot = ledger.begin(7, [1])
    ledger.validate()
    HARMS[harm](ledger, slot)
    with pytest.raises(AssertionError):
        ledger.validate()


def test_every_state_can_be_reached_and_left() -> None:
    """The table has no dead end, and no state that nothing leads to."""
    assert {state for state, _ in TABLE} == set(State)
    assert set(TABLE.values()) == set(State)


def test_its_repr_shows_each_slot() -> None:
    """What an AssertionError shows must tell what was going on."""
    ledger = Ledger(3)
    ledger.begin(5, [1])
    ledger.begin(6, [2])
    ledger.done(2)
    assert repr(ledger) == "<Ledger filling 5, ready 6, free>"
