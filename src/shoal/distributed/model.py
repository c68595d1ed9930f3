"""`DistributedModelParallel`: one wrapper that spreads a model over ranks."""

from __future__ import annotations

import contextlib
import datetime
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shoal import compiling
from shoal.comm.backends.torch import TorchCollectives
from shoal.comm.collectives import Call, Collectives
from shoal.comm.consensus import require_same, together
from shoal.comm.flags import read_flags
from shoal.comm.launch import init
from shoal.comm.mesh import Mesh, Path
from shoal.comm.mismatched_calls import Calls
from shoal.compiling import Compile
from shoal.distributed.batch_norm import resting
from shoal.embedding.collection import EmbeddingCollection
from shoal.errors import CollectiveFailed, ConfigError, DeviceUnavailable, known_name, of_kind
from shoal.exchange.all_to_all import AllToAllExchange, GradReduce
from shoal.exchange.wire import Wire
from shoal.placement import Placement
from shoal.planner.plan import Plan
from shoal.ragged import KeyedRagged
from shoal.rules.initializers import Zeros
from shoal.rules.optimizers import SGD
from shoal.table.factory import shard_like
from shoal.table.hosting import check_placement, hosted_spec, hosted_specs, move_in, plan_placement
from shoal.table.shard import Shard
from shoal.table.spec import Segment, TableSpec

Placing = Placement | Plan | Mapping[str, str] | None

# A shard has a table; this is that of a rank to which a placement gives none.
_NOTHING = TableSpec(
    name="(no table)", segments=(Segment(dim=1, optimizer=SGD(lr=0.0), initializer=Zeros()),)
)


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """Collections, by name, that share one shard of whole tables, and where those go."""

    collections: Mapping[str, EmbeddingCollection]
    shard: Shard
    placement: Placement


def families_of(
    collections: Mapping[str, EmbeddingCollection],
    placing: Placing,
    world_size: int,
    local_world_size: int,
) -> tuple[Family, ...]:
    """Collections by shard, with their placements.

    Raises:
        UnknownName: a placement of a table that no collection has.
        ConfigError: a placement for another number of ranks, or that does not fit the tables.
    """
    members: dict[int, dict[str, EmbeddingCollection]] = {}
    for name, collection in collections.items():
        members.setdefault(id(collection.shard), {})[name] = collection
    shards = [next(iter(own.values())).shard for own in members.values()]
    every = [spec for shard in shards for spec in shard.specs]
    placement, found = placed(every, placing, world_size, local_world_size), []
    for shard, own in zip(shards, members.values(), strict=True):
        if isinstance(placing, Plan):
            placing.check_tiers(shard.specs, getattr(shard, "settings", {}).get("host_rows"))
        names = {spec.name for spec in shard.specs}
        part = Placement(world_size, tuple(h for h in placement.hosted if h.table in names))
        check_placement(shard.specs, part)
        found.append(Family(own, shard, part))
    return tuple(found)


def placed(
    specs: Sequence[TableSpec], placing: Placing, world_size: int, local_world_size: int
) -> Placement:
    """The placement of some tables; those of one name are placed alike.

    Raises:
        UnknownName, ConfigError: as `families_of`.
    """
    named = {spec.name: spec for spec in specs}
    if isinstance(placing, Plan):
        placing.check(specs, world_size)
        return placing.placement()
    if isinstance(placing, Placement):
        for table in placing.tables():
            known_name("table of a placement", table, named)
        if placing.world_size != world_size:
            raise ConfigError(
                "world_size of a placement",
                got=placing.world_size,
                allowed=f"{world_size}, the ranks of this job",
                remedy="Plan again for this job, or name sharding types only.",
            )
        return placing
    kinds = of_kind("placement", placing or {}, Mapping)
    return plan_placement(
        tuple(named.values()), world_size, kinds=kinds, local_world_size=local_world_size
    )


_WHAT = "gradients of the dense part"
_LOOK_S = 0.1
_MARK = f"{CollectiveFailed.__name__}: "


