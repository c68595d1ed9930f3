from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal import metrics
from shoal.errors import ConfigError, DTypeError, InputError, ShapeError
from shoal.metrics import BinaryMetrics

EXAMPLES = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]),
        st.booleans(),
        st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        st.integers(0, 2),
    ),
    max_size=30,
)


def columns(
    examples: list[tuple[float, bool, float, int]],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.tensor([e[0] for e in examples]),
        torch.tensor([e[1] for e in examples], dtype=torch.int64),
        torch.tensor([e[2] for e in examples]),
        torch.tensor([e[3] for e in examples], dtype=torch.int64),
    )


def pair_count(examples: list[tuple[float, bool, float, int]]) -> float:
    """AUC by its definition: over all pairs of a positive and a negative."""
    won = total = 0.0
    for score, label, weight, _ in examples:
        for other, other_label, other_weight, _ in examples:
            if label and not other_label:
                pair = weight * other_weight
                total += pair
                won += pair * (1.0 if score > other else 0.5 if score == other else 0.0)
    return won / total if total else math.nan


def same(got: float, want: float, tolerance: float = 1e-12) -> bool:
    return (math.isnan(got) and math.isnan(want)) or abs(got - want) <= tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_do_not_depend_on_the_device(weighted: bool) -> None:
    scores, labels = torch.rand(5000), torch.randint(0, 2, (5000,))
    weights = torch.rand(5000) if weighted else None
    found = []
    for device in ("cpu", "cuda"):
        own = BinaryMetrics(exact_auc=False)
        on = [part if part is None else part.to(device) for part in (scores, labels, weights)]
        found.append((own.update(*on), *own.totals().tolist()))
    assert found[0] == pytest.approx(found[1], rel=1e-9)


def test_an_update_returns_the_losses_of_its_examples() -> None:
    sums = BinaryMetrics()
    sums.update(torch.tensor([0.5]), torch.tensor([1]))
    scores, labels = torch.tensor([0.2, 0.9]), torch.tensor([0, 1])
    found = sums.update(scores, labels, torch.tensor([3.0, 1.0]))
    assert found == pytest.approx(-3 * math.log(0.8) - math.log(0.9), rel=1e-6)


def test_auc_by_hand() -> None:
    # scikit-learn's own example: three of four pairs are in order
    scores, labels = torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1])
    assert metrics.auc(scores, labels) == 0.75
    assert metrics.auc(scores.flip(0), labels) == 0.25
    assert metrics.auc(torch.full((4,), 0.3), labels) == 0.5


@given(EXAMPLES)
def test_auc_is_the_pair_count(examples: list[tuple[float, bool, float, int]]) -> None:
    scores, labels, weights, _ = columns(examples)
    assert same(metrics.auc(scores, labels, weights), pair_count(examples))
    unweighted = [(score, label, 1.0, group) for score, label, _, group in examples]
    assert same(metrics.auc(scores, labels), pair_count(unweighted))


@given(EXAMPLES)
def test_grouped_auc_averages_groups_by_weight(
    examples: list[tuple[float, bool, float, int]],
) -> None:
    scores, labels, weights, groups = columns(examples)
    got = metrics.grouped_auc(scores, labels, groups, weights)
    parts = [[e for e in examples if e[3] == group] for group in {e[3] for e in examples}]
    scored = [(pair_count(part), sum(e[2] for e in part)) for part in parts]
    scored = [(auc, weight) for auc, weight in scored if not math.isnan(auc)]
    weight = sum(weight for _, weight in scored)
    want = sum(auc * weight for auc, weight in scored) / weight if scored else math.nan
    assert same(got.auc, want)
    assert (got.groups, got.skipped) == (len(scored), len(parts) - len(scored))


def test_grouped_auc_by_hand() -> None:
    scores = torch.tensor([0.9, 0.1, 0.2, 0.3, 0.4, 0.7])
    labels = torch.tensor([1, 0, 1, 0, 0, 1])
    groups = torch.tensor([5, 5, -8, -8, -8, 6])
    # group 5 is right, group -8 wrong, group 6 has one class
    assert metrics.grouped_auc(scores, labels, groups) == metrics.GroupedAuc(2 / 5, 2, 1)


def test_log_loss_by_hand() -> None:
    # scikit-learn's own example
    scores, labels = torch.tensor([0.1, 0.9, 0.8, 0.35]), torch.tensor([0, 1, 1, 1]).flip(0)
    want = -(math.log(0.1) + math.log(0.9) + math.log(0.8) + math.log(0.65)) / 4
    assert metrics.log_loss(scores, labels) == pytest.approx(want, rel=1e-6)


def test_log_loss_of_a_sure_miss_is_finite() -> None:
    want = -math.log(torch.finfo(torch.float32).eps)
    assert metrics.log_loss(torch.tensor([1.0]), torch.tensor([0])) == pytest.approx(want)


