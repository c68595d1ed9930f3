"""Dense weights of workers that have no process group: averaged without waiting for each other."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shoal.comm.frames import memory, tensor
from shoal.errors import ConfigError, ServerLost
from shoal.ps.connections import Servers
from shoal.ps.messages import Head

_POLL_S = 0.2
_MOST_SHARE = 0.5


class DenseAverage:
    """Keeps a worker's dense weights near those of the others, over server 0 (elastic averaging).

    Workers may join and leave at any time: who joins begins with the average there is.

    Args:
        servers: connections to them.
        weights: float tensors that are trained, and buffers that follow them; changed in place.
        every: steps between two exchanges.
        workers: how many workers there are, about.
    """

    def __init__(
        self, servers: Servers, weights: Sequence[Tensor], *, every: int, workers: int
    ) -> None:
        self._servers, self._weights = servers, list(weights)
        self._every = every
        # All workers together move the average no further than to their mean.
        self._share = min(_MOST_SHARE, 0.9 / workers)

    def join(self, *, leads: bool, timeout_s: float) -> None:
        """Begin with the average; the leading worker brings it if there is none, others wait.

        Raises:
            ServerLost: the leading worker did not come in time, or a server does not answer.
            ShapeError: the average is of another model.
        """
        until = time.monotonic() + timeout_s
        while not self._load(self._asked([], 0.0)):
            if leads:
                self._exchange()
                return
            if time.monotonic() > until:
                raise ServerLost(
                    "dense weights on server 0",
                    got=f"none in {timeout_s:g} s",
                    allowed="those of the leading worker",
                    remedy="Start a worker with distributed.worker=0.",
                )
            time.sleep(_POLL_S)

    def stepped(self, steps: int) -> None:
        """Exchange, if it is due after this number of steps.

        Raises:
            InputError: weights with NaN or infinity.
            ServerLost: server 0 does not answer.
        """
        if steps % self._every == 0:
            self._exchange()

    def _exchange(self) -> None:
        with torch.no_grad():
            own_P = torch.cat([one.detach().float().reshape(-1) for one in self._weights])
        self._load(self._asked([memory(own_P)], self._share))

    def _asked(self, frames: list[memoryview], share: float) -> list[memoryview]:
        request = Head(method="average", share=share), frames
        others = [None] * (self._servers.count - 1)
        return self._servers.ask([request, *others])[0][1]

    def _load(self, frames: Sequence[memoryview]) -> bool:
        if not frames:
            return False
        sizes = [one.numel() for one in self._weights]
        new_P = tensor(frames[0], torch.float32, sum(sizes), "dense weights")
        with torch.no_grad():
            for one, new in zip(self._weights, torch.split(new_P, sizes), strict=True):
                one.copy_(new.view_as(one))
        return True


def average_of(
    servers: Servers, module: nn.Module, *, every: int, workers: int, grouped: bool
) -> DenseAverage:
    """The average of a module's parameters and buffers, which has not joined yet.

    Raises:
        ConfigError: of a worker in a process group.
    """
    if grouped:
        raise ConfigError(
            "distributed.dense in a process group",
            got="average",
            allowed="ddp, fsdp2",
            remedy="Start workers that average one by one, without torchrun, mpirun or srun.",
        )
    buffers = [one for one in module.buffers() if one.is_floating_point()]
    return DenseAverage(servers, [*module.parameters(), *buffers], every=every, workers=workers)
