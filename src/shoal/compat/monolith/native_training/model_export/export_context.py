"""What Monolith's tables do while a model is exported, and what its parts are.

Weights are exported by `shoal export`; a context says which parts a model has, with which
signatures, for code that builds saved models of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from shoal.errors import ConfigError


class ExportMode(Enum):
    """NONE: tables train; STANDALONE: they are in this process; DISTRIBUTED: on served parts."""

    NONE = 0
    STANDALONE = 1
    DISTRIBUTED = 2


@dataclass(slots=True)
class SubGraph:
    """A part of a model: its signatures, (inputs, outputs) by name."""

    name: str
    signatures: dict[str, tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=dict)


class ExportContext:
    """The parts of a model that is exported.

    Args:
        with_remote_gpu: the dense part is one of its own.
        model_name: its parts are served as `model_name:ps_i`.
    """

    def __init__(self, with_remote_gpu: bool = False, *, model_name: str = "model") -> None:
        self.with_remote_gpu, self.model_name = with_remote_gpu, model_name
        self._sub_graphs: dict[str, SubGraph] = {}
        self._dense: dict[str, SubGraph] = {}

    def sub_graph(self, name: str) -> SubGraph:
        """The part of that name, made when it is first asked for."""
        return self._sub_graphs.setdefault(name, SubGraph(name))

    def dense_sub_graph(self, name: str) -> SubGraph:
        """The same of dense parts."""
        return self._dense.setdefault(name, SubGraph(name))

    @property
    def sub_graphs(self) -> dict[str, SubGraph]:
        """All parts but dense ones, by name."""
        return dict(self._sub_graphs)

    @property
    def sub_graph_num(self) -> int:
        """How many they are."""
        return len(self._sub_graphs)

    @property
    def dense_sub_graph_num(self) -> int:
        """How many dense parts there are."""
        return len(self._dense)

    def add_signature(
        self, graph: SubGraph, name: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
    ) -> None:
        """Give a part a signature.

        Raises:
            ConfigError: it has one of that name.
        """
        if name in graph.signatures:
            raise _refused(f"signature {name!r} of {graph.name}", "it again", "Merge it.")
        graph.signatures[name] = dict(inputs), dict(outputs)

    def merge_signature(
        self, graph: SubGraph, name: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
    ) -> None:
        """Add inputs and outputs to a signature, which is made where it is missing."""
        known = graph.signatures.setdefault(name, ({}, {}))
        known[0].update(inputs)
        known[1].update(outputs)

    def signatures(self, graph: SubGraph) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
        """Those of a part."""
        return dict(graph.signatures)


_current: ContextVar[tuple[ExportMode, ExportContext] | None] = ContextVar("export", default=None)


@contextmanager
def enter_export_mode(
    mode: ExportMode, export_ctx: ExportContext | None = None
) -> Iterator[ExportContext]:
    """Let tables that are made meanwhile be those of an export.

    Raises:
        ConfigError: in another export.
    """
    if _current.get() is not None:
        raise _refused("export mode", f"{mode} in another", "Leave the other one first.")
    context = ExportContext() if export_ctx is None else export_ctx
    token = _current.set((mode, context))
    try:
        yield context
    finally:
        _current.reset(token)


def get_current_export_mode() -> ExportMode:
    """NONE outside of `enter_export_mode`."""
    found = _current.get()
    return ExportMode.NONE if found is None else found[0]


def get_current_export_ctx() -> ExportContext | None:
    """None outside of `enter_export_mode`."""
    found = _current.get()
    return None if found is None else found[1]


def is_exporting() -> bool:
    """Whether tables that are made now are those of an export."""
    return get_current_export_mode() is not ExportMode.NONE


def is_exporting_standalone() -> bool:
    """Whether the mode is STANDALONE."""
    return get_current_export_mode() is ExportMode.STANDALONE


def is_exporting_distributed() -> bool:
    """Whether the mode is DISTRIBUTED."""
    return get_current_export_mode() is ExportMode.DISTRIBUTED


def _refused(what: str, got: str, remedy: str) -> ConfigError:
    return ConfigError(what, got=got, allowed="one", remedy=remedy)
