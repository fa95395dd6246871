"""tinyloader's interface on Penstock: its README as it stands, and what the original gets wrong."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from multiprocessing.managers import SharedMemoryManager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import penstock
from penstock.compat import tinyloader
from penstock.compat.tinyloader import Loader, SharedMemoryShim, load, load_with_workers
from tests.live.own_words import assert_own_words

OWN: Final = frozenset({"memory", "in load"})
WORKERS: Final = 2
OVER: Final = "^load_with_workers goes through its items once, and this time it is over: call it again for another$"


class Arrays(Loader):
    """Samples of two arrays of the same size, full of the request's number; post_process hands them on as they are."""

    def __init__(self, values: int = 4096) -> None:
        self.values = values
        self.shutdowns = 0

    def load(self, request: int) -> Any:
        return np.full(self.values, request, np.int64), np.full(self.values, -request, np.int64)

    def post_process(self, response: Any) -> Any:
        return response

    def shutdown(self) -> None:
        self.shutdowns += 1


def is_of(number: int, sample: Any) -> bool:
    x, y = sample
    return bool((x == number).all() and (y == -number).all())


# ---------------------------------------- what stands in tinyloader's README

needs_tinygrad = pytest.mark.skipif(
    importlib.util.find_spec("tinygrad") is None or shutil.which("clang") is None,
    reason="tinygrad's CPU device needs tinygrad and clang",
)


def run(script: str, folder: Path) -> None:
    """In a process of its own, for tinygrad keeps files open."""
    command = [sys.executable, "-c", script]
    env = {**os.environ, "DEV": "CPU"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=env, check=False)
    assert (done.returncode, done.stdout) == (0, "all right\n"), done.stderr


# As a user has it, with the one import changed and numpy files in place of videos.
README: Final = """
import pathlib, typing
import numpy as np
import tinygrad
from multiprocessing.managers import SharedMemoryManager
from penstock.compat.tinyloader import Loader, SharedMemoryShim, load, load_with_workers

class VideoLoader(Loader):
    def make_request(self, item: pathlib.Path) -> typing.Any:
        return item

    def load(self, request: pathlib.Path) -> tuple[np.typing.NDArray, ...]:
        video = np.load(request)
        return video, np.array(video.sum())

    def post_process(self, response: tuple[np.typing.NDArray, ...]) -> tuple[tinygrad.Tensor, ...]:
        x, y = response
        x = tinygrad.Tensor(x).contiguous().realize()
        y = tinygrad.Tensor(y).contiguous().realize()
        return x, y

class DefaultLoader(Loader):
    def load(self, request):
        video = np.load(request)
        return video, np.array(video.sum())

paths = sorted(pathlib.Path(".").glob("*.npy"))
num_workers = 2

def right(samples):
    kept = list(samples)      # all of them: a tensor over memory that is used again would show
    assert len(kept) == len(paths)
    for number, (x, y) in enumerate(kept):
        assert isinstance(x, tinygrad.Tensor) and x.shape == (4, 32, 32) and x.device == "CPU", x
        assert (x.numpy() == number).all() and y.item() == number * 4 * 32 * 32
    assert (x + 1).sum().item() == len(paths) * 4 * 32 * 32

for loader in (VideoLoader(), DefaultLoader()):
    right(load(loader=loader, items=paths))
    right(load_with_workers(loader=loader, items=paths, num_worker=num_workers))
    with SharedMemoryManager() as smm:
        shim = SharedMemoryShim(loader, smm=smm, memory_pool_block_count=num_workers)
        with load_with_workers(shim, paths, num_workers) as generator:
            right(generator)
    with load_with_workers(loader, paths, num_workers, shared_memory_enabled=True) as generator:
        right(generator)
print("all right")
"""


@needs_tinygrad
def test_the_examples_of_its_readme_run_with_only_the_import_changed(tmp_path: Path) -> None:
    for number in range(12):
        np.save(tmp_path / f"{number:02}.npy", np.full((4, 32, 32), number, np.float32))
    run(README, tmp_path)


