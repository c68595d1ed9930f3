"""What may happen to a row, as frozen specs with reference arithmetic in plain torch.

Names are reached through their module (`rules.schedules.Cosine`).
"""

from __future__ import annotations

from shoal.rules import admission, compressors, expiry, initializers, optimizers, schedules

__all__ = ["admission", "compressors", "expiry", "initializers", "optimizers", "schedules"]