def name_failures(
    wrapped: DistributedDataParallel, dense: TorchCollectives, step_of: Callable[[], int]
) -> None:
    """Let backward say rank, step and collective where a rank is gone, on Gloo.

    What backward raises is a RuntimeError with the text of a `CollectiveFailed`: torch passes on
    the text of errors in callbacks, not their class; `lost_in_backward` gives it back. NCCL's own
    watchdog ends such a process.

    dense: over the group of `wrapped`; its calls are those of backward.
    step_of: must not hold `wrapped`: the hook lives in C++, where no collector sees a cycle.
    """
    group = wrapped.process_group
    waiting: list[tuple[Call, Any]] = []

    def wait() -> None:
        """At the end of backward, where DDP would wait without a look at the other ranks."""
        begun, waiting[:] = list(waiting), []
        for call, work in begun:
            while not work.is_completed():
                with contextlib.suppress(RuntimeError):  # too early, or DDP raises
                    work.wait(datetime.timedelta(seconds=_LOOK_S))
                    continue
                call.look()

    def average(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        dense.step = step_of()
        call = Call(dense, _WHAT)

        def arrived(reduced: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            try:
                return reduced.value()[0]
            except RuntimeError as error:
                raise call.failed(_first_line(error)) from error

        gradients = bucket.buffer().div_(dense.world_size)
        try:
            work: Any = dist.all_reduce(gradients, group=group, async_op=True)
        except RuntimeError as error:
            raise call.failed(_first_line(error)) from error
        if bucket.index() == 0:  # the first of a backward, whatever became of the one before
            waiting.clear()
        if not waiting:
            torch.autograd.Variable._execution_engine.queue_callback(wait)
        waiting.append((call, work))
        found: torch.futures.Future[torch.Tensor] = work.get_future().then(arrived)
        return found

    # It checks annotations, which are text here: a lambda has none.
    wrapped.register_comm_hook(None, lambda _, bucket: average(bucket))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def lost_in_backward(error: Exception) -> CollectiveFailed | None:
    """The `CollectiveFailed` whose text an error of backward passes on; None for other errors."""
    if isinstance(error, CollectiveFailed):
        return error
    _, mark, text = str(error).partition(_MARK)
    if not mark or not isinstance(error, RuntimeError):
        return None
    return CollectiveFailed(text.partition("\n")[0])


def _first_unlike(
    theirs: Sequence[tuple[object, ...]], first: Sequence[tuple[object, ...]]
) -> tuple[str, str]:
    pairs = itertools.zip_longest(theirs, first, fillvalue=("nothing",))
    there, here = next(pair for pair in pairs if pair[0] != pair[1])
    return " ".join(map(str, there)), " ".join(map(str, here))


DenseWrapper = Literal["ddp", "fsdp2"]


class DistributedModelParallel(nn.Module):
    """A model whose tables are spread over ranks and whose dense part is on every rank.

    Every rank builds the same model and wraps it. Tables go where the placement says, with the
    rows they have: each rank keeps, of its own rows, those that it will own. Parameters and
    buffers become those of rank 0. Every rank calls forward, backward and the optimizer's step
    the same number of times, in the same order; a rank without data calls `idle_step`.

    Make the optimizers after wrapping: `SparseOptimizer(wrapped)` finds the tables, and
    `wrapped.dense_parameters()` are what a dense optimizer steps. One rank alone needs no process
    group and computes what the bare module does.

    Args:
        module: holds one or more `EmbeddingCollection`s, or none. Collections that share a shard
            continue to share one; those that were distributed before, over parameter servers,
            stay as they are.
        placement: where tables are: a `Placement` or a `Plan` of all tables; or table name ->
            "row_wise", "table_wise", "column_wise", "table_row_wise", "grid", "data_parallel"
            (others row-wise); None splits the rows of all tables over all ranks.
        mesh: the ranks; None takes those that `shoal.comm.init()` finds.
        grad_reduce: "mean" averages gradients of rows over ranks, as DDP does dense ones; "sum"
            adds them.
        per_sender_steps: one optimizer step of a row per rank that sent it a gradient, in order
            of rank.
        wire: precision of rows and gradients between ranks; None sends them as they are, but
            gradients as float16 where MONOLITH_WITH_BYTEPS_BWD_CAST=16 says so under BytePS.
        dense: "ddp" keeps the dense part whole on every rank, and a parameter's `grad` is a part of
            a bucket that the next backward overwrites: clone what you keep; "fsdp2" splits it
            (`torch.distributed.fsdp.fully_shard`), whose gradients torch's `GradScaler` does not
            take in one optimizer with tables: scale none (bfloat16), or step both sides apart.
        exchange_path: what carries ids, rows and flags; see `Mesh.collectives`.
        compile: `torch.compile` of the largest parts that hold no collection, in place: True, or a
            mode of it; forwards around lookups stay eager. Modes with CUDA graphs
            ("reduce-overhead", "max-autotune") use the memory of outputs and gradients again at
            the next forward, in eval() too: copy what you keep, do not add up gradients over
            batches, and run each backward before the next forward: two forwards before one
            backward break it. They refuse dense="fsdp2".

    Attributes:
        module: the wrapped module.
        mesh: the ranks.

    Raises:
        ConfigError: ranks that build different tables, a placement that does not fit, tables on
            another kind of device than the ranks, optimizers made before, or a mode of compile
            that does not go with the device or with `dense`.
        DeviceUnavailable: on every rank, if one has no compiler.
        TicketError: a lookup or a gradient of the tables is open.
        CollectiveFailed: a rank is gone, or did not come in time.
    """

    def __init__(
        self,
        module: nn.Module,
        placement: Placing = None,
        *,
        mesh: Mesh | None = None,
        grad_reduce: GradReduce = "mean",
        per_sender_steps: bool = False,
        wire: Wire | None = None,
        dense: DenseWrapper = "ddp",
        exchange_path: Path = "auto",
        compile: Compile = False,
    ) -> None:
        super().__init__()
        known_name("dense wrapper", dense, get_args(DenseWrapper))
        known_name("grad_reduce", grad_reduce, get_args(GradReduce))
        self.module: nn.Module = of_kind("module", module, nn.Module)
        self.mesh: Mesh = init() if mesh is None else of_kind("mesh", mesh, Mesh)
        keeping = ["dense=fsdp2"] if dense == "fsdp2" else []
        together(
            self.mesh.control,
            "compile of a model",
            partial(compiling.check_compile, compile, self.mesh.device, keeping),
            failed=DeviceUnavailable,
        )
        self._graphed = compiling.has_cuda_graphs(compile)
        wire = Wire(grads=read_flags().gradient_wire) if wire is None else wire
        self._path = exchange_path
        self._exchange = partial(
            AllToAllExchange, grad_reduce=grad_reduce, per_sender_steps=per_sender_steps, wire=wire
        )
        self._wrapped: DistributedDataParallel | None = None
        self._splits_dense = False
        self._dense = Calls()
        launch = self.mesh.launch
        own = {
            name: part
            for name, part in self.collections().items()
            if not part.distributed  # by their owner before: on servers, say, that all ranks share
        }
        families = families_of(own, placement, self.mesh.world_size, launch.local_world_size)
        if self.mesh.world_size > 1:
            self._require_same_tables(families)
            self._require_same_dense()
            steps = self.mesh.collectives("steps", path=exchange_path)
            for family in families:
                self._place(family, steps)
            self._replicate(dense, steps)
        compiling.compile_around(module, self.collections().values(), compile)

    def collections(self) -> dict[str, EmbeddingCollection]:
        """The collections of the module, by the name they have there."""
        return {
            name: part
            for name, part in self.module.named_modules()
            if isinstance(part, EmbeddingCollection)
        }

    def dense_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the dense part."""
        return self.module.parameters()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward. In training with gradients, backward averages dense ones."""
        if self._graphed:
            compiling.begin_step()
        if self._wrapped is not None and self.training and torch.is_grad_enabled():
            # Until the module's own forward it only exchanges buffers and similar tensors.
            self._dense.enter("buffers of the dense part")
            hook = self.module.register_forward_pre_hook(lambda *_: self._dense.leave())
            try:
                return self._wrapped(*args, **kwargs)
            finally:
                hook.remove()
                self._dense.leave()
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it backward only adds up dense gradients; the next one outside reduces them.

        Gradients of rows travel at every backward and add up where rows are owned.
        """
        if self._splits_dense:
            root = cast(Any, self.module)
            root.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                root.set_requires_gradient_sync(True)
        elif self._wrapped is not None:
            with self._wrapped.no_sync():
                yield
        else:
            yield

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own: names have no prefix of this wrapper."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """What `state_dict` returned, or that of the bare module."""
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def dummy_batch(self) -> KeyedRagged:
        """One example without ids, with the features of all collections."""
        keys = {
            feature.name: None
            for collection in self.collections().values()
            for feature in collection.features
        }
        batch = KeyedRagged.from_lists({key: [[]] for key in keys})
        return batch if self.mesh.device.type == "cpu" else batch.to(self.mesh.device)

    def idle_step(self, loss_of: Callable[[KeyedRagged], Tensor]) -> None:
        """Forward and backward of a rank without data, so that the other ranks need not wait.

        Call it for each forward and backward of the others, then the optimizers' steps as they
        do. Lookups have no ids, gradients are zero. Batch normalisation runs as in `eval`, so
        that its statistics stay as they are; synchronised batch normalisation, which takes part in
        other ranks' statistics, counts one example.

        Args:
            loss_of: gets `dummy_batch()` and returns a loss of it that went through this
                wrapper's forward, with zeros for dense inputs.
        """
        with resting(self):
            loss = loss_of(self.dummy_batch())
            (loss * 0.0).sum().backward()  # type: ignore[no-untyped-call]

    def _require_same_tables(self, families: tuple[Family, ...]) -> None:
        """Refuse ranks that built different tables."""
        mine = [
            (repr(family.placement), repr(family.shard.specs), family.shard.seed, name)
            for family in families
            for name in family.collections
        ]
        require_same(
            self.mesh.control,
            "tables, seeds and placement of a model",
            mine,
            remedy="Build the model from the same configuration and seed on each rank.",
            shown=lambda theirs, first: ("others", f"{len(first)} collections"),
        )

    def _require_same_dense(self) -> None:
        """Refuse ranks whose dense parts differ: their broadcast would not match."""
        state = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        require_same(
            self.mesh.control,
            "parameters and buffers of a model",
            [(name, tuple(one.shape), str(one.dtype)) for name, one in state.items()],
            remedy="Build the model from the same configuration on each rank.",
            shown=_first_unlike,
        )

    def _place(self, family: Family, steps: Collectives) -> None:
        if family.shard.device.type != self.mesh.device.type:
            raise ConfigError(
                "device of tables",
                got=family.shard.device,
                allowed=f"that of the ranks, {self.mesh.device}",
                remedy="Build the collection with device=str(mesh.device).",
            )
        rank, placement, specs = self.mesh.rank, family.placement, family.shard.specs
        # This rank's share of the rows that are there.
        part = shard_like(family.shard, hosted_specs(specs, placement, rank) or (_NOTHING,))
        move_in(family.shard, part, placement, rank)
        # Tables that an earlier rank holds too and speaks for.
        silent = tuple(
            hosted_spec(spec, hosted).name
            for spec in specs
            for hosted in placement.of(spec.name)
            if hosted.replicated and hosted.ranks[0] != rank
        )
        for name, collection in family.collections.items():
            ranks = self.mesh.collectives(f"tables {name}", path=self._path)
            exchange = self._exchange(part, placement, specs, ranks)
            collection.distribute(exchange, collectives=steps, silent=silent)

    def _replicate(self, dense: DenseWrapper, steps: Collectives) -> None:
        parameters, buffers = list(self.module.parameters()), list(self.module.buffers())
        with torch.no_grad():
            for tensor in (*parameters, *buffers):
                steps.broadcast(tensor.data, 0, what="parameters and buffers of rank 0")
        if not any(parameter.requires_grad for parameter in parameters):
            return
        if dense == "fsdp2":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            ranks = init_device_mesh(self.mesh.device.type, (self.mesh.world_size,))
            fully_shard(self.module, mesh=ranks)
            self._splits_dense = True
        else:
            # Not a submodule: names of parameters and of saved state are the module's own.
            group = self.mesh.new_group("dense")
            assert group is not None, "of several ranks"
            self._dense = self.mesh.watched("dense part")
            wrapped = DistributedDataParallel(
                self.module, process_group=group, gradient_as_bucket_view=True
            )
            self.mesh.end_with(wrapped, group)
            if self.mesh.backend == "gloo":
                mesh = self.mesh
                owner = TorchCollectives(group, mesh.device, mesh.timeout_s, watched=self._dense)
                # Errors name the step of the last lookup or the last control call.
                tables = [one.exchange.collectives for one in self.collections().values()]
                name_failures(wrapped, owner, lambda: max(one.step for one in (steps, *tables)))
            object.__setattr__(self, "_wrapped", wrapped)
