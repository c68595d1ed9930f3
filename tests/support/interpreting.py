"""Triton's interpreter at three quarters of its cost, and as silent as a GPU.

It puts its own functions into the language for a launch, and again for every call that one kernel
function makes to another, though all are in place then: inspecting the modules takes longer than
what the kernels do. Here the inner calls find the language as the launch left it.

A GPU adds infinities of both signs without a word; numpy, which does the arithmetic here, warns.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

__all__ = ["patch_once"]


def patch_once() -> None:
    """Let a launch prepare the language once; does nothing where Triton works otherwise."""
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    wanted = ("_patch_lang", "_LangPatchScope")
    if not all(hasattr(interpreter, name) for name in wanted):
        return
    patch, scope = interpreter._patch_lang, interpreter._LangPatchScope
    # Kernels see `triton.language`, and Triton's own functions its `core`.
    both = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    inner = scope()
    running = False

    def once(_: object) -> Any:
        nonlocal running
        if running:
            return inner
        outer = patch(both)
        running = True
        restore, errors = outer.restore, np.seterr(invalid="ignore")

        def end() -> None:
            nonlocal running
            running = False
            np.seterr(**errors)
            restore()

        outer.restore = end
        return outer

    interpreter._patch_lang = once
