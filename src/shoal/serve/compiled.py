"""Dense modules compiled ahead of time by AOTInductor, where their numbers stay the module's."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.serve.signature import ServedTensor, dense_example

_log = logging.getLogger(__name__)

_BATCHES = (1, 3, 64)  # that are compared
_UNUSED_S = 90 * 24 * 3600  # after which a module is deleted


def cache_folder() -> Path:
    """Where compiled modules are kept: $XDG_CACHE_HOME/shoal, by default ~/.cache/shoal."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal"


class Compiler:
    """Compiles a model's dense module, once, for all its versions.

    The first model of a kind takes a minute and needs a C++ compiler. What is made is kept in the
    folder without weights, for modules of the same kind and sizes, this torch and processor.

    Args:
        folder: of this user alone, for what is in it is run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._package: Path | None = None
        self._failed = False

    def compiled(self, module: nn.Module, inputs: Sequence[ServedTensor]) -> Callable[..., Tensor]:
        """A module for batches of any size, compiled; itself, with a warning, where that fails.

        Args:
            module: in eval mode, on the CPU.
            inputs: of it, in its order.
        """
        if self._failed:
            return module
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, of its own parts
                self._package = self._package or _package(module, inputs, self._folder)
                found = _loaded(self._package, module)
                for batch in _BATCHES:
                    example = dense_example(inputs, batch)
                    torch.testing.assert_close(found(*example), module(*example))
        except Exception as error:  # noqa: BLE001  torch has many ways to refuse what a module does
            self._failed = True
            reason = f"{type(error).__name__}: {error}".strip()[:1000]
            _log.warning("the dense module is not compiled, and runs as it is: %s", reason)
            return module
        return found


def _package(module: nn.Module, inputs: Sequence[ServedTensor], folder: Path) -> Path:
    example = dense_example(inputs, 3)
    batch = torch.export.Dim("batch")
    sizes = tuple(None if one is None else {0: batch} for one in example)
    program = torch.export.export(module, example, dynamic_shapes=sizes)
    path = _private(folder) / f"dense-{_key(program, inputs)}.pt2"
    if path.exists():
        with contextlib.suppress(OSError):  # a folder that is only read
            os.utime(path)
        return path
    _compile(program, path)
    for other in folder.glob("dense-*.pt2"):
        with contextlib.suppress(FileNotFoundError):  # another process was quicker
            if time.time() - other.stat().st_mtime > _UNUSED_S:
                other.unlink()
    return path


def _loaded(package: Path, module: nn.Module) -> Callable[..., Tensor]:
    runner: Any = torch._inductor.aoti_load_package(str(package))
    weights = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    wanted = {name: weights[name].detach() for name in runner.get_constant_fqns()}
    runner.load_constants(wanted, check_full_update=True)
    return runner  # type: ignore[no-any-return]


def _compile(program: torch.export.ExportedProgram, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = str(Path(scratch) / "dense.pt2")
        # One thread: callers are as many as cores.
        options = {"cpp.threads": 1, "always_keep_tensor_constants": True}
        torch._inductor.aoti_compile_and_package(
            program, package_path=made, inductor_configs=options
        )
        os.replace(made, path)


def _key(program: torch.export.ExportedProgram, inputs: Sequence[ServedTensor]) -> str:
    weights = {name: (tuple(one.shape), one.dtype) for name, one in program.state_dict.items()}
    parts = (
        torch.__version__,
        platform.machine(),
        *_cpu_flags(),  # what is compiled uses all of them
        str(inputs),
        str(weights),
        str(program.graph),
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def _cpu_flags() -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return [torch.backends.cpu.get_cpu_capability()]
    return [line for line in lines if line.startswith(("flags", "Features"))][:1]


def _private(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder} can be written by others than this user")
    return folder
