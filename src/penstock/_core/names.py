"""Many names in little memory: one block of bytes and where each begins. Pure.

A list of a million paths is some 150 MB of Python objects; as bytes it is a third of that, and copied by nobody.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

__all__ = ["Names"]


class Names(Sequence[str]):
    """A sequence of strings that cannot be changed."""

    __slots__ = ("_data", "_ends")

    def __init__(self, names: Iterable[str]) -> None:
        encoded = [os.fsencode(name) for name in names]
        self._ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)
        self._data = b"".join(encoded)

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, key: int) -> str: ...
    @overload
    def __getitem__(self, key: slice) -> list[str]: ...
    def __getitem__(self, key: int | slice) -> str | list[str]:
        if isinstance(key, slice):
            return [self[i] for i in range(*key.indices(len(self)))]
        if key < 0:
            key += len(self)
        if not 0 <= key < len(self):
            raise IndexError(f"{key} of {len(self)} names")
        start = int(self._ends[key - 1]) if key else 0
        return os.fsdecode(self._data[start : int(self._ends[key])])

    def chosen(self, indices: npt.NDArray[np.int64]) -> list[str]:
        """The names at these indices, all from 0 on; in a fifth of the time that they take one by one."""
        data, coding = self._data, (sys.getfilesystemencoding(), sys.getfilesystemencodeerrors())
        ends = self._ends[indices].tolist()
        starts = np.where(indices > 0, self._ends[indices - 1], 0).tolist()
        return [data[start:end].decode(*coding) for start, end in zip(starts, ends, strict=True)]

    def __repr__(self) -> str:
        return f"<{len(self)} names: {self[0]!r} ...>" if len(self) else "<no names>"
