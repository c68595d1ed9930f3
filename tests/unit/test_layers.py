"""Imports go downwards; within a level only inside one's own room."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import shoal

PACKAGE = Path(shoal.__file__).parent

LEVELS: dict[str, int] = {
    room: level
    for level, rooms in enumerate(
        (
            "errors _core uncompiled",
            "address compiling",
            "ids",
            "ragged rules metrics telemetry report lookup",
            "kernels comm placement models",
            "ops",
            "table discovery data",
            "exchange checkpoint planner",
            "embedding ps",
            "optim sync config",
            "distributed",
            "pipeline",
            "train",
            "serve",
            "cli compat",
        )
    )
    for room in rooms.split()
}


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
        assert LEVELS[other] < LEVELS[room], f"{room} imports {other}"


def test_no_drawer_modules() -> None:
    for path in modules():
        assert path.stem not in {"utils", "util", "helpers", "helper", "misc", "common"}
        assert not path.stem.endswith(("_utils", "_helpers"))


def test_no_two_classes_share_a_name() -> None:
    owners: dict[str, list[str]] = {}
    for path in modules():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                owners.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: paths for name, paths in owners.items() if len(paths) > 1} == {}


def test_files_stay_small() -> None:
    repository = Path(__file__).parents[2]
    for folder, pattern in (("src/shoal", "*.py"), ("csrc", "*.[ch]*"), ("bench", "*.py")):
        for path in (repository / folder).rglob(pattern):
            if path.suffix != ".inc":
                lines = len(path.read_text().splitlines())
                assert lines <= 800, f"{path.relative_to(repository)} has {lines} lines"
