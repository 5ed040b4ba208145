"""What a worker chooses to compute: by value under a price, by new events, by what kind of event; and what it does when the FM changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import redis

from solaris.budget import Cost
from solaris.compute import Computer, Known
from solaris.refill import VERSIONS, Refill
from solaris.speculator import SLATE_DIM, Speculator, slate_of
from solaris.worker import event_values
from streams.embedded import EmbeddedValkey
from streams.events import ACTIVITY_TOPIC, ActivityEvent, encode_event, event_row
from streams.features import PAIRS, SLATE, USER, store_of
from streams.log import Record, Retry
from streams.log.valkey import ValkeyLog
from streams.requests import ServedRequest, encode_served
from streams.rows import LOG_ROW
from streams.store import EmbeddingStore, Rows
from streams.tools import event_of
from streams.user_log import FOREVER_MS, UserLog
from tests.solaris.test_worker import NUM_ADS, served, traffic
from tests.system import System

HOUR_MS = 3_600_000


def speculator_of(system: System, client: redis.Redis) -> Speculator:
    representer = system.representer
    return Speculator(client, representer.layout, representer.version, Cost(*representer.engine.flops()), NUM_ADS)


def later(request: ServedRequest, by_ms: int, **changes: object) -> ServedRequest:
    values = {name: getattr(request, name) for name in request.__struct_fields__}
    return ServedRequest(**values | {"time_ms": request.time_ms + by_ms} | changes)  # type: ignore[arg-type]


def test_a_slate_is_what_was_served_last_with_its_scores_and_levels(system: System, store: EmbeddedValkey) -> None:
    speculator = speculator_of(system, store.client())
    request = served(system, 6_000)
    scores = np.linspace(0.9, 0.1, NUM_ADS).tolist()
    speculator.remember([later(request, 5, scores=scores, levels=[4] * NUM_ADS), request])
    slate = slate_of(speculator.store.read(request.user))
    order = np.argsort(slate.ranks)
    assert slate.ads[order].tolist() == request.ads
    np.testing.assert_allclose(1 / (1 + np.exp(-slate.logits[order])), scores, atol=1e-3)
    assert set(slate.levels.tolist()) == {4}
    assert (slate.surface, slate.time_ms) == (request.surface, request.time_ms + 5)


def test_learning_does_not_depend_on_redelivery(system: System, store: EmbeddedValkey) -> None:
    request = served(system, 6_000)
    requests = [later(request, hour * HOUR_MS) for hour in range(6)]
    once, thrice = speculator_of(system, store.client()), speculator_of(system, store.client())
    for one in requests:
        once.remember([one])
    store.client().flushall()
    for one in requests:
        thrice.remember([one])
        thrice.remember([one, one])
    slate = slate_of(once.store.read(request.user))
    np.testing.assert_array_equal(once.outlook.persistence(slate), thrice.outlook.persistence(slate))
    assert once.value(request.user) == thrice.value(request.user)
    assert once.value(request.user) > speculator_of(system, store.client()).value(request.user)


def test_a_price_leaves_the_best_pairs_of_the_best_users(system: System, store: EmbeddedValkey) -> None:
    speculator = speculator_of(system, store.client())
    one, two = served(system, 6_000), served(system, 6_001)
    assert one.user != two.user
    for hour in range(12):  # one comes each hour, two once; the best half of a slate is asked for again, the rest never
        fresh = (np.arange(NUM_ADS // 2) + 10_000 + hour * NUM_ADS).tolist()
        speculator.remember([later(one, hour * HOUR_MS, ads=one.ads[: NUM_ADS // 2] + fresh)])
    speculator.remember([later(two, 11 * HOUR_MS)])
    users = [one.user, two.user]
    slates = [slate_of(rows) for rows in speculator.store.read_many(users)]
    nothing = [Rows.empty(1), Rows.empty(1)]
    free = speculator.plan(users, slates, nothing, [0, 0], 0.0)
    assert [len(plan.ads) for plan in free] == [NUM_ADS, NUM_ADS]
    assert all(plan.worthwhile for plan in free)
    values = np.concatenate([plan.asked for plan in free])
    assert free[0].asked.mean() > free[1].asked.mean()
    flops = speculator._cost.pair_flops
    priced = speculator.plan(users, slates, nothing, [0, 0], float(np.quantile(values, 0.6)) / flops)
    assert 0 < len(priced[0].ads) < NUM_ADS
    assert len(priced[1].ads) == 0
    assert not priced[1].worthwhile
    best = free[0].ads[np.argsort(-free[0].asked, kind="stable")[: len(priced[0].ads)]]
    assert set(priced[0].ads.tolist()) == set(best.tolist())
    assert priced[0].flops == speculator._cost.of(len(priced[0].ads))


def test_a_pair_that_has_a_fresh_row_is_worth_less(system: System, store: EmbeddedValkey) -> None:
    speculator = speculator_of(system, store.client())
    request = served(system, 6_000)
    speculator.remember([request])
    slate = slate_of(speculator.store.read(request.user))
    half = slate.ads[: NUM_ADS // 2]
    times = np.full(len(half), request.time_ms)
    version = np.full(len(half), system.representer.version, dtype=np.uint64)
    rows = Rows(half, times, version, np.zeros((len(half), 0), np.float32))
    (plan,) = speculator.plan([request.user], [slate], [rows], [request.time_ms], 0.0)
    assert plan.asked[: NUM_ADS // 2].max() < plan.asked[NUM_ADS // 2 :].min()
    foreign = replace(rows, versions=version + np.uint64(1))
    (other,) = speculator.plan([request.user], [slate], [foreign], [request.time_ms], 0.0)
    assert other.asked[: NUM_ADS // 2].min() > plan.asked[: NUM_ADS // 2].max(), "rows of another FM are none"


def test_the_fm_runs_again_only_after_enough_events(system: System, store: EmbeddedValkey) -> None:
    client = store.client()
    user = max(set(system.dataset.users.tolist()), key=system.dataset.users.tolist().count)
    own = np.flatnonzero(system.dataset.users == user)[:7]
    worker = system.worker(client, slate_size=NUM_ADS, min_events=3)
    users = store_of(client, USER, system.representer.layout)
    states = []
    for index in own:
        worker.handle([Record(ACTIVITY_TOPIC, "k", encode_event(event_of(system.dataset, int(index))), "0")])
        states.append(int(users.read(user).state_ms[0]))
    times = system.dataset.rows["time_ms"][own].tolist()
    assert states == [times[0]] * 3 + [times[3]] * 3 + [times[6]]
    assert worker.metrics.registry.get_sample_value("solaris_skipped_total", {"reason": "unchanged"}) == 4
    # A slate without rows is reason enough.
    request = later(served(system, int(own[-1])), -1)
    worker.handle([Record("served", "k", encode_served(request), "0")])
    pairs = store_of(client, PAIRS, system.representer.layout).read(user)
    assert set(pairs.ads.tolist()) == set(request.ads)
    with pytest.raises(ValueError, match="min_events"):
        system.worker(client, min_events=0)


def test_valuable_events_go_first(system: System, store: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch) -> None:
    client = store.client()
    records = [Record(*record, "0") for record in traffic(system, 60) if record[0] == ACTIVITY_TOPIC]
    first = {}
    for values in ({}, {"long_view": 50.0}):
        client.flushall()
        worker = system.worker(client, micro_batch=1, event_values=values)
        order: list[int] = []
        monkeypatch.setattr(
            worker, "compute", lambda users, w=worker, o=order: (o.extend(users), type(w).compute(w, users))[1]
        )
        worker.handle(records)
        first[bool(values)] = order
    liked = {
        int(user)
        for user, row in zip(system.dataset.users[6_000:6_060], system.dataset.rows[6_000:6_060], strict=True)
        if int(row["actions"]) >> system.dataset.schema.event_types.index("long_view") & 1
    }
    assert liked
    assert set(first[True][: len(liked)]) == liked
    assert set(first[False][: len(liked)]) != liked
    assert set(first[True]) == set(first[False])
    with pytest.raises(ValueError, match="unknown event type 'moon' in event_values; legal values: "):
        event_values({"moon": 1.0}, system.dataset.schema)
    with pytest.raises(ValueError, match="is_like is worth 0"):
        event_values({"is_like": 0.0}, system.dataset.schema)


def test_a_finite_budget_computes_what_is_worth_most_and_counts_the_rest(system: System, store: EmbeddedValkey) -> None:
    """The price is set by hand here: what it should be is `test_price`'s."""
    client = store.client()
    worker = system.worker(client, slate_size=NUM_ADS, flops_per_s=1e12)
    worker._bucket.spend(5e12)  # half full
    worker._price.value = 1.0  # far above any gain a FLOP can bring
    records = [Record(*record, "0") for record in traffic(system, 20)]
    worker.handle(records)
    value = worker.metrics.registry.get_sample_value
    assert value("solaris_users_computed_total") == 0
    assert value("solaris_skipped_total", {"reason": "worthless"}) == len({record.key for record in records})
    worker._price.value = 0.0
    worker.handle(records)
    assert value("solaris_users_computed_total") == len({record.key for record in records})
    assert value("solaris_flops_total") == pytest.approx(
        sum(
            worker._cost.of(len(slate_of(s).ads))
            for s in worker._speculator.store.read_many([int(k, 16) for k in {r.key for r in records}])
        )
    )


