"""Streams: every example once over stops and ranks, whatever comes between them."""

from __future__ import annotations

import io
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from shoal.data import (
    Batch,
    IdFeature,
    Kafka,
    KafkaFeed,
    Quarantine,
    RankShare,
    Recipe,
    Replay,
    StreamLoader,
    TensorSource,
)
from shoal.errors import ConfigError, DataError
from support.brokers import Brokers

RECIPE = Recipe(
    ids=(IdFeature(name="u"), IdFeature(name="seen", is_list=True)),
    label="y",
    dense=("x",),
    time="at",
)
START_S = 1_700_000_000
TOPIC = "clicks"
SETTINGS = {"wait_s": 30.0}


def example(n: int) -> dict[str, Any]:
    return {"u": n, "seen": [n, n + 1][: n % 3], "y": n % 2, "x": n / 2, "at": START_S + n}


def as_json(n: int, **others: Any) -> bytes:
    return json.dumps({**example(n), **others}).encode()


@pytest.fixture(scope="module")
def mock() -> Iterator[Brokers]:
    brokers = Brokers()
    yield brokers
    brokers.stop()


TOPICS = iter(range(1000))


class Sent:
    """A topic of its own, and what was sent to it."""

    def __init__(self, brokers: Brokers) -> None:
        self.brokers, self.topic = brokers, f"clicks{next(TOPICS)}"

    def send(self, *values: bytes | None, partition: int | None = None, at_s: int = 0) -> None:
        for n, value in enumerate(values):
            at = n % 4 if partition is None else partition
            self.brokers.send(self.topic, value, at, at_s=at_s)
        self.brokers.flush()

    def loader(
        self,
        batch_size: int = 4,
        *,
        quarantine: Quarantine | None = None,
        recipe: Recipe = RECIPE,
        stream: dict[str, Any] | None = None,
        **loading: Any,
    ) -> StreamLoader:
        settings = {**SETTINGS, "topic": self.topic, "servers": self.brokers.servers}
        kafka = Kafka(**{**settings, **(stream or {})})
        feed = KafkaFeed(kafka, recipe, quarantine)
        loading = {"wait_s": kafka.wait_s, "idle_s": kafka.idle_s, **loading}
        return StreamLoader(feed, batch_size, **loading)


@pytest.fixture
def sent(mock: Brokers) -> Sent:
    return Sent(mock)


def users(batches: list[Batch]) -> list[int]:
    return [n for batch in batches for n in batch.ids["u"].values.tolist()]


def test_json_records_become_the_examples_that_files_would(sent: Sent):
    sent.send(*(as_json(n) for n in range(10)))
    batches = list(sent.loader(max_examples=10))
    assert sorted(users(batches)) == list(range(10))
    for batch in batches:
        ids = batch.ids["u"].values
        assert batch.labels.tolist() == (ids % 2).tolist()
        assert batch.dense is not None and batch.dense[:, 0].tolist() == (ids / 2).tolist()
        assert batch.event_times_B.tolist() == (START_S + ids).tolist()
        assert batch.event_time_s == START_S + int(ids.max())
        assert batch.ids["seen"].lengths.tolist() == (ids % 3).tolist()
    assert batches[-1].position == 10
    assert batches[-1].places == {"0": (3, 0), "1": (3, 0), "2": (2, 0), "3": (2, 0)}


def arrow(*numbers: int) -> bytes:
    table = pa.Table.from_pylist([example(n) for n in numbers])
    out = io.BytesIO()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue()


def test_csv_and_arrow_records(sent: Sent, mock: Brokers):
    lines = [f'{n},"{n} {n + 1}",{n % 2},{n / 2},{START_S + n}\n'.encode() for n in range(6)]
    sent.send(*lines)
    columns = ("u", "seen", "y", "x", "at")
    as_csv = sent.loader(8, stream={"format": "csv", "columns": columns}, max_examples=6)
    assert sorted(users(list(as_csv))) == list(range(6))
    other = Sent(mock)
    other.send(arrow(0, 1, 2), arrow(3), arrow(4, 5))
    as_arrow = other.loader(8, stream={"format": "arrow"}, max_examples=6)
    assert sorted(users(list(as_arrow))) == list(range(6))


