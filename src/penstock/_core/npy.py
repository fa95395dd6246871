"""Reads a .npy file straight into a slot: what ``Feed(paths, np.load)`` does, without the array in between.

Runs where load runs. Only for the plain case: a file whose array has the shape and dtype of its place, in C order.
Everything else, errors too, is left to np.load.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from penstock._core.spec import Array

__all__ = ["read_npy"]


def read_npy(path: Any, out: Array) -> bool:
    """Fill ``out`` from a file; False if np.load has to look at it."""
    if not isinstance(path, str | os.PathLike) or not out.flags.c_contiguous or not out.nbytes:
        return False
    try:
        with open(path, "rb", buffering=0) as file:
            version = np.lib.format.read_magic(file)
            if version != (1, 0):
                return False
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
            if fortran or shape != out.shape or dtype != out.dtype:
                return False
            view = memoryview(out.reshape(-1).view(np.uint8))  # type: ignore[arg-type]  # numpy does not say Buffer on 3.11
            while view:
                count = file.readinto(view)
                if not count:
                    return False
                view = view[count:]
    except (OSError, ValueError):
        return False
    return True
