"""Scores of users with sampled items, against sums written out."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
from torch.nn.functional import normalize

from shoal.errors import ConfigError
from shoal.models import (
    MODELS,
    DeepFMSettings,
    HstuSettings,
    InBatchScores,
    InBatchSoftmax,
    Inputs,
    TwoTowerSettings,
)
from shoal.models.tasks import Negatives

B, N, E = 3, 4, 5
IDS = torch.tensor([7, 8, 7, 8, 1, 2, 3, 4, 5, 6])
NEGATIVES = Negatives(
    log_counts_N=torch.tensor([0.5, -1.0, 2.0, 0.0]),
    hard_H=torch.tensor([0, 2, 2]),
    known=torch.tensor([[0, 5], [2, 0], [1, 0]]),
    most_hard=2,
)
Loss = Literal["softmax", "sampled"]


@pytest.mark.parametrize("loss", ["softmax", "sampled"])
def test_the_loss_is_that_of_a_softmax_over_what_each_user_is_compared_with(loss: Loss) -> None:
    torch.manual_seed(0)
    users, items = torch.randn(B, E), torch.randn(B + N + 3, E)
    scores = InBatchScores(0.2, pairs=loss == "softmax")
    objective = InBatchSoftmax(own_first=loss == "sampled")
    outputs = scores(users, items, IDS, NEGATIVES)
    labels = torch.tensor([[1.0], [1.0], [0.5]])
    got = objective.loss_sum(outputs, labels, None)

    products = (normalize(users, dim=1) @ normalize(items, dim=1).T / 0.2).tolist()
    known = {(0, 5), (2, 0), (1, 0)}
    want = 0.0
    for row in range(B):
        own = products[row][row]
        total = math.exp(own)
        for at in range(B + N):
            in_batch = at < B
            same = int(IDS[at]) == int(IDS[row])
            if at == row or same or (row, at) in known or (in_batch and loss == "sampled"):
                continue
            if loss == "softmax" and not in_batch and int(IDS[at]) in IDS[:B].tolist():
                continue  # its score is there as one of the batch
            shift = 0.0 if in_batch else float(NEGATIVES.log_counts_N[at - B])
            total += math.exp(products[row][at] - shift)
        for number, whose in enumerate((0, 2, 2)):
            if whose == row:
                total += math.exp(products[row][B + N + number])
        want += float(labels[row, 0]) * (math.log(total) - own)
    assert float(got) == pytest.approx(want, rel=1e-5)
    own_B = torch.tensor([products[row][row] for row in range(B)])
    torch.testing.assert_close(objective.logits(outputs), own_B)
    torch.testing.assert_close(scores.eval()(users, items, None, NEGATIVES), own_B)


@pytest.mark.slow
def test_sampled_sums_estimate_the_sum_over_all_items() -> None:
    """The mean of many draws' sums is that over all items, which uncorrected sums are far from."""
    import numpy as np

    from shoal.data import Sampler, SamplerSettings, TensorSource

    torch.manual_seed(1)
    size, count = 50, 10
    user, items = torch.randn(1, E), torch.randn(size, E)
    weights = np.exp(np.random.default_rng(0).normal(size=size) * 1.5)
    source = TensorSource({"item": torch.arange(size)}, torch.zeros(size))
    sampler = Sampler(source, SamplerSettings(items="", id="item", count=count), weights=weights)
    scores = InBatchScores(0.5, pairs=False)
    sums, plain = [], []
    for draw in range(3000):
        sampled = sampler.sample(np.array([3]), None, (0, draw, 0))
        drawn, negatives = sampled.ids["item"].values, sampled.negatives
        vectors = torch.cat([items[3:4], items[drawn]])
        found = scores(user, vectors, torch.cat([torch.tensor([3]), drawn]), negatives)
        sums.append(float(found.exp().sum()))
        none = Negatives(torch.zeros(count), negatives.hard_H, negatives.known)
        plain.append(float(scores(user, vectors, None, none).exp().sum()))
    want = float((normalize(user, dim=1) @ normalize(items, dim=1).T / 0.5).exp().sum())
    error = np.std(sums) / len(sums) ** 0.5
    assert abs(np.mean(sums) - want) < 4 * error
    assert abs(np.mean(plain) - want) > 20 * error


@pytest.mark.slow
def test_an_item_of_the_batch_that_is_drawn_too_counts_once() -> None:
    """With kind no_edge: the mean of draws' sums is that over all items."""
    import numpy as np

    from shoal.data import Sampler, SamplerSettings, TensorSource

    torch.manual_seed(0)
    size, batch = 50, 32
    user, items = torch.randn(1, E), torch.randn(size, E)
    settings = SamplerSettings(
        kind="no_edge", items="", id="item", user="user", edges="edges", count=10
    )
    edges = (np.array([-5]), np.array([0]))
    sampler = Sampler(
        TensorSource({"item": torch.arange(size)}, torch.zeros(size)), settings, edges=edges
    )
    scores, sums = InBatchScores(0.5), []
    for draw in range(1000):
        own = np.random.default_rng(draw).permutation(size)[:batch]
        sampled = sampler.sample(own, np.zeros(batch, np.int64), (0, draw, 0))
        ids = torch.cat([torch.from_numpy(own), sampled.ids["item"].values])
        found = scores(user.expand(batch, E), items[ids], ids, sampled.negatives)
        sums.append(float(found[0].exp().sum()))
    want = float((normalize(user, dim=1) @ normalize(items, dim=1).T / 0.5).exp().sum())
    assert abs(np.mean(sums) - want) < 4 * np.std(sums) / len(sums) ** 0.5


