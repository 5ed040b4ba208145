from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import redis

from solaris.compute import Done
from solaris.speculator import SLATE_DIM
from solaris.worker import GROUP, TOPICS
from streams.embedded import EmbeddedValkey
from streams.events import ACTIVITY_TOPIC, encode_event
from streams.features import PAIRS, SLATE, USER
from streams.log import Record, Retry
from streams.log.valkey import ValkeyLog
from streams.requests import SERVED_TOPIC, ServedRequest, encode_served
from streams.store import EmbeddingStore
from streams.tools import event_of
from streams.user_log import UserLog
from tests.system import System, running

NUM_EVENTS, NUM_ADS = 400, 12


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


def served(system: System, index: int) -> ServedRequest:
    row = system.dataset.rows[index]
    ads = np.random.default_rng(index).choice(system.log.encoder.ads.ids, NUM_ADS, replace=False)
    return ServedRequest(
        request_id=f"r{index}",
        user=int(system.dataset.users[index]),
        surface=int(row["surface"]),
        time_ms=int(row["time_ms"]),
        ads=ads.tolist(),
        scores=[0.5] * NUM_ADS,
        levels=[0] * NUM_ADS,
        ages_ms=[-1] * NUM_ADS,
        variant="ranker",
        model="m",
        fm_version=1,
        degraded=False,
    )


def steps(records: list[tuple[str, str, bytes]], most: int) -> list[list[tuple[str, str, bytes]]]:
    """Cuts records as a replay does: within a step each user occurs once, so that no trigger of his is coalesced with an earlier one.

    Across steps the newest rows are the same anyway; ads that left a slate keep the state of the last job that held them.
    """
    found: list[list[tuple[str, str, bytes]]] = [[]]
    for pair in zip(records[::2], records[1::2], strict=True):
        if len(found[-1]) >= most or pair[0][1] in {key for _, key, _ in found[-1]}:
            found.append([])
        found[-1] += pair
    return found


def traffic(system: System, num: int = NUM_EVENTS) -> list[tuple[str, str, bytes]]:
    """(topic, key, value) of requests and their impressions, in order."""
    records = []
    for index in range(6_000, 6_000 + num):
        key = f"{int(system.dataset.users[index]):016x}"
        records.append((SERVED_TOPIC, key, encode_served(served(system, index))))
        records.append((ACTIVITY_TOPIC, key, encode_event(event_of(system.dataset, index))))
    return records


def contents(client: redis.Redis, system: System) -> dict[str, object]:
    """Everything that was stored, decoded: logs and slates exactly, embeddings by row."""
    layout = system.representer.layout
    found: dict[str, object] = {}
    for key in sorted(client.keys("{u:*")):
        name = key.decode()
        kind = name.rsplit(":", 1)[1]
        if kind == "log":
            found[name] = client.zrange(key, 0, -1)
        else:
            dim = {PAIRS: layout.pair_dim, USER: layout.user_row_dim, SLATE: SLATE_DIM}[kind]
            found[name] = EmbeddingStore(client, kind=kind, dim=dim, ttl_ms=1, failover_ttl_ms=1).decode(
                client.get(key)
            )
    return found


def assert_equal_contents(one: dict[str, object], two: dict[str, object]) -> None:
    assert one.keys() == two.keys()
    for key, value in one.items():
        other = two[key]
        if isinstance(value, list):
            assert value == other, key
            continue
        for column in ("ads", "state_ms", "versions"):
            assert np.array_equal(getattr(value, column), getattr(other, column)), (key, column)
        # One step of f16: another grouping of users into FM runs may round a sum differently.
        np.testing.assert_allclose(value.vectors, other.vectors, atol=4e-3, err_msg=key)


def feed(client: redis.Redis, records: list[tuple[str, str, bytes]]) -> None:
    log = ValkeyLog(client)
    for topic, key, value in records:
        log.publish(topic, key, value)


def num_events(client: redis.Redis) -> int:
    return sum(client.zcard(key) for key in client.keys("{u:*}:log"))


def caught_up(client: redis.Redis) -> bool:
    log = ValkeyLog(client)
    return all(log.lag(topic, GROUP) == 0 for topic in TOPICS)


