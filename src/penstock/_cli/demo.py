"""``penstock demo``: train a classifier from files that do not fit into the memory it is given.

Meant to be read as an example: ``load``, the two feeds in ``run`` and the loop in ``train`` are what a program of
one's own would have; the rest makes the files, fits the model and tells what happened. Runs in the
parent, except ``load``, which the workers call.
"""

from __future__ import annotations

import inspect
import shutil
import signal
import sys
import tempfile
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from penstock import Feed
from penstock._core.budget import format_bytes, parse_size

if TYPE_CHECKING:
    from numpy.typing import NDArray

CLASSES: Final = 10
SIDE: Final = 256  # pixels; an image is 192 KiB, so that a batch of 32 is a sensible part of a small budget
IMAGE_BYTES: Final = SIDE * SIDE * 3
GRID: Final = 16  # cells that an image is wide once it was shrunk; the models see only these
BATCH_SIZE: Final = 32
LEAST_FILES: Final = 50  # with fewer the held-out part would be without some of the classes


def load(path: Path) -> tuple[NDArray[np.uint8], int]:
    """One file to one sample: the image, and its class, which stands first in the file name."""
    return np.load(path), int(path.name.split("-")[0])


def add_arguments(parser: ArgumentParser) -> None:
    """What ``penstock demo`` understands."""
    parser.description = (
        "Writes image-like files several times larger than the memory budget, trains a small classifier from them\n"
        "inside it, and tells what was planned and what was really used. Takes under a minute and cleans up."
    )
    parser.add_argument("--memory", type=_size, default="128 MiB", help='the budget, such as "96 MiB" (%(default)s)')
    parser.add_argument("--epochs", type=_count(1), default=3, help="passes over the files (%(default)s)")
    parser.add_argument("--size", type=_size, default="600 MiB", help="of all files together (%(default)s)")
    parser.add_argument(
        "--workers", type=_count(0), default=None, help="processes that read; 0: none (the plan decides)"
    )
    parser.add_argument("--numpy", action="store_true", help="train with NumPy even where torch is installed")
    parser.add_argument("--folder", type=_folder, default=None, help="make the temporary folder in this one")
    parser.add_argument("--keep", action="store_true", help="leave the files there, and say where they are")


