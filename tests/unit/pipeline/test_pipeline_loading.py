"""The thread that reads a source ahead: whatever the source does, it answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shoal.pipeline import batches
from shoal.pipeline.batches import Prefetcher

CPU = torch.device("cpu")


def one(_: Any) -> float:
    return 1.0


def answer(loader: Prefetcher) -> Any:
    """The next answer, or a failure instead of a hang."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(loader.take()), daemon=True)
    thread.start()
    thread.join(60)
    assert found, "no answer"
    return found[0]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("raised", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_a_source_that_ends_the_process_is_an_answer(raised: BaseException) -> None:
    def source() -> Iterator[torch.Tensor]:
        yield torch.zeros(1)
        raise raised

    loader = Prefetcher(source(), CPU, one)
    loader.ask(0)
    loader.ask(1)
    loader.ask(2)
    assert answer(loader).found
    assert answer(loader).error is raised
    assert (answer(loader).found, loader.close()) == (False, None)


def test_only_the_source_says_that_its_data_has_ended() -> None:
    def weigh(_: Any) -> float:
        raise StopIteration

    loader = Prefetcher(iter([torch.zeros(1)]), CPU, weigh)
    loader.ask(0)
    got = answer(loader)
    assert not got.found
    assert isinstance(got.error, RuntimeError)
    loader.close()


def test_a_closed_loader_leaves_the_rest_of_its_source() -> None:
    first, go = threading.Event(), threading.Event()
    read: list[int] = []

    def source() -> Iterator[torch.Tensor]:
        for number in range(5):
            read.append(number)
            if number == 0:
                first.set()
                assert go.wait(60)
            yield torch.zeros(1)

    loader = Prefetcher(source(), CPU, one)
    for index in range(4):
        loader.ask(index)
    assert first.wait(60)
    loader.close()
    go.set()
    loader.thread.join(60)
    assert not loader.thread.is_alive()
    assert read == [0]


def test_a_source_that_a_closed_loader_is_still_in_is_waited_for() -> None:
    first, go = threading.Event(), threading.Event()

    def source() -> Iterator[torch.Tensor]:
        for number in range(4):
            if number == 0:
                first.set()
                assert go.wait(10)
            yield torch.full((1,), float(number))

    batches = source()
    old = Prefetcher(batches, CPU, one)
    old.ask(0)
    assert first.wait(10)
    old.close()
    new = Prefetcher(batches, CPU, one)
    new.ask(0)
    new.ask(1)
    new.thread.join(0.2)  # time to be in the source, too
    go.set()
    assert [answer(new).batch.item() for _ in range(2)] == [1.0, 2.0]
    new.close()


def test_what_is_on_a_device_is_not_pinned() -> None:
    there = {"dense": torch.empty(3, device="meta")}
    assert batches.pinned(there)["dense"] is there["dense"]
