"""How tasks and replies look as bytes: fixed structs, then raw indices, then a pickle only where one is needed.

Runs in the parent and in workers. A reply that says "done" is one struct and nothing else.
"""

from __future__ import annotations

import dataclasses
import enum
import pickle
import struct
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from penstock._core.errors import LoadError, said, shown
from penstock._core.pickles import dumps
from penstock._core.source import Unread
from penstock._core.task import Failure, Reply, Status, Task

__all__ = [
    "Notice",
    "decode_notice",
    "decode_reply",
    "decode_task",
    "dump_items",
    "encode_notice",
    "encode_reply",
    "encode_task",
    "ident_of",
]

_TASK: Final = struct.Struct("<QIIQQIqIBIBIIqQB")
_REPLY: Final = struct.Struct("<QHBQd")
_NOTICE: Final = struct.Struct("<B5q")
_MOST_ERROR_BYTES: Final = 2**18  # some errors carry the data they are about, which the budget has no room for


def dump_items(items: Any) -> bytes:
    """Items as bytes; TypeError that says what items are for when one cannot be."""
    try:
        return dumps(items)
    except Exception as error:  # whatever the user's objects do while they are pickled
        raise TypeError(
            f"items like {shown(_first_refusing(items))} cannot be sent to worker processes ({said(error)}): items "
            'are identities (paths, keys, indices) that can be pickled; or use executor="thread" or num_workers=0'
        ) from error


def _first_refusing(items: Any) -> Any:
    for item in items:
        try:
            dumps(item)
        except Exception:  # noqa: BLE001 - same as above
            return item
    return items[0]


def encode_task(task: Task) -> bytes:
    """A task as bytes; each item by itself where they could not be unpacked together."""
    count = len(task.indices)
    alone, barred = task.alone, task.barred
    if alone:
        chosen = set(alone)
        barred = (*barred, *(place for place in range(count) if place not in chosen))
    elif task.apart is not None:
        barred = (*barred, *task.apart.done)
    kept = None if alone else task.kept
    # Places of lines are one thing: there is nothing in them that could be unpacked by itself.
    together = not alone and Failure.TOGETHER not in barred
    apart = not together and task.items is not None and not hasattr(task.items, "blocks")
    head = _TASK.pack(
        task.id,
        task.slot,
        count,
        task.offset,
        task.capacity,
        task.start,
        task.epoch,
        task.skip,
        (2 if apart else 1) if task.items is not None else 0,
        len(barred),
        task.places is not None,
        alone[0] if alone else task.first,
        0 if kept is None else len(kept),
        -1 if task.ahead is None else len(task.ahead),
        task.text_bytes,
        bool(alone) and task.trial,
    )
    places = task.places.tobytes() if task.places is not None else b""
    items = [dump_items([item]) for item in task.items or ()] if apart else task.items
    body = dump_items(items) if items is not None else b""
    bars = np.array(barred, np.int64).tobytes() if barred else b""
    shelved = kept.tobytes() if kept is not None else b""
    ahead = task.ahead.tobytes() if task.ahead is not None else b""
    return b"".join((head, task.indices.tobytes(), places, bars, shelved, ahead, body))


def ident_of(data: bytes) -> int:
    """Which task this is, without a look at its items: unpickling them is the worker's risk."""
    ident: int = _TASK.unpack_from(data)[0]
    return ident


def decode_task(data: bytes, note: Callable[[int], None] | None = None) -> Task:
    """A task from bytes; ``note`` is told which item is unpacked, where each is by itself."""
    (
        ident,
        slot,
        count,
        offset,
        capacity,
        start,
        epoch,
        skip,
        has_items,
        bars,
        has_places,
        first,
        shelved,
        told,
        text_bytes,
        trial,
    ) = _TASK.unpack_from(data)
    at = _TASK.size + 8 * count
    indices = np.frombuffer(data, np.int64, count, _TASK.size)
    places = None
    if has_places:
        places = np.frombuffer(data, np.int64, count, at)
        at += 8 * count
    barred = tuple(np.frombuffer(data, np.int64, bars, at).tolist()) if bars else ()
    at += 8 * bars
    kept = np.frombuffer(data, np.int64, shelved, at) if shelved else None
    at += 8 * shelved
    ahead = np.frombuffer(data, np.int64, told, at) if told >= 0 else None
    items = pickle.loads(memoryview(data)[at + 8 * max(0, told) :]) if has_items else None
    if has_items == 2 and items is not None:
        closed = frozenset(barred)
        items = [None if o in closed else _unpacked(packed, o, note) for o, packed in enumerate(items)]
    rest = (skip, barred, places, kept, first, ahead, text_bytes)
    return Task(ident, slot, offset, capacity, start, epoch, indices, items, *rest, trial=bool(trial))


def _unpacked(packed: bytes, ordinal: int, note: Callable[[int], None] | None) -> Any:
    if note is not None:
        note(ordinal)
    try:
        return pickle.loads(packed)[0]
    except Exception as error:  # noqa: BLE001 - the user's classes decide what can go wrong here
        return Unread(error, lambda: pickle.loads(packed)[0])


def encode_reply(reply: Reply) -> bytes:
    """A reply as bytes; errors that cannot be pickled are replaced by one that says what they were."""
    head = _REPLY.pack(reply.task, reply.worker, reply.status, reply.rows, reply.seconds)
    if reply.body is None and not reply.failures and reply.kept is None:
        return head
    body = _portable(reply.body) if isinstance(reply.body, Failure) else reply.body
    return head + dumps((body, tuple(map(_portable, reply.failures)), reply.kept))


def decode_reply(data: bytes) -> Reply:
    """A reply from bytes."""
    task, worker, status, rows, seconds = _REPLY.unpack_from(data)
    reply = Reply(task, worker, Status(status), rows, seconds)
    if len(data) > _REPLY.size:
        reply.body, reply.failures, reply.kept = pickle.loads(memoryview(data)[_REPLY.size :])
    return reply


class Notice(enum.IntEnum):
    """What the template has to say, and the numbers that go with it."""

    HERE = 1
    """Its own size in bytes."""
    MADE = 2
    """A worker, its pid."""
    EXIT = 3
    """A worker (-1: one that waited to be one), its pid, its exit code; if it was ended for being late: task and item
    as in its record, else -1."""
    REFUSED = 4
    """The number of the system's error: a worker cannot be made."""
    ABSENT = 5
    """None; the error for which there can be no worker at all, and its traceback, follow as a pickle."""
    SPARE = 6
    """The pid of a process that waits to be a worker."""


def encode_notice(notice: Notice, *numbers: int, body: Any = None) -> bytes:
    """A notice as bytes."""
    head = _NOTICE.pack(notice, *numbers, *(0,) * (5 - len(numbers)))
    return head if body is None else head + pickle.dumps(body)


def decode_notice(data: bytes) -> tuple[Notice, tuple[int, ...], Any]:
    """A notice from bytes: what it is, its numbers, and what follows them."""
    kind, *numbers = _NOTICE.unpack_from(data)
    notice = Notice(kind)
    return notice, tuple(numbers), pickle.loads(data[_NOTICE.size :]) if notice is Notice.ABSENT else None


def _portable(failure: Failure) -> Failure:
    try:
        data = dumps(failure.error)
        if len(data) <= _MOST_ERROR_BYTES:
            again = pickle.loads(data)
            if type(again).__qualname__ == type(failure.error).__qualname__:
                return failure
    except Exception:  # noqa: BLE001 - the user's exception class decides what can go wrong here, memory may be short
        pass
    return dataclasses.replace(failure, error=LoadError(said(failure.error)))
