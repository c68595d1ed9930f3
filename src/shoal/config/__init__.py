"""Settings of a run: read, checked, frozen, and turned into tables, features and models."""

from __future__ import annotations

from shoal.config.compose import (
    ENVIRONMENT,
    compose_file,
    from_mapping,
    load,
    to_yaml,
    validate,
)
from shoal.config.section import Section
from shoal.config.synced import as_first_rank, load_synced_config, require_same
from shoal.config.tree import RunConfig

__all__ = [
    "ENVIRONMENT",
    "RunConfig",
    "Section",
    "as_first_rank",
    "compose_file",
    "from_mapping",
    "load",
    "load_synced_config",
    "require_same",
    "to_yaml",
    "validate",
]
