"""Launches at a fraction of what Triton's own call costs the host.

`kernel[grid](...)` compares, at every launch, every module-level constant that the kernel and
what it calls use, and prints its options into a string: 50 to 70 us for kernels such as these.
`launch` finds the compiled kernel by what Triton specialises on and starts it: about 10 us.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

__all__ = ["launch"]

_INT32 = 1 << 31

# Of each kernel, its run-time arguments by name and whether Triton ignores what they hold. Kernels
# are held too, so that their identities stay theirs.
_PARAMETERS: dict[int, tuple[tuple[str, ...], tuple[bool, ...]]] = {}
_KERNELS: list[Any] = []


class _Compiled:
    """A compiled kernel and the values of its constants."""

    __slots__ = ("constants", "function", "kernel", "metadata", "run")

    def __init__(self, kernel: Any, constants: tuple[Any, ...]) -> None:
        self.kernel = kernel
        self.run = kernel.run
        self.function = kernel.function
        self.metadata = kernel.packed_metadata
        self.constants = constants


# (kernel, device, kinds of the arguments, constants and options) -> what Triton compiled for them.
_COMPILED: dict[tuple[Any, ...], _Compiled] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Start `kernel[grid](*arguments, **options)` on the present stream of its first argument's
    device; all tensors are on that device.

    Args:
        arguments: the kernel's run-time arguments, which come first in its signature; the last
            of them, or all, may be among the options.
        options: its constants, by name, and Triton's options (`num_warps`, ...); hashable. A
            constant given by its place would be left out of what a compiled kernel is found by.
    """
    names, fixed = _PARAMETERS.get(id(kernel)) or _parameters(kernel)
    assert len(arguments) <= len(names), f"{kernel}: constants go by name"
    if not isinstance(kernel, triton.JITFunction):
        kernel[grid](*arguments, **options)
        return
    if len(arguments) < len(names):
        arguments += tuple([options.pop(name) for name in names[len(arguments) :]])
    device = arguments[0].get_device()
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            launch(kernel, grid, *arguments, **options)
        return
    key = (
        id(kernel),
        device,
        *map(_kind, arguments, fixed),
        *options.values(),
        *options,
    )
    found = _COMPILED.get(key)
    hooks = triton.knobs.runtime.launch_enter_hook
    if found is None or hooks is None or hooks.calls:
        compiled = kernel[grid](*arguments, **options)
        constants = tuple([options[name] for name in kernel.arg_names[len(arguments) :]])
        _COMPILED[key] = _Compiled(compiled, constants)
        return
    # As Triton's `CompiledKernel.__getitem__` starts it, with no hooks to call.
    x, y, z = (*grid, 1, 1)[:3]
    stream = torch._C._cuda_getCurrentRawStream(device)
    rest = (found.function, found.metadata, None, None, None)
    found.run(x, y, z, stream, *rest, *arguments, *found.constants)


def _parameters(kernel: Any) -> tuple[tuple[str, ...], tuple[bool, ...]]:
    if isinstance(kernel, triton.JITFunction):
        given = [p for p in kernel.params if not p.is_constexpr]
        found = tuple(p.name for p in given), tuple(bool(p.do_not_specialize) for p in given)
    else:  # interpreted: nothing is compiled, but callers are held to the same
        kinds = inspect.get_annotations(kernel.fn)
        names = [name for name in kernel.arg_names if "constexpr" not in str(kinds.get(name))]
        found = tuple(names), (False,) * len(names)
    assert [*kernel.arg_names[: len(found[0])]] == [*found[0]], f"{kernel}: constants come last"
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
