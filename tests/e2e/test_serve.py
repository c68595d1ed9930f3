"""Servers over real connections, asked by clients that others wrote, unmodified."""

from __future__ import annotations

import http.client
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest
import tritonclient.grpc
import tritonclient.http
from rich.console import Console

from shoal import config as settings
from shoal import train
from shoal.config.build import open_data
from shoal.errors import CheckpointError, ConfigError, ServerLost
from shoal.serve.client import ReplicaSet
from shoal.serve.loading import FolderSource, ServedShare
from shoal.serve.protos import health_pb2 as health
from shoal.serve.protos import tfserving_pb2 as tfs
from shoal.serve.repository import Repository
from shoal.serve.server import ModelServer, Tls
from shoal.serve.service import Limits, Service
from shoal.serve.tensors import tensor_of_tf, tensor_to_tf
from support.served_models import (
    EchoModel,
    OneSource,
    serving,
    serving_sources,
    tiny_inputs,
    trained,
)

Served = tuple[ModelServer, Repository]
http_get, http_post = (partial(one, timeout=60) for one in (httpx.get, httpx.post))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def served(run: Path) -> Iterator[Served]:
    with serving(run) as both:
        yield both


def call(server: ModelServer, method: str, request: Any, **options: Any) -> bytes:
    with grpc.insecure_channel(server.grpc_address) as channel:
        data = request if isinstance(request, bytes) else request.SerializeToString()
        reply: bytes = channel.unary_unary(method)(data, timeout=60, **options)
        return reply


def predict_request(inputs: dict[str, np.ndarray], **spec: Any) -> tfs.PredictRequest:
    request = tfs.PredictRequest(model_spec=tfs.ModelSpec(name="tiny", **spec))
    for name, array in inputs.items():
        request.inputs[name].CopyFrom(tensor_to_tf(array))
    return request


PREDICT = "/tensorflow.serving.PredictionService/Predict"


def test_a_served_model_predicts_what_the_command_writes(run: Path, tmp_path: Path) -> None:
    console = Console(quiet=True)
    file = train.predict(str(run), out=tmp_path / "predictions.parquet", console=console)
    wanted = pq.read_table(file)["prediction"].to_numpy()
    (batch,) = open_data(settings.load(run / "config.yaml")).evaluation.batches(0)
    inputs = {key: batch.ids[key].values.numpy() for key in batch.ids.keys}
    assert batch.dense is not None
    inputs["dense"] = batch.dense.numpy()
    source = FolderSource(run)
    version = source.newest()
    assert version is not None
    model = source.load(version)
    found = model.run([model.read(inputs)])[0]["prediction"]
    assert np.array_equal(found, wanted)
    # Together with others the sums of a matrix product may be in another order.
    halves = [{k: one[part] for k, one in inputs.items()} for part in (slice(40), slice(40, None))]
    replies = model.run([model.read(one) for one in halves])
    joined = np.concatenate([one["prediction"] for one in replies])
    assert np.array_equal(joined, wanted)


@pytest.mark.parametrize("client", [tritonclient.grpc, tritonclient.http])
def test_tritonclient(client: Any, served: Served) -> None:
    server, models = served
    address = server.grpc_address if client is tritonclient.grpc else server.http_address
    asks = client.InferenceServerClient(address)
    assert asks.is_server_live()
    assert asks.is_server_ready()
    assert asks.is_model_ready("tiny")
    metadata = asks.get_model_metadata("tiny", **as_json(client))
    shapes = {one["name"]: (one["datatype"], one["shape"]) for one in metadata["inputs"]}
    assert {k: (d, [int(n) for n in s]) for k, (d, s) in shapes.items()} == {
        "f0": ("INT64", [-1]),
        "f1": ("INT64", [-1]),
        "f2": ("INT64", [-1]),
        "dense": ("FP32", [-1, 4]),
    }
    inputs = tiny_inputs(7)
    wanted = models.get("tiny").predict(inputs)["prediction"]
    for binary in (True, False) if client is tritonclient.http else (True,):
        sent = triton_inputs(client, inputs, **({} if binary else {"binary_data": False}))
        found = asks.infer("tiny", sent, request_id="9").as_numpy("prediction")
        assert np.array_equal(found, wanted)
        output = client.InferRequestedOutput("prediction")
        if not binary:
            output = client.InferRequestedOutput("prediction", binary_data=False)
        found = asks.infer("tiny", sent, outputs=[output]).as_numpy("prediction")
        assert np.array_equal(found, wanted)
    errors = tritonclient.http.InferenceServerException
    with pytest.raises(errors, match=r"unknown model.*allowed: tiny"):
        asks.infer("other", sent)
    with pytest.raises(errors, match=r"unknown version"):
        asks.infer("tiny", sent, model_version="9999")
    with pytest.raises(errors, match="f2"):
        asks.infer("tiny", sent[:2])
    with pytest.raises(errors, match="allowed: prediction"):
        asks.infer("tiny", sent, outputs=[client.InferRequestedOutput("other")])
    asks.close()


