"""Servers, clients and exports where the extra `serve` is not installed."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.errors import ConfigError

TESTS = Path(__file__).parents[2]

PACKAGES = {
    "google.protobuf": "protobuf",
    "grpc": "grpcio",
    "uvicorn": "uvicorn",
    "starlette": "starlette",
    "prometheus_client": "prometheus-client",
}
WITHOUT = f"""
import sys
for name in {[*PACKAGES, "google", "zmq", "kazoo", "scipy", "mpi4py", "confluent_kafka"]}:
    sys.modules[name] = None
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WITHOUT + code], capture_output=True, text=True)


@pytest.mark.parametrize("module", PACKAGES)
def test_a_missing_package_is_named(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "shoal.serve.packages", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    match = rf"no package {PACKAGES[module]};.*shoal\[serve\]"
    with pytest.raises(ConfigError, match=match) as caught:
        importlib.import_module("shoal.serve.packages")
    assert isinstance(caught.value, ImportError) and caught.value.name == module
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [
        "serve.client",
        "serve.loading",
        "serve.server",
        "compat.monolith.native_training.distributed_serving_ops",
    ],
)
def test_modules_that_need_one_say_so(module: str) -> None:
    done = run(f"import shoal.{module}")
    assert "MissingPackage: servers and clients of models: got no package" in done.stderr


@pytest.mark.slow
def test_backends_need_protobuf_alone() -> None:
    load = "import shoal.compat.monolith.agent_service.backends"
    assert "models: got no package protobuf" in run(load).stderr
    code = f"del sys.modules['google'], sys.modules['google.protobuf']; {load}"
    done = run(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_tests_that_need_one_are_left_out_and_others_run() -> None:
    files = [str(TESTS / "unit" / file) for file in ("serve/test_service.py", "test_ids.py")]
    code = f"import pytest; pytest.main(['--collect-only', '-qq', '-p', 'no:xdist', *{files}])"
    done = run(code)
    assert "not collected: unit/serve/test_service.py needs" in done.stdout, done.stdout
    assert "unit/test_ids.py: " in done.stdout, done.stdout


@pytest.mark.slow
def test_serve_is_refused_and_export_needs_none_of_them() -> None:
    done = run("sys.argv[1:] = ['serve', 'runs/none']; from shoal.cli import main; main()")
    assert (done.returncode, "pip install 'shoal[serve]'" in done.stderr) == (2, True), done.stderr
    assert run("import shoal.cli, shoal.serve.bundle, shoal.serve.export").returncode == 0
