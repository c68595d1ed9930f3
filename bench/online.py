"""AUC of a model that keeps learning against ones that are frozen, without servers.

    python bench/online.py [--stream clicks|flights|schedule ...] [--days N]

One model trains on what came before, then on the stream, 32 events at a time once their outcomes
are known. It scores each event before it learns from it ("live"), and those of a day, of a week
and of the whole stream when that begins ("daily", "weekly", "never"). Prints JSON: AUCs, what live
gains on each other one, and its 95 % bootstrap interval over events.

Learning rates on the stream are those before it times a factor: of 1, 0.3 and 0.1 the one with the
best live AUC on the first ten days of October, after January to September.

Flights: November after January to October; an outcome is known 15 minutes after the scheduled
arrival. Schedule: the same without what happened in the hours before a flight, which are inputs of
the others: ids, distance, time of the day and weather are left. Clicks: made up, half of the ids
new ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import yaml
from rich.console import Console

from shoal import config
from shoal.config.build import build_parts, open_data, source_inputs
from shoal.data import Batch, Loader, Source, Subset, SyntheticClicks, flights
from shoal.metrics import auc
from shoal.rules.schedules import Piecewise, as_rate
from shoal.train.learner import Learner
from shoal.train.ranks import ALONE

ROOT = Path(__file__).parents[1]
DAY_S, BATCH, BOOTSTRAPS, SEED = 86_400, 32, 500, 2013
BASE_CLICKS, CLICKS_A_DAY = 60_000, 2_000
FROZEN = {"daily": 1, "weekly": 7, "never": 1 << 30}  # days that a model is used
FACTORS = {"clicks": 1.0, "flights": 0.1, "schedule": 1.0}  # of learning rates on the stream
SCHEDULED = ("distance", "minute_of_day", *flights.WEATHER)  # the first dense columns
CLICKS = {
    "num_features": 8, "vocabulary": 1000, "fresh_share": 0.5, "fresh_per_example": 0.01,
    "num_dense": 2, "signal": 1.0,
}  # fmt: skip


def settings_of(stream: str) -> config.RunConfig:
    """The example's config, with constant rates and without batch normalisation."""
    settings = yaml.safe_load((ROOT / "examples" / "flights.yaml").read_text())
    settings["model"]["batch_norm"] = False
    settings["data"]["epochs"] = 1
    table = settings["tables"]["default"]
    table["optimizer"]["lr"] = table["bias"]["optimizer"]["lr"] = 0.05
    settings["dense_optimizer"]["lr"] = 0.0005
    if stream == "schedule":
        for name in ("history", "flight_history"):
            del settings["features"][name]
    if stream == "clicks":
        source = {"kind": "synthetic", "examples": BASE_CLICKS, "eval_examples": 1, **CLICKS}
        settings |= {"features": {}, "data": {"source": source, "batch_size": 256}}
    return config.from_mapping(settings)


class Events(NamedTuple):
    """Events in order of time, the day of each, when each comes and when its outcome is known."""

    source: Source
    day_N: torch.Tensor
    comes_N: torch.Tensor
    known_N: torch.Tensor


def events_of(stream: str, days: int) -> Events:
    """The events of some days."""
    if stream == "clicks":
        made = SyntheticClicks(examples=days * CLICKS_A_DAY, first=BASE_CLICKS, seed=SEED, **CLICKS)
        number_N = torch.arange(len(made))
        return Events(made, number_N // CLICKS_A_DAY, number_N, number_N + 14)  # 10 minutes
    every = flights.load()
    times_N = every.examples.times()
    end_s = flights.SPLIT_S + days * DAY_S
    rows_N = ((times_N >= flights.SPLIT_S) & (times_N < end_s)).nonzero().flatten()
    comes_N = times_N[rows_N]
    day_N = (comes_N - flights.SPLIT_S) // DAY_S
    return Events(Subset(every.examples, rows_N), day_N, comes_N, every.known_s[rows_N])


def shown_to(stream: str, batch: Batch) -> Batch:
    """A batch as the stream's model sees it."""
    if stream != "schedule" or batch.dense is None:
        return batch
    return replace(batch, dense=batch.dense[:, : len(SCHEDULED)].contiguous())


def scores_of(stream: str, days: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Scores of the live and the frozen models by name, and labels."""
    settings = settings_of(stream)
    torch.manual_seed(SEED)
    data = open_data(settings)
    source = source_inputs(settings.data.source)
    if stream == "schedule":
        source = replace(source, num_dense=len(SCHEDULED))
    parts = build_parts(settings, source=source)
    steps, factor = data.train.most_batches, FACTORS[stream]
    learner = Learner(
        parts,
        settings,
        ALONE,
        rate_of=lambda rate: Piecewise((steps,), (as_rate(rate, 0), factor * as_rate(rate, 0))),
    )
    for batch in data.train:
        learner.train_step([shown_to(stream, batch)])
    source, day_N, comes_N, known_N = events_of(stream, days)
    order_N = known_N.argsort(stable=True)

    def taken(rows_B: torch.Tensor) -> Batch:
        return shown_to(stream, source.take(rows_B))

    scores = {name: torch.zeros(len(day_N)) for name in ("live", *FROZEN)}
    learned, day = 0, -1
    for low in range(0, len(day_N), BATCH):
        rows_B = torch.arange(low, min(low + BATCH, len(day_N)))
        while learned + BATCH <= len(order_N):
            rows_K = order_N[learned : learned + BATCH]
            if known_N[rows_K[-1]] > comes_N[low]:
                break
            learner.train_step([taken(rows_K)])
            learned += BATCH
        for new in day_N[rows_B].unique().tolist():
            if new <= day:
                continue
            day = new
            for name, every in FROZEN.items():
                if day % every == 0:
                    rows_D = ((day_N >= day) & (day_N < day + every)).nonzero().flatten()
                    scores[name][rows_D] = learner.predict(taken(rows_D))
        scores["live"][rows_B] = learner.predict(taken(rows_B))
    return scores, next(iter(Loader(source, len(day_N), prefetch=0))).labels


def measured(stream: str, days: int) -> dict[str, object]:
    """AUCs, and what the live model gains."""
    scores, labels = scores_of(stream, days)
    aucs = {name: auc(own, labels) for name, own in scores.items()}
    generator = torch.Generator().manual_seed(SEED)
    gains: dict[str, list[float]] = {name: [] for name in FROZEN}
    for _ in range(BOOTSTRAPS):
        rows = torch.randint(len(labels), (len(labels),), generator=generator)
        live = auc(scores["live"][rows], labels[rows])
        for name, found in gains.items():
            found.append(live - auc(scores[name][rows], labels[rows]))
    return {
        "events": len(labels), "days": days, **aucs,
        **{
            f"gain on {name}": [aucs["live"] - aucs[name], *np.quantile(found, (0.025, 0.975))]
            for name, found in gains.items()
        },
    }  # fmt: skip


def main() -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--stream", choices=("clicks", "flights", "schedule"), nargs="+", default=["clicks"]
    )
    parser.add_argument("--days", type=int, default=10)
    arguments = parser.parse_args()
    for stream in arguments.stream:
        found = measured(stream, arguments.days)
        Console().print_json(json.dumps({"stream": stream, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
