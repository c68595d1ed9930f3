"""The run folder: where it is, what lies in it, and finding one again."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from shoal import config as settings
from shoal.checkpoint import CheckpointStore
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.store import claim
from shoal.comm.launch_environment import Attempt
from shoal.config import RunConfig
from shoal.errors import CheckpointError, ConfigError
from shoal.telemetry import replace_text


@dataclass
class RunFolder:
    """Paths of a run.

    Attributes:
        config: the resolved config.
        metrics: figures of all models, as JSON.
        report: the HTML report.
        plan: where tables were, if that was planned or read from a file.
        logs: log.jsonl and TensorBoard event files.
        checkpoints: those of the run, unless its settings name another folder.
        launch: which launcher's job made the folder.
        best: names the best checkpoint, if the run keeps one.
        predictions: where predictions go unless another path is named.
    """

    path: Path

    def __post_init__(self) -> None:
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.json"
        self.report = self.path / "report.html"
        self.plan = self.path / "plan.json"
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"
        self.launch = self.logs / "launch.json"
        self.best = self.path / "best.json"
        self.predictions = self.path / "predictions.parquet"

    def write_metrics(self, figures: Mapping[str, Any]) -> None:
        """Write metrics.json; numbers that are not finite become null."""
        text = json.dumps(_strict(figures), indent=2, allow_nan=False)
        replace_text(self.metrics, text + "\n")

    def read_metrics(self) -> dict[str, Any]:
        """Read metrics.json.

        Raises:
            CheckpointError: there is none: the run did not finish.
        """
        if not self.metrics.is_file():
            raise CheckpointError(
                "run folder",
                got=f"{self.path} without metrics.json",
                allowed="the folder of a finished run",
                remedy="Train first: shoal train CONFIG.",
            )
        try:
            figures: dict[str, Any] = json.loads(self.metrics.read_text(encoding="utf-8"))
            dict(figures["models"])
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise CheckpointError(
                f"figures of a run in {self.metrics}",
                got=f"{type(error).__name__}: {error}",
                allowed="the file as the run wrote it",
                remedy="Remove it, and continue the run: shoal train CONFIG --resume RUN.",
            ) from error
        return figures

    def read_best(self) -> dict[str, Any]:
        """What best.json says of the best checkpoint; empty where there is none."""
        best = _json(self.best)
        return best if {"checkpoint", "metric", "value", "since"} <= best.keys() else {}


def _json(path: Path) -> dict[str, Any]:
    """What a JSON file holds; nothing where there is none, or an incomplete one."""
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}


def hold(folder: RunFolder, held: ExitStack) -> None:
    """Have a run folder for this process until `held` ends.

    Raises:
        CheckpointError: another process trains this run.
    """
    ours = claim(Storage(folder.logs))
    if ours is None:
        raise CheckpointError(
            "run to continue",
            got=f"{folder.path}, which another process is training",
            allowed="one that ended or was interrupted",
            remedy="Wait for it, or name another run.",
        )
    held.callback(ours.release, keep=False)


def create(config: RunConfig, attempt: Attempt | None = None) -> RunFolder:
    """Make a new folder `<output.dir>/<name>-<time>` and write the resolved config into it.

    attempt: the start of the launcher's job that makes it, by which a later one finds it.

    Raises:
        ConfigError: the folder cannot be made there.
    """
    stem = f"{config.name}-{datetime.now():%Y%m%d-%H%M%S}"
    base = Path(config.output.dir)
    try:
        base.mkdir(parents=True, exist_ok=True)
        folder = RunFolder(_make_new(base, stem))
        folder.logs.mkdir()
        if attempt is not None:
            folder.launch.write_text(json.dumps({"job": attempt.job}) + "\n", encoding="utf-8")
        replace_text(folder.config, settings.to_yaml(config))
    except OSError as error:
        got, remedy = f"{base} ({error.strerror})", "Set output.dir=FOLDER or SHOAL_OUTPUT_DIR."
        raise ConfigError("output.dir", got, "a folder that can be written", remedy) from error
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
    if not path.is_dir() and path.suffix != ".yaml":
        near = sorted(path.parent.glob("*/config.yaml"), key=lambda one: one.stat().st_mtime)
        raise CheckpointError(
            "run",
            got=f"{run}, which is no folder",
            allowed="a run folder, or the .yaml file of a trained run",
            remedy=f"The latest run there is {near[-1].parent}." if near else "See output.dir.",
        )
    if not path.is_dir():
        wanted = settings.load(path, overrides)
        runs = (one.path for one in _runs_of(wanted) if checkpoint_of(one) is not None)
        found = next(runs, None)
        if found is None:
            raise _untrained(f"no trained run {wanted.name}-* in {wanted.output.dir}")
        path = found
    folder = RunFolder(path)
    if checkpoint_of(folder) is None:
        raise _untrained(f"{path} without a saved model")
    return folder, settings.load(folder.config, overrides)


def checkpoint_of(folder: RunFolder) -> str | None:
    """The folder or URL of a run's best checkpoint, if it kept one, else of its newest.

    None: it has none, or is no run.
    """
    if not folder.config.is_file():
        return None
    store = CheckpointStore(checkpoints_of(folder))
    entries = store.list()
    if not entries:
        return None
    best = folder.read_best().get("checkpoint")
    name = best if best in {entry.name for entry in entries} else entries[-1].name
    return store.folder(name).url


def checkpoints_of(folder: RunFolder) -> str:
    """The folder or URL of all checkpoints of a run."""
    if folder.checkpoints.is_dir():
        return str(folder.checkpoints)
    # Reading settings takes a while.
    return settings.load(folder.config, environment={}).checkpoint.dir or str(folder.checkpoints)


def unfinished(config: RunConfig) -> RunFolder | None:
    """The newest run of a config's name, in its output.dir, that did not finish."""
    return next((one for one in _runs_of(config) if not one.metrics.is_file()), None)


def made_by(config: RunConfig, job: str) -> RunFolder | None:
    """The newest run of a config's name that this job of a launcher made."""
    made = (one for one in _runs_of(config) if _json(one.launch).get("job") == job)
    return next(made, None)


def existing(path: str) -> RunFolder:
    """A run by its folder.

    Raises:
        CheckpointError: it is none.
    """
    folder = RunFolder(Path(path))
    if not folder.config.is_file():
        got, allowed = f"{path} without config.yaml", "the folder of a run, or latest"
        raise CheckpointError("run to continue", got, allowed, "See which folders output.dir has.")
    return folder


def _runs_of(config: RunConfig) -> Iterator[RunFolder]:
    """Runs of a config's name, newest first."""
    stem = re.compile(re.escape(config.name) + r"-(\d{8}-\d{6})(?:-(\d+))?")
    found = []
    for path in Path(config.output.dir).glob("*"):
        match = stem.fullmatch(path.name)
        if match is not None and (path / "config.yaml").is_file():
            found.append(((match[1], int(match[2] or 1)), path))
    for _, path in sorted(found, reverse=True):
        yield RunFolder(path)


def _make_new(base: Path, stem: str) -> Path:
    """Make the first folder of a stem that does not exist: stem, stem-2, stem-3."""
    for number in itertools.count(1):
        path = base / (stem if number == 1 else f"{stem}-{number}")
        with suppress(FileExistsError):
            path.mkdir()
            break
    return path


def _untrained(got: str) -> CheckpointError:
    allowed = "a run folder, or a config file that was trained with output.save_model=true"
    return CheckpointError("run", got, allowed, "Train first: shoal train CONFIG.")


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
