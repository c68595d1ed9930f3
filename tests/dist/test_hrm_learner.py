"""The learner of examples/hrm: the same model on any number of ranks, and after resuming."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from hrm.dataset import read_split
from hrm.learner import Learner, LearnerConfig
from hrm.model import ReasoningModel
from hrm.model_config import ModelConfig
from hrm.original import load_original
from hrm.puzzle_table import TABLE
from hrm.rule_task import RuleTask, build_rule_task
from hrm.sampler import Share, TestBatches, TrainSampler
from shoal import Table, comm
from shoal.errors import ConfigError
from support.id_groups import groups_of
from support.ranks import run_ranks
from support.spread_model import on_mesh

pytestmark = pytest.mark.slow

IDS, BATCH = 24, 8
MODEL = ModelConfig(
    vocab_size=4,
    seq_len=4,
    hidden_size=8,
    num_heads=2,
    expansion=1,
    gated_multiple=8,
    H_layers=1,
    L_layers=1,
    puzzle_dim=8,
    halt_max_steps=3,
    halt_exploration_prob=0.5,
    forward_dtype="float64",
)
CONFIG = LearnerConfig(lr=1e-2, lr_warmup_steps=3, total_steps=50, ema_decay=0.9)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small only wait for a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def data_at(root: Path) -> str:
    build_rule_task(str(root), RuleTask(ids=IDS, side=2, colours=3, train_grids=4, test_grids=1))
    return str(root)


def made(mesh: comm.Mesh, root: str, config: LearnerConfig) -> tuple[Learner, TrainSampler]:
    share = Share(BATCH, mesh.rank, mesh.world_size)
    sampler = TrainSampler(read_split(root, "train"), share, seed=1, epochs_per_iteration=100)
    return Learner(MODEL, config, share, mesh), sampler


def steps(learner: Learner, sampler: TrainSampler, count: int) -> list[dict[str, float]]:
    figures = []
    for _ in range(count):
        batch = sampler.draw()
        assert batch is not None
        figures.append(learner.totals(learner.learn(batch)))
    return figures


def outcome(learner: Learner, figures: list[dict[str, float]], root: str) -> dict[str, Any]:
    assert learner.table is not None
    windows = TestBatches(read_split(root, "test"), learner.share, limit=IDS - 3)
    evaluated = learner.evaluate(windows)["all"]
    rows, found = learner.table.rows.table(TABLE).find(torch.arange(IDS + 1))
    state = {name: value.clone() for name, value in learner.model.state_dict().items()}
    mean = {} if learner.average is None else learner.average.state_dict()
    return {
        "model": state,
        "mean": {name: value.clone() for name, value in mean.items()},
        "rows": {"rows": rows, "found": found},
        "figures": figures,
        "evaluated": evaluated,
    }


def trained(mesh: comm.Mesh, root: str, config: LearnerConfig) -> dict[str, Any]:
    learner, sampler = made(mesh, root, config)
    return outcome(learner, steps(learner, sampler, 12), root)


def check_close(got: Mapping[str, Any], want: Mapping[str, Any], *, exact: bool) -> None:
    for part in ("model", "mean", "rows"):
        assert got[part].keys() == want[part].keys()
        for name, value in want[part].items():
            if exact:
                assert torch.equal(got[part][name], value), name
            else:
                torch.testing.assert_close(got[part][name], value, rtol=1e-4, atol=1e-5)
    assert got["evaluated"] == pytest.approx(want["evaluated"], rel=1e-4)
    for one, other in zip(got["figures"], want["figures"], strict=True):
        assert one == pytest.approx(other, rel=1e-4)


@pytest.mark.multiproc
@pytest.mark.parametrize("placement", ["data_parallel", "row_wise"])
def test_ranks_learn_what_one_learns(tmp_path: Path, placement: str) -> None:
    root = data_at(tmp_path)
    config = dataclasses.replace(CONFIG, placement=placement)  # type: ignore[arg-type]
    want = on_mesh(trained, root, config)
    assert want["evaluated"]["count"] == IDS - 3
    assert sum(figures["count"] for figures in want["figures"]) > 0
    found = run_ranks(2, on_mesh, trained, root, config)
    check_close(found[0], found[1], exact=True)
    check_close(found[0], want, exact=False)


def digest(mesh: comm.Mesh, root: str) -> str:
    """Of parameters, moments and this rank's own copy of the rows, after 200 steps."""
    learner, sampler = made(mesh, root, CONFIG)
    for _ in range(200):
        batch = sampler.draw()
        if batch is None:
            sampler.next_iteration()
            continue
        learner.learn(batch)
    assert learner.table is not None
    found = learner.table.rows.shard.find(groups_of((0, range(1, IDS + 1))))
    (rows,) = found.weights
    assert bool(found.found_N.all()) and bool((rows != 0).any(1).all())
    parts = [*learner.model.state_dict().values(), rows]
    parts += [m for one in learner.dense.state.values() for m in one.values()]
    return sha256(b"".join(part.detach().numpy().tobytes() for part in parts)).hexdigest()


