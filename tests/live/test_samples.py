"""What load may return, and what it may be: every kind of leaf and of tree comes out as it went in, stacked."""

from __future__ import annotations

import collections
import dataclasses
import functools
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import penstock
from penstock import BudgetError, SpecError
from tests.live.crews import batches, each_crew, feed_of

TEXTS = ["", "a", "żółć", "日本" * 20, "x" * 10_000, "nul\0inside", "\ud800 lone surrogate"]


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Plain:
    image: Any
    label: Any = 3
    doubled: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        assert self.image.ndim == 1, "made for a sample, not for a batch"
        self.doubled = self.image * 2


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    image: Any
    inner: Pair


# ---------------------------------------- leaves

LEAVES: dict[str, Any] = {
    "float32": lambda i: np.full((2, 3), i, np.float32),
    "bool array": lambda i: np.arange(5) % 2 == i % 2,
    "complex": lambda i: np.array([i + 2j, 1j]),
    "uint64": lambda i: np.array([2**64 - 1 - i], np.uint64),
    "longdouble": lambda i: np.array([i], np.longdouble) / 3,
    "0-d": lambda i: np.array(i, np.int16),
    "zero size": lambda i: np.empty((2, 0, 3), np.float32),
    "numpy scalar": lambda i: np.float16(i / 2),
    "numpy bool": lambda i: np.bool_(i % 2),
    "int": lambda i: i - 2,
    "float": lambda i: i / 3,
    "bool": lambda i: i % 2 == 0,
    "enum": lambda i: signal.Signals(i + 1),
    "complex number": lambda i: complex(i, -i),
    "datetime": lambda i: np.array(["2024-02-29", "NaT"], "M8[D]") + np.timedelta64(i, "D"),
    "datetime scalar": lambda i: np.datetime64("2024-02-29T12:00:00.000000001") + np.timedelta64(i, "ns"),
    "timedelta": lambda i: np.timedelta64(i, "h"),
    "fixed text": lambda i: np.array(["ab", "ü" * i]).astype("U8"),
    "fixed bytes": lambda i: np.array([b"ab", b"c" * i]).astype("S8"),
    "structured": lambda i: np.array([(i, (1.5, 2))], dtype=[("a", "i4"), ("b", "f8", (2,))]),
    "packed record": lambda i: np.array((i, 2.5), dtype=[("a", "u1"), ("b", "f8")]),
    "big endian": lambda i: np.arange(i, i + 3).astype(">i4"),
    "big endian record": lambda i: np.array([(i, 2)], dtype=[("a", ">i4"), ("b", "<i2")]),
    "every second": lambda i: np.arange(i, i + 20).reshape(4, 5)[::2, ::-2],
    "transposed": lambda i: np.arange(i, i + 6).reshape(2, 3).T,
    "broadcast": lambda i: np.broadcast_to(np.float32(i), (3, 2)),
    "read only": lambda i: np.frombuffer(bytes([i, i + 1]), np.uint8),
    "subclass": lambda i: np.arange(3).view(np.recarray) + i,
}


@pytest.mark.parametrize("name", LEAVES)
def test_a_leaf_comes_out_as_it_went_in(name: str) -> None:
    load = LEAVES[name]
    first, second = batches("inline", range(6), load)
    for batch, items in ((first, range(4)), (second, range(4, 6))):
        expected = np.stack([np.asarray(load(i)) for i in items])
        np.testing.assert_array_equal(batch, expected)
        assert batch.dtype == expected.dtype.newbyteorder("=")
        assert batch.dtype.isnative


@each_crew
def test_all_leaves_at_once_come_through_every_crew(crew: str) -> None:
    def load(i: int) -> dict[str, Any]:
        return {name: make(i) for name, make in LEAVES.items()}

    first, _ = batches(crew, range(6), load)
    assert list(first) == list(LEAVES)
    for name, make in LEAVES.items():
        np.testing.assert_array_equal(first[name], np.stack([np.asarray(make(i)) for i in range(4)]), name)


@each_crew
def test_texts_and_bytes_come_out_as_lists_of_any_length(crew: str) -> None:
    blobs = [text.encode("utf-8", "surrogatepass") for text in TEXTS]
    found: tuple[list[str], list[bytes]] = ([], [])
    with feed_of(crew, range(len(TEXTS)), lambda i: (TEXTS[i], blobs[i])) as feed:
        for texts, raw in feed:
            found[0].extend(texts)
            found[1].extend(raw)
    assert found == (TEXTS, blobs)


