"""Penstock feeds a model from data that does not fit in memory, inside a memory budget that holds.

Say what there is to read, how one thing is read, and how much memory may be used::

    from penstock import Feed

    feed = Feed(paths, load, batch_size=32, memory="2 GiB")
    print(feed.plan)
    for batch in feed:
        ...
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from penstock._core.blocks import Blocks
    from penstock._core.budget import GiB, KiB, MiB
    from penstock._core.cache import Cache, CacheWarning
    from penstock._core.context import WorkerInfo, rng, worker
    from penstock._core.device import Device, Gathers, HostDevice, Shelves
    from penstock._core.epoch import Epoch, ResourceHeld
    from penstock._core.errors import (
        BudgetError,
        BudgetWarning,
        CacheError,
        FeedClosed,
        LeaseError,
        LoadError,
        LoadTimeout,
        PenstockError,
        PlaceFull,
        SpecError,
        WorkerLost,
    )
    from penstock._core.feed import Feed, plan
    from penstock._core.hdf5 import hdf5
    from penstock._core.images import images
    from penstock._core.line_reader import Line
    from penstock._core.lines import lines
    from penstock._core.parquet import parquet
    from penstock._core.patience import SlowLoad
    from penstock._core.place import Place, PlaceStats
    from penstock._core.plan import Plan
    from penstock._core.program import Batched, Into, Pad, Padded, Retry, batched, into
    from penstock._core.source import Reader, Row, Source, arrays
    from penstock._core.spec import OnDevice
    from penstock._core.stats import Stats
    from penstock._core.tar import tar

__version__ = "0.1.0"

__all__ = [
    "Batched",
    "Blocks",
    "BudgetError",
    "BudgetWarning",
    "Cache",
    "CacheError",
    "CacheWarning",
    "Device",
    "Epoch",
    "Feed",
    "FeedClosed",
    "Gathers",
    "GiB",
    "HostDevice",
    "Into",
    "KiB",
    "LeaseError",
    "Line",
    "LoadError",
    "LoadTimeout",
    "MiB",
    "OnDevice",
    "Pad",
    "Padded",
    "PenstockError",
    "Place",
    "PlaceFull",
    "PlaceStats",
    "Plan",
    "Reader",
    "ResourceHeld",
    "Retry",
    "Row",
    "Shelves",
    "SlowLoad",
    "Source",
    "SpecError",
    "Stats",
    "WorkerInfo",
    "WorkerLost",
    "arrays",
    "batched",
    "hdf5",
    "images",
    "into",
    "lines",
    "parquet",
    "plan",
    "rng",
    "tar",
    "worker",
]

# Where each name lives. It is imported when it is first asked for: a worker needs half of them, and starts the sooner.
_HOMES: Final = {
    "Batched": "penstock._core.program",
    "Blocks": "penstock._core.blocks",
    "BudgetError": "penstock._core.errors",
    "BudgetWarning": "penstock._core.errors",
    "Cache": "penstock._core.cache",
    "CacheError": "penstock._core.errors",
    "CacheWarning": "penstock._core.cache",
    "Device": "penstock._core.device",
    "Epoch": "penstock._core.epoch",
    "Feed": "penstock._core.feed",
    "FeedClosed": "penstock._core.errors",
    "Gathers": "penstock._core.device",
    "GiB": "penstock._core.budget",
    "HostDevice": "penstock._core.device",
    "Into": "penstock._core.program",
    "KiB": "penstock._core.budget",
    "LeaseError": "penstock._core.errors",
    "Line": "penstock._core.line_reader",
    "LoadError": "penstock._core.errors",
    "LoadTimeout": "penstock._core.errors",
    "MiB": "penstock._core.budget",
    "OnDevice": "penstock._core.spec",
    "Pad": "penstock._core.program",
    "Padded": "penstock._core.program",
    "PenstockError": "penstock._core.errors",
    "Place": "penstock._core.place",
    "PlaceFull": "penstock._core.errors",
    "PlaceStats": "penstock._core.place",
    "Plan": "penstock._core.plan",
    "Reader": "penstock._core.source",
    "ResourceHeld": "penstock._core.epoch",
    "Retry": "penstock._core.program",
    "Row": "penstock._core.source",
    "Shelves": "penstock._core.device",
    "SlowLoad": "penstock._core.patience",
    "Source": "penstock._core.source",
    "SpecError": "penstock._core.errors",
    "Stats": "penstock._core.stats",
    "WorkerInfo": "penstock._core.context",
    "WorkerLost": "penstock._core.errors",
    "arrays": "penstock._core.source",
    "batched": "penstock._core.program",
    "hdf5": "penstock._core.hdf5",
    "images": "penstock._core.images",
    "into": "penstock._core.program",
    "lines": "penstock._core.lines",
    "parquet": "penstock._core.parquet",
    "plan": "penstock._core.feed",
    "rng": "penstock._core.context",
    "tar": "penstock._core.tar",
    "worker": "penstock._core.context",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
