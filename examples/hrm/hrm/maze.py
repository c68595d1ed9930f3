"""Mazes with one shortest path.

A maze is an n x n array of characters: "#" wall, " " floor, S start, G goal; its answer has "o"
on the floor of the path between them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hrm.dihedral import COUNT, dihedral
from shoal.errors import ConfigError

__all__ = ["CHARSET", "Maze", "canonical_maze", "make_maze", "shortest_paths", "to_tokens"]

CHARSET = "# SGo"
"""Token of a character: its place here, plus 1; 0 is padding."""

_STEPS = ((0, 1), (1, 0), (0, -1), (-1, 0))
Cell = tuple[int, int]
Walls = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Maze:
    """A maze, its answer, and the steps from start to goal."""

    question: NDArray[np.str_]
    answer: NDArray[np.str_]
    length: int


def to_tokens(maze: NDArray[np.str_]) -> NDArray[np.uint8]:
    """Tokens row by row, [n * n]."""
    tokens = np.zeros(maze.shape, dtype=np.uint8)
    for token, character in enumerate(CHARSET, 1):
        tokens[maze == character] = token
    return tokens.ravel()


def canonical_maze(maze: NDArray[np.str_]) -> bytes:
    """Equal for mazes that are turned or mirrored into each other."""
    return min(to_tokens(dihedral(maze, k)).tobytes() for k in range(COUNT))


def make_maze(
    rng: np.random.Generator, n: int = 30, *, loops: float = 0.1, min_length: int = 0
) -> Maze:
    """A maze whose shortest path from start to goal is the only one so short.

    Args:
        n: rows and columns, at least 3; floors are on every second one and between.
        loops: walls taken out of the spanning tree, over its cells; 0 leaves a single way
            between any two floors.
        min_length: fewest steps of the path.

    Raises:
        ConfigError: paths are not that long in so small a maze.
    """
    if n < 3:
        raise ConfigError("size of a maze", got=n, allowed="3 or more", remedy="Give n.")
    for _ in range(1000):
        walls = _carve(rng, n, loops)
        floors = np.argwhere(~walls)
        start, goal = (tuple(c) for c in floors[rng.choice(len(floors), 2, replace=False)].tolist())
        distance, ways = shortest_paths(walls, start)
        if distance[goal] >= max(min_length, 2) and ways[goal] == 1:
            return _drawn(walls, start, goal, distance)
    raise ConfigError(
        "min_length of mazes",
        got=f"{min_length} in {n} x {n}",
        allowed="what one in a thousand mazes has",
        remedy="Ask for shorter paths, fewer loops or larger mazes.",
    )


def _carve(rng: np.random.Generator, n: int, loops: float) -> Walls:
    """Walls after a walk that digs from a random cell, and of which some more are taken out."""
    walls = np.ones((n, n), dtype=bool)
    side = (n + 1) // 2
    here = (2 * int(rng.integers(side)), 2 * int(rng.integers(side)))
    walls[here] = False
    trail = [here]
    while trail:
        row, column = trail[-1]
        near = [(row + 2 * dr, column + 2 * dc) for dr, dc in _STEPS]
        new = [c for c in near if 0 <= c[0] < n and 0 <= c[1] < n and walls[c]]
        if not new:
            trail.pop()
            continue
        to = new[int(rng.integers(len(new)))]
        walls[to] = walls[(row + to[0]) // 2, (column + to[1]) // 2] = False
        trail.append(to)
    span = 2 * side - 1
    between = [(r, c) for r in range(span) for c in range(span) if (r + c) % 2 and walls[r, c]]
    for index in rng.permutation(len(between))[: int(loops * side * side)]:
        walls[between[index]] = False
    return walls


def shortest_paths(walls: Walls, start: Cell) -> tuple[NDArray[np.int64], NDArray[np.object_]]:
    """Steps from the start to every floor, -1 where there is no way, and the ways so short."""
    distance = np.full(walls.shape, -1, dtype=np.int64)
    ways = np.zeros(walls.shape, dtype=object)
    distance[start], ways[start] = 0, 1
    queue = deque([start])
    while queue:
        here = queue.popleft()
        for to in _floors_by(walls, here):
            if distance[to] < 0:
                distance[to] = distance[here] + 1
                queue.append(to)
            if distance[to] == distance[here] + 1:
                ways[to] += ways[here]
    return distance, ways


def _floors_by(walls: Walls, here: Cell) -> list[Cell]:
    rows, columns = walls.shape
    near = [(here[0] + dr, here[1] + dc) for dr, dc in _STEPS]
    return [c for c in near if 0 <= c[0] < rows and 0 <= c[1] < columns and not walls[c]]


def _drawn(walls: Walls, start: Cell, goal: Cell, distance: NDArray[np.int64]) -> Maze:
    question = np.where(walls, "#", " ")
    question[start], question[goal] = "S", "G"
    answer, here = question.copy(), goal
    while distance[here] > 1:
        here = next(c for c in _floors_by(walls, here) if distance[c] == distance[here] - 1)
        answer[here] = "o"
    return Maze(question, answer, int(distance[goal]))
