"""Laws of the plan: inside the budget, no worse with more, refused with the exact least; and what a person reads."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock._core.budget import GiB, KiB, MiB
from penstock._core.errors import BudgetError
from penstock._core.layout import slot_bytes
from penstock._core.plan import (
    CACHE_LEAVES,
    DEVICE_BUFFERS,
    MOST_ROWS,
    PARENT_BYTES,
    Footprint,
    Plan,
    Request,
    group_s,
    solve,
)

PAGE = 4096

# Leaves of one byte beside large ones, because there padding makes a batch grow in leaps.
leaves = st.lists(st.one_of(st.integers(0, 200), st.integers(0, 3 * MiB(1)), st.integers(0, GiB(1))), max_size=6)
footprints = st.builds(
    Footprint,
    leaf_row_bytes=st.one_of(leaves.map(tuple), st.integers(1, 200).map(lambda n: (1,) * n + (5000,))),
    load_bytes=st.one_of(st.integers(0, 10_000), st.integers(0, GiB(1))),
    process_bytes=st.integers(0, MiB(200)),
    template_bytes=st.one_of(st.just(0), st.integers(0, MiB(400))),
    load_s=st.sampled_from([0.0, 3e-6, 1e-4, 1e-2, 2.0]),
    cpu_s=st.sampled_from([0.0, 3e-6, 1e-4, 1e-2, 2.0]),
    item_bytes=st.one_of(st.just(0), st.integers(1, 5000)),
    releases_gil=st.sampled_from([None, True, False]),
)
memories = st.one_of(st.integers(1, MiB(64)), st.integers(1, GiB(1)), st.integers(1, GiB(64)))
batch_sizes: st.SearchStrategy[Any] = st.one_of(st.integers(1, 4), st.integers(1, 5000), st.just("max"))


def requests(batch_size: st.SearchStrategy[Any] = batch_sizes) -> st.SearchStrategy[Request]:
    return st.builds(
        Request,
        memory=memories,
        batch_size=batch_size,
        num_workers=st.one_of(st.none(), st.integers(0, 20)),
        executor=st.sampled_from(["process", "thread"]),
        cores=st.integers(1, 70),
        whole=st.booleans(),
        staged=st.booleans(),
        pieced=st.booleans(),
        length=st.one_of(st.none(), st.integers(0, 20), st.integers(0, 10**9)),
        cache=st.booleans(),
        groups=st.booleans(),
        most_slots=st.one_of(st.none(), st.none(), st.integers(1, 12)),
    )


def solved(request: Request, footprint: Footprint) -> Plan | None:
    try:
        return solve(request, footprint)
    except BudgetError:
        return None


def least(request: Request, footprint: Footprint) -> int:
    """The least budget, by asking for less than anything could do with."""
    with pytest.raises(BudgetError) as caught:
        solve(replace(request, memory=1), footprint)
    return caught.value.least


IMAGES = Footprint.assumed((3 * 224 * 224 * 4, 8))
TIGHT = Footprint(
    leaf_row_bytes=(MiB(1),), load_bytes=MiB(2), process_bytes=MiB(10), template_bytes=MiB(20), item_bytes=0
)


# ----------------------------------------------------------------------------------------------------------------- laws


@given(requests(), footprints, memories)
def test_a_plan_stays_inside_the_budget_and_adds_up(request: Request, footprint: Footprint, spare: int) -> None:
    """The promise of the whole library starts here."""
    request = replace(request, memory=least(request, footprint) + spare - 1)
    plan = solve(request, footprint)
    parts = (
        plan.arena_bytes + plan.workers * plan.worker_bytes + plan.template_bytes + plan.cache_bytes + plan.parent_bytes
    )
    assert plan.total_bytes == parts <= plan.memory == request.memory
    assert plan.free_bytes == plan.memory - plan.total_bytes
    assert plan.batch_bytes == slot_bytes(footprint.leaf_row_bytes, plan.batch_size)
    slot = slot_bytes(footprint.leaf_row_bytes, plan.batches_per_slot * plan.batch_size)
    assert plan.arena_bytes == (plan.slots + plan.staging_slots) * slot
    assert plan.sample_bytes == sum(footprint.leaf_row_bytes)
    assert plan.slots >= 2
    assert plan.parent_bytes >= PARENT_BYTES
    cached = plan.held_samples - plan.slots * plan.batches_per_slot * plan.batch_size
    assert 0 <= cached * plan.sample_bytes <= plan.cache_bytes
    free = plan.free_bytes + plan.cache_bytes
    assert plan.cache_bytes <= free - free // CACHE_LEAVES
    if request.num_workers is not None:
        assert plan.workers == request.num_workers
    if request.batch_size != "max":
        assert plan.batch_size == request.batch_size
    elif request.length is not None:
        assert plan.batch_size <= max(1, request.length)
    if plan.workers == 0 or request.executor == "thread":
        assert plan.template_bytes == 0
    if plan.workers == 0:
        assert plan.worker_bytes == 0
    else:
        extra = 2 * plan.batch_bytes if request.whole else 0
        assert plan.worker_bytes >= footprint.load_bytes + extra
    assert len(plan.notes) >= 2


@given(requests(), footprints)
def test_the_least_budget_works_and_less_does_not(request: Request, footprint: Footprint) -> None:
    """A user who follows the advice in the message gets a feed, and could not have had it for less."""
    smallest = least(request, footprint)
    plan = solve(replace(request, memory=smallest), footprint)
    assert plan.total_bytes == smallest
    with pytest.raises(BudgetError) as caught:
        solve(replace(request, memory=smallest - 1), footprint)
    assert caught.value.least == smallest
    assert solved(replace(request, memory=smallest - PAGE), footprint) is None
    assert (solved(request, footprint) is None) == (request.memory < smallest)


@given(requests(st.integers(1, 5000)), footprints, st.lists(memories, min_size=2, max_size=6), st.integers(0, MiB(100)))
def test_more_budget_never_takes_a_worker_or_a_slot(
    request: Request, footprint: Footprint, budgets: list[int], more: int
) -> None:
    """For a given batch size, (workers, slots) only ever grows, workers counting first."""
    smallest = least(request, footprint)
    budgets = sorted([*budgets, smallest, smallest + more, smallest + more + PAGE])
    plans = [solved(replace(request, memory=memory), footprint) for memory in budgets]
    found = [(plan.workers, plan.slots) for plan in plans if plan is not None]
    assert found == sorted(found)
    assert plans[: len(plans) - len(found)] == [None] * (len(plans) - len(found))


@given(requests(st.just("max")), footprints, st.lists(memories, min_size=2, max_size=6), st.integers(0, MiB(100)))
@example(  # one large leaf among many of a byte: two slots of larger batches fit before three of smaller ones do
    Request(memory=1, batch_size="max", num_workers=1),
    Footprint(leaf_row_bytes=(1,) * 200 + (5000,), load_bytes=0),
    [MiB(50), MiB(51)],
    0,
)
def test_more_budget_never_gives_a_smaller_largest_batch(
    request: Request, footprint: Footprint, budgets: list[int], more: int
) -> None:
    """Raising the budget cannot make training see smaller batches."""
    smallest = least(request, footprint)
    near = [smallest + step for step in (0, 1, more, more + 1, more + PAGE, 2 * more, 3 * more)]
    plans = [solved(replace(request, memory=memory), footprint) for memory in sorted([*budgets, *near])]
    sizes = [plan.batch_size for plan in plans if plan is not None]
    assert sizes == sorted(sizes)


@given(requests(st.just("max")), footprints, memories, st.integers(0, 20))
def test_the_largest_batch_could_not_be_larger(
    request: Request, footprint: Footprint, spare: int, num_workers: int
) -> None:
    """With the workers asked for, one more sample a batch would leave fewer than three slots."""
    request = replace(request, num_workers=num_workers, whole=False, cache=False)
    request = replace(request, memory=least(request, footprint) + spare - 1)
    plan = solve(request, footprint)
    if plan.batch_size < (MOST_ROWS if request.length is None else request.length):
        larger = solved(replace(request, batch_size=plan.batch_size + 1), footprint)
        assert larger is None or larger.slots < 3


# ------------------------------------------------------------------------------------------------------- tight budgets


def test_slots_go_first_then_workers_then_the_third_slot() -> None:
    """As the budget shrinks: slots down to three, workers one by one, two slots, one worker, none, refusal."""
    request = Request(memory=GiB(1), batch_size=8, cores=4)
    plans = [solved(replace(request, memory=MiB(memory)), TIGHT) for memory in range(200, 20, -1)]
    rungs = dict.fromkeys((plan.workers, plan.slots) for plan in plans if plan is not None)
    # A worker costs 12 MiB and a slot 8, so a worker fewer sometimes leaves room for a slot more.
    four, three, two = [(4, 4), (4, 3)], [(3, 4), (3, 3)], [(2, 4), (2, 3), (2, 2)]
    assert list(rungs) == [*four, *three, *two, (1, 3), (1, 2), (0, 3), (0, 2)]
    assert plans[-1] is None


def test_every_shortage_is_explained() -> None:
    """A person who wonders why there are so few workers reads it below the table."""
    request = Request(memory=MiB(83), batch_size=8, cores=4)
    plan = solve(request, TIGHT)
    notes = "\n".join(plan.notes)
    assert "2 workers, not 4" in notes
    assert "one more would leave room for fewer than 3 slots" in notes
    none = "\n".join(solve(replace(request, memory=MiB(40)), TIGHT).notes)
    assert "0 workers, not 4" in none
    assert "one takes 16.5 MiB and its template 20 MiB" in none
    assert "loaded in this process" in none


def test_workers_asked_for_are_given_or_refused() -> None:
    """An explicit number is not a wish."""
    request = Request(memory=MiB(60), batch_size=8, num_workers=4, cores=1)
    with pytest.raises(BudgetError, match=r"4 workers 16\.5 MiB each"):
        solve(request, TIGHT)
    assert solve(replace(request, memory=MiB(110)), TIGHT).workers == 4
    assert solve(replace(request, num_workers=0), TIGHT).workers == 0


def test_a_refusal_says_what_things_cost_and_what_would_work() -> None:
    """The message alone is enough to go on."""
    request = Request(memory=MiB(60), batch_size=8, num_workers=4)
    with pytest.raises(BudgetError) as caught:
        solve(request, TIGHT)
    message = str(caught.value)
    smallest = caught.value.least
    assert smallest == MiB(2 * 8 + 4 * 16.5 + 20) + PARENT_BYTES
    for part in (
        "memory=62914560 (60 MiB) is too small",
        f"{smallest} (106 MiB) is the least that works",
        "2 slots of 8 samples take 8 MiB each",
        "the template process 20 MiB",
        "this process 4 MiB",
        f"Give memory={smallest}",
        "num_workers=1",
        'executor="thread"',
        'cast="float16"',
    ):
        assert part in message
    assert solve(replace(request, num_workers=1), TIGHT).workers == 1
    assert solve(replace(request, executor="thread"), TIGHT).workers == 4


@given(requests(st.integers(1, 5000)), footprints)
def test_the_batch_size_that_a_refusal_names_works(request: Request, footprint: Footprint) -> None:
    """Advice that does not work is worse than none."""
    try:
        solve(request, footprint)
    except BudgetError as error:
        message = str(error)
    else:
        message = ""
    if found := re.search(r"batch_size=(\d+)", message):
        assert solve(replace(request, batch_size=int(found[1])), footprint).batch_size == int(found[1])
    if found := re.search(r"num_workers=(\d+)", message):
        assert solve(replace(request, num_workers=int(found[1])), footprint).workers == int(found[1])


def test_a_refusal_of_a_group_names_a_smaller_one_not_a_smaller_batch() -> None:
    """A group has as many items whatever the batch; only one that is a single batch shrinks with it."""
    request = Request(memory=MiB(60), batch_size=4, num_workers=1, group=6, regroup=4)
    with pytest.raises(BudgetError, match=r"Blocks\(group=8\)") as caught:
        solve(request, TIGHT)
    assert "batch_size" not in str(caught.value)
    assert solve(replace(request, group=2), TIGHT).batches_per_slot == 2
    with pytest.raises(BudgetError):
        solve(replace(request, group=3), TIGHT)
    with pytest.raises(BudgetError, match=r"batch_size=9 and shuffle=Blocks\(group=9\)"):
        solve(replace(request, batch_size=24, group=1, regroup=24), TIGHT)
    with pytest.raises(BudgetError) as caught:
        solve(replace(request, regroup=0), TIGHT)
    assert "Blocks" not in str(caught.value), "a saved state says what it is"


def test_tiny_and_huge_samples_have_a_least_too() -> None:
    """One byte and 100 GiB go through the same arithmetic."""
    request = Request(memory=1, batch_size=1, num_workers=0)
    tiny = Footprint(leaf_row_bytes=(1,), load_bytes=0, item_bytes=0)
    assert least(request, tiny) == PARENT_BYTES + 2 * PAGE
    huge = Footprint(leaf_row_bytes=(GiB(100),), load_bytes=GiB(100), item_bytes=0)
    assert least(request, huge) == PARENT_BYTES + 3 * GiB(100)


# --------------------------------------------------------------------------------------------------- workers and slots


@pytest.mark.parametrize(
    ("load_s", "cpu_s", "cores", "workers"),
    [
        (3e-6, 3e-6, 8, 0),  # a message costs more than the load
        (1e-3, 1e-3, 8, 8),  # bound by the processor: one a core
        (1e-3, 6e-4, 2, 2),
        (10e-3, 2e-3, 2, 10),  # waits 80% of its time: five a core
        (1.0, 1e-3, 2, 16),  # waits nearly always: as many as storage is likely to serve
        (1.0, 0.0, 2, 16),
        (1.0, 1e-3, 32, 32),  # never fewer than a load that is busy would get
        (1e-3, 3e-6, 2, 16),  # cheap for the processor, but slow
    ],
)
def test_workers_follow_from_what_a_load_does(load_s: float, cpu_s: float, cores: int, workers: int) -> None:
    """Workers are as many as can be of use."""
    footprint = Footprint(leaf_row_bytes=(1000,), load_bytes=2000, load_s=load_s, cpu_s=cpu_s)
    assert solve(Request(memory=GiB(8), cores=cores), footprint).workers == workers


@pytest.mark.parametrize(
    ("item_bytes", "load_s", "cores", "workers"),
    [
        (3_200, 6e-6, 2, 0),  # to send it costs as much as to load it
        (3_200, 6e-6, 8, 8),  # where there are cores, that is shared too
        (3_200, 40e-6, 2, 2),
        (64, 6e-6, 2, 2),  # a name is sent for nothing
        (1_000_000, 0.7e-3, 8, 0),  # the consumer would do nothing but send
        (1_000_000, 0.1, 8, 8),
    ],
)
def test_items_that_carry_data_are_sent_only_if_that_is_worth_it(
    item_bytes: int, load_s: float, cores: int, workers: int
) -> None:
    """Rows of arrays in memory travel to a load in another process."""
    footprint = Footprint(
        leaf_row_bytes=(12_000,), load_bytes=12_000, load_s=load_s, cpu_s=load_s, item_bytes=item_bytes
    )
    request = Request(memory=GiB(8), cores=cores, batch_size=256, groups=True)
    assert solve(request, footprint).workers == workers
    assert solve(replace(request, num_workers=2), footprint).workers == 2


def test_threads_that_would_wait_for_each_other_are_not_started() -> None:
    """One thread still overlaps with the consumer; more would only take the GIL from it."""
    held = Footprint(leaf_row_bytes=(1000,), load_bytes=2000, releases_gil=False)
    request = Request(memory=GiB(1), cores=8, executor="thread")
    assert solve(request, held).workers == 1
    assert solve(request, replace(held, releases_gil=True)).workers == 8
    assert solve(replace(request, executor="process"), held).workers == 8


def test_there_are_no_more_workers_than_samples() -> None:
    """Three files do not need eight processes."""
    assert solve(Request(memory=GiB(1), cores=8, length=3), IMAGES).workers == 3
    assert solve(Request(memory=GiB(1), cores=8, length=0), IMAGES).workers == 1


@pytest.mark.parametrize(
    ("changes", "slots"),
    [
        ({"batch_size": 32}, 4),  # 18 MiB each
        ({"batch_size": 1}, 7),  # 600 KiB each, and a batch of one occupies one worker only
        ({"batch_size": 32, "whole": True}, 7),  # one for each worker, one ready, two for the consumer
        ({"batch_size": 32, "num_workers": 0}, 3),
    ],
)
def test_slots_are_enough_that_no_worker_runs_dry(changes: dict[str, Any], slots: int) -> None:
    """Slots beyond that would only be memory."""
    assert solve(Request(memory=GiB(4), cores=4, **changes), IMAGES).slots == slots


def test_quick_samples_leave_each_worker_a_slot_of_its_own() -> None:
    """A slot of them is one task: with one slot for all workers, each but one waits for the consumer."""
    quick = replace(IMAGES, leaf_row_bytes=(KiB(12),), load_s=2e-6, cpu_s=2e-6)
    plan = solve(Request(memory=GiB(4), cores=2, num_workers=2, batch_size=512), quick)
    assert "5 slots: two for the consumer, one ready, 2 for the workers to fill" in plan.notes
    assert solve(Request(memory=GiB(4), cores=2, num_workers=2, batch_size=8192), quick).slots == 4, "two tasks a slot"


def test_loads_that_wait_have_more_to_do_while_one_of_them_takes_long() -> None:
    """Batches come in order: with four slots, one late item would have all workers wait for it."""
    waiting = replace(IMAGES, leaf_row_bytes=(KiB(1),), load_s=1e-3, cpu_s=1e-5)
    plan = solve(Request(memory=GiB(1), cores=2, num_workers=32, executor="thread", batch_size=16), waiting)
    assert "35 slots: two for the consumer, one ready, 32 for the workers to fill" in plan.notes
    assert solve(Request(memory=GiB(1), cores=2, num_workers=32, batch_size=16), IMAGES).slots == 5, "they compute"
    large = replace(waiting, leaf_row_bytes=(MiB(4),))
    assert solve(Request(memory=GiB(4), cores=2, num_workers=32, batch_size=16), large).slots == 5, "too much memory"


def test_batches_that_are_put_together_are_not_reckoned_in_whole_pages() -> None:
    """Those of a group of small ones would be reckoned several times as large as they are, and not fit."""
    small = replace(IMAGES, leaf_row_bytes=(1000,), load_bytes=2000)
    request = Request(memory=MiB(128), cores=2, num_workers=1, batch_size=1, group=15_768, pieced=True)
    plan = solve(request, small)
    assert MiB(15) < plan.parent_bytes - solve(replace(request, pieced=False), small).parent_bytes < MiB(24)


def test_a_large_batch_of_one_sample_does_not_wait_ready() -> None:
    """It takes so long to fill that one more slot gives no speed, and costs as much as all the rest."""
    large = replace(IMAGES, leaf_row_bytes=(MiB(24),))
    plan = solve(Request(memory=GiB(4), cores=2, batch_size=1), large)
    assert plan.slots == 4
    assert "4 slots: two for the consumer, 2 for the workers to fill" in plan.notes


@given(request=requests(), footprint=footprints, most=st.integers(1, 12))
def test_a_limit_of_slots_is_kept(request: Request, footprint: Footprint, most: int) -> None:
    """An interface above the feed may promise its users that no more than so many samples lie in shared memory."""
    plan = solved(replace(request, most_slots=most), footprint)
    assert plan is None or plan.slots <= max(2, most)


def test_tiny_batches_get_more_slots_since_they_cost_nothing() -> None:
    """Below a MiB the risk of waiting is dearer than the memory."""
    request = Request(memory=GiB(1), cores=2)
    rows = {KiB(1): 8, KiB(20): 6, KiB(32): 4}
    for row, slots in rows.items():
        assert solve(request, Footprint.assumed((row,))).slots == slots


def test_collating_whole_batches_is_paid_for_by_the_worker() -> None:
    """A callable collate_fn holds every sample of the batch and the result at once."""
    request = Request(memory=GiB(4), batch_size=8, num_workers=2)
    plain, whole = solve(request, TIGHT), solve(replace(request, whole=True), TIGHT)
    assert whole.worker_bytes - plain.worker_bytes == 2 * MiB(8) + 2 * MiB(8) // 4  # and a quarter more as slack
    here = solve(replace(request, whole=True, num_workers=0), TIGHT)
    assert here.parent_bytes == PARENT_BYTES + MiB(2) + 2 * MiB(8)


def test_varying_items_need_as_many_slots_again() -> None:
    """Samples whose number is not known beforehand wait in slots of their own."""
    plan = solve(Request(memory=GiB(4), batch_size=8, staged=True), TIGHT)
    assert plan.staging_slots == plan.slots
    assert plan.arena_bytes == 2 * plan.slots * MiB(8)
    assert plan.held_samples == plan.slots * 8


# ------------------------------------------------------------------------------------------------------- largest batch


def test_the_largest_batch_uses_the_budget() -> None:
    """A budget many times the workers' price goes into batches, three of them."""
    plan = solve(Request(memory=GiB(4), batch_size="max", cores=4), IMAGES)
    assert (plan.workers, plan.slots) == (4, 3)
    assert plan.free_bytes < 3 * (plan.sample_bytes + PAGE)
    assert plan.held_samples == 3 * plan.batch_size


