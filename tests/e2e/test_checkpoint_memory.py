"""Saving and loading take little memory beside the table, also while training changes all rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support import memory_program
from support.memory_program import ROW_BYTES

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory: Linux only"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]

ROWS = 1_500_000
EXTRA_MIB = 256
TABLE_MIB = ROWS * ROW_BYTES / (1 << 20)


def run(what: str, root: Path) -> dict[str, Any]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, memory_program.__file__, what, str(root), str(ROWS)],
        capture_output=True,
        text=True,
        env=environ,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    print(f"{what}: {found}")
    return found


def test_extra_memory_is_bounded(tmp_path: Path) -> None:
    saved = run("save", tmp_path)
    assert saved["rows"] == ROWS and TABLE_MIB > 1.5 * EXTRA_MIB
    # Rows changed so fast that their former values did not fit the memory set aside for them.
    assert saved["copied_rows"] > ROWS / 2
    assert saved["spilled_mib"] > 0
    assert saved["extra_mib"] <= EXTRA_MIB
    loaded = run("load", tmp_path)
    assert loaded["rows"] == ROWS
    assert loaded["extra_mib"] <= EXTRA_MIB
