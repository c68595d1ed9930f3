"""Random inputs of the operations by family; `test_ops.py` collects them."""
