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

__all__ = ["SHARED_BYTES", "Begun", "Hands", "join"]

SHARED_BYTES: Final = 2 * 2**20  # to wake a thread and to hear of it takes as long as copying some 300 KiB
MOST_HANDS: Final = 4  # so many use up what the memory of small machines gives
PARTS_A_HAND: Final = 2  # who is late leaves some of his to the others

Part = Callable[[int, int], None]


class Begun:
    """Something that is done in parts, by whoever takes one; parts that nobody has begun are in ``left``."""

    def __init__(self, count: int, parts: int, do: Part) -> None:
        self.parts = parts
        self.left: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._do: Part | None = do
        for number in range(parts):
            self.left.put((count * number // parts, count * (number + 1) // parts))

    def work(self) -> None:
        """Do what nobody has begun."""
        while (part := self._next()) is not None:
            error: BaseException | None = None
            try:
                assert self._do is not None
                self._do(*part)
            except BaseException as raised:  # noqa: BLE001 - raised where it is waited for
                error = raised
            finally:
                self.answers.put(error)

    def wait(self) -> None:
        """Until all parts have ended, and nobody holds what they needed."""
        errors = [self.answers.get() for _ in range(self.parts)]
        self._do = None
        for error in errors:
            if error is not None:
                raise error

    def _next(self) -> tuple[int, int] | None:
        try:
            return self.left.get_nowait()
        except queue.Empty:
            return None


class Hands:
    """Does something with numbered rows, some of them in each of several threads; the caller's is one of them."""

    def __init__(self, cores: int, *, helpers: int | None = None, stack_bytes: int = 0) -> None:
        """As many as there are cores, up to what memory gives; ``helpers``: so many beside the caller's instead.

        ``stack_bytes``: of each of the threads, where the memory of this process is limited; 0: as usual.
        """
        self._stack_bytes = stack_bytes
        self._helpers = max(0, min(cores, MOST_HANDS) - 1) if helpers is None else helpers
        self._jobs: queue.SimpleQueue[Begun | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def share(self, count: int, do: Part) -> None:
        """Call ``do`` with the first row and the one behind the last, for parts that are all of them, and wait."""
        self.start()
        self.finish(self.begin(count, do))

    def begin(self, count: int, do: Part) -> Begun:
        """The same without waiting: the others begin, if there are any by now, and ``finish`` sees to the rest."""
        begun = Begun(count, min(count, PARTS_A_HAND * (len(self._threads) + 1)), do)
        for _ in range(min(begun.parts, len(self._threads))):
            self._jobs.put(begun)
        return begun

    def finish(self, begun: Begun) -> None:
        """Do what nobody has begun, so that it ends without the others, too: they may be busy, late or gone."""
        begun.work()
        begun.wait()

    def start(self) -> None:
        """Have the other threads there."""
        while len(self._threads) < self._helpers:
            thread = threading.Thread(target=_serve, args=(self._jobs,), name="penstock-copy", daemon=True)
            self._threads.append(thread)  # before: a Ctrl-C while it starts must not make it nobody's
            usual = threading.stack_size(self._stack_bytes) if self._stack_bytes else None
            try:
                thread.start()
            except RuntimeError:  # there may be no more threads
                self._threads.pop()
                self._helpers = len(self._threads)
            finally:
                if usual is not None:
                    threading.stack_size(usual)

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


def _serve(jobs: queue.SimpleQueue[Begun | None]) -> None:
    while (begun := jobs.get()) is not None:
        begun.work()
        del begun  # what is copied to must not stay alive until the next copy
