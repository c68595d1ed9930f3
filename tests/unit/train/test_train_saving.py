"""Pieces of going on with a run: figures so far, logs, and which start of a job this is."""

from __future__ import annotations

import errno
import json
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from shoal import config
from shoal.checkpoint import CheckpointStore, Contents, save
from shoal.comm.launch_environment import Attempt, attempt, detect
from shoal.config.tree import CheckpointSettings
from shoal.data import Batch
from shoal.errors import CheckpointError, ConfigError, InputError
from shoal.ragged import KeyedRagged
from shoal.telemetry import JsonLines
from shoal.train import saving
from shoal.train import summary as recording
from shoal.train.folder import RunFolder, checkpoint_of
from shoal.train.publishing import Publishing
from shoal.train.ranks import ALONE
from shoal.train.resuming import find_beginning, job_of
from shoal.train.runs import run
from shoal.train.saving import Saver
from shoal.train.summary import Recorder
from support.ranks import launcher_variables
from support.small_runs import small_run

NAMES = dict.fromkeys(("a", "b"), 0)


def batch_of(seed: int) -> tuple[Batch, dict[str, list[torch.Tensor]]]:
    drawn = torch.Generator().manual_seed(seed)
    labels_B = (torch.rand(7, generator=drawn) < 0.4).float()
    ids = KeyedRagged.from_lengths(("f",), torch.arange(7), torch.ones(1, 7, dtype=torch.int64))
    batch = Batch(ids=ids, dense=None, labels=labels_B, weights=None, event_time_s=0)
    return batch, {name: [torch.randn(7, generator=drawn)] for name in NAMES}


def recorded(recorder: Recorder, seeds: range) -> Recorder:
    for seed in seeds:
        batch, logits = batch_of(seed)
        recorder.add([batch], logits)
        if seed % 4 == 3:
            recorder.point({"t": seed}, 8 * seed)
    return recorder


@pytest.mark.parametrize("together", [1 << 18, 20])
def test_figures_go_on_to_the_last_bit(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_TOGETHER", together)
    whole = recorded(Recorder(NAMES), range(12))
    for stop in (2, 4, 7):
        first = recorded(Recorder(NAMES), range(stop))
        state, own = first.state()
        again = Recorder(NAMES)
        again.load_state(state, own)
        recorded(again, range(stop, 12))
        assert again.curves == whole.curves
        assert (again.examples, again.ids, again.base_rate) == (84, 84, whole.base_rate)
        # Asking for the state changes no figure.
        assert recorded(first, range(stop, 12)).curves == whole.curves


def test_figures_shown_between_points_change_none_to_come() -> None:
    """They are shown by the clock, which differs from run to run."""
    quiet, shown = Recorder(NAMES), Recorder(NAMES)
    for start in range(0, 32, 2):
        recorded(quiet, range(start, start + 2))
        recorded(shown, range(start, start + 2))
        loss, auc = shown.figures()
        assert set(loss) == set(auc) == set(NAMES)
    assert shown.curves == quiet.curves
    assert shown.figures() == quiet.figures()


def test_what_waits_for_its_sums_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_TOGETHER", 20)
    recorder = Recorder(NAMES)
    for seed in range(9):
        recorder.add([batch_of(seed)[0]], batch_of(seed)[1])
        assert recorder.state()[1]["labels"].numel() < 20


def test_without_a_part_of_its_own_the_first_rank_has_all_figures() -> None:
    first = recorded(Recorder(NAMES), range(6))
    state, _ = first.state()
    again = Recorder(NAMES)
    again.load_state(state, None)
    assert again.examples == 42
    assert again.figures()[1] == first.figures()[1]
    assert again.base_rate == first.base_rate


def test_a_log_goes_on_where_it_was_at_a_step(tmp_path: Path) -> None:
    file, now = tmp_path / "log.jsonl", [100.0]
    log = JsonLines(file, lambda: now[0])
    for step in (1, 2, 3):
        now[0] += 10
        log.write(step, {"loss": step})
    log.close()
    with file.open("a") as text:
        text.write('{"step": 4, "ti')
    now[0] = 500.0
    log = JsonLines(file, lambda: now[0], continue_after=2)
    now[0] += 1
    log.write(3, {"loss": 7})
    log.close()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["step"], row["time_s"], row["loss"]) for row in rows] == [
        (1, 10.0, 1.0),
        (2, 20.0, 2.0),
        (3, 21.0, 7.0),
    ]


