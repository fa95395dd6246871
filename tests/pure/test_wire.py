"""Tasks and replies as bytes: what comes out is what went in, whatever the user's items and errors are."""

from __future__ import annotations

import pickle
import traceback
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock._core.errors import LoadError, SpecError, WorkerLost
from penstock._core.pickles import dumps
from penstock._core.task import Apart, Failure, Reply, Status, Task
from penstock._core.wire import decode_reply, decode_task, encode_reply, encode_task, ident_of

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
i64 = st.integers(-(2**63), 2**63 - 1)
identities = st.one_of(st.text(), st.binary(), st.integers(), st.tuples(st.text(), st.integers()), st.none())


@given(u64, u32, u64, u64, u32, i64, st.lists(i64, max_size=20), u32, st.sets(st.integers(0, 2**31), max_size=255))
def test_a_task_comes_out_as_it_went_in(
    ident: int,
    slot: int,
    offset: int,
    capacity: int,
    start: int,
    epoch: int,
    indices: list[int],
    skip: int,
    barred: set[int],
) -> None:
    """Every field, at its limits; a worker that wrote to a wrong row would corrupt a batch in silence."""
    task = Task(
        ident, slot, offset, capacity, start, epoch, np.array(indices, np.int64), None, skip, tuple(sorted(barred))
    )
    data = encode_task(task)
    again = decode_task(data)
    assert (again.id, again.slot, again.offset, again.capacity) == (ident, slot, offset, capacity)
    assert (again.start, again.epoch, again.skip, again.barred) == (start, epoch, skip, task.barred)
    assert again.indices.tolist() == indices
    assert again.indices.dtype == np.int64
    assert again.items is None
    assert ident_of(data) == ident


@given(st.lists(identities, max_size=20))
def test_items_come_out_as_they_went_in(items: list[Any]) -> None:
    """None, empty texts and empty lists of items are values, not absences."""
    task = Task(1, 0, 0, 0, 0, 0, np.arange(len(items)), items)
    assert decode_task(encode_task(task)).items == items


@given(st.lists(i64, max_size=20), st.one_of(st.none(), st.lists(i64, min_size=1, max_size=44)), st.booleans())
def test_what_a_cache_has_comes_out_as_it_went_in(indices: list[int], kept: list[int] | None, scattered: bool) -> None:
    """There may be more numbers than items, and places of rows beside them; a wrong one would read another's sample."""
    rows = np.arange(len(indices))[::-1].copy() if scattered else None
    task = Task(1, 0, 0, 0, 0, 0, np.array(indices, np.int64), ["a"], 0, (3,), rows)
    task.kept = None if kept is None else np.array(kept, np.int64)
    again = decode_task(encode_task(task))
    assert (None if again.kept is None else again.kept.tolist()) == kept
    assert (None if again.places is None else again.places.tolist()) == (None if rows is None else rows.tolist())
    assert (again.indices.tolist(), again.barred, again.items) == (indices, (3,), ["a"])
    for said in (None, "the disk is full", np.arange(3).tobytes()):
        assert decode_reply(encode_reply(Reply(1, 0, Status.DONE, kept=said))).kept == said


def test_indices_that_are_a_slice_of_others_are_sent_right() -> None:
    """The order is computed in blocks, and a task gets a part of one."""
    indices = np.arange(100)[10:40:3]
    task = Task(1, 0, 0, 0, 0, 0, indices, None)
    assert decode_task(encode_task(task)).indices.tolist() == indices.tolist()


def test_a_task_that_is_taken_apart_travels_as_what_is_to_be_done_now() -> None:
    """First some of its items and nothing else, without the cache; then all that are left."""
    task = Task(1, 0, 0, 0, 0, 0, np.arange(6), list("abcdef"), barred=(1,), kept=np.full(6, -1))
    task.apart = Apart([(3, 4)], done=(2,))
    part = decode_task(encode_task(task))
    assert [place for place in range(6) if place not in part.barred and place >= part.first] == [3, 4]
    assert (part.items, part.kept) == ([None, None, None, "d", "e", None], None)
    task.apart.groups.clear()
    rest = decode_task(encode_task(task))
    assert [place for place in range(6) if place not in rest.barred and place >= rest.first] == [0, 3, 4, 5]
    assert rest.items == list("abcdef")
    assert rest.kept is not None


@given(u64, st.integers(0, 2**16 - 1), st.sampled_from(Status), u64, st.floats(allow_nan=False))
def test_a_reply_comes_out_as_it_went_in(task: int, worker: int, status: Status, rows: int, seconds: float) -> None:
    """Every status and every field at its limits."""
    again = decode_reply(encode_reply(Reply(task, worker, status, rows, seconds)))
    assert again == Reply(task, worker, status, rows, seconds)
    assert isinstance(again.status, Status)


