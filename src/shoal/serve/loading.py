"""From the folder of a run or of an export, or from a trainer's publishers, to a served model."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol, cast

from torch import Tensor

from shoal import config as settings
from shoal.checkpoint import CheckpointStore
from shoal.checkpoint.loading import load_share
from shoal.comm.transport import Secret
from shoal.config import RunConfig
from shoal.config.build import ModelParts, build_parts
from shoal.errors import CheckpointError, ConfigError
from shoal.exchange.local import Exchange
from shoal.models.tasks import AMP_DTYPES
from shoal.ps.server import spread_over
from shoal.serve.bundle import SIGNATURE, open_bundle
from shoal.serve.client import ReplicaSet, check_shares, find_in
from shoal.serve.compiled import Compiler, cache_folder
from shoal.serve.export import EXPORT, WITH_SERVERS
from shoal.serve.model import DenseModel, LookupModel, Model, PredictModel
from shoal.serve.rows import PooledRows, of_shard, of_shares
from shoal.serve.signature import ExampleReader, dense_inputs
from shoal.sync.checkpoints import Only, load_module
from shoal.sync.replica import Replica, serving_spec
from shoal.table.cpu.shard import CpuShard
from shoal.table.hosting import HostedTables
from shoal.table.spec import ServedDType, TableSpec
from shoal.train import folder as folders
from shoal.train.folder import RunFolder

Role = Literal["all", "entry", "ps", "dense"]
_VERSION = re.compile(r"[0-9]{1,18}")
_HALVES: Mapping[Role, Only | None] = {
    "all": None,
    "entry": "dense",
    "ps": "rows",
    "dense": "dense",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedShare:
    """What of a model a process serves.

    Args:
        role: "all", "entry" (the dense module; rows are asked for elsewhere), "ps" (rows) or
            "dense" (the dense module; who asks sends pooled rows).
        index, of: which share of the rows, of how many.
        dtype: of rows; None: as trained.
        addresses: of an entry: replicas of each of the `of` shares, HOST:PORT.
        timeout_s: of an entry's requests for rows.
        token, root_certificate: of an entry's requests for rows, as of `ReplicaSet`.
        compile: the dense module, which then may differ in the last digits.
    """

    role: Role = "all"
    index: int = 0
    of: int = 1
    dtype: ServedDType | None = None
    addresses: tuple[tuple[str, ...], ...] = ()
    timeout_s: float = 1.0
    token: str | None = field(default=None, repr=False)
    root_certificate: str | None = None
    compile: bool = False

    def name(self, model: str) -> str:
        """The served name of a model's share, as Monolith names it."""
        part = {"ps": f":ps_{self.index}", "dense": ":dense"}
        return model + part.get(self.role, "")


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
        self._compiler = Compiler(cache_folder()) if share.compile else None
        if share.compile and config.amp != "none":
            raise ConfigError(
                "option --compile of shoal serve",
                got=f"a run with amp={config.amp}",
                allowed="a run in float32",
                remedy="Leave --compile out.",
            )

    def parts(self) -> ModelParts:
        return build_parts(self.config)

    def model(
        self,
        version: int,
        name: str,
        parts: ModelParts,
        specs: Sequence[TableSpec],
        exchange: Exchange | None,
    ) -> Model:
        """With rows of an exchange; None: the dense module alone."""
        amp, inputs = AMP_DTYPES[self.config.amp], dense_inputs(parts)
        program: Callable[..., Tensor] = parts.module.eval()
        if self._compiler is not None:
            program = self._compiler.compiled(parts.module, inputs)
        if exchange is None:
            return DenseModel(name, version, inputs, len(parts.tasks), program, amp)
        reader = ExampleReader(parts)
        return PredictModel(name, version, reader, PooledRows(parts, specs, exchange), program, amp)


