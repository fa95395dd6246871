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
from penstock._bench.claims import CLAIMS, judge
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
    cifar_rows=300,
    cifar_batch=32,
    latency_items=40,
    latency_ms=0.05,
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


@pytest.mark.parametrize("name", ["big", "python", "slow", "latency", "lines", "images"])
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


@pytest.mark.parametrize("name", ["shards", "rows", "cifar"])
@pytest.mark.parametrize(
    "change",
    [lambda batches: batches[:-1], lambda batches: [*batches[:-1], batches[0]], _one_byte_off],
    ids=["one missing", "one twice", "one byte off"],
)
def test_wrong_rows_of_a_shuffled_epoch_are_found_out(name: str, change: Any, tmp_path: Path) -> None:
    """These come in any order but that of the source."""
    assert _wrong(_job(name, tmp_path), change)


@pytest.mark.parametrize("name", ["big", "python", "slow", "latency", "lines", "images", "shards", "rows", "cifar"])
def test_right_content_passes_the_check(name: str, tmp_path: Path) -> None:
    """Otherwise the check would prove nothing when it complains."""
    assert _wrong(_job(name, tmp_path), lambda batches: batches) == ""


@pytest.mark.parametrize("name", ["rows", "cifar"])
def test_an_order_that_was_to_be_shuffled_and_is_not_is_found_out(name: str, tmp_path: Path) -> None:
    """Otherwise slices could be served in place of gathers."""
    job = _job(name, tmp_path)
    in_order = [tuple(column[start : start + job.batch_size] for column in job.arrays or ())
                for start in range(0, job.samples, job.batch_size)]  # fmt: skip
    batches = in_order if job.finish is None else [job.finish(batch) for batch in in_order]
    assert "shuffled" in _wrong(job, lambda _: batches)


def test_every_workload_names_contenders_limits_and_claims_that_exist() -> None:
    """Otherwise a typing error would drop a contender without a word."""
    for workload in WORKLOADS.values():
        assert set(workload.contenders) <= CONTENDERS.keys()
        assert set(workload.quick) <= set(workload.contenders)
        assert set(workload.limits) <= LIMITS.keys()
    for claim in CLAIMS:
        workload = WORKLOADS[claim.workload]
        assert {claim.contender, *claim.others} <= {*workload.contenders, *workload.limits}
        assert claim.contender not in claim.others


def test_what_is_promised_of_the_interfaces_is_judged() -> None:
    """tinyloader's own with its plain workers; and lines with two against one process."""
    promised = {(c.workload, c.contender, *c.others): c.wanted for c in CLAIMS if c.measure == "rate"}
    assert promised["big", "penstock-tinyloader", "tinyloader"] >= 5
    assert promised["lines", "penstock", "loop"] >= 1.7


def test_every_workload_has_a_claim_about_its_rate_its_memory_and_the_choice_of_workers() -> None:
    """Otherwise a workload could be measured and nothing promised of it."""
    for workload in WORKLOADS.values():
        said = [claim for claim in CLAIMS if claim.workload == workload.name]
        assert {"rate", "peak", "added", "budget", "gap"} <= {claim.measure for claim in said}
        assert "penstock-auto" in {claim.contender for claim in said}


def _summary(contender: str, samples_per_s: float, **more: Any) -> harness.Summary:
    known = {"status": "ok", "rounds": 3, "low": samples_per_s, "high": samples_per_s, "bytes_per_s": samples_per_s}
    kind = "limit" if contender in LIMITS else "ours" if CONTENDERS[contender].ours else "peer"
    return harness.Summary("big", contender, kind, **{**known, "samples_per_s": samples_per_s, **more})


def _verdicts(*summaries: harness.Summary) -> dict[str, tuple[str, str, str]]:
    return {v.claim.text.removeprefix("big: "): (v.got_text, v.word, v.note) for v in judge(summaries)}


def test_a_claim_is_held_against_the_best_of_those_that_were_right() -> None:
    """Otherwise a peer that gives wrong samples quickly could decide, or a slow one be chosen to be beaten."""
    verdicts = _verdicts(
        _summary("penstock", 100.0),
        _summary("torch", 20.0),
        _summary("spdl-arena", 60.0),
        _summary("tinyloader", 400.0, status="wrong"),
    )
    assert verdicts["penstock: rate, times that of torch"] == ("5.00", "yes", "")
    got, holds, note = verdicts["penstock: rate, times that of the best multi-process peer"]
    assert (got, holds) == ("1.67", "NO")
    assert note == "that is spdl-arena, tinyloader gave wrong content"
    assert not any("penstock-into" in text for text in verdicts)  # it was not run