@pytest.mark.parametrize("stop", [1, 2, 4])
def test_a_stream_continues_in_the_midst_of_a_record_exactly(sent: Sent, stop: int):
    sent.send(arrow(*range(7)), arrow(*range(7, 9)), arrow(9), arrow(*range(10, 15)))
    whole = sent.loader(3, stream={"format": "arrow"}, max_examples=15)
    batches = whole.batches()
    before = [next(batches) for _ in range(stop)]
    batches.close()
    again = sent.loader(3, stream={"format": "arrow"}, max_examples=15)
    assert before[-1].places is not None
    again.places = dict(before[-1].places)
    after = list(again.batches(before[-1].position))
    assert sorted(users(before) + users(after)) == list(range(15))
    assert after[-1].position == 15


class Meeting:
    """Votes of ranks that are threads."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=60)
        self._votes: list[list[float]] = [[] for _ in range(ranks)]

    def of(self, rank: int) -> Any:
        def agree(mine: list[float]) -> list[list[float]]:
            self._votes[rank] = mine
            self._barrier.wait()
            found = [list(vote) for vote in self._votes]
            self._barrier.wait()
            return found

        return agree


def on_ranks(
    loaders: list[StreamLoader],
    position: int,
    most: int | None,
    call: Callable[[Batch], object] = lambda _: None,
) -> list[list[Batch]]:
    """Batches of each rank, the first `most` of them."""
    meeting = Meeting(len(loaders))
    found: list[list[Batch]] = [[] for _ in loaders]

    def run(rank: int) -> None:
        loaders[rank].agree = meeting.of(rank)
        batches = loaders[rank].batches(position)
        for batch in batches:
            found[rank].append(batch)
            call(batch)
            if most is not None and len(found[rank]) == most:
                loaders[rank].stop()
        batches.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(loaders))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return found


def test_other_ranks_continue_without_loss_or_repeat(sent: Sent):
    """Three ranks read some, then five, one of them without a partition, then one."""
    sent.send(*(as_json(n) for n in range(60)))
    seen: list[int] = []
    places: dict[str, tuple[int, int]] = {}
    position = 0
    for ranks, most in ((3, 2), (5, 1), (1, None)):
        shares = [RankShare(rank, ranks) for rank in range(ranks)]
        loaders = [
            sent.loader(6, share=share, stream={"wait_s": 0.2}, max_examples=60) for share in shares
        ]
        for loader in loaders:
            loader.places = dict(places)
        found = on_ranks(loaders, position, most)
        assert len({len(batches) for batches in found}) == 1, "as many batches on each rank"
        for parts in zip(*found, strict=True):
            position += sum(part.labels.numel() for part in parts)
            assert {part.position for part in parts} == {position}
        # What a run saves is of the last batch that it trained.
        used = [batches[:most] for batches in found]
        position = used[0][-1].position
        seen += [n for batches in used for n in users(batches)]
        for batches in used:
            assert batches[-1].places is not None
            if batches[-1].labels.numel() or len(batches[-1].places) < 4:
                places.update(batches[-1].places)
    assert sorted(seen) == list(range(60))


def test_bad_records_are_named_counted_and_left_out(sent: Sent, tmp_path: Path):
    deep = b"[" * 100_000
    bad = [
        b"null", b"", None, b"\xff\xfe{}", b'{"u": 1', deep, b'[{"u": 1}]', b'{"u": 1}{"u": 2}',
        as_json(1, y=2), as_json(1, x="many"), as_json(1, u=1.5), as_json(1, at="soon"),
        as_json(1, at=int(time.time()) + 10_000_000), as_json(1, x=float("nan")),
        as_json(1, u=10**400), as_json(1, seen=[None]), as_json(1, seen={"a": 1}),
        b'{"u": "\\ud800", "seen": [], "y": 1, "x": 1, "at": 1}',
    ]  # fmt: skip
    for n, value in enumerate(bad):
        sent.send(value, as_json(n), partition=2)
    quarantine = Quarantine(tmp_path / "bad.jsonl", most_rows=len(bad))
    batches = list(sent.loader(5, quarantine=quarantine, max_examples=len(bad)))
    assert users(batches) == list(range(len(bad)))
    assert quarantine.rows == len(bad)
    lines = [json.loads(line) for line in quarantine.path.read_text().splitlines()]
    assert [line["row"] for line in lines] == [2 * n for n in range(len(bad))]
    assert {line["file"] for line in lines} == {f"{sent.topic}/2"}
    assert "in row 16 of" in next(line["reason"] for line in lines if line["row"] == 16)
    assert batches[-1].places is not None and batches[-1].places["2"] == (2 * len(bad), 0)
    # Those that were read ahead of the first batch do not count at its end.
    feed = sent.loader(5, quarantine=quarantine).feed
    loader = StreamLoader(feed, 5, max_examples=10, wait_s=SETTINGS["wait_s"])
    first = next(iter(loader))
    assert first.places == {**first.places, "2": (10, 0)}
    assert feed.left_out(first.places) == 5
    feed.continues(7)
    assert feed.left_out(first.places) == 12
    assert feed.left_out({"0": (3, 0)}) == 7, "places from before partition 2 was added"
    assert quarantine.rows == len(bad) + 7
    strict = Quarantine(tmp_path / "strict.jsonl", most_rows=len(bad) - 1)
    with pytest.raises(DataError, match="bad rows of the data: got 18"):
        list(sent.loader(5, quarantine=strict))
    with pytest.raises(DataError, match=rf"record 0 of {sent.topic}/2"):
        list(sent.loader(5))


def test_columns_that_change_are_reported_or_refused(
    sent: Sent, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    values = [as_json(n, more=1) if n % 2 else as_json(n) for n in range(9)]
    sent.send(*values, partition=0)
    lenient = sent.loader(max_examples=9)
    with caplog.at_level(logging.WARNING, logger="shoal.data"):
        assert users(list(lenient)) == list(range(9))
    assert [one.message for one in caplog.records if "changed" in one.message] == [
        f"columns of records of {sent.topic} changed: 'more' more"
    ]
    assert isinstance(lenient.feed, KafkaFeed) and lenient.feed.drifted == 4
    quarantine = Quarantine(tmp_path / "bad.jsonl", same_columns=True)
    assert users(list(sent.loader(quarantine=quarantine, max_examples=5))) == [0, 2, 4, 6, 8]
    assert quarantine.rows == 4


def test_the_time_of_a_record_and_times_as_text(sent: Sent, mock: Brokers):
    untimed = Recipe(ids=(IdFeature(name="u"),), label="y")
    sent.send(as_json(1), at_s=START_S + 7, partition=0)
    (batch,) = sent.loader(recipe=untimed, max_examples=1)
    assert batch.event_times_B.tolist() == [START_S + 7]
    other = Sent(mock)
    times = ["2023-11-14T22:13:20Z", "2023-11-14 22:13:21.75", "2023-11-15T00:13:22+02:00"]
    other.send(*(as_json(n, at=text) for n, text in enumerate(times)), partition=0)
    (batch,) = other.loader(max_examples=3)
    assert batch.event_times_B.tolist() == [START_S + n for n in range(3)]


def test_begin_latest_takes_what_comes_and_new_partitions_whole(sent: Sent):
    sent.send(*(as_json(n) for n in range(8)))
    loader = sent.loader(2, stream={"begin": "latest"}, max_examples=2)
    batches = loader.batches()
    got: list[Batch] = []
    reader = threading.Thread(target=lambda: got.extend(batches))
    reader.start()
    until_s = time.monotonic() + 60
    while not loader.places and time.monotonic() < until_s:
        time.sleep(0.05)
    sent.send(as_json(8), as_json(9))
    reader.join(60)
    assert sorted(users(got)) == [8, 9]
    later = sent.loader(2, stream={"begin": "latest"}, max_examples=4)
    later.places = {"0": (2, 0), "1": (2, 0), "2": (2, 0)}  # "3" was not there
    assert sorted(users(list(later))) == [3, 7, 8, 9]


def test_partitions_that_are_added_are_read(sent: Sent, monkeypatch: pytest.MonkeyPatch):
    """Three ranks: the fourth partition is the first one's, and rank 2 begins with none."""
    sent.send(*(as_json(n) for n in range(8)))
    now, found = KafkaFeed._numbers, []

    def numbers(feed: KafkaFeed, timeout_s: float) -> list[int]:
        found.append(feed)
        return [0, 1] if len(found) == 1 else now(feed, timeout_s)

    silent: list[float] = [0, False, True, False]
    monkeypatch.setattr("shoal.data.kafka._LOOK_S", 0.0)
    monkeypatch.setattr(KafkaFeed, "_numbers", numbers)
    for rank, wanted in enumerate([[0, 3, 4, 7], [1, 5], [2, 6]]):
        found.clear()
        # All that others take, which this test leaves out.
        share, stream = RankShare(rank, 3), {"wait_s": 0.2}
        loader = sent.loader(6, share=share, stream=stream, max_examples=len(wanted))
        loader.agree = lambda mine, own=rank: [mine if n == own else silent for n in range(3)]
        batches = list(loader)
        assert sorted(users(batches)) == wanted
        assert loader.places == {str(n): (2, 0) for n in range(rank, 4, 3)}


