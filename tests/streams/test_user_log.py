from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.rows import LOG_ROW
from streams.user_log import OfflineUserLog, UserLog

USERS = [0, 7, 2**64 - 1]
EVENT = st.tuples(
    st.sampled_from(USERS),
    st.sampled_from([0, 1, 255, 256, 2**64 - 1]),
    st.sampled_from([-5, 0, 1, 2, 1_700_000_000_000]),
    st.integers(0, 2),
    st.sampled_from([0.0, 0.25]),
)
BEFORE = [-5, -4, 0, 1, 2, 3, 1_700_000_000_000, 1_700_000_000_001, 2**53]


def split(events: list[tuple[int, int, int, int, float]]) -> tuple[np.ndarray, np.ndarray]:
    users = np.array([event[0] for event in events], np.uint64)
    return users, np.array([(*event[1:], 1, 2) for event in events], dtype=LOG_ROW)


def expected(users: np.ndarray, rows: np.ndarray, user: int, before_ms: int, limit: int) -> bytes:
    mine = {row.tobytes(): row for row, owner in zip(rows, users, strict=True) if int(owner) == user}
    mine = [row for row in mine.values() if row["time_ms"] < before_ms]
    mine.sort(key=lambda row: (int(row["time_ms"]), int(row["event_id"]), row.tobytes()))
    return b"".join(row.tobytes() for row in mine[max(len(mine) - limit, 0) :])


@settings(max_examples=60)
@given(
    events=st.lists(EVENT, max_size=25),
    data=st.data(),
    max_events=st.sampled_from([1, 3, 100]),
)
def test_online_equals_offline_for_any_order_duplication_and_batching(
    client: redis.Redis, events: list[tuple[int, int, int, int, float]], data: st.DataObject, max_events: int
) -> None:
    client.flushall()
    online, (users, rows) = UserLog(client, max_events=max_events), split(events)
    arrivals = data.draw(
        st.permutations(events + data.draw(st.lists(st.sampled_from(events), max_size=8)) if events else [])
    )
    size = data.draw(st.integers(1, 10))
    for start in range(0, len(arrivals), size):
        online.append(*split(arrivals[start : start + size]))
    offline = OfflineUserLog.from_rows(*split(data.draw(st.permutations(arrivals))))
    limits = [0, 1, max_events]
    for limit in limits:
        pairs = [(user, before) for user in [*USERS, 12345] for before in BEFORE]
        asked, before_ms = np.array([p[0] for p in pairs], np.uint64), np.array([p[1] for p in pairs], np.int64)
        found, offsets = offline.histories(asked, before_ms, limit)
        assert offsets.dtype == np.int64 and offsets[0] == 0 and offsets[-1] == len(found)
        for i, (user, before) in enumerate(pairs):
            wanted = expected(users, rows, user, before, limit)
            assert found[offsets[i] : offsets[i + 1]].tobytes() == wanted
            assert offline.history(user, before, limit).tobytes() == wanted
            if before == BEFORE[-1] or max_events == 100:  # a log that was trimmed knows only its newest events
                assert online.history(user, before, limit).tobytes() == wanted
        if max_events == 100:
            both = online.histories(asked, before_ms, limit)
            assert both[0].dtype == LOG_ROW and both[0].tobytes() == found.tobytes()
            assert both[1].tolist() == offsets.tolist()
    assert all(client.zcard(key) <= max_events for key in client.scan_iter())


def test_append_counts_new_rows_once(client: redis.Redis) -> None:
    log, (users, rows) = UserLog(client), split([(7, 1, 10, 0, 0.0), (7, 2, 10, 0, 0.0), (0, 1, 10, 0, 0.0)])
    assert log.append(np.repeat(users, 2), np.repeat(rows, 2)) == 3
    assert log.append(users, rows) == 0


