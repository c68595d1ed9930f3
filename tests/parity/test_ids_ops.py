"""Operations on ids: Monolith's published pairs, and every implementation against the reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal.ops as ops
from shoal.errors import DTypeError, InputError, ShapeError
from shoal.hashing import to_signed
from shoal.ops import reference
from shoal.ops.dispatch import bounds_checks, forced
from shoal.placement import floormod, unsigned_mod
from shoal.ragged import Ragged
from support.backends import BACKENDS

EXTREMES = [-(2**63), 2**63 - 1, -1, 0, 1, -(2**63), 0, 2**63 - 1, 0]
SHOAL = torch.ops.shoal


def int64(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def moved(impl: Any, *tensors: Tensor) -> Any:
    sent = [tensor.to(impl.device) for tensor in tensors]
    return sent[0] if len(sent) == 1 else sent


def lists(ragged: Ragged) -> list[list[int]]:
    return ragged.to("cpu").to_lists()


def all_equal(got: Any, want: Any) -> bool:
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(got, want, strict=True))


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory that nobody wrote reads as a number that no result holds."""

    def poisoning(make: Any) -> Any:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            with torch.no_grad():
                tensor.fill_(float("nan") if tensor.is_floating_point() else -7_777_777)
            return tensor

        return made

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoning(getattr(owner, name)))
    yield


# --- the published pairs ---------------------------------------------------------------------


@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize(
    ("indices", "values", "num", "want"),
    [
        pytest.param([0, 1, 2, 2, 0], [0, 1, 2, 2, 3], 3, [[0, 3], [1], [2, 2]], id="mod-3"),
        pytest.param([], [], 2, [[], []], id="empty"),
    ],
)
def test_split_by_indices(impl: Any, indices: Any, values: Any, num: int, want: Any) -> None:
    got = impl.split_by_indices(*moved(impl, int64(*indices), int64(*values)), num)
    assert [part.tolist() for part in got] == want


@pytest.mark.parametrize("impl", BACKENDS)
def test_split_by_indices_gradient_of_ones(impl: Any) -> None:
    values = torch.ones(3, 2, dtype=torch.float32, device=impl.device, requires_grad=True)
    parts = impl.split_by_indices(moved(impl, int64(0, 1, 0)), values, 3)
    with impl.chosen():
        sum(part.sum() for part in parts).backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[1, 1]] * 3


@pytest.mark.parametrize("impl", BACKENDS)
def test_reorder_by_indices(impl: Any) -> None:
    ids = moved(impl, int64(0, 1, 2, 2, 3, 5))
    got = impl.reorder_by_indices(ids, (ids % 3).int(), 3)
    assert got.ids_U.tolist() == [3, 0, 1, 5, 2]
    assert got.sizes_W.tolist() == [2, 1, 2]


FUSED = [
    pytest.param(
        [[0, 1, 2, 2, 3, 5]], 3, None, [0, 3, 1, 2, 5], [2, 1, 2], [2, 1, 2], None, id="one-slot"
    ),
    pytest.param(
        [[0, 1, 2, 2, 3, 5], []],
        3,
        None,
        [0, 3, 1, 2, 5],
        [2, 1, 2],
        [2, 0, 1, 0, 2, 0],
        None,
        id="empty-second-slot",
    ),
    pytest.param(
        [[0, 1, 2, 2, 3, 5], [6, 7, 8, 8, 9, 11]],
        3,
        None,
        [0, 3, 6, 9, 1, 7, 2, 5, 8, 11],
        [4, 2, 4],
        [2, 2, 1, 1, 2, 2],
        None,
        id="two-slots-three-shards",
    ),
    pytest.param([[], []], 2, None, [], [0, 0], [0, 0, 0, 0], [], id="all-empty"),
    pytest.param(
        [[0, 1, 4, 5], [2, 3, 6, 7]],
        2,
        None,
        [0, 4, 2, 6, 1, 5, 3, 7],
        [4, 4],
        [2, 2, 2, 2],
        None,
        id="two-slots-two-shards",
    ),
    pytest.param(
        [[0, 1, 0], [3, 2, 3], [5, 6, 7]],
        2,
        [1, 2, 3],
        [0, 2, 6, 1, 3, 5, 7],
        [3, 4],
        [1, 1, 1, 1, 1, 2],
        [0, 6, 0, 7, 1, 7, 9, 3, 12],
        id="three-widths",
    ),
    pytest.param(
        [[2, 3, 1, 2, 7, 2], [5, 8, 4, 4, 5, 11, 6]],
        3,
        [3, 2],
        [3, 6, 1, 7, 4, 2, 5, 8, 11],
        [2, 3, 4],
        [1, 1, 2, 1, 1, 3],
        [13, 0, 5, 13, 8, 13, 16, 18, 11, 11, 16, 20, 3],
        id="two-widths",
    ),
]


