"""What newcomers meet: help without torch, versions, examples, a first config, exit codes."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

import shoal
from shoal import config as settings
from shoal.cli import app
from shoal.cli.start import write
from shoal.cli.usage import Exit

ROOT = Path(__file__).parents[3]


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments), prog_name="shoal")
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    "arguments", [["--help"], ["train", "-h"], ["ckpt", "-h"], ["plan", "-h"], ["examples"]]
)
def test_what_needs_no_torch_imports_none(arguments: list[str]) -> None:
    code = f"""
import sys
from shoal.cli import main
sys.argv = {["shoal", *arguments]!r}
try:
    main()
except SystemExit as left:
    assert left.code == 0
heavy = {{"torch", "numpy", "pyarrow", "hydra", "grpc", "yaml"}} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_training_on_a_cpu_needs_no_triton(tmp_path: Path) -> None:
    source = "{kind: synthetic, examples: 64, eval_examples: 64}"
    (tmp_path / "run.yaml").write_text(f"data: {{source: {source}}}\n")
    code = """
import sys
sys.modules["triton"] = None  # as where it is not installed
from shoal.cli import main
sys.argv = ["shoal", "train", "run.yaml"]
main()
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_package_that_nobody_used_has_its_names() -> None:
    code = "import shoal, sys; assert 'torch' not in sys.modules; shoal.rules.optimizers.Adam"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert set(shoal.__all__) <= set(dir(shoal))
    for name in ("nothing", "rules.optimizers", "", "a.b"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
            getattr(shoal, name)


def test_a_folder_without_code_is_no_module(monkeypatch: Any, tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    monkeypatch.setattr(shoal, "__path__", [*shoal.__path__, str(tmp_path)])
    assert not hasattr(shoal, "examples")


def test_version_names_what_runs() -> None:
    code, out, _ = invoke("--version")
    assert code == 0
    pattern = r"shoal \d+\.\d+\.\d+, torch \S+, Python 3\.\d+\.\d+, core (avx512|avx2|generic)\n"
    assert re.fullmatch(pattern, out)


@pytest.mark.parametrize("command", [[], ["train"], ["ckpt", "diff"], ["plan"], ["plan", "make"]])
def test_short_help_is_help(command: list[str]) -> None:
    assert invoke(*command, "-h") == invoke(*command, "--help")


def test_completion_is_offered() -> None:
    assert "--install-completion" in invoke("--help")[1]


def test_settings_as_options_get_a_hint() -> None:
    for command in ("train", "eval", "predict", "ps"):
        code, _, err = invoke(command, "examples/flights.yaml", "--lr", "0.1")
        assert code == Exit.ERROR
        assert "Settings are" in err
    for wrong, right in (("--resum", "--resume"), ("--print_config", "--print-config")):
        err = invoke("train", "examples/flights.yaml", wrong)[2]
        assert right in err
        assert "Settings are" not in err
    assert "Settings are" not in invoke("ckpt", "inspect", "--lr", "0.1")[2]


def test_options_of_a_wrong_type_are_refused_in_plain_words() -> None:
    for arguments in (
        ["plan", "a.yaml", "--devices", "many"],
        ["ckpt", "import", "a", "--seed", "b"],
    ):
        code, _, err = invoke(*arguments)
        assert code == Exit.ERROR
        assert "a whole number" in err
        assert "Input should" not in err


def test_a_bug_has_an_exit_code_of_its_own() -> None:
    code = """
from shoal.cli import app, main
import sys
@app.command(name="broken")
def broken() -> None:
    raise RuntimeError("never meant to be")
sys.argv = ["shoal", "broken"]
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == Exit.CRASH
    assert "never meant to be" in done.stderr


@pytest.mark.parametrize("arguments", ["--help", "examples", "train -h"])
def test_who_stops_reading_breaks_nothing(arguments: str) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "shoal.cli", *arguments.split()]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (Exit.DONE, "")


def test_the_page_has_every_exit_code() -> None:
    text = (ROOT / "docs" / "reference" / "errors.md").read_text()
    rows = re.findall(r"^\| (\d+) \|", text.partition("## Exit codes")[2], flags=re.MULTILINE)
    assert list(map(int, rows)) == list(Exit)


