"""Pipelines on several ranks: equal to one process, and never hanging on uneven data."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.comm import launch
from shoal.data.batch import Batch
from shoal.distributed import DistributedModelParallel
from shoal.errors import ConfigError, DataError
from shoal.pipeline import create_predict_pipeline, create_train_pipeline
from shoal.ragged import KeyedRagged
from shoal.rules.admission import Admission
from shoal.table.spec import TableSpec
from support.pipeline_runs import (
    Made,
    batches_of,
    late_losses,
    loss_of,
    plain_losses,
    rows_of,
    spec,
    toy,
)
from support.ranks import RankFailure, run_ranks
from support.spread_model import on_mesh

pytestmark = pytest.mark.multiproc

COUNTS = (5, 3, 0)
Run = tuple[str, tuple[int, ...], dict[str, Any]]
TABLES = {
    "plain": (spec(dtype="float64"),),
    "admission and expiry": (spec(dtype="float64", ttl_s=15, admission=Admission(threshold=3)),),
    "lru": (spec(dtype="float64", capacity_rows=30, on_full="lru"),),
}


def share_of(rank: int, count: int) -> list[Batch]:
    """A rank's batches; sizes differ between ranks."""
    return batches_of(count, seed=rank, examples=3 + 2 * rank, ids=20)


def joined(parts: Sequence[Batch]) -> Batch:
    """One batch of the examples of several."""
    lists: dict[str, list[list[int]]] = {"a": [], "b": []}
    for part in parts:
        for key, rows in part.ids.to_lists().items():
            lists[key].extend(rows)
    ids = KeyedRagged.from_lists(lists)
    labels = torch.cat([part.labels for part in parts])
    return replace(parts[0], ids=ids, labels=labels)


def whole(counts: Sequence[int]) -> list[Batch]:
    """What one process trains on: round by round, the batches of all ranks that have one."""
    shares = [share_of(rank, count) for rank, count in enumerate(counts)]
    rounds = range(max(counts))
    return [joined([share[i] for share in shares if i < len(share)]) for i in rounds]


def wrapped(mesh: Any, tables: Sequence[TableSpec]) -> Made:
    device = str(mesh.device)
    return toy(tables, lambda model: DistributedModelParallel(model, mesh=mesh), device=device)


def run(pipeline: Any, source: Iterator[Any]) -> list[Any]:
    steps = []
    with contextlib.suppress(StopIteration):
        while True:
            steps.append(pipeline.progress(source))
    return steps


def train(mesh: Any, case: str, counts: Sequence[int], settings: dict[str, Any]) -> Any:
    made = wrapped(mesh, TABLES[case])
    pipeline = create_train_pipeline(made.wrapped, made.optimizer, loss_of=loss_of, **settings)
    weights = []

    def keep(step: Any) -> float:
        assert pipeline.last is not None
        weights.append(pipeline.last.weight)
        return float(step.losses)

    source, losses = iter(share_of(mesh.rank, counts[mesh.rank])), []
    with contextlib.suppress(StopIteration):
        while True:
            losses.append(keep(pipeline.progress(source)))
    weight = made.model.linear.weight.detach().cpu()
    return losses, weights, rows_of(made.model), weight


def train_all(mesh: Any, runs: Sequence[Run]) -> list[Any]:
    """Several runs in one set of processes, which take long to start."""
    return [train(mesh, case, counts, settings) for case, counts, settings in runs]


def ranks_train(*runs: Run) -> list[list[Any]]:
    """For each run, what each rank came to."""
    outcomes = run_ranks(len(runs[0][1]), on_mesh, train_all, runs)
    return [list(parts) for parts in zip(*outcomes, strict=True)]


def rows_by_id(parts: Sequence[Any]) -> dict[int, tuple[Tensor, ...]]:
    found = {}
    for part in parts:
        for i, id_ in enumerate(part[0]["ids"].tolist()):
            assert id_ not in found
            names = ("weights", "state", "last_seen_s", "counts")
            found[id_] = tuple(part[0][name][i] for name in names)
    return found


