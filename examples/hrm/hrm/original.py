"""Weights of the original HRM, and of TRM: a file `step_N` of `create_model`'s state dict."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch import Tensor

from hrm.learner import Learner
from hrm.puzzle_table import TABLE
from shoal.errors import CheckpointError

__all__ = ["load_original"]

_PREFIXES = ("_orig_mod.", "model.", "inner.")  # of torch.compile, the loss head and the ACT model
_NAMES = {
    "H_init": "H_init_D",
    "L_init": "L_init_D",
    "embed_tokens.embedding_weight": "embed_tokens.weight",
    "embed_pos.embedding_weight": "embed_pos.weight",
}
_ROWS = "puzzle_emb.weights"
_AT_WORK = ("puzzle_emb.local_", "rotary_emb.")  # buffers that follow from the rest


def load_original(path: str | Path, learner: Learner) -> None:
    """Fill a learner's model and rows; every rank calls alike.

    Optimizers, the step and the carry are as they were: the original saves none.

    Args:
        path: the file. Of a puzzle's row its number is the id.
        learner: of the sizes that the file was trained with.

    Raises:
        CheckpointError: no such file, one of something else, or of other sizes; nothing changed.
    """
    found = {_here(name): value for name, value in _read(path).items()}
    rows_NR = found.pop(_ROWS, None)
    found = {name: value for name, value in found.items() if not name.startswith(_AT_WORK)}
    state = learner.model.state_dict(keep_vars=True)
    # Of a network that is both, the original has one name.
    own = {name: value for name, value in state.items() if name in found or not _twice(name, state)}
    problems = [
        *(f"no {name}" for name in sorted(own.keys() - found.keys())),
        *(f"{name}, which the model has not" for name in sorted(found.keys() - own.keys())),
        *(
            f"{name} of {tuple(found[name].shape)}, here {tuple(own[name].shape)}"
            for name in sorted(own.keys() & found.keys())
            if found[name].shape != own[name].shape
        ),
        *(
            f"{name} other than {_of_fast(name)}, here one network"
            for name in sorted(found)
            if _twice(name, state) and _of_fast(name) in found
            if not torch.equal(found[name], found[_of_fast(name)])
        ),
    ]
    dim = learner.model.config.puzzle_dim
    shape = (0, 0) if rows_NR is None else tuple(rows_NR.shape)
    if len(shape) != 2:
        problems.append(f"rows of puzzles of shape {shape}, here (N, {dim})")
    elif shape[1] != dim:
        problems.append(f"rows of puzzles {shape[1]} wide, here {dim}")
    if problems:
        raise _refused(path, "; ".join(problems[:5]))
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(found[name])
    if rows_NR is not None and learner.table is not None:
        if learner.mesh.rank:  # rows of rank 0 reach their owners
            rows_NR = rows_NR[:0]
        ids_N = torch.arange(len(rows_NR), device=learner.mesh.device)
        learner.table.rows.table(TABLE).assign(ids_N, rows_NR.float().to(ids_N.device))
    if learner.average is not None:
        learner.average.restart()


def _read(path: str | Path) -> dict[str, Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise _refused(path, f"{type(error).__name__}: {error}") from error
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(one, Tensor) for name, one in state.items()
    ):
        raise _refused(path, "something else than tensors by name")
    return state


def _here(name: str) -> str:
    """A name of the original as the model has it."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return _NAMES.get(name, name.replace(".mlp_t.", ".mixer.mlp."))


def _twice(name: str, state: dict[str, Tensor]) -> bool:
    """Whether a weight of the slow module is the fast one's, too."""
    own = state.get(name)
    return name.startswith("H_level.") and own is not None and state.get(_of_fast(name)) is own


def _of_fast(name: str) -> str:
    """The fast module's name of a weight of the slow one."""
    return name.replace("H_level.", "L_level.", 1)


def _refused(path: str | Path, got: str) -> CheckpointError:
    return CheckpointError(
        f"weights of the original HRM in {path}",
        got=got,
        allowed="the state dict that pretrain.py of the original saved as step_N",
        remedy="Set arch.* and data_path as in its all_config.yaml.",
    )
