"""The bench harness: rows, ratios, and that no case of the speed table can go missing."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"
ROW_KEYS = {"case", "unit", "ours", "peer", "peer_value", "ratio", "bar", "limit_fraction"}
STEPS = ("Adagrad step vs fbgemm", "Adagrad step vs torch_adagrad", "Adam step vs torch_adam")


def bench_module(name: str) -> ModuleType:
    if str(BENCH) not in sys.path:
        sys.path.insert(0, str(BENCH))
    return importlib.import_module(name)


harness = bench_module("harness")
plan = bench_module("plan_cpu")


def full_plan() -> dict:
    planned = plan.jobs(plan.Scale.of(None, quick=False), {})
    cases = [case for job in planned for case in job.cases]
    assert len({case.name for case in cases}) == len(cases)
    return {case.name: case for case in cases}


@pytest.mark.parametrize(
    ("ours", "peer", "better", "expected"),
    [
        (6.0, 3.0, "higher", 2.0),
        (6.0, 3.0, "lower", 0.5),
        (None, 3.0, "higher", None),
        (6.0, None, "higher", None),
        (0.0, 3.0, "lower", None),
    ],
)
def test_ratio_is_larger_when_better(ours, peer, better, expected):
    assert harness.ratio(ours, peer, better) == expected


def test_ratio_against_a_ceiling():
    case = harness.Case(
        name="latency", unit="us", peer="the ceiling", peer_value=15.0, better="lower", bar=1.0
    )
    row = harness.as_row(case, harness.Measured(ours=10.0))
    assert (row["peer_value"], row["ratio"], row["ok"]) == (15.0, 1.5, True)
    assert harness.as_row(case, harness.Measured(ours=20.0))["ok"] is False


def test_missed_case_is_a_red_row():
    case = harness.Case(name="a", unit="Mids/s", peer="p", bar=2.0)
    row = harness.as_row(case, None)
    assert row["ours"] is None
    assert row["ratio"] is None
    assert row["note"] == "not measured"
    assert harness.red_rows([row]) == ["a"]


def test_informational_row_is_never_red():
    row = harness.as_row(harness.Case(name="a", unit="x", peer="p"), None)
    assert row["ok"] is None
    assert harness.red_rows([row]) == []


def test_json_shape(tmp_path):
    cases = list(full_plan().values())
    measured = harness.Measured(ours=3.0, peer_value=1.5, limit_fraction=0.5, note="n")
    rows = [harness.as_row(cases[0], measured), *(harness.as_row(c, None) for c in cases[1:])]
    target = tmp_path / "out.json"
    harness.write_json(target, rows, ("torch", "no-such-distribution"))
    content = json.loads(target.read_text())
    assert set(content) == {"machine", "versions", "rows"}
    assert {"processor", "cores", "system"} <= set(content["machine"])
    assert content["versions"]["torch"]
    assert content["versions"]["no-such-distribution"] == ""
    assert [row["case"] for row in content["rows"]] == [case.name for case in cases]
    assert all(set(row) >= ROW_KEYS for row in content["rows"])
    assert content["rows"][0]["ratio"] == 2.0


def test_worker_result_survives_the_process_boundary():
    found = {"a": harness.Measured(ours=1.0, note="x"), "b": harness.Measured()}
    read = {k: harness.Measured(**v) for k, v in json.loads(harness.measured_json(found)).items()}
    assert read == found


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("body", "note", "timeout_s"),
    [
        ("import sys; sys.exit('no such table')", "no such table", 60.0),
        ("pass", "exit status 0", 60.0),
        ("import os, signal; os.kill(os.getpid(), signal.SIGBUS)", "killed by SIGBUS", 60.0),
        ("import time; time.sleep(60)", "took longer than 1 s", 1.0),
    ],
)
def test_failed_job_notes_why(tmp_path, body, note, timeout_s):
    script = tmp_path / "worker.py"
    script.write_text(body)
    case = harness.Case(name="a", unit="x", peer="p", bar=1.0)
    job = harness.Job(task="t", params={}, cases=(case,), timeout_s=timeout_s)
    found = harness.run_job(job, script)
    assert note in found["a"].note
    assert harness.as_row(case, found["a"])["ok"] is False


def test_job_without_memory_is_not_started(tmp_path):
    case = harness.Case(name="a", unit="x", peer="p", bar=1.0)
    job = harness.Job(task="t", params={}, cases=(case,), need_bytes=1 << 61)
    assert "GB free" in harness.run_job(job, tmp_path / "absent.py")["a"].note


def test_contenders_take_turns():
    order = []
    runners = [
        harness.Runner(name=name, run=lambda i, name=name: order.append((name, i)))
        for name in ("ours", "peer")
    ]
    seconds = harness.interleave(runners, batches=2, passes=2, warmup=1)
    assert order == [
        *[("ours", 0), ("peer", 0)],
        *[("ours", 0), ("peer", 0), ("peer", 1), ("ours", 1)],
        *[("ours", 0), ("peer", 0), ("peer", 1), ("ours", 1)],
    ]
    assert {name: len(values) for name, values in seconds.items()} == {"ours": 4, "peer": 4}


@pytest.mark.parametrize(("percent", "expected"), [(50, 50), (99, 99), (100, 100), (0, 1)])
def test_percentile_is_nearest_rank(percent, expected):
    assert harness.percentile(list(range(100, 0, -1)), percent) == expected


def test_table_has_a_line_a_row():
    rows = [harness.as_row(case, None) for case in full_plan().values()]
    lines = harness.table_lines(rows)
    assert len(lines) == len(rows) + 1
    assert all(row["case"] in line for row, line in zip(rows, lines[1:], strict=True))


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize("distribution", ["uniform", "zipf"])
@pytest.mark.parametrize("threads", [1, 2])
def test_throughput_cases_are_declared(quick, dim, distribution, threads):
    planned = plan.jobs(plan.Scale.of(None, quick=quick), {})
    names = {case.name for job in planned for case in job.cases}
    for what in ("find", *STEPS):
        assert f"{what} D={dim} {distribution} {threads}t" in names
    assert f"insert new ids, memory touched D={dim} {threads}t" in names
    for what in ("find", "Adagrad step"):
        assert f"2 threads over 1, {what} D={dim} {distribution}" in names


@pytest.mark.parametrize(
    ("name", "bar", "stretch"),
    [
        ("find D=64 uniform 1t", 0.9, 1.1),
        ("find D=16 zipf 2t", 0.65, 0.8),
        ("Adagrad step vs fbgemm D=16 uniform 1t", 2.5, 3.8),
        ("Adagrad step vs fbgemm D=16 uniform 2t", 4.0, 8.0),
        ("Adagrad step vs torch_adagrad D=64 zipf 2t", 4.0, 6.0),
        ("Adam step vs torch_adam D=64 zipf 1t", 5.0, 8.0),
        ("2 threads over 1, find D=16 uniform", 1.7, 1.9),
    ],
)
def test_bars_of_the_speed_table(name, bar, stretch):
    case = full_plan()[name]
    assert (case.bar, case.stretch) == (bar, stretch)


@pytest.mark.parametrize(
    ("name", "better", "bar", "stretch"),
    [
        ("insert new ids, memory touched D=16 1t", "higher", 5.0, 10.0),
        ("one lookup call of 64 ids", "lower", 15.0, 8.0),
        ("p99/p50 of a step while growing D=16 2t", "lower", 4.0, 2.0),
        ("resident bytes over payload D=16 Adagrad", "lower", 1.35, 1.2),
    ],
)
def test_floors_and_ceilings_of_the_speed_table(name, better, bar, stretch):
    case = full_plan()[name]
    assert case.better == better
    at_bar = harness.as_row(case, harness.Measured(ours=bar))
    assert at_bar["ok"]
    assert at_bar["ratio"] == 1.0
    worse = 0.99 if better == "higher" else 1.01
    assert not harness.as_row(case, harness.Measured(ours=bar * worse))["ok"]
    assert harness.as_row(case, harness.Measured(ours=stretch))["ratio"] == pytest.approx(
        case.stretch
    )


@pytest.mark.parametrize("threads", [1, 2])
def test_many_tables_may_take_half_again_the_time(threads):
    case = full_plan()[f"1,000 tables over one, step D=16 {threads}t"]
    assert harness.as_row(case, harness.Measured(ours=1.49, peer_value=1.0))["ok"]
    assert not harness.as_row(case, harness.Measured(ours=1.51, peer_value=1.0))["ok"]


def test_every_job_has_a_worker():
    bench = bench_module("table_cpu")
    tasks = {task for tasks in bench.TASKS.values() for task in tasks}
    assert {job.task for job in plan.jobs(plan.Scale.of(None, quick=False), {})} <= tasks
    for module, names in bench.TASKS.items():
        source = (BENCH / f"{module}.py").read_text()
        assert all(f"def {name}(" in source for name in names)
