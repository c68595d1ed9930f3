"""Small SVG pictures: grids of cells and lines over time, by writing out their text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

__all__ = ["INK", "MUTED", "PALETTE", "Cell", "Line", "chart", "grid", "svg", "text"]

INK, MUTED, PAPER, RULE = "#1f2933", "#7b8794", "#ffffff", "#cbd2d9"
PALETTE = ("#2f6fb3", "#e08a2b", "#3a9a6a", "#b8476b", "#8a63b8", "#c2b22f", "#4aa3a8", "#8d6e55")
_FONT = "font-family='system-ui, sans-serif'"


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a grid: its text, and the colours of text and background."""

    text: str = ""
    ink: str = INK
    fill: str = PAPER
    bold: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart: points (x, y), y in 0..1."""

    name: str
    points: Sequence[tuple[float, float]]
    ink: str


def text(
    x: float, y: float, said: str, *, size: int = 12, ink: str = INK, at: str = "start"
) -> str:
    """A line of text at its baseline."""
    return (
        f"<text x='{x:g}' y='{y:g}' font-size='{size}' fill='{ink}' text-anchor='{at}'>"
        f"{escape(said)}</text>"
    )


def grid(
    x: float, y: float, cells: Sequence[Sequence[Cell]], *, side: float = 18, box: int | None = None
) -> str:
    """Cells row by row; lines are thick around every `box` of them."""
    rows, columns = len(cells), len(cells[0])
    parts = []
    for r, line in enumerate(cells):
        for c, cell in enumerate(line):
            left, top = x + c * side, y + r * side
            parts.append(
                f"<rect x='{left:g}' y='{top:g}' width='{side:g}' height='{side:g}' "
                f"fill='{cell.fill}' stroke='{RULE}'/>"
            )
            if cell.text:
                weight = " font-weight='700'" if cell.bold else ""
                parts.append(
                    f"<text x='{left + side / 2:g}' y='{top + side * 0.72:g}' text-anchor='middle' "
                    f"font-size='{side * 0.62:g}' fill='{cell.ink}'{weight}>"
                    f"{escape(cell.text)}</text>"
                )
    edges = (range(0, rows + 1, box or rows), range(0, columns + 1, box or columns))
    right, bottom = x + columns * side, y + rows * side
    parts += [_stroke(x, y + k * side, right, y + k * side) for k in edges[0]]
    parts += [_stroke(x + k * side, y, x + k * side, bottom) for k in edges[1]]
    return "".join(parts)


def _stroke(x1: float, y1: float, x2: float, y2: float) -> str:
    return f"<path d='M{x1:g} {y1:g}L{x2:g} {y2:g}' stroke='{INK}' stroke-width='1.5'/>"


def chart(
    x: float, y: float, lines: Sequence[Line], *, width: float, height: float, across: str
) -> str:
    """Lines over a common axis that starts at 0, with names at their ends.

    Args:
        across: what the x axis counts.
    """
    most = max((px for line in lines for px, _ in line.points), default=0) or 1.0
    parts = []
    for level in (0.0, 0.25, 0.5, 0.75, 1.0):
        at = y + height * (1 - level)
        parts.append(f"<path d='M{x:g} {at:g}h{width:g}' stroke='{RULE}' stroke-width='0.7'/>")
        parts.append(text(x - 6, at + 4, f"{level:g}", size=11, ink=MUTED, at="end"))
    for line in lines:
        ends = [(x + width * px / most, y + height * (1 - py)) for px, py in line.points]
        route = "L".join(f"{px:.1f} {py:.1f}" for px, py in ends)
        parts.append(f"<path d='M{route}' fill='none' stroke='{line.ink}' stroke-width='2'/>")
        above = ends[-1][1] - 7
        parts.append(text(ends[-1][0], above, line.name, ink=line.ink, at="end"))
    parts.append(text(x + width, y + height + 16, f"{across}: {most:,.0f}", ink=MUTED, at="end"))
    parts.append(text(x, y + height + 16, "0", ink=MUTED))
    return "".join(parts)


def svg(width: float, height: float, parts: Sequence[str], *, title: str) -> str:
    """A whole file."""
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:g} {height:g}' "
        f"width='{width:g}' height='{height:g}' role='img' {_FONT}><title>{escape(title)}</title>"
        f"<rect width='100%' height='100%' fill='{PAPER}'/>" + "\n".join(parts) + "</svg>\n"
    )
