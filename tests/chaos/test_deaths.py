"""Deaths of workers: a table of place and manner, on every start method, and what must be true afterwards.

Once: every sample exactly once, in order, as if nothing had happened. Always: an error that names the item and the
manner, or, with ``on_error="skip"``, everything but that item. Never a hang, and nothing left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from penstock import Feed, LoadError, PenstockError, WorkerLost
from penstock._core import machine
from tests.live.crews import drain
from tests.memory import outside

METHODS: tuple[Any, ...] = ("fork", "forkserver", "spawn")
CREWS = (*METHODS, "portable fork", "portable spawn")
OTHERS = ("fork", "spawn", "portable spawn")
SLOW = pytest.mark.slow
MEMORY = "512 MiB"
ITEMS = 48
VICTIM = 21

Die = Any  # a function that ends the process, and ``die.over()``: whether it has done so and will not again


@pytest.fixture(scope="module", autouse=True)
def pythons_own_process() -> None:
    # Python starts it for the portable crew, once, and keeps it: here, so that no test is charged for it.
    resource_tracker.ensure_running()


@pytest.fixture
def start(crew: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of a feed with this crew."""
    kind, _, method = crew.rpartition(" ")
    monkeypatch.setenv("PENSTOCK_PORTABLE", "1" if kind else "0")
    return {"start_method": method}


# Manner -> exit code of the process, and how a message names it.
MANNERS: dict[str, tuple[int, str]] = {
    "SIGKILL": (-signal.SIGKILL, "SIGKILL"),
    "SIGSEGV": (-signal.SIGSEGV, "SIGSEGV"),
    "os._exit": (3, "exit code 3"),
    "sys.exit": (3, "exit code 3"),
}


def killer(manner: str, once: Path | None) -> Die:
    """Something that ends the process it is called in: always, or (with a file that remembers it) only once.

    Made of things that travel by value, so that workers import nothing of this file.
    """
    ends: dict[str, Callable[[], object]] = {
        "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
        "os._exit": lambda: os._exit(3),
        "sys.exit": lambda: sys.exit(3),
    }
    end = ends[manner]
    path = None if once is None else str(once)

    def die() -> None:
        if path is not None:
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
        faulthandler.disable()  # the stack that it would show is meant
        end()
        time.sleep(60)

    die.over = lambda: path is not None and os.path.exists(path)  # type: ignore[attr-defined]
    return die


# ---------------------------------------- places: each gives the arguments of a feed that dies at VICTIM


def in_load(die: Die) -> dict[str, Any]:
    def load(item: int) -> Any:
        if item == VICTIM:
            die()
        return np.full(4, item)

    return {"load": load}


def in_the_first_item(die: Die) -> dict[str, Any]:
    """While the form of a sample is being found out."""

    def load(item: int) -> Any:
        if item == 0:
            die()
        return np.full(4, item)

    return {"load": load, "victim": 0}


def in_a_sample(die: Die) -> dict[str, Any]:
    """Between load and the slot: while the sample is written."""

    class Lazy:
        def __init__(self, item: int) -> None:
            self.item = item

        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            if self.item == VICTIM:
                die()
            return np.full(4, self.item)

    return {"load": Lazy}


def in_place(die: Die) -> dict[str, Any]:
    """With half of the row written."""
    import penstock

    def write(item: int, out: Any) -> None:
        out[:2] = item
        if item == VICTIM:
            die()
        out[2:] = item

    return {"load": penstock.into(((4,), "int64"))(write)}


def in_collate(die: Die) -> dict[str, Any]:
    def collate(samples: list[Any]) -> Any:
        batch = np.stack(samples)
        if (batch == VICTIM).any():
            die()
        return batch

    return {"load": lambda item: np.full(4, item), "collate_fn": collate, "victim": None}


def between_samples(die: Die) -> dict[str, Any]:
    """In the middle of an item that gives several, some of which are handed over already."""

    def load(item: int) -> Iterator[Any]:
        for part in range(3):
            if item == VICTIM and part == 2:
                die()
            yield np.full(4, 3 * item + part)

    return {"load": load, "samples_per_item": None, "samples": range(3 * ITEMS)}


def in_an_item(die: Die) -> dict[str, Any]:
    """While the identities of a task are unpickled."""

    class Item:
        def __init__(self, number: int) -> None:
            self.number = number

        def __eq__(self, other: object) -> bool:
            return other == self.number

        def __hash__(self) -> int:
            return hash(self.number)

        def __setstate__(self, state: dict[str, Any]) -> None:
            self.__dict__.update(state)
            if self.number == VICTIM:
                die()

    return {
        "load": lambda item: np.full(4, item.number),
        "items": [Item(number) for number in range(ITEMS)],
        "victim": None,
    }


def at_import(die: Die) -> dict[str, Any]:
    """In the middle of an import, with the lock of that module held."""

    def load(item: int) -> Any:
        import importlib.util
        import sys

        class Finder:
            def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
                me: Any = self
                return importlib.util.spec_from_loader(name, me) if name == "imported_by_a_load" else None

            def create_module(self, spec: Any) -> None:
                return None

            def exec_module(self, module: Any) -> None:
                die()

        if item == VICTIM:
            sys.meta_path.insert(0, Finder())
            importlib.import_module("imported_by_a_load")
        return np.full(4, item)

    return {"load": load}


def between_rows(die: Die) -> dict[str, Any]:
    """When a row is written and its sample is let go of, before the next is loaded."""

    class Sample:
        def __init__(self, item: int) -> None:
            self.item = item

        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return np.full(4, self.item)

        def __del__(self) -> None:
            if self.item == VICTIM:
                die()

    # Which item the worker is at by then is its own business.
    return {"load": Sample, "victim": None}


