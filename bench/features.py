"""Rows a second of the feature engine, on a Criteo-like schema: 26 texts to ids, 13 numbers.

    python bench/features.py [--quick] [--json FILE]

Texts are Criteo's: 8 hexadecimal digits, Zipf over its vocabularies, 3 % missing. Numbers are
integers, 10 % missing. Batches of 65,536 rows lie in memory as Arrow tables. One process computes
ids and dense numbers of them (`FeatureSet`), and takes turns with the same made by plain pyarrow,
numpy and Python's own blake2b of each distinct text (`shoal.ids` did so before).
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import numpy as np

from harness import (
    Case,
    Job,
    Measured,
    Runner,
    add_json,
    as_row,
    conclude,
    interleave,
    measured_json,
    median,
    run_job,
)

PACKAGES = ("shoal", "torch", "pyarrow", "numpy")
VOCABULARIES = (
    1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194, 27,
    14_992, 5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572,
)  # fmt: skip
BY_FLOOR, BY_PYTHON = "engine, 2 threads", "engine, 1 thread"


def cases() -> tuple[Case, ...]:
    floor = Case(
        name=BY_FLOOR, unit="rows/s", peer="1 M rows/s", bar=1.0, stretch=2.0, peer_value=1e6
    )
    python = Case(name=BY_PYTHON, unit="rows/s", peer="pyarrow, numpy and hashlib", bar=1.0)
    return floor, python


def batches(count: int, rows: int) -> list:
    """Arrow tables of `rows` rows."""
    import pyarrow as pa

    rng = np.random.default_rng(0)
    made = []
    for _ in range(count):
        columns = {}
        for k, size in enumerate(VOCABULARIES):
            # Zipf of exponent 1.05 over `size` ids, by its inverse.
            u = rng.random(rows)
            rank = ((u * (size**-0.05 - 1) + 1) ** -20.0).astype(np.int64)
            words = (rank + k) * 2_654_435_761 % 2**32
            text = np.char.zfill(np.char.mod("%x", words), 8)
            columns[f"c{k}"] = pa.array(text, mask=rng.random(rows) < 0.03)
        for k in range(13):
            columns[f"n{k}"] = pa.array(rng.integers(0, 1000, rows), mask=rng.random(rows) < 0.1)
        made.append(pa.table(columns))
    return made


def measure(count: int, rows: int, passes: int) -> dict[str, Measured]:
    import torch

    from shoal.data import FeatureSet, FeatureSpec
    from shoal.data.kinds import Id, Raw

    torch.set_num_threads(1)
    tables = batches(count, rows)
    ids = (FeatureSpec(name=f"c{k}", kind=Id(), default="none") for k in range(26))
    numbers = (FeatureSpec(name=f"n{k}", kind=Raw(), default=0.0) for k in range(13))
    features = FeatureSet((*ids, *numbers))
    ours, theirs = features(tables[0]), by_python(tables[0])
    assert np.array_equal(ours.ids.values_N.numpy(), theirs[0])
    assert np.array_equal(ours.dense.numpy(), theirs[1])
    seconds = interleave(
        [
            Runner(name=BY_FLOOR, run=lambda i: features(tables[i], threads=2)),
            Runner(name=BY_PYTHON, run=lambda i: features(tables[i])),
            Runner(name="python", run=lambda i: by_python(tables[i])),
        ],
        batches=count,
        passes=passes,
        warmup=2,
    )
    speed = {name: rows / median(own) for name, own in seconds.items()}
    return {
        BY_FLOOR: Measured(ours=speed[BY_FLOOR]),
        BY_PYTHON: Measured(ours=speed[BY_PYTHON], peer_value=speed["python"]),
    }


def by_python(table) -> tuple[np.ndarray, np.ndarray]:
    """The same ids and numbers, by pyarrow, numpy and hashlib."""
    import pyarrow.compute as pc

    values = []
    for k in range(26):
        encoded = pc.fill_null(table.column(f"c{k}"), "none").combine_chunks().dictionary_encode()
        words = [_id(text) for text in encoded.dictionary.to_pylist()]
        values.append(np.array(words, np.int64)[encoded.indices.to_numpy()])
    dense = [pc.fill_null(table.column(f"n{k}"), 0).to_numpy() for k in range(13)]
    return np.concatenate(values), np.stack(dense, axis=1).astype(np.float32)


def _id(text: str) -> int:
    if text.isdecimal() and not text.startswith("0"):
        return int(text)
    word = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(word, "little", signed=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_json(parser, "features")
    parser.add_argument("--quick", action="store_true", help="small batches, few repetitions")
    parser.add_argument("--worker", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        source, target = options.worker
        params = json.loads(source.read_text())["params"]
        target.write_text(measured_json(measure(**params)))
        return
    size = (2, 4096, 1) if options.quick else (8, 65_536, 3)
    params = dict(zip(("count", "rows", "passes"), size, strict=True))
    found = run_job(Job(task="features", params=params, cases=cases()), Path(__file__).resolve())
    conclude([as_row(case, found.get(case.name)) for case in cases()], options.json, PACKAGES)


if __name__ == "__main__":
    main()
