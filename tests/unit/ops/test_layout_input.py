"""What the layout refuses, on every implementation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoal.ops import (
    LayoutIndex,
    MonolithOffsets,
    fused_embedding_to_layout,
    fused_embedding_to_layout_grad,
)
from support.backends import BACKENDS, Implementation
from support.layout_case import make_case
from support.layout_two import TWO, two_index, two_rows


def broken(**fields: Tensor) -> LayoutIndex:
    good = two_index()
    names = ("rows_N", "buffer_N", "cell_splits_C1", "cells_RF")
    made = {name: getattr(good, name).clone() for name in names}
    return LayoutIndex(**{**made, **fields}, batch_sizes=good.batch_sizes)


def changed(name: str, at: tuple[int, ...], value: int) -> Tensor:
    tensor: Tensor = getattr(two_index(), name).clone()
    tensor[at] = value
    return tensor


BAD_VALUES = {
    "row beyond its buffer": ("rows_N", (0,), 9, r"rows_N\[0\].*got 9; allowed: 0..8 in buffer 0"),
    "negative row": ("rows_N", (1,), -1, r"rows_N\[1\].*got -1"),
    "no such buffer": ("buffer_N", (2,), 2, r"buffer_N\[2\].*got 2; allowed: 0..1"),
    "negative buffer": ("buffer_N", (2,), -1, r"buffer_N\[2\].*got -1"),
    "falling splits": (
        "cell_splits_C1",
        (2,),
        1,
        r"cell_splits_C1: offset 2: got 1; allowed: 3 to 11",
    ),
    "negative splits": (
        "cell_splits_C1",
        (0,),
        -1,
        "cell_splits_C1: first offset: got -1; allowed: 0",
    ),
    "splits that end early": (
        "cell_splits_C1",
        (-1,),
        10,
        "cell_splits_C1: number of rows: got 11; allowed: 10, the last offset",
    ),
    "cells that do not exist": ("cells_RF", (0, 0, 0), 10, "feature 0 .*got 3 from cell 10"),
    "too few cells": (
        "cells_RF",
        (0, 1, 1),
        2,
        "feature 1 .*got 2 from cell 3; allowed: none, or 3",
    ),
}


@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("case", BAD_VALUES)
def test_bad_values_are_refused(impl: Implementation, case: str) -> None:
    if impl.device != "cpu":
        pytest.skip("off by default on CUDA")
    name, at, value, message = BAD_VALUES[case]
    index = broken(**{name: changed(name, at, value)})
    with pytest.raises(ValueError, match=f"fused_embedding_to_layout: .*{message}"):
        impl.fused_embedding_to_layout(two_rows(), index, TWO)
    outputs = [out * 0 for out in fused_embedding_to_layout(two_rows(), two_index(), TWO)]
    with pytest.raises(ValueError, match=message):
        impl.fused_embedding_to_layout_grad(outputs, two_rows(), index, TWO)


@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("version", [1, 2, 3, 4, 5])
def test_packed_buffer_out_of_range(impl: Implementation, version: int) -> None:
    if impl.device != "cpu":
        pytest.skip("off by default on CUDA")
    case = make_case(2, (2, 2, 2), ps_num=2, one_width=True)
    offsets = case.offsets(version)
    offsets.fid_offset.view(torch.int64)[3] |= 77 << 32
    with pytest.raises(ValueError, match=r"buffer_N\[3\]"):
        impl.fused_embedding_to_layout(case.buffers(version), offsets, case.configs)


META = torch.empty(0, device="meta")
BAD_ARGUMENTS = {
    "int32 rows": (
        lambda: broken(rows_N=two_index().rows_N.int()),
        "dtype of rows_N: got torch.int32",
    ),
    "int64 buffers": (lambda: broken(buffer_N=two_index().buffer_N.long()), "dtype of buffer_N"),
    "int32 fid_offset": (
        lambda: MonolithOffsets(META.int(), META.int(), META.int(), 1, 1),
        "dtype of fid_offset: got torch.int32",
    ),
    "lengths": (
        lambda: broken(buffer_N=two_index().buffer_N[:-1]),
        "length of buffer_N: got 10 for 11",
    ),
    "no splits": (lambda: broken(cell_splits_C1=torch.empty(0).long()), "length of cell_splits_C1"),
    "devices in the index": (
        lambda: broken(buffer_N=two_index().buffer_N.to("meta")),
        "device of buffer_N: got meta; allowed: cpu",
    ),
    "devices": (lambda: two_index().to("meta"), "device of offsets: got meta; allowed: cpu"),
    "other features": (
        lambda: broken(cells_RF=two_index().cells_RF[:, :2]),
        "features of cells_RF",
    ),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_arguments_are_refused(case: str) -> None:
    make, message = BAD_ARGUMENTS[case]
    with pytest.raises(ValueError, match=message):
        fused_embedding_to_layout(two_rows(), make(), TWO)


def test_bad_buffers_and_gradients_are_refused() -> None:
    rows, index = two_rows(), two_index()
    outputs = fused_embedding_to_layout(rows, index, TWO)
    for buffers, message in (
        ([], "no tensors"),
        ([rows[0], rows[1].double()], r"dtype of embeddings_list\[1\]"),
        ([rows[0], rows[1].long()], r"dtype of embeddings_list\[1\]"),
        ([rows[0], rows[1].to("meta")], r"device of embeddings_list\[1\]: got meta"),
        ([rows[0].half(), rows[1].half()], "float32 or float64 on the CPU"),
    ):
        with pytest.raises(ValueError, match=message):
            fused_embedding_to_layout(buffers, index, TWO)
    for grads, message in (
        (outputs[:-1], "layout_tensors_grad: got 4; allowed: 5"),
        ([outputs[0].t(), *outputs[1:]], r"shape of layout_tensors_grad\[0\]: got \(1, 3\)"),
        ([outputs[0].double(), *outputs[1:]], r"dtype and device of layout_tensors_grad\[0\]"),
    ):
        with pytest.raises(ValueError, match=message):
            fused_embedding_to_layout_grad(grads, rows, index, TWO)
