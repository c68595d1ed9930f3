"""What a folder has to serve."""

from __future__ import annotations

import shutil
from pathlib import Path

from shoal.serve.loading import FolderSource
from shoal.serve.repository import Repository
from support.served_models import trained


def test_a_run_without_a_checkpoint_is_waited_for(tmp_path: Path) -> None:
    run = trained(tmp_path, baselines=[])
    (run / "checkpoints").rename(tmp_path / "kept")
    with Repository([FolderSource(run)], every_s=3600) as models:
        assert (models.names, models.ready) == (("tiny",), False)
        shutil.copytree(tmp_path / "kept", run / "checkpoints")
        models._entries["tiny"].refresh()
        assert models.ready
