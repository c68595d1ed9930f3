"""The run folder: where it is, what lies in it, and finding one again."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from shoal import config as settings
from shoal.config import RunConfig
from shoal.errors import CheckpointError, ConfigError, describe

__all__ = ["RunFolder", "create", "find"]


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of a run."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved config."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """Figures of all models, as JSON."""
        return self.path / "metrics.json"

    @property
    def report(self) -> Path:
        """The HTML report."""
        return self.path / "report.html"

    @property
    def logs(self) -> Path:
        """log.jsonl and TensorBoard event files."""
        return self.path / "logs"

    @property
    def model(self) -> Path:
        """The checkpoint of the trained models."""
        return self.path / "model"

    @property
    def predictions(self) -> Path:
        """Where predictions go unless another place is named."""
        return self.path / "predictions.parquet"

    def write_metrics(self, figures: Mapping[str, Any]) -> None:
        """Write metrics.json; numbers that are not finite become null."""
        text = json.dumps(_strict(figures), indent=2, allow_nan=False)
        self.metrics.write_text(text + "\n", encoding="utf-8")

    def read_metrics(self) -> dict[str, Any]:
        """Read metrics.json.

        Raises:
            CheckpointError: there is none: the run did not finish.
        """
        if not self.metrics.is_file():
            raise CheckpointError(
                describe(
                    "run folder",
                    got=f"{self.path} without metrics.json",
                    allowed="the folder of a finished run",
                    remedy="Train first: shoal train CONFIG.",
                )
            )
        figures: dict[str, Any] = json.loads(self.metrics.read_text(encoding="utf-8"))
        return figures


def create(config: RunConfig) -> RunFolder:
    """Make a new folder `<output.dir>/<name>-<time>` and write the resolved config into it.

    Raises:
        ConfigError: the folder cannot be made there.
    """
    stem = f"{config.name}-{datetime.now():%Y%m%d-%H%M%S}"
    base = Path(config.output.dir)
    try:
        base.mkdir(parents=True, exist_ok=True)
        path = next(path for path in _candidates(base, stem) if _made(path))
        folder = RunFolder(path)
        folder.logs.mkdir()
        folder.config.write_text(settings.to_yaml(config), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            describe(
                "output.dir",
                got=f"{base} ({error.strerror})",
                allowed="a folder that can be written",
                remedy="Set output.dir=FOLDER or SHOAL_OUTPUT_DIR.",
            )
        ) from error
    return folder


def find(run: str, overrides: Sequence[str]) -> tuple[RunFolder, RunConfig]:
    """The folder and settings of a trained run.

    Args:
        run: a run folder, or a config file: then the latest run of that name in its output.dir.
        overrides: changes to the run's settings.

    Raises:
        CheckpointError: no saved model there.
        ConfigError: no such file, or wrong overrides.
    """
    path = Path(run)
    if not path.is_dir():
        wanted = settings.load(path, overrides)
        stem = re.compile(re.escape(wanted.name) + r"-\d{8}-\d{6}(-\d+)?")
        runs = sorted(
            candidate
            for candidate in Path(wanted.output.dir).glob("*")
            if stem.fullmatch(candidate.name) and _is_trained(candidate)
        )
        if not runs:
            raise _untrained(f"no trained run {wanted.name}-* in {wanted.output.dir}")
        path = runs[-1]
    if not _is_trained(path):
        raise _untrained(f"{path} without a saved model")
    folder = RunFolder(path)
    return folder, settings.load(folder.config, overrides)


def _candidates(base: Path, stem: str) -> Sequence[Path]:
    return [base / stem, *(base / f"{stem}-{number}" for number in range(2, 100))]


def _made(path: Path) -> bool:
    try:
        path.mkdir()
    except FileExistsError:
        return False
    return True


def _is_trained(path: Path) -> bool:
    return (path / "model" / "manifest.json").is_file() and (path / "config.yaml").is_file()


def _untrained(got: str) -> CheckpointError:
    return CheckpointError(
        describe(
            "run",
            got=got,
            allowed="a run folder, or a config file that was trained with output.save_model=true",
            remedy="Train first: shoal train CONFIG.",
        )
    )


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
