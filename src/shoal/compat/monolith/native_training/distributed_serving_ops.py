"""Monolith's push of changed rows to servers of its models, over TensorFlow Serving's Predict.

`shoal.sync` is what to use between processes of Shoal: it is ordered, carries deletions and dense
weights, and is acknowledged. This is for servers that speak Monolith's protocol.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from shoal.compat.monolith.agent_service.backends import SyncBackend
from shoal.compat.monolith.native_training.protos.parameter_sync_pb2 import (
    ClientConfig,
    PushRequest,
    PushResponse,
    PushResult,
)
from shoal.compat.monolith.native_training.sync_clients import BoundTable
from shoal.errors import ConfigError, InputError, known_name
from shoal.serve.packages import DecodeError, MessageToJson, grpc
from shoal.serve.protos import tfserving_pb2 as tfs

_log = logging.getLogger(__name__)

PREDICT = "/tensorflow.serving.PredictionService/Predict"
MOST_BYTES = 4 << 20  # of a request
_CHANNEL_BYTES = 32 << 20
_TIMEOUT_MS = 3000
_KEEP = 64  # parts of a table's touched ids before duplicates among them are dropped
_Ids = dict[str, Tensor]


class _Touched:
    """Ids of a table: the last few parts, and runs without duplicates, each half the one before."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []
        self._runs: list[Tensor] = []

    def add(self, ids: Tensor) -> None:
        self._parts.append(ids)
        if len(self._parts) <= _KEEP:
            return
        runs = self._runs
        runs.append(torch.unique(torch.cat(self._parts)))
        self._parts.clear()
        while len(runs) > 1 and len(runs[-2]) < 2 * len(runs[-1]):
            runs[-2:] = [torch.unique(torch.cat(runs[-2:]))]

    def ids(self) -> Tensor:
        ids: Tensor = torch.unique(torch.cat([*self._runs, *self._parts]))
        return ids