def run(args: Namespace) -> int:
    """The demo, from writing files to the last figure; the exit code of the command."""
    memory: int = args.memory
    model: Model = TorchModel() if find_spec("torch") and not args.numpy else NumpyModel()
    with _temporary_folder(args.folder, keep=args.keep) as folder:
        free_bytes = shutil.disk_usage(folder).free
        if free_bytes < args.size:
            need = f"{format_bytes(args.size)} of files do not fit into the {format_bytes(free_bytes)} free in {folder}"
            print(f"penstock demo: {need}; give a smaller --size or another --folder", file=sys.stderr)
            return 1
        files = write_files(folder, max(args.size // IMAGE_BYTES, LEAST_FILES))
        cut = len(files) * 4 // 5
        learn, held_out = files[:cut], files[cut:]
        all_bytes = len(files) * IMAGE_BYTES
        print(
            f"{len(files):,} images of {CLASSES} classes, {format_bytes(all_bytes)}: "
            f"{all_bytes / memory:.1f} times the budget of {format_bytes(memory)}\n\n"
            f"How one file is read:\n\n{inspect.getsource(load)}\n"
            f"Training {model.name}, within this plan:\n",
            flush=True,
        )

        with Feed(
            learn, load, batch_size=BATCH_SIZE, memory=memory, num_workers=args.workers, shuffle=True, to=model.to
        ) as feed:
            print(f"{feed.plan}\n", flush=True)
            started_s = monotonic()
            train(model, feed, epochs=args.epochs)
            wall_s = monotonic() - started_s

        # The second feed starts when the first is closed: the budget is for both.
        with Feed(held_out, load, batch_size=BATCH_SIZE, memory=memory, num_workers=args.workers, to=model.to) as test:
            right = sum(model.count_right(images, classes) for images, classes in test)

    used, peak_bytes = feed.stats, max(feed.stats.peak_bytes, test.stats.peak_bytes)
    print(
        "\nWhat it really took:\n\n"
        f"  memory    {format_bytes(peak_bytes)} at most, {peak_bytes / memory:.0%} of the budget\n"
        f"  waiting   {used.wait_s:.2f} s of {wall_s:.2f} s that training took, {used.wait_s / wall_s:.0%}\n"
        f"  speed     {used.samples / wall_s:,.0f} samples/s, {format_bytes(int(used.bytes / wall_s))}/s\n"
        f"  copies    {used.copied} of {used.batches} batches\n"
        f"  accuracy  {right / len(held_out):.1%} of {len(held_out):,} images that were held out"
    )
    return 0


def train(model: Model, feed: Feed, *, epochs: int) -> None:
    """Take ``epochs`` passes over the feed, with a live line in a terminal and a plain one after each."""
    for epoch in range(1, epochs + 1):
        right = seen = 0
        for images, classes in feed.progress(f"epoch {epoch}"):
            right += model.fit(images, classes)
            seen += len(classes)
        print(f"epoch {epoch} of {epochs}: {right / seen:.1%} right while learning", flush=True)


class Model(Protocol):
    """A classifier; ``to`` is what it wants its batches to be made of."""

    name: str
    to: str

    def fit(self, images: Any, classes: Any) -> int:
        """Learn from one batch; how many of it were classified right before that."""

    def count_right(self, images: Any, classes: Any) -> int:
        """How many of a batch are classified right."""


class NumpyModel:
    """Softmax regression on the mean colours of an image's cells."""

    name = "a softmax regression in NumPy"
    to = "numpy"

    def __init__(self) -> None:
        self._weights = np.zeros((GRID * GRID * 3, CLASSES), np.float32)
        self._bias = np.zeros(CLASSES, np.float32)

    def fit(self, images: NDArray[np.uint8], classes: NDArray[np.int64]) -> int:
        cells = self._cells(images)
        scores = cells @ self._weights + self._bias
        chances = np.exp(scores - scores.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        error = (chances - np.eye(CLASSES, dtype=np.float32)[classes]) / len(classes)
        self._weights -= 0.002 * (cells.T @ error)
        self._bias -= 0.002 * error.sum(axis=0)
        return int((scores.argmax(axis=1) == classes).sum())

    def count_right(self, images: NDArray[np.uint8], classes: NDArray[np.int64]) -> int:
        scores = self._cells(images) @ self._weights + self._bias
        return int((scores.argmax(axis=1) == classes).sum())

    def _cells(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        cell = SIDE // GRID
        rows = images.reshape(-1, GRID, cell, GRID, cell, 3).sum(axis=2, dtype=np.uint16)
        # One axis after the other: numpy takes ten times as long for a mean over both at once.
        means: NDArray[np.float32] = rows.sum(axis=3, dtype=np.float32) / np.float32(cell * cell)
        return (means.reshape(len(images), -1) - np.float32(128)) / np.float32(32)


class TorchModel:
    """A small convolutional network on the mean colours of an image's cells."""

    name = "a small convolutional network in torch"
    to = "torch"

    def __init__(self) -> None:
        import torch
        from torch import nn

        torch.manual_seed(0)
        self._torch = torch
        self._net = nn.Sequential(
            nn.Conv2d(3, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.AvgPool2d(4),
            nn.Flatten(),
            nn.Linear(32 * (GRID // 4) ** 2, CLASSES),
        )
        self._optimizer = torch.optim.Adam(self._net.parameters(), lr=5e-3)

    def fit(self, images: Any, classes: Any) -> int:
        scores = self._net(self._cells(images))
        self._optimizer.zero_grad()
        self._torch.nn.functional.cross_entropy(scores, classes).backward()
        self._optimizer.step()
        return int((scores.argmax(1) == classes).sum())

    def count_right(self, images: Any, classes: Any) -> int:
        with self._torch.inference_mode():
            return int((self._net(self._cells(images)).argmax(1) == classes).sum())

    def _cells(self, images: Any) -> Any:
        pixels = images.permute(0, 3, 1, 2).float()
        return (self._torch.nn.functional.avg_pool2d(pixels, SIDE // GRID) - 128) / 32


def write_files(folder: Path, count: int) -> list[Path]:
    """Images whose class shows as a faint quilt of 4 x 4 colours below two kinds of noise."""
    from tqdm import tqdm

    rng = np.random.default_rng(0)
    quilts = rng.choice([-6.0, 6.0], size=(CLASSES, 4, 4, 3)).repeat(GRID // 4, axis=1).repeat(GRID // 4, axis=2)
    # Windows of one strip of noise: fresh noise for each pixel would take longer than all the training.
    grain = rng.integers(64, size=4 * IMAGE_BYTES, dtype=np.uint8)
    files = []
    started_s = monotonic()
    with tqdm(desc="writing files", total=count, unit=" files", leave=False, disable=None) as bar:
        for number in range(count):
            label = int(rng.integers(CLASSES))
            cells = np.clip(96 + quilts[label] + rng.normal(scale=32, size=quilts[label].shape), 0, 191)
            image = cells.astype(np.uint8).repeat(SIDE // GRID, axis=0).repeat(SIDE // GRID, axis=1)
            start = int(rng.integers(len(grain) - IMAGE_BYTES))
            image += grain[start : start + IMAGE_BYTES].reshape(image.shape)
            files.append(folder / f"{label}-{number:06}.npy")
            np.save(files[-1], image)
            bar.update()
    print(f"wrote {count:,} files in {monotonic() - started_s:.1f} s")
    return files


@contextmanager
def _temporary_folder(parent: Path | None, *, keep: bool) -> Iterator[Path]:
    """A folder that is gone afterwards however the demo ends: by itself, Ctrl-C, an error or SIGTERM."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-demo-", dir=parent))
    # As for Ctrl-C: what Python does by itself on SIGTERM would leave the files behind.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield folder
    finally:
        signal.signal(signal.SIGTERM, before)
        if keep:
            print(f"the files are kept in {folder}", flush=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _size(text: str) -> int:
    try:
        return parse_size(text, available=0)
    except ValueError:
        raise ArgumentTypeError(f'{text!r} is not a size such as "128 MiB"') from None


def _count(least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return count


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise ArgumentTypeError(f"there is no folder {text!r}")
    return Path(text)
