"""Whether calls of a load share anything that can change: a look at its code, without running it. Runs in the parent.

A load that keeps an open file, a buffer or a counter outside of itself is right in processes, each of which has its
own, and silently wrong in threads. Nobody can tell that from watching it, so this is a proof or nothing: what a
function reaches through its globals, closure, defaults and the functions that it calls must be plain functions,
constants, or parts of modules that are known to keep nothing between calls. Whatever is not known to be harmless is an
obstacle, and then a load stays in processes. It is not looked at here whether threads would be of any use.
"""

from __future__ import annotations

import builtins
import datetime as dt
import dis
import functools
import os
import pathlib
import re
import struct
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from penstock._core.program import Batched, BatchedInto, Into

__all__ = ["obstacle_to_threads", "unchanging", "unchanging_kind"]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Modules whose functions and classes keep nothing from one call to the next that another thread would notice. The rest
# of the world is not trusted: pyplot draws into a figure of the whole process, netCDF4 crashes, random has one state.
_HARMLESS: Final = _words(
    "PIL array base64 binascii bisect builtins bz2 cmath collections copy csv cv2 datetime decimal fnmatch fractions "
    "functools genericpath glob gzip hashlib heapq html http io itertools json lz4 lzma math ntpath numpy operator "
    "os pathlib penstock pickle posixpath re shutil statistics string struct subprocess tarfile tempfile time "
    "unicodedata urllib uuid wave zipfile zlib zstandard"
)
# The same modules by the names that their functions were born with.
_ALIASES: Final = {"posix": "os", "nt": "os"}
# Modules of which only some parts are harmless: a working directory, an open descriptor's place, one random state, are
# the process's, and so is its number, by which a load may name a file of its own.
_PARTS: Final = {
    "builtins": _words(
        "abs all any ascii bin bool bytearray bytes callable chr complex dict divmod enumerate filter float format "
        "frozenset getattr hasattr hash hex int isinstance issubclass iter len list map max memoryview min next "
        "object oct open ord pow print range repr reversed round set slice sorted str sum tuple type zip"
    ),
    "os": _words(
        "PathLike access close cpu_count fsdecode fsencode fspath fstat getcwd listdir lstat open path pread "
        "preadv scandir sep stat walk O_RDONLY O_CLOEXEC O_DIRECT"
    ),
    "numpy.random": _words("Generator MT19937 PCG64 PCG64DXSM Philox SFC64 SeedSequence default_rng"),
    "penstock": _words("KiB MiB GiB rng worker"),
}
# What sets something for everybody, by its name.
_SETTERS: Final = re.compile(
    r"(set[a-z_]*(opt|err|size|num|threads|limit|timeout|default|printoptions|rng|seed)|seed|rand[un]|register)",
    re.IGNORECASE,
)
_INSIDES: Final = _words(
    "__builtins__ __closure__ __code__ __defaults__ __delattr__ __dict__ __func__ __globals__ __kwdefaults__ __self__ "
    "__setattr__ __setstate__ setflags"
)
_CONSTANTS: Final = (
    bool, int, float, complex, str, bytes, range, slice, type(None), type(...), type(NotImplemented), np.generic,
    np.dtype, np.ufunc, re.Pattern, struct.Struct, pathlib.PurePath, dt.date, dt.time, dt.timedelta,
)  # fmt: skip
_FUNCTIONS: Final = (types.BuiltinFunctionType, types.FunctionType, type(np.concatenate), type(np.random.default_rng))
_FOLLOWS: Final = ("LOAD_ATTR", "LOAD_METHOD")
_WRITES: Final = {
    "STORE_GLOBAL": "writes the global",
    "DELETE_GLOBAL": "deletes the global",
    "STORE_ATTR": "sets the attribute",
    "DELETE_ATTR": "deletes the attribute",
}
_OTHER_SCOPES: Final = ("LOAD_NAME", "STORE_NAME", "LOAD_BUILD_CLASS", "LOAD_CLASSDEREF", "LOAD_LOCALS",
                        "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_FROM_DICT_OR_DEREF")  # fmt: skip
_MOST_FUNCTIONS: Final = 60  # a load that calls more than these is not looked through to the end


