"""Which modules of Shoal the ids of one batch pass in one process."""

from __future__ import annotations

import sys
from types import FrameType

from shoal.embedding.collection import EmbeddingCollection
from shoal.embedding.layouts import Feature
from shoal.ragged import KeyedRagged
from shoal.table.spec import Segment, TableSpec

__all__ = ["modules_on_the_trip"]


def modules_on_the_trip() -> list[str]:
    """Modules whose functions run in one training forward on the CPU, in order of first call."""
    tables = [TableSpec(name=f"t{k}", segments=(Segment(dim=4),)) for k in range(3)]
    owner = EmbeddingCollection(tables, [Feature(f"f{k}", f"t{k}") for k in range(3)])
    batches = [
        KeyedRagged.from_lists({f"f{k}": [[1, 2], [3 + i]] for k in range(3)}) for i in range(2)
    ]
    owner(batches[0])  # what is made once per plan is not on the trip
    seen: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        name = str(frame.f_globals.get("__name__", ""))
        if event == "call" and name.startswith("shoal."):
            seen.setdefault(name)

    sys.setprofile(note)
    try:
        owner(batches[1])
    finally:
        sys.setprofile(None)
    return list(seen)
