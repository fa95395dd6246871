"""Files compressed with Zstandard: unpacked as a stream, with what their own structure says besides.

The library's stream does not tell a file that was cut short from one that is all there, and nobody asks before it takes
a window of up to 128 MiB. So the frames of a file are followed by their headers on the way to it, without being
unpacked. What a window may take, others decide. Runs in the parent.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Generator
from typing import IO, Any, Final

__all__ = ["ZstdFile", "first_window_bytes"]

SKIPPABLE: Final = bytes.fromhex("2a4d18")  # behind a byte from 0x50 to 0x5f
REPEATED: Final = 1  # a block of one byte, and how often it comes
CHECKSUM_BYTES: Final = 4
# Where the first frames are small, or hold no data at all, the windows of some more are known.
HEAD_BYTES: Final = 4096


class _Frames:
    """The bytes of a file, followed on their way: whether they end where a frame does, and the windows."""

    def __init__(self, file: IO[bytes], admit: Callable[[int], None]) -> None:
        self._file = file
        self._admit = admit
        self._inside = False
        self._head = b""
        self._walk: Generator[tuple[int, int], bytes, None] | None = self._structure()
        self._skip, self._need = next(self._walk)

    @property
    def whole(self) -> bool:
        """Whether what was read ends between two frames, as far as that can be told."""
        return self._walk is None or not (self._inside or self._head or self._skip)

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        at = 0
        while self._walk is not None and at < len(data):
            step = min(self._skip, len(data) - at)
            at, self._skip = at + step, self._skip - step
            piece = data[at : at + self._need - len(self._head)] if not self._skip else b""
            at, self._head = at + len(piece), self._head + piece
            if len(self._head) == self._need:
                head, self._head = self._head, b""
                try:
                    self._skip, self._need = self._walk.send(head)
                except StopIteration:
                    self._walk = None
        return data

    def _structure(self) -> Generator[tuple[int, int], bytes, None]:
        """Says how many bytes to leave out, and how many to give it then; ends where it does not know what comes."""
        import zstandard

        skip = 0
        while True:
            self._inside = False
            head = yield skip, 4
            self._inside = True
            if head[0] >> 4 == 5 and head[1:] == SKIPPABLE:
                skip = int.from_bytes((yield 0, 4), "little")
                continue
            if head != zstandard.FRAME_HEADER:
                return
            head += yield 0, 1
            head += yield 0, zstandard.frame_header_size(head) - len(head)
            try:
                frame = zstandard.get_frame_parameters(head)
            except zstandard.ZstdError:
                return
            self._admit(min(frame.window_size, frame.content_size))  # if it is not known, that is a huge number
            skip, last = 0, 0
            while not last:
                block = int.from_bytes((yield skip, 3), "little")
                last, kind, size = block & 1, block >> 1 & 3, block >> 3
                skip = 1 if kind == REPEATED else size
            skip += CHECKSUM_BYTES if frame.has_checksum else 0


class ZstdFile(io.RawIOBase):
    """What a file holds, unpacked; ``admit`` is told of each frame's window beforehand, and may raise."""

    def __init__(self, path: str, admit: Callable[[int], None]) -> None:
        import zstandard

        self._file = open(path, "rb")  # noqa: SIM115 - closed with this one
        self._frames = _Frames(self._file, admit)
        source: Any = self._frames  # all that is asked of it is to read
        self._reader: Any = zstandard.ZstdDecompressor().stream_reader(source, read_across_frames=True, closefd=False)

    def read(self, size: int = -1, /) -> bytes:
        data: bytes = self._reader.read(size)
        if not data and not self._frames.whole:
            raise EOFError("Compressed file ended before the end of its last frame")
        return data

    def close(self) -> None:
        self._reader.close()
        self._file.close()
        super().close()


def first_window_bytes(path: str) -> int:
    """The largest window of the first frames of a file; 0 if it cannot be read, which is told when it is unpacked."""
    windows = [0]
    try:
        with open(path, "rb") as file:
            _Frames(file, windows.append).read(HEAD_BYTES)
    except OSError:
        pass
    return max(windows)
