"""Memory that was never written shows: new tensors come filled with what no result holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shoal import _core

__all__ = ["poisoned"]


def _filled(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point():
        return tensor.fill_(float("nan"))
    return tensor.fill_(torch.iinfo(tensor.dtype).min) if tensor.dtype != torch.bool else tensor


def _kept(tensor: Tensor) -> Tensor:
    """All bits set, as it may be read as another dtype: NaN, or -1."""
    tensor.view(torch.uint8).fill_(255)
    return tensor


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Inside, new tensors and kept memory hold NaN, or integers that no result holds."""
    empty, new_empty = torch.empty, Tensor.new_empty
    kept32, kept64 = _core.pooled32, _core.pooled64

    def filled_empty(*args: Any, **kwargs: Any) -> Tensor:
        return _filled(empty(*args, **kwargs))

    def filled_new_empty(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _filled(new_empty(tensor, *args, **kwargs))

    with (
        mock.patch.object(torch, "empty", filled_empty),
        mock.patch.object(Tensor, "new_empty", filled_new_empty),
        mock.patch.object(_core, "pooled32", lambda *shape: _kept(kept32(*shape))),
        mock.patch.object(_core, "pooled64", lambda *shape: _kept(kept64(*shape))),
    ):
        yield
