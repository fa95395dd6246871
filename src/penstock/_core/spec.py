"""The form of a sample: its tree, and for each leaf its shape, its dtype and the dtype it is stored in.

Pure. Runs in the parent and in workers. The trees are optree's, in a namespace of our own, so that nobody's
registrations change what a sample is; ``None`` is part of the tree, never data. Dataclasses become nodes the
first time one is seen. Where the bytes of a leaf lie is not decided here (``layout``).
"""

from __future__ import annotations

import dataclasses
import pickle
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import optree

from penstock._core.errors import SpecError, shown
from penstock._core.pickles import dumps

__all__ = [
    "AnyCast",
    "Cast",
    "Leaf",
    "OnDevice",
    "Spec",
    "as_array",
    "dump_tree",
    "flatten",
    "load_tree",
    "split_cast",
    "to_dtype",
    "without_metadata",
]

NAMESPACE: Final = "penstock"
Kind = Literal["array", "str", "bytes"]
Cast = npt.DTypeLike | Mapping[str, npt.DTypeLike] | None
Array = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class OnDevice:
    """A cast that the device does: ``cast={"image": OnDevice("float32")}`` sends what ``load`` gave and casts it there.

    Images of ``uint8`` that a model wants as ``float32`` take a quarter of the memory on the host and of the way.
    Unlike other casts it is not checked: what the dtype cannot hold is rounded as the device does it.
    """

    dtype: npt.DTypeLike


AnyCast = Cast | OnDevice | Mapping[str, npt.DTypeLike | OnDevice]

_TEXT_CELL_LEAST: Final = 64  # bytes a text gets at least in a slot; file names mostly fit


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of a sample: ``dtype`` is what load gives, ``stored`` what the batch has."""

    path: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    stored: np.dtype[Any]

    def __str__(self) -> str:
        if self.kind != "array":
            return self.kind
        cast = "" if self.dtype == self.stored else f" -> {self.stored.name}"
        return f"{self.dtype.name}[{', '.join(map(str, self.shape))}]{cast}"


@dataclasses.dataclass(frozen=True, slots=True)
class Spec:
    """The form of every sample of a feed; ``str()`` shows it on one line."""

    tree: optree.PyTreeSpec
    leaves: tuple[Leaf, ...]

    @classmethod
    def of(cls, sample: Any, *, cast: Cast = None, item: Any = None) -> Spec:
        """The spec of one sample, as the first of a feed; ``item`` is named when it has no valid form."""
        values, tree = flatten(sample)
        paths = _paths(tree)
        leaves = []
        for path, value in zip(paths, values, strict=True):
            if isinstance(value, str | bytes):
                kind: Kind = "str" if isinstance(value, str) else "bytes"
                size = len(value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value)
                cell = np.dtype(np.uint8)
                leaves.append(Leaf(path, kind, (max(_TEXT_CELL_LEAST, _power_of_two(2 * size)),), cell, cell))
            else:
                array = as_array(value, path=path, item=item)
                dtype = without_metadata(array.dtype)
                leaves.append(Leaf(path, "array", array.shape, dtype, dtype))
        if not leaves:
            raise SpecError(
                f"the sample of {shown(item)} holds no data at all ({shown(sample)}): load must return an array, a "
                "number or a string, or a tuple, list or dict of these",
                item=item,
            )
        return cls(tree, _cast(tuple(leaves), cast))

    @classmethod
    def declared(cls, declaration: Any) -> Spec:
        """The spec that a user wrote down: a tree of ``(shape, dtype)`` leaves."""
        values, tree = optree.tree_flatten(declaration, is_leaf=_is_declared_leaf, namespace=NAMESPACE)
        leaves = []
        for path, value in zip(_paths(tree), values, strict=True):
            if not _is_declared_leaf(value):
                raise SpecError(
                    f"{shown(value)} at {path or 'the top'} of the spec is not a (shape, dtype) pair: write for "
                    "example ((3, 224, 224), 'float32'), or a tuple, list or dict of such pairs"
                )
            shape, dtype = value
            stored = to_dtype(dtype)
            if stored.hasobject or stored.itemsize == 0 or any(n < 0 for n in shape):
                raise SpecError(
                    f"{shown(value)} at {path or 'the top'} of the spec cannot lie in shared memory: sizes are 0 or "
                    "more, and the dtype one of numbers, booleans, dates or texts of a fixed length"
                )
            leaves.append(Leaf(path, "array", tuple(map(int, shape)), stored, stored))
        if not leaves:
            raise SpecError("the spec has no leaves: give at least one (shape, dtype) pair")
        return cls(tree, tuple(leaves))

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (dump_tree(self.tree), self.leaves)

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample as it is stored."""
        return sum(row_bytes(leaf) for leaf in self.leaves)

    def cast(self, cast: Cast) -> Spec:
        """The same form, stored as ``cast`` says."""
        return Spec(self.tree, _cast(self.leaves, cast))

    def values(self, sample: Any, item: Any) -> list[Any]:
        """The leaves of a sample in the order of ``leaves``; SpecError when the tree differs."""
        try:
            return self.tree.flatten_up_to(sample)
        except (ValueError, TypeError):
            raise self.other_tree(sample, item) from None

    def other_tree(self, sample: Any, item: Any) -> SpecError:
        """The error for a sample whose tree is not that of the first one."""
        _, tree = flatten(sample)
        came, expected = _form(tree), _form(self.tree)
        hint = "; numbers in a list are a leaf each, so return np.array(numbers)" if "[*, *" in came + expected else ""
        return SpecError(
            f"the sample of {shown(item)} has the form {came}, but the first sample had {expected} (a * is an array, a "
            f"number or a text): load must return the same tree for every item{hint}",
            item=item,
        )

    def build(self, leaves: Sequence[Any]) -> Any:
        """The tree with these leaves."""
        return optree.tree_unflatten(self.tree, leaves)

    def __str__(self) -> str:
        return str(self.build([_Word(leaf) for leaf in self.leaves]))


