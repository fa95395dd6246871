"""The batch size that a model leaves room for: what is predicted against what torch's allocator gives out."""

from __future__ import annotations

import copy
import functools
import logging
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import BudgetError, Feed, MiB, PenstockError
from tests.frameworks.allocator import peak_bytes, torch

nn, functional = torch.nn, torch.nn.functional
Module: Any = nn.Module


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of small operations wait for each other more than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---------------------------------------- real models


def mlp() -> Any:
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))


def convolutional() -> Any:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 48, 3, stride=2, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(48, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


class Transformer(Module):  # type: ignore[misc]  # torch is Any to the type checker
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(64, 500)

    def forward(self, tokens: Any) -> Any:
        return self.head(self.encoder(self.embedding(tokens)))


class Attention(Module):  # type: ignore[misc]  # torch is Any to the type checker
    """With the fused kernel, which takes memory for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(x).unflatten(2, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        return self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


@dataclass(frozen=True)
class Case:
    make: Callable[[], Any]
    sample: tuple[Any, Any]
    budget: int


IMAGE = np.zeros((3, 32, 32), np.float32)
CASES = {
    "mlp": Case(mlp, (np.zeros(256, np.float32), 3), MiB(24)),
    "conv": Case(convolutional, (IMAGE, 3), MiB(24)),
    "transformer": Case(Transformer, (np.zeros(16, np.int64), np.zeros(16, np.int64)), MiB(24)),
    "attention": Case(Attention, (np.zeros((64, 64), np.float32), np.zeros((64, 64), np.float32)), MiB(32)),
}
OPTIMIZERS = {
    "adam": torch.optim.Adam,
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


def loss_of(output: Any, target: Any) -> Any:
    if output.shape == target.shape:
        return functional.mse_loss(output, target)
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


def train(make: Callable[[], Any], optimizer: Any, sample: Any, rows: int, *, batches: int = 2) -> int:
    """The allocator's peak in the loop that people write, with two batches on the device."""

    def run() -> None:
        held = [tuple(torch.from_numpy(np.stack([part] * rows)).clone() for part in sample) for _ in range(batches)]
        model = make()
        chosen = optimizer(model.parameters())
        for x, y in held:
            chosen.zero_grad()
            output = model(x)
            loss = loss_of(output, y)
            loss.backward()
            chosen.step()

    return peak_bytes(run)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("name", ["mlp", "conv", "transformer"])
def test_the_chosen_batch_fits_and_a_quarter_more_does_not(name: str, optimizer: str) -> None:
    case, make = CASES[name], OPTIMIZERS[optimizer]
    plan = penstock.plan(
        case.sample, batch_size="max", model=case.make, device_memory=case.budget, optimizer=make, loss=loss_of
    )
    assert plan.device_memory == case.budget
    assert plan.model_bytes < plan.device_total_bytes <= case.budget
    assert "bound by the device" in plan.notes[0]

    measured = train(case.make, make, case.sample, plan.batch_size)
    assert measured <= case.budget
    assert plan.device_total_bytes == pytest.approx(measured, rel=0.10)
    assert train(case.make, make, case.sample, int(1.25 * plan.batch_size)) > case.budget


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_predicted_for_any_batch(name: str, rows: int) -> None:
    """Without the margin the trace is within a hundredth; with it, no step takes more than was said."""
    case = CASES[name]
    plan = penstock.plan(
        case.sample, batch_size=rows, model=case.make(), device_memory="1 GiB", optimizer="adam", loss=loss_of
    )
    measured = train(case.make, torch.optim.Adam, case.sample, rows, batches=2)
    batches = plan.device_total_bytes - plan.model_bytes
    exact = 2 * rows * sum(np.asarray(part).nbytes for part in case.sample)  # buffers are whole pages
    margin = dict(plan.model_parts)["margin"]
    assert plan.device_total_bytes >= measured
    assert plan.device_total_bytes - margin - batches + exact == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize(
    ("change", "dtype"),
    [
        (lambda model: model.to(memory_format=torch.channels_last), np.float32),
        (lambda model: model.double(), np.float64),
        (lambda model: model.bfloat16(), "bfloat16"),
    ],
    ids=["channels last", "double", "bfloat16"],
)
def test_layouts_and_dtypes_of_convolutions_are_counted(change: Any, dtype: Any) -> None:
    def make() -> Any:
        return change(convolutional())

    plan = penstock.plan(
        (IMAGE, 3), batch_size=24, model=make, device_memory="1 GiB", optimizer="sgd", cast={"0": dtype}
    )
    x = torch.zeros(24, 3, 32, 32, dtype=next(make().parameters()).dtype)
    y = torch.zeros(24, dtype=torch.int64)

    def run() -> None:
        model = make()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()

    measured = peak_bytes(run)
    assert measured <= plan.model_bytes
    assert plan.model_bytes == pytest.approx(measured, rel=0.10)


# ---------------------------------------- the parts


@pytest.mark.parametrize(
    ("optimizer", "times"),
    [
        (None, 0),
        ("sgd", 0),
        (torch.optim.SGD, 0),
        (OPTIMIZERS["momentum"], 1),
        ("Adam", 2),
        (torch.optim.AdamW, 2),
        (lambda parameters: torch.optim.Adam(parameters, amsgrad=True), 3),
    ],
)
def test_the_state_of_each_optimizer_is_counted(optimizer: Any, times: int) -> None:
    plan = penstock.plan(
        CASES["mlp"].sample, batch_size=64, model=mlp, device_memory="1 GiB", optimizer=optimizer, loss=loss_of
    )
    parts = dict(plan.model_parts)
    size = sum(p.numel() * 4 for p in mlp().parameters())
    assert parts["parameters"] == size
    assert parts.get("optimizer state", 0) == pytest.approx(times * size, abs=1000)


def test_an_optimizer_that_was_made_is_counted_with_its_own_groups_and_left_alone() -> None:
    model = mlp()
    body, head = list(model[:4].parameters()), list(model[4].parameters())
    optimizer = torch.optim.SGD([{"params": body, "momentum": 0.9}, {"params": head, "momentum": 0.0}], lr=0.1)
    plan = penstock.plan(
        CASES["mlp"].sample, batch_size=64, model=model, device_memory="1 GiB", optimizer=optimizer, loss=loss_of
    )
    assert dict(plan.model_parts)["optimizer state"] == sum(p.numel() * 4 for p in body)
    assert not optimizer.state
    assert optimizer.param_groups[0]["params"] == body
    with pytest.raises(ValueError, match="optimizer holds 6 parameters that are not the model's"):
        penstock.plan(
            CASES["mlp"].sample,
            batch_size=4,
            model=mlp(),
            device_memory="1 GiB",
            optimizer=torch.optim.Adam(mlp().parameters()),
        )


def test_inference_takes_less_than_training() -> None:
    options: dict[str, Any] = {"batch_size": 64, "model": convolutional, "device_memory": "1 GiB"}
    training = penstock.plan((IMAGE, 3), **options)
    inference = penstock.plan((IMAGE, 3), train=False, **options)
    assert inference.model_bytes < 0.7 * training.model_bytes
    assert "an inference step" in str(inference)
    x = torch.zeros(64, 3, 32, 32)

    def run() -> None:
        model = convolutional().eval()
        with torch.no_grad():
            for _ in range(2):
                output = model(x)
        assert output is not None

    measured = peak_bytes(run)
    assert measured <= inference.model_bytes <= 1.10 * measured


class Around(Module):  # type: ignore[misc]  # torch is Any to the type checker
    """A layer, and how it is called."""

    def __init__(self, layer: Any, call: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: Any) -> Any:
        return self.call(self.layer, x)


def encoder_layer(**options: Any) -> Any:
    return nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, **options)


