"""Rounds of trials: every contender and limit in a fresh process, one after the other, again and again.

A round goes once through all contenders of a workload, each round starting one further on, so that a machine that slows
down for a minute slows down everyone's neighbour too. Medians are over rounds.

Runs in the parent. Memory is sampled in half of the first and in the last epoch of every trial, at the cost of some CPU
time; in the timed region only in the rounds that are made for that (``memory_rounds``), which count for nothing else.
"""

from __future__ import annotations

import compileall
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import selectors
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from penstock._bench import watch
from penstock._bench.cases import workload_of
from penstock._bench.contenders import CONTENDERS
from penstock._bench.limits import LIMITS
from penstock._bench.trial import Order
from penstock._bench.workloads import Sizes

__all__ = ["Absence", "Interrupted", "Outcome", "Results", "Setup", "Summary", "run", "summarize"]

_SAMPLE_EVERY_S: Final = 0.02
_TRACE_EVERY_S: Final = 0.2  # while memory is sampled: what is shared lives longer than a batch, or is no loss
_LOOK_EVERY_S: Final = 60.0  # a selector cannot wait for any number of seconds
_END_S: Final = 2.0  # what a loader may take to stop its processes
_SAID_CHARS: Final = 4000


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """What is to be run."""

    workloads: tuple[str, ...]
    contenders: tuple[str, ...] | None = None
    """None: all that a workload names."""
    quick: bool = False
    """Sizes are those of a quick run, but for the ones that were given."""
    few: bool = False
    """Of these, only those that a workload names for a quick run."""
    sizes: Sizes = dataclasses.field(default_factory=Sizes)
    rounds: int = 5
    memory_rounds: int = 1
    workers: int = 2
    seed: int = 0
    budget_bytes: int = 2**30
    timeout_s: float = 180.0
    within_s: float | None = None
    """Each workload starts no further round once its share of this is used up; the first round always runs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """One trial."""

    workload: str
    contender: str
    round: int
    status: str
    """``ok``, ``wrong`` (content), ``failed``, ``timeout``"""
    reason: str = ""
    timed: bool = True
    """False: memory was sampled all the time, so the rates do not count."""
    result: dict[str, Any] = dataclasses.field(default_factory=dict)
    base_bytes: int | None = None
    """PSS when all was imported and in memory, before the contender did anything."""
    peak_bytes: int | None = None
    cpu_s: float | None = None
    """Of the whole tree, in the timed region."""
    left_behind: int = 0
    """Processes that still lived two seconds after the trial ended."""
    said: str = ""
    """The end of what it wrote to standard error; after a timeout, the stacks of its threads."""


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """One contender or limit on one workload: medians over the rounds."""

    workload: str
    contender: str
    kind: str
    """``ours``, ``peer``, ``limit``"""
    status: str
    reason: str = ""
    rounds: int = 0
    samples_per_s: float | None = None
    bytes_per_s: float | None = None
    low: float | None = None
    high: float | None = None
    """Samples per second of the slowest and the fastest round."""
    first_batch_s: float | None = None
    gap_s: float | None = None
    batch_s: float | None = None
    """Mean time of a full batch."""
    first_epoch_samples_per_s: float | None = None
    """Of the first epoch, from its first batch on."""
    cpu_us_per_sample: float | None = None
    peak_rounds: int = 0
    """Rounds in which memory was seen, those that are not timed among them."""
    peak_bytes: int | None = None
    added_bytes: int | None = None
    """Peak above what the process weighed before the contender did anything."""
    budget_bytes: int | None = None
    """What it was to keep to, if it knows such a thing."""
    left_behind: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Absence:
    """A workload that nobody ran."""

    workload: str
    status: str
    """``skipped``, ``failed``"""
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Results:
    """Everything that a run found."""

    setup: Setup
    machine: dict[str, Any]
    outcomes: tuple[Outcome, ...]
    summaries: tuple[Summary, ...]
    took_s: float
    absent: tuple[Absence, ...] = ()
    interrupted: bool = False
    """Something is missing because the run was told to end."""


class Interrupted(KeyboardInterrupt):
    """A run that was told to end, after it has cleaned up; ``results`` are what was found until then."""

    def __init__(self, results: Results) -> None:
        super().__init__("the benchmark was interrupted")
        self.results = results


def _missing(modules: Iterable[str]) -> str:
    """Why a contender or a workload cannot run; empty when it can."""
    for module in modules:
        top = module.partition(".")[0]
        if importlib.util.find_spec(top) is None:
            return f"{top} is not installed"
    return ""


def _machine() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), model)
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = {}
    for package in (
        "penstock",
        "numpy",
        "torch",
        "torchdata",
        "tinyloader",
        "grain",
        "spdl-core",
        "tensorflow",
        "tensorflow-cpu",
        "pillow",
        "simplejpeg",
        "opencv-python-headless",
    ):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": model, "cores": cores, "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(), "packages": versions,
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }  # fmt: skip


def _environment() -> dict[str, str]:
    """Ours, but compiled modules are kept: else every process that a contender starts would compile its imports."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _tell_where(process: subprocess.Popen[bytes]) -> None:
    """Have a hanging trial write its stacks."""
    if hasattr(signal, "SIGUSR1"):
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.2)


