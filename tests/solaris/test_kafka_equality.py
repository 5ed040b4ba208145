"""The mini log through a genuine broker ends in what the embedded log makes of it, event for event."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from streams.embedded import EmbeddedValkey
from streams.events import encode_event
from streams.log import ActivityLog
from streams.log.valkey import ValkeyLog
from streams.log.valkey_consumer import stream_key
from streams.requests import SERVED_TOPIC
from streams.tools import events_of, produce
from tests.kafka_broker import Broker
from tests.solaris.kafka_system import (
    Fleet,
    WorkerPlace,
    assert_events_once_in_order,
    assert_same_state,
    final_state,
    fresh_log,
    redelivered,
    wait_until,
)
from tests.solaris.test_worker import NUM_ADS, caught_up
from tests.system import System, running

NUM_REQUESTS = 1_000
"""Newest requests that are served; with the events of the whole mini log, 15,471."""


def served_by_the_api(system: System, store: EmbeddedValkey) -> list[tuple[str, bytes]]:
    """(key, value) of what a ranking API puts into the served log for the newest requests."""
    log, rng = system.log, np.random.default_rng(0)
    ads = list(system.dataset.raw_ads.values())
    with system.api(store.url) as http:
        for request in range(len(log) - NUM_REQUESTS, len(log)):
            body = {
                "user_id": int(system.dataset.raw_users[log.events[log.offsets[request]]]),
                "surface": system.dataset.schema.surfaces[log.surfaces[request]],
                "time_ms": int(log.times_ms[request]),
                "candidates": [int(ad) for ad in rng.choice(ads, NUM_ADS, replace=False)],
            }
            assert http.post("/v1/rank", content=orjson.dumps(body)).status_code == 200
    found: Any = store.client().xrange(stream_key(SERVED_TOPIC))
    return [(fields[b"k"].decode(), fields[b"v"]) for _, fields in found]


def publish_all(system: System, log: ActivityLog, requests: list[tuple[str, bytes]]) -> None:
    log.publish_many(SERVED_TOPIC, requests)
    produced = produce(log, (encode_event(event) for event in events_of(system.dataset)), system.dataset.schema)
    assert (produced.published, produced.refused) == (len(system.dataset.rows), 0)


def test_kafka_and_the_embedded_log_end_in_the_same_state(
    system: System, store: EmbeddedValkey, broker: Broker, unique: str
) -> None:
    client = store.client()
    requests = served_by_the_api(system, store)
    assert len(requests) == NUM_REQUESTS
    client.flushall()

    with running(system.worker(client, slate_size=NUM_ADS)):
        publish_all(system, ValkeyLog(client), requests)
        wait_until(lambda: caught_up(client))
    wanted = final_state(client, system)
    assert_events_once_in_order(wanted.values(), len(system.dataset.rows))
    assert sum(len(user.slate) > 0 for user in wanted.values()) > 200

    client.flushall()
    with fresh_log(broker) as log:
        publish_all(system, log, requests)
        fleet = Fleet(WorkerPlace(broker.address, store.url, system.folder, unique), ["one", "two"])
        try:
            wait_until(fleet.group.caught_up)
            assert fleet.stop() == [0, 0]
        finally:
            fleet.close()
    assert_same_state(final_state(client, system), wanted)
    assert redelivered(client)[0] == len(requests) + len(system.dataset.rows)
