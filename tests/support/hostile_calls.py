"""Every public function with tensors that nobody expects: run as a program, case by case.

    python -m support.hostile_calls KIND,...|all [PREFIX...]   # of a function's name

Functions are found by introspection; an argument that may be a tensor gets a hostile one, the
others a plain value of their type. Every function runs in its own process, so that a crash is
reported by its name.
"""

from __future__ import annotations

import collections.abc
import contextlib
import inspect
import itertools
import os
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import shoal
import shoal.ops
from shoal import EmbeddingCollection, Feature, KeyedRagged, Ragged, Segment, Table, TableSpec
from shoal.errors import ShoalError


class Plain(Tensor):
    """A subclass that adds nothing."""


def _quantised(whole: Tensor) -> Tensor:
    return torch.quantize_per_tensor(whole.float(), 0.5, 0, torch.quint8)


MAKERS: dict[str, Callable[[Tensor], Any]] = {
    "sparse": lambda whole: whole.to_sparse(),
    "csr": lambda whole: (whole if whole.dim() == 2 else whole.expand(2, -1)).to_sparse_csr(),
    "mkldnn": lambda whole: whole.float().to_mkldnn(),
    "quantised": _quantised,
    "meta": lambda whole: whole.to("meta"),
    "fake": lambda whole: FakeTensorMode().from_tensor(whole),
    "nested": lambda whole: torch.nested.nested_tensor([whole, whole], layout=torch.jagged),
    "subclass": lambda whole: whole.as_subclass(Plain),
    "parameter": lambda whole: torch.nn.Parameter(whole, requires_grad=whole.is_floating_point()),
    "strided": lambda whole: torch.stack([whole, whole], dim=-1)[..., 0],
    "negative": lambda whole: np.ascontiguousarray(whole.numpy())[::-1],
    "gradient": lambda whole: whole.float().requires_grad_(),
    "scalar": lambda whole: whole.flatten()[0],
    "complex": lambda whole: whole.to(torch.complex64),
    "imaginary": lambda whole: torch.complex(whole.float(), whole.float()).conj().imag,
    "bool": lambda whole: whole.bool(),
    "int32": lambda whole: whole.int(),
    "double": lambda whole: whole.double(),
    "empty": lambda whole: whole[:0],
    "expanded": lambda whole: whole.flatten()[:1].expand(3),
    "deep": lambda whole: whole.reshape(1, 1, -1),
}
MODES = ("in_fake", "in_meta", "in_vmap")
KINDS = (*MAKERS, *MODES)


def owners() -> dict[str, Any]:
    """Objects whose methods are called too, by the module and name that their cases carry."""
    spec = TableSpec(name="t", segments=(Segment(dim=2),))
    batch = KeyedRagged.from_lists({"f": [[1], [2, 3]]})
    return {
        "Table": Table(spec),
        "EmbeddingCollection": EmbeddingCollection([spec], [Feature("f", "t")]),
        "KeyedRagged": batch,
        "Ragged": batch["f"],
    }


def targets() -> dict[str, Callable[..., Any]]:
    """Every public function, method and class that may take a tensor, by a unique name."""
    found: dict[str, Callable[..., Any]] = {}
    public = (getattr(shoal, name) for name in shoal.__all__)
    rooms = [shoal, shoal.ops, *(made for made in public if isinstance(made, types.ModuleType))]
    for room in rooms:
        for name in getattr(room, "__all__", ()):
            made = getattr(room, name)
            if (inspect.isclass(made) or inspect.isfunction(made)) and _takes_tensors(made):
                found.setdefault(f"{room.__name__}:{name}", made)
    for owner, made in owners().items():
        for name in dir(made):
            method = getattr(made, name) if not name.startswith("_") else None
            own = getattr(type(made), name, None) is not getattr(torch.nn.Module, name, None)
            if own and inspect.isroutine(method) and _takes_tensors(method):
                found[f"{owner}:{name}"] = method
    return found


def _hints(made: Callable[..., Any]) -> dict[str, Any]:
    function = made.__init__ if inspect.isclass(made) else made
    try:
        return {**typing.get_type_hints(function)}
    except (NameError, TypeError, AttributeError):
        return {}


def _mentions(hint: Any, kind: type) -> bool:
    if hint is kind or (kind in (Tensor,) and hint in (KeyedRagged, Ragged)):
        return True
    if typing.get_origin(hint) is collections.abc.Callable:
        return False
    return any(_mentions(part, kind) for part in typing.get_args(hint))


def _takes_tensors(made: Callable[..., Any]) -> bool:
    hints = _hints(made)
    hints.pop("return", None)
    function = made.__init__ if inspect.isclass(made) else made
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints.get(name)
        needed = parameter.default is parameter.empty and hint is not None and name != "self"
        if needed and not _mentions(hint, Tensor) and plain(hint) is None:
            return False  # asks for more than tensors: its own tests give it that
    return any(_mentions(hint, Tensor) for hint in hints.values())


