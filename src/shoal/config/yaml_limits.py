"""What a config may be at most: its text before it is parsed, its values before they are validated.

A small text can stand for a huge tree: by aliases, and by interpolations that lead to others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from shoal.errors import ConfigError

_BYTES = 256 << 10
_NODES = 10_000
_DEPTH = 32
_OVERRIDE = 8192  # characters
_TEXT = 4096  # characters of one value or key
_INTS = 1 << 63
_REFERENCE = re.compile(r"\$\{(\.*)([^${}:]+)\}")
# What it leads to is not known of a key that is computed, nor of what a resolver selects.
_OTHERS = re.compile(r"(?<!\\)\$\{(?!\.*[^${}:]+\}|(oc\.env|oc\.decode|now|hydra):)")


def read_checked(path: Path) -> str:
    """The text of a config file that is small, shallow UTF-8, also with its aliases written out.

    Raises:
        ConfigError: another one.
        OSError, UnicodeError, YAMLError: it cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(_BYTES + 1)
    if len(data) > _BYTES:
        raise _refused(f"config file {path}", f"more than {_BYTES} bytes", f"{_BYTES} bytes")
    text = data.decode("utf-8-sig")
    check_nodes(text, f"config file {path}")
    return text


def check_nodes(text: str, what: str) -> None:
    """Count nodes and depth of a YAML text; an alias counts as what it stands for.

    Raises:
        ConfigError: there are too many.
        YAMLError: it cannot be read.
    """
    sizes: dict[str, tuple[int, int]] = {}  # nodes and depth of what an anchor is of
    open_nodes: list[tuple[str | None, int]] = []
    nodes = deepest = 0
    heights = [0]
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            height = heights.pop() + 1
            heights[-1] = max(heights[-1], height)
            if anchor:
                sizes[anchor] = (nodes - before, height)
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                allowed = "aliases of what stands before them, outside of it"
                raise _refused(
                    what, f"alias *{event.anchor} of what it is in, or of nothing", allowed
                )
            more, height = sizes[event.anchor]
            nodes += more
            heights[-1] = max(heights[-1], height)
            deepest = max(deepest, len(open_nodes) + height)
        elif isinstance(event, yaml.NodeEvent):
            nodes += 1
            if isinstance(event, yaml.CollectionStartEvent):
                open_nodes.append((event.anchor, nodes - 1))
                heights.append(0)
            elif event.anchor:
                sizes[event.anchor] = (1, 0)
            deepest = max(deepest, len(open_nodes))
        if nodes > _NODES or deepest > _DEPTH:
            got = f"more than {_NODES} values" if nodes > _NODES else f"{deepest} levels"
            raise _refused(what, got, f"{_NODES} values, aliases written out, in {_DEPTH} levels")


def check_override(text: str) -> None:
    """Refuse an override that is very long or deep, before its grammar is parsed.

    Raises:
        ConfigError: it is.
    """
    brackets = accumulate((letter in "[{(") - (letter in ")}]") for letter in text)
    depth = text.partition("=")[0].count(".") + max(brackets, default=0)
    if len(text) > _OVERRIDE or depth > _DEPTH:
        got = f"{len(text)} characters, {depth} levels"
        allowed = f"{_OVERRIDE} characters, {_DEPTH} levels"
        raise _refused(f"override {text[:40]!r}...", got, allowed)


def check_growth(tree: Any) -> None:
    """Refuse a tree whose interpolations stand for too many values, before they are resolved.

    tree: plain, with "${...}" in its texts.

    Raises:
        ConfigError: they do, or one leads back to itself.
    """
    visited = 0

    def visit(node: Any, path: tuple[str, ...], chain: int) -> None:
        """Go through a part of the tree, and through all that its interpolations stand for."""
        nonlocal visited
        visited += chain > 0
        if visited > _NODES:
            raise _refused("config", "interpolations of too many values", f"{_NODES} in all")
        for key, item in _items(node):
            visit(item, (*path, str(key)), chain)
        if not isinstance(node, str) or "${" not in node:
            return
        where = f"config key {'.'.join(path)[:200]}"
        if chain == _DEPTH:
            got = "interpolations in a circle or a long chain"
            raise _refused(where, got, f"chains of {_DEPTH}")
        if _OTHERS.search(node):
            raise _refused(where, node[:200], "${key}, ${.key} or ${oc.env:NAME}")
        for dots, key in _REFERENCE.findall(node):
            target = path[: len(path) - len(dots)] if dots else ()
            target += tuple(re.split(r"[.\[\]]+", key.strip().rstrip("]")))
            at, there = _follow(tree, target)
            visit(there, at, chain + 1)

    visit(tree, (), 0)


def _items(node: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(node, Mapping):
        return node.items()
    return enumerate(node) if isinstance(node, list) else ()


def _follow(tree: Any, path: tuple[str, ...]) -> tuple[tuple[str, ...], Any]:
    """What is at a path, or at the part of it that exists: an interpolation may stand there."""
    for depth, part in enumerate(path):
        below = {str(key): item for key, item in _items(tree)}
        if part not in below:
            # Nothing, or an interpolation of what the rest of the path is in.
            return path[:depth], tree if isinstance(tree, str) else None
        tree = below[part]
    return path, tree


def check_values(value: Any, path: str = "config", depth: int = 0) -> None:
    """Refuse values that no setting has: very long or odd texts, keys that are none, huge numbers.

    Raises:
        ConfigError: names the key.
    """
    if depth > 2 * _DEPTH:
        raise _refused(path[:200], "too many levels", f"{2 * _DEPTH}")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if type(key) not in (str, int) or not str(key).isprintable() or len(str(key)) > _TEXT:
                got, allowed = repr(key)[:200], f"a number, or printable text of {_TEXT} characters"
                raise _refused(f"key in {path}", got, allowed)
            check_values(item, str(key) if path == "config" else f"{path}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            check_values(item, f"{path}[{number}]", depth + 1)
    elif isinstance(value, str) and (len(value) > _TEXT or not _is_text(value)):
        allowed = f"text of {_TEXT} characters, in UTF-8, without NUL"
        raise _refused(f"config key {path}", repr(value)[:200], allowed)
    elif isinstance(value, int) and not -_INTS <= value < _INTS:
        raise _refused(f"config key {path}", "a number of more than 64 bits", f"{_INTS - 1}")


def _is_text(value: str) -> bool:
    return "\0" not in value and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _refused(what: str, got: str, allowed: str) -> ConfigError:
    remedy = "Correct the file or the override; see docs/guide/config.md for its limits."
    return ConfigError(what, got=got, allowed=allowed, remedy=remedy)
