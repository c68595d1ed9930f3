"""Arguments of another kind than they are of: one error that names them, nothing of the insides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shoal
from shoal import (
    Admission,
    DistributedModelParallel,
    EmbeddingCollection,
    Expiry,
    Feature,
    JointOptimizer,
    KeyedRagged,
    Layout,
    LayoutSlice,
    Segment,
    SparseOptimizer,
    StepContext,
    Table,
    TableSpec,
    clip_grad_norm_,
    comm,
    create_predict_pipeline,
    create_train_pipeline,
    ids,
    metrics,
    models,
    placement,
)
from shoal.errors import ShoalError
from shoal.rules.optimizers import Adam, Momentum
from shoal.rules.schedules import Piecewise

SPEC = TableSpec(name="t", segments=(Segment(dim=2),))
FEATURE = Feature("f", "t")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingCollection([SPEC], [FEATURE])
        self.dense = nn.Linear(2, 1)


def clipped(dense: Any = (), sparse: Any = ()) -> None:
    clip_grad_norm_(dense, sparse, 1.0)


def trained(model: Any = None, optimizer: Any = None, hooks: Any = ()) -> None:
    own = Model()
    dense = torch.optim.SGD(own.dense.parameters(), lr=0.1)
    create_train_pipeline(model or own, optimizer or dense, hooks=hooks)


def joint() -> JointOptimizer:
    return JointOptimizer([SparseOptimizer(Model())])


IDS = torch.zeros(1, dtype=torch.int64)
SCORES = torch.tensor([0.1, 0.9])
CASES: list[tuple[Callable[[], Any], str]] = [
    (lambda: Feature(3, "t"), "name of feature 3: got 3; allowed: str"),
    (lambda: Feature("f", SPEC), "table of feature 'f': got TableSpec"),
    (lambda: LayoutSlice(FEATURE), "feature of LayoutSlice: got Feature"),
    (lambda: LayoutSlice("f", 0), "segment of LayoutSlice: got 0; allowed: str or None"),
    (
        lambda: Layout("l", "concat", ("f", "g")),
        "slices of Layout.*allowed: a tuple of LayoutSlice",
    ),
    (lambda: Layout("l", "concat", LayoutSlice("f")), "slices of Layout"),
    (lambda: Layout("l", None, (LayoutSlice("f"),)), "unknown kind of layout 'l': got None"),
    (lambda: Segment(dim=2, name=None), "name of segment None: got None; allowed: str"),
    (lambda: Adam(nesterov="no"), "nesterov of Adam: got 'no'; allowed: bool"),
    (lambda: Admission(per_slot={1: 2}), r"one of per_slot: got 1 \(int\); allowed: tuple or list"),
    (lambda: Expiry(per_slot=3), r"per_slot: got 3 \(int\)"),
    (lambda: EmbeddingCollection(SPEC, [FEATURE]), "tables of a collection: got TableSpec"),
    (lambda: EmbeddingCollection(["t"], [FEATURE]), "one of tables of a collection: got 't'"),
    (lambda: EmbeddingCollection([SPEC], FEATURE), "features of a collection: got Feature"),
    (lambda: EmbeddingCollection([SPEC], "f"), "features of a collection: got 'f'"),
    (lambda: EmbeddingCollection([SPEC], [FEATURE], ["f"]), "one of layouts of a collection"),
    (lambda: Table("t"), r"one of tables of a shard: got 't' \(str\); allowed: TableSpec"),
    (lambda: StepContext(learning_rates=[0.1]), "learning rates: got .0.1. .list."),
    (lambda: SparseOptimizer("model"), "modules of a SparseOptimizer: got 'model'"),
    (lambda: SparseOptimizer([SPEC]), "one of modules of a SparseOptimizer: got TableSpec"),
    (lambda: SparseOptimizer(Model(), rates=0.1), "rates of tables: got 0.1 .float."),
    (lambda: SparseOptimizer(Model(), nan_policy=3), "nan_policy: got 3; allowed: clip, raise"),
    (lambda: JointOptimizer(joint()), "optimizers of a JointOptimizer: got JointOptimizer"),
    (lambda: JointOptimizer([Model()]), "one of optimizers of a JointOptimizer: got Model"),
    (lambda: joint().optimizers[0].load_state_dict(None), "state of a SparseOptimizer: got None"),
    (lambda: clipped(dense=3), "dense_params: got 3"),
    (lambda: clipped(sparse=joint()), "sparse: got JointOptimizer"),
    (lambda: clipped(sparse=[1]), "one of sparse: got 1"),
    (lambda: clip_grad_norm_((), (), "1"), "max_norm: got '1' .str."),
    (lambda: trained(hooks=3), "hooks: got 3 .int."),
    (lambda: trained(model="m"), "model: got 'm' .str.; allowed: Module"),
    (lambda: trained(optimizer="adam"), "optimizer: got 'adam' .str.; allowed: Optimizer"),
    (lambda: create_predict_pipeline(SPEC), "model: got TableSpec"),
    (lambda: DistributedModelParallel("m"), "module: got 'm'"),
    (lambda: DistributedModelParallel(Model(), "row_wise"), "placement: got 'row_wise'"),
    (lambda: DistributedModelParallel(Model(), mesh="m"), "mesh: got 'm'"),
    (
        lambda: DistributedModelParallel(Model(), grad_reduce="avg"),
        "unknown grad_reduce: got 'avg'",
    ),
    (
        lambda: DistributedModelParallel(Model(), compile=3),
        "unknown mode of compile: got 3; allowed: .*false, .*true",
    ),
    (lambda: Table(SPEC, shard=3), "shard: got 3 .int.; allowed: a shard"),
    (lambda: EmbeddingCollection([SPEC], [FEATURE], shard=Model()), "shard: got Model"),
    (lambda: placement.row_wise("t", 2, "2"), "ranks of table 't': got '2'"),
    (lambda: placement.data_parallel("t", 2, None), "ranks of table 't': got None"),
    (lambda: placement.column_wise("t", 2, 2), "ranks of table 't': got 2 .int."),
    (lambda: placement.table_row_wise("t", 2, 2), "ranks of table 't': got 2 .int."),
    (lambda: placement.grid("t", 2, [1]), "ranks of table 't': got 1 .int."),
    (lambda: placement.owners("t", IDS), "slice of a table: got 't'"),
    (lambda: placement.owners(placement.row_wise("t", 2, 2)[0], [1]), "hashes"),
    (lambda: Piecewise(3, (1.0,)), "boundaries of Piecewise: got 3"),
    (lambda: Piecewise((1,), 0.1), "values of Piecewise: got 0.1"),
    (lambda: KeyedRagged.from_lists([[1]]), "features: got .*list.; allowed: Mapping"),
    (lambda: KeyedRagged.from_dict("f"), "features: got 'f'"),
    (lambda: KeyedRagged.from_lists({"f": [[1]]}, [[1.0]]), "weights: got .*list."),
    (lambda: shoal.optim.ParameterAverage("m"), "module: got 'm'"),
    (lambda: ids.salt(3), "name of a table: got 3"),
    (lambda: ids.max_slot(2), "unknown fid layout: got '?2"),
    (lambda: ids.hash_strings(3), "strings: got .*allowed: one column of strings"),
    (lambda: metrics.calibration_bins(SCORES, SCORES.round(), bins="x"), "bins: got 'x'"),
    (lambda: metrics.grouped_auc(SCORES, SCORES.round(), [1, 1]), "groups: got .*list."),
    (lambda: metrics.ranking_figures(SCORES, 5), "ks: got 5"),
    (lambda: placement.rank_buckets("0", 2), "rank of a uniform split: got 0"),
    (
        lambda: placement.ranks_of(IDS, 2.0),
        "ranks of a uniform split",
    ),
    (lambda: placement.bucket_hashes(0, None), r"bucket range: got \[0, None\)"),
    (lambda: placement.floormod(IDS, "2"), "divisor of a routing"),
    (lambda: models.MLP(4, 8), "hidden of an MLP: got 8"),
    (lambda: models.MLP(4, (8,), dropout="x"), "one of sizes of an MLP: got 'x'"),
    (lambda: models.CrossNetwork(4, None), "got None"),
]


@pytest.mark.parametrize(("call", "words"), CASES, ids=[words[:40] for _, words in CASES])
def test_an_argument_of_another_kind_is_named(call: Callable[[], Any], words: str) -> None:
    try:
        with pytest.raises(ShoalError, match=words):
            call()
    finally:
        comm.shutdown()  # some wrap a model, which starts a mesh


def test_kinds_that_fit_pass_as_they_are() -> None:
    model = Model()
    assert SparseOptimizer(iter([model])).proxies
    named = EmbeddingCollection({"t": SPEC}.values(), (one for one in [FEATURE]))
    assert named.features == (FEATURE,)
    assert Layout("l", "concat", [LayoutSlice("f")]).slices == [LayoutSlice("f")]


def test_numbers_of_numpy_are_taken() -> None:
    four = np.int64(4)
    assert models.MLP(four, (four,), out_features=1)(torch.zeros(2, 4)).shape == (2, 1)
    metrics.BinaryMetrics(bins=four)
    assert Momentum(nesterov=np.bool_(True)).nesterov


@pytest.mark.parametrize(
    "ranks", [np.arange(2), [np.int64(0), np.int64(1)], range(2), {0: 0, 1: 0}]
)
def test_ranks_may_be_numpy_s(ranks: Any) -> None:
    split, cut = placement.table_row_wise("t", 4, (0, 1)), placement.column_wise("t", 4, (0, 1))
    assert placement.table_row_wise("t", 4, ranks) == split
    assert placement.column_wise("t", 4, ranks) == cut
    assert placement.grid("t", 4, [ranks]) == split
    hosted = placement.table_row_wise("t", 4, ranks)
    assert '"ranks": [\n' in placement.Placement(2, hosted).to_json()


def test_boundaries_may_be_numpy_s() -> None:
    rates = Piecewise(range(1, 3), np.array([0.3, 0.2, 0.1]))  # type: ignore[arg-type]
    assert rates == Piecewise((1, 2), (0.3, 0.2, 0.1))
    assert [rates(step) for step in range(4)] == [0.3, 0.2, 0.1, 0.1]


@pytest.mark.parametrize("most", [np.float32(1), np.array(1.0), torch.tensor(1.0), 1])
def test_a_norm_may_be_any_number(most: Any) -> None:
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_([weight], (), most) == 5
    torch.testing.assert_close(weight.grad, torch.tensor([0.6, 0.8]))
