"""One method of a GPU shard at a time, each after the last one whatever stream that ran on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch

from shoal.table import native


class Turns:
    """`with turns:` is one turn; turns may nest.

    device: the shard's.

    Attributes:
        lock: who holds it has the turn.
        stream: of the last turn, which the present one has made current; None when interpreted.

    Raises:
        OutOfDeviceMemory: on leaving, where an allocation failed.
    """

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.RLock()
        self._device = device
        self._guards: list[torch.cuda.device | None] = []
        # Whatever stream the first turn runs on, it waits for what was started here.
        on_gpu = device.type == "cuda"
        self.stream = torch.cuda.current_stream(device) if on_gpu else None

    def __enter__(self) -> None:
        self.lock.acquire()
        if self.stream is None:
            return
        self._guards.append(None)
        try:
            self._guards[-1] = self._present_device()
            self._follow(self.stream)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def _present_device(self) -> torch.cuda.device | None:
        """Makes the shard's device the present one: events and side streams go by that."""
        if torch._C._cuda_getDevice() == self._device.index:
            return None
        guard = torch.cuda.device(self._device)
        guard.__enter__()  # type: ignore[no-untyped-call]
        return guard

    def _follow(self, last: torch.cuda.Stream) -> None:
        # Asking for the stream's number costs a tenth of asking for the stream.
        if torch._C._cuda_getCurrentRawStream(self._device.index) != last.cuda_stream:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_stream(last)
            self.stream = stream

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        guard = self._guards.pop() if self._guards else None
        try:
            if guard is not None:
                guard.__exit__(kind, error, trace)
        finally:
            self.lock.release()
        if isinstance(error, torch.OutOfMemoryError):
            raise native.no_memory("a method of a GPU shard", self._device, error) from error

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A short turn of a thread that reads during training: on the stream of the last turn,
        so that the next one has nothing to wait for. The caller's stream waits for it instead.

        Raises:
            OutOfDeviceMemory: an allocation failed.
        """
        with self.lock, native.enough_memory("a snapshot of a GPU shard", self._device):
            if self.stream is None:
                yield
                return
            with torch.cuda.device(self._device):
                own = torch.cuda.current_stream(self._device)
                with torch.cuda.stream(self.stream):
                    yield
                if own != self.stream:
                    own.wait_stream(self.stream)
