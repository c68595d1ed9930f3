from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, silu

from shoal.errors import ConfigError, ShapeError, UnknownName
from shoal.ids import mix64
from shoal.models import (
    MODELS,
    HSTULayer,
    InBatchScores,
    InBatchSoftmax,
    Inputs,
    ItemFrequency,
    TargetAttention,
)
from shoal.models.tasks import inputs_of_ids
from shoal.ragged import KeyedRagged

B, DENSE, F, D, S, L = 5, 2, 3, 4, 2, 6
INPUTS = Inputs(DENSE, F, D, ("user", "item", "cate"), ("items", "cates"), L, ("click",))
LENGTHS = torch.tensor([6, 0, 3, 1, 5])
TARGET = ("item", "cate")
MODELS_OF_SEQUENCES: dict[str, dict[str, object]] = {
    "din": {"target": TARGET, "attention": (8,), "hidden": (8,)},
    "hstu": {"target": TARGET, "hidden": (8,), "heads": 2},
    "hstu_projected": {"target": TARGET, "hidden": (8,), "heads": 3, "width": 6},
    "hstu_next_item": {"target": TARGET, "head": "next_item", "width": 6},
}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def batch() -> tuple[Tensor, Tensor, None, Tensor, Tensor]:
    sequences = torch.randn(B, S, L, D) * (torch.arange(L) < LENGTHS[:, None])[:, None, :, None]
    return (
        torch.randn(B, DENSE),
        torch.randn(B, F, D),
        None,
        sequences,
        LENGTHS[:, None].repeat(1, S),
    )


def spec(name: str) -> object:
    return MODELS[name.split("_")[0]](**MODELS_OF_SEQUENCES[name])


@pytest.mark.parametrize("name", MODELS_OF_SEQUENCES)
def test_steps_beyond_a_length_change_nothing(name: str) -> None:
    model = spec(name).build(INPUTS).eval()  # type: ignore[attr-defined]
    dense, embeddings, _, sequences, lengths = batch()
    logits = model(dense, embeddings, None, sequences, lengths)
    assert logits.shape == (B,)
    noise = torch.randn(B, S, L, D) * (torch.arange(L) >= LENGTHS[:, None])[:, None, :, None]
    torch.testing.assert_close(model(dense, embeddings, None, sequences + noise, lengths), logits)
    changed = sequences.clone()
    changed[0, 0, 5] += 1.0  # a step that counts
    differs = model(dense, embeddings, None, changed, lengths) != logits
    assert differs.tolist() == [True, False, False, False, False]


@pytest.mark.parametrize("name", MODELS_OF_SEQUENCES)
def test_all_weights_have_gradients(name: str) -> None:
    model = spec(name).build(INPUTS)  # type: ignore[attr-defined]
    outputs = model(*batch())
    assert outputs.shape == ((B, B) if name == "hstu_next_item" else (B,))
    outputs.square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


def test_own_scores_do_not_keep_all_scores_alive() -> None:
    scores_B = InBatchSoftmax().logits(torch.zeros(B, B))
    assert scores_B.untyped_storage().nbytes() == B * 4


def test_targets_are_one_for_each_sequence() -> None:
    with pytest.raises(ConfigError, match=r"model\.target"):
        MODELS["din"](target=("item",)).build(INPUTS)
    with pytest.raises(UnknownName, match="itm"):
        MODELS["din"](target=("itm", "cate")).build(INPUTS)


@pytest.mark.parametrize("normalise", [False, True])
def test_attention_formula(normalise: bool) -> None:
    model = TargetAttention(D, (8,), normalise=normalise)
    query, steps = torch.randn(B, D), torch.randn(B, L, D)
    found = model(query, steps, LENGTHS)
    for b, length in enumerate(LENGTHS.tolist()):
        scores = [
            model.score(torch.cat([query[b], k, query[b] - k, query[b] * k]))
            for k in steps[b, :length]
        ]
        weights = torch.cat(scores) if scores else torch.zeros(0)
        weights = weights.softmax(0) if normalise else weights
        torch.testing.assert_close(found[b], weights @ steps[b, :length])


def test_hstu_layer_formula() -> None:
    """As published: SiLU of scores over L in place of a softmax, gated, causal, with a residual."""
    model = HSTULayer(D, 2, L).double()
    x = torch.randn(1, L, D, dtype=torch.float64)
    places = torch.arange(L).unsqueeze(0)
    distance = places.unsqueeze(2) - places.unsqueeze(1)
    found = model(x, distance, distance >= 0)[0]
    u, v, q, k = silu(model.norm(x[0]) @ model.joint.weight.T).chunk(4, dim=1)
    heads = []
    for h in range(2):
        cut = slice(2 * h, 2 * h + 2)
        rows = []
        for i in range(L):
            weights = [
                silu(q[i, cut] @ k[j, cut] + model.distance[i - j]) / L for j in range(i + 1)
            ]
            rows.append(sum(w * v[j, cut] for j, w in enumerate(weights)))
        heads.append(torch.stack(rows))  # type: ignore[arg-type]
    seen = model.norm_out(torch.cat(heads, dim=1)) * u
    torch.testing.assert_close(found, x[0] + model.out(seen))
    with pytest.raises(ConfigError, match="divisor of 4"):
        HSTULayer(4, 3, L)


