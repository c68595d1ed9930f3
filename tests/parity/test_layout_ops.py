"""The layout against the exact cases of Monolith's tests, on every implementation."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from shoal.ops import (
    FeatureConfig,
    FeatureConfigs,
    LayoutIndex,
    MonolithOffsets,
    OutConfig,
    SliceConfig,
    fused_embedding_to_layout,
    fused_embedding_to_layout_grad,
    reference,
    sharding_sparse_fids,
)
from shoal.ragged import KeyedRagged
from support.backends import BACKENDS, Implementation
from support.layout_case import Case, as_batch, make_case, make_configs, make_grad_case
from support.layout_two import BATCH, TWO, on, two_index, two_rows

BIG = (256, (49, 50, 100))
SMALL = (3, (3, 3, 3))


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What an operator allocates and does not write reads as NaN."""
    empty = torch.empty

    def poison(*args, **kwargs):  # type: ignore[no-untyped-def]
        made = empty(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poison)
    yield


@functools.lru_cache(maxsize=8)
def forward_case(impl_name: str, one_width: bool = False) -> Case:
    batch_size, groups = SMALL if impl_name == "triton" else BIG
    return make_case(batch_size, groups, one_width=one_width)


def assert_layouts(got: list[Tensor], case: Case) -> None:
    want = case.expected()
    assert len(got) == len(want)
    for name, one, other in zip(case.configs.outputs, got, want, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=0, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("version", [2, 3, 4, 5])
def test_monolith_forward(impl: Implementation, version: int) -> None:
    case = forward_case(impl.name)
    buffers, offsets = on(impl, case.buffers(version)), on(impl, case.offsets(version))
    assert_layouts(impl.fused_embedding_to_layout(buffers, offsets, case.configs), case)


@pytest.mark.parametrize("impl", BACKENDS)
def test_monolith_forward_version_1_needs_one_width_per_table(impl: Implementation) -> None:
    case = forward_case(impl.name, one_width=True)
    buffers, offsets = on(impl, case.buffers(1)), on(impl, case.offsets(1))
    assert_layouts(impl.fused_embedding_to_layout(buffers, offsets, case.configs), case)


@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("unique", [True, False])
def test_forward_of_sharded_ids(impl: Implementation, unique: bool) -> None:
    case = forward_case(impl.name)
    found = sharding_sparse_fids(
        as_batch(case), case.ps_num, case.configs, unique=unique, shared=case.shared
    )
    rows = [
        [x for name in names for fid in part for x in case.row(name, fid)]
        for (names, part) in buffer_parts(case, found.fids, found.row_splits)
    ]
    flat, sizes = [x for part in rows for x in part], found.emb_sizes_TP.reshape(-1).tolist()
    buffers = list(torch.tensor(flat).split(sizes))
    got = impl.fused_embedding_to_layout(on(impl, buffers), on(impl, found.index), case.configs)
    assert_layouts(got, case)


def buffer_parts(
    case: Case, fids: dict[str, Tensor], row_splits: dict[str, Tensor]
) -> list[tuple[list[str], list[int]]]:
    parts = []
    for key, found in fids.items():
        names = case.configs.features_of(key.split(":")[0])
        pieces = found.split(row_splits[key].diff().tolist())
        parts += [([name], piece.tolist()) for name, piece in zip(names, pieces, strict=True)]
    return parts


@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("version", [2, 3, 4, 5])
def test_monolith_gradient_counts_uses(impl: Implementation, version: int) -> None:
    case = make_grad_case(2 if impl.name == "triton" else 16)
    buffers, offsets = on(impl, case.buffers(version)), on(impl, case.offsets(version))
    ones = [torch.ones_like(out) for out in case.expected()]
    grads = impl.fused_embedding_to_layout_grad(on(impl, ones), buffers, offsets, case.configs)
    want = expected_uses(case)
    if version == 4:
        order = [t * case.ps_num + p for p in range(case.ps_num) for t in range(2)]
        want = [torch.cat([want[m] for m in order])]
    for grad, uses in zip(grads, want, strict=True):
        torch.testing.assert_close(grad.cpu(), uses)


def expected_uses(case: Case) -> list[Tensor]:
    """Each row's gradient: how often its fid is used; 1/len for means, three at most for firsts."""
    uses: dict[str, dict[int, float]] = {}
    for name, cells in case.ids.items():
        config = case.configs.feature_configs[name]
        own = uses.setdefault(name, {})
        for cell in cells:
            kept = cell[:3] if config.pooling_type == "firstn" else cell
            share = 1 / len(cell) if config.pooling_type == "mean" and cell else 1.0
            for fid in kept:
                own[fid] = own.get(fid, 0.0) + share
    return [
        torch.tensor(
            [
                uses[name].get(fid, 0.0)
                for name, fids in found.items()
                for fid in fids
                for _ in range(case.width(name))
            ]
        )
        for found in case.lists.values()
    ]


@pytest.mark.parametrize("impl", BACKENDS)
def test_gradient_equals_autograd_of_the_reference(impl: Implementation) -> None:
    """With shared features, sums, means, firsts and rows of two widths in one table."""
    case = make_case(4, (3, 3, 3)) if impl.name == "triton" else make_case(16, (9, 10, 10))
    buffers = [b.requires_grad_() for b in case.buffers(3)]
    outputs = reference.fused_embedding_to_layout(buffers, case.offsets(3), case.configs)
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(out.shape, generator=generator) for out in outputs]
    want = torch.autograd.grad(outputs, buffers, grads)
    mine = [b.detach().to(impl.device).requires_grad_() for b in buffers]
    with impl.chosen():
        laid = fused_embedding_to_layout(mine, on(impl, case.offsets(3)), case.configs)
        got = torch.autograd.grad(laid, mine, on(impl, grads))
    direct = impl.fused_embedding_to_layout_grad(
        on(impl, grads), mine, on(impl, case.offsets(3)), case.configs
    )
    for one, other, third in zip(got, want, direct, strict=True):
        torch.testing.assert_close(one.cpu(), other)
        torch.testing.assert_close(third.cpu(), other)


