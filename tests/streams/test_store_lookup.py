from __future__ import annotations

import numpy as np
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from streams.levels import Level
from streams.store import EmbeddingStore, Rows, lookup

TTL_MS, FAILOVER_TTL_MS, NOW_MS = 10, 30, 1_700_000_000_000


def rows_of(items: list[tuple[int, int, int]]) -> Rows:
    ads, ages, versions = ([item[i] for item in items] for i in range(3))
    state_ms = NOW_MS - np.array(ages, np.int64)
    return Rows(
        np.array(ads, np.uint64), state_ms, np.array(versions, np.uint64), np.zeros((len(items), 1), np.float32)
    )


@pytest.mark.parametrize(
    ("age_ms", "level"),
    [
        (-1, Level.NONE),
        (0, Level.NONE),  # an event at the time of the request is not before it
        (1, Level.PAIR_FRESH),
        (10, Level.PAIR_FRESH),
        (11, Level.PAIR_STALE),
        (30, Level.PAIR_STALE),
        (31, Level.NONE),
        (2**40, Level.NONE),
    ],
)
def test_edges_of_the_ttls(age_ms: int, level: Level) -> None:
    index, levels, ages = lookup(
        rows_of([(5, age_ms, 1)]), np.array([5], np.uint64), NOW_MS, 1, TTL_MS, FAILOVER_TTL_MS
    )
    assert levels.tolist() == [level]
    assert (index.tolist(), ages.tolist()) == (([-1], [0]) if level is Level.NONE else ([0], [age_ms]))


@given(
    items=st.lists(
        st.tuples(
            st.sampled_from([0, 1, 2, 3, 2**63, 2**64 - 1]), st.integers(-2, 40), st.sampled_from([1, 2**64 - 1])
        ),
        unique_by=lambda item: item[0],
    ),
    ads=st.lists(st.sampled_from([0, 1, 2, 3, 4, 2**63, 2**63 + 1, 2**64 - 1])),
    version=st.sampled_from([1, 2**64 - 1, 2**64 - 2]),
)
def test_lookup_equals_its_definition(items: list[tuple[int, int, int]], ads: list[int], version: int) -> None:
    index, levels, ages = lookup(rows_of(items), np.array(ads, np.uint64), NOW_MS, version, TTL_MS, FAILOVER_TTL_MS)
    assert (index.dtype, levels.dtype, ages.dtype) == (np.int64, np.uint8, np.int64)
    assert len(index) == len(levels) == len(ages) == len(ads)
    for i, ad in enumerate(ads):
        expected = (-1, Level.NONE, 0)
        for row, (row_ad, age_ms, row_version) in enumerate(items):
            if row_ad == ad and row_version == version and 0 < age_ms <= FAILOVER_TTL_MS:
                expected = (row, Level.PAIR_FRESH if age_ms <= TTL_MS else Level.PAIR_STALE, age_ms)
        assert (index[i], levels[i], ages[i]) == expected


def test_a_store_looks_up_with_its_own_ttls(client: redis.Redis) -> None:
    store = EmbeddingStore(client, kind="pairs", dim=1, ttl_ms=TTL_MS, failover_ttl_ms=FAILOVER_TTL_MS)
    rows, ads = rows_of([(1, 10, 1), (2, 11, 1), (3, 31, 1)]), np.array([3, 2, 1], np.uint64)
    assert store.lookup(rows, ads, NOW_MS, 1)[1].tolist() == [Level.NONE, Level.PAIR_STALE, Level.PAIR_FRESH]
    assert store.lookup(rows, ads, NOW_MS, 1, 5, 10)[1].tolist() == [Level.NONE, Level.NONE, Level.PAIR_STALE]
    assert store.lookup(rows, ads, NOW_MS, 1, 50, 50)[1].tolist() == [Level.PAIR_FRESH] * 3


def test_an_expired_row_of_the_store_is_served_as_none(client: redis.Redis) -> None:
    store = EmbeddingStore(client, kind="pairs", dim=1, ttl_ms=TTL_MS, failover_ttl_ms=60_000)
    store.write([7], [rows_of([(1, 1, 1)])])
    found = store.read(7)  # the server still has it
    index, level, age_ms = store.lookup(found, np.array([1], np.uint64), NOW_MS + 60_000, 1)
    assert (index.tolist(), level.tolist(), age_ms.tolist()) == ([-1], [Level.NONE], [0])
    assert store.lookup(found, np.array([1], np.uint64), NOW_MS + 59_999, 1)[1].tolist() == [Level.PAIR_STALE]
