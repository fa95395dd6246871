"""The errors: what they are, what they carry, that they survive a pickle, and that no item reaches a terminal raw."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock._core import errors
from penstock._core.errors import (
    BudgetError,
    CacheError,
    FeedClosed,
    LeaseError,
    LoadError,
    LoadTimeout,
    PenstockError,
    PlaceFull,
    SpecError,
    WorkerLost,
    shown,
)

EXAMPLES: list[PenstockError] = [
    PenstockError("it broke"),
    BudgetError("too little", least=4096),
    PlaceFull("others have it", least=8192),
    LoadError("bad item", item="a.png"),
    WorkerLost("gone", item=("a", 1), exitcode=-9),
    LoadTimeout("too long", item=3),
    SpecError("another shape", item={"k": 1}),
    CacheError("another key"),
    LeaseError("replaced"),
    FeedClosed("closed"),
]


def test_there_is_an_example_of_every_error_here() -> None:
    """The tests below are about all of them."""
    assert {type(e).__name__ for e in EXAMPLES} == set(errors.__all__) - {"BudgetWarning", "printable", "said", "shown"}


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda e: type(e).__name__)
def test_one_except_catches_them_all_and_they_are_public(error: PenstockError) -> None:
    """``except penstock.PenstockError`` is the one sentence a user must know."""
    assert isinstance(error, penstock.PenstockError)
    assert getattr(penstock, type(error).__name__) is type(error)


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [(BudgetError, MemoryError), (LoadTimeout, TimeoutError), (SpecError, ValueError), (WorkerLost, LoadError)],
)
def test_an_error_is_also_the_builtin_that_says_the_same(kind: type, builtin: type) -> None:
    """Code that knows nothing of Penstock catches MemoryError, TimeoutError and ValueError."""
    assert issubclass(kind, builtin)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("again", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy], ids=["pickle", "copy"])
def test_an_error_survives_the_way_to_another_process(error: PenstockError, again: object) -> None:
    """A feed inside a worker of somebody's pool raises there; what arrives must still say which item it was."""
    other = again(error)  # type: ignore[operator]
    assert type(other) is type(error)
    assert str(other) == str(error)
    assert vars(other) == vars(error)


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ("a.png", "'a.png'"),
        ("line\nbreak", r"'line\nbreak'"),
        ("\x1b[31mred", r"'\x1b[31mred'"),
        ("grün", "'grün'"),
        (7, "7"),
        (b"\xff", r"b'\xff'"),
    ],
)
def test_an_item_is_shown_as_python_writes_it(item: object, text: str) -> None:
    """The user finds the item in their list by this text."""
    assert shown(item) == text


class Hostile:
    """An item whose repr moves the cursor and goes on for ever."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


@given(st.text(max_size=400), st.integers(10, 250))
def test_nothing_that_is_shown_can_steer_a_terminal(text: str, limit: int) -> None:
    """File names come from strangers: no escape sequence, no line break, no flood."""
    result = shown(Hostile(text), limit)
    assert result.isprintable()
    assert len(result) <= 10 * limit  # each character at most \\U and eight digits


def test_long_items_are_cut() -> None:
    """A message is for reading: an item of a megabyte is not."""
    assert len(shown("x" * 10**6)) == 200
    assert shown("x" * 10**6).endswith("...")


class Broken:
    """An item that cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr today")


def test_an_item_without_a_repr_does_not_hide_the_error() -> None:
    """The error that is being reported matters, not the one in showing the item."""
    assert "Broken" in shown(Broken())