def attention_layer() -> Any:
    return nn.MultiheadAttention(64, 4, batch_first=True)


def padded(layer: Any, x: Any) -> Any:
    return layer(x, src_key_padding_mask=torch.zeros(len(x), 48))


def causal(layer: Any, x: Any) -> Any:
    return layer(x, nn.Transformer.generate_square_subsequent_mask(48), is_causal=True)


def masked_flash(_: Any, x: Any) -> Any:
    q = x.unflatten(2, (4, 16)).transpose(1, 2)
    return functional.scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(len(x), 1, 48, 48))


INFERENCE: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], Any]]] = {
    "encoder": (lambda: nn.TransformerEncoder(encoder_layer(), 2), lambda layer, x: layer(x)),
    "causal encoder": (lambda: nn.TransformerEncoder(encoder_layer(), 2), causal),
    "padded layer, norm first": (lambda: encoder_layer(norm_first=True), padded),
    "layer in bfloat16": (lambda: encoder_layer(activation="gelu").bfloat16(), lambda layer, x: layer(x.bfloat16())),
    "attention": (attention_layer, lambda layer, x: layer(x, x, x, need_weights=False)[0]),
    "attention and weights": (attention_layer, lambda layer, x: layer(x, x, x)[0]),
    "attention to others": (attention_layer, lambda layer, x: layer(x[:, :8], x, x)[0]),
    "masked flash attention": (nn.Identity, masked_flash),
    "bilinear": (lambda: nn.Bilinear(64, 64, 8), lambda layer, x: layer(x, x)),
    "spectrum": (lambda: nn.Linear(64, 64), lambda layer, x: torch.fft.rfft(layer(x)).abs()),
    "transforms along another axis": (
        nn.Identity,
        lambda _, x: torch.fft.irfft(torch.fft.rfft(x, dim=1), dim=-2),
    ),
}


