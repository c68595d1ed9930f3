"""The demo of examples/hrm in small, the pictures it writes, and outputs kept by evaluations."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import demo
import draw
import evaluate
import pretrain
from hrm.dataset import read_split
from hrm.rule_task import RuleTask
from support.hrm_runs import TEST, TINY, build

pytestmark = pytest.mark.slow

TASK = RuleTask(ids=24, train_grids=16, side=3, colours=3)
SHORT = (
    "arch.hidden_size=32",
    "arch.num_heads=2",
    "arch.halt_max_steps=2",
    "lr=2e-3",
    "lr_min_ratio=0.05",
    "lr_warmup_steps=20",
    "global_batch_size=24",
    "epochs=320",
    "eval_interval=160",
    "tensorboard=false",
)


def test_only_rows_that_learn_know_the_rules(tmp_path: Path) -> None:
    learned, frozen = demo.demonstrate(tmp_path, task=TASK, settings=SHORT)
    assert learned.steps == frozen.steps == 320
    assert learned.exact >= 0.8, learned.exact
    # By chance a grid of nine cells is never guessed, whatever is common to all rules.
    assert frozen.exact <= 0.1, frozen.exact
    kept, test = learned.kept, read_split(tmp_path / "data", "test").sets["all"]
    assert kept["inputs"].tolist() == test.inputs.tolist()
    right = (kept["predictions"] == kept["labels"]).all(1).double().mean()
    assert float(right) == pytest.approx(learned.exact)
    assert kept["puzzle_identifiers"].tolist() == [1 + k // 2 for k in range(48)]


def test_the_demo_prints_its_table_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo.main(["--folder", str(tmp_path), "--ids", "64", "--epochs", "2"])
    said = capsys.readouterr().out
    assert "rows learn" in said and "rows frozen" in said and "picture: " in said
    found = json.loads((tmp_path / "figures.json").read_text())
    assert found["rows learn"]["steps"] == found["rows frozen"]["steps"] == 2
    drawn = ElementTree.parse(tmp_path / "demo.svg").getroot()
    # Four ids: the grid that is asked about and two answers, 16 cells each; and the paper.
    assert len(drawn.findall("{*}rect")) == 4 * 3 * 16 + 1


def test_a_run_keeps_outputs_and_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, place = build(tmp_path / "data"), tmp_path / "run"
    names = ["inputs", "labels", "predictions", "q_halt_logits"]
    settings = [f"data_path={data}", f"checkpoint_path={place}", "eval_interval=8"]
    asked = f"eval_save_outputs=[{','.join(names)}]"
    assert pretrain.main([*TINY, *settings, asked]) == 0
    # 37 examples in batches of 16: what fills up the last one is not kept.
    kept = torch.load(place / "step_20_all_preds.0")
    assert {name: len(value) for name, value in kept.items()} == dict.fromkeys(names, TEST)
    again = [f"checkpoint={place}", "device=cpu", f"save_outputs_to={tmp_path}"]
    assert evaluate.main([*again, "save_outputs=[predictions]", "global_batch_size=7"]) == 0
    (same,) = torch.load(tmp_path / "step_20_all_preds.0").values()
    assert torch.equal(same, kept["predictions"])

    output = f"output={tmp_path / 'solved.svg'}"
    assert draw.main([f"checkpoint={place}", "device=cpu", output, "example=3"]) == 0
    assert "test example 3" in capsys.readouterr().out
    drawn = ElementTree.parse(tmp_path / "solved.svg").getroot()
    assert len(drawn.findall("{*}rect")) == 4 * 16 + 1  # the puzzle, three steps, and the paper
    frame = "".join(t.text or "" for t in drawn.findall("{*}text") if (t.text or "").isdigit())
    given = "".join(str(t - 1) for t in kept["inputs"][3].tolist() if t > 1)
    after = "".join(str(t - 1) for t in kept["predictions"][3].tolist() if t > 1)
    assert frame.startswith(given) and frame.endswith(after)


def test_what_cannot_be_drawn_or_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, place = build(tmp_path / "data"), tmp_path / "run"
    settings = [f"data_path={data}", f"checkpoint_path={place}", "max_steps=1"]
    assert pretrain.main([*TINY, *settings, "eval_save_outputs=[guesses]"]) == 2
    assert "predictions" in capsys.readouterr().err and not place.exists()
    assert pretrain.main([*TINY, *settings]) == 0
    assert draw.main([f"checkpoint={place}", "device=cpu", "example=37"]) == 2
    assert "example: got 37; allowed: 0..36" in capsys.readouterr().err
