"""What a folder has to serve."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shoal import config as settings
from shoal.errors import ConfigError
from shoal.serve.loading import FolderSource, FollowedSource
from shoal.serve.repository import Repository
from shoal.serve.server import ModelServer, Tls
from shoal.serve.service import Service
from support.ranks import free_port
from support.served_models import trained


def test_a_run_without_a_checkpoint_is_waited_for(tmp_path: Path) -> None:
    run = trained(tmp_path, baselines=[])
    (run / "checkpoints").rename(tmp_path / "kept")
    with Repository([FolderSource(run)], every_s=3600) as models:
        assert (models.names, models.ready) == (("tiny",), False)
        shutil.copytree(tmp_path / "kept", run / "checkpoints")
        models._entries["tiny"].refresh()
        assert models.ready


def test_a_run_that_is_followed_begins_with_its_checkpoint(tmp_path: Path) -> None:
    run = trained(tmp_path, baselines=[])
    config = settings.load(run / "config.yaml", environment={})
    address = f"tcp://127.0.0.1:{free_port()}"
    source = FollowedSource(config, [address], checkpoint=str(run / "checkpoints"))
    try:
        assert all(one.rows for one in source._replica.shard.stats())
        assert source._replica.dense()
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