def infer(model: Any, sample: Any, rows: int) -> int:
    """The allocator's peak of two forward passes, with the batch and the parameters."""
    model.eval()

    def run() -> None:
        x = torch.from_numpy(np.stack([sample] * rows)).clone()
        with torch.no_grad():
            for _ in range(2):
                output = model(x)
        assert output is not None

    return peak_bytes(run) + sum(int(p.nbytes) for p in model.parameters())


@pytest.mark.parametrize("name", INFERENCE)
def test_what_operations_take_for_themselves_in_inference_is_counted(name: str) -> None:
    """There torch runs a whole layer of a transformer as one operation, inside of which a trace sees nothing."""
    make, call = INFERENCE[name]
    sample = np.zeros((48, 64), np.float32)
    model, budget = Around(make(), call), MiB(16)
    plan = penstock.plan(
        sample, batch_size="max", memory="1 GiB", model=model, device_memory=budget, train=False, device_batches=1
    )
    measured = infer(model, sample, plan.batch_size)
    assert "traced without running it" in plan.notes[1]
    assert measured <= budget
    assert plan.device_total_bytes == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("name", ["encoder", "causal encoder", "padded layer, norm first", "attention and weights"])
def test_fused_layers_that_run_on_another_device_have_a_bound(name: str) -> None:
    from penstock._core.spec import Spec
    from penstock._model import _batches
    from penstock._model.traced import Tracer

    make, call = INFERENCE[name]
    sample = np.zeros((48, 64), np.float32)
    model = Around(make(), call)
    batch = _batches(Spec.of(sample))
    step = Tracer(model, optimizer=None, loss=None, train=False, batch=batch, device="cuda").step(64)
    measured = infer(model, sample, 64)
    assert measured <= step.nbytes - dict(step.parts)["margin"] + 64 * sample.nbytes <= 1.12 * measured


def test_a_fused_layer_that_would_take_long_has_a_bound_and_is_not_run() -> None:
    large = nn.TransformerEncoderLayer(8192, 64, 32768, batch_first=True, device="meta")
    plan = penstock.plan(
        np.zeros((512, 8192), np.float32), batch_size=2, model=large, device_memory="64 GiB", train=False
    )
    assert dict(plan.model_parts)["workspace"] >= 2 * 5 * 512 * 8192 * 4


def test_shared_weights_are_counted_once_and_frozen_ones_have_no_gradient() -> None:
    class Tied(Module):  # type: ignore[misc]  # torch is Any to the type checker
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(1000, 64), nn.Linear(64, 1000, bias=False)
            self.head.weight = self.embedding.weight
            self.frozen = nn.Linear(64, 64).requires_grad_(False)

        def forward(self, x: Any) -> Any:
            return self.head(self.frozen(self.embedding(x)))

    plan = penstock.plan((np.zeros((), np.int64), 3), batch_size=4, model=Tied, device_memory="1 GiB", optimizer="adam")
    parts = dict(plan.model_parts)
    assert parts["parameters"] == 4 * (64 * 1000 + 64 * 64 + 64)
    assert parts["gradients"] == 4 * 64 * 1000
    assert parts["optimizer state"] == pytest.approx(2 * 4 * 64 * 1000, abs=100)


# ---------------------------------------- nothing is touched, nothing is allocated


def legacy_state() -> Any:
    state: Any = np.random.get_state()  # noqa: NPY002 - the one that must not move
    return state[1].tolist()


def test_the_users_model_generators_and_gradients_are_as_before() -> None:
    model = nn.Sequential(nn.Linear(256, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 10))
    model(torch.randn(8, 256)).sum().backward()
    model.eval()
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    before = copy.deepcopy(model.state_dict())
    grads = [p.grad for p in model.parameters()]
    values = [grad.clone() for grad in grads]
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002 - same
    states = torch.get_rng_state(), random.getstate(), legacy_state()

    plan = penstock.plan(CASES["mlp"].sample, batch_size="max", memory="256 MiB", model=model, device_memory="8 MiB")
    assert plan.batch_size > 1
    assert not model.training
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert all(
        p.grad is grad and torch.equal(grad, v) for p, grad, v in zip(model.parameters(), grads, values, strict=True)
    )
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert legacy_state() == states[2]


@pytest.mark.parametrize("kind", ["class", "instance", "meta"])
def test_tracing_allocates_next_to_nothing(kind: str) -> None:
    def large() -> Any:
        return nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048))

    model: Any = large
    if kind == "instance":
        model = large()
    elif kind == "meta":
        with torch.device("meta"):
            model = large()
    sample = np.zeros(2048, np.float32), np.zeros(2048, np.float32)
    plans = []
    taken = peak_bytes(
        lambda: plans.append(
            penstock.plan(sample, batch_size="max", model=model, device_memory="256 MiB", optimizer="adam")
        )
    )
    assert dict(plans[0].model_parts)["parameters"] > MiB(32)
    assert taken < MiB(1)


