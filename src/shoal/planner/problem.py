"""A planning problem as arrays, and a state of it: what each rank has so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.planner.cost import HIDDEN, CostModel, Floats, Price
from shoal.planner.options import Option, TableInput

ALL, NODE, RANK, PINNED = range(4)
"""Where a piece of an option goes: on every rank, a node's ranks, one rank, the pinned ranks."""

HIDDEN_S, REST_S, DEVICE, HOST = range(4)
"""Rows of loads: seconds during the dense part, seconds after it, bytes."""

Ints = np.ndarray[Any, np.dtype[np.int64]]
_SCOPES = {"row_wise": ALL, "data_parallel": ALL, "table_row_wise": NODE, "grid": NODE}


class Choices:
    """The options of one table as arrays over O.

    Attributes:
        options, prices: as given.
        loads_4O: of one rank that holds a piece.
        every_O: seconds of every rank besides, whether it holds one or not.
        counts_O: ranks that hold one.
        seconds_O: of it; work_O: of all ranks together.
        scopes_O: `ALL`, `NODE`, `RANK` or `PINNED`. pieces_O: how many there are.
        device_O, host_O: bytes of all ranks together.
    """

    def __init__(self, table: TableInput, options: Sequence[Option], model: CostModel) -> None:
        self.table = table
        self.options = tuple(options)
        self.prices: tuple[Price, ...] = tuple(model.price(table, one) for one in options)
        hidden = HIDDEN if model.work.pipelined else 0
        self.loads_4O: Floats = np.array(
            [
                (sum(p.phases[:hidden]), sum(p.phases[hidden:]), p.device_bytes, p.host_bytes)
                for p in self.prices
            ]
        ).reshape(-1, 4).T.copy()  # fmt: skip
        self.every_O: Floats = np.array([p.every_s for p in self.prices])
        self.scopes_O = np.array(
            [PINNED if one.pinned else _SCOPES.get(one.sharding, RANK) for one in options],
            dtype=np.int64,
        )
        self.scopes: list[int] = self.scopes_O.tolist()
        self.pieces_O = np.array([one.slices for one in options], dtype=np.int64)
        topology = model.topology
        self.counts_O = np.array([one.rank_count(topology) for one in options], dtype=np.int64)
        held_O: Floats = self.loads_4O[HIDDEN_S] + self.loads_4O[REST_S]
        self.seconds_O: Floats = held_O + self.every_O
        self.work_O: Floats = held_O * self.counts_O + self.every_O * topology.world_size
        self.device_O: Floats = self.loads_4O[DEVICE] * self.counts_O
        self.host_O: Floats = self.loads_4O[HOST] * self.counts_O
        self.by_scope = {
            scope: np.flatnonzero(self.scopes_O == scope) for scope in np.unique(self.scopes_O)
        }
        # Constraints are of tables: all options have the same ranks.
        self.ranks = np.array(self.options[0].ranks if options else (), dtype=np.int64)

    def where(self, option: int, at: Ints, local_size: int) -> list[tuple[int, ...]]:
        """The ranks of each piece that lies at `at`: ranks, or nodes."""
        scope = self.scopes_O[option]
        if scope == NODE:
            return [tuple(range(n * local_size, (n + 1) * local_size)) for n in at.tolist()]
        if scope == RANK:
            return [(rank,) for rank in at.tolist()]
        return [tuple(at.tolist())]


