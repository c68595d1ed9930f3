"""Names of TorchRec and TorchEasyRec, for scripts that call them; docs/names.md has the others.

Batches are Shoal's: `KeyedRagged.from_torchrec` views a KeyedJaggedTensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from shoal import distributed
from shoal.comm import Mesh, init
from shoal.distributed.model import DenseWrapper, Placing
from shoal.embedding.collection import EmbeddingCollection
from shoal.errors import ConfigError, DTypeError, InputError, ShapeError
from shoal.pipeline import TrainPipeline, create_train_pipeline
from shoal.table.rows import real_dtype

__all__ = [
    "DistributedModelParallel",
    "TrainPipelineSparseDist",
    "create_train_pipeline",
    "import_weights",
    "init_process_group",
]

_WEIGHT = re.compile(r"(?:^|\.)embedding(?:_bag)?s\.(.+)\.weight$")


def init_process_group() -> tuple[torch.device, str]:
    """Start the ranks of this job: (this rank's device, "nccl", "gloo" or, for one, "local").

    Raises: as `shoal.comm.init`.
    """
    mesh = init()
    return mesh.device, mesh.backend


def DistributedModelParallel(  # noqa: N802 - a name of TorchRec's, a factory in TorchEasyRec, too
    module: nn.Module,
    env: Mesh | None = None,
    device: torch.device | None = None,
    plan: Placing = None,
    sharders: Sequence[object] | None = None,
    init_data_parallel: bool = True,
    init_parameters: bool = True,
    data_parallel_wrapper: DenseWrapper = "ddp",
) -> distributed.DistributedModelParallel:
    """Place the tables of a module on ranks, and replicate or split its dense part.

    Args:
        module: on this rank's device.
        env: the ranks; None takes those of the job.
        device: this rank's, or None.
        plan: a plan, a placement, or sharding types by table.
        sharders: None: a sharding type is a value of the plan.
        init_data_parallel, init_parameters: True: both happen when the model is made.
        data_parallel_wrapper: "ddp" or "fsdp2".

    Raises:
        ConfigError: an argument that has no meaning here, or as the class itself.
    """
    mesh = env or init()
    for name, got, fits in (
        ("device", device, device is None or torch.device(device) == mesh.device),
        ("sharders", sharders, not sharders),
        ("init_data_parallel", init_data_parallel, init_data_parallel),
        ("init_parameters", init_parameters, init_parameters),
    ):
        if not fits:
            remedy = "Leave it out; docs/names.md says what takes its place."
            raise ConfigError(f"{name} of DistributedModelParallel", got, "its default", remedy)
    return distributed.DistributedModelParallel(
        module, plan, mesh=mesh, dense=data_parallel_wrapper
    )


def TrainPipelineSparseDist(  # noqa: N802 - TorchRec's name
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device | None = None,
    execute_all_batches: bool = True,
    check_all_workers_data_status: bool = False,
) -> TrainPipeline:
    """`create_train_pipeline` in TorchRec's order of arguments; exact, at staleness 0."""
    return create_train_pipeline(
        model,
        optimizer,
        check_all_workers_data_status,
        device=device,
        execute_all_batches=execute_all_batches,
    )


def import_weights(
    tables: EmbeddingCollection, source: nn.Module | Mapping[str, object]
) -> dict[str, int]:
    """Write the weights of TorchRec's tables into tables of the same names.

    Row i of a table becomes the row of id i. Over ranks all of them call this.

    Args:
        tables: with a table of each name, of that width.
        source: an EmbeddingBagCollection, an EmbeddingCollection, a model that has some, or the
            state dict of one; not sharded. Other weights in it are not read.

    Returns:
        rows by table.

    Raises:
        InputError: no `embedding_bags.TABLE.weight` or `embeddings.TABLE.weight` that is a tensor,
            or two of one table.
        UnknownName: a table that `tables` does not have.
        ShapeError: another width.
        DTypeError: weights that are sparse, or of a dtype that the table's does not hold. Nothing
            was written then.
    """
    state = source.state_dict() if isinstance(source, nn.Module) else source
    found = [(_WEIGHT.search(key), one) for key, one in state.items()]
    given = [(key[1], one) for key, one in found if key and isinstance(one, torch.Tensor)]
    named = dict(given)
    if not named or len(named) < len(given):
        got = "a table of one name twice" if named else type(source).__name__
        allowed, remedy = "an EmbeddingBagCollection or its state dict", "Give one, not sharded."
        raise InputError("tables to import", got, allowed, remedy)
    for name, weights_ND in named.items():
        dim = tables.table(name).spec.dim
        kind, wanted = weights_ND.dtype, real_dtype(tables.table(name).spec)
        fits = kind.is_floating_point and torch.promote_types(kind, wanted) is wanted
        if not fits or weights_ND.layout is not torch.strided:
            got, allowed = f"{weights_ND.layout}, {kind}", f"dense numbers that {wanted} holds"
            raise DTypeError(f"weights of table {name!r}", got, allowed, "Convert them first.")
        if weights_ND.ndim != 2 or weights_ND.shape[1] != dim:
            what, shape = f"shape of the weights of table {name!r}", tuple(weights_ND.shape)
            raise ShapeError(what, shape, f"[N, {dim}]", "Import them into a table of that width.")
    for name, weights_ND in named.items():
        table, ids_N = tables.table(name), torch.arange(len(weights_ND), device=tables.shard.device)
        table.assign(ids_N, weights_ND.detach().to(ids_N.device, real_dtype(table.spec)))
    return {name: len(weights_ND) for name, weights_ND in named.items()}
