"""Triton kernels, one file per family, each with a launcher that takes and returns tensors.

Nothing here knows about tables or ranks. Nothing imports this room when a CPU is all there is:
Triton is optional, and `shoal.ops.dispatch` loads a family on its first CUDA call. Under
`TRITON_INTERPRET=1`, set before the import, the same kernels run on CPU tensors.
"""

from __future__ import annotations

__all__: list[str] = []
