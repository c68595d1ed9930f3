"""The `shoal` command."""

from __future__ import annotations

from shoal.cli.app import app as app
from shoal.cli.app import main as main
