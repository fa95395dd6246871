"""The command line: which commands there are, and how each way of ending becomes an exit code.

Runs in the parent. Each command is a module beside this one with ``add_arguments(parser)`` and ``run(args) -> int``;
only the one that was asked for is imported, so that ``--help`` costs nothing.

Exit codes: 0 done, 1 Penstock refused (one line on stderr says why), 2 wrong usage, 130 interrupted, 141 the reader of
the output went away.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from typing import Final

from penstock._core.errors import PenstockError

__all__ = ["main", "version"]

_COMMANDS: Final = {
    "demo": "train a small model from files larger than its memory budget",
    "plan": "what a budget gives: slots, workers, memory, from the form of a sample",
    "pack": "fill the cache of a feed ahead of time; goes on where it stopped",
    "doctor": "this machine as Penstock sees it, and what would bite",
    "bench": "measure Penstock, and other loaders that are installed, on this machine",
}


def version() -> str:
    """The installed version."""
    try:
        return importlib.metadata.version("penstock")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            code = _run(args)
        finally:
            # Here, and not at interpreter exit, where a closed pipe could only be reported as a traceback.
            sys.stdout.flush()
        return code
    except PenstockError as error:
        print(f"penstock: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit: give it somewhere to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="penstock",
        description="Feeds a model from data that does not fit in memory, inside a memory budget that holds.",
        epilog="penstock COMMAND --help tells more about each.",
    )
    parser.add_argument("--version", action="version", version=f"penstock {version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    wanted = next((arg for arg in argv if not arg.startswith("-")), None)
    run = None
    for name, summary in _COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == wanted:
            module = importlib.import_module(f"penstock._cli.{name}")
            module.add_arguments(command)
            run = module.run
    args = parser.parse_args(argv)
    if run is None:
        parser.print_help(sys.stderr)
        return 2
    return int(run(args))
