"""Folders of pictures as a source: which files there are, their labels, and who decodes them.

The parent holds names and labels; what goes to a worker is the path of a picture and its label. How a picture becomes
an array of the right size is ``decode``'s.
"""

from __future__ import annotations

import hashlib
import operator
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from penstock._core.decode import Decoder, Fit
from penstock._core.errors import SpecError, shown
from penstock._core.names import Names
from penstock._core.spec import Array, Leaf, Spec, flatten, store

__all__ = ["Images", "images"]

SUFFIXES: Final = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_BYTE: Final = np.dtype(np.uint8)
_LABEL: Final = np.dtype(np.int64)

Path = str | os.PathLike[str]


class ImageReader:
    """Decodes pictures straight into a slot; each is a file of its own."""

    single = True

    def __init__(self, decoder: Decoder, labelled: bool) -> None:
        self._decoder, self._labelled = decoder, labelled

    def read_into(self, indices: Sequence[tuple[str, int]], out: Sequence[Array], leaves: Sequence[Leaf]) -> None:
        """Write pictures, and labels if there are any, into rows of a slot."""
        for row, (path, label) in enumerate(indices):
            self._place(out[0][row], leaves[0], path)
            if self._labelled:
                store(out[1][row, ...], np.array(label, _LABEL), leaves[1], path)

    def _place(self, out: Array, leaf: Leaf, path: str) -> None:
        if leaf.stored == _BYTE:
            self._decoder.into(path, out)
        else:
            store(out, self._decoder(path), leaf, path)

    def read(self, indices: Sequence[tuple[str, int]]) -> list[Any]:
        """The pictures, each with its label if there are any."""
        return [(self._decoder(path), label) if self._labelled else self._decoder(path) for path, label in indices]


class Images:
    """A source over files of pictures; made by ``penstock.images``."""

    in_memory = False
    measured = True

    def __init__(self, paths: Sequence[str], labels: Array | None, classes: tuple[str, ...], decoder: Decoder) -> None:
        self.paths = Names(paths)
        """The files, in the order of their indices."""
        self.labels = labels
        """The label of each; None if there are none."""
        self.classes = classes
        """The names that labels stand for: those of the subfolders."""
        self._decoder = decoder

    def __len__(self) -> int:
        return len(self.paths)

    def __repr__(self) -> str:
        of = f" of {len(self.classes)} classes" if self.classes else ""
        return f"<penstock.images: {len(self)} files{of}, {self.spec()}>"

    def spec(self) -> Spec:
        """The form of a picture: uint8[height, width, 3], with a label if there are any."""
        image = Leaf("" if self.labels is None else "0", "array", (*self._decoder.size, 3), _BYTE, _BYTE)
        if self.labels is None:
            return Spec(flatten(0)[1], (image,))
        return Spec(flatten((0, 0))[1], (image, Leaf("1", "array", (), _LABEL, _LABEL)))

    def reader(self) -> ImageReader:
        """What decodes."""
        return ImageReader(self._decoder, self.labels is not None)

    def carried(self, indices: Array) -> list[tuple[str, int]]:
        """The path and the label of each: a worker need not know all of them."""
        paths = self.paths.chosen(indices)
        labels = [0] * len(paths) if self.labels is None else self.labels[indices].tolist()
        return list(zip(paths, labels, strict=True))

    def name(self, index: int) -> str:
        """The path of a picture."""
        return self.paths[index]

    def settings(self) -> tuple[Any, ...]:
        """How a file becomes a picture."""
        return self._decoder.size, self._decoder.fit, self._decoder.antialias

    def fingerprint(self) -> str:
        """Names without the folder that all are in, and labels: a folder that was moved is the same."""
        common = len(os.path.commonpath([os.path.dirname(path) for path in (self.paths[0], self.paths[-1])]))
        hasher = hashlib.blake2b(f"{self.spec()}".encode(), digest_size=8)
        for path in self.paths:
            hasher.update(os.fsencode(path[common:]) + b"\0")
        if self.labels is not None:
            hasher.update(self.labels.tobytes())
        return hasher.hexdigest()


