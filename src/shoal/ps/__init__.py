"""Parameter servers: processes that hold rows, and what workers have of them."""
