"""Broker and store absent at the start, lost and returned, and poison anywhere: the real worker, through both doors.

A broker that is away from a Faust app is in `test_app_kafka`, what the logs alone do in `tests/streams`.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from kafka import KafkaProducer

from solaris.app import store_probe
from solaris.app_health import health_server
from solaris.run import _ready
from solaris.worker import TOPICS, Worker, WorkerConfig
from streams.embedded import EmbeddedValkey
from streams.events import ACTIVITY_TOPIC
from streams.ids import id64
from streams.log import ActivityLog, LogUnavailable, Record
from streams.log.delivery import BACKOFF_FIRST_S, BACKOFF_LAST_S, Delivery
from streams.log.kafka import KafkaLog
from streams.log.kafka_client import MAX_RECORD_BYTES
from streams.log.valkey import ValkeyLog
from streams.requests import SERVED_TOPIC
from streams.user_log import UserLog
from tests.kafka_broker import Broker
from tests.solaris.kafka_app import running
from tests.solaris.kafka_system import (
    PARTITIONS,
    UserState,
    assert_events_once_in_order,
    assert_same_state,
    final_state,
    fresh_log,
    handled,
    pair,
    publish_pairs,
    wait_until,
)
from tests.solaris.test_worker import NUM_ADS, caught_up
from tests.system import System
from tests.system import running as embedded

Pairs = list[tuple[str, bytes, bytes]]
NUM_PAIRS = 120
CURSED = "RuntimeError: cursed"


def lag(log: ActivityLog, group: str) -> int:
    return sum(log.lag(topic, group) for topic in TOPICS)


def pairs_of(system: System) -> tuple[Pairs, Pairs, Pairs]:
    """What is published before, in between, and while something is away."""
    pairs = [pair(system, number) for number in range(NUM_PAIRS)]
    return pairs[: NUM_PAIRS // 3], pairs[NUM_PAIRS // 3 : 2 * NUM_PAIRS // 3], pairs[2 * NUM_PAIRS // 3 :]


@pytest.fixture
def wanted(system: System, store: EmbeddedValkey) -> dict[str, UserState]:
    """What an undisturbed worker makes of all of them."""
    client = store.client()
    handled(system.worker(client, slate_size=NUM_ADS), [one for part in pairs_of(system) for one in part])
    return final_state(client, system)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Warnings and worse so far. What else waits for seconds is made to wait for less."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("solaris.app_watch.PROBE_PERIOD_S", 0.2)
    monkeypatch.setattr("streams.log.valkey.POLL_AGE_LIMIT_S", 1.0)
    return lambda: [f"{r.name}: {r.getMessage()}" for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_store_that_is_away_from_a_kafka_worker_is_waited_for(
    system: System,
    wanted: dict[str, UserState],
    broker: Broker,
    unique: str,
    tmp_path: Path,
    lines: Callable[[], list[str]],
) -> None:
    first, second, third = pairs_of(system)
    with EmbeddedValkey(tmp_path, fsync="always") as server, fresh_log(broker) as log:
        server.stop()
        publish_pairs(log, first)
        worker = system.worker(server.client(), slate_size=NUM_ADS)
        with running(broker.address, worker, unique, topics=TOPICS, store=store_probe(server.url)) as app:
            wait_until(lambda: any("outage" in line for line in lines()))
            wait_until(lambda: app.status() == "the store is away")
            assert not app.ready() and httpx.get(f"{app.url}/health").status_code == 200
            assert lag(log, unique) == 2 * len(first)
            server.start()
            wait_until(lambda: app.ready() and lag(log, unique) == 0)
            publish_pairs(log, second)
            wait_until(lambda: lag(log, unique) < 2 * len(second))
            server.kill()
            wait_until(lambda: app.status() == "the store is away")
            publish_pairs(log, third)
            server.start()
            wait_until(lambda: app.ready() and lag(log, unique) == 0)
        found = final_state(server.client(), system)
        assert sum(log.published(f"{topic}.rejected") for topic in TOPICS) == 0
    assert_events_once_in_order(found.values(), NUM_PAIRS)
    assert_same_state(found, wanted)
    assert len(lines()) == 1, lines()  # two outages within a minute


def test_a_server_that_is_away_from_an_embedded_worker_is_waited_for(
    system: System, wanted: dict[str, UserState], tmp_path: Path, lines: Callable[[], list[str]]
) -> None:
    first, second, third = pairs_of(system)
    with EmbeddedValkey(tmp_path, fsync="always") as server:
        server.stop()
        client = server.client()
        log, worker = ValkeyLog(client), system.worker(client, slate_size=NUM_ADS)
        own: Any = worker._log
        with health_server(0, lambda: _ready(own), worker.metrics.render) as port, embedded(worker):
            url = f"http://127.0.0.1:{port}"

            def status(path: str = "ready") -> int:
                return httpx.get(f"{url}/{path}").status_code

            wait_until(lambda: any("outage" in line for line in lines()))
            assert (status(), status("health")) == (503, 200)
            server.start()
            publish_pairs(log, first)
            wait_until(lambda: status() == 200 and caught_up(client))
            publish_pairs(log, second)
            wait_until(lambda: log.lag(ACTIVITY_TOPIC, "solaris") < len(second))
            server.kill()
            wait_until(lambda: status() == 503)
            with pytest.raises(LogUnavailable):
                publish_pairs(log, third)
            server.start()
            publish_pairs(log, third)
            wait_until(lambda: status() == 200 and caught_up(client))
        found = final_state(client, system)
    assert_events_once_in_order(found.values(), NUM_PAIRS)
    assert_same_state(found, wanted)
    assert len(lines()) <= 2, lines()  # of the consumer, and of the delivery within it


def test_waits_between_tries_grow_to_a_bound() -> None:
    waits: list[float] = []

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0)
            return False

    def fails() -> None:
        if len(waits) < 20:
            raise LogUnavailable("away")

    nothing: Any = None
    assert Delivery(nothing, "g", nothing, Stop(), nothing).until_done(fails)
    for number, wait_s in enumerate(waits):
        longest = min(BACKOFF_FIRST_S * 2**number, BACKOFF_LAST_S)
        assert longest / 2 <= wait_s <= longest
    assert len(waits) == 20 and len(set(waits[-10:])) > 1  # jitter: many workers do not come back at one moment


def poison_of(good: tuple[str, bytes, bytes]) -> list[tuple[str, bytes | None, str]]:
    """(topic, value, how its reason begins) of records that no worker can take."""
    _, request, event = good
    return [
        (ACTIVITY_TOPIC, b"{]", "not an activity event: JSON is malformed"),
        (ACTIVITY_TOPIC, event.replace(b'"v":1', b'"v":9'), "unknown wire version 9"),
        (ACTIVITY_TOPIC, b"", "not an activity event: Input data was truncated"),
        (ACTIVITY_TOPIC, None, "not an activity event: Input data was truncated"),
        (ACTIVITY_TOPIC, b"\xff" * (MAX_RECORD_BYTES - 1_000), "not an activity event: JSON is malformed"),
        (ACTIVITY_TOPIC, event.replace(b'"event_id":0', b'"event_id":-1'), CURSED),
        (SERVED_TOPIC, b"\x00\xff", "not a served request: JSON is malformed"),
        (SERVED_TOPIC, request.replace(b'"v":1', b'"v":9'), "unknown version 9"),
        (SERVED_TOPIC, None, "not a served request: Input data was truncated"),
        (SERVED_TOPIC, request.replace(b'"surface":', b'"surface":99,"was":'), "surface 99 of a served request"),
    ]


def rejected(log: KafkaLog, topic: str, number: int, group: str) -> list[dict[str, Any]]:
    """The messages about the rejected records of a topic."""
    found: list[Record] = []
    stop = threading.Event()

    def take(records: Sequence[Record]) -> None:
        found.extend(records)
        if len(found) >= number:
            stop.set()

    guard = threading.Timer(60, stop.set)
    guard.start()
    log.consume([f"{topic}.rejected"], group, take, consumer="reader", stop=stop)
    guard.cancel()
    return [json.loads(record.value) for record in found]


def test_poison_anywhere_is_set_aside_with_its_reason(
    system: System,
    wanted: dict[str, UserState],
    store: EmbeddedValkey,
    broker: Broker,
    unique: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, between and after good records of the same partitions, in batches that hold good ones too."""
    parts, cursed = pairs_of(system), id64(-1)
    poison = poison_of(parts[0][0])
    append = UserLog.append

    def refuse(self: UserLog, users: Any, rows: Any) -> int:
        if cursed in rows["event_id"].tolist():
            raise RuntimeError("cursed")
        return append(self, users, rows)

    client = store.client()
    client.flushall()
    with fresh_log(broker) as log:
        producer = KafkaProducer(bootstrap_servers=broker.address, max_request_size=2 * MAX_RECORD_BYTES)
        for part in ([], *parts):
            publish_pairs(log, part)
            for number, (topic, value, _) in enumerate(poison):
                key = None if value == b"" else b"key"
                producer.send(topic, key=key, value=value, partition=number % PARTITIONS)
            producer.flush()
        producer.close()
        worker = Worker(client, log, system.representer, WorkerConfig(slate_size=NUM_ADS))
        with monkeypatch.context() as patch, running(broker.address, worker, unique, topics=TOPICS) as app:
            patch.setattr(UserLog, "append", refuse)
            wait_until(lambda: app.ready() and lag(log, unique) == 0)
            metrics = httpx.get(f"{app.url}/metrics").text
        for topic in TOPICS:
            published = log.published(f"{topic}.rejected")
            assert f'solaris_rejected_total{{topic="{topic}"}} {float(published)}' in metrics
            reasons = [str(message["reason"]) for message in rejected(log, topic, published, unique)]
            wished = Counter(reason for name, _, reason in poison if name == topic)
            for reason, number in wished.items():
                times = number * (1 + len(parts))
                found_times = sum(one.startswith(reason) for one in reasons)
                # What stood in a batch with a cursed event is delivered, and set aside, once more.
                assert times <= found_times <= 2 * times and (reason != CURSED or found_times == times), reason
            assert all(one.startswith(tuple(wished)) for one in reasons)
    found = final_state(client, system)
    assert_events_once_in_order(found.values(), NUM_PAIRS)
    assert_same_state(found, wanted)
