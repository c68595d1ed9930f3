"""Made-up clicks: Zipf ids, new ids arriving, a planted signal; and files like public data sets.

Example i is a pure function of (seed, i), so any split into batches, ranks or passes gives the
same examples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from shoal.data.batch import Batch, checked_rows
from shoal.errors import ConfigError, DataError
from shoal.ids import mix64
from shoal.ragged import KeyedRagged

if TYPE_CHECKING:
    import pyarrow as pa

_Words = np.ndarray[Any, np.dtype[np.uint64]]
_Places = np.ndarray[Any, np.dtype[np.int64]]
_Floats = np.ndarray[Any, np.dtype[np.float32]]
_Numbers = np.ndarray[Any, np.dtype[Any]]

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
        number_B = checked_rows(rows_B, len(self)).astype(np.uint64) + np.uint64(self.first)
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


Like = Literal["criteo", "taobao", "movielens"]
"""Data sets that `write_like` makes twins of."""
_EVALUATED = 0.1  # share of the rows, the last ones
_LEAST_ROWS, _MOST_ROWS = 100, 1 << 32
# Rows of an id's vocabulary are a share of a file's, so that a small file has ids that come often.
_ROWS_AN_ID = 20
_HISTORY, _LONGEST = 10, 50
_CRITEO = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
_USER = {
    "cms_segid": 97, "cms_group_id": 13, "final_gender_code": 2, "age_level": 7,
    "pvalue_level": 4, "shopping_level": 3, "occupation": 2, "new_user_class_level": 5,
}  # fmt: skip
_AD = {"cate_id": 6769, "campaign_id": 423436, "customer": 255875, "brand": 99815}
_GENRES = (
    "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama",
    "Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War",
    "Western",
)  # fmt: skip
_OCCUPATIONS = 21


class _Columns:
    """Columns of `rows` examples; a name's numbers are its own."""

    def __init__(self, rows: int, seed: int) -> None:
        self.rows, self._seed = rows, seed
        self._source = SyntheticClicks(examples=rows, seed=seed)
        self._number_N = np.arange(rows, dtype=np.uint64)
        self._streams: dict[str, int] = {}

    def size(self, vocabulary: int) -> int:
        """Ids of a feature that has `vocabulary` of them in the data set."""
        return max(2, min(vocabulary, self.rows // _ROWS_AN_ID))

    def words(self, name: str, number_M: _Words | None = None) -> _Words:
        """Random words of examples, or of other numbers."""
        stream = self._streams.setdefault(name, (1 << 24) + len(self._streams))
        return self._source._words(self._number_N if number_M is None else number_M, stream)

    def uniform(self, name: str) -> _Floats:
        """Numbers of [0, 1)."""
        return _uniform(self.words(name))

    def ids(self, name: str, size: int, number_M: _Words | None = None) -> _Places:
        """Ids 0..size-1 by a Zipf law, the frequent ones spread over them."""
        places_M = (self.words(name, number_M) >> np.uint64(11)).astype(np.float64)
        ranks = self._source._ranks(places_M, size)
        return (ranks * 1_000_003 + 7) % size if size % 1_000_003 else ranks

    def attribute(self, name: str, ids_M: _Places, size: int) -> _Places:
        """A value 0..size-1 of each id, always the same."""
        return (self._hashed(name, ids_M) % np.uint64(size)).astype(np.int64)

    def effect(self, name: str, ids_M: _Places) -> _Floats:
        """The hidden weight of each id, on [-1, 1]."""
        return 2.0 * _uniform(self._hashed(name, ids_M)) - 1.0

    def happens(self, name: str, odds_N: _Numbers) -> _Numbers:
        """Whether something of these log odds happens."""
        return self.uniform(name) < 1.0 / (1.0 + np.exp(-odds_N))

    def _hashed(self, name: str, ids_M: _Places) -> _Words:
        key = np.uint64(mix64(int.from_bytes(name.encode()[:8], "little") + self._seed))
        return _mixed(ids_M.astype(np.uint64) * _ID_FACTOR ^ key)


def _criteo(made: _Columns) -> pa.Table:
    """Columns of Criteo's logs: label, 13 counts and 26 hashed ids, some of them missing."""
    import pyarrow as pa

    odds_N = np.full(made.rows, -1.2, np.float32)
    columns: dict[str, Any] = {}
    for k in range(1, 14):
        name = f"I{k}"
        normal_N = sum(made.uniform(f"{name}/{part}") for part in range(4)) - 2.0
        odds_N += 0.5 * normal_N
        counts_N = np.floor(np.exp(2.0 * normal_N + 1.0)).astype(np.int32)
        columns[name] = pa.array(counts_N, mask=made.uniform(f"{name}/missing") < 0.1)
    for k, vocabulary in enumerate(_CRITEO, 1):
        name = f"C{k}"
        ids_N = made.ids(name, made.size(vocabulary))
        odds_N += 0.7 * made.effect(name, ids_N)
        known, at_N = np.unique(ids_N, return_inverse=True)
        words = made.attribute(f"{name}/text", known, 1 << 32)
        texts = pa.array([f"{word:08x}" for word in words])
        missing_N = made.uniform(f"{name}/missing") < (0.05 if k % 3 == 0 else 0.0)
        columns[name] = texts.take(pa.array(at_N, mask=missing_N))
    label_N = made.happens("label", odds_N).astype(np.int8)
    return pa.table({"label": label_N, **columns})


def _taobao(made: _Columns) -> pa.Table:
    """Columns of Taobao's ads: users, ads, the last clicks, and labels clk and buy."""
    import pyarrow as pa

    def of_ad(ids_M: _Places, name: str) -> _Places:
        return made.attribute(name, ids_M, made.size(_AD[name]) if name != "cate_id" else cates)

    cates = min(made.size(_AD["cate_id"]), 200)
    user_N, ad_N = made.ids("user_id", made.size(1_061_768)), made.ids("ad", made.size(846_811))
    columns: dict[str, Any] = {"user_id": user_N}
    columns |= {name: made.attribute(name, user_N, size) for name, size in _USER.items()}
    columns["adgroup_id"] = ad_N
    columns |= {name: of_ad(ad_N, name) for name in _AD}
    columns["price"] = np.exp(4.0 + 1.5 * made.effect("price", ad_N))
    columns["pid"] = made.attribute("pid", made.words("pid").view(np.int64) >> 8, 2)
    columns["time_stamp"] = made._source._times(np.arange(made.rows))
    # In a third of the histories half of the clicks were on the ad itself.
    lengths_N = (made.uniform("length") ** 2 * 3 * _HISTORY).astype(np.int64).clip(0, _LONGEST)
    rows_M = np.repeat(np.arange(made.rows), lengths_N)
    starts_N = np.cumsum(lengths_N) - lengths_N
    number_M = (rows_M * _LONGEST + np.arange(rows_M.size) - starts_N[rows_M]).astype(np.uint64)
    seen_M = made.ids("ad", made.size(846_811), number_M + np.uint64(made.rows))
    again_M = (made.uniform("again") < 0.3)[rows_M] & (_uniform(made.words("step", number_M)) < 0.5)
    seen_M = np.where(again_M, ad_N[rows_M], seen_M)
    offsets = pa.array(np.append(starts_N, rows_M.size).astype(np.int32))
    for name in ("adgroup_id", "cate_id", "brand"):
        values_M = seen_M if name == "adgroup_id" else of_ad(seen_M, name)
        columns[f"click_50_seq__{name}"] = pa.ListArray.from_arrays(offsets, pa.array(values_M))
    alike_N = np.bincount(
        rows_M, of_ad(seen_M, "cate_id") == columns["cate_id"][rows_M], made.rows
    ).astype(np.float32)
    odds_N = np.where(alike_N > 0, 0.5, -2.0) + 0.8 * made.effect("user", user_N)
    odds_N += 0.8 * made.effect("ad", ad_N) + 0.8 * made.effect("cate", columns["cate_id"])
    columns["clk"] = made.happens("clk", odds_N)
    odds_N = 1.2 * made.effect("buyer", user_N) + 1.2 * made.effect("brand", columns["brand"])
    columns["buy"] = columns["clk"] & made.happens("buy", odds_N - 1.0)
    labels = {name: columns.pop(name).astype(np.int8) for name in ("clk", "buy")}
    return pa.table({**labels, **columns})


def _movielens(made: _Columns) -> pa.Table:
    """Columns of MovieLens: users, movies, a rating 1..5 and label, whether that is 4 or more."""
    import pyarrow as pa

    user_N, movie_N = made.ids("user_id", made.size(6040)), made.ids("movie_id", made.size(3883))
    genre_N, taste_N = made.attribute("genre", movie_N, 18), made.attribute("taste", user_N, 18)
    second_N = made.attribute("second", movie_N, 18)
    odds_N = 1.2 * made.effect("user", user_N) + 1.5 * made.effect("movie", movie_N)
    odds_N += np.where((genre_N == taste_N) | (second_N == taste_N), 1.5, 0.0)
    noise_N = made.uniform("rating")
    rating_N = (3.0 + odds_N + np.log(noise_N + 1e-6) - np.log1p(1e-6 - noise_N)).round()
    rating_N = rating_N.clip(1, 5).astype(np.int8)
    names = np.array(_GENRES)
    pairs_N2 = np.stack([names[genre_N], names[second_N]], axis=1)
    genres = [list(dict.fromkeys(pair)) for pair in pairs_N2.tolist()]
    return pa.table(
        {
            "label": (rating_N >= 4).astype(np.int8),
            "rating": rating_N,
            "timestamp": made._source._times(np.arange(made.rows)),
            "user_id": user_N + 1,
            "age": 18 + made.attribute("age", user_N, 50),
            "gender": pa.array(np.array(["F", "M"])[made.attribute("gender", user_N, 2)]),
            "occupation": made.attribute("occupation", user_N, _OCCUPATIONS),
            "zip_code": pa.array([f"{z:05d}" for z in made.attribute("zip", user_N, 100_000)]),
            "movie_id": movie_N + 1,
            "release_year": 1930 + made.attribute("year", movie_N, 70),
            "genres": genres,
        }
    )


def _movies(examples: pa.Table) -> pa.Table:
    """Each movie of some examples once, and how many there are of it."""
    ids = examples.column("movie_id").to_numpy()
    _, first_M, counts_M = np.unique(ids, return_index=True, return_counts=True)
    movies = examples.select(["movie_id", "release_year", "genres"]).take(first_M)
    return movies.append_column("ratings", [counts_M])


_TWINS: dict[Like, Callable[[_Columns], Any]] = {
    "criteo": _criteo,
    "taobao": _taobao,
    "movielens": _movielens,
}


def write_like(like: Like, rows: int, folder: str | Path, *, seed: int = 0) -> tuple[Path, Path]:
    """Write a twin of a data set: its columns, made-up values, labels that follow them.

    Ids are by a Zipf law, of the data set's vocabularies, but no more than a twentieth of the rows.
    Of movielens items.parquet has each movie of the training file, with its ratings there counted.

    Args:
        like: the data set.
        rows: examples, the last tenth of them for evaluation.
        folder: of the files; it is made.
        seed: of everything.

    Returns:
        paths of train.parquet and eval.parquet.

    Raises:
        ConfigError: another data set, or too few rows or too many.
        DataError: the files cannot be written.
    """
    import pyarrow.parquet as pq

    if like not in _TWINS:
        raise ConfigError("data set", like, ", ".join(get_args(Like)), "Choose one of them.")
    if not _LEAST_ROWS <= rows <= _MOST_ROWS:
        allowed = f"{_LEAST_ROWS}..{_MOST_ROWS}"
        raise ConfigError("rows of a data set", rows, allowed, "Change the number.")
    table = _TWINS[like](_Columns(rows, seed))
    first = rows - int(rows * _EVALUATED)
    try:
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        files = place / "train.parquet", place / "eval.parquet"
        for file, part in zip(files, (table[:first], table[first:]), strict=True):
            pq.write_table(part, file, row_group_size=1 << 16)
        if like == "movielens":
            pq.write_table(_movies(table[:first]), place / "items.parquet")
    except (OSError, ValueError) as error:
        remedy = "Choose another folder, or make space."
        raise DataError(f"folder {folder}", error, "one that can be written", remedy) from error
    return files
