"""`shoal train` with sampled items: two ranks, edges and hard negatives, what does not fit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from shoal import config, train
from shoal.config.build import open_data
from shoal.data import write_like
from shoal.errors import ConfigError
from support.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.multiproc]

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_tower_negatives_movielens.yaml"


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    train_file, _ = write_like("movielens", 1500, folder)
    table = pq.read_table(train_file, columns=["user_id", "movie_id", "label"])
    pairs = table.select(["user_id", "movie_id"])
    pq.write_table(pairs.filter(table["label"].cast("bool")), folder / "edges.parquet")
    pq.write_table(pairs.slice(0, 300), folder / "hard.parquet")
    return folder


def settings(data: Path, out: Path, *changes: str) -> config.RunConfig:
    return config.load(
        EXAMPLE,
        [
            f"data.source.paths=['{data / 'train.parquet'}']",
            f"data.source.eval_paths=['{data / 'eval.parquet'}']",
            f"data.sampler.items='{data / 'items.parquet'}'",
            "data.batch_size=64",
            "data.sampler.count=32",
            "eval.retrieval=null",
            "threads=1",
            f"output.dir='{out}'",
            *changes,
        ],
        environment={},
    )


def trained(data: Path, out: Path, changes: list[str]) -> tuple[dict[str, Any], int]:
    result = train.run(settings(data, out, *changes), console=Console(quiet=True))
    return dict(result.metrics), result.total_rows


@pytest.mark.parametrize(("loss", "shared"), [("sampled", True), ("softmax", False)])
def test_two_ranks_train_with_edges_and_hard_negatives(
    twin: Path, tmp_path: Path, loss: str, shared: bool
) -> None:
    changes = [
        f"model.loss={loss}",
        "data.sampler.kind=no_edge",
        "data.sampler.user=user_id",
        f"data.sampler.edges='{twin / 'edges.parquet'}'",
        f"data.sampler.hard_edges='{twin / 'hard.parquet'}'",
        "data.sampler.hard_count=2",
        f"data.sampler.shared={str(shared).lower()}",
        f"data.sampler.spread={str(shared).lower()}",
        "eval.retrieval={k: [5, 20]}",
        "eval.batch_size=64",
    ]
    (first, second) = run_ranks(2, trained, twin, tmp_path, changes, timeout_s=240)
    assert first == second
    metrics, rows = first
    assert rows > 0
    assert all(math.isfinite(sheet["log_loss"]) for sheet in metrics.values())
    assert 0 < metrics["two_tower"]["hit_rate@5"] < metrics["two_tower"]["hit_rate@20"]


def tree_settings(data: Path, out: Path, *more: str) -> config.RunConfig:
    changes = [
        f"data.source.paths=['{data / 'train.parquet'}']",
        f"data.source.eval_paths=['{data / 'eval.parquet'}']",
        f"data.tree.items='{data / 'items.parquet'}'",
        "eval={max_examples: 70, batch_size: 64, retrieval: {k: [5, 20]}}",
        "threads=1",
        f"output.dir='{out}'",
        *more,
    ]
    return config.load(EXAMPLE.with_name("tdm_movielens.yaml"), changes, environment={})


def trained_on_a_tree(data: Path, out: Path) -> tuple[dict[str, Any], Path]:
    result = train.run(tree_settings(data, out), console=Console(quiet=True))
    return dict(result.metrics), result.folder


def test_two_ranks_train_and_search_a_tree(twin: Path, tmp_path: Path) -> None:
    """The second evaluation batch has six examples, and the ranks have unequal numbers of likes."""
    (found, same) = run_ranks(2, trained_on_a_tree, twin, tmp_path, timeout_s=240)
    assert found == same
    first, folder = found
    assert 0 <= first["deepfm"]["hit_rate@5"] <= first["deepfm"]["hit_rate@20"] <= 1
    assert first["deepfm"]["examples"] == 70
    alone = train.evaluate(str(folder), console=Console(quiet=True))["deepfm"]
    ranking = [name for name in alone if "@" in name]
    assert len(ranking) == 4
    for name in ranking:
        assert first["deepfm"][name] == pytest.approx(alone[name], abs=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("baselines=[base_rate]", r"baselines with data\.tree: got base_rate"),
        ("eval.retrieval.items=a.parquet", r"eval\.retrieval\.items with data\.tree: got a\.pa"),
        ("data.tree.id=movie", r"feature of data\.tree: got 'movie'"),
    ],
)
def test_what_does_not_fit_a_tree_is_refused(
    twin: Path, tmp_path: Path, change: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_data(tree_settings(twin, tmp_path, change))


def test_a_run_draws_the_same_items_again(twin: Path, tmp_path: Path) -> None:
    shared = ["data.sampler.shared=true"]
    assert trained(twin, tmp_path / "a", shared) == trained(twin, tmp_path / "b", [])
    assert trained(twin, tmp_path / "a", ["seed=2"]) != trained(twin, tmp_path / "b", [])


def test_evaluation_and_predictions_need_no_items(twin: Path, tmp_path: Path) -> None:
    console = Console(quiet=True)
    result = train.run(settings(twin, tmp_path), console=console)
    away = ["data.sampler.items=none.parquet"]
    found = train.evaluate(str(result.folder), away, console=console)
    assert found["two_tower"] == pytest.approx(dict(result.metrics)["two_tower"])
    assert train.predict(str(result.folder), away, console=console).is_file()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["baselines=[logistic]"], r"model that data\.sampler gives items to: got logistic"),
        (["data.sampler=null"], r"model\.loss: sampled: got no data\.sampler"),
        (["data.sampler.attributes=[genres]"], r"data\.sampler: got id 'movie_id'"),
        (["data.sampler.count=0"], r"count of data\.sampler: got 0"),
        (["data.sampler.coun=1"], "coun"),
        (["eval.retrieval={width: 100}"], r"eval\.retrieval\.width without data\.tree: got 100"),
        (
            [
                "eval.retrieval={items: a.parquet}",
                "data.sampler=null",
                "model.loss=log_loss",
                "model.item=[movie_id,year]",
            ],
            r"feature of eval\.retrieval: got 'year'",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    twin: Path, tmp_path: Path, changes: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        trained(twin, tmp_path, changes)


@pytest.mark.parametrize("loss", ["sampled", "softmax"])
def test_hstu_trains_on_sampled_next_items(tmp_path: Path, loss: str) -> None:
    train_file, _ = write_like("taobao", 1500, tmp_path)
    targets = ["adgroup_id", "cate_id", "brand"]
    ads = pq.read_table(train_file, columns=targets).group_by("adgroup_id")
    first = ads.aggregate([("cate_id", "min"), ("brand", "min")])
    pq.write_table(first.rename_columns(targets), tmp_path / "items.parquet")
    changes = [
        f"data.source.paths=['{tmp_path / 'train.parquet'}']",
        f"data.source.eval_paths=['{tmp_path / 'eval.parquet'}']",
        f"+data.sampler={{items: '{tmp_path / 'items.parquet'}', id: adgroup_id,"
        " attributes: [cate_id, brand], count: 32}",
        "model.head=next_item",
        f"+model.loss={loss}",
        "eval.retrieval={k: [5, 20]}",
        "baselines=[base_rate]",
        "data.batch_size=64",
        "threads=1",
        f"output.dir='{tmp_path}'",
    ]
    run = config.load(EXAMPLE.with_name("hstu_taobao.yaml"), changes, environment={})
    figures = train.run(run, console=Console(quiet=True)).metrics["hstu"]
    assert math.isfinite(figures["log_loss"])
    assert 0 < figures["hit_rate@5"] <= figures["hit_rate@20"] <= 1
