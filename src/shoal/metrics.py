"""How good predictions are: AUC, grouped AUC, log loss, NE, calibration; and ranks of items.

Predictions are probabilities, labels are 0 or 1, weights (default 1) are not negative; all are
[B]. A figure that its data does not define, such as an AUC of one class, is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from shoal.address import check_dense, check_int64
from shoal.errors import ConfigError, DTypeError, InputError, ShapeError, all_of_kind, of_kind

__all__ = [
    "BinaryMetrics",
    "BinaryResult",
    "CalibrationBin",
    "GroupedAuc",
    "auc",
    "calibration",
    "calibration_bins",
    "grouped_auc",
    "item_ranks",
    "log_loss",
    "normalized_entropy",
    "ranking_figures",
]

_CPU = torch.device("cpu")
HISTOGRAM_BUCKETS = 4096
# sigmoid(-16) is 1e-7, the least float32 tells from 0 next to 1
HISTOGRAM_LOGIT_LIMIT = 16.0
NOT_FOUND = 1 << 62
"""The rank of an item that is not among those that were ranked."""


@dataclass(frozen=True, slots=True)
class CalibrationBin:
    """Examples predicted in (lower, upper] (the first bin has 0 too); NaN means when empty."""

    lower: float
    upper: float
    weight: float
    mean_prediction: float
    mean_label: float


@dataclass(frozen=True, slots=True)
class BinaryResult:
    """Figures of all examples seen.

    Args:
        examples: number of examples; weight: sum of their weights.
        auc: area under the ROC curve; ties count half.
        log_loss: mean of -log(probability of the label), in nats.
        normalized_entropy: log loss over the entropy of the base rate; below 1 beats guessing it.
        calibration: mean prediction over mean label.
        mean_prediction, mean_label: weighted means.
        bins: calibration by predicted probability.
        grouped: AUC by group, of examples that had one; None where none had.
        ranking: of examples' items among all known ones, by name; None where they were not ranked.
    """

    examples: int
    weight: float
    auc: float
    log_loss: float
    normalized_entropy: float
    calibration: float
    mean_prediction: float
    mean_label: float
    bins: tuple[CalibrationBin, ...]
    grouped: GroupedAuc | None = None
    ranking: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class GroupedAuc:
    """Mean of the groups' AUCs, weighted by each group's weight.

    Args:
        auc: NaN without a scored group.
        groups: groups with both classes; skipped: groups of one class, which have no AUC.
    """

    auc: float
    groups: int
    skipped: int


class BinaryMetrics:
    """Gathers predictions batch by batch.

    Sums are float64 on the CPU. Not for several threads at once.

    Args:
        exact_auc: keep every score (9 bytes an example, 13 once weights are given) and sort them
            in `compute`; else `auc` is that of a histogram, as `running_auc`.
        bins: number of equally wide calibration bins.

    Raises:
        ConfigError: bins below 1.
    """

    def __init__(self, *, exact_auc: bool = True, bins: int = 10) -> None:
        if of_kind("bins", bins, Integral) < 1:
            allowed = "1 or more"
            raise ConfigError("bins", got=bins, allowed=allowed, remedy="Use 10.")
        self._exact_auc = exact_auc
        self._bins = bins
        self.reset()

    def reset(self) -> None:
        """Forget all examples."""
        self._examples = 0
        # rows: weight, weighted prediction, weighted label, weighted loss
        self._sums = torch.zeros(4, self._bins, dtype=torch.float64, device="cpu")
        self._histogram = torch.zeros(2, HISTOGRAM_BUCKETS, dtype=torch.float64, device="cpu")
        self._kept: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self._groups: list[Tensor] = []

    def update(
        self,
        predictions_B: Tensor,
        labels_B: Tensor,
        weights_B: Tensor | None = None,
        groups_B: Tensor | None = None,
    ) -> float:
        """Add a batch, on any device (waits for it); nothing changes when it raises.

        groups_B: int64 [B], for the AUC by group; with all batches or none, and exact AUC.

        Returns:
            the sum of its examples' log losses, weighted.

        Raises:
            ShapeError: not [B], or sizes that differ.
            InputError: a prediction that is NaN or outside 0..1, a label other than 0 and 1, a
                weight that is negative or not finite.
        """
        # A GPU has no weighted `bincount` of a fixed order, and exact AUC sorts on the host.
        stays = weights_B is None and not self._exact_auc and isinstance(predictions_B, Tensor)
        device = predictions_B.device if stays and predictions_B.is_cuda else _CPU
        scores_B, labels_B, weights_B = _checked(predictions_B, labels_B, weights_B, device)
        sums = _bin_sums(scores_B, labels_B, weights_B, self._bins).cpu()
        self._examples += scores_B.numel()
        self._sums += sums
        self._histogram += _histogram_of(scores_B, labels_B, weights_B).cpu()
        if self._exact_auc:
            self._kept.append((scores_B, labels_B, weights_B))
            if groups_B is not None:
                self._groups.append(groups_B.detach().cpu())
        return float(sums[3].sum())

    def merge(self, other: BinaryMetrics) -> None:
        """Add what another accumulator of the same settings has seen.

        Raises:
            ConfigError: other settings.
        """
        mine, theirs = (self._exact_auc, self._bins), (other._exact_auc, other._bins)
        if mine != theirs:
            what, remedy = "(exact_auc, bins) to merge", "Build both alike."
            raise ConfigError(what, got=theirs, allowed=mine, remedy=remedy)
        self._examples += other._examples
        self._sums += other._sums
        self._histogram += other._histogram
        self._kept += other._kept
        self._groups += other._groups

    def totals(self) -> Tensor:
        """All sums as float64 numbers on the CPU, which may be added up over ranks."""
        examples = torch.tensor([self._examples], dtype=torch.float64, device="cpu")
        return torch.cat([examples, self._sums.flatten(), self._histogram.flatten()])

    @classmethod
    def of_totals(cls, totals: Tensor, *, bins: int = 10) -> BinaryMetrics:
        """From added-up `totals` of accumulators with as many bins; without exact AUC."""
        made = cls(exact_auc=False, bins=bins)
        made._examples = int(totals[0])
        made._sums = totals[1 : 1 + 4 * bins].reshape(4, bins).clone()
        made._histogram = totals[1 + 4 * bins :].reshape(2, HISTOGRAM_BUCKETS).clone()
        return made

    def running_auc(self) -> float:
        """AUC of the examples so far from a histogram of 4096 buckets: cheap enough for each step.

        Buckets are equally wide in the logit, so rare events are separated as well as common
        ones; scores of one bucket count as ties.
        """
        below_K = self._histogram.cumsum(1) - self._histogram
        negatives, positives = self._histogram
        wins = (positives * (below_K[0] + negatives / 2)).sum()
        return _ratio(float(wins), float(positives.sum() * negatives.sum()))

    def compute(self) -> BinaryResult:
        """Figures of all examples so far.

        Raises:
            InputError: no examples.
        """
        if self._examples == 0:
            remedy = "Call update first; is the data empty?"
            raise InputError("examples", got=0, allowed="1 or more", remedy=remedy)
        weight, prediction, label, loss = self._sums.sum(1).tolist()
        mean_loss, mean_label = _ratio(loss, weight), _ratio(label, weight)
        return BinaryResult(
            examples=self._examples,
            weight=weight,
            auc=_auc_of(*self._every()) if self._exact_auc else self.running_auc(),
            log_loss=mean_loss,
            normalized_entropy=_ratio(mean_loss, _entropy(mean_label)),
            calibration=_ratio(prediction, label),
            mean_prediction=_ratio(prediction, weight),
            mean_label=mean_label,
            bins=_bins_of(self._sums),
            grouped=self._kept_groups() if self._groups else None,
        )

    def _kept_groups(self) -> GroupedAuc:
        scores, labels, weights = self._every()
        return grouped_auc(scores, labels, torch.cat(self._groups), weights)

    def _every(self) -> tuple[Tensor, Tensor, Tensor | None]:
        scores, labels, weights = zip(*self._kept, strict=True)
        return torch.cat(scores), torch.cat(labels), _joined_weights(scores, weights)


def auc(predictions_B: Tensor, labels_B: Tensor, weights_B: Tensor | None = None) -> float:
    """Area under the ROC curve: how often a positive outranks a negative, ties counting half.

    Exact, by sorting. NaN unless both classes are there. Raises as `BinaryMetrics.update`.
    """
    return _auc_of(*_checked(predictions_B, labels_B, weights_B))


def grouped_auc(
    predictions_B: Tensor, labels_B: Tensor, groups_B: Tensor, weights_B: Tensor | None = None
) -> GroupedAuc:
    """AUC inside each group (a user, say), averaged by the groups' weights.

    groups_B: int64 [B]. Groups of one class are skipped and counted. Raises as
    `BinaryMetrics.update`.
    """
    scores_B, labels_B, weights_B = _checked(predictions_B, labels_B, weights_B)
    if of_kind("groups", groups_B, Tensor).shape != scores_B.shape:
        raise _shape_error("groups", groups_B, scores_B)
    if groups_B.is_floating_point():
        got, remedy = groups_B.dtype, "Number the groups."
        raise DTypeError("dtype of groups", got=got, allowed="int64", remedy=remedy)
    _, inverse_B = torch.unique(groups_B.detach().cpu(), return_inverse=True)
    wins_G, pairs_G, weight_G = _pairs_by_group(scores_B, labels_B, weights_B, inverse_B)
    scored_G = pairs_G > 0
    aucs_G, weight_G = wins_G[scored_G] / pairs_G[scored_G], weight_G[scored_G]
    mean = _ratio(float((aucs_G * weight_G).sum()), float(weight_G.sum()))
    groups = int(scored_G.sum())
    return GroupedAuc(auc=mean, groups=groups, skipped=scored_G.numel() - groups)


def item_ranks(scores_BI: Tensor, own_B: Tensor) -> Tensor:
    """Rank of each user's own item among all items, from 1; int64 [B].

    An item with the same score is ahead of it, and so is one with NaN: a model that does
    not distinguish items gains nothing.

    Args:
        scores_BI: larger is better; on any device.
        own_B: int64 [B], the column of the own item; -1: it is none of them, `NOT_FOUND`.

    Raises:
        DTypeError: not dense tensors, or columns that are not int64.
        ShapeError: not [B, I] and [B].
        InputError: a column that is not there.
    """
    check_dense("scores", scores_BI)
    check_int64("columns of own items", own_B)
    if scores_BI.ndim != 2 or own_B.shape != scores_BI.shape[:1]:
        got, remedy = (tuple(scores_BI.shape), tuple(own_B.shape)), "Pass one own item a user."
        raise ShapeError("scores and own items", got=got, allowed="[B, I] and [B]", remedy=remedy)
    fine_B = (own_B >= -1) & (own_B < scores_BI.shape[1])
    _require("columns of own items", own_B, fine_B, "-1 or a column", "Use -1 for none.")
    own_B1 = own_B.clamp_min(0).unsqueeze(1)
    rank_B = scores_BI.shape[1] - (scores_BI < scores_BI.gather(1, own_B1)).sum(dim=1)
    return torch.where(own_B < 0, torch.full_like(rank_B, NOT_FOUND), rank_B)


def ranking_figures(ranks_N: Tensor, ks: Sequence[int]) -> dict[str, float]:
    """How often an item ranks up to k, and its normalised gain, by "hit_rate@k" and "ndcg@k".

    With one item that is right for each user, hit rate is recall, and NDCG (Jarvelin, Kekalainen
    2002) is the mean of 1 / log2(1 + rank) up to k. NaN without any.

    Args:
        ranks_N: int64 [N], from 1, as of `item_ranks`.
        ks: 1 or more each.

    Raises:
        DTypeError: ranks that are no dense tensor.
    """
    check_dense("ranks", ranks_N)
    rank_N = ranks_N.double()
    figures = {}
    for k in all_of_kind("ks", ks, Integral):
        hit_N = (rank_N <= k).double()
        figures[f"hit_rate@{k}"] = float(hit_N.mean())
        figures[f"ndcg@{k}"] = float((hit_N / torch.log2(1 + rank_N)).mean())
    return figures


def log_loss(predictions_B: Tensor, labels_B: Tensor, weights_B: Tensor | None = None) -> float:
    """Mean of -log(probability of the label), in nats.

    Probabilities are kept float32's epsilon away from 0 and 1. Raises as `BinaryMetrics.update`.
    """
    return _figures(predictions_B, labels_B, weights_B).log_loss


def normalized_entropy(
    predictions_B: Tensor, labels_B: Tensor, weights_B: Tensor | None = None
) -> float:
    """Log loss over the entropy of the base rate (He et al. 2014); below 1 beats guessing it.

    NaN unless both classes are there. Raises as `BinaryMetrics.update`.
    """
    return _figures(predictions_B, labels_B, weights_B).normalized_entropy


def calibration(predictions_B: Tensor, labels_B: Tensor, weights_B: Tensor | None = None) -> float:
    """Mean prediction over mean label; NaN without positives. Raises as `BinaryMetrics.update`."""
    return _figures(predictions_B, labels_B, weights_B).calibration


def calibration_bins(
    predictions_B: Tensor, labels_B: Tensor, weights_B: Tensor | None = None, *, bins: int = 10
) -> tuple[CalibrationBin, ...]:
    """Mean prediction and mean label by equally wide bins of the prediction.

    Raises as `BinaryMetrics` and its `update`.
    """
    return _figures(predictions_B, labels_B, weights_B, bins=bins).bins


def _figures(
    predictions_B: Tensor, labels_B: Tensor, weights_B: Tensor | None, *, bins: int = 10
) -> BinaryResult:
    metrics = BinaryMetrics(exact_auc=False, bins=bins)
    metrics.update(predictions_B, labels_B, weights_B)
    return metrics.compute()


def _checked(
    predictions_B: Tensor, labels_B: Tensor, weights_B: Tensor | None, device: torch.device = _CPU
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Scores float32, labels bool and weights float32, on a device, out of the caller's hands."""
    for tensor in (predictions_B, labels_B, predictions_B if weights_B is None else weights_B):
        check_dense("predictions, labels or weights", tensor)
    if predictions_B.ndim != 1:
        got, remedy = tuple(predictions_B.shape), "Call .flatten()."
        raise ShapeError("shape of predictions", got=got, allowed="[B]", remedy=remedy)
    if labels_B.shape != predictions_B.shape:
        raise _shape_error("labels", labels_B, predictions_B)
    if weights_B is not None and weights_B.shape != predictions_B.shape:
        raise _shape_error("weights", weights_B, predictions_B)
    scores_B = predictions_B.detach().to(device, torch.float32, copy=True)
    is_nan = bool(scores_B.isnan().any())
    remedy = "Look for NaN in inputs and weights of the model." if is_nan else "Use a sigmoid."
    _require("predictions", scores_B, (scores_B >= 0) & (scores_B <= 1), "0..1", remedy)
    marks_B = labels_B.detach().to(device)
    _require("labels", marks_B, (marks_B == 0) | (marks_B == 1), "0 or 1", "Threshold them.")
    if weights_B is None:
        return scores_B, marks_B == 1, None
    loads_B = weights_B.detach().to(device, torch.float32, copy=True)
    fine_B = (loads_B >= 0) & loads_B.isfinite()
    _require("weights", loads_B, fine_B, "finite, 0 or more", "Leave bad examples out.")
    return scores_B, marks_B == 1, loads_B


