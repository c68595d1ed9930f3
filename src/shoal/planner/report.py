"""A plan for people: text, and one HTML file with bars of every rank."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from shoal import report
from shoal.planner.cost import HIDDEN, PHASES
from shoal.planner.plan import Plan, TablePlan, ranges
from shoal.planner.topology import Topology, show_bytes, show_seconds

_SHOWN = 64  # ranks that have a bar each; of more, the slowest, the fastest and even steps between
_LISTED = 200  # tables of the text
_PAINTS = ("--c0", "--c1", "--c2", "--c3", "--c4")
_GROUPS: Mapping[str, tuple[str, ...]] = {
    "ids, probe": ("ids", "probe"),
    "read, cache misses": ("read", "cache misses"),
    "rows": ("rows",),
    "gradients": ("gradients",),
    "update, slices": ("update", "slices"),
}


@dataclass(frozen=True, slots=True)
class Change:
    """What another machine would change.

    Args:
        what: the change.
        step_s: seconds of a step then; None: no plan fits.
    """

    what: str
    step_s: float | None


def changes_of(plan_on: Callable[[Topology], Plan], topology: Topology) -> list[Change]:
    """What twice the memory or speed would change; plans again for each."""
    rates = topology.rates
    curves = {name: tuple((w, 2 * v) for w, v in getattr(rates, name)) for name in _CURVES}
    tries = {
        "device memory x2": replace(topology, device_bytes=2 * topology.device_bytes),
        "bandwidth in a node x2": replace(topology, rates=replace(rates, intra=2 * rates.intra)),
        "speed of device memory x2": replace(
            topology,
            rates=replace(
                rates, copy=2 * rates.copy, gather=curves["gather"], update=curves["update"]
            ),
        ),
    }
    if topology.nodes > 1:
        faster = replace(rates, cross=2 * rates.cross)
        tries["bandwidth between nodes x2"] = replace(topology, rates=faster)
    if topology.device == "cuda":
        faster = replace(rates, host_link=2 * rates.host_link)
        tries["bandwidth to the host x2"] = replace(topology, rates=faster)
    return [Change(what, plan_on(other).step_s) for what, other in tries.items()]


_CURVES = ("gather", "update")


def limiting(plan: Plan) -> str:
    """What the slowest rank's step is mostly made of, on one line."""
    slowest = plan.rank_seconds.index(max(plan.rank_seconds))
    phases = plan.rank_phases(slowest)
    hidden = sum(phases[name] for name in PHASES[:HIDDEN])
    dense = plan.base_phases["dense"]
    parts = {name: phases[name] for name in PHASES[HIDDEN:]}
    parts |= {name: seconds for name, seconds in plan.base_phases.items() if name != "dense"}
    parts["dense part" if dense >= hidden else "ids and probe"] = max(dense, hidden)
    total = sum(parts.values()) or 1.0
    largest = sorted(parts.items(), key=lambda one: -one[1])[:3]
    said = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in largest)
    return f"rank {slowest} is the slowest: {said}"


def text_of(plan: Plan, changes: Sequence[Change] = ()) -> list[str]:
    """The lines that `shoal plan` prints."""
    lines = [
        f"{len(plan.tables)} tables on {_ranks(plan)}: {plan.topology}",
        f"step {show_seconds(plan.step_s)}, no plan is below {show_seconds(plan.lower_bound_s)}; "
        + limiting(plan),
        f"device memory {_span(plan.rank_device_bytes, plan.limits[0])}"
        + (
            f"; host memory {_span(plan.rank_host_bytes, plan.limits[1])}"
            if any(plan.rank_host_bytes)
            else ""
        ),
        "",
    ]
    order = sorted(plan.tables, key=lambda one: (-sum(one.phases) * len(one.ranks()), one.name))
    rows = [_cells(one) for one in order[:_LISTED]]
    head = ("table", "rows", "dim", "option", "ranks", "time a rank", "bytes a rank")
    widths = [max(len(row[k]) for row in (head, *rows)) for k in range(len(head))]
    lines.extend(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    )
    if len(order) > _LISTED:
        lines.append(f"... and {len(order) - _LISTED} faster tables")
    if changes:
        lines += ["", *(f"{one.what}: {_changed(plan, one)}" for one in changes)]
    return [*lines, "", *plan.notes]


