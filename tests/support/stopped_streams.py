"""Runs on a stream that has no end: it is ended once they have trained or saved what they must."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any
from unittest import mock

from shoal.checkpoint import CheckpointStore, Manifest
from shoal.data import Batch, StreamLoader

_LIMIT_S = 200.0


@contextmanager
def stops_at(position: int) -> Iterator[None]:
    """End the stream of the run inside behind so many examples."""
    start = StreamLoader.batches

    def started(loader: StreamLoader, begins: int = 0) -> Iterator[Batch]:
        with closing(start(loader, begins)) as batches:
            for batch in batches:
                yield batch
                if batch.position >= position:
                    loader.stop()

    with mock.patch.object(StreamLoader, "batches", started):
        yield


@contextmanager
def stops_once_saved(folder: str, last: Callable[[Manifest], bool]) -> Iterator[None]:
    """End the stream of the run inside when its newest checkpoint is the last one.

    Raises:
        AssertionError: there was none such.
    """
    loaders: list[StreamLoader] = []
    start = StreamLoader.batches

    def started(loader: StreamLoader, position: int = 0) -> Any:
        loaders.append(loader)
        return start(loader, position)

    store, saved = CheckpointStore(folder), threading.Event()

    def watch() -> None:
        until_s = time.monotonic() + _LIMIT_S
        while not saved.is_set() and time.monotonic() < until_s:
            newest = store.latest()
            if newest is not None and last(store.manifest(newest.name)):
                saved.set()
            time.sleep(0.05)
        for one in loaders:
            one.stop()

    watcher = threading.Thread(target=watch)
    with mock.patch.object(StreamLoader, "batches", started):
        watcher.start()
        yield
    watcher.join(60)
    assert saved.is_set()
