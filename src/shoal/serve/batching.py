"""Requests of concurrent callers, computed together while others are computed."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from weakref import WeakKeyDictionary

from shoal.errors import DataError, InputError, ServerLost
from shoal.serve.model import Model, Outputs, ReadRequest

_QUICK_S = 0.002
_QUICK_ROWS = 64


class _Waiting:
    """A request, and the thread that waits for its reply."""

    __slots__ = ("is_there", "leads", "model", "reply", "request", "size_bytes", "woken")

    def __init__(
        self, model: Model, request: ReadRequest, size_bytes: int, is_there: Callable[[], bool]
    ) -> None:
        self.model, self.request, self.size_bytes = model, request, size_bytes
        self.is_there = is_there
        self.woken = threading.Event()  # it has its reply, or leads
        self.leads = False
        self.reply: Outputs | BaseException | None = None


class Batcher:
    """Computes requests on their callers' threads, those that wait joined to one batch a model.

    A caller leads if it may: it takes what waits, computes it, and hands over to the next that
    waits. So nothing waits for others to come, and a lone request changes no thread. Leaders are
    as many as `workers`; but small requests of a local model that takes less than 2 ms wait for
    the one that computes such requests already: two would only wait for each other's interpreter
    lock.

    Args:
        workers: callers that compute at once; None: one a core.
        most_rows: of a batch that is joined.
        most_bytes: of requests that wait; more are refused.
        observe: gets the model's name, and the requests and rows of each batch.
    """

    def __init__(
        self,
        *,
        workers: int | None = None,
        most_rows: int = 1024,
        most_bytes: int = 256 << 20,
        observe: Callable[[str, int, int], None] = lambda model, requests, rows: None,
    ) -> None:
        self._workers = workers or len(os.sched_getaffinity(0))
        self._most_rows, self._most_bytes = most_rows, most_bytes
        self._observe = observe
        self._lock = threading.Lock()
        self._waiting: deque[_Waiting] = deque()
        self._bytes = 0  # that wait
        self._leaders = self._quick_leaders = 0
        self._seconds: WeakKeyDictionary[Model, float] = WeakKeyDictionary()  # of small batches

    @property
    def waiting(self) -> int:
        """Requests that nobody has taken yet."""
        return len(self._waiting)

    def predict(
        self,
        model: Model,
        request: ReadRequest,
        size_bytes: int = 0,
        is_there: Callable[[], bool] = lambda: True,
    ) -> Outputs:
        """What a model replies to a request that it has read.

        Args:
            is_there: whether the caller still waits; asked when the request's turn has come.

        Raises:
            InputError: what is wrong with the request.
            ServerLost: too many wait.
            CancelledError: its caller has left.
        """
        one = _Waiting(model, request, size_bytes, is_there)
        with self._lock:
            if self._waiting and self._bytes + size_bytes > self._most_bytes:
                raise ServerLost(
                    "requests that wait",
                    got=f"{len(self._waiting)} of {self._bytes} bytes",
                    allowed=f"{self._most_bytes} bytes at most",
                    remedy="Ask again later, or ask another replica.",
                )
            self._waiting.append(one)
            self._bytes += size_bytes
            if self._leaders < self._workers and not (self._quick_leaders and self._is_quick(one)):
                one.leads = True
                self._leaders += 1
        if not one.leads:
            one.woken.wait()
        if one.leads:
            self._lead(one)
        if isinstance(one.reply, BaseException):
            raise one.reply
        assert one.reply is not None
        return one.reply

    def _is_quick(self, one: _Waiting) -> bool:
        few = one.model.is_local and one.request.size <= _QUICK_ROWS
        return few and self._seconds.get(one.model, math.inf) < _QUICK_S

    def _lead(self, one: _Waiting) -> None:
        """Compute batches until the caller has its reply."""
        try:
            while one.reply is None:
                with self._lock:
                    batch = self._joined()
                    quick = bool(batch) and all(map(self._is_quick, batch))
                    self._quick_leaders += quick
                try:
                    if batch:
                        self._compute(batch)
                finally:
                    with self._lock:
                        self._quick_leaders -= quick
        finally:
            with self._lock:
                if self._waiting:
                    following = self._waiting[0]
                    following.leads = True
                    following.woken.set()
                else:
                    self._leaders -= 1

    def _joined(self) -> list[_Waiting]:
        """Requests of one model and version, in order, which wait no longer."""
        taken: list[_Waiting] = []
        others: list[_Waiting] = []
        rows = 0
        while self._waiting and rows < self._most_rows:
            one = self._waiting.popleft()
            if not one.is_there():
                one.reply = CancelledError()
                one.woken.set()
            elif not taken or (
                one.model is taken[0].model and rows + one.request.size <= self._most_rows
            ):
                taken.append(one)
                rows += one.request.size
            else:
                others.append(one)
        self._waiting.extendleft(reversed(others))
        self._bytes = sum(one.size_bytes for one in self._waiting)
        return taken

    def _compute(self, batch: Sequence[_Waiting]) -> None:
        model, rows = batch[0].model, sum(one.request.size for one in batch)
        began_s = time.thread_time()
        for one, reply in zip(batch, _computed(batch), strict=True):
            one.reply = reply
            one.woken.set()
        if rows <= _QUICK_ROWS:
            took_s = time.thread_time() - began_s
            self._seconds[model] = 0.8 * self._seconds.get(model, took_s) + 0.2 * took_s
        self._observe(model.name, len(batch), rows)


def _computed(batch: Sequence[_Waiting]) -> Sequence[Outputs | BaseException]:
    model = batch[0].model
    try:
        return model.run([one.request for one in batch])
    except Exception as error:  # noqa: BLE001  its callers get it
        if len(batch) == 1 or not isinstance(error, InputError | DataError):
            return [error] * len(batch)
    return [_computed([one])[0] for one in batch]  # one of them is wrong; the others are not


class TokenBucket:
    """Lets so many requests a second through, and bursts of a second's worth.

    Args:
        per_s: requests a second; None: any number.
    """

    def __init__(self, per_s: float | None) -> None:
        self._per_s, self._left, self._at_s = per_s, per_s or 0.0, time.monotonic()
        self._lock = threading.Lock()

    def take(self) -> None:
        """Count a request.

        Raises:
            ServerLost: there are too many.
        """
        if self._per_s is None:
            return
        with self._lock:
            now_s = time.monotonic()
            since_s, self._at_s = now_s - self._at_s, now_s
            self._left = min(max(self._per_s, 1.0), self._left + since_s * self._per_s)
            if self._left >= 1:
                self._left -= 1
                return
        raise ServerLost(
            "requests a second", f"more than {self._per_s:g}", f"{self._per_s:g}", "Slow down."
        )
