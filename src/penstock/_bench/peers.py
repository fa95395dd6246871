"""The peers: a loop, threads, torch, torchdata, tf.data, tinyloader, Grain and SPDL, each as its documentation advises.

What "advises" came to, where there was a choice:

    torch       persistent workers for training; ``__getitems__`` for data that is in memory; an iterable-style dataset
                that deals lines to its workers, a batch of them at a time, or a map-style one over an index of them
    tf.data     columns by ``from_tensor_slices``, text by ``TextLineDataset``; a load that is Python or NumPy is a
                ``numpy_function``, in order; of small samples, a call a batch. Parallel calls and what is kept ready
                are ``AUTOTUNE``, which takes up to as many calls as there are processors; loads that only wait are
                as many parallel calls as there are workers
    tinyloader  workers per epoch, which is what its context manager does
    grain       ``shuffle``, ``map``, ``batch``, ``repeat`` of a ``MapDataset``, one iterator over all epochs; for data
                in memory no threads, as it recommends. Else as many loads at a time as there are workers, which was
                faster here than its own options wherever loads compute; ``grain-default`` has its own: 16 threads
                and a buffer of 500 in each process, but of no more batches than fit into the budget (it means
                elements of some KiB)
    spdl        a pipeline with a continuous source; samples whose load is work of its own are one task each, small
                ones a task a batch. Its regions of processes do not keep the order; a pool of processes for a stage
                does. With an arena: an iterable in each of several subprocesses, and segments for its batches

Runs in the trial process; what workers may have to unpickle is a top-level name.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any, Final

import numpy as np

from penstock._bench.running import Batches, Contender, Running, stacked
from penstock._bench.workloads import Job

__all__ = ["PEERS", "through_penstock"]

# Batches that are kept ready for each worker: torch's default, and what everyone gets who has such a number.
_AHEAD: Final = 2


class _Loop:
    def __init__(self, job: Job) -> None:
        self._batches = Batches(job)

    def epochs(self) -> Iterator[Iterable[Any]]:
        return (map(self._batches, self._batches.chunks()) for _ in itertools.repeat(None))

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


class _Threads:
    """A thread pool that is kept two batches a thread ahead, as deep as torch's default."""

    def __init__(self, job: Job) -> None:
        self._batches = Batches(job)
        self._ahead = _AHEAD * job.workers
        self._pool = ThreadPoolExecutor(job.workers)

    def _epoch(self) -> Iterator[Any]:
        waiting: deque[Future[Any]] = deque()
        for chunk in self._batches.chunks():
            waiting.append(self._pool.submit(self._batches, chunk))
            if len(waiting) > self._ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def epochs(self) -> Iterator[Iterable[Any]]:
        return (self._epoch() for _ in itertools.repeat(None))

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


# ---------------------------------------------------------------- torch


class _TorchItems:
    """A map-style dataset over the job's items."""

    def __init__(self, job: Job, items: Any = None) -> None:
        self._items, self._load = job.items if items is None else items, job.load
        self._from_numpy = importlib.import_module("torch").from_numpy

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        sample = self._load(self._items[index])
        if isinstance(sample, tuple):
            return tuple(self._from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in sample)
        return self._from_numpy(sample)


def _torch_text(job: Job) -> Any:
    """An iterable-style dataset over the lines of a file, which each worker reads; as in torch's own example, it keeps
    those that are its share. By whole batches: else each worker would end on a batch that is not full."""
    data: Any = importlib.import_module("torch.utils.data")
    from_numpy = importlib.import_module("torch").from_numpy

    class Text(data.IterableDataset):  # type: ignore[misc]  # frameworks carry no types here
        def __iter__(self) -> Iterator[Any]:
            info = data.get_worker_info()
            first, step = (0, 1) if info is None else (info.id, info.num_workers)
            for lines in itertools.islice(Batches(job).chunks(), first, None, step):
                for line in lines:
                    yield from_numpy(job.load(line))

    return Text()