def test_rows_of_an_older_fm_are_refilled_in_idle_time(system: System, store: EmbeddedValkey) -> None:
    client = store.client()
    old = system.worker(client, slate_size=NUM_ADS)
    old._computer._representer.version = 7  # the FM of yesterday
    old._refill = Refill(client, old._computer.users, 7)
    old._speculator._version = 7
    records = [Record(*record, "0") for record in traffic(system, 40)]
    old.handle(records)
    users = [int(key, 16) for key in {record.key for record in records}]
    layout, version = system.representer.layout, system.representer.version
    own, pairs = store_of(client, USER, layout), store_of(client, PAIRS, layout)
    states = [rows.state_ms.tolist() for rows in own.read_many(users)]
    assert {int(rows.versions[0]) for rows in own.read_many(users)} == {7}
    new = system.worker(client, slate_size=NUM_ADS)
    for _ in range(100):
        new.drain()
        if new._refill.done and not len(new._queue):
            break
    assert {int(rows.versions[0]) for rows in own.read_many(users)} == {version}
    assert [rows.state_ms.tolist() for rows in own.read_many(users)] == states, "the same logs, so the same states"
    assert {v for rows in pairs.read_many(users) for v in rows.versions.tolist()} == {version}, "never two in one value"
    assert new._refill.retired == {7}
    assert client.zrange(VERSIONS, 0, -1) == [b"0000000000000007", f"{version:016x}".encode()]
    again = Refill(client, own, version)
    again.start()
    while not again.done:
        assert again.step() == [], "all is refilled"


