"""Operations on ids: every implementation against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shoal.ops as ops
from shoal.placement import floormod, unsigned_mod
from shoal.ragged import Ragged
from support import ops_reference as reference
from support.backends import BACKENDS
from support.ids import EXTREMES, all_equal, int64, moved

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("ids", [[], [5], [7, -3, 7, 9, -3, 7], EXTREMES], ids=str)
def test_dedup(impl: Any, ids: list[int]) -> None:
    ids_N = int64(*ids)
    assert all_equal(impl.dedup(moved(impl, ids_N)), reference.dedup(ids_N))


@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("ids", [[], [7, -3, 7, 9, -3, 7], EXTREMES], ids=str)
def test_dedup_into(impl: Any, ids: list[int]) -> None:
    ids_N = int64(*ids)
    want = reference.dedup(ids_N)
    outs = [torch.full_like(ids_N, -7, device=impl.device) for _ in range(3)]
    size = torch.full((1,), -7, device=impl.device)
    impl.dedup_into(
        moved(impl, ids_N),
        ids_out_N=outs[0],
        counts_out_N=outs[1],
        inverse_out_N=outs[2],
        size_out_1=size,
    )
    found = int(size)
    assert all_equal([outs[0][:found], outs[1][:found], outs[2]], want)
    assert (outs[0][found:] == -7).all() and (outs[1][found:] == -7).all()


@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("n", "num"), [(0, 1), (0, 300), (1, 1), (700, 1), (600, 8), (600, 300)])
def test_partition(impl: Any, dtype: torch.dtype, n: int, num: int) -> None:
    shards_N = torch.randint(0, num, (n,), generator=torch.manual_seed(n), dtype=dtype)
    got = impl.partition(moved(impl, shards_N), num)
    assert all_equal(got, reference.partition(shards_N, num))
    assert got.order_N.dtype == got.sizes_W.dtype == torch.int64


@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 5), (0,), (300,)], ids=str)
def test_split_by_indices_of_any_shape(
    impl: Any, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    generator = torch.manual_seed(3)
    indices_N = torch.randint(0, 4, (37,), generator=generator)
    tensor_N = torch.randint(-9, 9, (37, *shape), generator=generator).to(dtype)
    got = impl.split_by_indices(*moved(impl, indices_N, tensor_N), 4)
    assert all_equal(got, reference.split_by_indices(indices_N, tensor_N, 4))


@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("shard_by", [floormod, unsigned_mod, lambda ids, num: (ids & 7) % num])
def test_fused_reorder_shards_by_any_rule(impl: Any, shard_by: Any) -> None:
    tables = [int64(*EXTREMES), int64(), int64(*EXTREMES[::-1], 5, -5, 5)]
    want = reference.fused_reorder_by_indices(tables, 5, [4, 1, 3], shard_by=shard_by)
    sent = [table.to(impl.device) for table in tables]
    assert all_equal(impl.fused_reorder_by_indices(sent, 5, [4, 1, 3], shard_by=shard_by), want)


@pytest.mark.parametrize("num", [1, 2, 3, 7, 8, 1000, 2**20 - 3])
@pytest.mark.parametrize(("rule", "modulus"), [(floormod, 0), (unsigned_mod, 2**64)])
def test_shard_rules_agree_with_python(rule: Any, modulus: int, num: int) -> None:
    ids_N = torch.cat(
        [
            int64(*EXTREMES, -7, 2**62 + 1),
            torch.randint(-(2**63), 2**63 - 1, (50,)),
            int64(-num, num),
        ]
    )
    found = ops.fused_reorder_by_indices([ids_N], num, shard_by=rule)
    owners_U = torch.arange(num).repeat_interleave(found.shard_sizes_W)
    want = [(id_ % modulus if modulus else id_) % num for id_ in found.ids_U.tolist()]
    assert owners_U.tolist() == want


@pytest.mark.parametrize("impl", BACKENDS)
def test_fused_reorder_into(impl: Any) -> None:
    if impl.name == "reference":
        pytest.skip("the reference has no such form")
    tables = [int64(3, 4, 3, 8), int64(), int64(9, 9, 1)]
    want = reference.fused_reorder_by_indices(tables, 2, [1, 2, 3])
    sent = [table.to(impl.device) for table in tables]
    ids, counts, offsets = (torch.full((7,), -7, device=impl.device) for _ in range(3))
    sizes, size = (torch.full((n,), -7, device=impl.device) for n in (6, 1))
    impl.fused_reorder_by_indices_into(
        sent,
        2,
        [1, 2, 3],
        ids_out_N=ids,
        counts_out_N=counts,
        slot_sizes_out_WK=sizes,
        offsets_out_N=offsets,
        size_out_1=size,
    )
    found = int(size)
    got = [ids[:found], counts[:found], sizes, offsets]
    assert all_equal(got, [want.ids_U, want.counts_U, want.slot_sizes_WK, want.offsets_N])


@pytest.mark.parametrize("impl", BACKENDS)
def test_reorder_takes_whole_rows_and_the_first_shard(impl: Any) -> None:
    rows = torch.tensor([[1, 2], [1, 3], [1, 2], [4, 4], [1, 3]])
    shards = torch.tensor([1, 0, 0, 1, 1], dtype=torch.int32)
    got = impl.reorder_by_indices(*moved(impl, rows, shards), 2)
    assert got.ids_U.tolist() == [[1, 3], [4, 4], [1, 2]]
    assert got.sizes_W.tolist() == [1, 2]
    none = impl.reorder_by_indices(*moved(impl, rows[:0], shards[:0]), 2)
    assert none.ids_U.shape == (0, 2)
    assert none.sizes_W.tolist() == [0, 0]


@pytest.mark.parametrize("impl", BACKENDS)
def test_ragged_partition_holds_the_splits_in_one_tensor(impl: Any) -> None:
    ragged = Ragged.from_lists([[5, 6], [], [7, 8, 9]])
    indices = int64(2, 0, 0, 2, 0)
    want = reference.ragged_partition(indices, ragged, 3)
    got = impl.ragged_partition(moved(impl, indices).int(), ragged.to(impl.device), 3)
    assert all_equal(got, want)
