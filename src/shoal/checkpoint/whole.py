"""A full checkpoint of one process.

    manifest.json        what there is, written last: a folder without it is no checkpoint
    dense.pt             state dicts of the dense modules, by name
    counters.pt          what shards count: sights of ids without a row, the last step
    tables/<name>.arrow  Arrow IPC, rows of one table ordered by hash

Row files hold id, weights [D], state [S], version, last_seen_s and count of each row, so they do
not show in which order or in which arena the rows lived.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shoal.errors import CheckpointError, describe
from shoal.table.shard import AdmissionState, RowChunk
from shoal.table.spec import TableSpec

__all__ = ["Manifest", "RowFile", "Rows", "attend", "load", "read_manifest", "save"]

_SCHEMA = 1
_BATCH_ROWS = 1 << 16
_DENSE = "dense.pt"
_COUNTERS = "counters.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFile:
    """One table's file: its layout, so that a mismatch shows before a row is read."""

    shard: str
    table: str
    file: str
    rows: int
    dim: int
    state_width: int
    dtype: str
    optimizers: tuple[str, ...]
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint holds. `step` counts optimizer steps done."""

    schema: int
    step: int
    seed: int
    modules: tuple[str, ...]
    dense_sha256: str
    counters_sha256: str
    row_files: tuple[RowFile, ...]


class Rows(Protocol):
    """What a checkpoint asks of rows: a `Shard`, or the tables of several ranks as if one's."""

    last_step: int

    @property
    def specs(self) -> tuple[TableSpec, ...]: ...
    @property
    def seed(self) -> int: ...
    def export(self, table: int) -> RowChunk: ...
    def load(self, table: int, chunk: RowChunk) -> None: ...
    def admission_state(self, table: int) -> AdmissionState: ...
    def load_admission_state(self, table: int, state: AdmissionState) -> None: ...


def save(
    path: Path, *, shards: Mapping[str, Rows], modules: Mapping[str, nn.Module], step: int
) -> Manifest:
    """Write all rows of the shards and all weights of the modules into a new folder.

    Args:
        path: a folder that does not hold a checkpoint yet; made when missing.
        shards, modules: by the names that `load` will ask for.
        step: optimizer steps done.

    Raises:
        CheckpointError: the folder already holds a checkpoint.
    """
    if (path / "manifest.json").exists():
        raise CheckpointError(
            describe(
                "checkpoint folder",
                got=f"{path}, which holds a checkpoint",
                allowed="a folder without one",
                remedy="Choose another folder; a checkpoint is never overwritten.",
            )
        )
    path.mkdir(parents=True, exist_ok=True)
    dense = {name: _on_cpu(module.state_dict()) for name, module in modules.items()}
    torch.save(dense, path / _DENSE)
    _make_durable(path / _DENSE)
    torch.save(_counters_of(shards), path / _COUNTERS)
    _make_durable(path / _COUNTERS)
    files: list[RowFile] = []
    for name, shard in shards.items():
        for index, spec in enumerate(shard.specs):
            files.append(_write_table(path, name, spec, shard.export(index)))
    manifest = Manifest(
        schema=_SCHEMA,
        step=step,
        seed=next((shard.seed for shard in shards.values()), 0),
        modules=tuple(modules),
        dense_sha256=_digest(path / _DENSE),
        counters_sha256=_digest(path / _COUNTERS),
        row_files=tuple(files),
    )
    _commit(path / "manifest.json", json.dumps(asdict(manifest), indent=2) + "\n")
    return manifest


def attend(*, shards: Mapping[str, Rows], modules: Mapping[str, nn.Module]) -> None:
    """What a rank does while another one saves: ask for the same things in the same order."""
    for module in modules.values():
        _on_cpu(module.state_dict())
    _counters_of(shards)
    for shard in shards.values():
        for index in range(len(shard.specs)):
            shard.export(index)