@pytest.mark.parametrize("form", ["list", "ragged"])
@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize(("ids", "num", "dims", "want", "shards", "slots", "offsets"), FUSED)
def test_fused_reorder_by_indices(
    impl: Any,
    form: str,
    ids: Any,
    num: int,
    dims: Any,
    want: Any,
    shards: Any,
    slots: Any,
    offsets: Any,
) -> None:
    tables = Ragged.from_lists(ids).to(impl.device)
    if form == "list":
        tables = list(tables.values.split([len(part) for part in ids]))
    got = impl.fused_reorder_by_indices(tables, num, dims)
    assert got.ids_U.tolist() == want
    assert got.shard_sizes_W.tolist() == shards
    assert got.slot_sizes_WK.tolist() == slots
    assert got.offset_sizes_K.tolist() == [len(part) for part in ids]
    if offsets is not None:
        assert got.offsets_N.tolist() == offsets


@pytest.mark.parametrize("impl", BACKENDS)
def test_ragged_split_by_indices(impl: Any) -> None:
    ragged = Ragged.from_lists([[], [], [4, 3, 2], [1], [], []]).to(impl.device)
    values, positions = impl.ragged_split_by_indices(moved(impl, int64(0, 1, 0, 1)), ragged, 2)
    assert lists(values[0]) == [[], [], [4, 2], [], [], []]
    assert lists(values[1]) == [[], [], [3], [1], [], []]
    assert lists(positions[0]) == [[], [], [0, 2], [], [], []]
    assert lists(positions[1]) == [[], [], [1], [3], [], []]


@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize(
    ("key", "dims", "unique", "offsets", "buffer"),
    [
        pytest.param(
            [[], [0, 1, 2, 1, 0], [0, 1, 0], []],
            [1, 2, 3, 4],
            [[], [0, 1, 2], [0, 1], []],
            [[], [[0, 8], [2, 6], [4]], [[10, 16], [13]], []],
            19,
            id="four-slots",
        ),
        pytest.param(
            [[0, 1, 0], [0]],
            [2, 3],
            [[0, 1], [0]],
            [[[0, 4], [2]], [[6]]],
            9,
            id="documentation",
        ),
    ],
)
def test_unique_key_with_value_and_offset(
    impl: Any, key: Any, dims: Any, unique: Any, offsets: Any, buffer: int
) -> None:
    ragged = Ragged.from_lists(key).to(impl.device)
    got = impl.unique_key_with_value_and_offset(ragged, dims)
    assert lists(got.unique_key) == unique
    found, splits, slots = (part.tolist() for part in got.value_offset)
    nested = [
        [found[splits[u] : splits[u + 1]] for u in range(slots[k], slots[k + 1])]
        for k in range(len(key))
    ]
    assert nested == offsets
    assert got.value_buffer.shape == (buffer,)
    assert got.value_buffer.dtype == torch.float32
    assert impl.unique_key_with_value_and_offset(ragged, dims, False).value_buffer is None


