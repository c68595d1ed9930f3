"""Triton decides at import whether it interprets; without a GPU it must, so this comes first."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
