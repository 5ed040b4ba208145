"""What ends a worker on Kafka, how, and that nothing is lost by it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from typing import Any, cast

import httpx
import pytest
import redis

from solaris.app import SolarisApp
from solaris.app_batches import Batches
from solaris.app_process import worker_process
from solaris.metrics import WorkerMetrics
from solaris.worker import Worker
from streams.embedded import EmbeddedValkey
from streams.log import REJECTED_SUFFIX, Record
from streams.log.kafka import KafkaLog
from tests.solaris.kafka_app import (
    EventWorker,
    Running,
    events,
    histories,
    lag,
    oracle,
    publish,
    running,
    topics_of,
    wait_until,
)


def test_a_crash_between_handler_and_commit_brings_the_records_again(
    kafka_log: KafkaLog, kafka_address: str, unique: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, found = EventWorker(client), events(300)
    publish(kafka_log, topics_of(unique)[1], found)

    def boom(*_: object) -> None:
        raise RuntimeError("boom")

    with monkeypatch.context() as patch:
        patch.setattr("solaris.app_batches.TP", boom)
        crashed = Running(kafka_address, worker, unique)
        assert crashed.ended() == 1
    assert len(worker.records) > 0 and lag(kafka_log, unique) == 300
    worker.batches.clear()
    worker.metrics = WorkerMetrics()
    with running(kafka_address, worker, unique):
        wait_until(lambda: lag(kafka_log, unique) == 0)
    assert len(worker.records) == 300 and histories(client) == oracle(found)


def test_a_commit_that_hangs_does_not_keep_the_app_from_leaving_its_group(
    kafka_log: KafkaLog, kafka_address: str, unique: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
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
    publish(kafka_log, topics_of(unique)[1], events(10))
    worker = EventWorker(client)
    with running(kafka_address, worker, unique):
        wait_until(lambda: len(worker.records) == 10)
    assert len(stopped) == 1


class Dying(EventWorker):
    """One whose process is killed at work."""

    def handle(self, records: Sequence[Record]) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_handlers_process_that_dies_ends_the_worker_and_loses_nothing(
    kafka_log: KafkaLog, kafka_address: str, unique: str, server: EmbeddedValkey, client: redis.Redis
) -> None:
    activity, found = topics_of(unique)[1], events(300)
    publish(kafka_log, activity, found)
    with worker_process(lambda: cast(Worker, Dying(server.client()))) as process:
        assert Running(kafka_address, process, unique).ended() == 1
    assert lag(kafka_log, unique) == 300
    with (
        worker_process(lambda: cast(Worker, EventWorker(server.client()))) as process,
        running(kafka_address, process, unique) as app,
    ):
        wait_until(lambda: lag(kafka_log, unique) == 0)
        metrics = httpx.get(f"{app.url}/metrics").text
    assert f'solaris_kafka_records_total{{topic="{activity}"}} 300.0' in metrics
    assert "solaris_rejected_total{" not in metrics
    assert kafka_log.published(activity + REJECTED_SUFFIX) == 0, "no record was to blame"
    assert histories(client) == oracle(found)


def test_a_handlers_process_that_dies_idle_is_missed_as_well(
    kafka_log: KafkaLog, kafka_address: str, unique: str, server: EmbeddedValkey
) -> None:
    with worker_process(lambda: cast(Worker, EventWorker(server.client()))) as process:
        idle = Running(kafka_address, process, unique)
        wait_until(idle.ready)
        process._process.kill()
        assert idle.ended() == 1


def test_a_stalled_consumer_is_seen_and_its_process_ends(
    kafka_log: KafkaLog, kafka_address: str, unique: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def swallow(self: Batches, app: Any, events: Sequence[Any]) -> None:
        """Stands for a consumer whose records get nowhere, while its session lives."""

    monkeypatch.setattr("solaris.app_watch.PROBE_PERIOD_S", 0.2)
    monkeypatch.setattr("solaris.app_watch.STALL_LIMIT_S", 0.5)
    monkeypatch.setattr("solaris.app.RESTART_LIMIT_S", 3.0)
    monkeypatch.setattr(Batches, "handle", swallow)
    app = Running(kafka_address, EventWorker(client), unique)
    wait_until(app.ready)
    publish(kafka_log, topics_of(unique)[1], events(10))
    wait_until(lambda: httpx.get(f"{app.url}/ready").json()["status"] == "stalled")
    assert app.ended() == 1 and lag(kafka_log, unique) == 10
