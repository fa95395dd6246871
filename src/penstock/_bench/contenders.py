"""Who reads a workload: Penstock and its peers, each set up as its own documentation advises.

``open`` gets a ``Job`` in the trial process and gives something with ``epochs()``: an endless iterator of passes, each
an iterable of batches. The time from calling ``open`` to the first batch is the contender's; imports of its framework
are not: they are named in ``needs`` and paid before. A contender keeps what it can between epochs (its workers, where
it has a switch for that), because a training run would.

Everything a worker may have to unpickle is a top-level name here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Protocol

import numpy as np

from penstock._bench import watch
from penstock._bench.workloads import Job, TextLines, TokenCheck

__all__ = ["CONTENDERS", "Contender", "Running"]


class Running(Protocol):
    """A contender at work on a job."""

    def epochs(self) -> Iterator[Iterable[Any]]: ...
    def facts(self) -> dict[str, Any]:
        """What the contender says about itself, for the record."""

    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Contender:
    """A way to get batches."""

    name: str
    title: str
    open: Callable[[Job], Running]
    needs: tuple[str, ...] = ()
    """Modules that must be there; without them the contender is skipped by name."""
    ours: bool = False
    """Ratios are given of these to the others."""


def _stacked(samples: list[Any]) -> Any:
    if isinstance(samples[0], tuple):
        return tuple(_stacked(list(column)) for column in zip(*samples, strict=True))
    if len(samples) == 1 and isinstance(samples[0], np.ndarray):
        return samples[0][None]  # nobody writes a loop that copies 24 MiB to add an axis
    return np.stack(samples)


class _Batches:
    """Loads a whole batch: what a loop, a thread or a pool of processes does at a time."""

    def __init__(self, job: Job) -> None:
        self._load, self._size, self._items = job.load, job.batch_size, job.items

    def __call__(self, items: Any) -> Any:
        return _stacked([self._load(item) for item in items])

    def chunks(self) -> Iterator[Any]:
        if isinstance(self._items, TextLines):
            return self._of_text(iter(self._items))
        return (self._items[start : start + self._size] for start in range(0, len(self._items), self._size))

    def _of_text(self, lines: Iterator[str]) -> Iterator[Any]:
        while chunk := list(itertools.islice(lines, self._size)):
            yield chunk


class _Loop:
    def __init__(self, job: Job) -> None:
        self._batches = _Batches(job)

    def epochs(self) -> Iterator[Iterable[Any]]:
        return (map(self._batches, self._batches.chunks()) for _ in itertools.repeat(None))

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


class _Threads:
    """A thread pool that is kept two batches a thread ahead, as deep as torch's default."""

    def __init__(self, job: Job) -> None:
        self._batches = _Batches(job)
        self._ahead = 2 * job.workers
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


# ---------------------------------------------------------------- penstock


class _Penstock:
    def __init__(self, job: Job, feed: Any) -> None:
        self._job, self._feed = job, feed
        self._cpu_s = watch.cpu_s(os.getpid()) or 0.0

    def epochs(self) -> Iterator[Iterable[Any]]:
        # One more than is asked for: the feed may not know that the pass it reads ahead for is the last.
        return iter(self._feed.epochs(self._job.most_epochs + 3))

    def facts(self) -> dict[str, Any]:
        plan, stats = self._feed.plan, self._feed.stats
        return {
            "planned_bytes": plan.total_bytes, "slots": plan.slots, "workers": plan.workers,
            "peak_bytes": stats.peak_bytes, "copied": stats.copied, "wait_s": stats.wait_s,
            "restarts": stats.restarts, "measure_s": stats.measure_s,
            "cpu_s": (watch.cpu_s(os.getpid()) or 0.0) - self._cpu_s,
        }  # fmt: skip

    def close(self) -> None:
        self._feed.close()


