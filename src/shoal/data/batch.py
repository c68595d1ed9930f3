"""What training and evaluation loops are fed with, and examples in memory as tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from shoal._core import ops as core
from shoal.address import address
from shoal.errors import DTypeError, InputError, ShapeError
from shoal.models.tasks import Negatives
from shoal.ragged import KeyedRagged, Ragged, pinned

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """B examples.

    Args:
        ids: F features over B examples.
        labels: float32 [B], 0..1; of several labels the first. NaN where there is none, which only
            predictions allow.
        more_labels: float32 [B, T - 1], the others; None without any.
        dense: float32 [B, num_dense], or None when there are no dense columns.
        event_time_s: latest event time of the examples, whole seconds since 1970.
        weights: float32 [B], or None: every example weighs 1.
        times_B: int64 [B], event time of each example in seconds; None: all at `event_time_s`.
        groups_B: int64 [B], whom each example belongs to, for metrics by group; None: nobody.
        position: examples of the run consumed once this batch is, over all ranks; where a loader
            continues after it.
        negatives: of items that follow the B examples in `ids`; None: there are none.
        places: of a stream: where this rank's partitions continue after it.
        rates: float32 [B], with which chance an example like this one was kept if it is a
            negative (`shoal.models.tasks.sampled_logits`); None: all were.
        pauses: no batch of examples: a stream is silent, and what came before is to be trained
            and saved first.
        keys: columns that come along as they are, one row an example; None: none.
    """

    ids: KeyedRagged
    labels: Tensor
    dense: Tensor | None = None
    event_time_s: int = 0
    weights: Tensor | None = None
    times_B: Tensor | None = None
    groups_B: Tensor | None = None
    position: int = 0
    more_labels: Tensor | None = None
    negatives: Negatives | None = None
    places: Mapping[str, tuple[int, int]] | None = None
    rates: Tensor | None = None
    pauses: bool = False
    keys: pa.Table | None = None

    @property
    def labels_BT(self) -> Tensor:
        """float32 [B, T]: all labels."""
        first_B1 = self.labels.unsqueeze(1)
        return first_B1 if self.more_labels is None else torch.cat([first_B1, self.more_labels], 1)

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
            more_labels=None if self.more_labels is None else move(self.more_labels),
            dense=None if self.dense is None else move(self.dense),
            weights=None if self.weights is None else move(self.weights),
            times_B=None if self.times_B is None else move(self.times_B),
            groups_B=None if self.groups_B is None else move(self.groups_B),
            negatives=None if self.negatives is None else self.negatives.moved(move),
            rates=None if self.rates is None else move(self.rates),
        )


_Array = np.ndarray[Any, Any]
LEAST_RATE = 1e-9
"""Chances of negatives to be kept are not lower."""


class TensorSource:
    """Examples in memory.

    Args:
        ids: feature name -> int64 [N], one id per example, or `Ragged` over N examples.
        labels: float [N], 0..1.
        more_labels: float [N, T - 1], 0..1: others of each example, or None.
        dense: float [N, num_dense], finite, or None.
        times_s: int64 [N], event times in seconds, or None: all 0.
        groups: int64 [N], whom each belongs to, for metrics by group, or None.
        weights: float [N], finite and at least 0, or None.
        id_weights: feature name -> float32, one for each of its ids; ids of other features weigh 1.
        rates: float [N], above 0 and up to 1, as `Batch.rates`, or None.
        keys: N rows, as `Batch.keys`, or None.
        unlabelled: labels may be NaN, too.

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
        groups: Tensor | None = None,
        weights: Tensor | None = None,
        id_weights: Mapping[str, Tensor] | None = None,
        more_labels: Tensor | None = None,
        rates: Tensor | None = None,
        keys: pa.Table | None = None,
        unlabelled: bool = False,
    ) -> None:
        size = labels.shape[0] if labels.ndim == 1 else -1
        others = {"times_s": times_s, "groups": groups, "weights": weights, "rates": rates}
        _check(ids, labels, size, {"dense": dense, "more_labels": more_labels, **others})
        self._features = tuple(ids)
        self._ids = dict(ids)
        self._labels = labels.float()
        self._dense = None if dense is None else dense.float().contiguous()
        self._times = (
            torch.zeros(size, dtype=torch.int64, device="cpu") if times_s is None else times_s
        )
        self._groups = groups
        self._weights = None if weights is None else weights.float()
        self._rates = None if rates is None else rates.float()
        self._more_labels = None if more_labels is None else more_labels.float().contiguous()
        self._keys, self._unlabelled = keys, unlabelled
        _check_values("labels", self._labels, low=0.0, high=1.0, gaps=unlabelled)
        _check_values("more_labels", self._more_labels, low=0.0, high=1.0, gaps=unlabelled)
        _check_values("dense", self._dense)
        _check_values("weights", self._weights, low=0.0)
        _check_values("rates", self._rates, low=LEAST_RATE, high=1.0)
        self._id_weights = {
            name: own.float().contiguous() for name, own in (id_weights or {}).items()
        }
        self._check_id_weights()
        self._runs = list(self._made_runs())
        self._described()  # refuses ids that are not in memory

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
        """The examples of these numbers (int64 [B]), in this order.

        Raises:
            InputError: a number that no example has, or offsets that changed since.
            ShapeError: not int64 [B].
        """
        # Not torch, since a loader's thread must not take torch's threads from the training step.
        rows = checked_rows(rows_B, len(self))
        rows_B, runs = rows_B.contiguous(), self._described()
        given = address(runs), len(runs)
        drawn = address(rows_B), rows_B.numel()
        offsets_FB1 = _ints(len(self._features) * rows_B.numel() + 1)
        count = core.example_offsets(*given, *drawn, address(offsets_FB1))
        if count < 0:
            got, remedy = int(rows[-1 - count]), "Do not change a source's tensors."
            raise InputError("lists of an example", got, "offsets as they were", remedy)
        values_N = _ints(count)
        weights_N = (
            torch.empty(count, dtype=torch.float32, device="cpu") if self._id_weights else None
        )
        weights = 0 if weights_N is None else address(weights_N)
        core.example_ids(*given, *drawn, address(offsets_FB1), address(values_N), weights)
        times_B = self._times.numpy()[rows]
        return Batch(
            ids=KeyedRagged(self._features, values_N, offsets_FB1, weights_N),
            labels=_rows_of(self._labels, rows),
            dense=_maybe_rows(self._dense, rows),
            event_time_s=int(times_B.max(initial=0)),
            weights=_maybe_rows(self._weights, rows),
            times_B=torch.from_numpy(times_B),
            groups_B=_maybe_rows(self._groups, rows),
            more_labels=_maybe_rows(self._more_labels, rows),
            rates=_maybe_rows(self._rates, rows),
            keys=_maybe_keys(self._keys, rows),
        )

    def _made_runs(self) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None, int]]:
        """Ids, offsets and weights of them if any, and the number of features, as they follow.

        Neighbouring features of one id lie together: an example's ids are side by side.
        """
        single: dict[str, _Array] = {}
        for name, part in (*self._ids.items(), ("", None)):
            if isinstance(part, Tensor):
                single[name] = part.numpy()
                continue
            if single:
                together = torch.from_numpy(np.stack([*single.values()], axis=1))
                self._ids |= zip(single, together.unbind(1), strict=True)  # not in memory twice
                yield together, None, None, len(single)
                single = {}
            if part is not None:
                offsets, weights = part.offsets_B1.contiguous(), self._id_weights.get(name)
                yield part.values.contiguous(), offsets, weights, 1

    def _described(self) -> Tensor:
        """int64 [runs, 5]: `ExampleIds` of the core."""
        words = []
        for ids, offsets, weights, width in self._runs:
            others = [0 if one is None else address(one) for one in (offsets, weights)]
            words.append([address(ids), *others, width, ids.numel()])
        return torch.tensor(words, dtype=torch.int64, device="cpu")

    def _check_id_weights(self) -> None:
        for name, own in self._id_weights.items():
            part = self._ids.get(name)
            size = part.values.numel() if isinstance(part, Ragged) else -1
            if own.shape != (size,):
                raise _shape(f"weights of ids of {name!r}", own, "one for each id of its lists")
            _check_values(f"weights of ids of {name!r}", own)

    def select(self, rows_M: Tensor) -> TensorSource:
        """A copy of the examples of these numbers (int64 [M]), in this order."""
        ids: dict[str, Tensor | Ragged] = {}
        id_weights: dict[str, Tensor] = {}
        rows = checked_rows(rows_M, len(self))
        for name, part in self._ids.items():
            if isinstance(part, Ragged):
                at_N, lengths_M = map(torch.from_numpy, places_of(part, rows))
                ids[name] = Ragged.from_lengths(part.values[at_N], lengths_M)
                if name in self._id_weights:
                    id_weights[name] = self._id_weights[name][at_N]
            else:
                ids[name] = part[rows_M]
        return TensorSource(
            ids,
            self._labels[rows_M],
            dense=None if self._dense is None else self._dense[rows_M],
            times_s=self._times[rows_M],
            groups=None if self._groups is None else self._groups[rows_M],
            weights=None if self._weights is None else self._weights[rows_M],
            id_weights=id_weights,
            more_labels=None if self._more_labels is None else self._more_labels[rows_M],
            rates=None if self._rates is None else self._rates[rows_M],
            keys=_maybe_keys(self._keys, rows),
            unlabelled=self._unlabelled,
        )

    def with_keys(self, keys: pa.Table) -> TensorSource:
        """The same examples with `keys`, one row each."""
        own = copy(self)
        own._keys = keys
        return own


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
    ids = {name: _appended([part._ids[name] for part in parts]) for name in parts[0].features}
    weighted = parts[0]._id_weights
    return TensorSource(
        ids,
        torch.cat([part._labels for part in parts]),
        dense=_maybe_cat([part._dense for part in parts]),
        times_s=torch.cat([part._times for part in parts]),
        groups=_maybe_cat([part._groups for part in parts]),
        weights=_maybe_cat([part._weights for part in parts]),
        id_weights={
            name: torch.cat([part._id_weights[name] for part in parts]) for name in weighted
        },
        more_labels=_maybe_cat([part._more_labels for part in parts]),
        rates=_maybe_cat([part._rates for part in parts]),
        keys=_joined_keys([part._keys for part in parts]),
        unlabelled=any(part._unlabelled for part in parts),
    )


