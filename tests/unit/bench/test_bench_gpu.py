"""The GPU tables' bench: no case of the speed table can go missing, and it runs end to end."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import clock_gpu
import harness
import plan_gpu
import table_gpu

BENCH = Path(__file__).resolve().parents[3] / "bench"
# name: (bar, stretch) in the row's unit; for the pooled step times as fast as the peer
ASKED = {
    "find and copy out, load 0.75, D=8": (5.5, 7.5),
    "find and copy out, load 0.75, D=32": (4.5, 5.5),
    "find and copy out, load 0.75, D=64": (3.3, 3.75),
    "find and copy out, load 0.75, D=128": (2.1, 2.4),
    "insert new ids D=8": (2.0, 3.0),
    "insert new ids D=64": (2.0, 3.0),
    "SGD step, 10 tables, 1.05 M ids, D=128": (0.90, 0.72),
    "Adam step, 10 tables, 1.05 M ids, D=128": (1.15, 0.95),
    "SGD step, 10 tables, through modules": (1.05, 0.96),
    "Adam step, 10 tables, through modules": (1.35, 1.35),
    "SGD step, 10 tables, through modules, host": (0.6, 0.6),
    "Adam step, 10 tables, through modules, host": (0.6, 0.6),
    "SGD step, 10 tables, through modules, backward in one thread": (1.05, 0.96),
    "Adam step, 10 tables, through modules, backward in one thread": (1.35, 1.35),
    "SGD step, 10 tables, through modules, backward in one thread, host": (0.6, 0.6),
    "Adam step, 10 tables, through modules, backward in one thread, host": (0.6, 0.6),
    "SGD step, rows in host memory, no cache": (13.6, 10.0),
    "SGD step, rows in host memory, cache 0.8x": (4.8, 3.5),
    "5 % new ids at a full budget over none new": (1.5, 1.2),
    "find after 10,000 steps of churn over fresh": (1.2, 1.1),
    "find with half the ids missing over all there": (1.3, 1.2),
    "p99/p50 of a step while growing": (3.0, 2.0),
    "index and metadata bytes a row at load 0.75": (37.0, 33.0),
}
POOLED = "Adam step, 26 tables, batch 65,536, pooled, D=64"


def cases(device: str = "cuda", *, quick: bool = False) -> dict[str, harness.Case]:
    planned = plan_gpu.jobs(plan_gpu.Scale.of(device, quick))
    found = [case for job in planned for case in job.cases]
    assert len({case.name for case in found}) == len(found)
    return {case.name: case for case in found}


def test_every_row_of_the_speed_table() -> None:
    found = cases()
    assert {name for name, case in found.items() if case.bar is not None} == {*ASKED, POOLED}
    assert (found[POOLED].bar, found[POOLED].stretch) == (5.0, 10.0)
    for name, (asked, hoped) in ASKED.items():
        case = found[name]
        for figure, least in ((asked, case.bar), (hoped, case.stretch)):
            assert harness.ratio(figure, case.peer_value, case.better) == pytest.approx(least)


def test_the_plan_is_the_same_at_every_scale() -> None:
    assert list(cases()) == list(cases(quick=True)) == list(cases("cpu", quick=True))
    tasks = {job.task for job in plan_gpu.jobs(plan_gpu.Scale.of("cuda", quick=False))}
    assert tasks == {task for own in table_gpu.TASKS.values() for task in own}
    scale = plan_gpu.Scale.of("cuda", quick=False)
    assert scale.repeats >= 30 and plan_gpu.Scale(**asdict(scale)) == scale
    assert 0.74 < scale.loaded_rows / scale.slots <= 0.75


@pytest.mark.slow
def test_a_clock_numbers_its_calls() -> None:
    seen: list[int] = []
    clock = clock_gpu.Clock("cpu", 1 << 16)
    times = clock.measure(seen.append, 6)
    assert seen == list(range(clock.calls(6)))
    assert (len(times.steps), len(times.host), len(times.alone)) == (6, 2, 2)
    assert times.device_ms is None and times.note("more").startswith("more; 6 calls: ")
    row = harness.as_row(harness.Case(name="a", unit="ms", peer="p"), times.row(times.ms))
    assert (row["ours"], row["device_ms"], row["host_ms"]) == (times.ms, None, times.host_ms)
    assert clock.copy_bytes_per_s() > 0


@pytest.mark.gpu
def test_time_of_the_device_has_no_launches_in_it() -> None:
    source = torch.ones(1 << 24, device="cuda")

    def slowly(_: int) -> None:
        source.add_(1)
        time.sleep(0.003)

    times = clock_gpu.Clock("cuda", 1 << 16).measure(slowly, 6)
    assert times.device_ms is not None
    assert times.device_ms < 3 <= times.ms


def test_times_have_columns_of_their_own() -> None:
    case = harness.Case(name="a", unit="ms", peer="p")
    rows = [harness.as_row(case, harness.Measured(ours=3.0, device_ms=0.25, host_ms=0.5))]
    head, line = (text.split("  ") for text in harness.table_lines(rows))
    assert {"device ms", "host ms"} <= {word.strip() for word in head}
    assert {"0.25", "0.5"} <= {word.strip() for word in line}
    plain = harness.table_lines([harness.as_row(case, harness.Measured(ours=3.0))])
    assert "device ms" not in plain[0]


def test_the_ids_are_those_of_the_other_bench() -> None:
    ids, ours = (pytest.importorskip(name) for name in ("ids", "ours_gpu"))
    index_N = torch.tensor([0, 1, 2, 1 << 40, (1 << 62) + 5])
    assert torch.equal(ours.scrambled(index_N), ids.to_ids(index_N))
    drawn = ours.power_law(1000, (2, 5000), "cpu")
    assert drawn.shape == (2, 5000) and int(drawn.min()) >= 0 and int(drawn.max()) < 1000
    assert int((drawn == 0).sum()) > 20 * int((drawn == 99).sum())


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH / "table_gpu.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)


@pytest.mark.slow
def test_what_cannot_be_measured_here() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for options, words in ((["--device", "cuda"], "no CUDA device"), ([], "add --quick")):
        done = run(*options)
        assert done.returncode == 2 and words in done.stderr
    listed = run("--quick", "--list")
    assert listed.stdout.splitlines() == list(cases("cpu", quick=True))


@pytest.mark.slow
def test_it_runs_from_end_to_end(tmp_path: Path) -> None:
    pytest.importorskip("shoal.table.cuda.shard")
    out, traces = tmp_path / "out.json", tmp_path / "traces.txt"
    done = run("--quick", "--json", str(out), "--traces", str(traces))
    assert done.returncode == 0, done.stderr
    assert not traces.exists(), traces.read_text()
    rows = json.loads(out.read_text())["rows"]
    assert [row["case"] for row in rows] == list(cases("cpu", quick=True))
    missing = [row["case"] for row in rows if row["ours"] is None and row["note"] != "not built"]
    assert not missing
