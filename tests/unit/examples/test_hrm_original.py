"""Weights of the original HRM and TRM are read by their names there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hrm.learner import Learner, LearnerConfig
from hrm.model_config import ModelConfig
from hrm.original import load_original
from hrm.puzzle_table import TABLE
from hrm.ranks import joined
from hrm.sampler import Share
from shoal.errors import CheckpointError

D, VOCAB, LENGTH, ROWS = 8, 5, 6, 3
TINY = {
    "vocab_size": VOCAB,
    "seq_len": LENGTH,
    "hidden_size": D,
    "num_heads": 2,
    "expansion": 1.0,
    "gated_multiple": 8,
    "H_layers": 1,
    "L_layers": 1,
    "puzzle_dim": D,
    "forward_dtype": "float32",
}
# SwiGLU: two thirds of an expansion of 1, up to 8.
ATTENTION = {
    "self_attn.qkv_proj.weight": (3 * D, D),
    "self_attn.o_proj.weight": (D, D),
    "mlp.gate_up_proj.weight": (2 * D, D),
    "mlp.down_proj.weight": (D, D),
}
AROUND = {
    "embed_tokens.embedding_weight": (VOCAB, D),
    "lm_head.weight": (VOCAB, D),
    "q_head.weight": (2, D),
    "q_head.bias": (2,),
    "puzzle_emb.weights": (ROWS, D),
    "puzzle_emb.local_weights": (4, D),
    "H_init": (D,),
    "L_init": (D,),
}
HRM = AROUND | {
    f"{module}.layers.0.{name}": shape
    for module in ("H_level", "L_level")
    for name, shape in ATTENTION.items()
}


def original(shapes: dict[str, tuple[int, ...]], prefix: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {
        f"{prefix}model.inner.{name}": torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }


@pytest.fixture
def make() -> Iterator[Any]:
    with joined("cpu", 1) as mesh:
        yield lambda **changes: Learner(
            ModelConfig(**{**TINY, **changes}),
            LearnerConfig(total_steps=9, ema_decay=0.5),
            Share(4, 0, 1),
            mesh,
        )


@pytest.mark.parametrize("prefix", ["_orig_mod.", ""])
def test_weights_and_rows_are_the_original_s(prefix: str, make: Any, tmp_path: Path) -> None:
    state = original(HRM, prefix)
    torch.save(state, tmp_path / "step_7")
    learner = make()
    load_original(tmp_path / "step_7", learner)
    own = learner.model.state_dict()
    for here, there in (
        ("H_level.layers.0.self_attn.qkv_proj.weight",) * 2,
        ("L_level.layers.0.mlp.down_proj.weight",) * 2,
        ("embed_tokens.weight", "embed_tokens.embedding_weight"),
        ("q_head.bias", "q_head.bias"),
        ("L_init_D", "L_init"),
    ):
        assert torch.equal(own[here], state[f"{prefix}model.inner.{there}"])
    # All that there is: but for the rows, and the buffer of those at work.
    assert sum(one.numel() for one in own.values()) == sum(
        one.numel() for name, one in state.items() if "puzzle_emb" not in name
    )
    rows = learner.table.rows.table(TABLE).lookup(torch.arange(ROWS + 1))
    assert torch.equal(rows[:ROWS], state[f"{prefix}model.inner.puzzle_emb.weights"])
    assert not rows[ROWS].any()
    assert torch.equal(learner.average.state_dict()["lm_head.weight"], own["lm_head.weight"])


def test_trm_has_one_network_and_mixes_positions(make: Any, tmp_path: Path) -> None:
    length = LENGTH + 1
    shapes = AROUND | {
        "L_level.layers.0.mlp_t.gate_up_proj.weight": (16, length),
        "L_level.layers.0.mlp_t.down_proj.weight": (length, 8),
        "L_level.layers.0.mlp.gate_up_proj.weight": (2 * D, D),
        "L_level.layers.0.mlp.down_proj.weight": (D, D),
    }
    state = original(shapes, "_orig_mod.")
    torch.save(state, tmp_path / "step_7")
    learner = make(mixer="mlp", shared_network=True)
    load_original(tmp_path / "step_7", learner)
    found = learner.model.state_dict()["L_level.layers.0.mixer.mlp.down_proj.weight"]
    name = "_orig_mod.model.inner.L_level.layers.0.mlp_t.down_proj.weight"
    assert torch.equal(found, state[name])


def test_one_network_takes_two_only_if_they_are_equal(make: Any, tmp_path: Path) -> None:
    learner = make(shared_network=True)
    state = original(HRM, "")
    torch.save(state, tmp_path / "step_7")
    with pytest.raises(CheckpointError, match=r"H_level.* other than L_level.*, here one network"):
        load_original(tmp_path / "step_7", learner)
    alike = {name: state[name.replace("H_level", "L_level")] for name in state}
    torch.save(alike, tmp_path / "step_8")
    load_original(tmp_path / "step_8", learner)
    name = "layers.0.mlp.down_proj.weight"
    found = learner.model.state_dict()[f"H_level.{name}"]
    assert torch.equal(found, state[f"model.inner.L_level.{name}"])
    for module in ("H_level", "L_level"):
        torch.save({k: v for k, v in state.items() if module not in k}, tmp_path / "half")
        if module == "L_level":
            with pytest.raises(CheckpointError, match="no L_level"):
                load_original(tmp_path / "half", learner)
        else:  # as TRM is saved
            load_original(tmp_path / "half", learner)


def test_what_does_not_fit_is_named_and_changes_nothing(make: Any, tmp_path: Path) -> None:
    learner = make()
    before = {name: one.clone() for name, one in learner.model.state_dict().items()}
    state = original(HRM, "")
    broken = {
        "no lm_head.weight": lambda made: made.pop("model.inner.lm_head.weight"),
        "extra, which the model has not": lambda made: made.update(
            {"model.inner.extra": torch.zeros(1)}
        ),
        r"q_head.bias of \(3,\), here \(2,\)": lambda made: made.update(
            {"model.inner.q_head.bias": torch.zeros(3)}
        ),
        "rows of puzzles 0 wide, here 8": lambda made: made.pop("model.inner.puzzle_emb.weights"),
        r"rows of puzzles of shape \(8,\)": lambda made: made.update(
            {"model.inner.puzzle_emb.weights": torch.zeros(8)}
        ),
        "something else than tensors by name": lambda made: made.update({7: torch.zeros(1)}),
    }  # fmt: skip
    for words, change in broken.items():
        made = dict(state)
        change(made)
        torch.save(made, tmp_path / "bad")
        with pytest.raises(CheckpointError, match=words):
            load_original(tmp_path / "bad", learner)
    (tmp_path / "text").write_text("no checkpoint")
    for path in ("text", "missing"):
        with pytest.raises(CheckpointError, match=path):
            load_original(tmp_path / path, learner)
    torch.save([1], tmp_path / "list")
    with pytest.raises(CheckpointError, match="something else"):
        load_original(tmp_path / "list", learner)
    after = learner.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