def _require(what: str, values_B: Tensor, fine_B: Tensor, allowed: str, remedy: str) -> None:
    if bool(fine_B.all()):
        return
    at = int((~fine_B).nonzero()[0])
    got = f"{float(values_B[at])} at {at}"
    raise InputError(what, got=got, allowed=allowed, remedy=remedy)


def _shape_error(what: str, tensor: Tensor, predictions_B: Tensor) -> ShapeError:
    got, allowed = tuple(tensor.shape), f"{tuple(predictions_B.shape)}, as the predictions"
    remedy = "Give one per prediction."
    return ShapeError(f"shape of {what}", got=got, allowed=allowed, remedy=remedy)


def _auc_of(scores_B: Tensor, labels_B: Tensor, weights_B: Tensor | None) -> float:
    group_B = torch.zeros(scores_B.numel(), dtype=torch.int64, device="cpu")
    wins_G, pairs_G, _ = _pairs_by_group(scores_B, labels_B, weights_B, group_B)
    return _ratio(float(wins_G.sum()), float(pairs_G.sum()))


def _pairs_by_group(
    scores_B: Tensor, labels_B: Tensor, weights_B: Tensor | None, group_B: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Per group [G]: weight of pairs won (ties half), of all pairs, and of its examples."""
    by_score_B = scores_B.argsort(stable=True)
    order_B = by_score_B[group_B[by_score_B].argsort(stable=True)]
    scores_B, labels_B, group_B = scores_B[order_B], labels_B[order_B], group_B[order_B]
    load_B = torch.ones_like(scores_B) if weights_B is None else weights_B[order_B]
    load_2B = torch.stack([load_B * ~labels_B, load_B * labels_B]).double()
    starts_B = torch.ones_like(labels_B)
    starts_B[1:] = (scores_B.diff() != 0) | (group_B.diff() != 0)
    tie_B = starts_B.cumsum(0) - 1
    ties = int(tie_B[-1]) + 1 if tie_B.numel() else 0
    load_2T = torch.zeros(2, ties, dtype=torch.float64, device="cpu").index_add(1, tie_B, load_2B)
    group_T = group_B[starts_B]
    groups = int(group_B[-1]) + 1 if group_B.numel() else 0
    load_2G = torch.zeros(2, groups, dtype=torch.float64, device="cpu").index_add(
        1, group_T, load_2T
    )
    before_G = load_2G[0].cumsum(0) - load_2G[0]
    below_T = load_2T[0].cumsum(0) - load_2T[0] - before_G[group_T]
    wins_T = load_2T[1] * (below_T + load_2T[0] / 2)
    wins_G = torch.zeros(groups, dtype=torch.float64, device="cpu").index_add(0, group_T, wins_T)
    return wins_G, load_2G[0] * load_2G[1], load_2G.sum(0)


def _joined_weights(scores: Sequence[Tensor], weights: Sequence[Tensor | None]) -> Tensor | None:
    if all(load_B is None for load_B in weights):
        return None
    pairs = zip(scores, weights, strict=True)
    return torch.cat([torch.ones_like(s) if load is None else load for s, load in pairs])


def _bin_sums(scores_B: Tensor, labels_B: Tensor, weights_B: Tensor | None, bins: int) -> Tensor:
    """Per bin: weight, weighted prediction, weighted label, weighted loss; [4, bins]."""
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64, device=scores_B.device)[1:-1]
    p_B, y_B = scores_B.double(), labels_B.double()
    w_B = torch.ones_like(p_B) if weights_B is None else weights_B.double()
    tiny = torch.finfo(torch.float32).eps
    loss_B = -torch.where(labels_B, p_B, 1 - p_B).clamp(tiny, 1 - tiny).log()
    bin_B = torch.bucketize(p_B, edges)
    rows = (w_B, w_B * p_B, w_B * y_B, w_B * loss_B)
    if scores_B.is_cuda:
        is_in_KB = bin_B == torch.arange(bins, device=bin_B.device)[:, None]
        return torch.stack([torch.where(is_in_KB, row_B, 0.0).sum(1) for row_B in rows])
    return torch.stack([torch.bincount(bin_B, row_B, minlength=bins) for row_B in rows])


def _histogram_of(scores_B: Tensor, labels_B: Tensor, weights_B: Tensor | None) -> Tensor:
    logits_B = scores_B.logit().clamp(-HISTOGRAM_LOGIT_LIMIT, HISTOGRAM_LOGIT_LIMIT)
    scale = (HISTOGRAM_BUCKETS - 1) / (2 * HISTOGRAM_LOGIT_LIMIT)
    bucket_B = ((logits_B + HISTOGRAM_LOGIT_LIMIT) * scale).round().long()
    flat = torch.bincount(
        bucket_B + labels_B * HISTOGRAM_BUCKETS,
        None if weights_B is None else weights_B.double(),
        minlength=2 * HISTOGRAM_BUCKETS,
    )
    return flat.double().view(2, HISTOGRAM_BUCKETS)


def _bins_of(sums: Tensor) -> tuple[CalibrationBin, ...]:
    count = sums.shape[1]
    edges = torch.linspace(0, 1, count + 1, dtype=torch.float64, device="cpu").tolist()
    columns = zip(edges[:-1], edges[1:], *sums[:3].tolist(), strict=True)
    return tuple(
        CalibrationBin(lower, upper, weight, _ratio(prediction, weight), _ratio(label, weight))
        for lower, upper, weight, prediction, label in columns
    )


def _entropy(rate: float) -> float:
    if not 0 < rate < 1:
        return math.nan
    return -rate * math.log(rate) - (1 - rate) * math.log1p(-rate)


def _ratio(top: float, bottom: float) -> float:
    return top / bottom if bottom else math.nan