class Late:
    """A consumer whose brokers do not say in time where a partition begins; the first time."""

    def __init__(self, consumer: Any) -> None:
        self._consumer, self._asked = consumer, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    def get_watermark_offsets(self, *args: Any, **options: Any) -> Any:
        before, self._asked = self._asked, True
        return self._consumer.get_watermark_offsets(*args, **options) if before else None


def test_a_partition_that_is_added_waits_for_where_it_begins(
    sent: Sent, monkeypatch: pytest.MonkeyPatch
):
    sent.send(*(as_json(n) for n in range(4)))
    monkeypatch.setattr("shoal.data.kafka._LOOK_S", 0.0)
    feed = sent.loader().feed
    assert isinstance(feed, KafkaFeed)
    with monkeypatch.context() as patched:
        patched.setattr(KafkaFeed, "_numbers", lambda *_: [0, 1, 2])
        assert list(feed.start(RankShare(), {})) == ["0", "1", "2"]
    numbers = KafkaFeed._numbers
    monkeypatch.setattr(KafkaFeed, "_numbers", lambda feed, _: numbers(feed, 60.0))
    feed._consumer = Late(feed._consumer)
    assert [feed.added(), feed.added(), feed.added()] == [{}, {"3": (0, 0)}, {}]
    feed.close()