class ParameterSyncClient:
    """Notes which rows of its tables changed, and pushes their current values to all targets.

    Args:
        config: targets, model name, signature and timeout, until a sync op brings newer ones.
        shared_name: its name.
    """

    def __init__(
        self, config: ClientConfig | None = None, shared_name: str = "MonolithSyncClient"
    ) -> None:
        self.shared_name = shared_name
        self._config = ClientConfig() if config is None else config
        self._tables: dict[str, BoundTable] = {}
        self._multi: str | None = None
        self._touched: dict[str, _Touched] = {}
        self._missed: dict[str, _Ids] = {}  # by target
        self._channels: dict[str, Any] = {}
        self._lock, self._pushing = threading.Lock(), threading.Lock()

    def bind(self, tables: Mapping[str, BoundTable], shared_name: str | None = None) -> None:
        """Take tables by unique id; with a shared name they are one multi-table.

        Raises:
            ConfigError: plain tables and a multi-table, two multi-tables, or a table twice.
        """
        with self._lock:
            mixed = bool(self._tables) and (self._multi is not None or shared_name is not None)
            twice = sorted(self._tables.keys() & tables.keys())
            if mixed or twice:
                raise ConfigError(
                    f"tables of sync client {self.shared_name}",
                    got=f"{twice} again" if twice else f"{sorted(tables)} next to others",
                    allowed="plain tables, each once, or one multi-table",
                    remedy="Use another client.",
                )
            self._tables |= tables
            self._multi = shared_name

    def touch(self, table: str, ids: Tensor) -> None:
        """Note ids whose rows changed.

        Raises:
            UnknownName: of a table that was not bound.
        """
        known_name(f"table of sync client {self.shared_name}", table, self._tables)
        if len(ids):
            with self._lock:
                self._touched.setdefault(table, _Touched()).add(ids.detach().clone())

    def create_sync_op(self, config_str: bytes | None = None) -> str:
        """Push what changed since the last call; done when it returns.

        Ids of a push that failed are pushed again with the next one, to the targets that missed
        them; without targets they are kept.

        Args:
            config_str: a serialized `ClientConfig`, from `refresh_sync_config` say; None: the last.

        Returns:
            a `PushResult` as JSON, with a response for each target and part of the request.

        Raises:
            InputError: a config that is none.
        """
        with self._pushing:
            if config_str is not None:
                self._config = _parsed(config_str)
            config = self._config
            self._connect(config.targets)
            with self._lock:
                if not config.targets:
                    return _json(PushResult())
                changed = {name: one.ids() for name, one in self._touched.items()}
                self._touched.clear()
            try:
                return _json(self._push(changed))
            except BaseException:
                for name, ids in changed.items():
                    self.touch(name, ids)
                raise

    def as_op(self, name: str | None = None) -> ParameterSyncClient:
        """The client itself."""
        return self

    def close(self) -> None:
        """Close its connections. May be called twice."""
        with self._pushing:
            self._connect(())

    def _push(self, changed: _Ids) -> PushResult:
        """Push what changed, to each target with what it missed before."""
        targets = list(dict.fromkeys(self._config.targets))
        wanted = {one: _joined(changed, self._missed.get(one, {})) for one in targets}
        wanted = {one: ids for one, ids in wanted.items() if ids}
        if not wanted:
            return PushResult()
        common = self._parts(changed) if changed else []
        parts = {
            one: self._parts(ids) if one in self._missed else common for one, ids in wanted.items()
        }
        with ThreadPoolExecutor(min(32, len(wanted))) as threads:
            found = list(threads.map(self._send, wanted, parts.values()))
        self._missed = {
            one: wanted[one]
            for one, responses in zip(wanted, found, strict=True)
            if any(response.status_code for response in responses)
        }
        return PushResult(responses=[one for responses in found for one in responses])

    def _parts(self, ids_by_table: _Ids) -> list[PushRequest]:
        """Requests with the rows of these ids; a multi-table's have all its tables."""
        config = self._config
        request = PushRequest(
            model_name=config.model_name,
            signature_name=config.signature_name,
            timeout_in_ms=config.timeout_in_ms,
        )
        deltas = request.delta_hash_tables
        if self._multi is not None:
            request.signature_name = f"{self._multi}/raw_assign"
            deltas = request.delta_multi_hash_tables
        for name in sorted(ids_by_table) if self._multi is None else self._tables:
            ids, table = ids_by_table.get(name, _NONE), self._tables[name]
            rows, there = table.find(ids)
            deltas.add(
                unique_id=name,
                dim_size=table.dim,
                fids=ids[there.cpu()].tolist(),
                embeddings=rows[there].float().reshape(-1).tolist(),
            )
        return split_push_request(request)

    def _send(self, target: str, parts: Sequence[PushRequest]) -> list[PushResponse]:
        away = grpc.StatusCode.UNAVAILABLE.value[0], grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        predict = self._channels[target][1]
        responses: list[PushResponse] = []
        for part in parts:
            if responses and responses[-1].status_code in away:  # the others would wait as long
                responses.append(responses[-1])
                continue
            deltas = (*part.delta_hash_tables, *part.delta_multi_hash_tables)
            response = PushResponse(status_code=0, error_message="", target=target)
            try:
                predict(predict_request(part), timeout=part.timeout_in_ms / 1000)
                response.update_num = sum(len(one.fids) for one in deltas)
            except grpc.RpcError as error:
                response.status_code = error.code().value[0]
                response.error_message, response.update_num = error.details() or "", 0
                _log.warning("push to %s: %s", target, response.error_message)
            responses.append(response)
        return responses

    def _connect(self, targets: Sequence[str]) -> None:
        """Close connections that are not wanted any more, and open new ones."""
        for target in self._channels.keys() - set(targets):
            self._channels.pop(target)[0].close()
        limits = [(f"grpc.max_{way}_message_length", _CHANNEL_BYTES) for way in ("send", "receive")]
        for target in targets:
            if target not in self._channels:
                channel = grpc.insecure_channel(target, options=limits)
                predict = channel.unary_unary(
                    PREDICT,
                    request_serializer=tfs.PredictRequest.SerializeToString,
                    response_deserializer=tfs.PredictResponse.FromString,
                )
                self._channels[target] = channel, predict