@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("scale", [0.25, torch.tensor(0.25)], ids=["number", "tensor"])
def test_gradient_scale(impl: Implementation, scale: float | Tensor) -> None:
    case = make_grad_case(2)
    buffers, offsets = on(impl, case.buffers(3)), on(impl, case.offsets(3))
    ones = on(impl, [torch.ones_like(out) for out in case.expected()])
    factor = scale.to(impl.device) if isinstance(scale, Tensor) else scale
    grads = impl.fused_embedding_to_layout_grad(
        ones, buffers, offsets, case.configs, layout_tensors_grad_scale=factor
    )
    for grad, uses in zip(grads, expected_uses(case), strict=True):
        torch.testing.assert_close(grad.cpu(), uses * 0.25)


@pytest.mark.parametrize("impl", BACKENDS)
def test_layout_of_gathered_unique_rows(impl: Implementation) -> None:
    got = impl.fused_embedding_to_layout(two_rows(impl.device), on(impl, two_index()), TWO)
    added, joined, piled, single_c, single_d = [out.tolist() for out in got]
    assert TWO.outputs == ("added", "joined", "piled", "single:0", "single:1")
    assert added == [[1 + 300], [10], [303]]
    assert joined == [[2, 3, 100, 200, 300], [20, 30, 0, 0, 0], [0, 0, 101, 202, 303]]
    assert piled[0] == [[[5, 6], [1, 2]], [[7, 8], [3, 4]]]
    assert piled[2] == [[[9, 10], [0, 0]], [[11, 12], [0, 0]]]
    assert single_c == [[[6, 7, 8], [2, 3, 4]], [[0] * 3] * 2, [[10, 11, 12], [0] * 3]]
    assert single_d == [[0] * 4] * 3


@pytest.mark.parametrize("impl", BACKENDS)
def test_shared_features_are_copied_and_their_gradients_summed(impl: Implementation) -> None:
    batch = {"a": [[0, 1], [], []], "c": [[2, 1, 0], [], []], "d": [[0], [1], [2]]}
    index = on(impl, two_index(("a", "c"), batch))
    rows = two_rows(impl.device)
    added, joined, piled, single_c, single_d = impl.fused_embedding_to_layout(rows, index, TWO)
    assert added.tolist() == [[33]] * 3
    assert joined.tolist() == [[0, 0, 11, 22, 33]] * 3
    assert piled.tolist() == [[[[9, 10], [5, 6]], [[11, 12], [7, 8]]]] * 3
    assert single_c[:, :, 0].tolist() == [[10, 6]] * 3
    assert torch.equal(single_d, rows[0])
    ones = [torch.ones_like(out) for out in (added, joined, piled, single_c, single_d)]
    s, t = impl.fused_embedding_to_layout_grad(ones, rows, index, TWO)
    assert s.tolist() == [[1] * 4, [4, 7, 7, 7], [4, 7, 7, 7]]
    assert t.tolist() == [[3, 3, 6], [3, 3, 6], [0, 0, 0]]


@pytest.mark.parametrize("impl", BACKENDS)
def test_outputs_without_gradient_count_as_zeros(impl: Implementation) -> None:
    index = on(impl, two_index())
    rows = [row.requires_grad_() for row in two_rows(impl.device)]
    outputs = impl.fused_embedding_to_layout(rows, index, TWO)
    with impl.chosen():
        s, t = torch.autograd.grad(outputs[1].sum(), rows, allow_unused=True)
    assert s is None or s.count_nonzero() == 0
    assert t.tolist() == [[1, 2, 2], [0, 1, 1], [2, 2, 2]]
    grads = [None, torch.ones_like(outputs[1]), None, None, None]
    assert torch.equal(impl.fused_embedding_to_layout_grad(grads, rows, index, TWO)[1], t)