@pytest.mark.parametrize("least", [1, 2])
def test_a_silent_stream_pauses_as_often_as_it_is_asked_to(sent: Sent, least: int):
    """Whatever came that is too little for a batch waits."""
    sent.send(*(as_json(n) for n in range(3 + least)), partition=0)
    loader = sent.loader(4, stream={"wait_s": 0.2}, least=least)
    read, asked = loader.feed.read, [True, True]

    def reads(most: int, _: float) -> Any:
        loader.feed.read = read  # type: ignore[method-assign]
        return read(most, 60.0)  # all of the first batch, however slow the brokers are

    def asks() -> bool:
        if not asked:
            loader.stop()
        return bool(asked) and asked.pop()

    loader.asks_pause = asks
    loader.feed.read = reads  # type: ignore[method-assign]
    batches = list(loader)
    assert [batch.pauses for batch in batches] == [False, True, True]
    assert {batch.position for batch in batches} == {4}
    assert all(batch.places == loader.places for batch in batches)
    assert users(batches) == [0, 1, 2, 3]


def test_a_rank_without_examples_pauses_the_others_once_they_have_none(sent: Sent):
    sent.send(*(as_json(n) for n in range(12)), partition=1)
    loaders = [
        sent.loader(4, share=RankShare(rank, 2), stream={"wait_s": 0.2}) for rank in range(2)
    ]
    paused: list[int] = []
    loaders[0].asks_pause = lambda: not paused

    def look(batch: Batch) -> None:
        if batch.pauses:
            paused.append(batch.position)
        if paused and batch.position == 12:
            loaders[0].stop()

    first, second = on_ranks(loaders, 0, None, look)
    assert [batch.pauses for batch in first] == [batch.pauses for batch in second]
    assert any(batch.pauses for batch in first)
    assert sorted(users(second)) == list(range(12))
    assert not first[0].pauses and first[-1].position == 12


def test_a_stream_ends_after_so_many_examples_or_when_told(sent: Sent):
    sent.send(*(as_json(n) for n in range(20)), partition=1)
    loader = sent.loader(4, max_examples=10)
    batches = list(loader)
    assert [batch.labels.numel() for batch in batches] == [4, 4, 2]
    assert batches[-1].places is not None and batches[-1].places["1"] == (10, 0)
    told = sent.loader(4)
    endless = told.batches()
    first = [next(endless) for _ in range(5)]
    told.stop()
    assert users(first + list(endless)) == list(range(20))


