"""``penstock.compat.feeder``: the text's example with a real model, its limits measured, and what else is promised."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import BudgetError, BudgetWarning, LoadError, MiB, PenstockError
from penstock.compat.feeder import Config, Feeder, GiB, generate_epoch, multiply_epochs
from tests.frameworks.allocator import peak_bytes, torch
from tests.live.own_words import assert_own_words

nn = torch.nn
Module: Any = nn.Module


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of small operations wait for each other more than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Model(Module):  # type: ignore[misc]  # torch is Any to the type checker
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.second = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.last = nn.Linear(32, 256)

    def forward(self, x: Any) -> Any:
        return self.last(self.second(self.first(x).relu()).relu().mean((2, 3)))


SHAPE = (3, 64, 64)
COUNT = 90  # identities; two samples each


def config_of(**changes: Any) -> Config:
    options: dict[str, Any] = {
        "cpu_memory_limit": GiB(1),
        "gpu_memory_limit": MiB(40),
        "total_sample_count": 2 * COUNT,
        "input_shape": SHAPE,
        "output_shape": (256,),
        "model_class": Model,
        "input_dtype": np.float32,
        "output_dtype": np.float32,
        "one_read_count": 2,
        "preferred_batch_size": 16,
    }
    return Config(**{**options, **changes})


def read_input(path: str) -> Iterator[Any]:
    sample = np.load(path)
    yield sample
    yield sample + np.float32(0.5)


def get_output(number: int) -> Iterator[Any]:
    for shift in (0, 0.5):
        yield torch.full((256,), float(number + shift))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("inputs")
    paths = [folder / f"{number}.npy" for number in range(COUNT)]
    for number, path in enumerate(paths):
        np.save(path, np.full(SHAPE, number, np.float32))
    return [str(path) for path in paths]


def arguments(config: Config, inputs: list[str], **changes: Any) -> dict[str, Any]:
    return {
        "configs": config,
        "input_list": inputs,
        "output_list": range(len(inputs)),
        "read_input": read_input,
        "get_output": get_output,
        "apply_on_input_batch": lambda samples: torch.from_numpy(np.stack(samples)).clone(),
        "apply_on_output_batch": torch.stack,
        **changes,
    }


def values(epochs: Any) -> list[list[list[float]]]:
    """The first number of each sample, by epoch and batch; x and y must agree."""
    found: list[list[list[float]]] = []
    for epoch in epochs:
        found.append([])
        for x, y in epoch:
            numbers = [float(sample[0, 0, 0]) for sample in x]
            assert numbers == [float(target[0]) for target in y]
            found[-1].append(numbers)
    return found


EXPECTED = [number + shift for number in range(COUNT) for shift in (0, 0.5)]


# ---------------------------------------- the example of the text


@pytest.mark.parametrize("preferred", [16, 1000])
def test_the_batch_size_that_is_computed_really_fits(preferred: int, inputs: list[str]) -> None:
    config = config_of(preferred_batch_size=preferred)
    assert config.batch_size == (16 if preferred == 16 else config.max_batch_size)
    assert config.batch_size % 2 == 0
    feeder = Feeder(**arguments(config, inputs))

    def loop() -> None:
        model = Model()
        optimizer = torch.optim.Adam(model.parameters())
        for epoch in feeder.generate_epochs(epoch_count=2):
            for x_batch, y_batch in epoch:
                optimizer.zero_grad()
                y_pred = model.forward(x_batch)
                loss = nn.functional.mse_loss(y_pred, y_batch)
                loss.backward()
                optimizer.step()

    measured = peak_bytes(loop)
    assert measured <= config.gpu_memory_limit
    assert config.plan.device_total_bytes == pytest.approx(measured, rel=0.15)
    if preferred == 1000:
        assert measured > 0.8 * config.gpu_memory_limit
    assert feeder.stats is not None
    assert feeder.stats.batches == 2 * (2 * COUNT // config.batch_size)
    # The limit that the original says it cannot keep.
    assert 0 < feeder.stats.peak_bytes <= config.cpu_memory_limit


def test_feeder_gives_full_batches_in_order_and_leaves_out_the_rest(inputs: list[str]) -> None:
    config = config_of(model_class=None)
    epochs = values(Feeder(**arguments(config, inputs)).generate_epochs(2))
    assert epochs == [[EXPECTED[at : at + 16] for at in range(0, 176, 16)]] * 2
    assert len(EXPECTED) == 180


def test_generate_epoch_reads_everything_as_often_as_multiplied(inputs: list[str]) -> None:
    config = config_of(model_class=None)
    once = generate_epoch(**arguments(config, inputs))
    epochs = values(multiply_epochs(epoch_generator=once, epoch_count=2))
    assert epochs == [[EXPECTED[at : at + 16] for at in range(0, 180, 16)]] * 2
    assert len(epochs[0][-1]) == 4
    x, y = next(once)  # and it can go on afterwards
    assert len(x) == len(y) == 16
    once.close()


@pytest.mark.parametrize("limit", [MiB(100), GiB(2)])
def test_tensors_may_be_single_samples_too(limit: int) -> None:
    def single(number: int) -> Iterator[Any]:
        time.sleep(0.003)
        yield torch.full((2,), float(number))

    config = Config(limit, GiB(1), 10, (2,), (2,), None, preferred_batch_size=4)
    feeder = Feeder(config, range(10), range(10), single, single)
    for epochs, rows in (
        (feeder.generate_epochs(1), [4, 4]),
        ([generate_epoch(config, range(10), range(10), single, single)], [4, 4, 2]),
    ):
        found = [(x, y) for epoch in epochs for x, y in epoch]
        assert [len(x) for x, _ in found] == rows
        assert all(isinstance(part, torch.Tensor) for pair in found for part in pair)
        assert torch.cat([x for x, _ in found])[:, 0].tolist() == list(range(sum(rows)))
        del found


def test_without_functions_to_apply_batches_are_what_was_read(inputs: list[str]) -> None:
    given = arguments(config_of(model_class=None), inputs, apply_on_input_batch=None, apply_on_output_batch=None)
    x, y = next(once := generate_epoch(**given))
    assert isinstance(x, np.ndarray)
    assert isinstance(y, torch.Tensor)
    assert x.shape == (16, *SHAPE)
    del x, y
    once.close()


def test_functions_get_a_list_of_arrays_or_tensors_as_they_were_read(inputs: list[str]) -> None:
    got: list[Any] = []
    given = arguments(config_of(model_class=None), inputs)

    def seen(samples: Any) -> Any:
        got.append((type(samples), len(samples), type(samples[0])))
        return samples

    given.update(apply_on_input_batch=seen, apply_on_output_batch=seen)
    next(once := generate_epoch(**given))
    assert got == [(list, 16, np.ndarray), (list, 16, torch.Tensor)]
    once.close()


# ---------------------------------------- the config


def test_a_config_says_what_fits_and_why() -> None:
    config = config_of()
    assert (config.batch_size, config.reason) == (16, "as preferred")
    assert config.max_batch_size > 16
    assert config.held_samples == config.plan.held_samples >= 32
    text = str(config)
    assert text.startswith(f"batch size 16: as preferred; at most {config.max_batch_size}, in steps of 2\n")
    for part in ("slots, one batch each", "parameters", "gradients", "optimizer state", "activations", "batches"):
        assert part in text
    assert "max_batch_size=" in repr(config)


@pytest.mark.parametrize(
    ("changes", "size", "reason"),
    [
        ({"preferred_batch_size": 17}, 16, "not 17 as preferred, which is no multiple of the 2 samples of one read"),
        ({"preferred_batch_size": 1}, 2, "not 1 as preferred, which is no multiple of the 2 samples of one read"),
        ({"one_read_count": 5, "preferred_batch_size": 16}, 15, "which is no multiple of the 5 samples of one read"),
        ({"preferred_batch_size": 10_000}, None, "not 10000 as preferred, which does not fit: the largest that fits"),
        ({"preferred_batch_size": None}, None, "the largest that fits, as none was preferred"),
        (
            {"preferred_batch_size": 10_000, "total_sample_count": 21},
            20,
            "not 10000 as preferred, as there are only 21 samples",
        ),
    ],
)
def test_a_preferred_size_that_will_not_do_is_recalculated(
    changes: dict[str, Any], size: int | None, reason: str
) -> None:
    config = config_of(**changes)
    assert config.batch_size == (size or config.max_batch_size)
    assert config.batch_size % config.one_read_count == 0
    assert config.batch_size <= config.max_batch_size
    assert reason in str(config)


def test_the_host_bounds_the_batch_where_it_is_smaller() -> None:
    config = config_of(cpu_memory_limit=MiB(8), gpu_memory_limit=GiB(4), preferred_batch_size=None)
    assert config.plan.total_bytes <= MiB(8)
    assert config.max_batch_size < config_of(gpu_memory_limit=GiB(4), preferred_batch_size=None).max_batch_size


def test_the_model_may_be_a_class_an_instance_or_a_function_that_makes_one() -> None:
    sizes = {config_of(model_class=model).max_batch_size for model in (Model, Model(), partial(Model))}
    assert len(sizes) == 1


def test_the_optimizer_counts_and_inference_needs_less() -> None:
    large = {"input_shape": (4000,), "output_shape": (4,), "model_class": lambda: nn.Linear(4000, 4)}
    adam = config_of(**large).plan
    sgd = config_of(**large, optimizer="sgd").plan
    assert dict(adam.model_parts)["optimizer state"] > dict(sgd.model_parts).get("optimizer state", 0)
    assert config_of(train=False).plan.model_bytes < config_of().plan.model_bytes


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"one_read_count": 0}, ValueError, "one_read_count=0 must be 1 or more"),
        ({"one_read_count": 2.0}, TypeError, "one_read_count=2.0 must be an int"),
        ({"preferred_batch_size": 0}, ValueError, "preferred_batch_size=0 must be 1 or more"),
        ({"cpu_memory_limit": 0.5}, ValueError, "cpu_memory_limit=0.5 must be a number of bytes, 1 or more"),
        ({"gpu_memory_limit": "4 GiB"}, ValueError, r"gpu_memory_limit='4 GiB' must be .*: write GiB\(4\)"),
        ({"total_sample_count": 1}, ValueError, "total_sample_count=1 is less than the one_read_count=2 samples that"),
        ({"gpu_memory_limit": MiB(0.5)}, BudgetError, "a step of this model with 2 samples takes"),
        ({"gpu_memory_limit": MiB(4), "one_read_count": 40}, BudgetError, "a step of this model with 40 samples takes"),
        ({"cpu_memory_limit": MiB(2)}, BudgetError, "cpu_memory_limit=2097152 .* is too small"),
        (
            {"model_class": lambda: nn.Linear(3, 3)},
            PenstockError,
            "a step of the model failed with a batch of 4 samples.*, or model_class=None and a preferred_batch_size",
        ),
        (
            {"input_dtype": np.uint8},
            PenstockError,
            "the model wants float32: give it as input_dtype or output_dtype and read it so, or let the model cast",
        ),
        ({"model_class": nn.Linear}, TypeError, "model_class=Linear needs arguments: give a function that makes one"),
        ({"model_class": 3}, TypeError, "model_class=3 cannot be called: .* or None to leave the device out"),
        ({"model_class": lambda x: x}, TypeError, "model_class=.* is no torch model and no function without arguments"),
        (
            {"optimizer": torch.optim.LBFGS},
            TypeError,
            "cannot be counted: give model_class=None and a preferred_batch_size",
        ),
    ],
)
def test_a_config_that_cannot_work_says_why(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        config_of(**changes)
    assert_own_words(caught.value)


@pytest.mark.parametrize(("each", "preferred"), [(7, 17), (60, None)])
@pytest.mark.parametrize(("limit", "given"), [("cpu_memory_limit", MiB(2)), ("gpu_memory_limit", MiB(0.25))])
def test_the_least_that_a_config_asks_for_works_at_once(
    limit: str, given: int, each: int, preferred: int | None
) -> None:
    """What has to fit is all of one read, however large a batch is preferred."""
    options: dict[str, Any] = {"one_read_count": each, "preferred_batch_size": preferred}
    with pytest.raises(BudgetError) as caught:
        config_of(**options, **{limit: given})
    assert_own_words(caught.value)
    assert f"Give {limit}={caught.value.least}" in str(caught.value)
    config = config_of(**options, **{limit: caught.value.least})
    assert config.batch_size % each == 0
    with pytest.raises(BudgetError):
        config_of(**options, **{limit: caught.value.least - 8192})


@pytest.mark.parametrize(("limit", "given"), [("cpu_memory_limit", MiB(5)), ("gpu_memory_limit", MiB(2))])
def test_smaller_reads_are_advised_in_a_number_that_works(limit: str, given: int) -> None:
    with pytest.raises(BudgetError, match=r"one_read_count=\d+") as caught:
        config_of(one_read_count=60, **{limit: given})
    found = re.search(r"one_read_count=(\d+)", str(caught.value))
    assert found
    fewer = int(found[1])
    assert config_of(one_read_count=fewer, **{limit: given}).batch_size % fewer == 0


def test_parameters_that_do_not_fit_have_a_least_that_works() -> None:
    large = {"model_class": lambda: nn.Linear(3 * 64 * 64, 256), "input_shape": (3 * 64 * 64,)}
    with pytest.raises(BudgetError, match=r"a step of this model with 2 samples takes .*: parameters 12") as caught:
        config_of(**large, gpu_memory_limit=MiB(2))
    assert config_of(**large, gpu_memory_limit=caught.value.least).batch_size == 2


# ---------------------------------------- reading


def test_identities_may_be_anything_and_lists_of_different_length_are_refused(inputs: list[str]) -> None:
    form = {"input_shape": (2,), "output_shape": (), "total_sample_count": 12}
    config = config_of(model_class=None, preferred_batch_size=4, **form)

    def pair(identity: Any) -> Iterator[Any]:
        yield from (np.full(2, identity["n"], np.float32) for _ in range(2))

    def number(path: Path) -> list[Any]:
        return [np.float32(path.name)] * 2

    given = arguments(
        config,
        [],
        input_list=[{"n": n} for n in range(6)],
        output_list=(Path(str(n)) for n in range(6)),
        read_input=pair,
        get_output=number,
        apply_on_input_batch=np.stack,
        apply_on_output_batch=np.stack,
    )
    batches = list(generate_epoch(**given))
    assert (
        [x[:, 0].tolist() for x, _ in batches]
        == [y.tolist() for _, y in batches]
        == [[0, 0, 1, 1], [2, 2, 3, 3], [4, 4, 5, 5]]
    )
    with pytest.raises(ValueError, match="input_list has 90 identities and output_list 3: each input needs its output"):
        Feeder(**arguments(config_of(model_class=None), inputs, output_list=range(3)))


def test_what_reading_takes_besides_makes_the_batch_smaller_rather_than_the_limit_larger(inputs: list[str]) -> None:
    """The config knows shapes; that a read holds 66 MiB for a moment it cannot know."""

    def greedy(path: str) -> Iterator[Any]:
        wide = np.ones(MiB(66) // 8)
        sample = np.load(path)
        yield sample
        yield sample + np.float32(wide[0] / 2)

    config = config_of(model_class=None, cpu_memory_limit=MiB(80), preferred_batch_size=None)
    feeder = Feeder(
        **arguments(config, inputs, read_input=greedy, get_output=get_array, apply_on_output_batch=np.stack)
    )
    with pytest.warns(BudgetWarning, match=r"batch size \d+, not \d+: reading takes more memory than the shapes"):
        epochs = values(feeder.generate_epochs(1))
    size = len(epochs[0][0])
    assert size < config.batch_size
    assert size % 2 == 0
    assert [number for batch in epochs[0] for number in batch] == EXPECTED[: len(EXPECTED) // size * size]
    assert feeder.stats is not None
    assert feeder.stats.peak_bytes <= MiB(80)


def get_array(number: int) -> Iterator[Any]:
    for shift in (0, 0.5):
        yield np.full(256, number + shift, np.float32)


def test_a_read_of_another_form_than_the_config_says_is_refused(inputs: list[str]) -> None:
    def double(path: str) -> Iterator[Any]:
        yield from (sample.astype(np.float64) for sample in read_input(path))

    once = generate_epoch(**arguments(config_of(model_class=None), inputs, read_input=double))
    with pytest.raises(
        LoadError,
        match=r"read_input gave float64\[3, 64, 64\], but the config says float32\[3, 64, 64\]: make them agree",
    ):
        next(once)
    once.close()


def test_a_tensor_on_a_device_is_refused_in_the_words_of_this_interface(inputs: list[str]) -> None:
    def meta(path: str) -> Iterator[Any]:
        yield from (torch.zeros(SHAPE, device="meta") for _ in range(2))

    once = generate_epoch(**arguments(config_of(model_class=None), inputs, read_input=meta))
    with pytest.raises(
        PenstockError, match=r"^read_input or get_output gave a tensor on meta: .*; drop .to\(...\) there$"
    ):
        next(once)
    once.close()


def test_a_plain_generator_cannot_be_multiplied() -> None:
    with pytest.raises(TypeError, match="gives its batches only once, not 3 times: give what generate_epoch returned"):
        multiply_epochs((pair for pair in [(1, 2)]), 3)
    assert [list(epoch) for epoch in multiply_epochs([(1, 2)], 2)] == [[(1, 2)], [(1, 2)]]
