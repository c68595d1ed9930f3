"""What is refused before anything of a request is decoded, and what metrics count."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from shoal.errors import ConfigError, DataError, ServerLost, UnknownName
from shoal.serve.repository import Repository
from shoal.serve.service import Code, Limits, Service, message_of
from shoal.serve.tfserving import TfServing
from support.served_models import EchoModel, OneSource


def asked(
    ask: Callable[[Service], Any], limits: Limits | None = None, model: EchoModel | None = None
) -> Any:
    source = OneSource(model or EchoModel())
    with Repository([source], every_s=3600) as models, Service(models, limits=limits) as service:
        return ask(service)


def pairs(*names: str, size: int = 1) -> Iterator[tuple[str, np.ndarray]]:
    for name in names:
        yield name, np.ones(size, np.float32)


def never() -> Iterator[tuple[str, np.ndarray]]:
    raise AssertionError("decoded")


@pytest.mark.parametrize(("names", "error"), [(["x", "y"], UnknownName), (["x", "x"], DataError)])
def test_names_are_checked_before_inputs_are_decoded(
    names: Sequence[str], error: type[Exception]
) -> None:
    def ask(service: Service) -> Any:
        return service.predict(service.model("echo", None), names, never)

    with pytest.raises(error):
        asked(ask)


def test_the_rate_is_checked_before_a_request_is_parsed() -> None:
    def ask(service: Service) -> Any:
        return TfServing(service).predict(b"no message")

    with pytest.raises(ServerLost, match="a second"):
        asked(ask, Limits(requests_per_s=1e-6))


def test_elements_of_a_request_are_limited() -> None:
    def ask(service: Service, size: int) -> Any:
        model = service.model("echo", None)
        return service.predict(model, ["x"], lambda: pairs("x", size=size), size_bytes=1 << 20)

    limits = Limits(most_bytes=400)
    assert len(asked(lambda service: ask(service, 100), limits)["y"]) == 100
    with pytest.raises(DataError, match="elements"):
        asked(lambda service: ask(service, 101), limits)


def test_metrics_name_the_model_of_failures_and_count_who_left() -> None:
    def fails(service: Service) -> Any:
        service.model("echo", None)
        raise DataError("x", 1, 2, "Do.")

    def waits(service: Service) -> Any:
        model = service.model("echo", None)
        return "echo", service.predict(model, ["x"], lambda: pairs("x"))

    def ask(service: Service) -> list[tuple[str, ...]]:
        service.timed("p", lambda: fails(service))
        service.timed("p", lambda: waits(service), lambda: False)
        return sorted(service._labelled)

    assert asked(ask) == [("echo", "p", Code.CANCELLED), ("echo", "p", Code.INVALID_ARGUMENT)]


def test_a_staleness_that_is_not_known_is_not_the_last_one() -> None:
    class Followed(OneSource):
        ages = (2.5, None)

        def staleness_s(self) -> float | None:
            age, *rest = self.ages
            self.ages = (*rest, None)
            return age

    with Repository([Followed(EchoModel())], every_s=3600) as models, Service(models) as service:
        found = []
        for _ in range(2):
            service.collect()
            found.append(
                service.registry.get_sample_value("shoal_staleness_seconds", {"model": "echo"})
            )
    assert found[0] == 2.5
    assert found[1] != found[1], "not NaN"


@pytest.mark.parametrize("limits", [{"workers": 0}, {"requests_per_s": 0}, {"requests_per_s": -1}])
def test_limits_that_let_nothing_through(limits: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(limits))):
        Limits(**limits)


def test_messages_fit_a_header() -> None:
    assert len(message_of(DataError("x" * 100_000, 1, 2, "Do."))) <= 4096
