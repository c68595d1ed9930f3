"""Launches at a fraction of what Triton's own call costs the host.

`kernel[grid](...)` compares, at every launch, every module-level constant that the kernel and
what it calls use, and prints its options into a string: 50 to 70 us for kernels such as these.
`launch` finds the compiled kernel by what Triton specialises on and starts it: 10 us or so.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

__all__ = ["launch"]

_INT32 = 1 << 31

# (kernel, device, kinds of the arguments, constants and options) -> the compiled kernel and the
# values of its constants.
_COMPILED: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
# Of each kernel, run-time arguments by name and whether Triton ignores what they hold. Kernels are
# held too, so that their identities stay theirs.
_PARAMETERS: dict[int, tuple[tuple[str, ...], tuple[bool, ...]]] = {}
_KERNELS: list[Any] = []


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Start `kernel[grid](*arguments, **options)` on the present stream of the present device.

    Args:
        arguments: the kernel's run-time arguments, which come first in its signature; the last
            of them may be among the options.
        options: its constants, by name, and Triton's options (`num_warps`, ...); hashable.
    """
    if not isinstance(kernel, triton.JITFunction):
        kernel[grid](*arguments, **options)
        return
    names, fixed = _PARAMETERS.get(id(kernel)) or _parameters(kernel)
    if len(arguments) < len(names):
        arguments += tuple([options.pop(name) for name in names[len(arguments) :]])
    key = (
        id(kernel),
        torch.cuda.current_device(),
        *map(_kind, arguments, fixed),
        *options.values(),
        *options,
    )
    found = _COMPILED.get(key)
    if found is None:
        compiled = kernel[grid](*arguments, **options)
        constants = tuple([options[name] for name in kernel.arg_names[len(arguments) :]])
        _COMPILED[key] = (compiled, constants)
        return
    compiled, constants = found
    sizes = grid if len(grid) == 3 else (*grid, 1, 1)
    compiled[sizes](*arguments, *constants)


def _parameters(kernel: Any) -> tuple[tuple[str, ...], tuple[bool, ...]]:
    given = [p for p in kernel.params if not p.is_constexpr]
    found = tuple(p.name for p in given), tuple(bool(p.do_not_specialize) for p in given)
    _KERNELS.append(kernel)
    _PARAMETERS[id(kernel)] = found
    return found


def _kind(value: Any, fixed: bool) -> Any:
    """What Triton's choice of a compiled kernel depends on."""
    kind = value.__class__
    if kind is int:
        wide = not -_INT32 <= value < _INT32
        return wide if fixed else (wide, value == 1, value & 15 == 0)
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() & 15
    return kind
