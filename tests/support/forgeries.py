"""Checkpoints of a tiny job with changed manifests and files, whose checksums are all right."""

from __future__ import annotations

import json
import random
import shutil
import zlib
from pathlib import Path
from typing import Any

from shoal.checkpoint.manifest import MANIFEST

__all__ = ["forge"]

# Files that may be rewritten: never a path that a forged manifest names.
_OURS = (
    *("rows/00000.arrow", "rows/00001.arrow", "deleted/00000.arrow", "admission/00000.arrow"),
    *("admission/main.views.sketch", "dense/.metadata", "dense/__0_0.distcp", "state.pt"),
)

VALUES: tuple[Any, ...] = (
    *(0, 1, -1, -5, 2, 7, 63, 64, 255, 10**7, 2 * 10**8, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63),
    *(2**64, 2**64 + 1, 2**70, 10**30, 1.0, 0.5, 1e308, True, False, None),
    *("", "x", ".", "..", "../..", "/etc/passwd", "a/b", "a\\b", "a\0b", "\ud800", "é", "x" * 5000),
    *(
        "rows",
        "full",
        "delta",
        "dense",
        "state",
        "admission",
        "sketch",
        "deleted",
        "exact",
        "float64",
    ),
    *(
        "bfloat16",
        "float16",
        "sketch 64x4",
        "sketch 999999999x16",
        "sketch 0x0",
        "adam",
        "main/items",
    ),
    *("rows/00000.arrow", "rows/00001.arrow", "state.pt", "dense/.metadata", "manifest.json"),
    *([], [1], ["main/items"], ["main/items", "main/views"], ["main/items"] * 2, {}, {"a": 1}),
)


def forge(number: int, source: Path, target: Path) -> None:
    """Copy a store of checkpoints to `target`, and change it by the case of that number."""
    draw = random.Random(number)
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    folder = draw.choice(sorted(path for path in target.iterdir() if path.is_dir()))
    manifest = folder / MANIFEST
    raw = json.loads(manifest.read_text())
    del raw["crc32"]
    for _ in range(draw.choice((1, 1, 2, 4))):
        if draw.random() < 0.5:
            _change(draw, raw)
        else:
            _damage(draw, folder, raw)
    head = json.dumps(raw, indent=2).removesuffix("\n}")
    data = f'{head},\n  "crc32": "{zlib.crc32(head.encode()):08x}"\n}}\n'.encode()
    if draw.random() < 0.05:
        data = draw.choice(
            (
                b"",
                data[: draw.randrange(len(data))],
                b"[" * 100_000,
                b"\xff" + data,
                b'{"schema": 2, "crc32": "0"}',
                data.replace(b"2", b"9" * 5000, 1),
            )
        )
    manifest.write_bytes(data)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    pairs: Any = ()
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, list):
        pairs = enumerate(value)
    return [path] * bool(path) + [one for k, v in pairs for one in _places(v, (*path, k))]


def _change(draw: random.Random, raw: dict[str, Any]) -> None:
    """Another value of a field, one field less or more, an entry twice."""
    path = draw.choice(_places(raw))
    here: Any = raw
    for key in path[:-1]:
        here = here[key]
    how = draw.random()
    if how < 0.8:
        old, new = here[path[-1]], draw.choice(VALUES)
        near = type(old) is int and draw.random() < 0.4
        here[path[-1]] = old + draw.choice((-1, 1, 10, 2**20)) if near else new
    elif how < 0.88:
        del here[path[-1]]
    elif isinstance(here, list):
        here.append(here[path[-1]])
    else:
        here[draw.choice(("more", path[-1], "rows"))] = draw.choice(VALUES)


def _damage(draw: random.Random, folder: Path, raw: dict[str, Any]) -> None:
    """Other bytes of a file, with the size and checksum that they have."""
    files = raw.get("files")
    if not isinstance(files, list) or not files:
        return
    entry = draw.choice(files)
    path = folder / entry["path"] if isinstance(entry, dict) and _is_plain(entry) else None
    if path is None or not path.is_file():
        return
    data = bytearray(path.read_bytes())
    how = draw.random()
    if how < 0.6 and data:
        for _ in range(draw.choice((1, 1, 3, 20))):
            data[draw.randrange(len(data))] = draw.choice(
                (0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256))
            )
    elif how < 0.75:
        data = data[: draw.randrange(len(data) + 1)]
    elif how < 0.85:
        others = [one for one in folder.rglob("*") if one.is_file()]
        data = bytearray(draw.choice(sorted(others)).read_bytes())
    elif how < 0.95:
        start = draw.randrange(len(data) + 1)
        data[start : start + 8] = draw.choice((2**31, 2**40, 2**63, 2**64 - 1)).to_bytes(
            8, "little"
        )
    else:
        path.unlink()
        if draw.random() < 0.5:
            path.mkdir()
        return
    path.write_bytes(data)
    entry["bytes"], entry["crc32"] = len(data), zlib.crc32(data)


def _is_plain(entry: dict[str, Any]) -> bool:
    path = entry.get("path")
    return isinstance(path, str) and path in _OURS
