"""Several threads for copies that would take one thread long. Runs in the parent.

NumPy lets go of the GIL while it copies, and one core seldom uses all that memory can give. The threads sleep between
copies, so that they take nothing from whoever uses the batches.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Final

__all__ = ["SHARED_BYTES", "Hands", "join"]

SHARED_BYTES: Final = 2 * 2**20  # to wake a thread and to hear of it takes as long as copying some 300 KiB
MOST_HANDS: Final = 4  # so many use up what the memory of small machines gives
PARTS_A_HAND: Final = 2  # who is late leaves some of his to the others

Part = Callable[[int, int], None]


_Answers = queue.SimpleQueue["BaseException | None"]
_Job = tuple[Part, int, int, _Answers]
_Jobs = queue.SimpleQueue["_Job | None"]


class Hands:
    """Does something with numbered rows, some of them in each of several threads; the caller's is one of them."""

    def __init__(self, cores: int) -> None:
        self._helpers = max(0, min(cores, MOST_HANDS) - 1)
        self._jobs: _Jobs = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def share(self, count: int, do: Part) -> None:
        """Call ``do`` with the first row and the one behind the last, for parts that are all of them, and wait."""
        self._start()
        parts = min(count, PARTS_A_HAND * (len(self._threads) + 1))
        # One for each call, as a Ctrl-C while it waits leaves answers that nobody takes.
        answers: _Answers = queue.SimpleQueue()
        for number in range(parts):
            self._jobs.put((do, count * number // parts, count * (number + 1) // parts, answers))
        # Whatever nobody has begun, so that it ends without the others, too: they may be busy, late or gone.
        while (job := self._left()) is not None:
            _answer(job)
        for error in [answers.get() for _ in range(parts)]:
            if error is not None:
                raise error

    def _left(self) -> _Job | None:
        try:
            job = self._jobs.get_nowait()
        except queue.Empty:
            return None
        if job is None:
            self._jobs.put(None)  # it was meant for one of the others
        return job

    def _start(self) -> None:
        while len(self._threads) < self._helpers:
            thread = threading.Thread(target=_serve, args=(self._jobs,), name="penstock-copy", daemon=True)
            self._threads.append(thread)  # before: a Ctrl-C while it starts must not make it nobody's
            try:
                thread.start()
            except RuntimeError:  # there may be no more threads
                self._threads.pop()
                self._helpers = len(self._threads)

    def close(self) -> None:
        """End the threads; whoever shares something meanwhile, or later, does all of it alone."""
        self._helpers = 0
        for _ in self._threads:
            self._jobs.put(None)
        while self._threads:
            join(self._threads.pop())


def join(thread: threading.Thread) -> None:
    """Wait for the end of a thread that was told to end, unless it is this one or was never started."""
    if thread is not threading.current_thread():  # or the garbage collector called in it
        with contextlib.suppress(RuntimeError):  # Ctrl-C came before it began
            thread.join()


def _serve(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        _answer(job)
        del job  # what is copied to must not stay alive until the next copy


def _answer(job: _Job) -> None:
    do, first, behind, answers = job
    error: BaseException | None = None
    try:
        do(first, behind)
    except BaseException as raised:  # noqa: BLE001 - raised where it was asked for
        error = raised
    finally:
        del do, job
        answers.put(error)
