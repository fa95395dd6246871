"""``penstock doctor``: this machine as Penstock sees it, and what of it would bite.

Runs in the parent and only looks. ``examine`` gathers the facts (no framework is imported: only the installed
packages' metadata is read), ``bites`` judges them and is pure, the rest lays them out for 100 columns or as JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import sys
import sysconfig
import textwrap
from collections.abc import Iterator, Mapping
from typing import Final

from penstock._cli import version
from penstock._core.budget import GiB, MiB, format_bytes
from penstock._core.machine import Machine, Rlimit, look

__all__ = ["Bite", "Report", "add_arguments", "bites", "examine", "run"]

_WIDTH: Final = 100
_TITLE: Final = 14  # columns of the names on the left

# What is shown, and the distributions that may bring it.
_FRAMEWORKS: Final[Mapping[str, tuple[str, ...]]] = {
    "numpy": ("numpy",),
    "torch": ("torch",),
    "jax": ("jax",),
    "tinygrad": ("tinygrad",),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tf-nightly"),
    "keras": ("keras",),
    "ray": ("ray",),
    "lightning": ("lightning", "pytorch-lightning"),
    "accelerate": ("accelerate",),
    "pyarrow": ("pyarrow",),
    "h5py": ("h5py",),
    "zarr": ("zarr",),
    "Pillow": ("Pillow", "Pillow-SIMD"),
    "OpenCV": ("opencv-python-headless", "opencv-python", "opencv-contrib-python"),
    "soundfile": ("soundfile",),
    "tqdm": ("tqdm",),
    "psutil": ("psutil",),
}
# Libraries that start a thread per core in every process, and the variables that tell them how many.
_THREADS: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclasses.dataclass(frozen=True, slots=True)
class Bite:
    """Something about this machine that goes wrong sooner or later, and what to do about it."""

    what: str
    do: str


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """All that the doctor found."""

    penstock: str
    python: str
    free_threaded: bool
    gil: bool
    machine: Machine
    found: Mapping[str, str]  # framework: version
    missing: tuple[str, ...]
    threads: Mapping[str, str]  # the variables of _THREADS that are set
    bites: tuple[Bite, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``penstock doctor``."""
    parser.add_argument("--json", action="store_true", help="the same as JSON, sizes in bytes")


