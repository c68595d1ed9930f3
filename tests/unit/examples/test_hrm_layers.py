"""The example stands on the public face alone, and its files stay small."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal

EXAMPLE = Path(__file__).parents[3] / "examples" / "hrm"
FILES = sorted(EXAMPLE.rglob("*.py"))
# Rooms that the documentation names as they are, beside what `shoal` itself has.
ROOMS = {
    *("shoal.errors", "shoal.comm", "shoal.config", "shoal.data"),
    *("shoal.checkpoint", "shoal.optim", "shoal.telemetry", "shoal.train"),
}
MAX_LINES, MAX_FUNCTION_LINES = 400, 60


def shoal_imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            yield from (name for name in names if name.partition(".")[0] == "shoal")
        elif isinstance(node, ast.ImportFrom) and node.module == "shoal":
            yield from (f"shoal:{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shoal."):
            yield node.module or ""


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(EXAMPLE)))
def test_files_stand_on_the_public_face(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for name in shoal_imports(tree):
        public = name.removeprefix("shoal:")
        assert public in shoal.__all__ if public != name else name in ROOMS | {"shoal"}, name


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(EXAMPLE)))
def test_files_stay_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < MAX_FUNCTION_LINES, node.name