def test_texts_much_longer_than_the_first_come_from_processes() -> None:
    with feed_of("process", [1, 10, 100_000, 3_000_000, 2], lambda n: {"text": "é" * n, "n": n}) as feed:
        texts = [text for batch in feed for text in batch["text"]]
    assert [len(text) for text in texts] == [1, 10, 100_000, 3_000_000, 2]
    assert set("".join(texts)) == {"é"}


def test_numpys_own_texts_and_subclasses_of_str_are_texts() -> None:
    class Name(str):
        __slots__ = ()

    ((names, arrays, raw),) = batches(
        "inline", range(2), lambda i: (Name("n"), np.array(["a", "b"])[i], np.bytes_(b"r"))
    )
    assert (names, arrays, raw) == (["n", "n"], ["a", "b"], [b"r", b"r"])


# ---------------------------------------- torch


@each_crew
def test_torch_tensors_come_as_arrays_or_as_tensors(crew: str) -> None:
    torch = pytest.importorskip("torch")

    def load(i: int) -> dict[str, Any]:
        import torch

        return {
            "x": torch.full((2, 3), float(i)),
            "half": torch.arange(i, i + 3).to(torch.bfloat16),
            "strided": torch.arange(12).reshape(3, 4).T[::2],
            "scalar": torch.tensor(i, dtype=torch.bfloat16),
            "grad": torch.ones(2, requires_grad=True) * i,
            "flag": torch.tensor(i % 2 == 0),
            "conjugate": torch.tensor([1j * i]).conj(),
        }

    with feed_of(crew, range(4), load, to="torch", memory="1 GiB") as feed:
        (batch,) = feed
        for name, expected in ((name, torch.stack([load(i)[name] for i in range(4)])) for name in batch):
            assert isinstance(batch[name], torch.Tensor)
            assert batch[name].dtype == expected.dtype, name
            assert torch.equal(batch[name], expected.detach()), name
        del batch
    if crew == "inline":
        ((batch),) = batches(crew, range(4), load)
        assert batch["half"].dtype.name == "bfloat16"
        assert batch["half"].astype(float).tolist() == [[i, i + 1, i + 2] for i in range(4)]


def test_what_torch_has_no_tensors_for_stays_an_array() -> None:
    torch = pytest.importorskip("torch")

    def load(i: int) -> dict[str, Any]:
        return {"x": np.float32(i), "when": np.datetime64("2024-01-01"), "code": np.array("abc"), "name": "n"}

    with feed_of("inline", range(2), load, to="torch", cast="float8_e4m3fn") as feed:
        (batch,) = feed
        assert batch["x"].dtype == torch.float8_e4m3fn
        assert batch["x"].float().tolist() == [0, 1]
        assert batch["when"].dtype == np.dtype("M8[D]")
        assert batch["code"].tolist() == ["abc", "abc"]
        assert batch["name"] == ["n", "n"]
        del batch
    ((again),) = batches("inline", range(2), lambda i: torch.tensor(float(i)).to(torch.float8_e5m2))
    assert again.dtype.name == "float8_e5m2"
    assert again.astype(float).tolist() == [0, 1]


def test_a_tensor_that_is_not_on_the_cpu_says_so() -> None:
    pytest.importorskip("torch")

    def load(item: int) -> Any:
        import torch

        return torch.empty(3, device="meta")

    with pytest.raises(SpecError, match=r"tensor on meta: .*CPU"):
        batches("inline", range(3), load)


# ---------------------------------------- trees


