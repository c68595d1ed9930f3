"""The reasoning model of examples/hrm: its arithmetic, its halting, its variants."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hrm.carry import IGNORE, Batch, Carry
from hrm.layers import gated_width, rms_norm, truncated_normal
from hrm.model import ReasoningModel, exploration
from hrm.model_config import ModelConfig
from shoal.errors import ConfigError
from support.hrm_oracle import PlainForward

TINY = ModelConfig(
    vocab_size=5,
    seq_len=6,
    hidden_size=8,
    num_heads=2,
    expansion=1.0,
    gated_multiple=8,
    H_layers=1,
    L_layers=2,
    puzzle_dim=8,
    halt_max_steps=4,
    forward_dtype="float64",
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small only wait for a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny(**changes: Any) -> ModelConfig:
    return dataclasses.replace(TINY, **changes)


def batch_of(config: ModelConfig, size: int = 3, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    shape = (size, config.seq_len)
    inputs = torch.randint(1, config.vocab_size, shape, generator=generator, dtype=torch.int32)
    labels = torch.randint(1, config.vocab_size, shape, generator=generator, dtype=torch.int32)
    return Batch(inputs, labels, torch.arange(size) + 100 * seed)


def rows_of(config: ModelConfig, size: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(size, config.puzzle_dim, generator=generator)


def started(model: ReasoningModel, size: int = 3) -> Carry:
    batch = batch_of(model.config, size)
    return model.admit(Carry.empty(model.config, batch), batch)


def test_parameters_of_the_sudoku_configuration() -> None:
    with torch.device("meta"):
        model = ReasoningModel(ModelConfig(vocab_size=11, seq_len=81))
    assert model.parameter_count == 27_275_266


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"positions": "learned"},
        {"puzzle_tokens": 3},
        {"puzzle_dim": 11},
        {"H_cycles": 3, "L_cycles": 1},
        {"shared_network": True, "bootstrap": False, "gradient_span": "last_cycle"},
    ],
    ids=str,
)
def test_forward_equals_the_written_out_one(changes: dict[str, Any]) -> None:
    config = tiny(**changes)
    model = ReasoningModel(config, seed=3)
    with torch.no_grad():
        model.q_head.weight.normal_(generator=torch.Generator().manual_seed(1))
    plain = PlainForward(model.state_dict(), config)
    carry, rows = started(model), rows_of(config)
    for _ in range(2):
        before, (carry, outputs) = carry, model(carry, rows)
        for b in range(3):
            state = (before.z_H_BTD[b].numpy(), before.z_L_BTD[b].numpy())
            want = plain(*state, before.inputs_BS[b].numpy(), rows[b].double().numpy())
            got = {
                "z_H": carry.z_H_BTD[b],
                "z_L": carry.z_L_BTD[b],
                "logits": outputs.logits_BSV[b].detach(),
                "q": torch.stack([outputs.q_halt_B[b], outputs.q_continue_B[b]]).detach(),
            }
            for name, value in got.items():
                torch.testing.assert_close(
                    value.double(), torch.from_numpy(want[name]), rtol=1e-6, atol=1e-6
                )


@pytest.mark.parametrize("span", ["last_calls", "last_cycle"])
def test_gradient_passes_through_the_span_only(span: str) -> None:
    config = tiny(gradient_span=span, L_cycles=3)
    model = ReasoningModel(config)
    carry, rows = started(model), rows_of(config).requires_grad_()
    _, outputs = model(carry, rows)
    outputs.logits_BSV.square().sum().backward()
    got = [p.grad.clone() for p in (*model.L_level.parameters(), rows) if p.grad is not None]

    model.zero_grad()
    rows.grad = None
    told, angles = model._told(carry.inputs_BS, rows), model.rotary()
    z_H, z_L = carry.z_H_BTD, carry.z_L_BTD
    for _ in range(3):
        z_L = model.L_level(z_L, z_H + told, angles).detach()
    z_H = model.H_level(z_H, z_L, angles).detach()
    for call in range(3):
        z_L = model.L_level(z_L, z_H + told, angles)
        if span == "last_calls" and call < 2:
            z_L = z_L.detach()
    logits = model.lm_head(model.H_level(z_H, z_L, angles))[:, config.prefix :]
    logits.square().sum().backward()
    want = [p.grad for p in (*model.L_level.parameters(), rows) if p.grad is not None]
    assert len(got) == len(want) > 2
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


def test_halted_slots_take_new_examples_and_the_others_keep_theirs() -> None:
    model = ReasoningModel(TINY)
    carry, _ = model(started(model), rows_of(TINY))
    halted = torch.tensor([False, True, False])
    carry = dataclasses.replace(carry, halted_B=halted)
    new = batch_of(TINY, seed=7)
    after = model.admit(carry, new)
    assert after.puzzle_ids_B.tolist() == [0, 701, 2]
    assert after.steps_B.tolist() == [1, 0, 1]
    assert torch.equal(after.inputs_BS[1], new.inputs_BS[1])
    assert torch.equal(after.labels_BS[0], carry.labels_BS[0])
    assert torch.equal(after.z_H_BTD[1], model.H_init_D.expand_as(after.z_H_BTD[1]))
    assert torch.equal(after.z_L_BTD[1], model.L_init_D.expand_as(after.z_L_BTD[1]))
    assert torch.equal(after.z_H_BTD[2], carry.z_H_BTD[2])


def with_values(model: ReasoningModel, halt: float, go_on: float) -> ReasoningModel:
    assert model.q_head.bias is not None
    with torch.no_grad():
        model.q_head.bias.copy_(torch.tensor([halt, go_on]))
    return model


def halted_after(model: ReasoningModel, least: Tensor | None = None) -> list[list[bool]]:
    carry, found = started(model), []
    for _ in range(model.config.halt_max_steps):
        carry, _ = model(carry, rows_of(model.config), least)
        found.append(carry.halted_B.tolist())
    return found


def test_training_halts_by_value_exploration_and_limit() -> None:
    eager = with_values(ReasoningModel(TINY), 1, 0)
    assert halted_after(eager)[0] == [True] * 3
    least = torch.tensor([0, 2, 9], dtype=torch.int32)
    explored = halted_after(eager, least)
    assert explored[0] == [True, False, False]
    assert explored[1] == [True, True, False]
    # Even the limit gives way to exploration, as in the original; its own draws never pass it.
    assert explored[3] == [True, True, False]
    patient = with_values(ReasoningModel(TINY), 0, 1)
    assert halted_after(patient) == [[False] * 3] * 3 + [[True] * 3]
    # Without a bootstrap only the sign of the first value counts.
    trm = tiny(bootstrap=False)
    assert halted_after(with_values(ReasoningModel(trm), 1, 2))[0] == [True] * 3
    assert halted_after(with_values(ReasoningModel(trm), -1, -2))[0] == [False] * 3


def test_evaluation_takes_all_steps() -> None:
    model = with_values(ReasoningModel(TINY), 1, 0).eval()
    assert halted_after(model) == [[False] * 3] * 3 + [[True] * 3]


def test_target_is_the_value_of_the_next_step() -> None:
    model = ReasoningModel(TINY)
    with torch.no_grad():
        model.q_head.weight.normal_(generator=torch.Generator().manual_seed(1))
    rows = rows_of(TINY)
    carry, outputs = model(started(model), rows)
    _, after = model(carry, rows)
    want = torch.sigmoid(torch.maximum(after.q_halt_B, after.q_continue_B))
    assert outputs.target_continue_B is not None
    assert not outputs.target_continue_B.requires_grad
    torch.testing.assert_close(outputs.target_continue_B, want.detach())
    carry = dataclasses.replace(carry, steps_B=torch.full((3,), 3, dtype=torch.int32))
    carry, outputs = model(carry, rows)
    _, after = model(carry, rows)
    assert outputs.target_continue_B is not None
    torch.testing.assert_close(outputs.target_continue_B, torch.sigmoid(after.q_halt_B).detach())
    assert model.eval()(carry, rows)[1].target_continue_B is None


def test_exploration_is_one_draw_for_all_ranks() -> None:
    config = tiny(halt_exploration_prob=0.25, halt_max_steps=6)

    def drawn(step: int, first: int, count: int, seed: int = 5) -> Tensor:
        of_rank = {"global_batch": 4000, "first": first, "count": count}
        return exploration(config, seed=seed, step=step, **of_rank)

    whole = drawn(3, 0, 4000)
    assert torch.equal(whole, torch.cat([drawn(3, 0, 2000), drawn(3, 2000, 2000)]))
    assert not torch.equal(whole, drawn(4, 0, 4000))
    assert not torch.equal(whole, drawn(3, 0, 4000, seed=6))
    assert whole.dtype == torch.int32
    assert set(whole.tolist()) == {0, 2, 3, 4, 5, 6}
    assert 0.2 < float((whole > 0).float().mean()) < 0.3


def test_variants_share_what_they_say() -> None:
    two = ReasoningModel(tiny(H_layers=2))
    one = ReasoningModel(tiny(shared_network=True))
    assert one.H_level is one.L_level
    level = sum(p.numel() for p in one.L_level.parameters())
    assert two.parameter_count - one.parameter_count == level
    mixing = ReasoningModel(tiny(mixer="mlp"))
    assert mixing.rotary is None
    _, outputs = mixing(started(mixing), rows_of(TINY))
    outputs.logits_BSV.sum().backward()
    assert all(p.grad is not None for n, p in mixing.named_parameters() if "q_head" not in n)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_activations_have_the_forward_dtype_and_parameters_do_not(dtype: str) -> None:
    model = ReasoningModel(tiny(forward_dtype=dtype))
    carry, outputs = model(started(model), rows_of(TINY))
    wanted = getattr(torch, dtype)
    assert outputs.logits_BSV.dtype == carry.z_H_BTD.dtype == model.H_init_D.dtype == wanted
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert outputs.q_halt_B.dtype == torch.float32
    assert outputs.q_halt_B.tolist() == [-5.0] * 3


def test_the_row_reaches_every_answer() -> None:
    model = ReasoningModel(TINY)
    rows = rows_of(TINY).requires_grad_()
    _, outputs = model(started(model), rows)
    outputs.logits_BSV[1].square().sum().backward()
    assert rows.grad is not None
    assert rows.grad.abs().sum(1).bool().tolist() == [False, True, False]
    bare = ReasoningModel(tiny(puzzle_dim=0))
    assert bare(started(bare), None)[1].logits_BSV.shape == (3, 6, 5)


def test_initial_values_have_the_deviation_they_promise() -> None:
    values = truncated_normal((200_000,), 0.5, torch.Generator().manual_seed(0))
    assert abs(float(values.std()) - 0.5) < 0.003
    assert float(values.abs().max()) < 0.5 * 2 / 0.879
    assert torch.equal(ReasoningModel(TINY, seed=4).H_init_D, ReasoningModel(TINY, seed=4).H_init_D)


def test_norm_and_width() -> None:
    x = torch.tensor([[3.0, 4.0]], dtype=torch.bfloat16)
    torch.testing.assert_close(rms_norm(x, 0.0).float(), x.float() / 12.5**0.5, rtol=1e-2, atol=0)
    assert gated_width(512, 4) == 1536
    assert gated_width(64, 4) == 256
    assert gated_width(64, 4, 64) == 192


def test_carry_survives_its_state() -> None:
    model = ReasoningModel(TINY)
    carry, _ = model(started(model), rows_of(TINY))
    again = Carry.from_state(carry.state_dict())
    for name, value in carry.state_dict().items():
        assert torch.equal(getattr(again, name), value)
    assert IGNORE == -100


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 9},
        {"puzzle_dim": 17, "puzzle_tokens": 2},
        {"forward_dtype": "float16"},
        {"mixer": "convolution"},
        {"halt_exploration_prob": 1.5},
        {"L_layers": 0},
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        tiny(**changes)
