"""Penstock feeds a model from data that does not fit in memory, inside a memory budget that holds.

Say what there is to read, how one thing is read, and how much memory may be used::

    from penstock import Feed

    feed = Feed(paths, load, batch_size=32, memory="2 GiB")
    print(feed.plan)
    for batch in feed:
        ...
"""

from __future__ import annotations

from penstock._core.blocks import Blocks
from penstock._core.budget import GiB, KiB, MiB
from penstock._core.cache import Cache, CacheWarning
from penstock._core.context import WorkerInfo, rng, worker
from penstock._core.device import Device, HostDevice
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
from penstock._core.program import Into, Pad, Padded, Retry, into
from penstock._core.source import Reader, Row, Source, arrays
from penstock._core.spec import OnDevice
from penstock._core.stats import Stats
from penstock._core.tar import tar

__version__ = "0.1.0"

__all__ = [
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
    "SlowLoad",
    "Source",
    "SpecError",
    "Stats",
    "WorkerInfo",
    "WorkerLost",
    "arrays",
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