def as_json(client: Any) -> dict[str, bool]:
    return {"as_json": True} if client is tritonclient.grpc else {}


def triton_inputs(client: Any, inputs: dict[str, np.ndarray], **options: Any) -> list[Any]:
    sent = []
    for name, array in inputs.items():
        datatype = "FP32" if name == "dense" else "INT64"
        sent.append(client.InferInput(name, list(array.shape), datatype))
        sent[-1].set_data_from_numpy(array, **options)
    return sent


def test_tfserving_over_grpc(served: Served) -> None:
    server, models = served
    inputs = tiny_inputs(5)
    reply = tfs.PredictResponse.FromString(call(server, PREDICT, predict_request(inputs)))
    wanted = models.get("tiny").predict(inputs)["prediction"]
    assert list(reply.outputs["prediction"].float_val) == wanted.tolist()
    assert np.array_equal(tensor_of_tf("p", reply.outputs["prediction"]), wanted)
    version = models.get("tiny").version
    assert (reply.model_spec.name, reply.model_spec.version.value) == ("tiny", version)
    status = tfs.GetModelStatusResponse.FromString(
        call(
            server,
            "/tensorflow.serving.ModelService/GetModelStatus",
            tfs.GetModelStatusRequest(model_spec=tfs.ModelSpec(name="tiny")),
        )
    )
    (one,) = status.model_version_status
    assert (one.version, one.state) == (version, tfs.ModelVersionStatus.AVAILABLE)
    metadata = tfs.GetModelMetadataResponse.FromString(
        call(
            server,
            "/tensorflow.serving.PredictionService/GetModelMetadata",
            tfs.GetModelMetadataRequest(
                model_spec=tfs.ModelSpec(name="tiny"), metadata_field=["signature_def"]
            ),
        )
    )
    packed = metadata.metadata["signature_def"]
    assert packed.type_url == "type.googleapis.com/tensorflow.serving.SignatureDefMap"
    signature = tfs.SignatureDefMap.FromString(packed.value).signature_def["serving_default"]
    assert signature.method_name == "tensorflow/serving/predict"
    assert set(signature.inputs) == {"f0", "f1", "f2", "dense"}


@pytest.mark.parametrize(
    ("change", "code", "match"),
    [
        (lambda r: r.model_spec.__setattr__("name", "../../etc"), "NOT_FOUND", "allowed: tiny"),
        (lambda r: r.model_spec.version.__setattr__("value", 9999), "NOT_FOUND", "9999"),
        (
            lambda r: r.model_spec.__setattr__("signature_name", "other"),
            "INVALID_ARGUMENT",
            "serving_default",
        ),
        (lambda r: r.inputs.__delitem__("f1"), "INVALID_ARGUMENT", "f1"),
        (lambda r: r.output_filter.append("other"), "INVALID_ARGUMENT", "prediction"),
        (lambda r: r.inputs["dense"].float_val.append(1), "INVALID_ARGUMENT", "dense"),
    ],
)
def test_errors_have_codes_and_what_is_allowed(
    change: Any, code: str, match: str, served: Served
) -> None:
    request = predict_request(tiny_inputs(2))
    change(request)
    with pytest.raises(grpc.RpcError, match=match) as caught:
        call(served[0], PREDICT, request)
    assert caught.value.code().name == code


