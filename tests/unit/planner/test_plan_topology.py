"""Units, variables, files and measured speeds of a topology."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.errors import ConfigError, UnknownName
from shoal.planner.topology import (
    ASSUMED,
    Topology,
    fingerprint_of,
    from_environment,
    measured_text,
    on_this_host,
    overridden,
    parse_bandwidth,
    parse_bytes,
    read_measured,
    read_topology,
    show_bandwidth,
    show_bytes,
    show_seconds,
)
from support.planning import kept


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("600GB/s", 600e9),
        ("12.5GiB/s", 12.5 * 2**30),
        ("1.5 TB/s", 1.5e12),
        ("100kB/ms", 1e8),
        ("100KB/ms", 1e8),
        ("2e3MB/s", 2e9),
        ("50gb/s", 50e9),
    ],
)
def test_bandwidths_have_units(text: str, expected: float) -> None:
    assert parse_bandwidth("x", text) == (pytest.approx(expected), "")


def test_a_bare_number_is_bytes_per_millisecond_and_said() -> None:
    speed, note = parse_bandwidth("INTRA_NODE_BANDWIDTH", "644245094.4")  # TorchRec's 600 GiB/s
    assert speed == pytest.approx(600 * 2**30)
    assert "bytes per millisecond" in note and "644 GB/s" in note


@pytest.mark.parametrize(
    "bad",
    ["", "fast", "600", "-1GB/s", "0GB/s", "nan", "600GB", "1e9TB/s", "1.2.3GB/s", None, True],
)
def test_bandwidths_without_sense(bad: object) -> None:
    with pytest.raises(ConfigError, match="600GB/s"):
        parse_bandwidth("CROSS_NODE_BANDWIDTH", bad)


@pytest.mark.parametrize(("text", "size"), [("80GB", 80e9), ("1.5TiB", 1.5 * 2**40), (4096, 4096)])
def test_sizes(text: object, size: float) -> None:
    assert parse_bytes("x", text) == size


@pytest.mark.parametrize("bad", ["80GB/s", "", -1, 0, "inf", float("nan"), "1e30GB"])
def test_sizes_without_sense(bad: object) -> None:
    with pytest.raises(ConfigError):
        parse_bytes("x", bad)


def test_amounts_for_people() -> None:
    assert (show_bytes(1.5e9), show_bandwidth(2e12)) == ("1.5 GB", "2 TB/s")
    assert [show_seconds(x) for x in (2.0, 0.0125, 3e-6)] == ["2 s", "12.5 ms", "3 us"]


def test_the_environment_overrides() -> None:
    found = from_environment(
        "cpu",
        environ={
            "RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost", "INTRA_NODE_BANDWIDTH": "5GB/s",
            "CROSS_NODE_BANDWIDTH": "3000000", "STORAGE_RESERVE_PERCENT": "0.25",
        },
    )  # fmt: skip
    assert (found.nodes, found.local_size, found.device) == (2, 2, "cpu")
    assert (found.rates.intra, found.rates.cross, found.reserve) == (5e9, 3e9, 0.25)
    assert found.device_bytes == found.host_bytes
    assert any("CROSS_NODE_BANDWIDTH=3000000 was read as" in note for note in found.notes)
    assert found.device_capacity == 0.75 * found.device_bytes
    assert found.host_capacity == 0.75 * found.host_bytes


@pytest.mark.parametrize("bad", ["15", "-0.1", "1", "much"])
def test_a_reserve_is_a_fraction(bad: str) -> None:
    with pytest.raises(ConfigError, match=r"STORAGE_RESERVE_PERCENT.*0\.15"):
        overridden(Topology(nodes=1, local_size=1), {"STORAGE_RESERVE_PERCENT": bad})


def test_yaml(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "nodes: 16\ndevices_per_node: 8\ndevice_memory: 141GB\nhost_memory: 2TB\n"
        "intra_node_bandwidth: 450GB/s\ncross_node_bandwidth: 50GB/s\nreserve: 0.1\n"
    )
    found = read_topology(file)
    assert found.world_size == 128 and found.host_bytes == 250e9 and found.reserve == 0.1
    assert (found.rates.intra, found.rates.cross) == (450e9, 50e9)
    assert "not measured" in found.notes[0] and "16 x 8 cuda" in found.summary()


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("nodes: 0", "nodes of a topology"),
        ("devices_per_node: 0", "devices of a node"),
        ("nodes: true", "nodes"),
        ("nodez: 3", "nodes"),
        ("device: tpu", "tpu"),
        ("device_memory: 80", None),
        ("- 1", "key: value"),
        ("a: [", "YAML"),
        ("measured: nowhere.json", "nowhere.json"),
        ("intra_node_bandwidth: 600", "600GB/s"),
    ],
)
def test_files_without_sense(tmp_path: Path, text: str, match: str | None) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    if match is None:  # 80 bytes are few, but a size
        assert read_topology(file).device_bytes == 80
        return
    with pytest.raises(ConfigError, match=match):
        read_topology(file)
    with pytest.raises(ConfigError, match="missing"):
        read_topology(tmp_path / "missing.yaml")


def test_measured_speeds_come_back(tmp_path: Path) -> None:
    made = Topology(nodes=2, local_size=4, device="cpu", rates=ASSUMED["cpu"])
    file = tmp_path / "measured.json"
    file.write_text(measured_text(made, {"processor": "a", "cores": 2}))
    assert read_topology(file) == made
    named = tmp_path / "with.yaml"
    named.write_text("measured: measured.json\nnodes: 8\n")
    found = read_topology(named)
    assert found.nodes == 8 and found.rates == made.rates and "on a, 2" in found.notes[0]
    content = json.loads(file.read_text())
    content["rates"]["copy"] = -1
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="rate copy"):
        read_topology(file)
    file.write_text('{"format": "other"}')
    with pytest.raises(ConfigError, match="calibrate"):
        read_topology(file)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "shoal"
    folder.mkdir()
    return folder


def test_speeds_that_this_machine_measured_are_used(cache: Path) -> None:
    assert any("assumed" in note for note in from_environment("cpu", cached=True).notes)
    fast = replace(ASSUMED["cpu"], copy=123e9)
    made = Topology(nodes=1, local_size=1, device="cpu", rates=fast)
    kept(cache, made)
    found = from_environment("cpu", cached=True)
    assert found.rates == fast and "measured" in found.notes[0]
    assert from_environment("cpu").rates == ASSUMED["cpu"]
    # One rank's speeds of tables serve more ranks; those of more ranks go first.
    assert on_this_host(4, "cpu").rates == fast and on_this_host(4, "cpu").world_size == 4
    faster = replace(fast, copy=124e9)
    kept(cache, replace(made, local_size=4, rates=faster))
    assert on_this_host(4, "cpu").rates == faster and on_this_host(2, "cpu").rates == fast


def test_speeds_of_one_rank_serve_several(cache: Path) -> None:
    alone = replace(ASSUMED["cpu"], copy=123e9, slice_s=7e-5)
    file = kept(cache, Topology(nodes=1, local_size=1, device="cpu", rates=alone))
    named = cache / "cluster.yaml"
    named.write_text(f"measured: {file.name}\ndevices_per_node: 4\n")
    # One rank times slices as several ranks hold them; its links are those assumed.
    for many in (on_this_host(4, "cpu"), read_topology(named), read_topology(file).with_devices(4)):
        assert many.world_size == 4 and many.rates == alone
        assert many.notes[-1].startswith("measured on one rank: links")


def test_a_pinned_rank_finds_what_its_machine_measured(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = replace(ASSUMED["cpu"], copy=123e9)
    kept(cache, Topology(nodes=1, local_size=2, device="cpu", rates=fast))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    assert on_this_host(2, "cpu").rates == fast


def test_speeds_of_another_machine_are_never_silently_used(cache: Path) -> None:
    file = cache / "topology-1x1-cpu.json"
    made = Topology(nodes=1, local_size=1, device="cpu", rates=replace(ASSUMED["cpu"], copy=1e12))
    file.write_text(measured_text(made, {**fingerprint_of("cpu", 1), "processor": "Abacus"}))
    found = from_environment("cpu", cached=True)
    assert found.rates == ASSUMED["cpu"]
    assert "not used" in found.notes[-1] and "processor Abacus, here" in found.notes[-1]
    # A file that is named is used, and says whose it is.
    named = read_topology(file)
    assert named.rates.copy == 1e12 and "not this machine (processor Abacus" in named.notes[0]
    file.write_text("{}")
    broken = from_environment("cpu", cached=True)
    assert broken.rates == ASSUMED["cpu"] and "not used" in broken.notes[-1]


def test_speeds_of_another_kind_of_device_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    file.write_text(measured_text(Topology(nodes=1, local_size=1, device="cpu"), {}))
    with pytest.raises(ConfigError, match="device of measured speeds"):
        from_environment("cuda", environ={}, measured=file)
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "device": "tpu"}))
    with pytest.raises(ConfigError, match="tpu"):
        read_topology(file)


def test_a_run_has_the_devices_of_its_topology() -> None:
    nodes = Topology(nodes=2, local_size=4)
    nodes.check_job(8, 4)
    for ranks in ((4, 4), (8, 8), (2, 1)):
        with pytest.raises(ConfigError, match="8 on nodes of 4"):
            nodes.check_job(*ranks)


def test_other_numbers_of_devices() -> None:
    one = Topology(nodes=1, local_size=8)
    assert one.with_devices(64).nodes == 8 and one.with_devices(4).local_size == 4
    for bad in (0, 12, True):
        with pytest.raises(ConfigError):
            one.with_devices(bad)
    with pytest.raises(UnknownName):
        Topology(nodes=1, local_size=1, device="tpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("speed", ["100Gb/s", "1Tb/s"])
def test_bits_are_not_taken_for_bytes(speed: str) -> None:
    with pytest.raises(ConfigError):
        parse_bandwidth("intra_node_bandwidth", speed)


def test_rows_on_a_cpu_are_in_the_memory_of_its_host(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("device: cpu\nhost_memory: 16GB\ndevices_per_node: 2\n")
    assert read_topology(file).device_bytes == 8 * 10**9


@pytest.mark.parametrize("reserve", ["'0.1'", "[1]", "true", "1.5"])
def test_reserves_without_sense_are_refused(tmp_path: Path, reserve: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(f"reserve: {reserve}\n")
    with pytest.raises(ConfigError, match="reserve"):
        read_topology(file)


def test_speeds_of_another_version_are_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    path.write_text(json.dumps({"format": "shoal-topology", "rates": {"other": 1}}))
    with pytest.raises(ConfigError, match="made by another version"):
        read_measured(path)