def test_work_that_a_killed_worker_took_with_it_is_found_again(system: System, store: EmbeddedValkey) -> None:
    client = store.client()
    records = [Record(*record, "0") for record in traffic(system, 60)]
    killed = system.worker(client, flops_per_s=1.0, slate_size=NUM_ADS)
    killed.handle(records)
    done = len(client.keys("{u:*}:user"))
    users = {int(record.key, 16) for record in records}
    assert done < len(users), "the budget is short, so jobs wait in memory"
    quiet = ActivityEvent(
        event_id=1, user_id=99, ad_id=1, surface=system.dataset.schema.surfaces[0], time_ms=1_650_000_000_000
    )
    user, row = event_row(quiet, system.dataset.schema)
    UserLog(client).append(
        np.array([user], np.uint64), np.array([row], LOG_ROW)
    )  # a log that was loaded; nobody asked for him
    after = system.worker(client, slate_size=NUM_ADS)
    for _ in range(20):
        after.drain()
    newest = UserLog(client).histories(np.array(sorted(users), np.uint64), np.full(len(users), FOREVER_MS), 1)[0][
        "time_ms"
    ]
    found = store_of(client, USER, system.representer.layout).read_many(sorted(users))
    assert [int(rows.state_ms[0]) for rows in found] == newest.tolist()
    assert after._refill.done
    assert len(client.keys("{u:*}:user")) == len(users)


