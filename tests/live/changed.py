"""Small sizes, and a contender of the benchmark that does something wrong, for tests of what the checks notice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock._bench.contenders import CONTENDERS
from penstock._bench.drive import Timing, drive
from penstock._bench.running import Running
from penstock._bench.workloads import Job, Sizes

TINY = Sizes(
    big_files=3,
    big_bytes=64 * 1024,
    big_samples=8,
    rows=700,
    cifar_rows=300,
    cifar_batch=32,
    latency_items=40,
    latency_ms=0.05,
    slow_items=64,
    slow_ms=0.05,
    python_rows=600,
    lines=600,
    shards=3,
    shards_rows=40,
    shards_batch=8,
    images=70,
    images_high=40,
    images_wide=50,
    images_size=24,
    memory_medium=70,
    memory_temporaries=8,
    memory_leaks=30,
    memory_paths=6000,
    memory_ragged=40,
    least_s=0.02,
)


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
