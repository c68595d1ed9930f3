"""What a pipeline asks of a batch, and the thread that reads batches ahead."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.errors import InputError
from shoal.ragged import KeyedRagged, Ragged


def moved(batch: Any, device: torch.device, *, wait: bool = False) -> Any:
    """The batch on a device, which is waited for on demand; what is there is not copied."""
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=not wait)
    return _mapped(batch, lambda part: part.to(device, non_blocking=not wait))


def pinned(batch: Any) -> Any:
    """The batch in pinned memory, from which a copy to a GPU does not block the host.

    What is on a device already stays as it is.
    """
    if hasattr(batch, "pin_memory") and not isinstance(batch, Tensor):
        return batch.pin_memory()
    return _mapped(batch, _pinned)


def emptied(batch: Any) -> Any:
    """The same batch without ids: as many examples, each with empty lists.

    What a rank without data trains on with weight 0, so that its collectives match the others'.
    """
    return _mapped(batch, lambda part: part if isinstance(part, Tensor) else _without_ids(part))


def detached(tree: Any) -> Any:
    """The same tree outside of any graph."""
    return _mapped(tree, lambda part: part.detach() if isinstance(part, Tensor) else part)


def zeroed(tree: Any) -> Any:
    """The same tree with zeros for numbers."""
    return _mapped(tree, lambda part: torch.zeros_like(part) if isinstance(part, Tensor) else part)


def hold_for(batch: Any, stream: torch.cuda.Stream) -> None:
    """Keep the memory of a batch's CUDA tensors until what `stream` was given by then is done."""
    for part in _leaves(batch):
        own = [] if isinstance(part, Tensor) else [getattr(part, one.name) for one in fields(part)]
        for tensor in (part, *own):
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                tensor.record_stream(stream)


def ids_of(batch: Any) -> KeyedRagged:
    """The one `KeyedRagged` of a batch: its `ids`, itself, or the only one it holds.

    Raises:
        InputError: none, or several.
    """
    named = getattr(batch, "ids", None)
    if isinstance(named, KeyedRagged):
        return named
    found = [part for part in _leaves(batch) if isinstance(part, KeyedRagged)]
    if len(found) != 1:
        raise InputError(
            "ids of a batch",
            got=f"{type(batch).__name__} with {len(found)} KeyedRagged",
            allowed="one",
            remedy="Say which collection reads what: ids_of=lambda batch: ...",
        )
    return found[0]


def weight_of(batch: Any) -> float:
    """What a batch's mean loss weighs: the sum of its `weights`, or its number of examples."""
    weights_B = getattr(batch, "weights", None)
    if isinstance(weights_B, Tensor):
        return float(weights_B.sum())
    labels = getattr(batch, "labels", None)
    if isinstance(labels, Tensor) and labels.dim():
        return float(labels.shape[0])
    for part in _leaves(batch):
        if isinstance(part, KeyedRagged | Ragged):
            return float(part.batch_size)
        if part.dim():
            return float(part.shape[0])
    return 1.0


def event_time_of(batch: Any) -> int:
    """When a batch happened, whole seconds: its `event_time_s`, or 0."""
    return int(getattr(batch, "event_time_s", 0))


def _leaves(tree: Any) -> Iterator[Tensor | KeyedRagged | Ragged]:
    found: list[Any] = []

    def keep(part: Any) -> Any:
        found.append(part)
        return part

    _mapped(tree, keep)
    yield from found


