"""What the contenders read: the data, how one sample is loaded, and how a batch is proved right.

``make`` runs once in the harness and writes the data from a seed. ``job`` runs in every trial and gives the contender
its items, its load function and the check. A check has two strengths: ``touch`` runs in the timed epochs, costs every
contender the same and reads at least something of every sample (for large arrays: of every page); ``verify`` runs in
the last, untimed epoch and looks at every byte. What ``touch`` records is judged in ``finish``.

Does not cover: who loads, how it is timed.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import importlib
import itertools
import mmap
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

__all__ = [
    "FULL",
    "PAGE_BYTES",
    "QUICK",
    "WORKLOADS",
    "Check",
    "Job",
    "Sizes",
    "TextLines",
    "TokenCheck",
    "Workload",
    "WrongContent",
]

Array = npt.NDArray[Any]

# A page is what the kernel copies and maps at once; one word of each proves that all of them arrived.
PAGE_BYTES: Final = 4096
_PAGE_WORDS: Final = PAGE_BYTES // 8
# By these the words of a page are summed, so that words which change places are seen. Odd ones: times an even number,
# modulo 2**64, a change of the highest bits would vanish.
_PLACES: Final = np.arange(1, 2 * _PAGE_WORDS, 2, dtype=np.uint64)
# What the checks may remember, so that many short epochs do not show up as memory of the contender.
_RECORD_BYTES: Final = 48 * 2**20


# Of a random order of any length about two samples follow one that lies so and so far from them, whatever that is, and
# one stands where it stood in another; that more than this many do never happens.
_CHANCE: Final = 24


class WrongContent(Exception):
    """A contender delivered a sample twice, not at all, out of order, or with other bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """How large each workload is; every field is a flag of the command line."""

    big_files: int = 24
    big_bytes: int = 24 * 2**20
    big_samples: int = 96
    big_batch: int = 1
    rows: int = 200_000
    rows_width: int = 128
    rows_batch: int = 256
    cifar_rows: int = 50_000
    cifar_batch: int = 256
    latency_items: int = 384
    latency_ms: float = 5.0
    latency_batch: int = 16
    slow_items: int = 1024
    slow_ms: float = 1.0
    slow_batch: int = 16
    python_rows: int = 50_000
    python_batch: int = 256
    lines: int = 400_000
    lines_batch: int = 256
    images: int = 4000
    images_high: int = 350
    images_wide: int = 400
    images_size: int = 224
    images_batch: int = 64
    shards: int = 64
    shards_rows: int = 680
    shards_batch: int = 32
    memory_medium: int = 1500
    memory_temporaries: int = 160
    memory_leaks: int = 1000
    memory_paths: int = 2_000_000
    memory_ragged: int = 480
    least_s: float = 1.5
    """A timed region lasts at least this long, in whole epochs."""


FULL: Final = Sizes()
# The same shapes with fewer of them: ratios move a little, none of them changes its meaning.
QUICK: Final = Sizes(
    big_files=8,
    big_samples=24,
    rows=100_000,
    cifar_rows=20_000,
    latency_items=96,
    slow_items=256,
    python_rows=20_000,
    lines=100_000,
    images=800,
    shards=8,
    least_s=0.5,
)


class Check(Protocol):
    """Proof that each sample of each epoch came once, in its place, with the right bytes."""

    def touch(self, batch: Any) -> None: ...
    def verify(self, batch: Any) -> None: ...
    def finish(self) -> None:
        """Raise WrongContent unless all was right."""


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One workload as one contender gets it."""

    items: Sequence[Any]
    load: Callable[[Any], Any]
    batch_size: int
    sample_bytes: int
    check: Check
    workers: int
    budget_bytes: int
    seed: int
    least_s: float
    most_epochs: int
    """Timed epochs that the check has room for."""
    shuffle: Any = False
    arrays: tuple[Array, ...] | None = None
    """The samples as columns, when they are in memory anyway."""
    load_into: Callable[[Any, Any], None] | None = None
    spec: Any = None
    """What ``load_into`` fills, as ``penstock.into`` wants it."""
    source: Callable[[], Any] | None = None
    """The same items as a source of Penstock's, where there is one for what they are."""
    pad: bool = False
    """Samples differ in length: a batch is them padded with zeros, and their lengths."""
    text: str | None = None
    """The file whose lines the items are."""
    costly: bool = False
    """Loading one sample is work enough to be a task of its own."""
    wait_s: float = 0.0
    """What each load waits for something far away, besides which it does nothing."""
    waiting: bool = False
    """Loads wait, and do nothing else: all that a loader can do is to have more of them wait at once."""
    finish: Callable[[Any], Any] | None = None
    """What makes samples of rows of ``arrays``: of a whole batch of them, or of one; ``load`` gathers one as well."""
    chill: Callable[[], float] | None = None
    """Has the system forget the files before each epoch; gives the seconds that took, which count for nobody."""

    @property
    def samples(self) -> int:
        return len(self.items)


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """A kind of data, who reads it and what bounds it."""

    name: str
    title: str
    contenders: tuple[str, ...]
    limits: tuple[str, ...]
    """The first is the one that shares are given of."""
    unit: str
    """What a rate is shown in: ``bytes`` or ``samples``."""
    make: Callable[[Path, Sizes, int], None]
    job: Callable[[Path, Sizes, int, int, int], Job]
    """folder, sizes, workers, seed, budget_bytes -> Job"""
    budget_bytes: int | None = None
    """The budget that belongs to it; None: the one that the run was given."""
    most_budget_bytes: int | None = None
    """What it has at most of the budget that the run was given."""
    needs: tuple[str, ...] = ()
    """Modules without which its data cannot be made or read."""
    unfit: Callable[[Path], str] | None = None
    """Why it would measure something else with its data in this folder; empty when it would not."""
    quick: tuple[str, ...] = ("penstock", "penstock-auto", "loop", "torch")
    """Those of the contenders that a quick run has time for."""

    def budget_of(self, given_bytes: int) -> int:
        """The budget that it has in a run that was given this one."""
        budget_bytes = self.budget_bytes or given_bytes
        return budget_bytes if self.most_budget_bytes is None else min(budget_bytes, self.most_budget_bytes)


