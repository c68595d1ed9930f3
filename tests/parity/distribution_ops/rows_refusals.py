"""What row operations refuse, and what a missing row reads as."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal.ops as ops
from shoal.errors import DTypeError, InputError, ShapeError
from shoal.ops.dispatch import bounds_checks
from support.backends import BACKENDS, Implementation, forced

T = torch.tensor
implementations = pytest.mark.parametrize("impl", BACKENDS)
FORCED = pytest.mark.parametrize("backend", ["core", "reference", "triton"])


def on(impl: Implementation, *tensors: Tensor) -> list[Tensor]:
    return [tensor.to(impl.device) for tensor in tensors]


IDS, ROWS, INPUT = T([1, 2]), torch.ones(2, 3), T([2, 1, 1])
NAMES = ["what", "call", "error", "message"]
BAD: list[Any] = [
    ("missing-id", lambda: ops.map_id_to_embedding([IDS], [ROWS], T([[1], [7]])),
     InputError, r"map_id_to_embedding: input\[1\]: got id 7; allowed: an id that ids holds"),
    ("missing-id-backwards",
     lambda: ops.map_id_to_embedding_gradient_back_prop([IDS], T([3]), torch.ones(1, 3)),
     InputError, r"map_id_to_embedding_gradient_back_prop: input\[0\]: got id 3"),
    ("missing-id-gather", lambda: ops.gather_embeddings_by_input(IDS, ROWS, T([1, 9])),
     InputError, r"gather_embeddings_by_input: input\[1\]: got id 9"),
    ("missing-id-match", lambda: ops.match_rows(IDS, T([5])), InputError, r"query\[0\]: got id 5"),
    ("index-too-large", lambda: ops.gather_rows(ROWS, T([0, 2])),
     InputError, r"gather_rows: index\[1\]: got 2; allowed: 0 to 1"),
    ("index-negative", lambda: ops.gather_rows(ROWS, T([-1])), InputError, r"got -1"),
    ("index-into-nothing", lambda: ops.gather_rows(ROWS[:0], T([0])), InputError, r"nothing"),
    ("scatter-index", lambda: ops.scatter_rows(torch.ones(2, 3), T([0, 5]), 5),
     InputError, r"scatter_rows: index\[1\]: got 5; allowed: 0 to 4"),
    ("mapping-index",
     lambda: ops.gather_embeddings_by_ids_gradient_back_prop(IDS, torch.ones(1, 3), T([2])),
     InputError, r"back_prop: index_mapping\[0\]: got 2"),
]  # fmt: skip
BAD_METADATA: list[Any] = [
    ("int32-ids", lambda: ops.map_id_to_embedding([IDS.int()], [ROWS], INPUT),
     DTypeError, r"map_id_to_embedding: dtype of ids: got torch.int32; allowed: int64"),
    ("int32-input", lambda: ops.gather_embeddings_by_input(IDS, ROWS, INPUT.int()),
     DTypeError, r"input: got torch.int32"),
    ("int32-index", lambda: ops.gather_rows(ROWS, INPUT.int()), DTypeError, r"index: got"),
    ("int32-mapping",
     lambda: ops.gather_embeddings_by_ids_gradient_back_prop(IDS, torch.ones(3, 3), INPUT.int()),
     DTypeError, r"index_mapping: got torch.int32"),
    ("lists-of-two-lengths", lambda: ops.map_id_to_embedding([IDS, IDS], [ROWS], INPUT),
     InputError, r"got ids 2, embeddings 1"),
    ("no-lists", lambda: ops.map_id_to_embedding([], [], INPUT), InputError, r"1 or more"),
    ("rows-and-ids", lambda: ops.map_id_to_embedding([IDS], [torch.ones(3, 3)], INPUT),
     ShapeError, r"rows of embeddings: got 3; allowed: 2"),
    ("flat-rows", lambda: ops.gather_embeddings_by_input(IDS, torch.ones(2), INPUT),
     ShapeError, r"embeddings: got \(2,\)"),
    ("two-widths", lambda: ops.map_id_to_embedding([IDS, IDS], [ROWS, torch.ones(2, 4)], INPUT),
     ShapeError, r"widths of embeddings: got \[3, 4\]"),
    ("two-dtypes", lambda: ops.gather_rows([ROWS, ROWS.double()], INPUT), DTypeError, r"one dtype"),
    ("grad-shape", lambda: ops.scatter_rows(torch.ones(2, 3), INPUT, 4),
     ShapeError, r"scatter_rows: grads: got \(2, 3\)"),
    ("grad-dtype", lambda: ops.scatter_rows(torch.ones(3, 3).long(), INPUT, 4),
     DTypeError, r"scatter_rows: dtype of grads"),
    ("two-devices", lambda: ops.gather_rows(ROWS.to("meta"), INPUT), InputError, r"on meta"),
]  # fmt: skip


@FORCED
@pytest.mark.parametrize(NAMES, BAD, ids=[case[0] for case in BAD])
def test_bad_values_of_rows(
    backend: Any, what: str, call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with forced(backend), pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(NAMES, BAD_METADATA, ids=[case[0] for case in BAD_METADATA])
def test_bad_metadata_of_rows(
    what: str, call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


def test_the_first_bad_row_is_named_whatever_the_threads() -> None:
    index = torch.zeros(100_000, dtype=torch.int64)
    index[[40_000, 99_000]] = 9
    with pytest.raises(InputError, match=r"index\[40000\]: got 9"):
        ops.gather_rows(torch.ones(3, 64), index)
    with pytest.raises(InputError, match=r"index\[40000\]: got 9"):
        ops.scatter_rows(torch.ones(100_000, 64), index, 5)
    with pytest.raises(InputError, match=r"query\[40000\]: got id 9"):
        ops.match_rows(torch.zeros(1).long(), index)


@pytest.mark.parametrize("impl", BACKENDS[-1:])
def test_triton_reads_a_missing_row_as_nan(impl: Implementation) -> None:
    from shoal.kernels import flat_rows as kernels

    rows, index = on(impl, torch.ones(2, 3), T([-1, 1, 2]))
    got = kernels.gather_rows([rows], index, True, "test")
    assert got.isnan().all(1).tolist() == [True, False, True]
    assert kernels.gather_rows([rows.long()], index, True, "test").tolist()[0] == [0, 0, 0]


@pytest.mark.gpu
def test_bounds_checks_of_rows_on_cuda() -> None:
    rows, index = torch.ones(2, 3, device="cuda"), T([5], device="cuda")
    with bounds_checks(), pytest.raises(InputError, match=r"index\[0\]: got 5"):
        ops.gather_rows(rows, index)
