"""The pages of the documentation, and the code blocks in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "examples" / "hrm" / "README.md",
    *sorted(DOCS.rglob("*.md")),
]
_FENCE = re.compile(r"^(```+)(.*?)\n(.*?)^\1$", flags=re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A code block: what stands behind its fence, the lines ahead of it, and what is in it."""

    page: Path
    info: str
    line: int
    text: str

    @property
    def language(self) -> str:
        return self.info.split(" ")[0]

    @property
    def rest(self) -> str:
        return self.info.partition(" ")[2]

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path, *languages: str) -> list[Block]:
    """Code blocks of a page, of these languages if any are named."""
    text = page.read_text()
    found = [
        Block(page, each[2], text[: each.start(3)].count("\n"), each[3])
        for each in _FENCE.finditer(text)
    ]
    return [each for each in found if not languages or each.language in languages]
