"""The Faust app in a thread of the tests, on a genuine broker, with workers that need no FM."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import redis

from solaris.app import serve
from solaris.app_settings import KafkaWorkerSettings
from solaris.metrics import WorkerMetrics
from streams.events import ActivityEvent, decode_event, encode_event
from streams.ids import id64
from streams.log import Record, Retry
from streams.log.kafka import KafkaLog
from streams.log.kafka_client import topic_specs
from streams.rows import LOG_ROW
from streams.user_log import UserLog

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
def kafka_log(kafka_address: str, unique: str) -> Iterator[KafkaLog]:
    with KafkaLog(kafka_address) as opened:
        opened.ensure_topics(topic_specs(PARTITIONS, topics_of(unique)))
        yield opened