@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_dtypes(impl: Implementation, dtype: torch.dtype) -> None:
    if dtype != torch.float64 and impl.device == "cpu":
        pytest.skip("half precision is for CUDA")
    got = impl.fused_embedding_to_layout(two_rows(impl.device, dtype), on(impl, two_index()), TWO)
    want = reference.fused_embedding_to_layout(two_rows(), two_index(), TWO)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.cpu(), other.to(dtype))


@pytest.mark.parametrize("impl", BACKENDS)
def test_empty_inputs(impl: Implementation) -> None:
    empty = {"a": [[], []], "b": [[], []], "c": [[], []], "d": [[], []]}
    for batch, size in ((empty, 2), ({"a": [], "c": []}, 0), ({"x": [[], [], []]}, 3)):
        index = on(impl, two_index((), batch))
        for rows in (two_rows(impl.device), [r[:0] for r in two_rows(impl.device)]):
            outputs = impl.fused_embedding_to_layout(rows, index, TWO)
            assert [out.shape[0] for out in outputs] == [size] * 5
            assert all(out.count_nonzero() == 0 for out in outputs)
            grads = impl.fused_embedding_to_layout_grad(outputs, rows, index, TWO)
            assert [grad.shape for grad in grads] == [row.shape for row in rows]
            assert all(grad.count_nonzero() == 0 for grad in grads)


@pytest.mark.parametrize("impl", BACKENDS)
def test_several_requests_equal_one_after_the_other(impl: Implementation) -> None:
    configs = make_configs((2, 2, 2))
    cases = [make_case(b, (2, 2, 2), ps_num=2, seed=b) for b in (3, 1, 2)]
    packed = [case.offsets(5) for case in cases]
    parts = [case.buffers(5) for case in cases]
    sizes = [[p.nfl_offset, p.feature_offset, p.fid_offset] for p in packed]
    counts = [torch.tensor([len(s[i]) for s in sizes], dtype=torch.int32) for i in range(3)]
    joined = MonolithOffsets(
        torch.cat([p.fid_offset.view(torch.int64) for p in packed]).view(torch.uint64),
        torch.cat([p.feature_offset for p in packed]),
        torch.cat([p.nfl_offset.view(torch.int32) for p in packed]),
        torch.tensor([case.batch_size for case in cases], dtype=torch.int32),
        2,
        5,
        nfl_size=counts[0],
        feature_size=counts[1],
        fid_size=counts[2],
        emb_size=torch.tensor([b.numel() for buffers in parts for b in buffers]),
    )
    buffers = [torch.cat([part[m] for part in parts]) for m in range(4)]
    got = impl.fused_embedding_to_layout(on(impl, buffers), on(impl, joined), configs)
    want = [torch.cat(outs) for outs in zip(*(case.expected() for case in cases), strict=True)]
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.cpu(), other)
    with pytest.raises(ValueError, match="requests: got 3; allowed: one"):
        impl.fused_embedding_to_layout_grad(want, buffers, joined, configs)


@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("ends", ["neither", "nfl", "feature", "both"])
@pytest.mark.parametrize("missing", ["absent", "shared"])
def test_offsets_may_state_their_ends(impl: Implementation, ends: str, missing: str) -> None:
    """The last feature is missing: without cells, or shared and empty."""
    case = make_case(3, (2, 2, 2), ps_num=2)
    last = case.configs.features[-1]
    del case.ids[last]
    case.shared.discard(last)
    case.__post_init__()
    offsets = case.offsets(3)
    feature, nfl = offsets.feature_offset, offsets.nfl_offset.view(torch.int32)
    if missing == "absent":
        feature, nfl = feature[:-1], nfl & torch.tensor([-1] * (len(nfl) - 1) + [0x7FFFFFFF])
    if ends in ("nfl", "both"):
        nfl = torch.cat([nfl, torch.tensor([len(feature)])]).to(torch.int32)
    if ends in ("feature", "both"):
        feature = torch.cat([feature, torch.tensor([len(offsets.fid_offset)])]).to(torch.int32)
    packed = MonolithOffsets(offsets.fid_offset, feature, nfl.to(torch.int32), 3, 2, 3)
    got = impl.fused_embedding_to_layout(on(impl, case.buffers(3)), on(impl, packed), case.configs)
    assert_layouts(got, case)


