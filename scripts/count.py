"""Counts what the house may weigh, and its bars: lines of code, Python files, duplicates.

A line of code holds more than blanks, brackets and separators, a comment or a docstring. Python is
read from `src/shoal` without the rooms `models` and `data`, C++ from `csrc` without its tests and
number tables. Rooms that came later count against allowances of their own. Duplicates are pairs of
files (or a file with itself) that share six lines of one shape: the same tokens but for names,
numbers and texts, 30 of them or more.

    python scripts/count.py [--against REVISION] [--check] [--measure]

`--check` fails above `CEILINGS`: the bars, or, where the house is not there yet, what it had last.
A change that brings a figure down brings its ceiling down too. `--measure` adds what is measured on
this machine: modules that ids pass in one forward, and a lookup of 64 ids by one thread.
"""

from __future__ import annotations

import argparse
import ast
import io
import itertools
import keyword
import re
import statistics
import subprocess
import sys
import tarfile
import time
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
BARE = re.compile(r"[\s()\[\]{},;:]*")
BARS = {
    "code lines": (40_000, 36_000),
    "python files": (210, 180),
    "duplicates": (100, 50),
    "modules on the trip": (9, 7),
    "lookup of 64 ids, us": (9.8, 8),
}
CEILINGS = {"code lines": 43_092, "python files": 192, "duplicates": 82}
ELSEWHERE = (
    ("host ms of a 10-table SGD step on an H100", "1.2", "0.8", "python bench/table_gpu.py"),
    ("minutes of `make test` on 2 cores", "8", "5", "make test"),
)
# Rooms that were built on the house, and the lines that each may have.
LATER = {
    "planner": 3_500,
    "ps": 3_900,
    "discovery": 600,
    "sync": 6_000,
    "serve": 4_500,
    "speed": 2_500,  # whole steps: compiled dense parts, memory mapped ahead
    "door": 500,  # what newcomers meet: shoal init, examples, exit codes, messages of settings
    "learning": 6_000,  # features, models of several tasks; 1,000 more in rooms of the house
}
SHARED_LINES, SHARED_TOKENS = 6, 30
# Files that count as another room's, the first that fits.
MONOLITH = PurePosixPath("src/shoal/compat/monolith")
DATA, MODELS = PurePosixPath("src/shoal/data"), PurePosixPath("src/shoal/models")
COUNTED_AS = {
    **{DATA / f"{name}.py": "learning" for name in ("expressions", "feature_set", "kinds")},
    **{DATA / f"{name}.py": "learning" for name in ("kafka", "quarantine", "streams", "values")},
    **{
        DATA / f"{name}.py": "learning"
        for name in ("samplers", "item_tree", "sampler_service", "catalog")
    },
    **{MODELS / f"{name}.py": "learning" for name in ("crosses", "multi_task", "tasks")},
    **{
        PurePosixPath("csrc") / name: "learning"
        for name in ("text_ids.cpp", "text_ids.h", "text_hash_impl.h")
    },
    MODELS / "user_item.py": "learning",
    PurePosixPath("src/shoal/compat/torchrec.py"): "learning",
    PurePosixPath("src/shoal/config/streams.py"): "learning",
    PurePosixPath("src/shoal/train/streaming.py"): "learning",
    PurePosixPath("src/shoal/train/retrieval.py"): "learning",
    PurePosixPath("src/shoal/optim/averaging.py"): "learning",
    PurePosixPath("src/shoal/train/dense_optimizers.py"): "learning",
    PurePosixPath("src/shoal/distributed/metrics.py"): "learning",
    PurePosixPath("src/shoal/cli/plan.py"): "planner",
    PurePosixPath("src/shoal/distributed/timed_steps.py"): "planner",
    PurePosixPath("src/shoal/train/table_placement.py"): "planner",
    **{
        PurePosixPath("src/shoal/comm") / f"{name}.py": "ps"
        for name in ("transport", "frames", "unread")
    },
    PurePosixPath("src/shoal/cli/ps.py"): "ps",
    PurePosixPath("src/shoal/train/publishing.py"): "sync",
    PurePosixPath("src/shoal/cli/export.py"): "serve",
    PurePosixPath("src/shoal/compiling.py"): "speed",
    PurePosixPath("csrc/examples.cpp"): "speed",
    PurePosixPath("csrc/examples.h"): "speed",
    PurePosixPath("src/shoal/table/cuda/mapped.py"): "speed",
    PurePosixPath("src/shoal/cli/start.py"): "door",
    PurePosixPath("src/shoal/cli/usage.py"): "door",
    PurePosixPath("src/shoal/config/type_words.py"): "door",
    PurePosixPath("src/shoal/cli/serve.py"): "serve",
    MONOLITH / "agent_service": "serve",
    MONOLITH / "native_training/distributed_serving_ops.py": "serve",
    MONOLITH / "native_training/sync_clients.py": "serve",
    MONOLITH / "native_training/model_export": "serve",
    MONOLITH / "native_training": "ps",
}
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


