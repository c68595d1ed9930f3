"""Requests of concurrent callers, computed together while others are computed."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakKeyDictionary

from shoal.errors import DataError, InputError, ServerLost, ShoalError
from shoal.serve.model import Model, Outputs, ReadRequest

_QUICK_S = 0.002
_QUICK_ROWS = 64
_QUICK_BYTES = 8 << 10  # of a request
_JOINED_BYTES = 256 << 10  # of requests that one leader takes; one may be larger


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request, and the thread that waits for its reply."""

    model: Model
    read: Callable[[], ReadRequest]
    size_bytes: int
    is_there: Callable[[], bool]
    woken: threading.Event = field(default_factory=threading.Event)  # it has its reply, or leads
    leads: bool = False
    quick: bool = False
    reply: Outputs | BaseException | None = None

    def answer(self, reply: Outputs | BaseException) -> None:
        """The first reply counts."""
        if self.reply is None:
            self.reply = reply
            self.woken.set()


_Read = tuple[_Waiting, ReadRequest]


class Batcher:
    """Computes requests on their callers' threads, those that wait joined to one batch a model.

    A caller leads if it may: it takes what waits, reads and computes a batch of it, and hands over
    to the next that waits. So nothing waits for others to come, a lone request changes no thread,
    and callers that wait leave the interpreter lock to who leads. Leaders are as many as `workers`;
    but small requests of a local model that takes less than 2 ms wait for the one that computes
    such requests already: two would only wait for each other's lock.

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
        read: Callable[[], ReadRequest],
        size_bytes: int = 0,
        is_there: Callable[[], bool] = lambda: True,
    ) -> Outputs:
        """What a model replies to a request.

        Args:
            read: has the model read it; called by whichever thread leads.
            is_there: whether the caller still waits; asked when the request's turn has come.

        Raises:
            InputError: what is wrong with the request.
            ServerLost: too many wait.
            CancelledError: its caller has left.
        """
        one = _Waiting(model, read, size_bytes, is_there)
        with self._lock:
            if self._waiting and self._bytes + size_bytes > self._most_bytes:
                raise ServerLost(
                    "requests that wait",
                    got=f"{len(self._waiting)} of {self._bytes} bytes",
                    allowed=f"{self._most_bytes} bytes at most",
                    remedy="Ask again later, or ask another replica.",
                )
            if not self._leads(one):
                self._waiting.append(one)
                self._bytes += size_bytes
        if not one.leads:
            one.woken.wait()
        if one.leads:
            self._lead(one)
        reply, one.reply = one.reply, None  # an error refers to this frame, and must not keep it
        if isinstance(reply, BaseException):
            raise reply.with_traceback(None)  # callers of one batch share it
        assert reply is not None
        return reply

    def _leads(self, one: _Waiting) -> bool:
        """Let a request's caller lead, if one more may; holds the lock."""
        if self._leaders == self._workers:
            return False
        quick = one.model.is_local and one.size_bytes <= _QUICK_BYTES
        quick = quick and self._seconds.get(one.model, math.inf) < _QUICK_S
        if quick and self._quick_leaders:
            return False
        one.leads, one.quick = True, quick
        self._leaders += 1
        self._quick_leaders += quick
        return True

    def _wake(self) -> None:
        """Let as many lead that wait as may; holds the lock."""
        while self._waiting and self._leads(self._waiting[0]):
            one = self._waiting.popleft()
            self._bytes -= one.size_bytes
            one.woken.set()

    def _lead(self, one: _Waiting) -> None:
        """Compute a batch with the caller's request, and hand over to those that wait."""
        taken: list[_Waiting] = []
        try:
            with self._lock:
                taken = self._joined(one)
            batch, rows = self._read(taken)
            if one.quick and rows > _QUICK_ROWS:  # few bytes may be many rows
                with self._lock:
                    one.quick = False
                    self._quick_leaders -= 1
                    self._wake()
            if batch:
                self._compute(batch, rows)
        finally:
            for other in taken:  # nobody may wait for ever, whatever a model does
                other.answer(ShoalError("the model was stopped"))
            with self._lock:
                self._leaders -= 1
                self._quick_leaders -= one.quick
                self._wake()

    def _joined(self, first: _Waiting) -> list[_Waiting]:
        """A request and those of its model and version that fit, in order; they wait no longer."""
        taken: list[_Waiting] = []
        kept: deque[_Waiting] = deque()
        left_bytes = max(_JOINED_BYTES, first.size_bytes)
        for one in (first, *self._waiting):
            if one.model is first.model and one.size_bytes <= left_bytes:
                taken.append(one)
                left_bytes -= one.size_bytes
            else:
                kept.append(one)
        self._waiting = kept
        self._bytes = sum(one.size_bytes for one in kept)
        return taken

    def _read(self, taken: list[_Waiting]) -> tuple[list[_Read], int]:
        """The first that fit in a batch, and their rows; the others wait again.

        What cannot be read gets its error, and callers that have left get their reply.
        """
        batch: list[_Read] = []
        rows = 0
        for k, one in enumerate(taken):
            try:
                if not one.is_there():
                    raise CancelledError
                request = one.read()
            except Exception as error:  # noqa: BLE001  its caller gets it
                one.answer(error)
                continue
            if batch and rows + request.size > self._most_rows:
                one.read = partial(_same, request)
                with self._lock:
                    self._waiting.extendleft(reversed(taken[k:]))
                    self._bytes += sum(other.size_bytes for other in taken[k:])
                    del taken[k:]
                    self._wake()
                break
            batch.append((one, request))
            rows += request.size
        return batch, rows

    def _compute(self, batch: Sequence[_Read], rows: int) -> None:
        model, began_s = batch[0][0].model, time.thread_time()
        replies = _computed(model, [request for _, request in batch])
        took_s = time.thread_time() - began_s
        for (one, _), reply in zip(batch, replies, strict=True):
            one.answer(reply)
        if rows <= _QUICK_ROWS:
            self._seconds[model] = 0.8 * self._seconds.get(model, took_s) + 0.2 * took_s
        self._observe(model.name, len(batch), rows)


def _same(request: ReadRequest) -> ReadRequest:
    return request


def _computed(model: Model, requests: Sequence[ReadRequest]) -> Sequence[Outputs | BaseException]:
    try:
        replies = model.run(requests)
        if len(replies) != len(requests):
            raise ShoalError(f"{len(replies)} replies of a model to {len(requests)} requests")
        return replies
    except Exception as error:  # noqa: BLE001  its callers get it
        if len(requests) == 1 or not isinstance(error, InputError | DataError):
            return [error] * len(requests)
    # One of them is wrong; the others are not.
    return [_computed(model, [one])[0] for one in requests]


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
