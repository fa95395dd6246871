"""The door to JAX: arrays on any of its devices, or spread over several by a sharding. Imports jax when it is used.

JAX owns its arrays and never writes to one again, so a buffer cannot be filled a second time. On an accelerator the
memory of a batch is JAX's own, and is given back when its arrays are gone; Penstock sees to it that there are never
more than planned. On the CPU, JAX takes aligned host memory as it is, even when it is told not to: there, batches are
copied to memory of the pool, which JAX may keep for as long as it likes. It never sees a slot.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from penstock._core.device import Device, HostDevice, Shelves
from penstock._core.spec import Array

__all__ = ["JaxDevice", "device"]


def device(name: str | None = None, *, sharding: Any = None) -> JaxDevice:
    """A device for ``to=`` or ``penstock.Place``: ``"cpu"``, ``"gpu:1"``, or where a sharding puts each part."""
    if sharding is not None:
        if name is not None:
            raise ValueError(f"give a device ({name!r}) or a sharding ({sharding!r}), not both")
        return JaxDevice(sharding)
    platform, _, index = (name or "").partition(":")
    try:
        return JaxDevice((jax.devices(platform) if platform else jax.devices())[int(index or 0)])
    except (RuntimeError, IndexError, ValueError) as error:
        there = ", ".join(f"{d.platform}:{d.id}" for d in jax.devices())
        raise ValueError(f"JAX has no device {name!r}, only {there}") from error


class JaxDevice(Device):
    """A device or a sharding of JAX."""

    def __init__(self, target: Any) -> None:
        self._target = target
        devices = getattr(target, "device_set", None) or {target}
        self.name = "jax:" + ",".join(sorted(f"{d.platform}:{d.id}" for d in devices))
        self._host = HostDevice() if all(d.platform == "cpu" for d in devices) else None
        self._devices = devices
        self._ends: dict[int, weakref.finalize[Any, Any]] = {}

    def allocate(self, nbytes: int) -> Any:
        """On the CPU memory that JAX will look at; else only a place for the arrays that JAX allocates."""
        return [] if self._host is None else self._host.allocate(nbytes)

    def copy(self, blocks: Sequence[Any], arrays: Sequence[Array]) -> Any:
        """Copy: JAX does it in the background where it is not to the host's own memory."""
        if self._host is not None:
            return self._host.copy(blocks, [array.astype(_canonical(array.dtype), copy=False) for array in arrays])
        for block, array in zip(blocks, arrays, strict=True):
            block[:] = [jax.device_put(array, self._target)]
        return [block[0] for block in blocks]

    def gather(
        self,
        shelves: Shelves,
        arrays: Sequence[Array],
        start: int,
        *,
        rows: npt.NDArray[np.int64],
        blocks: Sequence[Any],
    ) -> Any:
        """On the CPU in the host's own memory; else a shelf is an array that is given back changed (donated)."""
        shelves = dataclasses.replace(
            shelves, forms=tuple((shape, _canonical(dtype)) for shape, dtype in shelves.forms)
        )
        arrays = [array.astype(_canonical(array.dtype), copy=False) for array in arrays]
        if self._host is not None:
            return self._host.gather(shelves, arrays, start, rows=rows, blocks=blocks)
        if len(self._devices) > 1:
            raise ValueError(f"samples are kept on one device, not on {self.name}: leave out cache or the sharding")
        for shelf, array, (shape, dtype), block in zip(shelves.blocks, arrays, shelves.forms, blocks, strict=True):
            if not shelf:
                shelf[:] = [jax.device_put(jax.numpy.zeros((shelves.rows, *shape), dtype), self._target)]
            if len(array):
                # Always as many rows, since each number of them would be compiled for itself.
                padded = np.zeros((shelves.spare, *shape), dtype)
                padded[: len(array)] = array
                # It stays there until it is replaced: what is lost in between must not look like a new one.
                shelf[0] = _put(shelf[0], jax.device_put(padded, self._target), start)
            block[:] = [_taken(shelf[0], rows)]
        return [block[0] for block in blocks]

    def copied(self, ticket: Any, *, wait: bool) -> bool:
        """Whether the arrays are there."""
        if ticket is not None and wait:
            jax.block_until_ready(ticket)
        return ticket is None or all(array.is_ready() for array in ticket)

    def hand_out(
        self, block: Any, ticket: Any, shape: tuple[int, ...], dtype: np.dtype[Any], over: Callable[[], object]
    ) -> Any:
        """The array that JAX made, or one over the pool's memory that keeps it for as long as JAX reads there."""
        if self._host is not None:
            # Over when both are gone: the memory that was copied to, and the array, which may be a copy again.
            both = _Both(over)
            memory = self._host.hand_out(block, ticket, shape, _canonical(dtype), both.one)
            return self._watched(jax.device_put(memory, self._target), both.one)
        return self._watched(block.pop(), over)

    def cast(self, leaf: Any, block: Any, dtype: np.dtype[Any], over: Callable[[], object]) -> Any:  # noqa: ARG002 - JAX allocates the result itself
        """A new array of JAX's own."""
        return self._watched(leaf.astype(dtype), over)

    def _watched(self, array: Any, over: Callable[[], object]) -> Any:
        end = weakref.finalize(array, self._gone, id(array), over)
        end.atexit = False
        self._ends[id(array)] = end
        return array

    def _gone(self, key: int, over: Callable[[], object]) -> None:
        self._ends.pop(key, None)
        over()

    def free(self, block: Any) -> None:
        """Nothing to do: it goes with its last reference."""

    def form(self, leaf: Any) -> tuple[tuple[int, ...], np.dtype[Any]] | None:
        """Of any array of JAX."""
        return (leaf.shape, np.dtype(leaf.dtype)) if isinstance(leaf, jax.Array) else None

    def read(self, leaf: Any, out: Array) -> None:
        """Wait for the array and copy it."""
        np.copyto(out, np.asarray(leaf))

    def takes(self, dtype: np.dtype[Any]) -> bool:
        """Numbers, those of ml_dtypes too; 64-bit ones become 32-bit ones unless JAX was told otherwise."""
        return dtype.kind in "biufc" or dtype.type.__module__.startswith("ml_dtypes")

    def settle(self) -> None:
        """JAX lets go of host memory only when garbage is collected."""
        gc.collect(0)

    def recall(self, leaf: Any) -> None:
        """Delete it: JAX tells whoever uses it afterwards."""
        end = self._ends.get(id(leaf))
        leaf.delete()
        if end is not None:
            end()

    def available_bytes(self) -> int | None:
        """The least that is free on any of the devices."""
        if self._host is not None:
            return None
        stats = [d.memory_stats() or {} for d in self._devices]
        return min((s["bytes_limit"] - s["bytes_in_use"] for s in stats if "bytes_limit" in s), default=None)


@functools.partial(jax.jit, donate_argnums=0)
def _put(shelf: Any, array: Any, start: int) -> Any:
    return jax.lax.dynamic_update_slice_in_dim(shelf, array, start, axis=0)


@functools.partial(jax.jit)
def _taken(shelf: Any, rows: Any) -> Any:
    return jax.numpy.take(shelf, rows, axis=0, mode="clip")


def _canonical(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype that JAX makes of this one: 32 bits for 64, unless it was told otherwise."""
    found: np.dtype[Any] = jax.dtypes.canonicalize_dtype(dtype)
    return found


class _Both:
    """Calls ``over`` when two things are gone, in any order and any thread."""

    def __init__(self, over: Callable[[], object]) -> None:
        self._left: list[Callable[[], object]] = [over, bool]

    def one(self) -> None:
        """One of them is gone."""
        self._left.pop()()
