"""HRM's bench: no case goes missing, and rows that need GPUs are left open without them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.slow

FILE = Path(__file__).resolve().parents[3] / "bench" / "hrm.py"


def bench() -> Any:
    """bench/hrm.py; `import hrm` is the example's package."""
    spec = importlib.util.spec_from_file_location("bench_of_hrm", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def floor(case: Any) -> float:
    return float(case.bar * case.peer_value)


def test_every_row_that_was_asked_for() -> None:
    module = bench()
    cases = {case.name: case for case in module.cases(module.Scale(gpus=4))}
    for seed in range(3):
        rules = f"per-id rules, seed {seed}"
        assert floor(cases[f"{rules}, solved"]) == 0.9
        assert floor(cases[f"{rules}, not solved with frozen rows"]) == 0.95
        assert floor(cases[f"4 x 4 Sudoku, seed {seed}, solved"]) == 0.6
    for name in ("Sudoku recipe, one GPU", "Sudoku recipe, 4 GPUs"):
        assert round(floor(cases[name]), 6) == 6000
    assert cases["Sudoku recipe, 1 to 4 GPUs"].bar == 0.9
    table = [name for name in cases if name.startswith("table of 10,000,000 x 512 over 4 GPUs")]
    assert len(table) == 4
    recipe = [name for name in cases if name.startswith("1,000 listed puzzles x 1,000, 4 GPUs")]
    assert len(recipe) == 3
    step = cases["Sudoku recipe, 4 GPUs, 192 samples a GPU, step"]
    assert (step.peer_value, step.bar, step.better) == (25, 1, "lower")
    assert sum(name.startswith("mixed puzzles, ") for name in cases) == 3


def test_without_gpus_their_rows_have_a_note() -> None:
    module = bench()
    jobs = module._jobs(module.Scale(gpus=0))[6:]
    assert len(jobs) == 10
    for declared, run in jobs:
        assert all(found.note.startswith("needs GPUs") for found in run().values())
        assert set(run()) == {case.name for case in declared}


def test_what_a_large_table_found_before_it_failed_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = bench()

    def failing(ranks: int, task: str, params: dict[str, Any], **_: Any) -> None:
        assert (ranks, task, params["saves"]) == (2, "table_scale", True)
        for rank in range(2):
            found = {"dense_step_s": 0.02 + rank / 1e3, "filled_rows_per_s": 4e6, "peak_bytes": 1e9}
            found |= {"step_s": 0.03, "rows_per_s": 5e4} if rank else {}
            Path(params["notes"], f"{rank}.json").write_text(json.dumps(found))
        raise RuntimeError("too late")

    monkeypatch.setattr(module, "on_ranks", failing)
    scale = module.Scale.quick(2, "cpu", ())
    declared, run = module._table(scale, tmp_path)
    filled, rows, step, saved = (run()[case.name] for case in declared)
    assert (filled.ours, filled.note) == (4000, "2,000.0 k a GPU")
    assert rows.ours is None and rows.note == "too late"
    assert step.ours == 30 and step.peer_value == 21
    assert saved.ours is None and saved.note == "too late"


def puzzles_of(clues: int, tmp_path: Path) -> str:
    from hrm.sudoku_source import generated

    file = tmp_path / f"{clues}.txt"
    made = (one for one in generated(clues=clues, seed=clues) if one is not None)
    lines = ["".join(map(str, one.puzzle)) for _, one in zip(range(12), made, strict=False)]
    file.write_text("\n".join(lines))
    return str(file)


@pytest.mark.timeout(1500)
def test_a_run_of_mixed_puzzles_to_its_end(tmp_path: Path) -> None:
    """Half a minute; it may take what a slow machine needs."""
    lists = [puzzles_of(clues, tmp_path) for clues in (32, 34)]
    state, file = tmp_path / "state", tmp_path / "rows.json"
    command = [sys.executable, str(FILE), "--quick", "--ranks", "1", "--json", str(file)]
    command += ["--case", "mixed puzzles, HRM without", "--state", str(state), "--puzzles", *lists]
    subprocess.run([*command, "--recipe-s", "1000"], capture_output=True, timeout=1300, check=True)
    (row,) = json.loads(file.read_text())["rows"]
    assert row["note"].startswith("40 of 40 steps") and "not finished" not in row["note"]
    assert row["ours"] is not None
    assert "HRM without the bootstrap forward" in (state / "curve.svg").read_text()


def test_a_run_of_mixed_puzzles_goes_on_in_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, asked, now_s = bench(), [], [0.0]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "statistics.json").write_text("{}")
    # A folder of a bench that did not write whether the run was finished.
    first = tmp_path / "HRM-without-the-bootstrap-forward"
    first.mkdir()
    (first / "reached.json").write_text(json.dumps({"steps": 40.0, "total_steps": 41.0}))

    def trained(_ranks: int, task: str, params: dict[str, Any], **_: Any) -> list[dict[str, float]]:
        asked.append((Path(params["run"]).name, params["arch"][-1]))
        now_s[0] += 60
        steps = 20.0 * sum(one == asked[-1] for one in asked)
        place = Path(params["run"])
        place.mkdir(exist_ok=True)
        line = json.dumps({"step": steps, "eval/all/exact_accuracy": steps / 100})
        with (place / "log.jsonl").open("a") as log:
            log.write(line + "\n")
        shown = {"exact_accuracy": steps / 100, "blank_accuracy": 0.5, "count": 4.0}
        # The last batch of an epoch may be left out: a whole run can end before its last step.
        length = {"steps": steps, "total_steps": 41.0, "finished": float(steps == 40)}
        return [{**length, "steps_per_s": 2.0, **shown}]

    monkeypatch.setattr(module, "on_ranks", trained)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    scale = module.Scale(gpus=2, puzzles=("a", "b"), recipe_s=100.0, least_s=90.0)
    found = []
    for _ in range(3):
        jobs = module._mixed(scale, tmp_path)
        found.append([value for _, run in jobs for value in run().values()])
    assert [name for name, _ in asked] == ["HRM-without-the-bootstrap-forward"] * 2 + ["HRM"]
    assert asked[0][1] == "arch.bootstrap=false"
    assert [call[0].ours for call in found] == [0.2, 0.4, 0.4]
    assert "not finished" in found[0][0].note and "not finished" not in found[1][0].note
    assert found[0][1].note == found[2][2].note == "not begun: call again"
    assert (tmp_path / "curve.svg").read_text().count("stroke-width='2'") == 2


def test_the_large_table_needs_no_hydra(tmp_path: Path) -> None:
    blocked = "import sys; sys.modules.update(dict.fromkeys(['hydra', 'omegaconf']))"
    code = f"{blocked}; import work_hrm_table; print(work_hrm_table.Size)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=250,
        cwd=FILE.parent,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_learning_job_runs_from_the_command_line(tmp_path: Path) -> None:
    command = [sys.executable, str(FILE), "--quick", "--case", "Sudoku, seed 1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("4 x 4 Sudoku, seed 1,")]
    assert "1 CPU s" in row and "steps, cells 0." in row