def test_a_model_that_fits_in_no_memory_here_is_planned() -> None:
    def huge() -> Any:
        return nn.Sequential(*(nn.Linear(50_000, 50_000) for _ in range(10)))

    sample = np.zeros(50_000, np.float32)
    plan = penstock.plan(sample, batch_size="max", length=64, model=huge, device_memory="1 TiB", optimizer="adam")
    assert plan.model_bytes > 4 * 10 * 50_000**2 * 4
    assert plan.batch_size == 64
    with pytest.raises(
        BudgetError, match=r"a step of this model with 1 sample takes .*: parameters 93\.1 GiB"
    ) as caught:
        penstock.plan(sample, batch_size="max", model=huge, device_memory="1 GiB")
    penstock.plan(sample, batch_size="max", length=64, model=huge, device_memory=caught.value.least)


def test_the_same_question_has_the_same_answer() -> None:
    case = CASES["conv"]
    options: dict[str, Any] = {"batch_size": "max", "model": case.make, "device_memory": case.budget, "memory": "1 GiB"}
    assert penstock.plan(case.sample, **options) == penstock.plan(case.sample, **options)


# ---------------------------------------- what bounds the batch, and what does not fit


def test_a_small_host_budget_bounds_the_batch_and_the_plan_says_so() -> None:
    plan = penstock.plan((IMAGE, 3), batch_size="max", memory="48 MiB", model=convolutional, device_memory="2 GiB")
    assert "bound by the host" in str(plan)
    assert plan.device_total_bytes < plan.device_memory / 2 if plan.device_memory else False
    alone = penstock.plan((IMAGE, 3), batch_size="max", memory="48 MiB")
    assert plan.batch_size == alone.batch_size


def test_when_not_even_one_sample_fits_the_least_that_works_is_told() -> None:
    options: dict[str, Any] = {"batch_size": "max", "model": convolutional, "optimizer": "adam"}
    with pytest.raises(
        BudgetError, match=r"a step of this model with 1 sample takes .* parameters .* Give device_memory="
    ) as caught:
        penstock.plan((IMAGE, 3), device_memory="1 MiB", **options)
    least = caught.value.least
    assert penstock.plan((IMAGE, 3), device_memory=least, **options).batch_size == 1
    with pytest.raises(BudgetError):
        penstock.plan((IMAGE, 3), device_memory=least - 1, **options)


def test_a_batch_size_that_does_not_fit_is_refused_with_one_that_does() -> None:
    options: dict[str, Any] = {"model": convolutional, "device_memory": "32 MiB", "optimizer": "adam"}
    with pytest.raises(BudgetError, match=r"with 1,000 samples takes .* or batch_size=(\d+)\.$") as caught:
        penstock.plan((IMAGE, 3), batch_size=1000, **options)
    advised = int(str(caught.value).rpartition("=")[2].rstrip("."))
    assert penstock.plan((IMAGE, 3), batch_size="max", **options).batch_size == advised
    assert penstock.plan((IMAGE, 3), batch_size=advised, **options).device_total_bytes <= MiB(32)
    enough = penstock.plan((IMAGE, 3), batch_size=1000, **{**options, "device_memory": caught.value.least})
    assert enough.device_total_bytes == caught.value.least


def test_a_model_that_refuses_a_single_sample_is_told_what_two_take() -> None:
    def normed() -> Any:
        return nn.Sequential(nn.Linear(256, 512), nn.BatchNorm1d(512), nn.Linear(512, 10))

    with pytest.raises(BudgetError, match="with 2 samples") as caught:
        penstock.plan(CASES["mlp"].sample, batch_size="max", model=normed, device_memory="1050 KiB", loss=loss_of)
    plan = penstock.plan(
        CASES["mlp"].sample, batch_size="max", model=normed, device_memory=caught.value.least, loss=loss_of
    )
    assert plan.batch_size == 2


# ---------------------------------------- how a sample becomes arguments


class Pair(Module):  # type: ignore[misc]  # torch is Any to the type checker
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, left: Any, right: Any) -> Any:
        assert left.shape[1:] == right.shape[1:] == (8,)
        return self.layer(left) - self.layer(right)


class OwnLoss(Module):  # type: ignore[misc]  # torch is Any to the type checker
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, left: Any, labels: Any = None) -> Any:
        output = self.layer(left)
        return {"logits": output, "loss": functional.cross_entropy(output, labels)}


EIGHT = np.zeros(8, np.float32)


