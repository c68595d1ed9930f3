"""From the folder of a run or of an export, or from a trainer's publishers, to a served model."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol, cast

from torch import Tensor, nn

from shoal import config as settings
from shoal.checkpoint import CheckpointStore, Contents, LoadOptions, load, read_manifest
from shoal.checkpoint.loading import load_share
from shoal.comm.transport import Secret
from shoal.config import RunConfig
from shoal.config.build import ModelParts, build_parts, source_inputs
from shoal.errors import CheckpointError, ConfigError
from shoal.exchange.local import Exchange
from shoal.models.tasks import AMP_DTYPES
from shoal.ps.server import spread_over
from shoal.serve.bundle import SIGNATURE, open_bundle
from shoal.serve.client import ReplicaSet, check_shares, find_in
from shoal.serve.export import EXPORT
from shoal.serve.model import LookupModel, Model, PredictModel
from shoal.serve.rows import PooledRows, of_shard, of_shares
from shoal.serve.signature import ExampleReader
from shoal.sync.replica import Replica, serving_spec
from shoal.table.cpu.shard import CpuShard
from shoal.table.hosting import HostedTables
from shoal.table.spec import RowDType, TableSpec
from shoal.train import folder as folders
from shoal.train.folder import RunFolder

Role = Literal["all", "entry", "ps"]
_VERSION = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedShare:
    """What of a model a process serves.

    Args:
        role: "all", "entry" (the dense module; rows are asked for elsewhere) or "ps" (rows).
        index, of: which share of the rows, of how many.
        dtype: of rows; None: as trained.
        addresses: of an entry: replicas of each of the `of` shares, HOST:PORT.
        timeout_s: of an entry's requests for rows.
        token, root_certificate: of an entry's requests for rows, as of `ReplicaSet`.
    """

    role: Role = "all"
    index: int = 0
    of: int = 1
    dtype: RowDType | None = None
    addresses: tuple[tuple[str, ...], ...] = ()
    timeout_s: float = 1.0
    token: str | None = field(default=None, repr=False)
    root_certificate: str | None = None

    def name(self, model: str) -> str:
        """The served name of a model's share."""
        return f"{model}:ps_{self.index}" if self.role == "ps" else model


class VersionSource(Protocol):
    """Where versions of one model come from."""

    @property
    def name(self) -> str: ...

    def newest(self) -> int | None:
        """Which version should be served now; None: none is there yet."""
        ...

    def load(self, version: int) -> Model:
        """Load it; takes as long as it takes."""
        ...

    def staleness_s(self) -> float | None:
        """Age of the newest state of the trainer that rows show; None of rows that stay."""
        ...

    def close(self) -> None: ...


class _RunModel:
    """What all versions of a run's model share."""

    def __init__(self, config: RunConfig, share: ServedShare) -> None:
        self.config, self.share = config, share
        self.inputs = source_inputs(config.data.source)

    def parts(self) -> ModelParts:
        return build_parts(
            self.config,
            self.config.model,
            offered=self.inputs.features,
            num_dense=self.inputs.num_dense,
        )

    def model(
        self,
        version: int,
        name: str,
        parts: ModelParts,
        specs: Sequence[TableSpec],
        exchange: Exchange,
    ) -> PredictModel:
        return PredictModel(
            name,
            version,
            ExampleReader(parts, self.inputs.lists, self.inputs.num_dense),
            PooledRows(parts, specs, exchange),
            parts.module.eval(),
            AMP_DTYPES[self.config.amp],
        )


