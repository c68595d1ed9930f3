"""Every marked test belongs to a lane of the Makefile, so that none is silently never run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
ROOT = Path(__file__).parents[2]
BUILTIN = {
    "timeout",
    "parametrize",
    "filterwarnings",
    "skipif",
    "skip",
    "usefixtures",
    "xdist_group",
}
# marker -> the Makefile target that runs tests with it
LANES = {"gpu": "test-gpu", "slow": "test-slow", "multiproc": "test"}


def used_markers() -> dict[str, list[str]]:
    used: dict[str, list[str]] = {}
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Attribute)
                and node.value.attr == "mark"
            ):
                used.setdefault(node.attr, []).append(path.name)
    return used


def recipe(target: str) -> str:
    text = (ROOT / "Makefile").read_text()
    found = re.search(rf"^{re.escape(target)}:.*\n((?:\t.*\n)+)", text, flags=re.MULTILINE)
    assert found, f"no target {target}"
    return found.group(1)


def test_every_marker_has_a_lane() -> None:
    unknown = set(used_markers()) - BUILTIN - set(LANES)
    assert not unknown, f"markers without a lane: {unknown}"


def test_declared_markers_are_the_lanes() -> None:
    ini = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert {line.split(":")[0] for line in ini["markers"]} == set(LANES)


def test_lanes_select_their_marker() -> None:
    assert "-m gpu" in recipe("test-gpu")
    assert "-m gpu tests/dist" in recipe("test-gpu-dist")
    assert "-m slow" in recipe("test-slow")
    assert "not gpu and not slow" in recipe("test")
    assert '-m "not gpu" tests' in recipe("test-all")


def test_skips_print_a_reason() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
                ("mark.skip", "skipif")
            ):
                assert any(k.arg == "reason" for k in node.keywords), (
                    f"{path.name}: skip, no reason"
                )
