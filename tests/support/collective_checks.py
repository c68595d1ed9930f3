"""What every kind of collectives must do, called on each of its ranks; asserts on that rank.

Each check knows what all ranks send, so it computes what this one must receive.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.comm import Collectives, Part
from shoal.errors import DTypeError, InputError, ShapeError

__all__ = ["check_collectives"]

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64),
)


def check_collectives(collectives: Collectives) -> None:
    """All of them, in an order that is the same on every rank."""
    check_uneven(collectives)
    check_dtypes(collectives)
    check_empty(collectives)
    check_several_under_way(collectives)
    check_sizes(collectives)
    check_reductions(collectives)
    check_broadcasts(collectives)
    check_objects(collectives)
    check_mistakes(collectives)
    collectives.barrier(what="the end")


def rows(source: int, target: int) -> int:
    """How many rows rank `source` sends to rank `target`: uneven, some 0."""
    return (3 * source + 5 * target) % 4


def part_of(
    collectives: Collectives, dtype: torch.dtype, shape: tuple[int, ...], salt: int = 0
) -> tuple[Part, torch.Tensor]:
    """A part whose values encode source, target and position, and the part that must arrive."""
    ranks, me = range(collectives.world_size), collectives.rank

    def block(source: int, target: int) -> torch.Tensor:
        count = rows(source, target)
        values = torch.arange(count * max(1, torch.Size(shape).numel())) % 7
        start = (salt + 31 * source + 17 * target) % 50
        return (values + start)[: count * torch.Size(shape).numel()].reshape(count, *shape)

    send = tuple(rows(me, other) for other in ranks)
    receive = tuple(rows(other, me) for other in ranks)
    sent = torch.cat([block(me, other) for other in ranks]).to(dtype)
    wanted = torch.cat([block(other, me) for other in ranks]).to(dtype)
    device = collectives.device
    return Part(sent.to(device), send, receive), wanted.to(device)


def check_uneven(collectives: Collectives) -> None:
    pairs = [
        part_of(collectives, torch.int64, ()),
        part_of(collectives, torch.int32, (), 1),
        part_of(collectives, torch.float32, (5,), 2),
        part_of(collectives, torch.float64, (2, 3), 3),
        part_of(collectives, torch.float32, (0,), 4),
    ]
    pending = collectives.all_to_all([part for part, _ in pairs], what="uneven")
    first, again = pending.wait(), pending.wait()
    for got, twice, (_, wanted) in zip(first, again, pairs, strict=True):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)
        assert torch.equal(twice, wanted)
    part, wanted = part_of(collectives, torch.float32, (4,), 5)
    wide = torch.empty(part.data.shape[0], 8, device=collectives.device)
    wide[:, ::2] = part.data
    strided = Part(wide[:, ::2].requires_grad_(), part.send, part.receive)
    (got,) = collectives.all_to_all([strided], what="rows with gaps").wait()
    assert torch.equal(got, wanted)


def check_dtypes(collectives: Collectives) -> None:
    pairs = [part_of(collectives, dtype, (3,)) for dtype in DTYPES]
    received = collectives.all_to_all([part for part, _ in pairs], what="dtypes").wait()
    for got, (_, wanted) in zip(received, pairs, strict=True):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)


def check_empty(collectives: Collectives) -> None:
    world_size, me, device = collectives.world_size, collectives.rank, collectives.device
    none = (0,) * world_size
    part = Part(torch.empty(0, 3, device=device), none, none)
    assert collectives.all_to_all([part], what="no rows").wait()[0].shape == (0, 3)
    assert collectives.all_to_all([], what="no parts").wait() == ()
    # Only rank 0 sends, and only to the last.
    last = world_size - 1
    send = tuple(4 if (me, other) == (0, last) else 0 for other in range(world_size))
    receive = tuple(4 if (other, me) == (0, last) else 0 for other in range(world_size))
    part = Part(torch.full((sum(send), 2), 7.0, device=device), send, receive)
    (got,) = collectives.all_to_all([part], what="one sender").wait()
    assert torch.equal(got.cpu(), torch.full((sum(receive), 2), 7.0))


def check_several_under_way(collectives: Collectives) -> None:
    pairs = [part_of(collectives, torch.int64, (width,), width) for width in range(1, 5)]
    pendings = [collectives.all_to_all([part], what="one of several") for part, _ in pairs]
    for pending, (_, wanted) in reversed(list(zip(pendings, pairs, strict=True))):
        assert torch.equal(pending.wait()[0], wanted)


def check_sizes(collectives: Collectives) -> None:
    world_size, me = collectives.world_size, collectives.rank
    sizes_WX = torch.tensor([[10 * me + w, 1 << 40, -me] for w in range(world_size)])
    sizes = collectives.exchange_sizes(sizes_WX, what="sizes").wait()
    wanted_WX = torch.tensor([[10 * w + me, 1 << 40, -w] for w in range(world_size)])
    assert torch.equal(sizes.sent_WX, sizes_WX)
    assert torch.equal(sizes.received_WX, wanted_WX)
    sizes = collectives.exchange_sizes(sizes_WX.to(collectives.device), what="sizes").wait()
    assert torch.equal(sizes.sent_WX, sizes_WX)
    assert torch.equal(sizes.received_WX, wanted_WX)
    none_W0 = torch.empty(world_size, 0, dtype=torch.int64)
    nothing = collectives.exchange_sizes(none_W0, what="no sizes").wait()
    assert nothing.received_WX.shape == (world_size, 0)


def check_reductions(collectives: Collectives) -> None:
    world_size, me = collectives.world_size, collectives.rank
    all_R3 = torch.tensor([[rank, -rank, 2 * rank + 1] for rank in range(world_size)])
    for dtype in DTYPES:
        if dtype in (torch.bool, torch.int16, torch.uint8):
            continue
        values = all_R3[me].to(collectives.device, dtype)
        for op, wanted in (
            ("sum", all_R3.sum(0)),
            ("max", all_R3.amax(0)),
            ("min", all_R3.amin(0)),
        ):
            (got,) = collectives.all_reduce(values, op, what=op).wait()  # type: ignore[arg-type]
            assert got.dtype == dtype
            assert torch.equal(got.cpu(), wanted.to(dtype))
        assert torch.equal(values.cpu(), all_R3[me].to(dtype))
    one, none = torch.tensor(float(me)), torch.empty(0)
    for values in (one.to(collectives.device), none.to(collectives.device)):
        (got,) = collectives.all_reduce(values, "sum", what="one or none").wait()
        assert got.shape == values.shape


def check_broadcasts(collectives: Collectives) -> None:
    source = collectives.world_size - 1
    for dtype in DTYPES:
        values = (torch.arange(4) + collectives.rank).to(collectives.device, dtype)
        collectives.broadcast(values, source, what="values")
        assert torch.equal(values.cpu(), (torch.arange(4) + source).to(dtype))
    table = torch.full((3, 4), float(collectives.rank), device=collectives.device)
    collectives.broadcast(table[:, 1:3], source, what="columns")
    wanted_34 = torch.full((3, 4), float(collectives.rank))
    wanted_34[:, 1:3] = source
    assert torch.equal(table.cpu(), wanted_34)


def check_objects(collectives: Collectives) -> None:
    def value(rank: int) -> dict[str, Any]:
        return {"rank": rank, "text": "x" * (1000 * rank), "none": None}

    got = collectives.gather_objects(value(collectives.rank), what="objects")
    assert got == [value(rank) for rank in range(collectives.world_size)]


def check_mistakes(collectives: Collectives) -> None:
    """Refused before anything is sent: what follows works."""
    world_size, device = collectives.world_size, collectives.device
    ones, data = (1,) * world_size, torch.zeros(world_size, 2, device=device)
    wrong: list[tuple[Part, type[Exception], str]] = [
        (Part(data, (2,) * world_size, ones), ShapeError, "add up"),
        (Part(data, (*ones, 0), ones), ShapeError, f"one for each of {world_size} ranks"),
        (Part(data, ones, (*ones, 0)), ShapeError, "receive splits"),
        (Part(data, ones, (*ones[1:], -1)), ShapeError, "0 rows or more"),
        (Part(torch.tensor(1.0, device=device), ones, ones), ShapeError, "first dimension"),
        (Part(torch.zeros(world_size, 2, device="meta"), ones, ones), DTypeError, "device"),
    ]
    for part, error, text in wrong:
        with pytest.raises(error, match=text):
            collectives.all_to_all([Part(data, ones, ones), part], what="mistake")
    with pytest.raises(ShapeError, match="a row for each rank"):
        collectives.exchange_sizes(
            torch.zeros(world_size + 1, 1, dtype=torch.int64), what="mistake"
        )
    with pytest.raises(DTypeError, match="int64"):
        collectives.exchange_sizes(torch.zeros(world_size, 1), what="mistake")
    with pytest.raises(DTypeError, match="bool"):
        collectives.all_reduce(
            torch.zeros(2, dtype=torch.bool, device=device), "sum", what="mistake"
        )
    with pytest.raises(InputError, match="mean"):
        collectives.all_reduce(data, "mean", what="mistake")  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="below"):
        collectives.broadcast(data, world_size, what="mistake")
    check_uneven(collectives)
