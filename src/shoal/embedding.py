"""Embeddings of growing tables as a torch module: ids in, model inputs out, gradients back.

One call of an `EmbeddingCollection` is one lookup in all its tables and one autograd node. In
training, forward inserts new ids and opens a ticket; backward only records the gradients of the
outputs; the sparse optimizer applies them at its step.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import (
    ConfigError,
    DTypeError,
    InputError,
    ShapeError,
    TicketError,
    describe,
    unknown_name,
)
from shoal.exchange import Exchange, LocalExchange, Request, Route
from shoal.layouts import Feature, Layout, LayoutSlice, compile_layouts, default_layouts
from shoal.ledger import GradientLedger
from shoal.ragged import KeyedRagged
from shoal.table import Table, make_shard, scalars
from shoal.table.shard import Shard, StepContext
from shoal.table.spec import TableSpec

__all__ = ["EmbeddingCollection", "Feature", "GradientLedger", "Layout", "LayoutSlice"]

_NO_LIMIT = 1 << 62


class EmbeddingCollection(nn.Module):
    """Tables, the features that read them, and the model inputs they become.

    Rows belong to the shard: they are neither parameters nor buffers and not in `state_dict`
    (a checkpoint saves them in a form of its own). Pickle and deepcopy carry them along.

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
        self._keys = tuple(feature.name for feature in self.features)
        self._limits_F = _limits(self.features)
        self._house(make_shard(tuple(tables), seed=seed, device=device) if shard is None else shard)

    def _house(self, shard: Shard) -> None:
        """Move in with a shard: all that depends on it."""
        indices = _indices(self._tables, shard)
        tables_G = [indices[feature.table] for feature in self.features]
        self._tables_G = torch.tensor(tables_G, dtype=torch.int32)
        self._exchange: Exchange = LocalExchange(shard)
        self.ledger = GradientLedger(shard, inserts=self.init_on_lookup)
        self._device = shard.device
        # Autograd calls backward only for a function with an input that asks for a gradient.
        self._anchor = torch.empty(0, device=shard.device, requires_grad=True)
        self._dtypes: tuple[torch.dtype, ...] | None = None

    @property
    def shard(self) -> Shard:
        """The owner of the rows."""
        return self._exchange.shard

    @property
    def tables(self) -> Mapping[str, TableSpec]:
        """Specs by name."""
        return dict(self._tables)

    def table(self, name: str) -> Table:
        """The verbs of one table, over the same rows.

        Raises:
            UnknownName: no such table.
        """
        if name not in self._tables:
            raise unknown_name("table", name, self._tables)
        return Table(self._tables[name], shard=self.shard)

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
            return self._compiled.inputs(self._exchange.read(self._request(batch)))
        ledger = self.ledger
        ctx = ledger.context(event_time_s)
        route = ledger.route_of(batch, self._compiled.plan)
        if route is None:
            request = self._request(batch)
            route = self._exchange.dispatch(request, insert=self.init_on_lookup, ctx=ctx)
            ledger.opened(route)
        outputs = _Lookup.apply(self._anchor, self, route, ctx)  # type: ignore[no-untyped-call]
        return self._compiled.inputs(outputs)

    def _request(self, batch: object) -> Request:
        if not isinstance(batch, KeyedRagged):
            remedy = "Build one with KeyedRagged.from_lists or from_dict."
            got = type(batch).__name__
            raise DTypeError(describe("batch", got=got, allowed="KeyedRagged", remedy=remedy))
        ordered = batch if batch.keys == self._keys else self._select(batch)
        if self._limits_F is not None:
            self._check_lengths(batch, self._limits_F)
        if ordered.weights_N is not None:
            ordered = _plain_weights(ordered, ordered.weights_N)
        if ordered.values_N.device != self._device:
            ordered = _sent(ordered, self._device)
        return Request(batch, ordered, self._tables_G, self._compiled.plan)

    def _output_dtypes(self, outputs: tuple[Tensor, ...]) -> tuple[torch.dtype, ...]:
        """Dtypes of the plan's outputs, which a plan and a shard settle for good."""
        if self._dtypes is None:
            self._dtypes = tuple(output.dtype for output in outputs)
        return self._dtypes

    def _select(self, batch: KeyedRagged) -> KeyedRagged:
        missing = sorted(set(self._keys) - set(batch.keys))
        if missing:
            got = f"keys {list(batch.keys)} without {missing}"
            remedy = "A feature without ids is a key with empty lists."
            raise _bad("batch", got, f"all of {list(self._keys)}", remedy)
        return batch.select(self._keys)

    def _check_lengths(self, batch: KeyedRagged, limits_F: Tensor) -> None:
        longest_F = batch.longest
        if batch.keys != self._keys:
            longest_F = longest_F[[batch.keys.index(key) for key in self._keys]]
        too_long = (longest_F > limits_F).nonzero()
        if too_long.numel():
            f = int(too_long[0])
            raise ShapeError(
                describe(
                    f"ids of one example in feature {self._keys[f]!r}",
                    got=int(longest_F[f]),
                    allowed=f"at most {int(limits_F[f])} (max_length)",
                    remedy="Cut the lists, or raise Feature.max_length.",
                )
            )

    def extra_repr(self) -> str:
        names = ", ".join(self._tables)
        return f"tables=[{names}], features={len(self.features)}, layouts={len(self.layouts)}"

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        shard = self.shard
        for name in ("_exchange", "ledger", "_anchor", "_device", "_dtypes", "_tables_G"):
            del state[name]
        every = range(len(shard.specs))
        return {
            "module": state,
            "shard": (type(shard), shard.specs, shard.seed, str(shard.device)),
            "settings": getattr(shard, "settings", {}),
            "last_step": shard.last_step,
            "rows": [shard.export(k) for k in every],
            "sights": [shard.admission_state(k) for k in every],
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state["module"])  # type: ignore[no-untyped-call]
        kind, specs, seed, device = state["shard"]
        # Kinds that live on one device only do not ask for it.
        asks = "device" in inspect.signature(kind).parameters
        named = {"device": device} if asks else {}
        shard = kind(specs, seed=seed, **named, **state["settings"])
        shard.last_step = state["last_step"]
        for k, chunk in enumerate(state["rows"]):
            shard.load(k, chunk)
        for k, sights in enumerate(state["sights"]):
            shard.load_admission_state(k, sights)
        self._house(shard)