@dataclass(frozen=True, eq=False)
class PlacementProblem:
    """All tables of a job, their options and the ranks' limits.

    Args:
        choices: of each table.
        ranks, local_size: of the job, and of a node.
        dense_s: seconds during which hidden phases cost nothing.
        base_4: what every rank has, whatever the plan.
        limits: bytes of a rank's device and host.
    """

    choices: tuple[Choices, ...]
    ranks: int
    local_size: int
    dense_s: float
    base_4: Floats
    limits: tuple[float, float]

    def times(self, loads_4W: Floats) -> Floats:
        """Seconds of each rank's step."""
        times: Floats = np.maximum(loads_4W[HIDDEN_S], self.dense_s) + loads_4W[REST_S]
        return times

    def lower_bound(self) -> float:
        """Seconds that no plan can beat: of all work spread evenly, of the largest piece."""
        base = max(self.base_4[HIDDEN_S], self.dense_s) + self.base_4[REST_S]
        rest = sum(
            float((c.loads_4O[REST_S] * c.counts_O + c.every_O * self.ranks).min())
            for c in self.choices
        )
        both = sum(float(c.work_O.min()) for c in self.choices)
        idle = max(self.dense_s - self.base_4[HIDDEN_S], 0.0)
        largest = max((float(c.loads_4O[REST_S].min()) for c in self.choices), default=0.0)
        spread = max(rest / self.ranks, both / self.ranks - idle)
        return float(base + max(spread, largest))


def problem_of(
    tables: Sequence[TableInput], options: Sequence[Sequence[Option]], model: CostModel
) -> PlacementProblem:
    """The arrays of a problem; every table has an option."""
    topology, work = model.topology, model.work
    shared = sum(model.shared_phases(table) for table in tables)
    rest = shared + model.fixed_s() + (0.0 if work.pipelined else work.dense_s)
    device = work.dense_bytes + sum(model.shared_bytes(table) for table in tables)
    return PlacementProblem(
        tuple(Choices(table, own, model) for table, own in zip(tables, options, strict=True)),
        topology.world_size,
        topology.local_size,
        work.dense_s if work.pipelined else 0.0,
        np.array([0.0, rest, device, 0.0]),
        (topology.device_capacity, topology.host_capacity),
    )


