"""Each ratio that README and the pages claim is of rows that a bench wrote to bench/results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RATIO = re.compile(
    r"\d[\d.]*x(?: to \d[\d.]*x)?(?![\w*])|\d[\d.]*-\d[\d.]*x|\d[\d.]* times (?:as|faster)"
)
HEADER = "| measured | Shoal against the baseline | baseline | machine | bench |"
PAGES = [
    ROOT / "README.md",
    *(page for page in (ROOT / "docs").rglob("*.md") if "decisions" not in page.parts),
]


def results() -> list[dict[str, Any]]:
    files = sorted((ROOT / "bench" / "results").glob("*.json"))
    rows = [row for file in files for row in json.loads(file.read_text())["rows"]]
    return [row for row in rows if "figure" in row]  # others are what a bench wrote


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_ratio_is_a_row(page: Path) -> None:
    known = {row["figure"] for row in results()}
    assert set(RATIO.findall(page.read_text())) <= known


def test_the_table_of_readme_is_rows() -> None:
    lines = (ROOT / "README.md").read_text().partition(HEADER)[2].splitlines()[2:]
    shown = []
    for line in lines:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        shown.append([*cells[:4], re.sub(r".*\((.*)\).*", r"\1", cells[4])])
    keys = ("case", "figure", "baseline", "machine", "bench")
    rows = [[row[key] for key in keys] for row in results()]
    assert len(shown) == 3
    assert all(row in rows for row in shown)


@pytest.mark.parametrize("row", results(), ids=lambda row: row["figure"])
def test_a_figure_is_of_green_rows_that_its_bench_wrote(row: dict[str, Any]) -> None:
    assert (ROOT / row["bench"]).is_file()
    rows = json.loads((ROOT / "bench" / "results" / row["file"]).read_text())["rows"]
    # In rows that are times another thing ("x") the ratio is of that to its bar.
    ratios = {
        one["case"]: one["ours" if one["unit"] == "x" else "ratio"] for one in rows if one["ok"]
    }
    found = [ratios[case] for case in row["of"]]
    ends = dict.fromkeys(f"{end:.1f}x" for end in (min(found), max(found)))
    assert row["figure"] == " to ".join(ends)
