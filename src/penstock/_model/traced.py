"""What a step of a torch model takes, without running it: fake tensors have shapes and no memory. Imports torch.

The model is copied with its tensors replaced by fake ones: nothing of the user's is touched and nothing is allocated.
Every operation then goes through ``Meter``, which keeps a book of the storages that live: when each was born, when it
died, and what it turned out to be. Exact where operations allocate what they return; what they allocate for themselves
is ``workspace``'s business.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import warnings
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from penstock._core.fit import Step
from penstock._model.measured import Batch
from penstock._model.torch_step import is_module, keeps_state, make_optimizer, run_steps, unwrapped
from penstock._model.workspace import Call, Workspaces

__all__ = ["Mismatch", "Tracer", "built"]

# On top of activations and workspaces, for what kernels do that a trace cannot know. On the CPU nothing was found to
# need it (tests/frameworks/test_model_plan.py); elsewhere it is for cuDNN and fragmentation, and never measured.
CPU_MARGIN: Final = 0.02
DEVICE_MARGIN: Final = 0.08
DEVICE_BLOCK: Final = 512  # CUDA's allocator gives whole blocks of this many bytes
# cuBLAS takes 8 MiB on most GPUs and 32 on the newest, once, from the same allocator.
DEVICE_FIXED_BYTES: Final = 32 * 2**20
PARTS: Final = ("parameters", "gradients", "optimizer state", "activations", "workspace")


_OPS: Final = torch.ops.aten
# Kernels refuse to mix types here, and tensors without memory do not say so.
_PRODUCTS: Final = {_OPS.mm.default: 0, _OPS.bmm.default: 0, _OPS.mv.default: 0, _OPS.dot.default: 0} | {
    op.default: 1 for op in (_OPS.addmm, _OPS.baddbmm, _OPS.addmv, _OPS.addbmm)
}
_NORMS: Final = (_OPS.native_batch_norm.default, _OPS.native_layer_norm.default, _OPS.native_group_norm.default)


class Mismatch(Exception):
    """Types that no kernel takes together."""


def check_types(func: Any, args: tuple[Any, ...]) -> None:
    """Mismatch where an operation will fail on real tensors for the types of its arguments."""
    if (first := _PRODUCTS.get(func)) is not None:
        left, right = (str(tensor.dtype).removeprefix("torch.") for tensor in args[first : first + 2])
        if left != right:
            raise Mismatch(f"it multiplies {left} with {right}")
    elif func in _NORMS and not args[0].is_floating_point():
        raise Mismatch(f"it normalizes {str(args[0].dtype).removeprefix('torch.')}")


class _Held:
    """A storage in the book."""

    __slots__ = ("born", "died", "kind", "nbytes", "ref")

    def __init__(self, nbytes: int, kind: str, born: int) -> None:
        self.nbytes = nbytes
        self.kind = kind
        self.born = born
        self.died: int | None = None
        self.ref: Any = None


class Meter(TorchDispatchMode):  # type: ignore[misc]  # torch is Any to the type checker
    """Counts what lives while operations are dispatched."""

    def __init__(self, block: int, *, on_cpu: bool) -> None:
        super().__init__()
        self._block = block
        self._on_cpu = on_cpu
        self._held: list[_Held] = []
        self._by_storage: dict[int, _Held] = {}
        self._clock = 0
        self._live = 0
        self._peak = (0, 0)
        self.calls: list[tuple[Call, int, int, int]] = []
        """Calls that take workspace: with the clock and the live bytes before, and the live bytes after."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        clock, live = self._clock, self._live
        check_types(func, args)
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.prim.device.default:
            for leaf in torch.utils._pytree.tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self.hold(leaf, "activations")
            call = Call.of(func, args, kwargs or {}, result, runs=self._on_cpu)
            if call is not None:
                self.calls.append((call, clock, live, self._live))
        return result

    def hold(self, tensor: Any, kind: str, *, counted: bool = True) -> None:
        """Enter the storage of a tensor, unless it is in the book already."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # sparse: its parts are tensors of their own
            return
        key = storage._cdata
        if key in self._by_storage:
            return
        self._clock += 1
        nbytes = -(-storage.nbytes() // self._block) * self._block if counted else 0
        held = _Held(nbytes, kind, self._clock)
        held.ref = weakref.ref(storage, partial(self._drop, key))
        self._held.append(held)
        self._by_storage[key] = held
        self._live += nbytes
        if self._live > self._peak[0]:
            self._peak = (self._live, self._clock)

    def mark(self, kind: str, tensors: Iterable[Any]) -> None:
        """Say what tensors turned out to be."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and (held := self._by_storage.get(tensor.untyped_storage()._cdata)):
                held.kind = kind

    def _drop(self, key: int, _: object) -> None:
        held = self._by_storage.pop(key)
        self._clock += 1
        held.died = self._clock
        self._live -= held.nbytes

    @property
    def live(self) -> int:
        """The bytes that live now."""
        return self._live

    def left(self) -> bool:
        """Whether any storage still lives."""
        return bool(self._by_storage)

    def parts(self, workspaces: Workspaces) -> dict[str, int]:
        """The bytes of each kind at the peak."""
        peak, clock = self._peak
        inside = 0
        for call, before, live, after in self.calls:
            most = live + workspaces.nbytes(call)
            if most > peak:
                peak, clock, inside = most, before, most - after
                extra = after - live
        found = dict.fromkeys(PARTS, 0)
        for held in self._held:
            if held.born <= clock and (held.died is None or held.died > clock):
                found[held.kind] += held.nbytes
        if inside:
            found["activations"] += extra
            found["workspace"] = inside
        return found


