"""Pictures to arrays of one size: JPEG by libjpeg-turbo at a reduced scale, everything else by Pillow, sized by OpenCV.

Runs where the work is done. Which library does what was decided by measuring (docs/sources.md has the command): the
decoders take the same time, but scaling in Pillow takes as long as decoding and in OpenCV an eighth of it, and of the
decoders only simplejpeg says when data was damaged. Whatever it refuses is tried by Pillow, which has the last word on
whether a file is a picture; OpenCV would fill up with grey.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any, Final, Literal

import numpy as np

from penstock._core.errors import shown
from penstock._core.library import library
from penstock._core.spec import Array

__all__ = ["Decoder", "Fit"]

Fit = Literal["stretch", "crop", "pad"]

_JPEG: Final = b"\xff\xd8\xff"
_EXIF: Final = b"Exif\0\0"
_NO_MEMORY: Final = "nsufficient memory"  # as libjpeg says it
# Kinds of segments. A frame tells the size; those of the same range that are none hold tables.
_APP1: Final = 0xE1
_IN_XMP: Final = b"tiff:Orientation"
_SCAN: Final = 0xDA
_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_ORIENTATION: Final = 0x0112
_REDUCTIONS: Final = (8, 4, 2)  # those that libjpeg-turbo has quick code for: 5/8 takes longer than 8/8


class Decoder:
    """Makes an RGB array of a picture: ``decoder(path)``, or ``decoder.into(path, out)`` into memory that is there.

    What a picture looks like on a screen is what is decoded: turned as its EXIF orientation says.
    """

    def __init__(self, size: tuple[int, int], *, fit: Fit = "stretch", antialias: bool = False) -> None:
        self.size = size
        """Height and width."""
        self.fit = fit
        self.antialias = antialias
        self._cv2 = library("cv2", "opencv-python-headless", extra="images")
        self._simplejpeg = library("simplejpeg", "simplejpeg", extra="images")
        self._pil = library("PIL.Image", "pillow", extra="images")

    def __reduce__(self) -> tuple[Any, ...]:
        # Made anew where it arrives: in the template process, so that workers share what is imported.
        return _made, (self.size, self.fit, self.antialias)

    def __call__(self, path: str | os.PathLike[str]) -> Array:
        """The picture in a file."""
        out = np.empty((*self.size, 3), np.uint8)
        self.into(path, out)
        return out

    def into(self, path: str | os.PathLike[str], out: Array) -> None:
        """The same, written into ``out``."""
        with open(path, "rb", buffering=0) as file:
            data = file.read()
        self.bytes_into(data, out, path)

    def bytes_into(self, data: bytes, out: Array, path: object = None) -> None:
        """Decode what a file holds; ``path`` is for the error."""
        if not data:
            raise ValueError(f"{shown(path)} is empty")
        decoded = self._jpeg(data) if data.startswith(_JPEG) else None
        picture, orientation = self._any(data, path) if decoded is None else decoded
        self._fitted(picture, orientation, out)

    # ---- decoding

    def _jpeg(self, data: bytes) -> tuple[Array, int] | None:
        """The pixels and how they are to be turned; None if this is not an ordinary JPEG without fault."""
        form = _form(data)
        if form is None:
            return None
        height, width, turns = form
        if self._pil.MAX_IMAGE_PIXELS and height * width > 2 * self._pil.MAX_IMAGE_PIXELS:
            return None  # what Pillow refuses of other kinds, it is to refuse here
        orientation = 1
        if turns:
            try:
                orientation = _turn(self._pil.open(io.BytesIO(data)))
            except (OSError, ValueError, SyntaxError):
                return None
        try:
            by = self._reduction(height, width, orientation)
            least = {"min_height": -(-height // by), "min_width": -(-width // by)} if by > 1 else {}
            picture: Array = self._simplejpeg.decode_jpeg(data, **least)
        except ValueError as error:  # damaged, or only odd: Pillow decides
            if _NO_MEMORY in str(error):  # of which it would say that the file is broken
                raise MemoryError(f"no memory for a picture of {width}x{height} pixels") from error
            return None
        return picture, orientation

    def _any(self, data: bytes, path: object) -> tuple[Array, int]:
        """The same for all that Pillow reads."""
        try:
            with self._pil.open(io.BytesIO(data)) as image:
                if image.format == "JPEG":
                    by = self._reduction(image.height, image.width, _turn(image))
                    image.draft(None, (-(-image.width // by), -(-image.height // by)))
                image.load()  # before it is asked how it is to be turned: a TIFF is turned by this, and says so
                return self._rgb(image), _turn(image)
        except self._pil.DecompressionBombError:
            raise
        except (OSError, ValueError, SyntaxError, EOFError) as error:  # of a BytesIO, whose name helps nobody
            said = "it is no picture that Pillow knows" if "BytesIO" in str(error) else str(error)
            raise ValueError(f"{shown(path)} cannot be decoded: {said}") from error

    def _rgb(self, image: Any) -> Array:
        # Sixteen bits of grey, which convert() would cut off at 255; those of a PGM, Pillow keeps in 32.
        if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
            grey = (np.asarray(image) >> 8).astype(np.uint8)
            return np.repeat(grey[:, :, None], 3, axis=2)
        if image.mode in ("I", "F"):
            raise ValueError(
                f"its mode is {image.mode!r}, numbers of no known range: save it with 8 or 16 bits a pixel"
            )
        return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))

    def _reduction(self, height: int, width: int, orientation: int) -> int:
        """By how much a picture may be made smaller while it is decoded, so that it is still large enough."""
        ratio = 1 / self._scale(height, width, orientation)
        return next((by for by in _REDUCTIONS if by <= ratio), 1)

    def _scale(self, height: int, width: int, orientation: int) -> float:
        high, wide = self.size if orientation < 5 else self.size[::-1]
        each = high / height, wide / width
        return min(each) if self.fit == "pad" else max(each)

    # ---- sizing

    def _fitted(self, picture: Array, orientation: int, out: Array) -> None:
        high, wide = self.size if orientation < 5 else self.size[::-1]
        height, width = picture.shape[:2]
        if self.fit == "crop":
            scale = self._scale(height, width, orientation)
            tall, broad = max(1, min(height, round(high / scale))), max(1, min(width, round(wide / scale)))
            top, left = (height - tall) // 2, (width - broad) // 2
            picture = picture[top : top + tall, left : left + broad]
        elif self.fit == "pad":
            scale = self._scale(height, width, orientation)
            high, wide = max(1, min(high, round(height * scale))), max(1, min(wide, round(width * scale)))
        if orientation == 1 and out.shape[:2] == (high, wide):
            self._resized(picture, high, wide, out)
            return
        turned = _TURNS[orientation](self._resized(picture, high, wide, None))
        top, left = (out.shape[0] - turned.shape[0]) // 2, (out.shape[1] - turned.shape[1]) // 2
        if turned.shape != out.shape:
            out[...] = 0
        out[top : top + turned.shape[0], left : left + turned.shape[1]] = turned

    def _resized(self, picture: Array, high: int, wide: int, out: Array | None) -> Array:
        cv2 = self._cv2
        if picture.shape[:2] == (high, wide):
            if out is None:
                return picture
            out[...] = picture
            return out
        smaller = self.antialias and high <= picture.shape[0] and wide <= picture.shape[1]
        how = cv2.INTER_AREA if smaller else cv2.INTER_LINEAR
        made: Array = cv2.resize(picture, (wide, high), dst=out, interpolation=how)
        if out is not None and made is not out and not np.shares_memory(made, out):
            out[...] = made
        return made


def _made(size: tuple[int, int], fit: Fit, antialias: bool) -> Decoder:
    return Decoder(size, fit=fit, antialias=antialias)


def _form(data: bytes) -> tuple[int, int, bool] | None:
    """Height, width, and whether it may say how it is to be turned: in EXIF, or in XMP as far as Pillow looks there.

    None of a JPEG that is not in RGB or grey, or is odd in any way. From segment to segment up to the picture data:
    looking for such words in all of it takes as long as reading the file.
    """
    height = width = 0
    turns = False
    at = 2
    try:
        while data[at] == 0xFF and (kind := data[at + 1]) != _SCAN:
            if kind == 0xFF:  # one of any number that may stand before a segment
                at += 1
                continue
            if kind in _FRAMES:
                height, width = data[at + 5] << 8 | data[at + 6], data[at + 7] << 8 | data[at + 8]
                if data[at + 9] not in (1, 3):
                    return None
            size = data[at + 2] << 8 | data[at + 3]
            if kind == _APP1 and (data.startswith(_EXIF, at + 4) or data.find(_IN_XMP, at, at + size) >= 0):
                turns = True
            at += 2 + size
        odd = data[at] != 0xFF
    except IndexError:  # it ends here
        return None
    return None if odd or not height or not width else (height, width, turns)


def _turn(image: Any) -> int:
    orientation = image.getexif().get(_ORIENTATION, 1)
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1


_TURNS: Final[dict[int, Callable[[Array], Array]]] = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: np.rot90,
}
