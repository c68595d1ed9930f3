"""`shoal ckpt compact`: a chain as one full checkpoint."""

from __future__ import annotations

from rich.console import Console

from shoal.checkpoint.compaction import compact as compact_chain
from shoal.cli.ckpt_inspect import describe_bytes
from shoal.cli.ckpt_places import Place, find

__all__ = ["compact"]


def compact(path: str, *, out: Console) -> None:
    """Write the full checkpoint and say where it is, and the bytes of both.

    Raises:
        CheckpointError: none there, a broken chain, a full one already, or no room.
    """
    place = find(path)
    chain = place.chain()
    written = compact_chain(place.store, place.name)
    new = Place(place.store, place.store.name(written.step, "full"))
    before = sum(file.bytes for link in chain for file in link.files)
    after = sum(file.bytes for file in written.files)
    lines = (
        f"chain: {len(chain)} checkpoints, {describe_bytes(before)}",
        f"full: {new.url}, {describe_bytes(after)}",
    )
    for line in lines:
        out.print(line, markup=False, highlight=False, soft_wrap=True)
