from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, get_origin

import pytest
from pydantic import ValidationError

from shoal import config
from shoal.comm.collectives import LocalCollectives
from shoal.config import tree
from shoal.config.build import SourceInputs, build_parts
from shoal.config.tree import Section
from shoal.errors import ConfigError, UnknownName
from shoal.models.tasks import EMBEDDINGS, FIRST_ORDER
from shoal.rules import initializers, optimizers, schedules
from shoal.rules.admission import Admission
from shoal.rules.expiry import Expiry

FLIGHTS = Path(__file__).parents[3] / "examples" / "flights.yaml"
GOLDEN = Path(__file__).parents[2] / "golden"
OFFERED = ("user", "item", "history")

MINIMAL = {"name": "tiny", "data": {"source": "synthetic"}}


def load(*overrides: str, environment: dict[str, str] | None = None) -> config.RunConfig:
    return config.load(FLIGHTS, overrides, environment=environment or {})


def settings(**changes: object) -> config.RunConfig:
    return config.from_mapping({**MINIMAL, **changes})


def offered(num_dense: int) -> SourceInputs:
    return SourceInputs(OFFERED, frozenset(), num_dense, ("label",))


def sections(base: type[Section] = Section) -> list[type[Section]]:
    return [leaf for cls in base.__subclasses__() for leaf in (cls, *sections(cls))]


def test_the_list_of_settings_is_golden():
    own = [cls for cls in sections() if cls.__module__.startswith("shoal.")]  # not an example's
    lines = sorted(f"{cls.__name__}.{key}" for cls in own for key in cls.model_fields)
    assert lines == (GOLDEN / "config_keys.txt").read_text().split()


def test_shipped_example_resolves_and_reads_back_equal(tmp_path: Path):
    resolved = load()
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml(resolved))
    assert config.load(file, environment={}) == resolved


def test_the_tree_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        load().seed = 3  # type: ignore[misc]


def test_name_defaults_to_the_file(tmp_path: Path):
    file = tmp_path / "my-run.yaml"
    file.write_text("data: {source: synthetic}\n")
    assert config.load(file, environment={}).name == "my-run"


def test_overrides_set_keys_that_the_file_leaves_out():
    assert load("clip_norm=1.5", "logging.points=7").clip_norm == 1.5
    assert load().clip_norm is None


def test_later_overrides_win_and_tilde_deletes():
    changed = load("seed=1", "seed=2", "~features.history")
    assert changed.seed == 2
    assert "history" not in changed.features


def test_another_kind_replaces_the_settings_of_the_old_one():
    rule = load("tables.default.optimizer={kind: adam, lr: 0.5}").tables["default"].optimizer
    assert rule == optimizers.Adam(lr=0.5)
    assert load("model={kind: dcn, cross_layers: 2}").model.kind == "dcn"


EVAL = {"every_steps": 5, "early_stop": {"metric": "auc", "patience": 2}}
QUARANTINE = {"path": "b.jsonl", "most_rows": 5}
FILES = {"kind": "csv", "label": "y", "paths": ["a"], "eval_paths": ["b"]}
WARM = {"path": "old", "dense": False}
COSINE = {"kind": "cosine", "initial": 0.1, "decay_steps": 9}
WARMUP = {"kind": "warmup", "target": COSINE, "steps": 3}


