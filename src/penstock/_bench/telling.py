"""The load of the benchmark of faults: a sample that tells who made it, and when. Runs in workers.

Apart from the rest, because a worker that starts as a fresh interpreter imports the module that its load is from.
"""

from __future__ import annotations

import os
import time
from typing import Any, Final

import numpy as np

__all__ = ["LOAD_S", "load"]

LOAD_S: Final = 1e-3


def load(item: int) -> Any:
    """A sample that tells which item it is, who loads it and since when."""
    begun_s = time.monotonic()
    time.sleep(LOAD_S)
    return np.array([item, os.getpid(), begun_s])
