"""The search: greedy, dynamic programming, and local search on the slowest rank's seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.planner.problem import DEVICE, HOST, NODE, Choices, Ints, PartialPlan, PlacementProblem
from shoal.planner.proposer import DynamicProgrammingProposer

_BISECTIONS = 10
_CEILINGS = 5  # of dynamic programming
_TRIES = 12  # of plans whose memory fits in all, though pieces did not
_SMALL = 40  # tables up to which moves cost next to nothing
_GAP = 1e-9
_PATIENCE, _WORTH = 200, 1e-4  # moves without a gain of this part end the local search


@dataclass(frozen=True, slots=True)
class SearchResult:
    """A plan as the search has it.

    Args:
        state: options and ranks of all tables.
        lower_bound_s: seconds that no plan can beat.
        notes: what was done.
    """

    state: PartialPlan
    lower_bound_s: float
    notes: tuple[str, ...]


def search(
    problem: PlacementProblem,
    *,
    time_limit_s: float = 60.0,
    moves: int | None = None,
    seed: int = 0,
) -> SearchResult | None:
    """The best plan found; None if tables do not fit.

    The same problem, seed and number of moves give the same plan, unless the time limit ends it.

    Args:
        problem: tables, options and limits.
        time_limit_s: the search ends soon after.
        moves: of the local search; a number that grows with the problem when left out.
        seed: of the local search.
    """
    if too_large(problem):
        return None
    until = time.monotonic() + time_limit_s
    bound = problem.lower_bound()
    best = None
    notes: list[str] = []
    for name, state in _starts(problem, bound, until):
        if best is None or state.score < best.score:
            best = state
            notes.append(f"{name}: {state.peak:.6g} s")
    if best is None:
        return None
    count = _moves(problem) if moves is None else moves
    best, made = improve(best, count, until=until, seed=seed, bound=bound)
    notes.append(f"local search, {made} moves: {best.peak:.6g} s; no plan is below {bound:.6g} s")
    if time.monotonic() > until:
        notes.append(f"the time limit of {time_limit_s:g} s ended the search")
    return SearchResult(best, bound, tuple(notes))


def _moves(problem: PlacementProblem) -> int:
    """Enough to settle small problems, and a few for each table of a large one."""
    tables = len(problem.choices)
    if problem.ranks == 1:
        return tables
    return 1500 if tables <= _SMALL else min(3000, 600 + 2 * tables)


def _starts(
    problem: PlacementProblem, bound: float, until: float
) -> Iterator[tuple[str, PartialPlan]]:
    first = greedy(problem)
    ceiling = math.inf
    if first is not None:
        ceiling = first.peak
        yield "greedy", first
        low, high = bound, ceiling
        for _ in range(_BISECTIONS):
            if time.monotonic() > until or high <= low * (1 + 1e-4):
                break
            middle = math.sqrt(low * high)
            state = greedy(problem, ceiling=middle)
            if state is not None:
                yield "greedy under a ceiling", state
            if state is not None and state.peak <= middle * (1 + _GAP):
                high = min(middle, state.peak)
            else:
                low = middle
        ceiling = high
    state = spread(problem)
    if state is not None:
        ceiling = min(ceiling, state.peak)
        yield "each table's fastest option", state
    # What a plan may take is not what its largest piece may take: also try lower ceilings.
    ceilings = [math.inf]
    if math.isfinite(ceiling):
        ceilings = [*np.geomspace(ceiling, max(bound, 1e-12), _CEILINGS), math.inf]
    proposer = DynamicProgrammingProposer(ceilings=ceilings)
    proposer.load(problem)
    while time.monotonic() < until and (proposal := proposer.propose()) is not None:
        state = greedy(problem, options=proposal.options)
        proposer.feedback(state is not None, None if state is None else state.peak)
        if state is not None:
            yield "dynamic programming", state
    if first is None and (state := greedy(problem, by_memory=True)) is not None:
        yield "greedy by memory", state


def spread(problem: PlacementProblem) -> PartialPlan | None:
    """Each table in the option with the fastest pieces; while that does not fit, the table with
    most memory takes its next one."""
    ranked = [choices.seconds_O.argsort(kind="stable") for choices in problem.choices]
    at = np.zeros(len(ranked), dtype=np.int64)
    sizes = np.array([(c.device_O[r[0]], c.host_O[r[0]]) for c, r in _pairs(problem, ranked)])
    sizes = sizes.reshape(-1, 2)
    tries, limits = 0, np.array(problem.limits) * problem.ranks
    last = np.array([len(row) - 1 for row in ranked])
    while tries < _TRIES:
        over = sizes.sum(axis=0) > limits
        if not over.any():
            options = [int(row[k]) for row, k in zip(ranked, at, strict=True)]
            if (state := greedy(problem, options=options)) is not None:
                return state
            tries += 1
        keys = np.where(at < last, sizes[:, int(over[1] and not over[0])], -1.0)
        if keys.max(initial=-1.0) < 0:
            return None
        # One table at a time to get below the limits; more of them where pieces do not fit.
        for table in keys.argsort()[::-1][: 1 if over.any() else 1 + len(at) // 50].tolist():
            if at[table] < last[table]:
                at[table] += 1
                choices, option = problem.choices[table], ranked[table][at[table]]
                sizes[table] = choices.device_O[option], choices.host_O[option]
    return None


def _pairs(problem: PlacementProblem, ranked: list[Ints]) -> Iterator[tuple[Choices, Ints]]:
    return zip(problem.choices, ranked, strict=True)


def fits(problem: PlacementProblem) -> bool:
    """Whether some plan fits, as far as two quick tries show."""
    if too_large(problem):
        return False
    return greedy(problem, by_memory=True) is not None or greedy(problem) is not None


def too_large(problem: PlacementProblem) -> bool:
    """Whether even the smallest option of each table is too much for all ranks together."""
    for row, limit in zip((DEVICE, HOST), problem.limits, strict=True):
        least = sum(float((c.loads_4O[row] * c.counts_O).min()) for c in problem.choices)
        if least > (limit - problem.base_4[row]) * problem.ranks:
            return True
    return False


def greedy(
    problem: PlacementProblem,
    *,
    ceiling: float | None = None,
    options: Sequence[int] | None = None,
    by_memory: bool = False,
) -> PartialPlan | None:
    """Place tables one by one, those that are slow or large first; None if one does not fit.

    Args:
        problem: what to place.
        ceiling: as of `PartialPlan.insert`.
        options: of each table, if they are settled.
        by_memory: large tables first, each in its smallest option.
    """
    state = PartialPlan(problem)
    limit = problem.limits
    sizes = []
    for table, choices in enumerate(problem.choices):
        only = None if options is None else options[table]
        seconds = choices.work_O.min() if only is None else choices.seconds_O[only]
        device = choices.device_O.min() if only is None else choices.loads_4O[2, only]
        host = choices.host_O.min() if only is None else choices.loads_4O[3, only]
        memory = max(device / max(limit[0], 1.0), host / max(limit[1], 1.0))
        sizes.append((float(seconds), float(memory)))
    longest, largest = (max((size[k] for size in sizes), default=0.0) or 1.0 for k in (0, 1))
    keys = [
        memory / largest + (0.0 if by_memory else seconds / longest) for seconds, memory in sizes
    ]
    for table in sorted(range(len(keys)), key=lambda t: (-keys[t], t)):
        choices, only = problem.choices[table], None if options is None else options[table]
        if not by_memory:
            if not state.insert(table, ceiling=ceiling, only=only):
                return None
            continue
        memory_O = choices.device_O / limit[0] + choices.host_O / limit[1]
        if not any(state.insert(table, only=int(k)) for k in memory_O.argsort(kind="stable")):
            return None
    return state


def improve(
    state: PartialPlan, moves: int, *, until: float, seed: int = 0, bound: float = 0.0
) -> tuple[PartialPlan, int]:
    """Take a few tables out, some of them off the slowest rank, and place them again, if better.

    Args:
        state: where to begin; unchanged.
        moves: how often.
        until: monotonic time at which it ends, at the latest.
        seed: of the tables taken.
        bound: seconds at which nothing is left to gain.

    Returns:
        The state, and the moves made.
    """
    rng = np.random.default_rng(seed)
    problem, tables = state.problem, len(state.chosen)
    current = best = state.copy()
    score, made = current.score, 0
    best_score, told, at = score, score[0], 0
    for made in range(1, moves + 1):
        if best_score[0] < told * (1 - _WORTH):
            told, at = best_score[0], made
        idle = made - at > max(_PATIENCE, moves // 3)
        if best_score[0] <= bound * (1 + _GAP) or idle or time.monotonic() > until or not tables:
            break
        rank = int(problem.times(current.loads_4W).argmax())
        near = current.on(rank)
        split = [t for t in near if problem.choices[t].scopes_O[current.chosen[t]] >= NODE]
        pool = split if split and rng.random() < 0.7 else near
        first = [pool[k] for k in rng.permutation(len(pool))[: int(rng.integers(1, 4))]]
        others = rng.integers(0, tables, size=int(rng.integers(0, 4))).tolist()
        taken = list(dict.fromkeys([*first, *others]))
        trial = current.copy()
        for table in taken:
            trial.take(table)
        order = sorted(taken, key=lambda t: -problem.choices[t].work_O.min())
        if rng.random() < 0.3:
            order = [taken[k] for k in rng.permutation(len(taken))]
        ceiling = score[0] * (1 - float(rng.choice((1e-6, 0.003, 0.02))))
        if not all(trial.insert(table, ceiling=ceiling) for table in order):
            continue
        after = trial.score
        # Slightly worse ones now and then, which leads out of dead ends.
        slack = 1 + 0.01 * max(0.0, 1 - 2 * made / moves) * float(rng.random() < 0.2)
        if after < score or (after[0] <= score[0] * slack and after[0] > score[0]):
            current, score = trial, after
            if score < best_score:
                best, best_score = current, score
    return best, made
