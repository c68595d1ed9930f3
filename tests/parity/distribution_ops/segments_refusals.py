"""What segment operations refuse, and what they say."""

from __future__ import annotations

import pytest
import torch

from shoal import ops
from shoal.errors import DTypeError, InputError, ShapeError
from shoal.ops.dispatch import bounds_checks
from support.backends import BACKENDS, Implementation
from support.segments import REDUCES, SEGMENTS, ints

pytestmark = pytest.mark.usefixtures("poisoned")
on_all = pytest.mark.parametrize("impl", BACKENDS)


BAD_OFFSETS = [
    pytest.param([1, 2, 3], "first offset: got 1; allowed: 0", id="start"),
    pytest.param([0, 2, 1, 3], "offset 2: got 1; allowed: 2 to 3", id="falls"),
    pytest.param([0, -1, 3], "offset 1: got -1; allowed: 0 to 3", id="negative"),
    pytest.param([0, 9, 3], "offset 1: got 9; allowed: 0 to 3", id="beyond"),
    pytest.param([0, 2], "number of rows: got 3; allowed: 2, the last offset", id="short"),
    pytest.param([0, 4], "number of rows: got 3; allowed: 4, the last offset", id="long"),
]


@on_all
@pytest.mark.parametrize(("offsets", "message"), BAD_OFFSETS)
@pytest.mark.parametrize("op", [*SEGMENTS, "segment_first_n"])
def test_bad_offsets(impl: Implementation, op: str, offsets: list[int], message: str) -> None:
    extra = (2,) if op == "segment_first_n" else ()
    with bounds_checks(), pytest.raises(ShapeError, match=f"{op}: {message}"):
        getattr(impl, op)(torch.ones(3, 2, device=impl.device), ints(offsets, impl), *extra)


@on_all
@pytest.mark.parametrize(("offsets", "message"), BAD_OFFSETS[:4])
def test_bad_offsets_of_one_table(impl: Implementation, offsets: list[int], message: str) -> None:
    rows = torch.ones(3, 2, device=impl.device)
    splits = [ints([0, 1, 3], impl), ints(offsets, impl)]
    with bounds_checks(), pytest.raises(ShapeError, match=message) as raised:
        impl.fused_reduce_and_split_gpu(splits, [rows, rows], [[2], [1, 1]])
    if impl.name != "reference":
        assert str(raised.value).startswith("fused_reduce_and_split_gpu, table 1: ")
    with bounds_checks(), pytest.raises(ShapeError, match=f"row_ids: {message}"):
        impl.row_ids(splits[1], 3)


@on_all
@pytest.mark.parametrize("index", [[0, 3, 1], [0, -1, 1], [2, 1, 2**40]])
@pytest.mark.parametrize("op", REDUCES)
def test_indices_out_of_range(impl: Implementation, op: str, index: list[int]) -> None:
    at = next(i for i, value in enumerate(index) if not 0 <= value < 3)
    message = rf"{op}: index {at}: got {index[at]}; allowed: 0 to 2\. An index is a row"
    with bounds_checks(), pytest.raises(InputError, match=message):
        getattr(impl, op)(ints(index, impl), torch.ones(3, 2, device=impl.device), 3)


@on_all
def test_indices_must_be_sorted_where_they_are_said_to_be(impl: Implementation) -> None:
    index, rows = ints([0, 2, 1], impl), torch.ones(3, 2, device=impl.device)
    message = "index 2: got 1; allowed: 2, the index before, or more"
    with bounds_checks():
        with pytest.raises(InputError, match=f"reduce_sum: {message}"):
            impl.reduce_sum(index, rows, 3, indices_sorted=True)
        with pytest.raises(InputError, match=f"segment_offsets: {message}"):
            impl.segment_offsets(index, 3)
        with pytest.raises(InputError, match=message):
            impl.fused_sorted_segment_sum([index], [rows], [(3, 2)])
        with pytest.raises(InputError, match="allowed: none: the result has no rows"):
            impl.reduce_sum(index, rows, 0)


