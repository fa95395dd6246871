"""The interface of the PyTorch utilities ``Config``, ``Feeder`` and ``generate_epoch``, on top of a feed.

``Config`` works out how many samples a batch may have: on the host from ``cpu_memory_limit``, on the device from a
training step of the model, traced without running it. ``Feeder`` and ``generate_epoch`` read ahead in worker processes
inside ``cpu_memory_limit``, which holds. Nothing of torch is imported here unless a model is given.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Final, overload

import numpy as np

import penstock
from penstock import BudgetError, BudgetWarning, Feed, GiB, Plan, Stats

__all__ = ["Config", "Feeder", "GiB", "generate_epoch", "multiply_epochs"]

Read = Callable[[Any], Iterable[Any]]
"""From an identity to a generator of ``one_read_count`` arrays or tensors."""
Apply = Callable[[list[Any]], Any]
"""From the samples of a batch to what is handed out."""

WORKERS_LEAST_BYTES: Final = 512 * 2**20


@dataclasses.dataclass(slots=True)
class Config:
    """How many samples fit, in memory and in a batch. ``print`` it for the reasons.

    ``model_class`` is a torch model's class without arguments, a function that makes a model, or a model; None leaves
    the device out. Its training step is counted with the state of ``optimizer`` (Adam unless you say otherwise:
    anything that ``penstock.plan`` takes) and ``loss`` (chosen from the shapes if it is None).
    """

    cpu_memory_limit: int
    """Bytes for everything that reading takes: batches, worker processes, what they read."""
    gpu_memory_limit: int
    """Bytes for the model, its training step and its batch."""
    total_sample_count: int
    """Samples there are: no batch is larger."""
    input_shape: Sequence[int]
    output_shape: Sequence[int]
    model_class: Any
    input_dtype: Any = np.float32
    output_dtype: Any = np.float32
    one_read_count: int = 1
    """Samples that one identity gives."""
    preferred_batch_size: int | None = None
    """Taken if it fits and is a multiple of ``one_read_count``; None: the largest."""
    optimizer: Any = dataclasses.field(default="adam", kw_only=True)
    loss: Any = dataclasses.field(default=None, kw_only=True)
    train: bool = dataclasses.field(default=True, kw_only=True)

    batch_size: int = dataclasses.field(init=False)
    """Samples in a batch."""
    max_batch_size: int = dataclasses.field(init=False)
    """The largest that fits on host and device, as a multiple of ``one_read_count``."""
    plan: Plan = dataclasses.field(init=False, repr=False)
    """The numbers behind ``batch_size``."""
    reason: str = dataclasses.field(init=False, repr=False)
    """Why ``batch_size`` is what it is."""

    def __post_init__(self) -> None:
        for name in ("cpu_memory_limit", "gpu_memory_limit", "total_sample_count", "one_read_count"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name}={value} must be 1 or more")
        if self.preferred_batch_size is not None and self.preferred_batch_size < 1:
            raise ValueError(f"preferred_batch_size={self.preferred_batch_size} must be 1 or more, or None")
        each = self.one_read_count
        largest = self._plan("max").batch_size
        if largest < each:
            self._plan(each)  # says what one read would need
            largest = each  # there are fewer samples than that
        self.max_batch_size = largest - largest % each
        self.batch_size, self.reason = self._chosen()
        self.plan = self._plan(self.batch_size)

    @property
    def held_samples(self) -> int:
        """How many samples memory holds at once."""
        return self.plan.held_samples

    def _chosen(self) -> tuple[int, str]:
        wanted, most, each = self.preferred_batch_size, self.max_batch_size, self.one_read_count
        if wanted is None:
            return most, "the largest that fits, as none was preferred"
        if wanted > most:
            return most, f"not {wanted} as preferred, which does not fit: the largest that fits"
        if wanted % each:
            size = max(each, wanted - wanted % each)
            return size, f"not {wanted} as preferred, which is no multiple of the {each} samples of one read"
        return wanted, "as preferred"

    def _plan(self, batch_size: Any) -> Plan:
        sample = tuple(
            # All elements are the same one: a sample of this shape without its memory.
            np.broadcast_to(np.zeros((), _dtype(dtype)), tuple(shape))
            for shape, dtype in ((self.input_shape, self.input_dtype), (self.output_shape, self.output_dtype))
        )
        on_device: dict[str, Any] = {}
        if self.model_class is not None:
            on_device = {
                "model": self.model_class,
                "device_memory": int(self.gpu_memory_limit),
                "optimizer": self.optimizer if self.train else None,
                "loss": self.loss,
                "train": self.train,
                "device_batches": 1,  # the functions that are applied make them, one after the other
            }
        length = max(self.total_sample_count, self.one_read_count)
        return penstock.plan(
            sample, memory=int(self.cpu_memory_limit), batch_size=batch_size, length=length, **on_device
        )

    def __str__(self) -> str:
        """The batch size and why, and the table of the plan."""
        return (
            f"batch size {self.batch_size}: {self.reason}; at most {self.max_batch_size}, in steps of "
            f"{self.one_read_count}\n\n{self.plan}"
        )


class Feeder:
    """Epochs of batches, as the config says; samples that do not fill a last batch are left out.

    ``input_list`` and ``output_list`` hold identities. ``read_input`` and ``get_output`` give the samples of one, in
    worker processes. ``apply_on_input_batch`` and ``apply_on_output_batch`` get the samples of a batch as a list of
    arrays, or of tensors where tensors were read, and what they return is handed out; None hands out the stacked batch.
    """

    def __init__(
        self,
        configs: Config,
        input_list: Iterable[Any],
        output_list: Iterable[Any],
        read_input: Read,
        get_output: Read,
        apply_on_input_batch: Apply | None = None,
        apply_on_output_batch: Apply | None = None,
    ) -> None:
        self._reading = _Reading(configs, input_list, output_list, read_input, get_output)
        self._apply = (apply_on_input_batch, apply_on_output_batch)
        self.stats: Stats | None = None
        """What the last call of ``generate_epochs`` did so far."""

    def generate_epochs(self, epoch_count: int) -> Generator[Iterator[tuple[Any, Any]], None, None]:
        """``epoch_count`` epochs; the next one is being read while the last batches of one are used."""
        feed = self._reading.feed(drop_last=True)
        self.stats = feed.stats
        for epoch in feed.epochs(epoch_count):
            yield _applied(epoch, self._apply)
        # Not when this is left early: an epoch that somebody still holds keeps its feed, and the last one closes it.
        feed.close()


def generate_epoch(
    configs: Config,
    input_list: Iterable[Any],
    output_list: Iterable[Any],
    read_input: Read,
    get_output: Read,
    apply_on_input_batch: Apply | None = None,
    apply_on_output_batch: Apply | None = None,
) -> EpochGenerator:
    """One epoch of all samples, the last batch may be short; arguments as those of ``Feeder``."""
    reading = _Reading(configs, input_list, output_list, read_input, get_output)
    return EpochGenerator(reading, (apply_on_input_batch, apply_on_output_batch))


def multiply_epochs(
    epoch_generator: Iterable[tuple[Any, Any]], epoch_count: int
) -> Generator[Iterator[tuple[Any, Any]], None, None]:
    """``epoch_count`` epochs of what ``generate_epoch`` gave, or of anything that can be iterated again and again."""
    if epoch_count > 1 and not isinstance(epoch_generator, EpochGenerator) and iter(epoch_generator) is epoch_generator:
        raise TypeError(
            f"epoch_generator={epoch_generator!r} gives its batches only once, not {epoch_count} times: give what "
            "generate_epoch returned, or a list"
        )
    return _multiplied(epoch_generator, epoch_count)


def _multiplied(epoch_generator: Iterable[Any], epoch_count: int) -> Generator[Iterator[Any], None, None]:
    try:
        for _ in range(epoch_count):
            yield iter(epoch_generator)
    finally:
        if isinstance(epoch_generator, EpochGenerator):
            epoch_generator.close()


class EpochGenerator:
    """What ``generate_epoch`` returns: iterate it for one epoch, and again for the next."""

    def __init__(self, reading: _Reading, apply: tuple[Apply | None, Apply | None]) -> None:
        self._reading = reading
        self._apply = apply
        self._feed: Feed | None = None
        self._current: Iterator[tuple[Any, Any]] | None = None

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """One epoch."""
        if self._feed is None:
            self._feed = self._reading.feed(drop_last=False)
        return _applied(iter(self._feed), self._apply)

    def __next__(self) -> tuple[Any, Any]:
        """The next batch of an epoch, as of a generator."""
        if self._current is None:
            self._current = iter(self)
        return next(self._current)

    def close(self) -> None:
        """End the workers; iterating again starts new ones."""
        feed, self._feed, self._current = self._feed, None, None
        if feed is not None:
            feed.close()


def _applied(batches: Iterator[Any], apply: tuple[Apply | None, Apply | None]) -> Iterator[tuple[Any, Any]]:
    for x, y, tensors in batches:
        kinds = int(tensors[0])
        yield _batch(x, apply[0], tensor=bool(kinds & _X)), _batch(y, apply[1], tensor=bool(kinds & _Y))
        del x, y  # or the loop would hold this batch while it waits for the next one


def _batch(values: Any, apply: Apply | None, *, tensor: bool) -> Any:
    if tensor:
        from penstock.torch import from_array

        values = from_array(values)
    return values if apply is None else apply(list(values))


_X: Final = 1  # which of the two were tensors: they are tensors again in the batch
_Y: Final = 2


class _Reading:
    """What is read, and how."""

    def __init__(
        self, config: Config, inputs: Iterable[Any], outputs: Iterable[Any], read_input: Read, get_output: Read
    ) -> None:
        self._config = config
        self._pairs = _Pairs(_sequence(inputs), _sequence(outputs))
        self._load = _Load(
            read_input,
            get_output,
            (_dtype(config.input_dtype), tuple(config.input_shape)),
            (_dtype(config.output_dtype), tuple(config.output_shape)),
        )

    def feed(self, *, drop_last: bool) -> Feed:
        """A feed at work, inside the limit of the config."""
        wanted, each = self._config.batch_size, self._config.one_read_count
        size = wanted
        while True:
            try:
                feed = self._started(size, drop_last=drop_last)
                break
            except BudgetError:
                # Reading takes more than the config could know: what workers import, what a read holds for a moment.
                size = size // 2 // each * each
                if size == 0:
                    raise
        if size < wanted:
            warnings.warn(
                f"batch size {size}, not {wanted}: reading takes more memory than the shapes in the config tell, and "
                f"cpu_memory_limit={self._config.cpu_memory_limit} holds. Give more, or a smaller preferred_batch_size",
                BudgetWarning,
                stacklevel=3,
            )
        return feed

    def _started(self, batch_size: int, *, drop_last: bool) -> Feed:
        config = self._config
        feed = Feed(
            self._pairs,
            self._load,
            batch_size=batch_size,
            memory=int(config.cpu_memory_limit),
            samples_per_item=config.one_read_count,
            drop_last=drop_last,
            # A worker that reads tensors imports torch, which takes more than this before it has read anything.
            num_workers=0 if config.cpu_memory_limit < WORKERS_LEAST_BYTES and "torch" in sys.modules else None,
        )
        try:
            if len(self._pairs):
                _ = feed.plan
        except BaseException:
            feed.close()
            raise
        return feed


@dataclasses.dataclass(frozen=True, slots=True)
class _Pairs(Sequence[tuple[Any, Any]]):
    """Identities of input and output side by side; nothing is copied."""

    inputs: Sequence[Any]
    outputs: Sequence[Any]

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.outputs):
            raise ValueError(
                f"input_list has {len(self.inputs)} identities and output_list {len(self.outputs)}: each input needs "
                "its output"
            )

    def __len__(self) -> int:
        return len(self.inputs)

    @overload
    def __getitem__(self, index: int) -> tuple[Any, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[tuple[Any, Any]]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return list(zip(self.inputs[index], self.outputs[index], strict=True))
        return self.inputs[index], self.outputs[index]


@dataclasses.dataclass(frozen=True, slots=True)
class _Load:
    """What a worker does with a pair of identities."""

    read_input: Read
    get_output: Read
    input_form: tuple[np.dtype[Any], tuple[int, ...]]
    output_form: tuple[np.dtype[Any], tuple[int, ...]]

    def __call__(self, pair: tuple[Any, Any]) -> Iterator[tuple[Any, Any, np.uint8]]:
        for x, y in zip(self.read_input(pair[0]), self.get_output(pair[1]), strict=True):
            _check("read_input", x, self.input_form)
            _check("get_output", y, self.output_form)
            yield x, y, np.uint8(_X * _is_tensor(x) | _Y * _is_tensor(y))


def _check(name: str, value: Any, form: tuple[np.dtype[Any], tuple[int, ...]]) -> None:
    """What was planned for has to come: another form would take other memory on the device."""
    dtype, shape = _dtype(getattr(value, "dtype", type(value))), tuple(np.shape(value))
    if (dtype, shape) != form:
        raise ValueError(
            f"{name} gave {dtype}{list(shape)}, but the config says {form[0]}{list(form[1])}: make them agree"
        )


def _sequence(values: Any) -> Sequence[Any]:
    listed: Sequence[Any] = values if hasattr(values, "__len__") and hasattr(values, "__getitem__") else list(values)
    return listed


def _is_tensor(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "torch"


def _dtype(dtype: Any) -> np.dtype[Any]:
    """A NumPy dtype for one of NumPy's, of torch's, or a name."""
    name = str(dtype).removeprefix("torch.") if _is_tensor(dtype) else dtype
    if isinstance(name, str) and name.startswith(("bfloat16", "float8")):
        import ml_dtypes

        name = getattr(ml_dtypes, name)
    found: np.dtype[Any] = np.dtype(name)
    return found
