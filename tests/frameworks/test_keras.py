"""FeedDataset in the real Keras: batches by number, in whatever order, read ahead; fit, evaluate and predict."""

from __future__ import annotations

import importlib.util
import itertools
import os
import pickle
import random
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import penstock
from penstock import Feed
from tests.frameworks.numbered import Broken, Noted, load, pair

BACKENDS: Final = [name for name in ("torch", "jax") if importlib.util.find_spec(name)]
if not BACKENDS:
    pytest.skip("Keras needs torch or jax to fit a model", allow_module_level=True)
os.environ.setdefault("KERAS_BACKEND", BACKENDS[0])
keras = pytest.importorskip("keras", reason="Keras is not installed")

from penstock.keras import FeedDataset  # noqa: E402 - after the backend is chosen

ITEMS: Final = 100
BATCH: Final = 8
BATCHES: Final = 13  # the last one has 4 samples


@pytest.fixture(autouse=True)
def same_dice() -> Iterator[None]:
    """Keras draws the order of batches from Python's own generator: the same one in every run."""
    state = random.getstate()
    random.seed(5)
    yield
    random.setstate(state)


@pytest.fixture
def ds(request: pytest.FixtureRequest) -> Iterator[FeedDataset]:
    """A dataset of 100 numbered samples; parametrize indirectly with further arguments."""
    options = {"load": load, "num_workers": 1, "memory": "256 MiB", **getattr(request, "param", {})}
    with FeedDataset(np.arange(ITEMS), 2 * np.arange(ITEMS), batch_size=BATCH, **options) as dataset:
        yield dataset


def shuffled_too() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("ds", [{"shuffle": False}, {"shuffle": True, "seed": 3}], indirect=True)


