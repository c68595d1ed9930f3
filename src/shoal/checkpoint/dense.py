"""Dense modules and their optimizers: copied at a cut, written, read back by name.

Names are those of `module.state_dict()`, without what DDP and torch.compile put before them, so
that one process, DDP and FSDP2 load what any of them saved. The state of an optimizer goes by
the names of its parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoal.checkpoint.dense_files import DenseReader, check_files, write_values
from shoal.checkpoint.job_state import check_state
from shoal.checkpoint.manifest import Manifest, SavedFile
from shoal.checkpoint.matching import LoadOptions
from shoal.checkpoint.optimizer_state import OfRows, OptimizerLoad, optimizer_values
from shoal.checkpoint.storage import Storage
from shoal.comm.collectives import Collectives, LocalCollectives
from shoal.errors import CheckpointError, describe

__all__ = ["DenseCapture", "DenseLoad", "capture", "named_state", "write"]


@dataclass(frozen=True, slots=True, eq=False)
class DenseCapture:
    """Copies of a rank's dense part on the CPU.

    Args:
        values: by name: DTensors with this rank's part; all else on rank 0 only.
        modules, optimizers: names.
    """

    values: Mapping[str, Any]
    modules: tuple[str, ...]
    optimizers: tuple[str, ...]


def capture(
    modules: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer], *, rank: int = 0
) -> DenseCapture:
    """Copy modules and optimizers to the CPU; later steps do not change the copies.

    Nothing is stepped: an optimizer that has no state yet is saved without.

    Raises:
        CheckpointError: an optimizer steps parameters that the module of its name lacks, or holds
            values that could not be loaded again.
    """
    values: dict[str, Any] = {}
    for name, module in modules.items():
        for key, value in named_state(module).items():
            _take(values, f"module/{name}/{key}", value, rank)
    single = _single(optimizers, modules)
    for name, optimizer in single.items():
        for key, value in optimizer_values(name, optimizer, _known(name, modules)).items():
            _take(values, f"optimizer/{name}/{key}", value, rank)
    return DenseCapture(values, tuple(modules), tuple(single))


def write(
    captured: DenseCapture, storage: Storage, collectives: Collectives | None = None
) -> tuple[SavedFile, ...]:
    """Write what all ranks captured below `dense/`; the files of all ranks.

    Raises:
        CheckpointError: storage refused, on any rank.
    """
    if not (captured.modules or captured.optimizers):
        return ()
    return write_values(captured.values, storage, collectives or LocalCollectives())


def named_state(module: nn.Module) -> dict[str, Any]:
    """Parameters and buffers themselves, and extra state, by their names without wrappers."""
    return _bare(module).state_dict(keep_vars=True)


class DenseLoad:
    """Modules and optimizers on the way in: nothing of them changes before `apply`.

    `check` and `read` take part in no collective; after each of them, ranks agree.

    Args:
        storage, manifest: the checkpoint.
        modules, optimizers: what is filled, by name.
        options: waivers.

    Raises:
        CheckpointError: modules or optimizers that the checkpoint lacks, or that are unknown to
            the job, and are not waived.
    """

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        modules: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        options: LoadOptions,
    ) -> None:
        self._storage, self._manifest, self._options = storage, manifest, options
        optimizers = _single(optimizers, modules) if options.state else {}
        problems = [*_names("module", manifest.modules, modules, options)]
        if options.state:
            problems += _names("optimizer", manifest.optimizers, optimizers, options)
        if problems:
            raise _differs(storage, problems)
        self._every = modules
        self._modules = {name: modules[name] for name in modules if name in manifest.modules}
        self._optimizers = {n: optimizers[n] for n in optimizers if n in manifest.optimizers}
        self._reader: DenseReader | None = None
        self._values: dict[str, dict[str, Any]] = {}
        self._loads: list[OptimizerLoad] = []

    def check(self, share: int = 0, shares: int = 1) -> None:
        """Check files of this rank's share of them, and every name and shape.

        Raises:
            CheckpointError: a file is missing or damaged, or parameters differ; lists them.
        """
        if not self._modules and not self._optimizers:
            return
        check_files(self._storage, self._manifest, share, shares)
        self._reader = DenseReader(self._storage)
        problems: list[str] = []
        for name, module in self._modules.items():
            self._values[name] = self._places(name, module, problems)
        if problems:
            raise _differs(self._storage, problems)

    def read(self) -> None:
        """Read all values beside those in use.

        Raises:
            CheckpointError: optimizers differ; lists how.
        """
        if self._reader is None:
            return
        for name, values in self._values.items():
            into = {f"module/{name}/{key}": value for key, value in values.items()}
            self._reader.fill(into)
            self._values[name] = {key: into[f"module/{name}/{key}"] for key in values}
        problems: list[str] = []
        for name, optimizer in self._optimizers.items():
            load = OptimizerLoad(name, optimizer, _known(name, self._every), self._reader)
            problems += load.read(self._options)
            self._loads.append(load)
        if problems:
            raise _differs(self._storage, problems)

    def apply(self) -> None:
        """Put what was read in place."""
        for name, values in self._values.items():
            bare = _bare(self._modules[name])
            with torch.no_grad():
                bare.load_state_dict({**bare.state_dict(), **values})
        for load in self._loads:
            load.apply()

    def _places(self, name: str, module: nn.Module, problems: list[str]) -> dict[str, Any]:
        """Empty tensors like the module's, for what is saved of it."""
        assert self._reader is not None
        prefix = f"module/{name}/"
        state = named_state(module)
        saved = {key.removeprefix(prefix) for key in self._reader.names() if key.startswith(prefix)}
        problems += [
            f"{key!r} of module {name!r} is not in it"
            for key in sorted(state.keys() - saved)
            if not _waived(f"module:{name}.{key}", self._options.allow_missing)
        ]
        problems += [
            f"{key!r} of it is unknown to module {name!r}"
            for key in sorted(saved - state.keys())
            if not _waived(f"module:{name}.{key}", self._options.allow_unknown)
        ]
        values: dict[str, Any] = {}
        for key in sorted(state.keys() & saved):
            there = self._reader.shape(prefix + key)
            here = tuple(state[key].shape) if isinstance(state[key], Tensor) else None
            if there != here:
                problems.append(
                    f"{key!r} of module {name!r} has shape {_said(there)} in it, {_said(here)} in "
                    "the model"
                )
            values[key] = None if here is None else torch.empty_like(state[key].detach())
        return values


