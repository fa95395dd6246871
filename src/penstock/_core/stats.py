"""What a feed did so far: counters that only grow. Runs in the parent."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from penstock._core.budget import format_bytes
from penstock._core.errors import said, shown

__all__ = ["Stats"]

SHOWN_SKIPS: Final = 3


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
    """Most memory that was seen in use by all of the following together."""
    arena_bytes: int = 0
    """Memory of the arena when last looked at."""
    worker_bytes: int = 0
    """Memory of template and workers when last looked at, shared pages counted in proportion."""
    other_bytes: int = 0
    """What this process holds for the feed when last looked at: items of a stream before they are loaded, their shuffle
    window, an index of lines."""
    measure_s: float = 0.0
    """Seconds of processor time that looking at memory took, in this process and in workers."""
    cache_bytes: int = 0
    """Memory of samples that are kept (``cache="ram"``) when last looked at."""
    cached: int = 0
    """Samples that came from the cache and were not loaded."""
    restarts: int = 0
    """Workers that died and were replaced."""
    copied: int = 0
    """Batches that were handed out as copies because the consumer held too many slots, or all buffers of the device."""
    device_allocations: int = 0
    """Blocks of memory that were allocated on the device, ever; after the first batches it stays the same."""
    skipped: list[tuple[Any, BaseException]] = dataclasses.field(default_factory=list)
    """Items that were left out, with their errors."""

    def __repr__(self) -> str:
        told = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if field.name != "skipped"
        ]
        # There may be a million of them, with names and messages of any kind.
        few = [f"({shown(item)}, {said(error)})" for item, error in self.skipped[:SHOWN_SKIPS]]
        few += [f"... {len(self.skipped):,} in all"] if len(self.skipped) > SHOWN_SKIPS else []
        return f"Stats({', '.join(told)}, skipped=[{', '.join(few)}])"

    def __str__(self) -> str:
        return (
            f"{self.samples:,} samples in {self.batches:,} batches, {format_bytes(self.bytes)}; "
            f"waited {self.wait_s:.2f} s; peak {format_bytes(self.peak_bytes)}; {self.copied} copied, "
            f"{len(self.skipped)} skipped, {self.restarts} workers replaced"
        )
