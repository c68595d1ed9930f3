"""What of a checkpoint goes into which table, and every difference that is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from shoal.checkpoint.chain import ChainFile, Link, Newer, runs
from shoal.checkpoint.loading_rows import adapt
from shoal.checkpoint.manifest import SCHEMA, Manifest, SavedFile, SavedTable
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.table_match import (
    LoadOptions,
    TableMatch,
    check_capacity,
    match_tables,
    saved_table,
)
from shoal.errors import CheckpointError, TableFull
from shoal.rules.admission import Admission
from shoal.rules.expiry import Expiry
from shoal.rules.initializers import Constant, Normal, Uniform
from shoal.rules.optimizers import SGD, Adagrad, Adam, DelayCompensated
from shoal.table.facade import Table
from shoal.table.spec import Segment, TableSpec
from shoal.table.values import RowChunk

HASHES = 1 << 64
BIAS = Segment(name="bias", dim=1, optimizer=SGD(), initializer=Constant(0.5))
VEC = Segment(name="vec", dim=3, optimizer=Adagrad(), initializer=Uniform())
NEW = Segment(name="new", dim=2, optimizer=Adam(), initializer=Normal(std=0.3))
USERS = TableSpec(name="users", segments=(BIAS, VEC))
ITEMS = TableSpec(name="items", segments=(VEC,))


def saved(*specs: TableSpec) -> tuple[SavedTable, ...]:
    return tuple(saved_table("emb", spec, rows=10, deleted=0) for spec in specs)


def matched(
    there: tuple[SavedTable, ...], here: tuple[TableSpec, ...], **options: Any
) -> tuple[TableMatch, ...]:
    return match_tables(there, {"emb": here}, LoadOptions(**options))


def refused(there: tuple[SavedTable, ...], here: tuple[TableSpec, ...], **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        matched(there, here, **options)
    return str(caught.value)


def chunk(width: int, state: int, rows: int = 4, dtype: torch.dtype = torch.float32) -> RowChunk:
    return RowChunk(
        table="emb/users",
        ids=torch.arange(100, 100 + rows),
        weights=torch.arange(rows * width).reshape(rows, width).to(dtype),
        state=torch.arange(rows * state).reshape(rows, state).float() + 0.25,
        versions=torch.full((rows,), 3),
        last_seen_s=torch.arange(rows) * 10,
        counts=torch.arange(rows) + 1,
    )


def test_equal_tables_match_and_rows_stay_as_they_are() -> None:
    one, two = matched(saved(USERS, ITEMS), (USERS, ITEMS))
    assert (one.key, two.key) == ("emb/users", "emb/items")
    assert one.same_columns and one.same_hash and not one.admission
    rows = chunk(4, 3)
    found = adapt(one, rows, seed=1, now_s=None)
    assert torch.equal(found.chunk.weights, rows.weights)
    assert torch.equal(found.chunk.state, rows.state)
    assert found.chunk.table == "users"


def test_every_difference_is_named_at_once() -> None:
    other = TableSpec(
        name="users",
        segments=(
            dataclasses.replace(BIAS, dim=2),
            dataclasses.replace(VEC, optimizer=Adam()),
            NEW,
        ),
        admission=Admission(threshold=3),
    )
    gone = dataclasses.replace(
        USERS, segments=(*USERS.segments, dataclasses.replace(NEW, name="old"))
    )
    text = refused(saved(gone, ITEMS), (other, dataclasses.replace(ITEMS, name="things")))
    for part in (
        "'emb/users.bias' has dim 1 in it, 2 in the model",
        "'emb/users.vec.state' is of adagrad with 3 floats a row in it, of adam with",
        "segment 'emb/users.new' is not in it",
        "segment 'emb/users.old' of it is unknown",
        "'emb/users.admission' is None in it, exact in the model",
        "table 'emb/things' is not in it",
        "table 'emb/items' of it is unknown",
    ):
        assert part in text, part
    # A dim that differs says so once, not as another state, too.
    assert "bias.state" not in text


def test_waivers_are_by_name() -> None:
    there, here = saved(USERS, ITEMS), (USERS, dataclasses.replace(ITEMS, name="things"))
    only = refused(there, here, allow_missing=frozenset({"emb/things"}))
    assert "emb/items" in only and "things" not in only
    (one,) = matched(
        there,
        here,
        allow_missing=frozenset({"emb/things"}),
        allow_unknown=frozenset({"emb/items"}),
    )
    assert one.key == "emb/users"


def test_dim_cannot_be_waived() -> None:
    wider = TableSpec(name="users", segments=(BIAS, dataclasses.replace(VEC, dim=4)))
    every = frozenset({"emb/users", "emb/users.vec", "emb/users.vec.state"})
    text = refused(saved(USERS), (wider,), allow_missing=every, allow_unknown=every)
    assert "dim 3 in it, 4 in the model" in text


def test_renames_and_subset() -> None:
    things = dataclasses.replace(ITEMS, name="things")
    one, two = matched(saved(USERS, ITEMS), (things, USERS), renames={"emb/things": "emb/items"})
    assert (one.key, one.saved.key) == ("emb/things", "emb/items")
    assert not one.same_hash and two.same_hash
    kept = dataclasses.replace(things, hashed_as="items")
    (found, _) = matched(saved(USERS, ITEMS), (kept, USERS), renames={"emb/things": "emb/items"})
    assert found.same_hash
    (alone,) = matched(saved(USERS, ITEMS), (USERS, ITEMS), tables=("emb/items",))
    assert alone.key == "emb/items"


def test_names_that_stand_for_nothing_are_refused() -> None:
    text = refused(
        saved(USERS),
        (USERS,),
        tables=("emb/users", "emb/typo"),
        renames={"emb/what": "emb/users", "emb/users": "emb/nothing"},
    )
    for part in ("'emb/typo' to load", "renamed table 'emb/what'", "'emb/nothing', renamed"):
        assert part in text


def test_missing_segments_start_as_a_new_row_would() -> None:
    grown = TableSpec(name="users", segments=(NEW, VEC, BIAS), dtype="bfloat16")
    (one,) = matched(saved(USERS), (grown,), allow_missing=frozenset({"emb/users.new"}))
    assert not one.same_columns
    rows = chunk(4, 3)
    found = adapt(one, rows, seed=11, now_s=None).chunk
    table = Table(grown, seed=11)
    table.find_or_init(rows.ids).end()
    fresh = table.export()
    order = torch.argsort(fresh.ids)
    assert torch.equal(found.weights[:, :2], fresh.weights[order][:, :2])
    assert torch.equal(found.weights[:, 2:5], rows.weights[:, 1:4].bfloat16())
    assert torch.equal(found.weights[:, 5:], rows.weights[:, :1].bfloat16())
    width = NEW.state_width
    assert torch.equal(found.state[:, :width], fresh.state[order][:, :width])
    assert torch.equal(found.state[:, width:], rows.state)


def test_waived_state_starts_anew() -> None:
    other = TableSpec(name="users", segments=(BIAS, dataclasses.replace(VEC, optimizer=Adam())))
    (one,) = matched(saved(USERS), (other,), allow_unknown=frozenset({"emb/users.vec.state"}))
    found = adapt(one, chunk(4, 3), seed=0, now_s=None).chunk
    assert torch.equal(found.weights, chunk(4, 3).weights)
    assert torch.equal(found.state, Adam().init_state(3).expand(4, -1))


def test_the_rule_inside_a_wrapper_counts() -> None:
    def wrapped(inner: Any) -> TableSpec:
        rule = DelayCompensated(inner=inner)
        return TableSpec(name="users", segments=(dataclasses.replace(VEC, optimizer=rule),))

    assert saved(wrapped(Adagrad()))[0].segments[0].optimizer == "delay_compensated(adagrad)"
    assert "emb/users.vec.state" in refused(saved(wrapped(Adagrad())), (wrapped(SGD()),))


@pytest.mark.parametrize(("dtype", "unfit"), [("float16", 2), ("bfloat16", 0), ("float64", 0)])
def test_casts_round_to_nearest_and_count_what_does_not_fit(dtype: Any, unfit: int) -> None:
    (one,) = matched(saved(ITEMS), (dataclasses.replace(ITEMS, dtype=dtype),))
    rows = chunk(3, 3)
    rows.weights[0] = torch.tensor([70000.0, -1e6, float("inf")])
    rows.weights[1] = torch.tensor([1.00048828125, 1.00390625, 1.01171875])
    found = adapt(one, rows, seed=0, now_s=None)
    assert found.unfit == unfit
    assert torch.equal(found.chunk.weights, rows.weights.to(found.chunk.weights.dtype))
    if dtype == "bfloat16":  # ties to even
        assert found.chunk.weights[1].tolist() == [1.0, 1.0, 1.015625]
    assert found.chunk.state.dtype is (torch.float64 if dtype == "float64" else torch.float32)


def test_rows_expire_by_the_table_s_rule() -> None:
    spec = dataclasses.replace(ITEMS, expiry=Expiry(ttl_s=15))
    (one,) = matched(saved(ITEMS), (spec,))
    found = adapt(one, chunk(3, 3), seed=0, now_s=30)
    assert found.chunk.ids.tolist() == [102, 103]
    assert found.expired_U.tolist() == [100, 101]
    assert found.chunk.counts.tolist() == [3, 4]
    assert adapt(one, chunk(3, 3), seed=0, now_s=None).expired_U.numel() == 0


def test_admission_counters_of_one_kind_and_size_are_loaded() -> None:
    def counted(name: str = "users", **fields: Any) -> TableSpec:
        return dataclasses.replace(USERS, name=name, admission=Admission(threshold=2, **fields))

    (exact,) = matched(saved(counted()), (counted(),))
    assert exact.admission
    sketch = counted(counter="sketch", sketch_width=64, sketch_depth=2)
    other = counted(counter="sketch", sketch_width=128, sketch_depth=2)
    assert "sketch 64x2 by bucket in it, sketch 128x2" in refused(saved(sketch), (other,))
    waived = frozenset({"emb/users.admission"})
    assert not matched(saved(sketch), (other,), allow_missing=waived)[0].admission
    # Cells of a sketch are found by the name that salts its hashes.
    moved = counted("people", counter="sketch", sketch_width=64, sketch_depth=2)
    assert "keyed by 'users'" in refused(
        saved(sketch), (moved,), renames={"emb/people": "emb/users"}
    )


def test_room_is_checked_before_loading() -> None:
    small = dataclasses.replace(ITEMS, capacity_rows=9, expiry=Expiry(ttl_s=5))
    (one,) = matched(saved(ITEMS), (small,))
    with pytest.raises(TableFull, match="capacity_rows=9"):
        check_capacity(one, 10, None)
    check_capacity(one, 9, None)
    check_capacity(one, 10, 100)  # some may expire
    (evicting,) = matched(saved(ITEMS), (dataclasses.replace(small, on_full="lru"),))
    check_capacity(evicting, 10, None)


def file(path: str, tables: str, start: int = 0, stop: int = HASHES, kind: Any = "rows") -> Any:
    return SavedFile(
        path=path, kind=kind, tables=tuple(tables), start=start, stop=stop, rows=1, bytes=1, crc32=0
    )


def manifest(*files: SavedFile) -> Manifest:
    empty: dict[str, Any] = {"last_steps": {}, "packages": {}}
    return Manifest(
        schema=SCHEMA,
        id="",
        kind="full",
        step=0,
        position=0,
        version=0,
        parent=None,
        seed=0,
        world_size=1,
        created_s=0,
        tables=(),
        modules=(),
        optimizers=(),
        files=files,
        **empty,
    )


def test_files_are_read_newest_first_in_runs_that_share_no_row() -> None:
    half, quarter = HASHES // 2, HASHES // 4
    full = manifest(
        file("f1", "a", 0, quarter),
        file("f2", "a", quarter, half),
        file("f3", "a", half, HASHES),
        file("f4", "bc"),
        file("f5", "d", 0, half),
        file("f6", "d", half, HASHES),
    )
    delta = manifest(
        file("d1", "a", 0, half),
        file("d2", "b"),
        file("d3", "c", kind="deleted"),
        file("d4", "d", 0, half),
        file("no", "a", kind="admission"),
    )
    links = [Link(Storage("nowhere"), one) for one in (full, delta)]
    files = [ChainFile(k, link, one) for k, link in enumerate(links) for one in link.manifest.files]
    found = runs(one for one in files if one.saved.path not in ("f6", "no"))
    assert {tuple(one.saved.path for one in run) for run in found} == {
        ("d1", "f1", "f2"),
        ("f3",),
        ("d2", "d3", "f4"),
        ("d4", "f5"),
    }


def test_ids_of_newer_links_hide_older_ones() -> None:
    newer = Newer()
    first = torch.tensor([5, -3, 1 << 62])
    assert newer.unseen(2, first, remember=True) is None
    assert newer.unseen(2, torch.tensor([5]), remember=False) is None  # of the same link
    fresh = newer.unseen(1, torch.tensor([5, 6]), remember=True)
    assert fresh is not None and fresh.tolist() == [False, True]
    oldest = newer.unseen(0, torch.tensor([-3, 6, 7, 1 << 62]), remember=False)
    assert oldest is not None and oldest.tolist() == [False, False, True, False]
