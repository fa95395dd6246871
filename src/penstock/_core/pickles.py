"""How the user's own things travel to another interpreter: by name where both know it, else by value. Runs everywhere.

Cloudpickle does the work; here is when it is needed, and what it cannot do by itself. What belongs to ``__main__``
goes by value, because another interpreter's ``__main__`` is another module.
"""

from __future__ import annotations

import functools
import inspect
import io
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any, Final

import cloudpickle

__all__ = ["by_value", "dumps", "introduce"]

_MOST_SEEN: Final = 1000  # some objects have every attribute they are asked for, and each of those has too
_INSIDE: Final = ("__func__", "func", "function", "__wrapped__")  # methods, partials, penstock.into, decorators


def dumps(value: Any) -> bytes:
    """A pickle that the other interpreter can read, also of things defined in ``__main__``."""
    try:
        data = pickle.dumps(value, 5)
    except Exception:  # noqa: BLE001 - what plain pickle refuses (a lambda, a local class) cloudpickle mostly can
        return by_value(value)
    # A path that has the word in it merely takes the slower way. From the end: it is found in a third of the time.
    return by_value(value) if data.rfind(b"__main__") >= 0 else data


def by_value(value: Any) -> bytes:
    """A pickle with all that other interpreters cannot import inside."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def introduce(function: Any) -> None:
    """Before a fork: let the classes that a function uses be known again when they come back by value.

    Cloudpickle knows a class again by an identity that it gives it when it first sends it. A forked worker that was
    never sent anything would send back strangers.
    """
    know = getattr(cloudpickle.cloudpickle, "_get_or_create_tracker_id", None)
    todo, seen = [function], set[int]()
    while todo and know is not None and len(seen) < _MOST_SEEN:
        thing = todo.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, type):
            if not _importable(thing):
                know(thing)
        elif isinstance(thing, types.FunctionType):
            try:
                used = inspect.getclosurevars(thing)
            except ValueError:  # a variable of the function around it is not set yet
                continue
            todo += (*used.nonlocals.values(), *used.globals.values())
        elif callable(thing):
            todo += (type(thing), *(getattr(thing, name, None) for name in _INSIDE))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it carries no types
    """Cloudpickle that also takes cached functions (``functools.lru_cache``), which pickle knows by name only."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, functools._lru_cache_wrapper) and not _importable(obj):
            return _cached, (obj.__wrapped__, *obj.cache_parameters().values())
        return super().reducer_override(obj)


def _importable(thing: Any) -> bool:
    found: Any = sys.modules.get(thing.__module__) if thing.__module__ != "__main__" else None
    for name in thing.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is thing


def _cached(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)
