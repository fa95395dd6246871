"""A task whose items kill their worker, harm it or raise: every other item is done, whoever the worker was."""

from __future__ import annotations

import random
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
