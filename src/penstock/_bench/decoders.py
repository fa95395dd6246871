"""How long the libraries take that could decode a JPEG: ``python -m penstock._bench.decoders``.

What ``penstock._core.decode`` is made of was chosen by this. Processor time of one thread, the least of several turns,
interleaved; beside it how far the pixels are from those that Pillow gives with antialiasing (root mean square of 255).
"""

from __future__ import annotations

import argparse
import importlib
import io
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock._bench.workloads import photo
from penstock._core.decode import Decoder

__all__ = ["main"]

Decode = Callable[[bytes], Any]


def _ways(size: int) -> dict[str, Decode]:
    pil: Any = importlib.import_module("PIL.Image")
    cv2: Any = importlib.import_module("cv2")
    simplejpeg: Any = importlib.import_module("simplejpeg")
    cv2.setNumThreads(0)
    bilinear, both = pil.Resampling.BILINEAR, (size, size)

    def pillow(data: bytes) -> Any:
        return np.asarray(pil.open(io.BytesIO(data)).convert("RGB").resize(both, bilinear))

    def draft(data: bytes) -> Any:
        image = pil.open(io.BytesIO(data))
        image.draft("RGB", both)
        return image

    def opencv(data: bytes) -> Any:
        return cv2.cvtColor(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)

    def eighths(data: bytes) -> Any:
        return simplejpeg.decode_jpeg(data, min_height=size, min_width=size)

    def ours(decoder: Decoder, data: bytes) -> Any:
        out = np.empty((size, size, 3), np.uint8)
        decoder.bytes_into(data, out)
        return out

    plain, smooth = Decoder((size, size)), Decoder((size, size), antialias=True)
    return {
        "Pillow": pillow,
        "Pillow, draft": lambda data: np.asarray(draft(data).resize(both, bilinear)),
        "Pillow, draft; OpenCV resizes": lambda data: cv2.resize(np.asarray(draft(data)), both),
        "OpenCV": lambda data: cv2.resize(opencv(data), both),
        "simplejpeg; OpenCV resizes": lambda data: cv2.resize(simplejpeg.decode_jpeg(data), both),
        "simplejpeg at n/8; OpenCV resizes": lambda data: cv2.resize(eighths(data), both),
        "penstock.images": lambda data: ours(plain, data),
        "penstock.images, antialias": lambda data: ours(smooth, data),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--high", type=int, default=350, help="height of the pictures (350)")
    parser.add_argument("--wide", type=int, default=400, help="width (400)")
    parser.add_argument("--size", type=int, default=224, help="height and width that they are made (224)")
    parser.add_argument("--count", type=int, default=40, help="how many pictures (40)")
    parser.add_argument("--turns", type=int, default=5, help="how often each is tried (5)")
    args = parser.parse_args()
    pil: Any = importlib.import_module("PIL.Image")
    files = []
    for number in range(args.count):
        file = io.BytesIO()
        pil.fromarray(photo(np.random.default_rng(number), args.high, args.wide)).save(file, "JPEG", quality=85)
        files.append(file.getvalue())
    ways = _ways(args.size)
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(args.turns):
        for name, way in ways.items():
            began = time.thread_time()
            for data in files:
                way(data)
            best[name] = min(best[name], (time.thread_time() - began) / len(files))
    truth = np.stack([ways["Pillow"](data) for data in files]).astype(float)
    print(f"{args.count} JPEGs of {args.wide}x{args.high} to {args.size}x{args.size}, one thread")
    for name, way in ways.items():
        off = float(np.sqrt(np.mean((np.stack([way(data) for data in files]) - truth) ** 2)))
        print(
            f"  {name:34} {best[name] * 1e6:8.0f} us  {best['Pillow'] / best[name]:5.2f} x Pillow   off by {off:4.1f}"
        )


if __name__ == "__main__":
    main()
