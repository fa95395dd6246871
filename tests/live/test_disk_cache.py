"""A folder as cache: plain files that any program can read, used by later epochs and later runs, never when stale."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, TextIO

import ml_dtypes
import numpy as np
import pytest

import penstock
from penstock import BudgetError, Cache, CacheError, CacheWarning, Feed
from penstock._core import cache_disk
from penstock._core.cache_key import code_of
from tests.live.crews import each_crew, feed_of
from tests.live.loads import Log
from tests.live.test_ram_cache import CASES, assert_same, epochs, long_text, tree

N = 50


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "loads")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "cache"


def row(i: int) -> Any:
    return np.full(4, i)


ROWS = [name for name, (_, options) in CASES.items() if not options.keys() & {"collate_fn", "samples_per_item"}]


@pytest.mark.parametrize("name", ROWS)
def test_what_comes_from_the_folder_is_what_load_gave(name: str, folder: Path, log: Log) -> None:
    """In every epoch and in a later run, which loads no more than it takes to see what a sample is."""
    load, options = CASES[name]
    with feed_of("inline", range(N), load, **options) as feed:
        expected = epochs(feed)
    with feed_of("inline", range(N), log.of(load), cache=folder, **options) as feed:
        first = epochs(feed, 1)
        log.take()
        assert_same(first + epochs(feed, 2), expected)
        assert log.take() == {}
    with log.measured(feed_of("thread", range(N), log.of(load), cache=folder, **options)) as feed:
        assert_same(epochs(feed), expected)
    assert log.take() == {}


@each_crew
def test_every_crew_writes_and_reads_it(crew: str, folder: Path, log: Log) -> None:
    """And the next one, whatever it is, finds the same."""
    with feed_of("inline", range(N), tree) as feed:
        expected = epochs(feed, 2)
    for other, loads in ((crew, {1}), ("process", set())):
        with log.measured(feed_of(other, range(N), log.of(tree), cache=str(folder))) as feed:
            assert_same(epochs(feed, 2), expected)
        assert set(log.take().values()) == loads


@pytest.mark.leaves("child", "fd", reason="Python's resource tracker, started with the first portable crew, stays")
def test_the_portable_crew_uses_it_too(folder: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_PORTABLE", "1")
    with log.measured(feed_of("process", range(N), log.of(row), cache=folder, shuffle=True)) as feed:
        seen = epochs(feed, 2)
    assert sorted(int(x) for (batch,) in seen[1] for x in batch[:, 0]) == list(range(N))
    assert set(log.take().values()) == {1}


def test_several_samples_of_an_item_follow_each_other_in_the_file(folder: Path) -> None:
    load = CASES["several an item"][0]
    with feed_of("process", range(N), load, cache=folder, samples_per_item=2) as feed:
        seen = epochs(feed, 2)
    assert_same(seen[:1], seen[1:])
    assert np.load(folder / "sample.npy").tolist() == [[i, part] for i in range(N) for part in range(2)]


def test_anyone_can_read_the_files(folder: Path) -> None:
    """One .npy file per leaf, a row per item in the order of the items; texts as bytes and lengths."""

    def load(i: int) -> Any:
        return {"x": np.full((2, 3), i / 2, np.float32), "pair": (i, np.float32(i)), "a/b": i, "name": f"item {i}"}

    with feed_of("process", range(N), load, cache=folder, cast={"x": "float16", "pair.1": "bfloat16"}) as feed:
        feed.pack()
    assert {path.name for path in folder.iterdir()} == {
        *("index.json", "rows.npy", "penstock.lock", "x.npy", "pair.0.npy", "pair.1.npy", "a_b.npy"),
        *("name.npy", "name.length.npy"),
    }
    x = np.load(folder / "x.npy", mmap_mode="r")
    assert (x.dtype, x.shape) == (np.float16, (N, 2, 3))
    assert x[:, 1, 1].tolist() == [i / 2 for i in range(N)]
    assert np.load(folder / "pair.0.npy").tolist() == list(range(N))
    assert np.load(folder / "pair.1.npy").view(ml_dtypes.bfloat16).astype(int).tolist() == list(range(N))
    length = np.load(folder / "name.length.npy")
    assert [cell[:n].tobytes() for cell, n in zip(np.load(folder / "name.npy"), length, strict=True)] == [
        f"item {i}".encode() for i in range(N)
    ]
    index = json.loads((folder / "index.json").read_text())
    assert (index["length"], index["complete"]) == (N, True)
    assert (np.load(folder / "rows.npy") >> 32).tolist() == [1] * N


def test_texts_too_long_for_their_cells_are_loaded_every_time(folder: Path, log: Log) -> None:
    with feed_of("inline", range(N), long_text) as feed:
        expected = epochs(feed, 2)
    with feed_of("thread", range(N), log.of(long_text), cache=folder) as feed:
        first = epochs(feed, 1)
        log.take()
        assert_same(first + epochs(feed, 1), expected)
    assert {int(item) for item in log.take()} == {i for i in range(N) if i * 10 > 64}


def growing(i: int) -> str:
    return str(i % 10) * (10 if i < 30 else 400)


def test_texts_have_the_room_that_the_folder_gives_them(folder: Path) -> None:
    """Whichever text is seen first: with another seed, on a rank, after a resume. What fits no cell is loaded."""
    fill(folder, load=growing)
    assert np.load(folder / "sample.npy").shape == (N, 64)
    options = {"shuffle": True, "seed": 2, "drop_last": True}
    with feed_of("inline", range(N), growing, **options) as feed:
        plain = iter(feed)
        expected = [list(next(plain)) for _ in range(N // 4)]
    for skipped in range(len(expected)):
        with feed_of("inline", range(N), growing, cache=folder, **options) as feed:
            feed.load_state_dict({**feed.state_dict(), "position": 4 * skipped})
            assert list(next(iter(feed))) == expected[skipped]
    for rank in range(5):
        with feed_of("inline", range(N), growing, cache=folder, shard=(rank, 5)) as feed:
            assert [text for batch in feed for text in batch] == [growing(i) for i in range(rank, N, 5)]
            assert feed.stats.cached == 6


@each_crew
def test_ranks_that_make_a_folder_at_once_agree_on_the_room_for_texts(
    crew: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other has made it between the look at what is there and the opening."""
    looked = []

    def as_kept(*arguments: Any, **options: Any) -> Any:
        found = cache_disk.as_kept(*arguments, **options)
        looked.append(found)
        if len(looked) == 1:
            fill(folder, load=growing)
        return found

    monkeypatch.setattr("penstock._core.store.as_kept", as_kept)
    with feed_of(crew, range(N), growing, cache=folder) as feed:
        feed.load_state_dict({**feed.state_dict(), "position": 40})  # where texts are long
        seen = [text for _ in range(2) for batch in feed for text in batch]
    assert [spec.leaves[0].shape for spec in looked] == [(1024,), (64,), (64,)]  # this feed, the other, this again
    assert seen == [growing(i) for i in (*range(40, N), *range(N))]
    assert feed.stats.cached == 30


