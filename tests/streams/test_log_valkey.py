from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

import streams.log.valkey
from streams.log import LogUnavailable, Record, Retry, reject
from streams.log.throttle import Throttle
from streams.log.valkey import ValkeyLog
from streams.log.valkey_consumer import Consumer, stream_key


@contextmanager
def consuming(
    log: ValkeyLog, topics: Sequence[str], handler: Callable[..., None], **options: Any
) -> Iterator[threading.Event]:
    """A consumer in a thread; on leaving it is stopped, and has to end within a second and without error."""
    stop, errors = threading.Event(), []
    arguments: dict[str, Any] = {"group": "g", "consumer": "one"} | options
    group = arguments.pop("group")

    def run() -> None:
        try:
            log.consume(topics, group, handler, stop=stop, **arguments)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield stop
    finally:
        stop.set()
        thread.join(1)
        assert not thread.is_alive(), "consume did not end within a second of stop"
        assert not errors, errors


def wait_until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


class Collector:
    """A handler that keeps its batches."""

    def __init__(self) -> None:
        self.batches: list[list[Record]] = []

    def __call__(self, records: Sequence[Record]) -> None:
        self.batches.append(list(records))

    @property
    def records(self) -> list[Record]:
        return [record for batch in self.batches for record in batch]

    @property
    def values(self) -> list[bytes]:
        return [record.value for record in self.records]


def test_records_come_in_order_with_their_bytes(client: redis.Redis) -> None:
    log, seen = ValkeyLog(client), Collector()
    records = [("", b""), ("ключ", b"\xff\x00\n"), *((str(i), b"%d" % i) for i in range(2_500))]
    log.publish("t", *records[0])
    log.publish_many("t", records[1:])
    log.publish_many("t", [])
    assert log.lag("t", "g") == len(records)
    with consuming(log, ["t"], seen):
        wait_until(lambda: log.lag("t", "g") == 0)
    assert [(record.key, record.value) for record in seen.records] == records
    assert {record.topic for record in seen.records} == {"t"}
    assert len({record.offset for record in seen.records}) == len(records)
    assert max(map(len, seen.batches)) <= 1000


def test_groups_are_independent_and_start_at_the_oldest(client: redis.Redis) -> None:
    log, first, second = ValkeyLog(client), Collector(), Collector()
    log.publish("t", "k", b"1")
    with consuming(log, ["t"], first, group="a"):
        wait_until(lambda: log.lag("t", "a") == 0)
    log.publish("t", "k", b"2")
    assert (log.lag("t", "a"), log.lag("t", "b"), log.lag("none", "a")) == (1, 2, 0)
    with consuming(log, ["t"], second, group="b"):
        wait_until(lambda: log.lag("t", "b") == 0)
    assert (first.values, second.values) == ([b"1"], [b"1", b"2"])


def test_a_record_is_committed_after_the_handler_only(client: redis.Redis) -> None:
    log, lags = ValkeyLog(client), []
    log.publish_many("t", [("k", b"1"), ("k", b"2"), ("k", b"3")])
    with consuming(log, ["t"], lambda records: lags.append(log.lag("t", "g")), max_records=2):
        wait_until(lambda: log.lag("t", "g") == 0)
    assert lags == [3, 1]


def test_consumers_of_a_group_share_the_records(client: redis.Redis) -> None:
    log, one, two = ValkeyLog(client), Collector(), Collector()
    with (
        consuming(log, ["t"], one, consumer="one", max_records=1),
        consuming(log, ["t"], two, consumer="two", max_records=1),
    ):
        for i in range(200):
            log.publish("t", "k", b"%d" % i)
        wait_until(lambda: log.lag("t", "g") == 0)
    assert sorted(map(int, one.values + two.values)) == list(range(200))
    assert one.values and two.values


def test_idle_is_reported(client: redis.Redis) -> None:
    log, seen, idles = ValkeyLog(client), Collector(), []
    log.publish("t", "k", b"1")
    with consuming(log, ["t", "u"], seen, on_idle=lambda: idles.append(len(seen.batches))):
        wait_until(lambda: len(idles) >= 2)
    assert idles[0] == 1  # not before what was there had been handed over


@pytest.mark.parametrize("outage", [Retry("store"), redis.ConnectionError("store"), LogUnavailable("broker")])
def test_a_passing_outage_commits_nothing_and_delivers_again(client: redis.Redis, outage: Exception) -> None:
    log, seen, lags, calls = ValkeyLog(client), Collector(), [], []

    def handler(records: Sequence[Record]) -> None:
        calls.append(time.monotonic())
        lags.append(log.lag("t", "g"))
        if len(calls) <= 3:
            raise outage
        seen(records)

    log.publish_many("t", [("k", b"1"), ("k", b"2")])
    with consuming(log, ["t"], handler):
        wait_until(lambda: log.lag("t", "g") == 0)
    assert seen.values == [b"1", b"2"] and lags == [2, 2, 2, 2]
    assert not log.rejected and client.exists(stream_key("t.rejected")) == 0
    assert calls[1] - calls[0] >= 0.025 and calls[3] - calls[2] >= 0.1  # half of .05 s at least, doubled twice


