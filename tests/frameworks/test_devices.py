"""What a feed does on its way to a device, beyond what the suite of every door proves."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

import penstock
from penstock import Device, Feed, HostDevice, MiB, OnDevice, ResourceHeld, SpecError
from penstock._core.engine import Engine
from penstock._core.spec import Array

ROOT = Path(__file__).parents[2]
SHAPE = (256, 512)  # half a megabyte a sample: large enough that each batch has a slot of its own


def load(item: int) -> Any:
    return np.full(SHAPE, item, np.float32)


def engine_of(feed: Feed) -> Engine:
    assert feed._engine is not None
    return feed._engine


class Slow(HostDevice):
    """A device whose copies go on in the background until somebody waits for them, as on a GPU."""

    def __init__(self) -> None:
        super().__init__("slow")
        self.log: list[str] = []
        self._under_way: list[tuple[Sequence[Any], Sequence[Array], list[bool]]] = []

    def copy(self, blocks: Sequence[Any], arrays: Sequence[Array]) -> Any:
        self.log.append(f"copy {arrays[0].flat[0]:g}")
        done = [False]
        self._under_way.append((blocks, arrays, done))
        return done

    def copied(self, ticket: Any, *, wait: bool) -> bool:
        while wait and not ticket[0]:
            blocks, arrays, done = self._under_way.pop(0)
            super().copy(blocks, arrays)
            done[0] = True
        return bool(ticket[0])

    def hand_out(
        self, block: Any, ticket: Any, shape: tuple[int, ...], dtype: np.dtype[Any], over: Callable[[], object]
    ) -> Array:
        if ticket is not None:
            self.copied(ticket, wait=True)
        leaf = super().hand_out(block, None, shape, dtype, over)
        self.log.append(f"use {leaf.flat[0]:g}")
        return leaf


# ---------------------------------------------------------------------------------------------------- one ahead of use


def test_the_next_batch_is_on_its_way_before_the_one_at_hand_is_used() -> None:
    device = Slow()
    with Feed(range(20), load, batch_size=2, memory="256 MiB", num_workers=2, executor="thread", to=device) as feed:
        for number, batch in enumerate(feed):
            assert (batch[:, 0, 0] == [2 * number, 2 * number + 1]).all()
            while number < 9 and engine_of(feed).upcoming(feed._launched.engine.run, 0) is None:  # type: ignore[union-attr]
                pass  # the next one is being loaded
        del batch
    # Once it was there in time, a batch is copied before the one before it is given out, never after.
    ahead = sum(device.log.index(f"copy {2 * n}") < device.log.index(f"use {2 * n - 2}") + 2 for n in range(1, 10))
    assert ahead >= 8, device.log
    assert [line for line in device.log if line.startswith("use")] == [f"use {n}" for n in range(0, 20, 2)]
    assert len([line for line in device.log if line.startswith("copy")]) == 10


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize(
    "kind", [{"num_workers": 0}, {"num_workers": 1, "executor": "thread"}], ids=["inline", "thread"]
)
def test_a_slot_is_not_filled_again_before_its_copy_is_done(slots: int, kind: dict[str, Any]) -> None:
    """The copy reads the slot long after it was begun: what a worker wrote there too early would be seen."""
    device = Slow()
    least = Feed(range(8), load, batch_size=4, memory="1 GiB", **kind).plan
    each = least.arena_bytes // least.slots
    memory = least.total_bytes - (least.slots - slots) * each + each // 2
    with Feed(range(80), load, batch_size=4, memory=memory, to=device, **kind) as feed:
        assert feed.plan.slots == slots
        for _ in range(2):
            for number, batch in enumerate(feed):
                assert (batch == np.arange(4 * number, 4 * number + 4)[:, None, None]).all()
        del batch
        assert feed.stats.copied == 0


def test_blocks_that_are_shuffled_together_reach_the_device_batch_by_batch() -> None:
    """A slot holds several batches then; each is copied by itself, ahead like any other."""
    source = penstock.arrays(np.arange(4000).reshape(1000, 4), np.arange(1000))
    options: dict[str, Any] = {"batch_size": 8, "memory": "256 MiB", "shuffle": penstock.Blocks(rows=50, group=200)}
    with Feed(source, **options) as feed:
        expected = [y.tolist() for _, y in feed]
        assert feed.plan.batches_per_slot > 1
    device = Slow()
    with Feed(source, to=device, **options) as feed:
        for _ in range(2):
            feed.set_epoch(0)
            got = []
            for x, y in feed:
                assert (x[:, 0] == 4 * y).all()
                got.append(y.tolist())
            assert got == expected
        assert feed.plan.device_bytes == 3 * (8 * 4 * 8 + 64)
        assert (feed.stats.device_allocations, feed.stats.copied) == (6, 0)
        del x, y


def test_an_iteration_that_is_left_early_leaves_nothing_behind() -> None:
    device = Slow()
    with Feed(range(200), load, batch_size=2, memory="256 MiB", num_workers=2, executor="thread", to=device) as feed:
        for _ in range(10):
            for batch in feed:
                assert batch[0, 0, 0] == 0
                break
        assert feed.stats.device_allocations == 3
        assert feed.stats.copied == 0
        del batch


def test_a_stream_that_is_left_early_goes_on_with_the_next_item() -> None:
    device = HostDevice("mine")
    with Feed(
        iter(range(40)), load, batch_size=2, memory="256 MiB", num_workers=1, executor="thread", to=device
    ) as feed:
        got = []
        for batch in feed:
            got.append(batch[:, 0, 0].tolist())
            if len(got) == 5:
                break
        got += [batch[:, 0, 0].tolist() for batch in feed]
        del batch
    assert got == [[2 * n, 2 * n + 1] for n in range(20)]


def test_items_that_are_skipped_leave_no_hole_on_the_device() -> None:
    def picky(item: int) -> Any:
        if item % 5 == 0:
            raise ValueError(item)
        return np.full(3, item)

    with Feed(
        range(50), picky, batch_size=4, memory="256 MiB", num_workers=0, on_error="skip", to=HostDevice("mine")
    ) as feed:
        got = [value for batch in feed for value in batch[:, 0].tolist()]
    assert got == [i for i in range(50) if i % 5]


def test_a_feed_can_be_closed_by_another_thread() -> None:
    feed = Feed(range(10_000), load, batch_size=2, memory="256 MiB", num_workers=1, executor="thread", to=Slow())
    batches = iter(feed)
    next(batches)
    closer = threading.Thread(target=feed.close)
    seen = []

    def go_on() -> None:
        for number, batch in enumerate(batches, 1):
            if number == 20:
                closer.start()
            seen.append(batch[0, 0, 0] == 2 * number)

    with pytest.raises(penstock.FeedClosed):
        go_on()
    closer.join()
    assert len(seen) >= 20
    assert all(seen)


def test_an_error_on_the_way_is_the_users_to_see_and_costs_no_buffer() -> None:
    class Flaky(HostDevice):
        fails = False

        def copy(self, blocks: Sequence[Any], arrays: Sequence[Array]) -> Any:
            if self.fails:
                raise RuntimeError("the device fell off the bus")
            return super().copy(blocks, arrays)

    device = Flaky("flaky")
    with Feed(range(20), load, batch_size=2, memory="256 MiB", num_workers=0, to=device) as feed:
        for _ in range(5):
            device.fails = False
            batches = iter(feed)
            assert next(batches)[0, 0, 0] == 0
            device.fails = True
            with pytest.raises(RuntimeError, match="fell off the bus"):
                next(batches)
        device.fails = False
        assert [batch[0, 0, 0] for batch in feed] == list(range(0, 20, 2))
        assert feed.stats.device_allocations == 3


# ------------------------------------------------------------------------------- the variable of a loop that is over


@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize(
    "kind", [{"num_workers": 0}, {"num_workers": 1, "executor": "thread"}], ids=["inline", "thread"]
)
def test_a_loop_variable_that_still_names_the_last_batch_costs_no_copies(slots: int, kind: dict[str, Any]) -> None:
    """``del batch`` is not needed, however few slots there are."""
    least = Feed(range(8), load, batch_size=4, memory="1 GiB", **kind).plan
    if slots > least.slots:
        pytest.skip(f"no more than {least.slots} slots are of use here")
    each = least.arena_bytes // least.slots
    memory = least.total_bytes - (least.slots - slots) * each + each // 2
    with Feed(range(40), load, batch_size=4, memory=memory, **kind) as feed, warnings.catch_warnings():
        warnings.simplefilter("error", ResourceHeld)
        assert feed.plan.slots == slots
        for first in feed:  # noqa: B007 - the name is what matters
            pass
        for _ in range(2):
            for number, second in enumerate(feed):
                assert (second == np.arange(4 * number, 4 * number + 4)[:, None, None]).all()
        assert (first == np.arange(36, 40)[:, None, None]).all()
        assert feed.stats.copied == 0
        extra = max(0, 3 - slots)  # with two slots, one takes the place of the one that is held
        assert len(engine_of(feed)._ledger) == slots + extra
        del first
        for second in feed:  # noqa: B007 - same
            pass
        assert engine_of(feed)._ledger.usable == slots
        engine_of(feed)._ledger.validate()
        del second


def test_a_batch_that_outlives_its_feed_does_not_keep_the_other_slots() -> None:
    """A view keeps the mapping of the whole arena; the pages of slots that nobody holds go all the same."""
    feed = Feed(range(64), load, batch_size=8, memory="256 MiB", num_workers=1)
    for batch in feed:  # noqa: B007 - the name is what matters
        pass
    fd = os.dup(engine_of(feed).crew.arena.fd)  # type: ignore[attr-defined] # of a memfd
    try:
        slots, size = feed.plan.slots, feed.plan.batch_bytes
        assert os.fstat(fd).st_blocks * 512 > (slots - 1) * size
        feed.close()
        assert os.fstat(fd).st_blocks * 512 < size + MiB(1)
        assert (batch == np.arange(56, 64)[:, None, None]).all()
    finally:
        os.close(fd)
    del batch


# ----------------------------------------------------------------------------------------------------- what it is told


def test_what_is_wrong_with_to_is_said_at_once() -> None:
    with pytest.raises(ValueError, match=r"to='cuda' is not known: give \"numpy\", \"torch\", \"torch:cuda:0\""):
        Feed(range(3), abs, to="cuda")
    with pytest.raises(TypeError, match="to=3 is a int: give"):
        Feed(range(3), abs, to=3)  # type: ignore[arg-type] # that is the point

    class Half:
        """Not quite a device."""

        name = "half"
        allocate = copy = copied = hand_out = cast = form = read = takes = settle = recall = available_bytes = None
        pin = unpin = None

    with pytest.raises(TypeError, match="is not a device: it has no free; give"):
        Feed(range(3), abs, to=Half())  # type: ignore[arg-type] # same


def test_a_torch_device_that_is_not_there_is_refused() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="torch cannot lend memory of 'cuda:0'"):
            Feed(range(3), abs, to="torch:cuda:0")
    for name in ("meta", "no-such-thing"):
        with pytest.raises(ValueError, match=f"torch cannot lend memory of '{name}'.*move batches yourself"):
            Feed(range(3), abs, to=f"torch:{name}")


def test_a_cast_on_the_device_names_leaves_like_any_other() -> None:
    def sample(item: int) -> dict[str, Any]:
        return {"image": np.zeros(4, np.uint8), "label": item}

    with (
        pytest.raises(SpecError, match=r"cast names \['imgae'\].*'image', 'label'"),
        Feed(range(4), sample, num_workers=0, to="numpy", cast={"imgae": OnDevice("float32")}) as feed,
    ):
        next(iter(feed))
    with pytest.raises(TypeError, match=r"cast='floot32' is not a dtype"):
        Feed(range(4), sample, cast={"image": OnDevice("floot32")})
    both: Any = {"image": OnDevice("float16"), "label": "uint8"}
    with Feed(range(4), sample, batch_size=4, num_workers=0, memory="64 MiB", cast=both) as feed:
        (batch,) = feed
        assert (batch["image"].dtype, batch["label"].dtype) == (np.float16, np.uint8)
        assert batch["label"].tolist() == [0, 1, 2, 3]
        assert feed.plan.sample_bytes == 5
        del batch
    with Feed(
        range(4), lambda i: np.full(6, i, np.uint8), batch_size=4, num_workers=0, cast=OnDevice("float32")
    ) as feed:
        (batch,) = feed
        assert batch.dtype == np.float32
        assert "cast on the device: 6 B a sample travel, not 24 B: 4.0 times less traffic" in str(feed.plan)
        del batch


def test_a_collated_batch_is_cast_on_the_device_by_its_own_names() -> None:
    def ragged(item: int) -> dict[str, Any]:
        return {"tokens": np.full(item % 3 + 1, item, np.uint8), "n": item}

    with Feed(
        range(8),
        ragged,
        batch_size=4,
        num_workers=0,
        memory="64 MiB",
        collate_fn="pad",
        cast={"tokens": OnDevice("int32")},
    ) as feed:
        for batch in feed:
            assert batch["tokens"].data.dtype == np.int32
            assert batch["tokens"].lengths.dtype != np.int32
        assert batch["tokens"].data.tolist() == [[4, 4, 0], [5, 5, 5], [6, 0, 0], [7, 7, 0]]
        del batch


def test_a_batch_that_no_device_memory_can_hold_is_refused_when_it_comes() -> None:
    """What collating makes is not known beforehand."""

    def ragged(item: int) -> Any:
        return np.zeros(100_000 if item == 30 else 10, np.float32)

    with Feed(
        range(40), ragged, batch_size=4, num_workers=0, memory="64 MiB", collate_fn="pad", to=HostDevice("small"),
        device_memory="1 MiB",
    ) as feed:  # fmt: skip
        batches = iter(feed)
        for _ in range(7):
            next(batches)
        with pytest.raises(
            penstock.BudgetError, match=r"a batch takes \d+ bytes on small, and device_memory is 1048576"
        ) as caught:
            next(batches)
        assert caught.value.least > MiB(1)


class Locking(HostDevice):
    """A device that locks the pages it reads, as CUDA's driver does, with what the system has for that."""

    def __init__(self, limit: int | None = None) -> None:
        super().__init__("locking")
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._limit = limit
        self.locked: dict[int, int] = {}

    def pin(self, address: int, nbytes: int) -> str | None:
        nbytes = nbytes if self._limit is None else self._limit
        if self._libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)):
            return f"the arena could not be page-locked ({os.strerror(ctypes.get_errno())}): copies take a detour"
        self.locked[address] = nbytes
        return "the arena is page-locked"

    def unpin(self, address: int) -> None:
        if address in self.locked:
            self._libc.munlock(ctypes.c_void_p(address), ctypes.c_size_t(self.locked.pop(address)))


