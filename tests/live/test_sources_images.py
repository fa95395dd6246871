"""Pictures: what Pillow would show, in the size that was asked for, of whatever kind the file is."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import LoadError, SpecError
from tests.live.crews import batches, feed_of

WHY = 'pictures need pip install "penstock[images]"'
Image: Any = pytest.importorskip("PIL.Image", reason=WHY)
ImageOps: Any = pytest.importorskip("PIL.ImageOps", reason=WHY)
pytest.importorskip("simplejpeg", reason=WHY)
pytest.importorskip("cv2", reason=WHY)

HIGH, WIDE = 40, 56


def picture(seed: int, high: int = HIGH, wide: int = WIDE) -> Any:
    """Something smooth that looks different from each side."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((wide, high), Image.Resampling.BICUBIC)


def shown(path: Path) -> Any:
    """What Pillow makes of a file: turned as it says, in RGB."""
    with Image.open(path) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


def only(path: Path, size: tuple[int, int], **options: Any) -> Any:
    """The one picture, as a feed gives it."""
    (batch,) = batches("inline", penstock.images([path], size, **options))
    return batch[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(12):
        below = tmp_path / ["cats", "dogs", "eels"][number % 3]
        below.mkdir(exist_ok=True)
        picture(number).save(below / f"{number:02}.{'jpg' if number % 2 else 'png'}", quality=90)
    (tmp_path / "cats" / "notes.txt").write_text("not a picture")
    return tmp_path


@pytest.mark.parametrize("crew", ["inline", "thread", "process"])
def test_a_folder_of_classes_gives_what_pillow_gives_with_labels(crew: str, folder: Path) -> None:
    source = penstock.images(folder, (HIGH, WIDE))
    assert source.classes == ("cats", "dogs", "eels")
    assert len(source) == 12
    for shuffle in (False, True):
        place = {path: index for index, path in enumerate(source.paths)}
        wanted = {shown(Path(path)).tobytes(): path for path in source.paths}
        order = []
        with feed_of(crew, source, shuffle=shuffle) as feed:
            for pictures, labels in feed:
                for image, label in zip(pictures, labels, strict=True):
                    path = wanted[image.tobytes()]
                    assert Path(path).parent.name == source.classes[label]
                    order.append(place[path])
        assert sorted(order) == list(range(12))
        assert (order == list(range(12))) == (not shuffle)


def test_shards_and_a_resumed_epoch_have_each_picture_once(folder: Path) -> None:
    source = penstock.images(folder, 8, labels=range(12))
    seen: list[int] = []
    for rank in range(2):
        with feed_of("inline", source, shard=(rank, 2), batch_size=3, shuffle=True) as feed:
            seen += [int(y) for _, labels in feed for y in labels]
    assert sorted(seen) == list(range(12))
    with feed_of("inline", source, shuffle=True, batch_size=5) as feed:
        first = [int(y) for _, labels in itertools.islice(feed, 1) for y in labels]
        state = json.loads(json.dumps(feed.state_dict()))
    with feed_of("process", penstock.images(folder, 8, labels=range(12)), shuffle=True, batch_size=5) as feed:
        feed.load_state_dict(state)
        rest = [int(y) for _, labels in feed for y in labels]
    assert sorted(first + rest) == list(range(12))


def test_a_flat_folder_and_a_list_of_files_have_no_labels(folder: Path) -> None:
    cats = penstock.images(folder / "cats", 8)
    assert (cats.labels, cats.classes, len(cats)) == (None, (), 4)
    assert penstock.images(folder, 8, labels=False).labels is None
    assert str(penstock.images([folder / "cats" / "00.png"], (4, 6)).spec()) == "uint8[4, 6, 3]"


def test_what_is_hidden_is_no_class(folder: Path) -> None:
    """A notebook leaves folders behind, which would shift every label."""
    hidden = folder / ".ipynb_checkpoints"
    hidden.mkdir()
    picture(0).save(hidden / "a.png")
    source = penstock.images(folder, 8, labels=True)
    assert (source.classes, len(source)) == (("cats", "dogs", "eels"), 12)


def test_pictures_beside_folders_of_classes_are_told(folder: Path, recwarn: pytest.WarningsRecorder) -> None:
    """Without a word, a batch would have lost its labels because of one stray file."""
    picture(0).save(folder / "stray.png")
    with pytest.warns(UserWarning, match=r"1 of the 13 pictures in .*\('stray\.png'\).*no labels.*labels=False"):
        assert penstock.images(folder, 8).classes == ()
    recwarn.clear()
    assert len(penstock.images(folder, 8, labels=False)) == 13
    assert len(penstock.images(folder, 8, labels=range(13))) == 13
    assert not recwarn.list


def test_a_link_that_leads_back_is_refused_by_name(folder: Path) -> None:
    (folder / "cats" / "itself").symlink_to("itself")
    assert len(penstock.images(folder, 8)) == 12
    (folder / "dogs" / "back").symlink_to(folder)
    with pytest.raises(SpecError, match=r"dogs/back' leads back to a folder above it.*list of files"):
        penstock.images(folder, 8)


@pytest.mark.parametrize(("wide", "high", "size"), [(1, 1, (100, 20)), (3000, 1, (100, 20)), (12, 10, (300, 7))])
def test_a_crop_of_any_shape_keeps_a_pixel(wide: int, high: int, size: tuple[int, int], tmp_path: Path) -> None:
    Image.new("RGB", (wide, high), (9, 8, 7)).save(tmp_path / "a.png")
    assert (only(tmp_path / "a.png", size, fit="crop") == (9, 8, 7)).all()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["jpg", "png", "tif"])
