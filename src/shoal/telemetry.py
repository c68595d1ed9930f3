"""What a run reports about itself: scalar sinks and the progress line.

Everything that reads, formats or writes happens when `ProgressLine.due` is true, at most twice a
second.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol

from shoal.errors import ConfigError, describe

if TYPE_CHECKING:
    from rich.console import Console


_log = logging.getLogger("shoal.telemetry")

Clock = Callable[[], float]


class ScalarSink(Protocol):
    """Where scalars go."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record the scalars of a step."""
        ...

    def close(self) -> None:
        """Flush and release; writing afterwards is an error."""
        ...


class JsonLines:
    """One JSON object a line: step, time_s since the sink was opened, then the scalars.

    A value that is not finite is written as null, so that every line is strict JSON.

    Args:
        path: the file; what it holds is replaced.
        continue_after: keep its lines up to this step, and let time continue from their last.
    """

    def __init__(
        self, path: Path, clock: Clock = time.perf_counter, *, continue_after: int | None = None
    ) -> None:
        self._clock = clock
        kept = [] if continue_after is None else _rows_until(path, continue_after)
        self._opened = clock() - (kept[-1][0] if kept else 0.0)
        if kept:  # the old lines are there until the new file is whole
            replace_text(path, "".join(line for _, line in kept))
        mode = "a" if kept else "w"
        self._file: IO[str] = path.open(mode, encoding="utf-8", buffering=1)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record the scalars of a step."""
        row: dict[str, float | int | None] = {
            "step": step,
            "time_s": round(self._clock() - self._opened, 3),
        }
        row.update({k: float(v) if math.isfinite(v) else None for k, v in scalars.items()})
        self._file.write(json.dumps(row, allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def replace_text(path: Path, text: str) -> None:
    """Write a file that is whole, or as it was, if the process dies meanwhile."""
    new = path.with_name(f"{path.name}.new")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    except OSError:
        with suppress(OSError):
            new.unlink()
        raise


def _rows_until(path: Path, step: int) -> list[tuple[float, str]]:
    """(time_s, line) of the lines up to a step; an incomplete last line is left out."""
    if not path.is_file():
        return []
    kept: list[tuple[float, str]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        try:
            row = json.loads(line)
            at, time_s = int(row["step"]), float(row["time_s"])
        except (ValueError, TypeError, KeyError):  # damaged: the log continues after it
            continue
        if at <= step:
            kept.append((time_s, line))
    return kept


def has_tensorboard() -> bool:
    """Whether event files can be written here (the `tensorboard` extra is installed)."""
    return importlib.util.find_spec("tensorboard") is not None


class TensorBoard:
    """TensorBoard event files in a folder.

    Args:
        folder: theirs.
        continue_after: what the folder's events say of later steps is out of date.

    Raises:
        ConfigError: the tensorboard package is not installed.
    """

    def __init__(self, folder: Path, *, continue_after: int | None = None) -> None:
        if not has_tensorboard():
            raise ConfigError(
                "TensorBoard logs",
                got="no tensorboard package",
                allowed="an installation with the tensorboard extra",
                remedy="pip install 'shoal[tensorboard]', or set logging.tensorboard=false.",
            )
        from torch.utils.tensorboard import SummaryWriter

        purge = None if continue_after is None else continue_after + 1
        self._writer: Any = SummaryWriter(log_dir=str(folder), purge_step=purge)
        # What its thread fails with is raised by the next write; the thread need not print it.
        with suppress(AttributeError):  # another version keeps its thread elsewhere
            events: Any = self._writer.file_writer
            thread = events.event_writer._async_writer._worker
            thread._invoke_excepthook = lambda thread: None

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record the scalars of a step."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class FanOut:
    """Several sinks as one, which give way: a run outlives a disk that is full or gone.

    What cannot be written is warned about once; sinks that fail are left alone from then on.
    """

    def __init__(self, *sinks: ScalarSink) -> None:
        self._sinks = list(sinks)
        self._warned = False

    def open(self, make: Callable[[], ScalarSink], what: str) -> None:
        """Add the sink that `make` opens, if it can be opened; `what` is for the warning."""
        with self.giving_way(what):
            self._sinks.append(make())

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record the scalars of a step in each sink."""
        for sink in tuple(self._sinks):
            with self.giving_way("logs"):
                try:
                    sink.write(step, scalars)
                except BaseException:
                    self._sinks.remove(sink)
                    with suppress(OSError):
                        sink.close()
                    raise

    def close(self) -> None:
        """Close each sink."""
        for sink in self._sinks:
            with self.giving_way("logs"):
                sink.close()

    @contextmanager
    def giving_way(self, what: str) -> Iterator[None]:
        """What the file system refuses inside is a warning, the first time."""
        try:
            yield
        except OSError as error:
            if not self._warned:
                _log.warning(
                    "%s",
                    describe(
                        f"{what} of the run",
                        got=" ".join(str(error).split()),
                        allowed="a folder that can be written",
                        remedy="The run continues, and so do its checkpoints; its logs, "
                        "metrics.json and report.html will lack what cannot be written.",
                    ),
                )
            self._warned = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressState:
    """What the progress line shows. None hides a figure that is not known yet.

    Args:
        examples: examples done.
        ids: feature ids looked up so far.
        loss: mean loss since the last state.
        auc: AUC so far, each batch evaluated before it was trained on.
        rows: rows in all tables.
        row_bytes: bytes the tables hold, all included.
        saving: how far a save under way is, in a few words.
    """

    examples: int
    ids: int = 0
    loss: float | None = None
    auc: float | None = None
    rows: int | None = None
    row_bytes: int | None = None
    saving: str | None = None


