"""Averages dense gradients over ranks as DDP does, with errors that say where it ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shoal.comm.mesh import Mesh
from shoal.errors import CollectiveFailed, collective_failed

__all__ = ["lost_in_backward", "name_failures"]

_MARK = f"{CollectiveFailed.__name__}: "


def name_failures(
    wrapped: DistributedDataParallel,
    group: dist.ProcessGroup,
    mesh: Mesh,
    step_of: Callable[[], int],
) -> None:
    """Let backward say rank, step and collective where a rank is gone, on Gloo.

    What backward raises is a RuntimeError with the text of a `CollectiveFailed`: torch passes on
    the text of errors in callbacks, not their class; `lost_in_backward` gives it back. NCCL's own
    watchdog ends such a process.
    """

    def average(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        began = time.monotonic()

        def failed(error: Exception) -> CollectiveFailed:
            return collective_failed(
                "gradients of the dense part",
                rank=mesh.rank,
                world_size=mesh.world_size,
                step=step_of(),
                elapsed_s=time.monotonic() - began,
                timeout_s=mesh.timeout_s,
                reason=str(error).strip().partition("\n")[0],
            )

        def arrived(reduced: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            try:
                return reduced.value()[0]
            except RuntimeError as error:
                raise failed(error) from error

        gradients = bucket.buffer().div_(mesh.world_size)
        try:
            work: Any = dist.all_reduce(gradients, group=group, async_op=True)
        except RuntimeError as error:
            raise failed(error) from error
        found: torch.futures.Future[torch.Tensor] = work.get_future().then(arrived)
        return found

    # It checks annotations, which are text here: a lambda has none.
    wrapped.register_comm_hook(None, lambda _, bucket: average(bucket))


def lost_in_backward(error: Exception) -> CollectiveFailed | None:
    """The `CollectiveFailed` whose text an error of backward passes on; None for other errors."""
    if isinstance(error, CollectiveFailed):
        return error
    _, mark, text = str(error).partition(_MARK)
    if not mark or not isinstance(error, RuntimeError):
        return None
    return CollectiveFailed(text.partition("\n")[0])
