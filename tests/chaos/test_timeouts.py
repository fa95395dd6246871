"""Loads that hang: ended after ``timeout`` and treated by ``on_error``, or told of with their stack."""

from __future__ import annotations

import ctypes
import threading
import time
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import Feed, LoadTimeout, Retry, SlowLoad
from penstock._core import patience
from tests.chaos.test_deaths import values

MEMORY = "512 MiB"
ITEMS = 40
HUNG = (5, 17)
# Long against a load here (microseconds) also when the machine is busy, short for whoever runs this.
TIMEOUT_S = 1.0
REST = [item for item in range(ITEMS) if item not in HUNG]


@pytest.fixture(scope="module", autouse=True)
def pythons_own_process() -> None:
    """Python starts it once and keeps it: here, so that no test is charged for it."""
    resource_tracker.ensure_running()


each_crew = pytest.mark.parametrize(
    "method", ["forkserver", *(pytest.param(one, marks=pytest.mark.slow) for one in ("fork", "spawn", "portable"))]
)


def feed_of(load: Any, method: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Feed:
    """A feed of two workers of this kind, with a timeout."""
    if method == "portable":
        monkeypatch.setenv("PENSTOCK_PORTABLE", "1")
    else:
        options["start_method"] = method
    given: dict[str, Any] = {"batch_size": 4, "memory": MEMORY, "num_workers": 2, "timeout": TIMEOUT_S, **options}
    return Feed(range(ITEMS), load, **given)


def hangs_in_python(item: int) -> Any:
    while item in HUNG:
        time.sleep(0.01)
    return np.full(4, item)


def hangs_in_c(item: int) -> Any:
    if item in HUNG:  # PyDLL keeps the GIL: nothing in this process runs any more
        ctypes.PyDLL(None).sleep(600)
    return np.full(4, item)


@each_crew
def test_a_hung_load_is_ended_and_skipped(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others go on, every sample comes once and in order, and what was left out is told."""
    with feed_of(hangs_in_python, method, monkeypatch, on_error="skip") as feed:
        assert values(feed) == REST
        assert [item for item, _ in feed.stats.skipped] == list(HUNG)
        assert all(isinstance(error, LoadTimeout) for _, error in feed.stats.skipped)
        assert feed.stats.restarts == len(HUNG)


@each_crew
def test_a_hung_load_is_an_error_that_names_the_item(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """LoadTimeout is a LoadError and a TimeoutError; batches before it are handed out."""
    seen: list[int] = []
    with feed_of(hangs_in_python, method, monkeypatch) as feed:
        with pytest.raises(LoadTimeout, match=r"loading 5 took longer than timeout=1 s") as caught:
            seen.extend(sample for batch in feed for sample in batch[:, 0].tolist())
        assert isinstance(caught.value, TimeoutError)
        assert isinstance(caught.value, penstock.LoadError)
        assert caught.value.item == HUNG[0]
        assert seen == [0, 1, 2, 3]
        if method != "portable":
            assert "hangs_in_python" in "".join(caught.value.__notes__)


def test_a_load_that_keeps_the_gil_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the kernel can end that, and only a handler in C can say where it is."""
    with feed_of(hangs_in_c, "forkserver", monkeypatch) as feed:
        with pytest.raises(LoadTimeout) as caught:
            list(feed)
        assert "hangs_in_c" in "".join(caught.value.__notes__)


def test_retry_gives_a_hung_load_further_chances(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A load that hung once is tried again, as one that raised is."""

    def load(item: int) -> Any:
        mark = tmp_path / str(item)
        if item in HUNG and not mark.exists():
            mark.touch()
            time.sleep(600)
        return np.full(4, item)

    with feed_of(load, "forkserver", monkeypatch, on_error=Retry(1)) as feed:
        assert values(feed) == list(range(ITEMS))
        assert feed.stats.restarts == len(HUNG)


def test_waiting_for_the_consumer_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator that is held up because nobody takes its samples does not take long."""

    def many(item: int) -> Any:
        for number in range(64):
            yield np.full(2048, 64 * item + number, np.float64)

    options: dict[str, Any] = {"samples_per_item": None, "batch_size": 8, "memory": "96 MiB", "timeout": 0.5}
    with feed_of(many, "forkserver", monkeypatch, **options) as feed:
        seen: list[int] = []
        for batch in feed:
            if len(seen) in (0, 512):
                time.sleep(1.5)
            seen += batch[:, 0].astype(int).tolist()
        assert seen == list(range(64 * ITEMS))
        assert feed.stats.restarts == 0


def test_an_item_that_hangs_after_some_of_its_samples_loses_nothing_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it gave before it hung may be kept or not; all that others give must come, once and in order."""

    def some(item: int) -> Any:
        for number in range(3):
            if item == 5 and number == 2:
                time.sleep(600)
            yield np.full(4, 3 * item + number)

    with feed_of(some, "forkserver", monkeypatch, samples_per_item=3, batch_size=7, on_error="skip") as feed:
        seen = values(feed)
    others = [sample for sample in seen if sample // 3 != 5]
    assert others == [number for number in range(3 * ITEMS) if number // 3 != 5]


def test_a_collate_fn_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no item's fault."""

    def collate(samples: list[Any]) -> Any:
        if samples[0] == 8:
            time.sleep(600)
        return np.stack(samples)

    with (
        feed_of(np.int64, "forkserver", monkeypatch, collate_fn=collate) as feed,
        pytest.raises(LoadTimeout, match=r"collate_fn for the batch of \[8, 9, 10, 11\]"),
    ):
        for _ in feed:
            pass


def test_a_first_item_that_hangs_is_found_before_anything_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe loads it: the timeout counts there too, and skipping goes on to the next."""

    def load(item: int) -> Any:
        if item == 0:
            time.sleep(600)
        return np.full(4, item)

    with feed_of(load, "forkserver", monkeypatch) as feed, pytest.raises(LoadTimeout):
        feed.plan  # noqa: B018 - the first look starts the probe
    with feed_of(load, "forkserver", monkeypatch, on_error="skip") as feed:
        assert values(feed) == list(range(1, ITEMS))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"executor": "thread"}, "needs worker processes"),
        ({"num_workers": 0}, "needs worker processes"),
        ({"timeout": 0}, "above 0"),
        ({"timeout": float("inf")}, "above 0"),
        ({"timeout": "3"}, "above 0"),
    ],
)
def test_a_timeout_that_cannot_be_kept_is_refused_at_once(options: dict[str, Any], words: str) -> None:
    """Nobody can end a load in this process: better no promise than a false one."""
    with pytest.raises(ValueError, match=words):
        Feed(range(4), np.int64, **{"timeout": 1.0, **options})


def test_a_cheap_load_with_a_timeout_still_gets_a_worker() -> None:
    """In this process, where it would be fastest, it could not be stopped."""
    with Feed(range(ITEMS), np.int64, memory=MEMORY, timeout=60) as feed:
        assert feed.plan.workers == 1


@pytest.mark.parametrize("crew", [{}, pytest.param({"executor": "thread"}, marks=pytest.mark.slow)])
def test_an_unusually_slow_load_is_told_of_once(crew: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a timeout nothing is ended, but nobody has to guess what it is that takes so long."""
    monkeypatch.setattr(patience, "SLOW_S", 0.6)

    def slow(item: int) -> Any:
        time.sleep(1.5 if item in HUNG else 0.001)
        return np.full(4, item)

    feed = Feed(range(ITEMS), slow, batch_size=4, memory=MEMORY, num_workers=2, **crew)
    with feed, pytest.warns(SlowLoad) as warned:
        assert values(feed) == list(range(ITEMS))
    (warning,) = [one for one in warned if issubclass(one.category, SlowLoad)]
    text = str(warning.message)
    assert "with 5, and the next batch waits for it" in text
    assert ", line " in text
    assert "in slow" in text


@pytest.mark.slow
def test_a_timeout_works_whatever_thread_the_consumer_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """No signal handler and no main thread is needed."""
    seen: list[int] = []

    def consume() -> None:
        with feed_of(hangs_in_python, "forkserver", monkeypatch, on_error="skip") as feed:
            seen.extend(values(feed))

    thread = threading.Thread(target=consume)
    thread.start()
    thread.join()
    assert seen == REST
