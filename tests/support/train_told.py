"""`shoal`, but on its first start rank 1 writes its pid to a file after some steps, and waits.

Before that all ranks wait for a checkpoint in the folder of the file's name, which a save during
training may write late.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from shoal.cli.app import main
from shoal.train.learner import Learner

SAVED, TOLD = 3, 5  # steps after which they wait


def tell(file: Path, *, tells: bool) -> None:
    """Wait for a checkpoint; write the process id, if it is this rank's, and wait to be killed."""
    plain = Learner.apply

    def apply(self: Learner) -> None:
        # On all ranks: what one of them waits for keeps a GPU from the rows to save.
        while self.steps == SAVED and not any(file.with_suffix("").rglob("manifest.json")):
            time.sleep(0.05)
        if tells and self.steps == TOLD:
            partial = file.with_suffix(".tmp")
            partial.write_text(str(os.getpid()))
            partial.rename(file)
            time.sleep(600)
        plain(self)

    Learner.apply = apply  # type: ignore[method-assign]


if __name__ == "__main__":
    file = Path(sys.argv.pop(1))
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        tell(file, tells=os.environ["RANK"] == "1")
    main()
