"""Ranks that wait in different calls find it through the job's store, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from torch.distributed import HashStore

from shoal.comm import mismatched_calls
from shoal.comm.mismatched_calls import Calls, Watchdog


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_PATIENCE_S", "_LOOK_S", "_LINGER_S"):
        monkeypatch.setattr(mismatched_calls, name, 0.0)


class Job:
    """Ranks of one process: each has its own watch, of the one store."""

    def __init__(self, ranks: int, *groups: str) -> None:
        store = HashStore()
        self.watches = [Watchdog(rank, ranks, store) for rank in range(ranks)]
        self.groups: list[dict[str, Calls]] = [
            {name: one.group(name) for name in groups} for one in self.watches
        ]
        self.waits: list[tuple[Calls, int]] = [(Calls(), 0)] * ranks

    def begins(self, rank: int, name: str, what: str = "sizes") -> None:
        group = self.groups[rank][name]
        self.waits[rank] = group, group.begin(what)

    def look(self, rank: int) -> str | None:
        group, number = self.waits[rank]
        return group.look(number)

    def rounds(self) -> list[str | None]:
        """What each rank finds once all have looked twice."""
        for rank in range(len(self.waits)):
            self.look(rank)
        return [self.look(rank) for rank in range(len(self.waits))]


def test_ranks_in_one_call_are_left_alone() -> None:
    job = Job(3, "a", "b")
    for rank in range(3):
        job.begins(rank, "a")
    assert job.rounds() == [None] * 3


def test_ranks_that_wait_for_each_other_are_named_on_each() -> None:
    job = Job(3, "steps", "tables b")
    for rank, (group, what) in enumerate(
        [("tables b", "ids"), ("steps", "vote"), ("tables b", "ids")]
    ):
        job.begins(rank, group, what)
    want = (
        "ranks [1] wait in 'vote' of steps, which ranks [0, 2] have not called; "
        "ranks [0, 2] wait in 'ids' of tables b, which ranks [1] have not called"
    )
    assert job.rounds() == [want] * 3


def test_a_rank_that_does_not_wait_may_still_come() -> None:
    job = Job(3, "a", "b")
    job.begins(0, "a")
    job.begins(1, "b")
    assert [job.look(rank) for rank in (0, 1, 0, 1)] == [None] * 4
    job.begins(2, "a")
    job.waits[2][0].look(job.waits[2][1])
    assert job.look(0) is not None


def test_a_call_that_all_have_begun_may_still_end() -> None:
    """One is in the call before that of the others, which all have begun."""
    job = Job(2, "a")
    job.begins(0, "a")
    job.begins(1, "a")
    behind = job.waits[1]
    job.begins(1, "a")
    job.waits[1] = behind
    assert job.rounds() == [None] * 2


def test_calls_of_one_number_with_two_names_are_told() -> None:
    job = Job(2, "tables a")
    job.begins(0, "tables a", "gradients")
    job.begins(1, "tables a", "sizes")
    want = "call 1 of tables a is 'gradients' on ranks [0], 'sizes' on ranks [1]"
    assert job.rounds() == [want] * 2


def test_what_a_rank_waited_for_once_is_no_proof() -> None:
    """It has gone on: what it wrote then stays, and the others are fine."""
    job = Job(2, "a", "b")
    job.begins(0, "a")
    job.look(0)  # written: rank 0 waits in a
    job.begins(1, "a")
    job.begins(1, "b")
    assert [job.look(1), job.look(1)] == [None, None]  # rank 0 has not come to b yet
    job.begins(0, "b")
    assert job.rounds() == [None] * 2


def test_more_calls_than_are_remembered() -> None:
    job = Job(2, "a", "b")
    for rank in range(2):
        for number in range(100):
            job.begins(rank, "a", f"call {number}")
    job.begins(0, "a", "last")
    job.begins(1, "b", "other")
    assert job.rounds()[0] == (
        "ranks [0] wait in 'last' of a, which ranks [1] have not called; "
        "ranks [1] wait in 'other' of b, which ranks [0] have not called"
    )


def test_threads_besides_are_not_watched() -> None:
    job = Job(2, "a", "b")
    job.begins(0, "a")
    job.begins(1, "b")
    found: list[object] = []
    looks: list[Callable[[], object]] = [lambda: found.append(job.rounds())]
    thread = threading.Thread(target=looks[0])
    thread.start()
    thread.join()
    assert found == [[None, None]]


def test_a_store_that_is_gone_ends_the_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("connection reset")

    job = Job(1, "a")
    monkeypatch.setattr(job.watches[0], "_store", Gone())
    job.begins(0, "a")
    assert job.rounds() == [None]
    assert job.watches[0]._store is None


def test_a_later_watch_does_not_read_what_an_earlier_one_left() -> None:
    store = HashStore()
    for number, slow in ((0, "old call"), (1, "new call")):
        watches = [Watchdog(rank, 2, store, number) for rank in range(2)]
        groups = [one.group("a") for one in watches]
        waited = groups[0].begin(slow)
        groups[1].begin(slow)
        assert [groups[0].look(waited) for _ in range(3)] == [None] * 3


def test_a_rank_that_went_on_meanwhile_does_not_count_as_waiting() -> None:
    store = HashStore()
    watches = [Watchdog(rank, 2, store) for rank in range(2)]
    groups = [one.group("a") for one in watches]
    assert watches[0]._look((groups[0], groups[0].begin("sizes")), still=lambda: False) is None
    # Else rank 1 would ask for a word that rank 0 never wrote, until the store gives up.
    number = groups[1].begin("sizes")
    assert [groups[1].look(number) for _ in range(2)] == [None] * 2
