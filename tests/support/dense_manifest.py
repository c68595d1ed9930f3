"""A handwritten manifest that has only dense parts."""

from __future__ import annotations

from shoal.checkpoint.manifest import SCHEMA, Manifest, SavedFile

__all__ = ["manifest_of"]


def manifest_of(
    files: tuple[SavedFile, ...], modules: tuple[str, ...], optimizers: tuple[str, ...]
) -> Manifest:
    return Manifest(
        schema=SCHEMA,
        id="0" * 32,
        kind="full",
        step=0,
        position=0,
        version=1,
        parent=None,
        seed=0,
        last_steps={},
        world_size=1,
        created_s=0,
        packages={},
        tables=(),
        modules=modules,
        optimizers=optimizers,
        files=files,
    )