@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize(
    ("splits", "sizes", "want"),
    [
        pytest.param(
            [0, 2, 5, 5, 9, 0, 0, 3, 4], [5, 4], [0, 2, 5, 5, 9, 9, 12, 13], id="monolith"
        ),
        pytest.param([0, 0, 2, 0], [1, 2, 1], [0, 2], id="parts-without-rows"),
        pytest.param([0], [1], [0], id="nothing"),
    ],
)
def test_normalize_merged_split(impl: Any, splits: Any, sizes: Any, want: Any) -> None:
    got = impl.normalize_merged_split(*moved(impl, int64(*splits), int64(*sizes)))
    assert got.tolist() == want
    assert got.numel() == len(splits) + 1 - len(sizes)


@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize(
    ("rows", "want"),
    [
        pytest.param([[], [7, 8], [], [9], []], [1, 1, 3], id="empties"),
        pytest.param([[]], [], id="nothing"),
        pytest.param([[1, 2]], [0, 0], id="one-row"),
    ],
)
def test_fused_value_rowids(impl: Any, rows: Any, want: Any) -> None:
    ragged = Ragged.from_lists(rows).to(impl.device)
    assert impl.fused_value_rowids(ragged).tolist() == want


# --- every implementation against the reference ----------------------------------------------


@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("ids", [[], [5], [7, -3, 7, 9, -3, 7], EXTREMES], ids=str)
def test_dedup(impl: Any, ids: list[int], poisoned: None) -> None:
    ids_N = int64(*ids)
    assert all_equal(impl.dedup(moved(impl, ids_N)), reference.dedup(ids_N))


@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("ids", [[], [7, -3, 7, 9, -3, 7], EXTREMES], ids=str)
def test_dedup_into(impl: Any, ids: list[int]) -> None:
    ids_N = int64(*ids)
    want = reference.dedup(ids_N)
    outs = [torch.full_like(ids_N, -7, device=impl.device) for _ in range(3)]
    size = torch.full((1,), -7, device=impl.device)
    impl.dedup_into(
        moved(impl, ids_N),
        ids_out_N=outs[0],
        counts_out_N=outs[1],
        inverse_out_N=outs[2],
        size_out_1=size,
    )
    found = int(size)
    assert all_equal([outs[0][:found], outs[1][:found], outs[2]], want)
    assert (outs[0][found:] == -7).all() and (outs[1][found:] == -7).all()


@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("n", "num"), [(0, 1), (0, 300), (1, 1), (700, 1), (600, 8), (600, 300)])
def test_partition(impl: Any, dtype: torch.dtype, n: int, num: int, poisoned: None) -> None:
    shards_N = torch.randint(0, num, (n,), generator=torch.manual_seed(n), dtype=dtype)
    got = impl.partition(moved(impl, shards_N), num)
    assert all_equal(got, reference.partition(shards_N, num))
    assert got.order_N.dtype == got.sizes_W.dtype == torch.int64


@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 5), (0,), (300,)], ids=str)
def test_split_by_indices_of_any_shape(
    impl: Any, dtype: torch.dtype, shape: tuple[int, ...], poisoned: None
) -> None:
    generator = torch.manual_seed(3)
    indices_N = torch.randint(0, 4, (37,), generator=generator)
    tensor_N = torch.randint(-9, 9, (37, *shape), generator=generator).to(dtype)
    got = impl.split_by_indices(*moved(impl, indices_N, tensor_N), 4)
    assert all_equal(got, reference.split_by_indices(indices_N, tensor_N, 4))


@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("shard_by", [floormod, unsigned_mod, lambda ids, num: (ids & 7) % num])
def test_fused_reorder_shards_by_any_rule(impl: Any, shard_by: Any, poisoned: None) -> None:
    tables = [int64(*EXTREMES), int64(), int64(*EXTREMES[::-1], 5, -5, 5)]
    want = reference.fused_reorder_by_indices(tables, 5, [4, 1, 3], shard_by=shard_by)
    sent = [table.to(impl.device) for table in tables]
    assert all_equal(impl.fused_reorder_by_indices(sent, 5, [4, 1, 3], shard_by=shard_by), want)


