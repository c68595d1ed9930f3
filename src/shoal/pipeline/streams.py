"""Where the stages of a run are put on CUDA: beside each other, yet one after the other.

On CUDA the early stages of later batches go to a stream of their own, which runs beside the
forward and backward of the present one. Each early stage first waits for all that the main stream
was given, and the main stream waits for all early stages before it applies, evicts or cuts, so a
shard's verbs run one after the other and memory freed on either stream is free on both.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["Lanes"]


class Lanes:
    """The streams of a run.

    device: where batches go.
    beside: early stages run on a stream of their own; only on CUDA.
    """

    def __init__(self, device: torch.device, *, beside: bool) -> None:
        self.device = device
        self._early: torch.cuda.Stream | None = None
        if beside and device.type == "cuda":
            self._early = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def streams(self) -> tuple[torch.cuda.Stream, ...]:
        """All that read batches."""
        if self.device.type != "cuda":
            return ()
        main = torch.cuda.current_stream(self.device)
        return (main,) if self._early is None else (main, self._early)

    def early(self) -> AbstractContextManager[Any]:
        """Run on the early stream, after all that the main stream was given."""
        if self._early is None:
            return nullcontext()
        self._early.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._early)

    def mark(self) -> torch.cuda.Event | None:
        """A point in the early stream."""
        return None if self._early is None else self._early.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Let the present stream wait for a point in another."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def join(self) -> None:
        """Let the main stream wait for all early stages."""
        if self._early is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._early)
