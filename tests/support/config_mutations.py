"""Configs of a tiny run, changed at random: types, ranges, nesting, encodings, overrides."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

import yaml

__all__ = ["Case", "case", "tiny"]

NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 7, 100, 1024, 1025, 65_536, 65_537, 10**6, 10**9, 10**12),
    *(2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 10**400),
    *(0.5, -0.5, 1.5, 1e-320, 1e30, 1e39, 1e308, -1e308),
    *(float("nan"), float("inf"), float("-inf")),
)
TEXTS = (
    *(
        "",
        " ",
        "x",
        "null",
        "~",
        "true",
        "no",
        "0",
        "1",
        "-1",
        "1e3",
        "nan",
        "inf",
        "0x10",
        "1_000",
    ),
    *("SUM", "Adam", "ADAGRAD", "cuda", "cuda:0", "cuda:99999999999999999999", "cpu:-1", "meta"),
    *("/", ".", "..", "../..", "/dev/null", "/proc", "/etc/shadow", "nothing/there", "~root"),
    *("s3://bucket/x", "memory://x", "nope://x", "file:///tmp/none", "://", "a\0b", "a\nb"),
    *(
        "é",
        "日本語",
        "\u202e",
        "\U0001f600",
        "x" * 5000,
        "${seed}",
        "${name}",
        "${nothing}",
        "${",
        "???",
    ),
    *("${oc.env:HOME}", "${oc.select:seed}", "$(ls)", "%s", "{}", "a,b", "a=b", "[", "{a: 1}", "'"),
)
LISTS: tuple[Any, ...] = ([], [None], [1], ["a"], [[]], [1, 2, 3], {}, {"a": 1}, {"kind": "x"})
RULES: tuple[Any, ...] = (
    *("adam", "adagrad", "sgd", "ftrl", "nothing", {"kind": "adam", "lr": -1}, {"kind": "sgd"}),
    {"kind": "exponential", "initial": 1.0, "gamma": 1e300},
    {"kind": "polynomial", "initial": 1.0, "decay_steps": 0},
    {"kind": "piecewise", "boundaries": [3, 2], "values": [1, 1, 1]},
    {"kind": "warmup", "target": {"kind": "cosine", "initial": 1, "decay_steps": 5}, "steps": 2},
    *({"ttl_s": -1}, {"ttl_s": 2**70}, {"threshold": 2}, {"counter": "sketch", "threshold": 2}),
    *({"counter": "sketch", "sketch_width": 2**40}, {"counter": "sketch", "sketch_width": 3}),
    *({"per_slot": {1: 2}}, {"per_slot": {"a": "b"}}, {"per_slot": [[1, 2, 3]]}),
)
# Plausible values of settings with these names; most other random values are refused.
PLAUSIBLE: dict[str, tuple[Any, ...]] = {
    "kind": ("adam", "sgd", "adagrad", "ftrl", "uniform", "zeros", "dcn", "dlrm", "logistic"),
    "model": ("dcn", "dlrm", "logistic", {"kind": "dcn", "cross_layers": 1, "low_rank": [2, 2]}),
    "dtype": ("float16", "bfloat16", "float64"),
    "on_full": ("raise", "lru", "lfu"),
    "optimizer": ("momentum", "lamb", "rmsprop", "rowwise_adagrad", {"kind": "adamw", "lr": 1e30}),
    "initializer": ("ones", "normal", "truncated_normal", {"kind": "constant", "value": 1e30}),
    "compressor": ("float16", "fixed_r8", "one_bit"),
    "admission": ({"threshold": 2}, {"threshold": 2, "counter": "sketch", "sketch_width": 64}),
    "expiry": ({"ttl_s": 0}, {"ttl_s": 5, "per_slot": {1: 2}}),
    "lr": (0, 1e-30, 1e30, {"kind": "exponential", "initial": 1.0, "gamma": 1e300}),
    "hidden": ([], [1], [64, 64, 64], [65_536], [65_536, 65_536]),
    "batch_norm": (True,),
    "dropout": (0.5, 0.999),
    "amp": ("bfloat16", "float16"),
    "nan_policy": ("skip", "clip"),
    "shuffle": ("replays", "always"),
    "combiner": ("mean",),
    "threads": (1, 2, 1024),
    "seed": (0, 2**31, 2**63 - 1),
    "dim": (1, 2, 16_384),
    "batch_size": (1, 3, 2**31 - 1),
    "capacity_rows": (1, 2, 2**47),
    "expected_rows": (0, 10_000, 2**31 - 2),
    "examples": (1, 7, 2**47),
    "num_features": (1, 64),
    "num_dense": (0, 1, 1000),
    "vocabulary": (1, 2**47),
    "signal": (0.0, 1e30, -1e300),
    "staleness": (1, 4),
    "epochs": (2, 2**31 - 1),
    "prefetch": (1, 1024),
    "accumulation": (2, 2**31 - 1),
    "points": (2**31 - 1,),
    "tensorboard": (True, "auto"),
    "save_model": (True,),
    "every_steps": (1, 2**31 - 1),
    "every_s": (1e-9, 1e8),
    "baselines": ([], ["logistic", "base_rate"]),
    "timeout_s": (1e-9, 1e8),
}
KEYS = ("kind", "lr", "dim", "Seed", "", "a.b", "é", "x" * 300, "default", 1, True, None, 1.5)
ABSENT = {
    "seed": 1,
    "device": "cpu",
    "threads": 1,
    "clip_norm": 1.0,
    "accumulation": 1,
    "amp": "none",
    "nan_policy": "raise",
    "nan_clip": 1.0,
    "evict_every_s": 10,
    "profile": None,
    "loss": "log_loss",
    "baselines": ["base_rate"],
    "distributed": {"staleness": 0, "timeout_s": 5.0, "grad_reduce": "mean", "path": "auto"},
    "checkpoint": {"every_steps": 5, "full_every": 2, "keep_full": 1, "every_s": 5.0, "dir": None},
    "dense_optimizer": {"kind": "adam", "lr": 0.01, "weight_decay": 0.0},
    "eval": {"batch_size": 8, "max_examples": 8},
    "features": {"f0": {"combiner": "sum", "max_length": 3}, "f1": {"table": "f0"}},
}


def tiny(folder: str) -> dict[str, Any]:
    """The settings that are changed; a run of one step."""
    source = {
        "kind": "synthetic",
        "examples": 8,
        "eval_examples": 8,
        "num_features": 2,
        "vocabulary": 10,
        "num_dense": 1,
    }
    table = {
        "dim": 4,
        "dtype": "float32",
        "optimizer": {"kind": "adagrad", "lr": 0.05},
        "initializer": {"kind": "uniform", "minval": -0.1, "maxval": 0.1},
        "compressor": "float32",
        "capacity_rows": 1000,
        "on_full": "lru",
        "expected_rows": 10,
        "admission": None,
        "expiry": None,
        "bias": {"optimizer": {"kind": "sgd", "lr": 0.1}},
    }
    return {
        "name": "tiny",
        "data": {"source": source, "batch_size": 8, "epochs": 1, "prefetch": 0, "shuffle": "never"},
        "tables": {"default": table},
        "model": {"kind": "deepfm", "hidden": [4], "dropout": 0.0, "batch_norm": False},
        "output": {"dir": folder, "save_model": False},
        "logging": {"points": 1, "jsonl": False, "tensorboard": False, "plain_interval_s": 5.0},
    }


@dataclass(frozen=True)
class Case:
    """Bytes of a file and overrides."""

    text: bytes
    overrides: tuple[str, ...]


def case(seed: int, folder: str) -> Case:
    """The case of a seed; always the same."""
    draw = random.Random(seed)
    settings: Any = tiny(folder)
    for key, value in ABSENT.items():
        if draw.random() < 0.25:
            settings[key] = copy.deepcopy(value)
    overrides: tuple[str, ...] = ()
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        if draw.random() < 0.2:
            overrides += (_override(draw, settings),)
        else:
            _change(draw, settings)
    text = yaml.safe_dump(settings, allow_unicode=draw.random() < 0.5).encode("utf-8", "ignore")
    if draw.random() < 0.15:
        text = _spoilt(draw, text)
    return Case(text, overrides)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else ()
    return [path] * bool(path) + [one for k, v in items for one in _paths(v, (*path, k))]


def _value(draw: random.Random) -> Any:
    kind = draw.random()
    if kind < 0.45:
        return draw.choice(NUMBERS)
    if kind < 0.75:
        return draw.choice(TEXTS)
    if kind < 0.85:
        return copy.deepcopy(draw.choice(RULES))
    if kind < 0.95:
        return copy.deepcopy(draw.choice(LISTS))
    return draw.choice((None, True, False, b"bytes"))


def _change(draw: random.Random, settings: dict[str, Any]) -> None:
    """Change, remove, add or repeat one key."""
    path = draw.choice(_paths(settings))
    here: Any = settings
    for key in path[:-1]:
        here = here[key]
    how = draw.random()
    if how < 0.7 and path[-1] in PLAUSIBLE and draw.random() < 0.6:
        here[path[-1]] = copy.deepcopy(draw.choice(PLAUSIBLE[path[-1]]))
    elif how < 0.7:
        here[path[-1]] = _value(draw)
    elif how < 0.78:
        del here[path[-1]]
    elif how < 0.88:
        here[draw.choice(KEYS)] = _value(draw)
    elif how < 0.94:
        here[path[-1]] = [here[path[-1]]] * draw.choice((1, 2, 50, 2000))
    else:
        for _ in range(draw.choice((2, 20, 60))):
            here[path[-1]] = {draw.choice(("a", "kind", path[-1])): here[path[-1]]}


def _override(draw: random.Random, settings: dict[str, Any]) -> str:
    key = ".".join(map(str, draw.choice(_paths(settings))))
    key = draw.choice((key, key, key, f"+{key}", f"~{key}", f"{key}.x", f"{key}@y", ".", "", "é"))
    value = _value(draw)
    text = str(value) if not isinstance(value, str) else draw.choice((value, repr(value)))
    return f"{key}{draw.choice(('=', '=', '=', '=', ':', ''))}{text}"


def _spoilt(draw: random.Random, text: bytes) -> bytes:
    """The file as no YAML writer leaves it."""
    at = draw.randrange(len(text) + 1)
    junk = draw.choice(
        (b"\0", b"\xff", b"\t", b"\r", b"&a ", b"*a", b"- ", b"{", b"]", b"!!int ", b"|")
    )
    laughs = b"".join(
        b"l%d: &l%d [%s]\n" % (k, k, b",".join([b"*l%d" % (k - 1)] * 9)) for k in range(1, 12)
    )
    chain = b"".join(b'c%d: "${c%d}${c%d}"\n' % (k, k - 1, k - 1) for k in range(1, 40))
    return draw.choice(
        (
            text[:at] + junk + text[at:],
            text[:at],
            text[:at] + bytes([draw.randrange(256)]) + text[at + 1 :],
            b"\xef\xbb\xbf" + text,
            text.decode("utf-8", "ignore").encode("utf-16"),
            text.replace(b"\n", b"\r\n"),
            b"l0: &l0 [1]\n" + laughs + text,
            b"c0: x\n" + chain + text,
            text + b"loop: &loop {again: *loop}\n",
            text + b"deep: " + b"[" * draw.choice((30, 40, 900, 20_000)) + b"\n",
            text + b"#" + b"x" * draw.choice((10, 300_000)) + b"\n",
            text + b"defaults: [tiny]\n",
            b"",
        )
    )
