"""Loads in the consumer's own process: nothing can hold them to the budget, so what they keep is counted and said."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest

from penstock import BudgetError, Feed, MiB
from penstock._core import machine

pytestmark = pytest.mark.skipif(machine.heap_gauge() is None, reason="only glibc tells what is in use on the heap")

_kept: list[Any] = []


def leaks(i: int) -> Any:
    _kept.append(np.ones(MiB(1) // 8))
    return np.full(16, i)


def leaks_slowly(i: int) -> Any:
    _kept.append(np.ones(MiB(0.25) // 8))
    time.sleep(0.001)
    return np.full(16, i)


def leaks_objects(i: int) -> Any:
    _kept.append([float(k) for k in range(20_000)])
    return np.full(16, i)


def keeps_nothing(i: int) -> Any:
    np.ones(MiB(1) // 8)
    return np.full(16, i)


class _Ring:
    def __init__(self) -> None:
        self.me, self.much = self, np.ones(MiB(1) // 8)


def leaves_rings(i: int) -> Any:
    """Garbage that only the collector finds, whenever it runs."""
    _Ring()
    return np.full(16, i)


def hungry(i: int) -> Any:
    return np.maximum.reduce([np.full(MiB(2) // 8, float(i)) for _ in range(10)])


class Ran(NamedTuple):
    """What came of a feed in a process that has done nothing else: one that has freed much need not grow to leak."""

    grown: int
    """By how much it really grew."""
    peak_bytes: int
    worker_bytes: int
    said: list[str]


def run(load: str, count: int, options: str, *, enough: bool = False) -> Ran:
    """``enough``: it ends when something was said."""
    script = f"""
import json, os, warnings
from penstock import BudgetWarning, Feed
from penstock._core import machine
from tests.memory.test_inside import {load}
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    with Feed(range({count}), {load}, batch_size=8, memory="64 MiB", {options}) as feed:
        feed.plan
        before = machine.pss_bytes(os.getpid())
        seen = 0
        for batch in feed:
            seen += len(batch)
            if said and {enough}:
                break
        else:
            assert seen == {count}
        after = machine.pss_bytes(os.getpid())
said = [str(one.message) for one in said if one.category is BudgetWarning]
print(json.dumps([after - before, feed.stats.peak_bytes, feed.stats.worker_bytes, said]))
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    return Ran(*json.loads(done.stdout))


@pytest.mark.parametrize("load", [leaks, leaks_objects])
def test_a_leak_without_workers_is_counted_and_said_once(load: Any) -> None:
    """Otherwise the budget would be broken in silence; the words have the numbers and what to do."""
    ran = run(load.__name__, 300, "num_workers=0")
    (said,) = ran.said
    assert "loads (or other threads of this process, while they ran) have kept" in said
    assert re.search(r"have kept \d.* MiB, .* of a budget of 64 MiB.*num_workers=0.*can be limited", said)
    assert ran.worker_bytes > MiB(64)
    if load is leaks:  # what small objects take is an estimate
        assert ran.grown > MiB(280)
        assert ran.peak_bytes == pytest.approx(ran.grown, rel=0.15)


def test_a_leak_in_threads_is_said_while_the_consumer_waits() -> None:
    """As far as it can be seen there."""
    # How soon that is depends on how long it takes to look at the heap, and that on what else the machine does.
    ran = run("leaks_slowly", 8000, 'num_workers=2, executor="thread"', enough=True)
    (said,) = ran.said
    assert 'in its threads (executor="thread")' in said
    assert MiB(64) < ran.peak_bytes <= 1.15 * ran.grown


@pytest.mark.parametrize("load", [keeps_nothing, leaves_rings])
@pytest.mark.parametrize(
    "options", [{"num_workers": 0}, {"num_workers": 2, "executor": "thread"}], ids=["0", "threads"]
)
def test_what_the_consumer_keeps_is_not_the_loads_fault(load: Any, options: dict[str, Any]) -> None:
    """It takes over memory that loads have freed, so that the process grows while they run; yet they keep nothing."""
    mine = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Feed(range(1600), load, batch_size=8, memory="64 MiB", **options) as feed:
            for _ in feed:
                mine.append(np.ones(MiB(1) // 8))
    assert len(mine) == 200
    if load is keeps_nothing:  # garbage is there until it is collected, and counts as long
        assert feed.stats.peak_bytes <= MiB(64)


@pytest.mark.parametrize("larger_before", [False, True])
def test_temporaries_are_planned_for_where_loads_run_in_this_process(larger_before: bool) -> None:
    """Ten times the sample, seen by the peak of the process, or by Python's own count if it was larger before."""
    script = f"""
import json
import numpy as np
from penstock import Feed
from tests.memory.test_inside import hungry
if {larger_before}:
    np.ones(300 << 17)
with Feed(range(8), hungry, batch_size=2, memory="256 MiB", num_workers=0) as feed:
    print(json.dumps(feed.plan.parent_bytes))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert MiB(4 + 20) <= json.loads(done.stdout) < MiB(60)


def test_temporaries_that_do_not_fit_are_refused_without_workers_too() -> None:
    """Twice the sample would have fitted; what was measured does not."""
    with (
        pytest.raises(BudgetError) as caught,
        Feed(range(8), hungry, batch_size=1, memory="14 MiB", num_workers=0) as f,
    ):
        f.plan  # noqa: B018 - planning is what fails
    assert caught.value.least > MiB(20)
