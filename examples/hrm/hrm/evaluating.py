"""Evaluate a checkpoint of pretrain.py on test data, with the settings stored in it."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from hrm.dataset import PuzzleData, read_split, require_alike
from hrm.kept_outputs import KeptOutputs
from hrm.learner import Learner
from hrm.ranks import joined, on_all_ranks
from hrm.run_log import shown
from hrm.running import Figures
from hrm.sampler import Share, TestBatches
from hrm.saving import load_learner, peek
from hrm.settings import EvaluateConfig, PretrainConfig
from shoal import comm
from shoal.config import as_first_rank, validate
from shoal.errors import ConfigError

__all__ = ["evaluate", "make_places", "opened"]


def evaluate(config: EvaluateConfig, *, mesh: comm.Mesh | None = None) -> Figures:
    """Figures by set, those that pretrain.py had at that step; every rank calls it alike.

    Raises:
        CheckpointError: no checkpoint, or one of another program.
        DataError: no data, or of another vocabulary, length or other ids than it was trained on.
    """
    if mesh is None:
        with joined(config.device, config.threads) as found:
            return evaluate(config, mesh=found)
    on_all_ranks(mesh.control, lambda: make_places(config), what="places of figures")
    learner, windows = opened(config, mesh)
    kept = KeptOutputs(config.save_outputs, learner.share)
    figures = learner.evaluate(windows, kept)
    if config.save_outputs:
        kept.write(Path(config.save_outputs_to), learner.step)
    if mesh.rank == 0:
        for name, one in figures.items():
            print(
                f"eval {name} after step {learner.step}: {shown(one)} ({one['count']:.0f} examples)"
            )
        if config.output is not None:
            said = {"checkpoint": config.checkpoint, "step": learner.step, "figures": figures}
            Path(config.output).write_text(json.dumps(said, indent=1))
    return figures


def make_places(config: EvaluateConfig) -> None:
    """Create the output folders before the evaluation starts.

    Raises:
        ConfigError: they cannot be created.
    """
    parts = [] if config.output is None else [Path(config.output).parent]
    parts += [Path(config.save_outputs_to)] if config.save_outputs else []
    try:
        for part in parts:
            part.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            "folder to write to",
            got=str(error),
            allowed="a folder that exists or can be created",
            remedy="Correct output or save_outputs_to.",
        ) from error


def opened(config: EvaluateConfig, mesh: comm.Mesh) -> tuple[Learner, TestBatches]:
    """The learner of a checkpoint, and its test batches.

    Raises:
        CheckpointError, DataError: as `evaluate`.
    """
    settings, trained_on = as_first_rank(
        mesh.control, lambda: peek(config.checkpoint), what="settings of a checkpoint"
    )
    run = validate(PretrainConfig, settings)
    changes = {
        "puzzle_emb_sharding": config.puzzle_emb_sharding or run.puzzle_emb_sharding,
        "global_batch_size": config.global_batch_size or run.global_batch_size,
        "data_path": config.data_path or run.data_path,
        "compile": config.compile,
        "cuda_graphs": False,
    }
    run = run.model_copy(update=changes)
    share = Share(run.global_batch_size, mesh.rank, mesh.world_size)

    def read() -> PuzzleData:
        test = read_split(run.data_path, "test")
        require_alike(trained_on, test)
        return test

    test = on_all_ranks(mesh.control, read, what="test data")
    model = run.arch.model_for(trained_on.metadata)
    learner = Learner(model, run.learner(1), share, mesh)
    ranks = mesh.collectives("checkpoints", path="torch", device=torch.device("cpu"))
    load_learner(config.checkpoint, learner, ranks, trains=False)
    asked = config.eval_examples
    limit = run.eval_examples if asked is None else None if asked == "all" else asked
    return learner, TestBatches(test, share, limit=limit, seed=run.seed)
