"""``penstock bench``: Penstock and its peers on the same data, against what the machine can do.

``penstock bench memory`` compares what they add to the machine's memory, against a budget; ``penstock bench faults``
kills workers and looks what that costs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock._core.budget import parse_size

if TYPE_CHECKING:
    from penstock._bench.harness import Results, Summary
    from penstock._bench.workloads import Sizes

__all__ = ["add_arguments", "run"]

_EPILOG = """\
examples:
  penstock bench --quick
  penstock bench memory
  penstock bench faults
  penstock bench --workload big --big-batch 4 --rounds 7
  penstock bench --workload rows --contender penstock --contender torch
"""
_SIZES_HELP = {
    "big_files": "files of the workload big",
    "big_bytes": "bytes of one of its arrays, a multiple of 4096",
    "big_samples": "samples of one epoch; the files are read again and again",
    "big_batch": "samples of a batch",
    "rows": "rows of the workload rows",
    "rows_width": "float32 values of one row",
    "rows_batch": "samples of a batch",
    "cifar_rows": "pictures of the workload cifar",
    "cifar_batch": "samples of a batch",
    "latency_items": "items of the workload latency",
    "latency_ms": "what each of them waits",
    "latency_batch": "samples of a batch",
    "slow_items": "items of the workload slow",
    "slow_ms": "what one ordinary item takes; one in 64 takes 50 times that",
    "slow_batch": "samples of a batch",
    "python_rows": "rows of the workload python",
    "python_batch": "samples of a batch",
    "lines": "lines of the workload lines",
    "lines_batch": "samples of a batch",
    "images": "pictures of the workload images",
    "images_high": "height of one",
    "images_wide": "width of one",
    "images_size": "height and width that they are decoded to",
    "images_batch": "samples of a batch",
    "shards": ".npy files of rows of 192 KiB",
    "shards_rows": "rows of each",
    "shards_batch": "samples of a batch",
    "memory_medium": "192 KiB samples of bench memory",
    "memory_temporaries": "its loads with large temporaries",
    "memory_leaks": "its calls of the load that leaks 1 MiB each",
    "memory_paths": "the paths that the parent holds in it",
    "memory_ragged": "its samples of very different sizes",
    "least_s": "least seconds of a timed region",
}
# What the other two benchmarks have of their own.
_OF_SPEED = ("workload", "contender", "memory_rounds", "memory")
# Quick is a promise of less than three minutes; this leaves room for the round that is running when time is up.
_QUICK_S = 130.0
# Grain takes no larger one, torch none of more than 64 bits, and all contenders are to have the same.
_MOST_SEED = 2**32 - 1
# Whoever asks twice to end it within this time would only keep it from cleaning up.
_CLEAN_S = 5.0


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which is to end a run as Ctrl-C does."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``penstock bench``."""
    from penstock._bench.workloads import FULL, QUICK, WORKLOADS

    parser.epilog = _EPILOG
    contenders = tuple(dict.fromkeys(name for workload in WORKLOADS.values() for name in workload.contenders))
    parser.add_argument(
        "kind", nargs="?", choices=("speed", "memory", "faults"), default="speed",
        help="memory: what torch's DataLoader and Penstock add at the peak, beside a budget; less than three minutes. "
        "faults: a worker is killed every 250 ms, what is lost (nothing) and what it costs; about a minute",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true", help="smaller sizes, fewer contenders and rounds: less than three minutes"
    )
    parser.add_argument(
        "--workload", action="append", choices=[*WORKLOADS], help="only this one; repeat for more (all)"
    )
    parser.add_argument(
        "--contender", action="append", choices=contenders, metavar="NAME",
        help=f"only this one; repeat for more, out of {', '.join(contenders)} (all)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=_count, metavar="N", help="timed rounds (5; quick: up to 3, as time allows)")
    parser.add_argument(
        "--memory-rounds", type=_natural, metavar="N", help="further rounds, only to sample memory (1, quick 0)"
    )
    parser.add_argument("--workers", type=_count, default=2, metavar="N", help="workers of whoever has some (2)")
    parser.add_argument("--memory", type=_memory, metavar="SIZE", help='budget of Penstock ("1 GiB")')
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="what the data is made from (0)")
    parser.add_argument("--timeout", type=_positive, metavar="S", help="seconds for one trial (180, quick 25)")
    parser.add_argument(
        "--out", type=Path, default=Path(".bench"), metavar="DIR", help="for bench.json and bench.html (.bench)"
    )
    parser.add_argument("--markdown", action="store_true", help="print Markdown, with the columns that matter most")
    sizes = parser.add_argument_group("sizes")
    for field in dataclasses.fields(FULL):
        full, quick = getattr(FULL, field.name), getattr(QUICK, field.name)
        default = f"{full}" if full == quick else f"{full}, quick {quick}"
        count = _page_bytes if field.name == "big_bytes" else _count
        kind = _positive if isinstance(full, float) else count
        sizes.add_argument(
            f"--{field.name.replace('_', '-')}", type=kind, metavar="N", help=f"{_SIZES_HELP[field.name]} ({default})"
        )


