"""Every error that Penstock raises, and nothing else.

Runs everywhere. A message says what happened, with the numbers, and what to do about it; the attributes
carry the same facts for programs. ``PenstockError`` is the one base class; where a built-in exception says
the same thing (MemoryError, TimeoutError, ValueError) the error is that too.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "BudgetError",
    "FeedClosed",
    "LeaseError",
    "LoadError",
    "LoadTimeout",
    "PenstockError",
    "PlaceFull",
    "SpecError",
    "WorkerLost",
    "said",
    "shown",
]


def shown(item: object, limit: int = 200) -> str:
    """An item as text that is safe to print: one line, no raw control characters, bounded length."""
    try:
        text = repr(item)
    except Exception:  # noqa: BLE001 - the error that is being told matters more than the item's own
        text = object.__repr__(item)
    if len(text) > limit:
        text = f"{text[: limit - 3]}..."
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def said(error: BaseException) -> str:
    """What kind of error this is and what it says, whatever the user's class does when it is asked."""
    try:
        return f"{type(error).__qualname__}: {error}"
    except Exception:  # noqa: BLE001 - same as above
        return f"{type(error).__qualname__} (its message cannot be shown)"


class PenstockError(Exception):
    """Anything that Penstock itself raises."""


class BudgetError(PenstockError, MemoryError):
    """What was asked for does not fit into the memory budget.

    ``least`` is the smallest budget in bytes that works with everything else unchanged.
    """

    def __init__(self, message: str, *, least: int = 0) -> None:  # the default is for unpickling, which sets it after
        super().__init__(message)
        self.least = least


class PlaceFull(BudgetError):
    """A request would fit into its ``Place``, but others use the memory now: try again later."""


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


class LeaseError(PenstockError):
    """An iteration was used after a newer one over the same feed took its slots."""


class FeedClosed(PenstockError):
    """The feed was closed and cannot give more batches."""