def test_gone_records_and_unknown_topics_are_refused(sent: Sent, mock: Brokers):
    sent.send(as_json(0), partition=0)
    loader = sent.loader()
    loader.places = {"0": (5, 0)}
    with pytest.raises(DataError, match=r"offset 5; allowed: 0\.\.1"):
        next(loader.batches())
    with pytest.raises(ConfigError, match=r"topic 'other'"):
        next(sent.loader(stream={"topic": "other"}).batches())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"servers": ()}, "servers"),
        ({"wait_s": 0.0}, "wait_s"),
        ({"columns": ("u",)}, "columns"),
        ({"format": "csv"}, "columns"),
        ({"options": (("enable.auto.commit", True),)}, "options"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        Kafka(**{"servers": ("h:1",), "topic": TOPIC, **wrong})


@pytest.mark.parametrize("option", [("no.such", "1"), ("sasl.password", "@/no/such/file")])
def test_options_that_librdkafka_refuses(mock: Brokers, option: tuple[str, str]):
    loader = Sent(mock).loader(stream={"options": (option,)})
    with pytest.raises(ConfigError, match="option"):
        next(loader.batches())


def test_a_stream_that_is_idle_ends(sent: Sent):
    sent.send(*(as_json(n) for n in range(5)), partition=1)
    loader, found = sent.loader(4, stream={"wait_s": 0.2}), []
    for batch in loader:
        found += users([batch])
        if len(found) == 5:
            loader._idle_s = 1.0
    assert found == list(range(5))


@pytest.mark.slow
def test_lost_brokers_are_waited_for_and_reported(caplog: pytest.LogCaptureFixture):
    own = Brokers()
    sent = Sent(own)
    sent.send(*(as_json(n) for n in range(4)), partition=0)
    loader = sent.loader(4, stream={"wait_s": 0.2})
    batches = loader.batches()
    begun = users([next(batches)])
    while len(begun) < 4:
        begun += users([next(batches)])
    got: list[Batch] = []
    reader = threading.Thread(target=lambda: got.extend(batches))
    with caplog.at_level(logging.WARNING, logger="shoal.data"):
        own.stop()
        reader.start()
        until_s = time.monotonic() + 60
        while not loader.feed.lost and time.monotonic() < until_s:
            time.sleep(0.05)
        assert loader.feed.lost
        time.sleep(1.0)
        loader._idle_s = 3.0
        time.sleep(4.0)
        assert reader.is_alive(), "an outage is no end of a stream"
    loader.stop()
    reader.join(60)
    assert not reader.is_alive() and not got
    assert any("waiting, and asking again in" in one.message for one in caplog.records)


def numbers(count: int) -> TensorSource:
    ids = torch.arange(count)
    return TensorSource({"u": ids}, (ids % 2).float(), times_s=START_S + ids.flip(0))


def test_a_replay_gives_each_example_once_it_is_due(monkeypatch: pytest.MonkeyPatch):
    now = [1000.0]

    class Clock:
        monotonic = staticmethod(lambda: now[0])

        @staticmethod
        def time() -> float:
            return now[0]

        @staticmethod
        def sleep(seconds: float) -> None:
            now[0] += seconds

    monkeypatch.setattr("shoal.data.streams.time", Clock)
    for settings, last in (
        ({"speed": 10.0}, 1000 + 99 / 10),
        ({"rate": 4.0}, 1000 + 99 / 4),
        ({"speed": 10.0, "since_s": START_S - 100.0, "clock_s": 990.0}, 990 + 199 / 10),
        ({}, 1000.0),
    ):
        now[0] = 1000.0
        loader = StreamLoader(Replay(numbers(100), **settings), 8, wait_s=float("inf"))
        batches = list(loader._batches(0))
        assert users(batches) == list(range(99, -1, -1)), "in order of time"
        assert [batch.labels.numel() for batch in batches] == [8] * 12 + [4]
        assert now[0] == pytest.approx(last, abs=1e-3)


def test_a_replay_continues_on_other_ranks():
    seen: list[int] = []
    places: dict[str, tuple[int, int]] = {}
    position = 0
    for ranks, most in ((2, 5), (7, 3), (3, None)):
        loaders = [
            StreamLoader(
                Replay(numbers(1000)), 30, share=RankShare(rank, ranks), wait_s=float("inf")
            )
            for rank in range(ranks)
        ]
        for loader in loaders:
            loader.places = dict(places)
        used = [batches[:most] for batches in on_ranks(loaders, position, most)]
        position = used[0][-1].position
        seen += [n for batches in used for n in users(batches)]
        for batches in used:
            places.update(batches[-1].places or {})
    assert sorted(seen) == list(range(1000))


def test_a_batch_has_as_many_examples_as_batch_normalisation_needs():
    loader = StreamLoader(Replay(numbers(9)), 4, least=2, wait_s=float("inf"))
    assert [batch.labels.numel() for batch in loader] == [4, 4]
    assert loader.emptied == 1
    with pytest.raises(ConfigError, match="batch_size"):
        StreamLoader(Replay(numbers(9)), 1, least=2)