def obstacle_to_threads(load: Any) -> str | None:
    """What could make a load wrong in threads, in words; None if it is known that nothing does."""
    try:
        for reason in _Look().reasons(load, "load"):
            return reason
    except (_TooFar, RecursionError):
        return f"load calls more than {_MOST_FUNCTIONS} functions"
    return None


def unchanging(value: Any) -> bool:
    """Whether nobody can change this value, so that threads may share it."""
    if type(value) in (tuple, frozenset):
        return all(map(unchanging, value))
    if type(value) is np.ndarray:  # read-only, and no view of what somebody else may write to
        return not value.flags.writeable and value.base is None and not value.dtype.hasobject
    return unchanging_kind(type(value))


def unchanging_kind(kind: type[Any]) -> bool:
    """Whether nobody can change a value of this type; of containers that is not known."""
    # A class of the user's that is derived from one of these may have attributes.
    return issubclass(kind, _CONSTANTS) and kind.__module__ in _CONSTANT_HOMES and not issubclass(kind, np.void)


_CONSTANT_HOMES: Final = frozenset(
    ("builtins", "numpy", "numpy.dtypes", "re", "_struct", "struct", "pathlib", "pathlib._local", "datetime")
)


class _TooFar(Exception):
    """There is too much to look at."""


class _Look:
    """One walk over all that a load can reach."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def reasons(self, thing: Any, name: str) -> Iterator[str]:
        """What is wrong with something that a load uses; nothing if it is harmless."""
        if unchanging(thing):
            return
        if isinstance(thing, Batched | BatchedInto):
            yield from self.reasons(thing.many, name)
        elif isinstance(thing, Into):
            yield from self.reasons(thing.function, name)
        elif type(thing) is functools.partial:
            yield from self.reasons(thing.func, name)
            for value in (*thing.args, *thing.keywords.values()):
                yield from self.reasons(value, f"an argument of {name}")
        elif isinstance(thing, types.ModuleType):
            if not _trusted(thing.__name__):
                yield f"{name} is a module that is not known to be safe in threads"
        elif isinstance(thing, type):
            if not _known(thing):
                yield f"{name} is a class that is not known to be safe in threads"
        elif isinstance(thing, _FUNCTIONS):
            yield from self._function(thing, name)
        else:
            kind = type(thing)
            yield f"{name} is a {kind.__qualname__}, which threads would share"

    def _function(self, function: Any, name: str) -> Iterator[str]:
        owner = getattr(function, "__self__", None)
        if owner is not None and not isinstance(owner, types.ModuleType | type):
            yield f"{name} belongs to a {type(owner).__qualname__}, which threads would share"
        elif _trusted(home := _home(function)):
            if not _known(function):
                yield f"{name} is {home}.{function.__name__}, which is not known to be safe in threads"
        elif not isinstance(function, types.FunctionType):
            yield f"{name} is not written in Python and not known to be safe in threads"
        elif id(function) not in self._seen:
            self._seen.add(id(function))
            if len(self._seen) > _MOST_FUNCTIONS:
                raise _TooFar
            yield from self._user_function(function, name)

    def _user_function(self, function: types.FunctionType, name: str) -> Iterator[str]:
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        for value in defaults:
            yield from self.reasons(value, f"a default of {name}")
        if set(vars(function)) - {"__wrapped__"}:
            yield f"{name} has attributes of its own, which threads would share"
        around = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        yield from self._code(function.__code__, function.__globals__, around, name)

    def _code(
        self, code: types.CodeType, variables: Mapping[str, Any], around: dict[str, types.CellType], name: str
    ) -> Iterator[str]:
        steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
        for place, step in enumerate(steps):
            word, value = step.opname, step.argval
            if word in _WRITES:
                yield f"{name} {_WRITES[word]} {value}"
            elif word == "STORE_DEREF" and value in code.co_freevars:
                yield f"{name} writes the variable {value} of the function around it"
            elif word in _FOLLOWS and value in _INSIDES:
                yield f"{name} looks into {value}"
            elif word.startswith("IMPORT_"):
                yield f"{name} imports inside of itself"
            elif word in _OTHER_SCOPES:
                yield f"{name} defines a class"
            elif word == "LOAD_GLOBAL":
                if value in variables:
                    yield from self._use(variables[value], value, steps[place + 1 :])
                elif hasattr(builtins, value):
                    yield from self._use(getattr(builtins, value), value, steps[place + 1 :])
                    if value == "open" and _takes_number(steps[place + 1 :], variables, around):
                        yield f"{name} opens a descriptor by its number, whose place threads would share"
                else:
                    yield f"{name} uses {value}, which is not there yet"
            elif word in ("LOAD_DEREF", "LOAD_CLOSURE") and value in around:
                try:
                    held = around[value].cell_contents
                except ValueError:
                    yield f"{name} uses {value}, which is not there yet"
                else:
                    yield from self._use(held, value, steps[place + 1 :])
        for constant in code.co_consts:
            if isinstance(constant, str) and constant in _INSIDES:
                yield f"{name} looks into {constant}"
            elif isinstance(constant, types.CodeType):
                # What this function makes for each call is nobody else's: only what comes from outside is looked at.
                outside = {key: cell for key, cell in around.items() if key in constant.co_freevars}
                own = set(code.co_cellvars)
                outside = {key: cell for key, cell in outside.items() if key not in own}
                yield from self._code(constant, variables, outside, name)

    def _use(self, thing: Any, name: str, after: list[dis.Instruction]) -> Iterator[str]:
        """Something is on the stack: follow the attributes that are asked of a module, and judge what comes out."""
        for step in after:
            if not isinstance(thing, types.ModuleType):
                break
            if step.opname not in _FOLLOWS:
                yield f"{name} is used as a value"
                return
            if not _trusted(thing.__name__):
                break
            allowed = _parts_of(thing.__name__)
            attribute = step.argval
            name = f"{name}.{attribute}"
            if (allowed is not None and attribute not in allowed) or _SETTERS.match(attribute):
                yield f"{name} changes or shares what belongs to the whole process"
                return
            try:
                thing = getattr(thing, attribute)
            except AttributeError:
                yield f"{name} is not there yet"
                return
        yield from self.reasons(thing, name)


def _home(thing: Any) -> str:
    """The module in which a function or class was written, whatever a decorator says: functools.wraps copies names."""
    if isinstance(thing, types.FunctionType):
        return str(thing.__globals__.get("__name__", ""))
    return getattr(thing, "__module__", None) or ""


def _trusted(module: str) -> bool:
    if not _installed(module.partition(".")[0]):
        return False
    home = module.lstrip("_")  # what is written in C for a module is its own
    if home.startswith("penstock._bench"):  # what is loaded there stands for code of a user's
        return False
    top = _ALIASES.get(home, home).partition(".")[0]
    return top in _HARMLESS and _installed(top)


@functools.cache
def _installed(top: str) -> bool:
    """Whether a module is where modules are installed, and not a file of the user's with the same name."""
    if top in ("numpy", "penstock"):  # what this package itself works with
        return True
    file = getattr(sys.modules.get(top), "__file__", None)
    if file is None:
        return top in sys.builtin_module_names
    paths = sysconfig.get_paths()
    return any(file.startswith(paths[name] + os.sep) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def _parts_of(module: str) -> frozenset[str] | None:
    home = _ALIASES.get(module, module)
    if home.startswith("numpy.random"):
        home = "numpy.random"
    return _PARTS.get(home.partition(".")[0] if home.startswith("penstock") else home)


def _known(thing: Any) -> bool:
    """Whether a function or class of a trusted module is one of its harmless parts, under whatever name it came."""
    home, name = _home(thing), thing.__name__
    if not _trusted(home) or _SETTERS.match(name):
        return False
    module = home.lstrip("_")
    allowed = _parts_of(module)
    if module == "io" and name == "open":
        return True
    # Exceptions are raised, and keep nothing.
    return allowed is None or name in allowed or (isinstance(thing, type) and issubclass(thing, BaseException))


def _takes_number(
    after: list[dis.Instruction], variables: Mapping[str, Any], around: Mapping[str, types.CellType]
) -> bool:
    """Whether the first argument is a number from outside."""
    step = next((step for step in after if step.opname not in ("PUSH_NULL", "PRECALL")), None)
    if step is None:
        return False
    if step.opname == "LOAD_GLOBAL":
        return isinstance(variables.get(step.argval), int)
    if step.opname == "LOAD_DEREF" and step.argval in around:
        return isinstance(around[step.argval].cell_contents, int)
    return step.opname in ("LOAD_CONST", "LOAD_SMALL_INT") and isinstance(step.argval, int)
