"""One test body on every implementation of an operator.

`reference` runs plain torch (`plain_operators`), `core` the compiled core, `triton` the kernels:
interpreted on CPU tensors here, compiled on a GPU under `make test-gpu`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch

import shoal.ops
from shoal.ops import dispatch
from support.plain_operators import PLAIN

__all__ = ["BACKENDS", "COMPILED", "Implementation", "forced"]

Name = Literal["reference", "core", "triton"]


def forced(name: Name) -> contextlib.AbstractContextManager[None]:
    """`dispatch.forced` of an implementation."""
    return dispatch.forced(PLAIN if name == "reference" else name)


@dataclass(frozen=True)
class Implementation:
    """How a test calls an operator: where its tensors go, and which code runs."""

    name: Name
    device: str

    def __getattr__(self, op: str) -> Callable[..., Any]:
        public = getattr(shoal.ops, op)

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.chosen():
                return public(*args, **kwargs)

        return call

    @property
    def interpreted(self) -> bool:
        """Whether kernels are interpreted: milliseconds a block, so inputs must be small."""
        return self.name == "triton" and self.device == "cpu"

    @contextlib.contextmanager
    def chosen(self) -> Iterator[None]:
        """Operators called inside, backward passes too, run this implementation."""
        with forced(self.name):
            yield


_CORE = pytest.param(Implementation("core", "cpu"), id="core")
_GPU = pytest.param(Implementation("triton", "cuda"), marks=pytest.mark.gpu, id="triton-cuda")
BACKENDS = [
    pytest.param(Implementation("reference", "cpu"), id="reference"),
    _CORE,
    _GPU
    if torch.cuda.is_available()
    else pytest.param(Implementation("triton", "cpu"), id="triton-interpreted"),
]
COMPILED = [_CORE, _GPU]
"""Fast enough for large inputs."""
