"""Samples that are kept on the device: the same batches as without, and nothing is loaded that is there."""

from __future__ import annotations

import os
import random
import signal
import threading
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import BudgetError, CacheWarning, Device, Feed, Gathers, HostDevice, OnDevice, Retry, SpecError
from penstock._core.spec import Array

ROW = 12 + 8 + 8  # bytes of a sample below


class Loads:
    """A load that counts how often it was called, in this process."""

    def __init__(self) -> None:
        self.count: Counter[int] = Counter()
        self.fails: set[int] = set()
        self._lock = threading.Lock()

    def __call__(self, item: int) -> dict[str, Any]:
        with self._lock:
            self.count[item] += 1
        if item in self.fails:
            raise ValueError(f"{item} is broken")
        return {"image": np.full((3, 4), item % 251, np.uint8), "label": item, "value": np.full(2, item / 2, "float32")}

    def several(self, item: int) -> list[dict[str, Any]]:
        return [self(10 * item + k) for k in range(3)]


def values_of(batch: dict[str, Any]) -> list[list[Any]]:
    """A batch as plain lists, whatever it is made of."""
    return [np.asarray(batch[name]).tolist() for name in ("image", "label", "value")]


def epochs_of(feed: Feed, count: int) -> list[list[Any]]:
    return [[values_of(batch) for batch in feed] for _ in range(count)]


def kept_feed(items: Any, load: Any, **options: Any) -> Feed:
    given: dict[str, Any] = {"batch_size": 8, "memory": "256 MiB", "num_workers": 0, "to": HostDevice()}
    return Feed(items, load, **(given | {"cache": "device", "device_memory": "1 MiB"} | options))


def plain_feed(items: Any, load: Any, **options: Any) -> Feed:
    given: dict[str, Any] = {"batch_size": 8, "memory": "256 MiB", "num_workers": 0}
    return Feed(items, load, **(given | options))


# ---------------------------------------------------------------------------------------------- nothing is loaded twice


@pytest.mark.parametrize("shuffle", [False, True])
def test_what_is_kept_is_loaded_once_and_nothing_is_allocated_later(shuffle: bool) -> None:
    load = Loads()
    with plain_feed(range(50), Loads(), shuffle=shuffle) as feed:
        expected = epochs_of(feed, 4)
    with kept_feed(range(50), load, shuffle=shuffle) as feed:
        assert epochs_of(feed, 1) == expected[:1]
        allocated = feed.stats.device_allocations
        assert epochs_of(feed, 3) == expected[1:]
        assert load.count == Counter(range(50))
        assert feed.stats.device_allocations == allocated == 3 * 3 + 3 + 1
        assert feed.stats.cached == 3 * 50
        assert feed.stats.bytes == 4 * 50 * ROW
        plan = feed.plan
        assert plan.device_samples == 50
        assert plan.device_bytes + plan.device_cache_bytes == plan.device_total_bytes <= penstock.MiB(1)
        assert "50 kept samples" in str(plan)
        assert "cache on the device: 50 samples of 50" in plan.notes[-1]


def test_worker_processes_are_not_asked_for_what_is_kept(tmp_path: Path) -> None:
    def load(item: int) -> Any:
        with (tmp_path / "log").open("a") as log:
            log.write(f"{item}\n")
        return np.full(100, item, np.int32)

    with kept_feed(range(60), load, num_workers=2, shuffle=True, cast="float32") as feed:
        assert sorted(int(x) for batch in feed for x in batch[:, 7]) == list(range(60))
        assert set((tmp_path / "log").read_text().split()) == set(map(str, range(60)))
        (tmp_path / "log").unlink()  # the probe loads a few of them several times
        for _ in range(3):
            assert sorted(int(x) for batch in feed for x in batch[:, 7]) == list(range(60))
        assert feed.plan.device_samples == 60
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("samples", [1, 13, 29])
def test_a_part_is_kept_and_the_rest_is_loaded_every_time(samples: int) -> None:
    """Batches then are made of both, sample by sample."""
    load = Loads()
    with kept_feed(range(50), load) as feed:
        plan = feed.plan
    spare = plan.device_cache_bytes - 50 * ROW  # the room for a batch that comes by, rounded up
    memory = plan.device_bytes * 2 // 3 + spare + samples * ROW + 2 * 64
    with plain_feed(range(50), Loads(), shuffle=True) as feed:
        expected = epochs_of(feed, 4)
    load = Loads()
    with kept_feed(range(50), load, shuffle=True, device_memory=memory) as feed:
        kept = feed.plan.device_samples
        assert samples <= kept <= samples + 10
        assert feed.plan.device_total_bytes <= memory
        assert epochs_of(feed, 4) == expected
        assert feed.stats.cached == 3 * kept
    assert Counter(load.count.values()) == {1: kept, 4: 50 - kept}