def _open_penstock(job: Job, *, executor: str = "process", into: bool = False) -> Running:
    # By name: which of these exist is the feed's affair, and a missing one is this contender's failure alone.
    penstock: Any = importlib.import_module("penstock")
    options: dict[str, Any] = {
        "batch_size": job.batch_size,
        "memory": job.budget_bytes,
        "shuffle": job.shuffle,
        "seed": job.seed,
        "collate_fn": "pad" if job.pad else None,
    }
    if job.arrays is not None:
        return _Penstock(job, penstock.Feed(penstock.arrays(*job.arrays), **options))
    if job.source is not None:
        return _Penstock(job, penstock.Feed(job.source(), num_workers=job.workers, executor=executor, **options))
    load = penstock.into(job.spec)(job.load_into) if into else job.load
    items = penstock.lines(job.text) if job.text is not None else job.items
    return _Penstock(job, penstock.Feed(items, load, num_workers=job.workers, executor=executor, **options))


def _open_penstock_blocks(job: Job) -> Running:
    penstock: Any = importlib.import_module("penstock")
    return _open_penstock(dataclasses.replace(job, shuffle=penstock.Blocks()))


def _open_penstock_into(job: Job) -> Running:
    return _open_penstock(job, into=True)


def _open_penstock_thread(job: Job) -> Running:
    return _open_penstock(job, executor="thread", into=job.load_into is not None)


def _open_penstock_unheld(job: Job) -> Running:
    """Without what holds the budget, in this process and for good: no limit in workers, no look at their memory."""
    engine: Any = importlib.import_module("penstock._core.engine")
    crew: Any = importlib.import_module("penstock._core.crew")
    if crew.portable_only():
        kind: Any = importlib.import_module("penstock._core.crew.portable").PortableCrew
    else:
        kind = importlib.import_module("penstock._core.crew.processes").ProcessCrew
    start = kind.start
    engine.MEASURE_S = float("inf")
    kind.start = lambda self, setup: start(self, dataclasses.replace(setup, growth_bytes=0))
    return _open_penstock(job)


# ---------------------------------------------------------------- torch


class _TorchItems:
    """A map-style dataset over the job's items."""

    def __init__(self, job: Job) -> None:
        self._items, self._load = job.items, job.load
        self._from_numpy = importlib.import_module("torch").from_numpy

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        sample = self._load(self._items[index])
        if isinstance(sample, tuple):
            return tuple(self._from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in sample)
        return self._from_numpy(sample)


def _torch_text(job: Job) -> Any:
    """An iterable-style dataset over the lines of a file, which each worker reads; as torch's own example, it keeps
    those that are its share."""
    data: Any = importlib.import_module("torch.utils.data")
    from_numpy = importlib.import_module("torch").from_numpy
    assert isinstance(job.check, TokenCheck)
    job.check.in_order = False  # a batch is made of one worker's lines

    class Text(data.IterableDataset):  # type: ignore[misc]  # frameworks carry no types here
        def __iter__(self) -> Iterator[Any]:
            info = data.get_worker_info()
            first, step = (0, 1) if info is None else (info.id, info.num_workers)
            for line in itertools.islice(job.items, first, None, step):
                yield from_numpy(job.load(line))

    return Text()


class _TorchLines:
    """A map-style dataset over a file whose lines were found beforehand; each worker opens it once."""

    def __init__(self, job: Job) -> None:
        assert job.text is not None
        self._path, self._load = job.text, job.load
        self._file: Any = None
        self._from_numpy = importlib.import_module("torch").from_numpy
        starts, at = [], 0
        with open(job.text, "rb") as file:
            for line in file:
                if line.strip():
                    starts.append(at)
                at += len(line)
        self._starts = np.array(starts)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Any:
        if self._file is None:
            self._file = open(self._path, "rb")  # noqa: SIM115 - as long as the worker lives
        self._file.seek(self._starts[index])
        return self._from_numpy(self._load(self._file.readline().decode().strip()))


class _TorchColumns:
    """A dataset that gathers a whole batch at once: ``__getitems__``, which the fetcher prefers when it is there."""

    def __init__(self, columns: tuple[Any, ...]) -> None:
        self._columns = columns
        self._from_numpy = importlib.import_module("torch").from_numpy

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitems__(self, indices: list[int]) -> Any:
        # Gathered by numpy: with a list of ints torch's own indexing takes three times as long.
        rows = np.array(indices)
        return tuple(self._from_numpy(column[rows]) for column in self._columns)


def _as_is(batch: Any) -> Any:
    return batch


