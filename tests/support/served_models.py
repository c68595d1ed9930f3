"""Small models to serve, and servers of them in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from shoal import config as settings
from shoal import train
from shoal.errors import InputError
from shoal.serve.loading import FolderSource
from shoal.serve.model import Model, Outputs
from shoal.serve.repository import Repository
from shoal.serve.server import ModelServer
from shoal.serve.service import Service
from shoal.serve.signature import ModelSignature, ServedTensor

TINY: dict[str, Any] = {
    "name": "tiny",
    "seed": 1,
    "data": {
        "source": {
            "kind": "synthetic",
            "examples": 2000,
            "eval_examples": 100,
            "num_features": 3,
            "vocabulary": 200,
        },
        "batch_size": 256,
    },
    "tables": {"default": {"dim": 4}},
    "model": {"kind": "deepfm", "hidden": [8]},
    "baselines": ["logistic"],
}


def trained(folder: Path, **changes: Any) -> Path:
    """The folder of a run of `TINY`."""
    config = settings.from_mapping({**TINY, "output": {"dir": str(folder)}, **changes})
    return train.run(config, console=Console(quiet=True)).folder


def tiny_inputs(size: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs of `TINY`'s model."""
    generator = np.random.default_rng(seed)
    inputs = {f"f{k}": generator.integers(0, 300, size) for k in range(3)}
    return inputs | {"dense": generator.normal(size=(size, 4)).astype(np.float32)}


@contextmanager
def serving(*paths: Path, **options: Any) -> Iterator[tuple[ModelServer, Repository]]:
    """A server of runs or exports, with ports of its own."""
    with serving_sources([FolderSource(path) for path in paths], **options) as both:
        yield both


@contextmanager
def serving_sources(
    sources: Sequence[Any], *, token: str | None = None, limits: Any = None, **options: Any
) -> Iterator[tuple[ModelServer, Repository]]:
    """The same of sources."""
    with (
        Repository(sources, every_s=0.05) as models,
        ModelServer(Service(models, limits=limits, token=token), version="0", **options) as server,
    ):
        yield server, models


class EchoModel:
    """Doubles numbers; counts the batches that it ran."""

    is_local = True

    def __init__(self, name: str = "echo", version: int = 1) -> None:
        self.name, self.version = name, version
        tensors = (ServedTensor("x", "float32", (-1,)),)
        self.signature = ModelSignature(tensors, (ServedTensor("y", "float32", (-1,)),))
        self.batches: list[int] = []

    def read(self, inputs: Mapping[str, np.ndarray]) -> Any:
        x = inputs.get("x")
        if x is None or len(inputs) > 1 or x.ndim != 1 or x.dtype.kind not in "fiu":
            raise InputError("inputs of the echo", list(inputs), "x: numbers [N]", "Send x.")
        return x

    def run(self, requests: Sequence[np.ndarray]) -> list[Outputs]:
        self.batches.append(len(requests))
        return [{"y": 2 * one} for one in requests]


class OneSource:
    """A source of models that tests set."""

    def __init__(self, model: Model | None, name: str = "echo") -> None:
        self.name, self.model, self.closed = name, model, False

    def newest(self) -> int | None:
        return None if self.model is None else self.model.version

    def load(self, version: int) -> Model:
        assert self.model is not None
        return self.model

    def staleness_s(self) -> float | None:
        return None

    def close(self) -> None:
        self.closed = True