@each_crew
def test_a_batch_has_the_tree_of_a_sample(crew: str) -> None:
    def load(i: int) -> Any:
        return {
            "z first": (i, [i + 1, Pair(x=i + 2, y=None)]),
            "a second": collections.OrderedDict(b=np.ones(2), a="text"),
            3: {"nested": {"deep": (i,)}},
            "nothing": None,
        }

    ((batch),) = batches(crew, range(4), load)
    assert list(batch) == ["z first", "a second", 3, "nothing"]
    outer, (one, pair) = batch["z first"]
    assert (outer.tolist(), one.tolist()) == ([0, 1, 2, 3], [1, 2, 3, 4])
    assert type(pair) is Pair
    assert pair.x.tolist() == [2, 3, 4, 5]
    assert pair.y is None
    assert isinstance(batch["a second"], collections.OrderedDict)
    assert list(batch["a second"]) == ["b", "a"]
    assert batch["a second"]["a"] == ["text"] * 4
    assert batch[3]["nested"]["deep"][0].tolist() == [0, 1, 2, 3]
    assert batch["nothing"] is None


@each_crew
def test_dataclasses_are_batched_field_by_field_without_being_made_anew(crew: str) -> None:
    def load(i: int) -> Any:
        return Plain(np.full(2, i)), Frozen(np.ones(3) * i, Pair(i, "text"))

    ((plain, frozen),) = batches(crew, range(3), load)
    assert type(plain) is Plain
    assert plain.image.tolist() == [[0, 0], [1, 1], [2, 2]]
    assert plain.label.tolist() == [3, 3, 3]
    assert plain.doubled.tolist() == [[0, 0], [2, 2], [4, 4]]
    assert type(frozen) is Frozen
    assert frozen.image.shape == (3, 3)
    assert frozen.inner.x.tolist() == [0, 1, 2]
    assert frozen.inner.y == ["text"] * 3


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_classes_that_no_other_process_can_import_come_back_as_themselves(method: str) -> None:
    Local = collections.namedtuple("Local", "a b")

    @dataclasses.dataclass
    class Here:
        x: Any
        local: Any

    with feed_of("process", range(4), lambda i: Here(i, Local(i, str(i))), start_method=method) as feed:
        (batch,) = feed
    assert type(batch) is Here
    assert type(batch.local) is Local
    assert batch.local.b == ["0", "1", "2", "3"]


# ---------------------------------------- what load may be


class Loader:
    def __init__(self, add: int) -> None:
        self.add = add

    def method(self, item: int) -> int:
        return item + self.add

    @classmethod
    def of_class(cls, item: int) -> int:
        return item + 10

    @staticmethod
    def static(item: int) -> int:
        return item + 10

    def __call__(self, item: int) -> int:
        return item + self.add


def _plus(add: int, item: int) -> int:
    return item + add


def _closure(add: int) -> Any:
    def load(item: int) -> int:
        return item + add

    return load


LOADS: dict[str, Any] = {
    "lambda": lambda item: item + 10,
    "closure": _closure(10),
    "bound method": Loader(10).method,
    "class method": Loader.of_class,
    "static method": Loader.static,
    "callable object": Loader(10),
    "partial": functools.partial(_plus, 10),
    "partial of a lambda": functools.partial(lambda a, b: a + b, 10),
    "builtin": (10).__add__,
    "numpy function": functools.partial(np.add, 10),
    "cached": functools.lru_cache(_closure(10)),
}


@pytest.mark.parametrize("name", LOADS)
def test_load_may_be_any_callable(name: str) -> None:
    with feed_of("process", range(5), LOADS[name]) as feed:
        assert [int(value) for batch in feed for value in batch] == [10, 11, 12, 13, 14]


def test_a_load_may_use_one_buffer_for_all_of_its_samples() -> None:
    buffer = np.zeros(3)

    def load(item: int) -> Any:
        buffer[:] = item
        return buffer

    for crew in ("inline", "process"):
        with feed_of(crew, range(20), load) as feed:
            assert [row.tolist() for batch in feed for row in batch] == [[i] * 3 for i in range(20)]


def test_a_slow_load_is_not_done_twice() -> None:
    loaded: list[int] = []

    def load(item: int) -> Any:
        import time

        loaded.append(item)
        time.sleep(0.03 if item == 0 else 0)
        return np.ones(100_000)

    with feed_of("inline", range(4), load) as feed:
        assert feed.plan.workers == 0
        assert sum(len(batch) for batch in feed) == 4
    assert loaded == [0, 1, 2, 3]


