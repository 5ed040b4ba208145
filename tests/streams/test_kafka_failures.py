"""What happens to the log when the broker dies or is not there."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import pytest

from streams.log import LogUnavailable, Record
from streams.log.kafka import KafkaLog
from streams.log.kafka_client import TopicSpec, topic_specs
from tests.kafka_broker import Broker
from tests.streams.test_kafka_log import DEADLINE_S, HOUR_MS, consuming
from tests.streams.test_log_valkey import Collector, wait_until

NOWHERE = "127.0.0.1:1"


def test_a_broker_killed_and_restarted_while_consuming_loses_nothing(
    broker: Broker, unique: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_records, published, seen = 250, [], Collector()
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("streams.log.kafka.ADMIN_TIMEOUT_S", 1.0)

    def handler(records: Sequence[Record]) -> None:
        time.sleep(0.005)
        seen(records)

    with KafkaLog(broker.address) as log, KafkaLog(broker.address) as producing:
        log.ensure_topics([TopicSpec(unique, 4, HOUR_MS)])

        def publish() -> None:
            while len(published) < num_records:
                try:
                    producing.publish(unique, str(len(published) % 11), str(len(published)).encode())
                except LogUnavailable:
                    time.sleep(0.1)
                else:
                    published.append(None)

        publisher = threading.Thread(target=publish, daemon=True)
        with consuming(log, [unique], handler, group=unique, max_records=20):
            publisher.start()
            wait_until(lambda: len(published) > num_records / 4 and len(seen.records) > 0, DEADLINE_S)
            broker.kill()
            started_s = time.monotonic()
            with pytest.raises(LogUnavailable, match="lag of"):
                log.lag(unique, unique)
            assert time.monotonic() - started_s < 20
            wait_until(lambda: any("outage" in record.message for record in caplog.records), DEADLINE_S)
            broker.start()
            publisher.join(DEADLINE_S)
            wait_until(lambda: log.lag(unique, unique) == 0, DEADLINE_S)
            wait_until(lambda: log.healthy, DEADLINE_S)
    assert {int(value) for value in seen.values} == set(range(num_records))
    assert sum("outage" in record.message for record in caplog.records) == 1
    assert not log.rejected
    for key in map(str, range(11)):
        first = list(dict.fromkeys(int(r.value) for r in seen.records if r.key == key))
        assert first == sorted(first)


def test_a_broker_that_is_not_there_is_named_within_a_bound(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("streams.log.kafka.ADMIN_TIMEOUT_S", 0.5)
    monkeypatch.setattr("streams.log.kafka.CONNECT_TIMEOUT_S", 0.3)
    monkeypatch.setattr("streams.log.kafka_consumer.PROBE_TIMEOUT_MS", 300)
    with KafkaLog(NOWHERE) as log:
        started_s = time.monotonic()
        with pytest.raises(LogUnavailable, match="publish to t: "):
            log.publish("t", "k", b"1")
        with pytest.raises(LogUnavailable, match="create topics: "):
            log.ensure_topics(topic_specs())
        assert time.monotonic() - started_s < 30
        with consuming(log, ["t"], Collector()):
            wait_until(lambda: any("outage" in record.message for record in caplog.records), DEADLINE_S)
            time.sleep(1)  # several tries
            assert not log.healthy and log.poll_age_s == float("inf")
    assert [record.message.split(":")[0] for record in caplog.records] == ["log g"]