def test_a_log_that_cannot_be_rewritten_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the disk is full, or the process is killed just then."""
    file = tmp_path / "log.jsonl"
    log = JsonLines(file)
    log.write(1, {"loss": 1})
    log.close()
    before = file.read_text()

    def full(path: Path, *args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space"):
        JsonLines(file, continue_after=1)
    assert file.read_text() == before


def test_torchrun_says_which_start_this_is() -> None:
    place = launcher_variables(1, 2, 29500)
    assert attempt({}) is None
    assert attempt(place) is None
    assert detect(place).restarts == 0
    again = {**place, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "2"}
    found = attempt(again)
    assert found is not None
    assert found.restarts == detect(again).restarts == 2
    assert found.job == f"none of agent {os.getppid()}"


def test_a_job_started_again_says_that_it_starts_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config.from_mapping(
        {"name": "tiny", "data": {"source": "flights"}, "output": {"dir": str(tmp_path)}}
    )
    first = find_beginning(settings, None, Attempt("a job", 0))
    assert (first.checkpoint, caplog.text) == (None, "")
    assert find_beginning(settings, None, Attempt("a job", 1)).folder == first.folder
    assert "no checkpoint of" in caplog.text
    caplog.clear()
    other = find_beginning(settings, None, Attempt("another", 1))
    assert (other.checkpoint, other.folder == first.folder) == (None, False)
    assert "start 2 of this job finds no run folder of an earlier one" in caplog.text
    assert "put output.dir on storage that all hosts share" in caplog.text


@pytest.mark.parametrize(
    ("shuffle", "position", "examples", "fine"),
    [
        ("always", 10, 100, True),
        ("always", 10, 101, False),
        ("replays", 10, 101, True),  # more behind what the first pass goes through in order
        ("replays", 101, 101, False),
        ("never", 100, 130, False),  # the first pass is over: a batch of it was short
        ("never", 10, 99, False),
    ],
)
def test_a_run_goes_on_with_the_data_that_it_was_begun_with(
    tmp_path: Path, shuffle: str, position: int, examples: int, fine: bool
) -> None:
    settings = config.from_mapping(
        {
            "name": "tiny",
            "data": {"source": "flights", "shuffle": shuffle, "epochs": 2},
            "output": {"dir": str(tmp_path / "runs")},
            "checkpoint": {"dir": str(tmp_path / "saved")},
        }
    )
    job = job_of(settings, RunFolder(tmp_path / "runs" / "old"), 100)
    state = {**job, "run_state": {"position": position}}
    save(tmp_path / "saved", Contents(state=state), step=1, position=position)
    if fine:
        found = find_beginning(settings, None, None, examples)
        assert found.checkpoint == "step-000000000001-full"
        return
    with pytest.raises(ConfigError, match=rf"got {examples}; allowed: the 100 that"):
        find_beginning(settings, None, None, examples)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("batch", "fine"), [(50, True), (60, False)])
def test_a_pass_that_is_over_continues_in_what_was_added(
    tmp_path: Path, batch: int, fine: bool
) -> None:
    settings = in_dir(tmp_path, tmp_path / "saved", batch_size=batch)
    begun(settings, 100)
    if fine:
        assert find_beginning(settings, None, None, 150).checkpoint == "step-000000000001-full"
    else:
        with pytest.raises(ConfigError, match="got 150; allowed: the 100 that"):
            find_beginning(settings, None, None, 150)


def in_dir(tmp_path: Path, folder: Path | None, **data: Any) -> config.RunConfig:
    """A run of 100 examples a pass, whose checkpoints are in a folder."""
    return config.from_mapping(
        {
            "name": "tiny",
            "data": {"source": "flights", **data},
            "output": {"dir": str(tmp_path / "runs")},
            "checkpoint": {"dir": None if folder is None else str(folder)},
        }
    )


def begun(settings: config.RunConfig, position: int = 10) -> tuple[RunFolder, Path]:
    """A run that was interrupted, and where its checkpoint is."""
    beginning = find_beginning(settings, None, None, 100)
    state = {**job_of(settings, beginning.folder, 100), "run_state": {"position": position}}
    save(beginning.url, Contents(state=state), step=1, position=position)
    return beginning.folder, Path(beginning.url)


def test_passes_that_have_begun_are_not_taken_back(tmp_path: Path) -> None:
    folder, _ = begun(in_dir(tmp_path, tmp_path / "saved", epochs=3), 110)
    before = folder.config.read_text()
    fewer = in_dir(tmp_path, tmp_path / "saved", epochs=1)
    with pytest.raises(ConfigError, match=r"data\.epochs.*got 1; allowed: 2 or more"):
        find_beginning(fewer, str(folder.path), None, 100)
    assert folder.config.read_text() == before
    fewer = in_dir(tmp_path, tmp_path / "saved", epochs=2)
    assert find_beginning(fewer, str(folder.path), None, 100).checkpoint is not None


def test_a_run_remembers_where_its_checkpoints_are(tmp_path: Path) -> None:
    folder, saved = begun(in_dir(tmp_path, tmp_path / "saved"))
    for _ in range(2):  # the command that resumes need not say it again, nor the next one
        found = find_beginning(in_dir(tmp_path, None), str(folder.path), None, 100)
        assert (found.url, found.checkpoint) == (str(saved), "step-000000000001-full")
    assert checkpoint_of(folder) == str(saved / "step-000000000001-full")


@pytest.mark.parametrize("first", ["inside", "saved"])
def test_a_run_to_continue_without_checkpoints_says_that_it_starts_over(
    tmp_path: Path, first: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = in_dir(tmp_path, None if first == "inside" else tmp_path / first)
    folder = find_beginning(settings, None, None, 100).folder
    assert find_beginning(settings, str(folder.path), None, 100).checkpoint is None
    assert f"no checkpoint of {folder.path}: it starts over" in caplog.text


@pytest.mark.parametrize("first", ["inside", "saved"])
def test_no_checkpoints_are_left_behind(tmp_path: Path, first: str) -> None:
    folder, saved = begun(in_dir(tmp_path, None if first == "inside" else tmp_path / first))
    moved = in_dir(tmp_path, tmp_path / "moved")
    with pytest.raises(CheckpointError, match=f"allowed: {saved}"):
        find_beginning(moved, str(folder.path), None, 100)
    shutil.copytree(saved, tmp_path / "moved")
    if first == "inside":  # `shoal eval` would read these, and not the newer ones
        with pytest.raises(CheckpointError, match=f"allowed: {saved}"):
            find_beginning(moved, str(folder.path), None, 100)
        shutil.rmtree(saved)
    assert find_beginning(moved, str(folder.path), None, 100).checkpoint is not None
    assert checkpoint_of(folder) == str(tmp_path / "moved" / "step-000000000001-full")
    named = in_dir(tmp_path, saved)
    saved.parent.mkdir(exist_ok=True)
    shutil.move(tmp_path / "moved", saved)
    assert find_beginning(named, str(folder.path), None, 100).checkpoint is not None


@pytest.mark.parametrize("last_batch", ["merge", "drop"])
def test_a_setting_that_is_newer_than_a_run_has_its_default(
    tmp_path: Path, last_batch: str
) -> None:
    def settings(**data: str) -> config.RunConfig:
        return config.from_mapping(
            {
                "name": "tiny",
                "data": {"source": "flights", **data},
                "output": {"dir": str(tmp_path / "runs")},
                "checkpoint": {"dir": str(tmp_path / "saved")},
            }
        )

    job = job_of(settings(), RunFolder(tmp_path / "runs" / "old"), 100)
    old = job["config"].replace("  last_batch: merge\n", "")
    assert old != job["config"]
    state = {**job, "config": old, "run_state": {"position": 10}}
    save(tmp_path / "saved", Contents(state=state), step=1, position=10)
    differs = pytest.raises(ConfigError, match=r"data\.last_batch='drop', not 'merge'")
    with nullcontext() if last_batch == "merge" else differs:
        found = find_beginning(settings(last_batch=last_batch), None, None, 100)
        assert found.checkpoint == "step-000000000001-full"


def test_a_resumed_run_may_be_published_elsewhere(tmp_path: Path) -> None:
    tree = {
        "name": "tiny",
        "data": {"source": "flights"},
        "output": {"dir": str(tmp_path / "runs")},
        "checkpoint": {"dir": str(tmp_path / "saved")},
    }
    job = job_of(config.from_mapping(tree), RunFolder(tmp_path / "runs" / "old"), 100)
    state = {**job, "run_state": {"position": 10}}
    save(tmp_path / "saved", Contents(state=state), step=1, position=10)
    settings = config.from_mapping({**tree, "publish": {"address": "tcp://127.0.0.1:7100"}})
    found = find_beginning(settings, None, None, 100)
    assert found.checkpoint == "step-000000000001-full"


@pytest.mark.parametrize("resume", ["auto", "never", "must"])
def test_rank_0_on_another_host_says_what_it_needs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, resume: str
) -> None:
    """Neither run folders nor checkpoint.dir of the host before are on this one."""
    here = tmp_path / "disk of this host"
    settings = config.from_mapping(
        {
            "name": "tiny",
            "data": {"source": "flights"},
            "output": {"dir": str(tmp_path / "runs")},
            "checkpoint": {"dir": str(here), "resume": resume},
        }
    )
    if resume != "must":
        assert find_beginning(settings, None, Attempt("a job", 0)).checkpoint is None
    assert caplog.text == "", "at the first start nothing is amiss"
    refused = pytest.raises(CheckpointError, match="none in") if resume == "must" else nullcontext()
    with refused:
        assert find_beginning(settings, None, Attempt("moved", 1)).checkpoint is None
    said = f"finds no checkpoint in {here}: it starts over" in caplog.text
    said = said and "put checkpoint.dir on storage that all hosts share" in caplog.text
    assert said == (resume != "never")


class Silence:
    """A saver at step 5 of a stream that is silent, with a clock and saves of its own."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.saves = [0.0], list[Any]()
        run_state: Any = SimpleNamespace(
            learners=(), steps=5, position=40, ranks=ALONE,
            state=lambda: ({}, {}), check=lambda: None,
        )  # fmt: skip
        monkeypatch.setattr("shoal.train.saving.begin", self._begin)
        settings = CheckpointSettings(every_s=10.0)
        clock = self.now_s
        self.run_state = run_state
        self.saver = Saver(str(tmp_path), settings, run_state, job={}, clock=lambda: clock[0])

    def _begin(self, *_: object, step: int, kind: str, **__: object) -> Any:
        save = SimpleNamespace(done=False, error=None, name="a save", cursors={}, step=step)

        def wait() -> Any:
            if save.error is not None:
                raise save.error
            return SimpleNamespace(step=step, kind=kind)

        save.wait, save.release, save.stop_throttling = wait, lambda: None, lambda: None
        self.saves.append(save)
        return save

    def polled(self, now_s: float) -> bool:
        """Whether the stream pauses, which it does if it is asked to."""
        self.now_s[0] = now_s
        asked = [self.saver.overdue() for _ in range(3)]
        assert len(set(asked)) == 1, "asking changes nothing"
        if asked[0]:
            self.saver.silent()
        return asked[0]


