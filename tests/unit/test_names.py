"""Names and variables of the other systems: each has an answer, and what is named here exists."""

from __future__ import annotations

import pkgutil
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from shoal.comm.flags import FLAGS, read_flags
from shoal.config.tree import RunConfig

ROOT = Path(__file__).parents[2]
NAMES = (ROOT / "docs" / "names.md").read_text()
VARIABLES = (ROOT / "docs" / "guide" / "environment.md").read_text()
GOLDEN = ROOT / "tests" / "golden"
CELL = re.compile(r"^`([^`]+)`$")


def rows(page: str, width: int) -> list[list[str]]:
    """Cells of the tables of so many columns, without heads."""
    found = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in page.splitlines()
        if line.startswith("| ") and not line.startswith(("| name there", "| variable", "| flag"))
    ]
    return [[cell.strip(" |") for cell in cells] for cells in found if len(cells) == width]


def names() -> Iterator[tuple[str, str]]:
    for there, here, difference in rows(NAMES, 3):
        match = CELL.match(there)
        assert match is not None, there
        assert difference, there
        yield match[1], here


def variables() -> list[tuple[str, str]]:
    found = [(cells[0].split(", "), cells[1]) for cells in rows(VARIABLES, 3)]
    return [(name, verdict) for group, verdict in found for name in group]


def setting(key: str) -> bool:
    """Whether a config has a key; NAME stands for what the user names."""
    section: object = RunConfig
    for part in key.split("."):
        sections = list(sections_of(section))
        fields = [one.model_fields[part] for one in sections if part in one.model_fields]
        if fields:
            section = fields[0].annotation
        elif not sections or typing.get_origin(section) is not dict:
            return key == "model.kind"  # of each model
    return True


def sections_of(hint: object) -> Iterator[type[BaseModel]]:
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        yield hint
    for inner in typing.get_args(hint):
        yield from sections_of(inner)


@pytest.mark.parametrize("here", sorted({here for _, here in names() if here != "none"}))
def test_what_is_named_here_can_be_imported_or_set(here: str) -> None:
    match = CELL.match(here)
    assert match is not None, here
    name = match[1]
    if name.startswith(("shoal.", "hrm.")):
        assert pkgutil.resolve_name(name) is not None
    else:
        assert setting(name), name


def test_each_name_of_the_five_documents_is_in_the_table() -> None:
    known = {there for there, _ in names()}
    wanted = (GOLDEN / "seed_names.txt").read_text().split()
    assert set(wanted) <= known, sorted(set(wanted) - known)


def test_each_variable_of_the_five_documents_has_an_answer() -> None:
    verdicts = dict(variables())
    wanted = (GOLDEN / "seed_variables.txt").read_text().split()
    assert set(wanted) <= verdicts.keys(), sorted(set(wanted) - verdicts.keys())
    assert set(verdicts.values()) == {"honoured", "checked", "replaced", "not read"}
    assert {flag.variable for flag in FLAGS.values()} <= verdicts.keys()


def test_variables_that_are_not_read_are_nowhere_in_the_source() -> None:
    texts = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    for name, verdict in variables():
        if verdict in ("replaced", "not read"):
            assert not any(re.search(rf"\b{name}\b", text) for text in texts), name


@pytest.mark.parametrize("said", ["True", "true", "1", " yes"])
def test_monolith_s_own_value_of_with_horovod_is_read_as_1(said: str) -> None:
    assert read_flags({"MONOLITH_WITH_HOROVOD": said}).horovod == 1