def while_replying(die: Die) -> dict[str, Any]:
    """When it is made into bytes what became of the task."""

    class Unsayable(Exception):
        def __reduce__(self) -> Any:
            die()
            raise TypeError

    def load(item: int) -> Any:
        if item == VICTIM and not die.over():
            raise Unsayable
        return np.full(4, item)

    return {"load": load}


PLACES: dict[str, Callable[[Die], dict[str, Any]]] = {
    place.__name__: place
    for place in (
        in_load, in_the_first_item, in_a_sample, in_place, in_collate, between_samples, in_an_item, at_import,
        between_rows, while_replying,
    )
}  # fmt: skip


def feed_of(place: str, manner: str, once: Path | None, **more: Any) -> tuple[Feed, list[int], int | None]:
    """The feed, the samples it should give, and the item that dies."""
    settings = PLACES[place](killer(manner, once))
    items = settings.pop("items", range(ITEMS))
    samples = list(settings.pop("samples", range(ITEMS)))
    victim = settings.pop("victim", VICTIM)
    load = settings.pop("load")
    return Feed(items, load, batch_size=4, memory=MEMORY, num_workers=2, **settings, **more), samples, victim


def values(feed: Feed) -> list[int]:
    seen: list[int] = []
    for batch in feed:
        assert (batch == batch[:, :1]).all()  # no row is half of one sample and half of another
        seen += batch[:, 0].tolist()
    return seen


# ---------------------------------------- the table


def can_die(place: str, manner: str) -> bool:
    """Python shows and forgets what is raised in a destructor, SystemExit too."""
    return (place, manner) != ("between_rows", "sys.exit")


# How a death is noticed is the same for each of these, whatever the manner, and they are slow to start.
FEW_MANNERS = {
    "spawn": ("SIGKILL", "sys.exit"),
    "portable fork": ("SIGKILL", "sys.exit"),
    "portable spawn": ("SIGKILL",),
}
# Of the rest, those who run the quick tests see each place with each crew once.
QUICK = ("SIGKILL", "sys.exit", "os._exit")
TABLE = [
    pytest.param(
        place,
        manner,
        crew,
        id=f"{place}-{manner}-{crew}",
        marks=() if crew != "fork" and manner in QUICK[: 1 if crew != "forkserver" else None] else pytest.mark.slow,
    )
    for place in PLACES
    for crew in CREWS
    for manner in FEW_MANNERS.get(crew, MANNERS)
    if can_die(place, manner)
]


@pytest.mark.parametrize(("place", "manner", "crew"), TABLE)
def test_a_worker_that_dies_once_is_not_noticed_in_the_data(
    place: str, manner: str, start: dict[str, Any], tmp_path: Path
) -> None:
    """Place x manner x crew: every sample exactly once, in order, twice in a row."""
    feed, samples, _ = feed_of(place, manner, tmp_path / "died", **start)
    with feed:
        assert values(feed) == samples
        assert (tmp_path / "died").exists()
        assert feed.stats.restarts == 1
        assert feed.stats.skipped == []
        assert values(feed) == samples


@pytest.mark.parametrize(
    ("manner", "crew"),
    [
        ("SIGKILL", "forkserver"),
        pytest.param("SIGKILL", "portable fork", marks=pytest.mark.slow),
        *(pytest.param(one, "forkserver", marks=pytest.mark.slow) for one in MANNERS if one != "SIGKILL"),
    ],
)
@pytest.mark.parametrize("place", PLACES)
def test_an_item_that_always_kills_is_named(place: str, manner: str, start: dict[str, Any]) -> None:
    """Restarting for ever would be a hang, and an error without the item no help."""
    if not can_die(place, manner):
        pytest.skip("nobody dies of it")
    code, said = MANNERS[manner]
    feed, _, victim = feed_of(place, manner, None, **start)
    with feed:
        with pytest.raises(WorkerLost, match=said) as caught:
            values(feed)
        assert caught.value.exitcode == code
        if victim is not None:
            assert caught.value.item == victim
            assert f"{victim}, with" in str(caught.value)
        assert not isinstance(caught.value, TimeoutError)


@pytest.mark.parametrize("crew", CREWS[:-1])
@pytest.mark.parametrize("place", ["in_load", "in_the_first_item", "in_a_sample", "in_place", "at_import"])
def test_an_item_that_always_kills_is_skipped_if_asked_for(place: str, start: dict[str, Any]) -> None:
    """The rest is delivered, in order, in full batches, and what was left out is told."""
    feed, samples, victim = feed_of(place, "SIGKILL", None, on_error="skip", **start)
    samples.remove(victim or 0)
    with feed:
        batches = [batch.copy() for batch in feed]
        assert np.concatenate(batches)[:, 0].tolist() == samples
        assert [len(batch) for batch in batches] == [4] * 11 + [3]
        (item, error) = feed.stats.skipped[0]
        assert item == victim
        assert isinstance(error, WorkerLost)
        assert len(feed.stats.skipped) == 1


def test_several_items_that_kill_are_all_skipped() -> None:
    """Five in a row in one task: each is tried again, none takes the others with it."""
    bad = {9, 10, 11, 12, 13, 30}

    def load(item: int) -> Any:
        if item in bad:
            os._exit(1)
        return np.full(4, item)

    with Feed(range(ITEMS), load, batch_size=16, memory=MEMORY, num_workers=2, on_error="skip") as feed:
        assert values(feed) == [item for item in range(ITEMS) if item not in bad]
        assert sorted(item for item, _ in feed.stats.skipped) == sorted(bad)