def test_a_save_that_fails_while_a_stream_is_silent_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silence = Silence(tmp_path, monkeypatch)
    assert [silence.polled(now_s) for now_s in (9.0, 10.0, 11.0)] == [False, True, False]
    (first,) = silence.saves
    assert silence.polled(20.0) and len(silence.saves) == 1, "it is still being written"
    silence.run_state.steps = 6
    assert silence.polled(30.0) and len(silence.saves) == 1, "one at a time"
    first.done, first.error = True, CheckpointError("a save", "a full disk", "room", "Make room.")
    assert not silence.polled(39.0)
    assert silence.polled(40.0)
    assert [save.step for save in silence.saves] == [5, 6]
    silence.saves[1].done = True
    assert silence.polled(50.0), "to see how it ended"
    assert not silence.polled(99.0) and len(silence.saves) == 2


def test_a_pause_that_training_waits_for_is_due_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training asks for it before batches that do not come."""
    silence = Silence(tmp_path, monkeypatch)
    silence.now_s[0] = 10.0
    assert silence.saver.wants_pause() and not silence.saver.wants_pause()
    assert silence.polled(10.5) and len(silence.saves) == 1
    assert not silence.polled(11.0)
    silence.run_state.steps = 6
    silence.saves[0].done = True
    silence.now_s[0] = 21.0
    assert silence.saver.wants_pause()
    silence.saver.on_pause()
    assert not silence.polled(21.5) and len(silence.saves) == 2


def saved_in_two_goes(folder: Path) -> list[str]:
    """Kinds of the saves of a run that was continued after its second."""
    saves = {"dir": str(folder / "saved"), "every_steps": 2, "background": False}
    file = small_run(
        folder, examples=400, vocabulary=50, batch_size=100, eval_examples=100,
        checkpoint=saves, output={"dir": str(folder / "runs"), "save_model": False},
        publish={"address": "tcp://127.0.0.1:0", "linger_s": 0.1},
    )  # fmt: skip
    for epochs in (1, 2):
        run(config.load(str(file), [f"data.epochs={epochs}"]), console=Console(quiet=True))
    return [one.kind for one in CheckpointStore(folder / "saved").list()]


@pytest.mark.slow
def test_a_run_that_continues_and_publishes_saves_deltas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The publisher lets go of deletions that the first delta has to name."""

    def stepped(self: Publishing) -> None:
        assert self.publisher is not None
        self.publisher.publish()

    monkeypatch.setattr(Publishing, "stepped", stepped)
    assert saved_in_two_goes(tmp_path) == ["full", "delta", "delta", "delta"]
    assert "a save failed" not in caplog.text


@pytest.mark.slow
def test_a_save_after_one_that_could_not_begin_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, kinds = saving.begin, list[str]()

    def begin(*args: Any, kind: Any, **options: Any) -> Any:
        kinds.append(kind)
        if len(kinds) == 3:
            raise InputError("snapshot", "a cursor", "deletions that are kept", "Take a full one.")
        return real(*args, kind=kind, **options)

    monkeypatch.setattr(saving, "begin", begin)
    assert saved_in_two_goes(tmp_path) == ["full", "delta", "full"]
    assert kinds == ["full", "delta", "delta", "full"]
