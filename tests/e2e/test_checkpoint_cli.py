"""`shoal ckpt` from end to end: what it prints, what it writes, and how it ends."""

from __future__ import annotations

import json
import os
import stat
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet as pq
from torch import Tensor, nn
from typer.testing import CliRunner

from shoal import checkpoint
from shoal.checkpoint import CheckpointStore, Contents
from shoal.checkpoint.formats import parquet
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.row_files import RowLayout
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.store import locate
from shoal.cli import app, ckpt_rows
from shoal.table.facade import Table
from shoal.table.hosting import HostedTables
from shoal.table.spec import Segment, TableSpec
from support.foreign_rows import frame
from support.saved_rows import HandTable, by_hash, rows_of, save_by_hand

LAYOUT = RowLayout.rows(dim=3, state_width=3, dtype="float32")
SMALL = RowLayout.rows(dim=2, state_width=0, dtype="bfloat16")


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")


def invoke(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["ckpt", *map(str, arguments)], prog_name="shoal")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def refused(*arguments: object) -> str:
    code, out, err = invoke(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    return err


def table(
    name: str, ids: Tensor, layout: RowLayout = LAYOUT, *, salt: int = 0, **others: Tensor
) -> HandTable:
    rows = rows_of(name, ids, layout, salt=salt, key=f"m/{name}")
    return HandTable(name, layout, rows, **{k: by_hash(name, ids) for k, ids in others.items()})


def full(root: Path, *, step: int = 10, salt: int = 0, users: int = 500) -> Manifest:
    tables = [
        table("user", torch.arange(users) - 20, salt=salt, admission=torch.arange(1000, 1005)),
        table("item", torch.arange(40), SMALL),
    ]
    return save_by_hand(Storage(root), tables, step=step)


def chain(root: Path) -> tuple[Manifest, Manifest]:
    """A full one of 500 users, then a delta: 100 changed, 50 new, 30 deleted."""
    first = full(root)
    changed = torch.cat([torch.arange(100), torch.arange(2000, 2050)])
    tables = [
        table("user", changed, salt=3, deleted=torch.arange(200, 230)),
        table("item", torch.arange(0), SMALL),
    ]
    return first, save_by_hand(Storage(root), tables, step=20, parent=first)


# --- inspect


def test_inspect_tells_what_is_there(tmp_path: Path):
    full(tmp_path)
    code, out, err = invoke("inspect", tmp_path)
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    for part in ("kind full", "step 10", "samples 100", "m/user 500 3 float32 all adagrad"):
        assert part in text
    assert "admission of m/user: exact, 5 ids without a row" in text


def test_inspect_as_json(tmp_path: Path):
    manifest = full(tmp_path)
    code, out, _ = invoke("inspect", tmp_path / "step-000000000010-full", "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["id"], found["step"], found["world_size"]) == (manifest.id, 10, 1)
    user, item = found["tables"]
    rows = rows_of("user", torch.arange(500) - 20, LAYOUT)
    assert (user["rows"], user["bytes"]) == (500, 500 * LAYOUT.row_bytes)
    ages = (rows.last_seen_s.max() - rows.last_seen_s).sort().values
    assert user["ages_s"]["min"] == 0
    assert user["ages_s"]["max"] == int(ages[-1])
    assert user["ages_s"]["median"] in (int(ages[249]), int(ages[250]))
    norms = rows.weights.double().norm(dim=1)
    assert user["weight_norms"]["mean"] == pytest.approx(float(norms.mean()))
    assert user["weight_norms"]["max"] == pytest.approx(float(norms.max()))
    assert user["pending_ids"] == 5
    assert (item["rows"], item["state_norms"], item["dtype"]) == (40, None, "bfloat16")
    assert {one["kind"]: one["files"] for one in found["files"]}["rows"] == 2


def test_inspect_of_a_delta_shows_its_chain(tmp_path: Path):
    chain(tmp_path)
    _, out, _ = invoke("inspect", tmp_path, "--table", "user", "--json")
    found = json.loads(out)
    assert [link["kind"] for link in found["chain"]] == ["full", "delta"]
    (user,) = found["tables"]
    assert (user["rows"], user["rows_in_delta"], user["deleted_in_delta"]) == (520, 150, 30)
    _, out, _ = invoke("inspect", tmp_path)
    assert "m/user in the delta alone: 150 rows, 30 deletions" in " ".join(out.split())


def test_tables_are_named_with_or_without_collection(tmp_path: Path):
    full(tmp_path)
    for name in ("user", "m/user"):
        assert invoke("inspect", tmp_path, "--table", name)[0] == 0
    assert "Did you mean user?" in refused("inspect", tmp_path, "--table", "usr")


def test_what_is_no_checkpoint_is_refused(tmp_path: Path):
    for command in ("inspect", "verify", "compact"):
        assert str(tmp_path / "none") in refused(command, tmp_path / "none")
    (tmp_path / "step-000000000010-full").mkdir()
    assert "interrupted save" in refused("inspect", tmp_path)


@pytest.mark.parametrize(("model", "other"), [(12, 10), (10, 12)])
def test_a_run_folder_means_its_newest_checkpoint(tmp_path: Path, model: int, other: int):
    (tmp_path / "config.yaml").write_text("name: x\n")
    full(tmp_path / "checkpoints", step=other)
    full(tmp_path / "model", step=model)
    _, out, _ = invoke("inspect", tmp_path, "--json")
    assert json.loads(out)["step"] == 12


def test_of_one_step_a_run_folder_means_its_trained_model(tmp_path: Path):
    for name in ("checkpoints", "model"):
        full(tmp_path / name, step=10)
    assert locate(tmp_path)[0].url == CheckpointStore(tmp_path / "model").url


# --- verify


def test_verify_names_the_file_that_is_wrong(tmp_path: Path):
    chain(tmp_path)
    code, out, _ = invoke("verify", tmp_path)
    assert code == 0
    assert "looked at: step-000000000010-full" in out
    assert "all well" in out
    for file in sorted(tmp_path.rglob("*.arrow")):
        whole = file.read_bytes()
        file.write_bytes(whole[:300] + bytes([whole[300] ^ 4]) + whole[301:])
        code, out, _ = invoke("verify", tmp_path)
        assert code == 1
        assert f"wrong: {file.relative_to(tmp_path)}" in out
        alone = 1 if "delta" in str(file) else 0
        assert invoke("verify", tmp_path, "--alone")[0] == alone
        file.write_bytes(whole)
    (tmp_path / "step-000000000010-full" / "notes").write_text("mine")
    assert "no part of it: step-000000000010-full/notes" in invoke("verify", tmp_path)[1]


# --- diff


def test_diff_ends_as_diff_does(tmp_path: Path):
    for name in "ab":
        full(tmp_path / name)
    code, out, _ = invoke("diff", tmp_path / "a", tmp_path / "b")
    assert code == 0
    assert out.endswith("the same\n")
    full(tmp_path / "c", salt=2, users=490)
    code, out, _ = invoke("diff", tmp_path / "a", tmp_path / "c")
    assert code == 1
    assert out.endswith("different\n")
    assert "m/user 10 0 0 490" in " ".join(out.split())
    assert "m/item 0 0 40 0" in " ".join(out.split())
    assert invoke("diff", tmp_path / "a", tmp_path / "c", "--table", "item")[0] == 0
    assert invoke("diff", tmp_path / "a", tmp_path / "c", "--table", "user")[0] == 1
    assert "'usr'" in refused("diff", tmp_path / "a", tmp_path / "c", "--table", "usr")


def test_diff_of_a_chain_and_its_compaction(tmp_path: Path):
    chain(tmp_path)
    delta = tmp_path / "step-000000000020-delta"
    assert invoke("diff", tmp_path / "step-000000000010-full", delta)[0] == 1
    code, out, _ = invoke("compact", delta)
    assert code == 0
    assert f"full: {tmp_path}/step-000000000020-full" in out
    assert "chain: 2 checkpoints" in out
    assert invoke("diff", delta, tmp_path / "step-000000000020-full")[0] == 0
    assert invoke("verify", tmp_path / "step-000000000020-full")[0] == 0
    assert "load the full one" in refused("compact", delta)
    assert "full one" in refused("compact", tmp_path / "step-000000000010-full")


def saved_job(root: Path, *, moved: float = 0.0) -> Manifest:
    """A job with a dense module and its optimizer, after one step."""
    spec = TableSpec(name="user", segments=(Segment(dim=2),))
    table, module = Table(spec, seed=1), nn.Linear(3, 2)
    table.apply([1, 2, 3], torch.ones(3, 2))
    optimizer = torch.optim.Adam(module.parameters())
    with torch.no_grad():
        module.weight.fill_(0.5)
        module.bias.fill_(0.25)
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        module.weight[0, 0] += moved
    contents = Contents(
        tables={"c": HostedTables((spec,), table.shard)},
        modules={"net": module},
        optimizers={"net": optimizer},
        state={"seen": 3},
    )
    return checkpoint.save(root, contents, step=1, position=3)


def test_dense_parts_are_told_and_compared(tmp_path: Path):
    for name, moved in (("a", 0.0), ("b", 0.0), ("c", 0.125)):
        saved_job(tmp_path / name, moved=moved)
    found = json.loads(invoke("inspect", tmp_path / "a", "--json")[1])
    (net,) = found["modules"]
    assert (net["module"], net["numbers"]) == ("net", 3 * 2 + 2)
    assert net["optimizer_numbers"] >= 2 * (3 * 2 + 2)
    files = {one["kind"]: one["files"] for one in found["files"]}
    assert files["rows"] == files["state"] == 1
    assert "net 8" in " ".join(invoke("inspect", tmp_path / "a")[1].split())
    assert invoke("verify", tmp_path / "a")[0] == 0
    assert invoke("diff", tmp_path / "a", tmp_path / "b")[0] == 0
    code, out, _ = invoke("diff", tmp_path / "a", tmp_path / "c")
    assert code == 1
    assert "dense module/net/weight: 1 of 6 numbers, max diff 0.125" in out
    assert "bias" not in out


# --- export and import


def test_a_damaged_index_of_dense_parts_is_told(tmp_path: Path):
    saved_job(tmp_path)
    (index,) = tmp_path.glob("*/dense/.metadata")
    data = bytearray(index.read_bytes())
    data[20] ^= 0xFF
    index.write_bytes(data)
    for command in (("inspect", tmp_path), ("diff", tmp_path, tmp_path)):
        assert "file dense/.metadata of checkpoint" in refused(*command)


def rows_of_files(root: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(root)): file.read_bytes()
        for file in sorted(root.rglob("*.arrow"))
        if file.parent.name == "rows"
    }


def test_what_is_exported_comes_back_the_same(tmp_path: Path):
    chain(tmp_path / "a")
    assert invoke("compact", tmp_path / "a")[0] == 0
    code, out, _ = invoke("export", tmp_path / "a", "--out", tmp_path / "out")
    assert code == 0
    assert "table m/user: 520 rows" in out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["m.item", "m.user"]
    code, out, _ = invoke("import", tmp_path / "out", "--out", tmp_path / "b")
    assert code == 0
    assert "table m/user: 520 rows of 3 columns, float32" in out
    one, other = tmp_path / "a/step-000000000020-full", tmp_path / "b/step-000000000000-full"
    assert rows_of_files(one) == rows_of_files(other)
    assert checkpoint.read_manifest(other).seed == 3
    assert invoke("verify", tmp_path / "b")[0] == 0
    assert checkpoint.diff(one, other).same


def test_some_tables_and_weights_only(tmp_path: Path):
    full(tmp_path / "a")
    arguments = ["--out", tmp_path / "out", "--table", "user", "--weights-only"]
    assert invoke("export", tmp_path / "a", *arguments)[0] == 0
    read = pq.read_table(tmp_path / "out" / "m.user")
    assert read.column_names == ["id", "weights"]
    assert sorted(read["id"].to_pylist()) == list(range(-20, 480))
    assert "--optimizer" in refused("import", tmp_path / "out", "--out", tmp_path / "b")
    options = ["--optimizer", "{kind: adagrad, initial_accumulator: 0.5}", "--last-seen-s", 77]
    assert invoke("import", tmp_path / "out", "--out", tmp_path / "b", *options)[0] == 0
    store = CheckpointStore(tmp_path / "b")
    assert invoke("export", tmp_path / "b", "--out", tmp_path / "again")[0] == 0
    again = pq.read_table(tmp_path / "again" / "m.user")
    assert again["weights"].to_pylist() == read["weights"].to_pylist()
    assert set(map(tuple, again["state"].to_pylist())) == {(0.5, 0.5, 0.5)}
    assert set(again["last_seen_s"].to_pylist()) == {77}
    assert store.latest() is not None


def test_a_config_says_what_rows_become(tmp_path: Path):
    vectors = pa.array([[0.0] * 17, [1.0] * 17], pa.list_(pa.float32()))
    pq.write_table(pa.table({"id": [1, 2], "weights": vectors}), tmp_path / "carrier.parquet")
    source, config = (
        tmp_path / "carrier.parquet",
        Path(__file__).parents[2] / "examples/flights.yaml",
    )
    arguments = ["import", source, "--config", config, "--out", tmp_path / "a"]
    assert invoke(*arguments, "--table", "carrier")[0] == 0
    (saved,) = checkpoint.read_manifest(tmp_path / "a/step-000000000000-full").tables
    assert saved.key == "deepfm/carrier"
    assert [(one.name, one.dim, one.optimizer) for one in saved.segments] == [
        ("bias", 1, "adagrad"),
        ("vec", 16, "adagrad"),
    ]
    arguments[-1] = tmp_path / "b"
    assert "carrier" in refused(*arguments, "--table", "carier")
    assert not (tmp_path / "b").exists()


def entry(number: int, weights: list[float]) -> bytes:
    floats = b"".join(b"\x15" + np.float32(weight).tobytes() for weight in weights)
    return b"\x09" + number.to_bytes(8, "little", signed=True) + floats


def text_of(folder: Path) -> list[object]:
    (folder / "rows.csv").write_text("1,0.5,1.5\n-2,2.5,nan\n")
    return [folder / "rows.csv", "--format", "text"]


def npz_of(folder: Path) -> list[object]:
    vectors = np.array([[0.5, 1.5], [2.5, np.nan]], dtype=np.float32)
    np.savez(folder / "rows.npz", ids=np.array([1, -2]), vectors=vectors)
    return [folder / "rows.npz", "--format", "npz"]


def monolith_of(folder: Path) -> list[object]:
    records = frame(entry(1, [0.5, 1.5])) + frame(entry(-2, [2.5, float("nan")]))
    (folder / "t-00000-of-00001").write_bytes(zlib.compress(records))
    return [folder / "t", "--format", "monolith"]


def parquet_of(folder: Path) -> list[object]:
    vectors = [[0.5, 1.5], [2.5, float("nan")]]
    pq.write_table(pa.table({"fid": [1, -2], "v": vectors}), folder / "rows.parquet")
    return [folder / "rows.parquet", "--vector-column", "v"]


@pytest.mark.parametrize("source", [text_of, npz_of, monolith_of, parquet_of])
def test_dumps_of_ids_and_vectors(tmp_path: Path, source):
    options = ["--table", "t", "--optimizer", "sgd", "--dtype", "float16", "--collection", "c"]
    code, out, _ = invoke("import", *source(tmp_path), *options, "--out", tmp_path / "a")
    assert code == 0
    assert "table c/t: 2 rows of 2 columns, float16" in out
    assert invoke("export", tmp_path / "a", "--out", tmp_path / "out")[0] == 0
    read = pq.read_table(tmp_path / "out" / "c.t").to_pydict()
    rows = dict(zip(read["id"], np.nan_to_num(read["weights"], nan=9.0).tolist(), strict=True))
    assert rows == {1: [0.5, 1.5], -2: [2.5, 9.0]}


def test_embeddings_of_torch(tmp_path: Path):
    model = nn.ModuleDict({"user": nn.Embedding(5, 3), "item": nn.Embedding(4, 2)})
    torch.save(model.state_dict(), tmp_path / "m.pt")
    options = ["--format", "embedding", "--optimizer", "adam", "--table", "user", "--table", "item"]
    assert invoke("import", tmp_path / "m.pt", *options, "--out", tmp_path / "a")[0] == 0
    assert invoke("export", tmp_path / "a", "--out", tmp_path / "out", "--table", "user")[0] == 0
    read = pq.read_table(tmp_path / "out" / "embeddings.user").to_pydict()
    order = np.argsort(read["id"])
    weights = np.array(read["weights"], dtype=np.float32)[order]
    assert np.array_equal(weights, model["user"].weight.detach().numpy())
    keys = ["--key", "user.weight"]
    assert "a --key for each" in refused(
        "import", tmp_path / "m.pt", *options, *keys, "--out", tmp_path / "b"
    )


def test_nothing_is_written_of_rows_that_are_refused(tmp_path: Path):
    (tmp_path / "rows.csv").write_text("1,0.5\n2,1.5\n1,2.5\n")
    options = ["--format", "text", "--table", "t", "--optimizer", "sgd"]
    arguments = ["import", tmp_path / "rows.csv", *options, "--out", tmp_path / "a"]
    assert "ids 1 more than once" in refused(*arguments)
    assert list((tmp_path / "a").iterdir()) == []
    (tmp_path / "rows.csv").write_text("1,0.5\n2,1.5\n")
    assert invoke(*arguments)[0] == 0
    assert "not empty" in refused(*arguments)
    assert "unknown optimizer kind" in refused(*arguments[:-3], "sdg", "--out", tmp_path / "b")


def test_export_leaves_other_folders_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    full(tmp_path / "a")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    assert "not empty" in refused("export", tmp_path / "a", "--out", tmp_path / "out")
    assert "a file" in refused("export", tmp_path / "a", "--out", tmp_path / "out" / "mine")
    assert "'usr'" in refused("export", tmp_path / "a", "--out", tmp_path / "new", "--table", "usr")

    def full_disk(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(ckpt_rows._EXPORTS, "parquet", full_disk)
    assert "No space left" in refused("export", tmp_path / "a", "--out", tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "out"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path):
    full(tmp_path / "a")
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked").chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert "locked" in refused("export", tmp_path / "a", "--out", tmp_path / "locked" / "out")


def test_a_long_table_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Row groups and batches end in the middle of the table, and runs go to files."""
    monkeypatch.setattr(parquet, "rows_at_once", lambda _: 64)
    monkeypatch.setattr("shoal.checkpoint.formats.foreign._RUN_BYTES", 4000)
    full(tmp_path / "a", users=3000)
    assert invoke("export", tmp_path / "a", "--out", tmp_path / "out")[0] == 0
    file = pq.ParquetFile(tmp_path / "out/m.user/rows-00000.parquet")
    assert file.metadata.num_row_groups == -(-3000 // 64)
    assert invoke("import", tmp_path / "out", "--out", tmp_path / "b")[0] == 0
    one, other = tmp_path / "a/step-000000000010-full", tmp_path / "b/step-000000000000-full"
    assert rows_of_files(one) == rows_of_files(other)
