"""Tables on a GPU, over Triton kernels."""
