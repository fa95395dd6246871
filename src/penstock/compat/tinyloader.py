"""tinyloader's interface on top of a feed: ``from penstock.compat.tinyloader import ...`` is all that changes.

What a ``Loader`` returns crosses from the worker through a slot, whatever it is: its arrays lie there as raw bytes, and
only what is left of it (shapes, dtypes, other objects) is pickled. The arrays that ``post_process`` gets are views of
the slot, which is used again when the last of them is gone and not before.

Runs in the parent, except ``_Load``, which runs where items are loaded. Imports tinygrad when a tensor is made.
"""

from __future__ import annotations

import abc
import io
import pickle
from collections.abc import Generator, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import numpy as np

from penstock import Feed, FeedClosed, LoadError
from penstock._core.errors import said, shown
from penstock._core.options import check_count
from penstock.compat.tinyloader_blocks import (
    LoadRequestSharedBuffer,
    MemoryPool,
    SharedBuffer,
    SharedNDArray,
    init_worker,
    share_ndarray,
)
from penstock.compat.wording import USE_OTHER, Wording

if TYPE_CHECKING:
    from multiprocessing.managers import SharedMemoryManager

    from penstock._core.budget import Size

__all__ = [
    "LoadRequestSharedBuffer",
    "Loader",
    "Loading",
    "MemoryPool",
    "SharedBuffer",
    "SharedMemoryShim",
    "SharedNDArray",
    "init_worker",
    "load",
    "load_with_workers",
    "share_ndarray",
]


_WORDS: Final = Wording(
    budget=(
        (r"\bnum_workers\b", "num_worker"),
        (r' or executor="thread"(?= with this budget)', ""),
        (r", or with this budget", ""),
        (r' \(cast="float16", smaller shapes\)', ""),
        (r"^a collated batch takes", "a sample takes"),
        (r", or a smaller batch_size$", ", or load smaller samples"),
    ),
    load=(
        (r', or leave such items out with on_error="skip"$', ""),
        (
            r": give more memory or fewer workers, a smaller batch_size, or let load make smaller temporaries\)$",
            ": give more memory, a smaller num_worker, or let load make smaller temporaries)",
        ),
        (r"run with num_workers=0 to see what happens in load$", "run with num_worker=0 to see what happens in load"),
    ),
    start=(
        (r"^load cannot be sent", "the loader cannot be sent"),
        (USE_OTHER, ", or use num_worker=0"),
        (r"give a smaller num_workers, or use num_worker=0$", "give a smaller num_worker, or use num_worker=0"),
        (
            r"^items like (.*): items are identities \(paths, keys, indices\) that can be pickled",
            r"the request for \1: make_request has to return what can be pickled, such as a path",
        ),
    ),
)
_OVER: Final = "load_with_workers goes through its items once, and this time it is over: call it again for another"


class Loader(abc.ABC):
    """How items become samples; subclass it and write ``load``."""

    def make_request(self, item: Any) -> Any:
        """What is sent to a worker for an item; called in your process, in the order of the items. The item itself."""
        return item

    @abc.abstractmethod
    def load(self, request: Any) -> Any:
        """The sample of a request, mostly a tuple of arrays; called in a worker process."""

    def post_process(self, response: Any) -> Any:
        """What the loop gets of a sample; called in your process. Each array as a realized tinygrad tensor.

        The arrays of ``response`` may lie in shared memory. They stay right for as long as anything refers to them, so
        a copy is needed only to free that memory early.
        """
        if isinstance(response, tuple | list):
            return tuple(map(_tensors, response))
        return _tensors(response)

    def shutdown(self) -> None:  # noqa: B027 - nothing to do unless a loader has something
        """Called once in your process when the loading is over, also when it was left early or failed."""


class SharedMemoryShim(Loader):
    """A loader whose samples come through shared memory; here all of them do, so it only names the number of blocks.

    ``smm`` is not used: a feed has memory of its own, without a name and without a process that looks after it. With
    ``memory_pool_block_count=None`` the plan decides, from the budget and the number of workers.
    """

    def __init__(
        self,
        loader: Loader,
        smm: SharedMemoryManager | None = None,  # noqa: ARG002 - tinyloader's interface
        memory_pool_block_count: int | None = None,
    ) -> None:
        _check_loader(loader)
        check_count("memory_pool_block_count", memory_pool_block_count, least=1, optional=True)
        self.loader = loader
        self.memory_pool_block_count = memory_pool_block_count

    def make_request(self, item: Any) -> Any:
        """What the wrapped loader makes of it."""
        return self.loader.make_request(item)

    def load(self, request: Any) -> Any:
        """What the wrapped loader loads."""
        return self.loader.load(request)

    def post_process(self, response: Any) -> Any:
        """What the wrapped loader makes of it."""
        return self.loader.post_process(response)

    def shutdown(self) -> None:
        """Tell the wrapped loader."""
        self.loader.shutdown()


