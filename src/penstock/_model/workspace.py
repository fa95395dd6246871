"""What operations take for themselves on the CPU, which no trace can see. Imports torch.

oneDNN keeps images in layouts of its own: before a convolution it copies input and weights, and afterwards the result
back. Attention makes its inputs contiguous. How much that is depends on shapes, dtype, processor and settings, so it is
not computed but measured: each such operation of a model is run by itself on a few samples, and a line laid through
what torch's allocator gave out meanwhile. Products of half precision are summed up in float32; that is computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch

from penstock._core.fit import Line
from penstock._model.gauge import torch_peak

__all__ = ["Call", "Untraceable", "Workspaces"]

# Numbers of samples on which an operation is run; the fewer if it takes more than this with the most of them.
FEW_ROWS: Final = (4, 8)
FEWER_ROWS: Final = (1, 2)
MOST_BYTES: Final = 64 * 2**20

# Which arguments have the samples along their first axis.
_BATCHED: Final = {
    "aten::convolution": (0,),
    "aten::convolution_backward": (0, 1),
    "aten::_scaled_dot_product_flash_attention_for_cpu": (0, 1, 2),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (0, 1, 2, 3, 4, 5),
}
_PRODUCTS: Final = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})
# What it keeps for the backward pass has no shape in a trace.
_HIDDEN: Final = frozenset({"aten::mkldnn_rnn_layer"})


class Untraceable(Exception):
    """An operation whose memory a trace cannot tell; the step has to be measured."""


@dataclass(frozen=True, slots=True)
class _Form:
    """A tensor as an argument: its sizes, and its axes from the largest stride to the smallest."""

    shape: tuple[int, ...]
    dtype: Any
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """An operation with the forms of its arguments, for ``rows`` samples."""

    name: str
    overload: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    rows: int
    known_bytes: int | None = None
    """What it takes, its result included, where that need not be measured."""

    @classmethod
    def of(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Call | None:
        """The call, if it is one that takes memory for itself."""
        name = func._schema.name
        if name in _HIDDEN:
            raise Untraceable(f"{name} keeps memory that has no shape")
        if name in _PRODUCTS and result.dtype in (torch.bfloat16, torch.float16):
            return cls(name, func, (), (), 0, known_bytes=result.numel() * (result.element_size() + 4))
        if name not in _BATCHED:
            return None
        # A trace has attention's results in another order of axes than the kernel: take the one that needs a copy.
        strided = "attention" not in name
        forms = tuple(_form(value, batched=at in _BATCHED[name], strided=strided) for at, value in enumerate(args))
        return cls(name, func, forms, tuple(sorted(kwargs.items())), args[0].shape[0])

    def measured(self, rows: int) -> int:
        """The most bytes that were given out while it ran for real on so many samples."""
        batched = _BATCHED[self.name]
        args = [_real(form, rows if at in batched else None) for at, form in enumerate(self.args)]
        return torch_peak(lambda: self.overload(*args, **dict(self.kwargs)), "cpu")

    def row_bytes(self) -> int:
        """About what one sample takes, with copies."""
        forms = [form for form in self.args if isinstance(form, _Form) and form.shape]
        return sum(2 * math.prod(form.shape[1:]) * int(form.dtype.itemsize) for form in forms)


class Workspaces:
    """Measures each kind of call once."""

    def __init__(self) -> None:
        self._lines: dict[Any, Line] = {}

    def nbytes(self, call: Call) -> int:
        """The most that a call takes, its result included."""
        if call.known_bytes is not None:
            return call.known_bytes
        sizes: tuple[int, ...] = FEW_ROWS if call.row_bytes() * FEW_ROWS[-1] <= MOST_BYTES else FEWER_ROWS
        if call.rows <= sizes[-1]:
            sizes = (call.rows,)
        key = (call.name, call.args, call.kwargs, sizes)
        if key not in self._lines:
            self._lines[key] = Line.through({rows: call.measured(rows) for rows in sizes}, margin=0)
        return self._lines[key].nbytes(call.rows)


def _form(value: Any, *, batched: bool, strided: bool) -> Any:
    if isinstance(value, torch.Tensor):
        shape = (0, *value.shape[1:]) if batched else tuple(value.shape)
        axes = range(value.ndim)
        order = sorted(axes, key=lambda axis: (-value.stride(axis), axis)) if strided else axes
        return _Form(shape, value.dtype, tuple(order))
    return tuple(value) if isinstance(value, list) else value


def _real(form: Any, rows: int | None) -> Any:
    if not isinstance(form, _Form):
        return list(form) if isinstance(form, tuple) else form
    shape = form.shape if rows is None else (rows, *form.shape[1:])
    tensor = torch.zeros([shape[axis] for axis in form.order], dtype=form.dtype)
    return tensor.permute([form.order.index(axis) for axis in range(len(shape))])
