"""One-file HTML: a run with its curves, calibration, metrics, config. No scripts, nothing fetched.

The charts are inline SVG drawn here; colours are CSS variables, so the page follows the
reader's light or dark setting.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.errors import ShapeError

_WIDTH, _HEIGHT = 520, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 22, 12, 40
_MOST_POINTS = 400

_STYLE = """
:root { color-scheme: light dark; --bg: #fbfbfa; --card: #ffffff; --ink: #1c2024; --soft: #667079;
  --line: #dfe3e6; --c0: #0b66c3; --c1: #c4570a; --c2: #22804a; --c3: #8a3fb0; --c4: #8d6b00; }
@media (prefers-color-scheme: dark) { :root { --bg: #14171a; --card: #1c2024; --ink: #e7eaec;
  --soft: #99a3ab; --line: #343b41; --c0: #62adf5; --c1: #f29a55; --c2: #5cc98a; --c3: #c792e6;
  --c4: #d9b94a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1140px; padding: 28px 20px 60px; background: var(--bg);
  color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 16px; margin: 0 0 8px; }
.sub { color: var(--soft); margin: 2px 0 22px; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr));
  gap: 16px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 16px; margin: 0 0 16px; overflow-x: auto; }
.grid section { margin: 0; } .grid { margin-bottom: 16px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 500; } th:first-child, td:first-child { text-align: left; }
tr:first-child td { font-weight: 600; }
.facts { display: flex; flex-wrap: wrap; gap: 8px 32px; }
.facts div { display: flex; flex-direction: column; } .facts b { font-size: 20px; }
.facts span { color: var(--soft); font-size: 13px; }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 12px; }
.frame { stroke: var(--line); fill: none; } .line { fill: none; stroke-width: 1.8; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; color: var(--soft); font-size: 13px; }
.legend i { display: inline-block; width: 14px; height: 3px; margin: 0 6px 3px 0;
  vertical-align: middle; }
pre { margin: 0; font: 13px/1.5 ui-monospace, "SF Mono", Menlo, monospace; }
""".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a chart: x and y of equal length; points that are not finite are left out.

    Args:
        sizes: drawn as dots of these relative areas (0..1) when given, else as a line.
        faint: drawn dashed in the colour of the axes (a reference line).

    Raises:
        ShapeError: x, y (and sizes) differ in length.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    sizes: tuple[float, ...] | None = None
    faint: bool = False

    def __post_init__(self) -> None:
        lengths = {len(self.x), len(self.y), len(self.x if self.sizes is None else self.sizes)}
        if len(lengths) > 1:
            raise ShapeError(
                f"series {self.name!r}",
                got=f"{len(self.x)} x and {len(self.y)} y values",
                allowed="as many of each",
                remedy="Give one y (and size) for each x.",
            )

    def points(self) -> list[tuple[float, float, float]]:
        """The finite points: x, y and size."""
        every = zip(self.x, self.y, self.sizes or [0.0] * len(self.x), strict=True)
        return [point for point in every if all(map(math.isfinite, point[:2]))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A titled chart with labelled axes. `y_from_zero` starts the y axis at 0."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    y_from_zero: bool = False


def render(
    title: str,
    subtitle: str,
    *,
    metrics: Mapping[str, Mapping[str, float]],
    facts: Mapping[str, str],
    charts: Sequence[Chart],
    config: str,
) -> str:
    """The page of a run as one HTML document.

    Args:
        title, subtitle: the run's name and one line about it.
        metrics: model -> metric -> value, the model of the run first, then its baselines.
        facts: label -> text, the run in numbers.
        charts: drawn in order, two a row where there is room.
        config: the resolved config as YAML.
    """
    drawn = "".join(f"<section>{chart_html(chart)}</section>" for chart in charts)
    return page(
        title,
        subtitle,
        facts,
        f"<section><h2>Metrics</h2>{_metric_table(metrics)}</section>",
        f'<div class="grid">{drawn}</div>',
        f"<section><h2>Config</h2><pre>{html.escape(config)}</pre></section>",
    )


def page(title: str, subtitle: str, facts: Mapping[str, str], *sections: str) -> str:
    """An HTML document: a headline, facts in numbers (label -> text), and sections of HTML."""
    title = html.escape(title)
    shown = "".join(
        f"<div><b>{html.escape(value)}</b><span>{html.escape(label)}</span></div>"
        for label, value in facts.items()
    )
    body = "\n".join(sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} · Shoal</title>
<style>
{_STYLE}
</style>
</head>
<body>
<h1>{title}</h1>
<p class="sub">{html.escape(subtitle)}</p>
<section><div class="facts">{shown}</div></section>
{body}
</body>
</html>
"""


