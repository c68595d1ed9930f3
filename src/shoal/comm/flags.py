"""Monolith's flags of what carries its collectives, and what each choice becomes here."""

from __future__ import annotations

import difflib
import importlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from shoal.comm import launch
from shoal.comm.launch_environment import SWITCH, choice
from shoal.errors import DeviceUnavailable

_log = logging.getLogger("shoal.comm")

Backend = Literal["torch", "horovod"]
"""What carries the collectives: torch.distributed or Horovod."""
Load = Callable[[str], Any]


class Flag(NamedTuple):
    """One variable.

    Args:
        variable: its name in the environment.
        default: its value when it is not set.
        allowed: every value that it may have.
        here: what it does in Shoal.
    """

    variable: str
    default: int
    allowed: tuple[int, ...]
    here: str


_WAY = "accepted and ignored: tensors travel directly between their devices"


def _flag(*flag: Any, prefix: str = "MONOLITH_WITH_") -> Any:
    return field(default=flag[0], metadata={"prefix": prefix, "flag": flag})


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendFlags:
    """Values of the variables, each with its default: `byteps` is MONOLITH_WITH_BYTEPS."""

    horovod: int = _flag(0, SWITCH, "Horovod if it can be imported")
    optimized_horovod: int = _flag(
        0,
        SWITCH,
        "as MONOLITH_WITH_HOROVOD; gradients stay as they are, Monolith sends them as float16",
    )
    horovod_fid_g2g: int = _flag(1, SWITCH, _WAY)
    horovod_fwd_g2g: int = _flag(1, SWITCH, _WAY)
    horovod_bwd_g2g: int = _flag(1, SWITCH, _WAY)
    byteps: int = _flag(0, SWITCH, "torch.distributed instead of BytePS")
    byteps_fid: int = _flag(1, SWITCH, "accepted; ids have one transport")
    byteps_fwd: int = _flag(1, SWITCH, "accepted; rows have one transport")
    byteps_bwd: int = _flag(1, SWITCH, "accepted; gradients have one transport")
    byteps_bwd_cast: int = _flag(32, (16, 32), "16: gradients travel as float16")
    byteps_bwd_fake_cast: int = _flag(0, SWITCH, "accepted; Monolith sends zeros, to measure")
    byteps_fwd_gdr: int = _flag(
        0, SWITCH, "one GPU per process, memory fraction 0.4, NCCL over GPUDirect RDMA"
    )
    byteps_fwd_gdr_g2g: int = _flag(0, SWITCH, _WAY)
    byteps_bwd_gdr: int = _flag(0, SWITCH, "as MONOLITH_WITH_BYTEPS_FWD_GDR")
    byteps_bwd_gdr_g2g: int = _flag(0, SWITCH, _WAY)
    byteps_bcast: int = _flag(
        1, (-1, 0, 1), "-1: no run hooks at all; 1: telemetry too when all is synchronous"
    )
    byteps_allreduce: int = _flag(1, SWITCH, "0: Horovod, if it can be imported, next to BytePS")
    force_gpu_compatible: int = _flag(1, SWITCH, "1: host buffers are pinned", prefix="MONOLITH_")

    @property
    def gdr(self) -> bool:
        """Whether rows or gradients should go from GPU to GPU over GPUDirect RDMA."""
        return bool(self.byteps_fwd_gdr or self.byteps_bwd_gdr)

    @property
    def wants_horovod(self) -> bool:
        """Whether Horovod is asked for, alone or for what BytePS is not to do."""
        next_to = self.byteps and not (self.byteps_bcast and self.byteps_allreduce)
        return bool(next_to or (not self.byteps and (self.horovod or self.optimized_horovod)))

    @property
    def gradient_wire(self) -> Literal["float16"] | None:
        """How gradients should travel: as float16, or as they are (None)."""
        return "float16" if self.byteps and self.byteps_bwd_cast == 16 else None


FLAGS: Mapping[str, Flag] = {
    one.name: Flag(one.metadata["prefix"] + one.name.upper(), *one.metadata["flag"])
    for one in fields(BackendFlags)
}
"""Field of `BackendFlags` -> its variable."""

_FAMILIES = ("MONOLITH_WITH_HOROVOD", "MONOLITH_WITH_OPTIMIZED", "MONOLITH_WITH_BYTEPS")


def read_flags(environ: Mapping[str, str] | None = None) -> BackendFlags:
    """Read the variables of `FLAGS`. One that looks like them but is not there is warned about.

    Raises:
        ConfigError: a value that the variable cannot have.
    """
    environ = os.environ if environ is None else environ
    known = {flag.variable for flag in FLAGS.values()}
    for name in environ:
        if name.startswith(_FAMILIES) and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            _log.warning("%s is no known variable%s", name, f"; {near[0]} is" if near else "")
    return BackendFlags(
        **{
            field: choice(environ, flag.variable, flag.default, flag.allowed)
            for field, flag in FLAGS.items()
        }
    )


@dataclass(frozen=True, slots=True)
class Started:
    """A backend that runs: its name, and this rank among all."""

    backend: str
    rank: int
    size: int


def choose(flags: BackendFlags, *, load: Load = importlib.import_module) -> Backend:
    """Which backend the flags come to on this machine; logs it.

    Args:
        flags: what was asked for.
        load: imports a module by name; ImportError says that it is not here.
    """
    reason = "it takes the place of BytePS" if flags.byteps else "no other backend is asked for"
    if flags.wants_horovod:
        try:
            load("horovod.torch")
        except ImportError as error:
            reason = f"Horovod is asked for but does not import ({error})"
        else:
            _log.info("collectives over Horovod: asked for, and it imports")
            return "horovod"
    _log.info("collectives over torch.distributed: %s", reason)
    return "torch"


def start(
    backend: Backend, *, load: Load = importlib.import_module, device: str = "auto"
) -> Started:
    """Start a backend: `shoal.comm.init`, or Horovod's init.

    Raises:
        ImportError: Horovod is not here after all.
        DeviceUnavailable: this torch has no distributed package.
        LaunchError, CollectiveFailed: as `shoal.comm.init`.
    """
    if backend == "horovod":
        horovod = load("horovod.torch")
        horovod.init()
        return Started("horovod", int(horovod.rank()), int(horovod.size()))
    import torch.distributed as dist

    if not dist.is_available():
        raise DeviceUnavailable(
            "backend of synchronous training",
            got="a torch without torch.distributed",
            allowed="a torch built with USE_DISTRIBUTED=1",
            remedy="Install torch from its own wheels.",
        )
    mesh = launch.init(device=device)
    return Started("torch", mesh.rank, mesh.world_size)
