"""Which items these are, in sixteen letters: so that a saved state is not taken for that of other items. Pure.

Items are compared by what they look like (``repr``), which is the same in every process for paths, keys and numbers;
for objects that show nothing but an address it is their class that counts. Of long lists some thousands are looked at,
spread over all: another list, another order or a list that was added to is found out, one changed item among millions
may not be.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from penstock._core.items import Picker, Stream
from penstock._core.lines import Lines
from penstock._core.order import mix
from penstock._core.source import Reader, Source

__all__ = ["fingerprint"]

# All of them up to here, which takes some 10 ms; of longer lists so many.
LOOKED_AT: Final = 8192
ROWS_LOOKED_AT: Final = 16  # of a source, whose rows may be large and lie on a disk
_ADDRESS: Final = re.compile(r" at 0x[0-9a-fA-F]+")


def fingerprint(items: Picker | Stream | Source | Lines) -> str | None:
    """A hash of the items; None for a stream, which cannot be looked at without using it up."""
    if isinstance(items, Stream):
        return None
    if isinstance(items, Picker):
        return _digest(items(_spread(items.length, LOOKED_AT)))
    own = getattr(items, "fingerprint", None)
    if own is not None:  # a source that knows better what makes it what it is
        return str(own())
    if isinstance(items, Lines):
        return _digest(items.looks())
    return _digest([str(items.spec()), *_rows(items, _spread(len(items), ROWS_LOOKED_AT))])


def _rows(source: Source, places: npt.NDArray[np.int64]) -> list[Any]:
    """Rows of a source; one that cannot be read is told of when it is wanted, not when a state is saved."""
    reader = source.reader()
    try:
        return list(reader.read(places))
    except Exception:  # noqa: BLE001 - same as above
        return [_row(reader, places[at : at + 1]) for at in range(len(places))]


def _row(reader: Reader, place: npt.NDArray[np.int64]) -> Any:
    try:
        return reader.read(place)
    except Exception as error:  # noqa: BLE001 - same as above
        return type(error).__name__


def _spread(length: int, most: int) -> npt.NDArray[np.int64]:
    """Places spread over all of them, the same for the same length: the first, the last, and others at random."""
    if length <= most:
        return np.arange(length, dtype=np.int64)
    drawn = (mix(length, np.arange(most - 2)) % np.uint64(length)).astype(np.int64)
    return np.unique(np.concatenate((drawn, [0, length - 1])))


def _digest(values: list[Any]) -> str:
    hasher = hashlib.blake2b(digest_size=8)
    for value in values:
        hasher.update(_shown(value))
        hasher.update(b"\n")
    return hasher.hexdigest()


def _shown(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return f"{value.dtype.str}{value.shape}".encode() + value.tobytes()
    if isinstance(value, tuple | list):
        return b"".join(map(_shown, value))
    if isinstance(value, dict):
        return b"".join(repr(key).encode("utf-8", "backslashreplace") + _shown(one) for key, one in value.items())
    return _ADDRESS.sub("", repr(value)).encode("utf-8", "backslashreplace")
