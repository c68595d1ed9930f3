"""Counts what the house may weigh, beside its bars: lines of code, Python files, duplicates.

A line of code holds more than blanks, brackets and separators, a comment or a docstring. Python is
read from `src/shoal` without the rooms `models` and `data`, C++ from `csrc` without its tests and
number tables. Duplicates are pairs of files (or a file with itself) that share six lines of one
shape: the same tokens but for names, numbers and texts, 30 of them or more.

    python scripts/count.py [--against REVISION] [--check]

`--check` fails above `CEILINGS`: the bars, or, where the house is not there yet, what it had last.
A change that brings a figure down brings its ceiling down too.
"""

from __future__ import annotations

import argparse
import ast
import io
import itertools
import keyword
import re
import subprocess
import sys
import tarfile
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
BARE = re.compile(r"[\s()\[\]{},;:]*")
BARS = {"code lines": 40_000, "python files": 210, "duplicates": 100}
CEILINGS = {"code lines": 50_200, "python files": 210, "duplicates": 230}
SHARED_LINES, SHARED_TOKENS = 6, 30
COMMON = 8  # a run that stands in more places is a form, such as a list of arguments
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
CPP_COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)


def python_lines(text: str) -> int:
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT and token.string:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    rows = text.split("\n")
    return sum(not BARE.fullmatch(rows[number - 1]) for number in lines)


def cpp_lines(text: str) -> int:
    def blank(match: re.Match[str]) -> str:
        found = match.group()
        return found if found.startswith('"') else "\n" * found.count("\n")

    rows = CPP_COMMENT_OR_STRING.sub(blank, text).split("\n")
    return sum(not BARE.fullmatch(row) for row in rows)


def tracked(revision: str | None) -> Iterator[tuple[PurePosixPath, str]]:
    """Every counted file of the working tree, or of a revision, with its text."""
    if revision is None:
        for folder in ("src/shoal", "csrc"):
            for path in sorted((ROOT / folder).rglob("*")):
                if path.suffix in {".py", ".pyi", ".h", ".cpp"}:
                    yield PurePosixPath(path.relative_to(ROOT).as_posix()), path.read_text()
        return
    packed = subprocess.run(
        ["git", "archive", revision, "src/shoal", "csrc"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            name = PurePosixPath(member.name)
            content = archive.extractfile(member)
            if content and name.suffix in {".py", ".pyi", ".h", ".cpp"}:
                yield name, content.read().decode()


def shapes(text: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The lines that hold a name, imports left out, with their tokens; names and values alike."""
    rows: dict[int, list[str]] = defaultdict(list)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            word = token.string if keyword.iskeyword(token.string) else "name"
            rows[token.start[0]].append(word)
        elif token.type in {tokenize.NUMBER, tokenize.STRING}:
            rows[token.start[0]].append("value")
        elif token.type == tokenize.OP:
            rows[token.start[0]].append(token.string)
    for number, words in sorted(rows.items()):
        if words[0] not in {"import", "from"} and "name" in words:
            yield number, tuple(words)


def duplicates(files: Iterator[tuple[PurePosixPath, str]]) -> set[tuple[str, str]]:
    """Pairs of files that share a run of lines."""
    places: dict[tuple[tuple[str, ...], ...], list[tuple[str, int]]] = defaultdict(list)
    for path, text in files:
        rows = list(shapes(text))
        for k in range(len(rows) - SHARED_LINES + 1):
            run = tuple(words for _, words in rows[k : k + SHARED_LINES])
            if sum(map(len, run)) >= SHARED_TOKENS:
                places[run].append((str(path), k))
    return {
        (a, b)
        for found in places.values()
        if len(found) <= COMMON
        for (a, i), (b, j) in itertools.combinations(sorted(found), 2)
        if a != b or j - i >= SHARED_LINES
    }


def count(revision: str | None = None) -> dict[str, int]:
    """Code lines of Python and C++, the number of Python files, and pairs that repeat."""
    found = {"python lines": 0, "c++ lines": 0, "python files": 0}
    files = list(tracked(revision))
    for path, text in files:
        if path.parts[0] == "csrc":
            if not any(part.startswith("test") for part in path.parts[1:]):
                found["c++ lines"] += cpp_lines(text)
            continue
        found["python files"] += path.suffix == ".py"
        if path.parts[2] not in {"models", "data"}:
            found["python lines"] += python_lines(text)
    found["code lines"] = found["python lines"] + found["c++ lines"]
    found["duplicates"] = len(duplicates((p, text) for p, text in files if p.suffix == ".py"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", help="a git revision to compare with")
    parser.add_argument("--check", action="store_true", help="fail above the ceilings")
    arguments = parser.parse_args()
    now = count()
    then = count(arguments.against) if arguments.against else None
    for name, value in now.items():
        bar = BARS.get(name)
        state = "" if bar is None else f"  bar {bar:7,}  {'ok' if value <= bar else 'red'}"
        change = f"  {value - then[name]:+,}" if then else ""
        print(f"{name:14} {value:8,}{state}{change}")
    above = [name for name, ceiling in CEILINGS.items() if now[name] > ceiling]
    if arguments.check and above:
        sys.exit(f"Above the ceiling of scripts/count.py: {', '.join(above)}.")


if __name__ == "__main__":
    main()
