"""Models as they are served: requests in, arrays out; any number of threads at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from shoal.errors import ShapeError, known_name
from shoal.models.tasks import outputs_of
from shoal.serve.rows import PooledRows
from shoal.serve.signature import (
    DENSE,
    LOGITS,
    PREDICTION,
    Array,
    ExampleReader,
    Examples,
    ModelSignature,
    ServedTensor,
    as_ids,
    as_numbers,
    checked_size,
)
from shoal.table.shard import IdGroups, RowsById

Outputs = dict[str, Array]


class ReadRequest(Protocol):
    """A request that a model has read; `size` is what it counts for in a batch."""

    @property
    def size(self) -> int: ...


class Model(Protocol):
    """One version of a model; never changes what it replies, but for rows that follow a trainer."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> int: ...

    @property
    def signature(self) -> ModelSignature: ...

    @property
    def is_local(self) -> bool:
        """Whether it never waits for another process."""
        ...

    def read(self, inputs: Mapping[str, Array]) -> ReadRequest:
        """Check a request before it waits for its turn.

        Raises:
            UnknownName, InputError: what is wrong with it.
        """
        ...

    def run(self, requests: Sequence[Any]) -> list[Outputs]:
        """What it replies to each request, computed in one batch."""
        ...


class PredictModel:
    """Examples in, probabilities out: what `shoal predict` writes, bit for bit unless compiled.

    Args:
        name, version: of the model.
        reader: of its requests.
        rows: pooled rows of its features.
        program: the dense module, in eval mode.
        amp: dtype of the program's products.
    """

    def __init__(
        self,
        name: str,
        version: int,
        reader: ExampleReader,
        rows: PooledRows,
        program: Callable[..., Tensor],
        amp: torch.dtype = torch.float32,
    ) -> None:
        self.name, self.version, self.signature = name, version, reader.signature
        self.reader, self.rows, self.is_local = reader, rows, rows.is_local
        self._program, self._amp = program, amp

    def read(self, inputs: Mapping[str, Array]) -> Examples:
        """The examples of a request."""
        return self.reader.read(inputs)

    def run(self, requests: Sequence[Examples]) -> list[Outputs]:
        """Probabilities of each request's examples."""
        with torch.inference_mode():
            batch, dense_B = self.reader.join(requests)
            if not batch.batch_size:
                shape = (0, *self.signature.outputs[0].shape[1:])
                return [{PREDICTION: np.empty(shape, np.float32)} for _ in requests]
            logits_B = outputs_of(self._program, dense_B, self.rows(batch), self._amp)
            found_B = logits_B.sigmoid().numpy()
        cuts = np.cumsum([one.size for one in requests[:-1]])
        return [{PREDICTION: part} for part in np.split(found_B, cuts)]

    def predict(self, inputs: Mapping[str, Array]) -> Outputs:
        """Probabilities of one request's examples.

        Raises:
            UnknownName, InputError: an input that the model does not have, or does not take so.
        """
        return self.run([self.read(inputs)])[0]


class _DenseInputs:
    """The inputs of a dense module, each [B, ...]."""

    __slots__ = ("arrays", "size")

    def __init__(self, size: int, arrays: dict[str, Array]) -> None:
        self.size, self.arrays = size, arrays


class DenseModel:
    """Dense columns and pooled rows in, logits and probabilities out: the dense module alone.

    Args:
        name, version: of the model.
        inputs: of the module.
        tasks: that it predicts.
        program, amp: as of `PredictModel`.
    """

    def __init__(
        self,
        name: str,
        version: int,
        inputs: Sequence[ServedTensor],
        tasks: int,
        program: Callable[..., Tensor],
        amp: torch.dtype = torch.float32,
    ) -> None:
        self.name, self.version, self.is_local = name, version, True
        shape = (-1, tasks) if tasks > 1 else (-1,)
        outputs = (ServedTensor(one, "float32", shape) for one in (LOGITS, PREDICTION))
        self.signature = ModelSignature(tuple(inputs), tuple(outputs))
        self._program, self._amp = program, amp

    def read(self, inputs: Mapping[str, Array]) -> _DenseInputs:
        """The inputs of a request."""
        known = {one.name: one for one in self.signature.inputs}
        for name in inputs:
            known_name("input of the model", name, known)
        sizes = [len(one) for one in inputs.values() if one.ndim]
        size = checked_size(sizes[0] if sizes else 0)
        arrays = {k: as_numbers(inputs.get(k), one, size) for k, one in known.items()}
        return _DenseInputs(size, arrays)

    def run(self, requests: Sequence[_DenseInputs]) -> list[Outputs]:
        """Logits and probabilities of each request's examples."""
        with torch.inference_mode():
            joined = {
                one.name: torch.from_numpy(np.concatenate([r.arrays[one.name] for r in requests]))
                for one in self.signature.inputs
            }
            logits_B = outputs_of(self._program, joined.pop(DENSE, None), joined, self._amp)
            found = {LOGITS: logits_B.numpy(), PREDICTION: logits_B.sigmoid().numpy()}
        cuts = np.cumsum([one.size for one in requests[:-1]])
        parts = {name: np.split(one, cuts) for name, one in found.items()}
        return [{name: one[k] for name, one in parts.items()} for k in range(len(requests))]


class _Ids:
    """The ids of a request, by table number."""

    __slots__ = ("ids", "size")

    def __init__(self, ids: dict[int, Array]) -> None:
        self.ids, self.size = ids, sum(map(len, ids.values()))


class LookupModel:
    """Ids of tables in, their rows out, zeros where there is none: one share of a model's rows.

    Args:
        name, version: of the model.
        rows: finds them.
    """

    def __init__(self, name: str, version: int, rows: RowsById) -> None:
        self.name, self.version, self.is_local, self._rows = name, version, True, rows
        self._numbers = {spec.name: k for k, spec in enumerate(rows.specs)}
        self.signature = ModelSignature(
            tuple(ServedTensor(spec.name, "int64", (-1,), optional=True) for spec in rows.specs),
            tuple(ServedTensor(spec.name, "float32", (-1, spec.dim)) for spec in rows.specs),
        )

    def read(self, inputs: Mapping[str, Array]) -> _Ids:
        """The ids of a request."""
        ids = {}
        for name, given in inputs.items():
            known_name("table of the model", name, self._numbers)
            if given.ndim != 1:
                remedy = "Send a list of ids for each table."
                raise ShapeError(f"ids of table {name!r}", list(given.shape), "[N]", remedy)
            ids[self._numbers[name]] = as_ids(name, given)
        return _Ids(ids)

    def run(self, requests: Sequence[_Ids]) -> list[Outputs]:
        """The rows of each request's ids."""
        asked = [(table, ids) for one in requests for table, ids in one.ids.items()]
        if not asked:
            return [{} for _ in requests]
        splits = np.cumsum([0, *(len(ids) for _, ids in asked)])
        ids_N = torch.from_numpy(np.concatenate([ids for _, ids in asked]))
        tables_G = torch.tensor([table for table, _ in asked], dtype=torch.int32, device="cpu")
        found = iter(self._rows.find(IdGroups(ids_N, torch.from_numpy(splits), tables_G)).weights)
        specs = self._rows.specs
        return [
            {specs[table].name: next(found).float().numpy() for table in one.ids}
            for one in requests
        ]
