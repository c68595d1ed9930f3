"""The operations' bench: no case of it can go missing, and it runs from end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import harness
import ops_devices
import ops_measure
import ops_plan
import ops_work

BENCH = Path(__file__).resolve().parents[3] / "bench"
MODES = ("sum", "mean", "sqrtn", "l2")
DIMS = (16, 64, 128)
NAMES = (
    "dedup 1 M ids",
    "dedup_into 1 M ids",
    "partition 1 M ids, 8 shards",
    "split_by_indices 1 M rows, 8 splits D=16",
    "fused_reorder_by_indices 128 x 10,240 ids, 8 shards D=16",
    "map_id_to_embedding 1 M ids, 10 shards D=16",
    "gather_embeddings_by_input 100 k ids, input x 4 D=32",
    "gather_embeddings_by_input 100 k ids, input x 2 D=256",
    "fused_gather_embeddings_by_input 128 tables D=16",
    "fused_gather_embeddings_by_input_gradient 128 tables D=16",
    *(f"gather_rows D={dim}" for dim in DIMS),
    *(
        f"segment_{m} {way} D={dim}"
        for m in MODES
        for way in ("forward", "backward")
        for dim in DIMS
    ),
    *(
        f"{name} {way}, sorted index D=64"
        for name in ("reduce_sum", "reduce_mean", "reduce_sqrtn", "reduce_mean_sqrtn")
        for way in ("forward", "backward")
    ),
    "fused_embedding_to_layout forward 256 x 199 features",
    "fused_embedding_to_layout backward 256 x 199 features",
)


def cases(device: str, quick: bool = False) -> dict[str, harness.Case]:
    scale = ops_plan.Scale(device=device, quick=quick)
    threads = (1, 2) if device == "cpu" else (None,)
    ops = ops_plan.operations(scale)
    found = [case for op in ops for count in threads for case in ops_plan.cases_of(op, count)]
    assert len({case.name for case in found}) == len(found)
    return {case.name: case for case in found}


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_every_case_is_declared(name, quick):
    assert {f"{name} 1t", f"{name} 2t"} <= set(cases("cpu", quick))
    assert name in cases("cuda", quick)


@pytest.mark.parametrize("threads", [1, 2])
def test_bars_on_the_cpu(threads):
    found = cases("cpu")
    dedup = found[f"dedup 1 M ids {threads}t"]
    assert (dedup.bar, dedup.stretch) == (3.0, 6.0)
    bound = [n for n in NAMES if n.startswith(("segment_", "reduce_")) or "gather" in n]
    for name in bound:
        assert found[f"{name} {threads}t"].bar == 2.0
        if "gradient" not in name:
            assert found[f"{name} {threads}t of a copy"].bar == 0.7


def test_bars_on_cuda():
    found = cases("cuda")
    for name in ("dedup 1 M ids", "dedup_into 1 M ids"):
        ceiling = found[f"{name} within 0.2 ms"]
        assert (ceiling.peer_value, ceiling.better, ceiling.bar) == (0.2, "lower", 1.0)
    bound = [n for n in NAMES if n.startswith(("segment_", "reduce_", "gather_rows"))]
    for name in bound:
        wide = not name.endswith("D=16")
        assert found[f"{name} of a copy"].bar == (0.8 if wide else None)
    assert found["fused_gather_embeddings_by_input 128 tables D=64 of a copy"].bar == 0.8


def test_rows_on_cuda_leave_every_cache():
    for op in ops_plan.operations(ops_plan.Scale(device="cuda")):
        if op.of_copy is not None and "value_bytes" in op.params:
            assert op.params["value_bytes"] >= 1 << 30
        if op.of_copy is not None and "tables" in op.params:
            rows = op.params["tables"] * op.params["ids"]
            assert rows * op.params["dim"] * 4 >= 1 << 30


@pytest.mark.parametrize(("quick", "processes"), [(False, 5), (True, 1)])
def test_jobs_cover_every_case(tmp_path, quick, processes):
    scale = ops_plan.Scale(device="cpu", quick=quick)
    jobs = ops_plan.jobs(scale, (1, 2), ops_plan.operations(scale), tmp_path, {})
    assert len(jobs) == processes
    assert [case.name for job in jobs for case in job.cases] == list(cases("cpu", quick))


def test_a_broken_operation_leaves_notes(monkeypatch):
    def broken(**_):
        raise RuntimeError("no such kernel\nat line 1")

    monkeypatch.setattr("ops_ids.dedup", broken)
    scale = ops_plan.Scale(device="cpu", quick=True)
    op = ops_plan.operations(scale)[0]
    found = ops_measure.measure([op], ops_devices.device_of(scale), [1])
    assert found["dedup 1 M ids 1t"].ours is None
    assert found["dedup 1 M ids 1t"].note == "RuntimeError: no such kernel"


def test_results_are_compared():
    right = torch.rand(100, 16)
    work = ops_work.Work(ours=lambda: right + 1e-7, peers={"same": lambda: right}, moved=1.0)
    work.verify()
    wrong = ops_work.Work(ours=lambda: right + 1.0, peers={"other": lambda: right}, moved=1.0)
    with pytest.raises(AssertionError, match="unlike other"):
        wrong.verify()
    with pytest.raises(AssertionError, match="mapped != original"):
        ops_work.equal(right, right + 1.0, "rows: mapped != original")


def test_events_time_each_launch(monkeypatch):
    clock = [0.0]

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock[0]

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    waits = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(clock[0]))
    device = ops_devices.Cuda(ops_plan.Scale(device="cpu", quick=True))

    def launch(milliseconds: float):
        def run(_: int) -> None:
            clock[0] += milliseconds

        return run

    runners = [harness.Runner(name=str(ms), run=launch(ms)) for ms in (0.5, 2.0)]
    seconds = device.seconds(runners)
    assert waits[-1] == clock[0]
    for ms in (0.5, 2.0):
        assert len(seconds[str(ms)]) == ops_devices.ROUNDS
        assert seconds[str(ms)] == pytest.approx([ms / 1e3] * ops_devices.ROUNDS)


@pytest.mark.slow
@pytest.mark.multiproc
def test_two_cases_run_from_end_to_end(tmp_path):
    target, traces = tmp_path / "out.json", tmp_path / "traces"
    command = [sys.executable, str(BENCH / "ops.py"), "--quick", "--device", "cpu"]
    command += ["--case", "dedup 1 M", "--threads", "1"]
    command += ["--json", str(target), "--profile", str(traces)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["case"]: row for row in json.loads(target.read_text())["rows"]}
    assert list(rows) == ["dedup 1 M ids 1t", "dedup 1 M Zipf ids 1t"]
    for row in rows.values():
        assert row["ours"] > 0
        assert row["peer_value"] > 0
        assert row["limit_fraction"] > 0
        assert row["device"] == "cpu"
        assert row["case"] in done.stdout
    (trace,) = traces.iterdir()
    assert trace.name == "ops-ids-cpu.json"
    events = json.loads(trace.read_text())["traceEvents"]
    assert any(event.get("name") == "dedup 1 M ids: ours" for event in events)
