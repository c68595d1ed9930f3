"""Workers without a process group: each a run of its own, over the same servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from shoal import config
from shoal.config.build import build_parts
from shoal.config.tree import RunConfig
from shoal.errors import ConfigError, ServerLost
from shoal.ps.averaging import DenseAverage
from shoal.ps.messages import Head
from shoal.ps.server import TableServer
from shoal.train import runs
from shoal.train.learner import Learner
from shoal.train.summary import RunResult

EXAMPLES = 2_000


def settings(folder: Path, warm: Path | None = None, **distributed: object) -> RunConfig:
    source = {"kind": "synthetic", "num_features": 2, "vocabulary": 200}
    return config.from_mapping(
        {
            "name": "workers",
            "data": {
                "source": {**source, "examples": EXAMPLES, "eval_examples": 1_000},
                "batch_size": 100,
            },
            "tables": {"default": {"dim": 4}},
            "model": {"kind": "deepfm", "hidden": [8]},
            "baselines": [],
            "output": {"dir": str(folder)},
            "checkpoint": {} if warm is None else {"warm_start": str(warm)},
            "distributed": {"path": "ps", "dense": "average", **distributed},
        }
    )


@pytest.fixture
def addresses(tmp_path: Path) -> Iterator[list[str]]:
    run = settings(tmp_path)
    parts = build_parts(run)
    servers = [
        TableServer(parts.tables, index=k, of=2, seed=run.seed).serve("tcp://127.0.0.1:0")
        for k in range(2)
    ]
    yield [server.address for server in servers]
    for server in servers:
        server.stop()


def trained(
    folder: Path,
    addresses: list[str],
    worker: int,
    start_s: float = 60,
    warm: Path | None = None,
) -> RunResult:
    run = settings(
        folder,
        warm,
        worker=worker,
        workers=2,
        average_every=2,
        servers={"addresses": addresses, "start_s": start_s},
    )
    return runs.run(run, console=Console(quiet=True))


@pytest.mark.slow
def test_a_run_that_continues_brings_what_it_has_trained(
    tmp_path: Path, addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To servers that have no average; an evaluation before it brings none."""
    brought: list[list[float]] = []
    trains: list[list[float]] = []
    closed: list[Learner] = []
    join, close = DenseAverage.join, Learner.close

    def spied(self: DenseAverage, **options: object) -> None:
        brought.append(self._weights[0].reshape(-1).tolist())
        join(self, **options)  # type: ignore[arg-type]

    def closing(self: Learner) -> None:
        trains.append(next(self.module.parameters()).reshape(-1).tolist())
        closed.append(self)
        close(self)

    monkeypatch.setattr(DenseAverage, "join", spied)
    monkeypatch.setattr(Learner, "close", closing)
    first = trained(tmp_path / "first", addresses, 0)
    runs.evaluate(str(first.folder), console=Console(quiet=True))
    assert len(brought) == 1
    assert trains[1] == trains[0] != brought[0]
    warm = trained(tmp_path / "second", addresses, 0, warm=first.folder)
    assert warm.steps
    assert brought[1] == trains[0]
    learner = closed[0]
    assert learner.staleness is not None
    assert learner.staleness.lookups > 0
    assert learner._servers is not None
    with pytest.raises(ConfigError, match="closed"):
        learner._servers.ask([(Head(method="size"), [])] * 2)


@pytest.mark.slow
def test_workers_join_one_after_the_other(
    tmp_path: Path, addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[list[float]] = []
    join = DenseAverage.join

    def spied(self: DenseAverage, **options: object) -> None:
        join(self, **options)  # type: ignore[arg-type]
        joined.append(self._weights[0].reshape(-1).tolist())

    monkeypatch.setattr(DenseAverage, "join", spied)
    with pytest.raises(ServerLost, match="dense weights on server 0"):
        trained(tmp_path / "early", addresses, 1, start_s=0.1)
    first = trained(tmp_path / "first", addresses, 0)
    second = trained(tmp_path / "second", addresses, 1)
    # Each reads its half of every batch, and evaluates on all examples.
    assert [first.examples, second.examples] == [EXAMPLES / 2] * 2
    assert joined[1] != joined[0]  # what the first had trained, not what it began with
    evaluated = [one.metrics["deepfm"]["examples"] for one in (first, second)]
    assert evaluated == [1_000, 1_000]
    assert set(first.rows) == set(second.rows)
    assert all(second.rows[name] >= rows for name, rows in first.rows.items())
