"""What tells a fresh cache from a stale one: fingerprints of items, of the form of a sample, and of load's code. Pure.

The items and the form must be the same, or what is kept is not served. Code is another matter: it changes without any
change in what it makes (a comment moves nothing, but a renamed variable does), so a difference there is only told.
Nothing here is a secret, and nothing is unpickled: a fingerprint is compared and that is all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import os
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np

from penstock._core.errors import shown
from penstock._core.fingerprint import fingerprint
from penstock._core.items import Picker
from penstock._core.spec import Spec, _form

__all__ = ["Identity", "code_of", "fitted", "form_of", "hash_of_items", "identify"]

# Sequences that make their items when they are asked, from a database say, are asked for so many, spread evenly.
LOOKED_AT: Final = 4096
_DEEPEST: Final = 8
_MOST_FUNCTIONS: Final = 200
_MOST_SETTINGS: Final = 1000  # more are data
_GETTERS: Final = ("fget", "fset", "func")  # of properties, and of cached ones
_INSIDE: Final = ("__func__", "func", "function", "__wrapped__")


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """What samples are made of, as far as it can be seen."""

    key: str
    items: str
    code: str
    """Empty where there is no code to look at."""


def identify(items: Any, load: Callable[..., Any] | None, *, key: str) -> Identity:
    """The identity of what this load makes of these items."""
    return Identity(key, hash_of_items(items), code_of(load))


def form_of(spec: Spec, each: int) -> dict[str, Any]:
    """The form of a sample in words that JSON knows; the same for the same form."""
    leaves = [[leaf.path, leaf.kind, list(leaf.shape), leaf.dtype.name, leaf.stored.name] for leaf in spec.leaves]
    return {"tree": _form(spec.tree), "leaves": leaves, "samples_per_item": each}


def fitted(spec: Spec, each: int, form: Any) -> Spec | None:
    """The spec with the room for texts that a form has, if that is all in which they differ; None if it is not.

    How much room a text is given follows from the first one that was seen, which is another one for every order.
    """
    theirs = form.get("leaves") if isinstance(form, dict) else None
    if not isinstance(theirs, list) or len(theirs) != len(spec.leaves):
        return None
    leaves = []
    for leaf, other in zip(spec.leaves, theirs, strict=True):
        shape = other[2] if isinstance(other, list) and len(other) > 2 else None
        if leaf.kind != "array" and isinstance(shape, list) and len(shape) == 1 and _is_width(shape[0]):
            leaf = dataclasses.replace(leaf, shape=(shape[0],))
        leaves.append(leaf)
    found = Spec(spec.tree, tuple(leaves))
    return found if form_of(found, each) == form else None


def _is_width(width: Any) -> bool:
    return type(width) is int and 0 < width < 2**31


# ---- items


def hash_of_items(items: Any) -> str:
    """A hash over what items are: all of them where they are at hand, else some."""
    digest = hashlib.blake2b(digest_size=16)
    if not isinstance(items, Picker):
        return _hash_of_source(items)
    raw = items.raw
    if hasattr(raw, "iloc") and hasattr(raw, "tolist"):  # pandas
        raw = raw.tolist()
        items = Picker(raw)
    digest.update(f"{len(raw)}\0".encode())
    if isinstance(raw, range):
        digest.update(repr(raw).encode())
    elif isinstance(raw, np.ndarray) and not raw.dtype.hasobject:
        digest.update(f"{raw.dtype.str}{raw.shape}".encode())
        for start in range(0, len(raw), 65536):
            digest.update(np.ascontiguousarray(raw[start : start + 65536]).tobytes())
    else:
        everything = isinstance(raw, list | tuple | np.ndarray)
        places = np.arange(len(raw)) if everything else _spread(len(raw), LOOKED_AT)
        for start in range(0, len(places), 8192):
            _feed_all(digest, items(places[start : start + 8192]))
    return digest.hexdigest()


def _hash_of_source(source: Any) -> str:
    """A source knows best what it is; how it is read, and when its files were written, changes what comes of it too."""
    digest = hashlib.blake2b(str(fingerprint(source)).encode(), digest_size=16)
    if (settings := getattr(source, "settings", None)) is not None:
        _feed(digest, settings(), _DEEPEST)
    for path in getattr(source, "written", tuple)():
        with contextlib.suppress(OSError):  # told of when it is read
            digest.update(f"{os.stat(path).st_mtime_ns}\0".encode())
    return digest.hexdigest()


def _spread(length: int, most: int) -> Any:
    return np.unique(np.linspace(0, length - 1, min(length, most)).astype(np.int64)) if length else np.arange(0)


def _feed_all(digest: Any, values: Iterable[Any]) -> None:
    for value in values:
        if type(value) is str:  # by far the most common, and worth the shortest way
            digest.update(value.encode("utf-8", "surrogatepass"))
            digest.update(b"\0s")
        else:
            _feed(digest, value, _DEEPEST)


def _feed(digest: Any, value: Any, deep: int) -> None:
    """Add a value to a hash by what it says, never by where it lies in memory."""
    if deep == 0:
        return
    kind = type(value)
    digest.update(f"\0{kind.__qualname__}:".encode())
    if isinstance(value, str):
        digest.update(value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, bytes | bytearray):
        digest.update(value)
    elif value is None or isinstance(value, bool | int | float | complex | enum.Enum | np.generic | range):
        digest.update(repr(value).encode())
    elif isinstance(value, os.PathLike):
        digest.update(os.fsencode(value))
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        digest.update(f"{value.dtype.str}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, dict):
        for key in value:
            _feed(digest, key, deep - 1)
            _feed(digest, value[key], deep - 1)
    elif isinstance(value, set | frozenset):
        for text in sorted(map(repr, value)):
            digest.update(text.encode())
    elif isinstance(value, list | tuple):
        digest.update(f"{len(value)}".encode())
        for part in value:
            _feed(digest, part, deep - 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _feed(digest, getattr(value, field.name), deep - 1)
    elif isinstance(getattr(value, "__dict__", None), dict) and not callable(value):
        _feed(digest, vars(value), deep - 1)


# ---- code


def code_of(load: Any) -> str:
    """A hash of a function and the functions of the same program that it calls; empty where there is nothing to see.

    What it calls by way of a module or of a class counts, as far as names tell: ``module.f``, all methods of a class.
    It holds for one version of Python: each has its own bytecode.
    """
    if load is None:
        return ""
    digest = hashlib.blake2b(digest_size=16)
    todo: list[Any] = [load]
    seen: set[int] = set()
    found = False
    home = _home(load)
    while todo and len(seen) < _MOST_FUNCTIONS:
        thing = todo.pop(0)
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, types.FunctionType):
            found = True
            _feed_code(digest, thing.__code__)
            _feed_plain(digest, thing.__defaults__)
            _feed_plain(digest, thing.__kwdefaults__)
            used = [cell for cell in map(_content, thing.__closure__ or ()) if cell is not None]
            names = _names(thing.__code__)
            used += [thing.__globals__[name] for name in names if name in thing.__globals__]
            modules: set[str] = set()
            while used:
                value = used.pop(0)
                _feed_plain(digest, value)
                if isinstance(value, types.ModuleType):
                    if value.__name__ not in modules and _is_own(value.__name__, home):
                        modules.add(value.__name__)
                        used += [vars(value)[name] for name in names if name in vars(value)]
                elif callable(value) and _is_own(_home(value), home):
                    todo.append(value)
                elif _is_own(type(value).__module__, home):
                    todo.append(type(value))
            continue
        if isinstance(thing, type):
            todo += [code for cls in thing.__mro__ if _is_own(cls.__module__, home) for code in _methods(cls)]
            continue
        if isinstance(thing, functools.partial):
            _feed_plain(digest, thing.args)
            _feed_plain(digest, thing.keywords)
        owner = getattr(thing, "__self__", None)
        if isinstance(owner, object) and not isinstance(owner, types.ModuleType | type(None)):
            _feed_plain(digest, {k: v for k, v in getattr(owner, "__dict__", {}).items() if _is_plain(v)})
            cls = owner if isinstance(owner, type) else type(owner)
            todo += [cls] if _is_own(cls.__module__, home) else []
        inner = [getattr(thing, name, None) for name in _INSIDE]
        if not any(isinstance(i, types.FunctionType) or callable(i) for i in inner):
            inner += [vars(type(thing)).get("__call__"), type(thing) if _is_own(type(thing).__module__, home) else None]
            _feed_plain(digest, {k: v for k, v in getattr(thing, "__dict__", {}).items() if _is_plain(v)})
        todo += [i for i in inner if i is not None]
    return f"{sys.implementation.cache_tag}:{digest.hexdigest()}" if found else ""


def _home(thing: Any) -> str:
    for name in _INSIDE:
        thing = getattr(thing, name, None) or thing
    return str(getattr(thing, "__module__", None) or type(thing).__module__)


def _is_own(module: str, home: str) -> bool:
    """Whether a module is the user's: what is installed, or comes with Python, has a version of its own."""
    top = str(module).partition(".")[0]
    if top in (home.partition(".")[0], "__main__"):
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    if not isinstance(file, str) or top == "penstock":
        return False
    file = os.path.abspath(file)
    installed = {"site-packages", "dist-packages"} & set(file.split(os.sep))
    return not installed and not file.startswith(os.path.dirname(os.__file__) + os.sep)


