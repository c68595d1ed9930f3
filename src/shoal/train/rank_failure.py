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


@contextlib.contextmanager
def end_together(mesh: Mesh, step_of: Callable[[], int]) -> Iterator[None]:
    """End all ranks when one raises, soon, each with the error of the rank that began it.

    They tell each other through the store of the process group.

    Raises:
        ShoalError: this rank's own error, with rank and step in front.
        CollectiveFailed: this rank waited for one that stopped; it reports why that one did.
    """
    # A store of its own connection: another call that waits does not keep this one waiting.
    store: Any = dist.distributed_c10d._get_default_store()
    # One that is gone with the rank that kept it is no error: what ended that rank ends this one.
    with contextlib.suppress(RuntimeError):
        store = store.clone() if hasattr(store, "clone") else store
    try:
        yield
    except ShoalError as error:
        # Errors with further `args` keep their kind, not their parts: the text has them.
        raise type(error)(_ended_by(error, step_of(), mesh, store)) from error
    except Exception as error:
        lost = lost_in_backward(error)
        ended = _ended_by(error if lost is None else lost, step_of(), mesh, store)
        if lost is None:
            raise
        raise CollectiveFailed(ended) from error


def _ended_by(error: Exception, step: int, mesh: Mesh, store: Any) -> str:
    """Report to the others why this rank ends, and return that with their causes."""
    kind = "" if isinstance(error, ShoalError) else f"{type(error).__name__}: "
    own = f"rank {mesh.rank} of {mesh.world_size}, step {step}: {kind}{error}"
    # A store that is gone with the rank that kept it is no further error.
    with contextlib.suppress(RuntimeError):
        # Absence of other ranks is no cause of its own.
        ending = [own, not isinstance(error, CollectiveFailed)]
        store.set(_ENDING.format(mesh.rank), json.dumps(ending))
    mesh.abandon()
    every = _endings(mesh, store)
    others = (text for rank, (text, cause) in every.items() if cause and rank != mesh.rank)
    return "\n".join([own, *others])


def _endings(mesh: Mesh, store: Any) -> dict[int, tuple[str, bool]]:
    """(error, whether it is a cause) by rank, once all ranks have written theirs or soon."""
    until = time.monotonic() + _PATIENCE_S
    found: dict[int, tuple[str, bool]] = {}
    with contextlib.suppress(RuntimeError, ValueError):
        while len(found) < mesh.world_size and time.monotonic() < until:
            for rank in range(mesh.world_size):
                if rank not in found and store.check([_ENDING.format(rank)]):
                    found[rank] = json.loads(store.get(_ENDING.format(rank)))
            time.sleep(_POLL_S)
    if mesh.rank == 0:
        time.sleep(_LAST_READERS_S)  # this rank may be the one that keeps the store
    return found