def poisoned(seen: Collector) -> Callable[[Sequence[Record]], None]:
    def handler(records: Sequence[Record]) -> None:
        for record in records:
            if record.value.startswith(b"poison"):
                raise ValueError(f"bad {record.key}")
        seen(records)

    return handler


def test_a_poison_record_is_put_aside_and_the_stream_goes_on(client: redis.Redis) -> None:
    log, seen, rejected = ValkeyLog(client), Collector(), Collector()
    log.publish_many("t", [("a", b"1"), ("b", b"poison"), ("c", b"3"), ("d", b"poison\xff"), ("e", b"5")])
    with consuming(log, ["t"], poisoned(seen)):
        wait_until(lambda: log.lag("t", "g") == 0)
        log.publish("t", "f", b"6")
        wait_until(lambda: log.lag("t", "g") == 0)
    assert seen.values == [b"1", b"3", b"5", b"6"] and log.rejected == {"t": 2}
    with consuming(log, ["t.rejected"], rejected):
        wait_until(lambda: log.lag("t.rejected", "g") == 0)
    text, binary = (json.loads(value) for value in rejected.values)
    assert [record.key for record in rejected.records] == ["b", "d"]
    assert abs(text.pop("time_ms") - time.time() * 1000) < 60_000
    assert text == {"topic": "t", "key": "b", "value": "poison", "encoding": "utf-8", "reason": "ValueError: bad b"}
    assert (binary["encoding"], base64.b64decode(binary["value"])) == ("base64", b"poison\xff")


def test_an_outage_while_putting_aside_loses_nothing(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    log, seen, publish = ValkeyLog(client), Collector(), ValkeyLog.publish
    failures = [LogUnavailable("down")] * 2

    def flaky(self: ValkeyLog, topic: str, key: str, value: bytes) -> None:
        if topic == "t.rejected" and failures:
            raise failures.pop()
        publish(self, topic, key, value)

    monkeypatch.setattr(ValkeyLog, "publish", flaky)
    log.publish_many("t", [("a", b"poison"), ("b", b"2")])
    with consuming(log, ["t"], poisoned(seen)):
        wait_until(lambda: log.lag("t", "g") == 0)
    assert seen.values == [b"2"] and log.rejected == {"t": 1} and client.xlen(stream_key("t.rejected")) == 1


def test_retry_within_a_poisoned_batch(client: redis.Redis) -> None:
    log, seen, outages = ValkeyLog(client), Collector(), [Retry("store")] * 2

    def handler(records: Sequence[Record]) -> None:
        if len(records) == 1 and records[0].value == b"2" and outages:
            raise outages.pop()
        poisoned(seen)(records)

    log.publish_many("t", [("a", b"poison"), ("b", b"2"), ("c", b"3")])
    with consuming(log, ["t"], handler):
        wait_until(lambda: log.lag("t", "g") == 0)
    assert seen.values == [b"2", b"3"] and log.rejected == {"t": 1}


def test_an_entry_of_a_foreign_producer_reaches_the_handler(client: redis.Redis) -> None:
    log, seen = ValkeyLog(client), Collector()
    client.xadd(stream_key("t"), {"something": "else"})
    client.xadd(stream_key("t"), {"k": b"\xff", "v": "1"})
    with consuming(log, ["t"], seen):
        wait_until(lambda: log.lag("t", "g") == 0)
    assert [(record.key, record.value) for record in seen.records] == [("", b""), ("\ufffd", b"1")]


@settings(max_examples=40)
@given(
    arrivals=st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0, 1, 1, 1, 50])), max_size=150),
    max_records=st.sampled_from([3, 6, 20, 1000]),
    unfinished=st.integers(0, 30),
)
def test_no_record_overtakes_one_of_another_topic(
    client: redis.Redis, arrivals: list[tuple[str, int]], max_records: int, unfinished: int
) -> None:
    client.flushall()
    time_ms = 1
    for number, (topic, step_ms) in enumerate(arrivals):
        time_ms += step_ms
        client.xadd(stream_key(topic), {"k": "", "v": f"{time_ms}"}, id=f"{time_ms}-{number + 1}")
    topics = ["b", "a", "c"]
    for topic in topics:
        client.xgroup_create(stream_key(topic), "g", "0", mkstream=True)
    if unfinished:  # an earlier run of this consumer was killed with these in hand
        client.xreadgroup("g", "one", {stream_key("a"): ">"}, count=unfinished)
    log, seen, stop = ValkeyLog(client), Collector(), threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("streams.log.valkey_consumer.BLOCK_MS", 1)
        log.consume(topics, "g", seen, consumer="one", max_records=max_records, stop=stop, on_idle=stop.set)
    assert sorted((r.topic, r.offset) for r in seen.records) == sorted(
        (topic, entry.decode()) for topic in topics for entry, _ in client.xrange(stream_key(topic))
    )
    latest_ms = {topic: 0 for topic in topics}
    for batch in seen.batches:
        assert 0 < len(batch) <= max_records
        assert [r.topic for r in batch] == sorted((r.topic for r in batch), key=topics.index)
        for record in batch:
            others = [ms for topic, ms in latest_ms.items() if topic != record.topic]
            assert int(record.value) >= max(others)
        for record in batch:
            latest_ms[record.topic] = max(latest_ms[record.topic], int(record.value))
    if max_records == 1000:
        assert len(seen.batches) <= 2
    assert sum(log.lag(topic, "g") for topic in topics) == 0


