"""Where a worker is stuck: one file in memory, with room for each worker, into which it writes its stack when asked.

``Stacks`` is for the parent, ``write_when_asked`` for workers. A signal asks; ``faulthandler`` answers from within the
signal's handler, in C, so that a worker answers also when it waits in C code or holds the GIL for ever. Linux only.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from typing import Final

__all__ = ["ASK", "Stacks", "leave_words", "users_part", "write_when_asked"]

# One that no program uses by accident; those below and SIGUSR1 are taken by debuggers and thread libraries.
ASK: Final = signal.SIGRTMIN + 5 if hasattr(signal, "SIGRTMIN") else 0
ROOM_BYTES: Final = 1 << 16  # a hundred frames, which is where faulthandler stops, several times
WORDS_BYTES: Final = 400
_WORDS: Final = b"!"  # no line of a stack begins with it


class Stacks:
    """What workers wrote."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("penstock-stacks", os.MFD_CLOEXEC)

    def read(self, worker: int) -> str:
        """What a worker wrote since this was last asked; "" if it did not."""
        start = worker * ROOM_BYTES
        data = os.pread(self.fd, ROOM_BYTES, start)
        if text := data.strip(b"\0"):
            os.pwrite(self.fd, bytes(len(data.rstrip(b"\0"))), start)
        lines = text.decode("utf-8", "backslashreplace").splitlines()
        return users_part([line for line in reversed(lines) if line.startswith("  File")])

    def words(self, worker: int) -> str:
        """What a worker said when it left of its own accord; "" if it said nothing."""
        start = worker * ROOM_BYTES
        data = os.pread(self.fd, WORDS_BYTES + 1, start)
        if not data.startswith(_WORDS):
            return ""
        os.pwrite(self.fd, bytes(len(data)), start)
        return data[1:].strip(b"\0").decode("utf-8", "backslashreplace")

    def close(self) -> None:
        """Forget them."""
        os.close(self.fd)


def write_when_asked(fd: int, worker: int) -> None:
    """Have this process answer when it is asked where it is."""
    # Opened anew, for a place of its own in the file.
    try:
        mine = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:  # there is no /proc here: asked, it says nothing, which is better than to die of the question
        signal.signal(ASK, signal.SIG_IGN)
        return
    os.lseek(mine, worker * ROOM_BYTES, os.SEEK_SET)
    faulthandler.register(ASK, file=mine, all_threads=False)


def leave_words(fd: int, worker: int, text: str) -> None:
    """Say why this process leaves, for whoever finds that it is gone."""
    data = (_WORDS + text.encode("utf-8", "backslashreplace"))[: WORDS_BYTES + 1]
    os.pwrite(fd, data.ljust(WORDS_BYTES + 1, b"\0"), worker * ROOM_BYTES)


def users_part(frames: list[str]) -> str:
    """What of a stack, the innermost call last, is not our own way to the user's load; all of it if it is all ours."""
    ours = [place for place, frame in enumerate(frames) if f'"{_OURS}' in frame]
    return "\n".join(frames[ours[-1] + 1 :] if ours and ours[-1] + 1 < len(frames) else frames)


_OURS: Final = os.path.dirname(os.path.abspath(__file__)) + os.sep
