"""Ids, rows and jagged values grouped by the shard that each goes to.

Which shard that is: what the caller gives or, for ids that are made distinct and packed, a rule of
`RULES`, as `placement` has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal._core import ops as core
from shoal.address import address, check_dense
from shoal.errors import DTypeError, InputError
from shoal.kernels.host_copies import sent
from shoal.ops import checks
from shoal.ops.dispatch import by_core, fresh, linear, operator
from shoal.ops.ids import GOOD, dedup_heads, value_rowids
from shoal.placement import floormod, unsigned_mod
from shoal.ragged import Ragged

_MOST_SHARDS = (1 << 31) - 1
_SHARDS = "partition: shards_N"


class Partition(NamedTuple):
    """Positions grouped by shard.

    order_N int64 [N]: the positions of shard 0 in input order, then those of shard 1, and so on;
    sizes_W int64 [W], positions of each shard.
    """

    order_N: Tensor
    sizes_W: Tensor


class RaggedPartition(NamedTuple):
    """A ragged's values grouped by shard.

    values_N, positions_N int64 [N]: the values of shard 0 in input order, then those of shard 1,
    and so on, and where each stood in the input. sizes_W int64 [W]: values of each shard.
    offsets_WB1 int64 [W, B+1]: of each shard's values alone, by input row.
    """

    values_N: Tensor
    positions_N: Tensor
    sizes_W: Tensor
    offsets_WB1: Tensor


class RaggedSplit(NamedTuple):
    """A ragged split by shard.

    values: W ragged, each with the batch size of the input. positions: W ragged of the same
    offsets; where each value stood among the input's values.
    """

    values: list[Ragged]
    positions: list[Ragged]


def partition(shards_N: Tensor, num_shards: int) -> Partition:
    """Group positions by shard; inside a shard they keep their order.

    shards_N int32 or int64 [N], values in [0, num_shards) -> `Partition(order_N, sizes_W)`, int64
    [N] and [num_shards]. Nothing waits for the device. No gradient.

    Raises:
        DTypeError, ShapeError: not int32 or int64 [N].
        InputError: num_shards not in 1..2^31-1; a shard out of range (see `set_bounds_checks`).
    """
    check_shards("partition", "shards_N", shards_N, num_shards)
    return Partition(*_partition(shards_N, num_shards))


def permute_rows(rows_N: Tensor, order_N: Tensor) -> Tensor:
    """Rows in another order: row i of the result is `rows_N[order_N[i]]`.

    rows_N [N, ...] of any dtype, order_N int64 [N], a permutation -> [N, ...].
    Gradient: `unpermute_rows`, so it is undefined where order_N names a row twice; that is not
    checked. `gather_rows` takes any index.

    Raises:
        DTypeError, ShapeError: order not int64 [N], or not as long as the rows.
        InputError: on two devices; an order out of range (see `set_bounds_checks`).
    """
    _check_order("permute_rows", rows_N, order_N)
    return _move_rows(rows_N, order_N, True)  # type: ignore[no-any-return]


def unpermute_rows(rows_N: Tensor, order_N: Tensor) -> Tensor:
    """The inverse of `permute_rows`: row `order_N[i]` of the result is `rows_N[i]`.

    Shapes and errors as there. Gradient: `permute_rows`. Unless order_N is a permutation, rows
    that it leaves out are undefined.
    """
    _check_order("unpermute_rows", rows_N, order_N)
    return _move_rows(rows_N, order_N, False)  # type: ignore[no-any-return]


def split_by_indices(indices_N: Tensor, tensor_N: Tensor, num_splits: int) -> list[Tensor]:
    """Split rows into splits by an index per row; inside a split rows keep their order.

    indices_N int32 or int64 [N] in [0, num_splits), tensor_N [N, ...] of any dtype -> num_splits
    tensors [n_s, ...], views of one.

    On CUDA it waits for the device, because sizes depend on the indices; `partition` and
    `permute_rows` give the same rows in one tensor without waiting. Gradient: each row's, put
    back where it came from. Monolith: `split_by_indices`.

    Raises:
        DTypeError, ShapeError: indices not int32 or int64 [N], or not one per row.
        InputError: on two devices, num_splits below 1, an index out of range.
    """
    check_shards("split_by_indices", "indices_N", indices_N, num_splits)
    check_lengths("split_by_indices", "indices_N", indices_N, "tensor_N", tensor_N)
    order_N, sizes_W = _partition(indices_N, num_splits, "split_by_indices: indices_N")
    return list(torch.split(_move_rows(tensor_N, order_N, True), sizes_W.tolist()))


def ragged_partition(indices_N: Tensor, ragged: Ragged, num_splits: int) -> RaggedPartition:
    """Group a ragged's values by an index per value; the parts stay in one tensor.

    indices_N int32 or int64 [N] in [0, num_splits), a ragged of N values in B rows ->
    `RaggedPartition(values_N, positions_N, sizes_W, offsets_WB1)`. Nothing waits for the device.
    No gradient.

    Raises:
        as `ragged_split_by_indices`.
    """
    return _ragged_partition("ragged_partition", indices_N, ragged, num_splits)


def ragged_split_by_indices(indices_N: Tensor, ragged: Ragged, num_splits: int) -> RaggedSplit:
    """Split a ragged into splits by an index per value.

    indices_N int32 or int64 [N] in [0, num_splits), a ragged of N values in B rows ->
    `RaggedSplit(values, positions)`: num_splits ragged each, of B rows; positions number the
    values as they stood in the input.

    On CUDA it waits for the device, because sizes depend on the indices; `ragged_partition` does
    not. No gradient. Monolith: `ragged_split_by_indices`.

    Raises:
        DTypeError, ShapeError: indices not int32 or int64 [N], or not one per value; offsets that
            do not start at 0, fall, or do not end at N.
        InputError: on two devices, num_splits below 1, an index out of range.
    """
    found = _ragged_partition("ragged_split_by_indices", indices_N, ragged, num_splits)
    sizes = found.sizes_W.tolist()
    parts = [torch.split(part_N, sizes) for part_N in (found.values_N, found.positions_N)]
    return RaggedSplit(*(list(map(Ragged, part, found.offsets_WB1)) for part in parts))


def _ragged_partition(
    op: str, indices_N: Tensor, ragged: Ragged, num_splits: int
) -> RaggedPartition:
    check_shards(op, "indices_N", indices_N, num_splits)
    check_lengths(op, "indices_N", indices_N, "ragged.values", ragged.values)
    rows_N, batch = value_rowids(op, ragged), ragged.batch_size
    order_N, sizes_W = _partition(indices_N, num_splits, f"{op}: indices_N")
    lengths_WB = rows_N.new_zeros(num_splits * batch)
    lengths_WB.index_add_(0, indices_N.long() * batch + rows_N, torch.ones_like(rows_N))
    lengths_WB = lengths_WB.view(num_splits, batch)
    offsets_WB1 = torch.nn.functional.pad(lengths_WB.cumsum(1), (1, 0))
    return RaggedPartition(_move_rows(ragged.values, order_N, True), order_N, sizes_W, offsets_WB1)


def check_num(op: str, name: str, num: int) -> None:
    """Raise unless a number of shards is one that ids can be split over."""
    if not 1 <= num <= _MOST_SHARDS:
        raise checks.value_error(op, name, num, f"1..{_MOST_SHARDS}")


def check_shards(op: str, name: str, shards_N: Tensor, num: int) -> None:
    """Raise unless a tensor is int32 or int64 [N], and num a number of shards."""
    check_dense(f"{op}: {name}", shards_N)
    if shards_N.dtype not in (torch.int32, torch.int64):
        what, allowed = f"{op}: dtype of {name}", "int32 or int64"
        raise DTypeError(what, got=shards_N.dtype, allowed=allowed, remedy="Call .long().")
    if shards_N.ndim != 1:
        raise checks.shape_error(op, f"shape of {name}", tuple(shards_N.shape), "1 dimension")
    check_num(op, "number of shards", num)


def check_lengths(op: str, one: str, one_N: Tensor, other: str, other_N: Tensor) -> None:
    """Raise unless two tensors are of one device and one length."""
    checks.check_devices(op, **{one.replace(".", "_"): one_N, other.replace(".", "_"): other_N})
    if other_N.ndim < 1 or other_N.shape[0] != one_N.shape[0]:
        got = f"{tuple(one_N.shape)} and {tuple(other_N.shape)}"
        raise checks.shape_error(op, f"lengths of {one} and {other}", got, "one length")


def shard_error(what: str, shards_N: Tensor, num: int, at: int) -> InputError:
    """The error of a shard that is out of range; `what` is "operation: argument"."""
    got, remedy = shards_N[at].item(), "Check what made it."
    return InputError(f"{what} at {at}", got, f"0..{num - 1}", remedy)


def _check_order(op: str, rows_N: Tensor, order_N: Tensor) -> None:
    checks.check_ids(op, "order_N", order_N)
    check_lengths(op, "order_N", order_N, "rows_N", rows_N)


def core_partition(shards_N: Tensor, num: int, what: str = _SHARDS) -> tuple[Tensor, Tensor]:
    shards_N, n = shards_N.contiguous(), shards_N.numel()
    order_N, sizes_W = fresh(n, dtype=torch.int64), fresh(num, dtype=torch.int64)
    run = core.partition_i64 if shards_N.dtype == torch.int64 else core.partition_i32
    threads = torch.get_num_threads()
    bad = run(address(shards_N), n, num, address(order_N), address(sizes_W), threads)
    if bad != GOOD:
        raise shard_error(what, shards_N, num, bad)
    return order_N, sizes_W


def _core_moved(rows_N: Tensor, order_N: Tensor, take: bool) -> Tensor:
    rows_N, order_N, n = rows_N.contiguous(), order_N.contiguous(), order_N.numel()
    out_N = fresh(*rows_N.shape, dtype=rows_N.dtype)
    if out_N.numel() == 0:
        return out_N
    row_bytes, threads = rows_N.numel() // n * rows_N.element_size(), torch.get_num_threads()
    places = address(rows_N), address(order_N)
    bad = core.move_rows(*places, n, row_bytes, take, address(out_N), threads)
    if bad != GOOD:
        op, allowed = "permute_rows" if take else "unpermute_rows", f"0..{n - 1}, each once"
        raise checks.value_error(op, f"order_N[{bad}]", order_N[bad].item(), allowed)
    return out_N


def _moved_transposed(grads_N: Tensor, _: torch.Size, order_N: Tensor, take: bool) -> Tensor:
    return _move_rows(grads_N, order_N, not take)  # type: ignore[no-any-return]


_partition = operator(
    f"partition(Tensor shards_N, int num, str what='{_SHARDS}') -> (Tensor, Tensor)",
    core=core_partition,
    triton="ids:partition",
    fake=lambda shards_N, num, what=_SHARDS: (
        shards_N.new_empty(shards_N.numel(), dtype=torch.int64),
        shards_N.new_empty(num, dtype=torch.int64),
    ),
    check=by_core(core_partition),
)

# Rows by their order, or back to where they were: each is the other's gradient.
_move_rows = operator(
    "move_rows(Tensor rows_N, Tensor order_N, bool take) -> Tensor",
    core=_core_moved,
    triton="ids:move_rows",
    fake=lambda rows_N, *_: torch.empty_like(rows_N, memory_format=torch.contiguous_format),
    check=lambda _, order_N, take: _core_moved(order_N.cpu(), order_N.cpu(), take),
    gradient=linear(_moved_transposed),
)


# What says which shard an id goes to, by number: csrc/ops_shard_rules.h.
RULES = {"given": 0, "floormod": 1, "unsigned_mod": 2, "hash_ranges": 3}
_WHAT = "fused_reorder_by_indices: shard_by's result"  # what errors of given shards name


ShardBy = Callable[[Tensor, int], Tensor]
"""From ids int64 [N] and a number of shards to shards int64 [N] in [0, shards)."""


class Reorder(NamedTuple):
    """Distinct ids by shard: ids_U int64 [U] (or [U, C]), sizes_W int64 [W]."""

    ids_U: Tensor
    sizes_W: Tensor


class FusedReorder(NamedTuple):
    """Distinct ids of K tables, packed for W shards.

    ids_U int64 [U]: by shard, then by table, then in order of first appearance.
    counts_U int64 [U]: occurrences of each id in its table.
    shard_sizes_W int64 [W]: ids of each shard. slot_sizes_WK int64 [W*K], shard-major: ids of each
    table in each shard.
    offset_sizes_K int64 [K]: ids of each table as given; on the CPU, unless they came as a ragged.
    offsets_N int64 [N]: for every id as given, where its row starts in a flat buffer of the rows of
    ids_U.
    """

    ids_U: Tensor
    counts_U: Tensor
    shard_sizes_W: Tensor
    slot_sizes_WK: Tensor
    offset_sizes_K: Tensor
    offsets_N: Tensor


class ValueOffset(NamedTuple):
    """For each distinct key, where its copies start in a flat buffer; jagged twice.

    offsets_N int64 [N]; those of distinct key u are `offsets_N[splits_U1[u]:splits_U1[u+1]]`, and
    the distinct keys of slot k are `slot_splits_K1[k]` up to `slot_splits_K1[k+1]`.
    """

    offsets_N: Tensor
    splits_U1: Tensor
    slot_splits_K1: Tensor


class UniqueKeys(NamedTuple):
    """Distinct keys of each slot, where their rows go, and a buffer for all rows or None."""

    unique_key: Ragged
    value_offset: ValueOffset
    value_buffer: Tensor | None


def _operation(what: str) -> str:
    return what.split(": ", 1)[0]


def _spans(what: str, ids: Sequence[Tensor], offsets_K1: Tensor | None) -> list[Tensor]:
    """Ids of each table, contiguous."""
    if offsets_K1 is None:
        return [part.contiguous() for part in ids]
    checks.read_offsets(_operation(what), offsets_K1, ids[0].numel())
    return list(torch.split(ids[0].contiguous(), offsets_K1.diff().tolist()))


Found = tuple[Tensor, Tensor, Tensor, Tensor]


class _Reordering(NamedTuple):
    """Arguments of `fused_reorder`."""

    ids: Sequence[Tensor]
    offsets_K1: Tensor | None
    dims: Sequence[int]
    num: int
    rule: str
    shards_N: Tensor | None
    what: str = _WHAT


def _core_fused_reorder(*arguments: Any, out: Sequence[Tensor] = ()) -> Found:
    """Into new tensors, or into the heads of those given."""
    ids, offsets_K1, dims, num, rule, shards_N, what = _Reordering(*arguments)
    spans = _spans(what, ids, offsets_K1)
    sizes = [span.numel() for span in spans]
    offsets_N = out[3] if out else fresh(sum(sizes), dtype=torch.int64)
    if shards_N is not None:
        shards_N = shards_N.contiguous()
    lists = [address(span) for span in spans], sizes, list(dims)
    how = num, RULES[rule], 0 if shards_N is None else address(shards_N)
    found = core.FusedReorder(*lists, *how, address(offsets_N), torch.get_num_threads())
    if found.bad != GOOD and shards_N is not None:  # only of given ones
        raise shard_error(what, shards_N, num, found.bad)
    if out:
        ids_U, counts_U, sizes_WK = out[:3]
        out[4].fill_(found.unique)
    else:
        ids_U, counts_U = (fresh(found.unique, dtype=torch.int64) for _ in range(2))
        sizes_WK = fresh(num * len(dims), dtype=torch.int64)
    found.write(address(ids_U), address(counts_U), address(sizes_WK))
    return ids_U, counts_U, sizes_WK, offsets_N


def _fake_fused_reorder(
    ids: Sequence[Tensor], offsets_K1: Tensor | None, dims: Sequence[int], num: int, *_: Any
) -> Found:
    size, like = torch.library.get_ctx().new_dynamic_size(), ids[0]
    n = sum(part.numel() for part in ids)
    return tuple(like.new_empty(s) for s in (size, size, num * len(dims), n))  # type: ignore[return-value]


def _core_fused_reorder_into(*arguments: Any) -> None:
    _core_fused_reorder(*arguments[:6], *arguments[11:], out=arguments[6:11])


def _check_fused_reorder(*arguments: Any) -> None:
    what = arguments[-1] if isinstance(arguments[-1], str) else _WHAT
    ids, offsets_K1, _, num, rule, shards_N, _ = _Reordering(*arguments[:6])
    if shards_N is not None and rule == "given":
        core_partition(shards_N.cpu(), num, what)
    if offsets_K1 is not None:
        checks.read_offsets(_operation(what), offsets_K1, ids[0].numel())


_ARGUMENTS = "Tensor[] ids, Tensor? offsets_K1, int[] dims_K, int num, str rule, Tensor? shards_N"
_NAMED = f'str what="{_WHAT}"'

fused_reorder = operator(
    f"fused_reorder({_ARGUMENTS}, {_NAMED}) -> (Tensor, Tensor, Tensor, Tensor)",
    from_host=True,
    core=_core_fused_reorder,
    triton="ids:fused_reorder",
    fake=_fake_fused_reorder,
    check=_check_fused_reorder,
)

fused_reorder_into = operator(
    f"fused_reorder_into({_ARGUMENTS}, Tensor(a!) ids_out_N, Tensor(b!) counts_out_N, "
    f"Tensor(c!) sizes_out_WK, Tensor(d!) offsets_out_N, Tensor(e!) size_out_1, {_NAMED}) -> ()",
    from_host=True,
    core=_core_fused_reorder_into,
    triton="ids:fused_reorder_into",
    fake=lambda *_: None,
    check=_check_fused_reorder,
)


_Tables = tuple[list[Tensor], Tensor | None, list[int]]


def reorder_by_indices(ids_N: Tensor, shards_N: Tensor, num_of_shards: int) -> Reorder:
    """Distinct ids grouped by shard, inside a shard in reverse order of first appearance.

    ids_N int64 [N], or [N, C] where a whole row is an id; shards_N int32 or int64 [N] in
    [0, num_of_shards), of which an id's first counts -> `Reorder(ids_U, sizes_W)`, [U] or [U, C].

    On CUDA it waits for the device, because U depends on the ids; `reorder_by_indices_into` does
    not. No gradient. Monolith: `reorder_by_indices`, which took rows with the same first column
    for the same id.

    Raises:
        DTypeError, ShapeError: ids not int64 [N] or [N, C], shards not int32 or int64 [N].
        InputError: on two devices, num_of_shards below 1, a shard out of range.
    """
    op = "reorder_by_indices"
    given = _given(op, ids_N, shards_N, num_of_shards)
    keys_U, _, sizes_W, _ = fused_reorder(*given)
    keys_U = keys_U[_mirrored(sizes_W, keys_U.numel())]
    if ids_N.ndim == 1:
        return Reorder(keys_U, sizes_W)
    return Reorder(_rows_by_key(ids_N, given.ids[0])[keys_U], sizes_W)


def reorder_by_indices_into(
    ids_N: Tensor,
    shards_N: Tensor,
    num_of_shards: int,
    *,
    ids_out_N: Tensor,
    sizes_out_W: Tensor,
    size_out_1: Tensor,
) -> None:
    """`reorder_by_indices` into given tensors; nothing waits for the device.

    ids_out_N int64 of the shape of ids_N: only its first U entries, or rows, are written.
    sizes_out_W int64 [W]; size_out_1 int64 [1] receives U. The outputs share no memory with each
    other or with the inputs.

    Raises:
        as `reorder_by_indices`; DTypeError and ShapeError also for outputs that are not so.
    """
    op = "reorder_by_indices_into"
    given = _given(op, ids_N, shards_N, num_of_shards)
    keys_N = given.ids[0]
    checks.check_outs(
        op,
        ids_N,
        ids_out_N=(ids_out_N, ids_N.shape),
        sizes_out_W=(sizes_out_W, (num_of_shards,)),
        size_out_1=(size_out_1, (1,)),
    )
    found_N, counts_N, offsets_N = (torch.empty_like(keys_N) for _ in range(3))
    outs = found_N, counts_N, sizes_out_W, offsets_N, size_out_1
    fused_reorder_into(*given[:-1], *outs, given.what)
    inside_N = torch.arange(keys_N.numel(), device=keys_N.device) < size_out_1
    found_N = torch.where(inside_N, found_N[_mirrored(sizes_out_W, keys_N.numel())], 0)
    if ids_N.ndim == 2:
        found_N, inside_N = _rows_by_key(ids_N, keys_N)[found_N], inside_N.unsqueeze(1)
    ids_out_N.copy_(torch.where(inside_N, found_N, ids_out_N))


def fused_reorder_by_indices(
    ids: Sequence[Tensor] | Ragged,
    num_of_shards: int,
    dim_sizes: Sequence[int] | None = None,
    *,
    shard_by: ShardBy = floormod,
) -> FusedReorder:
    """Distinct ids of K tables, packed for an exchange between W shards.

    ids: K int64 tensors, N ids in all, or a ragged of K rows. dim_sizes: K row widths, 1 if left
    out (then offsets number rows). shard_by: `placement.floormod` (Monolith's rule),
    `placement.unsigned_mod`, or any function from ids and W to shards int64 in [0, W).
    -> `FusedReorder(ids_U, counts_U, shard_sizes_W, slot_sizes_WK, offset_sizes_K, offsets_N)`,
    all int64; offsets into the received buffer do not end at 2^31, as Monolith's did.

    On CUDA it waits for the device, because U depends on the ids; `fused_reorder_by_indices_into`
    does not. No gradient. Monolith: `fused_reorder_by_indices`.

    Raises:
        DTypeError, ShapeError: ids not int64 [N], or dims and tables of different number.
        InputError: no tables, on several devices, num_of_shards or a width below 1, a shard of
            shard_by's out of range.
    """
    op = "fused_reorder_by_indices"
    given = _by_rule(op, _tables(op, ids, dim_sizes), num_of_shards, shard_by)
    ids_U, counts_U, sizes_WK, offsets_N = fused_reorder(*given)
    if isinstance(ids, Ragged):
        lengths_K = ids.lengths
    else:
        lengths = [part.numel() for part in ids]
        lengths_K = torch.tensor(lengths, dtype=torch.int64, device="cpu")
    shard_sizes_W = sizes_WK.view(-1, len(given.dims)).sum(1)
    return FusedReorder(ids_U, counts_U, shard_sizes_W, sizes_WK, lengths_K, offsets_N)


def fused_reorder_by_indices_into(
    ids: Sequence[Tensor] | Ragged,
    num_of_shards: int,
    dim_sizes: Sequence[int] | None = None,
    *,
    ids_out_N: Tensor,
    counts_out_N: Tensor,
    slot_sizes_out_WK: Tensor,
    offsets_out_N: Tensor,
    size_out_1: Tensor,
    shard_by: ShardBy = floormod,
) -> None:
    """`fused_reorder_by_indices` into given tensors; nothing waits for the device.

    ids_out_N, counts_out_N, offsets_out_N int64 [N]: of the first two only the first U entries
    are written. slot_sizes_out_WK int64 [W*K]; size_out_1 int64 [1] receives U. The outputs share
    no memory with each other or with the ids.

    Raises:
        as `fused_reorder_by_indices`; ShapeError also for outputs of other shapes.
    """
    op = "fused_reorder_by_indices_into"
    tables = _tables(op, ids, dim_sizes)
    given = _by_rule(op, tables, num_of_shards, shard_by)
    n = sum(part.numel() for part in given.ids)
    checks.check_outs(
        op,
        given.ids[0],
        ids_out_N=(ids_out_N, (n,)),
        counts_out_N=(counts_out_N, (n,)),
        slot_sizes_out_WK=(slot_sizes_out_WK, (num_of_shards * len(given.dims),)),
        offsets_out_N=(offsets_out_N, (n,)),
        size_out_1=(size_out_1, (1,)),
    )
    outs = ids_out_N, counts_out_N, slot_sizes_out_WK, offsets_out_N, size_out_1
    fused_reorder_into(*given[:-1], *outs, given.what)


def _tables(op: str, ids: Sequence[Tensor] | Ragged, dims: Sequence[int] | None) -> _Tables:
    """Ids, offsets where they are a ragged's, and row widths of the tables, checked."""
    if isinstance(ids, Ragged):
        parts, offsets_K1, tables = [ids.values], ids.offsets_B1, ids.batch_size
    else:
        parts, offsets_K1, tables = list(ids), None, len(ids)
    if tables < 1:
        raise checks.value_error(op, "number of tables", tables, "1 or more")
    for place, part in enumerate(parts):
        checks.check_ids(op, f"ids[{place}]", part)
    checks.check_devices(op, **{f"ids_{place}": part for place, part in enumerate(parts)})
    widths = [1] * tables if dims is None else [int(dim) for dim in dims]
    if len(widths) != tables:
        raise checks.shape_error(
            op, "number of row widths", len(widths), f"{tables}, one per table"
        )
    if min(widths) < 1:
        raise checks.value_error(op, "row widths", widths, "1 or more each")
    return parts, offsets_K1, widths


def _by_rule(op: str, tables: _Tables, num: int, shard_by: ShardBy) -> _Reordering:
    """By a rule that core and kernels know, or by what another says of each id."""
    check_num(op, "num_of_shards", num)
    what = f"{op}: shard_by's result"
    if shard_by is floormod or shard_by is unsigned_mod:
        rule = "floormod" if shard_by is floormod else "unsigned_mod"
        return _Reordering(*tables, num, rule, None, what)
    parts = tables[0]
    given = [shard_by(part, num) for part in parts]
    for part, shards_N in zip(parts, given, strict=True):
        check_shards(op, "shard_by's result", shards_N, num)
        check_lengths(op, "ids", part, "shards", shards_N)
    return _Reordering(*tables, num, "given", torch.cat(given).long(), what)


def _given(op: str, ids_N: Tensor, shards_N: Tensor, num: int) -> _Reordering:
    """By given shards, of one table: of the ids or, for rows of ids, of what equal rows share."""
    checks.check_ids(op, "ids_N", ids_N, dims=(1, 2))
    check_shards(op, "shards_N", shards_N, num)
    check_lengths(op, "shards_N", shards_N, "ids_N", ids_N)
    keys_N = ids_N.contiguous() if ids_N.ndim == 1 else _keys(op, ids_N)
    return _Reordering([keys_N], None, [1], num, "given", shards_N.long(), f"{op}: shards_N")


def _keys(op: str, ids_NC: Tensor) -> Tensor:
    """int64 [N] that are equal for equal rows: 0..U-1 in order of first appearance."""
    n, columns = ids_NC.shape
    if columns < 1:
        raise checks.shape_error(op, "shape of ids_N", (n, columns), "1 column or more")
    keys_N = _inverse(ids_NC[:, 0])
    for column_N in ids_NC.unbind(1)[1:]:
        keys_N = _inverse(keys_N * n + _inverse(column_N))
    return keys_N


def _inverse(ids_N: Tensor) -> Tensor:
    """`inverse_N` of `dedup`, without waiting for the device."""
    ids_N = ids_N.contiguous()
    found_N, counts_N, inverse_N = (torch.empty_like(ids_N) for _ in range(3))
    dedup_heads(ids_N, found_N, counts_N, inverse_N, ids_N.new_empty(1))
    return inverse_N


def _mirrored(sizes_W: Tensor, length: int) -> Tensor:
    """Where each of `length` places is in the reverse of its shard; behind the last: where it is.

    Place p of a shard that spans [start, end) goes to start + end - 1 - p.
    """
    ends_W = sizes_W.cumsum(0)
    places = torch.arange(length, device=sizes_W.device)
    shards = torch.searchsorted(ends_W, places, right=True).clamp(max=sizes_W.numel() - 1)
    mirrored = (2 * ends_W - sizes_W - 1)[shards] - places
    return torch.where(places < ends_W[-1], mirrored, places)


def _rows_by_key(ids_NC: Tensor, keys_N: Tensor) -> Tensor:
    """A row of each key at its place, [N, C]; equal rows where two land in one."""
    rows_NC = torch.empty_like(ids_NC, memory_format=torch.contiguous_format)
    rows_NC[keys_N] = ids_NC
    return rows_NC


def unique_key_with_value_and_offset(
    key: Ragged, dims: Sequence[int], generate_buffer: bool = True
) -> UniqueKeys:
    """Distinct keys of each of K slots, and where the row of each occurrence goes.

    key: a ragged of K rows, one per slot; dims: K row widths -> `UniqueKeys(unique_key,
    value_offset, value_buffer)`. value_buffer float32 [sum n_k * d_k] holds one row per
    occurrence, slot after slot, to be filled by `fill_with_offset_map`; it is not initialised.
    None without generate_buffer.

    On CUDA it waits for the device, because U depends on the keys;
    `unique_key_with_value_and_offset_into` does not. No gradient. Monolith:
    `unique_key_with_value_and_offset`.

    Raises:
        ShapeError: dims and slots of different number; offsets that do not start at 0, fall, or
            do not end at N.
        InputError: no slots, or a width below 1.
    """
    op = "unique_key_with_value_and_offset"
    given, starts_N, floats_K = _slots(op, key, dims)
    keys_U, counts_U, sizes_K, inverse_N = fused_reorder(*given)
    unique_key = Ragged.from_lengths(keys_U, sizes_K)
    splits_U1 = torch.nn.functional.pad(counts_U.cumsum(0), (1, 0))
    value_offset = ValueOffset(_by_key(starts_N, inverse_N), splits_U1, unique_key.offsets_B1)
    buffer = None
    if generate_buffer:
        buffer = torch.empty(int(floats_K.sum()), dtype=torch.float32, device=keys_U.device)
    return UniqueKeys(unique_key, value_offset, buffer)


def unique_key_with_value_and_offset_into(
    key: Ragged,
    dims: Sequence[int],
    *,
    keys_out_N: Tensor,
    key_splits_out_K1: Tensor,
    offsets_out_N: Tensor,
    splits_out_N1: Tensor,
    size_out_1: Tensor,
) -> None:
    """`unique_key_with_value_and_offset` into given tensors; nothing waits for the device.

    All int64. keys_out_N [N]: its first U entries are written, the distinct keys of slot k from
    key_splits_out_K1[k] to [k+1]. offsets_out_N [N] is `value_offset`'s, and so are the first U+1
    entries of splits_out_N1 [N+1]; the others become N. size_out_1 [1] receives U. The outputs
    share no memory with each other or with the key. The buffer, sum n_k * d_k, is the caller's.

    Raises:
        as `unique_key_with_value_and_offset`; DTypeError and ShapeError also for outputs that are
        not so, InputError for some on another device.
    """
    op = "unique_key_with_value_and_offset_into"
    given, starts_N, _ = _slots(op, key, dims)
    n, slots = key.values.numel(), key.batch_size
    checks.check_outs(
        op,
        key.values,
        keys_out_N=(keys_out_N, (n,)),
        key_splits_out_K1=(key_splits_out_K1, (slots + 1,)),
        offsets_out_N=(offsets_out_N, (n,)),
        splits_out_N1=(splits_out_N1, (n + 1,)),
        size_out_1=(size_out_1, (1,)),
    )
    counts_N = torch.zeros_like(keys_out_N)  # behind the last key there are none
    sizes_K, inverse_N = keys_out_N.new_empty(slots), torch.empty_like(keys_out_N)
    fused_reorder_into(*given[:-1], keys_out_N, counts_N, sizes_K, inverse_N, size_out_1)
    offsets_out_N.copy_(_by_key(starts_N, inverse_N))
    for out, sizes in ((key_splits_out_K1, sizes_K), (splits_out_N1, counts_N)):
        out[:1].zero_()
        out[1:].copy_(sizes.cumsum(0))


def _slots(op: str, key: Ragged, dims: Sequence[int]) -> tuple[_Reordering, Tensor, Tensor]:
    """Keys by slot; where each key's row starts in the buffer [N]; floats of each slot [K]."""
    parts, offsets_K1, widths = _tables(op, key, dims)
    given = _Reordering(parts, offsets_K1, [1] * len(widths), 1, "floormod", None)
    rows_N = value_rowids(op, key)
    device = rows_N.device
    if torch.compiler.is_compiling():  # a constant of the graph
        dims_K = torch.tensor(widths, device=device)
    else:
        dims_K = sent(widths, device)
    floats_K = key.lengths * dims_K
    # Occurrence i of slot k starts at (floats before the slot) + d_k * (i - first of the slot).
    bases_K = floats_K.cumsum(0) - floats_K - dims_K * key.offsets_B1[:-1]
    places_N = torch.arange(rows_N.numel(), device=device)
    return given, bases_K[rows_N] + dims_K[rows_N] * places_N, floats_K


def _by_key(starts_N: Tensor, inverse_N: Tensor) -> Tensor:
    # N, not U, bounds the numbers: it is known when the graph is compiled.
    order_N, _ = partition(inverse_N, max(inverse_N.numel(), 1))
    return starts_N[order_N]