@pytest.mark.parametrize(
    ("sample", "model", "loss", "named"),
    [
        (EIGHT, lambda: nn.Linear(8, 4), None, "the mean square of the output"),
        ((EIGHT,), lambda: nn.Linear(8, 4), None, "the mean square of the output"),
        ((EIGHT, 3), lambda: nn.Linear(8, 4), None, "cross_entropy"),
        ((EIGHT, np.zeros(4, np.float32)), lambda: nn.Linear(8, 4), None, "mse_loss"),
        ((EIGHT, EIGHT), Pair, None, "the mean square of the output"),
        ((EIGHT, EIGHT, 3), Pair, None, "cross_entropy"),
        ((EIGHT, EIGHT, 3), Pair, lambda output, y: output.sum() + y.sum(), "as given"),
        ({"right": EIGHT, "left": EIGHT, "y": 3, "name": "a.png"}, Pair, None, "cross_entropy"),
        ({"left": EIGHT, "labels": 3}, OwnLoss, None, "the model's own"),
        ((EIGHT, 3), lambda: nn.Linear(8, 4), nn.CrossEntropyLoss(weight=torch.ones(4)), "as given"),
        ((EIGHT, EIGHT), lambda: nn.Linear(8, 4), lambda output, y: (output - y[:, :4]).abs(), "as given"),
    ],
)  # fmt: skip
def test_samples_become_inputs_and_targets(sample: Any, model: Any, loss: Any, named: str) -> None:
    plan = penstock.plan(sample, batch_size=4, model=model, device_memory="64 MiB", loss=loss)
    assert f"traced without running it, without an optimizer's state, loss: {named}" in str(plan).replace("\n    ", " ")


# ---------------------------------------- what cannot be traced


