"""The live line of an epoch, on a real pseudo-terminal and beside real tqdm bars."""

from __future__ import annotations

import gc
import importlib
import io
import itertools
import os
import re
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
from tqdm import tqdm

from penstock import Feed, LoadError
from penstock.progress import progress

# tqdm's lock is a semaphore that lives as long as the process: made here, it is in every test's baseline.
tqdm.get_lock()

SETUP = """
import sys
import numpy as np
from penstock import Feed, MiB
feed = Feed(range(64), lambda i: np.full(16, i), batch_size=4, memory=MiB(256), num_workers={workers})
"""
# batches of total [elapsed<left, samples/s, waiting, memory of budget]
LINE = re.compile(
    r"epoch 1: 100%\|.+\| 16/16 batches "
    r"\[\d\d:\d\d<\d\d:\d\d, [\d,]+ samples/s, waiting \d+%(, [\d.]+ [KM]iB of 256 MiB)?\]"
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(*command: str) -> tuple[str, str, int]:
    """What a command writes to stdout, what the terminal behind its stderr was sent, and its exit code."""
    termios, pty = pytest.importorskip("termios"), pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    try:
        termios.tcsetwinsize(theirs, (40, 160))
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=theirs)
    finally:
        os.close(theirs)
    sent = b""
    try:
        while block := os.read(ours, 65536):
            sent += block
    except OSError:  # how Linux says that nobody has the other end any more
        pass
    finally:
        os.close(ours)
    out, _ = child.communicate()
    return out.decode(), sent.decode(), child.returncode


def small_feed(count: int = 64) -> Feed:
    return Feed(range(count), lambda i: np.full(16, i), batch_size=4, memory="256 MiB", num_workers=0)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_terminal_shows_batches_speed_waiting_memory_and_time_left(workers: int) -> None:
    """The line is the only thing that tells a user who waits for whom."""
    script = SETUP.format(workers=workers) + (
        "with feed:\n    for batch in feed.progress('epoch 1'): pass\nprint('after', file=sys.stderr)"
    )
    _, screen, code = on_terminal(sys.executable, "-c", script)
    lines = re.split(r"[\r\n]+", screen)
    assert code == 0, screen
    assert any(LINE.fullmatch(line) for line in lines), screen
    assert lines[-2] == "after"


def test_the_memory_used_stands_against_the_budget() -> None:
    """Memory of budget is the promise of the package; the line has to show it once it was measured."""
    terminal = Terminal()
    with small_feed() as feed:
        for _ in progress(feed, stream=terminal):
            pass
        assert (feed.stats.peak_bytes > 0) == (" of 256 MiB]" in terminal.getvalue())


def test_a_pipe_gets_nothing() -> None:
    """A log file full of half-drawn lines would be worse than none."""
    script = SETUP.format(workers=0) + "with feed:\n    print(sum(1 for _ in feed.progress('epoch 1')))"
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "16\n", "")


def test_the_line_takes_its_place_below_the_users_bars() -> None:
    """Users have a bar over epochs; ours goes below it, and their messages above both."""
    script = SETUP.format(workers=0) + (
        "from tqdm import tqdm\n"
        "with feed:\n"
        "    for epoch in tqdm(range(2), desc='outer'):\n"
        "        for number, batch in enumerate(feed.progress('inner')):\n"
        "            if number == 3: tqdm.write(f'message {epoch}', file=sys.stderr)\n"
    )
    _, screen, code = on_terminal(sys.executable, "-c", script)
    lines = re.split(r"[\r\n]+", screen)
    assert code == 0, screen
    messages = [line for line in lines if "message" in line]
    assert [line.removeprefix("\x1b[A") for line in messages] == ["message 0", "message 1"], screen
    # Drawn one line down, then back up: the outer bar keeps its line.
    assert re.search(r"\n\r?inner: 100%[^\r\n]*\x1b\[A", screen), screen
    assert lines[-2].startswith("outer: 100%"), screen


@pytest.mark.parametrize("ending", ["break", "raise ValueError", "line.close(); break", "del line; break"])
def test_a_loop_that_ends_early_closes_the_line(ending: str) -> None:
    """What is printed next must start on a line of its own, and nothing of tqdm may linger."""
    script = SETUP.format(workers=0) + (
        "from tqdm import tqdm\n"
        "with feed:\n"
        "    line = feed.progress('early')\n"
        "    try:\n"
        "        for number, batch in enumerate(line):\n"
        f"            if number == 5: {ending}\n"
        "    except ValueError: pass\n"
        "    line = None\n"
        "    print('after', len(tqdm._instances), file=sys.stderr)\n"
    )
    _, screen, code = on_terminal(sys.executable, "-c", script)
    lines = re.split(r"[\r\n]+", screen)
    assert code == 0, screen
    assert lines[-2] == "after 0", screen
    assert "5/16 batches" in lines[-3], screen