def test_offsets_beyond_31_bits() -> None:
    """Only the rows' pages are touched."""
    place = 2**31 + 10
    try:
        big = torch.UntypedStorage(4 * (place + 4))
    except RuntimeError:
        pytest.skip("no room for a buffer of 2**31 floats")
    buffer = torch.tensor([], dtype=torch.float32).set_(big, 0, (place + 4,), (1,))
    buffer[place : place + 4] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    configs = FeatureConfigs(
        {"a": FeatureConfig("t", (4,))}, {"all": OutConfig((SliceConfig("a", 0, 4),))}
    )
    offsets = MonolithOffsets(
        torch.tensor([place]), torch.tensor([0]), torch.tensor([0]), 1, ps_num=1, version=3
    )
    assert fused_embedding_to_layout([buffer], offsets, configs)[0].tolist() == [[1, 2, 3, 4]]


def test_opcheck() -> None:
    from shoal.ops.layout_arguments import forward_arguments, gradient_arguments

    rows = [row.requires_grad_() for row in two_rows(dtype=torch.float64)]
    forward = forward_arguments(rows, two_index(("a",), {"a": [[0], []], "d": [[1], [2]]}), TWO)
    torch.library.opcheck(torch.ops.shoal.layout_forward.default, forward)
    grads = [out.detach().requires_grad_() for out in torch.ops.shoal.layout_forward(*forward)]
    for scale in (None, 2.0):
        arguments = gradient_arguments(grads, rows, two_index((), {"a": [[0], [1]]}), TWO, scale)
        torch.library.opcheck(torch.ops.shoal.layout_backward.default, arguments)


def test_gradients_match_finite_differences() -> None:
    index = two_index(("a",), {**BATCH, "a": [[2, 1], [], []]})
    rows = [row.requires_grad_() for row in two_rows(dtype=torch.float64)]

    def laid(*rows: Tensor) -> list[Tensor]:
        return fused_embedding_to_layout(rows, index, TWO)

    assert torch.autograd.gradcheck(laid, rows)
    assert torch.autograd.gradgradcheck(laid, rows)
    grads = [out.detach().requires_grad_() for out in laid(*rows)]
    assert torch.autograd.gradcheck(
        lambda *g: fused_embedding_to_layout_grad(
            g, rows, index, TWO, layout_tensors_grad_scale=3.0
        ),
        grads,
    )


def test_compiles_as_one_graph() -> None:
    keyed = KeyedRagged.from_lists(BATCH)

    def step(rows: list[Tensor], values: Tensor, offsets: Tensor) -> Tensor:
        batch = KeyedRagged(keyed.keys, values, offsets)
        index = LayoutIndex.from_keyed(batch, values, {"s": 4, "t": 3}, TWO)
        return sum(out.square().sum() for out in fused_embedding_to_layout(rows, index, TWO))

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    rows = [row.requires_grad_() for row in two_rows()]
    want = torch.autograd.grad(step(rows, keyed.values_N, keyed.offsets_FB1), rows)
    got = torch.autograd.grad(compiled(rows, keyed.values_N, keyed.offsets_FB1), rows)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_exports() -> None:
    index = two_index()

    class Model(torch.nn.Module):
        def forward(self, s: Tensor, t: Tensor, rows_N: Tensor) -> list[Tensor]:
            own = LayoutIndex(rows_N, index.buffer_N, index.cell_splits_C1, index.cells_RF, (3,))
            return fused_embedding_to_layout([s, t], own, TWO)

    arguments = (*two_rows(), index.rows_N)
    exported = torch.export.export(Model(), arguments).module()
    for one, other in zip(exported(*arguments), Model()(*arguments), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("together", [True, False], ids=["rows shared by features", "rows apart"])
def test_results_do_not_depend_on_the_number_of_threads(together: bool) -> None:
    case = make_case(64, (9, 10, 10))
    index: LayoutIndex | MonolithOffsets = case.offsets(3)
    buffers = case.buffers(3)
    if together:
        keyed = as_batch(case)
        inverse = torch.remainder(keyed.values_N, 57)
        widths = {"table_one": 21, "table_two": 21}
        index = LayoutIndex.from_keyed(keyed, inverse, widths, case.configs, shared=case.shared)
        buffers = [torch.randn(57, 21) for _ in range(2)]
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            outputs = fused_embedding_to_layout(buffers, index, case.configs)
            grads = [out * 0.1 for out in outputs]
            found.append(
                outputs + fused_embedding_to_layout_grad(grads, buffers, index, case.configs)
            )
    finally:
        torch.set_num_threads(threads)
    want = reference.fused_embedding_to_layout_grad(grads, buffers, index, case.configs)
    for got in found:
        assert all(torch.equal(one, other) for one, other in zip(got, found[0], strict=True))
        for one, other in zip(got[-len(want) :], want, strict=True):
            torch.testing.assert_close(one, other)
