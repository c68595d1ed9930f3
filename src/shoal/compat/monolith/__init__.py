"""Monolith's names; those of its synchronous training are those of `shoal.comm`."""
