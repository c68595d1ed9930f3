"""The machines that a plan is for: devices, memory, speeds; declared or measured."""

from __future__ import annotations

import json
import math
import os
import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from shoal.comm.launch_environment import detect
from shoal.errors import ConfigError, known_name

DeviceKind = Literal["cuda", "cpu"]
Curve = tuple[tuple[float, float], ...]

_SCALES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15} | {
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50
}  # fmt: skip
_QUANTITY = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*(?:([kMGTP]i?)?B(/s|/ms)?)?", re.IGNORECASE)
_LEAST_BANDWIDTH, _MOST_BANDWIDTH = 1e6, 1e15  # bytes a second: a slow disk, and no machine at all
_MOST_BYTES = 1 << 60
_DEVICE_BYTES = 80 * 10**9
_FORMAT = "shoal-topology 4"


def parse_bytes(what: str, value: object) -> int:
    """Bytes of a number or of a text such as "80GB" or "1.5TiB".

    Raises:
        ConfigError: neither, or not above zero.
    """
    amount, rate = _quantity(value)
    if rate or not 0 < amount <= _MOST_BYTES:
        allowed = "bytes, or a size such as 80GB or 1.5TiB"
        raise ConfigError(what, got=repr(value), allowed=allowed, remedy="Give memory a size.")
    return int(amount)


def parse_bandwidth(what: str, value: object) -> tuple[float, str]:
    """Bytes a second of a text such as "600GB/s", and a note on how a bare number was read.

    A bare number is bytes per millisecond, which is TorchRec's unit for these settings.

    Raises:
        ConfigError: no bandwidth, or one that no machine has.
    """
    amount, rate = _quantity(value)
    note = ""
    if not rate and isinstance(value, int | float | str) and _is_number(value):
        amount, rate = amount * 1000, "/s"
        note = f"{what}={value} was read as bytes per millisecond, {show_bandwidth(amount)}"
    if not rate or not _LEAST_BANDWIDTH <= amount <= _MOST_BANDWIDTH:
        got = repr(value) if not note else f"{value!r}, which is {amount:g} bytes a second"
        raise ConfigError(
            what,
            got=got,
            allowed="1MB/s to 1000TB/s; a number without a unit is bytes per millisecond",
            remedy="Give the unit, say 600GB/s.",
        )
    return amount, note


def show_bytes(amount: float) -> str:
    """A size for people: 1.50 GB."""
    for size, unit in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(amount) >= size:
            return f"{amount / size:.3g} {unit}"
    return f"{amount:.0f} B"


def show_bandwidth(amount: float) -> str:
    """A bandwidth for people: 600 GB/s."""
    return f"{show_bytes(amount)}/s"


def show_seconds(amount: float) -> str:
    """A time for people: 1.20 ms."""
    if amount >= 1:
        return f"{amount:.3g} s"
    return f"{amount * 1e3:.3g} ms" if amount >= 1e-3 else f"{amount * 1e6:.3g} us"


def _quantity(value: object) -> tuple[float, str]:
    """(bytes, "" or "/s"); (-1, "") of what is neither."""
    if isinstance(value, bool):
        return -1.0, ""
    if isinstance(value, int | float):
        return (float(value), "") if math.isfinite(value) else (-1.0, "")
    match = _QUANTITY.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is not None and re.search("[MGTP]i?b", match[0]):  # bits, as networks are sold by
        return -1.0, ""
    if match is None or match[1].count(".") > 1 or match[1] == ".":
        return -1.0, ""
    prefix = match[2] or ""
    prefix = prefix[:1].upper().replace("K", "k") + prefix[1:]
    prefix = "Ki" if prefix == "ki" else prefix
    amount = float(match[1]) * _SCALES[prefix]
    return amount * (1000 if match[3] == "/ms" else 1), "/s" if match[3] else ""