class _Word(str):
    """Text that is shown without quotes where it stands in a tree."""

    __slots__ = ()
    __repr__ = str.__str__


def row_bytes(leaf: Leaf) -> int:
    """Bytes that one sample's value of this leaf takes in a slot; texts carry four for their length."""
    count = 1
    for n in leaf.shape:
        count *= n
    return count * leaf.stored.itemsize + (0 if leaf.kind == "array" else 4)


def differs(leaf: Leaf, got: Array | str | bytes, item: Any, *, padded: bool = False) -> SpecError:
    """The error for a value that does not have the form of the first one."""
    came = type(got).__name__ if isinstance(got, str | bytes) else f"{got.dtype.name}[{', '.join(map(str, got.shape))}]"
    where = f" at {leaf.path!r}" if leaf.path else ""
    expected = str(leaf).partition(" -> ")[0]
    ragged = not isinstance(got, str | bytes) and leaf.kind == "array" and got.dtype == leaf.dtype
    advice = (
        'samples of different shapes need collate_fn="pad" (filled up to the longest) or "list" (not stacked)'
        if ragged and not padded
        else 'padding needs the same number of axes for every item: reshape in load, or use collate_fn="list"'
        if ragged
        else "make load return the same dtype for every item"
    )
    return SpecError(
        f"the sample of {shown(item)}{where} is {came}, but the first sample was {expected}: {advice}", item=item
    )


def is_node(value: Any) -> bool:
    """Whether a value is part of a tree (None, a container) where a leaf should be."""
    return value is None or isinstance(value, tuple | list | dict) or dataclasses.is_dataclass(value)


