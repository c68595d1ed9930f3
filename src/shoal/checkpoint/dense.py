"""Dense modules and their optimizers: copied at a snapshot point, written, read back by name."""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoal.checkpoint.job_state import check_state
from shoal.checkpoint.manifest import Manifest, SavedFile
from shoal.checkpoint.row_files import check_streaming, damaged, parsing, saved_file
from shoal.checkpoint.storage import DurableFile, Storage
from shoal.checkpoint.table_match import LoadOptions, differs
from shoal.comm.collectives import Collectives, LocalCollectives
from shoal.comm.consensus import together
from shoal.errors import CheckpointError

FOLDER = "dense"
_INDEX = f"{FOLDER}/.metadata"

_TEMPORARY = ".tmp"


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


def write(
    captured: DenseCapture, storage: Storage, collectives: Collectives | None = None
) -> tuple[SavedFile, ...]:
    """Write what all ranks captured below `dense/`.

    Args:
        captured: by this rank.
        storage: the checkpoint's folder.
        collectives: the ranks; all of them call this. None: this one alone.

    Returns:
        the files of all ranks, by path; the same on every rank.

    Raises:
        CheckpointError: storage refused, on any rank.
    """
    if not (captured.modules or captured.optimizers):
        return ()
    collectives = collectives or LocalCollectives()
    files = _Files(storage)
    writer = FileSystemWriter(FOLDER, single_file_per_rank=True, sync_files=False)
    writer.fs, writer.path = files, FOLDER  # which its index has as a text
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    first = collectives.rank == 0

    def plan() -> Any:
        planner.set_up_planner(dict(captured.values), writer.storage_meta(), first)
        writer.set_up_storage_writer(first)
        return writer.prepare_local_plan(planner.create_local_plan())

    plans = together(collectives, "plan of the dense part of a checkpoint", plan)

    here: list[Metadata] = []

    def write() -> Any:
        # Every rank makes the plan of all: it is a function of what all have heard.
        everything, metadata = planner.create_global_plan(plans)
        here.append(metadata)
        own = planner.finish_plan(writer.prepare_global_plan(everything)[collectives.rank])
        return writer.write_data(own, planner).value() if own.items else []

    results = together(collectives, "writing the dense part of a checkpoint", write)

    def finish() -> list[SavedFile]:
        if first:
            writer.finish(here[0], results)
        return [saved_file(file, "dense") for file in files.written]

    every = together(collectives, "index of the dense part of a checkpoint", finish)
    return tuple(sorted((one for own in every for one in own), key=lambda one: one.path))


def check_files(
    storage: Storage, manifest: Manifest, share: int = 0, shares: int | None = 1
) -> None:
    """Compare size and checksum of a share of the dense files, and of their index.

    shares: into how many parts they are divided; None: the index only.

    Raises:
        CheckpointError: a file is missing or damaged; names it.
    """
    found = [one for one in manifest.files if one.kind == "dense"]
    for number, one in enumerate(found):
        mine = shares is not None and number % shares == share
        if mine or one.path.endswith(".metadata"):
            check_streaming(storage, one)


