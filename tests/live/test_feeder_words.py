"""What ``penstock.compat.feeder`` says: in the words of ``Config`` and ``Feeder``, and so that it can be followed.

Without torch: what needs a model is tested with the frameworks.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pytest

from penstock import BudgetError, BudgetWarning, LoadError, MiB, PenstockError, WorkerLost
from penstock.compat.feeder import Config, Feeder, GiB, generate_epoch, multiply_epochs
from tests.live.own_words import assert_own_words

FEW: Final = MiB(20)
"""So little that everything is read in this process."""


def test_names_and_order_of_arguments_are_those_of_the_interface() -> None:
    """Code that gives them by place, or by name, stays as it is."""
    config = "cpu_memory_limit gpu_memory_limit total_sample_count input_shape output_shape model_class input_dtype"
    config += " output_dtype one_read_count preferred_batch_size"
    feeder = "configs input_list output_list read_input get_output apply_on_input_batch apply_on_output_batch"
    for function, wanted in (
        (Config, config),
        (Feeder, feeder),
        (generate_epoch, feeder),
        (Feeder.generate_epochs, "self epoch_count"),
        (multiply_epochs, "epoch_generator epoch_count"),
    ):
        parameters = inspect.signature(function).parameters.values()
        assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == wanted.split()
    assert GiB(1.5) == 3 * 2**29


def small_config(identities: int, **changes: Any) -> Config:
    """For two numbers in, one out, twice for each of so many identities."""
    options: dict[str, Any] = {
        "cpu_memory_limit": FEW,
        "gpu_memory_limit": GiB(1),
        "total_sample_count": 2 * identities,
        "input_shape": (2,),
        "output_shape": (),
        "model_class": None,
        "one_read_count": 2,
        "preferred_batch_size": 4,
    }
    return Config(**{**options, **changes})


def twice(number: int, value: Callable[[int], Any] = lambda number: np.full(2, number, np.float32)) -> Iterator[Any]:
    yield value(number)
    yield value(number)


def numbers(number: int) -> Iterator[Any]:
    return twice(number, np.float32)


def read_small(identities: int = 8, config: Config | None = None, read: Any = twice, get: Any = numbers) -> list[Any]:
    config = config or small_config(identities)
    feeder = Feeder(config, range(identities), range(identities), read, get)
    return [x[:, 0].tolist() for epoch in feeder.generate_epochs(1) for x, _ in epoch]


def test_lists_that_give_fewer_samples_than_the_config_says_are_refused_at_once() -> None:
    """A batch of all 80 samples, where there are 60, would never come."""
    config = small_config(40)
    for make in (Feeder, generate_epoch):
        with pytest.raises(
            ValueError,
            match="total_sample_count=80, but 30 identities with one_read_count=2 give 60 samples: give "
            "total_sample_count=60 if these are all",
        ):
            make(config, range(30), range(30), twice, twice)
        with pytest.raises(ValueError, match="total_sample_count=80, but input_list and output_list are empty"):
            make(config, [], [], twice, twice)
    fewer = dataclasses.replace(config, total_sample_count=60)
    assert len(read_small(30, fewer)) == 15


def test_lists_that_give_more_samples_than_the_config_says_are_read_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="10 identities .* give 20 samples, and all of them are read: give") as told:
        batches = read_small(10, small_config(8))
    assert batches == [[number, number, number + 1, number + 1] for number in range(0, 10, 2)]
    assert {warning.filename for warning in told} == {__file__}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_shape": 2}, r"^input_shape=2 must be lengths of axes, ints such as \(3, 64, 64\), or \(\) for one$"),
        ({"output_shape": (2, -1)}, r"^output_shape=\(2, -1\) must be lengths of axes"),
        ({"input_shape": (8.0,)}, r"^input_shape=\(8.0,\) must be lengths of axes, ints such as"),
        ({"input_dtype": "floaty"}, "^input_dtype='floaty' is not known: give np.float32, say$"),
        ({"input_dtype": object}, "^input_dtype=<class 'object'> is neither numbers nor bools: give np.float32, say$"),
        ({"output_dtype": "U3"}, "^output_dtype='U3' is neither numbers nor bools"),
        ({"output_dtype": [("a", "f4")]}, r"^output_dtype=\[\('a', 'f4'\)\] is neither numbers nor bools"),
    ],
)
def test_a_form_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        small_config(8, **changes)


@pytest.mark.parametrize("dtype", [bool, "uint8", np.int64, "float16", np.complex64, "bfloat16", "float8_e4m3fn"])
def test_every_kind_of_number_may_be_read(dtype: Any) -> None:
    if isinstance(dtype, str) and dtype.startswith(("bfloat", "float8")):
        pytest.importorskip("ml_dtypes")
    assert small_config(8, input_dtype=dtype).batch_size == 4


def test_what_is_no_function_or_no_config_is_refused_at_once() -> None:
    given: dict[str, Any] = {
        "configs": small_config(8),
        "input_list": range(8),
        "output_list": range(8),
        "read_input": twice,
        "get_output": numbers,
    }
    for make in (Feeder, generate_epoch):
        for name in ("read_input", "get_output", "apply_on_input_batch", "apply_on_output_batch"):
            with pytest.raises(TypeError, match=f"^{name}=3 must be a function$"):
                make(**{**given, name: 3})
        with pytest.raises(TypeError, match=r"^configs=\{\} must be a Config$"):
            make(**{**given, "configs": {}})


class Labelled(dict[int, int]):
    """Stands for a Series of pandas: what is iterated are the values, and ``[...]`` takes labels."""

    def __iter__(self) -> Iterator[int]:
        return iter(self.values())


@pytest.mark.parametrize("listed", [dict.fromkeys(range(8), "value"), Labelled({9 - n: n for n in range(8)})])
def test_identities_are_what_iterating_the_list_gives(listed: Any) -> None:
    once = generate_epoch(small_config(8), listed, listed, twice, numbers)
    found = [(x[:, 0].tolist(), y.tolist()) for x, y in once]
    once.close()
    assert found == [([n, n, n + 1, n + 1],) * 2 for n in range(0, 8, 2)]


@pytest.mark.parametrize(
    ("count", "error", "message"),
    [(-1, ValueError, "^epoch_count=-1 must be 0 or more$"), (1.5, TypeError, "^epoch_count=1.5 must be an int$")],
)
def test_a_number_of_epochs_that_cannot_be_is_refused(count: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        multiply_epochs([(1, 2)], count)
    with pytest.raises(error, match=message):
        Feeder(small_config(8), range(8), range(8), twice, numbers).generate_epochs(count)


def test_an_epoch_that_is_used_too_late_says_so() -> None:
    feeder = Feeder(small_config(8), range(8), range(8), twice, numbers)
    for late in list(feeder.generate_epochs(2)):
        with pytest.raises(PenstockError, match=r"^this epoch was ended before it was used up: iterate one before"):
            next(late)
    once = generate_epoch(small_config(8), range(8), range(8), twice, numbers)
    first, second = iter(once), iter(once)
    assert len(next(second)[0]) == 4
    with pytest.raises(PenstockError, match=r"ask for the next, or make two Feeders$"):
        next(first)
    once.close()


def only_one(number: int) -> Iterator[Any]:
    yield np.zeros(2, np.float32)


def three(number: int) -> Iterator[Any]:
    yield from (np.zeros(2, np.float32) for _ in range(3))


def whole(number: int) -> Any:
    return np.zeros((2, 2), np.float32)


def nothing(number: int) -> None:
    pass


def failing(number: int) -> Iterator[Any]:
    if number == 5:
        raise KeyError("batch_size=5, or use executor='thread'")  # no advice of ours
    return twice(number)


def twice_slowly(number: int) -> Iterator[Any]:
    time.sleep(0.003)  # long enough for workers to be worth it, whatever the machine
    return twice(number)


def dying(number: int) -> Iterator[Any]:
    if number == 5:
        os._exit(3)
    return twice_slowly(number)


def greedy(number: int) -> Iterator[Any]:
    if number == 5:
        np.ones(GiB(3) // 8)
    return twice_slowly(number)


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (only_one, "read_input gave only 1 sample for 0, but the config says one_read_count=2: make them agree"),
        (three, "read_input gave more than 2 samples for 0, but the config says one_read_count=2: make them agree"),
        (whole, r"of the type ndarray for 0, not a generator of samples \(one_read_count=2\): write yield in place"),
        (nothing, "of the type NoneType for 0, not a generator"),
        (failing, r"^reading failed for \(5, 5\): KeyError: \"batch_size=5, or use executor='thread'\"$"),
        (dying, r"while loading \(5, 5\), with exit code 3: read it alone to see why$"),
        (greedy, "give a larger cpu_memory_limit, or let read_input and get_output make smaller temporaries"),
    ],
)
def test_a_read_that_goes_wrong_is_told_in_the_words_of_this_interface(read: Any, message: str) -> None:
    limit = GiB(1.25) if read in (dying, greedy) else FEW  # those two must not do it here
    with pytest.raises(LoadError, match=message) as caught:
        read_small(8, small_config(8, cpu_memory_limit=limit), read)
    assert caught.value.item in ((0, 0), (5, 5))
    if read is dying:
        assert (type(caught.value), getattr(caught.value, "exitcode", None)) == (WorkerLost, 3)
    else:
        assert isinstance(caught.value.__cause__, KeyError | ValueError | TypeError | MemoryError)
    if read is not failing:
        assert_own_words(caught.value)


# ---------------------------------------- one sample an identity, the default


def once_slowly(number: int) -> Iterator[Any]:
    time.sleep(0.003)  # as above
    yield np.full(2, number, np.float32)


def where(number: int) -> Iterator[Any]:
    yield np.float64(os.getpid())


def single_config(**changes: Any) -> Config:
    """For thirty identities that give one sample each, without a word about ``one_read_count``."""
    options = {"output_dtype": np.float64, "preferred_batch_size": 4, **changes}
    return Config(options.pop("cpu_memory_limit", FEW), GiB(1), 30, (2,), (), None, **options)


@pytest.mark.parametrize("limit", [FEW, GiB(1)])
def test_without_a_one_read_count_an_identity_gives_one_sample(limit: int) -> None:
    config = single_config(cpu_memory_limit=limit)
    feeder = Feeder(config, range(30), range(30), once_slowly, where)
    once = generate_epoch(config, range(30), range(30), once_slowly, where)
    places = set()
    for epochs, last in ((feeder.generate_epochs(2), 28), (multiply_epochs(once, 2), 30)):
        found = []
        for epoch in epochs:
            for x, y in epoch:
                found.append(x[:, 0].tolist())
                places.update(y.tolist())
        assert found == 2 * [list(range(at, min(at + 4, last))) for at in range(0, last, 4)]
    assert (os.getpid() in places) == (limit == FEW)


def no_sample(number: int) -> Iterator[Any]:
    yield from ()


def another_form(number: int) -> Iterator[Any]:
    yield np.zeros(3, np.float32)


@pytest.mark.parametrize("limit", [FEW, GiB(1)])
@pytest.mark.parametrize(
    ("read", "message"),
    [
        (no_sample, "read_input gave only 0 samples for 0, but the config says one_read_count=1: make them agree$"),
        (twice, "read_input gave more than 1 sample for 0, but the config says one_read_count=1: make them agree$"),
        (another_form, r"read_input gave float32\[3\], but the config says float32\[2\]: make them agree$"),
        (whole, r"of the type ndarray for 0, not a generator of samples \(one_read_count=1\): write yield in place"),
    ],
)
def test_a_single_sample_is_held_to_the_config_too(read: Any, message: str, limit: int) -> None:
    once = generate_epoch(single_config(cpu_memory_limit=limit), range(30), range(30), read, where)
    with pytest.raises(LoadError, match=f"^reading failed for \\(0, 0\\): .*{message}") as caught:
        next(once)
    once.close()
    assert_own_words(caught.value)


def test_get_output_is_held_to_the_config_too() -> None:
    def short(number: int) -> Iterator[Any]:
        yield np.float32(number)

    with pytest.raises(LoadError, match="get_output gave only 1 sample for 0") as caught:
        read_small(get=short)
    assert caught.value.item == (0, 0)


def no_life() -> Any:
    raise ValueError("not here")


class Unborn:
    """Can be sent and not be received."""

    def __reduce__(self) -> Any:
        return no_life, ()

    def __call__(self, number: int) -> Iterator[Any]:
        return twice(number)


def test_what_cannot_be_sent_to_workers_is_told_in_the_words_of_this_interface() -> None:
    lock = threading.Lock()

    def locked(number: int) -> Iterator[Any]:
        with lock:
            return twice(number)

    with pytest.raises(
        PenstockError, match=r"read_input or get_output cannot be sent .* in them, not around them$"
    ) as c:
        read_small(8, small_config(8, cpu_memory_limit=GiB(1)), read=locked)
    assert_own_words(c.value)
    with pytest.raises(PenstockError, match=r"^the workers cannot start: read_input or get_output could not") as c:
        read_small(8, small_config(8, cpu_memory_limit=GiB(1)), read=Unborn())
    assert_own_words(c.value)
    locks = [threading.Lock() for _ in range(8)]
    feeder = Feeder(small_config(8, cpu_memory_limit=GiB(1)), locks, range(8), twice, twice)
    with pytest.raises(TypeError, match=r"^identities like \(<unlocked .* can be pickled$") as caught:
        next(feeder.generate_epochs(1))
    assert_own_words(caught.value)


def test_the_least_that_reading_asks_for_works_at_once() -> None:
    """The config cannot know that a read holds 66 MiB for a moment; the error that says so gives what does."""

    def wide(number: int) -> Iterator[Any]:
        held = np.ones(MiB(66) // 8)
        return twice(number, lambda number: np.full(2, number * held[0], np.float32))

    def run(limit: int) -> list[Any]:
        return read_small(8, small_config(8, cpu_memory_limit=limit, preferred_batch_size=5), wide)

    with pytest.raises(BudgetError, match=r"^cpu_memory_limit=12582912 \(12 MiB\) is too small, .* least") as caught:
        run(MiB(12))
    assert_own_words(caught.value)
    assert f"Give cpu_memory_limit={caught.value.least}" in str(caught.value)
    assert run(caught.value.least)[0] == [0, 0, 1, 1]


def test_a_limit_above_what_there_is_warns_in_the_words_of_this_interface() -> None:
    with pytest.warns(BudgetWarning, match=r"^cpu_memory_limit=4000 GiB is more than .* Give less$") as told:
        read_small(8, small_config(8, cpu_memory_limit=GiB(4000)))
    assert {warning.filename for warning in told} == {__file__}
