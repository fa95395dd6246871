"""Messages over a SOCK_SEQPACKET socket: whole or not at all, to exactly one of those who read.

Linux only. Small messages are one packet; a large one is written to a memfd whose descriptor travels in its
place, so that no item is too large and nothing is ever cut into pieces that a dead worker could leave half sent.
"""

from __future__ import annotations

import array
import errno
import os
import socket
from typing import Final

__all__ = ["Channel", "pair"]

SMALL: Final = 32 * 1024  # well below any socket's send buffer
_INLINE: Final = b"\x00"
_ATTACHED: Final = b"\x01"


class Channel:
    """One end of a seqpacket socket pair."""

    __slots__ = ("_buffer", "_now", "_rights", "_waiting", "socket")

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._buffer = bytearray(SMALL + 1)
        self._rights = socket.CMSG_SPACE(4)
        # As plain numbers: an or of two members of an enum takes longer than the call that gets it.
        self._waiting = int(socket.MSG_CMSG_CLOEXEC)
        self._now = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)

    def fileno(self) -> int:
        """The descriptor, for poll."""
        return self.socket.fileno()

    def send(self, data: bytes, *, wait: bool = True) -> None:
        """Send one message; BlockingIOError if the socket is full and it may not wait."""
        flags = 0 if wait else socket.MSG_DONTWAIT
        if len(data) <= SMALL:
            self.socket.sendmsg([_INLINE, data], [], flags)
            return
        fd = os.memfd_create("penstock-message", os.MFD_CLOEXEC)
        try:
            with open(fd, "wb", closefd=False) as file:
                file.write(data)
            self.socket.sendmsg([_ATTACHED], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))], flags)
        finally:
            os.close(fd)

    def receive(self, *, wait: bool = True) -> bytes:
        """The next message; b"" when the other end is closed; BlockingIOError if there is none and it may not wait."""
        # The flag, not the socket's mode: the mode belongs to the description that all workers share.
        flags = self._waiting if wait else self._now
        try:
            count, ancillary, _, _ = self.socket.recvmsg_into([self._buffer], self._rights, flags)
        except ConnectionResetError:
            # The other end went and left something unread, which the kernel tells first: what it said is still there.
            count, ancillary, _, _ = self.socket.recvmsg_into([self._buffer], self._rights, flags)
        if count == 0:
            return b""
        if self._buffer[0] == _INLINE[0]:
            return bytes(memoryview(self._buffer)[1:count])
        fd = _descriptor(ancillary)
        if fd is None:  # the kernel drops what there is no room for, and the message is lost
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        try:
            size = os.fstat(fd).st_size
            parts = []
            at = 0
            while at < size:
                parts.append(os.pread(fd, size - at, at))
                at += len(parts[-1])
            return b"".join(parts)
        finally:
            os.close(fd)

    def send_with_fd(self, data: bytes, fd: int | None = None) -> None:
        """Send a small message, together with a descriptor if there is one."""
        rights = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        self.socket.sendmsg([data], rights)

    def receive_with_fd(self) -> tuple[bytes, int | None]:
        """The next message of a ``send_with_fd``, and its descriptor if it has one."""
        data, ancillary, _, _ = self.socket.recvmsg(SMALL, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        return data, _descriptor(ancillary)

    def close(self) -> None:
        """Close this end."""
        self.socket.close()


def _descriptor(ancillary: list[tuple[int, int, bytes]]) -> int | None:
    fds = array.array("i", ancillary[0][2] if ancillary else b"")
    return fds[0] if fds else None


def pair() -> tuple[Channel, Channel]:
    """Two connected channels."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for sock in (one, other):
        # Tasks of all slots may be waiting at once; the kernel caps this at what it allows.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    return Channel(one), Channel(other)
