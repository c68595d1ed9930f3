"""The layout by hand: every kind of output, shared and missing features, requests, offsets."""

from __future__ import annotations

import pytest
import torch

from shoal.ops import (
    FeatureConfig,
    FeatureConfigs,
    MonolithOffsets,
    OutConfig,
    SliceConfig,
    fused_embedding_to_layout,
)
from support import ops_reference as reference
from support.backends import BACKENDS, Implementation
from support.layout_case import assert_layouts, make_case, make_configs
from support.layout_two import TWO, on, two_index, two_rows

pytestmark = pytest.mark.usefixtures("poisoned")


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
def test_concat_of_sequences(impl: Implementation) -> None:
    slices = (SliceConfig("c", 0, 1), SliceConfig("c", 2, 4))
    configs = FeatureConfigs(TWO.feature_configs, {"long": OutConfig(slices, "concat")})
    rows = [row.requires_grad_() for row in two_rows(impl.device)]
    with impl.chosen():
        (out,) = impl.fused_embedding_to_layout(rows, on(impl, two_index()), configs)
        weights = torch.arange(18.0, device=impl.device).view(3, 2, 3)
        (grad,) = torch.autograd.grad((out * weights).sum(), rows[:1])
    assert out.tolist() == [[[5, 7, 8], [1, 3, 4]], [[0] * 3] * 2, [[9, 11, 12], [0] * 3]]
    assert grad.tolist() == [[3, 0, 4, 5], [0, 0, 1, 2], [12, 0, 13, 14]]


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
def test_layouts_without_gradient_count_as_zeros(impl: Implementation) -> None:
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
def test_layout_of_other_dtypes(impl: Implementation, dtype: torch.dtype) -> None:
    if dtype != torch.float64 and impl.device == "cpu":
        pytest.skip("half precision is for CUDA")
    got = impl.fused_embedding_to_layout(two_rows(impl.device, dtype), on(impl, two_index()), TWO)
    want = reference.fused_embedding_to_layout(two_rows(), two_index(), TWO)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.cpu(), other.to(dtype))


@pytest.mark.parametrize("impl", BACKENDS)
def test_layout_of_nothing(impl: Implementation) -> None:
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
def test_packed_offsets_may_state_their_ends(impl: Implementation, ends: str, missing: str) -> None:
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


def test_packed_offsets_beyond_31_bits() -> None:
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
