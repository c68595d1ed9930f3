"""Dense parts of a checkpoint in one process: exact, by name, all or nothing."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.checkpoint.dense import DenseLoad, capture, write
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.table_match import LoadOptions
from shoal.errors import CheckpointError
from support.dense_manifest import manifest_of


class Net(nn.Module):
    def __init__(self, seed: int, hidden: int = 5) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(3, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.last = nn.Linear(hidden, 1)
        self.unused = nn.Linear(2, 2)

    def forward(self, x_BD: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.first(x_BD)).relu())
        return out


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=0.01)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> list[float]:
    made = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        x_BD = torch.randn(8, 3, generator=made)
        loss = (net(x_BD) - x_BD.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def saved(
    folder: Path, modules: dict[str, nn.Module], optimizers: dict[str, torch.optim.Optimizer]
) -> Manifest:
    captured = capture(modules, optimizers)
    files = write(captured, Storage(folder))
    return manifest_of(files, captured.modules, captured.optimizers)


def loaded(
    folder: Path,
    manifest: Manifest,
    modules: dict[str, nn.Module],
    optimizers: dict[str, torch.optim.Optimizer],
    **options: Any,
) -> None:
    load = DenseLoad(Storage(folder), manifest, modules, optimizers, LoadOptions(**options))
    load.check()
    load.read()
    load.apply()


def test_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    net = Net(0)
    optimizer = adam(net)
    train(net, optimizer, 3, seed=1)
    manifest = saved(tmp_path, {"net": net}, {"net": optimizer})
    want = train(net, optimizer, 4, seed=2)

    again = Net(9)
    other = adam(again)
    other.param_groups[0]["lr"] = 77.0
    loaded(tmp_path, manifest, {"net": again}, {"net": other})
    assert train(again, other, 4, seed=2) == want
    for key, value in net.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key


def test_the_capture_is_of_the_cut(tmp_path: Path) -> None:
    net = Net(0)
    optimizer = adam(net)
    train(net, optimizer, 2, seed=1)
    at_cut = copy.deepcopy(net.state_dict())
    steps = [float(one["step"]) for one in optimizer.state_dict()["state"].values()]
    captured = capture({"net": net}, {"net": optimizer})
    train(net, optimizer, 2, seed=2)
    files = write(captured, Storage(tmp_path))
    again = Net(9)
    other = adam(again)
    manifest = manifest_of(files, ("net",), ("net",))
    loaded(tmp_path, manifest, {"net": again}, {"net": other})
    for key, value in at_cut.items():
        assert torch.equal(value, again.state_dict()[key]), key
    assert [float(one["step"]) for one in other.state_dict()["state"].values()] == steps


def test_an_optimizer_without_state_stays_so(tmp_path: Path) -> None:
    net = Net(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    manifest = saved(tmp_path, {"net": net}, {"net": optimizer})
    assert optimizer.state_dict()["state"] == {}
    again = Net(3)
    other = torch.optim.SGD(again.parameters(), lr=0.3, momentum=0.1)
    loaded(tmp_path, manifest, {"net": again}, {"net": other})
    assert other.state_dict() == optimizer.state_dict()
    assert train(again, other, 3, seed=1) == train(net, optimizer, 3, seed=1)


def test_optimizer_state_goes_by_name_not_by_order(tmp_path: Path) -> None:
    net = Net(0)
    optimizer = adam(net)
    train(net, optimizer, 2, seed=1)
    manifest = saved(tmp_path, {"net": net}, {"net": optimizer})
    again = Net(5)
    turned = list(again.parameters())[::-1]
    other = torch.optim.Adam([{"params": turned[:3]}, {"params": turned[3:], "lr": 0.5}], lr=0.2)
    loaded(tmp_path, manifest, {"net": again}, {"net": other})
    assert [group["lr"] for group in other.param_groups] == [0.01, 0.01]
    for (name, here), (_, there) in zip(
        again.named_parameters(), net.named_parameters(), strict=True
    ):
        assert set(other.state[here]) == set(optimizer.state[there]), name
        for key, value in optimizer.state[there].items():
            assert torch.equal(other.state[here][key], value), (name, key)


def test_every_file_has_size_and_checksum(tmp_path: Path) -> None:
    manifest = saved(tmp_path, {"net": Net(0)}, {})
    paths = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert paths == [file.path for file in manifest.files]
    assert all(file.kind == "dense" and file.bytes > 0 for file in manifest.files)
    assert any(path.endswith(".metadata") for path in paths)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_damage_is_named_and_changes_nothing(tmp_path: Path, number: int, damage: str) -> None:
    net = Net(0)
    optimizer = adam(net)
    train(net, optimizer, 1, seed=1)
    manifest = saved(tmp_path, {"net": net}, {"net": optimizer})
    file = tmp_path / manifest.files[number].path
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(data if damage == "flip" else data[:-1])
    again = Net(7)
    before = copy.deepcopy(again.state_dict())
    other = adam(again)
    with pytest.raises(CheckpointError, match=file.name.replace(".", r"\.")):
        loaded(tmp_path, manifest, {"net": again}, {"net": other})
    assert not other.state
    for key, value in before.items():
        assert torch.equal(value, again.state_dict()[key])


class Calls:
    """Makes a folder where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def test_an_index_runs_no_code(tmp_path: Path) -> None:
    net = Net(0)
    manifest = saved(tmp_path, {"net": net}, {})
    data = pickle.dumps(Calls(tmp_path / "made"))
    (tmp_path / "dense" / ".metadata").write_bytes(data)
    files = tuple(
        dataclasses.replace(one, bytes=len(data), crc32=zlib.crc32(data))
        if one.path.endswith(".metadata")
        else one
        for one in manifest.files
    )
    with pytest.raises(CheckpointError, match=r"dense/\.metadata: got posix\.mkdir"):
        loaded(tmp_path, dataclasses.replace(manifest, files=files), {"net": net}, {})
    assert not (tmp_path / "made").exists()