def plain(hint: Any) -> Any:
    """Something of a type that is not a tensor's."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return args[0]
    if origin in (typing.Union, types.UnionType):
        return plain(args[0])
    if hint in (int, float, str, bool):
        return {int: 2, float: 1.0, str: "f", bool: True}[hint]
    if hint is TableSpec:
        return TableSpec(name="t", segments=(Segment(dim=2),))
    if origin is not None and isinstance(origin, type):
        if issubclass(origin, typing.Mapping):
            return {"f": plain(args[1])}
        if issubclass(origin, typing.Collection):
            return [plain(args[0])]
    return None


def shaped(hint: Any, hostile: Any) -> Any:
    """A hostile tensor as an argument of this type takes it."""
    if hint in (KeyedRagged, Ragged):
        whole = torch.tensor([1, 2, 3])
        values = hostile if isinstance(hostile, Tensor) else torch.from_numpy(hostile.copy())
        whole = values if values.numel() == 3 else whole
        cuts = torch.tensor([0, 1, 3])
        return Ragged(whole, cuts) if hint is Ragged else KeyedRagged(("f",), whole, cuts)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return shaped(next(part for part in args if _mentions(part, Tensor)), hostile)
    if origin is not None and isinstance(origin, type) and origin is not Tensor:
        if issubclass(origin, typing.Mapping):
            return {"f": shaped(args[1], hostile)}
        if origin is tuple and Ellipsis not in args:
            return tuple(shaped(part, hostile) for part in args)
        if issubclass(origin, typing.Collection):
            return [shaped(args[0], hostile)]
    return hostile


def tensors(kind: str) -> Iterator[Any]:
    """Hostile tensors of a kind: ids, offsets and rows made into it."""
    for whole in (torch.tensor([1, 2, 3]), torch.ones(3, 2), torch.tensor([0, 1, 3])):
        with contextlib.suppress(RuntimeError, TypeError):  # torch has no such tensor
            yield MAKERS[kind](whole) if kind in MAKERS else whole


def call(made: Callable[..., Any], kind: str, chosen: tuple[int, ...], pool: list[Any]) -> Any:
    """One call, each tensor argument taken from the pool."""
    hints, picks = _hints(made), itertools.cycle(chosen)
    function = made.__init__ if inspect.isclass(made) else made
    given = {}
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints.get(name)
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if name == "self" or variadic:
            continue
        if _mentions(hint, Tensor):
            given[name] = shaped(hint, pool[next(picks) % len(pool)])
        elif parameter.default is parameter.empty:
            given[name] = plain(hint)
    if kind == "in_vmap":
        name = next((n for n, value in given.items() if isinstance(value, Tensor)), None)
        if name is not None:
            wide = given.pop(name).expand(2, *given.get(name, torch.ones(())).shape, -1)
            return torch.func.vmap(lambda t: made(**given, **{name: t}))(wide)
    modes = {"in_fake": FakeTensorMode, "in_meta": lambda: torch.device("meta")}
    if kind in modes:
        with modes[kind]():
            return made(**given)
    return made(**given)


# Where torch traces instead of computing, and in modules of plain torch, its own errors are right.
TRACED = ("meta", "fake", "in_fake", "in_vmap")
TORCH = (RuntimeError, AssertionError, ValueError, IndexError)


def cases(name: str, made: Callable[..., Any], kinds: Sequence[str]) -> Iterator[str]:
    """Run every case of one function; a line for each that did not end as it should."""
    choices = ((0,), (1,), (0, 1), (1, 0), (0, 2), (1, 2), (0, 0, 1))
    for kind in kinds:
        traced = kind in TRACED or name.startswith("shoal.models")
        pool = list(tensors(kind))
        for chosen in choices if pool else ():
            error = failure(made, kind, chosen, pool)
            if error is not None and not (traced and isinstance(error, TORCH)):
                yield f"{name} {kind} {chosen}: {type(error).__name__} {str(error)[:200]!r}"


def failure(made: Callable[..., Any], kind: str, chosen: tuple[int, ...], pool: list[Any]) -> Any:
    """What one call raised that is no ShoalError."""
    try:
        call(made, kind, chosen, pool)
    except ShoalError:
        return None
    except Exception as error:  # noqa: BLE001  (the finding)
        return error
    return None


def main(kinds: str, *wanted: str) -> None:
    """Run the cases of every function in its own process; print failures."""
    chosen = KINDS if kinds == "all" else tuple(kinds.split(","))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name, made in targets().items():
        if not name.startswith(tuple(wanted)):
            continue
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            for line in cases(name, made, chosen):
                print(line, flush=True)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(f"{name}: exit {status}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *(sys.argv[2:] or [""]))
