"""Every error that Penstock raises, and nothing else.

Runs everywhere. A message says what happened, with the numbers, and what to do about it; the attributes
carry the same facts for programs. ``PenstockError`` is the one base class; where a built-in exception says
the same thing (MemoryError, TimeoutError, ValueError) the error is that too.
"""

from __future__ import annotations

import reprlib
from typing import Any, Final

__all__ = [
    "BudgetError",
    "BudgetWarning",
    "CacheError",
    "FeedClosed",
    "LeaseError",
    "LoadError",
    "LoadTimeout",
    "PenstockError",
    "PlaceFull",
    "SpecError",
    "WorkerLost",
    "printable",
    "said",
    "shown",
]


_SAID_CHARACTERS: Final = 2000  # some libraries put whole arrays into their messages
_BREAKS: Final = "\n\t"


def printable(text: str, kept: str = _BREAKS) -> str:
    """Text without characters that steer a terminal or cannot be written to one; line breaks and tabs may stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


def shown(item: object, limit: int = 200) -> str:
    """An item as text that is safe to print: one line, no raw control characters, bounded length."""
    try:
        text = _short(item, limit) if isinstance(item, _SIZED) and len(item) > limit else repr(item)
    except Exception:  # noqa: BLE001 - the error that is being told matters more than the item's own
        text = object.__repr__(item)
    if len(text) > limit:
        text = f"{text[: limit - 3]}..."
    return printable(text, kept="")


_SIZED: Final = (str, bytes, bytearray, list, tuple, dict, set, frozenset)


def _short(item: object, limit: int) -> str:
    """More than the beginning of what repr gives: all of it may be as large as the item itself."""
    if isinstance(item, str | bytes | bytearray):
        return repr(item[:limit])
    brief = reprlib.Repr()
    brief.maxlist = brief.maxtuple = brief.maxdict = brief.maxset = brief.maxfrozenset = limit
    brief.maxstring = brief.maxother = limit
    return brief.repr(item)


def said(error: BaseException) -> str:
    """What kind of error this is and what it says, whatever the user's class does when it is asked."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - same as above
        return f"{type(error).__qualname__} (its message cannot be shown)"
    if len(text) > _SAID_CHARACTERS:
        text = f"{text[:_SAID_CHARACTERS]}... ({len(text):,} characters)"
    return f"{type(error).__qualname__}: {printable(text)}" if text else type(error).__qualname__


class PenstockError(Exception):
    """Anything that Penstock itself raises."""

    def __init__(self, *arguments: object) -> None:
        # Here, because names of items, keys of samples and messages of others get into messages in many ways.
        super().__init__(*(printable(each) if isinstance(each, str) else each for each in arguments))


class BudgetError(PenstockError, MemoryError):
    """What was asked for does not fit into the memory budget.

    ``least`` is the smallest budget in bytes that works with everything else unchanged.
    """

    def __init__(self, message: str, *, least: int = 0) -> None:  # the default is for unpickling, which sets it after
        super().__init__(message)
        self.least = least


class PlaceFull(BudgetError):
    """A request would fit into its ``Place``, but others use the memory now: try again later."""


class BudgetWarning(UserWarning):
    """The budget is more than there is, or more is used where nothing can hold it: in this process."""


class LoadError(PenstockError):
    """``load`` raised for one item; ``__cause__`` is the original exception, ``item`` the item."""

    def __init__(self, message: str, *, item: Any = None) -> None:
        super().__init__(message)
        self.item = item


class WorkerLost(LoadError):
    """A worker process died while it worked on an item."""

    def __init__(self, message: str, *, item: Any = None, exitcode: int | None = None) -> None:
        super().__init__(message, item=item)
        self.exitcode = exitcode


class LoadTimeout(LoadError, TimeoutError):
    """``load`` took longer than ``timeout`` for one item."""


class SpecError(PenstockError, ValueError):
    """A sample does not have the form that was expected; ``item`` is the one that gave it."""

    def __init__(self, message: str, *, item: Any = None) -> None:
        super().__init__(message)
        self.item = item


class CacheError(PenstockError):
    """A folder cannot serve as the cache: it holds something else, or is not what it should be."""


class LeaseError(PenstockError):
    """An iteration was used after a newer one over the same feed took its slots."""


class FeedClosed(PenstockError):
    """The feed was closed and cannot give more batches."""
