"""Which examples come when: training batches of random groups, test batches in order.

Every rank draws the whole global batch from one generator and keeps its own contiguous part, so
no example comes twice because two ranks drew it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hrm.carry import IGNORE, Batch
from hrm.dataset import PuzzleData, PuzzleSet
from shoal.errors import CheckpointError, ConfigError, DataError

__all__ = ["Share", "TestBatches", "TestWindow", "TrainSampler"]

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of each global batch.

    Raises:
        ConfigError: a global batch that ranks cannot share evenly.
    """

    global_batch: int
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.global_batch < 1 or self.global_batch % self.world_size:
            near = max(1, round(self.global_batch / self.world_size)) * self.world_size
            raise ConfigError(
                "global_batch_size",
                got=f"{self.global_batch} on {self.world_size} ranks",
                allowed=f"a multiple of {self.world_size}",
                remedy=f"Set global_batch_size={near}, or start another number of ranks.",
            )

    @property
    def count(self) -> int:
        """Examples a rank."""
        return self.global_batch // self.world_size

    @property
    def first(self) -> int:
        """Place of its first example in the global batch."""
        return self.rank * self.count


def gather(data: PuzzleData, found: PuzzleSet, examples: Index, ids: Index, size: int) -> Batch:
    """Examples of a set as a batch of `size`, filled up with blanks that have no labels."""
    meta, count = data.metadata, len(examples)
    inputs = np.full((size, meta.seq_len), meta.pad_id, dtype=np.int32)
    labels = np.full((size, meta.seq_len), IGNORE, dtype=np.int32)
    puzzle_ids = np.full(size, meta.blank_identifier_id, dtype=np.int64)
    inputs[:count], labels[:count] = found.inputs[examples], found.labels[examples]
    puzzle_ids[:count] = ids
    if meta.ignore_label_id is not None:
        labels[:count][labels[:count] == meta.ignore_label_id] = IGNORE
    return Batch(*(torch.from_numpy(array) for array in (inputs, labels, puzzle_ids)))


