"""What `penstock bench memory` reads: work whose memory goes wrong elsewhere, each case with a budget of its own.

Every sample is filled with its number, so that one check proves all of them. ``leak`` runs for a fixed number of calls
and no longer: a loader that does nothing about it keeps a megabyte of each. The last cases are not about memory but
about what holding a budget costs: the contenders are Penstock as it is, and Penstock that is held to nothing.

The loads run in workers, the rest in the trial process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from penstock._bench.workloads import WORKLOADS, Job, Sizes, Workload, WrongContent, in_order

__all__ = ["CASES", "COSTS", "workload_of"]

Array = npt.NDArray[Any]

_MIB: Final = 2**20
_EPOCHS: Final = 20  # timed ones at most; the check remembers eight bytes of each sample of each
_RUNS_PER_LEAK: Final = 3  # the first epoch, the timed one, the verified one
_STEP: Final = 16  # one path in so many is read in an epoch: some of each page of strings, in a sixteenth of the time

_leaked: list[Array] = []


class _FilledCheck:
    """For samples that are filled with their number; padded ones come as (data, lengths)."""

    def __init__(
        self, numbers: Array, *, epochs: int, shuffled: bool = False, length_of: Callable[[Array], Array] | None = None
    ) -> None:
        self._numbers, self._shuffled, self._length_of = numbers, shuffled, length_of
        # Filled, not empty: the first touch of these pages belongs to no contender.
        self._seen = np.full(len(numbers) * epochs, -1.0)
        self._count = 0
        self._wrong: list[str] = []

    def touch(self, batch: Any) -> None:
        self._record(np.asarray(batch[0] if self._length_of else batch))

    def verify(self, batch: Any) -> None:
        data = np.asarray(batch[0] if self._length_of else batch)
        self._record(data)
        numbers = data[:, 0].copy()
        lengths = np.full(len(data), data.shape[1])
        if self._length_of:
            lengths = np.asarray(batch[1])
            if not np.array_equal(lengths, self._length_of(numbers)):
                self._wrong.append(f"a padded batch came with the lengths {lengths.tolist()}")
        for row, number, length in zip(data, numbers, lengths.tolist(), strict=True):
            if (row[:length] != number).any() or row[length:].any():
                self._wrong.append(f"sample {number:.0f} came with bytes that are not its own")

    def _record(self, data: Array) -> None:
        here = slice(self._count, self._count + len(data))
        self._seen[here] = data[:, 0]
        self._count = here.stop

    def finish(self) -> None:
        each = len(self._numbers)
        epochs, rest = divmod(self._count, each)
        if rest:
            raise WrongContent(f"{self._count} samples came; that is not a whole number of epochs of {each}")
        for epoch, seen in enumerate(self._seen[: self._count].reshape(epochs, each)):
            if self._shuffled and (why := in_order(np.searchsorted(self._numbers, seen))):
                raise WrongContent(f"epoch {epoch} {why}")
            if not np.array_equal(np.sort(seen) if self._shuffled else seen, self._numbers):
                raise WrongContent(f"epoch {epoch} does not hold each of {each} samples once and in place")
        if self._wrong:
            raise WrongContent(self._wrong[0])


def _no_files(folder: Path, sizes: Sizes, seed: int) -> None:
    """The samples are computed."""


def _filled_job(
    load: Callable[[Any], Any], batch_size: int, sample_bytes: int, *, items: Sequence[Any],
    workers: int, seed: int, budget_bytes: int, least_s: float, numbers: Array | None = None,
    most_epochs: int = _EPOCHS, shuffle: bool = False, length_of: Callable[[Array], Array] | None = None,
) -> Job:  # fmt: skip
    numbers = np.arange(len(items)) if numbers is None else numbers
    return Job(
        items=items,
        load=load,
        batch_size=batch_size,
        sample_bytes=sample_bytes,
        check=_FilledCheck(numbers, epochs=most_epochs + 2, shuffled=shuffle, length_of=length_of),
        workers=workers,
        budget_bytes=budget_bytes,
        seed=seed,
        least_s=least_s,
        most_epochs=most_epochs,
        shuffle=shuffle,
        pad=length_of is not None,
    )


def load_192k(number: int) -> Array:
    return np.full(192 * 1024 // 4, number, np.float32)


def _medium_job(_: Path, sizes: Sizes, workers: int, seed: int, budget_bytes: int) -> Job:
    return _filled_job(
        load_192k, 32, 192 * 1024, items=range(sizes.memory_medium),
        workers=workers, seed=seed, budget_bytes=budget_bytes, least_s=sizes.least_s,
    )  # fmt: skip


def load_with_temporaries(number: int) -> Array:
    parts = [np.full(2 * _MIB // 8, float(number)) for _ in range(10)]
    result: Array = np.maximum.reduce(parts)
    return result


def _temporaries_job(_: Path, sizes: Sizes, workers: int, seed: int, budget_bytes: int) -> Job:
    return _filled_job(
        load_with_temporaries, 4, 2 * _MIB, items=range(sizes.memory_temporaries),
        workers=workers, seed=seed, budget_bytes=budget_bytes, least_s=sizes.least_s,
    )  # fmt: skip


def load_and_leak(number: int) -> Array:
    _leaked.append(np.ones(_MIB // 8))
    return np.full(1024, float(number))


def _leak_job(_: Path, sizes: Sizes, workers: int, seed: int, budget_bytes: int) -> Job:
    return _filled_job(
        load_and_leak, 8, 8192, items=range(max(1, sizes.memory_leaks // _RUNS_PER_LEAK)), most_epochs=1,
        workers=workers, seed=seed, budget_bytes=budget_bytes, least_s=sizes.least_s,
    )  # fmt: skip


def load_path(path: str) -> Array:
    return np.full(32, int(path.rpartition("/")[2]), np.float32)


class _Held(list[str]):
    """Some strings of a list, and the list: its strings stay, and workers that are sent an item do not see it."""

    def __init__(self, everything: list[str]) -> None:
        super().__init__(everything[::_STEP])
        self.everything = everything


def _paths_job(_: Path, sizes: Sizes, workers: int, seed: int, budget_bytes: int) -> Job:
    paths = [f"/somewhere/in/a/folder/of/many/{number:012d}" for number in range(sizes.memory_paths)]
    return _filled_job(
        load_path, 256, 128, items=_Held(paths), numbers=np.arange(0, sizes.memory_paths, _STEP), most_epochs=2,
        shuffle=True, workers=workers, seed=seed, budget_bytes=budget_bytes, least_s=sizes.least_s,
    )  # fmt: skip


def _length_of(numbers: Array) -> Array:
    """Between 1 and 200,000 values: up to 1.5 MiB, and nothing that the samples before would tell."""
    squares = numbers.astype(np.int64) ** 2
    return squares * 37 % 200_000 + 1


def load_ragged(number: int) -> Array:
    return np.full(int(_length_of(np.array([number]))[0]), float(number))


def _ragged_job(_: Path, sizes: Sizes, workers: int, seed: int, budget_bytes: int) -> Job:
    items = range(sizes.memory_ragged)
    each = int(_length_of(np.array(items)).mean()) * 8
    return _filled_job(
        load_ragged, 16, each, items=items, length_of=_length_of,
        workers=workers, seed=seed, budget_bytes=budget_bytes, least_s=sizes.least_s,
    )  # fmt: skip


def _case(
    name: str, title: str, budget_mib: int, job: Callable[[Path, Sizes, int, int, int], Job], *, unit: str = "samples"
) -> Workload:
    return Workload(
        name=name, title=title, contenders=("torch", "penstock"), limits=(), unit=unit, make=_no_files, job=job,
        budget_bytes=budget_mib * _MIB,
    )  # fmt: skip


CASES: Final = {
    case.name: case
    for case in (
        dataclasses.replace(
            WORKLOADS["big"], name="arrays", title="24 MiB arrays from .npy files, batch 1",
            contenders=("torch", "penstock"), limits=(), budget_bytes=256 * _MIB,
        ),
        _case("medium", "192 KiB samples, batch 32", 160, _medium_job, unit="bytes"),
        _case("temporaries", "a load with temporaries ten times its result", 256, _temporaries_job, unit="bytes"),
        _case("leak", "a load that leaks 1 MiB a call", 256, _leak_job),
        _case("paths", "paths held by the parent as a list, shuffled", 256, _paths_job),
        _case("ragged", "samples of 8 bytes to 1.5 MiB, padded, batch 16", 256, _ragged_job, unit="bytes"),
    )
}  # fmt: skip
COSTS: Final = {
    case.name: case
    for case in (
        dataclasses.replace(
            WORKLOADS["python"], name="cost-python", title="small rows by a Python load, worker processes",
            contenders=("penstock", "penstock-unheld"), limits=(),
        ),
        dataclasses.replace(
            WORKLOADS["rows"], name="cost-rows", title="small rows of penstock.arrays, shuffled",
            contenders=("penstock", "penstock-unheld"), limits=(),
        ),
    )
}  # fmt: skip


def workload_of(name: str) -> Workload:
    """A workload of either benchmark."""
    return {**WORKLOADS, **CASES, **COSTS}[name]