def load(path: Path, *, shards: Mapping[str, Rows], modules: Mapping[str, nn.Module]) -> Manifest:
    """Fill freshly built shards and modules from a checkpoint.

    Everything is compared with the manifest before the first row is loaded.

    Raises:
        CheckpointError: no checkpoint, a file missing or damaged, or another model's tables.
    """
    manifest = read_manifest(path)
    wanted = {
        (name, spec.name): (shard, i, spec)
        for name, shard in shards.items()
        for i, spec in enumerate(shard.specs)
    }
    saved = {(row.shard, row.table): row for row in manifest.row_files}
    _same_names("tables", [f"{s}/{t}" for s, t in saved], [f"{s}/{t}" for s, t in wanted])
    _same_names("modules", manifest.modules, list(modules))
    for key, (_, _, spec) in wanted.items():
        _check_layout(saved[key], spec)
        _check_file(path, saved[key])
    sums = {_DENSE: manifest.dense_sha256, _COUNTERS: manifest.counters_sha256}
    for file, digest in sums.items():
        if not (path / file).is_file() or _digest(path / file) != digest:
            raise _damaged(path / file, "missing, or its checksum differs from the manifest's")
    dense = torch.load(path / _DENSE, weights_only=True, map_location="cpu")
    for name, module in modules.items():
        _load_module(path, name, module, dense[name])
    for key, (shard, index, spec) in wanted.items():
        for chunk in _read_table(path / saved[key].file, spec):
            shard.load(index, chunk)
    _load_counters(path, shards)
    return manifest


def _on_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    """Weights as they are saved, so that a checkpoint does not depend on a device."""
    return {key: _whole(part) for key, part in state.items()}


def _whole(part: Any) -> Any:
    if not isinstance(part, Tensor):
        return part
    # A parameter that is split over ranks; then this is a collective call.
    return (part.full_tensor() if isinstance(part, DTensor) else part).cpu()