def test_the_bound_of_a_users_rows_holds(system: System, store: EmbeddedValkey) -> None:
    client = store.client()
    worker = system.worker(client, slate_size=NUM_ADS, max_rows=NUM_ADS + 3)
    request = served(system, 6_000)
    event = event_of(system.dataset, 6_000)
    log_rows = []
    for step in range(4):
        ads = (np.arange(NUM_ADS) + 1_000 * step).tolist()
        one = later(request, step * HOUR_MS, ads=ads)
        again = type(event)(
            **{name: getattr(event, name) for name in event.__struct_fields__}
            | {"event_id": f"e{step}", "time_ms": one.time_ms}
        )
        worker.handle(
            [Record("served", "k", encode_served(one), "0"), Record(ACTIVITY_TOPIC, "k", encode_event(again), "0")]
        )
        log_rows.append(ads)
    found = store_of(client, PAIRS, system.representer.layout).read(request.user)
    assert len(found) == NUM_ADS + 3
    assert set(log_rows[-1]) <= set(found.ads.tolist()), "what is newest stays"


def test_a_slate_of_another_codec_is_read_as_empty(system: System, store: EmbeddedValkey) -> None:
    speculator = speculator_of(system, store.client())
    narrow = EmbeddingStore(store.client(), kind=SLATE, dim=SLATE_DIM - 1, ttl_ms=1_000, failover_ttl_ms=1_000)
    narrow.write(
        [7],
        [
            Rows(
                np.array([1], np.uint64),
                np.array([1]),
                np.array([0], np.uint64),
                np.zeros((1, SLATE_DIM - 1), np.float32),
            )
        ],
    )
    assert len(slate_of(speculator.store.read(7)).ads) == 0
    assert speculator.plan([], [], [], [], 0.0) == []
    with pytest.raises(ValueError, match="slate_size"):
        Speculator(store.client(), system.representer.layout, 1, Cost(1, 1), 0)
    with pytest.raises(ValueError, match="min_events"):
        Computer(store.client(), system.representer, speculator, max_rows=1, min_events=0)


def test_a_slow_worker_does_not_overwrite_what_another_computed_since(system: System, store: EmbeddedValkey) -> None:
    client = store.client()
    records = [Record(*record, "0") for record in traffic(system, 1)]
    user = int(records[0].key, 16)
    slow, quick = (system.worker(client, slate_size=NUM_ADS) for _ in range(2))
    slow.handle(records)
    read = slow._computer._read
    own = np.flatnonzero(system.dataset.users == user)
    earlier = own[own < 6_000][-3:]
    late = [Record(ACTIVITY_TOPIC, "k", encode_event(event_of(system.dataset, int(i))), "0") for i in earlier]
    assert late

    def interrupted(users: list[int]) -> list[Known]:
        known = read(users)
        quick.handle(late)  # the state is the same, what it knows is more
        return known

    slow._computer._read = interrupted  # type: ignore[method-assign, assignment]
    done = slow.compute([user])
    slow._computer._read = read  # type: ignore[method-assign]
    assert done.lost == [user]
    assert len(slow._queue) == 1, "to be run again"
    pairs = store_of(client, PAIRS, system.representer.layout)
    between = pairs.read(user).vectors
    slow.drain()
    np.testing.assert_allclose(pairs.read(user).vectors, between, atol=4e-3)


def test_a_full_bucket_computes_whatever_the_price(system: System, store: EmbeddedValkey) -> None:
    client = store.client()
    worker = system.worker(client, slate_size=NUM_ADS, flops_per_s=1e15)
    worker._price.value = 1.0  # stale: of a time when the bucket was empty
    records = [Record(*record, "0") for record in traffic(system, 10)]
    worker.handle(records)
    assert len(client.keys("{u:*}:user")) == len({record.key for record in records})


