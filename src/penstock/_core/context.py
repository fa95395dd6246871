"""What user code may ask while it runs inside a load: its randomness, and which worker it is in.

Runs wherever load runs. One context per thread, set by ``fill`` before each item; nothing here is shared.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Final

import numpy as np

from penstock._core.errors import PenstockError
from penstock._core.order import rng_for

__all__ = [
    "Moment",
    "OneByOne",
    "WorkerInfo",
    "asked",
    "drew",
    "enter",
    "enter_many",
    "leave",
    "restore",
    "rng",
    "save",
    "set_worker",
    "worker",
]


MANY: Final = -(1 << 62)  # the index of no sample


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Which worker runs this code: ``id`` counts from 0, ``count`` is how many there are."""

    id: int
    count: int


class OneByOne(PenstockError):
    """Several items are being loaded at once, and randomness was asked for, which belongs to one of them."""


class Moment:
    """Which sample a thread is at. Between two samples of a task only ``index`` has to change."""

    __slots__ = ("_made_for", "asked", "epoch", "generator", "index", "seed")

    def __init__(self) -> None:
        self.seed = 0
        self.epoch = 0
        self.index: int | None = None
        self.generator: np.random.Generator | None = None
        self._made_for: int | None = None
        self.asked = False

    def rng(self) -> np.random.Generator | None:
        """The generator of this sample; None outside of any."""
        if self.index is None:
            return None
        if self.index == MANY:
            raise OneByOne("penstock.rng() belongs to one sample, and several are being loaded at once")
        if self.generator is None or self._made_for != self.index:
            self.generator = rng_for(self.seed, self.epoch, self.index)
            self._made_for = self.index
        return self.generator

    def drew(self) -> bool:
        """Whether this sample has asked for its generator."""
        return self.generator is not None and self._made_for == self.index


class _Context(threading.local):
    worker: WorkerInfo = WorkerInfo(0, 1)

    def __init__(self) -> None:
        self.moment = Moment()


_here = _Context()


def rng() -> np.random.Generator:
    """The random generator of the sample that is being loaded.

    It depends on the feed's seed, the epoch and the item's place among all items, and on nothing else: not on the
    number of workers, not on what was loaded before. Asked twice for one item, it goes on where it was.
    """
    generator = _here.moment.rng()
    if generator is None:
        raise PenstockError("penstock.rng() belongs inside load or collate_fn: outside there is no sample to depend on")
    return generator


def worker() -> WorkerInfo:
    """Which worker this code runs in; the consumer's own process counts as worker 0 of 1."""
    _here.moment.asked = True
    return _here.worker


def enter(seed: int, epoch: int, index: int) -> Moment:
    """A sample begins; for the next one of the same epoch it is enough to set the moment's ``index``."""
    moment = _here.moment
    moment.seed, moment.epoch, moment.index = seed, epoch, index
    moment.generator = None
    moment.asked = False
    return moment


def enter_many(seed: int, epoch: int) -> None:
    """Several samples begin at once: none of them may ask for randomness."""
    enter(seed, epoch, MANY)


def asked() -> bool:
    """Whether the sample that began last asked which worker this is."""
    return _here.moment.asked


def drew() -> bool:
    """Whether the sample that began last asked for its randomness."""
    return _here.moment.drew()


def leave() -> None:
    """No sample is being loaded."""
    _here.moment.index = _here.moment.generator = None


def save() -> Moment:
    """What a task that is put aside must find again when it goes on; until then others have a moment of their own."""
    moment = _here.moment
    _here.moment = Moment()
    return moment


def restore(moment: Moment) -> None:
    """The task goes on."""
    _here.moment = moment


def set_worker(info: WorkerInfo) -> None:
    """This thread (or the process that has only this one) is a worker."""
    _here.worker = info
