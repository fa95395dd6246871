"""The search for the largest batch of a model, the line through measurements, and what a plan makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock._core.budget import GiB, MiB
from penstock._core.fit import MOST_SIZES, Asked, Line, Need, Step, Timeline, largest
from penstock._core.plan import Footprint, Plan, Request, solve

# A step's peak is the highest of many moments, and what lives at one moment is a fixed part and a part a sample.
moments = st.lists(st.tuples(st.integers(0, GiB(8)), st.integers(0, MiB(300))), min_size=1, max_size=5)
budgets = st.one_of(st.integers(1, MiB(64)), st.integers(1, GiB(1)), st.integers(1, GiB(64)))
mosts = st.one_of(st.integers(1, 9), st.integers(1, 5000), st.integers(1, 2**31 - 1))


def searched(nbytes: Callable[[int], int], budget: int, most: int) -> tuple[int, list[int]]:
    """What is found, and the sizes that were looked at."""
    search, asked = largest(budget, most), []
    size = next(search)
    while True:
        asked.append(size)
        try:
            size = search.send(nbytes(size))
        except StopIteration as stop:
            return stop.value, asked


def peak_of(lines: list[tuple[int, int]]) -> Callable[[int], int]:
    return lambda rows: max(fixed + each * rows for fixed, each in lines)


@given(moments, budgets, mosts)
@example([(0, 1), (0, 300)], 10**6, 2**31 - 1)
@example([(100, 0)], 100, 7)
def test_the_largest_batch_is_found_exactly(lines: list[tuple[int, int]], budget: int, most: int) -> None:
    peak = peak_of(lines)
    found, asked = searched(peak, budget, most)
    assert all(1 <= size <= most for size in asked)
    assert len(asked) == len(set(asked)) <= MOST_SIZES
    assert found == 0 or (found in asked and peak(found) <= budget)
    if found < most:
        # Looking ends after so many sizes; what it has then is near.
        beyond = found + 1 if len(asked) < MOST_SIZES else found + found // 100 + 1
        assert beyond > most or peak(beyond) > budget


@given(st.integers(0, GiB(8)), st.integers(1, MiB(300)), budgets, mosts)
def test_a_straight_line_takes_three_sizes(fixed: int, each: int, budget: int, most: int) -> None:
    found, asked = searched(lambda rows: fixed + each * rows, budget, most)
    assert found == max(0, min(most, (budget - fixed) // each))
    assert len(asked) <= 3


@given(moments, budgets, st.integers(0, GiB(4)), mosts)
def test_more_memory_never_gives_a_smaller_batch(
    lines: list[tuple[int, int]], budget: int, more: int, most: int
) -> None:
    peak = peak_of(lines)
    assert searched(peak, budget, most)[0] <= searched(peak, budget + more, most)[0]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=300), st.integers(1, 5000))
def test_whatever_grows_a_batch_that_was_seen_to_fit_is_chosen(rises: list[int], budget: int) -> None:
    """No law but growth: steps and plains, as of an allocator that gives whole blocks."""
    sums = [sum(rises[: rows + 1]) for rows in range(len(rises))]
    found, asked = searched(lambda rows: sums[rows - 1], budget, len(rises))
    fits = [rows for rows in range(1, len(rises) + 1) if sums[rows - 1] <= budget]
    assert (found == 0) == (not fits)
    assert found == 0 or (found in asked and found in fits)
    assert len(asked) <= MOST_SIZES


@given(st.integers(1, 10**6), st.integers(1, 2000), budgets)
def test_a_batch_that_is_compared_with_itself_is_found_too(each: int, square: int, budget: int) -> None:
    """Contrastive losses take memory with the square of the batch."""

    def peak(rows: int) -> int:
        return each * rows + square * rows * rows

    found, asked = searched(peak, budget, 2**31 - 1)
    assert found == 0 or peak(found) <= budget
    assert peak(found + 1 if len(asked) < MOST_SIZES else found + found // 100 + 1) > budget


# ---------------------------------------- the line

points = st.dictionaries(st.integers(1, 5000), st.integers(0, GiB(4)), min_size=1, max_size=6)


@given(points, st.sampled_from([0.0, 0.15, 1.0]))
def test_no_measurement_lies_above_the_line(found: dict[int, int], margin: float) -> None:
    line = Line.through(found, margin=margin)
    assert all(line.nbytes(rows) >= nbytes - 1 for rows, nbytes in found.items())
    sizes = sorted([*found, 1, 10, 10_000])
    assert all(line.nbytes(a) <= line.nbytes(b) for a, b in pairwise(sizes))


@given(st.integers(0, GiB(4)), st.integers(0, MiB(64)), st.sets(st.integers(1, 64), min_size=2, max_size=5))
def test_what_is_a_line_is_gone_on_with_and_the_margin_is_on_top(fixed: int, each: int, sizes: set[int]) -> None:
    found = {rows: fixed + each * rows for rows in sizes}
    assert abs(Line.through(found, margin=0).nbytes(1000) - (fixed + 1000 * each)) <= 64
    assert abs(Line.through(found, margin=0.15).nbytes(1000) - 1.15 * (fixed + 1000 * each)) <= 64


def test_from_one_measurement_all_of_it_is_taken_to_grow() -> None:
    assert Line.through({4: 400}, margin=0).nbytes(8) == 800
    with pytest.raises(ValueError, match="at least one point"):
        Line.through({}, margin=0)


# ---------------------------------------- the timeline

events = st.lists(st.tuples(st.integers(0, MiB(64)), st.integers(0, MiB(1)), st.booleans()), max_size=40)


def happened(plan: list[tuple[int, int, bool]], rows: int) -> list[int]:
    """Allocations of a fixed part and a part a sample; True frees the oldest that is still there, before it."""
    live: list[int] = []
    found = []
    for fixed, each, frees in plan:
        if frees and live:
            found.append(-live.pop(0))
        live.append(1 + fixed + each * rows)
        found.append(live[-1])
    return found


@given(events, st.integers(1, 4096))
@example([(100, 0, False), (0, 1, True)], 500)
def test_a_peak_is_gone_on_with_wherever_it_moves_to(plan: list[tuple[int, int, bool]], rows: int) -> None:
    timeline = Timeline.through((4, happened(plan, 4)), (8, happened(plan, 8)))
    assert timeline is not None
    assert timeline.nbytes(rows) == max(accumulate(happened(plan, rows)), default=0)


def test_runs_that_did_not_do_the_same_have_no_timeline() -> None:
    assert Timeline.through((4, [10, -10]), (8, [10, -10, 5])) is None
    assert Timeline.through((4, [10, -10]), (8, [10, 20])) is None
    assert Timeline.through((4, [10]), (4, [10])) is None


# ---------------------------------------- in a plan

SAMPLE = Footprint.assumed((MiB(1), 8))


def planned(rows: int, bound: str, **options: object) -> Plan:
    step = Step(rows, (("parameters", MiB(10)), ("activations", MiB(2) * rows), ("margin", MiB(1))))
    need = Need(step=step, buffers=2, bound=bound, notes=("how it was found",))
    request = Request(memory=GiB(1), batch_size="max", device_memory=MiB(300), need=need, num_workers=0)
    return solve(replace(request, **options), SAMPLE)  # type: ignore[arg-type]  # the options are those of a request


def test_a_plan_says_that_the_device_bounds_the_batch_and_with_what() -> None:
    plan = planned(64, "device")
    assert plan.batch_size == 64
    assert plan.model_bytes == MiB(10 + 128 + 1)
    assert plan.device_total_bytes == plan.model_bytes + 2 * plan.batch_bytes
    assert plan.device_memory == MiB(300)
    assert dict(plan.model_parts)["activations"] == MiB(128)
    table = str(plan)
    assert "batch size 64: bound by the device, where one sample more would not fit beside the model" in table
    assert "how it was found" in table
    lines = [line.split() for line in table.splitlines()]
    assert ["activations", "128", "MiB", "42.7%"] in lines
    assert ["batches", "128", "MiB", "42.7%"] in lines
    assert ["budget", "300", "MiB", "100.0%"] in lines


def test_a_plan_says_that_the_host_bounds_the_batch() -> None:
    exactly = planned(64, "host").total_bytes
    assert "batch size 64: bound by the host, the largest that the budget" in str(planned(64, "host", memory=exactly))
    assert "batch size 64: bound by the host, all there is" in str(planned(64, "host", length=64))
    assert "batch size 64: bound by a rank that has less room" in str(planned(64, "ranks"))


def test_a_loop_that_makes_its_batches_has_two_of_them_only_between_steps() -> None:
    step = Step(8, (("parameters", 100), ("activations", 50)), resting=110)
    assert step.with_batches(30, 2) == 210
    assert step.with_batches(30, 1) == 180  # within the step: there is less in between
    assert step.with_batches(300, 1) == 710  # in between: there are two
    assert Step(8, step.parts).with_batches(300, 1) == 750
    assert step.with_batches(30, 0) == 150


def test_without_a_model_nothing_is_said_of_one() -> None:
    plan = solve(Request(memory=GiB(1)), SAMPLE)
    assert (plan.model_bytes, plan.model_parts, plan.device_total_bytes) == (0, (), 0)
    assert "on the device" not in str(plan)


@pytest.mark.parametrize("name", ["optimizer", "loss"])
def test_an_optimizer_or_a_loss_without_a_model_is_refused(name: str) -> None:
    given_ = {"optimizer": None, "loss": None, name: "adam"}
    with pytest.raises(TypeError, match=f"{name} is part of a model's step: give the model as well"):
        Asked.checked(None, given_["optimizer"], given_["loss"], train=True)
