"""Where batches go: what a device must be able to do, and how ``to=`` becomes one.

Runs in the parent; imports a framework only when it is asked for. A device moves bytes and says when memory may be used
again. How much of it there is and who gets it is decided elsewhere (``pool``, ``delivery``, ``place``).
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import math
import mmap
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from penstock._core.spec import Array

__all__ = ["Device", "Door", "Gathers", "HostDevice", "Shelves", "copying_device", "door", "handing_out", "lent"]

_HOW: Final = (
    'give "numpy", "torch", "torch:cuda:0", "jax", "jax:cpu:0", "tinygrad", "tinygrad:CL", or an object with the '
    "methods of penstock.Device"
)


@runtime_checkable
class Device(Protocol):
    """Memory that batches are copied to. Subclass it, and prove the result with ``penstock.testing.DeviceSuite``.

    The life of a block: ``allocate``, then again and again ``copy`` and ``hand_out``, at last ``free``. Penstock copies
    to a block only after ``over`` was called for what was handed out of it before. The methods from ``takes`` on have
    a default that will do.
    """

    name: str
    """What to call it in plans and messages, such as ``"torch:cuda:0"``."""

    def allocate(self, nbytes: int) -> Any:
        """A new block of device memory; whatever the framework raises when there is none."""

    def copy(self, blocks: Sequence[Any], arrays: Sequence[Array]) -> Any:
        """Begin to copy each C-contiguous array to the start of its block; a ticket for this copy.

        Work that was queued on the device before comes first: a kernel that still reads a block is waited for there.
        """

    def copied(self, ticket: Any, *, wait: bool) -> bool:
        """Whether the arrays of a copy may be written again; with ``wait``, not before they may."""

    def hand_out(
        self, block: Any, ticket: Any, shape: tuple[int, ...], dtype: np.dtype[Any], over: Callable[[], object]
    ) -> Any:
        """What was copied to a block, as the framework's own array over that memory.

        ``over`` is to be called once, from any thread, when neither it nor anything that shares its memory is left.
        """

    def cast(self, leaf: Any, block: Any, dtype: np.dtype[Any], over: Callable[[], object]) -> Any:
        """The same values in another dtype, computed on the device and written to a block; ``over`` as above."""

    def free(self, block: Any) -> None:
        """Give the memory of a block back; nothing refers to it."""

    def form(self, leaf: Any) -> tuple[tuple[int, ...], np.dtype[Any]] | None:
        """Shape and dtype of an array of this framework; None for anything else."""

    def read(self, leaf: Any, out: Array) -> None:
        """Copy an array of this framework to host memory of the same form; ``out`` is complete on return."""

    def takes(self, dtype: np.dtype[Any]) -> bool:
        """Whether arrays of this dtype can lie there; those that cannot stay NumPy arrays."""
        return dtype.kind in "biuf"

    def settle(self) -> None:
        """Let ``over`` be called for what nobody uses any more, where the framework puts that off."""
        return

    def recall(self, leaf: Any) -> None:  # noqa: ARG002 - a default does without
        """Empty what was handed out, where that can be: who kept it gets an error, not somebody else's data."""
        return

    def available_bytes(self) -> int | None:
        """Memory that is free on the device; None if it is the machine's own."""
        return None

    def pin(self, address: int, nbytes: int) -> str | None:  # noqa: ARG002 - same
        """Make host memory such that copies from it need no detour; a note for the plan about how that went."""
        return None

    def unpin(self, address: int) -> None:  # noqa: ARG002 - same
        """Undo ``pin``."""
        return


@dataclasses.dataclass(frozen=True, slots=True)
class Shelves:
    """Samples that are kept on a device: a block for each leaf, with a row for each sample."""

    blocks: tuple[Any, ...]
    """One for each leaf, allocated by the device."""
    forms: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]
    """Shape and dtype of a row of each."""
    rows: int
    """Rows of each, the spare ones counted."""
    spare: int
    """Rows at the end that are never kept: those of a batch that only come by. No batch has more rows than these."""
    index: Any
    """A block with room for ``spare`` numbers of 64 bits, for the device to use as it likes."""

    def row_bytes(self) -> list[int]:
        """Bytes of a row of each leaf."""
        return [dtype.itemsize * math.prod(shape) for shape, dtype in self.forms]


@runtime_checkable
class Gathers(Protocol):
    """What a device can do besides, so that samples can be kept on it (``cache="device"``)."""

    def gather(
        self,
        shelves: Shelves,
        arrays: Sequence[Array],
        start: int,
        *,
        rows: npt.NDArray[np.int64],
        blocks: Sequence[Any],
    ) -> Any:
        """Begin to copy arrays to the rows of their shelves from ``start`` on, and then these rows of each shelf to the
        start of its block; a ticket as from ``copy``.

        The arrays have any number of samples up to ``spare``, none too. What comes after them up to ``start + spare``
        is nobody's and may be overwritten. Blocks have room for ``spare`` rows.
        """


def lent(memory: Any, nbytes: int, over: Callable[[], object]) -> Any:
    """Memory with the buffer protocol, under an owner of its own: ``over`` when the last array over that is gone."""
    lease = (ctypes.c_char * nbytes).from_buffer(memory)
    weakref.finalize(lease, over).atexit = False
    return lease