def test_no_exit_code_is_taken_for_anything_else() -> None:
    """A worker that has grown ends by itself with a code of its own; a load may use any."""
    for code in (0, 1, 75, 255):

        def load(item: int, code: int = code) -> Any:
            if item == VICTIM:
                os._exit(code)
            return np.full(4, item)

        with (
            Feed(range(ITEMS), load, batch_size=4, memory=MEMORY, num_workers=2) as feed,
            pytest.raises(WorkerLost, match=f"exit code {code}"),
        ):
            values(feed)


def test_a_feed_can_be_used_again_after_a_death_was_reported() -> None:
    """The crew is whole: the error was about an item, not about the feed."""
    feed, _, _ = feed_of("in_load", "os._exit", None)
    with feed:
        for _ in range(3):
            seen = []
            with contextlib.suppress(WorkerLost):
                for batch in feed:
                    seen += batch[:, 0].tolist()
            assert seen == list(range(len(seen)))
            assert len(seen) <= VICTIM


@pytest.mark.slow
def test_when_everything_kills_it_ends() -> None:
    """With skip too: a run of failures shows that everything fails."""
    settings: dict[str, Any] = {"memory": MEMORY, "num_workers": 2, "on_error": "skip"}
    with Feed(range(500), lambda item: os._exit(9), batch_size=64, **settings) as feed, pytest.raises(LoadError):
        values(feed)

    def load(item: int) -> Any:
        if item >= 8:
            os._exit(9)
        return np.full(4, item)

    with Feed(range(500), load, batch_size=64, **settings) as feed, pytest.raises(LoadError, match="exit code 9"):
        values(feed)


# ---------------------------------------- deaths of which another item is the cause


BAD = 9


def harming(every: int | None = None) -> Callable[[int], Any]:
    """A load whose worker is killed by the next item after BAD, or after every so many."""
    harmed: list[int] = []

    def load(i: int) -> Any:
        if harmed:
            os._exit(3)
        if i == BAD if every is None else i % every == every - 1:
            harmed.append(i)
        return i

    return load


@pytest.mark.parametrize("crew", ["forkserver", "portable fork", *(pytest.param(c, marks=SLOW) for c in OTHERS)])
@pytest.mark.parametrize("size", [1, 4, 24])
def test_an_item_that_harms_its_worker_costs_no_other_item(size: int, start: dict[str, Any]) -> None:
    """The one on which workers died did nothing: it is right when it is done alone, and so are all before it."""
    settings: dict[str, Any] = {"batch_size": size, "memory": MEMORY, "on_error": "skip", **start}
    load = harming()

    def texts(i: int) -> str:
        load(i)
        if i == 12:
            raise ValueError("broken")
        return "x" * (10 + 100 * i)  # most do not fit into their cells

    for workers in (1, 2):
        with Feed(range(24), load, num_workers=workers, **settings) as feed:
            assert [i for batch in feed for i in batch.tolist()] == list(range(24))
            assert feed.stats.skipped == []
            assert feed.stats.restarts <= 4
        with Feed(range(24), texts, num_workers=workers, **settings) as feed:
            assert [len(text) for batch in feed for text in batch] == [10 + 100 * i for i in range(24) if i != 12]
            assert [item for item, _ in feed.stats.skipped] == [12]


