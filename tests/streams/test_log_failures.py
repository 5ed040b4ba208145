"""What happens to the log when servers and consumers die."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

import streams
from streams.embedded import EmbeddedValkey
from streams.log import LogUnavailable, Record, Retry
from streams.log.valkey import ValkeyLog
from streams.log.valkey_consumer import stream_key
from streams.rows import LOG_ROW
from streams.store import EmbeddingStore, Rows
from streams.user_log import UserLog
from tests.streams.test_log_valkey import Collector, consuming, wait_until

CONSUMER = """
import sys, threading, time
import redis
import numpy as np
from streams.log.valkey import ValkeyLog
from streams.rows import LOG_ROW
from streams.store import EmbeddingStore, Rows
from streams.user_log import UserLog

url, name = sys.argv[1:]
client = redis.Redis.from_url(url)
log, user_log = ValkeyLog(client, claim_idle_ms=300), UserLog(client)
store = EmbeddingStore(client, kind="pairs", dim=2, ttl_ms=10**9, failover_ttl_ms=10**9)

def handler(records):
    for record in records:
        number, users = int(record.value), np.array([int(record.key)], np.uint64)
        rows = np.zeros(1, LOG_ROW)
        rows["event_id"] = rows["time_ms"] = number
        user_log.append(users, rows)
        client.incr("calls")
        time.sleep(.0005)  # a kill mostly hits between the two writes
        ids = np.array([number % 20], np.uint64)
        store.write(users, [Rows(ids, rows["time_ms"], ids, np.full((1, 2), number, np.float32))])

