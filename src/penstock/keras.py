"""The door to Keras 3: a ``keras.utils.PyDataset`` over a feed, for ``fit``, ``evaluate`` and ``predict``.

Keras asks for batches by number, in an order of its own: ``fit`` shuffles the numbers, others count up. ``ds[i]`` is
always batch i of the current epoch, whoever asks. Reading ahead needs to know what is asked next, so the order is
foreseen: Keras draws it with ``random.shuffle`` right after it asked for the number of batches, which can be done
beforehand with the same state. A guess that turns out wrong costs what was read ahead, never a wrong batch.

Runs in the parent. Importing this imports Keras.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import operator
import os
import random
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Literal, Self

import keras
import numpy as np
import optree

from penstock import Blocks, Epoch, Feed, LeaseError, Retry, arrays
from penstock._core.budget import Size
from penstock._core.options import OnError
from penstock._core.patience import users_level
from penstock._core.spec import Cast
from penstock.compat.wording import Wording

__all__ = ["FeedDataset"]

# Threads that ask for neighbouring batches do not come in their order: so many that come before the one asked for are
# kept for those who will ask for them.
EARLY: Final = 4

Batch = tuple[int, int]
"""An epoch and the number of a batch in it."""

_WORDS: Final = Wording(
    budget=(),
    load=(
        (
            r'(to leave such items out:|leave such items out with) on_error="skip"(\)?)$',
            (
                r'\1 FeedDataset.from_feed(Feed(..., on_error="skip")), where load returns the targets too and fit '
                r"needs its steps_per_epoch\2"
            ),
        ),
    ),
    start=(
        (
            r'collate_fn="pad" \(filled up to the longest\) or "list" \(not stacked\)$',
            "padding: fill them up in load, or use FeedDataset.from_feed(Feed(..., collate_fn=...))",
        ),
        (
            r"say how many samples it gives with samples_per_item=n, or None when the number varies$",
            (
                "return one sample, or use FeedDataset.from_feed(Feed(..., samples_per_item=...)), where fit needs its "
                "steps_per_epoch if the number varies"
            ),
        ),
        (r"^the feed was closed: make a new one to go on$", "the dataset was closed: make a new one to go on"),
    ),
)


class FeedDataset(keras.utils.PyDataset):  # type: ignore[misc]  # Keras is Any to the type checker
    """A Keras dataset whose batches are loaded ahead by the workers of a feed, inside its memory budget.

    ``x`` is a sequence of items, such as an array of file names, and ``load`` reads one of them; or ``x`` is the data
    itself (an array, a memory map, or a tree of them), and there is no ``load``. ``y`` and ``sample_weight`` are arrays
    (or trees of them) with one row per item. Without ``y``, a ``load`` may return ``(inputs, targets)`` or ``(inputs,
    targets, sample_weight)``.

    ``ds[i]`` is batch i of the current epoch; ``on_epoch_end``, which Keras calls, begins the next one. With
    ``shuffle`` the samples of all batches are drawn anew for each epoch, from ``seed``. ``fit(shuffle=True)``, Keras'
    default, permutes whole batches on top of that.

    ``memory``, ``num_workers``, ``executor`` and the other arguments are those of ``penstock.Feed``; for its further
    ones make a feed and use ``FeedDataset.from_feed``. ``workers``, ``use_multiprocessing`` and ``max_queue_size`` are
    Keras' own way to read ahead. They are taken so that code which gives them goes on working, and have no effect.
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        *,
        batch_size: int | Literal["max"],
        load: Callable[..., Any] | None = None,
        sample_weight: Any = None,
        shuffle: bool | Blocks = False,
        seed: int = 0,
        memory: Size | None = None,
        num_workers: int | None = None,
        executor: Literal["process", "thread"] = "process",
        drop_last: bool = False,
        cast: Cast = None,
        on_error: OnError = "raise",
        timeout: float | None = None,
        cache: str | os.PathLike[str] | None = None,
        workers: int = 1,
        use_multiprocessing: bool = False,
        max_queue_size: int = 10,
    ) -> None:
        if y is None and sample_weight is not None:
            raise TypeError("sample_weight belongs to targets: give y as well, or let load return all three")
        if on_error == "skip" or (isinstance(on_error, Retry) and on_error.then == "skip"):
            raise ValueError(
                f"on_error={on_error!r} would shift every sample after one that is left out, and batches have numbers "
                "here: let load return its targets too, use FeedDataset.from_feed(Feed(..., on_error=...)), and give "
                "fit its steps_per_epoch, as nobody knows how many batches will be left"
            )
        if cache == "device":
            raise ValueError(
                'cache="device" needs device_memory, which is an argument of Feed: use FeedDataset.from_feed(Feed(..., '
                'cache="device", device_memory=...))'
            )
        beside = tuple(_columns(column) for column in (y, sample_weight) if column is not None)
        items: Any
        if load is None:
            items, beside = arrays(_data(x), *beside), ()
        else:
            if isinstance(x, Mapping):
                raise TypeError(
                    f"x is a {type(x).__name__}, and load takes one item: give x as a sequence of items, such as "
                    "list(zip(*x.values())), and let load take what belongs to one of them; only data without a load "
                    "may be a dict of arrays"
                )
            _check_lengths(len(x), beside)
            # A map is read from its file, in the workers.
            items = arrays(x) if isinstance(x, np.memmap) else x
        if beside and isinstance(shuffle, Blocks):
            raise ValueError(
                "shuffle=Blocks(...) gives batches as they come, not by number, so that y cannot be put beside them: "
                "let load return its targets too, or give x as data without a load"
            )
        feed = Feed(
            items,
            load,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            memory=memory,
            num_workers=num_workers,
            executor=executor,
            drop_last=drop_last,
            cast=cast,
            on_error=on_error,
            timeout=timeout,
            cache=cache,
        )
        self._set_up(feed, beside, own=True)
        super().__init__(workers=1, use_multiprocessing=False, max_queue_size=max_queue_size)
        self._constructing = True
        self.workers = workers
        self.use_multiprocessing = use_multiprocessing
        self._constructing = False

    @classmethod
    def from_feed(cls, feed: Feed) -> Self:
        """A dataset over a feed of your own, whose batches are inputs, (inputs, targets) or (inputs, targets, weights).

        Where batches cannot be had by number (blocks, a stream, ``samples_per_item=None``, ``on_error="skip"``),
        ``ds[i]`` is whatever comes next; what Keras asks for only to build a model comes again. Where nobody knows how
        many there are, the dataset has no length, and after the end the feed begins anew: give ``fit`` its
        ``steps_per_epoch``, or it warns when that happens. A feed that goes on inside an epoch (``load_state_dict``) is
        refused where batches are counted.
        """
        if not isinstance(feed, Feed):
            raise TypeError(f"from_feed takes a penstock.Feed, not a {type(feed).__name__}")
        _check_whole(feed)
        made = cls.__new__(cls)
        made._set_up(feed, (), own=False)
        keras.utils.PyDataset.__init__(made)
        return made

    def _set_up(self, feed: Feed, beside: tuple[Any, ...], *, own: bool) -> None:
        self._feed = feed
        self._own_feed = own  # whoever gave one knows its arguments
        self._beside = beside
        # JAX goes on to the next step before it has read a batch, and holds any number of them; nobody can help it.
        self._runs_ahead = keras.backend.backend() == "jax"
        self._epoch = feed.epoch
        self._turn = threading.Lock()
        self._waiting: set[object] = set()  # one for each thread that waits for its turn
        self._dice: Any = None
        self._since: list[int] = []  # numbers that were asked for since that state was taken
        self._asked = self._told = self._constructing = False
        self._unending = self._warned = False  # whether Keras has no number of steps, and whether that was said
        self._came = 0  # batches of the feed's epoch that came, where only its end tells how many there are
        self._whole = True  # whether that began at its start
        self._early: dict[Batch, Any] = {}
        self._last: Batch = (-1, -1)
        self._shuffled = False
        self._first: tuple[Any, ...] | None = None  # a batch of a stream that was only looked at
        self._run = 0
        self._reading: Epoch | None = None
        self._coming: deque[Batch] = deque()
        self._after: Iterator[Batch] = iter(())

    # ---- what Keras asks

    @property
    def feed(self) -> Feed:
        """The feed that loads the batches, with its ``plan`` and ``stats``."""
        return self._feed

    def __len__(self) -> int:
        """Batches an epoch."""
        return len(self._feed)

    @property
    def num_batches(self) -> int | None:
        """Batches an epoch; None where nobody can know."""
        if not self._feed._options.counts:
            return None
        # What Keras will shuffle their numbers with, if it does, before it asks for the first.
        self._dice, self._since = random.getstate(), []
        return len(self._feed)

    def __getitem__(self, index: Any) -> tuple[Any, ...]:
        """Batch ``index`` of the current epoch; any thread may ask for any."""
        with _WORDS.spoken() if self._own_feed else contextlib.nullcontext():
            return self._batch(operator.index(index))

    def _batch(self, number: int) -> tuple[Any, ...]:
        if not self._feed._options.picks:
            with self._turn:
                return self._next_of_stream(number)
        count = len(self._feed)
        if not -count <= number < count:
            raise IndexError(f"there is no batch {number}: the dataset has {count}")
        number %= count
        me = object()
        self._waiting.add(me)
        with self._turn:
            self._waiting.discard(me)
            epoch, self._asked = self._epoch, True
            batch = self._take((epoch, number))
            if self._dice is not None:
                self._since.append(number)
        if not self._beside:
            return _as_tuple(batch)
        places = self._feed._places(epoch, number)
        return (batch, *(optree.tree_map(lambda column: column[places], tree) for tree in self._beside))

    def _next_of_stream(self, number: int) -> tuple[Any, ...]:
        """Whatever comes next; but to build a model Keras asks for batch 0 and begins again: nothing may be lost."""
        batch, self._first = self._first, None
        if batch is None:
            batch = _as_tuple(self._whatever_comes())
        if number == 0 and _is_building():
            self._first = batch
        self._asked = True
        return batch

    def on_epoch_begin(self) -> None:
        """Only a look at whether Keras knows where its epoch ends."""
        self._unending = not self._feed._options.counts and _is_unending()

    def on_epoch_end(self) -> None:
        """Begin the next epoch, if anything of this one was asked for: Keras calls this twice after a validation."""
        with self._turn:
            self._epoch += self._asked
            self._asked = False
            self._early.clear()
            if self._feed._options.counts and not self._feed._options.picks:
                self._reading = None  # each pass is an epoch of the feed, whole or not

    def close(self) -> None:
        """End the workers; batches that are alive stay right."""
        self._feed.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a FeedDataset cannot be sent to another process: it has workers of its own. Leave Keras' "
            "use_multiprocessing off and set num_workers here"
        )

    # ---- Keras' own workers, which would only wait for ours, and hold ten batches while they do

    @property
    def workers(self) -> int:
        """1: Keras asks for one batch after the other, and the feed reads ahead."""
        return 1

    @workers.setter
    def workers(self, value: int) -> None:
        if value is not None and value > 1:
            self._tell(f"workers={value}")

    @property
    def use_multiprocessing(self) -> bool:
        """False: the workers are the feed's."""
        return False

    @use_multiprocessing.setter
    def use_multiprocessing(self, value: bool) -> None:
        if value:
            self._tell("use_multiprocessing=True")

    def _tell(self, what: str) -> None:
        if not self._told:
            self._told = True
            warnings.warn(
                f"{what} is not used: a FeedDataset reads ahead with worker processes of its own, so that Keras' would "
                "only multiply them. Set num_workers instead",
                stacklevel=3 + self._constructing,
            )

    # ---- batches by number

    def _forget(self) -> None:
        self._reading = None
        self._coming.clear()
        self._after = iter(())

    def _take(self, wanted: Batch) -> Any:
        """This batch, and reading ahead of it."""
        if wanted in self._early:
            return self._early.pop(wanted)
        for last in (False, True):
            try:
                return self._walk(wanted)
            except LeaseError:  # someone iterated the feed itself meanwhile
                self._forget()
                if last:
                    raise
            except BaseException:
                self._forget()  # whatever it was, the next one begins anew
                raise
        raise AssertionError("the second try returns or raises")

    def _walk(self, wanted: Batch) -> Any:
        """Go on to this batch, keeping those on the way for who may ask for them."""
        self._foresee()
        # A batch that a single thread passes over was wrongly foreseen; among several threads it may be another's.
        likely = [batch for batch in self._coming if batch[0] == wanted[0]] if self._waiting else [*self._coming][:1]
        if wanted not in likely or self._coming[0][0] != wanted[0]:
            self._begin(wanted)
        while True:
            batch = self._next()
            if self._last == wanted:
                return batch
            self._early[self._last] = batch
            if len(self._early) > EARLY:
                del self._early[next(iter(self._early))]

    def _next(self) -> Any:
        epoch, _ = self._coming[0]
        if self._reading is None or self._reading.number != epoch:
            if self._reading is not None:
                next(self._reading, None)  # it has no more: now it knows, and the run goes on with the next epoch
            self._reading = self._feed._picked(self._run, epoch)
        batch = next(self._reading)
        self._last = self._coming.popleft()
        return self._own(batch) if self._runs_ahead else batch

    def _own(self, batch: Any) -> Any:
        """A copy, where so many batches are held that the feed would have to copy the next one, and say so."""
        engine = self._feed._engine
        if engine is None or engine.held < max(2, engine.plan.slots - 1):
            return batch
        return optree.tree_map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, batch)

    def _foresee(self) -> None:
        self._coming.extend(itertools.islice(self._after, max(0, 1 + EARLY - len(self._coming))))

    def _begin(self, wanted: Batch) -> None:
        """Begin anew at this batch, with the likeliest order."""
        epoch, number = wanted
        count = len(self._feed)
        order: Iterable[int] = (number,)  # anything may follow
        shuffled, known = False, True
        so_far = [*self._since, number]
        drawn = _shuffled(count, self._dice) if self._dice is not None else []
        if drawn[: len(so_far)] != so_far:
            self._dice, drawn = None, []
        # A first batch that is number 0 begins either order: then the manner of the last pass is the likelier one.
        if drawn and (so_far != [0] or self._shuffled):
            order, shuffled = drawn[len(so_far) - 1 :], True
        elif self._coming and self._coming[0][1] == number:  # the order goes on, only the epoch is another
            old = self._coming[0][0]
            rest = itertools.takewhile(lambda batch: batch[0] == old, itertools.chain(self._coming, self._after))
            order, shuffled = [n for _, n in rest], self._shuffled
        elif number in (0, self._last[1] + 1):
            order = range(number, count)
        else:
            known = False
        self._shuffled = shuffled
        guesses, self._after = itertools.tee(_guesses(order, epoch, count, shuffled=shuffled, goes_on=known))
        self._coming.clear()
        self._reading = None
        self._run = self._feed._pick(guesses)
        self._foresee()

    def _whatever_comes(self) -> Any:
        ended = 0  # batches of an epoch that is over
        for _ in range(2):
            if self._reading is None:
                self._came, self._whole = 0, not any(self._feed._place.resume)
                self._reading = iter(self._feed)
            try:
                batch = next(self._reading)
                self._came += 1
                if ended and self._unending:
                    self._warn_of_no_end(ended)
                return self._own(batch) if self._runs_ahead else batch
            except StopIteration:
                self._reading, ended = None, self._came if self._whole else 0
            except BaseException:
                self._reading = None
                raise
        raise IndexError(
            "the feed has no more batches, as a stream that gives its items once cannot begin anew: tell fit its "
            "steps_per_epoch and epochs, or make the feed of something that can be iterated again"
        )

    def _warn_of_no_end(self, batches: int) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the feed's epoch was over after {batches} batch{'' if batches == 1 else 'es'}, and Keras asks for "
                "more in one epoch of its own, which never ends, as nobody could tell it how many there are: give fit "
                f"steps_per_epoch={batches} (evaluate and predict: steps={batches}, for validation_data: "
                f"validation_steps={batches})",
                stacklevel=users_level(),
            )


