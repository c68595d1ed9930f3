"""Operations on many ids: the core on several threads, kernels in many blocks."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

from shoal import ops
from shoal.ids import to_signed
from support import ops_reference as reference
from support.backends import BACKENDS, COMPILED, Implementation
from support.ids import all_equal


def many_ids(kind: str) -> Tensor:
    generator = torch.manual_seed(11)
    # Ids of one group are looked for one after another: the square of their number.
    n = 20_001 if kind == "one-group" else 150_001
    if kind == "one":
        return torch.full((n,), -5)
    if kind == "skewed":
        return torch.randint(0, 2**62, (n,), generator=generator).bitwise_right_shift(
            torch.randint(0, 62, (n,), generator=generator)
        )
    if kind == "one-group":  # by the top bits of the hash that the core groups ids by
        hashes = torch.randint(0, 2**55, (n,), generator=generator)
        folded = hashes * to_signed(pow(0x9E3779B97F4A7C15, -1, 2**64))
        return folded ^ ((folded >> 32) & 0xFFFFFFFF)
    if kind == "multiples":
        return torch.randint(0, n, (n,), generator=generator) << 44
    span = {"few": 50, "half": n // 2, "sparse": 2**62}[kind]
    return torch.randint(-span, span, (n,), generator=generator)


@pytest.mark.parametrize("impl", COMPILED)
@pytest.mark.parametrize(
    "kind", ["one", "few", "half", "skewed", "multiples", "one-group", "sparse"]
)
def test_large_dedup_is_the_same_on_any_number_of_threads(impl: Implementation, kind: str) -> None:
    ids_N = many_ids(kind)
    want, sent_N = reference.dedup(ids_N), ids_N.to(impl.device)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert all_equal(impl.dedup(sent_N), want)
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("span", [30, 500, 2**62])
def test_dedup_numbers_ids_across_many_blocks(
    impl: Implementation, span: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if impl.name == "triton":
        kernels = importlib.import_module("shoal.kernels.ids")
        for size in ("_INSERT_BLOCK", "_RANK_BLOCK", "_RANKS_A_WARP"):
            monkeypatch.setattr(kernels, size, 16)
    ids_N = torch.randint(-span, span, (901,), generator=torch.manual_seed(span % 7))
    assert all_equal(impl.dedup(ids_N.to(impl.device)), reference.dedup(ids_N))


@pytest.mark.gpu
def test_dedup_of_so_many_ids_that_blocks_grow() -> None:
    ids_N = torch.randint(0, 1 << 24, (9_000_001,), generator=torch.manual_seed(5))
    assert all_equal(ops.dedup(ids_N.cuda()), ops.dedup(ids_N))


@pytest.mark.parametrize("impl", COMPILED)
@pytest.mark.parametrize("num", [1, 8, 40_000])
def test_large_partition_is_the_same_on_any_number_of_threads(
    impl: Implementation, num: int
) -> None:
    shards_N = torch.randint(0, num, (100_003,), generator=torch.manual_seed(2))
    rows_N = torch.rand(100_003, 3)
    want = reference.partition(shards_N, num)
    shards_N, rows_N = shards_N.to(impl.device), rows_N.to(impl.device)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            got = impl.partition(shards_N, num)
            assert all_equal(got, want)
            grouped_N = impl.permute_rows(rows_N, got.order_N)
            assert torch.equal(grouped_N, rows_N[got.order_N])
            assert torch.equal(impl.unpermute_rows(grouped_N, got.order_N), rows_N)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("impl", COMPILED)
def test_large_fused_reorder_is_the_same_on_any_number_of_threads(impl: Implementation) -> None:
    generator = torch.manual_seed(4)
    sizes = [0, 3, 40_000, 900, 1, 70_000]
    tables = [torch.randint(-30_000, 30_000, (n,), generator=generator) for n in sizes]
    dims = [2, 1, 16, 5, 3, 4]
    want = reference.fused_reorder_by_indices(tables, 7, dims)
    sent = [table.to(impl.device) for table in tables]
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert all_equal(impl.fused_reorder_by_indices(sent, 7, dims), want)
    finally:
        torch.set_num_threads(before)
