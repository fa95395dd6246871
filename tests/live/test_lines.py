"""``penstock.lines``: text files read by byte ranges, in order or shuffled exactly, by any kind of crew."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import BudgetError, Feed, LoadError, PenstockError
from penstock._core import line_index, lines, machine
from tests.live.crews import batches, drain, each_crew, feed_of

WIDTH = 24
# Compressed text comes in order only.
PLAIN_OR_COMPRESSED = pytest.mark.parametrize(("suffix", "shuffle"), [("", False), ("", True), (".gz", False)])


def tokens(line: str) -> np.ndarray[Any, Any]:
    """Bytes and how many there are, in a row of fixed length."""
    row = np.zeros(WIDTH, np.uint8)
    data = line.encode()[: WIDTH - 1]
    row[0] = len(data)
    row[1 : 1 + len(data)] = np.frombuffer(data, np.uint8)
    return row


def text_of(row: np.ndarray[Any, Any]) -> str:
    return row[1 : 1 + row[0]].tobytes().decode()


def varying(line: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(line.encode(), np.uint8).astype(np.int32)


def noisy(line: str) -> float:
    return float(line.split()[1]) + penstock.rng().random()


def write(path: Path, count: int, *, ends: str = "\n", start: int = 0) -> list[str]:
    found = [f"line {number} é漢" for number in range(start, start + count)]
    path.write_bytes(
        "".join(f"{line}{ends}{ends if number % 5 == 0 else ''}" for number, line in enumerate(found)).encode()
    )
    return found


def texts(feed: Feed) -> list[str]:
    return [line for batch in feed for line in batch]


def drained(crew: str, source: Any, load: Any = None, **options: Any) -> None:
    """Go through an epoch and keep nothing."""
    with feed_of(crew, source, load, **options) as feed:
        for _ in feed:
            pass


@pytest.fixture
def three(tmp_path: Path) -> tuple[list[Path], list[str]]:
    """Three files, one of them empty, with 1234 lines in all, some behind blank ones."""
    paths = [tmp_path / name for name in ("a.txt", "b.txt", "empty.txt", "c.txt")]
    paths[2].touch()
    wanted = write(paths[0], 700) + write(paths[1], 34, ends="\r\n", start=700) + write(paths[3], 500, start=734)
    return paths, wanted


# ---------------------------------------- the same lines in the same order, whoever reads


@each_crew
@pytest.mark.parametrize("small", [False, True], ids=["one segment", "many segments"])
def test_lines_come_in_order(
    crew: str, three: tuple[list[Path], list[str]], small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if small:
        monkeypatch.setattr(line_index, "SEGMENT_BYTES", 512)
    paths, wanted = three
    with feed_of(crew, penstock.lines(paths), batch_size=50) as feed:
        for _ in range(2):
            assert texts(feed) == wanted
        assert len(feed) == 25
    with feed_of(crew, penstock.lines(paths), tokens, batch_size=50) as feed:
        assert [text_of(row) for batch in feed for row in batch] == wanted


@each_crew
def test_shuffled_lines_are_all_of_them_in_an_order_that_is_the_same_for_every_crew(
    crew: str, three: tuple[list[Path], list[str]]
) -> None:
    paths, wanted = three
    with feed_of("inline", range(len(wanted)), batch_size=50, shuffle=True, load=int) as feed:
        orders = [[int(index) for batch in feed for index in batch] for _ in range(2)]
    with feed_of(crew, penstock.lines(paths), batch_size=50, shuffle=True) as feed:
        for order in orders:
            assert texts(feed) == [wanted[index] for index in order]
    with feed_of(crew, penstock.lines(paths), tokens, batch_size=50, shuffle=True) as feed:
        assert [text_of(row) for batch in feed for row in batch] == [wanted[index] for index in orders[0]]


@each_crew
@pytest.mark.parametrize("load", [None, tokens], ids=["text", "tokens"])
def test_lines_are_shuffled_in_blocks_like_any_other_items(
    crew: str, load: Any, three: tuple[list[Path], list[str]]
) -> None:
    paths, wanted = three
    options: dict[str, Any] = {"batch_size": 20, "shuffle": penstock.Blocks(rows=10, group=100)}
    with feed_of("inline", range(len(wanted)), int, **options) as feed:
        order = [int(index) for batch in feed for index in batch]
    with feed_of(crew, penstock.lines(paths), load, **options) as feed:
        found = [line for batch in feed for line in (batch if load is None else map(text_of, batch))]
    assert found == [wanted[index] for index in order]


@each_crew
def test_tokens_of_varying_length_are_padded(crew: str, three: tuple[list[Path], list[str]]) -> None:
    paths, wanted = three
    found = []
    for data, lengths in batches(crew, penstock.lines(paths), varying, batch_size=100, collate_fn="pad"):
        found += [row[:length].astype(np.uint8).tobytes().decode() for row, length in zip(data, lengths, strict=True)]
    assert found == wanted


def test_batches_of_text_go_to_a_collate_fn_and_to_torch_as_they_are(three: tuple[list[Path], list[str]]) -> None:
    paths, wanted = three
    found = batches(
        "process", penstock.lines(paths), batch_size=100, collate_fn=lambda rows: {"n": len(rows), "t": rows}
    )
    assert [batch["n"] for batch in found] == [100] * 12 + [34]
    assert [line for batch in found for line in batch["t"]] == wanted
    assert batches("inline", penstock.lines(paths), batch_size=100, collate_fn="list")[0] == wanted[:100]


def test_randomness_belongs_to_the_line(three: tuple[list[Path], list[str]]) -> None:
    paths, _ = three
    found = {
        crew: np.concatenate(batches(crew, penstock.lines(paths), noisy, batch_size=64))
        for crew in ("inline", "thread", "process")
    }
    assert len(np.unique(found["inline"] % 1)) == 1234
    for crew in ("thread", "process"):
        np.testing.assert_array_equal(found[crew], found["inline"])


# ---------------------------------------- going on, sharing


@PLAIN_OR_COMPRESSED
def test_a_saved_state_goes_on_with_the_next_line_and_another_crew(tmp_path: Path, suffix: str, shuffle: bool) -> None:
    path = tmp_path / f"a.txt{suffix}"
    wanted = write(tmp_path / "a.txt", 300)
    if suffix:
        path.write_bytes(gzip.compress((tmp_path / "a.txt").read_bytes()))
    options = {"batch_size": 16, "shuffle": shuffle}
    with feed_of("inline", penstock.lines(path), **options) as feed:
        whole = [texts(feed), texts(feed)]
    assert sorted(whole[0]) == sorted(wanted)
    with feed_of("process", penstock.lines(path), tokens, **options) as feed:
        epoch = iter(feed)
        begun = [text_of(row) for _ in range(7) for row in next(epoch)]
        state = json.loads(json.dumps(feed.state_dict()))
    with feed_of("thread", penstock.lines(path), batch_size=10, shuffle=shuffle) as feed:
        feed.load_state_dict(state)
        assert begun + texts(feed) == whole[0]
        assert texts(feed) == whole[1]


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_state_of_a_finished_epoch_begins_the_next(tmp_path: Path, suffix: str, drop_last: bool) -> None:
    write(tmp_path / "a.txt", 35)
    path = tmp_path / f"a.txt{suffix}"
    if suffix:
        path.write_bytes(gzip.compress((tmp_path / "a.txt").read_bytes()))
    with feed_of("inline", penstock.lines(path), batch_size=10, drop_last=drop_last) as feed:
        epoch = iter(feed)
        for _ in range(3 if drop_last else 4):
            next(epoch)  # the last one, and nobody has asked whether it is
        state = feed.state_dict()
    assert (state["epoch"], state["position"]) == (1, 0)


def test_a_state_of_other_files_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", 100)
    write(tmp_path / "b.txt", 101)
    with feed_of("inline", penstock.lines(tmp_path / "a.txt")) as feed:
        next(iter(feed))
        state = feed.state_dict()
    for other in (penstock.lines(tmp_path / "b.txt"), penstock.lines(tmp_path / "a.txt", keep_blank=True)):
        with feed_of("inline", other) as feed, pytest.raises(ValueError, match="belongs to"):
            feed.load_state_dict(state)
    (tmp_path / "moved").mkdir()
    os.rename(tmp_path / "a.txt", tmp_path / "moved" / "a.txt")
    with feed_of("inline", penstock.lines(tmp_path / "moved" / "a.txt")) as feed:
        feed.load_state_dict(state)
        assert next(iter(feed))[0].startswith("line 4 ")


@PLAIN_OR_COMPRESSED
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("count", [103, 2, 100])
def test_ranks_get_equally_many_lines_and_all_of_them_together(
    tmp_path: Path, suffix: str, shuffle: bool, drop_last: bool, count: int
) -> None:
    path = tmp_path / f"a.txt{suffix}"
    wanted = write(tmp_path / "a.txt", count)
    if suffix:
        path.write_bytes(gzip.compress((tmp_path / "a.txt").read_bytes()))
    options = {"batch_size": 4, "shuffle": shuffle, "drop_last": drop_last}
    ranks, of_indices = [], []
    for rank in range(4):
        with feed_of("inline", penstock.lines(path), shard=(rank, 4), **options) as feed:
            ranks.append(list(feed))
        with feed_of("inline", range(count), int, shard=(rank, 4), **options) as feed:
            of_indices.append([[wanted[index] for index in batch] for batch in feed])
    assert ranks == of_indices
    assert len({len(rank) for rank in ranks}) == 1
    if not drop_last:
        assert {line for rank in ranks for batch in rank for line in batch} == set(wanted)


# ---------------------------------------- how many there are


def test_the_first_batch_needs_no_look_at_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_index, "SEGMENT_BYTES", 4096)
    wanted = write(tmp_path / "a.txt", 20_000)
    source = penstock.lines(tmp_path / "a.txt")
    with feed_of("inline", source, batch_size=8) as feed:
        assert next(iter(feed)) == wanted[:8]
        assert not source.walked().complete
        assert source.walked().lines < 1000
        assert len(feed) == 2500
        assert source.walked().complete


def test_compressed_text_has_no_length_until_it_was_read(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", 100)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress((tmp_path / "a.txt").read_bytes()))
    with feed_of("inline", penstock.lines(tmp_path / "a.txt.gz"), batch_size=8) as feed:
        with pytest.raises(TypeError, match="known only after they were read once"):
            len(feed)
        texts(feed)
        assert len(feed) == 13
    with pytest.raises(ValueError, match="in order only, so shuffle=True is not possible"):
        Feed(penstock.lines(tmp_path / "a.txt.gz"), shuffle=True)


@each_crew
def test_no_lines_at_all_make_no_batches(crew: str, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "blank.txt").write_text(" \n\n\t\r\n")
    (tmp_path / "empty.gz").write_bytes(gzip.compress(b"\n"))
    for name in ("empty.txt", "blank.txt", "empty.gz"):
        assert batches(crew, penstock.lines(tmp_path / name)) == []
    assert batches(crew, penstock.lines(tmp_path / "blank.txt"), shuffle=True) == []
    assert batches(crew, penstock.lines(tmp_path / "blank.txt", keep_blank=True)) == [["", "", ""]]


# ---------------------------------------- compressed


@each_crew
@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_compressed_lines_come_in_order(crew: str, kind: str, three: tuple[list[Path], list[str]]) -> None:
    paths, wanted = three
    for path in (paths[0], paths[3]):  # beside one that is not
        data = path.read_bytes()
        if kind == "gz":
            # Two members, as they come from tools that compress in parallel.
            packed = gzip.compress(data[:1000]) + gzip.compress(data[1000:])
        else:
            zstandard = pytest.importorskip("zstandard", reason="zstd needs the package zstandard")
            packed = zstandard.compress(data[:1000]) + zstandard.compress(data[1000:])
        path.with_suffix(f".{kind}").write_bytes(packed)
    mixed = [paths[0].with_suffix(f".{kind}"), paths[1], paths[3].with_suffix(f".{kind}")]
    with feed_of(crew, penstock.lines(mixed), tokens, batch_size=50) as feed:
        for _ in range(2):
            assert [text_of(row) for batch in feed for row in batch] == wanted
        assert len(feed) == 25


def test_a_compressed_file_that_was_cut_short_says_where(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", 20_000)
    packed = gzip.compress((tmp_path / "a.txt").read_bytes())
    (tmp_path / "a.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(PenstockError, match=r"a\.gz' could not be read on after line \d+: Compressed file ended"):
        drained("process", penstock.lines(tmp_path / "a.gz"), tokens)


def cut_short(zstandard: Any, how: str, text: bytes) -> bytes:
    """A .zst file of which the end is missing."""
    packed: bytes = zstandard.ZstdCompressor(write_checksum=True).compress(text)
    behind = zstandard.compress(text)
    skipped = b"\x5e\x2a\x4d\x18" + (9).to_bytes(4, "little") + b"skip this"
    parts: dict[str, bytes] = {
        "half": packed[: len(packed) // 2],
        "most": packed[: len(packed) * 99 // 100],
        "in the magic number": packed[:3],
        "behind the magic number": packed[:4],
        "in the header": packed[:6],
        "before the checksum": packed[:-4],
        "in the checksum": packed[:-1],
        "in the second frame": packed + behind[: len(behind) // 2],
        "in the second magic number": packed + behind[:2],
        "behind the second magic number": packed + behind[:4],
        "in a frame without data": packed + skipped[:-1],
        "in the size of a frame without data": packed + skipped[:6],
    }
    return parts[how]


@pytest.mark.parametrize(
    "how",
    [
        "half",
        "most",
        "in the magic number",
        "behind the magic number",
        "in the header",
        "before the checksum",
        "in the checksum",
        "in the second frame",
        "in the second magic number",
        "behind the second magic number",
        "in a frame without data",
        "in the size of a frame without data",
    ],
)
def test_a_zstd_file_that_was_cut_short_says_where(tmp_path: Path, how: str) -> None:
    zstandard = pytest.importorskip("zstandard", reason="zstd needs the package zstandard")
    wanted = write(tmp_path / "a.txt", 20_000)
    (tmp_path / "a.zst").write_bytes(cut_short(zstandard, how, (tmp_path / "a.txt").read_bytes()))
    found: list[str] = []
    with (
        feed_of("inline", penstock.lines(tmp_path / "a.zst", keep_blank=True), batch_size=10) as feed,
        pytest.raises(PenstockError, match=r"a\.zst' could not be read on after line \d+: Compressed file") as said,
    ):
        drain(feed, found)
    assert [line for line in found if line] == (wanted * 2)[: sum(map(bool, found))]
    # What is on its way to a batch that will not be full is not handed out.
    readable = int(str(said.value).partition("after line ")[2].partition(":")[0])
    assert readable - len(found) <= 10 * feed.plan.batches_per_slot if found else readable == 0
    assert found or how in ("in the magic number", "behind the magic number", "in the header")


def test_a_zstd_file_of_several_frames_is_read_to_its_end(tmp_path: Path) -> None:
    """Also where some hold no text, or nothing at all."""
    zstandard = pytest.importorskip("zstandard", reason="zstd needs the package zstandard")
    wanted = write(tmp_path / "a.txt", 3000)
    text = (tmp_path / "a.txt").read_bytes()
    streamed = zstandard.ZstdCompressor(write_checksum=True, write_content_size=False).compressobj()
    skipped = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"other"
    parts = [skipped, zstandard.compress(b""), zstandard.compress(b"\n" * 300_000), zstandard.compress(text[:99])]
    parts += [zstandard.compress(b""), skipped, streamed.compress(text[99:]), streamed.flush(), skipped]
    (tmp_path / "a.zst").write_bytes(b"".join(parts))
    (tmp_path / "empty.zst").touch()
    source = penstock.lines([tmp_path / "a.zst", tmp_path / "empty.zst"])
    with feed_of("inline", source, batch_size=50) as feed:
        assert texts(feed) == wanted


def test_zstd_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "a.zst").touch()
    with pytest.raises(ImportError, match=r"pip install 'penstock\[zstd\]'"):
        penstock.lines(tmp_path / "a.zst")


# ---------------------------------------- what goes wrong


@each_crew
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("load", [None, tokens], ids=["text", "tokens"])
def test_lines_that_cannot_be_decoded_are_left_out_or_named(
    crew: str, shuffle: bool, load: Any, tmp_path: Path
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"".join(b"bad \xff\n" if n in (30, 31, 77) else b"line %d\n\n" % n for n in range(100)))
    good = [f"line {n}" for n in range(100) if n not in (30, 31, 77)]
    options = {"batch_size": 8, "shuffle": shuffle}
    offset = path.read_bytes().index(b"bad")
    with feed_of(crew, penstock.lines(path), load, on_error="skip", **options) as feed:
        found = [line for batch in feed for line in (batch if load is None else map(text_of, batch))]
        assert sorted(found) == sorted(good)
        skipped = {item for item, _ in feed.stats.skipped}
        assert {item.number for item in skipped} == {61, 62, 153}
        assert min(item.offset for item in skipped) == offset
        assert all(isinstance(error, UnicodeDecodeError) for _, error in feed.stats.skipped)
    with pytest.raises(LoadError, match=r"line \d+ \(byte \d+\) of '.*a\.txt'.*UnicodeDecodeError") as caught:
        drained(crew, penstock.lines(path), load, **options)
    assert caught.value.item in skipped
    if not shuffle:
        assert caught.value.item == penstock.Line(str(path), 61, offset)


def test_a_load_that_fails_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"x": 1}\n' * 50 + "{broken\n" + '{"x": 1}\n' * 50)
    for source in (path, tmp_path / "a.jsonl.gz"):
        if source.suffix == ".gz":
            source.write_bytes(gzip.compress(path.read_bytes()))
        with pytest.raises(LoadError, match=rf"load failed for line 51 .*of '{source}': JSONDecodeError"):
            drained("process", penstock.lines(source), lambda line: json.loads(line)["x"])


def test_a_line_in_the_middle_of_a_huge_file_is_named_by_its_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock._core.line_reader.COUNTED_BYTES", 100)
    (tmp_path / "a.txt").write_bytes(b"fine\n" * 40 + b"\xff\n")
    with pytest.raises(LoadError, match=r"the line at byte 200 of '.*a\.txt'"):
        drained("inline", penstock.lines(tmp_path / "a.txt"))


@each_crew
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("how", ["gone", "longer", "shorter", "other"])
def test_files_that_change_meanwhile_are_told_of(crew: str, shuffle: bool, how: str, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write(path, 1000)
    source = penstock.lines(path)
    len(source)
    data = path.read_bytes()
    kind: type[Exception] = LoadError
    if how == "gone":
        path.unlink()
        match = "FileNotFoundError"
        if shuffle:  # all lines are looked for before the first is read
            kind, match = FileNotFoundError, "a.txt"
    elif how == "other":  # as large as before
        path.write_bytes(b"\n".join([b"x" * 9] * (len(data) // 10)).ljust(len(data), b"y"))
        match = "was written to since its lines were looked for: 16 were there"
        if shuffle:  # each line is known by its place alone: one that is there again is taken for it
            return
    else:
        path.write_bytes(data + b"more\n" if how == "longer" else data[:-20])
        kind, match = PenstockError, rf"had {len(data)} bytes .* and has \d+ now"
    with pytest.raises(kind, match=match):
        drained(crew, source, tokens, shuffle=shuffle)


def test_a_file_that_changes_in_the_middle_of_an_epoch_is_told_of(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write(path, 5000)
    with feed_of("process", penstock.lines(path), tokens, shuffle=True) as feed:
        epoch = iter(feed)
        next(epoch)
        path.write_text("other")
        with pytest.raises(LoadError, match=r"had \d+ bytes .* and has 5 now"):
            for _ in epoch:
                pass


def test_what_is_no_text_file_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no file"):
        penstock.lines(tmp_path / "none.txt")
    with pytest.raises(FileNotFoundError, match="takes paths, not patterns"):
        penstock.lines(str(tmp_path / "*.txt"))
    with pytest.raises(IsADirectoryError, match="give its files"):
        penstock.lines(tmp_path)
    with pytest.raises(ValueError, match="did a pattern match nothing"):
        penstock.lines([])
    with pytest.raises(TypeError, match=r"str or pathlib\.Path, not bytes: b'x'"):
        penstock.lines(b"x")  # type: ignore[arg-type]
    text = tmp_path / "names.txt"
    text.write_text("one\n")
    with text.open() as file, pytest.raises(TypeError, match=r"takes the path of a file, not an open one: <_io"):
        penstock.lines(file)
    with pytest.raises(TypeError, match=r"str or pathlib\.Path"):
        penstock.lines([b"a.txt"])  # type: ignore[list-item]
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a regular file"):
        penstock.lines(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("encoding", "match"),
    [
        ("nonsense", "is not known"),
        ("rot13", "is not known"),
        ("utf-7", "from the middle"),
        ("cp037", "other line ends"),
    ],
)
def test_encodings_that_cannot_be_cut_are_refused_at_once(tmp_path: Path, encoding: str, match: str) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(ValueError, match=match):
        penstock.lines(tmp_path / "a.txt", encoding=encoding)
    (tmp_path / "a.gz").touch()
    with pytest.raises(ValueError, match="one-byte line ends, not in utf-16"):
        penstock.lines(tmp_path / "a.gz", encoding="utf-16")


# ---------------------------------------- memory


@each_crew
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_line_larger_than_a_block_is_read_and_one_too_large_for_the_budget_refused(
    crew: str, suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"a.txt{suffix}"
    data = b"short\n" + b"x" * 3_000_000 + b"\nshort again"
    path.write_bytes(gzip.compress(data) if suffix else data)
    with feed_of(crew, penstock.lines(path), batch_size=2) as feed:
        assert [len(line) for line in texts(feed)] == [5, 3_000_000, 11]
    with pytest.raises(BudgetError, match=r"a budget of 20 MiB has room for lines of 2\.5 MiB") as caught:
        drained(crew, penstock.lines(path), len, memory="20 MiB", num_workers=0)
    with feed_of(crew, penstock.lines(path), len, memory=max(caught.value.least, 128 * 2**20)) as feed:
        assert np.concatenate([batch.copy() for batch in feed]).tolist() == [5, 3_000_000, 11]


def test_the_index_stays_within_its_share_and_the_plan_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_index, "SEGMENT_BYTES", 4096)
    (tmp_path / "a.txt").write_text("".join(f"{n}\n" for n in range(300_000)))
    wide, narrow = penstock.lines(tmp_path / "a.txt"), penstock.lines(tmp_path / "a.txt")
    with feed_of("inline", wide, int, shuffle=True, batch_size=1000) as feed:
        order = np.concatenate([batch.copy() for batch in feed])
        assert "index of 300,000 lines, 4 bytes for each:" in " ".join(str(feed.plan).split())
        most = feed.plan.parent_bytes
    monkeypatch.setattr(lines, "SHARE", 64)
    with feed_of("inline", narrow, int, shuffle=True, batch_size=1000, memory="16 MiB") as feed:
        assert "4 bytes for every 8 of them:" in " ".join(str(feed.plan).split())
        assert 4 * narrow.indexed(2**30)._entries[-1] <= 16 * 2**20 // 64
        assert feed.plan.parent_bytes < most - 10**6
        assert feed.plan.total_bytes <= 16 * 2**20
        np.testing.assert_array_equal(np.concatenate([batch.copy() for batch in feed]), order)


def windowed(zstandard: Any, log: int, text: bytes) -> bytes:
    """Text compressed with a window of 2 ** log bytes, as zstd --long=log does it."""
    form = zstandard.ZstdCompressionParameters(window_log=log)
    packer = zstandard.ZstdCompressor(compression_params=form).compressobj()
    return bytes(packer.compress(text) + packer.flush())


@pytest.mark.parametrize("crew", ["inline", "process"])
def test_the_window_of_zstd_is_a_part_of_the_budget(crew: str, tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard", reason="zstd needs the package zstandard")
    text = b"line\n" * 500
    (tmp_path / "short.zst").write_bytes(windowed(zstandard, 17, text))
    (tmp_path / "long.zst").write_bytes(windowed(zstandard, 27, text))
    source = penstock.lines([tmp_path / "short.zst", tmp_path / "long.zst"])
    with pytest.raises(BudgetError, match=r"memory=67108864 .* The memory to unpack with is a part of it") as caught:
        drained(crew, source, len, memory="64 MiB")
    assert 2**27 < caught.value.least < 2**27 + 160 * 2**20
    with feed_of(crew, source, len, memory=caught.value.least) as feed:
        assert sum(len(batch) for batch in feed) == 1000
        assert feed.plan.parent_bytes > 2**27
        assert "zstd's window is 128 MiB" in " ".join(str(feed.plan).split())
        assert feed.stats.peak_bytes > 2**27


def test_a_later_window_of_zstd_is_refused_if_it_is_too_large(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard", reason="zstd needs the package zstandard")
    first = b"".join(b"%d\n" % (number * number) for number in range(5000))
    packed = windowed(zstandard, 17, first) + windowed(zstandard, 25, b"line\n" * 500)
    assert len(packed) > 2 * 4096
    (tmp_path / "a.zst").write_bytes(packed)
    with pytest.raises(
        BudgetError, match=r"a window of 32 MiB, and a budget of 64 MiB has room for one of 8 MiB"
    ) as no:
        drained("inline", penstock.lines(tmp_path / "a.zst"), memory="64 MiB")
    with feed_of("inline", penstock.lines(tmp_path / "a.zst"), memory=no.value.least) as feed:
        assert len(texts(feed)) == 5500


def test_the_least_budget_that_an_error_names_is_enough(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", 50_000)
    source = penstock.lines(tmp_path / "a.txt")
    for shuffle in (False, True):
        with pytest.raises(BudgetError) as caught:
            drained("process", source, tokens, shuffle=shuffle, memory="16 MiB")
        with feed_of("process", source, tokens, shuffle=shuffle, memory=caught.value.least) as feed:
            assert len(next(iter(feed))) == 4


@pytest.mark.parametrize("where", ["first", "late"])
@pytest.mark.parametrize(("suffix", "shuffle"), [("", False), ("", True), (".gz", False)])
@pytest.mark.parametrize("batch_size", [1, 2, 32])
def test_the_least_budget_for_a_long_line_is_enough(
    batch_size: int, suffix: str, shuffle: bool, where: str, tmp_path: Path
) -> None:
    """Also if it stands far behind the lines that are looked at first, and is wide as text."""
    path = tmp_path / f"a.txt{suffix}"
    long, short = b"z" * 3_000_000 + "\U0001f600\n".encode(), b"w" * 200 + b"\n"
    data = long + 500 * short if where == "first" else 5000 * short + long
    path.write_bytes(gzip.compress(data, 1) if suffix else data)
    options: dict[str, Any] = {"batch_size": batch_size, "shuffle": shuffle, "num_workers": 0}
    with (
        Feed(penstock.lines(path), memory="16 MiB", **options) as feed,
        pytest.raises(BudgetError, match=r"a\.txt.* has 2\.9 MiB, and a budget of 16 MiB has room for .* 2 MiB") as no,
    ):
        texts(feed)
    with Feed(penstock.lines(path), memory=no.value.least, **options) as feed:
        assert sum(map(len, texts(feed))) == len(data) - 3 - data.count(b"\n")


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_least_budget_for_a_long_line_is_enough_for_workers(shuffle: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    data = 20_000 * (b"w" * 200 + b"\n") + b"z" * 16_000_000
    path.write_bytes(data)
    options: dict[str, Any] = {"batch_size": 32, "shuffle": shuffle, "num_workers": 2}
    with (
        Feed(penstock.lines(path), memory="112 MiB", **options) as feed,
        pytest.raises(BudgetError, match=r"has 15\.3 MiB, and a budget of 112 MiB has room for lines of 14") as caught,
    ):
        texts(feed)
    with Feed(penstock.lines(path), memory=caught.value.least, **options) as feed:
        assert sum(map(len, texts(feed))) == len(data) - 20_000


def test_the_longest_line_is_planned_for_where_it_is_known(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"short\n" * 100 + b"z" * 14_000_000)
    options: dict[str, Any] = {"num_workers": 2, "batch_size": 2, "shuffle": True}
    with (
        Feed(penstock.lines(path), memory="128 MiB", **options) as feed,
        pytest.raises(
            BudgetError, match=r"The line index, and 53\.\d MiB for whoever reads the longest line"
        ) as caught,
    ):
        texts(feed)
    with Feed(penstock.lines(path), memory=caught.value.least, **options) as feed:
        assert sum(map(len, texts(feed))) == 500 + 14_000_000
        assert "whoever reads holds the longest line: 53" in " ".join(str(feed.plan).split())


@each_crew
def test_no_batch_is_planned_to_take_more_than_all_text(crew: str, tmp_path: Path) -> None:
    """The first line is no measure for as many as a batch holds."""
    one, paths = tmp_path / "one.txt", [tmp_path / "a.txt", tmp_path / "b.txt"]
    one.write_bytes(b"x" * 100_000)
    for path in paths:
        path.write_bytes(b"y" * 230_000 + b"\n" + b"".join(b"short %d\n" % number for number in range(2000)))
    wanted = 2 * ["y" * 230_000, *(f"short {number}" for number in range(2000))]
    with feed_of(crew, penstock.lines(one), batch_size=20_000, memory="128 MiB") as feed:
        assert texts(feed) == ["x" * 100_000]
    with feed_of(crew, penstock.lines(paths), batch_size=500, memory="128 MiB") as feed:
        assert texts(feed) == wanted
        assert feed.stats.peak_bytes <= 128 * 2**20
    with feed_of(crew, penstock.lines(paths, encoding="latin-1"), batch_size=5000, memory="128 MiB") as feed:
        assert texts(feed) == wanted


# ---------------------------------------- the index on disk


def test_an_index_is_kept_and_used_again_until_the_files_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder = tmp_path / "a.txt", tmp_path / "index"
    wanted = write(path, 1000)

    def run(shuffle: bool = True) -> list[str]:
        with feed_of("inline", penstock.lines(path, index=folder), batch_size=100, shuffle=shuffle) as feed:
            return texts(feed)

    first = run()
    (kept,) = folder.iterdir()
    scan, scanned = line_index.Scanner.scan, list[Any]()

    def noted(self: Any, *args: Any) -> Any:
        scanned.append(args)
        return scan(self, *args)

    monkeypatch.setattr(line_index.Scanner, "scan", noted)
    assert run() == first
    assert run(shuffle=False) == wanted
    assert scanned == []
    kept.write_bytes(kept.read_bytes()[:500])  # cut short
    assert run() == first
    assert scanned
    scanned.clear()
    wanted = write(path, 999, start=1)
    assert sorted(run()) == sorted(wanted)
    assert scanned
    assert [file.name for file in folder.iterdir()] == [kept.name]
    with feed_of("inline", penstock.lines(path, index=folder, keep_blank=True), batch_size=100) as feed:
        assert len(feed) > 10
    assert len(list(folder.iterdir())) == 2


def test_an_index_that_is_no_folder_is_refused_at_once(three: tuple[list[Path], list[str]], tmp_path: Path) -> None:
    paths, _ = three
    wrong: tuple[Any, ...] = (True, b"index")
    for index in wrong:
        with pytest.raises(TypeError, match=rf"index= must be a folder .*, not {type(index).__name__}: "):
            penstock.lines(paths, index=index)
    for file in (paths[0], str(paths[0])):
        with pytest.raises(NotADirectoryError, match=r"index= must be a folder, and '.*a\.txt' is none"):
            penstock.lines(paths, index=file)


# ---------------------------------------- what it is


def test_a_source_says_what_it_is_and_two_feeds_may_share_it(three: tuple[list[Path], list[str]]) -> None:
    paths, wanted = three
    source = penstock.lines(paths)
    assert repr(source).startswith("<penstock.lines of 4 files, ")
    assert len(source) == 1234
    with feed_of("thread", source, batch_size=7) as one, feed_of("inline", source, tokens, shuffle=True) as other:
        assert "of text, batch_size=7" in repr(one)
        rows = iter(other)
        for start, batch in zip(range(0, 1234, 7), one, strict=True):
            assert batch == wanted[start : start + 7]
            next(rows, None)


def test_a_line_can_be_sent_and_shown(tmp_path: Path) -> None:
    line = penstock.Line("a.txt", 3, 17)
    assert pickle.loads(pickle.dumps(line)) == line
    assert repr(line) == "line 3 (byte 17) of 'a.txt'"
    assert repr(penstock.Line("a.txt", None, 17)) == "the line at byte 17 of 'a.txt'"
    assert repr(penstock.Line("a.gz", 3, None)) == "line 3 of 'a.gz'"


def test_no_file_stays_open(three: tuple[list[Path], list[str]]) -> None:
    paths, _ = three
    with feed_of("inline", penstock.lines(paths), tokens) as feed:
        epoch = iter(feed)
        next(epoch)
        opened = [os.readlink(link.path) for link in os.scandir("/proc/self/fd") if os.path.islink(link.path)]
        assert not set(opened) & set(map(str, paths))
        del epoch


def seen_open(line: str) -> bool:
    """Whether a text file is open in the worker while it works on a line."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return any(os.readlink(link).endswith(".txt") for link in links if os.path.islink(link))


