"""What the benchmark sees in the batches of a contender, and that nobody reads ahead while files are forgotten.

No test here asserts a time.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock._bench import workloads
from penstock._bench.contenders import CONTENDERS
from penstock._bench.drive import drive
from penstock._bench.running import Running
from penstock._bench.workloads import WORKLOADS, Job, in_order
from tests.live import changed
from tests.live.changed import Changed, timing_of

TINY = dataclasses.replace(changed.TINY, slow_items=70, lines=1400, shards_rows=42)  # no whole numbers of batches

ALL = ["big", "rows", "cifar", "python", "lines", "images", "latency", "slow", "shards"]


def _job(name: str, folder: Path, **sizes: Any) -> Job:
    those = dataclasses.replace(TINY, **sizes)
    WORKLOADS[name].make(folder, those, 0)
    return WORKLOADS[name].job(folder, those, 2, 0, 2**28)


def _joined(batches: list[Any]) -> Any:
    if isinstance(batches[0], tuple):
        return tuple(np.concatenate(leaves) for leaves in zip(*batches, strict=True))
    return np.concatenate(batches)


def _cut(batch: Any, start: int, stop: int) -> Any:
    return tuple(leaf[start:stop] for leaf in batch) if isinstance(batch, tuple) else batch[start:stop]


def _two_at_a_time(batches: list[Any]) -> list[Any]:
    return [_joined(batches[at : at + 2]) for at in range(0, len(batches), 2)]


def _the_rest_first(batches: list[Any]) -> list[Any]:
    whole, first = _joined(batches), batches[-1]
    sizes = [len(batch[0] if isinstance(batch, tuple) else batch) for batch in (first, *batches[:-1])]
    ends = np.cumsum(sizes).tolist()
    return [_cut(whole, end - size, end) for end, size in zip(ends, sizes, strict=True)]


@pytest.mark.parametrize("name", ALL)
def test_batches_of_another_size_are_found_out(name: str, tmp_path: Path) -> None:
    """All samples, once and in order: but fewer calls, or less to do until the first batch is there."""
    assert "samples came after 0 of" in timing_of(_job(name, tmp_path), _two_at_a_time).wrong


@pytest.mark.parametrize("name", ["python", "slow", "lines", "images", "shards"])
def test_a_rest_that_comes_first_is_found_out(name: str, tmp_path: Path) -> None:
    """The last batch is the one that is not full."""
    job = _job(name, tmp_path)
    assert job.samples % job.batch_size
    assert "were due" in timing_of(job, _the_rest_first).wrong


@pytest.mark.parametrize("name", ALL)
def test_an_epoch_without_a_batch_is_wrong_and_no_crash(name: str, tmp_path: Path) -> None:
    """A contender that gives nothing is told from one that cannot be run; its trial ends as others do."""
    marks: list[str] = []

    def opened(job: Job) -> Running:
        return Changed(job, lambda _: [])

    job = _job(name, tmp_path)
    timing, _ = drive(job, opened, mark=marks.append)
    assert timing.wrong == f"an epoch came with none of its {job.samples} samples"
    assert marks == ["timed", "timed-end", "verified"]
    assert timing.seconds > 0


@pytest.mark.parametrize("name", ["rows", "cifar", "python", "latency", "slow"])
@pytest.mark.parametrize("number", [10**6, -1])
def test_a_number_of_no_row_is_wrong_and_no_crash(name: str, number: int, tmp_path: Path) -> None:
    """Wrong content, as any other."""

    def numbered(batches: list[Any]) -> list[Any]:
        batches[0][1][0] = number
        return batches

    # In the rows' own workload the numbers are the data of all epochs; a copy is changed.
    assert timing_of(_job(name, tmp_path), lambda batches: numbered([(x, y.copy()) for x, y in batches])).wrong


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "odd", [lambda batch: None, lambda batch: batch[:0], lambda batch: [], str], ids=["none", "empty", "list", "text"]
)
def test_what_is_no_batch_at_all_is_wrong_and_no_crash(name: str, odd: Any, tmp_path: Path) -> None:
    """The check was made for arrays; whatever else comes is the contender's mistake, not the check's end."""
    assert timing_of(_job(name, tmp_path), lambda batches: [*batches[:-1], odd(batches[-1])]).wrong


def test_what_a_contender_raises_is_not_taken_for_wrong_content(tmp_path: Path) -> None:
    """It failed, and the trial with it."""

    def broken(batches: list[Any]) -> list[Any]:
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        timing_of(_job("python", tmp_path), broken)


def _wider(batch: Any) -> Any:
    leaf = batch[0] if isinstance(batch, tuple) else batch
    wide = leaf.astype(np.float64 if leaf.dtype.kind == "f" else np.int64)
    return (wide, *batch[1:]) if isinstance(batch, tuple) else wide


@pytest.mark.parametrize("name", ALL)
def test_another_type_of_the_same_values_is_found_out(name: str, tmp_path: Path) -> None:
    """Twice the bytes, or half of them, is other work."""
    assert timing_of(_job(name, tmp_path), lambda batches: [_wider(batch) for batch in batches]).wrong


@pytest.mark.parametrize("name", ["big", "images"])
def test_another_type_of_the_same_bytes_is_found_out(name: str, tmp_path: Path) -> None:
    """Where sums of bytes are compared, which do not know what the bytes mean."""
    kinds = {"big": np.int32, "images": np.int8}
    assert timing_of(_job(name, tmp_path), lambda batches: [batch.view(kinds[name]) for batch in batches]).wrong


def _ordered(job: Job, order: Any) -> list[Any]:
    """The batches of one epoch with the rows in this order."""
    batches: list[Any]
    if job.arrays is None:  # the items are a permutation themselves, of paths and rows
        rows = sorted(job.items)
        batches = [np.stack([job.load(rows[row]) for row in some]) for some in _chunks(job, order)]
    else:
        batches = [tuple(column[some] for column in job.arrays) for some in _chunks(job, order)]
    return batches if job.finish is None else [job.finish(batch) for batch in batches]


def _chunks(job: Job, order: Any) -> list[Any]:
    return [order[start : start + job.batch_size] for start in range(0, job.samples, job.batch_size)]


def _files_rotated(rows: Any) -> Any:
    """Each third of the rows begins one later."""
    return np.concatenate([np.roll(part, -1) for part in np.array_split(rows, 3)])


def _some_in_order(rows: Any) -> Any:
    """Nearly all are shuffled, but one in four."""
    quarter = len(rows) // 4
    rest = np.random.default_rng(3).permutation(rows[quarter:])
    return np.concatenate([rest, rows[:quarter]])


@pytest.mark.parametrize("name", ["rows", "cifar", "shards"])
@pytest.mark.parametrize(
    "order",
    [
        lambda rows: rows,
        lambda rows: rows[::-1],
        lambda rows: np.roll(rows, 1),
        lambda rows: np.concatenate([rows[::2], rows[1::2]]),
        _files_rotated,
        _some_in_order,
    ],
    ids=["in order", "backwards", "begun elsewhere", "even, then odd", "files rotated", "a quarter in order"],
)
def test_rows_that_follow_their_neighbours_are_not_shuffled(name: str, order: Any, tmp_path: Path) -> None:
    """Otherwise a loader could read in the order of the source, which is faster."""
    job = _job(name, tmp_path)
    batches = _ordered(job, order(np.arange(job.samples)))
    assert "was to be shuffled, and " in timing_of(job, lambda _: batches).wrong
    rng = np.random.default_rng(5)
    assert timing_of(_job(name, tmp_path), lambda _: _ordered(job, rng.permutation(job.samples))).wrong == ""
    same = _ordered(job, np.random.default_rng(5).permutation(job.samples))
    wrong = timing_of(_job(name, tmp_path), lambda _: same).wrong
    assert wrong == (
        f"epoch 1 was to be shuffled anew, and {job.samples} of {job.samples} samples come where they came in the "
        "epoch before"
        if name != "shards"
        else ""
    )


def test_no_random_order_is_taken_for_that_of_the_source() -> None:
    """Short ones have more neighbours by chance, as a part of all."""
    rng = np.random.default_rng(0)
    for rows in (1, 2, 10, 26, 40, 70, 300, 3000):
        assert not any(in_order(rng.permutation(rows)) for _ in range(300))
    assert in_order(np.arange(40)) == "was to be shuffled, and 39 of 40 samples lie 1 from the one before"
    windows = rng.permuted(np.arange(6400).reshape(-1, 64), axis=1).ravel()
    assert in_order(windows).startswith("was to be shuffled, and of 6400 samples each lies about 2")


@pytest.mark.parametrize("name", ["rows", "cifar", "latency", "slow"])
def test_a_source_that_was_changed_is_no_truth(name: str, tmp_path: Path) -> None:
    """What is read is compared with the array that it is read from: whoever changes that changes both."""
    job = _job(name, tmp_path)
    load: Any = job.load
    source = job.arrays[0] if job.arrays is not None else load.args[0]
    source[-1].reshape(-1)[-1] += 1
    last = job.samples - 1
    assert timing_of(job, lambda batches: batches).wrong == (
        f"the array that the rows are read from was changed: row {last} is not that of its file"
    )


@pytest.mark.parametrize("places", [(1, 2), (3, 511), (255, 511)])
def test_words_that_change_places_within_a_page_are_found_out(places: tuple[int, int], tmp_path: Path) -> None:
    """Their sum is the same."""

    def swapped(batches: list[Any]) -> list[Any]:
        words = batches[-1].reshape(-1).view(np.uint64)
        words[list(places)] = words[list(places[::-1])]
        return batches

    assert "1 wrong pages of 16" in timing_of(_job("big", tmp_path), swapped).wrong


@pytest.mark.parametrize("bit", [0, 31, 63])
@pytest.mark.parametrize("place", [1, 256, 511])
def test_each_bit_of_a_page_counts(bit: int, place: int, tmp_path: Path) -> None:
    """Also the highest ones, which a product could lose."""

    def flipped(batches: list[Any]) -> list[Any]:
        batches[-1].reshape(-1).view(np.uint64)[place] ^= np.uint64(1 << bit)
        return batches

    assert timing_of(_job("big", tmp_path), flipped).wrong


@pytest.mark.parametrize("name", ["python", "shards"])
def test_a_batch_that_is_larger_than_the_data_has_no_speed_after_it(name: str, tmp_path: Path) -> None:
    """It was a negative one."""
    job = _job(name, tmp_path, python_batch=1000, shards_batch=1000)
    timing = timing_of(job, lambda batches: batches)
    assert (timing.wrong, timing.first_epoch_samples_per_s) == ("", None)
    job = _job(name, tmp_path)
    assert (timing_of(job, lambda batches: batches).first_epoch_samples_per_s or 0) > 0


@pytest.mark.parametrize("contender", ["torch-0", "torch", "torch-fresh", "torch-lines", "torch-stateful"])
def test_lines_that_torch_deals_to_its_workers_are_full_batches_in_order(contender: str, tmp_path: Path) -> None:
    """1,400 lines are five batches and a rest, which only one of the two workers may end on."""
    for module in CONTENDERS[contender].needs:
        pytest.importorskip(module)
    assert drive(_job("lines", tmp_path), CONTENDERS[contender].open, mark=lambda _: None)[0].wrong == ""


@pytest.mark.parametrize(
    "change",
    [lambda pixels: pixels[..., ::-1], lambda pixels: pixels[::-1], lambda pixels: pixels.swapaxes(0, 1),
     lambda pixels: pixels + np.uint8(6), np.zeros_like],
    ids=["colours", "upside down", "on its side", "brighter", "black"],
)  # fmt: skip
@pytest.mark.parametrize("sizes", [{}, {"images_high": 350, "images_wide": 400, "images_size": 224}], ids=["tiny", ""])
def test_a_decoder_that_is_wrong_makes_no_truth(
    change: Any, sizes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it decodes is what contenders are held against, and most of them use the same."""
    decoder = workloads._decoder(dataclasses.replace(TINY, **sizes))
    monkeypatch.setattr(workloads, "_decoder", lambda _: lambda path: np.ascontiguousarray(change(decoder(path))))
    with pytest.raises(ValueError, match=r"000000\.jpg as Penstock decodes it is [\d.]+ of 255 from what Pillow makes"):
        _job("images", tmp_path, images=10, **sizes)


