"""Serving: models exported from runs, and servers and clients of their predictions."""
