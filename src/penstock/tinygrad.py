"""The door to tinygrad: tensors over buffers that are filled again in place. Imports tinygrad when it is used.

A tensor of tinygrad may be lazy: what is computed from a batch can refer to its buffer long after the batch itself is
gone. All of these hold the same node of the graph (the ``UOp`` of the buffer), so that node is what a lease hangs on.
"""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tinygrad import Device as Devices
from tinygrad import Tensor, Variable, dtypes
from tinygrad.device import Buffer, BufferSpec
from tinygrad.uop.ops import Ops, UOp

from penstock._core.device import Device, Shelves
from penstock._core.spec import Array, to_dtype

__all__ = ["TinygradDevice", "device"]


def device(name: str | None = None) -> TinygradDevice:
    """A device for ``to=`` or ``penstock.Place``: ``"CL"``, ``"CPU"``, ``"CUDA:1"``; None: tinygrad's default."""
    return TinygradDevice(name)


class _Window(Buffer):  # type: ignore[misc] # tinygrad is Any to the type checker
    """The first bytes of a block under a dtype of their own. It owns nothing, so it frees nothing."""

    def __init__(self, block: Any, size: int, dtype: Any) -> None:
        super().__init__(block.device, size, dtype)
        self.allocator, self._bufs = block.allocator, dict(block._bufs)
        self._block = block

    def __del__(self) -> None:
        self._bufs.clear()