def run(args: argparse.Namespace) -> int:
    """Run it, print the table, write the files; 1 when a contender of ours failed or gave wrong samples."""
    if args.kind == "memory":
        return _memory_run(args)
    if args.kind == "faults":
        return _faults_run(args)
    from penstock._bench import harness
    from penstock._bench.workloads import FULL, QUICK, WORKLOADS

    workloads = tuple(dict.fromkeys(args.workload or WORKLOADS))
    known = tuple(dict.fromkeys(name for workload in workloads for name in WORKLOADS[workload].contenders))
    if strange := [name for name in args.contender or () if name not in known]:
        print(
            f"penstock: {', '.join(dict.fromkeys(strange))}: no contender of {', '.join(workloads)}; "
            f"these are: {', '.join(known)}",
            file=sys.stderr,
        )
        return 2
    if not _can_write(args.out, "bench.json", "bench.html"):
        return 1
    setup = harness.Setup(
        workloads=workloads,
        contenders=None if args.contender is None else tuple(args.contender),
        quick=args.quick,
        few=args.quick and args.contender is None,
        sizes=_resized(QUICK if args.quick else FULL, args),
        rounds=args.rounds or (3 if args.quick else 5),
        memory_rounds=args.memory_rounds if args.memory_rounds is not None else (0 if args.quick else 1),
        workers=args.workers,
        seed=args.seed,
        budget_bytes=args.memory or 2**30,
        timeout_s=args.timeout or (25.0 if args.quick else 180.0),
        within_s=_QUICK_S if args.quick and args.rounds is None else None,
    )
    try:
        with _terminable():
            try:
                return _show(harness.run(setup, tell=_tell), args)
            except harness.Interrupted as error:
                _tell("interrupted")
                if error.results.outcomes:  # else nothing is worth replacing what an earlier run wrote
                    _show(error.results, args)
                raise
    except KeyboardInterrupt as error:
        return _ended(error)


def _ended(error: KeyboardInterrupt) -> int:
    """The exit code of a run that was told to end."""
    by = signal.SIGTERM if any(isinstance(e, _Terminated) for e in (error, error.__cause__)) else signal.SIGINT
    return 128 + by


def _show(results: Results, args: argparse.Namespace) -> int:
    from penstock._bench import report

    print(f"\n{report.as_markdown(results) if args.markdown else report.as_text(results)}", flush=True)
    code = _written(lambda: report.write(results, args.out))
    return code or _code(results.summaries) or int(any(absence.status == "failed" for absence in results.absent))


def _memory_run(args: argparse.Namespace) -> int:
    from penstock._bench import memory

    if given := _given(args, *_OF_SPEED):
        print(f"penstock: bench memory has cases and budgets of its own: leave out {given}", file=sys.stderr)
        return 2
    if not _can_write(args.out, "memory.json"):
        return 1
    try:
        with _terminable():
            found = memory.run(
                sizes=_resized(memory.SIZES, args), rounds=args.rounds or 3, workers=args.workers, seed=args.seed,
                timeout_s=args.timeout or 60.0, tell=_tell,
            )  # fmt: skip
    except KeyboardInterrupt as error:  # half of it is no table
        return _ended(error)
    print(f"\n{memory.as_text(found)}", flush=True)
    code = _written(lambda: [memory.write(found, args.out)])
    absent = (*found.cases.absent, *found.costs.absent)
    return code or _code((*found.cases.summaries, *found.costs.summaries)) or int(bool(absent))


