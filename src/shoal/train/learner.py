"""A model with its tables and its optimizers: what one training step changes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from shoal.config.build import EMBEDDINGS, FIRST_ORDER, ModelParts
from shoal.config.tree import DenseOptimizerSettings, RunConfig
from shoal.data import Batch
from shoal.embedding import EmbeddingCollection
from shoal.optim import JointOptimizer, SparseOptimizer, clip_grad_norm_
from shoal.rules.schedules import as_rate

__all__ = ["Learner", "window_weight"]

_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
}
_AMP_DTYPES = {"none": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Learner:
    """One model that trains: tables, dense module, and an optimizer for each.

    Args:
        name: its key in the metrics.
        parts: the specs of its tables and its dense module.
        config: device, seed, dense optimizer, clipping and mixed precision of the run.
    """

    def __init__(self, name: str, parts: ModelParts, config: RunConfig) -> None:
        self.name = name
        self.tables = EmbeddingCollection(
            parts.tables, parts.features, parts.layouts, device=config.device, seed=config.seed
        )
        self.module = parts.module.to(config.device)
        self.steps = 0
        self._device = torch.device(config.device)
        self._device_type = self._device.type
        self._dtype = _AMP_DTYPES[config.amp]
        self._clip_norm = config.clip_norm
        self._dense_settings = config.dense_optimizer
        self._dense = _dense_optimizer(self.module, config.dense_optimizer)
        self._sparse = SparseOptimizer(
            self.tables, nan_policy=config.nan_policy, nan_clip=config.nan_clip
        )
        # Sparse first: it refuses a bad gradient before anything has changed.
        self._joint = JointOptimizer([self._sparse, self._dense])
        self._scaler = torch.amp.GradScaler(self._device_type, enabled=config.amp == "float16")

    def train_step(self, window: Sequence[Batch]) -> list[Tensor]:
        """One optimizer step over the batches of a window; their losses add as one batch's would.

        Returns:
            the logits [B] of each batch, as they were before the step; detached, on the run's
            device, which is not waited for.
        """
        self.tables.train()
        self.module.train()
        for group in self._dense.param_groups:
            group["lr"] = as_rate(self._dense_settings.lr, self.steps)
        total = sum(window_weight(batch) for batch in window)
        seen: list[Tensor] = []
        for batch in map(self._moved, window):
            logits_B = self._forward(batch)
            loss = binary_cross_entropy_with_logits(
                logits_B, batch.labels, weight=batch.weights, reduction="sum"
            )
            self._scaler.scale(loss / total).backward()  # type: ignore[no-untyped-call]
            seen.append(logits_B.detach())
        self._apply()
        return seen

    def predict(self, batch: Batch) -> Tensor:
        """Probabilities [B], float32, on the run's device; nothing is inserted."""
        self.tables.eval()
        self.module.eval()
        with torch.inference_mode():
            return self._forward(self._moved(batch)).sigmoid()

    def check(self) -> None:
        """Raise what the last steps found in gradients; waits for a GPU.

        Raises:
            NonFiniteGradient: NaN or infinity, under nan_policy "raise" with tables on a GPU.
        """
        self._joint.check()

    def _moved(self, batch: Batch) -> Batch:
        if self._device_type == "cpu":
            return batch
        return batch.pin_memory().to(self._device, non_blocking=True)

    def _forward(self, batch: Batch) -> Tensor:
        inputs = self.tables(batch.ids, event_time_s=batch.event_time_s)
        with torch.autocast(
            self._device_type, dtype=self._dtype, enabled=self._dtype != torch.float32
        ):
            logits_B: Tensor = self.module(batch.dense, inputs[EMBEDDINGS], inputs.get(FIRST_ORDER))
        return logits_B.float()

    def _apply(self) -> None:
        if self._clip_norm is not None:
            self._scaler.unscale_(self._joint)
            clip_grad_norm_(self.module.parameters(), self._sparse, self._clip_norm)
        self._scaler.step(self._joint)
        self._scaler.update()
        self._joint.zero_grad()
        self.steps += 1

    @property
    def expires(self) -> bool:
        """Whether a table has rows that expire."""
        return any(spec.expiry is not None for spec in self.tables.tables.values())

    @property
    def rows(self) -> int:
        """Rows in all tables."""
        shard = self.tables.shard
        return sum(shard.size(table) for table in range(len(shard.specs)))

    @property
    def row_bytes(self) -> int:
        """Resident bytes of all tables."""
        return sum(stats.bytes_total for stats in self.tables.shard.stats())

    def rows_by_table(self) -> dict[str, int]:
        """Rows of each table, by name."""
        shard = self.tables.shard
        return {spec.name: shard.size(table) for table, spec in enumerate(shard.specs)}


def window_weight(batch: Batch) -> float:
    """What a batch weighs in a loss: its examples, or the sum of their weights."""
    return float(batch.labels.numel() if batch.weights is None else batch.weights.sum())


def _dense_optimizer(module: nn.Module, settings: DenseOptimizerSettings) -> torch.optim.Optimizer:
    kind = _OPTIMIZERS[settings.kind]
    on_cpu = all(parameter.is_cpu for parameter in module.parameters())
    return kind(
        module.parameters(),
        lr=as_rate(settings.lr, 0),
        weight_decay=settings.weight_decay,
        # torch has no fused Adagrad for CUDA in every version served.
        fused=True if on_cpu or settings.kind != "adagrad" else None,
    )  # type: ignore[call-arg]
