"""Libraries that are imported when something needs them, and an error that says what to install. Runs everywhere."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["library"]


def library(module: str, package: str, *, extra: str) -> Any:
    """The module of an optional dependency; ImportError that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise ImportError(
            f'penstock.{extra} needs {package}, and "import {name}" failed ({error}): install it with '
            f'pip install "penstock[{extra}]"',
            name=name,
        ) from error