@pytest.mark.parametrize(
    ("overrides", "same"),
    [
        (["model=dcn", "model.cross_layers=2"], {"model": {"kind": "dcn", "cross_layers": 2}}),
        (["model=dcn", "model={cross_layers: 2}"], {"model": {"kind": "dcn", "cross_layers": 2}}),
        (["model.cross_layers=2", "model=dcn"], {"model": "dcn"}),
        (
            ["tables.a.optimizer={kind: adam, lr: 2}", "tables.a={optimizer: sgd}"],
            {"tables": {"a": {"optimizer": "sgd"}}},
        ),
        (["dense_optimizer=adamw"], {"dense_optimizer": {"kind": "adamw"}}),
        (
            ["dense_optimizer=adamw", "dense_optimizer.lr=0.1"],
            {"dense_optimizer": {"kind": "adamw", "lr": 0.1}},
        ),
        (
            ["dense_optimizer.parameters.bias=sgd", "dense_optimizer.parameters.bias.lr=0.1"],
            {"dense_optimizer": {"parameters": {"bias": {"kind": "sgd", "lr": 0.1}}}},
        ),
        (
            ["data.source=csv", "data.source=synthetic", "data.source.examples=9"],
            {"data": {"source": {"kind": "synthetic", "examples": 9}}},
        ),
        (
            ["data.quarantine=b.jsonl", "data.quarantine.most_rows=5"],
            {"data": {"source": "synthetic", "quarantine": QUARANTINE}},
        ),
        (
            ["data.quarantine.most_rows=5", "data.quarantine=b.jsonl"],
            {"data": {"source": "synthetic", "quarantine": QUARANTINE}},
        ),
        (
            ["eval.every_steps=5", "eval.early_stop=auc", "eval.early_stop.patience=2"],
            {"eval": EVAL},
        ),
        (
            ["checkpoint.warm_start=old", "checkpoint.warm_start.dense=false"],
            {"checkpoint": {"warm_start": WARM}},
        ),
        (
            [
                "data.source={kind: csv, label: y, paths: [a], eval_paths: [b]}",
                "data.source.features.user=id",
                "data.source.features.user.column=uid",
            ],
            {"data": {"source": FILES | {"features": {"user": {"kind": "id", "column": "uid"}}}}},
        ),
        (
            [
                "tables.default.optimizer={kind: adam, lr: warmup}",
                "tables.default.optimizer.lr.target=cosine",
                "tables.default.optimizer.lr.target={initial: 0.1, decay_steps: 9}",
                "tables.default.optimizer.lr.steps=3",
            ],
            {"tables": {"default": {"optimizer": {"kind": "adam", "lr": WARMUP}}}},
        ),
        *(
            (
                [f"tables.default.{key}={kind}", f"tables.default.{key}.{part}=2"],
                {"tables": {"default": {key: {"kind": kind, part: 2}}}},
            )
            for key, kind, part in [
                ("optimizer", "adam", "lr"),
                ("initializer", "constant", "value"),
                ("compressor", "one_bit", "max_scale"),
            ]
        ),
    ],
)
def test_a_short_form_and_a_key_in_it_add_up(
    tmp_path: Path, overrides: list[str], same: dict[str, object]
):
    file = tmp_path / "tiny.yaml"
    file.write_text("data: {source: synthetic}\n")
    assert config.load(file, overrides, environment={}) == settings(**same)


def test_short_forms_in_files_are_written_out_before_they_are_merged(tmp_path: Path):
    (tmp_path / "base.yaml").write_text(
        "dense_optimizer: adamw\nmodel: dcn\ndistributed: {placement: grid}\n"
    )
    (tmp_path / "own.yaml").write_text(
        "defaults: [base, _self_]\ndata: {source: synthetic}\ndense_optimizer: {lr: 0.1}\n"
        "distributed: {placement: {tables: {user: row_wise}}}\n"
    )
    found = config.load(tmp_path / "own.yaml", ["model.dropout=0.1"], environment={})
    assert (found.dense_optimizer.kind, found.dense_optimizer.lr) == ("adamw", 0.1)
    assert (found.model.kind, found.model.dropout) == ("dcn", 0.1)
    assert found.distributed.placement.default == "grid"
    (tmp_path / "base.yaml").write_text("model: {kind: deepfm, hidden: [4]}\n")
    (tmp_path / "own.yaml").write_text(
        "defaults: [base, _self_]\ndata: {source: synthetic}\nmodel: dcn\n"
    )
    assert config.load(tmp_path / "own.yaml", environment={}).model.hidden == (128, 64)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["tables=5", "tables.default.dim=3"], "tables"),
        (["eval=7", "eval.batch_size=3"], "eval"),
        (["eval=x", "eval={batch_size: 3}"], "eval"),
        (["model=7", "model.dropout=0.1"], "model"),
        (["clip_norm=1", "clip_norm.most=2"], "clip_norm"),
        (["dense_optimizer.lr=0.1", "dense_optimizer.lr.steps=2"], "dense_optimizer.lr"),
        (["name=${seed}", "name.x=1"], "name"),
    ],
)
def test_settings_in_a_plain_value_are_refused(overrides: list[str], key: str):
    with pytest.raises(ConfigError, match=rf"override {key}[.=].* got {key}: .* before it"):
        load(*overrides)


