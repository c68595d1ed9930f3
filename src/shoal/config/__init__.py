"""Settings of a run: read, checked, frozen, and turned into tables, features and models."""

from __future__ import annotations

from shoal.comm.consensus import as_first_rank
from shoal.config.compose import (
    ENVIRONMENT,
    compose_file,
    from_mapping,
    load,
    load_synced_config,
    require_same,
    to_yaml,
    validate,
)
from shoal.config.tree import RunConfig, Section

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