class DenseReader:
    """Reads values that `write` wrote, each rank on its own.

    Args:
        storage: the checkpoint's folder.
    """

    def __init__(self, storage: Storage) -> None:
        self._reader = FileSystemReader(FOLDER)
        self._reader.fs = _Files(storage)
        self._storage = storage
        with self._parsing():
            self.metadata = _index(storage)
            sizes = (
                one.properties.dtype.itemsize * one.size.numel()
                for one in self.metadata.state_dict_metadata.values()
                if isinstance(one, TensorStorageMetadata)
            )
            wanted, there = sum(sizes), storage.sizes().items()
            held = sum(size for path, size in there if path.startswith(f"{FOLDER}/"))
            if wanted > held:
                raise damaged(
                    storage, _INDEX, f"tensors of {wanted} bytes", f"{held} bytes of files"
                )

    def shape(self, key: str) -> tuple[int, ...] | None:
        """Shape of a tensor; None for other objects.

        Raises:
            KeyError: there is no such value.
        """
        size = getattr(self.metadata.state_dict_metadata[key], "size", None)
        return None if size is None else tuple(size)

    def place(self, key: str, like: object = None) -> Tensor | None:
        """An empty tensor of the saved form, split over ranks where `like` is; None for others."""
        saved = self.metadata.state_dict_metadata[key]
        if not isinstance(saved, TensorStorageMetadata):
            return None
        dtype = saved.properties.dtype
        if isinstance(like, DTensor) and like.shape == saved.size:
            return torch.empty_like(like.detach(), dtype=dtype)
        return torch.empty(saved.size, dtype=dtype, device="cpu")

    def names(self) -> Iterator[str]:
        """Names of all values."""
        return iter(self.metadata.state_dict_metadata)

    def fill(self, values: dict[str, Any]) -> None:
        """Read into tensors of the saved shape, of any dtype; other entries are replaced.

        Of a DTensor the local part is filled.
        """
        planner = _PlainPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with self._parsing():
            planner.set_up_planner(values, self.metadata, True)
            self._reader.set_up_storage_reader(self.metadata, True)
            plan = self._reader.prepare_local_plan(planner.create_local_plan())
            (plan,) = self._reader.prepare_global_plan(planner.create_global_plan([plan]))
            self._reader.read_data(planner.finish_plan(plan), planner).wait()

    def every(self) -> None:
        """Read all values, one after the other, and forget them."""
        for key in self.names():
            self.value(key)

    def value(self, key: str) -> Any:
        """A value by its name, in new memory."""
        values: dict[str, Any] = {key: self.place(key)}
        self.fill(values)
        return values[key]

    def _parsing(self) -> AbstractContextManager[None]:
        return parsing(self._storage, _INDEX, "names, shapes and places of values")


def read_module(storage: Storage, manifest: Manifest, name: str) -> dict[str, Tensor]:
    """The tensors of a saved module by name, without the module; extra state is left out.

    Raises:
        CheckpointError: a dense file is missing or damaged.
    """
    prefix = f"module/{name}/"
    if name not in manifest.modules:
        return {}
    check_files(storage, manifest)
    reader = DenseReader(storage)
    return {
        key.removeprefix(prefix): reader.value(key)
        for key in reader.names()
        if key.startswith(prefix) and reader.shape(key) is not None
    }


def _index(storage: Storage) -> Metadata:
    """What `.metadata` says, which torch pickles."""
    with storage.open(_INDEX) as file:
        try:
            found = _PlainUnpickler(file).load()
            if not isinstance(found, Metadata):
                raise pickle.UnpicklingError(type(found).__name__)
        except pickle.UnpicklingError as error:
            where = f"{storage.url}/{_INDEX}"
            remedy = "Load another checkpoint; this one was not written by `shoal`."
            raise CheckpointError(
                f"index {where}", got=error, allowed="names and shapes alone", remedy=remedy
            ) from error
    return found


class _PlainUnpickler(pickle.Unpickler):
    """Makes the values of an index, and calls nothing else that a file may name."""

    def find_class(self, module: str, name: str) -> Any:
        if module in _INDEX_MODULES or (module, name) == ("torch", "Size"):
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ in (module, "torch"):
                return found
        elif (module, name) == ("torch.serialization", "_get_layout"):
            return super().find_class(module, name)
        elif module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{module}.{name}")


# Classes that they define; those that they import are not meant.
_INDEX_MODULES = ("torch.distributed.checkpoint.metadata", _StorageInfo.__module__)


class _PlainPlanner(DefaultLoadPlanner):
    """Objects are loaded without running code of the file."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, weights_only=True, map_location="cpu")
        self.state_dict[read_item.dest_index.fqn] = loaded


class _Files(FileSystem):
    """What torch's readers and writers ask of a file system. Files are durable once closed.

    It renames nothing: the manifest commits, so a file has its final name at once.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.written: list[DurableFile] = []

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        if mode == "rb":
            with self._storage.open(os.fspath(path)) as source:
                yield source
            return
        with self._storage.create(os.fspath(path).removesuffix(_TEMPORARY)) as file:
            yield file
        self.written.append(file)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        assert os.fspath(path) == os.fspath(new_path) + _TEMPORARY

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        self._storage.make()

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return False

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        raise AssertionError(f"asked to remove {os.fspath(path)}")


