"""How much of the longest tests a run does: all, or every n-th case with TEST_SHARE=n."""

from __future__ import annotations

import os

SHARE = int(os.environ.get("TEST_SHARE", "1"))


def share_of(cases: int, least: int) -> int:
    """How many of the cases run: a share of them, and enough for the test to say something."""
    return max(least, cases // SHARE)
