"""Prediction quality of models on MovieLens-100K, next to torch-rechub's; and what hashing costs.

    .venv-peers/bin/python bench/quality_movielens.py --data DIR --json out.json

DIR has ml-100k.inter.gz, .item.gz and .user.gz, tab-separated with a header line. The label is a
rating of 4 or more; the last fifth of the ratings by time is evaluated on. Both sides have the same
inputs, embeddings of 16 columns, hidden layers 64 and 32 with batch normalisation, batches of 256,
Adam at 0.001, and as many epochs as did best (of 1 to 3, on the last tenth of the training ratings,
for each model and side on its own). A figure is the mean of the seeds; its note has the half-width
of a 95 % interval.

Hashed ids are users' and movies' alone: the id's hash modulo an eighth of their number.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from rich.console import Console

from harness import Case, Measured, add_json, as_row, conclude
from shoal import config, train
from shoal.metrics import auc

__all__ = ["main"]

PACKAGES = ("shoal", "torch-rechub", "torch")
IDS = ("user_id", "movie_id", "gender", "occupation", "zip_code", "age", "year")
HIDDEN, DIM, BATCH, EPOCHS = (64, 32), 16, 256, (1, 2, 3)
T_95 = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776}  # of the mean of so many seeds
MODELS: dict[str, dict[str, Any]] = {
    "deepfm": {"kind": "deepfm"},
    "dcn": {"kind": "dcn", "cross_layers": 3},
}


def read(path: Path) -> list[dict[str, str]]:
    """Rows of a file by column name, without the types in its header."""
    with gzip.open(path, "rt", encoding="utf-8") as text:
        rows = csv.reader(text, delimiter="\t", quoting=csv.QUOTE_NONE)
        names = [name.partition(":")[0] for name in next(rows)]
        return [dict(zip(names, row, strict=True)) for row in rows]


def ratings(folder: Path) -> pa.Table:
    """All ratings in order of time."""
    users = {row["user_id"]: row for row in read(folder / "ml-100k.user.gz")}
    items = {row["item_id"]: row for row in read(folder / "ml-100k.item.gz")}
    rows = sorted(read(folder / "ml-100k.inter.gz"), key=lambda row: float(row["timestamp"]))
    who, what = [users[row["user_id"]] for row in rows], [items[row["item_id"]] for row in rows]
    return pa.table(
        {
            "label": [int(float(row["rating"]) >= 4) for row in rows],
            "user_id": [int(row["user_id"]) for row in rows],
            "movie_id": [int(row["item_id"]) for row in rows],
            **{name: [one[name] for one in who] for name in ("gender", "occupation", "zip_code")},
            "age": [f"{int(one['age']) // 10}" for one in who],
            "year": [f"y{one['release_year'][:3]}" for one in what],
            "genres": [one["class"].split() for one in what],
        }
    )


def ours(
    folder: Path, sides: Sequence[Path], model: str, seed: int, epochs: int, hashed: bool
) -> float:
    """AUC of a run of shoal on (training, evaluation) files."""
    features: dict[str, Any] = {name: {"kind": "id"} for name in (*IDS, "genres")}
    if hashed:
        known = {"user_id": 943, "movie_id": 1682}
        for name, count in known.items():
            features[name]["ids"] = {"kind": "hash", "size": count // 8}
    run = config.from_mapping(
        {
            "name": "movielens",
            "seed": seed,
            "data": {
                "source": {
                    "kind": "parquet",
                    "paths": [str(sides[0])],
                    "eval_paths": [str(sides[1])],
                    "label": "label",
                    "features": features,
                },
                "batch_size": BATCH,
                "epochs": epochs,
                "shuffle": "always",
            },
            "tables": {"default": {"dim": DIM, "optimizer": {"kind": "adam", "lr": 0.001}}},
            "features": {**{name: {} for name in IDS}, "genres": {"combiner": "mean"}},
            "model": {**MODELS[model], "hidden": list(HIDDEN), "batch_norm": True},
            "baselines": [],
            "logging": {"tensorboard": False, "jsonl": False},
            "output": {"dir": str(folder), "save_model": False},
        }
    )
    result = train.run(run, console=Console(quiet=True))
    return next(iter(result.metrics.values()))["auc"]


class Coded:
    """Ratings as torch-rechub takes them: ids are numbers from 1, 0 is unknown or padding."""

    def __init__(self, table: pa.Table) -> None:
        self.label = torch.tensor(table["label"].to_pylist(), dtype=torch.float32)
        self.x: dict[str, torch.Tensor] = {}
        self.sizes: dict[str, int] = {}
        for name in IDS:
            known, codes = np.unique(table[name].to_numpy(), return_inverse=True)
            self.x[name], self.sizes[name] = torch.from_numpy(codes + 1), len(known) + 1
        lists = table["genres"].to_pylist()
        known = sorted({genre for own in lists for genre in own})
        width = max(map(len, lists))
        rows = [[known.index(g) + 1 for g in own] + [0] * (width - len(own)) for own in lists]
        self.x["genres"], self.sizes["genres"] = torch.tensor(rows), len(known) + 1

    def at(self, rows: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Some ratings."""
        return {name: values[rows] for name, values in self.x.items()}, self.label[rows]


