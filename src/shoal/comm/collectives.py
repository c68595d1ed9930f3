"""What ranks may do together, whatever carries it, and the one-rank form of it."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from shoal.comm.watch import ALIKE, Group
from shoal.errors import (
    CollectiveFailed,
    DTypeError,
    InputError,
    ShapeError,
    collective_failed,
)

ReduceOp = Literal["sum", "max", "min"]

_REDUCIBLE = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.int8, torch.uint8, torch.int32, torch.int64),
)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One tensor of an all-to-all: `send[w]` rows go to rank w, `receive[w]` come from it.

    data: any dtype, on the collectives' device; rows are its first dimension, in order of rank.
    send, receive: W entries each; `receive` must be what the other ranks send.
    """

    data: Tensor
    send: tuple[int, ...]
    receive: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Sizes:
    """Sizes that were exchanged, int64 on the CPU.

    sent_WX: row w went to rank w.
    received_WX: row w came from rank w.
    """

    sent_WX: Tensor
    received_WX: Tensor


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> tuple[Tensor, ...]:
        """What was received, one tensor for each that was handed in.

        On the CPU this blocks; on CUDA it orders the present stream behind the collective. May be
        called again.

        Raises:
            CollectiveFailed: a rank died or did not come in time.
        """
        ...


class PendingSizes(Protocol):
    """An exchange of sizes under way."""

    def wait(self) -> Sizes:
        """The sizes, on the host; blocks on every device. May be called again.

        Raises:
            CollectiveFailed: a rank died or did not come in time.
        """
        ...


class Collectives(Protocol):
    """What W ranks do together, each from one thread, all in the same order.

    step: what errors name; the owner of the loop sets it.
    """

    rank: int
    world_size: int
    device: torch.device
    step: int

    def all_to_all(self, parts: Sequence[Part], *, what: str) -> Pending:
        """Begin to send rows of several tensors to their ranks.

        The tensors must stay as they are until `wait` has returned (CUDA: in stream order).

        Raises:
            ShapeError, DTypeError: a part does not fit; nothing was sent.
            CollectiveFailed: this or an earlier collective failed.
        """
        ...

    def exchange_sizes(self, sizes_WX: Tensor, *, what: str) -> PendingSizes:
        """Begin to send row w of `sizes_WX` (int64, on the CPU or on `device`) to rank w.

        Raises:
            ShapeError, DTypeError: not such a tensor; nothing was sent.
            CollectiveFailed: this or an earlier collective failed.
        """
        ...

    def all_reduce(self, values: Tensor, op: ReduceOp, *, what: str) -> Pending:
        """Begin to combine `values` of all ranks by element; the result is a new tensor.

        Raises:
            DTypeError: a dtype that cannot be combined, or another device; nothing was sent.
            CollectiveFailed: this or an earlier collective failed.
        """
        ...

    def broadcast(self, values: Tensor, source: int, *, what: str) -> None:
        """Overwrite `values` with those of rank `source` (CUDA: in stream order).

        Raises:
            ShapeError, DTypeError: no such rank, or values elsewhere; nothing was sent.
            CollectiveFailed: this or an earlier collective failed.
        """
        ...

    def gather_objects(self, value: Any, *, what: str) -> list[Any]:
        """Every rank's picklable value, by rank.

        Raises:
            CollectiveFailed: this or an earlier collective failed.
        """
        ...

    def barrier(self, *, what: str) -> None:
        """Return when every rank has come here.

        Raises:
            CollectiveFailed: this or an earlier collective failed.
        """
        ...

    def close(self) -> None:
        """Let go of what carries the collectives; no call may follow."""
        ...


class Done:
    """A `Pending` that has ended."""

    def __init__(self, received: tuple[Tensor, ...]) -> None:
        self._received = received

    def wait(self) -> tuple[Tensor, ...]:
        """What was received."""
        return self._received


class DoneSizes:
    """A `PendingSizes` that has ended."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes

    def wait(self) -> Sizes:
        """The sizes."""
        return self._sizes


class LocalCollectives:
    """One rank alone: what it sends it receives, as copies."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.rank = 0
        self.world_size = 1
        self.device = torch.device(device)
        self.step = 0

    def all_to_all(self, parts: Sequence[Part], *, what: str) -> Pending:
        """See `Collectives`."""
        check_parts(parts, self, what)
        for part in parts:
            if part.send != part.receive:
                raise ShapeError(
                    f"rows that the only rank receives in {what!r}",
                    got=part.receive,
                    allowed=f"what it sends, {part.send}",
                    remedy="Give both the same.",
                )
        return Done(tuple(part.data.detach().clone() for part in parts))

    def exchange_sizes(self, sizes_WX: Tensor, *, what: str) -> PendingSizes:
        """See `Collectives`."""
        check_sizes(sizes_WX, self, what)
        host_WX = sizes_WX.detach().cpu()
        return DoneSizes(Sizes(host_WX.clone(), host_WX.clone()))

    def all_reduce(self, values: Tensor, op: ReduceOp, *, what: str) -> Pending:
        """See `Collectives`."""
        check_values(values, op, self, what)
        return Done((values.detach().clone(),))

    def broadcast(self, values: Tensor, source: int, *, what: str) -> None:
        """See `Collectives`."""
        check_source(values, source, self, what)

    def gather_objects(self, value: Any, *, what: str) -> list[Any]:
        """See `Collectives`."""
        return [pickle.loads(pickle.dumps(value))]

    def barrier(self, *, what: str) -> None:
        """See `Collectives`."""

    def close(self) -> None:
        """See `Collectives`."""


