"""Tests that live in packages are all collected, once, under names of their own."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.gathering import gathered

TESTS = Path(__file__).parents[2]
# package -> the file that collects it
COLLECTED = {
    "parity/distribution_ops": "parity/test_distribution_ops.py",
    "property/ops": "property/test_ops.py",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "families"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "families"]:
        del sys.modules[name]


def test_tests_of_all_modules_carry_the_marks_of_theirs(package: Path) -> None:
    (package / "a.py").write_text(
        "import pytest\npytestmark = pytest.mark.slow\n"
        "@pytest.mark.gpu\ndef test_one() -> None: ...\ndef part() -> None: ...\n"
    )
    (package / "b.py").write_text("def test_two() -> None: ...\n")
    found = gathered("families")
    assert list(found) == ["test_one", "test_two"]
    assert {mark.name for mark in found["test_one"].pytestmark} == {"gpu", "slow"}
    assert not hasattr(found["test_two"], "pytestmark")


def test_two_tests_of_one_name_are_refused(package: Path) -> None:
    for name in "ab":
        (package / f"{name}.py").write_text("def test_same() -> None: ...\n")
    with pytest.raises(ValueError, match=r"test_same: in families\.a and in families\.b"):
        gathered("families")


@pytest.mark.slow
def test_every_module_with_tests_is_collected_once() -> None:
    for path in TESTS.rglob("*.py"):
        tree = ast.parse(path.read_text())
        tests = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
        tests = [test for test in tests if test.name.startswith("test_")]
        package = path.parent.relative_to(TESTS).as_posix()
        inside = package in COLLECTED
        assert not tests or path.name.startswith("test_") != inside, path
    for package, collector in COLLECTED.items():
        assert f'gathered("{package.replace("/", ".")}")' in (TESTS / collector).read_text()
