"""A server alone: updates are applied once, bad requests change nothing, saves bring it back."""

from __future__ import annotations

import gc
import json
import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal import Segment, TableSpec
from shoal.checkpoint import CheckpointStore
from shoal.checkpoint.manifest import to_json
from shoal.comm.frames import memory, tensor
from shoal.errors import ConfigError, InputError, NonFiniteGradient, ShoalError, UnknownName
from shoal.ps.messages import REALS, Head, identity, rows_to_frames
from shoal.ps.saving import ServerSaver
from shoal.ps.server import TableServer
from shoal.rules.initializers import Zeros
from shoal.rules.optimizers import SGD

SPECS = (
    TableSpec(name="t", segments=(Segment(dim=2, initializer=Zeros(), optimizer=SGD(lr=1.0)),)),
)


def server() -> TableServer:
    return TableServer(SPECS, index=0, of=1)


def update(ids: list[int], grad: float, **parts: Any) -> tuple[bytes, list[memoryview]]:
    head = Head(
        method="apply", worker="w", tables=(0,), sizes=(len(ids),), counted=True, sets=1, **parts
    )
    rows = [torch.full((2 * len(ids),), grad), torch.empty(0, dtype=torch.float64)]
    frames = [memory(torch.tensor(ids)), memory(torch.ones(len(ids), dtype=torch.int32))]
    segments = [head.segments(SPECS, real) for real in REALS]
    return head.to_bytes(), frames + rows_to_frames(segments, rows, None)


def row(one: TableServer, id: int) -> list[float] | None:
    entry = one.shard.entry(0, id)
    return None if entry is None else entry.weights.tolist()


def test_an_update_that_comes_twice_is_applied_once() -> None:
    one = server()
    for _ in range(3):
        one(*update([5], 1.0, number=1))
    assert row(one, 5) == [-1, -1]
    one(*update([5], 1.0, number=2))
    assert row(one, 5) == [-2, -2]


def test_updates_without_a_number_are_all_applied() -> None:
    one = server()
    one(*update([5], 1.0))
    one(*update([5], 1.0))
    assert row(one, 5) == [-2, -2]


def test_a_refused_update_is_refused_again_and_is_not_lost() -> None:
    one = server()
    for _ in range(2):
        with pytest.raises(NonFiniteGradient):
            one(*update([5], float("nan"), number=1))
    one(*update([5], 1.0, number=2))
    assert row(one, 5) == [-1, -1]
    assert lost(one) == 0


def lost(one: TableServer) -> int:
    return int(json.loads(one(Head(method="hello", worker="w").to_bytes(), [])[0])["lost"])


def test_numbers_that_never_came_are_counted() -> None:
    one = server()
    one(*update([5], 1.0, number=1))
    one(*update([5], 1.0, number=7))
    assert lost(one) == 5


@pytest.mark.parametrize(
    "spoil",
    [
        lambda head, frames: (b"", frames),
        lambda head, frames: (b"{", frames),
        lambda head, frames: (head.replace(b'"apply"', b'"pickle"'), frames),
        lambda head, frames: (head.replace(b'"sizes":[2]', b'"sizes":[3]'), frames),
        lambda head, frames: (head.replace(b'"sizes":[2]', b'"sizes":[1099511627775]'), frames),
        lambda head, frames: (head.replace(b'"sizes":[2]', b'"sizes":[-1]'), frames),
        lambda head, frames: (head.replace(b'"tables":[0]', b'"tables":[1]'), frames),
        lambda head, frames: (head.replace(b'"tables":[0]', b'"tables":[]'), frames),
        lambda head, frames: (head, frames[:-1]),
        lambda head, frames: (head, [*frames, frames[0]]),
        lambda head, frames: (head, [frames[0][:-1], *frames[1:]]),
        lambda head, frames: (head, [*frames[:2], frames[2][:-4], frames[3]]),
        lambda head, frames: (head, [*frames[:3], frames[0]]),
        lambda head, frames: (head.replace(b"}", b',"wire":"int4"}'), frames),
        lambda head, frames: (head.replace(b"}", b',"more":1}'), frames),
        lambda head, frames: (head.replace(b"}", b',"rates":{"u":[1.0]}}'), frames),
    ],
)
def test_a_bad_request_changes_nothing(
    spoil: Callable[..., tuple[bytes, list[memoryview]]],
) -> None:
    one = server()
    head, frames = update([5, 6], 1.0)
    with pytest.raises((InputError, UnknownName)):
        one(*spoil(head, frames))
    assert one.shard.size(0) == 0
    one(head, frames)
    assert row(one, 5) == [-1, -1]


def test_any_bytes_get_an_answer_or_one_error() -> None:
    one, chance = server(), random.Random(0)
    head, frames = update([5, 6], 1.0)
    answered = 0
    for _ in range(3000):
        spoiled = bytearray(head)
        for _ in range(chance.randrange(4)):
            spoiled[chance.randrange(len(spoiled))] = chance.randrange(256)
        parts = [
            frame[: chance.choice([len(frame), chance.randrange(len(frame) + 1)])]
            for frame in frames
        ]
        chance.shuffle(parts) if chance.random() < 0.3 else None
        try:
            one(bytes(spoiled), parts[: chance.randrange(6)])
            answered += 1
        except ShoalError:
            pass
    assert answered > 0
    assert one(head, frames) == (b"", [])


