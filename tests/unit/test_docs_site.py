"""What `make docs` builds the site of: every page, and every public name once."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from support.pages import DOCS, ROOT


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "scripts" / "docs_site.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_every_public_name_has_one_entry(site: ModuleType) -> None:
    names = site.public_names()
    homes = site.homes_of(names)
    pages = {module: site.reference_page(module, own, homes) for module, own in names.items()}
    for package in ("shoal", "shoal.data", "shoal.models", "shoal.config", "shoal.ids"):
        assert names[package], package
    entries = [entry for page in pages.values() for entry in re.findall(r"^::: (.+)$", page, re.M)]
    assert len(entries) >= 400
    for module, own in names.items():
        for name in own:
            assert f"{homes[module, name]}.{name}" in entries
            assert f"{module}.{name}" in pages[module] or homes[module, name] not in pages


def test_navigation_has_every_page(site: ModuleType) -> None:
    listed = {path for section in site.navigation() for each in section.values() for path in
              (next(iter(one.values())) for one in each)}  # fmt: skip
    assert {page.relative_to(ROOT).as_posix() for page in DOCS.rglob("*.md")} <= listed


def test_figures_are_those_of_results(
    site: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "ROOT", tmp_path)
    assert site.bench_page() == ""
    folder = tmp_path / "bench" / "results"
    folder.mkdir(parents=True)
    (folder / "table.json").write_text(
        '{"machine": {"processor": "P"}, "rows": [{"case": "a|b", "ours": 2.0, "ratio": 1.25}]}'
    )
    page = site.bench_page()
    assert "## table" in page and "processor: P" in page
    assert "| case | ours | ratio |\n|---|---|---|\n| a\\|b | 2 | 1.25 |" in page


def test_committed_figures_have_no_empty_cells(site: ModuleType) -> None:
    rows = [line for line in site.bench_page().splitlines() if line.startswith("| ")]
    assert "| case | baseline | ratio | machine | bench |" in rows
    assert any("one H200 | bench/table_gpu.py" in row for row in rows)
    assert not [row for row in rows if "|  |" in row]
