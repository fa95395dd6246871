"""Tar files in the layout of WebDataset as a source: members that share a name up to its first dot are one sample.

The parent walks over the headers once and remembers where each member lies; a worker reads members at their places,
neighbours together, and never looks at a header. Nothing is unpacked to a disk. What is compressed has no places, and
is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import numpy as np

from penstock._core.errors import SpecError, shown
from penstock._core.names import Names
from penstock._core.source import read_exactly
from penstock._core.spec import Array, Leaf, Spec, flatten

__all__ = ["Tar", "TarSample", "tar"]

Path = str | os.PathLike[str]

KEY: Final = "__key__"
# Members this close are read in one go: the header of the next one, and what fills up the last block.
GAP_BYTES: Final = 16 * 1024
READ_BYTES: Final = 4 * 2**20  # and as many of them as this
WALKERS: Final = 8  # headers of so many files are waited for at once
_BLOCK: Final = 512
_WALK_BYTES: Final = 64 * 1024
_EMPTY: Final = bytes(_BLOCK)
_COMPRESSED: Final = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
# Up to the first dot of the last part of the name, as WebDataset has it; without a dot it is no part of a sample.
_NAME: Final = re.compile(r"^((?:.*/)?[^./][^./]*)\.([^/]+)$")
_CELL_LEAST: Final = 64


@dataclasses.dataclass(frozen=True, slots=True)
class TarSample:
    """One sample of a tar file: what goes to a worker, and what errors and ``stats.skipped`` call it by."""

    path: str
    """The tar file."""
    key: str
    """The name that its members share."""
    offsets: tuple[int, ...] = dataclasses.field(repr=False)
    sizes: tuple[int, ...] = dataclasses.field(repr=False)
    """Bytes of each member; -1 for one that it does not have."""

    def __repr__(self) -> str:
        return f"sample {self.key!r} of {self.path!r}"


class TarReader:
    """Reads members at their places."""

    def __init__(self, extensions: tuple[str, ...]) -> None:
        self._extensions = extensions

    def read_into(self, indices: Any, out: Sequence[Array], leaves: Sequence[Leaf]) -> None:
        """Never called: members have no fixed size."""
        raise NotImplementedError

    def read(self, indices: Sequence[TarSample]) -> list[dict[str, Any]]:
        """The samples, each a dict of its key and its members by extension."""
        members: list[tuple[str, int, int, int, int]] = []
        for number, sample in enumerate(indices):
            for place, (offset, size) in enumerate(zip(sample.offsets, sample.sizes, strict=True)):
                if size < 0:
                    has = [e for e, n in zip(self._extensions, sample.sizes, strict=True) if n >= 0]
                    others = f", only {', '.join(f'.{e}' for e in has)}" if has else ""
                    raise ValueError(
                        f"it has no member .{self._extensions[place]}{others}: say which to read with extensions=..., "
                        'or leave such samples out with on_error="skip"'
                    )
                members.append((sample.path, offset, size, number, place))
        members.sort()
        found: list[list[bytes]] = [[b""] * len(self._extensions) for _ in indices]
        for path, own in itertools.groupby(members, key=lambda member: member[0]):
            fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
            try:
                for run in _runs([(offset, size, number, place) for _, offset, size, number, place in own]):
                    start = run[0][0]
                    data = bytearray(run[-1][0] + run[-1][1] - start)
                    read_exactly(fd, memoryview(data), start, path, "the sample")
                    for offset, size, number, place in run:
                        found[number][place] = bytes(memoryview(data)[offset - start : offset - start + size])
            finally:
                os.close(fd)
        return [
            {KEY: sample.key, **dict(zip(self._extensions, parts, strict=True))}
            for sample, parts in zip(indices, found, strict=True)
        ]


def _runs(members: list[tuple[int, int, int, int]]) -> Iterator[list[tuple[int, int, int, int]]]:
    """Members of one file that are read in one go."""
    run: list[tuple[int, int, int, int]] = []
    for member in members:
        if run:
            end = run[-1][0] + run[-1][1]
            if member[0] - end > GAP_BYTES or member[0] + member[1] - run[0][0] > READ_BYTES:
                yield run
                run = []
        run.append(member)
    if run:
        yield run


class Tar:
    """A source over the samples of tar files; made by ``penstock.tar``."""

    in_memory = False
    measured = True

    def __init__(self, walked: Sequence[_Walked], extensions: tuple[str, ...] | None) -> None:
        there = tuple(dict.fromkeys(ext for one in walked for ext in one.extensions))
        self.extensions = there if extensions is None else extensions
        """Which members of a sample are read."""
        if unknown := [ext for ext in self.extensions if ext not in there]:
            raise SpecError(f"no sample has a member .{unknown[0]}: there are {', '.join(f'.{ext}' for ext in there)}")
        self.paths = tuple(one.path for one in walked)
        """The files."""
        self.keys: Sequence[str] = Names(key for one in walked for key in one.keys)
        """What each sample is called."""
        self._starts = np.cumsum([0, *(len(one.keys) for one in walked)])
        self._offsets = np.concatenate([one.column(one.offsets, self.extensions, 0) for one in walked])
        self._sizes = np.concatenate([one.column(one.sizes, self.extensions, -1) for one in walked])
        if not len(self.keys):
            raise SpecError(
                f"{shown(self.paths[0])} holds no sample: members are named key.extension, and those of a sample "
                "follow each other"
            )

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        return f"<penstock.tar: {len(self)} samples in {len(self.paths)} files, {', '.join(self.extensions)}>"

    def spec(self) -> Spec:
        """The form of a sample: a dict of bytes, and its key."""
        cells = dict(zip(self.extensions, (_cell(self._sizes[:, i]) for i in range(len(self.extensions))), strict=True))
        _, tree = flatten({KEY: "", **dict.fromkeys(self.extensions, b"")})
        byte = np.dtype(np.uint8)
        leaves = []
        for (name,) in tree.paths():
            cell = 2 * _CELL_LEAST if name == KEY else cells[name]
            leaves.append(Leaf(name, "str" if name == KEY else "bytes", (cell,), byte, byte))
        return Spec(tree, tuple(leaves))

    def reader(self) -> TarReader:
        """What reads."""
        return TarReader(self.extensions)

    def carried(self, indices: Array) -> list[TarSample]:
        """Where the members of each are: a worker need not know all of them."""
        files = np.searchsorted(self._starts, indices, "right") - 1
        rows = zip(indices.tolist(), files.tolist(), self._offsets[indices], self._sizes[indices], strict=True)
        return [
            TarSample(self.paths[file], self.keys[index], tuple(offsets.tolist()), tuple(sizes.tolist()))
            for index, file, offsets, sizes in rows
        ]

    def written(self) -> Sequence[str]:
        """The files, whose age tells one that was written anew."""
        return self.paths

    def fingerprint(self) -> str:
        """Keys, sizes and extensions: what is read, wherever it lies."""
        hasher = hashlib.blake2b(repr(self.extensions).encode(), digest_size=8)
        hasher.update(self._sizes.tobytes())
        for key in self.keys:
            hasher.update(key.encode("utf-8", "surrogateescape") + b"\0")
        return hasher.hexdigest()


def tar(
    paths: Path | Sequence[Path], extensions: Sequence[str] | None = None, *, index: Path | None = None
) -> Tar:  # fmt: skip
    """A source over tar files in the layout of WebDataset: members whose names agree up to the first dot are a sample.

    A sample is a dict of extension -> bytes, and its key as ``"__key__"``; give a load that decodes it. ``extensions``
    says which members to read (all that occur); a sample that lacks one fails by ``on_error``. The headers are walked
    over once, here; ``index`` is a folder in which what was found is kept for the next time, as long as a file's size
    and time stay the same. Compressed files have to be unpacked first.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not given:
        raise SpecError("penstock.tar() got an empty list of files: give at least one")
    if isinstance(extensions, str):
        raise TypeError(f"extensions={extensions!r} must be a list of them, such as [{extensions!r}]")
    if index is not None:
        os.makedirs(index, exist_ok=True)
    whole = [os.path.abspath(path) for path in given]
    with ThreadPoolExecutor(min(WALKERS, len(whole))) as pool:
        walked = list(pool.map(lambda path: _known(path, index), whole))
    return Tar(walked, None if extensions is None else tuple(ext.removeprefix(".").lower() for ext in extensions))