class Tracer:
    """Traces one model at one batch size after the other."""

    def __init__(
        self,
        model: Any,
        *,
        optimizer: Any,
        loss: Any,
        train: bool,
        batch: Batch,
        device: str | None,
    ) -> None:
        self._original = model
        self._optimizer, self._loss, self._train, self._batch = optimizer, loss, train, batch
        self._model = unwrapped(model)
        found = next((p.device for p in self._model.parameters()), torch.device("cpu"))
        # A model on the meta device has no memory yet: it will go to the GPU if there is one.
        usual = "cuda" if torch.cuda.is_available() else "cpu"
        self._place = torch.device("cpu") if found.type == "meta" else found
        self.device = device or (usual if found.type == "meta" else found.type)
        on_cpu = self.device == "cpu"
        self._on_cpu = on_cpu and self._place.type == "cpu"
        self._workspaces = Workspaces()
        self._block = 1 if on_cpu else DEVICE_BLOCK
        self.margin = CPU_MARGIN if on_cpu else DEVICE_MARGIN
        self.loss_name = ""
        self._told = False

    @property
    def parameter_type(self) -> str:
        """The type that most of its parameters have, such as "float32"; "" if it has none."""
        sizes: dict[str, int] = {}
        for parameter in self._model.parameters():
            name = str(parameter.dtype).removeprefix("torch.")
            lazy = isinstance(parameter, torch.nn.parameter.UninitializedTensorMixin)
            sizes[name] = sizes.get(name, 0) + (1 if lazy else parameter.numel())
        return max(sizes, key=lambda name: sizes[name], default="")

    @property
    def parameter_bytes(self) -> int:
        """Bytes of parameters and buffers, each counted once."""
        tensors = (*self._model.parameters(), *self._model.buffers())
        unique = {id(t): t for t in tensors if not isinstance(t, torch.nn.parameter.UninitializedTensorMixin)}
        return sum(t.numel() * t.element_size() for t in unique.values())

    def step(self, rows: int) -> Step:
        """What a step takes with a batch of ``rows`` samples."""
        meter = Meter(self._block, on_cpu=self._on_cpu)
        with keeps_state(self._original), warnings.catch_warnings(), _unlogged():
            warnings.simplefilter("ignore")  # of torch's about fake tensors, and of the model's, once more each trace
            resting = self._run(meter, rows)
        torch.clear_autocast_cache()  # it has casts of the copies, where the caller is under autocast
        if not self._told and meter.left():
            gc.collect()
            if meter.left():
                self._told = True
                warnings.warn(
                    "the model put a tensor somewhere outside of itself (a cache, a list) while it was traced: that "
                    "one has no data, so clear it before the model is run; or give batch_size as a number and no model",
                    UserWarning,
                    stacklevel=2,
                )
        parts = meter.parts(self._workspaces)
        spread = parts["activations"] + parts["workspace"]
        margin = int(spread * self.margin) + (0 if self.device == "cpu" else DEVICE_FIXED_BYTES)
        buckets = self._bucket_bytes()
        found = [(name, size) for name, size in parts.items() if size]
        found += [("buckets of DDP", buckets)] if buckets else []
        return Step(rows, (*found, ("margin", margin)), resting + buckets)

    def _run(self, meter: Meter, rows: int) -> int:
        """Run it under the meter; returns what lives between two steps."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        twins: dict[int, Any] = {}
        with mode:
            model = _fake(self._model, mode, self._place, twins)
            loss = _fake(self._loss, mode, self._place, twins) if is_module(self._loss) else self._loss
            batch = self._batch(rows, self._leaf)
        if model.training != self._train:
            model.train(self._train)
        with mode, meter:
            for leaf in torch.utils._pytree.tree_leaves(batch):
                if isinstance(leaf, torch.Tensor):
                    meter.hold(leaf, "activations", counted=False)  # the buffers of the feed, counted by the plan
            for tensor in twins.values():
                meter.hold(tensor, "parameters")
            optimizer = make_optimizer(self._optimizer, list(model.parameters()), twins)
            if self.device != "cpu":
                _as_on_device(optimizer)
            self.loss_name = run_steps(model, batch, optimizer=optimizer, loss=loss, train=self._train, mark=meter.mark)
            return meter.live  # the last output is gone, gradients and state are there

    def _leaf(self, shape: tuple[int, ...], dtype: Any) -> Any:
        if not hasattr(torch, dtype.name):  # it stays an array in a batch too
            return np.zeros(shape, dtype)
        return torch.empty(shape, dtype=getattr(torch, dtype.name), device=self._place)

    def _bucket_bytes(self) -> int:
        """What DistributedDataParallel takes for exchanging gradients."""
        model = self._original
        if not self._train or not isinstance(model, torch.nn.parallel.DistributedDataParallel):
            return 0
        if model.gradient_as_bucket_view:
            return 0
        return sum(p.numel() * p.element_size() for p in self._model.parameters() if p.requires_grad)


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Let torch not log what fails without memory: it is raised as well, and the user gets one error."""
    logger = logging.getLogger(torch._subclasses.fake_tensor.__name__)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def built(make: Any) -> Any:
    """A model from its class or from a function, without memory where it allows that."""
    with keeps_state(None):
        try:
            with torch.device("meta"):
                return make()
        except Exception:  # noqa: BLE001 - whatever it does in there that needs real tensors, it gets them now
            return make()


def _fake(module: Any, mode: Any, place: Any, twins: dict[int, Any]) -> Any:
    """A copy of a module whose tensors are fake; ``twins`` gets them, by the id of the original."""
    memo: dict[int, Any] = {}
    for part in module.modules():
        own = [value for value in vars(part).values() if isinstance(value, torch.Tensor)]
        for tensor in (*part._parameters.values(), *part._buffers.values(), *own):
            lazy = isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin)
            if tensor is None or lazy or id(tensor) in memo:
                continue
            device = place if tensor.device.type == "meta" else tensor.device
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            if isinstance(tensor, torch.nn.Parameter):
                fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = twins[id(tensor)] = fake
    with FakeCopyMode(mode):
        return copy.deepcopy(module, memo)


def _as_on_device(optimizer: Any) -> None:
    """Optimizers go over all parameters at once on a GPU unless told otherwise, and take memory for it."""
    for group in getattr(optimizer, "param_groups", ()):
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True