def test_log_q_keeps_the_difference_of_a_hard_negative_to_the_own_item() -> None:
    users, items = torch.randn(2, E), torch.randn(2 + 1, E)
    none = torch.zeros(0, 2, dtype=torch.int64)
    negatives = Negatives(torch.zeros(0), torch.tensor([1]), none, most_hard=1)
    found = []
    for log_q in (False, True):
        scores = InBatchScores(1.0, log_q=log_q)
        if scores.frequency is not None:
            for step in range(100):
                scores.frequency.seen(torch.tensor([1000 + step]))
        outputs = scores(users, items, torch.tensor([1, 2, 3]), negatives)
        found.append(float(outputs[1, 2] - outputs[1, 1]))
    assert found[1] == pytest.approx(found[0], abs=1e-4)


def test_negatives_train_the_item_tower_and_not_the_user_tower() -> None:
    spec = TwoTowerSettings(user=("user",), item=("item",), hidden=(), width=4, loss="sampled")
    model = spec.build(Inputs(1, 2, 3, ("user", "item")))
    embeddings = torch.randn(B + N + 3, 2, 3, requires_grad=True)
    outputs = model(torch.randn(B, 1), embeddings, None, IDS, NEGATIVES)
    assert outputs.shape == (B, 1 + N + 2)
    spec.objective(()).loss_sum(outputs, torch.ones(B, 1), None).backward()
    assert embeddings.grad is not None
    assert embeddings.grad[B:, 0].abs().sum() == 0
    assert (embeddings.grad[B:, 1].abs().sum(1) > 0).all()


def test_a_sampler_that_does_not_fit_the_model_is_refused() -> None:
    spec = TwoTowerSettings(user=("user",), item=("item", "kind"), loss="sampled")
    spec.check_negatives(("item", "kind"))
    MODELS["two_tower"](user=("user",), item=("item",)).check_negatives(None)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"model\.loss: sampled: got no data\.sampler"):
        spec.check_negatives(None)
    with pytest.raises(ConfigError, match=r"data.sampler: got id 'item', attributes \[\]"):
        spec.check_negatives(("item",))
    with pytest.raises(ConfigError, match=r"data\.sampler: got id 'kind'"):
        spec.check_negatives(("kind", "item"))
    with pytest.raises(ConfigError, match="got log_q: true"):
        TwoTowerSettings(item=("item",), loss="sampled", log_q=True).check_negatives(("item",))
    for other in (DeepFMSettings(), TwoTowerSettings(item=("item",), loss="log_loss")):
        other.check_negatives(None)
        with pytest.raises(ConfigError, match=r"model that data\.sampler gives items to"):
            other.check_negatives(("item",))


@pytest.mark.parametrize("loss", ["softmax", "sampled"])
def test_hstu_compares_the_next_item_with_sampled_ones(loss: Loss) -> None:
    """Scores in training are those of its vectors; histories end before the sampled items."""
    torch.manual_seed(0)
    inputs = Inputs(0, 3, 4, names=("user", "item", "cate"), sequences=("a", "b"), length=6)
    spec = HstuSettings(target=("item", "cate"), head="next_item", loss=loss, width=8, blocks=1)
    net = spec.build(inputs)
    sampled = NEGATIVES.size
    embeddings = torch.randn(B + sampled, 3, 4)
    steps = torch.cat([torch.randn(B, 2, 6, 4), torch.zeros(sampled, 2, 6, 4)])
    lengths = torch.tensor([[3, 3], [6, 6], [0, 0]] + [[0, 0]] * sampled)
    got = net(None, embeddings, None, steps, lengths, IDS, NEGATIVES)
    users, _ = net(None, embeddings[:B], None, steps[:B], lengths[:B], vectors=True)
    # As many examples as items, so that each item's vector comes out.
    none = torch.zeros(B + sampled, 2, 6, 4), torch.zeros(B + sampled, 2, dtype=torch.int64)
    _, items = net(None, embeddings, None, *none, vectors=True)
    scores = InBatchScores(spec.temperature, pairs=loss == "softmax")
    torch.testing.assert_close(got, scores(users, items, IDS, NEGATIVES))
    assert got.shape == (B, B + N + 2 if loss == "softmax" else 1 + N + 2)
    own = net.eval()(None, embeddings[:B], None, steps[:B], lengths[:B])
    torch.testing.assert_close(own, (users * items[:B]).sum(1) / spec.temperature)


@pytest.mark.parametrize(
    ("settings", "features", "message"),
    [
        ({"loss": "sampled"}, None, "got no data.sampler"),
        ({"loss": "sampled", "log_q": True}, ("item", "cate"), "got log_q"),
        ({}, ("cate", "item"), "got id 'cate'"),
        ({}, ("item",), "got id 'item', attributes"),
        ({"head": "ctr"}, ("item", "cate"), "got hstu"),
    ],
)
def test_hstu_refuses_items_that_do_not_fit(
    settings: dict[str, Any], features: tuple[str, ...] | None, message: str
) -> None:
    spec = HstuSettings(**{"target": ("item", "cate"), "head": "next_item", **settings})
    with pytest.raises(ConfigError, match=message):
        spec.check_negatives(features)
