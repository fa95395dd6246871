"""How much memory something really takes while it runs: by torch's allocators, or by the growth of this process."""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Callable
from typing import Any, Final

from penstock._core import machine
from penstock._core.errors import PenstockError
from penstock._core.limit import trim

__all__ = ["process_peak", "torch_events", "torch_peak"]

SETTLE_S: Final = 0.04  # so long nothing must have been given back
SETTLE_MOST_S: Final = 1.0
SETTLED_BYTES: Final = 2**18


def torch_events(function: Callable[[], Any]) -> list[int]:
    """What torch's allocator for the CPU gave out, and minus what it got back, in order."""
    import torch

    # The older of torch's two profilers: it tells of each allocation, starts in microseconds and prints nothing.
    profiler, autograd = torch._C._profiler, torch._C._autograd
    config = profiler.ProfilerConfig(
        profiler.ProfilerState.CPU, False, True, False, False, False, profiler._ExperimentalConfig()
    )
    autograd._enable_profiler_legacy(config)
    try:
        function()
    finally:
        threads = autograd._disable_profiler_legacy()
    return [event.cpu_memory_usage() for events in threads for event in events if event.kind() == "memory_alloc"]


def torch_peak(function: Callable[[], Any], device: str) -> int:
    """The most bytes that torch's allocator for ``device`` gave out at once, beyond what it had given out before."""
    if device == "cpu":
        return max(0, *itertools.accumulate(torch_events(function)), 0)
    import torch

    if device != "cuda":
        raise PenstockError(f"what a step takes on {device!r} cannot be measured: give batch_size as a number")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def _settle(pid: int) -> None:
    """Wait until this process gives nothing back any more.

    Frameworks free what a step took in threads of their own, on a busy machine some while after it has ended: what is
    there as yet would hide as much of what the next step takes.
    """
    trim()
    least, since = machine.peak_own_bytes(pid)[0], time.monotonic()
    give_up = since + SETTLE_MOST_S
    while (now := time.monotonic()) < min(give_up, since + SETTLE_S):
        time.sleep(SETTLE_S / 8)
        trim()
        if (size := machine.peak_own_bytes(pid)[0]) < least - SETTLED_BYTES:
            least, since = size, now


def process_peak(function: Callable[[], Any]) -> int:
    """By how much this process grew while something ran, as the kernel counts; 0 if it only used what it had."""
    pid = os.getpid()
    gc.collect()
    _settle(pid)
    if not machine.reset_peak(pid):
        raise PenstockError(
            "what a step takes cannot be measured here, as this system does not tell a process its peak: give "
            "batch_size as a number"
        )
    before, _ = machine.peak_own_bytes(pid)
    function()
    return max(0, machine.peak_own_bytes(pid)[1] - before)
