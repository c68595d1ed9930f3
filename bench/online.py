"""AUC of a model that keeps learning against one that is frozen each midnight, without servers.

    python bench/online.py [--stream clicks|flights] [--days N]

One model trains on what came before, then on the stream, 32 events at a time once their outcomes
are known. It scores each event before it learns from it ("live"), and all events of a day when the
day begins ("daily"). Prints JSON: both AUCs, their difference and its 95 % bootstrap interval over
events. Flights: November after January to October. Clicks: made up, half of the ids new ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
import yaml
from rich.console import Console

from shoal import config
from shoal.config.build import build_parts, open_data
from shoal.data import Loader, Source, SyntheticClicks, flights, split_by_time
from shoal.metrics import auc
from shoal.train.learner import Learner
from shoal.train.ranks import ALONE

ROOT = Path(__file__).parents[1]
DAY_S, BATCH, BOOTSTRAPS, SEED = 86_400, 32, 500, 2013
BASE_CLICKS, CLICKS_A_DAY = 60_000, 2_000
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
    if stream == "clicks":
        source = {"kind": "synthetic", "examples": BASE_CLICKS, "eval_examples": 1, **CLICKS}
        settings |= {"features": {}, "data": {"source": source, "batch_size": 256}}
    return config.from_mapping(settings)


def events_of(stream: str, days: int) -> tuple[Source, torch.Tensor, int]:
    """Events in order of time, the day of each, and how many pass until an outcome is known."""
    if stream == "clicks":
        made = SyntheticClicks(examples=days * CLICKS_A_DAY, first=BASE_CLICKS, seed=SEED, **CLICKS)
        return made, torch.arange(len(made)) // CLICKS_A_DAY, 14
    _, november = split_by_time(flights.load().examples, flights.SPLIT_S)
    day_N = (november.times() - flights.SPLIT_S) // DAY_S
    return november, day_N[day_N < days], 600  # 8 hours


def measured(stream: str, days: int) -> dict[str, float]:
    """Scores of the live and the daily model."""
    settings = settings_of(stream)
    torch.manual_seed(SEED)
    data = open_data(settings)
    parts = build_parts(settings, settings.model, offered=data.features, num_dense=data.num_dense)
    learner = Learner(settings.model.kind, parts, settings, ALONE)
    for batch in data.train:
        learner.train_step([batch])
    events, day_N, delay = events_of(stream, days)
    whole = next(iter(Loader(events, len(day_N), prefetch=0)))
    live, daily = torch.zeros(len(day_N)), torch.zeros(len(day_N))
    learned, day = 0, -1
    for low in range(0, len(day_N), BATCH):
        rows_B = torch.arange(low, min(low + BATCH, len(day_N)))
        while learned + BATCH <= low - delay:
            learner.train_step([events.take(torch.arange(learned, learned + BATCH))])
            learned += BATCH
        for new in day_N[rows_B].unique().tolist():
            if new > day:
                day = new
                rows_D = (day_N == day).nonzero().flatten()
                daily[rows_D] = learner.predict(events.take(rows_D))
        live[rows_B] = learner.predict(events.take(rows_B))
    labels = whole.labels
    found = {"live": auc(live, labels), "daily": auc(daily, labels)}
    generator = torch.Generator().manual_seed(SEED)
    gains = []
    for _ in range(BOOTSTRAPS):
        rows = torch.randint(len(labels), (len(labels),), generator=generator)
        gains.append(auc(live[rows], labels[rows]) - auc(daily[rows], labels[rows]))
    low_gain, high_gain = np.quantile(gains, (0.025, 0.975))
    return {
        "events": len(labels), "days": days, **found, "gain": found["live"] - found["daily"],
        "low": float(low_gain), "high": float(high_gain),
    }  # fmt: skip


def main() -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stream", choices=("clicks", "flights"), nargs="+", default=["clicks"])
    parser.add_argument("--days", type=int, default=10)
    arguments = parser.parse_args()
    for stream in arguments.stream:
        found = measured(stream, arguments.days)
        Console().print_json(json.dumps({"stream": stream, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
