"""Imports go downwards; within a level only inside one's own room."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import shoal

PACKAGE = Path(shoal.__file__).parent

LEVELS: dict[str, int] = {
    "errors": 0,
    "hashing": 0,
    "_core": 0,
    "address": 1,
    "uncompiled": 0,
    "ragged": 2,
    "_jagged": 2,
    "fid": 2,
    "placement": 1,
    "telemetry": 1,
    "rules": 1,
    "wire": 1,
    "kernels": 2,
    "comm": 2,
    "ops": 3,
    "table": 4,
    "combiners": 4,
    "discovery": 4,
    "exchange": 5,
    "plan": 5,
    "checkpoint": 5,
    "embedding": 6,
    "layouts": 6,
    "ledger": 6,
    "metrics": 6,
    "ps": 6,
    "optim": 7,
    "distributed": 7,
    "data": 7,
    "models": 7,
    "sync": 7,
    "pipeline": 8,
    "serve": 8,
    "report": 8,
    "config": 9,
    "train": 10,
    "cli": 11,
}
# Files of one room that stand beside each other instead of in a folder.
SAME_ROOM = [{"ragged", "_jagged"}, {"embedding", "layouts", "ledger"}]


def modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            names = [node.module or ""]
            if node.module == "shoal":
                names = [f"shoal.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "shoal":
                assert len(parts) > 1, f"{path.name} imports the public face"
                rooms.add(parts[1])
    return rooms


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    room = room_of(path)
    assert room in LEVELS, f"give room {room!r} a level"
    for other in imported_rooms(path) - {room}:
        same = any({room, other} <= group for group in SAME_ROOM)
        assert same or LEVELS[other] < LEVELS[room], f"{room} imports {other}"


def test_no_drawer_modules() -> None:
    for path in modules():
        assert path.stem not in {"utils", "util", "helpers", "helper", "misc", "common"}
        assert not path.stem.endswith(("_utils", "_helpers"))


def test_files_stay_small() -> None:
    repository = Path(__file__).parents[2]
    for folder, pattern in (("src/shoal", "*.py"), ("csrc", "*.[ch]*"), ("bench", "*.py")):
        for path in (repository / folder).rglob(pattern):
            if path.suffix != ".inc":
                lines = len(path.read_text().splitlines())
                assert lines <= 500, f"{path.relative_to(repository)} has {lines} lines"
