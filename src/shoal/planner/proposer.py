"""Options for all tables at once: dynamic programming over memory, as the seed system names it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.planner.cost import Floats
from shoal.planner.problem import Ints, PlacementProblem

_TRIES = 8  # proposals of one ceiling, each with less memory than the one before
_LESS = 0.97


@dataclass(frozen=True, slots=True)
class Proposal:
    """An option for each table.

    Args:
        options: one number per table.
        device_bytes, host_bytes: of all ranks together.
        work_s: seconds of all ranks together.
    """

    options: tuple[int, ...]
    device_bytes: float
    host_bytes: float
    work_s: float


class DynamicProgrammingProposer:
    """Proposes the options of least work that fit the memory of all ranks together.

    `load` a problem, then `propose` and `feedback` in turns until `propose` returns None. Memory is
    divided into bins of the cluster's total, whatever the number of ranks; of states in one bin the
    fastest is kept, and none that another one beats in time and memory. For each ceiling, options
    with a piece that alone is slower are left out: the sum of seconds is minimal among plans whose
    slowest rank may be as fast as that.

    Args:
        device_bins, host_bins: of the memory of all devices and all hosts.
        ceilings: seconds of a piece, in the order they are tried; without, one of infinity: the
            objective of the seed system.
    """

    def __init__(
        self, device_bins: int = 128, host_bins: int = 24, ceilings: Sequence[float] = ()
    ) -> None:
        self._bins = device_bins, host_bins
        self._ceilings = tuple(ceilings) or (np.inf,)
        self._problem: PlacementProblem | None = None
        self._next = 0
        self._left: list[Proposal] = []
        self._tries = 0

    def load(self, problem: PlacementProblem) -> None:
        """Begin with a problem."""
        self._problem, self._next, self._left, self._tries = problem, 0, [], 0

    def propose(self) -> Proposal | None:
        """The next proposal, or None: there is no other."""
        if self._problem is None:
            return None
        while not self._left or self._tries >= _TRIES:
            if self._next >= len(self._ceilings):
                return None
            self._left = self._solve(self._problem, self._ceilings[self._next])
            self._next, self._tries = self._next + 1, 0
        return self._left[0]

    def feedback(self, partitionable: bool, rating: float | None = None) -> None:
        """What became of the last proposal.

        Args:
            partitionable: whether its pieces fit on ranks; if not, one with less memory follows.
            rating: seconds of its slowest rank.
        """
        if not self._left:
            return
        last = self._left.pop(0)
        self._tries += 1
        if partitionable:
            self._left = []
            return
        # Neighbours use almost the same memory: go on with one that uses clearly less.
        self._left = [
            one
            for one in self._left
            if one.device_bytes < last.device_bytes * _LESS
            or one.host_bytes < last.host_bytes * _LESS
        ]

    def _solve(self, problem: PlacementProblem, ceiling: float) -> list[Proposal]:
        """Proposals from the fastest, which takes most memory, to the smallest."""
        limits = [
            (limit - problem.base_4[row]) * problem.ranks
            for row, limit in zip((2, 3), problem.limits, strict=True)
        ]
        free = problem.times(problem.base_4[:, None])[0]
        # States: seconds, device bytes, host bytes.
        states_3S: Floats = np.zeros((3, 1))
        back: list[tuple[Ints, Ints]] = []
        for choices in problem.choices:
            fits = (choices.loads_4O[2] <= problem.limits[0] - problem.base_4[2]) & (
                choices.loads_4O[3] <= problem.limits[1]
            )
            wanted = np.flatnonzero(fits & (choices.seconds_O + free <= ceiling))
            if not len(wanted):
                wanted = np.flatnonzero(fits)
            own_3O = np.stack([choices.work_O, choices.device_O, choices.host_O])[:, wanted]
            every_3X = (states_3S[:, :, None] + own_3O[:, None, :]).reshape(3, -1)
            kept = self._kept(every_3X, limits)
            if not len(kept):
                return []
            back.append((wanted[kept % len(wanted)], kept // len(wanted)))
            states_3S = every_3X[:, kept]
        order = states_3S[0].argsort(kind="stable")
        return [self._walked(int(end), states_3S[:, end], back) for end in order]

    def _kept(self, every_3X: Floats, limits: Sequence[float]) -> Ints:
        """The states that go on: within the limits, the fastest of its bin, beaten by none."""
        inside = (every_3X[1] <= limits[0]) & (every_3X[2] <= limits[1])
        index = np.flatnonzero(inside)
        if not len(index):
            return index
        time, device, host = every_3X[:, index]
        bins = []
        for size, limit, count in zip((device, host), limits, self._bins, strict=True):
            scale = count / limit if limit > 0 and size.any() else 0.0
            bins.append(np.minimum((size * scale).astype(np.int64), count - 1))
        cell = bins[0] * self._bins[1] + bins[1]
        order = np.lexsort((time, cell))
        first = np.ones(len(order), dtype=bool)
        first[1:] = cell[order][1:] != cell[order][:-1]
        best = order[first]
        grid = np.full(self._bins, np.inf)
        grid[bins[0][best], bins[1][best]] = time[best]
        least = np.minimum.accumulate(np.minimum.accumulate(grid, axis=0), axis=1)
        below = np.full((self._bins[0] + 1, self._bins[1] + 1), np.inf)
        below[1:, 1:] = least
        rows, columns = bins[0][best], bins[1][best]
        beaten = np.minimum(below[rows, columns + 1], below[rows + 1, columns]) <= time[best]
        kept: Ints = index[best[~beaten]]
        return kept

    def _walked(self, end: int, state_3: Floats, back: list[tuple[Ints, Ints]]) -> Proposal:
        options: list[int] = []
        for option, before in reversed(back):
            options.append(int(option[end]))
            end = int(before[end])
        time, device, host = (float(x) for x in state_3)
        return Proposal(tuple(reversed(options)), device, host, time)
