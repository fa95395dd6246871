"""The benchmark itself: that it runs, sees wrong content, and that its pages say so. No test here asserts a time."""

from __future__ import annotations

import dataclasses
import errno
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from penstock import _cli
from penstock._bench import faults, harness, memory, report, watch, workloads
from penstock._bench.cases import CASES, COSTS
from penstock._bench.claims import CLAIMS, judge
from penstock._bench.contenders import CONTENDERS
from penstock._bench.drive import drive
from penstock._bench.limits import LIMITS
from penstock._bench.running import Running
from penstock._bench.trial import Order
from penstock._bench.workloads import FULL, QUICK, WORKLOADS, Job, Sizes
from penstock._core.program import Pad
from tests.live.changed import TINY, timing_of


def _job(name: str, folder: Path) -> Job:
    WORKLOADS[name].make(folder, TINY, 0)
    return WORKLOADS[name].job(folder, TINY, 2, 0, 2**28)


def _wrong(job: Job, change: Any) -> str:
    return timing_of(job, change).wrong


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
    rounds = more.get("rounds", 3)
    known = {"status": "ok", "rounds": rounds, "peak_rounds": rounds, "low": samples_per_s, "high": samples_per_s,
             "bytes_per_s": samples_per_s}  # fmt: skip
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
    assert note.startswith("that is spdl-arena, tinyloader gave wrong content; not run: ")
    assert not any("penstock-into" in text for text in verdicts)  # it was not run


def test_a_claim_names_those_who_might_have_been_better_and_did_not_run() -> None:
    """Otherwise the best of two would pass for the best of all."""
    name = "penstock: rate, times that of the best multi-process peer"
    others = next(c.others for c in CLAIMS if f"big: {name}" == c.text)
    ran = [_summary("penstock", 100.0), *(_summary(other, 20.0) for other in others)]
    assert _verdicts(*ran)[name][1] == "yes"
    assert "not run" not in _verdicts(*ran)[name][2]
    assert _verdicts(*ran[:-1])[name][1] == "not judged"
    assert _verdicts(*ran[:-1])[name][2].endswith(f"; not run: {others[-1]}")
    slower = [_summary("penstock", 30.0), *ran[1:-1]]
    assert _verdicts(*slower)[name][1] == "NO"  # whoever else there is
    skipped = harness.Summary("big", others[-1], "peer", "skipped", "it is not installed")
    assert _verdicts(*ran[:-2], skipped)[name][2].endswith(f"; not run: {others[-2]}, {others[-1]}")
    assert _verdicts(*ran[:2])[name][2].endswith(
        f"; not run: {others[1]}, {others[2]}, {others[3]} and {len(others) - 4} more"
    )


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
    figures = {"peak_bytes": 9, "added_bytes": 9, "budget_bytes": 9, "first_batch_s": 0.1, "gap_s": 0.1, "batch_s": 0.1}
    by = {v.claim.measure: v.note for v in judge([
        _summary(name, 50.0, rounds=2, **figures) for name in ("penstock", "torch", "loop")
    ])}  # fmt: skip
    assert {by[measure] for measure in ("peak", "added", "budget", "first", "gap")} == {"fewer than 3 rounds"}
    seen = _summary("penstock", 50.0, rounds=2, peak_rounds=3, **figures)  # once more, only for its memory
    assert {v.claim.measure: v.note for v in judge([seen])} == {"budget": "", "gap": "fewer than 3 rounds"}
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
    results = harness.run(setup)
    found = [summary for summary in results.summaries if summary.kind == "peer"]
    unfit = {each.workload for each in results.absent if each.status == "skipped"}  # where /tmp is in memory
    assert {summary.workload: (summary.status, summary.reason) for summary in found} == dict.fromkeys(
        (name for name in workloads if name not in unfit), ("ok", "")
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


@pytest.mark.slow
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


# ---------------------------------------- the command line

_SMALL = [f"--{f.name.replace('_', '-')}={getattr(TINY, f.name)}" for f in dataclasses.fields(TINY)
          if getattr(TINY, f.name) != getattr(FULL, f.name)]  # fmt: skip
_ONE_ROUND = ["--rounds", "1", "--memory-rounds", "0"]


def test_a_workload_that_cannot_be_made_costs_no_other_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One absent library or a full disk, told in a line; what was measured before and after is kept."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(WORKLOADS, "images", dataclasses.replace(WORKLOADS["images"], needs=("no_such_library.part",)))
    monkeypatch.setitem(WORKLOADS, "python", dataclasses.replace(WORKLOADS["python"], make=full))
    names = ["images", "python", "rows"]
    chosen = [*(f"--workload={name}" for name in names), "--contender=penstock-0", "--contender=threads"]
    assert _cli.main(["bench", *chosen, *_ONE_ROUND, *_SMALL, "--out", str(tmp_path)]) == 1
    told = capsys.readouterr()
    made = "failed: its data could not be made: OSError: [Errno 28] No space left on device"
    for line in ("images   skipped: no_such_library is not installed", f"python   {made}"):
        assert line in told.err.splitlines()
    for text in (told.out, (tmp_path / "bench.html").read_text()):
        assert "skipped: no_such_library is not installed" in text
        assert made in text
    saved = json.loads((tmp_path / "bench.json").read_text())
    assert {(s["workload"], s["status"]) for s in saved["summaries"]} == {("rows", "ok")}
    assert [(each["workload"], each["status"]) for each in saved["absent"]] == [
        ("images", "skipped"),
        ("python", "failed"),
    ]
    only = ["--workload=images", "--out", str(tmp_path)]
    assert _cli.main(["bench", *only]) == 0  # nothing of ours failed


_IN_MEMORY = "files in the temporary folder stay in memory, and no disk is read: set TMPDIR to a folder on one"


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="there is no /dev/shm")
def test_shards_in_memory_are_not_passed_off_as_a_cold_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skipped as for a missing library, before gigabytes are made."""
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    setup = harness.Setup(("shards", "python"), ("penstock-0",), sizes=TINY, rounds=1, memory_rounds=0)
    told: list[str] = []
    results = harness.run(setup, tell=told.append)
    assert results.absent == (harness.Absence("shards", "skipped", _IN_MEMORY),)
    assert "shards   making the data" not in told
    assert {summary.workload for summary in results.summaries} == {"python"}


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="this system does not tell")
@pytest.mark.parametrize(
    ("answer", "file_system", "why"),
    [
        (1, "ext4", _IN_MEMORY),
        (BlockingIOError(), "ext4", ""),
        (OSError(errno.EOPNOTSUPP, "no"), "tmpfs", _IN_MEMORY),
        (OSError(errno.EOPNOTSUPP, "no"), "ext4", ""),
    ],
    ids=["in memory", "on the disk", "a tmpfs", "nobody can tell"],
)
def test_what_left_the_page_cache_is_told_by_the_kernel(
    answer: Any, file_system: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that cannot be asked is given the benefit of the doubt, unless it is one of memory."""

    def preadv(*_: Any) -> int:
        if isinstance(answer, OSError):
            raise answer
        return int(answer)

    unfit = WORKLOADS["shards"].unfit
    assert unfit is not None
    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(workloads, "_lies_in_memory", lambda _: file_system == "tmpfs")
    assert unfit(tmp_path) == why
    assert list(tmp_path.iterdir()) == []


