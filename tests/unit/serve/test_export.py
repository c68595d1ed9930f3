"""`shoal export`: what a version holds, and that it is there as a whole or not at all."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from typer.testing import CliRunner

from shoal import config, train
from shoal.checkpoint import Contents, LoadOptions, load, read_manifest
from shoal.cli import app
from shoal.config.build import SourceInputs, build_parts, open_data, source_inputs
from shoal.embedding.collection import EmbeddingCollection
from shoal.errors import CheckpointError, ConfigError
from shoal.placement import hash_ids, ranks_of
from shoal.serve import export as exporting
from shoal.serve.bundle import Bundle, open_bundle, signature_of
from shoal.serve.loading import FolderSource, ServedShare
from shoal.serve.model import PredictModel
from shoal.serve.signature import ServedTensor, dense_example
from shoal.sync.replica import serving_spec
from shoal.table.factory import make_shard
from shoal.table.hosting import HostedTables
from shoal.table.values import RowChunk
from shoal.train import folder as folders
from support.served_models import serving_sources

pytestmark = pytest.mark.slow  # torch.export takes seconds
ROOT = Path(__file__).parents[3]
SERVERS = "distributed.servers.addresses=[tcp://127.0.0.1:1]"
CONFIG: dict[str, Any] = {
    "name": "tiny",
    "seed": 3,
    "data": {
        "source": {
            "kind": "synthetic",
            "examples": 400,
            "eval_examples": 50,
            "num_features": 3,
            "vocabulary": 40,
        },
        "batch_size": 50,
    },
    "tables": {"default": {"dim": 4, "admission": {"threshold": 2}}},
    "model": {"kind": "deepfm", "hidden": [8]},
    "checkpoint": {"every_steps": 3, "full_every": 4, "background": False},
    "logging": {"tensorboard": False},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder; the model of its config, and a baseline."""
    output = {"dir": str(tmp_path_factory.mktemp("runs"))}
    chosen = config.from_mapping({**CONFIG, "output": output})
    return train.run(chosen, console=Console(quiet=True)).folder


