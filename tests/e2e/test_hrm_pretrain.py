"""pretrain.py and evaluate.py of examples/hrm: whole runs, resumed, on one rank and on two."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import build_sudoku
import evaluate
import pretrain
from hrm.evaluating import evaluate as evaluated
from hrm.ranks import joined
from hrm.rule_task import RuleTask, build_rule_task
from hrm.running import Run
from hrm.settings import read_evaluate, read_pretrain
from shoal.checkpoint import CheckpointStore, Manifest, Saving, begin
from support.hrm_runs import STEPS, TEST, TINY, build, check_equal, restored, trained
from support.ranks import run_ranks

pytestmark = pytest.mark.slow

PROGRAM = Path(pretrain.__file__)
ONE = ["device=cpu", "threads=1"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return "data_path=" + build(tmp_path_factory.mktemp("sudoku"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, data: str) -> tuple[str, dict[str, float]]:
    """A run on one rank: where it was saved, and its last figures."""
    place = str(tmp_path_factory.mktemp("whole") / "run")
    steps, finished, figures = trained(data, f"checkpoint_path={place}")
    assert (steps, finished, figures["count"]) == (STEPS, True, TEST)
    return place, figures


def resumed(data: str, place: str) -> None:
    """The same run in three processes' worth of pieces: one ends inside an iteration."""
    where = f"checkpoint_path={place}"
    assert trained(data, where, "max_steps=7")[:2] == (7, False)
    assert trained(data, where, "max_steps=11", "resume=must")[:2] == (11, False)
    assert trained(data, where)[:2] == (STEPS, True)