def theirs(coded: Coded, first: int, last: int, model: str, seed: int) -> list[float]:
    """AUC of torch-rechub's model on ratings first..last after each epoch on those before."""
    from torch_rechub.basic.features import SequenceFeature, SparseFeature
    from torch_rechub.models.ranking import DCNv2, DeepFM

    torch.manual_seed(seed)
    features: list[Any] = [SparseFeature(name, coded.sizes[name], DIM) for name in IDS]
    features.append(SequenceFeature("genres", coded.sizes["genres"], DIM, "mean", padding_idx=0))
    layers = {"dims": list(HIDDEN), "activation": "relu", "dropout": 0.0}
    net: torch.nn.Module = (
        DeepFM(features, features, layers)
        if model == "deepfm"
        else DCNv2(features, 3, layers, use_low_rank_mixture=False)
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=0.001, weight_decay=1e-5)
    found = []
    for _ in EPOCHS:
        net.train()
        for rows in torch.randperm(first).split(BATCH):
            x, y = coded.at(rows)
            optimizer.zero_grad()
            torch.nn.functional.binary_cross_entropy(net(x), y).backward()
            optimizer.step()
        net.eval()
        with torch.no_grad():
            parts = [coded.at(rows) for rows in torch.arange(first, last).split(4096)]
            scores = torch.cat([net(x) for x, _ in parts])
        found.append(auc(scores, torch.cat([y for _, y in parts])))
    return found


def figure(values: Sequence[float]) -> tuple[float, str]:
    """Mean over seeds, and its interval."""
    if len(values) < 2:
        return values[0], "one seed"
    half = T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return statistics.fmean(values), f"+- {half:.4f} over {len(values)} seeds"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_json(parser, "quality_movielens")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="ml-100k.*.gz")
    parser.add_argument("--seeds", type=int, default=3, choices=(1, *T_95))
    parser.add_argument("--quick", action="store_true", help="one seed and one epoch")
    arguments = parser.parse_args()
    seeds = range(1 if arguments.quick else arguments.seeds)
    tries = EPOCHS[:1] if arguments.quick else EPOCHS
    torch.set_num_threads(1)
    table = ratings(arguments.data)
    test, tune = len(table) * 8 // 10, len(table) * 72 // 100
    coded, rows = Coded(table), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cuts = {"tune": (0, tune), "tuning": (tune, test), "fit": (0, test), "test": (test, None)}
        files = {side: folder / f"{side}.parquet" for side in cuts}
        for side, (first, last) in cuts.items():
            pq.write_table(table[first:last], files[side])
        shown: dict[tuple[str, bool], tuple[float, str]] = {}
        for model in MODELS:
            for hashed in (False, True):
                pair = [files["tune"], files["tuning"]]
                scores = {n: ours(folder, pair, model, 0, n, hashed) for n in tries}
                epochs = max(scores, key=scores.__getitem__)
                pair = [files["fit"], files["test"]]
                found = [ours(folder, pair, model, seed, epochs, hashed) for seed in seeds]
                shown[model, hashed] = figure(found)
            scores_E = theirs(coded, tune, test, model, 0)[: len(tries)]
            epochs = 1 + scores_E.index(max(scores_E))
            peers = [theirs(coded, test, len(table), model, seed)[epochs - 1] for seed in seeds]
            value, note = figure(peers)
            (own, spread), (hashed_value, hashed_spread) = shown[model, False], shown[model, True]
            measured = Measured(ours=own, peer_value=value, note=f"ours {spread}, theirs {note}")
            peer = {"deepfm": "torch-rechub DeepFM", "dcn": "torch-rechub DCNv2"}[model]
            case = Case(name=f"movielens, {model}", unit="AUC", peer=peer, bar=1.0)
            rows.append(as_row(case, measured))
            note = f"collisionless {spread}, hashed {hashed_spread}"
            case = Case(
                name=f"movielens, {model}, every id",
                unit="AUC",
                peer="ids hashed to an eighth",
                bar=1.0,
            )
            rows.append(as_row(case, Measured(ours=own, peer_value=hashed_value, note=note)))
    conclude(rows, arguments.json, PACKAGES)


if __name__ == "__main__":
    main()
