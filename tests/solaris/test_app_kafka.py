"""The Faust app on a genuine Kafka broker, writing to a real user log."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
import redis

import solaris
from solaris.metrics import WorkerMetrics
from streams.embedded import EmbeddedValkey
from streams.events import ActivityEvent, decode_event
from streams.log import Record, Retry
from streams.log.kafka import KafkaLog
from streams.log.kafka_consumer import SESSION_TIMEOUT_MS
from tests.kafka_broker import Broker, knocks
from tests.solaris.kafka_app import (
    DEADLINE_S,
    EventWorker,
    events,
    histories,
    lag,
    oracle,
    publish,
    running,
    topics_of,
    wait_until,
)


def test_events_end_in_the_user_log_as_the_oracle_has_them(
    kafka_log: KafkaLog, kafka_address: str, unique: str, client: redis.Redis
) -> None:
    served, activity = topics_of(unique)
    worker, found = EventWorker(client), events(2_000)
    publish(kafka_log, activity, found[:1_000])
    publish(kafka_log, served, found[900:1_200])  # the same events again, by another topic
    kafka_log.publish(activity, "7", b"poison")
    publish(kafka_log, activity, found[1_000:])
    with running(kafka_address, worker, unique) as app:
        wait_until(lambda: lag(kafka_log, unique) == 0)
        wait_until(app.ready)
        metrics = httpx.get(f"{app.url}/metrics").text
        assert f'solaris_kafka_records_total{{topic="{activity}"}} 2001.0' in metrics
        wait_until(lambda: f'lag_records{{topic="{activity}"}} 0.0' in httpx.get(f"{app.url}/metrics").text)
        assert "solaris_kafka_rebalances_total 1.0" in metrics and "solaris_kafka_partitions 8.0" in metrics
        wait_until(lambda: worker.drained > 0)
    assert histories(client) == oracle(found)
    assert kafka_log.published(f"{activity}.rejected") == 1
    assert (
        f'solaris_rejected_total{{topic="{activity}"}} 1.0' in metrics and 'errors_total{kind="handler"} 2.0' in metrics
    )
    for batch in worker.batches:
        assert len(batch) <= 512
        assert [r.topic for r in batch] == sorted((r.topic for r in batch), key=[served, activity].index)
    for user in map(str, range(53)):
        times = [decode_event(r.value).time_ms for r in worker.records if (r.topic, r.key) == (activity, user)]
        assert list(dict.fromkeys(times)) == sorted(set(times))


def test_stopping_finishes_and_commits_what_is_in_hand(
    kafka_log: KafkaLog, kafka_address: str, unique: str, client: redis.Redis
) -> None:
    entered, outage = threading.Event(), threading.Event()

    class Slow(EventWorker):
        def handle(self, records: Sequence[Record]) -> None:
            entered.set()
            if outage.is_set():
                raise Retry("store")
            time.sleep(1)
            super().handle(records)

    worker = Slow(client)
    publish(kafka_log, topics_of(unique)[1], events(40))
    with running(kafka_address, worker, unique):
        assert entered.wait(DEADLINE_S)
    handled = len(worker.records)
    assert handled > 0 and lag(kafka_log, unique) == 40 - handled

    outage.set()
    entered.clear()
    worker.metrics = WorkerMetrics()
    publish(kafka_log, topics_of(unique)[1], events(40, 40))
    with running(kafka_address, worker, unique):  # stops although the store stays away
        assert entered.wait(DEADLINE_S)
    assert lag(kafka_log, unique) == 80 - handled


def test_the_broker_may_be_away_at_the_start_and_later(
    broker: Broker, unique: str, client: redis.Redis, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("streams.log.kafka.ADMIN_TIMEOUT_S", 1.0)
    monkeypatch.setattr("streams.log.kafka.CONNECT_TIMEOUT_S", 1.0)
    activity, found, published = topics_of(unique)[1], events(400), list[ActivityEvent]()
    worker = EventWorker(client, pause_s=0.1)
    broker.kill()
    with running(broker.address, worker, unique) as app, KafkaLog(broker.address) as kafka_log:
        wait_until(lambda: any("outage" in record.message for record in caplog.records))
        assert httpx.get(f"{app.url}/ready").json()["status"] == "the broker is away"
        assert httpx.get(f"{app.url}/health").status_code == 200
        broker.start()
        wait_until(app.ready)

        def produce() -> None:
            while len(published) < len(found):
                part = found[len(published) : len(published) + 10]
                try:
                    publish(kafka_log, activity, part)
                except Exception:
                    time.sleep(0.2)
                else:
                    published.extend(part)
                    time.sleep(0.02)

        producer = threading.Thread(target=produce, daemon=True)
        producer.start()
        wait_until(lambda: len(published) >= 100 and len(worker.records) > 0)
        broker.kill()
        wait_until(lambda: not app.ready())
        with knocks(broker.address) as tries:
            time.sleep(3)
        assert 0 < len(tries) <= 300, Counter(tries)  # consumer, watch and producer together
        broker.start()
        producer.join(DEADLINE_S)
        wait_until(lambda: lag(kafka_log, unique) == 0)
        wait_until(app.ready)
    assert histories(client) == oracle(found)
    lines = [f"{r.name}: {r.getMessage()}" for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(lines) <= 3, lines  # two outages within a minute: one of the watch, one of the start


WORKER = """
import logging, sys, threading
import redis
from solaris.app import create_app, serve
from solaris.app_batches import Batches
from streams.log.kafka import KafkaLog
from tests.solaris.kafka_app import EventWorker, settings_of, topics_of

address, unique, url, name = sys.argv[1:]

class Named(EventWorker):
    def handle(self, records):
        super().handle(records)
        client.incrby(name, len(records))

client = redis.Redis.from_url(url)
sys.exit(serve(settings_of(address), Named(client, .02), KafkaLog(address), threading.Event(), topics=topics_of(unique), group=unique))
"""


def test_a_killed_worker_is_replaced_by_another(
    kafka_log: KafkaLog, kafka_address: str, unique: str, server: EmbeddedValkey, client: redis.Redis
) -> None:
    found, activity = events(4_000), topics_of(unique)[1]

    def start(name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", WORKER, kafka_address, unique, server.url, name]
        return subprocess.Popen(command, cwd=Path(solaris.__file__).parents[1])

    def done(name: str) -> int:
        return int(client.get(name) or 0)  # type: ignore[arg-type]

    workers = [start("one"), start("two")]
    try:
        at = 0
        while not (done("one") and done("two")):  # until both have their share
            assert at < 3_000, "the workers did not share the partitions in time"
            publish(kafka_log, activity, found[at : at + 20])
            at += 20
            time.sleep(0.4)
        publish(kafka_log, activity, found[at : at + 500])
        at += 500
        wait_until(lambda: lag(kafka_log, unique) < 400)
        os.kill(workers[0].pid, signal.SIGKILL)
        killed_s = time.monotonic()
        workers[0].wait()
        publish(kafka_log, activity, found[at:])
        wait_until(lambda: lag(kafka_log, unique) == 0)
        assert time.monotonic() - killed_s < SESSION_TIMEOUT_MS / 1000 + 5
    finally:
        for process in workers:
            process.kill()
            process.wait()
    assert histories(client) == oracle(found)
