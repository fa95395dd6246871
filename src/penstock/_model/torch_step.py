"""A step of a torch model as a user writes it: what makes model, optimizer and loss, and the loop. Imports torch.

The same loop is run with fake tensors by ``traced`` and with real ones by ``measured``, so both count the same things.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch

from penstock._core.errors import said, shown
from penstock._model.inputs import Refused, arguments, described, takes_nothing

__all__ = ["Mark", "check_loss", "default_loss", "is_module", "keeps_state", "make_optimizer", "run_steps", "unwrapped"]

Mark = Callable[[str, Iterable[Any]], None]
"""Told which tensors turned out to be gradients, or state of the optimizer."""

# The first step makes the optimizer's state. In the second it is there from the start, and so is the first's output.
STEPS: Final = 2


def is_module(model: object) -> bool:
    """Whether this is a torch model."""
    return isinstance(model, torch.nn.Module)


def unwrapped(model: Any) -> Any:
    """The model inside ``torch.compile`` or ``DistributedDataParallel``: what these run is not what can be traced."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            model = model.module
        else:
            return model


@contextlib.contextmanager
def keeps_state(model: Any) -> Iterator[None]:
    """Leave the generators of random numbers and the gradients of the user's model as they were."""
    grads = [(p, p.grad) for p in model.parameters()] if is_module(model) else []
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002 - it is the user's that is kept
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002 - same
        for parameter, grad in grads:
            if parameter.grad is not grad:
                parameter.grad = grad


def check_loss(loss: Any) -> None:
    """TypeError for what cannot be called with an output and a target."""
    if isinstance(loss, str):
        known = "torch.nn.functional." + (loss if hasattr(torch.nn.functional, loss) else "cross_entropy")
        raise TypeError(f"loss={shown(loss)} is text: give the function itself, such as loss={known}")
    if isinstance(loss, type):
        raise TypeError(
            f"loss={loss.__name__} is a class, and calling that makes a loss rather than computing one: give "
            f"loss={loss.__name__}()"
        )
    if loss is not None and not callable(loss):
        raise TypeError(f"loss={described(loss)} cannot be called: give a function of the output and the target")


def _nothing_to_train(parameters: list[Any]) -> str | None:
    """What to say of a model that cannot be trained; None if it can."""
    if any(p.requires_grad for p in parameters):
        return None
    what = (
        f"none of its {len(parameters)} parameters has requires_grad: set it for those to train"
        if parameters
        else "it has no parameters: give one that has"
    )
    return f"the model has nothing to train, as {what}, or give train=False (and no optimizer) for a forward pass alone"


def make_optimizer(asked: Any, parameters: list[Any], twins: Mapping[int, Any]) -> Any:
    """The optimizer over copies of the model's parameters; ``twins`` are these copies by the id of the original.

    Raises ``Refused`` for what cannot be one.
    """
    try:
        made = _optimizer(asked, parameters, twins)
        groups = getattr(made, "param_groups", None)
        if groups and not any(group["params"] for group in groups):
            raise ValueError(_without_parameters(asked, parameters))
        if made is not None and not takes_nothing(made.step):
            raise TypeError(
                f"optimizer {type(made).__name__} runs the model again within its own step (a closure), which cannot "
                "be counted: give batch_size as a number and no model"
            )
        return made
    except (TypeError, ValueError) as error:
        raise Refused from error


def _optimizer(asked: Any, parameters: list[Any], twins: Mapping[int, Any]) -> Any:
    if asked is None:
        return None
    if isinstance(asked, torch.optim.Optimizer):
        return _twin(asked, twins)
    make = _named(asked) if isinstance(asked, str) else asked
    if not callable(make):
        raise TypeError(
            f"optimizer={described(asked)} is not known: give a torch optimizer, its class, its name such as 'adam', "
            "or a function that makes one from parameters"
        )
    try:
        made = make(parameters)
    except ValueError as error:
        if "empty parameter list" not in said(error):
            raise
        raise ValueError(_without_parameters(asked, parameters)) from None
    if not (hasattr(made, "step") and hasattr(made, "zero_grad")):
        raise TypeError(f"optimizer={shown(asked)} made a {type(made).__name__}, which has no step() and zero_grad()")
    return made


