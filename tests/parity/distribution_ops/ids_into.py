"""Forms with given outputs: the same results, what lies behind them untouched, no waiting."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal import ops
from shoal.errors import DTypeError, InputError, ShapeError
from shoal.ops.dispatch import bounds_checks
from shoal.ragged import Ragged
from support import ops_reference as reference
from support.backends import BACKENDS
from support.ids import all_equal, int64, moved

pytestmark = pytest.mark.usefixtures("poisoned")
FORMS = [param for param in BACKENDS if param.id != "reference"]
"""The reference has none of these."""


def blanks(device: str, **shapes: Any) -> dict[str, Tensor]:
    return {name: torch.full(shape, -7, device=device) for name, shape in shapes.items()}


def reorder_outs(ids_N: Tensor, num: int, device: str) -> dict[str, Tensor]:
    return blanks(device, ids_out_N=ids_N.shape, sizes_out_W=(num,), size_out_1=(1,))


def key_outs(n: int, slots: int, device: str) -> dict[str, Tensor]:
    return blanks(
        device,
        keys_out_N=(n,),
        key_splits_out_K1=(slots + 1,),
        offsets_out_N=(n,),
        splits_out_N1=(n + 1,),
        size_out_1=(1,),
    )


@pytest.mark.parametrize("impl", FORMS)
@pytest.mark.parametrize(
    ("ids", "shards", "num"),
    [
        ([], [], 2),
        ([5, 5, 5], [1, 0, 0], 2),
        ([3, 9, 3, 4, -1, 9, 7], [2, 0, 2, 0, 0, 0, 2], 4),
        ([[1, 2], [1, 3], [1, 2], [4, 4], [1, 3]], [1, 0, 0, 1, 1], 2),
    ],
    ids=["none", "one", "several", "rows"],
)
def test_reorder_into(impl: Any, ids: Any, shards: list[int], num: int) -> None:
    ids_N, shards_N = torch.tensor(ids, dtype=torch.int64), int64(*shards)
    want = reference.reorder_by_indices(ids_N, shards_N, num)
    outs = reorder_outs(ids_N, num, impl.device)
    impl.reorder_by_indices_into(*moved(impl, ids_N, shards_N), num, **outs)
    found = int(outs["size_out_1"])
    assert all_equal([outs["ids_out_N"][:found], outs["sizes_out_W"]], want)
    assert (outs["ids_out_N"][found:] == -7).all()


def test_reorder_into_of_rows_without_any() -> None:
    outs = reorder_outs(torch.empty(0, 2), 3, "cpu")
    ops.reorder_by_indices_into(int64().view(0, 2), int64(), 3, **outs)
    assert outs["sizes_out_W"].tolist() == [0, 0, 0]
    assert outs["size_out_1"].tolist() == [0]


@pytest.mark.parametrize("impl", FORMS)
@pytest.mark.parametrize(
    "rows", [[[]], [[], [4, 4, 4]], [[7, 2, 7, 7], [], [2, 9, 2], [1]]], ids=["none", "one", "some"]
)
def test_unique_key_into(impl: Any, rows: list[list[int]]) -> None:
    dims = [3, 1, 2, 5][: len(rows)]
    key = Ragged.from_lists(rows)
    want = reference.unique_key_with_value_and_offset(key, dims)
    n = key.values.numel()
    outs = key_outs(n, len(rows), impl.device)
    impl.unique_key_with_value_and_offset_into(key.to(impl.device), dims, **outs)
    found = int(outs["size_out_1"])
    splits_N1 = outs["splits_out_N1"]
    got = [outs["offsets_out_N"], splits_N1[: found + 1], outs["key_splits_out_K1"]]
    assert all_equal(got, want.value_offset)
    assert torch.equal(outs["keys_out_N"][:found].cpu(), want.unique_key.values)
    assert (outs["keys_out_N"][found:] == -7).all()
    assert (splits_N1[found:] == n).all()


IDS, KEY = int64(3, 4, 3), Ragged.from_lists([[3, 4], [3]])
REORDER, KEYS = reorder_outs(IDS, 2, "cpu"), key_outs(3, 2, "cpu")
BAD = [
    (ops.reorder_by_indices_into, (IDS, IDS.bool().long(), 2), REORDER, "ids_out_N", ShapeError),
    (ops.reorder_by_indices_into, (IDS, IDS.bool().long(), 2), REORDER, "sizes_out_W", ShapeError),
    (ops.reorder_by_indices_into, (IDS, IDS.bool().long(), 2), REORDER, "size_out_1", ShapeError),
    *(
        (ops.unique_key_with_value_and_offset_into, (KEY, [1, 2]), KEYS, name, ShapeError)
        for name in KEYS
    ),
]


@pytest.mark.parametrize(("call", "inputs", "outs", "name", "error"), BAD)
def test_outputs_that_do_not_fit_are_refused(
    call: Any, inputs: Any, outs: dict[str, Tensor], name: str, error: Any
) -> None:
    op = call.__name__
    with pytest.raises(error, match=f"^{op}: shape of {name}: "):
        call(*inputs, **(outs | {name: outs[name].new_zeros(9)}))
    with pytest.raises(DTypeError, match=f"^{op}: dtype of {name}: got torch.int32"):
        call(*inputs, **(outs | {name: outs[name].int()}))
    with pytest.raises(InputError, match=f"^{op}: devices: .*{name} on meta"):
        call(*inputs, **(outs | {name: outs[name].to("meta")}))


@pytest.mark.parametrize("impl", FORMS)
def test_reorder_into_names_the_shard_out_of_range(impl: Any) -> None:
    outs = reorder_outs(IDS, 2, impl.device)
    what = r"reorder_by_indices_into: shards_N at 1: got 2"
    with bounds_checks(), pytest.raises(InputError, match=what):
        impl.reorder_by_indices_into(*moved(impl, IDS, int64(1, 2, 0)), 2, **outs)


@pytest.mark.slow
def test_forms_with_outputs_compile_whole() -> None:
    def both(ids_N: Tensor, shards_N: Tensor, offsets_B1: Tensor) -> tuple[Tensor, ...]:
        into = {name: torch.zeros_like(out) for name, out in REORDER.items()}
        keys = {name: torch.zeros_like(out) for name, out in KEYS.items()}
        ops.reorder_by_indices_into(ids_N, shards_N, 2, **into)
        ops.unique_key_with_value_and_offset_into(Ragged(ids_N, offsets_B1), [2, 3], **keys)
        return (*into.values(), *keys.values())

    inputs = IDS, int64(1, 0, 1), int64(0, 2, 3)
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    assert all_equal(compiled(*inputs), both(*inputs))


@pytest.mark.gpu
def test_no_form_with_outputs_waits_for_the_device() -> None:
    ids_N = torch.randint(0, 900, (5000,), generator=torch.manual_seed(3)).cuda()
    rows_N2, shards_N = ids_N.view(-1, 2).contiguous(), ids_N % 4
    key = Ragged(ids_N, torch.tensor([0, 2000, 5000]).cuda())
    reorder = [reorder_outs(ids, 4, "cuda") for ids in (ids_N, rows_N2)]
    keys = key_outs(5000, 2, "cuda")
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        # torch says that the mode is a prototype.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        ops.reorder_by_indices_into(ids_N, shards_N, 4, **reorder[0])
        ops.reorder_by_indices_into(rows_N2, shards_N[::2], 4, **reorder[1])
        ops.unique_key_with_value_and_offset_into(key, [2, 3], **keys)
    finally:
        torch.cuda.set_sync_debug_mode("default")
