"""Blocks of device memory: allocated once, lent, taken back, lent again. Runs in the parent.

A pool never holds more than its budget. It first lends what is free in the size that is asked for, then allocates, then
lends something larger, and at last gives free blocks of other sizes back to the device to make room. Not safe in
several threads by itself; only ``give_back`` may be called from anywhere, in a finalizer too.
"""

from __future__ import annotations

import dataclasses
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, Final

from penstock._core.device import Device

__all__ = ["Block", "Pool", "size_class"]

LEAST_BYTES: Final = 512  # what a CUDA allocator hands out at least
LARGE_BYTES: Final = 2**20
STEPS: Final = 4  # sizes an octave of large blocks: at most a fifth of one is not used; small ones are powers of two


def size_class(nbytes: int) -> int:
    """The size of block for so many bytes, so that requests of all sizes do with a few kinds of block."""
    if nbytes <= LEAST_BYTES:
        return LEAST_BYTES
    power = 1 << (nbytes - 1).bit_length()
    step = power if nbytes <= LARGE_BYTES else power // (2 * STEPS)
    return -(-nbytes // step) * step


@dataclasses.dataclass(slots=True, eq=False)
class Block:
    """Memory of one leaf on the device."""

    nbytes: int
    memory: Any


class Pool:
    """The blocks of one device that one feed or one place may use."""

    def __init__(self, device: Device, budget: int | None, *, exact: bool = False) -> None:
        self.device = device
        self.budget = budget
        self._exact = exact  # every size has its own blocks: nothing larger is lent, nothing is freed to make room
        self.allocations = 0
        """Blocks that were allocated, ever."""
        self.reuses = 0
        """Blocks that were lent again."""
        self.held_bytes = 0
        """Memory of all blocks, lent or free."""
        self.lent_bytes = 0
        """Memory of those that are lent."""
        self.peak_bytes = 0
        self._free: defaultdict[int, list[Block]] = defaultdict(list)
        self._sizes: list[int] = []  # those of which there is a free block, in order
        self._returned: deque[Block] = deque()
        self._closed = False

    def take(self, sizes: Sequence[int]) -> list[Block] | None:
        """A block for each size, or None: then nothing was lent."""
        self.settle()
        taken: list[Block] = []
        try:
            for size in sizes:
                block = self._take(size)
                if block is None:
                    break
                self.lent_bytes += block.nbytes
                taken.append(block)
        except BaseException:
            self._returned.extend(taken)
            raise
        if len(taken) == len(sizes):
            return taken
        self._returned.extend(taken)
        self.settle()
        return None

    def give_back(self, block: Block) -> None:
        """Nobody uses this block any more."""
        if self._closed:
            block.memory = None  # and with its last reference the memory goes
        else:
            self._returned.append(block)

    def settle(self) -> None:
        """Put what was given back among the free blocks."""
        while self._returned:
            block = self._returned.popleft()
            self.lent_bytes -= block.nbytes
            if not self._free[block.nbytes]:
                insort(self._sizes, block.nbytes)
            self._free[block.nbytes].append(block)

    def trim(self) -> int:
        """Give all free blocks back to the device; how many bytes that was."""
        self.settle()
        before = self.held_bytes
        for size in list(self._sizes):
            while self._free[size]:
                self._release(self._pop(size))
        return before - self.held_bytes

    def close(self) -> None:
        """Give back what is free; what is lent follows when its last user lets go."""
        self._closed = True
        self.trim()

    def _take(self, size: int) -> Block | None:
        if self._free.get(size):
            self.reuses += 1
            return self._pop(size)
        self.device.settle()  # before more is allocated: there may be some that nobody uses, and nobody said so
        self.settle()
        if self._free.get(size):
            self.reuses += 1
            return self._pop(size)
        if self._fits(size):
            return self._allocate(size)
        if self._exact:
            return None
        larger = next((other for other in self._sizes if other > size), None)
        if larger is not None:
            self.reuses += 1
            return self._pop(larger)
        # All that is free is too small. Would it do if it were given back?
        free = sum(other * len(self._free[other]) for other in self._sizes)
        if self.budget is None or self.held_bytes - free + size > self.budget:
            return None
        while not self._fits(size):
            self._release(self._pop(self._sizes[0]))
        return self._allocate(size)

    def _fits(self, size: int) -> bool:
        return self.budget is None or self.held_bytes + size <= self.budget

    def _allocate(self, size: int) -> Block:
        try:
            memory = self.device.allocate(size)
        except (RuntimeError, MemoryError):
            # Somebody else has filled the device: perhaps what is free here makes room.
            if not self.trim():
                raise
            memory = self.device.allocate(size)
        self.allocations += 1
        self.held_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return Block(size, memory)

    def _pop(self, size: int) -> Block:
        block = self._free[size].pop()
        if not self._free[size]:
            del self._free[size]
            self._sizes.remove(size)
        return block

    def _release(self, block: Block) -> None:
        self.held_bytes -= block.nbytes
        memory, block.memory = block.memory, None
        self.device.free(memory)
