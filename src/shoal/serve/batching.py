"""Requests of concurrent callers, computed together while workers are busy."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from shoal.errors import DataError, InputError, ServerLost
from shoal.serve.model import Model, Outputs, ReadRequest


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    model: Model
    request: ReadRequest
    reply: asyncio.Future[Outputs]
    loop: asyncio.AbstractEventLoop
    size_bytes: int


class Batcher:
    """Worker threads that take what waits, joined to one batch a model.

    A worker that is free takes a request at once; those that come while all are busy wait for the
    first that is free, which takes them together. So nothing waits for others to come.

    Args:
        workers: threads; None: one a core.
        most_rows: of a batch that is joined.
        most_waiting, most_waiting_bytes: requests that wait; more are refused.
        observe: gets the model's name, and the requests and rows of each batch.
    """

    def __init__(
        self,
        *,
        workers: int | None = None,
        most_rows: int = 1024,
        most_waiting: int = 4096,
        most_waiting_bytes: int = 256 << 20,
        observe: Callable[[str, int, int], None] = lambda model, requests, rows: None,
    ) -> None:
        count = workers or len(os.sched_getaffinity(0))
        self._most_rows, self._most_waiting = most_rows, most_waiting
        self._most_bytes, self._bytes = most_waiting_bytes, 0
        self._observe = observe
        self._waiting: deque[_Waiting] = deque()
        self._changed = threading.Condition()
        self._ending = False
        self._threads = [
            threading.Thread(target=self._work, name=f"shoal worker {k}", daemon=True)
            for k in range(count)
        ]

    def __enter__(self) -> Batcher:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    @property
    def waiting(self) -> int:
        """Requests that no worker has taken yet."""
        return len(self._waiting)

    async def predict(self, model: Model, request: ReadRequest, size_bytes: int = 0) -> Outputs:
        """What a model replies to a request that it has read.

        Raises:
            InputError: what is wrong with the request.
            ServerLost: too many wait.
        """
        loop = asyncio.get_running_loop()
        one = _Waiting(model, request, loop.create_future(), loop, size_bytes)
        with self._changed:
            too_large = self._waiting and self._bytes + size_bytes > self._most_bytes
            if len(self._waiting) >= self._most_waiting or too_large or self._ending:
                raise ServerLost(
                    "requests that wait",
                    got=f"{len(self._waiting)} of {self._bytes} bytes",
                    allowed=f"fewer than {self._most_waiting}, {self._most_bytes} bytes at most",
                    remedy="Ask again later, or ask another replica.",
                )
            self._waiting.append(one)
            self._bytes += size_bytes
            self._changed.notify()
        return await one.reply

    def _work(self) -> None:
        torch.set_num_threads(1)  # of this thread; workers are as many as cores
        while batch := self._take():
            replies = _computed(batch)
            rows = sum(one.request.size for one in batch)
            self._observe(batch[0].model.name, len(batch), rows)
            for loop in {one.loop for one in batch}:
                pairs = [
                    (one.reply, reply)
                    for one, reply in zip(batch, replies, strict=True)
                    if one.loop is loop
                ]
                _call(loop, pairs)

    def _take(self) -> list[_Waiting]:
        """Requests of one model and version, in order; none: the end."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._waiting or self._ending)
                if not self._waiting:
                    return []
                first = self._waiting.popleft()
                if not first.reply.cancelled():
                    break
            taken, rows = [first], first.request.size
            others: list[_Waiting] = []
            while self._waiting and rows < self._most_rows:
                one = self._waiting.popleft()
                if one.reply.cancelled():
                    continue
                if one.model is first.model and rows + one.request.size <= self._most_rows:
                    taken.append(one)
                    rows += one.request.size
                else:
                    others.append(one)
            self._waiting.extendleft(reversed(others))
            self._bytes = sum(one.size_bytes for one in self._waiting)
            return taken


def _computed(batch: Sequence[_Waiting]) -> Sequence[Outputs | BaseException]:
    model = batch[0].model
    try:
        return model.run([one.request for one in batch])
    except Exception as error:  # noqa: BLE001  its callers get it
        if len(batch) == 1 or not isinstance(error, InputError | DataError):
            return [error] * len(batch)
    # One of them is wrong; the others are not.
    return [
        asyncio.CancelledError() if one.reply.cancelled() else _computed([one])[0] for one in batch
    ]


def _call(loop: asyncio.AbstractEventLoop, pairs: Sequence[tuple[Any, Any]]) -> None:
    def deliver() -> None:
        for future, reply in pairs:
            if future.done():
                continue  # its caller left
            if isinstance(reply, BaseException):
                future.set_exception(reply)
            else:
                future.set_result(reply)

    try:
        loop.call_soon_threadsafe(deliver)
    except RuntimeError:
        return  # the loop has ended, and its callers with it


class TokenBucket:
    """Lets so many requests a second through, and bursts of a second's worth.

    Args:
        per_s: requests a second; None: any number.
    """

    def __init__(self, per_s: float | None) -> None:
        self._per_s, self._left, self._at_s = per_s, per_s or 0.0, time.monotonic()

    def take(self) -> None:
        """Count a request; called by one thread.

        Raises:
            ServerLost: there are too many.
        """
        if self._per_s is None:
            return
        now_s = time.monotonic()
        self._left = min(max(self._per_s, 1.0), self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if self._left < 1:
            raise ServerLost(
                "requests a second", f"more than {self._per_s:g}", f"{self._per_s:g}", "Slow down."
            )
        self._left -= 1