def _shuffled(count: int, state: Any) -> list[int]:
    """The numbers of the batches as ``random.shuffle`` would order them in this state."""
    dice = random.Random()
    dice.setstate(state)
    numbers = list(range(count))
    dice.shuffle(numbers)
    return numbers


def _guesses(order: Iterable[int], epoch: int, count: int, *, shuffled: bool, goes_on: bool) -> Iterator[Batch]:
    """What will be asked for: this order, and the epochs after it in the same manner."""
    for number in order:
        yield epoch, number
    while goes_on and count:
        epoch += 1
        for number in _shuffled(count, random.getstate()) if shuffled else range(count):
            yield epoch, number


# ---------------------------------------------------------------- what the user gave


def _as_tuple(batch: Any) -> tuple[Any, ...]:
    return batch if type(batch) is tuple else (batch,)


def _columns(tree: Any) -> Any:
    """Arrays with a row per sample: one, or a dict, tuple or list of them as models with several take them."""
    if isinstance(tree, dict):
        return {key: _columns(value) for key, value in tree.items()}
    if isinstance(tree, tuple | list) and tree and all(getattr(value, "ndim", 0) for value in tree):
        return type(tree)(map(_columns, tree))
    return tree if isinstance(tree, np.ndarray) else np.asarray(tree)