def test_a_claim_about_a_contender_that_failed_is_not_judged() -> None:
    """Neither yes nor no: nothing was measured."""
    verdicts = _verdicts(_summary("penstock", 100.0, status="wrong"), _summary("torch", 20.0))
    assert verdicts["penstock: rate, times that of torch"] == ("-", "not judged", "penstock gave wrong content")
    skipped = harness.Summary("big", "torch", "peer", "skipped", "torch is not installed")
    verdicts = _verdicts(_summary("penstock", 100.0), skipped)
    assert verdicts["penstock: rate, times that of torch"] == ("-", "not judged", "torch was skipped")


def test_claims_about_memory_starts_and_gaps_say_yes_and_no() -> None:
    """Each kind of claim can fail."""
    loop = _summary("loop", 50.0, first_batch_s=0.1)
    torch = _summary("torch", 20.0, peak_bytes=400, added_bytes=200)
    good = _summary(
        "penstock",
        100.0,
        peak_bytes=200,
        added_bytes=100,
        budget_bytes=100,
        first_batch_s=0.3,
        gap_s=0.01,
        batch_s=0.01,
    )
    bad = dataclasses.replace(
        good, samples_per_s=10.0, added_bytes=101, budget_bytes=100, first_batch_s=0.5, gap_s=0.02
    )  # fmt: skip
    names = [
        "penstock: peak memory of all processes, times that of torch, and as fast",
        "penstock: memory added at the peak, times that of torch, and as fast",
        "penstock: memory added, of the budget",
        "penstock: seconds to the first batch, beyond loop",
        "penstock: gap between epochs, in batches",
    ]
    assert [_verdicts(good, torch, loop)[name][1] for name in names] == ["yes"] * 5
    assert [_verdicts(bad, torch, loop)[name][1] for name in names] == ["NO"] * 5
    assert _verdicts(bad, torch, loop)[names[0]] == ("0.50", "NO", "but slower")


def test_figures_that_vary_or_are_few_are_doubted() -> None:
    """A ratio of one round on a busy machine is no evidence, and says so."""
    few, torch = _summary("penstock", 100.0, rounds=2), _summary("torch", 20.0)
    assert _verdicts(few, torch)["penstock: rate, times that of torch"][2] == "fewer than 3 rounds"
    varied = _summary("penstock", 100.0, low=70.0)
    assert _verdicts(varied, torch)["penstock: rate, times that of torch"][2] == "but penstock varied by 30%"


_NEEDED = {"torch": ["torch"], "torchdata": ["torch-stateful"], "tinyloader": ["tinyloader"],
           "grain": ["grain", "grain-thread"], "spdl": ["spdl", "spdl-process", "spdl-arena"]}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "contender"), [(module, name) for module, names in _NEEDED.items() for name in names]
)
def test_a_peer_that_is_installed_gives_right_content_on_every_workload(module: str, contender: str) -> None:
    """Otherwise it would be our fault that it looks bad."""
    pytest.importorskip(module, reason=f"{contender} needs {module}")
    workloads = tuple(name for name, workload in WORKLOADS.items() if contender in workload.contenders)
    setup = harness.Setup(
        workloads=workloads, contenders=(contender,), sizes=TINY, rounds=1, memory_rounds=0, timeout_s=60
    )
    found = [summary for summary in harness.run(setup).summaries if summary.kind == "peer"]
    assert {summary.workload: (summary.status, summary.reason) for summary in found} == dict.fromkeys(
        workloads, ("ok", "")
    )


@pytest.mark.parametrize(
    "name", ["rows", *(pytest.param(n, marks=pytest.mark.slow) for n in ("cifar", "latency", "images"))]
)
def test_penstock_gives_right_content_in_each_of_its_ways(name: str) -> None:
    """The choices that `num_workers=None` is held against are the same samples."""
    ours = tuple(contender for contender in WORKLOADS[name].contenders if CONTENDERS[contender].ours)
    setup = harness.Setup(workloads=(name,), contenders=ours, sizes=TINY, rounds=1, memory_rounds=0)
    found = [summary for summary in harness.run(setup).summaries if summary.kind == "ours"]
    assert {summary.contender: summary.status for summary in found} == dict.fromkeys(ours, "ok"), found


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
    text = report.as_text(results)
    assert "penstock / it" in text
    assert re.search(r"penstock: rate, times that of loop +>= 1.7 +\d", text)
    assert "| claim | wanted | got | holds |  |" in report.as_markdown(results)


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