def _other_form(batch: Array, shape: tuple[int, ...], dtype: Any) -> str:
    """What is wrong with the type and the shape of the samples of a batch; empty when nothing is."""
    if batch.dtype == dtype and batch.shape[1:] == shape:
        return ""
    return f"samples came as {batch.dtype}{list(batch.shape[1:])}, not {np.dtype(dtype)}{list(shape)}"


def _page_sums(words: Array) -> Array:
    """A number for each page, from all of its words and their places."""
    # Not a product and its sum: that would take as much memory again, which would look like the contender's.
    sums: Array = words.reshape(-1, _PAGE_WORDS) @ _PLACES
    return sums


def in_order(ids: Array, before: Array | None = None) -> str:
    """Why samples with these numbers do not come shuffled; empty when they may be.

    Not only the order of the source itself: whoever goes through it backwards, in steps, or begins elsewhere reads as
    easily. Nor that of the epoch ``before``.
    """
    most = max(_CHANCE, len(ids) // 10)
    steps = np.bincount(np.abs(np.diff(ids)))
    if len(steps) and steps.max() > most:
        return f"was to be shuffled, and {steps.max()} of {len(ids)} samples lie {steps.argmax()} from the one before"
    # In a permutation a third of them, on average; in one of small windows hardly any.
    moved = float(np.abs(ids - np.arange(len(ids))).mean())
    if len(ids) > _CHANCE and moved < len(ids) / 10:
        return f"was to be shuffled, and of {len(ids)} samples each lies about {moved:.0f} places from where it stood"
    if before is not None and (same := int(np.count_nonzero(ids == before))) > most:
        return f"was to be shuffled anew, and {same} of {len(ids)} samples come where they came in the epoch before"
    return ""


def _epochs_with_room(samples: int, bytes_per_sample: int) -> int:
    return max(2, min(200, _RECORD_BYTES // (samples * bytes_per_sample)))


# ---------------------------------------------------------------- big: arrays of 24 MiB, one .npy file each


class _PageCheck:
    """For large arrays whose first word is the number of the file they came from."""

    def __init__(self, page_sums: Array, file_words: Array, expected: Array, *, epochs: int) -> None:
        self._page_sums = page_sums  # (files, pages): what _page_sums gives
        self._file_words = file_words  # (files,): the sum of the first words of all pages
        self._expected = expected
        # Filled, not empty: the first touch of these pages belongs to no contender.
        self._ids = np.full(len(expected) * epochs, 2**63, np.uint64)
        self._sums = np.full(len(expected) * epochs, 2**63, np.uint64)
        self._count = 0
        # Told at the end: a loader whose epoch is broken off in the middle is another test.
        self._wrong: list[str] = []

    def _record(self, batch: Any) -> Array:
        array = np.asarray(batch)
        words: Array = array.reshape(len(array), -1).view(np.uint64)
        here = slice(self._count, self._count + len(words))
        self._ids[here] = words[:, 0]
        self._sums[here] = words[:, ::_PAGE_WORDS].sum(axis=1)
        self._count += len(words)
        return words

    def touch(self, batch: Any) -> None:
        self._record(batch)

    def verify(self, batch: Any) -> None:
        form = _other_form(np.asarray(batch), (self._page_sums.shape[1], PAGE_BYTES // 4), np.float32)
        if form:
            self._wrong.append(form)
        for words in self._record(batch):
            file = int(words[0])
            if file >= len(self._page_sums):
                continue  # finish() says so
            wrong = np.flatnonzero(_page_sums(words) != self._page_sums[file])
            if len(wrong):
                self._wrong.append(
                    f"the sample of file {file} has {len(wrong)} wrong pages of {self._page_sums.shape[1]}, "
                    f"the first at byte {wrong[0] * PAGE_BYTES}"
                )

    def finish(self) -> None:
        epochs, rest = divmod(self._count, len(self._expected))
        if rest:
            raise WrongContent(
                f"{self._count} samples came; that is not a whole number of epochs of {len(self._expected)}"
            )
        wanted = np.tile(self._expected, epochs)
        wrong = np.flatnonzero(self._ids[: self._count] != wanted)
        if len(wrong):
            raise WrongContent(
                f"sample {wrong[0]} is of file {self._ids[wrong[0]]}, not {wanted[wrong[0]]}; {len(wrong)} are wrong"
            )
        wrong = np.flatnonzero(self._sums[: self._count] != self._file_words[wanted])
        if len(wrong):
            raise WrongContent(f"sample {wrong[0]} has pages of another sample; {len(wrong)} are wrong")
        if self._wrong:
            raise WrongContent(self._wrong[0])


def _make_big(folder: Path, sizes: Sizes, seed: int) -> None:
    if sizes.big_bytes % PAGE_BYTES:
        raise ValueError(f"arrays of {sizes.big_bytes} bytes are not whole pages: give a multiple of {PAGE_BYTES}")
    pages = sizes.big_bytes // PAGE_BYTES
    sums = np.empty((sizes.big_files, pages), np.uint64)
    firsts = np.empty(sizes.big_files, np.uint64)
    for file in range(sizes.big_files):
        array = np.random.default_rng((seed, file)).random((pages, PAGE_BYTES // 4), dtype=np.float32)
        words = array.reshape(-1).view(np.uint64)
        words[0] = file
        sums[file] = _page_sums(words)
        firsts[file] = words[::_PAGE_WORDS].sum()
        with open(folder / f"{file:05d}.npy", "wb") as out:
            np.save(out, array)
            out.flush()
            # Otherwise the kernel writes these pages back while the first contenders run.
            os.fsync(out.fileno())
    np.savez(folder / "truth.npz", sums=sums, firsts=firsts)


def read_npy_into(path: str, out: Array) -> None:
    """Read the array in a .npy file straight into ``out``."""
    with open(path, "rb", buffering=0) as file:
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(file)
        if shape != out.shape or dtype != out.dtype:
            raise ValueError(f"{path} holds {dtype}{list(shape)}, the slot {out.dtype}{list(out.shape)}")
        rest = memoryview(out.data).cast("B")
        while rest:
            got = file.readinto(rest)
            if not got:
                raise EOFError(f"{path} ends {len(rest)} bytes early")
            rest = rest[got:]


def _big_job(folder: Path, sizes: Sizes, workers: int, seed: int, budget_bytes: int) -> Job:
    truth = np.load(folder / "truth.npz")
    order = np.arange(sizes.big_samples) % sizes.big_files
    paths = [str(folder / f"{file:05d}.npy") for file in range(sizes.big_files)]
    buffer = bytearray(2**20)
    for path in paths:  # whatever ran before may have pushed them out of the page cache
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    epochs = _epochs_with_room(sizes.big_samples, 16)
    shape = (truth["sums"].shape[1], PAGE_BYTES // 4)
    return Job(
        items=[paths[file] for file in order],
        load=np.load,
        load_into=read_npy_into,
        spec=(shape, "float32"),
        batch_size=sizes.big_batch,
        sample_bytes=shape[0] * PAGE_BYTES,
        check=_PageCheck(truth["sums"], truth["firsts"], order, epochs=epochs + 2),
        workers=workers,
        budget_bytes=budget_bytes,
        seed=seed,
        least_s=sizes.least_s,
        most_epochs=epochs,
        costly=True,
    )


# ---------------------------------------------------------------- small samples: a row and the number of the row


_PIECE_ROWS: Final = 1024  # of 3 KiB at most: what is looked at in one go stays small beside the contenders


class _RowCheck:
    """For samples of (row, number of the row), in order or as a permutation.

    ``file`` holds the same rows, where ``truth`` is the very array that contenders read from and could change.
    """

    def __init__(
        self, truth: Array, *, epochs: int, shuffled: bool, made: Callable[[Array], Array] = lambda rows: rows,
        file: Path | None = None,
    ) -> None:  # fmt: skip
        self._truth = truth
        self._file = file
        self._made = made  # what a batch holds of some rows
        self._shuffled = shuffled
        self._ids = np.full(len(truth) * epochs, -1, np.int64)
        self._firsts = np.full(len(truth) * epochs, np.nan, np.float32)
        self._count = 0
        self._wrong: list[str] = []

    def touch(self, batch: Any) -> None:
        x, y = (np.asarray(leaf) for leaf in batch)
        here = slice(self._count, self._count + len(y))
        self._count = here.stop
        if here.stop > len(self._ids):
            return  # more than there can be: finish() says so
        self._ids[here] = y
        self._firsts[here] = x.reshape(len(x), -1)[:, 0]

    def verify(self, batch: Any) -> None:
        self.touch(batch)
        x, y = (np.asarray(leaf) for leaf in batch)
        if y.dtype.kind != "i":
            self._wrong.append(f"the numbers of the rows came as {y.dtype}, not as integers")
            return
        strange = y[(y < 0) | (y >= len(self._truth))]
        if len(strange):
            self._wrong.append(f"row {strange[0]} came, and there are {len(self._truth)}")
            return
        right = self._made(self._truth[y])
        if form := _other_form(x, right.shape[1:], right.dtype):
            self._wrong.append(form)
        elif not np.array_equal(x, right):
            wrong = np.flatnonzero((x != right).reshape(len(x), -1).any(axis=1))
            self._wrong.append(f"{len(wrong)} of {len(y)} rows of a batch are wrong, the first is row {y[wrong[0]]}")

    def _see_source(self) -> None:
        if self._file is None:
            return
        stored = np.load(self._file, mmap_mode="r")
        for start in range(0, len(stored), _PIECE_ROWS):
            here, there = self._truth[start : start + _PIECE_ROWS], stored[start : start + _PIECE_ROWS]
            if not np.array_equal(here, there):
                row = start + int((here != there).reshape(len(there), -1).any(axis=1).argmax())
                raise WrongContent(
                    f"the array that the rows are read from was changed: row {row} is not that of its file"
                )

    def finish(self) -> None:
        self._see_source()
        rows = len(self._truth)
        epochs, rest = divmod(self._count, rows)
        if rest or self._count > len(self._ids):
            raise WrongContent(f"{self._count} samples came; that is not a whole number of epochs of {rows}")
        before = None
        for epoch, ids in enumerate(self._ids[: self._count].reshape(epochs, rows)):
            if self._shuffled and (why := in_order(ids, before)):
                raise WrongContent(f"epoch {epoch} {why}")
            before = ids
            wrong = np.flatnonzero((np.sort(ids) if self._shuffled else ids) != np.arange(rows))
            if len(wrong):
                raise WrongContent(
                    f"epoch {epoch} does not hold each of {rows} rows once and in place: {len(wrong)} are wrong"
                )
        firsts = np.concatenate([
            # A copy: views would keep all that was made, and it would count as memory of the contender.
            self._made(self._truth[start : start + _PIECE_ROWS]).reshape(-1, self._truth[0].size)[:, 0].copy()
            for start in range(0, rows, _PIECE_ROWS)
        ])  # fmt: skip
        if not np.array_equal(self._firsts[: self._count], firsts[self._ids[: self._count]]):
            raise WrongContent("rows came with the numbers of other rows")
        if self._wrong:
            raise WrongContent(self._wrong[0])


def _row_job(
    truth: Array, load: Callable[[Any], Any], batch_size: int, *,
    workers: int, seed: int, budget_bytes: int, least_s: float, arrays: tuple[Array, ...] | None = None,
    waiting: bool = False, wait_s: float = 0.0, file: Path | None = None,
) -> Job:  # fmt: skip
    epochs = _epochs_with_room(len(truth), 8 + 4)
    shuffle = arrays is not None
    return Job(
        items=range(len(truth)),
        load=load,
        batch_size=batch_size,
        sample_bytes=truth[:1].nbytes + 8,
        check=_RowCheck(truth, epochs=epochs + 2, shuffled=shuffle, file=file),
        workers=workers,
        budget_bytes=budget_bytes,
        seed=seed,
        least_s=least_s,
        most_epochs=epochs,
        shuffle=shuffle,
        arrays=arrays,
        costly=waiting,
        waiting=waiting,
        wait_s=wait_s,
    )


# rows: all samples are in memory as two arrays, and are wanted shuffled


def _make_rows(folder: Path, sizes: Sizes, seed: int) -> None:
    np.save(folder / "x.npy", np.random.default_rng(seed).random((sizes.rows, sizes.rows_width), dtype=np.float32))


def _load_row(columns: tuple[Array, ...], row: int) -> tuple[Any, ...]:
    return tuple(column[row] for column in columns)


def _rows_job(folder: Path, sizes: Sizes, workers: int, seed: int, budget_bytes: int) -> Job:
    x = np.load(folder / "x.npy")
    arrays = (x, np.arange(len(x)))
    return _row_job(
        x, functools.partial(_load_row, arrays), sizes.rows_batch, arrays=arrays,
        file=folder / "x.npy",
        workers=workers, seed=seed, budget_bytes=budget_bytes, least_s=sizes.least_s,
    )  # fmt: skip


# cifar: small pictures in memory, wanted shuffled, as floats and normalised

# Of a whole picture, not three numbers: broadcasting over an axis of three takes NumPy several times as long.
_MEAN: Final = np.tile(np.array([125.3, 123.0, 113.9], np.float32), (32, 32, 1)).copy()
_SCALE: Final = np.tile(1 / np.array([63.0, 62.1, 66.7], np.float32), (32, 32, 1)).copy()
_MEAN.flags.writeable = _SCALE.flags.writeable = False  # threads may share what nobody writes to


def _make_cifar(folder: Path, sizes: Sizes, seed: int) -> None:
    pictures = np.random.default_rng(seed).integers(0, 256, (sizes.cifar_rows, 32, 32, 3), np.uint8)
    np.save(folder / "x.npy", pictures)


def _normalised(pixels: Array) -> Array:
    made: Array = np.subtract(pixels, _MEAN, dtype=np.float32)
    made *= _SCALE
    return made


def _normalised_too(rows: tuple[Array, Array]) -> tuple[Array, Array]:
    return _normalised(rows[0]), rows[1]


def _normalise_into(rows: tuple[Array, Array], out: tuple[Array, Array]) -> None:
    np.subtract(rows[0], _MEAN, out=out[0])
    np.multiply(out[0], _SCALE, out=out[0])
    out[1][...] = rows[1]


def _load_picture(columns: tuple[Array, ...], row: int) -> tuple[Any, ...]:
    return _normalised(columns[0][row]), columns[1][row]


def _cifar_job(folder: Path, sizes: Sizes, workers: int, seed: int, budget_bytes: int) -> Job:
    x = np.load(folder / "x.npy")
    columns = (x, np.arange(len(x)))
    job = _row_job(
        x, functools.partial(_load_picture, columns), sizes.cifar_batch,
        workers=workers, seed=seed, budget_bytes=budget_bytes, least_s=sizes.least_s, arrays=columns,
    )  # fmt: skip
    check = _RowCheck(x, epochs=job.most_epochs + 2, shuffled=True, made=_normalised, file=folder / "x.npy")
    return dataclasses.replace(
        job, check=check, finish=_normalised_too, sample_bytes=4 * x[:1].size + 8, load_into=_normalise_into,
        spec=((x.shape[1:], "float32"), ((), "int64")),
    )  # fmt: skip


# latency: each load waits for something far away


def _make_latency(folder: Path, sizes: Sizes, seed: int) -> None:
    np.save(folder / "x.npy", np.random.default_rng(seed).random((sizes.latency_items, 256), dtype=np.float32))


def _load_from_afar(rows: Array, wait_s: float, item: int) -> tuple[Array, int]:
    time.sleep(wait_s)
    return rows[item], item


def _latency_job(folder: Path, sizes: Sizes, workers: int, seed: int, budget_bytes: int) -> Job:
    x = np.load(folder / "x.npy")
    wait_s = sizes.latency_ms / 1000
    return _row_job(
        x, functools.partial(_load_from_afar, x, wait_s), sizes.latency_batch, waiting=True, wait_s=wait_s,
        file=folder / "x.npy",
        workers=workers, seed=seed, budget_bytes=budget_bytes, least_s=sizes.least_s,
    )  # fmt: skip


# slow: one item in 64 takes 50 times as long as the others

_SLOW_GROUP: Final = 64
_SLOW_FACTOR: Final = 50


def _make_slow(folder: Path, sizes: Sizes, seed: int) -> None:
    rng = np.random.default_rng(seed)
    np.save(folder / "x.npy", rng.random((sizes.slow_items, 256), dtype=np.float32))
    # Somewhere in each group, not always first: else a loader with the right batch size is lucky every time.
    units = np.ones((-(-sizes.slow_items // _SLOW_GROUP), _SLOW_GROUP))
    units[np.arange(len(units)), rng.integers(0, _SLOW_GROUP, len(units))] = _SLOW_FACTOR
    np.save(folder / "seconds.npy", units.reshape(-1)[: sizes.slow_items] * sizes.slow_ms / 1000)


def _load_slowly(rows: Array, seconds: Array, item: int) -> tuple[Array, int]:
    # Sleeping, not computing: a two-core machine would otherwise measure what the consumer takes from the workers.
    time.sleep(seconds[item])
    return rows[item], item


def _slow_job(folder: Path, sizes: Sizes, workers: int, seed: int, budget_bytes: int) -> Job:
    x = np.load(folder / "x.npy")
    return _row_job(
        x, functools.partial(_load_slowly, x, np.load(folder / "seconds.npy")), sizes.slow_batch, waiting=True,
        file=folder / "x.npy",
        workers=workers, seed=seed, budget_bytes=budget_bytes, least_s=sizes.least_s,
    )  # fmt: skip


# python: a record of text per sample, parsed by Python code that holds the GIL

_FIELDS: Final = 16
_FIELD_CHARS: Final = 6
_RECORD_CHARS: Final = _FIELDS * _FIELD_CHARS


def _make_python(folder: Path, sizes: Sizes, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 10_000, (sizes.python_rows, _FIELDS))
    (folder / "records.txt").write_bytes(b"".join(b"%05d," % value for value in values.reshape(-1).tolist()))
    np.save(folder / "x.npy", values.astype(np.float32))


class _Records:
    """A load that carries a path, not the records: each process maps the file when it first needs it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._map: mmap.mmap | None = None

    def __reduce__(self) -> tuple[type[_Records], tuple[str]]:
        return _Records, (self._path,)

    def __call__(self, row: int) -> tuple[Array, int]:
        if self._map is None:
            with open(self._path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        text = self._map[row * _RECORD_CHARS : (row + 1) * _RECORD_CHARS]
        return np.array([float(field) for field in text.split(b",")[:_FIELDS]], np.float32), row


def _python_job(folder: Path, sizes: Sizes, workers: int, seed: int, budget_bytes: int) -> Job:
    return _row_job(
        np.load(folder / "x.npy"), _Records(str(folder / "records.txt")), sizes.python_batch,
        workers=workers, seed=seed, budget_bytes=budget_bytes, least_s=sizes.least_s,
    )  # fmt: skip


# lines: a text file, each line made into a row of tokens

_TOKENS: Final = 128
_NUMBER_CHARS: Final = 8


class TextLines(Sequence[str]):
    """The lines of a text file, read from the start whenever they are iterated: what a generator over it gives."""

    def __init__(self, path: str, count: int) -> None:
        self.path, self._count = path, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        with open(self.path, encoding="utf-8") as file:
            for line in file:
                if line := line.strip():
                    yield line

    def __getitem__(self, index: Any) -> Any:
        return list(itertools.islice(self, index.start, index.stop))


def tokenize(line: str) -> Array:
    """A row of a byte-level model's tokens: bytes from 3 on, 1 at the end of the text, 0 behind it."""
    row = np.zeros(_TOKENS, np.int32)
    text = np.frombuffer(line.encode(), np.uint8)[: _TOKENS - 1]
    end = len(text)
    row[:end] = text
    row[:end] += 3
    row[end] = 1
    return row


def _let_go(mapped: Array) -> None:
    """Unmap what was looked at of a file, which else would count as memory of the contender."""
    if isinstance(mapped, np.memmap) and hasattr(mmap, "MADV_DONTNEED"):
        mapped._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]  # NumPy has no other name for it


class TokenCheck:
    """For rows of tokens that begin with the number of their line."""

    def __init__(self, truth: Array, *, epochs: int) -> None:
        self._truth = truth
        self._places = 10 ** np.arange(_NUMBER_CHARS - 1, -1, -1)
        self._ids = np.full(len(truth) * epochs, -1, np.int64)
        self._count = 0
        self._wrong: list[str] = []

    def touch(self, batch: Any) -> None:
        rows = np.asarray(batch)
        here = slice(self._count, self._count + len(rows))
        self._ids[here] = (rows[:, :_NUMBER_CHARS] - (3 + ord("0"))) @ self._places
        self._count = here.stop

    def verify(self, batch: Any) -> None:
        self.touch(batch)
        rows = np.asarray(batch)
        ids = self._ids[self._count - len(rows) : self._count]
        if ids.min() < 0 or ids.max() >= len(self._truth):
            return  # finish() says so
        if form := _other_form(rows, self._truth.shape[1:], np.int32):
            self._wrong.append(form)
        elif not np.array_equal(rows, self._truth[ids]):
            wrong = np.flatnonzero((rows != self._truth[ids]).any(axis=1))
            self._wrong.append(f"{len(wrong)} of {len(rows)} rows of a batch have the tokens of another line")
        _let_go(self._truth)

    def finish(self) -> None:
        lines = len(self._truth)
        epochs, rest = divmod(self._count, lines)
        if rest:
            raise WrongContent(f"{self._count} samples came; that is not a whole number of epochs of {lines}")
        for epoch, ids in enumerate(self._ids[: self._count].reshape(epochs, lines)):
            wrong = np.flatnonzero(ids != np.arange(lines))
            if len(wrong):
                raise WrongContent(
                    f"epoch {epoch} does not hold each of {lines} lines once and in place: {len(wrong)} are wrong"
                )
        if self._wrong:
            raise WrongContent(self._wrong[0])


def _make_lines(folder: Path, sizes: Sizes, seed: int) -> None:
    rng = np.random.default_rng(seed)
    letters = rng.integers(97, 123, 2**20, np.uint8)
    letters[rng.random(2**20) < 0.18] = 32
    text = letters.tobytes()
    truth = np.zeros((sizes.lines, _TOKENS), np.uint8)
    with open(folder / "text.txt", "wb") as file:
        spans = zip(rng.integers(0, 2**20 - 200, sizes.lines), rng.integers(12, 180, sizes.lines), strict=True)
        for number, (start, length) in enumerate(spans):
            line = b"%08d %s." % (number, text[start : start + length])
            file.write(line + (b"\n\n" if number % 50 == 0 else b"\n"))
            row = np.frombuffer(line, np.uint8)[: _TOKENS - 1]
            truth[number, : len(row)] = row + 3
            truth[number, len(row)] = 1
        file.flush()
        os.fsync(file.fileno())
    np.save(folder / "truth.npy", truth)


def _lines_job(folder: Path, sizes: Sizes, workers: int, seed: int, budget_bytes: int) -> Job:
    path = str(folder / "text.txt")
    with open(path, "rb", buffering=0) as file:  # whatever ran before may have pushed it out of the page cache
        while file.read(2**20):
            pass
    epochs = _epochs_with_room(sizes.lines, 8)
    return Job(
        items=TextLines(path, sizes.lines),
        load=tokenize,
        batch_size=sizes.lines_batch,
        sample_bytes=4 * _TOKENS,
        check=TokenCheck(np.load(folder / "truth.npy", mmap_mode="r"), epochs=epochs + 2),
        workers=workers,
        budget_bytes=budget_bytes,
        seed=seed,
        least_s=sizes.least_s,
        most_epochs=epochs,
        text=path,
    )


# ---------------------------------------------------------------- images: JPEG files, decoded and made smaller


# shards: more than fits anywhere, read cold and shuffled

SHARD_WIDTH: Final = 48 * 1024  # float32: 192 KiB a row
_PATTERN: Final = (np.arange(SHARD_WIDTH) % 251).astype(np.float32)
_SHARD_BUDGET: Final = 512 * 2**20
_PROBE_BYTES: Final = 2**22  # more than is read ahead at once
_NPY_HEAD_BYTES: Final = 128  # what np.save writes before such an array


class _ShardCheck:
    """For rows that hold their number plus a pattern, each once an epoch in an order of the contender's own."""

    def __init__(self, rows: int, *, epochs: int) -> None:
        self._rows = rows
        self._ids = np.full(rows * epochs, -1, np.int64)
        self._count = 0
        self._wrong = ""

    def touch(self, batch: Any) -> None:
        self._see(np.asarray(batch), PAGE_BYTES // 4)

    def verify(self, batch: Any) -> None:
        rows = np.asarray(batch)
        self._wrong = self._wrong or _other_form(rows, _PATTERN.shape, np.float32)
        self._see(rows, 1)

    def _see(self, rows: Array, step: int) -> None:
        ids = rows[:, 0].astype(np.int64)
        if not np.array_equal(rows[:, ::step], ids[:, None] + _PATTERN[::step]):
            self._wrong = "a row came with words of other rows"
        self._ids[self._count : self._count + len(ids)] = ids
        self._count += len(ids)

    def finish(self) -> None:
        if self._wrong:
            raise WrongContent(self._wrong)
        epochs, rest = divmod(self._count, self._rows)
        if rest:
            raise WrongContent(f"{self._count} samples came; that is not a whole number of epochs of {self._rows}")
        for epoch, ids in enumerate(self._ids[: self._count].reshape(epochs, self._rows)):
            if not np.array_equal(np.sort(ids), np.arange(self._rows)):
                raise WrongContent(f"epoch {epoch} does not hold each of {self._rows} rows once")
            # The order of the epoch before helps nobody: the files are cold again.
            if why := in_order(ids):
                raise WrongContent(f"epoch {epoch} {why}")


def _lies_in_memory(folder: Path) -> bool:
    """Whether a folder is of a file system that is nothing but memory."""
    device = os.stat(folder).st_dev
    here = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo") as file:
            mounts = [line.partition(" - ") for line in file]
    except OSError:
        return False
    return any(
        place.split()[2] == here and what.split()[0] in ("tmpfs", "ramfs", "devtmpfs") for place, _, what in mounts
    )


def _stays_in_memory(folder: Path) -> str:
    """Why files in a folder are not read from a disk, even after the system was told to forget them.

    Of a file of its own, before there is any data: 8 GiB in a tmpfs could be more than the machine has.
    """
    if not hasattr(os, "RWF_NOWAIT"):
        return ""  # nobody can tell
    path = folder / "probe"
    try:
        with open(path, "w+b", buffering=0) as file:
            file.write(bytes(_PROBE_BYTES))
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            # Once: where it is on the disk, asking has the kernel read it, and what is being read is not forgotten.
            os.preadv(file.fileno(), [bytearray(1)], _PROBE_BYTES // 2, os.RWF_NOWAIT)
    except BlockingIOError:
        return ""  # one would have to wait for it
    except OSError as error:
        # A tmpfs does not know the question either, so that one is asked for by name.
        if error.errno != errno.EOPNOTSUPP:
            raise
        if not _lies_in_memory(folder):
            return ""  # nobody can tell
    finally:
        path.unlink(missing_ok=True)
    return "files in the temporary folder stay in memory, and no disk is read: set TMPDIR to a folder on one"


def _make_shards(folder: Path, sizes: Sizes, seed: int) -> None:  # noqa: ARG001 - rows are told apart by their number
    for shard in range(sizes.shards):
        first = shard * sizes.shards_rows
        path = folder / f"{shard:04}.npy"
        np.save(path, np.arange(first, first + sizes.shards_rows, dtype=np.float32)[:, None] + _PATTERN)
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # what is not on the disk yet cannot be forgotten


def _load_shard_row(item: tuple[str, int]) -> Array:
    path, row = item
    rows: Array = np.fromfile(path, np.float32, SHARD_WIDTH, offset=_NPY_HEAD_BYTES + row * 4 * SHARD_WIDTH)
    return rows


def _shards_job(folder: Path, sizes: Sizes, workers: int, seed: int, budget_bytes: int) -> Job:
    paths = [str(folder / f"{shard:04}.npy") for shard in range(sizes.shards)]
    # Those who cannot shuffle read them in this order, which is as random as any.
    order = np.random.default_rng(seed).permutation(sizes.shards * sizes.shards_rows)
    items = [(paths[row // sizes.shards_rows], int(row % sizes.shards_rows)) for row in order.tolist()]

    def chill() -> float:
        began = time.perf_counter()
        for path in paths:
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return time.perf_counter() - began

    return Job(
        items=items,
        load=_load_shard_row,
        batch_size=sizes.shards_batch,
        sample_bytes=4 * SHARD_WIDTH,
        check=_ShardCheck(len(items), epochs=3 + 2),
        workers=workers,
        budget_bytes=min(budget_bytes, _SHARD_BUDGET),
        seed=seed,
        least_s=sizes.least_s,
        most_epochs=3,
        shuffle=True,
        costly=True,
        source=lambda: importlib.import_module("penstock").arrays(paths),
        chill=chill,
    )


class _ImageCheck:
    """For pictures in the order of their files: some pixels of each in the timed epochs, all of them in the last."""

    def __init__(self, some: Array, whole: Array, *, shape: tuple[int, ...], epochs: int) -> None:
        self._some, self._whole, self._shape = some, whole, shape
        self._seen = np.full(len(some) * epochs, -1, np.int64)
        self._count = 0
        self._wrong: list[str] = []

    def touch(self, batch: Any) -> None:
        pixels = np.asarray(batch)
        here = slice(self._count, self._count + len(pixels))
        self._seen[here] = some_pixels(pixels)
        self._count = here.stop

    def verify(self, batch: Any) -> None:
        first = self._count % len(self._some)
        self.touch(batch)
        if form := _other_form(np.asarray(batch), self._shape, np.uint8):
            self._wrong.append(form)
        sums = all_pixels(np.asarray(batch))
        wrong = np.flatnonzero(sums != self._whole.take(np.arange(first, first + len(sums)), mode="wrap"))
        if len(wrong):
            self._wrong.append(f"{len(wrong)} of {len(sums)} pictures of a batch are wrong, first {first + wrong[0]}")

    def finish(self) -> None:
        epochs, rest = divmod(self._count, len(self._some))
        if rest:
            raise WrongContent(f"{self._count} pictures came: no whole number of epochs of {len(self._some)}")
        wrong = np.flatnonzero(self._seen[: self._count] != np.tile(self._some, epochs))
        if len(wrong):
            raise WrongContent(f"picture {wrong[0]} is another, or comes elsewhere; {len(wrong)} are wrong")
        if self._wrong:
            raise WrongContent(self._wrong[0])


def some_pixels(pixels: Array) -> Array:
    """A number for each picture of a batch, from some of its pixels."""
    picked = pixels[:, ::16, ::16].reshape(len(pixels), -1).astype(np.int64)
    sums: Array = (picked * (1 + np.arange(picked.shape[1]) % 251)).sum(axis=1)
    return sums


def all_pixels(pixels: Array) -> Array:
    """The same from every byte."""
    return np.array([zlib.crc32(picture.tobytes()) for picture in pixels], np.int64)


def photo(rng: np.random.Generator, high: int, wide: int) -> Array:
    """Smooth colours with grain: about the bytes a pixel that photos have."""
    coarse = rng.integers(0, 256, (high // 25 + 2, wide // 25 + 2, 3)).astype(np.float32)
    for axis, size in ((0, high), (1, wide)):
        at = np.linspace(0, coarse.shape[axis] - 1.001, size)
        low = at.astype(int)
        weight = (at - low).astype(np.float32).reshape([-1 if i == axis else 1 for i in range(3)])
        coarse = coarse.take(low, axis) * (1 - weight) + coarse.take(low + 1, axis) * weight
    grain = rng.integers(-12, 13, (high, wide, 1))
    made: Array = (coarse + grain).clip(0, 255).astype(np.uint8)
    return made


def _decoder(sizes: Sizes) -> Any:
    from penstock._core.decode import Decoder

    return Decoder((sizes.images_size, sizes.images_size))


# Of 255. What two right decoders differ by in a picture of its own size; one that shrinks more leaves out more pixels,
# and they may be others. Beyond the second, it is another picture.
_OFF: Final = 2.0
_OFF_MOST: Final = 12.0
_COMPARED: Final = 8


def _compare(path: Path, decoded: Array) -> None:
    """Refuse a picture that is far from what Pillow makes of the same file, all of it decoded and then resized."""
    image: Any = importlib.import_module("PIL.Image")
    with image.open(path) as file:
        full = file.convert("RGB")
    size, bilinear = decoded.shape[:2], image.Resampling.BILINEAR
    high, wide = full.height / size[0], full.width / size[1]
    smooth = full.resize(size[::-1], bilinear)
    plain = full.transform(size[::-1], image.Transform.AFFINE, (wide, 0, 0, 0, high, 0), bilinear)
    # With antialiasing or without: both are right, so that the nearer one counts.
    off = min(float(np.abs(np.asarray(made, np.int16) - decoded).mean()) for made in (smooth, plain))
    most = min(_OFF * max(1.0, high, wide), _OFF_MOST)
    if off > most:
        raise ValueError(
            f"{path.name} as Penstock decodes it is {off:.1f} of 255 from what Pillow makes of it, in the mean, and "
            f"{most:.1f} may be: nobody can be held against such pictures; try other versions of simplejpeg and cv2"
        )


def _make_images(folder: Path, sizes: Sizes, seed: int) -> None:
    image: Any = importlib.import_module("PIL.Image")
    decoder = _decoder(sizes)
    some, whole = [], []
    compared = set(np.linspace(0, sizes.images - 1, _COMPARED).astype(int).tolist())
    for number in range(sizes.images):
        pixels = photo(np.random.default_rng((seed, number)), sizes.images_high, sizes.images_wide)
        path = folder / f"{number:06d}.jpg"
        image.fromarray(pixels).save(path, quality=85)
        decoded = decoder(path)[None]
        if number in compared:  # it is what all are held against, and Penstock's own
            _compare(path, decoded[0])
        some.append(some_pixels(decoded))
        whole.append(all_pixels(decoded))
    np.savez(folder / "truth.npz", some=np.concatenate(some), whole=np.concatenate(whole))


def _images_job(folder: Path, sizes: Sizes, workers: int, seed: int, budget_bytes: int) -> Job:
    truth = np.load(folder / "truth.npz")
    paths = [str(folder / f"{number:06d}.jpg") for number in range(sizes.images)]
    epochs = _epochs_with_room(sizes.images, 8)
    penstock: Any = importlib.import_module("penstock")
    shape = (sizes.images_size, sizes.images_size, 3)
    return Job(
        items=paths,
        load=_decoder(sizes),
        costly=True,
        source=functools.partial(penstock.images, paths, (sizes.images_size, sizes.images_size)),
        batch_size=sizes.images_batch,
        sample_bytes=3 * sizes.images_size**2,
        check=_ImageCheck(truth["some"], truth["whole"], shape=shape, epochs=epochs + 2),
        workers=workers,
        budget_bytes=budget_bytes,
        seed=seed,
        least_s=2 * sizes.least_s,  # an epoch takes about as long: two, or whoever was interrupted once is far off
        most_epochs=epochs,
    )


# Who can do any load: in processes, in threads, and Penstock in each of its ways.
_OURS: Final = ("penstock", "penstock-auto", "penstock-0", "penstock-thread")
_ANY: Final = (
    *_OURS, "loop", "threads", "torch-0", "torch", "torch-fresh", "torch-stateful",
    "tinyloader", "grain", "grain-thread", "grain-default", "spdl", "spdl-process", "spdl-arena", "tf-data",
)  # fmt: skip
# And who gathers rows that are in memory. A plain loop that does is the limit.
_IN_MEMORY: Final = (
    *_OURS, "penstock-process", "threads", "torch-0", "torch", "torch-fresh", "torch-getitems", "torch-stateful",
    "grain-thread", "spdl", "tf-data",
)  # fmt: skip

WORKLOADS: Final = {
    workload.name: workload
    for workload in (
        Workload(
            name="big",
            title="big arrays: .npy files in the page cache",
            contenders=(
                *_ANY, "penstock-into", "penstock-into-auto", "penstock-into-0", "penstock-into-thread",
                "tinyloader-shm", "penstock-tinyloader",
            ),
            limits=("read", "hand-over", "read-1", "memcpy"),
            unit="bytes",
            make=_make_big,
            job=_big_job,
            quick=("penstock", "penstock-into", "loop", "torch"),
        ),
        Workload(
            name="rows",
            title="small rows in memory: float32 and a label, shuffled",
            contenders=_IN_MEMORY,
            limits=("gather",),
            unit="samples",
            make=_make_rows,
            job=_rows_job,
            quick=("penstock", "torch-getitems", "torch"),
        ),
        Workload(
            name="cifar",
            title="small pictures in memory: uint8 and a label, shuffled, normalised",
            contenders=(
                *_IN_MEMORY, "penstock-many", "penstock-many-0", "penstock-many-thread",
            ),
            limits=("gather",),
            unit="samples",
            make=_make_cifar,
            job=_cifar_job,
            quick=("penstock", "penstock-many", "torch-getitems", "torch"),
        ),
        Workload(
            name="python",
            title="small rows, each parsed by a Python load",
            contenders=_ANY,
            limits=("share", "side-by-side"),
            unit="samples",
            make=_make_python,
            job=_python_job,
        ),
        Workload(
            name="lines",
            title="lines of text, each made into tokens of its bytes",
            contenders=(*_ANY, "torch-lines"),
            limits=("loops", "loops-together"),
            unit="samples",
            make=_make_lines,
            job=_lines_job,
        ),
        Workload(
            name="images",
            title="JPEG files, decoded and made smaller",
            contenders=(*_ANY, "penstock-cache", "penstock-half"),
            limits=("share", "side-by-side", "preloaded", "preloaded-shared"),
            unit="samples",
            make=_make_images,
            job=_images_job,
            needs=("PIL", "simplejpeg", "cv2"),
            quick=("penstock", "penstock-auto", "penstock-cache", "torch"),
        ),
        Workload(
            name="latency",
            title="each load waits, as for a network",
            contenders=_ANY,
            limits=("waits",),
            unit="samples",
            make=_make_latency,
            job=_latency_job,
        ),
        Workload(
            name="slow",
            title="one item in 64 takes 50 times as long",
            contenders=_ANY,
            limits=("share",),
            unit="samples",
            make=_make_slow,
            job=_slow_job,
        ),
        Workload(
            name="shards",
            title="rows in .npy shards, shuffled, read from a cold disk",
            contenders=(
                *_OURS, "penstock-blocks", "threads", "torch", "torch-4", "grain", "grain-thread",
                "grain-default", "spdl", "tf-data",
            ),
            limits=("disk", "disk-blocks"),
            unit="bytes",
            make=_make_shards,
            job=_shards_job,
            unfit=_stays_in_memory,
            most_budget_bytes=_SHARD_BUDGET,
            quick=("penstock", "penstock-blocks", "threads", "torch"),
        ),
    )
}  # fmt: skip