@pytest.mark.parametrize("crew", ["forkserver", "portable fork"])
@pytest.mark.parametrize("size", [1, 4, 24])
def test_an_item_that_keeps_its_worker_from_answering_is_found(
    size: int, start: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """Any before the last may be the one: halves of them are tried, not each."""

    def load(i: int) -> Any:
        if i == BAD:
            os.closerange(0, 200)
        return i

    settings: dict[str, Any] = {"batch_size": size, "memory": MEMORY, "num_workers": 2, **start}
    with Feed(range(24), load, on_error="skip", **settings) as feed:
        assert [i for batch in feed for i in batch.tolist()] == [i for i in range(24) if i != BAD]
        assert [item for item, _ in feed.stats.skipped] == [BAD]
        assert feed.stats.restarts <= 12
    with Feed(range(24), load, **settings) as feed:
        seen: list[int] = []
        with pytest.raises(WorkerLost) as caught:
            drain(feed, seen)
        assert caught.value.item == BAD
        assert seen == list(range(BAD // size * size))
    capfd.readouterr()  # they say why they cannot answer


MADE_OF: dict[str, dict[str, Any]] = {
    "list": {"collate_fn": "list"},
    "pad": {"collate_fn": "pad"},
    "callable": {"collate_fn": np.array},
    "three an item": {"samples_per_item": 3},
    "any number": {"samples_per_item": None},
}


FORMS = [pytest.param(name, marks=SLOW if name in ("pad", "any number") else ()) for name in MADE_OF]


def several(load: Callable[[int], Any], settings: dict[str, Any]) -> Callable[[int], Any]:
    """The same load for feeds that take several samples an item."""

    def three(i: int) -> Any:
        return [load(i)] * 3

    return three if "samples_per_item" in settings else load


@pytest.mark.parametrize("crew", ["forkserver", "portable fork", *(pytest.param(c, marks=SLOW) for c in OTHERS)])
@pytest.mark.parametrize("size", [pytest.param(4, marks=SLOW), 24])
@pytest.mark.parametrize("shape", FORMS)
def test_an_item_that_harms_its_worker_costs_no_other_item_whatever_the_batches_are(
    shape: str, size: int, start: dict[str, Any]
) -> None:
    """Samples that have no place of their own are done in parts, one behind the other."""
    settings: dict[str, Any] = {"batch_size": size, "memory": MEMORY, "on_error": "skip", **MADE_OF[shape], **start}
    times = 3 if "samples_per_item" in settings else 1
    for workers in (1, 2):
        with Feed(range(24), several(harming(), settings), num_workers=workers, **settings) as feed:
            batches = [np.asarray(batch).tolist() for batch in feed]
            assert [i for batch in batches for i in batch] == [i for i in range(24) for _ in range(times)]
            assert {len(batch) for batch in batches[:-1]} <= {size}
            assert feed.stats.skipped == []


@pytest.mark.parametrize("crew", ["forkserver", "portable fork"])
@pytest.mark.parametrize("shape", FORMS)
@pytest.mark.parametrize("size", [pytest.param(4, marks=SLOW), 24])
def test_an_item_that_keeps_its_worker_from_answering_is_found_whatever_the_batches_are(
    shape: str, size: int, start: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """Where it is to be left out it is the only one; where it is not, it is the one that is named."""

    def load(i: int) -> Any:
        if i == BAD:
            os.closerange(0, 200)
        return i

    settings: dict[str, Any] = {"batch_size": size, "memory": MEMORY, "num_workers": 2, **MADE_OF[shape], **start}
    times = 3 if "samples_per_item" in settings else 1
    with Feed(range(24), several(load, settings), on_error="skip", **settings) as feed:
        seen = [i for batch in feed for i in np.asarray(batch).tolist()]
        assert seen == [i for i in range(24) for _ in range(times) if i != BAD]
        assert [item for item, _ in feed.stats.skipped] == [BAD]
    with Feed(range(24), several(load, settings), **settings) as feed, pytest.raises(WorkerLost) as caught:
        for _ in feed:
            pass
    assert caught.value.item == BAD
    capfd.readouterr()  # they say why they cannot answer


@pytest.mark.parametrize("crew", ["forkserver", "portable fork"])
def test_of_a_batch_that_kills_only_as_a_whole_that_is_said(start: dict[str, Any]) -> None:
    """None of its items does so by itself: nobody is accused without a word."""
    settings: dict[str, Any] = {"batch_size": 24, "memory": MEMORY, "num_workers": 2, **start}
    with Feed(range(24), harming(), collate_fn=np.array, **settings) as feed:
        with pytest.raises(WorkerLost, match="nobody died of it alone") as caught:
            for _ in feed:
                pass
        assert caught.value.item == BAD + 1


@pytest.mark.parametrize("crew", ["forkserver", "portable fork"])
@pytest.mark.parametrize("shape", ["rows", *FORMS])
@pytest.mark.parametrize("first", ["harms", "silences", "kills"])
def test_what_the_first_items_do_to_their_worker_costs_no_other_item(
    first: str, shape: str, start: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """They are tried together for the plan; one that does not kill by itself is enough for that."""
    harmed: list[int] = []

    def load(i: int) -> Any:
        if harmed or (i == 1 and first == "kills"):
            os._exit(3)
        if i == 1 and first == "harms":
            harmed.append(i)
        if i == 1 and first == "silences":
            os.closerange(0, 200)
        return i

    shaping = MADE_OF.get(shape, {})
    settings: dict[str, Any] = {"batch_size": 4, "memory": MEMORY, "num_workers": 2, **shaping, **start}
    times = 3 if "samples_per_item" in settings else 1
    with Feed(range(24), several(load, settings), on_error="skip", **settings) as feed:
        seen = [i for batch in feed for i in np.asarray(batch).tolist()]
        lost = [] if first == "harms" else [1]
        assert seen == [i for i in range(24) for _ in range(times) if i not in lost]
        assert [item for item, _ in feed.stats.skipped] == lost
    capfd.readouterr()  # they say why they cannot answer


def test_many_items_that_harm_their_workers_cost_no_other_item() -> None:
    """Whoever gets what another died of may be harmed as well, but not the one that takes the place of the dead."""
    for size in (4, 32):
        with Feed(range(64), harming(4), batch_size=size, memory=MEMORY, num_workers=4, on_error="skip") as feed:
            assert [i for batch in feed for i in batch.tolist()] == list(range(64))
            assert feed.stats.skipped == []


@pytest.mark.parametrize("crew", ["forkserver", "portable fork"])
@pytest.mark.parametrize("end", ["exit", "late"])
def test_texts_before_an_item_that_kills_are_whole(end: str, start: dict[str, Any]) -> None:
    """Those that do not fit into their cells travel with the answer, and who died gave none."""

    def load(i: int) -> Any:
        if i == 30 and end == "exit":
            os._exit(3)
        if i == 30:
            time.sleep(60)
        return "x" * (8 if i < 16 else 3000 + i)

    timeout: dict[str, Any] = {"timeout": 0.5} if end == "late" else {}
    with Feed(range(64), load, batch_size=4, num_workers=2, memory=MEMORY, **start, **timeout) as feed:
        for _ in range(2):  # in the second epoch several batches share a slot
            seen: list[str] = []
            with pytest.raises(LoadError) as caught:
                drain(feed, seen)
            assert caught.value.item == 30
            assert [len(text) for text in seen] == [8] * 16 + [3000 + i for i in range(16, 28)]


def test_what_was_kept_of_a_task_that_is_taken_apart_is_right(tmp_path: Path) -> None:
    """Items that are done alone are not kept; nothing else of the cache changes, and the next epoch is the same."""
    for cache in ("ram", tmp_path / "cache"):
        with Feed(
            range(24), harming(), batch_size=24, memory=MEMORY, num_workers=2, on_error="skip", cache=cache
        ) as feed:
            for _ in range(3):
                assert [i for batch in feed for i in batch.tolist()] == list(range(24))
            assert feed.stats.skipped == []


@pytest.mark.parametrize("size", [4, *(pytest.param(size, marks=SLOW) for size in (1, 3, 16))])
def test_a_feed_whose_first_items_kill_leaves_only_those_out(size: int) -> None:
    """Whether they are in one task or each in its own: each is given its three tries at once."""

    def load(item: int) -> Any:
        if item < 5 or 20 <= item < 24:
            os._exit(3)
        return np.full(4, item)

    for first in (0, 20):
        with Feed(range(first, 40), load, batch_size=size, memory=MEMORY, num_workers=1, on_error="skip") as feed:
            bad = {*range(5), *range(20, 24)}
            assert values(feed) == [item for item in range(first, 40) if item not in bad]


@pytest.mark.parametrize("crew", ["forkserver", "portable fork"])
@pytest.mark.parametrize(
    ("first", "kills", "harms", "count"),
    [
        ("raise", (), (0,), 1),
        ("raise", (), (0,), 5),
        ("skip", (), (0,), 1),
        ("skip", (1, 2, 3), (0, 4), 5),
        ("skip", (0,), (1,), 2),
    ],
)
def test_one_that_can_be_loaded_only_once_is(
    kills: tuple[int, ...], harms: tuple[int, ...], count: int, first: Any, start: dict[str, Any]
) -> None:
    """A probe loads again what it has loaded, to see how long that takes: nobody is to blame for dying of that."""
    harmed: list[int] = []

    def load(i: int) -> Any:
        if harmed or i in kills:
            os._exit(4)
        if i in harms:
            harmed.append(i)
        return i

    for size in (1, 4):
        with Feed(range(count), load, batch_size=size, memory=MEMORY, num_workers=1, on_error=first, **start) as feed:
            assert [i for batch in feed for i in batch.tolist()] == [i for i in range(count) if i not in kills]
            assert [item for item, _ in feed.stats.skipped] == list(kills)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["rows", pytest.param("list", marks=SLOW)])
@pytest.mark.parametrize("many", [19, 20])
def test_how_many_may_kill_in_a_row_does_not_depend_on_the_batches(many: int, shape: str) -> None:
    """Twenty: in one task or in several, among the first items or later, for any number of workers."""
    for first, size, workers in ((0, 32, 1), (7, 4, 2), (10, 1, 1)):
        bad = range(first, first + many)

        def load(i: int, bad: range = bad) -> Any:
            if i in bad:
                os._exit(3)
            return i

        settings: dict[str, Any] = {"memory": MEMORY, "batch_size": size, "num_workers": workers, "on_error": "skip"}
        with Feed(range(48), load, **settings, **MADE_OF.get(shape, {})) as feed:
            if many == 20:
                with pytest.raises(
                    WorkerLost, match="20 items in a row did so, so that it is not the items: 3 workers"
                ):
                    for _ in feed:
                        pass
                continue
            assert [i for batch in feed for i in np.asarray(batch).tolist()] == [i for i in range(48) if i not in bad]
            assert [item for item, _ in feed.stats.skipped] == list(bad)
            assert not any("skip" in str(error) for _, error in feed.stats.skipped)


@pytest.mark.parametrize("size", [pytest.param(1, marks=SLOW), 4])
def test_when_everything_kills_in_small_tasks_it_ends_soon(size: int) -> None:
    """Some twenty items, in however many tasks they are."""

    def load(item: int) -> Any:
        if item >= 8:
            os._exit(9)
        return np.full(4, item)

    settings: dict[str, Any] = {"memory": MEMORY, "batch_size": size, "num_workers": 1, "on_error": "skip"}
    for begin in (0, 8):
        with Feed(range(begin, 500), load, **settings) as feed:
            with pytest.raises(LoadError, match="exit code 9"):
                values(feed)
            if feed._launched is not None:
                assert feed.stats.restarts <= 80


@pytest.mark.parametrize("crew", ["forkserver", "portable fork"])
def test_a_death_is_noticed_in_whatever_thread_the_consumer_is(start: dict[str, Any], tmp_path: Path) -> None:
    """The feed is made in one thread, and each batch asked for in another: none is the main thread."""
    feeds: list[Any] = []
    seen: list[int] = []

    def make() -> None:
        feed, _, _ = feed_of("in_load", "SIGKILL", tmp_path / "died", **start)
        feeds.extend((feed, iter(feed)))

    def ask() -> None:
        seen.extend(next(feeds[1])[:, 0].tolist())

    for work in (make, *(ask for _ in range(ITEMS // 4))):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == list(range(ITEMS))
    assert feeds[0].stats.restarts == 1
    feeds[0].close()


# ---------------------------------------- the out-of-memory killer


# Shared memory, for which a worker's own limit does not hold, and the worker asks to be the one that is taken.
OOM = """
import mmap, os, sys
open(sys.argv[1] + "/cgroup.procs", "w").write("0")
import numpy as np
import penstock
once = sys.argv[2] == "once"
def load(item):
    if item == 21 and not (once and os.path.exists("died")):
        open("died", "w").close()
        open("/proc/self/oom_score_adj", "w").write("1000")
        block = mmap.mmap(-1, 600 << 20)
        for at in range(0, len(block), 4096):
            block[at] = 1
    return np.full(4, item)
with penstock.Feed(range(48), load, batch_size=4, memory="150 MiB", num_workers=2,
                   start_method="fork" if sys.argv[3] == "fork" else None) as feed:
    try:
        print([int(item) for batch in feed for item in batch[:, 0]] == list(range(48)), feed.stats.restarts)
    except penstock.WorkerLost as error:
        print(error.item, error.exitcode, error)
"""


@pytest.mark.parametrize("crew", ["forkserver", "fork", "portable fork"])
@pytest.mark.parametrize("times", ["once", "always"])
def test_the_out_of_memory_killer_is_survived_and_told(
    times: str, crew: str, start: dict[str, Any], tmp_path: Path
) -> None:
    """In a real memory control group: a worker is taken, its item done again; or the error tells who took it."""
    if not outside.can_limit():
        pytest.skip("no memory control group (v1) can be made here")
    with outside.limit(400 << 20) as group:
        done = subprocess.run(
            [sys.executable, "-c", OOM, str(group), times, start["start_method"]],
            cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    if times == "once":
        assert done.stdout == "True 1\n"
    else:
        assert done.stdout.startswith("21 -9 3 workers died one after the other while loading 21, with signal SIGKILL")
        assert "it looks like the out-of-memory killer, which took 3 here since the feed began" in done.stdout
        assert "iB are available now" in done.stdout


def test_a_kill_by_hand_is_not_taken_for_the_out_of_memory_killer() -> None:
    """Where the kernel counts its kills, it is known who it was not."""
    if machine.oom_kills() is None:
        pytest.skip("nobody counts here")
    feed, _, _ = feed_of("in_load", "SIGKILL", None)
    with feed, pytest.raises(WorkerLost, match=r"not by the out-of-memory killer of this container; .*iB are availabl"):
        values(feed)


# ---------------------------------------- at the start


IMPORTED_LOAD = """
import os
import numpy as np

if os.getpid() != HOME:
    with open(os.path.join(os.path.dirname(__file__), "tried"), "a") as file:
        file.write("x")
    import a_module_that_is_not_there

def load(item):
    return np.full(4, item)
"""


@pytest.mark.parametrize("crew", ["forkserver", "spawn", "portable spawn"])
def test_an_import_error_in_loads_module_fails_at_once_with_that_error(
    crew: str, start: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that can be imported here and not there: told on the first try, with its own traceback."""
    name = f"imported_load_{crew.replace(' ', '_')}"
    (tmp_path / f"{name}.py").write_text(IMPORTED_LOAD.replace("HOME", str(os.getpid())))
    monkeypatch.syspath_prepend(str(tmp_path))
    load = importlib.import_module(name).load
    with (
        Feed(range(8), load, batch_size=4, memory=MEMORY, num_workers=2, **start) as feed,
        pytest.raises(PenstockError, match=r"the workers cannot start.*a_module_that_is_not_there") as caught,
    ):
        next(iter(feed))
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    told = "".join(traceback.format_exception(caught.value))
    assert f'{name}.py", line 8, in <module>' in told
    assert (tmp_path / "tried").read_text() == "x"


def unborn(manner: str) -> Any:
    """Such a load, of a class that travels by value."""
    home = os.getpid()
    die = killer(manner, None) if manner in MANNERS else None

    class Load:
        def __call__(self, item: int) -> Any:
            return np.full(4, item)

        def __reduce__(self) -> Any:
            def restore() -> Any:
                if os.getpid() != home:
                    if die is not None:
                        die()
                    raise ImportError("no module named so")
                return Load()

            return restore, ()

    return Load()


@pytest.mark.parametrize("crew", ["forkserver", "spawn", "portable spawn"])
@pytest.mark.parametrize("manner", [*MANNERS, "ImportError"])
def test_a_load_that_kills_when_it_is_unpickled_is_reported(manner: str, crew: str, start: dict[str, Any]) -> None:
    """A crew that cannot start says so, and does not try for ever."""
    if manner not in ("SIGKILL", "ImportError") and "spawn" in crew:
        pytest.skip("slow to start, and the same to the parent")
    with (
        Feed(range(8), unborn(manner), batch_size=4, memory=MEMORY, num_workers=2, **start) as feed,
        pytest.raises(PenstockError) as caught,
    ):
        next(iter(feed))
    if manner == "ImportError":
        assert "cannot start" in str(caught.value)
        assert isinstance(caught.value.__cause__, ImportError)
    elif manner == "sys.exit":
        assert isinstance(caught.value, WorkerLost) or isinstance(caught.value.__cause__, SystemExit)
    else:
        assert isinstance(caught.value, WorkerLost)
        assert MANNERS[manner][1] in str(caught.value)


def test_a_template_that_is_killed_while_it_starts_is_told_as_that() -> None:
    """It printed nothing, so nobody is to look for that."""
    with (
        Feed(range(8), unborn("SIGKILL"), batch_size=4, memory=MEMORY, num_workers=2) as feed,
        pytest.raises(
            WorkerLost, match=r"was ended by signal SIGKILL while it started, \d times: by somebody"
        ) as caught,
    ):
        next(iter(feed))
    assert "printed" not in str(caught.value)
    assert caught.value.exitcode == -signal.SIGKILL


def test_a_worker_that_dies_once_while_it_is_born_is_replaced(tmp_path: Path) -> None:
    """With spawn each worker unpickles for itself: one that did not get that far is no reason to give up."""
    home = os.getpid()
    die = killer("SIGKILL", tmp_path / "died")

    class Load:
        def __call__(self, item: int) -> Any:
            return np.full(4, item)

        def __reduce__(self) -> Any:
            def restore() -> Any:
                if os.getpid() != home:
                    die()
                return Load()

            return restore, ()

    with Feed(range(ITEMS), Load(), batch_size=4, memory=MEMORY, num_workers=2, start_method="spawn") as feed:
        assert values(feed) == list(range(ITEMS))
        assert (tmp_path / "died").exists()


# ---------------------------------------- from outside


def taking(seconds: float) -> Callable[[int], Any]:
    def load(item: int) -> Any:
        time.sleep(seconds)
        return np.full(4, item)

    return load


def template_of(feed: Feed) -> int:
    return pids_of(feed)[0]


def pids_of(feed: Feed) -> list[int]:
    assert feed._launched is not None
    return feed._launched.engine.crew.pids()


def kill(pid: int, how: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, how)


@contextlib.contextmanager
def meanwhile(action: Callable[[], None], every_s: float) -> Iterator[None]:
    """Do something again and again in another thread."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(every_s):
            action()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("method", METHODS)
def test_killing_the_template_is_not_noticed_in_the_data(method: Any) -> None:
    """All workers go with it; what they held is done again by those of the next one."""
    items = range(4 * ITEMS)  # more than there are slots for: something is left to be done when it is killed
    with Feed(items, taking(0.002), batch_size=4, memory=MEMORY, num_workers=2, start_method=method) as feed:
        batches = iter(feed)
        seen = next(batches)[:, 0].tolist()
        for _ in range(3):
            kill(template_of(feed))
            seen += next(batches)[:, 0].tolist()
        for batch in batches:
            seen += batch[:, 0].tolist()
        assert seen == list(items)
        assert feed.stats.restarts >= 2


SHAPES: dict[str, dict[str, Any]] = {
    "rows": {},
    "whole": {"collate_fn": np.stack},
    "flow": {"samples_per_item": None},
    "stream": {"items": "stream"},
}


def shaped(shape: str, count: int, seconds: float, **more: Any) -> tuple[Feed, list[int]]:
    """A feed of each way in which batches come about, and what it should give."""
    settings = dict(SHAPES[shape])
    items: Any = range(count)
    expected = list(range(count))
    load: Any = taking(seconds)
    if settings.pop("items", None):
        items = iter(range(count))
    if "samples_per_item" in settings:

        def load(item: int) -> Iterator[Any]:
            time.sleep(seconds)
            for part in range(item % 5):
                yield np.full(4, 10 * item + part)

        expected = [10 * item + part for item in range(count) for part in range(item % 5)]
    return Feed(items, load, batch_size=8, memory=MEMORY, num_workers=2, **settings, **more), expected


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", METHODS)
def test_random_kills_through_an_epoch_are_not_noticed_in_the_data(method: Any, shape: str) -> None:
    """At whatever moment: idle, loading, writing, replying, waiting for room, being born."""
    if method == "spawn" and shape in ("whole", "stream"):
        pytest.skip("slow to start, and the same to the parent as forkserver")
    rng = random.Random(f"{method} {shape}")
    feed, expected = shaped(shape, 400, 0.001, start_method=method)
    shots: list[threading.Timer] = []
    with feed:
        seen: list[int] = []
        for number, batch in enumerate(feed, 1):
            assert (batch == batch[:, :1]).all()
            seen += batch[:, 0].tolist()
            # So rarely that no item can be hit three times, which would look as if it were its own fault.
            workers = pids_of(feed)[1:]
            if number % 6 == 0 and workers:
                shots.append(threading.Timer(rng.uniform(0.0, 0.02), kill, (rng.choice(workers),)))
                shots[-1].start()
        for shot in shots:
            shot.join()
        assert seen == expected
        assert feed.stats.restarts > 0
        assert feed.stats.skipped == []


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_kill_every_quarter_of_a_second_through_three_thousand_items(method: Any) -> None:
    """As the promise says."""
    with Feed(range(3000), taking(0.001), batch_size=16, memory=MEMORY, num_workers=2, start_method=method) as feed:

        def shoot() -> None:
            workers = pids_of(feed)[1:]
            if workers:
                kill(random.choice(workers))

        batches = iter(feed)
        seen = next(batches)[:, 0].tolist()
        with meanwhile(shoot, 0.25):
            for batch in batches:
                seen += batch[:, 0].tolist()
        assert seen == list(range(3000))
        assert feed.stats.restarts > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_killing_everybody_at_once_is_not_noticed_in_the_data(shape: str) -> None:
    """Template and workers in any order within the same moment, several times."""
    feed, expected = shaped(shape, 200, 0.002)
    rng = random.Random(shape)
    with feed:
        batches = iter(feed)
        seen = next(batches)[:, 0].tolist()
        for _ in range(3):
            pids = pids_of(feed)
            rng.shuffle(pids)
            for pid in pids:
                kill(pid)
            seen += next(batches)[:, 0].tolist()
        for batch in batches:
            seen += batch[:, 0].tolist()
        assert seen == expected


def test_a_worker_killed_while_it_waits_for_room_hands_its_place_on() -> None:
    """One item fills several slots: the worker that waits for the next slot dies, and another goes on from there."""

    def load(item: int) -> Iterator[Any]:
        for part in range(400):
            yield np.full(4096, 1000 * item + part)

    with Feed(range(6), load, batch_size=8, memory=MEMORY, num_workers=2, samples_per_item=None) as feed:
        batches = iter(feed)
        seen = next(batches)[:, 0].tolist()
        for _ in range(6):
            time.sleep(0.05)  # until all slots are full and the workers wait
            for pid in pids_of(feed)[1:]:
                kill(pid)
            for _ in range(3):
                batch = next(batches)
                assert (batch == batch[:, :1]).all()
                seen += batch[:, 0].tolist()
        for batch in batches:
            assert (batch == batch[:, :1]).all()
            seen += batch[:, 0].tolist()
        assert seen == [1000 * item + part for item in range(6) for part in range(400)]
        assert feed.stats.restarts >= 6


def test_idle_workers_that_die_are_replaced() -> None:
    """Nothing was lost with them, but somebody must be there for what comes."""
    feed, expected = shaped("rows", 64, 0.0)
    with feed:
        for _ in range(3):
            seen: list[int] = []
            for batch in feed:
                seen += batch[:, 0].tolist()
            assert seen == expected
            time.sleep(0.02)
            for pid in pids_of(feed)[1:]:
                kill(pid)


def test_a_worker_that_was_stopped_and_continued_is_right() -> None:
    """SIGSTOP is what a debugger or a batch system does; nothing is redone behind its back."""
    feed, expected = shaped("rows", 200, 0.001)
    with feed:
        batches = iter(feed)
        seen = next(batches)[:, 0].tolist()
        frozen = pids_of(feed)[1]
        kill(frozen, signal.SIGSTOP)
        waker = threading.Timer(0.3, kill, (frozen, signal.SIGCONT))
        waker.start()
        for batch in batches:
            seen += batch[:, 0].tolist()
        waker.join()
        assert seen == expected
        assert feed.stats.restarts == 0


@pytest.mark.parametrize("who", ["worker", pytest.param("everybody", marks=pytest.mark.slow)])
def test_closing_ends_processes_that_were_stopped(who: str) -> None:
    """They cannot answer, and are ended by force."""
    feed, _ = shaped("rows", 10_000, 0.001)
    next(iter(feed))
    template, *workers = pids_of(feed)
    stopped = workers[:1] if who == "worker" else [template, *workers]
    for pid in stopped:
        kill(pid, signal.SIGSTOP)
    feed.close()
    assert not [pid for pid in (template, *workers) if psutil.pid_exists(pid) and _runs(pid)]


def _runs(pid: int) -> bool:
    """Whether it is still there after a moment: what the kernel kills for us may take that."""
    for _ in range(500):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return False
        except psutil.NoSuchProcess:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize("who", ["everybody", *(pytest.param(who, marks=SLOW) for who in ("workers", "template"))])
def test_kills_while_closing_do_no_harm(who: str) -> None:
    """What was to be ended is ended: that is all close wants."""
    for turn in range(4):
        feed, _ = shaped("rows", 10_000, 0.001)
        next(iter(feed))
        template, *workers = pids_of(feed)
        targets = {"workers": workers, "template": [template], "everybody": [template, *workers]}[who]

        def shoot(targets: list[int] = targets, turn: int = turn) -> None:
            time.sleep(0.001 * turn)
            for pid in targets:
                kill(pid)

        thread = threading.Thread(target=shoot)
        thread.start()
        feed.close()
        thread.join()


@pytest.mark.parametrize("method", METHODS)
def test_kills_while_it_starts_end_in_data_or_in_an_error(method: Any) -> None:
    """Never in a hang, and never in wrong data."""
    rng = random.Random(method)
    me = psutil.Process()
    before = {child.pid for child in me.children(recursive=True)}

    def shoot() -> None:
        with contextlib.suppress(psutil.Error):
            children = [child for child in me.children(recursive=True) if child.pid not in before]
            if children and rng.random() < 0.3:
                kill(rng.choice(children).pid)

    for _ in range(4):
        feed, expected = shaped("rows", 40, 0.001, start_method=method)
        with feed, meanwhile(shoot, 0.02), contextlib.suppress(PenstockError):
            assert values(feed) == expected


def test_a_load_that_leaves_a_child_behind_is_still_noticed_when_it_dies(tmp_path: Path) -> None:
    """The child holds copies of every pipe of the worker: an end-of-file would never come."""
    path = str(tmp_path / "died")

    def load(item: int) -> Any:
        if item == VICTIM and not os.path.exists(path):
            open(path, "w").close()
            if os.fork() == 0:
                time.sleep(2)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        return np.full(4, item)

    with Feed(range(ITEMS), load, batch_size=4, memory=MEMORY, num_workers=2) as feed:
        assert values(feed) == list(range(ITEMS))
        assert feed.stats.restarts == 1


def test_a_worker_stuck_in_c_is_ended_with_the_feed() -> None:
    """With the GIL held it cannot hear "stop"."""

    def load(item: int) -> Any:
        if item >= 4000:
            ctypes.PyDLL(None).sleep(600)
        return np.full(4, item)

    with Feed(range(8000), load, batch_size=4, memory=MEMORY, num_workers=2) as feed:
        for batch in feed:
            if batch[0, 0] >= 2000:
                break


# ---------------------------------------------------------------------------------------------------------- last words


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize(
    ("leave", "words"),
    [
        ("sys.exit('no more')", "SystemExit: no more"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise GeneratorExit", "GeneratorExit"),
    ],
    ids=["exit", "interrupt", "generator"],
)
def test_a_load_that_leaves_is_quoted_and_prints_nothing(leave: str, words: str, method: str, tmp_path: Path) -> None:
    """What sys.exit was given is the reason, and three tracebacks of workers would hide the one that matters."""
    script = tmp_path / "leaves.py"
    script.write_text(
        "import sys\nfrom penstock import Feed\n"
        f"def load(i):\n    if i == 5:\n        {leave}\n    return i\n"
        "if __name__ == '__main__':\n"
        f"    options = dict(batch_size=4, memory='256 MiB', num_workers=2, start_method={method!r})\n"
        "    with Feed(range(40), load, **options) as feed:\n        for _ in feed:\n            pass\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert f"while loading 5, with exit code 1 ({words}): do that alone" in done.stderr
