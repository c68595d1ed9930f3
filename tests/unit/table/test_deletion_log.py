"""Deletions of a GPU shard: the log on the host, and the buffer that fills it without a wait."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from shoal import Segment, TableSpec, _core, initializers, optimizers
from shoal.table.cuda import deletions
from shoal.table.cuda.deletions import RECORD, Records
from shoal.table.shard import StepContext
from support.change_consumer import Consumer, contents
from support.id_groups import groups_of
from support.placed_shard import PlacedCuda

gpu = [pytest.mark.gpu] if torch.cuda.is_available() else []


def records(first: int, many: int, version: int) -> Records:
    made = np.zeros(many, dtype=RECORD)
    made["id"], made["version"] = np.arange(first, first + many), version
    return made


def append(log: _core.DeletionLog, *parts: Records) -> None:
    joined = np.concatenate(parts)
    log.append(joined.ctypes.data, len(joined))


def ids_of(log: _core.DeletionLog, first: int, n: int = 1000) -> list[int]:
    found = np.empty(n, dtype=RECORD)
    ids: list[int] = found[: log.read(first, n, found.ctypes.data)]["id"].tolist()
    return ids


def test_records_come_back_from_files_and_memory() -> None:
    log = _core.DeletionLog(8, 20)
    append(log, records(0, 3, 1))
    assert log.after(0) == 0
    log.start(0)
    for version in range(1, 12):
        append(log, records(5 * version, 5, version))
    assert ids_of(log, 0) == list(range(5, 60))
    assert ids_of(log, 7, 30) == list(range(12, 42))
    assert ids_of(log, log.after(9)) == list(range(50, 60))
    assert log.after(11) == log.after(99) == 55
    assert log.after(0) == 0


def test_released_records_are_gone() -> None:
    log = _core.DeletionLog(8, 20)
    log.start(0)
    for version in range(1, 12):
        append(log, records(5 * version, 5, version))
    log.release(4)
    log.release(3)
    assert log.floor == 4
    assert log.after(4) == log.after(0) == 20
    assert ids_of(log, 0) == list(range(25, 60))
    log.release(11)
    assert ids_of(log, 0) == []
    append(log, records(0, 2, 12))
    assert ids_of(log, log.after(11)) == [0, 1]


def test_what_the_slowest_consumer_wants_is_kept() -> None:
    log = _core.DeletionLog()
    assert log.hold("early", 3) == 3
    log.start(5)
    assert log.hold("late", 9) == 5
    assert log.hold("early", 8) == 8
    assert log.hold("early", 6) == 8  # none goes back
    assert log.leave("early") == 9
    assert log.leave("unknown") == 9
    assert log.leave("late") is None


def test_a_consumer_that_never_comes_holds_so_many_records() -> None:
    log = _core.DeletionLog(8, 20, 30)
    log.start(0)
    log.hold("dead", 0)
    for version in range(1, 7):
        append(log, records(5 * version, 5, version))
        assert log.excess() is None
    append(log, records(35, 5, 7))
    assert log.excess() == 1
    log.release(1)
    assert (log.floor, log.excess()) == (1, None)
    assert ids_of(log, 0) == list(range(10, 40))
    assert log.hold("alive", 3) == 3  # the dead one is forgotten
    append(log, records(0, 50, 8))
    assert log.excess() == 8
    log.release(8)
    assert ids_of(log, 0) == []


def test_versions_within_one_piece() -> None:
    log = _core.DeletionLog()
    log.start(0)
    append(log, records(0, 2, 1), records(2, 3, 2), records(5, 1, 4))
    append(log, records(6, 1, 4))
    assert [log.after(version) for version in range(5)] == [0, 2, 5, 5, 7]


def test_a_file_that_fails_breaks_the_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    log = _core.DeletionLog(8, 20)
    log.start(0)
    append(log, records(0, 8, 1))
    assert log.kept
    append(log, records(8, 1, 1))
    assert not log.kept
    append(log, records(9, 1, 1))
    log.start(1)
    assert log.kept


def full_table() -> PlacedCuda:
    segment = Segment(dim=1, initializer=initializers.Zeros(), optimizer=optimizers.SGD())
    return PlacedCuda(
        (TableSpec(name="full", segments=(segment,), capacity_rows=8, on_full="lru"),)
    )


def put(shard: PlacedCuda, first: int, many: int) -> None:
    ids = range(first, first + many)
    ctx = StepContext(event_time_s=first)
    shard.assign(groups_of((0, ids)), [torch.full((many, 1), float(first))], ctx=ctx)


@pytest.mark.slow
@pytest.mark.parametrize("room", [pytest.param(room, marks=gpu) for room in (1, 5, 20)])
def test_a_buffer_of_any_size_loses_no_deletion(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletions, "_ROOM", room)
    monkeypatch.setattr(deletions, "_ERASES", 1)
    monkeypatch.setattr(deletions, "_IN_FLIGHT", 1)
    shard, consumer = full_table(), Consumer()
    put(shard, 0, 8)
    consumer.drain(shard)
    for turn in range(12):
        put(shard, 10 + 3 * turn, 3)
        if turn == 7:
            shard.close_version()
    sent = consumer.drain(shard)
    assert consumer.held == contents(shard.export(0))
    assert {id_ for _, id_ in sent} == {*range(8), *range(10, 46)}
    assert consumer.restarts == 1


@pytest.mark.parametrize("kept", [pytest.param(kept, marks=gpu) for kept in (True, False)])
def test_no_room_for_a_buffer_means_a_full_pass(
    kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, consumer = full_table(), Consumer()
    put(shard, 0, 8)
    consumer.drain(shard)

    def refused(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    if not kept:
        monkeypatch.setattr(deletions.DeviceDeletions, "_make_room", refused)
    put(shard, 10, 3)
    consumer.drain(shard)
    assert consumer.held == contents(shard.export(0))
    assert consumer.restarts == (1 if kept else 2)
