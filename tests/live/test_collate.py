"""How samples become a batch when they are not simply stacked: padded, listed, or by a function of the user's."""

from __future__ import annotations

import collections
import os
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import BudgetError, LoadError, MiB, Pad, Padded, SpecError
from tests.live.crews import batches, each_crew, feed_of


def _ragged(item: int) -> dict[str, Any]:
    return {
        "one": np.arange(item, dtype=np.float32) + 1,
        "two": np.full((item, 3 - item % 3), item),
        "scalar": item,
        "text": "t" * item,
    }


# ---------------------------------------- pad


@each_crew
def test_pad_fills_up_to_the_longest_of_the_batch_and_tells_the_true_lengths(crew: str) -> None:
    first, second = batches(crew, range(6), _ragged, collate_fn="pad")
    assert isinstance(first["one"], Padded)
    assert first["one"].data.tolist() == [[0, 0, 0], [1, 0, 0], [1, 2, 0], [1, 2, 3]]
    assert first["one"].data.dtype == np.float32
    assert first["one"].lengths.tolist() == [0, 1, 2, 3]
    assert first["two"].data.shape == (4, 3, 3)
    assert first["two"].lengths.tolist() == [[0, 3], [1, 2], [2, 1], [3, 3]]
    for item, (rows, columns) in enumerate(first["two"].lengths):
        assert (first["two"].data[item, :rows, :columns] == item).all()
        assert first["two"].data[item].sum() == item * rows * columns
    assert first["scalar"].tolist() == [0, 1, 2, 3]
    assert first["text"] == ["", "t", "tt", "ttt"]
    assert second["one"].data.shape == (2, 5)


@each_crew
def test_pad_fills_with_the_value_and_up_to_the_multiple_that_was_asked_for(crew: str) -> None:
    ((batch),) = batches(crew, [3, 1, 9], np.arange, collate_fn=Pad(-100, multiple=8))
    assert batch.data.shape == (3, 16)
    assert batch.lengths.tolist() == [3, 1, 9]
    assert batch.data[1].tolist() == [0] + [-100] * 15


def test_padded_batches_become_tensors() -> None:
    torch = pytest.importorskip("torch")
    with feed_of("inline", range(4), torch.arange, collate_fn="pad", to="torch") as feed:
        (batch,) = feed
        assert torch.equal(batch.lengths, torch.arange(4))
        assert torch.equal(batch.data[3], torch.arange(3))
        del batch


@each_crew
def test_pad_names_the_item_whose_dtype_axes_or_tree_differ(crew: str) -> None:
    wrong: dict[str, tuple[Any, str]] = {
        "dtype": (np.ones(2, np.float64), r"float64\[2\], but the first sample was float32\[2\]"),
        "axes": (np.ones((2, 2), np.float32), r'float32\[2, 2\].*number of axes.*"list"'),
        "tree": ([np.ones(2, np.float32)], "has the form"),
    }
    for other, message in wrong.values():
        with pytest.raises(SpecError, match=f"the sample of 'bad'.*{message}") as caught:
            batches(
                crew,
                ["a", "b", "c", "d", "e", "bad"],
                lambda i, other=other: other if i == "bad" else np.ones(2, "f4"),
                collate_fn="pad",
            )
        assert caught.value.item == "bad"


# ---------------------------------------- list


@each_crew
def test_list_gives_the_samples_as_they_are(crew: str) -> None:
    first, second = batches(crew, range(6), _ragged, collate_fn="list")
    assert [len(first), len(second)] == [4, 2]
    for item, sample in enumerate(first + second):
        expected = _ragged(item)
        np.testing.assert_array_equal(sample["one"], expected["one"])
        np.testing.assert_array_equal(sample["two"], expected["two"])
        assert sample["two"].shape == expected["two"].shape
        assert (sample["scalar"], sample["text"]) == (item, "t" * item)
        assert type(sample["scalar"]) is int


@each_crew
def test_list_takes_samples_that_have_nothing_in_common(crew: str) -> None:
    samples: list[Any] = [{"a": 1}, (2.5, None), "three", [b"4", True], np.float16(5), 1 + 2j]
    ((batch),) = batches(crew, range(6), lambda i: samples[i], collate_fn="list", batch_size=6)
    assert batch == samples


def test_list_names_the_item_that_cannot_be_stored() -> None:
    with pytest.raises(SpecError, match="the sample of 'bad' has a set") as caught:
        batches("process", ["a", "b", "c", "d", "e", "bad"], lambda i: {1} if i == "bad" else 1, collate_fn="list")
    assert caught.value.item == "bad"


# ---------------------------------------- a function of the user's


