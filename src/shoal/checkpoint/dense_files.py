"""torch.distributed.checkpoint over a checkpoint's storage: every file has a size and a checksum.

The plans of all ranks travel through the job's own collectives, so that this works where ranks
are not torch's, and beside training.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemBase,
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from shoal.checkpoint.agreement import together
from shoal.checkpoint.arrow_files import damaged, parsing
from shoal.checkpoint.manifest import Manifest, SavedFile
from shoal.checkpoint.row_files import check_streaming
from shoal.checkpoint.storage import DurableFile, Storage
from shoal.comm.collectives import Collectives
from shoal.errors import CheckpointError, describe
from shoal.table.snapshot import HASHES

__all__ = ["FOLDER", "DenseReader", "check_files", "write_values"]

FOLDER = "dense"
_INDEX = f"{FOLDER}/.metadata"

_TEMPORARY = ".tmp"


def write_values(
    values: Mapping[str, Any], storage: Storage, collectives: Collectives
) -> tuple[SavedFile, ...]:
    """Write tensors, DTensors and plain objects of all ranks below `dense/`.

    Args:
        values: this rank's; a tensor that is no DTensor is handed in by one rank.
        storage: the checkpoint's folder.
        collectives: the ranks; all of them call this.

    Returns:
        the files of all ranks, by path; the same on every rank.

    Raises:
        CheckpointError: storage refused, on any rank.
    """
    files = _Files(storage)
    writer = FileSystemWriter(FOLDER, single_file_per_rank=True, sync_files=False)
    writer.fs, writer.path = cast(Any, files), FOLDER
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    first = collectives.rank == 0

    def plan() -> Any:
        planner.set_up_planner(dict(values), writer.storage_meta(), first)
        writer.set_up_storage_writer(first)
        return writer.prepare_local_plan(planner.create_local_plan())

    plans = together(collectives, "plan of the dense part of a checkpoint", plan)

    here: list[Metadata] = []

    def write() -> tuple[Any, tuple[SavedFile, ...]]:
        # Every rank makes the plan of all: it is a function of what all have heard.
        everything, metadata = planner.create_global_plan(plans)
        here.append(metadata)
        own = planner.finish_plan(writer.prepare_global_plan(everything)[collectives.rank])
        results = writer.write_data(own, planner).value() if own.items else []
        return results, files.saved()

    parts = together(collectives, "writing the dense part of a checkpoint", write)

    def finish() -> tuple[SavedFile, ...]:
        files.clear()
        if first:
            writer.finish(here[0], [results for results, _ in parts])
        return files.saved()

    index = together(collectives, "index of the dense part of a checkpoint", finish)
    found = [one for _, own in parts for one in own] + [one for own in index for one in own]
    return tuple(sorted(found, key=lambda one: one.path))


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
    """Reads values that `write_values` wrote, each rank on its own.

    Args:
        storage: the checkpoint's folder.
    """

    def __init__(self, storage: Storage) -> None:
        self._reader = FileSystemReader(FOLDER)
        self._reader.fs, self._reader.path = cast(Any, _Files(storage)), FOLDER
        self._storage = storage
        with self._parsing():
            self.metadata = _index(storage)
            sizes = (
                one.properties.dtype.itemsize * one.size.numel()
                for one in self.metadata.state_dict_metadata.values()
                if isinstance(one, TensorStorageMetadata)
            )
            wanted, paths = sum(sizes), storage.files()
            held = sum(storage.size(path) for path in paths if path.startswith(f"{FOLDER}/"))
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

    def dtype(self, key: str) -> torch.dtype:
        """Dtype of a tensor."""
        found: torch.dtype = self.metadata.state_dict_metadata[key].properties.dtype  # type: ignore[union-attr]
        return found

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

    def value(self, key: str) -> Any:
        """A value by its name, in new memory."""
        shape = self.shape(key)
        values = {
            key: None if shape is None else torch.empty(shape, dtype=self.dtype(key), device="cpu")
        }
        self.fill(values)
        return values[key]

    def _parsing(self) -> AbstractContextManager[None]:
        return parsing(self._storage, _INDEX, "names, shapes and places of values")


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
                describe(
                    f"index {where}", got=error, allowed="names and shapes alone", remedy=remedy
                )
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


class _Files(FileSystemBase):
    """What torch's readers and writers ask of a file system. Files are durable once closed.

    It renames nothing: the manifest commits, so a file has its final name at once.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._written: list[DurableFile] = []

    def saved(self) -> tuple[SavedFile, ...]:
        """What was written since `clear`."""
        return tuple(
            SavedFile(
                path=file.path,
                kind="dense",
                tables=(),
                start=0,
                stop=HASHES,
                rows=0,
                bytes=file.bytes,
                crc32=file.crc32,
            )
            for file in self._written
        )

    def clear(self) -> None:
        """Forget what was written."""
        self._written = []

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        if mode == "rb":
            with self._storage.open(os.fspath(path)) as source:
                yield source
            return
        with self._storage.create(os.fspath(path).removesuffix(_TEMPORARY)) as file:
            yield _Sink(file)
        self._written.append(file)

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{os.fspath(path)}/{suffix}"

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        assert os.fspath(path) == os.fspath(new_path) + _TEMPORARY

    def init_path(self, path: str | os.PathLike[str]) -> str:
        return os.fspath(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        self._storage.make()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return False

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        raise AssertionError(f"asked to remove {os.fspath(path)}")


class _Sink(io.RawIOBase):
    """A durable file as torch.save and pickle write to it."""

    def __init__(self, file: DurableFile) -> None:
        super().__init__()
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._file.write(data)

    def tell(self) -> int:
        return self._file.bytes
