"""Initial values: pinned bits, laws, and independence of batch, order and segment."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import shoal.rules.initializers as initializers_module
from shoal.errors import ConfigError
from shoal.rules.initializers import (
    BatchSoftmaxInit,
    Constant,
    Initializer,
    Normal,
    Ones,
    TruncatedNormal,
    Uniform,
    Zeros,
    column_words,
    initial_values,
    philox4x32,
    stream_key,
)

IDS = [0, 1, -1, 123456789012345, -(1 << 63)]

# float32 bits as int32, one line per id: columns 3, 4, 5 of IDS, seed 7, table "user"
GOLDEN = [
    (
        Uniform(),
        [
            [-1130469965, -1132147498, 1027877563],
            [-1139595040, 1013357996, -1126856352],
            [1016822990, -1119623336, 987708096],
            [-1122160688, -1120163909, 1022905078],
            [999277312, 986066240, 1023691075],
        ],
    ),
    (
        Normal(),
        [
            [-1127284345, -1129623983, 1037046730],
            [-1137048048, 1016309587, -1122953524],
            [1019928439, -1110521075, 990637663],
            [-1116436777, -1112466806, 1026466542],
            [1001687844, 989360143, 1027459811],
        ],
    ),
    (
        TruncatedNormal(),
        [
            [-1127952802, -1130163416, 1034941720],
            [-1137611725, 1015851114, -1123459663],
            [1019275393, -1112586841, 990220164],
            [-1117576664, -1113789226, 1025812654],
            [1001147444, 988618995, 1026719136],
        ],
    ),
    (
        Uniform(minval=-0.3, maxval=0.7),
        [
            [1004123520, 1025192704, 1059966440],
            [1038198400, 1051621292, -1116177488],
            [1053267046, -1097958712, 1046363492],
            [-1103353156, -1098634428, 1057016480],
            [1048164796, 1046235220, 1057349885],
        ],
    ),
    (
        Normal(mean=0.5, std=2),
        [
            [-1090338328, -1096006710, 1083313246],
            [1027326816, 1067206804, -1083524866],
            [1069468586, -1067287088, 1058397503],
            [-1074681716, -1069719252, 1074603476],
            [1060662139, 1058236609, 1075224270],
        ],
    ),
]


def values(
    law: Initializer, ids: list[int] | Tensor, *, start: int = 0, dim: int = 4, seed: int = 0
) -> Tensor:
    ids_N = torch.as_tensor(ids, dtype=torch.int64)
    return initial_values(law, ids_N, seed=seed, table="user", column_start=start, dim=dim)


@pytest.mark.parametrize(("law", "bits"), GOLDEN)
def test_golden_bits(law: Initializer, bits: list[list[int]]) -> None:
    got_ND = values(law, IDS, start=3, dim=3, seed=7)
    assert got_ND.dtype == torch.float32
    assert got_ND.view(torch.int32).tolist() == bits


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (1 << 64) - 1,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(
    counter: tuple[int, int, int, int], key: int, words: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (torch.tensor(word) for word in counter)
    assert tuple(philox4x32((c0, c1, c2, c3), key).tolist()) == words


LAWS = [law for law, _ in GOLDEN]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("start", [0, 1, 2, 3, 4, 7])
@pytest.mark.parametrize("dim", [1, 2, 3, 5, 8])
def test_a_segment_is_a_cut_of_the_row(law: Initializer, start: int, dim: int) -> None:
    row_ND = values(law, IDS, dim=16)
    assert torch.equal(values(law, IDS, start=start, dim=dim), row_ND[:, start : start + dim])


@pytest.mark.parametrize("law", LAWS)
def test_an_id_gets_the_same_value_in_any_batch(law: Initializer) -> None:
    together_ND = values(law, [*IDS, *IDS])
    assert torch.equal(together_ND[:5], together_ND[5:])
    for row, id in enumerate(IDS):
        assert torch.equal(values(law, [id])[0], together_ND[row])


def test_seed_table_id_and_column_each_matter() -> None:
    base_ND = values(Uniform(), IDS)
    assert base_ND.unique().numel() == base_ND.numel()
    assert not torch.equal(values(Uniform(), IDS, seed=1), base_ND)
    ids_N = torch.tensor(IDS)
    other_ND = initial_values(Uniform(), ids_N, seed=0, table="item", column_start=0, dim=4)
    assert not torch.equal(other_ND, base_ND)


@pytest.mark.parametrize("seed", [-1, 1 << 64, 3])
def test_seeds_are_taken_modulo_two_to_the_64(seed: int) -> None:
    assert stream_key(seed, "user") == stream_key(seed % (1 << 64), "user")
    assert torch.equal(
        values(Uniform(), IDS, seed=seed), values(Uniform(), IDS, seed=seed % (1 << 64))
    )


def test_domains_have_words_of_their_own() -> None:
    first, second = (
        column_words(torch.arange(9), key=5, column_start=0, dim=4, domain=domain)
        for domain in (0, 1)
    )
    assert not (first == second).any()


@pytest.mark.parametrize(
    ("law", "mean", "std", "low", "high"),
    [
        (Uniform(-1, 3), 1.0, 4 / math.sqrt(12), -1, 3),
        (Normal(2, 0.5), 2.0, 0.5, 2 - 0.5 * 3.85, 2 + 0.5 * 3.85),
        # A standard normal cut at two deviations has a deviation of 0.8796.
        (TruncatedNormal(-1, 3), -1.0, 3 * 0.8796, -7, 5),
    ],
)
def test_laws(law: Initializer, mean: float, std: float, low: float, high: float) -> None:
    sample_ND = values(law, torch.arange(10_000), dim=8).double()
    error = 5 * std / math.sqrt(sample_ND.numel())
    assert sample_ND.mean().item() == pytest.approx(mean, abs=error)
    assert sample_ND.std().item() == pytest.approx(std, rel=0.02)
    assert low <= sample_ND.min() < sample_ND.max() <= high


@pytest.mark.parametrize(
    ("law", "value"),
    [
        (Zeros(), 0.0),
        (Ones(), 1.0),
        (Constant(0.25), 0.25),
        (BatchSoftmaxInit(3), 3.0),
        (Uniform(0.5, 0.5), 0.5),
        (Normal(0.5, 0), 0.5),
    ],
)
def test_constants(law: Initializer, value: float) -> None:
    assert torch.equal(values(law, IDS), torch.full((5, 4), value))


@pytest.mark.parametrize("law", [Zeros(), *LAWS])
def test_no_ids(law: Initializer) -> None:
    assert values(law, []).shape == (0, 4)


@pytest.mark.parametrize(
    ("rule", "law", "params"),
    [
        (Zeros(), "constant", (0.0,)),
        (Ones(), "constant", (1.0,)),
        (Constant(2), "constant", (2.0,)),
        (BatchSoftmaxInit(), "constant", (1.0,)),
        (Uniform(), "uniform", (-0.05, 0.05)),
        (Normal(), "normal", (0.0, 0.05)),
        (TruncatedNormal(), "truncated_normal", (0.0, 0.05)),
    ],
)
def test_what_the_core_is_told(rule: Initializer, law: str, params: tuple[float, ...]) -> None:
    assert rule.law == law
    assert rule.param_values() == params


def test_the_core_and_the_reference_hold_the_same_quantiles() -> None:
    text = (Path(__file__).parents[3] / "csrc" / "quantiles.inc").read_text()
    arrays = [
        np.array([float.fromhex(word) for word in re.findall(r"(-?0x[\dA-Fa-f.]+p[+-]\d+)f", part)])
        for part in text.split("TRUNCATED_QUANTILES")
    ]
    stored = np.load(Path(initializers_module.__file__).with_name("quantiles.npz"))
    for array, kind in zip(arrays, ("normal", "truncated_normal"), strict=True):
        assert len(array) == 4097
        assert np.array_equal(array, stored[kind])


def test_quantiles_are_those_of_the_normal_law() -> None:
    stored = np.load(Path(initializers_module.__file__).with_name("quantiles.npz"))
    phi = {q: 0.5 * math.erfc(-q / math.sqrt(2)) for q in (-2.0, 2.0)}
    for kind, low, high in (("normal", 0.0, 1.0), ("truncated_normal", phi[-2.0], phi[2.0])):
        for i in (1, 100, 2048, 3000, 4095):
            share = 0.5 * math.erfc(-float(stored[kind][i]) / math.sqrt(2))
            assert share == pytest.approx(low + i / 4096 * (high - low), abs=1e-7)
    assert stored["normal"][-1] == pytest.approx(3.8419, abs=1e-4)
    assert stored["truncated_normal"][[0, 4096]].tolist() == [-2, 2]


@pytest.mark.parametrize(
    ("law", "settings", "names"),
    [
        (Constant, {"value": math.nan}, "value"),
        (BatchSoftmaxInit, {"value": 0.5}, "value"),
        (Uniform, {"minval": 1, "maxval": 0}, "minval"),
        (Uniform, {"minval": 2.5, "maxval": 1}, "minval"),
        (Uniform, {"maxval": math.inf}, "maxval"),
        (Normal, {"std": -1}, "std"),
        (TruncatedNormal, {"mean": "0"}, "mean"),
    ],
)
def test_wrong_numbers_are_refused(
    law: type[Initializer], settings: dict[str, object], names: str
) -> None:
    with pytest.raises(ConfigError, match=names):
        law(**settings)
