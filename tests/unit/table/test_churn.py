"""Rows that come and go for ever: a table of bounded size stays bounded, and never hangs."""

from __future__ import annotations

import pytest
import torch

from shoal import Expiry, Segment, Table, TableSpec, initializers, optimizers

SEGMENT = Segment(dim=1, initializer=initializers.Constant(0.5), optimizer=optimizers.SGD(lr=0.1))
ROUNDS, IDS_A_ROUND = 6000, 4


def random_ids(seed: int) -> torch.Tensor:
    """int64 [ROUNDS, IDS_A_ROUND], in practice all distinct."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**62), 2**62, (ROUNDS, IDS_A_ROUND), generator=generator)


@pytest.mark.parametrize("on_full", ["lru", "lfu"])
@pytest.mark.parametrize("capacity_rows", [16, 64, 128])
def test_a_full_table_takes_new_ids_for_ever(capacity_rows: int, on_full: str) -> None:
    spec = TableSpec(
        name="full",
        segments=(SEGMENT,),
        capacity_rows=capacity_rows,
        on_full=on_full,  # type: ignore[arg-type]
    )
    table = Table(spec)
    for now_s, ids in enumerate(random_ids(capacity_rows)):
        table.assign(ids, torch.full((IDS_A_ROUND, 1), float(now_s)), event_time_s=now_s)
        assert len(table) <= capacity_rows
        weights, found = table.find(ids)
        assert found.all()
        assert (weights == now_s).all()
    stats = table.stats()
    assert stats.inserted - stats.evicted == stats.rows == len(table)


@pytest.mark.parametrize("ttl_s", [4, 16, 32])
def test_rows_that_expire_make_room_for_ever(ttl_s: int) -> None:
    table = Table(TableSpec(name="ttl", segments=(SEGMENT,), expiry=Expiry(ttl_s=ttl_s)))
    rounds = random_ids(ttl_s)
    first = table.stats().bytes_total
    for now_s, ids in enumerate(rounds):
        table.assign(ids, torch.full((IDS_A_ROUND, 1), float(now_s)), event_time_s=now_s)
        table.evict(now_s)
        assert len(table) == min(now_s + 1, ttl_s) * IDS_A_ROUND
        if now_s == 10 * ttl_s:
            first = table.stats().bytes_total
    assert table.stats().bytes_total == first
    weights, found = table.find(rounds[-ttl_s:].flatten())
    assert found.all()
    assert weights.flatten().tolist() == [
        float(now_s) for now_s in range(ROUNDS - ttl_s, ROUNDS) for _ in range(IDS_A_ROUND)
    ]
    assert not table.find(rounds[-ttl_s - 1])[1].any()