def checked_rows(rows_B: Tensor, size: int, what: str = "number of an example") -> _Array:
    """Numbers of examples, each below `size`.

    Raises:
        InputError: a number that no example has.
        ShapeError: not int64 [B].
    """
    if rows_B.ndim != 1 or rows_B.dtype != torch.int64:
        got, remedy = f"{rows_B.dtype} {list(rows_B.shape)}", "Give one number per example."
        raise ShapeError(what, got=got, allowed="int64 [B]", remedy=remedy)
    rows = rows_B.numpy()
    bad = rows.view(np.uint64) >= size  # also below 0
    if bad.any():
        got, remedy = str(rows[bad][0]), "Take examples of this source."
        raise InputError(what, got=got, allowed=f"0..{size - 1}", remedy=remedy)
    return rows


def places_of(part: Ragged, rows_B: _Array) -> tuple[_Array, _Array]:
    """Where the ids of some examples of a jagged feature are, [N], and their lengths [B]."""
    offsets = part.offsets_B1.numpy()
    starts_B = offsets[rows_B]
    lengths_B = offsets[rows_B + 1] - starts_B
    ends_B = np.cumsum(lengths_B)
    count = int(ends_B[-1]) if ends_B.size else 0
    return np.arange(count) + np.repeat(starts_B - (ends_B - lengths_B), lengths_B), lengths_B