def test_the_largest_batch_grows_evenly_while_workers_come() -> None:
    """Workers arrive one after the other without the batch shrinking at any step."""
    plans = [solve(Request(memory=MiB(m), batch_size="max", cores=4), IMAGES) for m in range(8, 400)]
    for one, two in pairwise(plans):
        assert two.batch_size >= one.batch_size
    assert {plan.workers for plan in plans} == {0, 1, 2, 3, 4}
    assert solve(Request(memory=MiB(64), batch_size="max", cores=4), IMAGES).workers >= 1
    waiting = solve(Request(memory=MiB(30), batch_size="max", cores=4), IMAGES)
    assert any("until the budget has room for a worker" in note for note in waiting.notes)


def test_the_largest_batch_is_not_larger_than_what_there_is() -> None:
    """Memory for samples that do not exist helps nobody."""
    plan = solve(Request(memory=GiB(4), batch_size="max", length=100), IMAGES)
    assert plan.batch_size == 100
    assert any("all there is" in note for note in plan.notes)
    assert solve(Request(memory=GiB(4), batch_size="max", length=0), IMAGES).batch_size == 1


def test_the_device_bounds_the_largest_batch_too() -> None:
    """Two batches lie on the device: one computed on, one arriving."""
    plan = solve(Request(memory=GiB(4), batch_size="max", device_memory=MiB(64)), IMAGES)
    assert plan.device_memory == MiB(64)
    assert DEVICE_BUFFERS * plan.batch_bytes <= MiB(64) < DEVICE_BUFFERS * (plan.batch_bytes + plan.sample_bytes)
    assert any("on the device" in note for note in plan.notes)
    with pytest.raises(BudgetError, match="device_memory=1048576") as caught:
        solve(Request(memory=GiB(4), batch_size=32, device_memory=MiB(1)), IMAGES)
    assert solve(Request(memory=GiB(4), batch_size=32, device_memory=caught.value.least), IMAGES).batch_size == 32