def test_a_picture_is_turned_as_its_exif_says(orientation: int, kind: str, tmp_path: Path) -> None:
    """Photos of telephones lie on their side otherwise."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"turned.{kind}"
    picture(1, 48, 80).save(path, exif=exif, quality=95)
    expected = shown(path)
    high, wide = expected.shape[:2]
    assert (high, wide) == ((48, 80) if orientation < 5 else (80, 48))
    np.testing.assert_array_equal(only(path, (high, wide)), expected)
    for fit in ("crop", "pad", "stretch"):
        came = only(path, (32, 24), fit=fit).astype(int)
        with Image.open(path) as image:
            plain = ImageOps.exif_transpose(image)
            if fit == "stretch":
                like = plain.resize((24, 32), Image.Resampling.BILINEAR)
            elif fit == "crop":
                like = ImageOps.fit(plain, (24, 32), Image.Resampling.BILINEAR)
            else:
                like = ImageOps.pad(plain, (24, 32), Image.Resampling.BILINEAR)
        assert np.abs(came - np.asarray(like)).mean() < 6, fit


@pytest.mark.parametrize(
    "before",
    [b"\xff\xfe\x00\x06Exif", b"\xff\xff\xff\xfe\x00\x02", (b"\xff\xe2\xff\xff" + bytes(65533)) * 3],
    ids=["a comment that looks like it", "fill bytes", "three large segments"],
)
def test_exif_is_found_behind_other_segments_of_a_jpeg(before: bytes, tmp_path: Path) -> None:
    """Cameras write their profiles and previews where they like."""
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "turned.jpg"
    picture(1, 48, 80).save(path, exif=exif, quality=95)
    data = path.read_bytes()
    at = data.index(b"\xff\xe1")
    path.write_bytes(data[:at] + before + data[at:])
    expected = shown(path)
    assert expected.shape == (80, 48, 3)
    np.testing.assert_array_equal(only(path, (80, 48)), expected)


def test_bytes_in_a_picture_that_look_like_exif_do_not_turn_it(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    picture(1, 48, 80).save(
        path, quality=95, comment=b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0"
    )
    np.testing.assert_array_equal(only(path, (48, 80)), shown(path))


def test_a_turn_is_found_in_xmp_where_pillow_finds_it(tmp_path: Path) -> None:
    """With or without EXIF that says nothing of it."""
    data = b'http://ns.adobe.com/xap/1.0/\0<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    path = tmp_path / "a.jpg"
    picture(1, 48, 80).save(path, quality=95)
    plain = path.read_bytes()
    path.write_bytes(plain[:2] + b"\xff\xe1" + (len(data) + 2).to_bytes(2, "big") + data + plain[2:])
    expected = shown(path)
    assert expected.shape == (80, 48, 3)
    np.testing.assert_array_equal(only(path, (80, 48)), expected)


@pytest.mark.parametrize("turned", [False, True])
def test_what_pillow_takes_for_a_bomb_is_one_with_and_without_exif(
    turned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exif = Image.Exif()
    if turned:
        exif[0x0112] = 6
    picture(1, 48, 80).save(tmp_path / "a.jpg", exif=exif)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(LoadError, match="decompression bomb"):
        only(tmp_path / "a.jpg", (48, 80))


def test_a_jpeg_that_finds_no_memory_is_not_called_broken(tmp_path: Path) -> None:
    """It would be left out as such, though it is right."""
    picture(1, 40, 50).save(tmp_path / "0.jpg")
    Image.new("RGB", (6000, 4000), (9, 99, 199)).save(tmp_path / "1.jpg", progressive=True)
    source = penstock.images([tmp_path / "0.jpg"] * 20 + [tmp_path / "1.jpg"], (20, 20))
    with pytest.raises(LoadError, match="MemoryError: no memory for a picture of 6000x4000 pixels"):
        batches("process", source, memory="100 MiB", num_workers=2)


MODES = {
    "grey": lambda: picture(2).convert("L"),
    "one bit": lambda: picture(2).convert("1"),
    "palette": lambda: picture(2).convert("P"),
    "grey with alpha": lambda: picture(2).convert("LA"),
    "with alpha": lambda: picture(2).convert("RGBA"),
}


@pytest.mark.parametrize("mode", MODES)
def test_pictures_of_every_mode_come_in_rgb(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    MODES[mode]().save(path)
    np.testing.assert_array_equal(only(path, (HIGH, WIDE)), shown(path))


@pytest.mark.parametrize("options", [{"mode": "L"}, {"mode": "CMYK"}, {"progressive": True}, {"subsampling": 0}])
def test_jpegs_of_every_kind_come_in_rgb(options: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    picture(3).convert(options.pop("mode", "RGB")).save(path, **options)
    np.testing.assert_array_equal(only(path, (HIGH, WIDE)), shown(path))


def test_sixteen_bits_of_grey_keep_their_range(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, HIGH * WIDE).astype(np.uint16).reshape(HIGH, WIDE)
    for name in ("a.png", "a.pgm", "a.tif"):
        Image.fromarray(ramp).save(tmp_path / name)
        came = only(tmp_path / name, (HIGH, WIDE))
        np.testing.assert_array_equal(came, np.repeat((ramp >> 8).astype(np.uint8)[:, :, None], 3, axis=2))


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("size", [(30, 30), (100, 90), (17, 400), (224, 224)])
def test_a_large_jpeg_at_a_reduced_scale_looks_like_the_whole(
    size: tuple[int, int], antialias: bool, tmp_path: Path
) -> None:
    path = tmp_path / "a.jpg"
    picture(4, 480, 640).save(path, quality=95)
    came = only(path, size, antialias=antialias).astype(int)
    with Image.open(path) as image:
        like = np.asarray(image.resize(size[::-1], Image.Resampling.BILINEAR)).astype(int)
    assert np.abs(came - like).mean() < 3


def test_a_feed_may_cast_pictures(folder: Path) -> None:
    source = penstock.images(folder / "cats", (HIGH, WIDE))
    (batch,) = batches("process", source, cast="float16")
    np.testing.assert_array_equal(batch[0], shown(Path(source.paths[0])).astype(np.float16))


def _damaged(folder: Path) -> dict[str, Path]:
    whole = io.BytesIO()
    picture(5, 200, 200).save(whole, "JPEG", quality=95)
    data = whole.getvalue()
    cuts = {
        "cut": data[: len(data) // 2],
        "no end": data[:-60],
        "empty": b"",
        "text": b"this is no picture",
        "overwritten": data[:2000] + b"\0\x12\xff\x33" * 40 + data[2160:],
        "header": data[:200],
    }
    made = {}
    for name, content in cuts.items():
        made[name] = folder / f"{name}.jpg"
        made[name].write_bytes(content)
    return made


@pytest.mark.parametrize("crew", ["inline", "process"])
def test_damaged_pictures_fail_by_name_and_can_be_skipped(crew: str, folder: Path) -> None:
    """A decoder that fills up with grey would train on it without a word."""
    bad = _damaged(folder / "dogs")
    gone = folder / "eels" / "gone.jpg"
    gone.write_bytes(b"")
    source = penstock.images(folder, 32)
    gone.unlink()
    with feed_of(crew, source, on_error="skip", shuffle=True) as feed:
        assert sum(len(labels) for _, labels in feed) == 12
        assert {item for item, _ in feed.stats.skipped} == {str(gone), *map(str, bad.values())}
    with pytest.raises(LoadError, match=r"load failed for '.*cut\.jpg'") as caught:
        batches(crew, penstock.images([bad["cut"]], 32))
    assert caught.value.item == str(bad["cut"])
    with pytest.raises(LoadError, match=r"text\.jpg.*no picture that Pillow knows"):
        batches(crew, penstock.images([bad["text"]], 32))


def test_a_jpeg_that_is_odd_but_whole_is_read(tmp_path: Path) -> None:
    """Real collections have many with a byte too much; Pillow reads them, and so must this."""
    data = io.BytesIO()
    picture(6).save(data, "JPEG")
    (tmp_path / "a.jpg").write_bytes(data.getvalue()[:-2] + b"\x12\xff\xd9" + b"junk behind the end")
    np.testing.assert_array_equal(only(tmp_path / "a.jpg", (HIGH, WIDE)), shown(tmp_path / "a.jpg"))


def test_arguments_that_cannot_be_meant_are_refused(folder: Path) -> None:
    (folder / "loose.png").write_bytes((folder / "cats" / "00.png").read_bytes())
    empty = folder / "empty"
    empty.mkdir()
    wrong: Any = "big"
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: penstock.images(empty), SpecError, r"holds no picture: files that end in \.jpg"),
        (lambda: penstock.images(folder / "nowhere"), FileNotFoundError, "is not a folder"),
        (lambda: penstock.images([]), SpecError, "empty list"),
        (lambda: penstock.images(folder, labels=True), SpecError, "1 pictures outside of any subfolder.*loose"),
        (lambda: penstock.images(["a"], labels=True), SpecError, "list of files: give a label for each"),
        (lambda: penstock.images(["a"], labels=[1, 2]), SpecError, "there are 1 pictures: give one int"),
        (lambda: penstock.images(["a"], (0, 3)), ValueError, "at least 1 pixel"),
        (lambda: penstock.images(["a"], wrong), TypeError, r"must be \(height, width\)"),
        (lambda: penstock.images(["a"], fit=wrong), ValueError, "fit='big' is not known"),
    ]
    for call, kind, message in cases:
        with pytest.raises(kind, match=message):
            call()
