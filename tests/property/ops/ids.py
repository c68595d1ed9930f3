"""Core and kernels equal the plain-torch reference on any ids, any shards, any jagged rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.placement import floormod, unsigned_mod
from shoal.ragged import Ragged
from support import ops_reference as reference
from support.backends import BACKENDS

FAST = [backend for backend in BACKENDS if backend.id != "reference"]
IDS = st.one_of(
    st.integers(-3, 3), st.sampled_from([-(2**63), 2**63 - 1]), st.integers(-(2**63), 2**63 - 1)
)
LISTS = st.lists(IDS, max_size=40)
ROWS = st.lists(st.lists(IDS, max_size=6), min_size=1, max_size=6)
BRIEF = settings(max_examples=25, deadline=None)


def int64(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def same(got: Any, want: Any) -> None:
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one.cpu(), other.cpu())


@pytest.mark.parametrize("impl", FAST)
@BRIEF
@given(ids=LISTS)
def test_dedup(impl: Any, ids: list[int]) -> None:
    ids_N = int64(ids)
    found = impl.dedup(ids_N.to(impl.device))
    same(found, reference.dedup(ids_N))
    assert found.ids_U.tolist() == list(dict.fromkeys(ids))


@pytest.mark.parametrize("impl", FAST)
@BRIEF
@given(data=st.data(), num=st.integers(1, 40))
def test_partition_and_back(impl: Any, data: st.DataObject, num: int) -> None:
    shards_N = int64(data.draw(st.lists(st.integers(0, num - 1), max_size=40)))
    found = impl.partition(shards_N.to(impl.device), num)
    same(found, reference.partition(shards_N, num))
    rows_N = torch.arange(3.0 * shards_N.numel()).view(-1, 3).to(impl.device)
    grouped_N = impl.permute_rows(rows_N, found.order_N)
    assert torch.equal(impl.unpermute_rows(grouped_N, found.order_N), rows_N)


@pytest.mark.parametrize("impl", FAST)
@BRIEF
@given(rows=ROWS, data=st.data(), num=st.integers(1, 4))
def test_ragged_split(impl: Any, rows: Any, data: st.DataObject, num: int) -> None:
    ragged = Ragged.from_lists(rows)
    n = ragged.values.numel()
    indices_N = int64(data.draw(st.lists(st.integers(0, num - 1), min_size=n, max_size=n)))
    got = impl.ragged_split_by_indices(indices_N.to(impl.device), ragged.to(impl.device), num)
    want = reference.ragged_split_by_indices(indices_N, ragged, num)
    for ours, theirs in zip(got, want, strict=True):
        lists = [part.validate().to("cpu").to_lists() for part in ours]
        assert lists == [part.to_lists() for part in theirs]


@pytest.mark.slow
@pytest.mark.parametrize("impl", FAST)
@BRIEF
@given(
    rows=ROWS,
    num=st.integers(1, 5),
    rule=st.sampled_from([floormod, unsigned_mod]),
    data=st.data(),
)
def test_fused_reorder(impl: Any, rows: Any, num: int, rule: Any, data: st.DataObject) -> None:
    dims = data.draw(st.lists(st.integers(1, 9), min_size=len(rows), max_size=len(rows)))
    ragged = Ragged.from_lists(rows)
    got = impl.fused_reorder_by_indices(ragged.to(impl.device), num, dims, shard_by=rule)
    same(got, reference.fused_reorder_by_indices(ragged, num, dims, shard_by=rule))


@pytest.mark.slow
@pytest.mark.parametrize("impl", FAST)
@BRIEF
@given(ids=st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), max_size=12))
def test_reorder_of_rows(impl: Any, ids: list[list[int]]) -> None:
    rows_NC = int64([value for row in ids for value in row]).view(-1, 2)
    shards_N = rows_NC.sum(1) % 3
    got = impl.reorder_by_indices(rows_NC.to(impl.device), shards_N.to(impl.device), 3)
    same(got, reference.reorder_by_indices(rows_NC, shards_N, 3))


@pytest.mark.slow
@pytest.mark.parametrize("impl", FAST)
@BRIEF
@given(rows=ROWS, data=st.data())
def test_unique_key(impl: Any, rows: Any, data: st.DataObject) -> None:
    dims = data.draw(st.lists(st.integers(1, 5), min_size=len(rows), max_size=len(rows)))
    ragged = Ragged.from_lists(rows)
    got = impl.unique_key_with_value_and_offset(ragged.to(impl.device), dims)
    want = reference.unique_key_with_value_and_offset(ragged, dims)
    assert got.unique_key.to("cpu").to_lists() == want.unique_key.to_lists()
    same(got.value_offset, want.value_offset)
    assert got.value_buffer.shape == want.value_buffer.shape


@pytest.mark.parametrize("impl", FAST)
@BRIEF
@given(parts=st.lists(st.lists(st.integers(0, 4), max_size=5), min_size=1, max_size=5))
def test_row_numbers_and_joined_splits(impl: Any, parts: list[list[int]]) -> None:
    splits = [int64([0, *lengths]).cumsum(0) for lengths in parts]
    sizes_P = int64([split.numel() for split in splits])
    splits_T = torch.cat(splits)
    joined = impl.normalize_merged_split(splits_T.to(impl.device), sizes_P.to(impl.device))
    assert torch.equal(joined.cpu(), reference.normalize_merged_split(splits_T, sizes_P))
    values = torch.zeros(int(joined[-1]), dtype=torch.int64, device=impl.device)
    ragged = Ragged(values, joined)
    assert torch.equal(impl.fused_value_rowids(ragged), reference.fused_value_rowids(ragged))
