"""Runs of a table's rows by the numbers in which it handed them out, as scans take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.kernels.row_changes import SPAN_ROWS, SPAN_WORDS
from shoal.kernels.transfer import sent

__all__ = ["Span", "blocks_of_spans"]


@dataclass(frozen=True, slots=True)
class Span:
    """Rows [first, stop) of a table, by the numbers in which it handed them out."""

    table: int
    first: int
    stop: int

    @property
    def blocks(self) -> int:
        """How many programs look at it."""
        return -(-(self.stop - self.first) // SPAN_ROWS)


def blocks_of_spans(spans: Sequence[Span], device: torch.device) -> Tensor:
    """Spans cut into what one program looks at: int64 [B, SPAN_WORDS] on the device."""
    parts = [_blocks(span) for span in spans]
    words_BW = np.concatenate(parts) if parts else np.empty((0, SPAN_WORDS), dtype=np.int64)
    return sent(torch.from_numpy(words_BW), device)


def _blocks(span: Span) -> NDArray[np.int64]:
    firsts_B = np.arange(span.first, span.stop, SPAN_ROWS, dtype=np.int64)
    words_BW = np.empty((len(firsts_B), SPAN_WORDS), dtype=np.int64)
    words_BW[:, 0], words_BW[:, 1] = span.table, firsts_B
    words_BW[:, 2] = np.minimum(firsts_B + SPAN_ROWS, span.stop)
    return words_BW