log.consume(["t", "u"], "g", handler, consumer=name, max_records=40, stop=threading.Event())
"""


def state(client: redis.Redis) -> list[Any]:
    log, found = UserLog(client), []
    store = EmbeddingStore(client, kind="pairs", dim=2, ttl_ms=10**9, failover_ttl_ms=10**9)
    for user in range(3):
        rows = store.read(user)
        vectors = rows.vectors.tolist()
        found.append((log.history(user, 2**53, 10_000).tolist(), rows.ads.tolist(), rows.state_ms.tolist(), vectors))
    return found


def undisturbed(client: redis.Redis, num_records: int) -> list[Any]:
    client.flushall()
    store = EmbeddingStore(client, kind="pairs", dim=2, ttl_ms=10**9, failover_ttl_ms=10**9)
    for number in range(num_records):
        users, ids = np.array([number % 3], np.uint64), np.array([number % 20], np.uint64)
        rows = np.zeros(1, LOG_ROW)
        rows["event_id"] = rows["time_ms"] = number
        UserLog(client).append(users, rows)
        store.write(users, [Rows(ids, rows["time_ms"], ids, np.full((1, 2), number, np.float32))])
    return state(client)


@pytest.mark.parametrize("renamed", [False, True], ids=["restarted", "replaced"])
def test_a_consumer_killed_anywhere_loses_nothing(client: redis.Redis, server: EmbeddedValkey, renamed: bool) -> None:
    num_records, rng = 450, random.Random(0)
    wanted = undisturbed(client, num_records)
    client.flushall()
    log = ValkeyLog(client)
    for number in range(num_records):
        log.publish("tu"[number % 2], str(number % 3), str(number).encode())
    kills = sorted(rng.sample(range(20, num_records - 60), 4))
    root = str(Path(streams.__file__).parents[1])
    for life, until in enumerate([*kills, None]):
        name = f"life{life}" if renamed else "one"
        process = subprocess.Popen([sys.executable, "-c", CONSUMER, server.url, name], cwd=root)
        try:
            if until is None:
                wait_until(lambda: log.lag("t", "g") + log.lag("u", "g") == 0, 20)
            else:
                wait_until(lambda until=until: int(client.get("calls") or 0) >= until)
                assert log.lag("t", "g") + log.lag("u", "g") > 0
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
    assert int(client.get("calls") or 0) >= num_records
    assert state(client) == wanted


def test_records_of_a_dead_consumer_are_claimed_after_the_idle_bound_only(client: redis.Redis) -> None:
    patient, eager, seen, fresh = ValkeyLog(client), ValkeyLog(client, claim_idle_ms=800), Collector(), Collector()
    patient.publish_many("t", [("k", b"%d" % i) for i in range(2_500)])
    client.xgroup_create(stream_key("t"), "g", "0")
    client.xreadgroup("g", "dead", {stream_key("t"): ">"}, count=2_400)
    died_s = time.monotonic()
    with consuming(eager, ["t"], seen, consumer="two"):
        wait_until(lambda: eager.lag("t", "g") == 0)
        assert time.monotonic() - died_s > 0.8
    assert sorted(map(int, seen.values)) == list(range(2_500))

    patient.publish_many("t", [("k", b"1"), ("k", b"2")])
    client.xreadgroup("g", "dead", {stream_key("t"): ">"}, count=1)
    time.sleep(1)
    with consuming(patient, ["t"], fresh, consumer="three"):
        wait_until(lambda: fresh.values == [b"2"])
        time.sleep(0.5)
    assert fresh.values == [b"2"] and patient.lag("t", "g") == 1


def test_a_handler_that_ends_its_process_leaves_its_records_pending(client: redis.Redis) -> None:
    log, seen = ValkeyLog(client), Collector()
    log.publish_many("t", [("k", b"%d" % i) for i in range(50)])

    def handler(records: Sequence[Record]) -> None:
        raise SystemExit

    with pytest.raises(SystemExit):
        log.consume(["t"], "g", handler, consumer="one", max_records=20, stop=threading.Event())
    assert log.lag("t", "g") == 50
    with consuming(log, ["t"], seen, max_records=20):
        wait_until(lambda: log.lag("t", "g") == 0)
    assert list(map(int, seen.values)) == list(range(50))


def test_a_server_killed_and_restarted_while_consuming_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    num_records, published = 600, []
    with EmbeddedValkey(tmp_path, fsync="always") as server, caplog.at_level(logging.INFO):
        log, client, seen = ValkeyLog(server.client()), server.client(), Collector()

        def publish() -> None:
            while len(published) < num_records:
                try:
                    log.publish("t", "k", str(len(published)).encode())
                except LogUnavailable:
                    time.sleep(0.01)
                else:
                    published.append(None)

        def handler(records: Sequence[Record]) -> None:
            client.sadd("handled", *(record.value for record in records))
            time.sleep(0.002)
            seen(records)

        publisher = threading.Thread(target=publish)
        with consuming(log, ["t"], handler, max_records=20):
            publisher.start()
            for kill in range(1, 4):
                wait_until(lambda kill=kill: len(published) > kill * num_records / 5)
                server.kill()
                time.sleep(0.2)
                server.start()
            publisher.join(20)
            wait_until(lambda: log.lag("t", "g") == 0)
        handled = {int(value) for value in client.smembers("handled")}
    assert handled == {int(value) for value in seen.values} == set(range(num_records))
    assert sum("outage" in record.message for record in caplog.records) == 1  # three outages within a minute, one line
    assert not log.rejected


def test_consuming_starts_before_the_server_does(tmp_path: Path) -> None:
    with EmbeddedValkey(tmp_path) as server:
        server.client().ping()
        server.stop()
        log, seen = ValkeyLog(server.client()), Collector()
        with consuming(log, ["t"], seen):
            time.sleep(0.2)
            assert not log.healthy
            server.start()
            log.publish("t", "k", b"1")
            wait_until(lambda: seen.values == [b"1"])
            assert log.healthy


def test_a_server_that_lost_its_data_is_consumed_on(client: redis.Redis) -> None:
    log, seen = ValkeyLog(client), Collector()
    with consuming(log, ["t", "u"], seen):
        log.publish("t", "k", b"1")
        wait_until(lambda: log.lag("t", "g") == 0)
        client.flushall()
        log.publish("u", "k", b"2")
        wait_until(lambda: client.exists(stream_key("t")) == 1 and log.lag("u", "g") == 0)
    assert seen.values == [b"1", b"2"]


@pytest.mark.parametrize("retries", [False, True])
def test_stop_ends_within_a_second_whatever_goes_on(tmp_path: Path, retries: bool) -> None:
    def outage(records: Sequence[Record]) -> None:
        raise Retry("store")

    with EmbeddedValkey(tmp_path) as server:
        # A client made in this way tries again for seconds by itself.
        client = redis.Redis(host="127.0.0.1", port=server.port or 0) if retries else server.client()
        log = ValkeyLog(client)
        with consuming(log, ["t"], Collector()):  # which asserts it
            wait_until(lambda: log.healthy)
        log.publish("t", "k", b"1")
        with consuming(log, ["t"], outage):
            time.sleep(0.8)
        with consuming(log, ["t"], Collector(), consumer="two"):
            wait_until(lambda: log.healthy)
            server.stop()
            time.sleep(0.8)


def test_a_broker_out_of_reach_is_named() -> None:
    log = ValkeyLog(redis.Redis(host="127.0.0.1", port=1))
    started_s = time.monotonic()
    with pytest.raises(LogUnavailable, match="publish to t: "):
        log.publish("t", "k", b"1")
    with pytest.raises(LogUnavailable, match="lag of t: "):
        log.lag("t", "g")
    assert time.monotonic() - started_s < 1


def test_a_full_server_is_an_outage_and_not_poison(tmp_path: Path) -> None:
    with EmbeddedValkey(tmp_path) as server:
        client, seen = server.client(), Collector()
        log = ValkeyLog(client)

        def handler(records: Sequence[Record]) -> None:
            client.set("state", b"x")
            seen(records)

        log.publish("t", "k", b"1")
        client.config_set("maxmemory", "1mb")
        with pytest.raises(LogUnavailable):
            log.publish("t", "k", b"2")
        with consuming(log, ["t"], handler):
            time.sleep(0.3)
            assert seen.values == [] and not log.rejected
            client.config_set("maxmemory", "0")
            wait_until(lambda: seen.values == [b"1"])


def test_settings_of_the_client_are_kept(server: EmbeddedValkey, client: redis.Redis) -> None:
    for made in (
        redis.Redis.from_url(server.url.replace("/0", "/3"), decode_responses=True, protocol=3),
        redis.Redis.from_url(server.socket_url.replace("db=0", "db=3"), protocol=2),
    ):
        log, seen = ValkeyLog(made), Collector()
        made.flushall()
        log.publish("t", "k", b"\xff")
        assert client.exists(stream_key("t")) == 0 and made.exists(stream_key("t")) == 1
        with consuming(log, ["t"], seen):
            wait_until(lambda log=log: log.lag("t", "g") == 0)
        assert seen.values == [b"\xff"]