SCRIPT = textwrap.dedent(
    """
    import sys, numpy as np
    from dataclasses import dataclass
    from penstock import Feed

    print("once")

    @dataclass(frozen=True)
    class Key:
        number: int

    @dataclass
    class Sample:
        number: object
        text: object

    def double(number):
        return 2 * number

    def load(key):
        assert type(key) is Key, type(key)
        return Sample(np.array([double(key.number)]), str(key))

    keys = [Key(i) for i in range(5)]
    with Feed(keys, load, batch_size=5, num_workers=2, memory="512 MiB", start_method=METHOD) as feed:
        (batch,) = feed
    assert type(batch) is Sample
    print(batch.number.ravel().tolist(), batch.text[4])
    """
)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("way", ["-c", "stdin", "file"])
def test_functions_and_classes_of_the_main_script_work_and_it_runs_once(way: str, method: str, tmp_path: Path) -> None:
    script = SCRIPT.replace("METHOD", repr(method))
    file = tmp_path / "script.py"
    file.write_text(script)
    arguments = {"-c": ["-c", script], "stdin": ["-"], "file": [str(file)]}[way]
    ran = subprocess.run(
        [sys.executable, *arguments], input=script, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.stderr == ""
    assert ran.stdout.splitlines() == ["once", "[0, 2, 4, 6, 8] Key(number=4)"]


# ---------------------------------------- what is refused

REFUSED: dict[str, tuple[Any, str]] = {
    "objects": (lambda i: np.array([None, "x"], object), "cannot lie in shared memory"),
    "any object": (lambda i: {"a": 1, "b": object()}, "object .* at b, which cannot lie in shared memory"),
    "a set": (lambda i: {1, 2}, "set .* cannot lie in shared memory"),
    "an int too large": (lambda i: 2**80, "int .*cannot lie in shared memory"),
    "masked": (lambda i: {"m": np.ma.masked_array([1, 2], [True, False])}, "masked array at m.* lose the mask.*filled"),
    "a generator": (lambda i: (x for x in "ab"), "generator .*samples_per_item"),
    "nothing": (lambda i: None, "holds no data at all"),
    "an empty dict": (lambda i: {}, "holds no data at all"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("crew", ["inline", "process"])
def test_what_cannot_be_stacked_is_refused_with_the_item_and_the_reason(crew: str, name: str) -> None:
    load, reason = REFUSED[name]
    with pytest.raises(SpecError, match=reason) as caught:
        batches(crew, ["the item"], load)
    assert caught.value.item == "the item"
    assert "the item" in str(caught.value)


def test_a_load_that_cannot_travel_says_what_to_do() -> None:
    import threading

    lock = threading.Lock()
    with pytest.raises(penstock.PenstockError, match=r"cannot be sent to worker processes.*inside load"):
        batches("process", range(3), lambda i: lock.locked())
    assert batches("thread", range(3), lambda i: lock.locked())[0].tolist() == [False] * 3


def grows(i: int) -> str:
    return f"{i}:" + "x" * (50 if i < 300 else 200_000 + i * 7919 % 100_000)


def gives_some_that_grow(i: int) -> Any:
    return (grows(i + k) for k in range(i % 5))


@each_crew
def test_texts_that_grow_are_read_batch_by_batch_and_come_in_order(crew: str) -> None:
    """Many small batches share a slot; when their texts are large, each gets one of its own, from the start again."""
    with feed_of(crew, range(700), grows, batch_size=8, memory="256 MiB") as feed:
        assert [text for batch in feed for text in batch] == [grows(i) for i in range(700)]
        assert feed.stats.peak_bytes <= feed.plan.memory


@each_crew
@pytest.mark.parametrize(
    ("load", "options"),
    [
        (grows, {"batch_size": 700}),
        (gives_some_that_grow, {"batch_size": 256, "samples_per_item": None}),
        (grows, {"batch_size": "max", "on_error": "skip", "shuffle": True}),
    ],
    ids=["rows", "flow", "skip"],
)
def test_texts_of_a_batch_that_do_not_fit_are_an_error_before_they_are_all_there(
    crew: str, load: Any, options: dict[str, Any]
) -> None:
    """The first ones were small: it can only be seen on the way."""
    with (
        feed_of(crew, range(700), load, memory="96 MiB", **options) as feed,
        pytest.raises(
            BudgetError, match=r"the texts of a batch, which are larger than the first ones, .* give memory="
        ),
    ):
        for _ in feed:
            pass
    assert feed.stats.peak_bytes <= feed.plan.memory
