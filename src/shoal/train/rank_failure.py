"""When a rank of a run fails: the others end soon too, each with the reason."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from shoal.comm.mesh import Mesh
from shoal.distributed.model import lost_in_backward
from shoal.errors import CollectiveFailed, ShoalError

_PATIENCE_S = 3.0
_POLL_S = 0.05
_LAST_READERS_S = 0.3
_ENDING = "shoal/run/ending/{}"


class RankFailures:
    """Why ranks end, told to each other through the store of the process group."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        # A store of its own connection: another call that waits does not keep this one waiting.
        store = dist.distributed_c10d._get_default_store()
        self._store: Any = store.clone() if hasattr(store, "clone") else store

    @contextlib.contextmanager
    def end_together(self, step_of: Callable[[], int]) -> Iterator[None]:
        """End all ranks when one raises, soon, each with the error of the rank that began it.

        Raises:
            ShoalError: this rank's own error, with rank and step in front.
            CollectiveFailed: this rank waited for one that stopped; it reports why that one did.
        """
        try:
            yield
        except ShoalError as error:
            # Errors with further `args` keep their kind, not their parts: the text has them.
            raise type(error)(self._ended_by(error, step_of())) from error
        except Exception as error:
            lost = lost_in_backward(error)
            ended = self._ended_by(error if lost is None else lost, step_of())
            if lost is None:
                raise
            raise CollectiveFailed(ended) from error

    def _ended_by(self, error: Exception, step: int) -> str:
        """Report to the others why this rank ends, and return that with their causes."""
        rank, ranks = self._mesh.rank, self._mesh.world_size
        kind = "" if isinstance(error, ShoalError) else f"{type(error).__name__}: "
        own = f"rank {rank} of {ranks}, step {step}: {kind}{error}"
        # A store that is gone with the rank that kept it is no further error.
        with contextlib.suppress(RuntimeError):
            # Absence of other ranks is no cause of its own.
            ending = [own, not isinstance(error, CollectiveFailed)]
            self._store.set(_ENDING.format(rank), json.dumps(ending))
        self._mesh.abandon()
        every = self._endings()
        return "\n".join(
            [own, *(text for other, (text, cause) in every.items() if cause and other != rank)]
        )

    def _endings(self) -> dict[int, tuple[str, bool]]:
        """(error, whether it is a cause) by rank, once all ranks have written theirs or soon."""
        until = time.monotonic() + _PATIENCE_S
        found: dict[int, tuple[str, bool]] = {}
        with contextlib.suppress(RuntimeError, ValueError):
            while len(found) < self._mesh.world_size and time.monotonic() < until:
                for rank in range(self._mesh.world_size):
                    if rank not in found and self._store.check([_ENDING.format(rank)]):
                        found[rank] = json.loads(self._store.get(_ENDING.format(rank)))
                time.sleep(_POLL_S)
        if self._mesh.rank == 0:
            time.sleep(_LAST_READERS_S)  # this rank may be the one that keeps the store
        return found
