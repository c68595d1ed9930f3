"""What training and evaluation loops are fed with, and examples in memory as tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.errors import DTypeError, InputError, ShapeError
from shoal.ragged import KeyedRagged, Ragged, pinned


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """B examples.

    Args:
        ids: F features over B examples.
        labels: float32 [B], 0..1.
        dense: float32 [B, num_dense], or None when there are no dense columns.
        event_time_s: latest event time of the examples, whole seconds since 1970.
        weights: float32 [B], or None: every example weighs 1.
        times_B: int64 [B], event time of each example in seconds; None: all at `event_time_s`.
        position: examples of the run consumed once this batch is, over all ranks; where a loader
            continues after it.
    """

    ids: KeyedRagged
    labels: Tensor
    dense: Tensor | None = None
    event_time_s: int = 0
    weights: Tensor | None = None
    times_B: Tensor | None = None
    position: int = 0

    @property
    def event_times_B(self) -> Tensor:
        """int64 [B]: event time of each example in seconds."""
        if self.times_B is not None:
            return self.times_B
        return torch.full_like(self.labels, self.event_time_s, dtype=torch.int64)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """On a device; what is there already is not copied."""
        ids = self.ids.to(device, non_blocking=non_blocking)
        return self._with(ids, lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Copy to pinned memory, so that a non-blocking `to("cuda")` overlaps.

        What is there, or on a device, is not copied, nor anything where there is no CUDA.
        """
        return self._with(self.ids.pin_memory(), pinned)

    def _with(self, ids: KeyedRagged, move: Callable[[Tensor], Tensor]) -> Batch:
        return replace(
            self,
            ids=ids,
            labels=move(self.labels),
            dense=None if self.dense is None else move(self.dense),
            weights=None if self.weights is None else move(self.weights),
            times_B=None if self.times_B is None else move(self.times_B),
        )


_Array = np.ndarray[Any, Any]


