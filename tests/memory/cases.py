"""The feeds whose memory is measured from outside; run as a script: ``python cases.py NAME FOLDER``.

The script says "base" and waits for a line on its standard input before it makes the feed, so that what the feed adds
can be told from what was there before. It ends by printing one line of JSON: what it saw and what stats said.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import penstock
from penstock import Feed, MiB

STREAMED = 1500
# What items of a stream take in this process is estimated from some of their parts, and malloc is not asked.
ESTIMATED = {"items that become large", "shuffled items that become large", "shuffled records"}
_leak: list[Any] = []


def load_npy(path: str) -> Any:
    return np.load(path)


def load_hungry(i: int) -> Any:
    """Temporaries ten times the result (2 MiB)."""
    parts = [np.full(MiB(2) // 8, float(i)) for _ in range(10)]
    return np.maximum.reduce(parts)


def load_leaky(i: int) -> Any:
    _leak.append(np.ones(MiB(1) // 8))
    return np.full(1024, float(i))


def load_leaky_much(i: int) -> Any:
    _leak.append(np.ones(MiB(30) // 8))
    return np.full(1024, float(i))


def load_path(path: str) -> Any:
    return np.full((128,), float(path.rpartition("/")[2]))


def load_path_of(i: int) -> Any:
    return np.full((128,), float(i))


def load_ragged(i: int) -> Any:
    return np.full((1 + i * i * 37 % 200_000,), float(i))


def load_192k(i: int) -> Any:
    return np.full((192 * 1024 // 4,), float(i), np.float32)


def load_80k(i: int) -> Any:
    return np.full((20_000,), float(i), np.float32)


def load_all_but_one(i: int) -> Any:
    if i == 100:
        raise ValueError(i)
    return np.full(MiB(1) // 8, float(i))


def load_some(i: int) -> Iterator[Any]:
    for k in range(i % 7):
        yield np.full(MiB(1) // 8, float(10 * i + k))


def load_twice(i: int) -> Any:
    return np.full(MiB(2) // 8, float(i)).astype(np.float32)


def load_66(i: int) -> Any:
    return np.full(20_000, i * np.ones(MiB(66) // 8)[0], np.float32)


def load_text(i: int) -> str:
    return "x" * (100 if i < 500 else 300_000)


@dataclasses.dataclass
class Record:
    number: int
    values: list[int]


def records(count: int) -> Iterator[Record]:
    for i in range(count):
        yield Record(i, [1000 + i + k for k in range(3000)])


def load_record(record: Record) -> Any:
    return len(record.values)


def growing(count: int, *, small: int, large: int) -> Iterator[bytes]:
    for i in range(count):
        yield b"x" * (10 if i < small else large)  # not zeros: pages that nobody wrote to are not there


def big_files(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.glob("big-*.npy"))


def big_file(folder: Path) -> str:
    """One file of 240 MiB in rows of 64 KiB, made once."""
    path = folder / "rows.npy"
    if not path.exists():
        np.save(path, np.arange(240 * 16 * 2**14, dtype=np.float32).reshape(-1, 2**14))
    return str(path)


Case = Callable[[Path], tuple[Feed, int, Callable[[], Iterator[int]]]]


def _each(feed: Feed, epochs: int = 1) -> Iterator[int]:
    for epoch in feed.epochs(epochs):
        for batch in epoch:
            yield len(batch.data if isinstance(batch, penstock.Padded) else batch)


CASES: dict[str, tuple[int, Callable[[Path], Any], dict[str, Any]]] = {
    "arrays of 24 MiB": (MiB(256), lambda f: (big_files(f), load_npy), {"batch_size": 1, "num_workers": 2}),
    "samples of 192 KiB": (MiB(160), lambda f: (range(3000), load_192k), {"batch_size": 32, "num_workers": 2}),
    "temporaries": (MiB(256), lambda f: (range(400), load_hungry), {"batch_size": 4, "num_workers": 2}),
    "leak": (MiB(256), lambda f: (range(3000), load_leaky), {"batch_size": 8, "num_workers": 2}),
    # What the probe leaves behind is the first worker's too.
    "leak of 30 MiB a call": (MiB(192), lambda f: (range(40), load_leaky_much), {"batch_size": 8, "num_workers": 1}),
    "two million paths": (
        MiB(256),
        lambda f: ([f"/somewhere/in/a/folder/{i:012d}" for i in range(2_000_000)], load_path),
        {"batch_size": 256, "num_workers": 2, "take": 2000},
    ),
    "ragged": (
        MiB(256),
        lambda f: (range(600), load_ragged),
        {"batch_size": 16, "num_workers": 2, "collate_fn": "pad"},
    ),
    # Pages of a mapped file would count: a source of them reads instead.
    "a mapped file": (
        MiB(96),
        lambda f: (penstock.arrays(np.load(big_file(f), mmap_mode="r")), None),
        {"batch_size": 64, "num_workers": 2, "shuffle": True},
    ),
    "threads": (
        MiB(256),
        lambda f: (big_files(f), load_npy),
        {"batch_size": 1, "num_workers": 2, "executor": "thread"},
    ),
    "two epochs": (MiB(160), lambda f: (range(1500), load_192k), {"batch_size": 32, "num_workers": 2, "epochs": 2}),
    "half of it kept": (
        MiB(192),
        lambda f: (range(1000), load_192k),
        {"batch_size": 16, "num_workers": 2, "epochs": 3, "shuffle": True, "cache": "ram"},
    ),
    "samples of many sizes kept": (
        MiB(384),
        lambda f: (range(300), load_ragged),
        {"batch_size": 16, "num_workers": 2, "epochs": 2, "collate_fn": "pad", "cache": "ram"},
    ),
    "kept by threads": (
        MiB(128),
        lambda f: (range(1000), load_192k),
        {"batch_size": 16, "num_workers": 2, "executor": "thread", "epochs": 2, "cache": "ram"},
    ),
    # Planned for as they are at first; later a batch of them is a third of the budget.
    "items that become large": (
        MiB(64),
        lambda f: (growing(STREAMED, small=200, large=300_000), len),
        {"batch_size": 64, "num_workers": 1},
    ),
    "shuffled items that become large": (
        MiB(96),
        lambda f: (growing(STREAMED, small=500, large=200_000), len),
        {"batch_size": 8, "num_workers": 2, "shuffle": True},
    ),
    # What an object takes is in what it refers to.
    "shuffled records": (
        MiB(96),
        lambda f: (records(STREAMED), load_record),
        {"batch_size": 8, "num_workers": 2, "shuffle": True},
    ),
    "the largest batch": (
        MiB(96),
        lambda f: (range(4000), load_80k),
        {"batch_size": "max", "num_workers": 1},
    ),
    # What comes after an item that is left out is put together in the consumer's process.
    "the largest batch without an item": (
        MiB(96),
        lambda f: (range(800), load_all_but_one),
        {"batch_size": "max", "num_workers": 1, "on_error": "skip"},
    ),
    "the largest batch of any number of samples": (
        MiB(96),
        lambda f: (range(300), load_some),
        {"batch_size": "max", "num_workers": 1, "samples_per_item": None},
    ),
    "the largest batch by threads": (
        MiB(128),
        lambda f: (range(300), load_twice),
        {"batch_size": "max", "num_workers": 3, "executor": "thread"},
    ),
    # Nobody knows that before it was tried, and in a worker process there is no room to.
    "a load of most of the budget": (MiB(80), lambda f: (range(20), load_66), {"batch_size": 4}),
    # Many small batches share a slot, and their texts are small at first.
    "texts that become large": (
        MiB(64),
        lambda f: (range(3000), load_text),
        {"batch_size": 32, "num_workers": 0},
    ),
    "spawn": (
        MiB(256),
        lambda f: (range(1500), load_192k),
        {"batch_size": 32, "num_workers": 2, "start_method": "spawn"},
    ),
}


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    budget, make, keywords = CASES[name]
    epochs, take = keywords.pop("epochs", 1), keywords.pop("take", None)
    items, load = make(folder)
    count = len(items) if hasattr(items, "__len__") else STREAMED
    count = {load_all_but_one: count - 1, load_some: sum(i % 7 for i in range(300))}.get(load, count)
    warnings.simplefilter("error")
    print("base", flush=True)
    sys.stdin.readline()
    samples = 0
    with Feed(items, load, memory=budget, **keywords) as feed:
        for number, rows in enumerate(_each(feed, epochs)):
            samples += rows
            if number == take:
                break
        plan = feed.plan
    print(
        json.dumps(
            {
                "samples": samples,
                "expected": None if take else epochs * count,
                "peak_bytes": feed.stats.peak_bytes,
                "planned": plan.total_bytes,
                "restarts": feed.stats.restarts,
                "copied": feed.stats.copied,
                "plan": str(plan),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
