from __future__ import annotations

import socket
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import redis
from prometheus_client import CollectorRegistry
from pydantic import SecretStr, ValidationError

from solaris.app import STORE_PROBE_S, create_app, store_probe
from solaris.app_health import health_server
from solaris.app_settings import KafkaWorkerSettings
from solaris.app_watch import RESTART_LIMIT_S, STALL_LIMIT_S, Watch
from solaris.metrics import WorkerMetrics
from streams.log import LogUnavailable


class Broker:
    """Says what a test tells it: {topic: {partition: (reached, newest)}}."""

    def __init__(self) -> None:
        self.found: dict[str, dict[int, tuple[int, int]]] = {"a": {0: (0, 0), 1: (0, 0)}, "b": {0: (0, 0), 1: (0, 0)}}
        self.away = False

    def positions(self, topic: str, group: str) -> dict[int, tuple[int, int]]:
        if self.away:
            raise LogUnavailable("away")
        return dict(self.found[topic])


@pytest.fixture
def parts() -> tuple[Broker, Watch, list[float]]:
    broker, now_s = Broker(), [1000.0]
    log: Any = broker
    return broker, Watch(log, "g", ["a", "b"], CollectorRegistry(), clock=lambda: now_s[0]), now_s


def status(watch: Watch) -> object:
    watch.probe()
    ready, detail = watch.ready()
    assert ready == (detail["status"] == "ready")
    return detail["status"]


def test_a_worker_is_ready_once_it_is_in_the_group(parts: tuple[Broker, Watch, list[float]]) -> None:
    broker, watch, _ = parts
    assert watch.ready()[1]["status"] == "the broker is away"
    assert status(watch) == "not in the group yet"
    watch.assigned([("a", 0), ("b", 0)])
    assert status(watch) == "ready"
    broker.away = True
    assert status(watch) == "the broker is away"
    broker.away = False
    assert status(watch) == "ready"


def test_a_consumer_is_stalled_if_nothing_is_committed_while_records_wait(
    parts: tuple[Broker, Watch, list[float]],
) -> None:
    broker, watch, now_s = parts
    watch.assigned([("a", 0), ("b", 0)])
    now_s[0] += 10 * STALL_LIMIT_S
    assert status(watch) == "ready"  # nothing waits
    for committed in range(0, 300, 10):  # far behind, but at work
        broker.found["a"][0] = (committed, 1000 + committed)
        now_s[0] += STALL_LIMIT_S / 2
        assert status(watch) == "ready"
    now_s[0] += STALL_LIMIT_S + 1
    broker.found["a"][0] = (290, 2000)  # more arrives, and nothing is done
    assert status(watch) == "stalled" and STALL_LIMIT_S < watch.stalled_s < RESTART_LIMIT_S
    assert watch.lag.labels("a")._value.get() == 1710
    watch.assigned([("a", 1), ("b", 1)])
    broker.found["b"][1] = (5, 6)
    assert status(watch) == "ready"  # the clock starts anew
    now_s[0] += STALL_LIMIT_S + 1
    assert status(watch) == "stalled"
    broker.found["b"][1] = (6, 6)
    assert status(watch) == "ready"  # another's lag is not ours


def test_an_outage_of_the_broker_is_no_stall(parts: tuple[Broker, Watch, list[float]]) -> None:
    broker, watch, now_s = parts
    watch.assigned([("a", 0)])
    broker.found["a"][0] = (0, 10)
    assert status(watch) == "ready"
    broker.away = True
    now_s[0] += 10 * RESTART_LIMIT_S
    assert status(watch) == "the broker is away" and watch.stalled_s == 0
    broker.away = False
    assert status(watch) == "ready" and watch.stalled_s == 0


def test_a_worker_whose_store_is_away_is_not_ready() -> None:
    broker, answers = Broker(), [True]

    def ping() -> None:
        if not answers[0]:
            raise redis.ConnectionError("away")

    log: Any = broker
    watch = Watch(log, "g", ["a", "b"], CollectorRegistry(), store=ping)
    watch.assigned([("a", 0)])
    assert status(watch) == "ready"
    answers[0] = False
    assert status(watch) == "the store is away" and watch.errors.labels("store")._value.get() == 1
    broker.away = True
    assert status(watch) == "the broker is away"
    broker.away, answers[0] = False, True
    assert status(watch) == "ready"