def test_epochs_that_overlap_load_again_only_what_had_not_arrived() -> None:
    with plain_feed(range(200), Loads(), shuffle=True) as feed:
        expected = epochs_of(feed, 4)
    load = Loads()
    with kept_feed(range(200), load, shuffle=True, num_workers=2, executor="thread") as feed:
        got = [[values_of(batch) for batch in epoch] for epoch in feed.epochs(4)]
        slots = feed.plan.slots
    assert got == expected
    assert max(load.count.values()) <= 2
    assert sum(load.count.values()) <= 200 + 8 * (slots + 1)


# ----------------------------------------------------------------------------------------------- the same in every case

CASES: list[dict[str, Any]] = [
    {},
    {"drop_last": True},
    {"shuffle": True, "shard": (1, 3)},
    {"shuffle": True, "shard": (2, 3), "drop_last": True},
    {"shard": (0, 7)},
    {"num_workers": 2, "executor": "thread", "shuffle": True},
    {"num_workers": 2, "executor": "thread", "batch_size": 1},
    {"batch_size": 100},
    {"shuffle": penstock.Blocks(rows=10, group=32)},
    {"shuffle": penstock.Blocks(rows=10, group=32), "num_workers": 2, "executor": "thread"},
    {"cast": {"image": OnDevice("float32")}, "shuffle": True},
    {"cast": {"value": "bfloat16", "image": "float16"}, "shuffle": True},
    {"on_error": "skip", "shuffle": True},
    {"on_error": Retry(1, then="skip"), "num_workers": 2, "executor": "thread", "shuffle": True},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("room", [2500, 4000, 10**6])
def test_batches_are_those_of_a_feed_that_keeps_nothing(case: dict[str, Any], room: int) -> None:
    plain, load = Loads(), Loads()
    if "on_error" in case:
        plain.fails = load.fails = {3, 4, 5, 40, 77}
    case = {"cast": None} | case
    if case.get("batch_size") == 100:
        room *= 10
    host = dict(case)
    if isinstance(case["cast"], dict) and isinstance(case["cast"].get("image"), OnDevice):
        host["cast"] = {"image": "float32"}
    with plain_feed(range(101), plain, **host) as feed:
        expected = epochs_of(feed, 4)
    with kept_feed(range(101), load, device_memory=room, **case) as feed:
        assert epochs_of(feed, 1) == expected[:1]
        load.count.clear()
        assert epochs_of(feed, 3) == expected[1:]
        assert feed.stats.copied == 0
        assert feed.stats.cached > 0
        plan = feed.plan
    again = sum(load.count[i] for i in range(101) if i not in load.fails)
    if case.get("shuffle") and "shard" in case:  # an epoch has others than the one before
        assert again < 3 * 34
    else:
        left_out = 5 if case.get("drop_last") else 0
        assert again == max(
            0, 3 * (-(-101 // case.get("shard", (0, 1))[1]) - len(load.fails) - left_out - plan.device_samples)
        )


@pytest.mark.parametrize("room", [2500, 10**6])
def test_items_of_several_samples_are_kept_whole(room: int) -> None:
    options: dict[str, Any] = {"samples_per_item": 3, "batch_size": 6, "shuffle": True}
    with plain_feed(range(20), Loads().several, **options) as feed:
        expected = epochs_of(feed, 3)
    load = Loads()
    with kept_feed(range(20), load.several, device_memory=room, **options) as feed:
        assert feed.plan.device_samples % 3 == 0
        assert epochs_of(feed, 1) == expected[:1]
        load.count.clear()
        assert epochs_of(feed, 2) == expected[1:]
        assert sum(load.count.values()) == 2 * (60 - feed.plan.device_samples)


def test_a_state_goes_on_with_the_next_sample_whatever_is_kept() -> None:
    with plain_feed(range(50), Loads(), shuffle=True) as feed:
        expected = [batch for epoch in epochs_of(feed, 3) for batch in epoch]
    for batches in (3, 7, 10):
        with kept_feed(range(50), Loads(), shuffle=True) as feed:
            got: list[Any] = []
            while len(got) < batches:
                for batch in feed:
                    got.append(values_of(batch))
                    if len(got) == batches:
                        break
            state = feed.state_dict()
            feed.load_state_dict(state)  # in the same feed
            here = [values_of(batch) for batch in feed]
        with kept_feed(range(50), Loads(), shuffle=True, batch_size=8) as feed:
            feed.load_state_dict(state)  # and in another, that has kept nothing yet
            there = [values_of(batch) for batch in feed]
        assert got == expected[:batches]
        end = -(-(batches + 1) // 7) * 7
        assert here == there == expected[batches:end]


def test_iterations_that_are_left_early_keep_what_came() -> None:
    """At random places, in threads, with the next batch on its way: what is kept is always the right sample."""
    draw = random.Random(1)
    load = Loads()
    with plain_feed(range(80), Loads(), shuffle=True) as feed:
        expected = epochs_of(feed, 20)
    with kept_feed(range(80), load, shuffle=True, num_workers=2, executor="thread", device_memory=2800) as feed:
        for epoch in range(20):
            feed.set_epoch(epoch)
            stop = draw.randrange(1, 11)
            for number, batch in enumerate(feed):
                assert values_of(batch) == expected[epoch][number]
                if number == stop:
                    break
        assert feed.stats.cached > 500
        assert 40 < feed.plan.device_samples < 80


def test_batches_that_are_held_stay_right() -> None:
    """A batch is a copy of what is kept: it is neither overwritten nor does writing to it change what is kept."""
    with kept_feed(range(24), Loads()) as feed, warnings.catch_warnings():
        warnings.simplefilter("ignore", penstock.ResourceHeld)
        expected = epochs_of(feed, 1)[0]
        held = [batch for _ in range(3) for batch in feed]
        assert [values_of(batch) for batch in held] == 3 * expected
        for batch in held:
            batch["image"][:] = 255
            batch["label"][:] = -1
        assert epochs_of(feed, 1)[0] == expected
    assert (held[0]["label"] == -1).all()


def test_a_torch_device_keeps_samples_as_well() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    load = Loads()
    with plain_feed(range(50), Loads(), shuffle=True) as feed:
        expected = epochs_of(feed, 3)
    for to in ("torch", "torch:cpu"):
        load = Loads()
        with kept_feed(range(50), load, shuffle=True, to=to, device_memory=2000) as feed:
            assert epochs_of(feed, 3) == expected
            assert 0 < feed.plan.device_samples < 50
            assert Counter(load.count.values()) == {1: feed.plan.device_samples, 3: 50 - feed.plan.device_samples}


def test_rows_of_arrays_in_memory_are_kept_too() -> None:
    """They need not be loaded, but they need not travel either."""
    x, y = np.arange(400, dtype=np.float32).reshape(100, 4), np.arange(100)
    with kept_feed(penstock.arrays(x, y), None, shuffle=True) as feed:
        for _ in range(3):
            rows = [(a.tolist(), int(b)) for xs, ys in feed for a, b in zip(xs, ys, strict=True)]
            assert sorted(rows, key=lambda row: row[1]) == [(x[i].tolist(), i) for i in range(100)]
        assert feed.stats.cached == 200


def test_a_model_leaves_what_it_needs() -> None:
    """device_memory is for the model's step, the batches, and what is kept: in this order."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    options: dict[str, Any] = {"to": "torch", "model": torch.nn.Linear(16, 4), "optimizer": "adam", "batch_size": 8}

    def sample(item: int) -> Any:
        return np.full(16, item, np.float32)

    with plain_feed(range(100), sample, **options, device_memory="1 MiB") as feed:
        model = feed.plan.model_bytes
    with kept_feed(range(100), sample, **options, device_memory=model + 4000) as feed:
        plan = feed.plan
        assert 0 < plan.device_samples < 100
        assert plan.device_total_bytes == model + plan.device_bytes + plan.device_cache_bytes <= model + 4000
        assert f"{plan.device_samples} kept samples" in str(plan)
        for _ in range(2):
            assert [float(v) for batch in feed for v in batch[:, 0]] == list(range(100))
    with pytest.raises(BudgetError, match="a step of the model and its batches take") as caught:
        _ = kept_feed(range(100), sample, **options, device_memory=model + 1200).plan
    with kept_feed(range(100), sample, **options, device_memory=caught.value.least) as feed:
        assert feed.plan.device_samples >= 1


# ------------------------------------------------------------------------------------------------------ what is random


def test_samples_of_a_random_load_are_not_kept() -> None:
    def noise(item: int) -> Any:
        return penstock.rng().random(3) + item

    with plain_feed(range(20), noise) as feed:
        expected = [[batch.tolist() for batch in feed] for _ in range(2)]
    with kept_feed(range(20), noise) as feed:
        with pytest.warns(CacheWarning, match=r"penstock\.rng"):
            plan = feed.plan
        assert "not used" in plan.notes[-1]
        assert [[batch.tolist() for batch in feed] for _ in range(2)] == expected


def test_items_that_turn_out_to_be_random_are_loaded_every_time() -> None:
    """The first ones were not, so the plan knew nothing of it."""

    def some(item: int) -> Any:
        return np.full(3, item) + (penstock.rng().random(3) if item > 10 and item % 3 == 0 else 0.0)

    with plain_feed(range(40), some, shuffle=False) as feed:
        expected = [[batch.tolist() for batch in feed] for _ in range(4)]
    assert expected[0] != expected[1]
    with kept_feed(range(40), some) as feed:
        with pytest.warns(CacheWarning, match=r"penstock\.rng"):
            got = [[batch.tolist() for batch in feed] for _ in range(4)]
        assert got == expected
        random_ones = sum(item > 10 and item % 3 == 0 for item in range(40))
        # Rows are given out one after the other, so a random one takes the place of one that could be kept.
        assert 3 * (40 - 2 * random_ones) <= feed.stats.cached <= 3 * (40 - random_ones)


# ----------------------------------------------------------------------------------------------------- what is refused


class Bare:
    """A device with all that a device must have, and no more."""

    name = "bare"

    def __getattr__(self, name: str) -> Any:
        if name == "gather":
            raise AttributeError(name)
        return getattr(HostDevice(), name)


def test_a_device_that_cannot_gather_is_told_so_at_once() -> None:
    bare: Any = Bare()
    assert isinstance(bare, Device)
    assert not isinstance(bare, Gathers)
    with plain_feed(range(10), Loads(), to=bare) as feed:
        assert len(epochs_of(feed, 1)[0]) == 2
    with pytest.raises(TypeError, match=r'bare cannot: it has no method "gather"'):
        kept_feed(range(10), Loads(), to=bare)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"collate_fn": "pad"}, TypeError, "keeps samples of one shape, and with collate_fn"),
        ({"collate_fn": lambda samples: samples}, TypeError, "keeps samples of one shape, and with collate_fn"),
        ({"samples_per_item": None}, TypeError, "with samples_per_item=None samples may have any"),
        ({"samples_per_item": 3}, ValueError, "batch_size must be a multiple of 3"),
        ({"batch_size": "max"}, ValueError, 'batch_size="max" leaves nothing'),
        ({"device_memory": None}, ValueError, 'cache="device" needs device_memory'),
    ],
    ids=["pad", "collate", "any number", "cut", "max", "no budget"],
)
def test_what_cannot_be_is_refused_with_what_to_do(options: dict[str, Any], error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        kept_feed(range(10), Loads(), **options)


def test_a_stream_is_refused() -> None:
    with pytest.raises(TypeError, match="cache needs items that can be found again"):
        kept_feed(iter(range(10)), Loads())


def test_texts_are_refused_by_name() -> None:
    with pytest.raises(SpecError, match=r"name.* is made of texts .* leave that out of the sample"):
        _ = kept_feed(range(10), lambda i: {"x": np.zeros(3), "name": str(i)}).plan
    pytest.importorskip("torch", reason="torch is not installed")
    with pytest.raises(SpecError, match=r"datetime64.* numbers, which stay on the host"):
        _ = kept_feed(range(10), lambda i: {"x": np.zeros(3), "day": np.datetime64("2020-01-01")}, to="torch").plan


def test_pack_is_refused() -> None:
    with pytest.raises(ValueError, match="run an epoch"), kept_feed(range(10), Loads()) as feed:
        feed.pack()


@pytest.mark.parametrize("missing", [1, 500, 10**6])
def test_a_budget_with_no_room_for_a_sample_is_refused_with_the_least_that_works(missing: int) -> None:
    with kept_feed(range(50), Loads()) as feed:
        batch = feed.plan.device_bytes // 3
    with pytest.raises(BudgetError, match="device_memory=") as caught:
        _ = kept_feed(range(50), Loads(), device_memory=max(1, 2 * batch + 400 - missing)).plan
    least = caught.value.least
    with kept_feed(range(50), Loads(), device_memory=least) as feed:
        assert feed.plan.device_buffers == 2
        assert feed.plan.device_samples >= 1
        assert feed.plan.device_total_bytes <= least
        assert [b[1] for b in epochs_of(feed, 1)[0]] == [list(range(n, min(n + 8, 50))) for n in range(0, 50, 8)]
    with pytest.raises(BudgetError):
        _ = kept_feed(range(50), Loads(), device_memory=least - 1).plan


def test_an_allocation_that_fails_leaves_nothing_behind() -> None:
    freed: list[Any] = []

    class Small(HostDevice):
        left = 10

        def allocate(self, nbytes: int) -> Any:
            self.left -= 1
            if self.left < 0:
                raise MemoryError("the device is full")
            return super().allocate(nbytes)

        def free(self, block: Any) -> None:
            freed.append(block)

    with pytest.raises(MemoryError, match="the device is full"):
        _ = kept_feed(range(50), Loads(), to=Small()).plan
    assert len(freed) == 10


def test_a_failing_gather_is_the_consumers_and_the_next_epoch_is_right() -> None:
    class Failing(HostDevice):
        fails = False

        def gather(self, shelves: Any, arrays: Sequence[Array], start: int, **rest: Any) -> Any:
            if self.fails:
                raise RuntimeError("out of luck")
            return super().gather(shelves, arrays, start, **rest)

    device = Failing()
    with kept_feed(range(50), Loads(), to=device) as feed:
        expected = epochs_of(feed, 1)[0]
        device.fails = True
        with pytest.raises(RuntimeError, match="out of luck"):
            next(iter(feed))
        device.fails = False
        assert epochs_of(feed, 2) == [expected, expected]
        assert feed.stats.copied == 0


# ------------------------------------------------------------------------------------- whatever items and workers are


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("room", [2000, 10**6])
def test_lines_of_text_are_read_only_where_something_is_missing(tmp_path: Path, room: int, shuffle: bool) -> None:
    """In order they are known as stretches of a file, of which parts are kept."""
    path = tmp_path / "lines"
    path.write_text("".join(f"{number}\n" for number in range(100)))
    load = Loads()
    options: dict[str, Any] = {"shuffle": shuffle, "num_workers": 2, "executor": "thread"}
    with plain_feed(penstock.lines(path), lambda line: Loads()(int(line)), **options) as feed:
        expected = epochs_of(feed, 3)
    with kept_feed(penstock.lines(path), lambda line: load(int(line)), device_memory=room, **options) as feed:
        assert epochs_of(feed, 1) == expected[:1]
        load.count.clear()
        assert epochs_of(feed, 2) == expected[1:]
        assert sum(load.count.values()) == 2 * (100 - feed.plan.device_samples)
        assert (feed.plan.device_samples == 100) == (room == 10**6)


TRACKER = pytest.mark.leaves("child", "fd", reason="the standard library's resource tracker, one for the process")


@pytest.mark.parametrize("portable", [False, pytest.param(True, marks=TRACKER)])
def test_workers_that_die_cost_no_sample_and_spoil_none(
    tmp_path: Path, portable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if portable:
        monkeypatch.setenv("PENSTOCK_PORTABLE", "1")

    def load(item: int) -> Any:
        if item % 17 == 5 and not (tmp_path / str(item)).exists():
            (tmp_path / str(item)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return np.full(50, item, np.float32)

    with kept_feed(range(60), load, num_workers=2, shuffle=True) as feed:
        for _ in range(4):
            seen = []
            for batch in feed:
                assert (batch == batch[:, :1]).all()
                seen += batch[:, 0].tolist()
            assert sorted(seen) == list(range(60))
        assert feed.stats.restarts >= 1
        # What a worker had done before it died may have been random, for all one knows: that is loaded once more.
        assert feed.stats.cached >= 2 * 60 + 40