class TensorSource:
    """Examples in memory.

    Args:
        ids: feature name -> int64 [N], one id per example, or `Ragged` over N examples.
        labels: float [N], 0..1.
        dense: float [N, num_dense], finite, or None.
        times_s: int64 [N], event times in seconds, or None: all 0.
        weights: float [N], finite and at least 0, or None.

    Raises:
        InputError: no features, or a label, dense value or weight that is not so.
        ShapeError: not N everywhere.
        DTypeError: ids or times that are not int64.
    """

    def __init__(
        self,
        ids: Mapping[str, Tensor | Ragged],
        labels: Tensor,
        *,
        dense: Tensor | None = None,
        times_s: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> None:
        size = labels.shape[0] if labels.ndim == 1 else -1
        _check(ids, labels, size, {"dense": dense, "times_s": times_s, "weights": weights})
        self._features = tuple(ids)
        self._ids = dict(ids)
        self._labels = labels.float()
        self._dense = None if dense is None else dense.float().contiguous()
        self._times = (
            torch.zeros(size, dtype=torch.int64, device="cpu") if times_s is None else times_s
        )
        self._weights = None if weights is None else weights.float()
        _check_values("labels", self._labels, low=0.0, high=1.0)
        _check_values("dense", self._dense)
        _check_values("weights", self._weights, low=0.0)
        self._runs = _runs_of(self._ids)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the id features, in batch order."""
        return self._features

    @property
    def num_dense(self) -> int:
        """Dense columns."""
        return 0 if self._dense is None else self._dense.shape[1]

    def __len__(self) -> int:
        return self._labels.numel()

    def times(self) -> Tensor:
        """int64 [N]: event time of each example in seconds."""
        return self._times

    def take(self, rows_B: Tensor) -> Batch:
        """The examples of these numbers (int64 [B]), in this order."""
        # numpy, since a loader's thread must not take torch's threads from the training step.
        rows = rows_B.numpy()
        values: list[_Array] = []
        lengths: list[_Array] = []
        for part in self._runs:
            if isinstance(part, Ragged):
                chosen, lengths_B = _chosen(part, rows)
                values.append(chosen)
                lengths.append(lengths_B)
            else:
                picked_FB = part[:, rows]
                values.append(picked_FB.reshape(-1))
                lengths.append(np.ones(picked_FB.size, dtype=np.int64))
        offsets = np.zeros(len(self._features) * rows.size + 1, dtype=np.int64)
        np.cumsum(np.concatenate(lengths), out=offsets[1:])
        times_B = self._times.numpy()[rows]
        return Batch(
            ids=KeyedRagged(
                self._features,
                torch.from_numpy(np.concatenate(values)),
                torch.from_numpy(offsets),
            ),
            labels=_rows_of(self._labels, rows),
            dense=None if self._dense is None else _rows_of(self._dense, rows),
            event_time_s=int(times_B.max(initial=0)),
            weights=None if self._weights is None else _rows_of(self._weights, rows),
            times_B=torch.from_numpy(times_B),
        )

    def select(self, rows_M: Tensor) -> TensorSource:
        """A copy of the examples of these numbers (int64 [M]), in this order."""
        ids: dict[str, Tensor | Ragged] = {}
        for name, part in self._ids.items():
            if isinstance(part, Ragged):
                values, lengths_M = map(torch.from_numpy, _chosen(part, rows_M.numpy()))
                ids[name] = Ragged.from_lengths(values, lengths_M)
            else:
                ids[name] = part[rows_M]
        return TensorSource(
            ids,
            self._labels[rows_M],
            dense=None if self._dense is None else self._dense[rows_M],
            times_s=self._times[rows_M],
            weights=None if self._weights is None else self._weights[rows_M],
        )

    def _parts(self) -> tuple[dict[str, Tensor | Ragged], Tensor, dict[str, Tensor | None]]:
        more = {"dense": self._dense, "times_s": self._times, "weights": self._weights}
        return self._ids, self._labels, more


def join(parts: Sequence[TensorSource]) -> TensorSource:
    """One source of several with the same features, one after the other.

    Raises:
        InputError: no parts, or parts of different features.
    """
    if len({part.features for part in parts}) != 1:
        got = [part.features for part in parts]
        remedy = "Join sources of one recipe."
        raise InputError("features of sources", got=got, allowed="the same in all", remedy=remedy)
    if len(parts) == 1:
        return parts[0]
    every = [part._parts() for part in parts]
    ids: dict[str, Tensor | Ragged] = {}
    for name in parts[0].features:
        ids[name] = _appended([own[name] for own, _, _ in every])
    more = {key: _maybe_cat([own[key] for _, _, own in every]) for key in every[0][2]}
    return TensorSource(ids, torch.cat([labels for _, labels, _ in every]), **more)


def _runs_of(ids: Mapping[str, Tensor | Ragged]) -> list[_Array | Ragged]:
    """Neighbouring one-id features as one [F', N] array, so that taking them is one gather."""
    runs: list[_Array | Ragged] = []
    single: list[_Array] = []
    for part in ids.values():
        if isinstance(part, Ragged):
            if single:
                runs.append(np.stack(single))
                single = []
            runs.append(part)
        else:
            single.append(part.numpy())
    if single:
        runs.append(np.stack(single))
    return runs


def _chosen(part: Ragged, rows_B: _Array) -> tuple[_Array, _Array]:
    """Ids [N] and lengths [B] of some examples of a jagged feature."""
    offsets = part.offsets_B1.numpy()
    starts_B = offsets[rows_B]
    lengths_B = offsets[rows_B + 1] - starts_B
    ends_B = np.cumsum(lengths_B)
    count = int(ends_B[-1]) if ends_B.size else 0
    at_N = np.arange(count) + np.repeat(starts_B - (ends_B - lengths_B), lengths_B)
    return part.values.numpy()[at_N], lengths_B


def _rows_of(tensor: Tensor, rows: _Array) -> Tensor:
    return torch.from_numpy(tensor.numpy()[rows])


def _appended(parts: Sequence[Tensor | Ragged]) -> Tensor | Ragged:
    jagged = [part for part in parts if isinstance(part, Ragged)]
    if jagged:
        values = torch.cat([part.values for part in jagged])
        return Ragged.from_lengths(values, torch.cat([part.lengths for part in jagged]))
    return torch.cat([part for part in parts if isinstance(part, Tensor)])


def _maybe_cat(parts: Sequence[Tensor | None]) -> Tensor | None:
    given = [part for part in parts if part is not None]
    return torch.cat(given) if given else None


def _check(
    ids: Mapping[str, Tensor | Ragged],
    labels: Tensor,
    size: int,
    more: Mapping[str, Tensor | None],
) -> None:
    if not ids:
        remedy = "Give at least one feature."
        raise InputError("id features", got="none", allowed="1 or more", remedy=remedy)
    if size < 0:
        raise _shape("labels", labels, "[N]")
    for name, part in ids.items():
        if isinstance(part, Ragged):
            if part.batch_size != size:
                raise _shape(f"lists of {name!r}", part.offsets_B1[1:], f"[{size}]")
        elif part.shape != (size,):
            raise _shape(f"ids of {name!r}", part, f"[{size}]")
        elif part.dtype != torch.int64:
            raise _dtype(f"ids of {name!r}", part)
    for name, tensor in more.items():
        if tensor is None:
            continue
        dims = 2 if name == "dense" else 1
        if tensor.ndim != dims or tensor.shape[0] != size:
            raise _shape(name, tensor, f"[{size}]" if dims == 1 else f"[{size}, num_dense]")
    times = more["times_s"]
    if times is not None and times.dtype != torch.int64:
        raise _dtype("times_s", times)


def _check_values(
    what: str, values: Tensor | None, *, low: float = -np.inf, high: float = np.inf
) -> None:
    if values is None:
        return
    own = values.numpy()
    good = (own >= low) & (own <= high) & np.isfinite(own)
    if not good.all():
        at = tuple(np.argwhere(~good)[0].tolist())
        allowed = f"{low:g}..{high:g}, and finite"
        remedy = "Leave the example out, or give a value that stands for 'unknown'."
        place = ", ".join(map(str, at))
        raise InputError(f"{what}[{place}]", got=own[at], allowed=allowed, remedy=remedy)


def _shape(what: str, tensor: Tensor, allowed: str) -> ShapeError:
    remedy = "Give one row per example."
    return ShapeError(f"shape of {what}", got=list(tensor.shape), allowed=allowed, remedy=remedy)


def _dtype(what: str, tensor: Tensor) -> DTypeError:
    return DTypeError(f"dtype of {what}", got=tensor.dtype, allowed="int64", remedy="Use .long().")
