"""A run on a GPU: the metrics of the same run on the CPU, and folders that both can read."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from shoal import config, train
from shoal.checkpoint import CheckpointStore, compact
from shoal.checkpoint.store import folder_name
from shoal.train.saving import Saver

pytestmark = pytest.mark.gpu

EXAMPLE = Path(__file__).parents[2] / "examples" / "flights.yaml"
# Without dropout both devices draw nothing, so that they differ by rounding alone.
SMALL = (
    "data.split=2013-02-01",
    "eval.max_examples=6000",
    "tables.default.dim=4",
    "model.hidden=[16]",
    "model.dropout=0",
    "data.epochs=1",
)


def console() -> Console:
    return Console(file=io.StringIO(), width=100)


def run(folder: Path, *more: str) -> train.RunResult:
    settings = config.load(EXAMPLE, [*SMALL, f"output.dir={folder}", *more])
    return train.run(settings, console=console())


def assert_close(ours: Mapping[str, Mapping[str, float]], want: Mapping[str, Mapping[str, float]]):
    assert list(ours) == list(want)
    for name, sheet in want.items():
        for figure in ("auc", "log_loss", "calibration"):
            assert ours[name][figure] == pytest.approx(sheet[figure], abs=2e-3), (name, figure)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, train.RunResult]:
    folder = tmp_path_factory.mktemp("runs")
    return {device: run(folder, f"device={device}") for device in ("cpu", "cuda")}


def test_metrics_do_not_depend_on_the_device(runs: dict[str, train.RunResult]):
    assert_close(runs["cuda"].metrics, runs["cpu"].metrics)
    assert runs["cuda"].rows == runs["cpu"].rows


@pytest.mark.parametrize(("trained", "judged"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_folder_is_read_on_either_device(
    runs: dict[str, train.RunResult], tmp_path: Path, trained: str, judged: str
):
    result = runs[trained]
    again = train.evaluate(str(result.folder), [f"device={judged}"], console=console())
    assert_close(again, result.metrics)
    out = train.predict(
        str(result.folder), [f"device={judged}"], out=tmp_path / "p.parquet", console=console()
    )
    rows = pq.read_table(out)
    mean = sum(rows["prediction"].to_pylist()) / rows.num_rows
    assert mean == pytest.approx(result.metrics["deepfm"]["mean_prediction"], rel=1e-4)


@pytest.mark.parametrize(
    "more",
    [
        ("amp=float16", "clip_norm=1.0"),
        ("amp=bfloat16",),
        ("accumulation=2", "nan_policy=skip"),
        ("dense_optimizer.kind=adagrad",),
    ],
)
def test_other_ways_to_step(tmp_path: Path, more: tuple[str, ...]):
    result = run(tmp_path, "device=auto", *more)
    assert result.metrics["deepfm"]["auc"] > 0.55
    assert "device: auto" in (result.folder / "config.yaml").read_text()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler itself
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "more",
    [
        ("compile=true", "accumulation=2"),
        ("compile=reduce-overhead", "clip_norm=1.0"),
        ("compile=reduce-overhead", "amp=float16"),
    ],
)
def test_a_compiled_run_learns_the_same(tmp_path: Path, more: tuple[str, ...]):
    short = ("data.max_examples=12000", "device=cuda", *more)
    want = run(tmp_path / "eager", *short, "compile=false")
    assert_close(run(tmp_path / "compiled", *short).metrics, want.metrics)


SAVED = (
    "data.max_examples=20000",
    "data.batch_size=500",
    "tables.default.expiry.ttl_s=200000",
    "evict_every_s=100000",
    "logging.tensorboard=false",
    "checkpoint.every_steps=2",
    "checkpoint.full_every=3",
    "checkpoint.keep_full=99",
    "checkpoint.background=true",
)


def told(folder: Path) -> list[dict[str, object]]:
    """The log's lines without what time and the device's own readings make of them."""
    rows = [json.loads(line) for line in (folder / "logs" / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time", "device/"))} for row in rows]


def rows_of(folder: Path, scratch: Path) -> list[object]:
    """Rows that the newest checkpoint stands for, without the epochs of their last change: those
    count cuts, which are as many as saves found time for, and so decide its kind."""
    shutil.copytree(folder / "checkpoints", scratch)
    store = CheckpointStore(scratch)
    newest = store.latest()
    assert newest is not None
    name = newest.name
    if newest.kind == "delta":
        compact(store, name)
        name = folder_name(newest.step, "full")
    found: list[object] = []
    for path in sorted((scratch / name / "rows").iterdir()):
        with ipc.open_file(path) as file:
            found.append(file.read_all().drop_columns(["version"]).to_pydict())
    return found


def assert_near(ours: object, want: object, within: float) -> None:
    """Equal, but for real numbers, which differ by such a part, or such a part of a tenth."""
    assert type(ours) is type(want)
    if isinstance(want, Mapping):
        assert isinstance(ours, Mapping)
        assert list(ours) == list(want)
        assert_near(list(ours.values()), list(want.values()), within)
    elif isinstance(want, list):
        assert isinstance(ours, list)
        assert len(ours) == len(want)
        for one, other in zip(ours, want, strict=True):
            assert_near(one, other, within)
    elif isinstance(want, float):
        assert ours == pytest.approx(want, rel=within, abs=within / 10)
    else:
        assert ours == want


def test_a_run_saves_while_it_trains_and_goes_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    beside: list[int] = []
    look = Saver.due_after

    def seen(self: Saver, step: int) -> bool:
        if self._saving is not None and not self._saving.done:
            beside.append(step)
        return look(self, step)

    monkeypatch.setattr(Saver, "due_after", seen)
    whole = run(tmp_path / "whole", "device=cuda", *SAVED).folder
    assert beside  # steps were done while rows were written
    entries = CheckpointStore(whole / "checkpoints").list()
    assert {entry.kind for entry in entries} == {"full", "delta"}
    never = run(tmp_path / "never", "device=cuda", *SAVED, "checkpoint.every_steps=null").folder
    assert told(never) == told(whole)
    rows = rows_of(whole, tmp_path / "whole-rows")
    assert rows_of(never, tmp_path / "never-rows") == rows
    left = tmp_path / "left" / "run"
    shutil.copytree(whole, left)
    middle = entries[len(entries) // 2].step
    for entry in entries:
        if entry.step > middle:
            shutil.rmtree(left / "checkpoints" / entry.name)
    for name in ("metrics.json", "report.html"):
        (left / name).unlink()
    settings = config.load(EXAMPLE, [*SMALL, f"output.dir={tmp_path / 'other'}", *SAVED])
    again = train.run(settings, console=console(), resume=str(left))
    assert again.folder == left
    # Bits are promised on the CPU: products of matrices on a GPU may round otherwise in memory that
    # lies elsewhere. The first step shows no more than that; later ones build on it.
    ours, want = told(left), told(whole)
    assert ours[:middle] == want[:middle]
    assert_near(ours[middle], want[middle], 1e-6)
    assert_near(ours, want, 1e-2)
    assert_near(rows_of(left, tmp_path / "left-rows"), rows, 1e-2)
