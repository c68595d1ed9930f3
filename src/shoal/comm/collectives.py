"""What ranks may do together, whatever carries it, and the one-rank form of it."""

from __future__ import annotations

import pickle
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, cast, get_args

import torch
from torch import Tensor

from shoal.comm.mismatched_calls import ALIKE, Calls
from shoal.errors import CollectiveFailed, DTypeError, InputError, ShapeError, collective_failed

T = TypeVar("T")
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


class Arriving(Generic[T]):
    """Something under way.

    Args:
        get: waits for it.
        repeated: each `wait` calls `get`; else the first one's result stays.
    """

    __slots__ = ("_get", "_got", "_repeated")

    def __init__(self, get: Callable[[], T], *, repeated: bool = False) -> None:
        self._get: Callable[[], T] | None = get
        self._got: T | None = None
        self._repeated = repeated

    def wait(self) -> T:
        """What arrived. May be called again.

        Rows: on the CPU this blocks; on CUDA it orders the present stream behind the collective.
        Sizes: on the host; blocks on every device.

        Raises:
            CollectiveFailed: a rank died or did not come in time.
        """
        if self._get is not None:
            got = self._get()
            if self._repeated:
                return got
            self._got, self._get = got, None  # with what was sent, which need not be kept
        return cast(T, self._got)


def after(wait: Callable[[], object], get: Callable[[], T]) -> Arriving[T]:
    """What `get` gives once `wait` has returned."""

    def both() -> T:
        wait()
        return get()

    return Arriving(both)


Pending = Arriving[tuple[Tensor, ...]]
"""A collective under way: one tensor for each that was handed in."""
PendingSizes = Arriving[Sizes]
"""An exchange of sizes under way."""


