"""The per-id rule task: what an id's grids mean is known to its row only.

Each id owns a hidden permutation of colours. An example is a random grid; its answer is the grid
in the id's colours. Without the row nothing can be known, so it measures the table alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hrm.dataset import BLANK, PuzzleSet, write_split
from hrm.set_builder import SetBuilder

__all__ = ["RuleTask", "build_rule_task"]


@dataclass(frozen=True, kw_only=True)
class RuleTask:
    """Sizes of the task.

    Args:
        ids: ids with a rule each; numbered from 1.
        train_grids, test_grids: grids of each id for learning, and held out.
        side: rows and columns of a grid.
        colours: what the rules permute; token of a colour: its number plus 1.
        seed: of rules and grids.
    """

    ids: int = 1000
    train_grids: int = 8
    test_grids: int = 2
    side: int = 4
    colours: int = 6
    seed: int = 0

    @property
    def seq_len(self) -> int:
        """Cells of a grid."""
        return self.side * self.side

    def rules(self) -> NDArray[np.int64]:
        """The permutation of each id, [ids, colours]."""
        rng = np.random.default_rng([self.seed, 0])
        return rng.permuted(np.tile(np.arange(self.colours), (self.ids, 1)), axis=1)

    def examples(self, split: int, grids: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Inputs and labels of a split, [ids, grids, cells] tokens."""
        rng = np.random.default_rng([self.seed, 1 + split])
        shape = (self.ids, grids, self.seq_len)
        shown = rng.integers(self.colours, size=shape)
        answers = np.take_along_axis(self.rules(), shown.reshape(self.ids, -1), axis=1)
        return (shown + 1).astype(np.uint8), (answers.reshape(shape) + 1).astype(np.uint8)

    def set_of(self, split: int, grids: int) -> PuzzleSet:
        """A split's arrays: a group for each id, in which each grid is a puzzle of one example.

        So a batch has grids of many ids, and an epoch comes by every id once.
        """
        inputs, labels = self.examples(split, grids)
        built = SetBuilder(self.seq_len)
        for k in range(self.ids):
            built.add_puzzles([k + 1] * grids, inputs[k], labels[k])
            built.end_group()
        return built.build()


def build_rule_task(root: str, task: RuleTask) -> None:
    """Write both splits."""
    names = [BLANK, *(f"rule-{k}" for k in range(1, task.ids + 1))]
    for split, (name, grids) in enumerate((("train", task.train_grids), ("test", task.test_grids))):
        write_split(
            root,
            name,
            {"all": task.set_of(split, grids)},
            vocab_size=task.colours + 1,
            seq_len=task.seq_len,
            names=names,
        )