def test_guessing_the_base_rate_has_normalized_entropy_one() -> None:
    labels = torch.tensor([1, 0, 0, 0])
    rate = torch.full((4,), 0.25)
    assert metrics.normalized_entropy(rate, labels) == pytest.approx(1.0)
    weights = torch.tensor([3.0, 1.0, 0.0, 0.0])
    assert metrics.normalized_entropy(rate + 0.5, labels, weights) == pytest.approx(1.0)
    better = torch.tensor([0.5, 0.25, 0.25, 0.25])
    want = (math.log(2) - 3 * math.log(0.75)) / -(math.log(0.25) + 3 * math.log(0.75))
    assert metrics.normalized_entropy(better, labels) == pytest.approx(want)


def test_calibration_is_predicted_over_observed() -> None:
    scores, labels = torch.tensor([0.5, 0.25]), torch.tensor([1, 0])
    assert metrics.calibration(scores, labels) == 0.75
    assert metrics.calibration(scores, labels, torch.tensor([1.0, 3.0])) == 1.25


def test_calibration_bins() -> None:
    scores = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])
    labels = torch.tensor([0, 1, 0, 1, 1])
    low, high = metrics.calibration_bins(scores, labels, bins=2)
    assert low == metrics.CalibrationBin(0.0, 0.5, 3.0, 0.25, 1 / 3)
    assert high == metrics.CalibrationBin(0.5, 1.0, 2.0, 0.875, 1.0)
    empty = metrics.calibration_bins(scores[:1], labels[:1], bins=2)[1]
    assert empty.weight == 0
    assert math.isnan(empty.mean_prediction)


def test_one_class_leaves_figures_undefined() -> None:
    metric = BinaryMetrics()
    metric.update(torch.tensor([0.2, 0.4]), torch.tensor([0, 0]))
    result = metric.compute()
    assert math.isnan(result.auc)
    assert math.isnan(result.normalized_entropy)
    assert math.isnan(result.calibration)
    assert result.log_loss > 0
    assert math.isnan(metric.running_auc())


