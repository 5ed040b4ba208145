"""The Faust app on a genuine Kafka broker, writing to a real user log."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import pytest
import redis

import solaris
from solaris.app import SolarisApp, serve
from solaris.app_batches import Batches
from solaris.app_process import worker_process
from solaris.app_settings import KafkaWorkerSettings
from solaris.metrics import WorkerMetrics
from solaris.worker import Worker
from streams.embedded import EmbeddedValkey
from streams.events import ActivityEvent, decode_event, encode_event
from streams.ids import id64
from streams.log import REJECTED_SUFFIX, Record, Retry
from streams.log.kafka import KafkaLog
from streams.log.kafka_client import topic_specs
from streams.log.kafka_consumer import SESSION_TIMEOUT_MS
from streams.rows import LOG_ROW
from streams.user_log import UserLog
from tests.kafka_broker import Broker, knocks

DEADLINE_S = 60.0
PARTITIONS = 4
START_MS = 1_700_000_000_000


class EventWorker:
    """What `Worker` does without an FM: events to the user log. One that does not parse is refused with its batch."""

    def __init__(self, client: redis.Redis, pause_s: float = 0.0) -> None:
        self.metrics = WorkerMetrics()
        self.batches: list[list[Record]] = []
        self.drained = 0
        self._client, self._pause_s = client, pause_s

    def handle(self, records: Sequence[Record]) -> None:
        events = [decode_event(record.value) for record in records]
        users = np.array([id64(event.user_id) for event in events], dtype=np.uint64)
        rows = np.array([row_of(event) for event in events], dtype=LOG_ROW)
        try:
            UserLog(self._client).append(users, rows)
        except redis.RedisError as error:
            raise Retry("store") from error
        time.sleep(self._pause_s)
        self.batches.append(list(records))

    def drain(self) -> None:
        self.drained += 1

    @property
    def records(self) -> list[Record]:
        return [record for batch in self.batches for record in batch]


def row_of(event: ActivityEvent) -> tuple[int, int, int, float, int, int]:
    return id64(event.event_id), event.time_ms, id64(event.ad_id), event.value, 0, 0


def events(number: int, first: int = 0) -> list[ActivityEvent]:
    return [
        ActivityEvent(event_id=f"e{i}", user_id=i % 53, ad_id=i % 7, surface="feed", time_ms=START_MS + i)
        for i in range(first, first + number)
    ]


def publish(log: KafkaLog, topic: str, found: Sequence[ActivityEvent]) -> None:
    log.publish_many(topic, [(str(event.user_id), encode_event(event)) for event in found])


def oracle(found: Sequence[ActivityEvent]) -> dict[int, list[Any]]:
    wanted: dict[int, list[Any]] = {user: [] for user in range(53)}
    for event in sorted(found, key=lambda event: event.time_ms):
        wanted[int(event.user_id)].append(row_of(event))
    return wanted


def histories(client: redis.Redis) -> dict[int, list[Any]]:
    log = UserLog(client)
    return {user: log.history(id64(user), 2**53, 10_000).tolist() for user in range(53)}


def wait_until(condition: Callable[[], bool], timeout_s: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def settings_of(address: str, port: int | None = None) -> KafkaWorkerSettings:
    paths: dict[str, Any] = {"gem": Path("gem"), "autoencoder": Path("autoencoder"), "redis_url": "redis://unused"}
    return KafkaWorkerSettings(**paths, kafka_bootstrap_servers=address, kafka_partitions=PARTITIONS, health_port=port)


class Running:
    """A worker in a thread, and how to ask for its health."""

    def __init__(self, address: str, worker: Any, unique: str, **options: Any) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.stop, self.codes = threading.Event(), list[int]()
        self.url = f"http://127.0.0.1:{port}"
        self.log = KafkaLog(address)
        options = {"topics": topics_of(unique), **options}

        def run() -> None:
            settings = settings_of(address, port)
            self.codes.append(serve(settings, worker, self.log, self.stop, group=unique, **options))

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=5).status_code == 200
        except httpx.ConnectError:
            return False

    def status(self) -> str:
        return str(httpx.get(f"{self.url}/ready", timeout=5).json()["status"])

    def ended(self) -> int:
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()
        self.log.close()
        return self.codes[0]


@contextmanager
def running(address: str, worker: Any, unique: str, **options: Any) -> Iterator[Running]:
    """A worker that has to end in order. Options are those of `serve`."""
    started = Running(address, worker, unique, **options)
    try:
        yield started
    finally:
        started.stop.set()
        code = started.ended()
    assert code == 0


def topics_of(unique: str) -> list[str]:
    return [f"{unique}.served", f"{unique}.activity"]


def lag(log: KafkaLog, unique: str) -> int:
    return sum(log.lag(topic, unique) for topic in topics_of(unique))


@pytest.fixture
def log(kafka_address: str, unique: str) -> Iterator[KafkaLog]:
    with KafkaLog(kafka_address) as opened:
        opened.ensure_topics(topic_specs(PARTITIONS, topics_of(unique)))
        yield opened


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey(appendonly=False) as started:
        yield started


@pytest.fixture
def client(server: EmbeddedValkey) -> Iterator[redis.Redis]:
    with server.client() as connected:
        connected.flushall()
        yield connected


def test_events_end_in_the_user_log_as_the_oracle_has_them(
    log: KafkaLog, kafka_address: str, unique: str, client: redis.Redis
) -> None:
    served, activity = topics_of(unique)
    worker, found = EventWorker(client), events(2_000)
    publish(log, activity, found[:1_000])
    publish(log, served, found[900:1_200])  # the same events again, by another topic
    log.publish(activity, "7", b"poison")
    publish(log, activity, found[1_000:])
    with running(kafka_address, worker, unique) as app:
        wait_until(lambda: lag(log, unique) == 0)
        wait_until(app.ready)
        metrics = httpx.get(f"{app.url}/metrics").text
        assert f'solaris_kafka_records_total{{topic="{activity}"}} 2001.0' in metrics
        wait_until(lambda: f'lag_records{{topic="{activity}"}} 0.0' in httpx.get(f"{app.url}/metrics").text)
        assert "solaris_kafka_rebalances_total 1.0" in metrics and "solaris_kafka_partitions 8.0" in metrics
        wait_until(lambda: worker.drained > 0)
    assert histories(client) == oracle(found)
    assert log.published(f"{activity}.rejected") == 1
    assert (
        f'solaris_rejected_total{{topic="{activity}"}} 1.0' in metrics and 'errors_total{kind="handler"} 2.0' in metrics
    )
    for batch in worker.batches:
        assert len(batch) <= 512
        assert [r.topic for r in batch] == sorted((r.topic for r in batch), key=[served, activity].index)
    for user in map(str, range(53)):
        times = [decode_event(r.value).time_ms for r in worker.records if (r.topic, r.key) == (activity, user)]
        assert list(dict.fromkeys(times)) == sorted(set(times))


def test_a_crash_between_handler_and_commit_brings_the_records_again(
    log: KafkaLog, kafka_address: str, unique: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, found = EventWorker(client), events(300)
    publish(log, topics_of(unique)[1], found)

    def boom(*_: object) -> None:
        raise RuntimeError("boom")

    with monkeypatch.context() as patch:
        patch.setattr("solaris.app_batches.TP", boom)
        crashed = Running(kafka_address, worker, unique)
        assert crashed.ended() == 1
    assert len(worker.records) > 0 and lag(log, unique) == 300
    worker.batches.clear()
    worker.metrics = WorkerMetrics()
    with running(kafka_address, worker, unique):
        wait_until(lambda: lag(log, unique) == 0)
    assert len(worker.records) == 300 and histories(client) == oracle(found)


def test_a_commit_that_hangs_does_not_keep_the_app_from_leaving_its_group(
    log: KafkaLog, kafka_address: str, unique: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(*_: object) -> None:
        await asyncio.Event().wait()

    stopped, stop = [], SolarisApp.stop

    async def noted(app: SolarisApp) -> None:
        await stop(app)
        stopped.append(app)

    monkeypatch.setattr(Batches, "_commit", hang)
    monkeypatch.setattr(SolarisApp, "stop", noted)
    monkeypatch.setattr("solaris.app.STOP_TIMEOUT_S", 10.0)
    publish(log, topics_of(unique)[1], events(10))
    worker = EventWorker(client)
    with running(kafka_address, worker, unique):
        wait_until(lambda: len(worker.records) == 10)
    assert len(stopped) == 1


class Dying(EventWorker):
    """One whose process is killed at work."""

    def handle(self, records: Sequence[Record]) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_handlers_process_that_dies_ends_the_worker_and_loses_nothing(
    log: KafkaLog, kafka_address: str, unique: str, server: EmbeddedValkey, client: redis.Redis
) -> None:
    activity, found = topics_of(unique)[1], events(300)
    publish(log, activity, found)
    with worker_process(lambda: cast(Worker, Dying(server.client()))) as process:
        assert Running(kafka_address, process, unique).ended() == 1
    assert lag(log, unique) == 300
    with (
        worker_process(lambda: cast(Worker, EventWorker(server.client()))) as process,
        running(kafka_address, process, unique) as app,
    ):
        wait_until(lambda: lag(log, unique) == 0)
        metrics = httpx.get(f"{app.url}/metrics").text
    assert f'solaris_kafka_records_total{{topic="{activity}"}} 300.0' in metrics
    assert "solaris_rejected_total{" not in metrics
    assert log.published(activity + REJECTED_SUFFIX) == 0, "no record was to blame"
    assert histories(client) == oracle(found)


def test_a_stalled_consumer_is_seen_and_its_process_ends(
    log: KafkaLog, kafka_address: str, unique: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def swallow(self: Batches, app: Any, events: Sequence[Any]) -> None:
        """Stands for a consumer whose records get nowhere, while its session lives."""

    monkeypatch.setattr("solaris.app_watch.PROBE_PERIOD_S", 0.2)
    monkeypatch.setattr("solaris.app_watch.STALL_LIMIT_S", 0.5)
    monkeypatch.setattr("solaris.app.RESTART_LIMIT_S", 3.0)
    monkeypatch.setattr(Batches, "handle", swallow)
    app = Running(kafka_address, EventWorker(client), unique)
    wait_until(app.ready)
    publish(log, topics_of(unique)[1], events(10))
    wait_until(lambda: httpx.get(f"{app.url}/ready").json()["status"] == "stalled")
    assert app.ended() == 1 and lag(log, unique) == 10


def test_stopping_finishes_and_commits_what_is_in_hand(
    log: KafkaLog, kafka_address: str, unique: str, client: redis.Redis
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
    publish(log, topics_of(unique)[1], events(40))
    with running(kafka_address, worker, unique):
        assert entered.wait(DEADLINE_S)
    handled = len(worker.records)
    assert handled > 0 and lag(log, unique) == 40 - handled

    outage.set()
    entered.clear()
    worker.metrics = WorkerMetrics()
    publish(log, topics_of(unique)[1], events(40, 40))
    with running(kafka_address, worker, unique):  # stops although the store stays away
        assert entered.wait(DEADLINE_S)
    assert lag(log, unique) == 80 - handled


def test_the_broker_may_be_away_at_the_start_and_later(
    broker: Broker, unique: str, client: redis.Redis, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("streams.log.kafka.ADMIN_TIMEOUT_S", 1.0)
    monkeypatch.setattr("streams.log.kafka.CONNECT_TIMEOUT_S", 1.0)
    activity, found, published = topics_of(unique)[1], events(400), list[ActivityEvent]()
    worker = EventWorker(client, pause_s=0.1)
    broker.kill()
    with running(broker.address, worker, unique) as app, KafkaLog(broker.address) as log:
        wait_until(lambda: any("outage" in record.message for record in caplog.records))
        assert httpx.get(f"{app.url}/ready").json()["status"] == "the broker is away"
        assert httpx.get(f"{app.url}/health").status_code == 200
        broker.start()
        wait_until(app.ready)

        def produce() -> None:
            while len(published) < len(found):
                part = found[len(published) : len(published) + 10]
                try:
                    publish(log, activity, part)
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
        wait_until(lambda: lag(log, unique) == 0)
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
from tests.solaris.test_app_kafka import EventWorker, settings_of, topics_of

address, unique, url, name = sys.argv[1:]

class Named(EventWorker):
    def handle(self, records):
        super().handle(records)
        client.incrby(name, len(records))

client = redis.Redis.from_url(url)
sys.exit(serve(settings_of(address), Named(client, .02), KafkaLog(address), threading.Event(), topics=topics_of(unique), group=unique))
"""


def test_a_killed_worker_is_replaced_by_another(
    log: KafkaLog, kafka_address: str, unique: str, server: EmbeddedValkey, client: redis.Redis
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
            publish(log, activity, found[at : at + 20])
            at += 20
            time.sleep(0.4)
        publish(log, activity, found[at : at + 500])
        at += 500
        wait_until(lambda: lag(log, unique) < 400)
        os.kill(workers[0].pid, signal.SIGKILL)
        killed_s = time.monotonic()
        workers[0].wait()
        publish(log, activity, found[at:])
        wait_until(lambda: lag(log, unique) == 0)
        assert time.monotonic() - killed_s < SESSION_TIMEOUT_MS / 1000 + 5
    finally:
        for process in workers:
            process.kill()
            process.wait()
    assert histories(client) == oracle(found)