def check_parts(parts: Sequence[Part], collectives: Collectives, what: str) -> None:
    """Refuse parts that do not fit `collectives`.

    Raises:
        ShapeError: no rows dimension, splits of another number of ranks, negative, or that do not
            add up to the rows.
        DTypeError: a tensor on another device.
    """
    world_size = collectives.world_size
    for index, part in enumerate(parts):
        name = f"part {index} of {what!r}"
        _check_device(part.data, collectives, name)
        if part.data.dim() == 0:
            raise _shape_error(f"shape of {name}", (), "rows as the first dimension")
        for way, splits in (("send", part.send), ("receive", part.receive)):
            if len(splits) != world_size:
                raise _shape_error(
                    f"{way} splits of {name}",
                    f"{len(splits)} entries",
                    f"one for each of {world_size} ranks",
                )
            if min(splits) < 0:
                raise _shape_error(f"{way} splits of {name}", tuple(splits), "0 rows or more")
        if sum(part.send) != part.data.shape[0]:
            raise _shape_error(
                f"send splits of {name}",
                f"{tuple(part.send)}, {sum(part.send)} rows",
                f"splits that add up to the {part.data.shape[0]} rows of the data",
            )


def check_sizes(sizes_WX: Tensor, collectives: Collectives, what: str) -> None:
    """Refuse sizes that are not int64 [W, X] on the CPU or the collectives' device.

    Raises:
        ShapeError, DTypeError: as said.
    """
    if sizes_WX.device.type != "cpu":
        _check_device(sizes_WX, collectives, f"sizes of {what!r}")
    if sizes_WX.dtype != torch.int64:
        raise DTypeError(
            f"dtype of the sizes of {what!r}",
            got=sizes_WX.dtype,
            allowed=torch.int64,
            remedy="Convert them.",
        )
    if sizes_WX.dim() != 2 or sizes_WX.shape[0] != collectives.world_size:
        raise _shape_error(
            f"sizes of {what!r}",
            tuple(sizes_WX.shape),
            f"[{collectives.world_size}, X], a row for each rank",
        )


def check_values(values: Tensor, op: str, collectives: Collectives, what: str) -> None:
    """Refuse values that cannot be combined over ranks.

    Raises:
        InputError: an unknown operation.
        DTypeError: a dtype without it, or another device.
    """
    _check_device(values, collectives, f"values of {what!r}")
    if op not in get_args(ReduceOp):
        allowed = ", ".join(get_args(ReduceOp))
        raise InputError(
            f"operation of {what!r}", got=repr(op), allowed=allowed, remedy="Choose one."
        )
    if values.dtype not in _REDUCIBLE:
        raise DTypeError(
            f"dtype of the values of {what!r}",
            got=values.dtype,
            allowed=", ".join(str(dtype) for dtype in _REDUCIBLE),
            remedy="Convert them.",
        )


def check_source(values: Tensor, source: int, collectives: Collectives, what: str) -> None:
    """Refuse a broadcast from no rank, of values elsewhere or with gaps between them.

    Raises:
        ShapeError, DTypeError: as said.
    """
    _check_device(values, collectives, f"values of {what!r}")
    if not 0 <= source < collectives.world_size:
        raise _shape_error(f"source of {what!r}", source, f"a rank below {collectives.world_size}")


def gathered_objects(collectives: Collectives, value: Any, what: str) -> list[Any]:
    """`gather_objects` by means of the other collectives: sizes first, then the bytes."""
    ranks = collectives.world_size
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes_W1 = torch.full((ranks, 1), data.numel(), dtype=torch.int64, device="cpu")
    found = collectives.exchange_sizes(sizes_W1, what=what).wait()
    receive = tuple(int(size) for size in found.received_WX[:, 0].tolist())
    part = Part(data.repeat(ranks).to(collectives.device), (data.numel(),) * ranks, receive)
    (got,) = collectives.all_to_all([part], what=what).wait()
    return [
        pickle.loads(piece.numpy().tobytes()) for piece in torch.split(got.cpu(), list(receive))
    ]


def _check_device(values: Tensor, collectives: Collectives, name: str) -> None:
    if values.device != collectives.device:
        raise DTypeError(
            f"device of {name}",
            got=values.device,
            allowed=collectives.device,
            remedy="Move the tensor there.",
        )


def _shape_error(what: str, got: object, allowed: object) -> ShapeError:
    remedy = "Make them from the sizes that the ranks exchanged."
    return ShapeError(what, got=got, allowed=allowed, remedy=remedy)


class _Owner(Protocol):
    """Collectives that keep the first failure: later calls raise it at once."""

    rank: int
    world_size: int
    step: int
    timeout_s: float
    watched: Group
    _failure: CollectiveFailed | None


class Call:
    """A collective that has begun.

    Raises:
        CollectiveFailed: an earlier one of the same collectives failed.
    """

    def __init__(self, owner: _Owner, what: str) -> None:
        if owner._failure is not None:
            raise owner._failure
        self._told, self._what, self._step = owner, what, owner.step
        self._start = time.monotonic()
        self._number = owner.watched.begin(what)

    def left_s(self) -> float:
        """Seconds until the collective counts as failed."""
        return self._start + self._told.timeout_s - time.monotonic()

    def look(self) -> None:
        """Between short waits: fail if ranks wait for each other in different calls."""
        told = self._told.watched.look(self._number)
        if told is not None:
            raise self.failed(told, remedy=ALIKE)

    def failed(self, reason: str, **remedy: str) -> CollectiveFailed:
        """The error, or an earlier one; later collectives of the same ranks raise it at once."""
        owner = self._told
        if owner._failure is None:
            owner._failure = collective_failed(
                self._what,
                rank=owner.rank,
                world_size=owner.world_size,
                step=self._step,
                elapsed_s=time.monotonic() - self._start,
                timeout_s=owner.timeout_s,
                reason=reason,
                **remedy,
            )
        return owner._failure
