"""A contender of the benchmark that does something wrong, for tests of what the checks notice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock._bench.contenders import CONTENDERS
from penstock._bench.drive import Timing, drive
from penstock._bench.running import Running
from penstock._bench.workloads import Job


class Changed:
    """A plain loop whose epochs are changed on the way."""

    def __init__(self, job: Job, change: Any) -> None:
        self._loop, self._change = CONTENDERS["loop"].open(job), change

    def epochs(self) -> Iterator[Any]:
        for epoch in self._loop.epochs():
            yield self._change(list(epoch))

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._loop.close()


def timing_of(job: Job, change: Any) -> Timing:
    """What the benchmark says of such a loop; ``change`` is given the batches of an epoch."""

    def opened(job: Job) -> Running:
        return Changed(job, change)

    return drive(job, opened, mark=lambda _: None)[0]
