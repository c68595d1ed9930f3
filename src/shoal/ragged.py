"""Ids by feature, jagged: `Ragged` (one feature) and `KeyedRagged` (several, feature-major)."""

from __future__ import annotations

import importlib
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal import errors
from shoal.address import check_dense, check_int64
from shoal.errors import (
    DeviceUnavailable,
    DTypeError,
    InputError,
    ShapeError,
    known_name,
    unknown_name,
)

Rows = Sequence[Sequence[int]]


def bad(
    kind: type[InputError],
    what: str,
    got: object,
    allowed: object,
    remedy: str = "Build it with from_lists, from_dict or from_lengths.",
) -> InputError:
    return kind(what, got=got, allowed=allowed, remedy=remedy)


def check_ids(name: str, tensor: Tensor) -> None:
    check_int64(name, tensor)
    if tensor.ndim != 1:
        raise bad(ShapeError, f"shape of {name}", tuple(tensor.shape), "one dimension")


def check_offsets(values: Tensor, offsets: Tensor, *, keys: int) -> None:
    check_ids("offsets", offsets)
    if offsets.numel() < 1 or (offsets.numel() - 1) % keys:
        allowed = f"a multiple of {keys} (the number of keys), plus one"
        raise bad(ShapeError, "number of offsets", offsets.numel(), allowed)
    _check_device("offsets", offsets, values)


def check_weights(weights: Tensor, values: Tensor) -> None:
    check_dense("weights_N", weights)
    if not weights.is_floating_point():
        got, allowed = weights.dtype, "a floating dtype"
        raise bad(DTypeError, "dtype of weights_N", got, allowed, "Call .float().")
    if weights.shape != values.shape:
        got_shape, want = tuple(weights.shape), tuple(values.shape)
        raise bad(ShapeError, "shape of weights_N", got_shape, want, "Give one weight per id.")
    _check_device("weights_N", weights, values)


def _check_device(name: str, tensor: Tensor, values: Tensor) -> None:
    if tensor.device != values.device:
        allowed = f"{values.device}, as the values"
        remedy = "Move both with .to(device)."
        raise bad(DTypeError, f"device of {name}", tensor.device, allowed, remedy)


def read_offsets(offsets: Tensor, count: int) -> None:
    cuts = offsets.cpu()
    if int(cuts[0]) != 0:
        raise bad(ShapeError, "first offset", int(cuts[0]), 0)
    falls = (cuts[1:] < cuts[:-1]).nonzero()
    if falls.numel():
        at = int(falls[0]) + 1
        raise bad(ShapeError, f"offset {at}", int(cuts[at]), f"at least {int(cuts[at - 1])}")
    if int(cuts[-1]) != count:
        raise bad(ShapeError, "last offset", int(cuts[-1]), f"{count}, the number of values")


def offsets_of(lengths: Tensor) -> Tensor:
    check_ids("lengths", lengths)
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def ids_of(rows: Rows) -> Tensor:
    try:
        flat = [operator.index(id_) for row in rows for id_ in row]
        return torch.from_numpy(np.array(flat, dtype=np.int64))
    except TypeError as error:
        remedy = "Hash strings with shoal.ids.hash_strings; cast floats yourself."
        raise bad(DTypeError, "ids", error, "integers", remedy) from error
    except OverflowError as error:
        remedy = "Subtract 2**64 from ids above 2**63 - 1: the 64 bits stay the same."
        raise bad(InputError, "ids", error, "-2**63..2**63-1", remedy) from error


def lists_of(values: Tensor, offsets: Tensor) -> list[list[int]]:
    flat = values.tolist()
    return [flat[start:stop] for start, stop in itertools.pairwise(offsets.tolist())]


def parts_of_nested(nested: Tensor) -> tuple[Tensor, Tensor]:
    layout = getattr(nested, "layout", None)
    if layout != torch.jagged or nested.lengths() is not None:  # type: ignore[attr-defined]
        allowed = "torch.jagged without holes"
        raise bad(ShapeError, "nested tensor", layout, allowed, "Call .contiguous().")
    return nested.values(), nested.offsets()  # type: ignore[attr-defined]


def pinned(tensor: Tensor) -> Tensor:
    """A copy in pinned memory; without CUDA, or if it is not on the CPU, the tensor itself."""
    # Once CUDA is in use, that is known without asking the driver.
    cuda: bool = torch.cuda.is_initialized() or torch.cuda.is_available()  # type: ignore[no-untyped-call]
    return tensor.pin_memory() if cuda and tensor.is_cpu else tensor


