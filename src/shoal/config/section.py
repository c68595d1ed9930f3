"""What the settings are made of: sections that know their keys, and rules built by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, model_validator
from pydantic_core import core_schema

from shoal.config import named
from shoal.errors import ConfigError, UnknownName, describe
from shoal.rules.admission import Admission
from shoal.rules.compressors import Compressor
from shoal.rules.expiry import Expiry
from shoal.rules.initializers import Initializer
from shoal.rules.optimizers import Optimizer
from shoal.rules.schedules import Schedule

__all__ = [
    "AdmissionRule",
    "CompressorRule",
    "ExpiryRule",
    "InitializerRule",
    "LearningRate",
    "OptimizerRule",
    "Section",
]


class Section(BaseModel):
    """A part of the tree: frozen, and it knows its keys.

    An unknown key raises `UnknownName` with the key and the known ones as further `args`, so
    that `compose` can say where in the tree it was.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            for key in value:
                if key not in cls.model_fields:
                    known = tuple(cls.model_fields)
                    raise UnknownName(f"unknown config key {key}", str(key), known)
        return value


@dataclass(frozen=True, slots=True)
class _Built:
    """Makes a field hold what `build` returns, and dump it as plain settings again."""

    build: Callable[[Any], Any]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self.build,
            serialization=core_schema.plain_serializer_function_ser_schema(named.dump),
        )


def _rate(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return named.build(value, named.SCHEDULES)
    if not 0 <= value < math.inf:
        raise ConfigError(
            describe(
                "learning rate",
                got=value,
                allowed="a finite number, 0 or more, or a schedule",
                remedy="Set it to one.",
            )
        )
    return float(value)


def _admission(value: Any) -> Any:
    return None if value is None else named.build_record(value, Admission, "admission")


def _expiry(value: Any) -> Any:
    return None if value is None else named.build_record(value, Expiry, "expiry")


OptimizerRule = Annotated[Optimizer, _Built(lambda value: named.build(value, named.OPTIMIZERS))]
InitializerRule = Annotated[
    Initializer, _Built(lambda value: named.build(value, named.INITIALIZERS))
]
CompressorRule = Annotated[Compressor, _Built(lambda value: named.build(value, named.COMPRESSORS))]
LearningRate = Annotated[float | Schedule, _Built(_rate)]
AdmissionRule = Annotated[Admission | None, _Built(_admission)]
ExpiryRule = Annotated[Expiry | None, _Built(_expiry)]
