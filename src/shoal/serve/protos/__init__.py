"""Messages of the protocols, made by scripts/protos.py from the .proto files here."""
