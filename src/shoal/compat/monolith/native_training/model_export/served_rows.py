"""Rows of an exported model that other processes serve, by Monolith's remote predict."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.compat.monolith.native_training.model_export.export_context import ExportContext
from shoal.errors import ConfigError
from shoal.placement import hash_ids, ranks_of
from shoal.serve.client import remote_predict
from shoal.table.shard import Found, IdGroups
from shoal.table.spec import TableSpec

LOOKUP = "lookup"


class ServedRows:
    """Rows of parts `model:ps_0`, `model:ps_1`, ..., as `shoal serve --role ps` has them.

    Args:
        context: gets the parts and their signatures.
        specs: the tables.
        addresses: of each part, in order.
        deadline_ms: of each request.
    """

    def __init__(
        self,
        context: ExportContext,
        specs: Sequence[TableSpec],
        addresses: Sequence[str],
        deadline_ms: int,
    ) -> None:
        self.specs, self.device = tuple(specs), torch.device("cpu")
        self._model, self._deadline_ms = context.model_name, deadline_ms
        self._addresses = [one.removeprefix("tcp://") for one in addresses]
        inputs = {spec.name: ("int64", (-1,)) for spec in specs}
        outputs = {spec.name: ("float32", (-1, spec.dim)) for spec in specs}
        for index in range(len(addresses)):
            context.merge_signature(context.sub_graph(f"ps_{index}"), LOOKUP, inputs, outputs)

    def find(self, groups: IdGroups) -> Found:
        """Rows by group; zeros where there is none. A part is asked once for each table's ids."""
        ids = torch.split(groups.ids_N, groups.splits_G1.diff().tolist())
        rows = [
            self._rows(self.specs[table], own)
            for table, own in zip(groups.tables_G.tolist(), ids, strict=True)
        ]
        there = torch.cat([one.any(dim=1) for one in rows]) if rows else groups.ids_N.bool()
        return Found(tuple(rows), there)

    def _rows(self, spec: TableSpec, ids: Tensor) -> Tensor:
        unique, at = torch.unique(ids, return_inverse=True)
        owners = ranks_of(hash_ids(spec.hash_name, unique), len(self._addresses))
        rows = torch.zeros(len(unique), spec.dim, device="cpu")
        for part, address in enumerate(self._addresses):
            own = owners == part
            if own.any():
                (found,) = remote_predict(
                    [spec.name],
                    [unique[own]],
                    [spec.name],
                    f"{self._model}:ps_{part}",
                    task=part,
                    old_model_name=f"ps_{part}",
                    max_rpc_deadline_millis=self._deadline_ms,
                    signature_name=LOOKUP,
                    servers=(address,),
                )
                rows[own] = torch.tensor(found, device="cpu")
        return rows[at]

    def apply_ids(self, *_: object, **__: object) -> None:
        """Rows of an export cannot be changed.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "change of an exported table",
            got="an update",
            allowed="lookups",
            remedy="Make the tables outside of enter_export_mode.",
        )

    assign = assign_add = reinitialize = apply_ids
