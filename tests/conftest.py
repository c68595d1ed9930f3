"""Before any test is imported: how kernels run, which asserts explain themselves, what is here.

`make test-gpu` runs on a machine with its own torch and little else; test files whose imports it
lacks are left out there, and the end of the run says which. A run that is ended before its summary
has named what failed, and what was slow, by then.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Triton decides at import whether it interprets; without a GPU it must, so this comes first.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# torch lists its constructors at the first use of a device context: before a test replaces one,
# or tests of that process that count on the "meta" device allocate for real.
with torch.device("meta"):
    torch.empty(0)

pytest.register_assert_rewrite("parity.distribution_ops", "property.ops", "support")

from support.interpreting import patch_once  # noqa: E402

if not torch.cuda.is_available():
    patch_once()

TESTS = Path(__file__).parent
# Packages that tests, or what they test, may do without on a GPU machine.
OPTIONAL = (
    "confluent_kafka", "fastapi", "fsspec", "google", "grpc", "httpx", "hydra", "hypothesis",
    "kazoo", "mpi4py", "omegaconf", "prometheus_client", "pyarrow", "pydantic", "rich",
    "schemathesis", "scipy", "simpleeval", "starlette", "tensorboard", "tritonclient", "typer",
    "uvicorn", "zmq",
)  # fmt: skip
LACKING = [name for name in OPTIONAL if importlib.util.find_spec(name) is None]

if "hypothesis" not in LACKING:
    from hypothesis import settings

    # A busy machine is no reason to fail, nor is a draw that no change had to do with: examples are
    # the same each time. `--hypothesis-profile=explore` draws others.
    settings.register_profile("shoal", deadline=None, derandomize=True)
    settings.register_profile("explore", deadline=None)
    settings.load_profile("shoal")


def imported_by(path: Path) -> Iterator[str]:
    """Modules that a file imports as it is loaded."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module or "", *(f"{node.module}.{a.name}" for a in node.names))


def missing(module: str) -> str:
    """The lacking package for want of which a module cannot be imported, or nothing."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        return package if package in LACKING else ""
    return ""


def left_out() -> dict[str, str]:
    """Test files that cannot be loaded here, or folders by their fixtures, and what they want."""
    if not LACKING:
        return {}
    paths = {path: path for path in sorted(TESTS.rglob("test_*.py"))}
    paths |= {path: path.parent for path in TESTS.rglob("*/conftest.py")}
    wants = {
        str(shown.relative_to(TESTS)): next(filter(None, map(missing, imported_by(path))), "")
        for path, shown in paths.items()
    }
    return {path: want for path, want in wants.items() if want}


LEFT_OUT = left_out()
collect_ignore = list(LEFT_OUT)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "of pytest-timeout, which is not installed")


def pytest_configure(config: pytest.Config) -> None:
    for marker in ("timeout(seconds): of pytest-timeout", "xdist_group(name): of pytest-xdist"):
        config.addinivalue_line("markers", marker)
    if os.environ.get("TEST_PROGRESS") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(config))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


class Progress:
    """Names tests that fail or take long as they do: a run that is ended has no summary."""

    LONG_S = 20.0

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.began_s = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or report.duration >= self.LONG_S:
            self.say(report, f"{report.outcome} in {report.duration:.0f} s of {report.when}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.say(report, "not collected")

    def say(self, report: pytest.TestReport | pytest.CollectReport, what: str) -> None:
        terminal = self.config.pluginmanager.getplugin("terminalreporter")
        after_s = time.monotonic() - self.began_s
        terminal.write_line(f"\n[{after_s:.0f} s] {report.nodeid}: {what}")
        if report.failed:
            terminal.write_line("\n".join(report.longreprtext.splitlines()[-12:]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for path, want in LEFT_OUT.items():
        terminalreporter.write_line(f"not collected: {path} needs {want}")
