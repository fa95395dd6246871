"""Takes one contender through its epochs and times it. Runs in the trial process.

The epochs, all from one ``epochs()`` of the contender:

    first     time to the first batch; everything warms up
    timed     as many whole epochs as last ``least_s``; from the end of the epoch before to the end of the last, so
              that each has its gap
    verified  every byte is looked at

The timed region follows an epoch that was consumed at the same speed, so that nobody enters it with batches that were
read ahead while the consumer was busy with something else. For the same reason worker processes are stopped while the
system is made to forget the files.

Whatever is wrong with batches is told at the end and ends no trial: a loader whose epoch is broken off in the middle is
another test. What a contender itself raises is its failure, and goes through.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from penstock._bench import watch
from penstock._bench.running import Running
from penstock._bench.workloads import Job, WrongContent

__all__ = ["Timing", "drive"]

# What a check meets in a batch of another form than it was made for. Its own mistakes would look the same, so that what
# was raised is part of what is told.
_ODD: Final = (WrongContent, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_STOP_WITHIN_S: Final = 1.0  # whoever waits for a disk stops when it has answered, and some disks take their time


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
    """Mean time of a full batch in the timed region."""
    first_epoch_samples_per_s: float | None
    """Of the first epoch, from its first batch on; None when that was all of it."""
    wait_p50_s: float
    wait_p99_s: float
    wrong: str
    """What was found first; empty when every sample came once, with the right bytes, in batches of the right size."""


class _Looks:
    """Shows each batch to the check, and sees to it that an epoch is full batches and one with the rest."""

    def __init__(self, job: Job) -> None:
        self.wrong = ""
        """What was found first."""
        self._check, self._samples, self._size = job.check, job.samples, job.batch_size
        self.came = 0
        """Samples of this epoch so far."""

    def touch(self, batch: Any) -> None:
        self._look(self._check.touch, batch)

    def verify(self, batch: Any) -> None:
        self._look(self._check.verify, batch)

    def _look(self, see: Callable[[Any], None], batch: Any) -> None:
        try:
            size = len(batch[0] if isinstance(batch, (tuple, list)) else batch)
            due = min(self._size, self._samples - self.came)
            if size != due:
                self._tell(f"a batch of {size} samples came after {self.came} of {self._samples}; {due} were due")
            self.came += size
            see(batch)
        except _ODD as found:
            self._tell(f"the check can make nothing of a batch: {type(found).__name__}: {found}")

    def ended(self) -> None:
        """An epoch is over."""
        if self.came < self._samples:
            self._tell(f"an epoch came with {self.came or 'none'} of its {self._samples} samples")
        self.came = 0

    def finish(self) -> str:
        """All epochs are: what was wrong, if anything."""
        try:
            self._check.finish()
        except _ODD as found:
            self._tell(str(found) if isinstance(found, WrongContent) else f"{type(found).__name__}: {found}")
        return self.wrong

    def _tell(self, wrong: str) -> None:
        self.wrong = self.wrong or wrong


def _is_still(pid: int) -> bool:
    """Whether no thread of a process runs, or waits for a disk."""
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/stat") as file:
                # A name may hold blanks and brackets, the state behind it may not.
                if file.read().rpartition(")")[2].split()[0] not in "TtZX":
                    return False
    except OSError:
        pass  # it ended
    return True


@contextlib.contextmanager
def _children_stopped() -> Iterator[None]:
    """Nobody that came from this process runs meanwhile. Elsewhere than on Linux nothing is stopped.

    Its own threads cannot be stopped, so that loaders with threads read ahead all the same, uncounted: a slot or a
    queue full at most, which their buffers bound. A stopped process holds nothing that is needed here: no lock of ours
    is taken, and the kernel stops nobody who holds one of its own.
    """
    own = os.getpid()
    stopped: set[int] = set()
    give_up = time.monotonic() + _STOP_WITHIN_S
    try:
        while True:
            # Again after each round: who was not stopped yet, and threads of this process, may have started others.
            new = set(watch.tree(own)) - stopped - {own}
            stopped |= new
            for pid in new:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            if (not new and all(map(_is_still, stopped))) or time.monotonic() > give_up:
                break
            time.sleep(1e-4)
        yield
    finally:
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _chill(job: Job) -> float:
    """Have the files forgotten, if the job wants that; gives the seconds that count for nobody."""
    if job.chill is None:
        return 0.0
    began = time.perf_counter()
    with _children_stopped():
        job.chill()
    return time.perf_counter() - began


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
                waits.append(tail_s)  # that there is not even one is told elsewhere; it was waited for
            return tail_s
        waits.append(clock() - asked)
        see(batch)
        asked = clock()


def drive(job: Job, open_: Callable[[Job], Running], *, mark: Callable[[str], None]) -> tuple[Timing, dict[str, Any]]:
    """Time a contender on a job; ``mark`` is told half of the first epoch, where the timed region begins and
    ends, and when all is done."""
    clock = time.perf_counter
    opened = clock()
    running = open_(job)
    opening_s = clock() - opened
    try:
        epochs = running.epochs()
        waits: list[float] = []
        looks = _Looks(job)
        _chill(job)
        calm = False

        def touch_at_first(batch: Any) -> None:
            nonlocal calm
            looks.touch(batch)
            if not calm and 2 * looks.came >= job.samples:  # whoever watches stops now, not when it is being timed
                calm = True
                mark("calm")

        entered = clock()
        tail_s = _epoch(epochs, touch_at_first, waits)
        first_batch_s = opening_s + waits[0]
        rest_s = clock() - entered - waits[0]
        looks.ended()

        gaps: list[float] = []
        waits.clear()
        mark("timed")
        began = clock()
        while len(gaps) < job.most_epochs:
            first_of_epoch = len(waits)
            began += _chill(job)
            last_tail_s, tail_s = tail_s, _epoch(epochs, looks.touch, waits)
            looks.ended()
            gaps.append(last_tail_s + waits[first_of_epoch])
            if clock() - began >= job.least_s:
                break
        seconds = clock() - began
        mark("timed-end")

        _epoch(epochs, looks.verify, [])
        looks.ended()
        mark("verified")
        wrong = looks.finish()
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
        batch_s=seconds * min(job.batch_size, job.samples) / (job.samples * len(gaps)),
        first_epoch_samples_per_s=(job.samples - job.batch_size) / rest_s if job.samples > job.batch_size else None,
        wait_p50_s=waits[len(waits) // 2],
        wait_p99_s=waits[int(len(waits) * 0.99)],
        wrong=wrong,
    )
    return timing, facts
