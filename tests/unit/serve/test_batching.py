"""Requests that wait are computed together, each gets its own reply, and too many are refused."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

from shoal.errors import InputError, ServerLost, ShoalError
from shoal.serve import batching
from shoal.serve.batching import Batcher, TokenBucket
from support.served_models import EchoModel


class SlowModel(EchoModel):
    """Waits for `gate` in its first batch; refuses negative numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.entered = threading.Event(), threading.Event()
        self.threads: list[int] = []
        self.running = 0  # until the gate opens

    def run(self, requests: Sequence[np.ndarray]) -> list[Any]:
        self.running += 1
        self.entered.set()
        assert self.gate.wait(60)
        self.threads.append(threading.get_ident())
        if any((one < 0).any() for one in requests):
            raise InputError("x", "negative", "0 or more", "Be positive.")
        return super().run(requests)


def until(reached: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < ends
        time.sleep(0.001)


def asked(
    batcher: Batcher,
    model: SlowModel,
    numbers: Sequence[float],
    *,
    size_bytes: int = 0,
    is_there: Callable[[float], bool] = lambda number: True,
) -> list[Any]:
    """Replies or errors: the first request alone, the others wait while it is computed."""

    def ask(number: float) -> Any:
        inputs = {"y" if math.isnan(number) else "x": np.array([number], np.float32)}
        return batcher.predict(
            model, lambda: model.read(inputs), size_bytes, lambda: is_there(number)
        )

    with ThreadPoolExecutor(len(numbers)) as pool:
        replies = [pool.submit(ask, numbers[0])]
        assert model.entered.wait(60)
        for number in numbers[1:]:
            replies.append(pool.submit(ask, number))
            until(lambda: replies[-1].done() or batcher.waiting >= len(replies) - 1)
        model.gate.set()
        return [one.exception() or one.result() for one in replies]


def test_requests_that_wait_are_joined() -> None:
    model = SlowModel()
    seen: list[tuple[str, int, int]] = []
    replies = asked(Batcher(workers=1, observe=lambda *one: seen.append(one)), model, [0, 1, 2, 3])
    assert [one["y"].tolist() for one in replies] == [[0], [2], [4], [6]]
    assert model.batches == [1, 3]
    assert seen == [("echo", 1, 1), ("echo", 3, 3)]


def test_a_batch_has_a_limit() -> None:
    model = SlowModel()
    replies = asked(Batcher(workers=1, most_rows=2), model, [0, 1, 2, 3, 4, 5])
    assert [one["y"].tolist() for one in replies] == [[2 * k] for k in range(6)]
    assert model.batches == [1, 2, 2, 1]


def test_a_lone_request_is_computed_by_its_caller() -> None:
    model = SlowModel()
    model.gate.set()
    Batcher().predict(model, lambda: np.zeros(1, np.float32))
    assert model.threads == [threading.get_ident()]


def test_a_request_that_fails_fails_alone() -> None:
    replies = asked(Batcher(workers=1), SlowModel(), [0, -1, 2])
    assert isinstance(replies[1], InputError)
    assert [replies[0]["y"].tolist(), replies[2]["y"].tolist()] == [[0], [4]]


def test_a_request_that_cannot_be_read_fails_alone() -> None:
    """Whoever leads reads it."""
    model = SlowModel()
    replies = asked(Batcher(workers=1), model, [0, math.nan, math.nan, 2])
    assert isinstance(replies[1], InputError)
    assert isinstance(replies[2], InputError)
    assert [replies[0]["y"].tolist(), replies[3]["y"].tolist()] == [[0], [4]]


def test_a_request_whose_caller_left_is_not_computed() -> None:
    model = SlowModel()
    replies = asked(Batcher(workers=1), model, [0, 1, 2], is_there=lambda number: number != 1)
    assert isinstance(replies[1], CancelledError)
    assert [replies[0]["y"].tolist(), replies[2]["y"].tolist()] == [[0], [4]]
    assert model.batches == [1, 1]


def test_another_error_is_everybodys_at_once() -> None:
    class Broken(SlowModel):
        def run(self, requests: Sequence[np.ndarray]) -> list[Any]:
            self.entered.set()
            assert self.gate.wait(60)
            self.batches.append(len(requests))
            raise ServerLost("rows", "none", "some", "Wait.")

    model = Broken()
    replies = asked(Batcher(workers=1), model, [0, 1, 2])
    assert all(isinstance(one, ServerLost) for one in replies)
    assert model.batches == [1, 2]


def test_a_model_that_replies_too_little_leaves_nobody_waiting() -> None:
    class Short(SlowModel):
        def run(self, requests: Sequence[np.ndarray]) -> list[Any]:
            return super().run(requests)[:1]

    replies = asked(Batcher(workers=1), Short(), [0, 1, 2])
    assert replies[0]["y"].tolist() == [0]
    assert all(isinstance(one, ShoalError) for one in replies[1:])


def test_after_any_load_as_many_compute_at_once_as_before() -> None:
    workers, models = 4, [EchoModel() for _ in range(3)]
    batcher = Batcher(workers=workers, most_rows=3)

    def ask(number: int) -> None:
        batcher.predict(
            models[number % 3], lambda: np.zeros(1, np.float32), 0, lambda: number % 7 != 0
        )

    with ThreadPoolExecutor(16) as pool:
        for one in [pool.submit(ask, number) for number in range(3000)]:
            assert one.exception() is None or isinstance(one.exception(), CancelledError)
        barrier = threading.Barrier(workers)

        class Together(EchoModel):
            def run(self, requests: Sequence[np.ndarray]) -> list[Any]:
                barrier.wait(60)
                return super().run(requests)

        last = [
            pool.submit(batcher.predict, Together(), lambda: np.zeros(1, np.float32))
            for _ in range(workers)
        ]
        assert all(one.result()["y"].tolist() == [0] for one in last)


def test_bytes_that_wait_are_limited() -> None:
    replies = asked(Batcher(workers=1, most_bytes=100), SlowModel(), [0, 1, 2], size_bytes=60)
    assert [isinstance(one, ServerLost) for one in replies] == [False, False, True]


def becomes_quick(batcher: Batcher, model: SlowModel) -> None:
    """The time of a model becomes known, whatever else (a garbage collection) takes some of it."""
    until_s = time.monotonic() + 60
    while batcher._seconds.get(model, math.inf) >= batching._QUICK_S / 2:
        batcher.predict(model, lambda: np.zeros(1, np.float32))
        assert time.monotonic() < until_s


@pytest.mark.parametrize("is_local", [True, False])
def test_two_workers_share_what_is_slow_and_one_takes_all_that_is_quick(is_local: bool) -> None:
    model = SlowModel()
    model.is_local = is_local
    batcher = Batcher(workers=2)
    model.gate.set()
    becomes_quick(batcher, model)
    model.gate.clear()
    model.entered.clear()
    model.batches.clear()
    entered: list[bool] = []

    def ask(number: int) -> None:
        batcher.predict(model, lambda: np.zeros(1, np.float32))

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(ask, 0)
        assert model.entered.wait(60)
        model.entered.clear()
        others = [pool.submit(ask, 1)]
        if not is_local:  # who leads takes what waits by then
            entered.append(model.entered.wait(60))
        others.append(pool.submit(ask, 2))
        if is_local:
            until(lambda: batcher.waiting == 2)
            entered.append(model.entered.wait(0.2))
        model.gate.set()
        for one in (first, *others):
            one.result()
    assert entered == [not is_local]
    assert sorted(model.batches) == ([1, 2] if is_local else [1, 1, 1])


def test_every_caller_has_its_own_reply() -> None:
    model, batcher = EchoModel(), Batcher(workers=2, most_rows=8)

    def ask(number: int) -> bool:
        found = batcher.predict(model, lambda: np.full(1 + number % 5, number, np.float32))
        return bool((found["y"] == 2 * number).all()) and len(found["y"]) == 1 + number % 5

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(ask, range(3000)))
    assert batcher.waiting == 0


