"""`shoal`, but training waits after its first step until so many replicas have its rows.

One that is slow is not taken for one that is away: the run ends once it has the last rows.
"""

from __future__ import annotations

import sys
import time

from shoal.cli.app import main
from shoal.sync import publisher
from shoal.train.publishing import Publishing


def wait_for(count: int) -> None:
    plain = Publishing.stepped

    def followed(self: Publishing) -> bool:
        assert self.publisher is not None
        return sum(one.version > 0 for one in self.publisher.status().replicas) >= count

    def stepped(self: Publishing) -> None:
        plain(self)
        while self.main.steps == 1 and not followed(self):
            time.sleep(0.05)

    Publishing.stepped = stepped  # type: ignore[method-assign]
    publisher._GONE_S = publisher._LISTED_S = 600.0


if __name__ == "__main__":
    wait_for(int(sys.argv.pop(1)))
    main()
