"""Every door passes the same suite, ``penstock.testing.DeviceSuite``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock import HostDevice
from penstock.testing import DeviceSuite

ROOT = Path(__file__).parents[2]


class TestNumpy(DeviceSuite):
    to = "numpy"
    copies = False


class TestTorch(DeviceSuite):
    """On the CPU tensors share the slot's memory."""

    to = "torch"
    copies = False

    @pytest.fixture(autouse=True)
    def _there(self) -> None:
        pytest.importorskip("torch", reason="torch is not installed")


class TestTorchCopying(TestTorch):
    """The code of any other torch device, but for stream, event and page-locking: those need CUDA."""

    copies = True

    @property
    def to(self) -> Any:  # type: ignore[override]
        import penstock.torch

        return penstock.torch.device("cpu")


class TestMyOwn(DeviceSuite):
    """A third party's device is given as an object."""

    to = HostDevice("mine")


@pytest.mark.parametrize(
    "suite",
    [
        "TestJax",
        "TestTinygradCL",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("TestJaxSharded", "TestTinygradCPU")),
    ],
)
def test_a_door_passes_the_suite(suite: str) -> None:
    """In a process of its own, as these frameworks start threads and keep them."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/frameworks/suites.py::{suite}"],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0 and not re.search(r"\d+ passed", done.stdout):
        reason = re.search(r"SKIPPED \[\d+\] \S+ (.*)", done.stdout)
        pytest.skip(reason[1] if reason else done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