def _ints(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.int64, device="cpu")


def _rows_of(tensor: Tensor, rows: _Array) -> Tensor:
    return torch.from_numpy(tensor.numpy().take(rows, axis=0))


def _maybe_rows(tensor: Tensor | None, rows: _Array) -> Tensor | None:
    return None if tensor is None else _rows_of(tensor, rows)


def _appended(parts: Sequence[Tensor | Ragged]) -> Tensor | Ragged:
    single = [part for part in parts if isinstance(part, Tensor)]
    if len(single) == len(parts):
        return torch.cat(single)
    # One id an example where nothing was missing, lists elsewhere.
    values = [part.values if isinstance(part, Ragged) else part for part in parts]
    lengths = [
        part.lengths if isinstance(part, Ragged) else torch.ones_like(part) for part in parts
    ]
    return Ragged.from_lengths(torch.cat(values), torch.cat(lengths))


def _maybe_cat(parts: Sequence[Tensor | None]) -> Tensor | None:
    given = [part for part in parts if part is not None]
    return torch.cat(given) if given else None


def _maybe_keys(keys: pa.Table | None, rows: _Array) -> pa.Table | None:
    """Rows of a table, by slices: Arrow takes single rows of some types only."""
    if keys is None or not rows.size:
        return keys and keys.slice(0, 0)
    runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
    return _joined_keys([keys.slice(run[0], run.size) for run in runs])


def _joined_keys(parts: Sequence[pa.Table | None]) -> pa.Table | None:
    given = [part for part in parts if part is not None]
    if not given:
        return None
    import pyarrow as pa

    # A field may be nullable in one file only.
    return pa.concat_tables(given, promote_options="default")


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
            part.validate()
        elif part.shape != (size,):
            raise _shape(f"ids of {name!r}", part, f"[{size}]")
        elif part.dtype != torch.int64:
            raise _dtype(f"ids of {name!r}", part)
    for name, tensor in more.items():
        if tensor is None:
            continue
        dims = 2 if name in ("dense", "more_labels") else 1
        if tensor.ndim != dims or tensor.shape[0] != size:
            raise _shape(name, tensor, f"[{size}]" if dims == 1 else f"[{size}, num_dense]")
    for name in ("times_s", "groups"):
        whole = more[name]
        if whole is not None and whole.dtype != torch.int64:
            raise _dtype(name, whole)


def _check_values(
    what: str,
    values: Tensor | None,
    *,
    low: float = -np.inf,
    high: float = np.inf,
    gaps: bool = False,
) -> None:
    if values is None:
        return
    own = values.numpy()
    good = (own >= low) & (own <= high) & np.isfinite(own)
    if gaps:
        good |= np.isnan(own)
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