class WaitClock:
    """Seconds that went into collectives, all that share this clock together.

    On the CPU the host's time in calls and waits; on CUDA the time streams stood still for them.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._host_s = 0.0
        self._stalls: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @property
    def total_s(self) -> float:
        """All so far; on CUDA it waits for the streams."""
        for before, after in self._stalls:
            after.synchronize()
            self._host_s += before.elapsed_time(after) / 1e3
        self._stalls.clear()
        return self._host_s

    @contextmanager
    def counted(self, device: torch.device) -> Iterator[None]:
        """Count what a block takes."""
        if device.type == "cuda":
            before = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            after = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            stream = torch.cuda.current_stream(device)
            before.record(stream)
            yield
            after.record(stream)
            self._stalls.append((before, after))
        else:
            start_s = self._clock()
            try:
                yield
            finally:
                self._host_s += self._clock() - start_s


class Collectives(ABC):
    """What W ranks do together, each from one thread, all in the same order.

    A backend carries four things: rows, sizes, reductions and broadcasts. The first failure stays:
    later calls raise it at once.

    Args:
        rank, world_size: this one among all.
        device: where tensors are.
        timeout_s: how long a collective may take.
        watched: notes the calls; see `Watchdog`.

    Attributes:
        step: what errors name; the owner of the loop sets it.
        clock: counts the time that goes into calls and waits; None: nobody asks.
        failure: the first failure.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout_s: float,
        watched: Calls | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.timeout_s = timeout_s
        self.watched = watched or Calls()
        self.step = 0
        self.clock: WaitClock | None = None
        self.failure: CollectiveFailed | None = None

    def all_to_all(self, parts: Sequence[Part], *, what: str) -> Pending:
        """Begin to send rows of several tensors to their ranks.

        The tensors must stay as they are until `wait` has returned (CUDA: in stream order).

        Raises:
            ShapeError, DTypeError: a part does not fit; nothing was sent.
            CollectiveFailed: this or an earlier collective failed.
        """
        _check_parts(parts, self, what)
        with self._counted():
            return self._waits_counted(self._rows(parts, what))

    def exchange_sizes(self, sizes_WX: Tensor, *, what: str) -> PendingSizes:
        """Begin to send row w of `sizes_WX` (int64, on the CPU or on `device`) to rank w.

        Raises:
            ShapeError, DTypeError: not such a tensor; nothing was sent.
            CollectiveFailed: this or an earlier collective failed.
        """
        _check_sizes(sizes_WX, self, what)
        with self._counted():
            return self._waits_counted(self._exchange_sizes(sizes_WX.detach(), what))

    def all_reduce(self, values: Tensor, op: ReduceOp, *, what: str) -> Pending:
        """Begin to combine `values` of all ranks by element; the result is a new tensor.

        Raises:
            DTypeError: a dtype that cannot be combined, or another device; nothing was sent.
            CollectiveFailed: this or an earlier collective failed.
        """
        _check_values(values, op, self, what)
        with self._counted():
            return self._waits_counted(self._all_reduce(values.detach().contiguous(), op, what))

    def broadcast(self, values: Tensor, source: int, *, what: str) -> None:
        """Overwrite `values` with those of rank `source` (CUDA: in stream order).

        Raises:
            ShapeError, DTypeError: no such rank, or values elsewhere; nothing was sent.
            CollectiveFailed: this or an earlier collective failed.
        """
        _check_device(values, self, f"values of {what!r}")
        if not 0 <= source < self.world_size:
            raise _shape_error(f"source of {what!r}", source, f"a rank below {self.world_size}")
        whole = values.detach().contiguous()
        with self._counted():
            self._broadcast(whole, source, what)
            if whole.data_ptr() != values.data_ptr():
                values.detach().copy_(whole)

    def gather_objects(self, value: Any, *, what: str) -> list[Any]:
        """Every rank's picklable value, by rank.

        Raises:
            CollectiveFailed: this or an earlier collective failed.
        """
        ranks = self.world_size
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes_W1 = torch.full((ranks, 1), data.numel(), dtype=torch.int64, device="cpu")
        with self._counted():
            found = self._exchange_sizes(sizes_W1, what).wait()
            receive = tuple(int(size) for size in found.received_WX[:, 0].tolist())
            part = Part(data.repeat(ranks).to(self.device), (data.numel(),) * ranks, receive)
            (got,) = self._rows([part], what).wait()
        return [
            pickle.loads(piece.numpy().tobytes()) for piece in torch.split(got.cpu(), list(receive))
        ]

    def barrier(self, *, what: str) -> None:
        """Return when every rank has come here; on CUDA, the device has reached it too.

        Raises:
            CollectiveFailed: this or an earlier collective failed.
        """
        with self._counted():
            sizes_W1 = torch.zeros((self.world_size, 1), dtype=torch.int64, device="cpu")
            self._exchange_sizes(sizes_W1, what).wait()

    @abstractmethod
    def close(self) -> None:
        """Let go of what carries the collectives; no call may follow."""

    @abstractmethod
    def _all_to_all(self, parts: Sequence[Part], results: tuple[Tensor, ...], what: str) -> Pending:
        """Begin to move rows of contiguous parts into the results."""

    def _exchange_sizes(self, sizes_WX: Tensor, what: str) -> PendingSizes:
        """Begin to exchange sizes: on the CPU, a row of them for each rank."""
        ones = (1,) * self.world_size
        sent_WX = sizes_WX.clone(memory_format=torch.contiguous_format)
        received_WX = torch.empty_like(sent_WX)
        pending = self._all_to_all([Part(sent_WX, ones, ones)], (received_WX,), what)
        return after(pending.wait, lambda: Sizes(sent_WX, received_WX))

    @abstractmethod
    def _all_reduce(self, values: Tensor, op: ReduceOp, what: str) -> Pending:
        """Begin to combine contiguous values."""

    @abstractmethod
    def _broadcast(self, values: Tensor, source: int, what: str) -> None:
        """Overwrite contiguous values."""

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for rows that arrive."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _rows(self, parts: Sequence[Part], what: str) -> Pending:
        parts = [Part(one.data.detach().contiguous(), one.send, one.receive) for one in parts]
        results = tuple(
            self._empty((sum(one.receive), *one.data.shape[1:]), one.data.dtype) for one in parts
        )
        return self._all_to_all(parts, results, what)

    def _counted(self) -> AbstractContextManager[None]:
        return nullcontext() if self.clock is None else self.clock.counted(self.device)

    def _waits_counted(self, pending: Arriving[T]) -> Arriving[T]:
        if self.clock is None:
            return pending

        def wait() -> T:
            with self._counted():
                return pending.wait()

        return Arriving(wait, repeated=True)