def _end(process: subprocess.Popen[bytes], within_s: float, traces: watch.Traces) -> int:
    """Let the trial and what it started end, then make them; gives how many had to be made."""
    killed: set[int] = set()
    try:
        _wait(process, within_s)
    finally:  # also when Ctrl-C comes while it waits
        while left := set(watch.tree(process.pid)) - killed:
            traces.look(process.pid)
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            killed |= left
        if process.poll() is None:
            process.kill()
        process.wait()
        if killed:
            _wait(process, 1.0)  # until they have let go of what they mapped
    return len(killed)


def _wait(process: subprocess.Popen[bytes], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while watch.tree(process.pid) and time.monotonic() < deadline:
        process.poll()
        time.sleep(0.02)


def _trial(order: Order, *, round_: int, watch_all: bool, timeout_s: float, strays: set[str]) -> Outcome:
    """Run one; to ``strays`` go names of shared memory that appeared while it failed and may be anybody's."""
    traces = watch.Traces()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock._bench.trial"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, bufsize=0,
            start_new_session=True, env=_environment(),
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        base = peak = None
        cpu_from = cpu_to = None
        answer: dict[str, Any] = {}
        status = "failed"
        left = 0
        end_s = _END_S
        deadline = time.monotonic() + timeout_s
        sampling = False
        traced_s = 0.0
        buffered = b""
        try:
            process.stdin.write(order.to_json().encode() + b"\n")
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                while not answer:
                    left_s = deadline - time.monotonic()
                    if left_s <= 0:
                        status = "timeout"
                        break
                    if not selector.select(min(_SAMPLE_EVERY_S if sampling else _LOOK_EVERY_S, left_s)):
                        if sampling:
                            peak = max(peak or 0, watch.pss_bytes(process.pid) or 0)
                            if time.monotonic() - traced_s > _TRACE_EVERY_S:
                                traces.look(process.pid)
                                traced_s = time.monotonic()
                        continue
                    chunk = process.stdout.read(65536)
                    if not chunk:
                        break
                    *lines, buffered = (buffered + chunk).split(b"\n")
                    for line in lines:
                        said = json.loads(line)
                        if said.get("mark") == "ready":
                            base = peak = watch.pss_bytes(process.pid)
                            sampling = True
                            process.stdin.write(b"go\n")
                        elif said.get("mark") == "calm":
                            sampling = watch_all  # a look that has begun takes its time
                        elif said.get("mark") == "timed":
                            sampling = watch_all
                            cpu_from = watch.cpu_s(process.pid)
                        elif said.get("mark") == "timed-end":
                            cpu_to = watch.cpu_s(process.pid)
                            sampling = True
                            traces.look(process.pid)  # not in the timed region: it takes processor time
                        elif said.get("mark") == "verified":
                            peak = max(peak or 0, watch.pss_bytes(process.pid) or 0)
                            sampling = False  # what the check needs for its verdict is no contender's
                            process.stdin.write(b"go\n")
                        else:
                            answer = said
        except BrokenPipeError:
            pass  # it died early; what it wrote to standard error says why
        except KeyboardInterrupt:
            end_s = 0.0
            raise
        finally:
            try:
                if not answer:
                    traces.look(process.pid)
                if status == "timeout":
                    _tell_where(process)
                    process.kill()
                # Only now: closing its input earlier could wake what reads from it.
                process.stdin.close()
                process.stdout.close()
            finally:
                left = _end(process, end_s, traces)
                if left or not answer:
                    strays |= traces.remove()
        errors.seek(0)
        said = errors.read().decode(errors="replace")[-_SAID_CHARS:]
        reason = ""
        if answer:
            reason = answer["result"].get("wrong", "")
            status = "wrong" if reason else "ok"
        elif status == "timeout":
            reason = f"no result after {timeout_s:.0f} s"
        else:
            last = said.strip().splitlines()[-1:] or [f"ended with code {process.returncode} and no word"]
            reason = last[0]
    return Outcome(
        workload=order.workload,
        contender=order.contender,
        round=round_,
        status=status,
        reason=reason,
        timed=not watch_all,
        result=answer.get("result", {}),
        base_bytes=base,
        peak_bytes=peak,
        cpu_s=cpu_to - cpu_from if cpu_from is not None and cpu_to is not None else None,
        left_behind=0 if status == "timeout" else left,
        said=said,
    )


def _kind(name: str) -> str:
    if name in LIMITS:
        return "limit"
    return "ours" if CONTENDERS[name].ours else "peer"


def summarize(outcomes: Sequence[Outcome], skipped: Iterable[Summary] = ()) -> tuple[Summary, ...]:
    """Medians over rounds, for each workload and contender, in the order of their first trial."""
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.workload, outcome.contender), []).append(outcome)
    summaries = []
    for (workload, contender), group in groups.items():
        bad = [outcome for outcome in group if outcome.status != "ok"]
        # A loader that delivers wrong samples has a speed too; it is shown with what is wrong, and wins nothing.
        good = [outcome for outcome in group if outcome.result and outcome.timed]

        def median(name: str, good: list[Outcome] = good) -> float | None:
            found = [float(outcome.result[name]) for outcome in good if outcome.result.get(name) is not None]
            return statistics.median(found) if found else None

        rates = [float(outcome.result["samples_per_s"]) for outcome in good]
        cpu = [
            outcome.cpu_s / outcome.result["samples"] * 1e6
            for outcome in good
            if outcome.cpu_s is not None and outcome.result.get("samples")
        ]
        # The highest, not the median: a peak that was seen once was there.
        seen = [outcome for outcome in group if outcome.peak_bytes is not None and outcome.base_bytes is not None]
        # Wrong content in one round is wrong, whatever the other rounds did; so is a hang or a crash.
        worst = next((outcome for outcome in bad if outcome.status == "wrong"), bad[0] if bad else None)
        summaries.append(
            Summary(
                workload=workload,
                contender=contender,
                kind=_kind(contender),
                status=worst.status if worst else "ok",
                reason=f"{worst.reason} ({len(bad)} of {len(group)} trials)" if worst else "",
                rounds=len(good),
                samples_per_s=median("samples_per_s"),
                bytes_per_s=median("bytes_per_s"),
                low=min(rates, default=None),
                high=max(rates, default=None),
                first_batch_s=median("first_batch_s"),
                gap_s=median("gap_s"),
                batch_s=median("batch_s"),
                first_epoch_samples_per_s=median("first_epoch_samples_per_s"),
                cpu_us_per_sample=statistics.median(cpu) if cpu else None,
                peak_rounds=len(seen),
                peak_bytes=max((outcome.peak_bytes or 0 for outcome in seen), default=None),
                added_bytes=max(((o.peak_bytes or 0) - (o.base_bytes or 0) for o in seen), default=None),
                budget_bytes=max((o.result.get("facts", {}).get("budget_bytes", 0) for o in group), default=0) or None,
                left_behind=max((outcome.left_behind for outcome in group), default=0),
            )
        )
    return (*summaries, *skipped)


