"""Tests of the distribution operations by family; `test_distribution_ops.py` collects them."""
