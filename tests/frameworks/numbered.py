"""Loads of numbered samples. In a module of their own: a worker imports it, and must not import a framework with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


def load(item: int) -> Any:
    """A sample full of its number."""
    return np.full((64, 4), item, np.float32)


def pair(item: int) -> Any:
    """The same with a target."""
    return load(item), 2 * item


@dataclass
class Noted:
    """A load that leaves a file for every item."""

    folder: Path

    def __call__(self, item: int) -> Any:
        (self.folder / str(item)).touch()
        return load(item)


class Broken:
    """A load that fails for some items."""

    def __init__(self, *items: int) -> None:
        self.items = items

    def __call__(self, item: int) -> Any:
        if item in self.items:
            raise OSError("bad disk")
        return pair(item)