class _LineIndex:
    """The lines of a file that were found beforehand, by number; each process opens it once."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: int | None = None
        ends, at = [0], 0
        whole = []
        with open(path, "rb") as file:
            for line in file:
                at += len(line)
                ends.append(at)
                if line.strip():
                    whole.append(len(ends) - 2)
        self._starts, self._ends = np.array(ends)[whole], np.array(ends)[1:][whole]

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> str:
        if self._file is None:
            self._file = os.open(self._path, os.O_RDONLY)  # as long as the worker lives
        start = int(self._starts[index])
        # Not seek and read: threads share the file, and its position.
        return os.pread(self._file, int(self._ends[index]) - start, start).decode().strip()


class _TorchColumns:
    """A dataset that gathers a whole batch at once: ``__getitems__``, which the fetcher prefers when it is there."""

    def __init__(self, job: Job) -> None:
        self._batches, self._rows = Batches(job), job.samples
        self._from_numpy = importlib.import_module("torch").from_numpy

    def __len__(self) -> int:
        return self._rows

    def __getitems__(self, indices: list[int]) -> Any:
        # Gathered by numpy: with a list of ints torch's own indexing takes three times as long.
        return tuple(self._from_numpy(leaf) for leaf in self._batches(np.array(indices)))


def _as_is(batch: Any) -> Any:
    return batch


def _padded(samples: list[Any]) -> Any:
    torch: Any = importlib.import_module("torch")
    lengths = torch.tensor([len(sample) for sample in samples])
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True), lengths


class _Torch:
    def __init__(
        self, job: Job, *, workers: int | None = None, fresh: bool = False, whole_batches: bool = False,
        indexed: bool = False, module: str = "torch.utils.data", loader: str = "DataLoader",
    ) -> None:  # fmt: skip
        torch: Any = importlib.import_module("torch")
        dataset: Any
        if job.text is not None:
            dataset = _TorchItems(job, _LineIndex(job.text)) if indexed else _torch_text(job)
        elif whole_batches:
            dataset = _TorchColumns(job)
        elif job.arrays is not None and job.finish is None:
            dataset = importlib.import_module("torch.utils.data").TensorDataset(*map(torch.from_numpy, job.arrays))
        else:
            dataset = _TorchItems(job)
        workers = job.workers if workers is None else workers
        self._loader = getattr(importlib.import_module(module), loader)(
            dataset,
            batch_size=job.batch_size,
            shuffle=job.shuffle or None,  # an iterable-style dataset may not even hear of it
            num_workers=workers,
            persistent_workers=workers > 0 and not fresh,
            collate_fn=_as_is if whole_batches else _padded if job.pad else None,
            generator=torch.Generator().manual_seed(job.seed),
        )

    def epochs(self) -> Iterator[Iterable[Any]]:
        return itertools.repeat(self._loader)

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        del self._loader  # its workers end with the iterator that it keeps


# ---------------------------------------------------------------- tf.data


class _TfData:
    def __init__(self, job: Job) -> None:
        tf: Any = importlib.import_module("tensorflow")
        data = tf.data.Dataset
        calls = job.workers if job.waiting else tf.data.AUTOTUNE
        side_by_side = {"num_parallel_calls": calls, "deterministic": True}

        def by_numpy(function: Any, example: Any, *given: Any) -> Any:
            form = [tf.as_dtype(np.asarray(leaf).dtype) for leaf in _leaves(example)]
            made = tf.numpy_function(lambda *leaves: _leaves(function(*leaves)), list(given), form)
            return tuple(made) if isinstance(example, tuple) else made[0]

        if job.text is not None:
            lines = tf.data.TextLineDataset(job.text).map(tf.strings.strip)
            lines = lines.filter(lambda line: tf.strings.length(line) > 0)
            load = functools.partial(
                by_numpy, lambda batch: stacked([job.load(line.decode()) for line in batch]), job.load("line")
            )
            dataset = lines.batch(job.batch_size).map(load, **side_by_side)
        elif job.arrays is not None:
            dataset = data.from_tensor_slices(job.arrays)
            if job.shuffle:
                dataset = dataset.shuffle(job.samples, seed=job.seed)
            dataset = dataset.batch(job.batch_size)
            if (finish := job.finish) is not None:
                example = finish(tuple(column[:1] for column in job.arrays))
                dataset = dataset.map(
                    functools.partial(by_numpy, lambda *leaves: finish(leaves), example), **side_by_side
                )
        else:
            places = data.range(len(job.items))
            if job.shuffle:
                places = places.shuffle(len(job.items), seed=job.seed)
            load = functools.partial(by_numpy, lambda place: job.load(job.items[place]), job.load(job.items[0]))
            if not job.costly:
                load = functools.partial(
                    by_numpy, lambda batch: stacked([job.load(job.items[i]) for i in batch]), job.load(job.items[0])
                )
                places = places.batch(job.batch_size)
            dataset = places.map(load, **side_by_side)
            dataset = dataset.batch(job.batch_size) if job.costly else dataset
        self._dataset = dataset.prefetch(tf.data.AUTOTUNE)

    def epochs(self) -> Iterator[Iterable[Any]]:
        return (self._dataset.as_numpy_iterator() for _ in itertools.repeat(None))

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        del self._dataset


def _leaves(sample: Any) -> list[Any]:
    return list(sample) if isinstance(sample, tuple) else [sample]


# ---------------------------------------------------------------- tinyloader


class _TinyLoads:
    """A tinyloader ``Loader``, by duck type: its base class is abstract methods only, and needs tinygrad to be seen."""

    def __init__(self, job: Job, *, copy: bool) -> None:
        self._batches, self._copy = Batches(job), copy

    def make_request(self, item: Any) -> Any:
        return item

    def load(self, request: Any) -> tuple[Any, ...]:
        batch = self._batches(request)
        return batch if isinstance(batch, tuple) else (batch,)

    def post_process(self, response: tuple[Any, ...]) -> tuple[Any, ...]:
        # To arrays, not to tinygrad tensors: otherwise a compiler is measured. Its documentation asks for a copy of
        # what lies in shared memory. In 0.1.5 the buffer is given back to the workers before this is called, so that a
        # copy may already hold the next sample: the check sees it.
        return tuple(np.array(leaf) for leaf in response) if self._copy else response

    def shutdown(self) -> None:
        pass


class _Tinyloader:
    def __init__(self, job: Job, *, shared: bool, module: str = "tinyloader.loader") -> None:
        self._job, self._shared = job, shared
        self._load_with_workers = importlib.import_module(module).load_with_workers

    def _epoch(self) -> Iterator[Any]:
        loader = _TinyLoads(self._job, copy=self._shared)
        with contextlib.ExitStack() as stack:
            if self._shared:
                # tinyloader 0.1.5 ends with queue.Queue.shutdown(), which Python has from 3.13 on.
                stack.enter_context(contextlib.suppress(AttributeError))
            batches = stack.enter_context(
                self._load_with_workers(
                    loader, Batches(self._job).chunks(), self._job.workers, shared_memory_enabled=self._shared
                )
            )
            for batch in batches:
                yield batch[0] if len(batch) == 1 else batch

    def epochs(self) -> Iterator[Iterable[Any]]:
        return (self._epoch() for _ in itertools.repeat(None))

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


# ---------------------------------------------------------------- grain


class _Grain:
    """``counted``: as many loads at a time as there are workers."""

    def __init__(self, job: Job, *, processes: bool, counted: bool = True) -> None:
        grain: Any = importlib.import_module("grain")
        dataset = grain.MapDataset.source(job.items if job.text is None else _LineIndex(job.text))
        if job.shuffle:
            dataset = dataset.shuffle(seed=job.seed)
        dataset = dataset.map(job.load).batch(job.batch_size, batch_fn=stacked)
        self._length = len(dataset)
        dataset = dataset.repeat(job.most_epochs + 3)
        options = grain.ReadOptions()
        if job.arrays is not None:
            options.num_threads = 0  # its own advice for data that is in memory
        elif counted:
            options.num_threads = 1 if processes else job.workers
            options.prefetch_buffer_size = _AHEAD * options.num_threads
        # Elements are whole batches here: 500 of the larger ones are more than there is memory.
        room = job.budget_bytes // (job.batch_size * job.sample_bytes * (job.workers if processes else 1))
        options.prefetch_buffer_size = max(options.num_threads, min(options.prefetch_buffer_size, room), 1)
        batches = dataset.to_iter_dataset(options)
        if processes:
            crew = grain.MultiprocessingOptions(num_workers=job.workers, per_worker_buffer_size=_AHEAD)
            batches = batches.mp_prefetch(crew)
        self._batches = iter(batches)

    def epochs(self) -> Iterator[Iterable[Any]]:
        return (itertools.islice(self._batches, self._length) for _ in itertools.repeat(None))

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._batches.close()


# ---------------------------------------------------------------- spdl


class _Chunks:
    """The items of each batch, anew whenever it is iterated."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self._batches.chunks()


