"""`torch.compile` of dense parts; lookups stay outside of every graph."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeVar, cast, get_args

import torch
from torch import nn

from shoal.errors import ConfigError, DeviceUnavailable, unknown_name

CompileMode = Literal[
    "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
]  # fmt: skip
Compile = bool | CompileMode
"""False: eager. True: torch.compile's default mode."""
Function = TypeVar("Function", bound=Callable[..., Any])
_GRAPHED = ("reduce-overhead", "max-autotune")
_OTHERS = ", ".join(
    ["false", "true", *(one for one in get_args(CompileMode) if one not in _GRAPHED)]
)


def has_cuda_graphs(how: Compile) -> bool:
    """Whether a mode replays CUDA graphs: memory of its outputs is used again by the next step."""
    return how in _GRAPHED


def check_compile(how: Compile, device: torch.device, keeping: Sequence[str] = ()) -> None:
    """Check that a mode is one, and that this machine can compile for a device.

    Args:
        how: mode.
        device: of the dense part.
        keeping: settings that keep gradients, or what they are made of, for the next forward.

    Raises:
        UnknownName: no such mode.
        ConfigError: a mode with CUDA graphs on another device, or with a setting that keeps.
        DeviceUnavailable: no C++ compiler for a CPU.
    """
    modes = get_args(CompileMode)
    if how not in (None, False, True, *modes):
        raise unknown_name("mode of compile", how, ("false", "true", *modes))
    for setting in keeping if has_cuda_graphs(how) else ():
        remedy = "Set compile=true: CUDA graphs use the memory of gradients again."
        raise ConfigError(f"compile with {setting}", how, _OTHERS, remedy)
    if has_cuda_graphs(how) and device.type != "cuda":
        raise ConfigError(
            f"compile={how}",
            got=f"device {device.type}",
            allowed=f"device cuda; on others compile of {_OTHERS}",
            remedy="Set compile=true: CUDA graphs need a GPU.",
        )
    cxx = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if how and device.type == "cpu" and shutil.which(cxx) is None:
        raise DeviceUnavailable(
            "C++ compiler of compile", got=f"no {cxx}", allowed="one on PATH, or in CXX",
            remedy="Install one, or leave compile out.",
        )  # fmt: skip


def compiled(function: Function, how: Compile) -> Function:
    """A function through torch.compile; itself if `how` is False.

    Shapes are static until one changes; after that one graph is for all sizes.
    """
    if how is False:
        return function
    return cast(Function, torch.compile(function, mode="default" if how is True else how))


def begin_step() -> None:
    """Memory of the step before may be used again, in modes with CUDA graphs.

    Once a step, before its first forward: a backward that is still to come loses what it needs.
    """
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]


def compile_around(module: nn.Module, tables: Iterable[nn.Module], how: Compile) -> None:
    """Compile, in place, the largest parts of a model that hold no table; names stay as they are.

    Args:
        module: the model.
        tables: modules that stay eager, and so does the forward of modules that hold one.
        how: mode.
    """
    if how is False:
        return
    for part in _parts_without(module, {id(table) for table in tables}):
        # What `part.compile()` sets, which leaves torch's own modules, an nn.Sequential say, eager.
        part._compiled_call_impl = compiled(_call_of(part), how)


def _call_of(part: nn.Module) -> Callable[..., Any]:
    """The call of a module as a function with code of its own: graphs are kept, and counted, by
    code."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return part._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    call.__code__ = call.__code__.replace(co_name=type(part).__name__)
    return call


def _parts_without(module: nn.Module, tables: set[int]) -> Iterator[nn.Module]:
    """A part has a forward of its own, which containers lack, and parameters."""
    held = any(id(part) in tables for part in module.modules())
    if not held and type(module).forward is not nn.Module.forward:
        if next(module.parameters(), None) is not None:
            yield module
        return
    for child in () if id(module) in tables else module.children():
        yield from _parts_without(child, tables)
