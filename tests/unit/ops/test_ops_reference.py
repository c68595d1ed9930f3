"""The plain-torch oracles by hand-made cases, and layouts of pooled slices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoal import ops
from shoal.errors import ShapeError, UnknownName
from shoal.ops import pooled_layout
from shoal.ops.dispatch import forced
from support import ops_reference as reference
from support.plain_operators import PLAIN

SEGMENTS = [
    reference.segment_sum,
    reference.segment_mean,
    reference.segment_sqrtn,
    reference.segment_l2,
    lambda rows, offsets: reference.segment_first_n(rows, offsets, 2),
]


def test_every_operator_has_a_plain_form() -> None:
    known = torch._C._dispatch_get_all_op_names()
    names = {name.partition("::")[2] for name in known if name.startswith("shoal::")}
    assert set(PLAIN) == {name.split(".")[0] for name in names}


def test_given_functions_replace_the_operators_they_are_named_for() -> None:
    ids_N = torch.tensor([3, 4])
    with forced({"dedup": lambda ids: (ids[:1], ids[:1], ids)}):
        assert ops.dedup(ids_N).ids_U.tolist() == [3]
        assert ops.partition(torch.tensor([1, 0]), 2).order_N.tolist() == [1, 0]
    assert ops.dedup(ids_N).ids_U.tolist() == [3, 4]


def rows(*values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def offsets(*values: int) -> Tensor:
    return torch.tensor(values)


def test_dedup_keeps_order_of_first_appearance() -> None:
    ids, counts, inverse = reference.dedup(torch.tensor([7, -3, 7, 9, -3, 7]))
    assert ids.tolist() == [7, -3, 9]
    assert counts.tolist() == [3, 2, 1]
    assert inverse.tolist() == [0, 1, 0, 2, 1, 0]


@given(st.lists(st.sampled_from([-(2**63), 2**63 - 1, -1, 0, 1, 2, 3])))
def test_dedup_agrees_with_a_dictionary(ids: list[int]) -> None:
    ids_N = torch.tensor(ids, dtype=torch.int64)
    found = reference.dedup(ids_N)
    assert found.ids_U.tolist() == list(dict.fromkeys(ids))
    assert found.counts_U.tolist() == [ids.count(id_) for id_ in dict.fromkeys(ids)]
    assert torch.equal(found.ids_U[found.inverse_N], ids_N)


def test_row_ids_skip_empty_segments() -> None:
    assert reference.row_ids(offsets(0, 2, 2, 3)).tolist() == [0, 0, 2]
    assert reference.row_ids(offsets(0)).tolist() == []


def test_sum() -> None:
    values = rows([1, 1], [2, 2], [4, 4])
    out = reference.segment_sum(values, offsets(0, 2, 3))
    assert out.tolist() == [[3, 3], [4, 4]]
    (-out.sum()).backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[-1, -1]] * 3


def test_mean() -> None:
    values = rows([4, 4], [2, 2], [1, 1])
    out = reference.segment_mean(values, offsets(0, 2, 3))
    assert out.tolist() == [[3, 3], [1, 1]]
    out.backward(torch.tensor([[-2.0, -2.0], [-1.0, -1.0]], dtype=torch.float64))
    assert values.grad is not None
    assert values.grad.tolist() == [[-1, -1]] * 3


def test_sqrtn_divides_by_the_root_of_the_count() -> None:
    values = rows([1, 2], [3, 4], [5, 6], [7, 8], [9, 9])
    out = reference.segment_sqrtn(values, offsets(0, 4, 5, 5))
    assert out.tolist() == [[8, 10], [9, 9], [0, 0]]


def test_l2() -> None:
    out = reference.segment_l2(rows([3, 3], [4, 4], [4, 4]), offsets(0, 2, 3))
    assert out.tolist() == [[5, 5], [4, 4]]


def test_l2_gradient_is_x_over_y_and_zero_at_zero() -> None:
    values = rows([3, 4], [4, 3], [0, 0])
    reference.segment_l2(values, offsets(0, 2, 3)).sum().neg().backward()
    want = torch.tensor([[-0.6, -0.8], [-0.8, -0.6], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(values.grad, want)


def test_first_n_pads_and_cuts() -> None:
    values = rows([1], [2], [3], [4], [5], [6])
    out = reference.segment_first_n(values, offsets(0, 1, 3, 6), 2)
    assert out.tolist() == [[[1], [0]], [[2], [3]], [[4], [5]]]
    out.sum().backward()
    assert values.grad is not None
    assert values.grad.flatten().tolist() == [1, 1, 1, 1, 1, 0]


@pytest.mark.parametrize("segment", SEGMENTS)
def test_empty_segments_give_finite_zeros_and_gradients(segment) -> None:  # type: ignore[no-untyped-def]
    values = rows([1, 2])
    out = segment(values, offsets(0, 0, 1, 1))
    assert out[0].count_nonzero() == out[2].count_nonzero() == 0
    out.sum().backward()
    assert values.grad is not None
    assert values.grad.isfinite().all()
    none = torch.empty(0, 2, requires_grad=True)
    assert segment(none, offsets(0, 0)).count_nonzero() == 0
    assert segment(none, offsets(0)).shape[0] == 0


@pytest.mark.parametrize("segment", SEGMENTS)
def test_gradients_match_finite_differences(segment) -> None:  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(7, 3, dtype=torch.float64, generator=generator) + 0.5
    values.requires_grad_()
    splits = offsets(0, 3, 3, 4, 7)
    assert torch.autograd.gradcheck(lambda x: segment(x, splits), values)


def test_layouts_of_pooled_slices() -> None:
    a, b = torch.tensor([[1.0, 2.0]]), torch.tensor([[10.0, 20.0]])
    assert pooled_layout("none", [a, b]) == (a, b)
    assert pooled_layout("concat", [a, b[:, :1]])[0].tolist() == [[1, 2, 10]]
    assert pooled_layout("stack", [a, b])[0].tolist() == [[[1, 2], [10, 20]]]
    assert pooled_layout("addn", [a, b])[0].tolist() == [[11, 22]]


def test_layouts_of_sequences() -> None:
    a, b = torch.ones(4, 3, 2), torch.zeros(4, 3, 5)
    assert pooled_layout("concat", [a, b])[0].shape == (4, 3, 7)
    assert pooled_layout("stack", [a, a])[0].shape == (4, 2, 3, 2)
    assert len(pooled_layout("none", [a, b])) == 2


@pytest.mark.parametrize(
    ("layout", "shapes"),
    [
        ("addn", [(4, 3, 2), (4, 3, 2)]),
        ("addn", [(4, 2), (4, 3)]),
        ("stack", [(4, 2), (4, 3)]),
        ("concat", [(4, 2), (4, 3, 2)]),
        ("concat", [(4, 2), (5, 2)]),
        ("concat", []),
        ("none", [(4,)]),
    ],
)
def test_layouts_refuse_what_they_cannot_join(layout: str, shapes: list[tuple[int, ...]]) -> None:
    with pytest.raises(ShapeError):
        pooled_layout(layout, [torch.ones(shape) for shape in shapes])  # type: ignore[arg-type]


def test_unknown_layout() -> None:
    with pytest.raises(UnknownName, match="concat"):
        pooled_layout("concatenate", [torch.ones(1, 1)])  # type: ignore[arg-type]
