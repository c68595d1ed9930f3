"""Prediction quality of the quickstart's model and of gradient-boosted trees, on the same flights.

    .venv-peers/bin/python bench/quality_flights.py --json out.json

Needs both `shoal` and `lightgbm`: use the baselines' venv that `make bench` builds.
Trees and model see the same examples and the same inputs, all known at scheduled departure. Ids
are LightGBM's categorical columns. A list of earlier flights cannot be a column, so trees get the
history as summaries: counts and late rates ("counts and rates"), or all summaries of our model's
dense columns, including delays in minutes ("all inputs").

Every tree setting is tuned on January to August against September and October (number of trees;
with or without the calendar day, which no tree can use later), refitted on January to October and
scored on November and December. The baseline is the best setting in September and October.

Our figure is the AUC of a run of examples/flights.yaml: `--shoal RUN_DIR` names a finished one,
otherwise one is started here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness import Case, Measured, as_row, red_rows, table_lines, write_json
from shoal.data import flights
from shoal.metrics import auc

__all__ = ["main"]

ROOT = Path(__file__).parents[1]
PACKAGES = ("shoal", "lightgbm", "torch", "numpy", "pyarrow")
BASE = {"objective": "binary", "metric": "auc", "num_leaves": 31, "verbose": -1, "seed": 1}
CAREFUL = {
    "learning_rate": 0.03,
    "min_data_in_leaf": 200,
    "cat_smooth": 50,
    "cat_l2": 50,
    "feature_fraction": 0.5,
    "bagging_fraction": 0.7,
    "bagging_freq": 1,
}
COUNTS_AND_RATES = ("_count", "_late_rate")
PLAIN = ("distance", "minute_of_day", *flights.WEATHER)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A way to train trees; `trees` None stops early."""

    name: str
    params: Mapping[str, Any]
    trees: int | None = None


SETTINGS = (
    Setting(name="300 trees", params={"learning_rate": 0.1}, trees=300),
    Setting(name="stopped early", params={"learning_rate": 0.05}),
    Setting(name="regularised, stopped early", params=CAREFUL),
)


@dataclass(frozen=True)
class Fit:
    """One tree model's figures."""

    inputs: str
    setting: str
    trees: int
    tuning_auc: float
    auc: float


class Columns:
    """The examples as columns of numbers, and the months that each side takes."""

    def __init__(self, loaded: flights.Flights, *, quick: bool) -> None:
        table = loaded.table
        month = table["month_day"].to_numpy() // 100
        self.labels = table["late"].to_numpy()
        # A quick run trains on May to October, tunes on the same two months.
        first = 5 if quick else 1
        self.tune_fit = (month >= first) & (month <= 8)
        self.tune = (month == 9) | (month == 10)
        self.fit = self.tune_fit | self.tune
        self.evaluate = month >= 11
        self.ids: dict[str, np.ndarray] = {}
        for feature in flights.RECIPE.ids:
            if not feature.is_list:
                parts = [_codes(table[name]) for name in feature.columns]
                self.ids[feature.name] = _crossed(parts)
        self.dense = {
            name: table[name].to_numpy(zero_copy_only=False).astype(np.float64)
            for name in flights.DENSE
        }


def _codes(column: Any) -> np.ndarray:
    return column.combine_chunks().dictionary_encode().indices.to_numpy().astype(np.int64)


def _crossed(parts: Sequence[np.ndarray]) -> np.ndarray:
    crossed = parts[0]
    for part in parts[1:]:
        crossed = crossed * (int(part.max()) + 1) + part
    return np.unique(crossed, return_inverse=True)[1]


def fit_trees(columns: Columns, inputs: str, ids: Sequence[str], setting: Setting) -> Fit:
    """Tune, refit and score one setting."""
    lightgbm = _lightgbm()
    dense = [name for name in flights.DENSE if inputs == "all inputs" or _is_plain_enough(name)]
    values = np.column_stack(
        [columns.ids[name] for name in ids] + [columns.dense[name] for name in dense]
    )
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    params = {**BASE, **setting.params, "num_threads": threads}

    def data(rows: np.ndarray) -> Any:
        names = [*ids, *dense]
        return lightgbm.Dataset(
            values[rows], columns.labels[rows], feature_name=names, categorical_feature=list(ids)
        )

    def score(model: Any, rows: np.ndarray) -> float:
        predicted = torch.from_numpy(model.predict(values[rows]))
        return float(auc(predicted, torch.from_numpy(columns.labels[rows])))

    train = data(columns.tune_fit)
    stop = [] if setting.trees else [lightgbm.early_stopping(60, verbose=False)]
    tuned = lightgbm.train(
        params,
        train,
        setting.trees or 2000,
        valid_sets=[train.create_valid(values[columns.tune], columns.labels[columns.tune])],
        callbacks=stop,
    )
    trees = setting.trees or tuned.best_iteration
    final = lightgbm.train(params, data(columns.fit), trees)
    day = "with the day" if "month_day" in ids else "without the day"
    return Fit(
        inputs,
        f"{setting.name}, {day}",
        trees,
        score(tuned, columns.tune),
        score(final, columns.evaluate),
    )


def _is_plain_enough(name: str) -> bool:
    return name in PLAIN or name.endswith(COUNTS_AND_RATES)