def test_all_differences_are_listed_at_once(tmp_path: Path) -> None:
    manifest = saved(tmp_path, {"net": Net(0, hidden=5)}, {})
    with pytest.raises(CheckpointError) as caught:
        loaded(tmp_path, manifest, {"net": Net(0, hidden=6)}, {})
    text = str(caught.value)
    assert "'first.weight' of module 'net' has shape [5, 3] in it, [6, 3] in the model" in text
    assert "'last.weight'" in text and "'norm.running_mean'" in text
    assert "unused" not in text


def test_names_are_waived_one_by_one(tmp_path: Path) -> None:
    net = Net(0)
    optimizer = adam(net)
    train(net, optimizer, 1, seed=1)
    manifest = saved(tmp_path, {"net": net, "old": nn.Linear(2, 2)}, {"net": optimizer})
    again = nn.Sequential(nn.Linear(1, 1))
    fresh = Net(4)
    modules: dict[str, nn.Module] = {"net": fresh, "new": again}
    with pytest.raises(CheckpointError) as caught:
        loaded(tmp_path, manifest, modules, {"new": adam(again)})
    for part in ("module 'new'", "module 'old'", "optimizer 'new'", "optimizer 'net'"):
        assert part in str(caught.value)
    before = copy.deepcopy(again.state_dict())
    loaded(
        tmp_path,
        manifest,
        modules,
        {"new": adam(again)},
        allow_missing=frozenset({"module:new", "optimizer:new"}),
        allow_unknown=frozenset({"module:old", "optimizer:net"}),
    )
    assert torch.equal(fresh.first.weight, net.first.weight)
    assert torch.equal(again[0].weight, before["0.weight"])


def test_a_parameter_may_be_missing_by_name(tmp_path: Path) -> None:
    net = Net(0)
    optimizer = adam(net)
    train(net, optimizer, 1, seed=1)
    manifest = saved(tmp_path, {"net": net}, {"net": optimizer})
    wider = Net(8)
    wider.extra = nn.Linear(1, 1)
    other = adam(wider)
    with pytest.raises(CheckpointError, match=r"extra\.bias"):
        loaded(tmp_path, manifest, {"net": wider}, {"net": other})
    waived = frozenset(
        f"{kind}:net.extra.{part}"
        for kind in ("module", "optimizer")
        for part in ("weight", "bias")
    )
    kept = wider.extra.weight.detach().clone()
    loaded(tmp_path, manifest, {"net": wider}, {"net": other}, allow_missing=waived)
    assert torch.equal(wider.extra.weight, kept)
    assert torch.equal(wider.first.bias, net.first.bias)
    assert wider.extra.weight not in other.state
    assert torch.equal(
        other.state[wider.first.bias]["exp_avg"], optimizer.state[net.first.bias]["exp_avg"]
    )


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    with pytest.raises(CheckpointError, match="module 'net' lacks"):
        capture({"net": Net(0)}, {"net": adam(Net(1))})
    with pytest.raises(CheckpointError, match="no module of its name"):
        capture({"net": Net(0)}, {"other": adam(Net(1))})


def test_compiled_modules_have_the_same_names(tmp_path: Path) -> None:
    net = Net(0)
    manifest = saved(tmp_path, {"net": torch.compile(net, backend="eager")}, {})
    again = Net(1)
    loaded(tmp_path, manifest, {"net": again}, {})
    assert torch.equal(again.first.weight, net.first.weight)


def test_other_urls_than_local_ones() -> None:
    storage = Storage("memory://shoal-dense")
    net = Net(0)
    captured = capture({"net": net}, {})
    manifest = manifest_of(write(captured, storage), ("net",), ())
    again = Net(1)
    load = DenseLoad(storage, manifest, {"net": again}, {}, LoadOptions())
    load.check()
    load.read()
    assert not torch.equal(again.first.weight, net.first.weight)
    load.apply()
    assert torch.equal(again.first.weight, net.first.weight)
    wrong = dataclasses.replace(manifest.files[0], crc32=manifest.files[0].crc32 ^ 1)
    broken = dataclasses.replace(manifest, files=(wrong, *manifest.files[1:]))
    with pytest.raises(CheckpointError, match="checksum"):
        DenseLoad(storage, broken, {"net": again}, {}, LoadOptions()).check()
