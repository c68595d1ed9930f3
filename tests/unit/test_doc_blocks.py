"""Every code block of the documentation runs, loads or is a command that exists.

What a block is stands behind its fence; a block without it is an error:

- `python`: runs, top to bottom in one session a page. `python with servers` and others of `NOT_RUN`
  only compile.
- `python title="FILE"`: is written to FILE in the folder of the page's session.
- `sh`: commands whose programs, options, settings and files exist. `sh run`: runs in that folder.
- `yaml`: a part of a run's config, or a whole one, which then loads. `yaml a topology`: of a plan.
- `text`, `mermaid`: output, trees and pictures.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
import yaml
from click import ClickException
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from shoal import config
from shoal.cli.app import app
from shoal.errors import ShoalError
from shoal.planner import read_topology
from support.pages import PAGES, ROOT, Block, blocks_of, name_of

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
NOT_RUN = {"on a GPU", "with servers", "with an export", "a fragment"}
SHOWN = {"text", "mermaid"}
TITLE = re.compile(r'title="([\w./-]+)"')
EVERY = [*PAGES, ROOT / "bench" / "README.md", ROOT / "CONTRIBUTING.md"]


def pages_with(*languages: str) -> Any:
    pages = [page for page in EVERY if blocks_of(page, *languages)]
    return pytest.mark.parametrize("page", pages, ids=name_of)


def runs(block: Block) -> bool:
    return block.info in ("python", "sh run")


@pytest.mark.parametrize("page", EVERY, ids=name_of)
def test_a_block_is_what_its_fence_allows(page: Path) -> None:
    assert page.read_text().count("\n```") + page.read_text().startswith("```") == 2 * len(
        blocks_of(page)
    )
    for block in blocks_of(page):
        allowed = {
            "python": block.rest in {"", *NOT_RUN} or bool(TITLE.fullmatch(block.rest)),
            "sh": block.rest in {"", "run"},
            "yaml": block.rest in {"", "a topology"} or bool(TITLE.fullmatch(block.rest)),
            **dict.fromkeys(SHOWN, not block.rest),
        }
        assert allowed.get(block.language), f"{block}: {block.info!r}"
        if block.language == "python":
            compiled(block)


def compiled(block: Block) -> Any:
    code = "\n" * block.line + block.text
    return compile(code, str(block.page), "exec", dont_inherit=True)


@pytest.mark.slow
@pytest.mark.timeout(600)  # a page may start several processes, on a busy machine
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize(
    "page", [page for page in EVERY if any(map(runs, blocks_of(page)))], ids=name_of
)
def test_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    session: dict[str, object] = {"__name__": "page"}
    for block in blocks_of(page):
        if title := TITLE.fullmatch(block.rest):
            (tmp_path / title[1]).write_text(block.text)
        elif block.info == "python":
            exec(compiled(block), session)
        elif block.info == "sh run":
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block.text], capture_output=True, text=True
            )
            assert done.returncode == 0, f"{block}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


@pages_with("yaml")
def test_yaml_is_of_a_config(page: Path, tmp_path: Path) -> None:
    for block in blocks_of(page, "yaml"):
        if block.rest == "a topology":
            (tmp_path / "topology.yaml").write_text(
                "".join(line for line in block.text.splitlines(True) if "measured" not in line)
            )
            read_topology(tmp_path / "topology.yaml")
            continue
        settings = yaml.safe_load(block.text)
        if {"data", "tables", "features", "model"} <= set(settings):
            config.from_mapping({"name": "page", **settings})
        else:
            for key, part in settings.items():
                assert key in config.RunConfig.model_fields, f"{block}: {key}"
                check_part(part, config.RunConfig.model_fields[key])


def check_part(part: object, field: FieldInfo) -> None:
    """A section's settings are known and of their types; those that it must have may be missing."""
    hint: Any = Annotated[(field.annotation, *field.metadata, "")]
    try:
        TypeAdapter(hint).validate_python(part)
    except ValidationError as error:
        found = [one for one in error.errors() if one["type"] != "missing"]
        wrong = [one for one in found if ": got no " not in one["msg"]]  # as rules say "missing"
        assert not wrong, wrong


def commands_of(text: str) -> Iterator[list[str]]:
    for line in text.replace("\\\n", " ").splitlines():
        words: list[str] = []
        for word in [*shlex.split(line, comments=True), "&&"]:
            if word not in ("&&", "|", "||", "&", ";"):
                words.append(word)
            elif words:
                while re.fullmatch(r"[A-Z_]+=.*", words[0]):
                    words.pop(0)
                yield words
                words = []


EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
OTHERS = {"pip", "cd", "openssl", "chmod", "curl", "git", "mkdir", "wait", "export", "conda"}


@pages_with("sh")
def test_commands_exist(page: Path) -> None:
    titles = {found[1] for block in blocks_of(page) if (found := TITLE.fullmatch(block.rest))}
    wrong = [
        f"{block}: {' '.join(words)}: {reason}"
        for block in blocks_of(page, "sh")
        for words in commands_of(block.text)
        if (reason := problem(words, page, titles))
    ]
    assert not wrong, "\n".join(wrong)


def problem(words: list[str], page: Path, titles: set[str]) -> str:
    """Why a command would not start; empty if it would."""
    try:
        check_command(words, page, titles)
    except (AssertionError, ShoalError, ClickException) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def check_command(words: list[str], page: Path, titles: set[str]) -> None:
    program, *rest = words
    program = program.removeprefix(".venv-peers/bin/").removeprefix(".venv/bin/")
    if program == "shoal":
        check_shoal(rest)
    elif program == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
        assert rest[0] in targets, f"no target {rest[0]}"
    elif program in ("torchrun", "mpirun", "srun", "python", "python3"):
        for at, word in enumerate(rest):
            if word == "-m":
                if rest[at + 1] == "shoal.cli":
                    check_shoal(rest[at + 2 :])
                return
            if word.endswith(".py"):
                known = (ROOT / word, page.parent / word)
                assert word in titles or any(file.exists() for file in known), f"no {word}"
                return
        raise AssertionError("neither a module nor a script")
    else:
        assert program in OTHERS, f"unknown program {program}"
        for extra in re.findall(r"shoal\[([\w,]+)\]", " ".join(rest)):
            assert set(extra.split(",")) <= set(EXTRAS), f"no extra {extra}"


def check_shoal(words: list[str]) -> None:
    """Options are those of the command, and settings of an example are those of a config."""
    command: Any = typer.main.get_command(app)
    words = [word for word in words if word != "..."]
    context = command.make_context("shoal", words)
    while hasattr(command, "commands"):
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
    file = str(context.params.get("config") or context.params.get("run"))
    is_run = file.startswith("examples/") and "\ndata:" in (ROOT / file).read_text()
    if is_run and "overrides" in context.params:
        config.load(ROOT / file, context.params["overrides"] or ())