class LocalCollectives(Collectives):
    """One rank alone: what it sends it receives, as copies."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__(0, 1, torch.device(device), 0.0)

    def close(self) -> None:
        """Nothing to let go of."""

    def _all_to_all(self, parts: Sequence[Part], results: tuple[Tensor, ...], what: str) -> Pending:
        for part, result in zip(parts, results, strict=True):
            result.copy_(part.data)
        return Arriving(lambda: results)

    def _exchange_sizes(self, sizes_WX: Tensor, what: str) -> PendingSizes:
        sent_WX, received_WX = sizes_WX.to("cpu", copy=True), sizes_WX.to("cpu", copy=True)
        return Arriving(lambda: Sizes(sent_WX, received_WX))

    def _all_reduce(self, values: Tensor, op: ReduceOp, what: str) -> Pending:
        result = values.clone()
        return Arriving(lambda: (result,))

    def _broadcast(self, values: Tensor, source: int, what: str) -> None:
        pass


def _check_parts(parts: Sequence[Part], collectives: Collectives, what: str) -> None:
    world_size, rank = collectives.world_size, collectives.rank
    for index, part in enumerate(parts):
        name = f"part {index} of {what!r}"
        _check_device(part.data, collectives, name)
        if part.data.dim() == 0:
            raise _shape_error(f"shape of {name}", (), "rows as the first dimension")
        for way, splits in (("send", part.send), ("receive", part.receive)):
            if len(splits) != world_size:
                got, allowed = f"{len(splits)} entries", f"one for each of {world_size} ranks"
                raise _shape_error(f"{way} splits of {name}", got, allowed)
            if min(splits) < 0:
                raise _shape_error(f"{way} splits of {name}", tuple(splits), "0 rows or more")
        if sum(part.send) != part.data.shape[0]:
            raise _shape_error(
                f"send splits of {name}",
                f"{tuple(part.send)}, {sum(part.send)} rows",
                f"splits that add up to the {part.data.shape[0]} rows of the data",
            )
        if part.send[rank] != part.receive[rank]:
            raise _shape_error(
                f"rows that rank {rank} receives from itself in {what!r}",
                part.receive[rank],
                f"what it sends, {part.send[rank]}",
            )


def _check_sizes(sizes_WX: Tensor, collectives: Collectives, what: str) -> None:
    if sizes_WX.device.type != "cpu":
        _check_device(sizes_WX, collectives, f"sizes of {what!r}")
    if sizes_WX.dtype != torch.int64:
        raise _dtype_error(f"dtype of the sizes of {what!r}", sizes_WX.dtype, torch.int64)
    if sizes_WX.dim() != 2 or sizes_WX.shape[0] != collectives.world_size:
        allowed = f"[{collectives.world_size}, X], a row for each rank"
        raise _shape_error(f"sizes of {what!r}", tuple(sizes_WX.shape), allowed)


def _check_values(values: Tensor, op: str, collectives: Collectives, what: str) -> None:
    _check_device(values, collectives, f"values of {what!r}")
    if op not in get_args(ReduceOp):
        allowed = ", ".join(get_args(ReduceOp))
        raise InputError(
            f"operation of {what!r}", got=repr(op), allowed=allowed, remedy="Choose one."
        )
    if values.dtype not in _REDUCIBLE:
        allowed = ", ".join(str(dtype) for dtype in _REDUCIBLE)
        raise _dtype_error(f"dtype of the values of {what!r}", values.dtype, allowed)


def _check_device(values: Tensor, collectives: Collectives, name: str) -> None:
    if values.device != collectives.device:
        raise _dtype_error(f"device of {name}", values.device, collectives.device)


def _dtype_error(what: str, got: object, allowed: object) -> DTypeError:
    return DTypeError(what, got=got, allowed=allowed, remedy="Convert the tensor with .to().")


def _shape_error(what: str, got: object, allowed: object) -> ShapeError:
    remedy = "Make them from the sizes that the ranks exchanged."
    return ShapeError(what, got=got, allowed=allowed, remedy=remedy)


class Call:
    """A collective that has begun.

    Args:
        owner: the collectives.
        what: names it.
        closed: the owner was closed before it.

    Raises:
        CollectiveFailed: an earlier one of the same collectives failed, or they were closed.
    """

    def __init__(self, owner: Collectives, what: str, *, closed: bool = False) -> None:
        if owner.failure is not None:
            raise owner.failure
        # Owners may keep calls: a strong reference back would keep both for good.
        self._owner: Collectives = weakref.proxy(owner)
        self._what, self._step = what, owner.step
        self._start = time.monotonic()
        if closed:
            raise self.failed("the collectives were closed before it, or belong to another process")
        self._number = owner.watched.begin(what)

    def left_s(self) -> float:
        """Seconds until the collective counts as failed."""
        return self._start + self._owner.timeout_s - time.monotonic()

    def look(self) -> None:
        """Between short waits: fail if ranks wait for each other in different calls."""
        found = self._owner.watched.look(self._number)
        if found is not None:
            raise self.failed(found, remedy=ALIKE)

    def failed(self, reason: str, **remedy: str) -> CollectiveFailed:
        """The error, or an earlier one; later collectives of the same ranks raise it at once."""
        owner = self._owner
        if owner.failure is None:
            owner.failure = collective_failed(
                self._what,
                rank=owner.rank,
                world_size=owner.world_size,
                step=self._step,
                elapsed_s=time.monotonic() - self._start,
                timeout_s=owner.timeout_s,
                reason=reason,
                **remedy,
            )
        return owner.failure
