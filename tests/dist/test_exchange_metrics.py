"""What crosses between ranks, counted in a loop of one's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shoal import (
    DistributedModelParallel,
    EmbeddingCollection,
    Feature,
    KeyedRagged,
    Segment,
    SparseOptimizer,
    TableSpec,
    comm,
)
from shoal.distributed.metrics import AllToAllMetrics
from shoal.errors import ConfigError
from shoal.exchange.wire import Wire
from support.ranks import run_ranks


class Lookups(nn.Module):
    """Two tables of one collection: rows 2 wide by id, and 4 wide by columns."""

    def __init__(self) -> None:
        super().__init__()
        specs = [
            TableSpec(name=name, segments=(Segment(dim=d),)) for name, d in (("a/b", 2), ("c", 4))
        ]
        self.tables = EmbeddingCollection(specs, [Feature("x", "a/b"), Feature("y", "c")])

    def forward(self, ids: KeyedRagged) -> torch.Tensor:
        found = self.tables(ids)
        return found["x"].sum() + found["y"].sum()


def counted(wire: Wire | None = None) -> tuple[dict[str, float], dict[str, Any], list[str], int]:
    mesh = comm.init(device="cpu")
    model = DistributedModelParallel(
        Lookups(), placement={"a/b": "row_wise", "c": "column_wise"}, mesh=mesh, wire=wire
    )
    metrics = AllToAllMetrics.of(model, by_table=True)
    assert metrics.scalars() == {}
    optimizer = SparseOptimizer(model)
    ids = KeyedRagged.from_dict(
        {"x": [[5, 5, 6], [5]], "y": [[7], []]}
        if mesh.rank == 0
        else {"x": [[], [9]], "y": [[], [8]]}
    )
    loss = model(ids)
    before = metrics.scalars()
    assert "alltoall/gradient_bytes" not in before
    loss.backward()
    optimizer.step()
    found = metrics.scalars()
    assert before.items() <= found.items()
    made = {name: values.tolist() for name, values in metrics.histograms().items()}
    return found, made, metrics.hot_ids(), mesh.rank


@pytest.mark.slow
@pytest.mark.multiproc
def test_splits_and_indices_of_rows_and_gradients() -> None:
    both = run_ranks(2, counted)
    found, made, hot, _ = both[0]
    assert sum(made["alltoall/ids_to_rank/a/b"]) == 2
    assert sorted(made["alltoall/occurrences/a/b"]) == [1, 3]
    assert made["alltoall/occurrences/c"] == [1]
    assert hot == ["a/b 5 (3 of 4)", "a/b 6 (1 of 4)", "c 7 (1 of 1)"]
    # Two rows of 2, and one of 4.
    assert found["alltoall/gradient_bytes"] == found["alltoall/row_bytes"] == 4 * (2 * 2 + 4)
    assert sum(made["alltoall/gradient_floats_to_rank"]) == 8
    assert sum(made["alltoall/gradient_floats_to_rank/a/b"]) == 4
    to_c = made["alltoall/gradient_floats_to_rank/c"]
    assert sum(to_c) == 4
    assert found["alltoall/gradient_floats_to_rank_max/c"] == max(to_c)
    assert found["alltoall/hottest_share/a/b"] == 0.75
    assert 4 <= found["alltoall/index_max"] <= 6  # where the last row of 2 or 4 starts
    for rank in range(2):
        assert (
            found[f"alltoall/gradient_floats_to_rank/{rank}"]
            == (both[rank][0]["alltoall/row_floats_to_rank/0"])
        )  # rows come back along the splits that gradients go


@pytest.mark.slow
@pytest.mark.multiproc
def test_bytes_are_those_of_the_wire() -> None:
    (found, *_), _ = run_ranks(2, counted, Wire(rows="bfloat16", grads="int8"))
    assert found["alltoall/row_bytes"] == 2 * (2 * 2 + 4)
    # A byte a float, and a scale of 4 bytes a row.
    assert found["alltoall/gradient_bytes"] == 2 * (2 + 4) + (4 + 4)


def test_a_model_on_one_rank_has_nothing_to_watch() -> None:
    with pytest.raises(ConfigError, match="collections to watch"):
        AllToAllMetrics.of(Lookups())
    with pytest.raises(ConfigError, match="0 collections"):
        AllToAllMetrics.of(nn.Linear(1, 1))