class _Spdl:
    def __init__(self, job: Job, *, processes: bool) -> None:
        builder: Any = importlib.import_module("spdl.pipeline").PipelineBuilder()
        workers = job.workers
        self._pool = ProcessPoolExecutor(workers) if processes else None
        how: dict[str, Any] = {"concurrency": workers, "output_order": "input"}
        if processes:
            how["executor"] = self._pool
        batches = Batches(job)
        if job.waiting:  # a task a sample, so that each of them is waited for alone; else one a batch, as for threads
            builder = builder.add_source(job.items, continuous=True).pipe(job.load, **how)
            builder = builder.aggregate(job.batch_size).pipe(stacked, output_order="input")
        else:
            builder = builder.add_source(_Chunks(batches), continuous=True).pipe(batches, **how)
        self._pipeline = builder.add_sink(_AHEAD * workers).build(num_threads=workers)
        self._pipeline.start()

    def epochs(self) -> Iterator[Iterable[Any]]:
        return (self._pipeline.get_iterator() for _ in itertools.repeat(None))

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._pipeline.stop()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


class _ShareOfBatches:
    """Every n-th batch, loaded: what one of n subprocesses iterates."""

    def __init__(self, batches: Batches, first: int, step: int) -> None:
        self._batches, self._first, self._step = batches, first, step

    def __iter__(self) -> Iterator[Any]:
        return map(self._batches, itertools.islice(self._batches.chunks(), self._first, None, self._step))


