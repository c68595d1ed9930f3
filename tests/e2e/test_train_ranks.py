"""`shoal train` on two ranks is `shoal train` on one, and ends on both when it ends on one."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from rich.console import Console

from shoal import config, train
from shoal.checkpoint.dense import read_module
from shoal.checkpoint.manifest import read_manifest
from shoal.checkpoint.storage import Storage
from shoal.comm.launch import early_control
from shoal.data.loader import Loader
from shoal.errors import ConfigError, DataError
from shoal.train import folder as folders_module
from shoal.train.learner import Learner
from support.ranks import free_port, launcher_variables, run_ranks, start_ranks

# Bounds of processes are for a busy machine.
pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
SILENT = Console(quiet=True)
# The last batch of a pass has one example: rank 0 has none of it.
TRAIN, BATCH = 993, 31
TABLE = {
    "dim": 8,
    "initializer": {"kind": "uniform", "minval": -0.5, "maxval": 0.5},
    "optimizer": {"kind": "adagrad", "lr": 0.3},
}
SOURCE = {
    "kind": "synthetic",
    "examples": TRAIN,
    "eval_examples": 321,
    "num_features": 3,
    "vocabulary": 20,
    "num_dense": 2,
    "signal": 3.0,
}
DATA = {"source": SOURCE, "batch_size": BATCH, "epochs": 2, "shuffle": "replays"}
BASE = {
    "name": "tiny",
    "seed": 3,
    "threads": 1,
    "data": DATA,
    "eval": {"batch_size": 100},
    "tables": {"default": TABLE},
    "model": {"kind": "deepfm", "hidden": [4]},
    "dense_optimizer": {"kind": "sgd", "lr": 0.05},
    "logging": {"points": 5, "tensorboard": False},
}
PLAIN: dict[str, Any] = {}
ACCUMULATED = {
    "accumulation": 3,
    "clip_norm": 0.05,
    "distributed": {"placement": "column_wise", "enable_alltoall_metrics_for_slot": True},
}
NORMED = {
    "model": {"kind": "dlrm", "hidden": [4], "bottom": [8], "batch_norm": True},
    # The last example joins the batch before it: a batch of one has no variance.
    "distributed": {
        "placement": {"default": "table_wise", "tables": {"f1": "data_parallel"}},
        "path": "torch",
    },
}
ADMITTED = {
    "tables": {
        "default": {
            **TABLE,
            "admission": {"threshold": 3, "on": "after"},
            "expiry": {"ttl_s": 300},
        }
    },
    "evict_every_s": 200,
    "amp": "bfloat16",
}
SPLIT = {
    "accumulation": 2,
    "clip_norm": 0.05,
    "model": {"kind": "dcn", "hidden": [4]},
    "distributed": {"dense": "fsdp2", "placement": "grid"},
}
WATCHED = {
    "eval": {"batch_size": 100, "every_steps": 9, "early_stop": {"metric": "auc", "patience": 2}},
    "checkpoint": {"keep_best": "log_loss", "every_steps": 7},
    "dense_optimizer": {
        "kind": "sgd",
        "lr": {"kind": "piecewise", "boundaries": [20], "values": [0.05, 50]},
    },
}
CASES = {
    "plain": PLAIN,
    "accumulated": ACCUMULATED,
    "normed": NORMED,
    "admitted": ADMITTED,
    "split": SPLIT,
    "watched": WATCHED,
}


def settings(folder: Path, changes: Mapping[str, Any]) -> config.RunConfig:
    beside: dict[str, Any] = {"output": {"dir": str(folder)}}
    if changes.get("accumulation") == 3:
        beside["profile"] = str(folder / "profile")
    return config.from_mapping({**BASE, **changes, **beside})


def trained(folder: Path, cases: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    found = []
    for number, changes in enumerate(cases):
        result = train.run(settings(folder / str(number), changes), console=SILENT)
        figures = (result.examples, result.ids, result.steps)
        found.append((dict(result.metrics), dict(result.rows), figures, result.folder))
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[Any]]:
    folder = tmp_path_factory.mktemp("runs")
    cases = list(CASES.values())
    alone = trained(folder / "one", cases)
    (first, second) = run_ranks(2, trained, folder / "two", cases, timeout_s=300)
    assert [run[1:] for run in first] == [run[1:] for run in second]
    return alone, first


@pytest.mark.parametrize("case", range(len(CASES)), ids=list(CASES))
def test_two_ranks_train_the_model_of_one(runs: tuple[list[Any], list[Any]], case: int) -> None:
    alone, both = (side[case] for side in runs)
    assert both[1] == alone[1]
    assert both[2] == alone[2]
    loose = 2e-3 if list(CASES)[case] == "admitted" else 1e-4  # bfloat16 rounds either way
    for model, sheet in alone[0].items():
        assert both[0][model] == pytest.approx(sheet, rel=loose), model


def test_ranks_stop_early_together_and_keep_the_same_best(
    runs: tuple[list[Any], list[Any]],
) -> None:
    alone, both = (side[list(CASES).index("watched")] for side in runs)
    assert alone[2][2] < 2 * -(-TRAIN // BATCH)
    one, two = (json.loads((run[3] / "best.json").read_text()) for run in (alone, both))
    assert two == {**one, "value": pytest.approx(one["value"], rel=1e-4)}
    assert (both[3] / "checkpoints" / two["checkpoint"]).is_dir()


def points(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "logs" / "log.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if '"examples"' in line]


def test_points_are_where_one_rank_has_them(runs: tuple[list[Any], list[Any]]) -> None:
    for alone, both in zip(*(side[:2] for side in runs), strict=True):
        for one, two in zip(points(alone[3]), points(both[3]), strict=True):
            assert (one["step"], one["examples"]) == (two["step"], two["examples"])
            for name in ("loss/deepfm", "auc/deepfm", "loss/logistic"):
                assert two[name] == pytest.approx(one[name], rel=1e-4)


def test_logs_tell_of_communication(runs: tuple[list[Any], list[Any]]) -> None:
    _, both = runs
    assert all(0 <= point["time/communication_share"] <= 1 for point in points(both[0][3]))
    last = points(both[1][3])[-1]
    assert last["alltoall/imbalance"] >= 1
    assert last["alltoall/unique_ids"] <= 2 * last["alltoall/ids"]
    assert 0 < last["alltoall/hottest_share/f0"] <= 1
    assert last["alltoall/gradient_bytes"] == last["alltoall/row_bytes"] > 0
    assert last["alltoall/gradient_floats_to_rank_max/f0"] > 0
    assert "alltoall/ids" not in points(both[0][3])[-1]


def test_every_rank_writes_a_profile(runs: tuple[list[Any], list[Any]]) -> None:
    _, both = runs
    for rank in range(2):
        trace = json.loads((both[1][3].parent / "profile" / f"rank{rank}.json").read_text())
        assert trace["traceEvents"]


def _never(run: str, overrides: Sequence[str]) -> Any:
    raise AssertionError("only rank 0 looks for runs")


def judged(folders: Sequence[Path]) -> list[Any]:
    if os.environ.get("RANK", "0") != "0":
        folders_module.find = _never  # type: ignore[assignment]
    found = []
    for folder in folders:
        sheets = train.evaluate(str(folder), console=SILENT)
        file = train.predict(str(folder), out=folder / "again.parquet", console=SILENT)
        found.append((dict(sheets), file))
    return found


def test_what_either_saved_the_other_judges(runs: tuple[list[Any], list[Any]]) -> None:
    import pyarrow.parquet as pq

    alone, both = ([side[case] for case in (1, 3, 4)] for side in runs)
    for run, (sheets, _) in zip(both, judged([run[3] for run in both]), strict=True):
        assert sheets["logistic"] == pytest.approx(run[0]["logistic"], rel=1e-6)
        assert sheets["base_rate"] == pytest.approx(run[0]["base_rate"], rel=1e-6)
    (first, _) = run_ranks(2, judged, [run[3] for run in alone], timeout_s=300)
    for run, (sheets, file) in zip(alone, first, strict=True):
        assert dict(sheets) == {name: pytest.approx(run[0][name], rel=1e-5) for name in run[0]}
        mine = train.predict(str(run[3]), console=SILENT)
        assert pq.read_table(file)["label"] == pq.read_table(mine)["label"]
        theirs, own = (pq.read_table(path)["prediction"].to_pylist() for path in (file, mine))
        assert theirs == pytest.approx(own, rel=1e-5)


def synced(names: Sequence[str]) -> list[str]:
    """What `load_synced_config` and `require_same` say, of a config of each rank's own."""
    votes = early_control()

    def load() -> config.RunConfig:
        assert votes.rank == 0
        return config.from_mapping({**BASE, "seed": 7})

    def fail() -> config.RunConfig:
        raise ConfigError("no such file on rank 0")

    def stumble() -> config.RunConfig:
        raise ValueError("a bug")

    def differ() -> config.RunConfig:
        config.require_same(votes, config.from_mapping({**BASE, "name": names[votes.rank]}))
        raise AssertionError("told apart")

    seed = config.load_synced_config(votes, load).seed
    told = []
    for act in (lambda: config.load_synced_config(votes, fail), differ):
        with pytest.raises(ConfigError) as raised:
            act()
        told.append(str(raised.value))
    with pytest.raises(ValueError, match="a bug"):  # a ConfigError elsewhere
        config.load_synced_config(votes, stumble)
    return [str(seed), *told]


