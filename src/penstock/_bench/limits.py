"""What the machine could do at best with a job, measured in the same run and, like the contenders, in a fresh process.

A limit gives samples per second. It does no more than the name says: no order, no check (but for the gather, which goes
through the same consumer as everyone, because there the consumer is no longer small), no delivery.
"""

from __future__ import annotations

import itertools
import math
import mmap
import multiprocessing
import multiprocessing.connection
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from penstock._bench.contenders import CONTENDERS
from penstock._bench.drive import drive
from penstock._bench.running import Running
from penstock._bench.workloads import Job, WrongContent

__all__ = ["LIMITS"]

# Long enough that a scheduler's hiccup of some milliseconds stays below a per cent.
_ENOUGH_S: Final = 0.5
_DISK_READ_BYTES: Final = 8 * 2**20


def _reused_memory(size_bytes: int) -> mmap.mmap:
    """Page-aligned memory that has been touched: fresh pages cost more than what is measured here."""
    memory = mmap.mmap(-1, size_bytes)
    np.frombuffer(memory, np.uint8)[:] = 1
    return memory


def _memcpy(job: Job) -> float:
    size = job.sample_bytes
    source, target = (np.frombuffer(_reused_memory(size), np.uint8) for _ in range(2))
    copies, began = 0, time.perf_counter()
    while (took := time.perf_counter() - began) < min(job.least_s, _ENOUGH_S) or not copies:
        np.copyto(target, source)
        copies += 1
    return copies / took


def _read_files(paths: list[str], size_bytes: int, least_s: float, start: Any, answer: Any) -> None:
    """Runs in a reading process: files from the page cache into the same memory, over and over."""
    memory = memoryview(_reused_memory(size_bytes + mmap.PAGESIZE))
    start.wait()
    reads, began = 0, time.perf_counter()
    for path in itertools.cycle(paths):
        if (took := time.perf_counter() - began) >= least_s and reads:
            break
        with open(path, "rb", buffering=0) as file:
            file.readinto(memory)
        reads += 1
    answer.send(reads / took)
    answer.close()


def _load_items(items: list[Any], load: Callable[[Any], Any], least_s: float, start: Any, answer: Any) -> None:
    """The same for whatever a load does; what it gives is dropped."""
    load(items[0])
    start.wait()
    loads, began = 0, time.perf_counter()
    for item in itertools.cycle(items):
        if (took := time.perf_counter() - began) >= least_s and loads:
            break
        load(item)
        loads += 1
    answer.send(loads / took)
    answer.close()


def _at_once(job: Job, processes: int, target: Callable[..., None], what: Any) -> float:
    """Bare processes that do the same thing at once, and hand nothing over."""
    context = multiprocessing.get_context("spawn")
    least_s = min(job.least_s, _ENOUGH_S)
    start = context.Barrier(processes)
    pipes = [context.Pipe(duplex=False) for _ in range(processes)]
    crew = []
    for number, (_, answer) in enumerate(pipes):
        # Each begins elsewhere, so that no two read the same file at the same time.
        first = len(job.items) * number // processes
        items = [*job.items[first:], *job.items[:first]]
        crew.append(context.Process(target=target, args=(items, what, least_s, start, answer)))
        crew[-1].start()
        answer.close()
    rates = [float(question.recv()) for question, _ in pipes]
    for process in crew:
        process.join()
    return sum(rates)


def _read_alone(job: Job) -> float:
    return _at_once(job, 1, _read_files, job.sample_bytes)


def _read_together(job: Job) -> float:
    return _at_once(job, job.workers, _read_files, job.sample_bytes)


def _fill_slots(paths: list[str], slots: list[mmap.mmap], free: Any, full: Any) -> None:
    """Runs in a reading process: the same into one shared slot after the other, each once it is free again."""
    views = [memoryview(slot) for slot in slots]
    for path in itertools.cycle(paths):
        if (number := free.recv()) is None:
            return
        with open(path, "rb", buffering=0) as file:
            file.readinto(views[number])
        full.send(number)


