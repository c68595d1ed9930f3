"""The page of operations names all of them; each of Monolith's is public and has its pairs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from shoal import ops

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "reference" / "ops.md").read_text()
PAIRS = ROOT / "tests" / "parity" / "distribution_ops"
MONOLITH = [
    "aligned_flat_concat",
    "aligned_flat_split",
    "fill_with_offset_map",
    "finalize_shared_tensor",
    "fused_embedding_to_layout",
    "fused_embedding_to_layout_grad",
    "fused_gather_embeddings_by_input",
    "fused_gather_embeddings_by_input_gradient",
    "fused_reduce_and_split_gpu",
    "fused_reduce_sum_and_split",
    "fused_reorder_by_indices",
    "fused_sorted_segment_sum",
    "fused_value_rowids",
    "gather_embeddings_by_ids_gradient_back_prop",
    "gather_embeddings_by_input",
    "map_id_to_embedding",
    "map_id_to_embedding_gradient_back_prop",
    "normalize_merged_split",
    "ragged_split_by_indices",
    "reduce_mean",
    "reduce_sqrtn",
    "reduce_sum",
    "reorder_by_indices",
    "split_by_indices",
    "unique_key_with_value_and_offset",
]


def pair_tests() -> list[str]:
    trees = [ast.parse(path.read_text()) for path in PAIRS.glob("*.py")]
    names = [node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [name for name in names if re.fullmatch(r"test_\w+_pair(_\w+)?", name)]


@pytest.mark.parametrize("name", ops.__all__)
def test_page_names_it(name: str) -> None:
    assert re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", PAGE)


@pytest.mark.parametrize("name", [name for name in ops.__all__ if name.islower()])
def test_page_has_a_row_of_it(name: str) -> None:
    assert re.search(rf"^\| `{name}\(", PAGE, flags=re.MULTILINE)


def test_page_has_a_row_of_nothing_else() -> None:
    rows = re.findall(r"^\| `(\w+)\(", PAGE, flags=re.MULTILINE)
    assert set(rows) - {"row_ids"} <= set(ops.__all__)


@pytest.mark.parametrize("name", MONOLITH)
def test_operation_of_monolith_is_public_and_has_its_pairs(name: str) -> None:
    assert name in ops.__all__
    assert callable(getattr(ops, name))
    assert any(f"_{name}_" in test for test in pair_tests())