def torchrec_class(name: str) -> Any:
    try:
        return getattr(importlib.import_module("torchrec"), name)
    except ImportError as error:
        allowed = "any torchrec with KeyedJaggedTensor"
        remedy = "pip install torchrec, or use to_nested()."
        raise DeviceUnavailable("torchrec", "not installed", allowed, remedy) from error


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Ids of one feature: example b holds `values[offsets_B1[b]:offsets_B1[b+1]]`.

    Args:
        values: int64 [N].
        offsets_B1: int64 [B+1], on the device of `values`; from 0 to N, never decreasing.

    Raises:
        DTypeError: not int64, or on two devices.
        ShapeError: not one-dimensional, or no offsets at all.
    """

    values: Tensor
    offsets_B1: Tensor

    def __post_init__(self) -> None:
        check_ids("values", self.values)
        check_offsets(self.values, self.offsets_B1, keys=1)

    @property
    def batch_size(self) -> int:
        """Examples B."""
        return self.offsets_B1.numel() - 1

    @property
    def lengths(self) -> Tensor:
        """int64 [B]: ids of each example."""
        return self.offsets_B1.diff()

    @classmethod
    def from_lists(cls, rows: Rows) -> Ragged:
        """Build from one list of ids per example, on the CPU.

        Args:
            rows: B lists of Python ints, or of whatever is one.

        Raises:
            DTypeError: an id is not an integer, or an example is no list.
            InputError: an id does not fit int64.
        """
        try:
            lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64, device="cpu")
        except TypeError as error:
            allowed, remedy = "a list for each example", "Write [[1], [2]] for one id each."
            raise bad(DTypeError, "lists of ids", error, allowed, remedy) from error
        return cls.from_lengths(ids_of(rows), lengths)

    @classmethod
    def from_lengths(cls, values: Tensor, lengths_B: Tensor) -> Ragged:
        """Build from ids int64 [N] and ids per example int64 [B]; `values` is not copied."""
        return cls(values, offsets_of(lengths_B))

    @classmethod
    def from_nested(cls, nested: Tensor) -> Ragged:
        """View a jagged nested tensor [B, *] of ids; nothing is copied."""
        return cls(*parts_of_nested(nested))

    @classmethod
    def from_torchrec(cls, jagged: Any) -> Ragged:
        """View a torchrec `JaggedTensor` (or a similar class); widens int32 offsets.

        Raises:
            InputError: it has weights; use a `KeyedRagged` for them.
        """
        if jagged.weights_or_none() is not None:
            remedy = "Use a KeyedJaggedTensor and KeyedRagged.from_torchrec."
            raise bad(InputError, "JaggedTensor", "weights", "ids only", remedy)
        return cls(jagged.values(), jagged.offsets().long())

    def validate(self) -> Ragged:
        """Return self after reading the offsets (waits for a CUDA device).

        Raises:
            ShapeError: offsets do not start at 0, decrease, or do not end at N.
        """
        read_offsets(self.offsets_B1, self.values.numel())
        return self

    def to_lists(self) -> list[list[int]]:
        """One list of ids per example."""
        return lists_of(self.values, self.offsets_B1)

    def to_nested(self) -> Tensor:
        """The same storage as a jagged nested tensor [B, *]; nothing is copied."""
        return torch.nested.nested_tensor_from_jagged(self.values, self.offsets_B1)

    def to_torchrec(self) -> Any:
        """The same storage as a torchrec `JaggedTensor`; nothing is copied.

        Raises:
            DeviceUnavailable: torchrec is not installed.
        """
        return torchrec_class("JaggedTensor")(values=self.values, offsets=self.offsets_B1)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Ragged:
        """Move to a device; tensors that are already there are not copied."""
        values = self.values.to(device, non_blocking=non_blocking)
        return Ragged(values, self.offsets_B1.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Ragged:
        """Copy to pinned memory, so that a non-blocking `to("cuda")` overlaps."""
        return Ragged(pinned(self.values), pinned(self.offsets_B1))


@dataclass(frozen=True, slots=True, eq=False)
class KeyedRagged:
    """Ids of F features over one batch, feature-major as torchrec's KeyedJaggedTensor.

    Feature f of example b holds `values_N[offsets_FB1[f*B+b]:offsets_FB1[f*B+b+1]]`.

    `host_splits` has the features' ranges on the host, for a batch on CUDA too. A batch that was
    moved to CUDA keeps them; a batch that was built there reads them once, on first use.

    Args:
        keys: F distinct feature names, at least one.
        values_N: int64 [N].
        offsets_FB1: int64 [F*B+1], on the device of `values_N`.
        weights_N: floating [N], one per id, or None.

    Raises:
        DTypeError: ids or offsets not int64, weights not floating, or on two devices.
        ShapeError: not one-dimensional, or lengths that do not fit together.
        InputError: no keys, or a key twice.
    """

    keys: tuple[str, ...]
    values_N: Tensor
    offsets_FB1: Tensor
    weights_N: Tensor | None = None
    # Known on the host for a batch on a device: the offsets before the move, and the edges.
    _moved_FB1: Tensor | None = field(default=None, repr=False, compare=False, kw_only=True)
    _edges_F1: Tensor | None = field(default=None, repr=False, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        if not self.keys or len(set(self.keys)) != len(self.keys):
            allowed = "one or more distinct names"
            raise bad(InputError, "keys", self.keys, allowed, "Name each feature once.")
        check_ids("values_N", self.values_N)
        check_offsets(self.values_N, self.offsets_FB1, keys=len(self.keys))
        if self.weights_N is not None:
            check_weights(self.weights_N, self.values_N)

    @property
    def batch_size(self) -> int:
        """Examples B."""
        return (self.offsets_FB1.numel() - 1) // len(self.keys)

    @property
    def lengths(self) -> Tensor:
        """int64 [F, B]: ids of each feature in each example."""
        return self.offsets_FB1.diff().view(len(self.keys), self.batch_size)

    @property
    def key_splits(self) -> Tensor:
        """int64 [F+1], a view: ids of feature f are `values_N[key_splits[f]:key_splits[f+1]]`."""
        if self.batch_size == 0:
            return self.offsets_FB1.expand(len(self.keys) + 1)
        return self.offsets_FB1[:: self.batch_size]

    @property
    def host_splits(self) -> Tensor:
        """`key_splits` on the CPU, int64 [F+1], contiguous.

        The first use waits for the device if the batch was built on it.
        """
        if self.offsets_FB1.is_cpu:
            return self.key_splits.contiguous()
        if self._edges_F1 is None:
            object.__setattr__(self, "_edges_F1", self.key_splits.cpu())
        assert self._edges_F1 is not None
        return self._edges_F1

    @property
    def longest(self) -> Tensor:
        """int64 [F] on the CPU: length of each feature's longest list; 0 without examples.

        Waits for the device if the batch was built on it.
        """
        if self.batch_size == 0:
            return torch.zeros(len(self.keys), dtype=torch.int64, device="cpu")
        return self.host_lengths.amax(dim=1)

    @property
    def host_lengths(self) -> Tensor:
        """`lengths` on the CPU; waits for the device if the batch was built on it."""
        offsets = self.offsets_FB1 if self._moved_FB1 is None else self._moved_FB1
        return offsets.diff().view(len(self.keys), self.batch_size).cpu()

    @classmethod
    def from_lists(
        cls,
        features: Mapping[str, Rows],
        weights: Mapping[str, Sequence[Sequence[float]]] | None = None,
    ) -> KeyedRagged:
        """Build from one list of ids per example for each feature, on the CPU.

        Args:
            features: name -> B lists of ids.
            weights: one float32 weight per id, in lists like the ids; for all features or none.

        Raises:
            DTypeError: an id is not an integer.
            InputError: no features, or an id that does not fit int64.
            ShapeError: features of different batch sizes, or weights in lists of other lengths.
        """
        if weights is None:
            return cls.from_dict(features)
        weights = errors.of_kind("weights", weights, Mapping)
        for key, rows in errors.of_kind("features", features, Mapping).items():
            want, got = [len(row) for row in rows], [len(row) for row in weights.get(key, ())]
            if got != want:
                raise bad(ShapeError, f"lengths of weights of {key!r}", got, want)
        flat = [w for key in features for row in weights[key] for w in row]
        return cls.from_dict(features, torch.tensor(flat, dtype=torch.float32, device="cpu"))

    @classmethod
    def from_dict(
        cls, features: Mapping[str, Ragged | Rows], weights_N: Tensor | None = None
    ) -> KeyedRagged:
        """Join features of one batch, in the mapping's order.

        Args:
            features: name -> `Ragged` over B examples, or B lists of ids.
            weights_N: floating [N], one per id in the joined order.

        Raises:
            ShapeError: features of different batch sizes.
            InputError: no features.
        """
        parts = {
            key: rows if isinstance(rows, Ragged) else Ragged.from_lists(rows)
            for key, rows in errors.of_kind("features", features, Mapping).items()
        }
        sizes = {key: part.batch_size for key, part in parts.items()}
        if len(set(sizes.values())) > 1:
            raise bad(ShapeError, "batch sizes", sizes, "one batch size for all features")
        none = [torch.empty(0, dtype=torch.int64, device="cpu")]
        values_N = torch.cat([part.values for part in parts.values()] or none)
        lengths_FB = torch.cat([part.lengths for part in parts.values()] or none)
        counts = [part.values.numel() for part in parts.values()]
        return cls._built(tuple(parts), values_N, lengths_FB, weights_N, counts)

    @classmethod
    def from_lengths(
        cls,
        keys: Sequence[str],
        values_N: Tensor,
        lengths_FB: Tensor,
        weights_N: Tensor | None = None,
    ) -> KeyedRagged:
        """Build from ids and lengths; `values_N` is not copied.

        Args:
            keys: F feature names.
            values_N: int64 [N], feature by feature, example by example.
            lengths_FB: int64 [F, B] or [F*B], ids of each example.
            weights_N: floating [N], one per id, or None.

        Raises:
            ShapeError: lengths that do not add up to N.
        """
        return cls._built(tuple(keys), values_N, lengths_FB, weights_N, None)

    @classmethod
    def _built(
        cls,
        keys: tuple[str, ...],
        values_N: Tensor,
        lengths_FB: Tensor,
        weights_N: Tensor | None,
        counts: Sequence[int] | None,
    ) -> KeyedRagged:
        """counts: ids of each feature, where the host knows them."""
        check_dense("lengths", lengths_FB)
        offsets_FB1 = offsets_of(lengths_FB.reshape(-1))
        edges_F1 = None
        if counts is not None and not offsets_FB1.is_cpu:
            edges_F1 = offsets_of(torch.tensor(counts, dtype=torch.int64, device="cpu"))
        return cls(keys, values_N, offsets_FB1, weights_N, _edges_F1=edges_F1)

    @classmethod
    def from_nested(cls, keys: Sequence[str], nested: Tensor) -> KeyedRagged:
        """View a jagged nested tensor [F*B, *] of ids, feature-major; nothing is copied."""
        return cls(tuple(keys), *parts_of_nested(nested))

    @classmethod
    def from_torchrec(cls, keyed: Any) -> KeyedRagged:
        """View a torchrec `KeyedJaggedTensor` (or a similar class); widens int32 offsets.

        Raises:
            ShapeError: its keys have different batch sizes (variable stride).
        """
        if keyed.variable_stride_per_key():
            raise bad(ShapeError, "KeyedJaggedTensor", "a stride per key", "one stride")
        keys, values = tuple(keyed.keys()), keyed.values()
        return cls(keys, values, keyed.offsets().long(), keyed.weights_or_none())

    @classmethod
    def cat(cls, batches: Sequence[KeyedRagged]) -> KeyedRagged:
        """Append batches, in order; keys in the first batch's order.

        Raises:
            UnknownName: batches of different keys.
            InputError: no batches, or weights in some only.
        """
        weighted = {batch.weights_N is not None for batch in batches}
        if len(weighted) != 1:
            got = "weights in some only" if batches else "no batches"
            allowed = "one or more, with weights in all or none"
            raise bad(InputError, "batches", got, allowed, "Give each batch weights, or none.")
        keys = batches[0].keys
        for batch in batches:
            for key in set(batch.keys) - set(keys):
                raise unknown_name("key of a later batch", key, keys)
        same = [batch.select(keys) for batch in batches]
        cuts = [batch.host_splits.tolist() for batch in same]

        def joined(tensors: list[Tensor]) -> Tensor:
            pairs = list(zip(tensors, cuts, strict=True))
            return torch.cat([t[c[f] : c[f + 1]] for f in range(len(keys)) for t, c in pairs])

        values_N = joined([batch.values_N for batch in same])
        lengths_FB = torch.cat([batch.lengths for batch in same], dim=1)
        weights = [batch.weights_N for batch in same if batch.weights_N is not None]
        counts = [sum(c[f + 1] - c[f] for c in cuts) for f in range(len(keys))]
        joined_weights = joined(weights) if weights else None
        return cls._built(keys, values_N, lengths_FB, joined_weights, counts)

    def __getitem__(self, key: str) -> Ragged:
        """Ids of one feature; the values are a view (by `host_splits`).

        Raises:
            UnknownName: no such key.
        """
        index, size = self._index(key), self.batch_size
        offsets = self.offsets_FB1[index * size : (index + 1) * size + 1]
        return Ragged(self.values_N[self._span(index)], offsets - offsets[0])

    def weights_of(self, key: str) -> Tensor | None:
        """Weights of one feature's ids, a view; None when the batch has none."""
        index = self._index(key)
        return None if self.weights_N is None else self.weights_N[self._span(index)]

    def select(self, keys: Sequence[str]) -> KeyedRagged:
        """Keep these keys, in this order; ids of adjacent keys are not copied.

        Raises:
            UnknownName: no such key.
        """
        chosen = tuple(keys)
        if chosen == self.keys:
            return self
        picks, cuts = [self._index(key) for key in chosen], self.host_splits.tolist()
        spans = [slice(cuts[i], cuts[i + 1]) for i in picks]
        if picks and picks == list(range(picks[0], picks[0] + len(picks))):
            spans = [slice(cuts[picks[0]], cuts[picks[-1] + 1])]

        def picked(tensor: Tensor) -> Tensor:
            parts = [tensor[span] for span in spans] or [tensor[:0]]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        weights = None if self.weights_N is None else picked(self.weights_N)
        picks_F = torch.tensor(picks, dtype=torch.int64, device="cpu")
        moved_F = picks_F.to(self.values_N.device, non_blocking=True)
        lengths_FB = self.lengths.index_select(0, moved_F)
        counts = [cuts[i + 1] - cuts[i] for i in picks]
        return KeyedRagged._built(chosen, picked(self.values_N), lengths_FB, weights, counts)

    def validate(self) -> KeyedRagged:
        """Return self after reading the offsets (waits for a CUDA device).

        Raises:
            ShapeError: offsets do not start at 0, decrease, or do not end at N.
        """
        read_offsets(self.offsets_FB1, self.values_N.numel())
        return self

    def to_lists(self) -> dict[str, list[list[int]]]:
        """One list of ids per example for each feature."""
        rows, size = lists_of(self.values_N, self.offsets_FB1), self.batch_size
        return {key: rows[f * size : (f + 1) * size] for f, key in enumerate(self.keys)}

    def to_nested(self) -> Tensor:
        """The same ids as one jagged nested tensor [F*B, *], feature-major; nothing is copied."""
        return torch.nested.nested_tensor_from_jagged(self.values_N, self.offsets_FB1)

    def to_torchrec(self) -> Any:
        """The same storage as a torchrec `KeyedJaggedTensor`; nothing is copied.

        Raises:
            DeviceUnavailable: torchrec is not installed.
        """
        kind = torchrec_class("KeyedJaggedTensor")
        keys, values, weights = list(self.keys), self.values_N, self.weights_N
        return kind(keys=keys, values=values, weights=weights, offsets=self.offsets_FB1)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> KeyedRagged:
        """Move to a device; tensors that are already there are not copied.

        The moved batch keeps the CPU's offsets, so that the host can read them without a wait.
        Do not overwrite them while the moved batch is in use.
        """
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> KeyedRagged:
        """Copy to pinned memory, so that a non-blocking `to("cuda")` overlaps."""
        return self._mapped(pinned)

    def _mapped(self, move: Callable[[Tensor], Tensor]) -> KeyedRagged:
        weights = None if self.weights_N is None else move(self.weights_N)
        offsets_FB1 = move(self.offsets_FB1)
        moved_FB1, edges_F1 = self._moved_FB1, self._edges_F1
        if offsets_FB1.is_cpu:
            moved_FB1 = edges_F1 = None
        elif self.offsets_FB1.is_cpu:
            moved_FB1, edges_F1 = self.offsets_FB1, self.key_splits.clone()
        known = {"_moved_FB1": moved_FB1, "_edges_F1": edges_F1}
        return KeyedRagged(self.keys, move(self.values_N), offsets_FB1, weights, **known)

    def _span(self, index: int) -> slice:
        cuts = self.host_splits
        return slice(int(cuts[index]), int(cuts[index + 1]))

    def _index(self, key: str) -> int:
        known_name("key", key, self.keys)
        return self.keys.index(key)