def _tensors(value: Any) -> Any:
    """A tensor of each array, also of those in lists, tuples and dicts."""
    if isinstance(value, dict):
        return {key: _tensors(one) for key, one in value.items()}
    if isinstance(value, list):
        return list(map(_tensors, value))
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(map(_tensors, value))
    return _tensor(value)


def load(loader: Loader, items: Iterable[Any]) -> Generator[Any, None, None]:
    """Load one item after the other in this process, each when it is asked for."""
    _check_loader(loader)
    # Nothing of a sample has a name here: it would be held while the loop works on it.
    return (loader.post_process(_loaded(loader, asked)) for asked in _asked(loader, items))


def load_with_workers(
    loader: Loader,
    items: Iterable[Any],
    num_worker: int | None = None,
    shared_memory_enabled: bool = False,  # noqa: ARG001 - tinyloader's interface
    memory_pool_block_count: int | None = None,
    *,
    memory: Size | None = None,
) -> Loading:
    """Load items in worker processes, ahead of the loop and in order; iterate it, or use it in a ``with`` block.

    ``num_worker`` is the number of processes; None lets the plan decide, 0 loads in this process. All samples come
    through shared memory, so ``shared_memory_enabled`` changes nothing. ``memory_pool_block_count`` is the most samples
    that lie there at once (at least 2); ``memory`` is the budget for shared memory and workers together, as a
    ``Feed`` takes it. Items are drawn only as far ahead as there are free blocks, so they may be an endless generator.
    """
    _check_loader(loader)
    check_count("num_worker", num_worker, least=0, optional=True)
    check_count("memory_pool_block_count", memory_pool_block_count, least=1, optional=True)
    if memory_pool_block_count is None and isinstance(loader, SharedMemoryShim):
        memory_pool_block_count = loader.memory_pool_block_count
    feed = Feed(
        _asked(loader, iter(items)),
        _Load(loader),
        batch_size=1,
        collate_fn=_single,  # of one sample, so that no axis is added to its arrays, and each may have its own form
        num_workers=num_worker,
        memory=memory,
    )
    if memory_pool_block_count is not None:
        feed._limit_slots(memory_pool_block_count)
    return Loading(loader, feed)


def _check_loader(loader: Any) -> None:
    """Anything with a loader's methods will do, whatever it is a subclass of."""
    if isinstance(loader, type):
        raise TypeError(f"loader={loader.__name__} is a class: give an instance of it, {loader.__name__}()")
    methods = ("make_request", "load", "post_process", "shutdown")
    if missing := [name for name in methods if not callable(getattr(loader, name, None))]:
        raise TypeError(f"loader={shown(loader, 100)} has no {', '.join(missing)}: give a subclass of Loader")


