"""Rules by name: `{kind: adagrad, lr: 0.05}` in a YAML file to a frozen value of `shoal.rules`.

A rule's settings are its dataclass fields, declared beside its arithmetic; nothing is listed
twice here but the names.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from shoal.errors import ConfigError, describe, unknown_name
from shoal.rules import admission, compressors, expiry, initializers, optimizers, schedules

__all__ = [
    "COMPRESSORS",
    "INITIALIZERS",
    "OPTIMIZERS",
    "SCHEDULES",
    "build",
    "build_record",
    "dump",
]

Registry = Mapping[str, type]

OPTIMIZERS: Registry = {
    "adadelta": optimizers.Adadelta,
    "adagrad": optimizers.Adagrad,
    "adam": optimizers.Adam,
    "adamw": optimizers.AdamW,
    "amsgrad": optimizers.Amsgrad,
    "batch_softmax": optimizers.BatchSoftmax,
    "delay_compensated": optimizers.DelayCompensated,
    "dynamic_wd_adagrad": optimizers.DynamicWdAdagrad,
    "ftrl": optimizers.FTRL,
    "group_adagrad": optimizers.GroupAdagrad,
    "group_ftrl": optimizers.GroupFTRL,
    "lamb": optimizers.LAMB,
    "momentum": optimizers.Momentum,
    "moving_average": optimizers.MovingAverage,
    "rmsprop": optimizers.RMSprop,
    "rowwise_adagrad": optimizers.RowWiseAdagrad,
    "sgd": optimizers.SGD,
    "sign_sgd": optimizers.SignSGD,
}
INITIALIZERS: Registry = {
    "batch_softmax": initializers.BatchSoftmaxInit,
    "constant": initializers.Constant,
    "normal": initializers.Normal,
    "ones": initializers.Ones,
    "truncated_normal": initializers.TruncatedNormal,
    "uniform": initializers.Uniform,
    "zeros": initializers.Zeros,
}
COMPRESSORS: Registry = {
    "fixed_r8": compressors.FixedR8,
    "float16": compressors.Float16,
    "float32": compressors.Float32,
    "one_bit": compressors.OneBit,
}
SCHEDULES: Registry = {
    "constant": schedules.Constant,
    "cosine": schedules.Cosine,
    "exponential": schedules.Exponential,
    "piecewise": schedules.Piecewise,
    "polynomial": schedules.Polynomial,
    "warmup": schedules.Warmup,
}
_REGISTRIES: tuple[tuple[str, Registry], ...] = (
    ("optimizer", OPTIMIZERS),
    ("initializer", INITIALIZERS),
    ("compressor", COMPRESSORS),
    ("schedule", SCHEDULES),
)
_RECORDS = (admission.Admission, expiry.Expiry)


def build(value: Any, registry: Registry) -> Any:
    """Build the rule that `{kind: NAME, ...}` (or just `NAME`) means; a built rule passes.

    Raises:
        UnknownName: no such kind or setting.
        ConfigError: no kind, or a setting of the wrong type or value.
    """
    if is_dataclass(value):
        return value
    what = next(name for name, known in _REGISTRIES if known is registry)
    settings = {"kind": value} if isinstance(value, str) else value
    if not isinstance(settings, Mapping) or "kind" not in settings:
        raise ConfigError(
            describe(
                what,
                got=repr(value),
                allowed=f"a name, or {{kind: name, ...}}, of {', '.join(sorted(registry))}",
                remedy=f"Say which {what} with kind.",
            )
        )
    kind = str(settings["kind"])
    if kind not in registry:
        raise unknown_name(f"{what} kind", kind, registry)
    rest = {key: setting for key, setting in settings.items() if key != "kind"}
    return build_record(rest, registry[kind], f"{what} {kind}")


def build_record(settings: Any, cls: type, what: str) -> Any:
    """Build a frozen dataclass from settings named as its fields; a built one passes.

    Raises:
        UnknownName: a setting that `cls` does not have.
        ConfigError: a setting missing, of the wrong type, or refused by `cls`.
    """
    if isinstance(settings, cls):
        return settings
    known = {field.name: field for field in fields(cls) if field.init}
    if not isinstance(settings, Mapping):
        raise ConfigError(
            describe(
                what,
                got=repr(settings),
                allowed=f"settings of {', '.join(known)}",
                remedy="Write key: value pairs.",
            )
        )
    for key in settings:
        if key not in known:
            raise unknown_name(f"setting of {what}", str(key), known)
    required = [
        name
        for name, field in known.items()
        if field.default is MISSING and field.default_factory is MISSING and name not in settings
    ]
    if required:
        raise ConfigError(
            describe(
                what,
                got=f"no {', '.join(required)}",
                allowed=f"settings of {', '.join(known)}",
                remedy=f"Give {', '.join(required)}.",
            )
        )
    hints = typing.get_type_hints(cls)
    return cls(**{key: _convert(v, hints[key], f"{key} of {what}") for key, v in settings.items()})


def dump(value: Any) -> Any:
    """The settings of a rule as plain YAML values; `build` of them gives an equal rule."""
    if not is_dataclass(value):
        if isinstance(value, tuple):
            return [dump(item) for item in value]
        return value
    plain = {field.name: dump(getattr(value, field.name)) for field in fields(value) if field.init}
    if isinstance(value, _RECORDS):
        return plain
    for _, registry in _REGISTRIES:
        for name, cls in registry.items():
            if type(value) is cls:
                return {"kind": name, **plain}
    return plain


def _convert(value: Any, hint: Any, what: str) -> Any:
    options = _options(hint)
    if isinstance(value, Mapping):
        for base, registry in (
            (schedules.Schedule, SCHEDULES),
            (optimizers.Optimizer, OPTIMIZERS),
        ):
            if any(isinstance(option, type) and issubclass(option, base) for option in options):
                return build(value, registry)
        value = tuple(sorted(value.items()))
    try:
        adapter = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
        return adapter.validate_python(value)
    except ValidationError as error:
        raise ConfigError(
            describe(
                what,
                got=repr(value),
                allowed=error.errors()[0]["msg"],
                remedy="Change the setting.",
            )
        ) from error


def _options(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)
