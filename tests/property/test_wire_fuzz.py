"""Damaged messages of replicas, publishers and clients: each is taken, or refused with a reason.

Ten minutes and more: `python -m support.wire_fuzz`.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from support.shares import share_of
from support.wire_fuzz import Decode, corpus, fuzz, serve_decoder, sync_decoder

SYNC, SERVE = ("page", "dense", "request", "answer"), ("grpc", "http")


@pytest.fixture(scope="module", params=["sync", "serve"])
def decoder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Decode, tuple[str, ...]]]:
    if request.param == "sync":
        with sync_decoder() as decode:
            yield decode, SYNC
    else:
        with serve_decoder(tmp_path_factory.mktemp("runs")) as decode:
            yield decode, SERVE


def test_messages_of_the_corpus_are_taken_or_refused_as_they_were(
    decoder: tuple[Decode, tuple[str, ...]],
) -> None:
    decode, kinds = decoder
    known = corpus(*kinds)
    found = {(one.to, one.why): decode(one) for one in known}
    assert found == {(one.to, one.why): one.code for one in known}
    assert len(found) == len(known) > 20


@pytest.mark.parametrize(
    ("seed", "messages"), [(1, 400), pytest.param(2, share_of(12_000, 400), marks=pytest.mark.slow)]
)
def test_damaged_messages_are_taken_or_refused(
    seed: int, messages: int, decoder: tuple[Decode, tuple[str, ...]]
) -> None:
    decode, kinds = decoder
    codes = fuzz(decode, corpus(*kinds), random.Random(seed))
    counts = Counter(itertools.islice(codes, messages))
    assert min(counts["taken"], messages - counts["taken"]) > messages // 50, counts