def test_a_random_load_leaves_no_folder(folder: Path) -> None:
    with (
        feed_of("thread", range(N), lambda i: penstock.rng().random(3), cache=folder) as feed,
        pytest.warns(CacheWarning, match="not kept"),
    ):
        first, second = (np.concatenate([batch for (batch,) in epoch]) for epoch in epochs(feed, 2))
    assert not np.array_equal(first, second)
    assert not folder.exists()


# ---------------------------------------- stale or fresh


def fill(folder: Path, items: Any = range(N), load: Any = row, **options: Any) -> None:
    cache = options.pop("cache", None) or Cache(folder)
    with feed_of("inline", items, load, cache=cache, **options) as feed:
        feed.pack()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"cache": {"key": "v2"}}, r"the key differs \('', here 'v2'\)"),
        ({"items": range(1, N + 1)}, "the items differ"),
        ({"items": range(N - 1)}, r"the number of items differs \(50, here 49\)"),
        ({"load": lambda i: np.full(5, i)}, r"the form of a sample differs \(.*\[4\].*\[5\]"),
        ({"load": lambda i: (np.full(4, i),)}, "the form of a sample differs"),
        ({"cast": "int32"}, "the form of a sample differs.*int32"),
        ({"load": lambda i: [row(i), row(i)], "samples_per_item": 2}, "the form of a sample differs"),
    ],
    ids=["key", "items", "length", "shape", "tree", "cast", "samples_per_item"],
)
def test_what_is_stale_is_refused_and_made_anew_only_when_asked(changed: Any, said: str, folder: Path) -> None:
    """Nothing of it is served, nothing is deleted; with stale="rebuild" it is made anew."""
    fill(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    cache = changed.pop("cache", {})
    with pytest.raises(CacheError, match=f"holds other samples: .*{said}.*Give another folder, or .*rebuild"):
        fill(folder, cache=Cache(folder, **cache), **changed)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    fill(folder, cache=Cache(folder, **cache, stale="rebuild"), **changed)
    with feed_of(
        "inline", changed.pop("items", range(N)), changed.pop("load", row), cache=Cache(folder, **cache), **changed
    ) as feed:
        seen = np.concatenate([np.concatenate(leaves) for leaves in epochs(feed, 1)[0]])
    assert feed.stats.cached > 0
    assert seen[0, 0] == (1 if said == "the items differ" else 0)


def test_every_single_item_counts(folder: Path) -> None:
    """One path among many, or one attribute of one item, is another set of items."""
    paths = [f"/data/{i}" for i in range(5000)]
    fill(folder / "a", paths, len)
    paths[2503] = "/data/2503b"
    with pytest.raises(CacheError, match="the items differ"):
        fill(folder / "a", paths, len)
    things: list[Any] = [{"path": Path(f"/x/{i}"), "crop": (i, (i + 1, None))} for i in range(20)]
    fill(folder / "b", things, lambda thing: thing["crop"][0])
    fill(folder / "b", [dict(thing) for thing in things], lambda thing: thing["crop"][0])
    things[3]["crop"] = (3, (4, 0))
    with pytest.raises(CacheError, match="the items differ"):
        fill(folder / "b", things, lambda thing: thing["crop"][0])


def test_rows_of_a_source_count(folder: Path) -> None:
    x = np.arange(N)
    fill(folder, penstock.arrays(x), lambda v: v + 1)
    fill(folder, penstock.arrays(x.copy()), lambda v: v + 1)
    with pytest.raises(CacheError, match="the items differ"):
        fill(folder, penstock.arrays(x[::-1].copy()), lambda v: v + 1)


def _scaled(scale: float) -> Any:
    def load(i: int) -> Any:
        return np.full(4, float(i)) * scale

    return load


def test_code_that_changed_is_warned_of(folder: Path) -> None:
    """The same key and the same form, but another load: used as it is, and said."""
    fill(folder, load=_scaled(1.0))
    fill(folder, load=_scaled(1.0))
    with pytest.warns(CacheWarning, match="code of load has changed .* give another key"):
        fill(folder, load=_scaled(2.0))
    with pytest.warns(CacheWarning, match="code of load has changed"):
        fill(folder, load=lambda i: np.full(4, i + 1.0))


MODULE = """
import numpy as np
import os.path

def f(i):
    return np.full(4, i + {0})

class Reader:
    def __init__(self, scale):
        self.scale = scale

    def read(self, i):
        return np.full(4, i + self.shift())

    @staticmethod
    def shift():
        return {1}

    @classmethod
    def made(cls, i):
        return cls(1).read(i)

    def __call__(self, i):
        return self.read(i)

def unused():
    return {2}
"""


@pytest.mark.parametrize(
    "load",
    [
        *("lambda i: mymod.f(i)", "lambda i: package.mymod.f(i)", "lambda i: f(i)", "f"),
        *("lambda i: mymod.Reader(2).read(i)", "lambda i: mymod.Reader.made(i)", "lambda i: reader.read(i)"),
        *("reader.read", "reader", "mymod.Reader.made", "mymod.Reader"),
    ],
)
def test_code_behind_a_module_or_a_class_counts(load: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What load calls there, and nothing else of it; not what comes with Python, which has a version of its own."""

    def code(*numbers: int) -> str:
        module: Any = types.ModuleType("mymod")
        package: Any = types.ModuleType("package")
        module.__file__ = package.__file__ = str(tmp_path / "mymod.py")
        package.mymod = module
        for made in (module, package):
            monkeypatch.setitem(sys.modules, made.__name__, made)
        exec(MODULE.format(*numbers), vars(module))
        names = {"mymod": module, "package": package, "reader": module.Reader(1), "f": module.f}
        return code_of(eval(load, {"__name__": "__main__", **names}))

    before = code(1, 1, 1)
    assert before
    assert code(1, 1, 1) == before
    assert code(1, 1, 2) == before
    assert code(2, 2, 1) != before
    if load.startswith("lambda"):
        monkeypatch.setattr(os, "__file__", str(tmp_path / "os.py"))
        assert code(1, 1, 1) == code(2, 2, 1) != before


# ---------------------------------------- sizes, damage, manners


def test_a_limit_holds_and_the_rest_is_loaded(folder: Path, log: Log) -> None:
    """Thirty rows of 32 bytes: every later epoch loads the other twenty."""
    with feed_of("process", range(N), log.of(row), cache=Cache(folder, limit=30 * 32), shuffle=True) as feed:
        epochs(feed, 1)
        log.take()
        epochs(feed, 1)
        second = log.take()
        epochs(feed, 1)
    assert log.take() == second
    assert len(second) == 20
    assert np.count_nonzero(np.load(folder / "rows.npy") >> 32 == 1) == 30


def test_a_limit_below_one_item_is_told(folder: Path) -> None:
    with (
        feed_of("inline", range(N), row, cache=Cache(folder, limit=31)) as feed,
        pytest.warns(CacheWarning, match="nothing is kept in .* one item takes 32 B, and limit is 31 B"),
    ):
        assert feed.pack() == 0


def test_rows_that_are_in_memory_are_not_copied_to_disk(folder: Path) -> None:
    with (
        feed_of("inline", penstock.arrays(np.arange(N)), cache=folder) as feed,
        pytest.warns(CacheWarning, match="not used, as all rows are in memory already"),
    ):
        assert feed.pack() == 0
    assert not folder.exists()


def test_texts_of_an_hdf5_file_are_kept_without_a_warning(folder: Path, tmp_path: Path) -> None:
    """What h5py hangs on a dtype is not saved, which NumPy would warn of."""
    h5py = pytest.importorskip("h5py")
    names = np.array([f"n{i}" for i in range(N)], "S8")
    pairs = np.array([(name, i) for i, name in enumerate(names)], [("name", "S8"), ("i", "i4")])
    with h5py.File(tmp_path / "s.h5", "w") as file:
        file["t"], file["p"] = names, pairs
    for cache in ("ram", folder):
        with feed_of("inline", penstock.hdf5(tmp_path / "s.h5", ["t", "p"]), cache=cache) as feed:
            for _ in range(2):
                seen = [(t.copy(), p.copy()) for t, p in map(_parts, feed)]
                assert np.concatenate([t for t, _ in seen]).tolist() == names.tolist()
                assert np.concatenate([p for _, p in seen]).tolist() == pairs.tolist()
        assert feed.stats.cached == N


def _parts(batch: Any) -> tuple[Any, Any]:
    return tuple(batch.values()) if isinstance(batch, dict) else tuple(batch)


def test_a_full_disk_ends_the_writing_and_nothing_else(tmp_path: Path) -> None:
    """On a file system of 2 MiB that somebody else fills up meanwhile: all samples come, with one warning."""
    script = """
import os, sys, warnings, numpy as np
from penstock import Feed
folder = sys.argv[1]
def load(i): return np.full(8192, i % 256, np.uint8)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with Feed(range(200), load, batch_size=4, memory="256 MiB", num_workers=2, cache=folder + "/cache") as feed:
        for epoch in range(2):
            seen = []
            for i, batch in enumerate(feed):
                seen += batch[:, 77].tolist()
                if epoch == 0 and i == 5:
                    try:
                        with open(folder + "/other", "wb", buffering=0) as file:
                            while True:
                                file.write(bytes(4096))
                    except OSError:
                        pass
            assert seen == [i % 256 for i in range(200)], seen
        print(0 < feed.stats.cached < 200, [str(w.message) for w in caught if "nothing more is kept" in str(w.message)])
"""
    said = in_a_mount(tmp_path, script, f"mount -t tmpfs -o size=2m tmpfs {tmp_path}")
    assert said.startswith("True ['nothing more is kept in "), said
    assert "No space left on device" in said
    assert said.count("nothing more is kept") == 1


def test_a_disk_that_is_full_from_the_start_stops_nothing(tmp_path: Path) -> None:
    """A new folder is not kept, and nothing of it is left behind; one that is there serves what it has."""
    script = """
import os, sys, warnings, numpy as np
from penstock import Cache, Feed
folder = sys.argv[1]
def load(i): return np.full(4096, i, np.uint8)
def seen(name, count):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Feed(range(count), load, batch_size=4, memory="256 MiB", num_workers=0, cache=folder + name) as feed:
            assert [b[0, 7] for _ in range(2) for b in feed] == 2 * list(range(0, count, 4))
    print(feed.stats.cached, [str(w.message).replace(folder, "") for w in caught])
with Feed(range(20), load, batch_size=4, memory="256 MiB", num_workers=0, cache=folder + "/old") as feed:
    next(iter(feed))
def fill(left):
    with open(folder + "/other", "ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            file.truncate(file.tell() - left)
for pages in range(8):  # of the folder, its files, its session: any may be what there is no room for
    fill(4096 * pages)
    before = sorted(os.listdir(folder + "/old"))
    if pages < 4:
        seen("/deep/new", 20)
        assert not os.path.exists(folder + "/deep"), os.listdir(folder + "/deep")
    seen("/old", 20)
    assert sorted(os.listdir(folder + "/old")) == before, (pages, os.listdir(folder + "/old"))
"""
    said = in_a_mount(tmp_path, script, f"mount -t tmpfs -o size=1m tmpfs {tmp_path}").splitlines()
    assert said[0].startswith("0 ['nothing is kept in /deep/new, as there is no room: OSError: [Errno 28]"), said
    assert "All samples are loaded every time" in said[0]
    assert said[1].startswith("8 ['nothing more is kept in /old, as there is no room: it has 4 of 20 items"), said


def test_a_disk_that_is_too_small_is_said_at_once(folder: Path) -> None:
    """More than the file system has: a part is kept, and how much is said before anything is loaded twice."""
    count = 2 * shutil.disk_usage(folder.parents[1]).total // 2**20

    with (
        feed_of("thread", range(count), lambda i: np.zeros(2**20, np.uint8), cache=folder, memory="256 MiB") as feed,
        pytest.warns(CacheWarning, match=r"the samples take .* items are kept, the rest is loaded every time"),
    ):
        assert len(next(iter(feed))) == 4


@pytest.mark.parametrize("damage", ["cut", "longer", "another header", "a link", "gone", "a folder"])
def test_damaged_files_are_refused(damage: str, folder: Path, tmp_path: Path) -> None:
    fill(folder)
    path = folder / "sample.npy"
    data = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(data[:-1])
    elif damage == "longer":
        path.write_bytes(data + b"x")
    elif damage == "another header":
        path.write_bytes(data.replace(b"<i8", b"<u8"))
    elif damage == "a link":
        (tmp_path / "elsewhere").write_bytes(data)
        path.symlink_to(tmp_path / "elsewhere")
    elif damage == "a folder":
        path.mkdir()
    with pytest.raises(
        CacheError, match=r"sample\.npy (cannot be read|is not the file it was made as).*delete .* made again"
    ):
        fill(folder)


def test_a_folder_without_its_list_of_rows_is_refused(folder: Path) -> None:
    fill(folder)
    (folder / "rows.npy").unlink()
    with pytest.raises(CacheError, match=r"rows\.npy is gone, .*delete .* to have it made again"):
        fill(folder)


@pytest.mark.parametrize("index", [b"", b"[]", b"{", b"null", b'{"format": "penstock cache"}', b"9" * (2**20 + 9)])
def test_an_index_of_something_else_is_refused(index: bytes, folder: Path) -> None:
    fill(folder)
    (folder / "index.json").write_bytes(index)
    with pytest.raises(CacheError, match=r"index\.json is not one of ours|version is None"):
        fill(folder)
    fill(folder, cache=Cache(folder, stale="rebuild"))
    fill(folder)


def test_lengths_that_cannot_be_are_not_believed(folder: Path, log: Log) -> None:
    """A file that somebody wrote into: the samples are loaded again, and the user is told."""
    fill(folder, load=log.of(lambda i: f"item {i}"))
    lengths = np.load(folder / "sample.length.npy", mmap_mode="r+")
    lengths[7] = 2**30
    lengths.flush()
    with (
        feed_of("process", range(N), log.of(lambda i: f"item {i}"), cache=folder) as feed,
        pytest.warns(CacheWarning, match=r"nothing more is kept in .*lengths that cannot be"),
    ):
        assert [name for batch in feed for name in batch] == [f"item {i}" for i in range(N)]


@each_crew
def test_a_folder_that_is_taken_away_meanwhile_does_no_harm(crew: str, folder: Path) -> None:
    with feed_of(crew, range(N), row, cache=folder) as feed:
        feed.pack()
        shutil.rmtree(folder)
        with pytest.warns(CacheWarning, match="nothing more is kept"):
            seen = epochs(feed, 2)
    for epoch in seen:
        assert np.concatenate([batch for (batch,) in epoch])[:, 0].tolist() == list(range(N))


@each_crew
def test_a_folder_that_is_made_anew_meanwhile_is_not_mixed_up(crew: str, folder: Path) -> None:
    """Another job has other samples under the same names now: what this one thinks is there is not."""
    with feed_of(crew, range(N), row, cache=folder) as feed:
        feed.pack()
        shutil.rmtree(folder)
        fill(folder, load=lambda i: np.full(4, -i), cache=Cache(folder, key="other"))
        with pytest.warns(CacheWarning, match="another file than it was|No such file"):
            seen = epochs(feed, 2)
    for epoch in seen:
        assert np.concatenate([batch for (batch,) in epoch])[:, 0].tolist() == list(range(N))
    assert np.load(folder / "sample.npy")[:, 0].tolist() == [-i for i in range(N)]


def in_a_mount(tmp_path: Path, script: str, mount: str) -> str:
    """Run a script in a mount namespace of its own, and what it prints; skips where nothing can be mounted."""
    if shutil.which("unshare") is None:
        pytest.skip("the command unshare is missing")
    command = f"({mount}) 2>&1 && {sys.executable} - {tmp_path}"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command], input=script, capture_output=True, text=True, check=False
    )
    if "mount:" in done.stdout or "unshare:" in done.stderr:
        pytest.skip("nothing can be mounted here")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("complete", [True, False])
def test_a_folder_that_may_only_be_read_is_read(complete: bool, folder: Path, tmp_path: Path) -> None:
    """A data set that somebody else packed, on a disk that is mounted to be read."""
    with feed_of("inline", range(N), row, cache=folder) as feed:
        feed.pack() if complete else next(iter(feed))
    script = """
import sys, warnings, numpy as np
from pathlib import Path
from penstock import Feed, CacheWarning
folder = Path(sys.argv[1]) / "deep" / "cache"
try:
    (folder / "x").touch()
except OSError as error:
    print(error.strerror)
def row(i): return np.full(4, i)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with Feed(range(50), row, batch_size=4, memory="256 MiB", num_workers=2, cache=folder) as feed:
        assert [int(x) for _ in range(2) for b in feed for x in b[:, 0]] == 2 * list(range(50))
print(feed.stats.cached, [str(w.message).partition(", as ")[2] for w in caught if w.category is CacheWarning])
"""
    said = in_a_mount(tmp_path, script, f"mount --bind {folder} {folder} && mount -o remount,ro,bind {folder}")
    rofs, _, rest = said.partition("\n")
    assert rofs == "Read-only file system"
    there = int(np.count_nonzero(np.load(folder / "rows.npy") >> 32 == 1))
    warned = (
        [f"it may only be read: it has {there} of 50 items, the others are loaded every time"] if not complete else []
    )
    assert rest == f"{2 * there} {warned}\n"


def test_a_file_of_somebody_else_survives_a_rebuild(folder: Path) -> None:
    fill(folder)
    np.save(folder / "mine.npy", np.arange(3))
    fill(folder, load=lambda i: (row(i), i), cache=Cache(folder, stale="rebuild"))
    assert {"0.npy", "1.npy", "mine.npy"} < {path.name for path in folder.iterdir()}
    assert not (folder / "sample.npy").exists()


def test_more_items_than_can_be_remembered_are_refused(folder: Path) -> None:
    with (
        feed_of("thread", range(10**9), row, cache=folder, memory="64 MiB") as feed,
        pytest.raises(BudgetError, match=r"1\.9 GiB of that to remember which items the cache has"),
    ):
        next(iter(feed))


def test_what_a_folder_has_to_remember_is_part_of_the_least_budget(folder: Path, tmp_path: Path) -> None:
    """Of 200,000 items 400,000 bytes: what the error asks for is enough."""
    np.save(tmp_path / "x.npy", np.zeros((200_000, 1), np.uint8))

    def feed(memory: int | str) -> Feed:
        return feed_of("process", penstock.arrays(tmp_path / "x.npy"), cache=folder, memory=memory)

    with feed("1 MiB") as small, pytest.raises(BudgetError, match="to remember which items the cache has") as caught:
        next(iter(small))
    with feed(caught.value.least) as enough:
        assert enough.plan.total_bytes <= caught.value.least
        assert enough.plan.parent_bytes >= 400_000


def test_a_folder_of_somebody_else_is_left_alone(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "thesis.tex").write_text("precious")
    with pytest.raises(CacheError, match=r"is not empty and is no cache \(it holds \['thesis\.tex'\]\)"):
        fill(folder, cache=Cache(folder, stale="rebuild"))
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]


def test_a_file_is_no_folder(folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("")
    with pytest.raises(CacheError, match="cannot be used as a cache"):
        fill(folder)


def test_files_have_the_modes_that_the_user_wants(folder: Path) -> None:
    """Nothing is executable, and the umask counts."""
    before = os.umask(0o027)
    try:
        fill(folder)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o640}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"collate_fn": "pad"}, r"with collate_fn samples may have any"),
        ({"samples_per_item": None}, r"with samples_per_item=None samples may have any"),
        ({"samples_per_item": 3}, r"samples_per_item=3 batch_size must be a multiple of 3, not 4"),
        ({"samples_per_item": 3, "batch_size": "max"}, r"must be a multiple of 3, not 'max'"),
    ],
)
def test_what_a_folder_cannot_keep_is_said_at_once(options: Any, said: str, folder: Path) -> None:
    with pytest.raises((TypeError, ValueError), match=f'{said}.*cache="ram"'):
        feed_of("inline", range(N), row, cache=folder, **options)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (((),), "give the folder"),
        (("",), "give the folder"),
        (("f", 3), "a key is a str"),
        (("f", "", "much"), "limit"),
        (("f", "", 0.5), 'is a fraction.*give bytes as an int, or text such as "2 GiB"$'),
        (("f", "", 0), 'leaves no room at all: give bytes as an int, or text such as "2 GiB"$'),
        (("f", "", None, "ignore"), '"error" or "rebuild"'),
    ],
)
def test_what_a_cache_can_be_told_is_said(arguments: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        Cache(*arguments)


# ---------------------------------------- several jobs


def test_two_feeds_share_a_folder_and_the_work(folder: Path, log: Log) -> None:
    """Iterated in turns, each finds what the other made; together they load hardly more than one alone."""

    def feed() -> Feed:
        return feed_of("process", range(N), log.of(row), cache=folder, shuffle=True, batch_size=2)

    with feed() as one, feed() as other:
        seen: list[list[int]] = [[], []]
        for left, right in zip(one, other, strict=True):
            seen[0] += left[:, 0].tolist()
            seen[1] += right[:, 0].tolist()
        assert sorted(seen[0]) == sorted(seen[1]) == list(range(N))
        log.take()
        epochs(one, 1)
        epochs(other, 1)
    assert log.take() == {}
    assert {path.name for path in folder.iterdir()} == {"index.json", "penstock.lock", "rows.npy", "sample.npy"}


def test_ranks_fill_one_folder_together(folder: Path, log: Log) -> None:
    """What one rank has made the others read, whichever rank an item falls to in the next epoch."""
    feeds = [feed_of("thread", range(N), log.of(row), cache=folder, shuffle=True, shard=(rank, 3)) for rank in range(3)]
    for epoch in range(3):
        seen = [int(x) for feed in feeds for (batch,) in epochs(feed, 1)[0] for x in batch[:, 0]]
        assert set(seen) == set(range(N))
        if epoch:
            assert sum(log.take().values()) <= 1  # the one with which the last places are filled up
        log.take()
    for feed in feeds:
        feed.close()
    assert np.load(folder / "sample.npy")[:, 0].tolist() == list(range(N))


def test_a_folder_in_use_is_not_rebuilt(folder: Path) -> None:
    with feed_of("inline", range(N), row, cache=folder) as feed:
        next(iter(feed))
        with pytest.raises(CacheError, match="another job uses them now"):
            fill(folder, cache=Cache(folder, key="v2", stale="rebuild"))
        assert np.concatenate([b.copy() for b in feed])[:, 0].tolist() == list(range(N))


def test_after_a_crash_of_the_machine_every_row_is_checked(folder: Path, log: Log) -> None:
    """What was noted as complete and did not reach the disk is made again; what did is not."""
    fill(folder, load=log.of(row))
    log.take()
    # As after a power failure: a session of another life of the machine, and a row that was never written out.
    (folder / "session-9").write_text(json.dumps({"boot": "another", "host": "", "pid": 1}))
    data = np.load(folder / "sample.npy", mmap_mode="r+")
    data[11] = 0
    data.flush()
    with feed_of("process", range(N), log.of(row), cache=folder) as feed:
        assert [int(x) for (batch,) in epochs(feed, 1)[0] for x in batch[:, 0]] == list(range(N))
    assert log.take()["11"] == 1
    assert not (folder / "session-9").exists()


def test_the_same_life_of_the_machine_is_believed(folder: Path) -> None:
    """After a kill nothing has to be read again: what was written is in the system's hands."""
    fill(folder, load=row)
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        pytest.skip("the system does not say which life of the machine this is")
    (folder / "session-9").write_text(json.dumps({"boot": boot.read_text().strip(), "host": "", "pid": 1}))
    rows = np.load(folder / "rows.npy", mmap_mode="r+")
    rows[3] = 9 << 32  # what it was at when it was killed
    rows.flush()
    with feed_of("inline", range(N), row, cache=folder) as feed:
        assert feed.pack() == N
    assert not (folder / "session-9").exists()


# ---------------------------------------- pack


@each_crew
def test_pack_fills_the_folder_and_goes_on_where_it_was(crew: str, folder: Path, log: Log) -> None:
    with feed_of(crew, range(N), log.of(row), cache=folder, shuffle=True) as feed:
        next(iter(feed))
        log.take()
        assert feed.pack() == N
        assert sum(log.take().values()) <= N - 4
        assert feed.pack() == N
        epochs(feed, 1)
    assert log.take() == {}


def test_pack_fills_memory_too(log: Log) -> None:
    with feed_of("process", range(N), log.of(row), cache="ram") as feed:
        assert feed.pack() == N
        log.take()
        epochs(feed, 1)
    assert log.take() == {}


def test_pack_needs_a_cache() -> None:
    with feed_of("inline", range(N), row) as feed, pytest.raises(ValueError, match="this feed has none"):
        feed.pack()


def test_pack_names_an_item_that_fails_and_keeps_what_came_before(folder: Path) -> None:
    def load(i: int) -> Any:
        if i == 30:
            raise ValueError("broken file")
        return row(i)

    with (
        feed_of("process", range(N), load, cache=folder) as feed,
        pytest.raises(penstock.LoadError, match=r"30.*broken"),
    ):
        feed.pack()
    assert np.count_nonzero(np.load(folder / "rows.npy") >> 32 == 1) >= 20
    with feed_of("process", range(N), load, cache=folder, on_error="skip") as feed:
        assert feed.pack() == N - 1
        # As an epoch tells it, without the advice to do what was done.
        assert [(item, repr(error)) for item, error in feed.stats.skipped] == [(30, "ValueError('broken file')")]


def test_pack_comes_back_to_what_it_could_not_claim(folder: Path) -> None:
    """Before, what was loaded while another job had the lock of the folder was missing in the end."""
    loaded: list[int] = []
    locks: list[TextIO] = []

    def load(i: int) -> Any:
        loaded.append(i)
        if i == 10 and not locks:
            locks.append((folder / "penstock.lock").open())
            fcntl.flock(locks[0], fcntl.LOCK_EX)
        if i == 30:
            locks[0].close()
        return row(i)

    with feed_of("inline", range(N), load, cache=folder) as feed:
        assert feed.pack() == N
    assert loaded.count(20) == 2, "the lock was in nobody's way"
    assert (np.load(folder / "rows.npy") >> 32 == 1).all()


TOGETHER = """
import time
import numpy as np
from penstock import Feed

def load(i):
    time.sleep(0.005)
    return np.full(4, i)

def make_feed():
    return Feed(range(400), load, batch_size=4, memory="256 MiB", num_workers=2)
"""


def test_several_packs_of_one_folder_each_end_when_all_is_there(tmp_path: Path) -> None:
    """Before, each said that what the other had made was missing."""
    (tmp_path / "train.py").write_text(TOGETHER)
    command = [sys.executable, "-m", "penstock", "pack", "train.py:make_feed", "--to", "kept"]
    both = [
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    told = [process.communicate(timeout=100) for process in both]
    for process, (out, err) in zip(both, told, strict=True):
        assert process.returncode == 0, err
        assert "400 of 400 items are in kept" in out
    assert (np.load(tmp_path / "kept" / "rows.npy") >> 32 == 1).all()


PACKED = """
import numpy as np
from penstock import Feed

def load(i):
    return {"x": np.full(4, i), "name": f"item {i}"}

def make_feed():
    return Feed(range(50), load, batch_size=4, memory="256 MiB", num_workers=2)

feed = make_feed
number = 3
"""


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock", "pack", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_packs_what_a_module_names(tmp_path: Path) -> None:
    """By module or by file; a second time nothing is left to do."""
    (tmp_path / "train.py").write_text(PACKED)
    for target in ("train:make_feed", str(tmp_path / "train.py:feed")):
        done = run(tmp_path, target, "--to", "cache", "--key", "v1")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("50 of 50 items are in cache (")
    assert np.load(tmp_path / "cache" / "x.npy")[:, 3].tolist() == list(range(50))
    done = run(tmp_path, "train:make_feed", "--to", "cache", "--key", "v2")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "the key differs ('v1', here 'v2')" in done.stderr
    assert run(tmp_path, "train:make_feed", "--to", "cache", "--key", "v2", "--rebuild").returncode == 0
    limited = run(tmp_path, "train:make_feed", "--to", "small", "--limit", "1 KiB")
    assert (limited.returncode, limited.stdout.partition(" of ")[0]) == (0, "10")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("train",), "names no feed"),
        (("nowhere:feed", "--to", "c"), "there is no module 'nowhere'"),
        (("train:nothing", "--to", "c"), "train has no 'nothing'"),
        (("train:load", "--to", "c"), "cannot be called without arguments"),
        (("train:number", "--to", "c"), "is a int, not a penstock.Feed"),
        (("train:make_feed",), "no folder as its cache: give one with --to"),
        (("train:make_feed", "--key", "v2"), "belong to --to"),
        (
            ("train:make_feed", "--to", "c", "--limit", "much"),
            'cannot be read as a size: give bytes as an int, or text such as "2 GiB"\n',
        ),
    ],
)
def test_the_command_says_what_is_wrong(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    (tmp_path / "train.py").write_text(PACKED)
    done = run(tmp_path, *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
