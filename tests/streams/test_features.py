from __future__ import annotations

import numpy as np
import pytest

from streams.features import USER_ROW, FmLayout, resolve, resolve_rows
from streams.levels import Level
from streams.store import Rows

LAYOUT = FmLayout(z_dim=2, user_dim=2, num_objectives=1, ttl_ms=100, failover_ttl_ms=300)
PAIR = np.array([[1, 2, 3, 7]], np.float32)  # z, logit, surface 7
USER = np.array([[8, 9, 4, 5, 6, 7, 1]], np.float32)  # user, aggregate, it exists


def level_at(pair_age: int, user_age: int, user: np.ndarray = USER) -> tuple[Level, int, list[float]]:
    found = resolve(PAIR, np.array([pair_age]), user, np.array([user_age]), 7, LAYOUT)
    return Level(found.level[0]), int(found.age_ms[0]), found.pair[0].tolist()


@pytest.mark.parametrize(
    ("pair_age", "user_age", "level", "age", "pair"),
    [
        (1, 50, Level.PAIR_FRESH, 1, [1, 2, 3]),
        (100, 50, Level.PAIR_FRESH, 100, [1, 2, 3]),
        (101, 50, Level.PAIR_STALE, 101, [1, 2, 3]),
        (300, 50, Level.PAIR_STALE, 300, [1, 2, 3]),
        (301, 50, Level.USER_AGGREGATE, 50, [4, 5, 6]),
        (0, 50, Level.USER_AGGREGATE, 50, [4, 5, 6]),
        (-1, 300, Level.USER_AGGREGATE, 300, [4, 5, 6]),
        (-1, 301, Level.NONE, -1, [0, 0, 0]),
        (-1, -1, Level.NONE, -1, [0, 0, 0]),
    ],
)
def test_levels_are_walked_in_order(pair_age: int, user_age: int, level: Level, age: int, pair: list[float]) -> None:
    assert level_at(pair_age, user_age) == (level, age, pair)


def test_a_user_without_pairs_gives_his_own_embedding_only() -> None:
    lonely = USER.copy()
    lonely[0, -1] = 0
    assert level_at(-1, 5, lonely) == (Level.USER, 5, [0, 0, 0])


def test_the_surface_of_the_row_is_compared_with_the_one_that_asks() -> None:
    for surface, expected in ((7, 1.0), (3, 0.0)):
        for pair_age in (1, -1):
            assert resolve(PAIR, np.array([pair_age]), USER, np.array([5]), surface, LAYOUT).same_surface[0] == expected
    assert resolve(PAIR, np.array([-1]), USER, np.array([-1]), 7, LAYOUT).same_surface[0] == 0.0


def rows(ads: list[int], state_ms: int, version: int, vectors: np.ndarray) -> Rows:
    return Rows(
        np.array(ads, np.uint64), np.full(len(ads), state_ms, np.int64), np.full(len(ads), version, np.uint64), vectors
    )


def test_rows_of_another_version_or_of_this_very_moment_are_not_used() -> None:
    pairs, user = rows([10, 20], 1_000, 5, np.repeat(PAIR, 2, 0)), rows([USER_ROW], 1_000, 5, USER)
    ads = np.array([20, 30], np.uint64)
    assert resolve_rows(pairs, user, ads, 7, 1_001, 5, LAYOUT).level.tolist() == [
        Level.PAIR_FRESH,
        Level.USER_AGGREGATE,
    ]
    for now_ms, version in ((1_000, 5), (1_001, 6), (999, 5)):
        found = resolve_rows(pairs, user, ads, 7, now_ms, version, LAYOUT)
        assert found.level.tolist() == [Level.NONE, Level.NONE]
        assert not found.pair.any()
        assert not found.user.any()


def test_nothing_stored_resolves_to_nothing() -> None:
    empty = Rows.empty(LAYOUT.pair_dim), Rows.empty(LAYOUT.user_row_dim)
    found = resolve_rows(*empty, np.array([1, 2, 3], np.uint64), 7, 10, 5, LAYOUT)
    assert found.level.tolist() == [0, 0, 0]
    assert found.pair.shape == (3, 3)
    assert found.user.shape == (1, 2)
