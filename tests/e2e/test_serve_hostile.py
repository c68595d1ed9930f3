"""Requests that nobody would send: whatever comes in, the server replies and lives on."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal.errors import ShoalError
from shoal.serve.grpc_server import services
from shoal.serve.http_server import make_app
from shoal.serve.protos import openinference_pb2 as oip
from shoal.serve.protos import tfserving_pb2 as tfs
from shoal.serve.repository import Repository
from shoal.serve.service import Code, Service, code_of
from shoal.serve.tensors import bytes_of, tensor_to_tf
from support.served_models import EchoModel, OneSource, serving, tiny_inputs, trained

ROUNDS = 200_000 if os.environ.get("TEST_SHARE") == "1" else 1500


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    from shoal.serve.loading import FolderSource

    run = trained(tmp_path_factory.mktemp("runs"))
    with Repository([FolderSource(run)], every_s=3600) as models, Service(models) as found:
        yield found


def corpus() -> list[tuple[str, str, bytes]]:
    """(service, method, message) of requests as they should be."""
    inputs = tiny_inputs(3)
    spec = tfs.ModelSpec(name="tiny")
    predict = tfs.PredictRequest(model_spec=spec, output_filter=["prediction"])
    infer = oip.ModelInferRequest(model_name="tiny", id="1")
    typed = oip.ModelInferRequest(model_name="tiny")
    for name, array in inputs.items():
        predict.inputs[name].CopyFrom(tensor_to_tf(array, raw=name == "f0"))
        kind = "FP32" if name == "dense" else "INT64"
        infer.inputs.add(name=name, datatype=kind, shape=array.shape)
        infer.raw_input_contents.append(bytes_of(array))
        one = typed.inputs.add(name=name, datatype=kind, shape=array.shape)
        values = one.contents.fp32_contents if kind == "FP32" else one.contents.int64_contents
        values.extend(array.reshape(-1).tolist())
    status = tfs.GetModelStatusRequest(model_spec=spec)
    metadata = tfs.GetModelMetadataRequest(model_spec=spec, metadata_field=["signature_def"])
    tf, triton = "tensorflow.serving.PredictionService", "inference.GRPCInferenceService"
    return [
        (tf, "Predict", predict.SerializeToString()),
        (tf, "GetModelMetadata", metadata.SerializeToString()),
        ("tensorflow.serving.ModelService", "GetModelStatus", status.SerializeToString()),
        (triton, "ModelInfer", infer.SerializeToString()),
        (triton, "ModelInfer", typed.SerializeToString()),
        (triton, "ModelMetadata", oip.ModelMetadataRequest(name="tiny").SerializeToString()),
    ]


def damaged(data: bytes, generator: random.Random) -> bytes:
    """Some bytes changed, left out, or put in."""
    made = bytearray(data)
    for _ in range(generator.randint(1, 5)):
        at, what = generator.randrange(len(made) + 1), generator.randrange(3)
        if what == 0 and at < len(made):
            made[at] = generator.randrange(256)
        elif what == 1:
            del made[at : at + generator.randint(1, 9)]
        else:
            made[at:at] = generator.randbytes(generator.randint(1, 9))
    return bytes(made)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_damaged_messages_have_a_code(service: Service) -> None:
    """TEST_SHARE=1: ten minutes and more."""
    generator, known = random.Random(7), corpus()
    methods = services(service, "0")

    for name, method, data in known:
        assert methods[name][method](data)[0] == "tiny"
    for _ in range(ROUNDS):
        name, method, data = generator.choice(known)
        try:
            methods[name][method](damaged(data, generator))
        except ShoalError as error:
            assert code_of(error) in (Code.INVALID_ARGUMENT, Code.NOT_FOUND), error


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_damaged_bodies_have_a_code() -> None:
    generator = random.Random(8)
    tensor = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}
    paths = [
        ("/v1/models/echo:predict", {"instances": [{"x": 1.5}, {"x": 2}]}),
        ("/v1/models/echo:predict", {"inputs": {"x": [1.0]}}),
        ("/v2/models/echo/infer", {"inputs": [tensor], "outputs": [{"name": "y"}], "id": "1"}),
        ("/v2/models/echo/infer", {"inputs": [{**tensor, "parameters": {"binary_data_size": 4}}]}),
    ]
    bodies = [(path, json.dumps(body).encode()) for path, body in paths]

    async def all_of_them(service: Service) -> None:
        transport = httpx.ASGITransport(make_app(service, "0"))
        async with httpx.AsyncClient(transport=transport, base_url="http://shoal") as client:
            for _ in range(ROUNDS):
                path, body = generator.choice(bodies)
                size = {"inference-header-content-length": str(len(body))}
                headers = size if generator.random() < 0.3 else {}
                content = damaged(body, generator)
                reply = await client.post(path, content=content, headers=headers)
                assert reply.status_code in (200, 400, 404), (content, reply.text)

    with (
        Repository([OneSource(EchoModel())], every_s=3600) as models,
        Service(models) as service,
    ):
        asyncio.run(all_of_them(service))


SCHEMA: dict[str, Any] = {
    "openapi": "3.0.2",
    "info": {"title": "shoal serve", "version": "1"},
    "paths": {
        "/v1/models/{model}:predict": {
            "post": {
                "parameters": [
                    {
                        "name": "model",
                        "in": "path",
                        "required": True,
                        "schema": {"type": "string", "enum": ["tiny", "other"]},
                    }
                ],
                "requestBody": {
                    "required": True,
                    "content": {
                        "application/json": {
                            "schema": {
                                "type": "object",
                                "properties": {
                                    "signature_name": {"type": "string"},
                                    "instances": {"type": "array", "items": {}},
                                    "inputs": {},
                                },
                            }
                        }
                    },
                },
                "responses": {"200": {"description": ""}, "default": {"description": ""}},
            }
        },
        "/v2/models/{model}/infer": {
            "post": {
                "parameters": [
                    {
                        "name": "model",
                        "in": "path",
                        "required": True,
                        "schema": {"type": "string", "enum": ["tiny", "other"]},
                    }
                ],
                "requestBody": {
                    "required": True,
                    "content": {
                        "application/json": {
                            "schema": {
                                "type": "object",
                                "required": ["inputs"],
                                "properties": {
                                    "id": {"type": "string"},
                                    "inputs": {
                                        "type": "array",
                                        "items": {
                                            "type": "object",
                                            "required": ["name", "datatype", "shape", "data"],
                                            "properties": {
                                                "name": {"type": "string"},
                                                "datatype": {"enum": ["INT64", "FP32", "BYTES"]},
                                                "shape": {
                                                    "type": "array",
                                                    "items": {"type": "integer"},
                                                },
                                                "data": {"type": "array", "items": {}},
                                            },
                                        },
                                    },
                                },
                            }
                        }
                    },
                },
                "responses": {"200": {"description": ""}, "default": {"description": ""}},
            }
        },
    },
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_requests_of_a_schema_have_a_code(tmp_path: Path) -> None:
    import schemathesis
    from hypothesis import HealthCheck, given, settings

    run = trained(tmp_path)
    with serving(run) as (server, _):
        url = f"http://{server.http_address}"
        schema = schemathesis.openapi.from_dict(SCHEMA)
        for operation in schema.get_all_operations():
            strategy = operation.ok().as_strategy()

            @given(case=strategy)
            @settings(
                max_examples=15,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                derandomize=True,
                database=None,
            )
            def ask(case: Any) -> None:
                reply = case.call(base_url=url)
                assert reply.status_code in (200, 400, 404, 405)

            ask()
        assert httpx.get(f"{url}/healthz").text == "ok"
