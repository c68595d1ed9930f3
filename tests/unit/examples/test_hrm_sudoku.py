"""The Sudoku engine of examples/hrm: solving, making, and telling puzzles apart."""

from __future__ import annotations

import gzip
import itertools
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hrm.sudoku import Grid, full_grid, make_puzzle, solve
from hrm.sudoku_source import generated, listed, read_list
from hrm.sudoku_symmetry import canonical_form, random_images
from shoal.errors import ConfigError, DataError

HARD = "98.7..6....7.5..9......9..48...3.....2...6..7..15...6.1...6...2..3..5.1....1..4.."


def digits(text: str) -> Grid:
    return tuple(0 if c == "." else int(c) for c in text)


def is_solution(grid: Grid, box: int) -> bool:
    n = box * box
    rows = [grid[r * n : r * n + n] for r in range(n)]
    columns = [grid[c::n] for c in range(n)]
    boxes = [
        [rows[r + i][c + j] for i in range(box) for j in range(box)]
        for r in range(0, n, box)
        for c in range(0, n, box)
    ]
    return all(sorted(unit) == list(range(1, n + 1)) for unit in (*rows, *columns, *boxes))


def every_solution(grid: Grid) -> list[Grid]:
    """Of 4 x 4, by trying each digit in each blank."""
    if 0 not in grid:
        return [grid] if is_solution(grid, 2) else []
    at = grid.index(0)
    row, column = [grid[at // 4 * 4 + k] for k in range(4)], list(grid[at % 4 :: 4])
    found = []
    for digit in {1, 2, 3, 4} - set(row) - set(column):
        found += every_solution((*grid[:at], digit, *grid[at + 1 :]))
    return found


def test_there_are_288_small_grids() -> None:
    found = solve([0] * 16, 2, limit=1000)
    assert len(set(found.solutions)) == len(found.solutions) == 288
    assert all(is_solution(grid, 2) for grid in found.solutions)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=16, max_size=16), st.integers(0, 12))
def test_small_puzzles_have_the_solutions_that_trying_finds(cells: list[int], cut: int) -> None:
    grid = tuple(cells[:4] + [0] * cut + cells[4 + cut :])[:16]
    want = every_solution(grid)
    found = solve(grid, 2, limit=300)
    assert sorted(found.solutions) == sorted(want)
    assert solve(grid, 2).unique == (len(want) == 1)


def test_a_hard_puzzle_is_solved_by_guessing() -> None:
    puzzle = digits(HARD)
    found = solve(puzzle)
    assert found.unique and found.guesses > 20
    assert is_solution(found.solutions[0], 3)
    assert all(given in (0, cell) for given, cell in zip(puzzle, found.solutions[0], strict=True))
    assert solve(found.solutions[0]).guesses == 0


def test_what_contradicts_itself_has_no_solution() -> None:
    grid = [0] * 81
    grid[0] = grid[8] = 5
    assert solve(grid).solutions == ()
    with pytest.raises(DataError, match="81 cells"):
        solve([0] * 80)


def test_minimal_puzzles_miss_every_clue() -> None:
    puzzle, solution = make_puzzle(random.Random(3))
    assert solve(puzzle).solutions == (solution,)
    for cell in [c for c, digit in enumerate(puzzle) if digit]:
        assert not solve([0 if c == cell else d for c, d in enumerate(puzzle)]).unique


@pytest.mark.parametrize(("box", "clues"), [(3, 30), (3, 45), (2, 8)])
def test_puzzles_have_the_clues_asked_for(box: int, clues: int) -> None:
    puzzle, solution = make_puzzle(random.Random(1), box, clues=clues)
    assert len(puzzle) - puzzle.count(0) == clues
    assert solve(puzzle, box).solutions == (solution,)
    assert make_puzzle(random.Random(1), box, clues=clues) == (puzzle, solution)


