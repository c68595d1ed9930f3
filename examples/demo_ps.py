"""The demo of parameter servers: two servers, two workers; one server is killed midway.

Both servers hold rows of the flights model and save them every two seconds. When the second one
has saved rows some times, it is killed (SIGKILL) and started again: it loads its last save, the
workers repeat what it had not answered, and training ends with the table of metrics of `make demo`.
`make demo-ps` runs it:

    python examples/demo_ps.py [--config FILE] [--out FOLDER] [--limit-s SECONDS] [KEY=VALUE ...]
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from shoal.checkpoint import CheckpointStore

SHOAL = (sys.executable, "-m", "shoal.cli")
SERVERS = WORKERS = 2
VICTIM = 1
SAVES = 4  # of the victim's rows, before it is killed


class Demo:
    """Processes that end with it, at the latest when the time is over."""

    def __init__(self, config: str, out: Path, limit_s: float, settings: Sequence[str]) -> None:
        self._config, self._out, self._settings = config, out, settings
        self._until = time.monotonic() + limit_s
        self._running: list[subprocess.Popen[bytes]] = []
        self._addresses = [f"tcp://127.0.0.1:{_free_port()}" for _ in range(SERVERS)]
        self._store = out / "servers"

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a process with its output on the terminal."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=environment)
        self._running.append(process)
        return process

    def server(self, index: int) -> subprocess.Popen[bytes]:
        """Start a server."""
        return self.start(
            *(*SHOAL, "ps", self._config, "--index", str(index), "--of", str(SERVERS)),
            *("--address", self._addresses[index], "--store", str(self._store)),
            *("--save-every-s", "2", *self._settings),
        )

    def workers(self) -> subprocess.Popen[bytes]:
        """Start the workers."""
        return self.start(
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(WORKERS), *SHOAL[1:], "train", self._config),
            *("distributed.path=ps", f"output.dir={self._out}"),
            f"distributed.servers.addresses=[{','.join(self._addresses)}]",
            # A request that a server did not answer before it died is sent again soon.
            *("distributed.servers.reply_s=10", "distributed.servers.repeats=20"),
            *self._settings,
        )

    def newest_save(self, index: int) -> tuple[int, int]:
        """Of a server: (number, rows in it); (0, 0) before the first."""
        store = CheckpointStore(self._store / f"server-{index}-of-{SERVERS}")
        newest = store.latest()
        if newest is None:
            return 0, 0
        return newest.step, sum(table.rows for table in store.manifest(newest.name).tables)

    def wait(self, what: str, reached: Callable[[], bool]) -> None:
        """Wait until something is so, and end with an error if the time is over before."""
        while not reached():
            if time.monotonic() > self._until:
                raise SystemExit(f"demo: {what} took too long (--limit-s)")
            time.sleep(0.2)

    def end(self) -> None:
        """Kill what still runs."""
        for process in self._running:
            process.terminate()  # torchrun ends its workers
        until = time.monotonic() + 30
        for process in self._running:
            while process.poll() is None and time.monotonic() < until:
                time.sleep(0.1)
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def demonstrate(demo: Demo) -> int:
    """Run it all; the exit status of the workers."""
    servers = [demo.server(index) for index in range(SERVERS)]
    workers = demo.workers()
    with_rows: set[int] = set()

    def saved() -> bool:
        if workers.poll() is not None:
            raise SystemExit("demo: the workers ended before a server could be killed")
        number, rows = demo.newest_save(VICTIM)
        with_rows.update({number} if rows else ())
        return len(with_rows) >= SAVES

    demo.wait("training", saved)
    servers[VICTIM].kill()
    servers[VICTIM].wait()
    print(f"demo: server {VICTIM} (pid {servers[VICTIM].pid}) was killed", flush=True)
    servers[VICTIM] = demo.server(VICTIM)
    demo.wait("training", lambda: workers.poll() is not None)
    for server in servers:
        server.send_signal(signal.SIGTERM)
    demo.wait("the servers' last save", lambda: all(one.poll() is not None for one in servers))
    failed = [index for index, one in enumerate(servers) if one.returncode]
    if failed:
        raise SystemExit(f"demo: servers {failed} failed")
    return int(workers.returncode)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", default="examples/flights.yaml")
    parser.add_argument("--out", type=Path, default=Path("runs/demo-ps"))
    parser.add_argument("--limit-s", type=float, default=1800.0)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_args()
    out = given.out / time.strftime("%Y%m%d-%H%M%S")
    demo = Demo(given.config, out, given.limit_s, given.settings)
    try:
        return demonstrate(demo)
    finally:
        demo.end()


if __name__ == "__main__":
    sys.exit(main())