class ProgressLine:
    """A live bar on a terminal; elsewhere a plain line every `plain_interval_s`.

    Use it as a context manager; ask `due()` each step and `show` a state when it is.
    `total` is the number of examples expected, None when the source does not know.
    """

    def __init__(
        self,
        console: Console,
        title: str,
        total: int | None,
        *,
        plain_interval_s: float = 5.0,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._console = console
        self._title = title
        self._total = total
        self._clock = clock
        self._interval_s = 0.5 if console.is_terminal else plain_interval_s
        self._bar: _Bar | None = _Bar(console, title, total) if console.is_terminal else None
        self._started = self._next = 0.0
        self._last: tuple[float, ProgressState] = (0.0, ProgressState(examples=0))

    def __enter__(self) -> ProgressLine:
        self._started = self._clock()
        self._next = self._started + self._interval_s
        self._last = (self._started, ProgressState(examples=0))
        if self._bar is not None:
            self._bar.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.live.stop()

    def due(self) -> bool:
        """Whether it is time to show a state; costs one clock read."""
        return self._clock() >= self._next

    def show(self, state: ProgressState, *, final: bool = False) -> None:
        """Draw a state. Rates cover the time since the last one; the whole run when final."""
        now = self._clock()
        since, before = (self._started, ProgressState(examples=0)) if final else self._last
        figures = _figures(state, before, max(now - since, 1e-9))
        self._last = (now, state)
        self._next = now + self._interval_s
        if self._bar is not None:
            self._bar.draw(state.examples, figures)
        else:
            done = human_count(state.examples)
            if self._total:
                done += f" of {human_count(self._total)}"
            line = f"{self._title} {done} examples, {figures}, {now - self._started:.0f} s"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)


class _Bar:
    """Two lines on a terminal: the bar, and the figures below it, drawn only when asked."""

    def __init__(self, console: Console, title: str, total: int | None) -> None:
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn

        self._bar = Progress(
            "{task.description}", BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
        )
        self._task = self._bar.add_task(title, total=total)
        self.live = Live(console=console, auto_refresh=False)

    def draw(self, completed: int, figures: str) -> None:
        from rich.console import Group
        from rich.text import Text

        self._bar.update(self._task, completed=completed)
        self.live.update(Group(self._bar.get_renderable(), Text("  " + figures)), refresh=True)


def _figures(state: ProgressState, before: ProgressState, elapsed_s: float) -> str:
    parts = [f"{human_count((state.examples - before.examples) / elapsed_s)} examples/s"]
    if state.ids:
        parts.append(f"{human_count((state.ids - before.ids) / elapsed_s)} ids/s")
    if state.loss is not None:
        parts.append(f"loss {state.loss:.4f}")
    if state.auc is not None and math.isfinite(state.auc):
        parts.append(f"AUC {state.auc:.4f}")
    if state.rows is not None:
        parts.append(f"{human_count(state.rows)} rows")
    if state.rows and state.row_bytes is not None:
        parts.append(f"{state.row_bytes / state.rows:.0f} B/row")
    if state.saving:
        parts.append(state.saving)
    return ", ".join(parts)


def human_count(count: float) -> str:
    """A count in three or four figures: 812, 12.3 k, 4.56 M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= size * 0.9995:
            scaled = count / size
            digits: Literal[0, 1, 2] = 0 if scaled >= 100 else 1 if scaled >= 10 else 2
            return f"{scaled:.{digits}f} {unit}"
    return f"{count:.0f}"


def human_bytes(count: float) -> str:
    """Bytes in binary units: 812 B, 1.5 KiB, 3.2 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
