"""The process in which one contender (or limit) meets one workload: ``python -m penstock._bench.trial``.

It reads one line of JSON from standard input, which says what to do, and answers in lines of JSON:
``{"mark": "ready"}`` when everything is imported and in memory (then it waits for a line, so that the harness can see
what the process weighs without the contender), ``timed``, ``timed-end``, ``verified`` (it waits again: what leaks
weighs most now), and at last ``{"result": ...}``. Whatever a contender prints goes to standard error; on SIGUSR1 so do
the stacks of all threads.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from penstock._bench.cases import workload_of
from penstock._bench.contenders import CONTENDERS
from penstock._bench.drive import drive
from penstock._bench.limits import LIMITS
from penstock._bench.workloads import Sizes

__all__ = ["Order", "main"]


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """What a trial is told to do."""

    workload: str
    contender: str
    """Or the name of a limit."""
    folder: str
    sizes: Sizes
    workers: int
    seed: int
    budget_bytes: int

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Order:
        fields = json.loads(text)
        return Order(**{**fields, "sizes": Sizes(**fields["sizes"])})


def main() -> None:
    """Do what the harness asks on standard input, and answer on standard output."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1)

    def say(**answer: Any) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    order = Order.from_json(sys.stdin.readline())
    workload = workload_of(order.workload)
    job = workload.job(Path(order.folder), order.sizes, order.workers, order.seed, order.budget_bytes)
    if order.contender in LIMITS:
        _, measure = LIMITS[order.contender]
        rate = measure(job)
        say(result={"samples_per_s": rate, "bytes_per_s": rate * job.sample_bytes})
        return
    contender = CONTENDERS[order.contender]
    for module in ("penstock", *contender.needs):
        importlib.import_module(module)
    say(mark="ready")
    sys.stdin.readline()

    def mark(name: str) -> None:
        say(mark=name)
        if name == "verified":
            sys.stdin.readline()

    timing, facts = drive(job, contender.open, mark=mark)
    rate = timing.samples / timing.seconds
    rates = {"samples_per_s": rate, "bytes_per_s": rate * job.sample_bytes}
    say(result={**rates, **dataclasses.asdict(timing), "facts": facts})


if __name__ == "__main__":
    main()
