"""Where examples come from and in which order: sources, features, loader, and the flights.

pyarrow is imported when a file or a table is read, not before.
"""

from __future__ import annotations

from shoal.data import flights
from shoal.data.batch import Batch, TensorSource
from shoal.data.features import IdFeature, Recipe, cross, encode
from shoal.data.loader import Loader, Order, Pace, RankShare
from shoal.data.sources import CsvSource, ParquetSource, Source, Subset, split_by_time
from shoal.data.synthetic import SyntheticClicks

__all__ = [
    "Batch",
    "CsvSource",
    "IdFeature",
    "Loader",
    "Order",
    "Pace",
    "ParquetSource",
    "RankShare",
    "Recipe",
    "Source",
    "Subset",
    "SyntheticClicks",
    "TensorSource",
    "cross",
    "encode",
    "flights",
    "split_by_time",
]
