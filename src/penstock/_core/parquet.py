"""Parquet and Arrow files as a source, thin over pyarrow: rows as dicts, row groups decoded once and kept for a while.

The parent reads schemas and the sizes of row groups (record batches, in Arrow files), and of texts as much as shows how
long they are. A worker decodes the row groups that its rows are in, each once for all rows of a task, and keeps the
last ones within ``held`` bytes. One that is larger than that is walked over in pieces: in order that costs no more, at
random it does.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence
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
# What is looked at of texts to see how long they are: so many row groups, of each so many rows or so much.
LOOK_GROUPS: Final = 4
LOOK_ROWS: Final = 2048
LOOK_BYTES: Final = 2**20
LOOK_STEP: Final = 32  # rows that are decoded at once for that: some are as large as pictures


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


_opening: Final = threading.Lock()


def _opened(pa: Any, path: str) -> Any:
    """A Parquet file, decoded into malloc's memory, as Arrow files are."""
    with _opening:  # a file takes the pool that is the default when it is opened: it cannot be told which
        others = pa.default_memory_pool()
        pa.set_memory_pool(pa.system_memory_pool())
        try:
            return pa.parquet.ParquetFile(path, buffer_size=2**20, pre_buffer=False)
        finally:
            pa.set_memory_pool(others)


