"""What the extra `serve` installs; the first import that needs it names what is missing."""

from __future__ import annotations

from shoal.errors import no_package

try:
    import google.protobuf  # noqa: F401
    import grpc as grpc
    import prometheus_client  # noqa: F401
    import starlette  # noqa: F401
    import uvicorn as uvicorn
    from google.protobuf.json_format import MessageToJson as MessageToJson
    from google.protobuf.message import DecodeError as DecodeError
except ImportError as error:
    raise no_package("servers and clients of models", str(error.name), "serve") from error
