"""Devices that tests of ranks run on: the CPU, and a GPU for each of two ranks."""

from __future__ import annotations

import pytest
import torch

__all__ = ["DEVICES"]

_GPUS = torch.cuda.device_count()
DEVICES = (
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.timeout(600),
            pytest.mark.skipif(_GPUS < 2, reason=f"needs 2 GPUs, {_GPUS} here"),
        ],
    ),
)
