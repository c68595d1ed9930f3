"""Docs, public docstrings, help and messages use the field's terms in plain English."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer

from shoal import errors

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "shoal"
INTERNAL = {"shoal.kernels"}

# What a reader has to guess, and what to write. A hit on one of the surfaces below is always wrong.
WORDS = {
    r"judg(e|es|ed|ing)": "evaluate, compare, check",
    r"sights?": "occurrence, count",
    r"ledgers?": "gradient accumulator",
    r"rooms": "capacity, slots, packages",
    r"tells?|told": "report, log, send",
    r"vouch(es|ed)?": "finite_checked, guarantee",
    r"go(es)? on|going on|went on": "continue, resume",
    r"beside": "next to, during",
    r"anew": "from scratch, again",
    r"hurry|hurries": "end the throttle",
    r"verbs?": "method, call",
    r"cards?": "GPU",
    r"page-locked": "pinned",
    r"cuts?": "snapshot point, split",
    r"votes?|voted|voting": "agree, control group, collective",
    r"parcels?": "send buffer",
    r"(?<!round )(?<!round-)trips?": "exchange, path",
    r"lanes?": "buffer, vector element, thread",
    r"legs?": "splits",
    r"banks?": "receive buffer",
    r"public face": "public API",
    r"lacks? (\w+ )?updates?": "stale by k updates",
    r"of before": "older, earlier",
    r"for ever": "forever",
    r"as (it|they) stands?": "unchanged, current",
    r"and the like": "and similar",
    r"behind your back": "silently",
    r"hence|thence|whence|thereof|therein|herein|hitherto|forthwith": "so, from, of it, until now",
    r"lest|ere|yonder|nought|naught|aught|amiss|reckon|dwells?": "plain English",
}  # fmt: skip
PATTERN = re.compile("|".join(rf"\b(?P<w{n}>{word})\b" for n, word in enumerate(WORDS)), re.I)

Text = tuple[Path, int, str]  # file, line of the text's beginning, text
Shown = Callable[[], Iterator[Text]]


def without_code(text: str) -> str:
    """Markdown without code blocks, code spans and targets of links; lines keep their numbers."""
    text = re.sub(r"^ *```.*?^ *```", lambda m: "\n" * m[0].count("\n"), text, flags=re.M | re.S)
    spans = r"``[^`]*``|`[^`\n]*`|\]\([^)\s]*\)"
    return re.sub(spans, lambda m: "`" + "\n" * m[0].count("\n"), text)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def pages() -> Iterator[Text]:
    """Pages of the documentation."""
    folders = (ROOT / "docs").rglob("*.md"), (ROOT / "examples").rglob("*.md"), ROOT.glob("*.md")
    for path in (*(page for folder in folders for page in folder), ROOT / "bench" / "README.md"):
        yield path, 1, without_code(path.read_text())


def documented(path: Path, node: ast.AST) -> Iterator[Text]:
    """The docstring of a module, class or function, and those of a class's public methods."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
        return
    if ast.get_docstring(node) is not None:
        docstring = node.body[0]
        assert isinstance(docstring, ast.Expr) and isinstance(docstring.value, ast.Constant)
        yield path, docstring.lineno, without_code(str(docstring.value.value))
    if isinstance(node, ast.ClassDef):
        for inner in node.body:
            if not getattr(inner, "name", "_").startswith("_"):
                yield from documented(path, inner)


def public_modules() -> Iterator[str]:
    for path in sorted(SRC.rglob("*.py")):
        if re.search(r"^__all__\b", path.read_text(), flags=re.MULTILINE):
            name = ".".join(path.relative_to(SRC.parent).with_suffix("").parts)
            name = name.removesuffix(".__init__")
            if name not in INTERNAL:
                yield name


def docstrings() -> Iterator[Text]:
    """Docstrings of what every `__all__` names, with bases and public methods."""
    seen: set[object] = set()
    for name in public_modules():
        module = importlib.import_module(name)
        path = Path(inspect.getfile(module))
        yield from documented(path, tree_of(path))
        for each in module.__all__:
            thing = getattr(module, each)
            for known in thing.__mro__ if isinstance(thing, type) else (thing,):
                where = str(getattr(known, "__module__", ""))
                if not where.startswith("shoal") or known in seen or inspect.ismodule(known):
                    continue
                seen.add(known)
                path = Path(inspect.getfile(importlib.import_module(where)))
                for node in tree_of(path).body:
                    if getattr(node, "name", None) == getattr(known, "__qualname__", ""):
                        yield from documented(path, node)


def help_texts() -> Iterator[Text]:
    """What `--help` of every command shows."""
    from shoal.cli.app import app

    def shown(command: object, path: Path) -> Iterator[Text]:
        callback = inspect.unwrap(getattr(command, "callback", None) or shown)
        if callback is not shown and callback.__module__.startswith("shoal"):
            path = Path(inspect.getfile(callback))
        for text in ("help", "short_help", "epilog"):
            yield path, 1, without_code(getattr(command, text, None) or "")
        for parameter in getattr(command, "params", ()):
            yield path, 1, without_code(getattr(parameter, "help", None) or "")
        for inner in getattr(command, "commands", {}).values():
            yield from shown(inner, path)

    return shown(typer.main.get_command(app), SRC / "cli" / "app.py")


def is_message(node: ast.AST) -> bool:
    if isinstance(node, ast.Raise):
        return True
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Name):
        return node.func.id == "describe" or node.func.id in errors.__all__
    if not isinstance(node.func, ast.Attribute):
        return False
    owner = node.func.value
    named = isinstance(owner, ast.Name) and re.fullmatch(r"_?(log|logger|warnings)", owner.id)
    levels = {"debug", "info", "warning", "warn", "error", "exception"}
    return node.func.attr == "describe" or (bool(named) and node.func.attr in levels)


def messages() -> Iterator[Text]:
    """String literals of errors, warnings and logs."""
    for path in sorted(SRC.rglob("*.py")):
        for node in filter(is_message, ast.walk(tree_of(path))):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield path, part.lineno, part.value


def hits(texts: Iterator[Text]) -> Iterator[str]:
    for path, line, text in texts:
        for found in PATTERN.finditer(text):
            wanted = list(WORDS.values())[int(str(found.lastgroup)[1:])]
            place = f"{path.relative_to(ROOT)}:{line + text[: found.start()].count(chr(10))}"
            yield f"{place}: {found[0]!r} -> {wanted}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("surface", "least"),
    [
        pytest.param(pages, 25, id="docs"),
        pytest.param(docstrings, 400, id="docstrings"),
        pytest.param(help_texts, 20, id="help"),
        pytest.param(messages, 1000, id="messages"),
    ],
)
def test_only_plain_words(surface: Shown, least: int) -> None:
    texts = [text for text in surface() if text[2].strip()]
    assert len(texts) >= least  # or the surface is not found any more
    found = sorted(set(hits(iter(texts))))
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("The run goes on beside\nthe save.", 2),
        ("Page-locked memory of the card", 2),
        ("a round trip of `cut` and ``votes``, in the shortcut [verb](cut.md)", 1),
        ("```\nlanes\n```\nnext to the discards", 0),
    ],
)
def test_a_listed_word_is_found_and_code_is_not(text: str, count: int) -> None:
    assert len(list(hits(iter([(ROOT / "page.md", 1, without_code(text))])))) == count
