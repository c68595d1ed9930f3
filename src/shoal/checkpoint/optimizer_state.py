"""State of a torch optimizer by the names of its parameters instead of by their order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shoal.checkpoint.dense_files import DenseReader
from shoal.checkpoint.matching import LoadOptions
from shoal.errors import CheckpointError, describe

__all__ = ["OfRows", "OptimizerLoad", "optimizer_values"]

_MEMBERS = ("params", "param_names")
_REST = "rest"  # groups, what tensors there are, and values that are none


@runtime_checkable
class OfRows(Protocol):
    """A `SparseOptimizer`: its state is plain values, and rows bring their own."""

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise CheckpointError for a state that it cannot load."""


def optimizer_values(name: str, optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """State tensors as "state/<parameter>/<key>", and one plain value for all else.

    Args:
        name: of the optimizer, for messages.
        optimizer: saved as it is; nothing is stepped.
        state: the module's tensors by name.

    Raises:
        CheckpointError: a parameter that the module lacks.
    """
    if isinstance(optimizer, OfRows):
        return {_REST: optimizer.state_dict()}
    names = _names_of(name, optimizer, state)
    saved = optimizer.state_dict()
    values: dict[str, Any] = {}
    tensors: dict[str, list[str]] = {}
    others: dict[str, dict[str, Any]] = {}
    for index, own in saved["state"].items():
        parameter = names[index]
        for key, value in own.items():
            if isinstance(value, Tensor):
                values[f"state/{parameter}/{key}"] = value
                tensors.setdefault(parameter, []).append(key)
            else:
                others.setdefault(parameter, {})[key] = value
    groups = [
        {**group, "params": [names[index] for index in group["params"]]}
        for group in saved["param_groups"]
    ]
    values[_REST] = {"groups": groups, "tensors": tensors, "values": others}
    return values


class OptimizerLoad:
    """An optimizer on the way in: `read` fills tensors of its own, `apply` hands them over.

    Args:
        name, optimizer: what is filled.
        state: its module's tensors by name.
        reader: the checkpoint's dense files.
    """

    def __init__(
        self, name: str, optimizer: Optimizer, state: Mapping[str, Any], reader: DenseReader
    ) -> None:
        self._name, self._optimizer, self._reader = name, optimizer, reader
        self._state = state
        self._loaded: dict[str, Any] = {}

    def read(self, options: LoadOptions) -> list[str]:
        """Read what fits; says what does not."""
        prefix = f"optimizer/{self._name}/"
        found: dict[str, Any] = {prefix + _REST: None}
        self._reader.fill(found)
        rest = found[prefix + _REST]
        if isinstance(self._optimizer, OfRows):
            self._optimizer.check_state_dict(rest)
            self._loaded = rest
            return []
        if "groups" not in rest:
            return [f"optimizer {self._name!r} of it steps rows"]
        names = _names_of(self._name, self._optimizer, self._state)
        saved = {name: group for group in rest["groups"] for name in group["params"]}
        problems = self._compare(names, saved, options)
        known = [name for name in names if name in saved]
        places = {
            f"{prefix}state/{name}/{key}": self._place(f"{prefix}state/{name}/{key}", name)
            for name in known
            for key in rest["tensors"].get(name, ())
        }
        groups = self._groups(names, saved, problems)
        if problems:
            return problems
        self._reader.fill(places)
        state = {}
        for index, name in enumerate(names):
            if name not in saved:
                continue
            own = {k: places[f"{prefix}state/{name}/{k}"] for k in rest["tensors"].get(name, ())}
            own.update(rest["values"].get(name, {}))
            if own:
                state[index] = own
        self._loaded = {"state": state, "param_groups": groups}
        return []

    def apply(self) -> None:
        """Hand over what was read."""
        self._optimizer.load_state_dict(self._loaded)

    def _compare(
        self, names: Iterable[str], saved: Mapping[str, Any], options: LoadOptions
    ) -> list[str]:
        here, label = set(names), f"optimizer:{self._name}"
        missing = [
            f"state of {name!r} of optimizer {self._name!r} is not in it"
            for name in sorted(here - saved.keys())
            if f"{label}.{name}" not in options.allow_missing
        ]
        return missing + [
            f"{name!r} of it is unknown to optimizer {self._name!r}"
            for name in sorted(saved.keys() - here)
            if f"{label}.{name}" not in options.allow_unknown
        ]

    def _place(self, key: str, name: str) -> Tensor:
        """An empty tensor of the saved form; split over ranks where its parameter is."""
        shape, dtype = self._reader.shape(key), self._reader.dtype(key)
        assert shape is not None
        parameter = self._state[name]
        if isinstance(parameter, DTensor) and tuple(parameter.shape) == shape:
            return torch.empty_like(parameter.detach(), dtype=dtype)
        return torch.empty(shape, dtype=dtype, device="cpu")

    def _groups(
        self, names: list[str], saved: Mapping[str, Any], problems: list[str]
    ) -> list[dict[str, Any]]:
        """Groups as they are here, with the settings that their parameters were saved with."""
        groups = []
        for number, group in enumerate(self._optimizer.state_dict()["param_groups"]):
            own = [saved[names[index]] for index in group["params"] if names[index] in saved]
            settings = [{k: v for k, v in one.items() if k not in _MEMBERS} for one in own]
            # Told apart by their text: tensors among them do not compare to one bool.
            if len({repr(sorted(one.items())) for one in settings}) > 1:
                problems.append(
                    f"parameters of group {number} of optimizer {self._name!r} have several "
                    "settings in it"
                )
            groups.append({**group, **(settings[0] if settings else {})})
        return groups


def _names_of(name: str, optimizer: Optimizer, state: Mapping[str, Any]) -> list[str]:
    """Names of an optimizer's parameters, in the order in which it numbers them."""
    known: dict[int, str] = {}
    for key, value in state.items():
        known.setdefault(id(value), key)
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    strangers = [list(one.shape) for one in parameters if id(one) not in known]
    if strangers:
        raise CheckpointError(
            describe(
                f"optimizer {name!r}",
                got=f"parameters of shapes {strangers} that module {name!r} lacks",
                allowed="an optimizer of that module's parameters",
                remedy="Hand in module and optimizer under one name; tables bring the state of "
                "their own optimizers.",
            )
        )
    return [known[id(one)] for one in parameters]
