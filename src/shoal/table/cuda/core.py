"""What all parts of a GPU shard share: its memory, its stream, its lock, what kernels follow."""

from __future__ import annotations

import secrets
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from shoal.errors import DeviceUnavailable, NonFiniteGradient
from shoal.kernels.launch import retire, sent
from shoal.kernels.tables import COUNT_ALARMED, CallGroups, ShardLayout
from shoal.table import checks, native
from shoal.table.cuda.calls import CallShape, CallShapes, forms_of
from shoal.table.cuda.deletions import DeviceDeletions
from shoal.table.cuda.images import DeviceImages
from shoal.table.cuda.memory import DeviceMemory
from shoal.table.cuda.side_stream import SideStream
from shoal.table.cuda.ticket import CudaTicket
from shoal.table.native import RateList
from shoal.table.shard import IdGroups, StepContext
from shoal.table.spec import TableSpec


class Keeping(Protocol):
    """A snapshot, as verbs that change rows see it."""

    @property
    def images(self) -> DeviceImages:
        """Keeps rows."""
        ...


class CudaCore:
    """The state of a `CudaShard`; see there for the arguments."""

    def __init__(
        self,
        specs: Sequence[TableSpec],
        *,
        seed: int,
        device: str | torch.device,
        host_rows: bool,
    ) -> None:
        checks.distinct_names(specs)
        checks.seed(seed)
        self._specs = tuple(specs)
        self._seed = seed
        self._device = _placed(torch.device(device))
        self._forms, self._form_of = forms_of(self._specs)
        self._dims = tuple(spec.dim for spec in self._specs)
        with native.enough_memory("indexes of a GPU shard", self._device):
            self._memory = DeviceMemory(
                self._specs,
                self._forms,
                self._form_of,
                seed=seed,
                device=self._device,
                host_rows=host_rows,
            )
        self._shapes = CallShapes(self._forms, self._form_of, self._device)
        self._side = SideStream(self._device)
        self._deletions = DeviceDeletions(self._memory.counters, self._device)
        self._incarnation = drawn_incarnation()
        self._snapshot: weakref.ref[Keeping] | None = None
        self._live: weakref.WeakSet[CudaTicket] = weakref.WeakSet()
        self._rate_list = RateList(self._specs)
        self._rates_kept: tuple[list[float], Tensor] | None = None
        self._lock = threading.RLock()
        # Whatever stream the first verb runs on, it waits for what was started here.
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            # Page-locked memory goes back to torch at once, but kernels may yet write to it.
            weakref.finalize(self._memory, torch.cuda.synchronize, self._device).atexit = False
        self._stream = torch.cuda.current_stream(self._device) if on_gpu else None
        self._epoch = 1
        self._last_step = 0
        self._alarms_told = 0

    @property
    def specs(self) -> tuple[TableSpec, ...]:
        """The tables, in the order their indices name them."""
        return self._specs

    @property
    def seed(self) -> int:
        """Seed of initial values."""
        return self._seed

    @property
    def device(self) -> torch.device:
        """Where ids, rows and gradients are."""
        return self._device

    @property
    def last_step(self) -> int:
        """Global step of the last update: what reads without a step use (OneBit's scale)."""
        return self._last_step

    @last_step.setter
    def last_step(self, step: int) -> None:
        self._last_step = step

    @property
    def _layout(self) -> ShardLayout:
        return self._memory.layout

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One verb at a time, each after the last one whatever stream that ran on.

        Raises:
            OutOfDeviceMemory: an allocation of the verb's failed.
        """
        with self._lock, self._present_device():
            if self._stream is not None:
                # Asking for the stream's number costs a tenth of asking for the stream.
                number = torch._C._cuda_getCurrentRawStream(self._device.index)
                if number != self._stream.cuda_stream:
                    stream = torch.cuda.current_stream(self._device)
                    stream.wait_stream(self._stream)
                    self._stream = stream
            with native.enough_memory("a verb of a GPU shard", self._device):
                yield

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """A short turn of a thread that reads beside training: on the stream of the last verb,
        so that the next one has nothing to wait for. The caller's stream waits for it instead.

        Raises:
            OutOfDeviceMemory: an allocation failed.
        """
        enough = native.enough_memory("a snapshot of a GPU shard", self._device)
        with self._lock, self._present_device(), enough:
            if self._stream is None:
                yield
                return
            own = torch.cuda.current_stream(self._device)
            with torch.cuda.stream(self._stream):
                yield
            if own != self._stream:
                own.wait_stream(self._stream)

    def _open_snapshot(self) -> Keeping | None:
        """The snapshot that is open; one that nobody holds any more is none."""
        return None if self._snapshot is None else self._snapshot()

    def _keep(
        self,
        handles_M: Tensor,
        size_1: Tensor | None = None,
        *,
        forms: Sequence[int] | None = None,
    ) -> None:
        """Have an open snapshot keep rows that are about to change, as they are.

        handles_M, size_1, forms: as `DeviceImages.keep` takes them.
        """
        if self._snapshot is None or handles_M.numel() == 0:
            return
        snapshot = self._snapshot()
        if snapshot is None:
            self._snapshot = None
            return
        snapshot.images.keep(
            self._layout, handles_M, size_1, forms=forms, payload_H=self._payload_now()
        )

    def _payload_now(self) -> Tensor | None:
        """Where rows are now: a cache's handles by handle; None: at home."""
        return None

    def _keep_deletions(self) -> None:
        """Log deletions from here on; cursors of before, for whom there is no log, are no good."""
        self._incarnation = drawn_incarnation()
        self._deletions.start(self._epoch - 1)

    def _present_device(self) -> AbstractContextManager[object]:
        """Makes the shard's device the present one: events and side streams go by that."""
        if self._stream is None or torch._C._cuda_getDevice() == self._device.index:
            return nullcontext()
        return torch.cuda.device(self._device)

    def check(self) -> None:
        """Wait for the device and raise what its kernels found since the last call.

        Raises:
            NonFiniteGradient: rows had a NaN or infinite gradient under nan_policy="raise";
                those rows were left as they were.
        """
        with self._turn():
            counters = self._memory.counters
            counters.send(self._layout, self._stream)
            counters.wait()
            self._tell()

    def _tell(self) -> None:
        """Raise for non-finite gradients that the counters at hand show."""
        found_K = self._memory.counters.known_KC[:, COUNT_ALARMED]
        total = int(found_K.sum())
        new, self._alarms_told = total - self._alarms_told, total
        if new:
            worst = self._specs[int(np.argmax(found_K))].name
            raise NonFiniteGradient(
                "gradient",
                got=f"NaN or infinity for {new} rows, most ever in table {worst!r}",
                allowed="finite values under nan_policy='raise'",
                remedy="Find the overflow (loss scale, learning rate), or choose "
                "nan_policy='skip' or 'clip'. Those rows were left as they were.",
            )

    def _call(self, groups: IdGroups) -> tuple[CallShape, CallGroups]:
        shape = self._shapes.of(groups)
        return shape, shape.groups(groups.ids_N)

    def _own(self, ticket: object) -> CudaTicket:
        if not isinstance(ticket, CudaTicket) or ticket.shard is not self or not ticket.live:
            raise native.foreign_ticket()
        if ticket.stream is not self._stream:
            retire(ticket.groups.ids_N, *ticket.parts)
        return ticket

    def _live_tickets(self) -> list[CudaTicket]:
        return [ticket for ticket in self._live if ticket.live]

    def _rates(self, ctx: StepContext) -> Tensor:
        """Rates of every table's segments, float64 [K, most segments]; sent when they change."""
        checks.rates(ctx, self._specs)
        flat = self._rate_list.at(ctx.global_step, ctx.learning_rates)
        if self._rates_kept is None or self._rates_kept[0] != flat:
            widest = max((len(spec.segments) for spec in self._specs), default=1)
            rates_KR = torch.zeros(len(self._specs), widest, dtype=torch.float64, device="cpu")
            at = 0
            for k, spec in enumerate(self._specs):
                count = len(spec.segments)
                rates_KR[k, :count] = torch.tensor(
                    flat[at : at + count], dtype=torch.float64, device="cpu"
                )
                at += count
            if self._rates_kept is not None:
                retire(self._rates_kept[1])
            self._rates_kept = (flat, sent(rates_KR, self._device))
        return self._rates_kept[1]


def drawn_incarnation() -> int:
    """An incarnation: random, in [1, 2^63)."""
    return secrets.randbelow((1 << 63) - 1) + 1


def _placed(device: torch.device) -> torch.device:
    """The device with its number; the CPU only where kernels are interpreted."""
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise DeviceUnavailable(
                "device of a GPU shard",
                got=str(device),
                allowed="a CUDA device that torch sees",
                remedy="Use device='cpu', or install a CUDA build of torch on a GPU machine.",
            )
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.device("cuda", index)
    import triton  # type: ignore[import-untyped]

    if device.type == "cpu" and triton.knobs.runtime.interpret:
        return device
    raise DeviceUnavailable(
        "device of a GPU shard",
        got=str(device),
        allowed="cuda, or cpu where Triton interprets its kernels",
        remedy="Use CpuShard, or set TRITON_INTERPRET=1 before triton is imported.",
    )