DEFAULT: Final = """
import sys
import numpy as np
from penstock.compat.tinyloader import Loader, load, load_with_workers
assert "tinygrad" not in sys.modules

class Odd(Loader):
    def load(self, r):
        empty = np.zeros((0, 2), np.uint8)
        return np.full(3, r, ">f4"), np.float32(r), np.array(r), empty, np.array(["text"]), "name", r

class Single(Loader):
    def load(self, r):
        return np.full(3, r, np.float16)

for results in (load(Odd(), range(3)), load_with_workers(Odd(), range(3), 1)):
    for r, (swapped, scalar, zero_d, empty, text, name, number) in enumerate(results):
        assert swapped.numpy().tolist() == [r, r, r] and scalar.item() == r and zero_d.item() == r
        assert empty.shape == (0, 2) and text.tolist() == ["text"] and (name, number) == ("name", r)
assert [t.numpy().tolist() for t in load_with_workers(Single(), range(2), 1)] == [[0, 0, 0], [1, 1, 1]]
print("all right")
"""


@needs_tinygrad
def test_the_default_post_process_makes_realized_tensors_of_arrays_and_leaves_the_rest(tmp_path: Path) -> None:
    """tinygrad itself reads the other byte order as garbage and refuses numpy scalars."""
    run(DEFAULT, tmp_path)


def test_every_public_name_of_tinyloader_is_here() -> None:
    """Those that tinyloader 0.1.5 defines in tinyloader.loader."""
    theirs = {
        "LoadRequestSharedBuffer", "Loader", "MemoryPool", "SharedBuffer", "SharedMemoryShim", "SharedNDArray",
        "init_worker", "load", "load_with_workers", "share_ndarray",
    }  # fmt: skip
    assert theirs <= set(tinyloader.__all__)
    assert all(callable(getattr(tinyloader, name)) for name in theirs)


def test_names_and_order_of_arguments_are_those_of_tinyloader() -> None:
    for function, wanted in (
        (load, "loader items"),
        (load_with_workers, "loader items num_worker shared_memory_enabled memory_pool_block_count"),
        (SharedMemoryShim, "loader smm memory_pool_block_count"),
    ):
        parameters = inspect.signature(function).parameters.values()
        assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == wanted.split()


# ---------------------------------------- right data


def test_memory_is_not_overwritten_while_post_process_reads_it() -> None:
    """With as many blocks as workers, a block given back too early is filled anew within a millisecond."""

    class Slow(Arrays):
        def post_process(self, response: Any) -> Any:
            number = int(response[0][0])
            first = is_of(number, response)
            time.sleep(0.002)
            return number, first and is_of(number, response)

    with load_with_workers(Slow(2**17), range(150), WORKERS, True, WORKERS) as results:
        assert list(results) == [(number, True) for number in range(150)]


def test_what_post_process_returns_may_be_views_that_are_kept() -> None:
    kept = []
    for number, (x, y) in enumerate(load_with_workers(Arrays(), range(200), WORKERS)):
        if number % 50 == 0:
            kept.append((x[10:20], y[::7]))
    assert len(kept) == 4
    assert all(is_of(50 * place, views) for place, views in enumerate(kept))


def test_memory_is_free_when_post_process_has_copied() -> None:
    """Nothing else may hold a sample: with two blocks, one that is held stops the workers."""

    class Copies(Arrays):
        def post_process(self, response: Any) -> Any:
            return tuple(array.copy() for array in response)

    loading = load_with_workers(Copies(2**16), range(60), WORKERS, memory_pool_block_count=2)
    with loading as results:
        for number, sample in enumerate(results):
            assert is_of(number, sample)
            assert loading.feed._engine is not None
            assert loading.feed._engine.held == 0
        assert loading.feed.stats.copied == 0


def test_samples_may_change_their_size() -> None:
    class Growing(Arrays):
        def load(self, request: int) -> Any:
            return tuple(np.full((1 + (request * 7919) % 5000, 2), s * request, np.int64) for s in (1, -1))

    for number, (x, y) in enumerate(load_with_workers(Growing(), range(100), WORKERS, shared_memory_enabled=True)):
        assert x.shape == y.shape == (1 + (number * 7919) % 5000, 2)
        assert is_of(number, (x, y))


