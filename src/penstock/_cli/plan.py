"""``penstock plan``: a plan from the form of a sample, without data and without running anything."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from penstock._core.budget import GiB, parse_size

__all__ = ["add_arguments", "run"]

_EPILOG = """\
examples:
  penstock plan --shape 3,224,224 --memory "2 GiB" --batch-size 256
  penstock plan --shape 3,224,224 --shape scalar --dtype uint8 --dtype int64 --batch-size max
  penstock plan --shape image=224,224,3 --shape label=scalar --dtype uint8 --dtype int64 --cast image=float16
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``penstock plan``."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "--shape",
        action="append",
        required=True,
        type=_shape,
        metavar="[NAME=]N,N,...",
        help='one array of the sample, such as 3,224,224 or "scalar"; repeat for more, with a name for dicts',
    )
    parser.add_argument(
        "--dtype",
        action="append",
        type=_dtype,
        metavar="DTYPE",
        help="its dtype: one for all shapes, or one for each in order (float32)",
    )
    parser.add_argument(
        "--memory",
        type=_memory,
        metavar="SIZE",
        help='host budget: bytes, "2 GiB", or a fraction of what is available such as 0.25 (half of it)',
    )
    parser.add_argument("--batch-size", type=_batch_size, default=32, metavar="N|max", help='samples, or "max" (32)')
    parser.add_argument("--workers", type=_workers, metavar="N", help="worker processes (the plan decides)")
    parser.add_argument(
        "--cast",
        action="append",
        metavar="[NAME=]DTYPE",
        help="cast while writing into the slot; repeat for several names",
    )
    parser.set_defaults(_parser=parser)


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    import penstock

    parser: argparse.ArgumentParser = args._parser
    try:
        sample, cast = _sample(args.shape, args.dtype or [np.dtype("float32")]), _cast(args.cast or [])
    except ValueError as error:
        parser.error(str(error))
    print(penstock.plan(sample, memory=args.memory, batch_size=args.batch_size, num_workers=args.workers, cast=cast))
    return 0


def _sample(shapes: list[tuple[str, tuple[int, ...]]], dtypes: list[np.dtype[Any]]) -> Any:
    if len(dtypes) == 1:
        dtypes = dtypes * len(shapes)
    if len(dtypes) != len(shapes):
        raise ValueError(f"{len(shapes)} --shape but {len(dtypes)} --dtype: give one dtype for all, or one for each")
    # Broadcast from one element, so that the plan of a sample larger than memory costs none.
    leaves = [np.broadcast_to(np.zeros((), dtype), shape) for (_, shape), dtype in zip(shapes, dtypes, strict=True)]
    names = [name for name, _ in shapes]
    if not any(names):
        return leaves[0] if len(leaves) == 1 else tuple(leaves)
    if not all(names) or len(set(names)) < len(names):
        raise ValueError(f"--shape has the names {names}: give every array a name of its own, or none a name")
    return dict(zip(names, leaves, strict=True))


def _cast(casts: list[str]) -> str | dict[str, str] | None:
    pairs = [_named(cast) for cast in casts]
    if len(pairs) == 1 and not pairs[0][0]:
        return pairs[0][1]
    if not all(name for name, _ in pairs):
        raise ValueError(f"--cast {' '.join(casts)}: several casts need a name each, such as image=float16")
    return dict(pairs) or None


def _named(text: str) -> tuple[str, str]:
    name, _, value = text.rpartition("=")
    return name, value


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, value = _named(text)
    sides = value.strip("()").removesuffix(",")  # (3,) as Python writes it
    try:
        shape = () if sides in ("", "scalar") else tuple(int(side) for side in sides.split(","))
    except ValueError:
        shape = (-1,)
    if min(shape, default=0) < 0:
        raise argparse.ArgumentTypeError(f'{text!r} is not a shape: write it as 3,224,224, or "scalar"')
    return name, shape


def _dtype(text: str) -> np.dtype[Any]:
    try:
        return np.dtype(text)
    except TypeError:
        import ml_dtypes

        kind = getattr(ml_dtypes, text, None)
        try:
            return np.dtype(kind) if isinstance(kind, type) else _unknown(text)
        except TypeError:
            return _unknown(text)


def _unknown(text: str) -> np.dtype[Any]:
    raise argparse.ArgumentTypeError(f"{text!r} is not a dtype: write it as float32, uint8, bfloat16 ...")


def _memory(text: str) -> str | float:
    size: str | float = text
    try:
        fraction = float(text)
        size = fraction if "." in text and fraction <= 1 else text
    except ValueError:
        pass
    try:
        parse_size(size, available=GiB(1), name="--memory")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return size


def _batch_size(text: str) -> int | str:
    return text if text == "max" else _count(text, least=1)


def _workers(text: str) -> int:
    return _count(text, least=0)


def _count(text: str, *, least: int) -> int:
    if not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)
