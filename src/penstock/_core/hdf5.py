"""HDF5 files as a source, thin over h5py: rows of datasets, read in the order in which they lie.

The parent looks at shapes and closes the file again. A reader opens it where it reads, anew in every process (a handle
of HDF5 does not survive a fork), keeps it open while tasks come, because its chunk cache goes with it, and closes it
with the feed.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import optree

from penstock._core.errors import SpecError, shown
from penstock._core.library import library
from penstock._core.source import Row
from penstock._core.spec import Array, Leaf, Spec, flatten, store, without_metadata

__all__ = ["Hdf5", "hdf5"]

Path = str | os.PathLike[str]
Indices = npt.NDArray[np.int64]

# Rows that have this few others between them are read in one go and picked from: a read costs some 20 us.
GAP_ROWS: Final = 4
GAP_BYTES: Final = 64 * 1024
BLOCK_BYTES: Final = 4 * 2**20
CACHE_BYTES: Final = 1 * 2**20  # what HDF5 keeps of chunks by default
MOST_CACHE_BYTES: Final = 64 * 2**20


def hdf5(path: Path | Sequence[Path], datasets: str | Sequence[str] | Mapping[str, str]) -> Hdf5:
    """A source over datasets of an HDF5 file, or of several as one: row i of each belongs to sample i.

    One name gives arrays, a list of names dicts by these names, a dict gives the names that you choose:
    ``{"image": "train/x", "label": "train/y"}``. The rows of a task are read in the order in which they lie, so that a
    chunk is unpacked once; for chunks of many rows shuffle with ``penstock.Blocks()``. Needs ``pip install
    "penstock[hdf5]"``.
    """
    given = [path] if isinstance(path, str | os.PathLike) else list(path)
    if not given:
        raise SpecError("penstock.hdf5() got an empty list of files: give at least one")
    if not isinstance(datasets, str):
        datasets = dict(datasets) if isinstance(datasets, Mapping) else {name: name for name in datasets}
        if not datasets:
            raise SpecError("penstock.hdf5() got no datasets: give at least the name of one")
    return Hdf5([os.path.abspath(one) for one in given], datasets)


class Hdf5Reader:
    """Reads rows of datasets; the file that is read last stays open."""

    def __init__(self, tree: Any, paths: tuple[str, ...], starts: Indices, names: tuple[str, ...],
                 leaves: tuple[Leaf, ...], cache_bytes: int) -> None:  # fmt: skip
        self._arguments = (tree, paths, starts, names, leaves, cache_bytes)
        self._tree, self._paths, self._starts = tree, paths, starts
        self._names, self._leaves, self._cache_bytes = names, leaves, cache_bytes
        self._h5py = library("h5py", "h5py", extra="hdf5")
        self._open: tuple[int, int, Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Hdf5Reader, self._arguments  # without the handle

    def apart(self) -> Hdf5Reader:
        """The same for another thread, with a file of its own: closing one that is being read is an error there."""
        return Hdf5Reader(*self._arguments)

    def close(self) -> None:
        """Close the file."""
        if self._open is not None:
            owner, _, file = self._open
            self._open = None
            if owner == os.getpid():
                file.close()

    def _file(self, number: int) -> Any:
        if self._open is not None and self._open[:2] == (os.getpid(), number):
            return self._open[2]
        if self._open is not None and self._open[0] != os.getpid():
            self._open = None  # another process's: forgotten, not closed
        self.close()
        path = self._paths[number]
        try:
            # Read only, by many processes at once: nobody needs a lock, and some file systems have none.
            file = self._h5py.File(path, "r", rdcc_nbytes=self._cache_bytes, locking=False)
        except OSError as error:
            raise OSError(f"{shown(path)} cannot be opened as a file of HDF5: {error}") from error
        self._open = (os.getpid(), number, file)
        return file

    def read_into(self, indices: Indices, out: Sequence[Array], leaves: Sequence[Leaf]) -> None:
        """Write rows into a slot."""
        order = np.argsort(indices, kind="stable")
        ordered = indices[order]
        numbers = self._starts.searchsorted(ordered, "right") - 1
        cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(indices)]
        for start, stop in itertools.pairwise(cuts):
            number = int(numbers[start])
            file = self._file(number)
            own, places = ordered[start:stop] - self._starts[number], order[start:stop]
            for name, rows, leaf in zip(self._names, out, leaves, strict=True):
                try:
                    _rows(file[name], own, places, rows, leaf)
                except OSError as error:
                    raise OSError(f"dataset {name!r} of {shown(self._paths[number])}: {error}") from error

    def read(self, indices: Indices) -> list[Any]:
        """The rows as samples."""
        columns = [np.empty((len(indices), *leaf.shape), leaf.dtype) for leaf in self._leaves]
        self.read_into(indices, columns, self._leaves)
        return [optree.tree_unflatten(self._tree, [column[i] for column in columns]) for i in range(len(indices))]


def _rows(dataset: Any, own: Indices, places: Indices, out: Array, leaf: Leaf) -> None:
    """Rows at sorted places of a dataset to places of an array, neighbours together."""
    row_bytes = max(1, leaf.dtype.itemsize * int(np.prod(leaf.shape)))
    gap = 1 + min(GAP_ROWS, GAP_BYTES // row_bytes)
    cuts = [0, *(np.flatnonzero(np.diff(own) > gap) + 1).tolist(), len(own)]
    for start, stop in itertools.pairwise(cuts):
        first, last, here = int(own[start]), int(own[stop - 1]) + 1, places[start:stop]
        dense = last - first == stop - start
        straight = leaf.dtype == leaf.stored and out.flags.c_contiguous and bool((np.diff(here) == 1).all())
        if dense and straight and out.size:
            dataset.read_direct(out, np.s_[first:last], np.s_[int(here[0]) : int(here[0]) + stop - start])
            continue
        found = np.empty((last - first, *leaf.shape), leaf.dtype)
        if found.size:
            dataset.read_direct(found, np.s_[first:last])
        chosen = found if dense else found[own[start:stop] - first]
        if leaf.dtype == leaf.stored:
            out[here] = chosen
        else:
            cast = np.empty(chosen.shape, leaf.stored)
            store(cast, chosen, leaf, f"dataset {leaf.path}")
            out[here] = cast


class Hdf5:
    """A source over rows of datasets; made by ``penstock.hdf5``."""

    in_memory = False
    measured = True

    def __init__(self, paths: Sequence[str], datasets: str | dict[str, str]) -> None:
        h5py = library("h5py", "h5py", extra="hdf5")
        self.paths = tuple(paths)
        """The files."""
        values, self._tree = flatten(datasets)
        self._names = tuple(values)
        labels = [".".join(map(str, path)) for path in self._tree.paths()]
        counts, first = [], None
        self._chunk_rows, chunk_bytes = 1, 0
        for path in self.paths:
            try:
                file = h5py.File(path, "r", locking=False)
            except OSError as error:
                if not os.path.exists(path):
                    raise FileNotFoundError(f"{shown(path)} is not there") from error
                raise SpecError(f"{shown(path)} cannot be opened as a file of HDF5: {error}") from error
            with file:
                found = [self._dataset(h5py, file, name, path) for name in self._names]
                lengths = {name: len(dataset) for name, dataset in zip(self._names, found, strict=True)}
                if len(set(lengths.values())) > 1:
                    raise SpecError(f"the datasets of {shown(path)} have different numbers of rows: {lengths}")
                counts.append(len(found[0]))
                forms = [(dataset.shape[1:], without_metadata(dataset.dtype.newbyteorder("="))) for dataset in found]
                for name, form, expected in zip(self._names, forms, first or forms, strict=True):
                    if form != expected:
                        raise SpecError(
                            f"dataset {name!r} has rows of {_form(form)} in {shown(path)}, but of {_form(expected)} in "
                            f"{shown(self.paths[0])}: files that are read together must have the same form"
                        )
                first = forms
                for dataset in found:
                    if dataset.chunks is not None:
                        self._chunk_rows = max(self._chunk_rows, dataset.chunks[0])
                        beside = int(np.prod(-(-np.array(dataset.shape[1:]) // np.array(dataset.chunks[1:]))))
                        chunk_bytes = max(chunk_bytes, beside * int(np.prod(dataset.chunks)) * dataset.dtype.itemsize)
        assert first is not None
        self._leaves = tuple(
            Leaf(label, "array", shape, dtype, dtype) for label, (shape, dtype) in zip(labels, first, strict=True)
        )
        self._starts = np.cumsum([0, *counts], dtype=np.int64)
        self._row_bytes = max(1, sum(leaf.dtype.itemsize * int(np.prod(leaf.shape)) for leaf in self._leaves))
        # Room for what one row of chunks takes, twice: a chunk that does not fit is unpacked anew for every row.
        self._cache_bytes = min(MOST_CACHE_BYTES, max(CACHE_BYTES, 2 * chunk_bytes))
        self.held_bytes = len(self._leaves) * self._cache_bytes if chunk_bytes else 0
        """What a worker's reader keeps: the chunk caches."""

    @staticmethod
    def _dataset(h5py: Any, file: Any, name: str, path: str) -> Any:
        dataset = file.get(name)
        if not isinstance(dataset, h5py.Dataset):
            there: list[str] = []
            file.visititems(lambda other, node: there.append(other) if isinstance(node, h5py.Dataset) else None)
            raise SpecError(f"{shown(path)} has no dataset {name!r}: it has {', '.join(there[:20]) or 'none'}")
        if not dataset.shape:
            raise SpecError(f"dataset {name!r} of {shown(path)} has no axis: a row per sample is wanted")
        if dataset.dtype.hasobject:
            raise SpecError(
                f"dataset {name!r} of {shown(path)} holds values of varying length, which have no place in a batch: "
                "store text with a fixed length (dtype 'S40'), and arrays padded"
            )
        return dataset

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __repr__(self) -> str:
        return f"<penstock.hdf5: {len(self)} rows in {len(self.paths)} files, {self.spec()}>"

    def spec(self) -> Spec:
        """The form of a row."""
        return Spec(flatten(optree.tree_unflatten(self._tree, [0] * len(self._leaves)))[1], self._leaves)

    def reader(self) -> Hdf5Reader:
        """What reads."""
        return Hdf5Reader(self._tree, self.paths, self._starts, self._names, self._leaves, self._cache_bytes)

    def blocks(self) -> list[int]:
        """Whole chunks, as many as make a read worth while; none goes over the end of a file."""
        rows = self._chunk_rows * max(1, BLOCK_BYTES // (self._chunk_rows * self._row_bytes))
        counts: list[int] = []
        for length in np.diff(self._starts).tolist():
            counts += [rows] * (length // rows) + ([length % rows] if length % rows else [])
        return counts

    def name(self, index: int) -> Row:
        """The file that a row is in, and which of its rows it is."""
        file = int(self._starts.searchsorted(index, "right")) - 1
        return Row(self.paths[file], index - int(self._starts[file]))

    def written(self) -> Sequence[str]:
        """The files, whose age tells one that was written anew."""
        return self.paths

    def fingerprint(self) -> str:
        """Forms, rows and names of the files, and how large they are."""
        about = [(os.path.basename(path), os.path.getsize(path)) for path in self.paths]
        known = repr((self._names, [str(leaf) for leaf in self._leaves], self._starts.tolist(), about))
        return hashlib.blake2b(known.encode("utf-8", "backslashreplace"), digest_size=8).hexdigest()


def _form(form: tuple[tuple[int, ...], np.dtype[Any]]) -> str:
    return f"{form[1].name}[{', '.join(map(str, form[0]))}]"
