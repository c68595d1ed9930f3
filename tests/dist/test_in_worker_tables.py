"""Monolith's tables in the workers of a synchronous job (spec/monolith-training.md 3.3)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.compat.monolith.native_training.distributed_ps_factory import (
    create_in_worker_multi_type_hash_table,
    create_in_worker_native_multi_hash_table,
)
from shoal.errors import ConfigError
from support.monolith import GROWING, spec
from support.ranks import run_ranks

pytestmark = pytest.mark.multiproc

RANKS = 2


def told_by_rank() -> list[Any]:
    """What every kind of table reads before and after a step; statuses of a reinitialize."""
    with pytest.raises(ConfigError, match="shard_num"):
        create_in_worker_multi_type_hash_table(RANKS + 1, {"1": spec("any", 1)})
    told = []
    for create in (
        create_in_worker_multi_type_hash_table,
        create_in_worker_native_multi_hash_table,
    ):
        table = create(RANKS, {"1": spec("any", 1), "2": spec("any", 2, GROWING)})
        asked = {"1": torch.tensor([1, 1]), "2": torch.tensor([2])}
        grads = {"1": torch.tensor([[0.5], [0.5]]), "2": torch.tensor([[0.5, 1.0]])}
        read = [table.lookup(asked)]
        table.apply_gradients({slot: (asked[slot], grads[slot]) for slot in asked}, global_step=0)
        read.append(table.lookup(asked))
        told.append([{slot: rows.tolist() for slot, rows in one.items()} for one in read])
        told[-1].append(table.reinitialize("2", torch.tensor([7, 2]))[1].tolist())
    return told


@pytest.mark.slow
def test_a_step_of_all_ranks() -> None:
    n = RANKS
    before = {"1": [[0], [0]], "2": [[0, 0]]}
    after = {"1": [[-n], [-n]], "2": [[-0.5 * n, -n]]}
    for told in run_ranks(n, told_by_rank):
        assert told == [[before, after, [0, 1]]] * 2  # all ranks insert id 7 together