def _given(args: argparse.Namespace, *names: str) -> str:
    """Those of the options that were given, as one would write them."""
    values = ((name, getattr(args, name)) for name in names)
    # By identity: 0 was given, and equals False.
    return ", ".join(
        f"--{name.replace('_', '-')}" for name, value in values if value is not None and value is not False
    )


def _faults_run(args: argparse.Namespace) -> int:
    from penstock._bench import faults
    from penstock._bench.workloads import FULL

    if given := _given(args, *_OF_SPEED, "timeout", "markdown", *(each.name for each in dataclasses.fields(FULL))):
        print(f"penstock: bench faults has items and a pace of its own: leave out {given}", file=sys.stderr)
        return 2
    if sys.platform != "linux":
        print("penstock: bench faults kills workers in the way of Linux, and this is another system", file=sys.stderr)
        return 2
    if not _can_write(args.out, "faults.json"):
        return 1
    # Its workers are forked from here: they would take over what is done on SIGTERM, so that is left as it is.
    found = faults.run(rounds=args.rounds or (1 if args.quick else 3), workers=args.workers, seed=args.seed, tell=_tell)
    print(f"\n{faults.as_text(found)}", flush=True)
    code = _written(lambda: [faults.write(found, args.out)])
    return code or (0 if all(each.right for each in found.runs) else 1)


def _can_write(folder: Path, *names: str) -> bool:
    """Whether the files can be put there, before minutes are spent on what goes into them; says why not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        for path in (folder / name for name in names):
            if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
                raise PermissionError(f"{path} is there and cannot be replaced")
    except OSError as error:
        _refuse(error)
        return False
    return True


def _written(write: Callable[[], Iterable[Path]]) -> int:
    """Write the files and name them; 1 when that failed after all."""
    try:
        for path in write():
            print(f"wrote {path}")
    except BrokenPipeError:
        raise
    except OSError as error:
        _refuse(error)
        return 1
    return 0


def _refuse(error: OSError) -> None:
    print(f"penstock: cannot write to --out ({error}): give a folder that can be written to", file=sys.stderr)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends it as Ctrl-C does, and while it cleans up after either, neither disturbs it."""
    ended_s = -math.inf

    def end(number: int, _: Any) -> None:
        nonlocal ended_s
        if time.monotonic() - ended_s < _CLEAN_S:
            return
        ended_s = time.monotonic()
        raise _Terminated if number == signal.SIGTERM else KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    # Whoever started it with one of them ignored, as nohup does, keeps it so.
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _resized(sizes: Sizes, args: argparse.Namespace) -> Sizes:
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(sizes)}
    return dataclasses.replace(sizes, **{name: value for name, value in given.items() if value is not None})


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _code(summaries: Iterable[Summary]) -> int:
    return 0 if all(summary.status == "ok" for summary in summaries if summary.kind == "ours") else 1


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}, in digits")
    return value


def _count(text: str) -> int:
    return _whole(text, 1)


def _natural(text: str) -> int:
    return _whole(text, 0)


def _page_bytes(text: str) -> int:
    from penstock._bench.workloads import PAGE_BYTES

    value = _count(text)
    if value % PAGE_BYTES:
        raise argparse.ArgumentTypeError(f"{value} is no multiple of {PAGE_BYTES}: arrays are whole pages")
    return value


def _seed(text: str) -> int:
    value = _natural(text)
    if value > _MOST_SEED:
        raise argparse.ArgumentTypeError(f"{value} is not in 0..{_MOST_SEED} (2**32-1), which is what all loaders take")
    return value


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number above 0")
    return value


def _memory(text: str) -> int:
    try:
        # Of nothing: a fraction of what is available is refused, as two machines would run two benchmarks.
        return parse_size(int(text) if text.isdigit() else text, available=None)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
