"""What both protocols stand on: models, workers, limits, metrics, and codes of errors."""

from __future__ import annotations

import hmac
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from shoal.errors import (
    ConfigError,
    DataError,
    InputError,
    ServerLost,
    ShoalError,
    UnknownName,
    known_name,
    unknown_name,
)
from shoal.serve.batching import Batcher, TokenBucket
from shoal.serve.model import Model, Outputs
from shoal.serve.repository import Repository
from shoal.serve.signature import SIGNATURES, Array
from shoal.serve.tensors import refused

_log = logging.getLogger(__name__)
_BUCKETS_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_LOOKUP = "lookup"
_MOST_MESSAGE = 4096  # gRPC sends it in a header, and headers are short
_BYTES_AN_ELEMENT = 4  # so that a request takes not much more memory than its bytes
_THREADS = 32  # of predictions: who computes does so for those that wait
_SHORT_THREADS = 2
_LARGE_BYTES = 1 << 18
_MOST_HELD = 256 << 20
_known: ContextVar[str] = ContextVar("model of the call", default="")
_is_there: ContextVar[Callable[[], bool]] = ContextVar("whether the caller waits")


class Code(IntEnum):
    """Codes of gRPC that servers here reply with."""

    OK = 0
    CANCELLED = 1
    INVALID_ARGUMENT = 3
    NOT_FOUND = 5
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