@pytest.mark.multiproc
def test_ranks_have_the_same_bits_after_200_steps(tmp_path: Path) -> None:
    found = run_ranks(2, on_mesh, digest, data_at(tmp_path))
    assert found[0] == found[1]


def resumed(mesh: comm.Mesh, root: str) -> tuple[dict[str, Any], dict[str, Any]]:
    whole, sampler = made(mesh, root, CONFIG)
    steps(whole, sampler, 5)
    again, other = made(mesh, root, dataclasses.replace(CONFIG, seed=CONFIG.seed))
    # Parameters are overwritten on load, whatever they were.
    with torch.no_grad():
        for parameter in again.model.parameters():
            parameter.zero_()
    again.load_state_dict(torch.load(saved(whole, Path(root) / "state.pt"), weights_only=True))
    other.load_state_dict(sampler.state_dict())
    assert whole.table is not None and again.table is not None
    ids = torch.arange(1, IDS + 1)
    rows, found = whole.table.rows.table(TABLE).find(ids)
    again.table.rows.table(TABLE).assign(ids[found], rows[found])
    want = outcome(whole, steps(whole, sampler, 5), root)
    return outcome(again, steps(again, other, 5), root), want


def saved(learner: Learner, path: Path) -> Path:
    torch.save(learner.state_dict(), path)
    return path


def test_a_learner_goes_on_bit_for_bit(tmp_path: Path) -> None:
    got, want = on_mesh(resumed, data_at(tmp_path))
    check_close(got, want, exact=True)


def loaded(mesh: comm.Mesh, path: str, placement: str) -> tuple[torch.Tensor, int]:
    learner = Learner(
        MODEL, dataclasses.replace(CONFIG, placement=placement), Share(2, mesh.rank, 2), mesh
    )
    seen: list[int] = []
    table = learner.table.rows.table(TABLE)  # type: ignore[union-attr]
    assign = Table.assign
    Table.assign = lambda self, ids, *rest, **more: (  # type: ignore[method-assign, assignment]
        seen.append(len(ids)),
        assign(self, ids, *rest, **more),
    )[1]
    try:
        load_original(path, learner)
    finally:
        Table.assign = assign  # type: ignore[method-assign]
    return table.lookup(torch.arange(IDS)), sum(seen)


@pytest.mark.parametrize("placement", ["data_parallel", "row_wise"])
def test_rows_of_the_original_are_sent_once(tmp_path: Path, placement: str) -> None:
    state = {
        name.replace("_D", "").replace("embed_tokens.", "embed_tokens.embedding_"): one
        for name, one in ReasoningModel(MODEL, seed=3).state_dict().items()
    }
    rows = torch.randn(IDS, MODEL.puzzle_dim)
    torch.save({**state, "puzzle_emb.weights": rows}, tmp_path / "step_7")
    found = run_ranks(2, on_mesh, loaded, str(tmp_path / "step_7"), placement)
    assert [sent for _, sent in found] == [IDS, 0]
    for there, _ in found:
        torch.testing.assert_close(there, rows, rtol=0, atol=0)


def frozen(mesh: comm.Mesh, root: str) -> tuple[int, int]:
    learner, sampler = made(mesh, root, dataclasses.replace(CONFIG, freeze_table=True))
    steps(learner, sampler, 3)
    assert learner.table is not None
    found = learner.table.rows.table(TABLE).find(torch.arange(IDS + 1))[1]
    return int(found.sum()), learner.step


def test_a_frozen_table_stays_empty(tmp_path: Path) -> None:
    assert on_mesh(frozen, data_at(tmp_path)) == (0, 3)


def on_one_gpu(root: str, config: LearnerConfig) -> tuple[dict[str, torch.Tensor], list[Any]]:
    mesh = comm.init(device="cuda", timeout_s=60)
    try:
        learner, sampler = made(mesh, root, config)
        figures = steps(learner, sampler, 6)
        figures.append(
            learner.evaluate(TestBatches(read_split(root, "test"), learner.share))["all"]
        )
        figures += steps(learner, sampler, 2)
        return {name: one.cpu() for name, one in learner.model.state_dict().items()}, figures
    finally:
        comm.shutdown()


@pytest.mark.gpu
@pytest.mark.parametrize("placement", ["data_parallel", "row_wise"])
def test_steps_that_replay_graphs_learn_what_others_do(tmp_path: Path, placement: str) -> None:
    root = data_at(tmp_path)
    plain = dataclasses.replace(CONFIG, placement=placement)  # type: ignore[arg-type]
    want, figures = on_one_gpu(root, plain)
    got, found = on_one_gpu(root, dataclasses.replace(plain, graphed=True))
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-6, atol=1e-6)
    for one, other in zip(found, figures, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_graphs_need_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cuda_graphs"):
        on_mesh(made, data_at(tmp_path), dataclasses.replace(CONFIG, graphed=True))
