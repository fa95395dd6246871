"""Lines of any bytes, cut anywhere, against a plain Python reading of the same file."""

from __future__ import annotations

import gzip
import io
import pickle
import tempfile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock._core import line_index, line_reader, lines
from penstock._core.lines import Lines, Located
from penstock._core.text import WHITE, Encoding, blank, line_ends, split_lines

ENCODINGS = ("utf-8", "utf-8-sig", "latin-1", "cp1252", "utf-16", "utf-16-be", "utf-32", "gb18030", "shift_jis")
# Few letters, many ends and white spaces: two of a kind meet often.
LETTERS = st.sampled_from(
    ["a", "b", "é", "漢", "\U0001f600", "\n", "\n", "\r", "\r\n", " ", "\t", "\x85", "\u3000", "\x0b"]
)
TEXT = st.lists(LETTERS, max_size=120).map("".join)
BYTES = st.binary(max_size=60) | st.lists(st.sampled_from([b"a", b"\n", b"\r", b" ", b"\xff", b"\xc3", b"\xa9"])).map(
    b"".join
)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that every edge there is lies inside of a few lines."""
    monkeypatch.setattr(line_index, "SEGMENT_BYTES", 8)
    monkeypatch.setattr(line_index, "MOST_SEGMENT_BYTES", 8)
    monkeypatch.setattr(line_reader, "BLOCK_BYTES", 16)
    monkeypatch.setattr(line_reader, "GAP_BYTES", 4)
    monkeypatch.setattr(lines, "BLOCK_BYTES", 5)


def plainly(data: bytes, encoding: str, *, strip: bool, keep_blank: bool) -> list[str]:
    """What a user would write."""
    found = []
    for line in io.TextIOWrapper(io.BytesIO(data), encoding=encoding):
        if keep_blank or line.strip():
            found.append(line.strip() if strip else line.removesuffix("\n"))
    return found


def read(source: Lines, *, shuffle: bool, size: int, memory: int = 2**20) -> list[Any]:
    """All lines as a feed's workers would read them, cut into tasks."""
    located = Located(source, memory=memory, shuffle=shuffle, rank=0, world=1, drop=False)
    found: list[Any] = []
    if shuffle:
        indices = np.random.default_rng(0).permutation(located.count())
        placed: list[Any] = [None] * len(indices)
        for start in range(0, len(indices), size):
            chosen = indices[start : start + size]
            for index, line in zip(chosen, source.reader.fetch(located.pick(chosen)), strict=True):
                placed[index] = line
        return placed
    for numbers, places in located.walk(0, size):
        assert numbers.tolist() == list(range(len(found), len(found) + len(places)))
        half = len(places) // 2
        for part in (places[:half], places[half:]) if half else (places,):
            found.extend(source.reader.fetch(pickle.loads(pickle.dumps(part))))
    return found


def files_of(data: list[bytes], folder: str, suffix: str = ".txt") -> list[Path]:
    paths = [Path(folder) / f"{number}{suffix}" for number in range(len(data))]
    for path, content in zip(paths, data, strict=True):
        path.write_bytes(gzip.compress(content) if suffix == ".gz" else content)
    return paths


@settings(deadline=None)
@given(
    texts=st.lists(TEXT, min_size=1, max_size=3),
    encoding=st.sampled_from(ENCODINGS),
    strip=st.booleans(),
    keep_blank=st.booleans(),
    shuffle=st.booleans(),
    size=st.integers(1, 7),
    memory=st.sampled_from([2**20, 2**12]),
)
def test_lines_are_those_that_python_reads(
    texts: list[str], encoding: str, strip: bool, keep_blank: bool, shuffle: bool, size: int, memory: int
) -> None:
    data = [text.encode(encoding, "ignore") for text in texts]
    wanted = [line for content in data for line in plainly(content, encoding, strip=strip, keep_blank=keep_blank)]
    with tempfile.TemporaryDirectory() as folder:
        source = penstock.lines(files_of(data, folder), encoding=encoding, strip=strip, keep_blank=keep_blank)
        assert read(source, shuffle=shuffle, size=size, memory=memory) == wanted
        assert len(source) == len(wanted)


