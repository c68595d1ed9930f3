"""Evaluate a checkpoint of pretrain.py: python evaluate.py checkpoint=checkpoints/<project>/<run>

Data, model and batch size are those of the run unless a key overrides them; all keys are in
config/cfg_evaluate.yaml. Works under torchrun, with any number of ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hrm.evaluating import evaluate
from hrm.ranks import program
from hrm.settings import CONFIG_FOLDER, read_evaluate
from shoal import comm
from shoal.config import load_synced_config

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if {"-h", "--help"} & set(given):
        print(__doc__, (CONFIG_FOLDER / "cfg_evaluate.yaml").read_text(), sep="\n")
        return 0

    def act() -> None:
        evaluate(load_synced_config(comm.early_control(), lambda: read_evaluate(given)))

    return program(act)


if __name__ == "__main__":
    sys.exit(main())