class HostDevice(Device):
    """The host's own memory as a device: the plainest one there is, and a pattern for others. Batches are copied."""

    def __init__(self, name: str = "numpy") -> None:
        self.name = name

    def allocate(self, nbytes: int) -> Any:
        """Whole pages, so that copies run at full speed."""
        return mmap.mmap(-1, max(1, nbytes))

    def copy(self, blocks: Sequence[Any], arrays: Sequence[Array]) -> Any:
        """Copy now."""
        for block, array in zip(blocks, arrays, strict=True):
            if array.nbytes:
                np.copyto(np.frombuffer(block, array.dtype, array.size).reshape(array.shape), array)

    def copied(self, ticket: Any, *, wait: bool) -> bool:  # noqa: ARG002 - there is nothing to wait for
        """Always: copies are done at once."""
        return True

    def hand_out(
        self,
        block: Any,
        ticket: Any,  # noqa: ARG002 - same
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        over: Callable[[], object],
    ) -> Array:
        """An array over the block."""
        size = int(np.prod(shape, dtype=np.int64))
        lease = lent(block, max(1, size * dtype.itemsize), over)
        return np.frombuffer(lease, dtype, size).reshape(shape)

    def cast(self, leaf: Array, block: Any, dtype: np.dtype[Any], over: Callable[[], object]) -> Array:
        """Cast into the block."""
        out = self.hand_out(block, None, leaf.shape, dtype, over)
        np.copyto(out, leaf, casting="unsafe")
        return out

    def gather(
        self,
        shelves: Shelves,
        arrays: Sequence[Array],
        start: int,
        *,
        rows: npt.NDArray[np.int64],
        blocks: Sequence[Any],
    ) -> Any:
        """Copy now."""
        for shelf, array, size, block in zip(shelves.blocks, arrays, shelves.row_bytes(), blocks, strict=True):
            if size:
                kept = np.frombuffer(shelf, np.uint8, shelves.rows * size).reshape(shelves.rows, size)
                kept[start : start + len(array)] = array.reshape(-1).view(np.uint8).reshape(len(array), size)
                out = np.frombuffer(block, np.uint8, len(rows) * size).reshape(len(rows), size)
                # "clip" because with "raise" NumPy gathers into a buffer first; rows are never out of bounds.
                np.take(kept, rows, axis=0, out=out, mode="clip")

    def free(self, block: Any) -> None:
        """Unmapped with its last reference: a lease that is just ending in another thread may still have one."""

    def form(self, leaf: Any) -> tuple[tuple[int, ...], np.dtype[Any]] | None:
        """NumPy arrays have one."""
        return (leaf.shape, leaf.dtype) if isinstance(leaf, np.ndarray) else None

    def read(self, leaf: Array, out: Array) -> None:
        """Copy."""
        np.copyto(out, leaf)

    def takes(self, dtype: np.dtype[Any]) -> bool:
        """Everything that has no Python objects in it."""
        return not dtype.hasobject


@dataclasses.dataclass(frozen=True, slots=True)
class Door:
    """How batches leave: by ``convert``, leaf by leaf, as they lie in the slot; or copied to ``device``."""

    convert: Callable[[Any], Any] | None = None
    device: Device | None = None


def door(to: Any, *, casts: bool = False) -> Door:
    """What ``to=`` means; ``casts``: something is cast on the way, so that slots cannot be handed out as they are."""
    if isinstance(to, str) and not casts:
        if to == "numpy":
            return Door()
        if to in ("torch", "torch:cpu"):
            return Door(convert=_module("torch", to).from_array)
    return Door(device=copying_device(to))


def handing_out(device: Device) -> Callable[[Array], Any]:
    """What makes of an array what the device hands out, in memory of its own; what it does not take stays as it is."""

    def leaf(array: Array) -> Any:
        if not device.takes(array.dtype):
            return array
        block = device.allocate(max(1, array.nbytes))
        ticket = device.copy([block], [array])
        device.copied(ticket, wait=True)
        return device.hand_out(block, ticket, array.shape, array.dtype, lambda: device.free(block))

    return leaf


def copying_device(to: Any) -> Device:
    """The device of this name, to which everything is copied; or the device that was given."""
    if not isinstance(to, str):
        if isinstance(to, Device):
            return to
        missing = sorted(n for n in vars(Device) if not n.startswith("_") and not hasattr(to, n))
        raise TypeError(
            f"to={to!r} is not a device: it has no {', '.join(missing)}; {_HOW}"
            if 0 < len(missing) < 5
            else f"to={to!r} is a {type(to).__name__}: {_HOW}"
        )
    name, _, rest = to.partition(":")
    if name == "numpy" and not rest:
        return HostDevice()
    if name not in ("torch", "jax", "tinygrad"):
        raise ValueError(f"to={to!r} is not known: {_HOW}")
    made: Device = _module(name, to).device(rest or None)
    return made


def _module(name: str, to: str) -> Any:
    """The door to a framework, which is imported with it."""
    try:
        return importlib.import_module(f"penstock.{name}")
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ModuleNotFoundError(
            f'to={to!r} needs {name}, which is not installed here: pip install "penstock[{name}]"', name=name
        ) from error
