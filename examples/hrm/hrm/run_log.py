"""Reports of a run: lines on the screen, JSONL, TensorBoard, Weights & Biases."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hrm.settings import PretrainConfig
from shoal.errors import ConfigError
from shoal.telemetry import FanOut, JsonLines, ScalarSink, TensorBoard, has_tensorboard

__all__ = ["Pace", "RunLog", "Tally", "shown"]


class Tally:
    """Sums of figures over the steps since they were taken, on the device."""

    def __init__(self) -> None:
        self.steps = 0
        self._sums: dict[str, Tensor] = {}

    def add(self, sums: Mapping[str, Tensor]) -> None:
        """Take in a step's."""
        self.steps += 1
        if not self._sums:
            self._sums = {name: value.detach().clone() for name, value in sums.items()}
            return
        torch._foreach_add_(list(self._sums.values()), [sums[name] for name in self._sums])

    def take(self) -> tuple[dict[str, Tensor], int]:
        """Return the sums and the number of steps, and start from zero."""
        sums, steps = self._sums, self.steps
        self._sums, self.steps = {}, 0
        return sums, steps


class Pace:
    """Steps a second: of a stretch, and over all stretches but the first, which warms up.

    Args:
        warm_steps: steps at the beginning that the whole does not count.
    """

    def __init__(self, warm_steps: int) -> None:
        self._warm_steps = warm_steps
        self._began_s = time.perf_counter()
        self._seen = 0
        self._steps, self._spent_s = 0, 0.0
        self._all_steps, self._all_s = 0, 0.0

    def resume(self) -> None:
        """Start a timed interval of training; earlier time does not count."""
        self._began_s = time.perf_counter()

    def stretch(self, steps: int) -> float:
        """So many steps are done since the last call or `resume`: steps a second."""
        now = time.perf_counter()
        spent_s, self._began_s = max(now - self._began_s, 1e-9), now
        self._all_steps, self._all_s = self._all_steps + steps, self._all_s + spent_s
        if self._seen >= self._warm_steps:
            self._steps, self._spent_s = self._steps + steps, self._spent_s + spent_s
        self._seen += steps
        return steps / spent_s

    @property
    def steps_per_s(self) -> float:
        """Over all stretches after the warm-up; with it, if nothing came after."""
        if self._steps:
            return self._steps / self._spent_s
        return self._all_steps / self._all_s if self._all_s else 0.0

    @property
    def train_s(self) -> float:
        """Seconds of all stretches."""
        return self._all_s


class RunLog:
    """Where a run's figures go; on ranks other than 0, nowhere.

    Args:
        config: of the run.
        folder: of its files; None if nothing is written.
        leads: whether this is rank 0.
        resumed_step: the step after which the run resumes; None for a new one.

    Raises:
        ConfigError: the package of a requested log is not installed.
    """

    def __init__(
        self, config: PretrainConfig, folder: Path | None, *, leads: bool, resumed_step: int | None
    ) -> None:
        self._leads = leads
        sinks: list[ScalarSink] = []
        if leads and folder is not None:
            _make(folder)
            sinks.append(JsonLines(folder / "log.jsonl", continue_after=resumed_step))
            if has_tensorboard() if config.tensorboard is None else config.tensorboard:
                sinks.append(TensorBoard(folder / "tensorboard", continue_after=resumed_step))
        if leads and config.wandb:
            sinks.append(_WeightsAndBiases(config, folder, goes_on=resumed_step is not None))
        self._sink = FanOut(*sinks)

    def say(self, text: str) -> None:
        """A line on rank 0's screen."""
        if self._leads:
            print(text, flush=True)

    def write(self, step: int, part: str, scalars: Mapping[str, float]) -> None:
        """Figures of a part ("train", "eval/<set>"), as part/name."""
        if self._leads:
            self._sink.write(step, {f"{part}/{name}": value for name, value in scalars.items()})

    def close(self) -> None:
        """Flush all."""
        self._sink.close()


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"folder of logs {folder}",
            got=str(error),
            allowed="a folder that exists or can be created",
            remedy="Set checkpoint_path or log_path.",
        ) from error


class _WeightsAndBiases:
    """A run of wandb; a resumed run continues it, by the id stored with its logs."""

    def __init__(self, config: PretrainConfig, folder: Path | None, *, goes_on: bool) -> None:
        check_wandb()
        wandb = importlib.import_module("wandb")
        known = None if folder is None else folder / "wandb_id"
        same: dict[str, str] = {}
        if goes_on and known is not None and known.is_file():
            same = {"id": known.read_text().strip(), "resume": "allow"}
        self._run: Any = wandb.init(
            project=config.project_name,
            name=config.run_name,
            config=config.model_dump(mode="json"),
            **same,
        )
        if known is not None:
            known.write_text(self._run.id)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


def check_wandb() -> None:
    """Raise a ConfigError where wandb is not installed."""
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            "wandb",
            got="true, and no wandb package",
            allowed="an installation with wandb",
            remedy="pip install wandb, or leave it out: log.jsonl has the same figures.",
        )


def shown(figures: Mapping[str, float]) -> str:
    """Figures of examples that halted, on one line."""
    names = {
        "exact_accuracy": "exact",
        "accuracy": "cells",
        "blank_accuracy": "blanks",
        "q_halt_accuracy": "q_halt",
        "steps": "ACT steps",
        "lm_loss": "loss",
    }
    parts = [f"{said} {figures[name]:.4f}" for name, said in names.items() if name in figures]
    return ", ".join(parts)