@pytest.mark.parametrize(
    ("high", "wide", "size"),
    [(350, 400, 224), (350, 400, 64), (350, 400, 500), (700, 800, 32), (40, 50, 8), (8, 8, 64)],
)
def test_the_decoder_is_right_whatever_the_size(high: int, wide: int, size: int, tmp_path: Path) -> None:
    """Otherwise the workload could be run with its own sizes only."""
    _job("images", tmp_path, images=3, images_high=high, images_wide=wide, images_size=size)
    assert (tmp_path / "truth.npz").exists()


# ---------------------------------------- while files are forgotten


def _states(pids: list[int]) -> set[str]:
    return {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids}


class _Busy:
    """A loop with a process beside it, which has one of its own, and both run all the time."""

    def __init__(self, job: Job) -> None:
        self._loop = CONTENDERS["loop"].open(job)
        run = "while True: pass"
        start = (
            f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {run!r}]); print(p.pid, flush=True)"
        )
        self.process = subprocess.Popen([sys.executable, "-c", f"{start}\n{run}"], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.pids = [self.process.pid, int(self.process.stdout.readline())]

    def epochs(self) -> Iterator[Any]:
        return self._loop.epochs()

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        for pid in self.pids:
            os.kill(pid, 9)
        self.process.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="processes are stopped on Linux")
