"""Any order, repetition and lateness of records ends in one state, also for a user and an ad that have most of the traffic."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streams.embedded import EmbeddedValkey
from streams.events import ACTIVITY_TOPIC, ActivityEvent, encode_event
from streams.features import PAIRS, SLATE, USER
from streams.log import Record
from streams.user_log import UserLog
from tests.solaris.test_worker import NUM_ADS, contents, traffic
from tests.system import System
from tests.time_zones import ZONES

NUM_REQUESTS = 14
HEAVY_EVENTS, BATCH = 100_000, 512
START_MS = 1_650_000_000_000


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def promised(found: dict[str, object]) -> dict[str, object]:
    """What no order may change: logs, slates, user rows, and the pair rows of the slates' ads."""
    kept: dict[str, object] = {}
    for key, value in found.items():
        if key.endswith(PAIRS):
            slate = found[key.replace(PAIRS, SLATE)]
            at = np.isin(value.ads, slate.ads)  # type: ignore[attr-defined]
            kept[key] = [value.ads[at].tolist(), value.state_ms[at].tolist(), value.versions[at].tolist()]  # type: ignore[attr-defined]
            kept[f"{key} vectors"] = value.vectors[at]  # type: ignore[attr-defined]
        elif isinstance(value, list):
            kept[key] = value
        else:
            kept[key] = [value.ads.tolist(), value.state_ms.tolist(), value.versions.tolist()]  # type: ignore[attr-defined]
            kept[f"{key} vectors"] = value.vectors  # type: ignore[attr-defined]
    return kept


def assert_same(one: dict[str, object], two: dict[str, object]) -> None:
    assert one.keys() == two.keys()
    for key, value in one.items():
        if key.endswith("vectors"):
            # One step of f16: another grouping of users into FM runs may round a sum differently.
            np.testing.assert_allclose(value, two[key], atol=4e-3, err_msg=key)  # type: ignore[arg-type]
        else:
            assert value == two[key], key


def replayed(
    system: System, server: EmbeddedValkey, records: Sequence[Record], cuts: Sequence[int]
) -> dict[str, object]:
    client = server.client()
    client.flushall()
    worker = system.worker(client, slate_size=NUM_ADS)
    bounds = [0, *sorted({cut % (len(records) + 1) for cut in cuts}), len(records)]
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        worker.handle(records[start:end])
    return promised(contents(client, system))


@pytest.mark.parametrize("time_zone", ZONES, indirect=True)
def test_any_order_repetition_and_lateness_end_in_one_state(
    system: System, store: EmbeddedValkey, time_zone: str
) -> None:
    records = [Record(*record, str(i)) for i, record in enumerate(traffic(system, NUM_REQUESTS))]
    expected = replayed(system, store, records, range(0, len(records), 2))
    assert sum(key.endswith(PAIRS) for key in expected) > 3
    assert sum(key.endswith(USER) for key in expected) > 3

    @settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        st.permutations(range(len(records))),
        st.lists(st.integers(0, len(records) - 1), max_size=10),
        st.lists(st.integers(0, 1_000), max_size=12),
    )
    def check(order: list[int], again: list[int], cuts: list[int]) -> None:
        delivered = [records[i] for i in order]
        for place, index in enumerate(again):
            delivered.insert(7 * place % len(delivered), records[index])
        assert_same(replayed(system, store, delivered, cuts), expected)

    check()


def test_a_heavy_user_and_a_hot_ad_neither_stall_the_others_nor_grow_memory(
    system: System, store: EmbeddedValkey
) -> None:
    client = store.client()
    surface = system.dataset.schema.surfaces[1]
    hot = 424_242
    others = 50

    def event(number: int, user: str) -> Record:
        made = ActivityEvent(
            event_id=f"e{number}-{user}",
            user_id=user,
            ad_id=hot if number % 2 else 1_000_000 + number,
            surface=surface,
            time_ms=START_MS + number,
        )
        return Record(ACTIVITY_TOPIC, user, encode_event(made), "0")

    worker = system.worker(client, slate_size=NUM_ADS)
    requests = [Record(*record, "0") for record in traffic(system, 20) if record[0] != ACTIVITY_TOPIC]
    worker.handle(requests)
    heavy_bytes, objects, resident = [], [], []
    heavy_key = b""
    for batch, start in enumerate(range(0, HEAVY_EVENTS, BATCH)):
        records = [event(number, "heavy") for number in range(start, min(start + BATCH, HEAVY_EVENTS))]
        worker.handle([*records, event(start, f"other {batch % others}")])
        if batch == 0:
            (heavy_key,) = [key for key in client.keys("{u:*}:log") if client.zcard(key) > 1]
        if batch % 40 == 39:
            heavy_bytes.append(client.memory_usage(heavy_key))
            objects.append(len(gc.get_objects()))
            resident.append(resident_bytes())
    # The log of a user is bounded, and what the worker itself keeps does not grow with events.
    kept = UserLog(client).max_events
    assert client.zcard(heavy_key) == kept < HEAVY_EVENTS
    # The server's tables are as large as the batch before the last trim made them; ten times the events would be ten times the bytes.
    assert max(heavy_bytes) < 1.5 * min(heavy_bytes)
    assert objects[-1] - objects[0] < 2_000
    assert resident[-1] - resident[0] < 32 * 2**20
    # One run of the FM for all events of a batch, and the others have their rows as well.
    runs = worker.metrics.registry.get_sample_value("solaris_users_computed_total")
    batches = -(-HEAVY_EVENTS // BATCH)
    assert runs == 2 * batches
    assert len(client.keys("{u:*}:user")) == others + 1
    newest = client.zrange(heavy_key, -1, -1, withscores=True)[0][1]
    assert newest == START_MS + HEAVY_EVENTS - 1
    # Nothing is kept per ad.
    kinds = {key.decode().rsplit(":", 1)[1] for key in client.keys("*")}
    assert kinds <= {"log", "pairs", "user", "slate", "versions"}
