"""The documentation names every setting and error, and its links lead somewhere."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from pydantic import BaseModel

from shoal import errors
from shoal.config.compose import ENVIRONMENT
from shoal.config.tree import RunConfig
from shoal.models import MODELS, TaskSettings
from support.pages import DOCS, PAGES, ROOT, name_of

PROJECT = [ROOT / f"{name}.md" for name in ("CONTRIBUTING", "CHANGELOG", "SECURITY")]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
KEY_ROW = re.compile(r"^\| `([A-Za-z0-9_.]+)` \|", flags=re.MULTILINE)


def prose_of(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose_of(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def sections_of(hint: object) -> list[type[BaseModel]]:
    """Sections that a setting's type allows, unions and annotations unpacked."""
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return [hint]
    return [cls for inner in typing.get_args(hint) for cls in sections_of(inner)]


def keys_of(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of all settings; NAME stands for a name that the user gives."""
    for key, field in section.model_fields.items():
        if key == "model":  # a spec, whose keys are its fields
            yield from {f"model.{one.name}" for spec in MODELS.values() for one in fields(spec)}
            yield "model.kind"
            continue
        if key == "tasks":
            yield from (f"tasks.NAME.{one.name}" for one in fields(TaskSettings))
            continue
        inner = sections_of(field.annotation)
        if not inner:
            yield prefix + key
        named = "NAME." if typing.get_origin(field.annotation) is dict else ""
        for cls in inner:
            yield from keys_of(cls, f"{prefix}{key}.{named}")


@pytest.mark.parametrize("page", [*PAGES, *PROJECT], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(prose_of(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{target} of {name_of(page)}"
        if anchor:
            assert anchor in anchors_of(there), f"{target} of {name_of(page)}"


def test_index_lists_every_page() -> None:
    index = DOCS / "index.md"
    linked = {
        (DOCS / target.partition("#")[0]).resolve() for target in LINK.findall(prose_of(index))
    }
    assert set(DOCS.rglob("*.md")) - {index} <= linked


def test_config_page_has_every_key_and_no_other() -> None:
    text = (DOCS / "guide" / "config.md").read_text()
    settings = text.partition("## The run\n")[2].partition("## The run folder")[0]
    assert set(KEY_ROW.findall(settings)) == set(keys_of(RunConfig))


def test_config_page_has_every_variable() -> None:
    text = (DOCS / "guide" / "config.md").read_text()
    assert set(re.findall(r"`(SHOAL_[A-Z_]+)`", text)) == set(ENVIRONMENT)


def test_errors_page_has_every_error() -> None:
    text = (DOCS / "reference" / "errors.md").read_text()
    every = [name for name in errors.__all__ if isinstance(getattr(errors, name), type)]
    assert [name for name in every if f"`{name}`" not in text] == []
    tree = (errors.__doc__ or "").partition("\n\n")[2].partition("\n\n")[0]
    for drawn in tree.splitlines():
        assert drawn.split("  ")[0] in text