@pytest.mark.parametrize(
    "override",
    [
        "tables.c*.optimizer={kind: sgd, lr: 0.1}",
        "tables.c*={optimizer: {kind: sgd, lr: 0.1}}",
        'tables={"c*": {optimizer: {kind: sgd, lr: 0.1}}}',
        "+tables.c*.optimizer={kind: sgd, lr: 0.1}",
    ],
)
def test_tables_by_pattern_on_the_command_line(override: str):
    assert load(override).tables["c*"].optimizer == optimizers.SGD(lr=0.1)
    assert load(override, "tables.c*.optimizer.lr=1").tables["c*"].optimizer == optimizers.SGD(lr=1)
    assert "c*" not in load(override, "~tables.c*").tables


def test_hydra_defaults_list_composes_files(tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "small.yaml").write_text("kind: deepfm\nhidden: [4]\n")
    (tmp_path / "model" / "large.yaml").write_text("kind: deepfm\nhidden: [512]\n")
    file = tmp_path / "run.yaml"
    file.write_text("defaults: [model: small, _self_]\ndata: {source: synthetic}\n")
    assert config.load(file, environment={}).model.hidden == (4,)
    assert config.load(file, ["model=large"], environment={}).model.hidden == (512,)


def test_environment_is_between_file_and_overrides():
    environment = {"SHOAL_SEED": "5", "SHOAL_OUTPUT_DIR": "/data/out", "HOME": "/x"}
    assert load(environment=environment).seed == 5
    assert load(environment=environment).output.dir == "/data/out"
    assert load("seed=6", environment=environment).seed == 6


def test_default_table_spreads_over_named_ones():
    tables = settings(
        tables={"default": {"dim": 4, "expected_rows": 9}, "user": {"dim": 8}},
        features={"user": {}, "item": {}},
    ).tables
    assert (tables["user"].dim, tables["user"].expected_rows) == (8, 9)


@pytest.mark.parametrize(
    ("overrides", "kind", "parts"),
    [
        (["optimiser=1"], UnknownName, ["'optimiser'", "dense_optimizer"]),
        (["model.hiden=[1]"], UnknownName, ["model: ", "'hiden'", "hidden"]),
        (["data.batchsize=1"], UnknownName, ["'data.batchsize'", "data.batch_size"]),
        (["features.history.combner=sum"], UnknownName, ["features.history.combiner"]),
        (["data.source.path=x"], UnknownName, ["'data.source.path'"]),
        (["tables.default.bias.optimiser=x"], UnknownName, ["tables.default.bias.optimizer"]),
        (["tables.default.optimizer.kind=adagrab"], UnknownName, ["tables.default", "adagrad"]),
        (["tables.default.optimizer.lrr=1"], UnknownName, ["tables.default.optimizer", "lr"]),
        (["tasks.x.label="], UnknownName, ["tasks.x: ", "'label'", "weight"]),
        (["tasks.x="], ConfigError, ["tasks.x: ", "''", "settings of weight"]),
        (["data.source=flight"], UnknownName, ["data.source", "flights"]),
        (["model={kind: deepfn}"], UnknownName, ["model kind", "deepfm"]),
        (["data.batch_size=0"], ConfigError, ["data.batch_size", "got 0", "greater than 0"]),
        (["amp=float99"], ConfigError, ["amp", "'float99'", "bfloat16"]),
        (["~data.source"], ConfigError, ["data.source", "got nothing"]),
        (["tables.default.optimizer.lr=-1"], ConfigError, ["tables.default.optimizer", "-1"]),
        (
            ["tables.default.optimizer.lr=cosin"],
            UnknownName,
            ["tables.default.optimizer", "piecewise", "Did you mean cosine?"],
        ),
        (
            [
                "data.source={kind: csv, label: y, paths: [a], eval_paths: [b]}",
                "data.source.features={age: {kind: raw, ids: 5}}",
            ],
            ConfigError,
            ["data.source.features", "got 5", "boundaries"],
        ),
        (
            ["tables.default.optimizer={kind: delay_compensated, inner: sg}"],
            UnknownName,
            ["tables.default.optimizer", "Did you mean sgd?"],
        ),
        (["tables.default.optimizer.lr=cosine"], ConfigError, ["schedule cosine", "no initial"]),
        (
            ["tables.customer.optimizer.lr=0.01"],
            ConfigError,
            ["replaces that of tables.default as a whole", "{kind: adagrad, lr: 0.01}"],
        ),
        (["model.kind=fm"], UnknownName, ["model fm", "'hidden'", "model=fm", "~model.hidden"]),
        (["model.kin=dcn"], UnknownName, ["dropout, hidden, kind. Did you mean kind?"]),
        (
            ["data.source={kind: synthetic, paths: [a]}"],
            UnknownName,
            ["data.source=synthetic", "~data.source.paths"],
        ),
        (["tables.c*"], ConfigError, ["'tables.c*'", "key=value"]),
        (['tables={"c*": [}'], ConfigError, ["flow node"]),
        (['tables={"c*": &a [*a]}'], ConfigError, ["alias *a"]),
        (["seed"], ConfigError, ["override", "'seed'", "key=value"]),
        (["~features.nothing"], ConfigError, ["features.nothing"]),
        (["seed=1,2"], ConfigError, ["seed=1,2"]),
    ],
)
def test_wrong_settings_say_where_and_what_is_allowed(
    overrides: list[str], kind: type[ConfigError], parts: list[str]
):
    with pytest.raises(kind) as caught:
        load(*overrides)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("text", ["a: [1\nb: }", "- 1\n- 2\n", "x: ${nothing}\n", "just words"])
