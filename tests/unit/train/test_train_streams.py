"""Runs of a stream: they end when told, and continue exactly where they were."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from rich.console import Console

from shoal import config, train
from shoal.checkpoint import CheckpointStore
from shoal.data import KafkaFeed
from shoal.errors import ConfigError, DataError, InputError
from shoal.models.tasks import sampled_logits
from support.brokers import Brokers
from support.stopped_streams import stops_once_saved

EXAMPLES = 200
BATCH = 8
DAY_S = 86_400
START_S = 1_700_000_000


def example(n: int) -> dict[str, Any]:
    return {"u": n * 7 % 31, "new": n, "y": int(n * 7 % 31 > 15), "at": START_S + 600 * n}


@pytest.fixture(scope="module")
def brokers() -> Iterator[Brokers]:
    own = Brokers()
    for n in range(EXAMPLES):
        own.send("clicks", json.dumps(example(n)).encode(), 0)
    own.flush()
    yield own
    own.stop()


@pytest.fixture
def settings(brokers: Brokers, tmp_path: Path) -> dict[str, Any]:
    held_out = tmp_path / "eval.parquet"
    pq.write_table(pa.Table.from_pylist([example(n) for n in range(40)]), held_out)
    return {
        "name": "online",
        "threads": 1,
        "data": {
            "source": {
                "kind": "kafka",
                "stream": {"servers": list(brokers.servers), "topic": "clicks", "wait_s": 30.0},
                "eval_paths": [str(held_out)],
                "ids": {"u": {}, "new": {}},
                "label": "y",
                "time": "at",
            },
            "batch_size": BATCH,
        },
        "tables": {"default": {"dim": 2}},
        "model": {"kind": "deepfm", "hidden": [4]},
        "baselines": [],
        "logging": {"tensorboard": False},
        "checkpoint": {"every_steps": 4, "background": False},
        "output": {"dir": str(tmp_path / "runs")},
    }


class Step:
    """Calls something after a step."""

    def __init__(self, at: int, call: Any) -> None:
        self.at, self.call = at, call

    def begin(self, model: object) -> None:
        pass

    def after_step(self, step: int) -> None:
        if step == self.at:
            self.call()


def run(settings: dict[str, Any], *hooks: Step, resume: str | None = None) -> train.RunResult:
    console = Console(file=io.StringIO(), width=100)
    return train.run(config.from_mapping(settings), console=console, hooks=hooks, resume=resume)


def with_data(settings: dict[str, Any], **data: object) -> dict[str, Any]:
    return {**settings, "data": {**settings["data"], **data}}


def fails() -> None:
    raise InputError("a test", got="a stop", allowed="none", remedy="None.")


@pytest.mark.slow
def test_a_run_continues_as_if_it_had_not_stopped(settings: dict[str, Any], tmp_path: Path):
    settings = with_data(settings, max_examples=EXAMPLES)
    whole = run(settings)
    assert (whole.examples, whole.steps) == (EXAMPLES, EXAMPLES // BATCH)
    assert whole.rows["new"] == EXAMPLES
    settings["output"] = {"dir": str(tmp_path / "stopped")}
    with pytest.raises(InputError, match="a stop"):
        run(settings, Step(10, fails))
    (folder,) = (tmp_path / "stopped").iterdir()
    # Brokers may have moved, and patience may change; a topic may not.
    settings["data"]["source"]["stream"]["wait_s"] = 20.0
    again = run(settings, resume=str(folder))
    assert (again.examples, again.steps, again.rows) == (whole.examples, whole.steps, whole.rows)
    assert again.metrics["deepfm"]["log_loss"] == whole.metrics["deepfm"]["log_loss"]


@pytest.mark.slow
def test_sigterm_ends_a_stream_and_keeps_the_model(settings: dict[str, Any]):
    before = signal.getsignal(signal.SIGTERM)
    result = run(settings, Step(5, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert signal.getsignal(signal.SIGTERM) is before
    assert 5 <= result.steps <= EXAMPLES // BATCH
    newest = CheckpointStore(str(result.folder / "checkpoints")).latest()
    assert newest is not None and newest.step == result.steps
    # The rest of the stream trains in the next start.
    rest = with_data(settings, max_examples=None)
    hook = Step(EXAMPLES // BATCH, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert run(rest, hook, resume=str(result.folder)).examples == EXAMPLES


@pytest.mark.slow
def test_rows_expire_and_are_admitted_by_the_stream_s_time(settings: dict[str, Any]):
    """600 s an example: after 200 of them ids that came once are up to 1.4 days old."""
    settings = with_data(settings, max_examples=EXAMPLES)
    settings |= {
        "tables": {
            "default": {"dim": 2, "expiry": {"ttl_s": DAY_S}},
            "u": {"dim": 2, "admission": {"threshold": 7}},
        },
        "evict_every_s": 3600,
    }
    rows = run(settings).rows
    assert rows["u"] == 14, "200 = 6 x 31 + 14: so many come a seventh time"
    assert DAY_S // 600 <= rows["new"] <= DAY_S // 600 + 2 * 3600 // 600


def replayed(settings: dict[str, Any], **source: object) -> dict[str, Any]:
    data = {k: v for k, v in settings["data"]["source"].items() if k not in ("kind", "stream")}
    data |= {"kind": "parquet", "paths": data["eval_paths"], **source}
    return with_data(settings, source=data, replay={})


@pytest.mark.slow
def test_a_replay_of_a_file_is_resumed(settings: dict[str, Any], tmp_path: Path):
    whole = run(replayed(settings))
    assert whole.examples == 40
    settings["output"] = {"dir": str(tmp_path / "stopped")}
    settings["checkpoint"]["every_steps"] = 2
    with pytest.raises(InputError):
        run(replayed(settings), Step(3, fails))
    (folder,) = (tmp_path / "stopped").iterdir()
    again = run(replayed(settings), resume=str(folder))
    assert again.examples == 40
    assert again.metrics["deepfm"]["log_loss"] == whole.metrics["deepfm"]["log_loss"]


@pytest.mark.slow
def test_the_config_of_the_page_trains_publishes_and_names_bad_records(
    brokers: Brokers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    page = Path(__file__).parents[3] / "docs" / "guide" / "online.md"
    text = page.read_text().partition("```yaml\n")[2].partition("```")[0]
    settings = yaml.safe_load(text)
    count, now_s = 1100, int(time.time())
    rows = [
        {"user": n % 50, "item": f"i{n % 20}", "seen": [n % 20], "price": n / 100,
         "clicked": n % 2, "at": now_s - 3600 + n}
        for n in range(count)
    ]  # fmt: skip
    for n, row in enumerate(rows):
        if n == 30:
            brokers.send("page", b"poison", 0)
        brokers.send("page", json.dumps(row).encode(), n % 4)
    brokers.flush()
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.Table.from_pylist(rows[:100]), "held_out.parquet")
    stream = settings["data"]["source"]["stream"]
    stream |= {"servers": list(brokers.servers), "topic": "page", "begin": "earliest"}
    settings["data"]["max_examples"] = count
    settings["publish"] |= {"address": "tcp://127.0.0.1:0", "linger_s": 0.1}
    result = run(settings)
    assert result.examples == count
    assert result.rows["user"] == 50, "each came three times"
    (line,) = Path("bad-records.jsonl").read_text().splitlines()
    assert json.loads(line)["file"] == "page/0"
    # The same command finds nothing left to do.
    assert run(settings).steps == result.steps


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 4, 30])
def test_a_pipeline_saves_its_last_steps_while_a_stream_is_silent(
    settings: dict[str, Any], accumulation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It has begun with batches that nothing follows; the end of the run saves nothing.

    Batches that are no whole step wait for others, which do not come.
    """
    whole = EXAMPLES // BATCH // accumulation
    settings["data"]["source"]["stream"] |= {"wait_s": 1.0, "idle_s": None if whole else 8.0}
    settings["checkpoint"] = {"every_s": 1.0, "dir": str(tmp_path / "saves")}
    settings |= {"distributed": {"staleness": 1}, "accumulation": accumulation}
    settings["output"]["save_model"] = False
    read, came = KafkaFeed.read, [0]

    def reads(feed: KafkaFeed, most: int, timeout_s: float) -> Any:
        """Batches are full, however slow the brokers are."""
        found = read(feed, most, timeout_s if came[0] == EXAMPLES else 60.0)
        came[0] += 0 if found is None else found.rows_N.numel()
        return found

    monkeypatch.setattr(KafkaFeed, "read", reads)
    saves = stops_once_saved(str(tmp_path / "saves"), lambda one: one.step == whole)
    with saves if whole else nullcontext():
        result = run(settings)
    assert result.examples == EXAMPLES
    assert result.steps == -(-EXAMPLES // BATCH // accumulation)
    newest = CheckpointStore(str(tmp_path / "saves")).latest()
    assert (0 if newest is None else newest.step) == whole


@pytest.mark.slow
def test_bad_records_of_before_a_resume_count(settings: dict[str, Any], tmp_path: Path):
    with_bad = Brokers()
    for n in range(EXAMPLES):
        value = b"?" if n in (0, 1, EXAMPLES - 2, EXAMPLES - 1) else json.dumps(example(n)).encode()
        with_bad.send("clicks", value, 0)
    with_bad.flush()
    settings["data"]["source"]["stream"]["servers"] = list(with_bad.servers)
    settings = with_data(
        settings,
        max_examples=EXAMPLES,
        quarantine={"path": str(tmp_path / "bad.jsonl"), "most_rows": 3},
    )
    with pytest.raises(InputError, match="a stop"):
        run(settings, Step(10, fails))
    (folder,) = (tmp_path / "runs").iterdir()
    with pytest.raises(DataError, match="bad rows of the data: got 4"):
        run(settings, resume=str(folder))
    with_bad.stop()


@pytest.mark.slow
def test_a_silent_stream_does_not_hold_up_saves(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """No batch comes after the last record, and the save of what it taught is due then."""
    monkeypatch.setattr("shoal.data.loader._WAITS_S", 0.1)
    settings["checkpoint"] = {"every_s": 1.0, "dir": str(tmp_path / "saves")}
    with stops_once_saved(str(tmp_path / "saves"), lambda one: one.step == EXAMPLES // BATCH):
        run(settings)


def test_a_run_on_files_is_not_continued_as_a_replay(settings: dict[str, Any]):
    """Its place in the files says nothing about the order of time."""
    files = replayed(settings) | {"checkpoint": {"every_steps": 2}}
    files["data"] |= {"replay": None, "max_examples": 16}
    folder = run(files).folder
    files["data"] |= {"replay": {}}
    with pytest.raises(ConfigError, match=r"data\.replay"):
        run(files, resume=str(folder))


def test_logits_of_a_sampled_stream():
    rates_B = torch.tensor([0.25, 1.0])
    expected = torch.tensor([-math.log(0.25), 0.5])
    torch.testing.assert_close(sampled_logits(torch.tensor([0.0, 0.5]), rates_B), expected)
    of_tasks = sampled_logits(torch.tensor([[0.0, 1.0], [0.5, 2.0]]), rates_B)
    corrected = torch.tensor([[1.386294, 2.386294], [0.5, 2.0]])
    torch.testing.assert_close(of_tasks, corrected)
    # Odds of 1 to 9, negatives kept with chance 1/9: one of two is positive.
    (even,) = sampled_logits(torch.tensor([math.log(1 / 9)]), torch.tensor([1 / 9])).sigmoid()
    assert even == pytest.approx(0.5)


@pytest.mark.parametrize("rate", [0.1, "kept", None])
def test_a_model_of_sampled_negatives_predicts_chances_of_all_examples(
    settings: dict[str, Any], tmp_path: Path, rate: object
):
    """One example of ten is positive, and of ten negatives one is kept."""
    sampled = tmp_path / "sampled.parquet"
    labels = ([1] * 10 + [0] * 9) * 100
    columns = {"u": [1] * 1900, "new": [2] * 1900, "y": labels, "at": [START_S] * 1900}
    pq.write_table(pa.table({**columns, "kept": [0.1] * 1900}), sampled)
    held_out = tmp_path / "all.parquet"
    every = ([1] + [0] * 9) * 30
    columns = {"u": [1] * 300, "new": [2] * 300, "y": every, "at": [START_S] * 300}
    pq.write_table(pa.table({**columns, "kept": [0.1] * 300}), held_out)
    source = {"paths": [str(sampled)], "eval_paths": [str(held_out)], "sample_rate": rate}
    settings = replayed(settings, **source) | {"dense_optimizer": {"lr": 0.02}, "checkpoint": {}}
    found = run(settings).metrics["deepfm"]["mean_prediction"]
    expected = 10 / 19 if rate is None else 0.1
    assert found == pytest.approx(expected, rel=0.15)