def test_bytes_that_are_no_message(served: Served) -> None:
    for method in (PREDICT, "/inference.GRPCInferenceService/ModelInfer"):
        with pytest.raises(grpc.RpcError) as caught:
            call(served[0], method, b"\xff" * 40)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_health_over_grpc(served: Served) -> None:
    for name in ("", "tiny"):
        request = health.HealthCheckRequest(service=name)
        reply = call(served[0], "/grpc.health.v1.Health/Check", request)
        assert health.HealthCheckResponse.FromString(reply).status == 1
    with pytest.raises(grpc.RpcError, match="unknown model"):
        call(served[0], "/grpc.health.v1.Health/Check", health.HealthCheckRequest(service="no"))


def test_tfserving_over_http(served: Served) -> None:
    server, models = served
    url = f"http://{server.http_address}/v1/models/tiny"
    inputs = tiny_inputs(3)
    wanted = models.get("tiny").predict(inputs)["prediction"].tolist()
    version = models.get("tiny").version
    columns = {name: array.tolist() for name, array in inputs.items()}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    for path in (":predict", f"/versions/{version}:predict"):
        reply = http_post(url + path, json={"instances": rows})
        assert reply.json() == {"predictions": wanted}
    reply = http_post(f"{url}:predict", json={"inputs": columns})
    assert reply.json() == {"outputs": wanted}
    status = http_get(url).json()["model_version_status"]
    assert [(one["version"], one["state"]) for one in status] == [(str(version), "AVAILABLE")]
    metadata = http_get(f"{url}/metadata").json()["metadata"]["signature_def"]["signature_def"]
    dense = metadata["serving_default"]["inputs"]["dense"]
    assert dense["dtype"] == "DT_FLOAT"
    assert [dim["size"] for dim in dense["tensor_shape"]["dim"]] == ["-1", "4"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/models/other:predict", {"instances": [1]}, 404),
        ("/v1/models/tiny/versions/9999:predict", {"instances": [1]}, 404),
        ("/v1/models/tiny/versions/x:predict", {"instances": [1]}, 400),
        ("/v1/models/tiny:predict", {}, 400),
        ("/v1/models/tiny:predict", {"instances": []}, 400),
        ("/v1/models/tiny:predict", {"instances": [{"f0": 1}, {"f1": 1}]}, 400),
        ("/v1/models/tiny:predict", {"inputs": {"f0": 1}}, 400),
        ("/v1/models/tiny:predict", {"inputs": {}, "instances": []}, 400),
        ("/v1/models/tiny:predict", {"inputs": {"f0": [{}]}}, 400),
        ("/v1/models/tiny:predict", b"[" * 100_000, 400),
        ("/v1/models/tiny:predict", b'{"inputs": NaN}', 400),
        ("/v1/models/tiny:predict", b"\xff", 400),
        ("/v1/models/tiny:predict", {"inputs": {}, "signature_name": "x"}, 400),
        ("/v2/models/tiny/infer", {"inputs": [{"name": "f0"}]}, 400),
        ("/v2/models/tiny/infer", {"inputs": "f0"}, 400),
        ("/v2/models/tiny/versions/-1/infer", {"inputs": []}, 400),
        ("/v2/models/other/infer", {"inputs": []}, 404),
        ("/v1/models/..%2f..%2fetc:predict", {"instances": [1]}, 404),
    ],
)
def test_http_errors(path: str, body: Any, status: int, served: Served) -> None:
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    reply = http_post(f"http://{served[0].http_address}{path}", **content)
    assert reply.status_code == status
    assert reply.json()["error"]


def test_other_http_methods_and_sizes(served: Served) -> None:
    url = f"http://{served[0].http_address}"
    assert http_get(f"{url}/v1/models/tiny:predict").status_code == 405
    assert http_post(f"{url}/v1/models/tiny").status_code == 405
    assert http_get(f"{url}/v2").json()["extensions"] == ["binary_tensor_data"]
    for size in ("5", "-1", "x", "99999999"):
        headers = {"Inference-Header-Content-Length": size}
        reply = http_post(f"{url}/v2/models/tiny/infer", content=b"{}", headers=headers)
        assert reply.status_code == 400


