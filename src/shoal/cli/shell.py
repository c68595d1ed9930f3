"""What the commands share: their consoles, their arguments, and how an error looks."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer
from rich.console import Console

from shoal.cli.usage import Exit
from shoal.errors import ShoalError

_PLAIN_WIDTH = 110


def argument(metavar: str, help: str) -> Any:
    """An argument whose default, if it has one, its help says."""
    return typer.Argument(metavar=metavar, help=help, show_default=False)


def option(metavar: str, help: str, *names: str) -> Any:
    """An option of that kind, of the parameter's name or of `names`."""
    return typer.Option(*names, metavar=metavar, help=help, show_default=False)


Overrides = Annotated[
    list[str] | None,
    argument(
        "KEY=VALUE",
        "Settings to change: model.dropout=0.1, data.batch_size=1024, ~features.history.",
    ),
]
_DEBUG = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr; plain and wide enough for tables when not a terminal."""
    stream: Any = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else _PLAIN_WIDTH)


def print_line(out: Console, line: str) -> None:
    """Print a line as it is: no markup, no colours, no line breaks."""
    out.print(line, markup=False, highlight=False, soft_wrap=True)


class GivesWay:
    """A stream whose reader may leave, or whose disk may be full: what is left is dropped."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """As the stream's own."""
        return self._tried(lambda: self._stream.write(text)) or 0

    def flush(self) -> None:
        """As the stream's own."""
        self._tried(self._stream.flush)

    def _tried(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except OSError as error:
            with suppress(OSError):  # what the stream still holds goes nowhere, now and at exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            if not isinstance(error, BrokenPipeError) and self is not sys.stderr:
                console(stderr=True).print(f"output ends here, the command continues: {error}")
            return None


def wait_until(done: threading.Event) -> None:
    """Until the handler of a signal has set it, whichever thread gets the signal.

    The handler runs in this thread, so it must not meet the lock of a wait.
    """
    while not done.is_set():
        time.sleep(0.2)


class Commands(typer.Typer):
    """Commands that have --debug as their last option, and whose errors are `clean_errors`."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[..., Any]:
        """As typer's."""
        register = super().command(name, **settings)
        return lambda function: register(_with_debug(function))


def _with_debug(function: Callable[..., None]) -> Callable[..., None]:
    shape = inspect.signature(function, eval_str=True)
    last = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False)
    parameters = [*shape.parameters.values(), last.replace(annotation=_DEBUG)]

    @functools.wraps(function)
    def command(*, debug: bool, **given: Any) -> None:
        with clean_errors(debug):
            function(**given)

    # Typer reads both.
    vars(command)["__signature__"] = shape.replace(parameters=parameters)
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


@contextmanager
def one_job() -> Iterator[None]:
    """Of a command that several ranks run together: ends their process groups."""
    from shoal.comm.launch import shutdown

    yield
    shutdown()


@contextmanager
def clean_errors(debug: bool) -> Iterator[None]:
    """Print an error of ours as one message and exit with 2; with `debug`, let it through."""
    try:
        yield
    except ShoalError as error:
        if debug:
            raise
        out = console(stderr=True)
        out.print("error:", style="bold red", end=" ")
        print_line(out, str(error))
        raise typer.Exit(Exit.ERROR) from error
    except KeyboardInterrupt:
        if debug:
            raise
        console(stderr=True).print("interrupted")
        raise typer.Exit(Exit.INTERRUPTED) from None
