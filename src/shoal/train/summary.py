"""What a finished run amounts to: its result, the table at the end, the charts of its report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from shoal.config import RunConfig, to_yaml
from shoal.metrics import BinaryResult
from shoal.report import Chart, RunReport, Series
from shoal.telemetry import human_bytes, human_count
from shoal.train.recorder import Curves

__all__ = [
    "BASE_RATE",
    "RunResult",
    "base_rate_figures",
    "build_report",
    "closing_line",
    "figures",
    "metric_table",
    "table_title",
]

BASE_RATE = "base_rate"
_GROWTH_TABLES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """A finished run.

    Args:
        folder, report: paths of the run folder and of the HTML report in it.
        metrics: model -> metric -> value, the run's model first.
        rows: rows of each of the model's tables.
        bytes_total: resident bytes of these tables.
        examples, ids, steps: what training went through.
        train_s: seconds of training, evaluation not counted.
    """

    folder: Path
    report: Path
    metrics: Mapping[str, Mapping[str, float]]
    rows: Mapping[str, int]
    bytes_total: int
    examples: int
    ids: int
    steps: int
    train_s: float

    @property
    def total_rows(self) -> int:
        """Rows in all tables."""
        return sum(self.rows.values())

    def as_json(self) -> dict[str, Any]:
        """The content of metrics.json."""
        return {
            "models": {name: dict(sheet) for name, sheet in self.metrics.items()},
            "rows": self.total_rows,
            "rows_by_table": dict(self.rows),
            "bytes_per_row": self.bytes_total / self.total_rows if self.total_rows else math.nan,
            "train_examples": self.examples,
            "train_ids": self.ids,
            "steps": self.steps,
            "train_s": self.train_s,
            "examples_per_s": self.examples / self.train_s,
            "ids_per_s": self.ids / self.train_s,
        }


def figures(result: BinaryResult) -> dict[str, float]:
    """The figures of an evaluation under the names of metrics.json."""
    return {
        "auc": result.auc,
        "log_loss": result.log_loss,
        "ne": result.normalized_entropy,
        "calibration": result.calibration,
        "mean_prediction": result.mean_prediction,
        "mean_label": result.mean_label,
        "examples": result.examples,
    }


def base_rate_figures(base_rate: float, result: BinaryResult) -> dict[str, float]:
    """Figures of always predicting the training examples' mean label.

    Args:
        base_rate: mean label of the training examples.
        result: any model's evaluation; only its labels matter.
    """
    rate, label = min(max(base_rate, 1e-7), 1 - 1e-7), result.mean_label
    loss = -label * math.log(rate) - (1 - label) * math.log1p(-rate)
    entropy = result.log_loss / result.normalized_entropy
    return {
        "auc": 0.5,
        "log_loss": loss,
        "ne": loss / entropy,
        "calibration": base_rate / label if label else math.nan,
        "mean_prediction": base_rate,
        "mean_label": label,
        "examples": result.examples,
    }


def metric_table(metrics: Mapping[str, Mapping[str, float]], title: str) -> Table:
    """The table a person sees at the end; the first model is the run's own."""
    shown = {"auc": "AUC", "log_loss": "log loss", "ne": "NE", "calibration": "calibration"}
    table = Table(title=title, title_justify="left")
    table.add_column("model")
    for heading in shown.values():
        table.add_column(heading, justify="right")
    for index, (name, sheet) in enumerate(metrics.items()):
        cells = [f"{sheet[key]:.4f}" for key in shown]
        table.add_row(name.replace("_", " "), *cells, style="bold" if index == 0 else None)
    return table


def table_title(judged: Mapping[str, BinaryResult]) -> str:
    """How many examples the table is about."""
    return f"on {next(iter(judged.values())).examples:,} evaluation examples"


def closing_line(result: RunResult) -> str:
    """Table growth and speed of a run in one line."""
    rows = result.total_rows
    size = f"{result.bytes_total / rows:.0f} bytes a row, " if rows else ""
    return (
        f"{human_count(rows)} rows in {len(result.rows)} tables, {size}"
        f"{human_count(result.ids / result.train_s)} ids/s, "
        f"{human_count(result.examples / result.train_s)} examples/s"
    )


def build_report(
    config: RunConfig, result: RunResult, curves: Curves, judged: Mapping[str, BinaryResult]
) -> RunReport:
    """The report of a run."""
    main = next(iter(result.metrics))
    examples = next(iter(judged.values())).examples
    source = config.data.source.kind
    facts = {
        "training examples": human_count(result.examples),
        "examples a second": human_count(result.examples / result.train_s),
        "ids a second": human_count(result.ids / result.train_s),
        "rows in tables": human_count(result.total_rows),
        "bytes in tables": human_bytes(result.bytes_total),
        "training time": f"{result.train_s:.1f} s",
    }
    return RunReport(
        title=config.name,
        subtitle=f"{main} on {source}, judged on {examples:,} evaluation examples",
        metrics=result.metrics,
        facts=facts,
        charts=(_loss(curves), _auc(curves), _growth(curves), _calibration(judged)),
        config=to_yaml(config),
    )


def _loss(curves: Curves) -> Chart:
    return Chart(
        title="Loss of each batch before training on it",
        x_label="examples",
        y_label="log loss",
        series=_by_model(curves, curves.loss),
    )


def _auc(curves: Curves) -> Chart:
    return Chart(
        title="AUC so far, each batch judged before training on it",
        x_label="examples",
        y_label="AUC",
        series=_by_model(curves, curves.auc),
    )


def _by_model(curves: Curves, values: Mapping[str, list[float]]) -> tuple[Series, ...]:
    x = tuple(map(float, curves.examples))
    return tuple(Series(name=name, x=x, y=tuple(y)) for name, y in values.items())


def _growth(curves: Curves) -> Chart:
    x = tuple(map(float, curves.examples))
    largest = sorted(curves.rows, key=lambda table: curves.rows[table][-1], reverse=True)
    total = tuple(float(sum(counts)) for counts in zip(*curves.rows.values(), strict=True))
    lines = [Series(name="all tables", x=x, y=total)] if len(largest) > 1 else []
    lines += [
        Series(name=table, x=x, y=tuple(map(float, curves.rows[table])))
        for table in largest[:_GROWTH_TABLES]
    ]
    return Chart(
        title="Rows in the largest tables",
        x_label="examples",
        y_label="rows",
        series=tuple(lines),
        y_from_zero=True,
    )


def _calibration(judged: Mapping[str, BinaryResult]) -> Chart:
    lines: list[Series] = []
    reach = 0.0
    for name, result in judged.items():
        full = [part for part in result.bins if part.weight > 0]
        heaviest = max(part.weight for part in full)
        reach = max(reach, *(part.mean_prediction for part in full))
        lines.append(
            Series(
                name=name,
                x=tuple(part.mean_prediction for part in full),
                y=tuple(part.mean_label for part in full),
                sizes=tuple(part.weight / heaviest for part in full),
            )
        )
    diagonal = Series(name="perfect", x=(0.0, reach), y=(0.0, reach), faint=True)
    return Chart(
        title="Calibration: what was predicted, what happened",
        x_label="mean prediction",
        y_label="share of positives",
        series=(diagonal, *lines),
        y_from_zero=True,
    )