def test_two_towers_see_their_own_features() -> None:
    settings = MODELS["two_tower"](user=("user",), item=TARGET, hidden=(8,), width=3)
    model = settings.build(INPUTS).eval()
    dense, embeddings = torch.randn(B, DENSE), torch.randn(B, F, D)
    scores = model(dense, embeddings)
    user = model.user(torch.cat([dense, embeddings[:, 0]], dim=1))
    item = model.item(embeddings[:, 1:].flatten(1))
    cosine = torch.nn.functional.cosine_similarity(user, item) / 0.05
    torch.testing.assert_close(scores, cosine)
    model.train()
    pairs = model(dense, embeddings, ids_B=torch.arange(B))
    torch.testing.assert_close(pairs.diagonal(), scores, rtol=1e-5, atol=1e-5)
    alone = MODELS["two_tower"](user=("user",), item=TARGET, loss="log_loss").build(INPUTS)
    assert alone(dense, embeddings).shape == (B,)
    with pytest.raises(ConfigError, match=r"model\.user"):
        MODELS["two_tower"](user=(), item=TARGET).build(INPUTS)


def test_softmax_over_the_items_of_a_batch() -> None:
    scores = torch.randn(4, 4)
    labels = torch.tensor([[1.0], [0.0], [1.0], [1.0]])
    each = cross_entropy(scores, torch.arange(4), reduction="none")
    found = InBatchSoftmax().loss_sum(scores, labels, None)
    torch.testing.assert_close(found, each[0] + each[2] + each[3])
    assert InBatchSoftmax().logits(scores).tolist() == scores.diagonal().tolist()
    none = InBatchSoftmax().loss_sum(torch.zeros(0, 0), torch.zeros(0, 1), None)
    assert float(none) == 0.0


def test_the_same_item_is_no_negative_of_its_own() -> None:
    model = InBatchScores(1.0)
    vectors = torch.randn(3, D)
    scores = model(vectors, vectors, torch.tensor([7, 7, 9]))
    probabilities = scores.softmax(1)
    assert probabilities[0, 1] == probabilities[1, 0] == 0
    assert (probabilities[2] > 0).all()
    assert (probabilities.diagonal() > 0).all()


def test_frequencies_are_learned_from_the_stream() -> None:
    model = ItemFrequency(slots=1 << 10, rate=0.1)
    for step in range(200):
        ids = [1] if step % 10 else [1, 2]
        chances = model.seen(torch.tensor(ids)).exp()
    assert float(chances[0]) == pytest.approx(1.0)
    rare = model.seen(torch.tensor([2])).exp()
    assert 0.09 < float(rare) < 0.12
    scores = InBatchScores(1.0, log_q=True)
    item = torch.ones(2, D)
    for _ in range(20):
        scores(item[:1], item[:1], torch.tensor([1]))
    found = scores(item, item, torch.tensor([1, 2]))
    assert found[0, 1] - found[0, 0] == pytest.approx(3.04, abs=0.01)  # log 21: it came once in 21


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 8])
def test_frequencies_of_ranks_are_those_of_a_rank_s_batch(ranks: int) -> None:
    model, slots = ItemFrequency(rate=0.02), 1 << 16
    batches: list[torch.Tensor] = []

    def sums(marks_H: torch.Tensor) -> torch.Tensor:
        assert float(marks_H.sum()) == len(batches[0].unique())
        found = torch.zeros_like(marks_H)
        for ids in batches:
            found[(mix64(ids) & (slots - 1)).unique()] += 1
        return found

    model.over_ranks, model.ranks = sums, ranks
    torch.manual_seed(0)
    chances = torch.tensor([1.0, 0.7, 0.3, 0.1])
    learned = []
    for step in range(1500):
        batches[:] = [(torch.rand(4) < chances).nonzero().squeeze(1) for _ in range(ranks)]
        model.seen(batches[0])
        if step >= 500:
            batches[:] = [torch.arange(4)]
            learned.append(1 / model.gap_H[mix64(torch.arange(4)) & (slots - 1)])
    found = torch.stack(learned).mean(0)
    torch.testing.assert_close(found, chances, rtol=0.1, atol=0)


def test_ids_and_lengths_of_a_batch() -> None:
    ids = KeyedRagged.from_dict({"a": [[1, 2], [], [3]], "b": [[4], [5], [6]]})
    assert inputs_of_ids(ids, (), None) == {}
    found = inputs_of_ids(ids, ("a",), "b")
    assert found["lengths"].tolist() == [[2], [0], [1]]
    assert found["ids"].tolist() == [4, 5, 6]
    twice = KeyedRagged.from_dict({"a": [[1, 2], [3, 4]]})
    with pytest.raises(ShapeError, match="item_id"):
        inputs_of_ids(twice, (), "a")
    with pytest.raises(ShapeError, match="item_id"):  # as many ids as examples, but not one each
        inputs_of_ids(ids, (), "a")


def test_sequences_have_one_length_in_each_example() -> None:
    ids = KeyedRagged.from_dict({"a": [[1, 2], [], [3]], "b": [[4, 4], [5], [6]]})
    with pytest.raises(ShapeError, match=r"'a', 'b'\]: got \[0, 1\] of example 1"):
        inputs_of_ids(ids, ("a", "b"), None)
