"""What a worker is told once: how an item becomes a sample, and samples a batch.

A program is made in the parent, pickled by value (lambdas, closures and notebook cells included) and unpickled
once per crew. It holds no data and no state; ``fill`` runs it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, overload

import numpy as np
import optree

from penstock._core.cache import Form
from penstock._core.errors import SpecError, shown
from penstock._core.source import Reader, Samples
from penstock._core.spec import NAMESPACE, Array, Cast, Spec, as_array, flatten
from penstock._core.task import Mode

__all__ = [
    "Batched",
    "BatchedInto",
    "Into",
    "Pad",
    "Padded",
    "Probe",
    "Program",
    "Retry",
    "Rows",
    "Setup",
    "as_texts",
    "batched",
    "given",
    "into",
    "not_stacked",
    "rows_of",
]


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


class Batched:
    """A load of several items at once; made by ``penstock.batched``. Called like any other load, it loads one."""

    def __init__(self, many: Callable[..., Any], *, stacks: bool = False) -> None:
        self.many = many
        self.stacks = stacks
        """Whether it is given samples of a source, stacked, and not a list of items."""
        functools.update_wrapper(self, many, updated=())

    def __call__(self, item: Any) -> Any:
        """The sample of one item."""
        made = self.many(given([item], stacks=self.stacks))
        leaves, tree = flatten(made)
        for leaf in leaves:
            if rows_of(leaf) != 1:
                raise not_stacked(leaf, 1, item)
        return optree.tree_unflatten(tree, [leaf[0] for leaf in leaves])

    def over_source(self) -> Batched:
        """The same for samples of a source."""
        return Batched(self.many, stacks=True)

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Batched:
        return self if instance is None else Batched(self.many.__get__(instance, owner), stacks=self.stacks)


class BatchedInto(Into):
    """The same for one that writes in place: ``load(items, out)``."""

    def __init__(self, many: Callable[..., Any], spec: Spec, *, stacks: bool = False) -> None:
        self.many = many
        self.stacks = stacks
        super().__init__(self._one, spec)
        functools.update_wrapper(self, many, updated=())

    def _one(self, item: Any, out: Any) -> Any:
        return self.many(given([item], stacks=self.stacks), _with_axis(out))

    def over_source(self) -> BatchedInto:
        """The same for samples of a source."""
        return BatchedInto(self.many, self.spec, stacks=True)

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> BatchedInto:
        if instance is None:
            return self
        return BatchedInto(self.many.__get__(instance, owner), self.spec, stacks=self.stacks)


@overload
def batched(load: Into) -> Into: ...
@overload
def batched(load: Callable[..., Any]) -> Batched: ...
def batched(load: Callable[..., Any]) -> Batched | Into:
    """Mark a load that is given several items at once, and gives as many samples, stacked.

    ``load(items)`` gets a list of items; over a source that reads arrays, the samples that were read, with a leading
    axis. It returns the tree of a sample with that axis in every array. How many come at once is not its business, and
    differs: each sample must follow from its own item alone. Randomness belongs to one sample, so a load that asks
    ``penstock.rng()`` is given one item at a time, and so are all items of a call that raised, to see whose error it
    is. Around ``@penstock.into(spec)`` it marks a ``load(items, out)`` that writes all of them.
    """
    if isinstance(load, Batched | BatchedInto):
        raise TypeError("penstock.batched marks this load already: once is enough")
    if isinstance(load, Into):
        return BatchedInto(load.function, load.spec)
    if not callable(load):
        raise TypeError(f"penstock.batched({shown(load)}) needs a function of a list of items")
    return Batched(load)


def given(items: Any, *, stacks: bool) -> Any:
    """What a batched load gets for these items."""
    if isinstance(items, Samples):
        return optree.tree_unflatten(items.tree, items.columns)
    if not stacks:
        return list(items)
    rows = [flatten(item) for item in items]
    leaves = [_stacked(values) for values in zip(*(values for values, _ in rows), strict=True)]
    return optree.tree_unflatten(rows[0][1], leaves)


def _stacked(values: tuple[Any, ...]) -> Any:
    return list(values) if isinstance(values[0], str | bytes) else np.stack([as_array(value) for value in values])


def _with_axis(tree: Any) -> Any:
    return optree.tree_map(lambda leaf: leaf[None], tree, namespace=NAMESPACE)


def rows_of(leaf: Any) -> int | None:
    """The length of the first axis; None if there is none."""
    shape = getattr(leaf, "shape", None)
    return int(shape[0]) if shape else None


def not_stacked(leaf: Any, count: int, item: Any) -> SpecError:
    """The error for a leaf that has not one row per item."""
    shape = getattr(leaf, "shape", None)
    came = f"an array of shape {tuple(shape)}" if shape is not None else f"a {type(leaf).__name__}"
    return SpecError(
        f"a load marked with penstock.batched gave {came} for {count} item{'s' if count > 1 else ''}, that of "
        f"{shown(item)} first: every leaf must be an array with one row per item, such as np.stack of them",
        item=item,
    )


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
    past_cache: bool = False
    """Whether blocks may be read past the page cache, into memory for which there is room."""


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
