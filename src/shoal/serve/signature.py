"""What a model takes and returns, and requests read as examples.

An id feature is one input of its name: [B] or [B, 1], one id an example; a feature of lists is
[B, L], and an input `<name>_lengths` [B] says how many of an example's L ids count (all of them
without it); or the ids of all examples one after another, [N], with their lengths. Ids are
integers, or texts, which become ids as in training. Every int64 is a legal id, so that no value
could stand for padding. Dense columns are one input, "dense" [B, n]. A model of several tasks
returns probabilities [B, T]. The dense module alone takes pooled rows in place of ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shoal.config.build import ModelParts
from shoal.errors import ConfigError, DTypeError, InputError, ShapeError, unknown_name
from shoal.ids import ids_of_text
from shoal.models import tasks
from shoal.ragged import KeyedRagged

Array = np.ndarray[Any, Any]

DENSE, LENGTHS, LOGITS, PREDICTION = "dense", "_lengths", "logits", "prediction"
SIGNATURES = ("", "serving_default")
MOST_EXAMPLES = 1 << 16  # of a request


@dataclass(frozen=True, slots=True)
class ServedTensor:
    """An input or output: its dtype as numpy names it, and its shape; -1 is any size."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    optional: bool = False


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """Inputs and outputs of a model, in order."""

    inputs: tuple[ServedTensor, ...]
    outputs: tuple[ServedTensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """The examples of a request: by feature ids [N] and lengths [B], and dense [B, n] or None."""

    size: int
    values: tuple[Array, ...]
    lengths: tuple[Array, ...]
    dense: Array | None


def dense_inputs(parts: ModelParts) -> tuple[ServedTensor, ...]:
    """What a model's dense module takes, in its order: dense columns, pooled rows, sequences."""
    own, many = parts.inputs, len(parts.inputs.sequences)
    shapes: dict[str, tuple[int, ...]] = {DENSE: (own.num_dense,)} if own.num_dense else {}
    shapes[tasks.EMBEDDINGS] = own.num_features, own.dim
    if any(layout.name == tasks.FIRST_ORDER for layout in parts.layouts):
        shapes[tasks.FIRST_ORDER] = (own.num_features,)
    if many:
        shapes[tasks.SEQUENCES] = many, own.length, own.dim
    found = [ServedTensor(name, "float32", (-1, *shape)) for name, shape in shapes.items()]
    return (*found, *([ServedTensor(tasks.LENGTHS, "int64", (-1, many))] if many else ()))


def dense_example(inputs: Iterable[ServedTensor], batch: int) -> tuple[torch.Tensor | None, ...]:
    """Values for a dense module's inputs, in its order; None for dense or first-order ones it
    lacks."""
    generator = torch.Generator().manual_seed(batch)
    given: dict[str, torch.Tensor | None] = dict.fromkeys(
        (DENSE, tasks.EMBEDDINGS, tasks.FIRST_ORDER)
    )
    longest = 0
    for one in inputs:
        shape = (batch, *one.shape[1:])
        longest = shape[2] if one.name == tasks.SEQUENCES else longest
        if one.dtype == "int64":
            made = torch.randint(longest + 1, shape, generator=generator, device="cpu")
        else:
            made = torch.randn(shape, generator=generator, device="cpu")
        given[one.name] = made
    return tuple(given.values())


class ExampleReader:
    """Reads requests of a model.

    Args:
        parts: of the model.

    Attributes:
        signature: what it reads, and what the model returns.

    Raises:
        ConfigError: a feature has the name of another input.
    """

    def __init__(self, parts: ModelParts) -> None:
        self._features = parts.features
        self._keys = tuple(feature.name for feature in parts.features)
        self._lists = parts.lists
        self._num_dense = parts.inputs.num_dense
        inputs: list[ServedTensor] = []
        for name in self._keys:
            shape = (-1, -1) if name in self._lists else (-1,)
            inputs.append(ServedTensor(name, "int64", shape))
            if name in self._lists:
                inputs.append(ServedTensor(f"{name}{LENGTHS}", "int64", (-1,), optional=True))
        if self._num_dense:
            inputs.append(ServedTensor(DENSE, "float32", (-1, self._num_dense)))
        names = [one.name for one in inputs]
        if len(set(names)) < len(names):
            raise ConfigError(
                "inputs of a served model",
                got=", ".join(names),
                allowed=f"features not named {DENSE!r} or like another's lengths",
                remedy="Rename the feature.",
            )
        self._names = frozenset(names)
        many = (len(parts.tasks),) if len(parts.tasks) > 1 else ()
        outputs = (ServedTensor(PREDICTION, "float32", (-1, *many)),)
        self.signature = ModelSignature(tuple(inputs), outputs)

    def read(self, inputs: Mapping[str, Array]) -> Examples:
        """The examples of a request.

        Raises:
            UnknownName: an input that the model does not have.
            InputError: one that is missing, or of another dtype, shape or number of examples.
        """
        if not self._names.issuperset(inputs):
            other = next(name for name in inputs if name not in self._names)
            raise unknown_name("input of the model", other, self._names)
        values, lengths, size = [], [], -1
        ones: Array | None = None
        for feature in self._features:
            name = feature.name
            ids, counts = self._ids(name, inputs)
            examples = len(ids if counts is None else counts)
            size = checked_size(examples) if size < 0 else size
            _check_size(name, examples, size)
            if counts is None:
                counts = ones = np.ones(size, dtype=np.int64) if ones is None else ones
            elif feature.max_length is not None and counts.max(initial=0) > feature.max_length:
                raise ShapeError(
                    f"ids of one example in feature {name!r}",
                    got=int(counts.max()),
                    allowed=f"at most {feature.max_length} (max_length)",
                    remedy="Shorten the lists.",
                )
            values.append(ids)
            lengths.append(counts)
        return Examples(size, tuple(values), tuple(lengths), self._dense(inputs, size))

    def join(self, requests: Sequence[Examples]) -> tuple[KeyedRagged, torch.Tensor | None]:
        """The examples of several requests as one batch."""
        many = range(len(self._keys))
        values = [part for f in many for part in (one.values[f] for one in requests)]
        lengths = [part for f in many for part in (one.lengths[f] for one in requests)]
        dense = None
        if self._num_dense:  # a copy of one request's, too: what came in is read-only
            dense = np.concatenate([one.dense for one in requests if one.dense is not None])
        joined = np.concatenate(lengths)
        offsets = np.zeros(joined.size + 1, dtype=np.int64)
        np.cumsum(joined, out=offsets[1:])
        ids = torch.from_numpy(np.concatenate(values))
        batch = KeyedRagged(self._keys, ids, torch.from_numpy(offsets))
        return batch, None if dense is None else torch.from_numpy(dense)

    def _ids(self, name: str, inputs: Mapping[str, Array]) -> tuple[Array, Array | None]:
        """Ids and how many of them each example has; None: one."""
        given = inputs.get(name)
        if given is None:
            remedy = "Give every feature; one without ids is [B, 0], or has lengths of 0."
            raise InputError(
                f"input {name!r}", got="none", allowed=f"all of {list(self._keys)}", remedy=remedy
            )
        is_list = name in self._lists
        if not is_list and given.shape[1:] in ((), (1,)) and given.ndim:
            return as_ids(name, given), None
        if not is_list or given.ndim not in (1, 2):
            raise _shape(name, given, "[B] or [B, L]" if is_list else "[B] or [B, 1]")
        ids = as_ids(name, given)
        size = given.shape[0]
        counts = inputs.get(f"{name}{LENGTHS}")
        length = 1 if given.ndim == 1 else given.shape[1]
        if counts is None:
            return ids, np.full(size, length, dtype=np.int64)
        counts = counts.reshape(-1) if counts.ndim == 2 and counts.shape[1] == 1 else counts
        if given.ndim == counts.ndim == 1 and counts.dtype.kind in "iu":
            flat = counts.astype(np.int64, copy=False)
            # The bounds come first, so that no sum wraps.
            if counts.min(initial=0) >= 0 and counts.max(initial=0) <= size == flat.sum():
                return ids, flat
        if counts.shape != (size,) or counts.dtype.kind not in "iu":
            raise _shape(f"{name}{LENGTHS}", counts, f"[{size}], integers")
        counts = counts.astype(np.int64, copy=False)
        if not size:
            return ids, counts
        if not 0 <= counts.min() <= counts.max() <= length:
            raise ShapeError(
                f"{name}{LENGTHS}",
                got=f"{counts.min()}..{counts.max()}",
                allowed=f"0..{length}, as {name!r} is wide",
                remedy="Count the ids of each example.",
            )
        there = np.arange(length) < counts[:, None]
        return ids.reshape(size, length)[there], counts

    def _dense(self, inputs: Mapping[str, Array], size: int) -> Array | None:
        if not self._num_dense:
            return None
        wanted = ServedTensor(DENSE, "float32", (-1, self._num_dense))
        return as_numbers(inputs.get(DENSE), wanted, size)


def as_numbers(given: Array | None, wanted: ServedTensor, size: int) -> Array:
    """An input of `size` examples in its dtype: finite floats, or whole numbers of 0 or more.

    Raises:
        ShapeError: another shape, or none given.
        InputError: other numbers, or none.
    """
    name, shape = wanted.name, (size, *wanted.shape[1:])
    if given is None or given.shape != shape:
        raise _shape(name, given, str(list(shape)))
    whole = wanted.dtype == "int64"
    if given.dtype.kind not in ("iu" if whole else "fiu"):
        what = "whole" if whole else "floating"
        raise DTypeError(
            f"dtype of input {name!r}", given.dtype, "numbers", f"Send {what} numbers."
        )
    with np.errstate(over="ignore"):  # what is too large is infinite
        numbers = np.ascontiguousarray(given, dtype=wanted.dtype)
    if not np.isfinite(numbers).all():
        remedy = "Send what stands for a missing value in training."
        raise InputError(f"input {name!r}", "NaN or infinity", "finite numbers", remedy)
    return numbers


def as_ids(name: str, given: Array) -> Array:
    """Ids of an input, flat: integers as they are, texts as in training.

    Raises:
        DTypeError: neither integers nor texts.
    """
    kind = given.dtype.kind
    if kind in "OSU":
        return ids_of_text(given.reshape(-1)).numpy()
    if kind not in "iu":
        raise DTypeError(
            f"dtype of input {name!r}", given.dtype, "integers or texts", "Send ids as INT64."
        )
    flat = given.reshape(-1)
    return flat.view(np.int64) if given.dtype == np.uint64 else flat.astype(np.int64, copy=False)


def checked_size(size: int) -> int:
    """A number of examples.

    Raises:
        ShapeError: too many for a request.
    """
    if size > MOST_EXAMPLES:
        raise ShapeError(
            "examples of a request", size, f"at most {MOST_EXAMPLES}", "Send several requests."
        )
    return size


def _check_size(name: str, got: int, size: int) -> None:
    if got != size:
        raise ShapeError(
            f"examples of input {name!r}", got, f"{size}, as of the first", "Send one B."
        )


def _shape(name: str, given: Array | None, allowed: str) -> ShapeError:
    got = "none" if given is None else f"{list(given.shape)} {given.dtype}"
    return ShapeError(f"shape of input {name!r}", got, allowed, "See the model's metadata.")