_NONE = torch.empty(0, dtype=torch.int64, device="cpu")


def _joined(one: _Ids, other: _Ids) -> _Ids:
    """Ids of both, by table."""
    both = one.keys() & other.keys()
    return {**one, **other, **{k: torch.unique(torch.cat([one[k], other[k]])) for k in both}}


def split_push_request(request: PushRequest, max_bytes: int = MOST_BYTES) -> list[PushRequest]:
    """Parts of at most about `max_bytes`: n = ceil(bytes / max_bytes) of them.

    Of k ids of a table each part has floor(k / n), the last one also what is left over.
    """
    count = max(1, -(-request.ByteSize() // max_bytes))
    parts = []
    for index in range(count):
        part = PushRequest(
            model_name=request.model_name,
            signature_name=request.signature_name,
            timeout_in_ms=request.timeout_in_ms,
        )
        for given, taken in (
            (request.delta_hash_tables, part.delta_hash_tables),
            (request.delta_multi_hash_tables, part.delta_multi_hash_tables),
        ):
            for table in given:
                share, dim = len(table.fids) // count, table.dim_size
                start = index * share
                stop = len(table.fids) if index == count - 1 else start + share
                taken.add(
                    unique_id=table.unique_id,
                    dim_size=dim,
                    fids=table.fids[start:stop],
                    embeddings=table.embeddings[start * dim : stop * dim],
                )
        parts.append(part)
    return parts


def predict_request(part: PushRequest) -> tfs.PredictRequest:
    """A push as servers of Monolith take it.

    Plain tables: `{unique_id}_id` [n] and `{unique_id}_value` [n, D]. A multi-table: `id`,
    `id_split` that starts with 0, and `flat_value`, in the order of its tables.
    """
    request = tfs.PredictRequest()
    request.model_spec.name = part.model_name
    request.model_spec.signature_name = part.signature_name
    for table in part.delta_hash_tables:
        name, count, dim = table.unique_id, len(table.fids), table.dim_size
        _ids(request.inputs[f"{name}_id"], table.fids)
        _floats(request.inputs[f"{name}_value"], table.embeddings, count, dim)
    tables = part.delta_multi_hash_tables
    if tables:
        values = [value for one in tables for value in one.embeddings]
        _ids(request.inputs["id"], [fid for one in tables for fid in one.fids])
        splits = itertools.accumulate((len(one.fids) for one in tables), initial=0)
        _ids(request.inputs["id_split"], list(splits))
        _floats(request.inputs["flat_value"], values, len(values))
    return request


def _ids(tensor: tfs.TensorProto, values: Sequence[int]) -> None:
    tensor.dtype = tfs.DT_INT64
    tensor.tensor_shape.dim.add(size=len(values))
    tensor.int64_val.extend(values)


def _floats(tensor: tfs.TensorProto, values: Sequence[float], *shape: int) -> None:
    tensor.dtype = tfs.DT_FLOAT
    for size in shape:
        tensor.tensor_shape.dim.add(size=size)
    tensor.float_val.extend(values)


def create_parameter_sync_clients(ps_num: int) -> list[ParameterSyncClient]:
    """A client for each server of a model, or one for 0."""
    return [parameter_sync_client_from_config(name_suffix=str(i)) for i in range(max(ps_num, 1))]


def parameter_sync_client_from_config(
    config: ClientConfig | None = None, name_suffix: str = ""
) -> ParameterSyncClient:
    """A client named `MonolithSyncClient_{name_suffix}`."""
    name = f"MonolithSyncClient_{name_suffix}" if name_suffix else "MonolithSyncClient"
    return ParameterSyncClient(config, name)


def refresh_sync_config(sync_backend: SyncBackend, ps_index: int) -> bytes:
    """A serialized `ClientConfig` with who serves `ps_{ps_index}` now."""
    name, targets = sync_backend.get_sync_targets(f"ps_{ps_index}")
    config = ClientConfig(
        model_name=name, signature_name="hashtable_assign", timeout_in_ms=_TIMEOUT_MS
    )
    config.targets.extend(targets)
    if isinstance(targets, Mapping):
        config.targets_extra_info.extend(targets.values())
    return bytes(config.SerializeToString())


class DummySyncClient:
    """Takes everything and pushes nothing."""

    def bind(self, tables: Mapping[str, BoundTable], shared_name: str | None = None) -> None:
        """Does nothing."""

    def touch(self, table: str, ids: Tensor) -> None:
        """Does nothing."""

    def create_sync_op(self, config_str: bytes | None = None) -> str:
        """An empty result."""
        return _json(PushResult())

    def as_op(self, name: str | None = None) -> DummySyncClient:
        """The client itself."""
        return self


def create_dummy_sync_client() -> DummySyncClient:
    """A client that pushes nothing."""
    return DummySyncClient()


class DummySyncServer:
    """A server of Predict for tests: takes pushes of plain tables and drops them.

    Args:
        address: HOST:PORT; port 0 takes a free one.

    Raises:
        ConfigError: it cannot listen there.
    """

    def __init__(self, address: str = "127.0.0.1:0") -> None:
        handler = grpc.unary_unary_rpc_method_handler(
            self._predict,
            request_deserializer=tfs.PredictRequest.FromString,
            response_serializer=tfs.PredictResponse.SerializeToString,
        )
        service, method = PREDICT.strip("/").split("/")
        self._server = grpc.server(
            ThreadPoolExecutor(2), options=[("grpc.max_receive_message_length", _CHANNEL_BYTES)]
        )
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {method: handler}),)
        )
        try:
            self._port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(
                "address of a sync server",
                got=f"{address!r} ({error})",
                allowed="HOST:PORT that is free",
                remedy="Use port 0.",
            ) from None
        self._server.start()

    def get_port(self) -> Tensor:
        """int32 [1]."""
        return torch.tensor([self._port], dtype=torch.int32, device="cpu")

    def shutdown(self) -> Tensor:
        """Stop; int64 [1] with 100. May be called twice."""
        self._server.stop(None).wait()
        return torch.tensor([100], dtype=torch.int64, device="cpu")

    def as_op(self, name: str | None = None) -> DummySyncServer:
        """The server itself."""
        return self

    def _predict(self, request: tfs.PredictRequest, context: Any) -> tfs.PredictResponse:
        wrong = sorted(one for one in request.inputs if not one.endswith(("_id", "_value")))
        if wrong:
            error = InputError(
                "inputs of a push",
                got=str(wrong)[:200],
                allowed="names that end with _id or _value",
                remedy="Push plain tables.",
            )
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return tfs.PredictResponse(model_spec=request.model_spec)


def create_dummy_sync_server(address: str = "127.0.0.1:0") -> DummySyncServer:
    """A server of pushes for tests."""
    return DummySyncServer(address)


def _parsed(config_str: bytes) -> ClientConfig:
    config = ClientConfig()
    try:
        config.ParseFromString(config_str)
        return config
    except DecodeError as error:
        raise InputError(
            "config of a sync op",
            got=str(error)[:200],
            allowed="a serialized ClientConfig",
            remedy="Pass what refresh_sync_config returns.",
        ) from None


def _json(result: PushResult) -> str:
    return str(MessageToJson(result, preserving_proto_field_name=True))