@pytest.mark.parametrize("shuffle", [False, True])
def test_workers_have_no_file_open_while_they_load(three: tuple[list[Path], list[str]], shuffle: bool) -> None:
    """A file is open for as long as one block is read: loads may take any time."""
    with three[0][0].open():
        assert seen_open("")
    with feed_of("process", penstock.lines(three[0]), seen_open, shuffle=shuffle) as feed:
        assert not any(batch.any() for batch in feed)


def test_an_index_is_built_side_by_side_and_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_index, "SEGMENT_BYTES", 4096)
    write(tmp_path / "a.txt", 5000)
    here = machine.look()
    by: list[str] = []
    scan = line_index.Scanner.scan

    def noted(*given: Any) -> Any:
        by.append(threading.current_thread().name)
        return scan(*given)

    monkeypatch.setattr(line_index.Scanner, "scan", noted)
    orders = []
    for cores in (1, 4):
        by.clear()
        monkeypatch.setattr(machine, "look", lambda cores=cores: dataclasses.replace(here, cores=cores))
        with feed_of("inline", penstock.lines(tmp_path / "a.txt"), shuffle=True, seed=3) as feed:
            orders.append(texts(feed))
        helpers = {name for name in by if name.startswith("penstock-lines")}
        assert len(by) > 10
        assert bool(helpers) == (cores > 1)
        assert len(helpers) <= cores
    assert orders[0] == orders[1]


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_long_line_of_a_compressed_file_that_finds_no_room_is_an_error(tmp_path: Path, on_error: Any) -> None:
    """Its text travels; a task that finds no room for it is not taken to pieces, which it does not have."""
    path = tmp_path / "late.txt.gz"
    path.write_bytes(gzip.compress(b"short\n" * 1000 + b"h" * 5_000_000 + b"\n" + b"short\n" * 1000))
    with (
        Feed(penstock.lines(path), batch_size=64, memory="64 MiB", num_workers=2, on_error=on_error) as feed,
        pytest.raises(PenstockError, match=r"MemoryError|the texts of a batch"),
    ):
        for _ in feed:
            pass
    with Feed(penstock.lines(path), batch_size=64, memory="256 MiB", num_workers=2) as feed:
        assert sum(len(batch) for batch in feed) == 2001
