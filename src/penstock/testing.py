"""One suite that every device passes: subclass ``DeviceSuite`` in your tests to prove your own. Imports pytest.

::

    from penstock.testing import DeviceSuite

    class TestMine(DeviceSuite):
        to = MyDevice()

Each test is a claim about a ``Device``, about a ``Feed`` that copies to it, or about a ``Place`` on it.
"""

from __future__ import annotations

import gc
import math
import warnings
from typing import Any, ClassVar

import numpy as np
import pytest

import penstock
from penstock import BudgetError, Feed, OnDevice, Place, PlaceFull, ResourceHeld
from penstock._core.device import Device, Gathers, Shelves, copying_device
from penstock._core.spec import Array, to_dtype

__all__ = ["DeviceSuite"]

DTYPES = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "bfloat16",
)  # fmt: skip
ROWS = 4


def _sample(item: int) -> dict[str, Any]:
    return {
        "image": np.full((32, 33), item % 251, np.uint8),
        "value": np.full(5, item, np.float32),
        "label": item,
        "name": f"item {item}",
    }


def _ragged(item: int) -> Array:
    return np.full(item % 7 + 1, item, np.float32)


class DeviceSuite:
    """What holds for every device. Set ``to`` to what is given to ``Feed(to=...)``."""

    to: ClassVar[Any]
    """A name or a ``Device``."""
    copies: ClassVar[bool] = True
    """False where a feed hands out slots as they are, because the device is the host's own memory."""
    requests: ClassVar[int] = 300
    """How many requests to put through a ``Place``."""

    # ---- what a subclass may replace

    def device(self) -> Device:
        """The device that everything is copied to."""
        return copying_device(self.to)

    def host(self, leaf: Any) -> Array:
        """What an array of the framework holds."""
        if isinstance(leaf, np.ndarray):
            return leaf.copy()
        device = self.device()
        form = device.form(leaf)
        assert form is not None, f"{device.name} does not know its own {type(leaf).__name__}"
        out = np.empty(*form)
        device.read(leaf, out)
        return out

    def doubled(self, leaf: Any) -> Any:
        """Something computed from a leaf, which may be lazy and need it still."""
        return leaf * 2

    def allocated(self) -> int | None:
        """How often the framework allocated memory on the device so far, if it can be counted."""
        return None

    def live_bytes(self) -> int | None:
        """What the framework says is in use on the device, if it says so."""
        return None

    # ---- the device itself

    @pytest.mark.parametrize("name", DTYPES)
    def test_values_of_every_dtype_it_takes_arrive_and_come_back(self, name: str) -> None:
        """Also numbers without axes, and arrays without elements."""
        device, dtype = self.device(), to_dtype(name)
        if not device.takes(dtype):
            pytest.skip(f"{device.name} takes no {name}")
        for shape in ((3, 5), (7,), (), (0, 4)):
            array = np.array(np.arange(math.prod(shape)).reshape(shape) % 2, dtype)
            array.flags.writeable = False
            block = device.allocate(max(1, array.nbytes))
            ticket = device.copy([block], [array])
            leaf = device.hand_out(block, ticket, array.shape, array.dtype, int)
            assert tuple(leaf.shape) == shape
            np.testing.assert_array_equal(self.host(leaf).astype(np.float64), array.astype(np.float64))
            assert device.copied(ticket, wait=True)
            del leaf

    def test_a_copy_is_not_the_host_memory_under_another_name(self) -> None:
        """What is written to the host afterwards must not be seen on the device, however the memory is aligned."""
        device = self.device()
        memory = np.zeros(4 * 4096, np.uint8)
        start = -memory.ctypes.data % 4096
        for offset in (0, 64, 4):
            host = memory[start + offset : start + offset + 4096].view(np.float32)
            host[:] = 1
            block = device.allocate(host.nbytes)
            ticket = device.copy([block], [host])
            assert device.copied(ticket, wait=True)
            leaf = device.hand_out(block, ticket, host.shape, host.dtype, int)
            host[:] = 2
            assert (self.host(leaf) == 1).all()
            del leaf

    def test_memory_is_over_once_and_not_before_the_last_use(self) -> None:
        """A part of a leaf keeps it, and so does what is computed from it as long as that needs it."""
        device = self.device()
        array = np.arange(12, dtype=np.float32).reshape(4, 3)
        block = device.allocate(array.nbytes)
        over: list[int] = []
        leaf = device.hand_out(block, device.copy([block], [array]), array.shape, array.dtype, lambda: over.append(1))
        part = leaf[1:3]
        later = self.doubled(part)
        gc.collect()
        device.settle()
        assert over == []
        del leaf, part
        assert self.host(later).tolist() == (array[1:3] * 2).tolist()
        del later
        gc.collect()
        device.settle()
        assert over == [1]

    def test_a_block_is_filled_again_and_again(self) -> None:
        """Also with less, and with another dtype."""
        device = self.device()
        block = device.allocate(4096)
        over: list[int] = []
        for number, dtype in enumerate((np.float32, np.uint8, np.int32, np.float32, np.uint8)):
            array = np.full((10 + number, 5), number, dtype)
            ticket = device.copy([block], [array])
            leaf = device.hand_out(block, ticket, array.shape, array.dtype, lambda: over.append(1))
            np.testing.assert_array_equal(self.host(leaf), array)
            del leaf
            gc.collect()
            device.settle()
            assert over == [1] * (number + 1)
        device.free(block)

    def test_a_cast_is_made_in_its_own_block(self) -> None:
        """The block it is made from is free at once, that of the result when nobody uses it."""
        device = self.device()
        array = np.arange(200, dtype=np.uint8).reshape(20, 10)
        source, target = device.allocate(200), device.allocate(800)
        over: list[str] = []
        leaf = device.hand_out(
            source, device.copy([source], [array]), array.shape, array.dtype, lambda: over.append("s")
        )
        cast = device.cast(leaf, target, np.dtype(np.float32), lambda: over.append("t"))
        del leaf
        out = self.host(cast)
        assert out.dtype == np.float32
        np.testing.assert_array_equal(out, array)
        gc.collect()
        device.settle()
        assert over == ["s"]
        del cast
        gc.collect()
        device.settle()
        assert over == ["s", "t"]

    def test_kept_rows_are_gathered_in_any_order(self) -> None:
        """What comes from the host is put anywhere, and rows from anywhere make a batch; nothing else is touched."""
        device = self.device()
        if not isinstance(device, Gathers):
            pytest.skip(f"{device.name} keeps no samples: it has no gather")
        draw = np.random.default_rng(0)
        forms: list[tuple[tuple[int, ...], np.dtype[Any]]] = [
            ((5, 3), np.dtype(np.uint8)), ((), np.dtype(np.int64)), ((2, 2), np.dtype(np.float32)),
            ((0, 3), np.dtype(np.float32)), ((3,), to_dtype("float16")), ((1,), to_dtype("bfloat16")),
        ]  # fmt: skip
        forms = [(shape, dtype) for shape, dtype in forms if device.takes(dtype)]
        rows, spare = 40, 6
        sizes = [dtype.itemsize * math.prod(shape) for shape, dtype in forms]
        blocks = tuple(device.allocate(max(1, size * rows)) for size in sizes)
        targets = [device.allocate(max(1, size * spare)) for size in sizes]
        shelves = Shelves(blocks, tuple(forms), rows, spare, device.allocate(8 * spare))
        model = [np.zeros((rows, *shape), dtype) for shape, dtype in forms]
        used = 0
        for count in (6, 3, 0, 6, 1, 0, 6, 5, 6, 6, 6, 2):
            arrays = [draw.integers(0, 99, (count, *shape)).astype(dtype) for shape, dtype in forms]
            start = min(used, rows - spare)
            for kept, array in zip(model, arrays, strict=True):
                kept[start : start + count] = array
            used = min(used + count, rows - spare)
            wanted = draw.permutation(np.r_[draw.integers(0, max(1, used), spare - count), start : start + count])
            ticket = device.gather(shelves, arrays, start, rows=wanted, blocks=targets)
            for target, kept, (shape, dtype) in zip(targets, model, forms, strict=True):
                leaf = device.hand_out(target, ticket, (len(wanted), *shape), dtype, int)
                assert tuple(leaf.shape) == (len(wanted), *shape)
                np.testing.assert_array_equal(
                    self.host(leaf).astype(np.float64), kept[wanted].astype(np.float64), err_msg=f"{shape} {dtype}"
                )
                del leaf
            assert device.copied(ticket, wait=True)
            gc.collect()
            device.settle()
        for block in (*blocks, *targets, shelves.index):
            device.free(block)

    # ---- a feed to it

    def _feed(self, items: int = 42, **options: Any) -> Feed:
        options = {"batch_size": ROWS, "memory": "256 MiB", "num_workers": 0, "to": self.to} | options
        return Feed(range(items), options.pop("load", _sample), **options)

    def _check(self, batch: Any, number: int, items: int = 42) -> None:
        expected = np.arange(number * ROWS, min(items, number * ROWS + ROWS))
        assert self.host(batch["label"]).tolist() == expected.tolist()
        assert batch["name"] == [f"item {i}" for i in expected]
        np.testing.assert_array_equal(
            self.host(batch["image"]), np.broadcast_to((expected % 251)[:, None, None], (len(expected), 32, 33))
        )
        assert (self.host(batch["value"]) == expected[:, None]).all()

    @pytest.mark.parametrize(
        "crew", [{}, {"num_workers": 2, "executor": "thread"}, {"num_workers": 2}], ids=["inline", "thread", "process"]
    )
    def test_a_feed_gives_the_right_batches_epoch_after_epoch(self, crew: dict[str, Any]) -> None:
        """Texts stay lists, the last batch is smaller, and after the first batches nothing is allocated."""
        with warnings.catch_warnings(), self._feed(**crew) as feed:
            warnings.simplefilter("error", ResourceHeld)
            allocated: list[tuple[int, int | None]] = []
            live: list[int] = []
            for _ in range(3):
                for number, batch in enumerate(feed):
                    self._check(batch, number)
                    live.append(self.live_bytes() or 0)
                assert number == 10
                allocated.append((feed.stats.device_allocations, self.allocated()))
            assert allocated[0] == allocated[1] == allocated[2]
            assert max(live[22:]) <= max(live[:11])
            assert feed.stats.batches == 33
            assert feed.stats.copied == 0
            plan = feed.plan
            assert plan.device_buffers == (3 if self.copies else 0)
            assert feed.stats.device_allocations == plan.device_buffers * 3
            assert plan.device_bytes >= plan.device_buffers * ROWS * (32 * 33 + 5 * 4 + 8)

    def test_the_order_and_the_state_do_not_depend_on_it(self) -> None:
        """A batch that was copied ahead counts as handed out only when it was."""
        kind: dict[str, Any] = {"num_workers": 2, "executor": "thread", "shuffle": True, "seed": 3}
        with self._feed(to="numpy", **kind) as feed:
            expected = [label for batch in feed for label in batch["label"].tolist()]
        with self._feed(**kind) as feed:
            batches = iter(feed)
            got = [label for _ in range(4) for label in self.host(next(batches)["label"]).tolist()]
            state = feed.state_dict()
        with self._feed(**kind) as feed:
            feed.load_state_dict(state)
            got += [label for batch in feed for label in self.host(batch["label"]).tolist()]
        assert got == expected

    def test_batches_that_are_kept_stay_right(self) -> None:
        """Memory that is used is not used again; further batches get their own, with one warning."""
        with self._feed(80) as feed:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", ResourceHeld)
                batches = list(feed)
            if self.copies:
                assert [str(w.message).partition(" on ")[0] for w in caught] == ["the consumer holds all 3 buffers"]
                assert feed.stats.copied > 0
            for number, batch in enumerate(batches):
                self._check(batch, number, 80)
            del batches, batch

    def test_what_is_computed_from_a_batch_stays_right(self) -> None:
        """Parts, and results that may be lazy, keep the memory they need."""
        with self._feed(80) as feed, warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceHeld)
            kept = [self.doubled(batch["value"][1:]) for batch in feed]
            for number, result in enumerate(kept):
                rows = 2 * np.arange(number * ROWS + 1, number * ROWS + ROWS, dtype=np.float32)
                assert (self.host(result) == rows[:, None]).all()
            del kept, result

    def test_a_batch_is_right_after_the_feed_was_closed(self) -> None:
        """What is in somebody's hands is theirs."""
        feed = self._feed()
        batch = next(iter(feed))
        feed.close()
        del feed
        gc.collect()
        self._check(batch, 0)

    def test_the_variable_of_a_loop_that_is_over_costs_nothing(self) -> None:
        """The last batch of one loop is still named while another runs: no copies, no warning."""
        with warnings.catch_warnings(), self._feed() as feed:
            warnings.simplefilter("error", ResourceHeld)
            for number, batch in enumerate(feed):
                self._check(batch, number)
            for number, other in enumerate(feed):
                self._check(other, number)
            self._check(batch, 10)
            assert feed.stats.copied == 0

    def test_padded_batches_of_varying_size(self) -> None:
        """A collated batch is copied leaf by leaf; blocks of a few sizes serve all of them."""
        with self._feed(60, load=_ragged, collate_fn="pad") as feed:
            for epoch in range(2):
                for number, batch in enumerate(feed):
                    items = range(number * ROWS, number * ROWS + ROWS)
                    assert self.host(batch.lengths).tolist() == [i % 7 + 1 for i in items]
                    assert self.host(batch.data).max(axis=1).tolist() == list(items)
                if epoch == 0:
                    allocated = feed.stats.device_allocations
            assert feed.stats.device_allocations == allocated
            del batch

    def test_items_with_any_number_of_samples(self) -> None:
        """What is put together from several slots arrives like everything else."""
        with self._feed(
            20, load=lambda i: [np.full(3, 10 * i + k, np.float32) for k in range(i % 4)], samples_per_item=None
        ) as feed:
            got = [value for batch in feed for value in self.host(batch)[:, 0].tolist()]
        assert got == [10 * i + k for i in range(20) for k in range(i % 4)]

    def test_a_cast_on_the_device_ships_what_load_gave(self) -> None:
        """uint8 in the slot and on the way, float32 on the device; the plan says what that saves."""
        with self._feed(cast={"image": OnDevice("float32")}) as feed:
            assert feed.plan.sample_bytes < 32 * 33 * 2
            assert any("cast on the device" in note and "less traffic" in note for note in feed.plan.notes)
            for _ in range(2):
                for number, batch in enumerate(feed):
                    assert self.host(batch["image"]).dtype == np.float32
                    self._check(batch, number)
            assert feed.stats.device_allocations == feed.plan.device_buffers * 4
            del batch

    def test_bfloat16_arrives_as_bfloat16(self) -> None:
        """numpy has no such type of its own; frameworks do."""
        with self._feed(cast={"value": "bfloat16"}) as feed:
            assert any(note.startswith("cast:") for note in feed.plan.notes)
            for number, batch in enumerate(feed):
                assert "bfloat16" in str(batch["value"].dtype)
                assert (
                    self.host(batch["value"]).astype(np.float32)[:, 0]
                    == np.arange(number * ROWS, number * ROWS + len(batch["name"]))
                ).all()
            del batch

    def test_a_cast_to_bfloat16_on_the_device_is_right_or_refused_at_once(self) -> None:
        """Not every compiler knows the type; that is said before anything is loaded."""
        try:
            feed = self._feed(cast={"image": OnDevice("bfloat16")})
        except ValueError as error:
            assert "cannot compute that" in str(error)
            return
        with feed:
            for number, batch in enumerate(feed):
                assert "bfloat16" in str(batch["image"].dtype)
                rows = np.arange(number * ROWS, number * ROWS + len(batch["name"]))
                assert (self.host(batch["image"]).astype(np.float32)[:, 0, 0] == rows).all()
            del batch

    def test_device_memory_bounds_the_buffers(self) -> None:
        """Three buffers become two, and what is too small is refused with the least that works."""
        if not self.copies:
            pytest.skip("the device is the host's own memory")
        with self._feed() as feed:
            each = feed.plan.device_bytes // 3
        with self._feed(device_memory=2 * each) as feed:
            assert (feed.plan.device_buffers, feed.plan.device_bytes) == (2, 2 * each)
            assert "on the device: 2 buffers" in str(feed.plan)
            for number, batch in enumerate(feed):
                self._check(batch, number)
            assert feed.stats.copied == 0
            del batch
        with (
            pytest.raises(BudgetError, match=r"device_memory=.* is too small") as caught,
            self._feed(device_memory=2 * each - 1) as feed,
        ):
            next(iter(feed))
        assert caught.value.least == 2 * each
        with self._feed(batch_size="max", device_memory=10 * each) as feed:
            assert feed.plan.batch_size > ROWS
            assert feed.plan.device_bytes <= 10 * each

    @pytest.mark.parametrize("part", [True, False], ids=["some", "all"])
    def test_samples_that_are_kept_there_are_not_loaded_again(self, part: bool) -> None:
        """The batches are the same, in the same order, and nothing is allocated after the first epoch."""
        if not isinstance(self.device(), Gathers):
            with pytest.raises(TypeError, match="cannot: it has no method"):
                self._feed(cache="device", device_memory="1 MiB")
            return
        loaded: list[int] = []

        def load(item: int) -> dict[str, Any]:
            loaded.append(item)
            return {name: value for name, value in _sample(item).items() if name != "name"}

        kind: dict[str, Any] = {"load": load, "shuffle": True, "seed": 2}
        with self._feed(to="numpy", **kind) as feed:
            expected = [[batch["label"].tolist() for batch in feed] for _ in range(3)]
        kept: dict[str, Any] = {
            "cache": "device",
            "device_memory": 90_000 if part else 200_000,
            "cast": {"image": OnDevice("float32")},
        }
        with self._feed(**kind, **kept) as feed:
            plan = feed.plan
            assert (0 < plan.device_samples < 42) == part
            assert plan.device_total_bytes <= (plan.device_memory or 0)
            allocated: list[tuple[int, int | None]] = []
            live: list[int] = []
            for epoch in range(3):
                loaded.clear()
                for number, batch in enumerate(feed):
                    labels = self.host(batch["label"])
                    assert labels.tolist() == expected[epoch][number]
                    images = self.host(batch["image"])
                    assert images.dtype == np.float32
                    np.testing.assert_array_equal(
                        images, np.broadcast_to((labels % 251)[:, None, None], (len(labels), 32, 33))
                    )
                    assert (self.host(batch["value"]) == labels[:, None]).all()
                    live.append(self.live_bytes() or 0)
                if epoch:
                    assert len(loaded) == 42 - plan.device_samples
                allocated.append((feed.stats.device_allocations, self.allocated()))
            assert allocated[0] == allocated[1] == allocated[2]
            assert max(live[22:]) <= max(live[:11])
            assert feed.stats.copied == 0
            del batch

    # ---- requests

    def test_numbers_in_the_other_byte_order_arrive(self) -> None:
        """Files have them; a framework that takes their bytes as they are would compute with garbage."""
        place = Place(self.to, memory="1 MiB")
        for dtype in (">f4", "<f4", ">i4"):
            with place({"x": np.arange(5).astype(dtype)}) as inputs:
                answer = place.fetch(inputs)
            assert answer["x"].tolist() == [0, 1, 2, 3, 4]
        del inputs

    def test_requests_of_all_sizes_stop_allocating(self) -> None:
        """A fixed mix of shapes: once each size was seen, no block is allocated, and nothing grows."""
        place = Place(self.to, memory="8 MiB")
        shapes = np.random.default_rng(0).integers(1, (50_000, 2_000), size=(40, 2))
        half: Any = None
        for number in range(self.requests):
            size, tokens = map(int, shapes[number % len(shapes)])
            with place(
                {"x": np.full(size, number, np.float32), "tokens": np.arange(tokens), "id": "text", "n": 3}
            ) as inputs:
                assert (inputs["id"], inputs["n"]) == ("text", 3)
                answer = place.fetch({"x": inputs["x"], "tokens": inputs["tokens"], "id": inputs["id"]})
            assert answer["x"].shape == (size,)
            assert (answer["x"] == number).all()
            assert answer["tokens"].tolist() == list(range(tokens))
            if number == self.requests // 2:
                half = (place.stats, self.allocated(), self.live_bytes())
        stats = place.stats
        assert stats.requests == self.requests
        assert stats.held_bytes <= penstock.MiB(8)
        assert (stats.allocations, self.allocated()) == (half[0].allocations, half[1])
        assert (stats.held_bytes, stats.host_bytes) == (half[0].held_bytes, half[0].host_bytes)
        assert stats.reuses > 3 * stats.allocations
        if half[2] is not None:
            live = self.live_bytes()
            assert live is not None
            assert live <= half[2]
        del inputs, answer
        gc.collect()
        assert place.free() > 0
        assert (place.stats.held_bytes, place.stats.host_bytes) == (0, 0)

    def test_a_request_that_can_never_fit_is_refused_with_the_numbers(self) -> None:
        """And one that fits exactly is not."""
        place = Place(self.to, memory=40_000)
        with (
            pytest.raises(BudgetError, match=r"takes 40004 bytes .* give memory=40004 or more") as caught,
            place(np.zeros(10_001, np.float32)),
        ):
            pass
        assert caught.value.least == 40_004
        with place(np.ones(10_000, np.float32)) as leaf:
            assert self.host(leaf).sum() == 10_000
            del leaf
        assert place.stats.refused == 1
        assert place.stats.peak_bytes == 40_000

    def test_a_request_inside_another_is_refused_where_waiting_would_be_for_ever(self) -> None:
        """Only this thread could end what it waits for."""
        place = Place(self.to, memory=40_000)
        with place(np.zeros(8_000, np.float32)) as outer:
            with pytest.raises(PlaceFull, match="1 of them in this thread"), place(np.zeros(8_000, np.float32)):
                pass
            assert self.host(outer).sum() == 0
            del outer
        with place(np.ones(8_000, np.float32)) as again:
            assert self.host(again).sum() == 8_000
            del again

    def test_what_a_block_computes_lazily_is_right_after_it(self) -> None:
        """The inputs are taken back at the end of the block, but not from those that still need them."""
        place = Place(self.to, memory="1 MiB")
        kept = []
        for number in range(5):
            with place(np.full(1000, number, np.float32)) as leaf:
                kept.append(self.doubled(leaf))
                del leaf
        for number, result in enumerate(kept):
            assert (self.host(result) == 2 * number).all()