class ParquetReader:
    """Decodes row groups and takes rows from them; keeps some for the next task."""

    def __init__(self, names: tuple[str, ...], columns: tuple[_Column, ...], groups: Sequence[_Group], starts: Indices,
                 *, nested: bool, held_bytes: int, nulls: bool = True) -> None:  # fmt: skip
        self._names, self._columns, self._groups, self._starts = names, columns, groups, starts
        self._nested, self._held_bytes, self._nulls = nested, held_bytes, nulls
        self._pa = library("pyarrow", "pyarrow", extra="parquet")
        library("pyarrow.parquet", "pyarrow", extra="parquet")
        library("pyarrow.compute", "pyarrow", extra="parquet")
        # malloc's: it is held to the worker's share like everything else, and what is freed can be given back.
        self._pool = self._pa.system_memory_pool()
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._walk: _Walk | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (
            self._names, self._columns, self._groups, self._starts, self._nested, self._held_bytes, self._nulls
        )  # fmt: skip

    def bare(self) -> ParquetReader:
        """The same where no load comes after it: nobody would know what to do with a null."""
        return _made(self._names, self._columns, self._groups, self._starts, self._nested, self._held_bytes, False)

    def apart(self) -> ParquetReader:
        """The same for another thread, which decodes and keeps row groups of its own."""
        kind, arguments = self.__reduce__()
        made: ParquetReader = kind(*arguments)
        return made

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
        """The rows as dicts; None where there is a null, or ValueError if nobody takes it."""
        rows: list[Any] = [None] * len(indices)
        for table, places in self._tables(indices):
            columns = [(column.path, self._values(_at(table, column.path), column)) for column in self._columns]
            for at, place in enumerate(places.tolist()):
                rows[place] = _tree((path, values[at]) for path, values in columns)
        return rows

    def _values(self, found: Any, column: _Column) -> Sequence[Any] | Array:
        """The values of a column, one for each row."""
        if found.null_count and not self._nulls:
            raise _null(column, "is null")
        if column.kind != "array":
            texts: list[Any] = found.to_pylist()
            return texts
        if column.shape is not None and not (self._nulls and (found.null_count or self._inner_nulls(found))):
            return self._array(found, column)
        if column.shape == ():
            return [None if value is None else np.asarray(value, column.dtype)[()] for value in found.to_pylist()]
        return [None if value is None else _row_of(value, column) for value in found]

    def _array(self, found: Any, column: _Column) -> Array:
        """A column of numbers as one array."""
        rows = len(found)
        if found.null_count:
            raise _null(column, "is null")
        if self._inner_nulls(found):
            raise _null(column, "has a null in its list")
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
            yield self.plain(self._rows(number, own)), order[start:stop]

    def _rows(self, number: int, own: Indices) -> Any:
        """Rows of one row group at sorted places."""
        group = self._groups[number]
        if group.nbytes > self._held_bytes and not group.path.endswith(ARROW_SUFFIXES):
            if self._walk is None or self._walk.number != number or self._walk.at > own[0]:
                self._walk = None  # first, so that two are never held
                self._walk = _Walk(number, self._pieces(group, int(self._starts[number + 1] - self._starts[number])))
            try:
                return self._pa.concat_tables([self._picked(piece, places) for piece, places in self._walk.take(own)])
            except (self._pa.ArrowException, OSError) as error:
                self._walk = None  # it has ended there
                raise _unreadable(group, error) from error
        table = self._kept.get(number)
        if table is None:
            self._make_room(group.nbytes)
            table = self._kept[number] = self._decoded(group)
        self._kept.move_to_end(number)
        return self._picked(table, own)

    def _picked(self, table: Any, places: Indices) -> Any:
        """Rows at sorted places; neighbours are not copied."""
        if places[-1] - places[0] == len(places) - 1 and (len(places) < 3 or (np.diff(places) == 1).all()):
            return table.slice(int(places[0]), len(places))
        return self._pa.compute.take(table, self._pa.array(places), memory_pool=self._pool)

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
            with _opened(self._pa, group.path) as file:
                return file.read_row_group(group.number, columns=list(self._names), use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(group, error) from error

    def _pieces(self, group: _Group, rows: int) -> Iterator[Any]:
        size = max(1, rows * PIECE_BYTES // max(1, group.nbytes))
        with _opened(self._pa, group.path) as file:
            for batch in file.iter_batches(
                size, row_groups=[group.number], columns=list(self._names), use_threads=False
            ):  # fmt: skip
                yield self._pa.Table.from_batches([batch])

    def some(self, group: _Group, columns: list[str]) -> Generator[Any, None, None]:
        """The first rows of a row group, few at a time and only these columns: as little as can be decoded."""
        pa = self._pa
        if not group.path.endswith(ARROW_SUFFIXES):
            with _opened(self._pa, group.path) as file:
                for batch in file.iter_batches(
                    LOOK_STEP, row_groups=[group.number], columns=columns, use_threads=False
                ):
                    yield pa.Table.from_batches([batch])
            return
        with pa.memory_map(group.path) as file:
            tops = {name.partition(".")[0] for name in columns} | set(columns)
            places = [place for place, name in enumerate(pa.ipc.open_file(file).schema.names) if name in tops]
            options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=places)
            batch = pa.ipc.open_file(file, options=options, memory_pool=self._pool).get_batch(group.number)
            for start in range(0, batch.num_rows, LOOK_STEP):
                yield pa.Table.from_batches([batch.slice(start, LOOK_STEP)])

    def plain(self, table: Any) -> Any:
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
            columns.append(column.combine_chunks(self._pool) if column.num_chunks != 1 else column.chunk(0))
        flat = [c.combine_chunks(self._pool) if isinstance(c, pa.ChunkedArray) else c for c in columns]
        return dict(zip(table.column_names, flat, strict=True))


class _Walk:
    """A row group that is decoded piece by piece; forwards only."""

    def __init__(self, number: int, pieces: Iterator[Any]) -> None:
        self.number = number
        self.at = 0
        """The first row that can still be had."""
        self._pieces = pieces
        self._piece: Any = None

    def take(self, own: Indices) -> Iterator[tuple[Any, Indices]]:
        """The pieces that have rows at these sorted places, none of them before ``at``, and the places inside."""
        left = own
        while len(left):
            if self._piece is not None:
                inside = left[left < self.at + self._piece.num_rows]
                if len(inside):
                    yield self._piece, inside - self.at
                    left = left[len(inside) :]
                    continue
                self.at += self._piece.num_rows
                self._piece = None
            self._piece = next(self._pieces)


def _made(
    names: Any, columns: Any, groups: Any, starts: Any, nested: bool, held_bytes: int, nulls: bool
) -> ParquetReader:  # fmt: skip
    return ParquetReader(names, columns, groups, starts, nested=nested, held_bytes=held_bytes, nulls=nulls)


def _at(table: dict[str, Any], path: tuple[str, ...]) -> Any:
    return table[".".join(path)]


def _unreadable(group: _Group, error: Exception) -> Exception:
    if isinstance(error, MemoryError):  # Arrow's is one: a worker that has more room may read it
        return MemoryError(str(error))
    return OSError(f"row group {group.number} of {shown(group.path)} cannot be read: {error}")


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
        self._longest: dict[str, int] | None = None

    def _look(self, path: str, columns: tuple[str, ...] | None) -> tuple[Any, list[tuple[int, int]]]:
        """The schema of a file, and for each row group its rows and about what they take when decoded."""
        pa = self._pa
        try:
            if path.endswith(ARROW_SUFFIXES):
                with pa.memory_map(path) as file:  # batches of a map are not read, only counted
                    found = pa.ipc.open_file(file)
                    batches = [found.get_batch(number) for number in range(found.num_record_batches)]
                    return found.schema, [(batch.num_rows, batch.nbytes) for batch in batches]
            with _opened(pa, path) as file:
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
            if twice := [name for name in names if schema.names.count(name) > 1]:
                raise SpecError(
                    f"{shown(path)} has {schema.names.count(twice[0])} columns called {twice[0]!r}: write it with a "
                    "name for each, or leave them out with columns=[...]"
                )
        if twice := [name for name in names if list(names).count(name) > 1]:
            raise SpecError(f"columns=[...] has {twice[0]!r} more than once: name each column once")
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
        if self._longest is None:
            self._longest = self._look_at_texts()
        return max(TEXT_BYTES, 1 << max(0, 2 * self._longest.get(".".join(path), 0) - 1).bit_length())

    def _look_at_texts(self) -> dict[str, int]:
        """For each column of texts the longest of some rows, from row groups all over the files that can be read."""
        numbers = [number for number, rows in enumerate(self._counts) if rows]
        spread = [numbers[at] for at in np.unique(np.linspace(0, len(numbers) - 1, LOOK_GROUPS, dtype=int)) if numbers]
        longest: dict[str, int] = {}
        seen, failed = 0, None
        for number in dict.fromkeys([*spread, *numbers]):
            try:
                for name, length in self._lengths(self._groups[number]):
                    longest[name] = max(longest.get(name, 0), length)
                seen += 1
            except MemoryError:
                raise
            except (self._pa.ArrowException, OSError) as error:  # on_error says what becomes of its rows
                failed = failed or (self._groups[number], error)
            if seen == LOOK_GROUPS:
                break
        for pool in (self._pa.system_memory_pool(), self._pa.default_memory_pool()):
            pool.release_unused()
        if failed and not seen:
            group, why = failed
            raise SpecError(
                f"no row group of {shown(group.path)}{' and the others' if len(self.paths) > 1 else ''} can be read: "
                f"{why}"
            ) from why
        return longest

    def _lengths(self, group: _Group) -> Iterator[tuple[str, int]]:
        """The lengths of some texts of a row group, by column."""
        pa = self._pa
        reader = self.reader()
        names = [".".join(column.path) for column in self._columns if column.kind != "array"]
        rows = size = 0
        with contextlib.closing(reader.some(group, names)) as batches:
            for batch in batches:
                table = reader.plain(batch)
                for name in names:
                    texts = table[name].cast(pa.large_binary())  # of views nobody tells the length
                    length = pa.compute.max(pa.compute.binary_length(texts)).as_py() or 0
                    size += pa.compute.sum(pa.compute.binary_length(texts)).as_py() or 0
                    yield name, length
                rows += batch.num_rows
                if rows >= LOOK_ROWS or size >= LOOK_BYTES:
                    return

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
