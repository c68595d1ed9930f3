"""Operators `torch.ops.shoal.*`: one definition, core and kernels, one gradient."""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_unflatten

from shoal import _core
from shoal.errors import DeviceUnavailable, unknown_name

# From here on memory is kept for the next output of its size: fresh pages cost more than filling
# them.
_KEPT_BYTES = 1 << 19


def fresh(*shape: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor; a large one reuses memory."""
    size = math.prod(shape)
    if size * dtype.itemsize < _KEPT_BYTES:
        return torch.empty(shape, dtype=dtype, device="cpu")
    words = -(-size * dtype.itemsize // 8)
    kept: Tensor = _core.pooled64(1, words)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    # No view: autograd lets nobody change a view that a custom operator returned.
    return torch.empty(0, dtype=dtype, device="cpu").set_(kept.untyped_storage(), 0, shape, strides)


def widened(tensor: Tensor) -> Tensor:
    """What the core reads: contiguous, and float32 if it was a narrower float."""
    if tensor.is_floating_point() and tensor.dtype not in (torch.float32, torch.float64):
        tensor = tensor.float()
    return tensor.contiguous()


Backend = Literal["core", "triton"]
Implementation = Callable[..., Any]
Forced = Backend | Mapping[str, Implementation]

_LIBRARY: Any = torch.library.Library("shoal", "FRAGMENT")  # type: ignore[no-untyped-call]
_FORCED: ContextVar[Forced | None] = ContextVar("shoal_ops_backend", default=None)
_bounds_checks = False


@contextlib.contextmanager
def forced(backend: Forced) -> Iterator[None]:
    """Inside, operators on CPU and CUDA tensors run one named implementation, or given functions.

    For tests, and for finding out which implementation is wrong. "core" takes CPU tensors only;
    "triton" takes CPU tensors only under `TRITON_INTERPRET=1`. Functions are given by the name of
    the operator whose arguments they take; operators that are not named run as ever.

    Raises:
        UnknownName: no such backend.
    """
    if not isinstance(backend, Mapping) and backend not in get_args(Backend):
        raise unknown_name("backend", backend, get_args(Backend))
    token = _FORCED.set(backend)
    try:
        yield
    finally:
        _FORCED.reset(token)


def backend_on(device: torch.device) -> Forced:
    """What operators on tensors of a CPU or CUDA device run."""
    return _FORCED.get() or ("triton" if device.type == "cuda" else "core")


def checks_bounds() -> bool:
    """Whether `set_bounds_checks` has turned checks on."""
    return _bounds_checks


def set_bounds_checks(enabled: bool) -> None:
    """Turn the checks of indices and offsets in CUDA memory on or off (off at first).

    On, an operator on CUDA tensors reads its indices back to check them, which waits for the
    device. On the CPU they are always checked.
    """
    global _bounds_checks
    _bounds_checks = enabled


@contextlib.contextmanager
def bounds_checks(enabled: bool = True) -> Iterator[None]:
    """`set_bounds_checks` for the length of a block."""
    before = _bounds_checks
    set_bounds_checks(enabled)
    try:
        yield
    finally:
        set_bounds_checks(before)


def operator(
    schema: str,
    *,
    core: Implementation,
    triton: str,
    fake: Implementation,
    check: Implementation | None = None,
    gradient: tuple[Implementation, Implementation] | None = None,
    from_host: bool = False,
) -> Callable[..., Any]:
    """Define `shoal::<schema>` and return the callable overload.

    Args:
        schema: as `torch.library.define` takes it, without the namespace.
        core: the compiled core, on CPU tensors.
        triton: "module:function" in `shoal.kernels`, loaded at its first call.
        fake: output shapes without data.
        check: raises for bad values in index and offset tensors; takes the operator's arguments.
            Runs before all but the core (on CUDA only when `set_bounds_checks` is on), which checks
            values itself, in its own pass, and raises the same errors.
        gradient: backward and setup_context, as `torch.library.register_autograd` takes them;
            none for operators on ids alone.
        from_host: its launcher sends addresses or sizes from the host, so that a captured CUDA
            graph must not contain it; `torch.compile` then splits its graphs there.
    """
    name = schema.split("(", 1)[0].strip()
    _LIBRARY.define(schema, tags=(torch.Tag.cudagraph_unsafe,) if from_host else ())
    table: dict[Backend, Implementation] = {"core": core, "triton": _lazy(triton)}

    def run(default: Backend, checked: bool, args: Sequence[Any]) -> Any:
        chosen = _FORCED.get() or default
        work = chosen.get(name, table[default]) if isinstance(chosen, Mapping) else table[chosen]
        if checked and check is not None and work is not core:
            check(*args)
        return work(*args)

    def on_cpu(*args: Any) -> Any:
        return run("core", True, args)

    def on_cuda(*args: Any) -> Any:
        if _FORCED.get() == "core":
            what, remedy = f"{name}: backend 'core'", "Move them with .cpu(), or do not force it."
            raise DeviceUnavailable(what, "CUDA tensors", "CPU tensors", remedy)
        # Triton launches on the current device, whatever device its arguments lie on.
        device = _cuda_device(args)
        if device is None or device.index == torch.cuda.current_device():
            return run("triton", _bounds_checks, args)
        with torch.cuda.device(device):
            return run("triton", _bounds_checks, args)

    _LIBRARY.impl(name, on_cpu, "CPU")
    _LIBRARY.impl(name, on_cuda, "CUDA")
    torch.library.register_fake(f"shoal::{name}", fake, lib=_LIBRARY)
    if gradient is not None:
        backward, setup = gradient
        torch.library.register_autograd(
            f"shoal::{name}", backward, setup_context=setup, lib=_LIBRARY
        )
    overload: Callable[..., Any] = getattr(torch.ops.shoal, name).default
    writes = "!" in schema  # the dispatcher counts the versions of what is written to

    def call(*args: Any) -> Any:
        if writes or torch.compiler.is_compiling() or not _straight_to_core(args):
            return overload(*args)
        return core(*args)

    return call


# What the dispatcher sees when no mode, transform, tracer or autocast is on, and of a CPU tensor.
_NO_MODES = torch._C._dispatch_tls_local_include_set()
_CPU_KEYS = torch._C._dispatch_keys(torch.empty(0, device="cpu"))


def _straight_to_core(args: Iterable[Any]) -> bool:
    """Whether an operator would only run its core: it costs a small operation more than the core.

    Then nothing is forced, profiled, transformed or differentiated, and all tensors are plain.
    """
    return (
        _FORCED.get() is None
        and torch._C._dispatch_tls_local_include_set() == _NO_MODES
        and not torch._C._autograd._profiler_enabled()
        and forward_ad._current_level < 0
        and _all_plain(args, torch.is_grad_enabled())
    )


def _all_plain(args: Iterable[Any], grad: bool) -> bool:
    for arg in args:
        kind = type(arg)
        if kind is Tensor:
            if (grad and arg.requires_grad) or torch._C._dispatch_keys(arg) != _CPU_KEYS:
                return False
        elif kind is list or kind is tuple:
            if not _all_plain(arg, grad):
                return False
        elif isinstance(arg, Tensor):
            return False
    return True


def _cuda_device(args: Iterable[Any]) -> torch.device | None:
    """Device of the first CUDA tensor among the arguments and their lists."""
    for arg in args:
        if isinstance(arg, Tensor) and arg.is_cuda:
            return arg.device
        if isinstance(arg, (list, tuple)) and (found := _cuda_device(arg)) is not None:
            return found
    return None


def _lazy(target: str) -> Implementation:
    module, function = target.split(":")

    @functools.cache
    def loaded() -> Any:
        try:
            importlib.import_module("triton")
        except ImportError as error:
            allowed = "the version that matches torch"
            remedy = "Install torch with CUDA, which brings Triton, or use CPU tensors."
            raise DeviceUnavailable("Triton", "not installed", allowed, remedy) from error
        return getattr(importlib.import_module(f"shoal.kernels.{module}"), function)

    return lambda *args: loaded()(*args)


def linear(transposed: Implementation) -> tuple[Implementation, Implementation]:
    """`gradient` of an operator that is linear in its first argument, a tensor or a list of them.

    transposed: (gradients, shape of the first argument or of each in it, the other arguments) ->
        gradients of the first argument. The others have none.
    """

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        first, *rest = inputs
        ctx.shape = first.shape if isinstance(first, Tensor) else [one.shape for one in first]
        leaves, ctx.form = tree_flatten(tuple(rest), is_leaf=_is_plain_list)
        ctx.save_for_backward(*[one if isinstance(one, Tensor) else None for one in leaves])
        ctx.plain = [None if isinstance(one, Tensor) else one for one in leaves]

    def backward(ctx: Any, grads: Any) -> tuple[Any, ...]:
        pairs = zip(ctx.saved_tensors, ctx.plain, strict=True)
        leaves = [plain if saved is None else saved for saved, plain in pairs]
        rest = tree_unflatten(leaves, ctx.form)
        return transposed(grads, ctx.shape, *rest), *map(_none_for, rest)

    return backward, setup


def _is_plain_list(argument: Any) -> bool:
    """Whether it is a list of other values than tensors."""
    return isinstance(argument, list) and not all(isinstance(one, Tensor) for one in argument)


def _none_for(argument: Any) -> Any:
    """No gradient of an argument; torch asks for one of each tensor of a list."""
    tensors = isinstance(argument, list) and not _is_plain_list(argument)
    return [None] * len(argument) if tensors else None


def by_core(core: Implementation) -> Implementation:
    """A check of values by the core on the host's copies: for arguments that are ids or offsets."""

    def on_host(value: Any) -> Any:
        if isinstance(value, list):
            return [on_host(one) for one in value]
        return value.cpu() if isinstance(value, Tensor) else value

    return lambda *args: core(*map(on_host, args))
