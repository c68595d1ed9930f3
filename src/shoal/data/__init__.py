"""Where examples come from and in which order: sources, features, loader, and the flights.

pyarrow is imported when a file or a table is read, not before.
"""

from __future__ import annotations

from shoal.data import flights
from shoal.data.batch import Batch, TensorSource
from shoal.data.feature_set import FeatureSet, FeatureSpec, sequence_group
from shoal.data.features import IdFeature, Recipe, encode, model_inputs
from shoal.data.kafka import Kafka, KafkaFeed
from shoal.data.kinds import cross
from shoal.data.loader import Loader, Order, RankShare
from shoal.data.quarantine import Quarantine
from shoal.data.samplers import Sampler, SamplerSettings
from shoal.data.sources import CsvSource, ParquetSource, Source, Subset, first_of, split_by_time
from shoal.data.streams import Feed, Replay, StreamLoader
from shoal.data.synthetic import SyntheticClicks, write_like

__all__ = [
    "Batch",
    "CsvSource",
    "FeatureSet",
    "FeatureSpec",
    "Feed",
    "IdFeature",
    "Kafka",
    "KafkaFeed",
    "Loader",
    "Order",
    "ParquetSource",
    "Quarantine",
    "RankShare",
    "Recipe",
    "Replay",
    "Sampler",
    "SamplerSettings",
    "Source",
    "StreamLoader",
    "Subset",
    "SyntheticClicks",
    "TensorSource",
    "cross",
    "encode",
    "first_of",
    "flights",
    "model_inputs",
    "sequence_group",
    "split_by_time",
    "write_like",
]