# ---------------------------------------------------------------- the walk over the headers


class _Walked(NamedTuple):
    """What one file holds: for each sample its key, for each extension (sample, offset, size)."""

    path: str
    keys: list[str]
    extensions: list[str]
    offsets: Array
    """A row for each sample, a column for each extension."""
    sizes: Array
    """The same; -1 where a sample does not have that member."""

    def column(self, values: Array, extensions: tuple[str, ...], absent: int) -> Array:
        """The columns of these extensions."""
        out = np.full((len(self.keys), len(extensions)), absent, np.int64)
        for place, extension in enumerate(extensions):
            if extension in self.extensions:
                out[:, place] = values[:, self.extensions.index(extension)]
        return out


def _known(path: str, index: Path | None) -> _Walked:
    """What was found in a file, from the index if it is there and fresh."""
    if index is None:
        return _walk(path)
    about = os.stat(path)
    state = [about.st_size, about.st_mtime_ns]
    named = hashlib.blake2b(os.fsencode(path), digest_size=8).hexdigest()
    kept = os.path.join(index, f"{os.path.basename(path)}.{named}.json")
    try:
        with open(kept, encoding="utf-8", errors="surrogateescape") as file:
            found = json.load(file)
        if found["state"] == state:
            offsets, sizes = (np.array(found[name], np.int64) for name in ("offsets", "sizes"))
            shape = (len(found["keys"]), len(found["extensions"]))
            return _Walked(path, found["keys"], found["extensions"], offsets.reshape(shape), sizes.reshape(shape))
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there, or not what it should be: it is written anew
    walked = _walk(path)
    with open(f"{kept}.{os.getpid()}", "w", encoding="utf-8", errors="surrogateescape") as file:
        json.dump(
            {
                "state": state,
                "keys": walked.keys,
                "extensions": walked.extensions,
                "offsets": walked.offsets.reshape(-1).tolist(),
                "sizes": walked.sizes.reshape(-1).tolist(),
            },
            file,
            ensure_ascii=False,
        )
    os.replace(f"{kept}.{os.getpid()}", kept)  # whole or not at all: others may be reading
    return walked