# ---------------------------------------------------------------------------------------------------------------- cache


def test_the_cache_takes_what_the_rest_leaves() -> None:
    """Caching changes nothing else, and holds no more than there is."""
    request = Request(memory=GiB(1), batch_size=8, num_workers=2)
    without, with_cache = solve(request, TIGHT), solve(replace(request, cache=True), TIGHT)
    assert (with_cache.workers, with_cache.slots) == (without.workers, without.slots)
    assert without.cache_bytes == 0
    # But for an eighth, which those get whose loads turn out larger, and for less than one sample.
    assert with_cache.free_bytes - without.free_bytes // CACHE_LEAVES < 1.01 * TIGHT.sample_bytes
    few = solve(replace(request, cache=True, length=10), TIGHT)
    assert few.held_samples == few.slots * 8 + 10
    # A rank that sees other items in every epoch has more to keep than one epoch has.
    assert solve(replace(request, cache=True, length=10, worth=30), TIGHT).held_samples == few.slots * 8 + 30


kept_leaves = st.lists(st.one_of(st.integers(0, 200), st.integers(1, MiB(1))), min_size=1, max_size=4)


@given(
    kept_leaves, st.integers(1, 600), st.integers(1, 5), st.one_of(st.none(), st.integers(0, 10**6)),
    st.integers(0, GiB(1)), st.integers(0, MiB(1)),
)  # fmt: skip
@example(leaf_bytes=[0], rows=12, each=5, items=None, spare=0, more=0)
def test_what_is_kept_on_the_device_and_the_buffers_stay_inside_its_budget(
    leaf_bytes: list[int], rows: int, each: int, items: int | None, spare: int, more: int
) -> None:
    """The least works, less does not, and more keeps no fewer samples than a third buffer would take."""
    footprint = Footprint.assumed(tuple(leaf_bytes))
    rows *= each
    request = Request(
        memory=GiB(64), batch_size=rows, num_workers=0, device_leaf_row_bytes=tuple(leaf_bytes), device_memory=1,
        device_keeps=each, length=None if items is None else (items + 1) * each,
    )  # fmt: skip
    with pytest.raises(BudgetError) as caught:
        solve(request, footprint)
    least = caught.value.least
    with pytest.raises(BudgetError, match="device_memory=") as caught:
        solve(replace(request, device_memory=least - 1), footprint)
    assert caught.value.least == least
    plan = solve(replace(request, device_memory=least + spare), footprint)
    assert plan.device_samples >= each
    assert plan.device_samples % each == 0
    assert plan.device_total_bytes == plan.device_bytes + plan.device_cache_bytes <= least + spare
    assert plan.device_cache_bytes >= (plan.device_samples + rows) * sum(leaf_bytes)
    assert "on the device: " in str(plan)
    richer = solve(replace(request, device_memory=least + spare + more), footprint)
    if richer.device_buffers == plan.device_buffers:
        assert richer.device_samples >= plan.device_samples
    else:
        assert richer.device_buffers == 3
        assert (
            richer.device_samples == request.length or richer.device_samples * 9 >= plan.device_samples * 8 - 9 * rows
        )


