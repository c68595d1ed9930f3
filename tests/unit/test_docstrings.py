"""Public docstrings: each name and method has one, which names arguments and what is raised."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

from support.pages import ROOT

SRC = ROOT / "src" / "shoal"
# The packages that users call most: an argument there is named, unless letters give its shape.
NAMED = ("checkpoint", "config", "data", "ids", "models", "optim")
SHAPED = re.compile(r"\w+_[A-Z][A-Z0-9]*$")


def public() -> Iterator[tuple[str, object]]:
    """What every `__all__` names, by its dotted name; each thing once, in the first package."""
    seen: set[int] = set()
    for path in sorted(SRC.rglob("*.py"), key=lambda path: (len(path.parts), path)):
        name = ".".join(path.relative_to(SRC.parent).with_suffix("").parts)
        module = name.removesuffix(".__init__")
        if "\n__all__ = " not in path.read_text() or "._" in module:
            continue
        made = importlib.import_module(module)
        for each in made.__all__:
            thing = getattr(made, each)
            own = str(getattr(thing, "__module__", "")).startswith("shoal")
            if own and id(thing) not in seen and isinstance(thing, type | FunctionType):
                seen.add(id(thing))
                yield f"{module}.{each}", thing


def documented() -> Iterator[tuple[str, str, list[FunctionType]]]:
    """Name, docstring and the functions it speaks for: a function, a method, or a constructor."""
    for name, thing in public():
        if isinstance(thing, FunctionType):
            yield name, inspect.getdoc(thing) or "", [thing]
            continue
        assert isinstance(thing, type)
        if issubclass(thing, BaseException):
            yield name, thing.__doc__ or "", []
            continue
        made = [thing.__dict__.get(each) for each in ("__init__", "__post_init__")]
        own = [each for each in made if isinstance(each, FunctionType) and written(each)]
        yield name, thing.__doc__ or "", own
        for key, value in thing.__dict__.items():
            method = getattr(value, "__func__", value)
            if not key.startswith("_") and isinstance(method, FunctionType) and written(method):
                inherited = inspect.getdoc(getattr(thing, key)) or ""
                yield f"{name}.{key}", inherited, [method]


def written(function: FunctionType) -> bool:
    return Path(function.__code__.co_filename).is_relative_to(SRC)


def raises(function: FunctionType) -> bool:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    errors = (
        node.exc
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    )
    other = {"StopIteration", "AttributeError", "NotImplementedError", "AssertionError"}
    return any(ast.unparse(error.func) not in other for error in errors)  # type: ignore[attr-defined]


def unnamed(function: FunctionType, text: str) -> list[str]:
    """Arguments that a docstring does not name, if there are several."""
    names = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    missing = [
        name
        for name in names
        if not re.search(rf"\b{name}\b", text) and not SHAPED.match(name) and name[0] != "_"
    ]
    return missing if len(missing) > 2 else []


def test_every_public_name_is_described() -> None:
    found = [(name, text) for name, text, _ in documented()]
    assert len(found) >= 600  # or they are not found any more
    assert [name for name, text in found if not text.strip()] == []


def test_what_is_raised_is_said() -> None:
    silent = [
        name
        for name, text, functions in documented()
        if not name.startswith("shoal.rules.optimizers.") or not name.endswith(".step")
        if any(map(raises, functions)) and not re.search(r"Raises|raises?\b|Error\b|Refused", text)
    ]
    assert silent == []


def test_arguments_are_named_where_users_call_most() -> None:
    silent = {
        name: missing
        for name, text, functions in documented()
        for function in functions
        if name.split(".")[1] in NAMED or name.split(".")[1][0].isupper()
        if function.__name__ != "forward" and not re.match("As `", text)
        if (missing := unnamed(function, text))
    }
    assert silent == {}
