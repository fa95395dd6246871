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

from typing import Protocol

from penstock._core.arena import Arena
from penstock._core.program import Probe, Setup
from penstock._core.task import Grant, Reply, Task

__all__ = ["Crew"]


class Crew(Protocol):
    """Workers of one kind, and the memory they write to."""

    arena: Arena
    restarts: int
    """Workers that were replaced."""

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

    def close(self) -> None:
        """End all that the crew started. Twice is harmless."""
