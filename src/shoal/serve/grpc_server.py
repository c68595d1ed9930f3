"""The gRPC port: TF-Serving, Open Inference v2 and health, by the paths of their methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.serve.openinference import OpenInference
from shoal.serve.packages import grpc
from shoal.serve.protos import health_pb2 as health
from shoal.serve.service import Code, Service
from shoal.serve.tfserving import TfServing, parsed

Call = Callable[[bytes], tuple[str, bytes]]

_STATUS = {status.value[0]: status for status in grpc.StatusCode}
_HEALTH = "grpc.health.v1.Health"
_PREDICTIONS = ("Predict", "ModelInfer")


def services(service: Service, version: str) -> dict[str, dict[str, Call]]:
    """Methods by service; each takes and returns the bytes of a message."""
    tfserving, oip = TfServing(service), OpenInference(service, version)
    return {
        "tensorflow.serving.PredictionService": {
            "Predict": tfserving.predict,
            "GetModelMetadata": tfserving.metadata,
        },
        "tensorflow.serving.ModelService": {"GetModelStatus": tfserving.status},
        "inference.GRPCInferenceService": oip.grpc_methods(),
        _HEALTH: {"Check": _health(service)},
    }


def make_server(service: Service, version: str) -> grpc.Server:
    """A server without a port, on the service's threads."""
    server = grpc.server(
        service.threads,
        maximum_concurrent_rpcs=service.limits.most_calls,
        options=[
            ("grpc.max_receive_message_length", service.limits.most_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
        ],
    )
    for name, methods in services(service, version).items():
        handlers = {
            method: grpc.unary_unary_rpc_method_handler(_handler(service, name, method, call))
            for method, call in methods.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
    return server


def _handler(service: Service, name: str, method: str, call: Call) -> Callable[[bytes, Any], bytes]:
    is_open = name == _HEALTH  # a load balancer's probe has no token

    def handle(data: bytes, context: Any) -> bytes:
        if not is_open:
            token = dict(context.invocation_metadata() or ()).get("authorization")
            if not service.allows(token):
                message = "authorization: Bearer TOKEN is missing, or of another token"
                context.abort(grpc.StatusCode.UNAUTHENTICATED, message)
        code, reply = service.timed(name, lambda: call(data), context.is_active)
        if code is not Code.OK:
            context.abort(_STATUS[code], reply)
        found: bytes = reply
        return found

    if method not in _PREDICTIONS:  # health must not wait behind them
        handle.experimental_thread_pool = service.short_threads  # type: ignore[attr-defined]
    return handle


def _health(service: Service) -> Call:
    def check(data: bytes) -> tuple[str, bytes]:
        name = parsed(health.HealthCheckRequest, data).service
        ready = service.models.ready
        if name in service.models.names:
            states = service.models.states(name)
            ready = any(one.state == "AVAILABLE" for one in states)
        elif name:
            service.models.states(name)
        status = (
            health.HealthCheckResponse.SERVING if ready else health.HealthCheckResponse.NOT_SERVING
        )
        return name, health.HealthCheckResponse(status=status).SerializeToString()

    return check
