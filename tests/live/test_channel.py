"""The socket between two processes, when one of them goes."""

from __future__ import annotations

import sys

import pytest

if sys.platform != "linux":
    pytest.skip("these sockets are Linux's", allow_module_level=True)

from penstock._core.channel import SMALL, pair


@pytest.mark.parametrize("size", [10, SMALL + 1])
@pytest.mark.parametrize("wait", [True, False])
def test_what_was_said_before_the_end_arrives_though_something_was_left_unread(size: int, wait: bool) -> None:
    """The kernel tells of the unread message first; taken for the end, the reason of a death would be lost."""
    here, there = pair()
    here.send(b"never read")
    there.send(b"x" * size)
    there.send(b"y" * size)
    there.close()
    assert here.receive(wait=wait) == b"x" * size
    assert here.receive(wait=wait) == b"y" * size
    assert here.receive(wait=wait) == b""
    here.close()