class _Shares:
    """Servers of an entry's rows; of other roles none."""

    def __init__(self, share: ServedShare, model: str) -> None:
        self._model, self._timeout_s = model, share.timeout_s
        self._sets = [
            ReplicaSet(one, token=share.token, root_certificate=share.root_certificate)
            for one in share.addresses
        ]

    def check(self) -> None:
        """Raises: ServerLost: one does not answer."""
        if self._sets:
            check_shares(self._sets, self._model, timeout_s=self._timeout_s)

    def exchange(self, specs: Sequence[TableSpec]) -> Exchange:
        find = find_in(self._sets, self._model, specs, timeout_s=self._timeout_s)
        return of_shares(specs, len(self._sets), find)

    def close(self) -> None:
        for one in self._sets:
            one.close()


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
        self._shares = _Shares(self._share, self.name)

    def newest(self) -> int | None:
        """The version to serve.

        Raises:
            ServerLost: a share of an entry's rows does not answer.
        """
        self._shares.check()
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
        load_module(url, parts.name, parts.module)
        exchange: Exchange | None = None
        if share.role == "entry":
            exchange = self._shares.exchange(specs)
        elif share.role == "all":
            exchange = of_shard(load_rows(url, built.config, specs))
        return built.model(version, self.name, parts, specs, exchange)

    def close(self) -> None:
        """Ask for rows no longer."""
        self._shares.close()

    def _checked(self, version: int, folder: RunFolder) -> dict[str, ServedDType]:
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
            got, allowed = "--role all", "--role entry and --role ps, or --role dense"
        if got:
            remedy = "Serve all parts as they were exported."
            raise ConfigError(f"share of exported version {folder.path}", got, allowed, remedy)
        return {one.name: cast(ServedDType, one.dtype) for one in signature.tables}

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
    if config.distributed.path == "ps":
        what, got = "rows to serve", "the folder of a run on parameter servers, which have its rows"
        raise ConfigError(what, got, "--role entry or --role dense", WITH_SERVERS)
    shard = CpuShard(specs)
    tables = HostedTables(tuple(specs), shard, spread_over(specs, of))
    load_share([url], tables, index, collection=config.model.kind, state=False)
    return shard


class FollowedSource:
    """A run that trains: rows and dense weights of its publishers, or the half that is served.

    Each dense version that arrives replaces the last one as a whole; rows change in place.

    Args:
        config: of the run.
        publishers: addresses, one a rank, in order.
        share: what of it is served.
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
        own = share or ServedShare()
        self._built = _RunModel(config, own)
        self.name = own.name(name or config.name)
        self._shares, self._parts = _Shares(own, self.name), self._built.parts()
        is_ps = own.role == "ps"
        self._replica = Replica(
            self._parts.tables,
            publishers,
            dtype=own.dtype,
            secret=secret,
            checkpoint=checkpoint,
            collection=config.model.kind,
            share=own.index if is_ps else 0,
            of=own.of if is_ps else 1,
            only=_HALVES[own.role],
        )
        self._replica.__enter__()
        self._exchange: Exchange | None = None
        if own.role == "entry":
            self._exchange = self._shares.exchange(self._replica.specs)
        elif own.role == "all":
            self._exchange = of_shard(self._replica.shard)
        self._served: CpuShard | Mapping[str, Tensor] | None = None
        self._version: int | None = None

    def newest(self) -> int | None:
        """The rows' version when the newest dense weights came; of rows alone, when they were all
        there.

        Raises:
            ConfigError: the publishers are of another run.
            ServerLost: a share of an entry's rows does not answer.
        """
        self._shares.check()
        status, replica = self._replica.status(), self._replica
        is_ps = self._built.share.role == "ps"
        newest = replica.shard if is_ps else replica.dense() or None
        whole = newest is not None and all(one.state == "AVAILABLE" for one in status)
        if whole and newest is not self._served:
            self._version = max(status[0].version, (self._version or 0) + 1)
            self._served = newest
        return self._version

    def staleness_s(self) -> float | None:
        """Of the publisher that is furthest behind."""
        try:
            ages = [one.staleness_s for one in self._replica.status()]
        except ConfigError:  # of another run: `newest` reports it
            return None
        return None if None in ages else max(age for age in ages if age is not None)

    def load(self, version: int) -> Model:
        """The same rows, with the newest dense weights."""
        served, specs = self._served, self._replica.specs
        if isinstance(served, CpuShard):
            return LookupModel(self.name, version, served)
        module = copy.deepcopy(self._parts.module)
        module.load_state_dict(dict(served or {}))
        parts = replace(self._parts, module=module)
        return self._built.model(version, self.name, parts, specs, self._exchange)

    def close(self) -> None:
        """Follow no more."""
        self._replica.__exit__(None, None, None)
        self._shares.close()
