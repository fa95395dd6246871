"""What a step takes when it is run: for models that cannot be traced, and for steps of other frameworks.

Run on a few small batches of noise (zeros where a sample has integers), with a straight line laid through what was
found, and a margin on top. Of a torch model, of which a copy is run, torch's allocator tells every allocation; of any
other step the kernel tells how much this process grew.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np

from penstock._core.errors import PenstockError, said
from penstock._core.fit import Line, Step, Timeline
from penstock._core.spec import is_floating
from penstock._model.gauge import process_peak, torch_events, torch_peak
from penstock._model.inputs import Refused

__all__ = ["MARGIN", "Batch", "Measured", "measured_module", "measured_step"]

Batch = Callable[[int, Callable[[tuple[int, ...], Any], Any]], Any]
"""Makes a batch of so many samples with a function from (shape, dtype) to a leaf."""

# What small batches do not show: kernels that change with the size, memory that an allocator keeps in larger pieces.
MARGIN: Final = 0.15
# Two runs from which each allocation is gone on with, and a third that has to come out as they say.
RUNS: Final = (4, 8, 16)
OFF: Final = 0.05
# Otherwise peaks are gone on with, from batches that take a good part of the budget: twice as many samples may then
# take four times as much, and still fit.
SEEN: Final = 0.25
# A process is measured in pages, and what it had free before hides what it takes: so on until growth is plain to see.
PLAIN_BYTES: Final = 32 * 2**20
GROWTH: Final = 1.2
MOST_TRIES: Final = 5
MOST_ROWS: Final = 4096
MOST_S: Final = 20.0  # a machine that is busy takes several times as long, and small batches tell little


class Measured:
    """What a step takes, gone on from what was measured."""

    def __init__(self, law: Line | Timeline, sizes: Iterable[int], fixed: tuple[tuple[str, int], ...] = ()) -> None:
        """``fixed`` are parts of it whose bytes are known."""
        self.sizes = sorted(sizes)
        self._law = law
        self._fixed = fixed

    def step(self, rows: int) -> Step:
        """What a step takes with a batch of ``rows`` samples."""
        rest = max(0, self._law.nbytes(rows) - sum(size for _, size in self._fixed))
        return Step(rows, (*self._fixed, ("step, as measured", rest), ("margin", int(rest * MARGIN))))


def measured_module(
    model: Any,
    make: Callable[[], Any] | None,
    *,
    optimizer: Any,
    loss: Any,
    train: bool,
    batch: Batch,
    device: str,
    most: int,
    budget: int,
) -> Measured:
    """A torch model, or what made it: it is made anew or copied for each size."""
    import torch

    from penstock._model.torch_step import keeps_state, make_optimizer, run_steps, unwrapped
    from penstock.torch import from_array

    original = unwrapped(model)
    parameter_bytes = 0

    def run(values: Any) -> None:
        nonlocal parameter_bytes
        memo: dict[int, Any] = {}
        twin = unwrapped(make()) if make is not None else copy.deepcopy(original, memo)
        twins = {id(p): memo[id(p)] for p in original.parameters() if id(p) in memo}
        if twin.training != train:
            twin.train(train)
        # A lazy layer has its parameters only once it was run.
        if any(isinstance(p, torch.nn.parameter.UninitializedParameter) for p in twin.parameters()):
            run_steps(twin, values, optimizer=None, loss=None, train=False, mark=lambda *_: None)
        made = make_optimizer(optimizer, list(twin.parameters()), twins)
        run_steps(twin, values, optimizer=made, loss=loss, train=train, mark=lambda *_: None)
        unique = {id(t): t for t in (*twin.parameters(), *twin.buffers())}
        parameter_bytes = sum(t.numel() * t.element_size() for t in unique.values())

    def watched(rows: int, watch: Callable[[Callable[[], Any]], Any]) -> Any:
        # Made before: the plan counts the batches.
        values = batch(rows, lambda shape, dtype: _moved(from_array(_noise(shape, dtype)), device))
        with keeps_state(model):
            return _tried(rows, lambda: watch(lambda: run(values)))

    if device == "cpu" and most >= RUNS[-1]:
        runs = {rows: watched(rows, torch_events) for rows in RUNS}
        few, more, third = runs.items()
        timeline = Timeline.through(few, more)
        peak = max(0, 0, *itertools.accumulate(third[1]))
        if timeline is not None and abs(timeline.nbytes(third[0]) - peak) <= OFF * peak:
            return Measured(timeline, RUNS, (("parameters", parameter_bytes),))
    points = _points(
        lambda rows: watched(rows, lambda function: torch_peak(function, device)),
        most,
        until=lambda found: len(found) > 1 and max(found.values()) > SEEN * budget,
    )
    return Measured(Line.through(points, margin=0), points, (("parameters", parameter_bytes),))


def measured_step(step: Callable[..., Any], *, batch: Batch, leaf: Callable[[Any], Any] | None, most: int) -> Measured:
    """Any function of a batch, in whatever framework: called with the parts of a tuple, or by the names of a dict."""
    most_seen = 0

    def peak(rows: int) -> int:
        values = batch(rows, lambda shape, dtype: (leaf or _same)(_noise(shape, dtype)))

        def run() -> None:
            result = (
                step(**values) if isinstance(values, dict) else step(*values) if _is_plain(values) else step(values)
            )
            wait = getattr(result, "block_until_ready", None) or getattr(result, "realize", None)
            if callable(wait):  # JAX and tinygrad go on while they still compute
                wait()

        nonlocal most_seen
        run()  # the first time it imports, compiles and fills its caches
        # The largest of some: a framework that frees the last step's memory in the middle of this one hides some of it.
        # So it does where a batch seems to take less than a smaller one did.
        seen = [process_peak(run) for _ in range(2)]
        while len(seen) < MOST_TRIES and max(seen) < most_seen:
            seen.append(process_peak(run))
        most_seen = max(most_seen, *seen)
        return max(seen)

    def plainly_grows(found: dict[int, int]) -> bool:
        plain = [nbytes for _, nbytes in sorted(found.items()) if nbytes >= PLAIN_BYTES]
        return len(plain) >= 2 and plain[-1] > GROWTH * plain[0]

    points = _points(peak, most, until=plainly_grows)
    plain = {rows: nbytes for rows, nbytes in points.items() if nbytes >= PLAIN_BYTES}
    points = plain if len(plain) >= 2 else points
    return Measured(Line.through(points, margin=0), points)


def _moved(leaf: Any, device: str) -> Any:
    return leaf if isinstance(leaf, np.ndarray) else leaf.to(device)


def _points(peak: Callable[[int], int], most: int, *, until: Callable[[dict[int, int]], bool]) -> dict[int, int]:
    """Peaks by number of samples: 2, 4, 8 and so on."""
    points: dict[int, int] = {}
    began = time.monotonic()
    rows = min(2, most)
    while rows not in points and not until(points) and (len(points) < 2 or time.monotonic() - began < MOST_S):
        points[rows] = _tried(rows, lambda rows=rows: peak(rows))  # type: ignore[misc]  # it is called at once
        rows = min(2 * rows, most, MOST_ROWS)
    return points


def _tried(rows: int, run: Callable[[], Any]) -> Any:
    """What it returns; if it fails, an error that says with what."""
    try:
        return run()
    except (PenstockError, Refused):
        raise
    except Exception as error:
        raise PenstockError(
            f"a step of the model failed with a batch of {rows} samples, so there is nothing to plan with: "
            f"{said(error)}. Its inputs were made up from the form of a sample (noise, integers 0): give a model and a "
            "loss that take them, or batch_size as a number and no model"
        ) from error


def _noise(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    if not is_floating(dtype):
        return np.zeros(shape, dtype)
    return np.random.default_rng(0).standard_normal(shape, np.float32).astype(dtype)


def _is_plain(values: Any) -> bool:
    return isinstance(values, tuple | list)


def _same(array: Any) -> Any:
    return array