def locked_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmLck")).split()[1])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here")
def test_the_arena_is_pinned_where_it_lies_and_let_go_at_the_end() -> None:
    """All slots, once, with a note in the plan; copies read what workers write there afterwards."""
    device, before = Locking(), locked_bytes()
    with Feed(range(20), load, batch_size=2, memory="64 MiB", num_workers=1, executor="thread", to=device) as feed:
        plan = feed.plan
        if not device.locked:
            pytest.skip(f"this system locks no pages: {plan.notes[-1]}")
        assert plan.notes[-1] == "the arena is page-locked"
        assert locked_bytes() - before == sum(device.locked.values()) >= plan.arena_bytes
        for _ in range(2):
            assert [int(b[0, 0, 0]) for b in feed] == list(range(0, 20, 2))
        assert len(device.locked) == 1
    assert device.locked == {}
    assert locked_bytes() == before


def test_pinning_that_fails_is_a_note_and_nothing_else() -> None:
    device = Locking(limit=2**60)
    with Feed(range(20), load, batch_size=2, memory="64 MiB", num_workers=0, to=device) as feed:
        assert "could not be page-locked" in feed.plan.notes[-1]
        assert [int(b[0, 0, 0]) for b in feed] == list(range(0, 20, 2))


def test_a_plan_without_a_device_is_what_it_was() -> None:
    with Feed(range(8), load, batch_size=2, num_workers=0, memory="64 MiB") as feed:
        assert (feed.plan.device_buffers, feed.plan.device_bytes, feed.plan.device_memory) == (0, 0, None)
        assert "on the device" not in str(feed.plan)
    with Feed(range(8), load, batch_size="max", num_workers=0, memory="64 MiB", device_memory="4 MiB") as feed:
        assert feed.plan.batch_size == 4  # two batches of half-megabyte samples fit, wherever the user puts them