class Loading:
    """Items that are being loaded by workers; made by ``load_with_workers``."""

    def __init__(self, loader: Loader, feed: Feed) -> None:
        self._loader = loader
        self._closed = False
        self._entered = False
        self._over = False
        self._results: ref[Generator[Any, None, None]] | None = None
        self.feed = feed
        """The feed below it, with its ``plan`` and ``stats``."""

    def __iter__(self) -> Generator[Any, None, None]:
        """What ``post_process`` makes of each item, in order; always the same generator, until it is over."""
        if self._over or self._closed:
            raise FeedClosed(_OVER)
        results = None if self._results is None else self._results()
        if results is None:
            results = self._generate()
            self._results = ref(results)  # not held: a loop that is left has to end it
        return results

    def _generate(self) -> Generator[Any, None, None]:
        try:
            # A map holds nothing: the memory of a sample is free as soon as post_process and its result let it go.
            yield from map(self._result, self._packed())
        finally:
            self._over = True
            if not self._entered:
                self.close()

    def _packed(self) -> Generator[tuple[bytes, list[Any]], None, None]:
        """What comes of the feed, and what goes wrong there in the words of this interface."""
        try:
            with _WORDS.spoken():
                yield from self.feed
        except FeedClosed:
            raise FeedClosed(_OVER) from None
        except LoadError as error:
            named = _named(error)
            raise named from named.__cause__

    def __enter__(self) -> Generator[Any, None, None]:
        self._entered = True
        return iter(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the workers and tell the loader; what was handed out stays right."""
        if not self._closed:
            self._closed = True
            self.feed.close()
            self._loader.shutdown()

    def _result(self, packed: tuple[bytes, list[Any]]) -> Any:
        try:
            return self._loader.post_process(_unpacked(*packed))
        except StopIteration as stop:  # it would end the map, and the loop before all items have come
            raise RuntimeError("post_process raised StopIteration: return from it, or raise another error") from stop


# ---------------------------------------------------------------- what travels


class _Asked:
    """A request and the item it is for. Only the request travels: an item need not be possible to pickle."""

    __slots__ = ("item", "request")

    def __init__(self, request: Any, item: Any = None) -> None:
        self.request, self.item = request, item

    def __reduce__(self) -> tuple[type[_Asked], tuple[Any]]:
        return _Asked, (self.request,)

    def __repr__(self) -> str:
        return repr(self.item)  # so that errors name the item


def _asked(loader: Loader, items: Iterable[Any]) -> Iterator[_Asked]:
    for item in items:
        try:
            request = loader.make_request(item)
        except Exception as error:
            raise _failed("make_request", item, error) from error
        yield _Asked(request, item)


def _loaded(loader: Loader, asked: _Asked) -> Any:
    try:
        return loader.load(asked.request)
    except Exception as error:
        raise _failed("load", asked.item, error) from error


class _Load:
    """The load of the feed: a sample in the form in which it lies in a slot."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __call__(self, asked: _Asked) -> _Packed:
        return _Packed(self._loader.load(asked.request))


class _Packed:
    """A pickle of a sample without the memory of its arrays, and that memory.

    An object that no tree library looks into: the arrays of a tree would be copied once more on the way.
    """

    __slots__ = ("head", "memory")

    def __init__(self, sample: Any) -> None:
        pieces: list[pickle.PickleBuffer] = []
        head = io.BytesIO()
        _Pickler(head, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=pieces.append).dump(sample)
        self.head = head.getvalue()
        self.memory = [np.frombuffer(piece.raw(), np.uint8) for piece in pieces]


def _single(samples: list[_Packed]) -> tuple[bytes, list[Any]]:
    """The one sample of a batch, as what may lie in a slot."""
    return samples[0].head, samples[0].memory


class _Pickler(pickle.Pickler):
    """Leaves the memory of every array that has some out of the pickle."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            # numpy itself would put maps and slices, which are not one piece of memory, into the pickle.
            if isinstance(value, np.memmap):
                value = value.view(np.ndarray)
            if type(value) is np.ndarray and not (value.flags.c_contiguous or value.flags.f_contiguous):
                value = np.ascontiguousarray(value)
            return value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _unpacked(head: bytes, memory: list[Any]) -> Any:
    return pickle.loads(head, buffers=memory)


# ---------------------------------------------------------------- what comes of it


def _failed(what: str, item: Any, error: BaseException) -> LoadError:
    told = str(error) if type(error) is LoadError else said(error)  # one that could not travel is told by its words
    return LoadError(f"{what} failed for {shown(item)}: {told}", item=item)


def _named(error: LoadError) -> LoadError:
    """The error of a feed in this interface's terms: the user's item, and no option that is not here."""
    cause = error.__cause__
    if not isinstance(error.item, _Asked):  # not of a load, but of the feed's stream: there _asked says which item
        return cause if isinstance(cause, LoadError) else error
    item = error.item.item
    if type(error) is LoadError and cause is not None and not isinstance(cause, MemoryError):
        named = _failed("load", item, cause)
        named.__cause__ = cause
        return named
    error.item = item
    return error


def _tensor(value: Any) -> Any:
    """A tensor with memory of its own; what no tensor can hold stays what it is."""
    if not isinstance(value, np.ndarray | np.generic) or value.dtype.kind not in "biuf" or value.itemsize > 8:
        return value
    from tinygrad import Tensor

    # tinygrad takes scalars for no data at all, and the bytes of the other byte order for numbers.
    return Tensor(np.asarray(value, value.dtype.newbyteorder("="))).contiguous().realize()
