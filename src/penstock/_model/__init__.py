"""What a model's step takes on its device: traced without allocating, or measured. Runs in the parent, once for a plan.

``with_model`` is the way in. ``inputs`` says how a sample becomes arguments, ``torch_step`` what a step is, ``traced``
counts it on fake tensors, ``workspace`` adds what these cannot show, ``measured`` runs what cannot be traced, ``gauge``
watches it, ``ranks`` lets all ranks agree. A framework is imported only if the model is one of its own. Which sizes are
looked at is decided by ``penstock._core.fit``, what becomes of them by ``penstock._core.plan``.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from penstock._core import machine
from penstock._core.budget import Size, format_bytes, parse_size
from penstock._core.errors import BudgetError, PenstockError, said, shown
from penstock._core.fit import Asked, Need, Step, largest
from penstock._core.plan import Footprint, Request, device_batch_bytes, solve
from penstock._core.spec import Spec
from penstock._model.inputs import Refused, described, takes_nothing
from penstock._model.measured import MARGIN, Batch, measured_module, measured_step
from penstock._model.ranks import smallest

__all__ = ["with_model"]

# Of what a device has free, when no budget was given: the rest is for what its allocator breaks up.
DEVICE_SHARE: Final = 0.9


class _Steps(Protocol):
    """Whoever can tell what a step takes."""

    def step(self, rows: int) -> Step: ...


def with_model(
    request: Request, footprint: Footprint, spec: Spec, asked: Asked, *, size: Size | None, ranks: bool
) -> Request:
    """The request, with what the model leaves room for in a budget of ``size``. BudgetError if that is nothing."""
    budget = _budget(asked, size, host=request.memory)
    most = request.batch_size
    if most == "max":
        try:
            most = solve(dataclasses.replace(request, device_memory=None), footprint).batch_size
        except BudgetError:
            return request  # solving it says why
    search = _Search(asked, spec, budget, most, partial(device_batch_bytes, request, footprint))
    need = search.chosen(ranks=ranks) if request.batch_size == "max" else search.checked(most)
    return dataclasses.replace(request, device_memory=budget, need=need)


def _budget(asked: Asked, size: Size | None, *, host: int) -> int:
    """The bytes that the model, its step and its batches may take together. ``host`` is the feed's own budget."""
    free = _cuda_free(asked)
    if free is not None:
        return parse_size(DEVICE_SHARE if size is None else size, available=free, name="device_memory")
    # On the CPU the model shares the machine with the feed.
    left = max(1, machine.available_bytes() - host)
    return left if size is None else parse_size(size, available=left, name="device_memory")


class _Search:
    """Looks for the largest batch of one model."""

    def __init__(self, asked: Asked, spec: Spec, budget: int, most: int, batch_bytes: Callable[[int], int]) -> None:
        self._asked, self._budget, self._most, self._batch_bytes = asked, budget, most, batch_bytes
        self._found: dict[int, Step] = {}
        self._who = _who(asked, spec, most, budget)
        self._buffers = 0 if asked.in_place and self._who.device == "cpu" else asked.buffers

    def chosen(self, *, ranks: bool) -> Need:
        """The largest batch that fits."""
        rows = self._largest(self._most)
        if rows == 0:
            raise self._too_large(min(self._found))
        bound = "host" if rows == self._most else "device"
        if ranks and (agreed := smallest(rows, self._asked)) < rows:
            rows, bound = agreed, "ranks"
        return self._need(rows, bound)

    def checked(self, rows: int) -> Need:
        """The batch that was asked for."""
        if self._total(rows) > self._budget:
            raise self._too_large(rows)
        return self._need(rows, "asked")

    def _need(self, rows: int, bound: str) -> Need:
        return Need(step=self._step(rows), buffers=self._buffers, bound=bound, notes=(self._who.note(),))

    def _largest(self, most: int) -> int:
        search = largest(self._budget, most)
        rows = next(search)
        while True:
            try:
                total = self._total(rows)
            except Exception:
                if rows > 1 or not self._found:
                    raise
                total = self._budget + 1  # a model that cannot take a single sample, such as one with batch norm
            try:
                rows = search.send(total)
            except StopIteration as stop:
                found: int = stop.value
                return found

    def _step(self, rows: int) -> Step:
        if rows not in self._found:
            self._found[rows] = self._who.steps.step(rows)
        return self._found[rows]

    def _total(self, rows: int) -> int:
        return self._step(rows).with_batches(self._batch_bytes(rows), self._buffers)

    def _too_large(self, rows: int) -> BudgetError:
        least, step = self._total(rows), self._step(rows)
        parts = [f"{name} {format_bytes(size)}" for name, size in step.parts if size]
        if least > step.nbytes:
            parts.append(f"batches {format_bytes(least - step.nbytes)}")
        advice = []
        if rows > 1 and (fits := self._largest(rows - 1)):
            advice.append(f"batch_size={fits}")
        elif self._asked.train:
            advice += ["a smaller model", "an optimizer with less state"]
        samples = f"{rows:,} sample{'' if rows == 1 else 's'}"
        return BudgetError(
            f"device_memory={self._budget} ({format_bytes(self._budget)}) is too small: a step of this model with "
            f"{samples} takes {least} ({format_bytes(least)}): {', '.join(parts)}. Give device_memory={least}"
            f"{''.join(f' or {thing}' for thing in advice)}.",
            least=least,
        )


class _Who(NamedTuple):
    steps: _Steps
    note: Callable[[], str]
    """How it was found; known when it was."""
    device: str


