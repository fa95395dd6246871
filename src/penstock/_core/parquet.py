"""Parquet and Arrow files as a source, thin over pyarrow: rows as dicts, row groups decoded once and kept for a while.

The parent reads schemas and the sizes of row groups (record batches, in Arrow files), never rows. A worker decodes the
row groups that its rows are in, each once for all rows of a task, and keeps the last ones within ``held`` bytes. One
that is larger than that is walked over in pieces: in order that costs no more, at random it does.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock._core.budget import Size, parse_size
from penstock._core.errors import SpecError, shown
from penstock._core.library import library
from penstock._core.source import Row
from penstock._core.spec import Array, Kind, Leaf, Spec, flatten, store

__all__ = ["Parquet", "parquet"]

Path = str | os.PathLike[str]
Indices = npt.NDArray[np.int64]

ARROW_SUFFIXES: Final = (".arrow", ".feather", ".ipc")
PIECE_BYTES: Final = 4 * 2**20  # of a row group that is too large to be kept, what is decoded at once
TEXT_BYTES: Final = 64  # what a text is taken for where nobody has said how long it is


def parquet(paths: Path | Sequence[Path], columns: Sequence[str] | None = None, *, held: Size = "64 MiB") -> Parquet:
    """A source over Parquet files, or Arrow files (.arrow, .feather, .ipc): rows as dicts of numbers, arrays and text.

    Lists of a fixed size are arrays, structs are dicts, dictionary columns what they stand for. Lists of varying
    length need ``collate_fn`` or a load, which also gets None for a null; without a load a row with a null fails by
    ``on_error``. ``held`` is what one worker keeps of decoded row groups: rows at random from more than that decode a
    row group each, so shuffle with ``penstock.Blocks()``. Needs ``pip install "penstock[parquet]"``.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not given:
        raise SpecError("penstock.parquet() got an empty list of files: give at least one")
    if isinstance(columns, str):
        raise TypeError(f"columns={columns!r} must be a list of names, such as [{columns!r}]")
    return Parquet(
        [os.path.abspath(path) for path in given],
        None if columns is None else tuple(columns),
        held_bytes=parse_size(held, available=2**30),
    )


# ---------------------------------------------------------------- columns


class _Column(NamedTuple):
    """One leaf of a row: where it is found, and what it is."""

    path: tuple[str, ...]
    kind: Kind
    shape: tuple[int, ...] | None
    """None for lists of varying length."""
    dtype: np.dtype[Any]


def _columns(pa: Any, field: Any, path: tuple[str, ...]) -> Iterator[_Column]:
    """The leaves of a field; SpecError for what cannot be one."""
    types, kind, path = pa.types, field.type, (*path, field.name)
    if types.is_dictionary(kind):
        kind = kind.value_type
    shape: tuple[int, ...] | None = ()
    if isinstance(kind, pa.FixedShapeTensorType):
        shape, kind = tuple(kind.shape), kind.value_type
    elif isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    while types.is_fixed_size_list(kind):
        shape, kind = (*(shape or ()), kind.list_size), kind.value_type
    if not shape and (types.is_list(kind) or types.is_large_list(kind)):
        shape, kind = None, kind.value_type
    if types.is_struct(kind) and shape == ():
        for child in kind:
            yield from _columns(pa, child, path)
        return
    if shape == () and (types.is_string(kind) or types.is_large_string(kind) or _is_view(pa, kind, "is_string_view")):
        yield _Column(path, "str", (TEXT_BYTES,), np.dtype(np.uint8))
    elif shape == () and (
        types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)
        or _is_view(pa, kind, "is_binary_view")
    ):  # fmt: skip
        yield _Column(path, "bytes", (TEXT_BYTES,), np.dtype(np.uint8))
    else:
        dtype = _dtype(pa, kind)
        if dtype is None:
            raise SpecError(
                f"column {'.'.join(path)!r} is {field.type}, which has no place in a batch: choose others with "
                "columns=[...], or convert it when the file is written"
            )
        yield _Column(path, "array", shape, dtype)


