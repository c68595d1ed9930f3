"""The layout on random features, layouts and ragged batches: every implementation agrees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.ops import (
    FeatureConfig,
    FeatureConfigs,
    LayoutIndex,
    OutConfig,
    SliceConfig,
    fused_embedding_to_layout,
    sharding_sparse_fids,
)
from shoal.ragged import KeyedRagged
from support import ops_reference as reference
from support.backends import BACKENDS, Implementation

WIDTHS = {"s": 5, "t": 9}
ROWS = 4


@st.composite
def configs(draw: Any) -> FeatureConfigs:
    features = {}
    for name in "abcd"[: draw(st.integers(1, 4))]:
        table = draw(st.sampled_from(sorted(WIDTHS)))
        pooling = draw(st.sampled_from(["sum", "mean", "firstn"]))
        length = draw(st.integers(1, 3)) if pooling == "firstn" else 0
        features[name] = FeatureConfig(table, (WIDTHS[table],), pooling, length)
    outs = {}
    for number in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["concat", "stack", "addn", "none"]))
        names = draw(st.lists(st.sampled_from(sorted(features)), min_size=1, max_size=4))
        length = features[names[0]].max_sequence_length
        if kind == "addn" and length:
            kind = "none"
        if kind != "none":
            names = [name for name in names if features[name].max_sequence_length == length]
        width = draw(st.integers(1, 5))
        slices = []
        for name in names:
            if kind in ("concat", "none"):
                width = draw(st.integers(1, features[name].width))
            start = draw(st.integers(0, features[name].width - width))
            slices.append(SliceConfig(name, start, start + width))
        outs[f"layout{number}"] = OutConfig(tuple(slices), kind)
    return FeatureConfigs(features, outs)


@st.composite
def batches(draw: Any, made: FeatureConfigs) -> tuple[KeyedRagged, set[str]]:
    size = draw(st.integers(0, 4))
    keys = draw(st.permutations([*made.features, "other"]))[: draw(st.integers(1, 5))]
    shared = {key for key in keys if key != "other" and draw(st.booleans())}
    cell = st.lists(st.integers(0, ROWS - 1), max_size=5)
    lists = {}
    for key in keys:
        cells = [draw(cell) for _ in range(size)]
        lists[key] = cells[:1] + [[] for _ in cells[1:]] if key in shared else cells
    return KeyedRagged.from_lists(lists), shared


@st.composite
def cases(draw: Any) -> tuple[FeatureConfigs, KeyedRagged, set[str]]:
    made = draw(configs())
    return (made, *draw(batches(made)))


def laid(
    impl: Implementation, rows: list[Tensor], index: LayoutIndex, made: FeatureConfigs
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Outputs, and gradients of the rows for gradients that all differ."""
    own = [row.to(impl.device).requires_grad_() for row in rows]
    there = index.to(impl.device)
    with impl.chosen():
        outputs = impl.fused_embedding_to_layout(own, there, made)
        weights = [torch.arange(1.0, o.numel() + 1).view(o.shape).to(o) for o in outputs]
        loss = sum((out * weight).sum() for out, weight in zip(outputs, weights, strict=True))
        zero = sum((row * 0).sum() for row in own)
        return outputs, torch.autograd.grad(loss + zero, own)


@pytest.mark.slow
@pytest.mark.parametrize("impl", BACKENDS[1:])
def test_layouts_agree(impl: Implementation) -> None:
    examples = 12 if impl.interpreted else 150

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(cases())
    def run(case: tuple[FeatureConfigs, KeyedRagged, set[str]]) -> None:
        made, batch, shared = case
        generator = torch.Generator().manual_seed(0)
        rows = [torch.randn(ROWS, WIDTHS[table], generator=generator) for table in made.tables]
        index = LayoutIndex.from_keyed(batch, batch.values_N, WIDTHS, made, shared=shared)
        outputs, grads = laid(impl, rows, index, made)
        want, want_grads = laid(Implementation("reference", "cpu"), rows, index, made)
        for one, other in zip([*outputs, *grads], [*want, *want_grads], strict=True):
            torch.testing.assert_close(one.cpu(), other)

    run()


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(1, 4), st.booleans(), st.sampled_from(["unsigned_mod", "floormod"]))
def test_sharded_ids_agree_and_lay_out_alike(
    case: tuple[FeatureConfigs, KeyedRagged, set[str]], ps_num: int, unique: bool, rule: Any
) -> None:
    made, batch, shared = case
    # Ids of all signs that name the same rows.
    ids = torch.where(batch.values_N % 2 == 0, -(2**62) + batch.values_N, batch.values_N)
    signed = KeyedRagged(batch.keys, ids, batch.offsets_FB1)
    options = {"unique": unique, "shared": shared, "rule": rule}
    found = sharding_sparse_fids(signed, ps_num, made, **options)
    other = reference.sharding_sparse_fids(signed, ps_num, made, **options)
    for name in ("fid_list", "row_splits_FP", "fid_sizes_TP", "emb_sizes_TP"):
        assert torch.equal(getattr(found, name), getattr(other, name)), name
    for name in ("rows_N", "buffer_N", "cell_splits_C1", "cells_RF"):
        assert torch.equal(getattr(found.index, name), getattr(other.index, name)), name
    generator = torch.Generator().manual_seed(0)
    rows = {table: torch.randn(ROWS, WIDTHS[table], generator=generator) for table in made.tables}
    buffers = [
        rows[key.split(":")[0]][torch.remainder(fids, 2**62)].reshape(-1)
        for key, fids in found.fids.items()
    ]
    index = LayoutIndex.from_keyed(batch, batch.values_N, WIDTHS, made, shared=shared)
    want = fused_embedding_to_layout(list(rows.values()), index, made)
    forms = [found.index, *(found.monolith(version) for version in (2, 3, 5))]
    for form in forms:
        got = fused_embedding_to_layout(buffers, form, made)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
