"""What a feed did so far: counters that only grow. Runs in the parent."""

from __future__ import annotations

import dataclasses
from typing import Any

from penstock._core.budget import format_bytes

__all__ = ["Stats"]


@dataclasses.dataclass(slots=True)
class Stats:
    """Counts over the whole life of a feed; read them at any time."""

    samples: int = 0
    """Samples handed out."""
    batches: int = 0
    """Batches handed out."""
    bytes: int = 0
    """Bytes of the arrays handed out."""
    wait_s: float = 0.0
    """Seconds that the consumer waited for a batch."""
    peak_bytes: int = 0
    """Most memory that was seen in use by arena and workers together."""
    arena_bytes: int = 0
    """Memory of the arena when last looked at."""
    worker_bytes: int = 0
    """Memory of template and workers when last looked at, shared pages counted in proportion."""
    restarts: int = 0
    """Workers that died and were replaced."""
    copied: int = 0
    """Batches that were handed out as copies because the consumer held too many slots, or all buffers of the device."""
    device_allocations: int = 0
    """Blocks of memory that were allocated on the device, ever; after the first batches it stays the same."""
    skipped: list[tuple[Any, BaseException]] = dataclasses.field(default_factory=list)
    """Items that were left out, with their errors."""

    def __str__(self) -> str:
        return (
            f"{self.samples:,} samples in {self.batches:,} batches, {format_bytes(self.bytes)}; "
            f"waited {self.wait_s:.2f} s; peak {format_bytes(self.peak_bytes)}; {self.copied} copied, "
            f"{len(self.skipped)} skipped, {self.restarts} workers replaced"
        )