def test_files_that_are_not_settings_are_config_errors(tmp_path: Path, text: str):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError):
        config.load(file, environment={})


@pytest.mark.parametrize("name", ["missing.yaml", "folder"])
def test_missing_files_are_config_errors(tmp_path: Path, name: str):
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"existing \.yaml file"):
        config.load(tmp_path / name, environment={})


def test_unknown_variables_are_refused():
    with pytest.raises(UnknownName, match="SHOAL_THREADS"):
        load(environment={"SHOAL_THREAD": "2"})


def test_addresses_of_servers_from_a_variable():
    found = load(environment={"SHOAL_PS": "tcp://h0:1,h1:2"}).distributed.servers
    assert found.addresses == ("tcp://h0:1", "h1:2")


@pytest.mark.parametrize(
    "keys",
    [
        {"dense": "average"},
        {"path": "ps", "workers": 2},
        {"path": "ps", "dense": "average", "worker": 1},
        {"path": "ps", "dense": "average", "workers": 2, "worker": 2},
    ],
)
def test_workers_without_a_process_group_need_servers(keys: dict[str, object]):
    with pytest.raises(ConfigError, match="dense, path, worker and workers"):
        settings(distributed=keys)


def test_each_rule_has_a_name():
    rules = {cls for cls in vars(optimizers).values() if _is_leaf(cls, optimizers.Optimizer)}
    assert set(tree.OPTIMIZERS.values()) == rules
    assert all(cls.kind == name for name, cls in tree.OPTIMIZERS.items())
    kinds = {cls for cls in vars(schedules).values() if _is_leaf(cls, schedules.Schedule)}
    assert set(tree.SCHEDULES.values()) == kinds
    laws = {cls for cls in vars(initializers).values() if _is_leaf(cls, initializers.Initializer)}
    assert set(tree.INITIALIZERS.values()) == laws


def _is_leaf(value: object, base: type) -> bool:
    # Under Python 3.10 tuple[int] is a type, too.
    is_class = isinstance(value, type) and not get_origin(value)
    return is_class and issubclass(value, base) and value is not base