def test_a_sample_may_be_anything_that_can_be_pickled(tmp_path: Path) -> None:
    np.save(tmp_path / "map.npy", np.arange(6))

    class Anything(Arrays):
        def load(self, request: int) -> Any:
            return {
                "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
                "slice": np.arange(10)[::3],
                "map": np.load(tmp_path / "map.npy", mmap_mode="r"),
                "objects": np.array([None, "x"], object),
                "empty": np.zeros((0, 4), np.float32),
                "zero": np.array(request),
                "record": np.zeros(2, [("a", "i4"), ("b", "f8")]),
                "bool": request > 1,
                "none": None,
                "path": Path("a") / str(request),
                "nested": [(np.full(2, request), "text"), {"k": b"bytes"}],
            }

    for number, got in enumerate(load_with_workers(Anything(), range(5), WORKERS)):
        want = Anything().load(number)
        assert got.keys() == want.keys()
        for name in ("fortran", "slice", "map", "objects", "empty", "zero", "record"):
            assert got[name].dtype == want[name].dtype, name
            assert got[name].shape == want[name].shape, name
            assert got[name].tolist() == want[name].tolist(), name
        assert got["fortran"].flags.f_contiguous
        got["zero"][...] = 5  # memory of its own, as after a pickle
        assert (got["bool"], got["none"], got["path"]) == (want["bool"], None, want["path"])
        assert got["nested"][0][0].tolist() == [number, number]
        assert got["nested"][1] == {"k": b"bytes"}


def test_load_gives_the_same_in_this_process() -> None:
    class Where(Arrays):
        def post_process(self, response: Any) -> Any:
            return int(response[0][0]), os.getpid()

        def load(self, request: int) -> Any:
            assert os.getpid() == here
            return super().load(request)

    here = os.getpid()
    drawn: list[int] = []

    def items() -> Iterator[int]:
        for item in itertools.count():
            drawn.append(item)
            yield item

    results = load(Where(), items())
    assert [next(results) for _ in range(3)] == [(number, here) for number in range(3)]
    assert drawn == [0, 1, 2]  # each when it is asked for


# ---------------------------------------- who calls what


def test_requests_are_made_in_the_calling_process_in_order() -> None:
    class Requests(Arrays):
        made: list[tuple[int, int, int]] = []  # noqa: RUF012 - of the class on purpose: it stays here

        def make_request(self, item: Any) -> Any:
            self.made.append((len(self.made), os.getpid(), threading.get_ident()))
            return len(self.made) - 1  # the item itself cannot be pickled

        def load(self, request: int) -> Any:
            return request, os.getpid()

    got = list(load_with_workers(Requests(), [threading.Lock() for _ in range(30)], WORKERS))
    assert [request for request, _ in got] == list(range(30))
    assert os.getpid() not in {pid for _, pid in got}
    assert Requests.made == [(number, os.getpid(), threading.get_ident()) for number in range(30)]


def test_an_endless_generator_is_drawn_only_as_far_as_there_are_free_blocks() -> None:
    drawn = 0

    def items() -> Iterator[int]:
        nonlocal drawn
        for drawn in itertools.count(1):
            yield drawn - 1

    with load_with_workers(Arrays(), items(), WORKERS, memory_pool_block_count=3) as results:
        for number in range(50):
            assert is_of(number, next(results))
            assert drawn <= number + 1 + 3


def test_leaving_early_ends_everything() -> None:
    """The check after each test proves that no process is left."""
    loader = Arrays()
    for number, sample in enumerate(load_with_workers(loader, itertools.count(), WORKERS)):
        assert is_of(number, sample)
        if number == 5:
            break
    assert loader.shutdowns == 1

    loader = Arrays()
    with load_with_workers(loader, itertools.count(), WORKERS) as results:
        next(results)
        assert loader.shutdowns == 0
    assert loader.shutdowns == 1
    with pytest.raises(penstock.FeedClosed, match=OVER):
        next(results)

    def fails() -> None:
        with load_with_workers(loader, itertools.count(), WORKERS) as results:
            raise KeyError(next(results)[0][0])

    with pytest.raises(KeyError):
        fails()
    assert loader.shutdowns == 2

    with load_with_workers(loader, itertools.count(), WORKERS):
        pass  # never asked for anything
    assert loader.shutdowns == 3


def test_a_second_pass_is_refused_in_words_that_say_what_to_do() -> None:
    """A feed is nothing that a user of this interface knows of; tinyloader's own cannot be entered twice either."""
    loading = load_with_workers(Arrays(), range(3), 0)
    assert sum(1 for _ in loading) == 3
    with pytest.raises(penstock.FeedClosed, match=OVER):
        list(loading)
    with pytest.raises(penstock.FeedClosed, match=OVER), loading:
        pass
    loading = load_with_workers(Arrays(), range(3), 0)
    with loading as results:
        assert sum(1 for _ in results) == 3
        assert list(results) == []  # a generator that is over, as ever
        with pytest.raises(penstock.FeedClosed, match=OVER):
            list(loading)


