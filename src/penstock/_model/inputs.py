"""How a batch becomes the arguments of a model and the target of its loss. Knows no framework."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Final

from penstock._core.errors import shown

__all__ = ["Arguments", "Refused", "arguments", "described", "takes_nothing"]


# So many parts of a list or a dict are told, and so many characters of anything else.
MOST_PARTS: Final = 4
MOST_CHARACTERS: Final = 100


class Refused(Exception):
    """Carries an error of what the user gave (its cause) past those who try again another way."""


@dataclasses.dataclass(frozen=True, slots=True)
class Arguments:
    """What a model is called with, and what its loss gets besides the output."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    """None: there is none, and the loss gets the output alone."""


def arguments(batch: Any, forward: Callable[..., Any]) -> Arguments:
    """An array is the input. The last of a tuple is the target, unless ``forward`` asks for all of it. Of a dict or a
    dataclass goes to the model what ``forward`` has a name for; the rest is the target.
    """
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        batch = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    if isinstance(batch, dict):
        return _by_name(batch, forward)
    if isinstance(batch, tuple | list):
        inputs = tuple(batch)
        required = _required(forward)
        if len(inputs) == 1 or required == len(inputs):
            return Arguments(inputs, {}, None)
        return Arguments(inputs[:-1], {}, inputs[-1])
    return Arguments((batch,), {}, None)


def described(value: Any) -> str:
    """Something for a message: of arrays and tensors the form, not the numbers."""
    if isinstance(value, list | tuple):
        parts = [described(part) for part in value[:MOST_PARTS]] + ["..."] * (len(value) > MOST_PARTS)
        return f"a {type(value).__name__} of {', '.join(parts) or 'nothing'}"
    if isinstance(value, dict):
        named = [f"{shown(key, MOST_CHARACTERS)}: {described(part)}" for key, part in list(value.items())[:MOST_PARTS]]
        return f"a dict of {', '.join(named + ['...'] * (len(value) > MOST_PARTS)) or 'nothing'}"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None:
        return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"
    return shown(value, MOST_CHARACTERS)


def takes_nothing(function: Callable[..., Any]) -> bool:
    """Whether something can be called without arguments, so that it makes a model rather than being one."""
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return False
    return True


def _by_name(batch: dict[str, Any], forward: Callable[..., Any]) -> Arguments:
    parameters = _parameters(forward)
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    given = {name: value for name, value in batch.items() if name in names}
    if not given:
        if not anything:
            return Arguments((batch,), {}, batch)
        given = dict(batch)
    # Names of files and the like come along in many samples; no loss reads them.
    rest = {name: value for name, value in batch.items() if name not in given and not _is_text(value)}
    target = None if not rest else next(iter(rest.values())) if len(rest) == 1 else rest
    return Arguments((), given, target)


def _is_text(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str | bytes) for text in value)


def _required(forward: Callable[..., Any]) -> int:
    parameters = _parameters(forward)
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def _parameters(forward: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):  # written in C: it takes what comes
        return []