@pytest.mark.parametrize(
    ("registry", "plain", "rule"),
    [
        (tree.OPTIMIZERS, "sgd", optimizers.SGD()),
        (
            tree.OPTIMIZERS,
            {"kind": "adam", "lr": {"kind": "warmup", "target": 0.1, "steps": 10}},
            optimizers.Adam(lr=schedules.Warmup(target=0.1, steps=10)),
        ),
        (
            tree.OPTIMIZERS,
            {"kind": "delay_compensated", "inner": {"kind": "sgd", "lr": 1}, "strength": 0.2},
            optimizers.DelayCompensated(inner=optimizers.SGD(lr=1.0), strength=0.2),
        ),
        (
            tree.OPTIMIZERS,
            {"kind": "delay_compensated", "inner": "sgd"},
            optimizers.DelayCompensated(inner=optimizers.SGD()),
        ),
        (
            tree.SCHEDULES,
            {"kind": "piecewise", "boundaries": [10], "values": [0.1, 0.01]},
            schedules.Piecewise(boundaries=(10,), values=(0.1, 0.01)),
        ),
        (tree.INITIALIZERS, {"kind": "constant", "value": 2}, initializers.Constant(2.0)),
    ],
)
def test_rules_by_name_and_back(registry: tree.Registry, plain: object, rule: object):
    assert tree.build(plain, registry) == rule
    assert tree.build(tree.dump(rule), registry) == rule


def test_admission_and_expiry_read_slots_as_mappings():
    table = settings(
        tables={
            "default": {
                "admission": {"threshold": 3, "per_slot": {7: 1}},
                "expiry": {"ttl_s": 60, "per_slot": {2: 5, 1: 6}},
            }
        }
    ).tables["default"]
    assert table.admission == Admission(threshold=3, per_slot=((7, 1),))
    assert table.expiry == Expiry(ttl_s=60, per_slot=((1, 6), (2, 5)))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("seed", True, "config key seed: got True; allowed: a whole number"),
        ("clip_norm", True, "config key clip_norm: got True; allowed: a number"),
        ("name", True, "config key name: got True; allowed: text"),
        ("tables", {"default": {"dim": True}}, "tables.default.dim: got True; allowed: a whole"),
    ],
)
def test_true_and_false_are_refused_in_place_of_others(key: str, value: object, words: str):
    with pytest.raises(ConfigError, match=words):
        settings(**{key: value})


CLICKS = {"paths": ["a"], "eval_paths": ["b"], "label": "y", "ids": {"user": {}}}


@pytest.mark.parametrize("kind", ["parquet", "csv"])
@pytest.mark.parametrize("expiry", [{"ttl_s": 100}, {"per_slot": {1: 2}}])
@pytest.mark.parametrize("table", ["default", "user", "us*"])
def test_expiry_needs_times(kind: str, expiry: dict[str, Any], table: str):
    source, tables = {"kind": kind, **CLICKS}, {table: {"expiry": expiry}}
    with pytest.raises(ConfigError, match=rf"data.source.time with tables.{re.escape(table)}.exp"):
        settings(data={"source": source}, tables=tables)
    settings(data={"source": source}, tables={table: {"expiry": {}}})
    settings(data={"source": {**source, "time": "at"}}, tables=tables)


@pytest.mark.parametrize(
    "source",
    [
        {"kind": "flights"},
        {"kind": "synthetic"},
        {
            "kind": "kafka",
            "stream": {"topic": "t", "servers": ["h:1"]},
            **{key: CLICKS[key] for key in ("eval_paths", "label", "ids")},
        },
    ],
    ids=lambda source: source["kind"],
)
def test_expiry_of_sources_with_times_of_their_own(source: dict[str, Any]):
    settings(data={"source": source}, tables={"default": {"expiry": {"ttl_s": 100}}})


def test_deepfm_gets_a_bias_and_a_vector_per_table():
    run = settings(
        tables={"default": {"dim": 4}},
        features={"user": {}, "history": {"table": "user", "combiner": "mean"}},
    )
    parts = build_parts(run, source=offered(2))
    (table,) = parts.tables
    assert [(s.name, s.dim) for s in table.segments] == [("bias", 1), ("vec", 4)]
    assert [(f.name, f.table, f.combiner.pooling) for f in parts.features] == [
        ("user", "user", "sum"),
        ("history", "user", "mean"),
    ]
    assert [(la.name, la.kind) for la in parts.layouts] == [
        (FIRST_ORDER, "concat"),
        (EMBEDDINGS, "stack"),
    ]


