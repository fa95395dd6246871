"""``cast`` changes the dtype while a sample is written into the slot, and never an integer's value."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import penstock
from penstock import Feed, SpecError
from tests.live.crews import batches, each_crew, feed_of


def _load(item: int) -> dict[str, Any]:
    return {"x": np.linspace(0, 1, 5) * item, "label": item, "mask": np.array([True, False]), "name": str(item)}


@each_crew
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_floating_cast_is_for_floats_and_leaves_labels_alone(crew: str, dtype: str) -> None:
    ((batch),) = batches(crew, range(4), _load, cast=dtype)
    stored = np.dtype(getattr(ml_dtypes, dtype, dtype))
    assert batch["x"].dtype == stored
    np.testing.assert_array_equal(batch["x"], np.stack([_load(i)["x"] for i in range(4)]).astype(stored))
    assert batch["label"].dtype == np.int64
    assert batch["mask"].dtype == np.bool_
    assert batch["name"] == ["0", "1", "2", "3"]


def test_the_slots_become_smaller_with_the_cast() -> None:
    plain = penstock.plan(np.zeros((100, 100)), memory="1 GiB")
    small = penstock.plan(np.zeros((100, 100)), memory="1 GiB", cast="float16")
    assert plain.sample_bytes == 4 * small.sample_bytes == 80_000


def test_where_there_are_only_integers_they_are_cast() -> None:
    ((batch),) = batches("inline", range(4), lambda i: np.arange(i, i + 3), cast="float32")
    assert batch.dtype == np.float32
    assert batch[3].tolist() == [3, 4, 5]


@each_crew
def test_a_dict_casts_leaf_by_leaf_by_their_paths(crew: str) -> None:
    def load(i: int) -> Any:
        return {"image": np.full(3, i, np.float32), "pair": (i, {"deep": i / 4})}

    cast = {"image": "bfloat16", "pair.0": "uint8", "pair.1.deep": np.float16}
    ((batch),) = batches(crew, range(4), load, cast=cast)
    assert batch["image"].dtype.name == "bfloat16"
    assert batch["pair"][0].dtype == np.uint8
    assert batch["pair"][1]["deep"].dtype == np.float16
    assert batch["pair"][1]["deep"].tolist() == [0, 0.25, 0.5, 0.75]


def test_a_cast_of_something_that_a_sample_does_not_have_names_what_it_has() -> None:
    with pytest.raises(SpecError, match=r"cast names \['imgae'\].*'label', 'mask', 'x'"):
        batches("inline", range(4), _load, cast={"imgae": "float16"})


@pytest.mark.parametrize(
    ("value", "cast"),
    [
        (256, "uint8"),
        (-1, "uint8"),
        (2049, "float16"),
        (257, "bfloat16"),
        (70_000, "float16"),
        (2**53 + 1, "float64"),
        (-(2**63), "float16"),
        (2**63 - 1, "float32"),
        (np.uint64(2**63), "int64"),
        (-1, "uint64"),
        (0.5, "int32"),
        (float("nan"), "int32"),
        (1e12, "int32"),
    ],
)
def test_a_number_that_the_cast_would_change_is_an_error_with_the_item(value: Any, cast: str) -> None:
    fine = type(value)(1)
    with pytest.raises(SpecError, match=f"'the third'.*{cast}.*cannot hold exactly.*wider") as caught:
        batches(
            "inline",
            ["one", "two", "the third"],
            lambda i: np.array([fine, value if i == "the third" else fine]),
            cast=cast,
        )
    assert caught.value.item == "the third"


def test_the_error_comes_from_workers_too() -> None:
    with pytest.raises(SpecError, match="the sample of 7 has values from 700 to 700") as caught:
        batches("process", range(12), lambda i: i * 100 if i == 7 else i, cast="uint8")
    assert caught.value.item == 7


@pytest.mark.parametrize("cast", ["uint8", "float16", "bfloat16", "int64"])
def test_integers_that_fit_are_kept_exactly(cast: str) -> None:
    values = np.arange(256) if cast in ("uint8", "bfloat16") else np.arange(-2048, 2049)
    ((batch),) = batches("inline", range(2), lambda i: values, cast=cast)
    assert batch.dtype.name == cast
    np.testing.assert_array_equal(batch[0].astype(np.int64), values)


def test_the_imaginary_part_is_never_dropped() -> None:
    with pytest.raises(SpecError, match="imaginary part of z"):
        batches("inline", range(2), lambda i: {"z": np.array([1j])}, cast="float32")
    ((batch),) = batches("inline", range(2), lambda i: {"z": np.array([1j])}, cast="complex64")
    assert batch["z"].dtype == np.complex64
    assert batch["z"][0, 0] == 1j


def test_dates_and_texts_are_not_numbers_to_be_cast() -> None:
    def load(i: int) -> dict[str, Any]:
        return {"x": np.float32(i), "when": np.datetime64("2024-01-01"), "code": np.array("abc"), "name": "n"}

    ((batch),) = batches("inline", range(2), load, cast="uint8")
    assert batch["x"].dtype == np.uint8
    assert batch["when"].dtype == np.dtype("M8[D]")
    assert batch["code"].tolist() == ["abc", "abc"]


def test_a_cast_that_is_no_dtype_is_refused_at_once() -> None:
    for cast in ("floot16", {"x": "floot16"}, object):
        with pytest.raises(TypeError, match=r"cast=.*is not a dtype"):
            Feed(range(3), abs, cast=cast)


def test_a_source_is_cast_too_and_its_integers_are_kept() -> None:
    x, y = np.arange(20.0).reshape(10, 2), np.arange(250, 260)
    with feed_of("inline", penstock.arrays(x, y), cast={"0": "float16", "1": "uint16"}, batch_size=10) as feed:
        ((first, second),) = feed
        assert (first.dtype, second.dtype) == (np.float16, np.uint16)
        np.testing.assert_array_equal(first, x)
        np.testing.assert_array_equal(second, y)
        del first, second
    with pytest.raises(SpecError, match=r"sample of 6 has values from 256 to 256 at 1.*'uint8'"):
        batches("inline", penstock.arrays(x, y), cast={"1": "uint8"}, batch_size=10)


@each_crew
@pytest.mark.parametrize("each", [1, None])
@pytest.mark.parametrize("collate", ["pad", "list"])
def test_padded_and_listed_batches_are_cast_by_the_same_names(crew: str, each: int | None, collate: str) -> None:
    def load(i: int) -> Any:
        sample = {"x": np.full(i % 3 + 1, i / 2), "n": np.arange(2)}
        return sample if each == 1 else [sample]

    options: dict[str, Any] = {"collate_fn": collate, "samples_per_item": each}
    for cast, dtypes in (
        ("float16", ("f2", "i8")),
        ({"n": "uint8"}, ("f8", "u1")),
        ({"x": "bfloat16"}, (ml_dtypes.bfloat16, "i8")),
    ):
        with feed_of(crew, range(4), load, cast=cast, **options) as feed:
            (batch,) = feed
            if collate == "pad":
                found = (batch["x"].data.dtype, batch["n"].data.dtype)
                assert batch["x"].lengths.tolist() == [1, 2, 3, 1]
                assert batch["x"].data.astype(float).tolist() == [[0, 0, 0], [0.5, 0.5, 0], [1, 1, 1], [1.5, 0, 0]]
            else:
                found = (batch[3]["x"].dtype, batch[3]["n"].dtype)
            assert found == tuple(map(np.dtype, dtypes))
            del batch


@each_crew
@pytest.mark.parametrize("each", [1, None])
def test_what_a_collate_fn_makes_is_cast_by_its_own_names(crew: str, each: int | None) -> None:
    def load(i: int) -> Any:
        return i / 2 if each == 1 else [i / 2]

    def collate(samples: list[Any]) -> Any:
        return {"mean": np.array(np.mean(samples)), "all": np.stack(samples), "count": np.array(len(samples))}

    options: dict[str, Any] = {"collate_fn": collate, "samples_per_item": each}
    ((batch),) = batches(crew, range(4), load, cast={"all": "float16", "count": "uint8"}, **options)
    assert (batch["mean"].dtype, batch["all"].dtype, batch["count"].dtype) == (np.float64, np.float16, np.uint8)
    assert batch["all"].tolist() == [0, 0.5, 1, 1.5]
    with pytest.raises(SpecError, match="cast names"):
        batches(crew, range(4), load, cast={"sum": "float16"}, **options)


@pytest.mark.parametrize("cast", [("float32", None), ["float32"], (penstock.OnDevice("float32"), None)])
def test_a_cast_by_place_is_told_to_be_a_dict(cast: Any) -> None:
    """Numpy's own error would be about something else."""
    with pytest.raises(TypeError, match=r"\{0: \"float32\"\}"):
        penstock.Feed(range(3), lambda i: (np.float64(i), i), cast=cast)
