"""Takes one contender through its epochs and times it. Runs in the trial process.

The epochs, all from one ``epochs()`` of the contender:

    first     time to the first batch; everything warms up
    timed     as many whole epochs as last ``least_s``; from the end of the epoch before to the end of the last, so
              that each has its gap
    verified  every byte is looked at

The timed region follows an epoch that was consumed at the same speed, so that nobody enters it with batches that were
read ahead while the consumer was busy with something else.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from penstock._bench.running import Running
from penstock._bench.workloads import Job, WrongContent

__all__ = ["Timing", "drive"]


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """What one contender did in one trial."""

    samples: int
    epochs: int
    seconds: float
    first_batch_s: float
    gap_s: float
    """Median time from the last batch of an epoch to the first of the next, consumer's work not counted."""
    batch_s: float
    """Mean time of a batch in the timed region."""
    first_epoch_samples_per_s: float
    """Of the first epoch, from its first batch on."""
    wait_p50_s: float
    wait_p99_s: float
    wrong: str
    """What the check found; empty when every sample came once and with the right bytes."""


def _epoch(epochs: Iterator[Iterable[Any]], see: Callable[[Any], None], waits: list[float]) -> float:
    """Consume one epoch; gives the time from asking for one more batch to hearing that there is none."""
    clock = time.perf_counter
    before = len(waits)
    asked = clock()
    batches = iter(next(epochs))
    while True:
        try:
            # As in a for loop, the batch before is let go when this one is there.
            batch = next(batches)
        except StopIteration:
            tail_s = clock() - asked
            if len(waits) == before:
                raise WrongContent("an epoch came without a single batch") from None
            return tail_s
        waits.append(clock() - asked)
        see(batch)
        asked = clock()


def drive(job: Job, open_: Callable[[Job], Running], *, mark: Callable[[str], None]) -> tuple[Timing, dict[str, Any]]:
    """Time a contender on a job; ``mark`` is told where the timed region begins and ends, and when all is done."""
    clock = time.perf_counter
    opened = clock()
    running = open_(job)
    opening_s = clock() - opened
    try:
        epochs = running.epochs()
        waits: list[float] = []
        if job.chill is not None:
            job.chill()
        entered = clock()
        tail_s = _epoch(epochs, job.check.touch, waits)
        first_batch_s = opening_s + waits[0]
        rest_s = clock() - entered - waits[0]

        gaps: list[float] = []
        waits.clear()
        mark("timed")
        began = clock()
        while len(gaps) < job.most_epochs:
            first_of_epoch = len(waits)
            if job.chill is not None:
                began += job.chill()
            last_tail_s, tail_s = tail_s, _epoch(epochs, job.check.touch, waits)
            gaps.append(last_tail_s + waits[first_of_epoch])
            if clock() - began >= job.least_s:
                break
        seconds = clock() - began
        mark("timed-end")

        wrong = ""
        _epoch(epochs, job.check.verify, [])
        mark("verified")
        try:
            job.check.finish()
        except WrongContent as found:
            wrong = str(found)
        facts = running.facts()
    finally:
        running.close()
    waits.sort()
    timing = Timing(
        samples=job.samples * len(gaps),
        epochs=len(gaps),
        seconds=seconds,
        first_batch_s=first_batch_s,
        gap_s=statistics.median(gaps),
        batch_s=seconds / len(waits),
        first_epoch_samples_per_s=(job.samples - job.batch_size) / rest_s,
        wait_p50_s=waits[len(waits) // 2],
        wait_p99_s=waits[int(len(waits) * 0.99)],
        wrong=wrong,
    )
    return timing, facts
