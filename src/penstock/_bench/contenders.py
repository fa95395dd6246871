"""Who reads a workload: Penstock in its ways, and its peers. Runs in the trial process."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from penstock._bench import watch
from penstock._bench.peers import PEERS, through_penstock
from penstock._bench.running import Contender, Running
from penstock._bench.workloads import Job

__all__ = ["CONTENDERS"]

# What slots and workers take beside a cache, about.
_BESIDES_BYTES: Final = 112 * 2**20


class _Penstock:
    def __init__(self, job: Job, feed: Any) -> None:
        self._job, self._feed = job, feed
        self._cpu_s = watch.cpu_s(os.getpid()) or 0.0

    def epochs(self) -> Iterator[Iterable[Any]]:
        # One more than is asked for: the feed may not know that the pass it reads ahead for is the last.
        epochs = iter(self._feed.epochs(self._job.most_epochs + 3))
        finish = self._job.finish
        return epochs if finish is None else (map(finish, epoch) for epoch in epochs)

    def facts(self) -> dict[str, Any]:
        plan, stats = self._feed.plan, self._feed.stats
        return {
            "budget_bytes": plan.memory, "planned_bytes": plan.total_bytes, "slots": plan.slots,
            "workers": plan.workers, "held_samples": plan.held_samples, "notes": list(plan.notes),
            "peak_bytes": stats.peak_bytes, "copied": stats.copied, "wait_s": stats.wait_s,
            "restarts": stats.restarts, "measure_s": stats.measure_s,
            "cpu_s": (watch.cpu_s(os.getpid()) or 0.0) - self._cpu_s,
        }  # fmt: skip

    def close(self) -> None:
        self._feed.close()


_CREWS: Final[dict[str, dict[str, Any]]] = {
    "0": {"num_workers": 0},
    "thread": {"executor": "thread"},
    "process": {"executor": "process"},
    "auto": {"num_workers": None},
}


def _open_penstock(
    job: Job, *, crew: str | None = None, into: bool = False, many: bool = False, **more: Any
) -> Running:
    """``crew`` None: as one would write it, two processes, but for arrays that are in memory what the plan says.
    ``many``: what is to be done with rows of arrays is done by a load, many at once, not by the consumer."""
    # By name: which of these exist is the feed's affair, and a missing one is this contender's failure alone.
    penstock: Any = importlib.import_module("penstock")
    load: Any = None
    if job.arrays is not None:
        items = penstock.arrays(*job.arrays)
        if many:
            load = penstock.batched(penstock.into(job.spec)(job.load_into))
            job = dataclasses.replace(job, finish=None)
    elif job.source is not None:
        items = job.source()
    else:
        items = penstock.lines(job.text) if job.text is not None else job.items
        load = penstock.into(job.spec)(job.load_into) if into else job.load
    if crew is None:
        crew = "auto" if job.arrays is not None else "process"
    options: dict[str, Any] = {
        "batch_size": job.batch_size,
        "memory": job.budget_bytes,
        "num_workers": job.workers,
        "shuffle": job.shuffle,
        "seed": job.seed,
        "collate_fn": "pad" if job.pad else None,
        **_CREWS[crew],
        **more,
    }
    return _Penstock(job, penstock.Feed(items, load, **options))


def _open_penstock_blocks(job: Job) -> Running:
    return _open_penstock(job, shuffle=importlib.import_module("penstock").Blocks())


def _open_penstock_half(job: Job) -> Running:
    """A budget that holds half of the samples, besides what slots and workers take."""
    return _open_penstock(job, cache="ram", memory=job.samples * job.sample_bytes // 2 + _BESIDES_BYTES)


def _open_penstock_unheld(job: Job) -> Running:
    """Without what holds the budget, in this process and for good: no limit in workers, no look at their memory."""
    engine: Any = importlib.import_module("penstock._core.engine")
    crew: Any = importlib.import_module("penstock._core.crew")
    if crew.portable_only():
        kind: Any = importlib.import_module("penstock._core.crew.portable").PortableCrew
    else:
        kind = importlib.import_module("penstock._core.crew.processes").ProcessCrew
    start = kind.start
    engine.MEASURE_S = float("inf")
    kind.start = lambda self, setup: start(self, dataclasses.replace(setup, growth_bytes=0))
    return _open_penstock(job)


def _ours(name: str, title: str, open_: Callable[[Job], Running] | None = None, **how: Any) -> Contender:
    # The feed is imported when it is first used; who imports torch has imported its loader, too.
    needs = ("penstock._core.feed",)
    return Contender(name, title, open_ or functools.partial(_open_penstock, **how), "process", needs, ours=True)


CONTENDERS: Final = {
    contender.name: contender
    for contender in (
        _ours("penstock", "Penstock, worker processes (arrays: as planned)"),
        _ours("penstock-auto", "Penstock, num_workers=None", crew="auto"),
        _ours("penstock-0", "Penstock, num_workers=0", crew="0"),
        _ours("penstock-thread", "Penstock, threads", crew="thread"),
        _ours("penstock-process", "Penstock, workers, who gather rows in memory as threads", crew="process"),
        _ours("penstock-into", "Penstock, load writes into the slot", into=True),
        _ours("penstock-into-auto", "Penstock, num_workers=None, into the slot", into=True, crew="auto"),
        _ours("penstock-into-0", "Penstock, num_workers=0, into the slot", into=True, crew="0"),
        _ours("penstock-into-thread", "Penstock, threads that write into the slot", into=True, crew="thread"),
        _ours("penstock-many", "Penstock, a load of many rows at once", many=True),
        _ours("penstock-many-0", "Penstock, num_workers=0, many rows", many=True, crew="0"),
        _ours("penstock-many-thread", "Penstock, threads that load many rows", many=True, crew="thread"),
        _ours("penstock-blocks", "Penstock, shuffled in blocks", _open_penstock_blocks),
        _ours("penstock-cache", "Penstock, samples kept in memory", cache="ram"),
        _ours("penstock-half", "Penstock, memory for half of them", _open_penstock_half),
        _ours("penstock-unheld", "Penstock, its budget not enforced", _open_penstock_unheld),
        _ours("penstock-tinyloader", "tinyloader's interface on Penstock", through_penstock),
        *PEERS,
    )
}