class FolderSource:
    """The checkpoints of a run's folder by their step, or the versions in a folder of exports.

    Args:
        path: of the run or of the exports.
        share: what of it is served.
        name: of the model; None: the run's.
        version: the one to serve; None: the newest, whenever a newer one appears.

    Raises:
        CheckpointError: neither of them.
        ConfigError: an entry's root certificate cannot be read.
    """

    def __init__(
        self,
        path: str | Path,
        share: ServedShare | None = None,
        *,
        name: str | None = None,
        version: int | None = None,
    ) -> None:
        self._path, self._share = Path(path), share or ServedShare()
        self._version, self._given = version, name
        self._is_run = RunFolder(self._path).config.is_file()
        there = self._wanted()
        if there is None and not (self._is_run and version is None):
            raise CheckpointError(
                "model to serve",
                got=f"{path} without {'a version' if version is None else f'version {version}'}",
                allowed="the folder of a run, or of shoal export",
                remedy="Train with output.save_model=true, or export a version.",
            )
        found = self._folder(there or 0)
        self.name = self._share.name(name or settings.load(found.config, environment={}).name)
        own = self._share
        self._sets = [
            ReplicaSet(one, token=own.token, root_certificate=own.root_certificate)
            for one in own.addresses
        ]

    def newest(self) -> int | None:
        """The version to serve.

        Raises:
            ServerLost: a share of an entry's rows does not answer.
        """
        if self._sets:
            check_shares(self._sets, self.name, timeout_s=self._share.timeout_s)
        return self._wanted()

    def _wanted(self) -> int | None:
        there = self._versions()
        if self._version is not None:
            return self._version if self._version in there else None
        return max(there, default=None)

    def staleness_s(self) -> float | None:
        """Rows of a folder stay as they are."""
        return None

    def load(self, version: int) -> Model:
        """Load a version's rows and dense module."""
        folder = self._folder(version)
        built = _RunModel(settings.load(folder.config, environment={}), self._share)
        share, parts = built.share, built.parts()
        url = self._versions()[version] or folders.checkpoint_of(folder)
        if url is None:
            raise CheckpointError(
                "version to serve",
                got=f"{folder.path} without a checkpoint",
                allowed="one with rows or a dense module",
                remedy="Export it again.",
            )
        dtypes = self._checked(version, folder)
        specs = tuple(
            serving_spec(spec, share.dtype or dtypes.get(spec.name)) for spec in parts.tables
        )
        if share.role == "ps":
            shard = load_rows(url, built.config, specs, share.index, share.of)
            return LookupModel(self.name, version, shard)
        load_module(url, built.config, parts.module)
        if share.role == "entry":
            find = find_in(self._sets, self.name, specs, timeout_s=share.timeout_s)
            exchange = of_shares(specs, len(self._sets), find)
        else:
            exchange = of_shard(load_rows(url, built.config, specs))
        return built.model(version, self.name, parts, specs, exchange)

    def close(self) -> None:
        """Ask for rows no longer."""
        for one in self._sets:
            one.close()

    def _checked(self, version: int, folder: RunFolder) -> dict[str, RowDType]:
        """Dtypes of a bundle's rows by table.

        Raises:
            ConfigError: it was exported for another share.
        """
        if not (folder.path / SIGNATURE).is_file():
            return {}
        share, signature = self._share, open_bundle(folder.path).signature
        got = allowed = ""
        shards = len(list((self._path / str(version)).glob("ps_*")))
        if share.role == "entry" and shards not in (0, len(share.addresses)):
            got, allowed = f"{len(share.addresses)} --ps", f"{shards}, one a ps_ folder"
        elif signature.part == "ps" and (signature.index, signature.of) != (share.index, share.of):
            got = f"--index {share.index} --of {share.of}"
            allowed = f"--index {signature.index} --of {signature.of}"
        elif share.role == "all" and signature.part != "all":
            got, allowed = "--role all", "--role entry and --role ps"
        if got:
            remedy = "Serve all parts as they were exported."
            raise ConfigError(f"share of exported version {folder.path}", got, allowed, remedy)
        return {one.name: cast(RowDType, one.dtype) for one in signature.tables}

    def _versions(self) -> dict[int, str | None]:
        if self._is_run:
            store = CheckpointStore(folders.checkpoints_of(RunFolder(self._path)))
            return {entry.step: store.folder(entry.name).url for entry in store.list()}
        every = self._path.iterdir() if self._path.is_dir() else ()
        return {int(one.name): None for one in every if _is_version(one)}

    def _folder(self, version: int) -> RunFolder:
        if self._is_run:
            return RunFolder(self._path)
        whole = self._path / str(version)
        part = f"ps_{self._share.index}" if self._share.role == "ps" else "entry"
        return RunFolder(whole / part if (whole / part).is_dir() else whole)


