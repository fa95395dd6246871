"""What a worker is told once: how an item becomes a sample, and samples a batch.

A program is made in the parent, pickled by value (lambdas, closures and notebook cells included) and unpickled
once per crew. It holds no data and no state; ``fill`` runs it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import optree

from penstock._core.cache import Form
from penstock._core.errors import SpecError, shown
from penstock._core.source import Reader
from penstock._core.spec import NAMESPACE, Array, Cast, Spec, as_array, flatten
from penstock._core.task import Mode

__all__ = ["Into", "Pad", "Padded", "Probe", "Program", "Retry", "Rows", "Setup", "as_texts", "into"]


@dataclasses.dataclass(frozen=True, slots=True)
class Retry:
    """For ``on_error``: try an item again ``times`` times at most, waiting longer each time; ``then`` raise or skip."""

    times: int
    then: Literal["raise", "skip"] = "raise"
    wait_s: float = 0.05

    def __post_init__(self) -> None:
        if isinstance(self.times, bool) or not isinstance(self.times, int):
            raise TypeError(f"Retry({shown(self.times)}): give how often to try again, a whole number")
        if self.times < 1:
            raise ValueError(f"Retry({self.times}) would never try again: give 1 or more")
        if self.then not in ("raise", "skip"):
            raise ValueError(f'Retry(then={self.then!r}): then is "raise" or "skip"')


class Into:
    """A load that writes in place: ``load(item, out)``; made by ``penstock.into``."""

    def __init__(self, function: Callable[..., Any], spec: Spec) -> None:
        self.function = function
        self.spec = spec
        functools.update_wrapper(self, function, updated=())

    def __call__(self, item: Any, out: Any) -> None:
        """Write the sample of ``item`` into ``out``."""
        self.function(item, out)

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Into:
        if instance is None:
            return self
        return Into(self.function.__get__(instance, owner), self.spec)


def into(spec: Any) -> Callable[[Callable[..., Any]], Into]:
    """Mark a load that writes its sample straight into the slot: ``load(item, out)``.

    ``spec`` is a tree of ``(shape, dtype)`` leaves; ``out`` has that tree, with writable arrays of exactly those
    shapes. What load does not write keeps the bytes of an earlier batch, so write all of it.
    """
    declared = Spec.declared(spec)
    return lambda function: Into(function, declared)


class Padded(NamedTuple):
    """What ``collate_fn="pad"`` makes of an array: ``data`` filled up to the longest, and the true ``lengths``.

    ``lengths`` has one number per sample for one-dimensional samples, else one row per sample with its true shape.
    """

    data: Any
    lengths: Any


class Rows:
    """Arrays that are to be the rows of one: not put together yet. No dataclass, for those are trees."""

    __slots__ = ("_arrays", "_value", "dtype", "shape")

    def __init__(self, arrays: Sequence[Array], shape: tuple[int, ...], dtype: np.dtype[Any], value: float) -> None:
        self._arrays = arrays
        self._value = value  # what stands where an array is shorter than its row
        self.shape = shape
        self.dtype = dtype

    @property
    def size(self) -> int:
        """Elements of the whole."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return self.size * self.dtype.itemsize

    def made(self) -> Array:
        """The whole, in memory of its own."""
        whole: Array = np.empty(self.shape, self.dtype)
        self.write(whole)
        return whole

    def write(self, out: Array) -> None:
        """Put the whole there; ``out`` may be of another dtype."""
        rest = np.full((), self._value, self.dtype)
        for row, array in zip(out, self._arrays, strict=True):
            if row.ndim == 1:
                row[: len(array)] = array
                row[len(array) :] = rest
            else:
                if array.shape != row.shape:
                    row[...] = rest
                row[tuple(map(slice, array.shape))] = array