def test_streams_are_bounded(client: redis.Redis) -> None:
    log = ValkeyLog(client, max_records=200)
    log.publish_many("t", [("k", b"v")] * 5_000)
    assert 200 <= client.xlen(stream_key("t")) <= 400
    assert log.lag("t", "g") == client.xlen(stream_key("t"))
    assert (log.published("t"), log.published("none")) == (5_000, 0)  # what fell out included


@pytest.mark.parametrize("claims", [True, False], ids=["seen when claiming", "seen when reading"])
def test_records_that_fell_out_while_pending_are_counted_and_passed_over(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch, claims: bool
) -> None:
    if not claims:
        monkeypatch.setattr(Consumer, "_claim", lambda self: None)
    log, seen = ValkeyLog(client), Collector()
    log.publish_many("t", [("k", b"%d" % i) for i in range(10)])
    client.xgroup_create(stream_key("t"), "g", "0")
    client.xreadgroup("g", "one", {stream_key("t"): ">"}, count=6)
    client.xtrim(stream_key("t"), maxlen=5, approximate=False)
    with consuming(log, ["t"], seen, max_records=2):
        wait_until(lambda: log.lag("t", "g") == 0)
    assert seen.values == [b"5", b"6", b"7", b"8", b"9"] and log.trimmed == {"t": 5}


def test_illegal_arguments(client: redis.Redis) -> None:
    log, stop = ValkeyLog(client), threading.Event()
    for topics in ([], ["t", "t"]):
        with pytest.raises(ValueError, match="expected one or more different ones"):
            log.consume(topics, "g", Collector(), consumer="c", stop=stop)
    with pytest.raises(ValueError, match="max_records is 1, expected at least 1 for each of 2 topics"):
        log.consume(["t", "u"], "g", Collector(), consumer="c", stop=stop, max_records=1)


def test_health_follows_the_polls(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams.log.valkey, "POLL_AGE_LIMIT_S", 0.5)
    log, down = ValkeyLog(client), threading.Event()

    def handler(records: Sequence[Record]) -> None:
        if down.is_set():
            raise Retry("store")

    assert not log.healthy and log.poll_age_s == float("inf")
    with consuming(log, ["t"], handler):
        wait_until(lambda: log.healthy)
        time.sleep(0.6)
        assert log.healthy and log.poll_age_s < 0.5
        down.set()
        log.publish("t", "k", b"1")
        wait_until(lambda: not log.healthy, 2)
        down.clear()
        wait_until(lambda: log.healthy, 5)
    assert not log.healthy


@pytest.mark.parametrize("zone", ["Asia/Kolkata", "America/St_Johns"])
def test_times_are_epoch_milliseconds_in_any_zone(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch, zone: str
) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        reject(ValkeyLog(client), Record("t", "k", b"v", "0-1"), "reason")
    finally:
        monkeypatch.undo()
        time.tzset()
    ((offset, fields),) = client.xrange(stream_key("t.rejected"))
    assert abs(json.loads(fields[b"v"])["time_ms"] - int(offset.split(b"-")[0])) < 10_000


def test_the_throttle_lets_one_through_in_a_period(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr("streams.log.throttle.time.monotonic", lambda: now_s[0])
    throttle, ready = Throttle(), []
    for now_s[0] in (100.0, 100.1, 159.9, 160.0, 219.9, 500.0):
        ready.append(throttle.ready())
    assert ready == [True, False, False, True, False, True]
