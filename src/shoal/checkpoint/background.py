"""Threads that work beside training."""

from __future__ import annotations

import os
import sys
import threading

__all__ = ["give_way"]

_NICENESS = 10


def give_way() -> None:
    """Let this thread, and those it starts, run when nobody else wants the core.

    Only Linux has a niceness for each thread; elsewhere nothing is changed.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        own = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, max(own, _NICENESS))
