"""What operations take for themselves on the CPU, which no trace can see. Imports torch.

oneDNN keeps images in layouts of its own: before a convolution it copies input and weights, and afterwards the result
back. Attention makes its inputs contiguous, and in inference a whole layer of a transformer is one operation. How much
that is depends on shapes, dtype, processor and settings, so it is not computed but measured: each such operation of a
model is run by itself on a few samples, and a line laid through what torch's allocator gave out meanwhile. Products of
half precision are summed up in float32; that is computed. So is a bound for the layers of transformers that are too
large to be run for a plan, or that will run on another device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from penstock._core.fit import Line
from penstock._model.gauge import torch_peak

__all__ = ["Call", "Untraceable", "Workspaces"]

# Numbers of samples on which an operation is run, three of them because kernels have a corner among the first; the
# fewer if it takes more than this with the most of them.
FEW_ROWS: Final = (4, 8, 16)
FEWER_ROWS: Final = (1, 2)
MOST_BYTES: Final = 64 * 2**20
# A layer of a transformer that takes more than this for one sample, in multiplications or in bytes, is not run.
MOST_WORK: Final = 2**33
MOST_LAYER_BYTES: Final = 256 * 2**20

# Which arguments have the samples along their first axis.
_BATCHED: Final = {
    "aten::convolution": (0,),
    "aten::convolution_backward": (0, 1),
    "aten::_scaled_dot_product_flash_attention_for_cpu": (0, 1, 2),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (0, 1, 2, 3, 4, 5),
}
_HALF: Final = (torch.bfloat16, torch.float16)
_FLASH: Final = frozenset(name for name in _BATCHED if "attention" in name)
# Of complex numbers these are computed as such, and then made real.
_OF_COMPLEX: Final = frozenset({"aten::abs", "aten::angle"})
_TRANSFORMS: Final = frozenset({"aten::_fft_r2c", "aten::_fft_c2r", "aten::_fft_c2c"})
_PRODUCTS: Final = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})


class _Layer(NamedTuple):
    """Where a layer of a transformer that is one operation has its arguments."""

    inputs: tuple[int, ...]
    heads: int
    weights: tuple[int, ...]
    mask: int
    mask_type: int
    more: tuple[int, int]
    """An argument, and how many times its input a layer takes in addition if that is true (as it is by default)."""


_LAYERS: Final = {
    "aten::_native_multi_head_attention": _Layer((0, 1, 2), 4, (5, 7), 9, 12, (10, 2)),
    "aten::_transformer_encoder_layer_fwd": _Layer((0,), 2, (3, 5, 14, 16), 18, 19, (8, 1)),
}
# A mask of this type has one row for all samples.
_SHARED_MASK: Final = 0
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
    repeated: tuple[int, ...]
    """Axes along which there is one value only."""
    batched: bool


@dataclass(frozen=True, slots=True)
class _Again:
    """The same tensor as another argument: kernels do less where query, key and value are one."""

    at: int


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
    scores_bytes: int = 0
    """What all queries have for all keys of one sample, where an operation keeps that."""

    @classmethod
    def of(
        cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, *, runs: bool = True
    ) -> Call | None:
        """The call, if it is one that takes memory for itself; ``runs``: it will run here, where it can be measured."""
        name = func._schema.name
        if not runs:
            if name not in _LAYERS:
                return None
            return cls(name, func, (), (), 0, known_bytes=_bound(_LAYERS[name], args))
        if name in _HIDDEN:
            raise Untraceable(f"{name} keeps memory that has no shape")
        if name in _PRODUCTS and result.dtype in _HALF:
            return cls(name, func, (), (), 0, known_bytes=result.numel() * (result.element_size() + 4))
        batched = _batched(name, args)
        if not batched:
            return None
        scores = 0
        if name in _LAYERS:
            scores = _scores(_LAYERS[name], args) * args[0].element_size()
            if _work(_LAYERS[name], args) > MOST_WORK or scores > MOST_LAYER_BYTES:
                return cls(name, func, (), (), 0, known_bytes=_bound(_LAYERS[name], args))
        # A trace has attention's results in another order of axes than the kernel: take the one that needs a copy.
        strided = name not in _FLASH
        forms: list[Any] = []
        for at, value in enumerate(args):
            first = next((i for i in range(at) if value is args[i]), at) if isinstance(value, torch.Tensor) else at
            forms.append(_Again(first) if first < at else _form(value, batched=at in batched, strided=strided))
        rows = args[batched[0]].shape[0]
        named = tuple(
            (key, _form(value, batched=_has_rows(value, rows), strided=strided))
            for key, value in sorted(kwargs.items())
        )
        return cls(name, func, tuple(forms), named, rows, scores_bytes=scores)

    def measured(self, rows: int) -> int:
        """The most bytes that were given out while it ran for real on so many samples."""
        args: list[Any] = []
        for form in self.args:
            args.append(args[form.at] if isinstance(form, _Again) else _real(form, rows))
        kwargs = {key: _real(form, rows) for key, form in self.kwargs}
        with torch.no_grad():
            return torch_peak(lambda: self.overload(*args, **kwargs), "cpu")

    def row_bytes(self) -> int:
        """About what one sample takes, with copies."""
        forms = [form for form in self.args if isinstance(form, _Form) and form.shape]
        inputs = sum(2 * math.prod(form.shape[1:]) * int(form.dtype.itemsize) for form in forms)
        return inputs + 2 * self.scores_bytes


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


def _batched(name: str, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Which arguments have the samples along their first axis; none if it takes nothing for itself."""
    if name in _LAYERS:
        layer = _LAYERS[name]
        masked = len(args) > layer.mask_type and args[layer.mask] is not None
        return (*layer.inputs, layer.mask) if masked and args[layer.mask_type] != _SHARED_MASK else layer.inputs
    if name in _TRANSFORMS:  # one along the samples mixes them, and is not looked at
        return () if 0 in (axis % args[0].ndim for axis in args[1]) else (0,)
    if name in _OF_COMPLEX:
        return (0,) if args[0].is_complex() and args[0].ndim else ()
    if name == "aten::_trilinear":  # of nn.Bilinear: which axes each of the three tensors lacks
        return tuple(at for at in range(3) if 0 not in args[3 + at])
    return _BATCHED.get(name, ())


