"""A task whose items kill their worker, harm it or raise: every other item is done, whoever the worker was."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock._core.crew.lives import Deaths, joined, unpack_apart
from penstock._core.errors import WorkerLost
from penstock._core.task import Failure, Mode, Reply, Status, Task
from penstock._core.wire import decode_reply, decode_task, encode_reply, encode_task

WORST = {"fine": 12, "kills": 1, "harms": 1, "silences": 1, "raises": 1, "cramped": 1}
"""What an item does, and how often there is one: kills its worker, has the next item kill it, has it die when it
answers, raises, or finds no memory but in a fresh worker."""
kinds = st.lists(st.sampled_from([kind for kind, many in WORST.items() for _ in range(many)]), min_size=1, max_size=18)


class Worker:
    """Does tasks as a real one would; what it returns is the answer, or the place at which it died."""

    def __init__(self, does: list[str], *, skips: bool) -> None:
        self._does, self._skips = does, skips
        self._harmed, self._fresh = False, True

    def do(self, data: bytes) -> Reply | int:
        task = decode_task(data)
        reply = Reply(task.id, 0, Status.DONE)
        failures: list[Failure] = []
        texts: list[tuple[int, int, bytes]] = []
        at, silenced, fresh, self._fresh = 0, False, self._fresh, False
        for place in range(task.first, len(self._does)):
            if place in task.barred:
                continue
            at, does = place, self._does[place]
            if self._harmed or does == "kills":
                return place
            if does == "cramped" and not (fresh and place == task.first):
                reply.status, reply.rows = Status.AGAIN, place
                break
            if does == "raises":
                failure = Failure(place, ValueError(), "", tuple(texts))
                if not self._skips:
                    reply.status, reply.body = Status.FAILED, failure
                    break
                failures.append(failure)
                continue
            self._harmed = does == "harms"
            silenced = silenced or does == "silences"
            texts.append((place, 0, b"text"))
        if silenced:
            return at
        if reply.status is not Status.FAILED:
            reply.body = texts or None
        reply.failures = tuple(failures)
        return decode_reply(encode_reply(reply))


def outcome(does: list[str], *, skips: bool, chance: random.Random) -> tuple[Reply, int]:
    """What becomes of a task of such items, and how many died of it."""
    program: Any = SimpleNamespace(skips=skips, tries=1, timeout_s=None, mode=Mode.ROWS)
    deaths = Deaths(program)
    task = Task(1, 0, 0, 0, 0, 0, np.arange(len(does)), [str(number) for number in range(len(does))])
    task.text_bytes = 1 << 20
    died = 0
    worker = Worker(does, skips=skips)
    while True:
        answer = worker.do(encode_task(task))
        if isinstance(answer, int):
            died += 1
            worker = Worker(does, skips=skips)
            failure = deaths.of(task, answer, 3)
            assert deaths.give_up(3, 1) is None
            over = None if failure is None else joined(task.part, Reply(1, 0, Status.FAILED, body=failure))
        else:
            deaths.fruit(task)
            assert not unpack_apart(task, answer)
            over = deaths.whole(task, answer)
            if answer.status is Status.AGAIN or chance.random() < 0.5:
                worker = Worker(does, skips=skips)
        if over is not None:
            over.failures += deaths.failures(task)
            return over, died


@given(kinds, st.randoms(use_true_random=False))
def test_only_the_guilty_items_of_a_task_are_left_out(does: list[str], chance: random.Random) -> None:
    """All others are done, with their texts, and each of the guilty is named once."""
    reply, died = outcome(does, skips=True, chance=chance)
    guilty = [place for place, kind in enumerate(does) if kind in ("kills", "silences", "raises")]
    assert reply.status is Status.DONE
    assert sorted(failure.ordinal for failure in reply.failures) == guilty
    for failure in reply.failures:
        assert isinstance(failure.error, WorkerLost) == (does[failure.ordinal] != "raises")
    assert {row for row, *_ in reply.body or ()} == set(range(len(does))) - set(guilty)
    assert died <= sum({"kills": 3, "silences": 11, "harms": 4}.get(kind, 0) for kind in does)


@given(kinds, st.randoms(use_true_random=False))
def test_a_task_fails_with_its_first_guilty_item_and_all_before_it_is_done(
    does: list[str], chance: random.Random
) -> None:
    """Their rows are handed out before the error comes."""
    reply, _ = outcome(does, skips=False, chance=chance)
    guilty = [place for place, kind in enumerate(does) if kind in ("kills", "silences", "raises")]
    if not guilty:
        assert reply.status is Status.DONE
        return
    assert reply.status is Status.FAILED
    assert reply.body.ordinal == guilty[0]
    assert {row for row, *_ in reply.body.texts} >= set(range(guilty[0]))


ROWS = 3


class Flowing:
    """Does tasks of items that give any number of samples, handing over a slot whenever it is full."""

    def __init__(self, does: list[str], gives: list[int], hand: Callable[[Reply], None]) -> None:
        self._does, self._gives, self._hand = does, gives, hand
        self._harmed, self._fresh = False, True

    def do(self, data: bytes) -> Reply | int:
        task = decode_task(data)
        to_skip, counts = task.skip, list[tuple[int, int]]()
        failures: list[Failure] = []
        at, silenced, fresh, self._fresh = 0, False, self._fresh, False
        for place in range(task.first, len(self._does)):
            if place in task.barred:
                continue
            at, does = place, self._does[place]
            if self._harmed:
                return place
            if does == "cramped" and not fresh:
                return Reply(task.id, 0, Status.AGAIN)
            for number in range(self._gives[place]):
                if number and does == "kills":
                    return place
                if to_skip:
                    to_skip -= 1
                    continue
                if len(counts) == ROWS:
                    if silenced:
                        return at
                    self._hand(_handed(task.id, counts, Status.MORE))
                    counts = []
                counts.append((place, number))
            if does == "kills":
                return place
            if does == "raises":
                failures.append(Failure(place, ValueError(), ""))
            self._harmed = does == "harms"
            silenced = silenced or does == "silences"
        if silenced:
            return at
        reply = _handed(task.id, counts, Status.DONE)
        reply.failures = tuple(failures)
        return reply


def _handed(ident: int, samples: list[tuple[int, int]], status: Status) -> Reply:
    counts = [(place, sum(at == place for at, _ in samples)) for place in sorted({at for at, _ in samples})]
    return Reply(ident, 0, status, len(samples), body=(counts, list(samples)))


@given(kinds, st.data(), st.randoms(use_true_random=False))
def test_samples_that_follow_each_other_stay_whole_and_in_order(
    does: list[str], data: st.DataObject, chance: random.Random
) -> None:
    """Whatever their number: those of the guilty items end where they failed, all others are there once."""
    gives = data.draw(st.lists(st.integers(0, 5), min_size=len(does), max_size=len(does)))
    before = data.draw(st.integers(0, gives[0]))  # handed over in an earlier session
    deaths = Deaths(SimpleNamespace(skips=True, tries=1, timeout_s=None, mode=Mode.FLOW))  # type: ignore[arg-type]
    task = Task(1, 0, 0, 0, 0, 0, np.arange(len(does)), [str(number) for number in range(len(does))], skip=before)
    seen: list[tuple[int, int]] = []
    failed: list[Failure] = []

    def take(reply: Reply) -> None:
        seen.extend(reply.body[1])
        failed.extend(reply.failures)

    def hand(reply: Reply) -> None:
        deaths.fruit(task)
        task.note_handed(reply)
        take(reply)

    worker = Flowing(does, gives, hand)
    over: Reply | None = None
    while over is None or over.status is Status.MORE:
        answer = worker.do(encode_task(task))
        if isinstance(answer, int):
            worker = Flowing(does, gives, hand)
            assert deaths.of(task, answer, 3) is None
            assert deaths.give_up(3, 1) is None
            continue
        deaths.fruit(task)
        over = deaths.whole(task, answer)
        if over is not None:
            take(over)
        if answer.status is Status.AGAIN or chance.random() < 0.5:
            worker = Flowing(does, gives, hand)
    failed.extend(deaths.failures(task))
    guilty = [place for place, kind in enumerate(does) if kind in ("kills", "silences", "raises")]
    assert sorted(failure.ordinal for failure in failed) == guilty
    assert seen == sorted(seen)
    assert len(seen) == len(set(seen))
    fine = [(place, number) for place, many in enumerate(gives) for number in range(many) if place not in guilty]
    assert [sample for sample in seen if sample[0] not in guilty] == [s for s in fine if s[0] or s[1] >= before]


@given(kinds, st.booleans())
def test_of_a_batch_that_is_made_in_one_piece_the_guilty_item_is_named(does: list[str], collates: bool) -> None:
    """Its items are tried by themselves where it cannot be told otherwise; one that harms only others is not found."""
    does = [kind if kind not in ("cramped", "harms") else "fine" for kind in does]
    deaths = Deaths(SimpleNamespace(skips=False, tries=1, timeout_s=None, mode=Mode.WHOLE))  # type: ignore[arg-type]
    task = Task(1, 0, 0, 0, 0, 0, np.arange(len(does)), [str(number) for number in range(len(does))])
    outcome: Failure | None = None
    died = 0
    while outcome is None:
        told = decode_task(encode_task(task))
        reply = Reply(1, 0, Status.DONE)
        at: int | None = None
        silenced = False
        for place, kind in enumerate(does):
            if place in told.barred:
                continue
            silenced = silenced or kind == "silences"
            at = place
            if kind == "raises":
                reply = Reply(1, 0, Status.FAILED, body=Failure(place, ValueError(), ""))
            if kind in ("kills", "raises"):
                break
        else:
            at = Failure.COLLATING if not told.trial else at
            kind = "" if told.trial or collates else "kills"
        if kind == "kills" or silenced:
            assert at is not None
            died += 1
            outcome = deaths.of(task, at, 3)
            assert deaths.give_up(3, 1) is None
            continue
        deaths.fruit(task)
        over = deaths.whole(task, reply)
        if over is not None and isinstance(over.body, Failure):
            outcome = over.body
        elif over is not None:
            break
    guilty = [place for place, kind in enumerate(does) if kind in ("kills", "silences", "raises")]
    if not guilty:
        assert outcome is None if collates else outcome is not None and outcome.ordinal == Failure.BATCH
        return
    assert outcome is not None
    assert outcome.ordinal == guilty[0] or does[guilty[0]] == "silences"
    assert outcome.ordinal in guilty
    assert died <= 20