class TinygradDevice(Device):
    """One of tinygrad's devices. A block is a ``Buffer`` of bytes that bypasses tinygrad's cache of freed memory."""

    def __init__(self, name: str | None = None) -> None:
        if not hasattr(UOp, "from_buffer"):
            raise ImportError(
                'this tinygrad is too old to lend its buffers: pip install --upgrade "penstock[tinygrad]"'
            )
        try:
            self._device = Devices.canonicalize(name)
            self._runtime = Devices[self._device]
        except Exception as error:
            raise ValueError(
                f"tinygrad cannot open the device {name!r} ({type(error).__name__}: {error}): give one that is there, "
                'such as to="tinygrad:CPU"'
            ) from error
        self.name = f"tinygrad:{self._device}"
        self._nothing = Tensor.empty(0, device=self._device).uop

    def allocate(self, nbytes: int) -> Any:
        """A buffer of tinygrad."""
        return Buffer(self._device, max(1, nbytes), dtypes.uint8, options=BufferSpec(nolru=True), preallocate=True)

    def copy(self, blocks: Sequence[Any], arrays: Sequence[Array]) -> Any:
        """Queue the copies behind the kernels that are queued."""
        for block, array in zip(blocks, arrays, strict=True):
            if array.nbytes:
                self._runtime.allocator._copyin(block._buf, _bytes_of(array))
        return None if self._device == "CPU" else True

    def gather(
        self,
        shelves: Shelves,
        arrays: Sequence[Array],
        start: int,
        *,
        rows: npt.NDArray[np.int64],
        blocks: Sequence[Any],
    ) -> Any:
        """By way of the blocks: OpenCL copies to the start of a buffer only, kernels write anywhere in it.

        A block is written as a whole to the rows from ``start`` on, and then filled with what is wanted. So there are
        two kernels for each form of a row, however many samples come and wherever they are put.
        """
        at = Variable("start", 0, shelves.rows - shelves.spare).bind(start)
        places = rows.astype(np.int32)
        self.copy([shelves.index], [places])
        index = self._over(shelves.index, (len(rows),), dtypes.int32)
        for shelf, array, size, block in zip(shelves.blocks, arrays, shelves.row_bytes(), blocks, strict=True):
            if not size:
                continue
            unit = next(kind for kind in (dtypes.int32, dtypes.int16, dtypes.uint8) if size % kind.itemsize == 0)
            width = size // unit.itemsize
            kept = self._over(shelf, (shelves.rows, width), unit)
            if len(array):
                self.copy([block], [array])
                kept[at : at + shelves.spare].assign(self._over(block, (shelves.spare, width), unit)).realize()
                kept = self._over(shelf, (shelves.rows, width), unit)
            self._over(block, (len(rows), width), unit).assign(kept[index]).realize()
        return None if self._device == "CPU" else places  # which must live until it was read

    def _over(self, block: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        return Tensor(UOp.from_buffer(_Window(block, math.prod(shape), dtype))).reshape(shape)

    def copied(self, ticket: Any, *, wait: bool) -> bool:
        """tinygrad has no events that could be asked: known only after waiting for everything."""
        if wait and ticket is not None:
            self._runtime.synchronize()
        return wait or ticket is None

    def hand_out(
        self,
        block: Any,
        ticket: Any,  # noqa: ARG002 - kernels are queued behind the copy
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        over: Callable[[], object],
    ) -> Any:
        """A realized tensor over the block."""
        size = int(np.prod(shape, dtype=np.int64))
        tiny = _dtype_of(dtype)
        if size == 0:
            over()
            return Tensor.empty(*shape, dtype=tiny, device=self._device)
        node = UOp.from_buffer(_Window(block, size, tiny))
        weakref.finalize(node, over).atexit = False
        return Tensor(node).reshape(shape)

    def cast(self, leaf: Any, block: Any, dtype: np.dtype[Any], over: Callable[[], object]) -> Any:
        """Assign to a tensor over the block, which allocates nothing."""
        out = self.hand_out(block, None, tuple(leaf.shape), dtype, over)
        return out.assign(leaf.cast(out.dtype)).realize() if 0 not in leaf.shape else out

    def refuses(self, dtype: np.dtype[Any]) -> str | None:
        """Why nothing can be cast to this dtype here; None if it can."""
        compiler: Any = getattr(self._runtime, "compiler", None)
        if dtype.name != "bfloat16" or not hasattr(compiler, "args"):
            return None
        # tinygrad writes C for its CPU device, in which this is the name; older compilers lack it on many processors.
        target = [f"--target={compiler.arch}-none-unknown-elf", *compiler.args]
        command = [os.environ.get("CC", "clang"), "-x", "c", "-fsyntax-only", *target, "-"]
        done = subprocess.run(command, input=b"__bf16 x;", capture_output=True, check=False)
        return None if done.returncode == 0 else "its compiler, clang, is too old for that on this processor"

    def free(self, block: Any) -> None:
        """To the device, not to tinygrad's cache."""
        if block.is_allocated():
            block.deallocate()

    def form(self, leaf: Any) -> tuple[tuple[int, ...], np.dtype[Any]] | None:
        """Of any tensor of tinygrad."""
        if not isinstance(leaf, Tensor):
            return None
        return tuple(leaf.shape), to_dtype(_NAMES[leaf.dtype])

    def read(self, leaf: Any, out: Array) -> None:
        """Compute it if it is lazy, and copy."""
        if out.size:
            node = leaf.uop
            while node.op is Ops.RESHAPE:
                node = node.src[0]
            if node.op is not Ops.BUFFER:  # lazy, or part of something larger
                node = leaf.contiguous().realize().uop.base
            buffer = node.buffer.ensure_allocated()
            buffer.allocator._copyout(_bytes_of(out), buffer._buf)

    def takes(self, dtype: np.dtype[Any]) -> bool:
        """The numbers that tinygrad has a name for."""
        return _dtype_of(dtype) is not None

    def recall(self, leaf: Any) -> None:
        """Put nothing in its place: using it afterwards is an error."""
        leaf.uop = self._nothing


_DTYPES = {
    **{
        name: getattr(dtypes, name)
        for kind, sizes in (("int", (8, 16, 32, 64)), ("uint", (8, 16, 32, 64)), ("float", (16, 32, 64)))
        for name in (f"{kind}{size}" for size in sizes)
    },
    "bool": dtypes.bool,
    "bfloat16": dtypes.bfloat16,
    "float8_e4m3fn": dtypes.fp8e4m3,
    "float8_e5m2": dtypes.fp8e5m2,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def _dtype_of(dtype: np.dtype[Any]) -> Any:
    return _DTYPES.get(dtype.name)


def _bytes_of(array: Array) -> memoryview:
    """The bytes of a contiguous array; by its address, since tinygrad takes no memory that may not be written to."""
    return memoryview((ctypes.c_char * array.nbytes).from_address(array.ctypes.data)).cast("B")