_MEMBERS = ("params", "param_names")
_REST = "rest"  # groups, what tensors there are, and values that are none


@runtime_checkable
class OfRows(Protocol):
    """A `SparseOptimizer`: its state is plain values, and rows bring their own."""

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise CheckpointError for a state that it cannot load."""


def optimizer_values(name: str, optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """State tensors as "state/<parameter>/<key>", and one plain value for all else.

    Args:
        name: of the optimizer, for messages.
        optimizer: saved as it is; nothing is stepped.
        state: the module's tensors by name.

    Raises:
        CheckpointError: a parameter that the module lacks.
    """
    if isinstance(optimizer, OfRows):
        return {_REST: optimizer.state_dict()}
    names = _names_of(name, optimizer, state)
    saved = optimizer.state_dict()
    values: dict[str, Any] = {}
    tensors: dict[str, list[str]] = {}
    others: dict[str, dict[str, Any]] = {}
    for index, own in saved["state"].items():
        parameter = names[index]
        for key, value in own.items():
            if isinstance(value, Tensor):
                values[f"state/{parameter}/{key}"] = value
                tensors.setdefault(parameter, []).append(key)
            else:
                others.setdefault(parameter, {})[key] = value
    groups = [
        {**group, "params": [names[index] for index in group["params"]]}
        for group in saved["param_groups"]
    ]
    values[_REST] = {"groups": groups, "tensors": tensors, "values": others}
    return values


def _read_optimizer(
    name: str,
    optimizer: Optimizer,
    state: Mapping[str, Any],
    reader: DenseReader,
    options: LoadOptions,
) -> tuple[dict[str, Any], list[str]]:
    """What an optimizer's `load_state_dict` takes, in memory of its own, and what does not fit.

    state: its module's tensors by name.
    """
    prefix = f"optimizer/{name}/"
    found: dict[str, Any] = {prefix + _REST: None}
    reader.fill(found)
    rest = found[prefix + _REST]
    if isinstance(optimizer, OfRows):
        optimizer.check_state_dict(rest)
        return rest, []
    if "groups" not in rest:
        return {}, [f"optimizer {name!r} of it steps rows"]
    names = _names_of(name, optimizer, state)
    saved = {one: group for group in rest["groups"] for one in group["params"]}
    label = f"optimizer {name!r}"
    problems = _unpaired(
        ("state of ", label), f"optimizer:{name}.", sorted(names), sorted(saved), options
    )
    groups = _groups(label, optimizer, names, saved, problems)
    loaded: dict[int, dict[str, Any]] = {}
    places: dict[str, Any] = {}
    for index, parameter in enumerate(names):
        values = dict(rest["values"].get(parameter, {}))
        for key in rest["tensors"].get(parameter, ()):
            where = f"{prefix}state/{parameter}/{key}"
            values[key] = places[where] = reader.place(where, state[parameter])
        if values:
            loaded[index] = values
    if not problems:
        reader.fill(places)
    return {"state": loaded, "param_groups": groups}, problems


def _groups(
    label: str,
    optimizer: Optimizer,
    names: Sequence[str],
    saved: Mapping[str, Any],
    problems: list[str],
) -> list[dict[str, Any]]:
    """Groups as they are here, with the settings that their parameters were saved with."""
    groups = []
    for number, group in enumerate(optimizer.state_dict()["param_groups"]):
        own = [saved[names[index]] for index in group["params"] if names[index] in saved]
        settings = [{k: v for k, v in one.items() if k not in _MEMBERS} for one in own]
        # Compared by their text: tensors among them do not compare to one bool.
        if len({repr(sorted(one.items())) for one in settings}) > 1:
            problems.append(f"parameters of group {number} of {label} have several settings in it")
        groups.append({**group, **(settings[0] if settings else {})})
    return groups


def _unpaired(
    words: tuple[str, str],
    waiver: str,
    here: Iterable[str],
    saved: Iterable[str],
    options: LoadOptions,
) -> list[str]:
    """Names that only one side has and nobody waived.

    Args:
        words: what stands before a name, and whose it is; "" for the job.
        waiver: what stands before a name in the options.
    """
    before, owner = words
    there, mine = set(saved), set(here)
    missing = [
        f"{before}{name!r}{owner and ' of '}{owner} is not in it"
        for name in here
        if name not in there and waiver + name not in options.allow_missing
    ]
    return missing + [
        f"{'' if owner else before}{name!r} of it is unknown to {owner or 'the job'}"
        for name in saved
        if name not in mine and waiver + name not in options.allow_unknown
    ]


def _names_of(name: str, optimizer: Optimizer, state: Mapping[str, Any]) -> list[str]:
    """Names of an optimizer's parameters, in the order in which it numbers them."""
    known: dict[int, str] = {}
    for key, value in state.items():
        known.setdefault(id(value), key)
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    strangers = [list(one.shape) for one in parameters if id(one) not in known]
    if strangers:
        raise CheckpointError(
            f"optimizer {name!r}",
            got=f"parameters of shapes {strangers} that module {name!r} lacks",
            allowed="an optimizer of that module's parameters",
            remedy="Hand in module and optimizer under one name; tables bring the state of "
            "their own optimizers.",
        )
    return [known[id(one)] for one in parameters]


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
        problems: list[str] = []
        modules = modules if options.dense else {}
        optimizers = _single(optimizers, modules) if options.dense and options.state else {}
        if options.dense:
            problems += _unpaired(("module ", ""), "module:", modules, manifest.modules, options)
        if options.dense and options.state:
            words = ("optimizer ", "")
            problems += _unpaired(words, "optimizer:", optimizers, manifest.optimizers, options)
        if problems:
            raise _differs(storage, problems)
        self._every = modules
        self._modules = {name: modules[name] for name in modules if name in manifest.modules}
        self._optimizers = {n: optimizers[n] for n in optimizers if n in manifest.optimizers}
        self._reader: DenseReader | None = None
        self._values: dict[str, dict[str, Any]] = {}
        self._states: dict[str, dict[str, Any]] = {}

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
        """Read all values into memory next to those in use.

        Raises:
            CheckpointError: optimizers differ; lists how.
        """
        if self._reader is None:
            return
        for values in self._values.values():
            self._reader.fill(values)
        problems: list[str] = []
        for name, optimizer in self._optimizers.items():
            known = _known(name, self._every)
            state, wrong = _read_optimizer(name, optimizer, known, self._reader, self._options)
            self._states[name] = state
            problems += wrong
        if problems:
            raise _differs(self._storage, problems)

    def apply(self) -> None:
        """Put what was read in place."""
        for name, values in self._values.items():
            bare = _bare(self._modules[name])
            own = {key.removeprefix(f"module/{name}/"): value for key, value in values.items()}
            with torch.no_grad():
                bare.load_state_dict({**bare.state_dict(), **own})
        for name, state in self._states.items():
            self._optimizers[name].load_state_dict(state)

    def _places(self, name: str, module: nn.Module, problems: list[str]) -> dict[str, Any]:
        """Empty tensors like the module's, for what is saved of it, by its names there."""
        assert self._reader is not None
        prefix = f"module/{name}/"
        state = named_state(module)
        saved = {key.removeprefix(prefix) for key in self._reader.names() if key.startswith(prefix)}
        words = ("", f"module {name!r}")
        problems += _unpaired(words, f"module:{name}.", sorted(state), sorted(saved), self._options)
        values: dict[str, Any] = {}
        for key in sorted(state.keys() & saved):
            there = self._reader.shape(prefix + key)
            here = tuple(state[key].shape) if isinstance(state[key], Tensor) else None
            if there != here:
                shapes = ["none" if one is None else str(list(one)) for one in (there, here)]
                text = f"{key!r} of module {name!r} has shape"
                problems.append(f"{text} {shapes[0]} in it, {shapes[1]} in the model")
            values[prefix + key] = None if here is None else torch.empty_like(state[key].detach())
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
            raise differs(f"optimizer {name!r}", "a module's name", ["no module of its name"])
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


def _differs(storage: Storage, problems: list[str]) -> CheckpointError:
    return differs(
        f"dense part of checkpoint {storage.url}", "the same modules and optimizers", problems
    )
