"""ARC tasks: their JSON, their augmentations, and the 30 x 30 pages they are written on."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hrm.dihedral import COUNT, dihedral, undo
from shoal.errors import DataError

__all__ = [
    "COLOURS",
    "EOS",
    "SIDE",
    "VOCAB",
    "Augmentation",
    "Pair",
    "Task",
    "augmentations",
    "from_page",
    "read_tasks",
    "task_digest",
    "to_pages",
]

SIDE = 30
COLOURS = 10
EOS = 1
VOCAB = COLOURS + 2
_FIRST_COLOUR = 2
_SEPARATOR = "|||"

Grid = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Pair:
    """A grid and its answer, colours 0..9."""

    question: Grid
    answer: Grid


@dataclass(frozen=True, eq=False)
class Task:
    """A task by name: pairs that show the rule, and pairs that ask for it."""

    name: str
    shown: tuple[Pair, ...]
    asked: tuple[Pair, ...]


@dataclass(frozen=True, slots=True)
class Augmentation:
    """One of the eight turns, and new colours for 0..9; 0 stays."""

    turn: int
    colours: tuple[int, ...]

    @classmethod
    def identity(cls) -> Augmentation:
        """The one that changes nothing."""
        return cls(0, tuple(range(COLOURS)))

    @classmethod
    def random(cls, rng: np.random.Generator) -> Augmentation:
        """Any turn and any order of colours 1..9."""
        colours = (0, *(1 + rng.permutation(COLOURS - 1)).tolist())
        return cls(int(rng.integers(COUNT)), colours)

    def grid(self, grid: Grid) -> Grid:
        """A grid turned and coloured."""
        return dihedral(np.array(self.colours, dtype=np.uint8)[grid], self.turn)

    def undone(self, grid: Grid) -> Grid:
        """The grid this made it of."""
        back = np.argsort(self.colours).astype(np.uint8)
        found: Grid = back[undo(grid, self.turn)]
        return found

    def task(self, task: Task) -> Task:
        """A task in new clothes, named for them: name|||t<turn>|||<colours>."""

        def pairs(old: tuple[Pair, ...]) -> tuple[Pair, ...]:
            return tuple(Pair(self.grid(pair.question), self.grid(pair.answer)) for pair in old)

        colours = "".join(map(str, self.colours))
        name = _SEPARATOR.join([task.name, f"t{self.turn}", colours])
        return Task(name, pairs(task.shown), pairs(task.asked))

    @classmethod
    def of_name(cls, name: str) -> tuple[str, Augmentation]:
        """The plain name and the augmentation of a task's name."""
        plain, *rest = name.split(_SEPARATOR)
        if not rest:
            return plain, cls.identity()
        return plain, cls(int(rest[0].removeprefix("t")), tuple(map(int, rest[1])))


def read_tasks(challenges: str | Path, solutions: str | Path | None) -> list[Task]:
    """Tasks in order of name, from ARC's JSON, which may be gzipped.

    Args:
        solutions: answers of the asked pairs; None if the challenges contain them.

    Raises:
        DataError: not such files, or answers are missing.
    """
    asked = _json(challenges)
    answers = {} if solutions is None else _json(solutions)
    return [_task(name, asked[name], answers.get(name), str(challenges)) for name in sorted(asked)]


def _json(path: str | Path) -> dict[str, Any]:
    try:
        raw = Path(path).read_bytes()
        found = json.loads(gzip.decompress(raw) if str(path).endswith(".gz") else raw)
    except (OSError, EOFError, ValueError) as error:
        raise _malformed(str(path), str(error)) from error
    if not isinstance(found, dict):
        raise _malformed(str(path), type(found).__name__)
    return found


def _task(name: str, raw: Mapping[str, Any], answers: Any, path: str) -> Task:
    try:
        shown = tuple(Pair(_grid(pair["input"]), _grid(pair["output"])) for pair in raw["train"])
        tests: Sequence[Mapping[str, Any]] = raw["test"]
        if answers is None:
            answers = [pair["output"] for pair in tests]
        asked = tuple(
            Pair(_grid(pair["input"]), _grid(answer))
            for pair, answer in zip(tests, answers, strict=True)
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _malformed(f"{path}, task {name}", f"{error!r}") from error
    return Task(name, shown, asked)


def _grid(raw: Any) -> Grid:
    grid = np.array(raw)
    sides = grid.shape
    if len(sides) != 2 or not all(1 <= side <= SIDE for side in sides):
        raise ValueError(f"a grid of shape {sides}")
    if grid.min() < 0 or grid.max() >= COLOURS:
        raise ValueError(f"colours {grid.min()}..{grid.max()}")
    return grid.astype(np.uint8)


def _malformed(path: str, got: str) -> DataError:
    allowed = "ARC's challenges (with solutions): grids of up to 30 x 30, colours 0..9"
    return DataError(path, got=got, allowed=allowed, remedy="Download the file again.")


def task_digest(task: Task) -> bytes:
    """Equal for tasks with the same pairs, in any order."""

    def digest(pair: Pair) -> bytes:
        parts = [pair.question, pair.answer]
        texts = [bytes(grid.shape) + np.ascontiguousarray(grid).tobytes() for grid in parts]
        return hashlib.sha256(b"".join(texts)).digest()

    pairs = [b"".join(sorted(map(digest, part))) for part in (task.shown, task.asked)]
    return hashlib.sha256(b"".join(pairs)).digest()


def augmentations(task: Task, count: int, rng: np.random.Generator) -> list[Task]:
    """The task, and up to `count` different others made of it, in at most 5 tries each."""
    found, seen = [task], {task_digest(task)}
    for _ in range(5 * count):
        if len(found) > count:
            break
        made = Augmentation.random(rng).task(task)
        digest = task_digest(made)
        if digest not in seen:
            seen.add(digest)
            found.append(made)
    return found


def to_pages(pair: Pair, place: Callable[[int], int] | None = None) -> tuple[Grid, Grid]:
    """Question and answer as tokens on 30 x 30 pages, [900] each, at the same place.

    Args:
        place: maps the free rows, then the free columns, to the offset from the top and from the
            left; None puts the grids into the corner.
    """
    shapes = np.array([pair.question.shape, pair.answer.shape])
    room = SIDE - shapes.max(axis=0)
    top, left = (0, 0) if place is None else (place(int(room[0])), place(int(room[1])))
    return _page(pair.question, top, left), _page(pair.answer, top, left)


def _page(grid: Grid, top: int, left: int) -> Grid:
    page = np.zeros((SIDE, SIDE), dtype=np.uint8)
    bottom, right = top + grid.shape[0], left + grid.shape[1]
    page[top:bottom, left:right] = grid + _FIRST_COLOUR
    if bottom < SIDE:
        page[bottom, left:right] = EOS
    if right < SIDE:
        page[top:bottom, right] = EOS
    return page.ravel()


def from_page(page: Grid) -> Grid:
    """The largest rectangle of colours in the page's corner, as a grid of colours.

    For pages in the corner, as in tests, this inverts `to_pages`.
    """
    cells = page.reshape(SIDE, SIDE)
    best, columns = (0, 0), SIDE
    for row in range(SIDE):
        blocked = np.flatnonzero(cells[row, :columns] < _FIRST_COLOUR)
        columns = int(blocked[0]) if len(blocked) else columns
        if (row + 1) * columns > best[0] * best[1]:
            best = (row + 1, columns)
    return cells[: best[0], : best[1]] - np.uint8(_FIRST_COLOUR)