class TrainSampler:
    """Endless training batches; an epoch uses every group once.

    An iteration is `epochs_per_iteration` shuffled orders of the groups, one after another. A
    global batch takes the next group, one of its puzzles at random, and as many of its examples
    as still fit, without repeats. A partial batch at the end of an iteration is dropped.

    Args:
        data: one set only.
        share: this rank's part.
        seed: of all choices.
        epochs_per_iteration: epochs between two evaluations.
    """

    def __init__(
        self, data: PuzzleData, share: Share, *, seed: int = 0, epochs_per_iteration: int = 1
    ) -> None:
        if len(data.sets) != 1:
            raise DataError(
                f"training data at {data.path}",
                got=f"sets {sorted(data.sets)}",
                allowed="one set",
                remedy="Train on one set; several may be evaluated.",
            )
        self.data, self.share, self.seed = data, share, seed
        self.epochs_per_iteration = epochs_per_iteration
        self._set = next(iter(data.sets.values()))
        self._check_fill()
        self.iteration = -1
        self._begin_iteration()

    def _check_fill(self) -> None:
        if self._set.groups * self.epochs_per_iteration < 1 or not self._set.examples:
            what = f"training data at {self.data.path}"
            remedy = "Build it with more puzzles."
            raise DataError(what, got="no group", allowed="some", remedy=remedy)

    def _begin_iteration(self) -> None:
        self.iteration += 1
        self._rng = np.random.Generator(np.random.Philox(seed=self.seed + self.iteration))
        groups = self._set.groups
        orders = [self._rng.permutation(groups) for _ in range(self.epochs_per_iteration)]
        self._order, self._next = np.concatenate(orders), 0

    def next_iteration(self) -> None:
        """Leave the rest of this iteration, as where `draw` returns None."""
        self._begin_iteration()

    def draw(self) -> Batch | None:
        """This rank's part of the next global batch; None where the iteration has no full one."""
        drawn = self._draw_global()
        if drawn is None:
            return None
        part = slice(self.share.first, self.share.first + self.share.count)
        examples, ids = drawn[0][part], drawn[1][part]
        return gather(self.data, self._set, examples, ids, self.share.count)

    def _draw_global(self) -> tuple[Index, Index] | None:
        size, count = self.share.global_batch, 0
        examples = np.empty(size, dtype=np.int64)
        ids = np.empty(size, dtype=np.int64)
        while count < size:
            if self._next >= len(self._order):
                return None
            found, found_ids = self._draw_some(size - count)
            end = count + len(found)
            examples[count:end], ids[count:end] = found, found_ids
            count = end
        return examples, ids

    def _draw_some(self, room: int) -> tuple[Index, Index]:
        """Up to `room` examples of the next groups, and their ids; all groups in one go.

        All ranks draw the same examples, so the work grows with their number, and the thread
        shares the interpreter with the step: loop only over puzzles of several examples.
        """
        found = self._set
        groups = self._order[self._next : self._next + room]
        firsts, ends = found.group_indices[groups], found.group_indices[groups + 1]
        filled = np.flatnonzero(firsts < ends)
        puzzles = self._rng.integers(firsts[filled], ends[filled])
        starts = found.puzzle_indices[puzzles].astype(np.int64)
        sizes = found.puzzle_indices[puzzles + 1] - starts
        # The last one that is needed may not fit whole.
        after = np.cumsum(sizes)
        used = min(int(np.searchsorted(after, room)) + 1, len(puzzles))
        enough = used > 0 and int(after[used - 1]) >= room
        self._next += int(filled[used - 1]) + 1 if enough else len(groups)
        taken = sizes[:used].copy()
        if enough:
            taken[-1] -= after[used - 1] - room
        within = np.zeros(int(taken.sum()), dtype=np.int64)
        begins = np.cumsum(taken) - taken
        for k in np.flatnonzero(sizes[:used] > 1).tolist():
            part = slice(int(begins[k]), int(begins[k] + taken[k]))
            within[part] = self._rng.choice(int(sizes[k]), int(taken[k]), replace=False)
        examples = np.repeat(starts[:used], taken) + within
        return examples, np.repeat(found.puzzle_identifiers[puzzles[:used]], taken)

    def state_dict(self) -> dict[str, Any]:
        """Where it is; the same on all ranks, and for any number of them."""
        state = self._rng.bit_generator.state
        return {
            "seed": self.seed,
            "epochs_per_iteration": self.epochs_per_iteration,
            "global_batch": self.share.global_batch,
            "groups": self._set.groups,
            "iteration": self.iteration,
            "next": self._next,
            "generator": _plain(state),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of another sampler of the same data and settings.

        Raises:
            CheckpointError: it had other data or settings.
        """
        own = self.state_dict()
        fixed = ("seed", "epochs_per_iteration", "global_batch", "groups")
        other = [f"{name}={state.get(name)}" for name in fixed if state.get(name) != own[name]]
        if other:
            raise CheckpointError(
                "state of the sampler",
                got=", ".join(other),
                allowed=", ".join(f"{name}={own[name]}" for name in fixed),
                remedy="Resume with the data and settings that the run began with.",
            )
        self.iteration = state["iteration"] - 1
        self._begin_iteration()
        self._next = state["next"]
        self._rng.bit_generator.state = _arrays(state["generator"])


def _plain(state: Any) -> Any:
    """Numpy's generator state as plain values, which any file format takes."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state


def _arrays(state: dict[str, Any]) -> dict[str, Any]:
    inner = {key: np.array(value, dtype=np.uint64) for key, value in state["state"].items()}
    return {**state, "state": inner, "buffer": np.array(state["buffer"], dtype=np.uint64)}


@dataclass(frozen=True, eq=False)
class TestWindow:
    """One step of an evaluation on one rank.

    Args:
        set_name: which set.
        batch: this rank's part, filled up with blanks.
        count: examples of all ranks' parts that are not blanks.
    """

    __test__ = False  # not a test case, despite its name

    set_name: str
    batch: Batch
    count: int


class TestBatches:
    """All test examples in order, the same number of equal batches on every rank.

    Args:
        limit: evaluate this many examples of each set, evenly spread; None: all.
        seed: of which example of each of the `limit` parts is taken; None: the first.
    """

    __test__ = False

    def __init__(
        self,
        data: PuzzleData,
        share: Share,
        *,
        limit: int | None = None,
        seed: int | None = None,
    ) -> None:
        self.data, self.share, self.limit, self.seed = data, share, limit, seed

    def chosen(self, found: PuzzleSet) -> Index:
        """The examples of a set that are evaluated."""
        total = found.examples
        if self.limit is None or self.limit >= total:
            return np.arange(total)
        edges = np.arange(self.limit + 1) * total // self.limit
        if self.seed is None:
            return edges[:-1]
        return np.random.default_rng(self.seed).integers(edges[:-1], edges[1:])

    def __iter__(self) -> Iterator[TestWindow]:
        size, share = self.share.global_batch, self.share
        for name, found in self.data.sets.items():
            chosen = self.chosen(found)
            for start in range(0, len(chosen), size):
                window = chosen[start : start + size]
                own = window[share.first : share.first + share.count]
                batch = gather(self.data, found, own, found.ids_of(own), share.count)
                yield TestWindow(name, batch, len(window))


def pinned(batch: Batch) -> Batch:
    """The same in pinned memory."""
    pages: dict[str, Tensor] = {
        field.name: getattr(batch, field.name).pin_memory() for field in dataclasses.fields(batch)
    }
    return Batch(**pages)
