from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.cli import app

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden"
FLIGHTS = "examples/flights.yaml"


@pytest.fixture(autouse=True)
def _fixed_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("examples", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)  # the root of a clone may have runs
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "dumb")
    for name in [name for name in os.environ if name.startswith("SHOAL_")]:
        monkeypatch.delenv(name)


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments), prog_name="shoal")
    return result.exit_code, result.stdout, result.stderr


def check_golden(name: str, text: str) -> None:
    """Compare with a stored text; UPDATE_GOLDEN=1 stores it anew."""
    lines = "".join(line.rstrip() + "\n" for line in text.splitlines())
    file = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN") == "1":
        file.write_text(lines, encoding="utf-8")
    assert lines == file.read_text(encoding="utf-8")


COMMANDS = [
    "",
    "init",
    "examples",
    "train",
    "eval",
    "predict",
    "bench comm",
    "ckpt",
    "export",
    "ps",
    "serve",
]
COMMANDS.append("data synth")
CKPT = ("inspect", "verify", "diff", "compact", "export", "import")
COMMANDS += [f"ckpt {name}" for name in CKPT]
PLAN = ("make", "simulate", "diff", "calibrate", "profile-data")
COMMANDS += ["plan", *(f"plan {name}" for name in PLAN)]


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str):
    code, out, _ = invoke(*command.split(), "--help")
    assert code == 0
    check_golden(f"help{'_' * bool(command)}{command.replace(' ', '_')}.txt", out)


ERRORS = {
    "no_file": ["train", "examples/flight.yaml"],
    "unknown_key": ["train", FLIGHTS, "model.hiden=[64]"],
    "unknown_kind": ["train", FLIGHTS, "tables.default.optimizer.kind=adagrab"],
    "misspelt_kind": ["train", FLIGHTS, "model.kind=dnc"],
    "unknown_device": ["train", FLIGHTS, "device=gpu"],
    "null_list": ["train", "examples/movielens.yaml", "data.source.eval_paths=null"],
    "misspelt_value": ["train", FLIGHTS, "data.shuffle=alway"],
    "two_types": ["train", FLIGHTS, "logging.tensorboard=maybe"],
    "fraction": ["train", FLIGHTS, "tables.default.dim=1.5"],
    "negative": ["train", FLIGHTS, "seed=-1"],
    "wrong_name": ["train", FLIGHTS, "name=a/b"],
    "wrong_time": ["train", FLIGHTS, "data.split=tomorrow"],
    "no_list": ["train", FLIGHTS, "baselines=logistic"],
    "no_list_of_model": ["train", FLIGHTS, "model.hidden=256"],
    "wrong_item": ["train", FLIGHTS, "model.hidden=[64, a]"],
    "list_for_settings": ["train", "examples/movielens.yaml", "data.source.ids=[a]"],
    "no_section": ["train", FLIGHTS, "data=5"],
    "no_paths": ["train", FLIGHTS, "data.source={kind: parquet}"],
    "no_such_feature": ["train", FLIGHTS, "features.histroy={}"],
    "wrong_part": ["train", FLIGHTS, "tables.default.expiry={ttl_s: soon}"],
    "metric": ["train", FLIGHTS, "eval.early_stop=acu"],
    "no_run_folder": ["eval", "runs/none"],
    "no_such_example": ["examples", "flight"],
    "init_of_no_file": ["init", "no.yaml", "--data", "nope.parquet"],
    "init_of_text": ["init", "no.yml"],
    "init_without_data": ["init", "no.yaml", "--label", "clicked"],
    "wrong_value": ["train", FLIGHTS, "data.batch_size=many"],
    "bad_override": ["train", FLIGHTS, "batch_size"],
    "no_run": ["eval", FLIGHTS, "output.dir=no-such-folder"],
    "not_a_run": ["predict", "examples"],
    "no_benchmark": ["bench", "comm", "--which", "g2h"],
    "no_devices": ["plan", FLIGHTS, "--devices", "0"],
    "no_plan": ["plan", "diff", "README.md", "README.md"],
    "no_constraint": ["plan", FLIGHTS, "distributed.placement.constraints={tail: {kind: x}}"],
    "no_checkpoint": ["ckpt", "inspect", "examples"],
    "no_export_format": ["ckpt", "export", "examples", "--out", "no", "--format", "parket"],
    "no_import_format": ["ckpt", "import", "README.md", "--out", "no", "--format", "parket"],
    "no_import_source": ["ckpt", "import", "rows.parquet", "--out", "no"],
    "no_import_table": ["ckpt", "import", "README.md", "--out", "no", "--format", "embedding"],
    "no_such_data": ["data", "synth", "--like", "avazu", "no"],
    "import_both": ["ckpt", "import", "a", "--out", "b", "--config", FLIGHTS, "--dtype", "float16"],
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_one_clean_message(case: str):
    code, out, err = invoke(*ERRORS[case])
    assert code == 2
    assert out == ""
    assert "Traceback" not in err
    assert not re.search("valid (integer|tuple|string|dict)|Input should|Value error", err)
    check_golden(f"error_{case}.txt", err.replace(f"{Path.cwd()}/", ""))


def test_made_up_data_is_two_files(tmp_path: Path):
    arguments = ("data", "synth", "--like", "movielens", "--rows", "1000", str(tmp_path / "d"))
    code, out, _ = invoke(*arguments)
    assert code == 0
    assert out.split() == [str(tmp_path / "d" / f"{side}.parquet") for side in ("train", "eval")]


def test_debug_lets_the_traceback_through():
    from shoal.errors import UnknownName

    result = CliRunner().invoke(app, ["train", FLIGHTS, "nothing=1", "--debug"])
    assert isinstance(result.exception, UnknownName)


def test_no_arguments_show_the_help():
    _, out, err = invoke()
    assert "Usage: shoal" in out + err


@pytest.mark.slow
def test_help_does_not_wait_for_what_only_runs_need():
    code = "import sys, shoal.cli; sys.exit(bool({'hydra', 'pyarrow'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0


@pytest.mark.slow
def test_runs_as_a_module():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "shoal.cli", "--help"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert "Usage: shoal" in done.stdout
    assert "\x1b" not in done.stdout
