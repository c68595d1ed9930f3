from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from shoal import report
from shoal.errors import ShapeError
from shoal.report import Chart, Series


class Outline(HTMLParser):
    """Checks that tags nest, and gathers what the page would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def sample(**changes: Any) -> str:
    """The page of a run."""
    curve = Chart(
        title="Loss",
        x_label="examples",
        y_label="log loss",
        series=(
            Series(name="deepfm", x=(0, 1000, 2000), y=(0.7, 0.5, 0.45)),
            Series(name="logistic", x=(0, 1000, 2000), y=(0.7, math.nan, 0.55)),
        ),
    )
    parts: dict[str, Any] = {
        "title": "flights",
        "subtitle": "a run",
        "metrics": {
            "deepfm": {"auc": 0.71234, "examples": 55000},
            "base_rate": {"auc": math.nan, "log_loss": 0.6},
        },
        "facts": {"rows": "12.3 k"},
        "charts": (curve,),
        "config": "name: flights\n",
    }
    return report.render(**(parts | changes))


def outline(page: str) -> Outline:
    parser = Outline()
    parser.feed(page)
    assert parser.open == []
    return parser


def test_page_is_whole_and_self_contained():
    page = sample()
    parser = outline(page)
    assert "script" not in parser.tags
    assert parser.links == []
    assert "url(" not in page
    assert "@media (prefers-color-scheme: dark)" in page


def test_metrics_show_each_model_and_leave_undefined_figures_blank():
    page = sample()
    body = page[page.index("<tbody>") : page.index("</tbody>")]
    rows = re.findall(r"<tr>(.*?)</tr>", body)
    cells = [re.findall(r"<td>(.*?)</td>", row) for row in rows]
    assert cells == [
        ["deepfm", "0.7123", "55,000", "&mdash;"],
        ["base rate", "&mdash;", "&mdash;", "0.6000"],
    ]


def test_text_is_escaped():
    page = sample(title="<b>&", config="a: <script>\n", facts={"<i>": "<u>"})
    parser = outline(page)
    assert not {"script", "u"} & set(parser.tags)
    assert "&lt;script&gt;" in page
    assert "<title>&lt;b&gt;&amp;" in page


def polylines(page: str) -> list[list[tuple[float, float]]]:
    return [
        [tuple(float(v) for v in pair.split(",")) for pair in points.split()]
        for points in re.findall(r'<polyline [^>]*points="([^"]*)"', page)
    ]


def test_curves_keep_order_and_skip_points_that_are_not_finite():
    first, second = polylines(sample())
    assert len(first) == 3
    assert len(second) == 2
    assert first[0][0] < first[1][0] < first[2][0]
    assert first[0][1] < first[1][1] < first[2][1]


def test_points_stay_inside_the_drawing():
    xs = tuple(float(x) for x in range(5000))
    chart = Chart(title="t", x_label="x", y_label="y", series=(Series(name="s", x=xs, y=xs[::-1]),))
    (points,) = polylines(sample(charts=(chart,)))
    assert len(points) <= 401
    assert all(0 <= x <= 520 and 0 <= y <= 300 for x, y in points)


@pytest.mark.parametrize("values", [(0.5,), (0.5, 0.5), (0.0, 0.0), (-3.0, -3.0), (1e-12, 1e9)])
def test_flat_and_extreme_series_draw(values: tuple[float, ...]):
    series = Series(name="s", x=tuple(range(len(values))), y=values)
    chart = Chart(title="t", x_label="x", y_label="y", series=(series,))
    outline(sample(charts=(chart,)))


def test_a_chart_without_points_says_so():
    chart = Chart(title="t", x_label="x", y_label="y", series=(Series(name="s", x=(), y=()),))
    page = sample(charts=(chart,))
    assert "No points were recorded." in page


def test_sizes_become_dots():
    series = Series(name="bins", x=(0.1, 0.2), y=(0.1, math.nan), sizes=(1.0, 0.5))
    chart = Chart(title="t", x_label="x", y_label="y", series=(series,))
    assert sample(charts=(chart,)).count("<circle ") == 1


def test_series_of_unequal_lengths_are_refused():
    with pytest.raises(ShapeError, match="as many of each"):
        Series(name="s", x=(1.0,), y=())