def test_the_cache_counts_what_it_has_to_remember() -> None:
    """A number for each item, whether it is kept or not; of too many items not all can be."""
    request = Request(memory=GiB(1), batch_size=8, num_workers=2, cache=True, length=10)
    plain, some = solve(request, TIGHT), solve(replace(request, index_bytes=MiB(4)), TIGHT)
    assert some.cache_bytes - plain.cache_bytes == MiB(4)
    assert some.held_samples == plain.held_samples
    endless = solve(replace(request, index_bytes=GiB(100)), TIGHT)
    assert endless.held_samples == plain.held_samples
    assert endless.total_bytes <= GiB(1)


# ----------------------------------------------------------------------------------------------------- what people read


def test_a_plan_prints_as_a_table() -> None:
    """Aligned, complete, and every decision with its reason."""
    plan = solve(Request(memory=MiB(256), batch_size=8, cores=2, cache=True, length=50), TIGHT)
    assert str(plan).splitlines() == TABLE.splitlines()


TABLE = """\
8 samples of 1 MiB a batch, 82 samples in memory at once

part                        number       each      bytes   of budget
--------------------------------------------------------------------
slots, one batch each            4      8 MiB     32 MiB       12.5%
workers, one process each        2   16.5 MiB     33 MiB       12.9%
template process                 1     20 MiB     20 MiB        7.8%
this process                     1      4 MiB      4 MiB        1.6%
cached samples                  50    1.0 MiB   50.3 MiB       19.6%
--------------------------------------------------------------------
total                                            139 MiB       54.4%
left free                                        117 MiB       45.6%
budget                                           256 MiB      100.0%

2 workers: one for each core, a load being 1 ms of work
4 slots: two for the consumer, one ready, 1 for the workers to fill
cache: 50 samples of 50, in what the rest leaves
"""


