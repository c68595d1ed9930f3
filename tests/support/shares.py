"""How much of the longest tests a run does: all, or every n-th case with TEST_SHARE=n."""

from __future__ import annotations

import os

SHARE = int(os.environ.get("TEST_SHARE", "1"))
