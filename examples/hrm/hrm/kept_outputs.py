"""A model's outputs for test examples, kept for inspection: HRM's `eval_save_outputs`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from hrm.carry import Batch, Outputs
from hrm.sampler import Share, TestWindow

__all__ = ["KeptOutputs", "OutputName"]

OutputName = Literal[
    "inputs",
    "labels",
    "puzzle_identifiers",
    "predictions",
    "logits",
    "q_halt_logits",
    "q_continue_logits",
]
_SOURCES: dict[str, Callable[[Batch, Outputs], Tensor]] = {
    "inputs": lambda batch, said: batch.inputs_BS,
    "labels": lambda batch, said: batch.labels_BS,
    "puzzle_identifiers": lambda batch, said: batch.puzzle_ids_B,
    "predictions": lambda batch, said: said.logits_BSV.argmax(-1).int(),
    "logits": lambda batch, said: said.logits_BSV,
    "q_halt_logits": lambda batch, said: said.q_halt_B,
    "q_continue_logits": lambda batch, said: said.q_continue_B,
}
assert set(_SOURCES) == set(get_args(OutputName))


class KeptOutputs:
    """This rank's part of an evaluation, without the blanks that fill up its last batch.

    Args:
        names: what to keep, on the CPU; "logits" of large data takes gigabytes, "predictions"
            a few bytes a cell.
        share: this rank's part of each window.
    """

    def __init__(self, names: Sequence[OutputName], share: Share) -> None:
        self._share = share
        self._parts: dict[str, list[Tensor]] = {name: [] for name in names}

    def __call__(self, window: TestWindow, outputs: Outputs) -> None:
        """Take in a window; `Learner.evaluate` calls it."""
        count = min(max(window.count - self._share.first, 0), self._share.count)
        for name, parts in self._parts.items():
            parts.append(_SOURCES[name](window.batch, outputs)[:count].cpu())

    def tensors(self) -> dict[str, Tensor]:
        """Kept outputs by name, [examples of this rank, ...], in the order of evaluation."""
        return {name: torch.cat(parts) for name, parts in self._parts.items()}

    def write(self, folder: Path, step: int) -> Path:
        """Save as `step_<step>_all_preds.<rank>`, HRM's name, with `torch.save`."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"step_{step}_all_preds.{self._share.rank}"
        torch.save(self.tensors(), path)
        return path