def test_there_is_one_pass_whoever_asks() -> None:
    """Two iterators would each get a part of the items, and lose what the other had read ahead."""
    loading = load_with_workers(Arrays(), range(20), 0)
    iter(loading)  # only asked whether it can be
    first = iter(loading)
    got = [int(x[0]) for x, _ in itertools.islice(first, 5)]
    got += [int(x[0]) for x, _ in loading]
    assert got == list(range(20))
    assert list(first) == []
    loader = Arrays()
    with load_with_workers(loader, range(20), 0) as results:
        got = [int(x[0]) for x, _ in itertools.islice(results, 5)]
        assert [*got, *(int(x[0]) for x, _ in results)] == list(range(20))
    assert loader.shutdowns == 1


def test_the_wrapped_loader_is_told_of_the_end_too() -> None:
    """tinyloader's own shim keeps it to itself."""
    loader = Arrays()
    shim = SharedMemoryShim(loader, smm=None, memory_pool_block_count=2)
    with load_with_workers(shim, range(4), 1) as results:
        assert sum(1 for _ in results) == 4
    assert loader.shutdowns == 1


def test_no_items_give_no_samples() -> None:
    """tinyloader raises a RuntimeError here."""
    assert list(load_with_workers(Arrays(), [], WORKERS)) == []
    assert list(load(Arrays(), [])) == []


# ---------------------------------------- errors name the item


class Fails(Arrays):
    def make_request(self, item: tuple[str, int]) -> int:
        if item[0] == "no request":
            raise KeyError("made no request")
        return item[1]

    def load(self, request: int) -> Any:
        if request == 13:
            raise FileNotFoundError("no such video")
        if request == 14:
            os._exit(3)
        return super().load(request)


@pytest.mark.parametrize("workers", [None, WORKERS])
def test_a_load_that_fails_names_the_item(workers: int | None) -> None:
    items = [("video", number) for number in range(20)]
    results = load(Fails(), items) if workers is None else load_with_workers(Fails(), items, workers)
    got: list[int] = []
    with pytest.raises(penstock.LoadError, match=r"load failed for \('video', 13\): FileNotFoundError: no such") as e:
        got.extend(int(sample[0][0]) for sample in results)
    assert got == list(range(13))
    assert e.value.item == ("video", 13)
    assert isinstance(e.value.__cause__, FileNotFoundError)
    assert "on_error" not in str(e.value)  # an option that this interface does not have


@pytest.mark.parametrize("workers", [None, WORKERS])
def test_a_request_that_fails_names_the_item(workers: int | None) -> None:
    items = [("video", 1), ("video", 2), ("no request", 3)]
    results = load(Fails(), items) if workers is None else load_with_workers(Fails(), items, workers)
    with pytest.raises(penstock.LoadError, match=r"make_request failed for \('no request', 3\): KeyError") as caught:
        list(results)
    assert caught.value.item == ("no request", 3)
    assert isinstance(caught.value.__cause__, KeyError)


