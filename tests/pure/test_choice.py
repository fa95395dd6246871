"""Processes or threads: when each is chosen, what is said, and that a larger budget is never worse."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock._core.budget import GiB, MiB
from penstock._core.choice import Threads, choose
from penstock._core.errors import BudgetError
from penstock._core.plan import Footprint, Plan, Request, solve
from tests.pure.test_plan import footprints, memories, requests

WAITS = Footprint(
    leaf_row_bytes=(1000,), load_bytes=2000, load_s=5e-3, cpu_s=1e-4, process_bytes=MiB(6), template_bytes=MiB(20)
)
FREE = Threads(None, 1.02)


def chosen(request: Request, footprint: Footprint, threads: Threads) -> Plan | None:
    try:
        return choose(request, footprint, threads)
    except BudgetError:
        return None


def test_threads_are_chosen_where_more_of_them_fit() -> None:
    """The note says what was measured, and how many processes there would be."""
    plan = choose(Request(memory=MiB(80), cores=2), WAITS, FREE)
    assert (plan.executor, plan.workers, plan.template_bytes) == ("thread", 16, 0)
    note = plan.notes[-1]
    assert "threads, not processes: two loads at once took 1.02 times as long as one" in note
    assert "of 16 processes 5 would fit" in note
    none = choose(Request(memory=MiB(30), cores=2), WAITS, FREE)
    assert (none.executor, none.workers > 0) == ("thread", True)
    assert "none would fit" in none.notes[-1]


def test_processes_are_kept_where_as_many_fit() -> None:
    """A process can be limited and replaced, so it takes more than equal speed to give that up."""
    plan = choose(Request(memory=GiB(1), cores=2), WAITS, FREE)
    assert (plan.executor, plan.workers) == ("process", 16)
    assert "processes, though two loads at once took 1.02 times as long as one: as many fit" in plan.notes[-1]


@pytest.mark.parametrize(
    ("threads", "said"),
    [
        (Threads("cache is a dict, which threads would share"), "processes, not threads: cache is a dict"),
        (Threads(None, 1.9), "processes, not threads: two loads at once took 1.90 times as long as one"),
        (Threads(None, None), "too slow to try two at once"),
    ],
)
def test_whatever_speaks_against_threads_is_said(threads: Threads, said: str) -> None:
    """However tight the budget is."""
    plan = choose(Request(memory=MiB(80), cores=2), WAITS, threads)
    assert (plan.executor, plan.workers) == ("process", 5)
    assert said in plan.notes[-1]
    assert plan.notes[:-1] == solve(Request(memory=MiB(80), cores=2), WAITS).notes


@pytest.mark.parametrize(("ratio", "executor"), [(1.1, "thread"), (1.5, "thread"), (1.7, "process")])
def test_many_rows_at_once_go_to_threads_where_processes_would_have_to_be_sent_them(
    ratio: float, executor: str
) -> None:
    """Beside no workers at all even threads that slow each other down are more."""
    sent = Footprint(
        leaf_row_bytes=(12_288,),
        load_bytes=4 * 2**20,
        load_s=2e-6,
        cpu_s=2e-6,
        process_bytes=MiB(6),
        item_bytes=3300,
        batched=True,
    )
    plan = choose(Request(memory=GiB(1), cores=2, batch_size=256), sent, Threads(None, ratio))
    assert (plan.executor, plan.workers) == (executor, 2 if executor == "thread" else 0)
    assert ("need not be sent" in plan.notes[-1]) == (executor == "thread")
    plain = choose(Request(memory=GiB(1), cores=2, batch_size=256), replace(sent, batched=False), Threads(None, ratio))
    assert plain.workers == 0


def test_no_word_of_either_without_workers() -> None:
    """A load that costs nothing runs in this process, and the plan says that already."""
    cheap = replace(WAITS, load_s=1e-7, cpu_s=1e-7)
    plan = choose(Request(memory=GiB(1), cores=2), cheap, Threads("cache is a dict"))
    assert plan.workers == 0
    assert "threads" not in "".join(plan.notes)


ways = st.builds(Threads, st.sampled_from([None, "something is shared"]), st.sampled_from([None, 1.0, 1.2, 1.5, 2.0]))
left_to_the_plan = requests().map(lambda request: replace(request, num_workers=None, executor="process", cache=False))


@given(left_to_the_plan, footprints, ways, st.lists(memories, min_size=2, max_size=6))
def test_more_budget_never_takes_a_worker_or_shrinks_the_batch(
    request: Request, footprint: Footprint, threads: Threads, budgets: list[int]
) -> None:
    """Whichever of the two it is; and every plan stays inside its budget."""
    plans = [chosen(replace(request, memory=memory), footprint, threads) for memory in sorted(budgets)]
    found = [plan for plan in plans if plan is not None]
    assert plans[: len(plans) - len(found)] == [None] * (len(plans) - len(found))
    assert all(plan.total_bytes <= plan.memory for plan in found)
    assert [plan.batch_size for plan in found] == sorted(plan.batch_size for plan in found)
    if request.batch_size != "max":
        assert [plan.workers for plan in found] == sorted(plan.workers for plan in found)
    if threads.obstacle is not None:
        assert all(plan.executor == "process" for plan in found)


@given(left_to_the_plan, footprints, ways)
def test_the_least_budget_is_that_of_processes(request: Request, footprint: Footprint, threads: Threads) -> None:
    """Without a worker both cost the same, so the advice in the refusal stays exact."""
    with pytest.raises(BudgetError) as caught:
        choose(replace(request, memory=1), footprint, threads)
    least = caught.value.least
    assert choose(replace(request, memory=least), footprint, threads).total_bytes <= least
    assert chosen(replace(request, memory=least - 1), footprint, threads) is None