def test_sizes_that_are_forgotten_within_a_batch_are_not_asked_for(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streams.user_log.KEPT_SIZES", 3)
    log, rows = UserLog(client, max_events=100), np.zeros(2, LOG_ROW)
    for user in (5, 6, 7):
        rows["event_id"] = [user, user + 100]
        assert log.append(np.full(2, user, np.uint64), rows) == 2
    rows["event_id"] = [1, 2]
    assert log.append(np.array([1, 5], np.uint64), rows) == 2, "user 1 takes the place of user 5 first"
    assert len(log.history(5, 1, 10)) == 3


def test_empty_inputs(client: redis.Redis) -> None:
    log = UserLog(client)
    nobody, never = np.empty(0, np.uint64), np.empty(0, np.int64)
    assert log.append(nobody, np.empty(0, LOG_ROW)) == 0
    for some in (log, OfflineUserLog.from_rows(nobody, np.empty(0, LOG_ROW))):
        rows, offsets = some.histories(nobody, never, 10)
        assert rows.dtype == LOG_ROW and len(rows) == 0 and offsets.tolist() == [0]
        rows, offsets = some.histories(np.array([3], np.uint64), np.array([9], np.int64), 10)
        assert rows.dtype == LOG_ROW and len(rows) == 0 and offsets.tolist() == [0, 0]


def test_one_pipeline_with_other_reads(client: redis.Redis) -> None:
    log = UserLog(client)
    log.append(*split([(7, 1, 10, 4, 0.0), (7, 2, 20, 5, 0.0)]))
    client.set("other", b"x")
    pipe = client.pipeline(transaction=False)
    pipe.get("other")
    log.queue_history(pipe, 7, 20, 5)
    other, reply = pipe.execute()
    assert other == b"x" and log.decode_history(reply)["ad"].tolist() == [4]


def test_illegal_limits_are_refused(client: redis.Redis) -> None:
    log = UserLog(client, max_events=10)
    with pytest.raises(ValueError, match="limit is -1"):
        log.history(7, 0, -1)
    with pytest.raises(ValueError, match="limit 11 is above max_events 10"):
        log.history(7, 0, 11)
    with pytest.raises(ValueError, match="limit is -1"):
        OfflineUserLog.from_rows(*split([])).history(7, 0, -1)
    with pytest.raises(ValueError, match="max_events is 0"):
        UserLog(client, max_events=0)
    with pytest.raises(ValueError, match="must have one length"):
        OfflineUserLog.from_rows(*split([])).histories(np.zeros(2, np.uint64), np.zeros(1, np.int64), 1)


def test_a_user_with_more_than_ten_thousand_events(client: redis.Redis) -> None:
    rng = np.random.default_rng(0)
    rows = np.zeros(12_000, LOG_ROW)
    rows["event_id"], rows["time_ms"] = rng.permutation(12_000), rng.integers(0, 5_000, 12_000)
    users = np.full(12_000, 7, np.uint64)
    log, offline = UserLog(client), OfflineUserLog.from_rows(users, rows)
    for part in np.array_split(rng.permutation(12_000), 7):
        log.append(users[part], rows[part])
    assert client.zcard("{u:0000000000000007}:log") == 10_000
    assert log.history(7, 10_000, 10_000).tobytes() == offline.history(7, 10_000, 10_000).tobytes()
    assert log.history(7, 3_000, 1_000).tobytes() == offline.history(7, 3_000, 1_000).tobytes()


def test_parquet_holds_every_field(tmp_path: Path) -> None:
    users = np.array([2**64 - 1, 0, 2**64 - 1], np.uint64)
    rows = np.array(
        [(2**64 - 1, -3, 2**64 - 1, 0.1, 65535, 255), (1, 2, 3, -0.0, 0, 0), (5, -3, 1, 1e30, 1, 1)], dtype=LOG_ROW
    )
    log = OfflineUserLog.from_rows(users, rows)
    log.to_parquet(tmp_path / "log.parquet")
    again = OfflineUserLog.from_parquet(tmp_path / "log.parquet")
    assert again.rows.tobytes() == log.rows.tobytes() and again.users.tolist() == log.users.tolist()
    assert again.history(2**64 - 1, 0, 5)["event_id"].tolist() == [5, 2**64 - 1]
    pl.read_parquet(tmp_path / "log.parquet").reverse().write_parquet(tmp_path / "reversed.parquet")
    assert OfflineUserLog.from_parquet(tmp_path / "reversed.parquet").rows.tobytes() == log.rows.tobytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda frame: frame.drop("ad", "surface"), "no column ad, surface"),
        (lambda frame: frame.with_columns(time_ms=pl.Series([1, None])), "column time_ms has a null in row 1"),
        (lambda frame: frame.with_columns(user=pl.Series([1, -1])), "column user .Int64. is not UInt64"),
        (lambda frame: frame.with_columns(actions=pl.Series([70_000, 1])), "column actions .Int64. is not UInt16"),
    ],
)
def test_parquet_that_does_not_fit_is_refused(tmp_path: Path, change: object, message: str) -> None:
    log = OfflineUserLog.from_rows(*split([(7, 1, 10, 0, 0.0), (7, 2, 10, 0, 0.0)]))
    path = tmp_path / "log.parquet"
    log.to_parquet(path)
    change(pl.read_parquet(path)).write_parquet(path)  # type: ignore[operator]
    with pytest.raises(ValueError, match=message):
        OfflineUserLog.from_parquet(path)


def test_offline_histories_need_no_loop_per_request() -> None:
    rng = np.random.default_rng(0)
    n = 200_000
    rows = np.zeros(n, LOG_ROW)
    rows["event_id"], rows["time_ms"] = np.arange(n), rng.integers(0, 10**12, n)
    users = rng.integers(0, 5_000, n).astype(np.uint64)
    log = OfflineUserLog.from_rows(users, rows)
    asked, before_ms = rng.integers(0, 6_000, n).astype(np.uint64), rng.integers(0, 10**12, n)
    start_s = time.process_time()
    found, offsets = log.histories(asked, before_ms, 10)
    assert time.process_time() - start_s < 1  # .2 in fact; calling history() for each takes 6
    for i in rng.integers(0, n, 50):
        mine = np.sort(rows["time_ms"][(users == asked[i]) & (rows["time_ms"] < before_ms[i])])[-10:]
        assert found["time_ms"][offsets[i] : offsets[i + 1]].tolist() == mine.tolist()