HTTP_STATUS = {
    Code.OK: 200,
    Code.CANCELLED: 499,
    Code.INVALID_ARGUMENT: 400,
    Code.NOT_FOUND: 404,
    Code.UNIMPLEMENTED: 501,
    Code.INTERNAL: 500,
    Code.UNAVAILABLE: 503,
    Code.UNAUTHENTICATED: 401,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a server takes on.

    Args:
        most_bytes: of a request.
        most_rows: of a batch that is joined from several requests.
        most_calls: under way at once; more are refused.
        requests_per_s: None: any number.
        workers: requests, or batches of them, that are computed at once; None: one a core.
    """

    most_bytes: int = 32 << 20
    most_rows: int = 1024
    most_calls: int = 4096
    requests_per_s: float | None = None
    workers: int | None = None

    def __post_init__(self) -> None:
        """Raises: ConfigError: a limit that lets nothing through."""
        for name in ("most_bytes", "most_rows", "most_calls", "requests_per_s", "workers"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} of a server", value, "above 0", f"Raise {name}.")


def code_of(error: BaseException) -> Code:
    """The code of an error: what cannot be found, what is wrong with a request, or a fault here."""
    if isinstance(error, UnknownName):
        unknown = error.args and str(error.args[0]).startswith(("unknown model", "unknown version"))
        return Code.NOT_FOUND if unknown else Code.INVALID_ARGUMENT
    if isinstance(error, ServerLost):
        return Code.UNAVAILABLE
    if isinstance(error, InputError | DataError | ConfigError):
        return Code.INVALID_ARGUMENT
    return Code.INTERNAL


def message_of(error: BaseException) -> str:
    """What a client is shown: errors of ours as they are, of others only that there was one."""
    if isinstance(error, ShoalError):
        return str(error)[:_MOST_MESSAGE]
    _log.error("a request failed", exc_info=error)
    return "an error of the server, which its log has"


class Service:
    """Predictions of a repository's models, counted and limited.

    Args:
        models: what is served.
        limits: of requests.
        token: what callers must know; None: anybody may call.

    Attributes:
        registry: of the metrics.
        threads, short_threads: that predictions run on, and calls that wait for nothing.
    """

    def __init__(
        self, models: Repository, *, limits: Limits | None = None, token: str | None = None
    ) -> None:
        self.models, self.limits = models, limits or Limits()
        self._token = None if token is None else f"Bearer {token}".encode()
        self.registry = CollectorRegistry()
        make: dict[str, Any] = {"registry": self.registry}
        labels = ("model", "protocol")
        self._replies = Counter("shoal_requests", "Requests by code.", (*labels, "code"), **make)
        self._seconds = Histogram(
            "shoal_request_seconds", "Time of requests.", labels, buckets=_BUCKETS_S, **make
        )
        self._rows = Histogram(
            "shoal_batch_rows", "Rows of batches.", ("model",), buckets=_ROWS, **make
        )
        self._joined = Counter("shoal_batched_requests", "Requests in batches.", ("model",), **make)
        self._version = Gauge("shoal_model_version", "Version served.", ("model",), **make)
        self._staleness = Gauge(
            "shoal_staleness_seconds", "Age of the rows' newest state.", ("model",), **make
        )
        Gauge("shoal_waiting_requests", "Requests that wait.", **make).set_function(
            lambda: self._batcher.waiting
        )
        self._batcher = Batcher(
            workers=self.limits.workers,
            most_rows=self.limits.most_rows,
            observe=self._observe,
        )
        self._follows: set[str] = set()
        self._bucket = TokenBucket(self.limits.requests_per_s)
        self._labelled: dict[tuple[str, str, Code], tuple[Any, Any]] = {}
        self._lock, self._held = threading.Lock(), 0
        self._large = threading.Semaphore(self.limits.workers or len(os.sched_getaffinity(0)))
        self.started_s = time.time()

    def __enter__(self) -> Service:
        self.threads = ThreadPoolExecutor(_THREADS, "shoal call")
        self.short_threads = ThreadPoolExecutor(_SHORT_THREADS, "shoal short call")
        return self

    def __exit__(self, *of: Any) -> None:
        self.threads.shutdown()
        self.short_threads.shutdown()

    def hold(self, size_bytes: int) -> None:
        """Count bytes of a request that waits for a thread; `let_go` of them afterwards.

        Raises:
            ServerLost: too many wait.
        """
        with self._lock:
            if self._held + size_bytes > _MOST_HELD:
                raise ServerLost(
                    "bytes of requests that wait",
                    got=self._held + size_bytes,
                    allowed=_MOST_HELD,
                    remedy="Ask again later, or ask another replica.",
                )
            self._held += size_bytes

    def let_go(self, size_bytes: int) -> None:
        """They wait no longer."""
        with self._lock:
            self._held -= size_bytes

    def decoding(self, size_bytes: int) -> AbstractContextManager[Any]:
        """Held while a text is parsed: as many large ones at once as are computed."""
        return nullcontext() if size_bytes <= _LARGE_BYTES else self._large

    def allows(self, authorization: str | None) -> bool:
        """Whether a caller knows the token."""
        if self._token is None:
            return True
        return hmac.compare_digest((authorization or "").encode("utf-8", "replace"), self._token)

    def model(self, name: str, version: int | None, signature: str = "") -> Model:
        """A model to ask.

        Raises:
            UnknownName: no such model, version or signature.
            ServerLost: it is not loaded yet.
        """
        model = self.models.get(name, version)
        _known.set(name)
        if signature not in SIGNATURES and signature != _LOOKUP:
            raise unknown_name("signature", signature, SIGNATURES[1:])
        return model

    def admit(self) -> None:
        """Count a prediction, before anything of it is decoded.

        Raises:
            ServerLost: there are too many.
        """
        self._bucket.take()

    def predict(
        self,
        model: Model,
        names: Sequence[str],
        decode: Callable[[], Iterable[tuple[str, Array]]],
        wanted: Sequence[str] = (),
        *,
        size_bytes: int = 0,
    ) -> Outputs:
        """Outputs of a request.

        Args:
            names: of its inputs, known before they are decoded.
            decode: gives (name, array) of each.
            wanted: only these outputs, () all.
            size_bytes: of the request.

        Raises:
            UnknownName, InputError, DataError: what is wrong with the request.
            ServerLost: too many wait.
        """
        inputs = [one.name for one in model.signature.inputs]
        for name in names:
            known_name("input of the model", name, inputs)
        if len(set(names)) < len(names):
            raise refused("inputs", "one of them twice", "each once", "Name each input once.")
        names = [one.name for one in model.signature.outputs]
        for name in wanted:
            known_name("output of the model", name, names)
        outputs = self._batcher.predict(
            model,
            lambda: model.read(self._within(decode())),
            size_bytes,
            _is_there.get(lambda: True),
        )
        return {name: outputs[name] for name in wanted or outputs if name in outputs}

    def _within(self, arrays: Iterable[tuple[str, Array]]) -> Mapping[str, Array]:
        left = most = self.limits.most_bytes // _BYTES_AN_ELEMENT
        inputs = {}
        for name, array in arrays:
            left -= array.size
            if left < 0:
                remedy = "Send several requests."
                raise refused("elements of a request", "more", f"at most {most}", remedy)
            inputs[name] = array
        return inputs

    def timed(
        self,
        protocol: str,
        call: Callable[[], tuple[str, Any]],
        is_there: Callable[[], bool] = lambda: True,
    ) -> tuple[Code, Any]:
        """(code, reply or message) of a call that returns its model's name and its reply.

        is_there: whether the caller still waits for it.
        """
        began_s = time.perf_counter()
        code, reply = Code.OK, None
        _known.set("")
        _is_there.set(is_there)
        try:
            model, reply = call()
        except CancelledError:
            model, code, reply = _known.get(), Code.CANCELLED, "the caller has left"
        except Exception as error:  # noqa: BLE001  its caller gets a code for it
            model, code, reply = _known.get(), code_of(error), message_of(error)
        self._count(model, protocol, code, began_s)
        return code, reply

    def _count(self, model: str, protocol: str, code: Code, began_s: float) -> None:
        key = (model, protocol, code)
        found = self._labelled.get(key)
        if found is None:
            found = self._labelled[key] = (
                self._replies.labels(model, protocol, code.name),
                self._seconds.labels(model, protocol),
            )
        found[0].inc()
        found[1].observe(time.perf_counter() - began_s)

    def collect(self) -> None:
        """Bring gauges up to date."""
        for name in self.models.names:
            states = [one for one in self.models.states(name) if one.state == "AVAILABLE"]
            if states:
                self._version.labels(name).set(states[-1].version)
            staleness_s = self.models.staleness_s(name)
            if staleness_s is not None or name in self._follows:
                self._follows.add(name)
                self._staleness.labels(name).set(math.nan if staleness_s is None else staleness_s)

    def totals(self) -> list[tuple[str, str, float, float]]:
        """(model, protocol, requests, seconds in all) since the start."""
        found: dict[tuple[str, str], list[float]] = {}
        for metric in self.registry.collect():
            for sample in metric.samples:
                suffix = sample.name.removeprefix("shoal_request_seconds")
                if suffix in ("_count", "_sum"):
                    key = sample.labels["model"], sample.labels["protocol"]
                    pair = found.setdefault(key, [0.0, 0.0])
                    pair[suffix == "_sum"] = sample.value
        return [(*key, *pair) for key, pair in sorted(found.items())]  # type: ignore[misc]

    def _observe(self, model: str, requests: int, rows: int) -> None:
        self._rows.labels(model).observe(rows)
        self._joined.labels(model).inc(requests)