class _Lookup(torch.autograd.Function):
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
        outputs = owner._exchange.combine(route, ctx=step)
        ctx.dtypes = owner._output_dtypes(outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None, None]:
        if torch.is_grad_enabled():
            raise _bad(
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
            raise _bad("ids of a batch", "a change in place since forward", "none", remedy)
        ctx.generation = ledger.generation
        ledger.write(route, owner._exchange.back(route, _complete(grads, route, ctx.dtypes)))
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.spent.update(given)
            if len(ctx.spent) == len(grads):
                # Nothing can run again: from here on the record alone holds the ticket.
                ctx.route = None
        return None, None, None, None


def _versions(route: Route) -> tuple[int, int]:
    batch = route.request.batch
    return batch.values_N._version, batch.offsets_FB1._version


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
        parts.append(grad if grad.is_contiguous() else grad.contiguous())
    return tuple(parts)


def _late(got: str, allowed: str, remedy: str) -> TicketError:
    what = "backward through an embedding lookup"
    return TicketError(describe(what, got=got, allowed=allowed, remedy=remedy))


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


def _limits(features: Sequence[Feature]) -> Tensor | None:
    if all(feature.max_length is None for feature in features):
        return None
    return torch.tensor([_NO_LIMIT if f.max_length is None else f.max_length for f in features])


def _indices(tables: Mapping[str, TableSpec], shard: Shard) -> dict[str, int]:
    hosted = {spec.name: k for k, spec in enumerate(shard.specs)}
    for name, spec in tables.items():
        if name not in hosted:
            raise unknown_name("table of the given shard", name, hosted)
        if shard.specs[hosted[name]] != spec:
            raise ConfigError(
                describe(
                    f"spec of table {name!r}",
                    got="another spec than the given shard's",
                    allowed="the same spec",
                    remedy="Build the collection from shard.specs.",
                )
            )
    return hosted


def _plain_weights(ordered: KeyedRagged, weights_N: Tensor) -> KeyedRagged:
    """Weights as shards take them: float32, contiguous."""
    if weights_N.requires_grad:
        remedy = "Detach them; weights are data here."
        raise _bad("weights of a batch", "weights that require grad", "plain numbers", remedy)
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
        raise DTypeError(describe("device of a batch", got=got, allowed=device, remedy=remedy))
    return ordered.pin_memory().to(device, non_blocking=True)


def _bad(what: str, got: object, allowed: object, remedy: str) -> InputError:
    return InputError(describe(what, got=got, allowed=allowed, remedy=remedy))
