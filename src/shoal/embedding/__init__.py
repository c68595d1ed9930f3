"""Embeddings of growing tables as a torch module: ids in, model inputs out, gradients back."""