def test_jobs_of_a_run_that_falls_apart_in_an_outage_are_kept(
    system: System, store: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = system.worker(store.client(), slate_size=NUM_ADS)
    calls = []

    def fail(users: list[int]) -> None:
        calls.append(users)
        raise IndexError("cursed") if len(calls) < 3 else redis.ConnectionError("away")

    monkeypatch.setattr(worker, "compute", fail)
    users = {record[1] for record in traffic(system, 30)}
    with pytest.raises(Retry):
        worker.handle([Record(*record, "0") for record in traffic(system, 30)])
    assert len(calls) == 3, "all together, the first alone, the second alone"
    assert len(worker._queue) == len(users) - 1, "but for the one that cannot be done"


def test_what_a_server_refuses_for_now_is_an_outage(system: System) -> None:
    with EmbeddedValkey(appendonly=False) as server:
        client = server.client()
        worker = system.worker(client, slate_size=NUM_ADS)
        client.config_set("min-replicas-to-write", 1)
        records = [Record(*record, "0") for record in traffic(system, 3)]
        with pytest.raises(Retry, match="NOREPLICAS"):
            worker.handle(records)
        client.config_set("min-replicas-to-write", 0)
        worker.handle(records)
        assert len(client.keys("{u:*}:user")) == len({record.key for record in records})


def test_served_requests_from_the_future_or_of_no_identity_are_refused(system: System, store: EmbeddedValkey) -> None:
    client = store.client()
    worker = system.worker(client, slate_size=NUM_ADS)
    request = served(system, 6_000)
    bad = [
        later(request, request.time_ms * 999),  # microseconds
        later(request, 0, user=-1),
        later(request, 0, ads=[-5, *request.ads[1:]]),
    ]
    worker.handle([Record("served", "k", encode_served(one), "0") for one in bad])
    reasons = [record.value for record in ValkeyLog(client).newest("served.rejected", 5)]
    assert len(reasons) == 3
    assert b"time_ms" in reasons[0] and b"user of a served" in reasons[1] and b"ads of a served" in reasons[2]
    assert not client.keys("{u:*}:slate")


def test_no_request_of_a_batch_hides_another_that_its_event_overtook(system: System, store: EmbeddedValkey) -> None:
    client = store.client()
    slate, event = (Record(*record, "0") for record in traffic(system, 1))
    worker = system.worker(client, slate_size=NUM_ADS)
    worker.handle([event])
    request = served(system, 6_000)
    worker.handle([Record("served", "k", encode_served(later(request, by)), "0") for by in (-50, 50)])
    rows = store_of(client, PAIRS, system.representer.layout).read(request.user)
    assert set(rows.ads.tolist()) == set(request.ads)


def test_late_events_count_towards_the_next_run(system: System, store: EmbeddedValkey) -> None:
    client = store.client()
    user = max(set(system.dataset.users.tolist()), key=system.dataset.users.tolist().count)
    own = np.flatnonzero(system.dataset.users == user)[:6][::-1]  # the newest first
    worker = system.worker(client, slate_size=NUM_ADS, min_events=3)
    users = store_of(client, USER, system.representer.layout)
    vectors = []
    for index in own:
        worker.handle([Record(ACTIVITY_TOPIC, "k", encode_event(event_of(system.dataset, int(index))), "0")])
        vectors.append(users.read(user).vectors[0].tolist())
    changed = [one != two for one, two in zip(vectors[:-1], vectors[1:], strict=True)]
    assert changed == [False, False, True, False, False]


def test_only_a_run_that_was_written_resets_the_count_of_events(
    system: System, store: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = system.worker(store.client(), slate_size=NUM_ADS)
    worker.handle([Record(ACTIVITY_TOPIC, "k", encode_event(event_of(system.dataset, 0)), "0")])
    user = int(system.dataset.users[0])
    events = {user: 3, user + 1: 1}
    with monkeypatch.context() as patch:
        patch.setattr("solaris.compute.write_seen", lambda *_: [user])
        assert worker._computer.run([user], 0.0, events).lost == [user]

        def away(*_: object) -> list[int]:
            raise redis.ConnectionError("away")

        patch.setattr("solaris.compute.write_seen", away)
        with pytest.raises(redis.ConnectionError):
            worker._computer.run([user], 0.0, events)
    assert events == {user: 3, user + 1: 1}
    assert worker._computer.run([user], 0.0, events).lost == []
    assert events == {user + 1: 1}


def test_nothing_is_dropped_while_the_budget_allows_work(system: System, store: EmbeddedValkey) -> None:
    client = store.client()
    records = [Record(*record, "0") for record in traffic(system, 60)]
    users = {record.key for record in records}
    worker = system.worker(client, slate_size=NUM_ADS, max_jobs=5)
    worker.handle(records)
    assert len(client.keys("{u:*}:user")) == len(users) > 5
    assert worker.metrics.registry.get_sample_value("solaris_dropped_total") == 0
