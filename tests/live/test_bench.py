"""The benchmark itself: that it runs, sees wrong content, and that its pages say so. No test here asserts a time."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from penstock._bench import faults, harness, memory, report
from penstock._bench.cases import CASES, COSTS
from penstock._bench.claims import CLAIMS
from penstock._bench.contenders import CONTENDERS
from penstock._bench.drive import drive
from penstock._bench.limits import LIMITS
from penstock._bench.running import Running
from penstock._bench.workloads import WORKLOADS, Job, Sizes
from penstock._core.program import Pad

TINY = Sizes(
    big_files=3,
    big_bytes=64 * 1024,
    big_samples=8,
    rows=700,
    slow_items=64,
    slow_ms=0.05,
    python_rows=600,
    lines=600,
    shards=3,
    shards_rows=40,
    shards_batch=8,
    images=70,
    images_high=40,
    images_wide=50,
    images_size=24,
    memory_medium=70,
    memory_temporaries=8,
    memory_leaks=30,
    memory_paths=6000,
    memory_ragged=40,
    least_s=0.02,
)


def _job(name: str, folder: Path) -> Job:
    WORKLOADS[name].make(folder, TINY, 0)
    return WORKLOADS[name].job(folder, TINY, 2, 0, 2**28)


class _Changed:
    """A plain loop whose batches are changed on the way."""

    def __init__(self, job: Job, change: Any) -> None:
        self._loop, self._change = CONTENDERS["loop"].open(job), change

    def epochs(self) -> Iterator[Any]:
        for epoch in self._loop.epochs():
            yield self._change(list(epoch))

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._loop.close()


def _wrong(job: Job, change: Any) -> str:
    def opened(job: Job) -> Running:
        return _Changed(job, change)

    timing, _ = drive(job, opened, mark=lambda _: None)
    return timing.wrong


def _one_byte_off(batches: list[Any]) -> list[Any]:
    leaf = batches[-1][0] if isinstance(batches[-1], tuple) else batches[-1]
    raw = leaf.reshape(-1).view(np.uint8)
    raw[-1] ^= 1  # in the last byte: what is touched in the timed epochs does not see it
    return batches


@pytest.mark.parametrize("name", ["big", "python", "slow", "lines", "images"])
@pytest.mark.parametrize(
    "change",
    [
        lambda batches: batches[:-1],
        lambda batches: [*batches[:-1], batches[0]],
        lambda batches: batches[::-1],
        _one_byte_off,
    ],
    ids=["one missing", "one twice", "out of order", "one byte off"],
)
def test_a_contender_with_wrong_content_is_found_out(name: str, change: Any, tmp_path: Path) -> None:
    """Otherwise a loader could win by delivering the wrong thing quickly."""
    assert _wrong(_job(name, tmp_path), change)


@pytest.mark.parametrize(
    "change",
    [lambda batches: batches[:-1], lambda batches: [*batches[:-1], batches[0]], _one_byte_off],
    ids=["one missing", "one twice", "one byte off"],
)
def test_wrong_rows_of_shards_are_found_out(change: Any, tmp_path: Path) -> None:
    """These come in any order but that of the files."""
    assert _wrong(_job("shards", tmp_path), change)


@pytest.mark.parametrize("name", ["big", "python", "slow", "lines", "images", "shards"])
def test_right_content_passes_the_check(name: str, tmp_path: Path) -> None:
    """Otherwise the check would prove nothing when it complains."""
    assert _wrong(_job(name, tmp_path), lambda batches: batches) == ""


def test_an_order_that_was_to_be_shuffled_and_is_not_is_found_out(tmp_path: Path) -> None:
    """Otherwise slices could be served in place of gathers."""
    job = _job("rows", tmp_path)
    assert "shuffled" in _wrong(job, lambda batches: batches)


def test_every_workload_names_contenders_limits_and_claims_that_exist() -> None:
    """Otherwise a typing error would drop a contender without a word."""
    for workload in WORKLOADS.values():
        assert set(workload.contenders) <= CONTENDERS.keys()
        assert set(workload.limits) <= LIMITS.keys()
    for claim in CLAIMS:
        workload = WORKLOADS[claim.workload]
        assert {claim.contender, claim.other} <= {*workload.contenders, *workload.limits}


def test_a_tiny_run_gives_numbers_for_everyone_and_files_that_open(tmp_path: Path) -> None:
    """Otherwise `make bench` would be broken on the day someone doubts a figure."""
    setup = harness.Setup(
        workloads=("big", "python", "lines"),
        contenders=("loop", "threads", "penstock"),
        sizes=TINY,
        rounds=1,
        memory_rounds=0,
    )
    told: list[str] = []
    results = harness.run(setup, tell=told.append)
    for summary in results.summaries:
        assert summary.status == "ok", summary
        assert summary.samples_per_s
        if summary.kind != "limit":
            assert summary.first_batch_s is not None
            assert summary.gap_s is not None
            assert not summary.left_behind
            if sys.platform == "linux":
                assert summary.peak_bytes
                assert summary.added_bytes is not None
    assert {summary.contender for summary in results.summaries} >= {"loop", "threads", "penstock", "read", "share"}
    assert len(told) >= len(results.outcomes)

    saved, page = report.write(results, tmp_path / "out")
    assert json.loads(saved.read_text())["summaries"][0]["workload"] == "big"
    text = page.read_text()
    assert not re.search(r"""(src|href)\s*=|@import|url\(""", text)
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ET.fromstring(drawing)
    assert "penstock / it" in report.as_text(results)


def test_a_tiny_run_of_the_benchmark_of_memory_gives_numbers_for_everyone(tmp_path: Path) -> None:
    """Otherwise the table in docs/memory.md could not be printed again."""
    found = memory.run(sizes=TINY, rounds=1, cost_rounds=1, contenders=("penstock",))
    assert [s.workload for s in (*found.cases.summaries, *found.costs.summaries)] == [
        *CASES,
        *(name for name in COSTS for _ in range(2)),
    ]
    for summary in (*found.cases.summaries, *found.costs.summaries):
        assert (summary.status, summary.left_behind) == ("ok", 0), summary
        assert summary.samples_per_s
    text = memory.as_text(found)
    for case in (*CASES.values(), *COSTS.values()):
        assert case.title in text
    if sys.platform == "linux":  # what looking at memory took, in percent of all processor time
        rows = [line for line in text.splitlines() for case in COSTS.values() if line.startswith(case.title)]
        assert len(rows) == len(COSTS)
        assert all(0 < float(row.rpartition(" ")[2].rstrip("%")) < 100 for row in rows)
    saved = json.loads(memory.write(found, tmp_path / "out").read_text())
    assert saved["costs"]["ratios"]["cost-rows"]["speed"]["rounds"] == 1
    assert saved["cases"]["ratios"]["leak"]["speed"] is None  # the peer was left out
    if sys.platform == "linux":
        for summary in found.cases.summaries:
            assert summary.added_bytes is not None
            assert summary.added_bytes <= (CASES[summary.workload].budget_bytes or 0), summary


@pytest.mark.parametrize("name", ["medium", "ragged", "leak"])
def test_a_case_of_memory_with_wrong_content_is_found_out(name: str) -> None:
    """Otherwise a loader could need little by leaving something out."""

    def opened(job: Job, change: Any) -> Running:
        def batch(start: int) -> Any:
            samples = [job.load(item) for item in job.items[start : start + job.batch_size]]
            return Pad()(samples) if job.pad else np.stack(samples)

        class Few:
            def epochs(self) -> Iterator[Any]:
                while True:
                    yield change([batch(start) for start in range(0, job.samples, job.batch_size)])

            def facts(self) -> dict[str, Any]:
                return {}

            def close(self) -> None:
                pass

        return Few()

    def wrong(change: Any) -> str:
        job = CASES[name].job(Path(), TINY, 2, 0, 2**28)
        return drive(job, lambda job: opened(job, change), mark=lambda _: None)[0].wrong

    def one_value_off(batches: list[Any]) -> list[Any]:
        data = batches[-1][0] if name == "ragged" else batches[-1]
        data[-1, -1] += 1
        return batches

    assert wrong(lambda batches: batches) == ""
    assert wrong(lambda batches: batches[:-1])
    assert wrong(lambda batches: batches[::-1])
    assert wrong(one_value_off)


def test_a_missing_framework_is_skipped_by_name_and_a_broken_contender_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise one absent package would end the benchmark of all the others."""
    loop = CONTENDERS["loop"]
    monkeypatch.setitem(CONTENDERS, "torch", dataclasses.replace(CONTENDERS["torch"], needs=("no_such_framework",)))
    setup = harness.Setup(workloads=("slow",), contenders=("loop", "torch"), sizes=TINY, rounds=1, memory_rounds=0)
    results = harness.run(setup)
    by_name = {summary.contender: summary for summary in results.summaries}
    assert (by_name["torch"].status, by_name["torch"].reason) == ("skipped", "no_such_framework is not installed")
    assert by_name["loop"].status == "ok"
    assert "torch: skipped: no_such_framework is not installed" in report.as_text(results)
    assert loop.title in report.as_html(results)

    broken = harness.Outcome("slow", "loop", 0, "failed", "ValueError: no")
    wrong = harness.Outcome("slow", "threads", 0, "wrong", "row 3", result={"samples_per_s": 5.0, "bytes_per_s": 9.0})
    results = dataclasses.replace(results, summaries=harness.summarize([broken, wrong]))
    text = report.as_text(results)
    assert "loop: failed: ValueError: no" in text
    assert "threads: ! WRONG CONTENT: row 3" in text


def test_the_command_line_knows_its_sizes_and_contenders() -> None:
    """Otherwise a flag in the help would do nothing."""
    said = subprocess.run(
        [sys.executable, "-m", "penstock", "bench", "--help"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    for field in dataclasses.fields(Sizes):
        assert f"--{field.name.replace('_', '-')} " in said
    assert "--quick" in said
    assert "tinyloader-shm" in said


# ---------------------------------------- faults


@pytest.mark.skipif(sys.platform != "linux", reason="kills workers in the way of Linux")
def test_a_tiny_run_of_the_benchmark_of_faults_loses_nothing(tmp_path: Path) -> None:
    """Peace and fire in turns, numbers for both, and a table that says so."""
    found = faults.run(items=600, rounds=1, every_s=0.05, methods=("fork",))
    peace, fire = found.runs
    assert (peace.right, peace.under_fire, peace.kills, peace.back_s) == (True, False, 0, ())
    assert (fire.right, fire.under_fire) == (True, True)
    assert fire.kills > 0
    assert len(fire.back_s) <= fire.kills
    assert all(wait_s > 0 for wait_s in fire.back_s)
    text = faults.as_text(found)
    assert "600 items of 1 ms, 2 workers, one killed every 50 ms" in text
    assert "yes" in text.splitlines()[-1]
    saved = json.loads(faults.write(found, tmp_path / "out").read_text())
    assert saved["runs"][1]["kills"] == fire.kills


def test_a_lost_sample_shows_in_the_table_of_faults() -> None:
    """A benchmark that cannot say no proves nothing."""
    runs = tuple(faults.Run("fork", fire, not fire, 100.0, int(fire), ()) for fire in (False, True))
    assert " NO " in faults.as_text(faults.Found(runs, 10, 2, 0.25))


def test_each_kill_is_followed_by_the_newcomer_that_came_next() -> None:
    """Two kills, two newcomers; a third kill whose place was never taken is left out."""
    #                    item, who, since when
    samples = np.array([[0, 1, 0.1], [1, 2, 0.2], [2, 1, 1.05], [3, 3, 1.1], [4, 4, 2.4], [5, 3, 2.2], [6, 4, 3.5]])
    assert faults.back_s([1.0, 2.0, 3.0], samples) == pytest.approx([0.1, 0.4])
    assert faults.back_s([], samples) == []
