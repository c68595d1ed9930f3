"""`shoal`, but on its first start rank 1 says in a file who it is after some steps, and waits.

Before that it waits for a checkpoint in the folder of the file's name, which a job that saves
beside training may be late with.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from shoal.cli.app import main
from shoal.train.learner import Learner


def tell_at(step: int, file: Path) -> None:
    """Write the process id, once there is a checkpoint, and wait to be killed."""
    plain = Learner.apply

    def apply(self: Learner) -> None:
        if self.steps == step:
            while not any(file.with_suffix("").rglob("manifest.json")):
                time.sleep(0.05)
            partial = file.with_suffix(".tmp")
            partial.write_text(str(os.getpid()))
            partial.rename(file)
            time.sleep(600)
        plain(self)

    Learner.apply = apply  # type: ignore[method-assign]


if __name__ == "__main__":
    file = Path(sys.argv.pop(1))
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        tell_at(5, file)
    main()
