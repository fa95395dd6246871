"""Who does the tasks: one interface, several crews.

    inline.py      this process, when it is asked for a batch
    threads.py     threads of this process
    processes.py   worker processes on Linux
    portable.py    worker processes where memfd, pidfd or seqpacket sockets are missing

A crew gets tasks and gives replies, in any order; every task that was submitted and not withdrawn is replied to
exactly once, whatever happens to those who worked on it. It knows nothing of batches, orders or leases. A
distributed engine would be one more crew.
"""

from __future__ import annotations

import dataclasses
import os
import select
import sys
from typing import Final, Protocol

from penstock._core import machine
from penstock._core.arena import AnyArena
from penstock._core.crew.refusals import refused
from penstock._core.fill import Failed
from penstock._core.program import Probe, Program, Setup
from penstock._core.task import Busy, Failure, Grant, Reply, Task

__all__ = ["Crew", "probe_of", "process_crew"]

DESCRIPTORS: Final = 12  # the most that a crew of one worker needs at once, while it is being started
_STDERR: Final = 2


class Crew(Protocol):
    """Workers of one kind, and the memory they write to."""

    restarts: int
    """Workers that were replaced."""
    retired_bytes: int
    """Size of a worker that was replaced because it had grown, until somebody has looked."""

    @property
    def measure_s(self) -> float:
        """Seconds that workers took to look at their own memory."""

    @property
    def arena(self) -> AnyArena:
        """Where the slots are."""

    def probe(self, task: Task) -> Probe | None:
        """Load a few items to learn what a sample looks like and costs; None if none of them gives any.

        Raises ``Failed`` when one cannot be loaded.
        """

    def start(self, setup: Setup) -> None:
        """Get ready for tasks: the form of a sample, the rows of a slot and the number of workers are known."""

    def submit(self, task: Task) -> None:
        """Have a task done."""

    def withdraw(self) -> list[int]:
        """Take back the tasks that nobody has begun; they are never replied to."""

    def grant(self, request: Reply, grant: Grant) -> None:
        """Give the task that asked for MORE room to go on; once for each such reply."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until there may be something to take, or the time is over. Changes nothing, so it needs no lock."""

    def take(self) -> list[Reply]:
        """The replies that are there now."""

    def pids(self) -> list[int]:
        """Processes of this crew, for measuring."""

    def busy(self) -> list[Busy]:
        """What each worker is at, for telling who is slow."""

    def stack(self, worker: int) -> str:
        """Where in its code a worker is, innermost call last; "" where that cannot be known."""

    def close(self) -> None:
        """End all that the crew started. Twice is harmless."""


def process_crew(program: Program, start_method: str | None) -> Crew:
    """Worker processes, of the kind that this system can have; PENSTOCK_PORTABLE=1 asks for the portable kind."""
    make_room()
    # Either is imported only here: each needs things that the other's systems do not have.
    if portable_only():
        from penstock._core.crew.portable import PortableCrew

        return PortableCrew(program, start_method=start_method)
    from penstock._core.crew.processes import ProcessCrew

    try:
        return ProcessCrew(program, start_method=start_method)
    except OSError as error:
        raise refused(error) from error


def make_room() -> None:
    """Raise now if there are too few descriptors: later it would be in the middle of something.

    And have something at 0, 1 and 2, for good, in a program that closed them. Else what a crew opens would come to lie
    there, and whatever is printed anywhere would be written into it.
    """
    found: list[int] = []
    full = None
    try:
        while len(found) < DESCRIPTORS:
            fd = os.open(os.devnull, os.O_RDWR)
            if fd > _STDERR:
                found.append(fd)
            else:
                os.set_inheritable(fd, True)
    except OSError as error:
        full = error
    for fd in found:
        os.close(fd)
    if full is not None:
        raise refused(full)


def portable_only() -> bool:
    """Whether worker processes must do with what every system has."""
    if os.environ.get("PENSTOCK_PORTABLE", "0") not in ("", "0"):
        return True
    if sys.platform != "linux" or not hasattr(select, "poll"):
        return True
    features = machine.look().features
    return not (features.memfd and features.pidfd and features.seqpacket)


def probe_of(crew: Crew) -> Probe | None:
    """Wait for the answer to a probe, the only thing that a crew was asked."""
    while True:
        crew.wait()
        for reply in crew.take():
            if isinstance(reply.body, Failure):
                raise Failed(reply.body)
            probe: Probe | None = reply.body
            if probe is None and reply.failures:
                raise Failed(dataclasses.replace(reply.failures[-1], left_out=True))
            return probe