def _who(asked: Asked, spec: Spec, most: int, budget: int) -> _Who:
    """Who can tell what a step takes."""
    model, make = _resolved(asked.model)
    if not _is_module(model):
        return _running(asked, model, spec, most)
    from penstock._model.torch_step import check_loss
    from penstock._model.traced import Mismatch, Tracer

    check_loss(asked.loss)
    kind = "a training step" if asked.train else "an inference step"
    given = {"optimizer": asked.optimizer, "loss": asked.loss, "train": asked.train, "batch": _batches(spec)}
    tracer = Tracer(model, device=asked.device, **given)
    try:
        tracer.step(min(2, most))
    except Refused as error:
        raise error.__cause__ or error from None
    except Mismatch as error:
        raise PenstockError(
            f"a step of the model would fail with these samples: {error}, which torch refuses. "
            f"{_advice(spec, tracer.parameter_type)}"
        ) from None
    except Exception as error:  # user code on tensors without data: what it raises has no limits
        why = f"{kind} could not be traced ({said(error).splitlines()[0][:160]})"
        if tracer.parameter_bytes > budget:  # then it must not be run either
            least = tracer.parameter_bytes
            raise BudgetError(
                f"device_memory={budget} ({format_bytes(budget)}) is too small: the parameters of this model alone "
                f"take {least} ({format_bytes(least)}). Give more, or a smaller model.",
                least=least,
            ) from error
        try:
            measured = measured_module(model, make, device=tracer.device, most=most, budget=budget, **given)
        except Refused as refused:
            raise refused.__cause__ or refused from None
        except PenstockError as failed:
            if type(failed) is PenstockError:
                # An embedding is asked for rows by their numbers.
                wanted = "int64" if "scalar types: Long" in str(failed) else tracer.parameter_type
                raise PenstockError(f"{failed}. {_advice(spec, wanted)}") from failed.__cause__
            raise
        return _Who(measured, lambda: _measured_note(why, measured.sizes), tracer.device)

    def note() -> str:
        optimizer = ", without an optimizer's state" if asked.train and asked.optimizer is None else ""
        loss = f", loss: {tracer.loss_name}" if asked.train else ""
        unseen = "" if tracer.device == "cpu" else "; nobody has compared this with a GPU yet"
        return (
            f"{kind} on {tracer.device}, traced without running it{optimizer}{loss}; margin: {tracer.margin:.0%} of "
            f"its activations{unseen}"
        )

    return _Who(tracer, note, tracer.device)


def _advice(spec: Spec, wanted: str) -> str:
    """What a sample is, and how the parts of it that are not what the parameters are become that."""
    # A single integer is a label as a rule, and right as it is.
    others = [
        leaf
        for leaf in spec.leaves
        if wanted and leaf.kind == "array" and leaf.stored.name != wanted and (leaf.shape or leaf.stored.kind == "f")
    ]
    said = f"A sample is {spec}"
    if not others:
        return said
    parts = {int(leaf.path) if leaf.path.isdigit() else leaf.path: wanted for leaf in others[:4]}
    cast = repr(wanted) if "" in parts else repr(parts)
    return (
        f"{said}, and the model wants {wanted}: give cast={cast} (penstock.OnDevice({wanted!r}) in it is cast after "
        "it has travelled) for what should be that too, or let the model cast"
    )


def _running(asked: Asked, step: Callable[..., Any], spec: Spec, most: int) -> _Who:
    for name, value in (("optimizer", asked.optimizer), ("loss", asked.loss)):
        if value is not None:
            raise TypeError(
                f"{name} belongs to a torch model, but model={shown(step, 100)} is a function that runs a whole step: "
                f"leave {name} out, or give the torch model itself"
            )
    measured = measured_step(step, batch=_batches(spec), leaf=asked.leaf, most=most)
    what = "the step was run in this process, and what it held before is not counted"
    return _Who(measured, lambda: _measured_note(what, measured.sizes), "cpu")


def _resolved(model: Any) -> tuple[Any, Callable[[], Any] | None]:
    """A torch model, without memory of its own if that can be, and what made it; or a function that runs a step."""
    if not callable(model):
        raise TypeError(
            f"model={described(model)} cannot be called: give a torch model, its class, a function that makes one, or "
            "a function that runs a step with a batch"
        )
    if _is_module(model):
        return model, None
    if not takes_nothing(model):
        if isinstance(model, type):
            raise TypeError(
                f"model={model.__name__} needs arguments: give a function that makes one, such as lambda: "
                f"{model.__name__}(...), or the model itself"
            )
        return model, None
    if "torch" not in sys.modules:
        made = model()  # it may import torch itself
        return made, model if _is_module(made) else None
    from penstock._model.traced import built

    made = built(model)
    return (made, model) if _is_module(made) else (model(), None)


def _is_module(model: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def _measured_note(what: str, sizes: list[int]) -> str:
    tried = ", ".join(map(str, sizes))
    return f"{what}: measured with {tried} samples and gone on in a straight line, with a margin of {MARGIN:.0%}"


def _batches(spec: Spec) -> Batch:
    def batch(rows: int, leaf: Callable[[tuple[int, ...], Any], Any]) -> Any:
        leaves: list[Any] = [
            leaf((rows, *form.shape), form.stored) if form.kind == "array" else [""] * rows for form in spec.leaves
        ]
        return spec.build(leaves)

    return batch


def _cuda_free(asked: Asked) -> int | None:
    """Bytes that are free on the GPU of a model; None if it has none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    if isinstance(asked.model, torch.nn.Module):
        found = next((p.device for p in asked.model.parameters()), None)
        if found is not None and found.type == "cuda":
            return int(torch.cuda.mem_get_info(found)[0])
    return int(torch.cuda.mem_get_info()[0]) if asked.device == "cuda" else None
