"""A model with its tables and its optimizers: what one training step changes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.checkpoint import Contents
from shoal.comm.collectives import Collectives
from shoal.comm.consensus import together
from shoal.comm.transport import Secret
from shoal.compiling import begin_step, check_compile, compiled, has_cuda_graphs
from shoal.config.build import ModelParts, build_host_rows
from shoal.config.tree import RunConfig
from shoal.data import Batch
from shoal.distributed import DistributedModelParallel
from shoal.distributed.batch_norm import normalise_over_ranks
from shoal.embedding.collection import EmbeddingCollection
from shoal.errors import ConfigError, DeviceUnavailable
from shoal.exchange.wire import Wire
from shoal.models import Predicted
from shoal.models.tasks import AMP_DTYPES, inputs_of_ids, outputs_of, sampled_logits
from shoal.models.user_item import ItemFrequency
from shoal.optim import JointOptimizer, ParameterAverage, SparseOptimizer, clip_grad_norm_
from shoal.pipeline.batches import weight_of
from shoal.planner import Plan
from shoal.ps.averaging import DenseAverage, average_of
from shoal.ps.client import ServerExchange, connect
from shoal.ps.connections import Patience, Servers
from shoal.ps.membership import ROLE, discovery_of, servers_of
from shoal.ps.sending import Staleness
from shoal.rules.schedules import Schedule, as_rate
from shoal.table.hosting import HostedTables, hosted_spec
from shoal.table.spec import TableSpec
from shoal.train.dense_optimizers import dense_optimizers
from shoal.train.ranks import ALONE, Ranks
from shoal.train.table_placement import planned, settled_placement
from shoal.uncompiled import uncompiled

_log = logging.getLogger("shoal.train")
_EAGER_BATCHES = 100  # after so many, none of them compiled, a run says so


class Scorer(nn.Module):
    """Batch -> float32 outputs: the lookup, then the dense module in the run's precision.

    `compile` is of training steps over whole batches. A smaller one, an evaluation and predictions
    are eager: they compile nothing more, and predict what an export of the run does.
    """

    def __init__(
        self,
        tables: EmbeddingCollection,
        module: nn.Module,
        parts: ModelParts,
        config: RunConfig,
        world_size: int = 1,
    ) -> None:
        super().__init__()
        self.tables = tables
        self.module = module
        self._sequences, self._id_feature = parts.inputs.sequences, parts.spec.id_feature
        self._device_type = torch.device(config.device).type
        self._dtype = AMP_DTYPES[config.amp]
        self._split = config.distributed.dense == "fsdp2"
        self._outputs_of = compiled(outputs_of, config.compile)
        self._graphed = has_cuda_graphs(config.compile)
        self._whole = config.data.batch_size // (world_size * config.distributed.workers)
        # Training batches so far, none of them compiled; None: one was, or the first model says so.
        main = parts.spec.kind == config.model.kind
        self._eager = 0 if config.compile and main else None

    def forward(self, batch: Batch, *, vectors: bool = False) -> Tensor:
        rows = self.tables(batch.ids, event_time_s=batch.event_time_s)
        id_feature = self._id_feature if self.training else None
        rows |= inputs_of_ids(batch.ids, self._sequences, id_feature)
        compiles = self.training and batch.labels.shape[0] >= self._whole
        if self.training and self._eager is not None:
            self._eager = None if compiles else self._count_eager(self._eager + 1)
        compute = self._outputs_of if compiles else outputs_of
        outputs = compute(
            self.module,
            batch.dense,
            rows,
            self._dtype,
            self._device_type,
            batch.negatives,
            vectors=vectors,
        )
        # FSDP2 hangs a hook on what comes out, which a change of a view in place would drop; CUDA
        # graphs use its memory again.
        return outputs.clone() if self._split or self._graphed else outputs

    def _count_eager(self, count: int) -> int | None:
        if count < _EAGER_BATCHES:
            return count
        _log.warning(
            "compile: the first %d training batches were eager: each has fewer examples than %d,"
            " which is data.batch_size over the ranks",
            count,
            self._whole,
        )
        return None


class Learner:
    """One model that trains: tables, dense module, and an optimizer for each.

    Args:
        parts: the specs of its tables and its dense module, and its name in the metrics.
        config: device, seed, dense optimizer, clipping and mixed precision of the run.
        ranks: over more than one, tables are placed, the dense module is replicated or split, and
            batch normalisation counts the examples of all ranks.
        previous: the plan of the checkpoint to continue from, where that is to be kept.
        rate_of: what becomes of the learning rates of tables and of dense weights.

    Attributes:
        model: Batch -> outputs; a `DistributedModelParallel` over several ranks.
        predicted: what it predicts.
        optimizer: of the dense module.
        joint: steps rows and dense weights.
        served: its rows are on parameter servers, which save them.
        nan_policy: of the run.
        plan: where the tables are, if that was planned.
    """

    def __init__(
        self,
        parts: ModelParts,
        config: RunConfig,
        ranks: Ranks = ALONE,
        previous: Callable[[], Plan | None] = lambda: None,
        rate_of: Callable[[float | Schedule], float | Schedule] = lambda rate: rate,
    ) -> None:
        together(
            ranks.control,
            "compile of a model",
            partial(_check_compile, config),
            failed=DeviceUnavailable,
        )
        self.name, main = parts.name, parts.name == config.model.kind
        self.predicted = Predicted(self.name, parts.tasks)
        self._objective = parts.spec.objective(parts.tasks)
        self.tables = EmbeddingCollection(
            parts.tables,
            parts.features,
            parts.layouts,
            device=config.device,
            host_rows=build_host_rows(config),
            seed=config.seed,
        )
        self.served = main and config.distributed.path == "ps"
        self._servers: Servers | None = None
        self._connections = ExitStack()
        if self.served:
            exchange = _connected(parts.tables, config, self._connections)
            self.tables.distribute(exchange)
            self._servers = exchange.shard.servers
        self.module = parts.module.to(config.device)
        self.steps = 0
        self.nan_policy = config.nan_policy
        self._device = torch.device(config.device)
        self._graphed = has_cuda_graphs(config.compile)
        self._clip_norm = config.clip_norm
        self._moments: Collectives | None = None
        placed_here = ranks.mesh is not None and not self.served
        self.plan = planned(config, parts, ranks, previous) if placed_here else None
        self.model: nn.Module = self._spread(parts, config, ranks)
        self._dense = dense_optimizers(self.module, config.dense_optimizer, rate_of, all_fit=main)
        members = [one for one, _ in self._dense]
        self.optimizer = members[0] if len(members) == 1 else JointOptimizer(members)
        rates = {
            (spec.name, part.name): part.optimizer.lr
            for spec in parts.tables
            for part in spec.segments
            if hasattr(part.optimizer, "lr")
        }
        self._sparse = SparseOptimizer(
            self.tables,
            rates={key: made for key, own in rates.items() if (made := rate_of(own)) != own},
            nan_policy=config.nan_policy,
            nan_clip=config.nan_clip,
        )
        # Sparse first: it refuses a bad gradient before anything has changed.
        self.joint = JointOptimizer([self._sparse, self.optimizer])
        self._scaler = torch.amp.GradScaler(self._device.type, enabled=config.amp == "float16")
        decay = config.dense_optimizer.ema
        self._ema = None if decay is None else ParameterAverage(self.module, decay)
        self._average: DenseAverage | None = None
        if self._servers is not None and config.distributed.dense == "average":
            self._average = average_of(
                self._servers,
                self.module,
                every=config.distributed.average_every,
                workers=config.distributed.workers,
                grouped=ranks.many,
            )
        self._leads = config.distributed.worker == 0
        self._start_s = config.distributed.servers.start_s

    def join(self) -> None:
        """Begin with the average of dense weights, if there is one; once, before the first step.

        Worker 0 brings its own where there is none: those of its checkpoint, if it continues.

        Raises:
            ServerLost: worker 0 did not come in time, or a server does not answer.
            ShapeError: the average is of another model.
        """
        if self._average is not None:
            self._average.join(leads=self._leads, timeout_s=self._start_s)

    def close(self) -> None:
        """Disconnect from parameter servers, once they have its updates.

        Raises:
            ShoalError: one of them failed.
        """
        self._connections.close()

    @property
    def optimizer_names(self) -> list[str]:
        """Names of its dense optimizers in a checkpoint."""
        many = len(self._dense) > 1
        return [f"{self.name}/{k}" if many else self.name for k in range(len(self._dense))]

    @property
    def staleness(self) -> Staleness | None:
        """What lookups of parameter servers lacked; None without them."""
        return None if self._servers is None else self._servers.staleness

    def _spread(self, parts: ModelParts, config: RunConfig, ranks: Ranks) -> nn.Module:
        if ranks.mesh is None:
            return Scorer(self.tables, self.module, parts, config)
        mesh, settings = ranks.mesh, config.distributed
        path = "auto" if settings.path == "ps" else settings.path
        if settings.dense == "fsdp2" and config.dense_optimizer.ema is not None:
            remedy = "Leave ema out, or set distributed.dense=ddp."
            what = "dense_optimizer.ema under distributed.dense=fsdp2"
            raise ConfigError(what, config.dense_optimizer.ema, "none", remedy)
        if settings.dense == "fsdp2" and config.amp == "float16":
            got, remedy = "float16, which scales losses", "Set amp=bfloat16, or another dense."
            raise ConfigError("amp of distributed.dense=fsdp2", got, "none, bfloat16", remedy)
        counts = [part for part in self.module.modules() if isinstance(part, ItemFrequency)]
        for part in counts:
            part.over_ranks, part.ranks = self._over_ranks, ranks.world_size
        if counts or any(isinstance(part, _BatchNorm) for part in self.module.modules()):
            self._moments = mesh.collectives(f"statistics of batches of {self.name}", path=path)
            lone = config.data.quarantine is not None
            self.module = normalise_over_ranks(self.module, self._moments, lone=lone)
        return DistributedModelParallel(
            Scorer(self.tables, self.module, parts, config, ranks.world_size),
            None
            if self.served
            else self.plan or settled_placement(config, tuple(self.tables.tables.values()), mesh),
            mesh=mesh,
            grad_reduce=settings.grad_reduce,
            per_sender_steps=settings.per_sender_steps,
            wire=Wire(settings.wire.rows, settings.wire.grads),
            dense="fsdp2" if settings.dense == "fsdp2" else "ddp",
            exchange_path=path,
        )

    @uncompiled
    def _over_ranks(self, values: Tensor) -> Tensor:
        assert self._moments is not None
        (found,) = self._moments.all_reduce(values, "sum", what="items of a batch").wait()
        return found

    def begin_step(self) -> None:
        """Before the first forward of a step, of all models that one backward is of."""
        if self._graphed:
            begin_step()

    def train_step(self, window: Sequence[Batch]) -> list[Tensor]:
        """One optimizer step over the batches of a window; their losses add as one batch's would.

        For one rank; several go through `shoal.train.loop`.

        Returns:
            the logits [B] (or [B, T]) of each batch, as they were before the step; detached, on
            the run's device, which is not waited for.
        """
        if not self.model.training:
            self.model.train()
        # Of a window that weighs nothing the loss is 0, and so are gradients.
        total = sum(map(weight_of, window)) or 1.0
        seen: list[Tensor] = []
        self.begin_step()
        for batch in map(self._moved, window):
            outputs = self._trained(batch)
            loss = self._scaler.scale(self._loss_sum(outputs, batch) / total)
            # In this thread: a GPU's backward thread costs the host more than what it launches.
            with torch.autograd.set_multithreading_enabled(False):
                loss.backward()  # type: ignore[no-untyped-call]
            seen.append(self._objective.logits(outputs.detach()))
        self.apply()
        return seen

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(mean loss of a batch, times the loss scale; logits); 0 for a batch of no weight."""
        outputs = self._trained(batch)
        if batch.weights is None:
            mean = self._loss_sum(outputs, batch) / max(batch.labels.numel(), 1)
        else:
            mean = self._loss_sum(outputs, batch) / batch.weights.sum().clamp_min(1e-30)
        return self._scaler.scale(mean), self._objective.logits(outputs)

    def _trained(self, batch: Batch) -> Tensor:
        outputs: Tensor = self.model(batch)
        return outputs if batch.rates is None else sampled_logits(outputs, batch.rates)

    def _loss_sum(self, outputs: Tensor, batch: Batch) -> Tensor:
        return self._objective.loss_sum(outputs, batch.labels_BT, batch.weights)

    def predict(self, batch: Batch) -> Tensor:
        """Probabilities [B] or [B, T], float32, on the run's device; nothing is inserted."""
        return self.logits(batch).sigmoid()

    def logits(self, batch: Batch) -> Tensor:
        """Of the probabilities of `predict`; they tell apart what rounds to 1 there."""
        self.model.eval()
        with torch.inference_mode():
            return self._objective.logits(self.model(self._moved(batch)))

    def vectors(self, batch: Batch) -> Tensor:
        """Vectors of users and of items [2, B, E], float32, on the run's device; as `predict`."""
        self.model.eval()
        with torch.inference_mode():
            found: Tensor = self.model(self._moved(batch), vectors=True)
            return found

    def state(self) -> dict[str, Any]:
        """What training continues from, next to rows, dense weights and the dense optimizer."""
        return {
            "steps": self.steps,
            "sparse": self._sparse.state_dict(),
            "scaler": self._scaler.state_dict(),
            "average": None
            if self._ema is None
            else {name: one.cpu().clone() for name, one in self._ema.state_dict().items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.steps = state["steps"]
        self._sparse.load_state_dict(state["sparse"])
        if state["scaler"] and self._scaler.is_enabled():
            self._scaler.load_state_dict(state["scaler"])
        if self._ema is not None:
            self._ema.load_state_dict(state["average"])
        if self._moments is not None:
            self._moments.step = self.steps

    def averaged(self) -> AbstractContextManager[None]:
        """Within, predictions are those of averaged dense weights, where the run averages them."""
        return nullcontext() if self._ema is None else self._ema.applied()

    def loaded(self, average: Mapping[str, Tensor] | None = None) -> None:
        """Dense weights were loaded; from here on they are the average, or what is given is."""
        if self._ema is not None:
            self._ema.restart()
            if average is not None:
                self._ema.load_state_dict(average)

    def check(self) -> None:
        """Raise what the last steps found in gradients; waits for a GPU.

        Raises:
            NonFiniteGradient: NaN or infinity, under nan_policy "raise" with tables on a GPU.
        """
        self.joint.check()

    def _moved(self, batch: Batch) -> Batch:
        if self._device.type == "cpu":
            return batch
        return batch.pin_memory().to(self._device, non_blocking=True)

    def apply(self) -> None:
        """One optimizer step over the gradients that backward left."""
        for optimizer, rate in self._dense:
            for group in optimizer.param_groups:
                group["lr"] = as_rate(rate, self.steps)
        if self._clip_norm is not None:
            self._scaler.unscale_(self.joint)
            clip_grad_norm_(self.module.parameters(), self._sparse, self._clip_norm)
        self._scaler.step(self.joint)
        self._scaler.update()
        self.joint.zero_grad()
        if self._ema is not None:
            self._ema.update()
        self.steps += 1
        if self._moments is not None:
            self._moments.step = self.steps
        if self._average is not None:
            self._average.stepped(self.steps)

    @property
    def expires(self) -> bool:
        """Whether a table has rows that expire."""
        return any(spec.expiry is not None for spec in self.tables.tables.values())

    @property
    def rows(self) -> int:
        """Rows in all tables of this process's shard."""
        shard = self.tables.shard
        return sum(shard.size(table) for table in range(len(shard.specs)))

    @property
    def row_bytes(self) -> int:
        """Resident bytes of all tables of this process's shard."""
        return sum(stats.bytes_total for stats in self.tables.shard.stats())


def _check_compile(config: RunConfig) -> None:
    keeping = {
        f"accumulation={config.accumulation}": config.accumulation > 1,
        "distributed.dense=fsdp2": config.distributed.dense == "fsdp2",
    }
    device = torch.device(config.device)
    check_compile(config.compile, device, [one for one, keeps in keeping.items() if keeps])


def _connected(
    specs: Sequence[TableSpec], config: RunConfig, connections: ExitStack
) -> ServerExchange:
    """The parameter servers of a run; each process is a worker of its own.

    connections: gets what is to be closed.

    Raises:
        ConfigError: a run without addresses, on a GPU, or with another model's servers.
        ServerLost: a server does not register in time, or does not answer.
    """
    settings = config.distributed.servers
    if config.device != "cpu":
        remedy = "Set device=cpu: rows are on CPUs, and come to the worker's."
        raise ConfigError("device under distributed.path=ps", repr(config.device), "cpu", remedy)
    discovery = discovery_of(
        settings.discovery, settings.addresses, config.name, settings.session_s
    )
    with ExitStack() as opened:
        opened.callback(discovery.close)
        exchange = connect(
            servers_of(discovery, settings.count, timeout_s=settings.start_s),
            specs,
            wire=Wire(config.distributed.wire.rows, config.distributed.wire.grads),
            patience=Patience(reply_s=settings.reply_s, repeats=settings.repeats),
            secret=Secret.of_file(settings.token_file),
            stale_updates=settings.stale_updates,
            most_bytes=settings.most_mib << 20,
            watch=partial(discovery.watch, ROLE),
        )
        opened.callback(exchange.shard.servers.close)
        connections.push(opened.pop_all())
    return exchange


def contents_of(
    learners: Sequence[Learner],
    state: Mapping[str, Any] | None = None,
    rank_state: Mapping[str, Any] | None = None,
    *,
    trains: bool = True,
) -> Contents:
    """Tables, dense weights and optimizers by the names of models; a collective call over ranks.

    Args:
        learners: the models.
        state, rank_state: what else is saved.
        trains: with the optimizers.
    """
    return Contents(
        tables={one.name: one.tables.hosted for one in learners if not one.served},
        modules={one.name: one.module for one in learners},
        optimizers={one.name: one.optimizer for one in learners} if trains else {},
        state=state or {},
        rank_state=rank_state or {},
    )


def skipped_in_slices(tables: HostedTables) -> int:
    """Rows that column slices on this rank have left as they were for their gradient's sake.

    Their other slices have changed, so that slices differ in which rows a delta has.
    """
    if tables.placement is None:
        return 0
    placed = [(spec, tables.placement.of(spec.name)) for spec in tables.specs]
    names = {
        hosted_spec(spec, one).name for spec, slices in placed if len(slices) > 1 for one in slices
    }
    stats = tables.shard.stats() if names else ()
    return sum(one.nonfinite_skipped for one in stats if one.name in names)
