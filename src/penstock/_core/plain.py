"""Loads the items of a task and writes their samples, for samples of plain arrays and numbers: the loop of ``fill``.

Runs where the work is done. A load of a few microseconds is common, and asking again for each sample how many leaves
there are and of what kind takes as long. So the loop is written out once for the form of the samples, as text, and
compiled. It writes nothing unless the sample is exactly what the first one was; what is odd about all others, and what
becomes of errors, is decided by ``fill``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from penstock._core.source import Unread
from penstock._core.spec import Array, Leaf, Spec

__all__ = ["MOST_VIEWS", "Loop", "Place", "Plain", "Step", "Watched", "plain_of"]

MOST_VIEWS: Final = 4096
"""Rows of slots that are kept as arrays of their own: writing to one takes half as long, and it weighs 134 bytes."""

Step = tuple[int, int, int, Any]
"""The place of an item in its task, its index, its row, and the item itself."""


class Place(Protocol):
    """Where the place of the item that is being loaded is noted."""

    def __setitem__(self, at: int, ordinal: int, /) -> None: ...


class Watched:
    """The same where somebody wants to be called."""

    __slots__ = ("_beat",)

    def __init__(self, beat: Callable[[int], None]) -> None:
        self._beat = beat

    def __setitem__(self, at: int, ordinal: int) -> None:
        self._beat(ordinal)


class Loop(Protocol):
    """Goes over the items of a task."""

    def __call__(
        self,
        steps: Iterable[Step],
        load: Callable[[Any], Any],
        place: Place,
        moment: Any,
        failed: Callable[[Exception, int, int, Any], None],
        odd: Callable[[Any, int, int, Any], None],
        columns: Sequence[Any],
    ) -> None:
        """``failed`` is told the error of a load, ``odd`` a sample that was not written; then row, place and item."""


class Plain(NamedTuple):
    """How samples of one form are written."""

    loop: Loop
    rows: tuple[bool, ...]
    """For each leaf whether its values are arrays with axes."""

    def views(self, columns: Sequence[Array]) -> list[Any]:
        """The columns with rows that are arrays of their own; the loop takes either."""
        return [list(column) if has_axes else column for column, has_axes in zip(columns, self.rows, strict=True)]


def plain_of(spec: Spec) -> Plain | None:
    """The loop for samples of this form; None for texts, and for what is cast while it is written."""
    if any(leaf.kind != "array" or leaf.stored != leaf.dtype for leaf in spec.leaves):
        return None
    names: dict[str, Any] = {"__name__": __name__, "ndarray": np.ndarray, "Unread": Unread}
    leaves = range(len(spec.leaves))
    taken = _taken_apart(spec, names)
    fits = " and ".join(_fits(number, leaf, names) for number, leaf in enumerate(spec.leaves))
    # A row is an array, made here or before: a value is copied into it. A number is put in its place.
    writes = [f"column_{n}[row]{'[...]' if spec.leaves[n].shape else ''} = value_{n}" for n in leaves]
    values = " = ".join(f"value_{n}" for n in leaves)
    text = f"""
def loop(steps, load, place, moment, failed, odd, columns):
    {"".join(f"column_{n}, " for n in leaves)} = columns
    for ordinal, index, row, item in steps:
        place[0] = ordinal
        moment.index = index
        try:
            if type(item) is Unread:
                item = item.item()
            sample = load(item)
        except Exception as error:
            failed(error, row, ordinal, item)
            continue
        try:
            {taken}
            if {fits}:
                {"; ".join(writes)}
                sample = {values} = None  # or the next load would find its memory taken
                continue
        except Exception:
            pass
        odd(sample, row, ordinal, item)
        sample = {values} = None
"""
    # Nothing in it comes from outside: keys, shapes and dtypes are names.
    exec(compile(text, "<penstock: the loop for one form of sample>", "exec"), names)
    return Plain(names["loop"], tuple(bool(leaf.shape) for leaf in spec.leaves))


def _taken_apart(spec: Spec, names: dict[str, Any]) -> str:
    """What makes leaves of a sample; whatever it raises means that the sample's tree is another one."""
    tree, count = spec.tree, len(spec.leaves)
    values = "".join(f"value_{n}, " for n in range(count))
    if tree.num_nodes == 1:
        return "value_0 = sample"
    flat = tree.num_nodes == count + 1
    if flat and tree.type in (tuple, list):
        names["kind"] = tree.type
        return f"{values} = sample if type(sample) is kind else ()"
    if flat and tree.type is dict:
        for number, key in enumerate(tree.entries()):
            names[f"key_{number}"] = key
        found = "".join(f"sample[key_{n}], " for n in range(count))
        return f"{values} = ({found}) if type(sample) is dict and len(sample) == {count} else ()"
    names["flatten_up_to"] = tree.flatten_up_to
    return f"{values} = flatten_up_to(sample)"


def _fits(number: int, leaf: Leaf, names: dict[str, Any]) -> str:
    """Whether a value can be written as it is."""
    scalar = leaf.dtype.type
    common = np.dtype(scalar) == leaf.dtype if not issubclass(scalar, np.flexible) else False
    # The dtype that nearly all arrays have, which is one object; that of a leaf came through a pickle and is another.
    names[f"dtype_{number}"] = np.dtype(scalar) if common else leaf.dtype
    names[f"shape_{number}"] = leaf.shape
    value, dtype, shape = f"value_{number}", f"dtype_{number}", f"shape_{number}"
    array = f"type({value}) is ndarray and ({value}.dtype is {dtype} or {value}.dtype == {dtype})"
    array = f"({array} and {value}.shape == {shape})"
    # Dates have a unit and records fields, which their type does not tell.
    if leaf.shape or not common:
        return array
    kinds = [f"type({value}) is scalar_{number}"]
    names[f"scalar_{number}"] = scalar
    if (python := _NUMBERS.get(leaf.dtype)) is not None:
        names[f"number_{number}"] = python
        kinds.insert(0, f"type({value}) is number_{number}")
    return f"({' or '.join((*kinds, array))})"


_NUMBERS: Final[dict[np.dtype[Any], type[Any]]] = {
    np.asarray(number).dtype: type(number) for number in (0, 0.0, False, 0j)
}