def _walk(path: str) -> _Walked:
    keys: list[str] = []
    places: dict[str, int] = {}
    members: list[tuple[int, int, int, int]] = []
    for name, offset, size in _members(path):
        parts = _NAME.match(name)
        if parts is None:
            continue
        key, extension = parts[1], parts[2].lower()
        place = places.setdefault(extension, len(places))
        if not keys or keys[-1] != key:
            keys.append(key)
        elif any(one[0] == len(keys) - 1 and one[1] == place for one in members[-len(places) :]):
            raise SpecError(
                f"{shown(path)} has two members .{extension} of sample {shown(key)}: give samples names of their own"
            )
        members.append((len(keys) - 1, place, offset, size))
    table = np.array(members, np.int64).reshape(-1, 4)
    offsets = np.zeros((len(keys), len(places)), np.int64)
    sizes = np.full((len(keys), len(places)), -1, np.int64)
    offsets[table[:, 0], table[:, 1]] = table[:, 2]
    sizes[table[:, 0], table[:, 1]] = table[:, 3]
    return _Walked(path, keys, list(places), offsets, sizes)


def _members(path: str) -> Iterator[tuple[str, int, int]]:
    """The files in a tar file: name, where the content begins, and its size."""
    with open(path, "rb", buffering=0) as file:
        end = os.fstat(file.fileno()).st_size
        read = _Window(file.fileno())
        head = read(0, _BLOCK)
        for magic, how in _COMPRESSED.items():
            if head.startswith(magic):
                raise SpecError(
                    f"{shown(path)} is compressed with {how}, so its members have no place where they could be read: "
                    "unpack it first (the members may be compressed)"
                )
        at, name, stated = 0, "", -1
        while True:
            head = read(at, _BLOCK)
            if head == _EMPTY:
                return
            if len(head) < _BLOCK:
                raise SpecError(
                    f"{shown(path)} ends at byte {end} without the empty block that a tar file ends with: was it cut "
                    "short?"
                )
            size = _checked(head, path, at)
            kind = head[156:157]
            content = at + _BLOCK
            at = content + -(-size // _BLOCK) * _BLOCK
            if kind == b"L":  # the next one has a long name
                name = os.fsdecode(read(content, size).rstrip(b"\0"))
                continue
            if kind == b"x":
                said = _pax(read(content, size))
                name, stated = said.get("path", name), int(said.get("size", stated))
                continue
            if stated >= 0:
                size, at = stated, content + -(-stated // _BLOCK) * _BLOCK
            if kind in (b"0", b"\0", b"7"):
                yield name or _plain_name(head), content, size
            elif kind == b"S":
                raise SpecError(f"{shown(path)} holds a sparse file, which has no one place: pack it without --sparse")
            name, stated = "", -1


class _Window:
    """Reads headers: small members have several of them in what is read at once."""

    def __init__(self, fd: int) -> None:
        self._fd, self._start, self._data = fd, 0, b""

    def __call__(self, offset: int, size: int) -> bytes:
        inside = offset - self._start
        if inside < 0 or inside + size > len(self._data):
            # Large members: only what is asked for, the rest would be thrown away.
            ahead = size if offset - self._start > 2 * _WALK_BYTES else max(size, _WALK_BYTES)
            self._start, self._data, inside = offset, os.pread(self._fd, ahead, offset), 0
        return self._data[inside : inside + size]


def _checked(head: bytes, path: str, at: int) -> int:
    """The size that a header says, if it is one."""
    try:
        stated = int(head[148:156].rstrip(b"\0 ").lstrip(b" ") or b"-1", 8)
        if sum(head) - sum(head[148:156]) + 8 * 32 == stated:
            field = head[124:136]
            if field[0] & 0x80:  # larger than eight octal digits can say
                return int.from_bytes(field[1:], "big")
            return int(field.rstrip(b"\0 ") or b"0", 8)
    except ValueError:
        pass
    raise SpecError(f"{shown(path)} has no header of a tar file at byte {at}: it is something else, or damaged")


def _plain_name(head: bytes) -> str:
    name = head[:100].partition(b"\0")[0]
    prefix = head[345:500].partition(b"\0")[0] if head[257:263] == b"ustar\0" else b""
    return os.fsdecode(prefix + b"/" + name if prefix else name)


def _pax(data: bytes) -> dict[str, str]:
    said, at = {}, 0
    while at < len(data):
        digits = data[at:].partition(b" ")[0]
        if not digits.isdigit():
            break
        length = int(digits)
        word, _, value = data[at + len(digits) + 1 : at + length - 1].partition(b"=")
        if word in (b"path", b"size"):
            said[word.decode()] = os.fsdecode(value)
        at += length
    return said


def _cell(sizes: Array) -> int:
    """Bytes that a member gets in a slot: what all need, unless few need far more than the others."""
    there = sizes[sizes >= 0]
    if not len(there):
        return _CELL_LEAST
    most = int(there.max())
    if most > 4 * int(there.mean()):
        most = int(np.quantile(there, 0.95, method="higher"))
    return max(_CELL_LEAST, -(-most // _CELL_LEAST) * _CELL_LEAST)
