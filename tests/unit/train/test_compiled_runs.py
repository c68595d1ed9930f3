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
from shoal.train import learner as learning
from shoal.train.learner import Learner

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


WORKING = "allowed: .*false, true, default, max-autotune-no-cudagraphs"


def test_all_that_works_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=WORKING):
        run(tmp_path, compile="max-autotune")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"accumulation": 2}, f"compile with accumulation=2: got max-autotune; {WORKING}"),
        ({"distributed": {"dense": "fsdp2"}}, "compile with distributed.dense=fsdp2"),
    ],
)
def test_cuda_graphs_keep_no_gradients(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        run(tmp_path, compile="max-autotune", **changes)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_step_begins_before_all_forwards_of_its_backward(
    tmp_path: Path, staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    monkeypatch.setattr(learning, "has_cuda_graphs", lambda how: True)
    monkeypatch.setattr(learning, "begin_step", lambda: events.append("begin"))
    trained, apply = Learner._trained, Learner.apply
    monkeypatch.setattr(
        Learner, "_trained", lambda self, batch: (events.append("forward"), trained(self, batch))[1]
    )
    monkeypatch.setattr(Learner, "apply", lambda self: (events.append("apply"), apply(self))[1])
    run(tmp_path, distributed={"staleness": staleness}, baselines=["logistic"])
    # Two models, one after the other or by one backward; evaluation is eager and begins nothing.
    step = ["begin", *["forward"] * 2, *["apply"] * 2] if staleness else 2 * [
        "begin", "forward", "apply"
    ]  # fmt: skip
    assert events == step * 14


@pytest.mark.gpu
@pytest.mark.parametrize("staleness", [0, 1])
def test_cuda_graphs_of_two_models_learn_the_same(tmp_path: Path, staleness: int) -> None:
    model = {"kind": "dcn", "hidden": [16], "low_rank": 4}
    changes = {"device": "cuda", "distributed": {"staleness": staleness}, "model": model}
    changes["baselines"] = ["logistic"]
    want = run(tmp_path / "eager", **changes)
    got = run(tmp_path / "compiled", compile="reduce-overhead", **changes)
    assert list(got.metrics) == list(want.metrics)
    for name, sheet in want.metrics.items():
        assert got.metrics[name]["log_loss"] == pytest.approx(sheet["log_loss"], abs=2e-3)


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize(("whole", "said"), [(64, 0), (1000, 1)])
def test_a_run_whose_batches_are_all_eager_says_so_once(
    tmp_path: Path,
    whole: int,
    said: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made, init = torch.compile, learning.Scorer.__init__

    def larger(self: learning.Scorer, *args: object, **more: object) -> None:
        init(self, *args, **more)  # type: ignore[arg-type]
        self._whole = whole

    monkeypatch.setattr(torch, "compile", lambda function, mode: made(function))
    monkeypatch.setattr(learning, "_EAGER_BATCHES", 5)
    monkeypatch.setattr(learning.Scorer, "__init__", larger)
    run(tmp_path, compile=True, baselines=["logistic"])
    assert caplog.text.count("the first 5 training batches were eager") == said


def test_a_cpu_without_a_compiler_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(DeviceUnavailable, match="no no-such-compiler"):
        run(tmp_path, compile=True)