@pytest.mark.parametrize("num", [1, 2, 3, 7, 8, 1000, 2**20 - 3])
@pytest.mark.parametrize(("rule", "modulus"), [(floormod, 0), (unsigned_mod, 2**64)])
def test_shard_rules_agree_with_python(rule: Any, modulus: int, num: int) -> None:
    ids_N = torch.cat(
        [
            int64(*EXTREMES, -7, 2**62 + 1),
            torch.randint(-(2**63), 2**63 - 1, (50,)),
            int64(-num, num),
        ]
    )
    found = ops.fused_reorder_by_indices([ids_N], num, shard_by=rule)
    owners_U = torch.arange(num).repeat_interleave(found.shard_sizes_W)
    want = [(id_ % modulus if modulus else id_) % num for id_ in found.ids_U.tolist()]
    assert owners_U.tolist() == want


@pytest.mark.parametrize("impl", BACKENDS)
def test_fused_reorder_into(impl: Any) -> None:
    if impl.name == "reference":
        pytest.skip("the reference has no such form")
    tables = [int64(3, 4, 3, 8), int64(), int64(9, 9, 1)]
    want = reference.fused_reorder_by_indices(tables, 2, [1, 2, 3])
    sent = [table.to(impl.device) for table in tables]
    ids, counts, offsets = (torch.full((7,), -7, device=impl.device) for _ in range(3))
    sizes, size = (torch.full((n,), -7, device=impl.device) for n in (6, 1))
    impl.fused_reorder_by_indices_into(
        sent,
        2,
        [1, 2, 3],
        ids_out_N=ids,
        counts_out_N=counts,
        slot_sizes_out_WK=sizes,
        offsets_out_N=offsets,
        size_out_1=size,
    )
    found = int(size)
    got = [ids[:found], counts[:found], sizes, offsets]
    assert all_equal(got, [want.ids_U, want.counts_U, want.slot_sizes_WK, want.offsets_N])


@pytest.mark.parametrize("impl", BACKENDS)
def test_reorder_takes_whole_rows_and_the_first_shard(impl: Any) -> None:
    rows = torch.tensor([[1, 2], [1, 3], [1, 2], [4, 4], [1, 3]])
    shards = torch.tensor([1, 0, 0, 1, 1], dtype=torch.int32)
    got = impl.reorder_by_indices(*moved(impl, rows, shards), 2)
    assert got.ids_U.tolist() == [[1, 3], [4, 4], [1, 2]]
    assert got.sizes_W.tolist() == [1, 2]
    none = impl.reorder_by_indices(*moved(impl, rows[:0], shards[:0]), 2)
    assert none.ids_U.shape == (0, 2)
    assert none.sizes_W.tolist() == [0, 0]


@pytest.mark.parametrize("impl", BACKENDS)
def test_ragged_partition_holds_the_splits_in_one_tensor(impl: Any) -> None:
    ragged = Ragged.from_lists([[5, 6], [], [7, 8, 9]])
    indices = int64(2, 0, 0, 2, 0)
    want = reference.ragged_partition(indices, ragged, 3)
    got = impl.ragged_partition(moved(impl, indices).int(), ragged.to(impl.device), 3)
    assert all_equal(got, want)


# --- the core's many-threaded paths ------------------------------------------------------------


