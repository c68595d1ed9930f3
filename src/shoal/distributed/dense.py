"""Averages dense gradients over ranks as DDP does, with errors that say where it ended."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shoal.comm.mesh import Mesh
from shoal.comm.watch import ALIKE, Group
from shoal.errors import CollectiveFailed, collective_failed

__all__ = ["lost_in_backward", "name_failures"]

_WHAT = "gradients of the dense part"
_LOOK_S = 0.1
_MARK = f"{CollectiveFailed.__name__}: "


def name_failures(
    wrapped: DistributedDataParallel,
    group: dist.ProcessGroup,
    mesh: Mesh,
    step_of: Callable[[], int],
    watched: Group,
) -> None:
    """Let backward say rank, step and collective where a rank is gone, on Gloo.

    What backward raises is a RuntimeError with the text of a `CollectiveFailed`: torch passes on
    the text of errors in callbacks, not their class; `lost_in_backward` gives it back. NCCL's own
    watchdog ends such a process.
    """

    waiting: list[tuple[int, float, Any]] = []

    def failed(began: float, reason: str, **remedy: str) -> CollectiveFailed:
        return collective_failed(
            _WHAT,
            rank=mesh.rank,
            world_size=mesh.world_size,
            step=step_of(),
            elapsed_s=time.monotonic() - began,
            timeout_s=mesh.timeout_s,
            reason=reason.strip().partition("\n")[0],
            **remedy,
        )

    def wait() -> None:
        """At the end of backward, where DDP would wait without a look at the other ranks."""
        begun, waiting[:] = list(waiting), []
        for number, began, work in begun:
            while not work.is_completed():
                with contextlib.suppress(RuntimeError):  # too early, or DDP tells
                    work.wait(datetime.timedelta(seconds=_LOOK_S))
                    continue
                told = watched.look(number)
                if told is not None:
                    raise failed(began, told, remedy=ALIKE)

    def average(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        began, number = time.monotonic(), watched.begin(_WHAT)

        def arrived(reduced: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            try:
                return reduced.value()[0]
            except RuntimeError as error:
                raise failed(began, str(error)) from error

        gradients = bucket.buffer().div_(mesh.world_size)
        try:
            work: Any = dist.all_reduce(gradients, group=group, async_op=True)
        except RuntimeError as error:
            raise failed(began, str(error)) from error
        if not waiting:
            torch.autograd.Variable._execution_engine.queue_callback(wait)
        waiting.append((number, began, work))
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
