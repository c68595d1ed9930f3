"""Launches at a fraction of the host time of Triton's own call, and blocks of work."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from shoal import _core

# Of each kernel, its run-time arguments by name, whether Triton ignores what they hold, and whether
# it compiles. Kernels are held too, so that their identities stay theirs.
_PARAMETERS: dict[int, tuple[tuple[str, ...], bytes, bool]] = {}
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
    names, fixed, compiles = _PARAMETERS.get(id(kernel)) or _parameters(kernel)
    assert len(arguments) <= len(names), f"{kernel}: constants go by name"
    if not compiles:
        kernel[grid](*arguments, **options)
        return
    if len(arguments) < len(names):
        arguments += tuple([options.pop(name) for name in names[len(arguments) :]])
    device = arguments[0].get_device()
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            launch(kernel, grid, *arguments, **options)
        return
    # What Triton's choice of a compiled kernel depends on. Of tensors only the addresses are handed
    # on: its launcher takes them as they are, and asks the driver about tensors.
    kinds, values = _core.launch_values(arguments, fixed)
    key = (id(kernel), device, kinds, *options.values(), *options)
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
    found.run(x, y, z, stream, *rest, *values, *found.constants)


def _parameters(kernel: Any) -> tuple[tuple[str, ...], bytes, bool]:
    if isinstance(kernel, triton.JITFunction):
        given = [p for p in kernel.params if not p.is_constexpr]
        fixed = bytes(bool(p.do_not_specialize) for p in given)
        found = tuple(p.name for p in given), fixed, True
    else:  # interpreted: nothing is compiled, but callers are held to the same
        kinds = inspect.get_annotations(kernel.fn)
        names = [name for name in kernel.arg_names if "constexpr" not in str(kinds.get(name))]
        found = tuple(names), bytes(len(names)), False
    assert [*kernel.arg_names[: len(found[0])]] == [*found[0]], f"{kernel}: constants come last"
    _KERNELS.append(kernel)
    _PARAMETERS[id(kernel)] = found
    return found


TILE = 1024  # elements of a program's block
MOST_COLUMNS = 128


def blocks_of(items: int, block: int) -> int:
    """Blocks that hold all items, the last maybe not full."""
    return (items + block - 1) // block


def shared_programs(most: int, device: torch.device, each: int) -> int:
    """Programs that share work, `most` at the most: `each` on every multiprocessor of a GPU, a few
    where kernels are interpreted.
    """
    return min(most, each * _multiprocessors(device) if device.type == "cuda" else 3)


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def power_of_2(least: int) -> int:
    """The smallest power of two of at least `least` >= 1."""
    return 1 << (least - 1).bit_length()


def step_of(dim: int) -> int:
    """Columns that rows are a multiple of, up to 16: what lets loads be as wide as they can."""
    step = 1
    while step < 16 and dim % (2 * step) == 0:
        step *= 2
    return step


def columns_per_program(dim: int) -> int:
    """Width of a block of columns."""
    return min(power_of_2(dim), MOST_COLUMNS)


ELEMENTS = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
"""Triton's names."""


def wide_of(dtype: torch.dtype) -> Any:
    return tl.float64 if dtype == torch.float64 else tl.float32


def columns_of(dim: int) -> dict[str, int]:
    step = step_of(dim)
    return {"steps": dim // step, "step": step, "block_d": columns_per_program(dim)}


def grid_of(items: int, block: int, dim: int) -> tuple[int, int]:
    return blocks_of(items, block), blocks_of(dim, columns_per_program(dim))


def rows_of_tile(dim: int) -> int:
    return max(TILE // columns_per_program(dim), 1)
