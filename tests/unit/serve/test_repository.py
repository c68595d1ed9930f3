"""Which version of a model is served, and the change to another."""

from __future__ import annotations

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
        models._entries["echo"].refresh()  # once is enough
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
