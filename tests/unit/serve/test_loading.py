"""What a folder, or a run that trains, has to serve."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal import config as settings
from shoal.checkpoint import load_share
from shoal.config import RunConfig
from shoal.config.build import ModelParts, build_parts
from shoal.errors import ConfigError, InputError, ServerLost, UnknownName
from shoal.serve import loading
from shoal.serve.loading import FolderSource, FollowedSource, Role, ServedShare
from shoal.serve.model import Model
from shoal.serve.repository import Repository
from shoal.serve.server import ModelServer, Tls
from shoal.serve.service import Service
from shoal.sync.checkpoints import load_module, newest_checkpoint
from shoal.sync.publisher import Publisher
from shoal.table.cpu.shard import CpuShard
from shoal.table.factory import make_shard
from shoal.table.hosting import HostedTables
from shoal.table.shard import IdGroups, StepContext
from support.ranks import free_port
from support.served_models import serving_sources, tiny_inputs, trained

WAIT_S = 120.0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("runs"), baselines=[])


@dataclass
class Trainer:
    """What a run's checkpoint has, published."""

    config: RunConfig
    parts: ModelParts
    shard: Any
    publisher: Publisher
    address: str

    def train(self) -> None:
        """All rows and dense weights change."""
        for table, spec in enumerate(self.shard.specs):
            ids = self.shard.export(table).ids
            groups = IdGroups(
                ids, torch.tensor([0, len(ids)]), torch.tensor([table], dtype=torch.int32)
            )
            ctx = StepContext(event_time_s=1)
            self.shard.assign(groups, [torch.randn(len(ids), spec.dim)], ctx=ctx)
        with torch.no_grad():
            for one in self.parts.module.parameters():
                one.add_(torch.randn_like(one))
        self.publish()

    def publish(self) -> None:
        self.publisher.publish()
        self.publisher.publish_dense(self.parts.module.state_dict())

    def follow(self, role: Role = "all", **share: Any) -> FollowedSource:
        return FollowedSource(self.config, [self.address], ServedShare(role=role, **share))

    def served(self, source: FollowedSource) -> Model:
        """The model of a source that has all of what is published."""
        ends = time.monotonic() + WAIT_S
        while True:
            found = None
            with suppress(ServerLost):  # shares of an entry that still load
                found = source.newest()
            status, (one,) = self.publisher.status(), source._replica.status()
            has_dense = source._replica._only == "rows" or (
                source._replica.summary().dense_version == status.dense_version
            )
            if found is not None and one.version >= status.version and has_dense:
                return source.load(source.newest() or 0)
            assert time.monotonic() < ends, (found, status)
            time.sleep(0.01)


@contextmanager
def training(run: Path) -> Iterator[Trainer]:
    config, url = settings.load(run / "config.yaml", environment={}), newest_checkpoint(str(run))
    parts = build_parts(config)
    load_module(url, parts.name, parts.module)
    tables = HostedTables(parts.tables, make_shard(parts.tables))
    load_share([url], tables, 0, collection=parts.name)
    publisher = Publisher(tables, every_s=3600.0)
    server = publisher.serve("tcp://127.0.0.1:0")
    try:
        with publisher:
            trainer = Trainer(config, parts, tables.shard, publisher, server.address)
            trainer.publish()
            yield trainer
    finally:
        server.stop()


def predicted(model: Model, inputs: dict[str, np.ndarray], output: str = "prediction") -> Any:
    return model.run([model.read(inputs)])[0][output]


@pytest.mark.parametrize("dtype", [None, "float16", "int8"])
def test_shares_and_an_entry_follow_a_run_that_trains(dtype: Any, run: Path) -> None:
    """Together they predict what one process with the same rows does."""
    inputs = tiny_inputs(64)
    with training(run) as trainer:
        whole = trainer.follow(dtype=dtype)
        shares = [trainer.follow("ps", index=k, of=2, dtype=dtype) for k in range(2)]
        assert [one.name for one in shares] == ["tiny:ps_0", "tiny:ps_1"]
        with serving_sources(shares, http_address=None) as (server, models):
            entry = trainer.follow("entry", addresses=((server.grpc_address,),) * 2, timeout_s=60.0)
            try:
                before = predicted(trainer.served(whole), inputs)
                assert np.array_equal(predicted(trainer.served(entry), inputs), before)
                if dtype is None:
                    folder = FolderSource(run)
                    saved = folder.load(folder.newest() or 0)
                    assert np.array_equal(predicted(saved, inputs), before)
                trainer.train()
                for one in shares:
                    trainer.served(one)
                after = predicted(trainer.served(whole), inputs)
                assert not np.allclose(after, before, atol=0.01)
                assert np.array_equal(predicted(trainer.served(entry), inputs), after)
                assert models.staleness_s("tiny:ps_1") is not None
            finally:
                entry.close()
                whole.close()
        rows = [one._replica.shard.stats()[0].rows for one in (whole, *shares, entry)]
        assert 0 < rows[1] < rows[0] == rows[1] + rows[2]
        assert rows[3] == 0  # and an entry none