@settings(deadline=None)
@given(text=TEXT, stride=st.integers(0, 5), size=st.integers(1, 5), shuffle=st.booleans())
def test_an_index_that_knows_only_some_lines_gives_the_same(text: str, stride: int, size: int, shuffle: bool) -> None:
    data = text.encode()
    with tempfile.TemporaryDirectory() as folder:
        source = penstock.lines(files_of([data], folder))
        index = source.indexed(2**20)
        index._most_entries = max(1, index.lines >> stride)
        index._thin()
        assert read(source, shuffle=shuffle, size=size) == plainly(data, "utf-8", strip=True, keep_blank=False)


@settings(deadline=None)
@given(
    texts=st.lists(TEXT, min_size=1, max_size=3), keep_blank=st.booleans(), strip=st.booleans(), size=st.integers(1, 7)
)
def test_compressed_lines_are_those_that_python_reads(
    texts: list[str], keep_blank: bool, strip: bool, size: int
) -> None:
    data = [text.encode() for text in texts]
    wanted = [line for content in data for line in plainly(content, "utf-8", strip=strip, keep_blank=keep_blank)]
    with tempfile.TemporaryDirectory() as folder:
        source = penstock.lines(files_of(data, folder, ".gz"), strip=strip, keep_blank=keep_blank)
        assert read(source, shuffle=False, size=size) == wanted
        assert len(source) == len(wanted)


@settings(deadline=None)
@given(
    data=BYTES, encoding=st.sampled_from(["utf-8", "utf-16", "ascii"]), shuffle=st.booleans(), size=st.integers(1, 4)
)
def test_lines_that_cannot_be_decoded_keep_their_place(data: bytes, encoding: str, shuffle: bool, size: int) -> None:
    codec = {"utf-16": "utf-16-le"}.get(encoding, encoding)
    text = data
    if encoding == "utf-16" and data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        codec, text = ("utf-16-le" if data[0] == 0xFF else "utf-16-be"), data[2:]
    # The simplest way to find the ends: decode with what cannot be put in a mark of its own, split, decode again.
    wanted: list[str | None] = []
    for line in pieces(text, codec):
        try:
            kept = line.decode(codec).strip()
        except UnicodeDecodeError:
            wanted.append(None)
            continue
        if kept:
            wanted.append(kept)
    with tempfile.TemporaryDirectory() as folder:
        source = penstock.lines(files_of([data], folder), encoding=encoding)
        found = read(source, shuffle=shuffle, size=size)
        assert [line if isinstance(line, str) else None for line in found] == wanted
        for line in found:
            if not isinstance(line, str):
                for _ in range(2):
                    with pytest.raises(UnicodeDecodeError):
                        line.item()


def pieces(data: bytes, codec: str) -> list[bytes]:
    width = 2 if codec.startswith("utf-16") else 1
    order: Literal["big", "little"] = "big" if codec.endswith("be") else "little"
    units = [data[i : i + width] for i in range(0, len(data), width)]
    found, line = [], b""
    for number, unit in enumerate(units):
        line += unit
        value = int.from_bytes(unit, order) if len(unit) == width else -1
        following = units[number + 1] if number + 1 < len(units) else b""
        if value == 10 or (value == 13 and not (len(following) == width and int.from_bytes(following, order) == 10)):
            found.append(line)
            line = b""
    return [*found, line] if line else found


@given(text=TEXT, encoding=st.sampled_from(ENCODINGS))
def test_what_is_blank_is_seen_without_decoding_the_rest(text: str, encoding: str) -> None:
    data = text.encode(encoding, "ignore")
    known = Encoding(encoding)
    form = known.form(data[:4])
    body = np.frombuffer(data[form.start :], np.uint8)
    stops = line_ends(body, form, final=True)
    if len(body) and (not len(stops) or stops[-1] != len(body)):
        stops = np.append(stops, len(body))
    starts = np.concatenate((np.zeros(1, np.int64), stops))[: len(stops)]
    found = blank(body, starts, stops, form, known)
    lines_found = [body[a:b].tobytes().decode(form.codec) for a, b in zip(starts, stops, strict=True)]
    assert found.tolist() == [not line.strip() for line in lines_found]


@given(TEXT)
def test_splitting_is_what_universal_newlines_are(text: str) -> None:
    wanted = [line.removesuffix("\n") for line in io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8")]
    assert split_lines(text, strip=False, keep_blank=True) == wanted


def test_white_space_is_all_that_python_knows() -> None:
    assert set(WHITE) == {chr(code) for code in range(0x110000) if chr(code).isspace()}
