"""Models of several labels, of histories and of items in a batch, from files to a served bundle."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from shoal import config, train
from shoal.config.build import build_parts
from shoal.errors import ConfigError, UnknownName
from shoal.serve.bundle import open_bundle
from shoal.serve.export import export
from shoal.serve.loading import FolderSource
from shoal.train import folder as folders

EXAMPLES, ITEMS, LONGEST = 600, 12, 5
MODELS: dict[str, dict[str, Any]] = {
    "wide_and_deep": {"hidden": [8]},
    "fm": {},
    "mmoe": {"experts": 2, "expert": [8], "hidden": [4]},
    "ple": {"expert": [8], "hidden": [4]},
    "dbmtl": {"bottom": [8], "hidden": [4], "relations": {"buy": ["click"]}},
    "din": {"target": ["item"], "attention": [4], "hidden": [8]},
    "hstu": {"target": ["item"], "hidden": [8]},
    "two_tower": {"user": ["user"], "item": ["item"], "hidden": [8], "log_q": True},
}
EXPORTED = ("dbmtl", "din", "hstu", "two_tower")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Users like items of their own parity; they buy what they saw before."""
    generator = np.random.default_rng(0)
    user, item = generator.integers(0, 20, EXAMPLES), generator.integers(0, ITEMS, EXAMPLES)
    lengths = generator.integers(0, LONGEST + 1, EXAMPLES)
    seen = [generator.integers(0, ITEMS, n).tolist() for n in lengths]
    click = (user + item) % 2 == 0
    buy = click & np.array([i in own for i, own in zip(item, seen, strict=True)])
    columns = {"user": user, "item": item, "click": click, "buy": buy}
    path = tmp_path_factory.mktemp("data") / "clicks.parquet"
    pq.write_table(
        pa.table({**columns, "seen": seen, "age": generator.normal(size=EXAMPLES)}), path
    )
    return path


def settings(file: Path, folder: Path, kind: str, **changes: Any) -> config.RunConfig:
    source = {
        "kind": "parquet",
        "paths": [str(file)],
        "eval_paths": [str(file)],
        "label": ["click", "buy"],
        "dense": ["age"],
        "ids": {"user": {}, "item": {}, "seen": {"is_list": True}},
    }
    base = {
        "name": "t",
        "threads": 1,
        "data": {"source": source, "batch_size": 50, "epochs": 2},
        "tables": {"default": {"dim": 4, "optimizer": {"kind": "adagrad", "lr": 0.3}}},
        "features": {
            "user": {},
            "item": {},
            "seen": {"table": "item", "combiner": "first_n", "max_length": LONGEST},
        },
        "model": {"kind": kind, **MODELS[kind]},
        "dense_optimizer": {"lr": 0.02},
        "logging": {"points": 3},
        "output": {"dir": str(folder)},
    }
    return config.from_mapping({**base, **changes})


def outputs_of(kind: str) -> list[str]:
    many = kind in ("mmoe", "ple", "dbmtl")
    return [f"{kind}/click", f"{kind}/buy"] if many else [kind]


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_is_trained_evaluated_exported_and_served(
    kind: str,
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = Console(quiet=True)
    run = settings(file, tmp_path, kind)
    result = train.run(run, console=console)
    names = outputs_of(kind)
    assert list(result.metrics) == [*names, "logistic", "base_rate"]
    for name in names:
        assert 0.4 < result.metrics[name]["auc"] <= 1
        assert np.isfinite(result.metrics[name]["log_loss"])
    again = train.evaluate(str(result.folder), console=console)
    assert again[names[-1]]["auc"] == pytest.approx(result.metrics[names[-1]]["auc"])
    written = pq.read_table(train.predict(str(result.folder), console=console))
    ends = [f"_{name.split('/')[1]}" for name in names] if len(names) > 1 else [""]
    assert written.column_names == [
        *(f"prediction{end}" for end in ends),
        *(f"label{end}" for end in ends),
        "event_time_s",
    ]
    table = pq.read_table(file)
    assert written[f"label{ends[-1]}"].to_pylist() == [
        float(y) for y in table["buy" if len(names) > 1 else "click"].to_pylist()
    ]
    if kind not in EXPORTED:
        return
    folder, found = folders.find(str(result.folder), ())
    where = folders.checkpoint_of(folder)
    assert where is not None
    parts = build_parts(found)
    version = export(found, parts, where, tmp_path / "exports")
    assert open_bundle(version).signature.dense_problem is None
    source = FolderSource(tmp_path / "exports")
    model = source.load(source.newest())
    seen = table["seen"].combine_chunks()
    request = {
        "user": table["user"].to_numpy(),
        "item": table["item"].to_numpy(),
        "seen": seen.flatten().to_numpy(),
        "seen_lengths": seen.value_lengths().to_numpy().astype(np.int64),
        "dense": table["age"].to_numpy().astype(np.float32).reshape(-1, 1),
    }
    served = model.run([model.read(request)])[0]["prediction"].reshape(EXAMPLES, -1)
    wanted = np.stack([written[f"prediction{end}"].to_numpy() for end in ends], axis=1)
    np.testing.assert_allclose(served, wanted, rtol=1e-5, atol=1e-6)
    monkeypatch.setattr("sys.argv", ["load_dense.py", str(version)])
    runpy.run_path(
        str(Path(__file__).parents[3] / "examples" / "load_dense.py"), run_name="__main__"
    )
    assert capsys.readouterr().out == "2 logits of dense.pt2\n"


def test_a_task_without_weight_does_not_train(file: Path, tmp_path: Path) -> None:
    run = settings(file, tmp_path, "mmoe", tasks={"buy": {"weight": 0.0}, "click": {}})
    parts = build_parts(run)
    assert [(task.label, task.weight) for task in parts.tasks] == [("click", 1.0), ("buy", 0.0)]
    wrong = settings(file, tmp_path, "mmoe", tasks={"by": {}})
    with pytest.raises(UnknownName, match="label in tasks"):
        build_parts(wrong)


def test_sequences_go_to_models_that_take_them(file: Path, tmp_path: Path) -> None:
    for kind, sequences, names in (
        ("din", ("seen",), ("user", "item")),
        ("fm", (), ("user", "item", "seen")),
    ):
        run = settings(file, tmp_path, kind)
        parts = build_parts(run)
        assert (parts.inputs.sequences, parts.inputs.names) == (sequences, names)
    features = {"user": {}, "item": {}, "seen": {"table": "item", "combiner": "first_n"}}
    run = settings(file, tmp_path, "din", features=features)
    with pytest.raises(ConfigError, match=r"features\.seen\.max_length"):
        build_parts(run)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("two_tower", {"tasks": {"click": {"weight": 2.0}}}, "tasks of model two_tower"),
        ("din", {"tasks": {"buy": {"weight": 2.0}}}, "tasks of model din"),
        (
            "two_tower",
            {"model": {"kind": "two_tower", "user": ["user"], "item": ["seen"]}, "features": {}},
            "the list 'seen'",
        ),
    ],
)
def test_what_a_model_would_ignore_or_misread_is_refused(
    kind: str, changes: dict[str, Any], words: str, file: Path, tmp_path: Path
) -> None:
    made = settings(file, tmp_path, kind, **changes)
    with pytest.raises(ConfigError, match=words):
        build_parts(made)
