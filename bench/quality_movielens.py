"""Prediction quality of models on MovieLens-100K, next to torch-rechub's and deepctr-torch's; and
what hashing costs.

    .venv-peers/bin/python bench/quality_movielens.py --data DIR --json out.json

DIR has ml-100k.inter.gz, .item.gz and .user.gz, tab-separated with a header line. The label is a
rating of 4 or more; the last fifth of the ratings by time is evaluated on. All sides have the same
inputs, embeddings of 16 columns, hidden layers 64 and 32 with batch normalisation, batches of 256,
Adam at 0.001, and as many epochs as did best (of 1 to 3, on the last tenth of the training ratings,
for each model and side on its own); each peer has the weight decay of its own trainer. A figure is
the mean of the seeds; its note has the half-width of a 95 % interval. `curve` of a row has (low,
mean, high) after each epoch of ours and of the peer; `scripts/draw_movielens.py` draws it.

Hashed ids are users' and movies' alone: the id's hash modulo an eighth of their number.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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

PACKAGES = ("shoal", "torch-rechub", "deepctr-torch", "torch")
IDS = ("user_id", "movie_id", "gender", "occupation", "zip_code", "age", "year")
HIDDEN, DIM, BATCH, EPOCHS = (64, 32), 16, 256, 3
T_95 = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776}  # of the mean of so many seeds
Curve = list[float]  # AUC after each epoch
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
) -> Curve:
    """AUC of a run of shoal on (training, evaluation) files after each epoch."""
    features: dict[str, Any] = {name: {"kind": "id"} for name in (*IDS, "genres")}
    if hashed:
        known = {"user_id": 943, "movie_id": 1682}
        for name, count in known.items():
            features[name]["ids"] = {"kind": "hash", "size": count // 8}
    steps = -(-pq.read_metadata(sides[0]).num_rows // BATCH)
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
            "eval": {"every_steps": steps},
            "logging": {"tensorboard": False},
            "output": {"dir": str(folder), "save_model": False},
        }
    )
    result = train.run(run, console=Console(quiet=True))
    lines = (result.folder / "logs" / "log.jsonl").read_text().splitlines()
    name = f"eval/auc/{model}"
    # The last epoch's is there twice: the run ends with an evaluation.
    found = {row["step"]: row[name] for row in map(json.loads, lines) if name in row}
    return [found[steps * (epoch + 1)] for epoch in range(epochs)]


class Coded:
    """Ratings as the peers take them: ids are numbers from 1, 0 is unknown or padding."""

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


def rechub(coded: Coded, model: str, seed: int) -> torch.nn.Module:
    """A model of torch-rechub: features by name -> probabilities."""
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
    return net


class DeepCtr(torch.nn.Module):
    """A model of deepctr-torch: features by name -> probabilities."""

    def __init__(self, coded: Coded, model: str, seed: int) -> None:
        from deepctr_torch.inputs import SparseFeat, VarLenSparseFeat
        from deepctr_torch.models import DCN, DeepFM

        super().__init__()
        columns: list[Any] = [SparseFeat(name, coded.sizes[name], DIM) for name in IDS]
        genres = SparseFeat("genres", coded.sizes["genres"], DIM)
        columns.append(VarLenSparseFeat(genres, maxlen=coded.x["genres"].shape[1], combiner="mean"))
        shared: dict[str, Any] = {"dnn_hidden_units": HIDDEN, "dnn_use_bn": True, "seed": seed}
        if model == "deepfm":
            self.net = DeepFM(columns, columns, **shared)
        else:
            self.net = DCN(columns, columns, 3, "matrix", **shared)

    def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
        """Probabilities [B]."""
        parts = [x[name].view(len(x[name]), -1) for name in self.net.feature_index]
        found: torch.Tensor = self.net(torch.cat(parts, 1).float()).squeeze(1)
        return found

    def penalty(self) -> torch.Tensor:
        """What its own trainer adds to the sum of losses of a batch."""
        found: torch.Tensor = self.net.get_regularization_loss().sum()
        return found


PEERS: dict[str, Callable[[Coded, str, int], torch.nn.Module]] = {
    "torch-rechub": rechub,
    "deepctr-torch": DeepCtr,
}


def theirs(
    peer: str, coded: Coded, ends: tuple[int, int], model: str, seed: int, epochs: int
) -> Curve:
    """AUC of a peer's model on ratings ends[0]..ends[1] after each epoch on those before."""
    first, last = ends
    net = PEERS[peer](coded, model, seed)
    penalised = isinstance(net, DeepCtr)
    decay = 0.0 if penalised else 1e-5
    optimizer = torch.optim.Adam(net.parameters(), lr=0.001, weight_decay=decay)
    found = []
    for _ in range(epochs):
        net.train()
        for rows in torch.randperm(first).split(BATCH):
            x, y = coded.at(rows)
            optimizer.zero_grad()
            reduction = "sum" if penalised else "mean"
            loss = torch.nn.functional.binary_cross_entropy(net(x), y, reduction=reduction)
            (loss + net.penalty() if isinstance(net, DeepCtr) else loss).backward()
            optimizer.step()
        net.eval()
        with torch.no_grad():
            parts = [coded.at(rows) for rows in torch.arange(first, last).split(4096)]
            scores = torch.cat([net(x) for x, _ in parts])
        found.append(auc(scores, torch.cat([y for _, y in parts])))
    return found


