"""Clients: predictions of several replicas within a deadline, and Monolith's `remote_predict`."""

from __future__ import annotations

import functools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from shoal.discovery import Discovery
from shoal.errors import ConfigError, InputError, ServerLost, ShapeError, ShoalError, UnknownName
from shoal.ps.sending import first_reply
from shoal.serve.packages import grpc
from shoal.serve.protos import tfserving_pb2 as tfs
from shoal.serve.rows import Find
from shoal.serve.signature import Array
from shoal.serve.tensors import reply_of_tf, tensor_to_tf
from shoal.table.rows import real_dtype
from shoal.table.shard import Found, IdGroups
from shoal.table.spec import TableSpec

_PREDICT = "/tensorflow.serving.PredictionService/Predict"
_TIMED, _KNOWN, _PERCENT = (
    256,
    64,
    0.95,
)  # latencies that are remembered; needed; below which hedges wait
_ONE_IN = 20  # requests that are sent twice, at most
_FAILURES = 3  # in a row, until a replica is left out
_OUT_S, _LONGEST_OUT_S = 1.0, 30.0
_CHANNEL = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 5000),
)


# A CANCELLED that nobody here asked for is a server's that ends.
_GONE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})
_OTHERS_MAY_DO = frozenset(
    {
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)


class _ChannelClosed(grpc.RpcError):  # type: ignore[misc]
    """A request that was not sent, since its replica left."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "its channel is closed"


class _Endpoint:
    """One replica, and how it has done lately; changed under the lock of its set."""

    def __init__(self, address: str, channel: grpc.Channel) -> None:
        self.address, self.channel = address, channel
        self.predict = channel.unary_unary(_PREDICT)
        self.in_flight = self.failures = 0
        self.gone = False
        self.mean_s = 0.0
        self.out_until_s = 0.0

    @property
    def load(self) -> tuple[int, float]:
        return self.in_flight, self.mean_s

    def done(self, seconds: float, code: grpc.StatusCode) -> None:
        """Note how a request went."""
        self.in_flight -= 1
        now_s = time.monotonic()
        if code in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT):
            self.mean_s += 0.1 * (seconds - self.mean_s)
            self.failures = 0
        elif code is not grpc.StatusCode.CANCELLED and self.out_until_s <= now_s:
            # Requests that were under way when it was left out say nothing new.
            self.failures += 1
            if self.failures >= _FAILURES:
                times = min(self.failures - _FAILURES, 10)
                self.out_until_s = now_s + min(_LONGEST_OUT_S, _OUT_S * 2.0**times)


class ReplicaSet:
    """Replicas of one model; any thread may ask.

    Of two that are drawn at random the one with fewer requests under way is asked. One that fails
    `_FAILURES` times in a row is left out for a second, then ever longer. A request that fails
    since a replica is gone is sent to another, one that fails in a replica to one other, and one
    that takes longer than most is sent twice.

    Args:
        addresses: HOST:PORT of each.
        discovery, role: where they register, instead of addresses.
        is_near: which to prefer, by address, while one of them does well.
        token: what they were given.
        root_certificate: a file of PEM, for TLS; None: plain text.

    Raises:
        ConfigError: neither addresses nor a discovery, or a file that cannot be read.
    """

    def __init__(
        self,
        addresses: Sequence[str] = (),
        *,
        discovery: Discovery | None = None,
        role: str = "serve",
        is_near: Callable[[str], bool] | None = None,
        token: str | None = None,
        root_certificate: str | None = None,
    ) -> None:
        if not addresses and discovery is None:
            raise ConfigError(
                "replicas of a model", "none", "addresses, or a discovery", "Name one or more."
            )
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        self._credentials = _credentials(root_certificate)
        self._is_near = is_near
        self._lock = threading.Lock()
        self._endpoints: dict[str, _Endpoint] = {}
        self._recent_s: deque[float] = deque(maxlen=_TIMED)
        self._delay_s: float | None = None
        self._sent = self._hedged = 0
        self._closed = False
        self._set(addresses)
        if discovery is not None:
            discovery.watch(role, lambda book: self._set(tuple(book.values())))

    def __enter__(self) -> ReplicaSet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections, those of requests under way when they are done."""
        with self._lock:
            self._closed = True
        self._set(())

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of all replicas, those left out for a while too."""
        return tuple(self._endpoints)

    @property
    def hedged(self) -> int:
        """Requests that were sent twice."""
        return self._hedged

    def predict(
        self,
        model: str,
        inputs: Mapping[str, Array],
        *,
        outputs: Sequence[str] = (),
        version: int | None = None,
        signature: str = "serving_default",
        timeout_s: float = 1.0,
    ) -> dict[str, Array]:
        """Outputs of a model by name.

        Raises:
            ServerLost: no replica answers within `timeout_s`.
            UnknownName: no such model or version.
            InputError: something else is wrong with the request.
        """
        spec = tfs.ModelSpec(name=model, signature_name=signature)
        if version is not None:
            spec.version.value = version
        request = tfs.PredictRequest(model_spec=spec, output_filter=outputs)
        for name, array in inputs.items():
            request.inputs[name].CopyFrom(tensor_to_tf(np.asarray(array), raw=True))
        reply = tfs.PredictResponse.FromString(
            self._asked(request.SerializeToString(), timeout_s, model)
        )
        return {name: reply_of_tf(name, tensor) for name, tensor in reply.outputs.items()}

    def _asked(self, data: bytes, timeout_s: float, model: str) -> bytes:
        until_s = time.monotonic() + timeout_s
        tried: set[str] = set()
        elsewhere = _OTHERS_MAY_DO
        while True:
            endpoint = self._chosen(tried)
            left_s = until_s - time.monotonic()
            if endpoint is None or left_s <= 0:
                raise _lost(model, "no replica" if endpoint is None else "none in time", timeout_s)
            tried.add(endpoint.address)
            one = self._start(endpoint, data, left_s)
            other = self._hedge(one, data, until_s, tried)
            reply = first_reply(one, other)
            assert reply is not None
            error = reply.exception()
            if error is None:
                for each in (one, other):
                    if each is not None and each is not reply:
                        each.cancel()
                found: bytes = reply.result()
                return found
            if not isinstance(error, grpc.RpcError):
                raise error
            code = error.code()
            again = code in _GONE or code in elsewhere
            if again and self._chosen(tried) is not None:
                if code not in _GONE:
                    elsewhere = frozenset()  # once
                continue
            raise _error_of(error, model, timeout_s) from error

    def _start(self, endpoint: _Endpoint, data: bytes, timeout_s: float) -> Future[bytes]:
        began_s = time.monotonic()
        reply: Future[bytes] = Future()
        with self._lock:
            endpoint.in_flight += 1
        try:
            call = endpoint.predict.future(data, timeout=timeout_s, metadata=self._metadata)
        except ValueError:  # grpc's, of a channel that was closed since it was chosen
            with self._lock:
                endpoint.in_flight -= 1
            reply.set_exception(_ChannelClosed())
            return reply

        def done(call: Any) -> None:
            seconds = time.monotonic() - began_s
            code = call.code()
            with self._lock:
                endpoint.done(seconds, code)
                if code is grpc.StatusCode.OK:
                    self._timed(seconds)
                unused = endpoint.gone and not endpoint.in_flight
            if unused:
                endpoint.channel.close()
            if not reply.set_running_or_notify_cancel():
                return
            if code is grpc.StatusCode.OK:
                reply.set_result(call.result())
            else:
                reply.set_exception(call)  # grpc's calls are their own errors

        call.add_done_callback(done)
        reply.add_done_callback(lambda reply: reply.cancelled() and call.cancel())
        return reply

    def _timed(self, seconds: float) -> None:
        self._recent_s.append(seconds)
        self._sent += 1
        if self._sent % 16 == 0 and len(self._recent_s) >= _KNOWN:
            ordered = sorted(self._recent_s)
            self._delay_s = ordered[int(_PERCENT * (len(ordered) - 1))]

    def _hedge(
        self, one: Future[bytes], data: bytes, until_s: float, tried: set[str]
    ) -> Future[bytes] | None:
        """The same request to another replica, where the first takes long."""
        delay_s = self._delay_s
        if delay_s is None or len(self._endpoints) < 2:
            return None
        done, _ = wait([one], timeout=min(delay_s, max(0.0, until_s - time.monotonic())))
        left_s = until_s - time.monotonic()
        if done or left_s <= 0:
            return None
        with self._lock:
            if (self._hedged + 1) * _ONE_IN > self._sent:
                return None
            self._hedged += 1
        endpoint = self._chosen(tried)
        if endpoint is None:
            return None
        tried.add(endpoint.address)
        return self._start(endpoint, data, left_s)

    def _chosen(self, tried: set[str]) -> _Endpoint | None:
        """The less loaded of two; of those left out only where there are no others."""
        now_s = time.monotonic()
        with self._lock:
            there = [one for one in self._endpoints.values() if one.address not in tried]
            well = [one for one in there if one.out_until_s <= now_s] or there
            if self._is_near is not None:
                well = [one for one in well if self._is_near(one.address)] or well
            if not well:
                return None
            two = random.sample(well, 2) if len(well) > 1 else well
            return min(two, key=lambda one: one.load)

    def _set(self, addresses: Sequence[str]) -> None:
        """Connections of replicas that stay are kept."""
        with self._lock:
            addresses = () if self._closed else addresses
            gone = [self._endpoints.pop(one) for one in set(self._endpoints) - set(addresses)]
            for endpoint in gone:
                endpoint.gone = True
            unused = [endpoint for endpoint in gone if not endpoint.in_flight]
            for address in addresses:
                if address not in self._endpoints:
                    self._endpoints[address] = _Endpoint(address, self._channel(address))
        for endpoint in unused:
            endpoint.channel.close()

    def _channel(self, address: str) -> grpc.Channel:
        if self._credentials is None:
            return grpc.insecure_channel(address, options=_CHANNEL)
        return grpc.secure_channel(address, self._credentials, options=_CHANNEL)


def check_shares(sets: Sequence[ReplicaSet], model: str, *, timeout_s: float) -> None:
    """Ask all of a model's shares at once for nothing.

    Raises:
        ServerLost: one does not answer.
    """
    with ThreadPoolExecutor(max_workers=len(sets), thread_name_prefix="shoal check") as pool:
        calls = [
            pool.submit(_lookup, one, f"{model}:ps_{index}", {}, timeout_s)
            for index, one in enumerate(sets)
        ]
        for call in calls:
            call.result()


def _lookup(
    replicas: ReplicaSet, share: str, ids: Mapping[str, Array], timeout_s: float
) -> dict[str, Array]:
    try:
        return replicas.predict(share, ids, signature="lookup", timeout_s=timeout_s)
    except ServerLost:
        raise
    except ShoalError as error:  # who asks for a prediction did nothing wrong
        remedy = "See whether its servers serve that share of the same model."
        raise ServerLost(f"rows of {share!r}", str(error), "rows", remedy) from error


def find_in(
    sets: Sequence[ReplicaSet], model: str, specs: Sequence[TableSpec], *, timeout_s: float
) -> Find:
    """Rows of a model's shares, which are served as `<model>:ps_<i>`; all are asked at once.

    Args:
        sets: replicas of each share, in order.
        model: its name.
        specs: the tables.
        timeout_s: of each request.
    """
    pool = ThreadPoolExecutor(max_workers=16 * len(sets), thread_name_prefix="shoal shares")

    def ask(index: int, groups: IdGroups) -> Found:
        names = [specs[table].name for table in groups.tables_G.tolist()]
        parts = np.split(groups.ids_N.numpy(), groups.splits_G1.tolist()[1:-1])
        asked = [(name, ids) for name, ids in zip(names, parts, strict=True) if len(ids)]
        joined: dict[str, Array] = {}
        for name, ids in asked:  # a table may be in several groups
            joined[name] = np.concatenate([joined[name], ids]) if name in joined else ids
        share = f"{model}:ps_{index}"
        rows = _lookup(sets[index], share, joined, timeout_s)
        used = dict.fromkeys(joined, 0)
        weights = []
        for table, ids in zip(groups.tables_G.tolist(), parts, strict=True):
            spec, at = specs[table], used.get(specs[table].name, 0)
            none = np.empty((0, spec.dim), np.float32)
            own = rows[spec.name][at : at + len(ids)] if len(ids) else none
            used[spec.name] = at + len(ids)
            weights.append(torch.from_numpy(np.array(own)).to(real_dtype(spec)))
        return Found(tuple(weights), torch.ones(len(groups.ids_N), dtype=torch.bool, device="cpu"))

    def find(shares: Sequence[IdGroups | None]) -> list[Found | None]:
        calls = [
            None if groups is None else pool.submit(ask, index, groups)
            for index, groups in enumerate(shares)
        ]
        return [None if call is None else call.result() for call in calls]

    return find


Servers = ReplicaSet | Sequence[str]


def remote_predict(
    input_tensor_alias: Sequence[str],
    input_tensors: Sequence[Any],
    output_tensor_alias: Sequence[str],
    model_name: str | None,
    task: int = 0,
    old_model_name: str | None = None,
    model_version: int = -1,
    fail_op_on_rpc_error: bool = True,
    max_rpc_deadline_millis: int = 30,
    output_types: Sequence[Any] | None = None,
    signature_name: str = "serving_default",
    *,
    servers: Servers | Mapping[str, Servers] = (),
) -> list[Array]:
    """Outputs of a model that other processes serve: Monolith's `remote_predict`.

    Args:
        input_tensor_alias, input_tensors: names and values; arrays or tensors.
        output_tensor_alias: outputs that are wanted, in order.
        model_name: such as "model:ps_1".
        task, old_model_name: of servers that are known as "ps:<task>" and serve that name, where
            `servers` has no replicas of `model_name`.
        model_version: -1 is the newest.
        fail_op_on_rpc_error: False: an error gives scalar empty outputs.
        max_rpc_deadline_millis: after which there is an error.
        output_types: numpy dtypes of the outputs; None: as they come.
        signature_name: of the model.
        servers: replicas of the model, or by the name of each model.

    Raises:
        ConfigError: no model name (a ValueError).
        InputError: other numbers of names than of values or types; or the model refuses them.
        UnknownName: no such model, version or output.
        ServerLost: no replica is known, or none answers in time.
    """
    if model_name is None:
        remedy = "Pass model_name."
        raise ConfigError("model_name of remote_predict", None, "a name", remedy)
    pairs = [("input_tensors", len(input_tensors), len(input_tensor_alias))]
    if output_types is not None:
        pairs.append(("output_types", len(output_types), len(output_tensor_alias)))
    for what, got, wanted in pairs:
        if got != wanted:
            raise ShapeError(f"number of {what}", got, f"{wanted}, one of each alias", "Pair them.")
    try:
        known, name = _servers_of(servers, model_name, task, old_model_name)
        found = known.predict(
            name,
            dict(zip(input_tensor_alias, map(np.asarray, input_tensors), strict=True)),
            outputs=output_tensor_alias,
            version=model_version if model_version >= 0 else None,
            signature=signature_name,
            timeout_s=max_rpc_deadline_millis / 1000,
        )
    except ShoalError:
        if fail_op_on_rpc_error:
            raise
        types = output_types or [np.float32] * len(output_tensor_alias)
        return [np.zeros((), dtype=dtype) for dtype in types]
    outputs = [found[alias] for alias in output_tensor_alias]
    if output_types is None:
        return outputs
    return [one.astype(t, copy=False) for one, t in zip(outputs, output_types, strict=True)]


def _servers_of(
    servers: Servers | Mapping[str, Servers], model: str, task: int, old: str | None
) -> tuple[ReplicaSet, str]:
    """Replicas to ask, and the model's name there."""
    name, found = model, servers
    if isinstance(servers, Mapping):
        by_task = f"ps:{task}"
        if model not in servers and by_task in servers:
            name, found = old or model, servers[by_task]
        else:
            found = servers.get(model, ())
    if isinstance(found, ReplicaSet):
        return found, name
    if not found or isinstance(found, Mapping):
        raise _lost(model, "no service known", 0.0)
    return _connected(tuple(found)), name


@functools.lru_cache(maxsize=64)
def _connected(addresses: tuple[str, ...]) -> ReplicaSet:
    return ReplicaSet(addresses)


def _credentials(root_certificate: str | None) -> grpc.ChannelCredentials | None:
    if root_certificate is None:
        return None
    try:
        return grpc.ssl_channel_credentials(Path(root_certificate).read_bytes())
    except OSError as error:
        raise ConfigError(
            "root certificate", f"{root_certificate} ({error})", "a file of PEM", "Check the path."
        ) from error


def _error_of(error: Any, model: str, timeout_s: float) -> ShoalError:
    code, details = error.code(), error.details()
    if code is grpc.StatusCode.NOT_FOUND:
        return UnknownName(details)
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InputError(details)
    return _lost(model, f"{code.name}: {details}", timeout_s)


def _lost(model: str, got: str, timeout_s: float) -> ServerLost:
    return ServerLost(
        f"prediction of model {model!r}",
        got=got,
        allowed=f"a reply within {1000 * timeout_s:g} ms",
        remedy="See whether its servers run, or allow more time.",
    )
