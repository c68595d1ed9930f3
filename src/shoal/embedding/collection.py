"""Embeddings of growing tables as a torch module: ids in, model inputs out, gradients back.

One call of an `EmbeddingCollection` is one lookup in all its tables and one autograd node. In
training, forward inserts new ids and opens a ticket; backward only records the gradients of the
outputs; the sparse optimizer applies them at its step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.collectives import Collectives
from shoal.embedding.begun import BegunLookups
from shoal.embedding.lookup import Lookup
from shoal.embedding.requests import Requests
from shoal.errors import ConfigError, TicketError, describe, unknown_name
from shoal.exchange import AllToAllExchange, Exchange, LocalExchange
from shoal.exchange.verbs import RoutedVerbs
from shoal.layouts import Feature, Layout, compile_layouts, default_layouts
from shoal.ledger import GradientLedger
from shoal.ragged import KeyedRagged
from shoal.table import Table, make_shard, scalars
from shoal.table.hosting import HostedTables
from shoal.table.shard import Shard
from shoal.table.spec import TableSpec
from shoal.uncompiled import uncompiled

__all__ = ["EmbeddingCollection"]


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

    On CUDA, batches may come from the CPU (they are sent through page-locked memory) or lie on
    the device; model inputs are on the device. Neither forward nor backward nor the optimizer's
    step waits for the device, but for a batch that was built there: see
    `KeyedRagged.host_splits`.

    Args:
        tables: specs, names distinct.
        features: what a batch holds; their order is the fast order of a batch's keys.
        layouts: model inputs; None gives each feature its whole rows under its own name.
        shard: where the rows live; None makes one on `device`. It must host `tables`.
        device: "cpu", "cuda" or "cuda:N", when no shard is given.
        seed: of the initial values, when no shard is given.
        init_on_lookup: False is Monolith's mode: the training forward reads zeros for unknown
            ids, which are admitted and inserted when their gradient is applied.

    Raises:
        UnknownName, ConfigError: declarations that do not fit each other.
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
        seed: int = 0,
        init_on_lookup: bool = True,
    ) -> None:
        super().__init__()
        self._tables = _named(tables)
        self.features = tuple(features)
        self.layouts = default_layouts(self.features) if layouts is None else tuple(layouts)
        self.init_on_lookup = init_on_lookup
        self._compiled = compile_layouts(self._tables, self.features, self.layouts)
        self._house(make_shard(tuple(tables), seed=seed, device=device) if shard is None else shard)

    def _house(self, shard: Shard) -> None:
        """Move in with a shard of this process."""
        self._check_hosted(shard)
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
        self._begun = BegunLookups()
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
            text = describe("collection to distribute", got=got, allowed="none yet", remedy=remedy)
            raise ConfigError(text)
        if collectives is None and isinstance(exchange, AllToAllExchange):
            _check_alone(exchange.collectives)
        self._exchange = exchange
        ledger = GradientLedger(
            exchange.shard, inserts=self.init_on_lookup, collectives=collectives, silent=silent
        )
        self._settle(exchange.specs, ledger)

    def _check_at_rest(self) -> None:
        if len(self.ledger) or len(self._begun) or self.ledger.busy:
            raise TicketError(
                describe(
                    "collection to distribute",
                    got="lookups or gradients of a step that is not done",
                    allowed="none",
                    remedy="Do it between steps: after step() and zero_grad(), or drop_begun().",
                )
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
        """The whole tables of the shard, and which part of them is this process's.

        Where the rows are spread over ranks and no batch was looked up yet, the exchange is made
        here: a collective call.
        """
        if not self.distributed:
            return HostedTables(self.shard.specs, self.shard, resume=self.ledger.resume)
        _ = self._exchange.collectives  # one that waits for the first batch takes its own place
        exchange = self._exchange
        placement = exchange.placement if isinstance(exchange, AllToAllExchange) else None
        return HostedTables(exchange.specs, exchange.shard, placement, self.ledger.resume)

    @property
    def tables(self) -> Mapping[str, TableSpec]:
        """Specs by name."""
        return dict(self._tables)

    def table(self, name: str) -> Table:
        """The verbs of one table, over the same rows.

        Where the rows are spread over ranks, verbs reach them wherever they are, and every rank
        calls the same verbs in the same order.

        Raises:
            UnknownName: no such table.
        """
        if name not in self._tables:
            raise unknown_name("table", name, self._tables)
        return Table(self._tables[name], shard=self._verbs())

    def _verbs(self) -> Shard:
        if not self.distributed:
            return self.shard
        # One that waits for the first batch comes into being, and takes its own place, here.
        _ = self._exchange.collectives
        if isinstance(self._exchange, AllToAllExchange):
            return RoutedVerbs(self._exchange)
        return self.shard

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
            return self._compiled.inputs(self._exchange.read(self._requests.of(batch)))
        ledger, exchange = self.ledger, self._exchange
        ctx = ledger.context(event_time_s)
        route = ledger.route_of(batch, self._compiled.plan)
        if route is None:
            route = self._begun.take(batch, exchange)
            if route is None:
                request = self._requests.of(batch)
                route = exchange.dispatch(request, insert=self.init_on_lookup, ctx=ctx)
            ledger.opened(route)
        outputs = Lookup.apply(self._anchor, self, route, ctx)  # type: ignore[no-untyped-call]
        return self._compiled.inputs(outputs)

    def begin(self, batch: KeyedRagged, event_time_s: int = 0) -> None:
        """Begin the lookup of a later training batch: its ids set out for the rows' owners.

        A pipeline calls `begin`, `probe` and `fetch` ahead of the forward of the same batch
        object, which goes on from wherever they got; each may be left out. In `eval()` nothing
        begins: a forward there holds nothing open.

        Raises:
            InputError: as `forward`, or the batch has begun already; nothing was sent.
        """
        scalars.event_time(event_time_s)
        if not self.training:
            return
        self._begun.check_new(batch)
        request, ctx = self._requests.of(batch), self.ledger.context(event_time_s)
        sending = self._exchange.send(request, insert=self.init_on_lookup, ctx=ctx)
        self._begun.add(request, event_time_s, sending)

    def probe(self, batch: KeyedRagged) -> None:
        """Find or insert the rows of a batch that has begun; they are held from here on.

        Raises:
            TicketError: the batch has not begun.
            TableFull: a table has no room; nothing was inserted.
        """
        if self.training:
            self._begun.probe(batch, self._exchange)

    def fetch(self, batch: KeyedRagged) -> None:
        """Begin to bring the rows of a batch that has begun, as they are now.

        Raises:
            TicketError: the batch has not begun.
        """
        if self.training:
            self._begun.fetch(batch, self._exchange, self.ledger)

    def drop_begun(self) -> None:
        """Give up the lookups that have begun and that no forward used; the same on all ranks."""
        self._begun.drop()

    def output_dtypes(self, outputs: tuple[Tensor, ...]) -> tuple[torch.dtype, ...]:
        """Dtypes of the plan's outputs, which a plan and a shard settle for good."""
        if self._dtypes is None:
            self._dtypes = tuple(output.dtype for output in outputs)
        return self._dtypes

    def _check_hosted(self, shard: Shard) -> None:
        hosted = {spec.name: spec for spec in shard.specs}
        for name, spec in self._tables.items():
            if name not in hosted:
                raise unknown_name("table of the given shard", name, hosted)
            if hosted[name] != spec:
                raise ConfigError(
                    describe(
                        f"spec of table {name!r}",
                        got="another spec than the given shard's",
                        allowed="the same spec",
                        remedy="Build the collection from shard.specs.",
                    )
                )

    def extra_repr(self) -> str:
        names = ", ".join(self._tables)
        return f"tables=[{names}], features={len(self.features)}, layouts={len(self.layouts)}"

    def __getstate__(self) -> dict[str, Any]:
        if self.distributed:
            raise ConfigError(
                describe(
                    "copy of an EmbeddingCollection",
                    got="pickle or deepcopy of tables that are spread over ranks",
                    allowed="a collection in one process",
                    remedy="Copy it before it is distributed, or save a checkpoint and load it.",
                )
            )
        state = dict(self.__dict__)
        for name in ("_exchange", "ledger", "_requests", "_begun", "_anchor", "_dtypes"):
            del state[name]
        return {"module": state, "shard": self.shard}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state["module"])  # type: ignore[no-untyped-call]
        self._house(state["shard"])


def _check_alone(collectives: Collectives) -> None:
    if collectives.world_size > 1:
        raise ConfigError(
            describe(
                "collectives of a collection to distribute",
                got=f"none, on {collectives.world_size} ranks",
                allowed="those by which ranks decide on a step together",
                remedy="Pass collectives=, others than the exchange's, or wrap the model in "
                "DistributedModelParallel.",
            )
        )


def _named(tables: Sequence[TableSpec]) -> dict[str, TableSpec]:
    named = {spec.name: spec for spec in tables}
    if len(named) != len(tables) or not named:
        got = [spec.name for spec in tables]
        remedy = "Give each table a name of its own; features may share a table."
        text = describe(
            "table names", got=got, allowed="distinct names, at least one", remedy=remedy
        )
        raise ConfigError(text)
    return named
