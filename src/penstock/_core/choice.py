"""Processes or threads, where the plan decides how many workers there are. Pure.

Processes, unless threads do better: a process can be held to its share of the budget and be replaced, a thread cannot.
Threads do better when more of them fit, and then only: the probe was made in a process, so starting some is paid for.

A load goes to threads only if nothing speaks against it (``sharing`` looks at its code) and two of them were seen to
run side by side (``pace`` takes the time).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from penstock._core.errors import BudgetError
from penstock._core.plan import Footprint, Plan, Request, solve

__all__ = ["SIDE_BY_SIDE", "Threads", "choose"]

# Two that wait for each other take 2 times as long; what is between is a load that holds the GIL part of the time.
SIDE_BY_SIDE: Final = 1.3
HARDLY: Final = 1.6  # and what is between may be memory that is no faster for two


@dataclass(frozen=True, slots=True)
class Threads:
    """What is known about loading in threads."""

    obstacle: str | None
    """Why a load may not run in threads, in words; None if nothing is against it."""
    ratio: float | None = None
    """Time of two loads at once over that of one; None if it was not measured."""


def choose(request: Request, footprint: Footprint, threads: Threads) -> Plan:
    """The plan with the better executor of the two, and a note that says why; BudgetError if neither fits."""
    refused: BudgetError | None = None
    plan: Plan | None = None
    try:
        plan = solve(request, footprint)
    except BudgetError as error:
        refused = error
    workers = plan.workers if plan is not None else 0
    # Beside no workers at all, whatever is won is won.
    most = HARDLY if footprint.batched and not workers else SIDE_BY_SIDE
    if threads.obstacle is not None or threads.ratio is None or threads.ratio > most:
        if plan is None:
            raise refused or AssertionError
        return _noted(plan, _why_processes(threads, footprint)) if workers else plan
    # The batch stays what it is with processes, so that a larger budget never gives a smaller one.
    rows = request.batch_size if plan is None else plan.batch_size
    try:
        aside = replace(footprint, releases_gil=True)
        other = solve(replace(request, executor="thread", batch_size=rows), aside)
    except BudgetError:
        other = None
    seen = f"two loads at once took {threads.ratio:.2f} times as long as one"
    if other is not None and other.workers > workers:
        if footprint.batched and plan is not None and not workers:
            return _noted(
                other, f"threads: {seen}, load shares nothing that can change, and what it works on need not be sent"
            )
        fits = f"{workers} would fit" if workers else "none would fit"
        return _noted(
            other,
            f"threads, not processes: {seen}, load shares nothing that can change, and of {other.workers} processes "
            f"{fits}",
        )
    if plan is None:
        raise refused or AssertionError
    fit = f"processes, though {seen}: as many fit, and a process can be limited and replaced"
    return _noted(plan, fit) if workers else plan


def _why_processes(threads: Threads, footprint: Footprint) -> str:
    if threads.obstacle is None and threads.ratio is not None:
        return f"processes, not threads: two loads at once took {threads.ratio:.2f} times as long as one"
    if threads.obstacle is None:
        return "processes, not threads: loads are too slow to try two at once before the first batch"
    # Only advice: whether it is safe, the one who wrote it may know.
    less = '; executor="thread" takes less memory, if load is safe there' if footprint.waits else ""
    return f"processes, not threads: {threads.obstacle}{less}"


def _noted(plan: Plan, note: str) -> Plan:
    return replace(plan, notes=(*plan.notes, note))