def numbers(batch: Any) -> list[int]:
    """The items of a batch, after a look at every value of it."""
    x, y, *_ = batch
    assert (x == (y / 2)[:, None, None]).all()
    return [int(value) // 2 for value in y]


def runs(dataset: FeedDataset) -> int:
    """How often reading began anew: each time what was read ahead is lost."""
    engine = dataset.feed._engine
    return engine.run if engine is not None else 0


# ---------------------------------------- by number


def test_batch_i_is_batch_i_in_any_order(ds: FeedDataset) -> None:
    assert len(ds) == BATCHES
    mixed = random.Random(0).sample(range(BATCHES), BATCHES)
    for number in (*range(BATCHES), *mixed, 5, 5, 5, 12, 0, 12):
        assert numbers(ds[number]) == list(range(ITEMS))[BATCH * number : BATCH * (number + 1)]
    assert numbers(ds[-1]) == [96, 97, 98, 99]
    assert numbers(ds[np.int64(2)]) == list(range(16, 24))
    for wrong in (BATCHES, -BATCHES - 1):
        with pytest.raises(IndexError, match=f"there is no batch {wrong}: the dataset has 13"):
            ds[wrong]


@pytest.mark.parametrize("ds", [{"shuffle": True, "seed": 3}], indirect=True)
def test_a_shuffled_batch_depends_on_its_number_and_epoch_alone(ds: FeedDataset) -> None:
    first = {number: numbers(ds[number]) for number in range(BATCHES)}
    assert sorted(itertools.chain(*first.values())) == list(range(ITEMS))
    assert {number: numbers(ds[number]) for number in reversed(range(BATCHES))} == first
    ds.on_epoch_end()
    second = {number: numbers(ds[number]) for number in range(BATCHES)}
    assert second != first
    assert sorted(itertools.chain(*second.values())) == list(range(ITEMS))
    with Feed(np.arange(ITEMS), load, batch_size=BATCH, shuffle=True, seed=3, num_workers=0) as feed:
        for epoch, want in zip(feed.epochs(2), (first, second), strict=True):
            assert [batch[:, 0, 0].astype(int).tolist() for batch in epoch] == list(want.values())


@shuffled_too()
def test_threads_may_ask_at_once(ds: FeedDataset) -> None:
    got: dict[int, list[int]] = {}

    def ask(first: int) -> None:
        for number in range(first, BATCHES, 4):
            got[number] = numbers(ds[number])

    threads = [threading.Thread(target=ask, args=(first,)) for first in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", penstock.ResourceHeld)  # four readers hold more than there are slots
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert got == {number: numbers(ds[number]) for number in range(BATCHES)}


def test_a_batch_that_is_kept_stays_right(ds: FeedDataset) -> None:
    kept = ds[3]
    for _ in range(3):
        for number in range(BATCHES):
            ds[number]
    assert numbers(kept) == list(range(24, 32))


def test_after_close_what_was_given_stays_right_and_no_more_comes() -> None:
    dataset = FeedDataset(np.arange(ITEMS), 2 * np.arange(ITEMS), batch_size=BATCH, load=load, num_workers=1)
    kept = dataset[1]
    dataset.close()
    assert numbers(kept) == list(range(8, 16))
    with pytest.raises(penstock.FeedClosed):
        dataset[5]


def test_weights_and_trees_of_targets_keep_to_their_samples() -> None:
    x, weight = np.arange(ITEMS), np.arange(ITEMS) / 10
    y = {"twice": 2 * x, "row": np.stack([x, -x], axis=1)}
    options: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "num_workers": 0}
    data = np.stack([load(item) for item in range(ITEMS)])
    for dataset in (
        FeedDataset(x, y, sample_weight=weight, load=load, **options),
        FeedDataset(data, y, sample_weight=weight, **options),
    ):
        for number in range(BATCHES):
            images, targets, weights = dataset[number]
            assert (targets["row"] == np.stack([images[:, 0, 0], -images[:, 0, 0]], axis=1)).all()
            assert (targets["twice"] == 2 * images[:, 0, 0]).all()
            assert (weights == images[:, 0, 0].astype(np.int64) / 10).all()


def test_data_needs_no_load(tmp_path: Path) -> None:
    data = np.stack([load(item) for item in range(ITEMS)])
    np.save(tmp_path / "data.npy", data)
    mapped = np.load(tmp_path / "data.npy", mmap_mode="r")
    for x in (data, data.tolist(), mapped):
        with FeedDataset(x, list(range(0, 2 * ITEMS, 2)), batch_size=BATCH, num_workers=0) as dataset:
            assert numbers(dataset[12]) == [96, 97, 98, 99]
    with FeedDataset(mapped, 2 * np.arange(ITEMS), batch_size=BATCH, load=np.negative, num_workers=1) as dataset:
        x, y = dataset[2]
        assert (x[:, 0, 0] == -y / 2).all()
    with FeedDataset({"a": data, "b": -data}, batch_size=BATCH, num_workers=0) as dataset:
        (inputs,) = dataset[1]
        assert (inputs["a"] == -inputs["b"]).all()


def test_without_targets_load_may_give_them() -> None:
    with FeedDataset(np.arange(ITEMS), batch_size=BATCH, load=pair, num_workers=0) as dataset:
        assert numbers(dataset[1]) == list(range(8, 16))
    with FeedDataset(np.arange(ITEMS), batch_size=BATCH, load=load, num_workers=0) as dataset:
        (x,) = dataset[1]
        assert x[:, 0, 0].tolist() == list(range(8, 16))


# ---------------------------------------- what Keras asks is read ahead


def loads_of(folder: Path) -> set[int]:
    return {int(path.name) for path in folder.iterdir()}


@pytest.mark.parametrize("shuffle", [False, True])
def test_what_keras_asks_for_next_is_loaded_before_it_asks(tmp_path: Path, shuffle: bool) -> None:
    """Keras shuffles the numbers of the batches as it likes; the feed must not wait to be told."""

    class Watched(FeedDataset):
        asked: list[int]
        ahead: set[int]

        def __getitem__(self, index: Any) -> Any:
            self.asked.append(int(index))
            batch = super().__getitem__(index)
            if len(self.asked) == 5:
                # The workers go on while the model is busy. Nobody has asked for these yet.
                while len(loads_of(tmp_path)) < 6 * BATCH and time.monotonic() < until:
                    time.sleep(0.01)
                self.ahead = loads_of(tmp_path) - {n for i in self.asked for n in range(BATCH * i, BATCH * i + BATCH)}
            return batch

    until = time.monotonic() + 60
    adapter_of = importlib.import_module("keras.src.trainers.data_adapters").get_data_adapter
    with Watched(np.arange(104), 2 * np.arange(104), batch_size=BATCH, load=Noted(tmp_path), num_workers=1) as dataset:
        dataset.asked = []
        dataset.feed.plan  # noqa: B018 - what the probe loads is not what is looked at
        for path in tmp_path.iterdir():
            path.unlink()
        for _ in adapter_of(dataset, shuffle=shuffle).get_numpy_iterator():
            pass
        assert sorted(dataset.asked) == list(range(BATCHES))
        assert (dataset.asked == list(range(BATCHES))) != shuffle
        after = dataset.asked[5:]
        assert dataset.ahead
        assert {item // BATCH for item in dataset.ahead} <= set(after[:5])
        assert after[0] in {item // BATCH for item in dataset.ahead}


def test_whatever_order_keras_draws_is_foreseen(ds: FeedDataset) -> None:
    """Also those that begin like the order of the batches themselves."""
    adapter_of = importlib.import_module("keras.src.trainers.data_adapters").get_data_adapter
    for seed in range(40):
        random.seed(seed)
        before = runs(ds)
        for _ in adapter_of(ds, shuffle=True).get_numpy_iterator():
            pass
        assert runs(ds) - before <= 2
        ds.on_epoch_end()


def exact_model() -> Any:
    """A model whose loss is exactly 0 for right data: the sum over all values of |x - y / 2|."""
    inputs = keras.Input((64, 4))
    outputs = keras.layers.Lambda(lambda x: x)(inputs)
    model = keras.Model(inputs, outputs)

    def loss(y: Any, x: Any) -> Any:
        return keras.ops.max(keras.ops.abs(x - keras.ops.reshape(y, (-1, 1, 1)) / 2))

    model.compile(loss=loss)
    return model


@shuffled_too()
def test_fit_evaluate_and_predict_see_every_sample_and_read_ahead(ds: FeedDataset) -> None:
    model = exact_model()
    history = model.fit(ds, epochs=4, verbose=0)
    assert history.history["loss"] == [0.0] * 4
    # Once for the batch that Keras builds the model with, once for the rest: nothing that was read ahead was lost.
    assert runs(ds) <= 2
    assert ds.feed.stats.batches == 4 * BATCHES + 1
    assert model.fit(ds, epochs=2, verbose=0, shuffle=False).history["loss"] == [0.0] * 2
    assert model.evaluate(ds, verbose=0) == 0.0
    before = runs(ds)
    ds.on_epoch_end()
    order = [numbers(ds[number]) for number in range(BATCHES)]
    seen = model.predict(ds, verbose=0)[:, 0, 0].astype(int).tolist()
    assert seen == list(itertools.chain(*order))
    assert runs(ds) <= before + 2
    assert ds.feed.stats.copied == 0


def test_steps_per_epoch_and_validation_go_well(ds: FeedDataset) -> None:
    with FeedDataset(np.arange(40), 2 * np.arange(40), batch_size=16, load=load, num_workers=0) as other:
        history = exact_model().fit(ds, epochs=3, steps_per_epoch=4, validation_data=other, verbose=0)
    assert history.history == {"loss": [0.0] * 3, "val_loss": [0.0] * 3}


def test_weights_and_class_weights_reach_the_loss() -> None:
    x = np.zeros((4, 1), np.float32)
    y = np.array([0.0, 0.0, 1.0, 1.0], np.float32)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros", use_bias=False)])
    model.compile(loss="mse", optimizer=keras.optimizers.SGD(0.0))
    weighted = FeedDataset(x, y, sample_weight=[0.0, 0.0, 4.0, 0.0], batch_size=4, num_workers=0)
    assert model.evaluate(weighted, verbose=0) == pytest.approx(1.0)  # 4 * 1 / 4
    plain = FeedDataset(x, y, batch_size=4, num_workers=0)
    assert model.fit(plain, class_weight={0: 1.0, 1: 6.0}, verbose=0).history["loss"] == [pytest.approx(3.0)]


# ---------------------------------------- a feed of one's own


def test_a_feed_of_ones_own_is_a_dataset_too() -> None:
    with Feed(range(ITEMS), pair, batch_size=BATCH, shuffle=True, seed=1, num_workers=1, memory="256 MiB") as feed:
        dataset = FeedDataset.from_feed(feed)
        assert (len(dataset), dataset.num_batches) == (BATCHES, BATCHES)
        want = [numbers(batch) for batch in feed]
        later = FeedDataset.from_feed(feed)  # goes on where the feed is
        assert [numbers(later[number]) for number in (3, 0)] != [want[3], want[0]]
        assert [numbers(dataset[number]) for number in (12, 3, 4, 5, 0)] == [want[n] for n in (12, 3, 4, 5, 0)]
        next(iter(feed))  # someone iterates it meanwhile
        assert numbers(dataset[6]) == want[6]
        assert exact_model().fit(dataset, epochs=2, verbose=0).history["loss"] == [0.0] * 2


def test_a_stream_is_a_dataset_without_length() -> None:
    with Feed(itertools.count(), pair, batch_size=BATCH, num_workers=1, memory="256 MiB") as feed:
        dataset = FeedDataset.from_feed(feed)
        assert dataset.num_batches is None
        with pytest.raises(TypeError, match="a stream of items has no length"):
            len(dataset)
        model = exact_model()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras: shuffle is ignored
            assert model.fit(dataset, epochs=2, steps_per_epoch=5, verbose=0).history["loss"] == [0.0] * 2
    with Feed(iter(range(4)), pair, batch_size=4, num_workers=0) as feed:
        dataset = FeedDataset.from_feed(feed)
        assert numbers(dataset[0]) == [0, 1, 2, 3]
        with pytest.raises(IndexError, match="gives its items once"):
            dataset[1]


def test_a_feed_that_skips_is_a_dataset_without_length() -> None:
    with Feed(range(20), Broken(3, 13), batch_size=6, num_workers=0, on_error="skip") as feed:
        dataset = FeedDataset.from_feed(feed)
        assert dataset.num_batches is None
        got = [numbers(dataset[number]) for number in range(6)]
    assert got == 2 * [[0, 1, 2, 4, 5, 6], [7, 8, 9, 10, 11, 12], [14, 15, 16, 17, 18, 19]]


Callback: Any = keras.callbacks.Callback


class Stop(Callback):  # type: ignore[misc]  # Keras is Any to the type checker
    """Ends what would never end."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        self.model.stop_training = self.left <= 0


def several(item: int) -> Iterator[Any]:
    yield from [pair(item)] * 2


ENDLESS: Final = {
    "skips": lambda: Feed(range(20), Broken(3, 13), batch_size=6, num_workers=0, on_error="skip"),
    "varies": lambda: Feed(range(9), several, batch_size=6, num_workers=0, samples_per_item=None),
    "stream": lambda: Feed(dict.fromkeys(range(18)).keys(), pair, batch_size=6, num_workers=0),
}


def told_by(fit: Any) -> list[str]:
    """What was said about steps; Keras warns of other things."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit()
    return [str(one.message) for one in caught if "steps" in str(one.message)]


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_fit_that_would_never_end_is_told_its_steps_once(kind: str) -> None:
    with ENDLESS[kind]() as feed:
        dataset, model = FeedDataset.from_feed(feed), exact_model()
        (told,) = told_by(lambda: model.fit(dataset, verbose=0, callbacks=[Stop(after=11)]))
        assert told.startswith("the feed's epoch was over after 3 batches, and Keras asks for more in one epoch of its")
        assert "give fit steps_per_epoch=3 (evaluate and predict: steps=3," in told


@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize("steps", [2, 3, 7])
def test_a_fit_that_knows_its_steps_is_told_nothing(kind: str, steps: int) -> None:
    with ENDLESS[kind]() as feed:
        dataset, model = FeedDataset.from_feed(feed), exact_model()
        assert told_by(lambda: model.fit(dataset, epochs=4, steps_per_epoch=steps, verbose=0)) == []
        assert told_by(lambda: model.evaluate(dataset, steps=steps, verbose=0)) == []


def test_a_feed_that_goes_on_inside_an_epoch_is_refused() -> None:
    """Its batches have numbers, and those that were given elsewhere would come again."""
    options: dict[str, Any] = {"batch_size": BATCH, "num_workers": 0, "shuffle": True}
    with Feed(range(ITEMS), pair, **options) as feed:
        want = [[numbers(batch) for batch in epoch] for epoch in feed.epochs(2)]
        feed.set_epoch(1)
        begun = iter(feed)
        for _ in range(3):
            next(begun)
        inside = feed.state_dict()
        feed.set_epoch(2)
        start = feed.state_dict()
    with Feed(range(ITEMS), pair, **options) as feed:
        feed.load_state_dict(inside)
        with pytest.raises(
            ValueError,
            match=r"^the feed goes on inside epoch 1, after 24 of its items, as its state says, .* iterate the feed "
            r"itself for the rest of this one .*, or begin it anew with feed.set_epoch\(1\)$",
        ):
            FeedDataset.from_feed(feed)
        feed.set_epoch(1)
        assert numbers(FeedDataset.from_feed(feed)[2]) == want[1][2]
        feed.load_state_dict(inside)
        assert [numbers(batch) for batch in feed] == want[1][3:]
        assert FeedDataset.from_feed(feed)._epoch == 2
        feed.load_state_dict({**start, "epoch": 1})
        assert numbers(FeedDataset.from_feed(feed)[0]) == want[1][0]


def test_a_stream_goes_on_where_its_state_says() -> None:
    """Its batches have no numbers."""
    feeds = [Feed(range(20), Broken(3), batch_size=4, num_workers=0, on_error="skip") for _ in range(2)]
    begun = iter(feeds[0])
    next(begun)
    next(begun)
    feeds[1].load_state_dict(feeds[0].state_dict())
    assert numbers(FeedDataset.from_feed(feeds[1])[0]) == [9, 10, 11, 12]
    for feed in feeds:
        feed.close()


def test_batches_from_blocks_come_as_they_are_read(tmp_path: Path) -> None:
    """By number they would be read again for every batch."""
    np.save(tmp_path / "data.npy", np.stack([load(item) for item in range(ITEMS)]))
    mapped = np.load(tmp_path / "data.npy", mmap_mode="r")
    blocks = penstock.Blocks(rows=10)
    options: dict[str, Any] = {"batch_size": BATCH, "shuffle": blocks, "num_workers": 1, "memory": "256 MiB"}
    with FeedDataset(mapped, 2 * np.arange(ITEMS), **options) as dataset:
        assert dataset.num_batches == BATCHES
        for _ in range(2):
            assert sorted(itertools.chain(*(numbers(dataset[n]) for n in range(BATCHES)))) == list(range(ITEMS))
            dataset.on_epoch_end()
        assert exact_model().fit(dataset, epochs=2, verbose=0).history["loss"] == [0.0] * 2
        assert dataset.feed.stats.batches == 4 * BATCHES + 1
    with pytest.raises(ValueError, match=r"use FeedDataset\.from_feed\(Feed\(\.\.\., cache=\"device\", device_memory="):
        FeedDataset(np.zeros((8, 3)), batch_size=2, cache="device")
    with pytest.raises(ValueError, match="y cannot be put beside them"):
        FeedDataset(mapped, np.arange(ITEMS), load=np.negative, **options)


def test_from_feed_takes_feeds_only() -> None:
    with pytest.raises(TypeError, match=r"from_feed takes a penstock.Feed, not a list"):
        FeedDataset.from_feed([])  # type: ignore[arg-type]


# ---------------------------------------- Keras' own workers


def test_the_workers_of_keras_are_not_used() -> None:
    with pytest.warns(UserWarning, match="workers=4 is not used: a FeedDataset reads ahead with worker") as told:
        dataset = FeedDataset(
            np.arange(ITEMS), 2 * np.arange(ITEMS), batch_size=BATCH, load=load, num_workers=1, memory="256 MiB",
            workers=4, use_multiprocessing=True, max_queue_size=20,
        )  # fmt: skip
    assert [warning.filename for warning in told] == [__file__]
    assert (dataset.workers, dataset.use_multiprocessing) == (1, False)
    with dataset:
        threads = set(threading.enumerate())
        assert exact_model().fit(dataset, epochs=2, verbose=0).history["loss"] == [0.0] * 2
        assert set(threading.enumerate()) <= threads
        with pytest.raises(TypeError, match="cannot be sent to another process"):
            pickle.dumps(dataset)
    other = FeedDataset(np.zeros((3, 2)), batch_size=2)
    with pytest.warns(UserWarning, match="use_multiprocessing=True is not used"):
        other.use_multiprocessing = True
    assert not other.use_multiprocessing


# ---------------------------------------- errors


def test_a_load_that_fails_names_its_item_and_the_next_batch_comes() -> None:
    with FeedDataset(np.arange(ITEMS), batch_size=BATCH, load=Broken(20), num_workers=1, memory="256 MiB") as ds:
        numbers(ds[1])
        with pytest.raises(penstock.LoadError, match="load failed for 20") as caught:
            ds[2]
        assert caught.value.item == 20
        assert numbers(ds[3]) == list(range(24, 32))
        assert numbers(ds[4]) == list(range(32, 40))


def test_arguments_that_do_not_fit_are_refused() -> None:
    x = np.arange(4)
    with pytest.raises(TypeError, match=r"x holds names of things to read, or objects, and there is no load"):
        FeedDataset(["a.npy", "b.npy"], batch_size=2)
    with pytest.raises(ValueError, match=r"y has the shape \[3\], but there are 4 items"):
        FeedDataset(x, x[:3], batch_size=2, load=load)
    with pytest.raises(ValueError, match=r"sample_weight has the shape \[2\], but there are 4 items"):
        FeedDataset(x, x, sample_weight=x[:2], batch_size=2, load=load)
    with pytest.raises(TypeError, match="sample_weight belongs to targets"):
        FeedDataset(x, sample_weight=x, batch_size=2, load=load)
    with pytest.raises(TypeError, match=r"^x is a dict, and load takes one item: give x as a sequence of items, such"):
        FeedDataset({"p": ["a", "b"], "n": [1, 2]}, x, batch_size=2, load=load)
    with pytest.raises(ValueError, match=r"would shift every sample after one .* and give fit its steps_per_epoch"):
        FeedDataset(x, x, batch_size=2, load=load, on_error=penstock.Retry(2, then="skip"))


def failing(item: int) -> Any:
    raise OSError("no such thing")


def growing(item: int) -> Any:
    return np.zeros(1 + item)


def yielding(item: int) -> Iterator[Any]:
    yield np.zeros(2)


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (
            failing,
            r'on_error="skip"\)\), where load returns the targets too and fit needs its steps_per_epoch\)$',
        ),
        (growing, r"need padding: fill them up in load, or use FeedDataset.from_feed\(Feed\(..., collate_fn=...\)\)$"),
        (
            yielding,
            r"FeedDataset.from_feed\(Feed\(..., samples_per_item=...\)\), where fit needs its steps_per_epoch if the",
        ),
    ],
)
def test_what_goes_wrong_is_told_with_what_a_dataset_has(read: Any, message: str) -> None:
    """A Feed has arguments that a dataset does not; one made by the user is told in its own words."""
    with FeedDataset(np.arange(8), np.arange(8), batch_size=4, load=read, num_workers=0) as ds:
        with pytest.raises(penstock.PenstockError, match=message):
            ds[0]
        ds.close()
        with pytest.raises(penstock.FeedClosed, match=r"^the dataset was closed: make a new one to go on$"):
            ds[0]
    with Feed(range(8), read, batch_size=4, num_workers=0) as feed:
        with pytest.raises(penstock.PenstockError, match=r"on_error|collate_fn|samples_per_item") as caught:
            FeedDataset.from_feed(feed)[0]
        assert "from_feed" not in str(caught.value)


def test_what_keras_takes_to_build_a_model_is_not_lost() -> None:
    """It asks for the first batch, makes the layers, and begins again; a stream cannot."""
    seen: list[list[float]] = []

    class Noted(FeedDataset):
        def __getitem__(self, index: Any) -> tuple[Any, ...]:
            batch = super().__getitem__(index)
            seen.append(np.asarray(batch[0])[:, 0].tolist())
            return batch

    def pair(i: int) -> Any:
        return np.full(3, i, np.float32), np.float32(i)

    with Feed(iter(range(1, 21)), pair, batch_size=4, memory="256 MiB", num_workers=0) as feed:
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras: shuffle is ignored
            model.fit(Noted.from_feed(feed), steps_per_epoch=1, epochs=5, verbose=0)
    batches = [[float(4 * k + i) for i in range(1, 5)] for k in range(5)]
    assert seen == [batches[0], *batches]


def test_a_stream_that_is_over_says_what_to_tell_keras() -> None:
    with Feed(iter(range(4)), load, batch_size=4, num_workers=0) as feed:
        ds = FeedDataset.from_feed(feed)
        ds[0]
        with pytest.raises(IndexError, match="cannot begin anew: tell fit its steps_per_epoch and epochs, or make"):
            ds[1]


# ---------------------------------------- a real task

LEARNS: Final = """
import sys
from pathlib import Path
import numpy as np
import keras
from penstock.keras import FeedDataset

folder = Path(sys.argv[1])
rng = np.random.default_rng(0)
for number in range(400):  # a bright square in one of four corners, in noise
    image = rng.normal(0, 1, (16, 16)).astype(np.float32)
    row, column = divmod(number % 4, 2)
    image[8 * row : 8 * row + 8, 8 * column : 8 * column + 8] += 0.7
    np.save(folder / f"{number % 4}-{number:03}.npy", image)

paths = np.array(sorted(map(str, folder.glob("*.npy"))))
labels = np.array([int(Path(path).name[0]) for path in paths])
held_out = rng.permutation(len(paths)) < 100

keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((16, 16)), keras.layers.Flatten(), keras.layers.Dense(4, activation="softmax")])
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
how = {"batch_size": 32, "load": np.load, "memory": "256 MiB", "num_workers": 2}
with (
    FeedDataset(paths[~held_out], labels[~held_out], shuffle=True, **how) as training,
    FeedDataset(paths[held_out], labels[held_out], **how) as validation,
):
    model.fit(training, validation_data=validation, epochs=12, verbose=0)
    _, accuracy = model.evaluate(validation, verbose=0)
    guesses = model.predict(validation, verbose=0).argmax(axis=1)
    assert abs((guesses == labels[held_out]).mean() - accuracy) < 1e-6
    assert training.feed.stats.copied == validation.feed.stats.copied == 0
print(keras.backend.backend(), accuracy)
"""


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_a_model_learns_from_a_folder_of_npy_files(tmp_path: Path, backend: str) -> None:
    if backend not in BACKENDS:
        pytest.skip(f"{backend} is not installed")
    done = subprocess.run(
        [sys.executable, "-c", LEARNS, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        # On two cores the threads of torch and the workers get in each other's way.
        env={**os.environ, "KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    used, accuracy = done.stdout.split()[-2:]
    assert used == backend
    assert float(accuracy) > 0.9
