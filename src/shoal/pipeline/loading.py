"""A thread that reads a source's batches ahead and sends them on their way to the device."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from shoal.pipeline.batches import hold_for, moved, pinned

__all__ = ["Loader", "Reading"]


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """One answer of a source.

    Args:
        index: which batch was asked for.
        found: False when the source was at its end, or failed.
        batch: the batch, on the device or on its way there.
        weight: what it weighs in a loss.
        error: what the source raised instead.
        sent: on CUDA, the event after which the batch is there.
    """

    index: int
    found: bool
    batch: Any = None
    weight: float = 0.0
    error: BaseException | None = None
    sent: torch.cuda.Event | None = None


class Loader:
    """Reads one iterator in a thread of its own, in the order asked.

    Args:
        source: where batches come from; only the thread touches it.
        device: where they are sent; the host does not wait for the copies.
        weigh: a batch's weight, measured before it is sent.
        held_for: streams that will read the batches, on CUDA.
    """

    def __init__(
        self,
        source: Iterator[Any],
        device: torch.device,
        weigh: Callable[[Any], float],
        held_for: tuple[torch.cuda.Stream, ...] = (),
    ) -> None:
        self._asked: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Reading] = queue.SimpleQueue()
        self._reader = _Reader(source, device, weigh, held_for)
        # The thread holds no reference to this object, so that dropping it ends the thread.
        self._close = weakref.finalize(self, self._reader.stop, self._asked)
        self.thread = threading.Thread(
            target=self._reader.run,
            args=(self._asked, self._answers),
            name="shoal-loader",
            daemon=True,
        )
        self.thread.start()

    def ask(self, index: int) -> None:
        """Ask for the next batch."""
        self._asked.put(index)

    def take(self) -> Reading:
        """The next answer, in the order asked; waits for it."""
        return self._answers.get()

    def ready(self) -> bool:
        """Whether `take` would not wait."""
        return not self._answers.empty()

    def close(self) -> None:
        """End the thread, after the batch it is reading; a second call does nothing."""
        self._close()


class _Reader:
    def __init__(
        self,
        source: Iterator[Any],
        device: torch.device,
        weigh: Callable[[Any], float],
        held_for: tuple[torch.cuda.Stream, ...],
    ) -> None:
        self._source = source
        self._device = device
        self._weigh = weigh
        self._held_for = held_for
        self._ended = False
        self._stopped = False

    def stop(self, asked: queue.SimpleQueue[int | None]) -> None:
        """Leave what else was asked for in the source, and end `run`."""
        self._stopped = True
        asked.put(None)

    def run(
        self, asked: queue.SimpleQueue[int | None], answers: queue.SimpleQueue[Reading]
    ) -> None:
        stream = None
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        while (index := asked.get()) is not None and not self._stopped:
            answers.put(self._read(index, stream))

    def _read(self, index: int, stream: torch.cuda.Stream | None) -> Reading:
        if self._ended:
            return Reading(index, False)
        try:
            batch = next(self._source)
        except StopIteration:
            self._ended = True
            return Reading(index, False)
        except BaseException as error:  # noqa: BLE001 - raised where the batch is needed
            return self._failed(index, error)
        try:
            return self._sent(index, batch, stream)
        except StopIteration as error:  # not the end of the data
            failure = RuntimeError(f"StopIteration while batch {index} was weighed or moved")
            failure.__cause__ = error
            return self._failed(index, failure)
        except BaseException as error:  # noqa: BLE001 - as above
            return self._failed(index, error)

    def _failed(self, index: int, error: BaseException) -> Reading:
        self._ended = True
        return Reading(index, False, error=error)

    def _sent(self, index: int, batch: Any, stream: torch.cuda.Stream | None) -> Reading:
        weight = self._weigh(batch)
        if stream is None:
            return Reading(index, True, moved(batch, self._device), weight)
        with torch.cuda.stream(stream):
            sent = moved(pinned(batch), self._device)
            for reader in self._held_for:
                hold_for(sent, reader)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        return Reading(index, True, sent, weight, sent=event)
