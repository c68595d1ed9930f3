"""Checkpoints of a run: everything that a resume needs, on any number of ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hrm.carry import Carry
from hrm.dataset import Metadata, PuzzleData, require_same
from hrm.learner import Learner
from hrm.ranks import on_all_ranks
from hrm.sampler import Share, TrainSampler
from hrm.settings import PretrainConfig, Resume
from shoal import comm
from shoal.checkpoint import (
    CheckpointStore,
    Contents,
    Loaded,
    LoadOptions,
    Manifest,
    Saving,
    begin,
    load,
)
from shoal.config import as_first_rank
from shoal.errors import CheckpointError

__all__ = ["Checkpoints", "load_learner", "peek"]

_TABLES, _MODEL = "hrm", "model"


class Checkpoints:
    """The checkpoints of one run; every rank calls alike.

    Args:
        url: their folder.
        learner, sampler: are saved; a later process must have the sampler's data.
        config: the settings that it needs besides.
        keep: number of newest ones to keep; None: all.
    """

    def __init__(
        self,
        url: str,
        learner: Learner,
        sampler: TrainSampler,
        *,
        config: PretrainConfig,
        keep: int | None = None,
    ) -> None:
        self._store = CheckpointStore(url, keep)
        self._learner, self._sampler = learner, sampler
        self._config = config
        self._mesh = learner.mesh
        # Gloo, whose waits take no core from training; telemetry leaves a thread's waits out.
        self._ranks = self._mesh.collectives(
            "checkpoints", path="torch", device=torch.device("cpu"), timed=False
        )
        self._saved_step: int | None = None
        self._saving: Saving | None = None

    def begin(self) -> Manifest | None:
        """Begin to save; between two steps, with nothing drawn ahead.

        Training may continue at once: a thread writes the current state.

        Returns:
            the save before this one, now committed; None: there was none under way.

        Raises:
            CheckpointError: this one cannot begin, or the one before failed, on any rank.
        """
        learner, before = self._learner, self.settle()
        self._saving = begin(
            self._store.url,
            _contents(learner, self._state(), _rank_state(learner)),
            step=learner.step,
            position=learner.step * learner.share.global_batch,
            collectives=self._ranks,
        )
        self._saved_step = learner.step
        return before

    @property
    def is_saved(self) -> bool:
        """Whether a save of this step has begun, or the run resumed from one."""
        return self._saved_step == self._learner.step

    def settle(self) -> Manifest | None:
        """Wait for the running save, if any, and remove old ones beyond `keep`.

        Raises:
            CheckpointError: it failed, on any rank; on every rank.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return None
        manifest = saving.wait()
        if self._mesh.rank == 0:
            self._store.retain()
        return manifest

    def abort(self) -> None:
        """Make the running save fail soon, because training has failed."""
        if self._saving is not None:
            self._saving.abort()

    def newest(self, resume: Resume) -> str | None:
        """The checkpoint to resume from, if any; a collective call.

        Raises:
            CheckpointError: one exists but must not, or none exists but must.
        """
        name = as_first_rank(self._mesh.control, self._newest_name, what="newest checkpoint")
        if name and resume == "never":
            raise CheckpointError(
                "resume",
                got=f"never, where {self._store.url} holds {name}",
                allowed="a folder without checkpoints",
                remedy="Set another checkpoint_path, or resume=auto to resume from there.",
            )
        if not name and resume == "must":
            raise CheckpointError(
                "resume",
                got=f"must, where {self._store.url} holds no checkpoint",
                allowed="the folder of a run that was saved",
                remedy="Correct checkpoint_path, or set resume=auto to begin.",
            )
        return name or None

    def restore(self, name: str) -> None:
        """Restore learner and sampler from a checkpoint.

        Raises:
            CheckpointError: it is damaged, or of another model, data or settings.
        """
        url = f"{self._store.url}/{name}"
        on_all_ranks(self._mesh.control, lambda: self._check_data(url), what="data of a checkpoint")
        loaded = load_learner(url, self._learner, self._ranks)
        self._sampler.load_state_dict(loaded.state["sampler"])
        self._learner.carry = _carry_of(loaded, self._learner)
        if loaded.rank_state is not None:
            _set_generators(loaded.rank_state["generators"])
        self._saved_step = self._learner.step

    def _check_data(self, url: str) -> None:
        _, began_with = peek(url)
        require_same(began_with, self._sampler.data)

    def _newest_name(self) -> str:
        entry = self._store.latest()
        return "" if entry is None else entry.name

    def _state(self) -> dict[str, Any]:
        learner = self._learner
        average = {} if learner.average is None else learner.average.state_dict()
        return {
            "step": learner.step,
            "sparse": None if learner.sparse is None else learner.sparse.state_dict(),
            "average": {name: value.cpu() for name, value in average.items()},
            "sampler": self._sampler.state_dict(),
            "config": self._config.model_dump(mode="json"),
            "data": {
                **dataclasses.asdict(self._sampler.data.metadata),
                "path": str(self._sampler.data.path),
                "identifiers": self._sampler.data.identifiers,
            },
        }


