"""What a contender is, and the whole batches that most of them load at a time.

``Contender.open`` gets a ``Job`` in the trial process and gives something with ``epochs()``: an endless iterator of
passes, each an iterable of batches. The time from calling ``open`` to the first batch is the contender's; imports of
its framework are not: they are named in ``needs`` and paid before. A contender keeps what it can between epochs (its
workers, where it has a switch for that), because a training run would.

Runs in the trial process and in the workers of peers; what they may have to unpickle is a top-level name.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, Protocol

import numpy as np

from penstock._bench.workloads import Job, TextLines

__all__ = ["Batches", "Contender", "Running", "stacked"]


class Running(Protocol):
    """A contender at work on a job."""

    def epochs(self) -> Iterator[Iterable[Any]]: ...
    def facts(self) -> dict[str, Any]:
        """What the contender says about itself, for the record."""

    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Contender:
    """A way to get batches."""

    name: str
    title: str
    open: Callable[[Job], Running]
    by: Literal["process", "thread", "itself"]
    """Who loads: worker processes, threads, or the consumer itself."""
    needs: tuple[str, ...] = ()
    """Modules that must be there; without them the contender is skipped by name."""
    ours: bool = False
    """Ratios are given of these to the others."""


def stacked(samples: list[Any]) -> Any:
    """Samples as one batch, as somebody with NumPy would do it."""
    if isinstance(samples[0], tuple):
        return tuple(stacked(list(column)) for column in zip(*samples, strict=True))
    if len(samples) == 1 and isinstance(samples[0], np.ndarray):
        return samples[0][None]  # nobody writes a loop that copies 24 MiB to add an axis
    return np.stack(samples)


class Batches:
    """Loads a whole batch: what a loop, a thread or a pool of processes does at a time."""

    def __init__(self, job: Job) -> None:
        self._load, self._size, self._items = job.load, job.batch_size, job.items
        self._columns, self._finish = job.arrays, job.finish
        self._rng = np.random.default_rng(job.seed)

    def __call__(self, items: Any) -> Any:
        if self._columns is None:
            return stacked([self._load(item) for item in items])
        batch = tuple(column[items] for column in self._columns)
        return batch if self._finish is None else self._finish(batch)

    def chunks(self) -> Iterator[Any]:
        """The items of each batch of one epoch: of columns, rows in a new order."""
        if isinstance(self._items, TextLines):
            return self._of_text(iter(self._items))
        items = self._items if self._columns is None else self._rng.permutation(len(self._items))
        return (items[start : start + self._size] for start in range(0, len(items), self._size))

    def _of_text(self, lines: Iterator[str]) -> Iterator[Any]:
        while chunk := list(itertools.islice(lines, self._size)):
            yield chunk
