"""How ranks learn why another one stopped.

A rank that fails writes down why, in the store that the process groups met in, and lets go of its
connections, so that ranks waiting for it stop waiting. They write down their own end, and every
rank reads what the others wrote.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from shoal.comm.mesh import Mesh

__all__ = ["Alarm", "Ending"]

_POLL_S = 0.05
_LAST_READERS_S = 0.3


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a rank ended.

    Args:
        text: its error.
        cause: it is the rank's own error, no other rank's absence.
    """

    text: str
    cause: bool


class Alarm:
    """One run's place for last words.

    Args:
        mesh: the ranks.
        name: of the run among those of a process; alike on all ranks.
    """

    def __init__(self, mesh: Mesh, name: str) -> None:
        self._rank, self._world_size = mesh.rank, mesh.world_size
        # A store of its own connection: another call that waits does not keep this one waiting.
        store = dist.distributed_c10d._get_default_store()
        self._store = store.clone() if hasattr(store, "clone") else store
        self._name = name

    def ring(self, ending: Ending) -> None:
        """Write down why this rank ends. A store that is gone with its rank is no further error."""
        with contextlib.suppress(RuntimeError):
            self._store.set(self._key(self._rank), json.dumps([ending.text, ending.cause]))

    def listen(self, patience_s: float) -> Mapping[int, Ending]:
        """Endings by rank, once all ranks have written theirs or `patience_s` have passed."""
        until = time.monotonic() + patience_s
        found: dict[int, Ending] = {}
        # The store may be gone with the rank that kept it.
        with contextlib.suppress(RuntimeError, ValueError):
            while len(found) < self._world_size and time.monotonic() < until:
                for rank in range(self._world_size):
                    if rank not in found and self._store.check([self._key(rank)]):
                        text, cause = json.loads(self._store.get(self._key(rank)))
                        found[rank] = Ending(text, cause)
                time.sleep(_POLL_S)
        if self._rank == 0:
            time.sleep(_LAST_READERS_S)  # this rank may be the one that keeps the store
        return found

    def _key(self, rank: int) -> str:
        return f"shoal/{self._name}/ending/{rank}"
