"""Training batches drawn ahead by a thread, with the sampler's place as of the batch in use."""

from __future__ import annotations

import queue
import threading
from types import TracebackType
from typing import Any

from hrm.carry import Batch
from hrm.sampler import TrainSampler, pinned

__all__ = ["Prefetched"]


class Prefetched:
    """One iteration's batches; end it, or leave the `with`, before the sampler is used otherwise.

    Args:
        sampler: drawn from until its iteration ends.
        depth: number of batches drawn ahead.
        pin: put them into pinned memory.

    Attributes:
        state: of the sampler as if nothing had been drawn ahead; what a checkpoint saves.
    """

    def __init__(self, sampler: TrainSampler, *, depth: int = 4, pin: bool = False) -> None:
        self.state: dict[str, Any] = sampler.state_dict()
        self._sampler, self._pin = sampler, pin
        self._ready: queue.Queue[tuple[Batch | None, Any]] = queue.Queue(depth)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="hrm-batches", daemon=True)
        self._thread.start()

    def _draw(self) -> None:
        try:
            while not self._closing.is_set():
                batch = self._sampler.draw()
                if batch is not None and self._pin:
                    batch = pinned(batch)
                self._ready.put((batch, self._sampler.state_dict()))
                if batch is None:
                    return
        except Exception as error:  # noqa: BLE001 - raised where the batch is taken
            self._ready.put((None, error))

    def take(self) -> Batch | None:
        """The next batch; None at the end of the iteration, and from then on.

        Raises:
            DataError: as drawing it did.
        """
        batch, after = self._ready.get()
        if isinstance(after, Exception):
            self._ready.put((None, after))
            raise after
        self.state = after
        if batch is None:
            self._ready.put((None, after))
        return batch

    def close(self) -> None:
        """Stop drawing; the sampler goes back to the last batch that was taken."""
        self._closing.set()
        while self._thread.is_alive():
            self._thread.join(0.001)
            while not self._ready.empty():
                self._ready.get()
        self._sampler.load_state_dict(self.state)

    def __enter__(self) -> Prefetched:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
