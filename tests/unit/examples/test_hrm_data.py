"""The form of puzzle data on disk, and which examples a rank gets when."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hrm.carry import IGNORE, Batch
from hrm.dataset import PuzzleData, read_split, require_alike, write_split
from hrm.prefetch import Prefetched
from hrm.sampler import Share, TestBatches, TrainSampler
from hrm.set_builder import SetBuilder
from shoal.errors import CheckpointError, ConfigError, DataError

KEYS = {
    "pad_id",
    "ignore_label_id",
    "blank_identifier_id",
    "vocab_size",
    "seq_len",
    "num_puzzle_identifiers",
    "total_groups",
    "mean_puzzle_examples",
    "total_puzzles",
    "sets",
}


def made(root: Path, sizes: list[list[int]], split: str = "train") -> PuzzleData:
    """Groups of puzzles of so many examples; every example has a number of its own as its input."""
    built, example, puzzle = SetBuilder(2), 0, 0
    for group in sizes:
        for count in group:
            numbers = np.arange(example, example + count, dtype=np.uint8)
            puzzle += 1
            built.add_puzzle(puzzle, np.stack([numbers, numbers + 1], 1), numbers[:, None] % [3, 2])
            example += count
        built.end_group()
    names = ["<blank>", *map(str, range(puzzle))]
    write_split(root, split, {"all": built.build()}, vocab_size=255, seq_len=2, names=names)
    return read_split(root, split)


def numbers_of(batch: Batch) -> list[int]:
    return batch.inputs_BS[:, 0].tolist()


def test_files_are_those_of_the_form(tmp_path: Path) -> None:
    made(tmp_path, [[2, 1], [3]])
    assert sorted(p.name for p in (tmp_path / "train").iterdir()) == [
        "all__group_indices.npy",
        "all__inputs.npy",
        "all__labels.npy",
        "all__puzzle_identifiers.npy",
        "all__puzzle_indices.npy",
        "dataset.json",
    ]
    raw = json.loads((tmp_path / "train" / "dataset.json").read_text())
    assert set(raw) == KEYS
    assert (raw["total_groups"], raw["total_puzzles"], raw["sets"]) == (2, 3, ["all"])
    assert raw["mean_puzzle_examples"] == 2.0
    assert json.loads((tmp_path / "identifiers.json").read_text()) == ["<blank>", "0", "1", "2"]
    dtypes = {p.stem: str(np.load(p).dtype) for p in (tmp_path / "train").glob("*.npy")}
    assert dtypes == {
        "all__inputs": "uint8",
        "all__labels": "uint8",
        "all__puzzle_identifiers": "int32",
        "all__puzzle_indices": "int32",
        "all__group_indices": "int32",
    }
    indices = np.load(tmp_path / "train" / "all__puzzle_indices.npy").tolist()
    assert indices == [0, 2, 3, 6]
    assert np.load(tmp_path / "train" / "all__group_indices.npy").tolist() == [0, 2, 3]


def written_by_hand(root: Path, **changes: Any) -> Path:
    """Data as other builders write it: with a key more, and two sets."""
    folder = root / "test"
    folder.mkdir(parents=True)
    arrays = {
        "inputs": np.array([[1, 2, 0], [3, 4, 0]], dtype=np.uint8),
        "labels": np.array([[2, 2, 0], [4, 4, 0]], dtype=np.uint8),
        "puzzle_identifiers": np.array([5, 3], dtype=np.int32),
        "puzzle_indices": np.array([0, 1, 2], dtype=np.int32),
        "group_indices": np.array([0, 2], dtype=np.int32),
    }
    meta = {
        "pad_id": 0,
        "ignore_label_id": 0,
        "blank_identifier_id": 0,
        "vocab_size": 11,
        "seq_len": 3,
        "num_puzzle_identifiers": 6,
        "total_groups": 2,
        "mean_puzzle_examples": 1.0,
        "total_puzzles": 4,
        "sets": ["easy", "hard"],
    }
    for name in ("easy", "hard"):
        for array, value in arrays.items():
            np.save(folder / f"{name}__{array}.npy", changes.get(array, value))
    (folder / "dataset.json").write_text(json.dumps({**meta, **changes.get("meta", {})}))
    return root


def test_data_of_other_builders_is_read(tmp_path: Path) -> None:
    data = read_split(written_by_hand(tmp_path), "test")
    windows = list(TestBatches(data, Share(4)))
    assert [w.set_name for w in windows] == ["easy", "hard"]
    batch = windows[0].batch
    assert batch.labels_BS.tolist() == [[2, 2, IGNORE], [4, 4, IGNORE], [IGNORE] * 3, [IGNORE] * 3]
    assert batch.puzzle_ids_B.tolist() == [5, 3, 0, 0]
    assert batch.inputs_BS.dtype == torch.int32 and batch.puzzle_ids_B.dtype == torch.int64


def test_labels_all_count_where_none_is_ignored(tmp_path: Path) -> None:
    root = written_by_hand(tmp_path, meta={"ignore_label_id": None})
    window = next(iter(TestBatches(read_split(root, "test"), Share(2))))
    assert window.batch.labels_BS.tolist() == [[2, 2, 0], [4, 4, 0]]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"meta": {"seq_len": 4}}, "seq_len"),
        ({"meta": {"total_groups": 3}}, "total_groups"),
        ({"meta": {"vocab_size": 4}}, "vocab_size"),
        ({"meta": {"num_puzzle_identifiers": 5}}, "num_puzzle_identifiers"),
        ({"meta": {"mean_puzzle_examples": 2.0}}, "mean_puzzle_examples.*1, as in the arrays"),
        ({"meta": {"pad_id": 11}}, "pad_id.*vocab_size"),
        ({"meta": {"blank_identifier_id": 6}}, "blank_identifier_id.*num_puzzle_identifiers"),
        ({"meta": {"vocab_size": "11"}}, "vocab_size is '11'"),
        ({"inputs": np.ones((2, 3)) / 2}, "inputs.*float64"),
        ({"labels": np.zeros((1, 3), dtype=np.uint8)}, "labels"),
        ({"puzzle_indices": np.array([0, 1, 3], dtype=np.int32)}, "puzzle_indices"),
        ({"puzzle_indices": np.array([0, 2], dtype=np.int32)}, "puzzle_indices"),
        ({"group_indices": np.array([0, 1], dtype=np.int32)}, "group_indices"),
        ({"puzzle_identifiers": np.array([5, -1], dtype=np.int32)}, "puzzle ids"),
        ({"meta": {"sets": ["easy", "medium"]}}, "medium__inputs.npy"),
    ],
    ids=str,
)
def test_metadata_that_disagrees_is_refused(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(DataError, match=named):
        read_split(written_by_hand(tmp_path, **changes), "test")


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"dataset\.json.*build_sudoku"):
        read_split(tmp_path, "train")
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "dataset.json").write_text('{"pad_id": 0}')
    with pytest.raises(DataError, match="ignore_label_id"):
        read_split(tmp_path, "train")


def test_a_spooled_set_has_the_bytes_of_one_in_memory(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    roots = [tmp_path / "memory", tmp_path / "spooled"]
    builders = [SetBuilder(5), SetBuilder(5, spool=tmp_path / "spooled" / "spool")]
    for puzzle in range(40):
        pages = rng.integers(0, 9, (2, int(rng.integers(4)), 5))
        for built in builders:
            built.add_puzzle(puzzle, *pages)
            built.end_group()
    names = [str(name) for name in range(40)]
    for root, built in zip(roots, builders, strict=True):
        write_split(root, "train", {"all": built.build()}, vocab_size=9, seq_len=5, names=names)
    files = sorted(path.relative_to(roots[0]) for path in roots[0].rglob("*") if path.is_file())
    assert len(files) == 7
    for path in files:
        assert (roots[0] / path).read_bytes() == (roots[1] / path).read_bytes(), path
    assert not list((tmp_path / "spooled" / "spool").iterdir())
    bare = SetBuilder(5, spool=tmp_path / "bare")
    assert bare.build().inputs.shape == (0, 5)


def test_groups_and_puzzles_without_examples_are_passed_over(tmp_path: Path) -> None:
    data = made(tmp_path, [[], [2, 3], [], [0], [1, 1, 1], []])
    sampler = TrainSampler(data, Share(3), epochs_per_iteration=40)
    drawn: list[int] = []
    while (batch := sampler.draw()) is not None:
        numbers = numbers_of(batch)
        assert sorted(numbers) != sorted([numbers[0]] * 3)
        drawn += numbers
    assert set(drawn) == set(range(8))


def test_an_epoch_visits_every_group_once(tmp_path: Path) -> None:
    data = made(tmp_path, [[1, 1, 1]] * 8)
    sampler = TrainSampler(data, Share(4), seed=1, epochs_per_iteration=3)
    batches = [batch for _ in range(7) if (batch := sampler.draw()) is not None]
    assert len(batches) == 6
    visits = Counter(n // 3 for batch in batches for n in numbers_of(batch))
    assert visits == dict.fromkeys(range(8), 3)
    first = [n for batch in batches[:2] for n in numbers_of(batch)]
    assert sorted(n // 3 for n in first) == list(range(8))
    sampler.next_iteration()
    again = sampler.draw()
    assert again is not None and numbers_of(again) != numbers_of(batches[0])


def test_ranks_share_one_draw_without_repeats(tmp_path: Path) -> None:
    data = made(tmp_path, [[9], [7, 5], [11], [6]])

    def drawn(world_size: int) -> list[list[int]]:
        ranks = [TrainSampler(data, Share(12, r, world_size), seed=3) for r in range(world_size)]
        found = []
        while all(parts := [sampler.draw() for sampler in ranks]):
            found.append([n for part in parts if part is not None for n in numbers_of(part)])
        return found

    alone = drawn(1)
    assert len(alone) >= 2
    assert drawn(4) == drawn(2) == alone
    for batch in alone:
        assert len(set(batch)) == len(batch)


def test_ids_are_those_of_the_examples(tmp_path: Path) -> None:
    data = made(tmp_path, [[2, 3], [4]])
    sampler = TrainSampler(data, Share(3), seed=0, epochs_per_iteration=4)
    owner = [1, 1, 2, 2, 2, 3, 3, 3, 3]
    for _ in range(3):
        batch = sampler.draw()
        assert batch is not None
        assert batch.puzzle_ids_B.tolist() == [owner[n] for n in numbers_of(batch)]


def test_a_sampler_goes_on_where_it_was(tmp_path: Path) -> None:
    data = made(tmp_path, [[3, 4], [5], [2, 2, 2], [6]])
    first = TrainSampler(data, Share(6), seed=2, epochs_per_iteration=5)
    first.draw()
    first.next_iteration()
    first.draw()
    state = json.loads(json.dumps(first.state_dict()))
    second = TrainSampler(data, Share(6, 1, 2), seed=2, epochs_per_iteration=5)
    second.load_state_dict(state)
    while (want := first.draw()) is not None:
        got = second.draw()
        assert got is not None and numbers_of(got) == numbers_of(want)[3:]
    assert second.draw() is None
    other = TrainSampler(data, Share(6), seed=3, epochs_per_iteration=5)
    with pytest.raises(CheckpointError, match="seed"):
        other.load_state_dict(state)


def test_uneven_tails_give_every_rank_the_same_number_of_batches(tmp_path: Path) -> None:
    data = made(tmp_path, [[1]] * 9, "test")
    seen: list[int] = []
    for rank in range(4):
        windows = list(TestBatches(data, Share(8, rank, 4)))
        assert [w.count for w in windows] == [8, 1]
        for window in windows:
            assert window.batch.size == 2
            real = window.batch.puzzle_ids_B > 0
            assert bool((window.batch.labels_BS[~real] == IGNORE).all())
            seen += window.batch.inputs_BS[real][:, 0].tolist()
    assert sorted(seen) == list(range(9))


def test_a_bounded_evaluation_is_spread_and_fixed(tmp_path: Path) -> None:
    data = made(tmp_path, [[10], [10]], "test")
    windows = list(TestBatches(data, Share(4), limit=5))
    assert [w.count for w in windows] == [4, 1]
    assert [n for w in windows for n in numbers_of(w.batch)][:5] == [0, 4, 8, 12, 16]


def test_a_bounded_evaluation_takes_one_example_of_each_part_by_seed(tmp_path: Path) -> None:
    data = made(tmp_path, [[10], [10]], "test")

    def chosen(seed: int, ranks: int = 1) -> list[int]:
        shares = [Share(4, rank, ranks) for rank in range(ranks)]
        every = [TestBatches(data, share, limit=5, seed=seed) for share in shares]
        windows = [window for batches in every for window in batches]
        return sorted(n for w in windows for n in numbers_of(w.batch) if w.batch.size)

    picks = [
        sorted(TestBatches(data, Share(4), limit=5, seed=s).chosen(data.sets["all"]))
        for s in range(9)
    ]
    assert all([n // 4 for n in pick] == [0, 1, 2, 3, 4] for pick in picks)
    assert len({tuple(pick) for pick in picks}) > 1
    assert chosen(3) == chosen(3) == chosen(3, ranks=2)


def test_batches_that_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"global_batch_size: got 10 on 4 ranks.*=8"):
        Share(10, 0, 4)


def test_training_takes_one_set(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="one set"):
        TrainSampler(read_split(written_by_hand(tmp_path), "test"), Share(1))


def test_splits_of_different_builds_are_refused(tmp_path: Path) -> None:
    data = read_split(written_by_hand(tmp_path / "a"), "test")
    require_alike(data, data)
    other = read_split(written_by_hand(tmp_path / "b", meta={"vocab_size": 12}), "test")
    with pytest.raises(DataError, match="vocab_size"):
        require_alike(data, other)


def test_batches_drawn_ahead_are_the_same_and_not_counted_before_use(tmp_path: Path) -> None:
    data = made(tmp_path, [[3, 4], [5], [2, 2, 2], [6]])
    plain, ahead = (TrainSampler(data, Share(4), seed=2, epochs_per_iteration=9) for _ in range(2))
    with Prefetched(ahead, depth=3) as batches:
        for _ in range(4):
            want, got = plain.draw(), batches.take()
            assert want is not None and got is not None
            assert numbers_of(got) == numbers_of(want)
            assert batches.state == plain.state_dict()
    assert ahead.state_dict() == plain.state_dict()
    with Prefetched(ahead, depth=2) as batches:
        rest = 0
        while batches.take() is not None:
            rest += 1
        assert batches.take() is None
    while plain.draw() is not None:
        rest -= 1
    assert rest == 0 and ahead.state_dict() == plain.state_dict()


def test_what_a_thread_meets_is_raised_where_batches_are_taken(tmp_path: Path) -> None:
    sampler = TrainSampler(made(tmp_path, [[3]]), Share(2))

    def fail() -> None:
        raise DataError("disk gone")

    sampler.draw = fail  # type: ignore[method-assign]
    with Prefetched(sampler) as batches:
        for _ in range(2):
            with pytest.raises(DataError, match="disk gone"):
                batches.take()