def run(args: argparse.Namespace) -> int:
    """Print what was found; the exit code is 0 whether or not something bites."""
    report = examine()
    if args.json:
        print(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        print("\n".join(_lines(report)))
    return 0


def examine() -> Report:
    """Look at the machine, the interpreter and the installed packages."""
    machine = look()
    versions = {name: _version(names) for name, names in _FRAMEWORKS.items()}
    threads = {name: os.environ[name] for name in _THREADS if name in os.environ}
    return Report(
        penstock=version(),
        python=f"{platform.python_implementation()} {platform.python_version()}",
        free_threaded=bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
        gil=bool(getattr(sys, "_is_gil_enabled", lambda: True)()),
        machine=machine,
        found={name: found for name, found in versions.items() if found},
        missing=tuple(name for name, found in versions.items() if not found),
        threads=threads,
        bites=tuple(bites(machine, threads)),
    )


def bites(machine: Machine, threads: Mapping[str, str]) -> Iterator[Bite]:
    """What would bite on such a machine, gravest first."""
    m = machine
    if m.oom_kills:
        yield Bite(
            f"The OOM killer has already taken {_count(m.oom_kills, 'process', 'processes')} of this container.",
            "State memory= below what is available, and look at what else runs in the container.",
        )
    if m.available_bytes < MiB(512):
        yield Bite(
            f"Only {format_bytes(m.available_bytes)} can be allocated now, bounded by {m.bound_by}.",
            "Free memory or raise that limit; a feed with memory=None takes half of what is there.",
        )
    elif not m.swap_bytes and m.available_bytes < GiB(2):
        yield Bite(
            f"{format_bytes(m.available_bytes)} are available and there is no swap: what goes above is killed at once.",
            'State memory= as a size, such as "512 MiB", that leaves room for the model.',
        )
    tight = min((limit for limit in m.limits), key=lambda limit: limit.limit_bytes, default=None)
    if tight is not None and tight.limit_bytes * 2 < m.memory_bytes:
        yield Bite(
            f"The container may use {format_bytes(tight.limit_bytes)} of the machine's {format_bytes(m.memory_bytes)}. "
            "Inside it nothing is refused, only killed, and tools such as psutil and free show the machine's memory.",
            "Penstock counts the limit. Size caches and other loaders by it too, or raise it "
            "(docker run --memory, resources.limits.memory).",
        )
    if m.overcommit == 2:
        yield Bite(
            "vm.overcommit_memory=2: memory that is only reserved counts as used, so large mappings and forks of "
            "large processes fail while memory is free.",
            "Set vm.overcommit_memory=0, or raise vm.overcommit_ratio.",
        )
    for name, rlimit in (("RLIMIT_AS (ulimit -v)", m.address_space), ("RLIMIT_DATA (ulimit -d)", m.data)):
        if rlimit.soft is not None:
            yield Bite(
                f"{name} is {format_bytes(rlimit.soft)} for each process; frameworks reserve many times what they use.",
                "Remove it (unlimited) and state memory= instead.",
            )
    if m.cpu_quota is not None and m.cpu_quota < m.cores_allowed:
        yield Bite(
            f"The quota gives {m.cpu_quota:g} of {_count(m.cores_allowed, 'core')}: threads above it are throttled, "
            "all at once, for the rest of each period.",
            f"Penstock plans with {m.cores}. BLAS and OpenMP do not see the quota: tell the training process too "
            f"(torch.set_num_threads({m.cores}), threadpoolctl).",
        )
    for name, value in threads.items():
        if value.isdigit() and int(value) > 1:
            total = int(value) * m.cores
            yield Bite(
                f"{name}={value} is inherited by every worker: {_count(m.cores, 'worker')} x {value} threads = {total} "
                f"on {_count(m.cores, 'core')}.",
                f"Unset {name} and set the number of threads in the training process itself.",
            )
    if m.nofile.soft is not None and m.nofile.soft <= 1024:
        higher = "unlimited" if m.nofile.hard is None else f"{m.nofile.hard}"
        yield Bite(
            f"A process may open {m.nofile.soft:,} files. Penstock's arena takes one, but loaders that send one "
            "per tensor, and loads that keep files open, stop there.",
            f"ulimit -n {higher}" if m.nofile.hard != m.nofile.soft else "Raise the hard limit as well (limits.conf).",
        )
    if m.nproc.soft is not None and m.nproc.soft < 512:
        yield Bite(
            f"This user may have {m.nproc.soft:,} processes and threads; every worker and every BLAS thread is one.",
            "Raise ulimit -u.",
        )
    if m.shm_free_bytes is not None and m.shm_free_bytes < GiB(1):
        yield Bite(
            f"/dev/shm has {format_bytes(m.shm_free_bytes)} free. "
            + ("Penstock does not use it, but loaders" if m.features.memfd else "Penstock (no memfd here) and loaders")
            + " that pass batches through it die of SIGBUS when it is full.",
            "docker run --shm-size=2g, or an emptyDir of medium Memory mounted there.",
        )
    if m.system.startswith("Linux"):
        yield from _lacking(m)


def _lacking(machine: Machine) -> Iterator[Bite]:
    effects = {
        "memfd": "The arena needs a name in the file system, which a killed parent leaves behind.",
        "pidfd": "A worker's death is noticed later when it had started processes of its own.",
        "seqpacket": "Workers get their tasks over a slower way.",
        "pdeathsig": "A worker stuck in C code may outlive a killed parent.",
        "smaps_rollup": "Measuring the memory of workers is slower, or leaves shared pages out.",
    }
    for name, effect in effects.items():
        if not getattr(machine.features, name):
            yield Bite(f"No {name} here. {effect}", "Allow it in the sandbox (seccomp, /proc), or use a newer kernel.")


# ---- layout --------------------------------------------------------------------------------------------------


def _lines(report: Report) -> Iterator[str]:
    yield f"Penstock {report.penstock} on this machine"
    yield ""
    for title, text in _facts(report):
        yield from textwrap.wrap(
            text,
            _WIDTH,
            initial_indent=f"  {title:<{_TITLE}}",
            subsequent_indent=" " * (_TITLE + 2),
            break_long_words=False,
            break_on_hyphens=False,
        )
    yield ""
    yield "What would bite"
    if not report.bites:
        yield "  nothing"
    for bite in report.bites:
        for text, first in ((bite.what, "  - "), (bite.do, "    -> ")):
            yield from textwrap.wrap(
                text, _WIDTH, initial_indent=first, subsequent_indent=" " * len(first), break_on_hyphens=False
            )


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    m = report.machine
    build = "free-threaded build" if report.free_threaded else "ordinary build"
    yield "Python", f"{report.python}, {build}, GIL {'on' if report.gil else 'off'}"
    yield "System", f"{m.system}, kernel {m.kernel}"
    quota = "no quota" if m.cpu_quota is None else f"a quota of {m.cpu_quota:g}"
    yield "Cores", f"{m.cores} to plan with: {m.cores_allowed} of {m.cores_present} allowed, {quota}"
    yield (
        "Memory",
        f"{format_bytes(m.memory_bytes)}; {format_bytes(m.available_bytes)} available, bounded by {m.bound_by}",
    )
    swap = f"{format_bytes(m.swap_bytes)}, {format_bytes(m.swap_free_bytes)} free" if m.swap_bytes else "none"
    modes = {0: "heuristic", 1: "always", 2: "never beyond the commit limit"}
    yield "Swap", f"{swap}" + ("" if m.overcommit is None else f"; overcommit {modes.get(m.overcommit, m.overcommit)}")
    if not m.limits:
        yield "Container", "no memory limit"
    for limit in m.limits:
        used, cache = format_bytes(limit.used_bytes), format_bytes(limit.reclaimable_bytes)
        yield "Container", f"{format_bytes(limit.limit_bytes)}, {used} used, {cache} of that reclaimable: {limit.where}"
    if m.oom_kills is not None:
        yield "OOM kills", f"{m.oom_kills} in this control group"
    if m.shm_bytes is None or m.shm_free_bytes is None:
        yield "/dev/shm", "none"
    else:
        yield "/dev/shm", f"{format_bytes(m.shm_bytes)}, {format_bytes(m.shm_free_bytes)} free"
    yield "Descriptors", f"{_plain(m.nofile.soft)} ({_plain(m.nofile.hard)} at most)"
    yield (
        "Limits",
        f"address space {_size(m.address_space)}, data {_size(m.data)}, processes {_plain(m.nproc.soft)}",
    )
    yield "Start methods", ", ".join(m.start_methods)
    features = dataclasses.asdict(m.features)
    yield "Kernel gives", ", ".join(f"{name} {'yes' if there else 'NO'}" for name, there in features.items())
    yield "Threads", ", ".join(f"{name}={value}" for name, value in report.threads.items()) or "no variable set"
    yield "Found", ", ".join(f"{name} {found}" for name, found in report.found.items()) or "nothing"
    yield "Not found", ", ".join(report.missing) or "nothing"


def _plain(value: int | None) -> str:
    return "unlimited" if value is None else f"{value:,}"


def _size(rlimit: Rlimit) -> str:
    return "unlimited" if rlimit.soft is None else format_bytes(rlimit.soft)


def _count(n: int, one: str, many: str = "") -> str:
    return f"{n} {one if n == 1 else many or one + 's'}"


def _version(distributions: tuple[str, ...]) -> str | None:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
