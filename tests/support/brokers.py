"""Kafka brokers for tests: librdkafka's own, in this process."""

from __future__ import annotations

from typing import Any

import confluent_kafka as kafka


class Brokers:
    """Mock brokers on loopback; topics have four partitions, and records stay in memory."""

    def __init__(self, count: int = 3) -> None:
        options = {"test.mock.num.brokers": count, "bootstrap.servers": "mock", "log_level": 0}
        self._producer: Any = kafka.Producer(options)
        found = self._producer.list_topics(timeout=60).brokers.values()
        self.servers = tuple(f"{one.host}:{one.port}" for one in found)

    def send(self, topic: str, value: bytes | None, partition: int, *, at_s: int = 0) -> None:
        """Write a record."""
        more = {"timestamp": 1000 * at_s} if at_s else {}
        self._producer.produce(topic, value, partition=partition, **more)

    def flush(self) -> None:
        """Wait until all are written."""
        assert self._producer.flush(60) == 0

    def stop(self) -> None:
        """End the brokers; the records are gone."""
        self._producer = None
