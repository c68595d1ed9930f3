"""`shoal export`: versions of a model for servers, each a folder that appears as a whole."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from shoal import config as settings
from shoal.checkpoint import Contents, load_share, read_manifest, save
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.store import claim
from shoal.config import RunConfig
from shoal.config.build import ModelParts
from shoal.errors import CheckpointError, ConfigError
from shoal.placement import BUCKETS, rank_buckets
from shoal.serve.bundle import (
    CHECKPOINTS,
    CONFIG,
    SIGNATURE,
    ExportedTable,
    Part,
    Signature,
    signature_of,
)
from shoal.serve.signature import ServedTensor, dense_example
from shoal.sync.checkpoints import load_module
from shoal.sync.replica import serving_spec
from shoal.table.factory import make_shard
from shoal.table.hosting import HostedTables, plan_placement

Mode = Literal["standalone", "distributed", "dense"]
RowDType = Literal["float32", "float16"]

EXPORT, PROGRAM, STATE = "export.json", "dense.pt2", "dense.pt"
_VERSION = re.compile(r"0|[1-9][0-9]{0,17}")
_PARTIAL, _REMOVED = ".partial-", ".removed-"
WITH_SERVERS = (
    "Let the servers publish (publish.address of shoal ps), follow them with shoal serve CONFIG "
    "--follow ADDRESS --role ps, and serve the dense module with --role entry --ps HOST:PORT."
)
_COMPARED = (1, 2, 7)  # batch sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedVersion:
    """What `export.json` says of a version.

    Args:
        version: its folder's name, a number.
        mode, shards, dtype: as it was exported.
        model: name of the model.
        step: of training.
        checkpoint: id of the checkpoint that it was made from.
        checkpoint_version: of its rows: a replica continues after it.
        created_s: Unix time in seconds.
    """

    version: int
    mode: Mode
    shards: int
    dtype: RowDType
    model: str
    step: int
    checkpoint: str
    checkpoint_version: int
    created_s: int


def export(
    config: RunConfig,
    parts: ModelParts,
    checkpoint: str,
    folder: str | Path,
    *,
    mode: Mode = "standalone",
    shards: int = 1,
    dtype: RowDType = "float32",
    version: int | None = None,
    keep: int = 5,
) -> Path:
    """Write a version of a model below a folder.

    It is written under another name and renamed when it is whole and on disk. A version that is
    there already and was made of the same checkpoint in the same way is left as it is.

    Args:
        config: of the run.
        parts: of the run's model.
        checkpoint: folder or URL of one checkpoint of the run.
        folder: of all versions.
        mode: "standalone": one bundle; "distributed": `entry` and `ps_0`, `ps_1`, ..., each with a
            range of hashes; "dense": the dense module only.
        shards: of rows, for "distributed".
        dtype: of rows.
        version: a number; None: the step of the checkpoint.
        keep: versions that stay, the newest; older ones are removed.

    Returns:
        the version's folder.

    Raises:
        ConfigError: settings that do not go together.
        CheckpointError: no such checkpoint, one without rows, or of another model; another export
            of this version; or the folder cannot be written.
    """
    _check(config, mode, shards, version, keep)
    manifest = read_manifest(checkpoint)
    wanted = ExportedVersion(
        version=manifest.step if version is None else version,
        mode=mode,
        shards=shards,
        dtype=dtype,
        model=parts.name,
        step=manifest.step,
        checkpoint=manifest.id,
        checkpoint_version=manifest.version,
        created_s=int(time.time()),
    )
    base = Path(folder)
    held = claim(Storage(base))
    if held is None:
        raise CheckpointError(
            f"folder of exports {base}",
            got="another process, which exports into it",
            allowed="one at a time",
            remedy="Wait for it.",
        )
    try:
        _remove_leftovers(base)
        path = base / str(wanted.version)
        if not path.exists():
            partial = base / f"{_PARTIAL}{wanted.version}"
            writer = _Writer(config, parts, checkpoint, manifest, dtype)
            writer.write(partial, mode, shards)
            (partial / EXPORT).write_text(json.dumps(asdict(wanted), indent=2) + "\n")
            _sync(partial)
            partial.rename(path)
            _sync_folder(base)
        elif _made_of(read_version(path)) != _made_of(wanted):
            raise CheckpointError(
                f"version {wanted.version} in {base}",
                got="an export of another checkpoint, or with other settings",
                allowed="a version that is not there, or the same again",
                remedy="Choose another folder or --version.",
            )
        for one in versions_of(base)[:-keep]:
            if one != wanted.version:
                _remove(base / str(one))
    except OSError as error:
        raise CheckpointError(
            f"folder of exports {base}",
            got=error.strerror or str(error),
            allowed="a folder that can be written, with space in it",
            remedy="Choose another folder, or make space.",
        ) from error
    finally:
        _remove_leftovers(base)
        held.release(keep=False)
    return path


def versions_of(folder: str | Path) -> list[int]:
    """Numbers of the versions below a folder, the newest last; all of them are whole.

    Only folders that `shoal export` wrote count.
    """
    found = Path(folder).glob(f"*/{EXPORT}")
    names = [one.parent.name for one in found if one.is_file()]
    return sorted(int(name) for name in names if _VERSION.fullmatch(name))


def read_version(folder: str | Path) -> ExportedVersion:
    """What `export.json` of a version says.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path = Path(folder) / EXPORT
    try:
        return ExportedVersion(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"exported version {folder}",
            got=str(error),
            allowed=f"a folder with {EXPORT}",
            remedy="Name the folder of a version that `shoal export` wrote.",
        ) from error


