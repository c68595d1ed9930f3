"""Counts what the house may weigh: lines of code and Python files.

A line of code holds more than blanks, brackets and separators, a comment or a docstring. Python is
read from `src/shoal` without the rooms `models` and `data`, C++ from `csrc` without its tests and
number tables.

    python scripts/count.py [--against REVISION]
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tarfile
import tokenize
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
BARE = re.compile(r"[\s()\[\]{},;:]*")
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


def count(revision: str | None = None) -> dict[str, int]:
    """Code lines of Python and C++ and the number of Python files."""
    found = {"python lines": 0, "c++ lines": 0, "python files": 0}
    for path, text in tracked(revision):
        if path.parts[0] == "csrc":
            if not any(part.startswith("test") for part in path.parts[1:]):
                found["c++ lines"] += cpp_lines(text)
            continue
        found["python files"] += path.suffix == ".py"
        if path.parts[2] not in {"models", "data"}:
            found["python lines"] += python_lines(text)
    found["code lines"] = found["python lines"] + found["c++ lines"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", help="a git revision to compare with")
    revision = parser.parse_args().against
    now, then = count(), count(revision) if revision else None
    for name, value in now.items():
        change = f"  {value - then[name]:+,}" if then else ""
        print(f"{name:14} {value:8,}{change}")


if __name__ == "__main__":
    main()
