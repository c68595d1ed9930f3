"""TF-Serving's gRPC services and REST API, from messages to messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError, Message

from shoal.serve.model import Model
from shoal.serve.protos import tfserving_pb2 as tfs
from shoal.serve.repository import VersionState
from shoal.serve.service import Code, Service
from shoal.serve.signature import LENGTHS, PREDICTION, SIGNATURES, Array, ServedTensor
from shoal.serve.tensors import (
    array_of_lists,
    refused,
    tensor_of_tf,
    tensor_to_tf,
    wire_type,
)

_METHOD = "tensorflow/serving/predict"
_MAP = "type.googleapis.com/tensorflow.serving.SignatureDefMap"
_SIGNATURE_DEF = "signature_def"
_M = TypeVar("_M", bound=Message)


def parsed(kind: type[_M], data: bytes) -> _M:
    """A message of bytes that anybody sent.

    Raises:
        DataError: they are none.
    """
    try:
        found: _M = kind.FromString(data)
        return found
    except DecodeError as error:
        name = kind.DESCRIPTOR.name
        raise refused("request", error, f"a {name}", "Check the client.") from None


def asked_version(spec: tfs.ModelSpec) -> int | None:
    """The version that a ModelSpec names; None: the newest.

    Raises:
        DataError: it names a label.
    """
    if spec.HasField("version_label"):
        raise refused("version_label", repr(spec.version_label), "none", "Ask for a version.")
    version = spec.version.value if spec.HasField("version") else -1
    return version if version >= 0 else None


class TfServing:
    """TF-Serving's protocol over a service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def predict(self, data: bytes) -> tuple[str, bytes]:
        """PredictionService.Predict."""
        self._service.admit()
        request = parsed(tfs.PredictRequest, data)
        spec = request.model_spec
        model = self._service.model(spec.name, asked_version(spec), spec.signature_name)
        outputs = self._service.predict(
            model,
            list(request.inputs),
            lambda: ((name, tensor_of_tf(name, tensor)) for name, tensor in request.inputs.items()),
            request.output_filter,
            size_bytes=len(data),
        )
        # Rows are many, and Shoal's own client reads them; others look into the typed values.
        raw = PREDICTION not in outputs
        reply = tfs.PredictResponse(model_spec=_spec(model, spec.signature_name or SIGNATURES[1]))
        for name, array in outputs.items():
            reply.outputs[name].CopyFrom(tensor_to_tf(array, raw=raw))
        return model.name, reply.SerializeToString()

    def metadata(self, data: bytes) -> tuple[str, bytes]:
        """PredictionService.GetModelMetadata."""
        request = parsed(tfs.GetModelMetadataRequest, data)
        fields = set(request.metadata_field)
        if fields != {_SIGNATURE_DEF}:
            raise refused("metadata_field", sorted(fields), _SIGNATURE_DEF, "Ask for it alone.")
        spec = request.model_spec
        model = self._service.model(spec.name, asked_version(spec))
        reply = tfs.GetModelMetadataResponse(model_spec=_spec(model, ""))
        value = tfs.SignatureDefMap(signature_def={SIGNATURES[1]: _signature_def(model)})
        packed = AnyMessage(type_url=_MAP, value=value.SerializeToString())
        reply.metadata[_SIGNATURE_DEF].CopyFrom(packed)
        return model.name, reply.SerializeToString()

    def status(self, data: bytes) -> tuple[str, bytes]:
        """ModelService.GetModelStatus."""
        spec = parsed(tfs.GetModelStatusRequest, data).model_spec
        reply = tfs.GetModelStatusResponse()
        for one in self._states(spec.name, asked_version(spec)):
            status = tfs.StatusProto(
                error_code=Code.INTERNAL if one.error else Code.OK, error_message=one.error
            )
            reply.model_version_status.append(
                tfs.ModelVersionStatus(
                    version=one.version,
                    state=tfs.ModelVersionStatus.State.Value(one.state),
                    status=status,
                )
            )
        return spec.name, reply.SerializeToString()

    def rest_predict(
        self, name: str, version: int | None, body: Mapping[str, Any], size_bytes: int
    ) -> tuple[str, dict[str, Any]]:
        """POST :predict, in rows ("instances") or columns ("inputs"); `admit` comes before it."""
        signature = body.get("signature_name", "")
        if not isinstance(signature, str):
            raise refused("signature_name", signature, "a text", "Leave it out.")
        model = self._service.model(name, version, signature)
        by_row, by_column = "instances" in body, "inputs" in body
        if by_row == by_column:
            raise refused("body", sorted(body)[:10], "one of instances and inputs", "Give one.")
        required = [one for one in model.signature.inputs if not one.optional]
        given = body["instances"] if by_row else body["inputs"]
        columns = _columns(given, required) if by_row else given
        if not isinstance(columns, Mapping):
            columns = {required[0].name: columns} if len(required) == 1 else None
        if columns is None:
            names = [one.name for one in required]
            raise refused("inputs", type(given).__name__, f"values by name: {names}", "Name them.")
        outputs = self._service.predict(
            model, list(columns), lambda: arrays_of_json(columns), size_bytes=size_bytes
        )
        made = {key: array.tolist() for key, array in outputs.items()}
        only = next(iter(made.values())) if len(made) == 1 else None
        if not by_row:
            return model.name, {"outputs": made if only is None else only}
        rows = [dict(zip(made, row, strict=True)) for row in zip(*made.values(), strict=True)]
        return model.name, {"predictions": rows if only is None else only}

    def rest_status(self, name: str, version: int | None) -> tuple[str, dict[str, Any]]:
        """GET of a model."""
        return name, {
            "model_version_status": [
                {
                    "version": str(one.version),
                    "state": one.state,
                    "status": {
                        "error_code": "INTERNAL" if one.error else "OK",
                        "error_message": one.error,
                    },
                }
                for one in self._states(name, version)
            ]
        }

    def rest_metadata(self, name: str, version: int | None) -> tuple[str, dict[str, Any]]:
        """GET of a model's metadata."""
        model = self._service.model(name, version)

        def infos(tensors: tuple[ServedTensor, ...]) -> dict[str, Any]:
            return {
                one.name: {
                    "dtype": tfs.DataType.Name(wire_type(one.dtype).tf),
                    "tensor_shape": {
                        "dim": [{"size": str(n), "name": ""} for n in one.shape],
                        "unknown_rank": False,
                    },
                    "name": one.name,
                }
                for one in tensors
            }

        signature = {
            "inputs": infos(model.signature.inputs),
            "outputs": infos(model.signature.outputs),
            "method_name": _METHOD,
        }
        spec = {"name": name, "signature_name": "", "version": str(model.version)}
        by_name = {SIGNATURES[1]: signature}
        metadata = {_SIGNATURE_DEF: {_SIGNATURE_DEF: by_name}}
        return model.name, {"model_spec": spec, "metadata": metadata}

    def _states(self, name: str, version: int | None) -> list[VersionState]:
        every = self._service.models.states(name)
        if version is None:
            return list(every)
        found = [one for one in every if one.version == version]
        if not found:
            self._service.model(name, version)
        return found


