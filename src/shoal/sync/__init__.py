"""Rows from a trainer to replicas that serve them, within about a second."""
