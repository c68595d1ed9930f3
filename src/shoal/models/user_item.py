"""A user and an item: histories that an item attends to (DIN, HSTU), and two towers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, silu

from shoal.errors import ConfigError
from shoal.ids import mix64
from shoal.models.mlp import MLP, Deep, Inputs, Widths
from shoal.models.tasks import InBatchSoftmax, Negatives, Objective, Pointwise, Task


def valid_steps(lengths_B: Tensor, length: int) -> Tensor:
    """Bool [B, L]: whether a step of a sequence is within its length."""
    return torch.arange(length, device=lengths_B.device) < lengths_B.unsqueeze(1)


class TargetAttention(nn.Module):
    """Weighs each step of a history by an MLP of (query, step, query - step, query * step).

    Args:
        width: of a query and of a step.
        hidden: widths of the MLP.
        normalise: softmax over the weights; the paper has none.
    """

    def __init__(self, width: int, hidden: tuple[int, ...], *, normalise: bool = False) -> None:
        super().__init__()
        self.score = MLP(4 * width, hidden, out_features=1)
        self._normalise = normalise

    def forward(self, query_BE: Tensor, steps_BLE: Tensor, lengths_B: Tensor) -> Tensor:
        """The weighted sum of the steps within each length, [B, E]; zeros without any."""
        query_BLE = query_BE.unsqueeze(1).expand_as(steps_BLE)
        pairs = [query_BLE, steps_BLE, query_BLE - steps_BLE, query_BLE * steps_BLE]
        scores_BL = self.score(torch.cat(pairs, dim=2)).squeeze(2)
        valid_BL = valid_steps(lengths_B, steps_BLE.shape[1])
        if self._normalise:
            lowest = torch.finfo(scores_BL.dtype).min
            scores_BL = scores_BL.masked_fill(~valid_BL, lowest).softmax(dim=1)
        scores_BL = scores_BL * valid_BL.to(scores_BL.dtype)
        return torch.einsum("bl,ble->be", scores_BL, steps_BLE)


Head = Literal["ctr", "next_item"]


class TargetHistory(nn.Module):
    """The S sequences of an example as one: steps [B, L, S * D], and targets [B, S * D].

    Sequences that a model takes together have one length in each example, and a target each.

    Args:
        inputs: widths and names.
        target: pooled features, one for each sequence, in order.

    Raises:
        ConfigError: no sequences, or not one target for each.
        UnknownName: a target that is no pooled feature.
    """

    def __init__(self, inputs: Inputs, target: tuple[str, ...]) -> None:
        super().__init__()
        if not inputs.sequences or len(target) != len(inputs.sequences):
            raise ConfigError(
                "model.target",
                got=list(target),
                allowed=f"one pooled feature for each sequence, {list(inputs.sequences)}",
                remedy="Set combiner: first_n of the features that are sequences, and name the "
                "target of each in their order.",
            )
        self._target = inputs.places(target)
        self.width = len(target) * inputs.dim

    def forward(self, embeddings_BFD: Tensor, sequences_BSLD: Tensor) -> tuple[Tensor, Tensor]:
        """(Targets [B, S * D], steps [B, L, S * D])."""
        target_BE = embeddings_BFD[:, self._target].flatten(1)
        return target_BE, sequences_BSLD.transpose(1, 2).flatten(2)


class HSTULayer(nn.Module):
    """One layer of HSTU (Zhai et al. 2024): pointwise attention, gated, with a residual.

    U, V, Q, K = SiLU(linear(norm(x))); A = SiLU(Q K^T + bias of distance) / L, within `allowed`;
    x' = x + linear(norm(A V) * U). There is no softmax, so that intensities are kept.

    Args:
        width: E of a step; a multiple of heads.
        heads: that attend apart.
        length: L, the longest sequence.
        dropout: of the gated output.

    Raises:
        ConfigError: heads that do not divide the width.
    """

    def __init__(self, width: int, heads: int, length: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        if width % heads:
            remedy = "Choose model.heads that divide model.width."
            raise ConfigError("heads of an HSTU layer", heads, f"a divisor of {width}", remedy)
        self._heads, self._length = heads, length
        self.norm = nn.LayerNorm(width)
        self.joint = nn.Linear(width, 4 * width, bias=False)
        self.distance = nn.Parameter(torch.empty(length).normal_(std=0.02))
        self.norm_out = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(width, width)

    def forward(self, steps_BLE: Tensor, distance_BLL: Tensor, allowed_BLL: Tensor) -> Tensor:
        """Steps [B, L, E] of steps, how far each is ahead of each other, and which it may see."""
        joint = silu(self.joint(self.norm(steps_BLE))).chunk(4, dim=2)
        gate_BLE, *three = joint
        shape = (*steps_BLE.shape[:2], self._heads, steps_BLE.shape[2] // self._heads)
        v, q, k = (x.reshape(shape).transpose(1, 2) for x in three)
        near_BLL = distance_BLL.clamp(0, self._length - 1)
        scores_BHLL = silu(q @ k.transpose(2, 3) + self.distance[near_BLL].unsqueeze(1))
        scores_BHLL = scores_BHLL * allowed_BLL.unsqueeze(1).to(scores_BHLL.dtype) / self._length
        seen_BLE = (scores_BHLL @ v).transpose(1, 2).flatten(2)
        out_BLE: Tensor = self.out(self.dropout(self.norm_out(seen_BLE) * gate_BLE))
        return steps_BLE + out_BLE


class HSTUEncoder(nn.Module):
    """Layers of HSTU over sequences of at most L steps; each step sees itself and those before.

    Args:
        width: of a step as it is given; E of the layers: another one is projected to.
        length: L.
        layers, heads, dropout: as `HSTULayer`.
    """

    def __init__(
        self, width: int, embedding: int, length: int, *, layers: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.token = nn.Linear(width, embedding) if width != embedding else nn.Identity()
        self.layers = nn.ModuleList(
            HSTULayer(embedding, heads, length, dropout=dropout) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(embedding)

    def forward(self, steps_BLX: Tensor, places_BL: Tensor, valid_BL: Tensor) -> Tensor:
        """Steps [B, L, E] of steps, their places in time, and which of them are there."""
        distance_BLL = places_BL.unsqueeze(2) - places_BL.unsqueeze(1)
        allowed_BLL = (distance_BLL >= 0) & valid_BL.unsqueeze(1)
        steps_BLE = self.token(steps_BLX)
        for layer in self.layers:
            steps_BLE = layer(steps_BLE, distance_BLL, allowed_BLL)
        normed_BLE: Tensor = self.norm(steps_BLE)
        return normed_BLE


class HSTU(nn.Module):
    """HSTU over an example's history, with a head for clicks or for the next item.

    `head` "ctr": the target is the history's next step, and an MLP reads what comes out at it, next
    to dense features and embeddings. "next_item": what comes out at the history's last step is the
    user, whose score with the target is a product, as of `InBatchScores`.

    Args:
        inputs: widths, names and sequences.
        target: as of `TargetHistory`.
        head: "ctr" or "next_item".
        width: E of the layers; None: that of a step.
        layers, heads, dropout: as `HSTUEncoder`.
        hidden: widths of the head of "ctr"; batch_norm: in it.
        in_batch: as of `TwoTower`.
        temperature, log_q: as `InBatchScores`.
    """

    def __init__(
        self,
        inputs: Widths,
        target: tuple[str, ...],
        *,
        head: Head = "ctr",
        width: int | None = None,
        layers: int = 2,
        heads: int = 1,
        hidden: tuple[int, ...] = (128, 64),
        dropout: float = 0.0,
        batch_norm: bool = False,
        in_batch: bool = True,
        temperature: float = 0.05,
        log_q: bool = False,
    ) -> None:
        super().__init__()
        self._inputs = Inputs(*inputs).require()
        self.history = TargetHistory(self._inputs, target)
        embedding = width or self.history.width
        self.encoder = HSTUEncoder(
            self.history.width,
            embedding,
            self._inputs.length + 1,
            layers=layers,
            heads=heads,
            dropout=dropout,
        )
        self.deep, self.scores = None, None
        if head == "ctr":
            read = self._inputs.width + embedding
            self.deep = MLP(read, hidden, out_features=1, dropout=dropout, batch_norm=batch_norm)
        else:
            self.scores = InBatchScores(temperature, log_q=log_q, pairs=in_batch)

    def forward(
        self,
        dense_B: Tensor | None,
        embeddings_BFD: Tensor,
        first_order_BF: Tensor | None,
        sequences_BSLD: Tensor,
        lengths_BS: Tensor,
        ids_B: Tensor | None = None,
        negatives: Negatives | None = None,
        *,
        vectors: bool = False,
    ) -> Tensor:
        """Logits [B]; of "next_item" in training scores as of `InBatchScores`.

        Embeddings of negatives, and empty sequences, follow those of the B examples.

        Args:
            vectors: of "next_item": give those of users and targets, as `vectors_of`.

        Raises:
            ShapeError: a shape differs.
        """
        target_BE, steps_BLE = self.history(embeddings_BFD, sequences_BSLD)
        lengths_B = lengths_BS[:, 0]
        if negatives is not None:
            size = len(embeddings_BFD) - negatives.size
            embeddings_BFD, steps_BLE = embeddings_BFD[:size], steps_BLE[:size]
            lengths_B = lengths_B[:size]
        self._inputs.check(dense_B, embeddings_BFD, first_order_BF)
        length = steps_BLE.shape[1]
        valid_BL = valid_steps(lengths_B, length)
        places_BL = torch.arange(length, device=lengths_B.device).expand_as(valid_BL)
        if self.scores is not None:
            out_BLE = self.encoder(steps_BLE, places_BL, valid_BL)
            last_B = (lengths_B - 1).clamp_min(0)
            user_BE = out_BLE[torch.arange(len(out_BLE), device=last_B.device), last_B]
            user_BE = user_BE * (lengths_B > 0).to(user_BE.dtype).unsqueeze(1)
            item_IE = self.encoder.token(target_BE)
            if vectors:
                return vectors_of(user_BE, item_IE)
            scores: Tensor = self.scores(user_BE, item_IE, ids_B, negatives)
            return scores
        assert self.deep is not None, "one of two heads"
        # Wherever the padding ends, the target's place is the one after the last step.
        out_BLE = self.encoder(
            torch.cat([steps_BLE, target_BE.unsqueeze(1)], dim=1),
            torch.cat([places_BL, lengths_B.unsqueeze(1)], dim=1),
            torch.cat([valid_BL, torch.ones_like(valid_BL[:, :1])], dim=1),
        )
        flat_BX = self._inputs.flatten(dense_B, embeddings_BFD)
        logits_B: Tensor = self.deep(torch.cat([flat_BX, out_BLE[:, -1]], dim=1)).squeeze(1)
        return logits_B if first_order_BF is None else logits_B + first_order_BF.sum(dim=1)


class ItemFrequency(nn.Module):
    """How often an item comes in a batch of a rank, learned from a stream (Yi et al. 2019).

    A moving average of the batches between two with the item, by hash; it says nothing of items it
    did not see. Batches of all ranks are of one stream.

    Args:
        slots: hashes, a power of two; items of one hash count as one.
        rate: of the moving average.

    Attributes:
        over_ranks: gives the sum of all ranks' values, in every forward of training; None: there
            is one rank.
        ranks: how many there are.
    """

    steps: Tensor
    last_H: Tensor
    gap_H: Tensor

    def __init__(self, slots: int = 1 << 16, rate: float = 0.01) -> None:
        super().__init__()
        self._rate = rate
        self.over_ranks: Callable[[Tensor], Tensor] | None = None
        self.ranks = 1
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last_H", torch.zeros(slots, dtype=torch.int64))
        self.register_buffer("gap_H", torch.zeros(slots))

    def seen(self, ids_B: Tensor) -> Tensor:
        """Count a batch; log of each item's chance to be in one, [B]."""
        slots_B = mix64(ids_B) & (len(self.gap_H) - 1)
        self.steps += 1
        if self.over_ranks is None:
            self.gap_H[slots_B] = self._mean_gap(
                self.gap_H[slots_B], (self.steps - self.last_H[slots_B]).to(self.gap_H.dtype)
            )
            self.last_H[slots_B] = self.steps
        else:  # All slots at once: which of them have items is not known on the host.
            marks_H = torch.zeros_like(self.gap_H)
            marks_H[slots_B] = 1.0
            ranks_H = self.over_ranks(marks_H)
            passed_H = (self.steps - self.last_H) * (self.ranks / ranks_H.clamp_min(1.0))
            # A mean gap of several batches counts as often as these.
            rate_H = 1.0 - (1.0 - self._rate) ** ranks_H
            new_H = self._mean_gap(self.gap_H, passed_H, rate_H)
            self.gap_H.copy_(torch.where(ranks_H > 0, new_H, self.gap_H))
            self.last_H.copy_(torch.where(ranks_H > 0, self.steps, self.last_H))
        return -self.gap_H[slots_B].clamp_min(1.0).log()

    def _mean_gap(self, old: Tensor, passed: Tensor, rate: Tensor | None = None) -> Tensor:
        moved = old + (self._rate if rate is None else rate) * (passed - old)
        return torch.where(old > 0, moved, passed)


