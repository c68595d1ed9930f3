"""Whole rows of GPU tables: export, load, assignment, in the order and the bits of the core."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from shoal.ids import salt
from shoal.kernels.rows import read_metadata, write_metadata, write_weights
from shoal.kernels.tables import RowForm
from shoal.placement import hash_ids, sort_key
from shoal.table.cuda import export
from shoal.table.values import RowChunk
from support.device_fill import LANE, Meta, filled
from support.device_tables import TableSize, make_tables

SALT = salt("t")
SIZE = TableSize(salt=SALT)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def form_of(dtype: torch.dtype, dim: int, state_width: int) -> tuple[RowForm, TableSize]:
    size = TableSize(rows=400, dim=dim, state_width=state_width, dtype=dtype, salt=SALT)
    return RowForm(dim=dim, state_width=state_width, dtype=dtype, segments=()), size


def random_chunk(form: RowForm, ids: Sequence[int]) -> RowChunk:
    rows = len(ids)
    weights = torch.randn(rows, form.dim, dtype=torch.float64).to(form.dtype)
    weights[0, 0] = torch.nan
    words = torch.randint(1, 2**32, (3, rows))
    words[:, :2] = torch.tensor([[1, 2**32 - 1], [0, 2**32 - 1], [0, 2**32 - 1]])[:, :rows]
    state = torch.randn(rows, form.state_width, dtype=form.real)
    return RowChunk("t", torch.tensor(ids), weights, state, *words)


def same_rows(one: RowChunk, other: RowChunk) -> bool:
    return one.table == other.table and all(
        torch.equal(bits(getattr(one, name)), bits(getattr(other, name)))
        for name in ("ids", "weights", "state", "versions", "last_seen_s", "counts")
    )


def bits(values: Tensor) -> Tensor:
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.contiguous().view(words[values.element_size()])


def picked(chunk: RowChunk, order: Tensor) -> RowChunk:
    parts = (chunk.ids, chunk.weights, chunk.state)
    stamps = (chunk.versions, chunk.last_seen_s, chunk.counts)
    return RowChunk(chunk.table, *(part[order] for part in (*parts, *stamps)))


@pytest.mark.parametrize("device", LANE)
class TestWholeRows:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(("dim", "state_width"), [(1, 0), (5, 3), (16, 33)])
    def test_round_trip_in_the_order_of_hashes(
        self,
        device: str,
        dtype: torch.dtype,
        dim: int,
        state_width: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        form, size = form_of(dtype, dim, state_width)
        monkeypatch.setattr(export, "_PIECE_BYTES", 9 * (form.weight_bytes + 32))
        tables = make_tables([SIZE, size], device)
        ids = [*random.Random(dim).sample(range(-1000, 1000), 20), -(2**63), 2**63 - 1]
        chunk = random_chunk(form, ids)
        handles_R = filled(tables, 1, [Meta(id_) for id_ in ids])
        export.write_rows(tables.layout, form, handles_R, chunk)
        order = sort_key(hash_ids("t", chunk.ids)).argsort()
        exported = export.export_rows(tables.layout, form, "t", handles_R)
        assert same_rows(exported, picked(chunk, order))
        one = export.read_rows(tables.layout, form, "t", handles_R[3:4])
        assert same_rows(one, picked(chunk, torch.tensor([3])))

    def test_no_rows(self, device: str) -> None:
        form, size = form_of(torch.float32, 4, 2)
        tables = make_tables([size], device)
        none_R = torch.empty(0, dtype=torch.int32, device=device)
        chunk = export.export_rows(tables.layout, form, "t", none_R)
        assert (chunk.weights.shape, chunk.state.shape) == ((0, 4), (0, 2))
        export.write_rows(tables.layout, form, none_R, chunk)

    def test_metadata_alone(self, device: str) -> None:
        tables = make_tables([SIZE], device)
        handles_R = filled(tables, 0, [Meta(id_, 7, 8, 9) for id_ in range(4)])
        counts = torch.tensor([5, 6, 2**32 - 1, 5, 4], device=device)
        twice = torch.cat([handles_R[[0, 1, 2, 0]], torch.full_like(handles_R[:1], -1)])
        write_metadata(tables.layout, twice, counts + 1 - counts, counts * 0 + 3, counts)
        assert read_metadata(tables.layout, handles_R).tolist() == [
            [0, 1, 2, 3],
            [1, 1, 1, 9],
            [3, 3, 3, 7],
            [5, 6, 2**32 - 1, 8],
        ]


@pytest.mark.parametrize("device", LANE)
class TestWriteWeights:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("add", [False, True], ids=["assign", "add"])
    @pytest.mark.parametrize("dim", [3, 130])
    def test_position_by_position(
        self, device: str, dtype: torch.dtype, add: bool, dim: int
    ) -> None:
        form, size = form_of(dtype, dim, 2)
        tables = make_tables([size], device)
        ids = list(range(12))
        chunk = random_chunk(form, ids)
        handles_R = filled(tables, 0, [Meta(id_) for id_ in ids])
        export.write_rows(tables.layout, form, handles_R, chunk)
        picks = random.Random(dim).choices(range(10), k=60) + [3] * 20
        values_ND = torch.randn(len(picks) + 1, dim, dtype=torch.float64).to(form.real)
        handles_N = torch.cat([handles_R[picks], handles_R[:1] * 0 - 1])
        write_weights(
            tables.layout,
            form,
            handles_N,
            values_ND.to(device),
            add=add,
            version=2**32 - 2,
            event_time_s=2**31,
        )
        weights, versions, seen = (
            chunk.weights.clone(),
            chunk.versions.clone(),
            chunk.last_seen_s.clone(),
        )
        for row, value in zip(picks, values_ND, strict=False):
            weights[row] = (weights[row].to(form.real) + value if add else value).to(dtype)
            versions[row], seen[row] = 2**32 - 2, max(int(seen[row]), 2**31)
        # Handles are in the order of ids; what is exported is in the order of hashes.
        exported = export.export_rows(tables.layout, form, "t", handles_R)
        back = picked(exported, exported.ids.argsort())
        assert torch.equal(back.weights.nan_to_num(9.0), weights.nan_to_num(9.0))
        assert torch.equal(back.versions, versions)
        assert torch.equal(back.last_seen_s, seen)
        assert torch.equal(back.counts, chunk.counts)
        assert torch.equal(back.state, chunk.state)
