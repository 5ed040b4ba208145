from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import redis

from streams.dataset import Dataset
from streams.errors import UserError
from streams.events import ACTIVITY_TOPIC, decode_event, encode_event, event_rows
from streams.log import Record, reject
from streams.log.address import open_log
from streams.log.valkey import ValkeyLog
from streams.rows import user_key
from streams.store import EmbeddingStore, Rows
from streams.tools import events_of, inspect_topics, inspect_user, lines_of, produce, replay
from streams.user_log import UserLog


def collected(client: redis.Redis, topic: str = ACTIVITY_TOPIC) -> list[bytes]:
    return [fields[b"v"] for _, fields in client.xrange(f"{{log}}:{topic}")]


def test_lines_are_published_and_bad_ones_refused_with_their_reason(client: redis.Redis, dataset: Dataset) -> None:
    good = [encode_event(event) for event in list(events_of(dataset))[:5]]
    bad = good[0].replace(b'"surface":"', b'"surface":"moon')
    result = produce(ValkeyLog(client), [good[0], b"{", b"", *good[1:], bad], dataset.schema)
    assert (result.published, result.refused) == (5, 2)
    assert result.reasons[0].startswith("line 2: not an activity event")
    assert result.reasons[1].startswith("line 8: unknown surface") and "legal values: 0, 1, 2" in result.reasons[1]
    assert collected(client) == good


def test_rows_of_a_parquet_file_are_published_like_lines(client: redis.Redis, dataset: Dataset, tmp_path: Path) -> None:
    events = list(events_of(dataset))[:5]
    rows = [{name: getattr(event, name) for name in event.__struct_fields__} for event in events]
    rows[1] |= {"user_id": None}
    rows[2] |= {"value": None}
    path = tmp_path / "events.parquet"
    pl.DataFrame(rows).write_parquet(path)
    with lines_of(str(path)) as lines:
        result = produce(ValkeyLog(client), lines, dataset.schema)
    assert (result.published, result.refused) == (4, 1)
    assert "user_id" in result.reasons[0] and result.reasons[0].startswith("line 2")
    found = [decode_event(value) for value in collected(client)]
    assert found[0] == events[0] and found[2:] == events[3:]
    assert found[1].value == 0.0, "an empty cell is an absent field"
    (tmp_path / "bad.parquet").write_bytes(b"no")
    with (
        pytest.raises(UserError, match=r"bad\.parquet is no Parquet file"),
        lines_of(str(tmp_path / "bad.parquet")) as lines,
    ):
        list(lines)


def test_a_replayed_log_arrives_event_for_event(client: redis.Redis, dataset: Dataset) -> None:
    times = dataset.rows["time_ms"]
    start, end = int(times[1_000]), int(times[3_500])
    number = replay(ValkeyLog(client), events_of(dataset, start, end), None)
    inside = (times >= start) & (times < end)
    assert number == int(inside.sum())
    users, rows = event_rows([decode_event(value) for value in collected(client)], dataset.schema)
    assert users.tolist() == dataset.users[inside].tolist()
    assert rows.tolist() == dataset.rows[inside].tolist()


def test_speed_stretches_time(client: redis.Redis, dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    monkeypatch.setattr("streams.tools.time.sleep", sleep)
    monkeypatch.setattr("streams.tools.time.monotonic", lambda: now)
    events = list(events_of(dataset))[:50]
    replay(ValkeyLog(client), events, 100.0)
    assert sum(slept) == pytest.approx((events[-1].time_ms - events[0].time_ms) / 1e3 / 100)
    with pytest.raises(UserError, match="positive"):
        replay(ValkeyLog(client), events, 0.0)


def test_inspection_shows_lag_rejections_and_a_user(client: redis.Redis, dataset: Dataset) -> None:
    log = ValkeyLog(client)
    replay(log, list(events_of(dataset))[:30], None)
    log.publish(f"{ACTIVITY_TOPIC}.rejected", "x", b"{}")
    for number in range(7):
        reject(log, Record(ACTIVITY_TOPIC, "y", b"?", "0"), f"reason {number}")
    topics = inspect_topics(log, "solaris")
    errors = topics["activity"].pop("last_errors")
    assert topics["activity"] == {"published": 30, "lag": 30, "rejected": 8}
    assert topics["served"] == {"published": 0, "lag": 0, "rejected": 0, "last_errors": []}
    assert {error["reason"] for error in errors} == {f"reason {number}" for number in range(2, 7)}
    assert all(error["key"] == "y" and error["time_ms"] > 0 for error in errors)
    mine = dataset.users == dataset.users[0]
    UserLog(client).append(dataset.users[mine], dataset.rows[mine])
    found = inspect_user(client, int(dataset.raw_users[0]), dataset.schema)
    assert found["events"] == int(mine.sum())
    assert [entry["time_ms"] for entry in found["newest"]] == dataset.rows["time_ms"][mine][::-1][:20].tolist()
    assert found["rows"] == {"pairs": None, "user": None, "slate": None}
    user = int(dataset.users[0])
    ads = np.array([1, 2], np.uint64)
    rows = Rows(ads, np.array([5, 7]), np.array([9, 9], np.uint64), np.zeros((2, 3), np.float32))
    EmbeddingStore(client, kind="pairs", dim=3, ttl_ms=1, failover_ttl_ms=60_000).write([user], [rows])
    client.set(user_key(user, "slate"), b"junk")
    found = inspect_user(client, int(dataset.raw_users[0]), dataset.schema)
    pairs = found["rows"]["pairs"]
    assert (pairs["rows"], pairs["oldest_state_ms"], pairs["newest_state_ms"]) == (2, 5, 7)
    assert pairs["versions"] == {"0000000000000009": 2}
    assert found["rows"]["slate"] == {"bytes": 4, "unreadable": "4 bytes are no header"}
    assert json.loads(json.dumps(found)) == found
    assert inspect_user(client, "nobody", dataset.schema)["events"] == 0


def test_an_address_of_another_scheme_is_refused() -> None:
    with pytest.raises(UserError, match="legal values: kafka://, redis://"):
        open_log("amqp://localhost")
