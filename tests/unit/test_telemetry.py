from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from shoal import telemetry
from shoal.telemetry import FanOut, JsonLines, ProgressLine, ProgressState, TensorBoard


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_json_lines_are_strict_json_with_step_and_time(tmp_path: Path):
    clock = FakeClock()
    sink = JsonLines(tmp_path / "log.jsonl", clock)
    clock.now += 1.25
    sink.write(3, {"loss": 0.5, "auc": math.nan})
    sink.write(4, {"loss": math.inf})
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    sink.close()
    assert [json.loads(line) for line in lines] == [
        {"step": 3, "time_s": 1.25, "loss": 0.5, "auc": None},
        {"step": 4, "time_s": 1.25, "loss": None},
    ]


def test_tensorboard_events_read_back(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoard(tmp_path)
    sink.write(1, {"loss": 0.75})
    sink.write(2, {"loss": 0.5})
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.75), (2, 0.5)]


def test_fan_out_writes_to_and_closes_each_sink(tmp_path: Path):
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    both = FanOut(*(JsonLines(path) for path in paths))
    both.write(1, {"x": 1.0})
    both.close()
    assert all(json.loads(path.read_text())["x"] == 1.0 for path in paths)
    with pytest.raises(ValueError, match="closed"):
        both.write(2, {"x": 1.0})


def plain_run(clock: FakeClock) -> tuple[ProgressLine, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=False, width=40)
    return ProgressLine(console, "train", 2000, plain_interval_s=5, clock=clock), out


def test_plain_progress_is_one_readable_line_per_interval():
    clock = FakeClock()
    progress, out = plain_run(clock)
    with progress:
        clock.now += 4.9
        assert not progress.due()
        clock.now += 0.1
        assert progress.due()
        progress.show(
            ProgressState(
                examples=1000, ids=12_000, loss=0.51234, auc=0.7, rows=1500, row_bytes=150_000
            )
        )
        assert not progress.due()
    assert out.getvalue() == (
        "train 1.00 k of 2.00 k examples, 200 examples/s, 2.40 k ids/s, loss 0.5123, "
        "AUC 0.7000, 1.50 k rows, 100 B/row, 5 s\n"
    )


def test_rates_cover_the_last_interval_and_the_whole_run_when_final():
    clock = FakeClock()
    progress, out = plain_run(clock)
    with progress:
        clock.now += 10
        progress.show(ProgressState(examples=100))
        clock.now += 5
        progress.show(ProgressState(examples=600))
        progress.show(ProgressState(examples=600), final=True)
    rates = [line.split(", ")[1] for line in out.getvalue().splitlines()]
    assert rates == ["10 examples/s", "100 examples/s", "40 examples/s"]


def test_progress_hides_what_is_not_known():
    clock = FakeClock()
    progress, out = plain_run(clock)
    with progress:
        clock.now += 1
        progress.show(ProgressState(examples=10, auc=math.nan))
    assert out.getvalue() == "train 10 of 2.00 k examples, 10 examples/s, 1 s\n"


def test_terminal_progress_draws_a_bar_at_most_twice_a_second():
    clock = FakeClock()
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80)
    with ProgressLine(console, "train", 100, clock=clock) as progress:
        clock.now += 0.4
        assert not progress.due()
        clock.now += 0.1
        assert progress.due()
        progress.show(ProgressState(examples=50, rows=7))
    assert "50%" in out.getvalue()
    assert "7 rows" in out.getvalue()


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.00 k"),
        (12_345, "12.3 k"),
        (999_999, "1.00 M"),
        (336_776, "337 k"),
        (2.5e9, "2.50 G"),
    ],
)
def test_human_count(count: float, text: str):
    assert telemetry.human_count(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(812, "812 B"), (1536, "1.5 KiB"), (5 << 40, "5.0 TiB")]
)
def test_human_bytes(count: float, text: str):
    assert telemetry.human_bytes(count) == text
