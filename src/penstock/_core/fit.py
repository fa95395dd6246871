"""How large a batch a model's step leaves room for on its device: the search, and the line through measurements. Pure.

Whoever can tell what a step takes (``penstock._model``: a trace, or a measurement) is asked for a few batch sizes.
Which ones, and when to stop, is decided here. What becomes of the answer is ``plan``'s business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["Asked", "Line", "Need", "Step", "Timeline", "largest"]

# A batch of one is a case of its own to some layers (a batch norm refuses it), so two are tried first.
FIRST_ROWS: Final = 2
SECOND_ROWS: Final = 8
# A straight line is found with three sizes, one with corners with up to eight. More helps only where there is no law.
MOST_SIZES: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Asked:
    """The model that a batch has to leave room for, as the user gave it."""

    model: Any
    optimizer: Any = None
    loss: Any = None
    train: bool = True
    device: str | None = None
    """The kind of device it will run on, such as "cuda"; None: the one that it is on."""
    buffers: int = 2
    """Batches on the device: 2 where one is copied while another is computed on, 1 where a loop makes them in turn."""
    in_place: bool = False
    """Whether a model on the CPU reads batches from their slots, so that they take nothing beside it."""
    leaf: Callable[[Any], Any] | None = None
    """What makes of an array a leaf of a batch, for steps that are run; None: NumPy is right."""

    @classmethod
    def checked(cls, model: Any, optimizer: Any, loss: Any, *, train: bool, buffers: int = 2) -> Asked | None:
        """What was asked for; None without a model."""
        if model is not None:
            return cls(model=model, optimizer=optimizer, loss=loss, train=bool(train), buffers=buffers)
        for name, value in (("optimizer", optimizer), ("loss", loss)):
            if value is not None:
                raise TypeError(f"{name} is part of a model's step: give the model as well, as model=")
        return None


@dataclass(frozen=True, slots=True)
class Step:
    """What a step takes on its device at its peak, with a batch of ``rows`` samples; the batch itself not counted."""

    rows: int
    parts: tuple[tuple[str, int], ...]
    """What it is, and its bytes."""

    resting: int | None = None
    """Bytes that stay from one step to the next: parameters, gradients, state; None if that is not known."""

    @property
    def nbytes(self) -> int:
        """All parts together."""
        return sum(size for _, size in self.parts)

    def with_batches(self, batch_bytes: int, buffers: int) -> int:
        """All parts, and the batches beside them."""
        total = self.nbytes + buffers * batch_bytes
        if buffers != 1:
            return total
        # The next batch is made while the loop still has the last one; what the step took is free by then.
        resting = self.nbytes if self.resting is None else self.resting
        return max(total, resting + 2 * batch_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a model leaves room for: the step with the largest batch that fits, or with the batch that was asked for."""

    step: Step
    buffers: int
    """Batches that lie on the device beside the model."""
    bound: str
    """What made it no larger: "device", "host" (which may have too few samples), "ranks", or "asked"."""
    notes: tuple[str, ...] = ()
    """How this was found."""


@dataclass(frozen=True, slots=True)
class Line:
    """Bytes as a straight line over the number of samples, on or above every point that it was laid through."""

    fixed: float
    slope: float

    @classmethod
    def through(cls, points: Mapping[int, int], *, margin: float) -> Line:
        """As steep as any two neighbouring points, and on or above all of them; then the margin on top."""
        if not points:
            raise ValueError("a line needs at least one point")
        sizes = sorted(points)
        slopes = [(points[b] - points[a]) / (b - a) for a, b in pairwise(sizes)]
        # From a single point nothing is known about what is fixed: all of it is taken to grow.
        slope = max(0.0, *slopes) if slopes else points[sizes[0]] / sizes[0]
        fixed = max(points[size] - slope * size for size in sizes)
        return cls(fixed * (1 + margin) if fixed > 0 else fixed, slope * (1 + margin))

    def nbytes(self, rows: int) -> int:
        """Bytes for a batch of ``rows`` samples."""
        return max(0, math.ceil(self.fixed + self.slope * rows))


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """What was allocated and freed, in order, with each size a straight line over the number of samples.

    The peak of a step is where it is for other reasons with few samples than with many: at first when all gradients are
    there, later when all activations are. Lines through peaks miss that; lines through each allocation do not.
    """

    fixed: npt.NDArray[np.float64]
    slopes: npt.NDArray[np.float64]

    @classmethod
    def through(cls, few: tuple[int, Sequence[int]], more: tuple[int, Sequence[int]]) -> Timeline | None:
        """From two runs, each (samples, bytes allocated or minus bytes freed); None if they did not do the same."""
        (a, first), (b, second) = few, more
        before, after = np.asarray(first, np.float64), np.asarray(second, np.float64)
        if a == b or before.shape != after.shape or bool(np.any(np.sign(before) != np.sign(after))):
            return None
        slopes = (after - before) / (b - a)
        return cls(before - a * slopes, slopes)

    def nbytes(self, rows: int) -> int:
        """The most that lives at once with a batch of ``rows`` samples."""
        return max(0, math.ceil(float(np.cumsum(self.fixed + rows * self.slopes).max(initial=0))))


def largest(budget: int, most: int) -> Generator[int, int, int]:
    """Find the largest batch up to ``most`` whose bytes are within the budget; returns it, 0 if not even 1 fits.

    Yields sizes, is sent their bytes. What it returns was looked at and fits. Of bytes that grow ever faster or all the
    same (a step's peak is the highest of many straight lines) it is also the largest, unless it gave up early.
    """
    first = min(FIRST_ROWS, most)
    known = {first: (yield first)}
    if known[first] > budget:
        return 1 if first > 1 and (yield 1) <= budget else 0
    low, high = first, most + 1
    while high - low > 1 and len(known) < MOST_SIZES:
        if (guess := _guess(known, low, high, budget)) is None:
            break
        known[guess] = yield guess
        if known[guess] <= budget:
            low = guess
        else:
            high = guess
    return low


def _guess(known: Mapping[int, int], low: int, high: int, budget: int) -> int | None:
    """The size to look at next, between one that fits and one that does not; None if the next larger cannot fit."""
    # Between one that fits and one that does not: never below a curve that bends upwards, so this fits.
    rise = known[high] - known[low] if high in known else 0
    lower = max(low + 1, low + (_reach(known[low], rise, high - low, budget) or 0))
    below = sorted(size for size in known if size <= low)
    if len(below) == 1:
        return lower if high in known else min(max(SECOND_ROWS, 2 * low), high - 1)
    a, b = below[-2:]
    # Through the two largest that fit: never above such a curve, so the answer is not beyond this.
    ahead = _reach(known[b], known[b] - known[a], b - a, budget)
    upper = high - 1 if ahead is None else min(low + ahead, high - 1)
    above = sorted(size for size in known if size >= high)
    if len(above) > 1 and (rise := known[above[1]] - known[above[0]]) > 0:
        # Back along the two smallest that do not fit: below such a curve too.
        upper = min(upper, high - -(-(known[high] - budget) * (above[1] - high) // rise))
    if upper <= low:
        return None
    if not above:
        return upper
    # The upper end is the answer on a straight line. Where that has just failed, the middle comes nearer on anything.
    return upper if upper < high - 1 and len(known) % 2 else max(low + 1, min(math.isqrt(lower * upper), upper))


def _reach(nbytes: int, rise: int, run: int, budget: int) -> int | None:
    """How many samples further a line goes before it leaves the budget; None if it never does."""
    return None if rise <= 0 else (budget - nbytes) * run // rise
