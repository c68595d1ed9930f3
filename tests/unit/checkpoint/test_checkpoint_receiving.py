"""Foreign rows on their way into a checkpoint: put in order, checked, and written whole or not."""

from __future__ import annotations

import errno
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shoal.checkpoint import row_files
from shoal.checkpoint.formats import foreign
from shoal.checkpoint.formats.foreign import CollectedRows, Entries, Offered, form_of, receive
from shoal.checkpoint.formats.parquet import open_parquet, write_parquet
from shoal.checkpoint.job_state import Contents
from shoal.checkpoint.loading import load
from shoal.checkpoint.maintenance import verify
from shoal.errors import CheckpointError, DataError, InputError
from shoal.rules.admission import Admission
from shoal.rules.optimizers import SGD, Adagrad
from shoal.table.factory import make_shard
from shoal.table.hosting import HostedTables
from shoal.table.shard import HASHES, LAST_VERSION
from shoal.table.spec import Segment, TableSpec
from shoal.table.values import RowChunk
from support.foreign_rows import NAMES, chunk_of, entries_of, in_order, same


@pytest.mark.parametrize("run_bytes", [1 << 30, 50_000])
def test_rows_are_put_in_order(run_bytes: int):
    spec = TableSpec(name="t", segments=(Segment(dim=4),))
    chunk = chunk_of(5000, 4, 4)
    whole = entries_of(chunk)
    with CollectedRows([form_of("c", spec)], run_bytes=run_bytes) as collected:
        for start in range(0, 5000, 700):
            piece = slice(start, start + 700)
            collected.add(0, Entries(**{f: getattr(whole, f)[piece] for f in NAMES}))
        collected.finish()
        assert collected.most_rows(0) == 5000
        assert collected.latest(0) == int(chunk.versions.max())
        ordered = in_order(chunk)
        assert same(row_files.chunk_of("t", collected.read(0, 0, HASHES)), ordered)
        for bits in (0, 1, 8, 20):
            counts = collected.histogram(0, bits)
            assert counts.shape == (1 << bits,)
            assert int(counts.sum()) == 5000
        counts = collected.histogram(0, 2)
        at = 0
        for quarter, count in enumerate(counts.tolist()):
            part = collected.read(0, quarter << 62, (quarter + 1) << 62)
            assert torch.equal(part[0], ordered.ids[at : at + count])
            at += count


def test_rows_without_state_start_with_the_rules():
    spec = TableSpec(
        name="t",
        segments=(
            Segment(name="a", dim=1, optimizer=SGD()),
            Segment(name="b", dim=2, optimizer=Adagrad(initial_accumulator=0.25)),
        ),
    )
    with CollectedRows([form_of("c", spec)], last_seen_s=99) as collected:
        collected.add(0, Entries(ids=torch.tensor([5, 6]), weights=torch.ones(2, 3)))
        collected.finish()
        chunk = row_files.chunk_of("t", collected.read(0, 0, HASHES))
    assert chunk.state.tolist() == [[0.25, 0.25]] * 2
    assert chunk.versions.tolist() == [1, 1]
    assert chunk.last_seen_s.tolist() == [99, 99]
    assert chunk.counts.tolist() == [1, 1]


@pytest.mark.parametrize("run_bytes", [1 << 30, 1])
def test_ids_that_come_twice_are_named(run_bytes: int):
    form = form_of("c", TableSpec(name="t", segments=(Segment(dim=1),)))
    with CollectedRows([form], run_bytes=run_bytes) as collected:
        collected.add(0, Entries(ids=torch.arange(100), weights=torch.ones(100, 1)))
        collected.add(0, Entries(ids=torch.tensor([200, 42]), weights=torch.ones(2, 1)))
        with pytest.raises(DataError, match="ids 42 more than once"):
            collected.finish()
    with CollectedRows([form], run_bytes=run_bytes) as collected:
        for _ in range(2):
            collected.add(0, Entries(ids=torch.arange(30), weights=torch.ones(30, 1)))
        with pytest.raises(DataError, match="and 25 more more than once"):
            collected.finish()