@pytest.mark.parametrize("fails", [False, True])
def test_processes_are_stopped_while_files_are_forgotten_and_run_again_after_it(fails: bool, tmp_path: Path) -> None:
    """Otherwise what they read ahead meanwhile would count for nobody."""
    job = _job("shards", tmp_path)
    opened: list[_Busy] = []
    during: list[set[str]] = []
    after: list[set[str]] = []

    def chill() -> float:
        during.append(_states(opened[0].pids))
        if fails:
            raise OSError("no disk")
        return 0.0

    class Busy(_Busy):
        def __init__(self, job: Job) -> None:
            super().__init__(job)
            opened.append(self)

        def close(self) -> None:
            after.append(_states(self.pids))
            super().close()

    job = dataclasses.replace(job, chill=chill)
    if fails:
        with pytest.raises(OSError, match="no disk"):
            drive(job, Busy, mark=lambda _: None)
    else:
        drive(job, Busy, mark=lambda _: None)
        assert len(during) >= 2  # before the first epoch, and before each that is timed
    assert all(states == {"T"} for states in during)
    assert not after[0] & {"T", "t"}


@pytest.mark.skipif(sys.platform != "linux", reason="processes are stopped on Linux")
@pytest.mark.parametrize("contender", ["penstock", "penstock-blocks", "penstock-auto", "torch", "torch-fresh", "grain"])
def test_a_loader_goes_on_after_its_workers_were_stopped(contender: str, tmp_path: Path) -> None:
    """A worker that is stopped is not dead: it is not started anew, and its samples come."""
    for module in CONTENDERS[contender].needs:
        pytest.importorskip(module)
    job = _job("shards", tmp_path)
    chill = job.chill
    assert chill is not None

    def slowly() -> float:
        time.sleep(0.3)  # longer than anything looks away
        return chill()

    timing, facts = drive(dataclasses.replace(job, chill=slowly), CONTENDERS[contender].open, mark=lambda _: None)
    assert timing.wrong == ""
    assert not facts.get("restarts")
