"""The Open Inference Protocol v2, over gRPC and REST with the binary extension."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shoal.serve.model import Model, Outputs
from shoal.serve.protos import openinference_pb2 as oip
from shoal.serve.service import Service
from shoal.serve.signature import Array, ServedTensor
from shoal.serve.tensors import (
    bytes_of,
    refused,
    tensor_of_bytes,
    tensor_of_json,
    tensor_of_oip,
    wire_type,
)
from shoal.serve.tfserving import parsed

_PLATFORM = "shoal"
_EXTENSIONS = ("binary_tensor_data",)
_NAME = "shoal"
_SIZE, _BINARY, _ALL_BINARY = "binary_data_size", "binary_data", "binary_data_output"

Handler = Callable[[bytes], tuple[str, bytes]]


def version_of(text: str) -> int | None:
    """The version that a text names; None of an empty one: the newest.

    Raises:
        DataError: no number.
    """
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise refused("model version", repr(text)[:40], "a number", "Leave it out.")
    return int(text)


class OpenInference:
    """The Open Inference Protocol over a service.

    version: of Shoal.
    """

    def __init__(self, service: Service, version: str) -> None:
        self._service, self._version = service, version

    def grpc_methods(self) -> dict[str, Handler]:
        """Methods of inference.GRPCInferenceService."""
        return {
            "ServerLive": self._live,
            "ServerReady": self._ready,
            "ServerMetadata": self._server_metadata,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._infer,
        }

    def server_metadata(self) -> dict[str, Any]:
        """GET /v2."""
        return {"name": _NAME, "version": self._version, "extensions": list(_EXTENSIONS)}

    def model_metadata(self, name: str, version: int | None) -> dict[str, Any]:
        """GET of a model."""
        model = self._service.model(name, version)
        return {
            "name": name,
            "versions": [str(model.version)],
            "platform": _PLATFORM,
            "inputs": _described(model.signature.inputs),
            "outputs": _described(model.signature.outputs),
        }

    def model_ready(self, name: str, version: int | None) -> bool:
        """Whether a model is served.

        Raises:
            UnknownName: no such model.
        """
        states = self._service.models.states(name)
        known = [one for one in states if version in (None, one.version)]
        return any(one.state == "AVAILABLE" for one in known)

    def rest_infer(
        self, name: str, version: int | None, body: bytes, json_size: int | None
    ) -> tuple[str, tuple[bytes, int | None]]:
        """POST of an inference.

        Args:
            json_size: of the JSON at the body's beginning, where raw tensors follow it.

        Returns:
            the model's name; the reply, and the size of its JSON where raw tensors follow.
        """
        size = len(body) if json_size is None else json_size
        if not 0 <= size <= len(body):
            allowed = f"0..{len(body)}"
            raise refused("Inference-Header-Content-Length", size, allowed, "Count the JSON.")
        self._service.admit()
        request = object_of_json(body[:size])
        model = self._service.model(name, version)
        inputs = _objects(request, "inputs", required=True)
        wanted = _objects(request, "outputs", required=False)
        names = [_text(one, "name") for one in wanted]
        outputs = self._service.predict(
            model,
            [_text(one, "name") for one in inputs],
            lambda: _inputs_of_json(inputs, memoryview(body)[size:]),
            names,
            size_bytes=len(body),
        )
        every = _parameters(request).get(_ALL_BINARY) is True
        flags = {
            key: _parameters(one).get(_BINARY, every) is True
            for key, one in zip(names, wanted, strict=True)
        }
        return model.name, _json_reply(request, model, outputs, flags, every)

    def _live(self, data: bytes) -> tuple[str, bytes]:
        parsed(oip.ServerLiveRequest, data)
        return "", oip.ServerLiveResponse(live=True).SerializeToString()

    def _ready(self, data: bytes) -> tuple[str, bytes]:
        parsed(oip.ServerReadyRequest, data)
        ready = self._service.models.ready
        return "", oip.ServerReadyResponse(ready=ready).SerializeToString()

    def _server_metadata(self, data: bytes) -> tuple[str, bytes]:
        parsed(oip.ServerMetadataRequest, data)
        return "", oip.ServerMetadataResponse(**self.server_metadata()).SerializeToString()

    def _model_ready(self, data: bytes) -> tuple[str, bytes]:
        request = parsed(oip.ModelReadyRequest, data)
        ready = self.model_ready(request.name, version_of(request.version))
        return request.name, oip.ModelReadyResponse(ready=ready).SerializeToString()

    def _model_metadata(self, data: bytes) -> tuple[str, bytes]:
        request = parsed(oip.ModelMetadataRequest, data)
        found = self.model_metadata(request.name, version_of(request.version))
        return request.name, oip.ModelMetadataResponse(**found).SerializeToString()

    def _infer(self, data: bytes) -> tuple[str, bytes]:
        self._service.admit()
        request = parsed(oip.ModelInferRequest, data)
        model = self._service.model(request.model_name, version_of(request.model_version))
        raw = request.raw_input_contents
        if raw and len(raw) != len(request.inputs):
            allowed = f"{len(request.inputs)}, one of each input"
            raise refused("raw_input_contents", len(raw), allowed, "Send all inputs raw, or none.")
        outputs = self._service.predict(
            model,
            [one.name for one in request.inputs],
            lambda: (
                (one.name, tensor_of_oip(one, raw[k] if raw else None))
                for k, one in enumerate(request.inputs)
            ),
            [one.name for one in request.outputs],
            size_bytes=len(data),
        )
        reply = oip.ModelInferResponse(
            model_name=model.name, model_version=str(model.version), id=request.id
        )
        for name, array in outputs.items():
            reply.outputs.add(name=name, datatype=wire_type(array).oip, shape=array.shape)
            reply.raw_output_contents.append(bytes_of(array))
        return model.name, reply.SerializeToString()


def object_of_json(text: bytes) -> dict[str, Any]:
    """A JSON object that anybody sent.

    Raises:
        DataError: it is none.
    """
    try:
        found = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise refused("body", str(error)[:100], "a JSON object", "Check the client.") from None
    if not isinstance(found, dict):
        raise refused("body", type(found).__name__, "a JSON object", "Check the client.")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _described(tensors: tuple[ServedTensor, ...]) -> list[dict[str, Any]]:
    return [
        {"name": one.name, "datatype": wire_type(one.dtype).oip, "shape": list(one.shape)}
        for one in tensors
    ]


def _inputs_of_json(
    inputs: Sequence[Mapping[str, Any]], raw: memoryview
) -> Iterator[tuple[str, Array]]:
    at = 0
    for one in inputs:
        name, datatype, shape = _text(one, "name"), _text(one, "datatype"), one.get("shape")
        if not isinstance(shape, list):
            raise refused(f"shape of input {name!r}", shape, "a list of sizes")
        size = _parameters(one).get(_SIZE)
        if size is None:
            yield name, tensor_of_json(name, datatype, shape, one.get("data", []))
            continue
        if not isinstance(size, int) or not 0 <= size <= len(raw) - at or "data" in one:
            allowed = f"at most the {len(raw) - at} bytes left, and no data"
            raise refused(f"{_SIZE} of input {name!r}", size, allowed)
        yield name, tensor_of_bytes(name, datatype, shape, raw[at : at + size])
        at += size
    if at != len(raw):
        raise refused("raw tensors after the JSON", f"{len(raw)} bytes", f"{at} bytes")


def _json_reply(
    request: Mapping[str, Any],
    model: Model,
    outputs: Outputs,
    flags: Mapping[str, bool],
    every: bool,
) -> tuple[bytes, int | None]:
    described, blobs = [], []
    for name, array in outputs.items():
        one: dict[str, Any] = {
            "name": name,
            "datatype": wire_type(array).oip,
            "shape": list(array.shape),
        }
        if flags.get(name, every):
            blobs.append(bytes_of(array))
            one["parameters"] = {_SIZE: len(blobs[-1])}
        else:
            one["data"] = array.reshape(-1).tolist()
        described.append(one)
    reply: dict[str, Any] = {
        "model_name": model.name,
        "model_version": str(model.version),
        "outputs": described,
    }
    if isinstance(request.get("id"), str):
        reply["id"] = request["id"]
    text = json.dumps(reply).encode()
    return b"".join([text, *blobs]), len(text) if blobs else None


def _objects(request: Mapping[str, Any], key: str, *, required: bool) -> list[dict[str, Any]]:
    found = request.get(key, None if required else [])
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise refused(key, type(found).__name__, "a list of objects")
    return found


def _text(one: Mapping[str, Any], key: str) -> str:
    found = one.get(key)
    if not isinstance(found, str):
        raise refused(f"{key} of a tensor", repr(found)[:40], "a text")
    return found


def _parameters(one: Mapping[str, Any]) -> Mapping[str, Any]:
    found = one.get("parameters", {})
    if not isinstance(found, dict):
        raise refused("parameters", type(found).__name__, "an object")
    return found
