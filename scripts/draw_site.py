"""Draws docs/images/site.png, the site's first page: `make docs`, then this, with Chromium."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "build" / "site" / "html" / "index.html"
PICTURE = ROOT / "docs" / "images" / "site.png"


def main() -> int:
    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if browser is None or not PAGE.exists():
        print("Needs Chromium, and the site that `make docs` builds.", file=sys.stderr)
        return 1
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1280,900"]
    command = [browser, *options, f"--screenshot={PICTURE}", PAGE.as_uri()]
    return subprocess.run(command, capture_output=True, timeout=120).returncode


if __name__ == "__main__":
    sys.exit(main())