@pytest.fixture(scope="module")
def dense(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A version of the dense module alone."""
    return export(run, tmp_path_factory.mktemp("dense"), "--mode", "dense")


def export(run: Path, folder: Path, *options: str) -> Path:
    result = CliRunner().invoke(app, ["export", str(run), str(folder), "--debug", *options])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    (line,) = result.stdout.splitlines()
    return Path(line.removeprefix("exported: "))


def rows_of(bundle: Bundle, specs: Any) -> list[RowChunk]:
    """All rows of a bundle, loaded as a server does."""
    shard = make_shard(specs)
    name = bundle.signature.model
    contents = Contents(tables={name: HostedTables(specs, shard)})
    load(bundle.checkpoint, contents, options=LoadOptions(dense=False))
    return [shard.export(table) for table in range(len(specs))]


def trained_rows(run: Path) -> tuple[Any, list[RowChunk]]:
    found, settings = folders.find(str(run), ())
    where = folders.checkpoint_of(found)
    assert where is not None
    parts = build_parts(settings)
    shard = make_shard(parts.tables)
    unknown = {one.key for one in read_manifest(where).tables if one.collection != "deepfm"}
    options = LoadOptions(dense=False, allow_unknown=frozenset(unknown))
    load(where, Contents(tables={"deepfm": HostedTables(parts.tables, shard)}), options=options)
    specs = tuple(serving_spec(one) for one in parts.tables)
    return specs, [shard.export(table) for table in range(len(specs))]


def test_a_bundle_predicts_what_the_run_does(run: Path, tmp_path: Path) -> None:
    path = export(run, tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == [path.name] == ["8"]
    bundle = open_bundle(path)
    parts = bundle.parts()
    specs = tuple(serving_spec(one) for one in parts.tables)
    collection = EmbeddingCollection(specs, parts.features, parts.layouts)
    load(bundle.checkpoint, Contents(tables={"deepfm": collection.hosted},
                                     modules={"deepfm": parts.module}))  # fmt: skip
    dense = torch.export.load(path / "dense.pt2").module()
    collection.eval()
    found = []
    with torch.no_grad():
        for batch in open_data(bundle.config).evaluation:
            inputs = collection(batch.ids, event_time_s=0)
            logits = dense(batch.dense, inputs["embeddings"], inputs["first_order"])
            found += logits.sigmoid().tolist()
    expected = train.predict(str(run), console=Console(quiet=True))
    predictions = pq.read_table(expected)["prediction"].to_pylist()
    torch.testing.assert_close(torch.tensor(found), torch.tensor(predictions))
    assert len(found) == 50
    signature = json.loads((path / "signature.json").read_text())
    served = FolderSource(run).load(8)
    assert isinstance(served, PredictModel)
    for name in ("inputs", "outputs"):  # as the server has them
        expected_tensors = [asdict(one) for one in getattr(served.signature, name)]
        found_tensors = getattr(bundle.signature, name)
        assert [one.model_dump() for one in found_tensors] == [
            {**one, "shape": tuple(one["shape"])} for one in expected_tensors
        ]
    assert signature["dense_inputs"] == [
        {"name": "dense", "dtype": "float32", "shape": [-1, 4], "optional": False},
        {"name": "embeddings", "dtype": "float32", "shape": [-1, 3, 4], "optional": False},
        {"name": "first_order", "dtype": "float32", "shape": [-1, 3], "optional": False},
    ]  # fmt: skip


@pytest.mark.parametrize("shards", [0, 1, 3])
def test_rows_are_those_of_the_run_without_optimizer_state(
    run: Path, tmp_path: Path, shards: int
) -> None:
    """shards 0: standalone."""
    options = ("--mode", "distributed", "--shards", str(shards)) if shards else ()
    path = export(run, tmp_path, *options)
    specs, expected = trained_rows(run)
    if shards:
        entry = open_bundle(path / "entry")
        assert read_manifest(entry.checkpoint).tables == ()
        assert entry.signature.dense_program == "dense.pt2"
    bundles = [open_bundle(path / f"ps_{k}") for k in range(shards)] or [open_bundle(path)]
    parts = [rows_of(bundle, specs) for bundle in bundles]
    for table, wanted in enumerate(expected):
        ids = torch.cat([part[table].ids for part in parts])
        weights = torch.cat([part[table].weights for part in parts])
        order, known = ids.argsort(), wanted.ids.argsort()
        assert torch.equal(ids[order], wanted.ids[known]) and len(ids) > 10
        assert torch.equal(weights[order], wanted.weights[known])
    edges = [bundle.signature.hashes for bundle in bundles]
    assert edges[0][0] == 0 and edges[-1][1] == 1 << 64
    assert [stop for _, stop in edges[:-1]] == [start for start, _ in edges[1:]]
    for bundle, part in zip(bundles, parts, strict=True):
        manifest = read_manifest(bundle.checkpoint)
        assert all(one.state_width == 0 for one in manifest.tables)
        assert [one.rows for one in bundle.signature.tables] == [len(one.ids) for one in part]
        start, stop = bundle.signature.hashes
        for spec, one in zip(specs, part, strict=True):
            hashes = hash_ids(spec.hash_name, one.ids)
            assert set(ranks_of(hashes, len(bundles)).tolist()) == {bundle.signature.index}
            assert all(start <= h % (1 << 64) < stop for h in hashes.tolist())


def test_rows_in_half_precision(run: Path, tmp_path: Path) -> None:
    bundle = open_bundle(export(run, tmp_path, "--dtype", "float16"))
    specs, expected = trained_rows(run)
    halves = rows_of(bundle, [serving_spec(one, "float16") for one in specs])
    for half, wanted in zip(halves, expected, strict=True):
        assert torch.equal(half.ids, wanted.ids)
        assert half.weights.dtype == torch.float16
        torch.testing.assert_close(half.weights.float(), wanted.weights, rtol=1e-3, atol=1e-4)


def test_the_dense_module_alone(dense: Path) -> None:
    bundle = open_bundle(dense)
    module = bundle.parts().module
    module.load_state_dict(torch.load(dense / "dense.pt", weights_only=True))
    load(bundle.checkpoint, Contents(modules={"deepfm": bundle.parts().module}))
    program = torch.export.load(dense / bundle.signature.dense_program).module()
    given = bundle.signature.dense_inputs
    wanted = [ServedTensor(one.name, one.dtype, one.shape) for one in given]
    for batch in (1, 5):
        inputs = dense_example(wanted, batch)
        torch.testing.assert_close(program(*inputs), module.eval()(*inputs))


def test_the_same_again_is_left_and_another_is_refused(run: Path, tmp_path: Path) -> None:
    path = export(run, tmp_path)
    inode = path.stat().st_ino
    assert export(run, tmp_path) == path and path.stat().st_ino == inode
    with pytest.raises(CheckpointError, match="another checkpoint, or with other settings"):
        export(run, tmp_path, "--dtype", "float16")
    assert export(run, tmp_path, "--dtype", "float16", "--version", "9").name == "9"


def test_the_newest_versions_stay(run: Path, tmp_path: Path) -> None:
    for version in (1, 2, 10):
        export(run, tmp_path, "--mode", "dense", "--version", str(version), "--keep", "2")
    assert exporting.versions_of(tmp_path) == [2, 10]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["10", "2"]
    # What was just asked for stays, too.
    assert export(run, tmp_path, "--mode", "dense", "--version", "0", "--keep", "1").is_dir()
    assert exporting.versions_of(tmp_path) == [0, 10]


def test_what_others_put_there_stays(run: Path, tmp_path: Path) -> None:
    for name in ("2023", "007", "1"):
        (tmp_path / name).mkdir()
    (tmp_path / "7").write_text("notes")
    (tmp_path / "007" / "export.json").write_text("{}")
    for version in (2, 3):
        export(run, tmp_path, "--mode", "dense", "--version", str(version), "--keep", "1")
    assert exporting.versions_of(tmp_path) == [3]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["007", "1", "2023", "3", "7"]


def test_an_export_that_fails_leaves_no_version(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(exporting, "save", full)
        with pytest.raises(CheckpointError, match="No space left"):
            export(run, tmp_path)
    assert list(tmp_path.iterdir()) == []
    export(run, tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["8"]


def test_a_full_disk_ends_an_export_with_a_message(run: Path, tmp_path: Path) -> None:
    # A limit that files of dense modules are above, and those of settings are not.
    command = f"ulimit -f 9; exec {sys.executable} -m shoal.cli export {run} {tmp_path}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert (done.returncode, "got File too large" in done.stderr) == (2, True), done.stderr


def test_a_bundle_of_other_inputs_than_its_settings_reopens_alike(dense: Path) -> None:
    bundle = open_bundle(dense)
    given = source_inputs(bundle.config.data.source)
    features = given.features[1:]
    other = SourceInputs(features, frozenset(features[:1]), given.num_dense + 3, given.labels)
    made = build_parts(bundle.config, source=other)
    signature = signature_of(made, part="dense", step=1, amp="none")
    parts = replace(bundle, signature=signature).parts()
    assert signature_of(parts, part="dense", step=1, amp="none") == signature
    parts.module.load_state_dict(made.module.state_dict())


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, dense: Tensor | None, embeddings: Tensor, first: Tensor | None) -> Tensor:
        if embeddings.sum() > 0:  # depends on values
            return self.linear(embeddings.sum(dim=1)).squeeze(1)
        return embeddings.sum(dim=(1, 2))


def test_a_module_that_torch_cannot_export_has_a_reason(dense: Path, tmp_path: Path) -> None:
    parts = open_bundle(dense).parts()
    signature = signature_of(parts, part="dense", step=1, amp="none")
    problem = exporting.export_dense(_Branches(), signature, tmp_path / "one.pt2")
    assert problem is not None and "data-dependent" in problem
    assert not (tmp_path / "one.pt2").exists()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--shards", "2"), "shards"),
        (("--mode", "distributed", "--shards", "0"), "shards"),
        (("--keep", "0"), "versions to keep"),
        (("--version=-1",), "version"),
        (("--version", str(10**18)), "version"),
    ],
)
def test_options_that_do_not_go_together(
    run: Path, tmp_path: Path, options: tuple[str, ...], what: str
) -> None:
    with pytest.raises(ConfigError, match=what):
        export(run, tmp_path, *options)


def test_rows_that_servers_have_are_said_to_be_there(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    settings = config.load(copy / "config.yaml", ["distributed.path=ps", SERVERS], environment={})
    (copy / "config.yaml").write_text(config.to_yaml(settings))
    words = "parameter servers.*Let the servers publish.*--role ps.*--role entry"
    with pytest.raises(ConfigError, match=words):
        export(copy, tmp_path / "versions")
    for role in ("all", "ps"):
        with pytest.raises(ConfigError, match=words):
            FolderSource(copy, ServedShare(role=role)).load(8)
    assert FolderSource(copy, ServedShare(role="dense")).load(8).name == "tiny:dense"


def test_a_folder_that_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="bundle"):
        open_bundle(tmp_path)
    (tmp_path / "signature.json").write_text('{"model": 1}')
    with pytest.raises(CheckpointError, match="bundle"):
        open_bundle(tmp_path)


def test_the_example_loads_the_dense_module_with_torch_alone(dense: Path) -> None:
    script = [sys.executable, "-W", "error", str(ROOT / "examples" / "load_dense.py"), str(dense)]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    assert done.stdout == "2 logits of dense.pt2\n"
    assert "import shoal" not in Path(script[3]).read_text()


@pytest.mark.parametrize(("shards", "dtype"), [(0, "float32"), (2, "float32"), (2, "float16")])
def test_a_version_is_served(run: Path, tmp_path: Path, shards: int, dtype: Any) -> None:
    """shards 0: standalone. Predictions have the bits of the run's own, with such rows."""
    options = ("--mode", "distributed", "--shards", str(shards)) if shards else ()
    path = export(run, tmp_path, *options, "--dtype", dtype)
    (tmp_path / "2024").mkdir()  # no version
    if shards:
        for share in (
            ServedShare(role="ps", of=shards + 1),
            ServedShare(role="entry", addresses=(("127.0.0.1:1",),)),
            ServedShare(),
        ):
            with pytest.raises(ConfigError, match="share of exported version"):
                FolderSource(tmp_path, share).load(int(path.name))
    with ExitStack() as stack:
        addresses = []
        for index in range(shards):
            source = FolderSource(tmp_path, ServedShare(role="ps", index=index, of=shards))
            server, _ = stack.enter_context(serving_sources([source]))
            addresses.append((server.grpc_address,))
        share = ServedShare(role="entry", addresses=tuple(addresses)) if shards else ServedShare()
        source = FolderSource(tmp_path, share)
        model = source.load(int(path.name))
        own = FolderSource(run, ServedShare(dtype=dtype)).load(int(path.name))
        generator = np.random.default_rng(0)
        inputs = {f"f{k}": generator.integers(0, 60, 20) for k in range(3)}
        inputs["dense"] = generator.normal(size=(20, 4)).astype(np.float32)
        assert isinstance(model, PredictModel) and isinstance(own, PredictModel)
        found, expected = model.predict(inputs), own.predict(inputs)
    assert len(set(found["prediction"].tolist())) > 10
    assert np.array_equal(found["prediction"], expected["prediction"])