def test_too_few_clues_are_refused() -> None:
    with pytest.raises(ConfigError, match="got 2"):
        make_puzzle(random.Random(0), 2, clues=2, tries=5)


def test_images_are_puzzles_of_the_same_class() -> None:
    rng = np.random.default_rng(0)
    forms = set()
    for k in range(4):
        puzzle, solution = make_puzzle(random.Random(k))
        form = canonical_form(puzzle, solution)
        forms.add(form)
        questions, answers = random_images(puzzle, solution, rng, 4)
        for question, answer in zip(questions.tolist(), answers.tolist(), strict=True):
            assert solve(question).solutions == (tuple(answer),)
            assert canonical_form(tuple(question), tuple(answer)) == form
    assert len(forms) == 4


def test_a_grid_with_many_symmetries_has_one_form() -> None:
    solution = tuple((i * 3 + i // 3 + j) % 9 + 1 for i in range(9) for j in range(9))
    rng = np.random.default_rng(5)
    puzzle = tuple((np.array(solution) * (rng.random(81) < 0.5)).tolist())
    form = canonical_form(puzzle, solution)
    for question, answer in zip(*random_images(puzzle, solution, rng, 6), strict=True):
        assert canonical_form(tuple(question.tolist()), tuple(answer.tolist())) == form


def every_image(puzzle: Grid) -> set[Grid]:
    """All images of a 4 x 4 puzzle, by the definition of the group."""
    lines = [
        [a, 1 - a, 2 + b, 3 - b] if not swap else [2 + b, 3 - b, a, 1 - a]
        for a, b, swap in itertools.product((0, 1), repeat=3)
    ]
    found = set()
    for rows, columns, turned in itertools.product(lines, lines, (False, True)):
        moved = [puzzle[c * 4 + r] if turned else puzzle[r * 4 + c] for r in rows for c in columns]
        for names in itertools.permutations((1, 2, 3, 4)):
            found.add(tuple(0 if digit == 0 else names[digit - 1] for digit in moved))
    return found


def test_forms_tell_small_puzzles_apart_exactly() -> None:
    made = [make_puzzle(random.Random(k), 2, clues=6) for k in range(40)]
    forms = [canonical_form(*pair, 2) for pair in made]
    orbits = [min(every_image(puzzle)) for puzzle, _ in made]
    assert len(set(orbits)) > 5
    for one, other in itertools.combinations(range(40), 2):
        assert (forms[one] == forms[other]) == (orbits[one] == orbits[other])
    least = min(every_image(made[0][1]))
    assert canonical_form(*made[0], 2).solution == bytes(least)


def test_grids_differ_with_the_seed() -> None:
    grids = [full_grid(random.Random(seed)) for seed in (0, 0, 1)]
    assert grids[0] == grids[1] != grids[2]
    assert is_solution(grids[0], 3)


def test_lists_are_read_solved_and_rated(tmp_path: Path) -> None:
    path = tmp_path / "list.txt.gz"
    lines = ["# puzzles", HARD, "", HARD.replace(".", "0") + ",rating 9", "." * 81]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    puzzles = read_list(path)
    assert puzzles == [digits(HARD), digits(HARD), (0,) * 81]
    rated = list(listed(puzzles, seed=1))
    assert sorted(r is None for r in rated) == [False, False, True]
    assert {r.clues for r in rated if r is not None} == {81 - HARD.count(".")}
    (tmp_path / "bad.txt").write_text(HARD + "\n" + HARD[:-1])
    with pytest.raises(DataError, match="line 2"):
        read_list(tmp_path / "bad.txt")
    with pytest.raises(DataError, match=r"none\.txt"):
        read_list(tmp_path / "none.txt")


def test_workers_change_nothing() -> None:
    alone = list(itertools.islice(generated(2, clues=7, seed=4), 5))
    spread = list(itertools.islice(generated(2, clues=7, seed=4, workers=2), 5))
    assert alone == spread