def vectors_of(user_BE: Tensor, item_BE: Tensor) -> Tensor:
    """Vectors of users and items [2, B, E], of length 1, whose products rank items."""
    return normalize(torch.stack([user_BE, item_BE]), dim=2)


class InBatchScores(nn.Module):
    """Scores of users and items: in training of many pairs of a batch, else each user's own.

    Vectors are scaled to length 1. In training another item that is the example's own is left out,
    where ids are given.

    Args:
        temperature: that products are divided by.
        log_q: in training subtract the log of an item's chance to be in a batch, so that popular
            items, which are negatives more often, are not pushed down for it. From hard negatives
            that of the example's own item is subtracted: their difference keeps its meaning.
        pairs: in training score a user with all items of the batch.
    """

    def __init__(self, temperature: float, *, log_q: bool = False, pairs: bool = True) -> None:
        super().__init__()
        self._temperature, self._pairs = temperature, pairs
        self.frequency = ItemFrequency() if log_q else None

    def forward(
        self,
        user_BE: Tensor,
        item_IE: Tensor,
        ids_I: Tensor | None,
        negatives: Negatives | None = None,
    ) -> Tensor:
        """Scores [B], of the own items; in training with others' or sampled ones, too.

        With `pairs` [B, B + N + hard], own items on the diagonal; else, of N sampled items,
        [B, 1 + N + hard], own items first. Sampled ones have the log of their expected counts
        subtracted, so that the softmax's sum estimates that over all items; with `pairs` those that
        are in the batch are left out, as their scores are there.

        Args:
            user_BE: of examples.
            item_IE: of the items of examples, then of sampled and hard ones.
            ids_I: that identify them.
            negatives: what is known of those that follow the examples'.
        """
        user_BE, item_IE = normalize(user_BE, dim=1), normalize(item_IE, dim=1)
        pairs = self._pairs
        if negatives is None and not (self.training and pairs):  # exports take any batch: no len()
            return (user_BE * item_IE).sum(dim=1) / self._temperature
        size = len(user_BE)
        if not self.training:
            return (user_BE * item_IE[:size]).sum(dim=1) / self._temperature
        hard = 0 if negatives is None else negatives.hard_H.numel()
        first, end = 0 if pairs else size, len(item_IE) - hard
        scores_BI = (user_BE @ item_IE[first:end].T).float() / self._temperature
        lowest = torch.finfo(scores_BI.dtype).min
        none_BI = torch.zeros_like(scores_BI, dtype=torch.bool)
        logs_I = scores_BI.new_zeros(end)
        if ids_I is not None:
            none_BI |= ids_I[:size].unsqueeze(1) == ids_I[first:end]
            if pairs:
                none_BI[:, size:] |= none_BI[:, size:].any(dim=0)
            if self.frequency is not None:
                with torch.no_grad():
                    logs_I[:size] = self.frequency.seen(ids_I[:size])
        if negatives is not None:
            logs_I[size:] = negatives.log_counts_N
            known_BI = torch.zeros(size, end, dtype=torch.bool, device=none_BI.device)
            known_BI[negatives.known[:, 0], negatives.known[:, 1]] = True
            none_BI |= known_BI[:, first:]
        scores_BI = scores_BI - logs_I[first:]
        if pairs:
            none_BI.fill_diagonal_(False)
        scores_BI = scores_BI.masked_fill(none_BI, lowest)
        if negatives is None:
            return scores_BI
        if not pairs:
            own_B = (user_BE * item_IE[:size]).sum(dim=1).float() / self._temperature
            scores_BI = torch.cat([own_B.unsqueeze(1), scores_BI], dim=1)
        hard_H = negatives.hard_H
        scores_H = (user_BE[hard_H] * item_IE[end:]).sum(dim=1).float() / self._temperature
        scores_H = scores_H - logs_I[hard_H]
        number_H = torch.arange(hard, device=hard_H.device) - torch.searchsorted(hard_H, hard_H)
        hard_BM = scores_BI.new_full((size, negatives.most_hard), lowest)
        hard_BM = hard_BM.index_put((hard_H, number_H), scores_H)
        return torch.cat([scores_BI, hard_BM], dim=1)