def counts(path: PurePosixPath) -> bool:
    """Whether a file is counted; those that scripts/protos.py makes are not."""
    return path.suffix in {".py", ".pyi", ".h", ".cpp"} and not path.stem.endswith("_pb2")


def tracked(revision: str | None) -> Iterator[tuple[PurePosixPath, str]]:
    """Every counted file of the working tree, or of a revision, with its text."""
    if revision is None:
        for folder in ("src/shoal", "csrc"):
            for path in sorted((ROOT / folder).rglob("*")):
                if counts(PurePosixPath(path)):
                    yield PurePosixPath(path.relative_to(ROOT).as_posix()), path.read_text()
        return
    packed = subprocess.run(
        ["git", "archive", revision, "src/shoal", "csrc"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            name = PurePosixPath(member.name)
            content = archive.extractfile(member)
            if content and counts(name):
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
    found = {"python lines": 0, "c++ lines": 0, "python files": 0} | dict.fromkeys(LATER, 0)
    files = list(tracked(revision))
    for path, text in files:
        others = (room for known, room in COUNTED_AS.items() if path.is_relative_to(known))
        if path.parts[0] == "csrc":
            if not any(part.startswith("test") for part in path.parts[1:]):
                found[next(others, "c++ lines")] += cpp_lines(text)
            continue
        room = next(others, path.parts[2])
        if room in LATER:
            found[room] += python_lines(text)
            continue
        found["python files"] += path.suffix == ".py"
        if room not in {"models", "data"}:
            found["python lines"] += python_lines(text)
    found["code lines"] = found["python lines"] + found["c++ lines"]
    found["duplicates"] = len(duplicates((p, text) for p, text in files if p.suffix == ".py"))
    return found


def measured() -> dict[str, float]:
    """Modules that run in a forward, and microseconds of `Table.find` (median of 20 batches)."""
    sys.path.insert(0, str(ROOT / "tests"))
    import torch

    from shoal import Segment, Table, TableSpec
    from support.trip import modules_on_the_trip

    torch.set_num_threads(1)
    table = Table(TableSpec(name="t", segments=(Segment(dim=16),)))
    rows = torch.arange(200_000)
    table.assign(rows, torch.ones(len(rows), 16))
    batches = [torch.randint(0, len(rows), (64,)) for _ in range(32)]

    def batch() -> float:
        start = time.perf_counter()
        for k in range(500):
            table.find(batches[k % 32])
        return (time.perf_counter() - start) / 500

    seconds = statistics.median(batch() for _ in range(20))
    trip = len(modules_on_the_trip())
    return {"modules on the trip": trip, "lookup of 64 ids, us": round(1e6 * seconds, 1)}


def row(name: str, value: float, then: float | None) -> str:
    """A line of the table."""
    change = "" if then is None else f"  {value - then:+,}"
    if name in LATER:
        state = "ok" if value <= LATER[name] else "red"
        return (
            f"{'code lines of ' + name:22} {value:8,}  allowance {LATER[name]:,}  {state}{change}"
        )
    if name not in BARS:
        return f"{name:22} {value:8,}{change}"
    bar, stretch = BARS[name]
    state = "stretch" if value <= stretch else "ok" if value <= bar else "red"
    return f"{name:22} {value:8,}  bar {bar:7,}  stretch {stretch:7,}  {state:7}{change}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", help="a git revision to compare with")
    parser.add_argument("--check", action="store_true", help="fail above the ceilings")
    parser.add_argument("--measure", action="store_true", help="measure, too")
    arguments = parser.parse_args()
    now = count()
    then = count(arguments.against) if arguments.against else {}
    for name, value in now.items():
        print(row(name, value, then.get(name)))
    for name, found in (measured() if arguments.measure else {}).items():
        print(row(name, found, None))
    for name, most, stretch, command in ELSEWHERE if arguments.measure else ():
        print(f"{name}: bar {most}, stretch {stretch}; {command}")
    above = [name for name, most in (CEILINGS | LATER).items() if now[name] > most]
    if arguments.check and above:
        sys.exit(f"Above the ceiling of scripts/count.py: {', '.join(above)}.")


if __name__ == "__main__":
    main()
