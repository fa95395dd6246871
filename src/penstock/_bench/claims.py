"""The ratios that Penstock promises, as data. Pure.

A claim compares the medians of one run: a contender against a peer, or against a limit. The benchmark prints whether
each holds, or why it cannot be judged. It fails nothing: a machine that is busy with something else proves nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Final

__all__ = ["CLAIMS", "Claim"]


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """``contender`` reaches at least ``ratio`` times the rate of ``other`` on ``workload``."""

    workload: str
    contender: str
    other: str
    ratio: float


CLAIMS: Final = (
    Claim("big", "penstock", "torch", 4.0),
    Claim("big", "penstock", "tinyloader", 10.0),
    Claim("big", "penstock", "tinyloader-shm", 2.0),
    Claim("big", "penstock-tinyloader", "tinyloader", 5.0),
    Claim("big", "penstock-into", "threads", 1.0),
    Claim("big", "penstock-into", "loop", 1.0),
    Claim("big", "penstock-into", "read", 0.7),
    Claim("rows", "penstock", "torch-0", 15.0),
    Claim("rows", "penstock", "torch", 15.0),
    Claim("rows", "penstock", "torch-getitems", 1.5),
    Claim("rows", "penstock", "gather", 0.6),
    Claim("slow", "penstock", "torch", 1.3),
    Claim("slow", "penstock", "share", 0.9),
    Claim("python", "penstock", "loop", 1.5),
    Claim("python", "penstock", "torch", 2.0),
    Claim("lines", "penstock", "loop", 1.7),
    Claim("lines", "penstock", "torch", 2.0),
    Claim("lines", "penstock", "torch-lines", 2.0),
    Claim("lines", "penstock", "loops", 0.9),
    Claim("images", "penstock", "torch", 1.0),
    Claim("images", "penstock", "threads", 1.0),
    Claim("images", "penstock", "share", 0.93),
    Claim("shards", "penstock-blocks", "disk", 0.85),
    Claim("shards", "penstock-blocks", "torch", 1.8),
    Claim("shards", "penstock-blocks", "torch-4", 1.8),
    Claim("shards", "penstock-blocks", "threads", 1.8),
    Claim("shards", "penstock", "torch", 1.0),
    Claim("shards", "penstock", "threads", 1.0),
)