class Lockful(Exception):
    """Cannot be pickled, and not be made again from its message."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")
        self.lock = threading.Lock()


class Raises(Arrays):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def load(self, request: int) -> Any:
        if request == 4:
            raise self.make()
        return super().load(request)


@pytest.mark.parametrize("workers", [None, 0, 1])
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Lockful("a", "b"), "Lockful: a: b"),
        (lambda: penstock.LoadError("my own", item="another"), "my own"),
    ],
)
def test_whatever_load_raises_names_the_item(make: Any, said: str, workers: int | None) -> None:
    """Also what cannot travel from a worker, and what looks like an error of make_request."""
    loader = Raises(make)
    results = load(loader, range(6)) if workers is None else load_with_workers(loader, range(6), workers)
    with pytest.raises(penstock.LoadError, match=f"^load failed for 4: {said}$") as caught:
        list(results)
    assert caught.value.item == 4
    assert said.endswith(str(caught.value.__cause__))


def test_a_sample_that_cannot_be_sent_names_the_item() -> None:
    class Unsendable(Arrays):
        def load(self, request: int) -> Any:
            return (x for x in range(request)) if request == 2 else request

    with pytest.raises(penstock.LoadError, match=r"load failed for 2: TypeError: cannot pickle 'generator' object"):
        list(load_with_workers(Unsendable(), range(4), 1))


def test_an_item_that_kills_its_workers_is_named() -> None:
    with pytest.raises(penstock.WorkerLost) as caught:
        list(load_with_workers(Fails(), [("video", 1), ("video", 14)], 1))
    assert caught.value.item == ("video", 14)
    assert_own_words(caught.value, OWN)


class Wide(Arrays):
    def load(self, request: int) -> Any:
        return super().load(request) if request < 3 else np.ones(penstock.MiB(request) // 8)


def test_a_load_that_takes_too_much_is_told_in_the_words_of_this_interface() -> None:
    match = r"load failed for 3000: .*: give more memory, a smaller num_worker, or let load make smaller temporaries\)$"
    with pytest.raises(penstock.LoadError, match=match) as caught:
        list(load_with_workers(Wide(), [0, 1, 2, 3000], 1, memory="600 MiB"))
    assert_own_words(caught.value, OWN)


def test_a_sample_that_turns_out_too_large_says_what_would_do() -> None:
    match = r"^a sample takes 48.0 MiB, .*: give memory=\d+ or more, or load smaller samples$"
    with pytest.raises(penstock.BudgetError, match=match) as caught:
        list(load_with_workers(Wide(), [0, 1, 2, 48], 0, memory="64 MiB"))
    assert_own_words(caught.value, OWN)
    assert f"memory={caught.value.least}" in str(caught.value)
    assert sum(1 for _ in load_with_workers(Wide(), [0, 1, 2, 48], 0, memory=caught.value.least)) == 4


def test_what_cannot_be_sent_to_workers_is_told_in_the_words_of_this_interface() -> None:
    loader = Arrays()
    loader.lock = threading.Lock()  # type: ignore[attr-defined]
    match = r"^the loader cannot be sent to worker processes .*, or use num_worker=0$"
    with pytest.raises(penstock.PenstockError, match=match) as caught:
        list(load_with_workers(loader, range(3), 1))
    assert_own_words(caught.value, OWN)
    assert sum(1 for _ in load_with_workers(loader, range(3), 0)) == 3
    match = r"^the request for <unlocked .*: make_request has to return what can be pickled.*, or use num_worker=0$"
    with pytest.raises(TypeError, match=match) as refused:
        list(load_with_workers(Arrays(), [threading.Lock()], 1))
    assert_own_words(refused.value, OWN)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"loader": Arrays}, TypeError, r"^loader=Arrays is a class: give an instance of it, Arrays\(\)$"),
        ({"loader": "x"}, TypeError, "^loader='x' has no make_request, load, .*shutdown: give a subclass of Loader$"),
        ({"items": 5}, TypeError, "'int' object is not iterable"),
        ({"num_worker": -1}, ValueError, "^num_worker=-1 must be 0 or more$"),
        ({"num_worker": 2.0}, TypeError, "^num_worker=2.0 must be an int or None$"),
        ({"memory_pool_block_count": 0}, ValueError, "^memory_pool_block_count=0 must be 1 or more$"),
    ],
)
def test_an_argument_that_cannot_be_is_refused_at_once(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load_with_workers(**{"loader": Arrays(), "items": range(3), **given})


def test_a_budget_above_what_there_is_warns_at_the_line_that_gave_it() -> None:
    with pytest.warns(penstock.BudgetWarning, match="memory=4000 GiB is more than") as told:
        loading = load_with_workers(Arrays(), range(3), 0, memory="4000 GiB")
    loading.close()
    assert {warning.filename for warning in told} == {__file__}


def test_what_post_process_raises_is_left_as_it_is() -> None:
    class Picky(Arrays):
        def post_process(self, response: Any) -> Any:
            raise penstock.LoadError('my own, or leave such items out with on_error="skip"', item=response)

    with pytest.raises(penstock.LoadError, match=r'^my own, or leave such items out with on_error="skip"$'):
        list(load_with_workers(Picky(), range(3), 0))


@pytest.mark.parametrize("workers", [None, 0, 1])
@pytest.mark.parametrize("entered", [False, True])
def test_a_stop_iteration_of_post_process_does_not_end_the_loop_in_silence(workers: int | None, entered: bool) -> None:
    class Stops(Arrays):
        def post_process(self, response: Any) -> Any:
            if response[0][0] == 4:
                raise StopIteration("no more")
            return response

    loader = Stops()
    got: list[int] = []

    def run() -> None:
        results = load(loader, range(10)) if workers is None else load_with_workers(loader, range(10), workers)
        with results if entered and isinstance(results, tinyloader.Loading) else nullcontext(results) as samples:
            got.extend(int(x[0]) for x, _ in samples)

    with pytest.raises(RuntimeError, match="raised StopIteration") as caught:
        run()
    assert isinstance(caught.value.__cause__, StopIteration)
    assert got == [0, 1, 2, 3]
    assert loader.shutdowns == (workers is not None)


# ---------------------------------------- bounded memory


def test_the_block_count_bounds_the_blocks() -> None:
    for blocks, slots in ((1, 2), (2, 2), (3, 3)):  # one to read and one to fill is the least there can be
        loading = load_with_workers(Arrays(), itertools.count(), WORKERS, True, blocks)
        with loading as results:
            next(results)
            assert loading.feed.plan.slots == slots
    loading = load_with_workers(SharedMemoryShim(Arrays()), range(4), 0)  # as many as the plan has room for
    with loading as results:
        assert sum(1 for _ in results) == 4
        assert loading.feed.plan.slots > 2
    with pytest.raises(ValueError, match="memory_pool_block_count=0 must be 1 or more"):
        SharedMemoryShim(Arrays(), None, 0)
    shim = SharedMemoryShim(Arrays(), None, 2)
    loading = load_with_workers(shim, itertools.count(), WORKERS)
    with loading as results:
        next(results)
        assert loading.feed.plan.slots == 2
        assert "2 slots: no more were allowed" in str(loading.feed.plan)
    with pytest.raises(ValueError, match="memory_pool_block_count=0 must be 1 or more"):
        load_with_workers(Arrays(), [], WORKERS, True, 0)


def test_the_budget_holds_and_what_cannot_fit_is_refused() -> None:
    budget = penstock.MiB(320)
    loading = load_with_workers(Arrays(2**20), range(30), WORKERS, memory=budget)  # 16 MiB a sample
    with loading as results:
        for number, sample in enumerate(results):
            assert is_of(number, sample)
        assert loading.feed.plan.total_bytes <= budget
        assert 0 < loading.feed.stats.peak_bytes <= budget
    with pytest.raises(penstock.BudgetError) as caught:
        list(load_with_workers(Arrays(2**20), range(3), WORKERS, memory="64 MiB"))
    assert_own_words(caught.value, OWN)
    with load_with_workers(Arrays(2**20), range(3), WORKERS, memory=caught.value.least) as results:
        assert sum(1 for _ in results) == 3


# ---------------------------------------- the lower names


@pytest.mark.leaves("child", "fd", reason="multiprocessing's resource tracker stays until the interpreter ends")
def test_blocks_of_a_pool_hold_arrays_and_go_back() -> None:
    with SharedMemoryManager() as manager:
        pool = tinyloader.MemoryPool(manager, 24, 2)
        shared = [tinyloader.share_ndarray(np.full(3, number), pool.pop()) for number in (1, 2)]
        assert [view.to_ndarray().tolist() for view in shared] == [[1, 1, 1], [2, 2, 2]]
        waited: list[Any] = []
        waiter = threading.Thread(target=lambda: waited.append(pool.pop().index))
        waiter.start()
        pool.push(shared[1].buffer)
        waiter.join()
        assert waited == [shared[1].buffer.index]
        request = tinyloader.LoadRequestSharedBuffer("video", (shared[0].buffer,))
        assert request.buffers == (shared[0].buffer,)
        with pytest.raises(ValueError, match="an array of 32 bytes does not go into a block of 24"):
            tinyloader.share_ndarray(np.zeros(4), shared[0].buffer)
        with pytest.raises(ValueError, match="a block of 24 bytes is not of this pool, whose blocks have 8"):
            tinyloader.MemoryPool(manager, 8, 1).push(shared[0].buffer)
        pool.shutdown()
        with pytest.raises(RuntimeError, match="the pool was shut down"):
            pool.pop()
        del shared, request
