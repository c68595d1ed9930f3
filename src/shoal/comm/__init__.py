"""How ranks talk: collectives over torch.distributed, MPI or nothing, and what travels."""

from shoal.comm.collectives import (
    Collectives,
    LocalCollectives,
    Part,
    Pending,
    PendingSizes,
    ReduceOp,
    Sizes,
)
from shoal.comm.shared_memory import SharedMemoryCollectives
from shoal.comm.torch_collectives import TorchCollectives

__all__ = [
    "Collectives",
    "LocalCollectives",
    "Part",
    "Pending",
    "PendingSizes",
    "ReduceOp",
    "SharedMemoryCollectives",
    "Sizes",
    "TorchCollectives",
]
