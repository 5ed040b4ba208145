"""What Faust does not hand over is handled all the same, before what comes after it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Container, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from kafka import KafkaProducer
from prometheus_client import CollectorRegistry

from solaris.app_batches import BATCH_RECORDS, Batches
from solaris.app_watch import Watch
from solaris.metrics import WorkerMetrics
from streams.log import LogUnavailable, Record
from streams.log.kafka import KafkaLog
from streams.log.kafka_client import topic_specs

PARTITIONS = 2


class Collector:
    """A worker that keeps what it is given."""

    def __init__(self) -> None:
        self.metrics, self.batches = WorkerMetrics(), list[list[int]]()

    def handle(self, records: Sequence[Record]) -> None:
        self.batches.append([int(record.offset.split(":")[1]) for record in records])

    def drain(self) -> None:
        """Nothing waits."""


class Everything:
    """All partitions."""

    def __contains__(self, _: object) -> bool:
        return True


class App:
    """As much of a Faust app as a batch needs: the generation, and commits, which are kept."""

    def __init__(self) -> None:
        self.consumer_generation_id, self.commits, self.consumer = 1, list[dict[tuple[str, int], int]](), self
        self.ours: Container[Any] = Everything()

    def assignment(self) -> Container[Any]:
        return self.ours

    async def _commit(self, offsets: dict[Any, int]) -> bool:
        self.commits.append({(place.topic, place.partition): offset for place, offset in offsets.items()})
        return True


@pytest.fixture
def log(kafka_address: str, unique: str) -> Iterator[KafkaLog]:
    with KafkaLog(kafka_address) as opened:
        opened.ensure_topics(topic_specs(PARTITIONS, [unique]))
        yield opened


class Handed:
    """Batches of one topic, handed over as Faust would."""

    def __init__(self, log: KafkaLog, topic: str) -> None:
        self.worker, self.app, self.topic = Collector(), App(), topic
        self.watch = Watch(log, topic, [topic], CollectorRegistry())
        self._batches = Batches(self.worker, log, topic, [topic], threading.Event(), self.watch)

    def hand(self, offsets: Sequence[int], generation: int | None = None) -> None:
        generation = self.app.consumer_generation_id if generation is None else generation
        events = [SimpleNamespace(message=self._message(offset, generation)) for offset in offsets]

        async def run() -> None:
            await self._batches.handle(self.app, events)
            await self._batches.finish()

        asyncio.run(run())

    def _message(self, offset: int, generation: int) -> Any:
        value = b"%d" % offset
        return SimpleNamespace(
            topic=self.topic, partition=0, offset=offset, key=b"k", value=value, generation_id=generation
        )

    @property
    def skipped(self) -> float:
        return float(self.watch.errors.labels("skipped")._value.get())


def fill(kafka_address: str, topic: str, number: int, **options: Any) -> None:
    producer = KafkaProducer(bootstrap_servers=kafka_address, **options)
    if options:
        producer.init_transactions()
        producer.begin_transaction()
    for _ in range(number):
        producer.send(topic, key=b"k", value=b"v", partition=0)
    if options:
        producer.commit_transaction()
    producer.close()


def test_a_gap_is_read_from_the_broker_and_handled_first(log: KafkaLog, kafka_address: str, unique: str) -> None:
    fill(kafka_address, unique, 1_000)
    handed = Handed(log, unique)
    handed.hand([3, 4])  # the group has committed nothing
    handed.hand([5, 6, 8])
    handed.hand([7, 8, 9])  # again, and late
    handed.hand([900], generation=0)  # void
    handed.hand([999])
    slices = [list(range(10, 10 + BATCH_RECORDS)), list(range(10 + BATCH_RECORDS, 1_000))]  # however much was skipped
    assert handed.worker.batches == [list(range(5)), [5, 6, 7, 8], [7, 8, 9], *slices]
    assert handed.app.commits == [{(unique, 0): offset} for offset in (5, 9, 10, 1_000)]
    assert handed.skipped == 3 + 1 + 989


def test_a_new_generation_goes_on_where_the_group_has_committed(
    log: KafkaLog, kafka_address: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(kafka_address, unique, 40)
    reached, answers = [0], [LogUnavailable("away")]

    def positions(topic: str, group: str) -> dict[int, tuple[int, int]]:
        if answers:
            raise answers.pop()
        return {0: (reached[0], 40), 1: (0, 0)}

    monkeypatch.setattr(log, "positions", positions)
    handed = Handed(log, unique)
    handed.hand([0, 1])
    handed.app.consumer_generation_id, reached[0] = 2, 20  # others were at work
    handed.hand([20, 21])
    handed.app.consumer_generation_id = 3
    handed.hand([22])
    assert handed.worker.batches == [[0, 1], [20, 21], [20, 21, 22]] and handed.skipped == 2


def test_partitions_that_have_gone_to_another_worker_are_not_committed(
    log: KafkaLog, kafka_address: str, unique: str
) -> None:
    fill(kafka_address, unique, 10)
    handed = Handed(log, unique)
    handed.app.ours = ()  # taken away while the batch was in hand
    handed.hand([0, 1])
    assert handed.worker.batches == [[0, 1]] and handed.app.commits == []
    assert handed.watch.errors.labels("commit")._value.get() == 1


def test_offsets_without_a_record_are_no_gap(log: KafkaLog, kafka_address: str, unique: str) -> None:
    for _ in range(3):
        fill(kafka_address, unique, 2, transactional_id=unique)  # 2 records, and one offset for the transaction's end
    handed = Handed(log, unique)
    handed.hand([0, 1, 3, 4, 6, 7])
    assert handed.worker.batches == [[0, 1, 3, 4, 6, 7]] and handed.skipped == 0


def test_reading_is_bounded(log: KafkaLog, kafka_address: str, unique: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(kafka_address, unique, 5)
    assert [record.offset for record in log.read(unique, 0, 1, 4)] == ["0:1", "0:2", "0:3"]
    monkeypatch.setattr("streams.log.kafka.READ_TIMEOUT_S", 0.5)
    with pytest.raises(LogUnavailable, match="nothing at offset 9 of partition 0"):
        log.read(unique, 0, 1, 9)
    monkeypatch.setattr("streams.log.kafka.CONNECT_TIMEOUT_S", 0.3)
    with pytest.raises(LogUnavailable, match="read t: "):
        KafkaLog("127.0.0.1:1").read("t", 0, 0, 1)