@dataclass(frozen=True)
class Found:
    """Curves of all seeds, and after how many epochs the tuning split was predicted best."""

    curves: list[Curve]
    epochs: int

    @property
    def band(self) -> list[tuple[float, float, float]]:
        """(low, mean, high) after each epoch."""
        return [interval(values) for values in zip(*self.curves, strict=True)]

    @property
    def mean(self) -> float:
        """AUC after `epochs`."""
        return self.band[self.epochs - 1][1]

    @property
    def note(self) -> str:
        """The interval of the mean."""
        _, mean, high = self.band[self.epochs - 1]
        return f"+- {high - mean:.4f} over {len(self.curves)} seeds, {self.epochs} epochs"


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(low, mean, high) of the mean of seeds, with 95 % confidence."""
    mean = statistics.fmean(values)
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    half = T_95.get(len(values), 0.0) * spread / len(values) ** 0.5
    return mean - half, mean, mean + half


def best(name: str, tuning: Curve, curves: Iterable[Curve]) -> Found:
    """Curves of seeds, with the epochs that did best in tuning; printed."""
    found = Found(list(curves), 1 + tuning.index(max(tuning)))
    print(f"{name}: tuning {tuning}, seeds {found.curves}", file=sys.stderr, flush=True)
    return found


def compared(name: str, peer: str, own: Found, other: Found) -> dict[str, Any]:
    """A row of the result."""
    note = f"ours {own.note}; {peer} {other.note}"
    measured = Measured(ours=own.mean, peer_value=other.mean, note=note)
    row = as_row(Case(name=name, unit="AUC", peer=peer, bar=1.0), measured)
    return {**row, "curve": {"ours": own.band, "peer": other.band}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_json(parser, "quality_movielens")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="ml-100k.*.gz")
    parser.add_argument("--seeds", type=int, default=3, choices=(1, *T_95))
    parser.add_argument("--quick", action="store_true", help="one seed and one epoch")
    arguments = parser.parse_args()
    seeds = range(1 if arguments.quick else arguments.seeds)
    epochs = 1 if arguments.quick else EPOCHS
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
        tuned, tested = (files["tune"], files["tuning"]), (files["fit"], files["test"])
        for model in MODELS:
            every, hashed = (
                best(
                    f"{model}, {hashes=}",
                    ours(folder, tuned, model, 0, epochs, hashes),
                    [ours(folder, tested, model, seed, epochs, hashes) for seed in seeds],
                )
                for hashes in (False, True)
            )
            for peer in PEERS:
                other = best(
                    f"{model}, {peer}",
                    theirs(peer, coded, (tune, test), model, 0, epochs),
                    [theirs(peer, coded, (test, len(table)), model, s, epochs) for s in seeds],
                )
                rows.append(compared(f"movielens, {model}, {peer}", peer, every, other))
            peer = "ids hashed to an eighth"
            rows.append(compared(f"movielens, {model}, every id", peer, every, hashed))
    conclude(rows, arguments.json, PACKAGES)


if __name__ == "__main__":
    main()