def _lightgbm() -> Any:
    try:
        import lightgbm
    except ImportError:
        raise SystemExit(
            "lightgbm is not installed here; `make bench` builds .venv-peers with it, or "
            "pip install lightgbm"
        ) from None
    return lightgbm


def logistic(loaded: flights.Flights, columns: Columns) -> float:
    """AUC of logistic regression in plain torch: a weight per id and per dense column."""
    torch.manual_seed(0)
    codes, rows = [], 0
    for own in columns.ids.values():
        codes.append(own + rows)
        rows += int(own.max()) + 1
    ids_NF = torch.from_numpy(np.stack(codes, axis=1))
    dense_ND = loaded.examples.take(torch.arange(len(loaded.examples))).dense
    labels_N = torch.from_numpy(columns.labels)
    weights = torch.nn.EmbeddingBag(rows, 1, mode="sum")
    torch.nn.init.zeros_(weights.weight)
    linear = torch.nn.Linear(dense_ND.shape[1], 1)
    parameters = [*weights.parameters(), *linear.parameters()]
    optimizer = torch.optim.Adagrad(parameters, lr=0.05, initial_accumulator_value=0.1)
    for batch in torch.from_numpy(np.flatnonzero(columns.fit)).split(512):
        logits = (weights(ids_NF[batch]) + linear(dense_ND[batch])).squeeze(1)
        optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(logits, labels_N[batch]).backward()
        optimizer.step()
    held = torch.from_numpy(np.flatnonzero(columns.evaluate))
    with torch.inference_mode():
        logits = (weights(ids_NF[held]) + linear(dense_ND[held])).squeeze(1)
    return float(auc(logits.sigmoid(), labels_N[held]))


def our_auc(folder: Path | None, *, quick: bool) -> tuple[float, float | None]:
    """AUC of our model and of its logistic baseline, from a finished run or from a new one."""
    if folder is not None:
        models = json.loads((folder / "metrics.json").read_text())["models"]
        ours = next(name for name in models if name not in ("base_rate", "logistic"))
        return models[ours]["auc"], models.get("logistic", {}).get("auc")
    with tempfile.TemporaryDirectory(prefix="flights-") as runs:
        command = [sys.executable, "-m", "shoal.cli", "train", "examples/flights.yaml"]
        command += [f"output.dir={runs}", *(["data.epochs=1"] if quick else [])]
        subprocess.run(command, cwd=ROOT, check=True)
        (made,) = Path(runs).iterdir()
        return our_auc(made, quick=quick)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--quick", action="store_true", help="less data: shows that it runs")
    parser.add_argument("--shoal", type=Path, metavar="RUN_DIR", help="a finished run of ours")
    parser.add_argument("--trees-only", action="store_true", help="do not train ours")
    args = parser.parse_args()
    _lightgbm()
    loaded = flights.load()
    columns = Columns(loaded, quick=args.quick)
    print(f"{int(columns.fit.sum())} flights to train, {int(columns.evaluate.sum())} to evaluate")
    held = columns.labels[columns.evaluate]
    base = float(columns.labels[columns.fit].mean())
    print(f"base rate {base:.4f} in training, {held.mean():.4f} in evaluation: AUC 0.5")
    regression = logistic(loaded, columns)
    print(f"logistic regression: AUC {regression:.4f}")

    every = tuple(columns.ids)
    fits = []
    for inputs in ("counts and rates", "all inputs"):
        for ids in (every, tuple(name for name in every if name != "month_day")):
            for setting in SETTINGS[:1] if args.quick else SETTINGS:
                fit = fit_trees(columns, inputs, ids, setting)
                fits.append(fit)
                print(
                    f"LightGBM, {fit.inputs}, {fit.setting}: {fit.trees} trees, AUC "
                    f"{fit.tuning_auc:.4f} in September and October, {fit.auc:.4f} in evaluation",
                    flush=True,
                )
    ours = None if args.trees_only else our_auc(args.shoal, quick=args.quick)[0]
    rows = _rows(fits, regression, ours)
    print("\n".join(table_lines(rows)))
    if red := red_rows(rows):
        print("red: " + ", ".join(red))
    if args.json is not None:
        write_json(args.json, rows, PACKAGES)


def _rows(fits: Sequence[Fit], regression: float, ours: float | None) -> list[dict[str, Any]]:
    rows = []
    for inputs in ("counts and rates", "all inputs"):
        best = max((fit for fit in fits if fit.inputs == inputs), key=lambda fit: fit.tuning_auc)
        case = Case(
            name=f"flights, trees with history as {inputs}"
            if inputs == "counts and rates"
            else f"flights, trees with {inputs}",
            unit="AUC",
            peer=f"LightGBM, {best.setting}",
            bar=1.0,
        )
        rows.append(as_row(case, Measured(ours=ours, peer_value=best.auc)))
    for fit in fits:
        case = Case(
            name=f"flights, trees, {fit.inputs}, {fit.setting}",
            unit="AUC",
            peer=f"LightGBM, {fit.trees} trees",
        )
        rows.append(as_row(case, Measured(ours=ours, peer_value=fit.auc)))
    for peer, value in (("logistic regression", regression), ("base rate", 0.5)):
        case = Case(name=f"flights, {peer}", unit="AUC", peer=peer)
        rows.append(as_row(case, Measured(ours=ours, peer_value=value)))
    return rows


if __name__ == "__main__":
    main()
