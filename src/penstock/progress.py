"""The live line of one epoch: batches, samples/s, waiting, memory of budget, time left. Runs in the parent.

And a plainer one for a cache that is filled ahead of time.

Owns what the line says and how often; drawing it is tqdm's work, so it takes its place among bars that the user
has, ``tqdm.write`` goes above it, and in a notebook it is a widget. tqdm is imported when there is something
to draw: on a stream that is no terminal the wrapper is the epoch's own iterator and costs nothing.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, TextIO

from penstock._core.budget import format_bytes

if TYPE_CHECKING:
    from penstock._core.feed import Feed

__all__ = ["progress"]

# Five times a second looks alive; redrawing for every batch would cost more than handing out a small one.
_REDRAW_S: Final = 0.2


def progress(
    feed: Feed, epoch: Iterable[Any] | None = None, *, stream: TextIO | None = None, desc: str | None = None
) -> Iterator[Any]:
    """The batches of one epoch, with a live line about them on ``stream`` (stderr) if that is a terminal.

    ``epoch`` is one that ``feed.epochs(n)`` gave; without it the feed's next one. ``desc`` stands before the line.
    """
    in_notebook = stream is None and "ipykernel.zmqshell" in sys.modules
    stream = sys.stderr if stream is None else stream
    batches = iter(feed if epoch is None else epoch)
    # sys.stderr is None in a program without a console.
    if not in_notebook and (stream is None or not stream.isatty()):
        return batches
    return _live(feed, batches, total=_length(feed), stream=stream, desc=desc, in_notebook=in_notebook)


def counted(steps: Iterable[tuple[int, int]], *, stream: TextIO | None = None, desc: str | None = None) -> int:
    """Go through steps that are (done, of so many), with a live line about them if ``stream`` is a terminal.

    What was done in the end.
    """
    in_notebook = stream is None and "ipykernel.zmqshell" in sys.modules
    stream = sys.stderr if stream is None else stream
    shown = in_notebook or (stream is not None and stream.isatty())
    bar: Any = None
    done, drawn_s = 0, 0.0
    try:
        for done, total in steps:
            if shown and bar is None:
                bar = _bar(total, stream=stream, desc=desc, in_notebook=in_notebook, unit="items")
            if bar is not None and (monotonic() - drawn_s >= _REDRAW_S or done == total):
                drawn_s = monotonic()
                bar.update(done - bar.n)
    finally:
        if bar is not None:
            bar.update(done - bar.n)
            bar.close()
    return done


def _length(feed: Feed) -> int | None:
    try:
        return len(feed)
    except TypeError:  # a stream: nobody knows before it ends
        return None


def _live(
    feed: Feed, batches: Iterator[Any], *, total: int | None, stream: TextIO, desc: str | None, in_notebook: bool
) -> Iterator[Any]:
    bar = _bar(total, stream=stream, desc=desc, in_notebook=in_notebook)
    done = 0
    before = feed.stats
    samples_before, waited_before_s = before.samples, before.wait_s
    started_s = drawn_s = monotonic()

    def draw(now_s: float) -> None:
        stats = feed.stats
        # A clock that stood still is not worth a division by zero.
        wall_s = max(now_s - started_s, 1e-9)
        waiting = min((stats.wait_s - waited_before_s) / wall_s, 1.0)
        text = f"{(stats.samples - samples_before) / wall_s:,.0f} samples/s, waiting {waiting:.0%}"
        if stats.peak_bytes:  # zero until it was measured for the first time
            text += f", {format_bytes(stats.peak_bytes)} of {format_bytes(feed.plan.memory)}"
        bar.set_postfix_str(text, refresh=False)
        bar.update(done - bar.n)

    try:
        while True:
            try:
                # Not bound to a name: this frame would hold the batch, and with it a slot, while the next is fetched.
                yield next(batches)
            except StopIteration:
                return
            done += 1
            now_s = monotonic()
            if now_s - drawn_s >= _REDRAW_S:
                drawn_s = now_s
                draw(now_s)
    finally:
        # At the end, on break, on an exception, and when the generator is dropped: the line tells the last state.
        if done:
            draw(monotonic())
        bar.close()


def _bar(total: int | None, *, stream: TextIO, desc: str | None, in_notebook: bool, unit: str = "batches") -> Any:
    if in_notebook:
        with warnings.catch_warnings():
            # Without ipywidgets tqdm.auto draws text, which is right; a warning above it would not be.
            warnings.simplefilter("ignore")
            from tqdm.auto import tqdm
    else:
        from tqdm import tqdm

    # On the class that the user's bars have, so that theirs and ours take turns.
    tqdm.get_lock()
    # tqdm would start a thread that looks after slow bars; the parent has no thread of ours.
    quiet = type("tqdm", (tqdm,), {"monitor_interval": 0})
    counts = f"{{l_bar}}{{bar}}| {{n_fmt}}/{{total_fmt}} {unit} [{{elapsed}}<{{remaining}}{{postfix}}]"
    return quiet(
        total=total,
        desc=f"{desc}: " if desc else None,
        bar_format="{desc}{n_fmt} batches [{elapsed}{postfix}]" if total is None else counts,
        file=stream,
        leave=True if in_notebook else None,  # None: an inner line goes when its epoch is over, an outermost one stays
        dynamic_ncols=True,
        mininterval=0,
        miniters=1,
    )
