"""Operators in plain torch, on any device and dtype: what `forced("reference")` runs."""
