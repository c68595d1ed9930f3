"""The config of a small run on made-up clicks, for tests that start whole programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def small_run(
    folder: Path,
    *,
    examples: int,
    eval_examples: int = 1_000,
    num_features: int = 4,
    vocabulary: int = 2_000,
    batch_size: int = 256,
    **sections: Any,
) -> Path:
    """Write `run.yaml` into a folder: a DeepFM of 4 floats a row; sections replace its own."""
    source = {
        "kind": "synthetic",
        "examples": examples,
        "eval_examples": eval_examples,
        "num_features": num_features,
        "vocabulary": vocabulary,
    }
    config = {
        "name": "small",
        "seed": 1,
        "data": {"source": source, "batch_size": batch_size},
        "tables": {"default": {"dim": 4}},
        "model": {"kind": "deepfm", "hidden": [16]},
        "baselines": [],
        **sections,
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    return file
