"""Messages on the wire; the *_pb2 modules are generated from the .proto files next to them."""

from shoal.errors import no_package

try:
    import google.protobuf  # noqa: F401
except ImportError as error:
    raise no_package("servers and clients of models", str(error.name), "serve") from error
