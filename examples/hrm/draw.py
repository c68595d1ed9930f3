"""Draw how a puzzle is solved over ACT steps: python draw.py checkpoint=<run> output=solved.svg

For Sudoku data, with a checkpoint of pretrain.py. Draws the first test puzzle that the last step
solves and the first step does not, or, if there is none, the first one; `example=N` names another.
Other keys are those of config/cfg_evaluate.yaml.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hrm.drawing import INK, MUTED, PALETTE, Cell, grid, svg, text
from hrm.evaluating import make_places, opened
from hrm.ranks import joined, program
from hrm.settings import read_evaluate
from shoal.errors import ConfigError

__all__ = ["Solving", "main", "picture"]

_BLANK, _RIGHT, _WRONG = 1, PALETTE[0], PALETTE[3]
_PER_LINE = 9


@dataclass(frozen=True, eq=False)
class Solving:
    """The answers of each ACT step for one puzzle.

    Args:
        number: index of the example among the evaluated ones.
        asked_S, right_S: tokens.
        said_MS: tokens after each step.
        value_M: probability that the model gives its own answer of being right.
    """

    number: int
    asked_S: Tensor
    right_S: Tensor
    said_MS: Tensor
    value_M: Tensor

    @property
    def exact_M(self) -> Tensor:
        """After which steps the whole answer is right."""
        return (self.said_MS == self.right_S).all(1)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if not given or {"-h", "--help"} & set(given):
        print(__doc__)
        return 0

    def act() -> None:
        numbers = [one.partition("=")[2] for one in given if one.startswith("example=")]
        rest = [one for one in given if not one.startswith("example=")]
        config = read_evaluate(rest)
        make_places(config)
        with joined(config.device, config.threads) as mesh:
            learner, windows = opened(config, mesh)
            found: list[Solving] = []
            with learner.judging():
                for window in windows:
                    steps = [outputs for outputs, _ in learner.answers(window.batch)]
                    said_BMS = torch.stack([one.logits_BSV.argmax(-1).cpu() for one in steps], 1)
                    value_BM = torch.stack([one.q_halt_B.sigmoid().cpu() for one in steps], 1)
                    batch = window.batch
                    found += [
                        Solving(len(found) + k, *parts)
                        for k, parts in enumerate(
                            zip(batch.inputs_BS, batch.labels_BS, said_BMS, value_BM, strict=True)
                        )
                        if k < window.count
                    ]
        chosen = _chosen(found, numbers)
        path = Path(config.output or "solved.svg")
        path.write_text(picture(chosen))
        print(f"test example {chosen.number}, right after steps {_steps_right(chosen)}: {path}")

    return program(act)


def _steps_right(one: Solving) -> list[int]:
    return [step for step, exact in enumerate(one.exact_M.tolist(), 1) if exact]


def _chosen(found: Sequence[Solving], numbers: Sequence[str]) -> Solving:
    if numbers:
        if not numbers[-1].isdigit() or int(numbers[-1]) >= len(found):
            raise ConfigError(
                "example",
                got=numbers[-1],
                allowed=f"0..{len(found) - 1}",
                remedy="Leave it out to have one chosen.",
            )
        return found[int(numbers[-1])]
    telling = [one for one in found if one.exact_M[-1] and not one.exact_M[0]]
    return max(telling, key=lambda one: int((~one.exact_M).sum()), default=found[0])


def picture(one: Solving) -> str:
    """The puzzle and its answer after each step, as SVG.

    Raises:
        ConfigError: it is no Sudoku.
    """
    n = math.isqrt(len(one.asked_S))
    box = math.isqrt(n)
    if box**4 != len(one.asked_S):
        raise ConfigError(
            "puzzle to draw",
            got=f"{len(one.asked_S)} cells",
            allowed="a Sudoku of 4 x 4 or 9 x 9",
            remedy="Name a run on data of build_sudoku.py.",
        )
    side = 22 if n == 4 else 16
    wide, high = n * side + 22, n * side + 46
    frames = [("puzzle", "", _cells(one, one.asked_S, n))]
    for step, said_S in enumerate(one.said_MS, 1):
        wrong = int((said_S != one.right_S).sum())
        told = f"{wrong} wrong" if wrong else "solved"
        value = f"sure: {float(one.value_M[step - 1]):.0%}"
        frames.append((f"step {step}: {told}", value, _cells(one, said_S, n)))
    parts = []
    for k, (head, value, cells) in enumerate(frames):
        x, y = 16 + k % _PER_LINE * wide, 26 + k // _PER_LINE * high
        parts.append(text(x, y, head, size=11, ink=INK))
        parts.append(grid(x, y + 6, cells, side=side, box=box))
        parts.append(text(x, y + n * side + 20, value, size=10, ink=MUTED))
    lines = -(-len(frames) // _PER_LINE)
    columns = min(len(frames), _PER_LINE)
    title = "A Sudoku being solved over ACT steps"
    return svg(10 + columns * wide, 10 + lines * high, parts, title=title)


def _cells(one: Solving, said_S: Tensor, n: int) -> list[list[Cell]]:
    """Given digits bold; others blue where right, red where wrong."""
    cells = []
    for asked, right, said in zip(
        one.asked_S.tolist(), one.right_S.tolist(), said_S.tolist(), strict=True
    ):
        digit = str(said - 1) if said > _BLANK else ""
        if asked != _BLANK:
            kept = said == asked
            cells.append(Cell(digit, INK if kept else _WRONG, "#eef1f4", bold=True))
        else:
            fill = "#ffffff" if said in (right, asked) else "#fbe9ef"
            cells.append(Cell(digit, _RIGHT if said == right else _WRONG, fill))
    return [cells[row * n : row * n + n] for row in range(n)]


if __name__ == "__main__":
    sys.exit(main())