def _is_version(folder: Path) -> bool:
    """Whether it is a version of `shoal export`, or a run that was copied as one."""
    name = folder.name
    whole = (folder / EXPORT).is_file() or RunFolder(folder).config.is_file()
    return bool(_VERSION.fullmatch(name)) and str(int(name)) == name and whole


def load_rows(
    url: str, config: RunConfig, specs: Sequence[TableSpec], index: int = 0, of: int = 1
) -> CpuShard:
    """Rows of a run's model, or a share of them, without optimizer state."""
    shard = CpuShard(specs)
    tables = HostedTables(tuple(specs), shard, spread_over(specs, of))
    load_share([url], tables, index, collection=config.model.kind, state=False)
    return shard


def load_module(url: str, config: RunConfig, module: nn.Module) -> None:
    """Dense weights of a run's model."""
    others = frozenset(f"module:{name}" for name in read_manifest(url).modules)
    name = config.model.kind
    options = LoadOptions(tables=(), state=False, allow_unknown=others - {f"module:{name}"})
    load(url, Contents(modules={name: module}), options=options)


class FollowedSource:
    """A run that trains: rows and dense weights of its publishers.

    Each dense version that arrives replaces the last one as a whole; rows change in place.

    Args:
        config: of the run.
        publishers: addresses, one a rank, in order.
        share: what of it is served: "all".
        name: of the model; None: the run's.
        secret: what the publishers were given.
        checkpoint: the run's folder: rows of its newest checkpoint need not be asked for.
    """

    def __init__(
        self,
        config: RunConfig,
        publishers: Sequence[str],
        share: ServedShare | None = None,
        *,
        name: str | None = None,
        secret: Secret | None = None,
        checkpoint: str | None = None,
    ) -> None:
        self._built = _RunModel(config, share or ServedShare())
        self.name = name or config.name
        self._parts = self._built.parts()
        self._replica = Replica(
            self._parts.tables,
            publishers,
            dtype=self._built.share.dtype,
            secret=secret,
            checkpoint=checkpoint,
            collection=config.model.kind,
        )
        self._replica.__enter__()
        self._weights: Mapping[str, Tensor] = {}
        self._version: int | None = None

    def newest(self) -> int | None:
        """The rows' version when the newest dense weights came.

        Raises:
            ConfigError: the publishers are of another run.
        """
        status, weights = self._replica.status(), self._replica.dense()
        whole = weights and all(one.state == "AVAILABLE" for one in status)
        if whole and weights is not self._weights:
            self._version = max(status[0].version, (self._version or 0) + 1)
            self._weights = weights
        return self._version

    def staleness_s(self) -> float | None:
        """Of the publisher that is furthest behind."""
        try:
            ages = [one.staleness_s for one in self._replica.status()]
        except ConfigError:  # of another run: `newest` reports it
            return None
        return None if None in ages else max(age for age in ages if age is not None)

    def load(self, version: int) -> Model:
        """The same rows with the newest dense weights."""
        module = copy.deepcopy(self._parts.module)
        module.load_state_dict(dict(self._weights))
        parts = replace(self._parts, module=module)
        return self._built.model(
            version, self.name, parts, self._replica.specs, of_shard(self._replica.shard)
        )

    def close(self) -> None:
        """Follow no more."""
        self._replica.__exit__(None, None, None)
