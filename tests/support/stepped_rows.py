"""Tables with rows in device memory, and what one optimizer step should make of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.kernels.gradients import per_position, runs_of, sources_of
from shoal.kernels.step import apply
from shoal.kernels.step_tiles import Stamp
from shoal.kernels.tables import CHUNK_BITS, COUNT_NONFINITE, RowForm, SegmentForm
from shoal.rules.compressors import Compressor, Float32
from shoal.rules.initializers import Constant
from shoal.rules.optimizers import Optimizer, RuleContext

from .device_tables import DeviceTables, TableSize, make_tables

__all__ = ["Row", "StepWorld", "drawn", "eighths", "form_of", "on", "step"]

LARGEST_COUNT = 2**32 - 1


def form_of(
    *parts: tuple[int, Optimizer],
    dtype: torch.dtype = torch.float32,
    compressor: Compressor | None = None,
) -> RowForm:
    """A form of (dim, rule) segments."""
    segments, column, state = [], 0, 0
    for rate, (dim, rule) in enumerate(parts):
        width = rule.state_width(dim)
        segments.append(
            SegmentForm(
                column, dim, state, width, rate, Constant(0.0), rule, compressor or Float32()
            )
        )
        column, state = column + dim, state + width
    return RowForm(column, state, dtype, tuple(segments))


@dataclass
class Row:
    """A row as the reference has it, in the form's `real` dtype."""

    table: int
    weights: Tensor
    state: Tensor
    version: int = 1
    seen: int = 5
    count: int = 0


class StepWorld:
    """Tables of some forms, filled with rows, and a reference dictionary by handle.

    Args:
        forms: row forms.
        tables: form of each table.
        rows: rows of each table.
    """

    def __init__(
        self, forms: Sequence[RowForm], tables: Sequence[int], rows: int, device: str
    ) -> None:
        self.forms, self.tables, self.device = tuple(forms), tuple(tables), device
        sizes = [
            TableSize(
                rows=rows,
                slots=8,
                dim=forms[f].dim,
                state_width=forms[f].state_width,
                dtype=forms[f].dtype,
                form=f,
                salt=77 + table,
                seed=5,
            )
            for table, f in enumerate(tables)
        ]
        self.memory: DeviceTables = make_tables(sizes, device)
        self.rows: dict[int, Row] = {}
        self.handles: list[list[int]] = [[] for _ in tables]
        self.nonfinite = [0] * len(self.tables)
        made = torch.Generator().manual_seed(3)
        for number, chunk in enumerate(self.memory.chunks):
            form = self.forms[self.tables[chunk.table]]
            many = min(len(chunk.ids), rows - len(self.handles[chunk.table]))
            w = torch.randn(many, form.dim, generator=made).to(form.dtype)
            initial = [s.optimizer.init_state(s.dim, form.real) for s in form.segments]
            state = torch.cat(initial).expand(many, -1)
            chunk.weights[:many, : form.dim] = w.to(device)
            chunk.state[:many, : form.state_width] = state.to(device)
            for place in range(many):
                handle = number << CHUNK_BITS | place
                self.handles[chunk.table].append(handle)
                self.rows[handle] = Row(chunk.table, w[place].to(form.real), state[place])
            chunk.ids[:many] = torch.arange(many, device=device) * 7919 - 1000 * number
            chunk.versions[:many], chunk.seen[:many], chunk.counts[:many] = 1, 5, 0
        widest = max(len(form.segments) for form in forms)
        self.rates_KR = torch.linspace(0.05, 0.2, len(tables) * widest, dtype=torch.float64)
        self.rates_KR = self.rates_KR.reshape(len(tables), widest).to(device)

    def form(self, handle: int) -> RowForm:
        return self.forms[self.tables[self.rows[handle].table]]

    def expect(
        self,
        handles: Sequence[int],
        grads: Sequence[Tensor],
        stamp: Stamp,
        counts: Sequence[int] | None = None,
        seen: Sequence[Tensor] | None = None,
    ) -> None:
        """Step the reference; a gradient per position."""
        at_U, tally, sums = self._summed(handles, grads, counts)
        for at, many, summed in zip(at_U, tally, sums, strict=True):
            handle = handles[at]
            row, g = self.rows[handle], summed.to(self.form(handle).real)
            if stamp.nan_policy == "clip":
                g = g.nan_to_num(0.0, stamp.nan_clip, -stamp.nan_clip)
            elif not g.isfinite().all():
                self.nonfinite[row.table] += 1
                continue
            at_seen = None if seen is None else seen[at]
            self._step_row(handle, g, stamp, at_seen)
            row.version, row.seen = stamp.version, max(row.seen, stamp.event_time_s)
            row.count = min(row.count + many, LARGEST_COUNT)

    def _summed(
        self, handles: Sequence[int], grads: Sequence[Tensor], counts: Sequence[int] | None
    ) -> tuple[list[int], list[int], list[Tensor]]:
        """First position, occurrences and float64 gradient sum of each row."""
        number: dict[int, int] = {}
        at_U: list[int] = []
        tally: list[int] = []
        members: dict[int, list[int]] = {}
        for at, handle in enumerate(handles):
            if handle < 0:
                continue
            if handle not in number:
                number[handle] = len(at_U)
                at_U.append(at)
                tally.append(0)
            tally[number[handle]] += 1 if counts is None else counts[at]
            members.setdefault(self.tables[self.rows[handle].table], []).append(at)
        sums: list[Tensor] = [torch.empty(0)] * len(at_U)
        for form, positions in members.items():
            stacked = torch.stack([grads[at] for at in positions]).double()
            rows = torch.tensor([number[handles[at]] for at in positions])
            total = torch.zeros(len(at_U), self.forms[form].dim, dtype=torch.float64)
            total.index_add_(0, rows, stacked)
            for row in set(rows.tolist()):
                sums[row] = total[row]
        return at_U, tally, sums

    def _step_row(self, handle: int, g: Tensor, stamp: Stamp, seen: Tensor | None) -> None:
        row, weights, states = self.rows[handle], [], []
        for part in self.form(handle).segments:
            columns = slice(part.column, part.column + part.dim)
            state = slice(part.state_column, part.state_column + part.state_width)
            w, old = row.weights[None, columns], row.state[None, state]
            lr = float(self.rates_KR[row.table, part.rate])
            context = RuleContext(stamp.global_step)
            if seen is not None:
                context = replace(context, seen_UD=seen[None, columns].to(g.dtype))
            step_g = part.compressor.retrieve_backward(w, g[None, columns], stamp.global_step)
            new_w, new_state = part.optimizer.step(w, old, step_g, lr, context)
            weights.append(new_w[0])
            states.append(new_state[0])
        row.weights, row.state = torch.cat(weights), torch.cat(states)

    def check(self, tolerance: float = 1e-6) -> None:
        """Every row, touched or not, equals the reference, including metadata."""
        for handle, row in self.rows.items():
            chunk, place = self.memory.chunk_of(handle)
            for name, got, want, most in (
                ("weights", self.memory.weights_of(handle), row.weights, tolerance),
                # FTRL's z is the difference of larger numbers.
                ("state", self.memory.state_of(handle), row.state, 10 * tolerance),
            ):
                gap = (got.cpu().double() - want.double()).abs() / want.double().abs().clamp(min=1)
                assert bool((gap <= most).all()), (name, handle, got, want)
            got_words = [
                int(words[place]) & 0xFFFFFFFF
                for words in (chunk.versions, chunk.seen, chunk.counts)
            ]
            assert got_words == [row.version, row.seen, row.count], handle
        counted = [self.memory.count(t, COUNT_NONFINITE) for t in range(len(self.tables))]
        assert counted == self.nonfinite


