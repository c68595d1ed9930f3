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
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype != torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).min)
    return tensor


def _kept(tensor: Tensor) -> Tensor:
    """All bits set, as it may be read as another dtype: NaN, or -1."""
    tensor.view(torch.uint8).fill_(255)
    return tensor


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Inside, new tensors and kept memory hold NaN, or integers that no result holds."""
    empty, empty_like, new_empty = torch.empty, torch.empty_like, Tensor.new_empty
    kept32, kept64 = _core.pooled32, _core.pooled64

    def filled_empty(*args: Any, **kwargs: Any) -> Tensor:
        return _filled(empty(*args, **kwargs))

    def filled_empty_like(*args: Any, **kwargs: Any) -> Tensor:
        return _filled(empty_like(*args, **kwargs))

    def filled_new_empty(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _filled(new_empty(tensor, *args, **kwargs))

    with (
        mock.patch.object(torch, "empty", filled_empty),
        mock.patch.object(torch, "empty_like", filled_empty_like),
        mock.patch.object(Tensor, "new_empty", filled_new_empty),
        mock.patch.object(_core, "pooled32", lambda *shape: _kept(kept32(*shape))),
        mock.patch.object(_core, "pooled64", lambda *shape: _kept(kept64(*shape))),
    ):
        yield
