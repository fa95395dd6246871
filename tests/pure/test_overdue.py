"""Whose time is over, and how long patience lasts: decided from records, without a clock."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from penstock._core.overdue import GRACE_S, NOT_TIMED, RECORD, RECORD_BYTES, Overdue
from penstock._core.patience import USUAL_TIMES, Patience
from penstock._core.task import Busy


def test_a_record_fits_into_its_place() -> None:
    """Records of neighbours would overwrite each other otherwise."""
    assert RECORD.size <= RECORD_BYTES
    assert RECORD.unpack(RECORD.pack(2**63, 2**32 - 1, NOT_TIMED)) == (2**63, 2**32 - 1, math.inf)


def test_one_who_is_late_is_named_first_and_ended_only_at_the_same_item() -> None:
    """A record that was read while it was being written, or an item finished at the last moment, ends nobody."""
    overdue = Overdue(1.0)
    late = {0: (5, 3, 10.0)}
    first = overdue.look(11.5, late)
    assert (first.name, first.end) == ((0,), ())
    assert first.again_s <= GRACE_S
    moved = overdue.look(11.5 + GRACE_S, {0: (5, 4, 11.51)})
    assert (moved.name, moved.end) == ((), ())
    overdue.look(12.6, late)
    last = overdue.look(12.6 + GRACE_S, late)
    assert last.end == (0,)
    assert overdue.late(0) == (5, 3)


def test_nobody_is_late_who_is_idle_or_waits_for_room() -> None:
    """Waiting for the consumer is not the item's fault."""
    overdue = Overdue(1.0)
    for now in (100.0, 200.0, 300.0):
        verdict = overdue.look(now, {0: (0, 0, 0.0), 1: (7, 0, NOT_TIMED)})
        assert (verdict.name, verdict.end) == ((), ())
        assert verdict.again_s == 1.0


@given(st.floats(0.01, 100), st.lists(st.floats(0, 300), min_size=1, max_size=5))
def test_looking_when_told_to_ends_everyone_in_time(timeout_s: float, begun: list[float]) -> None:
    """Whoever hangs is ended after the timeout and two graces, and never before the timeout."""
    overdue = Overdue(timeout_s)
    records = {number: (number + 1, 0, moment) for number, moment in enumerate(begun)}
    now, looks = max(begun), 0
    while records:
        looks += 1
        assert looks < 100
        verdict = overdue.look(now, records)
        for number in verdict.end:
            assert now - records.pop(number)[2] > timeout_s
            overdue.late(number)
        assert all(now - moment <= timeout_s + 2 * GRACE_S + (max(begun) - moment) for _, _, moment in records.values())
        now += verdict.again_s + 1e-9


def test_patience_tells_of_one_slow_item_once() -> None:
    """One warning is enough, and it is about somebody who stayed at one item all the time."""
    patience = Patience(8.0)
    quick, slow = Busy(0, 1, 0), Busy(1, 2, 0)
    assert patience.look_s == 2.0
    assert patience.tried(0.0, [quick, slow], usual_s=0.0) is None
    assert patience.tried(7.9, [Busy(0, 3, 0), slow], usual_s=0.0) is None
    assert patience.tried(8.0, [Busy(0, 3, 0), slow], usual_s=0.0) == slow
    assert patience.tried(99.0, [slow], usual_s=0.0) is None
    assert patience.look_s is None


def test_what_is_usual_is_not_unusual() -> None:
    """Loads that take a minute each are no reason to warn after half of one."""
    patience = Patience(1.0)
    busy = [Busy(0, 1, 0)]
    assert patience.tried(0.0, busy, usual_s=10.0) is None
    assert patience.tried(10.0 * USUAL_TIMES - 0.1, busy, usual_s=10.0) is None
    assert patience.tried(10.0 * USUAL_TIMES, busy, usual_s=10.0) == busy[0]
