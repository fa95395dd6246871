"""The loop that is written out for one form of sample, against the thorough way that asks everything of each sample."""

from __future__ import annotations

import collections
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given

from penstock import SpecError
from penstock._core.arena import Arena
from penstock._core.errors import printable
from penstock._core.fill import Filler
from penstock._core.layout import Layout
from penstock._core.plain import MOST_VIEWS
from penstock._core.program import Program
from penstock._core.spec import Spec
from penstock._core.task import Failure, Mode, Reply, Status, Task

Pair = collections.namedtuple("Pair", ["a", "b"])

NUMBERS = (
    0, -7, 2**62, 2**63, 2**70, True, 1.5, float("nan"), 2j, np.int64(3), np.int32(3), np.uint8(3), np.float64(0.5),
    np.float32(0.5), np.bool_(True), np.longlong(4), np.complex64(1j), np.datetime64(5, "s"), np.datetime64(5, "ms"),
    np.timedelta64(5, "s"), np.array(3), np.array(0.5, np.float32), np.array(3, ">i8"),
)  # fmt: skip
ARRAYS = (
    np.arange(3), np.arange(4), np.arange(3.0), np.arange(3, dtype=np.float32), np.arange(3, dtype=">i8"),
    np.arange(6)[::2], np.ones((1, 3), np.int64), np.ones((3, 1), np.int64), np.ones((0, 3)), np.ones((2, 3), bool),
    np.ones(1, np.int64), np.ma.masked_array(np.arange(3), [True, False, False]), np.arange(3).view(np.matrix),
    np.array([1, 2, 3], "m8[s]"), np.array([1, 2, 3], "m8[ms]"), np.zeros(2, "i4,f8"), np.zeros(2, "i4,i8"),
    np.array([None, 1]),
)  # fmt: skip
LEAVES = st.sampled_from((*NUMBERS, *ARRAYS))
# What no leaf can be, and trees where a leaf should be.
ODD = st.sampled_from((None, "text", b"bytes", object(), (), [1], {"a": 1}, range(3)))


def trees(leaf: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        leaf,
        st.tuples(leaf),
        st.tuples(leaf, leaf),
        st.tuples(leaf, leaf, leaf),
        st.lists(leaf, min_size=1, max_size=3),
        st.builds(Pair, leaf, leaf),
        st.fixed_dictionaries({"b": leaf, "a": leaf}),
        st.fixed_dictionaries({"a": leaf}),
        st.fixed_dictionaries({1: leaf, 0: leaf}),
        st.builds(lambda a, b: collections.OrderedDict(b=b, a=a), leaf, leaf),
        st.builds(lambda a, b: (a, {"x": (b, None)}), leaf, leaf),
    )


def filled(spec: Spec, samples: list[Any], *, thoroughly: bool, skip: bool) -> tuple[list[bytes], Reply]:
    """The bytes of the slot, and the reply, of a task that gives these samples."""
    program = Program(
        load=samples.__getitem__, reader=None, mode=Mode.ROWS, collate=None, samples_per_item=1, cast=None,
        on_error="skip" if skip else "raise", seed=0, memory=2**30,
    )  # fmt: skip
    layout = Layout.of(spec, len(samples))
    arena = Arena(shared=False)
    try:
        offset = arena.extend(layout.nbytes)
        filler = Filler(program, arena, 0)
        filler.configure(spec, len(samples))
        places = np.arange(len(samples))
        # A task with an item that must not be tried is done the thorough way; here it is one that is not there.
        barred = (len(samples),) if thoroughly else ()
        task = Task(1, 0, offset, layout.nbytes, 0, 0, places, places.tolist(), barred=barred)
        reply = filler.do(task, lambda _: pytest.fail("it has all the room there is"))
        left_out = {failure.ordinal for failure in reply.failures}
        if isinstance(reply.body, Failure):
            left_out.update(range(reply.body.ordinal, len(samples)))
        columns = layout.arrays(*arena.window(offset, layout.nbytes))
        rows = [b"".join(c[row].tobytes() for c in columns) for row in range(len(samples)) if row not in left_out]
        filler.forget()
        return rows, reply
    finally:
        del columns
        arena.close()


def told(failure: Failure) -> tuple[int, str, str]:
    return failure.ordinal, type(failure.error).__name__, printable(str(failure.error))


@given(
    first=trees(LEAVES),
    others=st.lists(trees(LEAVES | ODD), max_size=3),
    again=st.lists(LEAVES, max_size=9),
    skip=st.booleans(),
)
@example(first=np.datetime64(5, "s"), others=[np.datetime64(5, "ms")], again=[], skip=False)
@example(first=(1, np.arange(3)), others=[(2**63, np.arange(3)), (1, np.arange(1))], again=[], skip=True)
@example(first={"b": 1.5, "a": 2}, others=[{"a": 3, "b": 2.5}, {"a": 1, "c": 2.5}], again=[], skip=True)
def test_a_sample_is_written_or_refused_the_same_in_either_way(
    first: Any, others: list[Any], again: list[Any], skip: bool
) -> None:
    """Otherwise it would depend on what else happened to a task which samples a feed accepts, and what it says."""
    try:
        spec = Spec.of(first)
    except SpecError:
        return
    if any(leaf.kind != "array" for leaf in spec.leaves):
        return
    # Trees like the first one, with other leaves: whole ones drawn at random would hardly ever be.
    alike = [spec.build([leaf] * len(spec.leaves)) for leaf in again]
    samples = [first, *others, *alike, first]
    rows, reply = filled(spec, samples, thoroughly=False, skip=skip)
    right, expected = filled(spec, samples, thoroughly=True, skip=skip)
    assert reply.status is expected.status
    assert rows == right
    assert [told(failure) for failure in reply.failures] == [told(failure) for failure in expected.failures]
    if expected.status is Status.FAILED:
        assert told(reply.body) == told(expected.body)


@pytest.mark.parametrize("rows", [3, MOST_VIEWS + 1])
def test_a_load_may_return_the_same_buffer_every_time(rows: int) -> None:
    """A sample that is written later than at once would be another one by then; in small slots and in large."""
    buffer = np.zeros(2)

    def load(item: int) -> tuple[Any, int]:
        buffer[:] = item
        return buffer, item

    spec = Spec.of(load(0))
    program = Program(
        load=load, reader=None, mode=Mode.ROWS, collate=None, samples_per_item=1, cast=None,
        on_error="raise", seed=0, memory=2**30,
    )  # fmt: skip
    layout = Layout.of(spec, rows)
    arena = Arena(shared=False)
    offset = arena.extend(layout.nbytes)
    filler = Filler(program, arena, 0)
    filler.configure(spec, rows)
    places = np.arange(rows)
    reply = filler.do(Task(1, 0, offset, layout.nbytes, 0, 0, places, places.tolist()), lambda _: pytest.fail("why?"))
    x, y = layout.arrays(*arena.window(offset, layout.nbytes))
    assert reply.status is Status.DONE
    assert (x == places[:, None]).all()
    assert (y == places).all()
    del x, y
    filler.forget()
    arena.close()
