"""The log on a genuine Kafka broker: what goes in comes out, in order, at least once."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from kafka import KafkaAdminClient, KafkaProducer
from kafka.admin import ConfigResource, ConfigResourceType

from streams.events import ACTIVITY_TOPIC
from streams.log import LogUnavailable, Record, Retry
from streams.log.kafka import KafkaLog, TopicMismatchError
from streams.log.kafka_client import MAX_RECORD_BYTES, KafkaSecurity, TopicSpec, servers, topic_specs
from tests.streams.test_log_valkey import Collector, wait_until

DEADLINE_S = 40.0
HOUR_MS = 3_600_000


@contextmanager
def consuming(log: KafkaLog, topics: Sequence[str], handler: Callable[..., None], **options: Any) -> Iterator[None]:
    """A consumer in a thread, which has to end without error."""
    stop, errors = threading.Event(), []
    arguments: dict[str, Any] = {"group": "g", "consumer": "one"} | options
    group = arguments.pop("group")

    def run() -> None:
        try:
            log.consume(topics, group, handler, stop=stop, **arguments)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(DEADLINE_S)
        assert not thread.is_alive() and not errors, errors


@pytest.fixture
def log(kafka_address: str) -> Iterator[KafkaLog]:
    with KafkaLog(kafka_address) as opened:
        yield opened


@pytest.fixture
def topic(log: KafkaLog, unique: str) -> str:
    """A topic of 4 partitions, with its rejected topic. Its name is also that of the group."""
    log.ensure_topics([TopicSpec(unique, 4, HOUR_MS), TopicSpec(f"{unique}.rejected", 1, HOUR_MS)])
    return unique


def caught_up(log: KafkaLog, topic: str) -> Callable[[], bool]:
    return lambda: log.lag(topic, topic) == 0


def test_records_come_in_order_of_their_user_with_their_bytes(log: KafkaLog, topic: str) -> None:
    seen = Collector()
    records = [("", b""), ("ключ", b"\xff\x00\n"), *((f"user{i % 37}", b"%d" % i) for i in range(3_000))]
    log.publish(topic, *records[0])
    log.publish_many(topic, records[1:])
    log.publish_many(topic, [])
    assert (log.published(topic), log.lag(topic, topic)) == (len(records), len(records))
    with consuming(log, [topic], seen, group=topic):
        wait_until(caught_up(log, topic), DEADLINE_S)
    partitions: dict[str, set[str]] = {}
    for record in seen.records:
        partitions.setdefault(record.key, set()).add(record.offset.split(":")[0])
    assert all(len(found) == 1 for found in partitions.values())
    assert len(set.union(*partitions.values())) == 4
    for key in partitions:
        assert [r.value for r in seen.records if r.key == key] == [value for k, value in records if k == key]
    assert len({record.offset for record in seen.records}) == len(records) == len(seen.records)
    assert (log.published(topic), log.lag(topic, topic), log.lag(topic, "another")) == (3_002, 0, 3_002)


def test_topics_come_in_their_order_within_a_batch(log: KafkaLog, topic: str, unique: str) -> None:
    seen, other = Collector(), f"{unique}.other"
    log.ensure_topics([TopicSpec(other, 4, HOUR_MS)])
    for name in (topic, other):
        log.publish_many(name, [(str(i), b"%d" % i) for i in range(50)])
    with consuming(log, [other, topic], seen, group=topic, max_records=1000):
        wait_until(lambda: log.lag(topic, topic) + log.lag(other, topic) == 0, DEADLINE_S)
    for batch in seen.batches:
        assert [r.topic for r in batch] == sorted((r.topic for r in batch), key=[other, topic].index)


def test_topics_are_made_as_stated(log: KafkaLog, kafka_address: str, unique: str) -> None:
    plain, compact = TopicSpec(f"{unique}.a", 3, 5_000_000), TopicSpec(f"{unique}.b", 2, 1, compact=True)
    log.ensure_topics([plain, compact])
    log.ensure_topics([plain, compact])
    admin = KafkaAdminClient(bootstrap_servers=kafka_address)
    found = {topic["name"]: len(topic["partitions"]) for topic in admin.describe_topics([plain.name, compact.name])}
    assert found == {plain.name: 3, compact.name: 2}
    settings = json.dumps(
        admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name) for name in (plain.name, compact.name)]),
        default=str,
    )
    assert "5000000" in settings and "compact" in settings and str(MAX_RECORD_BYTES) in settings
    admin.close()
    with pytest.raises(TopicMismatchError, match=rf"{unique}.a has 3 partitions, expected 4"):
        log.ensure_topics([TopicSpec(f"{unique}.a", 4, 5_000_000)])
    assert [(spec.name, spec.partitions) for spec in topic_specs(8)] == [
        (ACTIVITY_TOPIC, 8),
        ("served", 8),
        ("activity.rejected", 1),
        ("served.rejected", 1),
    ]


def test_what_no_handler_takes_is_put_aside_and_the_stream_goes_on(log: KafkaLog, topic: str) -> None:
    seen, rejected, large = Collector(), Collector(), b"\x01poison\xff" * (MAX_RECORD_BYTES // 9)

    def handler(records: Sequence[Record]) -> None:
        for record in records:
            if b"poison" in record.value:
                raise ValueError(f"bad {record.key}")
        seen(records)

    log.publish_many(topic, [("a", b"1"), ("b", b"poison"), ("c", b"3"), ("d", large), ("e", b"5")])
    with consuming(log, [topic], handler, group=topic):
        wait_until(caught_up(log, topic), DEADLINE_S)
    assert sorted(seen.values) == [b"1", b"3", b"5"] and log.rejected == {topic: 2}
    with consuming(log, [f"{topic}.rejected"], rejected, group=topic):
        wait_until(lambda: len(rejected.records) == 2, DEADLINE_S)
    text, binary = (json.loads(value) for value in sorted(rejected.values, key=len))
    assert abs(text.pop("time_ms") - time.time() * 1000) < 600_000
    assert text == {"topic": topic, "key": "b", "value": "poison", "encoding": "utf-8", "reason": "ValueError: bad b"}
    assert (binary["encoding"], base64.b64decode(binary["value"])) == ("base64", large)


def test_nothing_is_committed_before_the_handler_returns(log: KafkaLog, topic: str) -> None:
    seen, outages = Collector(), [Retry("store")] * 3
    log.publish_many(topic, [(str(i), b"%d" % i) for i in range(50)])

    def dies(records: Sequence[Record]) -> None:
        seen(records)
        raise SystemExit  # ends the consumer between the handler's work and the commit

    with pytest.raises(SystemExit):
        log.consume([topic], topic, dies, consumer="one", stop=threading.Event())
    assert seen.records and log.lag(topic, topic) == 50

    def passing(records: Sequence[Record]) -> None:
        assert log.lag(topic, topic) == 50
        if outages:
            raise outages.pop()
        again(records)

    again = Collector()
    with consuming(log, [topic], passing, group=topic, consumer="two"):
        wait_until(caught_up(log, topic), DEADLINE_S)
    assert sorted(map(int, again.values)) == list(range(50)) and not outages and not log.rejected


def test_consumers_share_the_partitions_and_take_over(log: KafkaLog, topic: str) -> None:
    one, two = Collector(), Collector()

    def slow(records: Sequence[Record]) -> None:
        time.sleep(0.02)  # batches are in hand when the other one joins or leaves
        one(records)

    records = [(str(i % 40), b"%d" % i) for i in range(600)]
    with consuming(log, [topic], slow, group=topic, consumer="one", max_records=10):
        log.publish_many(topic, records[:300])
        with consuming(log, [topic], two, group=topic, consumer="two", max_records=10):
            for at in range(300, len(records), 10):
                log.publish_many(topic, records[at : at + 10])
                time.sleep(0.1)
            wait_until(lambda: len(two.records) > 0, DEADLINE_S)
            wait_until(caught_up(log, topic), DEADLINE_S)
    # Both may have had a record around a rebalance, but none had them out of order, or lost one.
    assert {r.value for r in one.records + two.records} == {value for _, value in records}
    for seen in (one, two):
        for key in {r.key for r in seen.records}:
            places = [int(r.value) for r in seen.records if r.key == key]
            first = list(dict.fromkeys(places))
            assert first == sorted(first)


def test_messages_of_foreign_producers_reach_the_handler(log: KafkaLog, topic: str, kafka_address: str) -> None:
    seen = Collector()
    producer = KafkaProducer(bootstrap_servers=kafka_address)
    producer.send(topic, key=None, value=b"1")
    producer.send(topic, key=b"\xff", value=None)
    producer.close()
    with consuming(log, [topic], seen, group=topic):
        wait_until(lambda: len(seen.records) == 2, DEADLINE_S)
    assert {(record.key, record.value) for record in seen.records} == {("", b"1"), ("\ufffd", b"")}


def test_the_newest_records_are_read_outside_of_any_group(log: KafkaLog, topic: str) -> None:
    assert log.newest("no-such-topic", 3) == []
    assert log.newest(topic, 3) == []
    log.publish_many(topic, [(f"u{i % 7}", b"%d" % i) for i in range(200)])
    found = log.newest(topic, 3)
    values = [int(record.value) for record in found]
    assert 3 < len(found) <= 12 and len(set(values)) == len(values)
    newest = {f"u{i % 7}": i for i in range(200)}
    by_key = {record.key: int(record.value) for record in found}
    assert all(newest[key] == value for key, value in by_key.items()), "the last of each key that is there"
    assert 199 in values
    assert log.lag(topic, topic) == 200


def test_errors_name_what_is_wrong(log: KafkaLog, topic: str) -> None:
    with pytest.raises(ValueError, match=f"publish to {topic}"):
        log.publish(topic, "k", b"x" * (MAX_RECORD_BYTES + 1_000))
    with pytest.raises(LogUnavailable, match="publish to absent"):
        log.publish("absent", "k", b"1")
    assert (log.published("absent"), log.lag("absent", "g")) == (0, 0)
    log.publish(topic, "k", b"1")
    stop = threading.Event()
    for topics in ([], [topic, topic]):
        with pytest.raises(ValueError, match="expected one or more different ones"):
            log.consume(topics, "g", Collector(), consumer="c", stop=stop)
    with pytest.raises(ValueError, match="max_records is 0"):
        log.consume([topic], "g", Collector(), consumer="c", stop=stop, max_records=0)


def test_addresses_and_security() -> None:
    assert servers(" a:1, b:2,") == servers(["a:1", "b:2"]) == ["a:1", "b:2"]
    with pytest.raises(ValueError, match="no Kafka bootstrap servers"):
        KafkaLog(" ")
    with pytest.raises(ValueError, match="legal values: PLAINTEXT"):
        KafkaSecurity("TLS")
    with pytest.raises(ValueError, match="needs a mechanism"):
        KafkaSecurity("SASL_SSL", username="u")
    secret = KafkaSecurity("SASL_SSL", "SCRAM-SHA-512", "u", "hidden")
    assert "hidden" not in repr(secret)
    assert secret.options()["sasl_plain_password"] == "hidden" and secret.options()["ssl_context"] is not None
