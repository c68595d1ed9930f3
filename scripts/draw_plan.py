"""Draws docs/images/plan-report.svg: the time bars of the report of a plan.

    python scripts/draw_plan.py

The plan is of MLPerf's DLRM-DCNv2 (examples/dlrm_dcnv2_tables.yaml) for two nodes of 8 GPUs, whose
speeds are assumed.
"""

from __future__ import annotations

import re
from pathlib import Path

from shoal.planner import Topology, dense_work, make_plan
from shoal.planner.report import html_of
from shoal.planner.simulation import read_tables

ROOT = Path(__file__).parents[1]
COLOURS = {"--c0": "#0b66c3", "--c1": "#c4570a", "--c2": "#22804a", "--c3": "#8a3fb0",
           "--c4": "#8d6b00", "--soft": "#99a3ab"}  # fmt: skip


def main() -> None:
    described = read_tables(ROOT / "examples" / "dlrm_dcnv2_tables.yaml")
    assert described is not None
    topology = Topology(nodes=2, local_size=8)
    work = dense_work(topology, described.batch_size, described.dense_weights)
    page = html_of(make_plan(described.tables, topology, work), "DLRM-DCNv2")
    section = page.partition("<h2>Time of each rank</h2>")[2].partition("</section>")[0]
    view = re.search(r'viewBox="0 0 (\d+) (\d+)"', section)
    bars = re.search(r"<svg[^>]*>(.*?)</svg>", section)
    names = re.findall(r"background:var\((--\w+)\)\"></i>([^<]*)</span>", section)
    assert view is not None and bars is not None
    width, height = int(view[1]), int(view[2])
    legend, x = [], 80
    for colour, name in names:
        legend.append(f'<rect x="{x}" y="{height + 8}" width="12" height="12" fill="{colour}"/>')
        legend.append(f'<text x="{x + 16}" y="{height + 18}">{name}</text>')
        x += 34 + 7 * len(name)
    drawn = bars[1] + "".join(legend)
    for name, colour in COLOURS.items():
        drawn = drawn.replace(f"var({name})", colour).replace(f'"{name}"', f'"{colour}"')
    target = ROOT / "docs" / "images" / "plan-report.svg"
    target.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + 28}" '
        'font-family="sans-serif" font-size="12" fill="#667079">'
        f'<rect width="{width}" height="{height + 28}" fill="#fff"/>{drawn}</svg>\n'
    )
    print(target.relative_to(ROOT))


if __name__ == "__main__":
    main()