def images(
    folder: Path | Sequence[Path],
    size: int | tuple[int, int] = (224, 224),
    *,
    labels: bool | Sequence[int] | None = None,
    fit: Fit = "stretch",
    antialias: bool = False,
) -> Images:
    """A source over pictures: a folder with a subfolder for each class, a folder without, or a list of files.

    Samples are ``uint8[height, width, 3]`` in RGB, or pairs of that and a label. ``size`` is (height, width). Labels
    come from the names of the subfolders where all pictures are in some (where only a part is, there are none, with a
    warning; ``labels=False`` does without, ``True`` insists), or are given, one for each file of a list. ``fit`` says
    what becomes of another shape: "stretch", "crop" (what stands out is cut off at both sides) or "pad" (filled up with
    black). JPEGs are decoded at a half, a quarter or an eighth where that is still large enough; ``antialias`` averages
    the rest of the way, which takes longer. Needs ``pip install "penstock[images]"``.
    """
    decoder = Decoder(_size(size), fit=_fit(fit), antialias=bool(antialias))
    if isinstance(folder, str | os.PathLike):
        return _of_folder(os.path.abspath(folder), labels, decoder)
    paths = [os.path.abspath(path) for path in folder]
    if not paths:
        raise SpecError("penstock.images() got an empty list of files: give at least one")
    if labels is None or labels is False:
        return Images(paths, None, (), decoder)
    if labels is True:
        raise SpecError("labels=True takes labels from subfolders, and this is a list of files: give a label for each")
    return Images(paths, _labels(labels, len(paths)), (), decoder)


def _of_folder(folder: str, labels: bool | Sequence[int] | None, decoder: Decoder) -> Images:
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"{shown(folder)} is not a folder: give one with pictures in it, or a list of files")
    names = list(_walk(folder, ""))
    if not names:
        raise SpecError(f"{shown(folder)} holds no picture: files that end in {', '.join(SUFFIXES)} are looked for")
    paths = [os.path.join(folder, name) for name in names]
    if labels is not None and not isinstance(labels, bool):
        return Images(paths, _labels(labels, len(paths)), (), decoder)
    tops = [name.partition(os.sep)[0] if os.sep in name else "" for name in names]
    loose = [name for name, top in zip(names, tops, strict=True) if not top]
    if loose and labels is True:
        raise SpecError(
            f"{shown(folder)} has {len(loose)} pictures outside of any subfolder, {shown(loose[0])} first, which have "
            "no class: move them, or use labels=False"
        )
    if loose and len(loose) < len(names) and labels is None:
        few = ", ".join(map(shown, loose[:3])) + (", ..." if len(loose) > 3 else "")
        warnings.warn(
            f"{len(loose)} of the {len(names)} pictures in {shown(folder)} lie beside its subfolders ({few}), so there "
            "are no classes and no labels: move them for labels, or say labels=False",
            UserWarning,
            stacklevel=3,
        )
    if loose or labels is False:
        return Images(paths, None, (), decoder)
    classes = sorted(set(tops))
    numbers = {name: number for number, name in enumerate(classes)}
    return Images(paths, np.array([numbers[top] for top in tops], _LABEL), tuple(classes), decoder)


def _walk(folder: str, below: str, above: tuple[tuple[int, int], ...] = ()) -> Iterator[str]:
    """The pictures below a folder, by name: the same order on every file system. What is hidden is left out."""
    here = os.path.join(folder, below)
    about = os.stat(here)
    itself = about.st_dev, about.st_ino
    if itself in above:
        raise SpecError(
            f"{shown(here.rstrip(os.sep))} leads back to a folder above it, so there is no end of pictures: remove "
            "that link, or give a list of files"
        )
    with os.scandir(here) as found:
        entries = sorted((entry.name, _is_folder(entry)) for entry in found if not entry.name.startswith("."))
    for name, is_folder in entries:
        path = os.path.join(below, name)
        if is_folder:
            yield from _walk(folder, path, (*above, itself))
        elif name.lower().endswith(SUFFIXES):
            yield path


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _size(size: Any) -> tuple[int, int]:
    try:
        high, wide = (size, size) if not isinstance(size, Sequence) else size
        high, wide = operator.index(high), operator.index(wide)
    except (TypeError, ValueError):
        raise TypeError(f"size={size!r} must be (height, width), two ints, or one for a square") from None
    if high < 1 or wide < 1:
        raise ValueError(f"size={size!r} must be at least 1 pixel each way")
    return high, wide


def _fit(fit: Any) -> Fit:
    if fit not in ("stretch", "crop", "pad"):
        raise ValueError(f'fit={fit!r} is not known: give "stretch", "crop" or "pad"')
    known: Fit = fit
    return known


def _labels(labels: Any, count: int) -> Array:
    given = np.asarray(labels)
    if given.shape != (count,) or given.dtype.kind not in "iu":
        raise SpecError(
            f"labels has the form {given.dtype.name}{list(given.shape)}, and there are {count} pictures: give one int "
            "for each"
        )
    return given.astype(_LABEL)