def flatten(sample: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """Leaves and tree of a sample; dataclasses are taken apart like tuples."""
    values, tree = optree.tree_flatten(sample, namespace=NAMESPACE)
    fresh = {type(v) for v in values if dataclasses.is_dataclass(v) and not isinstance(v, type)}
    if not fresh:
        return values, tree
    for cls in fresh:
        register_dataclass(cls)
    return flatten(sample)


def rebuilt(batch: Any, leaves: Sequence[Any]) -> Any:
    """The same tree with other leaves."""
    return optree.tree_unflatten(flatten(batch)[1], leaves)


def register_dataclass(cls: type[Any]) -> None:
    """Make instances of a dataclass nodes of trees, here and now; twice is harmless."""
    names = tuple(f.name for f in dataclasses.fields(cls))

    def build(_: Any, children: Any) -> Any:
        # Not through __init__: a __post_init__ that checks or changes a sample was not written for a batch.
        made: Any = object.__new__(cls)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(made, name, child)
        return made

    try:
        optree.register_pytree_node(
            cls, lambda value: ([getattr(value, n) for n in names], None, names), build, namespace=NAMESPACE
        )
    except ValueError:  # registered already, by another feed
        return


def dump_tree(tree: optree.PyTreeSpec) -> bytes:
    """A tree as bytes, with the dataclasses that must be registered before it can be read back."""
    found: list[type[Any]] = []

    def visit(node: optree.PyTreeSpec) -> None:
        if dataclasses.is_dataclass(node.type) and isinstance(node.type, type) and node.type not in found:
            found.append(node.type)
        for child in node.children():
            visit(child)

    visit(tree)
    return dumps((found, dumps(tree)))


def load_tree(data: bytes) -> optree.PyTreeSpec:
    """A tree from what ``dump_tree`` gave, in another process."""
    classes, tree = pickle.loads(data)
    for cls in classes:
        register_dataclass(cls)
    loaded: optree.PyTreeSpec = pickle.loads(tree)
    return loaded


def _restore(tree: bytes, leaves: tuple[Leaf, ...]) -> Spec:
    return Spec(load_tree(tree), leaves)


def whose(item: Any) -> str:
    """What has a wrong form, in words: the sample of an item, or for None what a collate_fn made of many."""
    return "what collate_fn returned" if item is None else f"the sample of {shown(item)}"


def as_array(value: Any, *, path: str = "", item: Any = None) -> Array:
    """A leaf as a numpy array without a copy where that is possible."""
    if isinstance(value, int | float | complex | np.generic):
        array = np.asarray(value)
    elif isinstance(value, np.ndarray):
        array = value
    elif type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach"):
        array = _from_torch(value)
    elif hasattr(value, "__array__") or hasattr(value, "__array_interface__"):
        array = np.asarray(value)
    elif hasattr(value, "__next__"):
        raise SpecError(
            f"load returned a generator for {shown(item)}: say how many samples it gives with samples_per_item=n, or "
            "None when the number varies",
            item=item,
        )
    else:
        array = np.empty((), object)
    # Whoever has one has imported it; for all others it would be a megabyte and some milliseconds in each process.
    if (masked := sys.modules.get("numpy.ma")) is not None and isinstance(array, masked.MaskedArray):
        raise SpecError(
            f"{whose(item)} has a masked array at {path or 'the top'}: a batch would lose the mask; "
            "return .filled(value), or data and mask as two arrays",
            item=item,
        )
    if array.dtype.hasobject or array.dtype.itemsize == 0:
        raise SpecError(
            f"{whose(item)} has a {type(value).__name__} ({shown(value, 80)}) at {path or 'the top'}, "
            "which cannot lie in shared memory: return arrays, numbers, strings, bytes, or tuples, lists or dicts "
            "of these",
            item=item,
        )
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def to_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """A numpy dtype; bfloat16 and the float8 kinds come from ml_dtypes."""
    try:
        return np.dtype(dtype)
    except TypeError:
        if not isinstance(dtype, str):
            raise
        import ml_dtypes

        if (found := getattr(ml_dtypes, dtype, None)) is None:
            raise
        extended: np.dtype[Any] = np.dtype(found)
        return extended


def without_metadata(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The same dtype without what a library (h5py) has hung on it, and NumPy warns of when it writes a file."""
    if dtype.names is not None and dtype.fields is not None:
        fields = [dtype.fields[name] for name in dtype.names]
        formats = [without_metadata(field[0]) for field in fields]
        if all(made is field[0] for made, field in zip(formats, fields, strict=True)):
            return dtype
        offsets = [field[1] for field in fields]
        return np.dtype({"names": dtype.names, "formats": formats, "offsets": offsets, "itemsize": dtype.itemsize})
    if dtype.subdtype is not None:
        inner = without_metadata(dtype.subdtype[0])
        return dtype if inner is dtype.subdtype[0] else np.dtype((inner, dtype.subdtype[1]))
    return dtype if dtype.metadata is None else np.dtype(dtype.str)


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Real or complex floating point, ml_dtypes' kinds (numpy says "V" or "f" of them) included."""
    return dtype.kind in "fc" or (dtype.kind == "V" and dtype.type.__module__.startswith("ml_dtypes"))


def _is_declared_leaf(value: Any) -> bool:
    if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], tuple | list)):
        return False
    if not all(isinstance(n, int | np.integer) for n in value[0]):
        return False
    if not isinstance(value[1], str | type | np.dtype):
        return False
    try:
        to_dtype(value[1])
    except (TypeError, AttributeError):
        return False
    return True


