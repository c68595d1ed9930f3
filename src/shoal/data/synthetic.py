"""Made-up clicks: Zipf ids, new ids arriving, a planted signal.

Example i is a pure function of (seed, i), so any split into batches, ranks or passes gives the
same examples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.data.batch import Batch
from shoal.errors import ConfigError
from shoal.ids import mix64
from shoal.ragged import KeyedRagged

_Words = np.ndarray[Any, np.dtype[np.uint64]]
_Places = np.ndarray[Any, np.dtype[np.int64]]
_Floats = np.ndarray[Any, np.dtype[np.float32]]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_ID_FACTOR = np.uint64(0xD6E8FEB86659FD93)
_FRESH = 1 << 48
# What a stream of random words is for; feature f's ids take stream _IDS + f.
_LABEL, _DENSE, _EFFECT, _IDS = 1, 2, 3, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticClicks:
    """Clicks whose chance follows hidden weights of their ids.

    Each of `num_features` features has `vocabulary` ids from the start, drawn by a Zipf law with
    `exponent` (rank r has a share near r^-exponent; the inverse of the continuous law, floored).
    A share `fresh_share` of draws goes to ids that did not exist at the start: `fresh_per_example`
    of them are born with each example, and the youngest are the most popular, by the same law.
    The click's log odds are `bias` plus `signal` times the sum of a hidden weight of each id
    (uniform on [-1, 1], from the id's hash) plus the mean of the dense columns.

    Args:
        examples: how many there are.
        num_features: id features, one id each, named "f0", "f1", ...
        vocabulary: ids of a feature at the start.
        vocabularies: those of each feature, where they differ.
        exponent: of the Zipf law, above 0.
        fresh_share: chance of a draw to be one of the ids born since.
        fresh_per_example: ids born per example and feature.
        num_dense: dense columns, standard normal.
        signal, bias: of the log odds.
        seed: of everything.
        start_s: event time of the first example; examples_per_s: how many share a second.
        first: number of the first example; with another `first`, a source continues where one ends.

    Raises:
        ConfigError: a number out of its range.
    """

    examples: int
    num_features: int = 8
    vocabulary: int = 1_000_000
    exponent: float = 1.05
    fresh_share: float = 0.1
    fresh_per_example: float = 0.05
    num_dense: int = 4
    signal: float = 1.0
    bias: float = -1.5
    seed: int = 0
    vocabularies: tuple[int, ...] = ()
    start_s: int = 1_356_998_400
    examples_per_s: int = 1000
    first: int = 0

    def __post_init__(self) -> None:
        ranges = {
            "examples": (1, 1 << 48),
            "num_features": (1, 1 << 16),
            "vocabulary": (1, _FRESH),
            "exponent": (1e-6, 100.0),
            "fresh_share": (0.0, 1.0),
            "fresh_per_example": (0.0, 1e6),
            "num_dense": (0, 1 << 16),
            "examples_per_s": (1, 1 << 32),
            "first": (0, 1 << 48),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not low <= value <= high:
                remedy = "Change the setting."
                allowed = f"{low:g}..{high:g}"
                raise ConfigError(
                    f"{name} of made-up clicks", got=value, allowed=allowed, remedy=remedy
                )

        own = self.vocabularies
        if own and (len(own) != self.num_features or min(own) < 1 or max(own) > _FRESH):
            raise ConfigError(
                "vocabularies of made-up clicks",
                got=own,
                allowed=f"{self.num_features} numbers, one for each feature, 1 or more",
                remedy="Name each feature's, or set vocabulary for all.",
            )

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the id features: "f0", "f1", ..."""
        return tuple(f"f{feature}" for feature in range(self.num_features))

    def __len__(self) -> int:
        return self.examples

    def times(self) -> Tensor:
        """int64 [N]: event time of each example in seconds."""
        return torch.from_numpy(self._times(np.arange(self.examples)))

    def take(self, rows_B: Tensor) -> Batch:
        """The examples of these numbers (int64 [B]), in this order; 8 M ids/s or so a thread."""
        number_B = rows_B.numpy().astype(np.uint64) + np.uint64(self.first)
        ids_FB = self._ids(number_B)
        dense_BD = self._dense(number_B)
        chance_B = self._chance(ids_FB, dense_BD)
        labels_B = _uniform(self._words(number_B, _LABEL)) < chance_B
        times_B = self._times(rows_B.numpy())
        # numpy, since a loader's thread must not take torch's threads from the training step.
        offsets = torch.from_numpy(np.arange(ids_FB.size + 1))
        values_N = torch.from_numpy(ids_FB.reshape(-1).view(np.int64))
        return Batch(
            ids=KeyedRagged(self.features, values_N, offsets),
            labels=torch.from_numpy(labels_B.astype(np.float32)),
            dense=torch.from_numpy(dense_BD) if self.num_dense else None,
            event_time_s=int(times_B.max(initial=0)),
            times_B=torch.from_numpy(times_B),
        )

    def chances(self, rows_B: Tensor) -> Tensor:
        """The true chance of a click of these examples, float32 [B]: the best any model can say."""
        number_B = rows_B.numpy().astype(np.uint64) + np.uint64(self.first)
        return torch.from_numpy(self._chance(self._ids(number_B), self._dense(number_B)))

    def _times(self, rows_B: _Places) -> _Places:
        return self.start_s + (rows_B + self.first) // self.examples_per_s

    def _words(self, number_B: _Words, stream: int) -> _Words:
        """Random words [B] of a stream: splitmix64 of a keyed counter."""
        key = mix64((self.seed << 20) + stream + 1)
        words = number_B * np.uint64(_GOLDEN)
        words += np.uint64((key | 1) & _MASK)
        return _mixed(words)

    def _ids(self, number_B: _Words) -> _Words:
        """uint64 [F, B]."""
        ids_FB = np.empty((self.num_features, number_B.size), dtype=np.uint64)
        born_B = (number_B * self.fresh_per_example).astype(np.int64)
        cut = np.uint64(round(self.fresh_share * 256))
        for feature in range(self.num_features):
            words = self._words(number_B, _IDS + feature)
            # The low byte picks the pool, the 53 high bits the rank.
            fresh = np.flatnonzero((words & np.uint64(255)) < cut)
            fresh = fresh[born_B[fresh] > 0]
            size = self.vocabularies[feature] if self.vocabularies else self.vocabulary
            rank_B = self._ranks((words >> np.uint64(11)).astype(np.float64), size)
            rank_B[fresh] = np.maximum(born_B[fresh] - rank_B[fresh], 0) + _FRESH
            own = ids_FB[feature]
            own[:] = rank_B.view(np.uint64)
            own += np.uint64(feature << 50)
            own *= _ID_FACTOR
        return ids_FB

    def _ranks(self, u_B: np.ndarray[Any, np.dtype[np.float64]], vocabulary: int) -> _Places:
        """Zipf ranks 0..vocabulary-1 of uniform whole numbers below 2^53; uses up `u_B`."""
        size = float(vocabulary)
        power = 1.0 - self.exponent
        u_B *= 2.0**-53
        if abs(power) < 1e-9:
            x = np.exp(u_B * np.log(size + 1.0))
        else:
            u_B *= (size + 1.0) ** power - 1.0
            u_B += 1.0
            x = np.exp(np.log(u_B) / power)
        ranks: _Places = x.astype(np.int64)
        ranks -= 1
        np.minimum(ranks, vocabulary - 1, out=ranks)
        return ranks

    def _dense(self, number_B: _Words) -> _Floats:
        """float32 [B, num_dense]: sums of four uniforms, scaled to variance 1."""
        dense_BD = np.empty((number_B.size, self.num_dense), dtype=np.float32)
        for column in range(self.num_dense):
            words = self._words(number_B, (_DENSE << 16) + column)
            sums_B = np.zeros(number_B.size, dtype=np.int64)
            for bits in (0, 16, 32, 48):
                sums_B += ((words >> np.uint64(bits)) & np.uint64(0xFFFF)).view(np.int64)
            dense_BD[:, column] = (sums_B / 65536.0 - 2.0) * 3.0**0.5
        return dense_BD

    def _chance(self, ids_FB: _Words, dense_BD: _Floats) -> _Floats:
        odds_B = np.full(ids_FB.shape[1], self.bias, dtype=np.float32)
        for own in ids_FB:
            weight_B = _uniform(_mixed(own ^ np.uint64(mix64(self.seed + _EFFECT))))
            odds_B += np.float32(self.signal) * (2.0 * weight_B - 1.0)
        for column_B in dense_BD.T:
            odds_B += column_B / np.float32(self.num_dense)
        return (1.0 / (1.0 + np.exp(-odds_B))).astype(np.float32)


def _mixed(words: _Words) -> _Words:
    """`shoal.ids.mix64` in place, for words that no one else holds."""
    for bits, factor in zip((30, 27), _FACTORS, strict=True):
        words ^= words >> np.uint64(bits)
        words *= factor
    words ^= words >> np.uint64(31)
    return words


def _uniform(words: _Words) -> _Floats:
    """The high 24 bits as exact float32 in [0, 1)."""
    return (words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
