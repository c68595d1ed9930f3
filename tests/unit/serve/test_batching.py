"""Requests that wait are computed together, each gets its own reply, and too many are refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from shoal.errors import InputError, ServerLost
from shoal.serve.batching import Batcher, TokenBucket
from support.served_models import EchoModel


class SlowModel(EchoModel):
    """Waits for `gate` in its first batch; refuses negative numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.entered = threading.Event(), threading.Event()

    def run(self, requests: Sequence[np.ndarray]) -> list[Any]:
        self.entered.set()
        assert self.gate.wait(60)
        if any((one < 0).any() for one in requests):
            raise InputError("x", "negative", "0 or more", "Be positive.")
        return super().run(requests)


async def asked(batcher: Batcher, model: EchoModel, numbers: Sequence[float]) -> list[Any]:
    """The first alone, the others while it runs."""

    def ask(number: float) -> Any:
        return batcher.predict(model, model.read({"x": np.array([number], np.float32)}))

    tasks = [asyncio.ensure_future(ask(numbers[0]))]
    if isinstance(model, SlowModel):
        while not model.entered.is_set():
            await asyncio.sleep(0.001)
        tasks += [asyncio.ensure_future(ask(number)) for number in numbers[1:]]
        await asyncio.sleep(0.05)
        model.gate.set()
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_requests_that_wait_are_joined() -> None:
    model = SlowModel()
    seen: list[tuple[str, int, int]] = []
    with Batcher(workers=1, observe=lambda *one: seen.append(one)) as batcher:
        replies = asyncio.run(asked(batcher, model, [0, 1, 2, 3]))
    assert [one["y"].tolist() for one in replies] == [[0], [2], [4], [6]]
    assert model.batches == [1, 3]
    assert seen == [("echo", 1, 1), ("echo", 3, 3)]


def test_a_batch_has_a_limit() -> None:
    model = SlowModel()
    with Batcher(workers=1, most_rows=2) as batcher:
        replies = asyncio.run(asked(batcher, model, [0, 1, 2, 3, 4, 5]))
    assert [one["y"].tolist() for one in replies] == [[2 * k] for k in range(6)]
    assert model.batches == [1, 2, 2, 1]


def test_a_request_that_fails_fails_alone() -> None:
    model = SlowModel()
    with Batcher(workers=1) as batcher:
        replies = asyncio.run(asked(batcher, model, [0, -1, 2]))
    assert isinstance(replies[1], InputError)
    assert [replies[0]["y"].tolist(), replies[2]["y"].tolist()] == [[0], [4]]


def test_another_error_is_everybodys_at_once() -> None:
    class Broken(SlowModel):
        def run(self, requests: Sequence[np.ndarray]) -> list[Any]:
            self.entered.set()
            assert self.gate.wait(60)
            self.batches.append(len(requests))
            raise ServerLost("rows", "none", "some", "Wait.")

    model = Broken()
    with Batcher(workers=1) as batcher:
        replies = asyncio.run(asked(batcher, model, [0, 1, 2]))
    assert all(isinstance(one, ServerLost) for one in replies)
    assert model.batches == [1, 2]


def test_bytes_that_wait_are_limited() -> None:
    model = SlowModel()

    async def ask(batcher: Batcher) -> list[Any]:
        x = model.read({"x": np.zeros(1, np.float32)})
        tasks = [asyncio.ensure_future(batcher.predict(model, x, 60))]
        while not model.entered.is_set():
            await asyncio.sleep(0.001)
        tasks += [asyncio.ensure_future(batcher.predict(model, x, 60)) for _ in range(2)]
        await asyncio.sleep(0.05)
        model.gate.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    with Batcher(workers=1, most_waiting_bytes=100) as batcher:
        replies = asyncio.run(ask(batcher))
    assert [isinstance(one, ServerLost) for one in replies] == [False, False, True]


def test_too_many_that_wait_are_refused() -> None:
    model = SlowModel()
    with Batcher(workers=1, most_waiting=2) as batcher:
        replies = asyncio.run(asked(batcher, model, [0, 1, 2, 3]))
    assert isinstance(replies[3], ServerLost)
    assert "y" in replies[2]


def test_too_many_a_second_are_refused() -> None:
    bucket = TokenBucket(1e-6)
    bucket._left = 1.0
    bucket.take()
    with pytest.raises(ServerLost, match="a second"):
        bucket.take()
    for _ in range(10_000):
        TokenBucket(None).take()
