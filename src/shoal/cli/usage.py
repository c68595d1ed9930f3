"""What commands end with; what `shoal` says of options that do not exist."""

from __future__ import annotations

import re
import sys
import traceback
from enum import IntEnum
from typing import Any

import typer
from typer.core import TyperGroup

from shoal.errors import ShoalError, did_you_mean


class Exit(IntEnum):
    """What a command ends with: one meaning each (docs/reference/errors.md)."""

    DONE = 0
    DIFFERENT = 1  # a check found something
    ERROR = 2
    CRASH = 3
    INTERRUPTED = 130


_TYPER = re.compile(r"Input should be a valid (integer|number).*|Value error, ", re.DOTALL)
_WORDS = {"integer": "a whole number", "number": "a number"}


class AllCommands(TyperGroup):
    """The root of the commands: words what typer says of a wrong command line."""

    def invoke(self, ctx: Any) -> Any:
        """As typer's."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            wrong: Any = error  # of typer's own click, or of click, as typer's version has it
            command = getattr(getattr(wrong, "ctx", None), "command", None)
            settings = any(one.name == "overrides" for one in getattr(command, "params", ()))
            bare = str(getattr(wrong, "option_name", "")).strip("-")  # dashes make all alike
            options = [one.strip("-") for one in getattr(wrong, "possibilities", None) or ()]
            near = did_you_mean(bare, options)
            if getattr(wrong, "option_name", None) and settings and not near:
                wrong.message += ". Settings are KEY=VALUE without dashes: data.batch_size=1024"
            elif command is not None:
                wrong.message = _TYPER.sub(lambda found: _WORDS.get(found[1], ""), wrong.message)
            raise


def run_app(app: typer.Typer) -> None:
    """Run the command that `sys.argv` has, and exit with one of `Exit`."""
    try:
        app(prog_name="shoal")
    except Exception as error:  # noqa: BLE001  (its traceback is printed)
        traceback.print_exc()
        sys.exit(Exit.ERROR if isinstance(error, ShoalError) else Exit.CRASH)