def undisturbed(
    system: System, client: redis.Redis, records: list[tuple[str, str, bytes]], step: int
) -> dict[str, object]:
    worker = system.worker(client, slate_size=NUM_ADS)
    with running(worker):
        for part in steps(records, step):
            feed(client, part)
            wait_for(lambda: caught_up(client))
    return contents(client, system)


def test_rows_are_a_function_of_log_and_slate(system: System, store: EmbeddedValkey) -> None:
    client = store.client()
    records = traffic(system, 120)
    found = undisturbed(system, client, records, step=2)
    pairs = {key: value for key, value in found.items() if key.endswith(PAIRS)}
    users = {record[1] for record in records}
    assert {key[3:19] for key in pairs} == users
    events = UserLog(client)
    for key, rows in pairs.items():
        newest = events.history(int(key[3:19], 16), 2**53, 1)["time_ms"][0]
        assert rows.state_ms.max() == newest
        assert set(rows.versions.tolist()) == {system.representer.version}


def test_killing_the_worker_at_any_point_ends_in_the_same_store(system: System) -> None:
    """SIGKILL of a real process while records flow, several times; what an undisturbed worker left is the oracle."""
    records = traffic(system)
    step = 40
    with EmbeddedValkey(appendonly=False) as calm:
        expected = undisturbed(system, calm.client(), records, step)
    with EmbeddedValkey(appendonly=False) as server:
        client = server.client()
        environment = {
            **os.environ,
            "SPECRANK_WORKER_GEM": str(system.folder / "gem"),
            "SPECRANK_WORKER_AUTOENCODER": str(system.folder / "autoencoder"),
            "SPECRANK_WORKER_REDIS_URL": server.url,
            "SPECRANK_WORKER_SLATE_SIZE": str(NUM_ADS),
        }

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen([sys.executable, "-m", "specrank", "solaris", "run"], env=environment)

        process = start()
        rng = np.random.default_rng(0)
        kills = 0
        parts = steps(records, step)
        for number, part in enumerate(parts):
            before = num_events(client)
            feed(client, part)
            if number in (len(parts) // 5, len(parts) // 2, len(parts) - 2):
                # In the middle of the step: wait until some of its events, a random number, are in the log.
                taken = int(rng.integers(0, len(part) // 2))
                wait_for(lambda before=before, taken=taken: num_events(client) >= before + taken)
                process.send_signal(signal.SIGKILL)
                process.wait()
                kills += 1
                process = start()
            wait_for(lambda: caught_up(client))
        process.terminate()
        assert process.wait(30) == 0, "SIGTERM ends a worker cleanly"
        assert kills == 3
        assert_equal_contents(contents(client, system), expected)


def test_order_and_repetition_of_records_do_not_matter(system: System, store: EmbeddedValkey) -> None:
    """All records in one batch, then shuffled and doubled in another store: logs, slates and the newest rows agree."""
    records = [Record(topic, key, value, str(i)) for i, (topic, key, value) in enumerate(traffic(system, 60))]
    found = []
    for seed in (None, 1, 2):
        client = store.client()
        client.flushall()
        worker = system.worker(client, slate_size=NUM_ADS)
        order = (
            records
            if seed is None
            else [records[i] for i in np.random.default_rng(seed).integers(0, len(records), 4 * len(records))]
        )
        missing = [r for r in records if r not in order]
        for start in range(0, len(order), 17):
            worker.handle(order[start : start + 17])
        worker.handle(missing)
        found.append(contents(client, system))
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for key, value in found[0].items():
            if key.endswith("log"):
                assert value == other[key]
            elif key.endswith(SLATE) or key.endswith(USER):
                assert np.array_equal(value.ads, other[key].ads), key
                assert np.array_equal(value.state_ms, other[key].state_ms), key


def test_a_slate_that_its_events_overtook_is_computed(system: System, store: EmbeddedValkey) -> None:
    slate, event = (Record(*record, "0") for record in traffic(system, 1))
    found = []
    for batches in ([[slate, event]], [[slate], [event]], [[event], [slate]]):
        client = store.client()
        client.flushall()
        worker = system.worker(client, slate_size=NUM_ADS)
        for batch in batches:
            worker.handle(batch)
        found.append(contents(client, system))
    assert any(key.endswith(PAIRS) for key in found[0])
    for other in found[1:]:
        assert_equal_contents(found[0], other)
    worker.handle([slate])  # again: no event is newer than what was computed, and nothing changes
    assert_equal_contents(found[0], contents(client, system))


def test_poison_is_set_aside_with_its_reason(system: System, store: EmbeddedValkey) -> None:
    client = store.client()
    log = ValkeyLog(client)
    good = traffic(system, 2)
    feed(client, [(ACTIVITY_TOPIC, "x", b"\xff not json"), good[0], (SERVED_TOPIC, "x", b"{}"), *good[1:]])
    bad = encode_event(event_of(system.dataset, 0)).replace(b'"surface":"', b'"surface":"moon')
    feed(client, [(ACTIVITY_TOPIC, "x", bad)])
    worker = system.worker(client)
    with running(worker):
        wait_for(lambda: caught_up(client))
    assert log.published(f"{ACTIVITY_TOPIC}.rejected") == 2
    assert log.published(f"{SERVED_TOPIC}.rejected") == 1
    reasons = (
        b" ".join(value for _, fields in client.xrange("log:activity.rejected") for value in fields.values())
        if client.exists("log:activity.rejected")
        else b" ".join(v for k in client.keys("*activity.rejected*") for _, f in client.xrange(k) for v in f.values())
    )
    assert b"legal values: 0, 1, 2" in reasons
    assert b"not an activity event" in reasons
    assert len(client.keys("{u:*}:log")) == len({key for _, key, _ in good})


def test_a_store_that_is_away_asks_for_another_delivery(system: System) -> None:
    with EmbeddedValkey(appendonly=False) as server:
        client = server.client(socket_timeout=0.5)
        worker = system.worker(client)
        server.kill()
        with pytest.raises(Retry, match="away"):
            worker.handle([Record(*record, "0") for record in traffic(system, 1)])
        server.start()
        worker.handle([Record(*record, "0") for record in traffic(system, 1)])
        assert len(client.keys("{u:*}:pairs")) == 1


def test_an_exhausted_budget_leaves_work_waiting_and_loses_no_event(system: System, store: EmbeddedValkey) -> None:
    client = store.client()
    worker = system.worker(client, flops_per_s=1.0, slate_size=NUM_ADS)
    records = [Record(*record, "0") for record in traffic(system, 50)]
    worker.handle(records)
    logged = len(client.keys("{u:*}:log"))
    assert logged == len({record.key for record in records})
    assert 0 < len(client.keys("{u:*}:pairs")) < logged
    waiting = worker.metrics.registry.get_sample_value("solaris_queue_jobs")
    assert waiting == logged - len(client.keys("{u:*}:user"))


def test_a_user_whose_job_fails_is_left_out_and_the_others_go_on(
    system: System, store: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = store.client()
    worker = system.worker(client, slate_size=NUM_ADS)
    records = [Record(*record, "0") for record in traffic(system, 30)]
    cursed = int(records[0].key, 16)
    compute = worker.compute

    def fail_for_one(users: Sequence[int]) -> Done:
        if cursed in users:
            raise IndexError("no such row")
        return compute(users)

    monkeypatch.setattr(worker, "compute", fail_for_one)
    worker.handle(records)
    assert len(client.keys("{u:*}:user")) == len({record.key for record in records}) - 1
    assert worker.metrics.registry.get_sample_value("solaris_failed_total") == 1
    assert worker.metrics.registry.get_sample_value("solaris_queue_jobs") == 0


def test_served_records_of_another_schema_are_set_aside(system: System, store: EmbeddedValkey) -> None:
    client = store.client()
    topic, key, value = traffic(system, 1)[0]
    foreign = value.replace(b'"surface":', b'"surface":9')
    system.worker(client).handle([Record(topic, key, foreign, "0")])
    assert ValkeyLog(client).published(f"{SERVED_TOPIC}.rejected") == 1
    assert not client.keys("{u:*}:slate")
