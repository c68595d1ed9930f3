"""The models that a process serves: which versions are there, and the change to a newer one."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Literal

from shoal.errors import ConfigError, ServerLost, ShoalError, known_name, unknown_name
from shoal.serve.loading import VersionSource
from shoal.serve.model import Model

_log = logging.getLogger(__name__)

State = Literal["UNKNOWN", "START", "LOADING", "AVAILABLE", "UNLOADING", "END"]
_NAME = re.compile(r"[-_.0-9A-Za-z]{1,200}(:[-_0-9A-Za-z]{1,100})?")
_LONGEST_PAUSE_S = 60.0  # until a version that failed is loaded again
_KEPT = 4  # versions that are gone and still listed


@dataclass(frozen=True, slots=True)
class VersionState:
    """A version of a model; error: why it did not load."""

    version: int
    state: State
    error: str = ""


class _Entry:
    """A model by name; changed by one thread, read by any."""

    def __init__(self, source: VersionSource) -> None:
        self.source = source
        self.model: Model | None = None
        self.states: tuple[VersionState, ...] = ()
        self.failed: int | None = None
        self.failures, self.again_s = 0, 0.0
        self.problem = ""

    def mark(self, version: int, state: State, error: str = "") -> None:
        others = [one for one in self.states if one.version != version]
        gone = [one for one in others if one.state == "END"][-_KEPT:]
        kept = [one for one in others if one.state != "END" or one in gone]
        self.states = tuple(sorted([*kept, VersionState(version, state, error)], key=_by_version))

    def refresh(self) -> None:
        """Serve what should be served now; who asks meanwhile gets what was there before.

        What failed is tried again, ever less often.
        """
        try:
            version = self.source.newest()
        except (ConfigError, ServerLost) as error:
            self.problem = str(error)
            raise
        self.problem = ""
        if version is None or (version == self.failed and time.monotonic() < self.again_s):
            return
        before = self.model
        if before is not None and before.version == version:
            return
        self.mark(version, "LOADING")
        try:
            model = self.source.load(version)
        except Exception as error:
            self.failures = self.failures + 1 if version == self.failed else 0
            self.failed = version
            self.again_s = time.monotonic() + min(_LONGEST_PAUSE_S, 2.0**self.failures)
            self.mark(version, "END", str(error))
            raise
        self.model, self.failed = model, None
        self.mark(version, "AVAILABLE")
        if before is not None:
            self.mark(before.version, "END")


def _by_version(state: VersionState) -> int:
    return state.version


class Repository:
    """Models by name, kept at the versions that their sources want.

    Names are only ever looked up here; none becomes part of a path.

    Args:
        sources: one a model.
        every_s: how often they are asked for a newer version.

    Raises:
        ConfigError: a name twice, or one that protocols cannot carry, or every_s not above 0.
    """

    def __init__(self, sources: Sequence[VersionSource], *, every_s: float = 1.0) -> None:
        if not every_s > 0:
            raise ConfigError("poll_s of a server", every_s, "above 0", "Set it to seconds.")
        self._entries: dict[str, _Entry] = {}
        for source in sources:
            if not _NAME.fullmatch(source.name) or source.name in self._entries:
                raise ConfigError(
                    "name of a served model",
                    got=repr(source.name),
                    allowed="one of its own: letters, digits, - _ and .",
                    remedy="Set --name.",
                )
            self._entries[source.name] = _Entry(source)
        self._every_s = every_s
        self._ending, self._closed = threading.Event(), False
        self._thread = threading.Thread(target=self._watch, name="shoal versions", daemon=True)

    def __enter__(self) -> Repository:
        """Load what is there; what is not is loaded when it comes.

        Raises:
            ShoalError: a version that is there cannot be loaded.
        """
        try:
            for entry in self._entries.values():
                self._begin(entry)
        except BaseException:
            self._close()
            raise
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._close()

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for entry in self._entries.values():
            entry.source.close()

    @property
    def names(self) -> tuple[str, ...]:
        """Of all models."""
        return tuple(self._entries)

    @property
    def ready(self) -> bool:
        """Whether every model has a version that is served, and its source no problem."""
        entries = self._entries.values()
        return all(entry.model is not None and not entry.problem for entry in entries)

    def get(self, name: str, version: int | None = None) -> Model:
        """A model to ask; version: that one, or nothing.

        Raises:
            UnknownName: no such model, or not in that version.
            ServerLost: it is not loaded yet.
        """
        model = self._entry(name).model
        if model is None:
            raise ServerLost(
                f"model {name!r}", "LOADING", "AVAILABLE", "Ask again, or ask another replica."
            )
        if version is not None and version != model.version:
            raise unknown_name(f"version of model {name!r}", str(version), [str(model.version)])
        return model

    def states(self, name: str) -> tuple[VersionState, ...]:
        """Versions of a model, oldest first.

        Raises:
            UnknownName: no such model.
        """
        entry = self._entry(name)
        problem = entry.problem
        if not problem:
            return entry.states or (VersionState(0, "START"),)
        return tuple(
            replace(one, state="LOADING", error=problem) if one.state == "AVAILABLE" else one
            for one in entry.states
        ) or (VersionState(0, "START", problem),)

    def staleness_s(self, name: str) -> float | None:
        """How old the rows' newest state is; None of rows that stay as they are."""
        return self._entry(name).source.staleness_s()

    def _entry(self, name: str) -> _Entry:
        known_name("model", name, self._entries)
        return self._entries[name]

    def _watch(self) -> None:
        while not self._ending.wait(self._every_s):
            for name, entry in self._entries.items():
                self._try(name, entry)

    @staticmethod
    def _begin(entry: _Entry) -> None:
        try:
            entry.refresh()
        except ServerLost as error:  # it may come
            _log.warning("model %s: %s", entry.source.name, error)

    @staticmethod
    def _try(name: str, entry: _Entry) -> None:
        try:
            entry.refresh()
        except ShoalError as error:
            _log.warning("model %s: %s", name, error)
        except Exception:  # noqa: BLE001  the thread must live on, whatever a version is like
            _log.exception("model %s", name)
