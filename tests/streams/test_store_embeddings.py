from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

import streams.codec
import streams.store
from streams.store import EmbeddingStore, Rows, StoreContentionError, write_seen
from streams.user_log import UserLog

DIM = 3
KEY = "{u:0000000000000007}:pairs"
Item = tuple[int, int, int, float]
# One ad, state and version is one computation: its value follows from them.
ITEM = st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(1, 2)).map(
    lambda key: (*key, ((key[0] * 31 + key[1] * 7 + key[2] * 3) % 17) / 17 - 0.5)
)
BATCH = st.lists(ITEM, min_size=1, max_size=4)


def store_of(client: redis.Redis, **options: Any) -> EmbeddingStore:
    defaults: dict[str, Any] = {"kind": "pairs", "dim": DIM, "ttl_ms": 1_000, "failover_ttl_ms": 60_000}
    return EmbeddingStore(client, **(defaults | options))


def rows_of(items: Sequence[Item]) -> Rows:
    vectors = np.array([[item[3], item[0], -0.1] for item in items], np.float32).reshape(-1, DIM)
    ads, state_ms, versions = ([item[i] for item in items] for i in range(3))
    return Rows(np.array(ads, np.uint64), np.array(state_ms, np.int64), np.array(versions, np.uint64), vectors)


def same(one: Rows, other: Rows) -> bool:
    return all(
        getattr(one, name).tobytes() == getattr(other, name).tobytes()
        for name in ("ads", "state_ms", "versions", "vectors")
    )


def expected(items: Sequence[Item], max_rows: int) -> list[tuple[int, int, int]]:
    best: dict[int, tuple[int, int]] = {}
    for ad, state_ms, version, _ in items:
        best[ad] = max(best.get(ad, (-1, 0)), (state_ms, version))
    kept = sorted(((state_ms, ad, version) for ad, (state_ms, version) in best.items()), reverse=True)[:max_rows]
    return sorted((ad, state_ms, version) for state_ms, ad, version in kept)


def columns(rows: Rows) -> list[tuple[int, int, int]]:
    return list(zip(rows.ads.tolist(), rows.state_ms.tolist(), rows.versions.tolist(), strict=True))


class Interrupted(EmbeddingStore):
    """A writer that others come between, after its read and before its write."""

    interruptions: list[Callable[[], object]]

    def raw_many(self, users: Any) -> list[bytes | None]:
        replies = super().raw_many(users)
        if self.interruptions:
            self.interruptions.pop(0)()
        return replies


def test_of_two_rows_for_one_state_the_later_written_stays(client: redis.Redis) -> None:
    store = store_of(client)
    for value in (0.25, -0.5, 0.125):
        rows = rows_of([(1, 10, 5, 0.0)])
        rows.vectors[0, 0] = value
        store.write([7], [rows])
        assert store.read(7).vectors[0, 0] == value


@pytest.mark.parametrize("dtype", ["f16", "int8"])
@settings(max_examples=80)
@given(
    batches=st.lists(BATCH, min_size=1, max_size=5),
    between=st.lists(BATCH, max_size=4),
    data=st.data(),
    max_rows=st.sampled_from([1, 2, 100]),
)
def test_any_order_and_interleaving_of_two_writers_gives_one_state(
    client: redis.Redis,
    dtype: str,
    batches: list[list[Item]],
    between: list[list[Item]],
    data: st.DataObject,
    max_rows: int,
) -> None:
    everything = [item for batch in batches + between for item in batch]
    client.flushall()
    at_once = store_of(client, dtype=dtype, max_rows=max_rows)
    at_once.write([7], [rows_of(everything)])
    reference = at_once.read(7)

    client.flushall()
    other = store_of(client, dtype=dtype, max_rows=max_rows)
    writer = Interrupted(
        client, kind="pairs", dim=DIM, dtype=dtype, max_rows=max_rows, ttl_ms=1, failover_ttl_ms=60_000
    )  # type: ignore[arg-type]
    writer.interruptions = [lambda batch=batch: other.write([7], [rows_of(batch)]) for batch in between]
    for batch in data.draw(st.permutations(batches)):
        writer.write([7], [rows_of(data.draw(st.permutations(batch)))])
    while writer.interruptions:
        writer.interruptions.pop()()
    for batch in data.draw(st.lists(st.sampled_from(batches), max_size=2)):  # redelivered
        assert other.write([7], [rows_of(batch)]) == 0

    found = other.read(7)
    assert columns(found) == expected(everything, max_rows)
    assert same(found, reference)
    written = rows_of(everything)
    for i, (ad, state_ms, version) in enumerate(columns(found)):
        candidates = [
            v
            for *key, v in zip(written.ads, written.state_ms, written.versions, written.vectors, strict=True)
            if key == [ad, state_ms, version]
        ]
        assert min(np.abs(found.vectors[i] - v).max() for v in candidates) <= (0.001 if dtype == "f16" else 4 / 254)