def html_of(plan: Plan, title: str, changes: Sequence[Change] = ()) -> str:
    """The plan as one HTML file."""
    facts = {
        "a step of the slowest rank": show_seconds(plan.step_s),
        "no plan is below": show_seconds(plan.lower_bound_s),
        "ranks": f"{plan.world_size * plan.replicas:,}",
        "tables": f"{len(plan.tables):,}",
        "device memory, fullest rank": show_bytes(max(plan.rank_device_bytes)),
        "of usable": show_bytes(plan.limits[0]),
    }
    shown = _some_ranks(plan)
    changed = "".join(
        f"<tr><td>{html.escape(one.what)}</td><td>{_changed(plan, one)}</td></tr>"
        for one in changes
    )
    head = "<tr><th>table</th><th>rows</th><th>dim</th><th>option</th><th>ranks</th><th>time a rank"
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(one)) + "</tr>"
        for one in plan.tables
    )
    notes = "\n".join((plan.topology, *plan.notes))
    sections = [
        f"<section><h2>What limits it</h2><p>{html.escape(limiting(plan))}</p>"
        + (f"<table>{changed}</table>" if changed else "")
        + "</section>",
        _section("Time of each rank", _time_bars(plan, shown)),
        _section("Memory of each rank", _memory_bars(plan, shown)),
        f"<section><h2>Who holds what</h2><table><thead>{head}</th><th>bytes a rank</th></tr>"
        f"</thead><tbody>{rows}</tbody></table></section>",
        f"<section><h2>Machines and search</h2><pre>{html.escape(notes)}</pre></section>",
    ]
    return report.page(title, f"{_ranks(plan)}, {len(plan.tables)} tables", facts, *sections)


@dataclass(frozen=True, slots=True)
class Point:
    """A plan of a simulation: devices, groups, seconds of a step, examples a second, fullest rank.

    failed: why there is no plan; batch_size: examples of a rank.
    """

    devices: int
    groups: int = 1
    step_s: float = 0.0
    examples_per_s: float = 0.0
    device_bytes: float = 0.0
    host_bytes: float = 0.0
    failed: str = ""
    batch_size: int = 0


def point_of(plan: Plan, batch_size: int) -> Point:
    """A plan as a point of a simulation; batch_size: of a rank."""
    devices = plan.world_size * plan.replicas
    return Point(
        devices,
        plan.replicas,
        plan.step_s,
        devices * batch_size / plan.step_s,
        max(plan.rank_device_bytes),
        max(plan.rank_host_bytes),
        batch_size=batch_size,
    )


def simulated_text(points: Sequence[Point]) -> list[str]:
    """The lines that `shoal plan simulate` prints."""
    lines = [
        f"{'devices':>8} {'groups':>6} {'batch/rank':>10} {'step':>9} {'examples/s':>11} "
        f"{'device':>9} {'host':>9}"
    ]
    for one in points:
        if one.failed:
            lines.append(f"{one.devices:>8} {one.failed}")
            continue
        lines.append(
            f"{one.devices:>8} {one.groups:>6} {one.batch_size:>10} {show_seconds(one.step_s):>9} "
            f"{one.examples_per_s:>11.3g} {show_bytes(one.device_bytes):>9} "
            f"{show_bytes(one.host_bytes):>9}"
        )
    return lines


def simulated_html(points: Sequence[Point], title: str, topology: Topology) -> str:
    """A simulation as one HTML file."""
    fine = [one for one in points if not one.failed]
    devices = tuple(float(one.devices) for one in fine)

    def chart(name: str, unit: str, values: list[float]) -> str:
        line = report.Series(name=name, x=devices, y=tuple(values))
        drawn = report.Chart(
            title=name, x_label="devices", y_label=unit, series=(line,), y_from_zero=True
        )
        return f"<section>{report.chart_html(drawn)}</section>"

    charts = (
        chart("Seconds of a step, ms", "ms", [1e3 * one.step_s for one in fine]),
        chart("Examples a second", "examples/s", [one.examples_per_s for one in fine]),
        chart("Device memory of the fullest rank", "bytes", [one.device_bytes for one in fine]),
    )
    table = html.escape("\n".join(simulated_text(points)))
    return report.page(
        title,
        topology.summary(),
        {"simulated": f"{len(points)} sizes"},
        f'<div class="grid">{"".join(charts)}</div>',
        f"<section><h2>Sizes</h2><pre>{table}</pre></section>",
    )


