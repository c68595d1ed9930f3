"""Embeddings of growing tables as a torch module: ids in, model inputs out, gradients back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal import errors
from shoal.comm.collectives import Collectives
from shoal.embedding.gradients import GradientLedger
from shoal.embedding.layouts import Feature, Layout, compile_layouts, default_layouts
from shoal.errors import ConfigError, DTypeError, InputError, ShapeError, TicketError, known_name
from shoal.exchange.all_to_all import AllToAllExchange
from shoal.exchange.local import Exchange, LocalExchange, Request, Route, Sending
from shoal.exchange.rows_by_id import RowsOverRanks
from shoal.lookup import PoolPlan
from shoal.ragged import KeyedRagged
from shoal.table import checks
from shoal.table import shard as scalars
from shoal.table.facade import Table
from shoal.table.factory import make_shard
from shoal.table.hosting import HostedTables
from shoal.table.shard import RowsById, Shard, StepContext
from shoal.table.spec import HostRows, TableSpec
from shoal.uncompiled import uncompiled

_NO_LIMIT = 1 << 62


class Requests:
    """Makes the requests of one collection.

    Args:
        features: in the plan's order.
        tables_G: int32 [G], each feature's table, as the exchange counts them.
        plan: how the rows are pooled.
        device: where the shard takes ids.
    """

    def __init__(
        self, features: Sequence[Feature], tables_G: Tensor, plan: PoolPlan, device: torch.device
    ) -> None:
        self.tables_G = tables_G
        self._keys = tuple(feature.name for feature in features)
        limits = [_NO_LIMIT if f.max_length is None else f.max_length for f in features]
        limited = any(limit < _NO_LIMIT for limit in limits)
        self._limits_F = torch.tensor(limits, device="cpu") if limited else None
        self._plan = plan
        self._device = device

    def of(self, batch: object) -> Request:
        """The request of one batch.

        Raises:
            InputError: features missing, a list longer than declared, or weights that ask for a
                gradient.
        """
        if not isinstance(batch, KeyedRagged):
            remedy = "Build one with KeyedRagged.from_lists or from_dict."
            got = type(batch).__name__
            raise DTypeError("batch", got=got, allowed="KeyedRagged", remedy=remedy)
        ordered = batch if batch.keys == self._keys else self._select(batch)
        if self._limits_F is not None:
            self._check_lengths(batch, self._limits_F)
        if ordered.weights_N is not None:
            ordered = _plain_weights(ordered, ordered.weights_N)
        if ordered.values_N.device != self._device:
            ordered = _sent(ordered, self._device)
        return Request(batch, ordered, self.tables_G, self._plan)

    def _select(self, batch: KeyedRagged) -> KeyedRagged:
        missing = sorted(set(self._keys) - set(batch.keys))
        if missing:
            got = f"keys {list(batch.keys)} without {missing}"
            remedy = "A feature without ids is a key with empty lists."
            raise InputError("batch", got, f"all of {list(self._keys)}", remedy)
        return batch.select(self._keys)

    def _check_lengths(self, batch: KeyedRagged, limits_F: Tensor) -> None:
        longest_F = batch.longest
        if batch.keys != self._keys:
            longest_F = longest_F[[batch.keys.index(key) for key in self._keys]]
        too_long = (longest_F > limits_F).nonzero()
        if too_long.numel():
            f = int(too_long[0])
            raise ShapeError(
                f"ids of one example in feature {self._keys[f]!r}",
                got=int(longest_F[f]),
                allowed=f"at most {int(limits_F[f])} (max_length)",
                remedy="Shorten the lists, or raise Feature.max_length.",
            )


def _plain_weights(ordered: KeyedRagged, weights_N: Tensor) -> KeyedRagged:
    """Weights as shards take them: float32, contiguous."""
    if weights_N.requires_grad:
        remedy = "Detach them; weights are data here."
        raise InputError("weights of a batch", "weights that require grad", "plain numbers", remedy)
    if weights_N.dtype is torch.float32 and weights_N.is_contiguous():
        return ordered
    return replace(ordered, weights_N=weights_N.to(torch.float32).contiguous())


def _sent(ordered: KeyedRagged, device: torch.device) -> KeyedRagged:
    """A batch on a shard's device, without waiting for it.

    Raises:
        DTypeError: it is on a device that its shard cannot read.
    """
    if device.type == "cpu":
        remedy = "Move it with .to('cpu'), or make the collection with device='cuda'."
        got = ordered.values_N.device
        raise DTypeError("device of a batch", got=got, allowed=device, remedy=remedy)
    return ordered.pin_memory().to(device, non_blocking=True)


class Lookup(torch.autograd.Function):
    """Forward reads a route's rows, backward sends the gradients of the outputs back.

    Each output may go backward on its own, as if it came from a table of its own: only an output
    that went backward without its graph being retained may not do so again.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, owner: EmbeddingCollection, route: Route, step: StepContext
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.owner = owner
        ctx.route = route
        ctx.versions = _versions(route)
        ctx.spent = set()
        ctx.generation = None
        outputs = owner.exchange.combine(route, ctx=step)
        ctx.dtypes = owner.output_dtypes(outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None, None]:
        if torch.is_grad_enabled():
            raise InputError(
                "backward with create_graph=True through an embedding lookup",
                "a second derivative with respect to table rows",
                "first derivatives",
                "Differentiate twice with respect to the lookup's outputs instead.",
            )
        owner: EmbeddingCollection = ctx.owner
        ledger, route = owner.ledger, ctx.route
        given = [i for i, grad in enumerate(grads) if grad is not None]
        if route is None or not ctx.spent.isdisjoint(given):
            remedy = "Pass retain_graph=True to the earlier backward."
            raise _late("a graph that already ran and was not retained", "one backward", remedy)
        if ctx.generation not in (None, ledger.generation):
            remedy = "Call all backward passes of a batch first, or run its forward again."
            raise _late("a graph whose gradient was applied", "backward before step()", remedy)
        if ctx.versions != _versions(route):
            remedy = "Build a new batch instead of changing one."
            raise InputError("ids of a batch", "a change in place since forward", "none", remedy)
        ctx.generation = ledger.generation
        ledger.write(route, owner.exchange.back(route, _complete(grads, route, ctx.dtypes)))
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.spent.update(given)
            if len(ctx.spent) == len(grads):
                # Nothing can run again: from here on the record alone holds the ticket.
                ctx.route = None
        return None, None, None, None