def _split_alike(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights with those split over ranks that the module has split."""
    own = module.state_dict()
    return {
        key: distribute_tensor(part.to(there.device), there.device_mesh, there.placements)
        if isinstance(there := own.get(key), DTensor)
        else part
        for key, part in state.items()
    }


def _counters_of(shards: Mapping[str, Rows]) -> dict[str, dict[str, Any]]:
    sights: dict[str, Any] = {}
    for name, shard in shards.items():
        for index, spec in enumerate(shard.specs):
            if spec.admission is not None:
                state = shard.admission_state(index)
                cells = torch.from_numpy(np.frombuffer(state.cells, dtype=np.uint8).copy())
                sights[f"{name}/{spec.name}"] = (state.ids, state.counts, cells)
    return {"sights": sights, "last_step": {n: s.last_step for n, s in shards.items()}}


def _load_counters(path: Path, shards: Mapping[str, Rows]) -> None:
    counters = torch.load(path / _COUNTERS, weights_only=True)
    for name, shard in shards.items():
        shard.last_step = counters["last_step"][name]
        for index, spec in enumerate(shard.specs):
            if spec.admission is not None:
                state = counters["sights"].get(f"{name}/{spec.name}")
                if state is None:
                    raise _damaged(path / _COUNTERS, f"no sights of table {spec.name!r}")
                ids, counts, cells = state
                shard.load_admission_state(
                    index, AdmissionState(ids, counts, cells.numpy().tobytes())
                )


def read_manifest(path: Path) -> Manifest:
    """Read a checkpoint's manifest.

    Raises:
        CheckpointError: there is none, or it is of a form this version does not know.
    """
    file = path / "manifest.json"
    if not file.is_file():
        raise CheckpointError(
            describe(
                "checkpoint",
                got=f"{path} without manifest.json",
                allowed="a folder that a finished save wrote",
                remedy="Check the path; an interrupted save leaves no manifest.",
            )
        )
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        files = tuple(
            RowFile(**{**row, "optimizers": tuple(row["optimizers"])})
            for row in raw.pop("row_files")
        )
        manifest = Manifest(**{**raw, "modules": tuple(raw["modules"])}, row_files=files)
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(file, f"{type(error).__name__}: {error}") from error
    if manifest.schema != _SCHEMA:
        raise CheckpointError(
            describe(
                f"schema of {file}",
                got=manifest.schema,
                allowed=_SCHEMA,
                remedy="Load it with the version that wrote it.",
            )
        )
    return manifest


def _load_module(path: Path, name: str, module: nn.Module, state: Mapping[str, Tensor]) -> None:
    try:
        module.load_state_dict(_split_alike(module, state))
    except RuntimeError as error:
        raise CheckpointError(
            describe(
                f"dense weights of {name!r} in {path}",
                got=" ".join(str(error).split()),
                allowed="the weights of the same model",
                remedy="Load with the config that the checkpoint was trained with.",
            )
        ) from error


def _write_table(path: Path, shard: str, spec: TableSpec, chunk: RowChunk) -> RowFile:
    name = f"tables/{quote(shard, safe='')}.{quote(spec.name, safe='')}.arrow"
    file = path / name
    file.parent.mkdir(exist_ok=True)
    batch = _to_arrow(chunk)
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        for start in range(0, batch.num_rows, _BATCH_ROWS):
            writer.write_batch(batch.slice(start, _BATCH_ROWS))
    _make_durable(file)
    return RowFile(
        shard=shard,
        table=spec.name,
        file=name,
        rows=batch.num_rows,
        dim=spec.dim,
        state_width=spec.state_width,
        dtype=spec.dtype,
        optimizers=tuple(segment.optimizer.kind for segment in spec.segments),
        bytes=file.stat().st_size,
        sha256=_digest(file),
    )


def _to_arrow(chunk: RowChunk) -> pa.RecordBatch:
    columns = {
        "id": pa.array(chunk.ids.numpy()),
        "weights": _matrix_to_arrow(chunk.weights),
        "version": pa.array(chunk.versions.numpy()),
        "last_seen_s": pa.array(chunk.last_seen_s.numpy()),
        "count": pa.array(chunk.counts.numpy()),
    }
    if chunk.state.shape[1]:
        columns["state"] = _matrix_to_arrow(chunk.state)
    return pa.record_batch(columns)


def _matrix_to_arrow(matrix: Tensor) -> pa.FixedSizeListArray:
    # Arrow has no bfloat16: its bits travel as int16, and the manifest's dtype says so.
    flat = matrix.contiguous().reshape(-1)
    if flat.dtype == torch.bfloat16:
        flat = flat.view(torch.int16)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat.numpy()), matrix.shape[1])


def _read_table(file: Path, spec: TableSpec) -> Iterator[RowChunk]:
    with pa.OSFile(str(file), "rb") as source:
        reader = pa.ipc.open_file(source)
        for index in range(reader.num_record_batches):
            yield _from_arrow(reader.get_batch(index), spec)


def _from_arrow(batch: pa.RecordBatch, spec: TableSpec) -> RowChunk:
    def column(name: str) -> Tensor:
        values = batch.column(name)
        width = None if pa.types.is_integer(values.type) else values.type.list_size
        flat = values if width is None else values.flatten()
        tensor = torch.from_numpy(np.array(flat.to_numpy(zero_copy_only=False)))
        return tensor if width is None else tensor.reshape(-1, width)

    weights = column("weights")
    if spec.dtype == "bfloat16":
        weights = weights.view(torch.bfloat16)
    state_dtype = torch.float64 if spec.dtype == "float64" else torch.float32
    state = column("state") if spec.state_width else torch.empty(len(weights), 0, dtype=state_dtype)
    return RowChunk(
        table=spec.name,
        ids=column("id"),
        weights=weights,
        state=state,
        versions=column("version"),
        last_seen_s=column("last_seen_s"),
        counts=column("count"),
    )


def _same_names(what: str, saved: Sequence[str], wanted: Sequence[str]) -> None:
    missing, extra = sorted(set(wanted) - set(saved)), sorted(set(saved) - set(wanted))
    if missing or extra:
        raise CheckpointError(
            describe(
                f"{what} of the checkpoint",
                got=f"missing {missing or 'none'}, unknown {extra or 'none'}",
                allowed=f"exactly {sorted(wanted)}",
                remedy="Load with the config that the checkpoint was trained with.",
            )
        )


def _check_layout(saved: RowFile, spec: TableSpec) -> None:
    optimizers = tuple(segment.optimizer.kind for segment in spec.segments)
    got = (saved.dim, saved.state_width, saved.dtype, saved.optimizers)
    allowed = (spec.dim, spec.state_width, spec.dtype, optimizers)
    if got != allowed:
        raise CheckpointError(
            describe(
                f"dim, state width, dtype and optimizers of table {spec.name!r}",
                got=got,
                allowed=allowed,
                remedy="Load with the config that the checkpoint was trained with.",
            )
        )


def _check_file(path: Path, row: RowFile) -> None:
    file = path / row.file
    if not file.is_file():
        raise _damaged(file, "no such file")
    if file.stat().st_size != row.bytes or _digest(file) != row.sha256:
        raise _damaged(file, "size or checksum differ from the manifest's")


def _damaged(file: Path, why: str) -> CheckpointError:
    return CheckpointError(
        describe(
            f"checkpoint file {file}",
            got=why,
            allowed="the file as it was saved",
            remedy="Restore it from a copy, or load another checkpoint.",
        )
    )


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as source:
        while block := source.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _make_durable(file: Path) -> None:
    with file.open("rb") as written:
        os.fsync(written.fileno())


def _commit(file: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    partial = file.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    _make_durable(partial)
    partial.replace(file)