@dataclasses.dataclass(frozen=True, slots=True)
class Pad:
    """Collates samples of different shapes: fills each axis at its end up to the longest of the batch.

    ``value`` is what is filled in; ``multiple`` rounds the padded sizes up, for kernels that like multiples of 8.
    Scalars and strings are stacked as they are.
    """

    value: float = 0
    multiple: int = 1

    def __call__(self, samples: Sequence[Any]) -> Any:
        """The padded batch of these samples."""
        batch = self.laid(samples)
        return optree.tree_map(lambda leaf: leaf.made() if isinstance(leaf, Rows) else leaf, batch, namespace=NAMESPACE)

    def laid(self, samples: Sequence[Any]) -> Any:
        """The same with ``Rows`` in place of padded arrays: they are written only once, where they are to lie."""
        first, tree = flatten(samples[0])
        try:
            rows = [tree.flatten_up_to(sample) for sample in samples]
        except (ValueError, TypeError) as error:
            raise SpecError(f'collate_fn="pad" got samples of different trees: {error}') from error
        leaves = [self._leaf([row[i] for row in rows]) for i in range(len(first))]
        return optree.tree_unflatten(tree, leaves)

    def _leaf(self, values: list[Any]) -> Any:
        if isinstance(values[0], str | bytes):
            return list(values)
        arrays = [as_array(value) for value in values]
        ndim, dtype = arrays[0].ndim, arrays[0].dtype
        for array in arrays:
            if array.ndim != ndim or array.dtype != dtype:
                raise SpecError(
                    f'collate_fn="pad" got {array.dtype.name} with {array.ndim} axes beside {dtype.name} with {ndim}: '
                    "only sizes may differ; make load return the same dtype and number of axes"
                )
        if ndim == 0:
            return np.stack(arrays)
        shapes = np.array([array.shape for array in arrays], np.int64)
        longest = -(-shapes.max(axis=0) // self.multiple) * self.multiple if self.multiple > 1 else shapes.max(axis=0)
        data = Rows(arrays, (len(arrays), *longest.tolist()), dtype, self.value)
        return Padded(data, shapes[:, 0].copy() if ndim == 1 else shapes)


def as_texts(samples: list[str]) -> list[str]:
    """A batch of lines is a list of them; a slot holds it as one text. Known by name, like ``list``."""
    return samples


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """How items become rows of slots."""

    load: Callable[..., Any] | None
    reader: Reader | None
    mode: Mode
    collate: Callable[[list[Any]], Any] | None
    samples_per_item: int | None
    cast: Cast
    on_error: Literal["raise", "skip"] | Retry
    seed: int
    memory: int
    """The budget: not even the first load, which is measured, may ask for more."""
    timeout_s: float | None = None
    """How long one item may take."""
    fetch: Callable[[Any], Iterable[Any]] | None = None
    """What makes items of the places that travel in their stead (lines of files), block by block."""
    decides: bool = False
    """The plan decides how many workers there are."""
    tries_threads: bool = False
    """Nothing is known against loading in threads: the probe sees how that goes."""

    @property
    def skips(self) -> bool:
        """Whether items may be left out."""
        return self.on_error == "skip" or (isinstance(self.on_error, Retry) and self.on_error.then == "skip")

    @property
    def tries(self) -> int:
        """How often one item is tried."""
        return 1 + self.on_error.times if isinstance(self.on_error, Retry) else 1


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """What every worker is told once the plan is made."""

    spec: Spec
    rows: int
    """Rows of a slot."""
    workers: int
    growth_bytes: int = 0
    """How far a worker process may grow above what it is when idle; 0: as it likes."""
    load_bytes: int = 0
    """What a load takes of that."""
    cache: Form | None = None
    """Where samples are kept, if they are."""
    held_bytes: int = 0
    """What a source's reader keeps of that from task to task."""
    text_bytes: int = 0
    """What the texts of a task may take beside the slot; 0: as they like."""
    spares: int = 0
    """Processes more, which wait to take the place of a worker."""


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """What loading a few items showed."""

    spec: Spec
    packed_bytes: int
    """Bytes of one sample packed for a batch that is collated; 0 where rows have a fixed layout."""
    load_s: float
    cpu_s: float
    load_bytes: int
    process_bytes: int
    side_by_side: float | None = None
    """Time of two loads in threads at once over that of one; None if that was not tried."""
    random: bool = False
    """Whether load asked for randomness."""

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample."""
        return self.packed_bytes or self.spec.sample_bytes
