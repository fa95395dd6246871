"""The interface of the PyTorch utilities ``Config``, ``Feeder`` and ``generate_epoch``, on top of a feed.

``Config`` works out how many samples a batch may have: on the host from ``cpu_memory_limit``, on the device from a
training step of the model, traced without running it. ``Feeder`` and ``generate_epoch`` read ahead in worker processes
inside ``cpu_memory_limit``, which holds. What the engine says about its own arguments is said about these here. Nothing
of torch is imported here unless a model is given.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Final, overload

import numpy as np

import penstock
from penstock import BudgetError, BudgetWarning, Feed, GiB, Plan, Stats
from penstock._core.errors import shown
from penstock._core.options import check_count
from penstock._core.patience import users_level
from penstock._core.spec import is_floating
from penstock.compat.wording import USE_OTHER, Wording

__all__ = ["Config", "Feeder", "GiB", "generate_epoch", "multiply_epochs"]

Read = Callable[[Any], Iterable[Any]]
"""From an identity to a generator of ``one_read_count`` arrays or tensors."""
Apply = Callable[[list[Any]], Any]
"""From the samples of a batch to what is handed out."""

WORKERS_LEAST_BYTES: Final = 512 * 2**20

# What does not fit is always a batch of one read: larger ones are made smaller before anybody is told.
_WORDS: Final = Wording(
    budget=(
        (r"\bdevice_memory\b", "gpu_memory_limit"),
        (r"\bmemory(?==)", "cpu_memory_limit"),
        (r' or executor="thread"(?= with this budget)', ""),
        (r", or with this budget", ""),
        (r"\bbatch_size=", "one_read_count="),
        (r' \(cast="float16", smaller shapes\)', ""),
        (r", or a fraction such as 0\.5$", ""),
    ),
    load=(
        (r"^load failed for ", "reading failed for "),
        (r' \(to leave such items out: on_error="skip"\)$', ""),
        (r': do that alone to see why, or leave such items out with on_error="skip"$', ": read it alone to see why"),
        (
            r": give more memory or fewer workers, a smaller batch_size, or let load make smaller temporaries\)$",
            ": give a larger cpu_memory_limit, or let read_input and get_output make smaller temporaries)",
        ),
        (r"run with num_workers=0 to see what happens in load$", "call read_input and get_output here to see why"),
    ),
    start=(
        (r"^load cannot be sent", "read_input or get_output cannot be sent"),
        (r"connections inside load instead of around it, or use [^,]*, [^,]*$", "connections in them, not around them"),
        (r"^the workers cannot start: load could", "the workers cannot start: read_input or get_output could"),
        (
            r"^load returned a tensor on (.*); drop \.to\(\.\.\.\) from load$",
            r"read_input or get_output gave a tensor on \1; drop .to(...) there",
        ),
        (USE_OTHER, ""),
        (r", give a smaller num_workers$", ""),
        (r"What load imports (must be importable in a fresh interpreter)$", r"What these functions import \1"),
        (r"^items like (.*): items are identities", r"identities like \1: they are names"),
        (
            r": give cast=.* for what should be that too, or let the model cast$",
            ": give it as input_dtype or output_dtype and read it so, or let the model cast",
        ),
        (
            r"^(optimizer|loss) belongs to a torch model, but model=(.*) is a function that runs a whole step: .*$",
            r"model_class=\2 is no torch model and no function without arguments that makes one: give one, or None",
        ),
        (r"^model=", "model_class="),
        (
            r"^(the feed was closed: make a new one to go on|this iteration was ended by a newer one over .*)$",
            "this epoch was ended before it was used up: iterate one before you ask for the next, or make two Feeders",
        ),
        (r"or a function that runs a step with a batch$", "or None to leave the device out"),
        (
            r"batch_size as a number( and no model)?(\. A sample is .*)?$",
            r"model_class=None and a preferred_batch_size\2",
        ),
    ),
)


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
    """Samples there are, ``one_read_count`` for each identity: no batch is larger, and lists with fewer are refused."""
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
        for name in ("cpu_memory_limit", "gpu_memory_limit"):
            _check_limit(name, getattr(self, name))
        for name in ("total_sample_count", "one_read_count"):
            check_count(name, getattr(self, name), least=1)
        check_count("preferred_batch_size", self.preferred_batch_size, least=1, optional=True)
        _check_form("input", self.input_shape, self.input_dtype)
        _check_form("output", self.output_shape, self.output_dtype)
        if self.total_sample_count < self.one_read_count:
            raise ValueError(
                f"total_sample_count={self.total_sample_count} is less than the one_read_count={self.one_read_count} "
                "samples that a single identity gives: count samples, not identities"
            )
        with _WORDS.spoken():
            self.max_batch_size = self._largest()
            self.batch_size, self.reason = self._chosen()
            self.plan = self._plan(self.batch_size)

    @property
    def held_samples(self) -> int:
        """How many samples memory holds at once."""
        return self.plan.held_samples

    def _largest(self) -> int:
        each = self.one_read_count
        try:
            largest = self._plan("max").batch_size
        except BudgetError:
            largest = 0  # not even a single sample fits, but what has to is all of one read
        if largest < each:
            self._plan(each)  # or it says what one read would need
            return each
        return largest - largest % each

    def _chosen(self) -> tuple[int, str]:
        wanted, most, each = self.preferred_batch_size, self.max_batch_size, self.one_read_count
        if wanted is None:
            return most, "the largest that fits, as none was preferred"
        if wanted > most > self.total_sample_count - each:
            return most, f"not {wanted} as preferred, as there are only {self.total_sample_count} samples"
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
        memory, length = int(self.cpu_memory_limit), self.total_sample_count
        return penstock.plan(sample, memory=memory, batch_size=batch_size, length=length, **on_device)

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
        self._apply = _checked(apply_on_input_batch, apply_on_output_batch)
        self.stats: Stats | None = None
        """What the last call of ``generate_epochs`` did so far."""

    def generate_epochs(self, epoch_count: int) -> Generator[Iterator[tuple[Any, Any]], None, None]:
        """``epoch_count`` epochs; the next one is being read while the last batches of one are used."""
        check_count("epoch_count", epoch_count, least=0)
        return self._epochs(epoch_count)

    def _epochs(self, epoch_count: int) -> Generator[Iterator[tuple[Any, Any]], None, None]:
        feed = self._reading.feed(drop_last=True)
        self.stats = feed.stats
        epochs = feed.epochs(epoch_count)
        while (epoch := _next(epochs)) is not None:
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
    return EpochGenerator(reading, _checked(apply_on_input_batch, apply_on_output_batch))


def multiply_epochs(
    epoch_generator: Iterable[tuple[Any, Any]], epoch_count: int
) -> Generator[Iterator[tuple[Any, Any]], None, None]:
    """``epoch_count`` epochs of what ``generate_epoch`` gave, or of anything that can be iterated again and again."""
    check_count("epoch_count", epoch_count, least=0)
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
        with _WORDS.spoken():
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
    while (batch := _next(batches)) is not None:
        x, y, tensors = batch
        kinds = int(tensors[0])
        del batch  # or the loop would hold it while it waits for the next one
        yield _batch(x, apply[0], tensor=bool(kinds & _X)), _batch(y, apply[1], tensor=bool(kinds & _Y))
        del x, y


def _next(values: Iterator[Any]) -> Any:
    """The next one, or None at the end; what goes wrong is said in the words of this interface."""
    with _WORDS.spoken():
        return next(values, None)


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
        if not isinstance(config, Config):
            raise TypeError(f"configs={shown(config, 100)} must be a Config")
        _check_callable(read_input=read_input, get_output=get_output)
        self._config = config
        self._pairs = _Pairs(_sequence(inputs), _sequence(outputs))
        _check_total(config, len(self._pairs))
        self._load = _Load(
            (read_input, _dtype(config.input_dtype), tuple(config.input_shape)),
            (get_output, _dtype(config.output_dtype), tuple(config.output_shape)),
            config.one_read_count,
        )

    def feed(self, *, drop_last: bool) -> Feed:
        """A feed at work, inside the limit of the config."""
        wanted, each = self._config.batch_size, self._config.one_read_count
        size = wanted
        while True:
            try:
                with _WORDS.spoken():
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
                stacklevel=users_level(),
            )
        return feed

    def _started(self, batch_size: int, *, drop_last: bool) -> Feed:
        config = self._config
        feed = _WORDS.warned(
            lambda: Feed(
                self._pairs,
                self._load,
                batch_size=batch_size,
                memory=int(config.cpu_memory_limit),
                samples_per_item=config.one_read_count,
                drop_last=drop_last,
                # A worker that reads tensors imports torch, which takes more than this before it has read anything.
                num_workers=0 if config.cpu_memory_limit < WORKERS_LEAST_BYTES and "torch" in sys.modules else None,
            )
        )
        try:
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
    """What a worker does with a pair of identities; for input and output, how they are read and what has to come."""

    input: _Part
    output: _Part
    count: int

    def __call__(self, pair: tuple[Any, Any]) -> Any:
        samples = self._samples(pair)
        if self.count > 1:
            return samples
        (sample,) = samples  # to the end, as only then they are counted
        return sample

    def _samples(self, pair: tuple[Any, Any]) -> Iterator[tuple[Any, Any, np.uint8]]:
        reads = (
            _read("read_input", self.input, pair[0], self.count),
            _read("get_output", self.output, pair[1], self.count),
        )
        for x, y in zip(*reads, strict=True):
            yield x, y, np.uint8(_X * _is_tensor(x) | _Y * _is_tensor(y))


_Part = tuple[Read, np.dtype[Any], tuple[int, ...]]


def _read(name: str, part: _Part, identity: Any, count: int) -> Iterator[Any]:
    """The samples of an identity, if they are as many as the config says, and of that form."""
    read, dtype, shape = part
    made = read(identity)
    # The rows of an array would pass for samples where one sample was returned, and not yielded.
    if _is_tensor(made) or isinstance(made, np.ndarray) or not hasattr(made, "__iter__"):
        raise TypeError(
            f"{name} returned something of the type {type(made).__name__} for {shown(identity)}, not a generator of "
            f"samples (one_read_count={count}): write yield in place of return"
        )
    given = 0
    for given, sample in enumerate(itertools.islice(made, count + 1), 1):
        if given > count:
            break
        # What was planned for has to come: another form would take other memory on the device.
        found, form = _dtype(getattr(sample, "dtype", type(sample))), tuple(np.shape(sample))
        if (found, form) != (dtype, shape):
            raise ValueError(
                f"{name} gave {found}{list(form)}, but the config says {dtype}{list(shape)}: make them agree"
            )
        yield sample
    if given != count:
        came = f"more than {count}" if given > count else f"only {given}"
        raise ValueError(
            f"{name} gave {came} sample{'' if min(given, count) == 1 else 's'} for {shown(identity)}, but the config "
            f"says one_read_count={count}: make them agree"
        )


def _checked(on_input: Apply | None, on_output: Apply | None) -> tuple[Apply | None, Apply | None]:
    given = {"apply_on_input_batch": on_input, "apply_on_output_batch": on_output}
    _check_callable(**{name: function for name, function in given.items() if function is not None})
    return on_input, on_output


def _check_callable(**functions: Any) -> None:
    for name, function in functions.items():
        if not callable(function):
            raise TypeError(f"{name}={shown(function, 100)} must be a function")


def _check_form(name: str, shape: Any, dtype: Any) -> None:
    try:
        known = all(operator.index(length) >= 0 for length in shape)
    except TypeError:
        known = False
    if not known:
        raise TypeError(
            f"{name}_shape={shown(shape, 100)} must be lengths of axes, ints such as (3, 64, 64), or () for one"
        )
    try:
        found = _dtype(dtype)
    except (TypeError, AttributeError) as error:
        raise TypeError(f"{name}_dtype={shown(dtype, 100)} is not known: give np.float32, say") from error
    if found.kind not in "biu" and not is_floating(found):
        raise TypeError(f"{name}_dtype={shown(dtype, 100)} is neither numbers nor bools: give np.float32, say")


def _check_limit(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not 1 <= value < float("inf"):
        raise ValueError(f"{name}={value!r} must be a number of bytes, 1 or more: write GiB(4) for four gibibytes")


def _check_total(config: Config, identities: int) -> None:
    """Whether there are as many samples as the config was computed for."""
    each, total = config.one_read_count, config.total_sample_count
    there = identities * each
    if there == total:
        return
    if there == 0:
        raise ValueError(f"total_sample_count={total}, but input_list and output_list are empty: check what fills them")
    told = f"total_sample_count={total}, but {identities} identities with one_read_count={each} give {there} samples"
    if there < total:
        raise ValueError(f"{told}: give total_sample_count={there} if these are all, or the lists that are complete")
    warnings.warn(f"{told}, and all of them are read: give total_sample_count={there}", stacklevel=users_level())


def _sequence(values: Any) -> Sequence[Any]:
    # Where there are keys, values[0] is not the first one: dicts, Series of pandas.
    by_place = hasattr(values, "__len__") and hasattr(values, "__getitem__") and not hasattr(values, "keys")
    listed: Sequence[Any] = values if by_place else list(values)
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