def test_a_run_goes_on_bit_for_bit(tmp_path: Path, data: str, whole: tuple[str, Any]) -> None:
    place = str(tmp_path / "pieces")
    resumed(data, place)
    want = restored(data, f"checkpoint_path={whole[0]}")
    check_equal(restored(data, f"checkpoint_path={place}"), want, exactly=True)
    assert want["learner"]["step"] == STEPS and want["learner"]["carry"] is not None
    lines = Path(place, "log.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == sorted(steps) and {5, 7, 10, 11, 20} <= set(steps)


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[tuple[int, int]] = []
    with joined("cpu", 1) as mesh:
        run = Run(read_pretrain([*TINY, data, f"checkpoint_path={tmp_path}"]), mesh)

        def begun(*given: Any, **named: Any) -> Saving:
            saving, at = begin(*given, **named), run.learner.step
            wait = saving.wait

            def told(timeout_s: float | None = None) -> Manifest:
                waited.append((at, run.learner.step))
                return wait(timeout_s)

            monkeypatch.setattr(saving, "wait", told)
            return saving

        monkeypatch.setattr("hrm.saving.begin", begun)
        run.run()
    # The first is waited for when the second is due, the second in the end.
    assert waited == [(10, 20), (20, 20)]
    assert CheckpointStore(tmp_path).latest() is not None


def test_the_same_command_goes_on_without_a_name(
    tmp_path: Path, data: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert trained(data, "max_steps=7")[:2] == (7, False)
    assert trained(data, "resume=must", "log_every=4")[:2] == (STEPS, True)
    (place,) = tmp_path.glob("checkpoints/*/*")
    assert re.fullmatch(r"hrm_v1 [0-9a-f]{8}", place.name)
    assert pretrain.main([*TINY, data, "lr=2e-2", "resume=must"]) == 2
    assert "holds no checkpoint" in capsys.readouterr().err


def test_a_run_without_checkpoints_cannot_have_to_go_on(
    data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pretrain.main([*TINY, data, "save_checkpoints=false", "resume=must"]) == 2
    assert "resume: got must, with save_checkpoints=false" in capsys.readouterr().err


def test_a_run_goes_on_in_its_run_of_wandb(
    tmp_path: Path, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[dict[str, Any]] = []

    class Logged:
        id = "r1"

        def log(self, scalars: dict[str, float], step: int) -> None:
            begun[-1].setdefault("steps", []).append(step)

        def finish(self) -> None:
            begun[-1]["finished"] = True

    def init(**given: Any) -> Logged:
        begun.append(given)
        return Logged()

    wandb = ModuleType("wandb")
    wandb.__spec__ = ModuleSpec("wandb", None)
    monkeypatch.setattr(wandb, "init", init, raising=False)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    place = [data, "wandb=true", "run_name=n", f"checkpoint_path={tmp_path}"]
    trained(*place, "max_steps=7")
    trained(*place)
    first, second = begun
    assert "resume" not in first and (first["name"], first["finished"]) == ("n", True)
    assert (second["id"], second["resume"]) == ("r1", "allow")
    assert max(first["steps"]) == 7 and {10, 20} <= set(second["steps"])


def test_a_run_may_go_on_in_another_forward_dtype(tmp_path: Path, data: str) -> None:
    place = f"checkpoint_path={tmp_path}"
    trained(data, place, "max_steps=2")
    carry = restored(data, place, "arch.forward_dtype=float32")["learner"]["carry"]
    assert carry["z_H_BTD"].dtype == carry["z_L_BTD"].dtype == torch.float32


def test_a_run_does_not_go_on_with_other_data(
    tmp_path: Path, data: str, whole: tuple[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    place, source = f"checkpoint_path={whole[0]}", data.partition("=")[2]
    sizes = ["--train", "41", "--test", "37", "--num-aug", "2"]
    build_sudoku.main(["--output-dir", str(tmp_path / "b"), "--box", "2", "--clues", "8", *sizes])
    shutil.copytree(source, tmp_path / "a")
    (tmp_path / "a" / "identifiers.json").write_text('["nobody"]')
    for folder, said in (("a", r"names of the puzzle ids"), ("b", r"total_groups of .*got 41.*40")):
        assert pretrain.main([*TINY, f"data_path={tmp_path / folder}", place]) == 2
        assert re.search(said, error := capsys.readouterr().err), error
        assert "data that the run began with" in error
    assert evaluate.main([f"checkpoint={whole[0]}", f"data_path={tmp_path / 'a'}", *ONE]) == 2
    assert "ids mean other puzzles" in capsys.readouterr().err


def test_a_changed_setting_counts_from_where_a_run_goes_on(
    tmp_path: Path, data: str, whole: tuple[str, Any]
) -> None:
    shutil.copytree(whole[0], tmp_path / "run")
    place = f"checkpoint_path={tmp_path / 'run'}"
    state = restored(data, place, "weight_decay=0.25", "beta2=0.5")["learner"]["dense"]
    (group,) = state["param_groups"]
    assert group["weight_decay"] == 0.25 and tuple(group["betas"]) == (0.9, 0.5)
    assert state["state"][0]["step"] == STEPS


def test_evaluation_says_what_pretraining_said(
    whole: tuple[str, dict[str, float]], capsys: pytest.CaptureFixture[str]
) -> None:
    place, figures = whole
    assert evaluate.main([f"checkpoint={place}", *ONE, f"output={place}/made/said.json"]) == 0
    assert f"exact {figures['exact_accuracy']:.4f}, cells {figures['accuracy']:.4f}" in (
        capsys.readouterr().out
    )
    said = json.loads(Path(place, "made", "said.json").read_text())
    assert (said["step"], said["figures"]["all"]) == (STEPS, figures)
    # What fills up the last batch counts nowhere, so batches of another size say the same.
    again = evaluated(read_evaluate([f"checkpoint={place}", "global_batch_size=5", *ONE]))
    assert again["all"] == pytest.approx(figures)
    # An earlier checkpoint, in other batches, with rows placed otherwise, of fewer examples.
    other = ["global_batch_size=5", "puzzle_emb_sharding=row_wise", "eval_examples=9", *ONE]
    first = evaluated(read_evaluate([f"checkpoint={place}/step-{10:012d}-full", *other]))
    assert first["all"]["count"] == 9 and first["all"]["lm_loss"] != figures["lm_loss"]


def ran_on_ranks(data: str, place: str) -> dict[str, float]:
    """On each of two ranks: a run in pieces, then one that goes on with a checkpoint of one."""
    with joined("cpu", 1):
        resumed(data, place)
        trained(data, f"checkpoint_path={place}-moved", "resume=must")
        return dict(evaluated(read_evaluate([f"checkpoint={place}", *ONE]))["all"])


@pytest.mark.multiproc
def test_two_ranks_train_the_model_of_one(
    tmp_path: Path, data: str, whole: tuple[str, dict[str, float]]
) -> None:
    environ = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    straight, pieces = (str(tmp_path / name) for name in ("straight", "pieces"))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    traces = tmp_path / "traces"
    settings = [*TINY, data, "puzzle_emb_sharding=row_wise", f"checkpoint_path={straight}"]
    settings.append(f"profile={traces}")
    command = [*launcher, "--nproc-per-node", "2", str(PROGRAM), *settings]
    environ["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=250)
    assert done.returncode == 0, done.stderr
    assert "steps/s" in done.stdout and len(re.findall("finished after", done.stdout)) == 1
    assert re.search(r" a rank, \d+% communication but for DDP's$", done.stdout, flags=re.MULTILINE)
    assert sorted(path.name for path in traces.iterdir()) == ["rank0.json", "rank1.json"]
    rows = map(json.loads, Path(straight, "log.jsonl").read_text().splitlines())
    shares = [row["train/communication_share"] for row in rows if "train/steps_per_s" in row]
    assert shares and all(0 < share <= 1 for share in shares)
    # What one rank begins, two end: slots are cut anew by their global places.
    trained(data, f"checkpoint_path={pieces}-moved", "max_steps=7")
    found = run_ranks(2, ran_on_ranks, data, pieces)
    want = restored(data, f"checkpoint_path={whole[0]}")
    on_two = restored(data, f"checkpoint_path={straight}")
    check_equal(on_two, want, exactly=False)
    check_equal(restored(data, f"checkpoint_path={pieces}"), on_two, exactly=True)
    check_equal(restored(data, f"checkpoint_path={pieces}-moved"), want, exactly=False)
    assert found[0] == found[1] == pytest.approx(whole[1], rel=1e-3)


@pytest.mark.parametrize("change", ["arch.bootstrap=false", "arch=trm"])
def test_variants_train(tmp_path: Path, data: str, change: str) -> None:
    place = [data, f"checkpoint_path={tmp_path}", "save_checkpoints=false"]
    short = ["max_steps=2", "arch.puzzle_emb_len=2"]
    assert pretrain.main([change, *TINY, *place, *short]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all_config.yaml", "log.jsonl"]


def test_time_ends_a_run_with_an_evaluation(
    tmp_path: Path, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = [data, f"checkpoint_path={tmp_path}", "max_seconds=1e-6", "eval_examples=8"]
    assert pretrain.main([*TINY, *limit]) == 0
    assert "eval all after step 0" in (said := capsys.readouterr().out)
    assert "stopped after step 0 of 20" in said and "(8 examples" in said


def test_defaults_are_hrms() -> None:
    config = read_pretrain(["arch=trm", "lr=2e-4"])
    assert (config.global_batch_size, config.epochs, config.eval_interval) == (768, 100000, 10000)
    assert (config.lr, config.puzzle_emb_lr, config.weight_decay) == (2e-4, 1e-2, 0.1)
    assert (config.arch.H_cycles, config.arch.L_cycles, config.arch.ema_decay) == (3, 6, 0.999)
    config = read_pretrain(["arch.hidden_size=64"])
    assert (config.arch.puzzle_emb_ndim, config.arch.forward_dtype) == (64, "bfloat16")
    assert config.arch.bootstrap and config.arch.H_layers == 4 and config.arch.ema_decay is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("eval_interval=3", r"epochs: got 8 with eval_interval 3.*Set epochs=9"),
        ("global_batch_size=9999", r"got 160: 4 epochs of 40 groups.*Raise eval_interval"),
        ("lrr=1", r"got 'lrr'; allowed: .*\blr\b"),
        ("arch.H_layer=1", r"got 'arch.H_layer'; allowed: .*arch\.H_layers"),
        ("arch=tmr", r"Could not find 'arch/tmr'"),
        ("seed=4294967296", r"config key seed"),
        ("beta1=1.5", r"config key beta1: got 1.5"),
        ("arch.num_heads=3", r"hidden_size of the model: got 16 for 3 heads"),
        ("data_path=/nowhere", r"file /nowhere/train/dataset.json: got none.*build_sudoku"),
        ("resume=must", r"holds no checkpoint"),
        ("wandb=true", r"pip install wandb"),
    ],
)
def test_bad_settings_end_before_the_first_step(
    tmp_path: Path, data: str, capsys: pytest.CaptureFixture[str], change: str, said: str
) -> None:
    place = f"checkpoint_path={tmp_path / 'run'}"
    assert pretrain.main([*TINY, data, place, change]) == 2
    assert re.search(said, capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


def test_folders_that_cannot_be_made_are_named(
    tmp_path: Path, data: str, whole: tuple[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    inside = tmp_path / "file" / "run"
    assert pretrain.main([*TINY, data, "save_checkpoints=false", f"log_path={inside}"]) == 2
    assert re.search(r"folder of logs .*file/run", capsys.readouterr().err)
    assert evaluate.main([f"checkpoint={whole[0]}", f"output={inside}/x.json", *ONE]) == 2
    assert re.search(r"folder to write to", capsys.readouterr().err)


def test_a_place_in_use_is_not_taken_over(
    data: str, whole: tuple[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    place = f"checkpoint_path={whole[0]}"
    for change, said in (
        ("resume=never", r"resume: got never.*another checkpoint_path"),
        ("arch.L_layers=2", r"L_level"),
        ("arch.ema_decay=null", r"averaged parameters.*arch.ema_decay"),
        ("seed=1", r"state of the sampler: got seed=0"),
        ("global_batch_size=8", r"global_batch=16; allowed.*global_batch=8"),
    ):
        assert pretrain.main([*TINY, data, place, change]) == 2
        assert re.search(said, capsys.readouterr().err), change


def beyond(root: Path) -> None:
    file = root / "train" / "all__puzzle_identifiers.npy"
    np.save(file, np.load(file) + 7)


def short(root: Path) -> None:
    (root / "test" / "all__labels.npy").unlink()


def longer(root: Path) -> None:
    file = root / "train" / "dataset.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "seq_len": 81}))


def grouped(root: Path) -> None:
    file = root / "test" / "dataset.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "total_groups": 5}))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (beyond, r"puzzle ids of set 'all'.*got 7\.\.7; allowed: 0\.\.0"),
        (short, r"all__labels\.npy.*Copy the whole folder"),
        (longer, r"inputs of set 'all'.*seq_len"),
        (grouped, r"total_groups of .*got 5; allowed: 37"),
    ],
)
def test_bad_data_ends_before_the_first_step(
    tmp_path: Path,
    data: str,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], None],
    said: str,
) -> None:
    root = tmp_path / "data"
    shutil.copytree(data.partition("=")[2], root)
    spoil(root)
    place = [f"data_path={root}", f"checkpoint_path={tmp_path / 'run'}"]
    assert pretrain.main([*TINY, *place]) == 2
    assert re.search(said, capsys.readouterr().err)


def test_evaluation_refuses_what_does_not_fit(
    tmp_path: Path, whole: tuple[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    build_rule_task(str(tmp_path / "rules"), RuleTask(ids=4))
    (tmp_path / "none").mkdir()
    for settings, said in (
        ([f"checkpoint={whole[0]}", f"data_path={tmp_path / 'rules'}"], r"vocab_size of .*got 7"),
        ([f"checkpoint={tmp_path / 'none'}"], r"no checkpoint|checkpoint"),
        ([], r"checkpoint: got nothing.*checkpoint=checkpoints"),
    ):
        assert evaluate.main([*settings, "device=cpu"]) == 2
        assert re.search(said, capsys.readouterr().err), settings