class PartialPlan:
    """A plan in the making.

    Attributes:
        loads_4W: of each rank.
        chosen: the option of each table; -1: not placed.
        at: where its pieces are: ranks, or nodes.
    """

    def __init__(self, problem: PlacementProblem) -> None:
        self.problem = problem
        self.loads_4W: Floats = np.repeat(problem.base_4[:, None], problem.ranks, axis=1)
        self.chosen: list[int] = [-1] * len(problem.choices)
        self.at: list[Ints] = [np.empty(0, dtype=np.int64)] * len(problem.choices)
        self._held: list[frozenset[int]] = [frozenset()] * len(problem.choices)

    def copy(self) -> PartialPlan:
        """A state of its own."""
        other = PartialPlan.__new__(PartialPlan)
        other.problem, other.loads_4W = self.problem, self.loads_4W.copy()
        other.chosen, other.at, other._held = list(self.chosen), list(self.at), list(self._held)
        return other

    @property
    def peak(self) -> float:
        """Seconds of the slowest rank."""
        return float(self.problem.times(self.loads_4W).max())

    @property
    def score(self) -> tuple[float, float]:
        """The smaller, the better: the slowest rank, then how uneven the others are."""
        times = self.problem.times(self.loads_4W)
        return float(times.max()), float(np.dot(times, times))

    def put(self, table: int, option: int, at: Ints) -> None:
        """Place a table."""
        self.chosen[table], self.at[table] = option, at
        self._held[table] = frozenset(at.tolist())
        self._add(table, 1.0)

    def take(self, table: int) -> None:
        """Take a table out."""
        self._add(table, -1.0)
        self.chosen[table] = -1

    def _add(self, table: int, sign: float) -> None:
        choices, option = self.problem.choices[table], self.chosen[table]
        load_4 = sign * choices.loads_4O[:, option]
        if choices.scopes_O[option] == NODE:
            nodes_4NL = self.loads_4W.reshape(4, -1, self.problem.local_size)
            nodes_4NL[:, self.at[table]] += load_4[:, None, None]
        else:
            self.loads_4W[:, self.at[table]] += load_4[:, None]
        if choices.every_O[option]:
            self.loads_4W[REST_S] += sign * choices.every_O[option]

    def on(self, rank: int) -> list[int]:
        """Tables of which a rank holds a piece."""
        node = rank // self.problem.local_size
        return [
            table
            for table, option in enumerate(self.chosen)
            if option >= 0
            and (node if self.problem.choices[table].scopes[option] == NODE else rank)
            in self._held[table]
        ]

    def insert(self, table: int, *, ceiling: float | None = None, only: int | None = None) -> bool:
        """Place a table where it is best; False, and nothing changed, if it fits nowhere.

        Args:
            table: which.
            ceiling: take the option of least work in all that keeps its ranks at or below so many
                seconds; without such an option, or without a ceiling, the one that leaves the
                slowest rank fastest, and of those the one of least work.
            only: consider this option alone.
        """
        choices = self.problem.choices[table]
        peaks_O = np.full(len(choices.options), np.inf)
        scores: dict[int, Floats] = {}
        for scope, every in choices.by_scope.items():
            some = every if only is None else every[every == only]
            if len(some):
                self._peaks(choices, scope, some, peaks_O, scores)
        if not np.isfinite(peaks_O).any():
            return False
        option = only if only is not None else self._picked(choices, peaks_O, ceiling)
        self.put(table, option, self._places(choices, option, scores))
        return True

    def _picked(self, choices: Choices, peaks_O: Floats, ceiling: float | None) -> int:
        if ceiling is not None:
            fits_O = peaks_O <= ceiling
            if choices.every_O.any():  # ranks without a piece have to stay below it, too
                fits_O &= (choices.every_O == 0) | (self.peak + choices.every_O <= ceiling)
            under = np.flatnonzero(fits_O)
            if len(under):
                return int(under[choices.work_O[under].argmin()])
        after_O = np.maximum(peaks_O, self.peak + choices.every_O)
        best = np.flatnonzero(after_O <= after_O.min() * (1 + 1e-12))
        return int(best[choices.work_O[best].argmin()])

    def _peaks(
        self,
        choices: Choices,
        scope: int,
        some: Ints,
        peaks_O: Floats,
        scores: dict[int, Floats],
    ) -> None:
        """Seconds of the slowest rank that holds a piece, for options of one scope."""
        held_4W = self.loads_4W if scope != PINNED else self.loads_4W[:, choices.ranks]
        load_4O = choices.loads_4O[:, some]
        times_OW = held_4W[HIDDEN_S] + load_4O[HIDDEN_S, :, None]
        np.maximum(times_OW, self.problem.dense_s, out=times_OW)
        times_OW += held_4W[REST_S]
        times_OW += (load_4O[REST_S] + choices.every_O[some])[:, None]
        for row, limit in zip((DEVICE, HOST), self.problem.limits, strict=True):
            if held_4W[row].max() + load_4O[row].max() > limit:
                times_OW[held_4W[row] > limit - load_4O[row, :, None]] = np.inf
        if scope in (ALL, PINNED):
            peaks_O[some] = times_OW.max(axis=1)
            return
        if len(choices.ranks):
            outside = np.ones(self.problem.ranks, dtype=bool)
            outside[choices.ranks] = False
            times_OW[:, outside] = np.inf
        if scope == NODE:
            times_OW = times_OW.reshape(len(some), -1, self.problem.local_size).max(axis=2)
        for k, option in enumerate(some.tolist()):
            pieces = int(choices.pieces_O[option])
            scores[option] = times_OW[k]
            if pieces == 1:
                peaks_O[option] = times_OW[k].min()
            elif pieces <= times_OW.shape[1]:
                peaks_O[option] = np.partition(times_OW[k], pieces - 1)[pieces - 1]

    def _places(self, choices: Choices, option: int, scores: dict[int, Floats]) -> Ints:
        if option not in scores:
            if choices.scopes_O[option] == PINNED:
                return choices.ranks
            return np.arange(self.problem.ranks, dtype=np.int64)
        pieces = int(choices.pieces_O[option])
        if pieces == 1:
            return np.array([scores[option].argmin()], dtype=np.int64)
        return np.sort(scores[option].argsort(kind="stable")[:pieces]).astype(np.int64)
