"""The benchmark of memory: the same work through torch's DataLoader and Penstock, with what each adds to the machine.

Two parts, both in rounds of fresh processes: cases with a budget each, and what it costs to hold one, which is the
speed of small samples with and without limits and measurements. A ratio is taken within a round, where both ran one
right after the other, and the median of those is shown. Runs in the parent; trials do the work.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from penstock._bench import harness
from penstock._bench.cases import CASES, COSTS, workload_of
from penstock._bench.harness import Outcome, Results, Setup, Summary
from penstock._bench.workloads import Sizes

__all__ = ["SIZES", "Found", "as_json", "as_text", "run", "write"]

# Enough for a rate that means something and a peak that is the peak; all of it in less than three minutes.
SIZES: Final = Sizes(big_files=8, big_samples=24, rows=100_000, python_rows=20_000, least_s=0.5)
_CASES_S: Final = 100.0  # no further round is begun later
_COSTS_S: Final = 55.0
_COST_ROUNDS: Final = 15


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """Everything that a run found."""

    cases: Results
    costs: Results


def run(
    *, sizes: Sizes = SIZES, rounds: int = 3, workers: int = 2, seed: int = 0, timeout_s: float = 60.0,
    cost_rounds: int = _COST_ROUNDS, contenders: tuple[str, ...] | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Found:  # fmt: skip
    """Run both parts; ``tell`` gets a line of text per trial."""
    cases = Setup(
        workloads=tuple(CASES), contenders=contenders, sizes=sizes, rounds=rounds, memory_rounds=0, workers=workers,
        seed=seed, timeout_s=timeout_s, within_s=_CASES_S,
    )  # fmt: skip
    costs = dataclasses.replace(cases, workloads=tuple(COSTS), rounds=cost_rounds, contenders=None, within_s=_COSTS_S)
    return Found(harness.run(cases, tell=tell), harness.run(costs, tell=tell))


@dataclasses.dataclass(frozen=True, slots=True)
class _Ratio:
    """One contender against another, round by round."""

    median: float
    low: float
    high: float
    rounds: int


def _ratio(outcomes: Sequence[Outcome], of: Callable[[Outcome], float | None], pair: tuple[str, str]) -> _Ratio | None:
    by_round: dict[int, dict[str, float]] = {}
    for outcome in outcomes:
        if outcome.timed and outcome.status == "ok" and (value := of(outcome)):
            by_round.setdefault(outcome.round, {})[outcome.contender] = value
    one, other = pair
    found = [values[one] / values[other] for values in by_round.values() if one in values and other in values]
    return _Ratio(statistics.median(found), min(found), max(found), len(found)) if found else None


def _speed(outcome: Outcome) -> float | None:
    return outcome.result.get("samples_per_s")


def _work(outcome: Outcome) -> float | None:
    samples = outcome.result.get("samples")
    return None if outcome.cpu_s is None or not samples else outcome.cpu_s / samples


def _looking(outcomes: Sequence[Outcome]) -> str:
    """What looking at memory takes of all processor time, the largest of all rounds."""
    facts = [outcome.result.get("facts", {}) for outcome in outcomes if outcome.contender == "penstock"]
    shares = [fact["measure_s"] / fact["cpu_s"] for fact in facts if fact.get("cpu_s")]
    return f"{max(shares):.2%}" if shares else "-"


def _of(results: Results, name: str) -> tuple[dict[str, Summary], list[Outcome]]:
    summaries = {summary.contender: summary for summary in results.summaries if summary.workload == name}
    return summaries, [outcome for outcome in results.outcomes if outcome.workload == name]


def _rate(summary: Summary | None) -> str:
    if summary is None or summary.samples_per_s is None or summary.bytes_per_s is None:
        return "-" if summary is None else summary.status
    if workload_of(summary.workload).unit == "bytes":
        return f"{summary.bytes_per_s / 1e9:.2f} GB/s"
    return f"{summary.samples_per_s:,.0f}/s"


def _mib(size_bytes: float | None) -> str:
    return "-" if size_bytes is None else f"{size_bytes / 2**20:,.0f}"


def _added(summary: Summary | None, budget_bytes: int) -> tuple[str, str]:
    if summary is None or summary.added_bytes is None:
        return "-", "-"
    return _mib(summary.added_bytes), f"{summary.added_bytes / budget_bytes:.2f}"


def _said_bytes(outcomes: Sequence[Outcome]) -> int | None:
    """The most that Penstock itself counted."""
    facts = [outcome.result.get("facts", {}) for outcome in outcomes]
    return max((fact["peak_bytes"] for fact in facts if "peak_bytes" in fact), default=None)


def _lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]


def _notes(results: Results) -> list[str]:
    notes = [
        f"{summary.workload}: {summary.contender}: {summary.status}: {summary.reason}"
        for summary in results.summaries
        if summary.status != "ok"
    ]
    return [*notes, *(f"{s.workload}: {s.contender}: left {s.left_behind} processes" for s in results.summaries
                      if s.left_behind)]  # fmt: skip


def as_text(found: Found) -> str:
    """Both tables for a terminal."""
    machine, setup = found.cases.machine, found.cases.setup
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}, Python {machine['python']}, {packages}",
        f"{machine['date']}; {setup.workers} workers; {found.cases.took_s + found.costs.took_s:.0f} s",
        "",
        "added at the peak: MiB above what the process took before the loader was made (PSS of all its processes)",
        "",
    ]
    head = [
        "what is read", "budget", "torch", "of it", "penstock", "of it", "by stats", "torch", "penstock", "p / t",
    ]  # fmt: skip
    rows = []
    for name in found.cases.setup.workloads:
        workload = workload_of(name)
        budget = workload.budget_bytes or found.cases.setup.budget_bytes
        by_name, outcomes = _of(found.cases, name)
        torch, ours = by_name.get("torch"), by_name.get("penstock")
        ratio = _ratio(outcomes, _speed, ("penstock", "torch"))
        rows.append([
            workload.title, _mib(budget), *_added(torch, budget), *_added(ours, budget), _mib(_said_bytes(outcomes)),
            _rate(torch), _rate(ours), f"{ratio.median:.2f}" if ratio else "-",
        ])  # fmt: skip
    lines += [*_lines(head, rows), *_notes(found.cases), ""]
    lines += [
        "what it costs to hold the budget: held to it / not held, round by round, least and most in brackets;",
        "looking: time that was taken to look at memory, as a share of all processor time, the most of all rounds", "",
    ]  # fmt: skip
    rows = []
    for name in found.costs.setup.workloads:
        by_name, outcomes = _of(found.costs, name)
        ratios = [_ratio(outcomes, of, ("penstock", "penstock-unheld")) for of in (_speed, _work)]
        rows.append([
            workload_of(name).title, _rate(by_name.get("penstock")), _rate(by_name.get("penstock-unheld")),
            *(f"{r.median:.3f} ({r.low:.2f} {r.high:.2f})" if r else "-" for r in ratios),
            str(ratios[0].rounds if ratios[0] else 0), _looking(outcomes),
        ])  # fmt: skip
    lines += _lines(["what is read", "held", "not held", "speed", "CPU a sample", "rounds", "looking"], rows)
    return "\n".join([*lines, *_notes(found.costs), ""])


def as_json(found: Found) -> str:
    """Every trial, every median and the ratios."""
    tree: dict[str, Any] = dataclasses.asdict(found)
    for part, results, pair in (
        ("cases", found.cases, ("penstock", "torch")),
        ("costs", found.costs, ("penstock", "penstock-unheld")),
    ):
        ratios = {}
        for name in results.setup.workloads:
            _, outcomes = _of(results, name)
            each = {"speed": _ratio(outcomes, _speed, pair), "cpu": _ratio(outcomes, _work, pair)}
            ratios[name] = {what: dataclasses.asdict(ratio) if ratio else None for what, ratio in each.items()}
        tree[part]["ratios"] = ratios
    tree["budgets"] = {name: case.budget_bytes for name, case in CASES.items()}
    return json.dumps(tree, indent=1)


def write(found: Found, folder: Path) -> Path:
    """Put ``memory.json`` into a folder; gives its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "memory.json"
    path.write_text(as_json(found), encoding="utf-8")
    return path