def random_batch(size: int, *, scale: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(size, generator=generator) * scale - 3
    labels = torch.bernoulli(logits.sigmoid(), generator=generator)
    return logits.sigmoid(), labels, torch.rand(size, generator=generator)


@pytest.mark.parametrize("exact_auc", [True, False])
def test_batches_merges_and_the_whole_agree(exact_auc: bool) -> None:
    scores, labels, weights = random_batch(1000)
    groups = torch.arange(1000) // 7 % 30
    whole = BinaryMetrics(exact_auc=exact_auc)
    whole.update(scores, labels, weights, groups)
    parts = [BinaryMetrics(exact_auc=exact_auc) for _ in range(2)]
    for part, span in zip(
        (0, 1, 0), (slice(0, 100), slice(100, 100), slice(100, 1000)), strict=True
    ):
        parts[part].update(scores[span], labels[span], weights[span], groups[span])
    parts[1].merge(parts[0])
    got, want = parts[1].compute(), whole.compute()
    assert got.examples == want.examples == 1000
    for field in dataclasses.fields(got):
        if field.name not in ("bins", "grouped", "ranking"):
            assert getattr(got, field.name) == pytest.approx(getattr(want, field.name), rel=1e-9)
    by_group = metrics.grouped_auc(scores, labels, groups, weights) if exact_auc else None
    assert want.grouped == by_group
    if by_group is not None:
        assert got.grouped is not None
        assert got.grouped.auc == pytest.approx(by_group.auc, rel=1e-9)


def test_result_agrees_with_the_functions() -> None:
    scores, labels, weights = random_batch(500)
    metric = BinaryMetrics()
    metric.update(scores, labels, weights)
    result = metric.compute()
    assert result.auc == metrics.auc(scores, labels, weights)
    assert result.log_loss == metrics.log_loss(scores, labels, weights)
    assert result.normalized_entropy == metrics.normalized_entropy(scores, labels, weights)
    assert result.calibration == metrics.calibration(scores, labels, weights)
    assert result.bins == metrics.calibration_bins(scores, labels, weights)
    assert result.weight == pytest.approx(float(weights.sum()), rel=1e-6)
    assert result.calibration == pytest.approx(result.mean_prediction / result.mean_label)


def test_weights_may_come_late() -> None:
    scores, labels, weights = random_batch(200)
    metric = BinaryMetrics()
    metric.update(scores[:100], labels[:100])
    metric.update(scores[100:], labels[100:], weights[100:])
    joined = torch.cat([torch.ones(100), weights[100:]])
    assert metric.compute().auc == pytest.approx(metrics.auc(scores, labels, joined))


@pytest.mark.parametrize("scale", [0.1, 2.0, 8.0])
def test_running_auc_is_close(scale: float) -> None:
    scores, labels, _ = random_batch(5000, scale=scale)
    metric = BinaryMetrics(exact_auc=False)
    metric.update(scores, labels)
    assert metric.running_auc() == pytest.approx(metrics.auc(scores, labels), abs=2e-3)
    assert metric.compute().auc == metric.running_auc()


@settings(max_examples=50)
@given(EXAMPLES)
def test_running_auc_is_exact_when_scores_are_apart(
    examples: list[tuple[float, bool, float, int]],
) -> None:
    scores, labels, weights, _ = columns(examples)
    metric = BinaryMetrics()
    metric.update(scores, labels, weights)
    assert same(metric.running_auc(), pair_count(examples))


def test_update_keeps_nothing_of_the_caller() -> None:
    scores = torch.tensor([0.2, 0.8], requires_grad=True)
    labels = torch.tensor([False, True])
    metric = BinaryMetrics()
    metric.update(scores, labels)
    with torch.no_grad():
        scores.fill_(0.5)
    labels.fill_(False)
    assert metric.compute().auc == 1.0


BAD = [
    (ShapeError, torch.tensor([[0.5]]), torch.tensor([[1]]), None),
    (ShapeError, torch.tensor([0.5]), torch.tensor([1, 0]), None),
    (ShapeError, torch.tensor([0.5]), torch.tensor([1]), torch.ones(2)),
    (InputError, torch.tensor([0.5, math.nan]), torch.tensor([1, 0]), None),
    (InputError, torch.tensor([0.5, 1.5]), torch.tensor([1, 0]), None),
    (InputError, torch.tensor([0.5, -0.5]), torch.tensor([1, 0]), None),
    (InputError, torch.tensor([0.5]), torch.tensor([0.5]), None),
    (InputError, torch.tensor([0.5]), torch.tensor([math.nan]), None),
    (InputError, torch.tensor([0.5]), torch.tensor([1]), torch.tensor([-1.0])),
    (InputError, torch.tensor([0.5]), torch.tensor([1]), torch.tensor([math.inf])),
]


@pytest.mark.parametrize(("error", "scores", "labels", "weights"), BAD)
def test_bad_batches_raise_and_change_nothing(
    error: type[Exception], scores: Tensor, labels: Tensor, weights: Tensor | None
) -> None:
    metric = BinaryMetrics()
    metric.update(torch.tensor([0.2, 0.8]), torch.tensor([0, 1]))
    before = metric.compute()
    with pytest.raises(error):
        metric.update(scores, labels, weights)
    assert repr(metric.compute()) == repr(before)  # of empty bins, not a number


def test_nan_prediction_says_where() -> None:
    with pytest.raises(InputError, match="predictions: got nan at 1"):
        metrics.auc(torch.tensor([0.5, math.nan]), torch.tensor([1, 0]))


def test_groups_are_checked() -> None:
    scores, labels = torch.tensor([0.5]), torch.tensor([1])
    with pytest.raises(ShapeError, match="groups"):
        metrics.grouped_auc(scores, labels, torch.tensor([1, 2]))
    with pytest.raises(DTypeError, match="groups"):
        metrics.grouped_auc(scores, labels, torch.tensor([1.0]))


def test_no_examples() -> None:
    metric = BinaryMetrics()
    metric.update(torch.empty(0), torch.empty(0))
    assert math.isnan(metric.running_auc())
    with pytest.raises(InputError, match="examples"):
        metric.compute()
    metric.update(torch.tensor([0.5]), torch.tensor([1]))
    metric.reset()
    with pytest.raises(InputError):
        metric.compute()


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="bins"):
        BinaryMetrics(bins=0)
    with pytest.raises(ConfigError, match="merge"):
        BinaryMetrics().merge(BinaryMetrics(exact_auc=False))


def test_ranks_count_what_is_ahead_and_ties() -> None:
    scores = torch.tensor(
        [
            [0.1, 0.9, 0.5, 0.4],  # own 0.5: behind 0.9
            [0.3, 0.3, 0.3, 0.3],  # all alike: the last
            [0.1, 0.9, 0.5, 0.4],  # none of them
            [0.1, math.nan, 0.5, 0.4],  # own 0.5: behind NaN
            [0.1, math.nan, 0.5, 0.4],  # own NaN: the last
        ]
    )
    ranks = metrics.item_ranks(scores, torch.tensor([2, 0, -1, 2, 1]))
    assert ranks.tolist() == [2, 4, metrics.NOT_FOUND, 2, 4]


def test_ranking_figures_by_hand() -> None:
    ranks = torch.tensor([1, 3, 4, metrics.NOT_FOUND])
    found = metrics.ranking_figures(ranks, (1, 3))
    assert found == {
        "hit_rate@1": 0.25,
        "ndcg@1": 0.25,
        "hit_rate@3": 0.5,
        "ndcg@3": pytest.approx((1 + 1 / math.log2(4)) / 4),
    }
    assert all(math.isnan(one) for one in metrics.ranking_figures(ranks[:0], (1,)).values())