def check(outcomes: list[Any], made: Made, losses: Sequence[Tensor]) -> None:
    """Ranks together trained what one process did."""
    rounds = zip(*[list(zip(o[0], o[1], strict=True)) for o in outcomes], strict=True)
    means = [sum(x * w for x, w in parts) / sum(w for _, w in parts) for parts in rounds]
    assert means == pytest.approx([float(loss) for loss in losses], rel=1e-5)
    got, want = rows_by_id([o[2] for o in outcomes]), rows_by_id([rows_of(made.model)])
    assert got.keys() == want.keys()
    for id_, parts in want.items():
        for ours, theirs in zip(got[id_], parts, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    for outcome in outcomes:
        torch.testing.assert_close(outcome[3], made.model.linear.weight.detach())


@pytest.mark.slow
def test_uneven_ranks_equal_one_process() -> None:
    runs: list[Run] = [
        (case, COUNTS, {"accumulation": accumulation, "evict_every_s": 20})
        for case in ("plain", "admission and expiry")
        for accumulation in (1, 2)
    ]
    for (case, counts, settings), outcomes in zip(runs, ranks_train(*runs), strict=True):
        made = toy(TABLES[case])
        check(outcomes, made, plain_losses(made, whole(counts), **settings))


def on_gpus(runs: Sequence[Run]) -> list[Any]:
    mesh = launch.init(device="cuda", timeout_s=240)  # kernels are compiled first
    try:
        return train_all(mesh, runs)
    finally:
        launch.shutdown()


@pytest.mark.gpu
@pytest.mark.timeout(480)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_equal_one_process() -> None:
    settings = {"evict_every_s": 20}
    runs: list[Run] = [(case, (12, 7), settings) for case in ("plain", "admission and expiry")]
    outcomes = run_ranks(2, on_gpus, runs, timeout_s=420, reuse=True)
    for i, (case, counts, _) in enumerate(runs):
        made = toy(TABLES[case])
        check([parts[i] for parts in outcomes], made, plain_losses(made, whole(counts), **settings))


def settings_differ(mesh: Any) -> str:
    made = wrapped(mesh, TABLES["plain"])
    pipeline = create_train_pipeline(
        made.wrapped, made.optimizer, loss_of=loss_of, accumulation=1 + mesh.rank
    )
    with pytest.raises(ConfigError) as caught:
        pipeline.progress(iter([]))
    return str(caught.value)


@pytest.mark.slow
def test_two_ranks() -> None:
    even, budget, late, shallow = ranks_train(
        ("plain", (4, 4), {}),
        ("lru", (7, 2), {"evict_every_s": 20}),
        ("plain", (6, 2), {"staleness": 1}),
        ("plain", (6, 2), {"staleness": 1, "depth": 3}),
    )
    made = toy(TABLES["plain"])
    check(even, made, plain_losses(made, whole((4, 4))))
    made = toy(TABLES["plain"])
    check(late, made, late_losses(made, whole((6, 2)), 1, 1, 1 << 30))
    # Near a budget ranks defer inserts alike.
    assert [len(o[0]) for o in budget] == [7, 7]
    assert all(len(o[2][0]["ids"]) <= 15 for o in budget)
    # How far ahead the early stages run changes nothing.
    assert [len(o[0]) for o in late] == [6, 6]
    for one, other in zip(late, shallow, strict=True):
        assert one[0] == other[0]
        assert torch.equal(one[2][0]["weights"], other[2][0]["weights"])


def stop_early(mesh: Any, counts: Sequence[int]) -> tuple[int, list[str]]:
    made = wrapped(mesh, TABLES["plain"])
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shoal.pipeline").addHandler(handler)
    pipeline = create_train_pipeline(
        made.wrapped, made.optimizer, check_all_workers_data_status=True, loss_of=loss_of
    )
    steps = run(pipeline, iter(share_of(mesh.rank, counts[mesh.rank])))
    logging.getLogger("shoal.pipeline").removeHandler(handler)
    assert all(step.predictions is not None for step in steps)
    return len(steps), messages


def stop_early_and_cut(mesh: Any) -> list[Any]:
    return [stop_early(mesh, (5, 3)), stop_early(mesh, (2, 0)), snapshot(mesh)]


@pytest.mark.slow
def test_all_stop_or_cut_when_one_does() -> None:
    ranks = run_ranks(2, on_mesh, stop_early_and_cut)
    for run_, counts in enumerate([(5, 3), (2, 0)]):
        (first, told), (second, silent) = (outcomes[run_] for outcomes in ranks)
        assert first == second == counts[1]
        assert len(told) == 1 and f"{counts[0] - counts[1]} batches dropped" in told[0]
        assert silent == []
    (snapshots, left), (theirs, _) = (outcomes[2] for outcomes in ranks)
    assert snapshots == theirs and len(snapshots) == 1
    assert left == 6


def snapshot(mesh: Any) -> tuple[list[int], int]:
    made = wrapped(mesh, TABLES["plain"])
    pipeline = create_train_pipeline(made.wrapped, made.optimizer, loss_of=loss_of)
    snapshots: list[int] = []

    def on_snapshot(trained: int) -> None:
        assert pipeline.tickets == 0
        mesh.control.barrier(what="snapshot")
        snapshots.append(trained)

    pipeline.on_snapshot = on_snapshot
    source = iter(share_of(mesh.rank, 7))
    pipeline.progress(source)
    if mesh.rank == 1:
        pipeline.request_snapshot()
    return snapshots, len(run(pipeline, source))


def fails(mesh: Any) -> str:
    assert "the same on every rank" in settings_differ(mesh)

    def source() -> Iterator[Batch]:
        yield from share_of(mesh.rank, 3)
        if mesh.rank == 1:
            raise KeyError("gone")
        yield from share_of(mesh.rank, 3)

    made = wrapped(mesh, TABLES["plain"])
    pipeline = create_train_pipeline(made.wrapped, made.optimizer, loss_of=loss_of)
    try:
        run(pipeline, source())
    except (DataError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.slow
def test_a_source_that_raises_stops_all_ranks() -> None:
    first, second = run_ranks(2, on_mesh, fails)
    assert first.startswith("DataError: batch 3: got an error while rank 1 loaded it")
    assert second.startswith("KeyError")


def predict(mesh: Any, counts: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    made = wrapped(mesh, TABLES["plain"])
    trained = create_train_pipeline(made.wrapped, made.optimizer, loss_of=loss_of)
    run(trained, iter(share_of(mesh.rank, 2)))
    own = share_of(mesh.rank, counts[mesh.rank])
    model = made.wrapped.eval()
    pipeline = create_predict_pipeline(model)
    predictions = run(pipeline, iter(own))
    # The same, in step: each rank looks up as often as the others.
    again = run(create_predict_pipeline(model, depth=1), iter(own))
    return predictions, again


@pytest.mark.slow
def test_ranks_predict_until_all_are_out_of_data() -> None:
    outcomes = run_ranks(3, on_mesh, predict, COUNTS)
    assert [len(predictions) for predictions, _ in outcomes] == list(COUNTS)
    for predictions, again in outcomes:
        assert all(torch.equal(a, b) for a, b in zip(predictions, again, strict=True))
        assert all(p.abs().sum() > 0 for p in predictions)


def dies(mesh: Any) -> None:
    made = wrapped(mesh, TABLES["plain"])
    pipeline = create_train_pipeline(made.wrapped, made.optimizer, loss_of=loss_of)
    source = iter(share_of(mesh.rank, 8))
    for i in range(8):
        if mesh.rank == 1 and i == 3:
            raise SystemExit("gone")
        pipeline.progress(source)


@pytest.mark.slow
def test_a_rank_that_leaves_does_not_hang_the_others() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, on_mesh, dies)
    assert set(caught.value.failures) == {0, 1}
    assert "CollectiveFailed" in caught.value.failures[0]