def _contents(
    learner: Learner,
    state: Mapping[str, Any] | None = None,
    rank_state: Mapping[str, Any] | None = None,
    *,
    trains: bool = True,
) -> Contents:
    return Contents(
        tables={} if learner.table is None else {_TABLES: learner.table.rows.hosted},
        modules={_MODEL: learner.model},
        optimizers={_MODEL: learner.dense} if trains else {},
        state=state or {},
        rank_state=rank_state or {},
    )


def _rank_state(learner: Learner) -> dict[str, Any]:
    carry = None if learner.carry is None else learner.carry.to("cpu").state_dict()
    generators = {"cpu": torch.get_rng_state()}
    if learner.mesh.device.type == "cuda":
        generators["cuda"] = torch.cuda.get_rng_state(learner.mesh.device)
    return {"carry": carry, "generators": generators}


def _set_generators(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _carry_of(loaded: Loaded, learner: Learner) -> Carry | None:
    """This rank's slots, taken from those of all saving ranks, by their global positions."""
    parts = [state["carry"] for state in loaded.rank_states]
    if any(part is None for part in parts):
        return None
    share: Share = learner.share
    cut = slice(share.first, share.first + share.count)
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    carry = Carry.from_state({name: all_[cut].clone() for name, all_ in whole.items()})
    dtype = learner.model.config.dtype  # a resumed run may have another
    states = {"z_H_BTD": carry.z_H_BTD.to(dtype), "z_L_BTD": carry.z_L_BTD.to(dtype)}
    return dataclasses.replace(carry, **states).to(learner.mesh.device)


def load_learner(
    url: str, learner: Learner, ranks: comm.Collectives, *, trains: bool = True
) -> Loaded:
    """Fill a learner, but for its carry; a collective call.

    Args:
        trains: with the optimizer's state.

    Raises:
        CheckpointError: none there, damaged, or of another model.
    """
    unknown = frozenset() if trains else frozenset({f"optimizer:{_MODEL}"})
    loaded = load(
        url,
        _contents(learner, trains=trains),
        options=LoadOptions(allow_unknown=unknown),
        collectives=ranks,
    )
    state = loaded.state
    saved, own = bool(state["average"]), learner.average is not None
    if saved != own:
        raise CheckpointError(
            f"averaged parameters in {url}",
            got="some" if saved else "none",
            allowed="some, as arch.ema_decay is set" if own else "none without arch.ema_decay",
            remedy="Resume with the arch.ema_decay that the run began with.",
        )
    if learner.average is not None:
        learner.average.load_state_dict(state["average"])
    if learner.sparse is not None and state["sparse"] is not None:
        learner.sparse.load_state_dict(state["sparse"])
    learner.step = state["step"]
    # This run's settings replace those of the checkpoint; rates are set each step.
    for group in learner.dense.param_groups:
        group.update(betas=learner.config.betas, weight_decay=learner.config.weight_decay)
    return loaded


def peek(url: str) -> tuple[dict[str, Any], PuzzleData]:
    """Settings of the run that a checkpoint is of, and its data, without arrays; on one rank.

    Raises:
        CheckpointError: there is none, or it is of another program.
    """
    loaded = load(url, Contents(), options=LoadOptions(tables=(), dense=False))
    state = loaded.state
    if not {"config", "data"} <= state.keys():
        raise CheckpointError(
            f"checkpoint {url}",
            got="one of another program",
            allowed="one of pretrain.py",
            remedy="Use the folder that pretrain.py printed.",
        )
    said = dict(state["data"])
    path, identifiers = Path(said.pop("path")), said.pop("identifiers")
    return dict(state["config"]), PuzzleData(path, Metadata(**said), {}, identifiers)