def test_a_server_that_comes_back_has_its_rows_and_knows_what_was_applied(tmp_path: Path) -> None:
    one = server()
    with ServerSaver(one, tmp_path, every_s=1000) as saver:
        one(*update([5], 1.0, number=1))
        assert saver.save().kind == "full"
        one(*update([6], 1.0, number=2))
        assert saver.save().kind == "delta"
        one(*update([7], 1.0, number=3))
    again = server()
    with ServerSaver(again, tmp_path, every_s=1000) as saver:
        assert [row(again, id) for id in (5, 6, 7)] == [[-1, -1]] * 3
        again(*update([7], 1.0, number=3))
        assert row(again, 7) == [-1, -1]
        again(*update([7], 1.0, number=4))
        assert saver.save().kind == "delta"
    assert lost(again) == 0


def test_what_a_server_lost_when_it_died_is_counted(tmp_path: Path) -> None:
    one = server()
    saver = ServerSaver(one, tmp_path, every_s=1000)
    one(*update([5], 1.0, number=1))
    saver.save()
    for number in (2, 3, 4):
        one(*update([5], 1.0, number=number))
    again = server()
    with ServerSaver(again, tmp_path, every_s=1000):
        assert row(again, 5) == [-1, -1]
        again(*update([5], 1.0, number=5))
        assert row(again, 5) == [-2, -2]
        assert lost(again) == 3


def test_it_saves_by_itself(tmp_path: Path) -> None:
    one = server()
    with ServerSaver(one, tmp_path, every_s=0.05) as saver:
        number = 0
        while saver._saves < 3:
            number += 1
            one(*update([number], 1.0, number=number))
    again = server()
    with ServerSaver(again, tmp_path, every_s=1000):
        assert again.shard.size(0) == number


def test_a_server_that_does_not_start_leaves_the_store_alone(tmp_path: Path) -> None:
    one = server()
    with ServerSaver(one, tmp_path, every_s=1000) as saver:
        one(*update([5], 1.0, number=1))
        saver.save()
        with pytest.raises(KeyError), ServerSaver(server(), tmp_path, every_s=1000):
            raise KeyError("no such address")
        one(*update([6], 1.0, number=2))
        assert saver.save().kind == "delta"


def test_a_save_that_fails_is_followed_by_a_full_one(tmp_path: Path) -> None:
    one = server()
    with ServerSaver(one, tmp_path, every_s=1000) as saver:
        one(*update([5], 1.0, number=1))
        saver.save()
        one.shard.release(None, "checkpoint")
        saver._try()
        assert saver.save().kind == "full"


def test_frames_at_odd_addresses_are_copied() -> None:
    memory_9 = bytearray(9 + 16)
    start = next(
        k for k in range(8) if (np.frombuffer(memory_9, np.uint8).ctypes.data + k) % 8 == 1
    )
    frame = memoryview(memory_9)[start : start + 16]
    assert tensor(frame, torch.int64, 2, "ids").data_ptr() % 8 == 0


def test_a_request_for_another_server_changes_nothing() -> None:
    one = server()
    for other in ((0, 2, 0), (1, 2, 0), (0, 1, 7)):
        with pytest.raises(ConfigError, match="one for another server than 0 of 1"):
            one(*update([5], 1.0, server=identity(SPECS, *other)))
    assert one.shard.size(0) == 0
    one(*update([5], 1.0, server=identity(SPECS, 0, 1, 0)))
    assert row(one, 5) == [-1, -1]


@pytest.mark.parametrize("method", ["find", "lookup"])
def test_a_reply_that_is_too_large_is_refused_before_rows_are_read(method: Any) -> None:
    one = TableServer(SPECS, index=0, of=1, most_bytes=8 * 100)
    for count, allowed in ((100, True), (101, False)):
        head = Head(method=method, worker="w", tables=(0,), sizes=(count,))
        frames = [memory(torch.zeros(count, dtype=torch.int64))]
        if allowed:
            one(head.to_bytes(), frames)
        else:
            with pytest.raises(InputError, match="808 bytes"):
                one(head.to_bytes(), frames)


def test_a_server_that_comes_back_keeps_workers_no_longer_than_before() -> None:
    one, again = (TableServer(SPECS, index=0, of=1, most_workers=1) for _ in range(2))
    one(*update([5], 1.0, number=1, argument=0))
    with one.between_updates() as state:
        saved = json.loads(json.dumps(state))
    again.resume(saved)
    head, frames = update([5], 1.0, number=1, argument=0)
    again(head.replace(b'"w"', b'"new"'), frames)
    assert again.forgotten == 1
    again.resume({**saved, "workers": {"old": [3, 0]}})


def test_what_a_refused_update_brought_is_not_kept() -> None:
    one = server()
    head, frames = update([5], float("nan"), number=1)
    held: Any = np.frombuffer(bytearray(frames[2]), np.uint8).copy()
    brought = weakref.ref(held)
    frames[2] = memoryview(held)
    with pytest.raises(NonFiniteGradient):
        one(head, frames)
    del held, frames
    gc.collect()
    assert brought() is None


def test_a_store_is_as_old_as_the_first_of_its_servers(tmp_path: Path) -> None:
    """2 servers, then 3, then 2 of which one dies before it saves, then 3 again."""
    for of, when in ((2, 1), (3, 2)):
        for index in range(of):
            saved(tmp_path, index, of, when)
    saved(tmp_path, 0, 2, 3)
    for index in range(3):
        again = TableServer(SPECS, index=index, of=3)
        saver = ServerSaver(again, tmp_path, every_s=1000)
        saver._restore()
        assert saver._newest is not None  # its own


def saved(folder: Path, index: int, of: int, when: int) -> None:
    one = TableServer(SPECS, index=index, of=of)
    saver = ServerSaver(one, folder, every_s=1000)
    saver._saves = when
    newest = saver.save()
    store = CheckpointStore(folder / f"server-{index}-of-{of}")
    link = store.latest()
    assert link is not None
    dated = replace(newest, created_s=2_000_000_000 + when)
    store.folder(link.name).replace("manifest.json", to_json(dated))
