"""Sizes: what may be given is read exactly, what may not is refused with a sentence, and what is shown can be read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock._core.budget import GiB, KiB, MiB, format_bytes, parse_size

AVAILABLE = 8 * 2**30


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, 1),
        (123456, 123456),
        ("2 GiB", 2 * 2**30),
        ("2GiB", 2 * 2**30),
        (" 2  gib ", 2 * 2**30),
        ("1.5 GiB", 3 * 2**29),
        (".5 GiB", 2**29),
        ("500 MB", 500 * 10**6),
        ("500 MiB", 500 * 2**20),
        ("64k", 64_000),
        ("64 KiB", 65_536),
        ("1 TiB", 2**40),
        ("1e9", 10**9),
        ("1e3 MiB", 1000 * 2**20),
        ("4096", 4096),
        ("4096 B", 4096),
        (0.25, AVAILABLE // 4),
        (1.0, AVAILABLE),
    ],
)
def test_a_size_is_read_as_it_is_meant(size: Any, expected: int) -> None:
    """A budget that is read as another one is worse than none."""
    assert parse_size(size, available=AVAILABLE) == expected


@pytest.mark.parametrize(
    "size",
    ["", "GiB", "2 GiBs", "2 XB", "-1 GiB", "1,5 GiB", "1 2", "nan", "inf", "0x10", "25%", "2 GiB please"],
)
def test_text_that_is_no_size_is_refused(size: str) -> None:
    """A typing error must not become a budget."""
    with pytest.raises(ValueError, match="cannot be read as a size") as caught:
        parse_size(size, available=AVAILABLE)
    assert repr(size) in str(caught.value)
    assert "2 GiB" in str(caught.value)  # says how it is done


@pytest.mark.parametrize("size", [0.0, -0.5, 1.5, 2e9, float("nan"), float("inf")])
def test_a_float_is_a_fraction_and_nothing_else(size: float) -> None:
    """2e9 could mean bytes or two billion times what there is: nobody should have to guess."""
    with pytest.raises(ValueError, match="not a fraction between 0 and 1"):
        parse_size(size, available=AVAILABLE)


@pytest.mark.parametrize("size", [0, -1, "0", "0 GiB", "0.0 MiB", "0.1 B"])
def test_nothing_at_all_is_no_budget(size: Any) -> None:
    """A budget of zero would be refused later, and less clearly."""
    with pytest.raises(ValueError, match="no memory at all"):
        parse_size(size, available=AVAILABLE)


@pytest.mark.parametrize("size", [2**70, "1e30 GiB", 2**63])
def test_more_than_there_can_be_is_no_budget(size: Any) -> None:
    """The system could not even be told such a limit."""
    with pytest.raises(ValueError, match="more than any machine has: give bytes"):
        parse_size(size, available=AVAILABLE)


@pytest.mark.parametrize("size", [None, True, False, b"2 GiB", [1], 1j])
def test_other_types_are_refused(size: Any) -> None:
    """True is an int to Python, but not to a person."""
    with pytest.raises(TypeError, match=r"memory=.* is a "):
        parse_size(size, available=AVAILABLE)


def test_the_message_names_the_argument() -> None:
    """There are two budgets: host and device."""
    with pytest.raises(ValueError, match="device_memory='much'"):
        parse_size("much", available=AVAILABLE, name="device_memory")


@given(st.integers(1, 2**50))
def test_whole_bytes_stay_what_they_are(size: int) -> None:
    """An int is bytes, whatever is available."""
    assert parse_size(size, available=1) == size


@given(st.integers(1, 2**20), st.sampled_from(["KiB", "MiB", "GiB"]))
def test_the_functions_and_the_text_agree(n: int, unit: str) -> None:
    """GiB(2) and "2 GiB" are the same budget."""
    function = {"KiB": KiB, "MiB": MiB, "GiB": GiB}[unit]
    assert function(n) == parse_size(f"{n} {unit}", available=1)
    assert isinstance(function(n / 4), int)


@given(st.integers(0, 2**55))
def test_what_is_shown_can_be_read_back(size: int) -> None:
    """Numbers in messages are meant to be copied: what is shown is near, and is a size."""
    text = format_bytes(size)
    assert len(text) <= 15
    if size >= 1:
        back = parse_size(text, available=1)
        assert abs(back - size) <= max(0.06 * size, 1)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (24 * 2**20, "24 MiB"),
        (int(123.4 * 2**20), "123 MiB"),
        (2**30 * 3 // 2, "1.5 GiB"),
        (5 * 2**40, "5120 GiB"),
    ],
)
def test_sizes_are_shown_as_a_person_writes_them(size: int, text: str) -> None:
    """The plan's table and every message use this."""
    assert format_bytes(size) == text
