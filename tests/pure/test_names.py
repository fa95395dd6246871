"""Many names in little memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock._core.names import Names

TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12), max_size=30)


@given(TEXTS, st.data())
def test_names_are_those_that_were_given(texts: list[str], data: st.DataObject) -> None:
    names = Names(texts)
    assert list(names) == texts
    assert names[1:-1] == texts[1:-1]
    if texts:
        chosen = data.draw(st.lists(st.integers(0, len(texts) - 1), max_size=10))
        assert names.chosen(np.array(chosen, np.int64)) == [texts[i] for i in chosen]
        assert names[-1] == texts[-1]


def test_names_that_are_not_text_survive() -> None:
    """Files may be called anything: bytes that are no UTF-8 come back as they were."""
    odd = b"caf\xe9.jpg".decode("utf-8", "surrogateescape")
    assert Names(["a", odd]).chosen(np.array([1, 0])) == [odd, "a"]


def test_there_are_no_others() -> None:
    with pytest.raises(IndexError, match="3 of 3 names"):
        Names("abc")[3]
