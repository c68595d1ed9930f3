"""Monolith's export modes."""
