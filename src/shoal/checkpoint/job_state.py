"""`state.pt`: what a job needs to go on beside tables and dense parts."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.checkpoint.arrow_files import parsing
from shoal.checkpoint.manifest import Manifest, SavedFile
from shoal.checkpoint.row_files import read_checked, write_whole
from shoal.checkpoint.storage import Storage
from shoal.errors import CheckpointError, describe

__all__ = ["STATE_PATH", "JobState", "check_state", "read", "write"]

STATE_PATH = "state.pt"


@dataclass(frozen=True, slots=True, eq=False)
class JobState:
    """State of the job and of each rank that saved it, by rank."""

    state: Mapping[str, Any]
    rank_states: tuple[Mapping[str, Any], ...]

    def of_rank(self, rank: int, world_size: int) -> Mapping[str, Any] | None:
        """A rank's own state; None where the job had another number of ranks."""
        return self.rank_states[rank] if len(self.rank_states) == world_size else None


def check_state(state: Mapping[str, Any], what: str) -> None:
    """Refuse values that could not be loaded again without running code of the file.

    Raises:
        CheckpointError: others than dicts, lists, tuples, numbers, strings, bytes and tensors.
    """
    _encoded(state, what)


def write(
    storage: Storage, state: Mapping[str, Any], rank_states: Sequence[Mapping[str, Any]]
) -> SavedFile:
    """Write the state of a job and of its ranks, which one rank has gathered.

    Raises:
        CheckpointError: values that `check_state` refuses, or the storage does.
    """
    value = {"state": dict(state), "ranks": [dict(one) for one in rank_states]}
    data = _encoded(value, "state of a job")
    return write_whole(storage, STATE_PATH, "state", data)


def read(storage: Storage, manifest: Manifest) -> JobState:
    """What `write` wrote; empty where the checkpoint has none.

    Raises:
        CheckpointError: the file is missing or differs from the manifest.
    """
    found = [one for one in manifest.files if one.kind == "state"]
    if not found:
        return JobState({}, ())
    data = read_checked(storage, found[0]).numpy().tobytes()
    with parsing(storage, found[0].path, "the state of a job"):
        value = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
        return JobState(dict(value["state"]), tuple(dict(one) for one in value["ranks"]))


def _encoded(value: Any, what: str) -> bytes:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True, map_location="cpu")
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            describe(
                what,
                got=str(error).strip().partition("\n")[0],
                allowed="dicts, lists, tuples, numbers, strings, bytes and tensors",
                remedy="Turn other values into these.",
            )
        ) from error
    return buffer.getvalue()
