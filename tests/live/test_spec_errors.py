"""A sample that differs from the first one: the error names the item, what was expected, what came, and what to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock import SpecError
from tests.live.crews import batches, drain, each_crew, feed_of

ITEMS = [f"item {n}" for n in range(9)]

FIRST = {"x": np.zeros((3, 4), np.float32), "label": 1, "name": "n"}
CASES: dict[str, tuple[Any, str]] = {
    "shape": (
        {**FIRST, "x": np.zeros((3, 5), np.float32)},
        r"at 'x' is float32\[3, 5\], but .* float32\[3, 4\]: .*\"pad\".*\"list\"",
    ),
    "axes": (
        {**FIRST, "x": np.zeros(4, np.float32)},
        r"at 'x' is float32\[4\], but the first sample was float32\[3, 4\]",
    ),
    "dtype": ({**FIRST, "x": np.zeros((3, 4))}, r"at 'x' is float64\[3, 4\], but .* float32\[3, 4\]: .*same dtype"),
    "number": ({**FIRST, "label": 1.0}, r"at 'label' is float64\[\], but the first sample was int64\[\]"),
    "text for a number": ({**FIRST, "label": "one"}, r"at 'label' is str, but the first sample was int64\[\]"),
    "number for a text": ({**FIRST, "name": 3}, r"at 'name' is int64\[\], but the first sample was str"),
    "bytes for a text": ({**FIRST, "name": b"n"}, r"at 'name' is bytes, but the first sample was str"),
    "missing": (
        {"x": FIRST["x"], "label": 1},
        r"has the form \{'label': \*, 'x': \*\}, but .* \{'label': \*, 'name': \*, 'x': \*\}",
    ),
    "more": ({**FIRST, "also": 1}, r"has the form .*'also'.*same tree"),
    "list for an array": (
        {**FIRST, "x": [FIRST["x"]]},
        r"has the form .*'x': \[\*\].*, but the first sample had .*'x': \*",
    ),
    "none for an array": ({**FIRST, "x": None}, r"has the form .*'x': None.*, but the first sample had .*'x': \*"),
    "tuple for a dict": ((1, 2, 3), r"has the form \(\*, \*, \*\), but the first sample had \{"),
    "array for a dict": (np.zeros(3), r"has the form \*, but the first sample had \{"),
    "nothing": (None, r"has the form None, but the first sample had \{"),
    "objects": ({**FIRST, "x": np.array([[None] * 4] * 3)}, "at x, which cannot lie in shared memory"),
    "masked": ({**FIRST, "x": np.ma.zeros((3, 4), np.float32)}, "masked array at x"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_sample_that_differs_says_which_what_and_what_to_do(case: str) -> None:
    other, message = CASES[case]
    with pytest.raises(SpecError, match=f"the sample of 'item 5' .*{message}") as caught:
        batches("inline", ITEMS, lambda item: other if item == "item 5" else FIRST)
    assert caught.value.item == "item 5"
    assert isinstance(caught.value, ValueError)


@each_crew
def test_the_batches_before_it_come_and_the_feed_can_be_used_again(crew: str) -> None:
    def load(item: str) -> Any:
        return np.zeros(3 if item == "item 5" else 2)

    with feed_of(crew, ITEMS, load, batch_size=2) as feed:
        for _ in range(2):
            seen: list[Any] = []
            with pytest.raises(SpecError, match=r"'item 5' is float64\[3\], but .* float64\[2\].*\"pad\""):
                drain(feed, seen)
            assert len(seen) == 4


def test_the_first_of_several_bad_items_is_the_one_that_is_named() -> None:
    for crew in ("inline", "thread", "process"):
        with pytest.raises(SpecError) as caught:
            batches(crew, ITEMS, lambda item: np.zeros(2 if item < "item 3" else 3), batch_size=8)
        assert caught.value.item == "item 3"


def test_a_list_of_numbers_that_varies_is_told_to_be_an_array() -> None:
    for collate in (None, "pad"):
        with pytest.raises(SpecError, match=r"the sample of 2 has the form \[\*, \*\], .*return np\.array"):
            batches("inline", [1, 2], lambda n: list(range(n)), collate_fn=collate)


def test_the_same_values_in_the_other_byte_order_or_on_other_strides_do_not_differ() -> None:
    kinds = [np.arange(4, dtype=">i4"), np.arange(4, dtype="<i4"), np.arange(8, dtype="i4")[::2] // 2]
    ((batch),) = batches("inline", range(3), lambda i: kinds[i])
    assert batch.tolist() == [[0, 1, 2, 3]] * 3


def test_pad_and_list_do_what_the_message_promises() -> None:
    for collate in ("pad", "list"):
        ((batch),) = batches("inline", range(4), lambda n: np.zeros((n, 2)), collate_fn=collate)
        sizes = batch.lengths[:, 0].tolist() if collate == "pad" else [len(sample) for sample in batch]
        assert sizes == [0, 1, 2, 3]
