"""The run folder: where it is, what lies in it, and finding one again."""

from __future__ import annotations

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
from shoal.comm.launchers import Attempt
from shoal.config import RunConfig
from shoal.errors import CheckpointError, ConfigError


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
    def checkpoints(self) -> Path:
        """The checkpoints of the run, unless its settings name another place."""
        return self.path / "checkpoints"

    @property
    def launch(self) -> Path:
        """Which launcher's job made the folder."""
        return self.logs / "launch.json"

    @property
    def predictions(self) -> Path:
        """Where predictions go unless another place is named."""
        return self.path / "predictions.parquet"

    def write_metrics(self, figures: Mapping[str, Any]) -> None:
        """Write metrics.json; numbers that are not finite become null."""
        text = json.dumps(_strict(figures), indent=2, allow_nan=False)
        _replace(self.metrics, text + "\n")

    def write_report(self, page: str) -> None:
        """Write report.html."""
        _replace(self.report, page)

    def write_config(self, config: RunConfig) -> None:
        """Write config.yaml."""
        _replace(self.config, settings.to_yaml(config))

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
        path = next(path for path in _candidates(base, stem) if _made(path))
        folder = RunFolder(path)
        folder.logs.mkdir()
        if attempt is not None:
            folder.launch.write_text(json.dumps({"job": attempt.job}) + "\n", encoding="utf-8")
        folder.write_config(config)
    except OSError as error:
        raise ConfigError(
            "output.dir",
            got=f"{base} ({error.strerror})",
            allowed="a folder that can be written",
            remedy="Set output.dir=FOLDER or SHOAL_OUTPUT_DIR.",
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
    """The folder or URL of a run's newest checkpoint; None: it has none, or is no run."""
    if not folder.config.is_file():
        return None
    store = CheckpointStore(checkpoints_of(folder))
    newest = store.latest()
    return None if newest is None else store.folder(newest.name).url


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
    return next((one for one in _runs_of(config) if _job_of(one) == job), None)


def existing(path: str) -> RunFolder:
    """A run by its folder.

    Raises:
        CheckpointError: it is none.
    """
    folder = RunFolder(Path(path))
    if not folder.config.is_file():
        raise CheckpointError(
            "run to continue",
            got=f"{path} without config.yaml",
            allowed="the folder of a run, or latest",
            remedy="See which folders output.dir has.",
        )
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


def _job_of(folder: RunFolder) -> str | None:
    if not folder.launch.is_file():
        return None
    try:
        job: str | None = json.loads(folder.launch.read_text(encoding="utf-8")).get("job")
    except (OSError, ValueError, AttributeError):  # cut short when its job was killed
        return None
    return job


def _candidates(base: Path, stem: str) -> Sequence[Path]:
    return [base / stem, *(base / f"{stem}-{number}" for number in range(2, 100))]


def _made(path: Path) -> bool:
    try:
        path.mkdir()
    except FileExistsError:
        return False
    return True


def _untrained(got: str) -> CheckpointError:
    return CheckpointError(
        "run",
        got=got,
        allowed="a run folder, or a config file that was trained with output.save_model=true",
        remedy="Train first: shoal train CONFIG.",
    )


def _replace(path: Path, text: str) -> None:
    """Write a file that is whole, or as it was, if the process dies meanwhile."""
    new = path.with_name(f"{path.name}.new")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    except OSError:
        with suppress(OSError):
            new.unlink()
        raise


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
