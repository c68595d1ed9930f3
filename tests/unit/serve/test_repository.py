"""Which version of a model is served, and the change to another."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from shoal.errors import ConfigError, DataError, ServerLost, UnknownName
from shoal.serve.model import Model
from shoal.serve.repository import Repository
from support.served_models import EchoModel, OneSource


def test_a_newer_version_replaces_the_last_one() -> None:
    source = OneSource(EchoModel(version=1))
    models = Repository([source], every_s=3600)
    with models:
        first = models.get("echo")
        assert models.ready
        source.model = EchoModel(version=3)
        models._entries["echo"].refresh()
        assert models.get("echo", 3) is source.model
        assert models.get("echo") is not first
        with pytest.raises(UnknownName, match=r"version.*'1'.*allowed: 3"):
            models.get("echo", 1)
        states = [(one.version, one.state) for one in models.states("echo")]
        assert states == [(1, "END"), (3, "AVAILABLE")]
    assert source.closed


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.serve.repository.time", SimpleNamespace(monotonic=lambda: 100.0))


@pytest.mark.usefixtures("stopped_clock")
def test_a_version_that_does_not_load_leaves_the_last_one() -> None:
    class Damaged(OneSource):
        def load(self, version: int) -> Model:
            if version == 2:
                raise DataError("file", "damage", "a whole one", "Export again.")
            return super().load(version)

    source = Damaged(EchoModel(version=1))
    with Repository([source], every_s=3600) as models:
        source.model = EchoModel(version=2)
        with pytest.raises(DataError):
            models._entries["echo"].refresh()
        models._entries["echo"].refresh()  # not at once again
        assert models.get("echo").version == 1
        (first, second) = models.states("echo")
        assert (first.state, second.state) == ("AVAILABLE", "END")
        assert "damage" in second.error


def test_a_model_that_is_not_there_yet() -> None:
    with Repository([OneSource(None)], every_s=3600) as models:
        assert not models.ready
        with pytest.raises(ServerLost, match="LOADING"):
            models.get("echo")
        with pytest.raises(UnknownName, match="allowed: echo"):
            models.states("other")


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a b", "x" * 300])
def test_names_that_could_be_paths_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        Repository([OneSource(None, name)])


@pytest.mark.usefixtures("stopped_clock")
def test_a_version_that_did_not_load_is_tried_again() -> None:
    class Away(OneSource):
        away = True

        def load(self, version: int) -> Model:
            if self.away:
                raise DataError("storage", "no answer", "one", "Wait.")
            return super().load(version)

    source = Away(None)
    with Repository([source], every_s=3600) as models:
        entry = models._entries["echo"]
        source.model = EchoModel(version=2)
        pauses = []
        for _ in range(8):
            entry.again_s = 0.0
            with pytest.raises(DataError):
                entry.refresh()
            pauses.append(entry.again_s - 100)
        assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
        entry.again_s, source.away = 0.0, False
        entry.refresh()
        assert models.ready


def test_a_source_with_a_problem_is_not_ready() -> None:
    class Refused(OneSource):
        error: Exception | None = None

        def newest(self) -> int | None:
            if self.error is not None:
                raise self.error
            return super().newest()

    source = Refused(EchoModel())
    with Repository([source], every_s=3600) as models:
        assert models.ready
        source.error = ConfigError("publisher 0", "tables a", "tables b", "Give its config.")
        with pytest.raises(ConfigError):
            models._entries["echo"].refresh()
        assert not models.ready
        (state,) = models.states("echo")
        assert (state.state, "publisher 0" in state.error) == ("LOADING", True)
        source.error = None
        models._entries["echo"].refresh()
        assert models.ready
    source.error = ServerLost("rows", "none", "some", "Wait.")
    with Repository([source], every_s=3600) as models:
        assert not models.ready