def test_concurrent_writers_lose_nothing(client: redis.Redis, server: Any) -> None:
    users = list(range(3))
    items = [[(ad, 1 + (ad * writer) % 7, writer, 0.5) for ad in range(40)] for writer in range(1, 5)]

    def write(writer: int) -> None:
        with server.client() as own:
            store = store_of(own)
            for item in items[writer]:
                store.write(users, [rows_of([item])] * len(users))

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store = store_of(client)
    for found in store.read_many(users):
        assert columns(found) == expected([item for part in items for item in part], 512)


def test_a_writer_that_always_loses_gives_up(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams.store, "WRITE_ATTEMPTS", 3)
    other = store_of(client)
    writer = Interrupted(client, kind="pairs", dim=DIM, ttl_ms=1, failover_ttl_ms=60_000)
    writer.interruptions = [lambda i=i: other.write([7], [rows_of([(9, i, 1, 0.5)])]) for i in range(3)]
    with pytest.raises(StoreContentionError, match="one is 7, lost 3 rounds"):
        writer.write([7], [rows_of([(1, 1, 1, 0.5)])])
    assert columns(other.read(7)) == [(9, 2, 1)]


def test_write_counts_users_that_changed_and_merges_repeated_users(client: redis.Redis) -> None:
    store = store_of(client)
    one, two = rows_of([(1, 5, 1, 0.3)]), rows_of([(2, 5, 1, 0.7)])
    assert store.write(np.array([7, 8, 7], np.uint64), [one, one, two]) == 2
    assert [columns(rows) for rows in store.read_many([8, 9, 7])] == [[(1, 5, 1)], [], [(1, 5, 1), (2, 5, 1)]]
    assert store.write([7, 8], [one, two]) == 1


def test_writes_of_many_users_go_in_chunks(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams.store, "WRITE_CHUNK", 3)
    store = store_of(client)
    assert store.write(range(10), [rows_of([(i, i, 1, 0.5)]) for i in range(10)]) == 10
    assert [columns(rows) for rows in store.read_many(range(10))] == [[(i, i, 1)] for i in range(10)]


@pytest.mark.parametrize("dtype", ["f16", "int8"])
def test_vectors_come_back_within_their_precision(client: redis.Redis, dtype: str) -> None:
    rng = np.random.default_rng(0)
    vectors = (rng.normal(size=(500, 64)) * rng.choice([1e-3, 1, 1e3], size=(500, 1))).astype(np.float32)
    vectors[0] = 0
    ids = rng.permutation(500).astype(np.uint64) + np.uint64(2**64 - 500)
    store = store_of(client, dtype=dtype, dim=64)
    store.write([7], [Rows(ids, np.arange(500) - 2**62, ids, vectors)])
    found, order = store.read(7), np.argsort(ids)
    assert found.vectors.dtype == np.float32 and found.ads.tolist() == ids[order].tolist()
    assert found.versions.tolist() == ids[order].tolist() and found.state_ms.tolist() == (order - 2**62).tolist()
    error, peak = np.abs(found.vectors - vectors[order]), np.abs(vectors[order]).max(axis=1, keepdims=True)
    if dtype == "f16":
        assert (found.vectors == vectors[order].astype(np.float16).astype(np.float32)).all()
    else:
        assert (error <= peak / 254 * 1.001).all()
    assert client.strlen(KEY) == 24 + 500 * (26 + (128 if dtype == "f16" else 68))


def test_every_half_is_widened_exactly() -> None:
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)]
    assert (streams.codec._widen(halves).view(np.uint32) == halves.astype(np.float32).view(np.uint32)).all()


