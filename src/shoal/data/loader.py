"""Batches of a source: order, passes, ranks, read-ahead, and where to continue after a stop."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from shoal.data.batch import Batch
from shoal.data.item_tree import ItemTree
from shoal.data.samplers import Sampling, extended
from shoal.data.sources import Source
from shoal.errors import ConfigError, DataError

_LEAVE_S = 5.0  # a thread that waits for other ranks is left behind
_WAITS_S = 1.0

Shuffle = Literal["never", "replays", "always"]
Short = Literal["merge", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """In which order examples come.

    Args:
        passes: how often each example comes.
        shuffle: "never" keeps the source's order in all passes; "replays" keeps it in the first
            pass, as a live stream would have come, and shuffles later ones; "always" shuffles all.
        window: shuffle only within stretches of so many examples; None shuffles the whole.
        seed: a pass's order depends on (seed, pass) only.

    Raises:
        ConfigError: `passes` or `window` below 1, or a shuffle that does not exist.
    """

    passes: int = 1
    shuffle: Shuffle = "never"
    window: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        require("passes", self.passes, self.passes >= 1, "at least 1")
        require("window", self.window, self.window is None or self.window >= 1, "None, or 1 up")
        kinds = ("never", "replays", "always")
        require("shuffle", self.shuffle, self.shuffle in kinds, " | ".join(kinds))
        require("seed", self.seed, self.seed >= 0, "at least 0")

    def rows(self, size: int, number: int, start: int, stop: int) -> Tensor:
        """Numbers of the examples at places start..stop-1 of a pass over `size`, int64."""
        if self.shuffle == "never" or (self.shuffle == "replays" and number == 0):
            return torch.arange(start, stop, device="cpu")
        window = min(self.window or size, size)
        parts = []
        for block in range(start // window, -(-stop // window)):
            low, high = block * window, min((block + 1) * window, size)
            shuffled = _permutation(high - low, (self.seed, number, block))
            parts.append(low + shuffled[max(start - low, 0) : stop - low])
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device="cpu")


# A block serves many batches in a row, and a batch may lie across two.
@lru_cache(maxsize=4)
def _permutation(size: int, key: tuple[int, int, int]) -> Tensor:
    return torch.from_numpy(np.random.Generator(np.random.PCG64(key)).permutation(size))


@dataclass(frozen=True, slots=True)
class RankShare:
    """Which part of each batch a rank gets.

    Raises:
        ConfigError: a rank outside 0..world_size-1.
    """

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        allowed = f"0..{self.world_size - 1}"
        require("rank", self.rank, 0 <= self.rank < self.world_size, allowed)

    def of(self, start: int, stop: int) -> tuple[int, int]:
        """This rank's part of the batch start..stop-1: even, contiguous, maybe empty."""
        size = stop - start
        cut = start + size * self.rank // self.world_size
        return cut, start + size * (self.rank + 1) // self.world_size