def _padded(samples: list[Any]) -> Any:
    torch: Any = importlib.import_module("torch")
    lengths = torch.tensor([len(sample) for sample in samples])
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True), lengths


class _Torch:
    def __init__(self, job: Job, *, workers: int, whole_batches: bool = False, indexed: bool = False) -> None:
        torch: Any = importlib.import_module("torch")
        data: Any = importlib.import_module("torch.utils.data")
        dataset: Any
        if job.text is not None:
            dataset = _TorchLines(job) if indexed else _torch_text(job)
        elif job.arrays is None:
            dataset = _TorchItems(job)
        elif whole_batches:
            dataset = _TorchColumns(job.arrays)
        else:
            dataset = data.TensorDataset(*map(torch.from_numpy, job.arrays))
        self._loader = data.DataLoader(
            dataset,
            batch_size=job.batch_size,
            shuffle=job.shuffle or None,  # an iterable-style dataset may not even hear of it
            num_workers=workers,
            persistent_workers=workers > 0,
            collate_fn=_as_is if whole_batches else _padded if job.pad else None,
            generator=torch.Generator().manual_seed(job.seed),
        )

    def epochs(self) -> Iterator[Iterable[Any]]:
        return itertools.repeat(self._loader)

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        del self._loader  # its workers end with the iterator that it keeps


def _open_torch_alone(job: Job) -> Running:
    return _Torch(job, workers=0)


def _open_torch_workers(job: Job) -> Running:
    return _Torch(job, workers=job.workers)


def _open_torch_four(job: Job) -> Running:
    return _Torch(job, workers=4)


def _open_torch_lines(job: Job) -> Running:
    return _Torch(job, workers=job.workers, indexed=True)


def _open_torch_getitems(job: Job) -> Running:
    return _Torch(job, workers=0, whole_batches=True)


# ---------------------------------------------------------------- tinyloader


class _TinyLoads:
    """A tinyloader ``Loader``, by duck type: its base class is abstract methods only, and needs tinygrad to be seen."""

    def __init__(self, job: Job, *, copy: bool) -> None:
        self._batches, self._copy = _Batches(job), copy

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
                    loader, _Batches(self._job).chunks(), self._job.workers, shared_memory_enabled=self._shared
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


def _open_tinyloader(job: Job) -> Running:
    return _Tinyloader(job, shared=False)


def _open_tinyloader_shared(job: Job) -> Running:
    return _Tinyloader(job, shared=True)


def _open_tinyloader_through_penstock(job: Job) -> Running:
    return _Tinyloader(job, shared=False, module="penstock.compat.tinyloader")


CONTENDERS: Final = {
    contender.name: contender
    for contender in (
        Contender("penstock", "Penstock, worker processes", _open_penstock, ours=True),
        Contender("penstock-into", "Penstock, load writes into the slot", _open_penstock_into, ours=True),
        Contender("penstock-thread", "Penstock, threads that write into the slot", _open_penstock_thread, ours=True),
        Contender("penstock-blocks", "Penstock, shuffled in blocks", _open_penstock_blocks, ours=True),
        Contender("penstock-unheld", "Penstock, its budget not enforced", _open_penstock_unheld, ours=True),
        Contender(
            "penstock-tinyloader", "tinyloader's interface on Penstock", _open_tinyloader_through_penstock, ours=True
        ),
        Contender("loop", "a plain loop", _Loop),
        Contender("threads", "a thread pool", _Threads),
        Contender("torch-0", "torch DataLoader, no workers", _open_torch_alone, ("torch",)),
        Contender("torch", "torch DataLoader, persistent workers", _open_torch_workers, ("torch",)),
        Contender("torch-4", "torch DataLoader, four persistent workers", _open_torch_four, ("torch",)),
        Contender("torch-lines", "torch DataLoader, workers, by line index", _open_torch_lines, ("torch",)),
        Contender("torch-getitems", "torch DataLoader, no workers, __getitems__", _open_torch_getitems, ("torch",)),
        Contender("tinyloader", "tinyloader, worker processes", _open_tinyloader, ("tinyloader.loader",)),
        Contender(
            "tinyloader-shm", "tinyloader, workers, shared memory", _open_tinyloader_shared, ("tinyloader.loader",)
        ),
    )
}