def export_dense(module: nn.Module, signature: Signature, path: str | Path) -> str | None:
    """Write a dense module by `torch.export`, with any batch size; None, or why it is not written.

    What is written was read back and gives the numbers of the module.

    Args:
        module: takes dense features or None, embeddings, and first-order weights or None.
        signature: the shapes of these.
    """
    was_training, saved = module.training, io.BytesIO()  # torch ends the process on a full disk
    module.eval()
    try:
        batch = torch.export.Dim("batch")
        wanted = [ServedTensor(one.name, one.dtype, one.shape) for one in signature.dense_inputs]
        example = dense_example(wanted, 3)
        sizes = tuple(None if one is None else {0: batch} for one in example)
        program = torch.export.export(module, example, dynamic_shapes=sizes)
        torch.export.save(program, saved)
        saved.seek(0)
        written = torch.export.load(saved).module()
        for count in _COMPARED:
            inputs = dense_example(wanted, count)
            with torch.no_grad():
                torch.testing.assert_close(written(*inputs), module(*inputs))
    except Exception as error:  # noqa: BLE001  torch has many ways to refuse what a module does
        return f"{type(error).__name__}: {error}".strip()[:1000]
    finally:
        module.train(was_training)
    Path(path).write_bytes(saved.getbuffer())
    return None


