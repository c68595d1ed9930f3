"""Pooled rows for predictions: of a shard here, or of anything that finds rows by id."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.config.build import ModelParts
from shoal.embedding.collection import Requests
from shoal.embedding.layouts import compile_layouts
from shoal.exchange.local import Exchange, LocalExchange
from shoal.exchange.partition import SendPlan, compile_send_plan
from shoal.models.tasks import inputs_of_ids
from shoal.ps.calls import Answer, ServerShare, cat
from shoal.ps.client import ServerExchange
from shoal.ps.messages import REALS
from shoal.ps.server import spread_over
from shoal.ragged import KeyedRagged
from shoal.table.rows import real_dtype
from shoal.table.shard import Found, IdGroups, Shard
from shoal.table.spec import TableSpec

Find = Callable[[Sequence[IdGroups | None]], Sequence[Found | None]]
"""Rows of each share's ids, zeros where missing; None of a share that nothing is asked of."""

_CPU = torch.device("cpu")
_NOBODY = -1


class PooledRows:
    """A model's features to its model inputs, as training pools them; nothing is inserted.

    Args:
        parts: of the model.
        specs: its tables, as the rows are kept.
        exchange: reads the rows.
    """

    def __init__(self, parts: ModelParts, specs: Sequence[TableSpec], exchange: Exchange) -> None:
        self._compiled = compile_layouts(
            {spec.name: spec for spec in specs}, parts.features, parts.layouts
        )
        numbers = {spec.name: k for k, spec in enumerate(specs)}
        tables_G = torch.tensor(
            [numbers[one.table] for one in parts.features], dtype=torch.int32, device="cpu"
        )
        self._requests = Requests(parts.features, tables_G, self._compiled.plan, _CPU)
        self._exchange, self._sequences = exchange, parts.inputs.sequences
        self.is_local = isinstance(exchange, LocalExchange)

    def __call__(self, batch: KeyedRagged) -> dict[str, Tensor]:
        """Model inputs [B, ...] by name."""
        request = self._requests.of(batch)
        found = self._compiled.inputs(self._exchange.read(request), request.ordered)
        return found | inputs_of_ids(batch, self._sequences, None)


def of_shard(shard: Shard) -> Exchange:
    """Rows of a shard in this process."""
    return LocalExchange(shard)


def of_shares(specs: Sequence[TableSpec], shares: int, find: Find) -> Exchange:
    """Rows that are spread by hash over shares elsewhere; each distinct id is asked for once."""
    return ServerExchange(_FoundRows(specs, shares, find))  # type: ignore[arg-type]


class _FoundRows:
    """What a `ServerExchange` needs of servers, to read."""

    def __init__(self, specs: Sequence[TableSpec], shares: int, find: Find) -> None:
        self.specs = tuple(specs)
        self._find = find
        self._placement = spread_over(self.specs, shares)

    def send_plan(self, tables_G: tuple[int, ...]) -> SendPlan:
        """The buffers of calls whose groups are of these tables."""
        return compile_send_plan(self.specs, self._placement, (), _NOBODY, tables_G)

    def ask(self, head: Any, shares: Sequence[ServerShare], *, counted: bool) -> list[Answer]:
        """Rows of each share, flat by dtype."""
        found = self._find([_groups(share) for share in shares])
        return [self._answer(share, one) for share, one in zip(shares, found, strict=True)]

    def _answer(self, share: ServerShare, found: Found | None) -> Answer:
        weights = () if found is None else found.weights
        rows = []
        for real in REALS:
            own = [
                part.reshape(-1)
                for table, part in zip(share.tables, weights, strict=found is not None)
                if real_dtype(self.specs[table]) is real
            ]
            rows.append(cat([torch.empty(0, dtype=real, device="cpu"), *own]))
        return Answer(rows, [])


def _groups(share: ServerShare) -> IdGroups | None:
    if not len(share.ids_n):
        return None
    splits = torch.tensor([0, *share.sizes], device="cpu").cumsum(0)
    return IdGroups(
        share.ids_n, splits, torch.tensor(share.tables, dtype=torch.int32, device="cpu")
    )