def _single(optimizers: Mapping[str, Optimizer], modules: Collection[str]) -> dict[str, Optimizer]:
    """The optimizers, with the members of a `JointOptimizer` in its place: "name/0" and so on."""
    single: dict[str, Optimizer] = {}
    for name, optimizer in optimizers.items():
        members = getattr(optimizer, "optimizers", None)
        if members is not None:
            parts = {f"{name}/{i}": member for i, member in enumerate(members)}
            single |= _single(parts, parts)
        elif name in modules or isinstance(optimizer, OfRows):
            single[name] = optimizer
        else:
            raise _refused(f"optimizer {name!r}", "no module of its name", "a module's name")
    return single


def _known(name: str, modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Tensors by name among which an optimizer's parameters are: its module's, or all modules'."""
    if name in modules:
        return named_state(modules[name])
    return {f"{m}.{k}": v for m in modules for k, v in named_state(modules[m]).items()}


def _bare(module: nn.Module) -> nn.Module:
    """The module inside DDP and torch.compile."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif "_orig_mod" in module._modules:
            module = cast(nn.Module, module._modules["_orig_mod"])
        else:
            return module


def _take(values: dict[str, Any], key: str, value: Any, rank: int) -> None:
    if isinstance(value, DTensor) or (rank == 0 and isinstance(value, Tensor)):
        values[key] = value.detach().to(device="cpu", copy=True)
    elif rank == 0:
        check_state({"value": value}, f"{key} of a checkpoint")
        values[key] = copy.deepcopy(value)


def _names(
    kind: str, saved: tuple[str, ...], here: Mapping[str, Any], options: LoadOptions
) -> list[str]:
    missing = [
        f"{kind} {name!r} is not in it"
        for name in here
        if name not in saved and not _waived(f"{kind}:{name}", options.allow_missing)
    ]
    return missing + [
        f"{kind} {name!r} of it is unknown to the job"
        for name in saved
        if name not in here and not _waived(f"{kind}:{name}", options.allow_unknown)
    ]


def _waived(name: str, waivers: frozenset[str]) -> bool:
    return name in waivers


def _said(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else str(list(shape))


def _differs(storage: Storage, problems: list[str]) -> CheckpointError:
    got = "".join(f"\n  - {problem}" for problem in problems) + "\n"
    return _refused(
        f"dense part of checkpoint {storage.url}", got, "the same modules and optimizers"
    )


def _refused(what: str, got: str, allowed: str) -> CheckpointError:
    remedy = (
        "Build the job as it was when it was saved, or name what may differ in allow_missing and "
        "allow_unknown."
    )
    return CheckpointError(describe(what, got=got, allowed=allowed, remedy=remedy))
