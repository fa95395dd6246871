"""Loads that share nothing between calls are known; whatever might is an obstacle, with a reason."""

# ruff: noqa: NPY002, PLW0108, SIM115 - loads as people write them, and as lambdas so that their globals are looked at

from __future__ import annotations

import functools
import importlib
import io
import json
import os
import random
import re
import struct
import sys
import time
import types
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock._core.sharing import obstacle_to_threads, unchanging, unchanging_kind

WIDTH = 64
PATTERN = re.compile("a+")
HEAD = struct.Struct("<i")
FILE = io.BytesIO(b"0123456789")
DESCRIPTOR = 7
BUFFER = np.zeros(4)
CACHE: dict[int, Any] = {}
calls = 0


def helper(i: Any) -> Any:
    return np.full(WIDTH, i)


def helper_that_reads(i: int) -> bytes:
    FILE.seek(i)
    return FILE.read(1)


def waits(i: int) -> Any:
    time.sleep(0.005)
    return helper(i)


def reads_a_file(path: str) -> Any:
    with open(path, "rb") as file:
        rows = np.empty(3)
        rows[0] = 1
        try:
            return np.frombuffer(file.read(WIDTH), np.uint8)
        except ValueError as error:
            raise RuntimeError(path) from error


def gives_many(i: int) -> Any:
    for k in range(3):
        yield np.full(3, i + k)


def has_a_function_inside(i: int) -> int:
    count = i

    def more() -> int:
        return count + WIDTH

    return more()


@penstock.into(((4,), "float32"))
def writes_in_place(i: int, out: Any) -> None:
    out[...] = i


GOOD: dict[str, Callable[..., Any]] = {
    "np.load itself": np.load,
    "a builtin": len,
    "a function that calls another": lambda i: helper(i) + 1,
    "a wait": waits,
    "a partial": functools.partial(np.load, mmap_mode=None),
    "modules and methods": lambda p: json.loads(zlib.decompress(Path(p).read_bytes())),
    "a comprehension": lambda i: [x + WIDTH for x in range(i)],
    "penstock.rng": lambda i: penstock.rng().random(3) + i,
    "a generator of its own": lambda i: np.random.default_rng(i).random(4),
    "pread": lambda i: HEAD.unpack(os.pread(DESCRIPTOR, 4, i)),
    "a compiled pattern": lambda p: PATTERN.match(p) is None,
    "ufuncs and dtypes": lambda i: np.sqrt(np.add(1, i)).astype(np.float32),
    "a lambda inside": lambda i: sorted([i], key=lambda z: z * WIDTH),
    "a file of its own": reads_a_file,
    "many samples": gives_many,
    "a function inside": has_a_function_inside,
    "in place": writes_in_place,
}


def counts_in_a_global(i: int) -> int:
    global calls
    calls += 1
    return calls


def keeps_in_a_default(i: int, seen: list[int] = []) -> int:  # noqa: B006 - that is the point
    seen.append(i)
    return len(seen)


def counts_around() -> Callable[[int], int]:
    count = 0

    def load(i: int) -> int:
        nonlocal count
        count += i
        return count

    return load


def holds_a_file() -> Callable[[int], Any]:
    file = io.BytesIO(b"abc")
    return lambda i: file.read(i)


def counts_on_itself(i: int) -> int:
    counts_on_itself.last = i  # type: ignore[attr-defined]
    return i


def seeds(i: int) -> Any:
    np.random.seed(i)
    return np.random.rand(3)


def imports_inside(i: int) -> Any:
    import colorsys

    return colorsys.rgb_to_hls(i, 0, 0)


def passes_a_module_on(i: int) -> Any:
    module = np
    return module.full(3, i)


def looks_into_a_function(i: int) -> Any:
    return helper.__globals__["CACHE"].get(i)


@functools.lru_cache
def cached(i: int) -> int:
    return i


class Loader:
    def __call__(self, i: int) -> int:
        return i

    def load(self, i: int) -> int:
        return i


def decorated(function: Callable[[int], Any]) -> Callable[[int], Any]:
    count = [0]

    def load(i: int) -> Any:
        count[0] += 1
        return function(i)

    return load


def remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    last = [None]

    @functools.wraps(function)  # which says that it is the function's own module and name
    def inner(item: Any) -> Any:
        last[0] = item
        return function(last[0])

    return inner


summed = remembering(np.sum)
RECORD = np.rec.array([(0,)], dtype=[("x", "i8")])[0]