class Loader:
    """Batches of a source.

    `batch_size` counts the examples of a step over all ranks, and every rank sees the same number
    of batches (the last ones may be empty for some), so which examples make up a step depends on
    neither the number of ranks nor where a run was stopped. The last batch of a pass may be
    short. One that has less than `least` examples is merged into the batch before it, or dropped,
    in each pass. A share that its source makes shorter than its part of `least` comes empty.

    Args:
        source: the examples; not empty.
        batch_size: examples of a batch over all ranks.
        order: passes and shuffling.
        share: this rank's part.
        prefetch: batches prepared ahead by a thread; 0 prepares each when it is asked for.
        pin_memory: give batches in pinned memory, from which a GPU takes them without the
            host waiting.
        least: examples that every batch has, over all ranks; batch normalisation takes 2.
        short: what becomes of a last batch with less.
        sampler: draws items that follow a batch's examples, by pass, place and rank; None: none.
        tree: examples become those of its nodes, drawn alike; None: there is none.
        what: the examples are, in errors.

    Attributes:
        short_examples: of the last batch of a pass that is merged or dropped; 0 if none is.
        emptied: examples so far that are left out because the rest of their share is missing.

    Raises:
        ConfigError: `batch_size` below `least`, which is at least 1, or `prefetch` below 0.
        DataError: a source of less than `least` examples.
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        *,
        order: Order | None = None,
        share: RankShare | None = None,
        prefetch: int = 2,
        pin_memory: bool = False,
        least: int = 1,
        short: Short = "merge",
        sampler: Sampling | None = None,
        tree: ItemTree | None = None,
        what: str = "examples of a source",
    ) -> None:
        require("least", least, least >= 1, "at least 1")
        require("batch_size", batch_size, batch_size >= least, f"at least {least}")
        require("prefetch", prefetch, prefetch >= 0, "at least 0")
        require("short", short, short in ("merge", "drop"), "merge | drop")
        size = len(source)
        if size < least:
            remedy = "Check the files and the split."
            raise DataError(what, size, f"at least {least}", remedy)
        self.source = source
        self.batch_size = batch_size
        self.order = order or Order()
        self.share = share or RankShare()
        self.short = short
        last = size % batch_size
        self.short_examples = last if last < least else 0
        # Where the last batch of a pass would end if none were short.
        self._stop = size - self.short_examples
        self.emptied = 0
        self._least_of_share = least // self.share.world_size
        self._prefetch = prefetch
        self._pin_memory = pin_memory
        self._sampler, self._tree = sampler, tree

    @property
    def dropped(self) -> int:
        """Examples of all passes that are left out, over all ranks."""
        return self.short_examples * self.order.passes if self.short == "drop" else 0

    @property
    def examples(self) -> int:
        """Examples of all passes that come, over all ranks; 0: of a tree's nodes, not known."""
        return 0 if self._tree else len(self.source) * self.order.passes - self.dropped

    @property
    def size(self) -> int | None:
        """Examples of a pass."""
        return len(self.source)

    @property
    def most_batches(self) -> int:
        """Batches of all passes."""
        return len(self)

    def __len__(self) -> int:
        """Batches of all passes."""
        return -(-self._stop // self.batch_size) * self.order.passes

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()

    def close(self) -> None:
        """End the sampler's connections and processes, if it has any."""
        if self._sampler is not None:
            self._sampler.close()

    def batches(self, position: int = 0) -> Generator[Batch]:
        """All batches, or those that follow a position.

        Args:
            position: `Batch.position` of the last batch that was used; 0 for the beginning.

        Raises:
            ConfigError: a position that no batch of this loader ends at.
        """
        places = self._places(position)
        batches = (self._batch(*place) for place in places)
        return ahead(batches, self._prefetch) if self._prefetch else batches

    def _places(self, position: int) -> Iterator[tuple[int, int, int]]:
        size = len(self.source)
        number, start = divmod(position, size)
        whole = size * self.order.passes
        ends_batch = start % self.batch_size == 0 and start < self._stop
        ends_batch = ends_batch and 0 <= position <= whole
        allowed = f"multiples of {self.batch_size} in a pass of {size}, up to {whole}"
        require("position", position, ends_batch, allowed)
        return self._from(number, start)

    def _from(self, number: int, start: int) -> Iterator[tuple[int, int, int]]:
        size = len(self.source)
        while number < self.order.passes:
            for low in range(start, self._stop, self.batch_size):
                stop = min(low + self.batch_size, self._stop)
                yield number, low, size if stop == self._stop else stop
            number, start = number + 1, 0

    def _batch(self, number: int, start: int, consumed: int) -> Batch:
        """A batch; after it `consumed` examples of its pass have come or are dropped."""
        size = len(self.source)
        stop = min(consumed, self._stop) if self.short == "drop" else consumed
        rows_B = self.order.rows(size, number, *self.share.of(start, stop))
        batch = self.source.take(rows_B)
        if 0 < len(batch.labels) < self._least_of_share:
            self.emptied += len(batch.labels)
            batch = self.source.take(rows_B[:0])
        key = (number, start, self.share.rank)
        if self._sampler is not None:
            batch = extended(batch, self._sampler, key)
        if self._tree is not None:
            batch = self._tree.expanded(batch, key)
        batch = replace(batch, position=number * size + consumed)
        return batch.pin_memory() if self._pin_memory else batch


def ahead(
    batches: Generator[Batch],
    depth: int,
    *,
    leave: Callable[[], None] | None = None,
    waits: Callable[[], None] | None = None,
) -> Generator[Batch]:
    """Batches made by a thread, at most `depth` ahead; its errors are raised here.

    Args:
        leave: makes the thread end, which is waited for for some seconds only; None: until it is
            done.
        waits: called about once a second while no batch comes, by who waits for it.
    """
    ready: queue.Queue[Batch | BaseException | None] = queue.Queue(maxsize=depth)
    stopped = threading.Event()

    def put(item: Batch | BaseException | None) -> bool:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def work() -> None:
        try:
            with closing(batches):
                for batch in batches:
                    if not put(batch):
                        return
            put(None)
        except BaseException as error:  # noqa: BLE001 - raised again where the batch is awaited
            put(error)

    thread = threading.Thread(target=work, name="shoal-loader", daemon=True)
    thread.start()
    try:
        while True:
            try:
                item = ready.get(timeout=None if waits is None else _WAITS_S)
            except queue.Empty:
                assert waits is not None
                waits()
                continue
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
        if leave is not None:
            leave()
        thread.join(None if leave is None else _LEAVE_S)


def require(name: str, got: object, is_fine: bool, allowed: str) -> None:
    """Check a setting of a loader.

    Raises:
        ConfigError: it is not fine.
    """
    if not is_fine:
        remedy = "Change the setting."
        raise ConfigError(f"{name} of a loader", got=got, allowed=allowed, remedy=remedy)