@on_all
@pytest.mark.parametrize("op", [*SEGMENTS, "segment_first_n"])
def test_bad_segment_arguments(impl: Implementation, op: str) -> None:
    fn, extra = getattr(impl, op), (2,) if op == "segment_first_n" else ()
    rows, offsets = torch.ones(3, 2, device=impl.device), ints([0, 3], impl)
    with pytest.raises(DTypeError, match=rf"{op}: dtype of offsets: got torch.int32"):
        fn(rows, offsets.int(), *extra)
    with pytest.raises(DTypeError, match=rf"{op}: dtype of rows: got torch.int64"):
        fn(rows.long(), offsets, *extra)
    with pytest.raises(ShapeError, match=rf"{op}: shape of rows: got \(3,\)"):
        fn(rows[:, 0], offsets, *extra)
    with pytest.raises(ShapeError, match=rf"{op}: shape of offsets"):
        fn(rows, offsets[:0], *extra)
    with pytest.raises(InputError, match=f"{op}: devices: got rows on .*, offsets on meta"):
        fn(rows, offsets.to("meta"), *extra)


@on_all
@pytest.mark.parametrize("op", REDUCES)
def test_bad_reduce_arguments(impl: Implementation, op: str) -> None:
    fn, rows = getattr(impl, op), torch.ones(3, 2, device=impl.device)
    index = ints([0, 1, 2], impl)
    with pytest.raises(DTypeError, match=rf"{op}: dtype of indices: got torch.int32"):
        fn(index.int(), rows, 3)
    with pytest.raises(DTypeError, match=rf"{op}: dtype of values"):
        fn(index, rows.int(), 3)
    with pytest.raises(ShapeError, match=f"{op}: number of indices: got 2; allowed: 3"):
        fn(index[:2], rows, 3)
    with pytest.raises(ShapeError, match=f"{op}: shape of indices"):
        fn(index.view(1, 3), rows, 3)
    with pytest.raises(ShapeError, match=rf"{op}: length: got \(3, 2\)"):
        fn(index, rows, (3, 2))
    with pytest.raises(ShapeError, match=f"{op}: length: got -1"):
        fn(index, rows, -1)
    with pytest.raises(InputError, match=f"{op}: devices: got indices on meta"):
        fn(index.to("meta"), rows, 3)


def test_bad_arguments_of_fused_segments() -> None:
    rows, index, offsets = torch.ones(3, 2), torch.tensor([0, 0, 1]), torch.tensor([0, 3])
    with pytest.raises(ShapeError, match="lengths of lists: got indices 1, values 2"):
        ops.fused_sorted_segment_sum([index], [rows, rows], [(2, 2), (2, 2)])
    with pytest.raises(ShapeError, match=r"shape 0: got \(2, 3\); allowed: \(B, 2\)"):
        ops.fused_sorted_segment_sum([index], [rows], [(2, 3)])
    with pytest.raises(DTypeError, match=r"dtypes of tables: .* one dtype for all"):
        ops.fused_sorted_segment_sum([index] * 2, [rows, rows.double()], [(2, 2)] * 2)
    for widths in ([], [1], [3, -1]):
        with pytest.raises(ShapeError, match=r"split widths: .* that sum to 2"):
            ops.fused_reduce_sum_and_split(index, rows, 2, widths)
        with pytest.raises(ShapeError, match=r"split widths: .* that sum to 2"):
            ops.fused_reduce_and_split_gpu([offsets], [rows], [widths])
    with pytest.raises(InputError, match=r"tables\[1\] on meta"):
        meta = rows.to("meta"), offsets.to("meta")
        ops.fused_reduce_and_split_gpu([offsets, meta[1]], [rows, meta[0]], [[2], [2]])
    with pytest.raises(ShapeError, match="segment_first_n: length: got 0; allowed: 1 or more"):
        ops.segment_first_n(rows, offsets, 0)
    with pytest.raises(ShapeError, match="segment_offsets: shape of indices"):
        ops.segment_offsets(index.view(3, 1), 2)
