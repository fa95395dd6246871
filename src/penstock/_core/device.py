"""Which framework the leaves of a batch belong to. Runs in the parent; imports a framework only when asked for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["door"]


def door(to: str) -> Callable[[Any], Any] | None:
    """What turns an array over a slot into a leaf for ``to``; None for numpy, which needs nothing."""
    name, _, device = to.partition(":")
    if name == "numpy" and not device:
        return None
    if name == "torch" and device in ("", "cpu"):
        from penstock.torch import from_array

        return from_array
    if name not in ("torch", "jax", "tinygrad"):
        raise ValueError(f'to={to!r} is not known: give "numpy" or "torch"')
    raise NotImplementedError(f'to={to!r} is not built yet: "numpy" and "torch" (on the CPU) are')
