"""The lower names of ``tinyloader.loader``: arrays in numbered blocks of one piece of named shared memory.

Nothing else here uses them: a feed has slots. They are for code that imports them by name, and work on Python 3.11,
where ``queue.Queue`` cannot be shut down. A pool belongs to one process; what it hands out can be pickled.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from dataclasses import dataclass
from multiprocessing.managers import SharedMemoryManager
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["LoadRequestSharedBuffer", "MemoryPool", "SharedBuffer", "SharedNDArray", "init_worker", "share_ndarray"]


@dataclass(frozen=True)
class SharedBuffer:
    """One block of a pool."""

    index: int
    view: slice
    buffer: SharedMemory
    actual_block_size: int

    @property
    def buf(self) -> memoryview:
        """The memory of the block."""
        memory = self.buffer.buf
        assert memory is not None, "its manager has closed this memory"
        return memory[self.view]


@dataclass(frozen=True)
class SharedNDArray:
    """An array that lies in a block: its form and where it is."""

    shape: tuple[int, ...]
    dtype: npt.DTypeLike
    buffer: SharedBuffer

    def to_ndarray(self) -> npt.NDArray[Any]:
        """A view of it; wrong as soon as the block is used again."""
        return np.ndarray(self.shape, self.dtype, self.buffer.buf)


@dataclass(frozen=True)
class LoadRequestSharedBuffer:
    """A request and the blocks for the arrays that it will give."""

    request: Any
    buffers: tuple[SharedBuffer, ...] | None


def share_ndarray(array: npt.NDArray[Any], buffer: SharedBuffer) -> SharedNDArray:
    """Copy an array into a block of exactly its size."""
    if array.nbytes != buffer.actual_block_size:
        raise ValueError(
            f"an array of {array.nbytes} bytes does not go into a block of {buffer.actual_block_size}: take one from a "
            "pool for arrays of this size"
        )
    shared = SharedNDArray(array.shape, array.dtype, buffer)
    shared.to_ndarray()[...] = array
    return shared


class MemoryPool:
    """So many blocks of one size in shared memory; ``pop`` waits until one is free."""

    def __init__(self, smm: SharedMemoryManager, block_size: int, block_count: int, alignment_size: int = 8) -> None:
        self.actual_block_size = block_size
        self.block_size = max(block_size, alignment_size)
        self.block_count = block_count
        self._memory = smm.SharedMemory(self.block_size * block_count)
        self._free = deque(range(block_count))
        self._changed = threading.Condition()
        self._over = False

    def pop(self) -> SharedBuffer:
        """A free block; ``RuntimeError`` once the pool was shut down."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._over)
            if self._over:
                raise RuntimeError("the pool was shut down: make a new one")
            index = self._free.popleft()
        start = index * self.block_size
        return SharedBuffer(index, slice(start, start + self.block_size), self._memory, self.actual_block_size)

    def push(self, shared_buffer: SharedBuffer) -> None:
        """Give a block back."""
        if shared_buffer.actual_block_size != self.actual_block_size:
            raise ValueError(
                f"a block of {shared_buffer.actual_block_size} bytes is not of this pool, whose blocks have "
                f"{self.actual_block_size}: give it back to the pool it came from"
            )
        with self._changed:
            self._free.append(shared_buffer.index)
            self._changed.notify()

    def shutdown(self) -> None:
        """Let everyone who waits for a block go with an error."""
        with self._changed:
            self._over = True
            self._changed.notify_all()


def init_worker() -> None:
    """For the workers of a pool of processes: Ctrl-C is the parent's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
