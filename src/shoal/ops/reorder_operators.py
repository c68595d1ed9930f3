"""The operators under the fused reorder: distinct ids of several tables, packed by shard.

`rule` says which shard an id belongs to, and what `shards_N` holds:

| rule | shard of an id | shards_N |
|---|---|---|
| given | what is given where it first appears | int64 [N], a shard each |
| floormod, unsigned_mod | the id modulo the number of shards | None |
| hash_ranges | that of its share of the hashes (`placement.ranks_of`) | int64 [K, 2 + num] |

A line of "hash_ranges" is a table's salt, its number of shares R, and the shard of each share; it
is not checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal import _core
from shoal.address import address
from shoal.ops import reference
from shoal.ops.dispatch import operator
from shoal.ops.ids import check_offsets_values
from shoal.ops.outputs import fresh
from shoal.ops.splits import raise_bad_shards, shard_error
from shoal.placement import BUCKET_BITS, buckets_of, floormod, mix64, unsigned_mod

__all__ = ["fused_reorder", "fused_reorder_into"]

_GOOD = -1  # what the core returns when it found nothing wrong
_RULE_NUMBERS = {"given": 0, "floormod": 1, "unsigned_mod": 2, "hash_ranges": 3}
_WHAT = "fused_reorder_by_indices: shard_by's result"  # what errors of given shards name


def _operation(what: str) -> str:
    return what.split(": ", 1)[0]


def _spans(what: str, ids: Sequence[Tensor], offsets_K1: Tensor | None) -> list[Tensor]:
    """Ids of each table, contiguous."""
    if offsets_K1 is None:
        return [part.contiguous() for part in ids]
    check_offsets_values(_operation(what), offsets_K1, ids[0].numel())
    return list(torch.split(ids[0].contiguous(), offsets_K1.diff().tolist()))


def _core_started(
    ids: Sequence[Tensor],
    offsets_K1: Tensor | None,
    dims: Sequence[int],
    num: int,
    rule: str,
    shards_N: Tensor | None,
    offsets_N: Tensor,
    what: str,
) -> tuple[_core.FusedReorder, list[Tensor]]:
    spans = _spans(what, ids, offsets_K1)
    if shards_N is not None:
        shards_N = shards_N.contiguous()
    found = _core.FusedReorder(
        [address(span) for span in spans],
        [span.numel() for span in spans],
        list(dims),
        num,
        _RULE_NUMBERS[rule],
        0 if shards_N is None else address(shards_N),
        address(offsets_N),
        torch.get_num_threads(),
    )
    if found.bad != _GOOD and shards_N is not None:  # only of given ones
        raise shard_error(what, shards_N, num, found.bad)
    return found, spans


def _core_fused_reorder(
    ids: Sequence[Tensor],
    offsets_K1: Tensor | None,
    dims: Sequence[int],
    num: int,
    rule: str,
    shards_N: Tensor | None,
    what: str = _WHAT,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    offsets_N = fresh(sum(part.numel() for part in ids), dtype=torch.int64)
    found, _spans_alive = _core_started(ids, offsets_K1, dims, num, rule, shards_N, offsets_N, what)
    ids_U, counts_U = (fresh(found.unique, dtype=torch.int64) for _ in range(2))
    sizes_WK = fresh(num * len(dims), dtype=torch.int64)
    found.write(address(ids_U), address(counts_U), address(sizes_WK))
    return ids_U, counts_U, sizes_WK, offsets_N


def _reference_fused_reorder(
    ids: Sequence[Tensor],
    offsets_K1: Tensor | None,
    dims: Sequence[int],
    num: int,
    rule: str,
    shards_N: Tensor | None,
    what: str = _WHAT,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    spans = _spans(what, ids, offsets_K1)
    if rule == "hash_ranges" and shards_N is not None:
        owners = [_range_shards(span, line) for span, line in zip(spans, shards_N, strict=True)]
        found = reference.fused_reorder_given(spans, num, dims, owners)
    elif shards_N is None:
        shard_by = floormod if rule == "floormod" else unsigned_mod
        found = reference.fused_reorder_by_indices(spans, num, dims, shard_by=shard_by)
    else:
        lengths = [span.numel() for span in spans]
        found = reference.fused_reorder_given(spans, num, dims, torch.split(shards_N, lengths))
    return found.ids_U, found.counts_U, found.slot_sizes_WK, found.offsets_N


def _range_shards(ids_N: Tensor, line: Tensor) -> Tensor:
    shares_N = (buckets_of(mix64(ids_N ^ line[0])) * line[1]) >> BUCKET_BITS
    return line[2 + shares_N]


def _fake_fused_reorder(
    ids: Sequence[Tensor], offsets_K1: Tensor | None, dims: Sequence[int], num: int, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    size, like = torch.library.get_ctx().new_dynamic_size(), ids[0]
    n = sum(part.numel() for part in ids)
    return (
        like.new_empty(size),
        like.new_empty(size),
        like.new_empty(num * len(dims)),
        like.new_empty(n),
    )


def _parts(arguments: tuple[Any, ...]) -> tuple[Any, Any, str]:
    """Inputs, outputs, and what errors name, of the form with outputs."""
    return arguments[:6], arguments[6:11], arguments[11] if len(arguments) > 11 else _WHAT


def _core_fused_reorder_into(*arguments: Any) -> None:
    inputs, outputs, what = _parts(arguments)
    ids_out_N, counts_out_N, sizes_out_WK, offsets_out_N, size_out_1 = outputs
    found, _spans_alive = _core_started(*(*inputs, offsets_out_N, what))
    found.write(address(ids_out_N), address(counts_out_N), address(sizes_out_WK))
    size_out_1.fill_(found.unique)


def _reference_fused_reorder_into(*arguments: Any) -> None:
    inputs, outputs, what = _parts(arguments)
    ids_out_N, counts_out_N, sizes_out_WK, offsets_out_N, size_out_1 = outputs
    ids_U, counts_U, sizes_WK, offsets_N = _reference_fused_reorder(*(*inputs, what))
    ids_out_N[: ids_U.numel()] = ids_U
    counts_out_N[: ids_U.numel()] = counts_U
    sizes_out_WK.copy_(sizes_WK)
    offsets_out_N.copy_(offsets_N)
    size_out_1.fill_(ids_U.numel())


def _check_fused_reorder(
    ids: Sequence[Tensor],
    offsets_K1: Tensor | None,
    dims: Sequence[int],
    num: int,
    rule: str,
    shards_N: Tensor | None,
    what: str = _WHAT,
) -> None:
    if shards_N is not None and rule == "given":
        raise_bad_shards(what, shards_N, num)
    if offsets_K1 is not None:
        check_offsets_values(_operation(what), offsets_K1, ids[0].numel())


def _check_fused_reorder_into(*arguments: Any) -> None:
    inputs, _, what = _parts(arguments)
    _check_fused_reorder(*(*inputs, what))


_ARGUMENTS = "Tensor[] ids, Tensor? offsets_K1, int[] dims_K, int num, str rule, Tensor? shards_N"
_NAMED = f'str what="{_WHAT}"'

fused_reorder = operator(
    f"fused_reorder({_ARGUMENTS}, {_NAMED}) -> (Tensor, Tensor, Tensor, Tensor)",
    from_host=True,
    reference=_reference_fused_reorder,
    core=_core_fused_reorder,
    triton="ids:fused_reorder",
    fake=_fake_fused_reorder,
    check=_check_fused_reorder,
)

fused_reorder_into = operator(
    f"fused_reorder_into({_ARGUMENTS}, Tensor(a!) ids_out_N, Tensor(b!) counts_out_N, "
    f"Tensor(c!) sizes_out_WK, Tensor(d!) offsets_out_N, Tensor(e!) size_out_1, {_NAMED}) -> ()",
    from_host=True,
    reference=_reference_fused_reorder_into,
    core=_core_fused_reorder_into,
    triton="ids:fused_reorder_into",
    fake=lambda *_: None,
    check=_check_fused_reorder_into,
)
