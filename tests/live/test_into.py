"""Loads that write straight into the slot."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest

import penstock
from penstock import LoadError, SpecError
from tests.live.crews import batches, each_crew, feed_of


class Pair(NamedTuple):
    image: Any
    label: Any


@penstock.into({"x": ((2, 3), "float32"), "more": [((), "int64"), ((4,), "float64")]})
def _write(item: int, out: dict[str, Any]) -> None:
    out["x"][...] = item
    out["more"][0][...] = item * 10
    out["more"][1][:] = np.arange(4) + item


@each_crew
def test_what_load_writes_is_the_batch(crew: str) -> None:
    first, second = batches(crew, range(6), _write)
    assert first["x"].shape == (4, 2, 3)
    assert first["x"].dtype == np.float32
    assert first["x"][:, 1, 2].tolist() == [0, 1, 2, 3]
    assert second["more"][0].tolist() == [40, 50]
    assert second["more"][1][1].tolist() == [5, 6, 7, 8]


@each_crew
def test_out_has_the_tree_shapes_and_dtypes_of_the_spec_and_can_be_written_to(crew: str) -> None:
    @penstock.into(Pair(((3, 0, 2), np.uint8), ((2,), "bfloat16")))
    def load(item: int, out: Any) -> Any:
        assert type(out) is Pair
        assert out.image.shape == (3, 0, 2)
        assert out.label.dtype.name == "bfloat16"
        assert out.label.flags.writeable
        assert out.label.flags.c_contiguous
        out.label[:] = [item, item / 2]
        return out

    ((batch),) = batches(crew, range(3), load)
    assert type(batch) is Pair
    assert batch.image.shape == (3, 3, 0, 2)
    assert batch.label.astype(float).tolist() == [[0, 0], [1, 0.5], [2, 1]]


def test_nothing_is_copied_on_the_way() -> None:
    places = []

    @penstock.into(((1000,), "float64"))
    def load(item: int, out: Any) -> None:
        out[:] = item
        places.append(out.__array_interface__["data"][0])

    with feed_of("inline", range(4), load) as feed:
        (batch,) = feed
        rows = [row.__array_interface__["data"][0] for row in batch]
        del batch
    assert rows == places[-4:]


def test_readinto_of_a_file_works_on_out(tmp_path: Any) -> None:
    paths = []
    for number in range(5):
        paths.append(tmp_path / f"{number}.bin")
        np.full(100, number, np.uint16).tofile(paths[-1])

    @penstock.into(((100,), np.uint16))
    def load(path: Any, out: Any) -> None:
        with open(path, "rb") as file:
            assert file.readinto(out) == 200

    with feed_of("process", paths, load) as feed:
        assert [int(row[0]) for batch in feed for row in batch if (row == row[0]).all()] == [0, 1, 2, 3, 4]


def test_a_method_can_be_marked() -> None:
    class Reader:
        def __init__(self, add: int) -> None:
            self.add = add

        @penstock.into(((), "int64"))
        def load(self, item: int, out: Any) -> None:
            out[...] = item + self.add

    with feed_of("process", range(4), Reader(5).load) as feed:
        (batch,) = feed
        assert batch.tolist() == [5, 6, 7, 8]
        del batch


def test_a_marked_function_of_a_script_works() -> None:
    script = (
        "import penstock\n"
        "@penstock.into(((2,), 'int32'))\n"
        "def load(item, out):\n    out[:] = item, item * scale\n"
        "scale = 3\n"
        "with penstock.Feed(range(3), load, num_workers=1, memory='512 MiB') as feed:\n"
        "    print([b.tolist() for b in feed])\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.stdout, ran.stderr) == ("[[[0, 0], [1, 3], [2, 6]]]\n", "")


def test_the_randomness_is_that_of_any_load() -> None:
    @penstock.into(((3,), "float64"))
    def load(item: int, out: Any) -> None:
        penstock.rng().standard_normal(out=out)

    ((written),) = batches("process", range(4), load)
    ((returned),) = batches("inline", range(4), lambda i: penstock.rng().standard_normal(3))
    np.testing.assert_array_equal(written, returned)


@each_crew
def test_a_load_that_returns_its_sample_is_told_to_write_it(crew: str) -> None:
    load = penstock.into(((2,), "float64"))(lambda item, out: np.ones(2))
    with pytest.raises(SpecError, match=r"returned a ndarray for 0.*must write into out") as caught:
        batches(crew, range(3), load)
    assert caught.value.item == 0


@each_crew
def test_a_value_that_does_not_fit_into_out_is_a_load_error_with_the_item(crew: str) -> None:
    @penstock.into(((2,), "float64"))
    def load(item: int, out: Any) -> None:
        out[:] = np.ones(3 if item == 2 else 2)

    with pytest.raises(LoadError, match="load failed for 2: ValueError: could not broadcast") as caught:
        batches(crew, range(3), load)
    assert caught.value.item == 2


@pytest.mark.parametrize(
    "spec",
    [
        (3, "float32"),
        ((3,), "floot32"),
        ((3,), object),
        ((-3,), "float32"),
        ((3,), "S"),
        np.zeros(3),
        {"x": ((3,), "float32"), "y": None, "z": 3},
        {},
        None,
    ],
    ids=repr,
)
def test_a_spec_that_is_none_is_refused_where_it_is_written(spec: Any) -> None:
    with pytest.raises(SpecError, match=r"\(shape, dtype\)|cannot lie in shared memory"):
        penstock.into(spec)


@pytest.mark.parametrize("option", [{"cast": "float16"}, {"collate_fn": "pad"}, {"samples_per_item": 2}])
def test_what_makes_no_sense_with_into_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"{next(iter(option))} cannot be used with @penstock.into"):
        feed_of("inline", range(3), _write, **option)


def test_the_plan_of_a_declared_sample_that_cannot_fit_is_refused_before_anything_runs() -> None:
    load = penstock.into(((1000, 1000, 1000), "float64"))(lambda item, out: pytest.fail("it ran"))
    with pytest.raises(penstock.BudgetError) as caught:
        batches("process", range(3), load)
    assert caught.value.least > 8_000_000_000
