"""Monolith's push of changed rows: the numbers of its tests, and the bytes on the wire."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import grpc
import pytest
import torch

from shoal import Segment, TableSpec
from shoal.compat.monolith.agent_service.backends import SyncBackend, TargetExtraInfo, Targets
from shoal.compat.monolith.native_training import distributed_serving_ops as ops
from shoal.compat.monolith.native_training.distributed_ps import DistributedHashTable
from shoal.compat.monolith.native_training.distributed_ps_factory import (
    create_multi_type_hash_table,
    create_native_multi_hash_table,
)
from shoal.compat.monolith.native_training.protos.parameter_sync_pb2 import (
    ClientConfig,
    PushRequest,
)
from shoal.errors import ConfigError, InputError
from shoal.rules.initializers import Zeros
from shoal.rules.optimizers import SGD
from shoal.serve.protos import tfserving_pb2 as tfs


def spec(name: str, dim: int = 3) -> TableSpec:
    segment = Segment(dim=dim, initializer=Zeros(), optimizer=SGD(lr=0.1))
    return TableSpec(name=name, segments=(segment,))


def config_of(*targets: str, timeout_ms: int = 30_000) -> bytes:
    return ClientConfig(
        model_name="m", signature_name="hashtable_assign", targets=targets, timeout_in_ms=timeout_ms
    ).SerializeToString()


class Recorder:
    """A server of Predict that keeps what it was sent, under one address."""

    def __init__(self, code: grpc.StatusCode | None = None) -> None:
        self.requests: list[tfs.PredictRequest] = []
        self.code = code
        self.answer: Callable[[Any, Any], Any] | None = None
        handler = grpc.unary_unary_rpc_method_handler(
            self._predict,
            request_deserializer=tfs.PredictRequest.FromString,
            response_serializer=tfs.PredictResponse.SerializeToString,
        )
        self._server = grpc.server(
            ThreadPoolExecutor(1), options=[("grpc.max_receive_message_length", -1)]
        )
        service = "tensorflow.serving.PredictionService"
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {"Predict": handler}),)
        )
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def _predict(self, request: tfs.PredictRequest, context: Any) -> tfs.PredictResponse:
        if self.answer is not None:
            return self.answer(request, context)
        if self.code is not None:
            context.abort(self.code, "not now")
        self.requests.append(request)
        return tfs.PredictResponse()

    def close(self) -> None:
        self._server.stop(None).wait()


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with closing(Recorder()) as one:
        yield one


def test_the_bytes_of_a_client_config() -> None:
    """Fields 1 to 5 by hand: key byte = number * 8 + wire type."""

    class Backend(SyncBackend):
        def subscribe_model(self, model_name: str) -> None: ...
        def start(self) -> None: ...
        def stop(self) -> None: ...
        def get_sync_targets(self, sub_graph: str) -> tuple[str, Targets]:
            assert sub_graph == "ps_2"
            return "m:ps_2", {"h:1": TargetExtraInfo(idc="lf", cluster="d", replica_id=3)}

    assert ops.refresh_sync_config(Backend(), 2) == (
        b"\x0a\x06m:ps_2"  # 1: model_name
        b"\x12\x10hashtable_assign"  # 2: signature_name
        b"\x1a\x03h:1"  # 3: targets
        b"\x20\xb8\x17"  # 4: timeout_in_ms 3000 = 0x17 * 128 + 0x38
        b"\x2a\x09\x0a\x02lf\x12\x01d\x18\x03"  # 5: targets_extra_info
    )
    assert ClientConfig().timeout_in_ms == PushRequest().timeout_in_ms == 1000
    assert TargetExtraInfo().replica_id == -1


@pytest.mark.parametrize("ps_num", [0, 1, 3])
def test_a_client_for_each_server(ps_num: int) -> None:
    clients = ops.create_parameter_sync_clients(ps_num)
    names = [f"MonolithSyncClient_{i}" for i in range(max(1, ps_num))]
    assert [one.shared_name for one in clients] == names


def test_a_table_pushes_what_gradients_changed() -> None:
    servers = [ops.create_dummy_sync_server() for _ in range(2)]
    ports = [one.as_op().get_port() for one in servers]
    assert all(port.dtype == torch.int32 and port.shape == (1,) for port in ports)
    config = ClientConfig(
        model_name="m",
        signature_name="hashtable_assign",
        targets=[f"localhost:{int(port)}" for port in ports],
        timeout_in_ms=30_000,
    )
    client = ops.parameter_sync_client_from_config(config, "0").as_op()
    table = DistributedHashTable(0, spec("t"), sync_client=client)
    assert table.lookup(torch.tensor([0, 1])).tolist() == [[0.0] * 3] * 2
    table.apply_gradients(torch.tensor([0, 0, 1]), -torch.ones(3, 3), global_step=0)
    expected = torch.tensor([[0.2] * 3, [0.1] * 3])
    torch.testing.assert_close(table.lookup(torch.tensor([0, 1])), expected)
    result = json.loads(client.create_sync_op(config.SerializeToString()))
    assert result == {
        "responses": [
            {"status_code": 0, "error_message": "", "target": target, "update_num": 2}
            for target in config.targets
        ]
    }
    assert json.loads(client.create_sync_op()) == {}  # nothing changed since
    assert [one.shutdown().tolist() for one in servers] == [[100], [100]]
    assert servers[0].shutdown().dtype == torch.int64
    client.close()


def test_plain_tables_travel_by_name(recorder: Recorder) -> None:
    client = ops.ParameterSyncClient()
    tables = create_multi_type_hash_table(
        0, {"a": spec("x", 2), "b": spec("x", 1)}, sync_clients=[client]
    )
    tables.assign({"a": (torch.tensor([5]), torch.ones(1, 2))})  # is not pushed
    ones = (torch.tensor([7, 8]), -torch.ones(2, 1))
    tables.apply_gradients({"b": ones}, global_step=0)
    tables.reinitialize("a", torch.tensor([9]))
    client.create_sync_op(config_of(recorder.address))
    (request,) = recorder.requests
    assert request.model_spec.name == "m"
    assert request.model_spec.signature_name == "hashtable_assign"
    a, b = (tables.slot_mapping[slot] for slot in "ab")
    assert sorted(request.inputs) == sorted(f"{n}_{k}" for n in (a, b) for k in ("id", "value"))
    ids, values = request.inputs[f"{b}_id"], request.inputs[f"{b}_value"]
    assert (ids.dtype, list(ids.int64_val)) == (tfs.DT_INT64, [7, 8])
    assert (values.dtype, [one.size for one in values.tensor_shape.dim]) == (tfs.DT_FLOAT, [2, 1])
    assert list(values.float_val) == pytest.approx([0.1, 0.1])
    assert not ids.tensor_content and not values.tensor_content
    assert list(request.inputs[f"{a}_id"].int64_val) == [9]
    client.close()


def test_a_multi_table_travels_whole(recorder: Recorder) -> None:
    clients = [ops.ParameterSyncClient() for _ in range(2)]
    slots = {"1": spec("x", 2), "2": spec("x", 1), "3": spec("x", 4)}
    tables = create_native_multi_hash_table(0, slots, sync_clients=clients)
    grads = {"1": (torch.tensor([1, 2, 4]), -torch.ones(3, 2)),
             "3": (torch.tensor([6]), -torch.ones(1, 4))}  # fmt: skip
    tables.apply_gradients(grads, global_step=0)
    for client in clients:
        client.create_sync_op(config_of(recorder.address))
        client.close()
    even, odd = recorder.requests  # id modulo 2
    assert even.model_spec.signature_name == "native_multi_hash_table/raw_assign"
    assert list(even.inputs["id"].int64_val) == [2, 4, 6]
    assert list(even.inputs["id_split"].int64_val) == [0, 2, 2, 3]
    assert list(even.inputs["flat_value"].float_val) == pytest.approx([0.1] * 8)
    assert list(odd.inputs["id"].int64_val) == [1]
    assert list(odd.inputs["id_split"].int64_val) == [0, 1, 1, 1]


def test_the_conversion_of_a_multi_table() -> None:
    request = PushRequest()
    request.delta_multi_hash_tables.add(dim_size=2, fids=[1, 2], embeddings=[1, 2, 3, 4])
    request.delta_multi_hash_tables.add(dim_size=1, fids=[3], embeddings=[5])
    inputs = ops.predict_request(request).inputs
    assert list(inputs["id"].int64_val) == [1, 2, 3]
    assert list(inputs["id_split"].int64_val) == [0, 2, 3]
    assert list(inputs["flat_value"].float_val) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("multi", [False, True])
def test_the_splitter(multi: bool) -> None:
    request = PushRequest(model_name="model", signature_name="hashtable_assign", timeout_in_ms=77)
    tables = request.delta_multi_hash_tables if multi else request.delta_hash_tables
    for name, count, dim in (("t0", 0, 1), ("t1", 2, 1), ("t2", 3, 2)):
        fids, values = range(count), [float(k) for k in range(count * dim)]
        tables.add(unique_id=name, dim_size=dim, fids=fids, embeddings=values)
    request.model_name += "l" * (111 - request.ByteSize())
    assert request.ByteSize() == 111
    parts = ops.split_push_request(request, 60)
    split = [list(one.delta_multi_hash_tables if multi else one.delta_hash_tables) for one in parts]
    assert [[len(table.fids) for table in part] for part in split] == [[0, 1, 1], [0, 1, 2]]
    assert [one.timeout_in_ms for one in parts] == [77, 77]
    assert [[list(t.fids) for t in part] for part in split] == [[[], [0], [0]], [[], [1], [1, 2]]]
    assert list(split[0][2].embeddings) == [0, 1]
    assert list(split[1][2].embeddings) == [2, 3, 4, 5]
    assert [one.ByteSize() <= 111 for one in parts] == [True, True]


def test_a_large_push_comes_in_parts(recorder: Recorder) -> None:
    client = ops.ParameterSyncClient()
    table = DistributedHashTable(0, spec("t", 64), sync_client=client)
    ids = torch.arange(20_001)
    table.apply_gradients(ids, -torch.ones(20_001, 64), global_step=0)
    result = json.loads(client.create_sync_op(config_of(recorder.address)))
    # 64 floats of 5 bytes, and up to 4 bytes of an id: 6.4 MB
    assert [one["update_num"] for one in result["responses"]] == [10_000, 10_001]
    sent = [list(one.inputs["t_id"].int64_val) for one in recorder.requests]
    assert [one for part in sent for one in part] == ids.tolist()
    client.close()


def test_what_a_target_missed_is_pushed_again(recorder: Recorder) -> None:
    client = ops.ParameterSyncClient()
    table = DistributedHashTable(0, spec("t"), sync_client=client)
    table.apply_gradients(torch.tensor([1]), -torch.ones(1, 3), global_step=0)
    assert json.loads(client.create_sync_op(config_of())) == {}  # no target yet
    with closing(Recorder(grpc.StatusCode.UNAVAILABLE)) as down:
        result = json.loads(client.create_sync_op(config_of(down.address, recorder.address)))
        assert [(one["status_code"], one["update_num"]) for one in result["responses"]] == [
            (14, 0),
            (0, 1),
        ]
        assert result["responses"][0]["error_message"] == "not now"
        table.apply_gradients(torch.tensor([1, 2]), -torch.ones(2, 3), global_step=1)
        down.code = None
        client.create_sync_op()
        (late,) = down.requests
    assert list(late.inputs["t_id"].int64_val) == [1, 2]
    assert list(late.inputs["t_value"].float_val) == pytest.approx([0.2] * 3 + [0.1] * 3)
    assert json.loads(client.create_sync_op()) == {}
    client.close()


def test_a_target_that_is_away_costs_the_others_nothing(recorder: Recorder) -> None:
    client = ops.ParameterSyncClient()
    table = DistributedHashTable(0, spec("t", 64), sync_client=client)
    with closing(Recorder(grpc.StatusCode.UNAVAILABLE)) as down:
        calls = 0

        def counted(request: Any, context: Any) -> Any:
            nonlocal calls
            calls += 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "away")

        down.answer = counted
        for ids in (torch.arange(20_001), torch.tensor([5]), torch.tensor([6])):
            table.apply_gradients(ids, -torch.ones(len(ids), 64), global_step=0)
            result = json.loads(client.create_sync_op(config_of(down.address, recorder.address)))
            codes = [one["status_code"] for one in result["responses"]]
            assert codes == [14, 14, *[0] * (2 if len(ids) > 1 else 1)]
        assert calls == 3  # the first part of each push
    sent = [list(one.inputs["t_id"].int64_val) for one in recorder.requests]
    assert sent[2:] == [[5], [6]]
    client.close()


def test_touched_ids_are_not_sorted_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    client, rows, sort = ops.ParameterSyncClient(), 0, torch.unique

    def counted(ids: torch.Tensor) -> torch.Tensor:
        nonlocal rows
        rows += len(ids)
        return sort(ids)

    client.bind({"a": ops.BoundTable(1, lambda ids: (ids[:, None], ids > 0))})
    with pytest.raises(ConfigError, match="table of sync client"):
        client.touch("b", torch.tensor([1]))
    monkeypatch.setattr(ops.torch, "unique", counted)
    for k in range(6500):
        client.touch("a", torch.arange(k * 10, k * 10 + 10))
    assert rows < 65_000 * 10  # 50 times 65,000 if all were sorted each time


def test_ids_without_a_row_are_left_out(recorder: Recorder) -> None:
    client = ops.ParameterSyncClient()
    table = DistributedHashTable(0, spec("t"), sync_client=client)
    client.touch("t", torch.tensor([5]))
    table.apply_gradients(torch.tensor([6]), -torch.ones(1, 3), global_step=0)
    client.create_sync_op(config_of(recorder.address))
    assert list(recorder.requests[0].inputs["t_id"].int64_val) == [6]
    client.close()


def test_a_dummy_server_refuses_other_inputs() -> None:
    server = ops.DummySyncServer()
    request = tfs.PredictRequest()
    request.inputs["flat_value"].dtype = request.inputs["id_split"].dtype = tfs.DT_INT64
    with grpc.insecure_channel(f"127.0.0.1:{int(server.get_port())}") as channel:
        predict = channel.unary_unary(
            ops.PREDICT,
            request_serializer=tfs.PredictRequest.SerializeToString,
            response_deserializer=tfs.PredictResponse.FromString,
        )
        with pytest.raises(grpc.RpcError, match="id_split") as caught:
            predict(request, timeout=60)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        request = tfs.PredictRequest(model_spec=tfs.ModelSpec(name="m"))
        assert predict(request, timeout=60).model_spec.name == "m"  # it still runs
    server.shutdown()


def test_a_dummy_client_pushes_nothing() -> None:
    client = ops.create_dummy_sync_client().as_op()
    table = DistributedHashTable(0, spec("t"), sync_client=client)
    table.apply_gradients(torch.tensor([1]), -torch.ones(1, 3), global_step=0)
    assert json.loads(client.create_sync_op(config_of("127.0.0.1:1"))) == {}


@pytest.mark.parametrize("first", [None, "multi"])
@pytest.mark.parametrize("second", [None, "multi"])
def test_plain_tables_and_a_multi_table_do_not_mix(first: str | None, second: str | None) -> None:
    client = ops.ParameterSyncClient()
    client.bind({"a": ops.BoundTable(1, lambda ids: (ids[:, None], ids > 0))}, first)
    if first == second is None:
        client.bind({"b": ops.BoundTable(1, lambda ids: (ids[:, None], ids > 0))}, second)
        with pytest.raises(ConfigError, match="again"):
            client.bind({"b": ops.BoundTable(1, lambda ids: (ids[:, None], ids > 0))}, second)
    else:
        with pytest.raises(ConfigError, match="tables of sync client"):
            client.bind({"b": ops.BoundTable(1, lambda ids: (ids[:, None], ids > 0))}, second)


def test_a_damaged_config_is_refused() -> None:
    with pytest.raises(InputError, match="config of a sync op"):
        ops.ParameterSyncClient().create_sync_op(b"\xff\xff")
