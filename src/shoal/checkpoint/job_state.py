"""What a job hands in to be saved and gets filled when it is loaded; `state.pt` next to it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.serialization import get_unsafe_globals_in_checkpoint

from shoal.checkpoint.manifest import Manifest, SavedFile
from shoal.checkpoint.row_files import parsing, read_checked, write_whole
from shoal.checkpoint.storage import Storage
from shoal.errors import CheckpointError, DTypeError, InputError
from shoal.table.hosting import HostedTables


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contents:
    """The parts of a job, by names that a load asks for again; the same on every rank.

    Args:
        tables: collections of tables.
        modules: dense modules; replicated, or split over ranks by FSDP2 (as DTensors).
        optimizers: name of a module -> the optimizer of its parameters. A `SparseOptimizer` or a
            `JointOptimizer` may have any name.
        state: what else the job needs to continue: nested dicts, lists, tuples, numbers, strings
            and tensors; the same on every rank.
        rank_state: the same, of this rank only (its random generators, say).
    """

    tables: Mapping[str, HostedTables] = field(default_factory=dict)
    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    optimizers: Mapping[str, Optimizer] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    rank_state: Mapping[str, Any] = field(default_factory=dict)

    def check_placed(self, world_size: int) -> None:
        """Check that tables are placed on as many ranks as save or load them.

        Raises:
            InputError: they are not.
            DTypeError: a collection, say, in place of its `hosted`.
        """
        for name, tables in self.tables.items():
            if not isinstance(cast(object, tables), HostedTables):
                what, got = f"tables {name!r} of a job", type(tables).__name__
                remedy = "Pass what `hosted` of the collection gives."
                raise DTypeError(what, got=got, allowed="HostedTables", remedy=remedy)
            placed = 1 if tables.placement is None else tables.placement.world_size
            if placed != world_size:
                what, got = f"placement of collection {name!r}", f"one on {placed} ranks"
                remedy = "Pass the collectives of all ranks of the job."
                raise InputError(what, got, f"one on {world_size}, as collectives has", remedy)


STATE_PATH = "state.pt"


class JobState(NamedTuple):
    """State of the job and of each rank that saved it, by rank."""

    state: Mapping[str, Any]
    rank_states: tuple[Mapping[str, Any], ...]


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


def average_in(state: Mapping[str, Any], name: str) -> Mapping[str, torch.Tensor] | None:
    """Averaged dense weights of a model in the state of a run's checkpoint; None without any."""
    learners = state.get("run_state", {}).get("learners", {})
    average: Mapping[str, torch.Tensor] | None = learners.get(name, {}).get("average")
    return average


def _encoded(value: Any, what: str) -> bytes:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True, map_location="cpu")
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError) as error:
        got = str(error).strip().partition("\n")[0]
        if isinstance(error, pickle.UnpicklingError):  # whose text is about files of others
            buffer.seek(0)
            got = ", ".join(get_unsafe_globals_in_checkpoint(buffer)) or got
        allowed = "dicts, lists, tuples, numbers, strings, bytes and tensors"
        raise CheckpointError(what, got, allowed, "Turn other values into these.") from error
    return buffer.getvalue()