def _is_number(value: object) -> bool:
    try:
        return math.isfinite(float(value))  # type: ignore[arg-type]
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Speeds of one rank; bytes a second, unless the name says otherwise.

    Args:
        copy: device memory, bytes read plus bytes written.
        gather, update: (bytes of a row, bytes a second) of rows at random places, read by a lookup
            and read and written by an optimizer step, with all that a row costs besides its bytes;
            by growing width.
        repeat: what a further gradient of a stepped row takes, of the row's own step.
        host_link: between host and device.
        intra, cross: what a rank sends to ranks of its own node, and to those of others.
        intra_latency_s, cross_latency_s: seconds of a collective of no bytes.
        id_s: seconds of an owner for an id that reaches it (probe, insert).
        occurrence_s: seconds of a rank for an id of its batch in each column slice (dedup,
            pooling; sums of gradients), once forward and once backward.
        flops: operations a second of a dense layer.
        table_s: seconds of every rank for each table that its batch looks up.
        slice_s: seconds of a rank for each table slice it holds, whatever its size.
        step_s: seconds of a step that no plan changes.
        replica_s: seconds of a byte of gradients for a table that every rank holds, besides.
        reduce: values that ranks add up (all-reduce); 0: half of what the links carry.

    Raises:
        ConfigError: a speed that is not above zero, or a number that is not finite.
    """

    copy: float
    gather: Curve
    update: Curve
    host_link: float
    intra: float
    cross: float
    intra_latency_s: float
    cross_latency_s: float
    id_s: float
    occurrence_s: float
    flops: float
    slice_s: float
    repeat: float
    table_s: float = 0.0
    step_s: float = 0.0
    replica_s: float = 0.0
    reduce: float = 0.0

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            numbers = [x for pair in value for x in pair] if isinstance(value, tuple) else [value]
            least = 0.0 if one.name.endswith("_s") or one.name == "reduce" else 1e-9
            if not numbers or not all(_is_number(x) and float(x) >= least for x in numbers):
                raise ConfigError(
                    f"rate {one.name}",
                    got=repr(value),
                    allowed="finite numbers above zero",
                    remedy="Measure again with shoal plan calibrate.",
                )


def row_seconds(curve: Curve, width: float) -> float:
    """Seconds of a row of a width: linear between the widths of a curve; narrower rows take as
    long as its narrowest, wider ones have the speed of its widest."""
    k = bisect_left(curve, (width,))
    if k == len(curve):
        return width / curve[-1][1]
    high, speed = curve[k]
    if k == 0:
        return high / speed
    low, before = curve[k - 1]
    part = (width - low) / (high - low)
    return (1 - part) * low / before + part * high / speed


_GIB = float(1 << 30)
# What is assumed where nothing was measured. The two network figures are those of TorchRec.
ASSUMED: Mapping[DeviceKind, Rates] = {
    "cuda": Rates(
        copy=2.6e12,
        gather=((16, 1.3e11), (64, 5e11), (128, 9e11), (256, 1.4e12), (512, 1.8e12), (1024, 2e12)),
        update=((16, 1e11), (64, 3.5e11), (128, 6e11), (256, 1e12), (512, 1.4e12), (1024, 1.6e12)),
        host_link=5e10,
        intra=600 * _GIB,
        cross=12.5 * _GIB,
        intra_latency_s=2e-5,
        cross_latency_s=5e-5,
        id_s=1.5e-10,
        occurrence_s=2.5e-10,
        flops=1e14,
        slice_s=1e-5,
        repeat=0.25,
    ),
    "cpu": Rates(
        copy=1e10,
        gather=((16, 6e8), (64, 2e9), (256, 4e9), (1024, 6e9)),
        update=((16, 4e8), (64, 1.2e9), (256, 2.5e9), (1024, 4e9)),
        host_link=1e10,
        intra=3e9,
        cross=1e9,
        intra_latency_s=5e-5,
        cross_latency_s=2e-4,
        id_s=3e-8,
        occurrence_s=3e-8,
        flops=3e10,
        slice_s=5e-5,
        repeat=1.5,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Equal nodes of equal devices, one rank each.

    Args:
        nodes: how many.
        local_size: devices of a node.
        device: what they are.
        device_bytes: memory of a device, all of it; of a rank's share of the host where device is
            "cpu".
        host_bytes: host memory of a rank: that of the node over its ranks.
        reserve: fraction of both that plans leave free.
        rates: speeds.
        notes: where the figures come from.

    Raises:
        ConfigError: no devices, no memory, or a reserve outside 0..1.
    """

    nodes: int
    local_size: int
    device: DeviceKind = "cuda"
    device_bytes: int = _DEVICE_BYTES
    host_bytes: int = 128 * 10**9
    reserve: float = 0.15
    rates: Rates = ASSUMED["cuda"]
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for name in ("nodes", "local_size", "device_bytes", "host_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                what = {"nodes": "nodes", "local_size": "devices of a node"}.get(name, name)
                raise _bad(f"{what} of a topology", value, "1 or more", "Count what is there.")
        if self.world_size > 1 << 16:
            raise _bad("devices of a topology", self.world_size, "65536 or fewer", "Use fewer.")
        known_name("device of a topology", self.device, get_args(DeviceKind))
        number = isinstance(self.reserve, int | float) and not isinstance(self.reserve, bool)
        if not number or not 0 <= self.reserve < 1:
            raise _bad(
                "reserve of a topology (STORAGE_RESERVE_PERCENT)",
                self.reserve,
                "a fraction: 0 or more, below 1",
                "Write 15 % as 0.15.",
            )

    @property
    def world_size(self) -> int:
        """Devices, and ranks, of all nodes."""
        return self.nodes * self.local_size

    @property
    def device_capacity(self) -> float:
        """Bytes of a device that a plan may use."""
        return self.device_bytes * (1 - self.reserve)

    @property
    def host_capacity(self) -> float:
        """Bytes of a rank's host memory that a plan may use."""
        return self.host_bytes * (1 - self.reserve)

    def with_devices(self, devices: int) -> Topology:
        """The same machines, as many as are needed for this number of devices.

        Raises:
            ConfigError: not a number of whole nodes, or none.
        """
        if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
            raise _bad("devices of a topology", devices, "1 or more", "Count the devices.")
        local = min(devices, self.local_size)
        if devices % local:
            what = f"devices of nodes with {local} devices"
            raise _bad(what, devices, f"a multiple of {local}", "Plan for whole nodes.")
        return replace(self, nodes=devices // local, local_size=local)

    def check_job(self, world_size: int, local_size: int) -> None:
        """Refuse machines that are not those of a job.

        Raises:
            ConfigError: other numbers of ranks, or of ranks on a node.
        """
        if (self.world_size, self.local_size) != (world_size, local_size):
            raise _bad(
                "devices of a topology that a run uses",
                f"{self.world_size} on nodes of {self.local_size}",
                f"{world_size} on nodes of {local_size}, the ranks of the launcher",
                "Correct nodes and devices_per_node, calibrate on as many ranks, or launch so.",
            )

    def summary(self) -> str:
        """One line."""
        rates = self.rates
        return (
            f"{self.nodes} x {self.local_size} {self.device}, {show_bytes(self.device_bytes)} a "
            f"device, {show_bytes(self.host_bytes)} of host memory a rank, {self.reserve:.0%} of "
            f"both reserved, {show_bandwidth(rates.intra)} in a node, "
            f"{show_bandwidth(rates.cross)} between nodes"
        )


def from_environment(
    device: str = "cuda",
    *,
    environ: Mapping[str, str] | None = None,
    measured: str | Path | None = None,
    cached: bool = False,
) -> Topology:
    """The machines of this job: ranks of the launcher, memory of this host and its device.

    INTRA_NODE_BANDWIDTH, CROSS_NODE_BANDWIDTH and STORAGE_RESERVE_PERCENT override.

    Args:
        device: "cuda" or "cpu", with a number or without.
        environ: variables; the process's own when left out.
        measured: a file of `shoal plan calibrate`; speeds are assumed when left out.
        cached: take speeds that this machine has measured before, if `measured` is left out.

    Raises:
        ConfigError: a variable without sense, a file that is none, or nodes of different sizes.
        LaunchError: launcher variables that contradict each other.
    """
    environ = os.environ if environ is None else environ
    launch = detect(environ)
    kind = torch.device(device).type
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // launch.local_world_size
    memory: int = host
    if kind == "cuda" and torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(torch.device(device)).total_memory
    elif kind == "cuda":
        memory = _DEVICE_BYTES
    nodes, rest = divmod(launch.world_size, launch.local_world_size)
    if rest:
        raise _bad(
            "ranks of a job that is planned",
            f"{launch.world_size}, {launch.local_world_size} on this host",
            "as many on every host",
            "Start the same number on each host, or name sharding types.",
        )
    found = _with_speeds(device, nodes, launch.local_world_size, measured, cached)
    return overridden(replace(found, device_bytes=memory, host_bytes=host), environ)


def _with_speeds(
    device: str, nodes: int, local: int, measured: str | Path | None, cached: bool
) -> Topology:
    """Nodes of `local` devices with speeds that are measured, in a file or before, or assumed."""
    note = ""
    if measured is None and cached:
        measured, note = cached_speeds(device, nodes, local)
    settings = {"nodes": nodes, "devices_per_node": local, "device": torch.device(device).type}
    found = _described(settings | ({} if measured is None else {"measured": str(measured)}))
    return replace(found, notes=(*found.notes, note)) if note else found


def on_this_host(devices: int, device: str) -> Topology:
    """This number of devices like those of this host, on one node, or on nodes of 8 GPUs; with
    speeds that it has measured before.

    Raises:
        ConfigError: none, not whole nodes, or a variable without sense.
    """
    here = from_environment(device)
    local = min(devices, 8) if here.device == "cuda" else devices
    host = here.host_bytes * here.local_size // max(local, 1)
    memory = here.device_bytes if here.device == "cuda" else host
    sized = replace(here, nodes=1, local_size=max(local, 1), device_bytes=memory, host_bytes=host)
    sized = sized.with_devices(devices)
    fast = _with_speeds(device, sized.nodes, sized.local_size, None, cached=True)
    fast = replace(fast, device_bytes=memory, host_bytes=host)
    return overridden(fast, os.environ)


def overridden(topology: Topology, environ: Mapping[str, str]) -> Topology:
    """A topology with what the planner's environment variables say instead.

    Raises:
        ConfigError: a variable without sense.
    """
    rates, notes = topology.rates, list(topology.notes)
    for name, key in (("INTRA_NODE_BANDWIDTH", "intra"), ("CROSS_NODE_BANDWIDTH", "cross")):
        if environ.get(name):
            speed, note = parse_bandwidth(name, environ[name])
            rates = _with(rates, key, speed)
            notes.append(note or f"{name}={environ[name]}")
    reserve: Any = environ.get("STORAGE_RESERVE_PERCENT") or topology.reserve
    if _is_number(reserve):
        reserve = float(reserve)
    return replace(topology, rates=rates, reserve=reserve, notes=tuple(notes))


_KEYS = (
    "nodes", "devices_per_node", "device", "device_memory", "host_memory", "reserve", "measured",
    "intra_node_bandwidth", "cross_node_bandwidth", "host_link_bandwidth", "device_bandwidth",
)  # fmt: skip


def read_topology(path: str | Path) -> Topology:
    """A topology of a YAML file, or of a JSON file of `shoal plan calibrate`.

    Keys: nodes, devices_per_node, device, device_memory, host_memory (of a node), reserve,
    intra_node_bandwidth, cross_node_bandwidth, host_link_bandwidth, device_bandwidth, and measured:
    a file with speeds, relative to this one. Sizes and bandwidths have units: 80GB, 600GB/s.

    Raises:
        ConfigError: no such file, a key that is unknown, or a value without sense.
    """
    text = _read(path, "topology file")
    if str(path).endswith(".json"):
        return _described({"measured": str(path)})
    from omegaconf import OmegaConf  # brings a YAML reader, and is not needed otherwise

    try:
        settings = OmegaConf.to_container(OmegaConf.create(text), resolve=True)
    except Exception as error:  # of the YAML reader, which raises whatever it meets
        got = " ".join(str(error).split())[:200]
        remedy = "See docs/guide/planner.md."
        raise _bad(f"topology file {path}", got, "YAML: key: value", remedy) from error
    if not isinstance(settings, dict):
        raise _bad(f"topology file {path}", type(settings).__name__, "key: value pairs", "Name it.")
    return _described({str(key): value for key, value in settings.items()}, Path(path).parent)


def _described(settings: Mapping[str, Any], folder: Path = Path()) -> Topology:
    for key in settings:
        known_name("key of a topology", key, _KEYS)
    notes: list[str] = []
    base: dict[str, Any] = {}
    if settings.get("measured"):
        base = read_measured(folder / str(settings["measured"]))
        where = base.pop("fingerprint")
        line = ", ".join(map(str, where.values()))
        notes.append(f"measured: {settings['measured']} on {line}")
        if differing := _differing(where, fingerprint_of(base["device"], base["local_size"])):
            notes[-1] += f"; {NOT_HERE} ({differing})"
    kind = settings.get("device", base.get("device", "cuda"))
    known_name("device of a topology", kind, get_args(DeviceKind))
    if base and kind != base["device"]:
        remedy = "Measure there with shoal plan calibrate, or leave the file out."
        raise _bad(
            "device of measured speeds", base["device"], f"{kind}, as is planned for", remedy
        )
    rates: Rates = base.get("rates", ASSUMED[kind])
    if not base:
        notes.append(f"speeds of {kind} are assumed, not measured")
    for key, name in (
        ("intra_node_bandwidth", "intra"),
        ("cross_node_bandwidth", "cross"),
        ("host_link_bandwidth", "host_link"),
        ("device_bandwidth", "copy"),
    ):
        if key in settings:
            speed, note = parse_bandwidth(key, settings[key])
            rates = _with(rates, name, speed)
            notes += [note] if note else []
    local = settings.get("devices_per_node", base.get("local_size", 8 if kind == "cuda" else 1))
    sizes: dict[str, Any] = {k: base[k] for k in ("device_bytes", "host_bytes") if k in base}
    if "device_memory" in settings:
        sizes["device_bytes"] = parse_bytes("device_memory", settings["device_memory"])
    if "host_memory" in settings:
        whole = parse_bytes("host_memory", settings["host_memory"])
        sizes["host_bytes"] = whole // local if isinstance(local, int) and local > 0 else whole
    if kind == "cpu" and "host_bytes" in sizes:
        sizes.setdefault("device_bytes", sizes["host_bytes"])  # rows are in the host's memory
    if base and base["nodes"] * base["local_size"] == 1:
        notes.append("measured on one rank: links and collectives are assumed, not measured")
    return Topology(
        nodes=settings.get("nodes", base.get("nodes", 1)),
        local_size=local,
        device=kind,
        reserve=settings.get("reserve", 0.15),
        rates=rates,
        notes=tuple(notes),
        **sizes,
    )


def measured_text(topology: Topology, fingerprint: Mapping[str, Any]) -> str:
    """What `read_measured` reads: speeds and sizes as JSON, with what they were measured on."""
    content = {
        "format": _FORMAT,
        "fingerprint": dict(fingerprint),
        "device": topology.device,
        "nodes": topology.nodes,
        "local_size": topology.local_size,
        "device_bytes": topology.device_bytes,
        "host_bytes": topology.host_bytes,
        "rates": asdict(topology.rates),
    }
    return json.dumps(content, indent=1) + "\n"


def read_measured(path: str | Path) -> dict[str, Any]:
    """Speeds, sizes and fingerprint of a file of `shoal plan calibrate`.

    Raises:
        ConfigError: no such file, or another kind of file.
    """
    text = _read(path, "measured topology")
    try:
        content = json.loads(text)
        if (written := content.pop("format")) != _FORMAT:
            if not str(written).startswith("shoal-topology"):
                raise KeyError("format")
            what, got = f"measured topology {path}", "a file made by another version"
            remedy = "Measure again: shoal plan calibrate."
            raise _bad(what, got, f"format {_FORMAT!r}", remedy)
        curves = {"gather", "update"}
        speeds: dict[str, Any] = {
            name: tuple((float(x), float(y)) for x, y in value) if name in curves else value
            for name, value in content["rates"].items()
        }
        rates = Rates(**speeds)
        known = {"device", "nodes", "local_size", "device_bytes", "host_bytes"}
        found = {name: content[name] for name in known}
        fingerprint = {str(key): value for key, value in content["fingerprint"].items()}
        if found["device"] not in get_args(DeviceKind):
            raise ValueError(f"device {found['device']!r}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        got = f"{type(error).__name__}: {error}"
        allowed = "a file that shoal plan calibrate wrote"
        raise _bad(f"measured topology {path}", got, allowed, "Measure again.") from error
    return {**found, "rates": rates, "fingerprint": fingerprint}


NOT_HERE = "that is not this machine"


def cache_folder() -> Path:
    """Where measured speeds are kept: XDG_CACHE_HOME/shoal, or ~/.cache/shoal."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "shoal"


def cached_speeds(device: str, nodes: int, local_size: int) -> tuple[Path | None, str]:
    """What this machine measured before: for these nodes and ranks, or at least for one rank.

    Returns:
        the file, or None; and what is to be known of files that are not used.
    """
    kind = torch.device(device).type
    refused: list[str] = []
    for many, local in dict.fromkeys(((nodes, local_size), (1, local_size), (1, 1))):
        path = cache_folder() / f"topology-{many}x{local}-{kind}.json"
        if not path.is_file():
            continue
        try:
            where = read_measured(path)["fingerprint"]
            why = _differing(where, fingerprint_of(device, local))
            why = f"{NOT_HERE} ({why})" if why else ""
        except ConfigError as error:
            why = str(error)
        if not why:
            return path, "; ".join(refused)
        refused.append(f"{path} is not used: {why}; run shoal plan calibrate")
    return None, "; ".join(refused)


def _differing(measured: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """What two fingerprints have differently, but for the number of ranks; "" if nothing."""
    names = [one for one in {**measured, **here} if one != "ranks_per_node"]
    return ", ".join(
        f"{name} {measured.get(name, 'none')}, here {here.get(name, 'none')}"
        for name in names
        if measured.get(name) != here.get(name)
    )


def _with(rates: Rates, name: str, speed: float) -> Rates:
    changed: dict[str, Any] = {name: speed}
    return replace(rates, **changed)


def _read(path: str | Path, what: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, ValueError) as error:
        raise _bad(what, f"{path} ({error})", "a file that can be read", "Check it.") from None


def _bad(what: str, got: object, allowed: object, remedy: str) -> ConfigError:
    return ConfigError(what, got=got, allowed=allowed, remedy=remedy)


def fingerprint_of(device: str, local_size: int) -> dict[str, Any]:
    """What speeds depend on: processor or GPU, cores, memory, torch."""
    import platform

    names = [x for x in _cpuinfo() if x.startswith("model name")]
    processor = names[0].split(":", 1)[1].strip() if names else platform.machine()
    found: dict[str, Any] = {
        "processor": processor,
        "cores": os.cpu_count() or 0,  # of the machine: ranks are pinned before they plan
        "torch": torch.__version__,
        "ranks_per_node": local_size,
    }
    if torch.device(device).type == "cuda" and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(torch.device(device))
    return found


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