def _mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """A tree with its tensors and ids changed."""
    if isinstance(tree, Tensor | KeyedRagged | Ragged):
        return change(tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        parts = {f.name: getattr(tree, f.name) for f in fields(tree) if f.init}
        return replace(tree, **{k: _mapped(v, change) for k, v in parts.items()})
    if isinstance(tree, Mapping):
        return {key: _mapped(value, change) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*[_mapped(value, change) for value in tree])
    if isinstance(tree, list | tuple):
        return type(tree)(_mapped(value, change) for value in tree)
    return tree


def _pinned(part: Tensor | KeyedRagged | Ragged) -> Tensor | KeyedRagged | Ragged:
    return part if isinstance(part, Tensor) and not part.is_cpu else part.pin_memory()


def _without_ids(part: KeyedRagged | Ragged) -> KeyedRagged | Ragged:
    if isinstance(part, Ragged):
        return Ragged.from_lengths(part.values.new_empty(0), torch.zeros_like(part.lengths))
    lengths_FB = torch.zeros(len(part.keys), part.batch_size, dtype=torch.int64, device="cpu")
    weights_N = None if part.weights_N is None else part.weights_N.new_empty(0)
    # Built on the host and moved, so that the host knows its splits.
    ids_0 = torch.empty(0, dtype=torch.int64, device="cpu")
    made = KeyedRagged.from_lengths(part.keys, ids_0, lengths_FB)
    if weights_N is not None:
        made = replace(made, weights_N=weights_N.cpu())
    return made.to(part.values_N.device)


@dataclass(slots=True, eq=False)
class Reading:
    """One answer of a source, and the batch in flight.

    Args:
        index: which batch was asked for.
        found: False when the source was at its end, or failed.
        batch: the batch, on the device or on its way there.
        weight: what it weighs in a loss.
        error: what the source raised instead.
        sent: on CUDA, the event after which the batch is there.
        idle: it has no ids, and stands for the batch of a rank whose data has ended.
        fetched: on CUDA, the event after which its rows are there.
    """

    index: int
    found: bool
    batch: Any = None
    weight: float = 0.0
    error: BaseException | None = None
    sent: torch.cuda.Event | None = None
    idle: bool = False
    fetched: torch.cuda.Event | None = None


# By iterator: a thread that was told to end may still be in one that another continues with.
_TURNS: weakref.WeakValueDictionary[int, threading.Lock] = weakref.WeakValueDictionary()


class Prefetcher:
    """Reads one iterator in a thread of its own, in the order asked.

    Args:
        source: where batches come from; only the thread touches it.
        device: where they are sent; the host does not wait for the copies.
        weigh: a batch's weight, measured before it is sent.
        held_for: streams that will read the batches, on CUDA.
    """

    def __init__(
        self,
        source: Iterator[Any],
        device: torch.device,
        weigh: Callable[[Any], float],
        held_for: tuple[torch.cuda.Stream, ...] = (),
    ) -> None:
        self._asked: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Reading] = queue.SimpleQueue()
        stopped, turn = threading.Event(), _TURNS.setdefault(id(source), threading.Lock())
        # Ends the thread, after the batch it is reading; a second call does nothing. The thread
        # holds no reference to this object, so that dropping it ends the thread, too.
        self.close = weakref.finalize(self, _stop, stopped, self._asked)
        self.thread = threading.Thread(
            target=_read_ahead,
            args=(partial(_read, source, turn, device, weigh, held_for), device),
            kwargs={"asked": self._asked, "answers": self._answers, "stopped": stopped},
            name="shoal-loader",
            daemon=True,
        )
        self.thread.start()

    def ask(self, index: int) -> None:
        """Ask for the next batch."""
        self._asked.put(index)

    def take(self) -> Reading:
        """The next answer, in the order asked; waits for it."""
        return self._answers.get()


def _stop(stopped: threading.Event, asked: queue.SimpleQueue[int | None]) -> None:
    """Leave what else was asked for in the source, and end the thread."""
    stopped.set()
    asked.put(None)


def _read_ahead(
    read: Callable[[torch.cuda.Stream | None, int], Reading],
    device: torch.device,
    *,
    asked: queue.SimpleQueue[int | None],
    answers: queue.SimpleQueue[Reading],
    stopped: threading.Event,
) -> None:
    stream = None
    if device.type == "cuda":
        torch.cuda.set_device(device)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    ended = False
    while (index := asked.get()) is not None and not stopped.is_set():
        reading = Reading(index, False) if ended else read(stream, index)
        ended = not reading.found
        answers.put(reading)
        del reading  # or its batch would live until the next one


def _read(
    source: Iterator[Any],
    turn: threading.Lock,
    device: torch.device,
    weigh: Callable[[Any], float],
    held_for: tuple[torch.cuda.Stream, ...],
    stream: torch.cuda.Stream | None,
    index: int,
) -> Reading:
    try:
        with turn:
            batch = next(source)
    except StopIteration:
        return Reading(index, False)
    except BaseException as error:  # noqa: BLE001 - raised where the batch is needed
        return Reading(index, False, error=error)
    try:
        weight = weigh(batch)
        if stream is None:
            return Reading(index, True, moved(batch, device), weight)
        with torch.cuda.stream(stream):
            sent = moved(pinned(batch), device)
            for reader in held_for:
                hold_for(sent, reader)
        return Reading(index, True, sent, weight, sent=stream.record_event())
    except StopIteration as error:  # not the end of the data
        failure = RuntimeError(f"StopIteration while batch {index} was weighed or moved")
        failure.__cause__ = error
        return Reading(index, False, error=failure)
    except BaseException as error:  # noqa: BLE001 - as above
        return Reading(index, False, error=error)