def test_a_stream_is_counted_without_a_total() -> None:
    """Nobody knows how long a stream is: no percentage, no time left, but no error either."""
    terminal = Terminal()
    with Feed((i for i in range(40)), lambda i: np.full(4, i), batch_size=4, memory="256 MiB", num_workers=0) as feed:
        assert sum(1 for _ in progress(feed, stream=terminal, desc="stream")) == 10
    last = terminal.getvalue().rstrip("\n").split("\r")[-1]
    assert re.match(r"stream: 10 batches \[\d\d:\d\d, [\d,]+ samples/s, waiting \d+%", last), last


def test_an_epoch_of_epochs_can_be_wrapped() -> None:
    """``feed.epochs(n)`` and the line belong together in every training loop."""
    terminal = Terminal()
    with small_feed() as feed:
        seen = [sum(1 for _ in progress(feed, epoch, stream=terminal)) for epoch in feed.epochs(2)]
    assert seen == [16, 16]
    assert terminal.getvalue().count("16/16 batches") >= 2


def test_the_batches_are_those_of_the_feed() -> None:
    """The line only watches."""
    with small_feed() as feed:
        feed.set_epoch(0)
        plain = [batch.copy() for batch in feed]
        feed.set_epoch(0)
        watched = [batch.copy() for batch in progress(feed, stream=Terminal())]
    np.testing.assert_array_equal(np.concatenate(watched), np.concatenate(plain))


def test_no_batch_is_held_by_the_line() -> None:
    """A batch that the wrapper holds is a slot that the workers cannot fill."""
    with small_feed() as feed:
        batches = progress(feed, stream=Terminal())
        for _ in range(5):
            batch = next(batches)
            gone = weakref.ref(batch)
            del batch
            gc.collect()
            assert gone() is None
        batches.close()  # type: ignore[attr-defined]  # a generator, on a terminal


def test_redrawing_does_not_follow_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line drawn for every small batch would cost more than the batch."""
    ticks = (number / 16 for number in itertools.count())
    monkeypatch.setattr(importlib.import_module("penstock.progress"), "monotonic", lambda: next(ticks))
    terminal = Terminal()
    with small_feed(4 * 320) as feed:
        assert sum(1 for _ in progress(feed, stream=terminal)) == 320
    # 320 batches in 20 seconds of this clock: five drawings a second at most, and the first and the last.
    assert 50 <= terminal.getvalue().count("\r") <= 102


def test_no_thread_is_started() -> None:
    """Penstock's parent has no thread of its own; tqdm would start one."""
    before = set(threading.enumerate())
    with small_feed() as feed:
        for _ in progress(feed, stream=Terminal()):
            assert set(threading.enumerate()) == before


def test_an_error_of_load_comes_through_and_closes_the_line() -> None:
    """The error is the message; the line must not hide or change it."""

    def load(item: int) -> np.ndarray:
        if item == 30:
            raise ValueError("item thirty")
        return np.full(4, item)

    terminal = Terminal()
    with Feed(range(64), load, batch_size=4, memory="256 MiB", num_workers=0) as feed:
        watched = progress(feed, stream=terminal)
        with pytest.raises(LoadError, match="30"):
            list(watched)
    assert terminal.getvalue().endswith("\n")


@pytest.mark.leaves("fd", "thread", "mapping", reason="the notebook client keeps its event loop and sockets")
def test_a_notebook_shows_the_line_and_no_warning() -> None:
    """In a notebook stderr is no terminal, and yet someone is looking."""
    pytest.importorskip("ipykernel")
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    book = nbformat.v4.new_notebook()
    source = SETUP.format(workers=0) + "with feed:\n    for batch in feed.progress('epoch 1'): pass\n"
    book.cells = [nbformat.v4.new_code_cell(source)]
    nbclient.NotebookClient(book, kernel_name="python3").execute()
    shown = nbformat.writes(book)  # the cell's output and the state of its widgets, which have figure spaces
    assert re.search(r"16/16\sbatches\s\[.*samples/s", shown), shown
    assert "Warning" not in shown