def test_metrics_health_and_the_page(served: Served) -> None:
    server, models = served
    url = f"http://{server.http_address}"
    assert http_get(f"{url}/healthz").text == "ok"
    http_post(f"{url}/v1/models/tiny:predict", json={"instances": []})
    metrics = http_get(f"{url}/metrics").text
    version = models.get("tiny").version
    assert f'shoal_model_version{{model="tiny"}} {float(version)}' in metrics
    assert 'code="INVALID_ARGUMENT"' in metrics
    page = http_get(url).text
    assert f"<td>tiny</td><td>{version}</td><td>AVAILABLE</td>" in page


def test_only_who_knows_the_token_may_ask(run: Path) -> None:
    with serving(run, token="secret") as (server, _):
        url = f"http://{server.http_address}"
        assert http_get(f"{url}/healthz").status_code == 200
        for path in ("/", "/metrics", "/v1/models/tiny", "/v2/models/tiny", "/v2"):
            assert http_get(url + path).status_code == 401
            good = {"authorization": "Bearer secret"}
            assert http_get(url + path, headers=good).status_code == 200
        request = predict_request(tiny_inputs(1))
        for metadata in ((), (("authorization", "Bearer other"),)):
            with pytest.raises(grpc.RpcError) as caught:
                call(server, PREDICT, request, metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert call(server, PREDICT, request, metadata=(("authorization", "Bearer secret"),))
        assert call(server, "/grpc.health.v1.Health/Check", health.HealthCheckRequest())


def test_requests_have_a_size() -> None:
    sources = [OneSource(EchoModel())]
    with serving_sources(sources, limits=Limits(most_bytes=1000)) as (server, _):
        url = f"http://{server.http_address}/v1/models/echo:predict"
        assert http_post(url, json={"instances": [1.0]}).json() == {"predictions": [2.0]}
        reply = http_post(url, json={"instances": [1.0] * 1000})
        assert (reply.status_code, "1000" in reply.json()["error"]) == (400, True)
        request = tfs.PredictRequest(model_spec=tfs.ModelSpec(name="echo"))
        request.inputs["x"].CopyFrom(tensor_to_tf(np.zeros(1000, np.float32)))
        with pytest.raises(grpc.RpcError) as caught:
            call(server, PREDICT, request)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_request_over_http_whose_caller_left_is_not_computed() -> None:
    class Slow(EchoModel):
        gate, entered = threading.Event(), threading.Event()

        def run(self, requests: Sequence[np.ndarray]) -> list[Any]:
            self.entered.set()
            assert self.gate.wait(60)
            return super().run(requests)

    model = Slow()
    with serving_sources([OneSource(model)], limits=Limits(workers=1)) as (server, _):
        address = f"http://{server.http_address}"
        url = f"{address}/v1/models/echo:predict"
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(http_post, url, json={"inputs": [1.0]})
            assert model.entered.wait(60)
            leaves = http.client.HTTPConnection(server.http_address)
            leaves.request("POST", "/v1/models/echo:predict", '{"inputs": [2.0]}')
            ends = time.monotonic() + 60
            while "shoal_waiting_requests 1.0" not in http_get(f"{address}/metrics").text:
                assert time.monotonic() < ends
                time.sleep(0.001)
            leaves.close()
            for _ in range(50):  # by then its loop has seen that
                http_get(f"{address}/healthz")
            model.gate.set()
            assert first.result().json() == {"outputs": [2.0]}
            again = http_post(url, json={"inputs": [3.0]})
            assert again.json() == {"outputs": [6.0]}
        left = 'code="CANCELLED",model="echo",protocol="tfserving-rest"} 1.0'
        ends = time.monotonic() + 60  # its own thread counts it, also after others' replies
        while left not in http_get(f"{address}/metrics").text:
            assert time.monotonic() < ends
            time.sleep(0.01)
    assert model.batches == [1, 1]


def test_a_newer_checkpoint_is_served_without_a_failure(run: Path, tmp_path: Path) -> None:
    """Callers ask all the time while the version changes."""
    source = OneSource(EchoModel(version=1))
    with serving_sources([source]) as (server, models):
        url = f"http://{server.http_address}/v2/models/echo/infer"
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [3.0]}]}
        seen: list[str] = []
        done = threading.Event()

        def ask() -> None:
            with httpx.Client(timeout=60) as client:
                while not done.is_set():
                    reply = client.post(url, json=body).json()
                    assert reply["outputs"][0]["data"] == [6.0]
                    seen.append(reply["model_version"])

        thread = threading.Thread(target=ask)
        thread.start()
        for version in range(2, 6):
            source.model = EchoModel(version=version)
            while models.get("echo").version != version or seen[-1:] != [str(version)]:
                assert thread.is_alive()
                time.sleep(0.001)
        done.set()
        thread.join()
        assert seen == sorted(seen)