def test_too_many_a_second_are_refused() -> None:
    bucket = TokenBucket(1e-6)
    bucket._left = 1.0
    bucket.take()
    with pytest.raises(ServerLost, match="a second"):
        bucket.take()
    for _ in range(10_000):
        TokenBucket(None).take()


class SizedModel(SlowModel):
    """Requests of as many rows as their number says."""

    def read(self, inputs: Any) -> Any:
        return np.zeros(int(super().read(inputs)[0]), np.float32)


def test_what_a_leader_cannot_join_is_led_by_others() -> None:
    """Its batch is full: the next of those that it took is computed meanwhile."""
    together = threading.Barrier(2)

    class Together(SizedModel):
        def run(self, requests: Sequence[np.ndarray]) -> list[Any]:
            if sum(map(len, requests)) > 8:
                together.wait(60)
            return super().run(requests)

    model, batcher = Together(), Batcher(workers=2, most_rows=16)
    first = SlowModel()  # both workers are busy while the others come
    with ThreadPoolExecutor(8) as pool:
        busy = [pool.submit(batcher.predict, first, lambda: np.zeros(1, np.float32)) for _ in "12"]
        until(lambda: first.running == 2)
        rows = [10, 10]
        asked = [
            pool.submit(
                batcher.predict, model, partial(model.read, {"x": np.array([n], np.float32)})
            )
            for n in rows
        ]
        until(lambda: batcher.waiting == len(rows))
        model.gate.set()
        first.gate.set()
        assert [len(one.result()["y"]) for one in asked] == rows
        assert len([one.result() for one in busy]) == 2
    assert model.batches == [1, 1]


def test_few_bytes_of_many_rows_hold_nobody_up() -> None:
    """A model is known as quick, and a small request turns out to be a large one."""
    model, batcher = SizedModel(), Batcher(workers=2)
    model.gate.set()

    def ask(rows: int) -> Any:
        return batcher.predict(model, lambda: model.read({"x": np.array([rows], np.float32)}))

    becomes_quick(batcher, model)
    model.gate.clear()
    model.entered.clear()
    with ThreadPoolExecutor(2) as pool:
        large = pool.submit(ask, 1000)
        assert model.entered.wait(60)
        model.entered.clear()
        small = pool.submit(ask, 1)
        assert model.entered.wait(60)
        model.gate.set()
        assert (len(large.result()["y"]), len(small.result()["y"])) == (1000, 1)