@pytest.mark.parametrize(
    ("model", "segments"),
    [
        ("logistic", ["bias"]),
        ("fm", ["bias", "vec"]),
        ("dlrm", ["vec"]),
        ("dcn", ["vec"]),
        ("mmoe", ["vec"]),
        ("deepfm", ["bias", "vec"]),
        ("wide_and_deep", ["bias", "vec"]),
    ],
)
def test_models_ask_for_the_segments_they_read(model: str, segments: list[str]):
    run = settings(model=model)
    parts = build_parts(run, source=offered(0))
    assert [feature.name for feature in parts.features] == list(OFFERED)
    assert all([s.name for s in table.segments] == segments for table in parts.tables)


def test_bias_takes_the_tables_optimizer_unless_it_has_its_own():
    own = settings(tables={"default": {"bias": {"optimizer": {"kind": "ftrl", "lr": 0.1}}}})
    parts = build_parts(own, source=offered(0))
    assert parts.tables[0].segments[0].optimizer == optimizers.FTRL(lr=0.1)
    plain = settings(tables={"default": {"optimizer": {"kind": "sgd", "lr": 0.2}}})
    parts = build_parts(plain, source=offered(0))
    assert parts.tables[0].segments[0].optimizer == optimizers.SGD(lr=0.2)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"features": {"usr": {}}}, "user"),
        ({"features": {"user": {}}, "tables": {"users": {}}}, "user"),
    ],
)
def test_names_that_data_or_features_do_not_have_are_refused(
    changes: dict[str, object], match: str
):
    run = settings(**changes)
    with pytest.raises(UnknownName, match=match):
        build_parts(run, source=offered(0))


def test_built_values_stay_frozen_dataclasses():
    table = load().tables["default"]
    assert dataclasses.is_dataclass(table.optimizer)


def test_settings_of_several_ranks():
    plain = settings().distributed
    assert (plain.placement.default, plain.grad_reduce, plain.staleness) == ("row_wise", "mean", 0)
    short = load("distributed.placement=grid", "distributed.wire.rows=int8").distributed
    assert (short.placement.default, short.wire.rows, short.wire.grads) == ("grid", "int8", None)
    both = ("distributed.placement=auto", "distributed.placement.tables.tail=grid")
    for order in (both, both[::-1]):  # neither replaces the other
        placement = load(*order).distributed.placement
        assert (placement.default, dict(placement.tables)) == ("auto", {"tail": "grid"})
    named_ones = load("distributed.placement.tables.tail=data_parallel").distributed.placement
    assert (named_ones.default, named_ones.tables) == ("row_wise", {"tail": "data_parallel"})


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("distributed.placement=rows", ["distributed.placement", "'rows'", "row_wise"]),
        ("distributed.placement.tables.tail=x", ["distributed.placement.tables.tail", "grid"]),
        ("distributed.wire.rows=int4", ["distributed.wire.rows", "'int4'"]),
        ("distributed.staleness=-1", ["distributed.staleness", "-1"]),
        ("distributed.stale=1", ["'distributed.stale'", "distributed.staleness"]),
        ("distributed.path=rdma", ["distributed.path", "'rdma'", "shared_memory"]),
    ],
)
def test_wrong_settings_of_several_ranks_say_so(override: str, parts: list[str]):
    with pytest.raises(ConfigError) as caught:
        load(override)
    for part in parts:
        assert part in str(caught.value)


def test_one_rank_loads_its_config_itself():
    votes = LocalCollectives()
    assert config.load_synced_config(votes, settings) == settings()
    config.require_same(votes, settings())
    with pytest.raises(UnknownName, match="baddevice"):
        config.load_synced_config(votes, lambda: settings(baddevice=1))
    told = ConfigError("no such file")

    def fail() -> config.RunConfig:
        raise told

    with pytest.raises(ConfigError) as caught:
        config.load_synced_config(votes, fail)
    assert caught.value is told  # with the traceback that --debug shows


class Inner(Section):
    depth: int = 3


class Outer(Section):
    inner: Inner = Inner()
    name: str = "x"


