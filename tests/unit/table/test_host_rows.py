"""Where rows live, from every place where it is said: the factory, a table, a collection, a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from shoal import EmbeddingCollection, Feature, HostRows, Segment, Table, TableSpec, config
from shoal.config.build import SourceInputs, build_host_rows, build_parts
from shoal.errors import ConfigError
from shoal.table import factory
from shoal.table.cuda import shard as cuda
from shoal.table.shard import Shard
from shoal.train.learner import Learner

SPEC = TableSpec(name="f", segments=(Segment(dim=4),))
ROWS = HostRows(cache_bytes=1 << 12, policy="lfu")
RUN = {
    "name": "tiny",
    "data": {"source": {"kind": "synthetic", "num_features": 1, "num_dense": 1}},
    "model": {"kind": "deepfm", "hidden": [2]},
    "host_rows": {"cache_bytes": 1 << 12, "policy": "lfu"},
}


def learner(device: str) -> Learner:
    run = config.from_mapping({**RUN, "device": device})
    source = SourceInputs(("f",), frozenset(), 1, ("label",))
    return Learner(build_parts(run, source=source), run)


Made = Callable[[str], Shard]
ENTRIES: dict[str, Made] = {
    "make_shard": lambda device: factory.make_shard([SPEC], device=device, host_rows=ROWS),
    "Table": lambda device: Table(SPEC, device=device, host_rows=ROWS).shard,
    "EmbeddingCollection": lambda device: (
        EmbeddingCollection([SPEC], [Feature("f", "f")], device=device, host_rows=ROWS).shard
    ),
}
every_entry = pytest.mark.parametrize("entry", ENTRIES)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has "cuda" mean interpreted kernels where there is no GPU."""
    if torch.cuda.is_available():
        return
    made = cuda.CudaShard

    def on_cpu(specs: Sequence[TableSpec], **named: Any) -> cuda.CudaShard:
        return made(specs, **{**named, "device": "cpu"})

    monkeypatch.setattr(factory, "missing_device", lambda where: None)
    monkeypatch.setattr(cuda, "CudaShard", on_cpu)


@every_entry
@pytest.mark.usefixtures("interpreted")
def test_rows_are_on_the_host(entry: str) -> None:
    shard = ENTRIES[entry]("cuda")
    assert shard.stats()[0].on_host
    assert shard.settings == {"host_rows": ROWS}  # type: ignore[attr-defined]


@every_entry
@pytest.mark.parametrize("device", ["cpu"])
def test_a_cpu_refuses_a_cache(entry: str, device: str) -> None:
    with pytest.raises(ConfigError, match=r"host_rows.*cpu.*Leave host_rows out.*cuda"):
        ENTRIES[entry](device)


def test_a_run_says_where_rows_live() -> None:
    run = config.from_mapping(RUN)
    assert build_host_rows(run) == ROWS
    assert build_host_rows(config.from_mapping({**RUN, "host_rows": {}})) == HostRows()
    assert build_host_rows(config.from_mapping({**RUN, "host_rows": None})) is None
    for wrong in ({"cache_bytes": -1}, {"policy": "fifo"}, {"cache_bytes": True}, {"bytes": 1}):
        with pytest.raises(ConfigError, match="host_rows"):
            config.from_mapping({**RUN, "host_rows": wrong})


def test_a_run_on_a_cpu_refuses_a_cache() -> None:
    with pytest.raises(ConfigError, match="Leave host_rows out"):
        learner("cpu")


def test_a_learner_hands_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[HostRows | None] = []

    def made(specs: Sequence[TableSpec], *, host_rows: HostRows | None, **named: Any) -> Shard:
        given.append(host_rows)
        return factory.make_shard(specs, **named)

    monkeypatch.setattr("shoal.embedding.collection.make_shard", made)
    learner("cpu")
    assert given == [ROWS]