class TwoTower(nn.Module):
    """An MLP of the user's features, one of the item's, and the product of what comes out.

    Args:
        inputs: widths and names.
        user, item: pooled features of each; dense features are the user's.
        hidden: widths of each tower; width: of their outputs.
        in_batch: in training score all pairs of a batch, not each user's own item (and sampled
            ones) alone.
        temperature, log_q: as `InBatchScores`.
        dropout, batch_norm: as `MLP`.

    Raises:
        ConfigError: a side without features.
        UnknownName: a feature that the inputs do not have.
    """

    def __init__(
        self,
        inputs: Widths,
        user: tuple[str, ...],
        item: tuple[str, ...],
        *,
        hidden: tuple[int, ...] = (128,),
        width: int = 32,
        in_batch: bool = True,
        temperature: float = 0.05,
        log_q: bool = False,
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self._inputs = Inputs(*inputs).require()
        if not user or not item:
            remedy = "Name the features of each tower."
            raise ConfigError("model.user and model.item", (user, item), "one each", remedy)
        self._user, self._item = self._inputs.places(user), self._inputs.places(item)
        dim, layers = self._inputs.dim, {"dropout": dropout, "batch_norm": batch_norm}
        user_width = self._inputs.num_dense + len(user) * dim
        self.user = MLP(user_width, hidden, out_features=width, **layers)  # type: ignore[arg-type]
        self.item = MLP(len(item) * dim, hidden, out_features=width, **layers)  # type: ignore[arg-type]
        self.scores = InBatchScores(temperature, log_q=log_q, pairs=in_batch)

    def forward(
        self,
        dense_B: Tensor | None,
        embeddings_BFD: Tensor,
        first_order_BF: Tensor | None = None,
        ids_B: Tensor | None = None,
        negatives: Negatives | None = None,
        *,
        vectors: bool = False,
    ) -> Tensor:
        """Logits [B]; in training, with in_batch or negatives, scores as of `InBatchScores`.

        Embeddings of negatives follow those of the B examples, as their ids do.

        Args:
            vectors: give those of users and items, as `vectors_of`.

        Raises:
            ShapeError: a shape differs.
        """
        own_BFD = embeddings_BFD
        if negatives is not None:
            own_BFD = embeddings_BFD[: len(embeddings_BFD) - negatives.size]
        self._inputs.check(dense_B, own_BFD, first_order_BF)
        user_BE = self.user(self._inputs.flatten(dense_B, own_BFD[:, self._user]))
        item_IE = self.item(embeddings_BFD[:, self._item].flatten(1))
        if vectors:
            return vectors_of(user_BE, item_IE)
        scores: Tensor = self.scores(user_BE, item_IE, ids_B, negatives)
        return scores


class DIN(nn.Module):
    """DIN (Zhou et al. 2018): an MLP over dense features, embeddings, and the attended history.

    Args:
        inputs: widths, names and sequences.
        target: as of `TargetHistory`.
        attention: widths of the attention's MLP; normalise: as of `TargetAttention`.
        hidden: widths of the deep part.
        dropout, batch_norm: as `MLP`.
    """

    def __init__(
        self,
        inputs: Widths,
        target: tuple[str, ...],
        *,
        attention: tuple[int, ...] = (80, 40),
        normalise: bool = False,
        hidden: tuple[int, ...] = (200, 80),
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self._inputs = Inputs(*inputs).require()
        self.history = TargetHistory(self._inputs, target)
        self.attention = TargetAttention(self.history.width, attention, normalise=normalise)
        width = self._inputs.width + self.history.width
        self.deep = MLP(width, hidden, out_features=1, dropout=dropout, batch_norm=batch_norm)

    def forward(
        self,
        dense_B: Tensor | None,
        embeddings_BFD: Tensor,
        first_order_BF: Tensor | None,
        sequences_BSLD: Tensor,
        lengths_BS: Tensor,
    ) -> Tensor:
        """Logits [B]; first-order weights [B, F], if any, are added.

        Raises:
            ShapeError: a shape differs.
        """
        self._inputs.check(dense_B, embeddings_BFD, first_order_BF)
        target_BE, steps_BLE = self.history(embeddings_BFD, sequences_BSLD)
        interest_BE = self.attention(target_BE, steps_BLE, lengths_BS[:, 0])
        flat_BX = self._inputs.flatten(dense_B, embeddings_BFD)
        logits_B: Tensor = self.deep(torch.cat([flat_BX, interest_BE], dim=1)).squeeze(1)
        return logits_B if first_order_BF is None else logits_B + first_order_BF.sum(dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DinSettings(Deep):
    """Attention of `target` over the sequences; `hidden` read it next to all other features."""

    kind: ClassVar[str] = "din"
    takes_sequences: ClassVar[bool] = True
    target: tuple[str, ...] = ()
    attention: tuple[int, ...] = (80, 40)
    normalise: bool = False
    hidden: tuple[int, ...] = (200, 80)

    def build(self, inputs: Inputs) -> nn.Module:
        """A `DIN`."""
        return DIN(
            inputs,
            self.target,
            attention=self.attention,
            normalise=self.normalise,
            hidden=self.hidden,
            **self.layers,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HstuSettings(Deep):
    """HSTU over the sequences, whose `target` it predicts; `hidden` are the head of "ctr".

    `loss` of "next_item" is as of two towers; the first target identifies items.
    """

    kind: ClassVar[str] = "hstu"
    takes_sequences: ClassVar[bool] = True
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {
        **Deep.limits,
        "temperature": (1e-4, 1e4),
    }
    target: tuple[str, ...] = ()
    head: Head = "ctr"
    width: int | None = None
    blocks: int = 2
    heads: int = 1
    loss: Literal["softmax", "sampled"] = "softmax"
    temperature: float = 0.05
    log_q: bool = False

    def build(self, inputs: Inputs) -> nn.Module:
        """An `HSTU`."""
        return HSTU(
            inputs,
            self.target,
            head=self.head,
            width=self.width,
            layers=self.blocks,
            heads=self.heads,
            hidden=self.hidden,
            in_batch=self.loss == "softmax",
            temperature=self.temperature,
            log_q=self.log_q,
            **self.layers,
        )

    def objective(self, tasks: tuple[Task, ...]) -> Objective:
        """Of clicks a loss each, of next items a softmax over items."""
        if self.head == "ctr":
            return Pointwise(tasks)
        return InBatchSoftmax(own_first=self.loss == "sampled")

    def check_negatives(self, features: Sequence[str] | None) -> None:
        """Needed by "sampled", not taken by "ctr"; with all features of an item."""
        if self.head == "ctr":
            super(HstuSettings, self).check_negatives(features)
        else:
            _check_negatives(features, self.item_features, self.loss, self.log_q)

    @property
    def item_features(self) -> tuple[str, ...]:
        """The targets, for next items."""
        return self.target if self.head == "next_item" else ()

    @property
    def id_feature(self) -> str | None:
        """The first target, for a softmax over items."""
        return self.target[0] if self.head == "next_item" and self.target else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoTowerSettings(Deep):
    """Towers of `user` and `item` features; "softmax" over the items of a batch, or "log_loss".

    "sampled" is a softmax over the own item and those of `data.sampler`; "softmax" adds these, if
    there are any, to the items of the batch. `item_id` is the feature whose ids
    identify items; None: the first of `item`.
    """

    kind: ClassVar[str] = "two_tower"
    limits: ClassVar[Mapping[str, tuple[float, float]]] = HstuSettings.limits
    user: tuple[str, ...] = ()
    item: tuple[str, ...] = ()
    item_id: str | None = None
    hidden: tuple[int, ...] = (128,)
    width: int = 32
    loss: Literal["softmax", "sampled", "log_loss"] = "softmax"
    temperature: float = 0.05
    log_q: bool = False

    def build(self, inputs: Inputs) -> nn.Module:
        """A `TwoTower`."""
        return TwoTower(
            inputs,
            self.user,
            self.item,
            hidden=self.hidden,
            width=self.width,
            in_batch=self.loss == "softmax",
            temperature=self.temperature,
            log_q=self.log_q,
            **self.layers,
        )

    def objective(self, tasks: tuple[Task, ...]) -> Objective:
        """A softmax over items, or a loss each."""
        if self.loss == "log_loss":
            return Pointwise(tasks)
        return InBatchSoftmax(own_first=self.loss == "sampled")

    def check_negatives(self, features: Sequence[str] | None) -> None:
        """Needed by "sampled", not taken by "log_loss"; with all features of an item."""
        if self.loss == "log_loss":
            super(TwoTowerSettings, self).check_negatives(features)
        else:
            _check_negatives(features, self.item_features, self.loss, self.log_q)

    @property
    def id_feature(self) -> str | None:
        """The feature whose ids identify items, for a softmax over them."""
        return None if self.loss == "log_loss" else next(iter(self.item_features), None)

    @property
    def item_features(self) -> tuple[str, ...]:
        """The item's, that of its ids first."""
        own = () if self.item_id is None else (self.item_id,)
        return tuple(dict.fromkeys((*own, *self.item)))


def _check_negatives(
    features: Sequence[str] | None, needed: Sequence[str], loss: str, log_q: bool
) -> None:
    """Check features of sampled items, the first of both identifying them.

    Raises:
        ConfigError: they are missing for `loss`, or lack some.
    """
    if loss == "sampled" and (features is None or log_q):
        got = "no data.sampler" if features is None else "log_q: true"
        allowed = "items to sample, and log_q: false: it is of the items of a batch"
        remedy = "Set data.sampler, or model.loss: softmax."
        raise ConfigError("model.loss: sampled", got, allowed, remedy)
    if features is not None and ([*features[:1]] != [*needed[:1]] or {*needed} - {*features}):
        got = f"id {features[0]!r}, attributes {list(features[1:])}"
        allowed = f"{list(needed)}, the first as id, the others among the attributes"
        raise ConfigError("data.sampler", got, allowed, "Name them.")
