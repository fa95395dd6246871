"""Ranks as the frameworks know them: real process groups."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TORCH = """
import sys
import torch.distributed as dist
from penstock import Feed
import numpy as np

rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
with Feed(range(9), np.int64, batch_size=2, shard="auto", num_workers=0, memory="64 MiB") as feed:
    print([item for batch in feed for item in batch.tolist()], feed.state_dict()["world"])
dist.destroy_process_group()
"""

JAX = """
import sys
import jax
import numpy as np
from penstock import Feed

with Feed(range(4), np.int64, batch_size=2, shard="auto", num_workers=0, memory="64 MiB") as feed:
    assert feed.state_dict()["world"] == 1  # imported, and told of nobody else
rank, world, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
jax.distributed.initialize(f"127.0.0.1:{port}", world, rank)
with Feed(range(9), np.int64, batch_size=2, shard="auto", num_workers=0, memory="64 MiB") as feed:
    print([item for batch in feed for item in batch.tolist()], feed.state_dict()["world"])
"""


def run(script: str, last: str) -> list[str]:
    ranks = [
        subprocess.Popen([sys.executable, "-c", script, str(rank), "2", last], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=100)[0].strip() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    return said


EXPECTED = ["[0, 2, 4, 6, 8] 2", "[1, 3, 5, 7, 0] 2"]


def test_torch_distributed_says_which_rank_this_is(tmp_path: Path) -> None:
    """A process group that is initialised counts more than the environment."""
    pytest.importorskip("torch", reason="torch is not installed")
    assert run(TORCH, str(tmp_path / "store")) == EXPECTED


def test_jax_says_which_rank_this_is() -> None:
    """The same for jax.distributed; JAX that is only imported is not started up for it."""
    pytest.importorskip("jax", reason="jax is not installed")
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    assert run(JAX, port) == EXPECTED
