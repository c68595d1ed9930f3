"""Rows by id and by index, in plain torch: differentiable, on any device and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.ops.rows_checks import check_match_values

__all__ = [
    "GatheredRows",
    "gather_embeddings_by_ids_gradient_back_prop",
    "gather_embeddings_by_input",
    "gather_rows",
    "map_id_to_embedding",
    "map_id_to_embedding_gradient_back_prop",
    "match_rows",
    "scatter_rows",
]


class GatheredRows(NamedTuple):
    """embeddings [*input.shape, D]; index_mapping int64, shaped as the input: row of each id."""

    embeddings: Tensor
    index_mapping: Tensor


def match_rows(
    ids_M: Tensor, query: Tensor, *, missing_ok: bool = False, multi_threads: bool = True
) -> Tensor:
    """First row of each id, int64 shaped as `query`; -1 where there is none, if that is allowed."""
    if not missing_ok:
        check_match_values("match_rows: query", ids_M, query.flatten())
    if ids_M.numel() == 0:
        return torch.full_like(query, -1)
    sorted_M, order_M = torch.sort(ids_M, stable=True)
    place = torch.searchsorted(sorted_M, query.contiguous()).clamp(max=ids_M.numel() - 1)
    return order_M[place].where(sorted_M[place] == query, -1)


def gather_rows(rows: Tensor | Sequence[Tensor], index: Tensor) -> Tensor:
    """Rows by index, [*index.shape, D]; several arrays are numbered through."""
    rows_MD = rows if isinstance(rows, Tensor) else torch.cat(list(rows))
    return rows_MD[index]


def scatter_rows(grad: Tensor, index: Tensor, rows: int) -> Tensor:
    """Sum of the gradients of each row, [rows, D], in order; halves are summed in float32."""
    width = grad.shape[-1]
    wide = grad.float() if grad.dtype in (torch.float16, torch.bfloat16) else grad
    sums_MD = wide.new_zeros(rows, width)
    flat_ND = wide.reshape(index.numel(), width)
    return sums_MD.index_add(0, index.flatten(), flat_ND).to(grad.dtype)


def map_id_to_embedding(
    ids: Sequence[Tensor],
    embeddings: Sequence[Tensor],
    input: Tensor,
    use_multi_threads: bool = True,
) -> Tensor:
    """Row of the first of `ids` that equals each id of the input, [*input.shape, D]."""
    return gather_rows(embeddings, match_rows(torch.cat(list(ids)), input))


def map_id_to_embedding_gradient_back_prop(
    ids: Sequence[Tensor], input: Tensor, grads: Tensor
) -> list[Tensor]:
    """Gradients of the rows that `map_id_to_embedding` read, one [M, D] per entry of `ids`."""
    index = match_rows(torch.cat(list(ids)), input)
    sizes = [part.numel() for part in ids]
    return list(torch.split(scatter_rows(grads, index, sum(sizes)), sizes))


def gather_embeddings_by_input(
    ids: Tensor, embeddings: Tensor, input: Tensor, use_multi_threads: bool = True
) -> GatheredRows:
    """Rows by id, and which they are."""
    index = match_rows(ids, input)
    return GatheredRows(embeddings[index], index)


def gather_embeddings_by_ids_gradient_back_prop(
    ids: Tensor, grads: Tensor, index_mapping: Tensor
) -> Tensor:
    """Gradient [M, D] of the rows that `gather_embeddings_by_input` read."""
    return scatter_rows(grads, index_mapping, ids.numel())