class _SpdlArena:
    def __init__(self, job: Job) -> None:
        pipeline: Any = importlib.import_module("spdl.pipeline")
        segment_bytes = job.batch_size * job.sample_bytes + 2**16  # and what aligns each array
        self._parts = [
            pipeline.iterate_in_subprocess(
                functools.partial(_ShareOfBatches, Batches(job), first, job.workers),
                buffer_size=_AHEAD,
                # Besides those that wait: one that is written, one that the consumer holds.
                arena=pipeline.SharedMemorySegmentPool(segment_bytes, _AHEAD + 2),
            )
            for first in range(job.workers)
        ]

    def _epoch(self) -> Iterator[Any]:
        parts = [iter(part) for part in self._parts]
        ended = object()
        for part in itertools.cycle(parts):
            # Not held here while the next is asked for: it would keep its segment.
            if (batch := next(part, ended)) is ended:
                break
            yield batch
            del batch
        for part in parts:  # the others end too; an iterator that is left in the middle is another test
            next(part, ended)

    def epochs(self) -> Iterator[Iterable[Any]]:
        return (self._epoch() for _ in itertools.repeat(None))

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._parts.clear()


_STATEFUL: Final = {"module": "torchdata.stateful_dataloader", "loader": "StatefulDataLoader"}


def _torch(name: str, title: str, needs: tuple[str, ...] = ("torch",), **how: Any) -> Contender:
    by: Any = "itself" if how.get("workers") == 0 else "process"
    return Contender(name, title, functools.partial(_Torch, **how), by, needs)


def _tiny(name: str, title: str, *, shared: bool) -> Contender:
    return Contender(name, title, functools.partial(_Tinyloader, shared=shared), "process", ("tinyloader.loader",))


def through_penstock(job: Job) -> Running:
    """tinyloader's interface, as Penstock has it."""
    return _Tinyloader(job, shared=False, module="penstock.compat.tinyloader")


PEERS: Final[tuple[Contender, ...]] = (
    Contender("loop", "a plain loop", _Loop, "itself"),
    Contender("threads", "a thread pool", _Threads, "thread"),
    _torch("torch-0", "torch DataLoader, no workers", workers=0),
    _torch("torch", "torch DataLoader, persistent workers"),
    _torch("torch-fresh", "torch DataLoader, new workers each epoch", fresh=True),
    _torch("torch-4", "torch DataLoader, four persistent workers", workers=4),
    _torch("torch-lines", "torch DataLoader, workers, by line index", indexed=True),
    _torch("torch-getitems", "torch DataLoader, no workers, __getitems__", workers=0, whole_batches=True),
    _torch("torch-stateful", "torchdata StatefulDataLoader, persistent workers", ("torch", "torchdata"), **_STATEFUL),
    Contender("tf-data", "tf.data, parallel calls", _TfData, "thread", ("tensorflow",)),
    _tiny("tinyloader", "tinyloader, worker processes", shared=False),
    _tiny("tinyloader-shm", "tinyloader, workers, shared memory", shared=True),
    Contender("grain", "Grain, worker processes", functools.partial(_Grain, processes=True), "process", ("grain",)),
    Contender("grain-thread", "Grain, threads", functools.partial(_Grain, processes=False), "thread", ("grain",)),
    Contender("grain-default", "Grain, worker processes of 16 threads each",
              functools.partial(_Grain, processes=True, counted=False), "process", ("grain",)),
    Contender("spdl", "SPDL, threads", functools.partial(_Spdl, processes=False), "thread", ("spdl.pipeline",)),
    Contender("spdl-process", "SPDL, a pool of processes", functools.partial(_Spdl, processes=True), "process",
              ("spdl.pipeline",)),
    Contender("spdl-arena", "SPDL, subprocesses with an arena", _SpdlArena, "process", ("spdl.pipeline",)),
)  # fmt: skip