class _Writer:
    """Bundles of one checkpoint."""

    def __init__(
        self,
        config: RunConfig,
        parts: ModelParts,
        checkpoint: str,
        manifest: Manifest,
        dtype: RowDType,
    ) -> None:
        self._config, self._parts, self._url, self._manifest = config, parts, checkpoint, manifest
        self._specs = tuple(serving_spec(spec, dtype) for spec in parts.tables)

    def write(self, folder: Path, mode: Mode, shards: int) -> None:
        folder.mkdir()
        load_module(self._url, self._parts.name, self._parts.module)
        if mode == "dense":
            self._bundle(folder, "dense")
        elif mode == "standalone":
            self._bundle(folder, "all")
        else:
            self._bundle(folder / "entry", "entry")
            for index in range(shards):
                self._bundle(folder / f"ps_{index}", "ps", index, shards)

    def _bundle(self, folder: Path, part: Part, index: int = 0, of: int = 1) -> None:
        folder.mkdir(exist_ok=True)
        config, name = self._config, self._parts.name
        (folder / CONFIG).write_text(settings.to_yaml(config), encoding="utf-8")
        step = self._manifest.step
        signature = signature_of(self._parts, part=part, step=step, amp=config.amp)
        module = self._parts.module
        more: dict[str, Any] = {}
        if part != "ps":
            problem = export_dense(module, signature, folder / PROGRAM)
            more = {"dense_program": None if problem else PROGRAM, "dense_problem": problem}
            state = io.BytesIO()
            torch.save(module.state_dict(), state)
            (folder / STATE).write_bytes(state.getbuffer())
        tables = {}
        if part in ("all", "ps"):
            tables[name] = self._rows(index, of)
            more |= {"index": index, "of": of, "hashes": hash_range(index, of)}
            sizes = map(tables[name].shard.size, range(len(self._specs)))
            more["tables"] = tuple(
                ExportedTable(name=spec.name, dim=spec.dim, dtype=spec.dtype, rows=rows)
                for spec, rows in zip(self._specs, sizes, strict=True)
            )
        contents = Contents(tables=tables, modules={} if part == "ps" else {name: module})
        save(str(folder / CHECKPOINTS), contents, step=self._manifest.step, position=0)
        text = signature.model_copy(update=more).model_dump_json(indent=2)
        (folder / SIGNATURE).write_text(text + "\n", encoding="utf-8")

    def _rows(self, index: int, of: int) -> HostedTables:
        """A share of the rows, without optimizer state; each in a shard of its own."""
        shard = make_shard(self._specs, seed=self._config.seed)
        placed = HostedTables(self._specs, shard, plan_placement(self._specs, of))
        load_share([self._url], placed, index, collection=self._parts.name, state=False)
        return HostedTables(self._specs, shard)


def hash_range(index: int, of: int) -> tuple[int, int]:
    """Hashes [start, stop) of the rows of a share."""
    start, stop = rank_buckets(index, of)
    return start * ((1 << 64) // BUCKETS), stop * ((1 << 64) // BUCKETS)


def _check(config: RunConfig, mode: Mode, shards: int, version: int | None, keep: int) -> None:
    problems: Sequence[tuple[bool, str, object, str]] = (
        (shards != 1 and mode != "distributed", "shards", shards, f"1 of a {mode} export"),
        (not 1 <= shards <= BUCKETS, "shards", shards, f"1..{BUCKETS}"),
        (keep < 1, "versions to keep", keep, "at least 1"),
        (version is not None and not 0 <= version < 10**18, "version", version, "0..10**18 - 1"),
        (
            mode != "dense" and config.distributed.path == "ps",
            "mode of a run on parameter servers",
            mode,
            "dense: its servers have the rows",
        ),
    )
    for wrong, what, got, allowed in problems:
        if wrong:
            remedy = WITH_SERVERS if got is mode else "Choose other options of shoal export."
            raise ConfigError(what, got, allowed, remedy)


def _made_of(one: ExportedVersion) -> tuple[object, ...]:
    return one.mode, one.shards, one.dtype, one.model, one.checkpoint


def _remove(path: Path) -> None:
    """Remove a version; who looks for versions sees it whole or not at all."""
    gone = path.with_name(f"{_REMOVED}{path.name}")
    path.rename(gone)
    shutil.rmtree(gone)


def _remove_leftovers(base: Path) -> None:
    """What exports that failed left."""
    for prefix in (_PARTIAL, _REMOVED):
        for one in base.glob(f"{prefix}*"):
            shutil.rmtree(one, ignore_errors=True)


def _sync(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for name in files:
            with open(os.path.join(root, name), "rb") as file:
                os.fsync(file.fileno())
        _sync_folder(Path(root))


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