def _data(x: Any) -> Any:
    columns = _columns(x)
    for column in optree.tree_leaves(columns):
        if column.dtype.kind in "USO":
            raise TypeError(
                "x holds names of things to read, or objects, and there is no load: give load=, a function that reads "
                "one of them, or x as an array of numbers"
            )
    return columns


def _check_lengths(items: int, beside: tuple[Any, ...]) -> None:
    for name, tree in zip(("y", "sample_weight"), beside, strict=False):
        for column in optree.tree_leaves(tree):
            if column.ndim == 0 or len(column) != items:
                raise ValueError(
                    f"{name} has the shape {list(column.shape)}, but there are {items} items: row i must belong to x[i]"
                )


def _check_whole(feed: Feed) -> None:
    """Batches have numbers: those of an epoch of which a part was given elsewhere would be others."""
    items, samples = feed._place.resume
    if feed._options.counts and (items or samples):
        more = f" and {samples} samples of the next" if samples else ""
        raise ValueError(
            f"the feed goes on inside epoch {feed.epoch}, after {items} of its items{more}, as its state says, and "
            "Keras asks for the batches of whole epochs: iterate the feed itself for the rest of this one before you "
            f"give it to from_feed, or begin it anew with feed.set_epoch({feed.epoch})"
        )


def _is_unending() -> bool:
    """Whether Keras, which begins an epoch of a dataset without length, was told no steps: only its iterator knows."""
    frame = inspect.currentframe()
    while frame is not None:
        asking = frame.f_locals.get("self")
        if any(base.__name__ == "EpochIterator" for base in type(asking).__mro__):
            return not getattr(asking, "steps_per_epoch", 1)
        frame = frame.f_back
    return False


def _is_building() -> bool:
    """Whether Keras asks only to see what a batch looks like: nothing but the name of its function tells."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "_symbolic_build":
            return True
        frame = frame.f_back
    return False
