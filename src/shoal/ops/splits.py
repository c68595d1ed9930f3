"""Rows and jagged values grouped by shard: partition, and the splits made of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shoal._core import ops as core
from shoal.address import address, check_dense
from shoal.errors import DTypeError, InputError
from shoal.ops.checks import check_devices, check_ids, shape_error, value_error
from shoal.ops.dispatch import by_core, fresh, linear, operator
from shoal.ops.ids import GOOD, value_rowids
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
        raise value_error(op, name, num, f"1..{_MOST_SHARDS}")


def check_shards(op: str, name: str, shards_N: Tensor, num: int) -> None:
    """Raise unless a tensor is int32 or int64 [N], and num a number of shards."""
    check_dense(f"{op}: {name}", shards_N)
    if shards_N.dtype not in (torch.int32, torch.int64):
        what, allowed = f"{op}: dtype of {name}", "int32 or int64"
        raise DTypeError(what, got=shards_N.dtype, allowed=allowed, remedy="Call .long().")
    if shards_N.ndim != 1:
        raise shape_error(op, f"shape of {name}", tuple(shards_N.shape), "1 dimension")
    check_num(op, "number of shards", num)


def check_lengths(op: str, one: str, one_N: Tensor, other: str, other_N: Tensor) -> None:
    """Raise unless two tensors are of one device and one length."""
    check_devices(op, **{one.replace(".", "_"): one_N, other.replace(".", "_"): other_N})
    if other_N.ndim < 1 or other_N.shape[0] != one_N.shape[0]:
        got = f"{tuple(one_N.shape)} and {tuple(other_N.shape)}"
        raise shape_error(op, f"lengths of {one} and {other}", got, "one length")


def shard_error(what: str, shards_N: Tensor, num: int, at: int) -> InputError:
    """The error of a shard that is out of range; `what` is "operation: argument"."""
    got, remedy = shards_N[at].item(), "Check what made it."
    return InputError(f"{what} at {at}", got, f"0..{num - 1}", remedy)


def _check_order(op: str, rows_N: Tensor, order_N: Tensor) -> None:
    check_ids(op, "order_N", order_N)
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
        raise value_error(op, f"order_N[{bad}]", order_N[bad].item(), allowed)
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