def many_ids(kind: str) -> Tensor:
    generator = torch.manual_seed(11)
    n = 150_001
    if kind == "one":
        return torch.full((n,), -5)
    if kind == "skewed":
        return torch.randint(0, 2**62, (n,), generator=generator).bitwise_right_shift(
            torch.randint(0, 62, (n,), generator=generator)
        )
    if kind == "one-group":  # the core groups ids by the top bits of a hash: all in one group
        hashes = torch.randint(0, 2**55, (n,), generator=generator)
        folded = hashes * to_signed(pow(0x9E3779B97F4A7C15, -1, 2**64))
        return folded ^ ((folded >> 32) & 0xFFFFFFFF)
    if kind == "multiples":
        return torch.randint(0, n, (n,), generator=generator) << 44
    span = {"few": 50, "half": n // 2, "sparse": 2**62}[kind]
    return torch.randint(-span, span, (n,), generator=generator)


@pytest.mark.parametrize(
    "kind", ["one", "few", "half", "skewed", "multiples", "one-group", "sparse"]
)
def test_large_dedup_is_the_same_on_any_number_of_threads(kind: str) -> None:
    ids_N = many_ids(kind)
    want = reference.dedup(ids_N)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert all_equal(ops.dedup(ids_N), want)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("num", [1, 8, 40_000])
def test_large_partition_is_the_same_on_any_number_of_threads(num: int) -> None:
    shards_N = torch.randint(0, num, (100_003,), generator=torch.manual_seed(2))
    rows_N = torch.rand(100_003, 3)
    want = reference.partition(shards_N, num)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            got = ops.partition(shards_N, num)
            assert all_equal(got, want)
            grouped_N = ops.permute_rows(rows_N, got.order_N)
            assert torch.equal(grouped_N, rows_N[want.order_N])
            assert torch.equal(ops.unpermute_rows(grouped_N, got.order_N), rows_N)
    finally:
        torch.set_num_threads(before)


def test_large_fused_reorder_is_the_same_on_any_number_of_threads() -> None:
    generator = torch.manual_seed(4)
    sizes = [0, 3, 40_000, 900, 1, 70_000]
    tables = [torch.randint(-30_000, 30_000, (n,), generator=generator) for n in sizes]
    dims = [2, 1, 16, 5, 3, 4]
    want = reference.fused_reorder_by_indices(tables, 7, dims)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert all_equal(ops.fused_reorder_by_indices(tables, 7, dims), want)
    finally:
        torch.set_num_threads(before)


# --- gradients, torch.compile, torch.export, opcheck -------------------------------------------


def test_gradients_are_right() -> None:
    indices_N = int64(2, 0, 1, 1, 0)
    order_N = int64(3, 1, 0, 4, 2)
    rows_N = torch.rand(5, 2, dtype=torch.float64, requires_grad=True)
    check = torch.autograd.gradcheck
    assert check(lambda rows: tuple(ops.split_by_indices(indices_N, rows, 3)), (rows_N,))
    for op in (ops.permute_rows, ops.unpermute_rows):
        assert check(lambda rows, op=op: op(rows, order_N), (rows_N,))
        assert torch.autograd.gradgradcheck(lambda rows, op=op: op(rows, order_N), (rows_N,))


@pytest.mark.parametrize("impl", BACKENDS)
def test_gradient_goes_back_where_rows_came_from(impl: Any) -> None:
    indices_N = int64(2, 0, 1, 1, 0)
    rows_N = torch.rand(5, 3, device=impl.device, requires_grad=True)
    weights = torch.rand(5, 3)
    parts = impl.split_by_indices(moved(impl, indices_N), rows_N, 3)
    order_N = reference.partition(indices_N, 3).order_N
    with impl.chosen():
        (torch.cat(parts) * weights[order_N].to(impl.device)).sum().backward()
    assert rows_N.grad is not None
    assert torch.equal(rows_N.grad.cpu(), weights)


def regrouped(shards_N: Tensor, rows_N: Tensor, offsets_B1: Tensor) -> Tensor:
    order_N, sizes_W = ops.partition(shards_N, 3)
    rowids_N = ops.fused_value_rowids(Ragged(shards_N, offsets_B1))
    joined = ops.normalize_merged_split(torch.cat([offsets_B1, offsets_B1]), int64(3, 3))
    return ops.permute_rows(rows_N, order_N).sum() + sizes_W.max() + rowids_N.sum() + joined.sum()


def test_it_compiles_whole() -> None:
    shards_N, rows_N = int64(2, 0, 1, 1), torch.rand(4, 2, requires_grad=True)
    offsets_B1 = int64(0, 3, 4)
    compiled = torch.compile(regrouped, fullgraph=True, backend="aot_eager")
    want = regrouped(shards_N, rows_N, offsets_B1)
    got = compiled(shards_N, rows_N, offsets_B1)
    assert torch.equal(got, want)
    got.backward()
    assert rows_N.grad is not None
    assert rows_N.grad.tolist() == [[1, 1]] * 4


def test_dedup_compiles_whole() -> None:
    def spread(ids_N: Tensor) -> Tensor:
        found = ops.dedup(ids_N)
        packed = ops.fused_reorder_by_indices([ids_N, ids_N], 2)
        return found.counts_U[found.inverse_N] + packed.offsets_N[: ids_N.numel()]

    ids_N = int64(4, 4, 7, 4)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(spread, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(ids_N), spread(ids_N))


class Regrouped(torch.nn.Module):
    def forward(self, shards_N: Tensor, rows_N: Tensor, offsets_B1: Tensor) -> Tensor:
        return regrouped(shards_N, rows_N, offsets_B1)


def test_it_exports() -> None:
    inputs = (int64(2, 0, 1, 1), torch.rand(4, 2), int64(0, 3, 4))
    program = torch.export.export(Regrouped(), inputs)
    assert torch.equal(program.module()(*inputs), regrouped(*inputs))


IDS = int64(3, 4, 3)
OPERATORS = [
    pytest.param("dedup", (IDS,), id="dedup"),
    pytest.param("value_rowids", (int64(0, 2, 2, 3), 3), id="value_rowids"),
    pytest.param(
        "normalize_merged_split", (int64(0, 2, 0, 1), int64(2, 2)), id="normalize_merged_split"
    ),
    pytest.param("partition", (int64(1, 0, 1), 2), id="partition"),
    pytest.param(
        "permute_rows", (torch.rand(3, 2, requires_grad=True), int64(2, 0, 1)), id="permute_rows"
    ),
    pytest.param(
        "unpermute_rows",
        (torch.rand(3, 2, requires_grad=True), int64(2, 0, 1)),
        id="unpermute_rows",
    ),
    pytest.param(
        "fused_reorder", ([IDS, IDS], None, [2, 3], 2, "floormod", None), id="fused_reorder"
    ),
    pytest.param(
        "fused_reorder",
        ([IDS], int64(0, 1, 3), [2, 3], 2, "given", int64(0, 1, 0)),
        id="fused_reorder-given",
    ),
    pytest.param("dedup_into", (IDS, *(IDS.clone() for _ in range(3)), int64(0)), id="dedup_into"),
    pytest.param(
        "fused_reorder_into",
        (
            [IDS],
            None,
            [2],
            1,
            "floormod",
            None,
            IDS.clone(),
            IDS.clone(),
            int64(0),
            IDS.clone(),
            int64(0),
        ),
        id="fused_reorder_into",
    ),
]


@pytest.mark.parametrize(("name", "arguments"), OPERATORS)
def test_operators_pass_opcheck(name: str, arguments: Any) -> None:
    torch.library.opcheck(getattr(SHOAL, name).default, arguments)


# --- row numbers that are kept -------------------------------------------------------------------


def test_row_numbers_are_kept_while_the_offsets_live_unwritten() -> None:
    ragged = Ragged.from_lists([[1], [2, 3]])
    kept = ops.fused_value_rowids(ragged)
    assert ops.fused_value_rowids(ragged) is kept
    ragged.offsets_B1[1] = 2
    assert ops.fused_value_rowids(ragged).tolist() == [0, 0, 1]
    again = ops.fused_value_rowids(ragged)
    again.zero_()
    assert ops.fused_value_rowids(ragged).tolist() == [0, 0, 1]
    with torch.inference_mode():
        assert ops.fused_value_rowids(ragged).tolist() == [0, 0, 1]


# --- bad input -----------------------------------------------------------------------------------

CHECKED = ["reference", "core", "triton"]
RAGGED = Ragged(int64(1, 2, 3), int64(0, 1, 3))
BAD_VALUES = [
    pytest.param(
        lambda: ops.partition(int64(0, 3), 3), InputError, "partition.* at 1: got 3", id="shard"
    ),
    pytest.param(
        lambda: ops.partition(int64(0, -1).int(), 3), InputError, "got -1.*0..2", id="negative"
    ),
    pytest.param(
        lambda: ops.split_by_indices(int64(0, 2), torch.rand(2), 2), InputError, "got 2", id="split"
    ),
    pytest.param(
        lambda: ops.permute_rows(torch.rand(2), int64(0, 2)),
        InputError,
        r"order_N\[1\]",
        id="order",
    ),
    pytest.param(
        lambda: ops.unpermute_rows(torch.rand(2), int64(-1, 0)), InputError, "got -1", id="unorder"
    ),
    pytest.param(
        lambda: ops.reorder_by_indices(IDS, int64(0, 1, 2), 2),
        InputError,
        "at 2: got 2",
        id="reorder",
    ),
    pytest.param(
        lambda: ops.fused_reorder_by_indices([IDS], 2, shard_by=lambda ids, num: ids),
        InputError,
        "at 0: got 3",
        id="rule",
    ),
    pytest.param(
        lambda: ops.fused_value_rowids(Ragged(IDS, int64(0, 2, 1, 3))),
        ShapeError,
        r"offsets_B1\[2\]: got 1.*2",
        id="falling-offsets",
    ),
    pytest.param(
        lambda: ops.fused_value_rowids(Ragged(IDS, int64(-1, 3))),
        ShapeError,
        r"offsets_B1\[0\]: got -1",
        id="negative-offsets",
    ),
    pytest.param(
        lambda: ops.fused_value_rowids(Ragged(IDS, int64(0, 2))),
        ShapeError,
        "got 2.*3, the number",
        id="short-offsets",
    ),
    pytest.param(
        lambda: ops.fused_reorder_by_indices(Ragged(IDS, int64(0, 4)), 2),
        ShapeError,
        "got 4",
        id="long-offsets",
    ),
    pytest.param(
        lambda: ops.ragged_split_by_indices(int64(0, 0, 0), Ragged(IDS, int64(0, 2, 1, 3)), 1),
        ShapeError,
        "offsets_B1",
        id="ragged-offsets",
    ),
    pytest.param(
        lambda: ops.unique_key_with_value_and_offset(Ragged(IDS, int64(1, 3)), [1]),
        ShapeError,
        "offsets_B1",
        id="key-offsets",
    ),
    pytest.param(
        lambda: ops.normalize_merged_split(int64(0, 2, 1), int64(3)),
        ShapeError,
        r"row_splits_T\[2\]: got 1",
        id="falling-splits",
    ),
    pytest.param(
        lambda: ops.normalize_merged_split(int64(0, 2, 1), int64(2, 1)),
        ShapeError,
        r"row_splits_T\[2\]: got 1.*0 at the start",
        id="splits-start",
    ),
    pytest.param(
        lambda: ops.normalize_merged_split(int64(0, 2, 0), int64(2, 2)),
        ShapeError,
        "sizes_P at 1",
        id="sizes-sum",
    ),
    pytest.param(
        lambda: ops.normalize_merged_split(int64(0, 2, 0), int64(0, 3)),
        ShapeError,
        "sizes_P at 0",
        id="sizes-zero",
    ),
]


@pytest.mark.parametrize("backend", CHECKED)
@pytest.mark.parametrize(("call", "error", "match"), BAD_VALUES)
def test_bad_values_are_named(call: Any, error: Any, match: str, backend: Any) -> None:
    with bounds_checks(), forced(backend), pytest.raises(error, match=match):
        call()


META = torch.zeros(3, dtype=torch.int64, device="meta")
OUTS: dict[str, Any] = {
    "ids_out_N": IDS.clone(),
    "counts_out_N": IDS.clone(),
    "inverse_out_N": IDS.clone(),
    "size_out_1": int64(0),
}
FUSED_OUTS: dict[str, Any] = {
    "ids_out_N": IDS.clone(),
    "counts_out_N": IDS.clone(),
    "slot_sizes_out_WK": int64(0, 0),
    "offsets_out_N": IDS.clone(),
    "size_out_1": int64(0),
}
BAD_SHAPES = [
    (lambda: ops.dedup(IDS.int()), DTypeError, "dedup: dtype of ids_N: got torch.int32.*int64"),
    (lambda: ops.dedup(IDS[None]), ShapeError, "dedup: shape of ids_N"),
    (lambda: ops.dedup_into(IDS, **(OUTS | {"size_out_1": IDS})), ShapeError, "size_out_1"),
    (lambda: ops.dedup_into(IDS, **(OUTS | {"ids_out_N": IDS[:2]})), ShapeError, "ids_out_N"),
    (lambda: ops.dedup_into(IDS, **(OUTS | {"ids_out_N": META})), InputError, "devices.*meta"),
    (lambda: ops.partition(IDS.float(), 4), DTypeError, "int32 or int64"),
    (lambda: ops.partition(IDS[None], 4), ShapeError, "shape of shards_N"),
    (lambda: ops.partition(IDS, 0), InputError, "number of shards: got 0"),
    (lambda: ops.split_by_indices(IDS, torch.rand(2), 5), ShapeError, "lengths of indices_N"),
    (lambda: ops.split_by_indices(IDS, META, 5), InputError, "devices"),
    (lambda: ops.split_by_indices(IDS, torch.tensor(1.0), 5), ShapeError, "lengths"),
    (lambda: ops.permute_rows(torch.rand(3), IDS.int()), DTypeError, "order_N"),
    (lambda: ops.permute_rows(torch.rand(2), IDS), ShapeError, "order_N and rows_N"),
    (lambda: ops.ragged_split_by_indices(IDS[:2], RAGGED, 5), ShapeError, "ragged.values"),
    (lambda: ops.reorder_by_indices(IDS.int(), IDS, 5), DTypeError, "reorder_by_indices"),
    (lambda: ops.reorder_by_indices(IDS, IDS[:2], 5), ShapeError, "shards_N and ids_N"),
    (lambda: ops.reorder_by_indices(IDS[:, None][:, :0], IDS, 5), ShapeError, "1 column"),
    (lambda: ops.reorder_by_indices(IDS[None, None], IDS, 5), ShapeError, "1 dimension or 2"),
    (lambda: ops.fused_reorder_by_indices([], 2), InputError, "number of tables"),
    (lambda: ops.fused_reorder_by_indices([IDS.int()], 2), DTypeError, r"ids\[0\]"),
    (lambda: ops.fused_reorder_by_indices([IDS, META], 2), InputError, "devices"),
    (lambda: ops.fused_reorder_by_indices([IDS], 0), InputError, "num_of_shards: got 0"),
    (lambda: ops.fused_reorder_by_indices([IDS], 2, [1, 2]), ShapeError, "row widths: got 2"),
    (lambda: ops.fused_reorder_by_indices([IDS], 2, [0]), InputError, "row widths"),
    (
        lambda: ops.fused_reorder_by_indices([IDS], 2, shard_by=lambda ids, num: ids[:1]),
        ShapeError,
        "ids and shards",
    ),
    (
        lambda: ops.fused_reorder_by_indices_into([IDS], 3, **FUSED_OUTS),
        ShapeError,
        "slot_sizes_out_WK",
    ),
    (lambda: ops.unique_key_with_value_and_offset(RAGGED, [1]), ShapeError, "got 1.*2, one per"),
    (lambda: ops.normalize_merged_split(IDS, int64()), ShapeError, "3 splits in 0 parts"),
    (lambda: ops.normalize_merged_split(IDS.int(), IDS), DTypeError, "row_splits_T"),
    (lambda: ops.normalize_merged_split(IDS, META), InputError, "devices"),
]


@pytest.mark.parametrize(("call", "error", "match"), BAD_SHAPES)
def test_bad_shapes_and_dtypes_are_named(call: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        call()
