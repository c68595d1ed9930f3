"""One test file from the modules of a package, so that a family of tests has one file."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

__all__ = ["gathered"]


def gathered(package: str) -> dict[str, Callable[..., Any]]:
    """Tests of all modules of a package, by name, with the marks of their module on them.

    Raises:
        ValueError: two modules have a test of one name, so that one would hide the other.
    """
    found: dict[str, Callable[..., Any]] = {}
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        family = importlib.import_module(f"{package}.{module.name}")
        marks = getattr(family, "pytestmark", [])
        for name, test in vars(family).items():
            if not name.startswith("test_"):
                continue
            if name in found:
                raise ValueError(f"{name}: in {found[name].__module__} and in {family.__name__}")
            for mark in marks if isinstance(marks, list) else [marks]:
                mark(test)
            found[name] = test
    return found
