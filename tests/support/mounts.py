"""Real file systems for tests: small ones, and ones that become read-only."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["small_disk"]


@contextmanager
def small_disk(at: Path, size_bytes: int) -> Iterator[SmallDisk]:
    """A file system of that size at a new folder; if it cannot be mounted, skips the test with
    the reason."""
    at.mkdir()
    made = _run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(at))
    if made is not None:
        pytest.skip(f"no file system can be mounted here: {made}")
    try:
        yield SmallDisk(at)
    finally:
        if (why := _run("umount", "-l", str(at))) is not None:
            raise OSError(why)


class SmallDisk:
    """A mounted file system."""

    def __init__(self, at: Path) -> None:
        self.at = at

    def read_only(self, on: bool) -> None:
        """Whether writing is refused."""
        how = "ro" if on else "rw"
        why = _run("mount", "-o", f"remount,{how}", str(self.at))
        assert why is None, why

    def leave(self, free_bytes: int) -> None:
        """Fill it with a file `ballast` until so much is free."""
        ballast = self.at / "ballast"
        ballast.unlink(missing_ok=True)
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        with ballast.open("r+b") as file:
            file.truncate(max(0, ballast.stat().st_size - free_bytes))

    def free(self) -> None:
        """Remove the file."""
        (self.at / "ballast").unlink()


def _run(*command: str) -> str | None:
    """None on success, else the output."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except OSError as error:
        return str(error)
    said = " ".join((done.stderr or done.stdout).split())
    return None if done.returncode == 0 else said or f"exit status {done.returncode}"
