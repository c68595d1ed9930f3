"""A Kafka topic as a stream of examples: records decoded, bad ones named, offsets kept by the run.

Offsets are in the run's checkpoints and nowhere else: nothing is committed to Kafka, and partitions
are shared out by rank, not by a consumer group. A record is an example in JSON or CSV, or any
number of them in Arrow's IPC stream format; columns become features as those of files do.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from shoal.data.batch import TensorSource, join
from shoal.data.columns import Rows, is_text, parsed
from shoal.data.features import Recipe, encode
from shoal.data.loader import RankShare, require
from shoal.data.quarantine import BadRow, Quarantine, sort_out
from shoal.data.sources import check_same_columns
from shoal.data.streams import Place, StreamPart
from shoal.errors import ConfigError, DataError, no_package

if TYPE_CHECKING:
    import pyarrow as pa

_log = logging.getLogger("shoal.data")

Got = TypeVar("Got")

_TIME = "timestamp of the record"
_ASK_S = 10.0
_LONGEST_WAIT_S = 60.0
_LOOK_S = 30.0  # between two looks for partitions that were added
_OWN = ("bootstrap.servers", "enable.auto.commit", "auto.offset.reset", "error_cb", "logger")
_MOST_TOLD = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Kafka:
    """Where a stream comes from, and how long it is waited for.

    Args:
        servers: HOST:PORT of one or more brokers.
        topic: its name.
        format: of records: "json", an object each; "csv", a line each, without a header; "arrow",
            an IPC stream each.
        columns: names of a CSV line's values.
        begin: where a new run begins: with all that the topic still has, or with what comes next.
        wait_s: a batch that is not full trains after so long.
        idle_s: the run ends when nothing has come for so long; None: it does not.
        most_ahead_s: a record whose event time is so far ahead of this machine's clock is bad: it
            would make rows expire; None: none is.
        options: of librdkafka, such as security.protocol. A value "@FILE" is what the file holds.

    Raises:
        ConfigError: no servers, a value out of range, columns where they mean nothing, or an
            option that would lose offsets.
    """

    servers: tuple[str, ...]
    topic: str
    format: Literal["json", "csv", "arrow"] = "json"
    columns: tuple[str, ...] = ()
    begin: Literal["earliest", "latest"] = "earliest"
    wait_s: float = 1.0
    idle_s: float | None = None
    most_ahead_s: float | None = 86_400.0
    options: tuple[tuple[str, str | int | float | bool], ...] = ()

    def __post_init__(self) -> None:
        require("servers", self.servers, bool(self.servers), "HOST:PORT of one or more")
        require("topic", self.topic, bool(self.topic), "a name")
        for name in ("wait_s", "idle_s", "most_ahead_s"):
            value = getattr(self, name)
            require(name, value, value is None or 0 < value <= 1e8, "above 0, up to 1e8")
        named = bool(self.columns) == (self.format == "csv")
        require("columns", self.columns, named, "names of the values of CSV lines, for those only")
        own = [name for name, _ in self.options if name in _OWN]
        require("options", own, not own, f"others than {', '.join(_OWN)}")


class KafkaFeed:
    """Examples of a topic; a `Feed`.

    Args:
        settings: where they come from.
        recipe: which columns are what; without a time column the time of the record is the event's.
        quarantine: where bad records go; None: they are errors.
        group: the client's name, in logs of brokers.

    Attributes:
        stopping: set, nothing is waited for any more.
        drifted: records whose columns are not those of the first.

    Raises:
        ConfigError: columns of the recipe that no CSV line has.
    """

    ended = False
    size: int | None = None

    def __init__(
        self, settings: Kafka, recipe: Recipe, quarantine: Quarantine | None, group: str = "shoal"
    ) -> None:
        self._settings, self._group = settings, group
        self._recipe = recipe if recipe.time else replace(recipe, time=_TIME)
        self._quarantine = quarantine
        if settings.columns:
            missing = sorted(set(recipe.columns) - set(settings.columns))
            require("columns", settings.columns, not missing, f"with {missing}")
        self.features, self.num_dense = recipe.features, recipe.num_dense
        self.stopping = threading.Event()
        self.drifted = 0
        self._told: set[str] = set()
        self._columns: frozenset[str] | None = None
        self._schema: pa.Schema | None = None
        self._consumer: Any = None
        self._rows_done: dict[int, Place] = {}
        self._lost_s: float | None = None
        self._ask_again_s = self._wait_s = 0.0
        self._error: DataError | None = None
        self._share = RankShare()
        self._read: set[int] = set()  # partitions
        self._look_s = 0.0
        self._bad: dict[int, list[int]] = defaultdict(list)  # offsets by partition, ascending
        self._bad_before = 0

    @property
    def lost(self) -> bool:
        """Whether no broker answers."""
        return self._lost_s is not None

    def start(self, share: RankShare, places: Mapping[str, Place]) -> dict[str, Place]:
        """Connect, however long that takes, and begin to read; as `Feed`.

        Raises:
            ConfigError: no confluent-kafka, an option that librdkafka refuses, or no such topic.
            DataError: records between `places` and what the topic still has are gone.
        """
        self._consumer, kafka = self._connected()
        topic, self._share, self._read = self._settings.topic, share, set()
        own: dict[str, Place] = {}
        nobody: list[int] = []
        known = self._patiently(partial(self._numbers, _ASK_S), nobody)
        for number in known[share.rank :: share.world_size]:
            at = kafka.TopicPartition(topic, number)
            limits = self._patiently(partial(self._limits, at), None)
            if limits is None:  # stopped before it began
                return dict(places)
            own[str(number)] = self._beginning(str(number), limits, places)
        self._rows_done = {int(name): place for name, place in own.items() if place[1]}
        self._read, self._look_s = {int(name) for name in own}, time.monotonic() + _LOOK_S
        self._consumer.assign(
            [kafka.TopicPartition(topic, int(name), offset) for name, (offset, _) in own.items()]
        )
        return own

    def _numbers(self, timeout_s: float) -> list[int]:
        """Of the topic's partitions."""
        from confluent_kafka import KafkaError, KafkaException

        topic = self._settings.topic
        found = self._consumer.list_topics(topic, timeout=timeout_s).topics[topic]
        if found.error is None:
            return sorted(found.partitions)
        refused = KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_EXCEPTION
        if found.error.code() not in (*refused, KafkaError.TOPIC_AUTHORIZATION_FAILED):
            raise KafkaException(found.error)  # no leader yet, say
        allowed, remedy = "one of the brokers", "Create it, or change the name."
        raise ConfigError(f"topic {topic!r}", found.error.str(), allowed, remedy)

    def added(self) -> dict[str, Place]:
        """Partitions that were added since, from their first record on; looks now and then.

        Raises:
            ConfigError: the topic is gone.
        """
        from confluent_kafka import KafkaException, TopicPartition

        if self.lost or self.stopping.is_set() or time.monotonic() < self._look_s:
            return {}
        self._look_s = time.monotonic() + _LOOK_S
        found: dict[str, Place] = {}
        try:
            for number in self._numbers(1.0)[self._share.rank :: self._share.world_size]:
                if number not in self._read:
                    at = TopicPartition(self._settings.topic, number)
                    at.offset, _ = self._limits(at)
                    self._consumer.incremental_assign([at])
                    self._read.add(number)
                    found[str(number)] = at.offset, 0
        except KafkaException as error:
            _log.warning("partitions of %s: %s; asking again", self._settings.topic, error.args[0])
        if found:
            _log.info("partitions that were added to %s: %s", self._settings.topic, list(found))
        return found

    def left_out(self, places: Mapping[str, Place]) -> int:
        """Bad records ahead of these places, with those of processes before."""
        # The reading thread adds partitions, and places may be from before one was added.
        found = list(self._bad.items())
        ahead = (bisect_left(bad, places.get(str(n), (0, 0))[0]) for n, bad in found)
        return self._bad_before + sum(ahead)

    def continues(self, left_out: int) -> None:
        """Count this many bad records as those of processes before."""
        self._bad_before = left_out
        if self._quarantine is not None:
            self._quarantine.rows += left_out

    def _limits(self, partition: Any) -> tuple[int, int]:
        from confluent_kafka import KafkaError, KafkaException

        found: tuple[int, int] | None
        found = self._consumer.get_watermark_offsets(partition, timeout=_ASK_S)
        if found is None:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return found

    def _connected(self) -> tuple[Any, Any]:
        try:
            import confluent_kafka as kafka
        except ImportError as error:
            raise no_package("data.source kafka", "confluent_kafka", "kafka") from error
        options = {name: _value(value) for name, value in self._settings.options}
        settings = {
            "group.id": self._group,
            "client.id": self._group,
            "log_level": 2,  # what it means for the run is logged here
            "queued.max.messages.kbytes": 16_384,
            **options,
            "bootstrap.servers": ",".join(self._settings.servers),
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "error_cb": self._noticed,
        }
        try:
            return kafka.Consumer(settings), kafka
        except (kafka.KafkaException, ValueError, TypeError) as error:
            remedy = "Change data.source.stream.options."
            raise ConfigError("options of a stream", str(error), "librdkafka's", remedy) from error

    def _beginning(self, name: str, limits: tuple[int, int], places: Mapping[str, Place]) -> Place:
        low, high = limits
        if name not in places:
            # One that was added later begins with its first record, whatever `begin` says.
            return (high if self._settings.begin == "latest" and not places else low), 0
        offset, _ = places[name]
        if not low <= offset <= high:
            raise DataError(
                f"records of {self._settings.topic}/{name} that the run continues with",
                got=f"offset {offset}",
                allowed=f"{low}..{high}, which the topic has",
                remedy="Start a new run (checkpoint.warm_start takes its models over), and have "
                "the topic keep records for longer than a run may be down.",
            )
        return places[name]

    def read(self, most: int, timeout_s: float) -> StreamPart | None:
        """Examples that have come; as `Feed`.

        Raises:
            DataError: a bad record without a quarantine, or too many with one; records that the
                topic no longer has; or an error that waiting does not cure.
        """
        messages = self._consumer.consume(min(most, 10_000), timeout=timeout_s)
        if self._error is not None:
            raise self._error
        failed = [one.error() for one in messages if one.error() is not None]
        for error in failed:
            self._noticed(error, of_record=True)
        messages = [one for one in messages if one.error() is None]
        if messages:
            self._found()
            return self._arrived(messages)
        if self.lost and time.monotonic() >= self._ask_again_s:
            self._ask_again()
        return None

    def _ask_again(self) -> None:
        from confluent_kafka import KafkaException

        try:
            self._consumer.list_topics(self._settings.topic, timeout=1.0)
        except KafkaException as error:
            self._waits(str(error.args[0]))
        else:
            self._found()

    def _patiently(self, ask: Callable[[], Got], otherwise: Got) -> Got:
        """What brokers answer, once they do; `otherwise` if the run stops before."""
        from confluent_kafka import KafkaException

        while not self.stopping.is_set():
            try:
                found = ask()
            except KafkaException as error:
                self._consumer.poll(0)  # hears of errors that waiting does not cure
                if self._error is not None:
                    raise self._error from error
                self._waits(str(error.args[0]))
                self.stopping.wait(self._wait_s)
                continue
            self._found()
            return found
        return otherwise

    def _waits(self, why: str) -> None:
        """Note that nothing answers; the next question waits for twice as long."""
        now_s = time.monotonic()
        if self._lost_s is None:
            self._lost_s, self._wait_s = now_s, 0.5
        self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)
        self._ask_again_s = now_s + self._wait_s
        _log.warning(
            "no broker of %s answers for %.0f s (%s): waiting, and asking again in %.0f s",
            ", ".join(self._settings.servers),
            now_s - self._lost_s,
            why,
            self._wait_s,
        )

    def _found(self) -> None:
        if self._lost_s is not None:
            _log.warning("brokers answer again after %.0f s", time.monotonic() - self._lost_s)
        self._lost_s = None

    def _noticed(self, error: Any, *, of_record: bool = False) -> None:
        """An error that librdkafka reports: of a connection, or in place of a record."""
        from confluent_kafka import KafkaError

        if error.code() == KafkaError._ALL_BROKERS_DOWN:
            if not self.lost:
                self._waits(error.str())
        elif error.code() == KafkaError._AUTO_OFFSET_RESET:
            remedy = "Start a new run; checkpoint.warm_start takes the models of this one over."
            what = f"records of {self._settings.topic} to continue with"
            self._error = DataError(what, error.str(), "some that the topic has", remedy)
        elif error.fatal() or error.code() in (
            KafkaError._AUTHENTICATION,
            KafkaError.TOPIC_AUTHORIZATION_FAILED,
            KafkaError.GROUP_AUTHORIZATION_FAILED,
            KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        ):
            what, remedy = f"stream {self._settings.topic}", "Correct data.source.stream.options."
            self._error = DataError(what, error.str(), "access to the topic", remedy)
        elif error.code() in (
            KafkaError.MSG_SIZE_TOO_LARGE,
            KafkaError.INVALID_MSG,
            KafkaError._BAD_MSG,
            KafkaError._BAD_COMPRESSION,
            KafkaError._NOT_IMPLEMENTED,
        ):
            # librdkafka continues behind such records.
            what = f"records of {self._settings.topic}"
            remedy = "Correct what writes them, or data.source.stream.options."
            self._error = DataError(what, error.str(), "some that can be fetched", remedy)
        elif of_record:
            _log.warning("%s: %s; waiting", self._settings.topic, error.str())

    def _arrived(self, messages: Sequence[Any]) -> StreamPart:
        import pyarrow as pa

        values = [one.value() for one in messages]
        table = pa.table({"record": pa.array(values, pa.large_binary())})

        def make(part: pa.Table, first: int) -> tuple[TensorSource, list[int]]:
            return self._examples(messages[first : first + part.num_rows])

        most = 0 if self._quarantine is None else self._quarantine.most_rows
        found = sort_out(table, make, most)
        for at, bad in found.bad.items():
            self._report(messages[at], bad)
        ends = {str(one.partition()): (one.offset() + 1, 0) for one in messages}
        if not found.parts:
            return StreamPart(self.nothing(), torch.arange(0, device="cpu"), (), ends)
        after: list[tuple[str, Place]] = []
        kept: list[int] = []
        row = 0
        for first, _, (_, sizes) in found.parts:
            for at, size in enumerate(sizes, first):
                partition, offset = messages[at].partition(), messages[at].offset()
                done = self._done_of(partition, offset)
                kept += range(row + done, row + size)
                row += size
                after += [(str(partition), (offset, n)) for n in range(done + 1, size)]
                if size > done:
                    after.append((str(partition), (offset + 1, 0)))
        source = join([part for _, _, (part, _) in found.parts])
        return StreamPart(source, torch.tensor(kept, dtype=torch.int64, device="cpu"), after, ends)

    def _done_of(self, partition: int, offset: int) -> int:
        """Rows of a record that the run had before it continued."""
        place = self._rows_done.pop(partition, None)
        return place[1] if place is not None and place[0] == offset else 0

    def _report(self, message: Any, bad: BadRow) -> None:
        path = Path(self._settings.topic) / str(message.partition())
        if self._quarantine is None:
            remedy = "Correct what writes it, or set data.quarantine to leave such records out."
            what = f"record {message.offset()} of {path}"
            raise DataError(what, bad.reason, "one that can be used", remedy)
        self._bad[message.partition()].append(message.offset())
        self._quarantine.row(path, message.offset(), bad)

    def _examples(self, messages: Sequence[Any]) -> tuple[TensorSource, list[int]]:
        """Examples of records, and how many each holds.

        Raises:
            DataError: one of them is bad; of a single one, its place.
        """
        import pyarrow as pa

        where, first = self._settings.topic, 0
        if len(messages) == 1:
            first = messages[0].offset()
            where = f"{where}/{messages[0].partition()}"
        table, sizes = self._table(messages, Rows(where, first))
        if _TIME in self._recipe.columns:
            stamps = [
                one.timestamp()[1] // 1000
                for one, size in zip(messages, sizes, strict=True)
                for _ in range(size)
            ]
            table = table.append_column(_TIME, pa.array(stamps, pa.int64()))
        spelled = self._settings.format == "csv"
        examples = encode(table, self._recipe, where, first_row=first, spelled=spelled)
        if self._settings.most_ahead_s is not None:
            latest = int(time.time() + self._settings.most_ahead_s)
            ahead_N = examples.times() > latest
            if ahead_N.any():
                row = int(ahead_N.nonzero()[0])
                got, remedy = int(examples.times()[row]), "Correct the clock that stamps it."
                allowed = f"up to {latest}, by this machine's clock"
                raise Rows(where, first).error("event time", row, got, allowed, remedy)
        return examples, sizes

    def _table(self, messages: Sequence[Any], rows: Rows) -> tuple[pa.Table, list[int]]:
        import pyarrow as pa

        values = [one.value() or b"" for one in messages]
        if self._settings.format == "arrow":
            tables = [self._ipc(value, rows) for value in values]
            try:
                return pa.concat_tables(tables), [table.num_rows for table in tables]
            except pa.ArrowInvalid as error:  # each is read alone, then
                raise rows.error("Arrow streams", 0, error, "one schema", _CORRECT) from error
        names = [name for name in self._recipe.columns if name != _TIME]
        read = self._object if self._settings.format == "json" else self._line
        records = [read(value, place, rows) for place, value in enumerate(values)]
        columns = {name: _column(records, name, rows) for name in names}
        time_name = self._recipe.time
        if self._settings.format == "json" and time_name in columns and is_text(columns[time_name]):
            kinds = [pa.timestamp("ns"), pa.timestamp("ns", tz="UTC")]
            allowed = "whole seconds or an ISO 8601 time"
            columns[time_name] = parsed(columns[time_name], time_name, rows, kinds, allowed)
        return pa.table(columns), [1] * len(records)

    def _object(self, value: bytes, place: int, rows: Rows) -> Mapping[str, Any]:
        try:
            found = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise rows.error("JSON", place, error, "an object", _CORRECT) from error
        if not isinstance(found, dict):
            raise rows.error("JSON", place, type(found).__name__, "an object", _CORRECT)
        self._check_columns(found.keys(), place, rows)
        return found

    def _line(self, value: bytes, place: int, rows: Rows) -> Mapping[str, str]:
        names = self._settings.columns
        try:
            text = io.StringIO(value.decode(), newline="")
            lines = list(csv.reader(text, strict=True))
        except (ValueError, csv.Error) as error:
            raise rows.error("CSV", place, error, "a line of UTF-8", _CORRECT) from error
        if len(lines) != 1 or len(lines[0]) != len(names):
            got = f"{len(lines)} lines" if len(lines) != 1 else f"{len(lines[0])} values"
            raise rows.error("CSV", place, got, f"a line of {len(names)} values", _CORRECT)
        return dict(zip(names, lines[0], strict=True))

    def _ipc(self, value: bytes, rows: Rows) -> pa.Table:
        import pyarrow as pa

        try:
            with pa.ipc.open_stream(value) as reader:
                table = reader.read_all()
            table.validate(full=True)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise rows.error("Arrow stream", 0, error, "a whole one", _CORRECT) from error
        if self._quarantine is not None and self._quarantine.same_columns:
            self._schema = self._schema or table.schema
            check_same_columns(Path(rows.where), table.schema, self._schema)
        self._check_columns(table.column_names, 0, rows)
        self._recipe.check_columns([*table.column_names, _TIME], rows.where)
        read = [name for name in self._recipe.columns if name != _TIME]
        return table.select(read)

    def _check_columns(self, names: Iterable[str], place: int, rows: Rows) -> None:
        """Note columns that the first record did not have, or had.

        Raises:
            DataError: there are such, and records must have the same columns.
        """
        own = frozenset(names)
        if self._columns is None:
            if own >= set(self._recipe.columns) - {_TIME}:
                self._columns = own
            return
        if own == self._columns:
            return
        self.drifted += 1
        more, less = sorted(own - self._columns), sorted(self._columns - own)
        got = ", ".join([*(f"{name!r} more" for name in more), *(f"no {name!r}" for name in less)])
        if self._quarantine is not None and self._quarantine.same_columns:
            remedy = "Convert the record, or set data.quarantine.same_columns=false."
            raise rows.error("columns", place, got, "those of the first record", remedy)
        if got not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add(got)
            _log.warning("columns of records of %s changed: %s", self._settings.topic, got)

    def nothing(self) -> TensorSource:
        """Examples of no records."""
        import pyarrow as pa

        table = pa.table({name: pa.nulls(0) for name in self._recipe.columns})
        return encode(table, self._recipe, self._settings.topic)

    def close(self) -> None:
        """Disconnect."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None


_CORRECT = "Correct what writes the records."


def _column(records: Sequence[Mapping[str, Any]], name: str, rows: Rows) -> pa.Array:
    import pyarrow as pa

    try:
        return pa.array([one.get(name) for one in records])
    except (pa.ArrowException, ValueError, OverflowError) as error:
        allowed = "values of one type"
        raise rows.error(f"column {name!r}", 0, error, allowed, _CORRECT) from error


def _value(value: str | float | bool) -> str | float | bool:
    """An option's value; of "@FILE" what the file holds."""
    if not isinstance(value, str) or not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text().strip()
    except OSError as error:
        what, remedy = "option of a stream", "Change the path."
        raise ConfigError(what, f"{value} ({error.strerror})", "@FILE", remedy) from error
