"""One row of the reference shard: its content, initial values and steps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.errors import NonFiniteGradient
from shoal.rules.initializers import initial_values
from shoal.rules.optimizers import RuleContext
from shoal.table.shard import GradRecord, IdGroups, StepContext, SummedGrads
from shoal.table.spec import TableSpec
from shoal.table.values import TableStats

__all__ = [
    "Key",
    "ReferenceTicket",
    "Row",
    "by_table",
    "check_finite",
    "check_records",
    "expired",
    "fresh_state",
    "initial_row",
    "keys_of",
    "retrieved",
    "step_row",
    "table_stats",
]

Key = tuple[int, int]
"""(table index, id)"""


@dataclass
class Row:
    weights: Tensor
    state: Tensor
    version: int
    last_seen_s: int = 0
    count: int = 0


class ReferenceTicket:
    """Where each position's row was when the lookup ran."""

    def __init__(self, shard: object, groups: IdGroups, keys: list[Key]) -> None:
        self.shard = shard
        self.groups = groups
        self.keys = keys
        self.counts = [1] * len(keys)
        self.event_time_s = 0
        self.admitted_N = torch.zeros(len(keys), dtype=torch.bool)
        self.found_N = torch.zeros(len(keys), dtype=torch.bool)
        self.ended = False

    def end(self) -> None:
        self.ended = True

    def held(self) -> set[Key]:
        if self.ended:
            return set()
        return {key for key, yes in zip(self.keys, self.admitted_N.tolist(), strict=True) if yes}


def initial_row(spec: TableSpec, id_: int, seed: int, dtype: torch.dtype) -> Tensor:
    parts, start = [], spec.first_column
    for segment in spec.segments:
        values = initial_values(
            segment.initializer,
            torch.tensor([id_]),
            seed=seed,
            table=spec.hash_name,
            column_start=start,
            dim=segment.dim,
        )
        parts.append(values[0])
        start += segment.dim
    return torch.cat(parts).to(dtype)


def fresh_state(spec: TableSpec, dtype: torch.dtype) -> Tensor:
    return torch.cat([s.optimizer.init_state(s.dim, dtype=dtype) for s in spec.segments])


def retrieved(spec: TableSpec, weights: Tensor, global_step: int) -> Tensor:
    parts = torch.split(weights, [segment.dim for segment in spec.segments])
    return torch.cat(
        [s.compressor.retrieve(w, global_step) for s, w in zip(spec.segments, parts, strict=True)]
    )


def step_row(
    spec: TableSpec, row: Row, grad: Tensor, ctx: StepContext, seen: Tensor | None
) -> None:
    rates = ctx.learning_rates.get(spec.name)
    weights, states, at, state_at = [], [], 0, 0
    for j, segment in enumerate(spec.segments):
        rule = segment.optimizer
        columns = slice(at, at + segment.dim)
        width = rule.state_width(segment.dim)
        w = row.weights[columns]
        g = segment.compressor.retrieve_backward(w, grad[columns], ctx.global_step)
        part = None if seen is None else seen[None, columns].to(grad.dtype)
        context = RuleContext(global_step=ctx.global_step, seen_UD=part)
        rate = rule.rate(ctx.global_step) if rates is None else rates[j]
        s = row.state[state_at : state_at + width]
        new_w, new_s = rule.step(w[None], s[None], g[None], rate, context)
        weights.append(new_w[0])
        states.append(new_s[0])
        at, state_at = at + segment.dim, state_at + width
    row.weights, row.state = torch.cat(weights), torch.cat(states)


def keys_of(groups: IdGroups) -> Iterator[Key]:
    ids, cuts = groups.ids_N.tolist(), groups.splits_G1.tolist()
    for g, k in enumerate(groups.tables_G.tolist()):
        for id_ in ids[cuts[g] : cuts[g + 1]]:
            yield k, id_


def by_table(sums: dict[Key, Tensor], counts: Counter[Key]) -> SummedGrads:
    tables: defaultdict[int, list[Key]] = defaultdict(list)
    for key in sums:
        tables[key[0]].append(key)
    order = tuple(sorted(tables))
    return SummedGrads(
        tables=order,
        ids=tuple(torch.tensor([id_ for _, id_ in tables[k]]) for k in order),
        sums=tuple(torch.stack([sums[key] for key in tables[k]]) for k in order),
        counts=tuple(torch.tensor([counts[key] for key in tables[k]]) for k in order),
    )


def check_finite(specs: Sequence[TableSpec], rows: list[tuple[Key, Tensor]]) -> None:
    for (k, id_), grad in rows:
        if not bool(grad.isfinite().all()):
            what = f"gradient of id {id_} in table {specs[k].name!r}"
            remedy = "Lower the learning rate, or set nan_policy to 'skip' or 'clip'."
            raise NonFiniteGradient(what, got=grad.tolist(), allowed="finite values", remedy=remedy)


def check_records(records: Sequence[GradRecord]) -> None:
    """Every number handed in counts, whether or not a row would take it."""
    for record in records:
        if not all(bool(grad.isfinite().all()) for grad in record.grads):
            remedy = "Lower the learning rate, or set nan_policy to 'skip' or 'clip'."
            what = "gradient of a record"
            raise NonFiniteGradient(
                what, got="NaN or infinity", allowed="finite values", remedy=remedy
            )


def table_stats(spec: TableSpec, rows: int, tally: Counter[str], dtype: torch.dtype) -> TableStats:
    weights, state = rows * spec.dim * dtype.itemsize, rows * spec.state_width * dtype.itemsize
    return TableStats(
        name=spec.name,
        rows=rows,
        bytes_total=weights + state + rows * 36,
        bytes_weights=weights,
        bytes_state=state,
        bytes_metadata=rows * 20,
        bytes_index=rows * 16,
        index_load=0.5,
        inserted=tally["inserted"],
        refused=tally["refused"],
        evicted=tally["evicted"],
        nonfinite_skipped=tally["nonfinite_skipped"],
    )


def expired(spec: TableSpec, id_: int, row: Row, now_s: int) -> bool:
    if spec.expiry is None:
        return False
    return bool(spec.expiry.expired_N(torch.tensor([id_]), torch.tensor([row.last_seen_s]), now_s))
