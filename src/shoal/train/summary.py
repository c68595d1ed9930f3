"""What is remembered of a run: running metrics, curves, its result and its report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from shoal.config import RunConfig, to_yaml
from shoal.data import Batch
from shoal.errors import InputError
from shoal.metrics import BinaryMetrics, BinaryResult
from shoal.report import Chart, Series, render
from shoal.telemetry import human_bytes, human_count
from shoal.train.ranks import ALONE, Ranks

_TOGETHER = 1 << 18  # examples that wait for their sums, at most


@dataclass(slots=True)
class Curves:
    """Points of a run, one per entry of `examples`; by model or by table.

    `loss` is the mean since the previous point, `auc` is that of all examples so far.
    """

    examples: list[int] = field(default_factory=list)
    loss: dict[str, list[float]] = field(default_factory=dict)
    auc: dict[str, list[float]] = field(default_factory=dict)
    rows: dict[str, list[int]] = field(default_factory=dict)


class Recorder:
    """Gathers logits of named outputs batch by batch; `point` turns them into figures.

    `columns`: of each output's label.

    Over several ranks a point is a collective call, the only one: what happened on all ranks is
    added up there, and figures between points are those of the last.

    Attributes:
        examples: of this rank so far.
        total_examples, total_ids, row_bytes: over all ranks, at the last point.
    """

    def __init__(self, columns: Mapping[str, int], ranks: Ranks = ALONE) -> None:
        self._columns = names = dict(columns)
        self.curves = Curves()
        self._ranks = ranks
        self._pending: dict[str, list[Tensor]] = {name: [] for name in names}
        self._labels: list[Tensor] = []
        self._weights: list[Tensor | None] = []
        self._waiting = 0  # examples of these
        self._metrics = {name: BinaryMetrics(exact_auc=False) for name in names}
        self._shown = self._metrics
        self._loss_sum = dict.fromkeys(names, 0.0)
        self._weight_sum = 0.0
        self._loss = dict.fromkeys(names, math.nan)
        self.examples = self.ids = 0
        self.total_examples = self.total_ids = self.row_bytes = 0

    def add(self, window: Sequence[Batch], logits: Mapping[str, Sequence[Tensor]]) -> None:
        """Remember the batches of a step and what each model predicted.

        Raises:
            InputError: a prediction is not a number: the model has diverged.
        """
        for name, per_batch in logits.items():
            self._pending[name] += per_batch
        for batch in window:
            self._labels.append(batch.labels_BT)
            self._weights.append(batch.weights)
            self._waiting += batch.labels.numel()
            self.examples += batch.labels.numel()
            self.ids += batch.ids.values_N.numel()
        if self._waiting >= _TOGETHER:
            self._drain()

    def figures(self) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """Per model the loss since the last point (or that point's) and the AUC so far.

        It may be asked at any time: no figure to come depends on it.

        Raises:
            InputError: a prediction is not a number: the model has diverged.
        """
        now = self
        if not self._ranks.many:
            now = self._settled() if self._labels else self
            now._set_loss(now._loss_sum, now._weight_sum)
        return now._loss, {name: metrics.running_auc() for name, metrics in now._shown.items()}

    def _set_loss(self, loss_sum: Mapping[str, float], weight_sum: float) -> None:
        if weight_sum:
            self._loss = {name: total / weight_sum for name, total in loss_sum.items()}

    def _drain(self) -> None:
        labels_BT = _together(self._labels)
        weights_B = _joined(self._labels, self._weights)
        weight = float(len(labels_BT) if weights_B is None else weights_B.sum())
        for name, logits in self._pending.items():
            labels_B = labels_BT[:, self._columns[name]]
            probabilities_B = _together(logits).sigmoid()
            logits.clear()
            if not probabilities_B.numel():  # this rank's shares were empty
                continue
            if not bool(probabilities_B.isfinite().all()):
                raise InputError(
                    f"predictions of {name!r} after {self.examples} examples",
                    got="NaN or infinity",
                    allowed="finite numbers",
                    remedy="Lower the learning rates, or set clip_norm.",
                )
            self._loss_sum[name] += self._metrics[name].update(probabilities_B, labels_B, weights_B)
        self._weight_sum += weight
        self._labels.clear()
        self._weights.clear()
        self._waiting = 0

    def point(
        self, rows: Mapping[str, int], row_bytes: int, more: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Add a point to the curves; returns it as scalars for the logs.

        Args:
            rows: of this rank that count, by table.
            row_bytes: of all tables of this rank.
            more: further scalars of this rank; over several ranks their means are logged.
        """
        if self._labels:
            self._drain()
        rows, more = self._over_ranks(dict(rows), row_bytes, dict(more or {}))
        loss, auc = self.figures()
        self._loss_sum = dict.fromkeys(self._loss_sum, 0.0)
        self._weight_sum = 0.0
        self.curves.examples.append(self.total_examples)
        for name in self._pending:
            self.curves.loss.setdefault(name, []).append(loss[name])
            self.curves.auc.setdefault(name, []).append(auc[name])
        for table, count in rows.items():
            self.curves.rows.setdefault(table, []).append(count)
        scalars = {"examples": float(self.total_examples)}
        for name in self._pending:
            scalars |= {f"loss/{name}": loss[name], f"auc/{name}": auc[name]}
        return scalars | {f"rows/{table}": float(count) for table, count in rows.items()} | more

    def _over_ranks(
        self, rows: dict[str, int], row_bytes: int, more: dict[str, float]
    ) -> tuple[dict[str, int], dict[str, float]]:
        """Make totals and shown figures those of all ranks; rows and further scalars, too."""
        if not self._ranks.many:
            self.total_examples, self.total_ids, self.row_bytes = self.examples, self.ids, row_bytes
            return rows, more
        numbers = torch.tensor(
            [row_bytes, *rows.values(), *more.values()], dtype=torch.float64, device="cpu"
        )
        summed = self._ranks.total(torch.cat([numbers, self._sums()]), what="metrics of a point")
        (all_bytes, *found), sums = summed[: len(numbers)].tolist(), summed[len(numbers) :]
        every = Recorder(self._columns)
        every._set_sums(sums)
        self.total_examples, self.total_ids = every.examples, every.ids
        self.row_bytes, self._shown = int(all_bytes), every._metrics
        self._set_loss(every._loss_sum, every._weight_sum)
        counts = [int(n) for n in found[: len(rows)]]
        means = [n / self._ranks.world_size for n in found[len(rows) :]]
        return dict(zip(rows, counts, strict=True)), dict(zip(more, means, strict=True))

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What it has gathered, as (that of all ranks, this rank's own part).

        Tensors, numbers, lists and dicts. What steps appended stays as it is: where sums are made
        changes their last bits. Over several ranks a collective call.
        """
        labels = _together(self._labels).cpu() if self._labels else torch.empty(0, device="cpu")
        weights = _joined(self._labels, self._weights)
        own = {
            "pending": {name: _together(every).cpu() for name, every in self._pending.items()}
            if self._labels
            else {},
            "labels": labels,
            "weights": None if weights is None else weights.cpu(),
            "sums": self._sums(),
        }
        sums = self._ranks.total(self._settled()._sums(), what="metrics to save")
        shown = {name: metrics.totals() for name, metrics in self._shown.items()}
        totals = (self.total_examples, self.total_ids, self.row_bytes)
        whole = {
            "sums": sums,
            "curves": asdict(self.curves),
            "shown": shown,
            "loss": dict(self._loss),
            "totals": totals,
        }
        return whole, own

    def load_state(self, whole: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Continue from what `state` returned.

        Args:
            whole: that of all ranks.
            own: this rank's part; None where there were other ranks: then rank 0 takes it all.
        """
        self.curves = Curves(**deepcopy(whole["curves"]))
        self.total_examples, self.total_ids, self.row_bytes = whole["totals"]
        self._loss = dict(whole["loss"])
        mine = whole if own is None else own
        nothing = own is None and not self._ranks.leads
        self._set_sums(torch.zeros_like(mine["sums"]) if nothing else mine["sums"])
        if self._ranks.many:
            self._shown = {n: BinaryMetrics.of_totals(part) for n, part in whole["shown"].items()}
        if own is not None and own["labels"].numel():
            for name, logits in own["pending"].items():
                self._pending[name] = [logits]
            labels = own["labels"]
            # Before there were several labels they were [N].
            self._labels = [labels if labels.ndim == 2 else labels.unsqueeze(1)]
            self._weights, self._waiting = [own["weights"]], len(labels)

    def _sums(self) -> Tensor:
        """float64: examples, ids, weight, the loss sums, then the totals of each metric."""
        head = [self.examples, self.ids, self._weight_sum, *self._loss_sum.values()]
        every = [metrics.totals() for metrics in self._metrics.values()]
        return torch.cat([torch.tensor(head, dtype=torch.float64, device="cpu"), *every])

    def _set_sums(self, sums: Tensor) -> None:
        names = list(self._metrics)
        head = sums[: 3 + len(names)].tolist()
        self.examples, self.ids, self._weight_sum = int(head[0]), int(head[1]), head[2]
        self._loss_sum = dict(zip(names, head[3:], strict=True))
        parts = sums[3 + len(names) :].chunk(len(names))
        self._metrics = {n: BinaryMetrics.of_totals(p) for n, p in zip(names, parts, strict=True)}
        self._shown = self._metrics

    def _settled(self) -> Recorder:
        """A copy that has made all sums."""
        copy = Recorder(self._columns, self._ranks)
        copy._set_sums(self._sums())
        copy._loss = dict(self._loss)
        if self._labels:
            copy._pending = {name: list(every) for name, every in self._pending.items()}
            copy._labels, copy._weights = list(self._labels), list(self._weights)
            copy._drain()
        return copy

    @property
    def base_rate(self) -> float:
        """Weighted mean label of all examples so far; over several ranks, at the last point."""
        if self._labels and not self._ranks.many:
            self._drain()
        return next(iter(self._shown.values())).compute().mean_label


def _together(parts: Sequence[Tensor]) -> Tensor:
    """As one, on the device of the last: what was loaded may lie elsewhere."""
    return torch.cat([part.to(parts[-1].device) for part in parts])


def _joined(labels: Sequence[Tensor], weights: Sequence[Tensor | None]) -> Tensor | None:
    if all(weight is None for weight in weights):
        return None
    pairs = zip(labels, weights, strict=True)
    return _together([torch.ones_like(y[:, 0]) if w is None else w for y, w in pairs])


BASE_RATE = "base_rate"
SHOWN = {
    "auc": "AUC",
    "gauc": "GAUC",
    "log_loss": "log loss",
    "ne": "NE",
    "calibration": "calibration",
}
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
    grouped = {} if result.grouped is None else {"gauc": result.grouped.auc}
    return {
        "auc": result.auc,
        **grouped,
        "log_loss": result.log_loss,
        "ne": result.normalized_entropy,
        "calibration": result.calibration,
        "mean_prediction": result.mean_prediction,
        "mean_label": result.mean_label,
        "examples": result.examples,
        **(result.ranking or {}),
    }


def shown(sheet: Mapping[str, float]) -> dict[str, float]:
    """Those of the figures that are shown and logged."""
    ranking = {name: value for name, value in sheet.items() if "@" in name}
    return {name: sheet[name] for name in SHOWN if name in sheet} | ranking


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
        "auc": math.nan if math.isnan(result.auc) else 0.5,
        "log_loss": loss,
        "ne": loss / entropy,
        "calibration": base_rate / label if label else math.nan,
        "mean_prediction": base_rate,
        "mean_label": label,
        "examples": result.examples,
    }


def metric_table(metrics: Mapping[str, Mapping[str, float]], title: str) -> Table:
    """The table a person sees at the end; the first model is the run's own."""
    first = next(iter(metrics.values()))
    names = list(shown(first))
    table = Table(title=title, title_justify="left")
    table.add_column("model")
    for name in names:
        table.add_column(SHOWN.get(name, name.replace("_", " ")), justify="right")
    for index, (name, sheet) in enumerate(metrics.items()):
        cells = [f"{sheet[key]:.4f}" if key in sheet else "" for key in names]
        table.add_row(name.replace("_", " "), *cells, style="bold" if index == 0 else None)
    return table


def closing_line(result: RunResult) -> str:
    """Table growth and speed of a run in one line."""
    rows = result.total_rows
    size = f"{result.bytes_total / rows:.0f} bytes a row, " if rows else ""
    return (
        f"{human_count(rows)} rows in {len(result.rows)} tables, {size}"
        f"{human_count(result.ids / result.train_s)} ids/s, "
        f"{human_count(result.examples / result.train_s)} examples/s"
    )


def report_of(
    config: RunConfig, result: RunResult, curves: Curves, results: Mapping[str, BinaryResult]
) -> str:
    """The report of a run, as HTML."""
    main = next(iter(result.metrics))
    examples = next(iter(results.values())).examples
    source = config.data.source.kind
    facts = {
        "training examples": human_count(result.examples),
        "examples a second": human_count(result.examples / result.train_s),
        "ids a second": human_count(result.ids / result.train_s),
        "rows in tables": human_count(result.total_rows),
        "bytes in tables": human_bytes(result.bytes_total),
        "training time": f"{result.train_s:.1f} s",
    }
    return render(
        title=config.name,
        subtitle=f"{main} on {source}, evaluated on {examples:,} evaluation examples",
        metrics=result.metrics,
        facts=facts,
        charts=(
            Chart(
                title="Loss of each batch before training on it",
                x_label="examples",
                y_label="log loss",
                series=_by_model(curves, curves.loss),
            ),
            Chart(
                title="AUC so far, each batch evaluated before training on it",
                x_label="examples",
                y_label="AUC",
                series=_by_model(curves, curves.auc),
            ),
            _growth(curves),
            _calibration(results),
        ),
        config=to_yaml(config),
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


def _calibration(results: Mapping[str, BinaryResult]) -> Chart:
    lines: list[Series] = []
    reach = 0.0
    for name, result in results.items():
        full = [part for part in result.bins if part.weight > 0]
        heaviest = max((part.weight for part in full), default=1.0)  # all weights may be 0
        reach = max([reach, *(part.mean_prediction for part in full)])
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