def test_images_need_what_makes_and_decodes_them() -> None:
    """Otherwise an installation without them would be told so by each contender."""
    assert {"PIL", "simplejpeg", "cv2"} <= set(WORKLOADS["images"].needs)


@pytest.mark.parametrize("kind", ["speed", "memory", "faults"])
def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_is_measured(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise a benchmark of an hour would end in a traceback."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("it was measured")

    for module in (harness, memory, faults):
        monkeypatch.setattr(module, "run", never)
    file = tmp_path / "file"
    file.write_text("")
    there = tmp_path / "there"
    for name in ("bench.json", "memory.json", "faults.json"):
        (there / name).mkdir(parents=True)
    for out in (file, file / "below", there):
        assert _cli.main(["bench", kind, "--out", str(out)]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("penstock: cannot write to --out (")
        assert str(out) in line


@pytest.mark.parametrize(
    "args",
    [["--seed", "-1"], ["--timeout", "inf"], ["--timeout", "nan"], ["--timeout", "0"], ["--least-s", "inf"]],
    ids=" ".join,
)
def test_numbers_without_sense_are_errors_of_usage(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        _cli.main(["bench", *args])
    assert ended.value.code == 2
    assert f"argument {args[0]}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--workers", "x"], "'x' is not a whole number of at least 1, in digits"),
        (["--rows", "1e5"], "'1e5' is not a whole number of at least 1, in digits"),
        (["--rounds", "0"], "'0' is not a whole number of at least 1, in digits"),
        (["--memory-rounds", "x"], "'x' is not a whole number of at least 0, in digits"),
        (["--timeout", "x"], "'x' is not a finite number above 0"),
        (["--big-bytes", "100"], "100 is no multiple of 4096: arrays are whole pages"),
        (["--memory", "0.5"], 'give bytes as an int, or text such as "2 GiB"'),
        (["--memory", "x"], 'give bytes as an int, or text such as "2 GiB"'),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_wanted_is_said_in_words(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Not by the name of a function, and nothing is advised that is refused as well."""
    with pytest.raises(SystemExit) as ended:
        _cli.main(["bench", *args])
    assert ended.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {args[0]}: " in line
    assert line.endswith(said)


@pytest.mark.parametrize("seed", [2**32, 2**64, 10**30])
def test_a_seed_that_some_peer_cannot_take_is_refused_with_the_range(
    seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise it would look like the failure of that peer."""
    with pytest.raises(SystemExit) as ended:
        _cli.main(["bench", "--seed", str(seed)])
    assert ended.value.code == 2
    assert f"argument --seed: {seed} is not in 0..4294967295 (2**32-1)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "args"),
    [
        ("memory", ["--workload=rows"]),
        *(
            ("faults", args)
            for args in (
                ["--workload=rows", "--contender=torch"],
                ["--memory-rounds=0"],
                ["--memory=1 GiB", "--timeout=9"],
                ["--markdown"],
                ["--rows=100", "--least-s=0.1"],
            )
        ),
    ],
    ids=str,
)
def test_options_that_a_benchmark_does_not_have_are_refused(
    kind: str, args: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise it would look as if they had changed something."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("it was measured")

    monkeypatch.setattr(faults, "run", never)
    monkeypatch.setattr(memory, "run", never)
    assert _cli.main(["bench", kind, *args]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"penstock: bench {kind} has ")
    assert line.endswith(f": leave out {', '.join(arg.partition('=')[0] for arg in args)}")


def test_a_contender_of_none_of_the_workloads_is_an_error_of_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise it would run nothing and say that all is well."""
    assert _cli.main(["bench", "--workload=rows", "--contender=penstock", "--contender=torch-lines"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("penstock: torch-lines: no contender of rows; these are: penstock, ")
    assert line.endswith(", ".join(WORKLOADS["rows"].contenders))


def test_a_workload_named_twice_runs_once_and_any_number_of_seconds_can_be_waited(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--workload=rows", "--workload=rows", "--contender=penstock-0", "--timeout=1e300", *_ONE_ROUND, *_SMALL]
    assert _cli.main(["bench", *args, "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("\nrows: ") == 1
    saved = json.loads((tmp_path / "bench.json").read_text())
    assert [each["contender"] for each in saved["outcomes"]] == ["penstock-0", "gather"]


def _results(*summaries: harness.Summary, **setup: Any) -> harness.Results:
    machine = {"cpu": "a", "cores": 2, "system": "b", "python": "c", "packages": {}, "date": "d"}
    return harness.Results(harness.Setup(("big",), **setup), machine, (), summaries, 1.0)


def test_sizes_are_told_as_the_flags_that_set_them() -> None:
    """Otherwise a table of 96 KiB arrays would look like one of 24 MiB."""
    for title in (workload.title for workload in WORKLOADS.values()):
        assert not re.search(r"\d+ ?([KMG]iB|ms|x\d|tokens)|\[\d", title)
    odd = dataclasses.replace(QUICK, big_bytes=98304, least_s=0.25)
    for told, setup in (
        ("full sizes;", {}),
        ("full sizes, but --rows 3;", {"sizes": Sizes(rows=3)}),
        ("quick sizes;", {"quick": True, "sizes": QUICK}),
        ("quick sizes, but --big-bytes 98304 --least-s 0.25;", {"quick": True, "sizes": odd}),
    ):
        results = _results(_summary("penstock", 9.0), **setup)
        for text in (report.as_text(results), report.as_html(results), report.as_markdown(results)):
            assert told in text


def test_a_workload_tells_the_budget_that_it_had() -> None:
    """What shards get is capped, whatever the run was given."""
    shards = WORKLOADS["shards"]
    for given, had in ((2**30, 2**29), (2**28, 2**28)):
        assert shards.budget_of(given) == had
        assert shards.job(Path(), dataclasses.replace(TINY, shards=1), 2, 0, given).budget_bytes == had
    assert WORKLOADS["big"].budget_of(2**30) == 2**30
    results = _results(dataclasses.replace(_summary("penstock", 9.0), workload="shards"))
    for given, told in ((2**30, "(3 rounds, budget 512 MiB)"), (2**28, "(3 rounds)")):
        setup = dataclasses.replace(results.setup, workloads=("shards",), budget_bytes=given)
        run = dataclasses.replace(results, setup=setup)
        assert told in report.as_text(run)
        assert told in report.as_html(run)


def test_the_json_has_the_ratios_of_the_table() -> None:
    results = _results(_summary("penstock", 50.0), _summary("torch", 20.0), _summary("read", 100.0))
    saved = {each["contender"]: each for each in json.loads(report.as_json(results))["summaries"]}
    assert [saved[name]["of_limit"] for name in ("penstock", "torch", "read")] == [0.5, 0.2, None]
    assert [saved[name]["penstock_over_it"] for name in ("penstock", "torch", "read")] == [None, 2.5, 0.5]


def test_versions_of_what_decodes_are_told_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their metadata: importing tensorflow takes seconds."""
    wanted = {"tensorflow": "2", "pillow": "3", "simplejpeg": "4"}

    def version(name: str) -> str:
        if name not in wanted:
            raise importlib.metadata.PackageNotFoundError(name)
        return wanted[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert harness._machine()["packages"] == wanted


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in the way of Linux")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_told_to_end_cleans_up_and_keeps_what_it_has(number: int, code: int, tmp_path: Path) -> None:
    """Otherwise an hour of measuring would be lost, and gigabytes of data left in /tmp."""
    scratch, out = tmp_path / "scratch", tmp_path / "out"
    scratch.mkdir()
    args = ["--workload=rows", "--contender=penstock-process", "--rounds=1000", *_SMALL, "--out", str(out)]
    with subprocess.Popen(
        [sys.executable, "-m", "penstock", "bench", *args],
        env={**os.environ, "TMPDIR": str(scratch)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        while "2/1000" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(number)
        process.send_signal(number)  # an impatient user
        printed, said = process.communicate(timeout=60)
    assert process.returncode == code, said
    assert "Traceback" not in said
    assert "interrupted: this is what was finished until then" in printed
    assert "interrupted: this" in (out / "bench.html").read_text()
    saved = json.loads((out / "bench.json").read_text())
    assert saved["interrupted"] is True
    assert saved["outcomes"]
    assert list(scratch.iterdir()) == []
    until = time.monotonic() + 20  # what was killed takes a moment to be gone
    while (left := _with_environment(f"TMPDIR={scratch}")) and time.monotonic() < until:
        time.sleep(0.05)
    assert left == []


def _with_environment(entry: str) -> list[int]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if entry.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(int(pid))
        except OSError:
            continue
    return found


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of /dev/shm, where other tests have things at the same time."""
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(watch, "_SHM", str(tmp_path / "shm"))
    return tmp_path / "shm"


def _held(path: Path, *, then: str) -> subprocess.Popen[str]:
    """A process that has a file of this name open, says so, and goes on when it is told to."""
    code = f"file = open({str(path)!r}, 'wb'); file.write(bytes(8)); print(flush=True); input()\n{then}"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in the way of Linux")
def test_shared_memory_that_a_trial_was_seen_with_is_removed_and_no_other(shm: Path) -> None:
    """A killed loader cannot do it, and what is left would fill the memory of the machine."""
    old, seen, numbered, strange, odd, other = (
        shm / name for name in ("psm_0", "psm_1", "torch_{}_1", "torch_1_2", "sem.mp-2", "data_3")
    )
    old.write_bytes(bytes(8))
    traces = watch.Traces()
    with _held(seen, then="") as process:
        numbered = shm / numbered.name.format(process.pid)
        for path in (numbered, strange, odd, other):
            path.write_bytes(bytes(8))
        traces.look(process.pid)
        assert traces.remove() == {strange.name, odd.name}
        assert (seen.exists(), numbered.exists()) == (True, False)  # it is used
        process.communicate("\n", timeout=60)
    assert traces.remove() == {strange.name, odd.name}
    assert [path.exists() for path in (old, seen, strange, odd, other)] == [True, False, True, True, True]


def _trial_by(script: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> tuple[harness.Outcome, set[str]]:
    """A trial whose process does this, and the names that it left."""
    script.write_text(f"#!{sys.executable}\n{code}\n")
    script.chmod(0o755)
    strays: set[str] = set()
    order = Order("rows", "loop", str(script.parent), TINY, 2, 0, 2**28)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(script))
        outcome = harness._trial(order, round_=0, watch_all=False, timeout_s=3.0, strays=strays)
    return outcome, strays


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in the way of Linux")
@pytest.mark.parametrize("then", ["import time; time.sleep(600)", "import os; os.abort()"], ids=["hangs", "dies"])
def test_shared_memory_of_a_trial_that_did_not_end_well_is_removed(
    then: str, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is seen while the trial runs, also of one that dies by itself."""
    segment = shm / "psm_0"
    made = [f"file = open('{segment}', 'wb')", "file.write(bytes(8))", "input()"]
    marks = [
        """print('{"mark": "timed-end"}', flush=True)""",
        """print('{"mark": "verified"}', flush=True)""",
        "input()",
    ]
    outcome, strays = _trial_by(tmp_path / "python", "\n".join([*made, *marks, then]), monkeypatch)
    assert outcome.status in ("timeout", "failed")
    assert outcome.peak_bytes  # it came as far as that
    assert not segment.exists()
    assert strays == set()


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in the way of Linux")
def test_shared_memory_of_another_job_survives_a_trial_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was made meanwhile, and nobody has it open: the job comes back for it."""
    asked, made = tmp_path / "asked", tmp_path / "made"
    job = f"""
import os, time
from multiprocessing.shared_memory import SharedMemory
while not os.path.exists({str(asked)!r}):
    time.sleep(0.01)
memory = SharedMemory(create=True, size=8)
memory.buf[:4] = b"data"
name = memory.name
memory.close()
open({str(made)!r}, "x").close()
print(name, flush=True)
input()
memory = SharedMemory(name)
print(bytes(memory.buf[:4]).decode())
memory.close()
memory.unlink()
"""
    trial = f"""
import os, time
open({str(asked)!r}, "x").close()
while not os.path.exists({str(made)!r}):
    time.sleep(0.01)
os.abort()
"""
    with subprocess.Popen(
        [sys.executable, "-c", job], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        outcome, strays = _trial_by(tmp_path / "python", trial, monkeypatch)
        assert outcome.status == "failed"
        assert made.exists()
        name, _, read = process.communicate("\n", timeout=60)[0].partition("\n")
    assert read == "data\n"
    assert name in strays


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in the way of Linux")
def test_what_a_check_takes_for_its_verdict_is_not_memory_of_the_contender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last look is when all batches were seen."""
    marks = [f"""print('{{"mark": "{mark}"}}', flush=True); input()""" for mark in ("ready", "verified")]
    judging = [
        "import time",
        "input()",
        *marks,
        "much = b'x' * 2**26",
        "time.sleep(0.3)",
        """print('{"result": {}}')""",
    ]
    outcome, _ = _trial_by(tmp_path / "python", "\n".join(judging), monkeypatch)
    assert outcome.status == "ok"
    assert (outcome.peak_bytes or 0) < (outcome.base_bytes or 0) + 2**25


@pytest.mark.parametrize("there", [True, False])
def test_names_that_were_left_are_told_once_at_the_end(there: bool, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who finds the memory of the machine full is to know where to look."""

    def trial(order: Order, *, strays: set[str], **_: Any) -> harness.Outcome:
        strays |= {"psm_1", "psm_2"}
        if there:
            (shm / "psm_1").write_bytes(b"")
        return harness.Outcome(order.workload, order.contender, 0, "failed", "no")

    monkeypatch.setattr(harness, "_trial", trial)
    told: list[str] = []
    harness.run(harness.Setup(("rows",), ("loop", "threads"), sizes=TINY, rounds=2), tell=told.append)
    assert [line for line in told if "/dev/shm" in line] == there * [
        "names in /dev/shm that appeared while trials failed, and were left, as they may be anybody's: 1"
    ]
    assert not there or told[-1].startswith("names in")


def test_the_command_line_knows_its_sizes_and_contenders() -> None:
    """Otherwise a flag in the help would do nothing."""
    said = subprocess.run(
        [sys.executable, "-m", "penstock", "bench", "--help"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    for field in dataclasses.fields(Sizes):
        assert f"--{field.name.replace('_', '-')} " in said
    assert "--quick" in said
    assert "tinyloader-shm" in said
    assert "(5; quick: up to 3, as time allows)" in " ".join(said.split())


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
