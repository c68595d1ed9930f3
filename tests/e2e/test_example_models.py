"""Each example config trains on its made-up twin."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from rich.console import Console

from shoal import config, train
from shoal.data import write_like

EXAMPLES = Path(__file__).parents[2] / "examples"
ROWS = 6000
# The data set, changes that keep the run short, and an AUC that chance does not reach.
CASES: dict[str, tuple[str, list[str], float]] = {
    "deepfm_criteo": ("criteo", [], 0.62),
    "mmoe_taobao": ("taobao", [], 0.6),
    "din_taobao": ("taobao", [], 0.6),
    "hstu_taobao": ("taobao", [], 0.6),
    "movielens": ("movielens", ["data.epochs=2"], 0.68),
    "two_tower_movielens": ("movielens", ["data.epochs=2"], 0.57),
    "two_tower_negatives_movielens": ("movielens", ["data.epochs=2"], 0.57),
    "tdm_movielens": ("movielens", ["eval.max_examples=300"], 0.57),
    "dlrm_dcnv2": ("", ["data.source.examples=4096", "data.source.eval_examples=1024"], 0.6),
}
# The key with a file of items, among which the evaluation ranks.
ITEMS = {"two_tower_negatives_movielens": "sampler", "tdm_movielens": "tree"}


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for like in ("criteo", "taobao", "movielens"):
        write_like(like, ROWS, folder / like)  # type: ignore[arg-type]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_example_trains_on_its_twin(name: str, twins: Path, tmp_path: Path) -> None:
    like, changes, least = CASES[name]
    if like:
        for side, key in (("train", "paths"), ("eval", "eval_paths")):
            changes = [*changes, f"data.source.{key}=['{twins / like / side}.parquet']"]
    if name in ITEMS:
        changes = [*changes, f"data.{ITEMS[name]}.items='{twins / like / 'items.parquet'}'"]
    changes += [
        "threads=1",
        "data.batch_size=128",
        f"output.dir='{tmp_path}'",
        "output.save_model=false",
    ]
    changes += ["dense_optimizer.lr=0.005", "tables.default.optimizer.lr=0.1"]
    run = config.load(EXAMPLES / f"{name}.yaml", changes, environment={})
    result = train.run(run, console=Console(quiet=True))
    for model, figures in result.metrics.items():
        assert math.isfinite(figures["log_loss"]), model
    assert next(iter(result.metrics.values()))["auc"] > least
    assert result.total_rows > 0
    if name in ITEMS:  # ten of 300 items by chance
        figures = next(iter(result.metrics.values()))
        assert figures["hit_rate@50"] >= figures["hit_rate@10"] > 3 * 10 / 300


def test_every_example_of_a_model_is_tried() -> None:
    others = {"dlrm_dcnv2_tables", "flights", "parquet", "scale"}  # of pages and demos
    assert {path.stem for path in EXAMPLES.glob("*.yaml")} - others == set(CASES)