def _metric_table(metrics: Mapping[str, Mapping[str, float]]) -> str:
    columns = list(dict.fromkeys(name for row in metrics.values() for name in row))
    head = "".join(f"<th>{html.escape(name.replace('_', ' '))}</th>" for name in columns)
    rows = []
    for model, row in metrics.items():
        cells = "".join(f"<td>{_cell(row.get(name))}</td>" for name in columns)
        rows.append(f"<tr><td>{html.escape(model.replace('_', ' '))}</td>{cells}</tr>")
    return (
        f"<table><thead><tr><th>model</th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _cell(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "&mdash;"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4f}"


def chart_html(chart: Chart) -> str:
    """A chart as inline SVG with its legend."""
    title = f"<h2>{html.escape(chart.title)}</h2>"
    every = [point for series in chart.series for point in series.points()]
    if not every:
        return title + '<p class="sub">No points were recorded.</p>'
    xs, ys, _ = zip(*every, strict=True)
    x_ticks = _ticks(min(xs), max(xs))
    y_ticks = _ticks(min(0.0, *ys) if chart.y_from_zero else min(ys), max(ys))
    x_range = (min(min(xs), x_ticks[0]), max(max(xs), x_ticks[-1]))
    y_range = (min(min(ys), y_ticks[0]), max(max(ys), y_ticks[-1]))
    place = _Scale(x_range, y_range)
    marks, legend, colour = [], [], 0
    for series in chart.series:
        paint = "var(--soft)" if series.faint else f"var(--c{colour % 5})"
        colour += 0 if series.faint else 1
        marks.append(_marks(series, place, paint))
        legend.append(f'<span><i style="background:{paint}"></i>{html.escape(series.name)}</span>')
    label = html.escape(f"{chart.title}: {chart.y_label} by {chart.x_label}", quote=True)
    return (
        f'{title}<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">'
        f"{_axes(chart, place, x_ticks, y_ticks)}{''.join(marks)}</svg>"
        f'<div class="legend">{"".join(legend)}</div>'
    )


@dataclass(frozen=True, slots=True)
class _Scale:
    """Data to pixels of the drawing."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def x(self, value: float) -> float:
        low, high = self.x_range
        return _LEFT + (value - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)


def _marks(series: Series, place: _Scale, paint: str) -> str:
    points = series.points()
    if series.sizes is not None:
        return "".join(
            f'<circle cx="{place.x(x):.1f}" cy="{place.y(y):.1f}" '
            f'r="{2.5 + 6 * math.sqrt(size):.1f}" fill="{paint}" fill-opacity="0.75"/>'
            for x, y, size in points
        )
    path = " ".join(f"{place.x(x):.1f},{place.y(y):.1f}" for x, y, _ in _thin(points))
    dash = ' stroke-dasharray="4 4"' if series.faint else ""
    return f'<polyline class="line" stroke="{paint}"{dash} points="{path}"/>'


def _thin(points: list[tuple[float, float, float]]) -> list[tuple[float, float, float]]:
    if len(points) <= _MOST_POINTS:
        return points
    stride = math.ceil(len(points) / _MOST_POINTS)
    kept = points[::stride]
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def _axes(chart: Chart, place: _Scale, x_ticks: Sequence[float], y_ticks: Sequence[float]) -> str:
    floor, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = [f'<path class="frame" d="M{_LEFT} {_TOP}V{floor}H{right}"/>']
    for value in y_ticks:
        y = place.y(value)
        parts.append(f'<path class="frame" d="M{_LEFT} {y:.1f}H{right}"/>')
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_tick(value)}</text>'
        )
    for value in x_ticks:
        x = place.x(value)
        parts.append(
            f'<text x="{x:.1f}" y="{floor + 17}" text-anchor="middle">{_tick(value)}</text>'
        )
    middle = (_LEFT + right) / 2
    parts.append(
        f'<text x="{middle:.0f}" y="{_HEIGHT - 5}" text-anchor="middle">'
        f"{html.escape(chart.x_label)}</text>"
    )
    return "".join(parts)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers that span the range, four to seven of them."""
    if high <= low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def _tick(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}" if abs(value) > 1e-12 else "0"
