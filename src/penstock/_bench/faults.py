"""The benchmark of faults: a worker is killed every quarter of a second through an epoch; what that costs.

For each start method, in turns, an epoch in peace and one under fire. A sample tells who loaded it and when, so that
what is measured is what a consumer sees: every sample once and in order, how fast, and how long after a kill somebody
new has begun to load. Runs in the parent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock._bench.telling import LOAD_S, load
from penstock._core.feed import Feed

__all__ = ["METHODS", "Found", "Run", "as_text", "run", "write"]

METHODS: Final = ("fork", "forkserver", "spawn")
ITEMS: Final = 3000
EVERY_S: Final = 0.25
_BATCH: Final = 16
_MEMORY: Final = "512 MiB"


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One epoch."""

    method: str
    under_fire: bool
    right: bool
    """Whether every sample came exactly once, in order."""
    samples_per_s: float
    kills: int
    back_s: tuple[float, ...]
    """For each kill after which somebody new began before the epoch was over: how long after it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """Everything that a run found."""

    runs: tuple[Run, ...]
    items: int
    workers: int
    every_s: float


def run(
    *, items: int = ITEMS, rounds: int = 3, workers: int = 2, every_s: float = EVERY_S,
    methods: tuple[str, ...] = METHODS, seed: int = 0, tell: Callable[[str], None] = lambda _: None,
) -> Found:  # fmt: skip
    """Epochs in peace and under fire in turns, for each start method; ``tell`` gets a line of text per epoch."""
    rng = random.Random(seed)
    runs = []
    for number in range(rounds):
        for method in methods:
            for kill_every_s in (None, every_s):
                runs.append(_epoch(method, items, workers, kill_every_s, rng))
                last = runs[-1]
                fire = f"{last.kills} kills" if last.under_fire else "in peace"
                tell(f"round {number + 1} of {rounds}  {method:<10}  {fire:<9}  {last.samples_per_s:,.0f} samples/s")
    return Found(tuple(runs), items, workers, every_s)


def _epoch(method: Any, items: int, workers: int, kill_every_s: float | None, rng: random.Random) -> Run:
    with Feed(range(items), load, batch_size=_BATCH, memory=_MEMORY, num_workers=workers, start_method=method) as feed:
        for _ in range(2):  # workers that are there and warm
            for batch in feed:
                del batch
                break
        batches = iter(feed)
        rows = [next(batches).copy()]
        killer = _Killer(feed, kill_every_s, rng)
        began_s = time.perf_counter()
        with killer:
            for batch in batches:
                rows.append(batch.copy())
                killer.at_work.update(batch[:, 1].tolist())
        took_s = time.perf_counter() - began_s
    samples = np.concatenate(rows)
    kills = killer.kills
    return Run(
        method,
        kill_every_s is not None,
        bool(np.array_equal(samples[:, 0], np.arange(items))),
        (items - len(rows[0])) / took_s,
        len(kills),
        tuple(back_s(kills, samples)),
    )


class _Killer:
    """A thread that kills one worker after the other, if it is to: one that is at work, never the same twice.

    Not one that is being born: where that takes longer than from one kill to the next, nobody would ever work.
    """

    def __init__(self, feed: Feed, every_s: float | None, rng: random.Random) -> None:
        self.kills: list[float] = []
        """When each was killed."""
        self.at_work: set[int] = set()
        """Processes that have loaded something."""
        self._feed = feed
        self._every_s = every_s
        self._rng = rng
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._shoot, name="penstock-bench-killer")

    def __enter__(self) -> None:
        if self._every_s is not None:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._every_s is not None:
            self._thread.join()

    def _shoot(self) -> None:
        dead: set[int] = set()
        while not self._over.wait(self._every_s):
            assert self._feed._engine is not None
            _, *pids = self._feed._engine.crew.pids()  # the first is the template
            if alive := self.at_work.intersection(pids) - dead:
                dead.add(pid := self._rng.choice(sorted(alive)))
                self.kills.append(time.monotonic())
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def back_s(kills: list[float], samples: Any) -> list[float]:
    """How long after each kill the one in its place began, by who loaded what since when; left out if it never did."""
    first: dict[int, float] = {}
    for _, pid, begun_s in samples:
        first[int(pid)] = min(begun_s, first.get(int(pid), begun_s))
    newcomers = sorted(begun_s for begun_s in first.values() if kills and begun_s > kills[0])
    waits = []
    for killed_s in kills:
        if (came_s := next((begun_s for begun_s in newcomers if begun_s > killed_s), None)) is not None:
            newcomers.remove(came_s)
            waits.append(came_s - killed_s)
    return waits


def as_text(found: Found) -> str:
    """The table for a terminal."""
    kills = f"one killed every {found.every_s * 1000:g} ms"
    lines = [
        f"{found.items:,} items of {LOAD_S * 1000:g} ms, {found.workers} workers, {kills}; medians over rounds",
        "",
        "start method  each once, in order   in peace  under fire  ratio  kills  back after  at worst",
    ]
    for method in dict.fromkeys(each.method for each in found.runs):
        peace = [each for each in found.runs if each.method == method and not each.under_fire]
        fire = [each for each in found.runs if each.method == method and each.under_fire]
        ratios = [one.samples_per_s / other.samples_per_s for one, other in zip(fire, peace, strict=True)]
        waits = [wait for each in fire for wait in each.back_s]
        right = all(each.right for each in (*peace, *fire))
        back = f"{statistics.median(waits) * 1000:>7.0f} ms  {max(waits) * 1000:>5.0f} ms" if waits else f"{'-':>10}"
        lines.append(
            f"{method:<12}  {'yes' if right else 'NO':<19}  {_median(peace):>7,.0f}/s  {_median(fire):>8,.0f}/s  "
            f"{statistics.median(ratios):>5.2f}  {sum(each.kills for each in fire):>5}  {back}"
        )
    return "\n".join(lines)


def _median(runs: list[Run]) -> float:
    return statistics.median(each.samples_per_s for each in runs)


def write(found: Found, folder: Path) -> Path:
    """Put ``faults.json`` into a folder; gives its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "faults.json"
    path.write_text(json.dumps(dataclasses.asdict(found), indent=1), encoding="utf-8")
    return path
