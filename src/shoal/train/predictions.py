"""Predictions as Parquet."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from shoal.data import Batch
from shoal.errors import DataError, describe
from shoal.telemetry import Progress, ProgressState
from shoal.train.learner import Learner
from shoal.train.ranks import ALONE, Ranks

__all__ = ["SCHEMA", "write_predictions"]

SCHEMA = pa.schema(
    [("prediction", pa.float32()), ("label", pa.float32()), ("event_time_s", pa.int64())]
)


def write_predictions(
    path: Path,
    learner: Learner,
    batches: Iterable[Batch],
    progress: Progress,
    ranks: Ranks = ALONE,
) -> int:
    """Write one row an example, in the order of the batches; returns how many.

    The file appears under its name when it is whole. Over several ranks rank 0 writes, batch by
    batch, what all have predicted of their shares.

    Raises:
        DataError: the file cannot be written.
    """
    if not ranks.leads:
        for batch in batches:
            ranks.gathered(_rows(learner, batch), what="predictions of a batch")
        return 0
    partial, examples = Path(f"{path}.partial"), 0
    try:
        with progress, pq.ParquetWriter(partial, SCHEMA, compression="zstd") as writer:
            for batch in batches:
                mine = _rows(learner, batch)
                every = [mine]
                if ranks.many:
                    every = ranks.gathered(mine, what="predictions of a batch")
                for rows in every:
                    writer.write_batch(rows)
                    examples += rows.num_rows
                if progress.due():
                    progress.show(ProgressState(examples=examples))
            progress.show(ProgressState(examples=examples), final=True)
        partial.replace(path)
    except (OSError, ValueError) as error:  # also a path that no file can have
        raise DataError(
            describe(
                "file of predictions",
                got=f"{path} ({getattr(error, 'strerror', None) or error})",
                allowed="a path in a folder that exists and can be written",
                remedy="Choose another with --out.",
            )
        ) from error
    finally:
        with suppress(OSError, ValueError):
            partial.unlink()
    return examples


def _rows(learner: Learner, batch: Batch) -> pa.RecordBatch:
    columns = (
        learner.predict(batch).cpu().numpy(),
        batch.labels.float().cpu().numpy(),
        batch.event_times_B.cpu().numpy(),
    )
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    return pa.record_batch(arrays, schema=SCHEMA)
