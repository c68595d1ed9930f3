"""The rule of the fused reorder that sends ids to the rank of their share of the hashes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoal.ids import salt, to_signed
from shoal.ops.ids_by_shard import fused_reorder
from shoal.placement import Hosted, hash_ids, owners
from support import ops_reference as reference

WORLD_SIZE = 4
HOSTED = (
    Hosted("a", 0, 3, (0, 1, 2, 3)),
    Hosted("b", 0, 2, (3, 1)),
    Hosted("c", 0, 1, (2,)),
    Hosted("d", 0, 5, (2, 0, 3)),
)
DIMS = [one.stop for one in HOSTED]


def lines() -> Tensor:
    lines_KX = torch.zeros(len(HOSTED), 2 + WORLD_SIZE, dtype=torch.int64)
    for line, one in zip(lines_KX, HOSTED, strict=True):
        line[0], line[1] = to_signed(salt(one.table)), len(one.ranks)
        line[2 : 2 + len(one.ranks)] = torch.tensor(one.ranks)
    return lines_KX


def spans(sizes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(3)
    limit = (1 << 63) - 1
    return [torch.randint(-limit, limit, (40,))[torch.randint(0, 40, (size,))] for size in sizes]


@pytest.mark.parametrize("sizes", [(50, 3, 9, 70), (0, 0, 0, 0), (0, 30_000, 0, 1)])
def test_core_sends_ids_to_their_owners(sizes: tuple[int, ...]) -> None:
    ids = spans(sizes)
    got = fused_reorder(ids, None, DIMS, WORLD_SIZE, "hash_ranges", lines())
    compare(got, ids)


def test_kernel_sends_ids_to_their_owners() -> None:
    kernels = pytest.importorskip("shoal.kernels.ids")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ids = spans((50, 3, 0, 70))
    moved = [part.to(device) for part in ids]
    got = kernels.fused_reorder(moved, None, DIMS, WORLD_SIZE, "hash_ranges", lines().to(device))
    compare(tuple(part.cpu() for part in got), ids)


def compare(got: tuple[Tensor, ...], ids: list[Tensor]) -> None:
    ranks = [owners(one, hash_ids(one.table, part)) for one, part in zip(HOSTED, ids, strict=True)]
    want = reference.fused_reorder_given(ids, WORLD_SIZE, DIMS, ranks)
    pairs = zip(got, (want.ids_U, want.counts_U, want.slot_sizes_WK, want.offsets_N), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=0, atol=0)