def test_configs_are_the_same_or_nothing_starts() -> None:
    for told in run_ranks(2, synced, ["a", "b"]):
        assert told[:2] == ["7", "no such file on rank 0"]
        assert "name: a" in told[2]
        assert "name: b" in told[2]


def broken(folder: Path, how: str) -> None:
    """A run in which rank 1 ends in step 5."""
    plain_batch, plain_apply, plain_losses = Loader._batch, Learner.apply, Learner.losses

    def batch(self: Loader, number: int, start: int, stop: int) -> Any:
        if how == "data" and self.share.rank == 1 and start == 5 * BATCH:
            raise DataError("row 160 is no row")
        return plain_batch(self, number, start, stop)

    def apply(self: Learner) -> None:
        if self.steps == 5 and os.environ["RANK"] == "1":
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "raise":
                raise ValueError("no such thing")
        plain_apply(self)

    def losses(self: Learner, batch: Any) -> Any:
        found = plain_losses(self, batch)
        if how == "forward" and self.steps == 5 and os.environ["RANK"] == "1":
            raise ValueError("no such loss")
        return found

    Loader._batch, Learner.apply = batch, apply  # type: ignore[method-assign]
    Learner.losses = losses  # type: ignore[method-assign]
    train.run(settings(folder, {"baselines": ["base_rate"]}), console=SILENT)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("data", ["rank 1 of 2, step", "row 160 is no row"]),
        ("raise", ["rank 0 of 2, step 5", "rank 1 of 2, step 5: ValueError: no such thing"]),
        (
            "forward",
            [
                "CollectiveFailed: rank 0 of 2, step 5: collective 'gradients of the dense part'",
                "rank 1 of 2, step 5: ValueError: no such loss",
            ],
        ),
        ("kill", ["rank 0 of 2, step 5", "collective 'vote on finite gradients' at step 5"]),
    ],
)
def test_one_rank_that_ends_ends_both(tmp_path: Path, how: str, told: list[str]) -> None:
    ranks = start_ranks(2, broken, tmp_path, how, timeout_s=300)
    outcomes = ranks.outcomes()
    assert not outcomes[0][0]
    assert not outcomes[1][0]
    assert outcomes[0][1] != "hung"
    assert outcomes[1][1] != "hung"
    for words in told:
        assert words in outcomes[0][1]


