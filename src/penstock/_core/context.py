"""What user code may ask while it runs inside a load: its randomness, and which worker it is in.

Runs wherever load runs. One context per thread, set by ``fill`` before each item; nothing here is shared.
"""

from __future__ import annotations

import dataclasses
import threading

import numpy as np

from penstock._core.errors import PenstockError
from penstock._core.order import rng_for

__all__ = ["WorkerInfo", "asked", "enter", "leave", "restore", "rng", "save", "set_worker", "worker"]


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Which worker runs this code: ``id`` counts from 0, ``count`` is how many there are."""

    id: int
    count: int


class _Context(threading.local):
    key: tuple[int, int, int] | None = None
    generator: np.random.Generator | None = None
    worker: WorkerInfo = WorkerInfo(0, 1)
    asked: bool = False


_here = _Context()


def rng() -> np.random.Generator:
    """The random generator of the sample that is being loaded.

    It depends on the feed's seed, the epoch and the item's place among all items, and on nothing else: not on the
    number of workers, not on what was loaded before. Asked twice for one item, it goes on where it was.
    """
    if _here.generator is None:
        if _here.key is None:
            raise PenstockError(
                "penstock.rng() belongs inside load or collate_fn: outside there is no sample to depend on"
            )
        _here.generator = rng_for(*_here.key)
    return _here.generator


def worker() -> WorkerInfo:
    """Which worker this code runs in; the consumer's own process counts as worker 0 of 1."""
    _here.asked = True
    return _here.worker


def enter(seed: int, epoch: int, index: int) -> None:
    """A sample begins."""
    _here.key = (seed, epoch, index)
    _here.generator = None
    _here.asked = False


def asked() -> bool:
    """Whether the sample that began last asked which worker this is."""
    return _here.asked


def leave() -> None:
    """No sample is being loaded."""
    _here.key = _here.generator = None


def save() -> tuple[tuple[int, int, int] | None, np.random.Generator | None]:
    """What a task that is put aside must find again when it goes on."""
    return _here.key, _here.generator


def restore(moment: tuple[tuple[int, int, int] | None, np.random.Generator | None]) -> None:
    """The task goes on."""
    _here.key, _here.generator = moment


def set_worker(info: WorkerInfo) -> None:
    """This thread (or the process that has only this one) is a worker."""
    _here.worker = info
