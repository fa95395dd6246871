"""The figures that Penstock promises, as data, and what a run says about each. Pure.

A claim compares medians of one run: a contender with a peer, with the best of a group of peers, with a limit, with its
budget, or with itself. It is judged only if both sides ran and gave right content. It fails nothing: a machine that is
busy with something else proves nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final, Literal

from penstock._bench.contenders import CONTENDERS
from penstock._bench.harness import Summary
from penstock._bench.workloads import WORKLOADS

__all__ = ["CLAIMS", "Claim", "Verdict", "judge"]

# Fewer have no middle.
_ROUNDS: Final = 3
# More would hide the rest of the note.
_NAMES: Final = 3
# Rounds that differ by more say that something else ran on the machine.
_NOISY: Final = 0.15
_BAD: Final = {"wrong": "gave wrong content", "timeout": "did not end", "skipped": "was skipped", "failed": "failed"}

Measure = Literal["rate", "peak", "added", "budget", "first", "gap", "later"]


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """Something about ``contender`` on ``workload``.

    ``rate``    at least ``wanted`` times the rate of the best of ``others``
    ``peak``    its processes take at most ``wanted`` times the memory of the one in ``others``, and it is as fast
    ``added``   the same for what it adds to the process that it is used in, whose imports are left out
    ``budget``  adds at most ``wanted`` times its budget
    ``first``   the first batch comes at most ``wanted`` seconds after that of the one in ``others``
    ``gap``     from the last batch of an epoch to the first of the next: at most ``wanted`` batches
    ``later``   later epochs have at least ``wanted`` times the rate of the first
    """

    workload: str
    contender: str
    wanted: float
    measure: Measure = "rate"
    others: tuple[str, ...] = ()
    group: str = ""
    """What ``others`` are together, for the reader."""

    @property
    def text(self) -> str:
        """The claim in words."""
        other = self.group or " or ".join(self.others)
        said = {
            "rate": f"rate, times that of {other}",
            "peak": f"peak memory of all processes, times that of {other}, and as fast",
            "added": f"memory added at the peak, times that of {other}, and as fast",
            "budget": "memory added, of the budget",
            "first": f"seconds to the first batch, beyond {other}",
            "gap": "gap between epochs, in batches",
            "later": "rate of later epochs, times that of the first",
        }
        return f"{self.workload}: {self.contender}: {said[self.measure]}"

    @property
    def is_least(self) -> bool:
        """Whether more is better."""
        return self.measure in ("rate", "later")

    @property
    def wanted_text(self) -> str:
        return f"{'>=' if self.is_least else '<='} {self.wanted:g}"


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What a run says about a claim."""

    claim: Claim
    got: float | None
    holds: bool | None
    """None: not judged, and ``note`` says why."""
    note: str = ""

    @property
    def got_text(self) -> str:
        if self.got is None:
            return "-"
        return f"{self.got:.2f}" if abs(self.got) < 10 else f"{self.got:.0f}"

    @property
    def word(self) -> str:
        return "not judged" if self.holds is None else "yes" if self.holds else "NO"


