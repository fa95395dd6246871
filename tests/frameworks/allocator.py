"""What torch's CPU allocator gave out at once, by torch's own profiler: the measure that predictions are held to."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")


def peak_bytes(function: Callable[[], Any]) -> int:
    """The most bytes that were allocated at once while it ran, beyond what was there before."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    found = []
    nodes = list(profile.profiler.kineto_results.experimental_event_tree())
    while nodes:
        node = nodes.pop()
        nodes += node.children
        if str(node.tag).endswith("Allocation"):
            found.append((node.start_time_ns, node.extra_fields.alloc_size))
    live = peak = 0
    for _, size in sorted(found, key=lambda event: event[0]):
        live += size
        peak = max(peak, live)
    return peak
