"""The door to PyTorch: tensors that share the slot's memory on the CPU, reused buffers on any other device.

Imports torch when it is used. The only lines that no test of this project has ever run, for want of a GPU, are those
under ``if self._stream is not None`` and in ``pin``: a side stream, an event a copy, and page-locking.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.dlpack import to_dlpack

from penstock._core.device import Device, Shelves
from penstock._core.spec import Array, to_dtype

__all__ = ["TorchDevice", "device", "from_array"]


def from_array(array: Any) -> Any:
    """A CPU tensor over the same memory, which keeps the batch's lease alive; texts, dates and records stay arrays."""
    name = array.dtype.name
    if name.startswith(("bfloat16", "float8")):  # torch knows the type but not numpy's name for it: pass the bits
        return torch.from_numpy(array.view(f"int{8 * array.itemsize}")).view(getattr(torch, name))
    return array if array.dtype.kind in "USMmV" else torch.from_numpy(array)


def device(name: str | None = None) -> TorchDevice:
    """A device for ``to=`` or ``penstock.Place``, the CPU if there is no name: batches are copied to it in any case."""
    return TorchDevice(name or "cpu")


class TorchDevice(Device):
    """Any device that torch knows by a string. A block is a tensor of bytes."""

    def __init__(self, name: str = "cpu") -> None:
        try:
            self._device = torch.device(name)
            block = self.allocate(1)
            self._lent(block, 1, lambda: None)
        except (RuntimeError, AssertionError, BufferError, ValueError) as error:
            raise ValueError(
                f"torch cannot lend memory of {name!r} ({str(error).splitlines()[0]}): give a device that is there, or "
                'to="torch" and move batches yourself'
            ) from error
        self._device = block.device  # "cuda" has become "cuda:0"
        self.name = f"torch:{self._device}"
        self._stream: Any = None
        self._released: deque[Any] = deque()
        self._locked: set[int] = set()
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)

    def allocate(self, nbytes: int) -> Any:
        """Bytes from torch's own allocator, so that its statistics count them."""
        return torch.empty(max(1, nbytes), dtype=torch.uint8, device=self._device)

    def copy(self, blocks: Sequence[Any], arrays: Sequence[Array]) -> Any:
        """Copy at once, or on CUDA in a stream of its own beside the computation."""
        with self._beside():
            for block, array in zip(blocks, arrays, strict=True):
                self._ship(block[: array.nbytes], array)
        return None if self._stream is None else self._stream.record_event()

    def gather(
        self,
        shelves: Shelves,
        arrays: Sequence[Array],
        start: int,
        *,
        rows: npt.NDArray[np.int64],
        blocks: Sequence[Any],
    ) -> Any:
        """The same, and then a kernel for each leaf that reads its shelf and writes its block."""
        count = len(rows)
        with self._beside():
            index = shelves.index[: 8 * count].view(torch.int64)
            self._ship(shelves.index[: 8 * count], rows)
            for shelf, array, size, block in zip(shelves.blocks, arrays, shelves.row_bytes(), blocks, strict=True):
                if size:
                    self._ship(shelf[start * size : start * size + array.nbytes], array)
                    # The type plays no role here, and a wide one has less to count.
                    unit = next(kind for kind in _UNITS if size % kind.itemsize == 0)
                    kept = shelf[: shelves.rows * size].view(unit).view(shelves.rows, -1)
                    torch.index_select(kept, 0, index, out=block[: count * size].view(unit).view(count, -1))
        return None if self._stream is None else self._stream.record_event()

    def _beside(self) -> Any:
        """Where copies are queued: on CUDA in a stream of their own."""
        if self._stream is None:
            return contextlib.nullcontext()
        # Kernels that were queued before this may still read the blocks: those that run now go on, and the copy
        # runs beside the ones that are queued after it.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        while self._released:
            self._stream.wait_event(self._released.popleft())
        return torch.cuda.stream(self._stream)

    def _ship(self, target: Any, array: Array) -> None:
        """Copy an array to bytes of the device."""
        if not array.nbytes:
            return
        if self._device.type == "cpu":  # torch's own copy waits for threads that a copy does not need
            np.copyto(target.numpy(), _bytes_of(array).numpy())
        else:
            target.copy_(_bytes_of(array), non_blocking=self._stream is not None)

    def copied(self, ticket: Any, *, wait: bool) -> bool:
        """Whether the stream has passed the copy."""
        if ticket is None:
            return True
        if wait:
            ticket.synchronize()
        return bool(ticket.query())

    def hand_out(
        self, block: Any, ticket: Any, shape: tuple[int, ...], dtype: np.dtype[Any], over: Callable[[], object]
    ) -> Any:
        """A tensor over the block, which the current stream uses only once the copy is done."""
        if ticket is not None:
            torch.cuda.current_stream(self._device).wait_event(ticket)
        storage = self._lent(block, dtype.itemsize * int(np.prod(shape, dtype=np.int64)), over)
        # Not a view: that would keep the storage even when it is recalled.
        return torch.empty(0, dtype=getattr(torch, dtype.name), device=self._device).set_(storage, 0, shape)

    def cast(self, leaf: Any, block: Any, dtype: np.dtype[Any], over: Callable[[], object]) -> Any:
        """One kernel that reads one block and writes another."""
        return self.hand_out(block, None, tuple(leaf.shape), dtype, over).copy_(leaf)

    def free(self, block: Any) -> None:
        """To torch's allocator, which keeps it, and on CUDA back to the driver."""
        del block
        if self._stream is not None:
            torch.cuda.empty_cache()

    def form(self, leaf: Any) -> tuple[tuple[int, ...], np.dtype[Any]] | None:
        """Of any tensor, wherever it is."""
        if not isinstance(leaf, torch.Tensor):
            return None
        return tuple(leaf.shape), to_dtype(str(leaf.dtype).removeprefix("torch."))

    def read(self, leaf: Any, out: Array) -> None:
        """Copy, waiting for the current stream."""
        leaf = leaf.detach()
        if leaf.device.type == "cpu" and leaf.is_contiguous() and leaf.numel():
            np.copyto(out.reshape(-1).view(np.uint8), leaf.reshape(-1).view(torch.uint8).numpy())
        else:
            from_array(out).copy_(leaf)

    def takes(self, dtype: np.dtype[Any]) -> bool:
        """The numbers that torch has a name for."""
        return dtype.kind not in "USMm" and isinstance(getattr(torch, dtype.name, None), torch.dtype)

    def recall(self, leaf: Any) -> None:
        """Make it a tensor without elements. Its other views stay, and keep the block until they are gone."""
        if self._stream is not None:  # the next copy may be another thread's, with another current stream
            self._released.append(torch.cuda.current_stream(self._device).record_event())
        leaf.data = torch.empty(0, dtype=leaf.dtype, device=leaf.device)

    def available_bytes(self) -> int | None:
        """What the driver says is free."""
        return None if self._stream is None else int(torch.cuda.mem_get_info(self._device)[0])

    def pin(self, address: int, nbytes: int) -> str | None:
        """Lock the pages of the arena where they are, so that the GPU reads slots without a staging copy."""
        if self._stream is None:
            return None
        code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
        if code == 0:
            self._locked.add(address)
            return "the arena is page-locked: the GPU reads slots without a copy in between"
        return f"the arena could not be page-locked (cudaHostRegister: error {code}): copies take a detour and wait"

    def unpin(self, address: int) -> None:
        """Let the pages go."""
        if address in self._locked:
            self._locked.remove(address)
            torch.cuda.cudart().cudaHostUnregister(address)

    def _lent(self, block: Any, nbytes: int, over: Callable[[], object]) -> Any:
        """Bytes of a block as a storage of its own, though of the same memory.

        It is gone when no view of it is left, and nothing that autograd saved: only then does DLPack let go
        of ``view``, and ``over`` is called.
        """
        view = block[:nbytes]
        weakref.finalize(view, over).atexit = False
        return torch.from_dlpack(to_dlpack(view)).untyped_storage()


_UNITS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def _bytes_of(array: Array) -> Any:
    """The bytes of a contiguous array as a tensor, without a copy, even if it may not be written to."""
    memory = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
    return torch.frombuffer(memory, dtype=torch.uint8)