@each_crew
def test_a_callable_runs_where_the_samples_were_loaded_and_returns_any_tree(crew: str) -> None:
    def collate(samples: list[tuple[int, int]]) -> Any:
        Out = collections.namedtuple("Out", "data pid names n flag nothing")
        data = np.stack([np.full((2, 2), i) for i, _ in samples])
        same = {pid for _, pid in samples} == {os.getpid()}
        return Out(data[:, ::-1].T, os.getpid(), [str(i) for i, _ in samples], len(samples), same, None)

    first, second = batches(crew, range(6), lambda i: (i, os.getpid()), collate_fn=collate)
    assert first.data.shape == (2, 2, 4)
    assert first.data[0, 0].tolist() == [0, 1, 2, 3]
    assert (first.pid != os.getpid()) == (crew == "process")
    assert first.flag is True
    assert first.names == ["0", "1", "2", "3"]
    assert [first.n, second.n] == [4, 2]
    assert first.nothing is None


def test_a_callable_may_need_a_whole_batch_and_have_samples_of_any_kind() -> None:
    class Thing:
        def __init__(self, n: int) -> None:
            self.n = n

    pairs = batches("process", range(8), lambda i: i, collate_fn=lambda s: np.array(s).reshape(2, 2))
    assert [pair.tolist() for pair in pairs] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    ((batch),) = batches("process", range(4), Thing, collate_fn=lambda things: np.array([thing.n for thing in things]))
    assert batch.tolist() == [0, 1, 2, 3]


@each_crew
@pytest.mark.parametrize("each", [1, 3])
def test_an_error_in_collate_fn_is_said_to_be_there_and_which_items_it_had(crew: str, each: int) -> None:
    def collate(samples: list[Any]) -> Any:
        if 5 in samples:
            raise ValueError("five is not allowed")
        return np.array(samples)

    load = (lambda i: i) if each == 1 else (lambda i: [i] * each)
    with feed_of(crew, range(12), load, collate_fn=collate, samples_per_item=each) as feed:
        batch = next(epoch := iter(feed))
        assert batch.tolist() == ([0, 1, 2, 3] if each == 1 else [0, 0, 0, 1])
        with pytest.raises(LoadError, match=r"collate_fn failed.*ValueError: five is not allowed") as caught:
            for _ in epoch:
                pass
    assert isinstance(caught.value.__cause__, ValueError)
    if each == 1:
        assert caught.value.item == [4, 5, 6, 7]


@each_crew
def test_a_collate_fn_that_returns_what_cannot_be_stored_says_so(crew: str) -> None:
    with pytest.raises(SpecError, match=r"what collate_fn returned has a set .* at bad, which cannot lie"):
        batches(crew, range(4), lambda i: i, collate_fn=lambda samples: {"bad": set(samples)})


def test_a_collate_fn_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match=r"collate_fn='stack'.*'pad', 'list'"):
        feed_of("inline", range(3), abs, collate_fn="stack")
    with pytest.raises(TypeError, match="collate_fn=3"):
        feed_of("inline", range(3), abs, collate_fn=3)


# ---------------------------------------- batches larger than their slot


@each_crew
def test_a_batch_much_larger_than_the_first_moves_to_a_larger_slot(crew: str) -> None:
    sizes = [10, 20, 200_000, 30, 1_000_000, 5, 5, 5] * 2
    with feed_of(crew, sizes, np.arange, collate_fn="list", batch_size=2, memory="512 MiB") as feed:
        seen = [[(len(sample), int(sample.sum())) for sample in batch] for batch in feed]
        held = feed.stats.peak_bytes
    assert [pair for batch in seen for pair in batch] == [(n, n * (n - 1) // 2) for n in sizes]
    assert held <= MiB(512)


@each_crew
def test_a_batch_that_the_budget_cannot_hold_is_a_budget_error_that_says_what_would_do(crew: str) -> None:
    items = ["small"] * 8 + ["large"] + ["small"] * 3

    def collate(samples: list[str]) -> Any:
        # Only the batch is large: a load that takes so much is another error.
        return np.broadcast_to(np.uint8(7), (MiB(100) if "large" in samples else 1000,))

    def run(memory: int) -> int:
        with feed_of(crew, items, str, collate_fn=collate, batch_size=2, memory=memory) as feed:
            return sum(int(batch.sum()) for batch in feed)

    with pytest.raises(BudgetError, match=r"a collated batch takes 100 MiB.*memory=\d+") as caught:
        run(MiB(160 if crew == "process" else 64))
    assert run(caught.value.least) == 7 * (MiB(100) + 5000)


def test_a_feed_goes_on_after_a_batch_that_did_not_fit() -> None:
    sizes = [1000] * 4 + [MiB(100)] + [1000] * 3
    with feed_of(
        "thread", sizes, lambda n: np.ones(n, np.uint8), collate_fn="list", batch_size=2, memory="64 MiB"
    ) as feed:
        for _ in range(2):
            before = feed.stats.batches
            with pytest.raises(BudgetError):
                collections.deque(feed, maxlen=0)
            assert feed.stats.batches == before + 2


def test_collating_a_source_works_on_its_rows() -> None:
    rows = np.arange(10)
    ((batch),) = batches("thread", penstock.arrays(rows), collate_fn=lambda s: {"sum": sum(s)}, batch_size=10)
    assert batch["sum"] == 45