def _has_rows(value: Any, rows: int) -> bool:
    """Whether this is a mask with a part for each sample."""
    return isinstance(value, torch.Tensor) and value.ndim == 4 and value.shape[0] == rows


def _scores(layer: _Layer, args: tuple[Any, ...]) -> int:
    """How many scores a layer computes for one sample: of each query for each key, in each head."""
    keys = max(args[at].shape[1] for at in layer.inputs)
    return int(args[layer.heads] * args[0].shape[1] * keys)


def _work(layer: _Layer, args: tuple[Any, ...]) -> int:
    """How many multiplications a layer makes for one sample."""
    longest = max(args[at].shape[1] for at in layer.inputs)
    products = longest * sum(args[at].numel() for at in layer.weights)
    return int(products + 2 * args[0].shape[1] * longest * args[0].shape[2])


def _bound(layer: _Layer, args: tuple[Any, ...]) -> int:
    """What a layer takes at the most, its result included."""
    rows, queries, width = args[0].shape
    size, scores = args[0].element_size(), _scores(layer, args)
    one = max(args[at].shape[1] for at in layer.inputs) * width
    flag, times = layer.more
    beside = times * one if len(args) <= flag or args[flag] else 0
    masked = len(args) > layer.mask and args[layer.mask] is not None
    inner = max(args[at].shape[0] for at in layer.weights) * queries
    summed = 4 if args[0].dtype in _HALF else 0  # bytes of each number while a product is made
    # Query, key and value twice; or once, and scores, which a mask doubles; or what is between the last two products.
    most = max(
        3 * one * (size + max(size, summed)),
        3 * one * size + scores * (summed + (2 * size + 1 if masked else size)),
        2 * one * size + inner * (size + summed),
    )
    return int(rows * (most + size * (beside + 2 * queries)))


def _form(value: Any, *, batched: bool, strided: bool) -> Any:
    if isinstance(value, torch.Tensor):
        shape = (0, *value.shape[1:]) if batched else tuple(value.shape)
        axes = range(value.ndim)
        order = sorted(axes, key=lambda axis: (-value.stride(axis), axis)) if strided else axes
        repeated = tuple(axis for axis in axes if strided and value.stride(axis) == 0 and value.shape[axis] > 1)
        return _Form(shape, value.dtype, tuple(order), repeated, batched)
    return tuple(value) if isinstance(value, list) else value


def _real(form: Any, rows: int) -> Any:
    if not isinstance(form, _Form):
        return list(form) if isinstance(form, tuple) else form
    shape = (rows, *form.shape[1:]) if form.batched else form.shape
    sizes = [1 if axis in form.repeated else shape[axis] for axis in form.order]
    tensor = torch.zeros(sizes, dtype=form.dtype)
    return tensor.permute([form.order.index(axis) for axis in range(len(shape))]).expand(shape)