def _ranks(plan: Plan) -> str:
    whole = plan.world_size * plan.replicas
    groups = f" in {plan.replicas} groups that hold all tables each" if plan.replicas > 1 else ""
    return f"{whole:,} ranks{groups}"


def _span(sizes: Sequence[float], limit: float) -> str:
    return f"{show_bytes(min(sizes))} to {show_bytes(max(sizes))} of {show_bytes(limit)} a rank"


def _cells(one: TablePlan) -> tuple[str, ...]:
    ranks = sorted(set(one.ranks()))
    return (
        one.name,
        f"{one.rows:,.0f}",
        str(one.dim),
        one.label(),
        ranges(ranks),
        show_seconds(sum(one.phases)),
        show_bytes(one.device_bytes + one.host_bytes),
    )


def _changed(plan: Plan, change: Change) -> str:
    if change.step_s is None:
        return "no plan fits"
    return f"{show_seconds(change.step_s)} ({change.step_s / plan.step_s - 1:+.1%})"


def _some_ranks(plan: Plan) -> list[int]:
    if plan.world_size <= _SHOWN:
        return list(range(plan.world_size))
    order = sorted(range(plan.world_size), key=lambda rank: -plan.rank_seconds[rank])
    picked = {order[k * (len(order) - 1) // (_SHOWN - 1)] for k in range(_SHOWN)}
    return [rank for rank in order if rank in picked]


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>"


def _time_bars(plan: Plan, shown: Sequence[int]) -> str:
    names = ["dense, pooling, fixed", *_GROUPS]
    bars = []
    for rank in shown:
        phases = plan.rank_phases(rank)
        base = sum(plan.base_phases.values())
        # Of the hidden phases, what reaches beyond the dense part counts.
        hidden = sum(phases[name] for name in _GROUPS["ids, probe"])
        out = [base, max(0.0, hidden - plan.base_phases["dense"])]
        out += [sum(phases[name] for name in group) for group in list(_GROUPS.values())[1:]]
        bars.append((f"rank {rank}", out, show_seconds(plan.rank_seconds[rank])))
    return _bars(names, bars, max(plan.rank_seconds))


def _memory_bars(plan: Plan, shown: Sequence[int]) -> str:
    names = ["device", *(["host"] if any(plan.rank_host_bytes) else [])]
    bars = []
    for rank in shown:
        sizes = [plan.rank_device_bytes[rank], plan.rank_host_bytes[rank]][: len(names)]
        bars.append((f"rank {rank}", sizes, " + ".join(show_bytes(x) for x in sizes)))
    most = max(sum(sizes) for _, sizes, _ in bars)
    return _bars(names, bars, max(plan.limits[0], most), mark=plan.limits[0])


def _bars(
    names: Sequence[str],
    bars: Sequence[tuple[str, list[float], str]],
    most: float,
    mark: float | None = None,
) -> str:
    """Stacked bars, one below the other; mark: a line at that value."""
    left, width, height, step = 80, 640, 14, 20
    scale = width / (most or 1.0)
    paints = ("--soft", *_PAINTS) if len(names) > len(_PAINTS) else _PAINTS
    drawn = []
    for k, (label, values, text) in enumerate(bars):
        y, x = 4 + k * step, float(left)
        drawn.append(f'<text x="{left - 8}" y="{y + 11}" text-anchor="end">{label}</text>')
        for value, paint in zip(values, paints, strict=False):
            drawn.append(
                f'<rect x="{x:.1f}" y="{y}" width="{value * scale:.1f}" height="{height}" '
                f'fill="var({paint})"/>'
            )
            x += value * scale
        drawn.append(f'<text x="{x + 6:.1f}" y="{y + 11}">{text}</text>')
    tall = 8 + step * len(bars)
    if mark is not None:
        x = left + mark * scale
        drawn.append(f'<path class="frame" stroke-dasharray="4 3" d="M{x:.1f} 0V{tall}"/>')
    legend = "".join(
        f'<span><i style="background:var({paint})"></i>{name}</span>'
        for name, paint in zip(names, paints, strict=False)
    )
    return (
        f'<svg viewBox="0 0 {left + width + 130} {tall}" role="img">{"".join(drawn)}</svg>'
        f'<div class="legend">{legend}</div>'
    )