def test_an_entry_that_follows_needs_its_shares(run: Path) -> None:
    with training(run) as trainer:
        gone = ((f"127.0.0.1:{free_port()}",),)
        entry = trainer.follow("entry", addresses=gone, timeout_s=0.2)
        try:
            with pytest.raises(ServerLost):
                entry.newest()
        finally:
            entry.close()


@pytest.mark.parametrize("how", ["folder", "follows"])
def test_the_dense_module_alone(how: str, run: Path) -> None:
    """It gives pooled rows the probabilities that the whole model gives their ids."""
    inputs = tiny_inputs(9)
    with training(run) as trainer:
        sources: list[Any] = [FolderSource(run), FolderSource(run, ServedShare(role="dense"))]
        if how == "follows":
            sources[1] = trainer.follow("dense")
            trainer.served(sources[1])
        whole, dense = (one.load(one.newest() or 0) for one in sources)
        assert sources[1].name == "tiny:dense"
        shapes = {one.name: one.shape for one in dense.signature.inputs}
        assert shapes == {"dense": (-1, 4), "embeddings": (-1, 3, 4), "first_order": (-1, 3)}
        batch, _ = whole.reader.join([whole.read(inputs)])
        rows = {k: one.numpy() for k, one in whole.rows(batch).items()}
        found = dense.run(
            [
                dense.read({k: one[part] for k, one in {**rows, "dense": inputs["dense"]}.items()})
                for part in (slice(4), slice(4, None))
            ]
        )
        joined = {k: np.concatenate([one[k] for one in found]) for k in found[0]}
        assert np.array_equal(joined["prediction"], predicted(whole, inputs))
        logits = joined["logits"].astype(float)
        assert np.allclose(joined["prediction"], 1 / (1 + np.exp(-logits)), atol=1e-6)
        for wrong in (
            {},
            {**rows, "dense": inputs["dense"], "f0": inputs["f0"]},
            {**rows, "dense": inputs["dense"][:3]},
            {**rows, "dense": np.full((9, 4), np.nan)},
            {**rows, "dense": np.full((9, 4), "a")},
            {**rows, "dense": np.float32(1)},
        ):
            with pytest.raises((InputError, UnknownName)):
                dense.read(wrong)
        for one in sources:
            one.close()


def test_a_folder_is_served_with_int8_rows(run: Path) -> None:
    found = {}
    for dtype in (None, "int8"):
        source = FolderSource(run, ServedShare(dtype=dtype))
        found[dtype] = predicted(source.load(source.newest() or 0), tiny_inputs(50))
    assert not np.array_equal(found[None], found["int8"])
    assert np.allclose(found[None], found["int8"], atol=0.01)


@pytest.mark.slow
def test_a_run_without_a_checkpoint_is_waited_for(tmp_path: Path) -> None:
    run = trained(tmp_path, baselines=[])
    (run / "checkpoints").rename(tmp_path / "kept")
    with Repository([FolderSource(run)], every_s=3600) as models:
        assert (models.names, models.ready) == (("tiny",), False)
        shutil.copytree(tmp_path / "kept", run / "checkpoints")
        models._entries["tiny"].refresh()
        assert models.ready


@pytest.mark.parametrize("role", ["all", "ps", "dense"])
def test_a_run_that_is_followed_begins_with_its_checkpoint(role: Role, run: Path) -> None:
    config = settings.load(run / "config.yaml", environment={})
    address = f"tcp://127.0.0.1:{free_port()}"
    share = ServedShare(role=role)
    source = FollowedSource(config, [address], share, checkpoint=str(run / "checkpoints"))
    try:
        assert isinstance(source._replica.shard, CpuShard)
        assert all(bool(one.rows) == (role != "dense") for one in source._replica.shard.stats())
        assert bool(source._replica.dense()) == (role != "ps")
    finally:
        source.close()


def test_files_that_are_no_certificate(tmp_path: Path) -> None:
    (tmp_path / "a.pem").write_text("no certificate")
    tls = Tls(str(tmp_path / "a.pem"), str(tmp_path / "a.pem"))
    with (
        Repository([], every_s=3600) as models,
        pytest.raises(ConfigError, match="files of TLS"),
        ModelServer(Service(models), http_address=None, tls=tls),
    ):
        pass


@pytest.mark.slow
def test_a_dense_module_is_compiled_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def compiled(self: Any, module: Any, inputs: Any) -> Any:
        seen.extend(one.shape for one in inputs)
        return lambda *inputs: module(*inputs) + 1000

    monkeypatch.setattr(loading.Compiler, "compiled", compiled)
    run = trained(tmp_path)
    source = FolderSource(run, ServedShare(compile=True))
    version = source.newest()
    assert version is not None
    found = source.load(version).predict(tiny_inputs(3))
    assert seen == [(-1, 4), (-1, 3, 4), (-1, 3)]
    assert found["prediction"].tolist() == [1, 1, 1]


@pytest.mark.slow
def test_products_of_half_precision_are_not_compiled(tmp_path: Path) -> None:
    run = trained(tmp_path, amp="bfloat16")
    source = FolderSource(run, ServedShare(compile=True))
    with pytest.raises(ConfigError, match="amp=bfloat16"):
        source.load(source.newest() or 0)