class Branching(Module):  # type: ignore[misc]  # torch is Any to the type checker
    """Its way depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 1024), nn.Linear(1024, 10)

    def forward(self, x: Any) -> Any:
        hidden = self.first(x).relu()
        return self.second(hidden) if hidden.sum().item() > -1 else self.second(hidden) * 0


@pytest.mark.parametrize("given", ["class", "instance"])
def test_a_model_that_looks_at_its_data_is_measured(given: str) -> None:
    model: Any = Branching if given == "class" else Branching()
    sample = CASES["mlp"].sample
    plan = penstock.plan(sample, batch_size="max", model=model, device_memory="64 MiB", optimizer="adam", loss=loss_of)
    note = plan.notes[1]
    assert "could not be traced" in note
    assert "measured with 4, 8, 16 samples and gone on in a straight line, with a margin of 15%" in note
    measured = train(Branching, torch.optim.Adam, sample, plan.batch_size)
    assert measured <= MiB(64)
    assert plan.device_total_bytes <= 1.2 * measured


def test_a_recurrent_net_is_measured_since_its_kernel_hides_what_it_keeps() -> None:
    class Recurrent(Module):  # type: ignore[misc]  # torch is Any to the type checker
        def __init__(self) -> None:
            super().__init__()
            self.recurrent, self.out = nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 10)

        def forward(self, x: Any) -> Any:
            return self.out(self.recurrent(x)[0][:, -1])

    sample = np.zeros((20, 16), np.float32), 3
    plan = penstock.plan(
        sample, batch_size="max", model=Recurrent, device_memory="16 MiB", optimizer="sgd", loss=loss_of
    )
    measured = train(Recurrent, OPTIMIZERS["sgd"], sample, plan.batch_size)
    assert measured <= MiB(16)
    assert plan.device_total_bytes <= 1.25 * measured


def test_a_lazy_layer_is_measured() -> None:
    def lazy() -> Any:
        return nn.Sequential(nn.LazyLinear(16), nn.Linear(16, 4))

    plan = penstock.plan((EIGHT, 3), batch_size=8, model=lazy, device_memory="64 MiB", optimizer="adam")
    assert "could not be traced" in str(plan)
    assert dict(plan.model_parts)["parameters"] == 4 * (8 * 16 + 16 + 16 * 4 + 4)


def test_a_step_of_numpy_is_run_and_watched() -> None:
    def step(x: Any, y: Any) -> Any:
        wide = np.repeat(x, 64, axis=1)  # 64 times the batch
        return wide.sum() + y.sum()

    sample = np.zeros(4096, np.float32), 3
    plan = penstock.plan(sample, batch_size="max", memory="2 GiB", model=step, device_memory="256 MiB")
    assert "measured with" in plan.notes[1]
    each = 64 * 4096 * 4
    assert 0.7 * MiB(256) / each <= plan.batch_size <= MiB(256) / each
    with pytest.raises(TypeError, match="optimizer belongs to a torch model"):
        penstock.plan(sample, batch_size=4, model=step, optimizer="adam")


def test_a_step_of_jax_is_run_and_watched() -> None:
    jax = pytest.importorskip("jax", reason="jax is not installed")
    weights = jax.numpy.ones((1024, 4096))

    def loss(weights: Any, x: Any) -> Any:
        return jax.numpy.tanh(x @ weights).sum() ** 2

    gradient = jax.jit(jax.grad(loss))
    sample = np.zeros(1024, np.float32)
    plan = penstock.plan(
        sample, batch_size="max", memory="1 GiB", model=lambda x: gradient(weights, x), device_memory="128 MiB"
    )
    # The gradient of the weights is 16 MiB whatever the batch; each sample has at least its row of tanh for a moment.
    assert 1 <= plan.batch_size <= (MiB(128) - MiB(16)) // (4096 * 4)


@pytest.mark.leaves("thread", "fd", "mapping", reason="the framework's own, kept by it")
@pytest.mark.parametrize("to", ["numpy", "torch", "jax", "tinygrad:CPU"])
@pytest.mark.parametrize("cast", [None, {"x": penstock.OnDevice("float16")}], ids=["as they are", "cast there"])
def test_a_step_is_run_on_what_the_feed_hands_out(to: str, cast: Any) -> None:
    framework = to.partition(":")[0]
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    if framework == "tinygrad" and shutil.which("clang") is None:
        pytest.skip("tinygrad's CPU device needs clang (apt install clang)")
    seen: list[Any] = []

    def step(*, x: Any, day: Any, name: Any) -> Any:
        seen.append((type(x), x.dtype, getattr(x, "device", None), tuple(x.shape)[1:], type(day), type(name)))
        return (x + 1).sum()

    def load(i: int) -> Any:
        return {"x": np.full((3, 4), i, np.float32), "day": np.datetime64("2020-01-01"), "name": "a"}

    with Feed(
        range(8), load, batch_size=4, memory="256 MiB", num_workers=0, to=to, cast=cast,
        model=step, device_memory="64 MiB",
    ) as feed:  # fmt: skip
        assert feed.plan.batch_size == 4
        planned = set(seen)
        for batch in feed:
            step(**batch)
    assert len(planned) == 1
    assert planned == set(seen)


# ---------------------------------------- errors in what was given


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": 3}, TypeError, "model=3 cannot be called: give a torch model, its class"),
        ({"model": nn.Linear}, TypeError, r"model=Linear needs arguments: .*lambda: Linear\(\.\.\.\)"),
        ({"optimizer": "adam"}, TypeError, "optimizer is part of a model's step"),
        ({"model": mlp, "optimizer": "adm"}, ValueError, "optimizer='adm' is not known: torch has .*adam"),
        ({"model": mlp, "optimizer": "lbfgs"}, TypeError, "optimizer LBFGS runs the model again within its own step"),
        ({"model": mlp, "optimizer": 3}, TypeError, "optimizer=3 is not known: give a torch optimizer"),
        ({"model": mlp, "optimizer": list}, TypeError, r"which has no step\(\) and zero_grad\(\)"),
        ({"model": mlp, "device_memory": "lots"}, ValueError, "device_memory='lots' cannot be read as a size"),
        (
            {"model": lambda: nn.Linear(9, 4)},
            PenstockError,
            r"a step of the model failed with a batch of 2 samples.*mat1 and mat2 shapes cannot be multiplied",
        ),
        (
            {"model": mlp, "loss": lambda output, y: "no"},
            PenstockError,
            "loss gave 'no', not a tensor: it is called with the output and the target",
        ),
        (
            {"model": mlp, "loss": lambda output, y: [output]},
            PenstockError,
            r"loss gave a list of float32\[\d, 10\], not",
        ),
        (
            {"model": mlp, "loss": "mse_loss"},
            TypeError,
            "'mse_loss' is text: give .* loss=torch.nn.functional.mse_loss$",
        ),
        ({"model": mlp, "loss": "mse", "train": False}, TypeError, "'mse' is text: give .*functional.cross_entropy$"),
        ({"model": mlp, "loss": nn.MSELoss}, TypeError, r"loss=MSELoss is a class, .*: give loss=MSELoss\(\)"),
        ({"model": mlp, "loss": torch.zeros(3)}, TypeError, r"loss=float32\[3\] cannot be called: give a function"),
        (
            {"model": mlp().requires_grad_(False)},
            ValueError,
            "nothing to train, as none of its 6 parameters has requir",
        ),
        (
            {"model": nn.ReLU},
            ValueError,
            "nothing to train, as it has no parameters: give one that has, or .*train=False",
        ),
        ({"model": nn.ReLU, "optimizer": "adam"}, ValueError, "nothing to train, as it has no parameters"),
        (
            {"model": lambda: Branching().requires_grad_(False)},
            ValueError,
            "nothing to train, as none of its 4 parameters has requires_grad: set it for those to train, or give",
        ),
        (
            {"model": mlp().requires_grad_(False), "optimizer": lambda p: torch.optim.SGD([w for w in p if w.grad_fn])},
            ValueError,
            "nothing to train, as none of its 6 parameters",
        ),
        (
            {"model": mlp, "optimizer": lambda _: torch.optim.SGD([])},
            ValueError,
            "has no parameters, while 6 of the model can be trained: let it take these, or give only its class",
        ),
        (
            {"model": mlp, "optimizer": lambda _: torch.optim.SGD([{"params": []}])},
            ValueError,
            "has no parameters, while 6 of the model can be trained",
        ),
        (
            {"model": mlp, "optimizer": list(mlp().parameters())},
            TypeError,
            r"optimizer=a list of float32\[512, 256\], float32\[512\], .*, \.\.\. is not known: give a torch optimizer",
        ),
        ({"model": torch.zeros(3)}, TypeError, r"model=float32\[3\] cannot be called"),
        (
            {"model": lambda: Around(mlp(), lambda layer, x: {"classes": layer(x).argmax(1)})},
            TypeError,
            r"the model gives a dict of 'classes': int64\[\d\], of which nothing can be trained: give loss=",
        ),
        (
            {"model": lambda: Around(mlp(), lambda layer, x: layer(x).detach())},
            ValueError,
            r"the loss \(cross_entropy\) has no gradient, though the model has parameters to train: .*detach\(\)",
        ),
    ],
)
def test_a_wrong_argument_says_what_to_give(options: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"batch_size": 4, "device_memory": "64 MiB", **options}
    if "model" not in options:
        del given["device_memory"]
    with pytest.raises(error, match=message):
        penstock.plan(CASES["mlp"].sample, **given)


# ---------------------------------------- wrappers, other devices


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    ("sample", "model", "message"),
    [
        (np.zeros(16, np.uint8), lambda: nn.Linear(16, 4), r"uint8\[16\], .* wants float32: give cast='float32'"),
        (np.zeros(16), nn.Linear(16, 4), r"multiplies float64 with float32.* give cast='float32'"),
        ((np.zeros(16, np.int64), 3), nn.Linear(16, 4), r"multiplies int64 with float32.* give cast=\{0: 'float32'\}"),
        (np.zeros(16, np.float32), nn.Linear(16, 4).bfloat16(), r"with bfloat16.* give cast='bfloat16'"),
        (np.zeros((16, 3), np.uint8), nn.LayerNorm(3), r"normalizes uint8.* give cast='float32'"),
        (
            {"input": np.zeros((3, 8, 8), np.uint8), "y": 1},
            nn.Conv2d(3, 4, 3),
            r"unsigned char.* give cast=\{'input': 'float32'\} \(penstock\.OnDevice",
        ),
        (np.zeros(16, np.float32), nn.Embedding(16, 4), r"got torch\.FloatTensor.* give cast='int64'"),
        (np.datetime64("2020-01-01"), nn.Linear(16, 4), r"must be Tensor, not numpy\.ndarray.* is datetime64"),
    ],
    ids=["uint8", "float64", "int64", "bfloat16 model", "norm", "conv", "embedding", "dates"],
)
def test_a_sample_of_a_type_that_the_model_does_not_take_is_told_what_to_cast(
    sample: Any, model: Any, message: str, train: bool
) -> None:
    with pytest.raises(penstock.PenstockError, match=message):
        penstock.plan(
            sample, batch_size="max", memory="256 MiB", model=model, device_memory="64 MiB", train=train, loss=None
        )


def test_a_cast_makes_the_sample_fit_the_model_in_a_plan_and_in_a_feed() -> None:
    options: dict[str, Any] = {
        "batch_size": 4,
        "memory": "256 MiB",
        "model": nn.Linear(16, 4),
        "device_memory": "9 MiB",
    }
    sample = np.zeros(16, np.uint8)
    assert penstock.plan(sample, cast="float32", **options).model_bytes > 0
    feed = penstock.Feed(range(8), lambda _: sample, to="torch", num_workers=0, **options)
    with feed, pytest.raises(penstock.PenstockError, match=r"multiplies uint8 with float32"):
        next(iter(feed))
    for cast in ("float32", penstock.OnDevice("float32")):
        with penstock.Feed(range(8), lambda _: sample, to="torch", num_workers=0, cast=cast, **options) as feed:
            assert all(model_takes(options["model"], batch) for batch in feed)


def model_takes(model: Any, batch: Any) -> bool:
    return tuple(model(batch).shape) == (4, 4)


def test_a_wrong_shape_is_one_error_and_nothing_in_the_log(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Tensors without memory log a traceback of their own before they raise."""
    options: dict[str, Any] = {"batch_size": "max", "memory": "256 MiB", "device_memory": "64 MiB"}
    with pytest.raises(penstock.PenstockError, match=r"cannot be multiplied \(4x17 and 16x4\).* is float32\[17\]"):
        penstock.plan(np.zeros(17, np.float32), model=nn.Linear(16, 4), **options)
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")
    assert not logging.getLogger("torch._subclasses.fake_tensor").disabled


