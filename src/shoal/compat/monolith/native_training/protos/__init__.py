"""Messages on the wire; the *_pb2 modules are generated from the .proto files next to them."""

from shoal.serve import packages as packages
