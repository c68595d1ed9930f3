"""A graph that cannot be recorded: lookups do without, and it is not tried again."""

from __future__ import annotations

import contextlib
import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from shoal.table.cuda import side_stream


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("none"), RuntimeError("capture")])
def test_a_failed_recording_fails_no_lookup(
    error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[bool] = []

    def refuse(*_: Any) -> None:
        tried.append(gc.isenabled())
        raise error

    waited: list[object] = []
    stream: Any = SimpleNamespace(wait_stream=waited.append)
    monkeypatch.setattr(side_stream, "_Recorded", refuse)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 40, 1 << 40))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    side = side_stream.SideStream(torch.device("cpu"))
    side._stream = stream
    assert [side.lease(8, (8,), stream) for _ in range(8)] == [None] * 8
    assert tried == [False]
    assert gc.isenabled()
    assert len(waited) == 2
    assert side._sizes[8].made == 0
