"""Build the per-id rule task: python build_rules.py --output-dir data/rules-1k"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hrm.ranks import program
from hrm.rule_task import RuleTask, build_rule_task

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Build what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", required=True)
    sizes = RuleTask()
    for name in ("ids", "train_grids", "test_grids", "side", "colours", "seed"):
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=int, default=getattr(sizes, name))
    asked = vars(parser.parse_args(arguments))
    build_rule_task(asked.pop("output_dir"), RuleTask(**asked))


if __name__ == "__main__":
    sys.exit(program(main))