def test_print_config_is_the_whole_config_and_trains_nothing(tmp_path: Path) -> None:
    arguments = ("examples/flights.yaml", "model.dropout=0.5", f"output.dir={tmp_path / 'runs'}")
    code, out, _ = invoke("train", str(ROOT / arguments[0]), *arguments[1:], "--print-config")
    assert code == 0
    assert not (tmp_path / "runs").exists()
    printed = settings.from_mapping(yaml.safe_load(out))
    assert printed == settings.load(ROOT / arguments[0], arguments[1:])


def test_examples_are_listed_and_copied(tmp_path: Path) -> None:
    shipped = {path.stem: path.read_text() for path in (ROOT / "examples").glob("*.yaml")}
    listed = invoke("examples")[1]
    assert all(re.search(rf"^{name} ", listed, flags=re.MULTILINE) for name in shipped)
    code, out, _ = invoke("examples", "dlrm_dcnv2", str(tmp_path))
    assert code == 0
    assert f"shoal train {tmp_path / 'dlrm_dcnv2.yaml'}" in out
    assert "shoal data synth" not in out
    copied = {path.stem: path.read_text() for path in tmp_path.iterdir()}
    assert copied == {name: shipped[name] for name in ("dlrm_dcnv2", "dlrm_dcnv2_tables")}
    assert invoke("examples", "dlrm_dcnv2", str(tmp_path))[0] == 0  # the same is no conflict
    out = invoke("examples", "movielens", str(tmp_path))[1]
    assert "shoal data synth --like movielens --rows 100000 data/movielens\nTrain" in out
    (tmp_path / "dlrm_dcnv2.yaml").write_text("mine: 1\n")
    code, _, err = invoke("examples", "all", str(tmp_path))
    assert code == Exit.ERROR
    assert "dlrm_dcnv2.yaml (File exists)" in err
    assert (tmp_path / "dlrm_dcnv2.yaml").read_text() == "mine: 1\n"


def events(path: Path, rows: int = 300, **more: Any) -> Path:
    start = datetime(2024, 3, 1, tzinfo=timezone.utc)
    columns = {
        "user": [f"u{k % 17}" for k in range(rows)],
        "item": [k % 5 for k in range(rows)],
        "coupon": [None if k % 3 else f"c{k % 7}" for k in range(rows)],
        "seen": [[k, k + 1][: k % 3] for k in range(rows)],
        "price": [None if k % 10 == 0 else k / 7 for k in range(rows)],
        "at": [start + timedelta(minutes=k) for k in range(rows)],
        "clicked": [k % 2 for k in range(rows)],
        **more,
    }
    pq.write_table(pa.table({k: v for k, v in columns.items() if v is not None}), path)
    return path


def test_init_of_parquet_says_what_columns_are(tmp_path: Path) -> None:
    data = events(tmp_path / "events.parquet", born=[datetime(1990, 1, 1).date()] * 300)
    file = tmp_path / "my run.yaml"
    code, out, err = invoke("init", str(file), "--data", str(data))
    assert code == 0, err
    assert "shoal train" in out
    made = settings.load(file, environment={})
    source = made.data.source
    assert made.name == "my-run"
    assert (source.label, source.time, source.dense) == ("clicked", "at", ("price",))
    assert {name: one.is_list for name, one in source.ids.items()} == {
        "user": False,
        "item": False,
        "seen": True,
    }
    assert source.features.names == ("coupon",)
    assert made.data.split == datetime(2024, 3, 1, 4, 30, tzinfo=timezone.utc)
    assert 'neither ids nor numbers: "born"' in file.read_text()


ODD = {
    "a.b": [None if k % 3 else k % 7 for k in range(300)],
    "${c}": [k / 3 for k in range(300)],
    "d #: 'ü\"": [str(k % 4) for k in range(300)],
    "f\nbatch_size: 3": [{"x": 1}] * 300,
    "g\u2028h": [k % 5 for k in range(300)],
    "": [k % 5 for k in range(300)],
    "endless": [float("inf") if k == 7 else None for k in range(300)],
    "large": [1e39] * 300,
    "pair": pa.array([[k % 3, 7] for k in range(300)], pa.list_(pa.int64(), 2)),
    "holes": [[k % 3, None] for k in range(300)],
}