def test_device_is_a_protocol_that_its_implementations_meet() -> None:
    assert isinstance(HostDevice(), Device)
    assert not isinstance(object(), Device)


# ------------------------------------------------------------------------------------------------------------------ JAX

ALIASES = """
import numpy as np
import jax
from penstock import Feed

memory = np.zeros(4096 * 4, np.uint8)
start = -memory.ctypes.data % 4096
slot = memory[start : start + 4096].view(np.float32)
aliased = jax.device_put(slot)
slot[:] = 7
if not (np.asarray(aliased) == 7).all():
    print("this JAX does not alias host memory; nothing to be careful about")

options = {"batch_size": 4, "memory": "256 MiB", "num_workers": 2}
with Feed(range(400), lambda i: np.full(1024, i, np.float32), to="jax", **options) as feed:
    kept, sums = [], []
    add = jax.jit(lambda x: x.sum(axis=1) / 1024)
    for number, batch in enumerate(feed):
        sums.append(add(batch))  # runs later; the batch is dropped meanwhile
        if number < 2:
            kept.append(batch)
    assert np.concatenate(sums).tolist() == list(range(400))
    assert [np.asarray(b)[:, 0].tolist() for b in kept] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    donated = jax.jit(lambda x: x + 1, donate_argnums=0)
    for number, batch in enumerate(feed):
        assert np.asarray(donated(batch))[:, 0].tolist() == [4 * number + k + 1 for k in range(4)]
print("right")
"""