def test_trees_of_other_programs_are_composed_and_checked(tmp_path: Path):
    (tmp_path / "size").mkdir()
    (tmp_path / "size" / "deep.yaml").write_text("# @package inner\ndepth: 9\n")
    file = tmp_path / "run.yaml"
    file.write_text("defaults: [_self_]\nname: a\ninner: {depth: 1}\n")
    assert config.compose_file(file, ["+size=deep"]) == {"name": "a", "inner": {"depth": 9}}
    found = config.validate(Outer, config.compose_file(file, ["inner.depth=4"]))
    assert found == Outer(inner=Inner(depth=4), name="a")
    with pytest.raises(UnknownName, match=r"inner\.dept.*inner\.depth"):
        config.validate(Outer, config.compose_file(file, ["inner.dept=4"]))
    with pytest.raises(ConfigError, match=r"inner\.depth: got 'deep'"):
        config.validate(Outer, config.compose_file(file, ["inner.depth=deep"]))


ALIASES = "a0: &a0 [1]\n" + "".join(
    f"a{k}: &a{k} [{','.join([f'*a{k - 1}'] * 9)}]\n" for k in range(1, 12)
)
CHAIN = "c0: x\n" + "".join(f'c{k}: "${{c{k - 1}}}${{c{k - 1}}}"\n' for k in range(1, 60))
SPREAD = "c0: [1, 1, 1, 1]\n" + "".join(
    f'c{k}: ["${{c{k - 1}}}", "${{c{k - 1}}}"]\n' for k in range(1, 60)
)
DATA = "data: {source: synthetic}\n"
HOSTILE_FILES = {
    "aliases of aliases": (ALIASES, "10000 values"),
    "a recursive anchor": ("a: &a {b: *a}\n", "alias \\*a"),
    "an anchor in itself": ("&a [*a]\n", "alias \\*a"),
    "40 levels": (f"a: {'[' * 40}{']' * 40}\n", "levels"),
    "5,000 levels": (f"a: {'[' * 5000}{']' * 5000}\n", "level"),
    "texts that double": (CHAIN, "interpolations of too many"),
    "lists that double": (SPREAD, "interpolations of too many|chain"),
    "a circle": ("a: ${b}\nb: ${a}\n", "circle"),
    "a resolver that selects": ("a: ${oc.select:b}\nb: 1\n", "oc.env"),
    "a computed key": ("a: ${b.${c}}\nb: {d: 1}\nc: d\n", "oc.env"),
    "Latin-1": (b"name: \xe9\n", "utf-8"),
    "UTF-16": ("name: x\n".encode("utf-16"), "utf-8"),
    "a NUL byte": (b"name: a\0b\n", "#x0000"),
    "an escaped NUL": (f'device: "a\\0b"\n{DATA}', "device"),
    "a long file": (f"#{'x' * 300_000}\n", "262144 bytes"),
    "a long text": (f"device: {'x' * 5000}\n{DATA}", "device"),
    "many values": (f"a: [{'1,' * 20_000}]\n", "10000 values"),
    "a number of 5,000 digits": (f"seed: {'9' * 5000}\n", "digits"),
    "no number": ("seed: 0x_\n", "base 16"),
    "no time": ("a: !!timestamp x\n", "YAML"),
    "code": ("a: !!python/object/apply:os.system [ls]\n", "constructor"),
    "a null key": (f"tables: {{null: {{}}}}\n{DATA}", "YAML"),
    "a list as a key": ("? [a]\n: b\n", "unhashable"),
    "two documents": ("a: 1\n---\nb: 2\n", "single document"),
    "a number": ("5\n", "YAML"),
    "itself in its defaults": (f"defaults: [run]\n{DATA}", "YAML"),
}


@pytest.mark.parametrize("case", HOSTILE_FILES)
def test_files_that_are_no_config_are_one_error(tmp_path: Path, case: str):
    text, words = HOSTILE_FILES[case]
    file = tmp_path / "run.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=words):
        config.load(file, environment={})
    # And so where another file names it.
    if "defaults" not in case:
        (tmp_path / "outer.yaml").write_text(f"defaults: [run, _self_]\n{DATA}")
        with pytest.raises(ConfigError):
            config.load(tmp_path / "outer.yaml", environment={})