@pytest.mark.parametrize("more", [{}, {"at": None}, ODD], ids=["timed", "without time", "odd"])
def test_init_of_parquet_trains_as_written(
    tmp_path: Path, more: dict[str, Any], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    events(tmp_path / "events.parquet", **more)
    code, out, err = invoke("init", "mine.yaml", "--data", "events.parquet")
    assert code == 0, err
    assert ("Evaluation is of the training files" in out) == ("at" in more)
    code, _, err = invoke("train", "mine.yaml")
    assert code == 0, err
    assert len(list((tmp_path / "runs").glob("mine-*/metrics.json"))) == 1


@pytest.mark.parametrize("name", ["2024", "null", "on", "1e5", "1_0", "~x"])
@pytest.mark.parametrize("arguments", [[], ["--data", "events.parquet"]], ids=["flights", "data"])
def test_init_writes_any_name_as_text(
    tmp_path: Path, name: str, arguments: list[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    events(tmp_path / "events.parquet")
    assert invoke("init", f"{name}.yaml", *arguments)[0] == 0
    made = settings.load(tmp_path / f"{name}.yaml", environment={})
    assert made.name == name.replace("~", "-").lstrip("-")
    (tmp_path / "again.yaml").write_text(settings.to_yaml(made))
    assert settings.load(tmp_path / "again.yaml", environment={}) == made


def test_init_takes_columns_of_any_name_and_kind(tmp_path: Path) -> None:
    odd = {**ODD, "row": [f"r{k}" for k in range(300)]}
    data = events(tmp_path / "odd name.parquet", **odd)
    file = tmp_path / "a.yaml"
    assert invoke("init", str(file), "--data", str(data))[0] == 0
    source = settings.load(file, environment={}).data.source
    assert source.paths == (str(data),)
    assert set(source.dense) == {"price", "${c}"}
    assert {name for name, one in source.ids.items() if one.is_list} == {"seen", "pair"}
    assert {name for name, one in source.ids.items() if not one.is_list} == {
        "user",
        "item",
        "d #: 'ü\"",
    }
    assert source.features.names == ("coupon", "a.b")
    text = file.read_text()
    assert '# Not used, no two rows have the same: "row"\n' in text
    assert '# Not used, null in some list: "holes"\n' in text
    unnamed = r'"f\nbatch_size: 3", "g\Lh", ""'
    assert '# Not used, infinite, or beyond float32: "endless", "large"\n' in text
    assert f"# Not used, a name that is empty or not printable: {unnamed}\n" in text
    assert '# Made by shoal init from "odd name.parquet"' in text


DAY = datetime(2024, 3, 1)
UNREADABLE = {
    "milliseconds": [1_700_000_000_000 + k for k in range(300)],
    "nulls": [None if k % 3 == 0 else DAY for k in range(300)],
    "before 1970": [datetime(1950, 1, 1) + timedelta(days=k) for k in range(300)],
}


@pytest.mark.parametrize("options", [["--eval"], []], ids=["eval", "split"])
@pytest.mark.parametrize("kind", UNREADABLE)
def test_init_leaves_out_times_that_cannot_be_read(
    tmp_path: Path, kind: str, options: list[str]
) -> None:
    other = [DAY + timedelta(hours=k) for k in range(300)]
    for more, time in (({}, None), ({"ts": other}, "ts")):
        data = str(events(tmp_path / "a.parquet", at=None, timestamp=UNREADABLE[kind], **more))
        file = tmp_path / f"{time}.yaml"
        code, out, err = invoke(
            "init", str(file), "--data", data, *(one for name in options for one in (name, data))
        )
        assert code == 0, err
        source = settings.load(file, environment={}).data.source
        assert source.time == time
        assert "timestamp" not in source.ids
        assert re.search(r'# Not used, .*: "timestamp"', file.read_text())
        assert ("Evaluation is of the training files" in out) == (not options and not time)
    asked = ["--data", data, "--time", "timestamp"]
    assert invoke("init", str(tmp_path / "b.yaml"), *asked)[0] == Exit.ERROR


def test_init_checks_times_of_evaluation_files_too(tmp_path: Path) -> None:
    data, other = (str(tmp_path / f"{name}.parquet") for name in ("a", "b"))
    events(Path(data))
    events(Path(other), at=[None, *[DAY] * 299])
    file = tmp_path / "a.yaml"
    assert invoke("init", str(file), "--data", data, "--eval", other)[0] == 0
    assert settings.load(file, environment={}).data.source.time is None


@pytest.mark.parametrize("option", ["--data", "--eval"])
@pytest.mark.parametrize("name", ["user", "clicked", "price", "seen", "coupon"])
def test_init_needs_columns_in_all_files(tmp_path: Path, name: str, option: str) -> None:
    data = events(tmp_path / "a.parquet")
    other = events(tmp_path / "b.parquet", **{name: None})
    arguments = ["--data", str(data), option, str(other)]
    code, _, err = invoke("init", str(tmp_path / "a.yaml"), *arguments)
    assert code == Exit.ERROR
    assert f"column '{name}' of " in err and "b.parquet" in err


def test_init_without_a_time(tmp_path: Path) -> None:
    data, file = events(tmp_path / "a.parquet"), tmp_path / "a.yaml"
    assert invoke("init", str(file), "--data", str(data), "--time", "none")[0] == 0
    made = settings.load(file, environment={}).data
    assert (made.source.time, made.split) == (None, None)


def test_init_refuses_a_name_that_is_there_twice(tmp_path: Path) -> None:
    columns = [pa.array([0, 1]), pa.array([1, 2]), pa.array([1, 2])]
    pq.write_table(pa.table(columns, names=["label", "u", "u"]), tmp_path / "a.parquet")
    code, _, err = invoke("init", str(tmp_path / "a.yaml"), "--data", str(tmp_path / "a.parquet"))
    assert code == Exit.ERROR
    assert "'u' at places 1, 2" in err


@pytest.mark.slow
def test_init_of_the_flights_trains_as_written(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert invoke("init", "mine.yaml")[0] == 0
    code, _, err = invoke("train", "mine.yaml", "data.epochs=1", "data.max_examples=20000")
    assert code == 0, err
    assert len(list((tmp_path / "runs").glob("mine-*/report.html"))) == 1


@pytest.mark.parametrize(
    ("more", "arguments", "parts"),
    [
        ({"bought": [0, 1] * 150, "clicked": [2, 3] * 150, "liked": [0, 1] * 150}, [], ["--label"]),
        ({"clicked": [0, 1, None] * 100, "vip": [0, 1] * 150}, [], ["vip", "clicked", "--label"]),
        ({}, ["--label", "click"], ["unknown column", "'click'", "Did you mean clicked?"]),
        (
            {"rating": [1, 2, 3] * 100},
            ["--label", "rating"],
            ["'rating'", "int64: 1, 2, 3", "0 and 1"],
        ),
        ({}, ["--label", "user"], ["'user'", "'u0'", "0 and 1"]),
        ({}, ["--time", "att"], ["unknown column", "--time", "user"]),
    ],
)
def test_init_asks_for_what_it_cannot_know(
    tmp_path: Path, more: dict[str, Any], arguments: list[str], parts: list[str]
) -> None:
    data = events(tmp_path / "events.parquet", **more)
    code, _, err = invoke("init", str(tmp_path / "a.yaml"), "--data", str(data), *arguments)
    assert code == Exit.ERROR
    assert all(part in err for part in parts)
    assert not (tmp_path / "a.yaml").exists()


@pytest.mark.parametrize(
    "command",
    ["init a.yaml", "examples flights .", "plan profile-data good.yaml --batches 1 --out old"],
)
def test_a_full_disk_leaves_files_as_they_were(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "good.yaml").write_text("data: {source: {kind: synthetic, examples: 64}}\n")
    (tmp_path / "old").write_text("what was here")
    monkeypatch.chdir(tmp_path)
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        code, _, said = invoke(*command.split())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (code, "file to write: got" in said, "too large" in said) == (Exit.ERROR, True, True)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


def test_init_keeps_files(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("mine: 1\n")
    code, _, err = invoke("init", str(file))
    assert (code, file.read_text()) == (Exit.ERROR, "mine: 1\n")
    assert "File exists" in err


def test_a_link_is_followed(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("before")
    link.symlink_to(file)
    write(link, "after")
    assert (link.is_symlink(), file.read_text()) == (True, "after")