def test_jax_never_sees_a_slot_and_may_compute_late_or_take_what_it_is_given() -> None:
    pytest.importorskip("jax", reason="JAX is not installed")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ALIASES],
        cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "right"


# ---------------------------------------------------------------------------------------------------------------- torch


def test_what_autograd_saved_keeps_the_buffer_of_a_batch() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import penstock.torch

    weight = torch.ones(SHAPE, requires_grad=True)
    with (
        Feed(range(24), load, batch_size=4, memory="256 MiB", num_workers=0, to=penstock.torch.device("cpu")) as feed,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", ResourceHeld)
        losses = [(batch * weight).sum() for batch in feed]  # each graph needs its batch, and no Python name has it
        sum(losses).backward()
    assert weight.grad is not None
    assert (weight.grad == sum(range(24))).all()


@pytest.mark.parametrize("to", ["torch", "device"])
def test_bfloat16_reaches_torch(to: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import penstock.torch

    where: Any = penstock.torch.device("cpu") if to == "device" else to
    with Feed(range(8), load, batch_size=4, memory="256 MiB", num_workers=1, cast="bfloat16", to=where) as feed:
        assert "cast: 256 KiB a sample in slots, not 512 KiB: 2.0 times less to hold and to move" in str(feed.plan)
        for number, batch in enumerate(feed):
            assert batch.dtype == torch.bfloat16
            assert batch[:, 0, 0].tolist() == [4 * number + k for k in range(4)]
        del batch


# ------------------------------------------------------------------------------------------------------------ packages


@pytest.mark.parametrize("name", ["torch", "jax", "tinygrad"])
def test_a_framework_that_is_missing_is_told_with_the_way_to_get_it(name: str) -> None:
    script = f"import sys; sys.modules[{name!r}] = None\nimport penstock\npenstock.Feed(range(3), abs, to={name!r})"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert f"to='{name}' needs {name}, which is not installed here: pip install" in done.stderr
    assert f"penstock[{name}]" in done.stderr


def test_the_picture_of_the_timeline_is_drawn_by_its_script(tmp_path: Path) -> None:
    """The one that is checked in shows the same lanes and batches as one drawn now."""
    drawn = tmp_path / "timeline.svg"
    script = ROOT / "docs" / "pictures" / "timeline.py"
    subprocess.run([sys.executable, str(script), str(drawn)], check=True, cwd=tmp_path)

    def shows(path: Path) -> list[str]:
        texts = [node.text or "" for node in ET.parse(path).iter() if node.tag.endswith("text")]
        return sorted({text for text in texts if not text.endswith(" ms")})

    assert shows(drawn) == shows(ROOT / "docs" / "pictures" / "timeline.svg")
    assert {"copy to a buffer", "compute on it", "5", "10"} <= set(shows(drawn))


def test_a_model_and_the_buffers_share_the_device() -> None:
    """The step is planned with what arrives there, casts included, and with the buffers that there really are."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import penstock.torch

    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 16), torch.nn.Linear(16, 4))
    with Feed(
        range(10_000), lambda i: (np.full((3, 16, 16), i % 200, np.uint8), i % 4), batch_size="max", memory="256 MiB",
        device_memory="8 MiB", num_workers=0, model=model, to=penstock.torch.device(), cast={"0": OnDevice("float32")},
    ) as feed:  # fmt: skip
        plan = feed.plan
        images, labels = next(iter(feed))
        assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)  # uint8 would not go through a Linear
        assert model(images).shape == (plan.batch_size, 4)
        assert plan.device_buffers == 2
        assert plan.device_bytes >= 2 * plan.batch_size * (768 * 5 + 8)
        assert plan.device_total_bytes == plan.model_bytes + plan.device_bytes
        assert plan.device_total_bytes <= MiB(8) == plan.device_memory
        assert feed.stats.device_allocations == 2 * 3
        del images, labels