@given(requests(), footprints, memories)
def test_a_plan_prints_within_a_hundred_columns(request: Request, footprint: Footprint, spare: int) -> None:
    """It fits a terminal, whatever the numbers."""
    plan = solve(replace(request, memory=least(request, footprint) + spare - 1), footprint)
    lines = str(plan).splitlines()
    assert max(map(len, lines)) <= 100
    table = lines[2 : 2 + lines[2:].index("")]
    assert len({len(line) for line in table}) == 1
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize("workers", [0, 2])
def test_only_batches_of_quick_loads_share_a_slot(workers: int) -> None:
    """All batches of a slot are handed out when the last of them is full: with slow loads the first would wait long."""
    request = Request(memory=GiB(1), batch_size=16, num_workers=workers, cores=2, groups=True, length=10_000)
    small = Footprint(leaf_row_bytes=(1024, 8), load_bytes=4096)

    def together(load_s: float) -> int:
        return solve(request, replace(small, load_s=load_s, cpu_s=load_s)).batches_per_slot

    assert together(5e-3) == 1
    assert together(200e-6) == 1
    assert together(2e-6) > 4
    for load_s in (15e-6, 50e-6):
        assert together(load_s) * 16 * load_s <= group_s(load_s, workers)


def test_plans_are_values() -> None:
    """The same question has the same answer, which nobody can change."""
    request = Request(memory=GiB(1))
    plan = solve(request, IMAGES)
    assert plan == solve(request, IMAGES)
    with pytest.raises(FrozenInstanceError):
        plan.slots = 1  # type: ignore[misc]  # that is the point


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory": 0}, "memory=0 leaves no memory"),
        ({"batch_size": 0}, "batch_size=0 is not from 1 to"),
        ({"num_workers": -1}, "num_workers=-1 is negative"),
        ({"executor": "fibre"}, "executor='fibre' is not known"),
        ({"cores": 0}, "cores=0"),
    ],
)
def test_a_request_that_means_nothing_is_refused(changes: dict[str, Any], message: str) -> None:
    """Wrong arguments fail by name, before anything is computed from them."""
    with pytest.raises(ValueError, match=message):
        Request(**({"memory": GiB(1)} | changes))


def test_a_negative_footprint_is_refused() -> None:
    """A measurement that went wrong must not look like free memory."""
    with pytest.raises(ValueError, match="cannot be negative"):
        replace(IMAGES, load_bytes=-1)
