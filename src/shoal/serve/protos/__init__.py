"""Messages of the protocols, made by scripts/protos.py from the .proto files here."""

from shoal.serve import packages as packages
