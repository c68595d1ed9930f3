"""Train HRM or TRM: python pretrain.py data_path=data/sudoku epochs=20000 eval_interval=2000 ...

On several ranks: torchrun --nproc-per-node 8 pretrain.py ... Every key is in
config/cfg_pretrain.yaml and config/arch/; `arch=trm` takes TRM's, `arch.bootstrap=false` one of
them. Rank 0's command line counts for all.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hrm.ranks import program
from hrm.running import train
from hrm.settings import CONFIG_FOLDER, read_pretrain
from shoal import comm
from shoal.config import load_synced_config

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if {"-h", "--help"} & set(given):
        print(__doc__, (CONFIG_FOLDER / "cfg_pretrain.yaml").read_text(), sep="\n")
        return 0

    def act() -> None:
        train(load_synced_config(comm.early_control(), lambda: read_pretrain(given)))

    return program(act)


if __name__ == "__main__":
    sys.exit(main())
