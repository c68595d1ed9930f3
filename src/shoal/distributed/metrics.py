"""What crosses between ranks in a training lookup, and in its gradients: sizes, splits, indices."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shoal.embedding.collection import EmbeddingCollection
from shoal.errors import ConfigError
from shoal.exchange.all_to_all import AllToAllExchange
from shoal.exchange.partition import BufferLayout, Transfer
from shoal.exchange.wire import WireKind, wire_dtype, wire_elements

_HOT_IDS = 3


class AllToAllMetrics:
    """Of the last training lookup of a rank and of its gradients, for any loop.

    Nothing is computed before it is asked for; what is then copied from a GPU is waited for.

    Args:
        exchange: whose lookups are seen from now on, instead of by another of these.
        by_table: figures of each table, too, by its name.
    """

    def __init__(self, exchange: AllToAllExchange, *, by_table: bool = False) -> None:
        self._by_table = by_table
        self._transfer: Transfer | None = None
        self._sent_back: Transfer | None = None
        self._wire = exchange.wire
        self._on_host: list[tuple[str, Tensor, Tensor]] | None = None
        exchange.on_transfer, exchange.on_gradients = self._looked_up, self._back

    @classmethod
    def of(cls, model: nn.Module, *, by_table: bool = False) -> AllToAllMetrics:
        """Those of a model's one `EmbeddingCollection`, once it is spread over ranks.

        Raises:
            ConfigError: no such collection, several, or rows that are on one rank or on servers.
        """
        found = [part for part in model.modules() if isinstance(part, EmbeddingCollection)]
        exchange = found[0].exchange if len(found) == 1 else None
        if not isinstance(exchange, AllToAllExchange):
            got = f"{len(found)} collections" if len(found) != 1 else type(exchange).__name__
            allowed, remedy = "one, spread over ranks", "Wrap it in DistributedModelParallel."
            raise ConfigError("collections to watch", got, allowed, remedy)
        return cls(exchange, by_table=by_table)

    def _looked_up(self, transfer: Transfer) -> None:
        self._transfer, self._on_host = transfer, None

    def _back(self, transfer: Transfer) -> None:
        self._sent_back = transfer

    def scalars(self) -> dict[str, float]:
        """Figures by name; none before the first lookup, and of gradients after the first."""
        transfer = self._transfer
        if transfer is None:
            return {}
        offsets_N = transfer.outgoing.offsets_N
        found = {
            "alltoall/ids": float(offsets_N.numel()),
            "alltoall/row_bytes": float(_bytes(transfer, self._wire.rows)),
            "alltoall/index_max": float(offsets_N.max()) if offsets_N.numel() else 0.0,
        }
        splits = self._splits()
        found["alltoall/unique_ids"] = float(splits["alltoall/ids_to_rank"].sum())
        if self._sent_back is not None:
            found["alltoall/gradient_bytes"] = float(_bytes(self._sent_back, self._wire.grads))
        for name, split_W in splits.items():
            found |= {f"{name}/{rank}": float(size) for rank, size in enumerate(split_W.tolist())}
        if self._by_table:
            for name, values in self._histograms_by_table().items():
                _, figure, table = name.split("/", 2)
                if figure == "occurrences":
                    top, total = float(values.max()) if values.numel() else 0.0, values.sum()
                    found[f"alltoall/unique_ids/{table}"] = float(values.numel())
                    found[f"alltoall/hottest_share/{table}"] = top / float(total) if total else 0.0
                else:
                    found[f"alltoall/{figure}_min/{table}"] = float(values.min())
                    found[f"alltoall/{figure}_max/{table}"] = float(values.max())
        return found

    def histograms(self) -> dict[str, Tensor]:
        """Values on the CPU to make histograms of: splits by rank, and by table how often ids
        occur; for `SummaryWriter.add_histogram`, say.
        """
        if self._transfer is None:
            return {}
        return self._splits() | (self._histograms_by_table() if self._by_table else {})

    def hot_ids(self) -> list[str]:
        """The hottest ids of each table in the last lookup, as "TABLE ID (COUNT of ALL)"."""
        hot = []
        for table, ids_U, counts_U in self._tables():
            top = counts_U.topk(min(_HOT_IDS, counts_U.numel()))
            pairs = zip(ids_U[top.indices].tolist(), top.values.tolist(), strict=True)
            hot += [f"{table} {id} ({count} of {int(counts_U.sum())})" for id, count in pairs]
        return hot

    def _splits(self) -> dict[str, Tensor]:
        """Int64 [W]: ids, rows and gradients that go to each rank; the last two in floats."""
        assert self._transfer is not None
        found = {
            "alltoall/ids_to_rank": self._transfer.sizes.sent_WX[:, :-1].sum(1),
            "alltoall/row_floats_to_rank": _floats(self._transfer, sent=False),
        }
        if self._sent_back is not None:
            found["alltoall/gradient_floats_to_rank"] = _floats(self._sent_back, sent=True)
        return found

    def _histograms_by_table(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        assert self._transfer is not None
        for layout, k, table in _columns(self._transfer):
            ids_W = self._transfer.sizes_of(layout)[0][:, k]
            if not layout.tables[k].hosted.start:  # not of slices of the same rows
                found[f"alltoall/ids_to_rank/{table}"] = ids_W
        if self._sent_back is not None:
            for layout, k, table in _columns(self._sent_back):
                name = f"alltoall/gradient_floats_to_rank/{table}"
                floats_W = self._sent_back.sizes_of(layout)[0][:, k] * layout.dims[k]
                found[name] = found[name] + floats_W if name in found else floats_W
        return found | {
            f"alltoall/occurrences/{name}": counts for name, _, counts in self._tables()
        }

    def _tables(self) -> list[tuple[str, Tensor, Tensor]]:
        """(name, distinct ids, occurrences) of each table that this rank looked up."""
        if self._on_host is None:
            self._on_host = list(self._copied())
        return self._on_host

    def _copied(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        transfer = self._transfer
        for layout, buffer in (
            ()
            if transfer is None
            else zip(transfer.plan.buffers, transfer.outgoing.buffers, strict=True)
        ):
            sizes_WK = buffer.sizes_WK.cpu()
            sizes = (sizes_WK[:1] if layout.replicated else sizes_WK).flatten().tolist()
            ids = torch.split(buffer.ids_N.cpu()[: sum(sizes)], sizes)
            counts = torch.split(buffer.counts_N.cpu()[: sum(sizes)], sizes)
            tables = len(layout.tables)
            for k, table in enumerate(layout.tables):
                if not table.hosted.start:
                    yield (
                        table.hosted.table,
                        torch.cat(ids[k::tables]),
                        torch.cat(counts[k::tables]),
                    )


def _columns(transfer: Transfer) -> Iterator[tuple[BufferLayout, int, str]]:
    for layout in transfer.plan.buffers:
        for k, table in enumerate(layout.tables):
            yield layout, k, table.hosted.table


def _bytes(transfer: Transfer, kind: WireKind | None) -> int:
    """Of the rows that this rank reads, or of their gradients, in the wire's precision."""
    found = 0
    for layout in transfer.plan.buffers:
        sent_WK, _ = transfer.sizes_of(layout)
        rows_K = (sent_WK[0] if layout.replicated else sent_WK.sum(0)).tolist()
        sizes = zip(rows_K, layout.dims, strict=True)
        elements = sum(wire_elements(rows, dim, kind) for rows, dim in sizes)
        found += elements * wire_dtype(kind, layout.real).itemsize
    return found


def _floats(transfer: Transfer, *, sent: bool) -> Tensor:
    """Floats [W] of the rows whose ids went to each rank, or came from it."""
    parts = [
        transfer.sizes_of(layout)[0 if sent else 1] @ layout.dims_K
        for layout in transfer.plan.buffers
    ]
    return torch.stack(parts).sum(0)