def test_a_full_disk_is_said(monkeypatch: pytest.MonkeyPatch):
    class Full(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    form = form_of("c", TableSpec(name="t", segments=(Segment(dim=1),)))
    with CollectedRows([form], run_bytes=1) as collected:
        monkeypatch.setattr(foreign, "open", lambda *_: Full(), raising=False)
        with pytest.raises(CheckpointError, match=r"No space left.*TMPDIR"):
            collected.add(0, Entries(ids=torch.arange(100), weights=torch.ones(100, 1)))


def test_columns_that_differ_are_refused():
    form = form_of("c", TableSpec(name="t", segments=(Segment(dim=2),)))
    ids = torch.tensor([1])
    with CollectedRows([form]) as collected:
        with pytest.raises(DataError, match="vectors of 3 columns"):
            collected.add(0, Entries(ids=ids, weights=torch.ones(1, 3)))
        with pytest.raises(DataError, match="state of 1 floats"):
            collected.add(0, Entries(ids=ids, weights=torch.ones(1, 2), state=torch.ones(1, 1)))


def test_weights_that_the_dtype_cannot_hold_are_refused():
    form = form_of("c", TableSpec(name="t", segments=(Segment(dim=2),), dtype="float16"))
    weights = torch.tensor([[1.0, torch.nan], [torch.inf, 2.0], [3.0, -70_000.0]])
    with CollectedRows([form]) as collected:
        collected.add(0, Entries(ids=torch.tensor([1, 2]), weights=weights[:2]))
        with pytest.raises(DataError, match="a weight of 7e\\+04 at id 3"):
            collected.add(0, Entries(ids=torch.tensor([3]), weights=weights[2:]))


# --- the checkpoint


class Given:
    """A source of rows made by hand."""

    def __init__(self, **tables: Entries) -> None:
        self._tables = tables

    @property
    def tables(self) -> tuple[Offered, ...]:
        return tuple(Offered(name=n, dim=t.weights.shape[1]) for n, t in self._tables.items())

    def entries(self, wanted: frozenset[str]) -> Iterator[tuple[str, Entries]]:
        yield from ((name, rows) for name, rows in self._tables.items() if name in wanted)


@pytest.mark.parametrize("counter", [None, "exact", "sketch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_received_checkpoint_loads(tmp_path: Path, counter: str | None, dtype: str):
    admission = None
    if counter is not None:
        admission = Admission(threshold=2, counter=counter, sketch_width=16)
    specs = tuple(
        TableSpec(name=name, segments=(Segment(dim=2),), dtype=dtype, admission=admission)
        for name in ("user", "item")
    )
    chunk = chunk_of(300, 2, 2, getattr(torch, dtype))
    chunk = RowChunk("user", chunk.ids, *(getattr(chunk, name) for name in NAMES[1:]))
    source = Given(
        user=entries_of(chunk), item=Entries(ids=torch.tensor([5]), weights=torch.ones(1, 2))
    )
    forms = {spec.name: form_of("c", spec) for spec in specs}
    manifest, where = receive(str(tmp_path / "new"), source, forms, seed=9, created_s=1)
    assert where.endswith("step-000000000000-full")
    assert verify(where).ok
    shard = make_shard(specs, seed=9)
    contents = Contents(tables={"c": HostedTables(specs, shard)})
    loaded = load(tmp_path / "new", contents)
    assert loaded.manifest.id == manifest.id
    assert loaded.rows == {"c/user": 300, "c/item": 1}
    assert same(shard.export(0), in_order(chunk))
    assert shard.export(1).weights.tolist() == [[1.0, 1.0]]


def test_the_last_version_comes_back_and_none_after_it(tmp_path: Path):
    spec = TableSpec(name="t", segments=(Segment(dim=2, optimizer=SGD()),))
    form = form_of("m", spec)
    chunk = chunk_of(3, 2, 0)
    for name, version in (("last", LAST_VERSION), ("beyond", LAST_VERSION + 1)):
        chunk.versions[:] = torch.tensor([1, 2, version])
        write_parquet(tmp_path / name, form.table, [chunk.columns])
    out = str(tmp_path / "new")
    with pytest.raises(DataError, match=rf"versions 1\.\.{LAST_VERSION + 1}.*of versions out"):
        receive(out, open_parquet(tmp_path / "beyond"), {"t": form}, created_s=1)
    manifest, where = receive(out, open_parquet(tmp_path / "last"), {"t": form}, created_s=1)
    assert manifest.version == LAST_VERSION
    shard = make_shard((spec,), seed=1)
    load(where, Contents(tables={"m": HostedTables((spec,), shard)}))
    assert shard.export(0).versions.sort()[0].tolist() == [1, 2, LAST_VERSION]
    with pytest.raises(
        InputError, match=r"last version is open.*Set the versions of all rows to 1"
    ):
        shard.close_version()


def test_a_receive_that_fails_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    form = form_of("c", TableSpec(name="t", segments=(Segment(dim=1),)))
    source = Given(t=Entries(ids=torch.arange(9), weights=torch.ones(9, 1)))

    def broken(*_: object) -> None:
        raise CheckpointError("no room")

    monkeypatch.setattr("shoal.checkpoint.formats.foreign.commit", broken)
    with pytest.raises(CheckpointError, match="no room"):
        receive(str(tmp_path / "new"), source, {"t": form}, created_s=1)
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "new" / "mine").write_text("")
    with pytest.raises(CheckpointError, match="not empty"):
        receive(str(tmp_path / "new"), source, {"t": form}, created_s=1)


def test_received_into_memory_and_back():
    form = form_of("c", TableSpec(name="t", segments=(Segment(dim=1),)))
    source = Given(t=Entries(ids=torch.arange(9), weights=torch.ones(9, 1)))
    _, where = receive("memory://received/new", source, {"t": form}, created_s=1)
    assert where.startswith("memory://")
    assert verify(where).ok