@pytest.mark.parametrize(
    ("dtype", "bad"), [("f16", np.nan), ("f16", np.inf), ("f16", 70_000), ("int8", np.nan), ("int8", -np.inf)]
)
def test_vectors_that_are_not_finite_are_refused(client: redis.Redis, dtype: str, bad: float) -> None:
    store = store_of(client, dtype=dtype)
    with pytest.raises(ValueError, match="user 7, ad 2: the vector has a value that is not finite"):
        store.write([6, 7], [rows_of([(1, 1, 1, 0.5)]), rows_of([(1, 1, 1, 0.5), (2, 1, 1, bad)])])
    assert client.dbsize() == 0


def test_empty_inputs(client: redis.Redis) -> None:
    store = store_of(client)
    assert store.write([], []) == 0
    assert store.write([7], [Rows.empty(DIM)]) == 0
    assert client.dbsize() == 0
    assert store.read_many([]) == []
    assert len(store.read(7)) == 0 and store.read(7).vectors.shape == (0, DIM)
    assert store.decode_errors == 0


def test_reading_shares_a_pipeline_with_the_user_log(client: redis.Redis) -> None:
    store, log = store_of(client), UserLog(client)
    store.write([7], [rows_of([(1, 5, 1, 0.3)])])
    pipe = client.pipeline(transaction=False)
    store.queue_read(pipe, 7)
    log.queue_history(pipe, 7, 10, 5)
    store.queue_read(pipe, 8)
    first, history, second = pipe.execute()
    assert columns(store.decode(first)) == [(1, 5, 1)] and len(store.decode(second)) == 0
    assert len(log.decode_history(history)) == 0


def test_kinds_of_one_user_are_apart(client: redis.Redis) -> None:
    store_of(client).write([7], [rows_of([(1, 5, 1, 0.3)])])
    assert len(store_of(client, kind="user").read(7)) == 0
    assert client.keys() == [KEY.encode()]


def test_the_server_forgets_after_the_failover_ttl(client: redis.Redis) -> None:
    store = store_of(client, failover_ttl_ms=60_000)
    store.write([7], [rows_of([(1, 5, 1, 0.3)])])
    assert 50_000 < client.pttl(KEY) <= 60_000
    client.pexpire(KEY, 1_000)
    store.write([7], [rows_of([(1, 6, 1, 0.3)])])
    assert 50_000 < client.pttl(KEY) <= 60_000