def _hand_over(job: Job) -> float:
    """What is left of that where the slots are shared, two for each worker, and a consumer looks at every page of them:
    a byte for each goes through a pipe, and nothing else is done. Consumer and workers share the cores."""
    context = multiprocessing.get_context("fork")
    slots = [[_reused_memory(job.sample_bytes + mmap.PAGESIZE) for _ in range(2)] for _ in range(job.workers)]
    pages = [[np.frombuffer(slot, np.uint64)[:: mmap.PAGESIZE // 8] for slot in own] for own in slots]
    frees, fulls, crew = [], {}, []
    for number, own in enumerate(slots):
        (free_in, free), (full, full_out) = context.Pipe(duplex=False), context.Pipe(duplex=False)
        first = len(job.items) * number // job.workers
        items = [*job.items[first:], *job.items[:first]]
        crew.append(context.Process(target=_fill_slots, args=(items, own, free_in, full_out), daemon=True))
        crew[-1].start()
        frees.append(free)
        fulls[full] = number
        for slot in range(len(own)):
            free.send(slot)
    for warm in (True, False):  # each process first touches the slots once
        looks, began = 0, time.perf_counter()
        while looks < 4 * job.workers if warm else (took := time.perf_counter() - began) < min(job.least_s, _ENOUGH_S):
            ready = multiprocessing.connection.wait(list(fulls))
            for full, worker in fulls.items():
                if full not in ready:
                    continue
                slot = full.recv()
                pages[worker][slot].sum()
                frees[worker].send(slot)
                looks += 1
    rate = looks / took
    for process in crew:
        process.kill()
        process.join()
    return rate


def _load_together(job: Job) -> float:
    return _at_once(job, job.workers, _load_items, job.load)


def _share(job: Job) -> float:
    """Perfect sharing: what one process loads, times the workers, with no time lost between them."""
    loaded, began = 0, time.perf_counter()
    for loaded, item in enumerate(job.items, 1):
        job.load(item)
        # Whole groups of 64, so that the slow items are there in their proportion.
        if loaded % 64 == 0 and time.perf_counter() - began >= min(job.least_s, _ENOUGH_S):
            break
    return loaded / (time.perf_counter() - began) * job.workers


def _read_in_order(paths: list[str]) -> None:
    memory = memoryview(_reused_memory(_DISK_READ_BYTES))
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while file.readinto(memory):
                pass


def _disk(job: Job) -> float:
    """Each file from its first byte to its last, from the disk, into reused memory: the best of one, two and four
    readers, because some disks want to be asked for several things at once."""
    assert job.chill is not None
    paths = sorted({path for path, _ in job.items})
    best_s = float("inf")
    for readers in (1, 2, 4):
        job.chill()
        began = time.perf_counter()
        with ThreadPoolExecutor(readers) as pool:  # reading leaves the GIL alone
            list(pool.map(_read_in_order, [paths[first::readers] for first in range(readers)]))
        best_s = min(best_s, time.perf_counter() - began)
    return job.samples / best_s


_BLOCK_BYTES: Final = 4 * 2**20
_TOLD_BYTES: Final = 40 * 2**20


def _disk_blocks(job: Job) -> float:
    """The rows of blocks in random order, each to a place of its own in as much memory as two groups of a budget take,
    by bare threads that tell the system of the next blocks: what shuffling in blocks can be at most."""
    assert job.chill is not None
    size = job.sample_bytes
    rows: dict[str, int] = {}
    for path, row in job.items:
        rows[path] = max(rows.get(path, 0), row + 1)
    offsets = {path: os.path.getsize(path) - count * size for path, count in rows.items()}
    each = max(1, _BLOCK_BYTES // size)
    blocks = [(path, at, min(each, count - at)) for path, count in rows.items() for at in range(0, count, each)]
    random.Random(job.seed).shuffle(blocks)
    places = list(range(job.budget_bytes * 2 // 3 // size))
    random.Random(job.seed).shuffle(places)
    memory = memoryview(_reused_memory(len(places) * size))
    files = {path: os.open(path, os.O_RDONLY) for path in rows}

    def tell(number: int) -> None:
        for path, at, count in blocks[number : number + 1]:
            os.posix_fadvise(files[path], offsets[path] + at * size, count * size, os.POSIX_FADV_WILLNEED)

    def read(number: int) -> None:
        tell(number + _TOLD_BYTES // _BLOCK_BYTES)
        path, at, count = blocks[number]
        spots = (places[(number * each + row) % len(places)] * size for row in range(count))
        os.preadv(files[path], [memory[spot : spot + size] for spot in spots], offsets[path] + at * size)

    try:
        job.chill()
        began = time.perf_counter()
        for number in range(_TOLD_BYTES // _BLOCK_BYTES):
            tell(number)
        with ThreadPoolExecutor(job.workers) as pool:
            list(pool.map(read, range(len(blocks))))
        return job.samples / (time.perf_counter() - began)
    finally:
        for file in files.values():
            os.close(file)


def _driven(job: Job, open_: Callable[[Job], Running]) -> float:
    """Through the same consumer as everyone."""
    timing, _ = drive(job, open_, mark=lambda _: None)
    if timing.wrong:
        raise WrongContent(timing.wrong)
    return timing.samples / timing.seconds


def _loops(job: Job) -> float:
    """What a plain loop in one process makes of it, from the file to the batch, times the workers."""
    return _driven(job, CONTENDERS["loop"].open) * job.workers


def _loop_once(job: Job, start: Any, answer: Any) -> None:
    """Runs in a process of its own, forked, with what the job holds."""
    start.wait()
    answer.send(_driven(job, CONTENDERS["loop"].open))
    answer.close()


def _loops_together(job: Job) -> float:
    """Loops in as many processes, each over all of it: what the workers leave each other of caches and memory."""
    context = multiprocessing.get_context("fork")
    start = context.Barrier(job.workers)
    pipes = [context.Pipe(duplex=False) for _ in range(job.workers)]
    crew = [context.Process(target=_loop_once, args=(job, start, answer)) for _, answer in pipes]
    for process, (_, answer) in zip(crew, pipes, strict=True):
        process.start()
        answer.close()
    rates = [float(question.recv()) for question, _ in pipes]
    for process in crew:
        process.join()
    return sum(rates)


def _waits(job: Job) -> float:
    """No load can be shorter than what it waits for."""
    return job.workers / job.wait_s


class _Preloaded:
    """All samples were loaded beforehand into one array; a batch is copied out of it."""

    def __init__(self, job: Job) -> None:
        self._samples = np.stack([job.load(item) for item in job.items])
        self._size = job.batch_size

    def epochs(self) -> Iterator[Iterable[Any]]:
        rows = np.arange(len(self._samples))
        starts = range(0, len(rows), self._size)
        return ((self._samples[rows[at : at + self._size]] for at in starts) for _ in itertools.repeat(None))

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


class _PreloadedShared(_Preloaded):
    """The same in memory that several processes can write to, and a batch stays right while the next one is made."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        samples, self._samples = self._samples, _shared(self._samples.shape, self._samples.dtype)
        self._samples[...] = samples
        self._slots = [_shared((self._size, *samples.shape[1:]), samples.dtype) for _ in range(2)]

    def epochs(self) -> Iterator[Iterable[Any]]:
        return (self._epoch() for _ in itertools.repeat(None))

    def _epoch(self) -> Iterator[Any]:
        for number, at in enumerate(range(0, len(self._samples), self._size)):
            rows = self._samples[at : at + self._size]
            batch = self._slots[number % 2][: len(rows)]
            batch[...] = rows
            yield batch


def _shared(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    count = math.prod(shape)
    return np.frombuffer(_reused_memory(count * dtype.itemsize), dtype, count).reshape(shape)


class _Gather:
    """``x[index], y[index]``, with the permutations made beforehand."""

    def __init__(self, job: Job) -> None:
        assert job.arrays is not None
        self._columns, self._size, self._finish = job.arrays, job.batch_size, job.finish
        rng = np.random.default_rng(job.seed)
        self._orders = [rng.permutation(job.samples) for _ in range(3)]

    def _epoch(self, order: Any) -> Iterator[Any]:
        columns, size, finish = self._columns, self._size, self._finish
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            batch = tuple(column[rows] for column in columns)
            yield batch if finish is None else finish(batch)

    def epochs(self) -> Iterator[Iterable[Any]]:
        return (self._epoch(order) for order in itertools.cycle(self._orders))

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


def _gather(job: Job) -> float:
    return _driven(job, _Gather)


def _preloaded(job: Job) -> float:
    return _driven(job, _Preloaded)


def _preloaded_shared(job: Job) -> float:
    return _driven(job, _PreloadedShared)


LIMITS: Final[dict[str, tuple[str, Callable[[Job], float]]]] = {
    "memcpy": ("copying between reused memory", _memcpy),
    "read-1": ("one process reading page cache into reused memory", _read_alone),
    "read": ("all workers reading page cache into reused memory", _read_together),
    "hand-over": ("the same into shared slots that a consumer looks at", _hand_over),
    "share": ("one process loading, times the workers", _share),
    "side-by-side": ("all workers loading at once, and nothing handed over", _load_together),
    "loops": ("a plain loop, times the workers", _loops),
    "loops-together": ("as many plain loops at once, and nothing handed over", _loops_together),
    "disk": ("the cold files read in order", _disk),
    "disk-blocks": ("blocks of them at random, each row to its place in memory", _disk_blocks),
    "waits": ("the workers waiting all the time", _waits),
    "preloaded": ("samples copied out of one array", _preloaded),
    "preloaded-shared": ("the same within memory that processes share", _preloaded_shared),
    "gather": ("a bare x[index] per batch", _gather),
}
"""name -> (what it is, how it is measured in samples per second)"""