def run(setup: Setup, *, tell: Callable[[str], None] = lambda _: None) -> Results:
    """Run the benchmark; ``tell`` gets a line of text per trial. KeyboardInterrupt comes out as ``Interrupted``."""
    began = time.monotonic()
    outcomes: list[Outcome] = []
    skipped: list[Summary] = []
    absent: list[Absence] = []
    strays: set[str] = set()

    def results(*, interrupted: bool = False) -> Results:
        return Results(
            setup=setup, machine=_machine(), outcomes=tuple(outcomes), summaries=summarize(outcomes, skipped),
            took_s=time.monotonic() - began, absent=tuple(absent), interrupted=interrupted,
        )  # fmt: skip

    def leave_out(name: str, status: str, reason: str) -> None:
        absent.append(Absence(name, status, reason))
        tell(f"{name:8} {status}: {reason}")

    folder = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    try:
        # pip does so for everyone else. From an editable install every process of ours would compile it again, where
        # PYTHONDONTWRITEBYTECODE is set, and have the memory that this takes.
        compileall.compile_dir(Path(__file__).parent.parent, quiet=2)
        for place, name in enumerate(setup.workloads, 1):
            workload = workload_of(name)
            if reason := _missing(workload.needs):
                leave_out(name, "skipped", reason)
                continue
            named = workload.quick if setup.few else workload.contenders
            chosen = [c for c in named if setup.contenders is None or c in setup.contenders]
            names = []
            for contender in chosen:
                if reason := _missing(CONTENDERS[contender].needs):
                    skipped.append(Summary(name, contender, _kind(contender), "skipped", reason))
                    tell(f"{name:8} {contender:20} skipped: {reason}")
                else:
                    names.append(contender)
            if not names:
                continue
            here = folder / name
            here.mkdir()
            try:
                if workload.unfit and (reason := workload.unfit(here)):
                    leave_out(name, "skipped", reason)
                    shutil.rmtree(here, ignore_errors=True)
                    continue
                tell(f"{name:8} making the data")
                workload.make(here, setup.sizes, setup.seed)
            except Exception as error:  # noqa: BLE001 - a full disk, a broken library: the other workloads may be spared
                said = " ".join(f"{type(error).__name__}: {error}".split())
                leave_out(name, "failed", f"its data could not be made: {said}")
                shutil.rmtree(here, ignore_errors=True)
                continue
            for round_ in range(setup.rounds + setup.memory_rounds):
                used_s = time.monotonic() - began
                if round_ and setup.within_s and used_s > setup.within_s * place / len(setup.workloads):
                    tell(f"{name:8} no time for round {round_ + 1}")
                    break
                watch_all = round_ >= setup.rounds
                everyone = names if watch_all else [*names, *workload.limits]
                turn = round_ % len(everyone)
                for contender in everyone[turn:] + everyone[:turn]:
                    order = Order(
                        workload=name, contender=contender, folder=str(here), sizes=setup.sizes,
                        workers=setup.workers, seed=setup.seed,
                        budget_bytes=workload.budget_of(setup.budget_bytes),
                    )  # fmt: skip
                    outcome = _trial(
                        order, round_=round_, watch_all=watch_all, timeout_s=setup.timeout_s, strays=strays
                    )
                    outcomes.append(outcome)
                    tell(_line(outcome, setup))
            shutil.rmtree(here, ignore_errors=True)
    except KeyboardInterrupt as error:
        raise Interrupted(results(interrupted=True)) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if left := len(strays & watch.segments()):
            tell(
                f"names in /dev/shm that appeared while trials failed, and were left, as they may be anybody's: {left}"
            )
    return results()


def _line(outcome: Outcome, setup: Setup) -> str:
    what = "memory" if not outcome.timed else f"{outcome.round + 1}/{setup.rounds}"
    if outcome.status != "ok":
        found = f"{outcome.status}: {outcome.reason}"
    elif not outcome.timed:
        found = f"peak {(outcome.peak_bytes or 0) / 2**20:.0f} MiB"
    elif workload_of(outcome.workload).unit == "bytes":
        found = f"{outcome.result['bytes_per_s'] / 1e9:.2f} GB/s"
    else:
        found = f"{outcome.result['samples_per_s']:,.0f} samples/s"
    return f"{outcome.workload:8} {outcome.contender:20} {what:>7}  {found}"