def test_the_newest_version_of_a_folder_of_exports_is_served(run: Path, tmp_path: Path) -> None:
    inputs = tiny_inputs(5)
    shutil.copytree(run, tmp_path / "7")
    (tmp_path / ".partial-9").mkdir()
    with serving(tmp_path) as (_, models):
        first = models.get("tiny")
        assert first.version == 7
        shutil.copytree(run, tmp_path / ".partial-8")
        (tmp_path / ".partial-8").rename(tmp_path / "8")
        until_s = time.monotonic() + 120
        while models.get("tiny").version != 8:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        wanted = first.run([first.read(inputs)])[0]["prediction"]
        second = models.get("tiny")
        assert np.array_equal(second.run([second.read(inputs)])[0]["prediction"], wanted)
    pinned = FolderSource(tmp_path, version=7, name="other")
    assert (pinned.newest(), pinned.name) == (7, "other")
    with pytest.raises(CheckpointError, match="version 9"):
        FolderSource(tmp_path, version=9)


def test_half_rows_take_less_and_predict_nearly_the_same(run: Path) -> None:
    inputs = tiny_inputs(200)
    found = {}
    for dtype in (None, "float16"):
        source = FolderSource(run, ServedShare(dtype=dtype))
        model = source.load(source.newest() or 0)
        found[dtype] = model.run([model.read(inputs)])[0]["prediction"]
    assert not np.array_equal(found[None], found["float16"])
    assert np.allclose(found[None], found["float16"], atol=1e-3)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_tls(tmp_path: Path) -> None:
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", key,
         "-out", certificate, "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    tls = Tls(certificate, key)
    with serving_sources([OneSource(EchoModel())], tls=tls, token="t") as (server, _):
        reply = http_get(f"https://{server.http_address}/healthz", verify=context(certificate))
        assert reply.text == "ok"
        x = {"x": np.ones(2, np.float32)}
        address = [server.grpc_address]
        with ReplicaSet(address, token="t", root_certificate=certificate) as clients:
            assert clients.predict("echo", x, timeout_s=60)["y"].tolist() == [2, 2]
        with ReplicaSet(address, token="t") as clients, pytest.raises(ServerLost):
            clients.predict("echo", x, timeout_s=2)
    with pytest.raises(ConfigError, match="PEM"):
        ModelServer(Service(Repository([])), tls=Tls(key, "none")).__enter__()


def context(certificate: str) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=certificate)


def test_an_address_that_is_taken(served: Served) -> None:
    for name in ("grpc_address", "http_address"):
        taken = {name: getattr(served[0], name)}
        with pytest.raises(ConfigError, match="free"):
            ModelServer(Service(Repository([])), **taken).__enter__()


@pytest.mark.parametrize("of", [1, 3])
def test_rows_in_other_processes_give_the_same_predictions(of: int, run: Path) -> None:
    whole = FolderSource(run)
    version = whole.newest()
    assert version is not None
    model = whole.load(version)
    shares = [FolderSource(run, ServedShare(role="ps", index=k, of=of)) for k in range(of)]
    with serving_sources(shares, http_address=None) as (server, models):
        assert models.names == tuple(f"tiny:ps_{k}" for k in range(of))
        assert sum(models.get(name)._rows.size(0) for name in models.names) > 100  # type: ignore[attr-defined]
        addresses = ((server.grpc_address,),) * of
        entry = FolderSource(
            run, ServedShare(role="entry", of=of, addresses=addresses, timeout_s=60.0)
        ).load(version)
        for seed in range(3):
            inputs = tiny_inputs(50, seed)
            found = entry.run([entry.read(inputs)])[0]["prediction"]
            wanted = model.run([model.read(inputs)])[0]["prediction"]
            assert np.array_equal(found, wanted)