def eighths(n: int, dim: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gradients whose sums are exact in any order."""
    made = torch.Generator().manual_seed(seed)
    return (torch.randint(-8, 9, (n, dim), generator=made) / 8).to(dtype)


def drawn(handles: Sequence[int], lengths: Sequence[int], seed: int = 0) -> list[int]:
    """Each handle as often as asked, missing rows (-1) among them, in random order."""
    flat = [h for h, many in zip(handles, lengths, strict=False) for _ in range(many)] + [-1] * 5
    order = torch.randperm(len(flat), generator=torch.Generator().manual_seed(seed))
    return [flat[i] for i in order.tolist()]


def on(world: StepWorld, handles: Sequence[int]) -> Tensor:
    return torch.tensor(handles, dtype=torch.int32, device=world.device)


def step(
    world: StepWorld,
    handles: Sequence[int],
    grads: Tensor,
    stamp: Stamp,
    *,
    counts: Sequence[int] | None = None,
    seen: Tensor | None = None,
) -> None:
    """One step of the device's rows and of the reference's, a gradient row per position."""
    runs = runs_of(on(world, handles))
    placed = None if seen is None else sources_of(runs, [per_position([seen.to(world.device)])])
    apply(
        world.memory.layout,
        world.forms,
        runs,
        sources_of(runs, [per_position([grads.to(world.device)])]),
        world.rates_KR,
        stamp,
        counts_N=None if counts is None else on(world, counts),
        seen=placed,
    )
    world.expect(handles, list(grads), stamp, counts, None if seen is None else list(seen))