def _form(tree: optree.PyTreeSpec) -> str:
    return str(tree).removeprefix("PyTreeSpec(").removesuffix(")").removesuffix(f", namespace={NAMESPACE!r}")


def _paths(tree: optree.PyTreeSpec) -> list[str]:
    return [".".join(map(str, path)) for path in tree.paths()]


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _from_torch(tensor: Any) -> Array:
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        raise SpecError(
            f"load returned a tensor on {tensor.device}: samples are made on the CPU; drop .to(...) from load"
        )
    if (name := str(tensor.dtype).removeprefix("torch.")).startswith(("bfloat16", "float8")):
        import torch

        # numpy has no name for it: pass the bits
        bits: Array = tensor.contiguous().view(torch.int16 if name == "bfloat16" else torch.int8).numpy()
        return bits.view(to_dtype(name))
    array: Array = tensor.resolve_conj().resolve_neg().numpy()
    return array


def _cast(leaves: tuple[Leaf, ...], cast: Cast) -> tuple[Leaf, ...]:
    if cast is None:
        return leaves
    if isinstance(cast, Mapping):
        targets = {str(path): to_dtype(dtype) for path, dtype in dict[Any, Any](cast).items()}
        known = {leaf.path for leaf in leaves if leaf.kind == "array"}
        if unknown := sorted(targets.keys() - known):
            raise SpecError(
                f"cast names {unknown}, but a sample has {sorted(known)}: use those names (0, 1, ... in a tuple)"
            )
    else:
        target = to_dtype(cast)
        numbers = [
            leaf for leaf in leaves if leaf.kind == "array" and (leaf.dtype.kind in "iu" or is_floating(leaf.dtype))
        ]
        if is_floating(target):
            # Labels stay what they are when there is anything else to make smaller.
            numbers = [leaf for leaf in numbers if is_floating(leaf.dtype)] or numbers
        targets = {leaf.path: target for leaf in numbers}
    for leaf in leaves:
        if leaf.dtype.kind == "c" and targets.get(leaf.path, leaf.dtype).kind != "c":
            raise SpecError(
                f"cast={targets[leaf.path].name!r} would drop the imaginary part of {leaf.path or 'the sample'} "
                f"({leaf.dtype.name}): return .real from load, or real and imaginary part as two arrays"
            )
    return tuple(dataclasses.replace(leaf, stored=targets.get(leaf.path, leaf.stored)) for leaf in leaves)


def split_cast(cast: AnyCast) -> tuple[Cast, Cast]:
    """What is cast while it is written into the slot, and what on the device."""
    if isinstance(cast, OnDevice):
        return None, cast.dtype
    if isinstance(cast, list | tuple):
        raise TypeError(
            f'cast={cast!r} goes by place, which a dict does: {{0: "float32"}} casts the first part of a tuple'
        )
    if not isinstance(cast, Mapping):
        return cast, None
    entries: dict[str, Any] = dict(cast)
    later = {name: dtype.dtype for name, dtype in entries.items() if isinstance(dtype, OnDevice)}
    now = {name: dtype for name, dtype in entries.items() if name not in later}
    return now or None, later or None


def store(out: Array, value: Array, leaf: Leaf, item: Any) -> None:
    """Write a value into its place, cast on the way; floats may lose precision, an integer never changes."""
    stored = leaf.stored
    if is_floating(leaf.dtype) and is_floating(stored):
        np.copyto(out, value, casting="unsafe")
        return
    with np.errstate(invalid="ignore", over="ignore"):  # what these would warn of is found below
        np.copyto(out, value, casting="unsafe")
        if np.can_cast(leaf.dtype, stored, "safe") and not is_floating(stored):
            return
        same = np.array_equal(out.astype(leaf.dtype), value)
    # What is there and back the same may be another number: -1 as uint64, the smallest integer as -inf.
    if same and (is_floating(stored) or leaf.dtype.itemsize == stored.itemsize):
        same = bool(np.isfinite(out).all()) and np.array_equal(out < 0, value < 0)
    if not same:
        low, high = value.min(), value.max()
        raise SpecError(
            f"{whose(item)} has values from {low} to {high} at {leaf.path or 'the top'}, which cast="
            f"{stored.name!r} cannot hold exactly: choose a wider dtype, or scale and round in load",
            item=item,
        )