def test_a_tensor_that_a_model_keeps_elsewhere_is_warned_of() -> None:
    kept: list[Any] = []

    class Keeps(Module):  # type: ignore[misc]  # torch is Any to the type checker
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x: Any) -> Any:
            kept.append(torch.ones(3))
            return self.layer(x)

    with pytest.warns(UserWarning, match="put a tensor somewhere outside of itself") as caught:
        penstock.plan(EIGHT, batch_size="max", memory="64 MiB", model=Keeps, device_memory="1 MiB")
    assert len(caught) == 1


def test_autocast_around_the_plan_is_counted() -> None:
    plain = penstock.plan((IMAGE, 3), batch_size=32, model=convolutional, device_memory="1 GiB")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = penstock.plan((IMAGE, 3), batch_size=32, model=convolutional, device_memory="1 GiB")
    assert half.model_bytes < 0.8 * plain.model_bytes


def test_a_wrapped_model_is_counted_with_the_buckets_of_its_wrapper(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = convolutional()
        options: dict[str, Any] = {"batch_size": 16, "device_memory": "1 GiB"}
        plain = dict(penstock.plan((IMAGE, 3), model=model, **options).model_parts)
        wrapped = dict(
            penstock.plan((IMAGE, 3), model=nn.parallel.DistributedDataParallel(model), **options).model_parts
        )
        buckets = wrapped.pop("buckets of DDP")
        assert wrapped == plain
        assert buckets == sum(p.numel() * 4 for p in model.parameters())
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow  # torch.compile imports for seconds
def test_a_compiled_model_is_traced_as_the_one_inside() -> None:
    model = convolutional()
    options: dict[str, Any] = {"batch_size": 16, "device_memory": "1 GiB"}
    inside = penstock.plan((IMAGE, 3), model=model, **options)
    assert penstock.plan((IMAGE, 3), model=torch.compile(model), **options).model_parts == inside.model_parts


def test_on_a_gpu_optimizers_go_over_all_parameters_at_once() -> None:
    """Nothing here has a GPU: the same step is run on the CPU the way an optimizer goes there."""
    from penstock._core.spec import Spec
    from penstock._model import _batches
    from penstock._model.traced import DEVICE_FIXED_BYTES, Tracer

    case = CASES["mlp"]
    tracer = Tracer(
        mlp(), optimizer="adam", loss=loss_of, train=True, batch=_batches(Spec.of(case.sample)), device="cuda"
    )
    step = tracer.step(64)
    assert dict(step.parts)["margin"] >= DEVICE_FIXED_BYTES
    predicted = step.nbytes - dict(step.parts)["margin"]
    measured = train(mlp, functools.partial(torch.optim.Adam, foreach=True), case.sample, 64, batches=1)
    assert predicted == pytest.approx(measured, rel=0.05)


# ---------------------------------------- in a feed


def load(i: int) -> Any:
    return np.full((3, 32, 32), i, np.float32), i % 10


def test_a_feed_takes_the_largest_batch_that_its_model_leaves_room_for() -> None:
    with Feed(
        range(500), load, batch_size="max", memory="512 MiB", num_workers=0, to="torch",
        model=convolutional(), optimizer="adam", device_memory="32 MiB",
    ) as feed:  # fmt: skip
        plan = feed.plan
        assert "bound by the device" in str(plan)
        # On the CPU a model reads its batch from the slot itself, so nothing is counted for it here.
        assert plan.device_total_bytes == plan.model_bytes <= MiB(32)
        assert [len(y) for _, y in feed] == [plan.batch_size] * (500 // plan.batch_size) + [500 % plan.batch_size]
        assert len(feed) == -(-500 // plan.batch_size)
        measured = train(convolutional, torch.optim.Adam, load(0), plan.batch_size) - 2 * plan.batch_bytes
        assert plan.model_bytes == pytest.approx(measured, rel=0.10)


def test_a_feed_whose_model_cannot_step_says_so_before_the_first_batch() -> None:
    with (
        Feed(range(50), load, batch_size=20, num_workers=0, model=convolutional, device_memory="1 MiB") as feed,
        pytest.raises(BudgetError, match="device_memory=1048576"),
    ):
        next(iter(feed))
    with pytest.raises(TypeError, match="model needs to know the form of a batch beforehand"):
        Feed(range(50), load, collate_fn="pad", model=convolutional)


RANKS = """
import os, sys
import numpy as np, torch
torch.set_num_threads(1)
from penstock import Feed
rank, folder = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
def load(i): return np.zeros(256, np.float32), i % 10
def make(): return torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
if rank == 1:
    torch.distributed.barrier()  # the other one plans first, and waits for this one without taking part in it
options = dict(batch_size="max", memory="256 MiB", num_workers=0, shard=(rank, 2), model=make)
with Feed(range(100_000), load, device_memory=("8 MiB", "6 MiB")[rank], **options) as feed:
    if rank == 0:
        from threading import Thread
        Thread(target=torch.distributed.barrier).start()
    note = feed.plan.notes[0].partition(":")[2].partition(",")[0].strip()
    print(feed.plan.batch_size, note, len(next(iter(feed))[0]))
torch.distributed.destroy_process_group()
"""


def test_all_ranks_get_the_batch_size_of_the_one_with_the_least_room(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS, str(rank), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=60) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
    (size, first_note), (other, second_note) = (out.strip().split(" ", 1) for out, _ in said)
    assert size == other
    assert first_note == f"bound by a rank that has less room {size}"
    assert second_note == f"bound by the device {size}"
