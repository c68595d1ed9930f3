"""A whole run: data, learner, steps, evaluations, checkpoints, logs; on one or many ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hrm.dataset import PuzzleData, read_split, require_alike
from hrm.kept_outputs import KeptOutputs
from hrm.learner import Learner
from hrm.original import load_original
from hrm.prefetch import Prefetched
from hrm.ranks import joined, on_all_ranks
from hrm.run_log import Pace, RunLog, Tally, check_wandb, shown
from hrm.sampler import Share, TestBatches, TrainSampler
from hrm.schedule import total_steps
from hrm.settings import PretrainConfig
from shoal import comm
from shoal.config import as_first_rank, to_yaml
from shoal.errors import ConfigError
from shoal.telemetry import human_count

if TYPE_CHECKING:
    from hrm.saving import Checkpoints
    from shoal.checkpoint import Manifest

__all__ = ["Result", "Run", "train"]

Figures = Mapping[str, Mapping[str, float]]
"""Figures of an evaluation by set."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """How a run ended.

    Args:
        steps, total_steps: optimizer steps done, including earlier processes, and of a whole run.
        evaluations: step and figures of each evaluation of this process.
        checkpoint_path: folder of its checkpoints; None if it saved none.
        train_s: seconds of training in this process, evaluations and saves left out.
        steps_per_s, samples_per_s: rates after a warm-up; samples of all ranks.
        finished: False if `max_steps` or `max_seconds` stopped it.
        learner: its final state.
    """

    steps: int
    total_steps: int
    evaluations: tuple[tuple[int, Figures], ...]
    checkpoint_path: str | None
    train_s: float
    steps_per_s: float
    samples_per_s: float
    finished: bool
    learner: Learner

    @property
    def figures(self) -> Figures:
        """Of the last evaluation."""
        return self.evaluations[-1][1]


def train(config: PretrainConfig, *, mesh: comm.Mesh | None = None) -> Result:
    """Train by the settings, on all ranks of the launcher; every rank makes the same call.

    Args:
        config: the same on every rank.
        mesh: the ranks; None joins those of the launcher for this call.

    Raises:
        ConfigError, DataError, CheckpointError: before the first step, on every rank.
        CollectiveFailed: a rank is gone.
    """
    if mesh is not None:
        return Run(config, mesh).run()
    with joined(config.device, config.threads) as found:
        return Run(config, found).run()


class Run:
    """One process's part of a run; building it checks and loads everything.

    Args:
        config, mesh: as of `train`.

    Attributes:
        learner, sampler: the trained state, and its position in the data.
    """

    def __init__(self, config: PretrainConfig, mesh: comm.Mesh) -> None:
        self._began_s = time.monotonic()
        self.mesh = mesh
        self._waits = mesh.time_waits() if mesh.world_size > 1 else None
        config = as_first_rank(mesh.control, lambda: _named(config), what="settings of rank 0")
        self.config = config
        self.share = Share(config.global_batch_size, mesh.rank, mesh.world_size)
        self._train_data, self._test_data = on_all_ranks(
            mesh.control, lambda: _opened(config), what="data of a run"
        )
        meta = self._train_data.metadata
        self.total_steps = _planned_steps(config, self._train_data)
        self.sampler = TrainSampler(
            self._train_data, self.share, seed=config.seed, epochs_per_iteration=config.interval
        )
        self.learner = Learner(
            config.arch.model_for(meta), config.learner(self.total_steps), self.share, mesh
        )
        self.windows = TestBatches(
            self._test_data, self.share, limit=config.eval_examples, seed=config.seed
        )
        self.checkpoints: Checkpoints | None = None
        resumed: int | None = None
        if config.save_checkpoints:
            resumed = self._open_checkpoints()
        if resumed is None and config.load_checkpoint is not None:
            load_original(config.load_checkpoint, self.learner)
        self.log = on_all_ranks(mesh.control, lambda: self._open_log(resumed), what="logs of a run")
        self._evaluations: list[tuple[int, Figures]] = []
        self._pace = Pace(warm_steps=config.log_every)
        self._tally = Tally()
        self._profile = None if config.profile is None else self._profiler(config.profile)
        self._waited_s = 0.0
        self._say_what(resumed)

    def _open_checkpoints(self) -> int | None:
        # Row files bring pyarrow, which a run without checkpoints need not have.
        from hrm.saving import Checkpoints

        assert self.config.checkpoint_path is not None
        self.checkpoints = Checkpoints(
            self.config.checkpoint_path,
            self.learner,
            self.sampler,
            config=self.config,
            keep=self.config.keep_checkpoints,
        )
        name = self.checkpoints.newest(self.config.resume)
        if name is None:
            return None
        self.checkpoints.restore(name)
        return self.learner.step

    def _profiler(self, folder: str) -> torch.profiler.profile:
        from shoal.train import profiler  # brings pyarrow, too

        return on_all_ranks(
            self.mesh.control, lambda: profiler(folder, self.mesh.rank), what="folder of a profile"
        )

    def _open_log(self, resumed: int | None) -> RunLog:
        config, leads = self.config, self.mesh.rank == 0
        folder = None if config.log_path is None else Path(config.log_path)
        log = RunLog(config, folder, leads=leads, resumed_step=resumed)
        if leads and folder is not None:
            (folder / "all_config.yaml").write_text(to_yaml(config))
        return log

    def _say_what(self, resumed: int | None) -> None:
        meta, mesh = self._train_data.metadata, self.mesh
        self.log.say(
            f"{self.config.arch.name}: {self.learner.model.parameter_count:,} parameters; "
            f"{self._train_data.examples:,} examples of {meta.total_groups:,} groups, "
            f"{meta.num_puzzle_identifiers:,} puzzle ids; {self.total_steps:,} steps of "
            f"{self.share.global_batch} on {mesh.world_size} x {mesh.device.type} ({mesh.backend})"
        )
        if self.config.checkpoint_path is not None and self.checkpoints is not None:
            self.log.say(f"checkpoints: {self.config.checkpoint_path}")
        if resumed is not None:
            self.log.say(f"resumes after step {resumed:,}")

    @property
    def steps_per_s(self) -> float:
        """Over all training of this process after a warm-up of `log_every` steps."""
        return self._pace.steps_per_s

    def run(self) -> Result:
        """Train to the end, or to a limit."""
        try:
            with self._profile or nullcontext():
                finished = self._train()
        except BaseException:
            if self.checkpoints is not None:
                self.checkpoints.abort()
            raise
        finally:
            self.log.close()
        steps_per_s = self.steps_per_s
        return Result(
            steps=self.learner.step,
            total_steps=self.total_steps,
            evaluations=tuple(self._evaluations),
            checkpoint_path=None if self.checkpoints is None else self.config.checkpoint_path,
            train_s=self._pace.train_s,
            steps_per_s=steps_per_s,
            samples_per_s=steps_per_s * self.share.global_batch,
            finished=finished,
            learner=self.learner,
        )

    def _train(self) -> bool:
        """All iterations that are left; whether they came to their end."""
        while self.sampler.iteration < self.config.iterations:
            ended = self.iterate()
            if ended:
                self.sampler.next_iteration()
            self.evaluate()
            last = self.sampler.iteration == self.config.iterations
            if self.checkpoints is not None and (
                self.config.checkpoint_every_eval or last or not ended
            ):
                self._save(self.checkpoints)
            if not ended:
                self._end("stopped")
                return False
        if not self._evaluations:
            self.log.say("nothing is left to train")
            self.evaluate()
        self._end("finished")
        return True

    def iterate(self) -> bool:
        """Steps up to where an evaluation is due; False where a limit came first."""
        self._pace.resume()
        if self._waits is not None:
            self._waited_s = self._waits.total_s
        with Prefetched(self.sampler, pin=self.mesh.device.type == "cuda") as batches:
            while self.learner.step < self.total_steps:
                if self._is_late():
                    return False
                batch = batches.take()
                if batch is None:
                    break
                self._tally.add(self.learner.learn(batch))
                if self._profile is not None:
                    self._profile.step()
                if self.learner.step % self.config.log_every == 0:
                    self._tell()
            self._tell()
        return True

    def _is_late(self) -> bool:
        """Whether a limit is reached; clocks are asked where figures are due, over all ranks."""
        step, config = self.learner.step, self.config
        if config.max_steps is not None and step >= config.max_steps:
            self._tell()
            return True
        if config.max_seconds is None or self._tally.steps:
            return False
        late = torch.tensor([float(time.monotonic() - self._began_s > config.max_seconds)])
        (any_late,) = self.mesh.control.all_reduce(late, "max", what="vote on the time").wait()
        return bool(any_late.item())

    def _tell(self) -> None:
        """Print and log the figures since the last call."""
        sums, steps = self._tally.take()
        if not steps:
            return
        figures = self.learner.totals(sums, steps)  # waits for the device
        rate = self._pace.stretch(steps)
        samples = rate * self.share.global_batch
        step = self.learner.step
        if not figures["count"]:  # nothing has halted: there are no means
            figures = {k: v for k, v in figures.items() if k.endswith("loss") or k == "count"}
        figures["lr"] = self.learner.rate
        speed = {"steps_per_s": rate, "samples_per_s": samples}
        waiting = ""
        if self._waits is not None:
            waited_s, self._waited_s = self._waited_s, self._waits.total_s
            speed["communication_share"] = (self._waited_s - waited_s) * rate / steps
            waiting = f", {speed['communication_share']:.0%} communication but for DDP's"
        self.log.write(step, "train", {**figures, **speed})
        self.log.say(
            f"step {step}/{self.total_steps}: {shown(figures)} | {rate:.2f} steps/s, "
            f"{human_count(samples)} samples/s, "
            f"{human_count(samples / self.mesh.world_size)} a rank{waiting}"
        )

    def evaluate(self) -> Figures:
        """Evaluate on all ranks, print and log the figures."""
        began_s = time.perf_counter()
        kept = KeptOutputs(self.config.eval_save_outputs, self.share)
        found = self.learner.evaluate(self.windows, kept)
        spent_s = time.perf_counter() - began_s
        step = self.learner.step
        if self.config.eval_save_outputs and self.config.log_path is not None:
            kept.write(Path(self.config.log_path), step)
        for name, figures in found.items():
            self.log.write(step, f"eval/{name}", figures)
            self.log.say(
                f"eval {name} after step {step}: {shown(figures)} "
                f"({figures['count']:.0f} examples, {spent_s:.1f} s)"
            )
        self._evaluations.append((step, found))
        return found

    def _save(self, checkpoints: Checkpoints) -> None:
        """Begin to save; it continues during the next steps if tables allow it."""
        if checkpoints.is_saved:
            return
        began_s = time.perf_counter()
        self._say_saved(checkpoints.begin())
        spent_s = time.perf_counter() - began_s
        self.log.say(f"saving step {self.learner.step}: training was held for {spent_s:.2f} s")

    def _say_saved(self, manifest: Manifest | None) -> None:
        if manifest is not None:
            size = sum(one.bytes for one in manifest.files)
            self.log.say(f"saved step {manifest.step}: {size / 1e6:.1f} MB")

    def _end(self, how: str) -> None:
        if self.checkpoints is not None:
            self._say_saved(self.checkpoints.settle())
        rate = self.steps_per_s
        samples = rate * self.share.global_batch
        self.log.say(
            f"{how} after step {self.learner.step} of {self.total_steps}: "
            f"{self._pace.train_s:.1f} s of training, {rate:.3f} steps/s, "
            f"{samples:.1f} samples/s, {samples / self.mesh.world_size:.1f} samples/s per rank"
        )


def _named(config: PretrainConfig) -> PretrainConfig:
    """Fill in names and paths that are not set, as HRM does; on rank 0."""
    if config.wandb:
        check_wandb()
    data = Path(config.data_path).name
    project = config.project_name or f"{data[:1].upper()}{data[1:]} ACT-torch"
    # By the settings, so that the same command finds its checkpoints again.
    run = config.run_name or f"{config.arch.name} {config.fingerprint}"
    place = config.checkpoint_path or f"checkpoints/{project}/{run}"
    log = config.log_path or (f"logs/{project}/{run}" if "://" in place else place)
    return config.model_copy(
        update={
            "project_name": project,
            "run_name": run,
            "checkpoint_path": place,
            "log_path": log,
        }
    )


def _opened(config: PretrainConfig) -> tuple[PuzzleData, PuzzleData]:
    data, test = read_split(config.data_path, "train"), read_split(config.data_path, "test")
    require_alike(data, test)
    return data, test


def _planned_steps(config: PretrainConfig, data: PuzzleData) -> int:
    """Steps of a whole run.

    Raises:
        ConfigError: an iteration has not one batch.
    """
    meta = data.metadata
    examples = config.interval * meta.total_groups * meta.mean_puzzle_examples
    if examples < config.global_batch_size:
        raise ConfigError(
            "examples between two evaluations",
            got=f"{examples:.0f}: {config.interval} epochs of {meta.total_groups} groups",
            allowed=f"one batch of {config.global_batch_size} at least",
            remedy="Raise eval_interval (and epochs), or lower global_batch_size.",
        )
    return total_steps(
        config.epochs, meta.total_groups, meta.mean_puzzle_examples, config.global_batch_size
    )
