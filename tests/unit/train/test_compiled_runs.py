"""Runs with `compile`."""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

from shoal import config, train
from shoal.errors import ConfigError, DeviceUnavailable

# Of the compiler itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
TABLE = {"dim": 2, "optimizer": {"kind": "adagrad", "lr": 0.3}}
SOURCE = {
    "kind": "synthetic",
    "examples": 400,
    "eval_examples": 100,
    "num_features": 3,
    "vocabulary": 20,
    "fresh_share": 0.1,
    "num_dense": 2,
}


def settings(folder: Path, **changes: object) -> config.RunConfig:
    base = {
        "name": "tiny",
        "threads": 1,
        "data": {"source": SOURCE, "batch_size": 64, "epochs": 2},
        "tables": {"default": TABLE},
        "model": {"kind": "dcn", "hidden": [4], "low_rank": 2},
        "baselines": [],
        "output": {"dir": str(folder)},
    }
    return config.from_mapping({**base, **changes})


def run(folder: Path, **changes: object) -> train.RunResult:
    console = Console(file=io.StringIO(), width=100)
    return train.run(settings(folder, **changes), console=console)


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs run as they were traced, by the kernels of an eager run."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize(
    "changes",
    [{}, {"amp": "bfloat16", "clip_norm": 1.0, "accumulation": 2}],
    ids=["plain", "bfloat16, clipped, accumulated"],
)
def test_a_compiled_run_is_the_run_by_one_graph(
    tmp_path: Path, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    # 400 = 6 * 64 + 16: the last batch of an epoch is smaller, and so is that of an evaluation.
    want = run(tmp_path / "eager", **changes)
    # Inductor alone knows modes.
    made = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, mode: made(function))
    got = run(tmp_path / "compiled", compile=True, **changes)
    assert got.metrics == want.metrics
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.slow
def test_a_run_compiled_by_inductor_learns_the_same(tmp_path: Path) -> None:
    want = run(tmp_path / "eager")
    got = run(tmp_path / "compiled", compile="default")
    assert got.metrics["dcn"] == pytest.approx(dict(want.metrics["dcn"]), rel=1e-4)
    # Names in checkpoints are those of an eager run: each reads the other's.
    for first, then in (("eager", True), ("compiled", False)):
        (folder,) = (tmp_path / first).iterdir()
        warm = {"warm_start": str(folder)}
        run(tmp_path / f"after-{first}", compile=then, checkpoint=warm)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"compile": "fast"}, ConfigError, "compile: got 'fast'.*reduce-overhead"),
        ({"compile": "reduce-overhead"}, ConfigError, "compile=reduce-overhead: got device cpu"),
    ],
)
def test_what_cannot_be_compiled_is_refused(
    tmp_path: Path, changes: dict[str, object], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        run(tmp_path, **changes)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"accumulation": 2}, "compile with accumulation=2: got max-autotune"),
        ({"distributed": {"dense": "fsdp2"}}, "compile with distributed.dense=fsdp2"),
    ],
)
def test_cuda_graphs_keep_no_gradients(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        run(tmp_path, device="cuda", compile="max-autotune", **changes)


def test_a_cpu_without_a_compiler_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(DeviceUnavailable, match="no no-such-compiler"):
        run(tmp_path, compile=True)