def test_the_reply_for_a_task_that_is_done_holds_no_pickle() -> None:
    """It is sent for every task: it must cost nothing, and give a broken decoder nothing to exploit."""
    assert len(encode_reply(Reply(2**40, 3, Status.DONE, 32, 0.5))) == 27


def test_the_body_of_a_reply_may_be_anything() -> None:
    """Texts that did not fit, the shape of a collated batch, counts of samples."""
    body = ([(0, 3), (1, 2)], [(0, 1, b"text")])
    assert decode_reply(encode_reply(Reply(1, 0, Status.MORE, 5, body=body))).body == body


# -------------------------------------------------------------------------------------------------------------- errors


class Stubborn(Exception):
    """Cannot be pickled at all."""

    def __reduce__(self) -> Any:
        raise TypeError("not me")


class Picky(Exception):
    """Can be pickled, and then not unpickled: its constructor wants two arguments and gives one on."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one)
        self.two = two


class Shifty(Exception):
    """Becomes something else on the way."""

    def __reduce__(self) -> Any:
        return (list, ())


def raised(error: Exception) -> Failure:
    try:
        raise error
    except Exception as caught:  # noqa: BLE001 - any of them
        return Failure(3, caught, "".join(traceback.format_exception(caught)))


def sent(failure: Failure) -> Failure:
    reply = decode_reply(encode_reply(Reply(1, 0, Status.FAILED, body=failure, failures=(failure,))))
    assert isinstance(reply.body, Failure)
    assert repr(reply.failures[0].error) == repr(reply.body.error)
    return reply.body


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad"),
        KeyError("k"),
        OSError(2, "No such file", "a.png"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"),
        SpecError("another shape", item="a"),
        WorkerLost("gone", item="b", exitcode=-11),
    ],
    ids=lambda e: type(e).__name__,
)
def test_an_exception_that_can_travel_arrives_as_itself(error: Exception) -> None:
    """The user catches their own exception as __cause__, with its arguments."""
    failure = sent(raised(error))
    assert failure.ordinal == 3
    assert type(failure.error) is type(error)
    assert failure.error.args == error.args
    assert str(failure.error) == str(error)
    assert failure.trace.endswith(f"{failure.trace.strip().splitlines()[-1]}\n")


@pytest.mark.parametrize("error", [Stubborn("why"), Picky("why", "so"), Shifty("why")], ids=lambda e: type(e).__name__)
def test_an_exception_that_cannot_travel_is_described(error: Exception) -> None:
    """Otherwise the worker would die of it, and the user see WorkerLost in place of what went wrong."""
    failure = sent(raised(error))
    assert isinstance(failure.error, LoadError)
    assert type(error).__name__ in str(failure.error)
    assert "why" in str(failure.error)
    assert failure.ordinal == 3
    assert type(error).__name__ in failure.trace


class Mute(Exception):
    """Can neither be pickled nor shown."""

    def __reduce__(self) -> Any:
        raise TypeError("not me")

    def __str__(self) -> str:
        raise RuntimeError("nor this")


def test_an_exception_that_carries_its_data_is_described() -> None:
    """There is no room for it on its way, nor in the budget of who would hold it."""
    small, large = ValueError("x" * 1000), ValueError("x" * 10_000_000)
    assert type(sent(Failure(3, small, "")).error) is ValueError
    failure = sent(Failure(3, large, ""))
    assert type(failure.error) is LoadError
    assert str(failure.error).startswith("ValueError: xxx")
    assert len(encode_reply(Reply(1, 0, Status.FAILED, body=Failure(3, large, "")))) < 10_000


def test_an_exception_that_cannot_even_be_shown_is_named() -> None:
    """Whatever the user's class does, a reply is sent."""
    failure = sent(Failure(3, Mute("why"), "the trace"))
    assert "Mute" in str(failure.error)


def test_a_class_made_in_a_function_travels_by_value() -> None:
    """Notebooks define exceptions in cells; the parent may not find them by name."""

    class Local(Exception):
        pass

    failure = sent(raised(Local("here")))
    assert type(failure.error).__name__ == "Local"
    assert failure.error.args == ("here",)


# --------------------------------------------------------------------------------------------------------------- dumps


@given(identities)
def test_plain_values_are_plain_pickles(value: Any) -> None:
    """Items are mostly paths and numbers: the fast pickle serves."""
    assert pickle.loads(dumps(value)) == value


def test_things_without_a_name_can_be_sent() -> None:
    """A lambda is no item, but it may be part of one."""
    assert pickle.loads(dumps(lambda x: x + 1))(2) == 3


def test_a_text_that_mentions_main_is_still_right() -> None:
    """A path may hold the word that marks things of the user's script."""
    assert pickle.loads(dumps("/data/__main__/a.png")) == "/data/__main__/a.png"