def arrays_of_json(columns: Mapping[str, Any]) -> Iterator[tuple[str, Array]]:
    """Inputs of JSON values by name; ragged lists bring their lengths."""
    for key, value in columns.items():
        array, lengths = array_of_lists(key, value)
        yield key, array
        if lengths is not None:
            yield f"{key}{LENGTHS}", lengths


def _columns(rows: Any, required: list[ServedTensor]) -> dict[str, Any]:
    """Values by input of rows: objects, or plain values for a model of one input."""
    if not isinstance(rows, list) or not rows:
        raise refused("instances", type(rows).__name__, "a list of one or more", "Give a list.")
    if not all(isinstance(row, dict) and "b64" not in row for row in rows):
        if len(required) != 1 or any(isinstance(row, dict) for row in rows):
            names = [one.name for one in required]
            raise refused("instances", "other values", f"objects with {names}", "Name the inputs.")
        return {required[0].name: rows}
    names = list(rows[0])
    for row in rows:
        if list(row) != names and set(row) != set(names):
            raise refused("instances", sorted(row), f"{names}, as the first", "Give all the same.")
    return {name: [row[name] for row in rows] for name in names}


def _spec(model: Model, signature: str) -> tfs.ModelSpec:
    spec = tfs.ModelSpec(name=model.name, signature_name=signature)
    spec.version.value = model.version
    return spec


def _signature_def(model: Model) -> tfs.SignatureDef:
    def infos(tensors: tuple[ServedTensor, ...]) -> dict[str, tfs.TensorInfo]:
        return {
            one.name: tfs.TensorInfo(
                name=one.name,
                dtype=wire_type(one.dtype).tf,  # type: ignore[arg-type]
                tensor_shape=tfs.TensorShapeProto(
                    dim=[tfs.TensorShapeProto.Dim(size=n) for n in one.shape]
                ),
            )
            for one in tensors
        }

    return tfs.SignatureDef(
        inputs=infos(model.signature.inputs),
        outputs=infos(model.signature.outputs),
        method_name=_METHOD,
    )