def _methods(cls: type[Any]) -> list[types.FunctionType]:
    """The functions that a class has itself, in the order of their names."""
    found = []
    for _, value in sorted(vars(cls).items()):
        inner = [value, getattr(value, "__func__", None), *(getattr(value, name, None) for name in _GETTERS)]
        found += [function for function in inner if isinstance(function, types.FunctionType)]
    return found


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def _names(code: types.CodeType) -> list[str]:
    inner = [name for const in code.co_consts if isinstance(const, types.CodeType) for name in _names(const)]
    return sorted({*code.co_names, *inner})


def _feed_code(digest: Any, code: types.CodeType) -> None:
    digest.update(code.co_code)
    for names in (code.co_names, code.co_varnames, code.co_freevars):
        digest.update("\0".join(names).encode())
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            _feed_code(digest, const)
        elif not (isinstance(const, str) and const == (code.co_consts[0] if code.co_consts else None)):
            _feed(digest, const, _DEEPEST)  # the first constant is the docstring, if there is one


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | complex | str | bytes)


def _feed_plain(digest: Any, value: Any) -> None:
    """Add settings: numbers, strings, and tuples, lists and dicts of them; other things are not looked at."""
    if _is_plain(value):
        _feed(digest, value, _DEEPEST)
    elif isinstance(value, tuple | list) and len(value) <= _MOST_SETTINGS:
        for part in value:
            _feed_plain(digest, part)
    elif isinstance(value, dict) and len(value) <= _MOST_SETTINGS:
        for key, part in value.items():
            digest.update(shown(key).encode())
            _feed_plain(digest, part)
