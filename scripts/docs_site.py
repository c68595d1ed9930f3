"""Builds the documentation's site: `python scripts/docs_site.py`, or `make docs`.

Pages are those of the repository, at the paths they have there, so that links between them stay
as they are. Added to them are a reference page for each public module, of every name in its
`__all__`, and a page of the figures in `bench/results/*.json`. Navigation is `docs/index.md`'s.
What is missing, or a link that leads nowhere, ends the build.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import inspect
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SITE = ROOT / "build" / "site"
PAGES = SITE / "pages"
REFERENCE = Path("reference")
# Internal, though they say what of them others use.
INTERNAL = ("shoal.kernels", "shoal.comm.backends", "shoal.config.tree")
SOURCES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "bench/README.md")
PROJECT = ("All pages", "Internals", "Decisions")
FENCE = re.compile(r"^(```+\w+)( [^\n]*)$", flags=re.MULTILINE)
PYTHON = re.compile(r"^```python[^\n]*\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def public_names() -> dict[str, list[str]]:
    """Module -> its names: those of every `__all__`, and others that Python of pages imports.

    Modules within them have pages of their own.
    """
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "src" / "shoal").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
        name = name.removesuffix(".__init__")
        hidden = any(part.startswith("_") for part in name.split("."))
        if not hidden and not name.startswith(INTERNAL) and "\n__all__ = " in path.read_text():
            found[name] = list(importlib.import_module(name).__all__)
    for page in sources():
        for block in PYTHON.findall((ROOT / page).read_text()):
            for node in ast.walk(ast.parse(block)):
                module = getattr(node, "module", None) or ""
                if module.startswith("shoal.") and not module.startswith("shoal.compat.monolith."):
                    named = [each.name for each in node.names]  # type: ignore[attr-defined]
                    known = found.setdefault(module, [])
                    known += [each for each in named if each not in known]
    for module, names in found.items():
        made = importlib.import_module(module)
        names[:] = [each for each in names if not inspect.ismodule(getattr(made, each))]
    return dict(sorted((module, names) for module, names in found.items() if names))


@functools.cache
def bound_in(module: str) -> frozenset[str]:
    """Names that a module's text binds: what can be found without importing it."""
    tree = ast.parse(Path(inspect.getfile(importlib.import_module(module))).read_text())
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {each.asname or each.name for each in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {each.id for each in targets if isinstance(each, ast.Name)}
    return frozenset(found)


def homes_of(names: dict[str, list[str]]) -> dict[tuple[str, str], str]:
    """(module, name) -> the module on whose page it is: a package's own page, no name twice."""

    def at(module: str, name: str) -> object:
        return getattr(importlib.import_module(module), name)

    homes = {}
    for module, own in names.items():
        for name in own:
            thing = at(module, name)
            if name not in bound_in(module):  # made on first use: it is shown where it is written
                homes[module, name] = getattr(thing, "__module__", module)
                continue
            one_of_many = isinstance(thing, str | int | float | tuple | dict)
            also = [
                other
                for other, theirs in names.items()
                if name in theirs and name in bound_in(other)
                if other == module or (not one_of_many and at(other, name) is thing)
            ]
            homes[module, name] = min(also, key=lambda other: (other == "shoal", other.count(".")))
    return homes


def reference_page(module: str, names: list[str], homes: dict[tuple[str, str], str]) -> str:
    """The page of a module: its docstring, and each of its names or where it is shown."""
    lines = [f"# {module}", "", inspect.getdoc(importlib.import_module(module)) or "", ""]
    own, elsewhere = [], []
    for name in names:
        home = homes[module, name]
        if home == module or home not in {page for page, _ in homes}:
            own += [f"::: {home}.{name}", ""]
        else:
            elsewhere.append(f"| `{module}.{name}` | [`{home}.{name}`]({home}.md#{home}.{name}) |")
    if elsewhere:
        lines += ["| name | see |", "|---|---|", *elsewhere, ""]
    return "\n".join([*lines, *own])


def bench_page() -> str:
    """The rows of every committed result, with its machine; empty where there is none."""
    lines = ["# Measured figures", "", "Ratios to a baseline of the same run; above 1 is better."]
    files = sorted((ROOT / "bench" / "results").glob("*.json"))
    for file in files:
        found = json.loads(file.read_text())
        facts = {**found.get("machine", {}), **found.get("versions", {})}
        shown = ("processor", "cores", "gpu", "date", "commit", "python", "torch")
        lines += ["", f"## {file.stem}", ""]
        lines += [", ".join(f"{key}: {facts[key]}" for key in shown if facts.get(key)), ""]
        rows = [dict(row) for row in found.get("rows", ())]
        for row in rows:
            row["ratio"] = row.get("figure", row.get("ratio"))
            row["baseline"] = row.get("peer_value", row.get("baseline"))
        known = ("case", "ours", "baseline", "ratio", "unit", "machine", "bench")
        names = [name for name in known if any(row.get(name) is not None for row in rows)]
        lines += [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
        lines += [f"| {' | '.join(_cell(row.get(name)) for name in names)} |" for row in rows]
    return "\n".join([*lines, ""]) if files else ""


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value).replace("|", "\\|")


def sources() -> Iterator[Path]:
    """Pages of the repository, relative to it."""
    yield from (Path(name) for name in SOURCES)
    for folder in ("docs", "examples"):
        yield from (path.relative_to(ROOT) for path in sorted((ROOT / folder).rglob("*.md")))


def staged(page: Path) -> str:
    """A page as the site has it: bare fences, and no links to files that are no pages."""

    def target(link: re.Match[str]) -> str:
        image, text, path, _ = link.groups()
        there = (ROOT / page).parent / path
        if re.match(r"[a-z]+:", path) or image or there.suffix == ".md":
            return link[0]
        return text if text.startswith("`") else f"{text} (`{path.lstrip('./')}`)"

    return LINK.sub(target, FENCE.sub(_bare, (ROOT / page).read_text()))


def _bare(fence: re.Match[str]) -> str:
    title = re.search(r'title="[^"]+"', fence[2])
    return f"{fence[1]} {title[0]}" if title else fence[1]


def stage() -> list[Any]:
    """Write all pages; returns the navigation."""
    shutil.rmtree(PAGES, ignore_errors=True)
    for page in sources():
        (PAGES / page).parent.mkdir(parents=True, exist_ok=True)
        (PAGES / page).write_text(staged(page))
    shutil.copytree(ROOT / "docs" / "images", PAGES / "docs" / "images", dirs_exist_ok=True)
    names = public_names()
    homes = homes_of(names)
    (PAGES / REFERENCE).mkdir()
    for module, own in names.items():
        (PAGES / REFERENCE / f"{module}.md").write_text(reference_page(module, own, homes))
    bench = [{"How numbers are measured": "bench/README.md"}]
    if figures := bench_page():
        (PAGES / "bench" / "figures.md").write_text(figures)
        bench.insert(0, {"Measured figures": "bench/figures.md"})
    api = [{module: f"{REFERENCE}/{module}.md"} for module in names]
    return tabs(
        {title: pages for each in navigation() for title, pages in each.items()}, api, bench
    )


def tabs(sections: dict[str, Any], api: list[Any], bench: list[Any]) -> list[Any]:
    """The site's tabs: sections of the index are guides unless they have a tab of their own."""
    others = {name: sections.pop(name, []) for name in ("Reference", "Migration", *PROJECT)}
    guide = [{title: pages} for title, pages in sections.items()]
    reference = [*others["Reference"], {"Python API": api}]
    project = [{"Contributing": "CONTRIBUTING.md"}, {"Changelog": "CHANGELOG.md"}]
    project += [{title: others[title]} for title in PROJECT if others[title]]
    return [
        {"Home": "README.md"},
        {"Guide": guide},
        {"Reference": reference},
        {"Migration": others["Migration"]},
        {"Benchmarks": bench},
        {"Project": project},
    ]


def navigation() -> Iterator[dict[str, list[dict[str, str]]]]:
    """Sections of docs/index.md, and the pages that each links."""
    yield {"All pages": [{"Index": "docs/index.md"}]}
    index = (ROOT / "docs" / "index.md").read_text()
    for title, body in re.findall(r"^\*\*(.+)\*\*\n\n((?:- .*\n)+)", index, flags=re.MULTILINE):
        pages = re.findall(r"^- \[([^\]]+)\]\(([^)]+)\)", body, flags=re.MULTILINE)
        yield {title: [{text: _in_site(path)} for text, path in pages]}


def _in_site(path: str) -> str:
    return (ROOT / "docs" / path).resolve().relative_to(ROOT).as_posix()


def missing(inventory: Path) -> list[str]:
    """Public names that the built site does not show."""
    from mkdocstrings import Inventory

    with inventory.open("rb") as file:
        shown = set(Inventory.parse_sphinx(file))
    homes = homes_of(public_names())
    return sorted({f"{home}.{name}" for (_, name), home in homes.items()} - shown)


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the documentation's site.")
    parser.add_argument("--serve", action="store_true", help="show it at 127.0.0.1:8000 instead")
    serve = parser.parse_args().serve
    import yaml

    nav = stage()
    config = {"INHERIT": str(ROOT / "mkdocs.yml"), "docs_dir": str(PAGES), "nav": nav}
    config["site_dir"] = str(SITE / "html")
    (SITE / "mkdocs.yml").write_text(yaml.safe_dump(config, sort_keys=False))
    command = ["serve"] if serve else ["build", "--strict", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", *command, "-f", str(SITE / "mkdocs.yml")]
    )
    if serve or done.returncode:
        return done.returncode
    left_out = missing(SITE / "html" / "objects.inv")
    if left_out:
        print("names without an entry:", ", ".join(left_out), file=sys.stderr)
    return bool(left_out)


if __name__ == "__main__":
    sys.exit(main())