def _peers(workload: str, *by: str, but: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The peers on a workload that load in one of these ways."""
    names = (name for name in WORKLOADS[workload].contenders if name not in but)
    return tuple(name for name in names if not CONTENDERS[name].ours and (not by or CONTENDERS[name].by in by))


def _best(workload: str, contender: str, wanted: float, *by: str, but: tuple[str, ...] = ()) -> Claim:
    group = {("process",): "the best multi-process peer", ("thread",): "the best threaded peer", (): "the best peer"}[
        by
    ]
    others = _peers(workload, *by, but=but)
    return Claim(workload, contender, wanted, others=others, group=group + (f" but {' and '.join(but)}" if but else ""))


def _auto(workload: str) -> list[Claim]:
    """What ``num_workers=None`` is held against."""
    pairs: list[tuple[str, tuple[str, ...]]]
    if WORKLOADS[workload].contenders.count("penstock-process"):
        pairs = [("penstock-auto", ("penstock-0", "penstock-thread", "penstock-process"))]
    else:
        pairs = [("penstock-auto", ("penstock-0", "penstock-thread", "penstock"))]
    if "penstock-into-auto" in WORKLOADS[workload].contenders:
        pairs.append(("penstock-into-auto", ("penstock-into-0", "penstock-into-thread", "penstock-into")))
    if "penstock-many" in WORKLOADS[workload].contenders:
        pairs.append(("penstock-many", ("penstock-many-0", "penstock-many-thread")))
    return [Claim(workload, auto, 0.9, others=fixed, group="the best fixed choice") for auto, fixed in pairs]


def _ratio(workload: str, contender: str, other: str, wanted: float) -> Claim:
    return Claim(workload, contender, wanted, others=(other,))


_TORCH: Final = ("torch",)
_MANY_AT_A_TIME: Final = ("grain-default",)  # more loads wait at once than there are workers
_AT_RANDOM: Final = ("torch", "torch-4", "threads")
# Those whose load needs no more than NumPy: what an import takes is nobody's doing.
_QUICK_TO_START: Final = ("big", "python", "lines", "latency", "slow")

CLAIMS: Final[tuple[Claim, ...]] = (
    _ratio("big", "penstock", "torch", 4.0),
    _best("big", "penstock", 2.0, "process"),
    _ratio("big", "penstock-tinyloader", "tinyloader", 5.0),
    _best("big", "penstock-into", 1.0, "thread"),
    _ratio("big", "penstock-into", "loop", 1.0),
    _ratio("big", "penstock-into", "read", 0.7),
    _ratio("images", "penstock", "torch", 1.3),
    _best("images", "penstock", 1.1, but=_TORCH),
    _ratio("images", "penstock", "share", 0.95),
    _ratio("images", "penstock-auto", "share", 0.93),
    _best("images", "penstock-auto", 1.0),
    _ratio("images", "penstock-cache", "preloaded", 0.8),
    Claim("images", "penstock-half", 1.1, "later"),
    _ratio("images", "penstock-half", "penstock", 1.1),
    _ratio("rows", "penstock", "torch", 15.0),
    _ratio("rows", "penstock", "torch-0", 15.0),
    _ratio("rows", "penstock", "torch-getitems", 1.5),
    _best("rows", "penstock", 1.0),
    _ratio("rows", "penstock", "gather", 0.8),
    _best("cifar", "penstock", 1.0),
    _ratio("python", "penstock", "loop", 1.5),
    _best("python", "penstock", 2.0, "process"),
    _ratio("lines", "penstock", "torch", 2.0),
    _best("lines", "penstock", 1.3, "process", but=_TORCH),
    _ratio("lines", "penstock", "loop", 1.7),
    _ratio("lines", "penstock", "loops", 0.9),
    _best("latency", "penstock", 1.0, but=_MANY_AT_A_TIME),
    _ratio("latency", "penstock", "waits", 0.95),
    _ratio("slow", "penstock", "torch", 1.3),
    _ratio("slow", "penstock", "share", 0.9),
    _ratio("shards", "penstock-blocks", "disk", 0.85),
    Claim("shards", "penstock-blocks", 1.8, others=_AT_RANDOM, group="the best of torch and threads"),
    Claim("shards", "penstock", 1.0, others=_AT_RANDOM, group="the best of torch and threads"),
    *(claim for workload in WORKLOADS for claim in _auto(workload)),
    *(Claim(workload, "penstock", 0.5, "peak", _TORCH) for workload in WORKLOADS),
    *(Claim(workload, "penstock", 0.5, "added", _TORCH) for workload in WORKLOADS),
    *(Claim(workload, "penstock", 1.0, "budget") for workload in WORKLOADS),
    Claim("images", "penstock-half", 1.0, "budget"),
    *(Claim(workload, "penstock", 0.3, "first", ("loop",)) for workload in _QUICK_TO_START),
    *(Claim(workload, "penstock", 1.0, "gap") for workload in WORKLOADS),
)  # fmt: skip


def _rounds(measure: Measure, summary: Summary) -> int:
    """The rounds that this figure of a contender comes from."""
    if measure == "budget":
        return summary.peak_rounds
    return min(summary.rounds, summary.peak_rounds) if measure in ("peak", "added") else summary.rounds


def _doubt(measure: Measure, *summaries: Summary) -> str:
    """What makes a ratio of these medians weak evidence; empty when nothing does."""
    if min(_rounds(measure, summary) for summary in summaries) < _ROUNDS:
        return f"fewer than {_ROUNDS} rounds"
    if measure not in ("rate", "later"):
        return ""
    for summary in summaries:
        if summary.samples_per_s and summary.low is not None and summary.high is not None:
            off = max(1 - summary.low / summary.samples_per_s, summary.high / summary.samples_per_s - 1)
            if off > _NOISY:
                return f"but {summary.contender} varied by {off:.0%}"
    return ""


def _measured(claim: Claim, ours: Summary, other: Summary | None) -> float | None:
    def over(one: float | None, two: float | None) -> float | None:
        return one / two if one is not None and two else None

    if claim.measure == "rate" and other is not None:
        return over(ours.samples_per_s, other.samples_per_s)
    if claim.measure == "peak" and other is not None:
        return over(ours.peak_bytes, other.peak_bytes)
    if claim.measure == "added" and other is not None:
        return over(ours.added_bytes, other.added_bytes)
    if claim.measure == "budget":
        return over(ours.added_bytes, ours.budget_bytes)
    if claim.measure == "first" and other is not None:
        times = (ours.first_batch_s, other.first_batch_s)
        return None if times[0] is None or times[1] is None else times[0] - times[1]
    if claim.measure == "gap":
        return over(ours.gap_s, ours.batch_s)
    if claim.measure == "later":
        return over(ours.samples_per_s, ours.first_epoch_samples_per_s)
    return None


def _absent(names: Sequence[str]) -> str:
    """Who might have been better and was not asked."""
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return f"not run: {', '.join(names[:_NAMES])}{more}" if names else ""


def _judge(claim: Claim, found: dict[tuple[str, str], Summary]) -> Verdict | None:
    ours = found.get((claim.workload, claim.contender))
    others = [other for name in claim.others if (other := found.get((claim.workload, name))) is not None]
    if ours is None or (claim.others and not others):
        return None  # not part of this run
    right = [other for other in others if other.status == "ok" and other.samples_per_s]
    ran = [other for other in others if other.status != "skipped"]
    # Without any to compare with, those that were skipped are the reason for that.
    bad = [summary for summary in (ours, *(ran if right else others)) if summary.status != "ok"]
    notes = [f"{summary.contender} {_BAD.get(summary.status, summary.status)}" for summary in bad]
    if ours.status != "ok" or (claim.others and not right):
        return Verdict(claim, None, None, ", ".join(notes))
    best = max(right, key=lambda other: other.samples_per_s or 0.0) if right else None
    got = _measured(claim, ours, best)
    if got is None:
        return Verdict(claim, None, None, "this system does not tell")
    holds: bool | None = got >= claim.wanted if claim.is_least else got <= claim.wanted
    if best is not None and len(claim.others) > 1:
        notes.insert(0, f"that is {best.contender}")
    if (
        claim.measure in ("peak", "added")
        and best is not None
        and (ours.samples_per_s or 0) < (best.samples_per_s or 0)
    ):
        holds = False
        notes.append("but slower")
    notes.append(_doubt(claim.measure, ours, *([best] if best is not None else [])))
    known = {other.contender for other in ran}
    missing = [name for name in claim.others if name not in known]
    if missing and holds:
        holds = None  # one of those might be the best
    absent = _absent(missing)
    return Verdict(claim, got, holds, "; ".join(filter(None, (", ".join(filter(None, notes)), absent))))


def judge(summaries: Sequence[Summary]) -> list[Verdict]:
    """Each claim about what was run, with what was found."""
    found = {(summary.workload, summary.contender): summary for summary in summaries}
    return [verdict for claim in CLAIMS if (verdict := _judge(claim, found)) is not None]