def shoal(arguments: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SHOAL_")}
    environment |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **variables}
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    try:
        texts = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(p.returncode, *text) for p, text in zip(processes, texts, strict=True)]


def test_two_agents_of_torchrun_train_one_model(tmp_path: Path) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump({**BASE, "data": {**DATA, "epochs": 1}}))
    port = free_port()
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    job = ["-m", "shoal.cli", "train", str(file), f"output.dir={tmp_path / 'runs'}"]
    agent = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    agent += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    agents = [
        shoal(
            [*agent, f"--node-rank={node}", *job],
            loopback,
        )
        for node in range(2)
    ]
    (code, out, err), (other, silent, more) = ended(agents)
    assert (code, other) == (0, 0), err + more
    (folder,) = (tmp_path / "runs").iterdir()
    assert out.splitlines()[-1] == f"report: {folder / 'report.html'}"
    assert silent == ""
    alone = train.run(config.load(file, [f"output.dir={tmp_path / 'alone'}"]), console=SILENT)
    figures = json.loads((folder / "metrics.json").read_text())
    assert figures["rows_by_table"] == alone.rows
    assert figures["models"]["deepfm"]["auc"] == pytest.approx(alone.metrics["deepfm"]["auc"])


def test_a_wrong_config_is_told_and_ends_with_2(tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text("name: wrong\ndata: {source: synthetic}\nmodel: {kind: nothing}\n")
    port = free_port()
    job = ["-m", "shoal.cli", "train", str(file)]
    found = ended([shoal(job, launcher_variables(rank, 2, port)) for rank in range(2)])
    for code, _, err in found:
        assert code == 2
        assert "unknown model kind" in err


def poisoned(folder: Path) -> tuple[str, dict[str, Any]]:
    """What a run prints of files of which one batch has no good row left, and one has one."""
    out = io.StringIO()
    source = {"kind": "parquet", "paths": [str(folder / "rows.parquet")], "ids": {"u": {}}}
    source |= {"eval_paths": [str(folder / "good.parquet")], "label": "y", "dense": ["x"]}
    changes = {
        **NORMED,
        "data": {"source": source, "batch_size": 8, "quarantine": str(folder / "bad.jsonl")},
        "distributed": {"path": "torch"},
    }
    result = train.run(settings(folder / "runs", changes), console=Console(file=out, width=200))
    return out.getvalue(), {**result.metrics["dlrm"], "trained": result.examples}


def test_batches_that_quarantine_empties_do_not_end_batch_normalisation(tmp_path: Path) -> None:
    u, y = np.arange(80) % 7, (np.arange(80) % 3 == 0).astype(np.float32)
    x = np.linspace(-1, 1, 80)
    pq.write_table(pa.table({"u": u, "x": x, "y": y}), tmp_path / "good.parquet")
    # Of rank 0 all of a batch; of both ranks all; all but one; one of each; of rank 1.
    for bad in (range(8, 12), range(16, 24), range(24, 31), range(33, 39), range(44, 48)):
        x[bad] = np.nan
    pq.write_table(pa.table({"u": u, "x": x, "y": y}), tmp_path / "rows.parquet", row_group_size=10)
    (out, found), (_, other) = run_ranks(2, poisoned, tmp_path, timeout_s=300)
    assert found == other
    assert found["trained"] == 80 - 29
    assert math.isfinite(found["log_loss"])
    assert "left out: 29 rows and 0 files, named in" in out


def batch_and_steps(folder: Path, changes: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
    result = train.run(settings(folder, changes), console=SILENT)
    return result.steps, dict(result.metrics["deepfm"])


def test_rates_and_batches_grow_with_the_number_of_ranks(tmp_path: Path) -> None:
    base = {**DATA, "source": {**SOURCE, "examples": 992}}
    grown = {"data": base, "distributed": {"lr_scaling": "sqrt", "batch_scaling": "linear"}}
    table = {**TABLE, "optimizer": {"kind": "adagrad", "lr": 0.3 * 2**0.5}}
    by_hand = {
        "data": {**base, "batch_size": 2 * BATCH},
        "tables": {"default": table},
        "dense_optimizer": {"kind": "sgd", "lr": 0.05 * 2**0.5},
    }
    (two, _) = run_ranks(2, batch_and_steps, tmp_path / "two", grown, timeout_s=300)
    steps, sheet = batch_and_steps(tmp_path / "one", by_hand)
    assert (two[0], steps) == (32, 32)
    assert two[1] == pytest.approx(sheet, rel=1e-4)


def frequencies(folder: Path, batch_size: int = BATCH) -> dict[str, Any]:
    """What a run has learned of how often items come, from its checkpoint."""
    changes = {
        "data": {**DATA, "batch_size": batch_size},
        "model": {"kind": "two_tower", "user": ["f0"], "item": ["f1"], "log_q": True},
        "features": {"f0": {}, "f1": {}},
        "baselines": [],
    }
    result = train.run(settings(folder, changes), console=SILENT)
    url = folders_module.checkpoint_of(folders_module.RunFolder(result.folder))
    assert url is not None
    found = read_module(Storage(url), read_manifest(url), "two_tower")
    assert math.isfinite(result.metrics["two_tower"]["log_loss"])
    return {k: v.tolist() for k, v in found.items() if "frequency" in k}


def test_frequencies_of_items_are_those_of_a_rank_s_batch_over_all_ranks(tmp_path: Path) -> None:
    alone = frequencies(tmp_path / "one", BATCH // 2)
    first, second = run_ranks(2, frequencies, tmp_path / "two", timeout_s=300)
    assert first == second
    gaps, alone_gaps = (np.array(one["scores.frequency.gap_H"]) for one in (first, alone))
    assert ((gaps > 0) == (alone_gaps > 0)).all()
    seen = gaps > 0
    assert gaps[seen].max() > 2
    assert gaps[seen].mean() == pytest.approx(alone_gaps[seen].mean(), rel=0.1)
