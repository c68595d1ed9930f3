"""Collectives of ranks on one host, through memory that they share."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
import zlib
from collections import deque
from collections.abc import Sequence
from functools import lru_cache, partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from shoal import _core
from shoal.address import address
from shoal.comm.collectives import Arriving, Call, Collectives, Part, Pending, ReduceOp, after
from shoal.comm.consensus import as_first_rank, together
from shoal.comm.mismatched_calls import ALIKE, Calls
from shoal.errors import ConfigError

logger = logging.getLogger(__name__)

_SLOT_BYTES = 256 << 10
_LEAST_SLOT_BYTES = 16 << 10
_MOST_BYTES = 256 << 20  # of all rings of a group
_SLOTS = 4
_INSTEAD = "Use the collectives over torch.distributed."
_MOST_S = 1e9  # of a timeout; the core counts nanoseconds in 64 bits


def _home() -> tuple[str, str, str]:
    """Host, boot and process namespace, which ranks have in common that can share memory and see
    each other's processes.
    """
    own = Path("/proc/self/ns/pid")
    boot = _text_of(Path("/proc/sys/kernel/random/boot_id"))
    return socket.gethostname(), boot, os.readlink(own) if own.exists() else ""


def join(bootstrap: Collectives, timeout_s: float) -> _core.SharedGroup:
    """Create the region on rank 0, open it everywhere, and take its name away again.

    Raises:
        ConfigError: the ranks cannot share memory; on every rank alike.
        CollectiveFailed: `bootstrap` failed.
    """
    homes = bootstrap.gather_objects(_home(), what="shared memory")
    if len(set(homes)) > 1:
        hosts = ", ".join(home[0] for home in homes)
        raise refusal("hosts of the ranks", hosts, "one host, and one container, for all of them")
    regions: list[_core.SharedRegion] = []
    groups: list[_core.SharedGroup] = []
    name, token = f"/shoal-{secrets.token_hex(8)}", secrets.randbits(63)

    def create() -> tuple[str, int]:
        regions.append(_created(name, token, bootstrap.world_size))
        return name, token

    def attach(name: str, token: int) -> None:
        region = regions[0] if regions else _core.SharedRegion.open(name, token)
        groups.append(_core.SharedGroup(region, bootstrap.rank, min(timeout_s, _MOST_S)))

    try:
        there = as_first_rank(bootstrap, create, what="shared memory")
        what = "shared memory of the ranks"
        together(bootstrap, what, lambda: attach(*there), failed=ConfigError, remedy=_INSTEAD)
    finally:
        if regions:
            _core.SharedRegion.unlink(name)
    groups[0].watch_peers()
    return groups[0]


def _created(name: str, token: int, world_size: int) -> _core.SharedRegion:
    pairs = max(1, world_size * (world_size - 1))
    slot_bytes = _SLOT_BYTES
    while slot_bytes > _LEAST_SLOT_BYTES and pairs * _SLOTS * slot_bytes > _MOST_BYTES:
        slot_bytes //= 2
    while True:
        try:
            return _core.SharedRegion.create(name, token, world_size, slot_bytes)
        except OSError as error:
            if error.errno != errno.ENOSPC or slot_bytes <= _LEAST_SLOT_BYTES:
                what, allowed = "memory for the rings between ranks", "some MB in /dev/shm"
                raise refusal(what, error, allowed) from error
        slot_bytes //= 2
        logger.warning("little space for shared memory: trying slots of %d KiB", slot_bytes >> 10)


def refusal(what: str, got: object, allowed: str) -> ConfigError:
    """Build the error that says why there is no shared memory and what to use instead."""
    return ConfigError(what, got=got, allowed=allowed, remedy=_INSTEAD)


def _text_of(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


_POOLED_BYTES = 1 << 20  # results from here on take memory whose pages are warm
_REDUCED_WHOLE_BYTES = 64 << 10  # every rank combines such values whole
_calls: dict[int, str] = {}  # by tag, those of this process
_LOOK_S = 0.1  # between looks at signals while waiting

# Where a part's rows are and go, the bytes of a row, rows to and from each rank.
_Runs = tuple[int, int, int, Sequence[int], Sequence[int]]


class SharedMemoryCollectives(Collectives):
    """Collectives through one shared-memory object, for CPU tensors of ranks on one host.

    Bytes go through a ring of slots for each ordered pair of ranks, so that messages of any size
    use little memory and sender and receiver work at the same time. What fits into the rings is
    sent in the call itself; a thread moves the rest next to the caller's work. The object's name is
    gone once all ranks have opened it, so that nothing stays behind, however they end.

    A copy in a forked child is of no use there, and harmless.

    Args:
        bootstrap: any collectives of the same ranks, used here only.
        timeout_s: how long a collective may take once its turn has come.
        device: the CPU.
        watched: notes the calls; see `Watchdog`.

    Raises:
        ConfigError: not the CPU, ranks on several hosts or in several containers, or no space for
            the memory; on every rank alike.
        CollectiveFailed: `bootstrap` failed.
    """

    def __init__(
        self,
        bootstrap: Collectives,
        *,
        timeout_s: float,
        device: torch.device | str = "cpu",
        watched: Calls | None = None,
    ) -> None:
        super().__init__(
            bootstrap.rank, bootstrap.world_size, torch.device(device), timeout_s, watched
        )
        if self.device.type != "cpu":
            raise refusal("device of shared-memory collectives", device, "cpu")
        self._process = os.getpid()
        self._closed = False
        self._under_way: deque[_SharedCall] = deque()
        self._group = join(bootstrap, timeout_s)

    def close(self) -> None:
        """See `Collectives`; ranks that still wait for this one fail."""
        self._closed = True
        self._group.close()
        self._under_way.clear()

    def __del__(self) -> None:
        # The group's thread stops before the tensors that it may be moving go.
        if hasattr(self, "_group"):
            self.close()

    def _all_to_all(self, parts: Sequence[Part], results: tuple[Tensor, ...], what: str) -> Pending:
        runs: list[_Runs] = []
        for part, result in zip(parts, results, strict=True):
            row_bytes = prod(part.data.shape[1:]) * part.data.element_size()
            runs.append((address(part.data), address(result), row_bytes, part.send, part.receive))
        call = self._start(runs, what, (*(part.data for part in parts), *results))
        return after(partial(call.wait, self), lambda: results)

    def _all_reduce(self, values: Tensor, op: ReduceOp, what: str) -> Pending:
        """In order of rank, the same bits on every rank; large values before this returns."""
        flat, ranks = values.view(-1), self.world_size
        if flat.numel() * flat.element_size() <= _REDUCED_WHOLE_BYTES:
            gathered = self._all_gather(flat, what)
            return Arriving(lambda: (_combine(gathered.wait(), op).view(values.shape),))
        count = flat.numel()
        edges = [count * rank // ranks for rank in range(ranks + 1)]
        shares = tuple(edges[rank + 1] - edges[rank] for rank in range(ranks))
        mine = shares[self.rank]
        (parts,) = self._rows([Part(flat, shares, (mine,) * ranks)], what).wait()
        combined = _combine(parts.view(ranks, mine), op)
        result = torch.empty(count, dtype=flat.dtype, device="cpu")
        runs = [*_same_to_all(combined, ranks), _from_all(result, shares)]
        self._start(runs, what, (combined, result)).wait(self)
        return Arriving(lambda: (result.view(values.shape),))

    def _broadcast(self, values: Tensor, source: int, what: str) -> None:
        flat = values.view(-1)
        if self.rank == source:
            runs = _same_to_all(flat, self.world_size)
            runs[source] = (0, 0, 0, runs[source][3], runs[source][4])
        else:
            shares = tuple(flat.numel() if rank == source else 0 for rank in range(self.world_size))
            runs = [_from_all(flat, shares)]
        self._start(runs, what, (values,)).wait(self)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = prod(shape) * dtype.itemsize
        if size < _POOLED_BYTES:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return _core.pooled_bytes(size).view(dtype).view(shape)

    def _all_gather(self, flat_N: Tensor, what: str) -> Arriving[Tensor]:
        """Begin to give `flat_N` to all ranks; what comes, [W, N]."""
        ranks, count = self.world_size, flat_N.numel()
        gathered_WN = torch.empty((ranks, count), dtype=flat_N.dtype, device="cpu")
        sent_N = flat_N.clone()  # the caller's may change before all have read it
        runs = [*_same_to_all(sent_N, ranks), _from_all(gathered_WN, (count,) * ranks)]
        call = self._start(runs, what, (sent_N, gathered_WN))
        return after(partial(call.wait, self), lambda: gathered_WN)

    def _start(self, runs: Sequence[_Runs], what: str, tensors: tuple[Tensor, ...]) -> _SharedCall:
        self._forget_done()
        call = _SharedCall(self, runs, what, tensors)
        self._under_way.append(call)
        return call

    def _forget_done(self) -> None:
        while self._under_way and self._under_way[0].done(0):
            self._under_way.popleft()


class _SharedCall(Call):
    """A collective under way, and the tensors whose memory it uses."""

    def __init__(
        self,
        owner: SharedMemoryCollectives,
        runs: Sequence[_Runs],
        what: str,
        tensors: tuple[Tensor, ...],
    ) -> None:
        super().__init__(owner, what, closed=owner._closed or os.getpid() != owner._process)
        self._group, self._tensors = owner._group, tensors
        self._started = owner._group.start(runs, owner.world_size, _tag(what))

    def done(self, most_s: float) -> bool:
        """Whether all has arrived, within a time."""
        return self._group.wait(self._started, most_s)

    def wait(self, owner: SharedMemoryCollectives) -> None:
        """Block until all has arrived."""
        while not self.done(_LOOK_S):
            if owner.failure is not None:
                raise owner.failure
            if owner._closed or os.getpid() != owner._process:
                raise self.failed("the collectives were closed, or belong to another process")
            fault, peer, theirs, blamed, detail = owner._group.failure()
            if fault:
                first = next((call for call in owner._under_way if not call.done(0)), self)
                reason = _reason(fault, peer, theirs, blamed, detail, owner.watched.name)
                remedy = {"remedy": ALIKE} if "mismatch" in (fault, theirs) else {}
                raise first.failed(reason, **remedy)
            self.look()
        owner._forget_done()


def _combine(values_WN: Tensor, op: ReduceOp) -> Tensor:
    result_N = values_WN[0].clone()
    for row_N in values_WN[1:]:
        if op == "sum":
            result_N.add_(row_N)
        elif op == "max":
            torch.maximum(result_N, row_N, out=result_N)
        else:
            torch.minimum(result_N, row_N, out=result_N)
    return result_N


def _same_to_all(values: Tensor, ranks: int) -> list[_Runs]:
    """Runs that send the same values to every rank, one run for each."""
    none = (0,) * ranks
    row_bytes = values.numel() * values.element_size()
    return [
        (address(values), 0, row_bytes, tuple(int(to == rank) for to in range(ranks)), none)
        for rank in range(ranks)
    ]


def _from_all(values: Tensor, counts: Sequence[int]) -> _Runs:
    """A run that receives `counts[w]` elements from rank w."""
    return (0, address(values), values.element_size(), (0,) * len(counts), counts)


def _reason(fault: str, peer: int, theirs: str, blamed: int, detail: str, name: str) -> str:
    if fault == "failed":
        reason = _reason(theirs, blamed, "", 0, "its messages differ", name)
        return f"rank {peer} gave up ({reason})"
    call = _calls.get(blamed & 0xFFFFFFFF, "another call")
    return {
        "timeout": f"rank {peer} did not come",
        "dead": f"the process of rank {peer} is gone",
        "closed": f"rank {peer} left",
        "mismatch": f"rank {peer} is not in the same call of {name} but in {call!r}: {detail}",
    }.get(fault, detail or f"rank {peer} gave up")


@lru_cache(maxsize=1024)
def _tag(what: str) -> int:
    tag = zlib.crc32(what.encode())
    _calls[tag] = what
    return tag
