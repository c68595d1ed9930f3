"""From a user's batch to a request: its features in order, checked, on the shard's device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shoal.errors import DTypeError, InputError, ShapeError, describe
from shoal.exchange import Request
from shoal.layouts import Feature
from shoal.ragged import KeyedRagged
from shoal.table.shard import PoolPlan

__all__ = ["Requests"]

_NO_LIMIT = 1 << 62


class Requests:
    """Makes the requests of one collection.

    Args:
        features: in the plan's order.
        tables_G: int32 [G], each feature's table, as the exchange counts them.
        plan: how the rows are pooled.
        device: where the shard takes ids.
    """

    def __init__(
        self, features: Sequence[Feature], tables_G: Tensor, plan: PoolPlan, device: torch.device
    ) -> None:
        self.tables_G = tables_G
        self._keys = tuple(feature.name for feature in features)
        self._limits_F = _limits(features)
        self._plan = plan
        self._device = device

    def of(self, batch: object) -> Request:
        """The request of one batch.

        Raises:
            InputError: features missing, a list longer than declared, or weights that ask for a
                gradient.
        """
        if not isinstance(batch, KeyedRagged):
            remedy = "Build one with KeyedRagged.from_lists or from_dict."
            got = type(batch).__name__
            raise DTypeError(describe("batch", got=got, allowed="KeyedRagged", remedy=remedy))
        ordered = batch if batch.keys == self._keys else self._select(batch)
        if self._limits_F is not None:
            self._check_lengths(batch, self._limits_F)
        if ordered.weights_N is not None:
            ordered = _plain_weights(ordered, ordered.weights_N)
        if ordered.values_N.device != self._device:
            ordered = _sent(ordered, self._device)
        return Request(batch, ordered, self.tables_G, self._plan)

    def _select(self, batch: KeyedRagged) -> KeyedRagged:
        missing = sorted(set(self._keys) - set(batch.keys))
        if missing:
            got = f"keys {list(batch.keys)} without {missing}"
            remedy = "A feature without ids is a key with empty lists."
            raise _bad("batch", got, f"all of {list(self._keys)}", remedy)
        return batch.select(self._keys)

    def _check_lengths(self, batch: KeyedRagged, limits_F: Tensor) -> None:
        longest_F = batch.longest
        if batch.keys != self._keys:
            longest_F = longest_F[[batch.keys.index(key) for key in self._keys]]
        too_long = (longest_F > limits_F).nonzero()
        if too_long.numel():
            f = int(too_long[0])
            raise ShapeError(
                describe(
                    f"ids of one example in feature {self._keys[f]!r}",
                    got=int(longest_F[f]),
                    allowed=f"at most {int(limits_F[f])} (max_length)",
                    remedy="Cut the lists, or raise Feature.max_length.",
                )
            )


def _limits(features: Sequence[Feature]) -> Tensor | None:
    if all(feature.max_length is None for feature in features):
        return None
    return torch.tensor(
        [_NO_LIMIT if f.max_length is None else f.max_length for f in features], device="cpu"
    )


def _plain_weights(ordered: KeyedRagged, weights_N: Tensor) -> KeyedRagged:
    """Weights as shards take them: float32, contiguous."""
    if weights_N.requires_grad:
        remedy = "Detach them; weights are data here."
        raise _bad("weights of a batch", "weights that require grad", "plain numbers", remedy)
    if weights_N.dtype is torch.float32 and weights_N.is_contiguous():
        return ordered
    return replace(ordered, weights_N=weights_N.to(torch.float32).contiguous())


def _sent(ordered: KeyedRagged, device: torch.device) -> KeyedRagged:
    """A batch on a shard's device, without waiting for it.

    Raises:
        DTypeError: it is on a device that its shard cannot read.
    """
    if device.type == "cpu":
        remedy = "Move it with .to('cpu'), or make the collection with device='cuda'."
        got = ordered.values_N.device
        raise DTypeError(describe("device of a batch", got=got, allowed=device, remedy=remedy))
    return ordered.pin_memory().to(device, non_blocking=True)


def _bad(what: str, got: object, allowed: object, remedy: str) -> InputError:
    return InputError(describe(what, got=got, allowed=allowed, remedy=remedy))
