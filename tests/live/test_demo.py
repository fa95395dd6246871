"""``penstock demo`` as a user runs it: a process of its own, small sizes, every way to end."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.live.test_progress import on_terminal

DEMO = (sys.executable, "-m", "penstock", "demo", "--size", "60 MiB")


def demo(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*DEMO, "--folder", str(folder), *flags], check=False, capture_output=True, text=True)


@pytest.mark.parametrize(
    "flags",
    [
        ("--numpy",),
        pytest.param(("--numpy", "--workers", "0"), marks=pytest.mark.slow),
        pytest.param(("--numpy", "--workers", "2"), marks=pytest.mark.slow),
        (),
    ],
)
def test_it_trains_inside_the_budget_and_cleans_up(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """The first thing that a newcomer runs: it has to work, to be within its budget, and to leave nothing."""
    if not flags and find_spec("torch") is None:
        pytest.skip("torch is not installed")
    done = demo(tmp_path, "--epochs", "6", *flags)
    assert (done.returncode, done.stderr) == (0, "")
    assert "320 images of 10 classes, 60 MiB" in done.stdout
    assert "def load(path" in done.stdout
    assert "slots" in done.stdout, "the plan is shown"
    assert "epoch 6 of 6:" in done.stdout
    assert ("torch" if not flags else "NumPy") in done.stdout
    accuracy = re.search(r"accuracy +([\d.]+)% of 64 images", done.stdout)
    assert accuracy, done.stdout
    assert float(accuracy[1]) > 90
    share = re.search(r"memory .* at most, (\d+)% of the budget", done.stdout)
    assert share, done.stdout
    assert int(share[1]) <= 100
    assert not list(tmp_path.iterdir())


def test_keep_leaves_the_files_and_says_where(tmp_path: Path) -> None:
    """Who wants to look at the files has to find them."""
    done = demo(tmp_path, "--numpy", "--keep", "--epochs", "1")
    assert done.returncode == 0, done.stderr
    (kept,) = tmp_path.iterdir()
    assert f"kept in {kept}" in done.stdout
    assert len(list(kept.glob("*.npy"))) == 320


def test_a_terminal_gets_the_live_line(tmp_path: Path) -> None:
    """The line is what the demo is there to show."""
    _, screen, code = on_terminal(*DEMO, "--folder", str(tmp_path), "--numpy")
    assert code == 0, screen
    assert "writing files:" in screen
    assert re.search(r"epoch 1: 100%.* 8/8 batches \[.* samples/s, waiting \d+%", screen), screen


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_cleans_up(tmp_path: Path, number: signal.Signals) -> None:
    """Hundreds of MiB in a temporary folder must not stay because someone lost patience."""
    command = [*DEMO, "--folder", str(tmp_path), "--numpy", "--epochs", "100000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout
        assert any(line.startswith("epoch 1 of") for line in child.stdout)
        assert list(tmp_path.iterdir())
        child.send_signal(number)
        _, errors = child.communicate()
    assert child.returncode == 130
    assert "Traceback" not in errors
    assert not list(tmp_path.iterdir())


def test_a_budget_that_is_too_small_is_one_line(tmp_path: Path) -> None:
    """The refusal names what would work; a traceback would hide it."""
    done = demo(tmp_path, "--numpy", "--memory", "1 MiB")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert "1 MiB" in done.stderr
    assert not list(tmp_path.iterdir())


def test_files_that_do_not_fit_on_the_disk_are_not_begun(tmp_path: Path) -> None:
    """A full disk hurts more than the demo is worth."""
    done = demo(tmp_path, "--numpy", "--size", "900000 TiB")
    assert done.returncode == 1
    assert re.search("do not fit.*--size", done.stderr), done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--memory", "lots"), "not a size"),
        (("--epochs", "0"), "at least 1"),
        (("--workers", "-1"), "at least 0"),
        (("--folder", "does/not/exist"), "no folder"),
    ],
)
def test_wrong_usage_is_told_before_anything_is_written(tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    """A mistake in a flag should not cost the time to write the files."""
    done = demo(tmp_path, *flags)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
