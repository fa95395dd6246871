"""Sizes: how they are written, read and shown. Pure; knows nothing of the machine.

``parse_size`` turns what a user may give as ``memory`` or ``device_memory`` into bytes; a fraction needs to
be told what is available, because only ``machine`` may look.
"""

from __future__ import annotations

import math
import re
from typing import Final

__all__ = ["GiB", "KiB", "MiB", "Size", "format_bytes", "parse_size"]

Size = int | float | str

_UNITS: Final = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "kib": 2**10,
    "m": 10**6, "mb": 10**6, "mib": 2**20,
    "g": 10**9, "gb": 10**9, "gib": 2**30,
    "t": 10**12, "tb": 10**12, "tib": 2**40,
}  # fmt: skip
_TEXT: Final = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_MOST: Final = 2**60
_FIXED: Final = 'give bytes as an int, or text such as "2 GiB"'
_HOW: Final = 'give bytes as an int, text such as "2 GiB", or a fraction of what is available such as 0.25'


def KiB(n: float) -> int:
    """``n`` kibibytes in bytes."""
    return int(n * 2**10)


def MiB(n: float) -> int:
    """``n`` mebibytes in bytes."""
    return int(n * 2**20)


def GiB(n: float) -> int:
    """``n`` gibibytes in bytes."""
    return int(n * 2**30)


def parse_size(size: Size, *, available: int | None, name: str = "memory") -> int:
    """Bytes for what a user gave as a size; fractions are of ``available`` bytes, and refused where that is None."""
    how = _HOW if available is not None else _FIXED
    if isinstance(size, bool) or not isinstance(size, int | float | str):
        raise TypeError(f"{name}={size!r} is a {type(size).__name__}: {how}")
    if isinstance(size, str):
        match = _TEXT.fullmatch(size)
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise ValueError(f"{name}={size!r} cannot be read as a size: {how}")
        result = int(float(match[1]) * unit)
    elif isinstance(size, float):
        if available is None:
            raise TypeError(f"{name}={size!r} is a fraction, and there is nothing that it could be a part of: {how}")
        if not math.isfinite(size) or not 0 < size <= 1:
            raise ValueError(f"{name}={size!r} is not a fraction between 0 and 1: {how}")
        result = int(size * available)
    else:
        result = size
    if result <= 0:
        what = "memory" if available is not None else "room"
        raise ValueError(f"{name}={size!r} leaves no {what} at all: {how}")
    if result > _MOST:
        raise ValueError(f"{name}={size!r} is more than any machine has: {how}")
    return result


def format_bytes(n: int) -> str:
    """Bytes as a person reads them: ``1.5 GiB``, ``24 MiB``, ``512 B``."""
    size = float(n)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 or size == int(size) else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError
