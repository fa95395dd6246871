"""What a user asked of a feed, checked. Pure but for asking how much memory there is. Runs in the parent.

Everything wrong with an argument is said here, at once, before anything is started.
"""

from __future__ import annotations

import dataclasses
import operator
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from penstock._core import machine
from penstock._core.blocks import Blocks
from penstock._core.budget import Size, parse_size
from penstock._core.cache import Cache, sort_out_cache
from penstock._core.device import Device, Door, Gathers, door, handing_out
from penstock._core.errors import shown
from penstock._core.fit import Asked
from penstock._core.items import Picker, Stream, sort_out
from penstock._core.lines import Lines
from penstock._core.program import Batched, BatchedInto, Into, Pad, Retry, as_texts
from penstock._core.source import Source
from penstock._core.spec import Cast, split_cast, to_dtype

__all__ = ["Collate", "OnError", "Options", "check_count"]

OnError = Literal["raise", "skip"] | Retry
Collate = Callable[[list[Any]], Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments of a feed in the form in which they are used."""

    items: Picker | Stream | Source | Lines
    load: Callable[..., Any] | None
    batch_size: int | Literal["max"]
    memory: int
    num_workers: int | None
    executor: Literal["process", "thread"]
    shuffle: bool
    blocks: Blocks | None
    """How, where not the whole order is permuted."""
    seed: int
    drop_last: bool
    cast: Cast
    collate: Collate | None
    each: int | None
    """Samples an item; None: any number."""
    on_error: OnError
    timeout_s: float | None
    rank: int
    world: int
    door: Callable[[Any], Any] | None
    """What makes a leaf of an array over a slot; None: nothing needs to."""
    device: Device | None
    """What batches are copied to; None: they stay where they are."""
    device_budget: int | None
    """What batches may take there, where no model shares it with them."""
    on_device: Cast
    """What is cast on the device."""
    cache: Literal["ram", "device"] | Cache | None
    start_method: Literal["fork", "forkserver", "spawn"] | None
    device_memory: Size | None
    asked: Asked | None
    """The model that a batch has to leave room for."""
    most_slots: int | None = None
    """A limit that an interface above the feed has for the slots."""

    @classmethod
    def checked(
        cls,
        items: Any,
        load: Any,
        *,
        batch_size: Any,
        memory: int,
        num_workers: Any,
        executor: Any,
        shuffle: Any,
        seed: Any,
        drop_last: Any,
        cast: Any,
        collate_fn: Any,
        samples_per_item: Any,
        on_error: Any,
        timeout: Any,
        shard: Any,
        to: Any,
        device_memory: Size | None,
        cache: Any,
        start_method: Any,
        asked: Asked | None,
    ) -> Options:
        """The options of these arguments; TypeError or ValueError says what is wrong and what to give."""
        kind = sort_out(items, load)
        _check_choice("executor", executor, ("process", "thread"))
        _check_choice("start_method", start_method, (None, "fork", "forkserver", "spawn"))
        check_count("num_workers", num_workers, least=0, optional=True)
        check_count("samples_per_item", samples_per_item, least=1, optional=True)
        if isinstance(batch_size, str) and batch_size != "max":
            raise ValueError(f'batch_size={batch_size!r} is not known: give a number of samples, or "max"')
        if batch_size != "max":
            check_count("batch_size", batch_size, least=1)
        if not (isinstance(on_error, Retry) or on_error in ("raise", "skip")):
            raise ValueError(f'on_error={on_error!r} is not known: give "raise", "skip" or penstock.Retry(n)')
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
            raise TypeError(f"seed={seed!r} must be an int")
        if isinstance(collate_fn, str):
            _check_choice("collate_fn", collate_fn, ("pad", "list"))
        elif collate_fn is not None and not callable(collate_fn):
            raise TypeError(f'collate_fn={collate_fn!r} must be None, "pad", "list" or a callable on a list of samples')
        _check_batched(load, samples_per_item)
        _check_into(load, cast, collate_fn, samples_per_item)
        if load is None and samples_per_item != 1:
            raise TypeError(
                f"samples_per_item={samples_per_item} needs a load that gives so many: a source has one sample per row"
            )
        cast, on_device = split_cast(cast)
        kept = sort_out_cache(cache)
        way = door(to, casts=on_device is not None or kept == "device")
        for part in (cast, on_device):
            for dtype in part.values() if isinstance(part, Mapping) else () if part is None else (part,):
                _check_dtype(dtype)
        _check_timeout(timeout, load, executor, num_workers)
        if isinstance(kind, Lines) and kind.packed and shuffle:
            raise ValueError(
                "compressed text can be read in order only, so shuffle=True is not possible: unpack the files, or "
                "write them shuffled"
            )
        if asked is not None and collate_fn is not None:
            raise TypeError(
                "model needs to know the form of a batch beforehand, which a collate_fn decides each time: plan with "
                'the largest sample, penstock.plan(sample, batch_size="max", model=...), and give the number it says'
            )
        _check_casts(on_device, way.device)
        rank, world = _shard(shard)
        if isinstance(shuffle, Blocks):
            _check_blocks(shuffle, kind, batch_size, world)
        elif not isinstance(shuffle, bool | np.bool_):
            raise TypeError(f"shuffle={shuffle!r} must be True, False or penstock.Blocks(...)")
        _check_cache(kept, kind, collate_fn, samples_per_item, batch_size)
        if kept == "device":
            _check_device_cache(way.device, batch_size, device_memory if asked is None else 0)
        return cls(
            items=kind,
            load=load,
            batch_size=batch_size,
            memory=memory,
            num_workers=num_workers,
            executor=executor,
            shuffle=bool(shuffle),
            blocks=shuffle if isinstance(shuffle, Blocks) else None,
            seed=int(seed),
            drop_last=bool(drop_last),
            cast=cast,
            collate=_collate(collate_fn, lines=isinstance(kind, Lines) and load is None),
            each=samples_per_item,
            on_error=on_error,
            timeout_s=None if timeout is None else float(timeout),
            rank=rank,
            world=world,
            door=way.convert,
            device=way.device,
            device_budget=None if asked is not None else _device_budget(device_memory, way.device),
            on_device=on_device,
            cache=kept,
            start_method=start_method,
            device_memory=device_memory,
            asked=None if asked is None else _placed(asked, to, way),
        )

    def with_cache(self, cache: Cache) -> Options:
        """The same with another cache."""
        _check_cache(cache, self.items, self.collate, self.each, self.batch_size)
        return dataclasses.replace(self, cache=cache)

    @property
    def source(self) -> Source | None:
        """The items, if they are a source that reads by index."""
        return None if isinstance(self.items, Picker | Stream | Lines) else self.items

    @property
    def lines(self) -> Lines | None:
        """The items, if they are lines of text."""
        return self.items if isinstance(self.items, Lines) else None

    @property
    def streams(self) -> bool:
        """Whether the items come one after the other and cannot be counted."""
        return isinstance(self.items, Stream)

    @property
    def skips(self) -> bool:
        """Whether items that fail may be left out."""
        return self.on_error == "skip" or (isinstance(self.on_error, Retry) and self.on_error.then == "skip")

    @property
    def counts(self) -> bool:
        """Whether it is known beforehand how many batches an epoch has."""
        return self.each is not None and not self.streams and not self.skips

    @property
    def picks(self) -> bool:
        """Whether each batch can be had by its number: made of whole items, which are not read in blocks."""
        each, size = self.each, self.batch_size
        whole = each == 1 or (each is not None and size != "max" and size % each == 0)
        return self.counts and whole and self.blocks is None

    @property
    def in_processes(self) -> bool:
        """Whether worker processes were asked for."""
        return self.executor == "process" and self.num_workers != 0


def _device_budget(size: Size | None, device: Device | None) -> int | None:
    if size is None:
        return None
    available = device.available_bytes() if device is not None else None
    if available is None:
        available = machine.available_bytes()
    return parse_size(size, available=available, name="device_memory")


def _collate(collate_fn: Any, *, lines: bool) -> Collate | None:
    if lines and collate_fn in (None, "list"):
        return as_texts
    return Pad() if collate_fn == "pad" else list if collate_fn == "list" else collate_fn


def _placed(asked: Asked, to: Any, way: Door) -> Asked:
    """The same, with where the batches go."""
    name, _, rest = (to if way.device is None else way.device.name).partition(":")
    device = rest.partition(":")[0] or None if name == "torch" else None
    # A torch model on the CPU reads its batch from the slot itself.
    in_place = way.convert is not None
    buffers = 1 if to == "numpy" and way.device is None else 2
    leaf = way.convert if way.device is None else handing_out(way.device)
    return dataclasses.replace(asked, device=device, in_place=in_place, leaf=leaf, buffers=buffers)


def _shard(shard: Any) -> tuple[int, int]:
    if shard is None:
        return 0, 1
    if isinstance(shard, str):
        if shard != "auto":
            raise ValueError(f'shard={shard!r} is not known: give (rank, world), "auto" or None')
        return _own_rank()
    try:
        rank, world = (operator.index(number) for number in shard)
    except (TypeError, ValueError):
        raise TypeError(f'shard={shard!r} must be (rank, world), two ints, or "auto" or None') from None
    if not 0 <= rank < world:
        raise ValueError(f"shard={shard!r}: give (rank, world) with rank from 0 to world - 1")
    return rank, world


def _own_rank() -> tuple[int, int]:
    """Which rank this process is, of how many: asked of those who would know, and only if they are there already."""
    torch: Any = sys.modules.get("torch.distributed")
    if torch is not None and torch.is_available() and torch.is_initialized():
        return int(torch.get_rank()), int(torch.get_world_size())
    jax: Any = sys.modules.get("jax")
    # Asked for its process count, JAX would start up its devices: only where it was told of others.
    if jax is not None and jax.distributed.is_initialized():
        return int(jax.process_index()), int(jax.process_count())
    given = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    if not given:
        return 0, 1
    try:
        rank, world = int(given["RANK"]), int(given["WORLD_SIZE"])
    except (KeyError, ValueError):
        rank, world = 0, 0
    if not 0 <= rank < world:
        said = ", ".join(f"{name}={shown(value)}" for name, value in given.items())
        raise ValueError(
            f'shard="auto" found {said} in the environment, which is no rank: set RANK from 0 to WORLD_SIZE - 1 and '
            "WORLD_SIZE, or give shard=(rank, world)"
        )
    return rank, world


def _check_blocks(blocks: Blocks, items: Any, batch_size: Any, world: int) -> None:
    if isinstance(items, Stream):
        raise ValueError("a stream of items has no blocks: use shuffle=True, which draws from a window")
    if batch_size == "max":
        raise ValueError(
            'shuffle=Blocks(...) fills the budget with blocks, and so would batch_size="max": give a number'
        )
    if world > 1 and blocks.group is None:
        raise ValueError(
            f"Blocks() mixes what the budget of each rank allows, and {world} ranks must mix the same: give "
            "Blocks(group=...), in items of all ranks together"
        )


def _check_timeout(timeout: Any, load: Any, executor: str, num_workers: int | None) -> None:
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, int | float | np.number) or not 0 < timeout < float("inf"):
        raise ValueError(f"timeout={timeout!r} must be a number of seconds above 0, or None")
    if load is None:
        raise ValueError(f"timeout={timeout:g} is for load, and there is none: a source is read as a whole")
    if executor == "thread" or num_workers == 0:
        where = 'executor="thread"' if executor == "thread" else "num_workers=0"
        raise ValueError(
            f"timeout={timeout:g} needs worker processes, as nothing can stop a load in this one: leave out {where}"
        )


def _check_choice(name: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r} is not known: give one of {', '.join(map(repr, known))}")


def check_count(name: str, value: Any, *, least: int, optional: bool = False) -> None:
    """TypeError or ValueError unless the value is an int of at least ``least``."""
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name}={value!r} must be an int{' or None' if optional else ''}")
    if value < least:
        raise ValueError(f"{name}={value} must be {least} or more")


def _check_dtype(dtype: Any) -> None:
    try:
        known = not to_dtype(dtype).hasobject
    except (TypeError, AttributeError):
        known = False
    if not known:
        raise TypeError(f"cast={dtype!r} is not a dtype that a batch can have: give 'float16' or 'bfloat16', say")


def _check_casts(on_device: Any, device: Any) -> None:
    refuses = getattr(device, "refuses", None)  # not every device knows
    for dtype in on_device.values() if isinstance(on_device, Mapping) else () if on_device is None else (on_device,):
        if refuses is not None and (why := refuses(to_dtype(dtype))) is not None:
            raise ValueError(
                f'OnDevice({dtype!r}): {device.name} cannot compute that ({why}): use "float16" or "float32"'
            )


def _check_cache(cache: Any, items: Any, collate: Any, each: int | None, batch_size: Any) -> None:
    if cache is not None and isinstance(items, Stream):
        raise TypeError(
            "cache needs items that can be found again, and those of a stream come once and have no number: give a "
            "sequence of items (list(stream), if that is finite), or leave cache out"
        )
    if cache is None or cache == "ram":
        return
    where, why = repr(cache), ""
    if isinstance(cache, Cache):
        where, why = repr(os.fspath(cache.folder)), ", as rows of .npy files"
    if collate is not None or each is None:
        raise TypeError(
            f"cache={where} keeps samples of one shape{why}, and with "
            f"{'collate_fn' if collate is not None else 'samples_per_item=None'} samples may have any: use "
            'cache="ram", or make samples of one shape in load'
        )
    if each > 1 and (batch_size == "max" or batch_size % each):
        raise ValueError(
            f"cache={where} keeps items whole, so with samples_per_item={each} batch_size must be a multiple of "
            f'{each}, not {batch_size!r}: change it, or use cache="ram"'
        )


def _check_device_cache(device: Any, batch_size: Any, device_memory: Size | None) -> None:
    if not isinstance(device, Gathers):
        name = getattr(device, "name", device)
        raise TypeError(
            f'cache="device" needs a device that can put a batch together from samples that it keeps, and {name} '
            'cannot: it has no method "gather" (see penstock.Gathers). Use cache="ram", or leave cache out'
        )
    if batch_size == "max":
        raise ValueError(
            'cache="device" keeps samples in what the batches leave of device_memory, and batch_size="max" leaves '
            "nothing: give a number"
        )
    if device_memory is None:
        raise ValueError(
            'cache="device" needs device_memory: how much of the device buffers and kept samples may take together, '
            'such as "2 GiB" or 0.5 of what is free there'
        )


def _check_batched(load: Any, each: int | None) -> None:
    if isinstance(load, Batched | BatchedInto) and each != 1:
        raise TypeError(
            f"samples_per_item={each} cannot be used with penstock.batched: that load gives one sample for each item"
        )


def _check_into(load: Any, cast: Any, collate: Any, each: int | None) -> None:
    if not isinstance(load, Into):
        return
    for name, wrong in (
        ("cast", cast is not None),
        ("collate_fn", collate is not None),
        ("samples_per_item", each != 1),
    ):
        if wrong:
            raise TypeError(f"{name} cannot be used with @penstock.into: that load writes the stored form itself")
