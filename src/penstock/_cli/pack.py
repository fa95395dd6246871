"""``penstock pack``: fills the cache of a feed ahead of time."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
import time
from typing import Any

from penstock._core.budget import format_bytes, parse_size
from penstock._core.errors import said, shown

__all__ = ["add_arguments", "run"]

_EPILOG = """\
FEED names a penstock.Feed, or a function without arguments that makes one, in a module or a file:

  penstock pack train:feed                       the feed has a cache=folder of its own
  penstock pack train:make_feed --to cache/v2    it has none, or another
  penstock pack scripts/train.py:make_feed --to cache/v2 --key v2 --limit "200 GiB"

The module is imported, so a script keeps its training under `if __name__ == "__main__"`. Killed or interrupted, it goes
on where it was when it is started again; any number of them can work on one folder at once.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``penstock pack``."""
    parser.epilog = _EPILOG
    parser.add_argument("feed", metavar="FEED", help="module:name or file.py:name")
    parser.add_argument("--to", metavar="FOLDER", help="the folder (the cache= of the feed)")
    parser.add_argument("--key", default="", help="the key, as in penstock.Cache(folder, key=...); only with --to")
    parser.add_argument(
        "--limit",
        type=_limit,
        metavar="SIZE",
        help='the most that the folder may take, such as "20 GiB"; only with --to',
    )
    parser.add_argument("--rebuild", action="store_true", help="delete what the folder holds if that is something else")
    parser.set_defaults(_parser=parser)


def run(args: argparse.Namespace) -> int:
    """Fill the cache, and say what came of it."""
    import penstock

    parser: argparse.ArgumentParser = args._parser
    if args.to is None and (args.key or args.limit or args.rebuild):
        parser.error("--key, --limit and --rebuild belong to --to: without it the feed says these itself")
    feed = _feed(args.feed, parser)
    if args.to is not None:
        cache = penstock.Cache(args.to, key=args.key, limit=args.limit, stale="rebuild" if args.rebuild else "error")
        try:
            feed._options = feed._options.with_cache(cache)
        except (TypeError, ValueError) as error:
            raise penstock.CacheError(str(error)) from error
    cache = feed._options.cache
    if not isinstance(cache, penstock.Cache):
        parser.error(f"{args.feed} has no folder as its cache: give one with --to")
    began = time.perf_counter()
    with feed:
        kept = feed.pack("packing")
        each = feed.plan.sample_bytes * (feed._options.each or 1)
    seconds = time.perf_counter() - began
    of = feed._schedule.length or 0
    size = format_bytes(kept * each)
    print(f"{kept:,} of {of:,} items are in {os.fspath(cache.folder)} ({size}), after {seconds:.1f} s")
    if feed.stats.skipped:
        item, why = feed.stats.skipped[0]
        count = len(feed.stats.skipped)
        print(f"{count:,} could not be loaded, the first of them {shown(item)}: {said(why)}", file=sys.stderr)
    return 0 if kept == of or feed.stats.skipped or cache.limit is not None else 1


def _feed(target: str, parser: argparse.ArgumentParser) -> Any:
    """The feed that is meant: what a module or a file has under this name, called if it is a function."""
    import penstock

    where, _, name = target.rpartition(":")
    if not where or not name:
        parser.error(f"{target!r} names no feed: write module:name or file.py:name")
    # Workers are given this path as well, so that they find the module.
    folder, module = os.path.split(where) if where.endswith(".py") else ("", where)
    sys.path.insert(0, os.path.abspath(folder))
    try:
        found: Any = importlib.import_module(module.removesuffix(".py"))
    except ModuleNotFoundError as error:
        if error.name != module.removesuffix(".py").partition(".")[0]:
            raise
        parser.error(f"there is no module {where!r} here or among what is installed")
    for part in name.split("."):
        if not hasattr(found, part):
            parser.error(f"{where} has no {name!r}")
        found = getattr(found, part)
    if not isinstance(found, penstock.Feed) and callable(found):
        try:
            inspect.signature(found).bind()
        except TypeError as error:
            parser.error(f"{target} cannot be called without arguments ({error}): name a function that makes the feed")
        found = found()
    if not isinstance(found, penstock.Feed):
        parser.error(f"{target} is a {type(found).__name__}, not a penstock.Feed or a function that makes one")
    return found


def _limit(text: str) -> int:
    try:
        return parse_size(text, available=None, name="--limit")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
