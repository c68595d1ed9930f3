"""A bundle: a folder with what a server needs of a trained model, and nothing of its training.

| file | what |
|---|---|
| config.yaml | settings of the run |
| signature.json | inputs and outputs, features, and which rows it has |
| checkpoints/ | one full checkpoint: rows without optimizer state, the dense module, or both |
| dense.pt2, dense.pt | the dense module by `torch.export`, and its state dict |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal import config as settings
from shoal.checkpoint import CheckpointStore
from shoal.config import RunConfig
from shoal.config.build import ModelParts, build_parts, source_inputs
from shoal.errors import CheckpointError
from shoal.serve.signature import LOGITS, ExampleReader, ServedTensor, dense_inputs

Part = Literal["all", "entry", "ps", "dense"]
"""What of a model a bundle has: entry has the dense module and asks ps for rows."""
CONFIG, SIGNATURE, CHECKPOINTS = "config.yaml", "signature.json", "checkpoints"
_Name = Annotated[str, Field(max_length=1000)]
_Count = Annotated[int, Field(ge=0, lt=1 << 31)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TensorSignature(_Frozen):
    """A tensor that goes in or comes out; -1 stands for any size."""

    name: _Name
    dtype: Literal["float32", "int64"]
    shape: tuple[Annotated[int, Field(ge=-1)], ...]
    optional: bool = False


class ExportedTable(_Frozen):
    """A table of a bundle; dtype of its rows here."""

    name: _Name
    dim: _Count
    dtype: str
    rows: Annotated[int, Field(ge=0)]


class Signature(_Frozen):
    """What a bundle takes, gives and holds.

    Args:
        model: its name in the checkpoint.
        part: what the bundle has.
        step: of training.
        features: id features in the order of a batch.
        num_dense: dense columns.
        inputs, outputs: of a prediction, as a server of the bundle takes and gives them.
        dense_inputs, dense_outputs: of the dense module, in its order; its logits.
        dense_program: dense.pt2, or None and in `dense_problem` why there is none.
        amp: dtype of the dense module's products in training; the program has float32.
        tables: whose rows it has.
        index, of: which share of the rows, of how many.
        hashes: [start, stop) of the rows' hashes.
    """

    model: _Name
    part: Part
    step: Annotated[int, Field(ge=0)]
    features: tuple[_Name, ...]
    num_dense: _Count
    inputs: tuple[TensorSignature, ...]
    outputs: tuple[TensorSignature, ...]
    dense_inputs: tuple[TensorSignature, ...]
    dense_outputs: tuple[TensorSignature, ...]
    dense_program: str | None = None
    dense_problem: str | None = None
    amp: str = "none"
    tables: tuple[ExportedTable, ...] = ()
    index: _Count = 0
    of: Annotated[int, Field(ge=1, lt=1 << 31)] = 1
    hashes: tuple[int, int] = (0, 1 << 64)


def signature_of(parts: ModelParts, *, part: Part, step: int, amp: str) -> Signature:
    """The signature of a model, without tables."""

    def as_served(tensors: Sequence[ServedTensor]) -> tuple[TensorSignature, ...]:
        return tuple(TensorSignature.model_validate(asdict(one)) for one in tensors)

    served = ExampleReader(parts).signature
    return Signature(
        model=parts.name,
        part=part,
        step=step,
        features=tuple(one.name for one in parts.features),
        num_dense=parts.inputs.num_dense,
        inputs=as_served(served.inputs),
        outputs=as_served(served.outputs),
        dense_inputs=as_served(dense_inputs(parts)),
        dense_outputs=as_served([ServedTensor(LOGITS, "float32", served.outputs[0].shape)]),
        amp=amp,
    )


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle that was opened."""

    folder: Path
    config: RunConfig
    signature: Signature

    def parts(self) -> ModelParts:
        """The specs of its tables and its dense module, built without the data of the run."""
        own, given = self.signature, source_inputs(self.config.data.source)
        lists = frozenset(i.name for i in own.inputs if i.name in own.features and i.shape[1:])
        source = replace(given, features=own.features, lists=lists, num_dense=own.num_dense)
        return build_parts(self.config, source=source)

    @property
    def checkpoint(self) -> str:
        """The folder of its checkpoint, which `shoal.checkpoint.load` takes.

        Raises:
            CheckpointError: it has none.
        """
        store = CheckpointStore(str(self.folder / CHECKPOINTS))
        newest = store.latest()
        if newest is None:
            raise _no_bundle(self.folder, f"no checkpoint in {CHECKPOINTS}")
        return store.folder(newest.name).url


def open_bundle(folder: str | Path) -> Bundle:
    """Open a bundle of `shoal export`: a version's folder, or entry or ps_i in it.

    Raises:
        CheckpointError: it is none, or damaged.
    """
    folder = Path(folder)
    try:
        text = (folder / SIGNATURE).read_text(encoding="utf-8")
        signature = Signature.model_validate_json(text)
    except (OSError, ValueError, ValidationError) as error:
        raise _no_bundle(folder, str(error)[:500]) from error
    return Bundle(folder, settings.load(folder / CONFIG, environment={}), signature)


def _no_bundle(folder: Path, got: str) -> CheckpointError:
    return CheckpointError(
        f"bundle {folder}",
        got=got,
        allowed="a version of `shoal export`, or entry or ps_i in it",
        remedy="Export it again.",
    )