def _is_view(pa: Any, kind: Any, test: str) -> bool:
    return hasattr(pa.types, test) and bool(getattr(pa.types, test)(kind))


def _dtype(pa: Any, kind: Any) -> np.dtype[Any] | None:
    types = pa.types
    if types.is_date(kind):
        return np.dtype("M8[D]" if kind == pa.date32() else "M8[ms]")
    if types.is_timestamp(kind) or types.is_duration(kind) or types.is_integer(kind) or types.is_floating(kind):
        return np.dtype(kind.to_pandas_dtype()) if not types.is_timestamp(kind) else np.dtype(f"M8[{kind.unit}]")
    return np.dtype(np.bool_) if types.is_boolean(kind) else None


# ---------------------------------------------------------------- reading


class _Group(NamedTuple):
    """A row group: which one of which file, and what it takes decoded."""

    path: str
    number: int
    nbytes: int


class ParquetReader:
    """Decodes row groups and takes rows from them; keeps some for the next task."""

    def __init__(self, names: tuple[str, ...], columns: tuple[_Column, ...], groups: Sequence[_Group], starts: Indices,
                 *, nested: bool, held_bytes: int) -> None:  # fmt: skip
        self._names, self._columns, self._groups, self._starts = names, columns, groups, starts
        self._nested, self._held_bytes = nested, held_bytes
        self._pa = library("pyarrow", "pyarrow", extra="parquet")
        library("pyarrow.parquet", "pyarrow", extra="parquet")
        library("pyarrow.compute", "pyarrow", extra="parquet")
        # malloc's: it is held to the worker's share like everything else, and what is freed can be given back.
        self._pool = self._pa.system_memory_pool()
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._walk: _Walk | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self._names, self._columns, self._groups, self._starts, self._nested, self._held_bytes)

    def close(self) -> None:
        """Let go of what was kept."""
        self._kept = OrderedDict()
        self._walk = None

    # ---- rows

    def read_into(self, indices: Indices, out: Sequence[Array], leaves: Sequence[Leaf]) -> None:
        """Write numbers into rows of a slot; ValueError for a null."""
        for table, places in self._tables(indices):
            for column, rows, leaf in zip(self._columns, out, leaves, strict=True):
                values = self._array(_at(table, column.path), column)
                if leaf.dtype == leaf.stored:
                    rows[places] = values
                else:
                    cast = np.empty(values.shape, leaf.stored)
                    store(cast, values, leaf, f"column {leaf.path}")
                    rows[places] = cast

    def read(self, indices: Indices) -> list[Any]:
        """The rows as dicts; None where there is a null."""
        rows: list[Any] = [None] * len(indices)
        for table, places in self._tables(indices):
            columns = [(column.path, self._values(_at(table, column.path), column)) for column in self._columns]
            for at, place in enumerate(places.tolist()):
                rows[place] = _tree((path, values[at]) for path, values in columns)
        return rows

    def _values(self, found: Any, column: _Column) -> Sequence[Any] | Array:
        """The values of a column, one for each row."""
        if column.kind != "array":
            texts: list[Any] = found.to_pylist()
            return texts
        if column.shape is not None and found.null_count == 0 and not self._inner_nulls(found):
            return self._array(found, column)
        if column.shape == ():
            return [None if value is None else np.asarray(value, column.dtype)[()] for value in found.to_pylist()]
        return [None if value is None else _row_of(value, column) for value in found]

    def _array(self, found: Any, column: _Column) -> Array:
        """A column of numbers as one array."""
        rows = len(found)
        if found.null_count or self._inner_nulls(found):
            raise _null(column, "is null")
        while self._pa.types.is_fixed_size_list(found.type):
            found = found.flatten()
        values: Array = found.to_numpy(zero_copy_only=False)
        if values.dtype != column.dtype:
            values = values.astype(column.dtype)
        return values.reshape(rows, *(column.shape or ()))

    def _inner_nulls(self, found: Any) -> bool:
        while self._pa.types.is_fixed_size_list(found.type):
            found = found.flatten()
            if found.null_count:
                return True
        return False

    # ---- row groups

    def _tables(self, indices: Indices) -> Iterator[tuple[Any, Indices]]:
        """For each row group that is needed, the rows as a table, and their places among the indices."""
        order = np.argsort(indices, kind="stable")
        ordered = indices[order]
        numbers = self._starts.searchsorted(ordered, "right") - 1
        cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(indices)]
        for start, stop in itertools.pairwise(cuts):
            number = int(numbers[start])
            own = ordered[start:stop] - self._starts[number]
            yield self._plain(self._rows(number, own)), order[start:stop]

    def _rows(self, number: int, own: Indices) -> Any:
        """Rows of one row group at sorted places."""
        group = self._groups[number]
        if group.nbytes > self._held_bytes and not group.path.endswith(ARROW_SUFFIXES):
            if self._walk is None or self._walk.number != number or self._walk.at > own[0]:
                self._walk = None  # first, so that two are never held
                self._walk = _Walk(number, self._pieces(group, int(self._starts[number + 1] - self._starts[number])))
            return self._walk.take(self._pa, own)
        table = self._kept.get(number)
        if table is None:
            self._make_room(group.nbytes)
            table = self._kept[number] = self._decoded(group)
        self._kept.move_to_end(number)
        if own[-1] - own[0] == len(own) - 1:
            return table.slice(int(own[0]), len(own))
        return table.take(self._pa.array(own))

    def _make_room(self, size: int) -> None:
        while self._kept and sum(table.nbytes for table in self._kept.values()) + size > self._held_bytes:
            self._kept.popitem(last=False)

    def _decoded(self, group: _Group) -> Any:
        pa = self._pa
        try:
            if group.path.endswith(ARROW_SUFFIXES):
                options = pa.ipc.IpcReadOptions(use_threads=False)
                with pa.OSFile(group.path) as file:
                    found = pa.ipc.open_file(file, options=options, memory_pool=self._pool)
                    return pa.Table.from_batches([found.get_batch(group.number)]).select(self._names)
            with self._open(group.path) as file:
                return file.read_row_group(group.number, columns=list(self._names), use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise OSError(f"row group {group.number} of {shown(group.path)} cannot be read: {error}") from error

    def _open(self, path: str) -> Any:
        return self._pa.parquet.ParquetFile(path, buffer_size=2**20, pre_buffer=False)

    def _pieces(self, group: _Group, rows: int) -> Iterator[Any]:
        size = max(1, rows * PIECE_BYTES // max(1, group.nbytes))
        with self._open(group.path) as file:
            for batch in file.iter_batches(
                size, row_groups=[group.number], columns=list(self._names), use_threads=False
            ):  # fmt: skip
                yield self._pa.Table.from_batches([batch])

    def _plain(self, table: Any) -> Any:
        """The same with one chunk a column, without dictionaries, extensions and structs."""
        pa = self._pa
        while self._nested and any(pa.types.is_struct(field.type) for field in table.schema):
            table = table.flatten()
        columns = []
        for column in table.columns:
            if pa.types.is_dictionary(column.type):
                column = column.cast(column.type.value_type)
            if isinstance(column.type, pa.BaseExtensionType):
                column = pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
            columns.append(column.combine_chunks() if column.num_chunks != 1 else column.chunk(0))
        flat = [c.combine_chunks() if isinstance(c, pa.ChunkedArray) else c for c in columns]
        return dict(zip(table.column_names, flat, strict=True))


class _Walk:
    """A row group that is decoded piece by piece; forwards only."""

    def __init__(self, number: int, pieces: Iterator[Any]) -> None:
        self.number = number
        self.at = 0
        """The first row that can still be had."""
        self._pieces = pieces
        self._piece: Any = None

    def take(self, pa: Any, own: Indices) -> Any:
        """Rows at sorted places, none of them before ``at``."""
        taken = []
        left = own
        while len(left):
            if self._piece is not None:
                inside = left[left < self.at + self._piece.num_rows]
                if len(inside):
                    taken.append(self._piece.take(pa.array(inside - self.at)))
                    left = left[len(inside) :]
                    continue
                self.at += self._piece.num_rows
                self._piece = None
            self._piece = next(self._pieces)
        return pa.concat_tables(taken)


def _made(names: Any, columns: Any, groups: Any, starts: Any, nested: bool, held_bytes: int) -> ParquetReader:
    return ParquetReader(names, columns, groups, starts, nested=nested, held_bytes=held_bytes)


def _at(table: dict[str, Any], path: tuple[str, ...]) -> Any:
    return table[".".join(path)]


def _row_of(value: Any, column: _Column) -> Array | None:
    """One list as an array."""
    if not value.is_valid:
        return None
    found = value.as_py()
    if _has_null(found):
        raise _null(column, "has a null in its list")
    return np.asarray(found, column.dtype)


def _has_null(value: Any) -> bool:
    return value is None or (isinstance(value, list) and any(map(_has_null, value)))


def _null(column: _Column, what: str) -> ValueError:
    return ValueError(
        f"column {'.'.join(column.path)!r} {what}: fill it in when the file is written, or give a load, which gets "
        'None for a null; on_error="skip" leaves such rows out'
    )


def _tree(leaves: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in leaves:
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = value
    return tree


# ---------------------------------------------------------------- the source


class Parquet:
    """A source over the rows of Parquet or Arrow files; made by ``penstock.parquet``."""

    in_memory = False
    measured = True

    def __init__(self, paths: Sequence[str], columns: tuple[str, ...] | None, *, held_bytes: int) -> None:
        self._pa = pa = library("pyarrow", "pyarrow", extra="parquet")
        library("pyarrow.parquet", "pyarrow", extra="parquet")
        self.paths = tuple(paths)
        """The files."""
        schemas = []
        self._groups: list[_Group] = []
        counts: list[int] = []
        self._file_starts = [0]
        for path in self.paths:
            schema, found = self._look(path, columns)
            schemas.append(schema)
            self._groups += [_Group(path, number, nbytes) for number, (_, nbytes) in enumerate(found)]
            counts += [rows for rows, _ in found]
            self._file_starts.append(sum(counts))
        names = schemas[0].names if columns is None else columns
        self._check(schemas, names)
        first = schemas[0]
        self._columns = tuple(c for name in names for c in _columns(pa, first.field(name), ()))
        self._names = tuple(names)
        # Leaves of a dict come in the order of their names.
        self._columns = tuple(sorted(self._columns, key=lambda column: column.path))
        self._starts = np.cumsum([0, *counts], dtype=np.int64)
        self._counts = counts
        self._held = held_bytes
        self._nested = any(len(column.path) > 1 for column in self._columns)

    def _look(self, path: str, columns: tuple[str, ...] | None) -> tuple[Any, list[tuple[int, int]]]:
        """The schema of a file, and for each row group its rows and about what they take when decoded."""
        pa = self._pa
        try:
            if path.endswith(ARROW_SUFFIXES):
                with pa.memory_map(path) as file:  # batches of a map are not read, only counted
                    found = pa.ipc.open_file(file)
                    batches = [found.get_batch(number) for number in range(found.num_record_batches)]
                    return found.schema, [(batch.num_rows, batch.nbytes) for batch in batches]
            with pa.parquet.ParquetFile(path) as file:
                schema, meta = file.schema_arrow, file.metadata
                groups = [meta.row_group(number) for number in range(meta.num_row_groups)]
                return schema, [(group.num_rows, _decoded_bytes(group, schema, columns)) for group in groups]
        except pa.ArrowException as error:
            kind = "Arrow" if path.endswith(ARROW_SUFFIXES) else "Parquet"
            raise SpecError(f"{shown(path)} cannot be read as a file of {kind}: {error}") from error

    def _check(self, schemas: Sequence[Any], names: Sequence[str]) -> None:
        first = schemas[0]
        if missing := [name for name in names if name not in first.names]:
            raise SpecError(f"{shown(self.paths[0])} has no column {missing[0]!r}: it has {', '.join(first.names)}")
        if not names:
            raise SpecError(f"{shown(self.paths[0])} has no columns")
        for path, schema in zip(self.paths, schemas, strict=True):
            for name in names:
                came = schema.field(name).type if name in schema.names else "missing"
                if came != first.field(name).type:
                    raise SpecError(
                        f"column {name!r} is {came} in {shown(path)}, but {first.field(name).type} in "
                        f"{shown(self.paths[0])}: files that are read together must have the same columns"
                    )

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __repr__(self) -> str:
        return f"<penstock.parquet: {len(self)} rows in {len(self.paths)} files, {', '.join(self._names)}>"

    @property
    def held_bytes(self) -> int:
        """What a worker's reader holds: the row groups that it keeps, and the next one while it is decoded."""
        sizes = [group.nbytes for group in self._groups]
        largest = max(sizes, default=0)
        return min(self._held, sum(sizes)) + min(2 * largest, max(self._held, 4 * PIECE_BYTES))

    def spec(self) -> Spec:
        """The form of a row."""
        _, tree = flatten(_tree((column.path, 0) for column in self._columns))
        leaves = []
        for column in self._columns:
            name = ".".join(column.path)
            if column.shape is None:
                raise SpecError(
                    f'column {name!r} holds lists of varying length: stack them with collate_fn="pad" or "list", give '
                    "a load that makes arrays of one shape, or leave it out with columns=[...]"
                )
            shape = column.shape if column.kind == "array" else (self._text_bytes(column.path),)
            leaves.append(Leaf(name, column.kind, shape, column.dtype, column.dtype))
        return Spec(tree, tuple(leaves))

    def _text_bytes(self, path: tuple[str, ...]) -> int:
        """What a text may take in a slot: twice the longest of some rows."""
        some = np.unique(np.linspace(0, max(0, min(len(self), self._counts[0]) - 1), 64, dtype=np.int64))
        longest = 0
        if len(self):
            for row in self.reader().read(some):
                value: Any = row
                for name in path:
                    value = value[name]
                if value is not None:
                    longest = max(
                        longest, len(value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value)
                    )
        return max(TEXT_BYTES, 1 << max(0, 2 * longest - 1).bit_length())

    def reader(self) -> ParquetReader:
        """What reads."""
        return ParquetReader(
            self._names, self._columns, self._groups, self._starts, nested=self._nested, held_bytes=self._held
        )  # fmt: skip

    def blocks(self) -> list[int]:
        """The rows of each row group: cheap together, dear one by one."""
        return [count for count in self._counts if count]

    def name(self, index: int) -> Row:
        """The file that a row is in, and which of its rows it is."""
        file = int(np.searchsorted(self._file_starts, index, "right")) - 1
        return Row(self.paths[file], index - self._file_starts[file])

    def written(self) -> Sequence[str]:
        """The files, whose age tells one that was written anew."""
        return self.paths

    def fingerprint(self) -> str:
        """Columns, rows and names of the files, and how large they are."""
        about = [(os.path.basename(path), os.path.getsize(path)) for path in self.paths]
        known = repr((self._columns, self._counts, about))
        return hashlib.blake2b(known.encode("utf-8", "backslashreplace"), digest_size=8).hexdigest()


def _decoded_bytes(group: Any, schema: Any, columns: tuple[str, ...] | None) -> int:
    """About what the columns of a row group take when they are decoded."""
    chosen = set(schema.names if columns is None else columns)
    total = 0
    for place in range(group.num_columns):
        chunk = group.column(place)
        if chunk.path_in_schema.partition(".")[0] in chosen:
            width = _WIDTHS.get(chunk.physical_type, 0)
            # Dictionaries and runs make it smaller on disk than it is: by the width of its values where they have one.
            total += max(int(chunk.total_uncompressed_size), width * int(chunk.num_values), 8 * group.num_rows)
    return total


_WIDTHS: Final = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 24}