def test_what_files_may_have(tmp_path: Path):
    file = tmp_path / "run.yaml"
    lines = [
        "x-rate: &rate {kind: adagrad, lr: 0.1}",
        "name: ${oc.env:SHOAL_TEST_NOTHING,given}",
        "data: {source: synthetic}",
        "tables:",
        "  default: {dim: 8, optimizer: *rate}",
        '  user: {dim: "${tables.default.dim}", expected_rows: "${.dim}", optimizer: *rate}',
    ]
    file.write_bytes(b"\xef\xbb\xbf" + "\n".join(lines[1:]).replace("*rate", "sgd").encode())
    loaded = config.load(file, environment={})
    assert (loaded.name, loaded.tables["user"].dim) == ("given", 8)
    assert loaded.tables["user"].expected_rows == 8
    file.write_text("\n".join(lines))
    with pytest.raises(UnknownName, match="x-rate"):
        config.load(file, environment={})
    assert config.load(file, ["~x-rate"], environment={}).tables["user"].optimizer.lr == 0.1


@pytest.mark.parametrize("path", ["a\0b.yaml", "x" * 5000 + ".yaml", ".", "", "/dev/null"])
def test_paths_that_are_no_config(path: str):
    with pytest.raises(ConfigError, match="config file"):
        config.load(path, environment={})


HOSTILE_OVERRIDES = {
    **dict.fromkeys(("dense_optimizer.lr=nan", "dense_optimizer.lr=-1"), "learning rate"),
    **dict.fromkeys(("dense_optimizer.lr=inf", "dense_optimizer.lr=1e400"), "learning rate"),
    **dict.fromkeys((f"seed={2**63}", f"seed={2**70}", "seed=-1", "seed=true"), "seed"),
    **dict.fromkeys(("threads=1000000", "threads=0", "threads=1e9"), "threads"),
    **dict.fromkeys(("data.batch_size=10000000000000", "data.batch_size=-1"), "batch_size"),
    "model.hidden=[100000]": "hidden",
    "model.hidden=[8,true]": "hidden",
    "model.dropout=false": "dropout",
    "tables.default.optimizer={kind:adagrad,lr:true}": "lr",
    **dict.fromkeys(("data.source.signal=1e308", "data.source.exponent=1e300"), "data.source"),
    f"model.hidden=[{','.join(['2'] * 65)}]": "hidden",
    "clip_norm=nan": "clip_norm",
    "nan_clip=1e39": "nan_clip",
    "data.prefetch=100000": "prefetch",
    "distributed.timeout_s=1e300": "timeout_s",
    "distributed.staleness=1000000000": "staleness",
    "tables.default.dim=100000": "dim",
    "tables.default.expected_rows=1000000000000": "expected_rows",
    "checkpoint.every_steps=0": "every_steps",
    "checkpoint.every_s=nan": "every_s",
    f"x={'[' * 100}": "levels",
    f"{'.'.join('a' * 100)}=1": "levels",
    f"device={'x' * 9000}": "characters",
    "tables={true: {dim: 2}}": "True",
    "seed=${seed}": "circle",
    "name=???": "name",
}


@pytest.mark.parametrize("override", HOSTILE_OVERRIDES)
def test_overrides_out_of_range_say_where(override: str):
    with pytest.raises(ConfigError, match=HOSTILE_OVERRIDES[override]):
        load(override)


def test_a_model_beyond_the_machine_is_refused_before_it_is_made():
    wide = settings(model={"kind": "deepfm", "hidden": [1 << 16] * 8})
    with pytest.raises(ConfigError, match=r"memory for model deepfm.*model\.hidden"):
        build_parts(wide, source=offered(2), examples=100)
    rows = settings(tables={"default": {"dim": 16_000, "expected_rows": 2**31 - 2}})
    with pytest.raises(ConfigError, match="expected_rows"):
        build_parts(rows, source=offered(2), examples=100)
    small = settings()
    assert build_parts(small, source=offered(2), examples=100)


def test_an_empty_variable_is_not_set():
    assert load(environment={"SHOAL_SEED": "", "SHOAL_DEVICE": ""}) == load()
