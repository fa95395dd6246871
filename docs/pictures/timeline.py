"""Draws docs/pictures/timeline.svg: the life of some batches of a feed, as it really went.

    python docs/pictures/timeline.py docs/pictures/timeline.svg

Two workers load, a device with a copy engine of its own takes 8 ms a batch, the consumer computes 20 ms on each. What
each of them did when is written down while it happens, and then drawn.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import penstock
from penstock import HostDevice

FIRST, BATCHES, ROWS = 5, 11, 4  # the first ones, while workers start, are not drawn
LOAD_S, COPY_S, COMPUTE_S = 0.007, 0.008, 0.020
COLOURS = ("#3b6ea5", "#c8553d", "#588157", "#8d6a9f", "#c99700", "#3a8f8f", "#7a5c3e")
LANES = ("worker 0 fills a slot", "worker 1 fills a slot", "copy to a buffer", "compute on it")


class CopyEngine(HostDevice):
    """Copies in a thread of its own, as a GPU does beside its kernels."""

    def __init__(self) -> None:
        super().__init__("a device with a copy engine")
        self._engine = ThreadPoolExecutor(1)
        self.spans: list[tuple[float, float, int]] = []

    def copy(self, blocks: Sequence[Any], arrays: Sequence[Any]) -> Future[None]:
        """Begin, and come back at once."""
        return self._engine.submit(self._copy, list(blocks), list(arrays))

    def _copy(self, blocks: Sequence[Any], arrays: Sequence[Any]) -> None:
        began = time.monotonic()
        super().copy(blocks, arrays)
        time.sleep(COPY_S)
        self.spans.append((began, time.monotonic(), int(arrays[0].flat[0])))

    def copied(self, ticket: Any, *, wait: bool) -> bool:
        """Whether that thread is done with it."""
        if wait:
            ticket.result()
        return bool(ticket.done())

    def hand_out(self, block: Any, ticket: Any, *form: Any) -> Any:
        """As a stream would wait for an event: the copy comes first."""
        ticket.result()
        return super().hand_out(block, None, *form)

    def close(self) -> None:
        """End the thread."""
        self._engine.shutdown()


def load(item: int) -> dict[str, Any]:
    """A sample that says who made it, and when."""
    began = time.monotonic()
    time.sleep(LOAD_S)
    info = penstock.worker()
    return {
        "batch": np.full(1000, item // ROWS, np.int64),
        "span": np.array([began, time.monotonic()]),
        "worker": 0 if info is None else info.id,
    }


def run() -> dict[str, list[tuple[float, float, int]]]:
    """One epoch; for each lane its spans: from, to, batch."""
    device = CopyEngine()
    spans: dict[str, list[tuple[float, float, int]]] = {lane: [] for lane in LANES}
    with penstock.Feed(
        range(BATCHES * ROWS), load, batch_size=ROWS, num_workers=2, memory="256 MiB", to=device
    ) as feed:
        assert feed.plan.device_buffers == 3
        for number, batch in enumerate(feed):
            began = time.monotonic()
            time.sleep(COMPUTE_S)
            spans[LANES[3]].append((began, time.monotonic(), number))
            for (start, end), worker in zip(batch["span"].tolist(), batch["worker"].tolist(), strict=True):
                spans[LANES[worker % 2]].append((start, end, number))
        del batch
    device.close()
    spans[LANES[2]] = sorted(device.spans)
    return {lane: [span for span in found if span[2] >= FIRST] for lane, found in spans.items()}


def draw(spans: dict[str, list[tuple[float, float, int]]]) -> str:
    """The picture."""
    first = min(start for lane in spans.values() for start, _, _ in lane)
    last = max(end for lane in spans.values() for _, end, _ in lane)
    left, width, height, lane_height = 190, 760, 60 + 46 * len(spans), 46
    scale = width / (last - first)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 20} {height}" font-size="13">',
        "<title>Some batches of a feed: loaded, copied to the device, computed on</title>",
        f'<rect width="{left + width + 20}" height="{height}" fill="#ffffff"/><g font-family="sans-serif">',
    ]
    for row, (lane, found) in enumerate(spans.items()):
        top = 14 + row * lane_height
        out.append(f'<text x="{left - 12}" y="{top + 20}" text-anchor="end" fill="#222222">{lane}</text>')
        out.append(f'<line x1="{left}" y1="{top + 34}" x2="{left + width}" y2="{top + 34}" stroke="#dddddd"/>')
        for start, end, batch in found:
            x, w = left + (start - first) * scale, max(2.0, (end - start) * scale - 1)
            out.append(f'<rect x="{x:.1f}" y="{top}" width="{w:.1f}" height="30" rx="3" fill="{COLOURS[batch % 7]}"/>')
            if w > 12:
                out.append(f'<text x="{x + w / 2:.1f}" y="{top + 20}" text-anchor="middle" fill="#fff">{batch}</text>')
    base = 14 + len(spans) * lane_height
    for tick in range(0, int((last - first) * 1000) + 1, 20):
        x = left + tick / 1000 * scale
        out.append(f'<line x1="{x:.1f}" y1="{base}" x2="{x:.1f}" y2="{base + 6}" stroke="#888888"/>')
        out.append(f'<text x="{x:.1f}" y="{base + 22}" text-anchor="middle" fill="#666666">{tick} ms</text>')
    return "\n".join([*out, "</g></svg>", ""])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw(run()), encoding="utf-8")
    assert threading.active_count() == 1
