"""Small host data on its way to a device, and memory on its way back; needs no Triton."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_SLOTS = 64
_PART = 16  # slots that share an event
_SLOT_WORDS = 1024


def sent(values: Tensor | Sequence[int], device: torch.device) -> Tensor:
    """A host tensor, or numbers as int64, on a device.

    Goes to CUDA from pinned memory, so that the host does not wait. A captured graph would
    replay the copy from memory that is gone: operators that call this say `from_host`.
    """
    made = (
        values
        if isinstance(values, Tensor)
        else torch.tensor(values, dtype=torch.int64, device="cpu")
    )
    if made.device.type == "cpu" and device.type == "cuda":
        return made.pin_memory().to(device, non_blocking=True)
    return made.to(device)


def retire(*tensors: Tensor) -> None:
    """Have memory that is about to be dropped reused only after all that the present stream has
    been given: it may have been allocated on another stream, which does not wait for this one.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


class HostCopy(NamedTuple):
    """A copy on its way to the host, and the event after which it is there; None: it is."""

    host: Tensor
    event: torch.cuda.Event | None

    def arrived(self, *, wait: bool) -> bool:
        """Whether it has arrived; with `wait`, it has."""
        if self.event is None:
            return True
        if wait:
            self.event.synchronize()
        return wait or bool(self.event.query())  # type: ignore[no-untyped-call]


def copy_to_host(tensor: Tensor, into: Tensor | None = None) -> HostCopy:
    """Start to copy what a tensor holds to the host; nobody waits.

    into: pinned memory for it; None: further memory.
    """
    if tensor.device.type != "cuda":
        return HostCopy(tensor.clone(), None)
    if into is None:
        into = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")
    into.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tensor.device))
    return HostCopy(into, event)


class _Ring:
    """Pinned slots of one stream, used in turn and again only after their copies have run."""

    def __init__(self) -> None:
        block = torch.empty(_SLOTS * _SLOT_WORDS, dtype=torch.int64, pin_memory=True, device="cpu")
        self._slots = torch.split(block, _SLOT_WORDS)
        self._arrays = [slot.numpy() for slot in self._slots]
        self._events: list[Any] = [None] * (_SLOTS // _PART)
        self._next = 0
        self._lock = threading.Lock()

    def send(self, words: Any, device: torch.device) -> Tensor:
        size = len(words)
        out = torch.empty(size, dtype=torch.int64, device=device)
        with self._lock:
            at = self._next
            self._next = (at + 1) % _SLOTS
            event = self._events[at // _PART]
            if at % _PART == 0 and event is not None:
                event.synchronize()
            self._arrays[at][:size] = words
            out.copy_(self._slots[at][:size], non_blocking=True)
            if at % _PART == _PART - 1:
                event = torch.cuda.Event() if event is None else event  # type: ignore[no-untyped-call]
                self._events[at // _PART] = event
                # The present device may be another one.
                event.record(torch.cuda.current_stream(device))
        return out


_RINGS: dict[tuple[int, int], _Ring] = {}


def staged(words: Any, device: torch.device) -> Tensor:
    """int64 words of a numpy array on a device, for data that changes with every call.

    Cheaper than `sent`: the pinned memory is there already.
    """
    if device.type != "cuda":
        return torch.from_numpy(words).to(device)
    if len(words) > _SLOT_WORDS:
        return sent(torch.from_numpy(words), device)
    index = torch.cuda.current_device() if device.index is None else device.index
    key = index, torch._C._cuda_getCurrentRawStream(index)
    ring = _RINGS.get(key)
    if ring is None:
        ring = _RINGS[key] = _Ring()
    return ring.send(words, device)
