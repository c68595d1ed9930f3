"""Foreign files that look right at first sight: nothing of them is left out without a word."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.checkpoint.formats.dumps import open_embeddings, open_text
from shoal.errors import DataError


@pytest.mark.parametrize("first", ["1.5 0.5 0.25", "x 0.5 1", "1e3 0.5 0.25", "- 0.5 1"])
def test_a_first_row_with_a_wrong_id_is_no_header(tmp_path: Path, first: str) -> None:
    (tmp_path / "rows.txt").write_text(f"{first}\n2 0.5 0.25\n")
    with pytest.raises(DataError, match=f"got '{first}'"):
        open_text(tmp_path / "rows.txt", "t")


@pytest.mark.parametrize("first", ["id a b", "id 0 1", "# 1 2"])
def test_a_header_is_skipped(tmp_path: Path, first: str) -> None:
    (tmp_path / "rows.txt").write_text(f"{first}\n2 0.5 0.25\n")
    source = open_text(tmp_path / "rows.txt", "t")
    assert [one.ids.tolist() for _, one in source.entries(frozenset({"t"}))] == [[2]]


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (torch.ones(5), r"torch.float32 of shape \[5\]"),
        (torch.ones(5, 4, 2), r"shape \[5, 4, 2\]"),
        (torch.ones(5, 4, dtype=torch.int64), r"torch.int64 of shape \[5, 4\]"),
        (torch.ones(5, 4).to_sparse(), r"shape \[5, 4\], torch.sparse_coo"),
    ],
)
@pytest.mark.parametrize("key", [None, "user.weight"])
def test_weights_of_another_form(
    tmp_path: Path, weights: torch.Tensor, said: str, key: str | None
) -> None:
    torch.save({"user.weight": weights, "other.weight": torch.ones(2, 2)}, tmp_path / "model.pt")
    with pytest.raises(DataError, match=rf"weights user\.weight in .*{said}"):
        open_embeddings(tmp_path / "model.pt", {"user": key})