@pytest.mark.parametrize(
    "damage",
    [
        lambda value: value[:-1],
        lambda value: value[:24],
        lambda value: value[:10],
        lambda value: b"",
        lambda value: value + b"\0",
        lambda value: b"XXXX" + value[4:],
        lambda value: value[:4] + b"\x01" + value[5:],
        lambda value: value[:5] + b"\x02" + value[6:],
        lambda value: value[:6] + b"\x04" + value[7:],
        lambda value: value[:8] + b"\xff\xff\xff\xff" + value[12:],
    ],
)
def test_an_unreadable_value_is_empty_counted_logged_once_and_replaced(
    client: redis.Redis, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    store = store_of(client)
    store.write([7], [rows_of([(1, 5, 1, 0.3)])])
    value = client.get(KEY)
    client.set(KEY, damage(value))
    with caplog.at_level(logging.WARNING):
        assert len(store.read(7)) == 0 and len(store.read(7)) == 0
    assert store.decode_errors == 2
    assert len(caplog.records) == 1 and "store pairs: unreadable value no. 1" in caplog.text
    assert store.write([7], [rows_of([(2, 1, 1, 0.7)])]) == 1
    assert columns(store.read(7)) == [(2, 1, 1)]
    assert store.decode_errors == 3


def test_readers_of_another_width_or_dtype_see_nothing(client: redis.Redis) -> None:
    store_of(client).write([7], [rows_of([(1, 5, 1, 0.3)])])
    for other in (store_of(client, dim=DIM + 1), store_of(client, dtype="int8")):
        assert len(other.read(7)) == 0 and other.decode_errors == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "f32"}, "dtype is 'f32'; legal values: 'f16', 'int8'"),
        ({"dim": 0}, "dim is 0"),
        ({"dim": 65_536}, "dim is 65536"),
        ({"max_rows": 0}, "max_rows is 0"),
        ({"ttl_ms": 0}, "found 0 and 60000"),
        ({"ttl_ms": 60_001}, "found 60001 and 60000"),
    ],
)
def test_illegal_options(client: redis.Redis, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        store_of(client, **options)


def test_shapes_that_do_not_fit_are_refused(client: redis.Redis) -> None:
    store = store_of(client)
    rows = rows_of([(1, 5, 1, 0.3)])
    with pytest.raises(ValueError, match="2 users but 1 rows"):
        store.write([7, 8], [rows])
    with pytest.raises(ValueError, match=r"user 7: .*vectors \(1, 2\) do not fit n rows of dim 3"):
        store.write([7], [Rows(rows.ads, rows.state_ms, rows.versions, rows.vectors[:, :2])])
    with pytest.raises(ValueError, match=r"user 7: .*state_ms \(2,\)"):
        store.write([7], [Rows(rows.ads, np.zeros(2, np.int64), rows.versions, rows.vectors)])
    assert client.dbsize() == 0


def test_at_the_bound_the_rows_worth_most_stay(client: redis.Redis) -> None:
    """Worth halves with age: an old row stays only if it was worth enough more than the new ones."""
    store = store_of(client, max_rows=3)
    hours = streams.store.WORTH_HALF_LIFE_MS
    worth = {1: 16.0, 2: 2.0, 3: 0.25, 4: 1.0, 5: 8.0}
    state_ms = {1: 0, 2: hours, 3: 3 * hours, 4: 2 * hours, 5: 2 * hours}
    # Gain now, one half-life a step: 16/8, 2/4, .25/1, 1/2 and 8/2, the second and fourth alike but for the greater ad.
    orders = [[1, 2, 3, 4, 5], [5, 4, 3, 2, 1], [3, 1, 5, 2, 4]]
    for order in orders:
        client.flushall()
        for ad in order:
            rows = rows_of([(ad, state_ms[ad], 1, 0.5)])
            store.write(
                [7], [Rows(rows.ads, rows.state_ms, rows.versions, rows.vectors, np.array([worth[ad]], np.float32))]
            )
        assert store.read(7).ads.tolist() == [1, 4, 5], order


def test_rows_of_replaced_models_go_with_the_next_write(client: redis.Redis) -> None:
    old, new = store_of(client), store_of(client)
    new.retired = frozenset({9})
    old.write([7, 8], [rows_of([(1, 50, 9, 0.5), (2, 50, 9, 0.5)]), rows_of([(1, 50, 9, 0.5)])])
    new.write([7], [rows_of([(2, 50, 3, 0.25)])])
    assert columns(new.read(7)) == [(2, 50, 3)], "whatever the order of the two versions"
    assert columns(new.read(8)) == [(1, 50, 9)], "not written yet"


def test_an_ad_that_is_written_twice_at_once_is_stored_once(client: redis.Redis) -> None:
    store = store_of(client)
    best_first, newer = rows_of([(9, 1, 1, 0.5), (3, 1, 1, 0.5), (5, 1, 1, 0.5)]), rows_of([(3, 2, 1, 0.5)])
    assert store.write([7, 7], [best_first, newer]) == 1
    assert columns(store.read(7)) == [(3, 2, 1), (5, 1, 1), (9, 1, 1)]


def test_what_was_read_before_is_written_unless_another_came_between(client: redis.Redis) -> None:
    pairs, others = store_of(client), EmbeddingStore(client, kind="user", dim=DIM, ttl_ms=1, failover_ttl_ms=60_000)
    pairs.write([7], [rows_of([(1, 1, 1, 0.5)])])
    seen, none = pairs.raw_many([7, 8]), [None, None]
    new, own = [rows_of([(2, 2, 1, 0.5)]), rows_of([(3, 2, 1, 0.5)])], [rows_of([(0, 2, 1, 0.5)]), rows_of([])]
    assert write_seen([(pairs, new, seen), (others, own, none)], [7, 8]) == []
    assert columns(pairs.read(7)) == [(1, 1, 1), (2, 2, 1)]
    assert columns(others.read(7)) == [(0, 2, 1)]
    assert columns(pairs.read(8)) == [(3, 2, 1)]

    late = [rows_of([(4, 3, 1, 0.5)])]
    assert write_seen([(pairs, late, pairs.raw_many([7])), (others, late, [None])], [7]) == [7], "of the second kind"
    assert columns(pairs.read(7)) == [(1, 1, 1), (2, 2, 1)], "nor of the first"
    assert write_seen([(pairs, new[:1], pairs.raw_many([7]))], [7]) == [], "nothing to write is nothing lost"
