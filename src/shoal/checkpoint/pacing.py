"""How much of the machine a save beside training takes."""

from __future__ import annotations

import os
import threading
import time

__all__ = ["Pace"]

# Of the processors that this process may use, to read rows. Measured on two: rows read at the full
# speed of one core lengthen steps by a fifth, through memory and caches that both share; at a third
# of one core by less than a tenth.
_PART = 1 / 12


class Pace:
    """Rests of the thread that reads rows, so that it is busy for a part of the time only.

    On twelve processors or more it takes none. For one thread; `hurry` comes from any.
    """

    def __init__(self) -> None:
        self._share = 1.0
        self._hurried = threading.Event()
        self._since_s = 0.0

    def begin(self) -> None:
        """Rest from now on; the thread that rests calls it."""
        self._share = min(1.0, len(os.sched_getaffinity(0)) * _PART)
        self._since_s = time.thread_time()

    def rest(self) -> None:
        """Sleep as long as the work since the last rest asks for."""
        if self._share < 1 and not self._hurried.is_set():
            busy_s = time.thread_time() - self._since_s
            self._hurried.wait(busy_s * (1 / self._share - 1))
            self._since_s = time.thread_time()

    def hurry(self) -> None:
        """Rest no more: somebody waits for the end."""
        self._hurried.set()