BAD: dict[str, tuple[Callable[..., Any], str]] = {
    "an open file": (lambda i: FILE.read(i), "FILE is a BytesIO"),
    "an open file of a helper": (lambda i: helper_that_reads(i), "FILE is a BytesIO"),
    "an open file of the function around": (holds_a_file(), "file is a BytesIO"),
    "a method of an open file": (FILE.read, "belongs to a BytesIO"),
    "a buffer": (lambda i: BUFFER + i, "BUFFER is a ndarray"),
    "a cache": (lambda i: CACHE.get(i), "CACHE is a dict"),
    "a cached function": (lambda i: cached(i), "cached is a _lru_cache_wrapper"),
    "a bound method": (Loader().load, "load is a method"),
    "an object": (Loader(), "load is a Loader"),
    "a class": (lambda i: Loader().load(i), "Loader is a class that is not known"),
    "a global that is written": (counts_in_a_global, "writes the global calls"),
    "a default that is changed": (keeps_in_a_default, "a default of load is a list"),
    "a variable of the function around": (counts_around(), "writes the variable count"),
    "an attribute of a function": (counts_on_itself, "sets the attribute last"),
    "a decorator that counts": (decorated(helper), "count is a list"),
    "the global random state": (seeds, "np.random.seed"),
    "the random state of random": (lambda i: random.random() + i, "random is a module that is not known"),
    "the working directory": (lambda p: os.chdir(p), "os.chdir"),
    "the environment": (lambda p: os.environ[p], "os.environ"),
    "the place of a descriptor": (lambda i: os.lseek(DESCRIPTOR, i, 0), "os.lseek"),
    "a descriptor by its number": (lambda i: open(DESCRIPTOR, "rb").read(i), "opens a descriptor by its number"),
    "numpy's error state": (lambda i: np.seterr(all="raise"), "np.seterr"),
    "globals()": (lambda i: globals()["CACHE"], "globals"),
    "setattr": (lambda i: setattr(helper, "last", i), "setattr"),
    "eval": (lambda i: eval("i"), "eval"),
    "an import inside": (imports_inside, "imports inside of itself"),
    "a module as a value": (passes_a_module_on, "np is used as a value"),
    "the insides of a function": (looks_into_a_function, "__globals__"),
    "a name that is not there": (lambda i: not_there(i), "not_there, which is not there yet"),  # type: ignore[name-defined]  # noqa: F821
    "a wrapper of a library's function": (remembering(np.load), "last is a list"),
    "a wrapper of a builtin": (remembering(len), "last is a list"),
    "a wrapper that a load calls": (lambda i: summed([i]), "summed has attributes of its own"),
    "the number of the process": (lambda i: open(f"scratch-{os.getpid()}-{i}", "rb"), "os.getpid"),
    "a record": (lambda i: RECORD["x"] + i, "RECORD is a record"),
    "setattr of object": (lambda i: object.__setattr__(helper, "last", i), "looks into __setattr__"),
    "a partial with a list": (functools.partial(helper, CACHE), "an argument of load is a dict"),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_load_that_shares_nothing_is_known(name: str) -> None:
    """Otherwise threads would never be chosen, for anybody."""
    assert obstacle_to_threads(GOOD[name]) is None


@pytest.mark.parametrize("name", BAD)
def test_a_load_that_might_share_something_is_not_let_into_threads(name: str) -> None:
    """It would give wrong samples there without a word; the reason names what it is."""
    load, reason = BAD[name]
    assert reason in str(obstacle_to_threads(load))


@pytest.mark.parametrize("name", ["wave", "_copy"])
def test_a_module_of_the_users_with_a_trusted_name_is_not_trusted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file called wave.py beside the script hides the one of the standard library; _copy is nobody's there."""
    from penstock._core import sharing

    (tmp_path / f"{name}.py").write_text("state = []\ndef read(i):\n    state.append(i)\n    return len(state)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    sharing._installed.cache_clear()
    module = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, name, module)

    load = types.FunctionType(compile("lambda i: wave.read(i)", "x", "eval").co_consts[0], {"wave": module})
    try:
        assert obstacle_to_threads(load) is not None
    finally:
        sharing._installed.cache_clear()


def test_only_what_nobody_can_change_counts_as_a_constant() -> None:
    """A class of the user's that is derived from int may have attributes."""

    class Number(int):
        pass

    assert all(map(unchanging, (1, "a", (1, ("b", None)), frozenset({1}), np.float32(1), np.dtype("int8"), Path("a"))))
    assert not any(map(unchanging, ([1], (1, [2]), {}, bytearray(b"a"), Number(3), np.zeros(1), object())))
    assert unchanging_kind(np.int64)
    assert not unchanging_kind(np.void)
    assert not unchanging_kind(tuple)  # what is in it is not known


def test_a_load_that_calls_half_the_world_is_not_followed_for_ever() -> None:
    """Looking must end, and then the answer is no."""
    names = {f"f{n}": None for n in range(300)}
    scope: dict[str, Any] = {}
    exec("\n".join(f"def {name}(i): return f{(n + 1) % 300}(i)" for n, name in enumerate(names)), scope)
    assert "more than 60 functions" in str(obstacle_to_threads(scope["f0"]))
