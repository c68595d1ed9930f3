"""The builders of examples/hrm, with generated puzzles only: what they write, seeded and apart."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import build_arc
import build_maze
import build_rules
import build_sudoku
from hrm.arc import (
    EOS,
    SIDE,
    Augmentation,
    Pair,
    Task,
    augmentations,
    from_page,
    read_tasks,
    task_digest,
    to_pages,
)
from hrm.dataset import read_split
from hrm.dihedral import COUNT, dihedral, undo
from hrm.maze import CHARSET, canonical_maze, make_maze, shortest_paths, to_tokens
from hrm.rule_task import RuleTask
from hrm.sudoku import solve
from hrm.sudoku_symmetry import canonical_form
from shoal.errors import ConfigError, DataError


def files_of(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_sudoku_is_seeded_augmented_and_apart(tmp_path: Path) -> None:
    options = shlex.split("--train 12 --test 8 --num-aug 3 --clues 36 --seed 5 --output-dir")
    build_sudoku.main([*options, str(tmp_path / "a")])
    build_sudoku.main([*options, str(tmp_path / "b")])
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    train, test = (read_split(tmp_path / "a", split) for split in ("train", "test"))
    meta = train.metadata
    assert (meta.vocab_size, meta.seq_len, meta.num_puzzle_identifiers) == (11, 81, 1)
    assert (meta.total_groups, meta.mean_puzzle_examples) == (12, 1.0)
    assert train.examples == 48 and test.examples == 8
    classes: dict[str, list[Any]] = {}
    for split, data in (("train", train), ("test", test)):
        found = data.sets["all"]
        for inputs, labels in zip(found.inputs, found.labels, strict=True):
            puzzle, solution = tuple((inputs - 1).tolist()), tuple((labels - 1).tolist())
            assert solve(puzzle).solutions == (solution,)
            classes.setdefault(split, []).append(canonical_form(puzzle, solution))
    assert len(set(classes["train"])) == 12  # images are of their puzzle's class
    assert classes["train"][:4] == classes["train"][:1] * 4
    solutions = [{form.solution for form in classes[split]} for split in ("train", "test")]
    assert not solutions[0] & solutions[1]
    report = json.loads((tmp_path / "a" / "statistics.json").read_text())
    assert report["train"]["mean_clues"] == 36
    assert report["test"]["mean_guesses"] >= 0


def test_small_sudoku_is_apart_by_puzzle(tmp_path: Path) -> None:
    options = shlex.split("--box 2 --clues 8 --train 30 --test 20 --output-dir")
    build_sudoku.main([*options, str(tmp_path)])
    forms = []
    for split in ("train", "test"):
        found = read_split(tmp_path, split).sets["all"]
        pairs = [
            (tuple((q - 1).tolist()), tuple((a - 1).tolist()))
            for q, a in zip(found.inputs, found.labels, strict=True)
        ]
        forms.append({canonical_form(*pair, 2) for pair in pairs})
    assert [len(found) for found in forms] == [30, 20]
    assert not forms[0] & forms[1]


def test_sudoku_lists_say_what_they_lack(tmp_path: Path) -> None:
    path = tmp_path / "few.txt"
    path.write_text(
        "." * 81 + "\n" + "98.7..6....7.5..9......9..48...3.....2...6..7..15...6.1...6.."
        ".2..3..5.1....1..4..\n" * 2
    )
    options = ["--puzzles", str(path), "--train", "1", "--test", "1"]
    with pytest.raises(DataError, match=r"'not_unique': 1.*'same_class': 1"):
        build_sudoku.main([*options, "--output-dir", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
    build_sudoku.main([*options[:-1], "0", "--output-dir", str(tmp_path / "out")])
    assert read_split(tmp_path / "out", "test").examples == 0


@pytest.mark.parametrize(("n", "loops"), [(9, 0.0), (10, 0.5), (30, 0.1)])
def test_mazes_have_one_shortest_path(n: int, loops: float) -> None:
    maze = make_maze(np.random.default_rng(n), n, loops=loops, min_length=n)
    assert maze.question.shape == (n, n)
    assert set(maze.question.ravel()) == set("# SG")
    start, goal = (tuple(np.argwhere(maze.question == c)[0].tolist()) for c in "SG")
    distance, ways = shortest_paths(maze.question == "#", start)
    assert (distance[goal], ways[goal]) == (maze.length, 1)
    path = np.argwhere(maze.answer == "o")
    assert len(path) == maze.length - 1 >= n - 1
    assert sorted(distance[tuple(cell)] for cell in path) == list(range(1, maze.length))
    assert ((maze.answer == maze.question) | (maze.answer == "o")).all()
    assert (maze.question[maze.answer == "o"] == " ").all()


def test_ways_are_counted() -> None:
    distance, ways = shortest_paths(np.zeros((4, 4), dtype=bool), (0, 0))
    assert distance[3, 3] == 6 and ways[3, 3] == 20
    walled = np.zeros((1, 3), dtype=bool)
    walled[0, 1] = True
    assert shortest_paths(walled, (0, 0))[0].tolist() == [[0, -1, -1]]


def test_maze_data(tmp_path: Path) -> None:
    options = shlex.split("--side 9 --train 6 --test 4 --aug --output-dir")
    build_maze.main([*options, str(tmp_path / "a")])
    build_maze.main([*options, str(tmp_path / "b")])
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    train, test = (read_split(tmp_path / "a", split) for split in ("train", "test"))
    assert (train.metadata.vocab_size, train.metadata.seq_len) == (6, 81)
    assert (train.examples, train.metadata.total_groups, test.examples) == (48, 6, 4)
    characters = np.array(list("?" + CHARSET))
    kinds = []
    for data in (train, test):
        grids = characters[data.sets["all"].inputs].reshape(-1, 9, 9)
        kinds.append({canonical_maze(grid) for grid in grids})
    assert [len(kind) for kind in kinds] == [6, 4] and not kinds[0] & kinds[1]
    assert to_tokens(np.array([list("# "), list("SG")])).tolist() == [1, 2, 3, 4]
    with pytest.raises(ConfigError, match="min_length"):
        make_maze(np.random.default_rng(0), 4, min_length=99)


def test_turns_are_eight_and_undone() -> None:
    grid = np.arange(6).reshape(2, 3)
    turned = [dihedral(grid, k) for k in range(COUNT)]
    assert len({(t.shape, t.tobytes()) for t in turned}) == COUNT
    assert all(np.array_equal(undo(t, k), grid) for k, t in enumerate(turned))


def test_rules_are_permutations_that_only_ids_tell(tmp_path: Path) -> None:
    build_rules.main(["--ids", "20", "--output-dir", str(tmp_path)])
    task = RuleTask(ids=20)
    rules = task.rules()
    assert (np.sort(rules, axis=1) == np.arange(task.colours)).all()
    assert len(np.unique(rules, axis=0)) > 10
    for split, grids in (("train", task.train_grids), ("test", task.test_grids)):
        data = read_split(tmp_path, split)
        found = data.sets["all"]
        assert (data.examples, found.groups) == (20 * grids, 20)
        ids = found.ids_of(np.arange(data.examples))
        assert ids.tolist() == np.repeat(np.arange(1, 21), grids).tolist()
        want = np.take_along_axis(rules[ids - 1], found.inputs.astype(np.int64) - 1, axis=1) + 1
        assert (found.labels == want).all()
    assert data.metadata.num_puzzle_identifiers == 21
    names = json.loads((tmp_path / "identifiers.json").read_text())
    assert names[0] == "<blank>" and len(names) == 21


def task_json(seed: int, tests: int = 1) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def grid() -> list[list[int]]:
        shape = rng.integers(2, 7, size=2)
        return rng.integers(10, size=shape).tolist()  # type: ignore[no-any-return]

    pair = lambda: {"input": grid(), "output": grid()}  # noqa: E731
    return {"train": [pair() for _ in range(3)], "test": [pair() for _ in range(tests)]}


def arc_files(root: Path) -> dict[str, list[str]]:
    """Challenges with answers in a file of their own, and with answers inside."""
    shown = {f"t{k}": task_json(k) for k in (2, 1)}
    asked = {"e1": task_json(7, tests=2)}
    answers = {"e1": [pair.pop("output") for pair in asked["e1"]["test"]]}
    for name, raw in {"shown": shown, "asked": asked, "answers": answers}.items():
        (root / f"{name}.json").write_text(json.dumps(raw))
    names = {"--train-tasks": ["shown"], "--test-tasks": ["asked", "answers"]}
    return {option: [str(root / f"{n}.json") for n in files] for option, files in names.items()}


def test_arc_data(tmp_path: Path) -> None:
    files = arc_files(tmp_path)
    options = [word for option, paths in files.items() for word in (option, *paths)]
    for name in ("a", "b"):
        build_arc.main([*options, "--num-aug", "5", "--output-dir", str(tmp_path / name)])
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    train, test = (read_split(tmp_path / "a", split) for split in ("train", "test"))
    assert (train.metadata.vocab_size, train.metadata.seq_len) == (12, 900)
    # Four pairs of each training task, the three shown ones of the other; two asked.
    assert (train.metadata.total_groups, train.examples) == (3, 6 * (4 + 4 + 3))
    assert (test.metadata.total_groups, test.examples) == (1, 6 * 2)
    names = json.loads((tmp_path / "a" / "identifiers.json").read_text())
    assert [n for n in names if "|" not in n] == ["<blank>", "t1", "t2", "e1"]
    assert len(names) == len(set(names)) == 1 + 18
    found = test.sets["all"]
    task = read_tasks(*files["--test-tasks"])[0]
    for example, puzzle in enumerate(found.ids_of(np.arange(test.examples))):
        plain, clothes = Augmentation.of_name(names[puzzle])
        assert plain == "e1"
        pair = task.asked[example % 2]
        assert np.array_equal(clothes.undone(from_page(found.inputs[example])), pair.question)
        assert np.array_equal(clothes.undone(from_page(found.labels[example])), pair.answer)


def test_arc_without_tasks_or_with_too_many_files_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--output-dir", str(tmp_path / "out")]
    for options, said in ((place, "no tasks"), ([*place, "--train-tasks", "a", "b", "c"], "'c'")):
        with pytest.raises(SystemExit):
            build_arc.main(options)
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_builder_says_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, build_arc.__file__, "--train-tasks", str(tmp_path / "none.json")]
    command += ["--output-dir", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and "none.json" in line and "Traceback" not in line
    assert not any((tmp_path / "out").iterdir())


def test_arc_tasks_are_trained_on_or_tested(tmp_path: Path) -> None:
    files = arc_files(tmp_path)
    twice = ["--train-tasks", *files["--train-tasks"], "--test-tasks", *files["--train-tasks"]]
    with pytest.raises(DataError, match="'t1'"):
        build_arc.main([*twice, "--num-aug", "0", "--output-dir", str(tmp_path / "out")])
    with pytest.raises(DataError, match=r"asked\.json, task e1"):
        read_tasks(files["--test-tasks"][0], None)
    (tmp_path / "odd.json").write_text('{"x": {"train": [{"input": [[11]]}], "test": []}}')
    with pytest.raises(DataError, match=r"odd\.json, task x"):
        read_tasks(tmp_path / "odd.json", None)


def test_pages_have_an_edge_below_and_to_the_right() -> None:
    pair = Pair(np.array([[0, 9]], dtype=np.uint8), np.array([[1], [2]], dtype=np.uint8))
    page = to_pages(pair, lambda room: room - 1)[0].reshape(SIDE, SIDE)
    # The pair takes 2 x 2 together, so 27 rows and columns are left out above and to the left.
    assert page[27, 27:30].tolist() == [2, 11, EOS]
    assert page[28, 27:30].tolist() == [EOS, EOS, 0]
    assert int((page != 0).sum()) == 5
    full = Pair(np.full((SIDE, SIDE), 3, dtype=np.uint8), np.zeros((SIDE, SIDE), dtype=np.uint8))
    assert set(to_pages(full)[0].tolist()) == {5}
    assert np.array_equal(from_page(to_pages(full)[0]), full.question)


def test_augmentations_differ_and_repeats_are_dropped() -> None:
    black = Pair(np.zeros((2, 2), dtype=np.uint8), np.zeros((2, 2), dtype=np.uint8))
    task = Task("dull", (black,), (black,))
    assert augmentations(task, 20, np.random.default_rng(0)) == [task]
    tilted = Pair(np.array([[0, 1, 2]], dtype=np.uint8), np.array([[3, 4]], dtype=np.uint8))
    found = augmentations(Task("rich", (tilted,), (black,)), 30, np.random.default_rng(0))
    assert len({task_digest(t) for t in found}) == len(found) == 31
