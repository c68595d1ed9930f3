"""Workers without a process group: each a run of its own, over the same servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from shoal import config
from shoal.config.build import build_parts, open_data
from shoal.config.tree import RunConfig
from shoal.errors import ServerLost
from shoal.ps.averaging import DenseAverage
from shoal.ps.server import TableServer
from shoal.train import runs
from shoal.train.summary import RunResult

EXAMPLES = 2_000


def settings(folder: Path, **distributed: object) -> RunConfig:
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
            "distributed": {"path": "ps", "dense": "average", **distributed},
        }
    )


@pytest.fixture
def addresses(tmp_path: Path) -> Iterator[list[str]]:
    run = settings(tmp_path)
    data = open_data(run)
    parts = build_parts(run, run.model, offered=data.features, num_dense=data.num_dense)
    servers = [
        TableServer(parts.tables, index=k, of=2, seed=run.seed).serve("tcp://127.0.0.1:0")
        for k in range(2)
    ]
    yield [server.address for server in servers]
    for server in servers:
        server.stop()


def trained(folder: Path, addresses: list[str], worker: int, start_s: float = 60) -> RunResult:
    run = settings(
        folder,
        worker=worker,
        workers=2,
        average_every=2,
        servers={"addresses": addresses, "start_s": start_s},
    )
    return runs.run(run, console=Console(quiet=True))


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