def _versions(route: Route) -> tuple[int, ...]:
    batch = route.request.batch
    # Tensors of inference mode have no version, and are not changed in place outside of it.
    parts = (batch.values_N, batch.offsets_FB1)
    return tuple([0 if part.is_inference() else part._version for part in parts])


def _complete(
    grads: Sequence[Tensor | None], route: Route, dtypes: tuple[torch.dtype, ...]
) -> tuple[Tensor, ...]:
    """Contiguous gradients, zeros for outputs that nothing was computed from."""
    parts = []
    for i, grad in enumerate(grads):
        if grad is None:
            width = route.request.plan.outputs[i].width
            ordered = route.request.ordered
            size, device = ordered.batch_size, ordered.values_N.device
            grad = torch.zeros(size, width, dtype=dtypes[i], device=device)
        if grad.is_neg() or not grad.is_contiguous():
            grad = grad.resolve_neg().contiguous()
        parts.append(grad)
    return tuple(parts)


def _late(got: str, allowed: str, remedy: str) -> TicketError:
    what = "backward through an embedding lookup"
    return TicketError(what, got=got, allowed=allowed, remedy=remedy)


@uncompiled
class EmbeddingCollection(nn.Module):
    """Tables, the features that read them, and the model inputs they become.

    Rows belong to the shard: they are neither parameters nor buffers and not in `state_dict`
    (a checkpoint saves them in a form of its own). Pickle and deepcopy carry them along, but not
    from a collection whose tables are spread over ranks.

    Modes: in training with gradients enabled, unknown ids are admitted and inserted and the
    forward reads their initial values. In `eval()` or under `no_grad` nothing is inserted and
    unknown ids read as zeros; so use `checkpoint(..., use_reentrant=False)`, whose first forward
    has gradients enabled. A forward computed again for the same batch object reuses its lookup.

    On CUDA, batches may come from the CPU (they are sent through pinned memory) or lie on
    the device; model inputs are on the device. Neither forward nor backward nor the optimizer's
    step waits for the device, but for a batch that was built there: see
    `KeyedRagged.host_splits`.

    Args:
        tables: specs, names distinct.
        features: what a batch holds; their order is the fast order of a batch's keys.
        layouts: model inputs; None gives each feature its whole rows under its own name.
        shard: where the rows live; None makes one on `device`. It must host `tables`.
        device: "cpu", "cuda" or "cuda:N", when no shard is given.
        host_rows: rows in host memory behind a cache on the GPU, when no shard is given; None:
            on the device.
        seed: of the initial values, when no shard is given.
        init_on_lookup: False is Monolith's mode: the training forward reads zeros for unknown
            ids, which are admitted and inserted when their gradient is applied.

    Raises:
        UnknownName, ConfigError: declarations that do not fit each other, or the device.
        DeviceUnavailable: no such device here.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        features: Sequence[Feature],
        layouts: Sequence[Layout] | None = None,
        *,
        shard: Shard | None = None,
        device: str = "cpu",
        host_rows: HostRows | None = None,
        seed: int = 0,
        init_on_lookup: bool = True,
    ) -> None:
        super().__init__()
        self._tables = _named(errors.all_of_kind("tables of a collection", tables, TableSpec))
        self.features = errors.all_of_kind("features of a collection", features, Feature)
        layouts = default_layouts(self.features) if layouts is None else layouts
        self.layouts = errors.all_of_kind("layouts of a collection", layouts, Layout)
        self.init_on_lookup = init_on_lookup
        self._compiled = compile_layouts(self._tables, self.features, self.layouts)
        if shard is None:
            shard = make_shard(
                tuple(self._tables.values()), seed=seed, device=device, host_rows=host_rows
            )
        self._house(shard)

    def _house(self, shard: Shard) -> None:
        """Move in with a shard of this process."""
        checks.hosted_tables(shard, self._tables.values())
        self._exchange: Exchange = LocalExchange(shard)
        self._settle(shard.specs, GradientLedger(shard, inserts=self.init_on_lookup))

    def _settle(self, specs: Sequence[TableSpec], ledger: GradientLedger) -> None:
        """All that depends on a shard, and on how its exchange counts tables."""
        self.ledger = ledger
        indices = {spec.name: k for k, spec in enumerate(specs)}
        tables_G = torch.tensor(
            [indices[f.table] for f in self.features], dtype=torch.int32, device="cpu"
        )
        device = ledger.shard.device
        self._requests = Requests(self.features, tables_G, self._compiled.plan, device)
        # Lookups that have begun and that no forward has used yet, by batch object: each holds its
        # batch, so that the identity stays its own.
        self._begun: dict[int, Sending | Route] = {}
        # Autograd calls backward only for a function with an input that asks for a gradient.
        self._anchor = torch.empty(0, device=device, requires_grad=True)
        self._dtypes: tuple[torch.dtype, ...] | None = None

    def distribute(
        self,
        exchange: Exchange,
        *,
        collectives: Collectives | None = None,
        silent: Collection[str] = (),
    ) -> None:
        """Look up through another exchange from now on; rows are not carried over.

        An exchange over the same shard and specs, without collectives of its own for steps,
        takes the place of the present one and nothing else changes.

        Args:
            exchange: its `specs` are these tables, and others maybe; its shard may host parts.
            collectives: for what a step decides over ranks, apart from those of the exchange;
                None in a world of one.
            silent: tables of the exchange's shard that another rank speaks for: replicas.

        Raises:
            TicketError: a lookup or a gradient is open.
            ConfigError: an optimizer steps the rows already, or several ranks have no collectives
                for their steps.
        """
        self._check_at_rest()
        same = exchange.shard is self.shard and exchange.specs == self._exchange.specs
        if same and collectives is None and not silent:
            self._exchange = exchange
            return
        if self.ledger.is_claimed:
            remedy = "Distribute the model first, then make its SparseOptimizer."
            got = "a SparseOptimizer over them"
            raise ConfigError("collection to distribute", got, "none yet", remedy)
        if collectives is None and isinstance(exchange, AllToAllExchange):
            ranks = exchange.collectives.world_size
            if ranks > 1:
                raise ConfigError(
                    "collectives of a collection to distribute",
                    got=f"none, on {ranks} ranks",
                    allowed="those by which ranks decide on a step together",
                    remedy="Pass collectives=, others than the exchange's, or wrap the model in "
                    "DistributedModelParallel.",
                )
        self._exchange = exchange
        ledger = GradientLedger(
            exchange.shard, inserts=self.init_on_lookup, collectives=collectives, silent=silent
        )
        self._settle(exchange.specs, ledger)

    def _check_at_rest(self) -> None:
        if len(self.ledger) or len(self._begun) or self.ledger.busy:
            raise TicketError(
                "collection to distribute",
                got="lookups or gradients of a step that is not done",
                allowed="none",
                remedy="Do it between steps: after step() and zero_grad(), or drop_begun().",
            )

    @property
    def exchange(self) -> Exchange:
        """How ids reach the rows."""
        return self._exchange

    @property
    def distributed(self) -> bool:
        """Whether the rows are spread over ranks."""
        return not isinstance(self._exchange, LocalExchange)

    @property
    def shard(self) -> Shard:
        """The owner of this process's rows."""
        return self._exchange.shard

    @property
    def hosted(self) -> HostedTables:
        """The whole tables of the shard, and which part of them is this process's."""
        exchange = self._exchange
        placement = exchange.placement if isinstance(exchange, AllToAllExchange) else None
        return HostedTables(exchange.specs, exchange.shard, placement, self.ledger.resume)

    @property
    def tables(self) -> Mapping[str, TableSpec]:
        """Specs by name."""
        return dict(self._tables)

    def table(self, name: str) -> Table:
        """The methods of one table, over the same rows.

        If the rows are spread over ranks, methods reach them on any rank, and every rank calls
        the same methods in the same order.

        Raises:
            UnknownName: no such table.
        """
        known_name("table", name, self._tables)
        shard: RowsById = self.shard
        if isinstance(self._exchange, AllToAllExchange):
            shard = RowsOverRanks(self._exchange)
        return Table(self._tables[name], shard=shard)

    def forward(self, batch: KeyedRagged, *, event_time_s: int = 0) -> dict[str, Tensor]:
        """Look up one batch.

        Args:
            batch: ids of all features (others are ignored); fastest with its keys in the
                collection's order. Its weights, one per id, multiply rows before pooling; a mean
                divides by the number of ids.
            event_time_s: when the batch happened, whole seconds; stamps the rows it touches.

        Returns:
            model inputs by name, float32 (float64 for float64 tables); shapes as in `Layout`.

        Raises:
            InputError: features missing, a list longer than declared, weights that ask for a
                gradient, or a time outside 0..2^32-1; nothing was changed.
            TableFull: a table has no room; nothing was inserted.
        """
        scalars.event_time(event_time_s)
        if not (self.training and torch.is_grad_enabled()):
            request = self._requests.of(batch)
            return self._compiled.inputs(self._exchange.read(request), request.ordered)
        ledger, exchange = self.ledger, self._exchange
        ctx = ledger.context(event_time_s)
        route = ledger.route_of(batch, self._compiled.plan)
        if route is None:
            begun = self._begun.pop(id(batch), None)
            route = exchange.probe(begun) if isinstance(begun, Sending) else begun
            if route is None:
                request = self._requests.of(batch)
                route = exchange.probe(exchange.send(request, insert=self.init_on_lookup, ctx=ctx))
            ledger.opened(route)
        outputs = Lookup.apply(self._anchor, self, route, ctx)  # type: ignore[no-untyped-call]
        return self._compiled.inputs(outputs, route.request.ordered)

    def begin(self, batch: KeyedRagged, event_time_s: int = 0) -> None:
        """Begin the lookup of a later training batch: its ids set out for the rows' owners.

        A pipeline calls `begin`, `probe` and `fetch` ahead of the forward of the same batch
        object, which continues from their last position; each may be left out. In `eval()` nothing
        begins: a forward there holds nothing open.

        Args:
            batch, event_time_s: as of `forward`.

        Raises:
            InputError: as `forward`, or the batch has begun already; nothing was sent.
        """
        scalars.event_time(event_time_s)
        if not self.training:
            return
        if id(batch) in self._begun:
            raise InputError(
                "batch of begin()",
                got="a batch that has begun and that no forward has used yet",
                allowed="a batch once",
                remedy="Build a batch for each step, or call drop_begun() first.",
            )
        request, ctx = self._requests.of(batch), self.ledger.context(event_time_s)
        sending = self._exchange.send(request, insert=self.init_on_lookup, ctx=ctx)
        self._begun[id(batch)] = sending

    def probe(self, batch: KeyedRagged) -> None:
        """Find or insert the rows of a batch that has begun; they are held from here on.

        Raises:
            TicketError: the batch has not begun.
            TableFull: a table has no room; nothing was inserted.
        """
        if self.training:
            self._probed(batch)

    def _probed(self, batch: KeyedRagged) -> Route:
        """The route of a batch; the ids are waited for and looked up the first time."""
        begun = self._begun.get(id(batch))
        if begun is None:
            raise TicketError(
                "lookup of a batch",
                got="a batch that has not begun, or that a forward has used",
                allowed="a batch after begin()",
                remedy="Call begin(batch), probe(batch), fetch(batch), then the forward.",
            )
        if isinstance(begun, Sending):
            begun = self._begun[id(batch)] = self._exchange.probe(begun)
        return begun

    def fetch(self, batch: KeyedRagged) -> None:
        """Begin to bring the rows of a batch that has begun, as they are now.

        Raises:
            TicketError: the batch has not begun.
        """
        if self.training:
            route = self._probed(batch)
            self._exchange.fetch(route, ctx=self.ledger.context(route.event_time_s))

    def drop_begun(self, batch: KeyedRagged | None = None) -> None:
        """Give up lookups that have begun and that no forward used, of one batch or of all; the
        same on all ranks."""
        for key in [id(batch)] if batch is not None else list(self._begun):
            self._begun.pop(key, None)

    def output_dtypes(self, outputs: tuple[Tensor, ...]) -> tuple[torch.dtype, ...]:
        """Dtypes of the plan's outputs, which a plan and a shard settle for good."""
        if self._dtypes is None:
            self._dtypes = tuple(output.dtype for output in outputs)
        return self._dtypes

    def extra_repr(self) -> str:
        names = ", ".join(self._tables)
        return f"tables=[{names}], features={len(self.features)}, layouts={len(self.layouts)}"

    def __getstate__(self) -> dict[str, Any]:
        if self.distributed:
            got = "pickle or deepcopy of tables that are spread over ranks"
            remedy = "Copy it before it is distributed, or save a checkpoint and load it."
            what = "copy of an EmbeddingCollection"
            raise ConfigError(what, got, "a collection in one process", remedy)
        state = dict(self.__dict__)
        for name in ("_exchange", "ledger", "_requests", "_begun", "_anchor", "_dtypes"):
            del state[name]
        return {"module": state, "shard": self.shard}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state["module"])  # type: ignore[no-untyped-call]
        self._house(state["shard"])


def _named(tables: Sequence[TableSpec]) -> dict[str, TableSpec]:
    named = {spec.name: spec for spec in tables}
    if len(named) != len(tables) or not named:
        got = [spec.name for spec in tables]
        remedy = "Give each table a name of its own; features may share a table."
        raise ConfigError("table names", got, "distinct names, at least one", remedy)
    return named
