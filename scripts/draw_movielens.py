"""Draws docs/images/movielens-collisions.svg: AUC of ids of their own, and of ids that collide.

    python scripts/draw_movielens.py

From bench/results/quality-movielens.json, which `bench/quality_movielens.py --json` writes. Bands
are 95 % intervals of the mean of its seeds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "bench" / "results" / "quality-movielens.json"
TARGET = ROOT / "docs" / "images" / "movielens-collisions.svg"
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, GAP = 760, 300, 60, 44, 30, 70
COLOURS = {"ours": "#0b66c3", "peer": "#c4570a"}
NAMES = {"ours": "every id", "peer": "users and movies hashed to an eighth"}
Band = Sequence[Sequence[float]]


def panel(title: str, curves: dict[str, Band], left: float, width: float) -> str:
    """One model's curves as SVG."""
    every = [value for band in curves.values() for point in band for value in point]
    low, high = min(every), max(every)
    low, high = low - 0.05 * (high - low), high + 0.05 * (high - low)
    epochs = len(curves["ours"])

    def x(epoch: int) -> float:
        return left + width * epoch / max(epochs - 1, 1)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - BOTTOM - TOP)

    def points(values: Sequence[tuple[int, float]]) -> str:
        return " ".join(f"{x(epoch):.1f},{y(value):.1f}" for epoch, value in values)

    drawn = [f'<text x="{left:.0f}" y="{TOP - 12}" font-weight="bold">{title}</text>']
    for name, band in curves.items():
        colour = COLOURS[name]
        lows = [(epoch, point[0]) for epoch, point in enumerate(band)]
        highs = [(epoch, point[2]) for epoch, point in enumerate(band)]
        outline = points([*lows, *reversed(highs)])
        drawn.append(f'<polygon points="{outline}" fill="{colour}" fill-opacity="0.15"/>')
        middle = points([(epoch, point[1]) for epoch, point in enumerate(band)])
        drawn.append(
            f'<polyline points="{middle}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
    drawn += [
        f'<text x="{left - 8:.0f}" y="{y(tick) + 4:.0f}" text-anchor="end">{tick:.3f}</text>'
        for tick in (low, (low + high) / 2, high)
    ]
    below = f'y="{HEIGHT - BOTTOM + 18}" text-anchor="middle"'
    drawn += [f'<text x="{x(n):.0f}" {below}>{n + 1}</text>' for n in range(epochs)]
    return "".join(drawn)


def main() -> None:
    """Draw it."""
    rows = json.loads(RESULT.read_text())["rows"]
    found = {row["case"]: row["curve"] for row in rows if row["case"].endswith("every id")}
    width = (WIDTH - LEFT - GAP * (len(found) - 1) - 20) / len(found)
    titles = {"movielens, deepfm, every id": "DeepFM", "movielens, dcn, every id": "DCN-v2"}
    parts = [
        panel(titles[name], curves, LEFT + number * (width + GAP), width)
        for number, (name, curves) in enumerate(found.items())
    ]
    at = LEFT
    for name, text in NAMES.items():
        parts.append(
            f'<rect x="{at}" y="{HEIGHT - 14}" width="12" height="4" fill="{COLOURS[name]}"/>'
        )
        parts.append(f'<text x="{at + 18}" y="{HEIGHT - 8}">{text}</text>')
        at += 120
    parts.append(f'<text x="{WIDTH - 20}" y="{HEIGHT - 8}" text-anchor="end">epochs</text>')
    TARGET.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="#667079">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )
    print(TARGET.relative_to(ROOT))


if __name__ == "__main__":
    main()
