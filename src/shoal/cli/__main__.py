"""`python -m shoal.cli`."""

from __future__ import annotations

from shoal.cli.app import main

main()
