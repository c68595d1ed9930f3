"""Tensors that nobody expects, in every public function: a ShoalError or the result, no crash."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

import shoal
from shoal import (
    EmbeddingCollection,
    Feature,
    KeyedRagged,
    Segment,
    SparseOptimizer,
    Table,
    TableSpec,
    clip_grad_norm_,
    ops,
)
from shoal.address import address
from shoal.errors import DTypeError
from support.hostile_calls import MAKERS

TESTS = Path(__file__).parents[1]
PACKAGE = Path(shoal.__file__).parent
FACTORIES = {
    *("arange", "asarray", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace"),
    *("ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"),
}
# Their own default is the user's: plain modules.
ON_THE_DEFAULT_DEVICE = {"models"}
# These import the core, but what they ask goes to pyarrow or kernels, or is only compared.
OTHER_ADDRESSES = {"flat", "snapshot_rows", "row_files", "shared_memory"}


def found(kinds: str, *prefixes: str) -> list[str]:
    """What a program of hostile calls says went wrong."""
    program = [sys.executable, "-W", "ignore", "-m", "support.hostile_calls", kinds, *prefixes]
    run = subprocess.run(program, cwd=TESTS, capture_output=True, text=True, check=True)
    ends = [line for line in run.stdout.splitlines() if ": exit " in line]
    assert ends, run.stderr[-2000:]
    return [line for line in run.stdout.splitlines() if not line.endswith(": exit 0")]


@pytest.mark.slow
def test_hostile_tensors_in_tables_and_batches() -> None:
    kinds = "sparse,csr,mkldnn,quantised,meta,subclass,strided,negative,scalar,complex,empty,deep"
    assert found(kinds, "Table", "EmbeddingCollection", "KeyedRagged", "shoal:") == []


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("room", ["Table", "Embedding", "Keyed", "Ragged", "shoal:", "shoal."])
def test_hostile_tensors_everywhere(room: str) -> None:
    assert found("all", room) == []


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch: such tensors are in beta, or old
@pytest.mark.parametrize("kind", sorted(set(MAKERS) - {"negative", "subclass", "parameter"}))
def test_only_dense_cpu_tensors_have_an_address(kind: str) -> None:
    try:
        made = MAKERS[kind](torch.ones(4, 2))
    except RuntimeError:
        pytest.skip("torch has no such tensor")
    if kind in {"sparse", "csr", "mkldnn", "meta", "fake", "nested", "strided", "imaginary"}:
        with pytest.raises(DTypeError, match="allowed: dense, contiguous tensors"):
            address(made)
    elif made.is_contiguous():
        assert address(made) == made.data_ptr()


def spec(dtype: str = "float32") -> TableSpec:
    return TableSpec(name="t", segments=(Segment(dim=2),), dtype=dtype)


def run_everything(dtype: str) -> list[torch.Tensor]:
    owner = EmbeddingCollection([spec(dtype)], [Feature("f", "t", max_length=3)], seed=1)
    sparse = SparseOptimizer(owner)
    batch = KeyedRagged.from_lists({"f": [[1, 2], [3]]}, {"f": [[0.5, 1], [2]]})
    owner(batch)["f"].sum().backward()
    clip_grad_norm_([], sparse, 1.0)
    sparse.step()
    table = owner.table("t")
    table.apply([4], [[1.0, 2.0]])
    chunk = table.export()
    table.load(chunk)
    owner.eval()
    pooled = ops.segment_mean(
        torch.ones(3, 2, dtype=torch.float32, device="cpu"), batch["f"].offsets_B1
    )
    return [owner(batch)["f"], table.lookup([1, 9]), chunk.weights, chunk.state, pooled]


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_defaults_of_torch_change_nothing(dtype: str) -> None:
    want = run_everything(dtype)
    with torch.device("meta"):
        on_meta = run_everything(dtype)
    torch.set_default_dtype(torch.float64)
    try:
        doubled = run_everything(dtype)
    finally:
        torch.set_default_dtype(torch.float32)
    for got in (on_meta, doubled):
        assert all(map(torch.equal, got, want))
        assert [part.dtype for part in got] == [part.dtype for part in want]


def test_fake_tensors_are_refused_with_a_remedy() -> None:
    owner = EmbeddingCollection([spec()], [Feature("f", "t")])
    table = owner.table("t")
    with FakeTensorMode():
        for call in (lambda: table.lookup([1]), lambda: table.apply([1], [[1.0, 1.0]])):
            with pytest.raises(DTypeError, match="FakeTensorMode"):
                call()
        with pytest.raises(DTypeError, match="FakeTensorMode"):
            owner(KeyedRagged.from_lists({"f": [[1, 2], [3]]}))
    assert len(table) == 0


def test_negative_views_are_read_with_their_sign() -> None:
    table = Table(spec())
    rows = torch.complex(torch.ones(1, 2), torch.ones(1, 2)).conj().imag
    table.assign([1], rows)
    assert table.lookup([1]).tolist() == [[-1.0, -1.0]]


def calls_of(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.stem)
def test_factories_name_a_device_and_one_module_asks_for_addresses(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0]
    for call in calls_of(path):
        if not isinstance(call.func, ast.Attribute):
            continue
        owner = call.func.value
        where = f"{path.name}:{call.lineno}"
        if isinstance(owner, ast.Name) and owner.id == "torch" and call.func.attr in FACTORIES:
            named = {keyword.arg for keyword in call.keywords}
            assert "device" in named or room in ON_THE_DEFAULT_DEVICE, where
        if call.func.attr == "data_ptr" and "import _core" in path.read_text():
            assert path.stem in {"address", *OTHER_ADDRESSES}, f"{where}: use shoal.address"