def test_a_store_that_never_answers_is_away_within_a_bound() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started_s = time.monotonic()
        with pytest.raises(redis.RedisError):
            store_probe(f"redis://127.0.0.1:{silent.getsockname()[1]}/0")()
        assert time.monotonic() - started_s < 10 * STORE_PROBE_S


def test_a_worker_without_partitions_answers_for_the_group(parts: tuple[Broker, Watch, list[float]]) -> None:
    broker, watch, now_s = parts
    watch.assigned([])
    for committed in range(3):
        broker.found["a"][0] = (committed, 10)
        now_s[0] += STALL_LIMIT_S - 1
        assert status(watch) == "ready"  # a spare: the others are at work
    now_s[0] += STALL_LIMIT_S + 1
    assert status(watch) == "stalled"  # nobody is


def test_health_endpoints() -> None:
    state = [True]
    with health_server(0, lambda: (state[0], {"status": "ready" if state[0] else "stalled"}), lambda: b"m 1\n") as port:
        url = f"http://127.0.0.1:{port}"
        assert httpx.get(f"{url}/ready").status_code == 200 == httpx.get(f"{url}/health").status_code
        state[0] = False
        assert httpx.get(f"{url}/ready").status_code == 503 and httpx.get(f"{url}/ready").json() == {
            "status": "stalled"
        }
        assert httpx.get(f"{url}/metrics").text == "m 1\n" and httpx.get(f"{url}/x").status_code == 404


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GEM", "AUTOENCODER", "REDIS_URL"):
        monkeypatch.setenv(f"SPECRANK_WORKER_{name}", "x")
    with pytest.raises(ValidationError, match="kafka_bootstrap_servers"):
        KafkaWorkerSettings()
    monkeypatch.setenv("SPECRANK_WORKER_KAFKA_BOOTSTRAP_SERVERS", "a:1,b:2")
    monkeypatch.setenv("SPECRANK_WORKER_KAFKA_SECURITY_PROTOCOL", "SASL_SSL")
    with pytest.raises(ValueError, match="needs a mechanism"):
        KafkaWorkerSettings().security()
    monkeypatch.setenv("SPECRANK_WORKER_KAFKA_SASL_MECHANISM", "PLAIN")
    monkeypatch.setenv("SPECRANK_WORKER_KAFKA_USERNAME", "u")
    monkeypatch.setenv("SPECRANK_WORKER_KAFKA_PASSWORD", "secret")
    settings = KafkaWorkerSettings()
    assert settings.security().password == "secret" and "secret" not in repr(settings)


def test_brokers_and_credentials_reach_the_app() -> None:
    worker: Any = SimpleNamespace()
    paths: Any = {"gem": "gem", "autoencoder": "autoencoder", "redis_url": "redis://unused"}
    settings = KafkaWorkerSettings(**paths, kafka_bootstrap_servers="a:1,b:2")
    for protocol, wanted in (
        ("PLAINTEXT", None),
        ("SSL", "SSL"),
        ("SASL_PLAINTEXT", "SASL_PLAINTEXT"),
        ("SASL_SSL", "SASL_SSL"),
    ):
        secured = settings.model_copy(
            update={
                "kafka_security_protocol": protocol,
                "kafka_sasl_mechanism": "SCRAM-SHA-512",
                "kafka_username": "u",
                "kafka_password": SecretStr("p"),
            }
        )
        worker.metrics = WorkerMetrics()
        app = create_app(secured, worker)
        found = app.conf.broker_credentials
        assert (found and found.protocol.value) == wanted
        assert [str(url) for url in app.conf.broker] == ["kafka://a:1", "kafka://b:2"]
        assert app.conf.id == "solaris" and app.conf.broker_session_timeout == 6