def _without_parameters(asked: Any, parameters: list[Any]) -> str:
    """What to say of an optimizer that has nothing to work on."""
    trainable = sum(bool(p.requires_grad) for p in parameters)
    return _nothing_to_train(parameters) or (
        f"optimizer={described(asked)} has no parameters, while {trainable} of the model can be trained: let it take "
        "these, or give only its class"
    )


def _named(name: str) -> Any:
    kinds = {
        kind.lower(): value
        for kind, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    if name.lower() not in kinds:
        raise ValueError(f"optimizer={name!r} is not known: torch has {', '.join(sorted(kinds))}")
    return kinds[name.lower()]


def _twin(optimizer: Any, twins: Mapping[int, Any]) -> Any:
    groups = []
    for group in optimizer.param_groups:
        strangers = sum(id(p) not in twins for p in group["params"])
        if strangers:
            raise ValueError(
                f"optimizer holds {strangers} parameters that are not the model's: give the optimizer that was made "
                "with model.parameters(), or only its class"
            )
        groups.append({**group, "params": [twins[id(p)] for p in group["params"]]})
    twin = copy.copy(optimizer)
    twin.__dict__.update({k: v for k, v in vars(optimizer).items() if k not in ("state", "param_groups")})
    twin.state, twin.param_groups = defaultdict(dict), groups
    return twin


def default_loss(output: Any, target: Any) -> tuple[Any, str]:
    """A loss for an output when none was given, and what it is called."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own, "the model's own"
    functional = torch.nn.functional
    if isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor) and output.is_floating_point():
        shape, labels = output.shape, target.shape
        if labels == shape and target.is_floating_point():
            return functional.mse_loss(output, target.to(output.dtype)), "mse_loss"
        whole = not target.is_floating_point() and not target.is_complex()
        if whole and len(shape) >= 2 and labels == shape[:1] + shape[2:]:
            return functional.cross_entropy(output, target.long()), "cross_entropy"
        if whole and len(shape) >= 2 and labels == shape[:-1]:
            return functional.cross_entropy(output.flatten(0, -2), target.flatten().long()), "cross_entropy"
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    numbers = [leaf for leaf in leaves if leaf.is_floating_point()]
    if not numbers:
        raise Refused from TypeError(
            f"the model gives {described(output)}, of which nothing can be trained: give loss=, a function of the "
            "output and the target, or train=False"
        )
    squares = [leaf.square().mean() for leaf in [leaf for leaf in numbers if leaf.requires_grad] or numbers]
    return torch.stack([value.float() for value in squares]).sum(), "the mean square of the output"


def run_steps(model: Any, batch: Any, *, optimizer: Any, loss: Any, train: bool, mark: Mark) -> str:
    """Two steps with one batch; returns what the loss was."""
    given = arguments(batch, model.forward)
    name = "none"
    if not train:
        with torch.no_grad():
            for _ in range(STEPS):
                output = model(*given.args, **given.kwargs)
                if loss is not None:
                    value = _loss(loss, output, given.target)[0]
        return name
    parameters = [p for p in model.parameters() if p.requires_grad]
    for _ in range(STEPS):
        for parameter in parameters:
            parameter.grad = None
        # Both names live on into the next step, as they do in the loop that people write.
        output = model(*given.args, **given.kwargs)
        value, name = _loss(loss, output, given.target)
        if not value.requires_grad:
            raise Refused from ValueError(
                _nothing_to_train(list(model.parameters()))
                or f"the loss ({name}) has no gradient, though the model has parameters to train: something between "
                "them cuts it off, such as detach(), argmax() or torch.no_grad(). Take that out, or give train=False"
            )
        value.backward()
        mark("gradients", [p.grad for p in parameters if p.grad is not None])
        if optimizer is not None:
            optimizer.step()
            mark("optimizer state", torch.utils._pytree.tree_leaves([dict(s) for s in optimizer.state.values()]))
    return name


def _loss(loss: Any, output: Any, target: Any) -> tuple[Any, str]:
    if loss is None:
        return default_loss(output, target)
    value = loss(output) if target is None else loss(output, target)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"loss gave {described(value)}, not a tensor: it is called with the output and the target")
    return (value if value.ndim == 0 else value.mean()), "as given"
